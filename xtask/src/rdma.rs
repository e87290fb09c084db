//! `cargo xtask test-rdma`: the tests over RDMA, on any Linux machine.
//!
//! A small virtual machine (qemu, software emulation, a distribution's kernel) runs over this machine's own files, read-only
//! under a writable layer. It has two Soft-RoCE devices, one at each end of a virtual cable, and a UCX with verbs. Programs are
//! built here and run there; their exit status comes back. With `--suite` it runs over a root made of another release's packages
//! instead, for the UCX of that release.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::place::Place;
use crate::process::{cargo, command, output, run, which};
use crate::rust::PROFILE;
use crate::system;

const IMAGE: &str = include_str!("../rdma/image.sh");
const SUITE: &str = include_str!("../rdma/suite.sh");
const INIT: &str = include_str!("../rdma/init.sh");
const GUEST: &str = include_str!("../rdma/guest.sh");
const CHECKS: &str = include_str!("../rdma/checks.sh");

/// Test binaries of the checks: the variable that names each there, its package and its target.
const BINARIES: &[(&str, &str, &str)] = &[
    ("INTEGRITY", "connex-rs", "integrity"),
    ("SURFACE", "connex-rs", "surface"),
    ("REJOIN", "connex-rs", "rejoin"),
    ("RDMA", "connex-rs", "rdma"),
    ("CXRMA", "cxrma", "cxrma"),
];

/// What the chore is told.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ends the machine after so many seconds
    #[arg(long, default_value_t = 900)]
    timeout: u64,
    /// Processors of the machine
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// The profile with which the programs are built
    #[arg(long, default_value = PROFILE)]
    cargo_profile: String,
    /// A folder with another UCX with verbs (libucp.so.0 and what it needs), instead of the distribution's
    #[arg(long)]
    ucx: Option<PathBuf>,
    /// Another release of this distribution (trixie, sid), whose own root and UCX the machine has instead of this system's
    #[arg(long, conflicts_with = "ucx", value_parser = suite_name)]
    suite: Option<String>,
    /// Shows the kernel's messages when the machine has ended
    #[arg(long)]
    console: bool,
    /// Runs this command of the shell there instead of the checks. $CXRMA, $INTEGRITY and so on are the binaries
    shell: Option<String>,
}

/// Builds what runs there, boots the machine and runs the checks in it.
///
/// # Errors
/// If something is missing, or if the command there does not end with 0.
pub(crate) fn test(place: &Place, args: &Args) -> Result<()> {
    let image = image(place)?;
    let root = match &args.suite {
        Some(suite) => Root::Suite(suite_root(place, suite)?),
        None => Root::System,
    };
    let binaries = binaries(place, &args.cargo_profile)?;
    let mut job = String::from("set -u\n");
    for (name, path) in &binaries {
        job += &format!("export {name}={}\n", quoted(path)?);
    }
    job += &format!("cd {}\n", quoted(&place.root)?);
    let ucx = match &args.ucx {
        Some(dir) => fs::canonicalize(dir).with_context(|| format!("--ucx {}", dir.display()))?,
        None => PathBuf::from(format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH)),
    };
    job += &format!("export CONNEX_RS_UCX={}\n", quoted(&ucx)?);
    if args.ucx.is_some() {
        job += "export LD_LIBRARY_PATH=$CONNEX_RS_UCX\n";
    }
    job += args.shell.as_deref().unwrap_or(CHECKS);
    Machine {
        image: &image,
        root,
        args,
    }
    .run(place, &job)
}

/// The folder with kernel, initramfs and the guest's extra files, made if it is not there or its recipe has changed.
fn image(place: &Place) -> Result<PathBuf> {
    ensure!(
        std::env::consts::ARCH == "x86_64",
        "the virtual machine of test-rdma is an x86-64 one, over this machine's own files: it cannot run on {}",
        std::env::consts::ARCH
    );
    tools(place)?;
    let dir = place.target.join("rdma");
    made_once(&dir, &format!("{IMAGE}\n{INIT}"), || {
        fs::write(dir.join("image.sh"), IMAGE)?;
        fs::write(dir.join("init.sh"), INIT)?;
        run(command(place, "bash").arg(dir.join("image.sh")).arg(&dir))
    })?;
    Ok(dir)
}

/// The root made of a suite's packages. To have newer packages of it, its folder is deleted.
fn suite_root(place: &Place, suite: &str) -> Result<PathBuf> {
    let dir = place.target.join("rdma").join(format!("suite-{suite}"));
    made_once(&dir, SUITE, || {
        let script = dir.join("suite.sh");
        fs::write(&script, SUITE)?;
        run(command(place, "bash").arg(script).arg(&dir).arg(suite))
    })?;
    Ok(dir.join("root"))
}

/// A suite's name becomes part of a path and of apt's sources.
fn suite_name(text: &str) -> Result<String, String> {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if !text.is_empty() && text.chars().all(word) {
        Ok(text.to_owned())
    } else {
        Err("a suite's name is lower-case letters, digits and hyphens".into())
    }
}

/// Makes what belongs into `dir`, if it is not there or its recipe has changed.
fn made_once(dir: &Path, recipe: &str, make: impl FnOnce() -> Result<()>) -> Result<()> {
    let made = dir.join("made-by");
    if fs::read_to_string(&made).is_ok_and(|text| text == recipe) {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    let _ = fs::remove_file(&made);
    make()?;
    fs::write(made, recipe)?;
    Ok(())
}

/// The programs that make and run the machine, installed where we may.
fn tools(place: &Place) -> Result<()> {
    const NEEDS: &[(&str, &str)] = &[("qemu-system-x86_64", "qemu-system-x86"), ("cpio", "cpio")];
    let missing = || -> Vec<&str> {
        let absent = |(program, _): &&(&str, &str)| which(program).is_none();
        NEEDS.iter().filter(absent).map(|(_, p)| *p).collect()
    };
    ensure!(
        which("apt-get").is_some() && which("dpkg-deb").is_some(),
        "test-rdma takes a kernel and UCX from Debian's or Ubuntu's packages: it needs apt-get and dpkg-deb"
    );
    let packages = missing();
    if packages.is_empty() {
        return Ok(());
    }
    let words = packages.join(" ");
    ensure!(
        system::is_root(place)?,
        "missing on this system: {words}. As root: apt-get install -y {words}"
    );
    run(command(place, "apt-get").args(["update", "-qq"]))?;
    run(command(place, "apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(&packages))?;
    ensure!(missing().is_empty(), "{words} did not bring the programs");
    Ok(())
}

/// Builds the binaries and returns where each is.
fn binaries(place: &Place, profile: &str) -> Result<BTreeMap<&'static str, PathBuf>> {
    let build = |args: &[&str]| -> Result<String> {
        let mut cargo = cargo(place);
        cargo.args(args);
        cargo.args(["--locked", "--profile", profile, "--message-format", "json"]);
        output(&mut cargo)
    };
    let mut lines = String::new();
    let mut tests = vec!["test", "--no-run", "-p", "connex-rs"];
    for (_, _, target) in BINARIES
        .iter()
        .filter(|(_, package, _)| *package == "connex-rs")
    {
        tests.extend(["--test", *target]);
    }
    lines += &build(&tests)?;
    lines += &build(&["build", "-p", "cxrma", "--bin", "cxrma"])?;
    let mut found = BTreeMap::new();
    for line in lines.lines() {
        let message: serde_json::Value = serde_json::from_str(line)?;
        let (Some(file), Some(target)) = (
            message["executable"].as_str(),
            message["target"]["name"].as_str(),
        ) else {
            continue;
        };
        if let Some((name, ..)) = BINARIES.iter().find(|(_, _, t)| *t == target) {
            found.insert(*name, PathBuf::from(file));
        }
    }
    for (name, _, target) in BINARIES {
        ensure!(found.contains_key(name), "cargo built no {target}");
    }
    Ok(found)
}

/// What the machine has as its root, under the writable layer.
enum Root {
    /// This system's, with the image's extra files over it.
    System,
    /// One of its own. This project's files are shared with it.
    Suite(PathBuf),
}

/// One run of the virtual machine.
struct Machine<'a> {
    image: &'a Path,
    root: Root,
    args: &'a Args,
}

impl Machine<'_> {
    /// Boots it, runs the shell commands `job` in it with their output here, and ends it.
    fn run(&self, place: &Place, job: &str) -> Result<()> {
        let dir = self.image.join(format!("job-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let ended = self.boot(place, job, &dir);
        let status = fs::read_to_string(dir.join("status"));
        let console = fs::read(dir.join("console")).unwrap_or_default();
        let console = String::from_utf8_lossy(&console).into_owned();
        let _ = fs::remove_dir_all(&dir);
        if self.args.console {
            println!("{console}");
        }
        let tail: Vec<&str> = console.lines().rev().take(15).collect();
        let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
        match (ended?, status) {
            (_, Ok(status)) if status.trim() == "0" => Ok(()),
            (_, Ok(status)) => bail!("the command in the machine ended with {}", status.trim()),
            (false, Err(_)) => bail!(
                "the machine was ended after {} s; its console:\n{tail}",
                self.args.timeout
            ),
            (true, Err(_)) => bail!("the machine ended without a status; its console:\n{tail}"),
        }
    }

    /// Whether it ended by itself.
    fn boot(&self, place: &Place, job: &str, dir: &Path) -> Result<bool> {
        fs::write(dir.join("guest.sh"), GUEST)?;
        fs::write(dir.join("command"), job)?;
        let mut qemu = self.qemu(place, dir)?;
        let mut child = qemu.spawn().context("cannot start qemu-system-x86_64")?;
        let end = Instant::now() + Duration::from_secs(self.args.timeout);
        let mut shown = Tail::new(dir.join("output"));
        loop {
            let over = child.try_wait()?.is_some();
            shown.copy()?;
            if over {
                return Ok(true);
            }
            if Instant::now() >= end {
                child.kill()?;
                child.wait()?;
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn qemu(&self, place: &Place, dir: &Path) -> Result<Command> {
        let path = |path: PathBuf| -> Result<String> {
            let text = path.to_str().context("a path that is not UTF-8")?;
            // A comma ends a value in qemu's options.
            Ok(text.replace(',', ",,"))
        };
        let share = |path: &str, tag: &str, more: &str| {
            format!("local,path={path},mount_tag={tag},security_model=none,multidevs=remap{more}")
        };
        let job = path(dir.to_path_buf())?;
        let (root, extra) = match &self.root {
            Root::System => (path("/".into())?, self.image.join("extra")),
            Root::Suite(root) => (path(root.clone())?, dir.join("nothing")),
        };
        fs::create_dir_all(dir.join("nothing"))?;
        let extra = path(extra)?;
        let mut qemu = command(place, "qemu-system-x86_64");
        qemu.args("-nodefaults -no-user-config -display none -no-reboot -machine q35 -cpu max".split(' '))
            .args(["-accel", "tcg,thread=multi", "-m", "2048"])
            .args(["-smp", &self.args.cpus.to_string()])
            .arg("-kernel")
            .arg(self.image.join("vmlinuz"))
            .arg("-initrd")
            .arg(self.image.join("initramfs.gz"))
            .args([
                "-append",
                "console=ttyS0 panic=-1 reboot=t,f mitigations=off nokaslr apparmor=0 audit=0 tsc=reliable \
                 no_timer_check cryptomgr.notests quiet loglevel=4",
            ])
            .args(["-serial", &format!("file:{job}/console")])
            .args(["-device", "virtio-serial-pci"])
            .args(["-chardev", &format!("file,id=o,path={job}/output")])
            .args(["-device", "virtserialport,chardev=o,name=out"])
            .args(["-virtfs", &share(&root, "root", ",readonly=on")])
            .args(["-virtfs", &share(&extra, "extra", ",readonly=on")])
            .args(["-virtfs", &share(&job, "job", "")]);
        // The guest mounts each at its own path; a target folder within the project comes after it.
        let mut places = String::new();
        if matches!(self.root, Root::Suite(_)) {
            for (tag, at) in [("project", &place.root), ("target", &place.target)] {
                qemu.args(["-virtfs", &share(&path(at.clone())?, tag, ",readonly=on")]);
                places += &format!("{tag} {}\n", at.display());
            }
        }
        fs::write(dir.join("shares"), places)?;
        Ok(qemu)
    }
}

/// Copies a file that grows to standard output.
struct Tail {
    path: PathBuf,
    file: Option<File>,
}

impl Tail {
    fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    fn copy(&mut self) -> Result<()> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        if let Some(file) = &mut self.file {
            std::io::copy(file, &mut std::io::stdout())?;
        }
        Ok(())
    }
}

/// A path as one word of the shell.
fn quoted(path: &Path) -> Result<String> {
    let text = path.to_str().context("a path that is not UTF-8")?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}
