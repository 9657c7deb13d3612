//! Bytes as base64 text in JSON. They may be a key: the text is wiped.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serializer};
use zeroize::Zeroizing;

/// Writes bytes as base64.
pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&Zeroizing::new(STANDARD.encode(bytes)))
}

/// Reads bytes from base64.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = Zeroizing::new(String::deserialize(deserializer)?);
    STANDARD
        .decode(text.as_bytes())
        .map_err(serde::de::Error::custom)
}
