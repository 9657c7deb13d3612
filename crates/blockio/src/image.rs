//! A raw image: a file or a block device, opened for direct IO.
//!
//! Who owns the state: the image's bytes belong to whoever holds its lock; this value owns the descriptor, on which the lock
//! is and through which all IO goes.
//!
//! What it refuses: what is neither a file nor a block device, what takes no direct IO and can be written, a size that is no multiple of the disk's blocks, a device
//! whose own blocks are larger than those, and a device whose label ([`crate::label`]) says that it holds no disk, or a part of one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_types::plant::planted;
use rustix::fs::{AtFlags, OFlags, StatVfsMountFlags, StatxFlags};
use rustix::io::Errno;

use crate::label::{self, Found, Holds, Label};
use crate::{Buffer, Error, SECTOR, image_lock};

const NEITHER: &str = "it is neither a file nor a block device";

/// With `STATX_DIO_READ_ALIGN`, which only newer kernels know.
const WANTED: StatxFlags = StatxFlags::DIOALIGN.union(StatxFlags::from_bits_retain(0x2_0000));

/// What a disk may do with its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// What direct IO on an image must be a multiple of, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    pub memory: u32,
    /// Offsets on the disk, and lengths.
    pub offset: u32,
}

/// Which file or block device an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Of a file, that of its file system; of a block device, its own.
    pub device: u64,
    pub inode: u64,
}

/// What is known of an image before it is opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct Known<'a> {
    /// Whoever opens it fills a device with the part of a disk that has this name.
    pub part: Option<&'a str>,
    /// It is a disk's as a device without a label: its guest may have written what looks like one.
    pub is_plain: bool,
    /// How long its device was when it was labelled, if that is known: it may have been made longer since.
    pub device: Option<u64>,
}

/// An image that is open.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    file: File,
    access: Access,
    bytes: u64,
    alignment: Alignment,
    label: Option<Found>,
    part: Option<String>,
    is_plain: bool,
}

impl Image {
    /// Opens the image of a disk with blocks of so many bytes, as [`Self::of`].
    pub fn open(path: &Path, access: Access, block_bytes: u32) -> Result<Self, Error> {
        // A FIFO would be waited for.
        let opened = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .custom_flags(libc::O_NONBLOCK)
            .open(path);
        let file = opened.map_err(|source| match source.raw_os_error() {
            Some(libc::EISDIR) => unusable(path, NEITHER),
            _ => Error::Image {
                action: "open",
                path: path.to_owned(),
                source,
            },
        })?;
        Self::of(file, path, access, block_bytes)
    }

    /// An image that its caller has opened, for reading or for both; from here on its IO is direct.
    pub fn of(file: File, path: &Path, access: Access, block_bytes: u32) -> Result<Self, Error> {
        Self::of_known(file, path, (access, block_bytes), Known::default())
    }

    /// As [`Self::of`], of which something is known.
    pub fn of_known(
        file: File,
        path: &Path,
        (access, block_bytes): (Access, u32),
        known: Known<'_>,
    ) -> Result<Self, Error> {
        let failed = |action, source| Error::Image {
            action,
            path: path.to_owned(),
            source,
        };
        let metadata = file.metadata();
        let kind = metadata
            .map_err(|source| failed("examine", source))?
            .file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(unusable(path, NEITHER));
        }
        go_direct(&file, access).map_err(|source| match source.raw_os_error() {
            Some(libc::EINVAL) => unusable(path, "its file system takes no direct IO (O_DIRECT): put it on ext4, XFS, btrfs or a block device"),
            _ => failed("open", source),
        })?;
        let label = look(&file, path, known)?;
        let bytes = bytes_of(&file, path, label.as_ref())?;
        let block = u64::from(block_bytes);
        if bytes == 0 {
            let reason = "it is empty: give it the size of the disk, as with 'truncate -s 20G'";
            return Err(unusable(path, reason));
        }
        if block == 0 || !bytes.is_multiple_of(block) {
            let reason = format!(
                "its {bytes} bytes are no whole blocks of {block_bytes} bytes: make it longer, as with 'truncate -s %{block_bytes}'"
            );
            return Err(unusable(path, &reason));
        }
        let alignment = alignment_of(&file).map_err(|source| failed("examine", source))?;
        if !block.is_multiple_of(u64::from(alignment.offset)) {
            let theirs = alignment.offset;
            let reason = format!(
                "its device has blocks of {theirs} bytes, the disk of {block_bytes}: use a device with such blocks, or a btrfs"
            );
            return Err(unusable(path, &reason));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            access,
            bytes,
            alignment,
            label,
            part: known.part.map(str::to_owned),
            is_plain: known.is_plain,
        })
    }

    /// Takes the image for this descriptor, against other VM processes, QEMU and qemu-img, and waits at most so long for who
    /// has it: a process that was killed keeps it for as long as its last request is under way. Many may read one image, but
    /// of each `name` only one. The lock ends with the last request of the last process that has this descriptor. Whoever had
    /// it may have changed its size, or what its device holds: both are looked at anew.
    pub fn lock(&mut self, name: &str, patience: Duration) -> Result<(), Error> {
        if planted("lock-on-another-descriptor") {
            return self.lock_another(name, patience);
        }
        image_lock::take(&self.file, &self.path, self.access, name, patience)?;
        self.look_again()
    }

    /// The planted fault: the lock ends with the process, and its last request may not have ended then.
    fn lock_another(&mut self, name: &str, patience: Duration) -> Result<(), Error> {
        let opened = OpenOptions::new()
            .read(true)
            .write(self.access == Access::ReadWrite)
            .open(&self.path);
        let file = opened.map_err(|source| Error::Image {
            action: "open",
            path: self.path.clone(),
            source,
        })?;
        image_lock::take(&file, &self.path, self.access, name, patience)?;
        std::mem::forget(file);
        self.look_again()
    }

    fn look_again(&mut self) -> Result<(), Error> {
        let known = Known {
            part: self.part.as_deref(),
            is_plain: self.is_plain,
            device: self.label.as_ref().map(|found| found.device),
        };
        let label = look(&self.file, &self.path, known)?;
        self.bytes = bytes_of(&self.file, &self.path, label.as_ref())?;
        self.label = label;
        Ok(())
    }

    /// Is only read from now on, and lets others read it, too. For a moment nobody has it.
    pub(crate) fn share(&mut self, name: &str) -> Result<(), Error> {
        image_lock::release(&self.file, name).map_err(|source| Error::Image {
            action: "unlock",
            path: self.path.clone(),
            source,
        })?;
        self.access = Access::ReadOnly;
        image_lock::take(&self.file, &self.path, self.access, name, Duration::ZERO)
    }

    /// Makes durable what was written through it, and lets whoever waits for it have it. Nothing may be under way.
    pub fn give_back(&mut self, name: &str) -> Result<(), Error> {
        let failed = |action, source| Error::Image {
            action,
            path: self.path.clone(),
            source,
        };
        let synced = rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.file));
        synced.map_err(|error| failed("make durable", error.into()))?;
        image_lock::release(&self.file, name).map_err(|source| failed("unlock", source))?;
        Ok(())
    }

    /// Tells this file or block device from every other of this host, for as long as it is open somewhere.
    pub fn identity(&self) -> Result<Identity, Error> {
        let metadata = self.file.metadata().map_err(|source| Error::Image {
            action: "examine",
            path: self.path.clone(),
            source,
        })?;
        Ok(match metadata.file_type().is_block_device() {
            true => Identity {
                device: metadata.rdev(),
                inode: 0,
            },
            false => Identity {
                device: metadata.dev(),
                inode: metadata.ino(),
            },
        })
    }

    /// Its size in bytes, as it was when it was opened or last [`Self::measure`]d.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Looks how large it is now. A label says it once and for all, however long its device becomes.
    pub fn measure(&mut self) -> Result<u64, Error> {
        self.bytes = bytes_of(&self.file, &self.path, self.label.as_ref())?;
        Ok(self.bytes)
    }

    /// What direct IO on it must be aligned to.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// The label of its device, before which it ends, as it was when it was opened or locked.
    pub fn label(&self) -> Option<&Found> {
        self.label.as_ref()
    }

    /// The name of the part that a device holds of it, if it is filled.
    pub fn part(&self) -> Option<&str> {
        self.part.as_deref()
    }

    /// Has its label be at the end of its device, where that was made longer. Whoever calls this has its lock.
    pub fn move_label_to_end(&mut self) -> Result<(), Error> {
        let Some(found) = &self.label else {
            return Ok(());
        };
        let moved = label::move_to_end(self.file.as_fd(), found);
        let moved = moved.map_err(|source| Error::Image {
            action: "label",
            path: self.path.clone(),
            source,
        });
        self.label = Some(moved?);
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it may be written.
    pub fn access(&self) -> Access {
        self.access
    }
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The label that counts, if one does.
fn look(file: &File, path: &Path, known: Known<'_>) -> Result<Option<Found>, Error> {
    if known.is_plain {
        return Ok(None);
    }
    let found = label::read_of(file.as_fd(), known.device);
    let found = found.map_err(|source| Error::Image {
        action: "measure",
        path: path.to_owned(),
        source,
    })?;
    must_hold(found.as_ref().map(|found| &found.label), known.part)
        .map_err(|why| unusable(path, &why))?;
    Ok(found)
}

/// Of files and block devices alike.
fn bytes_of(file: &File, path: &Path, label: Option<&Found>) -> Result<u64, Error> {
    let end = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0));
    let end = end.map_err(|errno| Error::Image {
        action: "measure",
        path: path.to_owned(),
        source: errno.into(),
    })?;
    let Some(found) = label else { return Ok(end) };
    match found.device <= end {
        true => Ok(found.label.bytes),
        false => Err(unusable(
            path,
            &format!(
                "its device has {end} bytes, and had {} when it was labelled: make it as large as it was",
                found.device
            ),
        )),
    }
}

/// Refuses what a device's label calls no disk, or another part of one than this. Why is a part of a sentence.
fn must_hold(label: Option<&Label>, part: Option<&str>) -> Result<(), String> {
    let Some(label) = label.filter(|_| !planted("half-made-opened")) else {
        return Ok(());
    };
    match &label.holds {
        Holds::Part(name) if part == Some(name) => Ok(()),
        _ => label.why_no_disk().map_or(Ok(()), Err),
    }
}

fn unusable(path: &Path, reason: &str) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Beside the page cache; and waiting, since some devices refuse requests on a descriptor that is not to wait. Where nobody can write, what is only read may come
/// through the page cache: file systems that are made once, as those of optical discs, take no direct IO.
fn go_direct(file: &File, access: Access) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)? - OFlags::NONBLOCK;
    let direct = rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT);
    if direct == Err(Errno::INVAL) && access == Access::ReadOnly && is_mounted_for_reading(file)? {
        rustix::fs::fcntl_setfl(file, flags)?;
        return Ok(());
    }
    direct.map_err(io::Error::from)
}

fn is_mounted_for_reading(file: &File) -> io::Result<bool> {
    let found = rustix::fs::fstatvfs(file)?;
    Ok(found.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// What the kernel says; or, where its file system does not tell (btrfs), what it takes. XFS says of a file that shares blocks with
/// another one how large pieces are written without a detour; it takes what may be read in smaller ones as well.
fn alignment_of(file: &File) -> io::Result<Alignment> {
    let said = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, WANTED)?;
    let told = StatxFlags::from_bits_retain(said.stx_mask).contains(StatxFlags::DIOALIGN);
    let (memory, write, read) = (
        said.stx_dio_mem_align,
        said.stx_dio_offset_align,
        said.stx_dio_read_offset_align,
    );
    if told && memory > 0 && write > 0 {
        let offset = if read > 0 { read.min(write) } else { write };
        return Ok(Alignment { memory, offset });
    }
    let block = if takes_sectors(file)? {
        SECTOR as u32
    } else {
        4096
    };
    Ok(Alignment {
        memory: block,
        offset: block,
    })
}

/// Whether one sector can be read.
fn takes_sectors(file: &File) -> io::Result<bool> {
    let mut buffer = Buffer::zeroed(SECTOR as usize);
    match file.read_at(buffer.bytes_mut(), SECTOR) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(false),
        Err(error) => Err(error),
    }
}
