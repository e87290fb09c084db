//! A whole engine on the built-in transport that hears arbitrary bytes: from strangers, from a peer with a link, from one with
//! a channel, from one without the secret, and as datagrams. Nothing of it may end the process, reach memory outside the region or
//! disturb another peer.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, UdpSocket};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use connex_fuzz::input::{Input, framed};
use connex_fuzz::world::{World, assert_no_leak, guarded, hello_to};
use connex_rs::wire::{self, ChannelVerb, Control, Message};
use connex_rs::{Engine, TransportChoice};
use libfuzzer_sys::fuzz_target;

static WORLD: LazyLock<World> = LazyLock::new(|| World::new(TransportChoice::Tcp));
static GUARDED: LazyLock<Engine> = LazyLock::new(guarded);
static DATAGRAMS: LazyLock<UdpSocket> =
    LazyLock::new(|| UdpSocket::bind("127.0.0.1:0").expect("a socket"));
static RUNS: AtomicU64 = AtomicU64::new(1);

fn connect(engine: &Engine) -> Option<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", engine.port())).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.set_nodelay(true).ok()?;
    Some(stream)
}

/// Reads a frame: its head and body.
fn hear(stream: &mut TcpStream) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut prefix = [0; 8];
    stream.read_exact(&mut prefix).ok()?;
    let mut head = vec![0; usize::from(prefix[2])];
    let mut body = vec![0; u32::from_le_bytes(prefix[4..].try_into().ok()?) as usize];
    stream.read_exact(&mut head).ok()?;
    stream.read_exact(&mut body).ok()?;
    Some((head, body))
}

fn say(stream: &mut TcpStream, message: &Message, body: &[u8]) -> Option<()> {
    let frame = framed(wire::encode(message).as_slice(), body);
    stream.write_all(&frame).ok()
}

/// A link as any insider could have it.
fn linked(world: &World, link: u64) -> Option<TcpStream> {
    let mut stream = connect(world.victim())?;
    let (head, body) = world.hello(link);
    stream.write_all(&framed(&head, &body)).ok()?;
    let (head, _) = hear(&mut stream)?;
    if !matches!(wire::decode(&head), Ok(Message::Welcome(_))) {
        return None;
    }
    say(&mut stream, &Message::Confirm { link }, &[])?;
    Some(stream)
}

/// A link with a channel on it, and where its ring is.
fn with_channel(world: &World, link: u64) -> Option<(TcpStream, u64)> {
    let mut stream = linked(world, link)?;
    let open = ChannelVerb::Open {
        slots: 4,
        slot_bytes: 256,
    };
    let control = Control {
        channel: 1,
        verb: open,
    };
    say(&mut stream, &Message::Channel(control), b"fuzz")?;
    loop {
        let (head, _) = hear(&mut stream)?;
        if let Ok(Message::Channel(Control {
            verb: ChannelVerb::Accept { ring },
            ..
        })) = wire::decode(&head)
        {
            return Some((stream, ring));
        }
    }
}

/// Somebody without the secret, who heard the challenge.
fn challenged(link: u64) -> Option<TcpStream> {
    let mut stream = connect(&GUARDED)?;
    let (head, body) = hello_to(&GUARDED, link);
    stream.write_all(&framed(&head, &body)).ok()?;
    hear(&mut stream)?;
    Some(stream)
}

fuzz_target!(|data: &[u8]| {
    let world = &*WORLD;
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    if run == 1 {
        // Otherwise most of this would test nothing.
        assert!(linked(world, u64::MAX).is_some(), "no link");
        assert!(with_channel(world, u64::MAX - 1).is_some(), "no channel");
    }
    let mut input = Input::new(data);
    let mut base = world.region();
    let stream = match input.byte() % 8 {
        0 => {
            let to = ("127.0.0.1", world.victim().port());
            let _ = DATAGRAMS.send_to(input.rest(), to);
            None
        }
        1 => connect(world.victim()),
        2 => challenged(run),
        3 | 4 => with_channel(world, run).map(|(stream, ring)| {
            base = ring;
            stream
        }),
        _ => linked(world, run),
    };
    if let Some(mut stream) = stream {
        while !input.rest().is_empty() {
            let bytes = if input.byte().is_multiple_of(4) {
                let len = usize::from(input.byte());
                input.take(len)
            } else {
                let (head, body) = input.frame(base);
                framed(&head, &body)
            };
            if stream.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        // Until the engine has read all of it and closed, so that what it covers counts for this input.
        let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
        let mut answers = Vec::new();
        let _ = stream.read_to_end(&mut answers);
        assert_no_leak(&answers);
    }
    world.look(run);
    assert_eq!(GUARDED.stats().live_peers, 0, "without the secret");
});
