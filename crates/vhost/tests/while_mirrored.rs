//! What a guest and its front end may do while a disk is mirrored: both images are equal afterwards, and nothing is lost.

mod common;

use common::{Chance, DISCARD, FrontEnd, Gate, LONG, Mirrored, Site, Unconfirmed};
use common::{WRITE_ZEROES, until, wait_until};
use godwit_vhost::Disk;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;
/// A sector of another region than the first, which is not copied again for what is written there.
const ELSEWHERE: u64 = 10 * 1024;
/// Whoever ends a queue waits no longer.
const END_WITHIN: Duration = Duration::from_secs(1);

/// A disk that holds something everywhere.
fn filled(bytes: u64) -> (Site, Disk) {
    let site = Site::new(bytes);
    let file = std::fs::File::options().write(true).open(&site.image);
    let content = vec![255; bytes as usize];
    file.unwrap().write_all_at(&content, 0).unwrap();
    let disk = site.disk(Vec::new());
    (site, disk)
}

/// It is mirrored for half a second at least before both are equal.
fn slowly(site: &Site, disk: &Disk, bytes: u64) -> Mirrored {
    let pace = Some(2.0 * bytes as f64);
    Mirrored::begin_by((site, disk, bytes), pace, |outlet| outlet)
}

/// Both are equal once the disk stands still; returns what they hold.
fn equal(site: &Site, disk: &Disk, mirrored: &Mirrored) -> Vec<u8> {
    let _standing = mirrored.stand_equal(disk);
    let content = site.content();
    assert!(content == std::fs::read(&mirrored.path).unwrap());
    content
}

/// What a sector holds, which is one byte all over.
fn fill_of(content: &[u8], sector: u64) -> u8 {
    let sector = &content[(sector * SECTOR) as usize..][..SECTOR as usize];
    assert!(sector.iter().all(|byte| *byte == sector[0]), "it is torn");
    sector[0]
}

#[test]
fn what_is_made_zero_or_discarded_while_a_disk_is_mirrored_is_so_on_both_images() {
    let bytes = 16 * MIB;
    let (site, disk) = filled(bytes);
    let mut guest = site.guest();
    let mut chance = Chance(1);
    let mirrored = slowly(&site, &disk, bytes);
    // What is discarded may be anything until it is written.
    let mut wanted = vec![Some(255); (bytes / SECTOR) as usize];
    let mut counts = [0; 3];
    let (mut before, mut after) = (0, 0);
    while after < 400 || counts.iter().any(|count| *count < 100) {
        match mirrored.course.is_synchronised() {
            true => after += 1,
            false => before += 1,
        }
        let kind = chance.below(3) as usize;
        counts[kind] += 1;
        let most = if kind == 2 { 24 } else { 4096 };
        // Up to a border of regions often, and over it.
        let sectors = 1 + chance.below(most);
        let start = match chance.below(4) {
            0 => (3 + chance.below(bytes / MIB - 4)) * 2048 - chance.below(sectors + 1),
            _ => chance.below(bytes / SECTOR - sectors),
        };
        let start = start.min(bytes / SECTOR - sectors);
        let fill = 1 + chance.below(250) as u8;
        let (parts, now) = match kind {
            0 => {
                let parts = site.erase_of(0, WRITE_ZEROES, start, sectors as u32);
                (parts, Some(0))
            }
            1 => (site.erase_of(0, DISCARD, start, sectors as u32), None),
            _ => {
                let len = (sectors * SECTOR) as u32;
                (site.write_of(0, start, fill, len), Some(fill))
            }
        };
        let queue = chance.below(2) as usize;
        guest.submit(queue, &parts);
        guest.wait(queue);
        assert_eq!(site.status(0), 0);
        wanted[start as usize..(start + sectors) as usize].fill(now);
    }
    let content = equal(&site, &disk, &mirrored);
    for (sector, wanted) in (0..).zip(&wanted) {
        let found = fill_of(&content, sector);
        assert!(wanted.is_none_or(|wanted| wanted == found), "{sector}");
    }
    assert!(wanted.contains(&Some(0)) && wanted.contains(&None));
    println!("{before} before both were equal, {after} after");
    assert!(before > 20, "{before}");
}

/// Writes over each other from both queues at once: what is on the disk then is one of those that wrote there.
fn write_over_each_other(site: &Site, guest: &mut FrontEnd, chance: &mut Chance, round: u64) {
    let file = std::fs::File::open(&site.image).unwrap();
    let near = chance.below(file.metadata().unwrap().len() / SECTOR - 64);
    let mut before = vec![0; 64 * SECTOR as usize];
    file.read_exact_at(&mut before, near * SECTOR).unwrap();
    let mut may_be: Vec<Vec<u8>> = vec![Vec::new(); 64];
    for number in 0..8 {
        let (start, sectors) = (chance.below(40), 1 + chance.below(24));
        let fill = 1 + ((round * 8 + number) % 250) as u8;
        let parts = site.write_of(number, near + start, fill, (sectors * SECTOR) as u32);
        let queue = (number % 2) as usize;
        let head = guest.chain(queue, &parts);
        guest.make_available(queue, head);
        for sector in start..start + sectors {
            may_be[sector as usize].push(fill);
        }
    }
    guest.kick(0);
    guest.kick(1);
    for number in 0..8 {
        guest.wait(number % 2);
    }
    assert!((0..8).all(|number| site.status(number) == 0));
    let mut after = vec![0; 64 * SECTOR as usize];
    file.read_exact_at(&mut after, near * SECTOR).unwrap();
    for (sector, may_be) in (0..).zip(&may_be) {
        let found = fill_of(&after, sector);
        let is_right = match may_be.is_empty() {
            true => found == fill_of(&before, sector),
            false => may_be.contains(&found),
        };
        assert!(is_right, "round {round}: {found} is none of {may_be:?}");
    }
}

#[test]
fn writes_over_each_other_from_two_queues_leave_the_same_on_both_images() {
    let bytes = 16 * MIB;
    let (site, disk) = filled(bytes);
    let mut guest = site.guest();
    let mirrored = slowly(&site, &disk, bytes);
    let (mut chance, mut round, mut equal_rounds) = (Chance(2), 0, 0);
    while equal_rounds < 300 {
        write_over_each_other(&site, &mut guest, &mut chance, round);
        round += 1;
        if mirrored.is_equal() {
            equal_rounds += 1;
        }
        if mirrored.is_equal() && equal_rounds % 50 == 0 {
            equal(&site, &disk, &mirrored);
        }
    }
    println!("{round} rounds, of them {equal_rounds} while both were equal");
    assert!(round > equal_rounds + 20, "{round}");
    equal(&site, &disk, &mirrored);
}

/// Ends both queues, each of which QEMU hears of soon.
fn end_all(guest: &mut FrontEnd) {
    for queue in [0, 1] {
        let began = Instant::now();
        guest.end_queue(queue);
        let took = began.elapsed();
        assert!(took < END_WITHIN, "queue {queue} took {took:?} to end");
    }
}

#[test]
fn a_guest_that_resets_a_mirrored_disk_under_load_loses_nothing_that_it_was_told() {
    let bytes = 8 * MIB;
    let (site, disk) = filled(bytes);
    let mirrored = Mirrored::begin(&site, &disk, bytes);
    let mut guest = site.guest();
    let fills_of = |content: &[u8]| -> Vec<u8> {
        (0..60 * 8).map(|sector| fill_of(content, sector)).collect()
    };
    let mut wanted = vec![255; 60 * 8];
    let (mut told, mut taken_back) = (0, 0);
    for round in 0..60_u64 {
        for number in 0..8 {
            let (sector, fill) = (round * 8 + number, round as u8 + 1);
            guest.submit(
                (number % 2) as usize,
                &site.write_of(number, sector, fill, 512),
            );
        }
        end_all(&mut guest);
        let content = site.content();
        for number in 0..8 {
            // What stayed in the ring goes with it.
            if site.status(number) == 0 {
                told += 1;
                wanted[(round * 8 + number) as usize] = round as u8 + 1;
            } else {
                taken_back += 1;
                assert_eq!(site.status(number), 77);
            }
        }
        assert_eq!(fills_of(&content), wanted, "round {round}");
        guest = guest.reset(&site);
        guest.start();
    }
    println!("{told} were answered, {taken_back} stayed in their rings");
    until(|| mirrored.is_equal());
    assert_eq!(fills_of(&equal(&site, &disk, &mirrored)), wanted);
}

/// A disk whose second image was equal and tells of nothing from now on, and 16 writes that wait for it.
fn unconfirmed(site: &Site, disk: &Disk, guest: &mut FrontEnd, gate: &Gate) -> Mirrored {
    gate.set_open(true);
    let by = |outlet| Unconfirmed::over(outlet, gate);
    let mirrored = Mirrored::begin_by((site, disk, 8 * MIB), None, by);
    until(|| mirrored.is_equal());
    gate.set_open(false);
    for number in 0..16 {
        let (queue, fill) = ((number % 2) as usize, number as u8 + 1);
        guest.submit(queue, &site.write_of(number, number * 8, fill, 512));
    }
    wait_until(disk, |status| status.under_way == 16);
    assert!((0..16).all(|number| site.status(number) == 77));
    mirrored
}

/// The writes of [`unconfirmed`] are on both images, and so is what follows, once the second one tells again.
fn all_is_there(site: &Site, disk: &Disk, gate: &Gate, guest: &mut FrontEnd, mirrored: &Mirrored) {
    guest.submit(0, &site.write_of(20, ELSEWHERE, 99, 512));
    guest.wait(0);
    assert_eq!(site.status(20), 0, "nobody waits for it now");
    assert!(!mirrored.course.is_synchronised());
    gate.set_open(true);
    until(|| mirrored.is_equal());
    let content = equal(site, disk, mirrored);
    for number in 0..16 {
        assert_eq!(fill_of(&content, number * 8), number as u8 + 1);
    }
    assert_eq!(fill_of(&content, ELSEWHERE), 99);
}

#[test]
fn a_reset_waits_no_longer_than_a_second_for_a_destination_that_is_slow() {
    let (site, disk) = filled(8 * MIB);
    let (gate, mut guest) = (Gate::default(), site.guest());
    let mirrored = unconfirmed(&site, &disk, &mut guest, &gate);
    end_all(&mut guest);
    assert!((0..16).all(|number| site.status(number) == 0));
    let mut guest = guest.reset(&site);
    guest.start();
    all_is_there(&site, &disk, &gate, &mut guest, &mirrored);
}

#[test]
fn a_front_end_that_vanishes_while_a_destination_is_slow_finds_everything_done_once() {
    let (site, disk) = filled(8 * MIB);
    let (gate, mut guest) = (Gate::default(), site.guest());
    let mirrored = unconfirmed(&site, &disk, &mut guest, &gate);
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    for number in 0..16 {
        guest.wait(number % 2);
    }
    assert_eq!([guest.answered(0), guest.answered(1)], [None, None]);
    assert!((0..16).all(|number| site.status(number) == 0));
    assert_eq!(disk.status().unwrap().resubmitted, 16);
    all_is_there(&site, &disk, &gate, &mut guest, &mirrored);
}

#[test]
fn a_front_end_that_vanishes_again_and_again_leaves_both_images_equal() {
    let bytes = 8 * MIB;
    let (site, disk) = filled(bytes);
    let mut guest = site.guest();
    let mirrored = Mirrored::begin(&site, &disk, bytes);
    for round in 0..60_u64 {
        let fill = (round % 250) as u8 + 1;
        for number in 0..8 {
            let queue = (number % 2) as usize;
            guest.submit(queue, &site.write_of(number, number * 2044, fill, 4096));
        }
        guest.connect_again(&site.socket);
        guest.negotiate(0);
        guest.start();
        for number in 0..8 {
            guest.wait(number % 2);
        }
        assert_eq!([guest.answered(0), guest.answered(1)], [None, None]);
        assert!((0..8).all(|number| site.status(number) == 0));
        let content = site.content();
        for sector in (0..8).flat_map(|number| number * 2044..number * 2044 + 8) {
            assert_eq!(fill_of(&content, sector), fill, "round {round}: {sector}");
        }
    }
    // And one that does not come again.
    for number in 0..8 {
        let queue = (number % 2) as usize;
        guest.submit(queue, &site.write_of(number, number * 2044, 251, 4096));
    }
    guest.hang_up();
    wait_until(&disk, |status| !status.connected && status.under_way == 0);
    disk.hold(LONG).unwrap();
    equal(&site, &disk, &mirrored);
}
