//! The house's certificates: one CA per controller, and certificates that say a role and a name.
//!
//! Owns the CA's key while a controller runs; files are in `pki_files`. A host makes its key itself and sends a
//! signing request; of the request only the public key counts, names and uses are the CA's own decision. Keys are
//! ECDSA P-256. Certificates are good for [`CERTIFICATE_DAYS`] unless the CA was told otherwise. A renewed one has a
//! serial number and a key of its own and names the **life** that it continues: the serial number of the first one. A
//! life is what is enrolled and what is revoked. Refuses: certificates with no, several or unknown `godwit:` roles.

use crate::access::Peer;
use godwit_types::HostName;
use godwit_types::certificate::CertificateDates;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use std::fmt;
use std::time::Duration;
use x509_parser::oid_registry::OID_X509_SERIALNUMBER;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};
use zeroize::Zeroizing;

/// How long host, controller and operator certificates are good for.
pub const CERTIFICATE_DAYS: i64 = 365;
/// How long the CA is good for.
pub const CA_DAYS: i64 = 3650;
/// The controller's name in its certificate for programs that know servers by DNS names alone; Godwit's own do not look at
/// it.
pub const CONTROLLER_DNS: &str = "godwit-controller";
/// Certificates begin this long before they are made, for clocks that are behind.
const BACKDATED_S: i64 = 3600;
const DAY_S: i64 = 86_400;
const SERIAL_LEN: usize = 16;
/// Before the life that a renewed certificate names.
const LIFE: &str = "life ";
/// What is before the place among the certificates of a life, in the subject's serial number.
const ORDER: &str = "order ";
/// The attribute of that: `serialNumber` of X.520.
const ORDER_OID: [u64; 4] = [2, 5, 4, 5];

/// Why something with certificates failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// The cryptographic library refused.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The operating system gave no random numbers.
    #[error("the operating system gave no random numbers")]
    Entropy,
    /// Not a valid certificate of this house.
    #[error("not a certificate of a Godwit role: {0}")]
    Certificate(String),
    /// A certificate that does not go on from the one before.
    #[error("the certificate does not take the place of the one before: {0}; nothing was kept")]
    Successor(String),
    /// A PEM file or text without what it should hold.
    #[error("no {what} in {place}")]
    Pem {
        /// What was looked for.
        what: &'static str,
        place: String,
    },
    /// A signing request that is not valid.
    #[error("the certificate signing request is not valid: {0}")]
    Request(String),
    /// A file could not be read or written.
    #[error("cannot {doing} {path}: {source}")]
    File {
        doing: &'static str,
        path: String,
        source: std::io::Error,
    },
    /// A time that no certificate can carry.
    #[error("the clock shows a time that no certificate can carry; set it")]
    Clock,
    /// Rustls refused keys or certificates.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
}

/// What a certificate says its holder is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Role {
    Host(HostName),
    Controller,
    Operator(HostName),
}

impl Role {
    /// The URI that certificates carry.
    pub fn uri(&self) -> String {
        match self {
            Self::Host(name) => format!("godwit:host:{name}"),
            Self::Controller => "godwit:controller".into(),
            Self::Operator(name) => format!("godwit:operator:{name}"),
        }
    }

    fn from_uri(uri: &str) -> Option<Self> {
        let rest = uri.strip_prefix("godwit:")?;
        if rest == "controller" {
            return Some(Self::Controller);
        }
        let (kind, name) = rest.split_once(':')?;
        let name = HostName::new(name).ok()?;
        match kind {
            "host" => Some(Self::Host(name)),
            "operator" => Some(Self::Operator(name)),
            _ => None,
        }
    }

    pub fn is_host(&self) -> bool {
        matches!(self, Self::Host(_))
    }

    /// The peer that a certificate of this role makes.
    pub fn peer(&self) -> Peer {
        match self {
            Self::Host(name) => Peer::Host(name.clone()),
            Self::Controller => Peer::Controller,
            Self::Operator(name) => Peer::Operator(name.to_string()),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer().fmt(f)
    }
}

/// Role and serial number of a certificate whose chain has been verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// What its holder is.
    pub role: Role,
    /// Serial number, lower-case hex.
    pub serial: String,
    /// Serial number of the first certificate of this life, lower-case hex; its own unless it renewed another.
    pub life: String,
    /// When it was made, seconds since 1970.
    pub made_unix_s: i64,
    /// Its place among the certificates of its life and role: the later one has the greater number. When it was made,
    /// unless a clock that was ahead had made the one before it.
    pub order: i64,
    /// When it ends, seconds since 1970.
    pub not_after_unix_s: i64,
}

impl Holder {
    /// Reads a certificate; its chain is the caller's business.
    pub fn read(der: &[u8]) -> Result<Self, PkiError> {
        let (_, certificate) = X509Certificate::from_der(der)
            .map_err(|error| PkiError::Certificate(error.to_string()))?;
        let serial = hex(certificate.raw_serial());
        let validity = certificate.validity();
        let made_unix_s = validity.not_before.timestamp().saturating_add(BACKDATED_S);
        Ok(Self {
            role: role_of(&certificate)?,
            life: life_of(&certificate)?.unwrap_or_else(|| serial.clone()),
            serial,
            made_unix_s,
            order: order_of(&certificate)?.unwrap_or(made_unix_s),
            not_after_unix_s: validity.not_after.timestamp(),
        })
    }

    /// When it was made and when it ends.
    pub fn dates(&self) -> CertificateDates {
        CertificateDates {
            made_unix_s: self.made_unix_s,
            ends_unix_s: self.not_after_unix_s,
        }
    }
}

/// The life that a renewed certificate names, in its subject, which the CA alone writes.
fn life_of(certificate: &X509Certificate<'_>) -> Result<Option<String>, PkiError> {
    let mut named = certificate.subject().iter_organizational_unit();
    let Some(unit) = named.next() else {
        return Ok(None);
    };
    let text = unit.as_str().ok().and_then(|text| text.strip_prefix(LIFE));
    let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    match (text, named.next()) {
        (Some(life), None) if life.len() == 2 * SERIAL_LEN && life.chars().all(hex) => {
            Ok(Some(life.to_owned()))
        }
        _ => Err(PkiError::Certificate("it names no life, or several".into())),
    }
}

/// The place that it names, in its subject, where that is not when it was made.
fn order_of(certificate: &X509Certificate<'_>) -> Result<Option<i64>, PkiError> {
    let mut named = certificate.subject().iter_by_oid(&OID_X509_SERIALNUMBER);
    let Some(number) = named.next() else {
        return Ok(None);
    };
    let text = number
        .as_str()
        .ok()
        .and_then(|text| text.strip_prefix(ORDER));
    match (text.and_then(|text| text.parse().ok()), named.next()) {
        (Some(order), None) => Ok(Some(order)),
        _ => Err(PkiError::Certificate(
            "it names no place, or several".into(),
        )),
    }
}

fn role_of(certificate: &X509Certificate<'_>) -> Result<Role, PkiError> {
    let names = certificate
        .subject_alternative_name()
        .map_err(|error| PkiError::Certificate(error.to_string()))?
        .ok_or_else(|| PkiError::Certificate("it names no role".into()))?;
    let mut uris = names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
    let role = uris.next().and_then(Role::from_uri);
    match (role, uris.next()) {
        (Some(role), None) => Ok(role),
        _ => Err(PkiError::Certificate("it names no role, or several".into())),
    }
}

/// SHA-256 of the CA's certificate.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Of a certificate, DER.
    pub fn of(der: &[u8]) -> Self {
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, der);
        let mut bytes = [0u8; 32];
        for (to, from) in bytes.iter_mut().zip(digest.as_ref()) {
            *to = *from;
        }
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// Bytes as lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A certificate with its key and the CA's certificate: what one party needs to speak.
#[derive(Clone)]
pub struct Identity {
    pub certificate_pem: String,
    pub key_pem: Zeroizing<String>,
    /// The CA's certificate, PEM.
    pub ca_pem: String,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(key not shown)")
    }
}

impl Identity {
    /// What the certificate says.
    pub fn holder(&self) -> Result<Holder, PkiError> {
        Holder::read(&certificate_from_pem(&self.certificate_pem)?)
    }

    pub fn ca_fingerprint(&self) -> Result<Fingerprint, PkiError> {
        Ok(Fingerprint::of(&certificate_from_pem(&self.ca_pem)?))
    }

    /// Refuses to take the place of `before` unless both are of the same CA, role and life, and this one was made later:
    /// whoever speaks with it stays who it was.
    pub fn must_succeed(&self, before: &Self) -> Result<(), PkiError> {
        let refused = |why: &str| Err(PkiError::Successor(why.into()));
        if self.ca_fingerprint()? != before.ca_fingerprint()? {
            return refused("it is from another CA");
        }
        let (was, is) = (before.holder()?, self.holder()?);
        if is.role != was.role {
            return refused(&format!("it is that of {}", is.role));
        }
        if is.life != was.life {
            return refused("it begins a life of its own");
        }
        if is.order < was.order || is.serial == was.serial {
            return refused("it is not the later one");
        }
        Ok(())
    }

    /// Own certificate first, then the CA's, so that a joining host can compare the fingerprint.
    pub(crate) fn chain(&self) -> Result<Vec<CertificateDer<'static>>, PkiError> {
        Ok(vec![
            certificate_from_pem(&self.certificate_pem)?,
            certificate_from_pem(&self.ca_pem)?,
        ])
    }

    pub(crate) fn key(&self) -> Result<PrivateKeyDer<'static>, PkiError> {
        PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).map_err(|_| PkiError::Pem {
            what: "private key",
            place: "the identity".into(),
        })
    }
}

pub(crate) fn certificate_from_pem(pem: &str) -> Result<CertificateDer<'static>, PkiError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| PkiError::Pem {
        what: "certificate",
        place: "PEM text".into(),
    })
}

/// A key that has no certificate yet, and the request for one.
pub struct Request {
    key: KeyPair,
    /// The signing request, PEM.
    pub csr_pem: String,
}

impl Request {
    /// Makes a new key.
    pub fn new() -> Result<Self, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let csr_pem = CertificateParams::default()
            .serialize_request(&key)?
            .pem()?;
        Ok(Self { key, csr_pem })
    }

    /// The identity, once the CA has answered. Refuses a certificate for another key.
    pub fn into_identity(
        self,
        certificate_pem: String,
        ca_pem: String,
    ) -> Result<Identity, PkiError> {
        let der = certificate_from_pem(&certificate_pem)?;
        let (_, certificate) = X509Certificate::from_der(&der)
            .map_err(|error| PkiError::Certificate(error.to_string()))?;
        if certificate.public_key().subject_public_key.data.as_ref() != self.key.der_bytes() {
            return Err(PkiError::Certificate("it is for another key".into()));
        }
        Ok(Identity {
            certificate_pem,
            key_pem: Zeroizing::new(self.key.serialize_pem()),
            ca_pem,
        })
    }

    /// The identity that takes the place of `before`. Refuses one that does not: see [`Identity::must_succeed`].
    pub fn into_successor(
        self,
        certificate_pem: String,
        ca_pem: String,
        before: &Identity,
    ) -> Result<Identity, PkiError> {
        let identity = self.into_identity(certificate_pem, ca_pem)?;
        identity.must_succeed(before)?;
        Ok(identity)
    }
}

/// The CA: its certificate and key.
pub struct Authority {
    pub(crate) certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
    fingerprint: Fingerprint,
    ends_unix_s: i64,
    /// How long what it signs is good for, seconds.
    valid_s: i64,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({})", self.fingerprint)
    }
}

/// A certificate that the CA has made.
#[derive(Debug, Clone)]
pub struct Issued {
    pub certificate_pem: String,
    /// Its serial number, lower-case hex.
    pub serial: String,
}

impl Issued {
    /// Reads what the CA has put into it.
    pub fn holder(&self) -> Result<Holder, PkiError> {
        Holder::read(&certificate_from_pem(&self.certificate_pem)?)
    }
}

impl Authority {
    /// Makes a new CA.
    pub fn create(now_unix_s: i64) -> Result<Self, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = params("Godwit CA", now_unix_s, CA_DAYS * DAY_S)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key)?.pem();
        Self::from_pem(pem, &Zeroizing::new(key.serialize_pem()))
    }

    /// A CA that was made before.
    pub fn from_pem(certificate_pem: String, key_pem: &str) -> Result<Self, PkiError> {
        let der = certificate_from_pem(&certificate_pem)?;
        let issuer = Issuer::from_ca_cert_der(&der, KeyPair::from_pem(key_pem)?)?;
        Ok(Self {
            certificate_pem,
            issuer,
            fingerprint: Fingerprint::of(&der),
            ends_unix_s: ends(&der)?,
            valid_s: CERTIFICATE_DAYS * DAY_S,
        })
    }

    /// The same, signing certificates that are good for so long.
    pub fn with_validity(mut self, validity: Duration) -> Self {
        let seconds = i64::try_from(validity.as_secs()).unwrap_or(i64::MAX);
        self.valid_s = seconds.clamp(1, CA_DAYS * DAY_S);
        self
    }

    /// When its own certificate was made and when it ends.
    pub fn dates(&self) -> CertificateDates {
        CertificateDates {
            made_unix_s: self.ends_unix_s.saturating_sub(CA_DAYS * DAY_S),
            ends_unix_s: self.ends_unix_s,
        }
    }

    pub(crate) fn key_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(self.issuer.key().serialize_pem())
    }

    /// The CA's certificate, PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// SHA-256 of its certificate.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Certifies the key in a signing request for `role`, whatever names the request asks for.
    pub fn sign(&self, csr_pem: &str, role: &Role, now_unix_s: i64) -> Result<Issued, PkiError> {
        self.sign_from(csr_pem, role, now_unix_s, now_unix_s)
    }

    /// As [`Authority::sign`], in a place that is no earlier than this one.
    pub fn sign_from(
        &self,
        csr_pem: &str,
        role: &Role,
        now_unix_s: i64,
        earliest: i64,
    ) -> Result<Issued, PkiError> {
        let request = CertificateSigningRequestParams::from_pem(csr_pem)
            .map_err(|error| PkiError::Request(error.to_string()))?;
        let order = now_unix_s.max(earliest);
        self.certify(&request.public_key, role, None, (now_unix_s, order))
    }

    /// Certifies a new key for who has a certificate already: the same role, the same life, and the next place in it. It is
    /// good from now on, also where the one before was made while a clock was ahead.
    pub fn sign_again(
        &self,
        csr_pem: &str,
        holder: &Holder,
        now_unix_s: i64,
    ) -> Result<Issued, PkiError> {
        let request = CertificateSigningRequestParams::from_pem(csr_pem)
            .map_err(|error| PkiError::Request(error.to_string()))?;
        let life = Some(holder.life.as_str());
        let order = now_unix_s.max(holder.order.saturating_add(1));
        self.certify(&request.public_key, &holder.role, life, (now_unix_s, order))
    }

    /// Makes a key and a certificate for `role`.
    pub fn identity(&self, role: &Role, now_unix_s: i64) -> Result<Identity, PkiError> {
        let request = Request::new()?;
        let issued = self.sign(&request.csr_pem, role, now_unix_s)?;
        request.into_identity(issued.certificate_pem, self.certificate_pem.clone())
    }

    fn certify(
        &self,
        key: &impl PublicKeyData,
        role: &Role,
        life: Option<&str>,
        (now_unix_s, order): (i64, i64),
    ) -> Result<Issued, PkiError> {
        let mut params = params(&role.uri(), now_unix_s, self.valid_s)?;
        if let Some(life) = life {
            let unit = DnType::OrganizationalUnitName;
            params
                .distinguished_name
                .push(unit, format!("{LIFE}{life}"));
        }
        if order != now_unix_s {
            let place = DnType::CustomDnType(ORDER_OID.to_vec());
            params
                .distinguished_name
                .push(place, format!("{ORDER}{order}"));
        }
        params.subject_alt_names = vec![SanType::URI(role.uri().try_into()?)];
        if *role == Role::Controller {
            let name = SanType::DnsName(CONTROLLER_DNS.try_into()?);
            params.subject_alt_names.push(name);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(key, &self.issuer)?;
        Ok(Issued {
            serial: Holder::read(certificate.der())?.serial,
            certificate_pem: certificate.pem(),
        })
    }
}

fn ends(der: &[u8]) -> Result<i64, PkiError> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|error| PkiError::Certificate(error.to_string()))?;
    Ok(certificate.validity().not_after.timestamp())
}

fn params(common_name: &str, now_unix_s: i64, valid_s: i64) -> Result<CertificateParams, PkiError> {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    let mut serial = [0u8; SERIAL_LEN];
    getrandom::fill(&mut serial).map_err(|_| PkiError::Entropy)?;
    // A serial number is a positive integer without leading zeros.
    serial[0] = serial[0] & 0x3f | 0x40;
    let at = |s: Option<i64>| {
        let s = s.ok_or(PkiError::Clock)?;
        let time = x509_parser::time::ASN1Time::from_timestamp(s).map_err(|_| PkiError::Clock)?;
        Ok::<_, PkiError>(time.to_datetime())
    };
    let mut params = CertificateParams::default();
    params.not_before = at(now_unix_s.checked_sub(BACKDATED_S))?;
    params.not_after = at(now_unix_s.checked_add(valid_s))?;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.distinguished_name = name;
    Ok(params)
}

/// Seconds since 1970 by this machine's clock.
pub fn now_unix_s() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_secs()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "pki_tests.rs"]
mod tests;
