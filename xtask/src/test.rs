//! `cargo xtask test`: everything that CI checks.

use std::process::ExitCode;

use anyhow::{Result, ensure};

use crate::place::Place;
use crate::steps::{self, Group, Step};
use crate::{demo, fuzz, licences, python, readme, rust, system, ucx, wheel};

/// Files and folders that are not written yet: the steps that need them are shown as such. An entry goes
/// when its thing lands.
const PENDING: &[&str] = &[];

/// Runs the steps of the groups in `only`, all if it is empty, whose name contains `name`.
pub(crate) fn run(
    place: &Place,
    only: &[Group],
    name: Option<&str>,
    list: bool,
) -> Result<ExitCode> {
    let steps: Vec<Step> = all()
        .into_iter()
        .filter(|step| only.is_empty() || only.contains(&step.group))
        .filter(|step| name.is_none_or(|name| step.name.contains(name)))
        .collect();
    ensure!(!steps.is_empty(), "no such step: --list names them");
    if list {
        for step in &steps {
            let needs = step
                .needs
                .map(|n| format!("  (needs {n})"))
                .unwrap_or_default();
            println!("{:8} {}{needs}", step.group.to_string(), step.name);
        }
        return Ok(ExitCode::SUCCESS);
    }
    println!("==> packages of the operating system");
    if steps.iter().any(|step| step.group != Group::Lint) {
        system::packages(place)?;
    }
    let passed = steps::run(place, &steps, PENDING);
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// All steps, the quick ones first.
fn all() -> Vec<Step> {
    use Group::{Faults, Lint, Python, Rust};
    let module = Some("python/connex_rs/__init__.py");

    let mut steps = vec![
        step(Lint, "rustfmt", None, rust::format),
        step(Lint, "clippy", None, rust::clippy),
        step(Lint, "documentation", None, rust::documentation),
        step(Lint, "licences", None, licences::check),
        step(Lint, "ruff", None, python::lint),
        step(Lint, "bindings are current", None, rust::bindings_current),
        step(Rust, "unit and integration tests", None, rust::tests),
        step(Rust, "documentation tests", None, rust::doc_tests),
    ];
    steps.extend(ucx::names().map(|version| {
        let name = format!("over UCX {version}");
        step(Rust, &name, None, move |place| {
            rust::with_ucx(place, version)
        })
    }));
    steps.push(step(
        Rust,
        "example pipeline.rs",
        Some("examples/pipeline.rs"),
        |place| rust::example(place, "pipeline"),
    ));
    steps.push(step(
        Rust,
        "fuzz targets",
        Some("fuzz/Cargo.toml"),
        fuzz::briefly,
    ));
    steps.push(step(Python, "wheel", module, |place| {
        wheel::build(place).map(drop)
    }));
    steps.push(step(
        Python,
        "stubs",
        Some("python/connex_rs/_connex_rs.pyi"),
        python::stubs,
    ));
    steps.extend(ucx::names().map(|version| {
        let name = format!("pytest, UCX {version}");
        step(Python, &name, Some("python/tests"), move |place| {
            python::tests(place, version)
        })
    }));
    steps.push(step(Python, "other Pythons", module, python::other_pythons));
    steps.push(step(Python, "README", module, readme::examples));
    steps.push(step(
        Python,
        "example pipeline.py",
        Some("python/examples/pipeline.py"),
        |place| python::script(place, "python/examples/pipeline.py"),
    ));
    for transport in [demo::Transport::Tcp, demo::Transport::Ucx] {
        let name = format!("demo, {transport}");
        steps.push(step(Python, &name, module, move |place| {
            demo::show(place, transport, rust::PROFILE)
        }));
    }
    for (name, over_ucx) in [("fault lab", false), ("fault lab, UCX", true)] {
        steps.push(step(Faults, name, Some("tests/Cargo.toml"), move |place| {
            rust::faults(place, over_ucx)
        }));
    }
    steps
}

fn step(
    group: Group,
    name: &str,
    needs: Option<&'static str>,
    action: impl Fn(&Place) -> Result<()> + 'static,
) -> Step {
    Step {
        group,
        name: name.to_owned(),
        needs,
        action: Box::new(action),
    }
}
