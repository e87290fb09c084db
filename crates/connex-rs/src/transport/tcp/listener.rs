//! The listening socket: binding with a retry, accepting with a back-off.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

/// How long a busy port is tried again: a killed process of many GB holds its port until its memory
/// is freed (SPEC section 4).
pub const BIND_RETRY: Duration = Duration::from_secs(3);

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Binds and listens on `addr`.
///
/// A busy port is tried again for up to [`BIND_RETRY`], unless its holder is this very process.
///
/// # Errors
/// A sentence that names the address and, for a busy port, its holder.
pub(in crate::transport) fn bind(addr: SocketAddr) -> Result<TcpListener, String> {
    let until = Instant::now() + BIND_RETRY;
    loop {
        match try_bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let holder = holder_of(addr);
                if holder.as_ref().is_some_and(|h| h.pid == std::process::id())
                    || Instant::now() >= until
                {
                    let by = holder.map_or_else(
                        || "a process that cannot be seen from here".to_owned(),
                        |h| h.to_string(),
                    );
                    return Err(format!(
                        "cannot listen on {addr}: the port is in use by {by}; choose another port, or 0 for any"
                    ));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                return Err(format!(
                    "cannot listen on {}: it is not an address of this host; its addresses are {}",
                    addr.ip(),
                    crate::host::addresses_text()
                ));
            }
            Err(error) => return Err(format!("cannot listen on {addr}: {error}")),
        }
    }
}

fn try_bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // A restart on the same port must not wait for connections of the former process that are in
    // TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// A process that listens on a port.
struct Holder {
    pid: u32,
    name: String,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Finds the process that listens on the port of `addr`, as far as `/proc` shows it to us.
fn holder_of(addr: SocketAddr) -> Option<Holder> {
    let inode = listening_inode(addr.port())?;
    let wanted = format!("socket:[{inode}]");
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process
            .file_name()
            .to_str()
            .and_then(|n| n.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(fds) = std::fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        let holds = fds.flatten().any(|fd| {
            std::fs::read_link(fd.path()).is_ok_and(|l| l.as_os_str() == wanted.as_str())
        });
        if holds {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(Holder {
                pid,
                name: name.trim().to_owned(),
            });
        }
    }
    None
}

/// The inode of a socket in state LISTEN on `port`.
fn listening_inode(port: u16) -> Option<u64> {
    const LISTEN: &str = "0A";
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let Ok(text) = std::fs::read_to_string(table) else {
            continue;
        };
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, local, _, state, _, _, _, _, _, inode, ..] = fields[..] else {
                continue;
            };
            let here = local
                .rsplit_once(':')
                .and_then(|(_, p)| u16::from_str_radix(p, 16).ok())
                .is_some_and(|p| p == port);
            if here && state == LISTEN {
                return inode.parse().ok();
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_port_names_its_holder() {
        let first = bind("127.0.0.1:0".parse().expect("address")).expect("bind");
        let addr = first.local_addr().expect("bound");
        let error = bind(addr).expect_err("busy");
        assert!(
            error.contains(&format!("process {}", std::process::id())),
            "{error}"
        );
        assert!(error.contains(&addr.port().to_string()), "{error}");
    }

    #[test]
    fn a_foreign_address_lists_the_hosts_own() {
        let error = bind("192.0.2.1:0".parse().expect("address")).expect_err("not ours");
        assert!(
            error.contains("192.0.2.1") && error.contains("127.0.0.1"),
            "{error}"
        );
    }
}
