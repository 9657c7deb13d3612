//! Certificates for QEMU's TLS: an authority, one for the listening side, one for the other.
//!
//! Made anew for each bench, below its directory; they protect nothing but measurements.

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use std::path::Path;

/// The name that the destination's certificate bears.
pub const HOST_NAME: &str = "bench.test";

/// A public Diffie-Hellman group (RFC 7919): without one QEMU's listening side makes a new one for a second or more.
const GROUP: &str = include_str!("ffdhe3072.pem");

/// Writes the files that `tls-creds-x509` looks for.
pub fn write(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("dh-params.pem"), GROUP)?;
    let authority_key = KeyPair::generate()?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    authority
        .distinguished_name
        .push(DnType::CommonName, "bench authority");
    let root = authority.self_signed(&authority_key)?;
    std::fs::write(dir.join("ca-cert.pem"), root.pem())?;
    let issuer = Issuer::from_params(&authority, &authority_key);
    for end in ["server", "client"] {
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::new(vec![HOST_NAME.to_owned()])?;
        parameters
            .distinguished_name
            .push(DnType::CommonName, HOST_NAME);
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = parameters.signed_by(&key, &issuer)?;
        std::fs::write(dir.join(format!("{end}-cert.pem")), certificate.pem())?;
        std::fs::write(dir.join(format!("{end}-key.pem")), key.serialize_pem())?;
    }
    Ok(())
}
