//! A driver that lies, and a front end that does: they harm their own disk and nothing else.

mod common;

use common::{
    FREE, GUEST, Gate, INDIRECT, LONG, NEXT, Part, RAM, Site, WRITE, into, out, pair, places, raw,
    wait_until,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// The other queue, and after a reset this one, still work.
fn still_works(site: &Site, guest: &mut common::FrontEnd, case: &str) {
    guest.submit(1, &site.write_of(100, 1, 7, 512));
    guest.wait(1);
    assert_eq!(site.status(100), 0, "{case}");
}

fn chain_of(part: Part, flags: u16) -> Part {
    Part {
        flags: part.flags | flags,
        ..part
    }
}

type Lie = Box<dyn Fn(&Site, &mut common::FrontEnd)>;
type Lies = Vec<(&'static str, Lie)>;

/// Where an indirect table of the lies is.
const TABLE: u64 = FREE + 0x8000;

fn chain(parts: Vec<Part>) -> Lie {
    Box::new(move |_, guest| {
        guest.submit(0, &parts);
    })
}

/// A request by a table of so many bytes with this content.
fn indirect(len: u32, content: Vec<u8>, flags: u16) -> Lie {
    Box::new(move |site, guest| {
        site.write(TABLE, &content);
        let flags = INDIRECT | flags;
        guest.submit(
            0,
            &[Part {
                at: TABLE,
                len,
                flags,
            }],
        );
    })
}

/// A descriptor at place 9 that says that it goes on at `next`.
fn goes_on_at(next: u16) -> Lie {
    Box::new(move |_, guest| {
        let flags = NEXT;
        guest.descriptor(
            0,
            9,
            Part {
                at: FREE,
                len: 16,
                flags,
            },
            next,
        );
        guest.make_available(0, 9);
        guest.kick(0);
    })
}

/// So many heads that no table has.
fn heads(count: u16, head: u16) -> Lie {
    Box::new(move |_, guest| {
        for _ in 0..count {
            guest.make_available(0, head);
        }
        guest.kick(0);
    })
}

fn lies_about_buffers() -> Lies {
    let header = out(places(0).header, 16);
    let status = into(places(0).status, 1);
    let half = out(places(0).header, 15);
    let most = out(FREE, u32::MAX);
    vec![
        ("no status", chain(vec![header])),
        (
            "a status of no bytes",
            chain(vec![header, into(places(0).status, 0)]),
        ),
        ("no header", chain(vec![status])),
        ("half a header", chain(vec![half, status])),
        (
            "a header outside",
            chain(vec![out(GUEST + RAM - 8, 16), status]),
        ),
        (
            "a header at the end of all",
            chain(vec![out(u64::MAX - 7, 16), status]),
        ),
        ("a status outside", chain(vec![header, into(0x10, 1)])),
        (
            "reads after writes",
            chain(vec![header, status, out(FREE, 512)]),
        ),
        ("more than 4 GiB", chain(vec![header, most, most, status])),
        ("a loop", goes_on_at(9)),
        ("a descriptor beyond the table", goes_on_at(256)),
        ("a head beyond the table", heads(1, 256)),
        ("more than the ring holds", heads(300, 300)),
    ]
}

fn lies_about_tables() -> Lies {
    let one = || raw(out(FREE, 16), 0);
    let nested = raw(chain_of(out(TABLE, 16), INDIRECT), 0);
    let leaves = raw(chain_of(out(FREE, 16), NEXT), 1);
    let loops = raw(chain_of(out(FREE, 0), NEXT), 0);
    let outside = Part {
        at: GUEST + RAM - 16,
        len: 32,
        flags: INDIRECT,
    };
    vec![
        ("a table of no bytes", indirect(0, vec![], 0)),
        ("a table of odd bytes", indirect(17, vec![0; 32], 0)),
        ("a table that is too long", indirect(16 * 1025, vec![], 0)),
        ("a table of 4 GiB", indirect(u32::MAX, vec![], 0)),
        ("a table in a table", indirect(16, nested, 0)),
        ("a table with a next", indirect(16, one(), NEXT)),
        ("a chain that leaves its table", indirect(16, leaves, 0)),
        ("a table outside", chain(vec![outside])),
        ("a loop in a table", indirect(16, loops, 0)),
        ("a write-only table", indirect(16, one(), WRITE)),
    ]
}

#[test]
fn a_chain_that_no_driver_makes_stops_its_queue_and_nothing_else() {
    for (case, lie) in lies_about_buffers().into_iter().chain(lies_about_tables()) {
        let site = Site::new(MIB);
        let disk = site.disk(Vec::new());
        let mut guest = site.guest();
        // One that is good is answered before and not disturbed.
        guest.submit(0, &site.write_of(50, 0, 3, 512));
        guest.wait(0);
        lie(&site, &mut guest);
        still_works(&site, &mut guest, case);
        assert_eq!(guest.answered(0), None, "{case}");
        let good = site.write_of(51, 2, 4, 512);
        guest.submit(0, &good);
        still_works(&site, &mut guest, case);
        assert_eq!(site.status(51), 77, "{case}: the queue stands still");
        // QEMU is not kept waiting by a queue that is broken.
        guest.end_queue(0);
        assert_eq!(disk.status().unwrap().under_way, 0);
        let content = site.content();
        let written: Vec<u8> = (0..2048).map(|sector| content[sector * 512]).collect();
        assert_eq!(written[..3], [3, 7, 0], "{case}");
    }
}

/// Of what a guest writes there is a copy while its disk moves.
#[test]
fn a_read_or_write_of_more_than_64_mib_fails_and_the_next_one_does_not() {
    const PIECE: u32 = 4 << 20;
    let site = Site::new(128 << 20);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    for (number, pieces, status) in [(0, 17, 1), (1, 16, 0)] {
        let repeated = |parts: Vec<Part>| {
            let (first, last) = (parts[0], parts[2]);
            let data = Part {
                len: PIECE,
                ..parts[1]
            };
            [vec![first], vec![data; pieces], vec![last]].concat()
        };
        guest.submit(0, &repeated(site.write_of(number, 0, 7, 512)));
        guest.wait(0);
        assert_eq!(site.status(number), status, "{pieces} pieces are written");
        guest.submit(0, &repeated(site.read_of(number, 0, 512)));
        guest.wait(0);
        assert_eq!(site.status(number), status, "{pieces} pieces are read");
    }
}

#[test]
fn a_descriptor_that_is_in_use_is_not_taken_again() {
    let (site, gate) = (Site::new(MIB), Gate::default());
    let disk = site.disk(gate.filters());
    let mut guest = site.guest();
    let head = guest.chain(0, &site.write_of(0, 0, 5, 512));
    guest.make_available(0, head);
    guest.make_available(0, head);
    guest.kick(0);
    wait_until(&disk, |status| status.under_way == 1);
    gate.set_open(true);
    assert_eq!(guest.wait(0).0, u32::from(head));
    assert_eq!(guest.answered(0), None);
    let status = disk.status().unwrap();
    assert_eq!((status.under_way, status.unanswered), (0, 0));
}

fn say(request: u32, body: Vec<u8>) -> Lie {
    Box::new(move |_, guest| guest.send(request, &body, &[]))
}

fn lies_in_messages() -> Lies {
    let memory = [1, 0, 4096, 0, 0u64].map(u64::to_le_bytes).concat();
    let features = u64::MAX.to_le_bytes().to_vec();
    let area_for = |queues: u8| [vec![0; 16], vec![queues, 0, 0, 1, 0, 0, 0, 0]].concat();
    vec![
        ("a request that was not offered", say(26, vec![])),
        ("a body that is too long", say(1, vec![0; 2000])),
        ("features that were not offered", say(2, features)),
        ("a queue that is not there", say(8, pair(2, 256))),
        ("a queue far away", say(8, pair(u32::MAX, 256))),
        ("an index that no ring has", say(10, pair(0, 70_000))),
        ("memory without a descriptor", say(5, memory)),
        (
            "an in-flight area without a descriptor",
            say(32, vec![0; 24]),
        ),
        ("an in-flight area for too many", say(31, area_for(255))),
        ("an in-flight area for too few", say(31, area_for(1))),
        ("a queue that runs is begun again", Box::new(begin_again)),
    ]
}

fn begin_again(_: &Site, guest: &mut common::FrontEnd) {
    guest.start();
    let (_, kick) = guest.descriptors_of(0);
    guest.send(12, &0u64.to_le_bytes(), &[kick.as_fd()]);
}

fn lies_about_memory() -> Lies {
    vec![
        (
            "memory of another guest",
            Box::new(|_, guest| {
                let other = tempfile::tempfile().unwrap();
                other.set_len(RAM).unwrap();
                let table = [1, GUEST, RAM, 0, 0].map(u64::to_le_bytes).concat();
                guest.send(5, &table, &[other.as_fd()]);
            }),
        ),
        (
            "more memory than there is",
            Box::new(|site, guest| {
                let table = [1, GUEST, RAM + 4096, 0, 0].map(u64::to_le_bytes).concat();
                guest.send(5, &table, &[site.memory.as_fd()]);
            }),
        ),
        (
            "memory that overlaps",
            Box::new(|site, guest| {
                let words = [2u64, GUEST, RAM, 0, 0, GUEST + 4096, 4096, 1 << 40, 0];
                let memory = site.memory.as_fd();
                guest.send(5, &words.map(u64::to_le_bytes).concat(), &[memory, memory]);
            }),
        ),
        (
            "an in-flight area that can shrink",
            Box::new(|_, guest| {
                let area = rustix::fs::memfd_create(c"x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&area, 32832).unwrap();
                let mut body = [32832u64, 0].map(u64::to_le_bytes).concat();
                body.extend([2u16, 256, 0, 0].map(u16::to_le_bytes).concat());
                guest.send(32, &body, &[area.as_fd()]);
            }),
        ),
    ]
}

#[test]
fn a_front_end_that_lies_is_disconnected_and_the_next_one_is_served() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    for (case, lie) in lies_in_messages().into_iter().chain(lies_about_memory()) {
        println!("{case}");
        let mut guest = site.front_end();
        guest.negotiate(0);
        lie(&site, &mut guest);
        assert!(guest.ask(1, &[]).is_none(), "{case}: it is still connected");
    }
    let mut guest = site.guest();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!(site.status(0), 0);
}

#[test]
fn what_a_driver_may_write_into_its_device_breaks_its_queue_and_not_the_connection() {
    type Write = fn(&mut common::FrontEnd);
    let cases: [(&str, Write); 4] = [
        ("a ring that is too large", |guest| {
            guest.send(8, &pair(0, 2048), &[])
        }),
        ("a ring of no power of two", |guest| {
            guest.send(8, &pair(0, 100), &[])
        }),
        ("a ring of nothing", |guest| guest.send(8, &pair(0, 0), &[])),
        ("rings in no memory", |guest| guest.send(9, &[0; 40], &[])),
    ];
    for (case, lie) in cases {
        let site = Site::new(MIB);
        let disk = site.disk(Vec::new());
        let mut guest = site.front_end();
        guest.negotiate(0);
        guest.set_memory();
        guest.set_inflight();
        guest.describe_queue(0);
        lie(&mut guest);
        let (_, kick) = guest.descriptors_of(0);
        guest.send(12, &0u64.to_le_bytes(), &[kick.as_fd()]);
        guest.send(18, &pair(0, 1), &[]);
        guest.start_queue(1);
        guest.submit(0, &site.write_of(0, 0, 1, 512));
        still_works(&site, &mut guest, case);
        assert_eq!((site.status(0), guest.answered(0)), (77, None), "{case}");
        guest.end_queue(0);
        assert_eq!(disk.status().unwrap().under_way, 0);
        // The driver has reset its device.
        guest.start_queue(0);
        guest.wait(0);
        assert_eq!(site.status(0), 0, "{case}");
    }
}

#[test]
fn the_configuration_is_not_for_writing_and_a_driver_that_tries_keeps_its_disk() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let write_cache = [[32u32, 1, 0].map(u32::to_le_bytes).concat(), vec![0]].concat();
    let answer = guest.ask_with(25, 1 << 3, &write_cache).unwrap().0;
    assert_eq!(answer, 1u64.to_le_bytes());
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    guest.wait(0);
    assert_eq!(site.status(0), 0);
}

/// An eventfd to which nothing can be added.
fn full() -> OwnedFd {
    let full = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    full
}

#[test]
fn an_interrupt_that_nobody_takes_stops_no_disk() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    guest.send(13, &0u64.to_le_bytes(), &[full().as_fd()]);
    guest.number(1);
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    still_works(&site, &mut guest, "a full eventfd");
}

#[test]
fn an_interrupt_that_qemu_makes_wait_stops_a_disk_for_a_moment() {
    let site = Site::new(MIB);
    let disk = site.disk(Vec::new());
    // Without a word of which answers are to interrupt it: each does.
    let mut guest = site.front_end();
    guest.negotiate(1 << 29);
    guest.start();
    let call = full();
    guest.send(13, &0u64.to_le_bytes(), &[call.as_fd()]);
    guest.number(1);
    let flags = rustix::fs::fcntl_getfl(&call).unwrap();
    assert!(flags.contains(OFlags::NONBLOCK));
    rustix::fs::fcntl_setfl(&call, flags - OFlags::NONBLOCK).unwrap();
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    // The answer is there before the interrupt, for which the thread waits then.
    let until = Instant::now() + LONG;
    while guest.answered(0).is_none() {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    let asked = Instant::now();
    assert!(disk.status().unwrap().connected);
    println!("  the disk answered after {:?}", asked.elapsed());
    still_works(&site, &mut guest, "an eventfd that is waited for");
}

#[test]
fn what_is_no_eventfd_is_never_interrupted_by() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    let file = tempfile::tempfile().unwrap();
    guest.send(13, &0u64.to_le_bytes(), &[file.as_fd()]);
    assert!(guest.ask(1, &[]).is_none(), "it is still heard");
    assert_eq!(file.metadata().unwrap().len(), 0);
    let mut next = site.guest();
    still_works(&site, &mut next, "a file");
}

#[test]
fn more_messages_than_are_heard_at_once_are_all_heard() {
    let site = Site::new(MIB);
    let _disk = site.disk(Vec::new());
    let mut guest = site.guest();
    for _ in 0..200 {
        guest.send(3, &[], &[]);
    }
    still_works(&site, &mut guest, "200 messages");
    guest.number(1);
}
