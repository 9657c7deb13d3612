//! Guest RAM and dirty tracking from outside QEMU.
//!
//! What it is for: guest RAM is a file on tmpfs that QEMU maps; the VM process maps the same file
//! to read pages at the source and to write them at the destination ([`RamFile`]), and asks the
//! kernel which pages QEMU has written since it last asked ([`tracker`]). The descriptor needed
//! for that is made inside QEMU by a small preloaded library ([`handout`]).
//!
//! Who owns the state: the guest owns the bytes, the kernel owns the write protection, this crate
//! owns only mappings, descriptors and bitmaps. Everything is dropped when its value is dropped.
//!
//! What the tracker cannot see, and callers must therefore handle or refuse:
//! - writes through any mapping but QEMU's: ours ([`RamFile::with_pages_mut`]), another
//!   vhost-user process's. Those of our own devices it does report ([`device_memory`]);
//! - device writes into pages pinned before a scan: `O_DIRECT`, native AIO, io_uring with
//!   registered buffers, VFIO, vDPA, nested virtualisation. A test of this crate shows the loss;
//! - holes punched into the file: balloon, free page reporting, virtio-mem.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("godwit-guestmem needs 64-bit Linux");

mod claim;
pub mod collapse;
pub mod device_memory;
pub mod dirty_tracker;
mod error;
mod gather;
pub mod handout;
mod huge_pages;
mod kernel;
pub mod library;
pub mod mapping;
pub mod mem_tmpfs;
mod mmap;
pub mod page_set;
mod populate;
pub mod ram_file;
pub mod tracker;
pub mod usage;
pub mod zero;

pub use collapse::{Collapse, CollapseCounts};
pub use device_memory::{DeviceMemory, DeviceReadable, DeviceWritable, RegionPlace};
pub use dirty_tracker::DirtyTracker;
pub use error::Error;
pub use huge_pages::HugePages;
pub use library::Library;
pub use mapping::GuestMapping;
pub use page_set::{AtomicPageSet, PageSet};
pub use ram_file::{Owner, RamFile};
pub use tracker::{ScanMode, ScanStats, Tracking, Untracked};
pub use zero::ChunkContent;

/// Bytes in a page, the unit of tracking and sending.
pub const PAGE_SIZE: usize = 4096;
/// Bytes in a chunk: the size and alignment of a huge page.
pub const CHUNK_SIZE: usize = 2 * 1024 * 1024;
/// A chunk holds so many pages of 4 KiB.
pub const CHUNK_PAGES: u64 = (CHUNK_SIZE / PAGE_SIZE) as u64;
