//! The file format of a record: it tells a whole file of ours from everything else.
//!
//! ```text
//! offset  size
//!      0     8  magic "GODWITOR"
//!      8     4  format version, little endian (1)
//!     12     4  length n of the payload, little endian
//!     16     4  CRC-32 (IEEE 802.3) of bytes 0 to 15 and the payload, little endian
//!     20     n  payload: JSON of the record; the file ends here
//! ```
//!
//! Every later format keeps these 20 bytes, so that a build that does not know it still tells it from a damaged file.
//!
//! Owns nothing. Refuses: any file that differs from that by one bit, and whole files of a later format.

use std::cmp::Ordering;
use std::fmt;

/// First bytes of the file.
pub const MAGIC: &[u8; 8] = b"GODWITOR";
/// The version written and read.
pub const VERSION: u32 = 1;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 20;

/// CRC-32 as of IEEE 802.3 over several pieces.
pub fn crc32(pieces: &[&[u8]]) -> u32 {
    let bytes = pieces.iter().flat_map(|piece| piece.iter());
    let crc = bytes.fold(!0u32, |crc, byte| {
        let [low, ..] = crc.to_le_bytes();
        let rest = CRC_OF_BYTE.get(usize::from(low ^ byte));
        (crc >> 8) ^ rest.copied().unwrap_or_default()
    });
    !crc
}

/// What each value of a byte adds.
const CRC_OF_BYTE: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut byte = 0;
    while byte < table.len() {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            let mask = (crc & 1).wrapping_neg();
            crc = (crc >> 1) ^ (0xedb8_8320 & mask);
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// A payload with its header; `None` if it is too long for the format.
pub fn encode(payload: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(payload.len()).ok()?;
    let mut out = Vec::with_capacity(HEADER_BYTES + payload.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&length.to_le_bytes());
    let crc = crc32(&[&out, payload]);
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(payload);
    Some(out)
}

/// Why a file has no payload that this build reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unread {
    /// It is not what was written.
    Damaged(String),
    /// It is whole, and a newer build wrote it.
    Newer(String),
}

impl From<String> for Unread {
    fn from(why: String) -> Self {
        Self::Damaged(why)
    }
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Damaged(why) | Self::Newer(why)) = self;
        f.write_str(why)
    }
}

/// The payload of a whole, undamaged file; else what is wrong with it.
pub fn decode(file: &[u8]) -> Result<&[u8], Unread> {
    let Some((header, payload)) = file.split_first_chunk::<HEADER_BYTES>() else {
        return Err(format!(
            "{} bytes are too few for its header of {HEADER_BYTES}",
            file.len()
        )
        .into());
    };
    let [m @ .., v0, v1, v2, v3, l0, l1, l2, l3, c0, c1, c2, c3] = header;
    if m != MAGIC.as_slice() {
        return Err("it does not begin as an ownership record".to_owned().into());
    }
    let crc = u32::from_le_bytes([*c0, *c1, *c2, *c3]);
    let length = u32::from_le_bytes([*l0, *l1, *l2, *l3]);
    let version = u32::from_le_bytes([*v0, *v1, *v2, *v3]);
    if usize::try_from(length) != Ok(payload.len()) {
        return Err(format!(
            "its payload is {} bytes long instead of {length}",
            payload.len()
        )
        .into());
    }
    let (checked, _) = header.split_at(16);
    if crc32(&[checked, payload]) != crc {
        return Err("its checksum is wrong".to_owned().into());
    }
    let why = || format!("its format is {version}, this build reads {VERSION}");
    match version.cmp(&VERSION) {
        Ordering::Equal => Ok(payload),
        Ordering::Greater => Err(Unread::Newer(why())),
        Ordering::Less => Err(Unread::Damaged(why())),
    }
}
