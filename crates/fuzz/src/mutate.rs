//! Damage: one input out of others. Some of it knows bytes and lengths, some of it knows JSON.
//!
//! Owns nothing; all choices come from the generator. Refuses: inputs above [`INPUT_LEN_MAX`].

use crate::rng::Rng;

/// Longest input, bytes.
pub const INPUT_LEN_MAX: usize = 16 << 10;

/// Numbers at which lengths, counters and signs turn.
const INTEGERS: [u64; 20] = [
    0,
    1,
    2,
    7,
    16,
    63,
    64,
    127,
    128,
    255,
    256,
    4095,
    4096,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 53,
    i64::MAX as u64,
    u64::MAX,
];

/// Values that stand where JSON or TOML expects another.
const TOKENS: [&str; 28] = [
    "null",
    "true",
    "false",
    "{}",
    "[]",
    "\"\"",
    "-1",
    "0",
    "-0.0",
    "1e999",
    "1e39",
    "-1e308",
    "0.1",
    "18446744073709551616",
    "9223372036854775808",
    "\"..\"",
    "\"/\"",
    "\"a\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "[[[[[[[[[[[[[[[[",
    "{\"a\":{\"a\":{\"a\":{}}}}",
    "[0,0,0]",
    "[[0,1],[1,1]]",
    ",",
    ":",
    "\n",
    "\u{e4}",
];

/// A damaged copy of `input`, perhaps with parts of `other`.
pub fn mutate(rng: &mut Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    let steps = 1 + rng.below(4) * rng.below(3);
    for _ in 0..steps {
        step(rng, &mut bytes, other);
        bytes.truncate(INPUT_LEN_MAX);
    }
    bytes
}

fn step(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    match rng.below(16) {
        0 => flip(rng, bytes),
        1 => set(rng, bytes),
        2 => insert(rng, bytes),
        3 => remove(rng, bytes),
        4 => duplicate(rng, bytes),
        5 => bytes.truncate(rng.below(bytes.len().saturating_add(1))),
        6 => splice(rng, bytes, other),
        7 => paste(rng, bytes, other),
        8 | 9 => integer(rng, bytes),
        10 => number_text(rng, bytes),
        11 => swap_tokens(rng, bytes),
        12 => replace_token(rng, bytes),
        13 => remove_token(rng, bytes),
        14 => swap_ranges(rng, bytes),
        _ => repeat(rng, bytes),
    }
}

fn flip(rng: &mut Rng, bytes: &mut [u8]) {
    let (at, bit) = (rng.below(bytes.len()), rng.below(8));
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << bit;
    }
}

fn set(rng: &mut Rng, bytes: &mut [u8]) {
    let at = rng.below(bytes.len());
    let value = match rng.below(3) {
        0 => rng.byte(),
        1 => *rng
            .pick(b"\"{}[]:,\\ \n\r0-.\x00\xff\x7f\x80")
            .unwrap_or(&0),
        _ => INTEGERS.get(rng.below(12)).copied().unwrap_or(0) as u8,
    };
    if let Some(byte) = bytes.get_mut(at) {
        *byte = value;
    }
}

fn insert(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let at = rng.below(bytes.len().saturating_add(1));
    let new: Vec<u8> = (0..1 + rng.below(8)).map(|_| rng.byte()).collect();
    bytes.splice(at..at, new);
}

/// A range of `bytes`, short more often than long.
fn range(rng: &mut Rng, bytes: &[u8]) -> std::ops::Range<usize> {
    let start = rng.below(bytes.len());
    let longest = if rng.below(4) == 0 { bytes.len() } else { 16 };
    let end = start.saturating_add(1 + rng.below(longest));
    start..end.min(bytes.len())
}

fn remove(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let range = range(rng, bytes);
    bytes.drain(range);
}

fn duplicate(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let copy = bytes.get(range(rng, bytes)).unwrap_or_default().to_vec();
    let at = rng.below(bytes.len().saturating_add(1));
    bytes.splice(at..at, copy);
}

/// The front of one input and the back of another.
fn splice(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    bytes.truncate(rng.below(bytes.len().saturating_add(1)));
    let from = rng.below(other.len().saturating_add(1));
    bytes.extend_from_slice(other.get(from..).unwrap_or_default());
}

fn paste(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    let part = other.get(range(rng, other)).unwrap_or_default().to_vec();
    let start = rng.below(bytes.len().saturating_add(1));
    let over = if rng.below(2) == 0 { part.len() } else { 0 };
    let end = start.saturating_add(over).min(bytes.len());
    bytes.splice(start..end, part);
}

/// Lies about lengths and counters: an interesting number, or the one that is there give or take a little.
fn integer(rng: &mut Rng, bytes: &mut [u8]) {
    let width = *rng.pick(&[1, 2, 4, 8]).unwrap_or(&1);
    let at = rng.below(bytes.len());
    let Some(field) = bytes.get_mut(at..at.saturating_add(width)) else {
        return;
    };
    let mut word = [0; 8];
    if let Some(low) = word.get_mut(..width) {
        low.copy_from_slice(field);
    }
    let value = match rng.below(3) {
        0 => u64::from_le_bytes(word).wrapping_add(rng.below(9) as u64),
        1 => u64::from_le_bytes(word).wrapping_sub(rng.below(9) as u64),
        _ => *rng.pick(&INTEGERS).unwrap_or(&0),
    };
    let mut new = value.to_le_bytes();
    if let Some(part) = new.get_mut(..width) {
        if rng.below(4) == 0 {
            part.reverse();
        }
        field.copy_from_slice(part);
    }
}

/// Another number in the place of a run of digits.
fn number_text(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let from = rng.below(bytes.len());
    let rest = bytes.get(from..).unwrap_or_default();
    let Some(first) = rest.iter().position(u8::is_ascii_digit) else {
        return;
    };
    let digits = rest.iter().skip(first);
    let count = digits.take_while(|b| b.is_ascii_digit()).count();
    let text = match rng.below(4) {
        0 => rng.below(100).to_string(),
        1 => rng.pick(&INTEGERS).copied().unwrap_or(0).to_string(),
        2 => (*rng
            .pick(&["-1", "1e39", "-1e308", "0.5", "1.7e308", "00"])
            .unwrap_or(&"0"))
        .to_owned(),
        _ => format!("{}", rng.bits()),
    };
    let start = from.saturating_add(first);
    bytes.splice(start..start.saturating_add(count), text.into_bytes());
}

/// A token: a quoted string, a word or number, or one sign; JSON and TOML alike.
fn token(bytes: &[u8], from: usize) -> Option<std::ops::Range<usize>> {
    let rest = bytes.get(from..)?;
    let skipped = rest.iter().position(|b| !b.is_ascii_whitespace())?;
    let rest = rest.get(skipped..)?;
    let is_word = |b: &&u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'+');
    let length = match rest.first()? {
        b'"' => {
            let end = rest.iter().skip(1).position(|b| *b == b'"');
            end.map_or(rest.len(), |end| end.saturating_add(2))
        }
        _ => rest.iter().take_while(is_word).count().max(1),
    };
    let start = from.saturating_add(skipped);
    Some(start..start.saturating_add(length).min(bytes.len()))
}

/// Some token, found from a random place: half of the time inside of a string, which is one more kind of damage.
fn any_token(rng: &mut Rng, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let near = rng.below(bytes.len());
    let signs = bytes.get(near..)?.iter();
    let to_sign = signs
        .take_while(|b| !matches!(b, b',' | b':' | b'{' | b'[' | b'=' | b'\n'))
        .count();
    let from = if rng.below(8) == 0 {
        near
    } else {
        near.saturating_add(to_sign).saturating_add(1)
    };
    token(bytes, from)
}

fn swap_tokens(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let (Some(a), Some(b)) = (any_token(rng, bytes), any_token(rng, bytes)) else {
        return;
    };
    let (first, second) = if a.start <= b.start { (a, b) } else { (b, a) };
    if first.end > second.start {
        return;
    }
    let early = bytes.get(first.clone()).unwrap_or_default().to_vec();
    let late: Vec<u8> = bytes.splice(second, early).collect();
    bytes.splice(first, late);
}

fn replace_token(rng: &mut Rng, bytes: &mut Vec<u8>) {
    if let (Some(place), Some(text)) = (any_token(rng, bytes), rng.pick(&TOKENS)) {
        bytes.splice(place, text.bytes());
    }
}

fn remove_token(rng: &mut Rng, bytes: &mut Vec<u8>) {
    if let Some(place) = any_token(rng, bytes) {
        bytes.drain(place);
    }
}

fn swap_ranges(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let taken = range(rng, bytes);
    let part: Vec<u8> = bytes.drain(taken).collect();
    let at = rng.below(bytes.len().saturating_add(1));
    bytes.splice(at..at, part);
}

fn repeat(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let part = bytes.get(range(rng, bytes)).unwrap_or_default();
    let times = if rng.below(16) == 0 {
        2000
    } else {
        1 + rng.below(40)
    };
    let room = INPUT_LEN_MAX.saturating_sub(bytes.len());
    let new = part.repeat(times.min(room / part.len().max(1)));
    let at = rng.below(bytes.len().saturating_add(1));
    bytes.splice(at..at, new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_repeatable_bounded_and_of_many_kinds() {
        let seed = br#"{"name":"web","list":[1,2,{"deep":true}],"text":"x y"}"#;
        let run = |seed_number| {
            let mut rng = Rng::new(seed_number);
            (0..2000)
                .map(|_| mutate(&mut rng, seed, b"[other]"))
                .collect::<Vec<_>>()
        };
        let inputs = run(1);
        assert_eq!(inputs, run(1));
        assert!(inputs.iter().all(|i| i.len() <= INPUT_LEN_MAX));
        let distinct: std::collections::BTreeSet<_> = inputs.iter().collect();
        assert!(distinct.len() > 1500, "only {} kinds", distinct.len());
        let valid = inputs
            .iter()
            .filter(|i| serde_json::from_slice::<serde_json::Value>(i).is_ok());
        assert!(valid.count() > 100, "structure survives some of the damage");
    }

    #[test]
    fn nothing_is_damaged_into_something() {
        let mut rng = Rng::new(3);
        let grown = (0..500).filter(|_| !mutate(&mut rng, b"", b"").is_empty());
        assert!(grown.count() > 10);
    }
}
