//! The loaded libucp.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use libloading::os::unix::{Library as Dl, RTLD_LAZY, RTLD_LOCAL};

use crate::error::LoadError;
use crate::find::{Choice, Places, same_file};
use crate::guard::LoadGuard;
use crate::lock::lock;
use crate::sys;

/// The oldest UCX that this crate works with.
pub const MIN_VERSION: Version = Version {
    major: 1,
    minor: 13,
    release: 0,
};

/// A version of UCX.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// As in 1.x.y.
    pub major: u32,
    /// As in x.13.y.
    pub minor: u32,
    /// As in x.y.1.
    pub release: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// libucp, loaded. One per process, never unloaded: UCX patches functions of the process and starts
/// what it does not stop.
pub struct Library {
    pub(crate) ucp: sys::Ucp,
    path: PathBuf,
    version: Version,
    choice: Choice,
    pid: u32,
}

static LOADED: OnceLock<Library> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());

impl Library {
    /// Finds and loads UCX, once per process; later calls give the same library.
    ///
    /// The order is: a libucp that the process has loaded already; what `CONNEX_RS_UCX` names (a
    /// folder or a file); what `UCX_HOME` names; then, on a host with an RDMA device, the system's (where the
    /// dynamic loader looks, `/opt/hpcx/ucx`, `/usr`) before the `libucx` Python wheel (`CONNEX_RS_UCX_WHEEL`,
    /// [`set_wheel_dir`](crate::set_wheel_dir), the active virtual environment), and on a host without one the wheel
    /// before the system's.
    ///
    /// Loading changes nothing for the host process: signal dispositions and the environment are as they were.
    ///
    /// # Errors
    /// [`LoadError`]; nothing is remembered, so that a later call can succeed.
    pub fn load() -> Result<&'static Self, LoadError> {
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let _one_at_a_time = lock(&LOADING);
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let library = Self::find_and_load()?;
        tracing::debug!(path = %library.path.display(), version = %library.version, why = %library.choice, "UCX loaded");
        Ok(LOADED.get_or_init(|| library))
    }

    /// The library if it is loaded.
    pub fn loaded() -> Option<&'static Self> {
        LOADED.get()
    }

    /// The file, as it was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of itself.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Why this one.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Whether this process is a fork of the one that loaded UCX: nothing of UCX works there, and
    /// dropping objects must leave UCX alone.
    pub fn in_forked_child(&self) -> bool {
        std::process::id() != self.pid
    }

    fn find_and_load() -> Result<Self, LoadError> {
        let places = Places::of_process();
        let asked = places.asked_for()?;
        if let Some(path) = already_loaded() {
            if let Some((variable, wanted)) = asked
                && !same_file(&wanted, &path)
            {
                return Err(LoadError::Another {
                    loaded: path,
                    variable,
                    wanted,
                });
            }
            // Everything it needs is there already.
            return Self::open(&path, Choice::AlreadyLoaded, &[]);
        }
        if let Some((variable, path)) = asked {
            return load_with_parts(&path, Choice::Variable(variable));
        }
        let (candidates, mut tried) = places.unasked();
        for candidate in candidates {
            match load_with_parts(&candidate.path, candidate.choice) {
                Ok(library) => return Ok(library),
                // A file that cannot be loaded at all leaves no trace: go on, and tell.
                Err(LoadError::Broken { path, reason }) if already_loaded().is_none() => {
                    tried.push(format!("{}: {reason}", path.display()));
                }
                Err(other) => return Err(other),
            }
        }
        Err(LoadError::NotFound { tried })
    }

    fn open(path: &Path, choice: Choice, parts: &[PathBuf]) -> Result<Self, LoadError> {
        let mut kept = Vec::new();
        for part in parts {
            kept.push(dlopen(part)?);
        }
        let library = dlopen(path)?;
        kept.push(dlopen(path)?);
        // From here on nothing is unloaded again, whatever comes.
        kept.into_iter().for_each(std::mem::forget);
        // SAFETY: the functions have the types of UCX's headers, whose ABI is stable from 1.13 on; structs that
        // grew since are read only as far as their field masks say.
        let ucp = unsafe { sys::Ucp::from_library(library) }.map_err(|e| LoadError::Broken {
            path: path.to_path_buf(),
            reason: e.to_string(),
        })?;
        let version = version_of(&ucp, path)?;
        if version < MIN_VERSION {
            return Err(LoadError::TooOld {
                path: path.to_path_buf(),
                version,
            });
        }
        let missing = sys::missing_functions(&ucp);
        if !missing.is_empty() {
            return Err(LoadError::Incomplete {
                path: path.to_path_buf(),
                version,
                missing,
            });
        }
        Ok(Self {
            ucp,
            path: path.to_path_buf(),
            version,
            choice,
            pid: std::process::id(),
        })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "UCX {} at {} ({})",
            self.version,
            self.path.display(),
            self.choice
        )
    }
}

/// Loads libucs and libuct of the same folder by full path, then libucp, so that the three fit each other
/// whatever the loader's own search path holds. (libucm first would fail: it needs libucs.)
fn load_with_parts(path: &Path, choice: Choice) -> Result<Library, LoadError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let parts: Vec<_> = ["libucs.so.0", "libuct.so.0"]
        .iter()
        .map(|name| dir.join(name))
        .filter(|part| part.is_file())
        .collect();
    let _as_it_was = LoadGuard::new(&dir.join("libucs.so.0"));
    Library::open(path, choice, &parts)
}

/// Local scope: another copy of UCX that some package bundles under other names must not bind to our symbols.
fn dlopen(path: &Path) -> Result<Dl, LoadError> {
    // SAFETY: runs the initialisers of UCX; `LoadGuard` undoes what they do to the process.
    unsafe { Dl::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.map_err(|e| LoadError::Broken {
        path: path.to_path_buf(),
        reason: e.to_string(),
    })
}

fn version_of(ucp: &sys::Ucp, path: &Path) -> Result<Version, LoadError> {
    if let Err(e) = &ucp.ucp_get_version {
        return Err(LoadError::Broken {
            path: path.to_path_buf(),
            reason: e.to_string(),
        });
    }
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: writes three numbers.
    unsafe { ucp.ucp_get_version(&mut major, &mut minor, &mut release) };
    Ok(Version {
        major,
        minor,
        release,
    })
}

/// The libucp that this process has loaded, also under the names that `auditwheel` makes (`libucp-1a2b3c4d.so.0`).
fn already_loaded() -> Option<PathBuf> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid record, whose name is null or a C string, and our own `data`.
        let (name, found) = unsafe { ((*info).dlpi_name, &mut *data.cast::<Option<PathBuf>>()) };
        if name.is_null() {
            return 0;
        }
        // SAFETY: not null, so a C string that lives during the visit.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let file = name.rsplit('/').next().unwrap_or_default();
        if is_libucp(file) {
            *found = Some(PathBuf::from(name.as_ref()));
            return 1;
        }
        0
    }
    let mut found: Option<PathBuf> = None;
    // SAFETY: `visit` has the right type and `found` lives through the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}

fn is_libucp(file: &str) -> bool {
    file.strip_prefix("libucp").is_some_and(|rest| {
        rest.starts_with(".so") || (rest.starts_with('-') && rest.contains(".so"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundled_copies_are_recognised() {
        assert!(is_libucp("libucp.so.0"));
        assert!(is_libucp("libucp-0e4b1f0a.so.0.0.0"));
        assert!(!is_libucp("libucp_extra.so"));
        assert!(!is_libucp("libucs.so.0"));
    }

    #[test]
    fn versions_are_ordered() {
        let v = |major, minor, release| Version {
            major,
            minor,
            release,
        };
        assert!(v(1, 9, 5) < MIN_VERSION && v(1, 13, 1) > MIN_VERSION && v(2, 0, 0) > v(1, 22, 0));
        assert_eq!(v(1, 18, 1).to_string(), "1.18.1");
    }
}
