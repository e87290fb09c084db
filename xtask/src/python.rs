//! The steps that Python runs.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::place::Place;
use crate::process::{command, output, run};
use crate::ucx;
use crate::venv::{Venv, python};
use crate::wheel;

/// What the tests need besides the wheel.
const REQUIREMENTS: &[&str] = &[
    "mypy==2.4.1",
    "numpy",
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
];

/// The oldest minor version of Python 3 that the wheel is for.
const OLDEST: u32 = 8;

/// What is done under every other Python: import, two engines, a write and a read.
const SMOKE: &str = r#"
import connex_rs, sys
a, b = (connex_rs.Engine("smoke", stage, listen_ip="127.0.0.1", transport="tcp") for stage in (0, 1))
data = bytes(range(256)) * 16
there, back = b.allocate_managed_buffer(len(data)), a.allocate_managed_buffer(len(data))
a.write_bytes_to_buffer(back, data, len(data))
assert a.transfer_sync_write(b.local_url, back, there, len(data)) == 0
a.write_bytes_to_buffer(back, bytes(len(data)), len(data))
assert a.transfer_sync_read(b.local_url, back, there, len(data)) == 0
assert a.read_bytes_from_buffer(back, len(data)) == data
a.close(); b.close()
print("Python", sys.version.split()[0], "ok")
"#;

/// Ruff, on every Python file of the repository.
pub(crate) fn lint(place: &Place) -> Result<()> {
    let tools = Venv::tools(place)?;
    run(tools.command(place, "ruff").args(["check", "."]))?;
    run(tools
        .command(place, "ruff")
        .args(["format", "--check", "."]))
}

/// The type stubs say what the module has.
pub(crate) fn stubs(place: &Place) -> Result<()> {
    run(environment(place)?
        .python(place)
        .args(["-m", "mypy.stubtest", "connex_rs"])
        .env("CONNEX_RS_UCX", ucx::preferred(place)?))
}

/// The Python tests over this UCX; over the built-in transport with the newest only.
pub(crate) fn tests(place: &Place, version: &str) -> Result<()> {
    let transports = if ucx::WHEELS.last() == Some(&version) {
        "tcp,ucx"
    } else {
        "ucx"
    };
    run(environment(place)?
        .python(place)
        .args(["-m", "pytest", "python/tests"])
        .env("CONNEX_TEST_TRANSPORTS", transports)
        .env("CONNEX_RS_UCX", ucx::get(place, version)?.lib))
}

/// A Python program, with the wheel.
pub(crate) fn script(place: &Place, path: &str) -> Result<()> {
    run(environment(place)?
        .python(place)
        .arg(path)
        .env("CONNEX_RS_UCX", ucx::preferred(place)?))
}

/// The one wheel, under every other Python that this machine has.
pub(crate) fn other_pythons(place: &Place) -> Result<()> {
    let wheel = wheel::built(place)?;
    let ours = output(command(place, python()?).args(["-c", VERSION]))?;
    let mut others = pythons(place);
    others.remove(&ours.trim().parse().unwrap_or_default());
    if others.is_empty() {
        println!("this machine has no other Python than 3.{}", ours.trim());
    }
    for (minor, python) in others {
        let venv = Venv::ensure(place, &format!("smoke-3.{minor}"), &python, &[])?;
        venv.install_wheel(place, &wheel)
            .and_then(|()| {
                run(venv
                    .python(place)
                    .args(["-c", SMOKE])
                    .env("CONNEX_RS_UCX", ucx::preferred(place)?))
            })
            .with_context(|| format!("under Python 3.{minor}"))?;
    }
    Ok(())
}

/// The environment of the tests, with the wheel in `dist/`.
pub(crate) fn environment(place: &Place) -> Result<Venv> {
    let wheel = wheel::built(place)?;
    let venv = Venv::ensure(place, "tests", &python()?, REQUIREMENTS)?;
    venv.install_wheel(place, &wheel)?;
    Ok(venv)
}

const VERSION: &str = "import sys, venv, ensurepip; print(sys.version_info[1])";

/// The Pythons of this machine that can make an environment, by minor version.
fn pythons(place: &Place) -> BTreeMap<u32, PathBuf> {
    let mut dirs: Vec<PathBuf> = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect())
        .unwrap_or_default();
    if let Some(home) = env::var_os("HOME") {
        let versions = Path::new(&home).join(".pyenv/versions").read_dir();
        dirs.extend(
            versions
                .into_iter()
                .flatten()
                .flatten()
                .map(|v| v.path().join("bin")),
        );
    }
    let mut found = BTreeMap::new();
    for dir in dirs {
        for entry in dir.read_dir().into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(minor) = name
                .strip_prefix("python3.")
                .and_then(|m| m.parse::<u32>().ok())
            else {
                continue;
            };
            // A version manager's stand-ins exist for versions that do not start.
            let starts = || output(command(place, entry.path()).args(["-c", VERSION])).is_ok();
            if minor >= OLDEST && !found.contains_key(&minor) && starts() {
                found.insert(minor, entry.path());
            }
        }
    }
    found
}
