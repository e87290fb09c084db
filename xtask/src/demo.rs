//! `cargo xtask demo`: the main job, shown.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde_json::Value;

use crate::place::Place;
use crate::process::{cargo, command, describe, run as run_command};
use crate::python;
use crate::ucx;
use crate::wheel;

/// What moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Transport {
    /// The built-in TCP transport: needs nothing but Rust and Python
    Tcp,
    /// UCX: the one that `CONNEX_RS_UCX` names, else a wheel that is put under target/
    Ucx,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Tcp => "tcp",
            Transport::Ucx => "ucx",
        })
    }
}

/// The address of both processes.
const IP: &str = "127.0.0.1";

/// Builds the wheel and the programs, and shows them.
pub(crate) fn run(place: &Place, transport: Transport) -> Result<()> {
    wheel::build(place)?;
    show(place, transport, "release")
}

/// The demonstration, with the wheel in `dist/` and programs of this build profile.
pub(crate) fn show(place: &Place, transport: Transport, profile: &str) -> Result<()> {
    run_command(cargo(place).args(["build", "--locked", "--profile", profile, "-p", "cxrma"]))?;
    let venv = python::environment(place)?;
    let ucx = match transport {
        Transport::Tcp => None,
        Transport::Ucx => Some(ucx::preferred(place)?),
    };
    let set = |command: &mut Command| {
        command.env("CONNEX_RS_TRANSPORT", transport.to_string());
        if let Some(ucx) = &ucx {
            command.env("CONNEX_RS_UCX", ucx);
        }
    };

    println!("\nTwo Python processes, {transport}, every byte checked:");
    let script = |role: &str| {
        let mut command = venv.python(place);
        command.args(["python/examples/demo_pair.py", role, "--ip", IP]);
        set(&mut command);
        command
    };
    pair(&mut script("owner"), script("reader"))?;

    println!("\nTwo Rust processes, {transport}, every byte checked:");
    let program = place.target.join(profile).join("cxrma");
    let cxrma = |role: &str| {
        let mut command = command(place, &program);
        command.arg(role);
        set(&mut command);
        command
    };
    let mut owner = cxrma("owner");
    owner.args(["--ip", IP, "--json"]);
    let mut reader = cxrma("reader");
    // Enough for a table to look at; without these `cxrma` measures everything, for minutes.
    reader.args(["--only", "latency,stream", "--budget-ms", "300"]);
    pair(&mut owner, reader)
}

/// Starts the owner, which prints a line of JSON with `url` and `addr`, and runs the reader with them. The owner is
/// stopped when the reader has ended.
fn pair(owner: &mut Command, mut reader: Command) -> Result<()> {
    println!("$ {}", describe(owner));
    let owner = Guard(
        owner
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| describe(owner))?,
    );
    let (_owner, url, addr) = greeting(owner)?;
    run_command(reader.args(["--url", &url, "--addr", &addr]))
}

/// Reads what the owner says of itself.
fn greeting(mut owner: Guard) -> Result<(Guard, String, String)> {
    let stdout = owner
        .0
        .stdout
        .take()
        .context("the owner has no standard output")?;
    let mut lines = BufReader::new(stdout);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        let said: Option<Value> = serde_json::from_str(&line).ok();
        if let Some((url, addr)) = said
            .as_ref()
            .and_then(|said| Some((said["url"].as_str()?, &said["addr"])))
        {
            // A number or a string: both are taken by the reader.
            let addr = addr
                .as_str()
                .map_or_else(|| addr.to_string(), str::to_owned);
            let url = url.to_owned();
            // What else it says goes on, so that it never waits for us to read.
            std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::stdout()));
            return Ok((owner, url, addr));
        }
        line.clear();
    }
    bail!(
        "the owner ended without saying its URL: {}",
        owner.0.wait()?
    );
}

/// A child that does not outlive its use.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Gone already, or about to be: nothing more can be done about either.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
