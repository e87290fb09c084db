//! What this host has, for the rules of [`settings`](super::settings).

use std::collections::BTreeSet;
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
            rdma: rdma_devices(Path::new("/sys")),
            cuda: Path::new("/dev/nvidiactl").exists(),
        }
    }
}

/// The RDMA ports that are up, with the interfaces by whose addresses they are reached. `sys` is where sysfs is mounted.
fn rdma_devices(sys: &Path) -> Vec<RdmaDevice> {
    let mut found = Vec::new();
    let class = sys.join("class/infiniband");
    for device in entries(&class) {
        let dir = class.join(&device);
        for port in entries(&dir.join("ports")) {
            if line(&dir.join("ports").join(&port).join("state"))
                .is_some_and(|state| state.contains("ACTIVE"))
            {
                found.push(RdmaDevice {
                    name: format!("{device}:{port}"),
                    interfaces: interfaces(sys, &dir, &port),
                });
            }
        }
    }
    found
}

/// The interfaces of a device's port, in order of their names.
fn interfaces(sys: &Path, device: &Path, port: &str) -> Vec<String> {
    let net = sys.join("class/net");
    let mut names = BTreeSet::new();
    // RoCE: the interfaces of the port's addresses, a VLAN and a bond among them. An InfiniBand port has none here.
    let table = device.join("ports").join(port).join("gid_attrs/ndevs");
    names.extend(entries(&table).iter().filter_map(|i| line(&table.join(i))));
    // A device in software names the interface that it was made on.
    names.extend(line(&device.join("parent")));
    // Interfaces of the same hardware function: IPoIB, and RoCE's own. Those of the other port are told by their number.
    let own = entries(&device.join("device/net"));
    let ports = entries(&device.join("ports")).len();
    names.extend(own.into_iter().filter(|name| {
        ports < 2 || port_of(&net.join(name)).is_none_or(|number| number.to_string() == port)
    }));
    // The address of a bonded interface is on the bond.
    let bonds: Vec<String> = names
        .iter()
        .filter_map(|name| fs::read_link(net.join(name).join("master")).ok())
        .filter_map(|link| Some(link.file_name()?.to_str()?.to_owned()))
        .filter(|master| net.join(master).join("bonding").is_dir())
        .collect();
    names.extend(bonds);
    names.into_iter().collect()
}

/// The number of the port, from 1, that an interface of a device with several ports belongs to.
fn port_of(interface: &Path) -> Option<u32> {
    let number = line(&interface.join("dev_port")).and_then(|text| text.parse::<u32>().ok());
    // Older drivers say it in dev_id, in hexadecimal.
    let old = line(&interface.join("dev_id"))
        .and_then(|text| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok());
    Some(number.max(old)? + 1)
}

/// What a file of one line says; `None` if it is empty or cannot be read.
fn line(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
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
    use std::path::PathBuf;

    use super::*;

    /// A sysfs of its own, removed at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let name = format!("connex-rs-sysfs-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn file(&self, path: &str, text: &str) -> &Self {
            let path = self.0.join("class").join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
            self
        }

        fn dir(&self, path: &str) -> &Self {
            fs::create_dir_all(self.0.join("class").join(path)).expect("made");
            self
        }

        /// A port and its state.
        fn port(&self, device: &str, port: u32, state: &str) -> &Self {
            self.file(&format!("infiniband/{device}/ports/{port}/state"), state)
        }

        /// An interface of the device's function.
        fn net(&self, device: &str, interface: &str, dev_port: u32) -> &Self {
            self.dir(&format!("infiniband/{device}/device/net/{interface}"))
                .file(
                    &format!("net/{interface}/dev_port"),
                    &format!("{dev_port}\n"),
                )
        }

        fn found(&self) -> Vec<(String, Vec<String>)> {
            let found = rdma_devices(&self.0);
            found.into_iter().map(|d| (d.name, d.interfaces)).collect()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const UP: &str = "4: ACTIVE\n";

    fn is(name: &str, interfaces: &[&str]) -> (String, Vec<String>) {
        let interfaces = interfaces.iter().map(|i| (*i).to_owned()).collect();
        (name.to_owned(), interfaces)
    }

    #[test]
    fn mlx5_with_ipoib_has_its_interface_and_its_children() {
        let tree = Tree::new("ipoib");
        assert_eq!(tree.found(), [], "no RDMA here");
        tree.port("mlx5_0", 1, UP)
            .net("mlx5_0", "ib0", 0)
            .net("mlx5_0", "ib0.8001", 0);
        // The table of an InfiniBand port has entries that cannot be read.
        tree.dir("infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0");
        assert_eq!(tree.found(), [is("mlx5_0:1", &["ib0", "ib0.8001"])]);
    }

    #[test]
    fn of_two_ports_each_has_its_own_interface_and_the_one_that_is_down_is_left_out() {
        let tree = Tree::new("ports");
        tree.port("mlx4_0", 1, UP).port("mlx4_0", 2, UP);
        tree.net("mlx4_0", "ib0", 0).net("mlx4_0", "ib1", 1);
        let both = [is("mlx4_0:1", &["ib0"]), is("mlx4_0:2", &["ib1"])];
        assert_eq!(tree.found(), both);
        // As drivers said it before dev_port.
        tree.file("net/ib1/dev_port", "0\n")
            .file("net/ib1/dev_id", "0x1\n");
        assert_eq!(tree.found(), both);
        tree.port("mlx4_0", 1, "1: DOWN\n");
        assert_eq!(tree.found(), [is("mlx4_0:2", &["ib1"])]);
    }

    #[test]
    fn a_bond_over_roce_is_the_devices_interface() {
        let tree = Tree::new("bond");
        tree.port("mlx5_bond_0", 1, UP);
        tree.net("mlx5_bond_0", "ens1f0", 0)
            .net("mlx5_bond_0", "ens1f1", 1);
        tree.file("net/bond0/bonding/mode", "802.3ad 4\n");
        std::os::unix::fs::symlink("../bond0", tree.0.join("class/net/ens1f0/master"))
            .expect("a link");
        assert_eq!(
            tree.found(),
            [is("mlx5_bond_0:1", &["bond0", "ens1f0", "ens1f1"])]
        );
        // Its VLAN appears in the table of addresses; empty entries cannot be read.
        tree.file(
            "infiniband/mlx5_bond_0/ports/1/gid_attrs/ndevs/3",
            "bond0.12\n",
        )
        .file("infiniband/mlx5_bond_0/ports/1/gid_attrs/ndevs/4", "");
        assert_eq!(
            tree.found(),
            [is(
                "mlx5_bond_0:1",
                &["bond0", "bond0.12", "ens1f0", "ens1f1"]
            )]
        );
    }

    #[test]
    fn a_bridge_over_a_port_is_not_its_interface() {
        let tree = Tree::new("bridge");
        tree.port("mlx5_0", 1, UP).net("mlx5_0", "ens1", 0);
        tree.dir("net/br0/bridge");
        std::os::unix::fs::symlink("../br0", tree.0.join("class/net/ens1/master")).expect("a link");
        assert_eq!(tree.found(), [is("mlx5_0:1", &["ens1"])]);
    }

    #[test]
    fn virtual_functions_have_their_own_interfaces() {
        let tree = Tree::new("sriov");
        for (device, interface) in [
            ("mlx5_0", "ens1"),
            ("mlx5_1", "ens1v0"),
            ("mlx5_2", "ens1v1"),
        ] {
            tree.port(device, 1, UP).net(device, interface, 0);
        }
        assert_eq!(
            tree.found(),
            [
                is("mlx5_0:1", &["ens1"]),
                is("mlx5_1:1", &["ens1v0"]),
                is("mlx5_2:1", &["ens1v1"])
            ]
        );
    }

    #[test]
    fn soft_roce_is_known_by_what_it_was_made_on_and_a_port_may_have_no_interface() {
        let tree = Tree::new("rxe");
        tree.port("mlx5_0", 1, UP).port("rxe0", 1, UP);
        tree.file("infiniband/rxe0/parent", "eth0\n");
        assert_eq!(tree.found(), [is("mlx5_0:1", &[]), is("rxe0:1", &["eth0"])]);
    }
}
