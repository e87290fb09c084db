//! Where things lie.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The folders that chores work in.
pub(crate) struct Place {
    /// The root of the workspace.
    pub(crate) root: PathBuf,
    /// Cargo's target folder: everything that chores make lies under it, the wheel in `dist/` apart.
    pub(crate) target: PathBuf,
}

impl Place {
    pub(crate) fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask lies in no workspace")?
            .to_path_buf();
        let target = match std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty()) {
            Some(dir) => std::env::current_dir()?.join(dir),
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    /// Where the wheel goes.
    pub(crate) fn dist(&self) -> PathBuf {
        self.root.join("dist")
    }
}
