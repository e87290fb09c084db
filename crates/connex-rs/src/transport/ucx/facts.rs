//! What this host has, for the rules of [`settings`](super::settings).

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use connex_ucx::Version;

use super::settings::{Facts, RdmaDevice};

impl Facts {
    /// Gathers the facts: `addr` is the address that peers are told, `interface` the one that carries it.
    pub fn gather(version: Version, addr: IpAddr, interface: Option<String>) -> Self {
        let env = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("UCX_"))
            .collect();
        Self {
            version,
            env,
            addr,
            interface,
            rdma: rdma_devices(Path::new("/sys/class/infiniband")),
            cuda: Path::new("/dev/nvidiactl").exists(),
        }
    }
}

/// The RDMA ports that are up, with the interfaces that belong to their device.
fn rdma_devices(root: &Path) -> Vec<RdmaDevice> {
    let mut found = Vec::new();
    for device in entries(root) {
        let interfaces = entries(&root.join(&device).join("device/net"));
        for port in entries(&root.join(&device).join("ports")) {
            let state =
                fs::read_to_string(root.join(&device).join("ports").join(&port).join("state"));
            if state.is_ok_and(|state| state.contains("ACTIVE")) {
                found.push(RdmaDevice {
                    name: format!("{device}:{port}"),
                    interfaces: interfaces.clone(),
                });
            }
        }
    }
    found
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .map(|list| {
            list.flatten()
                .filter_map(|e| e.file_name().into_string().ok())
                .collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_are_up_are_found_with_their_interfaces() {
        let root = std::env::temp_dir().join(format!("connex-rs-sysfs-{}", std::process::id()));
        for (port, state) in [("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")] {
            let dir = root.join("mlx5_0/ports").join(port);
            fs::create_dir_all(&dir).expect("a folder");
            fs::write(dir.join("state"), state).expect("a file");
        }
        fs::create_dir_all(root.join("mlx5_0/device/net/ib0")).expect("a folder");
        let found = rdma_devices(&root);
        fs::remove_dir_all(&root).expect("cleaned up");
        assert_eq!(
            found,
            [RdmaDevice {
                name: "mlx5_0:1".into(),
                interfaces: vec!["ib0".into()]
            }]
        );
        assert_eq!(rdma_devices(&root), []);
    }
}
