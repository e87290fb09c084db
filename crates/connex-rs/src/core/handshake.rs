//! Who is there: connections from the first byte to a bound identity.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::{
    CONNECT_TIMEOUT, Command, Conn, Core, GOODBYE_TIME, HANDSHAKE_TIMEOUT, MAX_STRANGERS, NOBODY,
    Out, Stage,
};
use crate::host;
use crate::identity::{Host, Incarnation, LogicalId, PeerUrl};
use crate::inbox::WINDOW;
use crate::peer::{Greeting as LinkGreeting, Input, LinkId, LinkKey, Refusal, Why};
use crate::random;
use crate::transport::{Close, ConnId, Gone, Refuse};
use crate::wire::{Greet, Greeting, Message, RefusalCode};

/// Codes of [`Refusal::Rejected`]: the refusals that the state machine only passes through.
pub(super) mod rejected {
    pub(crate) const WRONG_IDENTITY: u16 = 1;
    pub(crate) const AUTHENTICATION: u16 = 2;
    pub(crate) const BUSY: u16 = 4;
    pub(crate) const VERSION: u16 = 5;
}

impl Core {
    // ---- dialling -----------------------------------------------------------------------------

    /// The state machine wants a dial.
    pub(super) fn dial(&mut self, peer: usize, link: LinkId) {
        let until = self.now + CONNECT_TIMEOUT;
        self.check_at(until);
        let entry = &mut self.peers[peer];
        entry.dial = Some((link, until));
        entry.addrs.clear();
        let Some(url) = entry.url.clone() else {
            let reason = "no address of this peer is known: use its URL".to_owned();
            return self.input_with(
                peer,
                Input::Lost {
                    key: LinkKey::mine(link),
                    why: Why::Dead,
                },
                Some(reason),
                "",
            );
        };
        if host::needs_lookup(&url.host) {
            self.out.push(Out::Resolve { peer, link });
        } else {
            let result = host::resolve(&url.host, url.port);
            self.dial_addresses(peer, link, result);
        }
    }

    /// A name has been looked up.
    pub(super) fn resolved(
        &mut self,
        id: &LogicalId,
        link: LinkId,
        result: Result<Vec<SocketAddr>, String>,
    ) {
        let Some(&peer) = self.by_id.get(id) else {
            return;
        };
        if self.peers[peer]
            .dial
            .is_some_and(|(current, _)| current == link)
        {
            self.dial_addresses(peer, link, result);
        }
    }

    fn dial_addresses(
        &mut self,
        peer: usize,
        link: LinkId,
        result: Result<Vec<SocketAddr>, String>,
    ) {
        match result {
            Ok(addrs) => {
                self.peers[peer].addrs = VecDeque::from(addrs);
                self.dial_next(peer, link);
            }
            Err(reason) => {
                self.input_with(
                    peer,
                    Input::Lost {
                        key: LinkKey::mine(link),
                        why: Why::Dead,
                    },
                    Some(reason),
                    "",
                );
            }
        }
    }

    /// Tries the next address; false if there is none left.
    fn dial_next(&mut self, peer: usize, link: LinkId) -> bool {
        match self.peers[peer].addrs.pop_front() {
            Some(to) => {
                self.out.push(Out::Dial { peer, link, to });
                true
            }
            None => false,
        }
    }

    /// A dial did not come through: tries the peer's next address, if there is one.
    pub(super) fn dial_again(&mut self, peer: usize, key: Option<LinkKey>, gone: &Gone) -> bool {
        let Some((link, _)) = self.peers[peer].dial else {
            return false;
        };
        matches!(gone, Gone::Unreachable { .. } | Gone::TimedOut { .. })
            && key == Some(LinkKey::mine(link))
            && self.dial_next(peer, link)
    }

    pub(super) fn on_connected(&mut self, conn: ConnId) {
        let Some(entry) = self.conns.get(&conn) else {
            return;
        };
        if let (Some(peer), Some(key), Stage::Dialling) = (entry.peer, entry.key, entry.stage) {
            self.input(peer, Input::Connected { link: key.id });
        }
    }

    // ---- greetings ----------------------------------------------------------------------------

    pub(super) fn send_hello(&mut self, peer: usize, greeting: LinkGreeting) {
        let Some(&conn) = self.peers[peer].links.get(&LinkKey::mine(greeting.link)) else {
            return;
        };
        let nonce = self.fresh_nonce(conn);
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.stage = Stage::Greeted;
        }
        let greet = Greet {
            link: greeting.link.0,
            attempt: greeting.attempt,
            incarnation: self.shared.incarnation,
            nonce,
            lost: greeting
                .lost
                .map(|key| (key.dialler == crate::peer::Dialler::Me, key.id.0)),
            closed: greeting.closed,
        };
        let wanted = Some((*self.peers[peer].id).clone());
        let body = self.greeting(conn, peer, wanted, None).encode();
        self.send_with(conn, &Message::Hello(greet), body);
    }

    pub(super) fn send_welcome(&mut self, peer: usize, link: LinkId) {
        let Some(&conn) = self.peers[peer].links.get(&LinkKey::theirs(link)) else {
            return;
        };
        let until = self.now + HANDSHAKE_TIMEOUT;
        self.check_at(until);
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        entry.deadline = Some(until);
        let nonce = entry.nonce;
        let mac = match (&self.shared.secret, &entry.hello) {
            (Some(secret), Some(hello)) => Some(prove(
                secret,
                Role::Acceptor,
                &Facts {
                    dialler: &self.peers[peer].id,
                    dialler_life: hello.0.incarnation,
                    dialler_nonce: hello.0.nonce,
                    acceptor: &self.shared.id,
                    acceptor_nonce: nonce,
                    link: hello.0.link,
                },
            )),
            _ => None,
        };
        let greet = Greet {
            link: link.0,
            attempt: 0,
            incarnation: self.shared.incarnation,
            nonce,
            lost: None,
            closed: false,
        };
        let body = self.greeting(conn, peer, None, mac).encode();
        self.send_with(conn, &Message::Welcome(greet), body);
    }

    /// What goes out on `conn`, with a token of its own for the obituary.
    fn greeting(
        &mut self,
        conn: ConnId,
        peer: usize,
        wanted: Option<LogicalId>,
        mac: Option<[u8; 32]>,
    ) -> Greeting {
        let obituaries = self.shared.seat.address();
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.issued = obituaries.map(|(_, token)| token);
        }
        let held = self.shared.inbox.held_for(&self.peers[peer].id);
        Greeting {
            id: Some((*self.shared.id).clone()),
            wanted,
            url: self.shared.local_url.clone(),
            window: WINDOW.saturating_sub(held),
            mac,
            host: String::new(),
            obituaries,
        }
    }

    fn fresh_nonce(&mut self, conn: ConnId) -> [u8; 16] {
        let nonce = random::bytes();
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.nonce = nonce;
        }
        nonce
    }

    // ---- strangers ----------------------------------------------------------------------------

    pub(super) fn on_accepted(&mut self, conn: ConnId, from: SocketAddr) {
        self.shared.counters.eps_created.add_one();
        let mut entry = Conn::new(Stage::Stranger);
        entry.far = Some(from);
        entry.deadline = Some(self.now + HANDSHAKE_TIMEOUT);
        self.conns.insert(conn, entry);
        self.strangers += 1;
        self.check_at(self.now + HANDSHAKE_TIMEOUT);
        if self.strangers > MAX_STRANGERS {
            self.drop_stranger(
                conn,
                &format!("{from}: more than {MAX_STRANGERS} connections wait to say who they are"),
            );
        }
    }

    /// Ends a connection that has not proven an identity.
    pub(super) fn drop_stranger(&mut self, conn: ConnId, why: &str) {
        self.stranger_refused(why);
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.stage = Stage::Leaving;
            entry.deadline = None;
            self.strangers -= 1;
        }
        self.out.push(Out::Close(conn, Close::Abort));
    }

    /// Counts, and says so at most once a second.
    pub(super) fn stranger_refused(&mut self, why: &str) {
        self.shared.counters.strangers_refused.add_one();
        if self.now.saturating_sub(self.last_stranger_logged) > 1_000_000_000 {
            self.last_stranger_logged = self.now;
            tracing::warn!(target: "connex_rs::handshake", why, "refused a connection");
        }
    }

    pub(super) fn is_stranger(entry: &Conn) -> bool {
        matches!(entry.stage, Stage::Stranger | Stage::Challenged)
    }

    // ---- handshake frames ---------------------------------------------------------------------

    /// A handshake frame with its body.
    pub(super) fn on_greeting(
        &mut self,
        conn: ConnId,
        message: Message,
        body: &[u8],
    ) -> Result<(), Refuse> {
        let stage = self.conns.get(&conn).map(|c| c.stage);
        match (stage, message) {
            (Some(Stage::Stranger), Message::Hello(greet)) => {
                self.on_hello(conn, greet, Greeting::decode(body)?)
            }
            (Some(Stage::Challenged), Message::Proof { mac }) => self.on_proof(conn, mac),
            (Some(Stage::Greeted), Message::Challenge { nonce }) => self.on_challenge(conn, nonce),
            (Some(Stage::Greeted), Message::Welcome(greet)) => {
                self.on_welcome(conn, greet, Greeting::decode(body)?)
            }
            (Some(Stage::Greeted), Message::Refusal { why, by }) => {
                self.on_refusal(conn, why, by, &String::from_utf8_lossy(body));
                Ok(())
            }
            (Some(Stage::Admitted), Message::Confirm { link }) => self.on_confirm(conn, link),
            // A crossed dial is closed by either side at any moment: what is still under way is old news.
            (Some(Stage::Leaving) | None, _) => Ok(()),
            (Some(stage), message) => Err(Refuse(format!(
                "a {} is out of place in stage {stage:?}",
                kind(&message)
            ))),
        }
    }

    fn on_hello(&mut self, conn: ConnId, greet: Greet, greeting: Greeting) -> Result<(), Refuse> {
        let (Some(id), Some(wanted)) = (greeting.id.clone(), greeting.wanted.clone()) else {
            return Err(Refuse("a hello without identities".into()));
        };
        let me = self.shared.id.clone();
        if wanted != *me {
            let text = format!("wrong identity: {wanted} was dialled, {me} listens here");
            self.refuse_stranger(conn, RefusalCode::WrongIdentity, &text);
        } else if id == *me {
            let text =
                format!("the dialler claims {id}, the identity of the engine that it dialled");
            self.refuse_stranger(conn, RefusalCode::WrongIdentity, &text);
        } else if self.closing.is_some() {
            self.refuse_stranger(conn, RefusalCode::Closing, "the engine is closing");
        } else {
            let nonce = self.fresh_nonce(conn);
            let challenge = self.shared.secret.is_some();
            let Some(entry) = self.conns.get_mut(&conn) else {
                return Ok(());
            };
            if entry
                .subject
                .as_ref()
                .is_some_and(|subject| *subject != id.to_string())
            {
                let text = format!("the certificate does not carry the identity {id}");
                self.refuse_stranger(conn, RefusalCode::Authentication, &text);
                return Ok(());
            }
            entry.hello = Some(Box::new((greet, greeting)));
            if challenge {
                entry.stage = Stage::Challenged;
                self.send(conn, &Message::Challenge { nonce });
            } else {
                self.admit(conn);
            }
        }
        Ok(())
    }

    fn on_proof(&mut self, conn: ConnId, mac: [u8; 32]) -> Result<(), Refuse> {
        let right = match (self.conns.get(&conn), &self.shared.secret) {
            (
                Some(Conn {
                    hello: Some(hello),
                    nonce,
                    ..
                }),
                Some(secret),
            ) => {
                let (greet, greeting) = &**hello;
                let Some(dialler) = &greeting.id else {
                    return Ok(());
                };
                verify(
                    secret,
                    Role::Dialler,
                    &Facts {
                        dialler,
                        dialler_life: greet.incarnation,
                        dialler_nonce: greet.nonce,
                        acceptor: &self.shared.id,
                        acceptor_nonce: *nonce,
                        link: greet.link,
                    },
                    &mac,
                )
            }
            _ => false,
        };
        if right {
            self.admit(conn);
        } else {
            self.refuse_stranger(
                conn,
                RefusalCode::Authentication,
                "authentication failed: the secrets differ",
            );
        }
        Ok(())
    }

    /// A stranger has become a peer.
    fn admit(&mut self, conn: ConnId) {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        let Some((greet, id, url, window, obituaries)) = entry.hello.as_ref().and_then(|hello| {
            let (greet, greeting) = &**hello;
            Some((
                *greet,
                greeting.id.clone()?,
                greeting.url.clone(),
                greeting.window,
                greeting.obituaries,
            ))
        }) else {
            return;
        };
        entry.life = Some(greet.incarnation);
        entry.obituaries = obituaries.and_then(|(port, token)| {
            let ip = listens_at(&url).or(entry.far)?;
            // A scope is never told: it is that of the way the peer came.
            let ip = entry.far.filter(|far| far.ip() == ip.ip()).unwrap_or(ip);
            Some((with_port(ip, port), token))
        });
        entry.stage = Stage::Admitted;
        // Longer than any dial of ours that it may be parked behind.
        let until = self.now + CONNECT_TIMEOUT + HANDSHAKE_TIMEOUT;
        entry.deadline = Some(until);
        entry.window = window;
        self.strangers -= 1;
        let key = LinkKey::theirs(LinkId(greet.link));
        entry.key = Some(key);
        self.check_at(until);
        let Some(peer) = self.knocking_peer(&id) else {
            self.strangers += 1;
            let text = "the engine has as many peers as it takes";
            return self.refuse_stranger(conn, RefusalCode::Busy, text);
        };
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.peer = Some(peer);
        }
        if self.peers[peer].links.contains_key(&key) {
            if let Some(entry) = self.conns.get_mut(&conn) {
                entry.peer = None;
                entry.stage = Stage::Leaving;
            }
            self.stranger_refused("a hello that names a link in use");
            self.out.push(Out::Close(conn, Close::Abort));
            return;
        }
        self.peers[peer].links.insert(key, conn);
        self.learn_url(peer, &url);
        let greeting = LinkGreeting {
            link: LinkId(greet.link),
            attempt: greet.attempt,
            closed: greet.closed,
            lost: greet.lost.map(|(by_sender, id)| {
                let id = LinkId(id);
                if by_sender {
                    LinkKey::mine(id)
                } else {
                    LinkKey::theirs(id)
                }
            }),
        };
        self.input(
            peer,
            Input::Hello {
                greeting,
                incarnation: greet.incarnation,
            },
        );
    }

    /// A peer of which the application gave no address is dialled where it says that it listens.
    fn learn_url(&mut self, peer: usize, url: &str) {
        let entry = &mut self.peers[peer];
        if entry.url.is_none() {
            entry.url = url
                .parse::<PeerUrl>()
                .ok()
                .filter(|u| u.id == *entry.id)
                .map(Arc::new);
        }
    }

    pub(super) fn refuse_stranger(&mut self, conn: ConnId, why: RefusalCode, text: &str) {
        self.stranger_refused(text);
        self.send_with(
            conn,
            &Message::Refusal { why, by: NOBODY },
            text.as_bytes().to_vec(),
        );
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.stage = Stage::Leaving;
            self.strangers -= 1;
        }
        self.close_in_order(conn);
    }

    /// The state machine refuses a hello.
    pub(super) fn send_refusal(&mut self, peer: usize, link: LinkId, refusal: Refusal) {
        let Some(conn) = self.peers[peer].links.remove(&LinkKey::theirs(link)) else {
            return;
        };
        let (why, by, text) = match refusal {
            Refusal::Superseded { by } => {
                (RefusalCode::Superseded, by, format!("superseded by {by}"))
            }
            Refusal::Closing => (RefusalCode::Closing, NOBODY, "the engine is closing".into()),
            Refusal::Rejected(_) => (RefusalCode::WrongIdentity, NOBODY, String::new()),
        };
        self.send_with(conn, &Message::Refusal { why, by }, text.into_bytes());
        self.release(conn, crate::error::Error::closed());
        self.close_in_order(conn);
    }

    /// Flushes and closes, for a bounded time.
    pub(super) fn close_in_order(&mut self, conn: ConnId) {
        let until = self.now + GOODBYE_TIME;
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.stage = Stage::Leaving;
            entry.deadline = Some(until);
        }
        self.check_at(until);
        self.out.push(Out::Close(conn, Close::Flush));
    }

    // ---- the dialler's side -------------------------------------------------------------------

    fn on_challenge(&mut self, conn: ConnId, theirs: [u8; 16]) -> Result<(), Refuse> {
        let Some(Conn {
            peer: Some(peer),
            key: Some(key),
            nonce,
            ..
        }) = self.conns.get(&conn)
        else {
            return Ok(());
        };
        let (peer, key) = (*peer, *key);
        let Some(secret) = &self.shared.secret else {
            let text = "the peer demands a secret and this engine has none: set secret= or CONNEX_RS_SECRET_FILE";
            self.reject(conn, rejected::AUTHENTICATION, text);
            return Ok(());
        };
        let mac = prove(
            secret,
            Role::Dialler,
            &Facts {
                dialler: &self.shared.id,
                dialler_life: self.shared.incarnation,
                dialler_nonce: *nonce,
                acceptor: &self.peers[peer].id,
                acceptor_nonce: theirs,
                link: key.id.0,
            },
        );
        self.send(conn, &Message::Proof { mac });
        Ok(())
    }

    fn on_welcome(&mut self, conn: ConnId, greet: Greet, greeting: Greeting) -> Result<(), Refuse> {
        let Some(Conn {
            peer: Some(peer),
            key: Some(key),
            nonce,
            subject,
            ..
        }) = self.conns.get(&conn)
        else {
            return Ok(());
        };
        let (peer, key, nonce) = (*peer, *key, *nonce);
        let wanted = self.peers[peer].id.clone();
        let Some(id) = greeting.id else {
            return Err(Refuse("a welcome without an identity".into()));
        };
        if id != *wanted {
            let text = format!("wrong identity: {wanted} was dialled, {id} answered");
            self.reject(conn, rejected::WRONG_IDENTITY, &text);
            return Ok(());
        }
        if subject
            .as_ref()
            .is_some_and(|subject| *subject != id.to_string())
        {
            self.reject(
                conn,
                rejected::AUTHENTICATION,
                &format!("the certificate does not carry the identity {id}"),
            );
            return Ok(());
        }
        if let Some(secret) = &self.shared.secret {
            let facts = Facts {
                dialler: &self.shared.id,
                dialler_life: self.shared.incarnation,
                dialler_nonce: nonce,
                acceptor: &wanted,
                acceptor_nonce: greet.nonce,
                link: key.id.0,
            };
            let proven = greeting
                .mac
                .is_some_and(|mac| verify(secret, Role::Acceptor, &facts, &mac));
            if !proven {
                let text = "authentication failed: the peer did not prove that it knows the secret";
                self.reject(conn, rejected::AUTHENTICATION, text);
                return Ok(());
            }
        }
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.window = greeting.window;
            entry.life = Some(greet.incarnation);
            entry.obituaries = entry
                .far
                .zip(greeting.obituaries)
                .map(|(far, (port, token))| (with_port(far, port), token));
        }
        self.learn_url(peer, &greeting.url);
        self.input(
            peer,
            Input::Welcome {
                link: key.id,
                incarnation: greet.incarnation,
            },
        );
        Ok(())
    }

    /// The answer to our hello does not pass our checks.
    fn reject(&mut self, conn: ConnId, code: u16, text: &str) {
        let Some(Conn {
            peer: Some(peer),
            key: Some(key),
            ..
        }) = self.conns.get(&conn)
        else {
            return;
        };
        let (peer, link) = (*peer, key.id);
        let input = Input::Refused {
            link,
            refusal: Refusal::Rejected(code),
        };
        self.input_with(peer, input, Some(text.to_owned()), "");
    }

    fn on_refusal(&mut self, conn: ConnId, why: RefusalCode, by: Incarnation, text: &str) {
        let Some(Conn {
            peer: Some(peer),
            key: Some(key),
            ..
        }) = self.conns.get(&conn)
        else {
            return;
        };
        let (peer, link) = (*peer, key.id);
        let refusal = match why {
            RefusalCode::Superseded => Refusal::Superseded { by },
            RefusalCode::Closing => Refusal::Closing,
            RefusalCode::WrongIdentity => Refusal::Rejected(rejected::WRONG_IDENTITY),
            RefusalCode::Authentication => Refusal::Rejected(rejected::AUTHENTICATION),
            RefusalCode::Busy => Refusal::Rejected(rejected::BUSY),
            RefusalCode::Version => Refusal::Rejected(rejected::VERSION),
        };
        let reason =
            (!text.is_empty() && matches!(refusal, Refusal::Rejected(_))).then(|| text.to_owned());
        self.input_with(peer, Input::Refused { link, refusal }, reason, text);
    }

    fn on_confirm(&mut self, conn: ConnId, link: u64) -> Result<(), Refuse> {
        let Some(Conn {
            peer: Some(peer),
            key: Some(key),
            ..
        }) = self.conns.get(&conn)
        else {
            return Ok(());
        };
        let (peer, key) = (*peer, *key);
        if key.id.0 != link {
            return Err(Refuse("a confirm of another link".into()));
        }
        self.input(peer, Input::Confirm { link: key.id });
        // Parked, or not yet welcomed: a confirm that comes before our answer proves nothing.
        if self
            .conns
            .get(&conn)
            .is_some_and(|c| c.stage == Stage::Admitted)
        {
            return Err(Refuse("a confirm before the welcome".into()));
        }
        Ok(())
    }

    /// A command that carries a looked-up name back.
    pub(crate) fn resolution(
        &self,
        peer: usize,
        link: LinkId,
        result: Result<Vec<SocketAddr>, String>,
    ) -> Command {
        Command::Resolved {
            peer: (*self.peers[peer].id).clone(),
            link,
            result,
        }
    }
}

/// The address in a URL, if it is one and not a name.
fn listens_at(url: &str) -> Option<SocketAddr> {
    let url: PeerUrl = url.parse().ok()?;
    match url.host {
        Host::V4(ip) => Some((ip, url.port).into()),
        Host::V6 { addr, .. } => Some((addr, url.port).into()),
        Host::Name(_) => None,
    }
}

fn with_port(mut addr: SocketAddr, port: u16) -> SocketAddr {
    addr.set_port(port);
    addr
}

/// The name of a handshake frame, for error texts.
fn kind(message: &Message) -> &'static str {
    match message {
        Message::Hello(_) => "hello",
        Message::Challenge { .. } => "challenge",
        Message::Proof { .. } => "proof",
        Message::Welcome(_) => "welcome",
        Message::Refusal { .. } => "refusal",
        Message::Confirm { .. } => "confirm",
        _ => "frame",
    }
}

/// Whose proof it is: one cannot be played back as the other.
#[derive(Clone, Copy)]
enum Role {
    Dialler,
    Acceptor,
}

/// What a proof of the secret covers.
struct Facts<'a> {
    dialler: &'a LogicalId,
    dialler_life: Incarnation,
    dialler_nonce: [u8; 16],
    acceptor: &'a LogicalId,
    acceptor_nonce: [u8; 16],
    link: u64,
}

fn digest(secret: &[u8], role: Role, facts: &Facts<'_>) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.update(match role {
        Role::Dialler => b"connex-rs dialler",
        Role::Acceptor => b"connex-rs acceptor",
    });
    for text in [facts.dialler.to_string(), facts.acceptor.to_string()] {
        mac.update(&(text.len() as u64).to_le_bytes());
        mac.update(text.as_bytes());
    }
    mac.update(&facts.dialler_life.start_ns.to_le_bytes());
    mac.update(&facts.dialler_life.random.to_le_bytes());
    mac.update(&facts.dialler_nonce);
    mac.update(&facts.acceptor_nonce);
    mac.update(&facts.link.to_le_bytes());
    mac
}

fn prove(secret: &[u8], role: Role, facts: &Facts<'_>) -> [u8; 32] {
    digest(secret, role, facts).finalize().into_bytes().into()
}

/// Compares in constant time.
fn verify(secret: &[u8], role: Role, facts: &Facts<'_>, mac: &[u8; 32]) -> bool {
    digest(secret, role, facts).verify_slice(mac).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_role_facts_and_secret_only() {
        let (a, b) = (
            LogicalId::new("m", 0, 0, 0).expect("valid"),
            LogicalId::new("m", 1, 0, 0).expect("valid"),
        );
        let facts = |link| Facts {
            dialler: &a,
            dialler_life: NOBODY,
            dialler_nonce: [1; 16],
            acceptor: &b,
            acceptor_nonce: [2; 16],
            link,
        };
        let secret = b"0123456789abcdef";
        let mac = prove(secret, Role::Dialler, &facts(7));
        assert!(verify(secret, Role::Dialler, &facts(7), &mac));
        assert!(!verify(secret, Role::Acceptor, &facts(7), &mac));
        assert!(!verify(secret, Role::Dialler, &facts(8), &mac));
        assert!(!verify(b"0123456789abcdeF", Role::Dialler, &facts(7), &mac));
    }
}
