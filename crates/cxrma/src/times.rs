//! Durations of one kind of operation, as a histogram.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

/// The longest time that is told apart: anything longer counts as this, in nanoseconds.
const LONGEST_NS: u64 = 600_000_000_000;

/// Collects durations.
pub(crate) struct Recorder(Histogram<u64>);

impl Recorder {
    /// An empty one: 1 ns to 10 minutes, three significant digits.
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constant bounds are legal"))
    }

    /// Adds a duration.
    pub(crate) fn record(&mut self, took: Duration) {
        self.record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds a duration in nanoseconds.
    pub(crate) fn record_ns(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    /// How many were added.
    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The summary.
    pub(crate) fn times(&self) -> Times {
        let us = |ns: u64| (ns as f64 / 1e3 * 1e3).round() / 1e3;
        Times {
            count: self.0.len(),
            min_us: us(self.0.min()),
            p50_us: us(self.0.value_at_quantile(0.5)),
            p90_us: us(self.0.value_at_quantile(0.9)),
            p99_us: us(self.0.value_at_quantile(0.99)),
            p999_us: us(self.0.value_at_quantile(0.999)),
            max_us: us(self.0.max()),
            mean_us: us(self.0.mean() as u64),
        }
    }

    /// The histogram itself: upper end of each bucket in microseconds and how many fell into it, ever
    /// doubling buckets from 1 µs.
    pub(crate) fn buckets(&self) -> Vec<Bucket> {
        self.0
            .iter_log(1_000, 2.0)
            .map(|bucket| Bucket {
                up_to_us: bucket.value_iterated_to() as f64 / 1e3,
                count: bucket.count_since_last_iteration(),
            })
            .filter(|bucket| bucket.count > 0)
            .collect()
    }
}

/// One bucket of a histogram.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct Bucket {
    /// Upper end, microseconds.
    pub(crate) up_to_us: f64,
    /// How many.
    pub(crate) count: u64,
}

/// A summary of durations, in microseconds.
#[derive(Serialize, Clone, Copy, Debug)]
pub(crate) struct Times {
    /// How many.
    pub(crate) count: u64,
    /// The shortest.
    pub(crate) min_us: f64,
    /// The median.
    pub(crate) p50_us: f64,
    /// 90 in 100 were at most this long.
    pub(crate) p90_us: f64,
    /// 99 in 100 were at most this long.
    pub(crate) p99_us: f64,
    /// 999 in 1000 were at most this long.
    pub(crate) p999_us: f64,
    /// The longest.
    pub(crate) max_us: f64,
    /// The mean.
    pub(crate) mean_us: f64,
}

/// How often an operation is repeated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repeat {
    /// At most so often,
    pub(crate) iterations: u64,
    /// and not much longer than this, but at least [`Repeat::FEWEST`] times.
    pub(crate) budget: Duration,
}

impl Repeat {
    /// The fewest repetitions, whatever they take, unless fewer were asked for.
    pub(crate) const FEWEST: u64 = 5;

    /// Whether one more is due after `done`, started at `start`.
    pub(crate) fn more(&self, done: u64, start: Instant) -> bool {
        done < self.iterations && (done < Self::FEWEST || start.elapsed() < self.budget)
    }

    /// Repeats `op` and times each; a few are made before, untimed.
    ///
    /// # Errors
    /// The first error of `op`.
    pub(crate) fn time(
        &self,
        mut op: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Recorder> {
        let warm = Self {
            iterations: (self.iterations / 10).clamp(1, 200),
            budget: self.budget / 10,
        };
        let start = Instant::now();
        let mut done = 0;
        while warm.more(done, start) {
            op()?;
            done += 1;
        }
        let mut recorder = Recorder::new();
        let start = Instant::now();
        while self.more(recorder.count(), start) {
            let before = Instant::now();
            op()?;
            recorder.record(before.elapsed());
        }
        Ok(recorder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_in_microseconds() {
        let mut recorder = Recorder::new();
        for ms in 1..=100 {
            recorder.record(Duration::from_millis(ms));
        }
        let times = recorder.times();
        assert_eq!(times.count, 100);
        for (got, want) in [
            (times.min_us, 1e3),
            (times.p50_us, 50e3),
            (times.p99_us, 99e3),
            (times.max_us, 100e3),
            (times.mean_us, 50.5e3),
        ] {
            assert!((got - want).abs() < want * 0.002, "{got} {want}");
        }
        assert_eq!(recorder.buckets().iter().map(|b| b.count).sum::<u64>(), 100);
    }

    #[test]
    fn repetitions_are_bounded_by_count_and_by_time() {
        let mut n = 0;
        let few = Repeat {
            iterations: 3,
            budget: Duration::from_secs(9),
        };
        assert_eq!(
            few.time(|| {
                n += 1;
                Ok(())
            })
            .expect("no error")
            .count(),
            3
        );
        assert_eq!(n, 4, "one of them untimed");
        let short = Repeat {
            iterations: 1000,
            budget: Duration::ZERO,
        };
        assert_eq!(
            short.time(|| Ok(())).expect("no error").count(),
            Repeat::FEWEST
        );
    }
}
