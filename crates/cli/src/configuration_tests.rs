//! Holds docs/configuration.md, the manual pages made of it and the packaged examples against what the files' readers know.

use crate::controller_file::ControllerFile;
use crate::file_pages::{self, DOCUMENT};
use godwit_agent::config::HostConfig;
use godwit_types::VmSpec;
use std::path::Path;
use std::process::{Command, Output};

/// The keys that a reader names when it meets one that it does not know.
fn keys(refusal: &str) -> Vec<&str> {
    let (_, known) = refusal.split_once("expected").unwrap_or_default();
    let quoted = known.split('`').skip(1).step_by(2);
    quoted.collect()
}

fn repository(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    std::fs::read_to_string(path).unwrap()
}

/// The document's heading, the example, the refusal that names all keys, and how many there are at least.
fn files() -> [(&'static str, &'static str, String, usize); 7] {
    let unknown = "no-such-key = 1\n";
    let host = HostConfig::parse(unknown, Path::new("host.toml")).unwrap_err();
    let controller = toml::from_str::<ControllerFile>(unknown).unwrap_err();
    let vm = |text: &str| VmSpec::from_toml(text).unwrap_err().to_string();
    let (nic, disk) = (
        format!("[[nic]]\n{unknown}"),
        format!("[[disk]]\n{unknown}"),
    );
    let told = |part: &str| vm(&format!("{part}\n{unknown}"));
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
        ("## A VM", "vm.toml", told("[cloud_init]"), 6),
        ("## A VM", "vm.toml", told("[[cloud_init.network]]"), 4),
    ]
}

/// Tables, whose keys have rows of their own.
fn is_table(key: &str) -> bool {
    matches!(key, "nic" | "disk" | "cloud_init" | "network")
}

#[test]
fn every_key_of_every_file_stands_in_the_document() {
    for (heading, _, refusal, at_least) in files() {
        let keys = keys(&refusal);
        assert!(keys.len() >= at_least, "{heading}: {refusal}");
        let part = file_pages::part(DOCUMENT, heading).unwrap();
        let keys = keys.iter().filter(|key| !is_table(key));
        let missing: Vec<_> = keys
            .filter(|key| !part.contains(&format!("`{key}`")))
            .collect();
        assert!(missing.is_empty(), "{heading}: {missing:?}");
    }
}

#[test]
fn every_key_that_people_may_write_stands_in_the_example() {
    for (heading, example, refusal, _) in files() {
        let text = repository(&format!("packaging/examples/{example}.example"));
        let is_left_out = |key: &&&str| {
            let named = format!("`{key}`");
            let mut rows = file_pages::part(DOCUMENT, heading).unwrap().lines();
            rows.any(|row| row.contains(&named) && row.contains("Leave it out"))
        };
        let shown = |key: &&&str| {
            let lines = text.lines().map(|line| line.trim_start_matches("# "));
            let mut lines = lines.map(|line| {
                line.trim_matches(['[', ']'])
                    .trim_start_matches("cloud_init.")
            });
            lines.any(|line| line == **key || line.starts_with(&format!("{key} = ")))
        };
        let keys = keys(&refusal);
        let missing = keys.iter().filter(|key| !shown(key));
        let missing: Vec<_> = missing.filter(|key| !is_left_out(key)).collect();
        assert!(missing.is_empty(), "{example}: {missing:?}");
    }
}

#[test]
fn every_key_of_every_file_stands_in_its_manual_page() {
    for (heading, file, refusal, _) in files() {
        let mut pages = file_pages::all();
        let (name, page) = pages.find(|(name, _)| name.ends_with(file)).unwrap();
        for key in keys(&refusal).into_iter().filter(|key| !is_table(key)) {
            let entry = page.split(".TP\n").find(|entry| {
                let tag = entry.lines().next().unwrap_or_default();
                tag.ends_with(&format!("\\fB{key}\\fR"))
            });
            let entry = entry.unwrap_or_else(|| panic!("{name} lacks {key} of {heading}"));
            assert!(
                entry.lines().count() > 1,
                "{name}: nothing is said of {key}"
            );
        }
    }
}

/// What a tool of the manual says of a page; `None` on a machine that does not have it.
fn told(tool: &str, arguments: &[&str], page: &Path) -> Option<Output> {
    let mut command = Command::new(tool);
    match command.args(arguments).arg(page).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("{tool}: {error}"),
    }
}

#[test]
fn the_manual_pages_of_files_are_good_roff() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in file_pages::all() {
        let page = dir.path().join(format!("{name}.5"));
        std::fs::write(&page, text).unwrap();
        if let Some(said) = told("groff", &["-man", "-ww", "-z", "-Tascii"], &page) {
            let warnings = String::from_utf8_lossy(&said.stderr);
            assert!(
                said.status.success() && warnings.is_empty(),
                "{name}: {warnings}"
            );
        }
        if let Some(said) = told("lexgrog", &[], &page) {
            let whatis = String::from_utf8_lossy(&said.stdout);
            assert!(whatis.contains(&format!("\"{name} - ")), "{name}: {whatis}");
        }
    }
}
