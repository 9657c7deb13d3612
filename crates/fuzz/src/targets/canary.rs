//! A decoder with a planted bug: a list of tag, length and value whose length is believed for one tag.
//!
//! Proof that the fuzzer can find something. Reaching the bug needs the opening bytes kept, one tag changed to a value
//! that no seed has, and a length that lies. Owns nothing; no product code uses it.

use crate::outcome::{self, Outcome};

const OPENING: &[u8] = b"CANARY\x01";
/// The tag whose length nobody checks.
const BAD_TAG: u8 = 0x7f;

pub fn decode(input: &[u8]) -> Outcome {
    let Some(mut rest) = input.strip_prefix(OPENING) else {
        return outcome::of("no canary");
    };
    let mut fields = 0;
    while let [tag, length, tail @ ..] = rest {
        let length = usize::from(*length);
        rest = if *tag == BAD_TAG {
            // The planted bug.
            &tail[length..]
        } else {
            let Some((_, after)) = tail.split_at_checked(length) else {
                return outcome::of("cut short");
            };
            after
        };
        fields += 1;
    }
    outcome::of("whole") + fields.min(4)
}

pub fn seeds() -> Vec<Vec<u8>> {
    vec![[OPENING, &[1, 2, 8, 9, 2, 0, 3, 4, 1, 2, 3, 4]].concat()]
}
