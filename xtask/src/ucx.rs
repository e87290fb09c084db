//! The UCX versions that the tests run with.

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::place::Place;
use crate::process::run;
use crate::venv::Venv;

/// Releases of the `libucx-cu12` wheel, oldest first.
pub(crate) const WHEELS: &[&str] = &["1.16.0.post2", "1.18.1", "1.22.0"];

/// The name of the system's UCX among the versions.
pub(crate) const SYSTEM: &str = "system";

/// Every UCX that the tests run with.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    WHEELS.iter().copied().chain([SYSTEM])
}

/// One UCX.
pub(crate) struct Ucx {
    /// What to put into `CONNEX_RS_UCX`.
    pub(crate) lib: PathBuf,
    /// The folder that holds `ucp/api/ucp.h`; wheels only.
    pub(crate) headers: PathBuf,
}

/// The UCX of this name: a release in [`WHEELS`], installed under target/ if it is not there, or [`SYSTEM`].
///
/// # Errors
/// If it cannot be installed or is not where it belongs.
pub(crate) fn get(place: &Place, name: &str) -> Result<Ucx> {
    if name == SYSTEM {
        let lib = system_lib().context(
            "no libucp.so.0 of the system: on Debian and Ubuntu `apt-get install libucx0`",
        )?;
        return Ok(Ucx {
            lib,
            headers: PathBuf::new(),
        });
    }
    let dir = place.target.join("ucx").join(name);
    let package = dir.join("libucx");
    let ucx = Ucx {
        lib: package.join("lib"),
        headers: package.join("include"),
    };
    let file = ucx.lib.join("libucp.so.0");
    if !file.is_file() {
        let _ = fs::remove_dir_all(&dir);
        run(Venv::tools(place)?
            .python(place)
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
            ])
            .arg("--target")
            .arg(&dir)
            .arg(format!("libucx-cu12=={name}")))?;
        if !file.is_file() {
            bail!("libucx-cu12 {name} has no {}", file.display());
        }
    }
    Ok(ucx)
}

/// The newest release.
pub(crate) fn newest(place: &Place) -> Result<Ucx> {
    match WHEELS.last() {
        Some(name) => get(place, name),
        None => bail!("no version of UCX is named"),
    }
}

/// What `CONNEX_RS_UCX` says, else the newest release.
pub(crate) fn preferred(place: &Place) -> Result<PathBuf> {
    match env::var_os("CONNEX_RS_UCX").filter(|v| !v.is_empty()) {
        Some(named) => Ok(named.into()),
        None => Ok(newest(place)?.lib),
    }
}

/// The system's `libucp.so.0`, where distributions put it.
pub(crate) fn system_lib() -> Option<PathBuf> {
    let arch = env::consts::ARCH;
    [
        format!("/usr/lib/{arch}-linux-gnu"),
        "/usr/lib64".into(),
        "/usr/lib".into(),
    ]
    .into_iter()
    .map(|dir| PathBuf::from(dir).join("libucp.so.0"))
    .find(|file| file.is_file())
}
