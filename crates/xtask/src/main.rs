//! Checks of the house itself: layers, purity, sizes, doc comments, banned calls. `cargo run -p xtask -- tidy` prints what is wrong
//! and fails; `make test` runs it.
//!
//! Owns nothing. Refuses: rules that a reader could not find in ARCHITECTURE.md.
#![forbid(unsafe_code)]

mod docs;
mod functions;
mod layers;
mod ratchet;
mod sources;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let command = std::env::args().nth(1).unwrap_or_default();
    if command != "tidy" {
        eprintln!(
            "usage: xtask tidy   (checks layers, purity, file and function sizes, banned calls)"
        );
        return ExitCode::from(2);
    }
    match tidy(&root()) {
        Ok(findings) if findings.is_empty() => {
            println!("tidy: layers, purity, sizes and banned calls are as ARCHITECTURE.md says");
            ExitCode::SUCCESS
        }
        Ok(findings) => {
            for finding in &findings {
                eprintln!("tidy: {finding}");
            }
            eprintln!("tidy: {} findings", findings.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("tidy: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn tidy(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut findings = layers::check(root)?;
    findings.extend(sources::check(root)?);
    Ok(findings)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
