//! More than 4 GiB in one transfer, both ways. A binary of its own, so that nothing runs beside it.

mod common;

use std::time::Duration;

use common::{Memory, Net, engine, read, write};

on_every_transport!(more_than_four_gibibytes);

const LEN: usize = (1 << 32) + 5;
/// What lies behind the big memory: not a divisor of anything that cuts transfers.
const PERIOD: usize = 61 * (1 << 20);

/// `len` bytes whose pages repeat every [`PERIOD`]: a source that takes little memory.
struct Repeated {
    addr: usize,
    len: usize,
}

impl Repeated {
    fn new(len: usize, pattern: &Memory) -> Self {
        let mut block = vec![0; PERIOD];
        pattern.copy_out(0, &mut block);
        // SAFETY: a fresh file of our own, mapped into a fresh reservation of our own.
        unsafe {
            let fd = libc::memfd_create(c"connex-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            let written = libc::write(fd, block.as_ptr().cast(), PERIOD);
            assert_eq!(written, PERIOD as isize);
            let whole = len.next_multiple_of(PERIOD);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let base = libc::mmap(std::ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            for at in (0..whole).step_by(PERIOD) {
                let to = base.byte_add(at);
                let flags = libc::MAP_SHARED | libc::MAP_FIXED;
                let got = libc::mmap(to, PERIOD, libc::PROT_READ, flags, fd, 0);
                assert_eq!(got, to);
            }
            libc::close(fd);
            Self {
                addr: base as usize,
                len: whole,
            }
        }
    }
}

impl Drop for Repeated {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and its users are gone.
        unsafe { libc::munmap(self.addr as *mut _, self.len) };
    }
}

fn is_repeated(memory: &Memory, pattern: &Memory) -> bool {
    let (mut want, mut seen) = (vec![0; PERIOD], vec![0; PERIOD]);
    pattern.copy_out(0, &mut want);
    (0..LEN).step_by(PERIOD).all(|at| {
        let n = PERIOD.min(LEN - at);
        memory.copy_out(at, &mut seen[..n]);
        seen[..n] == want[..n]
    })
}

fn more_than_four_gibibytes(net: Net) {
    let time = Some(Duration::from_secs(600));
    let (a, b) = (engine(net, 0), engine(net, 1));
    let pattern = Memory::patterned(PERIOD, 77);
    let source = Repeated::new(LEN, &pattern);
    {
        let there = Memory::new(LEN + 4096);
        there.register(&b);
        assert_eq!(
            write(&a, b.local_url(), source.addr, there.addr(), LEN, time),
            0
        );
        assert!(is_repeated(&there, &pattern), "write");
        assert!(there.is_all(LEN, 4096, 0), "after the write");
        b.unregister_memory(there.addr()).expect("unregister");
    }
    // SAFETY: the source outlives the engines, and nobody writes it.
    unsafe { b.register_memory(source.addr, LEN) }.expect("register");
    let here = Memory::new(LEN + 4096);
    assert_eq!(
        read(&a, b.local_url(), here.addr(), source.addr, LEN, time),
        0
    );
    assert!(is_repeated(&here, &pattern), "read");
    assert!(here.is_all(LEN, 4096, 0), "after the read");
    a.close();
    b.close();
}
