//! The operations, and who drives whom when.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use connex_rs::transport::ConnIds;
use connex_rs::transport::tcp::Tcp;
use connex_rs::{Config, Engine, LogicalId, by_hand};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::sides::{
    answering_take, answering_turn, asking_drop, asking_end, asking_post, asking_turn,
};

/// Bytes of memory at each end.
const LEN: usize = 4096;
/// Nothing takes this long: an end to wait for whatever else happens on the machine.
const LIMIT: Duration = Duration::from_secs(60);

/// What is done over and over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read(usize),
    Write(usize),
    Message,
    Chain,
}

impl Operation {
    fn of_name(name: &str) -> Result<Self, String> {
        Ok(match name {
            "read-4k" => Self::Read(4096),
            "write-4k" => Self::Write(4096),
            "message-64" => Self::Message,
            "chain-3" => Self::Chain,
            other => return Err(format!("no operation {other:?}")),
        })
    }
}

/// Both engines, in one process and without threads, and the memory that bytes move between.
pub(crate) struct Ends {
    pub(crate) asking: Engine,
    pub(crate) answering: Engine,
    pub(crate) url: String,
    pub(crate) here: usize,
    pub(crate) there: u64,
}

/// Does it so many times.
///
/// # Errors
/// A name or a count that is none, engines that cannot be started, an operation that fails.
pub(crate) fn run(name: &str, count: &str) -> Result<(), String> {
    let operation = Operation::of_name(name)?;
    let count: u32 = count.parse().map_err(|e| format!("{count:?}: {e}"))?;
    let ends = Ends::new()?;
    for _ in 0..count {
        ends.once(operation)?;
    }
    ends.compare(operation)
}

impl Ends {
    fn new() -> Result<Self, String> {
        let (asking, answering) = (engine(0)?, engine(1)?);
        let mut ends = Self {
            url: answering.local_url().to_owned(),
            here: memory(1, &asking)?,
            there: memory(2, &answering)? as u64,
            asking,
            answering,
        };
        ends.connect()?;
        Ok(ends)
    }

    /// A first message connects them.
    fn connect(&mut self) -> Result<(), String> {
        let first = asking_post(self, Operation::Message).map_err(|e| e.to_string())?;
        let until = Instant::now() + LIMIT;
        while !first.done() || !answering_take(&self.answering) {
            by_hand::turn(&self.asking);
            by_hand::turn(&self.answering);
            if Instant::now() > until {
                return Err("no link".into());
            }
        }
        Ok(())
    }

    /// One operation from the call to its end.
    fn once(&self, operation: Operation) -> Result<(), String> {
        let transfer = asking_post(self, operation).map_err(|e| e.to_string())?;
        wait(by_hand::descriptor(&self.answering))?;
        answering_turn(self);
        if operation == Operation::Message {
            if !answering_take(&self.answering) {
                return Err("the message did not come in one turn".into());
            }
        } else {
            // The answer goes out with the next turn.
            answering_turn(self);
            wait(by_hand::descriptor(&self.asking))?;
            asking_turn(self);
        }
        match asking_end(&transfer) {
            Some(Ok(())) => {}
            Some(Err(e)) => return Err(e.to_string()),
            None => return Err("the operation did not end with these turns".into()),
        }
        asking_drop(transfer);
        Ok(())
    }

    /// What was moved is the same on both sides.
    fn compare(&self, operation: Operation) -> Result<(), String> {
        let len = match operation {
            Operation::Read(len) | Operation::Write(len) => len,
            Operation::Chain => 328,
            Operation::Message => return Ok(()),
        };
        // SAFETY: leaked memory; no operation is under way.
        let [here, there] = [self.here, self.there as usize]
            .map(|at| unsafe { std::slice::from_raw_parts(at as *const u8, len) });
        if here == there {
            Ok(())
        } else {
            Err("other bytes came than were sent".into())
        }
    }
}

fn engine(stage: u32) -> Result<Engine, String> {
    let id = LogicalId::new("instructions", stage, 0, 0).map_err(|e| e.to_string())?;
    let mut config = Config::new(id);
    // They come when the clock says, not with an operation.
    config.heartbeat = None;
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let tcp = Tcp::listen(listen, None, None, ConnIds::default())?;
    by_hand::start(config, Box::new(tcp)).map_err(|e| e.to_string())
}

/// Memory with a pattern of its own, registered.
fn memory(salt: u8, engine: &Engine) -> Result<usize, String> {
    let addr = engine
        .allocate_managed_buffer(LEN)
        .map_err(|e| e.to_string())?;
    for i in 0..LEN {
        // SAFETY: the buffer has that many bytes, and nobody else knows it yet.
        unsafe {
            (addr as *mut u8)
                .add(i)
                .write((i as u8).wrapping_mul(31) ^ salt)
        };
    }
    Ok(addr)
}

/// Until the transport has something, so that no turn is one for nothing: the system may take its time, also on loopback.
fn wait(descriptor: BorrowedFd<'_>) -> Result<(), String> {
    let limit = Timespec {
        tv_sec: LIMIT.as_secs() as _,
        tv_nsec: 0,
    };
    match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit)) {
        Ok(1..) => Ok(()),
        Ok(_) => Err("nothing came".into()),
        Err(e) => Err(e.to_string()),
    }
}
