//! A list of steps: what runs, what it needs, how it ended.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;

use crate::place::Place;

/// What a step belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Group {
    /// Formatting, clippy, documentation, licences, ruff
    Lint,
    /// Unit, integration and doc tests, examples
    Rust,
    /// The wheel, its stubs, and pytest with every UCX
    Python,
    /// The fault lab in network namespaces (root)
    Faults,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Group::Lint => "lint",
            Group::Rust => "rust",
            Group::Python => "python",
            Group::Faults => "faults",
        })
    }
}

/// What a step does.
type Action = Box<dyn Fn(&Place) -> Result<()>>;

/// One step.
pub(crate) struct Step {
    pub(crate) group: Group,
    pub(crate) name: String,
    /// The file or folder, from the root, without which there is nothing to run.
    pub(crate) needs: Option<&'static str>,
    pub(crate) action: Action,
}

/// How a step ended.
enum End {
    Passed,
    Failed(String),
    /// What it needs is not written yet, and the table of such things says so.
    Pending,
}

/// Runs the steps in order, all of them whatever fails, and prints a table. `pending` names what is not written yet:
/// anything else that is missing is a failure.
///
/// Returns whether all passed.
pub(crate) fn run(place: &Place, steps: &[Step], pending: &[&str]) -> bool {
    let mut ends: Vec<(&Step, End, Duration)> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        println!(
            "\n==> [{}/{}] {}: {}",
            index + 1,
            steps.len(),
            step.group,
            step.name
        );
        let start = Instant::now();
        let end = one(place, step, pending);
        match &end {
            End::Passed => {}
            End::Failed(why) => println!("FAILED: {why}"),
            End::Pending => println!("not written yet: {}", step.needs.unwrap_or_default()),
        }
        ends.push((step, end, start.elapsed()));
    }
    summary(&ends);
    ends.iter()
        .all(|(_, end, _)| !matches!(end, End::Failed(_)))
}

fn one(place: &Place, step: &Step, pending: &[&str]) -> End {
    if let Some(needs) = step.needs {
        match (place.root.join(needs).exists(), pending.contains(&needs)) {
            (true, false) => {}
            (true, true) => println!("{needs} is there now: take it off the list PENDING"),
            (false, true) => return End::Pending,
            (false, false) => return End::Failed(format!("{needs} is missing")),
        }
    }
    match (step.action)(place) {
        Ok(()) => End::Passed,
        Err(error) => End::Failed(format!("{error:#}")),
    }
}

fn summary(ends: &[(&Step, End, Duration)]) {
    let width = ends
        .iter()
        .map(|(step, ..)| step.name.chars().count())
        .max()
        .unwrap_or_default();
    println!("\n{:8} {:width$} {:>8}  result", "group", "step", "time");
    for (step, end, time) in ends {
        let result = match end {
            End::Passed => "ok".to_owned(),
            End::Failed(why) => format!("FAILED: {}", why.lines().next().unwrap_or_default()),
            End::Pending => format!("not written yet ({})", step.needs.unwrap_or_default()),
        };
        let group = step.group.to_string();
        println!(
            "{group:8} {:width$} {:>6.1} s  {result}",
            step.name,
            time.as_secs_f64()
        );
    }
    let total: Duration = ends.iter().map(|(_, _, time)| *time).sum();
    println!("{:8} {:width$} {:>6.1} s", "", "all", total.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn step(needs: Option<&'static str>, action: fn(&Place) -> Result<()>) -> Step {
        Step {
            group: Group::Lint,
            name: "one".into(),
            needs,
            action: Box::new(action),
        }
    }

    #[test]
    fn a_missing_thing_is_forgiven_only_while_it_is_listed() {
        let place = Place::find().expect("a workspace");
        let fine = |_: &Place| Ok(());
        assert!(run(&place, &[step(None, fine)], &[]));
        assert!(run(&place, &[step(Some("xtask"), fine)], &[]));
        assert!(run(&place, &[step(Some("no/such"), fine)], &["no/such"]));
        assert!(!run(&place, &[step(Some("no/such"), fine)], &[]));
        assert!(!run(
            &place,
            &[step(None, |_| bail!("no")), step(None, fine)],
            &[]
        ));
    }
}
