//! The reader: finds its owner, measures, reports.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use connex_rs::{Engine, PeerUrl};

use crate::cli::{self, EngineArgs, LocalArgs, MeasureArgs, ReaderArgs};
use crate::control::{Control, HEADER, MAGIC, PATIENCE, VERSION};
use crate::machine::Machine;
use crate::measure::Session;
use crate::owner::Offer;
use crate::report::{Report, SCHEMA};

/// Model name of readers.
const MODEL: &str = "cxrma-reader";

/// Starts an owner as a second process and measures against it; false if bytes differed.
///
/// # Errors
/// If anything fails.
pub(crate) fn local(args: &LocalArgs) -> anyhow::Result<bool> {
    let owner = OwnerProcess::start(args)?;
    let addr = u64::from_str_radix(owner.offer.addr.trim_start_matches("0x"), 16)?;
    measure(
        &args.ip,
        &owner.offer.url,
        addr,
        &args.engine,
        &args.measure,
    )
}

/// Measures against an owner that runs already; false if bytes differed.
///
/// # Errors
/// If anything fails.
pub(crate) fn remote(args: &ReaderArgs) -> anyhow::Result<bool> {
    let ip = match &args.ip {
        Some(ip) => ip.clone(),
        None => cli::address_towards(&args.url)?.to_string(),
    };
    measure(&ip, &args.url, args.addr, &args.engine, &args.measure)
}

/// An owner in a process of its own, which ends with this value.
struct OwnerProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    offer: Offer,
}

impl OwnerProcess {
    fn start(args: &LocalArgs) -> anyhow::Result<Self> {
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command
            .args(["owner", "--json", "--until-eof", "--ip", &args.ip])
            .args(args.engine.to_args());
        if args.measure.large {
            command.arg("--large");
        }
        if let Some(device) = args.gpu_owner {
            command.args(["--gpu-owner", &device.to_string()]);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the owner's process")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("the owner has no output")?;
        let mut line = String::new();
        // If it fails it says why on standard error, which it shares with us.
        BufReader::new(stdout).read_line(&mut line)?;
        let Ok(offer) = serde_json::from_str(&line) else {
            let status = child.wait()?;
            anyhow::bail!("the owner's process did not start ({status})");
        };
        Ok(Self {
            child,
            stdin,
            offer,
        })
    }
}

impl Drop for OwnerProcess {
    fn drop(&mut self) {
        // End of its input: it closes its engine and ends. It is killed if it does not.
        self.stdin = None;
        for _ in 0..500 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        eprintln!("cxrma: the owner's process did not end within 5 s and was killed");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn measure(
    ip: &str,
    url: &str,
    addr: u64,
    engine_args: &EngineArgs,
    args: &MeasureArgs,
) -> anyhow::Result<bool> {
    let config = engine_args.config(ip, MODEL, 0, std::process::id())?;
    let engine = Engine::start(config.with_environment()?)
        .with_context(|| format!("cannot start the reader on {ip}"))?;
    let offered = header(&engine, url, addr)?;
    let control = Control {
        engine: &engine,
        url,
        owner: url.parse::<PeerUrl>()?.id,
    };
    let mut session = Session::new(&engine, engine_args, ip, &control, addr, offered, args)?;
    session.run()?;
    let stats = engine.stats();
    let owner = control.owner.to_string();
    let path = stats
        .paths
        .iter()
        .find(|path| path.peer == owner)
        .map_or_else(
            || "unknown".to_owned(),
            |path| format!("{} ({})", path.path, path.mode),
        );
    let report = Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
        machine: Machine::here(),
        transport: stats.transport,
        path,
        warnings: stats.warnings,
        results: session.results,
        problems: session.problems,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", report.text())?;
    }
    out.flush()?;
    Ok(report.problems.is_empty())
}

/// Reads the owner's header; returns the bytes that it offers.
fn header(engine: &Engine, url: &str, addr: u64) -> anyhow::Result<usize> {
    let words = [const { AtomicU64::new(0) }; 3];
    // SAFETY: 24 bytes of ours, atomics, during the blocking call.
    unsafe { engine.read(url, words.as_ptr() as usize, addr, 24, Some(PATIENCE)) }
        .with_context(|| format!("cannot read {addr:#x} of {url}: is this what `cxrma owner` printed, and does it still run?"))?;
    let [magic, version, bytes] = words.map(|word| word.load(Ordering::Acquire));
    ensure!(
        magic == MAGIC,
        "there is no header of an owner at {addr:#x} of {url}: give the address that `cxrma owner` printed"
    );
    ensure!(
        version == VERSION,
        "the owner at {url} is of another version of cxrma (its protocol is {version}, ours {VERSION}): use the same on both hosts"
    );
    ensure!(
        addr.checked_add(HEADER as u64)
            .and_then(|a| a.checked_add(bytes))
            .is_some(),
        "the owner at {url} offers {bytes} bytes, which cannot be"
    );
    Ok(usize::try_from(bytes)?)
}
