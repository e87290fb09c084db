//! The Python wheel.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::elf;
use crate::place::Place;
use crate::process::{command, output, run};
use crate::venv::Venv;

/// Builds the wheel for every Linux of manylinux_2_28 and every Python from 3.8 on; it is the only one in `dist/` after.
///
/// # Errors
/// If the build fails or the result would not load everywhere.
pub(crate) fn build(place: &Place) -> Result<PathBuf> {
    let tools = Venv::tools(place)?;
    for old in wheels(place)? {
        fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
    }
    let unwinder = unwinder(place)?;
    run(tools
        .command(place, "maturin")
        .args([
            "build",
            "--release",
            "--locked",
            "--zig",
            "--compatibility",
            "manylinux_2_28",
            "--out",
            "dist",
        ])
        .env("ZIG_GLOBAL_CACHE_DIR", place.target.join("zig"))
        .args(["--", "-C"])
        .arg(format!("link-arg={}", unwinder.display())))?;
    let wheel = built(place)?;
    let (major, minor) = check(place, &tools, &wheel)?;
    println!("{}: needs glibc {major}.{minor} or newer", wheel.display());
    Ok(wheel)
}

/// The system's `libgcc_s.so.1`, to be linked instead of zig's own unwinder: when an interpreter ends, glibc unwinds the
/// threads that wait for it with `libgcc_s`, and two unwinders in one stack crash the process.
fn unwinder(place: &Place) -> Result<PathBuf> {
    let said = output(command(place, "cc").arg("-print-file-name=libgcc_s.so.1"))?;
    let file = fs::canonicalize(said.trim()).with_context(|| {
        format!(
            "the C compiler has no libgcc_s.so.1 (it says {:?})",
            said.trim()
        )
    })?;
    Ok(file)
}

/// The wheel in `dist/`.
///
/// # Errors
/// If there is not exactly one.
pub(crate) fn built(place: &Place) -> Result<PathBuf> {
    let mut wheels = wheels(place)?;
    ensure!(
        wheels.len() <= 1,
        "more than one wheel in dist/: {wheels:?}"
    );
    wheels
        .pop()
        .context("no wheel in dist/: `cargo xtask wheel` builds it")
}

fn wheels(place: &Place) -> Result<Vec<PathBuf>> {
    let Ok(entries) = place.dist().read_dir() else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name.starts_with("connex_rs-") && name.ends_with(".whl") {
            found.push(path);
        }
    }
    Ok(found)
}

/// Its tags, and what its library needs.
fn check(place: &Place, tools: &Venv, wheel: &Path) -> Result<(u32, u32)> {
    let name = wheel
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    ensure!(
        name.contains("-cp38-abi3-") && name.contains("manylinux_2_28"),
        "{name} is not for every Python from 3.8 on and manylinux_2_28"
    );
    let dir = place.target.join("wheel");
    let _ = fs::remove_dir_all(&dir);
    output(
        tools
            .python(place)
            .args(["-m", "zipfile", "-e"])
            .arg(wheel)
            .arg(&dir),
    )?;
    let package = dir.join("connex_rs");
    let mut newest = None;
    for entry in package
        .read_dir()
        .with_context(|| format!("{name} has no package connex_rs"))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "so") {
            let needs =
                elf::check(&fs::read(&path)?).with_context(|| path.display().to_string())?;
            newest = newest.max(Some(needs));
        }
    }
    match newest {
        Some(newest) => Ok(newest),
        None => bail!("{name} has no extension module"),
    }
}
