//! Running other programs, visibly.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::place::Place;

/// A command that runs in the root of the workspace, with nothing on its standard input.
pub(crate) fn command(place: &Place, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(&place.root)
        .stdin(Stdio::null())
        .env("CARGO_TARGET_DIR", &place.target)
        .env("PATH", search_path());
    command
}

/// `cargo`, the one that started this program.
pub(crate) fn cargo(place: &Place) -> Command {
    command(
        place,
        env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
    )
}

/// Says what runs, and runs it.
///
/// # Errors
/// If it cannot be started or does not end with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    println!("$ {line}");
    let status = command
        .status()
        .with_context(|| format!("cannot start {line}"))?;
    if !status.success() {
        bail!("{line}: {status}");
    }
    Ok(())
}

/// Runs it and returns what it printed on standard output.
///
/// # Errors
/// If it cannot be started or does not end with 0, with what it said.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output = command
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot start {line}"))?;
    if !output.status.success() {
        bail!(
            "{line}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{line} printed what is not UTF-8"))
}

/// The first program of this name on the search path.
pub(crate) fn which(name: &str) -> Option<PathBuf> {
    env::split_paths(&search_path())
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// `PATH` with the folders of the administrator's programs, where `nft` and `tc` are.
fn search_path() -> std::ffi::OsString {
    let mut dirs: Vec<PathBuf> = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect())
        .unwrap_or_default();
    for dir in ["/usr/sbin", "/sbin"] {
        if !dirs.iter().any(|d| d == Path::new(dir)) {
            dirs.push(dir.into());
        }
    }
    env::join_paths(dirs).unwrap_or_default()
}

/// The variables that the command adds, and its words.
pub(crate) fn describe(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        let name = name.to_string_lossy();
        if matches!(&*name, "PATH" | "CARGO_TARGET_DIR" | "VIRTUAL_ENV") {
            continue;
        }
        if let Some(value) = value {
            words.push(format!("{name}={}", quoted(&value.to_string_lossy())));
        }
    }
    words.push(quoted(&command.get_program().to_string_lossy()));
    words.extend(command.get_args().map(|arg| quoted(&arg.to_string_lossy())));
    words.join(" ")
}

fn quoted(word: &str) -> String {
    if word.trim().contains('\n') {
        return "'(a program of several lines)'".to_owned();
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_could_be_typed() {
        let mut command = Command::new("prog");
        command
            .arg("a b")
            .arg("it's")
            .arg("--x=1")
            .env("NAME", "")
            .env("PATH", "/hidden");
        assert_eq!(describe(&command), r"NAME='' prog 'a b' 'it'\''s' --x=1");
    }
}
