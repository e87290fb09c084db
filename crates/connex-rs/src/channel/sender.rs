//! The end of a channel that sends steps.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::array::{Array, OwnedArray, Raw};
use super::ring::{FLAG_BYTES, Layout, encode_header, header_len};
use super::state::{Ticket, flag};
use super::table::{Attempt, Outlet, Request, wake};
use crate::completion::{Completion, deadline};
use crate::core::{Command, Target};
use crate::device::Residence;
use crate::engine::{Engine, Transfer};
use crate::error::{Error, ErrorKind, Result};
use crate::identity::LogicalId;
use crate::region::Lease;
use crate::transfer::{Deadline, Element, OpId, Work};

/// The sending end of a step channel. Any number of threads may send on it.
///
/// Dropped without [`close`](Self::close) it ends in failure on the other side too: what looks like an end there is one.
pub struct Sender {
    engine: Engine,
    outlet: Arc<Outlet>,
}

/// An array of a step, on its way into the chain.
struct Part {
    local: usize,
    len: usize,
    lease: Lease,
    residence: Option<Residence>,
}

impl Sender {
    pub(super) fn open(engine: &Engine, url: &str, name: &str, layout: Layout) -> Result<Self> {
        let target = engine.target(url)?;
        engine.check_open()?;
        let outlet = engine
            .shared()
            .channels
            .add_outlet(target.clone(), name, layout);
        let (command, _, _) = engine.post(
            Target::Url(target),
            Work::Open(outlet.clone()),
            Deadline::Never,
        );
        engine.hub().command(command);
        Ok(Self {
            engine: engine.clone(),
            outlet,
        })
    }

    /// The name that the channel was opened with.
    pub fn name(&self) -> &str {
        &self.outlet.name
    }

    /// Who receives.
    pub fn peer(&self) -> &LogicalId {
        &self.outlet.peer.id
    }

    /// The URL of the receiver.
    pub fn peer_url(&self) -> String {
        self.outlet.peer.to_string()
    }

    /// Bytes of arrays that fit into one step, each array rounded up to [`ALIGN`](super::ALIGN).
    pub fn slot_bytes(&self) -> usize {
        self.outlet.layout.slot_bytes() as usize
    }

    /// Waits until the receiver has accepted the channel. There is no need to: a send waits for it too.
    ///
    /// # Errors
    /// `TimedOut` (the channel stays); else as for [`send`](Self::send).
    pub fn wait_open(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_for(timeout, "accepted", || self.outlet.accepted())
    }

    /// Sends a step: waits for a free slot, then until its bytes are in place at the receiver, so the arrays may be reused
    /// when this returns. `timeout` (`None`: forever) bounds the wait for the slot; the transfer then has 3 s without
    /// progress, like any other.
    ///
    /// # Errors
    /// `Invalid` for a step that does not fit into a slot; `TimedOut` if no slot became free (the channel stays);
    /// `PeerFailed`, with the correlation numbers that the receiver has not released
    /// ([`untaken`](Error::untaken)), when the channel has failed; `Canceled` after `close`.
    pub fn send(&self, arrays: &[Array<'_>], corr: u64, timeout: Option<Duration>) -> Result<()> {
        self.engine.check_process()?;
        let step = self.prepare(arrays.iter().map(Array::raw))?;
        let (ring, ticket) = self.slot(corr, timeout)?;
        let (command, completion, _) = self.command(step, ring, ticket, corr);
        self.engine
            .hub()
            .command_and_help(command, &completion, None);
        // In every case until the end: the arrays are borrowed.
        completion.wait_until(None);
        self.result(&completion)
    }

    /// Sends a step without waiting for its bytes to go; only for a free slot, for at most `timeout` (`None`: forever).
    /// The transfer ends when they are in place at the receiver.
    ///
    /// # Errors
    /// As for [`send`](Self::send); what happens after the post comes through the transfer, and the next call here.
    pub fn send_owned(
        &self,
        arrays: &[OwnedArray],
        corr: u64,
        timeout: Option<Duration>,
    ) -> Result<Transfer> {
        self.engine.check_process()?;
        let step = self.prepare(arrays.iter().map(OwnedArray::raw))?;
        let (ring, ticket) = self.slot(corr, timeout)?;
        Ok(self.post(step, ring, ticket, corr))
    }

    /// As [`send_owned`](Self::send_owned), not waiting at all: `None` if no slot is free now.
    ///
    /// # Errors
    /// As for `send_owned`, but for `TimedOut`.
    pub fn try_send(&self, arrays: &[OwnedArray], corr: u64) -> Result<Option<Transfer>> {
        self.engine.check_process()?;
        let step = self.prepare(arrays.iter().map(OwnedArray::raw))?;
        Ok(match self.outlet.take(corr, false)? {
            Some(Attempt::Done((ring, ticket))) => Some(self.post(step, ring, ticket, corr)),
            _ => None,
        })
    }

    /// As [`send`](Self::send) for owned arrays, as a future: ready when the bytes are in place at the receiver. Nothing is
    /// sent if it is dropped while it waits for a slot.
    pub fn send_async(&self, arrays: Vec<OwnedArray>, corr: u64) -> Sending<'_> {
        Sending {
            sender: self,
            arrays,
            corr,
            wait: None,
            transfer: None,
        }
    }

    /// Ends with the next change, at once if [`try_send`](Self::try_send) would come to something: for bindings with a loop
    /// of their own. That it has ended says that it is worth a try, no more.
    pub fn changed(&self) -> Transfer {
        self.engine.change(self.outlet.wait())
    }

    /// How the transfer of a step of this channel ended, as [`send`](Self::send) would tell it; `None` while it runs.
    pub fn outcome(&self, transfer: &Transfer) -> Option<Result<()>> {
        let result = transfer.result()?;
        Some(result.map_err(|error| self.outlet.step_error(&error)))
    }

    /// Waits until the receiver has released every step that was sent.
    ///
    /// # Errors
    /// `TimedOut` (the channel stays); `PeerFailed` with the steps that it has not.
    pub fn drain(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_for(timeout, "drained", || self.outlet.drained())
    }

    /// The correlation numbers of the steps that the receiver has not released, in the order of their sends.
    pub fn untaken(&self) -> Vec<u64> {
        self.outlet.untaken()
    }

    /// Ends the channel: the receiver gets what was sent and then the end. Idempotent; does not wait.
    pub fn close(&self) {
        self.end(true);
    }

    fn end(&self, clean: bool) {
        if self.engine.check_process().is_err() {
            return;
        }
        let mut woken = Vec::new();
        let first = self.outlet.close(clean, &mut woken);
        wake(woken);
        if first {
            let request = Request::End(self.outlet.clone());
            self.engine.hub().command(Command::Channel(request));
        }
    }

    // ---- the way of a step --------------------------------------------------------------------

    fn wait_for(
        &self,
        timeout: Option<Duration>,
        what: &str,
        mut attempt: impl FnMut() -> Result<Attempt<()>>,
    ) -> Result<()> {
        self.engine.check_process()?;
        let until = deadline(timeout);
        loop {
            let Attempt::Wait(wait) = attempt()? else {
                return Ok(());
            };
            if !self.engine.wait_helping(&wait, until) {
                self.outlet.forget_wait(&wait);
                return Err(self.late(timeout, what));
            }
        }
    }

    fn late(&self, timeout: Option<Duration>, what: &str) -> Error {
        let text = format!(
            "channel {:?}: not {what} within {:?}; {} steps are not released by the receiver",
            self.name(),
            timeout.unwrap_or_default(),
            self.outlet.untaken().len()
        );
        Error::new(ErrorKind::TimedOut, text).with_peer(&self.outlet.peer.id)
    }

    fn slot(&self, corr: u64, timeout: Option<Duration>) -> Result<(u64, Ticket)> {
        let until = deadline(timeout);
        loop {
            match self.outlet.take(corr, true)? {
                Some(Attempt::Done(taken)) => return Ok(taken),
                Some(Attempt::Wait(wait)) if !self.engine.wait_helping(&wait, until) => {
                    self.outlet.forget_wait(&wait);
                    return Err(self.late(timeout, "accepted, or no slot free,"));
                }
                Some(Attempt::Wait(_)) | None => {}
            }
        }
    }

    /// Checks a step and takes hold of its memory, before it takes a slot.
    fn prepare<'a>(&self, arrays: impl Iterator<Item = Raw<'a>> + Clone) -> Result<Prepared<'a>> {
        let meta = arrays.clone().map(|raw| (raw.dtype, raw.shape));
        let header = header_len(meta);
        let offsets = self
            .outlet
            .layout
            .place(arrays.clone().map(|raw| raw.len), header)
            .map_err(Error::invalid)?;
        let registry = self.engine.shared().registry.lock();
        let mut parts = Vec::with_capacity(offsets.len());
        let mut meta = Vec::with_capacity(offsets.len());
        for raw in arrays {
            let granted = registry.local(raw.addr, raw.len).map_err(|_| {
                Error::invalid(format!(
                    "{} bytes at {:#x} start in a registered region and leave it",
                    raw.len, raw.addr
                ))
            })?;
            let residence = self
                .engine
                .residence(&granted, raw.addr, raw.len, String::new)?;
            let lease = match raw.owner {
                Some(owner) => Lease::of(Arc::new((owner.clone(), granted.lease))),
                None => granted.lease,
            };
            parts.push(Part {
                local: raw.addr,
                len: raw.len,
                lease,
                residence,
            });
            meta.push((raw.dtype, raw.shape));
        }
        Ok(Prepared {
            parts,
            meta,
            offsets,
            header,
        })
    }

    /// The chain of a step: arrays, header, flag word.
    fn command(
        &self,
        step: Prepared<'_>,
        ring: u64,
        ticket: Ticket,
        corr: u64,
    ) -> (Command, Arc<Completion>, OpId) {
        let Prepared {
            parts,
            meta,
            offsets,
            header,
        } = step;
        let layout = &self.outlet.layout;
        let header_at = offsets[parts.len()];
        let mut head = Vec::with_capacity(header + FLAG_BYTES);
        let arrays = meta.iter().zip(&parts).zip(&offsets);
        let arrays =
            arrays.map(|((&(dtype, shape), part), &at)| (dtype, shape, at, part.len as u64));
        encode_header(&mut head, ticket.seq, corr, arrays);
        debug_assert_eq!(head.len(), header);
        head.extend_from_slice(&flag(ticket.seq, header_at).to_ne_bytes());
        let head = Arc::new(head);
        let slot_at = ring + layout.slot_at(ticket.slot);
        let mut elements = Vec::with_capacity(parts.len() + 2);
        let arrays = parts.into_iter().zip(&offsets);
        for (n, (part, &at)) in (0..).zip(arrays).filter(|(_, (p, _))| p.len > 0) {
            elements.push(Element {
                local: part.local,
                remote: slot_at + at,
                len: part.len,
                done: 0,
                given: Some(n),
                placed: 0,
                lease: part.lease,
                residence: part.residence,
            });
        }
        elements.push(Element {
            local: head.as_ptr() as usize,
            remote: slot_at + header_at,
            len: header,
            done: 0,
            given: None,
            placed: 0,
            lease: Lease::of(head.clone()),
            residence: None,
        });
        elements.push(Element {
            local: head.as_ptr() as usize + header,
            remote: ring + layout.flag_at(ticket.slot),
            len: FLAG_BYTES,
            done: 0,
            given: None,
            placed: 0,
            lease: Lease::of(head),
            residence: None,
        });
        let work = Work::Write {
            elements,
            next: 0,
            chain: true,
            signal: None,
        };
        self.engine
            .post(Target::Channel(self.outlet.clone()), work, Deadline::Stall)
    }

    fn post(&self, step: Prepared<'_>, ring: u64, ticket: Ticket, corr: u64) -> Transfer {
        let (command, completion, id) = self.command(step, ring, ticket, corr);
        self.engine.hub().command(command);
        self.engine.transfer(completion, id)
    }

    fn result(&self, completion: &Completion) -> Result<()> {
        match completion.result() {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(self.outlet.step_error(error)),
            None => Err(Error::closed()),
        }
    }
}

/// A step that is ready to take a slot.
struct Prepared<'a> {
    parts: Vec<Part>,
    meta: Vec<(&'a super::DType, &'a [usize])>,
    offsets: Vec<u64>,
    header: usize,
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end(false);
        if self.engine.check_process().is_ok() {
            self.engine.shared().channels.forget_outlet(self.outlet.id);
        }
    }
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.outlet.fmt(f)
    }
}

/// A step that is being sent: the future of [`Sender::send_async`].
#[must_use = "nothing is sent before it is polled"]
pub struct Sending<'a> {
    sender: &'a Sender,
    arrays: Vec<OwnedArray>,
    corr: u64,
    wait: Option<Arc<Completion>>,
    transfer: Option<Transfer>,
}

impl Future for Sending<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let outlet = &this.sender.outlet;
        loop {
            if let Some(transfer) = &mut this.transfer {
                return Pin::new(transfer)
                    .poll(context)
                    .map_err(|error| outlet.step_error(&error));
            }
            if let Some(wait) = &this.wait {
                if wait.set_waker(context.waker()) {
                    return Poll::Pending;
                }
                this.wait = None;
            }
            this.sender.engine.check_process()?;
            let step = this
                .sender
                .prepare(this.arrays.iter().map(OwnedArray::raw))?;
            match outlet.take(this.corr, true)? {
                Some(Attempt::Done((ring, ticket))) => {
                    this.transfer = Some(this.sender.post(step, ring, ticket, this.corr));
                    this.arrays = Vec::new();
                }
                Some(Attempt::Wait(wait)) => this.wait = Some(wait),
                None => {}
            }
        }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if let Some(wait) = &self.wait
            && self.sender.engine.check_process().is_ok()
        {
            self.sender.outlet.forget_wait(wait);
        }
    }
}
