//! What connex-rs is measured against on the same machine, in the same minutes: a plain pair of sockets, and two
//! processes that copy through shared memory. And the report of such a run.
//!
//! Every pair is two processes: the client starts this program a second time.

// A program for scripts: its output is its purpose.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod aims;
mod memory;
mod plot;
mod report;
mod runs;
mod shared;
mod sockets;
mod timing;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// The far ends of comparisons with connex-rs, and their report.
#[derive(Parser)]
#[command(name = "connex-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Reads and writes over plain TCP sockets on loopback; prints JSON
    Sockets(Measure),
    /// Reads and writes through 256 KB of shared memory, and memcpy; prints JSON
    Shared(Measure),
    /// Turns the figures of a side-by-side run into a table, JSON and a plot
    Report {
        /// What `cargo xtask bench-peers` collected: one JSON object a line
        #[arg(long)]
        raw: PathBuf,
        /// Where results.json goes
        #[arg(long)]
        out: PathBuf,
        /// Where results.md and results.svg are written, if at all
        #[arg(long)]
        docs: Option<PathBuf>,
    },
    #[command(hide = true)]
    ServeSockets,
    #[command(hide = true)]
    ServeShared { file: PathBuf },
}

/// What is measured, and how long.
#[derive(Args)]
struct Measure {
    /// Transfer sizes in bytes
    #[arg(long, value_delimiter = ',', default_value = "4096,65536,1048576,16777216,67108864", value_parser = clap::value_parser!(u64).range(8..=1 << 30))]
    sizes: Vec<u64>,
    /// Operations per point
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: u64,
    /// Most time per point, in milliseconds
    #[arg(long, default_value_t = 2000)]
    budget_ms: u64,
}

impl Measure {
    fn repeat(&self) -> timing::Repeat {
        timing::Repeat {
            iterations: self.iterations,
            budget: Duration::from_millis(self.budget_ms),
        }
    }

    fn sizes(&self) -> Vec<usize> {
        self.sizes.iter().map(|&n| n as usize).collect()
    }
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Sockets(args) => {
            sockets::measure(&args.sizes(), args.repeat()).and_then(|rows| timing::print(&rows))
        }
        Command::Shared(args) => {
            shared::measure(&args.sizes(), args.repeat()).and_then(|rows| timing::print(&rows))
        }
        Command::Report { raw, out, docs } => report::run(&raw, &out, docs.as_deref()),
        Command::ServeSockets => sockets::serve(),
        Command::ServeShared { file } => shared::serve(&file),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("connex-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
