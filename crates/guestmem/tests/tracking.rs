//! The tracker against the running kernel: what it reports, what it keeps, what it cannot see.
//! A second mapping in this process plays QEMU's part.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "a set may be one run of pages"
)]

mod common;

use std::sync::atomic::AtomicBool;

use common::{Copy, GuestView, Memory, Numbers, fill_page, punch_hole, track};
use godwit_guestmem::{
    CHUNK_PAGES, Collapse, Error, PageSet, RamFile, ScanMode, Tracking, Untracked, collapse,
    tracker,
};
use libc::{MADV_COLLAPSE, MADV_DONTNEED, MADV_POPULATE_WRITE};

const MIB: u64 = 1024 * 1024;
const MODES: [ScanMode; 4] = [
    ScanMode::TwoStep { granule_pages: 512 },
    ScanMode::TwoStep { granule_pages: 1 },
    ScanMode::TwoStep { granule_pages: 0 },
    ScanMode::Everything,
];

/// Guest RAM of some chunks, all of it populated, seen as the guest sees it.
fn guest(memory: &Memory, chunks: u64) -> (RamFile, GuestView) {
    let ram = memory.ram(chunks);
    ram.populate(0..ram.page_count()).expect("there is room");
    let view = GuestView::of(&ram);
    (ram, view)
}

fn scan(tracking: &mut Tracking, ram: &RamFile, mode: ScanMode) -> PageSet {
    let mut dirty = PageSet::new(ram.page_count());
    tracking.scan(&mut dirty, mode).expect("a scan");
    dirty
}

#[test]
fn random_writes_are_reported_exactly_in_every_mode() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 16);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    let mut numbers = Numbers(0x0bad_cafe);
    for round in 0..60 {
        let mut model = PageSet::new(ram.page_count());
        for _ in 0..numbers.below(400) {
            let page = numbers.below(ram.page_count());
            for page in page..(page + numbers.below(20)).min(ram.page_count()) {
                view.write(page, round);
                model.insert(page);
            }
        }
        let mut seen = PageSet::new(ram.page_count());
        let peeked = tracking.peek(&mut seen).expect("a look");
        assert_eq!((seen, peeked), (model.clone(), model.count()));
        let mut dirty = PageSet::new(ram.page_count());
        let mode = MODES[round as usize % MODES.len()];
        let stats = tracking.scan(&mut dirty, mode).expect("a scan");
        assert_eq!(dirty, model, "round {round}, {mode:?}");
        assert_eq!(stats.written_pages, model.count());
        assert!(scan(&mut tracking, &ram, mode).is_empty(), "reported once");
    }
}

#[test]
fn large_memory_is_scanned_in_parts_and_nothing_is_left_out() {
    let Some(memory) = Memory::mount(4096 * MIB) else {
        return;
    };
    let ram = memory.ram(1537);
    let view = GuestView::of(&ram);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    let (count, mut numbers) = (ram.page_count(), Numbers(0x0bad_cafe));
    // Where parts end, by two threads and by three.
    let ends = [2, 3].map(|threads| count.div_ceil(threads).next_multiple_of(CHUNK_PAGES));
    let edges = [
        0,
        ends[0] - 1,
        ends[0],
        ends[1] - 1,
        ends[1],
        2 * ends[1],
        count - 1,
    ];
    let mut model = PageSet::new(count);
    for page in edges
        .into_iter()
        .chain((0..40).map(|_| numbers.below(count)))
    {
        view.write(page, 1);
        model.insert(page);
    }
    let mut seen = PageSet::new(count);
    let peeked = tracking.peek(&mut seen).expect("a look");
    assert_eq!((seen, peeked), (model.clone(), model.count()));
    for mode in MODES {
        let scanned = scan(&mut tracking, &ram, mode);
        assert_eq!(scanned, model, "{mode:?}, and a look changes nothing");
        assert!(scan(&mut tracking, &ram, mode).is_empty(), "{mode:?}");
        model.runs().flatten().for_each(|page| view.write(page, 2));
    }
}

#[test]
fn more_runs_than_one_answer_holds_are_all_reported() {
    let Some(memory) = Memory::mount(256 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 96);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    for mode in MODES {
        let mut model = PageSet::new(ram.page_count());
        for page in (1..ram.page_count()).step_by(2) {
            view.write(page, 1);
            model.insert(page);
        }
        assert_eq!(scan(&mut tracking, &ram, mode), model, "{mode:?}");
    }
}

#[test]
fn a_two_step_scan_leaves_clean_memory_alone() {
    let Some(memory) = Memory::mount(256 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 96);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    let mut dirty = PageSet::new(ram.page_count());
    let idle = tracking
        .scan(&mut dirty, ScanMode::default())
        .expect("a scan");
    assert_eq!((idle.hinted_pages, idle.protect_calls), (0, 0));
    view.write(3, 1);
    view.write(40 * CHUNK_PAGES, 1);
    let busy = tracking
        .scan(&mut dirty, ScanMode::default())
        .expect("a scan");
    assert_eq!(
        (busy.hinted_pages, busy.written_pages, busy.protect_calls),
        (2, 2, 2)
    );
}

#[test]
fn pages_that_did_not_exist_are_tracked_too() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(16);
    let view = GuestView::of(&ram);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    assert!(scan(&mut tracking, &ram, ScanMode::default()).is_empty());
    assert_eq!(view.read(9), 0);
    for page in [0, 700, ram.page_count() - 1] {
        view.write(page, 5);
    }
    let runs: Vec<_> = scan(&mut tracking, &ram, ScanMode::default())
        .runs()
        .collect();
    assert_eq!(runs, [0..1, 700..701, 8191..8192]);
}

#[test]
fn written_pages_that_are_unmapped_stay_reported() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 16);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    for mode in MODES {
        let mut model = PageSet::new(ram.page_count());
        for page in [1, 2, 3, 600, 4000].into_iter().chain(1024..1536) {
            view.write(page, 5);
            model.insert(page);
        }
        view.advise(2..3, MADV_DONTNEED);
        view.advise(512..1024, MADV_DONTNEED);
        view.advise(1024..1536, MADV_DONTNEED);
        view.advise(3584..8192, MADV_DONTNEED);
        assert_eq!(scan(&mut tracking, &ram, mode), model, "{mode:?}");
        assert_eq!(view.read(1100), 5);
        assert!(
            scan(&mut tracking, &ram, mode).is_empty(),
            "reading is not writing"
        );
    }
}

#[test]
fn collapsing_through_another_mapping_loses_nothing() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 4);
    let other = GuestView::of(&ram);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    view.write(100, 1);
    view.write(700, 1);
    other.advise(0..1024, MADV_COLLAPSE);
    let runs: Vec<_> = scan(&mut tracking, &ram, ScanMode::default())
        .runs()
        .collect();
    assert_eq!(runs, [100..101, 700..701]);
    view.write(101, 1);
    let runs: Vec<_> = scan(&mut tracking, &ram, ScanMode::default())
        .runs()
        .collect();
    assert_eq!(runs, [101..102]);
}

/// Why our own writes need a set of our own, and why a VM with a balloon is refused.
#[test]
fn other_mappings_and_punched_holes_are_not_seen() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 4);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    fill_page(&ram, 50, 7);
    punch_hole(&ram, 512..1024);
    assert!(scan(&mut tracking, &ram, ScanMode::default()).is_empty());
    assert!(scan(&mut tracking, &ram, ScanMode::Everything).is_empty());
    assert_eq!(
        view.read(50),
        0x0707_0707_0707_0707,
        "and yet the page changed"
    );
}

/// In each lap a writer writes every page exactly once while we scan and copy; after it has ended,
/// one last scan must make the copy equal to guest RAM. Once only, since a later write would hide
/// that an earlier one was lost.
fn copy_while_written(mode: ScanMode) {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 8);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    let mut copy = Copy::of(&ram);
    for lap in 1..=40 {
        std::thread::scope(|scope| {
            let writer =
                scope.spawn(|| (0..ram.page_count()).for_each(|page| view.write(page, lap)));
            while !writer.is_finished() {
                copy.update(&ram, &scan(&mut tracking, &ram, mode));
            }
        });
        copy.update(&ram, &scan(&mut tracking, &ram, ScanMode::Everything));
        assert_eq!(copy.differing(&ram), [0_u64; 0], "lap {lap}");
    }
}

#[test]
fn writes_during_a_two_step_scan_are_never_lost() {
    copy_while_written(ScanMode::default());
}

#[test]
fn writes_during_a_fine_two_step_scan_are_never_lost() {
    copy_while_written(ScanMode::TwoStep { granule_pages: 1 });
}

#[test]
fn writes_during_a_whole_scan_are_never_lost() {
    copy_while_written(ScanMode::Everything);
}

#[test]
fn stopping_lifts_protection_and_tracking_starts_again() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 4);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    let second = second_tracker(&view);
    assert!(second.is_err(), "two trackers on one memory: {second:?}");
    view.write(3, 1);
    let runs: Vec<_> = scan(&mut tracking, &ram, ScanMode::default())
        .runs()
        .collect();
    assert_eq!(runs, [3..4], "the refused one changed nothing");
    let untracked = tracking.stop().expect("stopped");
    view.write(1, 1);
    let mut tracking = untracked.start().expect("started again");
    view.write(2, 1);
    let runs: Vec<_> = scan(&mut tracking, &ram, ScanMode::default())
        .runs()
        .collect();
    assert_eq!(runs, [2..3]);
    drop(tracking);
    second_tracker(&view).expect("dropping freed the memory for another tracker");
}

fn second_tracker(view: &GuestView) -> Result<Tracking, Error> {
    let pagemap = tracker::open_pagemap(std::process::id())?;
    Untracked::new(tracker::own_uffd()?, pagemap, view.mapping())?.start()
}

#[test]
fn a_vanished_mapping_is_an_error_and_everything_counts_as_dirty() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 4);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    drop(view);
    for mode in MODES {
        let mut dirty = PageSet::new(ram.page_count());
        let gone = tracking.scan(&mut dirty, mode);
        assert!(matches!(gone, Err(Error::TrackingLost)), "{gone:?}");
        assert_eq!(dirty, PageSet::full(ram.page_count()));
    }
    let mut wrong = PageSet::new(1);
    let refused = tracking.scan(&mut wrong, ScanMode::default());
    assert!(matches!(refused, Err(Error::SetSize { .. })), "{refused:?}");
}

/// QEMU maps RAM anew where the hardware has reported a broken page.
#[test]
fn a_part_that_was_mapped_anew_is_an_error() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let (ram, view) = guest(&memory, 4);
    let Some(mut tracking) = track(&view) else {
        return;
    };
    view.map_anew(&ram, 700..701);
    for mode in MODES {
        let mut dirty = PageSet::new(ram.page_count());
        let refused = tracking.scan(&mut dirty, mode);
        assert!(
            matches!(refused, Err(Error::TrackingLost)),
            "{mode:?}: {refused:?}"
        );
        assert_eq!(dirty.count(), ram.page_count());
    }
}

#[test]
fn huge_pages_come_back_after_tracking() {
    let Some(memory) = Memory::mount(64 * MIB) else {
        return;
    };
    let ram = memory.ram(16);
    ram.populate(0..15 * CHUNK_PAGES).expect("there is room");
    let view = GuestView::of(&ram);
    view.advise(0..15 * CHUNK_PAGES, MADV_POPULATE_WRITE);
    let own = std::process::id();
    let huge = || collapse::huge_mapped_bytes(own, &view.mapping()).expect("smaps");
    if huge() == 0 {
        println!("skipped: this kernel gives tmpfs no huge pages");
        return;
    }
    let before = huge();
    let Some(mut tracking) = track(&view) else {
        return;
    };
    (0..15 * CHUNK_PAGES).for_each(|page| view.write(page, page));
    scan(&mut tracking, &ram, ScanMode::default());
    assert_eq!(huge(), 0, "tracking splits huge pages");
    drop(tracking);
    let pidfd = collapse::open_pidfd(own).expect("pidfd");
    let mapping = view.mapping();
    let job = Collapse {
        pidfd: std::os::fd::AsFd::as_fd(&pidfd),
        mapping: &mapping,
        ram: &ram,
        pause: std::time::Duration::ZERO,
    };
    let cancelled = job.run(&AtomicBool::new(true)).expect("cancelled");
    assert!(cancelled.cancelled && cancelled.collapsed == 0);
    let counts = job.run(&AtomicBool::new(false)).expect("collapsed");
    println!("{counts:?}, {} of {before} bytes huge again", huge());
    assert_eq!((counts.collapsed + counts.failed, counts.empty), (15, 1));
    assert_eq!(huge(), counts.collapsed * 2 * MIB);
    assert!(counts.collapsed > 0, "not one huge page came back");
    assert!((0..15 * CHUNK_PAGES).all(|page| view.read(page) == page));
}
