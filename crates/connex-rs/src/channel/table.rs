//! The channels of one engine: what its handles and its core share.
//!
//! Locks are held for moments only, never across a call into the driver, and in the order: table, then one channel.
//! Whoever waits leaves a [`Completion`], which the next change ends; the waits that are over are returned as *woken*,
//! to be woken once the driver has been released.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::ring::{Layout, Placed, decode_header};
use super::state::{Broken, End, Incoming, Next, Outgoing, Ticket};
use crate::completion::Completion;
use crate::error::{Error, ErrorKind, Result};
use crate::fork;
use crate::identity::{LogicalId, PeerUrl};
use crate::memory::Pages;
use crate::progress::Hub;
use crate::sync::Mutex;
use crate::transport::ConnId;

/// Channels that wait to be accepted, of all peers.
const MAX_OPENS: usize = 256;

/// Channels of one peer that wait to be accepted.
const MAX_OPENS_OF_ONE: usize = 32;

/// What a handle asks of the core.
#[derive(Debug)]
pub(crate) enum Request {
    /// Tell the receiver that no step follows.
    End(Arc<Outlet>),
    /// Tell the sender where its ring is.
    Accept(Arc<Inlet>),
    /// Tell the sender that there will be no ring.
    Refuse {
        conn: ConnId,
        channel: u64,
        reason: String,
    },
    /// Tell the sender which slots are free.
    Credit(Arc<Inlet>),
    /// Nobody takes steps any more.
    Quit(Arc<Inlet>),
}

/// Waits that are over, or that are to be ended by the next change.
pub(crate) type Waits = Vec<Arc<Completion>>;

fn end_waits(waiting: &mut Waits, woken: &mut Waits) {
    woken.extend(waiting.drain(..).filter(|wait| wait.finish(Ok(()))));
}

/// As a channel's user is to hear it: whatever took the link, the peer has failed, unless it was this engine's own
/// doing.
fn failure(error: &Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::Canceled => ErrorKind::Canceled,
        _ => ErrorKind::PeerFailed,
    };
    let failure = Error::new(kind, format!("channel failed: {}", error.text()));
    match error.peer() {
        Some(peer) => failure.with_peer(peer),
        None => failure,
    }
}

// ---- the sending end ------------------------------------------------------------------------------

/// The sending end of a channel.
pub(crate) struct Outlet {
    pub(crate) id: u64,
    pub(crate) peer: Arc<PeerUrl>,
    pub(crate) name: Box<str>,
    pub(crate) layout: Layout,
    state: Mutex<OutState>,
}

struct OutState {
    machine: Outgoing,
    stage: Stage,
    /// The end has been told.
    end_sent: bool,
    waiting: Waits,
}

enum Stage {
    /// There is no link yet.
    Opening,
    /// The receiver has been asked.
    Asked(ConnId),
    /// There is a ring.
    Open {
        conn: ConnId,
        ring: u64,
    },
    Failed(Error),
}

/// What an attempt came to.
pub(crate) enum Attempt<T> {
    Done(T),
    /// Nothing yet; the wait ends with the next change.
    Wait(Arc<Completion>),
}

impl OutState {
    fn conn(&self) -> Option<ConnId> {
        match self.stage {
            Stage::Asked(conn) | Stage::Open { conn, .. } => Some(conn),
            Stage::Opening | Stage::Failed(_) => None,
        }
    }

    fn wait(&mut self) -> Arc<Completion> {
        let wait = Arc::new(Completion::default());
        self.waiting.push(wait.clone());
        wait
    }

    fn fail(&mut self, error: &Error, woken: &mut Waits) {
        let done = self.machine.end().is_some_and(|end| end.clean) && self.machine.is_drained();
        if !done && !matches!(self.stage, Stage::Failed(_)) {
            self.stage = Stage::Failed(failure(error));
        }
        end_waits(&mut self.waiting, woken);
    }

    fn failed(&self) -> Option<Error> {
        match &self.stage {
            Stage::Failed(error) => Some(error.clone().with_untaken(self.machine.untaken())),
            _ => None,
        }
    }
}

impl Outlet {
    pub(crate) fn new(id: u64, peer: Arc<PeerUrl>, name: &str, layout: Layout) -> Self {
        Self {
            id,
            peer,
            name: name.into(),
            layout,
            state: Mutex::new(OutState {
                machine: Outgoing::new(layout.slots()),
                stage: Stage::Opening,
                end_sent: false,
                waiting: Vec::new(),
            }),
        }
    }

    /// Takes a slot, if one is free: the address of the ring in the peer and the slot. Without one, and where `wait`
    /// is asked for, a wait; else `None`.
    pub(crate) fn take(&self, corr: u64, wait: bool) -> Result<Option<Attempt<(u64, Ticket)>>> {
        let mut state = self.state.lock();
        if let Some(error) = state.failed() {
            return Err(error);
        }
        if state.machine.end().is_some() {
            return Err(Error::new(
                ErrorKind::Canceled,
                "canceled: this end of the channel has been closed",
            )
            .with_peer(&self.peer.id));
        }
        if let Stage::Open { ring, .. } = state.stage
            && let Some(ticket) = state.machine.take(corr)
        {
            return Ok(Some(Attempt::Done((ring, ticket))));
        }
        Ok(wait.then(|| Attempt::Wait(state.wait())))
    }

    /// A wait for the next change; `None` if an attempt to [`take`](Self::take) would come to something now.
    pub(crate) fn wait(&self) -> Option<Arc<Completion>> {
        let mut state = self.state.lock();
        let waits = match state.stage {
            Stage::Failed(_) => false,
            Stage::Open { .. } => state.machine.end().is_none() && !state.machine.has_free(),
            Stage::Opening | Stage::Asked(_) => state.machine.end().is_none(),
        };
        waits.then(|| state.wait())
    }

    /// Whether all that was sent has been released, or a wait for it.
    pub(crate) fn drained(&self) -> Result<Attempt<()>> {
        let mut state = self.state.lock();
        if state.machine.is_drained() {
            return Ok(Attempt::Done(()));
        }
        match state.failed() {
            Some(error) => Err(error),
            None => Ok(Attempt::Wait(state.wait())),
        }
    }

    /// Whether the receiver has accepted, or a wait for it.
    pub(crate) fn accepted(&self) -> Result<Attempt<()>> {
        let mut state = self.state.lock();
        match state.stage {
            Stage::Open { .. } => Ok(Attempt::Done(())),
            Stage::Failed(ref error) => Err(error.clone()),
            _ => Ok(Attempt::Wait(state.wait())),
        }
    }

    /// Whoever waited has given up.
    pub(crate) fn forget_wait(&self, wait: &Arc<Completion>) {
        self.state
            .lock()
            .waiting
            .retain(|other| !Arc::ptr_eq(other, wait));
    }

    /// What a failed step tells its caller.
    pub(crate) fn step_error(&self, error: &Error) -> Error {
        failure(error).with_untaken(self.state.lock().machine.untaken())
    }

    pub(crate) fn untaken(&self) -> Vec<u64> {
        self.state.lock().machine.untaken()
    }

    /// No step follows. False if that was so before.
    pub(crate) fn close(&self, clean: bool, woken: &mut Waits) -> bool {
        let mut state = self.state.lock();
        let first = state.machine.end().is_none();
        state.machine.close(clean);
        end_waits(&mut state.waiting, woken);
        first
    }

    // ---- the core's side ----

    /// The link that the channel is bound to.
    pub(crate) fn conn(&self) -> Option<ConnId> {
        self.state.lock().conn()
    }

    /// Binds the channel to a link; false if nobody wants it any more.
    pub(crate) fn ask_on(&self, conn: ConnId) -> bool {
        let mut state = self.state.lock();
        let wanted = matches!(state.stage, Stage::Opening)
            && state.machine.end().is_none_or(|end| end.clean);
        if wanted {
            state.stage = Stage::Asked(conn);
        }
        wanted
    }

    /// The end, if it is to be told now, and on which link.
    pub(crate) fn end_to_tell(&self) -> Option<(ConnId, End)> {
        let mut state = self.state.lock();
        let (conn, end) = (state.conn()?, state.machine.end()?);
        (!std::mem::replace(&mut state.end_sent, true)).then_some((conn, end))
    }

    pub(crate) fn on_accept(
        &self,
        conn: ConnId,
        ring: u64,
        woken: &mut Waits,
    ) -> Result<(), Broken> {
        let mut state = self.state.lock();
        match state.stage {
            Stage::Asked(asked) if asked == conn => {
                let sound = ring != 0
                    && ring.is_multiple_of(8)
                    && ring.checked_add(self.layout.bytes()).is_some();
                if !sound {
                    return Err(Broken(format!("a ring at {ring:#x}")));
                }
                state.stage = Stage::Open { conn, ring };
                end_waits(&mut state.waiting, woken);
                Ok(())
            }
            Stage::Open { .. } => Err(Broken("a channel was accepted twice".into())),
            _ => Ok(()),
        }
    }

    pub(crate) fn on_credit(
        &self,
        conn: ConnId,
        slots: impl Iterator<Item = u32>,
        woken: &mut Waits,
    ) -> Result<(), Broken> {
        let mut state = self.state.lock();
        if state.conn() != Some(conn) {
            return Ok(());
        }
        for slot in slots {
            state.machine.credit(slot)?;
        }
        end_waits(&mut state.waiting, woken);
        Ok(())
    }

    /// The channel is no more, if it is bound to `conn` (`None`: whatever it is bound to).
    pub(crate) fn fail(&self, conn: Option<ConnId>, error: &Error, woken: &mut Waits) {
        let mut state = self.state.lock();
        if conn.is_none() || state.conn() == conn {
            state.fail(error, woken);
        }
    }
}

impl std::fmt::Debug for Outlet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "channel {} {:?} to {}", self.id, self.name, self.peer)
    }
}

// ---- the receiving end ----------------------------------------------------------------------------

/// The receiving end of a channel.
pub(crate) struct Inlet {
    pub(crate) conn: ConnId,
    pub(crate) channel: u64,
    pub(crate) peer: Arc<LogicalId>,
    pub(crate) name: Box<str>,
    pub(crate) layout: Layout,
    pages: Arc<Pages>,
    hub: Weak<Hub>,
    /// The process that it belongs to.
    born: u32,
    state: Mutex<InState>,
}

struct InState {
    machine: Incoming,
    /// The link is gone, or the peer has broken the rules.
    gone: Option<Error>,
    /// What the peer wrote is not to be looked at any more.
    broken: bool,
    /// Nobody takes steps any more.
    quit: bool,
    waiting: Waits,
}

/// A step as it is taken out of the ring.
pub(crate) struct Taken {
    pub(crate) slot: u32,
    pub(crate) corr: u64,
    /// Their offsets are addresses in this process.
    pub(crate) arrays: Vec<Placed>,
}

impl Inlet {
    pub(crate) fn base(&self) -> usize {
        self.pages.addr()
    }

    /// Keeps the ring's memory.
    pub(crate) fn memory(&self) -> Arc<Pages> {
        self.pages.clone()
    }

    fn flag(&self, slot: u32) -> &AtomicU64 {
        let at = self.base() + self.layout.flag_at(slot) as usize;
        // SAFETY: the word lies in our pages, is aligned to 8 bytes, and is only ever accessed as an atomic here and
        // by the core that stores it.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }

    fn read(&self, slot: u32, offset: u64, len: usize) -> Vec<u8> {
        debug_assert!(self.layout.slot_at(slot) + offset + len as u64 <= self.layout.bytes());
        let at = self.base() + (self.layout.slot_at(slot) + offset) as usize;
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: the range lies in our pages, which are initialised, and the vector has room for it.
        unsafe {
            std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes
    }

    /// The next step, `None` after the last one, or a wait.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Attempt<Option<Taken>>> {
        let mut state = self.state.lock();
        let next = if state.broken {
            Next::Wait
        } else {
            state
                .machine
                .next(|slot| self.flag(slot).load(Ordering::Acquire))
        };
        match next {
            Next::Step { slot, seq, header } => {
                let read = |offset, len| self.read(slot, offset, len);
                match decode_header(&self.layout, header, seq, read) {
                    Ok((corr, mut arrays)) => {
                        let start = self.base() as u64 + self.layout.slot_at(slot);
                        for array in &mut arrays {
                            array.offset += start;
                        }
                        state.machine.take(slot, corr);
                        self.flag(slot).store(0, Ordering::Relaxed);
                        Ok(Attempt::Done(Some(Taken { slot, corr, arrays })))
                    }
                    Err(what) => {
                        let text = format!("channel failed: the peer broke the protocol: {what}");
                        let error = Error::new(ErrorKind::PeerFailed, text).with_peer(&self.peer);
                        state.broken = true;
                        state.gone.get_or_insert_with(|| error.clone());
                        let error = error.with_untaken(state.machine.untaken());
                        drop(state);
                        self.ask(Request::Quit(self.clone()));
                        Err(error)
                    }
                }
            }
            Next::End => Ok(Attempt::Done(None)),
            Next::Abandoned => Err(Error::new(
                ErrorKind::PeerFailed,
                "channel failed: its sender was dropped without being closed",
            )
            .with_peer(&self.peer)
            .with_untaken(state.machine.untaken())),
            Next::Wait => {
                if let Some(error) = &state.gone {
                    return Err(error.clone().with_untaken(state.machine.untaken()));
                }
                let wait = Arc::new(Completion::default());
                state.waiting.push(wait.clone());
                Ok(Attempt::Wait(wait))
            }
        }
    }

    /// A wait for the next change; `None` if an attempt to [`take`](Self::take) would come to something now.
    pub(crate) fn wait(&self) -> Option<Arc<Completion>> {
        let mut state = self.state.lock();
        if self.would_take(&mut state) {
            return None;
        }
        let wait = Arc::new(Completion::default());
        state.waiting.push(wait.clone());
        Some(wait)
    }

    fn would_take(&self, state: &mut InState) -> bool {
        let flag_of = |slot| self.flag(slot).load(Ordering::Acquire);
        state.gone.is_some() || state.machine.next(flag_of) != Next::Wait
    }

    /// Whoever waited has given up.
    pub(crate) fn forget_wait(&self, wait: &Arc<Completion>) {
        self.state
            .lock()
            .waiting
            .retain(|other| !Arc::ptr_eq(other, wait));
    }

    /// A step is not needed any more. Of no consequence in a forked child, where a thread that is not there may hold the lock.
    pub(crate) fn release(self: &Arc<Self>, slot: u32) {
        if !fork::is_native(self.born) {
            return;
        }
        let mut state = self.state.lock();
        let tell = state.machine.release(slot) && state.gone.is_none();
        drop(state);
        if tell {
            self.ask(Request::Credit(self.clone()));
        }
    }

    /// Nobody takes steps any more.
    pub(crate) fn quit(self: &Arc<Self>) {
        self.ask(Request::Quit(self.clone()));
    }

    fn ask(&self, request: Request) {
        if fork::is_native(self.born)
            && let Some(hub) = self.hub.upgrade()
        {
            hub.command(crate::core::Command::Channel(request));
        }
    }

    pub(crate) fn untaken(&self) -> Vec<u64> {
        self.state.lock().machine.untaken()
    }

    /// Whether [`take`](Self::take) would not wait: for a caller that polls.
    pub(crate) fn is_ready(&self) -> bool {
        self.would_take(&mut self.state.lock())
    }

    // ---- the core's side ----

    pub(crate) fn take_credits(&self) -> Vec<u32> {
        self.state.lock().machine.take_credits()
    }

    /// A flag word was stored. True if the ring is not needed any more.
    fn landed(&self, woken: &mut Waits) -> bool {
        let mut state = self.state.lock();
        state.machine.landed();
        end_waits(&mut state.waiting, woken);
        state.quit && state.machine.all_landed()
    }

    fn on_end(&self, end: End, woken: &mut Waits) -> Result<bool, Broken> {
        let mut state = self.state.lock();
        state.machine.end(end)?;
        end_waits(&mut state.waiting, woken);
        Ok(state.quit && state.machine.all_landed())
    }

    /// Nobody takes steps any more; the peer is to be told, unless that is no news. True if the ring is not
    /// needed any more.
    pub(crate) fn on_quit(&self) -> (bool, bool) {
        let mut state = self.state.lock();
        let first = !std::mem::replace(&mut state.quit, true);
        (first, state.machine.all_landed())
    }

    pub(crate) fn fail(&self, error: &Error, woken: &mut Waits) {
        let mut state = self.state.lock();
        state.gone.get_or_insert_with(|| failure(error));
        end_waits(&mut state.waiting, woken);
    }
}

impl std::fmt::Debug for Inlet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "channel {} {:?} from {}",
            self.channel, self.name, self.peer
        )
    }
}

// ---- all of them ----------------------------------------------------------------------------------

/// A channel that a peer wants.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    pub(crate) conn: ConnId,
    pub(crate) channel: u64,
    pub(crate) peer: Arc<LogicalId>,
    pub(crate) name: Box<str>,
    pub(crate) layout: Layout,
}

#[derive(Debug)]
struct Waiting {
    open: Open,
    /// Somebody is accepting it.
    taken: bool,
    /// It has ended already.
    end: Option<End>,
}

impl Waiting {
    fn is(&self, conn: ConnId, channel: u64) -> bool {
        self.open.conn == conn && self.open.channel == channel
    }
}

/// All channels of one engine.
#[derive(Debug)]
pub(crate) struct Channels {
    inner: Mutex<Inner>,
    /// How many rings there are: so that a flag of anything else costs nothing.
    rings: AtomicUsize,
    /// The most bytes of rings that one peer may have here.
    limit: u64,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    outlets: HashMap<u64, Arc<Outlet>>,
    inlets: HashMap<(ConnId, u64), Arc<Inlet>>,
    /// The same by the address of their rings.
    by_addr: BTreeMap<usize, Arc<Inlet>>,
    opens: VecDeque<Waiting>,
    accepting: Waits,
    closed: bool,
}

impl Inner {
    fn remove(&mut self, inlet: &Inlet) -> Option<Arc<Inlet>> {
        self.by_addr.remove(&inlet.base());
        self.inlets.remove(&(inlet.conn, inlet.channel))
    }
}

impl Channels {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            inner: Mutex::default(),
            rings: AtomicUsize::new(0),
            limit,
        }
    }

    /// How many rings are registered.
    pub(crate) fn rings(&self) -> usize {
        self.rings.load(Ordering::Acquire)
    }

    // ---- sending ends ----

    pub(crate) fn outlet(&self, id: u64) -> Option<Arc<Outlet>> {
        self.inner.lock().outlets.get(&id).cloned()
    }

    pub(crate) fn add_outlet(&self, peer: Arc<PeerUrl>, name: &str, layout: Layout) -> Arc<Outlet> {
        let mut inner = self.inner.lock();
        let id = inner.next;
        inner.next += 1;
        let outlet = Arc::new(Outlet::new(id, peer, name, layout));
        inner.outlets.insert(id, outlet.clone());
        outlet
    }

    pub(crate) fn forget_outlet(&self, id: u64) {
        self.inner.lock().outlets.remove(&id);
    }

    // ---- channels that wait to be accepted ----

    /// A peer wants a channel.
    ///
    /// # Errors
    /// The sentence with which it is refused.
    pub(crate) fn request(&self, open: Open, woken: &mut Waits) -> Result<(), String> {
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err("the engine is closing".into());
        }
        let known = inner.inlets.contains_key(&(open.conn, open.channel))
            || inner.opens.iter().any(|w| w.is(open.conn, open.channel));
        if known {
            return Err(format!("channel {} is open already", open.channel));
        }
        let theirs = inner.opens.iter().filter(|w| w.open.peer == open.peer);
        let (mut count, mut bytes) = (0, open.layout.bytes());
        for waiting in theirs {
            count += 1;
            bytes += waiting.open.layout.bytes();
        }
        bytes += inner
            .inlets
            .values()
            .filter(|inlet| inlet.peer == open.peer)
            .map(|inlet| inlet.layout.bytes())
            .sum::<u64>();
        if bytes > self.limit {
            return Err(format!(
                "a ring of {} slots of {} bytes would bring the rings of one peer to {bytes} bytes: the receiver allows {} (its \
                 channel_bytes)",
                open.layout.slots(),
                open.layout.slot_bytes(),
                self.limit
            ));
        }
        if count >= MAX_OPENS_OF_ONE || inner.opens.len() >= MAX_OPENS {
            return Err(format!(
                "{} channels wait to be accepted, {count} of them of this peer: the receiver does not call accept_channel often enough",
                inner.opens.len()
            ));
        }
        inner.opens.push_back(Waiting {
            open,
            taken: false,
            end: None,
        });
        end_waits(&mut inner.accepting, woken);
        Ok(())
    }

    /// The oldest channel of that name that waits, or a wait. It is to be given to [`install`](Self::install) or
    /// [`turn_down`](Self::turn_down).
    pub(crate) fn pick(&self, name: Option<&str>) -> Result<Attempt<Open>> {
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Error::closed());
        }
        let fits = |w: &&mut Waiting| !w.taken && name.is_none_or(|name| *name == *w.open.name);
        if let Some(waiting) = inner.opens.iter_mut().find(fits) {
            waiting.taken = true;
            return Ok(Attempt::Done(waiting.open.clone()));
        }
        let wait = Arc::new(Completion::default());
        inner.accepting.push(wait.clone());
        Ok(Attempt::Wait(wait))
    }

    /// A wait for the next channel that wants to be accepted; `None` if one of that name waits now.
    pub(crate) fn wait(&self, name: Option<&str>) -> Option<Arc<Completion>> {
        let mut inner = self.inner.lock();
        let fits = |w: &Waiting| !w.taken && name.is_none_or(|name| *name == *w.open.name);
        if inner.closed || inner.opens.iter().any(fits) {
            return None;
        }
        let wait = Arc::new(Completion::default());
        inner.accepting.push(wait.clone());
        Some(wait)
    }

    /// Whoever waited has given up.
    pub(crate) fn forget_wait(&self, wait: &Arc<Completion>) {
        self.inner
            .lock()
            .accepting
            .retain(|other| !Arc::ptr_eq(other, wait));
    }

    /// The channel has a ring now. `None` if its sender has given it up meanwhile.
    pub(crate) fn install(
        &self,
        open: Open,
        pages: Arc<Pages>,
        hub: Weak<Hub>,
    ) -> Option<Arc<Inlet>> {
        let mut inner = self.inner.lock();
        let index = inner
            .opens
            .iter()
            .position(|w| w.is(open.conn, open.channel))?;
        let end = inner.opens.remove(index)?.end;
        let mut machine = Incoming::new(open.layout.slots());
        // The first end of a channel without steps cannot be wrong, and a wrong count only makes the receiver wait.
        if let Some(end) = end {
            machine.end(end).ok()?;
        }
        let inlet = Arc::new(Inlet {
            conn: open.conn,
            channel: open.channel,
            peer: open.peer,
            name: open.name,
            layout: open.layout,
            pages,
            hub,
            born: fork::generation(),
            state: Mutex::new(InState {
                machine,
                gone: None,
                broken: false,
                quit: false,
                waiting: Vec::new(),
            }),
        });
        inner
            .inlets
            .insert((inlet.conn, inlet.channel), inlet.clone());
        inner.by_addr.insert(inlet.base(), inlet.clone());
        self.rings.store(inner.by_addr.len(), Ordering::Release);
        Some(inlet)
    }

    /// The channel gets no ring.
    pub(crate) fn turn_down(&self, open: &Open) {
        self.inner
            .lock()
            .opens
            .retain(|w| !w.is(open.conn, open.channel));
    }

    // ---- receiving ends ----

    /// Takes a ring out of the table, to be unregistered; `None` if it was not there.
    pub(crate) fn retire(&self, inlet: &Inlet) -> Option<Arc<Inlet>> {
        let mut inner = self.inner.lock();
        let removed = inner.remove(inlet);
        self.rings.store(inner.by_addr.len(), Ordering::Release);
        removed
    }

    /// A flag was stored at `addr` for the peer of `conn`. Returns a ring that is not needed any more.
    pub(crate) fn landed(
        &self,
        conn: ConnId,
        addr: usize,
        woken: &mut Waits,
    ) -> Option<Arc<Inlet>> {
        if self.rings() == 0 {
            return None;
        }
        let inner = self.inner.lock();
        let (base, inlet) = inner.by_addr.range(..=addr).next_back()?;
        inlet.layout.slot_of_flag((addr - base) as u64)?;
        (inlet.conn == conn && inlet.landed(woken)).then(|| inlet.clone())
    }

    /// The sender says that a flag was stored by hardware. Returns a ring that is not needed any more.
    pub(crate) fn on_landed(
        &self,
        conn: ConnId,
        channel: u64,
        woken: &mut Waits,
    ) -> Option<Arc<Inlet>> {
        let inner = self.inner.lock();
        let inlet = inner.inlets.get(&(conn, channel))?;
        inlet.landed(woken).then(|| inlet.clone())
    }

    /// The sender says that no step follows. Returns a ring that is not needed any more.
    pub(crate) fn on_end(
        &self,
        conn: ConnId,
        channel: u64,
        end: End,
        woken: &mut Waits,
    ) -> Result<Option<Arc<Inlet>>, Broken> {
        let mut inner = self.inner.lock();
        if let Some(inlet) = inner.inlets.get(&(conn, channel)) {
            return Ok(inlet.on_end(end, woken)?.then(|| inlet.clone()));
        }
        if !end.clean {
            inner.opens.retain(|w| !w.is(conn, channel));
        } else if let Some(waiting) = inner.opens.iter_mut().find(|w| w.is(conn, channel)) {
            waiting.end.get_or_insert(end);
        }
        Ok(None)
    }

    /// A link is gone: so are the channels on it. Returns their rings, to be unregistered.
    pub(crate) fn lost(&self, conn: ConnId, error: &Error, woken: &mut Waits) -> Vec<Arc<Inlet>> {
        let mut inner = self.inner.lock();
        inner.opens.retain(|w| w.open.conn != conn);
        for outlet in inner.outlets.values() {
            outlet.fail(Some(conn), error, woken);
        }
        let gone: Vec<_> = inner
            .inlets
            .values()
            .filter(|inlet| inlet.conn == conn)
            .cloned()
            .collect();
        for inlet in &gone {
            inlet.fail(error, woken);
            inner.remove(inlet);
        }
        self.rings.store(inner.by_addr.len(), Ordering::Release);
        gone
    }

    /// The engine has closed: wakes all who wait.
    pub(crate) fn close(&self) {
        let mut woken = Vec::new();
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.opens.clear();
        end_waits(&mut inner.accepting, &mut woken);
        let error = Error::closed();
        for outlet in inner.outlets.values() {
            outlet.fail(None, &error, &mut woken);
        }
        for inlet in inner.inlets.values() {
            inlet.fail(&error, &mut woken);
        }
        inner.outlets.clear();
        inner.inlets.clear();
        inner.by_addr.clear();
        drop(inner);
        wake(woken);
    }
}

/// Wakes whoever waited. Not to be called with the driver or a lock held.
pub(crate) fn wake(woken: Waits) {
    for wait in woken {
        wait.wake();
    }
}
