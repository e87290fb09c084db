//! Compiles the sentinel (`sentinel/main.rs`), a program of its own that the library embeds and starts.
//!
//! It is linked statically where the linker can do that: it then starts faster, needs no C library of a certain
//! version and stays smaller in memory. Where the C library's static half is not installed, or the linker has
//! none (zig's for glibc targets), it is linked like the library itself, with the same lowest C library version.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "sentinel/main.rs";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CONNEX_RS_SENTINEL_LINK");
    let out = PathBuf::from(var("OUT_DIR")).join("sentinel");
    let supported = var("CARGO_CFG_TARGET_OS") == "linux"
        && matches!(
            var("CARGO_CFG_TARGET_ARCH").as_str(),
            "x86_64" | "aarch64" | "riscv64" | "loongarch64"
        );
    if !supported {
        // The library then says that there is no sentinel for this kind of machine.
        std::fs::write(&out, []).expect("write to OUT_DIR");
        return;
    }
    // For trying the other way on a host that has both.
    let wanted = env::var("CONNEX_RS_SENTINEL_LINK").unwrap_or_default();
    let ways: &[&str] = match wanted.as_str() {
        "static" => &["+crt-static"],
        "dynamic" => &["-crt-static"],
        "" => &["+crt-static", "-crt-static"],
        other => panic!(
            "CONNEX_RS_SENTINEL_LINK={other}: use \"static\", \"dynamic\", or leave it unset"
        ),
    };
    let mut errors = String::new();
    for crt in ways {
        match compile(&out, crt) {
            Ok(()) => return,
            Err(error) => errors.push_str(&error),
        }
    }
    panic!("cannot compile {SOURCE}:\n{errors}");
}

fn compile(out: &Path, crt: &str) -> Result<(), String> {
    let mut rustc = Command::new(var("RUSTC"));
    rustc
        .args(["--edition", "2024", "--crate-name", "connex_sentinel"])
        .args(["--crate-type", "bin", "--target", &var("TARGET")])
        .args(["-C", "opt-level=s", "-C", "panic=abort", "-C", "lto=fat"])
        .args(["-C", "strip=symbols", "-C"])
        .arg(format!("target-feature={crt}"))
        .arg("-o")
        .arg(out)
        .arg(SOURCE);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.args(["-C", &format!("linker={linker}")]);
    }
    rustc.args(linking());
    let output = rustc
        .output()
        .map_err(|e| format!("{rustc:?} did not start: {e}\n"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{rustc:?} ended with {}:\n{}\n",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    ))
}

/// Of the flags that the library is compiled with those that choose and steer the linker. Others (coverage,
/// sanitizers, warnings) are not for a program that must stay small.
fn linking() -> Vec<String> {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let mut flags = flags.split('\u{1f}').map(str::to_owned);
    let mut kept = Vec::new();
    while let Some(flag) = flags.next() {
        let value = match flag.as_str() {
            "-C" | "--codegen" => flags.next().unwrap_or_default(),
            _ => match flag.strip_prefix("-C") {
                Some(value) => value.to_owned(),
                None => continue,
            },
        };
        if value.starts_with("link") {
            kept.push(format!("-C{value}"));
        }
    }
    kept
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
