//! Flow control of a channel, both ends: plain types without I/O.
//!
//! Steps are numbered from 0 in the order of their sends. A step occupies one slot of the ring, any free one,
//! from its send until the receiver releases it; the slots that are free go round, so that each is used. What
//! tells the receiver that step `n` is there is a *flag word* in the slot that it came in. The receiver takes the
//! steps in the order of their numbers, whatever order they land in, and may release them in any order.

use std::collections::VecDeque;

/// What a peer did that no honest engine does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Broken(pub(crate) String);

/// The place of a step that is about to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    pub(crate) slot: u32,
    pub(crate) seq: u64,
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// The step in each slot: its number and its correlation number.
    slots: Vec<Option<(u64, u64)>>,
    free: VecDeque<u32>,
    next: u64,
    end: Option<End>,
}

/// How a channel ended, as its sender says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct End {
    /// Steps that were sent in all.
    pub(crate) count: u64,
    /// Closed, not abandoned.
    pub(crate) clean: bool,
}

/// The count of a channel that lost a step on the way: what has landed is all there will be.
pub(crate) const STEP_LOST: u64 = u64::MAX;

impl Outgoing {
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            slots: vec![None; slots as usize],
            free: (0..slots).collect(),
            next: 0,
            end: None,
        }
    }

    /// Takes a free slot for the next step; `None` while there is none, and after the end.
    pub(crate) fn take(&mut self, corr: u64) -> Option<Ticket> {
        if self.end.is_some() {
            return None;
        }
        let slot = self.free.pop_front()?;
        let seq = self.next;
        self.next += 1;
        self.slots[slot as usize] = Some((seq, corr));
        Some(Ticket { slot, seq })
    }

    /// Whether [`take`](Self::take) would give something.
    pub(crate) fn has_free(&self) -> bool {
        self.end.is_none() && !self.free.is_empty()
    }

    /// The receiver has released a slot.
    ///
    /// # Errors
    /// [`Broken`] if there is no such slot or nothing was in it.
    pub(crate) fn credit(&mut self, slot: u32) -> Result<(), Broken> {
        let held = self
            .slots
            .get_mut(slot as usize)
            .ok_or_else(|| Broken(format!("slot {slot} was released, which does not exist")))?;
        if held.take().is_none() {
            return Err(Broken(format!("slot {slot} was released twice")));
        }
        self.free.push_back(slot);
        Ok(())
    }

    /// No step follows. Only the first call counts.
    pub(crate) fn close(&mut self, clean: bool) -> End {
        let count = self.next;
        *self.end.get_or_insert(End { count, clean })
    }

    pub(crate) fn end(&self) -> Option<End> {
        self.end
    }

    /// Whether every step that was sent has been released.
    pub(crate) fn is_drained(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// The correlation numbers of the steps that have not been released, in the order of their sends.
    pub(crate) fn untaken(&self) -> Vec<u64> {
        let mut held: Vec<(u64, u64)> = self.slots.iter().flatten().copied().collect();
        held.sort_unstable();
        held.into_iter().map(|(_, corr)| corr).collect()
    }
}

const VALID: u64 = 1 << 31;
const SEQ: u64 = VALID - 1;

/// The flag word of step `seq` whose header is at `offset` of its slot, a multiple of 64. Never 0.
pub(crate) fn flag(seq: u64, offset: u64) -> u64 {
    debug_assert!(offset.is_multiple_of(64) && offset / 64 <= u64::from(u32::MAX));
    (offset / 64) << 32 | VALID | (seq & SEQ)
}

/// Where the header of step `seq` is, if `flag` is its flag word.
fn header_at(flag: u64, seq: u64) -> Option<u64> {
    (flag & (VALID | SEQ) == VALID | (seq & SEQ)).then_some((flag >> 32) * 64)
}

/// What there is for the receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// The next step has landed here; its header is at this offset of the slot.
    Step { slot: u32, seq: u64, header: u64 },
    /// Nothing yet.
    Wait,
    /// All steps have been taken and the sender has closed the channel.
    End,
    /// All steps have been taken and the sender has abandoned the channel.
    Abandoned,
}

/// The receiving end. The flag words are outside: where the peer writes them.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// The steps that are out, by slot: number and correlation number.
    held: Vec<Option<(u64, u64)>>,
    /// The number of the next step to be taken.
    next: u64,
    /// Where it probably is.
    hint: u32,
    /// Steps that have landed, in any order.
    landed: u64,
    end: Option<End>,
    /// Released slots that the sender has not been told of.
    credits: Vec<u32>,
}

impl Incoming {
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            held: vec![None; slots as usize],
            next: 0,
            hint: 0,
            landed: 0,
            end: None,
            credits: Vec::new(),
        }
    }

    /// Looks for the next step; `flag_of` reads the flag word of a slot.
    pub(crate) fn next(&mut self, flag_of: impl Fn(u32) -> u64) -> Next {
        let slots = self.held.len() as u32;
        for n in 0..slots {
            let slot = (self.hint + n) % slots;
            if self.held[slot as usize].is_some() {
                continue;
            }
            if let Some(header) = header_at(flag_of(slot), self.next) {
                self.hint = slot;
                let seq = self.next;
                return Next::Step { slot, seq, header };
            }
        }
        match self.end {
            Some(End { count, clean }) if count == self.next || count == STEP_LOST => {
                if clean {
                    Next::End
                } else {
                    Next::Abandoned
                }
            }
            _ => Next::Wait,
        }
    }

    /// Hands out the step that [`next`](Self::next) found. Its flag word is to be cleared.
    pub(crate) fn take(&mut self, slot: u32, corr: u64) {
        debug_assert!(self.held[slot as usize].is_none());
        self.held[slot as usize] = Some((self.next, corr));
        self.next += 1;
        self.hint = (slot + 1) % self.held.len() as u32;
    }

    /// The application lets go of a step. True if a credit is to be sent: the sender is told of all that was
    /// released until then at once.
    pub(crate) fn release(&mut self, slot: u32) -> bool {
        let held = self.held[slot as usize].take();
        debug_assert!(held.is_some(), "slot {slot} released twice");
        if held.is_none() {
            return false;
        }
        self.credits.push(slot);
        self.credits.len() == 1
    }

    /// The slots that the sender is to be told of.
    pub(crate) fn take_credits(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.credits)
    }

    /// A flag word has been stored.
    pub(crate) fn landed(&mut self) {
        self.landed += 1;
    }

    /// The sender says that no step follows.
    ///
    /// # Errors
    /// [`Broken`] if it has said so before, or counts fewer steps than were taken. That a step was lost is always news.
    pub(crate) fn end(&mut self, end: End) -> Result<(), Broken> {
        if end.count == STEP_LOST {
            self.end = Some(End {
                clean: false,
                ..end
            });
            return Ok(());
        }
        if self.end.is_some() {
            return Err(Broken("a channel was ended twice".into()));
        }
        if end.count < self.next {
            return Err(Broken(format!(
                "a channel ended after {} steps, of which {} were taken",
                end.count, self.next
            )));
        }
        self.end = Some(end);
        Ok(())
    }

    /// Whether nothing can be written to the ring any more: all steps that were ever sent have landed.
    pub(crate) fn all_landed(&self) -> bool {
        self.end.is_some_and(|end| self.landed >= end.count)
    }

    /// The correlation numbers of the steps that were handed out and not released, in their order.
    pub(crate) fn untaken(&self) -> Vec<u64> {
        let mut held: Vec<(u64, u64)> = self.held.iter().flatten().copied().collect();
        held.sort_unstable();
        held.into_iter().map(|(_, corr)| corr).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Both ends and what lies between them: data that lands in any order, control messages in order.
    struct World {
        out: Outgoing,
        inc: Incoming,
        flags: Vec<u64>,
        /// Steps on their way.
        flying: Vec<(Ticket, u64)>,
        /// Credits on their way.
        credits: VecDeque<u32>,
        /// A credit message is to be sent.
        due: bool,
        /// Steps the application holds.
        held: Vec<(u32, u64)>,
        sent: u64,
        taken: u64,
        ended: bool,
    }

    impl World {
        fn new(slots: u32) -> Self {
            Self {
                out: Outgoing::new(slots),
                inc: Incoming::new(slots),
                flags: vec![0; slots as usize],
                flying: Vec::new(),
                credits: VecDeque::new(),
                due: false,
                held: Vec::new(),
                sent: 0,
                taken: 0,
                ended: false,
            }
        }

        fn send(&mut self) -> bool {
            let Some(ticket) = self.out.take(1000 + self.sent) else {
                return false;
            };
            assert_eq!(ticket.seq, self.sent);
            assert_eq!(
                self.flags[ticket.slot as usize], 0,
                "the slot was still in use"
            );
            assert!(self.held.iter().all(|&(slot, _)| slot != ticket.slot));
            self.flying.push((ticket, (ticket.seq % 5) * 64));
            self.sent += 1;
            true
        }

        fn land(&mut self, pick: usize) -> bool {
            if self.flying.is_empty() {
                return false;
            }
            let (ticket, header) = self.flying.swap_remove(pick % self.flying.len());
            self.flags[ticket.slot as usize] = flag(ticket.seq, header);
            self.inc.landed();
            true
        }

        fn take(&mut self) -> bool {
            match self.inc.next(|slot| self.flags[slot as usize]) {
                Next::Step { slot, seq, header } => {
                    assert_eq!(seq, self.taken, "order");
                    assert_eq!(header, (seq % 5) * 64);
                    self.inc.take(slot, 1000 + seq);
                    self.flags[slot as usize] = 0;
                    self.held.push((slot, seq));
                    self.taken += 1;
                    true
                }
                Next::Wait => false,
                Next::End => {
                    assert!(self.ended && self.taken == self.sent, "ended early");
                    false
                }
                Next::Abandoned => panic!("nobody abandoned it"),
            }
        }

        fn release(&mut self, pick: usize) -> bool {
            if self.held.is_empty() {
                return false;
            }
            let (slot, _) = self.held.swap_remove(pick % self.held.len());
            self.due |= self.inc.release(slot);
            true
        }

        fn credit(&mut self) -> bool {
            if std::mem::take(&mut self.due) {
                self.credits.extend(self.inc.take_credits());
                return true;
            }
            let Some(slot) = self.credits.pop_front() else {
                return false;
            };
            self.out.credit(slot).expect("an honest credit");
            true
        }

        fn close(&mut self) {
            let end = self.out.close(true);
            assert_eq!(end.count, self.sent);
            self.inc.end(end).expect("an honest end");
            self.ended = true;
        }

        fn check(&self) {
            let mut expected: Vec<u64> = self.held.iter().map(|&(_, seq)| 1000 + seq).collect();
            expected.sort_unstable();
            assert_eq!(self.inc.untaken(), expected);
            assert!(self.out.untaken().len() <= self.flags.len());
            // Whatever the sender counts as released was taken and released.
            for seq in self.taken..self.sent {
                assert!(self.out.untaken().contains(&(1000 + seq)));
            }
        }
    }

    proptest! {
        /// Any schedule: order kept, nothing dropped, no slot reused too early, and once everything that is
        /// possible has been done all steps are through and the sender is free to send: no deadlock.
        #[test]
        fn any_schedule_delivers_all_in_order(slots in 1u32..9, acts in prop::collection::vec((0u8..5, any::<u16>()), 0..400)) {
            let mut world = World::new(slots);
            for (act, pick) in acts {
                let pick = usize::from(pick);
                match act {
                    0 => { world.send(); }
                    1 => { world.land(pick); }
                    2 => { world.take(); }
                    3 => { world.release(pick); }
                    _ => { world.credit(); }
                }
                world.check();
            }
            // A sender that still wants to send always can, once the others have done their part.
            while !world.send() {
                let moved = world.land(0) || world.take() || world.release(0) || world.credit();
                prop_assert!(moved, "deadlock");
            }
            world.close();
            prop_assert!(world.out.take(0).is_none(), "sent after the end");
            while world.land(1) || world.take() || world.release(1) || world.credit() {}
            prop_assert_eq!(world.taken, world.sent);
            prop_assert!(world.out.is_drained() && world.out.untaken().is_empty());
            prop_assert!(world.inc.all_landed());
            let end = world.inc.next(|slot| world.flags[slot as usize]);
            prop_assert_eq!(end, Next::End);
        }

        /// Whatever flag words and credits a peer makes up, nothing panics and no step is invented twice.
        #[test]
        fn made_up_words_do_no_harm(slots in 1u32..9, flags in prop::collection::vec(any::<u64>(), 9), credits in prop::collection::vec(0u32..20, 0..40)) {
            let mut inc = Incoming::new(slots);
            for _ in 0..4 {
                if let Next::Step { slot, .. } = inc.next(|slot| flags[slot as usize]) {
                    inc.take(slot, 7);
                }
            }
            let mut out = Outgoing::new(slots);
            while out.take(1).is_some() {}
            let mut good = 0;
            for slot in credits {
                good += u32::from(out.credit(slot).is_ok());
            }
            prop_assert!(good <= slots);
        }
    }

    #[test]
    fn an_abandoned_channel_hands_out_what_landed_first() {
        let mut inc = Incoming::new(2);
        inc.end(End {
            count: 1,
            clean: false,
        })
        .expect("first");
        assert_eq!(inc.next(|_| 0), Next::Wait);
        assert!(!inc.all_landed());
        let flags = [0, flag(0, 64)];
        inc.landed();
        assert!(inc.all_landed());
        let found = inc.next(|slot| flags[slot as usize]);
        assert_eq!(
            found,
            Next::Step {
                slot: 1,
                seq: 0,
                header: 64
            }
        );
        inc.take(1, 9);
        assert_eq!(inc.next(|_| 0), Next::Abandoned);
        assert!(
            inc.end(End {
                count: 3,
                clean: true
            })
            .is_err()
        );
    }

    #[test]
    fn a_lost_step_ends_the_channel_at_what_has_landed() {
        let mut inc = Incoming::new(2);
        let end = |count, clean| End { count, clean };
        inc.end(end(2, true)).expect("first");
        inc.end(end(STEP_LOST, true)).expect("always news");
        let flags = [flag(0, 0), 0];
        assert!(matches!(
            inc.next(|slot| flags[slot as usize]),
            Next::Step { .. }
        ));
        inc.take(0, 5);
        assert_eq!(inc.next(|_| 0), Next::Abandoned);
        assert!(!inc.all_landed());
        assert_eq!(inc.untaken(), [5]);
    }

    #[test]
    fn numbers_beyond_31_bits_are_told_apart_from_an_empty_word() {
        for seq in [0, 1, SEQ, SEQ + 1, u64::MAX] {
            let word = flag(seq, 128);
            assert_eq!(header_at(word, seq), Some(128));
            assert_eq!(header_at(word, seq.wrapping_add(1)), None);
            assert_eq!(header_at(0, seq), None);
        }
    }
}
