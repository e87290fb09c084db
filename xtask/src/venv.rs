//! Python virtual environments under target/.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::Place;
use crate::process::{command, output, run};

/// What the chores themselves use, pinned so that every machine sees the same findings.
const TOOLS: &[&str] = &["maturin==1.16.0", "ziglang==0.15.2", "ruff==0.17.6", "pip"];

/// A virtual environment.
pub(crate) struct Venv {
    dir: PathBuf,
}

impl Venv {
    /// The environment of the tools.
    pub(crate) fn tools(place: &Place) -> Result<Self> {
        Self::ensure(place, "tools", &python()?, TOOLS)
    }

    /// Makes the environment `target/venv/<name>` with these requirements; one that has them is kept as it is.
    pub(crate) fn ensure(
        place: &Place,
        name: &str,
        python: &Path,
        requirements: &[&str],
    ) -> Result<Self> {
        let dir = place.target.join("venv").join(name);
        let stamp = dir.join("made-for");
        let version =
            output(command(place, python).args(["-c", "import sys; print(sys.version)"]))?;
        let wanted = format!(
            "{}\n{}\n{version}",
            python.display(),
            requirements.join("\n")
        );
        let venv = Self { dir };
        if fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) {
            return Ok(venv);
        }
        run(command(place, python)
            .args(["-m", "venv", "--clear"])
            .arg(&venv.dir))
        .context("on Debian and Ubuntu `python3 -m venv` is in the package python3-venv")?;
        if !requirements.is_empty() {
            venv.install(place, requirements)?;
        }
        fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(venv)
    }

    /// Installs what is named.
    pub(crate) fn install(&self, place: &Place, what: &[&str]) -> Result<()> {
        run(self
            .python(place)
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ])
            .args(what))
    }

    /// Installs a wheel that may have the version of one that is there, without what it depends on.
    pub(crate) fn install_wheel(&self, place: &Place, wheel: &Path) -> Result<()> {
        let wheel = wheel.to_string_lossy();
        self.install(place, &["--force-reinstall", "--no-deps", &wheel])
    }

    /// The folder that holds its packages.
    pub(crate) fn packages(&self, place: &Place) -> Result<PathBuf> {
        const WHERE: &str = "import sysconfig; print(sysconfig.get_path('platlib'))";
        let said = output(self.python(place).args(["-c", WHERE]))?;
        Ok(said.trim().into())
    }

    /// A command of this environment, activated.
    pub(crate) fn command(&self, place: &Place, program: &str) -> Command {
        let bin = self.dir.join("bin");
        let mut command = command(place, bin.join(program));
        let rest = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths([bin].into_iter().chain(env::split_paths(&rest)));
        command
            .env("PATH", path.unwrap_or(rest))
            .env("VIRTUAL_ENV", &self.dir);
        command
    }

    /// Its interpreter.
    pub(crate) fn python(&self, place: &Place) -> Command {
        self.command(place, "python")
    }
}

/// The Python that environments are made with: `PYTHON`, else `python3`.
pub(crate) fn python() -> Result<PathBuf> {
    if let Some(python) = env::var_os("PYTHON").filter(|p| !p.is_empty()) {
        return Ok(python.into());
    }
    let found = crate::process::which("python3");
    ensure!(
        found.is_some(),
        "no python3 on the search path: install Python 3.8 or newer, or name one with PYTHON"
    );
    Ok(found.unwrap_or_default())
}
