//! What is refused, and what is known of a disk from its description alone.

use godwit_snapshots::{CHAIN_MAX, Common, Fresh, Images, Snapshot, Tidying, files};
use godwit_types::{SnapshotName, VmName};

fn named(name: &str) -> SnapshotName {
    SnapshotName::new(name).unwrap()
}

fn fresh(images: &Images) -> Fresh {
    Fresh {
        name: files::delta("root.raw", images.next),
        id: format!("{:032x}", images.next),
        elsewhere: None,
    }
}

fn take(images: &Images, name: &str) -> Result<Images, String> {
    let snapshot = Snapshot {
        name: named(name),
        after: None,
        image: String::new(),
        made_unix_s: 1_800_000_000,
        begun: false,
        quiesced: false,
        text: String::new(),
        disks: vec!["root".to_owned()],
    };
    images.take(snapshot, &fresh(images))
}

fn one() -> Images {
    Images::of_one("root.raw", 1 << 30, &"5".repeat(32))
}

/// A process that died between two disks left one as it was then and the other as it is now, and the VM started so.
#[test]
fn a_disk_that_was_to_go_back_with_others_is_not_used_before_it_has() {
    let vm = VmName::new("web").unwrap();
    let images = take(&one(), "clean").unwrap();
    assert_eq!(images.must_be_one_moment(&vm), Ok(()));
    let begun = images.reverting(&named("clean")).unwrap();
    let why = begun.must_be_one_moment(&vm).unwrap_err();
    assert!(why.contains("godwit vm snapshot revert web clean"), "{why}");
    let gone_back = begun.revert(&named("clean"), &fresh(&begun)).unwrap();
    assert_eq!(gone_back.must_be_one_moment(&vm), Ok(()));
    assert!(images.reverting(&named("none")).is_err());
}

#[test]
fn only_what_a_death_leaves_while_a_snapshot_is_taken_counts_as_taken_last() {
    let name = |images: &Images| images.taken_last().map(|last| last.name.clone());
    assert_eq!(name(&one()), None);
    let first = take(&one(), "first").unwrap();
    assert_eq!(name(&first), Some(named("first")));
    let second = take(&first, "second").unwrap();
    assert_eq!(name(&second), Some(named("second")));
    // What was frozen once more has other content between.
    let frozen = second.freeze(&fresh(&second)).unwrap();
    assert_eq!(name(&frozen), None);
}

/// A chain of the greatest length could not be frozen once more, and so never be merged under a guest that writes.
#[test]
fn the_longest_chain_leaves_room_for_being_merged() {
    let mut images = one();
    let refused = loop {
        match take(&images, &format!("s{}", images.next)) {
            Ok(now) => images = now,
            Err(why) => break why,
        }
    };
    assert!(refused.contains("delete some snapshots"), "{refused}");
    assert_eq!(images.chain(&images.top).len(), CHAIN_MAX - 1);
    images.freeze(&fresh(&images)).unwrap();
}

/// What is frozen for a move has to be merged where it comes to.
#[test]
fn a_disk_with_the_longest_chain_is_not_moved() {
    let mut images = one();
    while images.chain(&images.top).len() < CHAIN_MAX - 1 {
        images.must_have_room_to_move().unwrap();
        images = take(&images, &format!("s{}", images.next)).unwrap();
    }
    let refused = images.must_have_room_to_move().unwrap_err();
    assert!(refused.contains("delete some snapshots"), "{refused}");
}

#[test]
fn a_snapshot_counts_as_quiesced_only_once_that_is_said_of_it() {
    let images = take(&take(&one(), "first").unwrap(), "second").unwrap();
    let said = images.taken(&named("second"), true);
    let quiesced = |name| said.snapshot(&named(name)).unwrap().quiesced;
    assert_eq!((quiesced("first"), quiesced("second")), (false, true));
}

/// Logs of a move that failed, whose names are those of the new image.
#[test]
fn what_lies_over_the_own_image_comes_down_into_it_first() {
    let mut images = one();
    for number in 1..=3 {
        let name = files::delta("new.raw.moving-1", number);
        let id = format!("{number:032x}");
        let elsewhere = Some("/srv/fast".to_owned());
        images = images
            .freeze(&Fresh {
                name,
                id,
                elsewhere,
            })
            .unwrap();
    }
    let down = Tidying::Down {
        image: "root.raw".to_owned(),
        above: "new.raw.moving-1.d1".to_owned(),
    };
    assert_eq!(images.unneeded(|_| 0), Some(down));
}

/// The same of a linked disk, whose lowest delta is as good a place for content as any log.
#[test]
fn logs_of_a_linked_disk_come_down_into_what_lies_beside_it_however_much_that_holds() {
    let id = "9".repeat(32);
    let common = Common {
        path: "/srv/golden/base.raw",
        id: &id,
    };
    let own = Fresh {
        name: "root.raw.d1".to_owned(),
        id: "7".repeat(32),
        elsewhere: None,
    };
    let mut images = Images::linked(common, 1 << 30, &"5".repeat(32), &own).unwrap();
    for number in 1..=2 {
        let log = Fresh {
            // Before the disk's own by name, or behind it.
            name: files::delta(["new.raw", "web.raw"][number as usize - 1], number),
            id: format!("{number:032x}"),
            elsewhere: Some("/srv/fast".to_owned()),
        };
        images = images.freeze(&log).unwrap();
    }
    let mut steps = 0;
    while let Some(tidying) = images.unneeded(|_| 0) {
        let is_first = steps == 0;
        let down = Tidying::Down {
            image: "root.raw.d1".to_owned(),
            above: "new.raw.d1".to_owned(),
        };
        assert!(!is_first || tidying == down, "{tidying:?}");
        // The guest writes, and the top is frozen once.
        if steps == 1 {
            let fresh = fresh(&images);
            images = images.freeze(&fresh).unwrap();
        } else {
            images = images.tidied(&tidying);
        }
        let leaving: Vec<String> = images.leaving.keys().cloned().collect();
        images = images.without(&leaving);
        steps += 1;
        assert!(steps < 9, "{images:?}");
    }
    assert_eq!(images.top, "root.raw.d1");
    assert!(images.is_linked_only(), "{images:?}");
}
