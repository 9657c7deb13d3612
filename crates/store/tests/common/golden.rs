//! Golden files: what messages and records look like, so that no change of a format goes unnoticed.
//!
//! A file has blocks, an empty line between two of them: `# NAME`, `optional:` with the fields that may be missing,
//! `closed:` with the objects that take no further field (maps, and what must be understood wholly), the JSON. Each block
//! is read and must be written again as the same bytes; the two lists are tried out, field by field and object by object,
//! as a neighbour of one version less and one more would send it. Used by the tests of several crates.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// A type by its name in the file, with how a text of it is read and written again.
pub type Kind = (&'static str, fn(&str) -> Result<String, String>);

const WHAT_TO_DO: &str = "A format has changed. Machines of the version before and after talk to each other, and records outlive programs: a new \
field needs a serde default, nothing may be renamed or removed, an optional field stays optional. A word that a reader must understand raises a \
version or a record's format (ARCHITECTURE.md, 'Versions'). If that is what you did, write the files anew with UPDATE_GOLDEN=1 and read the \
difference: lines may be added, `optional` may grow.";

/// Reads a text as `T` and writes it.
pub fn again<T: Serialize + DeserializeOwned>(text: &str) -> Result<String, String> {
    let read: T = serde_json::from_str(text).map_err(|error| error.to_string())?;
    serde_json::to_string(&read).map_err(|error| error.to_string())
}

/// Compares every block of the file with what its type makes of it.
pub fn check(file: &Path, kinds: &[Kind]) {
    let text = std::fs::read_to_string(file).unwrap();
    let mut seen = BTreeSet::new();
    let blocks = text.trim_end().split("\n\n").map(|block| {
        let (name, json) = parts(block);
        seen.insert(name.to_owned());
        let kind = kinds.iter().find(|(known, _)| *known == name);
        let (_, read) = kind.unwrap_or_else(|| panic!("no type '{name}' in the test's table"));
        fresh(name, json, *read)
    });
    let fresh = blocks.collect::<Vec<_>>().join("\n\n") + "\n";
    for (name, _) in kinds {
        assert!(
            seen.contains(*name),
            "{} has no block '{name}': write one by hand",
            file.display()
        );
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(file, fresh).unwrap();
        return;
    }
    let differs = text
        .lines()
        .zip(fresh.lines())
        .find(|(old, new)| old != new);
    assert!(
        text == fresh,
        "{WHAT_TO_DO}\n{}: {differs:#?}",
        file.display()
    );
}

fn parts(block: &str) -> (&str, &str) {
    let name = block
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("# "));
    let json = block
        .lines()
        .last()
        .filter(|line| line.starts_with(['{', '[', '"']));
    (
        name.expect("a block begins with '# NAME'"),
        json.expect("a block ends with its JSON"),
    )
}

/// The block as today's code writes it.
fn fresh(name: &str, json: &str, read: fn(&str) -> Result<String, String>) -> String {
    let written = read(json)
        .unwrap_or_else(|why| panic!("{name} cannot be read ({why})\n{WHAT_TO_DO}\n{json}"));
    let value: Value = serde_json::from_str(&written).unwrap();
    let (mut optional, mut closed) = (Vec::new(), Vec::new());
    for at in objects(&value, String::new()) {
        let fields = value.pointer(&at).and_then(Value::as_object).unwrap();
        for field in fields.keys() {
            let less = changed(&value, &at, |object| object.remove(field));
            if read(&less).is_ok() {
                optional.push(format!("{at}/{field}"));
            }
        }
        let more = changed(&value, &at, |object| {
            object.insert("of_a_newer_version".into(), Value::from(7))
        });
        // What an older build makes of it is what it would make of it without the field.
        if read(&more).as_ref() != Ok(&written) {
            closed.push(if at.is_empty() { "/".to_owned() } else { at });
        }
    }
    let line = |name: &str, list: &[String]| [&[name.to_owned()], list].concat().join(" ");
    format!(
        "# {name}\n{}\n{}\n{written}",
        line("optional:", &optional),
        line("closed:", &closed)
    )
}

/// Where the objects of a value are.
fn objects(value: &Value, at: String) -> Vec<String> {
    let inside = |(key, value): (String, &Value)| objects(value, format!("{at}/{key}"));
    match value {
        Value::Object(fields) => {
            let below = fields
                .iter()
                .map(|(key, value)| (key.clone(), value))
                .flat_map(inside);
            below.chain([at.clone()]).collect()
        }
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(i, value)| (i.to_string(), value))
            .flat_map(inside)
            .collect(),
        _ => Vec::new(),
    }
}

fn changed<T>(
    value: &Value,
    at: &str,
    change: impl FnOnce(&mut serde_json::Map<String, Value>) -> T,
) -> String {
    let mut value = value.clone();
    change(
        value
            .pointer_mut(at)
            .and_then(Value::as_object_mut)
            .unwrap(),
    );
    value.to_string()
}
