//! JSON that may hold a key or a token, in memory that is wiped when it is given back.
//!
//! Owns nothing beyond that text. A buffer that grows leaves no copy behind: it moves into a greater one, and is wiped.

use serde::Serialize;
use std::io::{self, Write};
use zeroize::{Zeroize as _, Zeroizing};

/// Longer than most requests.
const CAPACITY: usize = 4096;

/// Bytes that are wiped when they are dropped, and wherever they were while they grew.
#[derive(Default)]
pub struct Wiped(Zeroizing<Vec<u8>>);

impl Wiped {
    /// Written piece by piece, so that no other buffer has the whole text.
    pub fn json(value: &impl Serialize) -> serde_json::Result<Self> {
        let mut text = Self::default();
        serde_json::to_writer(&mut text, value)?;
        Ok(text)
    }

    pub fn push(&mut self, bytes: &[u8]) {
        let wanted = self.0.len().saturating_add(bytes.len());
        if wanted > self.0.capacity() {
            let capacity = wanted
                .max(self.0.capacity().saturating_mul(2))
                .max(CAPACITY);
            let mut greater = Zeroizing::new(Vec::with_capacity(capacity));
            greater.extend_from_slice(&self.0);
            self.0 = greater;
        }
        self.0.extend_from_slice(bytes);
    }
}

impl Write for Wiped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRef<[u8]> for Wiped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A piece of a body, wiped where nobody else has it.
pub(crate) fn wipe(piece: hyper::body::Bytes) {
    if let Ok(mut own) = piece.try_into_mut() {
        own.as_mut().zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_is_whole_and_stays_where_it_is_while_there_is_room() {
        let mut text = Wiped::default();
        text.push(b"0123456789");
        let (place, room) = (text.as_ref().as_ptr(), text.0.capacity());
        text.push(&vec![b'x'; room - 10]);
        assert_eq!((text.as_ref().as_ptr(), text.0.capacity()), (place, room));
        text.push(b"y");
        assert!(text.0.capacity() > room);
        assert!(text.as_ref().starts_with(b"0123456789x") && text.as_ref().ends_with(b"xy"));
        let words = vec!["word"; 3000];
        let json = Wiped::json(&words).unwrap();
        assert_eq!(json.as_ref(), serde_json::to_vec(&words).unwrap());
    }
}
