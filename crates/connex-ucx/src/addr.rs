//! Between `SocketAddr` and C's `sockaddr_storage`.

use std::mem::size_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{sa_family_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::sys;

/// A socket address in C's form; lives as long as the call that reads it.
pub(crate) struct RawAddr {
    storage: sockaddr_storage,
    len: socklen_t,
}

impl RawAddr {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        let mut storage = empty();
        let len = match addr {
            SocketAddr::V4(v4) => {
                let raw = sockaddr_in {
                    sin_family: libc::AF_INET as sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from(*v4.ip()).to_be(),
                    },
                    sin_zero: [0; 8],
                };
                // SAFETY: `sockaddr_storage` is made to hold any address, and is aligned for it.
                unsafe { (&raw mut storage).cast::<sockaddr_in>().write(raw) };
                size_of::<sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let raw = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { (&raw mut storage).cast::<sockaddr_in6>().write(raw) };
                size_of::<sockaddr_in6>()
            }
        };
        Self {
            storage,
            len: len as socklen_t,
        }
    }

    /// A view for UCX; valid while `self` is.
    pub(crate) fn view(&self) -> sys::ucs_sock_addr_t {
        sys::ucs_sock_addr_t {
            addr: (&raw const self.storage).cast::<sockaddr>(),
            addrlen: self.len,
        }
    }
}

/// All zeros: family "unspecified".
pub(crate) fn empty() -> sockaddr_storage {
    // SAFETY: plain bytes, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

/// The address in `storage`, if it is IPv4 or IPv6.
pub(crate) fn from_storage(storage: &sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that this is what lies there, and the storage is large enough.
            let raw = unsafe { *(storage as *const sockaddr_storage).cast::<sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { *(storage as *const sockaddr_storage).cast::<sockaddr_in6>() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            Some(
                SocketAddrV6::new(
                    ip,
                    u16::from_be(raw.sin6_port),
                    raw.sin6_flowinfo,
                    raw.sin6_scope_id,
                )
                .into(),
            )
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_there_and_back() {
        let v6 = SocketAddrV6::new("fe80::1".parse().expect("an address"), 18_515, 0, 7);
        for addr in [SocketAddr::from(([127, 0, 0, 1], 4660)), SocketAddr::V6(v6)] {
            let raw = RawAddr::new(addr);
            assert_eq!(from_storage(&raw.storage), Some(addr));
        }
        assert_eq!(from_storage(&empty()), None);
    }
}
