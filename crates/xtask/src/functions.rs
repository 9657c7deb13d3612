//! Finds the functions of a source by indentation, which the formatter keeps exact, and refuses long ones.
//!
//! Owns nothing. A function within a function counts by itself and for the one around it.

/// A function may span 70 lines, from its head to its brace.
pub const LINES_MAX: usize = 70;
/// What may stand between the visibility and `fn`.
const QUALIFIERS: [&str; 5] = ["default", "const", "async", "unsafe", "extern"];

/// Every function in `text` that is longer than the house allows.
pub fn check(name: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let mut open: Vec<(usize, usize, &str)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let Some((start, _, title)) =
            open.pop_if(|(_, depth, _)| *depth == indent && ends(trimmed))
        {
            let length = number - start + 1;
            if length > LINES_MAX {
                findings.push(format!(
                    "{name}:{}: `{title}` has {length} lines, the limit is {LINES_MAX}",
                    start + 1
                ));
            }
        } else if let Some(after) = after_head(trimmed).filter(|_| !trimmed.ends_with(['}', ';'])) {
            let title = after.split(['(', '<']).next().unwrap_or(after);
            open.push((number, indent, title));
        }
    }
    findings
}

/// A body ends with a brace; a function without one, of a trait or of C, with a semicolon.
fn ends(trimmed: &str) -> bool {
    trimmed.starts_with('}') || trimmed.starts_with(')') && trimmed.ends_with(';')
}

/// The name and what follows it, if a line begins a function.
fn after_head(line: &str) -> Option<&str> {
    let mut rest = line;
    if let Some(after) = rest.strip_prefix("pub") {
        rest = after;
        if rest.starts_with('(') {
            rest = rest.split_once(')')?.1;
        }
        rest = rest.trim_start();
    }
    after_fn(rest)
}

/// What follows `fn` and its qualifiers, if the line begins with them. The visibility has been taken off.
pub fn after_fn(mut rest: &str) -> Option<&str> {
    loop {
        if let Some(name) = rest.strip_prefix("fn ") {
            return Some(name);
        }
        let (word, after) = rest.split_once(' ')?;
        if !(QUALIFIERS.contains(&word) || word.starts_with('"') && word.ends_with('"')) {
            return None;
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_function_is_found_however_it_is_declared() {
        let body = "    let x = 1;\n".repeat(LINES_MAX);
        for head in [
            "fn long()",
            "async fn long()",
            "const fn long()",
            "unsafe fn long()",
            "pub fn long()",
            "pub(crate) fn long()",
            "pub(in crate::a) async unsafe fn long()",
            "extern \"C\" fn long()",
            "pub unsafe extern \"C\" fn long()",
            "default async fn long()",
        ] {
            let text = format!("{head} {{\n{body}}}\n");
            assert_eq!(check("b.rs", &text).len(), 1, "{head}");
            let text = format!("{head} {{\n    let x = 1;\n}}\n");
            assert!(check("b.rs", &text).is_empty(), "{head}");
        }
    }

    #[test]
    fn a_function_within_another_is_found_and_counts_for_it() {
        let body = "        let x = 1;\n".repeat(LINES_MAX);
        let text = format!("fn outer() {{\n    async fn inner() {{\n{body}    }}\n}}\n");
        assert_eq!(check("b.rs", &text).len(), 2);
    }

    #[test]
    fn a_declaration_over_several_lines_does_not_swallow_what_follows() {
        let body = "        let x = 1;\n".repeat(LINES_MAX);
        let text = format!(
            "trait T {{\n    fn a(\n        b: u8,\n    );\n    fn c() {{\n{body}    }}\n}}\n"
        );
        assert_eq!(check("b.rs", &text).len(), 1);
    }

    #[test]
    fn what_only_begins_like_a_function_is_none() {
        for line in [
            "const A: fn (u8) = b;",
            "const FNS: u8 = 1;",
            "fnord();",
            "pub struct A {",
            "extern \"C\" {",
        ] {
            assert!(after_head(line).is_none(), "{line}");
        }
    }
}
