//! What was to be reached, and what was.

use serde::Serialize;

use crate::runs::{Round, Runs};

/// The runners, as `cargo xtask bench-peers` names them.
pub(crate) const TCP: &str = "cxrma tcp";
/// UCX over TCP.
pub(crate) const UCX: &str = "cxrma ucx tcp";
/// UCX over shared memory.
pub(crate) const SHM: &str = "cxrma ucx shm";
/// `ucx_perftest` over TCP.
pub(crate) const PERFTEST: &str = "ucx_perftest tcp";
/// The same over shared memory.
pub(crate) const PERFTEST_SHM: &str = "ucx_perftest shm";
/// Plain sockets.
pub(crate) const SOCKETS: &str = "sockets";
/// Copies through shared memory.
pub(crate) const SHARED: &str = "shared copy";
/// connex-rs from Python.
pub(crate) const PYTHON: &str = "python tcp";
/// Mooncake with its defaults, and with its pool and 1 MiB slices.
pub(crate) const MOONCAKE: [&str; 2] = ["mooncake", "mooncake pooled"];
/// NIXL.
pub(crate) const NIXL: &str = "nixl";

const KB: u64 = 1 << 10;
const MB: u64 = 1 << 20;
/// Sizes of bulk.
const BULK: [u64; 3] = [MB, 16 * MB, 64 * MB];

/// A limit.
#[derive(Clone, Copy, Debug)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
    /// Nothing was promised.
    Told,
}

/// One aim and what was reached.
#[derive(Serialize, Debug)]
pub(crate) struct Aim {
    /// What is compared.
    pub(crate) what: String,
    /// The limit, in words.
    pub(crate) aim: String,
    /// The median over the rounds; none if it was not measured.
    pub(crate) reached: Option<f64>,
    /// Whether that is within the limit; none if there is no limit or no figure.
    pub(crate) met: Option<bool>,
}

struct Aims<'a> {
    runs: &'a Runs,
    list: Vec<Aim>,
}

impl Aims<'_> {
    fn add(&mut self, what: String, limit: Limit, compute: impl Fn(&Round) -> Option<f64>) {
        let reached = self.runs.median(compute);
        let (aim, met) = match limit {
            Limit::AtMost(most) => (format!("≤ {most}"), reached.map(|value| value <= most)),
            Limit::AtLeast(least) => (format!("≥ {least}"), reached.map(|value| value >= least)),
            Limit::Told => ("—".to_owned(), None),
        };
        self.list.push(Aim {
            what,
            aim,
            reached,
            met,
        });
    }
}

/// The better of Mooncake's two settings.
fn mooncake(round: &Round, name: &str) -> Option<f64> {
    MOONCAKE
        .iter()
        .filter_map(|runner| round.get(runner, name))
        .min_by(f64::total_cmp)
}

/// The better of `ucx_perftest`'s active messages and puts, one way.
fn one_way(round: &Round, runner: &str, bytes: u64) -> Option<f64> {
    ["am", "put"]
        .iter()
        .filter_map(|op| round.get(runner, &format!("{op}/{bytes}")))
        .min_by(f64::total_cmp)
}

/// All aims, in order.
pub(crate) fn all(runs: &Runs) -> Vec<Aim> {
    use Limit::{AtLeast, AtMost, Told};
    let mut aims = Aims {
        runs,
        list: Vec::new(),
    };
    let small = 4 * KB;
    for op in ["read", "write"] {
        let name = format!("{op}/{small}");
        for (runner, ours, limit) in [(TCP, "TCP", AtMost(1.25)), (UCX, "UCX over TCP", Told)] {
            aims.add(
                format!("4 KB {op}, {ours}: time / round trip of ucx_perftest's active messages"),
                limit,
                |r| Some(r.get(runner, &name)? / (2.0 * r.get(PERFTEST, &format!("am/{small}"))?)),
            );
            aims.add(
                format!("4 KB {op}, {ours}: time / polling plain sockets"),
                limit,
                |r| Some(r.get(runner, &name)? / r.least(SOCKETS, &format!("{name}/polling"))?),
            );
        }
        aims.add(
            format!("4 KB {op} from Python: time / Mooncake's"),
            AtMost(0.35),
            |r| Some(r.get(PYTHON, &name)? / mooncake(r, &name)?),
        );
        aims.add(format!("4 KB {op} from Python: time / NIXL's"), Told, |r| {
            Some(r.get(PYTHON, &name)? / r.get(NIXL, &name)?)
        });
    }
    for bytes in BULK {
        let size = bytes / MB;
        for op in ["read", "write"] {
            let name = format!("{op}/{bytes}");
            for (runner, ours, floor, plain) in [
                (TCP, "TCP", AtLeast(0.9), AtLeast(0.95)),
                (UCX, "UCX over TCP", Told, Told),
            ] {
                aims.add(
                    format!("{size} MB {op}, {ours}: speed / ucx_perftest's better form"),
                    floor,
                    |r| Some(one_way(r, PERFTEST, bytes)? / r.get(runner, &name)?),
                );
                aims.add(
                    format!("{size} MB {op}, {ours}: speed / plain sockets at their best"),
                    plain,
                    |r| Some(r.least(SOCKETS, &format!("{name}/"))? / r.get(runner, &name)?),
                );
            }
            let times = if bytes == MB { 3.0 } else { 2.5 };
            aims.add(
                format!("{size} MB {op} from Python: speed / Mooncake's better setting"),
                AtLeast(times),
                |r| Some(mooncake(r, &name)? / r.get(PYTHON, &name)?),
            );
            aims.add(
                format!("{size} MB {op} from Python: speed / NIXL's"),
                Told,
                |r| Some(r.get(NIXL, &name)? / r.get(PYTHON, &name)?),
            );
        }
        aims.add(
            format!("{size} MB, TCP: speed of reads / of writes"),
            AtLeast(0.9),
            |r| {
                Some(
                    r.get(TCP, &format!("write/{bytes}"))?
                        / r.get(TCP, &format!("read/{bytes}"))?,
                )
            },
        );
    }
    for (bytes, label, least) in [
        (64 * KB, "64 KB", 2.0),
        (MB, "1 MB", 1.0),
        (16 * MB, "16 MB", 1.0),
        (64 * MB, "64 MB", 1.0),
    ] {
        for op in ["read", "write"] {
            aims.add(
                format!("{label} {op}s, TCP: four in flight / one"),
                AtLeast(least),
                |r| {
                    Some(
                        r.get(TCP, &format!("stream/{op}/{bytes}/4"))?
                            / r.get(TCP, &format!("stream/{op}/{bytes}/1"))?,
                    )
                },
            );
        }
    }
    for op in ["read", "write"] {
        let name = format!("{op}/{small}");
        aims.add(
            format!(
                "4 KB {op}, shared memory: time / round trip of ucx_perftest's active messages"
            ),
            AtMost(1.3),
            |r| Some(r.get(SHM, &name)? / (2.0 * r.get(PERFTEST_SHM, &format!("am/{small}"))?)),
        );
        for bytes in BULK {
            let name = format!("{op}/{bytes}");
            aims.add(
                format!(
                    "{} MB {op}, shared memory: speed / copying through a shared 256 KB buffer",
                    bytes / MB
                ),
                AtLeast(0.8),
                |r| Some(r.get(SHARED, &format!("{name}/shared"))? / r.get(SHM, &name)?),
            );
        }
    }
    let own: [(&str, &str, Limit, f64); 13] = [
        (
            "put_chain of 3, 4 KB: time / one write of the sum",
            "chain/4096",
            AtMost(1.1),
            1.0,
        ),
        (
            "put_chain of 3, 1 MB: time / one write of the sum",
            "chain/1048576",
            AtMost(1.1),
            1.0,
        ),
        (
            "10 000 x 4 KB reads in one call: time / one read of 40 MB",
            "batch/read",
            AtMost(2.0),
            1.0,
        ),
        (
            "10 000 x 4 KB writes in one call: time / one write of 40 MB",
            "batch/write",
            AtMost(2.0),
            1.0,
        ),
        (
            "8 threads, 4 KB reads: operations a second / one thread's",
            "threads",
            AtLeast(1.5),
            1.0,
        ),
        (
            "future of a 4 KB read: time / blocking call",
            "await/read",
            AtMost(1.3),
            1.0,
        ),
        (
            "future of a 4 KB write: time / blocking call",
            "await/write",
            AtMost(1.3),
            1.0,
        ),
        (
            "idle with 10 peers, heartbeats every second: % of a core",
            "idle",
            AtMost(1.0),
            1.0,
        ),
        (
            "connect to first read, first peer, ms",
            "connect/first",
            AtMost(2.0),
            1e3,
        ),
        (
            "connect to first read, later peers, ms",
            "connect/later",
            AtMost(2.0),
            1e3,
        ),
        (
            "round robin over 16 peers: time / one peer",
            "growth/16",
            Told,
            1.0,
        ),
        (
            "round robin over 64 peers: time / one peer",
            "growth/64",
            Told,
            1.0,
        ),
        (
            "round robin over 256 peers: time / one peer",
            "growth/256",
            AtMost(1.5),
            1.0,
        ),
    ];
    for (what, name, limit, unit) in own {
        aims.add(format!("{what} (TCP)"), limit, |r| {
            Some(r.get(TCP, name)? / unit)
        });
    }
    aims.add(
        "connect to first read, first peer, ms (UCX over TCP)".to_owned(),
        AtMost(25.0),
        |r| Some(r.get(UCX, "connect/first")? / 1e3),
    );
    aims.add(
        "connect to first read, later peers, ms (UCX over TCP)".to_owned(),
        AtMost(5.0),
        |r| Some(r.get(UCX, "connect/later")? / 1e3),
    );
    aims.add(
        "import connex_rs and Engine(...) in a fresh process, ms".to_owned(),
        AtMost(100.0),
        |r| Some(r.get("python start", "start")? / 1e3),
    );
    aims.list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aims_are_met_missed_or_not_measured() {
        let line = |runner: &str, row: &str| {
            format!(
                r#"{{"round":0,"runner":"{runner}","command":"c","report":{{"results":[{row}]}}}}"#
            )
        };
        let text = [
            line(TCP, r#"{"measure":"latency","op":"read","bytes":1048576,"p50_us":200.0},{"measure":"chain","bytes":4096,"ratio":1.5}"#),
            line(PERFTEST, r#"{"measure":"one_way","op":"am","bytes":1048576,"p50_us":190.0},{"measure":"one_way","op":"put","bytes":1048576,"p50_us":290.0}"#),
        ]
        .join("\n");
        let list = all(&crate::runs::tests::runs(&text));
        let find = |what: &str| {
            list.iter()
                .find(|aim| aim.what.starts_with(what))
                .expect(what)
        };
        let met = find("1 MB read, TCP: speed / ucx_perftest");
        assert_eq!((met.met, met.reached), (Some(true), Some(0.95)));
        assert_eq!(find("put_chain of 3, 4 KB").met, Some(false));
        let missing = find("1 MB read from Python: speed / Mooncake");
        assert_eq!((missing.met, missing.reached), (None, None));
    }
}
