//! The figures of a side-by-side run: what each runner measured in each round.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use serde_json::Value;

/// One line of what `cargo xtask bench-peers` collects.
#[derive(Deserialize)]
struct Line {
    round: usize,
    runner: String,
    command: String,
    report: Value,
}

/// All rounds.
#[derive(Default)]
pub(crate) struct Runs {
    rounds: Vec<Round>,
    /// The command of each runner.
    pub(crate) commands: BTreeMap<String, String>,
    /// The machine, as `cxrma` describes it.
    pub(crate) machine: Value,
}

/// The figures of one round, by runner and name.
#[derive(Default)]
pub(crate) struct Round(BTreeMap<(String, String), f64>);

impl Round {
    /// The figure `name` of `runner`.
    pub(crate) fn get(&self, runner: &str, name: &str) -> Option<f64> {
        self.0.get(&(runner.to_owned(), name.to_owned())).copied()
    }

    /// The smallest of the figures of `runner` whose names begin with `prefix`.
    pub(crate) fn least(&self, runner: &str, prefix: &str) -> Option<f64> {
        let all = self
            .0
            .iter()
            .filter(|((r, name), _)| r == runner && name.starts_with(prefix));
        all.map(|(_, &value)| value).min_by(f64::total_cmp)
    }
}

impl Runs {
    /// Reads what was collected.
    ///
    /// # Errors
    /// If it is not what `cargo xtask bench-peers` writes.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        Self::parse(&text)
            .with_context(|| format!("{} is not what bench-peers collects", file.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut runs = Self::default();
        for line in text.lines() {
            let line: Line = serde_json::from_str(line)?;
            let round = line.round;
            while runs.rounds.len() <= round {
                runs.rounds.push(Round::default());
            }
            for row in line.report["results"].as_array().context("no results")? {
                if let Some((name, value)) = figure(row) {
                    runs.rounds[round]
                        .0
                        .insert((line.runner.clone(), name), value);
                }
            }
            if runs.machine.is_null() && line.report["machine"].is_object() {
                runs.machine = line.report["machine"].clone();
            }
            runs.commands.insert(line.runner, line.command);
        }
        ensure!(!runs.rounds.is_empty(), "there is nothing in it");
        Ok(runs)
    }

    /// How many rounds there are.
    pub(crate) fn len(&self) -> usize {
        self.rounds.len()
    }

    /// The median over the rounds of what `compute` makes of each; `None` if no round has what it needs.
    pub(crate) fn median(&self, compute: impl Fn(&Round) -> Option<f64>) -> Option<f64> {
        let mut values: Vec<f64> = self.rounds.iter().filter_map(compute).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        match values.len() {
            0 => None,
            n if n % 2 == 1 => Some(values[middle]),
            _ => Some((values[middle - 1] + values[middle]) / 2.0),
        }
    }

    /// Every figure of every round.
    pub(crate) fn all(&self) -> BTreeMap<&str, BTreeMap<&str, Vec<f64>>> {
        let mut all: BTreeMap<&str, BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
        for round in &self.rounds {
            for ((runner, name), &value) in &round.0 {
                all.entry(runner)
                    .or_default()
                    .entry(name)
                    .or_default()
                    .push(value);
            }
        }
        all
    }
}

/// The name and the value of a row: a time in microseconds, a ratio, GB/s or per cent.
fn figure(row: &Value) -> Option<(String, f64)> {
    let text = |name: &str| row[name].as_str();
    let number = |name: &str| row[name].as_u64();
    let (name, value) = match text("measure")? {
        "latency" | "one_way" => {
            let name = format!("{}/{}", text("op")?, number("bytes")?);
            (
                text("mode").map_or_else(|| name.clone(), |mode| format!("{name}/{mode}")),
                "p50_us",
            )
        }
        "stream" => (
            format!(
                "stream/{}/{}/{}",
                text("op")?,
                number("bytes")?,
                number("depth")?
            ),
            "gb_per_s",
        ),
        "chain" => (format!("chain/{}", number("bytes")?), "ratio"),
        "batch" => (format!("batch/{}", text("op")?), "ratio"),
        "await" => (format!("await/{}", text("op")?), "ratio"),
        "threads" => ("threads".to_owned(), "ratio"),
        "connect" => (format!("connect/{}", text("peer")?), "p50_us"),
        "idle" => ("idle".to_owned(), "cpu_percent"),
        "growth" => (format!("growth/{}", number("peers")?), "ratio_to_one"),
        "start" => ("start".to_owned(), "p50_us"),
        _ => return None,
    };
    Some((name, row[value].as_f64()?))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn runs(text: &str) -> Runs {
        Runs::parse(text).expect("legal")
    }

    #[test]
    fn medians_are_of_the_ratios_of_each_round() {
        let line = |round: u32, runner: &str, us: f64| {
            format!(
                r#"{{"round":{round},"runner":"{runner}","command":"c","report":{{"results":[{{"measure":"latency","op":"read","bytes":4096,"p50_us":{us}}}]}}}}"#
            )
        };
        let text = [
            line(0, "a", 10.0),
            line(0, "b", 10.0),
            line(1, "a", 40.0),
            line(1, "b", 20.0),
            line(2, "a", 30.0),
            line(2, "b", 10.0),
        ]
        .join("\n");
        let runs = runs(&text);
        assert_eq!(runs.len(), 3);
        assert_eq!(
            runs.median(|r| Some(r.get("a", "read/4096")? / r.get("b", "read/4096")?)),
            Some(2.0)
        );
        assert_eq!(runs.median(|r| r.get("c", "read/4096")), None);
        assert_eq!(runs.all()["a"]["read/4096"], [10.0, 40.0, 30.0]);
    }

    #[test]
    fn the_best_mode_counts() {
        let text = r#"{"round":0,"runner":"s","command":"c","report":{"results":[
            {"measure":"latency","op":"read","bytes":8,"mode":"blocking","p50_us":9.5},
            {"measure":"latency","op":"read","bytes":8,"mode":"polling","p50_us":7.5},
            {"measure":"latency","op":"read","bytes":80,"mode":"polling","p50_us":1.5}]}}"#
            .replace('\n', " ");
        assert_eq!(runs(&text).median(|r| r.least("s", "read/8/")), Some(7.5));
    }
}
