//! The checksum of a document: its last line, of blanks and tabs alone, which JSON lets stand behind a document.
//!
//! So a build that knows nothing of it reads the document as it is, a person sees and edits the same text, and a document
//! without that line, as older builds and editors leave it, is read as before. A blank is a 0, a tab a 1, the highest bit
//! first. Owns nothing. Refuses: a line of that kind that is not the document's, however little is wrong.

use crate::frame::crc32;

const BITS: usize = 32;

/// The text with its checksum behind it.
pub(crate) fn sealed(mut text: Vec<u8>) -> Vec<u8> {
    let crc = crc32(&[&text]);
    let bit = |at: usize| crc >> (BITS - 1 - at) & 1;
    text.extend((0..BITS).map(|at| if bit(at) == 1 { b'\t' } else { b' ' }));
    text.push(b'\n');
    text
}

/// What stands behind a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seal {
    /// Its checksum: every byte is as it was written.
    Right,
    /// An older build has written it, or an editor.
    None,
    /// One that is another text's, or what is left of one.
    Wrong,
}

pub(crate) fn seal_of(text: &[u8]) -> Seal {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    let end = text
        .iter()
        .rposition(|byte| !blank(byte))
        .map_or(0, |at| at + 1);
    let (document, behind) = text.split_at(end);
    // Lines that a person has left there are no checksum.
    if behind.iter().all(|byte| *byte == b'\n') || behind == b"\r\n" {
        return Seal::None;
    }
    let with_line = [document, b"\n"].concat();
    match sealed(with_line) == text {
        true => Seal::Right,
        false => Seal::Wrong,
    }
}
