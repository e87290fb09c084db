//! Repeating and timing, as `cxrma` does it.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

/// One figure, in the form of `cxrma`'s JSON.
#[derive(Serialize, Debug)]
pub(crate) struct Row {
    /// Always `latency`.
    pub(crate) measure: &'static str,
    /// `read` or `write`.
    pub(crate) op: &'static str,
    /// Bytes moved.
    pub(crate) bytes: usize,
    /// How, for example `polling, staged`.
    pub(crate) mode: String,
    /// How many.
    pub(crate) count: u64,
    /// Median, microseconds.
    pub(crate) p50_us: f64,
    /// 99 in 100 were at most this long.
    pub(crate) p99_us: f64,
}

/// Prints rows as a report.
pub(crate) fn print(rows: &[Row]) -> anyhow::Result<()> {
    println!(
        "{}",
        serde_json::json!({ "schema": "connex-bench/1", "results": rows })
    );
    Ok(())
}

/// How often an operation is repeated.
#[derive(Clone, Copy)]
pub(crate) struct Repeat {
    /// At most so often,
    pub(crate) iterations: u64,
    /// and not much longer than this, but at least five times.
    pub(crate) budget: Duration,
}

impl Repeat {
    /// Repeats and times `op`, after a few untimed rounds.
    pub(crate) fn row(
        &self,
        op: &'static str,
        bytes: usize,
        mode: &str,
        mut run: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Row> {
        let mut histogram = Histogram::<u64>::new_with_bounds(1, 600_000_000_000, 3)?;
        let warm = Instant::now();
        for _ in 0..(self.iterations / 10).clamp(1, 200) {
            run()?;
            if warm.elapsed() > self.budget / 10 {
                break;
            }
        }
        let start = Instant::now();
        while histogram.len() < self.iterations
            && (histogram.len() < 5 || start.elapsed() < self.budget)
        {
            let before = Instant::now();
            run()?;
            histogram.saturating_record(u64::try_from(before.elapsed().as_nanos())?.max(1));
        }
        Ok(Row {
            measure: "latency",
            op,
            bytes,
            mode: mode.to_owned(),
            count: histogram.len(),
            p50_us: histogram.value_at_quantile(0.5) as f64 / 1e3,
            p99_us: histogram.value_at_quantile(0.99) as f64 / 1e3,
        })
    }
}
