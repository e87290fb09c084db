//! torch for CPU tensors: the wheels on PyPI are built for CUDA and want some gigabytes of NVIDIA's libraries at import. Small
//! libraries of our own stand in for those, in an environment under target/: they have the names and the functions, and every
//! function says that there is no device.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::elf;
use crate::place::Place;
use crate::process::{command, output};
use crate::venv::Venv;

/// The release: the smallest download of the recent ones.
pub(crate) const TORCH: &str = "torch==2.11.0";

/// What its import needs.
pub(crate) const NEEDS: &[&str] = &[
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "numpy",
    "sympy",
    "typing_extensions",
];

/// How the names of NVIDIA's libraries begin. The driver's is not among them: torch asks for it only when it uses a device,
/// and other software looks for it to learn whether there is one.
const LIBRARIES: &[&str] = &["libcu", "libnccl", "libnv"];
const DRIVER: &str = "libcuda.so.1";

/// How the names of their functions begin.
const FUNCTIONS: &[&str] = &["cu", "__cuda", "nccl", "nvJitLink", "nvrtc", "nvshmem"];

/// The library that has all the functions. The others name it: the loader wants that a symbol with a version is not in the
/// very library that the version is of, if that one has no versions.
const CORE: &str = "libconnex-no-cuda.so";

/// Puts the stand-ins where torch in this environment looks for NVIDIA's libraries, and checks that it imports.
///
/// # Errors
/// If there is no C compiler, or torch does not import with them.
pub(crate) fn without_cuda(place: &Place, venv: &Venv) -> Result<()> {
    let packages = venv.packages(place)?;
    let stamp = packages.join("connex-no-cuda");
    if !stamp.is_file() {
        stand_in(place, &packages)?;
        let cuda = "import torch; print(torch.cuda.is_available())";
        let said = output(venv.python(place).args(["-c", cuda]))?;
        ensure!(
            said.trim() == "False",
            "torch finds a device through libraries that have none: {said}"
        );
        fs::write(&stamp, "").with_context(|| format!("cannot write {}", stamp.display()))?;
    }
    Ok(())
}

/// Builds them.
fn stand_in(place: &Place, packages: &Path) -> Result<()> {
    let (mut libraries, mut functions) = (BTreeSet::new(), BTreeSet::new());
    for file in shared_objects(&packages.join("torch/lib"))? {
        let library = fs::read(&file)?;
        let named = || file.display().to_string();
        libraries.extend(elf::needed_libraries(&library).with_context(named)?);
        functions.extend(elf::undefined_symbols(&library).with_context(named)?);
    }
    libraries.retain(|name| name != DRIVER && begins(name, LIBRARIES));
    functions.retain(|name| begins(name, FUNCTIONS));
    let Some(cudart) = libraries.iter().find(|name| name.starts_with("libcudart.")) else {
        println!("this torch is not built for CUDA");
        return Ok(());
    };
    // torch's own search path has `nvidia/cu13/lib` for CUDA 13.
    let major = cudart.rsplit('.').next().unwrap_or_default();
    let dir = packages.join(format!("nvidia/cu{major}/lib"));
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;

    let source = dir.join("no-cuda.c");
    fs::write(&source, program(&functions))?;
    println!(
        "{} libraries without a function and one with {} stand in for NVIDIA's",
        libraries.len(),
        functions.len()
    );
    output(library(place, &dir, CORE).arg(&source))?;
    let empty = dir.join("empty.c");
    fs::write(&empty, "")?;
    for name in &libraries {
        output(
            library(place, &dir, name)
                .args(["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"])
                .arg(&empty)
                .arg(dir.join(CORE)),
        )?;
    }
    Ok(())
}

/// The command that makes a shared library of this name.
fn library(place: &Place, dir: &Path, name: &str) -> Command {
    let mut cc = command(place, "cc");
    cc.args(["-shared", "-fPIC", "-nostdlib", "-w", "-o"])
        .arg(dir.join(name))
        .arg(format!("-Wl,-soname,{name}"));
    cc
}

/// The functions. Where the real one returns a status, 100 is `cudaErrorNoDevice`; libraries register their kernels when they
/// are loaded and only hand back what they get.
fn program(functions: &BTreeSet<String>) -> String {
    let mut source = String::new();
    for name in functions {
        let text = name.ends_with("String") || name.ends_with("Name");
        let (kind, value) = if text {
            ("const char *", "\"no CUDA\"")
        } else {
            ("long ", "100")
        };
        // Writing to a string does not fail.
        let _ = writeln!(source, "{kind}{name}(void) {{ return {value}; }}");
    }
    source
}

fn begins(name: &str, with: &[&str]) -> bool {
    with.iter().any(|start| name.starts_with(start))
}

fn shared_objects(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in dir
        .read_dir()
        .with_context(|| format!("torch has no {}", dir.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "so") {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_return_a_status_or_a_text() {
        let names = ["cudaMalloc", "cudaGetErrorString"].map(str::to_owned);
        let source = program(&names.into());
        assert!(source.contains("long cudaMalloc(void) { return 100; }"));
        assert!(source.contains("const char *cudaGetErrorString(void)"));
    }
}
