//! What reaches a terminal: hosts and guests write part of it, and none of that may steer the terminal.
//!
//! Pure, but for [`tell`] and [`ask`]. Refuses: escape sequences and other control characters, marks that turn the direction of
//! writing, new lines within a sentence, and sentences without an end.

use crate::figures::columns;
use godwit_types::text::{SENTENCE_LEN_MAX, cut, steers};
use std::io::Write as _;

/// The only escape sequences that are printed: the colours of [`crate::output::Output`].
pub const COLOURS: [&str; 4] = ["\x1b[32m", "\x1b[33m", "\x1b[1;31m", "\x1b[0m"];

/// Stands for a character that is not printed.
const INSTEAD: char = '\u{fffd}';

/// Text of several lines, with our own colours and no other control characters.
pub fn lines(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some(colour) = COLOURS.iter().find(|colour| rest.starts_with(**colour)) {
            plain.push_str(colour);
            rest = rest.get(colour.len()..).unwrap_or_default();
            continue;
        }
        rest = rest.get(c.len_utf8()..).unwrap_or_default();
        match c {
            '\n' | '\t' => plain.push(c),
            // A serial line ends its lines so; alone it would go back over what stands there.
            '\r' if rest.starts_with(['\r', '\n']) => {}
            c if steers(c) => plain.push(INSTEAD),
            c => plain.push(c),
        }
    }
    plain
}

/// What somebody else wrote, as one line of bounded length without any control character.
pub fn sentence(text: &str) -> String {
    let plain = text.chars().map(|c| match c {
        '\n' | '\r' | '\t' => ' ',
        c if steers(c) => INSTEAD,
        c => c,
    });
    let mut plain: String = plain.take(2 * SENTENCE_LEN_MAX).collect();
    cut(&mut plain, 2 * SENTENCE_LEN_MAX);
    plain
}

/// JSON as it is: what a terminal could take for a command is written as an escape, which means the same.
pub fn json(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if steers(c) && c != '\n' {
            plain.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            plain.push(c);
        }
    }
    plain
}

/// Text broken at words into lines of so many columns, if any are known; lines after the first begin with `hang` spaces.
/// A word that is longer than that, such as a path, stays whole.
pub fn wrapped(text: &str, columns: Option<usize>, hang: usize) -> String {
    let Some(columns) = columns.filter(|columns| width(text) > *columns) else {
        return text.to_owned();
    };
    let mut wrapped = String::with_capacity(text.len() + 16);
    let mut used = 0;
    let mut is_blank = true;
    for (index, word) in text.split(' ').enumerate() {
        let wide = width(word);
        if index > 0 && !is_blank && used + 1 + wide > columns {
            wrapped.truncate(wrapped.trim_end_matches(' ').len());
            wrapped.push('\n');
            wrapped.extend(std::iter::repeat_n(' ', hang));
            (used, is_blank) = (hang, true);
        } else if index > 0 {
            wrapped.push(' ');
            used += 1;
        }
        wrapped.push_str(word);
        used += wide;
        is_blank &= wide == 0;
    }
    wrapped
}

/// Columns that a text takes; our own colours take none.
pub fn width(text: &str) -> usize {
    let colours = COLOURS
        .iter()
        .map(|colour| text.matches(colour).count() * colour.len());
    text.chars().count().saturating_sub(colours.sum())
}

/// Says something to a person beside the output, with what others wrote in it.
pub fn tell(text: &str) {
    eprintln!("{}", beside(text));
}

/// Asks a person something; the answer is typed behind it.
pub fn ask(text: &str) {
    eprint!("{} ", beside(text));
    let _ = std::io::stderr().flush();
}

fn beside(text: &str) -> String {
    wrapped(&sentence(text), columns(std::io::stderr()), 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets a terminal's title, clears it, goes up a line, and has it answer.
    const HOSTILE: &str = "fine\x1b]0;owned\x07\x1b[2J\x1b[1A\u{9b}6n\rALARM\u{202e}x\x7f";

    fn is_harmless(text: &str) {
        assert!(!text.chars().any(steers), "{text:?}");
    }

    #[test]
    fn nothing_that_steers_a_terminal_is_printed() {
        is_harmless(&lines(HOSTILE));
        is_harmless(&sentence(HOSTILE));
        is_harmless(&sentence("one\ntwo"));
        assert_eq!(sentence("one\ntwo"), "one two");
        assert_eq!(lines("login:\n\tpassword"), "login:\n\tpassword");
    }

    #[test]
    fn lines_of_a_serial_console_end_without_a_stray_character() {
        assert_eq!(lines("one\r\ntwo\r\r\n"), "one\ntwo\n");
        is_harmless(&lines("one\rALARM"));
        assert_eq!(lines("one\rALARM"), format!("one{INSTEAD}ALARM"));
    }

    #[test]
    fn a_long_line_is_broken_at_words_and_hangs() {
        let text = "  - refused: the disk /a/very/long/path/of/an/image stays";
        let lines = wrapped(text, Some(30), 4);
        assert_eq!(
            lines,
            "  - refused: the disk\n    /a/very/long/path/of/an/image\n    stays"
        );
        assert_eq!(wrapped(text, None, 4), text);
        assert_eq!(wrapped(text, Some(80), 4), text);
        assert_eq!(wrapped("one two", Some(1), 2), "one\n  two");
        let painted = "\x1b[32mok\x1b[0m it is so";
        assert_eq!(wrapped(painted, Some(11), 2), painted);
    }

    #[test]
    fn our_own_colours_stay() {
        let painted = "\x1b[1;31min-doubt\x1b[0m";
        assert_eq!(lines(painted), painted);
    }

    #[test]
    fn a_sentence_has_an_end() {
        assert!(sentence(&"\u{e4}".repeat(100_000)).len() <= 2 * SENTENCE_LEN_MAX);
    }

    #[test]
    fn json_says_the_same_and_steers_nothing() {
        let value = serde_json::json!({ "note": HOSTILE });
        let text = json(&serde_json::to_string_pretty(&value).unwrap());
        is_harmless(&text.replace('\n', ""));
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            value
        );
    }
}
