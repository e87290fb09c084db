//! A plain pair of sockets: a request of 16 bytes is answered with n bytes, or is followed by n bytes that are
//! acknowledged with one. Simple and good: one connection, no delay, whole buffers per call.

use std::io::{BufRead as _, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};

use crate::memory::{HOT, Pages};
use crate::timing::{Repeat, Row};

/// Contents of the server's memory.
const SERVED: u8 = 17;
/// Contents that clients write.
const WRITTEN: u8 = 99;
/// The longest transfer.
const LONGEST: u64 = 1 << 30;

/// How both sides behave.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Mode {
    /// Spins on sockets that do not block.
    polling: bool,
    /// Receives into a small hot buffer and copies from there.
    staged: bool,
}

impl Mode {
    const ALL: [Self; 4] = [
        Self {
            polling: false,
            staged: false,
        },
        Self {
            polling: false,
            staged: true,
        },
        Self {
            polling: true,
            staged: false,
        },
        Self {
            polling: true,
            staged: true,
        },
    ];

    fn name(self) -> String {
        let wait = if self.polling { "polling" } else { "blocking" };
        let place = if self.staged { "staged" } else { "aligned" };
        format!("{wait}, {place}")
    }
}

const READ: u8 = 1;
const WRITE: u8 = 2;
const CHECK: u8 = 3;

/// 16 bytes: what, polling, staged, padding, length.
fn request(what: u8, mode: Mode, len: usize) -> [u8; 16] {
    let mut request = [0; 16];
    request[..3].copy_from_slice(&[what, mode.polling.into(), mode.staged.into()]);
    request[8..].copy_from_slice(&(len as u64).to_le_bytes());
    request
}

struct Side {
    socket: TcpStream,
    hot: Pages,
}

impl Side {
    fn new(socket: TcpStream) -> std::io::Result<Self> {
        socket.set_nodelay(true)?;
        Ok(Self {
            socket,
            hot: Pages::new(HOT),
        })
    }

    fn set_polling(&self, polling: bool) -> std::io::Result<()> {
        self.socket.set_nonblocking(polling)
    }

    /// Sends all of it; spins where the socket does not block.
    fn send(&self, mut bytes: &[u8]) -> anyhow::Result<()> {
        while !bytes.is_empty() {
            match (&self.socket).write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Receives what fits; 0 at the end of the stream.
    fn receive_some(socket: &TcpStream, into: &mut [u8]) -> anyhow::Result<usize> {
        let mut socket = socket;
        loop {
            match socket.read(into) {
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Receives all of it; false if the stream ended before the first byte.
    fn receive(&mut self, into: &mut [u8], staged: bool) -> anyhow::Result<bool> {
        let mut done = 0;
        while done < into.len() {
            let n = if staged {
                let most = HOT.min(into.len() - done);
                let hot = &mut self.hot.get_mut()[..most];
                let n = Self::receive_some(&self.socket, hot)?;
                into[done..done + n].copy_from_slice(&hot[..n]);
                n
            } else {
                Self::receive_some(&self.socket, &mut into[done..])?
            };
            if n == 0 {
                ensure!(done == 0, "the stream ended in the middle");
                return Ok(false);
            }
            done += n;
        }
        Ok(true)
    }
}

/// The server's process: prints its port, serves one client.
pub(crate) fn serve() -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?.port());
    let mut side = Side::new(listener.accept()?.0)?;
    let (mut source, mut place) = (Pages::new(0), Pages::new(0));
    let mut head = [0; 16];
    while side.receive(&mut head, false)? {
        let len = u64::from_le_bytes(head[8..].try_into()?);
        ensure!(len <= LONGEST, "a request of {len} bytes");
        let len = usize::try_from(len)?;
        if source.get().len() < len {
            (source, place) = (Pages::new(len), Pages::new(len));
            source.fill(SERVED);
        }
        side.set_polling(head[1] == 1)?;
        match head[0] {
            READ => side.send(&source.get()[..len])?,
            WRITE => {
                ensure!(
                    side.receive(&mut place.get_mut()[..len], head[2] == 1)?,
                    "the client went away"
                );
                side.send(&[1])?;
            }
            CHECK => {
                let good = place.holds(len, WRITTEN);
                place.get_mut().fill(0);
                side.send(&[good.into()])?;
            }
            other => bail!("request {other} is unknown"),
        }
    }
    Ok(())
}

/// Measures all sizes in all modes.
///
/// # Errors
/// If a process or a socket fails, or bytes differ.
pub(crate) fn measure(sizes: &[usize], repeat: Repeat) -> anyhow::Result<Vec<Row>> {
    let mut server = Command::new(std::env::current_exe()?)
        .arg("serve-sockets")
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the server's process")?;
    let rows = server
        .stdout
        .take()
        .context("no output")
        .and_then(|stdout| {
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line)?;
            let port: u16 = line
                .trim()
                .parse()
                .context("the server did not say its port")?;
            client(
                TcpStream::connect((Ipv4Addr::LOCALHOST, port))?,
                sizes,
                repeat,
            )
        });
    if rows.is_err() {
        let _ = server.kill();
    }
    // Its client is gone: it ends.
    server.wait()?;
    rows
}

fn client(socket: TcpStream, sizes: &[usize], repeat: Repeat) -> anyhow::Result<Vec<Row>> {
    let mut side = Side::new(socket)?;
    let mut rows = Vec::new();
    for &bytes in sizes {
        let (mut source, mut place) = (Pages::new(bytes), Pages::new(bytes));
        source.fill(WRITTEN);
        for mode in Mode::ALL {
            side.set_polling(mode.polling)?;
            place.get_mut().fill(0);
            rows.push(repeat.row("read", bytes, &mode.name(), || {
                side.send(&request(READ, mode, bytes))?;
                ensure!(
                    side.receive(place.get_mut(), mode.staged)?,
                    "the server went away"
                );
                Ok(())
            })?);
            // The server's contents depend on the offset alone, whatever it served before.
            ensure!(place.holds(bytes, SERVED), "{bytes} bytes were read wrong");
            rows.push(repeat.row("write", bytes, &mode.name(), || {
                side.send(&request(WRITE, mode, bytes))?;
                side.send(source.get())?;
                ensure!(side.receive(&mut [0], false)?, "the server went away");
                Ok(())
            })?);
            side.send(&request(CHECK, mode, bytes))?;
            let mut good = [0];
            ensure!(
                side.receive(&mut good, false)? && good == [1],
                "{bytes} bytes were written wrong"
            );
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_ends_in_the_middle_is_an_error_and_at_a_boundary_an_end() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let client = TcpStream::connect(listener.local_addr().expect("addr")).expect("connect");
        let mut side = Side::new(listener.accept().expect("accept").0).expect("side");
        Side::new(client)
            .expect("side")
            .send(&[7; 10])
            .expect("send");
        let mut four = [0; 4];
        assert!(
            side.receive(&mut four, true).expect("four")
                && side.receive(&mut four, false).expect("four more")
        );
        assert_eq!(four, [7; 4]);
        assert!(side.receive(&mut four, false).is_err());
        assert!(!side.receive(&mut four, false).expect("the end"));
    }
}
