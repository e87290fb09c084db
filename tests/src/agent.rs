//! A process that runs engines and does what it is told, line by line.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

/// Longer than anything takes on a loaded machine.
const LONG: Duration = Duration::from_secs(120);

type Waiting = Arc<Mutex<HashMap<u64, Sender<Value>>>>;

/// The agent's process. Killed when dropped.
pub struct Agent {
    child: Child,
    stdin: Mutex<ChildStdin>,
    waiting: Waiting,
    next: AtomicU64,
    losses: AtomicU64,
}

/// An answer that is still to come.
pub struct Pending(Receiver<Value>);

impl Pending {
    /// Waits for the answer.
    ///
    /// # Panics
    /// If none comes.
    pub fn wait(self) -> Value {
        self.0.recv_timeout(LONG).expect("the agent answers")
    }

    /// Waits for the answer to an order that takes its time.
    ///
    /// # Panics
    /// If none comes.
    pub fn wait_for(self, time: Duration) -> Value {
        self.0.recv_timeout(time).expect("the agent answers")
    }

    /// Waits for the answer of an agent that may be dead: `None` then.
    pub fn wait_or_dead(self) -> Option<Value> {
        self.0.recv_timeout(LONG).ok()
    }
}

impl Agent {
    /// Starts an agent; `wrapper` is what runs it, for example `ip netns exec NAME`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(program: &str, wrapper: &[&str]) -> Self {
        let mut words = wrapper.to_vec();
        words.push(program);
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {words:?}: {e}"));
        let stdin = child.stdin.take().expect("piped");
        let stdout = child.stdout.take().expect("piped");
        let waiting = Waiting::default();
        std::thread::spawn({
            let waiting = waiting.clone();
            move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    let answer: Value = serde_json::from_str(&line).expect("the agent speaks JSON");
                    let id = answer["id"].as_u64().expect("an id");
                    if let Some(to) = lock(&waiting).remove(&id) {
                        let _ = to.send(answer["answer"].clone());
                    }
                }
                // Dead: nobody waits any longer.
                lock(&waiting).clear();
            }
        });
        Self {
            child,
            stdin: Mutex::new(stdin),
            waiting,
            next: AtomicU64::new(0),
            losses: AtomicU64::new(0),
        }
    }

    /// The process id; where the wrapper ends in `exec` it is the agent's own.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives an order.
    pub fn post(&self, mut order: Value) -> Pending {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        order["id"] = json!(id);
        let (to, from) = channel();
        lock(&self.waiting).insert(id, to);
        let mut stdin = self.stdin.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(stdin, "{order}").and_then(|()| stdin.flush());
        Pending(from)
    }

    /// Gives an order and waits for the answer.
    ///
    /// # Panics
    /// If the order failed in the agent, or the agent is dead.
    pub fn call(&self, order: Value) -> Value {
        let answer = self.post(order.clone()).wait();
        assert!(answer["error"].is_null(), "{order}: {answer}");
        answer
    }

    /// Starts the agent's engine; returns its URL.
    pub fn start(&self, config: Value) -> String {
        let mut order = config;
        order["do"] = json!("start");
        text(&self.call(order)["url"])
    }

    /// The next event, as `["up", peer]` or `["failed", peer, status, reason, established]`; null after `ms`.
    pub fn event(&self, ms: u64) -> Value {
        self.call(json!({"do": "event", "ms": ms}))
    }

    /// Expects `joined` and `up`.
    ///
    /// # Panics
    /// If something else comes.
    pub fn expect_up(&self, what: &str) {
        let joined = self.event(60_000);
        assert_eq!(joined[0], "joined", "{what}: {joined}");
        let up = self.event(60_000);
        assert_eq!(up[0], "up", "{what}: {up}");
    }

    /// Expects `failed` of an established link; returns its status and reason.
    ///
    /// # Panics
    /// If something else comes, or its words break the rule for suspicions.
    pub fn expect_failed(&self, what: &str) -> (i64, String) {
        let failed = self.event(60_000);
        assert_eq!(failed[0], "failed", "{what}: {failed}");
        assert_eq!(failed[4], true, "{what}: {failed}");
        let (status, reason) = (failed[2].as_i64().expect("a status"), text(&failed[3]));
        assert!([-2, -3].contains(&status), "{what}: {failed}");
        assert_eq!(reason.contains("timeout"), status == -3, "{what}: {failed}");
        let own = reason.starts_with(|c: char| c.is_ascii_lowercase());
        assert!(own, "{what}: not our own sentence: {failed}");
        self.losses.fetch_add(1, Ordering::Relaxed);
        (status, reason)
    }

    /// How many lost links were expected so far, by [`expect_failed`](Self::expect_failed).
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// Expects that nothing happens for a while.
    ///
    /// # Panics
    /// If an event comes.
    pub fn expect_quiet(&self, ms: u64, what: &str) {
        let event = self.event(ms);
        assert!(event.is_null(), "{what}: {event}");
    }

    /// A buffer with the pattern of `seed`, registered unless `plain`; returns its address.
    pub fn buffer(&self, len: usize, seed: u64, plain: bool) -> u64 {
        number(
            &self.call(json!({"do": "buffer", "len": len, "seed": seed, "plain": plain}))["addr"],
        )
    }

    /// Whether a buffer holds the pattern of `seed`.
    pub fn holds(&self, addr: u64, len: usize, seed: u64) -> bool {
        self.call(json!({"do": "holds", "addr": addr, "len": len, "seed": seed})) == true
    }

    /// A blocking read; its code.
    pub fn read(&self, url: &str, dst: u64, src: u64, len: usize, ms: Option<u64>) -> i64 {
        self.transfer("read", url, dst, src, len, ms).wait()["code"]
            .as_i64()
            .expect("a code")
    }

    /// A transfer (`read`, `write`, `signal`), not waiting. A failed one poisons its local memory and watches it for 2 s
    /// (I2): the answer's `late` is then true if a byte landed.
    pub fn transfer(
        &self,
        what: &str,
        url: &str,
        local: u64,
        remote: u64,
        len: usize,
        ms: Option<u64>,
    ) -> Pending {
        self.post(json!({
            "do": what, "url": url, "local": local, "remote": remote, "len": len, "ms": ms,
        }))
    }

    /// One counter.
    pub fn stat(&self, name: &str) -> u64 {
        number(&self.call(json!({"do": "stats"}))[name])
    }

    /// What carries the data of each of its peers.
    pub fn paths(&self) -> Vec<String> {
        let paths = self.call(json!({"do": "paths"}));
        paths.as_array().expect("a list").iter().map(text).collect()
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child, which has not been waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Kills it and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The text of a value.
///
/// # Panics
/// If it is none.
pub fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
