//! Builds the stand-in for the CUDA driver, `tests/cuda-stand-in`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the stand-in with the system's compiler; returns its folder.
pub(crate) fn build() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cuda-stand-in");
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-stand-in");
            std::fs::create_dir_all(&folder).expect("a folder");
            for (source, name) in [("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")] {
                // Another test process may be using the one that is there.
                let fresh = folder.join(format!("{name}-{}", std::process::id()));
                let done = Command::new("cc")
                    .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"])
                    .args(["-fPIC", "-shared", "-fvisibility=hidden"])
                    .arg(format!("-Wl,-soname,{name}"))
                    .arg("-o")
                    .arg(&fresh)
                    .arg(sources.join(source))
                    .args(["-ldl", "-lpthread"])
                    .status()
                    .expect("a C compiler");
                assert!(done.success(), "{source} does not compile");
                std::fs::rename(fresh, folder.join(name)).expect("renamed");
            }
            folder
        })
        .clone()
}
