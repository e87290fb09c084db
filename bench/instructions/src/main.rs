//! What `cargo xtask bench-instructions` runs under callgrind: an operation over the built-in transport on loopback, many times. Both engines are in
//! this process and driven by hand, so that the same instructions run each time.
//!
//! The functions of `sides` are what is counted: what runs outside of them is set-up or the measurement's own.

// A program for scripts: its output is its purpose.
#![allow(clippy::print_stderr)]

#[cfg(by_hand)]
mod operations;
#[cfg(by_hand)]
mod sides;

#[cfg(by_hand)]
fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, count] = &args[..] else {
        eprintln!("usage: connex-instructions OPERATION COUNT");
        return std::process::ExitCode::FAILURE;
    };
    match operations::run(name, count) {
        // Without closing the engines: that wants a progress thread.
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1)
        }
    }
}

#[cfg(not(by_hand))]
fn main() -> std::process::ExitCode {
    eprintln!("built without `--cfg by_hand`: run `cargo xtask bench-instructions`");
    std::process::ExitCode::FAILURE
}
