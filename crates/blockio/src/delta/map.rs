//! The states of a delta's grains in memory: of our own, or a file that outlives this process.
//!
//! The file is in the VM's run directory, on a tmpfs: it is gone after a power cut, when the delta's tables alone count. It says whose it is and
//! under which boot of the host it was made.
//!
//! Who owns the state: whoever has the delta's lock writes, with one thread. Refuses: a file of another delta, boot or length.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use godwit_delta::{Id, Layout, words_for};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes before the words.
const HEAD: usize = 4096;
const MAGIC: &[u8; 8] = b"GODWITST";

/// The words of a delta's states.
#[derive(Debug, Clone)]
pub struct Words(Arc<Memory>);

#[derive(Debug)]
enum Memory {
    Own(Box<[AtomicU64]>),
    Shared(Mapping),
}

/// A shared mapping of a whole file.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    words: usize,
}

// SAFETY: the mapping stays valid until drop, and everything in it is used through atomics alone.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Words {
    /// In memory of this process: all absent.
    pub(crate) fn own(layout: &Layout) -> Self {
        let words = (0..words_for(layout)).map(|_| AtomicU64::new(0));
        Self(Arc::new(Memory::Own(words.collect())))
    }

    /// In a new file in place of any that is there, all absent.
    pub(crate) fn create(path: &Path, layout: &Layout, (id, boot): (Id, Id)) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        let len = length(layout)?;
        // Not only long enough: a full tmpfs is to be told now, and not by a signal later.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len as u64)?;
        file.write_all_at(&head(layout, id, boot), 0)?;
        Self::map(&file, layout, len)
    }

    /// The file that this delta's last owner left, if it is that: one of this delta and this boot.
    pub(crate) fn find(
        path: &Path,
        layout: &Layout,
        (id, boot): (Id, Id),
    ) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = options
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let found = file.metadata()?;
        let expected = head(layout, id, boot);
        let mut said = vec![0; expected.len()];
        let len = length(layout)?;
        if !found.is_file() || found.len() != len as u64 {
            return Ok(None);
        }
        file.read_exact_at(&mut said, 0)?;
        match said == expected {
            true => Self::map(&file, layout, len).map(Some),
            false => Ok(None),
        }
    }

    fn map(file: &File, layout: &Layout, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0)
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let words = usize::try_from(words_for(layout)).map_err(io::Error::other)?;
        Ok(Self(Arc::new(Memory::Shared(Mapping { base, len, words }))))
    }
}

impl AsRef<[AtomicU64]> for Words {
    fn as_ref(&self) -> &[AtomicU64] {
        match &*self.0 {
            Memory::Own(words) => words,
            // SAFETY: the words begin at a multiple of 4096, end inside the mapping (`length`), which lives as long as `self`; everybody
            // uses them through atomics, and the file is as long as it was when it was mapped: only its owner has it.
            Memory::Shared(map) => unsafe {
                let first = map.base.as_ptr().add(HEAD).cast::<AtomicU64>();
                std::slice::from_raw_parts(first, map.words)
            },
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// How long a file is, in bytes.
fn length(layout: &Layout) -> io::Result<usize> {
    let words = usize::try_from(words_for(layout)).ok();
    let bytes = words.and_then(|words| words.checked_mul(8)?.checked_add(HEAD));
    bytes.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn head(layout: &Layout, id: Id, boot: Id) -> Vec<u8> {
    let bytes = layout.disk_bytes().to_le_bytes();
    [MAGIC.as_slice(), &id.0, &boot.0, &bytes].concat()
}
