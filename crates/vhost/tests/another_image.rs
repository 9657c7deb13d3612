//! A disk that goes on with another image while its guest works with it.

mod common;

use common::{Gate, LONG, Mirrored, Site, out, places, until, wait_until, without_room};
use godwit_blockio::{Access, Image};
use godwit_vhost::Error;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn a_guest_that_writes_all_the_while_finds_everything_on_the_image_that_its_disk_goes_on_with() {
    let bytes = 4 * MIB;
    let site = Site::new(bytes);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let mirrored = Mirrored::begin(&site, &disk, bytes);
    let mut wanted = vec![0; bytes as usize];
    let mut round = 0_u64;
    let mut write = |guest: &mut common::FrontEnd, wanted: &mut Vec<u8>| {
        round += 1;
        // Over region borders, too.
        let (sector, fill) = (round * 1201 % (bytes / 512 - 8), (round % 250) as u8 + 1);
        guest.submit(0, &site.write_of(0, sector, fill, 4096));
        guest.wait(0);
        assert_eq!(site.status(0), 0);
        wanted[(sector * 512) as usize..][..4096].fill(fill);
    };
    while !mirrored.course.is_synchronised() {
        write(&mut guest, &mut wanted);
    }
    for _ in 0..200 {
        write(&mut guest, &mut wanted);
    }
    let standing = mirrored.stand_equal(&disk);
    assert_eq!(std::fs::read(&mirrored.path).unwrap(), wanted);
    standing.switch(mirrored.image).unwrap();
    drop(standing);
    let before = site.content();
    assert_eq!(before, wanted);
    for _ in 0..50 {
        write(&mut guest, &mut wanted);
    }
    assert_eq!(std::fs::read(&mirrored.path).unwrap(), wanted);
    assert_eq!(site.content(), before, "nothing goes to the former image");
    guest.submit(1, &site.read_of(1, 8, 512));
    guest.wait(1);
    assert_eq!(site.data(1, 512), wanted[4096..4608]);
}

#[test]
fn a_disk_that_stands_still_takes_nothing_though_others_hold_and_release_it() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let standing = disk.stand_still(LONG).unwrap();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    disk.hold(LONG).unwrap();
    disk.release().unwrap();
    assert_eq!(disk.status().unwrap().unanswered, 0);
    assert_eq!(site.status(0), 77);
    drop(standing);
    guest.wait(0);
    assert_eq!(site.content()[0], 1);
}

#[test]
fn a_disk_without_room_goes_on_with_an_image_that_has_some() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_room(&site);
    let mirrored = Mirrored::begin(&site, &disk, MIB);
    let standing = mirrored.stand_equal(&disk);
    standing.switch(mirrored.image).unwrap();
    drop(standing);
    faults.fail_writes(0, Errno::NOSPC);
    guest.wait(0);
    assert_eq!(site.status(0), 0);
    assert_eq!(std::fs::read(&mirrored.path).unwrap()[0], 1);
    assert_eq!(site.content()[0], 0);
}

#[test]
fn an_image_of_another_size_is_refused_and_so_is_one_while_requests_are_taken() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let path = site.image.with_extension("other");
    let image = |bytes| {
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(bytes).unwrap();
        Image::open(&path, Access::ReadWrite, 512).unwrap()
    };
    let standing = disk.stand_still(LONG).unwrap();
    let refused = standing.switch(image(2 * MIB)).unwrap_err();
    assert!(
        refused.to_string().contains("has 2097152 bytes"),
        "{refused}"
    );
    // Without a mirror nobody knows what is on the other image.
    assert!(standing.switch(image(MIB)).is_err());
    drop(standing);
    let mirrored = Mirrored::begin(&site, &disk, MIB);
    let standing = disk.stand_still(LONG).unwrap();
    standing.switch(mirrored.image).unwrap();
}

#[test]
fn a_disk_whose_requests_take_too_long_does_not_stand_still_and_goes_on() {
    let site = Site::new(MIB);
    let gate = Gate::default();
    let disk = site.disk(gate.filters());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.under_way == 1);
    let refused = disk.stand_still(Duration::from_millis(20)).unwrap_err();
    assert!(
        matches!(refused, Error::Busy { under_way: 1, .. }),
        "{refused}"
    );
    gate.set_open(true);
    guest.wait(0);
    guest.submit(1, &site.write_of(1, 1, 1, 512));
    guest.wait(1);
    assert_eq!(site.status(1), 0);
}

#[test]
fn storage_that_hangs_while_a_disk_stands_still_holds_its_guest_no_longer_than_the_limit() {
    let site = Site::new(MIB);
    let gate = Gate::default();
    let disk = site.disk(gate.of_flushes());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    let (few, is_slow) = (Duration::from_millis(20), |refused: &Error| {
        matches!(refused, Error::NotDurable { .. })
    });
    let refused = disk.settle(few).unwrap_err();
    assert!(is_slow(&refused), "{refused}");
    gate.set_open(true);
    let standing = disk.stand_still(LONG).unwrap();
    gate.set_open(false);
    let refused = standing.settle(few).unwrap_err();
    assert!(is_slow(&refused), "{refused}");
    // Its thread waits for nothing.
    assert_eq!(disk.status().unwrap().under_way, 1);
    drop(standing);
    // The guest goes on with the former image though the storage still hangs.
    guest.submit(0, &site.write_of(1, 1, 2, 512));
    guest.wait(0);
    assert_eq!(site.status(1), 0);
    gate.set_open(true);
    let standing = disk.stand_still(LONG).unwrap();
    standing.settle(LONG).unwrap();
}

#[test]
fn a_mirror_whose_disk_was_served_anew_is_not_taken_for_equal() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mirrored = Mirrored::begin(&site, &disk, MIB);
    until(|| mirrored.is_equal());
    drop(disk);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert!(!mirrored.is_equal());
    let why = mirrored.course.failure().unwrap();
    assert!(why.contains("not mirrored"), "{why}");
}

#[test]
fn a_disk_that_is_being_copied_is_held_and_stands_still_though_there_is_more_to_copy() {
    let bytes = 512 * MIB;
    let site = Site::new(bytes);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let mirrored = Mirrored::begin(&site, &disk, bytes);
    disk.hold(LONG).unwrap();
    disk.release().unwrap();
    let standing = disk.stand_still(LONG).unwrap();
    drop(standing);
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!(site.status(0), 0);
    until(|| mirrored.is_equal());
    disk.take_lowest(LONG).unwrap();
    assert!(mirrored.course.failure().is_some());
}

/// A guest may change what it writes: whatever the disk has of it then, both images have the same.
#[test]
fn a_write_that_its_guest_changes_meanwhile_is_the_same_on_both_images() {
    // Each write has a place of its own: whichever differs is found.
    const LEN: u32 = 1 << 15;
    const WRITES: u64 = 512;
    let bytes = WRITES * u64::from(LEN);
    let site = Site::new(bytes);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let mirrored = Mirrored::begin(&site, &disk, bytes);
    until(|| mirrored.is_equal());
    let data = places(0).data;
    let (is_over, mut done) = (AtomicBool::new(false), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut fill = 0_u8;
            while !is_over.load(Ordering::Relaxed) {
                fill = fill.wrapping_add(1);
                site.write(data, &vec![fill; LEN as usize]);
            }
        });
        for place in 0..WRITES {
            let sector = place * u64::from(LEN) / 512;
            let parts = site.request(0, 1, sector, Some(out(data, LEN)));
            guest.submit(0, &parts);
            guest.wait(0);
            done += u32::from(site.status(0) == 0);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(u64::from(done), WRITES);
    let _standing = mirrored.stand_equal(&disk);
    assert!(site.content() == std::fs::read(&mirrored.path).unwrap());
}
