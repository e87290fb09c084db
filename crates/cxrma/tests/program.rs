//! The program as people and scripts run it: its arguments, its JSON, and that it notices what is wrong.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "../../connex-rs/tests/common/stand_in.rs"]
mod stand_in;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const IP: &str = "127.0.0.1";

/// Runs the program to its end; it is killed, and the test fails, if that takes minutes.
fn cxrma(args: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cxrma"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let drain = |mut from: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut all = Vec::new();
            from.read_to_end(&mut all).expect("a pipe can be read");
            all
        })
    };
    let stdout = drain(Box::new(child.stdout.take().expect("piped")));
    let stderr = drain(Box::new(child.stderr.take().expect("piped")));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status;
        }
        if start.elapsed() > Duration::from_secs(180) {
            let _ = child.kill();
            panic!("{args:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    Output {
        status,
        stdout: stdout.join().expect("no panic"),
        stderr: stderr.join().expect("no panic"),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs it with `--json`; the output and the exit code.
fn json(args: &[&str]) -> (Value, Option<i32>) {
    let mut args = args.to_vec();
    args.push("--json");
    let output = cxrma(&args);
    let value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| {
        panic!(
            "{args:?}: {e}\n{}\n{}",
            text(&output.stdout),
            text(&output.stderr)
        )
    });
    (value, output.status.code())
}

fn rows<'a>(report: &'a Value, measure: &str) -> Vec<&'a Value> {
    report["results"]
        .as_array()
        .expect("results")
        .iter()
        .filter(|row| row["measure"] == measure)
        .collect()
}

fn number(row: &Value, name: &str) -> f64 {
    row[name]
        .as_f64()
        .unwrap_or_else(|| panic!("no number {name} in {row}"))
}

/// A summary of times is complete and in order.
fn check_times(times: &Value, count: u64) {
    assert_eq!(times["count"], count, "{times}");
    let names = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
    let values = names.map(|name| number(times, name));
    assert!(values[0] > 0.0 && values.is_sorted(), "{times}");
    assert!(number(times, "mean_us") > 0.0);
}

#[test]
fn wrong_arguments_are_named_with_the_way_out() {
    let url = "127.0.0.1:1#m|0|0|0";
    let cases: [(&[&str], &[&str]); 10] = [
        (&[], &["local", "owner", "reader", "faults"]),
        (&["local"], &["--ip"]),
        (&["local", "--ip", "300.1.1.1"], &["300.1.1.1", "127.0.0.1"]),
        (&["local", "--ip", IP, "--sizes", "4K,9X"], &["9X", "64K"]),
        (
            &["local", "--ip", IP, "--transport", "smoke"],
            &["smoke", "tcp"],
        ),
        (&["local", "--ip", IP, "--depths", "0"], &["0", "1..=64"]),
        (
            &["local", "--ip", IP, "--verify-chain", "--only", "latency"],
            &["--verify-chain", "--only"],
        ),
        (
            &["reader", "--url", "nonsense", "--addr", "0x1000"],
            &["nonsense", "cxrma owner"],
        ),
        (
            &["reader", "--url", url, "--addr", "12x"],
            &["12x", "cxrma owner"],
        ),
        (
            &["faults", "--ip", IP, "--ballast", "much"],
            &["much", "8G"],
        ),
    ];
    for (args, words) in cases {
        let output = cxrma(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        for word in words {
            assert!(
                said.contains(word),
                "{args:?}: {word:?} is missing in {said}"
            );
        }
    }
}

#[test]
fn what_cannot_be_done_is_an_error_that_says_why() {
    // An address of nobody (TEST-NET-3).
    let output = cxrma(&["local", "--ip", "203.0.113.7"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("203.0.113.7"),
        "{}",
        text(&output.stderr)
    );
    let output = cxrma(&[
        "local", "--ip", IP, "--only", "stream", "--sizes", "64M", "--depths", "8",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("--large"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_local_run_has_every_figure() {
    let (report, code) = json(&[
        "local",
        "--ip",
        IP,
        "--all",
        "--sizes",
        "4K,100,256K",
        "--iterations",
        "10",
        "--budget-ms",
        "6000",
        "--depths",
        "1,4",
        "--seconds",
        "1",
    ]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["schema"], "cxrma/1");
    assert_eq!(report["problems"], Value::Array(Vec::new()));
    for name in ["version", "command", "transport", "path"] {
        assert!(
            report[name].as_str().is_some_and(|text| !text.is_empty()),
            "{name} in {report}"
        );
    }
    assert!(number(&report["machine"], "cpus") >= 1.0);

    let sizes: Vec<_> = rows(&report, "latency")
        .iter()
        .map(|row| (row["op"].clone(), row["bytes"].clone()))
        .collect();
    let expected: Vec<(Value, Value)> = [100, 4096, 262_144]
        .into_iter()
        .flat_map(|bytes| ["read", "write"].map(|op| (op.into(), bytes.into())))
        .collect();
    assert_eq!(sizes, expected);
    for row in rows(&report, "latency") {
        check_times(row, 10);
    }
    let streams = rows(&report, "stream");
    assert_eq!(streams.len(), 3 * 2 * 2);
    for row in streams {
        let (bytes, count, seconds) = (
            number(row, "bytes"),
            number(row, "count"),
            number(row, "seconds"),
        );
        assert!(
            (number(row, "gb_per_s") - bytes * count / seconds / 1e9).abs() < 1e-9,
            "{row}"
        );
    }
    let chains = rows(&report, "chain");
    assert_eq!(chains.len(), 3);
    for row in chains {
        check_times(&row["chain"], 10);
        check_times(&row["one_write"], 10);
        let ratio = number(&row["chain"], "p50_us") / number(&row["one_write"], "p50_us");
        assert!((number(row, "ratio") - ratio).abs() < 1e-6, "{row}");
    }
    for row in rows(&report, "signal") {
        check_times(&row["done"], 10);
        check_times(&row["answered"], 10);
    }
    let channels = rows(&report, "channel");
    let lines: Vec<_> = channels
        .iter()
        .map(|row| (row["bytes"].clone(), row["in_flight"].clone()))
        .collect();
    // Steps are whole words.
    let expected: Vec<(Value, Value)> = [104, 4096, 262_144]
        .into_iter()
        .flat_map(|bytes| [1, 4].map(|n| (bytes.into(), n.into())))
        .collect();
    assert_eq!(lines, expected);
    for row in channels {
        check_times(&row["answered"], 10);
        assert_eq!(row["sent"].is_null(), row["in_flight"] != 1, "{row}");
        if row["in_flight"] == 1 {
            check_times(&row["sent"], 10);
        }
        assert_eq!(row["count"], 10, "{row}");
        let moved = number(row, "bytes") * number(row, "count");
        let rate = moved / number(row, "seconds") / 1e9;
        assert!((number(row, "gb_per_s") - rate).abs() < 1e-9, "{row}");
    }
    let opens: Vec<_> = rows(&report, "open")
        .iter()
        .map(|row| (row["what"].clone(), row["peer"].clone()))
        .collect();
    let expected: [(Value, Value); 4] = [
        ("chain", "first"),
        ("chain", "later"),
        ("step", "first"),
        ("step", "linked"),
    ]
    .map(|(what, peer)| (what.into(), peer.into()));
    assert_eq!(opens, expected);
    for row in rows(&report, "open") {
        let fresh = 10;
        check_times(
            row,
            if row["peer"] == "later" {
                4 * fresh
            } else {
                fresh
            },
        );
    }
    let connects: Vec<_> = rows(&report, "connect")
        .iter()
        .map(|row| row["peer"].clone())
        .collect();
    assert_eq!(connects, ["first", "later"]);
    let idle = rows(&report, "idle");
    assert_eq!(idle[0]["peers"], 10);
    assert!(
        (0.0..100.0).contains(&number(idle[0], "cpu_percent")),
        "{}",
        idle[0]
    );
    assert_eq!(rows(&report, "batch").len(), 2);
    assert_eq!(rows(&report, "await").len(), 2);
    assert!(number(rows(&report, "threads")[0], "ops_per_s") > 0.0);
    let growth: Vec<_> = rows(&report, "growth")
        .iter()
        .map(|row| row["peers"].clone())
        .collect();
    assert_eq!(growth, [1, 16, 64, 256]);
}

#[test]
fn the_table_for_people_has_the_same_figures() {
    let output = cxrma(&[
        "local",
        "--ip",
        IP,
        "--only",
        "latency,stream,chain,signal,channel,connect,open,idle",
        "--sizes",
        "4K",
        "--iterations",
        "5",
        "--depths",
        "2",
        "--seconds",
        "1",
    ]);
    let said = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{said}{}",
        text(&output.stderr)
    );
    for words in [
        "read 4 KB",
        "write 4 KB",
        "p50",
        "p99",
        "GB/s",
        "chain of 3, 4 KB",
        "put_signal",
        "step of 4 KB",
        "connect to first read, first peer",
        "connect to first chain, later peer",
        "open channel to first step, linked peer",
        "idle, 10 peers",
        "arrived as they were sent",
    ] {
        assert!(said.contains(words), "{words:?} is missing in {said}");
    }
    assert!(
        !text(&output.stderr).contains('\r'),
        "a progress bar although standard error is no terminal"
    );
}

#[test]
fn chains_in_order_pass_and_a_broken_order_is_caught() {
    verify_chains("tcp");
}

/// Shared memory, where this UCX has it.
#[test]
fn chains_in_order_pass_and_a_broken_order_is_caught_over_ucx() {
    verify_chains("ucx");
}

fn verify_chains(transport: &str) {
    let start = [
        "local",
        "--ip",
        IP,
        "--transport",
        transport,
        "--verify-chain",
        "--seconds",
        "2",
    ];
    let (report, code) = json(&start);
    assert_eq!(code, Some(0), "{report}");
    assert!(
        report["path"]
            .as_str()
            .is_some_and(|path| path.starts_with(transport)),
        "{report}"
    );
    let row = rows(&report, "verify_chain")[0];
    assert!(
        number(row, "chains") > 0.0 && row["chains"] == row["sent"] && row["violations"] == 0,
        "{row}"
    );

    let mut broken = start.to_vec();
    broken.push("--break-order");
    let (report, code) = json(&broken);
    assert_eq!(code, Some(1), "{report}");
    let row = rows(&report, "verify_chain")[0];
    assert!(
        number(row, "violations") > 0.0 && !row["first"].is_null(),
        "{row}"
    );
    assert!(
        report["problems"][0]
            .as_str()
            .is_some_and(|problem| problem.contains("before its data")),
        "{report}"
    );
}

#[test]
fn owner_and_reader_find_each_other_by_what_the_owner_prints() {
    let mut owner = Command::new(env!("CARGO_BIN_EXE_cxrma"))
        .args(["owner", "--ip", IP, "--json", "--until-eof"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the owner starts");
    let mut line = String::new();
    BufReader::new(owner.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("a line");
    let offer: Value = serde_json::from_str(&line).expect("JSON");
    let (url, addr) = (
        offer["url"].as_str().expect("url"),
        offer["addr"].as_str().expect("addr"),
    );
    // Twice: an owner outlives its readers.
    for _ in 0..2 {
        let (report, code) = json(&[
            "reader",
            "--url",
            url,
            "--addr",
            addr,
            "--only",
            "latency,stream,chain,signal,channel,connect,open,idle",
            "--sizes",
            "4K",
            "--iterations",
            "5",
            "--seconds",
            "1",
        ]);
        assert_eq!(code, Some(0), "{report}");
        for (measure, count) in [
            ("latency", 2),
            ("stream", 6),
            ("chain", 1),
            ("signal", 1),
            ("channel", 2),
            ("connect", 2),
            ("open", 4),
            ("idle", 1),
        ] {
            assert_eq!(rows(&report, measure).len(), count, "{measure}: {report}");
        }
    }
    // An address that is registered but is not the beginning.
    let wrong = format!(
        "{:#x}",
        u64::from_str_radix(&addr[2..], 16).expect("hex") + 4096
    );
    let output = cxrma(&["reader", "--url", url, "--addr", &wrong]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains(&wrong),
        "{}",
        text(&output.stderr)
    );
    // The end of its input ends it.
    drop(owner.stdin.take());
    let start = Instant::now();
    while owner
        .try_wait()
        .expect("a child can be waited for")
        .is_none()
    {
        if start.elapsed() > Duration::from_secs(60) {
            let _ = owner.kill();
            panic!("the owner did not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn faults_are_measured_and_nothing_grows() {
    let (report, code) = json(&[
        "faults",
        "--ip",
        IP,
        "--only",
        "kill,stop,connect,stall,cycles,heartbeats",
        "--kills",
        "3",
        "--peers",
        "1,3",
        "--survivors",
        "3",
        "--stops",
        "2",
        "--heartbeat-ms",
        "200",
        "--connects",
        "2",
        "--churns",
        "3",
        "--cycles",
        "20",
        "--heartbeat-peers",
        "8",
        "--seconds",
        "2",
    ]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["schema"], "cxrma-faults/1");
    let kills = rows(&report, "kill");
    assert_eq!(
        kills
            .iter()
            .map(|row| (row["peers"].as_u64(), row["survivors"].as_u64()))
            .collect::<Vec<_>>(),
        [(1, 1), (3, 1), (1, 3)].map(|(p, s)| (Some(p), Some(s)))
    );
    for row in kills {
        let survivors = row["survivors"].as_u64().expect("a number");
        check_times(&row["told"], 3 * survivors);
        // Seconds are for machines that are busy with other tests; what is excluded is that a death is not seen by itself.
        assert!(number(&row["told"], "max_us") < 10e6, "{row}");
        assert_eq!(
            row["histogram"]
                .as_array()
                .expect("buckets")
                .iter()
                .filter_map(|b| b["count"].as_u64())
                .sum::<u64>(),
            3 * survivors
        );
        assert_eq!(row["seen"].is_null(), survivors > 1, "{row}");
    }
    for row in rows(&report, "restart") {
        check_times(&row["process"], 3);
        check_times(&row["engine"], 3);
    }
    let stop = rows(&report, "stop")[0];
    check_times(&stop["told"], 2);
    assert!(
        number(&stop["told"], "min_us") > 300e3,
        "suspected before the heartbeat timeout could run out: {stop}"
    );
    assert!(number(rows(&report, "stall")[0], "churns") == 3.0);
    let cycles = rows(&report, "cycles")[0];
    assert_eq!(cycles["flat"], true, "{cycles}");
    assert!(
        number(&cycles["start"], "descriptors") > 0.0
            && number(&cycles["end"], "connections") == 1.0,
        "{cycles}"
    );
    let heartbeats = rows(&report, "heartbeats")[0];
    assert_eq!(
        (heartbeats["peers"].as_u64(), heartbeats["lost"].as_u64()),
        (Some(8), Some(0)),
        "{heartbeats}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_a_plain_sentence() {
    // No host has that many.
    for args in [
        &["owner", "--ip", IP, "--gpu-owner", "9999"][..],
        &[
            "local",
            "--ip",
            IP,
            "--gpu-reader",
            "9999",
            "--only",
            "latency",
        ][..],
    ] {
        let output = cxrma(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("There is no GPU 9999 on this host"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

/// On the stand-in driver, as on a GPU: what is measured is also compared byte by byte.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn gpu_memory_is_measured_and_verified() {
    let mut args = vec!["local", "--ip", IP, "--transport", "tcp"];
    args.extend(["--gpu-owner", "0", "--gpu-reader", "1", "--sizes", "4K,1M"]);
    args.extend([
        "--only",
        "latency,stream,chain",
        "--iterations",
        "20",
        "--json",
    ]);
    let output = Command::new(env!("CARGO_BIN_EXE_cxrma"))
        .args(&args)
        .env("LD_LIBRARY_PATH", stand_in::build())
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["problems"], Value::Array(Vec::new()), "{report}");
}
