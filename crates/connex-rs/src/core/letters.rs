//! Messages: out with credit and a number, in by number and to the application.

use super::{Core, SMALL, Stream};
use crate::inbox::{Mail, Owed};
use crate::transfer::Work;
use crate::transport::{ConnId, Refuse};
use crate::wire::{MAX_MESSAGE, Message, MsgPiece};

/// A message that is incomplete, or complete and early.
#[derive(Debug)]
pub(super) struct Partial {
    total: u64,
    bytes: Vec<u8>,
    signals: Option<u64>,
}

impl Partial {
    fn is_complete(&self) -> bool {
        self.bytes.len() as u64 == self.total
    }
}

impl Core {
    /// Messages and signals that wait get credit in their order, as far as it goes.
    pub(super) fn send_letters(&mut self, conn: ConnId) {
        let Some(peer) = self.conns.get(&conn).and_then(|c| c.peer) else {
            return;
        };
        while let Some(&id) = self.peers[peer].letters.front() {
            let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
                return;
            };
            let Some(op) = self.ops.get_mut(&id) else {
                self.peers[peer].letters.pop_front();
                continue;
            };
            let Some(letter) = op.letter_mut() else {
                return;
            };
            if !link.credit_out.take(letter.bytes.len() as u64) {
                return;
            }
            let seq = link.next_seq_out;
            link.next_seq_out += 1;
            letter.seq = Some(seq);
            self.peers[peer].letters.pop_front();
            match &mut op.work {
                Work::Message(letter) => {
                    let bytes = std::mem::take(&mut letter.bytes);
                    let queue = if bytes.len() <= SMALL {
                        &mut link.small
                    } else {
                        &mut link.bulk
                    };
                    queue.push_back(Stream::Letter {
                        seq,
                        bytes,
                        sent: 0,
                        signals: None,
                    });
                    self.pump_later(conn);
                    self.traffic = self.now;
                    // Accepted for sending.
                    self.finish(id, Ok(()));
                }
                _ => self.launch(id, conn),
            }
        }
    }

    pub(super) fn on_credit(&mut self, conn: ConnId, limit: u64) {
        if let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) {
            link.credit_out.raise(limit);
        }
        self.send_letters(conn);
    }

    /// The application has taken messages of this link.
    pub(super) fn owed(&mut self, owed: Owed) {
        if let Some(link) = self.conns.get_mut(&owed.conn).and_then(|c| c.link.as_mut()) {
            let limit = link.credit_in.give_back(owed.cost);
            self.send(owed.conn, &Message::Credit { limit });
        }
    }

    /// A piece of a message starts: checks it before anything is kept for it.
    pub(super) fn open_letter(
        &mut self,
        conn: ConnId,
        piece: &MsgPiece,
        len: usize,
    ) -> Result<(), Refuse> {
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return Ok(());
        };
        if piece.total > MAX_MESSAGE {
            return Err(Refuse(format!("a message of {} bytes", piece.total)));
        }
        if piece.offset == 0 {
            if piece.seq < link.next_seq_in || link.letters_in.contains_key(&piece.seq) {
                return Err(Refuse(format!("message {} came twice", piece.seq)));
            }
            if !link.credit_in.take(piece.total) {
                return Err(Refuse("a message beyond the credit".into()));
            }
            let partial = Partial {
                total: piece.total,
                bytes: Vec::new(),
                signals: piece.signals,
            };
            link.letters_in.insert(piece.seq, partial);
        }
        let at = link
            .letters_in
            .get(&piece.seq)
            .map(|p| (p.bytes.len() as u64, p.total));
        if at != Some((piece.offset, piece.total)) || piece.offset + len as u64 > piece.total {
            return Err(Refuse(format!(
                "a piece of message {} is out of place",
                piece.seq
            )));
        }
        if len == 0 && piece.total > 0 {
            return Err(Refuse(format!("an empty piece of message {}", piece.seq)));
        }
        Ok(())
    }

    /// A piece of a message is here.
    pub(super) fn letter_piece(
        &mut self,
        conn: ConnId,
        piece: MsgPiece,
        bytes: Vec<u8>,
    ) -> Result<(), Refuse> {
        self.moved(conn);
        let Some(link) = self.conns.get_mut(&conn).and_then(|c| c.link.as_mut()) else {
            return Ok(());
        };
        let Some(partial) = link.letters_in.get_mut(&piece.seq) else {
            return Ok(());
        };
        if partial.bytes.is_empty() {
            partial.bytes = bytes;
        } else {
            partial.bytes.extend_from_slice(&bytes);
        }
        // On a slow link the sender of a signal, or of heartbeats, hears nothing else for long.
        self.tell_progress(conn, piece.signals.unwrap_or(0), 0);
        self.deliver_letters(conn);
        Ok(())
    }

    /// Hands complete messages to the application, in order.
    fn deliver_letters(&mut self, conn: ConnId) {
        loop {
            let Some(entry) = self.conns.get_mut(&conn) else {
                return;
            };
            let (Some(peer), Some(link)) = (entry.peer, entry.link.as_mut()) else {
                return;
            };
            let seq = link.next_seq_in;
            if !link.letters_in.get(&seq).is_some_and(Partial::is_complete) {
                return;
            }
            let Some(partial) = link.letters_in.remove(&seq) else {
                return;
            };
            link.next_seq_in += 1;
            let refused = partial
                .signals
                .is_some_and(|req| link.refused.contains_key(&req));
            if refused {
                // Its data was not written, so nobody hears of it; its credit goes back.
                let cost = crate::inbox::cost(partial.total);
                self.owed(Owed { conn, cost });
            } else {
                self.shared.counters.messages_received.add_one();
                let from = self.peers[peer].id.clone();
                self.shared.inbox.push(Mail {
                    from,
                    conn,
                    bytes: partial.bytes,
                });
            }
            if let Some(req) = partial.signals {
                if refused {
                    self.answer_refused(conn, req);
                } else {
                    self.send(
                        conn,
                        &Message::Done {
                            req,
                            code: 0,
                            elem: 0,
                        },
                    );
                }
            }
        }
    }
}
