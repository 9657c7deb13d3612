//! Freezes with guests that obey, that refuse and that say nothing, and with processes that die.

use super::*;
use crate::guest_agent::tests::Guest;
use serde_json::{Value, json};
use std::sync::Mutex;

type Heard = Arc<Mutex<Vec<String>>>;

/// A guest that says this to a freeze and counts one file system at a thaw, and what it was asked.
fn guest(freeze: Value) -> (Guest, Heard) {
    let heard = Heard::default();
    let asked = Arc::clone(&heard);
    let guest = Guest::with_agent(move |command| {
        lock(&asked).push(command.to_owned());
        match command {
            "guest-fsfreeze-freeze" => freeze.clone(),
            _ => json!({"return": 1}),
        }
    });
    (guest, heard)
}

fn freezer(guest: &Guest) -> (Arc<Freezer>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let note = directory.path().join("frozen");
    (Freezer::new(Arc::clone(&guest.port), note), directory)
}

fn until_thawed(freezer: &Freezer) {
    let began = Instant::now();
    while freezer.is_frozen() {
        assert!(
            began.elapsed() < FROZEN_MAX + Duration::from_secs(5),
            "it stays frozen"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

const BOTH: [&str; 2] = ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"];

#[test]
fn a_guest_is_thawed_by_who_froze_it_and_held_by_one_at_a_time() {
    let (guest, heard) = guest(json!({"return": 2}));
    let (freezer, _directory) = freezer(&guest);
    let frozen = freezer.freeze().unwrap();
    assert_eq!(frozen.file_systems(), 2);
    assert!(freezer.is_frozen() && freezer.note.exists());
    assert!(matches!(freezer.freeze(), Err(FreezeError::Twice)));
    frozen.thaw().unwrap();
    assert!(!freezer.is_frozen() && !freezer.note.exists());
    assert_eq!(*lock(&heard), BOTH);
}

#[test]
fn a_guest_whose_holder_forgets_it_is_thawed_and_so_is_one_that_may_not_be_frozen() {
    let (guest, heard) = guest(json!({"return": 2}));
    let (freezer, _directory) = freezer(&guest);
    drop(freezer.freeze().unwrap());
    until_thawed(&freezer);
    assert_eq!(*lock(&heard), BOTH);

    let (guest, heard) = self::guest(json!({"error": {"class": "x", "desc": "busy"}}));
    let (freezer, _directory) = self::freezer(&guest);
    assert!(matches!(freezer.freeze(), Err(FreezeError::Agent(_))));
    until_thawed(&freezer);
    assert_eq!(*lock(&heard), BOTH);
}

#[test]
fn a_guest_that_is_held_too_long_goes_on_and_its_holder_hears_of_it() {
    let (guest, heard) = guest(json!({"return": 2}));
    let (freezer, _directory) = freezer(&guest);
    let frozen = freezer.freeze().unwrap();
    let began = Instant::now();
    until_thawed(&freezer);
    assert!(began.elapsed() >= FROZEN_MAX - Duration::from_secs(1));
    assert_eq!(*lock(&heard), BOTH);
    assert!(matches!(frozen.thaw(), Err(FreezeError::TooLong)));
}

#[test]
fn what_a_process_left_frozen_its_successor_thaws() {
    let (guest, heard) = guest(json!({"return": 2}));
    let (former, directory) = freezer(&guest);
    // As a process that dies: its note stays, and nothing thaws.
    fs::write(&former.note, b"").unwrap();
    let next = Freezer::new(Arc::clone(&guest.port), directory.path().join("frozen"));
    assert!(next.is_frozen());
    assert!(matches!(next.freeze(), Err(FreezeError::Twice)));
    next.thaw_what_was_left();
    assert!(!next.is_frozen());
    assert_eq!(*lock(&heard), ["guest-fsfreeze-thaw"]);
    next.thaw_what_was_left();
    assert_eq!(lock(&heard).len(), 1);
}

#[test]
fn a_guest_that_thawed_itself_was_not_held_still() {
    let thawed = Guest::with_agent(|command| match command {
        "guest-fsfreeze-freeze" => json!({"return": 1}),
        _ => json!({"return": 0}),
    });
    let (freezer, _directory) = freezer(&thawed);
    assert!(matches!(
        freezer.freeze().unwrap().thaw(),
        Err(FreezeError::TooLong)
    ));
}
