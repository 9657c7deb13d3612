//! TLS 1.3 set-ups for both sides, by the house's own CA and nobody else's.
//!
//! Server: client certificates are verified when given and may be absent, since joining hosts have none; what an
//! absent one may do is `access`'s business. Client: the server's chain must end in the CA and its certificate must
//! carry the expected role; host names in certificates play no part. Joining: the CA is known by fingerprint only.
//! Refuses: TLS 1.2, session resumption (each connection shows its certificate, so that revocation holds).

use crate::current::Current;
use crate::pki::{Fingerprint, Holder, Identity, PkiError, Role, certificate_from_pem};
use crate::revocations::Admission;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::sync::Arc;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn tls_error(error: impl std::fmt::Display) -> PkiError {
    PkiError::Tls(error.to_string())
}

fn roots(ca: CertificateDer<'static>) -> Result<RootCertStore, PkiError> {
    let mut roots = RootCertStore::empty();
    roots.add(ca).map_err(tls_error)?;
    Ok(roots)
}

/// Set-up of a server with this identity.
pub fn server_config(identity: &Identity) -> Result<Arc<ServerConfig>, PkiError> {
    server_config_of(&Current::new(identity.clone())?)
}

/// Set-up of a server that shows whichever identity is the current one.
pub fn server_config_of(current: &Arc<Current>) -> Result<Arc<ServerConfig>, PkiError> {
    let ca = certificate_from_pem(&current.identity().ca_pem)?;
    let roots = Arc::new(roots(ca)?);
    let clients = WebPkiClientVerifier::builder_with_provider(roots, provider())
        .allow_unauthenticated()
        .build()
        .map_err(tls_error)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(current.clone());
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Set-up of a client with this identity that talks to `peer` only, and only while `admission` admits its certificate.
pub fn client_config(
    identity: &Identity,
    peer: Role,
    admission: Option<Arc<dyn Admission>>,
) -> Result<Arc<ClientConfig>, PkiError> {
    let trust = Trust::Ca(roots(certificate_from_pem(&identity.ca_pem)?)?);
    let builder = client_builder(trust, peer, admission)?;
    let mut config = builder
        .with_client_auth_cert(identity.chain()?, identity.key()?)
        .map_err(tls_error)?;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Set-up of a joining host: no identity yet, the controller known by its CA's fingerprint.
pub fn joining_config(fingerprint: Fingerprint) -> Result<Arc<ClientConfig>, PkiError> {
    let builder = client_builder(Trust::Fingerprint(fingerprint), Role::Controller, None)?;
    Ok(Arc::new(builder.with_no_client_auth()))
}

/// Whether this certificate was made by that CA, whatever the time is now.
pub(crate) fn was_made_by(ca: CertificateDer<'static>, end: &CertificateDer<'_>, at: i64) -> bool {
    let at = u64::try_from(at).unwrap_or(0);
    let at = UnixTime::since_unix_epoch(std::time::Duration::from_secs(at));
    let verify = || {
        let roots = roots(ca).ok()?;
        let parsed = ParsedCertificate::try_from(end).ok()?;
        let provider = provider();
        let algorithms = provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &[], at, algorithms).ok()
    };
    verify().is_some()
}

type ClientBuilder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

fn client_builder(
    trust: Trust,
    peer: Role,
    admission: Option<Arc<dyn Admission>>,
) -> Result<ClientBuilder, PkiError> {
    let verifier = Arc::new(RoleVerifier {
        trust,
        peer,
        admission,
        provider: provider(),
    });
    Ok(ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?
        .dangerous()
        .with_custom_certificate_verifier(verifier))
}

#[derive(Debug)]
enum Trust {
    Ca(RootCertStore),
    Fingerprint(Fingerprint),
}

/// Verifies chain and role of a server.
struct RoleVerifier {
    trust: Trust,
    peer: Role,
    admission: Option<Arc<dyn Admission>>,
    provider: Arc<CryptoProvider>,
}

impl std::fmt::Debug for RoleVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RoleVerifier({})", self.peer)
    }
}

impl RoleVerifier {
    fn check_chain(
        &self,
        end: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let found;
        let roots = match &self.trust {
            Trust::Ca(roots) => roots,
            Trust::Fingerprint(fingerprint) => {
                found = root_by_fingerprint(rest, fingerprint)?;
                &found
            }
        };
        let algorithms = self.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(end)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, roots, &[], now, algorithms)
    }
}

fn root_by_fingerprint(
    rest: &[CertificateDer<'_>],
    fingerprint: &Fingerprint,
) -> Result<RootCertStore, Error> {
    let ca = rest
        .iter()
        .find(|certificate| Fingerprint::of(certificate) == *fingerprint)
        .ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
    let mut roots = RootCertStore::empty();
    roots.add(ca.clone().into_owned())?;
    Ok(roots)
}

impl ServerCertVerifier for RoleVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check_chain(end_entity, intermediates, now)?;
        let holder = Holder::read(end_entity)
            .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
        if holder.role != self.peer {
            return Err(Error::General(format!(
                "the certificate is that of {}, not of {}",
                holder.role, self.peer
            )));
        }
        if self
            .admission
            .as_ref()
            .is_some_and(|admission| !admission.admits(&holder))
        {
            return Err(Error::InvalidCertificate(CertificateError::Revoked));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
