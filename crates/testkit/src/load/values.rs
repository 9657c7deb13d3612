//! Values that prove themselves: incompressible bytes made from a key and a version.
//!
//! A value starts with its key and version and goes on with a random stream seeded by both, so every byte of an
//! answer can be checked, and a value that is whole but old says which write was lost.

/// Bytes of key and version in front.
pub const HEADER_BYTES: usize = 16;

/// Fills `into` with the value of `key` at `version`.
pub fn make(into: &mut [u8], key: u64, version: u64) {
    let Some((header, body)) = into.split_at_mut_checked(HEADER_BYTES) else {
        return;
    };
    header[..8].copy_from_slice(&key.to_le_bytes());
    header[8..].copy_from_slice(&version.to_le_bytes());
    let mut random = Stream::new(key, version);
    for chunk in body.chunks_mut(8) {
        chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
    }
}

/// What an answer turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A whole value of that key, at this version.
    Version(u64),
    /// Another key's value, or bytes that no write ever made.
    Damaged,
}

/// Checks every byte of an answer for `key`.
pub fn examine(answer: &[u8], key: u64, expected_bytes: usize) -> Found {
    let (Some(found_key), Some(version)) = (word(answer, 0), word(answer, 8)) else {
        return Found::Damaged;
    };
    if answer.len() != expected_bytes || found_key != key {
        return Found::Damaged;
    }
    let mut random = Stream::new(key, version);
    let body = &answer[HEADER_BYTES..];
    match body
        .chunks(8)
        .all(|chunk| *chunk == random.next().to_le_bytes()[..chunk.len()])
    {
        true => Found::Version(version),
        false => Found::Damaged,
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes
        .get(at..at + 8)?
        .try_into()
        .ok()
        .map(u64::from_le_bytes)
}

/// A quick generator whose output no compressor shortens (xorshift64*).
pub struct Stream(u64);

impl Stream {
    /// A stream of its own for each key and version.
    pub fn new(key: u64, version: u64) -> Self {
        // Spreads neighbouring numbers over the whole state (the finaliser of SplitMix64); never zero.
        let mut seed =
            key.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ version.wrapping_mul(0xD1B5_4A32_D192_ED03);
        seed = (seed ^ (seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        seed = (seed ^ (seed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Self((seed ^ (seed >> 31)) | 1)
    }

    #[expect(
        clippy::should_implement_trait,
        reason = "endless: an Option would only be unwrapped again"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_names_its_version() {
        let mut value = vec![0; 1001];
        make(&mut value, 7, 3);
        assert_eq!(examine(&value, 7, 1001), Found::Version(3));
    }

    #[test]
    fn any_changed_byte_is_found() {
        let mut value = vec![0; 100];
        make(&mut value, 7, 3);
        for at in 0..value.len() {
            let mut damaged = value.clone();
            damaged[at] ^= 0x10;
            assert_eq!(examine(&damaged, 7, 100), Found::Damaged, "byte {at}");
        }
        assert_eq!(examine(&value[..99], 7, 100), Found::Damaged);
        assert_eq!(examine(&value, 8, 100), Found::Damaged);
        assert_eq!(examine(b"short", 7, 100), Found::Damaged);
    }
}
