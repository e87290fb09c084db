//! What the faults showed, as JSON and as tables.

use std::fmt::Write as _;

use serde::Serialize;

use crate::machine::Machine;
use crate::report::{Table, size, time};
use crate::times::{Bucket, Times};

/// The schema of [`Report`].
pub(super) const SCHEMA: &str = "cxrma-faults/1";

/// All that a run has to say.
#[derive(Serialize, Debug)]
pub(super) struct Report {
    /// [`SCHEMA`].
    pub(super) schema: &'static str,
    /// Version of the program.
    pub(super) version: &'static str,
    /// The command that was run.
    pub(super) command: String,
    /// Where.
    pub(super) machine: Machine,
    /// The transport of the survivors.
    pub(super) transport: String,
    /// The figures.
    pub(super) results: Vec<Row>,
    /// What went wrong; empty if all is well.
    pub(super) problems: Vec<String>,
    /// What could not be measured here, and why.
    pub(super) left_out: Vec<String>,
}

/// One figure. Times are in microseconds.
#[derive(Serialize, Debug)]
#[serde(tag = "measure", rename_all = "snake_case")]
pub(super) enum Row {
    /// SIGKILL to the time stamp of the event (`told`), and to its arrival at the application (`seen`, one survivor only).
    Kill {
        peers: u32,
        survivors: u32,
        ballast: usize,
        told: Times,
        seen: Option<Times>,
        histogram: Vec<Bucket>,
    },
    /// From the start of the process (`process`) and from the start of its engine (`engine`) to the first
    /// read by a survivor that keeps trying.
    Restart {
        peers: u32,
        ballast: usize,
        process: Times,
        engine: Times,
    },
    /// SIGSTOP to the time stamp of the suspicion; at most `limit_us` are promised.
    Stop {
        heartbeat_ms: u64,
        limit_us: f64,
        told: Times,
        histogram: Vec<Bucket>,
    },
    /// SIGSTOP to the time stamp of the suspicion that the stopped process's own sentinel raises.
    StopSentinel {
        stall_ms: u64,
        limit_us: f64,
        told: Times,
        histogram: Vec<Bucket>,
    },
    /// The survivor's end of a network link goes down, to the time stamp of the suspicion; at most `limit_us` are promised.
    LinkDown {
        heartbeat_ms: u64,
        limit_us: f64,
        told: Times,
        histogram: Vec<Bucket>,
    },
    /// First use of a URL to the end of a 4 KB read; `peer` is `first` (of a fresh engine) or `later`.
    Connect {
        peer: &'static str,
        #[serde(flatten)]
        times: Times,
    },
    /// 4 KB reads, back to back, between healthy peers: while others are killed and restarted, and without.
    Stall {
        churns: u64,
        faults: Times,
        quiet: Times,
        histogram: Vec<Bucket>,
    },
    /// What the survivor holds after some kill and rejoin cycles and after all of them.
    Cycles {
        cycles: u64,
        start: Holdings,
        end: Holdings,
        flat: bool,
    },
    /// Processor time of heartbeats.
    Heartbeats {
        peers: u32,
        interval_ms: u64,
        seconds: f64,
        cpu_percent: f64,
        lost: u64,
    },
    /// Suspicions and deaths reported while all processors were busy and nobody died.
    Load {
        seconds: f64,
        peers: u32,
        heartbeat_ms: u64,
        timeout_ms: u64,
        false_alarms: u64,
    },
}

impl Row {
    /// What was done, for the rows that have a histogram of it.
    fn title(&self) -> String {
        match self {
            Self::Kill {
                peers,
                survivors,
                ballast,
                ..
            } => format!(
                "kill to event, {}, survivors {survivors}, peers {peers}",
                size(*ballast)
            ),
            Self::Stop { heartbeat_ms, .. } => {
                format!("stop to suspicion, heartbeats {heartbeat_ms} ms")
            }
            Self::StopSentinel { stall_ms, .. } => {
                format!("stop to suspicion, sentinel, stall_ms {stall_ms}")
            }
            Self::LinkDown { heartbeat_ms, .. } => {
                format!("link down to suspicion, heartbeats {heartbeat_ms} ms")
            }
            _ => String::new(),
        }
    }
}

/// What an engine and its process hold.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Holdings {
    /// Open files.
    pub(super) descriptors: usize,
    /// Threads.
    pub(super) threads: usize,
    /// Resident memory, bytes.
    pub(super) resident: u64,
    /// Regions.
    pub(super) regions: u64,
    /// Connections that are not closed.
    pub(super) connections: u64,
    /// Keys of peers' regions.
    pub(super) remote_rkeys: u64,
}

impl Holdings {
    /// Growth of memory that counts as none: allocators keep some, and pages come in steps.
    const SLACK: u64 = 4 << 20;

    /// Whether nothing has grown since `start`.
    pub(super) fn flat_since(&self, start: &Self) -> bool {
        self.descriptors <= start.descriptors
            && self.threads <= start.threads
            && self.regions <= start.regions
            && self.connections <= start.connections
            && self.remote_rkeys <= start.remote_rkeys
            && self.resident <= start.resident + Self::SLACK
    }
}

impl Report {
    /// The tables.
    pub(super) fn text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "cxrma {} faults on {} ({} cpus, {} GiB, Linux {}), transport {}\n",
            self.version,
            machine.cpu,
            machine.cpus,
            machine.memory_gib,
            machine.kernel,
            self.transport
        );
        if machine.debug_build {
            text.push_str("a debug build: the figures mean little\n");
        }
        text.push('\n');
        let head = ["", "p50", "p99", "longest", "count"];
        let mut times = Table::new("Times", &head);
        let mut other = Table::new("Other", &["", "value"]);
        let mut held = Table::new(
            "Held by the survivor",
            &[
                "",
                "descriptors",
                "threads",
                "resident KB",
                "regions",
                "connections",
                "keys",
            ],
        );
        let cells = |name: String, t: &Times| {
            [
                name,
                time(t.p50_us),
                time(t.p99_us),
                time(t.max_us),
                t.count.to_string(),
            ]
        };
        for row in &self.results {
            match row {
                Row::Kill { told, seen, .. } => {
                    let title = row.title();
                    times.row(&cells(title.clone(), told));
                    if let Some(seen) = seen {
                        times.row(&cells(title.replace("to event", "to application"), seen));
                    }
                }
                Row::Restart { peers, ballast, process, engine } => {
                    times.row(&cells(format!("process start to read, {}, peers {peers}", size(*ballast)), process));
                    times.row(&cells(format!("engine start to read, {}, peers {peers}", size(*ballast)), engine));
                }
                Row::Stop { limit_us, told, .. } | Row::StopSentinel { limit_us, told, .. } | Row::LinkDown { limit_us, told, .. } => {
                    times.row(&cells(format!("{} (limit {})", row.title(), time(*limit_us)), told));
                }
                Row::Connect { peer, times: t } => times.row(&cells(format!("connect to read, {peer} peer"), t)),
                Row::Stall { churns, faults, quiet, .. } => {
                    times.row(&cells(format!("4 KB read during {churns} kills and restarts"), faults));
                    times.row(&cells("4 KB read without faults".to_owned(), quiet));
                }
                Row::Cycles { cycles, start, end, flat } => {
                    for (name, h) in [("early".to_owned(), start), (format!("after {cycles} cycles"), end)] {
                        held.row(&[
                            name,
                            h.descriptors.to_string(),
                            h.threads.to_string(),
                            (h.resident >> 10).to_string(),
                            h.regions.to_string(),
                            h.connections.to_string(),
                            h.remote_rkeys.to_string(),
                        ]);
                    }
                    other.row(&[format!("{cycles} kill and rejoin cycles"), if *flat { "flat" } else { "GROWN" }.to_owned()]);
                }
                Row::Heartbeats { peers, interval_ms, seconds, cpu_percent, lost } => other.row(&[
                    format!("heartbeats to {peers} peers every {interval_ms} ms, {seconds:.0} s"),
                    format!("{cpu_percent:.2} % of a core, {lost} lost"),
                ]),
                Row::Load { seconds, peers, heartbeat_ms, timeout_ms, false_alarms } => other.row(&[
                    format!("busy processors, {peers} peers, heartbeats {heartbeat_ms}/{timeout_ms} ms, {seconds:.0} s"),
                    format!("{false_alarms} false alarms"),
                ]),
            }
        }
        for table in [times, held, other] {
            text.push_str(&table.text());
        }
        for row in &self.results {
            if let Row::Kill { histogram, .. }
            | Row::Stop { histogram, .. }
            | Row::StopSentinel { histogram, .. }
            | Row::LinkDown { histogram, .. } = row
            {
                text.push_str(&bars(&row.title(), histogram));
            }
        }
        for left_out in &self.left_out {
            let _ = writeln!(text, "{left_out}");
        }
        for problem in &self.problems {
            let _ = writeln!(text, "WRONG: {problem}");
        }
        text
    }
}

/// A histogram in letters.
fn bars(title: &str, histogram: &[Bucket]) -> String {
    const WIDTH: u64 = 40;
    let most = histogram
        .iter()
        .map(|bucket| bucket.count)
        .max()
        .unwrap_or(1)
        .max(1);
    let mut text = format!("{title}\n");
    for bucket in histogram {
        let length = (bucket.count * WIDTH).div_ceil(most) as usize;
        let _ = writeln!(
            text,
            "  up to {:>9}  {:<40}  {}",
            time(bucket.up_to_us),
            "#".repeat(length),
            bucket.count
        );
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_of_anything_is_seen() {
        let start = Holdings {
            descriptors: 10,
            threads: 3,
            resident: 10 << 20,
            regions: 1,
            connections: 2,
            remote_rkeys: 0,
        };
        assert!(start.flat_since(&start));
        assert!(
            Holdings {
                resident: 11 << 20,
                connections: 1,
                ..start
            }
            .flat_since(&start)
        );
        for grown in [
            Holdings {
                descriptors: 11,
                ..start
            },
            Holdings {
                threads: 4,
                ..start
            },
            Holdings {
                resident: 20 << 20,
                ..start
            },
            Holdings {
                regions: 2,
                ..start
            },
            Holdings {
                connections: 3,
                ..start
            },
            Holdings {
                remote_rkeys: 1,
                ..start
            },
        ] {
            assert!(!grown.flat_since(&start), "{grown:?}");
        }
    }

    #[test]
    fn bars_are_in_proportion() {
        let text = bars(
            "T",
            &[
                Bucket {
                    up_to_us: 1.0,
                    count: 1,
                },
                Bucket {
                    up_to_us: 2.0,
                    count: 80,
                },
            ],
        );
        assert!(
            text.contains(&format!("{:<40}  80", "#".repeat(40)))
                && text.contains(&format!("{:<40}  1", "#")),
            "{text}"
        );
    }
}
