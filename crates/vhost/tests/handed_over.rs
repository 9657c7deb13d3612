//! A disk that goes on in another program over its front end's connection: no request is lost, none is done twice, and what comes
//! of a program that lies is refused.

mod common;

use common::{Chance, Gate, LONG, Site, wait_until, without_room, without_room_for};
use godwit_blockio::{Access, Image, Waits};
use godwit_vhost::{Disk, Handover, Settings, Told};
use std::os::fd::OwnedFd;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const FLUSH: u32 = 4;

fn crossed(handed: Handover) -> (String, Vec<OwnedFd>) {
    let (told, fds) = handed.into_parts();
    (serde_json::to_string(&told).unwrap(), fds)
}

fn arrived((told, fds): (String, Vec<OwnedFd>)) -> Handover {
    Handover::of(serde_json::from_str(&told).unwrap(), fds)
}

fn goes_on(site: &Site, handed: Handover) -> Disk {
    let mut image = Image::open(&site.image, Access::ReadWrite, 512).unwrap();
    image.lock("root", LONG).unwrap();
    Disk::start(Settings {
        name: "root".to_owned(),
        socket: site.socket.clone(),
        owner: None,
        image,
        geometry: site.geometry(),
        filters: Vec::new(),
        ram: Arc::clone(&site.ram),
        has_image: true,
        waits: Waits {
            for_room: true,
            for_storage: false,
        },
        handed: Some(handed),
        deltas: Vec::new(),
    })
    .unwrap()
}

/// The same disk in the hands of the next program.
fn handed_on(site: &Site, disk: Disk) -> Disk {
    let standing = disk.stand_still(LONG).unwrap();
    let handed = crossed(standing.hand_over().unwrap());
    standing.end();
    drop(disk);
    goes_on(site, arrived(handed))
}

#[test]
fn a_guest_under_load_does_not_notice_that_its_disk_goes_on_in_another_program() {
    let site = Site::new(MIB);
    let mut disk = site.disk(Vec::new());
    let mut guest = site.guest();
    for round in 0..30u64 {
        for number in 0..8 {
            let fill = (round * 8 + number) as u8;
            guest.submit(
                (number % 2) as usize,
                &site.write_of(number, number, fill, 512),
            );
        }
        disk = handed_on(&site, disk);
        for number in 0..8 {
            guest.wait((number % 2) as usize);
        }
        for number in 0..8 {
            let (status, content) = (site.status(number), site.content()[number as usize * 512]);
            assert_eq!((status, content), (0, (round * 8 + number) as u8));
        }
        let status = disk.status().unwrap();
        assert_eq!(
            (status.life, status.connected),
            (0, true),
            "the same connection"
        );
        assert!(!site.socket.exists(), "nobody else is heard");
    }
    assert_eq!([guest.answered(0), guest.answered(1)], [None, None]);
}

#[test]
fn what_is_said_and_asked_between_two_programs_is_for_the_later() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    let standing = disk.stand_still(LONG).unwrap();
    let handed = crossed(standing.hand_over().unwrap());
    guest.submit(0, &site.write_of(1, 1, 2, 512));
    guest.send(11, &common::pair(1, 0), &[]);
    // It answers whoever asks it, and hears nothing of this.
    assert_eq!(disk.status().unwrap().unanswered, 0);
    standing.end();
    drop(disk);
    let disk = goes_on(&site, arrived(handed));
    guest.wait(0);
    assert_eq!((site.status(1), site.content()[512]), (0, 2));
    let (base, _) = guest.answer(11).expect("the second queue's end");
    assert_eq!(base, common::pair(1, 0));
    assert_eq!(disk.status().unwrap().running, 1);
}

#[test]
fn a_disk_with_which_nobody_goes_on_goes_on_itself() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    for round in 0..3u8 {
        let standing = disk.stand_still(LONG).unwrap();
        let handed = standing.hand_over().unwrap();
        guest.submit(0, &site.write_of(0, 0, round, 512));
        guest.send(1, &[], &[]);
        drop(handed);
        drop(standing);
        guest.wait(0);
        guest.answer(1).expect("it is heard again");
        assert_eq!((site.status(0), site.content()[0]), (0, round));
    }
}

#[test]
fn a_program_that_ends_with_what_it_was_handed_leaves_the_front_end_to_connect_again() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let standing = disk.stand_still(LONG).unwrap();
    let handed = crossed(standing.hand_over().unwrap());
    guest.submit(0, &site.write_of(0, 0, 9, 512));
    standing.end();
    drop(disk);
    drop(handed);
    assert!(guest.ask(1, &[]).is_none(), "its connection is closed");
    let _disk = site.disk(Vec::new());
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 9));
}

#[test]
fn a_write_that_waits_for_room_is_carried_out_by_the_next_program() {
    let site = Site::new(MIB);
    let (disk, mut guest, _faults) = without_room(&site);
    let disk = handed_on(&site, disk);
    guest.wait(0);
    assert_eq!(guest.answered(0), None);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
    assert_eq!(disk.status().unwrap().resubmitted, 1);
}

#[test]
fn a_sync_that_failed_unheard_is_heard_of_from_the_next_program() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let standing = disk.stand_still(LONG).unwrap();
    let (told, fds) = crossed(standing.hand_over().unwrap());
    standing.end();
    drop(disk);
    let mut told: serde_json::Value = serde_json::from_str(&told).unwrap();
    told["lost_sync"] = true.into();
    let disk = goes_on(&site, arrived((told.to_string(), fds)));
    // Nor did the guest hear of it from that one.
    let _disk = handed_on(&site, disk);
    let statuses = [0, 1].map(|number| {
        guest.submit(0, &site.request(number, FLUSH, 0, None));
        guest.wait(0);
        site.status(number)
    });
    assert_eq!(statuses, [1, 0], "an error, once");
}

#[test]
fn a_disk_with_requests_under_way_does_not_come_to_rest_and_so_is_not_handed_over() {
    let site = Site::new(MIB);
    let gate = Gate::default();
    let disk = site.disk(gate.filters());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.under_way == 1);
    assert!(disk.stand_still(std::time::Duration::ZERO).is_err());
    gate.set_open(true);
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
}

/// Why a disk that stands still is not handed over; it goes on itself.
fn refused(disk: &Disk) -> Option<String> {
    let standing = disk.stand_still(LONG).unwrap();
    standing.hand_over().err().map(|why| why.to_string())
}

#[test]
fn a_disk_whose_front_end_is_gone_is_not_handed_over() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    guest.hang_up();
    wait_until(&disk, |status| !status.connected);
    let why = refused(&disk).expect("there is nothing to hand over");
    assert!(why.contains("QEMU is not connected to it"), "{why}");
    connect_again(&site, &mut guest);
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
}

#[test]
fn a_disk_that_has_heard_half_a_sentence_is_not_handed_over_and_hears_the_rest() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    // The end of the second queue.
    let body = common::pair(1, 0);
    guest.send_header(11, body.len() as u32);
    let until = std::time::Instant::now() + LONG;
    let why = loop {
        // Before it has heard that it is handed over, and goes on itself.
        if let Some(why) = refused(&disk) {
            break why;
        }
        assert!(std::time::Instant::now() < until, "it does not hear it");
    };
    assert!(why.contains("QEMU is just speaking with it"), "{why}");
    guest.send_body(&body);
    let (base, _) = guest.answer(11).expect("the second queue's end");
    assert_eq!(base, body);
    handed_on(&site, disk);
}

#[test]
fn a_disk_with_unanswered_requests_of_which_nothing_tells_is_not_handed_over() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_room_for(&site, Site::guest_without_inflight);
    let why = refused(&disk).expect("a request would be forgotten");
    let told = "nothing says which of its requests are unanswered";
    assert!(why.contains(told), "{why}");
    faults.fail_writes(0, rustix::io::Errno::NOSPC);
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
    handed_on(&site, disk);
}

#[test]
fn whatever_a_program_says_that_it_hands_over_the_disk_is_served() {
    let site = Site::new(MIB);
    let mut disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let mut chance = Chance(3);
    let mut refused = 0;
    for _ in 0..300 {
        let standing = disk.stand_still(LONG).unwrap();
        let Ok(handed) = standing.hand_over() else {
            panic!("it is connected");
        };
        let (told, mut fds) = crossed(handed);
        standing.end();
        drop(disk);
        let lie = lied(&told, &mut fds, &mut chance);
        let Ok(told) = serde_json::from_str::<Told>(&lie) else {
            // Whoever cannot read it takes nothing.
            drop(fds);
            disk = site.disk(Vec::new());
            connect_again(&site, &mut guest);
            continue;
        };
        disk = goes_on(&site, Handover::of(told, fds));
        refused += u64::from(!disk.status().unwrap().connected);
        drop(disk);
        disk = site.disk(Vec::new());
        connect_again(&site, &mut guest);
    }
    assert!(refused > 50, "{refused}");
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
}

fn connect_again(site: &Site, guest: &mut common::FrontEnd) {
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
}

/// With another number somewhere, or other descriptors.
fn lied(told: &str, fds: &mut Vec<OwnedFd>, chance: &mut Chance) -> String {
    let digits: Vec<usize> = told
        .char_indices()
        .filter(|(_, letter)| letter.is_ascii_digit())
        .map(|(at, _)| at)
        .collect();
    let mut lie = told.to_owned();
    match chance.below(4) {
        0 => {
            let at = chance.below(fds.len() as u64) as usize;
            fds.remove(at);
        }
        1 => fds.push(std::fs::File::open("/dev/null").unwrap().into()),
        2 => {
            let at = chance.below(fds.len() as u64) as usize;
            fds.swap(0, at);
            fds.reverse();
        }
        _ => {
            let at = digits[chance.below(digits.len() as u64) as usize];
            let others = ["0", "9", "65535", "4294967295"];
            let other = others[chance.below(4) as usize];
            lie.replace_range(at..=at, other);
        }
    }
    lie
}
