//! `cxrma`: measures a pair of connex-rs engines, and what survivors see when peers die.
//!
//! `local` measures two processes on this host; `owner` and `reader` are the two halves of it, for two
//! hosts. Every kind of transfer that is timed is also verified, byte by byte, for each size.
//!
//! Exit codes: 0 all well, 1 something failed or bytes differed, 2 wrong arguments.

// A program for people and scripts: its output is its purpose.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod channels;
mod cli;
mod control;
mod faults;
mod gpu;
mod machine;
mod measure;
mod owner;
mod pattern;
mod peers;
mod reader;
mod report;
mod steps;
mod times;
mod verify;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("CONNEX_RS_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    machine::raise_descriptor_limit();
    let outcome = match cli.command {
        cli::Command::Local(args) => reader::local(&args),
        cli::Command::Owner(args) => owner::run(&args).map(|()| true),
        cli::Command::Reader(args) => reader::remote(&args),
        cli::Command::Faults(args) => faults::run(&args),
        cli::Command::Peers(args) => peers::run(&args).map(|()| true),
        cli::Command::LinkDown(args) => faults::link_down(&args).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cxrma: {error:#}");
            ExitCode::FAILURE
        }
    }
}
