//! Instructions per operation, counted by callgrind: a yardstick that does not depend on how busy the machine is.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::place::Place;
use crate::process::{cargo, command, output, run, which};

/// The package that does the operations, both engines in one process.
const PACKAGE: &str = "connex-instructions";
/// Its operations, and what the table calls them.
const OPERATIONS: [(&str, &str); 4] = [
    ("read-4k", "read of 4 KB"),
    ("write-4k", "write of 4 KB"),
    ("message-64", "message of 64 bytes"),
    ("chain-3", "put_chain of 256, 64 and 8 bytes"),
];
/// How the names of the functions begin that each side's work is in.
const SIDES: [&str; 2] = ["asking_", "answering_"];
/// Operations in the shorter of two runs. The longer has twice as many, so that what both do at their start does not count.
const COUNT: u64 = 1000;
/// The counts of earlier commits.
const HISTORY: &str = "bench/instructions.csv";
const COLUMNS: &str = "date,commit,rustc,libc,operation,asking,answering,total";
/// Between two runs of one program on one machine there is less than this.
const NOISE_PERCENT: f64 = 0.1;

/// What is done with the counts.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Appends the counts to bench/instructions.csv
    #[arg(long)]
    record: bool,
    /// Runs only the operations whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Also lists the functions that cost most by themselves, so many
    #[arg(long, default_value_t = 0)]
    profile: usize,
}

/// Instructions of one operation, on each side.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Count([f64; 2]);

impl Count {
    fn total(self) -> f64 {
        self.0.iter().sum()
    }
}

/// Counts, prints a table and compares with the last counts of the history.
///
/// # Errors
/// If valgrind is missing, the program cannot be built, or an operation fails.
pub(crate) fn count(place: &Place, args: &Args) -> Result<()> {
    ensure!(
        which("valgrind").is_some(),
        "valgrind is not installed; as root: apt-get install -y valgrind"
    );
    let operations: Vec<_> = OPERATIONS
        .iter()
        .filter(|(name, _)| args.only.as_ref().is_none_or(|only| name.contains(only)))
        .collect();
    ensure!(
        !operations.is_empty(),
        "no operation's name contains {:?}",
        args.only
    );
    let out = place.target.join("instructions");
    run(cargo(place)
        .args(["build", "--locked", "--release", "-p", PACKAGE])
        // Under valgrind the system's own list of what it gives a process names a page that is not there.
        .args(["--features", "rustix/use-libc-auxv"])
        // Not to be mixed with what others build.
        .env("CARGO_TARGET_DIR", &out)
        .env("RUSTFLAGS", "--cfg by_hand"))?;
    let program = out.join("release").join(PACKAGE);
    let path = place.root.join(HISTORY);
    let history = fs::read_to_string(&path).unwrap_or_default();
    let before = last(&history)?;

    let mut table = String::new();
    let mut entry = String::new();
    let head = head(place)?;
    for (name, title) in operations {
        let short = profile(place, &program, name, COUNT)?;
        let long = profile(place, &program, name, 2 * COUNT)?;
        let count = Count(SIDES.map(|side| {
            let (short, long) = (inclusive(&short, side), inclusive(&long, side));
            long.saturating_sub(short) as f64 / COUNT as f64
        }));
        ensure!(
            count.0.iter().all(|&side| side > 0.0),
            "callgrind saw nothing of {name}: {count:?}"
        );
        let [asking, answering] = count.0;
        let total = count.total();
        let change = before.get(*name).map_or_else(String::new, |before| {
            let percent = (total / before.total() - 1.0) * 100.0;
            if percent.abs() < NOISE_PERCENT {
                "same".into()
            } else {
                format!("{percent:+.1} %")
            }
        });
        writeln!(
            table,
            "{title:34} {asking:9.0} {answering:9.0} {total:9.0}  {change}"
        )?;
        writeln!(entry, "{head},{name},{asking:.1},{answering:.1},{total:.1}")?;
        if args.profile > 0 {
            writeln!(table, "{}", costliest(&short, &long, args.profile))?;
        }
    }
    println!(
        "{:34} {:>9} {:>9} {:>9}  against the last entry",
        "instructions of one", "asking", "answering", "total"
    );
    print!("{table}");
    if args.record {
        ensure!(
            history.lines().any(|line| line == COLUMNS),
            "{HISTORY} does not have the columns {COLUMNS}"
        );
        fs::write(&path, history + &entry)
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("appended to {HISTORY}");
    }
    Ok(())
}

/// Runs the program under callgrind; returns what that wrote.
fn profile(place: &Place, program: &Path, operation: &str, count: u64) -> Result<String> {
    let file: PathBuf = program.with_file_name(format!("callgrind.{operation}.{count}"));
    run(command(place, "valgrind")
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(program)
        .args([operation, &count.to_string()]))?;
    fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
}

/// What the entries of this run begin with.
fn head(place: &Place) -> Result<String> {
    let word = |text: String, at: usize| {
        let word = text.split_whitespace().nth(at).map(str::to_owned);
        word.with_context(|| format!("no word {at} in {text:?}"))
    };
    let date = word(output(command(place, "date").args(["-u", "+%F"]))?, 0)?;
    let git = |args: &[&str]| output(command(place, "git").args(args));
    let mut commit = word(git(&["rev-parse", "--short=10", "HEAD"])?, 0)?;
    let exclude = format!(":!{HISTORY}");
    if !git(&["status", "--porcelain", "-uno", "--", ".", &exclude])?.is_empty() {
        commit.push('+');
    }
    let rustc = word(output(command(place, "rustc").arg("--version"))?, 1)?;
    let libc = output(command(place, "getconf").arg("GNU_LIBC_VERSION"))?;
    Ok(format!("{date},{commit},{rustc},{}", word(libc, 1)?))
}

/// The last counts of each operation.
fn last(history: &str) -> Result<HashMap<&str, Count>> {
    let mut counts = HashMap::new();
    for line in history.lines() {
        if line.is_empty() || line.starts_with('#') || line == COLUMNS {
            continue;
        }
        let fields: Vec<&str> = line.split(',').collect();
        let [_, _, _, _, operation, asking, answering, _] = fields[..] else {
            bail!("{HISTORY}: {line:?} has not the columns {COLUMNS}");
        };
        let number = |text: &str| text.parse().with_context(|| format!("{HISTORY}: {line:?}"));
        counts.insert(operation, Count([number(asking)?, number(answering)?]));
    }
    Ok(counts)
}

// ---- what callgrind writes --------------------------------------------------------------------

/// One line of cost: a function's own, or that of a call from it with all that it led to.
struct Cost<'a> {
    function: &'a str,
    /// The function that was called.
    callee: Option<&'a str>,
    instructions: u64,
}

/// Takes a profile apart: names are given once, as `(number) name`, and by their number from then on.
fn costs(profile: &str) -> Vec<Cost<'_>> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut name = |text| {
        let Some((number, rest)) = str::split_once(text, ')') else {
            return text;
        };
        match rest.trim() {
            "" => names.get(number).copied().unwrap_or_default(),
            given => {
                names.insert(number, given);
                given
            }
        }
    };
    let mut costs = Vec::new();
    let (mut function, mut callee, mut is_call) = ("", "", false);
    for line in profile.lines() {
        if let Some(text) = line.strip_prefix("fn=") {
            function = name(text);
        } else if let Some(text) = line.strip_prefix("cfn=") {
            callee = name(text);
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            // The position, and the cost.
            let instructions = line.split(' ').nth(1).and_then(|n| n.parse().ok());
            costs.push(Cost {
                function,
                callee: std::mem::take(&mut is_call).then_some(callee),
                instructions: instructions.unwrap_or(0),
            });
        }
    }
    costs
}

/// A function's name without the modules that it is in and without generic arguments.
fn short_name(function: &str) -> &str {
    let name = function.split('<').next().unwrap_or(function);
    name.rsplit("::")
        .find(|part| !part.is_empty() && !is_hash(part))
        .unwrap_or(name)
}

/// What the compiler appends to names.
fn is_hash(part: &str) -> bool {
    part.len() == 17 && part.starts_with('h') && part[1..].chars().all(|c| c.is_ascii_hexdigit())
}

/// Instructions of all calls of functions whose names begin so, with all that they led to.
fn inclusive(profile: &str, prefix: &str) -> u64 {
    costs(profile)
        .iter()
        .filter(|cost| {
            cost.callee
                .is_some_and(|f| short_name(f).starts_with(prefix))
        })
        .map(|cost| cost.instructions)
        .sum()
}

/// The functions that cost most by themselves, the measurement's own included.
fn costliest(short: &str, long: &str, how_many: usize) -> String {
    let mut own: HashMap<&str, i64> = HashMap::new();
    for (profile, sign) in [(long, 1), (short, -1)] {
        for cost in costs(profile) {
            if cost.callee.is_none() {
                *own.entry(cost.function).or_default() += sign * cost.instructions as i64;
            }
        }
    }
    let mut own: Vec<_> = own.into_iter().collect();
    own.sort_by_key(|&(function, cost)| (-cost, function));
    let mut text = String::new();
    for (function, cost) in own.into_iter().take(how_many) {
        let _ = writeln!(text, "  {:9.1}  {function}", cost as f64 / COUNT as f64);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "\
events: Ir
fn=(1) main::h0123456789abcdef
1 10
cfn=(2) connex_instructions::sides::asking_turn
calls=3 7
+2 300
cfn=(3) connex_instructions::operations::wait
calls=3 9
* 50
fn=(2)
7 100
cfn=(4) memcpy
calls=3 0
7 200

fn=(4)
0 200
fn=(3)
9 50
totals: 360
";

    #[test]
    fn calls_are_told_from_a_functions_own_cost() {
        assert_eq!(inclusive(PROFILE, "asking_"), 300);
        assert_eq!(inclusive(PROFILE, "answering_"), 0);
        let text = costliest("", PROFILE, 2);
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "0.2  memcpy",
                "0.1  connex_instructions::sides::asking_turn"
            ]
        );
    }

    #[test]
    fn names_are_known_whatever_surrounds_them() {
        for name in [
            "asking_turn",
            "a::b::asking_turn",
            "a::b::asking_turn::h0123456789abcdef",
            "a::asking_turn::<b::C>",
        ] {
            assert_eq!(short_name(name), "asking_turn");
        }
    }

    #[test]
    fn the_last_counts_are_those_that_are_compared_with() {
        let history = format!(
            "# words\n{COLUMNS}\n\
             2026-01-01,a,1.95.0,2.36,read-4k,10,20,30\n\
             2026-01-02,b,1.95.0,2.36,read-4k,11.5,20,31.5\n"
        );
        let last = last(&history).expect("well formed");
        assert_eq!(last["read-4k"], Count([11.5, 20.0]));
        assert!(super::last("a,b").is_err());
    }
}
