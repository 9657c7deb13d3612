//! Documents with and without their checksum: what is damaged is told as damaged, what is newer as newer.

use godwit_store::{StoreError, load_json, save_json};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Serialize, Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct Document {
    name: String,
    memory_mib: u64,
}

fn document() -> Document {
    Document {
        name: "web".into(),
        memory_mib: 64,
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

#[test]
fn a_flipped_letter_is_damage_and_not_a_newer_version() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("spec.json");
    save_json(&path, &document()).expect("writes");
    let written = fs::read(&path).expect("readable");
    for at in 0..written.len() {
        for bit in 0..8 {
            let mut flipped = written.clone();
            flipped[at] ^= 1 << bit;
            fs::write(&path, &flipped).expect("writable");
            match load_json::<Document>(&path) {
                Err(StoreError::Damaged { .. }) => {}
                other => panic!("bit {bit} of byte {at}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_document_that_was_cut_anywhere_is_damaged_or_whole() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("spec.json");
    save_json(&path, &document()).expect("writes");
    let written = fs::read(&path).expect("readable");
    for length in 0..written.len() {
        fs::write(&path, &written[..length]).expect("writable");
        match load_json::<Document>(&path) {
            Err(StoreError::Damaged { .. }) => {}
            Ok(Some(read)) => assert_eq!(read, document(), "{length} bytes"),
            other => panic!("{length} bytes: {other:?}"),
        }
    }
}

#[test]
fn a_word_of_a_newer_version_is_told_as_such_under_its_checksum() {
    #[derive(Serialize)]
    struct Newer {
        name: String,
        memory_mib: u64,
        nested: bool,
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("spec.json");
    let newer = Newer {
        name: "web".into(),
        memory_mib: 64,
        nested: true,
    };
    save_json(&path, &newer).expect("writes");
    let error = load_json::<Document>(&path).expect_err("refused");
    assert!(matches!(error, StoreError::Newer { .. }), "{error}");
}

/// If this fails, a document is written otherwise than before: keep the file that is there, and add another one.
#[test]
fn documents_of_every_version_are_read() {
    for name in ["document", "document-with-checksum"] {
        let read = load_json::<Document>(&golden(name)).expect("readable");
        assert_eq!(read, Some(document()), "{name}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("spec.json");
    save_json(&path, &document()).expect("writes");
    let newest = fs::read(golden("document-with-checksum")).expect("readable");
    assert_eq!(fs::read(&path).expect("readable"), newest);
    // Who knows nothing of the checksum reads the same: it is JSON.
    let plain: Document = serde_json::from_slice(&newest).expect("JSON");
    assert_eq!(plain, document());
}

#[test]
fn a_person_who_edits_a_document_takes_its_last_line_away() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("spec.json");
    save_json(&path, &document()).expect("writes");
    let written = fs::read_to_string(&path).expect("readable");
    let edited = written.replace("64", "128");
    fs::write(&path, &edited).expect("writable");
    let error = load_json::<Document>(&path)
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("checksum") && error.contains("last line"),
        "{error}"
    );
    for end in ["", "\n", "\n\n"] {
        fs::write(&path, edited.trim_end().to_owned() + end).expect("writable");
        let read = load_json::<Document>(&path).expect("readable");
        assert_eq!(read.expect("there").memory_mib, 128);
    }
}
