//! What the environment says where the program does not.

use std::env;
use std::fs;
use std::path::Path;

use crate::config::{Config, MIN_SECRET, TransportChoice};
use crate::error::{Error, Result};
use crate::transport::tcp::TlsFiles;

/// Names the transport: `auto`, `tcp` or `ucx`.
pub(crate) const TRANSPORT: &str = "CONNEX_RS_TRANSPORT";

/// Names a file that holds the shared secret; one newline at its end does not count.
pub(crate) const SECRET_FILE: &str = "CONNEX_RS_SECRET_FILE";

/// `0`: no sentinel, whatever the program says.
const SENTINEL: &str = "CONNEX_RS_SENTINEL";

/// Name the PEM files of TLS: the engine's certificate, its key, the authority of its peers.
const TLS: [&str; 3] = [
    "CONNEX_RS_TLS_CERT",
    "CONNEX_RS_TLS_KEY",
    "CONNEX_RS_TLS_CA",
];

impl Config {
    /// Fills in from the environment what is at its default: the transport from `CONNEX_RS_TRANSPORT`, the secret from
    /// the file that `CONNEX_RS_SECRET_FILE` names, TLS from `CONNEX_RS_TLS_CERT`, `_KEY` and `_CA`.
    /// `CONNEX_RS_SENTINEL=0` switches the sentinel off. Empty variables count as unset.
    ///
    /// # Errors
    /// `Invalid` with the variable and its value.
    pub fn with_environment(self) -> Result<Self> {
        self.filled_from(|name| {
            let value = env::var_os(name).filter(|value| !value.is_empty())?;
            Some(value.to_string_lossy().into_owned())
        })
    }

    fn filled_from(mut self, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        if self.transport == TransportChoice::Auto
            && let Some(value) = variable(TRANSPORT)
        {
            self.transport = TransportChoice::parse(&value)
                .map_err(|e| Error::invalid(format!("{TRANSPORT}={value}: {}", e.text())))?;
        }
        if self.secret.is_none()
            && let Some(path) = variable(SECRET_FILE)
        {
            self.secret = Some(read_secret(Path::new(&path))?);
        }
        if self.tls.is_none() {
            self.tls = match TLS.map(&variable) {
                [None, None, None] => None,
                [Some(cert), Some(key), Some(ca)] => Some(TlsFiles {
                    cert: cert.into(),
                    key: key.into(),
                    ca: ca.into(),
                }),
                _ => {
                    return Err(Error::invalid(format!(
                        "of {} some are set and some are not: TLS needs all three",
                        TLS.join(", ")
                    )));
                }
            };
        }
        match variable(SENTINEL).as_deref() {
            None | Some("1") => {}
            Some("0") => self.sentinel = false,
            Some(other) => {
                return Err(Error::invalid(format!("{SENTINEL}={other}: use 0 or 1")));
            }
        }
        Ok(self)
    }
}

fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let named = |what: String| Error::invalid(format!("{SECRET_FILE}={}: {what}", path.display()));
    let mut secret = fs::read(path).map_err(|e| named(format!("cannot be read: {e}")))?;
    if secret.last() == Some(&b'\n') {
        secret.pop();
        if secret.last() == Some(&b'\r') {
            secret.pop();
        }
    }
    if secret.len() < MIN_SECRET {
        return Err(named(format!(
            "the secret in it has {} bytes: at least {MIN_SECRET} are needed",
            secret.len()
        )));
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::LogicalId;

    fn config() -> Config {
        Config::new(LogicalId::new("m", 0, 0, 0).expect("valid"))
    }

    #[test]
    fn arguments_win_over_the_environment() {
        let says_ucx = |name: &str| (name == TRANSPORT).then(|| "ucx".to_owned());
        let filled = config().filled_from(says_ucx).expect("valid");
        assert_eq!(filled.transport, TransportChoice::Ucx);
        let mut given = config();
        given.transport = TransportChoice::Tcp;
        given.secret = Some(vec![7; 20]);
        let filled = given.filled_from(says_ucx).expect("valid");
        assert_eq!(filled.transport, TransportChoice::Tcp);
        assert_eq!(filled.secret, Some(vec![7; 20]));
    }

    #[test]
    fn a_wrong_value_is_named() {
        let error = config()
            .filled_from(|name| (name == TRANSPORT).then(|| "pigeon".to_owned()))
            .expect_err("unknown");
        assert!(
            error.text().contains("CONNEX_RS_TRANSPORT=pigeon"),
            "{error}"
        );
        let error = config()
            .filled_from(|name| (name == SECRET_FILE).then(|| "/nowhere/secret".to_owned()))
            .expect_err("no such file");
        assert!(
            error
                .text()
                .contains("CONNEX_RS_SECRET_FILE=/nowhere/secret"),
            "{error}"
        );
    }

    #[test]
    fn one_newline_at_the_end_of_the_secret_is_dropped() {
        let path = env::temp_dir().join(format!("connex-rs-secret-{}", std::process::id()));
        for (written, read) in [
            (&b"0123456789abcdef\n"[..], Some(16)),
            (b"0123456789abcdef\r\n", Some(16)),
            (b"0123456789abcdef\n\n", Some(17)),
            (b"0123456789abcde\n", None),
        ] {
            fs::write(&path, written).expect("a temporary file");
            let secret = config()
                .filled_from(|name| {
                    (name == SECRET_FILE).then(|| path.to_string_lossy().into_owned())
                })
                .map(|c| c.secret.map(|s| s.len()));
            assert_eq!(secret.ok().flatten(), read);
        }
        fs::remove_file(&path).expect("cleaned up");
    }
}
