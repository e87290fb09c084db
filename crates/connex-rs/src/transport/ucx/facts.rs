//! What this host has, for the rules of [`settings`](super::settings).

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use connex_ucx::Library;

use super::obstacles::{self, Roots};
use super::settings::{Facts, RdmaDevice};

impl Facts {
    /// Gathers the facts: `library` is the UCX in use, `addr` the address that peers are told, `interface` the one that carries
    /// it. Opens the device files of RDMA devices, if there are any, and closes them again.
    pub fn gather(library: &Library, addr: IpAddr, interface: Option<String>) -> Self {
        let env = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("UCX_"))
            .collect();
        let mut facts = Self {
            version: library.version(),
            env,
            addr,
            interface,
            rdma: Vec::new(),
            obstacles: Vec::new(),
            locked_limit: None,
            cuda: Path::new("/dev/nvidiactl").exists(),
        };
        facts.look_for_rdma(&Roots::host(), library.path());
        facts
    }

    /// Finds the RDMA ports that this process can use with the UCX at `libucp`, and what keeps it from others.
    fn look_for_rdma(&mut self, roots: &Roots, libucp: &Path) {
        let ports = rdma_devices(&roots.sys);
        if ports.is_empty() {
            return;
        }
        let modules = self.env.get("UCX_MODULE_DIR").map(String::as_str);
        if !obstacles::has_verbs(libucp, modules) {
            let names: Vec<_> = ports.iter().map(|port| port.name.as_str()).collect();
            return self.obstacles.push(obstacles::no_verbs(libucp, &names));
        }
        for port in ports {
            let device = port.name.split(':').next().unwrap_or_default();
            match obstacles::check_device(roots, device) {
                Ok(()) => self.rdma.push(port),
                Err(text) if self.obstacles.contains(&text) => {}
                Err(text) => self.obstacles.push(text),
            }
        }
        if self.rdma.is_empty() {
            return;
        }
        self.obstacles.extend(obstacles::check_manager(roots).err());
        self.locked_limit = obstacles::locked_limit(roots);
        self.obstacles
            .extend(obstacles::locked_memory(self.locked_limit));
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
                    // What it was made on, and nothing on a bus.
                    software: dir.join("parent").is_file() && !dir.join("device").exists(),
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
        tree.net("mlx5_0", "ens1", 0);
        // Hardware, whatever else it says.
        tree.file("infiniband/mlx5_0/parent", "ens1\n");
        let software: Vec<bool> = rdma_devices(&tree.0).iter().map(|d| d.software).collect();
        assert_eq!(software, [false, true]);
    }

    /// The facts of a process on the host of `tree`, with a UCX that has verbs.
    fn usable(tree: &Tree) -> (Vec<String>, Vec<String>) {
        let root = tree.0.with_extension("host");
        let roots = Roots {
            sys: tree.0.clone(),
            dev: root.join("dev"),
            proc: root.join("proc"),
        };
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        };
        put("lib/ucx/libuct_ib.so.0", "");
        put("dev/infiniband/uverbs0", "");
        put("proc/self/status", "CapEff:\t0000000000000000\n");
        put(
            "proc/self/limits",
            "Max locked memory         65536                65536                bytes\n",
        );
        let mut facts = Facts {
            version: connex_ucx::MIN_VERSION,
            env: std::collections::BTreeMap::new(),
            addr: "10.0.0.1".parse().expect("an address"),
            interface: None,
            rdma: Vec::new(),
            obstacles: Vec::new(),
            locked_limit: None,
            cuda: false,
        };
        facts.look_for_rdma(&roots, &root.join("lib/libucp.so.0"));
        let _ = fs::remove_dir_all(root);
        let names = facts.rdma.into_iter().map(|d| d.name).collect();
        (names, facts.obstacles)
    }

    #[test]
    fn only_what_the_process_can_open_counts_and_the_rest_is_explained() {
        let tree = Tree::new("usable");
        assert_eq!(usable(&tree), (vec![], vec![]), "no RDMA, nothing to say");
        tree.port("mlx5_0", 1, UP).port("mlx5_1", 1, UP);
        tree.file("infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
            .file("infiniband_verbs/uverbs1/ibdev", "mlx5_1\n");
        let (names, obstacles) = usable(&tree);
        assert_eq!(names, ["mlx5_0:1"]);
        let about = ["mlx5_1", "rdma_cm", "64 KiB"];
        assert_eq!(obstacles.len(), about.len(), "{obstacles:?}");
        for (text, about) in obstacles.iter().zip(about) {
            assert!(text.contains(about), "{about}: {text}");
        }
    }
}
