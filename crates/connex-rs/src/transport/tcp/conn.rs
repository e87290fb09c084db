//! One connection: frames out of and into a non-blocking stream.
//!
//! On the wire a frame is a prefix of 8 bytes (two magic bytes, the length of the head, a zero, the
//! length of the body), the head, and the body.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use socket2::Socket;

use super::PIECE;
use super::tls::{Reads, Session};
use crate::fork::Private;
use crate::transport::{
    Body, Class, ConnId, Frame, MAX_HEAD, Place, Received, Refuse, Target, Upcalls,
};

const MAGIC: [u8; 2] = [0xc7, 0x5d];
const PREFIX: usize = 8;
/// Frames gathered into one system call: with 32, a batch of 4 KB reads took 1.4 times as long.
const GATHER: usize = 128;
/// Bytes read from one connection before others get their turn.
const READ_BUDGET: usize = 2 << 20;
/// A body with at least this much left is received straight into its place, if that is aligned.
const DIRECT: usize = 64 << 10;
/// `recv` into a place that is not aligned to this runs at half the speed on some processors: such bodies go through the shared
/// hot buffer.
const ALIGNED: usize = 64;

/// A frame on its way out.
struct Outgoing {
    /// Prefix and head.
    start: [u8; PREFIX + MAX_HEAD],
    start_len: usize,
    body: Body,
    /// Bytes of start and body already sent.
    sent: usize,
}

impl Outgoing {
    fn new(frame: Frame) -> Self {
        let head = frame.head.as_slice();
        let mut start = [0; PREFIX + MAX_HEAD];
        start[..2].copy_from_slice(&MAGIC);
        start[2] = head.len() as u8;
        start[4..8].copy_from_slice(&(frame.body.len() as u32).to_le_bytes());
        start[PREFIX..PREFIX + head.len()].copy_from_slice(head);
        Self {
            start,
            start_len: PREFIX + head.len(),
            body: frame.body,
            sent: 0,
        }
    }

    fn len(&self) -> usize {
        self.start_len + self.body.len()
    }

    /// Takes a copy of memory that others own.
    fn detach(&mut self) {
        if let Body::Memory(source) = &self.body {
            // SAFETY: the lease keeps the source valid for reading; it is copied as bytes that may change meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(source.ptr, source.len) }.to_vec();
            self.body = Body::Bytes(bytes);
        }
    }

    /// Adds what is still to be sent to `iov`.
    fn gather(&self, iov: &mut Vec<libc::iovec>) {
        let mut push = |ptr: *const u8, len: usize, skip: usize| {
            if skip < len {
                // `wrapping_add`: stays inside the buffer, skip < len.
                let base = ptr.wrapping_add(skip).cast_mut().cast();
                iov.push(libc::iovec {
                    iov_base: base,
                    iov_len: len - skip,
                });
            }
        };
        push(self.start.as_ptr(), self.start_len, self.sent);
        let skip = self.sent.saturating_sub(self.start_len);
        match &self.body {
            Body::Empty => {}
            Body::Bytes(bytes) => push(bytes.as_ptr(), bytes.len(), skip),
            Body::Memory(source) => push(source.ptr, source.len, skip),
        }
    }
}

/// What is being read.
enum Reading {
    /// Prefix and head are being collected in `Conn::start`.
    Start,
    /// The body goes into memory.
    Memory { target: Target, filled: usize },
    /// The body is collected.
    Bytes { bytes: Vec<u8>, len: usize },
    /// The body is thrown away.
    Discard { left: usize },
}

/// What a system call on the stream came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Io {
    /// So many bytes.
    Moved(usize),
    /// Nothing now.
    Blocked,
    /// The other side has ended its stream.
    End,
}

/// Why reading stopped for good.
#[derive(Debug)]
pub(super) enum Broken {
    End,
    Io(io::Error),
    Protocol(String),
}

/// One connection.
pub(super) struct Conn {
    pub(super) id: ConnId,
    /// Dropped before the socket: fields are dropped in their order.
    #[expect(dead_code, reason = "held for its drop")]
    private: Private,
    socket: Socket,
    tls: Option<Session>,
    urgent: VecDeque<Outgoing>,
    bulk: VecDeque<Outgoing>,
    /// Whether the front of `bulk` is partly sent: then it goes on before anything else.
    bulk_started: bool,
    bulk_bytes: usize,
    reading: Reading,
    start: Vec<u8>,
    /// While large bodies come, the length of the prefix and head that the next one is likely to have: no more is then read
    /// than those, so that its body goes straight into its place, all of it.
    next_start: Option<usize>,
}

impl Conn {
    pub(super) fn new(id: ConnId, socket: Socket) -> Self {
        Self {
            id,
            private: Private::new(socket.as_raw_fd()),
            socket,
            tls: None,
            urgent: VecDeque::new(),
            bulk: VecDeque::new(),
            bulk_started: false,
            bulk_bytes: 0,
            reading: Reading::Start,
            start: Vec::new(),
            next_start: None,
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn queue(&mut self, frame: Frame) {
        let class = frame.class;
        let outgoing = Outgoing::new(frame);
        match class {
            Class::Urgent => self.urgent.push_back(outgoing),
            Class::Bulk => {
                self.bulk_bytes += outgoing.len();
                self.bulk.push_back(outgoing);
            }
        }
    }

    /// Bytes of bulk frames that are queued.
    pub(super) fn bulk_bytes(&self) -> usize {
        self.bulk_bytes
    }

    /// Urgent frames that are queued.
    pub(super) fn urgent_frames(&self) -> usize {
        self.urgent.len()
    }

    pub(super) fn has_output(&self) -> bool {
        !self.urgent.is_empty() || !self.bulk.is_empty()
    }

    /// Drops what is queued and what is being read, and releases the memory of both.
    pub(super) fn drop_memory(&mut self) {
        self.drop_memory_to_send();
        self.reading = Reading::Start;
    }

    /// Drops what is queued and releases its memory.
    pub(super) fn drop_memory_to_send(&mut self) {
        self.urgent.clear();
        self.bulk.clear();
        self.bulk_bytes = 0;
        self.bulk_started = false;
    }

    /// Before an abort: drops all bulk but a frame that is half out, and sends what the socket takes. Of what it does
    /// not take only that frame and the last urgent one, the goodbye, are kept, as copies: no memory is in use after it.
    pub(super) fn part(&mut self) -> io::Result<()> {
        self.bulk.truncate(usize::from(self.bulk_started));
        self.bulk_bytes = self.bulk.iter().map(Outgoing::len).sum();
        self.flush(&mut 0)?;
        let started = self.urgent.front().is_some_and(|front| front.sent > 0);
        let last = self.urgent.len().saturating_sub(1);
        let mut index = 0;
        self.urgent.retain(|_| {
            let keep = (index == 0 && started) || index == last;
            index += 1;
            keep
        });
        for outgoing in self.bulk.iter_mut().chain(&mut self.urgent) {
            outgoing.detach();
        }
        self.reading = Reading::Start;
        self.start.clear();
        Ok(())
    }

    /// Whether something of ours has not been acknowledged by the peer's system.
    pub(super) fn is_unsent(&self) -> bool {
        let mut queued: libc::c_int = 0;
        // SAFETY: the request writes one int.
        let rc = unsafe { libc::ioctl(self.fd(), libc::TIOCOUTQ, &raw mut queued) };
        let encrypted = self.tls.as_ref().is_some_and(Session::has_output);
        self.has_output() || encrypted || (rc == 0 && queued > 0)
    }

    /// Reads and throws away what has come; false once the stream has ended.
    pub(super) fn discard(&mut self, hot: &mut [u8]) -> bool {
        loop {
            // SAFETY: `hot` is a valid buffer of that length.
            match unsafe { recv(self.fd(), hot.as_mut_ptr(), hot.len()) } {
                Ok(Io::Moved(_)) => {}
                Ok(Io::Blocked) => return true,
                Ok(Io::End) | Err(_) => return false,
            }
        }
    }

    /// Sends what the socket takes. True if all is out, false if it would block.
    pub(super) fn flush(&mut self, sent: &mut u64) -> io::Result<bool> {
        if self.tls.is_some() {
            return self.flush_encrypted(sent);
        }
        let mut iov = Vec::with_capacity(2 * GATHER.min(self.urgent.len() + self.bulk.len()));
        while self.has_output() {
            iov.clear();
            for outgoing in self.in_order().take(GATHER) {
                outgoing.gather(&mut iov);
            }
            match send_vectored(self.fd(), &iov)? {
                Io::Moved(n) => {
                    *sent += n as u64;
                    self.advance(n);
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// As [`flush`](Self::flush), through TLS. Frames wait until its handshake is done.
    fn flush_encrypted(&mut self, sent: &mut u64) -> io::Result<bool> {
        let mut iov = Vec::with_capacity(2);
        loop {
            let Some(tls) = &mut self.tls else {
                return Ok(true);
            };
            if !tls.send(&self.socket)? {
                return Ok(false);
            }
            if !tls.is_open() {
                return Ok(true);
            }
            iov.clear();
            let Some(outgoing) = self.in_order().next() else {
                return Ok(true);
            };
            outgoing.gather(&mut iov);
            let mut taken = 0;
            for part in &iov {
                // SAFETY: the part lies in the frame's own bytes or in memory that its lease keeps valid.
                let bytes =
                    unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) };
                let Some(tls) = &mut self.tls else {
                    return Ok(true);
                };
                let n = tls.write(bytes)?;
                taken += n;
                if n < bytes.len() {
                    break;
                }
            }
            *sent += taken as u64;
            self.advance(taken);
        }
    }

    /// Starts TLS on the connection, before anything is sent or received.
    pub(super) fn secure(&mut self, session: Session) {
        self.tls = Some(session);
    }

    /// Whether everything that is needed before frames may travel has been done.
    pub(super) fn is_open(&self) -> bool {
        self.tls.as_ref().is_none_or(Session::is_open)
    }

    /// The queued frames in the order in which they go out.
    fn in_order(&self) -> impl Iterator<Item = &Outgoing> {
        let started = usize::from(self.bulk_started);
        self.bulk
            .iter()
            .take(started)
            .chain(self.urgent.iter())
            .chain(self.bulk.iter().skip(started))
    }

    fn advance(&mut self, mut n: usize) {
        while n > 0 {
            let from_bulk = self.bulk_started || self.urgent.is_empty();
            let queue = if from_bulk {
                &mut self.bulk
            } else {
                &mut self.urgent
            };
            let Some(front) = queue.front_mut() else {
                return;
            };
            let take = n.min(front.len() - front.sent);
            front.sent += take;
            n -= take;
            let complete = front.sent == front.len();
            if from_bulk {
                self.bulk_started = !complete;
            }
            if complete {
                let len = front.len();
                queue.pop_front();
                if from_bulk {
                    self.bulk_bytes -= len;
                }
            }
        }
        // An urgent frame that is partly sent stays at the front of its queue; a bulk frame cannot
        // start before it is complete, since urgent frames come first.
    }

    /// Receives what is there and hands it up. `hot` is a buffer shared by all connections: what
    /// goes through it stays in the cache. Returns the bytes read.
    pub(super) fn receive(
        &mut self,
        hot: &mut [u8],
        up: &mut dyn Upcalls,
    ) -> Result<usize, (usize, Broken)> {
        let mut total = 0;
        while total < READ_BUDGET {
            let (io, wanted) = match self.receive_once(hot, up) {
                Ok(io) => io,
                Err(broken) => return Err((total, broken)),
            };
            match io {
                Io::Moved(n) => {
                    total += n;
                    if n < wanted {
                        break;
                    }
                }
                Io::Blocked => break,
                Io::End => return Err((total, Broken::End)),
            }
        }
        Ok(total)
    }

    /// One system call's worth; also returns how many bytes were asked for.
    fn receive_once(
        &mut self,
        hot: &mut [u8],
        up: &mut dyn Upcalls,
    ) -> Result<(Io, usize), Broken> {
        if let Some(tls) = &mut self.tls {
            let read = tls.read(&self.socket, hot);
            if let Some(subject) = tls.newly_proven() {
                up.proven(self.id, subject);
            }
            return match read {
                Ok(Reads::Plain(n)) => {
                    up.heard(self.id);
                    self.take(&hot[..n], up)?;
                    // More may lie decrypted in the session: only `Blocked` ends the round.
                    Ok((Io::Moved(n), n))
                }
                Ok(Reads::Blocked) => Ok((Io::Blocked, 0)),
                Ok(Reads::End) => Ok((Io::End, 0)),
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    Err(Broken::Protocol(e.to_string()))
                }
                Err(e) => Err(Broken::Io(e)),
            };
        }
        if let Reading::Memory { target, filled } = &mut self.reading {
            let left = target.len - *filled;
            let at = target.ptr.wrapping_add(*filled);
            // The place decides, not how far it is filled: the kernel's pieces end anywhere, also within one call.
            if left >= DIRECT && (target.ptr as usize).is_multiple_of(ALIGNED) {
                // SAFETY: `at` and the `left` bytes after it lie in the target, which its lease keeps valid.
                let io = unsafe { recv(self.socket.as_raw_fd(), at, left) }.map_err(Broken::Io)?;
                if let Io::Moved(n) = io {
                    *filled += n;
                    up.heard(self.id);
                    if *filled == target.len {
                        self.finish(Received::Placed, up)?;
                    }
                }
                return Ok((io, left));
            }
        }
        // What is wanted beyond a body in progress may be the start of the next frames: read all
        // there is, unless the rest of a long body would be better received directly.
        let len = match self.reading {
            Reading::Start if self.start.is_empty() => self.next_start.unwrap_or(hot.len()),
            _ => hot.len(),
        };
        let hot = &mut hot[..len];
        // SAFETY: `hot` is a valid buffer of that length.
        let io = unsafe { recv(self.fd(), hot.as_mut_ptr(), hot.len()) }.map_err(Broken::Io)?;
        if let Io::Moved(n) = io {
            up.heard(self.id);
            self.take(&hot[..n], up)?;
        }
        Ok((io, hot.len()))
    }

    /// Takes received bytes apart into frames.
    fn take(&mut self, mut bytes: &[u8], up: &mut dyn Upcalls) -> Result<(), Broken> {
        while !bytes.is_empty() {
            bytes = match &mut self.reading {
                Reading::Start => self.take_start(bytes, up)?,
                Reading::Memory { target, filled } => {
                    let n = bytes.len().min(target.len - *filled);
                    // SAFETY: the target has room for `n` bytes at `filled` and its lease keeps it valid;
                    // `bytes` is our own buffer, which overlaps no target.
                    unsafe {
                        std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.ptr.add(*filled), n);
                    }
                    *filled += n;
                    if *filled == target.len {
                        self.finish(Received::Placed, up)?;
                    }
                    &bytes[n..]
                }
                Reading::Bytes {
                    bytes: collected,
                    len,
                } => {
                    let n = bytes.len().min(*len - collected.len());
                    collected.extend_from_slice(&bytes[..n]);
                    if collected.len() == *len {
                        let collected = std::mem::take(collected);
                        self.finish(Received::Bytes(collected), up)?;
                    }
                    &bytes[n..]
                }
                Reading::Discard { left } => {
                    let n = bytes.len().min(*left);
                    *left -= n;
                    if *left == 0 {
                        self.finish(Received::Discarded, up)?;
                    }
                    &bytes[n..]
                }
            };
        }
        Ok(())
    }

    /// Collects prefix and head; returns what is left of `bytes`.
    fn take_start<'a>(
        &mut self,
        bytes: &'a [u8],
        up: &mut dyn Upcalls,
    ) -> Result<&'a [u8], Broken> {
        // The common case: all of it lies in `bytes`.
        if self.start.is_empty() && bytes.len() >= PREFIX {
            let (head_len, body_len) = parse_prefix(bytes)?;
            if bytes.len() >= PREFIX + head_len {
                let (start, rest) = bytes.split_at(PREFIX + head_len);
                self.open(&start[PREFIX..], body_len, up)?;
                return Ok(rest);
            }
        }
        let wanted = if self.start.len() < PREFIX {
            PREFIX
        } else {
            PREFIX + parse_prefix(&self.start)?.0
        };
        let n = bytes.len().min(wanted - self.start.len());
        self.start.extend_from_slice(&bytes[..n]);
        if self.start.len() >= PREFIX {
            let (head_len, body_len) = parse_prefix(&self.start)?;
            if self.start.len() == PREFIX + head_len {
                let start = std::mem::take(&mut self.start);
                self.open(&start[PREFIX..], body_len, up)?;
            }
        }
        Ok(&bytes[n..])
    }

    /// A head is complete: asks where the body goes.
    fn open(&mut self, head: &[u8], len: usize, up: &mut dyn Upcalls) -> Result<(), Broken> {
        self.next_start = (len >= DIRECT).then_some(PREFIX + head.len());
        let place = up
            .frame(self.id, head, len)
            .map_err(|Refuse(why)| Broken::Protocol(why))?;
        if len == 0 {
            let received = match place {
                Place::Memory(_) => Received::Placed,
                Place::Bytes => Received::Bytes(Vec::new()),
                Place::Discard => Received::Discarded,
            };
            return up
                .body(self.id, received)
                .map_err(|Refuse(why)| Broken::Protocol(why));
        }
        self.reading = match place {
            Place::Memory(target) => {
                debug_assert_eq!(
                    target.len, len,
                    "the engine names a place of the body's length"
                );
                Reading::Memory { target, filled: 0 }
            }
            Place::Bytes => Reading::Bytes {
                bytes: Vec::with_capacity(len.min(16 << 10)),
                len,
            },
            Place::Discard => Reading::Discard { left: len },
        };
        Ok(())
    }

    fn finish(&mut self, received: Received, up: &mut dyn Upcalls) -> Result<(), Broken> {
        // The target's lease goes first: whoever is told of the body may free the memory.
        self.reading = Reading::Start;
        up.body(self.id, received)
            .map_err(|Refuse(why)| Broken::Protocol(why))
    }
}

/// Head and body length of a frame.
fn parse_prefix(bytes: &[u8]) -> Result<(usize, usize), Broken> {
    let [m0, m1, head, zero, b0, b1, b2, b3, ..] = *bytes else {
        return Err(Broken::Protocol("a prefix cut short".into()));
    };
    if [m0, m1] != MAGIC || zero != 0 {
        return Err(Broken::Protocol(format!(
            "the first bytes {m0:02x} {m1:02x} are not ours: the other side speaks another protocol, perhaps with transport=\"ucx\" where this side has \"tcp\""
        )));
    }
    let (head, body) = (
        usize::from(head),
        u32::from_le_bytes([b0, b1, b2, b3]) as usize,
    );
    if head == 0 || head > MAX_HEAD {
        return Err(Broken::Protocol(format!(
            "a head of {head} bytes, 1 to {MAX_HEAD} are allowed"
        )));
    }
    if body > PIECE {
        return Err(Broken::Protocol(format!(
            "a body of {body} bytes, at most {PIECE} are allowed"
        )));
    }
    Ok((head, body))
}

/// `recv` without waiting. Not by the C library's function, nor is [`send_vectored`]: that is a cancellation point, and to make it
/// one costs it two atomic operations a call.
///
/// # Safety
/// `len` bytes at `ptr` must be valid for writing, or not mapped at all (then the system says EFAULT).
unsafe fn recv(fd: RawFd, ptr: *mut u8, len: usize) -> io::Result<Io> {
    loop {
        // SAFETY: by this function's contract.
        let n = unsafe {
            libc::syscall(
                libc::SYS_recvfrom,
                fd,
                ptr,
                len,
                libc::MSG_DONTWAIT,
                ptr::null_mut::<libc::sockaddr>(),
                ptr::null_mut::<libc::socklen_t>(),
            )
        };
        if n > 0 {
            return Ok(Io::Moved(n as usize));
        }
        if n == 0 {
            return Ok(Io::End);
        }
        if let Some(io) = classify(io::Error::last_os_error())? {
            return Ok(io);
        }
    }
}

/// `sendmsg` without waiting and without SIGPIPE.
fn send_vectored(fd: RawFd, iov: &[libc::iovec]) -> io::Result<Io> {
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_ptr().cast_mut();
    message.msg_iovlen = iov.len() as _;
    loop {
        // SAFETY: the vectors name memory that the queued frames own or hold leases of; the system only reads.
        let n = unsafe {
            libc::syscall(
                libc::SYS_sendmsg,
                fd,
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if n >= 0 {
            return Ok(Io::Moved(n as usize));
        }
        if let Some(io) = classify(io::Error::last_os_error())? {
            return Ok(io);
        }
    }
}

/// `None`: interrupted, try again.
fn classify(error: io::Error) -> io::Result<Option<Io>> {
    match error.kind() {
        io::ErrorKind::WouldBlock => Ok(Some(Io::Blocked)),
        io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}
