//! What hosts and controllers say to each other of an image of a VM's disk on storage that hosts share.
//!
//! Pure data. What an image says of itself, and what follows from both, is crate `ownership`'s.

use crate::ids::Generation;
use serde::{Deserialize, Serialize};

/// Tells one image from every other, and from what is put in its place: 16 bytes in hexadecimal, made at random.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId(String);

impl ImageId {
    pub fn new(random: u128) -> Self {
        Self(format!("{random:032x}"))
    }
}

impl TryFrom<String> for ImageId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.len() == 32 && text.bytes().all(is_hex) {
            true => Ok(Self(text)),
            false => Err("an image's id is 32 hexadecimal digits"),
        }
    }
}

impl From<ImageId> for String {
    fn from(id: ImageId) -> Self {
        id.0
    }
}

/// What a host knows durably of the image of one of its VM's disks: that it took this one under this generation, as the
/// `taken`th who did; or, of a VM that is to come, that the host from which it comes did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownImage {
    pub disk: String,
    pub image: ImageId,
    pub generation: Generation,
    pub taken: u64,
}
