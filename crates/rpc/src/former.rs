//! A host whose certificate has ended shows that it is that host: it signs with the key that it had.
//!
//! Owns nothing. What is signed names the token's secret and the request for the new key, so that no signature is good a
//! second time. Refuses: certificates of another CA, and signatures of another key.

use crate::pki::{Authority, Holder, Identity, PkiError, certificate_from_pem, hex};
use crate::tls;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use godwit_types::control_api::FormerCertificate;
use rcgen::{KeyPair, SigningKey as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// What begins every such text, so that nothing else that the key ever signs can be taken for it.
const PURPOSE: &str = "godwit: this key's host goes on with another one";
/// Longest signature, in hex digits.
const SIGNATURE_LEN_MAX: usize = 256;

fn signed_text(secret: &str, csr_pem: &str) -> String {
    format!("{PURPOSE}\n{secret}\n{csr_pem}")
}

impl Identity {
    /// Shows the key of this identity to the controller that gave the token with this secret.
    pub fn shown_as_former(
        &self,
        secret: &str,
        csr_pem: &str,
    ) -> Result<FormerCertificate, PkiError> {
        let key = KeyPair::from_pem(&self.key_pem)?;
        let signature = key.sign(signed_text(secret, csr_pem).as_bytes())?;
        Ok(FormerCertificate {
            certificate_pem: self.certificate_pem.clone(),
            signature: hex(&signature),
        })
    }
}

impl Authority {
    /// Who shows this former certificate, if it is of this CA and its key has signed.
    pub fn former_holder(
        &self,
        former: &FormerCertificate,
        secret: &str,
        csr_pem: &str,
    ) -> Result<Holder, PkiError> {
        let refused = |why: &str| PkiError::Certificate(why.into());
        let der = certificate_from_pem(&former.certificate_pem)?;
        let holder = Holder::read(&der)?;
        let ca = certificate_from_pem(self.certificate_pem())?;
        // As of its last second: that it has ended is why it is shown.
        if !tls::was_made_by(ca, &der, holder.not_after_unix_s.saturating_sub(1)) {
            return Err(refused("it is from another CA"));
        }
        let signature =
            bytes(&former.signature).ok_or_else(|| refused("its signature is no hex"))?;
        let (_, certificate) =
            X509Certificate::from_der(&der).map_err(|error| refused(&error.to_string()))?;
        let key = certificate.public_key().subject_public_key.data.as_ref();
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key)
            .verify(signed_text(secret, csr_pem).as_bytes(), &signature)
            .map_err(|_| refused("who shows it does not have its key"))?;
        Ok(holder)
    }
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if digits.len() > SIGNATURE_LEN_MAX || !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |digit: &u8| char::from(*digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => u8::try_from(digit(high)? * 16 + digit(low)?).ok(),
        _ => None,
    };
    digits.chunks(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::{Request, Role};
    use godwit_types::HostName;

    const NOW: i64 = 1_800_000_000;

    #[test]
    fn only_the_key_of_the_former_certificate_goes_on_and_for_one_request_only() {
        let ca = Authority::create(NOW).unwrap();
        let role = Role::Host(HostName::new("a").unwrap());
        let former = ca.identity(&role, NOW).unwrap();
        let csr = Request::new().unwrap().csr_pem;
        let shown = former.shown_as_former("secret", &csr).unwrap();
        let holder = ca.former_holder(&shown, "secret", &csr).unwrap();
        assert_eq!(holder, former.holder().unwrap());

        let other_request = Request::new().unwrap().csr_pem;
        assert!(ca.former_holder(&shown, "secret", &other_request).is_err());
        assert!(ca.former_holder(&shown, "another", &csr).is_err());
        let thief = ca.identity(&role, NOW).unwrap();
        let mut stolen = thief.shown_as_former("secret", &csr).unwrap();
        stolen.certificate_pem = former.certificate_pem.clone();
        let error = ca.former_holder(&stolen, "secret", &csr).unwrap_err();
        assert!(error.to_string().contains("does not have its key"));
        let elsewhere = Authority::create(NOW).unwrap();
        let error = elsewhere.former_holder(&shown, "secret", &csr).unwrap_err();
        assert!(error.to_string().contains("another CA"), "{error}");
    }

    #[test]
    fn a_signature_that_is_none_is_refused() {
        let ca = Authority::create(NOW).unwrap();
        let former = ca.identity(&Role::Controller, NOW).unwrap();
        for bad in ["", "0", "zz", "00", &"00".repeat(1000), "\u{e9}"] {
            let mut shown = former.shown_as_former("s", "r").unwrap();
            shown.signature = bad.into();
            assert!(ca.former_holder(&shown, "s", "r").is_err(), "{bad}");
        }
    }
}
