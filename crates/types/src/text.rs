//! Bounds of sentences that come from elsewhere, and how names are listed in ours.
//!
//! Pure. Refuses: nothing; what is too long is cut, and shows that it was; what is no sentence becomes one line.

use serde::{Deserialize as _, Deserializer};
use std::fmt::Display;

/// Longest sentence that is taken from a host, bytes.
pub const SENTENCE_LEN_MAX: usize = 4096;

/// What stands where text was cut.
const CUT: &str = "...";

/// Names with commas between them, or that there is none.
pub fn listed<T: Display>(names: impl IntoIterator<Item = T>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    }
}

/// Cuts a text to at most `max` bytes, between two characters.
pub fn cut(text: &mut String, max: usize) {
    if text.len() <= max {
        return;
    }
    let mut end = max.saturating_sub(CUT.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text.push_str(CUT);
}

/// Whether a character steers a terminal, or turns the direction of what is shown.
pub fn steers(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// Makes one line of what was written elsewhere: it could look like further lines of ours, or steer a terminal.
pub fn sentence(text: &mut String) {
    cut(text, SENTENCE_LEN_MAX);
    if text.chars().any(steers) {
        *text = text.replace(steers, " ");
    }
}

/// A sentence of a message that comes from elsewhere.
pub fn read_sentence<'de, D: Deserializer<'de>>(text: D) -> Result<String, D::Error> {
    let mut text = String::deserialize(text)?;
    sentence(&mut text);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_else_wrote_is_one_line_with_an_end() {
        let mut text = "done\n\x1b[2JALARM: all is lost\r\n".to_owned();
        sentence(&mut text);
        assert_eq!(text, "done  [2JALARM: all is lost  ");
        let mut long = "\n".repeat(2 * SENTENCE_LEN_MAX);
        sentence(&mut long);
        assert_eq!(long.len(), SENTENCE_LEN_MAX);
    }

    #[test]
    fn a_text_is_cut_between_two_characters() {
        let cases = [
            ("abc", "abc"),
            ("abcdefgh", "ab..."),
            ("\u{e4}\u{f6}\u{fc}\u{e4}\u{f6}\u{fc}", "\u{e4}..."),
        ];
        for (text, expected) in cases {
            let mut text = text.to_owned();
            cut(&mut text, 5);
            assert_eq!(text, expected);
        }
    }
}
