//! Where a UCX may be: pure look-ups, nothing is loaded here.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::error::LoadError;
use crate::lock::lock;

/// The file that everything is found by.
pub(crate) const LIBUCP: &str = "libucp.so.0";

/// Why a UCX was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The process had loaded it before us.
    AlreadyLoaded,
    /// This variable names it.
    Variable(&'static str),
    /// The system's own; the flag says whether that is because of an RDMA device.
    System {
        /// An RDMA device is there, so the system's UCX (with verbs) goes before the wheel (without).
        rdma: bool,
    },
    /// The `libucx` Python wheel.
    Wheel,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::AlreadyLoaded => f.write_str("the process had loaded it already"),
            Choice::Variable(name) => write!(f, "{name} names it"),
            Choice::System { rdma: true } => {
                f.write_str("the system's, first because of the RDMA device")
            }
            Choice::System { rdma: false } => f.write_str("the system's"),
            Choice::Wheel => f.write_str("the libucx Python wheel"),
        }
    }
}

/// A file that could be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) choice: Choice,
}

static WHEEL_DIR: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Says where the `libucx` Python package lies (its own folder or its `lib`): for language bindings, which can
/// ask their interpreter. `CONNEX_RS_UCX_WHEEL` wins over it. No effect once a UCX is loaded.
pub fn set_wheel_dir(dir: impl Into<PathBuf>) {
    *lock(&WHEEL_DIR) = Some(dir.into());
}

/// What the environment says and the host has, gathered once so that the order can be tested.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    pub(crate) connex_rs_ucx: Option<PathBuf>,
    pub(crate) ucx_home: Option<PathBuf>,
    pub(crate) wheel: Vec<PathBuf>,
    pub(crate) system: Vec<PathBuf>,
    pub(crate) rdma: bool,
}

impl Places {
    /// As this process sees them.
    pub(crate) fn of_process() -> Self {
        let var = |name| {
            env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let wheel = match var("CONNEX_RS_UCX_WHEEL").or_else(|| lock(&WHEEL_DIR).clone()) {
            Some(dir) => vec![dir],
            None => var("VIRTUAL_ENV")
                .map(|venv| site_packages(&venv))
                .unwrap_or_default(),
        };
        Self {
            connex_rs_ucx: var("CONNEX_RS_UCX"),
            ucx_home: var("UCX_HOME"),
            wheel,
            system: system_dirs(),
            rdma: has_entries(Path::new("/sys/class/infiniband")),
        }
    }

    /// The file that a variable asks for, if one does.
    ///
    /// A variable that names nothing is an error: going on to the next place would hide it.
    pub(crate) fn asked_for(&self) -> Result<Option<(&'static str, PathBuf)>, LoadError> {
        for (variable, value) in [
            ("CONNEX_RS_UCX", &self.connex_rs_ucx),
            ("UCX_HOME", &self.ucx_home),
        ] {
            let Some(value) = value else { continue };
            let looked_at = files_for(value);
            return match looked_at.iter().find(|file| file.is_file()) {
                Some(file) => Ok(Some((variable, file.clone()))),
                None => Err(LoadError::NotThere {
                    variable,
                    value: value.display().to_string(),
                    looked_at: looked_at.iter().map(|f| f.display().to_string()).collect(),
                }),
            };
        }
        Ok(None)
    }

    /// The candidates that nobody named, best first, and every place that had none.
    pub(crate) fn unasked(&self) -> (Vec<Candidate>, Vec<String>) {
        let mut tried = vec!["no libucp is loaded in this process".to_owned()];
        tried.push("CONNEX_RS_UCX is not set".to_owned());
        tried.push("UCX_HOME is not set".to_owned());
        let system = (&self.system, Choice::System { rdma: self.rdma });
        let wheel = (&self.wheel, Choice::Wheel);
        let order = if self.rdma {
            [system, wheel]
        } else {
            [wheel, system]
        };
        let mut found: Vec<Candidate> = Vec::new();
        for (dirs, choice) in order {
            if dirs.is_empty() {
                tried.push(
                    "the libucx Python wheel: no CONNEX_RS_UCX_WHEEL, and no active virtual environment".to_owned(),
                );
            }
            for dir in dirs {
                let files = files_for(dir);
                match files.iter().find(|file| file.is_file()) {
                    Some(path) if found.iter().any(|c| same_file(&c.path, path)) => {}
                    Some(path) => found.push(Candidate {
                        path: path.clone(),
                        choice: choice.clone(),
                    }),
                    None => tried.push(format!("{}: no {LIBUCP}", dir.display())),
                }
            }
        }
        (found, tried)
    }
}

/// Whether two paths name one file, links resolved.
pub(crate) fn same_file(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

/// Where `libucp.so.0` may be under `place`: the file itself, its folder, a prefix, the Python package.
fn files_for(place: &Path) -> Vec<PathBuf> {
    if place.is_file()
        || place
            .file_name()
            .is_some_and(|name| name.to_string_lossy().contains(".so"))
    {
        return vec![place.to_path_buf()];
    }
    let arch = format!("lib/{}-linux-gnu", env::consts::ARCH);
    ["", "lib", "lib64", arch.as_str(), "libucx/lib"]
        .iter()
        .map(|sub| place.join(sub).join(LIBUCP))
        .collect()
}

fn site_packages(venv: &Path) -> Vec<PathBuf> {
    let Ok(entries) = venv.join("lib").read_dir() else {
        return Vec::new();
    };
    let mut dirs: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path().join("site-packages/libucx/lib"))
        .collect();
    dirs.sort();
    dirs
}

/// Where the dynamic loader would look, then the usual places of a UCX.
fn system_dirs() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = Vec::new();
    let mut add = |dir: PathBuf| {
        if !dir.as_os_str().is_empty() && !dirs.contains(&dir) {
            dirs.push(dir);
        }
    };
    if let Some(path) = env::var_os("LD_LIBRARY_PATH") {
        env::split_paths(&path).for_each(&mut add);
    }
    std::fs::read("/etc/ld.so.cache")
        .map(|cache| cached_dirs(&cache))
        .unwrap_or_default()
        .into_iter()
        .for_each(&mut add);
    add(PathBuf::from("/opt/hpcx/ucx/lib"));
    for lib in ["lib64", "lib"] {
        add(Path::new("/usr").join(lib));
    }
    add(PathBuf::from(format!(
        "/usr/lib/{}-linux-gnu",
        env::consts::ARCH
    )));
    dirs
}

/// The folders of every `libucp.so.0` that the loader's cache knows. The cache is a table whose strings end with a
/// zero byte; only the strings are looked at, so its version does not matter.
fn cached_dirs(cache: &[u8]) -> Vec<PathBuf> {
    let wanted = format!("/{LIBUCP}");
    cache
        .split(|&byte| byte == 0)
        .filter_map(|text| std::str::from_utf8(text).ok())
        .filter_map(|text| text.strip_suffix(&wanted))
        .filter(|dir| dir.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

fn has_entries(dir: &Path) -> bool {
    dir.read_dir()
        .is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(name: &str) -> PathBuf {
        let dir = env::temp_dir().join(format!("connex-ucx-find-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a temporary folder");
        dir
    }

    fn ucx_in(dir: &Path) -> PathBuf {
        std::fs::create_dir_all(dir).expect("a folder");
        let file = dir.join(LIBUCP);
        std::fs::write(&file, b"").expect("a file");
        file
    }

    #[test]
    fn the_order_depends_on_an_rdma_device() {
        let root = root("order");
        let system = ucx_in(&root.join("usr/lib"));
        let wheel = ucx_in(&root.join("site-packages/libucx/lib"));
        let mut places = Places {
            wheel: vec![root.join("site-packages")],
            system: vec![root.join("nothing"), root.join("usr")],
            ..Places::default()
        };
        let paths = |p: &Places| {
            p.unasked()
                .0
                .into_iter()
                .map(|c| c.path)
                .collect::<Vec<_>>()
        };
        assert_eq!(paths(&places), [wheel.clone(), system.clone()]);
        assert!(
            places.unasked().1.iter().any(|t| t.contains("nothing")),
            "a place without one is named"
        );
        places.rdma = true;
        assert_eq!(paths(&places), [system, wheel]);
        assert_eq!(places.unasked().0[0].choice, Choice::System { rdma: true });
        std::fs::remove_dir_all(root).expect("cleaned up");
    }

    #[test]
    fn a_variable_wins_and_must_name_something() {
        let root = root("variable");
        let here = ucx_in(&root.join("prefix/lib"));
        let home = ucx_in(&root.join("home"));
        let mut places = Places {
            ucx_home: Some(root.join("home")),
            ..Places::default()
        };
        assert_eq!(places.asked_for(), Ok(Some(("UCX_HOME", home))));
        places.connex_rs_ucx = Some(root.join("prefix"));
        assert_eq!(
            places.asked_for(),
            Ok(Some(("CONNEX_RS_UCX", here.clone())))
        );
        places.connex_rs_ucx = Some(here.clone());
        assert_eq!(places.asked_for(), Ok(Some(("CONNEX_RS_UCX", here))));
        places.connex_rs_ucx = Some(root.join("empty"));
        let text = places
            .asked_for()
            .expect_err("there is nothing")
            .to_string();
        assert!(
            text.contains("CONNEX_RS_UCX=") && text.contains("empty/lib/libucp.so.0"),
            "{text}"
        );
        std::fs::remove_dir_all(root).expect("cleaned up");
    }

    #[test]
    fn the_cache_of_the_loader_is_read_by_its_strings() {
        let cache = b"glibc-ld.so.cache1.1\0\x01\x02libucp.so.0\0/opt/a/libucp.so.0\0/opt/a/libucs.so.0\0/b/libucp.so.0\0";
        assert_eq!(
            cached_dirs(cache),
            [PathBuf::from("/opt/a"), PathBuf::from("/b")]
        );
    }
}
