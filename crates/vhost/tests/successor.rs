//! A disk whose process is gone, and the next one: no request is lost, and none is done after a newer one.

mod common;

use common::{FrontEnd, Gate, LONG, Site, wait_until};
use godwit_blockio::filters::Delay;
use godwit_blockio::{Filter, Flow, Outcome, Request, Work};
use rustix::io::Errno;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A disk that takes requests and never carries them out.
fn stuck() -> Vec<Box<dyn godwit_blockio::Filter>> {
    vec![Box::new(Delay::new(Duration::from_secs(3600)))]
}

/// A guest whose disk is gone, with a write of 1 to its first sector under way.
fn with_a_write_under_way(site: &Site) -> FrontEnd {
    let disk = site.disk(stuck());
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.unanswered == 1);
    drop(disk);
    guest
}

#[test]
fn requests_that_were_under_way_are_carried_out_by_the_successor_each_answered_once() {
    let site = Site::new(MIB);
    let disk = site.disk(stuck());
    let mut guest = site.guest();
    for number in 0..16 {
        let queue = (number % 2) as usize;
        guest.submit(queue, &site.write_of(number, number, number as u8 + 1, 512));
    }
    wait_until(&disk, |status| status.unanswered == 16);
    drop(disk);

    let disk = site.disk(Vec::new());
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    for queue in [0, 1] {
        let heads: std::collections::BTreeSet<u32> = (0..8).map(|_| guest.wait(queue).0).collect();
        assert_eq!(heads.len(), 8);
        assert_eq!(guest.answered(queue), None);
    }
    assert_eq!(disk.status().unwrap().resubmitted, 16);
    for number in 0..16 {
        assert_eq!(site.status(number), 0);
        assert_eq!(site.content()[number as usize * 512], number as u8 + 1);
    }
    // And the ring goes on.
    guest.submit(0, &site.write_of(20, 20, 99, 512));
    guest.wait(0);
    assert_eq!(site.content()[20 * 512], 99);
}

/// Fails the first flush, as the kernel tells of lost data: once.
#[derive(Default)]
struct LosesData(bool);

impl Filter for LosesData {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        match request.work == Work::Flush && !std::mem::replace(&mut self.0, true) {
            true => flow.up(request, Outcome::Failed(Errno::IO)),
            false => flow.down(request),
        }
    }
}

#[test]
fn a_flush_that_failed_while_qemu_was_away_has_failed_for_the_guest() {
    let site = Site::new(MIB);
    let gate = Gate::default();
    let mut filters = gate.filters();
    filters.push(Box::<LosesData>::default());
    let disk = site.disk(filters);
    let mut guest = site.guest();
    let flush = |number| site.request(number, 4, 0, None);
    guest.submit(0, &flush(0));
    wait_until(&disk, |status| status.under_way == 1);
    guest.hang_up();
    wait_until(&disk, |status| !status.connected);
    gate.set_open(true);
    wait_until(&disk, |status| status.under_way == 0);
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    guest.wait(0);
    assert_eq!(site.status(0), 1, "the second one tells of nothing");
    guest.submit(0, &flush(1));
    guest.wait(0);
    assert_eq!(site.status(1), 0);
}

#[test]
fn what_came_while_nobody_was_there_is_done_after_what_was_under_way() {
    let site = Site::new(MIB);
    let disk = site.disk(stuck());
    let mut guest = site.guest();
    let older = guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.unanswered == 1);
    drop(disk);
    // To the same block; no guest does that before it has its answer, but the order must be kept.
    let newer = guest.submit(0, &site.write_of(1, 0, 2, 512));
    let gate = Gate::default();
    let disk = site.disk(gate.filters());
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    // The newer one stays in the ring.
    wait_until(&disk, |status| status.under_way == 1);
    assert_eq!(disk.status().unwrap().unanswered, 1);
    gate.set_open(true);
    assert_eq!(guest.wait(0).0, u32::from(older));
    assert_eq!(guest.wait(0).0, u32::from(newer));
    assert_eq!(site.content()[0], 2);
}

#[test]
fn a_held_disk_carries_out_what_was_under_way_before() {
    let site = Site::new(MIB);
    let mut guest = with_a_write_under_way(&site);
    let disk = site.disk(Vec::new());
    disk.hold(Duration::from_secs(60)).unwrap();
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    guest.wait(0);
    disk.hold(Duration::from_secs(60)).unwrap();
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
    assert_eq!(disk.status().unwrap().unanswered, 0);
}

/// A migration that began in that moment failed: its filter found something under way on a disk that stood still.
#[test]
fn a_disk_that_stands_still_carries_out_what_was_under_way_before_only_once_it_goes_on() {
    let site = Site::new(MIB);
    let mut guest = with_a_write_under_way(&site);
    let gate = Gate::default();
    let disk = site.disk(gate.filters());
    let standing = disk.stand_still(LONG).unwrap();
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.start();
    wait_until(&disk, |status| status.running == 2);
    let below = Box::new(Delay::new(Duration::ZERO));
    disk.put_lowest(below, Duration::from_secs(5)).unwrap();
    assert_eq!(disk.status().unwrap().under_way, 0);
    gate.set_open(true);
    drop(standing);
    guest.wait(0);
    assert_eq!(guest.answered(0), None);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
}

#[test]
fn what_was_under_way_waits_for_a_disk_that_has_its_image_and_keeps_no_queue_from_ending() {
    let site = Site::new(MIB);
    let mut guest = with_a_write_under_way(&site);
    let disk = site.disk_without_image();
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    for _ in 0..2 {
        guest.start();
        // As at a stop: it is left where the next start finds it.
        disk.hold(Duration::from_secs(60)).unwrap();
        assert_eq!((guest.end_queue(0), guest.end_queue(1)), (1, 0));
        assert_eq!((site.status(0), site.content()[0]), (77, 0));
        disk.release().unwrap();
    }
    guest.start();
    disk.take_image("root", Duration::from_secs(60)).unwrap();
    guest.wait(0);
    assert_eq!(guest.answered(0), None);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
}

#[test]
fn a_front_end_that_comes_back_is_heard_once_the_last_ones_requests_have_ended() {
    let site = Site::new(MIB);
    let gate = Gate::default();
    let disk = site.disk(gate.filters());
    let mut guest = site.guest();
    for round in 1..=4u8 {
        gate.set_open(false);
        guest.submit(0, &site.write_of(0, 0, round, 512));
        wait_until(&disk, |status| status.under_way == 1);
        guest.hang_up();
        wait_until(&disk, |status| !status.connected);
        assert!(!site.socket.exists());
        gate.set_open(true);
        guest.connect_again(&site.socket);
        guest.negotiate(0);
        guest.start();
        guest.wait(0);
        assert_eq!(guest.answered(0), None);
        assert_eq!((site.status(0), site.content()[0]), (0, round));
    }
    assert_eq!(disk.status().unwrap().resubmitted, 4);
}

#[test]
fn a_queue_that_is_ended_before_it_is_enabled_again_carries_out_what_was_under_way() {
    let site = Site::new(MIB);
    let mut guest = with_a_write_under_way(&site);
    let _disk = site.disk(Vec::new());
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    // QEMU has all of this on its way when the guest is stopped.
    guest.start();
    guest.send(18, &common::pair(0, 0), &[]);
    assert_eq!(guest.end_queue(0), 1);
    assert_eq!((site.status(0), site.content()[0]), (0, 1));

    // The same where it was never enabled.
    guest.describe_queue(0);
    let (call, kick) = guest.descriptors_of(0);
    guest.send(13, &0u64.to_le_bytes(), &[std::os::fd::AsFd::as_fd(&call)]);
    guest.send(12, &0u64.to_le_bytes(), &[std::os::fd::AsFd::as_fd(&kick)]);
    assert_eq!(guest.end_queue(0), 1);
}

#[test]
fn a_queue_goes_on_where_its_ring_is_also_where_the_front_end_knows_an_older_place() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    let mut guest = site.guest();
    for number in 0..300 {
        guest.submit(0, &site.write_of(number % 16, number % 16, 1, 512));
        guest.wait(0);
    }
    drop(disk);
    // One that nobody has looked at, too.
    guest.submit(0, &site.write_of(3, 3, 7, 512));
    let _disk = site.disk(Vec::new());
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    guest.set_memory();
    guest.set_inflight();
    for number in 0..2 {
        guest.describe_queue(number);
        guest.send(10, &common::pair(number as u32, 0), &[]);
        guest.begin_queue(number);
    }
    guest.wait(0);
    assert_eq!((site.status(3), site.content()[3 * 512]), (0, 7));
    assert_eq!(guest.end_queue(0), 301);
}

#[test]
fn who_connects_while_an_earlier_ones_requests_are_under_way_is_refused_and_not_kept_waiting() {
    let site = Site::new(MIB);
    let disk = site.disk(stuck());
    let mut guest = site.guest();
    assert!(!site.socket.exists(), "a second one is refused");
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.unanswered == 1);
    drop(guest);
    wait_until(&disk, |status| !status.connected);
    let status = disk.status().unwrap();
    assert_eq!((status.under_way, site.socket.exists()), (1, false));
    drop(disk);
    let _disk = site.disk(Vec::new());
    assert!(site.socket.exists());
}

#[test]
fn a_disk_that_ends_answers_what_the_kernel_has_first() {
    for _ in 0..20 {
        let site = Site::new(MIB);
        let disk = site.disk(Vec::new());
        let mut guest = site.guest();
        for number in 0..16 {
            guest.submit(
                0,
                &site.write_of(number, 8 * number, number as u8 + 1, 4096),
            );
        }
        drop(disk);
        let content = site.content();
        let is_there = |number: &u64| content[4096 * *number as usize] == *number as u8 + 1;
        let unanswered = (0..16).filter(|number| is_there(number) && site.status(*number) != 0);
        assert_eq!(
            unanswered.count(),
            0,
            "the kernel did it, and nobody was told"
        );
        let answered = std::iter::from_fn(|| guest.answered(0)).count();
        assert_eq!(answered, (0..16).filter(is_there).count());
    }
}
