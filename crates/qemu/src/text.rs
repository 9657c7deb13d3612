//! QEMU's words, made fit for a person's terminal: a hypervisor that a guest has taken over chooses them.

use godwit_types::text::steers;

/// Characters that are kept of one message.
const LONGEST: usize = 1000;

/// The text on one line, without characters that steer, the end left off where it is very long.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if steers(c) { ' ' } else { c })
        .take(LONGEST)
        .collect()
}

/// One line of QEMU's standard error without the time and the program's name in front of it.
pub(crate) fn without_prefix(line: &str) -> &str {
    let is_time =
        |word: &str| word.ends_with('Z') && word.starts_with(|c: char| c.is_ascii_digit());
    let line = line
        .split_once(' ')
        .filter(|(word, _)| is_time(word))
        .map_or(line, |(_, rest)| rest);
    line.split_once(": ")
        .filter(|(word, _)| word.starts_with("qemu-system"))
        .map_or(line, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_do_not_reach_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc\u{9b}"), "a [2Jb c ");
        assert_eq!(printable("a\u{202e}b\u{2066}c"), "a b c");
        assert_eq!(printable(&"x".repeat(5000)).len(), LONGEST);
    }

    #[test]
    fn times_and_names_are_left_out() {
        let line = "2026-11-21T09:44:48.517517Z qemu-system-x86_64: -netdev tap: no such file";
        assert_eq!(without_prefix(line), "-netdev tap: no such file");
        assert_eq!(without_prefix("plain: text"), "plain: text");
    }
}
