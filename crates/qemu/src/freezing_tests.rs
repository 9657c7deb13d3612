//! Freezes with guests that obey, that refuse and that say nothing, and with processes that die.

use super::*;
use crate::guest_agent::tests::Guest;
use serde_json::{Value, json};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// A freezer whose rounds are short, with its note there.
fn left_frozen(port: Arc<Port>) -> (Arc<Freezer>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let mut freezer = Freezer::new(port, directory.path().join("frozen"));
    Arc::get_mut(&mut freezer).unwrap().tried_max = Duration::from_millis(300);
    fs::write(&freezer.note, b"").unwrap();
    (freezer, directory)
}

/// A guest that was paused read the freeze in its port after everybody had given up, and stood still for ever.
#[test]
fn a_guest_that_did_not_answer_in_its_minute_is_thawed_when_it_does() {
    let wakes = Arc::new(AtomicBool::new(false));
    let is_awake = Arc::clone(&wakes);
    let guest = Guest::with_agent(move |_| match is_awake.load(Ordering::SeqCst) {
        true => json!({"return": 1}),
        // This is no answer.
        false => json!(7),
    });
    let (freezer, _directory) = left_frozen(Arc::clone(&guest.port));
    for _ in 0..2 {
        freezer.thaw_what_was_left();
        assert!(freezer.note.exists() && freezer.is_frozen());
        assert!(matches!(freezer.freeze(), Err(FreezeError::Twice)));
    }
    wakes.store(true, Ordering::SeqCst);
    freezer.thaw_what_was_left();
    assert!(!freezer.note.exists() && !freezer.is_frozen());
}

#[test]
fn a_guest_whose_agent_refuses_to_thaw_is_asked_once() {
    let asked = Heard::default();
    let heard = Arc::clone(&asked);
    let guest = Guest::with_agent(move |command| {
        lock(&heard).push(command.to_owned());
        json!({"error": {"class": "x", "desc": "it knows of no freeze"}})
    });
    let (freezer, _directory) = left_frozen(Arc::clone(&guest.port));
    freezer.thaw_what_was_left();
    assert!(!freezer.is_frozen());
    assert_eq!(*lock(&asked), ["guest-fsfreeze-thaw"]);
}

/// A process without a free descriptor took its guest for gone.
#[test]
fn a_port_that_cannot_be_reached_for_a_while_is_not_gone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent");
    // The socket is there, and nobody listens at it.
    drop(crate::guest_agent::listen(&path).unwrap());
    let (freezer, _directory) = left_frozen(Arc::new(Port::at(path.clone())));
    freezer.thaw_what_was_left();
    assert!(freezer.is_frozen());
    fs::remove_file(&path).unwrap();
    freezer.thaw_what_was_left();
    assert!(!freezer.is_frozen());
}

/// Who looked for what was left took the note of a new freeze for an old one, and thawed its guest under its holder.
#[test]
fn who_looks_for_what_was_left_does_not_thaw_what_was_just_frozen() {
    let (guest, heard) = guest(json!({"return": 2}));
    let (freezer, _directory) = freezer(&guest);
    let is_over = Arc::new(AtomicBool::new(false));
    let looker = {
        let (freezer, is_over) = (Arc::clone(&freezer), Arc::clone(&is_over));
        std::thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                freezer.thaw_what_was_left();
            }
        })
    };
    for _ in 0..50 {
        freezer.freeze().unwrap().thaw().unwrap();
    }
    is_over.store(true, Ordering::SeqCst);
    looker.join().unwrap();
    let heard = lock(&heard);
    assert!(heard.chunks(2).all(|both| both == BOTH), "{heard:?}");
}
