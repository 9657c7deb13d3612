//! What comes of a disk with snapshots: into which files, and what is left of them where it does not become the VM's.

use super::super::came::{Source, put_aside};
use super::*;
use crate::testing::{Site, migration};
use godwit_blockio::delta::{NewDelta, Opening, Outliving, create};
use godwit_blockio::stride_of;
use godwit_delta::{Id, Parent};
use godwit_guestmem::RamFile;
use godwit_qemu::user::User;
use godwit_snapshots::{Common, Fresh};
use godwit_types::Generation;
use godwit_types::migration::{DiskToMove, LinkedTo};
use godwit_types::snapshots::PARENT_MARK;
use godwit_types::vm::VmSpec;
use rustix::fs::{XattrFlags, fsetxattr};
use rustix::process::{getegid, geteuid};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

const BYTES: u64 = 4 << 20;

/// A disk that comes here, with snapshots or without.
fn begun(site: &Site, directory: &Path, layered: bool) -> Disks {
    begun_linked(site, directory, (layered, None))
}

/// The same of one that is announced to be linked to this.
fn begun_linked(
    site: &Site,
    directory: &Path,
    (layered, linked): (bool, Option<LinkedTo>),
) -> Disks {
    let path = directory.join("root.raw");
    let spec = VmSpec {
        hardware: Some(2),
        disks: vec![DiskSpec::new("root", path.to_str().unwrap())],
        ..VmSpec::placeholder(&site.config.vm)
    };
    let ram = RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
    let user = User {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
    };
    let disk = DiskToMove {
        name: "root".to_owned(),
        bytes: BYTES,
        used_bytes: 0,
        layered,
        linked,
    };
    let coming = MigrationSpec {
        disks: vec![disk],
        ..migration("m")
    };
    let (qemu, right) = ((user, 1), (None, Some(&coming)));
    let ram = Arc::new(ram);
    Disks::begin(&site.config, &site.paths, &spec, qemu, &ram, right).unwrap()
}

/// A raw image, and two deltas over it.
fn said(bytes: u64) -> String {
    let fresh = |number: u32| Fresh {
        name: format!("root.raw.d{number}"),
        id: format!("{number:032x}"),
        elsewhere: None,
    };
    let images = Images::of_one("root.raw", bytes, &"5".repeat(32));
    let images = images.freeze(&fresh(1)).unwrap();
    let images = images.freeze(&fresh(2)).unwrap();
    serde_json::to_string(&images).unwrap()
}

/// The file of the lower one of these, which is frozen and holds nothing.
fn frozen() -> Vec<u8> {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let descriptor = directory.path().join("root.raw.d1.vmdk");
    let parent = Parent {
        cid: 7,
        hint: "root.raw.vmdk".to_owned(),
    };
    let new = NewDelta {
        descriptor: &descriptor,
        bytes: BYTES,
        id: Id::of_digits(&format!("{:032x}", 1)).unwrap(),
        parent: &parent,
    };
    create(&new).unwrap();
    let opening = Opening {
        block_bytes: BLOCK,
        name: "test",
        patience: Duration::ZERO,
    };
    let outliving = Outliving {
        map: &directory.path().join("states"),
        boot: Id([9; 16]),
        no_guest_lives: true,
    };
    let path = directory.path().join("root.raw.d1-sesparse.vmdk");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut delta = Delta::top_of((file, &path), new.id, opening, outliving).unwrap();
    delta.freeze().unwrap();
    std::fs::read(path).unwrap()
}

fn files(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn what_comes_of_a_disk_with_snapshots_is_put_together_and_goes_as_a_whole_where_it_is_not_wanted()
{
    let site = Site::new();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let disks = begun(&site, directory.path(), true);
    let said = said(BYTES);
    for _ in 0..2 {
        disks.take_layers(0, Some(&said)).unwrap();
    }
    let filling = disks.filling();
    let below = filling[usize::from(BELOW)].get().unwrap();
    let mut number = 0;
    let mut apply = |to: &Arriving, at: u64, content: &[u8]| {
        number += 1;
        let range = at..at + content.len() as u64;
        to.apply(number, 1, &range, Some(content)).unwrap();
    };
    apply(below, 4096, &[7; 512]);
    for (piece, content) in frozen().chunks(1 << 20).enumerate() {
        apply(below, stride_of(BYTES) + ((piece as u64) << 20), content);
    }
    let early = disks.are_whole(Generation(2)).unwrap_err().message;
    assert!(early.contains("not all of its images"), "{early}");
    for _ in 0..2 {
        disks.take_layers(0, None).unwrap();
    }
    let top = filling[0].get().unwrap();
    apply(top, 4096 + 512, &[8; 512]);
    top.sync().unwrap();
    // Somebody takes the disk's own image away, and puts it back.
    let own = directory.path().join("root.raw.arriving-m");
    let away = directory.path().join("away");
    std::fs::rename(&own, &away).unwrap();
    std::fs::copy(&away, &own).unwrap();
    let another = disks.are_whole(Generation(2)).unwrap_err().message;
    assert!(another.contains("is not the image any more"), "{another}");
    std::fs::rename(&away, &own).unwrap();
    for _ in 0..2 {
        disks.are_whole(Generation(2)).unwrap();
    }
    let made = [
        "root.raw.arriving-m",
        "root.raw.d1-sesparse.vmdk",
        "root.raw.d2-sesparse.vmdk",
        "root.raw.images",
    ];
    assert_eq!(files(directory.path()), made);
    let extent = File::open(directory.path().join(made[2])).unwrap();
    let mut grain = [0; 4096];
    let at = Layout::of(BYTES).unwrap().data_at() + 4096;
    extent.read_exact_at(&mut grain, at).unwrap();
    assert_eq!((grain[0], grain[512], grain[1024]), (7, 8, 0));
    disks.end();
    drop(put_aside(&site.paths, Source::HasDisks, None));
    assert!(
        files(directory.path()).is_empty(),
        "{:?}",
        files(directory.path())
    );
}

#[test]
fn what_was_not_announced_or_is_said_otherwise_later_is_refused() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let site = Site::new();
    let disks = begun(&site, directory.path(), false);
    let refused = disks.take_layers(0, Some(&said(BYTES))).unwrap_err();
    assert!(refused.contains("without snapshots"), "{refused}");
    assert!(disks.take_layers(3, Some(&said(BYTES))).is_err());
    disks.end();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let site = Site::new();
    let disks = begun(&site, directory.path(), true);
    let refused = disks.take_layers(0, Some(&said(BYTES / 2))).unwrap_err();
    assert!(refused.contains("said 4194304 before"), "{refused}");
    assert!(disks.take_layers(0, Some("{}")).is_err());
    assert!(disks.take_layers(0, None).is_err());
    disks.take_layers(0, Some(&said(BYTES))).unwrap();
    let other = said(BYTES).replace(&"5".repeat(32), &"6".repeat(32));
    let refused = disks.take_layers(0, Some(&other)).unwrap_err();
    assert!(refused.contains("something else now"), "{refused}");
    disks.end();
}

#[test]
fn a_source_names_no_image_of_which_the_migration_was_not_told() {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let base = directory.path().join("base.raw");
    let image = File::create(&base).unwrap();
    image.set_len(BYTES).unwrap();
    let number = "9".repeat(32);
    fsetxattr(&image, PARENT_MARK, number.as_bytes(), XattrFlags::empty()).unwrap();
    let disks = begun(&site, directory.path(), true);
    let refused = disks.take_layers(0, Some(&said_linked(&base))).unwrap_err();
    assert!(refused.contains("was not told"), "{refused}");
    disks.end();
}

#[test]
fn a_source_that_says_that_its_disks_are_huge_takes_no_memory_here() {
    let images = |tib: u64| {
        let said = said(tib << 40);
        serde_json::from_str::<Images>(&said).unwrap()
    };
    // Two images lie over the first.
    let (fits, half) = (images(8), images(4));
    assert!(must_have_memory(&fits, [&fits].into_iter()).is_ok());
    assert!(must_have_memory(&half, [&fits, &half].into_iter()).is_ok());
    assert!(must_have_memory(&images(9), std::iter::empty()).is_err());
    let why = must_have_memory(&half, [&fits, &fits].into_iter()).unwrap_err();
    assert!(why.contains("512 MiB of memory, 2560 with"), "{why}");
}

#[test]
fn what_others_put_beside_a_disk_is_read_within_bounds() {
    let (site, directory) = (Site::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let disks = begun(&site, directory.path(), false);
    let at = |name: &str| directory.path().join(name);
    let what = disks.0.what();
    let all = disks.0.all();
    let place = all.place(&what.disks[0]);
    std::fs::write(at("root.raw.d1099511627770-sesparse.vmdk"), "").unwrap();
    std::fs::write(at("root.raw.d+7-sesparse.vmdk"), "").unwrap();
    assert_eq!(place.first_number(), Ok(1));
    let images = Images::of_one("root.raw", BYTES, &"6".repeat(32));
    place.must_be_the_latest(&images).unwrap();
    // A name of a MiB is none.
    let long = said(BYTES).replace("root.raw.d2", &"d".repeat(1 << 20));
    std::fs::write(at("root.raw.kept-l.images"), long).unwrap();
    assert!(place.kept_names().is_err());
    std::fs::remove_file(at("root.raw.kept-l.images")).unwrap();
    for number in 0..=1024 {
        let name = format!("root.raw.kept-{number}.images");
        std::fs::write(at(&name), said(BYTES)).unwrap();
    }
    let why = place.kept_names().unwrap_err();
    assert!(why.contains("more than 1024"), "{why}");
    std::fs::remove_file(at("root.raw.kept-7.images")).unwrap();
    assert_eq!(place.kept_names().unwrap().len(), 3);
    disks.end();
}

/// What a disk consists of that is linked to this image.
fn said_linked(base: &Path) -> String {
    let fresh = |number: u32| Fresh {
        name: format!("root.raw.d{number}"),
        id: format!("{number:032x}"),
        elsewhere: None,
    };
    let common = Common {
        path: base.to_str().unwrap(),
        id: &"9".repeat(32),
    };
    let images = Images::linked(common, BYTES, &"5".repeat(32), &fresh(1)).unwrap();
    let images = images.freeze(&fresh(2)).unwrap();
    serde_json::to_string(&images).unwrap()
}

#[test]
fn a_linked_disk_comes_over_the_very_image_that_it_was_linked_to_and_over_no_other() {
    let site = Site::new();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let base = directory.path().join("base.raw");
    let linked = LinkedTo {
        path: base.to_str().unwrap().to_owned(),
        id: "9".repeat(32),
        used_bytes: 0,
        has_snapshots: false,
    };
    let disks = begun_linked(&site, directory.path(), (true, Some(linked)));
    let said = said_linked(&base);
    let refused = |told: &str| {
        let why = disks.take_layers(0, Some(&said)).unwrap_err();
        assert!(why.contains(told), "{why}");
        let made = ["base.raw", "root.raw.arriving-m"].map(str::to_owned);
        let found = files(directory.path());
        assert!(found.iter().all(|name| made.contains(name)), "{found:?}");
    };
    refused("which is not opened");
    let image = File::create(&base).unwrap();
    image.set_len(BYTES).unwrap();
    refused("what is there now is another one");
    let mark = |number: &str| {
        let number = number.repeat(32);
        fsetxattr(&image, PARENT_MARK, number.as_bytes(), XattrFlags::empty()).unwrap();
    };
    mark("8");
    refused("what is there now is another one");
    mark("9");
    image.set_len(2 * BYTES).unwrap();
    refused("had 4194304 when it was linked");
    image.set_len(BYTES).unwrap();
    image.write_all_at(&[6; 4096], 4096).unwrap();
    disks.take_layers(0, Some(&said)).unwrap();
    let filling = disks.filling();
    let below = filling[usize::from(BELOW)].get().unwrap();
    for (number, content) in (1..).zip(frozen().chunks(1 << 20)) {
        let at = stride_of(BYTES) + ((number - 1) << 20);
        let range = at..at + content.len() as u64;
        below.apply(number, 1, &range, Some(content)).unwrap();
    }
    disks.take_layers(0, None).unwrap();
    // The rest of a piece that is written in part is the image's to which it is linked.
    let top = filling[0].get().unwrap();
    top.apply(9, 1, &(4096 + 512..4096 + 1024), Some(&[8; 512]))
        .unwrap();
    top.sync().unwrap();
    disks.are_whole(Generation(2)).unwrap();
    let extent = File::open(directory.path().join("root.raw.d2-sesparse.vmdk")).unwrap();
    let mut grain = [0; 4096];
    let at = Layout::of(BYTES).unwrap().data_at() + 4096;
    extent.read_exact_at(&mut grain, at).unwrap();
    assert_eq!((grain[0], grain[512], grain[1024]), (6, 8, 6));
    disks.end();
    drop(put_aside(&site.paths, Source::HasDisks, None));
    assert_eq!(files(directory.path()), ["base.raw"]);
}

#[test]
fn nothing_of_what_came_is_given_up_before_the_migration_has_let_go_of_it() {
    let site = Site::new();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let disks = begun(&site, directory.path(), true);
    let (served, channels) = (&disks.0, disks.filling());
    assert!(served.still_comes());
    served.amend(|what| {
        let arrival = what.arriving.as_mut().unwrap();
        arrival.is_here = true;
    });
    served.keep_arrived().unwrap();
    assert!(served.still_comes(), "its locks are the channels', too");
    drop(channels);
    assert!(!served.still_comes());
    disks.end();
}

#[test]
fn what_disks_consist_of_is_noted_no_more_once_their_migration_is_over_and_they_stay() {
    let site = Site::new();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let disks = begun(&site, directory.path(), true);
    let parts = Parts {
        mark: "5".repeat(32),
        files: Vec::new(),
    };
    let change = |what: &mut super::super::served::ServedDisks| {
        what.leaving = Some(migration("m").id);
        what.leaving_parts = BTreeMap::from([("root".to_owned(), parts.clone())]);
    };
    disks.0.change(change).unwrap();
    disks.forget_leaving_parts(&migration("another").id);
    assert!(!disks.0.what().leaving_parts.is_empty());
    disks.forget_leaving_parts(&migration("m").id);
    assert!(disks.0.what().leaving_parts.is_empty());
    disks.end();
}

#[test]
fn what_is_kept_beside_a_disk_has_its_empty_deltas_after_the_next_snapshot_too() {
    let site = Site::new();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let disks = begun(&site, directory.path(), false);
    let at = |name: &str| directory.path().join(name);
    let parent = Parent {
        cid: 7,
        hint: "root.raw.vmdk".to_owned(),
    };
    for number in 1..=3_u8 {
        let new = NewDelta {
            descriptor: &at(&format!("root.raw.d{number}.vmdk")),
            bytes: BYTES,
            id: Id([number; 16]),
            parent: &parent,
        };
        create(&new).unwrap();
    }
    // It names the first two.
    std::fs::write(at("root.raw.kept-l.images"), said(BYTES)).unwrap();
    let what = disks.0.what();
    let all = disks.0.all();
    let place = all.place(&what.disks[0]);
    let images = Images::of_one("root.raw", BYTES, &"6".repeat(32));
    let is_there = |number: u8| at(&format!("root.raw.d{number}-sesparse.vmdk")).exists();
    std::fs::write(at("root.raw.kept-m.images"), "{").unwrap();
    place.remove_unnamed(&images);
    assert!(is_there(3), "it may belong to what is kept");
    std::fs::remove_file(at("root.raw.kept-m.images")).unwrap();
    place.remove_unnamed(&images);
    let there: Vec<bool> = (1..=3).map(is_there).collect();
    assert_eq!(there, [true, true, false]);
    disks.end();
}
