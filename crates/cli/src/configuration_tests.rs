//! Holds docs/configuration.md and the packaged examples against what the files' readers know.

use crate::controller_file::ControllerFile;
use godwit_agent::config::HostConfig;
use godwit_types::VmSpec;
use std::path::Path;

/// The keys that a reader names when it meets one that it does not know.
fn keys(refusal: &str) -> Vec<&str> {
    let (_, known) = refusal.split_once("expected").unwrap_or_default();
    let quoted = known.split('`').skip(1).step_by(2);
    quoted.collect()
}

/// The part of the document under a heading, up to the next one of its kind.
fn part<'a>(document: &'a str, heading: &str) -> &'a str {
    let (_, rest) = document.split_once(heading).unwrap();
    rest.split_once("\n## ").map_or(rest, |(part, _)| part)
}

fn repository(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    std::fs::read_to_string(path).unwrap()
}

/// The document's heading, the example, the refusal that names all keys, and how many there are at least.
fn files() -> [(&'static str, &'static str, String, usize); 5] {
    let unknown = "no-such-key = 1\n";
    let host = HostConfig::parse(unknown, Path::new("host.toml")).unwrap_err();
    let controller = toml::from_str::<ControllerFile>(unknown).unwrap_err();
    let vm = |text: &str| VmSpec::from_toml(text).unwrap_err().to_string();
    let (nic, disk) = (
        format!("[[nic]]\n{unknown}"),
        format!("[[disk]]\n{unknown}"),
    );
    [
        ("## A host", "host.toml", host.to_string(), 10),
        (
            "## The controller",
            "controller.toml",
            controller.to_string(),
            4,
        ),
        ("## A VM", "vm.toml", vm(unknown), 10),
        ("## A VM", "vm.toml", vm(&nic), 2),
        ("## A VM", "vm.toml", vm(&disk), 4),
    ]
}

#[test]
fn every_key_of_every_file_stands_in_the_document() {
    let document = repository("docs/configuration.md");
    for (heading, _, refusal, at_least) in files() {
        let keys = keys(&refusal);
        assert!(keys.len() >= at_least, "{heading}: {refusal}");
        let part = part(&document, heading);
        let keys = keys.iter().filter(|key| !matches!(**key, "nic" | "disk"));
        let missing: Vec<_> = keys
            .filter(|key| !part.contains(&format!("`{key}`")))
            .collect();
        assert!(missing.is_empty(), "{heading}: {missing:?}");
    }
}

#[test]
fn every_key_that_people_may_write_stands_in_the_example() {
    let document = repository("docs/configuration.md");
    for (heading, example, refusal, _) in files() {
        let text = repository(&format!("packaging/examples/{example}.example"));
        let is_left_out = |key: &&&str| {
            let named = format!("`{key}`");
            let mut rows = part(&document, heading).lines();
            rows.any(|row| row.contains(&named) && row.contains("Leave it out"))
        };
        let shown = |key: &&&str| {
            let lines = text.lines().map(|line| line.trim_start_matches("# "));
            let mut lines = lines.map(|line| line.trim_matches(['[', ']']));
            lines.any(|line| line == **key || line.starts_with(&format!("{key} = ")))
        };
        let keys = keys(&refusal);
        let missing = keys.iter().filter(|key| !shown(key));
        let missing: Vec<_> = missing.filter(|key| !is_left_out(key)).collect();
        assert!(missing.is_empty(), "{example}: {missing:?}");
    }
}
