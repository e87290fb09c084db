//! Results: JSON for programs, tables for people.

use std::fmt::Write as _;

use serde::Serialize;

use crate::machine::Machine;
use crate::times::Times;
use crate::verify::Seen;

/// All that a run has to say. `schema` changes whenever a field changes its meaning or goes.
#[derive(Serialize, Debug)]
pub(crate) struct Report {
    /// `cxrma/1`.
    pub(crate) schema: &'static str,
    /// Version of the program.
    pub(crate) version: &'static str,
    /// The command that was run.
    pub(crate) command: String,
    /// Where.
    pub(crate) machine: Machine,
    /// The transport that the reader's engine listens on.
    pub(crate) transport: String,
    /// What carries the data to the owner, and how: for example `tcp`, `requested`.
    pub(crate) path: String,
    /// What the engine warns of.
    pub(crate) warnings: Vec<String>,
    /// The figures.
    pub(crate) results: Vec<Row>,
    /// What went wrong: bytes that differed, chains out of order. Empty if all is well.
    pub(crate) problems: Vec<String>,
}

/// The schema of [`Report`].
pub(crate) const SCHEMA: &str = "cxrma/1";

/// One figure, or the few that belong together. Times are in microseconds, sizes in bytes, bandwidths in 10^9 bytes a second.
#[derive(Serialize, Debug)]
#[serde(tag = "measure", rename_all = "snake_case")]
pub(crate) enum Row {
    /// A blocking read or write.
    Latency {
        op: Op,
        bytes: usize,
        #[serde(flatten)]
        times: Times,
    },
    /// A stream of reads or writes.
    Stream {
        op: Op,
        bytes: usize,
        depth: usize,
        count: u64,
        seconds: f64,
        gb_per_s: f64,
    },
    /// `put_chain` of payload, header and flag to its end, and one write of the sum, alternating.
    Chain {
        bytes: usize,
        chain: Times,
        one_write: Times,
        ratio: f64,
    },
    /// `put_signal` to its end, and to the peer's answer.
    Signal {
        bytes: usize,
        done: Times,
        answered: Times,
    },
    /// First use of a URL to the end of a 4 KB read; `peer` is `first` (of a fresh engine) or `later`.
    Connect {
        peer: &'static str,
        #[serde(flatten)]
        times: Times,
    },
    /// Steps on a channel, with a ring of `in_flight` slots: a stream of them until all are released; `sent`, a blocking send
    /// until the step is in place (one in flight only); `answered`, a send until the peer says that it has released the step.
    Channel {
        bytes: usize,
        in_flight: usize,
        count: u64,
        seconds: f64,
        gb_per_s: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        sent: Option<Times>,
        answered: Times,
    },
    /// First use of a URL to the end of a put_chain of 4 KB (`chain`), or the opening of a channel until its first step of
    /// 4 KB is in place (`step`). `peer` is as for `Connect`, or `linked`: the link was there.
    Open {
        what: &'static str,
        peer: &'static str,
        #[serde(flatten)]
        times: Times,
    },
    /// An engine that does nothing but keep its peers.
    Idle {
        peers: u32,
        heartbeat_ms: u64,
        seconds: f64,
        cpu_percent: f64,
        wakeups: u64,
    },
    /// Many small ranges in one call against one transfer of the sum.
    Batch {
        op: Op,
        ranges: usize,
        bytes: usize,
        batch: Times,
        one_transfer: Times,
        ratio: f64,
    },
    /// Blocking 4 KB reads from several threads on one engine, against one thread.
    Threads {
        threads: usize,
        bytes: usize,
        ops_per_s: f64,
        one_thread_ops_per_s: f64,
        ratio: f64,
    },
    /// A future against the blocking call.
    Await {
        op: Op,
        bytes: usize,
        awaited: Times,
        blocking: Times,
        ratio: f64,
    },
    /// Round robin 4 KB reads over many peers. Memory is what the reader's process grew by for each.
    Growth {
        peers: usize,
        #[serde(flatten)]
        times: Times,
        ratio_to_one: f64,
        bytes_per_peer: i64,
    },
    /// What a consumer saw of chains.
    VerifyChain {
        seconds: f64,
        sent: u64,
        #[serde(flatten)]
        seen: Seen,
    },
}

/// Direction of a transfer, from the reader's side.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    /// From the owner.
    Read,
    /// To the owner.
    Write,
}

impl Op {
    /// Both.
    pub(crate) const BOTH: [Self; 2] = [Self::Read, Self::Write];

    /// As in texts.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// `4 KB`, `16 MB`, or bytes.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 30 && b.is_multiple_of(1 << 30) => format!("{} GB", b >> 30),
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KB", b >> 10),
        b => format!("{b} B"),
    }
}

/// A time with a unit that suits it.
pub(crate) fn time(us: f64) -> String {
    match us {
        us if us < 100.0 => format!("{us:.1} us"),
        us if us < 10_000.0 => format!("{us:.0} us"),
        us if us < 1e6 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

/// Lines of aligned columns; the first one of each is left-aligned, the others right.
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// One with a title and a head.
    pub(crate) fn new(title: &str, head: &[&str]) -> Self {
        Self {
            title: title.to_owned(),
            rows: vec![head.iter().map(|&h| h.to_owned()).collect()],
        }
    }

    /// Adds a row of as many cells as the head has.
    pub(crate) fn row(&mut self, cells: &[String]) {
        debug_assert_eq!(cells.len(), self.rows[0].len(), "{}", self.title);
        self.rows.push(cells.to_vec());
    }

    /// The text, or nothing if there is no row but the head.
    pub(crate) fn text(&self) -> String {
        if self.rows.len() < 2 {
            return String::new();
        }
        let columns = self.rows[0].len();
        let widths: Vec<usize> = (0..columns)
            .map(|c| {
                self.rows
                    .iter()
                    .map(|r| r[c].chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut text = format!("{}\n", self.title);
        for row in &self.rows {
            for (c, cell) in row.iter().enumerate() {
                let _ = if c == 0 {
                    write!(text, "  {cell:<w$}", w = widths[c])
                } else {
                    write!(text, "  {cell:>w$}", w = widths[c])
                };
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text.push('\n');
        text
    }
}

impl Report {
    /// The tables.
    pub(crate) fn text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "cxrma {} on {} ({} cpus, {} GiB, Linux {}), transport {}, path {}\n",
            self.version,
            machine.cpu,
            machine.cpus,
            machine.memory_gib,
            machine.kernel,
            self.transport,
            self.path
        );
        if machine.debug_build {
            text.push_str("a debug build: the figures mean little\n");
        }
        for warning in &self.warnings {
            let _ = writeln!(text, "note: {warning}");
        }
        text.push('\n');
        let mut latency = Table::new(
            "Blocking transfers",
            &["", "p50", "p99", "longest", "count"],
        );
        let mut stream = Table::new("Streams", &["", "in flight", "GB/s", "count"]);
        let mut pairs = Table::new(
            "Against one plain transfer of the same bytes",
            &["", "p50", "p99", "plain p50", "ratio"],
        );
        let mut signal = Table::new(
            "put_signal",
            &["", "done p50", "p99", "answered p50", "p99"],
        );
        let mut channel = Table::new(
            "Step channels",
            &["", "in flight", "GB/s", "sent p50", "answered p50", "p99"],
        );
        let mut connect = Table::new(
            "First use of a peer, 4 KB",
            &["", "p50", "p99", "longest", "count"],
        );
        let mut growth = Table::new(
            "Round robin 4 KB reads",
            &["peers", "p50", "p99", "to one", "KB per peer"],
        );
        let mut other = Table::new("Other", &["", "value"]);
        for row in &self.results {
            match row {
                Row::Latency { op, bytes, times } => latency.row(&[
                    format!("{} {}", op.name(), size(*bytes)),
                    time(times.p50_us),
                    time(times.p99_us),
                    time(times.max_us),
                    times.count.to_string(),
                ]),
                Row::Stream {
                    op,
                    bytes,
                    depth,
                    count,
                    gb_per_s,
                    ..
                } => stream.row(&[
                    format!("{} {}", op.name(), size(*bytes)),
                    depth.to_string(),
                    format!("{gb_per_s:.3}"),
                    count.to_string(),
                ]),
                Row::Chain {
                    bytes,
                    chain,
                    one_write,
                    ratio,
                } => pairs.row(&[
                    format!("chain of 3, {}", size(*bytes)),
                    time(chain.p50_us),
                    time(chain.p99_us),
                    time(one_write.p50_us),
                    format!("{ratio:.2}"),
                ]),
                Row::Batch {
                    op,
                    ranges,
                    bytes,
                    batch,
                    one_transfer,
                    ratio,
                } => pairs.row(&[
                    format!("{ranges} x {} {}", size(*bytes), op.name()),
                    time(batch.p50_us),
                    time(batch.p99_us),
                    time(one_transfer.p50_us),
                    format!("{ratio:.2}"),
                ]),
                Row::Await {
                    op,
                    bytes,
                    awaited,
                    blocking,
                    ratio,
                } => pairs.row(&[
                    format!("await {} {}", op.name(), size(*bytes)),
                    time(awaited.p50_us),
                    time(awaited.p99_us),
                    time(blocking.p50_us),
                    format!("{ratio:.2}"),
                ]),
                Row::Signal {
                    bytes,
                    done,
                    answered,
                } => signal.row(&[
                    size(*bytes),
                    time(done.p50_us),
                    time(done.p99_us),
                    time(answered.p50_us),
                    time(answered.p99_us),
                ]),
                Row::Channel {
                    bytes,
                    in_flight,
                    gb_per_s,
                    sent,
                    answered,
                    ..
                } => channel.row(&[
                    format!("step of {}", size(*bytes)),
                    in_flight.to_string(),
                    format!("{gb_per_s:.3}"),
                    sent.map_or_else(|| "-".to_owned(), |sent| time(sent.p50_us)),
                    time(answered.p50_us),
                    time(answered.p99_us),
                ]),
                Row::Open { what, peer, times } => connect.row(&[
                    match *what {
                        "chain" => format!("connect to first chain, {peer} peer"),
                        _ => format!("open channel to first step, {peer} peer"),
                    },
                    time(times.p50_us),
                    time(times.p99_us),
                    time(times.max_us),
                    times.count.to_string(),
                ]),
                Row::Connect { peer, times } => connect.row(&[
                    format!("connect to first read, {peer} peer"),
                    time(times.p50_us),
                    time(times.p99_us),
                    time(times.max_us),
                    times.count.to_string(),
                ]),
                Row::Growth {
                    peers,
                    times,
                    ratio_to_one,
                    bytes_per_peer,
                } => growth.row(&[
                    peers.to_string(),
                    time(times.p50_us),
                    time(times.p99_us),
                    format!("{ratio_to_one:.2}"),
                    format!("{:.1}", *bytes_per_peer as f64 / 1024.0),
                ]),
                Row::Idle {
                    peers,
                    heartbeat_ms,
                    seconds,
                    cpu_percent,
                    wakeups,
                } => other.row(&[
                    format!(
                        "idle, {peers} peers, heartbeats every {heartbeat_ms} ms, {seconds:.0} s"
                    ),
                    format!("{cpu_percent:.3} % of a core, {wakeups} wakeups"),
                ]),
                Row::Threads {
                    threads,
                    bytes,
                    ops_per_s,
                    ratio,
                    ..
                } => other.row(&[
                    format!("{threads} threads, {} reads", size(*bytes)),
                    format!("{ops_per_s:.0} a second, {ratio:.2} x one thread"),
                ]),
                Row::VerifyChain {
                    seconds,
                    sent,
                    seen,
                } => other.row(&[
                    format!("chains in {seconds:.1} s"),
                    format!(
                        "{sent} sent, {} seen, {} MB compared, {} out of order, {} missing",
                        seen.chains,
                        seen.bytes >> 20,
                        seen.violations,
                        seen.missing
                    ),
                ]),
            }
        }
        for table in [
            latency, stream, pairs, signal, channel, connect, growth, other,
        ] {
            text.push_str(&table.text());
        }
        if self.problems.is_empty() {
            text.push_str("all bytes that were checked arrived as they were sent\n");
        } else {
            for problem in &self.problems {
                let _ = writeln!(text, "WRONG: {problem}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!(
            [size(4096), size(16 << 20), size(4097), size(1 << 30)],
            ["4 KB", "16 MB", "4097 B", "1 GB"]
        );
        assert_eq!(
            [time(12.34), time(1234.0), time(12_345.0), time(2e6)],
            ["12.3 us", "1234 us", "12.3 ms", "2.00 s"]
        );
    }

    #[test]
    fn an_empty_table_is_not_printed() {
        let mut table = Table::new("T", &["a", "b"]);
        assert_eq!(table.text(), "");
        table.row(&["x".into(), "10".into()]);
        assert_eq!(table.text(), "T\n  a   b\n  x  10\n\n");
    }
}
