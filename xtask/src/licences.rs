//! The licences of what is linked in: only those that allow use under Apache-2.0 terms.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::place::Place;
use crate::process::{cargo, output};

/// Permissive licences, by their SPDX names.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Checks every package of the lock file.
///
/// # Errors
/// With every package whose licence is not in [`ALLOWED`].
pub(crate) fn check(place: &Place) -> Result<()> {
    let text = output(cargo(place).args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--all-features",
    ]))?;
    let metadata: Value = serde_json::from_str(&text).context("cargo metadata")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata names no packages")?;
    let bad: Vec<String> = packages
        .iter()
        .filter_map(|package| {
            let licence = package["license"].as_str().unwrap_or("none given");
            (!allowed(licence))
                .then(|| format!("{} {}: {licence}", package["name"], package["version"]))
        })
        .collect();
    ensure!(
        bad.is_empty(),
        "not among the licences that xtask/src/licences.rs allows:\n  {}",
        bad.join("\n  ")
    );
    println!("{} packages, all under allowed licences", packages.len());
    Ok(())
}

/// Whether an SPDX expression can be met with allowed licences. `/` is how old packages write OR.
fn allowed(expression: &str) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let met = any(&mut rest);
    met && rest.is_empty()
}

/// Alternatives.
fn any(words: &mut &[&str]) -> bool {
    let mut met = all(words);
    while eat(words, "OR") {
        met |= all(words);
    }
    met
}

/// Several at once.
fn all(words: &mut &[&str]) -> bool {
    let mut met = one(words);
    while eat(words, "AND") {
        met &= one(words);
    }
    met
}

fn one(words: &mut &[&str]) -> bool {
    if eat(words, "(") {
        let met = any(words);
        return eat(words, ")") && met;
    }
    let Some((name, rest)) = words.split_first() else {
        return false;
    };
    *words = rest;
    if eat(words, "WITH") {
        // An exception grants more than the licence does.
        *words = words.get(1..).unwrap_or_default();
    }
    ALLOWED.contains(name)
}

fn eat(words: &mut &[&str], word: &str) -> bool {
    let found = words.first() == Some(&word);
    if found {
        *words = &words[1..];
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_understood() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        ] {
            assert!(allowed(good), "{good}");
        }
        for bad in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT",
            "MIT MIT",
            "none given",
        ] {
            assert!(!allowed(bad), "{bad}");
        }
    }
}
