//! Holds docs/configuration.md against what the files' readers know.

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

#[test]
fn every_key_of_every_file_stands_in_the_document() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let document = std::fs::read_to_string(path).unwrap();
    let unknown = "no-such-key = 1\n";
    let host = HostConfig::parse(unknown, Path::new("host.toml")).unwrap_err();
    let controller = toml::from_str::<ControllerFile>(unknown).unwrap_err();
    let vm = |text: &str| VmSpec::from_toml(text).unwrap_err().to_string();
    let files = [
        ("## A host", host.to_string(), 10),
        ("## The controller", controller.to_string(), 4),
        ("## A VM", vm(unknown), 10),
        ("## A VM", vm(&format!("[[nic]]\n{unknown}")), 2),
        ("## A VM", vm(&format!("[[disk]]\n{unknown}")), 4),
    ];
    for (heading, refusal, at_least) in files {
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
