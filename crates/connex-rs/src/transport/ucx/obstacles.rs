//! What stands between a process and the RDMA devices that its host has: device files, locked memory, a UCX without verbs.
//!
//! Each finding is a sentence with the cause and the way out. Only files are looked at, below roots that are given, so that tests bring trees
//! of their own.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Where the kernel shows what there is.
#[derive(Clone, Debug)]
pub(super) struct Roots {
    /// sysfs.
    pub(super) sys: PathBuf,
    /// Device files.
    pub(super) dev: PathBuf,
    /// procfs.
    pub(super) proc: PathBuf,
}

impl Roots {
    /// Those of this host.
    pub(super) fn host() -> Self {
        Self {
            sys: "/sys".into(),
            dev: "/dev".into(),
            proc: "/proc".into(),
        }
    }
}

/// Locked memory below this is too little: RDMA locks every region, and each connection's buffers.
const LOCKED_ENOUGH: u64 = 1 << 30;
/// With less than this UCX itself does not get its buffers (19 MB at a time over UD), and says so without end.
pub(super) const LOCKED_NEEDED: u64 = 64 << 20;
/// The bit of the capability that lifts the limit.
const CAP_IPC_LOCK: u32 = 14;

const CONTAINER: &str = "a container must be given /dev/infiniband (docker run --device=/dev/infiniband, in Kubernetes an RDMA device plugin)";

/// Whether this process can open an RDMA device.
///
/// # Errors
/// Why not, and the way out.
pub(super) fn check_device(roots: &Roots, device: &str) -> Result<(), String> {
    let class = roots.sys.join("class/infiniband_verbs");
    let is_its = |name: &PathBuf| {
        fs::read_to_string(name.join("ibdev")).is_ok_and(|ibdev| ibdev.trim() == device)
    };
    let nodes = fs::read_dir(&class)
        .map(|list| list.flatten().map(|e| e.path()).collect::<Vec<_>>())
        .unwrap_or_default();
    let Some(node) = nodes.into_iter().find(is_its) else {
        return Err(format!(
            "RDMA device {device} is there, but the kernel offers it to no process: load the module ib_uverbs (modprobe ib_uverbs)"
        ));
    };
    let file = roots
        .dev
        .join("infiniband")
        .join(node.file_name().unwrap_or(OsStr::new("")));
    match OpenOptions::new().read(true).write(true).open(&file) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => Err(format!(
            "RDMA device {device} is there, but its device file {} is not: {CONTAINER}",
            file.display()
        )),
        Err(e) => Err(format!(
            "RDMA device {device} is there, but {} cannot be opened ({e}): make it readable and writable for this user (group rdma on many \
             distributions); {CONTAINER}",
            file.display()
        )),
    }
}

/// Whether connections can be made over RDMA devices, which librdmacm does through a device file of its own.
///
/// # Errors
/// Why not, and the way out.
pub(super) fn check_manager(roots: &Roots) -> Result<(), String> {
    let file = roots.dev.join("infiniband/rdma_cm");
    match OpenOptions::new().read(true).write(true).open(&file) {
        Ok(_) => Ok(()),
        Err(e) => Err(format!(
            "{} cannot be opened ({e}), so no connection is made through an RDMA device, only over TCP: load the module rdma_ucm \
             (modprobe rdma_ucm); {CONTAINER}",
            file.display()
        )),
    }
}

/// How many bytes this process may lock in memory; `None`: as many as it likes.
pub(super) fn locked_limit(roots: &Roots) -> Option<u64> {
    let status = fs::read_to_string(roots.proc.join("self/status")).unwrap_or_default();
    let capabilities = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    if capabilities & (1 << CAP_IPC_LOCK) != 0 {
        return None;
    }
    let limits = fs::read_to_string(roots.proc.join("self/limits")).ok()?;
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    // "unlimited" is not a number.
    limit.split_whitespace().next()?.parse().ok()
}

/// A sentence about a limit that is too low; `None` if it is not.
pub(super) fn locked_memory(limit: Option<u64>) -> Option<String> {
    let limit = limit.filter(|bytes| *bytes < LOCKED_ENOUGH)?;
    Some(format!(
        "this process may lock {} KiB in memory, and RDMA locks every region and its own buffers: raise the limit (ulimit -l unlimited; \
         LimitMEMLOCK=infinity in a systemd unit; docker run --ulimit memlock=-1)",
        limit >> 10
    ))
}

/// Whether the UCX at `libucp` can use RDMA devices: its transports are modules in a folder beside it.
pub(super) fn has_verbs(libucp: &Path, module_dir: Option<&str>) -> bool {
    let real = fs::canonicalize(libucp).unwrap_or_else(|_| libucp.to_owned());
    let beside = real.parent().map(|dir| dir.join("ucx"));
    beside
        .into_iter()
        .chain(module_dir.map(PathBuf::from))
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flat_map(|list| list.flatten())
        .any(|e| e.file_name().as_encoded_bytes().starts_with(b"libuct_ib"))
}

/// A sentence about a UCX without verbs on a host with RDMA devices.
pub(super) fn no_verbs(libucp: &Path, devices: &[&str]) -> String {
    format!(
        "RDMA devices ({}) are there, but the UCX in {} has no verbs: install the system's UCX (Debian and Ubuntu: libucx0; Red Hat: \
         ucx-ib), or name one with CONNEX_RS_UCX",
        devices.join(", "),
        libucp.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host of its own, removed at the end.
    struct Host(PathBuf);

    impl Host {
        fn new(name: &str) -> Self {
            let name = format!("connex-rs-obstacles-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn file(&self, path: &str, text: &str) -> &Self {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
            self
        }

        fn roots(&self) -> Roots {
            Roots {
                sys: self.0.join("sys"),
                dev: self.0.join("dev"),
                proc: self.0.join("proc"),
            }
        }
    }

    impl Drop for Host {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_device_needs_its_own_file() {
        let host = Host::new("device");
        let check = |device| check_device(&host.roots(), device);
        let text = check("mlx5_1").expect_err("no module");
        assert!(
            text.contains("mlx5_1") && text.contains("ib_uverbs"),
            "{text}"
        );
        host.file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
            .file("sys/class/infiniband_verbs/uverbs3/ibdev", "mlx5_1\n")
            .file("sys/class/infiniband_verbs/abi_version", "6\n")
            .file("dev/infiniband/uverbs0", "");
        assert_eq!(check("mlx5_0"), Ok(()));
        let text = check("mlx5_1").expect_err("no file");
        for part in [
            "mlx5_1",
            "infiniband/uverbs3 is not",
            "--device=/dev/infiniband",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // What is there and cannot be opened for writing, also by root.
        fs::create_dir_all(host.0.join("dev/infiniband/uverbs3")).expect("made");
        let text = check("mlx5_1").expect_err("not a file");
        assert!(
            text.contains("cannot be opened") && text.contains("group rdma"),
            "{text}"
        );
    }

    #[test]
    fn connections_need_the_manager() {
        let host = Host::new("manager");
        let text = check_manager(&host.roots()).expect_err("not there");
        for part in ["infiniband/rdma_cm", "rdma_ucm", "--device=/dev/infiniband"] {
            assert!(text.contains(part), "{text}");
        }
        host.file("dev/infiniband/rdma_cm", "");
        assert_eq!(check_manager(&host.roots()), Ok(()));
    }

    #[test]
    fn the_limit_of_locked_memory_counts_without_the_capability() {
        let host = Host::new("locked");
        let limits = |locked: &str| {
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max processes             63535                63535                processes \n\
                 Max locked memory         {locked:<20} unlimited            bytes     \n"
            );
            host.file("proc/self/limits", &text);
        };
        host.file("proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\n");
        limits("8388608");
        assert_eq!(locked_limit(&host.roots()), Some(8 << 20));
        let text = locked_memory(Some(8 << 20)).expect("too low");
        for part in ["8192 KiB", "ulimit -l", "LimitMEMLOCK", "memlock=-1"] {
            assert!(text.contains(part), "{text}");
        }
        limits("unlimited");
        assert_eq!(locked_limit(&host.roots()), None);
        limits("65536");
        host.file("proc/self/status", "Name:\tx\nCapEff:\t000001ffffffffff\n");
        assert_eq!(locked_limit(&host.roots()), None, "exempt");
        assert_eq!(locked_memory(None), None);
        assert_eq!(locked_memory(Some(4 << 30)), None);
    }

    #[test]
    fn verbs_are_a_module_beside_the_library() {
        let host = Host::new("verbs");
        host.file("ucx/lib/libucp.so.0", "")
            .file("ucx/lib/ucx/libuct_cma.so.0", "");
        let libucp = host.0.join("ucx/lib/libucp.so.0");
        assert!(!has_verbs(&libucp, None));
        let text = no_verbs(&libucp, &["mlx5_0:1"]);
        for part in ["mlx5_0:1", "libucp.so.0", "CONNEX_RS_UCX"] {
            assert!(text.contains(part), "{text}");
        }
        let elsewhere = host.0.join("modules");
        host.file("modules/libuct_ib.so.0", "");
        assert!(has_verbs(&libucp, elsewhere.to_str()));
        host.file("ucx/lib/ucx/libuct_ib_mlx5.so.0", "");
        assert!(has_verbs(&libucp, None));
        assert!(!has_verbs(&host.0.join("none/libucp.so.0"), None));
    }
}
