//! What we ask of peers: operations from their post to their end, and what goes out piece by piece.

use std::sync::Arc;
use std::time::Duration;

use super::{Core, Out, SMALL, Stage, Stream, Target};
use crate::completion::Completion;
use crate::error::{Error, ErrorKind};
use crate::transfer::{Deadline, Op, OpId, STALL, Work, of_element};
use crate::transport::{Body, Class, ConnId, Frame, Refuse, Source, Transport};
use crate::wire::{self, Message, MsgPiece, Piece};

/// Elements of reads that one link may have asked for at a time.
pub(super) const MAX_READS_OUT: usize = 16 << 10;

/// Large transfers of one link that take turns; the others wait until one of these has ended. Bounds how many writes the
/// peer has begun to refuse: it keeps a note of each until its last piece has come.
const MAX_TURNS: usize = 64;

impl Core {
    pub(super) fn post(
        &mut self,
        id: OpId,
        target: Target,
        work: Work,
        deadline: Deadline,
        completion: Arc<Completion>,
    ) {
        let peer = match &target {
            Target::Url(url) => {
                let peer = self.peer_index(&url.id);
                let entry = &mut self.peers[peer];
                if entry
                    .url
                    .as_ref()
                    .is_none_or(|known| !Arc::ptr_eq(known, url))
                {
                    entry.url = Some(url.clone());
                }
                Some(peer)
            }
            Target::Id(peer) => self
                .by_id
                .get(peer)
                .copied()
                .filter(|&p| self.peers[p].live.is_some()),
            Target::Channel(outlet) => self.by_id.get(&outlet.peer.id).copied().filter(|&p| {
                let conn = self.peers[p].live.filter(|&conn| self.is_live(conn));
                conn.is_some() && conn == outlet.conn() && self.peers[p].leaving.is_none()
            }),
        };
        let channel = match (&target, &work) {
            (Target::Channel(outlet), _) | (_, Work::Open(outlet)) => Some(outlet.clone()),
            _ => None,
        };
        self.shared.counters.inflight.add_one();
        let op = Op {
            peer: peer.unwrap_or(usize::MAX),
            work,
            completion,
            deadline,
            posted: self.now,
            moved: self.now,
            conn: None,
            doom: None,
            one_sided: None,
            timer: None,
            channel,
        };
        self.ops.insert(id, op);
        let Some(peer) = peer else {
            let (wanted, text) = match &target {
                Target::Id(wanted) => (wanted, "no link to this peer: connect by its URL first"),
                Target::Url(url) => (&url.id, "no such peer"),
                Target::Channel(outlet) => (&outlet.peer.id, "the link of this channel is gone"),
            };
            let error = Error::new(ErrorKind::PeerFailed, text).with_peer(wanted);
            return self.finish(id, Err(error));
        };
        if self.closing.is_some() {
            return self.finish(id, Err(Error::closed()));
        }
        self.set_timer(id);
        let entry = &mut self.peers[peer];
        match entry.live {
            Some(conn)
                if entry.leaving.is_none()
                    && self
                        .conns
                        .get(&conn)
                        .is_some_and(|c| c.stage == Stage::Live && c.is_ready()) =>
            {
                self.start(id, conn);
            }
            _ => {
                entry.waiting.push_back(id);
                self.want(peer, true);
            }
        }
    }

    /// The link is there: the operation goes out, or waits for the credit of its message.
    pub(super) fn start(&mut self, id: OpId, conn: ConnId) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        if op.is_empty() {
            return self.finish(id, Ok(()));
        }
        if let Work::Open(outlet) = &op.work {
            let outlet = outlet.clone();
            return self.open_channel(id, &outlet, conn);
        }
        if op.letter().is_some_and(|letter| letter.seq.is_none()) {
            self.peers[op.peer].letters.push_back(id);
            return self.send_letters(conn);
        }
        self.launch(id, conn);
    }

    /// Puts the operation on its connection.
    pub(super) fn launch(&mut self, id: OpId, conn: ConnId) {
        let (Some(op), Some(entry)) = (self.ops.get_mut(&id), self.conns.get_mut(&conn)) else {
            return;
        };
        let Some(link) = entry.link.as_mut() else {
            return;
        };
        op.conn = Some(conn);
        op.moved = self.now;
        link.moved = self.now;
        if op.deadline == Deadline::Never {
            op.deadline = Deadline::Stall;
        }
        entry.ops.insert(id);
        self.traffic = self.now;
        if link.one_sided && op.is_transfer() {
            self.set_timer(id);
            return self.advance(id);
        }
        self.request(id, conn);
    }

    /// Asks the peer for what an operation has left.
    pub(super) fn request(&mut self, id: OpId, conn: ConnId) {
        let (Some(op), Some(link)) = (
            self.ops.get(&id),
            self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()),
        ) else {
            return;
        };
        match &op.work {
            Work::Read { .. } => {
                link.reads_waiting.push_back(id);
                self.ask(conn);
            }
            Work::Write { .. } => {
                let queue = if op.bytes() <= SMALL {
                    &mut link.small
                } else {
                    &mut link.bulk
                };
                queue.push_back(Stream::Write(id));
                self.pump_later(conn);
            }
            Work::Message(_) | Work::Open(_) => {}
        }
        self.set_timer(id);
    }

    /// Asks for elements of reads as far as the bound allows.
    pub(super) fn ask(&mut self, conn: ConnId) {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        while let Some(&id) = link.reads_waiting.front() {
            let Some(Op {
                work:
                    Work::Read {
                        elements,
                        next,
                        out,
                    },
                ..
            }) = self.ops.get_mut(&id)
            else {
                link.reads_waiting.pop_front();
                continue;
            };
            while *next < elements.len() && link.reads_out < MAX_READS_OUT {
                let element = &elements[*next];
                let message = Message::Read {
                    req: id,
                    elem: *next as u32,
                    addr: element.remote,
                    len: element.len as u64,
                };
                let frame = Frame {
                    head: wire::encode(&message),
                    body: Body::Empty,
                    class: Class::Urgent,
                };
                self.out.push(Out::Send(conn, frame));
                *next += 1;
                *out += 1;
                link.reads_out += 1;
                link.sent = self.now;
            }
            if *next < elements.len() {
                return;
            }
            link.reads_waiting.pop_front();
        }
    }

    /// A piece of an answer has come, and may have to be copied to its place.
    pub(super) fn data_arrived(&mut self, id: OpId, elem: usize, len: usize) {
        if let Some(Op {
            work: Work::Read { elements, .. },
            ..
        }) = self.ops.get_mut(&id)
        {
            elements[elem].done += len;
        }
    }

    /// A piece of an answer is in place.
    pub(super) fn data_placed(&mut self, conn: ConnId, id: OpId, elem: usize, len: usize) {
        self.moved(conn);
        let now = self.now;
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        op.moved = now;
        let Work::Read { elements, .. } = &mut op.work else {
            return;
        };
        let element = &mut elements[elem];
        element.placed += len;
        let done = element.done as u64;
        if element.placed == element.len {
            self.element_answered(conn, id);
        } else {
            self.tell_progress(conn, id, done);
        }
    }

    /// One element of a read has been answered, well or not.
    fn element_answered(&mut self, conn: ConnId, id: OpId) {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return;
        };
        link.reads_out = link.reads_out.saturating_sub(1);
        let more = !link.reads_waiting.is_empty();
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        let Work::Read {
            elements,
            next,
            out,
        } = &mut op.work
        else {
            return;
        };
        *out -= 1;
        // A failed one asks for no more, but waits for what it asked for: answers still write its memory.
        if *out == 0 && (*next == elements.len() || op.doom.is_some()) {
            let result = op.doom.take().map_or(Ok(()), Err);
            self.finish(id, result);
        }
        if more {
            self.ask(conn);
        }
    }

    /// The peer says that a request has ended.
    pub(super) fn on_done(
        &mut self,
        conn: ConnId,
        req: u64,
        code: i32,
        elem: u32,
        text: &str,
    ) -> Result<(), Refuse> {
        self.moved(conn);
        let Some(op) = self.ops.get_mut(&req).filter(|op| op.conn == Some(conn)) else {
            return Err(Refuse(format!(
                "the end of request {req}, which was not asked"
            )));
        };
        let peer = self.peers[op.peer].id.clone();
        // A one-sided operation hears only that a key is refused, or that its signal is delivered.
        if op
            .one_sided
            .as_ref()
            .is_some_and(|progress| !progress.signalled())
        {
            return self.key_refused(conn, req, code, text);
        }
        match &mut op.work {
            Work::Read { elements, next, .. } => {
                let asked = (elem as usize) < *next;
                if code == 0 || !asked || elements[elem as usize].done > 0 {
                    return Err(Refuse(format!(
                        "a read ended with code {code} at element {elem}"
                    )));
                }
                let text = of_element(elements, elem as usize, text);
                op.doom
                    .get_or_insert_with(|| Error::from_code(code, text).with_peer(&peer));
                self.element_answered(conn, req);
            }
            Work::Write { elements, next, .. } => {
                // The answer to the last piece cannot come before that piece has gone.
                if *next < elements.len() {
                    return Err(Refuse(format!(
                        "request {req} ended before all of it was sent"
                    )));
                }
                let result = if code == 0 {
                    Ok(())
                } else {
                    let text = of_element(elements, elem as usize, text);
                    Err(Error::from_code(code, text).with_peer(&peer))
                };
                self.finish(req, result);
            }
            Work::Message(_) | Work::Open(_) => {
                return Err(Refuse("an answer to a message".into()));
            }
        }
        Ok(())
    }

    // ---- what goes out ------------------------------------------------------------------------

    /// Moves pieces of streams to the transport, as far as there is room. Returns how many.
    pub(crate) fn pump(&mut self, transport: &mut dyn Transport) -> usize {
        if self.to_pump.is_empty() {
            return 0;
        }
        let mut n = 0;
        let mut conns = std::mem::take(&mut self.to_pump);
        for conn in conns.drain(..) {
            n += self.pump_class(conn, Class::Urgent, transport);
            n += self.pump_class(conn, Class::Bulk, transport);
            if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) {
                link.pumped = !(link.small.is_empty() && link.bulk.is_empty());
                if link.pumped {
                    self.to_pump.push(conn);
                }
            }
        }
        // The list keeps its memory.
        conns.append(&mut self.to_pump);
        self.to_pump = conns;
        n
    }

    fn pump_class(&mut self, conn: ConnId, class: Class, transport: &mut dyn Transport) -> usize {
        let mut n = 0;
        while transport.room(conn, class) {
            let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
                break;
            };
            let piece = link.piece;
            let queue = if class == Class::Urgent {
                &mut link.small
            } else {
                &mut link.bulk
            };
            let Some(stream) = queue.pop_front() else {
                break;
            };
            let origin = self.origin(&stream);
            if !self.may_depart(conn, origin) {
                if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) {
                    link.put_back(stream, class);
                }
                break;
            }
            let (frames, rest) = self.next_piece(stream, piece.min(origin.piece()), class);
            if let Some(frame) = frames {
                self.shared.counters.bytes_sent.add(frame.body.len() as u64);
                if let Some(frame) = self.depart(conn, origin, frame) {
                    transport.send(conn, frame);
                }
                n += 1;
            }
            if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) {
                link.sent = self.now;
                link.moved = self.now;
                if let Some(rest) = rest {
                    // Small ones are finished in order; large ones take turns.
                    match class {
                        Class::Urgent => link.small.push_front(rest),
                        Class::Bulk => {
                            let turn = link.bulk.len().min(MAX_TURNS - 1);
                            link.bulk.insert(turn, rest);
                        }
                    }
                }
            }
        }
        n
    }

    /// The next frame of a stream, and the stream if more is to come.
    fn next_piece(
        &mut self,
        stream: Stream,
        piece: usize,
        class: Class,
    ) -> (Option<Frame>, Option<Stream>) {
        match stream {
            Stream::Answer {
                req,
                elem,
                ptr,
                len,
                sent,
                lease,
                residence,
            } => {
                let n = piece.min(len - sent);
                let head = wire::encode(&Message::Data {
                    req,
                    elem,
                    offset: sent as u64,
                });
                let source = Source {
                    ptr: (ptr + sent) as *const u8,
                    len: n,
                    lease: lease.clone(),
                };
                let frame = Frame {
                    head,
                    body: Body::Memory(source),
                    class,
                };
                let sent = sent + n;
                (
                    Some(frame),
                    (sent < len).then_some(Stream::Answer {
                        req,
                        elem,
                        ptr,
                        len,
                        sent,
                        lease,
                        residence,
                    }),
                )
            }
            Stream::Write(id) => self.next_write_piece(id, piece, class),
            Stream::Letter {
                seq,
                bytes,
                sent,
                signals,
            } => {
                let n = piece.min(bytes.len() - sent);
                let message = MsgPiece {
                    seq,
                    total: bytes.len() as u64,
                    offset: sent as u64,
                    signals,
                };
                let head = wire::encode(&Message::Msg(message));
                if sent == 0 && n == bytes.len() {
                    return (
                        Some(Frame {
                            head,
                            body: Body::Bytes(bytes),
                            class,
                        }),
                        None,
                    );
                }
                // A message longer than a piece is copied piece by piece: it is not the data path.
                let frame = Frame {
                    head,
                    body: Body::Bytes(bytes[sent..sent + n].to_vec()),
                    class,
                };
                let sent = sent + n;
                (
                    Some(frame),
                    (sent < bytes.len()).then_some(Stream::Letter {
                        seq,
                        bytes,
                        sent,
                        signals,
                    }),
                )
            }
        }
    }

    fn next_write_piece(
        &mut self,
        id: OpId,
        piece: usize,
        class: Class,
    ) -> (Option<Frame>, Option<Stream>) {
        let now = self.now;
        let Some(op) = self.ops.get_mut(&id) else {
            return (None, None);
        };
        op.moved = now;
        let Work::Write {
            elements,
            next,
            chain,
            signal,
        } = &mut op.work
        else {
            return (None, None);
        };
        let count = elements.len();
        let Some(element) = elements.get_mut(*next) else {
            // All data is out: the signal follows it on the same way.
            let letter = signal.as_mut().and_then(|letter| {
                Some(Stream::Letter {
                    seq: letter.seq?,
                    bytes: std::mem::take(&mut letter.bytes),
                    sent: 0,
                    signals: Some(id),
                })
            });
            return match letter {
                Some(letter) => self.next_piece(letter, piece, class),
                None => (None, None),
            };
        };
        let n = piece.min(element.len - element.done);
        let offset = element.done;
        element.done += n;
        let complete = element.done == element.len;
        let final_element = *next + 1 == count;
        let message = Message::Write(Piece {
            req: id,
            elem: *next as u32,
            last: complete && final_element && signal.is_none(),
            flag: *chain && final_element,
            addr: element.remote,
            len: element.len as u64,
            offset: offset as u64,
        });
        let source = Source {
            ptr: (element.local + offset) as *const u8,
            len: n,
            lease: element.lease.clone(),
        };
        if complete {
            *next += 1;
        }
        let more = *next < count || signal.is_some();
        let frame = Frame {
            head: wire::encode(&message),
            body: Body::Memory(source),
            class,
        };
        (Some(frame), more.then_some(Stream::Write(id)))
    }

    // ---- ends ---------------------------------------------------------------------------------

    /// The one place where an operation ends (I1).
    pub(super) fn finish(&mut self, id: OpId, result: Result<(), Error>) {
        let Some(op) = self.ops.remove(&id) else {
            return;
        };
        if let Some(at) = op.timer {
            self.timers.remove(&(at, id));
        }
        if let Some(entry) = op.conn.and_then(|conn| self.conns.get_mut(&conn)) {
            entry.ops.remove(&id);
        }
        let counters = &self.shared.counters;
        counters.inflight.sub_one();
        if op.is_transfer() {
            if result.is_ok() {
                counters.rma_ok.add_one()
            } else {
                counters.rma_err.add_one()
            }
        }
        if self.shared.debug
            && let Err(error) = &result
        {
            super::debug_line(&format!("{} failed: {error}", op.describe()));
        }
        if let (Some(outlet), Err(error)) = (&op.channel, &result) {
            self.channel_failed(outlet, error);
        }
        if result.is_ok() {
            self.step_done(&op);
        }
        if op.completion.finish(result) {
            self.woken.push(op.completion);
        }
    }

    /// Ends an operation before its time. If it has been started its connection is closed first, so that no
    /// late byte lands in the caller's memory (I2); `reason` tells the peers of that link why.
    pub(super) fn fail_op(&mut self, id: OpId, error: Error, reason: &str) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        match op.conn {
            Some(conn) => {
                op.doom = Some(error);
                if let Some(at) = op.timer.take() {
                    self.timers.remove(&(at, id));
                }
                self.suspect(conn, reason.to_owned());
            }
            None => {
                let entry = &mut self.peers[op.peer];
                entry.waiting.retain(|&waiting| waiting != id);
                entry.letters.retain(|&waiting| waiting != id);
                self.finish(id, Err(error));
            }
        }
    }

    fn set_timer(&mut self, id: OpId) {
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        let due = op.due();
        // Posted and launched at one moment, most often.
        if op.timer == due {
            return;
        }
        if let Some(at) = std::mem::replace(&mut op.timer, due) {
            self.timers.remove(&(at, id));
        }
        if let Some(at) = due {
            self.timers.insert((at, id));
        }
    }

    /// Ends what has run out of time.
    pub(super) fn expire_ops(&mut self) {
        while let Some(&(at, id)) = self.timers.first() {
            if at > self.now {
                break;
            }
            self.timers.pop_first();
            let Some(op) = self.ops.get_mut(&id) else {
                continue;
            };
            op.timer = None;
            if op.deadline == Deadline::Stall {
                self.postpone_stall(id);
            }
            let Some(op) = self.ops.get_mut(&id) else {
                continue;
            };
            if op.due().is_some_and(|due| due > self.now) {
                self.set_timer(id);
                continue;
            }
            let waited = Duration::from_nanos(self.now.saturating_sub(op.posted));
            let what = op.describe();
            let text = match op.deadline {
                Deadline::Stall => format!(
                    "{what} timed out: no progress for {:?}",
                    Duration::from_nanos(STALL)
                ),
                _ if op.conn.is_none() => {
                    format!("{what} timed out after {waited:.1?}, before it could be sent")
                }
                _ => format!("{what} timed out after {waited:.1?}"),
            };
            self.shared.counters.op_timeouts.add_one();
            let error = Error::new(ErrorKind::TimedOut, text).with_peer(&self.peers[op.peer].id);
            self.fail_op(
                id,
                error,
                "operation timeout: the link was closed so that no late byte lands",
            );
        }
    }

    /// An operation that queues behind others of its link does not stall while those move, and one that waits for
    /// a dial has the dial's own deadline.
    fn postpone_stall(&mut self, id: OpId) {
        let now = self.now;
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        match op.conn {
            Some(conn) => {
                if let Some(link) = self.conns.get(&conn).and_then(|c| c.link.as_ref()) {
                    op.moved = op.moved.max(link.moved);
                }
            }
            None => op.moved = now,
        }
    }

    /// A region is to go and its users did not let go of it in time.
    pub(super) fn evict(&mut self, conns: &[ConnId], addr: usize, len: usize) {
        for &conn in conns {
            self.suspect(
                conn,
                "transfer timeout: the region was unregistered while the peer used it".into(),
            );
        }
        let local: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.touches(addr, len))
            .map(|(&id, _)| id)
            .collect();
        for id in local {
            let error = Error::new(
                ErrorKind::Canceled,
                format!("canceled: its local region at {addr:#x} was unregistered"),
            );
            self.fail_op(
                id,
                error,
                "transfer timeout: the local region of an operation was unregistered",
            );
        }
    }
}
