//! Holds docs/troubleshooting.md against the sources: what it quotes is what the product prints.

use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every sentence in a block of its own.
fn quoted(document: &str) -> Vec<&str> {
    let blocks = document.split("```\n").skip(1).step_by(2);
    blocks.map(str::trim).collect()
}

/// What stands between the places that differ from case to case.
fn pieces(sentence: &str) -> Vec<&str> {
    let parts = sentence.split('<').enumerate();
    let fixed = parts.map(|(index, part)| match index {
        0 => part,
        _ => part.split_once('>').map_or(part, |(_, rest)| rest),
    });
    fixed.filter(|piece| !piece.is_empty()).collect()
}

/// Whether a line has all pieces, one after the other.
fn says(line: &str, pieces: &[&str]) -> bool {
    let after = |rest, piece: &&str| line_after(rest, piece);
    pieces.iter().try_fold(line, after).is_some()
}

fn line_after<'a>(line: &'a str, piece: &str) -> Option<&'a str> {
    line.split_once(piece).map(|(_, rest)| rest)
}

/// The product's sources, tests left out, with every text in one line.
fn sources(dir: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            sources(&path, found);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push(text.replace("\\\"", "\""));
        }
    }
}

#[test]
fn every_quoted_sentence_is_one_that_the_product_prints() {
    let document = repository().join("docs/troubleshooting.md");
    let document = std::fs::read_to_string(document).unwrap();
    let mut texts = Vec::new();
    for of in std::fs::read_dir(repository().join("crates")).unwrap() {
        let of = of.unwrap();
        let tool = ["bench", "e2e", "fuzz", "sim", "testkit", "xtask"];
        if !tool.contains(&&*of.file_name().to_string_lossy()) {
            sources(&of.path().join("src"), &mut texts);
        }
    }
    let quoted = quoted(&document);
    assert!(quoted.len() >= 12, "{}", quoted.len());
    for sentence in quoted {
        let pieces = pieces(sentence);
        let mut lines = texts.iter().flat_map(|text| text.lines());
        assert!(lines.any(|line| says(line, &pieces)), "{sentence}");
    }
}

#[test]
fn a_sentence_that_nobody_prints_is_found() {
    let line = r#"format!("host {host} has {free} MiB, not {needed}")"#;
    assert!(says(line, &pieces("host <host> has <n> MiB")));
    assert!(!says(line, &pieces("host <host> had <n> MiB")));
    assert!(!says(line, &pieces("<n> MiB, host <host> has")));
}
