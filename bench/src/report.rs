//! The report of a side-by-side run: a table on the terminal, JSON, and a page with a plot for the documents.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use serde_json::json;

use crate::aims::{self, Aim};
use crate::plot;
use crate::runs::Runs;

/// What is between these lines of docs/results.md is replaced.
const BEGIN: &str = "<!-- bench-peers: generated -->";
const END: &str = "<!-- bench-peers: end -->";

/// Writes everything.
///
/// # Errors
/// If the figures cannot be read or a file cannot be written.
pub(crate) fn run(raw: &Path, out: &Path, docs: Option<&Path>) -> anyhow::Result<()> {
    let runs = Runs::load(raw)?;
    let list = aims::all(&runs);
    let json = json!({
        "schema": "connex-bench-report/1",
        "machine": runs.machine,
        "rounds": runs.len(),
        "commands": runs.commands,
        "figures": runs.all(),
        "aims": list,
    });
    let results = out.join("results.json");
    std::fs::write(
        &results,
        format!("{}\n", serde_json::to_string_pretty(&json)?),
    )
    .with_context(|| format!("cannot write {}", results.display()))?;
    plot::draw(&runs, &out.join("results.svg"))?;
    print!("{}", table(&list));
    let measured = list.iter().filter(|aim| aim.met.is_some()).count();
    let met = list.iter().filter(|aim| aim.met == Some(true)).count();
    println!(
        "{met} of {measured} aims that were measured are met; all figures are in {}",
        results.display()
    );
    if let Some(docs) = docs {
        plot::draw(&runs, &docs.join("results.svg"))?;
        let page = docs.join("results.md");
        let old = std::fs::read_to_string(&page).unwrap_or_else(|_| "# Results\n\n".to_owned());
        std::fs::write(&page, replace(&old, &section(&runs, &list)))
            .with_context(|| format!("cannot write {}", page.display()))?;
    }
    Ok(())
}

fn reached(aim: &Aim) -> String {
    aim.reached
        .map_or_else(|| "not measured".to_owned(), |value| format!("{value:.2}"))
}

fn verdict(aim: &Aim) -> &'static str {
    match aim.met {
        Some(true) => "met",
        Some(false) => "missed",
        None => "",
    }
}

/// For the terminal.
fn table(list: &[Aim]) -> String {
    let width = list
        .iter()
        .map(|aim| aim.what.chars().count())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for aim in list {
        let _ = writeln!(
            text,
            "{:<width$}  {:>7}  {:>12}  {}",
            aim.what,
            aim.aim,
            reached(aim),
            verdict(aim)
        );
    }
    text
}

/// For the page.
fn section(runs: &Runs, list: &[Aim]) -> String {
    let machine = &runs.machine;
    let text = |name: &str| machine[name].as_str().unwrap_or("unknown").to_owned();
    let mut page = format!(
        "{BEGIN}\n\n`cargo xtask bench-peers`, {} rounds, interleaved, medians. Machine: {}, {} cpus, {} GiB, Linux {}.\n\n![times by size](results.svg)\n\n",
        runs.len(),
        text("cpu"),
        machine["cpus"],
        machine["memory_gib"],
        text("kernel"),
    );
    page.push_str("| what | aim | reached | |\n|---|---|---|---|\n");
    for aim in list {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} |",
            aim.what,
            aim.aim,
            reached(aim),
            verdict(aim)
        );
    }
    page.push_str("\nMedian times in microseconds (one way for `am` and `put` of ucx_perftest):\n\n| runner | what | median | of rounds |\n|---|---|---|---|\n");
    for (runner, figures) in runs.all() {
        for (name, values) in figures {
            let timed = ["read/", "write/", "am/", "put/", "get/"]
                .iter()
                .any(|start| name.starts_with(start));
            if timed && let Some(median) = runs.median(|round| round.get(runner, name)) {
                let rounds: Vec<String> =
                    values.iter().map(|value| format!("{value:.1}")).collect();
                let _ = writeln!(
                    page,
                    "| {runner} | {name} | {median:.1} | {} |",
                    rounds.join(", ")
                );
            }
        }
    }
    page.push_str("\nCommands:\n\n```\n");
    for (runner, command) in &runs.commands {
        let _ = writeln!(page, "{runner}: {command}");
    }
    let _ = write!(page, "```\n\n{END}");
    page
}

/// Puts the section in the place of the old one, or at the end.
fn replace(page: &str, section: &str) -> String {
    match (page.find(BEGIN), page.find(END)) {
        (Some(begin), Some(end)) if begin < end => {
            format!("{}{section}{}", &page[..begin], &page[end + END.len()..])
        }
        _ => format!("{}\n\n{section}\n", page.trim_end()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_alone_is_replaced() {
        let first = replace("# Results\n\nBy hand.\n", &format!("{BEGIN}one{END}"));
        assert_eq!(first, format!("# Results\n\nBy hand.\n\n{BEGIN}one{END}\n"));
        let again = replace(
            &format!("{first}\nMore by hand.\n"),
            &format!("{BEGIN}two{END}"),
        );
        assert_eq!(
            again,
            format!("# Results\n\nBy hand.\n\n{BEGIN}two{END}\n\nMore by hand.\n")
        );
    }
}
