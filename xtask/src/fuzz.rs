//! The fuzz targets: built with the flags that libFuzzer wants, and run for a fixed time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::place::Place;
use crate::process::{cargo, command, run};
use crate::ucx;

/// Every program of `fuzz/`.
const TARGETS: [&str; 5] = ["wire", "identity", "internals", "engine", "ucx"];
/// The only platform that the flags below are tried on.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
/// As `cargo fuzz` sets them: counters of edges and comparisons, and AddressSanitizer.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address";

/// What the targets begin with, made by `fuzz/src/seeds.rs`: a folder for each target.
const SEEDS: &str = "fuzz/seeds";

/// What is run, and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Writes the seeds under fuzz/seeds anew, and runs nothing
    #[arg(long)]
    write_seeds: bool,
    /// Seconds for each target
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// The targets; default all
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(TARGETS))]
    targets: Vec<String>,
}

/// Runs the targets. They begin with the seeds under `fuzz/seeds`; what they have found to be worth keeping stays under
/// `target/fuzz/corpus`.
///
/// # Errors
/// If one cannot be built, or finds something: the path of the input is printed.
pub(crate) fn fuzz(place: &Place, args: &Args) -> Result<()> {
    if args.write_seeds {
        let out = build(place)?;
        let seeds = place.root.join(SEEDS);
        if seeds.exists() {
            fs::remove_dir_all(&seeds)
                .with_context(|| format!("cannot remove {}", seeds.display()))?;
        }
        return make_seeds(place, &out, &seeds);
    }
    let targets: Vec<&str> = if args.targets.is_empty() {
        TARGETS.to_vec()
    } else {
        args.targets.iter().map(String::as_str).collect()
    };
    run_for(place, &targets, args.seconds)
}

/// All of them, briefly: what CI does.
///
/// # Errors
/// As for [`fuzz`].
pub(crate) fn briefly(place: &Place) -> Result<()> {
    run_for(place, &TARGETS, 4)
}

/// Builds the targets; returns the folder of what they make.
fn build(place: &Place) -> Result<PathBuf> {
    ensure!(
        cfg!(all(target_arch = "x86_64", target_os = "linux")),
        "the fuzz targets are built for {PLATFORM} only"
    );
    let out = place.target.join("fuzz");
    run(cargo(place)
        .args(["build", "--locked", "--release", "--target", PLATFORM])
        .args(["--manifest-path", "fuzz/Cargo.toml"])
        // Sanitizers and coverage are not for everybody's use of a stable compiler, but it has them.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS)
        .env("CARGO_TARGET_DIR", &out))?;
    Ok(out)
}

fn program(out: &Path, name: &str) -> PathBuf {
    out.join(PLATFORM).join("release").join(name)
}

fn run_for(place: &Place, targets: &[&str], seconds: u32) -> Result<()> {
    let out = build(place)?;
    let found = out.join("artifacts");
    fs::create_dir_all(&found).with_context(|| format!("cannot make {}", found.display()))?;
    check_seeds(place, &out)?;
    see_a_fault(place, &out)?;
    for target in targets {
        let corpus = out.join("corpus").join(target);
        fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
        run(command(place, program(&out, target))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-artifact_prefix={}/{target}-", found.display()))
            .args(["-print_final_stats=1", "-timeout=20", "-rss_limit_mb=4096"])
            // What is found goes into the first folder.
            .arg(corpus)
            .arg(Path::new(SEEDS).join(target))
            // Engines live to the end of the process.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .env("CONNEX_RS_UCX", ucx::newest(place)?.lib)
            // It has a line for every connection that ends badly, which here are most.
            .env("UCX_LOG_LEVEL", "fatal"))?;
    }
    Ok(())
}

fn make_seeds(place: &Place, out: &Path, folder: &Path) -> Result<()> {
    run(command(place, program(out, "seeds")).arg(folder))
}

/// The committed seeds are what the encoders make today: those of an older wire format would soon be worth nothing.
fn check_seeds(place: &Place, out: &Path) -> Result<()> {
    let fresh = out.join("seeds");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).with_context(|| format!("cannot remove {}", fresh.display()))?;
    }
    make_seeds(place, out, &fresh)?;
    ensure!(
        files(&place.root.join(SEEDS))? == files(&fresh)?,
        "{SEEDS} is not what fuzz/src/seeds.rs makes: run `cargo xtask fuzz --write-seeds`"
    );
    Ok(())
}

/// The files of every target's folder, by their path, and what is in them.
fn files(folder: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for target in TARGETS {
        let folder = folder.join(target);
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let bytes =
                fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let name = path.file_name().unwrap_or_default();
            files.insert(Path::new(target).join(name), bytes);
        }
    }
    Ok(files)
}

/// Shows that what a target finds ends the run: with a fault on purpose in one of them.
fn see_a_fault(place: &Place, out: &Path) -> Result<()> {
    let output = command(place, program(out, "wire"))
        .arg(format!("-artifact_prefix={}/seeded-", out.display()))
        .arg("-max_total_time=60")
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .env("CONNEX_FUZZ_SEEDED_FAULT", "1")
        .output()
        .context("cannot run the target")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && text.contains("the fault on purpose"),
        "a fault on purpose was not found: {text}"
    );
    Ok(())
}
