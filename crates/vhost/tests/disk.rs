//! What a guest does with a disk, and what is in the image then.

mod common;

use common::{GUEST, Gate, LONG, Site, into, out, pair, places, until, wait_until};
use godwit_blockio::filters::{Fault, Limits, Throttle};
use godwit_blockio::{Filter, Outcome, Request};
use godwit_guestmem::{PageSet, RamFile};
use godwit_vhost::Error;
use godwit_vhost::block::Geometry;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

#[test]
fn a_guest_writes_reads_flushes_and_erases() {
    let site = Site::new(4 * MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let head = guest.submit(0, &site.write_of(0, 8, 0xab, 8192));
    assert_eq!(guest.wait(0), (head.into(), 1));
    let head = guest.submit(1, &site.read_of(1, 7, 10240 - 1024));
    assert_eq!(guest.wait(1), (head.into(), 9217));
    guest.submit(0, &site.request(2, 4, 0, None));
    guest.wait(0);
    assert_eq!([0, 1, 2].map(|number| site.status(number)), [0, 0, 0]);
    let seen = site.data(1, 9216);
    assert!(seen[..512].iter().all(|&byte| byte == 0));
    assert!(seen[512..8704].iter().all(|&byte| byte == 0xab));
    assert!(seen[8704..].iter().all(|&byte| byte == 0));
    assert_eq!(site.content()[3584..12800], seen);

    for (number, kind, sector, flags) in [(3u64, 11u32, 8u64, 0u32), (4, 13, 16, 0)] {
        let mut segment = sector.to_le_bytes().to_vec();
        segment.extend([8, flags].map(u32::to_le_bytes).concat());
        let at = places(number).data;
        site.write(at, &segment);
        guest.submit(0, &site.request(number, kind, 0, Some(out(at, 16))));
        guest.wait(0);
        assert_eq!(site.status(number), 0);
    }
    assert!(site.content().iter().all(|&byte| byte == 0));

    // A driver may have more room than a serial number takes.
    let serial = into(places(5).data, 60);
    guest.submit(0, &site.request(5, 8, 0, Some(serial)));
    assert_eq!(guest.wait(0).1, 21);
    assert_eq!(site.data(5, 12), b"0123456789\0\0");
    drop(disk);
}

#[test]
fn a_driver_may_cut_header_data_and_status_where_it_likes() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    site.write_of(0, 3, 0x5a, 1024);
    let at = places(0);
    // The header in three parts, of which one has data too.
    site.write(at.data + 512, &site.read(at.header + 9, 7));
    site.write(at.data + 519, &[0x5a; 1024]);
    let parts = [
        out(at.header, 4),
        out(at.header + 4, 5),
        out(at.data + 512, 7 + 1024),
        into(at.status, 1),
    ];
    guest.submit(0, &parts);
    guest.wait(0);
    assert_eq!(site.status(0), 0);
    assert_eq!(site.content()[1536..2560], [0x5a; 1024]);
    // The status as the last byte of what is read.
    site.read_of(1, 3, 1024);
    let at = places(1);
    guest.submit(0, &[out(at.header, 16), into(at.data, 1025)]);
    assert_eq!(guest.wait(0).1, 1025);
    let seen = site.data(1, 1025);
    assert_eq!((&seen[..1024], seen[1024]), (&[0x5a; 1024][..], 0));
}

#[test]
fn what_the_disk_cannot_do_is_told_in_the_status_and_changes_nothing() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let end = MIB / 512;
    let erase = |number, sectors: u32, flags: u32| {
        let mut segment = 0u64.to_le_bytes().to_vec();
        segment.extend([sectors, flags].map(u32::to_le_bytes).concat());
        site.write(places(number).data, &segment);
        Some(out(places(number).data, 16))
    };
    let data = |number, len| Some(out(places(number).data, len));
    let requests = [
        (site.write_of(0, end, 1, 512), 1),
        (site.write_of(1, end - 1, 1, 1024), 1),
        (site.write_of(2, u64::MAX, 1, 512), 1),
        (site.write_of(3, 0, 1, 100), 1),
        (site.request(4, 1, 0, None), 1),
        (site.request(5, 99, 0, data(5, 512)), 2),
        (site.request(6, 11, 0, data(6, 15)), 1),
        (site.request(7, 11, 0, erase(7, u32::MAX, 0)), 1),
        (site.request(8, 11, 0, erase(8, 8, 1)), 2),
        (site.request(9, 13, 0, erase(9, 8, 2)), 2),
        // Data that is nowhere in the guest's memory.
        (site.request(10, 1, 0, Some(out(0x1000, 512))), 1),
        (site.request(11, 0, 0, Some(into(u64::MAX - 100, 512))), 1),
        // More pieces than any driver was told that it may make.
        (site.in_pieces(12, 8, 131), 1),
    ];
    for (number, (parts, expected)) in requests.iter().enumerate() {
        let head = guest.submit(0, parts);
        assert_eq!(guest.wait(0), (head.into(), 1), "request {number}");
        assert_eq!(site.status(number as u64), *expected, "request {number}");
    }
    assert!(site.content().iter().all(|&byte| byte == 0));
}

#[test]
fn a_disk_for_reading_refuses_writes() {
    let site = Site::new(MIB);
    let mut geometry = site.geometry();
    geometry.read_only = true;
    let _disk = site.disk_of(geometry, Vec::new());
    let mut guest = site.front_end();
    guest.negotiate(0);
    assert_eq!(guest.features & (1 << 5 | 1 << 13 | 1 << 14), 1 << 5);
    guest.start();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (1, 0));
}

#[test]
fn an_error_of_the_image_reaches_the_guest_and_the_disk_goes_on() {
    let site = Site::new(MIB);
    let faults = Fault::default();
    let _disk = site.disk(vec![Box::new(faults.clone())]);
    let mut guest = site.guest();
    faults.fail_writes(1, Errno::IO);
    for (number, expected) in [(0, 1), (1, 0)] {
        guest.submit(0, &site.write_of(number, number, 9, 512));
        guest.wait(0);
        assert_eq!(site.status(number), expected);
    }
    assert_eq!((site.content()[0], site.content()[512]), (0, 9));
}

#[test]
fn what_the_image_has_carried_out_is_answered_once_and_not_before_a_filter_lets_it_go() {
    let (site, gate) = (Site::new(MIB), Gate::default());
    std::fs::write(&site.image, vec![200; MIB as usize]).unwrap();
    let disk = site.disk(gate.of_outcomes());
    let mut guest = site.guest();
    let mut heads = [Vec::new(), Vec::new()];
    for number in 0..16 {
        let parts = match number % 4 {
            0 => site.read_of(number, 8 * number, 512),
            1 => site.request(number, 4, 0, None),
            _ => site.write_of(number, 8 * number, number as u8, 512),
        };
        let queue = (number / 4 % 2) as usize;
        heads[queue].push(u32::from(guest.submit(queue, &parts)));
    }
    until(|| gate.untold() == 16);
    assert_eq!(disk.status().unwrap().under_way, 16);
    let content = site.content();
    for number in 0..16 {
        match number % 4 {
            0 => assert_eq!(site.data(number, 512), [200; 512]),
            1 => {}
            _ => assert_eq!(content[4096 * number as usize], number as u8),
        }
        assert_eq!(site.status(number), 77, "{number}");
    }
    assert_eq!([guest.answered(0), guest.answered(1)], [None, None]);
    gate.set_open(true);
    for (queue, heads) in heads.iter().enumerate() {
        let answered = heads.iter().map(|_| guest.wait(queue).0);
        let answered: BTreeSet<u32> = answered.collect();
        assert_eq!(answered, heads.iter().copied().collect());
    }
    wait_until(&disk, |status| status.under_way == 0);
    assert_eq!([guest.answered(0), guest.answered(1)], [None, None]);
    assert!((0..16).all(|number| site.status(number) == 0));
}

#[test]
fn a_queue_ends_once_nothing_of_it_is_under_way_and_goes_on_where_it_was() {
    let (site, gate) = (Site::new(MIB), Gate::default());
    let disk = site.disk(gate.filters());
    let mut guest = site.guest();
    for round in 1..=5u64 {
        gate.set_open(false);
        for number in 0..4 {
            guest.submit(0, &site.write_of(number, number, round as u8, 512));
        }
        wait_until(&disk, |status| status.under_way == 4);
        guest.send(11, &pair(0, 0), &[]);
        // It was heard; nothing more is taken, and QEMU waits.
        guest.number(1);
        guest.submit(0, &site.write_of(4, 4, round as u8, 512));
        wait_until(&disk, |status| status.under_way == 4);
        gate.set_open(true);
        let (body, _) = guest.answer(11).unwrap();
        assert_eq!(body, pair(0, round as u32 * 5 - 1));
        assert!(
            (0..5)
                .map(|number| site.status(number))
                .eq([0, 0, 0, 0, 77])
        );
        guest.start_queue(0);
        for _ in 0..5 {
            guest.wait(0);
        }
        assert!((0..5).all(|number| site.status(number) == 0));
        assert_eq!(site.content()[4 * 512], round as u8);
    }
}

#[test]
fn a_held_disk_leaves_requests_in_the_ring_and_its_queues_end_at_once() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    disk.hold(Duration::from_secs(60)).unwrap();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    let status = disk.status().unwrap();
    assert_eq!(
        (status.held, status.under_way, status.unanswered),
        (true, 0, 0)
    );
    assert_eq!(guest.end_queue(0), 0);
    assert_eq!(guest.end_queue(1), 0);
    guest.start();
    assert_eq!((site.status(0), guest.answered(0)), (77, None));
    disk.release().unwrap();
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
}

#[test]
fn a_hold_that_takes_too_long_says_what_is_under_way_and_holds_all_the_same() {
    let (site, gate) = (Site::new(MIB), Gate::default());
    let disk = site.disk(gate.filters());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.under_way == 1);
    let refused = disk.hold(Duration::ZERO).unwrap_err();
    assert!(
        matches!(refused, Error::Busy { under_way: 1, .. }),
        "{refused}"
    );
    gate.set_open(true);
    guest.wait(0);
    guest.submit(0, &site.write_of(1, 1, 1, 512));
    disk.hold(Duration::from_secs(60)).unwrap();
    assert_eq!(site.status(1), 77);
}

#[test]
fn a_guest_hears_of_a_new_size() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    guest.end_queue(0);
    guest.end_queue(1);
    guest.send(21, &[], &[std::os::fd::AsFd::as_fd(&theirs)]);
    guest.start();
    let file = std::fs::File::options()
        .write(true)
        .open(&site.image)
        .unwrap();
    file.set_len(3 * MIB).unwrap();
    assert_eq!(disk.measure().unwrap(), 3 * MIB);
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut &ours, &mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let mut asked = [0, 60, 0u32].map(u32::to_le_bytes).concat();
    asked.extend([0; 60]);
    let (config, _) = guest.ask(24, &asked).unwrap();
    assert_eq!(config[12..20], (3 * MIB / 512).to_le_bytes());
    guest.submit(0, &site.write_of(0, 2 * MIB / 512, 1, 512));
    guest.wait(0);
    assert_eq!(site.status(0), 0);
}

#[test]
fn a_guest_that_stood_still_while_its_disk_got_larger_hears_of_it_when_it_goes_on() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    guest.send(21, &[], &[std::os::fd::AsFd::as_fd(&theirs)]);
    guest.end_queue(0);
    guest.end_queue(1);
    let file = std::fs::File::options().write(true).open(&site.image);
    file.unwrap().set_len(2 * MIB).unwrap();
    assert_eq!(disk.measure().unwrap(), 2 * MIB);
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut &ours, &mut message).unwrap();
    // That one QEMU does not heed.
    guest.start();
    std::io::Read::read_exact(&mut &ours, &mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_successor_with_a_larger_image_tells_its_guest_once() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    drop(disk);
    let file = std::fs::File::options()
        .write(true)
        .open(&site.image)
        .unwrap();
    file.set_len(2 * MIB).unwrap();
    let _disk = site.disk(Vec::new());
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    guest.send(21, &[], &[std::os::fd::AsFd::as_fd(&theirs)]);
    for _ in 0..3 {
        guest.start();
        guest.end_queue(0);
        guest.end_queue(1);
    }
    drop((guest, theirs));
    let mut heard = Vec::new();
    std::io::Read::read_to_end(&mut &ours, &mut heard).unwrap();
    assert_eq!(heard, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

fn limited(requests: u64, bytes: u64) -> Vec<Box<dyn Filter>> {
    vec![Box::new(Throttle::new(Limits { requests, bytes }))]
}

#[test]
fn a_limit_leaves_requests_in_their_ring_and_a_queue_ends_at_once() {
    let site = Site::new(MIB);
    // The next one may come in some minutes.
    let disk = site.disk(limited(0, 1));
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    guest.submit(0, &site.write_of(1, 1, 1, 512));
    guest.number(1);
    assert_eq!(disk.status().unwrap().under_way, 0);
    assert_eq!(guest.end_queue(0), 1);
    assert_eq!(site.status(1), 77);
}

#[test]
fn what_a_limit_left_in_the_ring_is_done_when_its_time_has_come() {
    let site = Site::new(MIB);
    let _disk = site.disk(limited(20, 0));
    let mut guest = site.guest();
    for number in 0..8 {
        guest.submit(0, &site.write_of(number, number, 1, 512));
    }
    for _ in 0..8 {
        guest.wait(0);
    }
    assert!((0..8).all(|number| site.status(number) == 0));
}

#[test]
fn a_queue_of_a_front_end_that_knows_no_protocol_features_is_enabled_when_it_begins() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.front_end();
    guest.negotiate(1 << 30);
    guest.set_memory();
    guest.describe_queue(0);
    let (call, kick) = guest.descriptors_of(0);
    guest.send(13, &0u64.to_le_bytes(), &[std::os::fd::AsFd::as_fd(&call)]);
    guest.send(12, &0u64.to_le_bytes(), &[std::os::fd::AsFd::as_fd(&kick)]);
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!(site.status(0), 0);
}

#[test]
fn what_cannot_be_a_disk_is_refused_before_anybody_connects() {
    let site = Site::new(MIB);
    let good = site.geometry();
    let cases = [
        (
            Geometry {
                block: 0,
                ..good.clone()
            },
            "blocks of 0 bytes",
        ),
        (
            Geometry {
                block: 1024,
                ..good.clone()
            },
            "blocks of 1024 bytes",
        ),
        (
            Geometry {
                bytes: 0,
                ..good.clone()
            },
            "not whole blocks",
        ),
        (
            Geometry {
                bytes: 1000,
                ..good.clone()
            },
            "not whole blocks",
        ),
        (
            Geometry {
                bytes: 2 * MIB,
                ..good.clone()
            },
            "its image only",
        ),
        (
            Geometry {
                queues: 0,
                ..good.clone()
            },
            "0 queues",
        ),
        (
            Geometry {
                queues: 17,
                ..good.clone()
            },
            "17 queues",
        ),
        (
            Geometry {
                serial: "x".repeat(21),
                ..good.clone()
            },
            "serial number",
        ),
    ];
    for (geometry, sentence) in cases {
        let error = site.try_disk(geometry, Vec::new()).unwrap_err().to_string();
        assert!(error.contains(sentence), "{error}");
        assert!(!site.socket.exists());
    }
    assert!(site.try_disk(good, Vec::new()).is_ok());
}

/// Tells which pages are marked when an outcome comes up to it: nobody has told the guest of that request then.
struct MarkedBefore(Arc<RamFile>, Sender<PageSet>);

impl Filter for MarkedBefore {
    fn passes_down(&mut self, _request: &Request, _now: Instant) -> bool {
        true
    }

    fn passes_up(&mut self, _request: &Request, _outcome: Outcome, _now: Instant) -> bool {
        let _ = self.1.send(self.0.device_writes()); // a test that has failed hears nothing
        true
    }
}

/// A migration would leave behind what it was not told of. Each thing that a disk writes is alone on its page here.
#[test]
fn a_tracker_is_told_of_everything_that_a_disk_writes_into_the_guest_and_of_nothing_else() {
    let site = Site::new(MIB);
    let (tell, told) = channel();
    let filter = MarkedBefore(Arc::clone(&site.ram), tell);
    let _disk = site.disk(vec![Box::new(filter)]);
    let mut guest = site.front_end();
    // Else a disk writes beside its used ring when it wants to hear of the next request.
    guest.negotiate(1 << 29);
    guest.start();
    let is_in = |pages: &PageSet, at: u64| pages.contains((at - GUEST) / 4096);
    let marked = |at: u64| is_in(&site.ram.device_writes(), at);
    let used = guest.used_ring(0);
    assert!(!marked(used), "nothing was answered");
    for (number, reads) in [(1, true), (2, false)] {
        let at = places(number);
        let parts = match reads {
            true => site.read_of(number, 0, 8192),
            false => site.write_of(number, 0, 1, 8192),
        };
        guest.submit(0, &parts);
        guest.wait(0);
        let data = [at.data, at.data + 4096].map(marked);
        assert_eq!(data, [reads; 2], "what it read from the image");
        assert!(marked(at.status) && marked(used));
        assert!(!marked(at.data + 8192), "the page after it");
        let before = told.recv_timeout(LONG).unwrap();
        let data = [at.data, at.data + 4096].map(|at| is_in(&before, at));
        assert_eq!(data, [reads; 2], "before the guest was told");
        assert!(!is_in(&before, at.status), "it was told already");
    }
    let at = places(3);
    guest.submit(0, &site.request(3, 8, 0, Some(into(at.data, 20))));
    guest.wait(0);
    assert!(marked(at.data), "its serial number");
}
