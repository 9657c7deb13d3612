//! What a target says about an input, as a number: the same for the same kind of result.
//!
//! Of a text only what stands before the first quotation mark and after the last one counts, without digits: "line 3"
//! and "line 4", or two unknown keys, are one outcome, and no input can make a new one by what it quotes. Owns nothing.

use std::fmt::{Display, Write};

/// The kind of a result.
pub type Outcome = u64;

const EMPTY: u64 = 0xcbf2_9ce4_8422_2325;

/// The outcome of a text that some value displays as.
pub fn of(text: impl Display) -> Outcome {
    let mut shape = Shape {
        before: EMPTY,
        after: None,
    };
    // Writing into a hash cannot fail; a Display that fails half-way has still named its kind.
    let _ = write!(shape, "{text}");
    shape.before ^ shape.after.unwrap_or_default().rotate_left(17)
}

/// The outcome of a decoder: a name for what was accepted, or the error.
pub fn of_result<T, E: Display>(
    result: &Result<T, E>,
    name: impl FnOnce(&T) -> Outcome,
) -> Outcome {
    match result {
        Ok(value) => name(value).rotate_left(1),
        Err(error) => of(error),
    }
}

/// The outcome of an enum's value: the variant's name, which its `Debug` says before the first field.
pub fn of_variant(value: &dyn std::fmt::Debug) -> Outcome {
    let text = format!("{value:?}");
    let end = text.find([' ', '(']).unwrap_or(text.len());
    of(text.get(..end).unwrap_or_default())
}

struct Shape {
    before: u64,
    after: Option<u64>,
}

impl Write for Shape {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for c in text.chars().filter(|c| !c.is_ascii_digit()) {
            if matches!(c, '\'' | '"' | '`') {
                self.after = Some(EMPTY);
            } else {
                let hash = self.after.as_mut().unwrap_or(&mut self.before);
                *hash = (*hash ^ u64::from(c)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_do_not_make_a_new_outcome() {
        assert_eq!(
            of("unknown field `a` at line 1"),
            of("unknown field `b`, \"c` at line 22")
        );
        assert_ne!(of("unknown field `a`"), of("missing field `a`"));
        assert_ne!(of("wrong 'a' here"), of("wrong 'a' there"));
    }

    #[test]
    fn a_variant_is_known_by_its_name_alone() {
        assert_eq!(of_variant(&Some(1)), of_variant(&Some(2)));
        assert_ne!(of_variant(&Some(1)), of_variant(&None::<u8>));
    }
}
