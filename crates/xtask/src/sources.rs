//! What the sources themselves promise: an opening `//!`, bounded sizes, doc comments worth their lines, no banned calls, log lines in words,
//! unsafe only where it is named, no ignored tests, and nothing that only one machine has.

use std::path::{Path, PathBuf};

use crate::ratchet::Excess;
use crate::{docs, functions, ratchet};

/// A source file may have 600 lines.
const FILE_LINES_MAX: usize = 600;
/// Crates in which `unsafe` may stand.
const UNSAFE_CRATES: [&str; 7] = [
    "guestmem",
    "blockio",
    "vhost",
    "qemu",
    "transport",
    "testkit",
    "agent",
];
/// Pure crates, with what must not stand in them.
const PURE_CRATES: [&str; 5] = ["types", "wire", "migrate", "ownership", "site"];
const PURE_BANNED: [&str; 7] = [
    "std::fs",
    "std::thread",
    "std::process",
    "SystemTime",
    "Instant::now",
    "TcpStream",
    "UdpSocket",
];

/// Directories of one machine, which have no place in what others check out. In pieces, since this file is read too.
const MACHINE_PATHS: [&str; 2] = [concat!("/wo", "rk/"), concat!("/tmp/", "gw")];
/// What is not ours or not text.
const NOT_OURS: [&str; 2] = ["target", ".git"];
/// Why a test may be left out of a run.
const IGNORED_BECAUSE: &str = "is a program that other tests start";

/// Checks every Rust source below `crates`, and every text for what only one machine has.
pub fn check(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut findings = check_sources(root)?;
    findings.extend(machine_paths(root, root)?);
    Ok(findings)
}

/// Every text file below `dir` that names a directory of this machine.
fn machine_paths(root: &Path, dir: &Path) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.strip_prefix(root).unwrap_or(&path).to_owned();
        if NOT_OURS.iter().any(|other| name == Path::new(other)) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            findings.extend(machine_paths(root, &path)?);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            findings.extend(check_paths(&name.display().to_string(), &text));
        }
    }
    Ok(findings)
}

fn check_paths(name: &str, text: &str) -> Vec<String> {
    let lines = text.lines().zip(1..);
    let bad = lines.filter(|(line, _)| MACHINE_PATHS.iter().any(|path| line.contains(path)));
    bad.map(|(_, number)| format!("{name}:{number}: names a directory of one machine"))
        .collect()
}

fn check_sources(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut files = Vec::new();
    collect(&root.join("crates"), &mut files)?;
    files.sort();
    let mut findings = Vec::new();
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file)?;
        let name = file
            .strip_prefix(root)
            .unwrap_or(&file)
            .display()
            .to_string();
        findings.extend(check_file(&name, &text));
        found.extend(exceeds(&name, &text));
    }
    let list = std::fs::read_to_string(root.join("crates/xtask/exceeds.txt"))?;
    findings.extend(ratchet::sift(&list, found));
    Ok(findings)
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn check_file(name: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    if !text.starts_with("//!") {
        findings.push(format!(
            "{name}: does not open with //! (what it is for, who owns its state, what it refuses)"
        ));
    }
    if !text.is_ascii() {
        findings.push(format!("{name}: holds a character outside ASCII"));
    }
    findings.extend(banned(name, text));
    findings
}

/// What exceeds a limit for which files are still listed.
fn exceeds(name: &str, text: &str) -> Vec<(Excess, String)> {
    let lines = text.lines().count();
    let long = (lines > FILE_LINES_MAX)
        .then(|| format!("{name}: {lines} lines, the limit is {FILE_LINES_MAX}"));
    let mut found = Vec::new();
    for (limit, findings) in [
        ("file", long.into_iter().collect()),
        ("function", functions::check(name, text)),
        ("doc", docs::check(name, text)),
    ] {
        let excess = Excess::new(limit, name);
        found.extend(
            findings
                .into_iter()
                .map(|finding| (excess.clone(), finding)),
        );
    }
    found
}

fn banned(name: &str, text: &str) -> Vec<String> {
    let of = |list: &[&str]| {
        list.iter()
            .any(|c| name.starts_with(&format!("crates/{c}/")))
    };
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let mut findings = Vec::new();
    for line in code {
        let ignored = line.trim_start().starts_with("#[ignore");
        if ignored && !line.contains(IGNORED_BECAUSE) {
            findings.push(format!(
                "{name}: an ignored test: one that cannot run here prints 'skipped: why'"
            ));
        }
        if has_debug_field(line) {
            findings.push(format!(
                "{name}: a log line has a field in the shape of Debug, which people do not read"
            ));
        }
        if of(&PURE_CRATES) {
            for word in PURE_BANNED.iter().filter(|word| line.contains(**word)) {
                findings.push(format!("{name}: a pure crate uses {word}"));
            }
        }
        if !of(&UNSAFE_CRATES) && !name.contains("xtask") && line.contains("unsafe {") {
            findings.push(format!(
                "{name}: unsafe stands outside of the crates that may have it"
            ));
        }
    }
    findings
}

/// Whether a field of a log line begins here that is written as `?name` or `name = ?value`.
fn has_debug_field(line: &str) -> bool {
    let line = line.trim_start();
    line.match_indices('?').any(|(at, _)| {
        let (before, after) = line.split_at(at);
        let is_begun = before.is_empty() || before.ends_with(['(', ' ']);
        let names = after.chars().nth(1);
        is_begun && names.is_some_and(|name| name.is_ascii_lowercase())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_field_that_is_written_as_debug_is_found() {
        for field in [
            "info!(@state, \"x\")",
            "@state,",
            "warn!(%vm, state = @of.it, \"x\")",
        ] {
            assert!(has_debug_field(&field.replace('@', "?")), "{field}");
        }
        for other in [
            "let read = load()?;",
            "T: ?Sized,",
            "VALUES (?1, ?2)",
            "info!(%state)",
        ] {
            assert!(!has_debug_field(other), "{other}");
        }
    }

    #[test]
    fn a_long_file_is_found() {
        let text = format!("//! Doc.\n{}", "use a;\n".repeat(FILE_LINES_MAX - 1));
        assert!(exceeds("crates/a/src/b.rs", &text).is_empty());
        assert_eq!(
            exceeds("crates/a/src/b.rs", &format!("{text}use a;\n")).len(),
            1
        );
    }

    #[test]
    fn a_directory_of_one_machine_is_found() {
        let text = format!("fine\ncd {}main\n", MACHINE_PATHS[0]);
        assert_eq!(check_paths("README.md", &text).len(), 1);
        assert!(check_paths("README.md", "a worked example in /tmp/x\n").is_empty());
    }

    #[test]
    fn an_ignored_test_is_found() {
        let text = "//! Doc.\n#[ignore]\nfn f() {}\n";
        assert_eq!(check_file("crates/a/src/b.rs", text).len(), 1);
        let program = format!("//! Doc.\n#[ignore = \"{IGNORED_BECAUSE}\"]\nfn f() {{}}\n");
        assert!(check_file("crates/a/src/b.rs", &program).is_empty());
    }

    #[test]
    fn a_clock_in_a_pure_crate_is_found() {
        let text = "//! Doc.\nfn now() {\n    std::time::Instant::now();\n}\n";
        assert_eq!(check_file("crates/wire/src/b.rs", text).len(), 1);
    }
}
