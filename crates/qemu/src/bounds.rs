//! How much of the host a QEMU may take that was taken over: the length of its files, the number of its threads.
//!
//! Owns nothing; its memory is bounded by its control group. Refuses: to lift a limit that is there already.

use crate::launch::LaunchSpec;
use godwit_types::vm::UIDS;
use rustix::fs::{FileType, fstat};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Images are written in blocks: a limit is a multiple of this.
const BLOCK: u64 = 1 << 20;
/// Threads that QEMU may have beside its vCPUs: many more than it needs for disks, displays and its monitor, and too few to
/// take those of the whole host.
const THREADS_BESIDE_VCPUS: u64 = 1000;

/// What a QEMU that was taken over cannot take more of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// In bytes.
    pub longest_file: u64,
    /// None for the common user, whose QEMUs are counted together.
    pub threads: Option<u64>,
}

impl Bounds {
    pub fn of(spec: &LaunchSpec<'_>) -> io::Result<Self> {
        let threads = u64::from(spec.machine.vcpus) + THREADS_BESIDE_VCPUS;
        Ok(Self {
            longest_file: longest_file(spec)?,
            threads: UIDS.contains(&spec.uid).then_some(threads),
        })
    }

    /// Sets them in the child, which takes no lock and allocates nothing.
    pub fn set(&self) -> io::Result<()> {
        write_no_longer_files(self.longest_file)?;
        match self.threads {
            Some(threads) => lower(Resource::Nproc, threads),
            None => Ok(()),
        }
    }
}

/// How long a file QEMU may make: the guest's memory, or the largest image that it writes to itself.
fn longest_file(spec: &LaunchSpec<'_>) -> io::Result<u64> {
    let mut longest = spec.machine.memory_mib.saturating_mul(1 << 20);
    let writable = spec.machine.disks.iter().filter(|disk| !disk.read_only);
    let written = writable.filter_map(|disk| disk.back_end.image());
    for image in written {
        let image = spec.inherited.iter().find(|fd| fd.as_raw_fd() == image);
        let length = image.map_or(Ok(0), |image| image_length(*image))?;
        longest = longest.max(length);
    }
    Ok(longest.div_ceil(BLOCK).saturating_mul(BLOCK))
}

fn image_length(image: BorrowedFd<'_>) -> io::Result<u64> {
    let found = fstat(image)?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(found.st_size.unsigned_abs()),
        // Nothing reads or writes at the offset that this moves.
        _ => Ok(rustix::fs::seek(image, rustix::fs::SeekFrom::End(0))?),
    }
}

/// Beyond it a write is refused with "file too large"; the signal that comes with that ends nobody.
fn write_no_longer_files(longest: u64) -> io::Result<()> {
    // SAFETY: a plain system call; to ignore a signal needs no handler, and a program started from here goes on ignoring it.
    if unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    lower(Resource::Fsize, longest)
}

/// Sets a limit, unless there is a lower one already.
fn lower(resource: Resource, limit: u64) -> io::Result<()> {
    let before = getrlimit(resource).maximum;
    let limit = Some(before.map_or(limit, |before| before.min(limit)));
    let limit = Rlimit {
        current: limit,
        maximum: limit,
    };
    Ok(setrlimit(resource, limit)?)
}
