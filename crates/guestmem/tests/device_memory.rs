//! What devices of ours write into guest memory, beside a tracker on the running kernel.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "a set may be one run of pages"
)]

mod common;

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{GuestView, Memory, track};
use godwit_guestmem::device_memory::{REGIONS_MAX, VECTORS_MAX, device_memory};
use godwit_guestmem::{
    CHUNK_SIZE, DeviceMemory, DeviceReadable, DeviceWritable, Error, PAGE_SIZE, PageSet, RamFile,
    RegionPlace, ScanMode, Tracking,
};
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 1024 * 1024;
const PAGE: u64 = PAGE_SIZE as u64;
/// Where the upper half of guest RAM is, as above a hole below 4 GiB.
const HIGH: u64 = 1 << 32;
const MODES: [ScanMode; 2] = [
    ScanMode::TwoStep { granule_pages: 512 },
    ScanMode::Everything,
];

struct Guest {
    ram: Arc<RamFile>,
    view: GuestView,
    memory: DeviceMemory,
    _mount: Memory,
}

/// A guest of four chunks, the upper two of them above 4 GiB.
fn guest() -> Option<Guest> {
    let mount = Memory::mount(64 * MIB)?;
    let ram = Arc::new(mount.ram(4));
    ram.populate(0..ram.page_count()).expect("there is room");
    let half = ram.byte_count() / 2;
    let places = [place(HIGH, half, half), place(0, 0, half)];
    let memory = device_memory(&ram, &places).expect("the regions are good");
    Some(Guest {
        view: GuestView::of(&ram),
        memory,
        ram,
        _mount: mount,
    })
}

fn place(guest: u64, offset: u64, bytes: u64) -> RegionPlace {
    RegionPlace {
        guest,
        offset,
        bytes,
    }
}

impl Guest {
    fn peek(&self, tracking: &mut Tracking) -> Vec<std::ops::Range<u64>> {
        let mut seen = PageSet::new(self.ram.page_count());
        let count = tracking.peek(&mut seen).expect("a look");
        assert_eq!(count, seen.count());
        seen.runs().collect()
    }

    fn scan(&self, tracking: &mut Tracking, mode: ScanMode) -> Vec<std::ops::Range<u64>> {
        let mut dirty = PageSet::new(self.ram.page_count());
        tracking.scan(&mut dirty, mode).expect("a scan");
        dirty.runs().collect()
    }

    /// Has the kernel read a file of this byte into the buffers.
    fn read_into(&self, buffers: &mut DeviceWritable, byte: u8) {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&vec![byte; buffers.bytes()])
            .expect("it takes the bytes");
        let len = buffers.bytes();
        let iovecs = buffers.lend();
        // SAFETY: the vectors are guest memory that is mapped as long as the buffers live.
        let read = unsafe {
            libc::preadv(
                file.as_raw_fd(),
                iovecs.as_ptr(),
                iovecs.len().try_into().expect("they are few"),
                0,
            )
        };
        assert_eq!(usize::try_from(read).ok(), Some(len));
    }
}

#[test]
fn what_a_device_writes_is_seen_once_by_a_scan_and_as_often_as_one_looks() {
    let Some(guest) = guest() else { return };
    let Some(mut tracking) = track(&guest.view) else {
        return;
    };
    for mode in MODES {
        let ring = GuestAddress(5 * PAGE);
        let store = guest.memory.store(7_u16, ring, Ordering::Release);
        store.expect("the ring is the guest's");
        let across = GuestAddress(10 * PAGE - 2);
        guest.memory.write_slice(&[1; 4], across).expect("so is it");
        guest.view.write(1500, 1);
        let written = [5..6, 9..11, 1500..1501];
        assert_eq!(guest.peek(&mut tracking), written);
        assert_eq!(guest.peek(&mut tracking), written, "{mode:?}");
        assert_eq!(guest.scan(&mut tracking, mode), written, "{mode:?}");
        assert_eq!(guest.scan(&mut tracking, mode), [], "reported once");
    }
    let read: u16 = guest
        .memory
        .load(GuestAddress(5 * PAGE), Ordering::Acquire)
        .expect("the guest's");
    assert_eq!(u64::from(read), guest.view.read(5) & 0xffff);
    assert_eq!(guest.peek(&mut tracking), [], "reading is not writing");
}

#[test]
fn what_the_kernel_writes_for_a_device_counts_from_its_end_on() {
    let Some(guest) = guest() else { return };
    let Some(mut tracking) = track(&guest.view) else {
        return;
    };
    let mut buffers = DeviceWritable::new(&guest.ram);
    for (address, len) in [(HIGH + 100, 200), (3 * PAGE, 2 * PAGE_SIZE)] {
        let pushed = buffers.push(&guest.memory, address, len);
        pushed.expect("the guest has that memory");
    }
    assert_eq!(buffers.bytes(), 200 + 2 * PAGE_SIZE);
    guest.read_into(&mut buffers, 0xab);
    assert_eq!(guest.view.read(4), 0xabab_abab_abab_abab);
    assert_eq!(guest.peek(&mut tracking), [], "the kernel does not tell");
    buffers.written();
    let written = [3..5, 1024..1025];
    assert_eq!(guest.scan(&mut tracking, ScanMode::default()), written);
    let mut buffers = DeviceWritable::new(&guest.ram);
    buffers.push(&guest.memory, 0, 1).expect("the guest's");
    guest.read_into(&mut buffers, 1);
    drop(buffers);
    let forgotten = guest.scan(&mut tracking, ScanMode::default());
    assert_eq!(forgotten, [0..1], "a dropped request loses no write");
}

#[test]
fn a_request_that_was_never_begun_makes_no_page_dirty() {
    let Some(guest) = guest() else { return };
    let Some(mut tracking) = track(&guest.view) else {
        return;
    };
    let mut buffers = DeviceWritable::new(&guest.ram);
    for _ in 0..2 {
        let pushed = buffers.push(&guest.memory, HIGH, CHUNK_SIZE);
        pushed.expect("the guest's");
        buffers.written();
    }
    assert_eq!(buffers.bytes(), 2 * CHUNK_SIZE, "they can be lent yet");
    buffers.push(&guest.memory, 0, 1).expect("the guest's");
    drop(buffers);
    assert_eq!(guest.scan(&mut tracking, ScanMode::default()), []);
}

#[test]
fn what_was_written_before_tracking_begins_is_not_reported_again() {
    let Some(guest) = guest() else { return };
    let all = vec![1; CHUNK_SIZE];
    let write = guest.memory.write_slice(&all, GuestAddress(0));
    write.expect("the guest's");
    let Some(mut tracking) = track(&guest.view) else {
        return;
    };
    assert_eq!(guest.scan(&mut tracking, ScanMode::default()), []);
}

#[test]
fn buffers_are_cut_where_the_guests_memory_is_and_refused_where_it_is_not() {
    let Some(guest) = guest() else { return };
    let half = guest.ram.byte_count() / 2;
    let places = [place(0, half, half), place(half, 0, half)];
    let memory = device_memory(&guest.ram, &places).expect("one after the other");
    let mut buffers = DeviceReadable::new(&guest.ram);
    buffers
        .push(&memory, half - 10, 30)
        .expect("it is in both regions");
    let lens: Vec<usize> = buffers.iovecs().iter().map(|iovec| iovec.iov_len).collect();
    assert_eq!((lens, buffers.bytes()), (vec![10, 20], 30));
    let low = guest.ram.own_mapping().segments()[0].address;
    assert_eq!(buffers.iovecs()[1].iov_base as u64, low);
    for (address, len) in [
        (2 * half, 1),
        (2 * half - 1, 2),
        (u64::MAX, 1),
        (half, usize::MAX),
    ] {
        let refused = buffers.push(&memory, address, len);
        assert!(matches!(refused, Err(Error::DeviceAddress { .. })));
        assert_eq!(buffers.bytes(), 30, "nothing of it is added");
    }
    let beyond = memory.load::<u16>(GuestAddress(2 * half - 1), Ordering::Acquire);
    beyond.expect_err("a part of it is outside");
    let other = guest_of_another();
    let strange = buffers.push(&other, 0, 1);
    assert!(matches!(strange, Err(Error::DeviceAddress { .. })));
    let mut buffers = DeviceReadable::new(&guest.ram);
    for _ in 0..VECTORS_MAX {
        let pushed = buffers.push(&memory, 0, 1);
        pushed.expect("the kernel takes so many");
    }
    let one_more = buffers.push(&memory, 0, 1);
    assert!(matches!(one_more, Err(Error::Vectors { .. })));
    assert_eq!(buffers.bytes(), VECTORS_MAX);
}

/// The memory of another guest, whose file has no name any more.
fn guest_of_another() -> DeviceMemory {
    let dir = tempfile::tempdir().expect("a directory");
    let ram = RamFile::create(&dir.path().join("ram"), CHUNK_SIZE as u64, None);
    let ram = Arc::new(ram.expect("a RAM file"));
    device_memory(&ram, &[place(0, 0, CHUNK_SIZE as u64)]).expect("a region")
}

#[test]
fn regions_that_cannot_be_are_refused_with_the_reason() {
    let Some(guest) = guest() else { return };
    let all = guest.ram.byte_count();
    let many = vec![place(0, 0, PAGE); REGIONS_MAX + 1];
    let cases: [(&[RegionPlace], &str); 8] = [
        (&[], "No memory region"),
        (&many, "are more than"),
        (&[place(0, 0, PAGE), place(0, PAGE, PAGE)], "intersect"),
        (&[place(0, PAGE, all)], "guest RAM ends before"),
        (
            &[place(0, u64::MAX - PAGE + 1, PAGE)],
            "guest RAM ends before",
        ),
        (&[place(0, 0, 0)], "no whole pages"),
        (&[place(1, 0, PAGE)], "no whole pages"),
        (&[place(u64::MAX - PAGE + 1, 0, PAGE)], "no address"),
    ];
    for (places, why) in cases {
        let refused = device_memory(&guest.ram, places);
        let error = refused.expect_err("it cannot be").to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_ring_in_memory_for_which_there_is_no_room_is_an_error_and_no_signal() {
    let Some(mount) = Memory::mount(4 * MIB) else {
        return;
    };
    let ram = Arc::new(mount.ram(4));
    let memory = device_memory(&ram, &[place(0, 0, ram.byte_count())]).expect("a region");
    let first = memory.store(1_u16, GuestAddress(0), Ordering::Release);
    first.expect("there is room for a page");
    let (mut refused, chunk) = (0, CHUNK_SIZE as u64);
    for number in 0..4 {
        let all = memory.write_slice(&vec![1; CHUNK_SIZE], GuestAddress(number * chunk));
        refused += u32::from(all.is_err());
    }
    assert!(refused > 0, "the file is larger than its file system");
}

#[test]
fn no_write_of_a_device_is_lost_between_two_scans() {
    let Some(guest) = guest() else { return };
    let Some(mut tracking) = track(&guest.view) else {
        return;
    };
    let pages = guest.ram.page_count() / 2;
    let mut copy = vec![0_u64; pages as usize];
    let mut copy_written = |copy: &mut Vec<u64>| {
        let written = guest.scan(&mut tracking, ScanMode::default());
        for page in written.into_iter().flatten() {
            copy[page as usize] = guest.view.read(page);
        }
    };
    // Each page is written once a lap and compared after it, so that no later write hides that one was missed.
    for lap in 1..=400 {
        std::thread::scope(|scope| {
            let device = scope.spawn(|| {
                for page in 0..pages {
                    let at = GuestAddress(page * PAGE);
                    let stored = guest.memory.store(lap, at, Ordering::Release);
                    stored.expect("the guest's");
                }
            });
            while !device.is_finished() {
                copy_written(&mut copy);
            }
        });
        copy_written(&mut copy);
        let stale = copy.iter().filter(|&&value| value != lap).count();
        assert_eq!(stale, 0, "pages whose write in lap {lap} was missed");
    }
}
