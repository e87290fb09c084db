//! The end of a channel that takes steps.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::array::Step;
use super::table::{Attempt, Inlet, Open, Request};
use crate::completion::{Completion, deadline};
use crate::core::Command;
use crate::engine::{Engine, Transfer};
use crate::error::{Error, ErrorKind, Result};
use crate::identity::LogicalId;
use crate::memory::Pages;
use crate::region::Access;

/// The receiving end of a step channel. Steps are taken in the order of their sends, by one thread or several.
///
/// Dropped before the end it fails the sender, with the steps that were not released.
pub struct Receiver {
    engine: Engine,
    inlet: Arc<Inlet>,
}

/// Accepts the oldest channel of that name that waits; or a wait for one.
fn accept(engine: &Engine, name: Option<&str>) -> Result<Attempt<Receiver>> {
    engine.check_open()?;
    loop {
        let open = match engine.shared().channels.pick(name)? {
            Attempt::Done(open) => open,
            Attempt::Wait(wait) => return Ok(Attempt::Wait(wait)),
        };
        if let Some(inlet) = make_ring(engine, open)? {
            let receiver = Receiver {
                engine: engine.clone(),
                inlet,
            };
            let request = Request::Accept(receiver.inlet.clone());
            engine.hub().command(Command::Channel(request));
            return Ok(Attempt::Done(receiver));
        }
        // Its sender has given it up meanwhile: the next one.
    }
}

fn make_ring(engine: &Engine, open: Open) -> Result<Option<Arc<Inlet>>> {
    let shared = engine.shared();
    let bytes = open.layout.bytes() as usize;
    let made = Pages::new(bytes).map(Arc::new).and_then(|pages| {
        let addr = pages.addr();
        let owner = Some(pages.clone() as _);
        // Not write-only: one-sided access cannot tell reading and writing apart.
        shared
            .registry
            .lock()
            .register(addr, bytes, Access::ReadWrite, owner)?;
        Ok(pages)
    });
    match made {
        Ok(pages) => {
            let addr = pages.addr();
            let hub = Arc::downgrade(engine.hub());
            let inlet = shared.channels.install(open, pages, hub);
            if inlet.is_none() {
                // Nobody knows of it yet; the engine's close may have taken it out.
                let _ = shared.registry.lock().unregister(addr);
            }
            Ok(inlet)
        }
        Err(error) => {
            shared.channels.turn_down(&open);
            engine.hub().command(Command::Channel(Request::Refuse {
                conn: open.conn,
                channel: open.channel,
                reason: format!("the receiver has no memory for the ring: {error}"),
            }));
            Err(error)
        }
    }
}

impl Receiver {
    pub(super) fn accept(
        engine: &Engine,
        name: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        let until = deadline(timeout);
        loop {
            let wait = match accept(engine, name)? {
                Attempt::Done(receiver) => return Ok(receiver),
                Attempt::Wait(wait) => wait,
            };
            if !engine.wait_helping(&wait, until) {
                engine.shared().channels.forget_wait(&wait);
                let text = match name {
                    Some(name) => format!(
                        "no peer opened a channel named {name:?} within {:?}",
                        timeout.unwrap_or_default()
                    ),
                    None => format!(
                        "no peer opened a channel within {:?}",
                        timeout.unwrap_or_default()
                    ),
                };
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
        }
    }

    /// Who sends.
    pub fn peer(&self) -> &LogicalId {
        &self.inlet.peer
    }

    /// The name that the sender gave the channel.
    pub fn name(&self) -> &str {
        &self.inlet.name
    }

    /// The next step; `None` after the last one of a channel that its sender has closed.
    ///
    /// When the channel has failed, the steps that are complete still come, then the error.
    ///
    /// # Errors
    /// `TimedOut` after `timeout` (`None`: never); `PeerFailed`, with the correlation numbers of the steps that are out
    /// and not released ([`untaken`](Error::untaken)), when the channel has failed; `Canceled` after the engine's close.
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Option<Step>> {
        self.engine.check_process()?;
        let until = deadline(timeout);
        loop {
            match self.inlet.take()? {
                Attempt::Done(taken) => return Ok(taken.map(|taken| self.step(taken))),
                Attempt::Wait(wait) => {
                    let ready = || self.inlet.is_ready();
                    let came = self.engine.wait_helping_for(&wait, until, ready);
                    self.inlet.forget_wait(&wait);
                    if !came {
                        let text = format!(
                            "channel {:?}: no step within {:?}",
                            self.name(),
                            timeout.unwrap_or_default()
                        );
                        return Err(Error::new(ErrorKind::TimedOut, text).with_peer(self.peer()));
                    }
                }
            }
        }
    }

    /// As [`recv`](Self::recv), as a future.
    pub fn next_step(&self) -> NextStep<'_> {
        NextStep {
            receiver: self,
            wait: None,
        }
    }

    /// Ends with the next change, at once if [`recv`](Self::recv) would not wait: for bindings with a loop of their own.
    /// That it has ended says that it is worth a try, no more.
    pub fn changed(&self) -> Transfer {
        self.engine.change(self.inlet.wait())
    }

    /// The steps until the end; after an error nothing more.
    pub fn steps(&self) -> Steps<'_> {
        Steps {
            receiver: self,
            over: false,
        }
    }

    /// The correlation numbers of the steps that are out and not released, in their order.
    pub fn untaken(&self) -> Vec<u64> {
        self.inlet.untaken()
    }

    fn step(&self, taken: super::table::Taken) -> Step {
        Step::new(self.inlet.clone(), taken.slot, taken.corr, taken.arrays)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.inlet.quit();
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inlet.fmt(f)
    }
}

/// Iterator over the steps of a channel.
#[derive(Debug)]
pub struct Steps<'a> {
    receiver: &'a Receiver,
    over: bool,
}

impl Iterator for Steps<'_> {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Result<Step>> {
        if self.over {
            return None;
        }
        let next = self.receiver.recv(None).transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl<'a> IntoIterator for &'a Receiver {
    type Item = Result<Step>;
    type IntoIter = Steps<'a>;

    fn into_iter(self) -> Steps<'a> {
        self.steps()
    }
}

/// The future of [`Receiver::next_step`].
#[must_use = "nothing is received before it is polled"]
pub struct NextStep<'a> {
    receiver: &'a Receiver,
    wait: Option<Arc<Completion>>,
}

impl Future for NextStep<'_> {
    type Output = Result<Option<Step>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.receiver.engine.check_process()?;
        loop {
            if let Some(wait) = &self.wait {
                if wait.set_waker(context.waker()) {
                    return Poll::Pending;
                }
                self.wait = None;
            }
            match self.receiver.inlet.take()? {
                Attempt::Done(taken) => {
                    return Poll::Ready(Ok(taken.map(|taken| self.receiver.step(taken))));
                }
                Attempt::Wait(wait) => self.wait = Some(wait),
            }
        }
    }
}

impl Drop for NextStep<'_> {
    fn drop(&mut self) {
        if let Some(wait) = &self.wait
            && self.receiver.engine.check_process().is_ok()
        {
            self.receiver.inlet.forget_wait(wait);
        }
    }
}

/// The future of [`Engine::accept_channel_async`].
#[must_use = "nothing is accepted before it is polled"]
pub struct Accepting<'a> {
    engine: &'a Engine,
    name: Option<String>,
    wait: Option<Arc<Completion>>,
}

impl<'a> Accepting<'a> {
    pub(super) fn new(engine: &'a Engine, name: Option<&str>) -> Self {
        Self {
            engine,
            name: name.map(str::to_owned),
            wait: None,
        }
    }
}

impl Future for Accepting<'_> {
    type Output = Result<Receiver>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            if let Some(wait) = &self.wait {
                if wait.set_waker(context.waker()) {
                    return Poll::Pending;
                }
                self.wait = None;
            }
            match accept(self.engine, self.name.as_deref())? {
                Attempt::Done(receiver) => return Poll::Ready(Ok(receiver)),
                Attempt::Wait(wait) => self.wait = Some(wait),
            }
        }
    }
}

impl Drop for Accepting<'_> {
    fn drop(&mut self) {
        if let Some(wait) = &self.wait
            && self.engine.check_process().is_ok()
        {
            self.engine.shared().channels.forget_wait(wait);
        }
    }
}
