//! The one error type of this crate: what is wrong, where, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why an operation on guest RAM or on its tracking failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried, as a verb phrase.
        action: &'static str,
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A system call without a path failed.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Guest RAM has a size that huge pages cannot back.
    #[error(
        "guest RAM of {bytes} bytes cannot be used: give it a size that is a multiple of 2 MiB and not zero"
    )]
    Size {
        /// The size asked for or found.
        bytes: u64,
    },
    /// QEMU's user has changed the length of the RAM file.
    #[error(
        "{path} has {found} bytes, and the guest has {expected} bytes of memory: its hypervisor has changed the file, so the guest is neither taken over nor moved; stop the VM with --force and start it anew"
    )]
    Length {
        path: PathBuf,
        found: u64,
        expected: u64,
    },
    /// Pages outside guest RAM were asked for.
    #[error("pages {first} to {last} are outside guest RAM of {page_count} pages")]
    OutOfRange {
        /// First page asked for.
        first: u64,
        /// Last page asked for.
        last: u64,
        /// Pages that there are.
        page_count: u64,
    },
    /// What the front end says of the guest's physical memory cannot be so.
    #[error("the guest's memory is not as its device is told: {reason}")]
    Regions { reason: String },
    /// A guest named memory to its device that it does not have.
    #[error("the guest has no memory at {address:#x}, {len} bytes long")]
    DeviceAddress { address: u64, len: usize },
    /// A guest cuts a request into more pieces than the kernel takes.
    #[error("a request of the guest is in more than {max} pieces")]
    Vectors { max: usize },
    /// The page has no memory behind it; touching it could end the process with SIGBUS.
    #[error(
        "page {page} of guest RAM has no memory behind it: populate it before writing, treat it as zero when reading"
    )]
    Hole {
        /// The first such page.
        page: u64,
    },
    /// Another thread of this process is writing the same pages.
    #[error("pages {first} to {last} of guest RAM are being written by another thread")]
    Busy {
        /// First page asked for.
        first: u64,
        /// Last page asked for.
        last: u64,
    },
    /// The tmpfs or the machine has no room for guest RAM.
    #[error(
        "destination out of memory: {path} has no room for 2 MiB more at page {page}; free memory or enlarge its tmpfs"
    )]
    OutOfMemory {
        path: PathBuf,
        /// First page of the chunk that found no room.
        page: u64,
    },
    /// The kernel lacks what tracking needs.
    #[error("this kernel cannot track guest writes ({missing}): Linux 6.7 or newer is needed")]
    KernelTooOld { missing: &'static str },
    /// QEMU does not map the RAM file as it must.
    #[error("QEMU (pid {pid}) does not map {path} as guest RAM: {reason}")]
    Mapping {
        pid: u32,
        path: PathBuf,
        /// What is wrong with the mapping.
        reason: &'static str,
    },
    /// A set of pages has another size than guest RAM.
    #[error("a page set of {set_pages} pages cannot describe guest RAM of {page_count} pages")]
    SetSize {
        set_pages: u64,
        /// Pages in guest RAM.
        page_count: u64,
    },
    /// QEMU's process has ended, or has mapped guest RAM anew: no answer about its writes can be
    /// trusted any more. Whether QEMU lives is for its process handle to say.
    #[error(
        "QEMU's writes can no longer be tracked: its process has ended or has mapped guest RAM anew"
    )]
    TrackingLost,
    /// The host lets the preloaded library be loaded from nowhere.
    #[error(
        "the library that QEMU has to preload may not be loaded here, so no VM can be tracked (in memory: {reasons}): mount the file system of {path} without noexec"
    )]
    Library {
        /// The directory that was tried after memory.
        path: PathBuf,
        /// What is wrong with memory and with the directory.
        reasons: String,
    },
    /// QEMU runs without the library that it was told to preload.
    #[error(
        "QEMU (pid {pid}) runs without the library that it has to preload, so its VM could not be migrated: let 'qemu' in host.toml name the QEMU program itself, no script around it; it said: {stderr}"
    )]
    NotPreloaded {
        pid: u32,
        /// What QEMU, or the loader in its place, said.
        stderr: String,
    },
    /// The preloaded library did not hand out a descriptor.
    #[error("QEMU did not hand out a userfaultfd at {path}: {reason}")]
    Handout {
        /// The Unix socket asked.
        path: PathBuf,
        /// What went wrong, in words.
        reason: String,
    },
}

impl Error {
    pub(crate) fn system(action: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System {
            action,
            source: source.into(),
        }
    }
}
