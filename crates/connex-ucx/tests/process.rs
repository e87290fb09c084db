//! What a load of UCX does, and does not, to its process. Each check runs in a child process of its own: this test binary,
//! started again with a role.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use connex_ucx::{Choice, Library, LoadError};

const ROLE: &str = "CONNEX_UCX_TEST_ROLE";

/// Runs this binary's `role` in a child.
fn child(role: &str, vars: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args(["--exact", "role", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::null());
    for (name, value) in vars {
        command.env(name, value);
    }
    command.output().expect("a child")
}

fn check(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The children's part; nothing without a role.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "sighup" => {
            let _context = common::context("tcp", false);
            // SAFETY: sends a signal to this process.
            unsafe { libc::raise(libc::SIGHUP) };
            panic!("SIGHUP did not end the process");
        }
        "untouched" => untouched(),
        "another" => another(),
        "joined" => joined(),
        "quiet" => drop(common::pair("tcp,sysv", true)),
        other => panic!("no role {other}"),
    }
}

fn action(signal: i32) -> (usize, i32) {
    // SAFETY: zero is valid; a null new action only asks.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, std::ptr::null(), &mut action), 0);
        // The C library adds this one to what it sets, which the kernel then reports.
        const SA_RESTORER: i32 = 0x0400_0000;
        (action.sa_sigaction, action.sa_flags & !SA_RESTORER)
    }
}

extern "C" fn handler(_: i32) {}

fn untouched() {
    const SIGNALS: [i32; 6] = [
        libc::SIGHUP,
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGABRT,
    ];
    // As Python's faulthandler does.
    // SAFETY: a valid handler.
    unsafe {
        let mut mine: libc::sigaction = std::mem::zeroed();
        mine.sa_sigaction = handler as *const () as usize;
        for signal in &SIGNALS[1..] {
            assert_eq!(libc::sigaction(*signal, &mine, std::ptr::null_mut()), 0);
        }
    }
    let before: Vec<_> = SIGNALS.iter().map(|s| action(*s)).collect();
    let environment: Vec<_> = std::env::vars_os().collect();
    drop(common::pair("tcp,sysv", true));
    assert_eq!(
        before,
        SIGNALS.iter().map(|s| action(*s)).collect::<Vec<_>>()
    );
    assert_eq!(environment, std::env::vars_os().collect::<Vec<_>>());
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    assert!(!maps.contains("libcuda.so"), "a CUDA driver was loaded");
}

/// Loads the library that the parent names the way another package would, before this crate comes.
fn load_before_us() {
    let first = std::env::var_os("CONNEX_UCX_TEST_FIRST").expect("named");
    let dir = Path::new(&first).parent().expect("a folder");
    for name in ["libucs.so.0", "libuct.so.0", "libucp.so.0"] {
        // SAFETY: UCX's initialisers.
        let loaded = unsafe { libloading::Library::new(dir.join(name)) }.expect("loads");
        std::mem::forget(loaded);
    }
}

fn another() {
    load_before_us();
    match Library::load() {
        Err(LoadError::Another {
            loaded,
            variable: "CONNEX_RS_UCX",
            wanted,
        }) => {
            assert_ne!(loaded.canonicalize().ok(), wanted.canonicalize().ok());
            let text = LoadError::Another {
                loaded: loaded.clone(),
                variable: "CONNEX_RS_UCX",
                wanted: wanted.clone(),
            }
            .to_string();
            for path in [loaded, wanted] {
                assert!(text.contains(&path.display().to_string()), "{text}");
            }
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn joined() {
    load_before_us();
    let library = Library::load().expect("joins the loaded one");
    assert_eq!(library.choice(), &Choice::AlreadyLoaded);
    drop(common::pair("tcp", false));
}

#[test]
fn sighup_still_ends_the_process() {
    let output = child("sighup", &[]);
    assert_eq!(
        output.status.signal(),
        Some(libc::SIGHUP),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn signals_and_environment_are_as_before() {
    check(&child("untouched", &[]));
}

#[test]
fn a_use_of_everything_prints_nothing() {
    let output = child("quiet", &[]);
    check(&output);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(!stdout.contains("UCX"), "UCX wrote to stdout: {stdout}");
    assert!(!stderr.contains("UCX"), "UCX wrote to stderr: {stderr}");
}

#[test]
fn another_ucx_in_the_process_is_refused_and_the_same_is_joined() {
    let here = common::library().path().to_path_buf();
    // A second copy of the same UCX under another path stands for another UCX.
    let copy = std::env::temp_dir().join(format!("connex-ucx-copy-{}", std::process::id()));
    std::fs::create_dir_all(&copy).expect("a folder");
    let wanted = copy.join("libucp.so.0");
    std::fs::copy(&here, &wanted).expect("a copy");
    let another = child(
        "another",
        &[("CONNEX_UCX_TEST_FIRST", &here), ("CONNEX_RS_UCX", &wanted)],
    );
    let joined = child(
        "joined",
        &[("CONNEX_UCX_TEST_FIRST", &here), ("CONNEX_RS_UCX", &here)],
    );
    std::fs::remove_dir_all(&copy).expect("cleaned up");
    check(&another);
    check(&joined);
}
