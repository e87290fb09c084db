//! Who a peer is: the logical id, the URL under which it is dialled, and one life of it.
//!
//! Everything here is text in, value out: names are resolved elsewhere, off the progress thread.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

/// The longest model name, in bytes.
pub const MAX_MODEL_BYTES: usize = 256;
/// The longest host name, in bytes (the limit of the domain name system).
const MAX_HOST_BYTES: usize = 253;
/// The longest IPv6 scope, in bytes. Interface names of Linux have at most 15.
const MAX_SCOPE_BYTES: usize = 32;
/// How much of a refused text an error repeats, in characters.
const EXCERPT_CHARS: usize = 80;

/// Why a logical id or a peer URL was refused. The text names the value and the rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The model name is empty.
    #[error("the model name of a logical id must not be empty")]
    ModelEmpty,
    /// The model name is longer than [`MAX_MODEL_BYTES`].
    #[error("model name {model} has {bytes} bytes; at most {MAX_MODEL_BYTES} are allowed")]
    ModelTooLong {
        /// The beginning of the name, quoted.
        model: String,
        /// Its length in bytes.
        bytes: usize,
    },
    /// The model name has a character that would make the written id ambiguous.
    #[error(
        "model name {model} contains {character:?}; '|', '#' and control characters are not allowed"
    )]
    ModelCharacter {
        /// The name, quoted.
        model: String,
        /// The first offending character.
        character: char,
    },
    /// The text is not made of four fields.
    #[error("logical id {id} must have the form model|stage|shard|replica")]
    IdForm {
        /// The text, quoted.
        id: String,
    },
    /// A number of the id is not one.
    #[error(
        "{field} {value} of a logical id must be a decimal number from 0 to 4294967295, without sign or leading zeros"
    )]
    Number {
        /// Which field: `stage`, `shard` or `replica`.
        field: &'static str,
        /// What stood there, quoted.
        value: String,
    },
    /// The text has no `#` between address and id.
    #[error(
        "peer URL {url} must have the form ip:port#model|stage|shard|replica, IPv6 as [addr]:port#…"
    )]
    UrlForm {
        /// The text, quoted.
        url: String,
    },
    /// The port is missing or not a port.
    #[error("port {port} of peer address {address} must be a decimal number from 1 to 65535")]
    Port {
        /// What stood there, quoted.
        port: String,
        /// The part before `#`, quoted.
        address: String,
    },
    /// An IPv6 address without brackets.
    #[error("IPv6 address {host} in a peer URL must be written in brackets, as [addr]:port#…")]
    Brackets {
        /// The host part, quoted.
        host: String,
    },
    /// The host is neither an address nor a host name.
    #[error("host {host} of a peer URL is neither an IP address nor a host name ({rule})")]
    Host {
        /// The host part, quoted.
        host: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
}

/// The beginning of a refused text, quoted and escaped, so that errors are bounded and printable.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// A decimal number in its one canonical spelling.
fn number<T: FromStr>(text: &str) -> Option<T> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let padded = text.len() > 1 && text.starts_with('0');
    if digits && !padded {
        text.parse().ok()
    } else {
        None
    }
}

/// The identity of a peer: what stays the same when its process is restarted or moved.
///
/// Ordered by model (bytes), stage, shard, replica: both ends of a pair agree on who is lower.
/// Cloning copies no text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogicalId {
    model: Arc<str>,
    stage: u32,
    shard: u32,
    replica: u32,
}

impl LogicalId {
    /// Makes an id, or says which rule the model name breaks.
    pub fn new(model: &str, stage: u32, shard: u32, replica: u32) -> Result<Self, IdentityError> {
        if model.is_empty() {
            return Err(IdentityError::ModelEmpty);
        }
        if model.len() > MAX_MODEL_BYTES {
            return Err(IdentityError::ModelTooLong {
                model: excerpt(model),
                bytes: model.len(),
            });
        }
        let forbidden = |c: &char| matches!(c, '|' | '#') || c.is_control();
        if let Some(character) = model.chars().find(forbidden) {
            return Err(IdentityError::ModelCharacter {
                model: excerpt(model),
                character,
            });
        }
        Ok(Self {
            model: model.into(),
            stage,
            shard,
            replica,
        })
    }

    /// The model's name: 1 to [`MAX_MODEL_BYTES`] bytes.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The pipeline stage.
    pub fn stage(&self) -> u32 {
        self.stage
    }

    /// The shard within the stage.
    pub fn shard(&self) -> u32 {
        self.shard
    }

    /// The replica of the shard.
    pub fn replica(&self) -> u32 {
        self.replica
    }
}

impl fmt::Display for LogicalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}|{}|{}|{}",
            self.model, self.stage, self.shard, self.replica
        )
    }
}

impl FromStr for LogicalId {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let mut fields = text.split('|');
        let (Some(model), Some(stage), Some(shard), Some(replica), None) = (
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
        ) else {
            return Err(IdentityError::IdForm { id: excerpt(text) });
        };
        let parse = |field, value| {
            number(value).ok_or_else(|| IdentityError::Number {
                field,
                value: excerpt(value),
            })
        };
        Self::new(
            model,
            parse("stage", stage)?,
            parse("shard", shard)?,
            parse("replica", replica)?,
        )
    }
}

/// Where a peer listens: an address, or a name that is still to be resolved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// An IPv4 address.
    V4(Ipv4Addr),
    /// An IPv6 address, with the scope that a link-local address needs for dialling.
    V6 {
        /// The address.
        addr: Ipv6Addr,
        /// The part after `%`: an interface name or index. Never advertised.
        scope: Option<String>,
    },
    /// A host name.
    Name(String),
}

impl Host {
    /// Parses the inside of the brackets of an IPv6 authority.
    fn bracketed(text: &str) -> Result<Self, IdentityError> {
        let refuse = |rule| IdentityError::Host {
            host: excerpt(text),
            rule,
        };
        let (addr, scope) = match text.split_once('%') {
            Some((addr, scope)) => (addr, Some(scope)),
            None => (text, None),
        };
        let addr = addr
            .parse()
            .map_err(|_| refuse("brackets hold an IPv6 address"))?;
        if let Some(scope) = scope {
            let legal = |b: u8| b.is_ascii_graphic() && !b"%[]/#".contains(&b);
            if scope.is_empty() || scope.len() > MAX_SCOPE_BYTES || !scope.bytes().all(legal) {
                return Err(refuse("the scope after % is an interface name or index"));
            }
        }
        Ok(Self::V6 {
            addr,
            scope: scope.map(str::to_owned),
        })
    }

    /// Parses an IPv4 address or a host name.
    fn plain(text: &str) -> Result<Self, IdentityError> {
        let refuse = |rule| IdentityError::Host {
            host: excerpt(text),
            rule,
        };
        if let Ok(addr) = text.parse() {
            return Ok(Self::V4(addr));
        }
        if text.contains(':') {
            return Err(IdentityError::Brackets {
                host: excerpt(text),
            });
        }
        if text.is_empty() || text.len() > MAX_HOST_BYTES {
            return Err(refuse("1 to 253 bytes"));
        }
        if !text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        {
            return Err(refuse("letters, digits, '-', '.' and '_' only"));
        }
        // A name that ends in a number is a mistyped address: never ask a name server for it.
        let last = text
            .trim_end_matches('.')
            .rsplit('.')
            .next()
            .unwrap_or_default();
        if last.bytes().all(|b| b.is_ascii_digit()) {
            return Err(refuse(
                "its last part is a number, so it is a malformed IPv4 address",
            ));
        }
        Ok(Self::Name(text.to_owned()))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(addr) => write!(f, "{addr}"),
            Self::V6 { addr, scope: None } => write!(f, "[{addr}]"),
            Self::V6 {
                addr,
                scope: Some(scope),
            } => write!(f, "[{addr}%{scope}]"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Parses a host as it stands before the port of a URL; an IPv6 address may come without brackets.
impl FromStr for Host {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        if let Some(inside) = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            Self::bracketed(inside)
        } else if text.contains(':') {
            Self::bracketed(text)
        } else {
            Self::plain(text)
        }
    }
}

/// `ip:port#model|stage|shard|replica`: where a peer listens, and who must answer there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerUrl {
    /// The address or name to dial.
    pub host: Host,
    /// The port, never 0.
    pub port: u16,
    /// The identity that is expected to answer.
    pub id: LogicalId,
}

impl PeerUrl {
    /// The part before `#`, in canonical form.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl fmt::Display for PeerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}#{}", self.host, self.port, self.id)
    }
}

impl FromStr for PeerUrl {
    type Err = IdentityError;

    fn from_str(url: &str) -> Result<Self, IdentityError> {
        let form = || IdentityError::UrlForm { url: excerpt(url) };
        let (address, id) = url.split_once('#').ok_or_else(form)?;
        let (host, port) = address.rsplit_once(':').ok_or_else(form)?;
        let host = match host.strip_prefix('[') {
            Some(rest) => Host::bracketed(rest.strip_suffix(']').ok_or_else(form)?)?,
            None => Host::plain(host)?,
        };
        let port = number(port)
            .filter(|&port| port != 0)
            .ok_or_else(|| IdentityError::Port {
                port: excerpt(port),
                address: excerpt(address),
            })?;
        Ok(Self {
            host,
            port,
            id: id.parse()?,
        })
    }
}

/// One life of a logical id. The greater one is the later one.
///
/// The start time orders lives of one id; the random part tells apart two that claim the same
/// nanosecond, or a clock that went back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation {
    /// When the engine started: nanoseconds since the epoch (wall clock, so that it survives a reboot).
    pub start_ns: u64,
    /// A random number drawn at the start.
    pub random: u64,
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.start_ns, self.random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(text: &str) -> Result<LogicalId, IdentityError> {
        text.parse()
    }

    fn url(text: &str) -> Result<PeerUrl, IdentityError> {
        text.parse()
    }

    #[test]
    fn the_numbers_of_an_id_reach_u32_max() {
        let id = id("m|4294967295|0|4294967295").expect("in range");
        assert_eq!(
            (id.stage(), id.shard(), id.replica()),
            (u32::MAX, 0, u32::MAX)
        );
    }

    #[test]
    fn malformed_ids_are_refused_by_the_rule_they_break() {
        for text in ["", "m", "m|1|2", "m|1|2|3|4"] {
            assert!(
                matches!(id(text), Err(IdentityError::IdForm { .. })),
                "{text:?}"
            );
        }
        for text in [
            "m||0|0",
            "m|-1|0|0",
            "m|+1|0|0",
            "m|01|0|0",
            "m|4294967296|0|0",
            "m|0|0|1 ",
        ] {
            assert!(
                matches!(id(text), Err(IdentityError::Number { .. })),
                "{text:?}"
            );
        }
        assert_eq!(id("|0|0|0"), Err(IdentityError::ModelEmpty));
        assert!(matches!(
            id("a\nb|0|0|0"),
            Err(IdentityError::ModelCharacter {
                character: '\n',
                ..
            })
        ));
        assert!(matches!(
            id("a#b|0|0|0"),
            Err(IdentityError::ModelCharacter { character: '#', .. })
        ));
        assert!(LogicalId::new(&"m".repeat(256), 0, 0, 0).is_ok());
        let error = LogicalId::new(&"m".repeat(257), 0, 0, 0).expect_err("too long");
        assert!(
            error.to_string().contains("257 bytes; at most 256"),
            "{error}"
        );
    }

    #[test]
    fn ids_order_by_model_then_numbers() {
        let order = ["a|2|0|0", "a|10|0|0", "a|10|0|1", "a|10|1|0", "b|0|0|0"];
        let ids: Vec<_> = order.iter().map(|text| id(text).expect("valid")).collect();
        assert!(ids.is_sorted(), "{ids:?}");
    }

    #[test]
    fn urls_of_every_kind_of_host_round_trip() {
        for text in [
            "10.0.0.1:80#m|0|0|0",
            "[::1]:1#m|0|0|0",
            "[fe80::1%eth0]:65535#m|1|2|3",
            "node-7.rack_2.example:7000#org/model:8b q4|0|0|0",
            "localhost.:7000#m|0|0|0",
        ] {
            assert_eq!(url(text).expect(text).to_string(), text);
        }
        let canonical = url("[FE80:0:0:0:0:0:0:1]:80#m|0|0|0")
            .expect("valid")
            .to_string();
        assert_eq!(canonical, "[fe80::1]:80#m|0|0|0");
    }

    #[test]
    fn malformed_urls_are_refused_by_the_rule_they_break() {
        for text in ["", "10.0.0.1:80", "10.0.0.1#m|0|0|0", "[::1:80#m|0|0|0"] {
            assert!(
                matches!(url(text), Err(IdentityError::UrlForm { .. })),
                "{text:?}"
            );
        }
        for text in [
            "h:#m|0|0|0",
            "h:0#m|0|0|0",
            "h:65536#m|0|0|0",
            "h:+1#m|0|0|0",
            "h:8 #m|0|0|0",
        ] {
            assert!(
                matches!(url(text), Err(IdentityError::Port { .. })),
                "{text:?}"
            );
        }
        assert!(matches!(
            url("::1:80#m|0|0|0"),
            Err(IdentityError::Brackets { .. })
        ));
        for text in [
            ":80#m|0|0|0",
            "10.0.0.256:80#m|0|0|0",
            "10.1:80#m|0|0|0",
            ".:80#m|0|0|0",
            "a b:80#m|0|0|0",
            "[10.0.0.1]:80#m|0|0|0",
            "[fe80::1%]:80#m|0|0|0",
            "[fe80::1%a/b]:80#m|0|0|0",
        ] {
            assert!(
                matches!(url(text), Err(IdentityError::Host { .. })),
                "{text:?}"
            );
        }
    }

    #[test]
    fn a_host_alone_parses_with_and_without_brackets() {
        let scoped = "fe80::1%eth0".parse::<Host>().expect("valid");
        assert_eq!(scoped, "[fe80::1%eth0]".parse().expect("valid"));
        assert_eq!(scoped.to_string(), "[fe80::1%eth0]");
    }

    #[test]
    fn errors_are_bounded_and_printable() {
        let error = url(&"\u{1b}€".repeat(5000))
            .expect_err("no form")
            .to_string();
        assert!(error.len() < 2000 && !error.contains('\u{1b}'), "{error}");
    }

    #[test]
    fn a_later_incarnation_is_greater_and_prints_in_the_same_order() {
        let at = |start_ns, random| Incarnation { start_ns, random };
        let lives = [at(9, u64::MAX), at(10, 3), at(10, 4), at(1 << 60, 0)];
        assert!(lives.is_sorted());
        assert!(lives.map(|life| life.to_string()).is_sorted());
        assert_eq!(at(255, 1).to_string(), "00000000000000ff0000000000000001");
    }

    fn ids() -> impl Strategy<Value = LogicalId> {
        ("[^|#\\p{Cc}]{1,40}", any::<[u32; 3]>()).prop_map(|(model, n)| {
            LogicalId::new(&model, n[0], n[1], n[2]).expect("legal by construction")
        })
    }

    fn hosts() -> impl Strategy<Value = Host> {
        prop_oneof![
            any::<u32>().prop_map(|bits| Host::V4(bits.into())),
            (any::<u128>(), proptest::option::of("[a-z0-9.-]{1,15}")).prop_map(|(bits, scope)| {
                Host::V6 {
                    addr: bits.into(),
                    scope,
                }
            }),
            "[a-z0-9_-]{1,20}(\\.[a-z0-9-]{1,9}){0,3}\\.[a-z]{1,9}".prop_map(Host::Name),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_id_round_trips(id in ids()) {
            prop_assert_eq!(&id.to_string().parse::<LogicalId>().expect("canonical"), &id);
        }

        #[test]
        fn any_url_round_trips(host in hosts(), port in 1_u16.., id in ids()) {
            let url = PeerUrl { host, port, id };
            prop_assert_eq!(&url.to_string().parse::<PeerUrl>().expect("canonical"), &url);
        }

        #[test]
        fn no_text_panics_and_what_parses_is_stable(text in "(\\PC|[\\[\\]%:#|.0-9a-f]){0,60}") {
            if let Ok(url) = text.parse::<PeerUrl>() {
                prop_assert_eq!(url.to_string().parse::<PeerUrl>().expect("canonical"), url);
            }
            let _ = text.parse::<Host>();
            if let Ok(id) = text.parse::<LogicalId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }

        #[test]
        fn no_bent_url_panics(at in 0_usize..60, with in any::<char>()) {
            let mut text: Vec<char> = "[fe80::1%eth0]:7000#llama-70b|12|0|3".chars().collect();
            let at = at % text.len();
            text[at] = with;
            let text: String = text.into_iter().collect();
            if let Ok(url) = text.parse::<PeerUrl>() {
                prop_assert_eq!(url.to_string().parse::<PeerUrl>().expect("canonical"), url);
            }
        }
    }
}
