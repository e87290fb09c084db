//! `cxrma faults` where it makes namespaces of its own: what it measures, and that it leaves nothing behind.

use std::collections::HashSet;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::*;

on_every_transport!(suspicions_are_measured, ctrl_c_leaves_nothing_behind);

/// The program, which cargo does not build with these tests.
fn program(net: Net, words: &[&str]) -> Command {
    let file = PathBuf::from(AGENT).with_file_name("cxrma");
    assert!(
        file.is_file(),
        "no {}: `cargo build -p cxrma` with the same profile makes it",
        file.display()
    );
    let mut program = Command::new(file);
    program
        .args(["faults", "--ip", "127.0.0.1", "--json", "--transport"])
        .arg(if net == Net::Tcp { "tcp" } else { "ucx" })
        .args(words);
    program
}

fn suspicions_are_measured(net: Net) {
    let kinds = "stop,stop-sentinel,link-down";
    let output = program(net, &["--only", kinds, "--stops", "3"])
        .stderr(Stdio::inherit())
        .output()
        .expect("started");
    assert!(output.status.success(), "{}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["problems"], json!([]));
    assert_eq!(report["left_out"], json!([]));
    let rows = report["results"].as_array().expect("rows");
    let measures: Vec<&Value> = rows.iter().map(|row| &row["measure"]).collect();
    assert_eq!(measures, ["stop", "stop_sentinel", "link_down"]);
    for (row, at_least_us) in rows.iter().zip([200e3, 75e3, 200e3]) {
        assert_eq!(row["told"]["count"], 3, "{row}");
        let counts = row["histogram"].as_array().expect("buckets").iter();
        let in_buckets: u64 = counts.filter_map(|bucket| bucket["count"].as_u64()).sum();
        assert_eq!(in_buckets, 3, "{row}");
        // Not before its time; how much later is no matter for a loaded machine.
        let least = row["told"]["min_us"].as_f64().expect("a time");
        assert!((at_least_us..10e6).contains(&least), "{row}");
    }
}

/// Heartbeats of 1 s with a time-out of 3 s, while others have more to do than the processors can.
#[test]
fn nobody_is_suspected_while_the_processors_are_busy() {
    let seconds = if soak() { "600" } else { "60" };
    let output = program(Net::Tcp, &["--only", "load", "--load-seconds", seconds])
        .stderr(Stdio::inherit())
        .output()
        .expect("started");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["problems"], json!([]));
    assert!(output.status.success(), "{}", output.status);
    assert_eq!(report["results"][0]["measure"], "load", "{report}");
    assert_eq!(report["results"][0]["false_alarms"], 0, "{report}");
}

/// Network namespaces that processes are in: those of a process group, or all.
fn namespaces(group: Option<u32>) -> HashSet<PathBuf> {
    let is_of = |process: &std::path::Path, group: u32| {
        let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
        // After the name, which may hold anything: state, parent, group.
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        rest.split_whitespace().nth(2) == Some(&group.to_string())
    };
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    processes
        .map(|process| process.path())
        .filter(|process| group.is_none_or(|group| is_of(process, group)))
        .filter_map(|process| std::fs::read_link(process.join("ns/net")).ok())
        .collect()
}

fn ctrl_c_leaves_nothing_behind(net: Net) {
    need_root();
    let mut program = program(net, &["--only", "link-down", "--stops", "100000"]);
    program.stdout(Stdio::null()).process_group(0);
    // SAFETY: one call that is allowed between fork and exec.
    unsafe {
        // Whoever runs the tests in the background has SIGINT ignored, and that is inherited.
        program.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut child = program.spawn().expect("started");
    let mut made = HashSet::new();
    wait_for("both namespaces", || {
        let ended = child.try_wait().expect("our child");
        assert!(ended.is_none(), "it ended by itself: {ended:?}");
        // Its own is ours.
        made = namespaces(Some(child.id()));
        made.len() == 3
    });
    // SAFETY: a signal to our own child, which has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let status = child.wait().expect("our child");
    assert!(!status.success(), "{status}");
    made.remove(&std::fs::read_link("/proc/self/ns/net").expect("ours"));
    assert_eq!(made.len(), 2);
    wait_for("the namespaces to go", || {
        namespaces(None).is_disjoint(&made)
    });
}
