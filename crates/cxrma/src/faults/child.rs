//! Processes that are made to suffer.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::Context as _;
use connex_rs::now_ns;
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::EngineArgs;
use crate::control::Peer;

/// How long a process may take to start: one of many GB has to touch them.
const START: Duration = Duration::from_secs(120);

/// What a process of small engines is started with.
#[derive(Clone, Copy)]
pub(super) struct Role<'a> {
    /// Address of all of them.
    pub(super) ip: &'a str,
    /// How they are started.
    pub(super) engine: &'a EngineArgs,
    /// The stage of their identities; replicas count from 0.
    pub(super) stage: u32,
    /// How many.
    pub(super) count: u32,
    /// Their heartbeats, 0 for none.
    pub(super) heartbeat_ms: u64,
    /// Memory that the process touches.
    pub(super) ballast: usize,
    /// After which time without progress their sentinel speaks, 0 for never.
    pub(super) stall_ms: u64,
}

/// A process of small engines. Killed when dropped.
pub(super) struct Victim {
    child: Child,
    pid: Pid,
    /// Open while it is to live.
    _stdin: Option<ChildStdin>,
    /// What it says: its engines, and then that its sentinel has been started.
    lines: Receiver<String>,
    listener: Option<std::thread::JoinHandle<()>>,
    /// When it was started, CLOCK_MONOTONIC nanoseconds.
    pub(super) spawned_ns: u64,
}

impl Victim {
    /// Starts the process; `port` 0 for any.
    pub(super) fn spawn(role: &Role<'_>, port: u16) -> anyhow::Result<Self> {
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command
            .args(["peers", "--ip", role.ip])
            .args(role.engine.to_args());
        for (name, value) in [
            ("--stage", u64::from(role.stage)),
            ("--count", role.count.into()),
            ("--heartbeat-ms", role.heartbeat_ms),
            ("--port", port.into()),
            ("--ballast", role.ballast as u64),
            ("--stall-ms", role.stall_ms),
        ] {
            command.arg(name).arg(value.to_string());
        }
        let spawned_ns = now_ns();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process")?;
        let pid = Pid::from_child(&child);
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("a process without output")?;
        let (said, lines) = channel();
        let listener = std::thread::spawn(move || {
            // Nothing is said by a process that failed; the receiver then sees a closed channel.
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = said.send(line);
            }
        });
        Ok(Self {
            child,
            pid,
            _stdin: stdin,
            lines,
            listener: Some(listener),
            spawned_ns,
        })
    }

    /// Its engines, once they are up.
    pub(super) fn peers(&self) -> anyhow::Result<Vec<Peer>> {
        Ok(serde_json::from_str(&self.line()?)?)
    }

    /// Waits until its sentinel watches, if it is to have one. Call it once, after [`peers`](Self::peers).
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        self.line().map(drop)
    }

    fn line(&self) -> anyhow::Result<String> {
        self.lines
            .recv_timeout(START)
            .context("a process did not start; if it said why, it is above")
    }

    /// Sends SIGKILL; returns the time just before.
    pub(super) fn kill(&self) -> anyhow::Result<u64> {
        let before = now_ns();
        kill_process(self.pid, Signal::KILL).context("cannot kill a process")?;
        Ok(before)
    }

    /// Sends SIGSTOP; returns the time just before.
    pub(super) fn stop(&self) -> anyhow::Result<u64> {
        let before = now_ns();
        kill_process(self.pid, Signal::STOP).context("cannot stop a process")?;
        Ok(before)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}
