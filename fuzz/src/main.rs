//! Writes the seeds of every target: `seeds FOLDER`, as `cargo xtask fuzz --write-seeds` does.

use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).ok_or(io::ErrorKind::InvalidInput)?;
    for (target, name, bytes) in connex_fuzz::seeds::all() {
        let folder = Path::new(&folder).join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
