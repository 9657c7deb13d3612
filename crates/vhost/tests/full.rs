//! What a guest has of a disk whose image has no room, and what becomes of its writes when its queue or its connection ends meanwhile.

mod common;

use common::{FrontEnd, Gate, LONG, Site, wait_until, without_room};
use godwit_blockio::filters::Fault;
use godwit_blockio::{Filter, Flow, Outcome, Request, Work};
use godwit_vhost::Disk;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn a_write_for_which_there_is_no_room_waits_until_there_is_and_nothing_overtakes_it() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_room(&site);
    guest.submit(1, &site.write_of(1, 1, 1, 512));
    // Tried again meanwhile, in vain.
    let long = Some(Duration::from_millis(1500));
    wait_until(&disk, |status| status.full_for > long);
    disk.hold(LONG).unwrap();
    disk.release().unwrap();
    assert_eq!((site.status(0), site.status(1)), (77, 77));
    // The newer one was never taken.
    assert_eq!(disk.status().unwrap().unanswered, 1);
    faults.fail_writes(0, Errno::NOSPC);
    guest.wait(0);
    guest.wait(1);
    assert_eq!((site.status(0), site.status(1)), (0, 0));
    assert!(disk.status().unwrap().full_for.is_none());
    assert_eq!((site.content()[0], site.content()[512]), (1, 1));
}

#[test]
fn a_disk_that_ends_one_request_is_full_for_as_long_as_another_waits() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_both(&site);
    let long = Some(Duration::from_millis(1200));
    wait_until(&disk, |status| status.full_for > long);
    let before = disk.status().unwrap().full_for;
    faults.fail_only_at(0);
    guest.wait(1);
    assert_eq!((site.status(0), site.status(1)), (77, 0));
    assert!(
        disk.status().unwrap().full_for >= before,
        "it never was not full"
    );
    faults.fail_writes(0, Errno::NOSPC);
    guest.wait(0);
    assert!(disk.status().unwrap().full_for.is_none());
}

/// A disk for whose guest's writes to its first two sectors, in two queues, there is no room.
fn without_both(site: &Site) -> (Disk, FrontEnd, Fault) {
    let (gate, faults) = (Gate::default(), Fault::default());
    let mut filters = gate.filters();
    filters.push(Box::new(faults.clone()));
    let disk = site.disk(filters);
    let mut guest = site.guest();
    faults.fail_writes(u64::MAX, Errno::NOSPC);
    for number in 0..2 {
        guest.submit(
            number as usize,
            &site.write_of(number, number, number as u8 + 1, 512),
        );
    }
    wait_until(&disk, |status| status.under_way == 2);
    gate.set_open(true);
    wait_until(&disk, |status| {
        status.full_for.is_some() && status.under_way == 0
    });
    (disk, guest, faults)
}

/// Finds out only at a flush that there is no room, and tells it once.
struct FullAtFlush(bool);

impl Filter for FullAtFlush {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        match request.work == Work::Flush && !std::mem::replace(&mut self.0, true) {
            true => flow.up(request, Outcome::Failed(Errno::NOSPC)),
            false => flow.down(request),
        }
    }
}

#[test]
fn a_flush_that_found_no_room_fails_and_is_not_tried_again_as_if_nothing_were_lost() {
    let site = Site::new(MIB);
    let disk = site.disk(vec![Box::new(FullAtFlush(false))]);
    let mut guest = site.guest();
    guest.submit(0, &site.request(0, 4, 0, None));
    guest.wait(0);
    assert_eq!((site.status(0), disk.status().unwrap().full_for), (1, None));
}

#[test]
fn a_disk_that_is_told_so_gives_an_error_where_there_is_no_room_and_goes_on() {
    let site = Site::new(MIB);
    let faults = Fault::default();
    let disk = site.disk_that_fails_full(vec![Box::new(faults.clone())]);
    let mut guest = site.guest();
    for error in [Errno::NOSPC, Errno::DQUOT] {
        faults.fail_writes(1, error);
        guest.submit(0, &site.write_of(0, 0, 1, 512));
        guest.wait(0);
        assert_eq!((site.status(0), site.content()[0]), (1, 0));
    }
    guest.submit(0, &site.write_of(1, 1, 2, 512));
    guest.wait(0);
    assert_eq!((site.status(1), site.content()[512]), (0, 2));
    let status = disk.status().unwrap();
    assert_eq!((status.full_for, status.unanswered), (None, 0));
}

#[test]
fn qemu_is_not_kept_waiting_by_a_disk_without_room() {
    let site = Site::new(MIB);
    let (disk, mut guest, _) = without_room(&site);
    // QEMU stops the guest by itself.
    assert_eq!(guest.end_queue(0), 1);
    assert_eq!((site.status(0), site.content()[0]), (77, 0));
    let status = disk.status().unwrap();
    assert_eq!((status.full_for, status.unanswered), (None, 1));
}

#[test]
fn a_guest_that_was_stopped_with_a_full_disk_has_its_write_done_when_it_goes_on() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_room(&site);
    guest.submit(0, &site.write_of(1, 1, 2, 512));
    for _ in 0..3 {
        disk.hold(LONG).unwrap();
        assert_eq!(guest.end_queue(0), 1);
        assert_eq!(guest.end_queue(1), 0);
        assert_eq!((site.status(0), site.content()[0]), (77, 0));
        guest.start();
        disk.release().unwrap();
        wait_until(&disk, |status| status.full_for.is_some());
    }
    disk.hold(LONG).unwrap();
    assert_eq!(guest.end_queue(0), 1);
    assert_eq!(guest.end_queue(1), 0);
    faults.fail_writes(0, Errno::NOSPC);
    guest.start();
    disk.release().unwrap();
    guest.wait(0);
    guest.wait(0);
    assert_eq!(guest.answered(0), None);
    assert_eq!((site.status(0), site.status(1)), (0, 0));
    assert_eq!((site.content()[0], site.content()[512]), (1, 2));
}

/// A ring says how many of its requests are unanswered; which ones, the in-flight area alone. A disk that goes on by the ring takes
/// the last ones again, and a write that waits is the last one only where nothing overtook it.
#[test]
fn a_write_that_waits_for_room_survives_a_stop_though_a_later_request_was_answered() {
    let site = Site::new(MIB);
    let (gate, faults) = (Gate::default(), Fault::default());
    let mut filters = gate.filters();
    filters.push(Box::new(faults.clone()));
    let disk = site.disk(filters);
    let mut guest = site.guest();
    faults.fail_writes(u64::MAX, Errno::NOSPC);
    let write = guest.submit(0, &site.write_of(0, 0, 1, 512));
    let read = guest.submit(0, &site.read_of(1, 1, 512));
    wait_until(&disk, |status| status.under_way == 2);
    gate.set_open(true);
    assert_eq!(guest.wait(0).0, u32::from(read));
    wait_until(&disk, |status| status.full_for.is_some());
    disk.hold(LONG).unwrap();
    assert_eq!(guest.end_queue(0), 2);
    assert_eq!(guest.end_queue(1), 0);
    faults.fail_writes(0, Errno::NOSPC);
    guest.start();
    disk.release().unwrap();
    assert_eq!(guest.wait(0).0, u32::from(write));
    assert_eq!((site.status(0), site.content()[0]), (0, 1));
    wait_until(&disk, |status| status.unanswered == 0);
    assert_eq!(guest.answered(0), None);
}

#[test]
fn a_disk_whose_connection_is_lost_while_it_is_full_carries_out_each_write_of_the_next_once() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_room(&site);
    guest.connect_again(&site.socket);
    guest.negotiate(0);
    assert_eq!(
        disk.status().unwrap().full_for,
        None,
        "none of its own waits"
    );
    faults.fail_writes(0, Errno::NOSPC);
    guest.start();
    guest.wait(0);
    guest.submit(0, &site.write_of(1, 1, 2, 512));
    guest.wait(0);
    assert_eq!((site.status(0), site.status(1)), (0, 0));
    assert_eq!((site.content()[0], site.content()[512]), (1, 2));
    let status = disk.status().unwrap();
    assert_eq!((status.resubmitted, status.unanswered), (1, 0));
}

#[test]
fn a_guest_that_is_reset_while_its_disk_is_full_has_none_of_its_former_writes_done() {
    let site = Site::new(MIB);
    let (disk, mut guest, faults) = without_room(&site);
    assert_eq!(guest.end_queue(0), 1);
    assert_eq!(guest.end_queue(1), 0);
    // QEMU has another in-flight area made then.
    let mut guest = guest.reset(&site);
    faults.fail_writes(0, Errno::NOSPC);
    guest.start();
    guest.submit(0, &site.write_of(5, 5, 9, 512));
    guest.wait(0);
    assert_eq!((site.content()[0], site.content()[5 * 512]), (0, 9));
    assert_eq!(disk.status().unwrap().resubmitted, 0);
}

/// Fails what its guest reads and writes, until it is told not to; and always the first flush.
#[derive(Clone, Default)]
struct Broken(Arc<AtomicBool>);

impl Filter for Broken {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        match self.0.load(Ordering::SeqCst) {
            true => flow.up(request, Outcome::Failed(Errno::IO)),
            false => flow.down(request),
        }
    }
}

#[test]
fn reads_and_writes_wait_for_storage_that_fails_where_the_disk_is_told_so_and_flushes_fail() {
    let site = Site::new(MIB);
    let broken = Broken::default();
    broken.0.store(true, Ordering::SeqCst);
    let disk = site.disk_that_waits_for_storage(vec![Box::new(broken.clone())]);
    let mut guest = site.guest();
    // A flush before anything waits: after it nothing new is taken.
    guest.submit(0, &site.request(0, 4, 0, None));
    guest.wait(0);
    assert_eq!((site.status(0), disk.status().unwrap().full_for), (1, None));
    guest.submit(0, &site.write_of(0, 0, 7, 512));
    let long = Some(Duration::from_millis(1200));
    wait_until(&disk, |status| status.full_for > long && status.fails);
    assert_eq!(site.status(0), 77);
    broken.0.store(false, Ordering::SeqCst);
    guest.wait(0);
    assert_eq!((site.status(0), site.content()[0]), (0, 7));
    let status = disk.status().unwrap();
    assert!(status.full_for.is_none() && !status.fails);
    // So does a read.
    broken.0.store(true, Ordering::SeqCst);
    guest.submit(1, &site.read_of(1, 0, 512));
    wait_until(&disk, |status| status.full_for.is_some() && status.fails);
    broken.0.store(false, Ordering::SeqCst);
    guest.wait(1);
    assert_eq!(site.status(1), 0);
}
