//! The order of an emulated guest's memory accesses, as the threads that serve its queues see it.
//!
//! Guest and test each store a number of their own and then load the other's, again and again. Whatever the timing, at
//! least one of them must see the other's store; a ring's driver and device rely on that to never both sleep.

mod common;

use common::{Place, expect_heartbeat, permit, soon};
use std::fs::File;
use std::hint::spin_loop;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Where the numbers begin in RAM; each has a cache line of its own.
const NUMBERS_AT: i64 = 0x2_0000;
const LINE_BYTES: usize = 64;
const PAGE_BYTES: usize = 4096;
const ROUNDS: u32 = 1_000_000;
/// Fewer might miss a fault that shows a few hundred times in a million.
const ROUNDS_MIN: u32 = 50_000;
/// A machine with one core to spare makes few rounds; it does not wait for all of them.
const AT_MOST: Duration = Duration::from_secs(8);

/// Reports that it is there. Waits for the next round's number, stores it, then loads the test's, as a driver does around
/// its ring: Linux's barrier between the two is an addition of nothing with a `lock` prefix.
const STORES_THEN_LOADS: &[u8] = &[
    0xfa, // cli
    0xb8, 0x00, 0x20, // mov ax, 0x2000
    0x8e, 0xd8, // mov ds, ax
    0x66, 0x31, 0xc9, // xor ecx, ecx
    0xba, 0x05, 0x05, // mov dx, 0x505
    0xb0, 0x02, // mov al, 2
    0xee, // out dx, al
    0x66, 0x41, // next: inc ecx
    0x66, 0x39, 0x0e, 0x00, 0x00, // wait: cmp [0], ecx
    0x75, 0xf9, // jne wait
    0x66, 0x89, 0x0e, 0x40, 0x00, // mov [64], ecx
    0xf0, 0x66, 0x83, 0x06, 0x40, 0x01, 0x00, // lock add dword [320], 0
    0x66, 0xa1, 0x80, 0x00, // mov eax, [128]
    0x66, 0xa3, 0xc0, 0x00, // mov [192], eax
    0x66, 0x89, 0x0e, 0x00, 0x01, // mov [256], ecx
    0xeb, 0xdc, // jmp next
];

/// The page of the guest's RAM with the numbers, mapped.
struct Numbers(*mut libc::c_void);

impl Numbers {
    fn map(ram: &File) -> Self {
        let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, ram.as_raw_fd());
        // SAFETY: a new shared mapping of a page inside the file, at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                protection,
                libc::MAP_SHARED,
                fd,
                NUMBERS_AT,
            )
        };
        assert_ne!(
            start,
            libc::MAP_FAILED,
            "{}",
            std::io::Error::last_os_error()
        );
        Self(start)
    }

    fn at(&self, line: usize) -> &AtomicU32 {
        assert!(line * LINE_BYTES < PAGE_BYTES);
        // SAFETY: inside the mapped page and aligned; it lives as long as `self`, and the guest is only ever another
        // user of the same atomic number.
        unsafe { &*self.0.cast::<u8>().add(line * LINE_BYTES).cast() }
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.0, PAGE_BYTES) };
    }
}

/// Rounds made, and those in which neither saw the other's store.
fn race(numbers: &Numbers) -> (u32, u32) {
    let [turn, guest_stored, test_stored, guest_saw, done] = [0, 1, 2, 3, 4].map(|n| numbers.at(n));
    let (deadline, mut both_missed) = (Instant::now() + AT_MOST, 0);
    for round in 1..=ROUNDS {
        turn.store(round, SeqCst);
        // The guest needs a while from here to its store: distances to it vary from round to round.
        for _ in 0..round.wrapping_mul(2_654_435_761) >> 23 {
            std::hint::black_box(round);
        }
        test_stored.store(round, SeqCst);
        let test_saw = guest_stored.load(SeqCst);
        let patience = soon();
        while done.load(SeqCst) != round {
            spin_loop();
            assert!(Instant::now() < patience, "no answer in round {round}");
        }
        if test_saw != round && guest_saw.load(SeqCst) != round {
            both_missed += 1;
        }
        if Instant::now() > deadline {
            return (round, both_missed);
        }
    }
    (ROUNDS, both_missed)
}

#[test]
fn a_lone_emulated_vcpu_orders_its_stores_before_its_loads() {
    let place = Place::new(STORES_THEN_LOADS);
    let guest = place.start();
    let events = guest.machine().events();
    guest.machine().cont(permit(), soon()).expect("cont");
    expect_heartbeat(&events); // the firmware has left the memory alone by now
    let numbers = Numbers::map(&place.ram());
    let (rounds, both_missed) = race(&numbers);
    if rounds < ROUNDS_MIN {
        println!("skipped: {rounds} rounds in {AT_MOST:?} show nothing, two cores are needed");
    }
    assert_eq!(
        both_missed, 0,
        "of {rounds} rounds: driver and device would both have slept"
    );
}
