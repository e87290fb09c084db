//! The steps that cargo runs.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::place::Place;
use crate::process::{cargo, output, run};
use crate::system;
use crate::ucx;
use crate::venv::Venv;

/// The profile of the tests, see Cargo.toml.
pub(crate) const PROFILE: &str = "checked";

/// The package of the fault lab: it runs alone, and as root.
const FAULT_LAB: &str = "connex-tests";

/// What the names of its cases over UCX contain.
const UCX_CASES: &str = "ucx::";

/// The extension module: it is tested from Python, and links only into a Python.
const EXTENSION: &str = "connex-py";

/// `cargo fmt --check`.
pub(crate) fn format(place: &Place) -> Result<()> {
    run(cargo(place).args(["fmt", "--all", "--check"]))
}

/// Clippy on everything, warnings are errors.
pub(crate) fn clippy(place: &Place) -> Result<()> {
    run(cargo(place).args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))
}

/// The documentation builds, its links lead somewhere.
pub(crate) fn documentation(place: &Place) -> Result<()> {
    run(cargo(place)
        .args([
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
            "--locked",
        ])
        .env(
            "RUSTDOCFLAGS",
            "-D warnings -A rustdoc::private-intra-doc-links",
        ))
}

/// Unit and integration tests over real UCX.
pub(crate) fn tests(place: &Place) -> Result<()> {
    run(runner(place)?
        .args([
            "--workspace",
            "--exclude",
            FAULT_LAB,
            "--exclude",
            EXTENSION,
        ])
        .env("CONNEX_RS_UCX", ucx::preferred(place)?))
}

/// The examples in the documentation and in the README.
pub(crate) fn doc_tests(place: &Place) -> Result<()> {
    run(cargo(place)
        .args([
            "test",
            "--doc",
            "--workspace",
            "--locked",
            "--profile",
            PROFILE,
        ])
        .args(["--exclude", FAULT_LAB, "--exclude", EXTENSION])
        .env("CONNEX_RS_UCX", ucx::preferred(place)?))
}

/// The wrapper of UCX, and the engine over it, with this UCX.
pub(crate) fn with_ucx(place: &Place, version: &str) -> Result<()> {
    let ucx = ucx::get(place, version)?.lib;
    run(runner(place)?
        .args(["-p", "connex-ucx"])
        .env("CONNEX_RS_UCX", &ucx))?;
    // The transport, whole engines over it, and the bytes; the other tests run over the newest one only.
    run(runner(place)?
        .args([
            "-p",
            "connex-rs",
            "--lib",
            "--test",
            "ucx_engine",
            "--test",
            "integrity",
            "--test",
            "gpu",
            "ucx",
        ])
        .env("CONNEX_RS_UCX", &ucx))?;
    if !ucx::WHEELS.contains(&version) {
        // The system's may be too old for shared memory: that was over TCP.
        return Ok(());
    }
    // The same over TCP; among themselves the peers of one host share memory.
    run(runner(place)?
        .args(["-p", "connex-rs", "--test", "integrity", "ucx"])
        .env("CONNEX_RS_TEST_TLS", "tcp")
        .env("CONNEX_RS_UCX", &ucx))
}

/// An example program of connex-rs.
pub(crate) fn example(place: &Place, name: &str) -> Result<()> {
    run(cargo(place)
        .args(["run", "--quiet", "--locked", "--profile", PROFILE])
        .args(["-p", "connex-rs", "--example", name])
        .env("CONNEX_RS_UCX", ucx::preferred(place)?))
}

/// The fault lab: one test at a time, in network namespaces of its own. `over_ucx`: its cases over UCX, else all others.
pub(crate) fn faults(place: &Place, over_ucx: bool) -> Result<()> {
    ensure!(
        system::is_root(place)?,
        "the fault lab makes network namespaces: run it as root"
    );
    let ucx = ucx::preferred(place)?;
    // The tests start this program.
    run(cargo(place).args(["build", "--locked", "--profile", PROFILE, "-p", "cxrma"]))?;
    let mut tests = runner(place)?;
    tests.args(["-p", FAULT_LAB]);
    if has_nextest(place) {
        tests.args(["--test-threads", "1", "--"]);
    } else {
        tests.args(["--", "--test-threads", "1"]);
    }
    if over_ucx {
        tests.arg(UCX_CASES);
    } else {
        tests.args(["--skip", UCX_CASES]);
    }
    run(tests.env("CONNEX_RS_UCX", ucx))
}

/// The committed bindings are what bindgen makes of the newest headers. libclang comes from PyPI.
pub(crate) fn bindings_current(place: &Place) -> Result<()> {
    bindings(place, &ucx::newest(place)?.headers, true)
}

/// Runs the xtask that has bindgen.
pub(crate) fn bindings(place: &Place, headers: &Path, check: bool) -> Result<()> {
    let mut again = cargo(place);
    again.args([
        "run",
        "--quiet",
        "--locked",
        "-p",
        "xtask",
        "--features",
        "bindings",
        "--",
        "bindings",
    ]);
    again.arg("--headers").arg(headers);
    if check {
        again.arg("--check");
    }
    if std::env::var_os("LIBCLANG_PATH").is_none() {
        again.env("LIBCLANG_PATH", libclang(place)?);
    }
    run(&mut again)
}

/// The folder of libclang, from its wheel.
fn libclang(place: &Place) -> Result<std::path::PathBuf> {
    let venv = Venv::ensure(
        place,
        "libclang",
        &crate::venv::python()?,
        &["libclang==18.1.1"],
    )?;
    let file = output(
        venv.python(place)
            .args(["-c", "import clang; print(clang.__file__)"]),
    )?;
    let native = Path::new(file.trim()).with_file_name("native");
    ensure!(
        native.join("libclang.so").is_file(),
        "the libclang wheel has no {}/libclang.so",
        native.display()
    );
    Ok(native)
}

/// nextest where it is installed, else `cargo test`.
fn runner(place: &Place) -> Result<Command> {
    let mut command = cargo(place);
    if has_nextest(place) {
        command.args(["nextest", "run", "--locked", "--cargo-profile", PROFILE]);
    } else {
        // Documentation tests have a step of their own.
        command.args([
            "test",
            "--locked",
            "--profile",
            PROFILE,
            "--lib",
            "--bins",
            "--tests",
            "--no-fail-fast",
        ]);
    }
    Ok(command)
}

fn has_nextest(place: &Place) -> bool {
    output(cargo(place).args(["nextest", "--version"])).is_ok()
}
