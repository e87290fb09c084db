//! Starting the program: without copying the parent, and without becoming a child that anybody has to wait for.
//!
//! A child of the usual kind would turn up in the application's own `waitpid(-1)`, send it a SIGCHLD, and be a zombie
//! when it ends. So the program is a *grandchild*: the child in between is made with no exit signal, which hides
//! it from everybody else's waiting, makes the grandchild, ends, and is waited for by us by name.
//! Both borrow our memory instead of copying it (`CLONE_VM | CLONE_VFORK`, as in `posix_spawn`), so that a process of
//! tens of GB starts it as fast as a small one.
//!
//! Where this process itself takes orphans (process 1 of a container, a subreaper), the grandchild becomes its child
//! after all; [`reap`] deals with that.

use std::ffi::{CStr, CString, c_int, c_void};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::MemfdFlags;

use crate::random;

/// The program, as `build.rs` compiled it; empty for machines that it does not exist for.
static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/sentinel"));

/// Tests only: behave as if programs could not be run from memory.
const NO_MEMFD: &str = "CONNEX_RS_TEST_NO_MEMFD";

/// Tests only: behave as if starting processes were forbidden.
const NO_SPAWN: &str = "CONNEX_RS_TEST_NO_SPAWN";

/// How a sentinel may be started here.
#[derive(Debug)]
pub(super) struct Ways {
    spawn: bool,
    memory: bool,
    places: Vec<PathBuf>,
}

impl Ways {
    /// Reads the environment: on the caller's thread, which knows whether somebody changes it.
    pub(super) fn from_environment() -> Self {
        let mut places: Vec<PathBuf> = std::env::var_os("XDG_RUNTIME_DIR")
            .map(PathBuf::from)
            .into_iter()
            .chain([std::env::temp_dir()])
            .chain(["/dev/shm", "/var/tmp"].map(PathBuf::from))
            .filter(|place| place.is_absolute())
            .collect();
        places.dedup();
        Self {
            spawn: std::env::var_os(NO_SPAWN).is_none(),
            memory: std::env::var_os(NO_MEMFD).is_none(),
            places,
        }
    }
}

/// A sentinel that has been started.
#[derive(Debug)]
pub(super) struct Started {
    /// Its process id.
    pub(super) pid: i32,
    /// Readable when it has ended; `None` on systems without such descriptors (Linux before 5.3).
    pub(super) ended: Option<OwnedFd>,
}

/// Starts the program with `table` as its only descriptor.
///
/// # Errors
/// Every way that was tried, with the system's words.
pub(super) fn start(ways: &Ways, table: BorrowedFd<'_>) -> Result<Started, String> {
    if PROGRAM.is_empty() {
        return Err(format!(
            "there is no sentinel for {} on {}",
            std::env::consts::ARCH,
            std::env::consts::OS
        ));
    }
    if !ways.spawn {
        return Err(format!("starting processes is switched off by {NO_SPAWN}"));
    }
    let from_memory = if ways.memory {
        from_memory(table)
    } else {
        Err(io::Error::other(format!("switched off by {NO_MEMFD}")))
    };
    let mut tried = match from_memory {
        Ok(started) => return Ok(started),
        Err(e) => format!("from memory: {e}"),
    };
    for dir in &ways.places {
        match from_file(dir, table) {
            Ok(started) => return Ok(started),
            Err(e) => {
                use std::fmt::Write as _;
                let _ = write!(tried, "; from {}: {e}", dir.display());
            }
        }
    }
    Err(tried)
}

fn from_memory(table: BorrowedFd<'_>) -> io::Result<Started> {
    let executable = MemfdFlags::from_bits_retain(libc::MFD_EXEC);
    let file = match rustix::fs::memfd_create("connex-sentinel", MemfdFlags::CLOEXEC | executable) {
        // Linux before 6.3 does not know the flag and needs none.
        Err(rustix::io::Errno::INVAL) => {
            rustix::fs::memfd_create("connex-sentinel", MemfdFlags::CLOEXEC)
        }
        other => other,
    }?;
    // 0, 1 and 2 have other uses in the new process.
    let file = rustix::io::fcntl_dupfd_cloexec(&file, 3)?;
    let mut file = std::fs::File::from(file);
    file.write_all(PROGRAM)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    launch(&CString::new(path)?, table)
}

fn from_file(place: &Path, table: BorrowedFd<'_>) -> io::Result<Started> {
    // Nobody else can put another program in our place: the directory is new and ours alone.
    let dir = place.join(format!("connex-rs-{:016x}", random::number()));
    std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
    let path = dir.join("connex-sentinel");
    let result = (|| {
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o700)
            .open(&path)?;
        file.write_all(PROGRAM)?;
        drop(file);
        let name = CString::new(path.as_os_str().as_bytes())?;
        // Another thread that forks at this moment keeps the file open for writing until its child runs a program.
        for _ in 0..20 {
            match launch(&name, table) {
                Err(e) if e.raw_os_error() == Some(libc::ETXTBSY) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => return other,
            }
        }
        launch(&name, table)
    })();
    // The running program keeps its file.
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_dir(&dir);
    result
}

/// What the child and the grandchild read and write, in the parent's memory.
struct Plan {
    program: *const libc::c_char,
    arguments: [*const libc::c_char; 2],
    environment: [*const libc::c_char; 1],
    null: *const libc::c_char,
    root: *const libc::c_char,
    table: c_int,
    stack: *mut c_void,
    /// The grandchild, once made.
    pid: i32,
    /// Why it came to nothing.
    error: c_int,
}

const STACK: usize = 64 << 10;

/// Two stacks for processes that borrow our memory.
struct Stacks(*mut c_void);

impl Stacks {
    fn new() -> io::Result<Self> {
        // SAFETY: a new mapping where the kernel likes.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * STACK,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(at))
    }

    /// Stacks grow down: the end of one, aligned.
    fn top(&self, index: usize) -> *mut c_void {
        self.0.wrapping_byte_add((index + 1) * STACK)
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; whoever used them has ended or runs another program.
        unsafe { libc::munmap(self.0, 2 * STACK) };
    }
}

fn launch(program: &CStr, table: BorrowedFd<'_>) -> io::Result<Started> {
    let stacks = Stacks::new()?;
    let mut plan = Plan {
        program: program.as_ptr(),
        arguments: [c"connex-sentinel".as_ptr(), std::ptr::null()],
        environment: [std::ptr::null()],
        null: c"/dev/null".as_ptr(),
        root: c"/".as_ptr(),
        table: table.as_raw_fd(),
        stack: stacks.top(1),
        pid: 0,
        error: 0,
    };
    // No signal handler of the application may run in a process that borrows its memory. The sentinel keeps the mask.
    // SAFETY: plain calls on local sets.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    // SAFETY: the child runs `child` on a stack of its own while this thread is suspended until it has ended; all that
    // it touches is in `plan`, which outlives it.
    let made = unsafe {
        libc::clone(
            child,
            stacks.top(0),
            libc::CLONE_VM | libc::CLONE_VFORK,
            (&raw mut plan).cast(),
        )
    };
    let error = io::Error::last_os_error();
    // SAFETY: the set was filled by the first call.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    if made < 0 {
        return Err(error);
    }
    wait_for(made, 0);
    // The processes wrote through the pointer while we were suspended.
    // SAFETY: they have let go of our memory.
    let (pid, error) = unsafe {
        (
            (&raw const plan.pid).read_volatile(),
            (&raw const plan.error).read_volatile(),
        )
    };
    if error != 0 {
        if pid > 0 {
            wait_for(pid, libc::WNOHANG);
        }
        return Err(io::Error::from_raw_os_error(error));
    }
    // SAFETY: a new descriptor or an error.
    let ended = unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as c_int))
    };
    Ok(Started { pid, ended })
}

/// The process in between.
extern "C" fn child(plan: *mut c_void) -> c_int {
    let plan: *mut Plan = plan.cast();
    // SAFETY: as in `launch`: this process is suspended while the grandchild borrows the memory.
    unsafe {
        let pid = libc::clone(
            grandchild,
            (*plan).stack,
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            plan.cast(),
        );
        if pid < 0 {
            (*plan).error = *libc::__errno_location();
        } else {
            (*plan).pid = pid;
        }
    }
    0
}

/// The process that becomes the sentinel. Only system calls here: another thread may hold any lock.
extern "C" fn grandchild(plan: *mut c_void) -> c_int {
    let plan: *mut Plan = plan.cast();
    // SAFETY: system calls on pointers that the plan keeps; the descriptors are this process's own copies.
    unsafe {
        libc::setsid();
        libc::chdir((*plan).root);
        // The table is 0, the other two lead nowhere, and nothing else passes through `execve`.
        let null = above_two(libc::open((*plan).null, libc::O_RDWR | libc::O_CLOEXEC));
        let placed = if (*plan).table == 0 {
            libc::fcntl(0, libc::F_SETFD, 0)
        } else {
            libc::dup2((*plan).table, 0)
        };
        if placed >= 0 {
            for fd in [1, 2] {
                if null < 0 {
                    libc::close(fd);
                } else {
                    libc::dup2(null, fd);
                }
            }
            close_others();
            libc::execve(
                (*plan).program,
                (*plan).arguments.as_ptr(),
                (*plan).environment.as_ptr(),
            );
        }
        (*plan).error = *libc::__errno_location();
    }
    127
}

/// Moves a descriptor out of the way of 0, 1 and 2.
///
/// # Safety
/// The descriptor is the caller's own, or negative.
unsafe fn above_two(fd: c_int) -> c_int {
    if !(0..3).contains(&fd) {
        return fd;
    }
    // SAFETY: the caller's own.
    unsafe {
        let moved = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3);
        libc::close(fd);
        moved
    }
}

/// Lets no descriptor from 3 on pass through `execve`.
///
/// # Safety
/// In a process whose descriptor table nobody shares.
unsafe fn close_others() {
    // SAFETY: marks descriptors, and those of this process only.
    unsafe {
        let marked = libc::syscall(
            libc::SYS_close_range,
            3,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
        if marked == 0 {
            return;
        }
        // Linux before 5.11: one by one, as far as is reasonable. Ours are all marked from their birth.
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        for fd in 3..limit.rlim_cur.min(65_536) as c_int {
            let flags = libc::fcntl(fd, libc::F_GETFD);
            if flags >= 0 {
                libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC);
            }
        }
    }
}

/// Takes a process that has ended off the kernel's hands, if it is our child and nobody else did.
pub(super) fn reap(pid: i32) {
    wait_for(pid, libc::WNOHANG);
}

fn wait_for(pid: i32, flags: c_int) {
    // SAFETY: names one process; its status is not wanted.
    unsafe {
        while libc::waitpid(pid, std::ptr::null_mut(), flags | libc::__WALL) < 0
            && *libc::__errno_location() == libc::EINTR
        {}
    }
}
