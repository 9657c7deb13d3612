//! What the tests of this crate share: a tmpfs of their own, a second mapping of guest RAM that
//! plays QEMU's part, and a tracker on it.
//!
//! Each test owns its mount and its mapping; both go when the value is dropped.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of this"
)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use godwit_guestmem::{
    CHUNK_SIZE, Error, GuestMapping, PAGE_SIZE, PageSet, RamFile, Tracking, Untracked, mem_tmpfs,
    tracker,
};
use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::UnmountFlags;

/// A tmpfs with huge pages, mounted for one test.
pub struct Memory {
    directory: tempfile::TempDir,
}

impl Memory {
    /// Mounts it, or says why the test is skipped.
    pub fn mount(bytes: u64) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: mounting a tmpfs needs root");
            return None;
        }
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let mounted = mem_tmpfs::ensure_mounted(directory.path(), bytes);
        assert_eq!(
            mounted.expect("a tmpfs can be mounted"),
            mem_tmpfs::Mounted::Now
        );
        Some(Self { directory })
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn ram_path(&self) -> PathBuf {
        self.path().join("ram")
    }

    /// Guest RAM of this many chunks of 2 MiB.
    pub fn ram(&self, chunks: u64) -> RamFile {
        RamFile::create(&self.ram_path(), chunks * CHUNK_SIZE as u64, None)
            .expect("a RAM file can be created")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = rustix::mount::unmount(self.path(), UnmountFlags::DETACH) {
            println!("{} stays mounted: {error}", self.path().display());
        }
    }
}

/// A second mapping of guest RAM in this process, in the place of QEMU's.
pub struct GuestView {
    base: *mut u8,
    pages: u64,
    mapping: GuestMapping,
}

// SAFETY: plain memory, accessed by volatile operations and system calls only.
unsafe impl Send for GuestView {}
// SAFETY: as above.
unsafe impl Sync for GuestView {}

impl GuestView {
    pub fn of(ram: &RamFile) -> Self {
        let len = ram.byte_count() as usize;
        let reserved_len = len + CHUNK_SIZE;
        // SAFETY: a new mapping where the kernel likes, then the file inside of it at an aligned
        // address. What is reserved around it stays: a test is short.
        let base = unsafe {
            let reserved = rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                reserved_len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
            .expect("address space can be reserved");
            let aligned = reserved.cast::<u8>();
            let aligned = aligned.add(aligned.align_offset(CHUNK_SIZE));
            rustix::mm::mmap(
                aligned.cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                ram.as_fd(),
                0,
            )
            .expect("the RAM file can be mapped")
        };
        Self {
            base: base.cast(),
            pages: ram.page_count(),
            mapping: GuestMapping::at(ram, base as u64),
        }
    }

    pub fn mapping(&self) -> GuestMapping {
        self.mapping.clone()
    }

    /// Writes the first word of a page.
    pub fn write(&self, page: u64, value: u64) {
        // SAFETY: `word` checks the bounds.
        unsafe { self.word(page).write_volatile(value) }
    }

    /// Reads the first word of a page.
    pub fn read(&self, page: u64) -> u64 {
        // SAFETY: `word` checks the bounds.
        unsafe { self.word(page).read_volatile() }
    }

    /// Reads from a file into a run of pages, as a device model does for a guest.
    pub fn read_from(&self, file: &File, pages: Range<u64>, offset: u64) {
        let mut done = 0;
        let len = (pages.end - pages.start) as usize * PAGE_SIZE;
        self.word(pages.end - 1);
        while done < len {
            // SAFETY: the first and the last page were checked; the kernel writes within them.
            let read = unsafe {
                let start = self.word(pages.start).cast::<u8>().add(done);
                let part = std::slice::from_raw_parts_mut(start, len - done);
                rustix::io::pread(file, part, offset + done as u64)
            }
            .expect("the file can be read into guest memory");
            assert!(read > 0, "the file is long enough");
            done += read;
        }
    }

    pub fn advise(&self, pages: Range<u64>, advice: i32) {
        self.word(pages.end - 1);
        let len = (pages.end - pages.start) as usize * PAGE_SIZE;
        // SAFETY: inside the mapping; the advices used keep the file's content.
        let result = unsafe { libc::madvise(self.word(pages.start).cast(), len, advice) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    /// Replaces a part of the mapping by a new one of the same pages.
    pub fn map_anew(&self, ram: &RamFile, pages: Range<u64>) {
        self.word(pages.end - 1);
        let len = (pages.end - pages.start) as usize * PAGE_SIZE;
        // SAFETY: inside our mapping, replaced by the same content.
        unsafe {
            rustix::mm::mmap(
                self.word(pages.start).cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                ram.as_fd(),
                pages.start * PAGE_SIZE as u64,
            )
        }
        .expect("the RAM file can be mapped");
    }

    fn word(&self, page: u64) -> *mut u64 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: inside the mapping by the check above.
        unsafe { self.base.add(page as usize * PAGE_SIZE).cast() }
    }
}

impl Drop for GuestView {
    fn drop(&mut self) {
        let len = self.pages as usize * PAGE_SIZE;
        // SAFETY: mapped by `of`, used by nobody else.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), len) };
    }
}

/// Starts tracking writes of this process through `view`, or says why the test is skipped.
pub fn track(view: &GuestView) -> Option<Tracking> {
    let pagemap = tracker::open_pagemap(std::process::id()).expect("own page map can be opened");
    track_with(view, pagemap)
}

fn track_with(view: &GuestView, pagemap: std::os::fd::OwnedFd) -> Option<Tracking> {
    if let Err(error) = tracker::check_kernel() {
        println!("skipped: {error}");
        return None;
    }
    let uffd = tracker::own_uffd().expect("a userfaultfd can be made");
    let untracked = Untracked::new(uffd, pagemap, view.mapping()).expect("the kernel can track");
    Some(untracked.start().expect("tracking starts"))
}

/// Copies a page out.
pub fn read_page(ram: &RamFile, page: u64, into: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
    ram.with_pages(page, 1, |bytes| into.copy_from_slice(bytes))
}

/// Fills a page of the VM process's mapping with one byte.
pub fn fill_page(ram: &RamFile, page: u64, byte: u8) {
    ram.with_pages_mut(page, 1, |bytes| bytes.fill(byte))
        .expect("populated");
}

/// Gives the memory of the pages back behind the RAM file's back, as a balloon does.
pub fn punch_hole(ram: &RamFile, pages: Range<u64>) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (start, count) = (pages.start, pages.end - pages.start);
    let page_size = PAGE_SIZE as u64;
    rustix::fs::fallocate(ram, flags, start * page_size, count * page_size).expect("punched");
}

/// A copy of guest RAM that is kept up to date page by page, as a destination is.
pub struct Copy {
    pages: Vec<[u8; PAGE_SIZE]>,
}

impl Copy {
    pub fn of(ram: &RamFile) -> Self {
        let mut copy = Self {
            pages: vec![[0; PAGE_SIZE]; ram.page_count() as usize],
        };
        copy.update(ram, &ram.data_pages().expect("extents can be read"));
        copy
    }

    pub fn update(&mut self, ram: &RamFile, dirty: &PageSet) {
        for page in dirty.runs().flatten() {
            read_page(ram, page, &mut self.pages[page as usize])
                .expect("a written page has memory");
        }
    }

    /// Pages in which the copy differs from guest RAM.
    pub fn differing(&self, ram: &RamFile) -> Vec<u64> {
        let data = ram.data_pages().expect("extents can be read");
        let mut now = [0; PAGE_SIZE];
        (0..ram.page_count())
            .filter(|&page| {
                now.fill(0);
                if data.contains(page) {
                    read_page(ram, page, &mut now).expect("it has memory");
                }
                now != self.pages[page as usize]
            })
            .collect()
    }
}

/// The same pseudo-random numbers in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
