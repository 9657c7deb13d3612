//! Which images that came are removed, which are kept, and which stay, by what is known of their source.

use super::super::images::tests::{CAME, Left, id};
use super::*;
use crate::testing::{ask, migration, open};
use crate::vm::Vm;
use godwit_ownership::{Event, PeerMessage, Phase};
use godwit_store::save_json;
use godwit_types::HostName;
use godwit_types::host_api::{MigrationNote, NOTE_FILE, VmRequest};
use godwit_types::migration::Side;
use rustix::fs::{XattrFlags, fsetxattr};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;

const KEPT: &str = "root.raw.kept-m";

fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

/// What a destination has of a VM that was to come from host `a`.
fn came(whole: Option<u64>) -> Left {
    let left = Left::with(Some(("m", whole)), None, &[CAME]);
    let note = MigrationNote {
        migration: id("m"),
        side: Side::Destination,
        peer: migration("m").source,
    };
    save_json(&left.paths.state.join(NOTE_FILE), &note).unwrap();
    left
}

fn refused() -> Phase {
    Phase::Refused {
        generation: Generation(2),
        migration: id("m"),
        from: host("a"),
    }
}

/// The source ended the migration, and has the disks.
fn has_disks(migration: &str) -> PeerMessage {
    PeerMessage::Abort {
        migration: id(migration),
        reason: None,
        cancelled: false,
        has_disks: true,
    }
}

/// Has nobody see the directory of the images.
fn hidden(left: &Left) -> (PathBuf, PathBuf) {
    let at = left.directory.path().to_owned();
    let away = at.with_extension("away");
    std::fs::rename(&at, &away).unwrap();
    std::fs::write(&at, "no directory").unwrap();
    (at, away)
}

fn shown_again(at: &Path, away: &Path) {
    std::fs::remove_file(at).unwrap();
    std::fs::rename(away, at).unwrap();
}

/// What this process asks other hosts.
fn asked(vm: &Vm) -> Vec<PeerMessage> {
    let said = vm.at_hand.outbox.take(Duration::ZERO).into_iter();
    said.map(|said| serde_json::from_value(said.message).unwrap())
        .collect()
}

#[test]
fn what_came_stays_until_its_source_says_that_it_has_the_disks() {
    for phase in [Phase::Absent, refused()] {
        let left = came(Some(2));
        let mut vm = left.open(phase);
        assert_eq!(asked(&vm), [PeerMessage::ask_for_disks(id("m"))]);
        for (from, message) in [
            ("a", has_disks("other")),
            ("c", has_disks("m")),
            // It ended the migration, and its data disk is gone.
            ("a", PeerMessage::abort(id("m"))),
            (
                "a",
                // So answers a host, too, that knows nothing of the VM.
                PeerMessage::Withdrawn {
                    migration: id("m"),
                    generation: Generation(0),
                },
            ),
        ] {
            vm.hear(host(from), message);
            assert_eq!(left.files(), [CAME]);
        }
        assert!(vm.came.waits());
        vm.hear(host("a"), has_disks("m"));
        assert!(left.files().is_empty());
        assert!(!left.paths.disks().exists() && !vm.came.waits());
    }
}

#[test]
fn a_move_that_fails_without_a_word_of_the_source_removes_nothing() {
    let left = came(None);
    let incoming = Phase::Incoming {
        migration: id("m"),
        from: host("a"),
    };
    let mut vm = left.open(incoming);
    assert_eq!(vm.core.record().phase, Phase::Absent);
    assert_eq!(left.files(), [CAME]);
    vm.hear(host("a"), has_disks("m"));
    assert!(left.files().is_empty());
}

/// A host that has promised to take the VM from host `a`.
fn promised(left: &Left, attempt: u64) -> Vm {
    let mut vm = left.open(Phase::Absent);
    vm.feed(Event::PrepareIncoming {
        migration: id("m"),
        from: host("a"),
        generation: Generation(attempt),
    });
    vm.feed(Event::Loaded {
        attempt: Generation(attempt),
    });
    assert!(matches!(vm.core.record().phase, Phase::Ready { .. }));
    vm
}

fn gives_up_on(source: &str) -> VmRequest {
    VmRequest::Resolve {
        run_here: false,
        confirm_fenced: Some(host(source)),
    }
}

#[test]
fn a_disk_whose_source_a_person_gives_up_is_kept_and_the_answer_says_where_and_what_it_is() {
    let left = came(Some(3));
    let mut vm = promised(&left, 3);
    assert!(ask(&mut vm, gives_up_on("c")).is_err());
    assert_eq!(left.files(), [CAME]);
    let said = ask(&mut vm, gives_up_on("a")).unwrap();
    assert!(matches!(vm.core.record().phase, Phase::Refused { .. }));
    assert_eq!(left.files(), [KEPT]);
    assert_eq!(left.content(KEPT), CAME);
    for words in [
        "this host gave it up; the image of disk 'root' that came with migration m is kept as ",
        "root.raw.kept-m (1 MiB, written last at ",
        "): it is whole and durable, with all that the disk had when the guest was stopped at its source; to go on from it name it as the 'path'",
    ] {
        assert!(said.contains(words), "{said}");
    }
    // Whoever opens the VM next, and whatever the source says then, it stays.
    drop(vm);
    let mut vm = open(&left.site);
    vm.hear(host("a"), has_disks("m"));
    assert_eq!(left.files(), [KEPT]);
}

#[test]
fn a_person_s_word_is_durable_before_it_is_decided_and_a_successor_keeps_what_came() {
    let left = came(Some(2));
    let mut vm = promised(&left, 3);
    vm.source_is_gone(&host("c")).unwrap();
    let gone = |left: &Left| {
        let what: ServedDisks = load_json(&left.paths.disks()).unwrap().unwrap();
        what.arriving.unwrap().source_gone
    };
    assert!(!gone(&left), "the VM was not to come from there");
    vm.source_is_gone(&host("a")).unwrap();
    assert!(gone(&left));
    drop(vm);
    // It died before anything else, and its successor finds no QEMU.
    drop(open(&left.site));
    assert!(matches!(left.site.phase(), Phase::Refused { .. }));
    assert_eq!(left.files(), [KEPT]);
    assert!(!left.paths.disks().exists());
}

#[test]
fn where_it_cannot_be_read_what_came_nothing_is_removed() {
    let left = came(Some(3));
    let mut vm = promised(&left, 3);
    std::fs::remove_file(left.paths.disks()).unwrap();
    std::fs::create_dir(left.paths.disks()).unwrap();
    drop(ask(&mut vm, gives_up_on("a")));
    assert_eq!(left.files(), [CAME]);
}

#[test]
fn what_came_of_a_host_that_was_removed_is_kept() {
    let left = came(None);
    let mut vm = left.open(Phase::Absent);
    ask(&mut vm, VmRequest::HostRemoved { host: host("c") }).unwrap();
    assert_eq!(left.files(), [CAME]);
    ask(&mut vm, VmRequest::HostRemoved { host: host("a") }).unwrap();
    assert_eq!(left.files(), [KEPT]);
    assert!(vm.came.told[0].contains("it is not known to be whole"));
}

#[test]
fn a_vm_that_comes_anew_removes_nothing_of_which_its_source_has_said_nothing() {
    let left = came(Some(2));
    let mut vm = left.open(Phase::Absent);
    // The same one is asked first; another one may know nothing of it.
    asked(&vm);
    let refused = vm.comes_anew(&host("a")).unwrap_err();
    assert!(refused.message.contains("it is asked now"), "{refused}");
    assert_eq!(asked(&vm), [PeerMessage::ask_for_disks(id("m"))]);
    assert_eq!(left.files(), [CAME]);
    vm.comes_anew(&host("c")).unwrap();
    assert_eq!(left.files(), [KEPT]);
    assert!(!vm.came.waits());
}

#[test]
fn what_came_to_a_directory_that_is_gone_keeps_no_vm_from_starting() {
    for whole in [None, Some(2)] {
        let left = came(whole);
        let at = left.directory.path();
        std::fs::rename(at, at.with_extension("away")).unwrap();
        assert!(
            !put_aside(&left.paths, Source::Unknown, None)
                .waits
                .is_empty()
        );
        let settled = super::super::images::settle(&left.paths, Generation(9));
        std::fs::rename(at.with_extension("away"), at).unwrap();
        // The names of the others could not be made durable; that is tried again.
        assert!(settled.is_ok());
    }
}

/// A volume that was removed kept its VM from starting on that host, and from coming to it, for good.
#[test]
fn what_came_to_a_device_that_is_gone_keeps_no_vm_from_starting() {
    let mut left = Left::with(Some(("m", Some(2))), None, &[]);
    let gone = format!("/dev/godwit-test-gone-{}/lun", std::process::id());
    left.what.disks[0].path.clone_from(&gone);
    save_json(&left.paths.disks(), &left.what).unwrap();
    let waits = put_aside(&left.paths, Source::Unknown, None).waits;
    let told = format!("it stays as a part on the device {gone}");
    assert!(waits[0].contains(&told), "{waits:?}");
    may_keep(&left.paths).unwrap();
    let has_disks = put_aside(&left.paths, Source::HasDisks, None);
    assert!(has_disks.waits.is_empty());
    assert!(
        arrival(&left.paths).is_some(),
        "it is let go once the device is there"
    );
    let settled = super::super::images::settle(&left.paths, Generation(9));
    assert_eq!(settled, Ok(()));
}

#[test]
fn of_a_disk_of_which_only_parts_come_one_is_kept_and_not_one_for_each_try() {
    for (whole, refused) in [(None, true), (Some(2), false)] {
        let left = came(whole);
        let mut vm = left.open(Phase::Absent);
        std::fs::write(left.directory.path().join("root.raw.kept-l"), "a part").unwrap();
        let comes = vm.comes_anew(&host("c"));
        let named = comes.is_err_and(|error| error.message.contains("root.raw.kept-l: see which"));
        assert_eq!(named, refused);
        assert_eq!(left.files().contains(&CAME.to_owned()), refused);
    }
}

#[test]
fn a_vm_does_not_come_anew_while_what_came_before_is_out_of_reach() {
    let left = came(Some(2));
    let mut vm = left.open(Phase::Absent);
    let at = left.directory.path();
    let away = at.with_extension("away");
    std::fs::rename(at, &away).unwrap();
    let refused = vm.comes_anew(&host("c")).unwrap_err();
    assert!(
        refused.message.contains("is out of reach (No such file"),
        "{refused}"
    );
    assert!(left.paths.disks().exists());
    std::fs::rename(&away, at).unwrap();
    vm.comes_anew(&host("c")).unwrap();
    assert_eq!(left.files(), [KEPT]);
}

#[test]
fn a_vm_does_not_come_anew_while_what_came_before_cannot_be_kept() {
    let left = came(Some(2));
    let mut vm = left.open(Phase::Absent);
    let (at, away) = hidden(&left);
    let refused = vm.comes_anew(&host("c")).unwrap_err();
    assert!(
        refused.message.contains("is out of reach (Not a directory"),
        "{refused}"
    );
    assert!(left.paths.disks().exists());
    shown_again(&at, &away);
    vm.hear(host("a"), has_disks("m"));
    assert!(left.files().is_empty());
}

#[test]
fn a_host_that_takes_the_vm_without_its_source_does_not_start_while_what_came_cannot_be_kept() {
    for whole in [None, Some(2)] {
        let left = came(whole);
        let (at, away) = hidden(&left);
        let settle = || super::super::images::settle(&left.paths, Generation(9));
        assert!(settle().unwrap_err().contains("cannot be put aside"));
        shown_again(&at, &away);
        assert_eq!(settle(), Ok(()));
        assert_eq!(left.files(), [KEPT]);
    }
}

#[test]
fn what_came_is_not_forgotten_while_its_file_system_is_not_mounted() {
    for source in [Source::Unknown, Source::HasDisks, Source::Gone] {
        let mut left = came(Some(2));
        let path = left.directory.path().join(CAME);
        let image = left.what.images[0];
        // What the directory shows instead.
        left.what.images = vec![(image.0 + 1, image.1)];
        save_json(&left.paths.disks(), &left.what).unwrap();
        let aside = left.directory.path().join("aside");
        std::fs::rename(&path, &aside).unwrap();
        let waits = put_aside(&left.paths, source, None).waits;
        // Who knows what is to become of it does not wait: devices have other numbers after a boot.
        assert_eq!(left.paths.disks().exists(), source == Source::Unknown);
        std::fs::rename(&aside, &path).unwrap();
        if source != Source::Unknown {
            continue;
        }
        assert!(waits[0].contains("is not mounted there"), "{waits:?}");
        put_aside(&left.paths, source, None);
        assert_eq!(left.files(), [CAME]);
    }
}

#[test]
fn an_image_that_is_kept_replaces_nothing_and_is_found_again_by_whoever_goes_on() {
    let left = Left::with(Some(("m", Some(2))), None, &[CAME, KEPT]);
    for _ in 0..2 {
        let aside = put_aside(&left.paths, Source::Gone, None);
        assert!(aside.waits.is_empty());
        let [kept] = &aside.kept[..] else {
            panic!("{aside:?}")
        };
        assert!(
            kept.contains("kept as ") && kept.contains("root.raw.kept-m-2 ("),
            "{kept}"
        );
        assert_eq!(left.files(), [KEPT, "root.raw.kept-m-2"]);
        assert_eq!(left.content(KEPT), KEPT);
        assert_eq!(left.content("root.raw.kept-m-2"), CAME);
        assert!(!left.paths.disks().exists());
        // Who died before that was forgotten has a successor.
        save_json(&left.paths.disks(), &left.what).unwrap();
    }
}

#[test]
fn what_a_copy_is_is_told_by_the_generation_for_which_it_was_whole() {
    for (whole, promised, words) in [
        (Some(2), Some(2), "it is whole and durable, with all"),
        (
            Some(2),
            Some(3),
            "it was whole and durable, and may have only",
        ),
        (Some(2), None, "it was whole and durable, and may have only"),
        (None, Some(2), "it is not known to be whole"),
    ] {
        let left = came(whole);
        let path = left.directory.path().join(CAME);
        let file = std::fs::File::options().write(true).open(path).unwrap();
        let at = std::time::UNIX_EPOCH + Duration::from_secs(1 << 30);
        file.set_modified(at).unwrap();
        let aside = put_aside(&left.paths, Source::Gone, promised.map(Generation));
        assert!(aside.kept[0].contains(words), "{aside:?}");
        let when = "(1 MiB, written last at 2004-01-10 13:37:04 UTC)";
        assert!(aside.kept[0].contains(when), "{aside:?}");
    }
}

#[test]
fn an_image_into_which_nothing_came_goes_unless_it_is_all_of_a_disk() {
    for (whole, source) in [
        (None, Source::Unknown),
        (None, Source::Gone),
        (Some(2), Source::Gone),
    ] {
        let left = came(whole);
        let file = std::fs::File::create(left.directory.path().join(CAME)).unwrap();
        file.set_len(1 << 20).unwrap();
        drop(file);
        put_aside(&left.paths, source, None);
        assert_eq!(left.files().is_empty(), whole.is_none());
    }
}

/// They take a block where they are longer than its inode has room for.
#[test]
fn an_image_that_has_attributes_alone_goes_and_one_into_which_anything_came_stays() {
    for wrote in [false, true] {
        let left = came(None);
        let file = std::fs::File::create(left.directory.path().join(CAME)).unwrap();
        file.set_len(1 << 20).unwrap();
        fsetxattr(&file, "user.note", &[7; 3000], XattrFlags::empty()).unwrap();
        if wrote {
            file.write_all_at(&[7; 512], 512 << 10).unwrap();
        }
        drop(file);
        put_aside(&left.paths, Source::Unknown, None);
        assert_eq!(left.files().is_empty(), !wrote);
    }
}

/// A file server tells of no holes: attributes looked like content, and the file stayed for a source that knew of nothing.
#[test]
fn an_image_whose_source_never_connected_goes_and_one_of_a_source_that_did_stays() {
    for is_silent in [false, true] {
        let left = came(None);
        let mut what: ServedDisks = load_json(&left.paths.disks()).unwrap().unwrap();
        what.arriving.as_mut().unwrap().is_silent = is_silent;
        save_json(&left.paths.disks(), &what).unwrap();
        // As content that is none.
        std::fs::write(left.directory.path().join(CAME), [7; 3000]).unwrap();
        put_aside(&left.paths, Source::Unknown, None);
        assert_eq!(left.files().is_empty(), is_silent);
    }
}

#[test]
fn what_was_just_made_is_removed_and_nothing_that_came_before() {
    let left = came(Some(2));
    unmake(&left.paths, &id("other"));
    assert_eq!(left.files(), [CAME]);
    unmake(&left.paths, &id("m"));
    assert!(left.files().is_empty());
}

#[test]
fn what_cannot_be_put_aside_stays_noted_and_nothing_comes_in_its_place() {
    let left = came(Some(2));
    let (at, away) = hidden(&left);
    let aside = put_aside(&left.paths, Source::Gone, None);
    assert!(aside.waits[0].contains("cannot be put aside (Not a directory"));
    assert!(aside.must_be_over().is_err() && left.paths.disks().exists());
    shown_again(&at, &away);
    let aside = put_aside(&left.paths, Source::Gone, None);
    assert!(aside.must_be_over().is_ok());
    assert_eq!(left.files(), [KEPT]);
}
