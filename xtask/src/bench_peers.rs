//! The side-by-side run: connex-rs, plain sockets, `ucx_perftest`, Mooncake and NIXL in the same minutes, in turn.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::place::Place;
use crate::process::{cargo, command, describe, run};
use crate::python;
use crate::ucx;
use crate::venv::Venv;
use crate::wheel;

/// The versions that are compared with.
const MOONCAKE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
const NIXL: &str = "nixl-cu12==1.5.1";
/// All that NIXL's Python part needs here; it names torch as well, which it does not use for host memory.
const NIXL_NEEDS: &str = "numpy";

/// 256 KB segments, as the engine sets them: with UCX's own 8 KB the comparison would be unfair to UCX.
const SEGMENTS: [(&str, &str); 2] = [
    ("UCX_TCP_TX_SEG_SIZE", "256k"),
    ("UCX_TCP_RX_SEG_SIZE", "256k"),
];

/// What is run, and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often everything is run
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Few sizes and operations: shows that all of it works, the figures mean little
    #[arg(long)]
    quick: bool,
    /// Runs only those whose name contains this; may be given several times
    #[arg(long)]
    only: Vec<String>,
    /// Also writes docs/results.md and docs/results.svg
    #[arg(long)]
    docs: bool,
}

/// One that is measured.
struct Runner {
    /// As the report knows it.
    name: &'static str,
    command: Command,
}

/// Sets everything up, runs the rounds and prints the report.
///
/// # Errors
/// If something cannot be installed or built, or a runner fails.
pub(crate) fn run_all(place: &Place, args: &Args) -> Result<()> {
    let runners = runners(place, args)?;
    let out = place.target.join("bench-peers");
    fs::create_dir_all(&out)?;
    let raw = out.join("raw.jsonl");
    let mut lines =
        fs::File::create(&raw).with_context(|| format!("cannot write {}", raw.display()))?;
    let mut runners: Vec<Runner> = runners
        .into_iter()
        .filter(|runner| args.only.is_empty() || args.only.iter().any(|o| runner.name.contains(o)))
        .collect();
    ensure!(
        !runners.is_empty(),
        "no runner's name contains {:?}",
        args.only
    );
    for round in 0..args.rounds {
        for runner in &mut runners {
            println!("round {} of {}: {}", round + 1, args.rounds, runner.name);
            let report = report(&mut runner.command)?;
            let line = json!({
                "round": round,
                "runner": runner.name,
                "command": shown(place, &runner.command),
                "report": report,
            });
            writeln!(lines, "{line}")?;
        }
    }
    drop(lines);
    let mut report = command(place, program(place, "connex-bench"));
    report
        .arg("report")
        .arg("--raw")
        .arg(&raw)
        .arg("--out")
        .arg(&out);
    if args.docs {
        let docs = place.root.join("docs");
        fs::create_dir_all(&docs)?;
        report.arg("--docs").arg(docs);
    }
    run(&mut report)
}

/// Installs and builds what is compared.
fn runners(place: &Place, args: &Args) -> Result<Vec<Runner>> {
    run(cargo(place).args([
        "build",
        "--locked",
        "--release",
        "-p",
        "cxrma",
        "-p",
        "connex-bench",
    ]))?;
    let interpreter = crate::venv::python()?;
    let mooncake = Venv::ensure(place, "mooncake", &interpreter, &[MOONCAKE])?;
    let nixl = Venv::ensure(
        place,
        "nixl",
        &interpreter,
        &["--no-deps", NIXL, NIXL_NEEDS],
    )?;
    let ucx = ucx::newest(place)?;
    let perftest = ucx
        .lib
        .parent()
        .context("a UCX without a folder")?
        .join("bin");
    wheel::build(place)?;
    let ours = python::environment(place)?;

    let (sizes, iterations, budget) = if args.quick {
        ("4096,65536,1048576", "200", "300")
    } else {
        ("4096,65536,1048576,16777216,67108864", "3000", "2000")
    };
    let finish = |mut command: Command| {
        command.args([
            "--sizes",
            sizes,
            "--iterations",
            iterations,
            "--budget-ms",
            budget,
        ]);
        command
    };
    let cxrma = |transport: &str, tls: &str, only: &str| {
        let mut command = command(place, program(place, "cxrma"));
        command.args([
            "local",
            "--ip",
            "127.0.0.1",
            "--json",
            "--transport",
            transport,
        ]);
        command.args(["--depths", "1,4,8", "--only", only]);
        if !args.quick {
            command.arg("--large");
        }
        let mut command = finish(command);
        if transport == "ucx" {
            command.env("CONNEX_RS_UCX", &ucx.lib).env("UCX_TLS", tls);
        }
        command
    };
    let script = |venv: &Venv, name: &str| {
        let mut command = venv.python(place);
        command.arg(Path::new("bench").join(name));
        finish(command)
    };
    let perf = |tls: &str, tests: &str| {
        let mut command = script(&ours, "perftest.py");
        command.arg("--bin").arg(&perftest).args(["--tests", tests]);
        command
            .env("LD_LIBRARY_PATH", &ucx.lib)
            .env("UCX_TLS", tls)
            .env("UCX_NET_DEVICES", "lo")
            .envs(SEGMENTS);
        command
    };
    let plain = |what: &str| {
        let mut command = command(place, program(place, "connex-bench"));
        command.arg(what);
        finish(command)
    };
    let everything = "latency,stream,chain,signal,connect,idle,batch,threads,await,growth";
    let some = "latency,stream,connect";
    let mut list = vec![
        ("cxrma tcp", cxrma("tcp", "", everything)),
        ("sockets", plain("sockets")),
        ("ucx_perftest tcp", perf("tcp", "am,put,get")),
        ("cxrma ucx tcp", cxrma("ucx", "tcp", some)),
        ("cxrma ucx shm", cxrma("ucx", "tcp,sysv", some)),
        ("shared copy", plain("shared")),
        ("ucx_perftest shm", perf("sysv", "am")),
        ("python tcp", script(&ours, "connex_pair.py")),
        ("mooncake", script(&mooncake, "mooncake_pair.py")),
        ("mooncake pooled", script(&mooncake, "mooncake_pair.py")),
        ("nixl", script(&nixl, "nixl_pair.py")),
    ];
    let mut start = ours.python(place);
    start.arg("bench/start.py");
    list.push(("python start", start));
    for (name, command) in &mut list {
        match *name {
            "python tcp" | "python start" => {
                command.env("CONNEX_RS_TRANSPORT", "tcp");
            }
            "mooncake pooled" => {
                command
                    .env("MC_TCP_ENABLE_CONNECTION_POOL", "1")
                    .env("MC_TCP_SLICE_SIZE", "1048576");
            }
            "nixl" => {
                command
                    .env("UCX_TLS", "tcp")
                    .env("UCX_NET_DEVICES", "lo")
                    .envs(SEGMENTS);
            }
            _ => {}
        }
    }
    Ok(list
        .into_iter()
        .map(|(name, command)| Runner { name, command })
        .collect())
}

fn program(place: &Place, name: &str) -> PathBuf {
    place.target.join("release").join(name)
}

/// Runs it and reads the JSON that it prints.
fn report(command: &mut Command) -> Result<Value> {
    let line = describe(command);
    let output = command
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot start {line}"))?;
    ensure!(
        output.status.success(),
        "{line}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).with_context(|| format!("{line} did not print JSON"))
}

/// The command as the report shows it: the same on every machine.
fn shown(place: &Place, command: &Command) -> String {
    let target = place.target.to_string_lossy();
    let root = place.root.to_string_lossy();
    describe(command)
        .replace(&*target, "target")
        .replace(&format!("{root}/"), "")
}
