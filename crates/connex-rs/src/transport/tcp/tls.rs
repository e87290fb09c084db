//! TLS on a connection: mutual, with the logical id in the certificate.
//!
//! Each engine's certificate carries its identity as a URI name,
//! `connex-rs:model|stage|shard|replica` with what is not allowed in a URI percent-encoded. Both sides check the other's
//! chain against the one authority that they trust; the engine then compares the identity with the one that the peer claims. Host
//! names play no part: a stage is who it is wherever it runs.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, DistinguishedName,
    RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};
use socket2::Socket;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

use crate::identity::LogicalId;

/// The scheme of the URI name that carries an identity.
const SCHEME: &str = "connex-rs:";

/// Plain bytes that a session may hold encrypted and unsent.
const HELD: usize = 512 << 10;

/// The files of an engine's side of TLS, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// The engine's certificate, with its chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that peers' certificates must come from.
    pub ca: PathBuf,
}

/// What sessions are made from.
#[derive(Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// A sentence with the file and what is wrong; also if the certificate does not carry `me`.
    pub fn load(files: &TlsFiles, me: &LogicalId) -> Result<Self, String> {
        let chain = certificates(&files.cert)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|e| format!("{}: {e}", files.key.display()))?;
        let carried = chain.first().map(identity_of).transpose()?;
        if carried.as_deref() != Some(&*me.to_string()) {
            return Err(format!(
                "{}: the certificate carries the identity {}, this engine is {me}; its URI name must be {}",
                files.cert.display(),
                carried.as_deref().unwrap_or("none"),
                uri_of(me)
            ));
        }
        let mut roots = RootCertStore::empty();
        for authority in certificates(&files.ca)? {
            roots
                .add(authority)
                .map_err(|e| format!("{}: {e}", files.ca.display()))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain_check = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|e| format!("{}: {e}", files.ca.display()))?;
        let pair = |e: rustls::Error| {
            format!("{} with {}: {e}", files.cert.display(), files.key.display())
        };
        let versions = &[&rustls::version::TLS13];
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(pair)?
            .with_client_cert_verifier(Arc::new(ByChain {
                chain: chain_check.clone(),
                provider: provider.clone(),
            }))
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(pair)?;
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(pair)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(ByChain {
                chain: chain_check,
                provider,
            }))
            .with_client_auth_cert(chain, key)
            .map_err(pair)?;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// The dialling side of a session.
    ///
    /// # Errors
    /// rustls's own words.
    pub(super) fn dial(&self) -> Result<Session, rustls::Error> {
        // A name is asked for and never compared.
        let name = ServerName::try_from("connex-rs").expect("a valid name");
        ClientConnection::new(self.client.clone(), name).map(|c| Session::new(c.into()))
    }

    /// The accepting side of a session.
    ///
    /// # Errors
    /// rustls's own words.
    pub(super) fn accept(&self) -> Result<Session, rustls::Error> {
        ServerConnection::new(self.server.clone()).map(|c| Session::new(c.into()))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let named = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let all: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(|e| named(&e))?
        .collect::<Result<_, _>>()
        .map_err(|e| named(&e))?;
    if all.is_empty() {
        Err(named(&"no certificate in it"))
    } else {
        Ok(all)
    }
}

/// The URI name of an identity.
pub fn uri_of(id: &LogicalId) -> String {
    let mut uri = SCHEME.to_owned();
    for byte in id.to_string().bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            uri.push(byte as char);
        } else {
            uri.push_str(&format!("%{byte:02X}"));
        }
    }
    uri
}

/// The identity that a certificate carries.
fn identity_of(cert: &CertificateDer<'_>) -> Result<String, String> {
    let (_, parsed) =
        parse_x509_certificate(cert).map_err(|e| format!("not a certificate: {e}"))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|e| format!("the certificate's names: {e}"))?;
    names
        .iter()
        .flat_map(|names| &names.value.general_names)
        .find_map(|name| match name {
            GeneralName::URI(uri) => uri.strip_prefix(SCHEME).and_then(decode_percent),
            _ => None,
        })
        .ok_or_else(|| format!("the certificate has no URI name that begins with {SCHEME}"))
}

/// Whatever a peer calls its certificate.
#[cfg(fuzzing)]
pub(crate) fn fuzz(bytes: &[u8]) {
    let _ = identity_of(&CertificateDer::from(bytes));
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = decode_percent(text);
    }
}

fn decode_percent(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, tail) = tail.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

/// Accepts whoever the authority vouches for, on both sides alike.
#[derive(Debug)]
struct ByChain {
    chain: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ByChain {
    fn check(
        &self,
        cert: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        self.chain.verify_client_cert(cert, others, now)?;
        ParsedCertificate::try_from(cert)?;
        identity_of(cert).map(drop).map_err(rustls::Error::General)
    }
}

impl ServerCertVerifier for ByChain {
    fn verify_server_cert(
        &self,
        cert: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(cert, others, now)
            .map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            cert,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            cert,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl ClientCertVerifier for ByChain {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        cert: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(cert, others, now)
            .map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        ServerCertVerifier::verify_tls12_signature(self, message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        ServerCertVerifier::verify_tls13_signature(self, message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ServerCertVerifier::supported_verify_schemes(self)
    }
}

/// TLS on one connection.
pub(super) struct Session {
    tls: Connection,
    /// The peer's identity has been reported.
    reported: bool,
}

/// What reading came to.
pub(super) enum Reads {
    /// So many plain bytes.
    Plain(usize),
    /// Nothing now.
    Blocked,
    /// The stream has ended.
    End,
}

impl Session {
    fn new(mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(HELD));
        Self {
            tls,
            reported: false,
        }
    }

    /// The identity that the peer has proven, once.
    pub(super) fn newly_proven(&mut self) -> Option<String> {
        if self.reported || self.tls.is_handshaking() {
            return None;
        }
        self.reported = true;
        let cert = self.tls.peer_certificates()?.first()?;
        identity_of(cert).ok()
    }

    /// Takes plain bytes to be encrypted; fewer than given when enough is held.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tls.writer().write(bytes)
    }

    /// Sends what is encrypted; false if the socket takes no more.
    pub(super) fn send(&mut self, socket: &Socket) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Quiet(socket)) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Whether plain bytes can be given to [`write`](Self::write).
    pub(super) fn is_open(&self) -> bool {
        !self.tls.is_handshaking()
    }

    /// Whether something encrypted waits for the socket.
    pub(super) fn has_output(&self) -> bool {
        self.tls.wants_write()
    }

    /// Reads and decrypts into `plain`.
    pub(super) fn read(&mut self, socket: &Socket, plain: &mut [u8]) -> io::Result<Reads> {
        loop {
            match self.tls.reader().read(plain) {
                Ok(0) => return Ok(Reads::End),
                Ok(n) => return Ok(Reads::Plain(n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(Reads::End),
                Err(e) => return Err(e),
            }
            match self.tls.read_tls(&mut { socket }) {
                Ok(0) => return Ok(Reads::End),
                Ok(_) => {
                    self.tls.process_new_packets().map_err(|e| {
                        // The alert tells the peer why.
                        let _ = self.tls.write_tls(&mut Quiet(socket));
                        io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {e}"))
                    })?;
                    if self.tls.is_handshaking() || self.tls.wants_write() {
                        self.send(socket)?;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Reads::Blocked),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// A socket whose writes raise no SIGPIPE.
struct Quiet<'a>(&'a Socket);

impl Write for Quiet<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_with_flags(bytes, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_survive_the_uri() {
        let id = LogicalId::new("llama 3/8b%é", 1, 2, u32::MAX).expect("valid");
        let uri = uri_of(&id);
        assert!(
            uri.is_ascii() && !uri.contains('|') && !uri.contains(' '),
            "{uri}"
        );
        assert_eq!(
            uri.strip_prefix(SCHEME).and_then(decode_percent),
            Some(id.to_string())
        );
        assert_eq!(decode_percent("a%4"), None);
        assert_eq!(decode_percent("a%zz"), None);
    }
}
