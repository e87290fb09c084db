//! `cargo xtask test-client`: the real client over this wheel, with stages that are killed while steps are in flight.

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::place::Place;
use crate::process::{command, output, run};
use crate::torch;
use crate::venv::{Venv, python};
use crate::wheel;

/// The client, in the version whose calls the Python surface answers.
const CLIENT: &str = "connex-ai==0.1.1";

/// What it needs besides torch.
const NEEDS: &[&str] = &["msgpack", "pyzmq", "safetensors"];

/// How the variables begin that would change the client's other settings.
const OTHERS: &[&str] = &["CONNEXTE_", "MOONCAKE_", "VLLM_"];

/// The oldest minor version of Python 3 that the client is for.
const OLDEST: u32 = 10;

/// What is run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often a middle stage is killed, at each number of steps in flight
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    kills: u32,
    /// The numbers of steps in flight
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u32).range(1..=64))]
    inflight: Vec<u32>,
    /// Memory that a middle stage touches before it is killed: bytes, or with K, M, G
    #[arg(long, default_value = "0", value_parser = bytes)]
    ballast: u64,
    /// Also writes the report to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Sets the environment up and runs `tests/client/driver.py` in it.
///
/// # Errors
/// If something cannot be installed, a step is lost or wrong, or the client did not use connex-rs.
pub(crate) fn test(place: &Place, args: &Args) -> Result<()> {
    let venv = environment(place)?;
    let logs = place.target.join("test-client");
    // Every life of a stage adds to the log of the one before.
    let _ = fs::remove_dir_all(&logs);
    let inflight: Vec<String> = args.inflight.iter().map(u32::to_string).collect();
    let mut driver = venv.python(place);
    driver
        .arg("tests/client/driver.py")
        .args(["--kills", &args.kills.to_string()])
        .args(["--inflight", &inflight.join(",")])
        .args(["--ballast", &args.ballast.to_string()])
        .arg("--logs")
        .arg(&logs);
    for (name, _) in env::vars_os() {
        let shown = name.to_string_lossy();
        if OTHERS.iter().any(|other| shown.starts_with(other)) {
            driver.env_remove(&name);
        }
    }
    if let Some(file) = &args.json {
        let file = std::path::absolute(file)
            .with_context(|| format!("no such path: {}", file.display()))?;
        driver.arg("--json").arg(file);
    }
    run(&mut driver)
}

/// An environment with the client, torch and the wheel, which is built.
fn environment(place: &Place) -> Result<Venv> {
    let interpreter = python()?;
    let minor = output(
        command(place, &interpreter).args(["-c", "import sys; print(sys.version_info[1])"]),
    )?;
    let minor: u32 = minor.trim().parse().context("Python's minor version")?;
    ensure!(
        minor >= OLDEST,
        "{} is Python 3.{minor}, and {CLIENT} needs 3.{OLDEST} or newer: name one with PYTHON",
        interpreter.display()
    );
    let requirements: Vec<&str> = ["--no-deps", CLIENT, torch::TORCH]
        .into_iter()
        .chain(NEEDS.iter().copied())
        .chain(torch::NEEDS.iter().copied())
        .collect();
    let venv = Venv::ensure(place, "client", &interpreter, &requirements)?;
    torch::without_cuda(place, &venv)?;
    let wheel = wheel::build(place)?;
    venv.install_wheel(place, &wheel)?;
    Ok(venv)
}

/// `8G`, `512M`, `4096`.
fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("{text:?} is no number of bytes, like 4096, 512M or 8G"))
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_read_with_their_unit() {
        assert_eq!(bytes("0"), Ok(0));
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("8G"), Ok(8 << 30));
        for wrong in ["", "G", "8T", "-1", "1.5G", "99999999999999G"] {
            assert!(bytes(wrong).is_err_and(|e| e.contains(wrong)), "{wrong}");
        }
    }
}
