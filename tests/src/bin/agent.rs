//! Runs engines and does what standard input says: one JSON order a line, one JSON answer a line, in any order.
#![allow(clippy::print_stdout, reason = "the answers go there")]

use std::collections::HashMap;
use std::io::BufRead;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use connex_rs::{Config, Engine, EventKind, LogicalId, Recipient, TransportChoice};
use connex_tests::streams::{self, Plan};
use serde_json::{Value, json};

#[derive(Default)]
struct Agent {
    engine: RwLock<Option<Engine>>,
    /// Engines beside the first.
    crowd: Mutex<Vec<Engine>>,
    /// Lengths of the buffers: they live as long as the process.
    buffers: Mutex<HashMap<usize, usize>>,
}

fn main() {
    let agent = Arc::new(Agent::default());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let order: Value = serde_json::from_str(&line).expect("an order");
        let agent = agent.clone();
        std::thread::spawn(move || {
            let answer = agent
                .carry_out(&order)
                .unwrap_or_else(|error| json!({"error": error}));
            println!("{}", json!({"id": order["id"], "answer": answer}));
        });
    }
}

fn uint(order: &Value, name: &str) -> Result<u64, String> {
    order[name]
        .as_u64()
        .ok_or_else(|| format!("{name} is missing in {order}"))
}

fn text<'a>(order: &'a Value, name: &str) -> Result<&'a str, String> {
    order[name]
        .as_str()
        .ok_or_else(|| format!("{name} is missing in {order}"))
}

fn time(order: &Value, name: &str) -> Option<Duration> {
    order[name].as_u64().map(Duration::from_millis)
}

fn config(order: &Value, stage: u32) -> Result<Config, String> {
    let id = LogicalId::new("lab", stage, 0, 0).map_err(|e| e.to_string())?;
    let mut config = Config::new(id);
    config.listen_ip = text(order, "ip")?.into();
    config.port = order["port"].as_u64().unwrap_or(0) as u16;
    config.heartbeat = time(order, "heartbeat");
    config.heartbeat_timeout = time(order, "timeout");
    let transport = order["transport"].as_str().unwrap_or("tcp");
    config.transport = TransportChoice::parse(transport).map_err(|e| e.to_string())?;
    Ok(config)
}

/// Fills with a pattern that differs from block to block.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 4096);
    let block: Vec<u8> = (0..4091u64).map(|i| (i * 31 + seed * 7) as u8).collect();
    let mut n = seed;
    while bytes.len() < len {
        bytes.extend_from_slice(&n.to_le_bytes());
        bytes.extend_from_slice(&block);
        n += 1;
    }
    bytes.truncate(len);
    bytes
}

/// Poisons memory, waits, and says whether a byte changed.
fn changes(addr: usize, len: usize, time: Duration) -> bool {
    // SAFETY: a buffer of ours, which lives as long as the process; accessed by copies.
    unsafe { std::ptr::write_bytes(addr as *mut u8, 0xd1, len) };
    std::thread::sleep(time);
    let mut seen = vec![0; len];
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, seen.as_mut_ptr(), len) };
    seen.iter().any(|&byte| byte != 0xd1)
}

impl Agent {
    fn engine(&self) -> Result<Engine, String> {
        let engine = self.engine.read().map_err(|e| e.to_string())?;
        engine.clone().ok_or_else(|| "no engine".to_owned())
    }

    fn carry_out(&self, order: &Value) -> Result<Value, String> {
        match text(order, "do")? {
            "start" => {
                let config = config(order, uint(order, "stage")? as u32)?;
                let engine = Engine::start(config).map_err(|e| e.to_string())?;
                let url = engine.local_url().to_owned();
                *self.engine.write().map_err(|e| e.to_string())? = Some(engine);
                Ok(json!({"url": url}))
            }
            "buffer" => self.buffer(order),
            "holds" => {
                let (addr, len) = (uint(order, "addr")? as usize, uint(order, "len")? as usize);
                let mut seen = vec![0; len];
                // SAFETY: a buffer of ours, which lives as long as the process.
                unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, seen.as_mut_ptr(), len) };
                Ok(json!(seen == pattern(len, uint(order, "seed")?)))
            }
            "poison" => {
                let (addr, len) = (uint(order, "addr")? as usize, uint(order, "len")? as usize);
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(addr as *mut u8, 0xd1, len) };
                Ok(Value::Null)
            }
            what @ ("read" | "write" | "signal") => self.transfer(what, order),
            "event" => {
                Ok(self
                    .engine()?
                    .wait_event(time(order, "ms"))
                    .map_or(Value::Null, |event| {
                        let peer = event.peer.to_string();
                        match event.kind {
                            EventKind::Failed {
                                status,
                                reason,
                                established,
                                ..
                            } => json!(["failed", peer, status, reason, established]),
                            kind => json!([kind.name(), peer]),
                        }
                    }))
            }
            "connect" => {
                let result = self.engine()?.connect(text(order, "url")?);
                result.map(|()| Value::Null).map_err(|e| e.to_string())
            }
            "send" => {
                let to = Recipient::Url(text(order, "url")?);
                let bytes = vec![uint(order, "byte")? as u8; uint(order, "len")? as usize];
                let result = self.engine()?.send_msg(to, bytes, time(order, "ms"));
                Ok(json!({"code": result.map_or_else(|e| e.code(), |()| 0)}))
            }
            "recv" => Ok(self
                .engine()?
                .recv_msg(time(order, "ms"))
                .map_or(Value::Null, |(from, bytes)| {
                    json!([from.to_string(), bytes.len(), bytes.first()])
                })),
            "stats" => {
                let stats = self.engine()?.stats();
                Ok(stats
                    .counters()
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), json!(value)))
                    .collect::<serde_json::Map<_, _>>()
                    .into())
            }
            "paths" => {
                let paths = self.engine()?.stats().paths;
                Ok(paths.into_iter().map(|path| path.path).collect())
            }
            "crowd" => self.crowd(order),
            "ring" => {
                // Lives as long as the process.
                let addr = self
                    .engine()?
                    .allocate_managed_buffer(Plan::of(order)?.bytes());
                addr.map(|addr| json!({"addr": addr}))
                    .map_err(|e| e.to_string())
            }
            "consume" => {
                let (url, ring) = (text(order, "url")?, uint(order, "ring")? as usize);
                // SAFETY: the ring of this plan, which lives as long as the engine.
                unsafe { streams::consume(&self.engine()?, url, ring, &Plan::of(order)?) }
                    .map(|()| Value::Null)
            }
            "produce" => {
                let (url, ring) = (text(order, "url")?, uint(order, "ring")?);
                streams::produce(&self.engine()?, url, ring, &Plan::of(order)?)
                    .map(|()| Value::Null)
            }
            "close" => {
                self.engine()?.close();
                Ok(Value::Null)
            }
            other => Err(format!("cannot {other}")),
        }
    }

    fn buffer(&self, order: &Value) -> Result<Value, String> {
        let len = uint(order, "len")? as usize;
        let bytes = pattern(len, uint(order, "seed")?).leak();
        let addr = bytes.as_mut_ptr() as usize;
        if order["plain"] != true {
            // SAFETY: leaked: it lives as long as the process.
            unsafe { self.engine()?.register_memory(addr, len) }.map_err(|e| e.to_string())?;
        }
        self.buffers
            .lock()
            .map_err(|e| e.to_string())?
            .insert(addr, len);
        Ok(json!({"addr": addr}))
    }

    fn transfer(&self, what: &str, order: &Value) -> Result<Value, String> {
        let (url, ms) = (text(order, "url")?, time(order, "ms"));
        let (local, remote) = (uint(order, "local")? as usize, uint(order, "remote")?);
        let len = uint(order, "len")? as usize;
        if self
            .buffers
            .lock()
            .map_err(|e| e.to_string())?
            .get(&local)
            .is_none_or(|&l| l < len)
        {
            return Err("not a buffer".into());
        }
        let note = order["note"].as_u64().unwrap_or(8) as usize;
        let engine = self.engine()?;
        let start = Instant::now();
        // SAFETY: a buffer of ours, checked above, which lives as long as the process.
        let result = unsafe {
            match what {
                "read" => engine.read(url, local, remote, len, ms),
                "write" => engine.write(url, local, remote, len, ms),
                _ => engine
                    .put_signal(url, local, remote, len, vec![7; note], ms)
                    .and_then(|signal| signal.wait(None).unwrap_or(Ok(()))),
            }
        };
        let took = start.elapsed().as_millis() as u64;
        let (code, said) = match result {
            Ok(()) => (0, String::new()),
            Err(error) => (error.code(), error.to_string()),
        };
        let late = what == "read" && code != 0 && changes(local, len, Duration::from_secs(2));
        Ok(json!({"code": code, "said": said, "took": took, "late": late}))
    }

    /// Starts many engines that all connect at once; answers when all are up.
    fn crowd(&self, order: &Value) -> Result<Value, String> {
        let (first, count) = (uint(order, "first")? as u32, uint(order, "count")? as u32);
        let engines: Vec<Engine> = (first..first + count)
            .map(|stage| Engine::start(config(order, stage)?).map_err(|e| e.to_string()))
            .collect::<Result<_, _>>()?;
        for engine in &engines {
            engine
                .connect(text(order, "url")?)
                .map_err(|e| e.to_string())?;
        }
        let mut failed = Vec::new();
        for engine in &engines {
            for wanted in ["joined", "up"] {
                let event = engine.wait_event(Some(Duration::from_secs(60)));
                match event {
                    Some(event) if event.kind.name() == wanted => {}
                    other => failed.push(format!("{other:?}")),
                }
            }
        }
        self.crowd
            .lock()
            .map_err(|e| e.to_string())?
            .extend(engines);
        Ok(json!({"failed": failed}))
    }
}
