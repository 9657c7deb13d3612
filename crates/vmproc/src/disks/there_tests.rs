//! What a source says of the disks that went along with a migration which it ended.

use super::super::former::tests::say;
use super::super::images::tests::{Left, id};
use super::*;
use crate::testing::{answer, holds};
use crate::vm::Vm;
use godwit_blockio::delta::{NewDelta, create};
use godwit_delta::Parent;
use godwit_ownership::{PeerMessage, Phase, Power};
use godwit_snapshots::Fresh;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::snapshots::{LAYERED_MARK, description_of};
use godwit_types::{Generation, HostName};
use rustix::fs::{XattrFlags, fsetxattr};

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

fn off(left: &Left) -> bool {
    says_so(&mut left.open(holds(Power::Off)))
}

fn along(left: &Left) -> Vec<DiskAlong> {
    let all = left.what.disks.iter();
    let seen = all.map(|disk| {
        DiskAlong::seen(&disk.name, &disk.path, label::End::OfDevice)
            .unwrap()
            .1
    });
    seen.collect()
}

fn write(left: &Left) {
    save_json(&left.paths.disks(), &left.what).unwrap();
}

/// The source of migration `m`, which has failed. Its image has been taken so often.
fn source(taken: Option<u64>) -> Left {
    let mut left = Left::with(None, Some("m"), &[IMAGE]);
    let path = left.directory.path().join(IMAGE);
    left.what.known = taken.map(|taken| say(&path, taken)).into_iter().collect();
    let disks = along(&left);
    left.what.note_along(&id("m"), disks);
    write(&left);
    left
}

#[test]
fn a_source_that_is_off_has_the_disks_while_each_image_is_the_one_that_it_had() {
    let left = source(None);
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
    std::fs::write(at.join(IMAGE), "").unwrap();
    assert!(!says_so(&mut vm), "an image that was emptied");
}

#[test]
fn an_image_that_is_an_older_copy_or_says_nothing_any_more_is_not_the_disk() {
    let left = source(Some(3));
    let path = left.directory.path().join(IMAGE);
    let mut vm = left.open(holds(Power::Off));
    assert!(says_so(&mut vm));
    say(&path, 2);
    assert!(!says_so(&mut vm));
    say(&path, 3);
    assert!(says_so(&mut vm));
    // It was put back from a copy without attributes, and has the same number.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    godwit_blockio::holder::forget(std::os::fd::AsFd::as_fd(&file)).unwrap();
    assert!(!says_so(&mut vm));
}

/// A host that loses its power at once after it took an image has not written down that it did: seed 28411 of the site simulator.
#[test]
fn an_image_that_was_taken_less_often_than_when_it_went_along_is_an_older_copy() {
    let mut left = source(Some(3));
    let path = left.directory.path().join(IMAGE);
    left.what.known[0].taken = 2;
    write(&left);
    assert!(off(&left));
    say(&path, 2);
    assert!(!off(&left));
}

#[test]
fn a_source_that_could_not_read_all_of_an_image_does_not_say_that_it_has_the_disks() {
    let mut left = source(None);
    let path = left.what.disks[0].path.clone();
    for (unread, has) in [(path, false), ("/another/image".to_owned(), true)] {
        left.what.unread = vec![unread];
        write(&left);
        assert_eq!(off(&left), has);
        // The next QEMU's record has it, too.
        let kept = super::super::left::of_earlier(&left.paths, &left.what.disks);
        assert_eq!(kept.unread.is_empty(), has);
        assert_eq!(kept.along, left.what.along);
    }
}

/// An empty delta of this number at this place.
fn delta(descriptor: &Path, number: u8) {
    let parent = Parent {
        cid: 7,
        hint: "root.raw.vmdk".to_owned(),
    };
    let new = NewDelta {
        descriptor,
        bytes: 1 << 20,
        id: Id([number; 16]),
        parent: &parent,
    };
    create(&new).unwrap();
}

#[test]
fn a_disk_with_snapshots_is_there_only_with_all_that_it_consists_of() {
    let left = source(None);
    let at = |name: &str| left.directory.path().join(name);
    let own = at(IMAGE);
    let (descriptor, extent) = (at("root.raw.d1.vmdk"), at("root.raw.d1-sesparse.vmdk"));
    delta(&descriptor, 1);
    let fresh = Fresh {
        name: "root.raw.d1".to_owned(),
        id: "01".repeat(16),
        elsewhere: None,
    };
    let (mark, other) = ("5".repeat(32), "6".repeat(32));
    let images = Images::of_one(IMAGE, 1 << 20, &mark)
        .freeze(&fresh)
        .unwrap();
    save_json(&description_of(&own), &images).unwrap();
    let bear = |mark: &str| {
        let file = File::open(&own).unwrap();
        fsetxattr(&file, LAYERED_MARK, mark.as_bytes(), XattrFlags::empty()).unwrap();
    };
    assert!(!off(&left), "the image does not say that it is a part");
    bear(&mark);
    assert!(off(&left));
    bear(&other);
    assert!(!off(&left), "it is a part of something else");
    bear(&mark);
    // Its delta is gone, or is another one.
    let away = at("away");
    std::fs::rename(&extent, &away).unwrap();
    assert!(!off(&left));
    std::fs::remove_file(&descriptor).unwrap();
    delta(&descriptor, 2);
    assert!(!off(&left));
    std::fs::rename(&away, &extent).unwrap();
    assert!(off(&left));
    // Nobody knows what else belongs to it.
    std::fs::rename(description_of(&own), &away).unwrap();
    assert!(!off(&left));
    std::fs::rename(&away, description_of(&own)).unwrap();
    assert!(off(&left));
}

#[test]
fn the_disks_of_a_vm_that_has_others_by_now_are_not_those_that_went_along() {
    // It was put back from an older copy, or was made anew under its name.
    let left = Left::with(None, None, &[IMAGE]);
    assert!(!off(&left));
    // A person took a disk away from it, whose storage had died.
    let mut left = source(None);
    let data = DiskAlong {
        disk: "data".to_owned(),
        ..along(&left)[0].clone()
    };
    left.what.along[0].disks.push(data);
    write(&left);
    assert!(!off(&left));
    // Or gave it another image.
    let mut left = source(None);
    left.what.along[0].disks[0].path.push_str(".old");
    write(&left);
    assert!(!off(&left));
}

#[test]
fn disks_that_went_on_wholly_with_a_later_migration_are_needed_nowhere_else() {
    for (with_all, has) in [(true, true), (false, false)] {
        let mut left = source(None);
        let disks = along(&left);
        if !with_all {
            left.what.along[0].disks.push(DiskAlong {
                disk: "data".to_owned(),
                ..disks[0].clone()
            });
        }
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
fn a_disk_that_moved_on_its_host_is_the_one_that_went_along_if_it_was_that_before() {
    for is_replaced in [false, true] {
        let mut left = source(Some(3));
        let path = left.directory.path().join(IMAGE);
        if is_replaced {
            // A person put a backup there, which was taken as it is.
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, "an older one").unwrap();
        }
        let before = along(&left).remove(0);
        let now = left.directory.path().join("moved.raw");
        std::fs::write(&now, "the moved one").unwrap();
        left.what.disks[0].path = now.to_str().unwrap().to_owned();
        left.what.known.clear();
        write(&left);
        assert!(!off(&left));
        let moved = along(&left).remove(0);
        left.what.follow_along(&before, &moved);
        write(&left);
        assert_eq!(off(&left), !is_replaced);
    }
}

#[test]
fn a_number_that_means_nothing_since_a_boot_tells_no_image() {
    let left = source(None);
    let then = along(&left).remove(0);
    assert!(then.is_same(&along(&left)[0]));
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

#[test]
fn one_thread_looks_at_images_however_often_others_ask() {
    const A_MOMENT: Duration = Duration::from_millis(20);
    static LOOKS_HERE: AtomicBool = AtomicBool::new(false);
    let (answer, answers) = std::sync::mpsc::channel::<()>();
    let hangs = looked_alone((&LOOKS_HERE, A_MOMENT), move || answers.recv());
    assert!(hangs.is_err(), "nobody waits for ever");
    let second = looked_alone((&LOOKS_HERE, A_MOMENT), || ());
    assert!(second.is_err_and(|why| why.contains("has not answered yet")));
    assert!(LOOKS_HERE.load(Ordering::SeqCst));
    drop(answer);
    while LOOKS_HERE.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    assert_eq!(looked_alone((&LOOKS_HERE, LOOK_WAIT), || 1), Ok(1));
}

#[test]
fn an_image_of_which_a_place_cannot_be_read_is_not_there() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join(IMAGE);
    std::fs::write(&path, [7; 3 * PLACE_BYTES]).unwrap();
    let bytes = 3 * PLACE_BYTES as u64;
    read_places(&File::open(&path).unwrap(), bytes, PLACES).unwrap();
    // What has been opened and gives no bytes.
    assert!(read_places(&File::open(directory.path()).unwrap(), bytes, PLACES).is_err());
}
