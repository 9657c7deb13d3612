//! A guest's serial port with somebody at it.

use crate::common::{Guest, Place, expect_heartbeat, soon};
use crate::run;
use godwit_qemu::console::Line;
use std::time::Instant;

/// Writes back what it reads from its serial port.
const ECHOING: &[u8] = &[
    0xba, 0xfd, 0x03, // again: mov dx, 0x3fd
    0xec, // wait: in al, dx
    0xa8, 0x01, // test al, 1
    0x74, 0xfb, // jz wait
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0xee, // out dx, al
    0xeb, 0xf1, // jmp again
];

/// Writes for ever, whenever its port takes something, and reports every 64 KiB.
const WRITING: &[u8] = &[
    0xba, 0xfd, 0x03, // again: mov dx, 0x3fd
    0xec, // wait: in al, dx
    0xa8, 0x20, // test al, 0x20
    0x74, 0xfb, // jz wait
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'x', // mov al, 'x'
    0xee, // out dx, al
    0xe2, 0xf0, // loop again
    0xba, 0x05, 0x05, // mov dx, 0x505
    0xb0, 0x02, // mov al, 2
    0xee, // out dx, al
    0xeb, 0xe8, // jmp again
];

/// Reads until so much has come.
fn read(line: &Line, len: usize) -> Vec<u8> {
    let mut text = Vec::new();
    while text.len() < len {
        let more = line.read(soon()).expect("a line").expect("QEMU has it");
        assert!(!more.is_empty(), "only {text:?} came");
        text.extend(more);
    }
    text
}

fn open(guest: &Guest) -> (Line, Vec<u8>) {
    let mut text = Vec::new();
    let line = guest.machine().open_console_line(&mut text, soon());
    (line.expect("a line"), text)
}

fn descriptors(guest: &Guest) -> usize {
    let directory = format!("/proc/{}/fd", guest.0.process.pid());
    std::fs::read_dir(directory).expect("descriptors").count()
}

#[test]
fn what_is_typed_reaches_the_guest_and_what_it_writes_is_read_on_the_line_and_in_the_ring() {
    let place = Place::new(ECHOING);
    let guest = place.start();
    let machine = guest.machine();
    run(&guest);
    let mut before = None;
    for round in 0..5 {
        let (line, ring) = open(&guest);
        assert_eq!(ring, b"", "nothing was typed in round {round}");
        assert!(machine.is_console_on_line(soon()).expect("its kind"));
        line.write(b"hello").expect("typed");
        assert_eq!(read(&line, 5), b"hello");
        line.write(b"last").expect("typed");
        // What the guest has not taken of it when the ring is back is lost, so its answer is waited for.
        assert_eq!(read(&line, 4), b"last");
        machine.close_console_line(soon()).expect("the ring");
        assert!(!machine.is_console_on_line(soon()).expect("its kind"));
        assert_eq!(
            line.read(soon()).expect("a line"),
            None,
            "QEMU let go of it"
        );
        let open = descriptors(&guest);
        assert_eq!(*before.get_or_insert(open), open, "none is left behind");
    }
}

#[test]
fn a_guest_whose_reader_died_goes_on_and_the_next_reader_has_the_ring() {
    let place = Place::new(WRITING);
    let guest = place.start();
    let (machine, events) = (guest.machine(), guest.machine().events());
    run(&guest);
    expect_heartbeat(&events);
    let (line, ring) = open(&guest);
    assert!(ring.len() >= 64 << 10 && ring.iter().all(|byte| *byte == b'x'));
    assert!(read(&line, 1 << 20).iter().all(|byte| *byte == b'x'));
    drop(line);
    while events.try_next().is_some() {}
    // The first may have been on its way.
    (0..3).for_each(|_| expect_heartbeat(&events));
    assert!(machine.is_console_on_line(soon()).expect("its kind"));
    machine.close_console_line(soon()).expect("the ring");
    expect_heartbeat(&events);
    assert!(!machine.console_news(soon()).expect("text").is_empty());
}

#[test]
fn a_guest_that_reads_nothing_takes_only_so_much() {
    let place = Place::new(WRITING);
    let guest = place.start();
    let (line, _) = open(&guest);
    let piece = [b'k'; 4096];
    let refused = (0..32).find_map(|_| line.write(&piece).err());
    let refused = refused.expect("a pipe of 64 KiB");
    assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(line.read(Instant::now()).expect("a line"), Some(Vec::new()));
}
