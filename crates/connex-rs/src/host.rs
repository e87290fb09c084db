//! What the engine has to know of its host: addresses, the way out, and whether a peer is on it too.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

use crate::error::{Error, Result};
use crate::identity::Host;

/// An interface with one of its addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// For example `eth0`.
    pub name: String,
    /// One of its addresses.
    pub addr: IpAddr,
}

/// The host's interfaces, one entry for each address.
pub fn interfaces() -> Vec<Interface> {
    let list = if_addrs::get_if_addrs().unwrap_or_default();
    list.into_iter()
        .map(|i| Interface {
            addr: i.ip(),
            name: i.name,
        })
        .collect()
}

/// The interface that carries `addr`.
pub fn interface_of(addr: IpAddr) -> Option<String> {
    interfaces()
        .into_iter()
        .find(|i| i.addr == addr)
        .map(|i| i.name)
}

/// Whether the host has an RDMA device.
pub fn has_rdma() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// The host's addresses, for error texts.
pub(crate) fn addresses_text() -> String {
    let list: Vec<String> = interfaces()
        .iter()
        .map(|i| format!("{} ({})", i.addr, i.name))
        .collect();
    if list.is_empty() {
        "none".to_owned()
    } else {
        list.join(", ")
    }
}

/// The source address of the default route; no packet is sent to find it.
///
/// # Errors
/// `Invalid` with the host's addresses, if there is no default route.
pub fn default_route_source(ipv6: bool) -> Result<IpAddr> {
    // Addresses reserved for documentation: routed like any foreign address, used by nobody.
    let (any, far) = if ipv6 {
        ("[::]:0", "[2001:db8::1]:9")
    } else {
        ("0.0.0.0:0", "192.0.2.1:9")
    };
    UdpSocket::bind(any)
        .and_then(|socket| {
            socket.connect(far)?;
            socket.local_addr()
        })
        .map(|addr| addr.ip())
        .ok()
        .filter(|ip| !ip.is_unspecified())
        .ok_or_else(|| {
            Error::invalid(format!(
                "the wildcard address needs a default route to know which address to advertise, and this host has none; \
                 pass listen_ip or advertise_ip, one of {}",
                addresses_text()
            ))
        })
}

/// Resolves a host to socket addresses, in the resolver's order. May take seconds for a name: never on the
/// progress thread.
///
/// # Errors
/// A sentence with the name and the resolver's words.
pub fn resolve(host: &Host, port: u16) -> Result<Vec<SocketAddr>, String> {
    let text = match host {
        Host::V4(addr) => return Ok(vec![SocketAddr::from((*addr, port))]),
        Host::V6 { addr, scope: None } => return Ok(vec![SocketAddr::from((*addr, port))]),
        Host::V6 {
            addr,
            scope: Some(scope),
        } => {
            let index = scope_index(scope)?;
            return Ok(vec![
                std::net::SocketAddrV6::new(*addr, port, 0, index).into(),
            ]);
        }
        Host::Name(name) => name,
    };
    match (text.as_str(), port).to_socket_addrs() {
        Ok(addrs) => {
            let addrs: Vec<SocketAddr> = addrs.collect();
            if addrs.is_empty() {
                Err(format!("the name {text} has no address"))
            } else {
                Ok(addrs)
            }
        }
        Err(e) => Err(format!("the name {text} cannot be resolved: {e}")),
    }
}

/// Whether resolving needs a name server.
pub(crate) fn needs_lookup(host: &Host) -> bool {
    matches!(host, Host::Name(_))
}

fn scope_index(scope: &str) -> Result<u32, String> {
    if let Ok(index) = scope.parse() {
        return Ok(index);
    }
    let name = std::ffi::CString::new(scope).map_err(|_| "a scope with a null byte".to_owned())?;
    // SAFETY: `name` is a valid C string.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(format!("there is no interface {scope} on this host")),
        index => Ok(index),
    }
}

/// Names what two processes must have in common to use the same System V shared memory and to see each other's death: the boot of
/// the kernel, the name spaces of segments, process ids and users, and the user, whose segments it attaches. Empty if that cannot
/// be found out.
pub fn shared_memory_domain() -> String {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    if boot.is_empty() {
        return String::new();
    }
    let mut domain = boot.trim().to_owned();
    for space in ["ipc", "pid", "user"] {
        let Ok(found) = std::fs::metadata(format!("/proc/self/ns/{space}")) else {
            return String::new();
        };
        domain += &format!(":{}", found.ino());
    }
    format!("{domain}:{}", rustix::process::geteuid().as_raw())
}

/// What is left of System V shared memory in this process's name space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedMemoryLeft {
    /// Segments.
    pub segments: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What the kernel's limits leave of shared memory; nothing where it has none. How much memory there is at all is another matter.
pub fn shared_memory_left() -> SharedMemoryLeft {
    let limit = |name: &str| -> u64 {
        let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    // A line for each segment, below a line of names.
    let table = std::fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let sizes = table.lines().skip(1).map(|line| {
        let size = line.split_whitespace().nth(3);
        size.and_then(|size| size.parse::<u64>().ok()).unwrap_or(0)
    });
    let (used, taken) = sizes.fold((0_u64, 0_u64), |(used, taken), size| {
        (used + 1, taken.saturating_add(size))
    });
    let pages = limit("shmall");
    let page = rustix::param::page_size() as u64;
    SharedMemoryLeft {
        segments: limit("shmmni").saturating_sub(used),
        bytes: pages.saturating_mul(page).saturating_sub(taken),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found() {
        assert_eq!(
            interface_of("127.0.0.1".parse().expect("address")).as_deref(),
            Some("lo")
        );
        assert!(addresses_text().contains("127.0.0.1 (lo)"));
    }

    #[test]
    fn scopes_are_names_or_numbers() {
        assert_eq!(scope_index("7"), Ok(7));
        assert_eq!(scope_index("lo"), Ok(1));
        assert!(
            scope_index("no-such-if")
                .expect_err("none")
                .contains("no-such-if")
        );
    }

    #[test]
    fn this_process_shares_memory_with_itself() {
        assert_eq!(shared_memory_domain(), shared_memory_domain());
        let left = shared_memory_left();
        assert!(left.segments > 0 && left.bytes > 0, "{left:?}");
    }
}
