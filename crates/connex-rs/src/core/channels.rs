//! Step channels on the wire: opening, credit and end. The steps themselves are ordinary chains.

use std::sync::Arc;

use super::{Core, Stage};
use crate::channel::{Broken, End, Inlet, Layout, MAX_NAME, Open, Outlet, Request, STEP_LOST};
use crate::completion::Completion;
use crate::error::{Error, ErrorKind};
use crate::transfer::{Op, OpId, Work};
use crate::transport::{ConnId, Refuse};
use crate::wire::{ChannelVerb, Control, Message};

/// Slots that one credit message names.
const SLOTS_PER_CREDIT: usize = crate::wire::MAX_TEXT / 4;

impl From<Broken> for Refuse {
    fn from(Broken(what): Broken) -> Self {
        Refuse(what)
    }
}

impl Core {
    pub(super) fn is_live(&self, conn: ConnId) -> bool {
        self.conns
            .get(&conn)
            .is_some_and(|c| c.stage == Stage::Live)
    }

    fn control_channel(&mut self, conn: ConnId, channel: u64, verb: ChannelVerb, body: Vec<u8>) {
        self.send_with(conn, &Message::Channel(Control { channel, verb }), body);
    }

    /// The link for a new channel is there.
    pub(super) fn open_channel(&mut self, id: OpId, outlet: &Arc<Outlet>, conn: ConnId) {
        if outlet.ask_on(conn) {
            let verb = ChannelVerb::Open {
                slots: outlet.layout.slots().into(),
                slot_bytes: outlet.layout.slot_bytes(),
            };
            self.control_channel(conn, outlet.id, verb, outlet.name.as_bytes().to_vec());
            self.traffic = self.now;
        }
        self.finish(id, Ok(()));
        self.tell_end(outlet);
    }

    /// An operation of a channel has failed: so has the channel, for a step is missing in it.
    pub(super) fn channel_failed(&mut self, outlet: &Arc<Outlet>, error: &Error) {
        if let Some(conn) = outlet.conn()
            && self.is_live(conn)
        {
            let verb = ChannelVerb::End {
                count: STEP_LOST,
                clean: false,
            };
            self.control_channel(conn, outlet.id, verb, Vec::new());
        }
        outlet.fail(None, error, &mut self.woken);
    }

    fn tell_end(&mut self, outlet: &Outlet) {
        if let Some((conn, End { count, clean })) = outlet.end_to_tell()
            && self.is_live(conn)
        {
            self.control_channel(
                conn,
                outlet.id,
                ChannelVerb::End { count, clean },
                Vec::new(),
            );
        }
    }

    /// What a handle asks for.
    pub(super) fn channel_request(&mut self, request: Request) {
        match request {
            Request::End(outlet) => self.tell_end(&outlet),
            Request::Accept(inlet) => {
                if self.is_live(inlet.conn) {
                    let verb = ChannelVerb::Accept {
                        ring: inlet.base() as u64,
                    };
                    self.control_channel(inlet.conn, inlet.channel, verb, Vec::new());
                    self.traffic = self.now;
                } else {
                    let error = Error::new(ErrorKind::PeerFailed, "the connection is gone")
                        .with_peer(&inlet.peer);
                    inlet.fail(&error, &mut self.woken);
                    self.retire_ring(&inlet);
                }
            }
            Request::Refuse {
                conn,
                channel,
                reason,
            } => {
                if self.is_live(conn) {
                    self.control_channel(conn, channel, ChannelVerb::Refuse, reason.into_bytes());
                }
            }
            Request::Credit(inlet) => {
                let slots = inlet.take_credits();
                if self.is_live(inlet.conn) {
                    for slots in slots.chunks(SLOTS_PER_CREDIT) {
                        let body = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
                        self.control_channel(inlet.conn, inlet.channel, ChannelVerb::Credit, body);
                    }
                }
            }
            Request::Quit(inlet) => {
                let (news, unneeded) = inlet.on_quit();
                if news && self.is_live(inlet.conn) {
                    self.control_channel(inlet.conn, inlet.channel, ChannelVerb::Quit, Vec::new());
                }
                if unneeded {
                    self.retire_ring(&inlet);
                }
            }
        }
    }

    /// Nothing is written to a ring any more: peers lose their access. Its memory lives on while steps of it do, and
    /// until the device has forgotten it.
    fn retire_ring(&mut self, inlet: &Inlet) {
        if let Some(inlet) = self.shared.channels.retire(inlet) {
            self.unregister_ring(inlet);
        }
    }

    fn unregister_ring(&mut self, inlet: Arc<Inlet>) {
        let base = inlet.base();
        // Before the key is asked back, so that no new one is given.
        let region = self.shared.registry.lock().unregister(base);
        debug_assert!(region.is_ok(), "a ring that was not registered");
        let forgotten = Arc::new(Completion::default());
        self.old_rings.push((forgotten.clone(), inlet));
        self.withdraw(base as u64, forgotten);
    }

    /// The device has forgotten some region.
    pub(super) fn free_rings(&mut self) {
        self.old_rings.retain(|(forgotten, _)| !forgotten.is_done());
    }

    /// A flag was stored in our memory for a peer.
    pub(super) fn flag_stored(&mut self, conn: ConnId, addr: usize) {
        let unneeded = self.shared.channels.landed(conn, addr, &mut self.woken);
        if let Some(inlet) = unneeded {
            self.retire_ring(&inlet);
        }
    }

    /// A link is gone: so are the channels on it.
    pub(super) fn channels_lost(&mut self, conn: ConnId, error: &Error) {
        for inlet in self.shared.channels.lost(conn, error, &mut self.woken) {
            self.unregister_ring(inlet);
        }
    }

    /// The chain of a step has ended well. Where hardware wrote it the receiver's engine has not seen it: it is told.
    pub(super) fn step_done(&mut self, op: &Op) {
        if let (Some(outlet), Some(conn), Work::Write { .. }) = (&op.channel, op.conn, &op.work)
            && op.one_sided.is_some()
            && self.is_live(conn)
        {
            self.control_channel(conn, outlet.id, ChannelVerb::Landed, Vec::new());
        }
    }

    /// A peer speaks of a channel.
    pub(super) fn on_channel(
        &mut self,
        conn: ConnId,
        control: Control,
        body: &[u8],
    ) -> Result<(), Refuse> {
        let Control { channel, verb } = control;
        let Some(peer) = self.conns.get(&conn).and_then(|c| c.peer) else {
            return Ok(());
        };
        let peer = self.peers[peer].id.clone();
        self.traffic = self.now;
        let shared = self.shared.clone();
        let channels = &shared.channels;
        let takes_body = matches!(
            verb,
            ChannelVerb::Open { .. } | ChannelVerb::Refuse | ChannelVerb::Credit
        );
        if !takes_body && !body.is_empty() {
            return Err(Refuse(format!("{verb:?} with {} bytes", body.len())));
        }
        match verb {
            ChannelVerb::Open { slots, slot_bytes } => {
                let name = std::str::from_utf8(body)
                    .ok()
                    .filter(|name| name.len() <= MAX_NAME)
                    .ok_or_else(|| Refuse(format!("a channel name of {} bytes", body.len())))?;
                let opened = Layout::new(slots, slot_bytes).and_then(|layout| {
                    let open = Open {
                        conn,
                        channel,
                        peer,
                        name: name.into(),
                        layout,
                    };
                    channels.request(open, &mut self.woken)
                });
                if let Err(reason) = opened {
                    shared.counters.requests_refused.add_one();
                    self.control_channel(conn, channel, ChannelVerb::Refuse, reason.into_bytes());
                }
            }
            ChannelVerb::Accept { ring } => {
                if let Some(outlet) = channels.outlet(channel) {
                    outlet.on_accept(conn, ring, &mut self.woken)?;
                }
            }
            ChannelVerb::Refuse => {
                if let Some(outlet) = channels.outlet(channel) {
                    let text = format!("refused: {}", String::from_utf8_lossy(body));
                    let error = Error::new(ErrorKind::PeerFailed, text).with_peer(&peer);
                    outlet.fail(Some(conn), &error, &mut self.woken);
                }
            }
            ChannelVerb::Credit => {
                let (slots, rest) = body.as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(Refuse(format!("a credit of {} bytes", body.len())));
                }
                if let Some(outlet) = channels.outlet(channel) {
                    let slots = slots.iter().map(|slot| u32::from_le_bytes(*slot));
                    outlet.on_credit(conn, slots, &mut self.woken)?;
                }
            }
            ChannelVerb::End { count, clean } => {
                let end = End { count, clean };
                let unneeded = channels.on_end(conn, channel, end, &mut self.woken)?;
                if let Some(inlet) = unneeded {
                    self.retire_ring(&inlet);
                }
            }
            ChannelVerb::Landed => {
                let unneeded = channels.on_landed(conn, channel, &mut self.woken);
                if let Some(inlet) = unneeded {
                    self.retire_ring(&inlet);
                }
            }
            ChannelVerb::Quit => {
                if let Some(outlet) = channels.outlet(channel) {
                    // What was posted still lands; the ring stays until the receiver has counted it.
                    outlet.close(false, &mut self.woken);
                    if outlet.conn() == Some(conn) {
                        self.tell_end(&outlet);
                    }
                    let error = Error::new(ErrorKind::PeerFailed, "closed by its receiver")
                        .with_peer(&peer);
                    outlet.fail(Some(conn), &error, &mut self.woken);
                }
            }
        }
        Ok(())
    }
}
