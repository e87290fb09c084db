//! What the fuzzer begins with: valid inputs of every kind, made by the project's own encoders. They are committed under
//! `fuzz/seeds`; `cargo xtask fuzz` says when they are not what this makes.

use connex_rs::fuzzing;
use connex_rs::identity::{Host, LogicalId, PeerUrl};
use connex_rs::transport::tcp::uri_of;
use connex_rs::wire::{
    self, ChannelVerb, Control, GoodbyeCode, Greet, Greeting, Message, MsgPiece, Piece, RefusalCode,
};

use crate::input::{framed, life};
use crate::script::{BASE, Script};
use crate::world::{self, hello};

/// Each with its target and name.
pub fn all() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let mut add = |target, group: &str, list: Vec<(&'static str, Vec<u8>)>| {
        for (name, bytes) in list {
            let name = [group, name].join(if group.is_empty() { "" } else { "-" });
            seeds.push((target, name, bytes));
        }
    };
    let heads = messages().into_iter();
    let heads = heads.map(|(name, message)| (name, wire::encode(&message).as_slice().to_vec()));
    add("wire", "head", heads.collect());
    let bodies = greetings().into_iter();
    let bodies = bodies.map(|(name, greeting)| (name, greeting.encode()));
    add("wire", "greeting", bodies.collect());
    add("identity", "", identities());
    add("internals", "datagram", behind(0, fuzzing::datagrams()));
    add("internals", "step", behind(1, steps()));
    add("internals", "certificate", behind(2, certificates()));
    add("engine", "datagram", behind(0, fuzzing::datagrams()));
    add("engine", "", by_strangers());
    for (name, who, frames) in conversations() {
        let say = |script: Script, (message, body): &(Message, Vec<u8>)| {
            script.raw(&[1]).frame(*message, body)
        };
        let script = frames.iter().fold(Script::by(who), say);
        add("engine", "link", vec![(name, script.bytes())]);
        // Over UCX the kind of message is chosen first.
        let say = |script: Script, (message, body): &(Message, Vec<u8>)| {
            script.raw(&[1, 0]).frame(*message, body)
        };
        let script = frames.iter().fold(Script::by(LINKED), say);
        add("ucx", "link", vec![(name, script.bytes())]);
    }
    seeds
}

/// The first bytes of an engine's input: who speaks.
const STRANGER: u8 = 1;
const CHALLENGED: u8 = 2;
const WITH_CHANNEL: u8 = 3;
const LINKED: u8 = 5;

/// The same with a first byte, which says what the rest is.
fn behind(
    first: u8,
    list: impl IntoIterator<Item = (&'static str, Vec<u8>)>,
) -> Vec<(&'static str, Vec<u8>)> {
    let put = |(name, bytes): (_, Vec<u8>)| (name, [&[first], &bytes[..]].concat());
    list.into_iter().map(put).collect()
}

fn greet() -> Greet {
    Greet {
        link: 7,
        attempt: 1,
        incarnation: life(3),
        nonce: [9; 16],
        lost: None,
        closed: false,
    }
}

fn piece() -> Piece {
    Piece {
        req: 7,
        elem: 0,
        last: true,
        flag: false,
        addr: BASE,
        len: 16,
        offset: 0,
    }
}

/// One of every kind, and those with options with and without them.
fn messages() -> Vec<(&'static str, Message)> {
    let (req, elem, addr, len) = (7, 1, BASE, 4096);
    let channel = |verb| Message::Channel(Control { channel: 2, verb });
    let lost = Greet {
        lost: Some((true, 6)),
        closed: true,
        ..greet()
    };
    let flag = Piece {
        flag: true,
        ..piece()
    };
    let letter = MsgPiece {
        seq: 0,
        total: 5,
        offset: 0,
        signals: None,
    };
    let signal = MsgPiece {
        signals: Some(req),
        ..letter
    };
    vec![
        ("hello", Message::Hello(greet())),
        ("hello-again", Message::Hello(lost)),
        ("challenge", Message::Challenge { nonce: [9; 16] }),
        ("proof", Message::Proof { mac: [8; 32] }),
        ("welcome", Message::Welcome(greet())),
        (
            "refusal",
            Message::Refusal {
                why: RefusalCode::Superseded,
                by: life(4),
            },
        ),
        ("confirm", Message::Confirm { link: 7 }),
        (
            "goodbye",
            Message::Goodbye {
                why: GoodbyeCode::Superseded,
                by: life(4),
            },
        ),
        ("ping", Message::Ping { stamp: 1 << 40 }),
        ("pong", Message::Pong { stamp: 1 << 40 }),
        (
            "read",
            Message::Read {
                req,
                elem,
                addr,
                len,
            },
        ),
        (
            "data",
            Message::Data {
                req,
                elem,
                offset: 64,
            },
        ),
        ("write", Message::Write(piece())),
        ("write-flag", Message::Write(flag)),
        ("msg", Message::Msg(letter)),
        ("msg-signal", Message::Msg(signal)),
        (
            "done",
            Message::Done {
                req,
                code: -4,
                elem,
            },
        ),
        ("progress", Message::Progress { req, bytes: len }),
        ("credit", Message::Credit { limit: 4 << 20 }),
        ("key-ask", Message::KeyAsk { req, addr, len }),
        (
            "key-is",
            Message::KeyIs {
                req,
                base: addr,
                len,
                min: 1,
                ordered: false,
            },
        ),
        ("key-drop", Message::KeyDrop { base: addr }),
        ("key-dropped", Message::KeyDropped { base: addr }),
        (
            "channel-open",
            channel(ChannelVerb::Open {
                slots: 4,
                slot_bytes: 256,
            }),
        ),
        (
            "channel-accept",
            channel(ChannelVerb::Accept { ring: addr }),
        ),
        ("channel-refuse", channel(ChannelVerb::Refuse)),
        ("channel-credit", channel(ChannelVerb::Credit)),
        (
            "channel-end",
            channel(ChannelVerb::End {
                count: 1,
                clean: true,
            }),
        ),
        ("channel-quit", channel(ChannelVerb::Quit)),
        ("channel-landed", channel(ChannelVerb::Landed)),
    ]
}

fn greetings() -> Vec<(&'static str, Greeting)> {
    let from = Greeting {
        id: Some(world::id(1)),
        url: format!("127.0.0.1:9#{}", world::id(1)),
        window: 4 << 20,
        host: "boot 1".into(),
        obituaries: Some((9, [5; 16])),
        ..Greeting::default()
    };
    let dialler = Greeting {
        wanted: Some(world::id(0)),
        ..from.clone()
    };
    let acceptor = Greeting {
        mac: Some([8; 32]),
        ..from
    };
    vec![("dialler", dialler), ("acceptor", acceptor)]
}

fn identities() -> Vec<(&'static str, Vec<u8>)> {
    let id = LogicalId::new("model/7b", 1, 2, 3).expect("valid");
    let url = |host: &str| {
        let host: Host = host.parse().expect("valid");
        let id = id.clone();
        let port = 4711;
        PeerUrl { host, port, id }.to_string().into_bytes()
    };
    vec![
        ("id", id.to_string().into_bytes()),
        ("url-v4", url("10.0.0.5")),
        ("url-v6", url("fd00::5")),
        ("url-v6-scope", url("fe80::5%eth0")),
        ("url-name", url("node-5.example")),
    ]
}

fn steps() -> Vec<(&'static str, Vec<u8>)> {
    let bytes = |(name, step): (_, fuzzing::FirstStep)| {
        (
            name,
            [&step.header_at.to_le_bytes(), &step.slot[..]].concat(),
        )
    };
    fuzzing::first_steps().into_iter().map(bytes).collect()
}

fn certificates() -> Vec<(&'static str, Vec<u8>)> {
    // An Ed25519 key that is nobody's (PKCS #8), so that the signature is the same each time.
    const PKCS8: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";
    let key = [&PKCS8[..], &[0x42; 32]].concat();
    let key = rcgen::KeyPair::try_from(key).expect("a key");
    let uri = uri_of(&world::id(1));
    let mut params = rcgen::CertificateParams::new(Vec::new()).expect("valid");
    let name = uri.as_str().try_into().expect("ASCII");
    params.subject_alt_names = vec![rcgen::SanType::URI(name)];
    let cert = params.self_signed(&key).expect("a certificate");
    vec![("whole", cert.der().to_vec()), ("uri", uri.into_bytes())]
}

/// What is said before a link is up: as it goes over the socket.
fn by_strangers() -> Vec<(&'static str, Vec<u8>)> {
    // Pieces that the target sends as they are: a 0, their length, their bytes.
    let piece = |script: Script, bytes: &[u8]| {
        let len = u8::try_from(bytes.len()).expect("a short frame");
        script.raw(&[0, len]).raw(bytes)
    };
    let (head, body) = hello(&world::id(0), 7);
    let hello = framed(&head, &body);
    let confirm = wire::encode(&Message::Confirm { link: 7 });
    let confirm = framed(confirm.as_slice(), &[]);
    let dialler = piece(Script::by(STRANGER), &hello);
    let linked = piece(dialler.clone(), &confirm);
    let proof = Message::Proof { mac: [2; 32] };
    let guess = Script::by(CHALLENGED).raw(&[1]).frame(proof, &[]);
    let (first, second) = hello.split_at(hello.len() / 2);
    let cut = piece(piece(Script::by(STRANGER), first), second);
    vec![
        ("stranger-hello", dialler.bytes()),
        ("stranger-hello-in-two", cut.bytes()),
        ("stranger-hello-confirm", linked.bytes()),
        ("challenged-proof", guess.bytes()),
    ]
}

/// A name, who speaks, and frames with their bodies.
type Conversation = (&'static str, u8, Vec<(Message, Vec<u8>)>);

/// What is said on a link.
fn conversations() -> Vec<Conversation> {
    let write = |elem, last, flag, addr, body: &[u8]| {
        let len = body.len() as u64;
        let piece = Piece {
            elem,
            last,
            flag,
            addr,
            len,
            ..piece()
        };
        (Message::Write(piece), body.to_vec())
    };
    let letter = |signals, text: &[u8]| {
        let piece = MsgPiece {
            seq: 0,
            total: text.len() as u64,
            offset: 0,
            signals,
        };
        (Message::Msg(piece), text.to_vec())
    };
    let channel = |verb, body: &[u8]| {
        let control = Control { channel: 1, verb };
        (Message::Channel(control), body.to_vec())
    };
    let plain = |message| (message, Vec::new());
    let [_, (_, step), _] = fuzzing::first_steps();
    // Where things are in the ring that `WITH_CHANNEL` opens.
    let slot = BASE + fuzzing::first_slot(4);
    let (addr, len) = (BASE, 256);
    let end = ChannelVerb::End {
        count: 1,
        clean: true,
    };
    let open = ChannelVerb::Open {
        slots: 2,
        slot_bytes: 64,
    };
    let read = |req, elem, addr| Message::Read {
        req,
        elem,
        addr,
        len,
    };
    vec![
        ("read", LINKED, vec![plain(read(7, 0, addr))]),
        (
            "read-of-two",
            LINKED,
            vec![plain(read(7, 0, addr)), plain(read(7, 1, addr + len))],
        ),
        (
            "read-outside",
            LINKED,
            vec![plain(read(7, 0, addr - len)), plain(read(8, 0, addr))],
        ),
        ("write", LINKED, vec![write(0, true, false, addr, b"data")]),
        (
            "write-in-pieces",
            LINKED,
            [(0, false), (8, true)]
                .map(|(offset, last)| {
                    let piece = Piece {
                        offset,
                        last,
                        ..piece()
                    };
                    (Message::Write(piece), vec![6; 8])
                })
                .to_vec(),
        ),
        (
            "chain",
            LINKED,
            vec![
                write(0, false, false, addr, b"payload"),
                write(1, true, true, addr + 64, &[1; 8]),
            ],
        ),
        ("message", LINKED, vec![letter(None, b"hello")]),
        (
            "signal",
            LINKED,
            vec![
                write(0, false, false, addr, b"data"),
                letter(Some(7), b"there"),
            ],
        ),
        ("ping", LINKED, vec![plain(Message::Ping { stamp: 5 })]),
        (
            "credit",
            LINKED,
            vec![plain(Message::Credit { limit: 8 << 20 })],
        ),
        (
            "key-ask",
            LINKED,
            vec![plain(Message::KeyAsk { req: 7, addr, len })],
        ),
        (
            "goodbye",
            LINKED,
            vec![(
                Message::Goodbye {
                    why: GoodbyeCode::GivenUp,
                    by: life(0),
                },
                b"enough".to_vec(),
            )],
        ),
        (
            "channel-open",
            LINKED,
            vec![channel(open, b"steps"), channel(end, &[])],
        ),
        (
            "channel-step",
            WITH_CHANNEL,
            vec![
                write(0, false, false, slot, &step.slot),
                write(1, true, true, BASE, &step.flag),
                channel(end, &[]),
            ],
        ),
        (
            "channel-landed",
            WITH_CHANNEL,
            vec![channel(ChannelVerb::Landed, &[])],
        ),
        (
            "channel-quit",
            WITH_CHANNEL,
            vec![channel(ChannelVerb::Quit, &[])],
        ),
    ]
}
