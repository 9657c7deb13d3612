//! What a source says of the disks that went along with a migration which it ended.

use super::super::former::tests::say;
use super::super::images::tests::{Left, id};
use super::*;
use crate::testing::{answer, holds};
use crate::vm::Vm;
use godwit_ownership::{PeerMessage, Phase, Power};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::{Generation, HostName};

const IMAGE: &str = "root.raw";

/// Whether another host that asks is told that the disks of migration `m` are here.
fn says_so(vm: &mut Vm) -> bool {
    let message = PeerMessage::ask_for_disks(id("m"));
    let request = VmRequest::Peer {
        from: HostName::new("b").unwrap(),
        message: serde_json::to_value(message).unwrap(),
    };
    let VmAnswer::Replies(replies) = answer(vm, request).unwrap() else {
        panic!("no replies")
    };
    let has_disks = |reply: &serde_json::Value| reply["has_disks"] == true;
    replies.iter().any(has_disks)
}

fn along(left: &Left) -> Vec<DiskAlong> {
    let what = &left.what;
    let all = what.disks.iter().zip(&what.images);
    let known = |disk: &DiskSpec| what.known.iter().find(|known| known.disk == disk.name);
    all.map(|(disk, image)| DiskAlong::of(disk, *image, known(disk)))
        .collect()
}

fn write(left: &Left) {
    save_json(&left.paths.disks(), &left.what).unwrap();
}

/// The source of migration `m`, which has failed.
fn source(files: &[&str]) -> Left {
    let mut left = Left::with(None, Some("m"), files);
    let disks = along(&left);
    left.what.note_along(&id("m"), disks);
    write(&left);
    left
}

#[test]
fn a_source_that_is_off_has_the_disks_while_each_image_is_the_one_that_it_had() {
    let left = source(&[IMAGE]);
    let mut vm = left.open(holds(Power::Off));
    assert!(says_so(&mut vm));
    // Its data disk is not mounted.
    let at = left.directory.path();
    let away = at.with_extension("away");
    std::fs::rename(at, &away).unwrap();
    assert!(!says_so(&mut vm));
    std::fs::create_dir(at).unwrap();
    assert!(!says_so(&mut vm));
    // Another file has its name.
    std::fs::write(at.join(IMAGE), "new").unwrap();
    assert!(!says_so(&mut vm));
    std::fs::remove_dir_all(at).unwrap();
    std::fs::rename(&away, at).unwrap();
    assert!(says_so(&mut vm));
}

#[test]
fn an_image_that_is_an_older_copy_of_the_disk_is_not_the_disk() {
    let mut left = source(&[IMAGE]);
    let path = left.directory.path().join(IMAGE);
    left.what.known = vec![say(&path, 3)];
    let disks = along(&left);
    left.what.note_along(&id("m"), disks);
    write(&left);
    let mut vm = left.open(holds(Power::Off));
    assert!(says_so(&mut vm));
    say(&path, 2);
    assert!(!says_so(&mut vm));
}

#[test]
fn a_source_that_could_not_read_all_of_an_image_does_not_say_that_it_has_the_disks() {
    let mut left = source(&[IMAGE]);
    let path = left.what.disks[0].path.clone();
    for (unread, has) in [(path, false), ("/another/image".to_owned(), true)] {
        left.what.unread = vec![unread];
        write(&left);
        let mut vm = left.open(holds(Power::Off));
        assert_eq!(says_so(&mut vm), has);
        // The next QEMU's record has it, too.
        let kept = super::super::left::kept(&left.paths, &left.what.disks);
        assert_eq!(kept.unread.is_empty(), has);
        assert_eq!(kept.along, left.what.along);
    }
}

#[test]
fn the_disks_of_a_vm_that_has_others_by_now_are_not_those_that_went_along() {
    // It was put back from an older copy, or was made anew under its name.
    let left = Left::with(None, None, &[IMAGE]);
    assert!(!says_so(&mut left.open(holds(Power::Off))));
    // A person took a disk away from it, whose storage had died.
    let mut left = source(&[IMAGE]);
    let data = DiskAlong {
        disk: "data".to_owned(),
        ..along(&left)[0].clone()
    };
    left.what.along[0].disks.push(data);
    write(&left);
    assert!(!says_so(&mut left.open(holds(Power::Off))));
    // Or gave it another image.
    let mut left = source(&[IMAGE]);
    left.what.along[0].disks[0].path.push_str(".old");
    write(&left);
    assert!(!says_so(&mut left.open(holds(Power::Off))));
}

#[test]
fn disks_that_went_on_wholly_with_a_later_migration_are_needed_nowhere_else() {
    for (with_all, has) in [(true, true), (false, false)] {
        let mut left = source(&[IMAGE]);
        let mut disks = along(&left);
        if !with_all {
            left.what.along[0].disks.push(DiskAlong {
                disk: "data".to_owned(),
                ..disks[0].clone()
            });
        }
        disks[0].disk = "root".to_owned();
        left.what.note_along(&id("later"), disks);
        left.what.leaving = Some(id("later"));
        write(&left);
        let moved = Phase::Moved {
            generation: Generation(2),
            migration: id("later"),
            to: HostName::new("c").unwrap(),
        };
        assert_eq!(says_so(&mut left.open(moved.clone())), has);
        assert!(left.files().is_empty());
        // The next process of this host knows it, too.
        assert_eq!(says_so(&mut left.open(moved)), has);
    }
}

#[test]
fn a_disk_that_moved_on_its_host_is_the_one_that_went_along() {
    let mut left = source(&[IMAGE]);
    let former = left.what.disks[0].path.clone();
    let now = left.directory.path().join("moved.raw");
    std::fs::write(&now, "moved").unwrap();
    left.what.disks[0].path = now.to_str().unwrap().to_owned();
    left.what.images = vec![identity_of(&now)];
    write(&left);
    assert!(!says_so(&mut left.open(holds(Power::Off))));
    let moved = along(&left).remove(0);
    left.what.follow_along(&former, &moved);
    write(&left);
    assert!(says_so(&mut left.open(holds(Power::Off))));
}

fn identity_of(path: &Path) -> (u64, u64) {
    godwit_qemu::disk::identity_of(path).unwrap().unwrap()
}

#[test]
fn a_number_that_means_nothing_since_a_boot_tells_no_image() {
    let spec = DiskSpec::new("root", "/dev/sdb");
    let then = DiskAlong::of(&spec, (0x810, 0), None);
    assert!(then.is_same(&DiskAlong::of(&spec, (0x810, 0), None)));
    let before = DiskAlong {
        boot: "earlier".to_owned(),
        ..then.clone()
    };
    assert!(!then.is_same(&before));
    let never = DiskAlong {
        boot: String::new(),
        ..then
    };
    assert!(!never.is_same(&never.clone()));
}
