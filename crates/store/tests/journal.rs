//! The journal and the documents on real files: locks, generations, damage, bounds.

use godwit_ownership::{HostRecord, Phase, Power};
use godwit_store::{
    StoreError, UEFI_VARIABLES_FILE, VmStore, frame, load_json, remove_document, save_json,
};
use godwit_types::{Generation, VmName};
use std::fs;
use std::path::Path;

fn vm() -> VmName {
    VmName::new("web").expect("a valid name")
}

fn holds(generation: u64) -> HostRecord {
    HostRecord {
        highest: Generation(generation),
        held: Generation(generation),
        phase: Phase::Holds {
            generation: Generation(generation),
            power: Power::Off,
            unconfirmed: None,
        },
        ..HostRecord::absent(vm())
    }
}

fn file(state: &Path) -> std::path::PathBuf {
    VmStore::directory(state, &vm()).join("ownership")
}

#[test]
fn a_record_comes_back_as_it_was_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut store = VmStore::open(dir.path(), &vm()).expect("opens");
    assert_eq!(store.load().expect("readable"), None);
    store.persist(&holds(4)).expect("writes");
    assert_eq!(store.load().expect("readable"), Some(holds(4)));
    drop(store);
    let again = VmStore::open(dir.path(), &vm()).expect("opens again");
    assert_eq!(again.load().expect("readable"), Some(holds(4)));
    assert_eq!(
        VmStore::peek(dir.path(), &vm()).expect("readable"),
        Some(holds(4))
    );
}

#[test]
fn a_second_writer_is_told_who_has_the_vm() {
    let dir = tempfile::tempdir().expect("a directory");
    let _store = VmStore::open(dir.path(), &vm()).expect("opens");
    let error = VmStore::open(dir.path(), &vm()).expect_err("locked");
    let StoreError::Locked { holder, .. } = &error else {
        panic!("another error: {error}");
    };
    assert_eq!(*holder, Some(std::process::id()));
    assert!(error.to_string().contains(&std::process::id().to_string()));
}

#[test]
fn generations_do_not_go_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut store = VmStore::open(dir.path(), &vm()).expect("opens");
    store.persist(&holds(4)).expect("writes");
    let error = store.persist(&holds(3)).expect_err("goes back");
    assert!(matches!(error, StoreError::Record(_)), "{error}");
    assert_eq!(store.load().expect("readable"), Some(holds(4)));
}

#[test]
fn a_record_of_another_vm_is_not_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut store = VmStore::open(dir.path(), &vm()).expect("opens");
    let other = HostRecord::absent(VmName::new("db").expect("a valid name"));
    assert!(store.persist(&other).is_err());
    assert_eq!(store.load().expect("readable"), None);
}

#[test]
fn every_flipped_bit_and_every_cut_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut store = VmStore::open(dir.path(), &vm()).expect("opens");
    store.persist(&holds(4)).expect("writes");
    let good = fs::read(file(dir.path())).expect("readable");
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            fs::write(file(dir.path()), &bad).expect("writable");
            let error = store.load().expect_err("damaged");
            assert!(matches!(error, StoreError::DamagedRecord { .. }), "{error}");
        }
        fs::write(file(dir.path()), &good[..at]).expect("writable");
        assert!(store.load().is_err(), "cut at {at}");
    }
    fs::write(file(dir.path()), &good).expect("writable");
    assert_eq!(store.load().expect("undamaged"), Some(holds(4)));
}

#[test]
fn a_damaged_journal_is_not_opened_and_so_not_overwritten() {
    let dir = tempfile::tempdir().expect("a directory");
    let home = VmStore::directory(dir.path(), &vm());
    fs::create_dir_all(&home).expect("made");
    fs::write(file(dir.path()), b"not a record").expect("writable");
    let error = VmStore::open(dir.path(), &vm()).expect_err("damaged");
    assert!(error.to_string().contains("is damaged"), "{error}");
    assert_eq!(fs::read(file(dir.path())).expect("kept"), b"not a record");
}

#[test]
fn a_record_that_contradicts_itself_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut wrong = holds(4);
    wrong.highest = Generation(3);
    let payload = serde_json::to_vec(&wrong).expect("encodes");
    fs::create_dir_all(VmStore::directory(dir.path(), &vm())).expect("made");
    fs::write(file(dir.path()), frame::encode(&payload).expect("short")).expect("writable");
    assert!(VmStore::open(dir.path(), &vm()).is_err());
}

/// A whole record file with this payload, as a build of frame format `version` would write it.
fn whole_file(version: u32, payload: &[u8]) -> Vec<u8> {
    let mut file = frame::encode(payload).expect("short");
    file[8..12].copy_from_slice(&version.to_le_bytes());
    let crc = frame::crc32(&[&file[..16], payload]);
    file[16..20].copy_from_slice(&crc.to_le_bytes());
    file
}

#[test]
fn a_record_of_a_newer_godwit_is_neither_damaged_nor_absent() {
    let text = serde_json::to_string(&holds(4)).expect("encodes");
    let payloads = [
        (2, text.clone()),
        (1, text.replace("\"format\":1", "\"format\":2")),
        (1, text.replace("\"format\":1", "\"format\":2,\"x\":1")),
        (1, text.replacen('{', "{\"x\":1,", 1)),
        (
            1,
            text.replace("\"phase\":\"holds\"", "\"phase\":\"lends\""),
        ),
    ];
    for (version, payload) in payloads {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(VmStore::directory(dir.path(), &vm())).expect("made");
        let content = whole_file(version, payload.as_bytes());
        fs::write(file(dir.path()), &content).expect("writable");
        let error = VmStore::open(dir.path(), &vm()).expect_err("newer");
        assert!(
            matches!(error, StoreError::Newer { .. }),
            "{error} {payload}"
        );
        assert!(error.to_string().contains("written by a newer Godwit"));
        let peeked = VmStore::peek(dir.path(), &vm());
        assert!(matches!(peeked, Err(StoreError::Newer { .. })), "{payload}");
        assert_eq!(fs::read(file(dir.path())).expect("kept"), content);
    }
}

#[test]
fn a_bit_that_fell_over_in_the_version_is_damage() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(VmStore::directory(dir.path(), &vm())).expect("made");
    let payload = serde_json::to_vec(&holds(4)).expect("encodes");
    let mut content = frame::encode(&payload).expect("short");
    content[8] ^= 2;
    fs::write(file(dir.path()), content).expect("writable");
    let error = VmStore::open(dir.path(), &vm()).expect_err("damaged");
    assert!(matches!(error, StoreError::DamagedRecord { .. }), "{error}");
}

#[test]
fn a_document_of_a_later_format_is_told_from_a_damaged_one() {
    #[derive(serde::Serialize, serde::Deserialize, Debug, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Document {
        one: u32,
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("document.json");
    for (text, newer) in [
        ("{\"format\":2,\"one\":1}", true),
        ("{\"one\":1,\"two\":2}", true),
        ("{\"one\":1,", false),
        ("{\"one\":\"x\"}", false),
    ] {
        fs::write(&path, text).expect("writable");
        let error = load_json::<Document>(&path).expect_err("refused");
        assert_eq!(matches!(error, StoreError::Newer { .. }), newer, "{error}");
    }
}

#[test]
fn the_checksum_is_the_common_one() {
    assert_eq!(frame::crc32(&[b"1234", b"56789"]), 0xcbf4_3926);
}

#[test]
fn documents_come_back_and_have_a_bound() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("m1.json");
    assert_eq!(load_json::<Vec<u32>>(&path).expect("readable"), None);
    save_json(&path, &vec![1u32, 2, 3]).expect("writes");
    assert_eq!(load_json(&path).expect("readable"), Some(vec![1u32, 2, 3]));
    let long = "x".repeat(5 << 20);
    assert!(matches!(
        save_json(&path, &long),
        Err(StoreError::TooLarge { .. })
    ));
    assert_eq!(load_json(&path).expect("readable"), Some(vec![1u32, 2, 3]));
    fs::write(&path, long).expect("writable");
    assert!(matches!(
        load_json::<String>(&path),
        Err(StoreError::TooLarge { .. })
    ));
    fs::write(&path, "[1, 2").expect("writable");
    assert!(matches!(
        load_json::<Vec<u32>>(&path),
        Err(StoreError::Damaged { .. })
    ));
    remove_document(&path).expect("removes");
    assert_eq!(load_json::<Vec<u32>>(&path).expect("readable"), None);
}

/// Puts everything that is no file in a file's place, one after the other.
fn in_place_of(path: &Path, check: impl Fn(&str)) {
    let make: [(&str, &dyn Fn()); 4] = [
        ("a named pipe", &|| {
            rustix::fs::mkfifoat(rustix::fs::CWD, path, 0o600.into()).expect("a pipe");
        }),
        ("a directory", &|| {
            fs::create_dir(path).expect("a directory")
        }),
        ("a socket", &|| {
            drop(std::os::unix::net::UnixListener::bind(path).expect("a socket"));
        }),
        ("a device", &|| {
            std::os::unix::fs::symlink("/dev/zero", path).expect("a link");
        }),
    ];
    for (what, make) in make {
        let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
        make();
        check(what);
    }
}

#[test]
fn what_is_no_file_in_the_place_of_one_is_named_and_not_waited_for() {
    let dir = tempfile::tempdir().expect("a directory");
    drop(VmStore::open(dir.path(), &vm()).expect("opens"));
    let record = file(dir.path());
    in_place_of(&record, |what| {
        let error = VmStore::peek(dir.path(), &vm()).expect_err("no file");
        assert!(matches!(error, StoreError::DamagedRecord { .. }), "{error}");
        let said = error.to_string();
        assert!(
            said.contains(what) && said.contains("/ownership is damaged"),
            "{said}"
        );
        assert!(VmStore::open(dir.path(), &vm()).is_err());
    });
    let document = dir.path().join("site.json");
    in_place_of(&document, |what| {
        let error = load_json::<u64>(&document).expect_err("no file");
        let said = error.to_string();
        assert!(said.contains(what) && said.contains("site.json"), "{said}");
    });
    let lock = dir.path().join("lock");
    in_place_of(&lock, |what| {
        let error = godwit_store::VmLock::take(&lock).expect_err("no file");
        let said = error.to_string();
        assert!(said.contains(what) && said.contains("lock"), "{said}");
    });
}

#[test]
fn a_huge_file_is_not_read_to_its_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("huge");
    let huge = fs::File::create(&path).expect("a file");
    huge.set_len(1 << 40).expect("a hole");
    assert!(matches!(
        load_json::<u64>(&path),
        Err(StoreError::TooLarge { .. })
    ));
    let text = godwit_store::read_text(&path, 100).expect_err("too long");
    assert!(text.to_string().contains("longer than 100 bytes"), "{text}");
}

fn phase(generation: u64, phase: Phase) -> HostRecord {
    HostRecord {
        phase,
        ..holds(generation)
    }
}

/// Whether UEFI variables that are there before a record is written are there after it.
fn keeps_variables(before: &HostRecord, after: &HostRecord) -> bool {
    let dir = tempfile::tempdir().expect("a directory");
    let mut store = VmStore::open(dir.path(), &vm()).expect("opens");
    store.persist(before).expect("writes");
    let variables = VmStore::directory(dir.path(), &vm()).join(UEFI_VARIABLES_FILE);
    let unfinished = variables.with_file_name(format!("{UEFI_VARIABLES_FILE}.new"));
    for path in [&variables, &unfinished] {
        fs::write(path, "of then").expect("writes");
    }
    store.persist(after).expect("writes");
    assert_eq!(variables.exists(), unfinished.exists());
    variables.exists()
}

#[test]
fn variables_of_an_earlier_time_are_gone_before_the_vm_is_here_again() {
    let to = || godwit_types::HostName::new("b").expect("a name");
    let migration = || godwit_types::MigrationId::new("m").expect("an id");
    let gave = phase(
        3,
        Phase::Gave {
            generation: Generation(3),
            migration: migration(),
            to: to(),
        },
    );
    let moved = phase(
        3,
        Phase::Moved {
            generation: Generation(3),
            migration: migration(),
            to: to(),
        },
    );
    let incoming = phase(
        3,
        Phase::Incoming {
            migration: migration(),
            from: to(),
        },
    );
    let ready = phase(
        3,
        Phase::Ready {
            generation: Generation(4),
            migration: migration(),
            from: to(),
        },
    );
    let ready = HostRecord {
        highest: Generation(4),
        ..ready
    };
    let absent = phase(3, Phase::Absent);
    // What was given is above what was held.
    let given = |record| HostRecord {
        held: Generation(2),
        ..record
    };
    let (gave, moved) = (given(gave), given(moved));
    // While the VM is here, while it may come back, and while it comes.
    assert!(keeps_variables(&holds(3), &holds(3)));
    assert!(keeps_variables(&holds(3), &gave));
    assert!(keeps_variables(&gave, &holds(4)));
    assert!(keeps_variables(&incoming, &incoming));
    assert!(keeps_variables(&incoming, &ready));
    assert!(keeps_variables(&ready, &holds(4)));
    // Where it went, where it did not come, and where it is granted or comes anew.
    assert!(!keeps_variables(&gave, &moved));
    assert!(!keeps_variables(&holds(3), &absent));
    assert!(!keeps_variables(&incoming, &absent));
    assert!(!keeps_variables(&moved, &incoming));
    assert!(!keeps_variables(&moved, &holds(4)));
    assert!(!keeps_variables(&absent, &holds(4)));
}
