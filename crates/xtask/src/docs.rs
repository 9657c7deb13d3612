//! What a doc comment has to be worth: one that merely repeats the name of its item is refused, and the items through which
//! other crates come in need one.
//!
//! Owns nothing. Looks at lines alone, as the formatter leaves them. Does not judge comments that become text for people:
//! the help of a command line, the summary of a route.

use crate::functions;

/// Words that tell nothing by themselves.
const FILLERS: [&str; 18] = [
    "a", "an", "the", "its", "this", "that", "of", "it", "is", "one", "to", "in", "for", "and",
    "or", "with", "be", "which",
];
/// Words that make even a comment of three words worth its line: a unit, or the method of a route.
const TELLING: [&str; 40] = [
    "byte",
    "bytes",
    "kib",
    "mib",
    "gib",
    "mb",
    "gb",
    "page",
    "pages",
    "ns",
    "us",
    "ms",
    "s",
    "second",
    "seconds",
    "milliseconds",
    "microseconds",
    "nanoseconds",
    "minutes",
    "hours",
    "days",
    "percent",
    "hz",
    "mhz",
    "bit",
    "bits",
    "gbit",
    "lines",
    "cores",
    "ppm",
    "characters",
    "packets",
    "samples",
    "get",
    "post",
    "put",
    "delete",
    "patch",
    "exclusive",
    "inclusive",
];
/// A comment of so few words is refused unless one of them tells something.
const SHORT: usize = 3;
/// Crates of the product, whose doors are documented; the tools beside it may leave that to their headers.
const PRODUCT: [&str; 15] = [
    "types",
    "wire",
    "ownership",
    "site",
    "migrate",
    "guestmem",
    "qemu",
    "transport",
    "streams",
    "store",
    "rpc",
    "vmproc",
    "agent",
    "controller",
    "cli",
];
/// Derives whose comments are the help of a command line.
const HELP: [&str; 4] = ["Parser", "Args", "Subcommand", "ValueEnum"];

/// Every comment in `text` that repeats its item's name, and every door of the product without a comment.
pub fn check(name: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut findings = Vec::new();
    let help = is_help(&lines);
    let mut at = 0;
    while at < lines.len() {
        if !is_doc(lines[at]) {
            if is_door(name, &lines, at) {
                findings.push(format!("{name}:{}: has no doc comment", at + 1));
            }
            at += 1;
            continue;
        }
        let start = at;
        while at < lines.len() && is_doc(lines[at]) {
            at += 1;
        }
        let comment: Vec<&str> = lines[start..at].iter().map(|line| doc_text(line)).collect();
        let (item, route) = item_after(&lines, at);
        let Some(title) = lines.get(item).and_then(|line| item_name(line.trim())) else {
            continue;
        };
        if !help && !route && repeats(&comment.join(" "), title) {
            findings.push(format!(
                "{name}:{}: '{}' says no more than the name `{title}`",
                start + 1,
                comment.join(" ")
            ));
        }
        at = at.max(item + usize::from(!is_doc(lines[item])));
    }
    findings
}

fn is_doc(line: &str) -> bool {
    line.trim_start().starts_with("///")
}

fn doc_text(line: &str) -> &str {
    line.trim_start().trim_start_matches('/').trim()
}

/// A file that derives clap's traits: its comments are shown by `--help`.
fn is_help(lines: &[&str]) -> bool {
    let derives = lines.iter().filter(|line| line.contains("derive("));
    let words = derives.flat_map(|line| line.split(|c: char| !c.is_alphanumeric()));
    words.into_iter().any(|word| HELP.contains(&word))
}

/// Where the item stands that the comment before `at` belongs to, and whether it answers a route.
fn item_after(lines: &[&str], mut at: usize) -> (usize, bool) {
    let mut route = false;
    let mut depth = 0;
    while let Some(line) = lines.get(at).map(|line| line.trim()) {
        if depth == 0 && !line.starts_with("#[") && !line.starts_with("//") {
            break;
        }
        route |= line.starts_with("#[utoipa::path");
        if !line.starts_with("//") {
            depth += line.matches(['[', '(']).count();
            depth = depth.saturating_sub(line.matches([']', ')']).count());
        }
        at += 1;
    }
    (at, route)
}

/// The name of the function, type, constant, field or variant that begins on a line.
fn item_name(line: &str) -> Option<&str> {
    let mut rest = line;
    if let Some(after) = rest.strip_prefix("pub") {
        rest = after.trim_start();
        if rest.starts_with('(') {
            rest = rest.split_once(')')?.1.trim_start();
        }
    }
    if let Some(after) = functions::after_fn(rest) {
        return Some(word(after));
    }
    for kind in [
        "struct", "enum", "union", "trait", "type", "static", "const", "mod",
    ] {
        if let Some(after) = rest
            .strip_prefix(kind)
            .and_then(|rest| rest.strip_prefix(' '))
        {
            return Some(word(after.trim_start_matches("mut ")));
        }
    }
    let name = word(rest);
    let after = rest[name.len()..].trim_start();
    let ends = after.is_empty() || after.starts_with([':', ',', '(', '{', '=']);
    (!name.is_empty() && ends && !after.starts_with("::")).then_some(name)
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Whether a comment adds nothing to a name: all its words but fillers are the name's, or it is short and has neither a
/// figure, a unit, nor a link.
fn repeats(comment: &str, name: &str) -> bool {
    let named = name_words(name);
    let text = comment.to_lowercase();
    let words: Vec<&str> = text
        .split(|c: char| !c.is_alphanumeric() && c != '\'')
        .filter(|word| !word.is_empty())
        .collect();
    let mut said = words.iter().filter(|word| !FILLERS.contains(*word));
    if said.all(|word| named.iter().any(|name| name == stem(word))) {
        return true;
    }
    let tells = |word: &&str| {
        let new = !named.iter().any(|name| name == stem(word));
        new && (TELLING.contains(word) || word.contains(|c: char| c.is_ascii_digit()))
    };
    words.len() <= SHORT && !words.iter().any(tells) && !comment.contains('[')
}

/// The words of a name in snake case or camel case, in lower case and without the plural.
fn name_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for letter in name.chars() {
        let begins = letter == '_' || was_lower && letter.is_ascii_uppercase();
        if begins {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| letter != '_') {
            word.push(letter.to_ascii_lowercase());
        }
        was_lower = letter.is_ascii_lowercase();
    }
    words.iter().map(|word| stem(word).to_owned()).collect()
}

fn stem(word: &str) -> &str {
    let word = word.strip_suffix("'s").unwrap_or(word);
    word.strip_suffix('s')
        .filter(|stem| stem.len() > 2)
        .unwrap_or(word)
}

/// Whether a line begins something of the product that other crates come in by, without a comment above it: a type, a
/// trait, a constant or a function that is public and stands at the margin. Fields, variants and methods may have names
/// that explain themselves.
fn is_door(name: &str, lines: &[&str], at: usize) -> bool {
    let product = |krate: &&str| name.starts_with(&format!("crates/{krate}/src/"));
    let Some(rest) = lines[at].strip_prefix("pub ") else {
        return false;
    };
    let kinds = [
        "struct ", "enum ", "union ", "trait ", "type ", "static ", "const ",
    ];
    if !kinds.iter().any(|kind| rest.starts_with(kind)) && functions::after_fn(rest).is_none() {
        return false;
    }
    if !PRODUCT.iter().any(product) || name.contains("test") {
        return false;
    }
    let mut above = at;
    while above > 0 && !lines[above - 1].trim().is_empty() && !lines[above - 1].starts_with('}') {
        above -= 1;
        if is_doc(lines[above]) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_that_repeats_the_name_is_found() {
        for (comment, name) in [
            ("The migration.", "migration"),
            ("Why.", "reason"),
            ("Its kind.", "kind"),
            ("The host's name.", "host_name"),
            ("Pages in a chunk.", "CHUNK_PAGES"),
            ("Where it listens.", "LinkProbeReady"),
            ("A VM process.", "VmProcess"),
            ("Creates a VM.", "create_vm"),
        ] {
            assert!(repeats(comment, name), "{comment} on {name}");
        }
    }

    #[test]
    fn a_comment_that_tells_something_is_taken() {
        for (comment, name) in [
            ("Bytes.", "limit"),
            ("Round trip, s.", "rtt"),
            ("At most 64.", "channels"),
            ("GET: [`HostInfo`].", "HOST"),
            ("Guest memory, MiB.", "ram"),
            ("The migration that holds the VM's lock.", "migration"),
        ] {
            assert!(!repeats(comment, name), "{comment} on {name}");
        }
    }

    #[test]
    fn the_item_below_attributes_is_the_one_that_is_named() {
        let text = "//! Doc.\n/// The size.\n#[serde(\n    default\n)]\n// Reason.\npub(crate) size: u64,\n";
        let findings = check("crates/wire/src/b.rs", text);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("b.rs:2:"), "{findings:?}");
        for item in [
            "pub async fn size() {",
            "pub const SIZE: u8 = 1;",
            "Size {",
            "Size,",
            "Size(u8),",
        ] {
            let text = format!("/// The size.\n{item}\n");
            assert_eq!(check("crates/sim/src/b.rs", &text).len(), 1, "{item}");
        }
    }

    #[test]
    fn help_and_routes_may_be_short() {
        let route = "/// One VM.\n#[utoipa::path(\n    get,\n    path = \"/v1/vm\"\n)]\npub async fn vm() {\n}\n";
        assert!(check("crates/controller/src/b.rs", route).is_empty());
        let help =
            "#[derive(Debug, clap::Args)]\nstruct A {\n    /// The name\n    name: String,\n}\n";
        assert!(check("crates/cli/src/b.rs", help).is_empty());
    }

    #[test]
    fn a_door_of_the_product_needs_a_comment() {
        for item in [
            "pub struct A {",
            "pub async fn a() {",
            "pub const A: u8 = 1;",
        ] {
            let text = format!("#[must_use]\n{item}\n}}\n");
            assert_eq!(check("crates/wire/src/b.rs", &text).len(), 1, "{item}");
            assert!(
                check(
                    "crates/wire/src/b.rs",
                    &format!("/// Counts the letters of a name.\n{text}")
                )
                .is_empty()
            );
            assert!(check("crates/bench/src/b.rs", &text).is_empty());
        }
        assert!(
            check(
                "crates/wire/src/b.rs",
                "    pub fn a() {\n    pub size: u64,\n"
            )
            .is_empty()
        );
    }
}
