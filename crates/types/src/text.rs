//! Bounds of sentences that come from elsewhere.
//!
//! Pure. Refuses: nothing; what is too long is cut, and shows that it was.

/// Longest sentence that is taken from a host, bytes.
pub const SENTENCE_LEN_MAX: usize = 4096;

/// What stands where text was cut.
const CUT: &str = "...";

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

#[cfg(test)]
mod tests {
    use super::*;

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
