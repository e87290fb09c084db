//! The registered memory of an engine.
//!
//! A [`Region`] is a range that peers may touch. Whoever hands its memory to a transport holds a
//! [`Lease`]; unregistering waits until all leases are gone, so that no byte is read from or written
//! to memory after its owner took it back.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::completion::deadline;
use crate::device::Residence;
use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex};
use crate::transport::ConnId;

/// What peers may do with a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Access {
    /// Read and write.
    #[default]
    ReadWrite,
    /// Read only.
    ReadOnly,
    /// Write only.
    WriteOnly,
}

impl Access {
    /// Whether peers may read.
    pub fn readable(self) -> bool {
        self != Access::WriteOnly
    }

    /// Whether peers may write.
    pub fn writable(self) -> bool {
        self != Access::ReadOnly
    }
}

/// The direction in which a peer touches a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The peer reads.
    Read,
    /// The peer writes.
    Write,
}

/// Keeps memory valid while a transport uses it.
///
/// Cheap to clone. Dropping the last lease of a region lets a waiting `unregister` go on.
#[derive(Clone)]
pub struct Lease(
    #[expect(dead_code, reason = "held for its drop")] Option<Arc<dyn Any + Send + Sync>>,
);

impl Lease {
    /// For memory that outlives every use by contract, or by an owner held elsewhere.
    pub fn unowned() -> Self {
        Self(None)
    }

    /// Keeps `owner` alive.
    pub fn of(owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Some(owner))
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}

/// A registered range.
pub struct Region {
    addr: usize,
    len: usize,
    access: Access,
    residence: Option<Residence>,
    users: Arc<Users>,
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// Who uses a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Holder {
    /// A transfer of this engine, whose local side it is.
    Local,
    /// A peer, over this connection.
    Peer(ConnId),
}

/// Counts the leases of a region and wakes whoever waits for the last one.
struct Users {
    // Their keys are numbers of ours, which no peer chooses.
    holders: Mutex<FxHashMap<Holder, usize>>,
    none: Condvar,
}

/// One user of a region; its drop counts down.
struct User {
    holder: Holder,
    users: Arc<Users>,
    #[expect(dead_code, reason = "held for its drop")]
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl Drop for User {
    fn drop(&mut self) {
        let mut holders = self.users.holders.lock();
        if let Some(count) = holders.get_mut(&self.holder) {
            *count -= 1;
            if *count == 0 {
                holders.remove(&self.holder);
            }
        }
        if holders.is_empty() {
            self.users.none.notify_all();
        }
    }
}

impl Region {
    fn new(
        addr: usize,
        len: usize,
        access: Access,
        owner: Option<Arc<dyn Any + Send + Sync>>,
        residence: Option<Residence>,
    ) -> Self {
        let users = Arc::new(Users {
            holders: Mutex::default(),
            none: Condvar::new(),
        });
        Self {
            addr,
            len,
            access,
            residence,
            users,
            owner,
        }
    }

    /// First byte.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where its memory lives; `None` is the host.
    pub(crate) fn residence(&self) -> Option<Residence> {
        self.residence
    }

    fn holds(&self, addr: usize, len: usize) -> bool {
        addr >= self.addr
            && addr
                .checked_add(len)
                .is_some_and(|end| end <= self.addr + self.len)
    }

    fn grant(&self, holder: Holder) -> Granted {
        Granted {
            lease: self.lease(holder),
            residence: self.residence,
            registered: true,
        }
    }

    fn lease(&self, holder: Holder) -> Lease {
        *self.users.holders.lock().entry(holder).or_insert(0) += 1;
        let (users, owner) = (Arc::clone(&self.users), self.owner.clone());
        Lease::of(Arc::new(User {
            holder,
            users,
            owner,
        }))
    }

    /// Who holds leases now.
    pub fn holders(&self) -> Vec<Holder> {
        self.users.holders.lock().keys().copied().collect()
    }

    /// Waits until no lease is left; false if that took longer than `timeout`.
    pub fn wait_unused(&self, timeout: std::time::Duration) -> bool {
        let until = deadline(Some(timeout));
        let mut holders = self.users.holders.lock();
        while !holders.is_empty() {
            let timed_out;
            (holders, timed_out) = self.users.none.wait_until(holders, until);
            if timed_out {
                return holders.is_empty();
            }
        }
        true
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}+{})", self.addr, self.len)
    }
}

/// Memory that may be used for a transfer.
#[derive(Debug)]
pub struct Granted {
    /// Keeps it.
    pub lease: Lease,
    /// Where it lives, if not in the host's memory and in a region.
    pub(crate) residence: Option<Residence>,
    /// It lies in a region.
    pub(crate) registered: bool,
}

/// Why no registered region serves a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Denied {
    /// No region holds the range.
    Unregistered,
    /// The range starts in a region and leaves it.
    OutOfBounds,
    /// The region does not allow this direction.
    Access,
}

/// The regions of one engine, by start address.
#[derive(Debug, Default)]
pub struct Registry {
    by_addr: BTreeMap<usize, Region>,
    bytes: u64,
    /// The longest region that was ever registered: bounds the search for regions that overlap.
    longest: usize,
}

impl Registry {
    /// Adds a region of host memory.
    ///
    /// # Errors
    /// As for `register_in`.
    pub fn register(
        &mut self,
        addr: usize,
        len: usize,
        access: Access,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<()> {
        self.register_in(addr, len, access, owner, None)
    }

    /// Adds a region; `residence` says where its memory lives, if not in the host's.
    ///
    /// # Errors
    /// [`Error`] of kind `Invalid` for a null address, a zero or wrapping length, or an address that
    /// is registered already.
    pub(crate) fn register_in(
        &mut self,
        addr: usize,
        len: usize,
        access: Access,
        owner: Option<Arc<dyn Any + Send + Sync>>,
        residence: Option<Residence>,
    ) -> Result<()> {
        if addr == 0 {
            return Err(Error::invalid("cannot register memory at the null address"));
        }
        if len == 0 {
            return Err(Error::invalid(format!(
                "cannot register 0 bytes at {addr:#x}"
            )));
        }
        if addr.checked_add(len).is_none() {
            return Err(Error::invalid(format!(
                "cannot register {len} bytes at {addr:#x}: the range wraps around the address space"
            )));
        }
        if self.by_addr.contains_key(&addr) {
            return Err(Error::invalid(format!(
                "{addr:#x} is registered already: unregister it first"
            )));
        }
        self.by_addr
            .insert(addr, Region::new(addr, len, access, owner, residence));
        self.bytes += len as u64;
        self.longest = self.longest.max(len);
        Ok(())
    }

    /// Takes a region out: no new lease of it is given. The caller then waits for the old ones.
    ///
    /// # Errors
    /// [`Error`] of kind `Invalid` if no region starts at `addr`.
    pub fn unregister(&mut self, addr: usize) -> Result<Region> {
        let region = self
            .by_addr
            .remove(&addr)
            .ok_or_else(|| Error::invalid(format!("no region is registered at {addr:#x}")))?;
        self.bytes -= region.len as u64;
        Ok(region)
    }

    /// A lease of the range for a peer.
    ///
    /// # Errors
    /// [`Denied`] with the reason.
    pub fn grant(
        &self,
        conn: ConnId,
        addr: u64,
        len: u64,
        direction: Direction,
    ) -> Result<Granted, Denied> {
        let allowed = |access: Access| match direction {
            Direction::Read => access.readable(),
            Direction::Write => access.writable(),
        };
        self.holding(addr, len, allowed)
            .map(|region| region.grant(Holder::Peer(conn)))
    }

    /// The nearest region that holds all of the range and allows what is asked.
    fn holding(
        &self,
        addr: u64,
        len: u64,
        allowed: impl Fn(Access) -> bool,
    ) -> Result<&Region, Denied> {
        let (Ok(addr), Ok(len)) = (usize::try_from(addr), usize::try_from(len)) else {
            return Err(Denied::OutOfBounds);
        };
        let mut why = Denied::Unregistered;
        for region in self.starting_before(addr) {
            if region.holds(addr, len) {
                if allowed(region.access) {
                    return Ok(region);
                }
                why = Denied::Access;
            } else if why == Denied::Unregistered && region.holds(addr, 1) {
                why = Denied::OutOfBounds;
            }
        }
        Err(why)
    }

    /// The region that holds all of the range, for a key that allows everything.
    ///
    /// # Errors
    /// As for [`grant`](Self::grant); `Access` if the region limits what peers may do.
    pub fn find(&self, addr: u64, len: u64) -> Result<&Region, Denied> {
        self.holding(addr, len, |access| access == Access::ReadWrite)
    }

    /// Start and length of the nearest region that holds all of the range, whatever it allows.
    pub fn holder(&self, addr: u64, len: u64) -> Option<(u64, u64)> {
        let region = self.holding(addr, len, |_| true).ok()?;
        Some((region.addr as u64, region.len as u64))
    }

    /// A lease of the range for the engine's own side of a transfer: memory that is not registered
    /// is fine, a range that starts in a region and leaves it is not.
    ///
    /// # Errors
    /// [`Denied::OutOfBounds`].
    pub fn local(&self, addr: usize, len: usize) -> Result<Granted, Denied> {
        let mut inside = false;
        for region in self.starting_before(addr) {
            if region.holds(addr, len) {
                return Ok(region.grant(Holder::Local));
            }
            inside |= region.holds(addr, 1);
        }
        if inside {
            Err(Denied::OutOfBounds)
        } else {
            Ok(Granted {
                lease: Lease::unowned(),
                residence: None,
                registered: false,
            })
        }
    }

    /// Regions that may hold `addr`, the nearest start first.
    fn starting_before(&self, addr: usize) -> impl Iterator<Item = &Region> {
        let from = addr.saturating_sub(self.longest);
        self.by_addr
            .range(from..=addr)
            .rev()
            .map(|(_, region)| region)
    }

    /// How many regions there are.
    pub fn count(&self) -> usize {
        self.by_addr.len()
    }

    /// The bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const CONN: ConnId = ConnId(1);

    fn registry(ranges: &[(usize, usize)]) -> Registry {
        let mut registry = Registry::default();
        for &(addr, len) in ranges {
            registry
                .register(addr, len, Access::ReadWrite, None)
                .expect("fresh");
        }
        registry
    }

    #[test]
    fn bad_registrations_are_refused() {
        let mut registry = registry(&[(4096, 4096)]);
        for (addr, len) in [(0, 1), (4096, 1), (8192, 0), (usize::MAX, 2)] {
            assert!(
                registry
                    .register(addr, len, Access::ReadWrite, None)
                    .is_err(),
                "{addr:#x}+{len}"
            );
        }
        assert_eq!((registry.count(), registry.bytes()), (1, 4096));
        assert!(registry.unregister(1).is_err());
    }

    #[test]
    fn a_request_is_valid_if_one_region_holds_all_of_it() {
        // The short region hides the long one's start from a naive nearest-start look-up.
        let registry = registry(&[(1000, 10_000), (2000, 10), (20_000, 10)]);
        let read = |addr, len| registry.grant(CONN, addr, len, Direction::Read).map(|_| ());
        assert_eq!(read(2000, 5000), Ok(()));
        assert_eq!(read(1000, 10_000), Ok(()));
        assert_eq!(read(1000, 10_001), Err(Denied::OutOfBounds));
        assert_eq!(read(10_999, 1), Ok(()));
        assert_eq!(read(11_000, 1), Err(Denied::Unregistered));
        assert_eq!(read(999, 1), Err(Denied::Unregistered));
        assert_eq!(read(2000, u64::MAX), Err(Denied::OutOfBounds));
        assert_eq!(read(u64::MAX, 2), Err(Denied::Unregistered));
    }

    #[test]
    fn access_limits_the_direction() {
        let mut registry = Registry::default();
        registry
            .register(1000, 10, Access::ReadOnly, None)
            .expect("fresh");
        assert!(registry.grant(CONN, 1000, 10, Direction::Read).is_ok());
        assert_eq!(
            registry.grant(CONN, 1000, 10, Direction::Write).err(),
            Some(Denied::Access)
        );
    }

    #[test]
    fn a_key_is_that_of_a_region_that_allows_everything() {
        let mut registry = registry(&[(1000, 100)]);
        // Nearer, holds the range too, and reaches further: its key would open read-only bytes for writing.
        registry
            .register(1050, 100, Access::ReadOnly, None)
            .expect("fresh");
        let find = |addr, len| registry.find(addr, len).map(|r| (r.addr(), r.len()));
        assert_eq!(find(1060, 10), Ok((1000, 100)));
        assert_eq!(find(1110, 10), Err(Denied::Access));
        assert_eq!(find(1095, 100), Err(Denied::OutOfBounds));
        assert_eq!(find(10, 1), Err(Denied::Unregistered));
        assert_eq!(registry.holder(1110, 10), Some((1050, 100)));
        assert_eq!(registry.holder(1095, 100), None);
    }

    #[test]
    fn the_local_side_may_be_unregistered_but_not_leave_a_region() {
        let registry = registry(&[(1000, 10)]);
        assert!(registry.local(5000, 10).is_ok());
        assert!(registry.local(1000, 10).is_ok());
        assert_eq!(registry.local(1005, 10).err(), Some(Denied::OutOfBounds));
        assert_eq!(
            registry.local(1009, usize::MAX).err(),
            Some(Denied::OutOfBounds)
        );
    }

    #[test]
    fn unregistering_waits_for_the_last_lease() {
        let mut registry = registry(&[(1000, 10)]);
        let lease = registry
            .grant(CONN, 1000, 10, Direction::Write)
            .expect("granted")
            .lease;
        let second = lease.clone();
        let region = registry.unregister(1000).expect("there");
        assert_eq!(
            registry.grant(CONN, 1000, 1, Direction::Read).err(),
            Some(Denied::Unregistered)
        );
        drop(lease);
        assert!(!region.wait_unused(Duration::from_millis(5)));
        assert_eq!(region.holders(), [Holder::Peer(CONN)]);
        let waiter = std::thread::spawn(move || region.wait_unused(Duration::from_secs(30)));
        drop(second);
        assert!(waiter.join().expect("no panic"));
    }
}
