//! Join tokens: `godwit1.SECRET.FINGERPRINT.ADDRESSES`, each part base64url.
//!
//! Pure but for [`Token::new`], which asks the operating system for the secret. A token is shown once; the controller
//! keeps only the secret's hash. Refuses: anything that is not exactly four parts of the right size.

use crate::pki::{Fingerprint, PkiError};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use std::fmt;
use std::net::SocketAddr;
use zeroize::Zeroizing;

const PREFIX: &str = "godwit1";
const SECRET_LEN: usize = 32;
const ADDRESSES_MAX: usize = 8;
const TOKEN_LEN_MAX: usize = 2048;

/// Why a token was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this is not a join token: copy it whole from 'godwit host add', it begins with {PREFIX}.")]
pub struct BadToken;

/// A one-time right to join.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: Zeroizing<String>,
    /// The CA that the controller must show.
    pub fingerprint: Fingerprint,
    /// Where the controller listens.
    pub addresses: Vec<SocketAddr>,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(secret not shown, {})", self.fingerprint)
    }
}

impl Token {
    /// Makes a new secret.
    pub fn new(fingerprint: Fingerprint, addresses: Vec<SocketAddr>) -> Result<Self, PkiError> {
        let mut bytes = Zeroizing::new([0u8; SECRET_LEN]);
        getrandom::fill(bytes.as_mut()).map_err(|_| PkiError::Entropy)?;
        Ok(Self {
            secret: Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_ref())),
            fingerprint,
            addresses,
        })
    }

    /// The secret part, to be sent to the controller once it has shown the right CA.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// The whole token, to be shown to a person once.
    pub fn to_text(&self) -> String {
        let addresses: Vec<String> = self.addresses.iter().map(SocketAddr::to_string).collect();
        format!(
            "{PREFIX}.{}.{}.{}",
            *self.secret,
            URL_SAFE_NO_PAD.encode(self.fingerprint.0),
            URL_SAFE_NO_PAD.encode(addresses.join(","))
        )
    }

    /// Reads a token that a person copied.
    pub fn parse(text: &str) -> Result<Self, BadToken> {
        let text = text.trim();
        if text.len() > TOKEN_LEN_MAX {
            return Err(BadToken);
        }
        let mut parts = text.split('.');
        if parts.next() != Some(PREFIX) {
            return Err(BadToken);
        }
        let secret = parts.next().ok_or(BadToken)?;
        let fingerprint = decode(parts.next())?;
        let addresses = String::from_utf8(decode(parts.next())?).map_err(|_| BadToken)?;
        if parts.next().is_some() || decode(Some(secret))?.len() != SECRET_LEN {
            return Err(BadToken);
        }
        Ok(Self {
            secret: Zeroizing::new(secret.to_owned()),
            fingerprint: Fingerprint(fingerprint.try_into().map_err(|_| BadToken)?),
            addresses: parse_addresses(&addresses)?,
        })
    }
}

fn decode(part: Option<&str>) -> Result<Vec<u8>, BadToken> {
    URL_SAFE_NO_PAD
        .decode(part.ok_or(BadToken)?)
        .map_err(|_| BadToken)
}

fn parse_addresses(text: &str) -> Result<Vec<SocketAddr>, BadToken> {
    let addresses: Result<Vec<SocketAddr>, _> = text
        .split(',')
        .filter(|part| !part.is_empty())
        .take(ADDRESSES_MAX)
        .map(str::parse)
        .collect();
    addresses.map_err(|_| BadToken)
}

/// What is stored of a secret: its SHA-256, hex. The secret has 256 bits of entropy, so a plain hash is enough.
pub fn hash_of(secret: &str) -> String {
    crate::pki::hex(
        aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, secret.as_bytes()).as_ref(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Token {
        let addresses = vec![
            "192.0.2.1:7440".parse().unwrap(),
            "[2001:db8::1]:7440".parse().unwrap(),
        ];
        Token::new(Fingerprint([7; 32]), addresses).unwrap()
    }

    #[test]
    fn text_and_back() {
        let token = token();
        assert_eq!(Token::parse(&token.to_text()).unwrap(), token);
        assert!(!format!("{token:?}").contains(token.secret()));
    }

    #[test]
    fn damaged_tokens_are_refused() {
        let text = token().to_text();
        let cut = &text[..text.len() - 70];
        for bad in [
            "",
            "godwit1",
            "godwit1...",
            cut,
            &format!("{text}.x"),
            &text.replace('1', "2"),
        ] {
            assert_eq!(Token::parse(bad), Err(BadToken), "{bad}");
        }
    }
}
