//! What the sockets of connections are told beyond the defaults.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::Socket;

/// Bytes that the kernel may hold unsent for a connection: what small frames wait behind at most.
const NOT_SENT_LOW_WATER: u32 = 512 << 10;

/// Keeps the kernel from doubling its pauses between retransmissions of the few bytes of a heartbeat: after a cut
/// shorter than the heartbeat timeout, the next one would come after that timeout.
pub(super) fn retransmit_steadily(socket: &Socket, interval: Duration) {
    /// Linux 6.15; not in `libc` yet.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let longest = interval.as_millis().clamp(1000, 120_000) as libc::c_int;
    for (option, value) in [
        (libc::TCP_THIN_LINEAR_TIMEOUTS, 1),
        (TCP_RTO_MAX_MS, longest),
    ] {
        // SAFETY: both options take an int, and that is what is passed with its size. An older kernel refuses: then
        // its own pauses remain.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            );
        }
    }
}

/// Spares a connection within this host the congestion control of networks: where the system's is one that paces what it
/// sends (BBR), 1 and 16 MB took twice as long, though there is nothing to be congested. `reno` is in every kernel.
pub(super) fn hurry_on_host(socket: &Socket, peer: SocketAddr) {
    let local = socket.local_addr().ok().and_then(|local| local.as_socket());
    if peer.ip().is_loopback() || local.is_some_and(|local| local.ip() == peer.ip()) {
        // Where the system does not allow it the connection works as well.
        let _ = socket.set_tcp_congestion(b"reno");
    }
}

/// Bounds what the kernel holds unsent: a small frame waits behind that much at most.
pub(super) fn set_not_sent_low_water(socket: &Socket) -> io::Result<()> {
    let value = NOT_SENT_LOW_WATER;
    // SAFETY: the option takes a 32-bit number, and that is what is passed with its size.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use socket2::{Domain, Type};

    use super::*;

    #[test]
    fn connections_within_the_host_are_not_paced() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let to = listener.local_addr().expect("address");
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("socket");
        socket.connect(&to.into()).expect("connect");
        hurry_on_host(&socket, to);
        let control = socket.tcp_congestion().expect("read back");
        assert!(control.starts_with(b"reno"), "{control:?}");
    }

    #[test]
    fn connections_to_others_keep_what_the_system_says() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("socket");
        let before = socket.tcp_congestion().expect("read");
        hurry_on_host(&socket, "192.0.2.1:1".parse().expect("address"));
        assert_eq!(socket.tcp_congestion().expect("read again"), before);
    }
}
