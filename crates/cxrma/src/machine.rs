//! What this process and this machine are like.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

/// The machine that figures come from.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct Machine {
    /// Name of the processor.
    pub(crate) cpu: String,
    /// Processors that this process may use.
    pub(crate) cpus: usize,
    /// Memory, GiB.
    pub(crate) memory_gib: f64,
    /// Release of the kernel.
    pub(crate) kernel: String,
    /// Whether the program was built without optimisation: its figures then mean little.
    pub(crate) debug_build: bool,
}

impl Machine {
    /// This one.
    pub(crate) fn here() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let value = |text: &str, name: &str| {
            text.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
        };
        let kib =
            value(&meminfo, "MemTotal").and_then(|v| v.split(' ').next()?.parse::<f64>().ok());
        Self {
            cpu: value(&cpuinfo, "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_gib: kib.map_or(0.0, |kib| (kib / 104_857.6).round() / 10.0),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            debug_build: cfg!(debug_assertions),
        }
    }
}

/// Lets this process open as many files as it is allowed to: many engines need many.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // A refusal shows later, as an error that names the limit.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

/// Processor time of all threads of this process so far.
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Resident memory of this process in bytes.
pub(crate) fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm
        .split(' ')
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Open files of this process.
pub(crate) fn descriptors() -> usize {
    // One of them is the directory that is being read.
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1))
}

/// Threads of this process.
pub(crate) fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}
