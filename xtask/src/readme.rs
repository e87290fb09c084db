//! The README's Python examples run. (Its Rust examples are documentation tests of connex-rs.)

use std::fs;

use anyhow::{Result, ensure};

use crate::place::Place;
use crate::process::run;
use crate::python;
use crate::ucx;

/// Runs each block of Python of the README.
pub(crate) fn examples(place: &Place) -> Result<()> {
    let text = fs::read_to_string(place.root.join("README.md"))?;
    let blocks = blocks(&text, "python");
    ensure!(!blocks.is_empty(), "README.md has no example in Python");
    let venv = python::environment(place)?;
    for block in blocks {
        run(venv
            .python(place)
            .args(["-c", &block])
            .env("CONNEX_RS_UCX", ucx::preferred(place)?))?;
    }
    Ok(())
}

/// The fenced blocks of one language.
fn blocks(markdown: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = markdown.lines();
    while let Some(line) = lines.next() {
        if line
            .strip_prefix("```")
            .is_some_and(|info| info.trim() == language)
        {
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            found.push(block.join("\n"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_language_are_found() {
        let text = "a\n```python\nx = 1\n\ny = 2\n```\n```rust\nlet x;\n```\n```python\nz\n```\n";
        assert_eq!(blocks(text, "python"), ["x = 1\n\ny = 2", "z"]);
        assert_eq!(blocks(text, "text"), Vec::<String>::new());
    }
}
