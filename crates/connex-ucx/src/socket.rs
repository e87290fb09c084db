//! UCX's listening socket, which UCX itself does not let go of safely.
//!
//! `ucp_listener_destroy` frees the listener while connections that were accepted but have not sent their first bytes still
//! point to it: their bytes, when they come, crash the process in UCX's own thread (seen with 1.16 and 1.22). And when no
//! descriptor is left, that thread calls `accept` in vain without end. So this crate works on the socket instead: a closed listener
//! loses its socket at once, is destroyed only together with its worker, and before that the connections that were begun at it are
//! ended and UCX has let go of them; and a paused one is taken out of the set that UCX's thread waits for. Descriptors are
//! found through `/proc`, for UCX does not tell them.

use std::collections::HashSet;
use std::ffi::c_int;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::socklen_t;

use crate::addr;

/// A listening socket of UCX.
pub(crate) struct Socket {
    fd: RawFd,
    addr: SocketAddr,
    /// The connections that had been accepted when it was closed, by their sockets' inodes.
    accepted: HashSet<u64>,
    /// Takes the socket's number when it is closed, so that UCX closes nothing of somebody else's later.
    spare: OwnedFd,
    set: Set,
}

/// The epoll set of UCX's thread, and what it is told about the socket.
struct Set {
    fd: RawFd,
    events: u32,
    data: u64,
}

impl Socket {
    /// Finds the socket that listens on `addr` and the set that watches it.
    pub(crate) fn find(addr: SocketAddr) -> Option<Self> {
        let fd = descriptors().into_iter().find(|&fd| listens_on(fd, addr))?;
        let set = descriptors()
            .into_iter()
            .find_map(|set| watched_by(set, fd))?;
        // SAFETY: makes a new descriptor, which is ours alone.
        let spare = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if spare < 0 {
            return None;
        }
        // SAFETY: made just now.
        let spare = unsafe { OwnedFd::from_raw_fd(spare) };
        // UCX's sockets are inherited by children, which would hold the port.
        // SAFETY: sets a flag of an open descriptor.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        Some(Self {
            fd,
            addr,
            accepted: HashSet::new(),
            spare,
            set,
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether UCX's thread is told of connections.
    pub(crate) fn set_watched(&self, watched: bool) -> bool {
        let events = if watched { self.set.events } else { 0 };
        self.control(libc::EPOLL_CTL_MOD, events)
    }

    /// Closes the socket, and leaves something harmless under its number for UCX to close.
    pub(crate) fn close(&mut self) {
        // SAFETY: both descriptors are open; the socket's own file goes, and with it its place in UCX's set.
        if unsafe { libc::dup3(self.spare.as_raw_fd(), self.fd, libc::O_CLOEXEC) } == self.fd {
            // UCX takes the number out of its set later; it must be in there.
            self.control(libc::EPOLL_CTL_ADD, 0);
        }
        self.accepted = accepted_at(self.addr).filter_map(inode_of).collect();
    }

    /// Once it is closed: ends the connections that were accepted at it. True if there is none left; UCX closes their sockets
    /// when it sees the end.
    pub(crate) fn end_accepted(&self) -> bool {
        // Somebody in this process may listen at the same address by now, and has connections of its own.
        let taken = descriptors()
            .into_iter()
            .any(|fd| listens_on(fd, self.addr));
        let ours = |fd: &RawFd| {
            !taken || inode_of(*fd).is_some_and(|inode| self.accepted.contains(&inode))
        };
        let mut none = true;
        for fd in accepted_at(self.addr).filter(ours) {
            none = false;
            // SAFETY: ends the traffic of a socket; the number may have gone to another file meanwhile only if UCX has closed
            // it just now, and then hardly to a socket with the same address.
            unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
        }
        none
    }

    fn control(&self, operation: c_int, events: u32) -> bool {
        let mut event = libc::epoll_event {
            events,
            u64: self.set.data,
        };
        // SAFETY: a set and a descriptor that UCX keeps open while the listener exists, and a valid record.
        unsafe { libc::epoll_ctl(self.set.fd, operation, self.fd, &mut event) == 0 }
    }
}

fn descriptors() -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd")
        .map(|list| list.flatten().collect::<Vec<_>>())
        .unwrap_or_default();
    entries
        .iter()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn listens_on(fd: RawFd, wanted: SocketAddr) -> bool {
    option_of(fd, libc::SO_ACCEPTCONN) == Some(1) && local_of(fd) == Some(wanted)
}

/// The connections that were accepted by a listener at `addr`.
fn accepted_at(addr: SocketAddr) -> impl Iterator<Item = RawFd> {
    descriptors().into_iter().filter(move |&fd| {
        option_of(fd, libc::SO_ACCEPTCONN) == Some(0)
            && option_of(fd, libc::SO_TYPE) == Some(libc::SOCK_STREAM)
            && local_of(fd).is_some_and(|local| {
                local == addr || (addr.ip().is_unspecified() && local.port() == addr.port())
            })
    })
}

/// An option of a socket; `None` for what is no socket.
fn option_of(fd: RawFd, option: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: asks about a descriptor; a number and its size are passed.
    let rc = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &mut len,
        )
    };
    (rc == 0).then_some(value)
}

fn local_of(fd: RawFd) -> Option<SocketAddr> {
    let mut storage = addr::empty();
    let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
    // SAFETY: the storage holds any address.
    let rc = unsafe { libc::getsockname(fd, (&raw mut storage).cast(), &mut len) };
    (rc == 0).then(|| addr::from_storage(&storage)).flatten()
}

/// If `set` is an epoll set that watches `socket`: what it was told.
fn watched_by(set: RawFd, socket: RawFd) -> Option<Set> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{set}")).ok()?;
    let inode = inode_of(socket)?;
    info.lines()
        .find_map(|line| parse(line, socket, inode))
        .map(|(events, data)| Set {
            fd: set,
            events,
            data,
        })
}

fn inode_of(fd: RawFd) -> Option<u64> {
    // SAFETY: zero is valid for the record, which is written on success.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &mut stat) == 0).then_some(stat.st_ino)
    }
}

/// Reads `tfd:       12 events:       19 data: 7f0012  pos:0 ino:1f sdev:8`. A set that was inherited from another process may
/// name the same number and mean another file, so the inode counts too.
fn parse(line: &str, socket: RawFd, inode: u64) -> Option<(u32, u64)> {
    let mut words = line.strip_prefix("tfd:")?.split_whitespace();
    if words.next()?.parse() != Ok(socket) {
        return None;
    }
    let events = words.next().filter(|w| *w == "events:").and(words.next())?;
    let data = words.next().filter(|w| *w == "data:").and(words.next())?;
    let of = words.find_map(|word| word.strip_prefix("ino:"))?;
    if u64::from_str_radix(of, 16) != Ok(inode) {
        return None;
    }
    Some((
        u32::from_str_radix(events, 16).ok()?,
        u64::from_str_radix(data, 16).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_set_is_understood() {
        let line = "tfd:       12 events: 40000019 data:     7f0000000a  pos:0 ino:1f sdev:8";
        assert_eq!(parse(line, 12, 0x1f), Some((0x4000_0019, 0x7f_0000_000a)));
        assert_eq!(parse(line, 2, 0x1f), None);
        assert_eq!(
            parse(line, 12, 0x20),
            None,
            "another file under the same number"
        );
        assert_eq!(parse("pos:\t0", 0, 0), None);
    }
}
