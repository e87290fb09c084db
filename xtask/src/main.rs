//! Developer chores of connex-rs: `cargo xtask help` lists them.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for the terminal: printing is its output"
)]

mod bench_peers;
#[cfg(feature = "bindings")]
mod bindings;
mod client;
mod demo;
mod elf;
mod fuzz;
mod instructions;
mod licences;
mod place;
mod process;
mod python;
mod rdma;
mod readme;
mod rust;
mod steps;
mod system;
mod test;
mod torch;
mod ucx;
mod venv;
mod wheel;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use crate::place::Place;

/// Developer chores of connex-rs.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    version,
    disable_version_flag = true
)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Sets up what the tests need and runs them all
    Test {
        /// Runs only this group; may be given several times
        #[arg(long, value_enum)]
        only: Vec<steps::Group>,
        /// Runs only the steps whose name contains this
        step: Option<String>,
        /// Lists the steps and what each needs, and runs nothing
        #[arg(long)]
        list: bool,
    },
    /// Builds the Python wheel: exactly one, in dist/
    Wheel,
    /// Moves memory between two processes, from Python and from Rust, checks every byte and prints the times
    Demo {
        /// What moves the bytes
        #[arg(long, value_enum, default_value_t = demo::Transport::Tcp)]
        transport: demo::Transport,
    },
    /// Measures connex-rs side by side with plain sockets, ucx_perftest, Mooncake and NIXL; for an idle machine
    BenchPeers(bench_peers::Args),
    /// Counts the instructions of operations with callgrind, and compares with bench/instructions.csv; for any machine
    BenchInstructions(instructions::Args),
    /// Drives the real client, connex.pp of connex-ai, and kills its stages with steps in flight
    TestClient(client::Args),
    /// Runs tests over RDMA, in a small virtual machine with Soft-RoCE devices
    TestRdma(rdma::Args),
    /// Feeds arbitrary bytes to every decoder and to a whole engine, for a fixed time
    Fuzz(fuzz::Args),
    /// Runs the tests with the full counts: hours, for an idle machine
    Soak,
    /// Regenerates crates/connex-ucx/src/sys/bindings.rs from UCX's headers (needs libclang)
    Bindings {
        /// The folder that holds ucp/api/ucp.h; without it the headers of the newest libucx-cu12 under target/
        #[arg(long)]
        headers: Option<PathBuf>,
        /// Writes nothing; fails if the committed file is not what the headers give
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().chore) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> Result<ExitCode> {
    let place = Place::find()?;
    match chore {
        Chore::Test { only, step, list } => {
            return test::run(&place, &only, step.as_deref(), list);
        }
        Chore::Wheel => {
            let wheel = wheel::build(&place)?;
            println!("{}", wheel.display());
        }
        Chore::Demo { transport } => demo::run(&place, transport)?,
        Chore::BenchPeers(args) => bench_peers::run_all(&place, &args)?,
        Chore::BenchInstructions(args) => instructions::count(&place, &args)?,
        Chore::TestClient(args) => client::test(&place, &args)?,
        Chore::TestRdma(args) => rdma::test(&place, &args)?,
        Chore::Fuzz(args) => fuzz::fuzz(&place, &args)?,
        Chore::Soak => soak()?,
        Chore::Bindings { headers, check } => regenerate(&place, headers, check)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The tests, told by their variables to use the full counts.
fn soak() -> Result<()> {
    let this = std::env::current_exe().context("this program's own path")?;
    process::run(
        std::process::Command::new(this)
            .args([
                "test", "--only", "rust", "--only", "python", "--only", "faults",
            ])
            .envs([
                ("CONNEX_SOAK", "1"),
                ("CONNEX_TEST_STORM_S", "30"),
                ("NEXTEST_PROFILE", "soak"),
            ]),
    )
}

/// Regenerates or checks the bindings. Without bindgen this program runs the one that has it.
fn regenerate(place: &Place, headers: Option<PathBuf>, check: bool) -> Result<()> {
    let headers = match headers {
        Some(headers) => headers,
        None => ucx::newest(place)?.headers,
    };
    #[cfg(feature = "bindings")]
    return bindings::run(&headers, check);
    #[cfg(not(feature = "bindings"))]
    return rust::bindings(place, &headers, check);
}
