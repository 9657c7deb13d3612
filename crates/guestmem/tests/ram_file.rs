//! Guest RAM as a file: sizes, owners, holes, zero pages, a full tmpfs, huge pages.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "a set may be one run of pages"
)]

mod common;

use std::os::unix::fs::MetadataExt;

use common::{Memory, fill_page, punch_hole, read_page};
use godwit_guestmem::{
    CHUNK_PAGES, CHUNK_SIZE, Error, Owner, PAGE_SIZE, RamFile, mem_tmpfs, page_set,
};

const MIB: u64 = 1024 * 1024;
const ALL: [u64; page_set::CHUNK_WORDS] = [u64::MAX; page_set::CHUNK_WORDS];

#[test]
fn a_new_file_is_private_owned_by_qemu_and_empty() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let owner = Owner {
        uid: 65534,
        gid: 65533,
    };
    let ram = RamFile::create(&memory.ram_path(), 16 * MIB, Some(owner)).expect("created");
    let metadata = std::fs::metadata(ram.path()).expect("it exists");
    assert_eq!((metadata.uid(), metadata.gid()), (65534, 65533));
    assert_eq!(metadata.mode() & 0o7777, 0o600);
    assert_eq!(metadata.blocks(), 0);
    assert_eq!(ram.page_count(), 4096);
    assert_eq!(ram.data_extents(0..4096).expect("extents"), []);

    let again = RamFile::create(&memory.ram_path(), 16 * MIB, None);
    assert!(
        matches!(again, Err(Error::File { .. })),
        "it exists already"
    );
    let opened = RamFile::open(&memory.ram_path(), 16 * MIB).expect("opened");
    assert_eq!(opened.page_count(), 4096);
    assert_eq!(
        opened.identity().expect("identity"),
        ram.identity().expect("identity")
    );
}

#[test]
fn a_file_whose_length_was_changed_is_no_guests_memory() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = RamFile::create(&memory.ram_path(), 16 * MIB, None).expect("created");
    ram.check_length().expect("as it was made");
    // As QEMU's user may: to 64 TiB without a page behind it, a little, and to nothing.
    for bytes in [64 << 40, 18 * MIB, 16 * MIB + 1, 14 * MIB, 0] {
        let file = std::fs::File::options().write(true).open(ram.path());
        file.and_then(|file| file.set_len(bytes)).expect("resized");
        let refused = [
            RamFile::open(ram.path(), 16 * MIB).map(drop),
            ram.check_length(),
        ];
        for refused in refused {
            let error = refused.expect_err("another length").to_string();
            let told = format!("has {bytes} bytes, and the guest has 16777216 bytes of memory");
            assert!(error.contains(&told), "{error}");
        }
    }
}

#[test]
fn sizes_that_huge_pages_cannot_back_are_refused_and_leave_no_file() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    for bytes in [0, 4096, 2 * MIB + 4096, u64::MAX] {
        let refused = RamFile::create(&memory.ram_path(), bytes, None);
        assert!(matches!(refused, Err(Error::Size { .. })), "{bytes}");
        assert!(!memory.ram_path().exists());
    }
    // A size that no file system takes fails after the file was made.
    let huge = RamFile::create(&memory.ram_path(), 1 << 62, None);
    assert!(huge.is_err());
    assert!(!memory.ram_path().exists());
}

#[test]
fn pages_outside_the_file_are_refused() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(2);
    ram.populate(0..1024).expect("there is room");
    for (first, count) in [(1024, 1), (0, 1025), (u64::MAX, 2), (5, u64::MAX)] {
        let refused = ram.with_pages(first, count, |bytes| bytes.len());
        assert!(
            matches!(refused, Err(Error::OutOfRange { .. })),
            "{first} {count}"
        );
        let refused = ram.with_pages_mut(first, count, |bytes| bytes.len());
        assert!(
            matches!(refused, Err(Error::OutOfRange { .. })),
            "{first} {count}"
        );
    }
    assert!(ram.populate(1000..1025).is_err());
    assert_eq!(
        ram.with_pages(1023, 1, |bytes| bytes.len())
            .expect("last page"),
        PAGE_SIZE
    );
    assert_eq!(
        ram.with_pages(1024, 0, |bytes| bytes.len())
            .expect("no page"),
        0
    );
}

#[test]
fn holes_are_named_not_touched() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(4);
    let blocks = || std::fs::metadata(ram.path()).expect("it exists").blocks();
    let mut page = [0; PAGE_SIZE];
    assert!(matches!(
        read_page(&ram, 7, &mut page),
        Err(Error::Hole { page: 7 })
    ));
    assert!(matches!(
        ram.with_pages_mut(7, 1, |_| ()),
        Err(Error::Hole { page: 7 })
    ));
    assert!(ram.with_pages_mut(500, 20, |_| ()).is_err());
    let content = ram.classify_chunk(512, ALL).expect("a chunk of holes");
    assert_eq!((content.data_count(), content.zero_count()), (0, 512));
    assert_eq!(blocks(), 0, "looking at holes allocates nothing");

    ram.populate(600..601).expect("there is room");
    assert_eq!(blocks() * 512, CHUNK_SIZE as u64);
    let across = ram.with_pages(1000, 100, |_| ());
    assert!(
        matches!(across, Err(Error::Hole { page: 1024 })),
        "{across:?}"
    );
}

#[test]
fn data_is_found_by_a_second_process_that_only_opens_the_file() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(4);
    ram.populate(512..1024).expect("there is room");
    ram.with_pages_mut(700, 3, |bytes| bytes[PAGE_SIZE] = 1)
        .expect("populated");
    let other = RamFile::open(ram.path(), ram.byte_count()).expect("opened");
    assert_eq!(other.data_extents(0..2048).expect("extents"), [512..1024]);
    assert_eq!(other.data_extents(600..610).expect("extents"), [600..610]);
    let content = other.classify_chunk(512, ALL).expect("classified");
    assert_eq!(content.data_runs(), [701..702]);
    assert_eq!(content.zero_count(), 511);
    let mut page = [0; PAGE_SIZE];
    read_page(&other, 701, &mut page).expect("it has memory");
    assert_eq!(page[0], 1);
}

#[test]
fn zeroed_pages_and_holes_read_as_zero_and_only_holes_cost_nothing() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(4);
    ram.populate(0..512).expect("there is room");
    ram.with_pages_mut(0, 512, |bytes| bytes.fill(0xaa))
        .expect("populated");
    ram.write_zero(10..20).expect("zeroed");
    ram.write_zero(1030..1500)
        .expect("zeroing holes does nothing");
    let content = ram.classify_chunk(0, ALL).expect("classified");
    assert_eq!(content.data_runs(), [0..10, 20..512]);
    let content = ram.classify_chunk(512, ALL).expect("classified");
    assert_eq!(content.zero_count(), 512);
    assert_eq!(ram.data_extents(0..2048).expect("extents"), [0..512]);
    assert!(matches!(
        ram.with_pages(512, 1, |_| ()),
        Err(Error::Hole { page: 512 })
    ));
}

#[test]
fn scattered_runs_are_lent_together_and_nothing_between_them() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(3);
    ram.populate(0..CHUNK_PAGES).expect("there is room");
    ram.populate(2 * CHUNK_PAGES..3 * CHUNK_PAGES)
        .expect("there is room");
    for page in [3, 4, 1500] {
        fill_page(&ram, page, page as u8);
    }
    let seen = ram.with_runs(&[3..5, 1500..1501], |runs| {
        let ends = |run: &[u8]| (run.len(), run.first().copied(), run.last().copied());
        runs.iter().map(|run| ends(run)).collect::<Vec<_>>()
    });
    let page = |page: u64| Some(page as u8);
    let expected = [
        (2 * PAGE_SIZE, page(3), page(4)),
        (PAGE_SIZE, page(1500), page(1500)),
    ];
    assert_eq!(seen.expect("both have memory"), expected);
    assert_eq!(
        ram.data_extents(0..1536).expect("extents"),
        [0..512, 1024..1536]
    );

    let hole = ram.with_runs(&[3..5, 600..601, 1500..1501], |_| ());
    assert!(matches!(hole, Err(Error::Hole { page: 600 })), "{hole:?}");
    let backwards = std::ops::Range { start: 9, end: 8 };
    for wrong in [&[1500..1501, 3..5][..], &[0..1, 1500..1537], &[backwards]] {
        let refused = ram.with_runs(wrong, |_| ());
        assert!(
            matches!(refused, Err(Error::OutOfRange { .. })),
            "{wrong:?}: {refused:?}"
        );
    }
    assert_eq!(ram.with_runs(&[], |runs| runs.len()).expect("nothing"), 0);
}

#[test]
fn two_writers_of_one_page_are_refused_and_readers_are_not() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(2);
    ram.populate(0..1024).expect("there is room");
    let inner = ram.with_pages_mut(100, 50, |_| {
        assert!(ram.with_pages_mut(150, 10, |_| ()).is_ok(), "next to it");
        assert!(ram.with_pages(100, 50, |_| ()).is_ok(), "a reader");
        ram.with_pages_mut(149, 1, |_| ())
    });
    let inner = inner.expect("the outer writer");
    assert!(
        matches!(
            inner,
            Err(Error::Busy {
                first: 149,
                last: 149
            })
        ),
        "{inner:?}"
    );
    ram.with_pages_mut(100, 50, |_| ())
        .expect("released afterwards");
}

#[test]
fn stored_pages_bring_their_memory_along() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(4);
    assert!(!ram.has_memory(0..1));
    ram.store(510, &[7; 4 * PAGE_SIZE]).expect("there is room");
    assert!(ram.has_memory(510..514) && !ram.has_memory(510..515));
    assert_eq!(ram.without_memory(500..520), 16);
    // Now into memory that is there, and beside it into the same huge pages.
    ram.store(511, &[8; PAGE_SIZE]).expect("there is room");
    ram.store(514, &[9; PAGE_SIZE]).expect("there is room");
    let ends = |pages: &[u8]| (pages.first().copied(), pages.last().copied());
    let page = |page| ram.with_pages(page, 1, ends).expect("it has memory");
    let expected = [(510, 7), (511, 8), (512, 7), (513, 7), (514, 9)];
    for (number, byte) in expected {
        assert_eq!(page(number), (Some(byte), Some(byte)), "{number}");
    }
    let other = RamFile::open(ram.path(), ram.byte_count()).expect("opened");
    let content = other.classify_chunk(0, ALL).expect("classified");
    assert_eq!(content.data_runs(), [510..512]);
}

#[test]
fn where_there_are_no_huge_pages_a_scattered_page_takes_no_more_than_itself() {
    let shm = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    if !shm.is_ok_and(|text| text.contains("[never]")) {
        println!("skipped: this kernel gives every shared memory huge pages");
        return;
    }
    let path = format!("/dev/shm/godwit-scattered-{}", std::process::id());
    let ram = RamFile::create(path.as_ref(), 4 * MIB, None).expect("created");
    let metadata = std::fs::metadata(&path);
    std::fs::remove_file(&path).expect("removed");
    assert_eq!(metadata.expect("it exists").blocks(), 0);
    ram.store(700, &[7; PAGE_SIZE]).expect("there is room");
    let held: u64 = (ram.data_extents(0..1024).expect("extents").iter())
        .map(|extent| extent.end - extent.start)
        .sum();
    assert_eq!(held, 1);
}

#[test]
fn storing_refuses_parts_of_pages_strange_pages_and_taken_ones() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(2);
    for (first, len) in [
        (0, PAGE_SIZE + 1),
        (1023, 2 * PAGE_SIZE),
        (u64::MAX, PAGE_SIZE),
    ] {
        let refused = ram.store(first, &vec![1; len]);
        assert!(
            matches!(refused, Err(Error::OutOfRange { .. })),
            "{first} {len}: {refused:?}"
        );
    }
    assert_eq!(ram.data_extents(0..1024).expect("extents"), []);
    ram.populate(0..512).expect("there is room");
    let inner = ram.with_pages_mut(500, 4, |_| ram.store(503, &[1; 2 * PAGE_SIZE]));
    assert!(matches!(inner, Ok(Err(Error::Busy { .. }))), "{inner:?}");
}

#[test]
fn many_threads_store_at_once() {
    let Some(memory) = Memory::mount(128 * MIB) else {
        return;
    };
    let ram = memory.ram(32);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let ram = &ram;
            scope.spawn(move || {
                // Neighbours in the same huge page come from different threads.
                for page in (thread..ram.page_count()).step_by(4) {
                    let mut bytes = [0; PAGE_SIZE];
                    bytes.fill((page % 251) as u8 + 1);
                    ram.store(page, &bytes).expect("there is room");
                }
            });
        }
    });
    for page in 0..ram.page_count() {
        let mut bytes = [0; PAGE_SIZE];
        read_page(&ram, page, &mut bytes).expect("it has memory");
        assert!(
            bytes.iter().all(|&byte| byte == (page % 251) as u8 + 1),
            "{page}"
        );
    }
}

#[test]
fn a_store_that_finds_no_room_says_so() {
    let Some(memory) = Memory::mount(4 * MIB) else {
        return;
    };
    let ram = memory.ram(4);
    let piece = vec![5; CHUNK_SIZE];
    ram.store(0, &piece).expect("there is room");
    let (stored, full) = (1..4)
        .map(|chunk| ram.store(chunk * CHUNK_PAGES, &piece))
        .partition::<Vec<_>, _>(Result::is_ok);
    assert_eq!((stored.len(), full.len()), (1, 2));
    for full in full {
        let full = full.expect_err("no room");
        assert!(matches!(full, Error::OutOfMemory { .. }), "{full:?}");
    }
    assert!(!ram.has_memory(3 * CHUNK_PAGES..4 * CHUNK_PAGES));
}

/// A store into a hole of a full tmpfs would end the process with SIGBUS, a load too.
#[test]
fn a_full_tmpfs_is_an_error_and_never_sigbus() {
    let Some(memory) = Memory::mount(6 * MIB) else {
        return;
    };
    let ram = memory.ram(8);
    let full = ram
        .populate(0..ram.page_count())
        .expect_err("16 MiB do not fit 6 MiB");
    let Error::OutOfMemory { page, .. } = &full else {
        panic!("{full:?}");
    };
    assert_eq!(*page, 3 * CHUNK_PAGES);
    assert!(
        full.to_string().starts_with("destination out of memory"),
        "{full}"
    );
    ram.with_pages_mut(0, *page, |bytes| bytes.fill(7))
        .expect("what was populated is usable");
    for page in [*page, ram.page_count() - 1] {
        assert!(matches!(
            ram.with_pages_mut(page, 1, |_| ()),
            Err(Error::Hole { .. })
        ));
        assert!(matches!(
            ram.with_pages(page, 1, |_| ()),
            Err(Error::Hole { .. })
        ));
    }
    punch_hole(&ram, 0..CHUNK_PAGES);
    ram.populate(4 * CHUNK_PAGES..5 * CHUNK_PAGES)
        .expect("there is room again");
    assert!(mem_tmpfs::available_bytes(memory.path()).expect("statvfs") < CHUNK_SIZE as u64);
}

#[test]
fn populating_keeps_content_and_works_from_several_threads() {
    let Some(memory) = Memory::mount(128 * MIB) else {
        return;
    };
    let ram = memory.ram(32);
    ram.populate(0..1).expect("there is room");
    fill_page(&ram, 5, 9);
    let second = RamFile::open(ram.path(), ram.byte_count()).expect("opened");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let second = &second;
            scope.spawn(move || {
                let first = thread * 8 * CHUNK_PAGES;
                second
                    .populate(first..first + 8 * CHUNK_PAGES)
                    .expect("there is room");
            });
        }
    });
    let nine = second.with_pages(0, ram.page_count(), |bytes| {
        bytes.iter().filter(|&&byte| byte != 0).count()
    });
    assert_eq!(nine.expect("populated"), PAGE_SIZE);
}

/// Whether this kernel gives a file on the tmpfs huge pages at all.
fn gives_huge_pages(memory: &Memory) -> bool {
    let probe = memory.path().join("probe");
    let ram = RamFile::create(&probe, CHUNK_SIZE as u64, None).expect("created");
    std::fs::remove_file(&probe).expect("removed");
    ram.populate(0..CHUNK_PAGES).expect("there is room");
    mem_tmpfs::own_huge_bytes(&ram).expect("smaps") == CHUNK_SIZE as u64
}

#[test]
fn the_mount_is_made_once_and_gives_huge_pages() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let again = mem_tmpfs::ensure_mounted(memory.path(), 64 * MIB).expect("mounted");
    assert_eq!(again, mem_tmpfs::Mounted::Already);
    assert!(mem_tmpfs::is_tmpfs(memory.path()).expect("statfs"));
    assert_eq!(
        std::fs::metadata(memory.path()).expect("it exists").mode() & 0o7777,
        0o711
    );
    if !gives_huge_pages(&memory) {
        println!("skipped: this kernel gives tmpfs no huge pages");
        return;
    }
    let ram = memory.ram(8);
    ram.populate(0..ram.page_count()).expect("there is room");
    assert_eq!(
        mem_tmpfs::own_huge_bytes(&ram).expect("smaps"),
        ram.byte_count()
    );
    let proc = mem_tmpfs::ensure_mounted(std::path::Path::new("/proc"), MIB);
    assert!(proc.is_err(), "something else is mounted there");
}
