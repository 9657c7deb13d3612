//! Which crate may use which: pure below edge below glue, and nothing of the product uses what stands beside it.
//!
//! The table below is the one in ARCHITECTURE.md. A crate that is in no ring is refused, so that a new room is placed on
//! purpose.

use anyhow::Context as _;
use std::path::Path;

/// Rings from the inside out; a crate uses its own ring and those further in.
const RINGS: [(&str, &[&str]); 4] = [
    (
        "pure",
        &[
            "types",
            "wire",
            "migrate",
            "mirror",
            "delta",
            "tracking",
            "redo",
            "ownership",
            "site",
            "snapshots",
        ],
    ),
    (
        "edge",
        &[
            "guestmem",
            "blockio",
            "vhost",
            "qemu",
            "transport",
            "streams",
            "store",
            "rpc",
        ],
    ),
    ("glue", &["vmproc", "agent", "controller", "cli"]),
    (
        "beside",
        &["sim", "testkit", "fuzz", "xtask", "e2e", "bench"],
    ),
];

/// What a pure crate may use from outside: data, errors and arithmetic.
const PURE_LIBRARIES: [&str; 11] = [
    "serde",
    "serde_json",
    "toml",
    "thiserror",
    "utoipa",
    "base64",
    "zeroize",
    "aws-lc-rs",
    "proptest",
    "subtle",
    "crc32fast",
];

/// Checks every crate's manifest.
pub fn check(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    for entry in std::fs::read_dir(root.join("crates"))? {
        let path = entry?.path();
        if path.join("Cargo.toml").is_file() {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            findings.extend(check_crate(&name, &path)?);
        }
    }
    findings.sort();
    Ok(findings)
}

fn check_crate(name: &str, path: &Path) -> anyhow::Result<Vec<String>> {
    let Some(ring) = ring_of(name) else {
        return Ok(vec![format!(
            "crate '{name}' stands in no ring: place it in ARCHITECTURE.md and in xtask"
        )]);
    };
    let text = std::fs::read_to_string(path.join("Cargo.toml"))?;
    let manifest: toml::Table = text.parse().with_context(|| format!("{name}/Cargo.toml"))?;
    let mut findings = Vec::new();
    for library in keys(&manifest, "dependencies") {
        findings.extend(check_use(name, ring, &library));
    }
    Ok(findings)
}

fn check_use(name: &str, ring: usize, library: &str) -> Option<String> {
    match library.strip_prefix("godwit-") {
        Some(other) => match ring_of(other) {
            Some(outer) if outer > ring => Some(format!(
                "crate '{name}' ({}) uses '{other}' ({}): arrows point inward",
                RINGS[ring].0, RINGS[outer].0
            )),
            _ => None,
        },
        None if ring == 0 && !PURE_LIBRARIES.contains(&library) => Some(format!(
            "pure crate '{name}' uses library '{library}', which is not on the list of pure ones"
        )),
        None => None,
    }
}

fn ring_of(name: &str) -> Option<usize> {
    RINGS.iter().position(|(_, crates)| crates.contains(&name))
}

fn keys(manifest: &toml::Table, section: &str) -> Vec<String> {
    manifest
        .get(section)
        .and_then(toml::Value::as_table)
        .map(|table| table.keys().cloned().collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outward_arrow_is_found() {
        assert!(check_use("wire", 0, "godwit-transport").is_some());
        assert!(check_use("transport", 1, "godwit-wire").is_none());
    }

    #[test]
    fn a_pure_crate_may_not_use_a_runtime() {
        assert!(check_use("migrate", 0, "tokio").is_some());
        assert!(check_use("agent", 2, "tokio").is_none());
    }
}
