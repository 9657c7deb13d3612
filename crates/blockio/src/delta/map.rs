//! The states of a delta's grains in memory: of our own, or a file that outlives this process.
//!
//! The file is in the VM's run directory, on a tmpfs: it is gone after a power cut, when the delta's tables alone count. It says whose it is and
//! under which boot of the host it was made, and has a number that the delta says, too; and, once a sync has failed, that storage may have lost what
//! the states tell of. A file has its name only once it is complete. In memory of our own only those pages take room in which anything is not absent.
//!
//! Who owns the state: whoever has the delta's lock writes, with one thread. Refuses: a file of another delta, boot or length, and one beside which another
//! process has made another one.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_delta::{Id, Layout, words_for};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes before the words.
const HEAD: usize = 4096;
/// Where in them a word is not zero once a sync has failed; whoever looks whose a file is reads what stands before it.
const LOST_AT: usize = 2048;
/// Where its number is, which the delta says, too: whoever makes another one leaves this one behind, wherever it lies. Builds that know of none read what stands
/// before it.
const NUMBER_AT: usize = 48;
const MAGIC: &[u8; 8] = b"GODWITST";

/// The words of a delta's states.
#[derive(Debug, Clone)]
pub struct Words(Arc<Mapping>);

/// A mapping of a whole file, or of as much memory of ours.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    words: usize,
    /// Its device and its inode, by which it is known under its name.
    file: Option<(u64, u64)>,
}

// SAFETY: the mapping stays valid until drop, and everything in it is used through atomics alone.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Words {
    /// In memory of this process: all absent.
    pub(crate) fn own(layout: &Layout) -> io::Result<Self> {
        let len = length(layout)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE)
        }?;
        Self::at(base.cast(), len, layout, None)
    }

    /// In a new file, all absent, which has its name once it is [`Self::put_in_place`]. It takes the place of the one of this number, or is another one where
    /// there is none.
    pub(crate) fn create(
        path: &Path,
        layout: &Layout,
        (id, boot): (Id, Id),
        number: u64,
    ) -> io::Result<Self> {
        let path = &unfinished(path);
        remove(path)?;
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
        let words = Self::map(&file, layout, len)?;
        words.set_number(match number {
            0 => new_number(),
            number => number,
        });
        Ok(words)
    }

    /// The file that this delta's last owner left, if it is that: one of this delta and this boot, and of the number that the delta says. A build that knows of
    /// none says none.
    pub(crate) fn find(
        path: &Path,
        layout: &Layout,
        (id, boot): (Id, Id),
        number: u64,
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
        if said != expected {
            return Ok(None);
        }
        let words = Self::map(&file, layout, len)?;
        let is_it = [0, number].contains(&words.number()) || number == 0;
        Ok(is_it.then_some(words))
    }

    /// By which the delta knows it; 0 where it has none.
    pub(crate) fn number(&self) -> u64 {
        self.long_at(NUMBER_AT).load(Ordering::Acquire)
    }

    pub(crate) fn set_number(&self, number: u64) {
        self.long_at(NUMBER_AT).store(number, Ordering::Release);
    }

    /// They are complete: the file takes the place of any that is there.
    pub(crate) fn put_in_place(&self, path: &Path) -> io::Result<()> {
        std::fs::rename(unfinished(path), path)
    }

    /// Whether what lies there is the file that these are in.
    pub(crate) fn are_at(&self, path: &Path) -> bool {
        let found = path.symlink_metadata().ok();
        let found = found.map(|found| (found.dev(), found.ino()));
        found.is_some() && found == self.0.file
    }

    /// Whether storage may have lost what these tell of.
    pub(crate) fn are_lost(&self) -> bool {
        self.lost().load(Ordering::Acquire) != 0
    }

    /// A sync has failed: whoever has these next must know.
    pub(crate) fn lose(&self) {
        self.lost().store(1, Ordering::Release);
    }

    fn lost(&self) -> &AtomicU64 {
        self.long_at(LOST_AT)
    }

    /// A word of the head.
    fn long_at(&self, at: usize) -> &AtomicU64 {
        let at = at.min(HEAD - 8) / 8 * 8;
        // SAFETY: inside of the head, which every mapping has, at a multiple of 8; it lives as long as `self`, and everybody uses it through
        // atomics.
        unsafe { &*self.0.base.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// Says what others say; these say nothing yet.
    pub(crate) fn copy(&self, others: &Self) {
        let (own, theirs): (&[AtomicU64], &[AtomicU64]) = (self.as_ref(), others.as_ref());
        for (to, from) in own.iter().zip(theirs) {
            // A page of which nothing is written takes no room.
            match from.load(Ordering::Acquire) {
                0 => {}
                word => to.store(word, Ordering::Release),
            }
        }
        if others.are_lost() {
            self.lose();
        }
    }

    fn map(file: &File, layout: &Layout, len: usize) -> io::Result<Self> {
        let found = file.metadata()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0)
        }?;
        let file = Some((found.dev(), found.ino()));
        Self::at(base.cast(), len, layout, file)
    }

    fn at(
        base: *mut u8,
        len: usize,
        layout: &Layout,
        file: Option<(u64, u64)>,
    ) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        let words = usize::try_from(words_for(layout)).map_err(io::Error::other)?;
        Ok(Self(Arc::new(Mapping {
            base,
            len,
            words,
            file,
        })))
    }
}

impl AsRef<[AtomicU64]> for Words {
    fn as_ref(&self) -> &[AtomicU64] {
        let map = &*self.0;
        // SAFETY: the words begin at a multiple of 4096, end inside the mapping (`length`), which lives as long as `self`; everybody
        // uses them through atomics, and a file is as long as it was when it was mapped: only its owner has it.
        unsafe {
            let first = map.base.as_ptr().add(HEAD).cast::<AtomicU64>();
            std::slice::from_raw_parts(first, map.words)
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Removes a map that nobody needs any more, and what came of one that was being made.
pub fn forget(path: &Path) -> io::Result<()> {
    remove(&unfinished(path)).and(remove(path))
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What a file is called that is not complete.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// One that no other map of this delta has.
pub(super) fn new_number() -> u64 {
    // Its keys are the kernel's random numbers.
    RandomState::new().build_hasher().finish() | 1
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
