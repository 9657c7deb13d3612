//! What a disk is made from: an image that a person has named, and the files below it, which that image names.
//!
//! Owns the open files, and their locks while they are copied. Each is opened with the rights of the host's common user, and judged as it is open. Refuses: what is no
//! image, files below that lie neither beside the image nor in a datastore, or that are somebody's disk, and what is in use or written meanwhile.

use super::mark::borne_by;
use super::{Maker, Progress, refuse_reserved};
use crate::convert::Layer;
use crate::disk::{NotOpened, identity_of_open, length_and_use, open_looked_at};
use crate::layered::must_be_whole;
use crate::qcow2::{Format, Found, HEAD_MAX, Link, walk};
use crate::reserved::place_of_open;
use crate::user::User;
use crate::whose::whose;
use godwit_blockio::label::End;
use godwit_blockio::{Access, lock_file};
use godwit_delta::header::is_extent;
use godwit_ownership::ImageRecord;
use godwit_types::VmName;
use rustix::fs::{CWD, OFlags, ioctl_ficlone};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long an image is waited for whose last user may have died just now.
pub(super) const LOCK_WAIT: Duration = Duration::from_millis(500);

/// How long a file is, when it was written last, and when anything of it was changed last, which nobody can set back.
type Written = (u64, (i64, i64), (i64, i64));

/// What the names of images have that are not whole yet, or that no VM has: of whom they are they do not say.
const UNFINISHED: [&str; 4] = [".godwit-new", ".godwit-clone", ".arriving-", ".moving-"];

/// A file that was opened, and what it was then.
#[derive(Debug)]
struct Opened {
    file: File,
    written: Written,
    /// Bytes that it takes on its storage.
    used: u64,
}

/// A file of an image.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    opened: Opened,
    format: Format,
}

impl From<Link<Opened>> for Part {
    fn from(link: Link<Opened>) -> Self {
        Self {
            path: link.path,
            opened: link.file,
            format: link.format,
        }
    }
}

/// An image that is open, with all that its content is made of.
#[derive(Debug)]
pub(super) struct Source {
    top: Part,
    /// What it names, and what that names: the lowest last.
    below: Vec<Part>,
    /// What a guest finds on it.
    pub bytes: u64,
    /// What it takes of the disk, at least.
    pub needed: u64,
}

fn may_not_read(path: &str, has_it: Option<&ImageRecord>, user: User) -> String {
    let User { uid, gid } = user;
    let whose = has_it.map_or_else(String::new, |ImageRecord { vm, disk, .. }| {
        format!(
            ", made while VM '{vm}' is off, whose disk '{disk}' it is by what it says of itself,"
        )
    });
    format!(
        "the image {path} may not be read by QEMU's common user (uid {uid}, group {gid}): put a copy{whose} that this user may read where your images are"
    )
}

fn written(file: &File) -> io::Result<Written> {
    let found = file.metadata()?;
    let written = (found.mtime(), found.mtime_nsec());
    Ok((found.len(), written, (found.ctime(), found.ctime_nsec())))
}

/// When it was written is looked at first.
fn looked_at(file: File) -> io::Result<Found<Opened>> {
    let (found, written) = (file.metadata()?, written(&file)?);
    let identity = identity_of_open(&file)?;
    let mut head = Vec::new();
    Beginning(&file, 0)
        .take(HEAD_MAX as u64)
        .read_to_end(&mut head)?;
    let file = Opened {
        file,
        written,
        used: found.blocks().saturating_mul(512),
    };
    Ok(Found {
        file,
        identity,
        head,
    })
}

/// Reads a file from its beginning, wherever others who have it open are in it.
struct Beginning<'a>(&'a File, u64);

impl io::Read for Beginning<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read_at(buffer, self.1)?;
        self.1 = self.1.saturating_add(count as u64);
        Ok(count)
    }
}

impl Source {
    /// `has_it` is whose disk it says that it is.
    pub fn open(
        (path, has_it): (&str, Option<&ImageRecord>),
        maker: &Maker<'_>,
    ) -> Result<Self, String> {
        let cannot =
            |why: &dyn std::fmt::Display| format!("the image {path} cannot be read: {why}");
        let named = Path::new(path);
        let opened = open_looked_at(CWD, named, OFlags::RDONLY);
        let file = opened.map_err(|why| match why {
            NotOpened::Errno(Errno::NOENT | Errno::NOTDIR) => format!(
                "the image {path} does not exist on this host: copy it there or correct the VM"
            ),
            NotOpened::Errno(Errno::ACCESS | Errno::PERM) => may_not_read(path, has_it, maker.user),
            NotOpened::Kind => format!("the image {path} is neither a file nor a block device"),
            why => cannot(&why),
        })?;
        refuse_reserved(&file, named, maker.reserved)?;
        must_be_whole(&file, path)?;
        // A device has none where it holds no whole disk.
        let (own, used) =
            length_and_use(&file, End::ByLabel(None)).map_err(|error| cannot(&error))?;
        let found = looked_at(file).map_err(|error| cannot(&error))?;
        // A disk's own image has what its guest wrote.
        if is_extent(&found.head) && whose(&found.file.file).is_none() {
            return Err(format!(
                "the image {path} is a part of a disk with snapshots, or of a linked one: make one image of that disk's chain with 'qemu-img convert' while its VM is off, or clone its VM"
            ));
        }
        let chain = walk(named, found, |below| open_below(below, named, maker))?;
        let mut parts = chain.into_iter().map(Part::from);
        let top = parts.next().ok_or_else(|| cannot(&"nothing is there"))?;
        let below: Vec<Part> = parts.collect();
        let (bytes, needed) = match &top.format {
            Format::Qcow2(image) => {
                let used = below.iter().map(|part| part.opened.used);
                let most = used.chain([own]).max().unwrap_or(own);
                (image.bytes, most.min(image.bytes))
            }
            Format::Raw => (own, used),
        };
        let is_raw = top.format == Format::Raw;
        match whose(&top.opened.file).filter(|_| !is_raw) {
            _ if bytes == 0 => Err(format!("the image {path} is empty")),
            None if !is_raw && was_made(&top.opened.file) => Err(format!(
                "the image {path} is not used: it was made to be the disk of a VM, which is raw, and begins as a qcow2 image does: whoever wrote that could have it show other files; make a copy for this with 'qemu-img convert' if it is such an image"
            )),
            Some(ImageRecord { vm, disk, .. }) => Err(format!(
                "the image {path} is not used: it says that it is disk '{disk}' of VM '{vm}', which is raw, and begins as a qcow2 image does: its guest may have written that; if it is such an image, 'godwit image release {path}' on this host first"
            )),
            None => Ok(Self {
                top,
                below,
                bytes,
                needed,
            }),
        }
    }

    pub fn path(&self) -> String {
        self.top.path.display().to_string()
    }

    pub fn file(&self) -> &File {
        &self.top.opened.file
    }

    pub fn format(&self) -> &Format {
        &self.top.format
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.top).chain(&self.below)
    }

    /// Its files for who reads them together.
    pub fn layers(&self) -> Vec<Layer<'_>> {
        let layer = |part| {
            let Part { opened, format, .. }: &Part = part;
            Layer {
                file: &opened.file,
                kind: format.kind(),
            }
        };
        self.parts().map(layer).collect()
    }

    /// Has nobody write it while it is copied. Refuses one that a VM or a tool has open for writing, also where that writes nothing
    /// just now. What keeps no locks is copied without.
    pub fn lock(&self, vm: &VmName, disk: &str) -> Result<(), String> {
        let name = format!("{vm}/{disk}/from");
        for Part { path, opened, .. } in self.parts() {
            let file = &opened.file;
            match lock_file(file, path, Access::ReadOnly, &name, LOCK_WAIT) {
                Ok(()) => {}
                Err(error @ godwit_blockio::Error::InUse { .. }) => {
                    let whose = whose(file).map_or_else(String::new, |record| {
                        let ImageRecord { vm, disk, .. } = record;
                        format!("; by what it says of itself it is disk '{disk}' of VM '{vm}', which may be copied while that VM is off")
                    });
                    return Err(format!("{error}{whose}"));
                }
                Err(error) => {
                    tracing::warn!(%error, "nobody is kept from writing what a disk is made from");
                }
            }
        }
        Ok(())
    }

    /// A copy of what was written meanwhile is neither what was there before nor what is there now; a block device does not tell.
    pub fn must_be_unchanged(&self) -> Result<(), String> {
        for Part { path, opened, .. } in self.parts() {
            let path = path.display();
            match written(&opened.file) {
                Ok(now) if now == opened.written => {}
                Ok(_) => {
                    return Err(format!(
                        "the image {path} was written while it was copied: see whether a download or a VM writes it, and try again once that has ended"
                    ));
                }
                Err(error) => return Err(format!("the image {path} cannot be read: {error}")),
            }
        }
        Ok(())
    }

    /// Has a file that is still empty share this image's blocks, which takes neither time nor room, where both are in one file system
    /// that can. Returns whether it does.
    pub fn shares_with(&self, fresh: &File, progress: &Progress) -> bool {
        if self.top.format != Format::Raw {
            return false;
        }
        let shares = ioctl_ficlone(fresh, self.file()).is_ok()
            && fresh
                .metadata()
                .is_ok_and(|clone| clone.len() == self.bytes);
        if shares {
            progress.done.store(self.needed, Ordering::Relaxed);
        } else {
            // One that is not whole is written over; what is beyond its end is a hole then.
            let _ = fresh.set_len(0);
        }
        shares
    }
}

/// A file that an image has named, and no person: one of the host's files that are there for that, and nobody's disk. Why not is a part of a sentence
/// that names it.
fn open_below(path: &Path, named: &Path, maker: &Maker<'_>) -> Result<Found<Opened>, String> {
    let User { uid, gid } = maker.user;
    let opened = open_looked_at(CWD, path, OFlags::RDONLY);
    let file = opened.map_err(|why| match why {
        NotOpened::Errno(Errno::NOENT | Errno::NOTDIR) => {
            "it does not exist on this host: copy it there, or have the image that names it name where it is with 'qemu-img rebase -u'".to_owned()
        }
        NotOpened::Errno(Errno::ACCESS | Errno::PERM) => format!(
            "it may not be read by QEMU's common user (uid {uid}, group {gid}): let that user read it, or make one image of all with 'qemu-img convert'"
        ),
        why => format!("it cannot be read: {why}"),
    })?;
    let cannot = |error: io::Error| format!("it cannot be read: {error}");
    if !file.metadata().map_err(cannot)?.is_file() {
        return Err("it is a block device, and files alone may lie below an image: make one image of all with 'qemu-img convert'".to_owned());
    }
    must_be_in_reach(&file, named, maker)?;
    refuse_reserved(&file, path, maker.reserved)?;
    must_be_whole(&file, &path.to_string_lossy())?;
    must_be_nobodys(&file, path)?;
    let found = looked_at(file).map_err(cannot)?;
    match is_extent(&found.head) {
        false => Ok(found),
        true => Err("it is a part of a disk with snapshots, or of a linked one, which no image may name: make one image of that disk's chain with 'qemu-img convert' while its VM is off".to_owned()),
    }
}

/// Who can have a disk made from an image of his is not to read any file of the host by it.
fn must_be_in_reach(file: &File, named: &Path, maker: &Maker<'_>) -> Result<(), String> {
    let place = place_of_open(file).map_err(|error| error.to_string())?;
    let real = |dir: &Path| std::fs::canonicalize(dir).ok();
    let is_beside = named.parent().and_then(real).as_deref() == place.parent();
    let is_in = |store: &PathBuf| real(store).is_some_and(|store| place.starts_with(store));
    match is_beside || maker.stores.iter().any(is_in) {
        true => Ok(()),
        false => Err(format!(
            "it is {}, and what lies below an image has to be in the directory of that image or in a datastore of this host, since an image could show any file otherwise: copy it there and name it with 'qemu-img rebase -u -F FORMAT -b FILE IMAGE', or make one image of all with 'qemu-img convert'",
            place.display()
        )),
    }
}

/// The disk of a VM is for a person to name.
fn must_be_nobodys(file: &File, path: &Path) -> Result<(), String> {
    let path = path.display();
    let place = place_of_open(file).map_err(|error| error.to_string())?;
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    if UNFINISHED.iter().any(|part| name.contains(part)) {
        return Err(format!(
            "it is called {name}, as images are that are being made or were left half-made, which no image may name: copy it under another name if it is whole"
        ));
    }
    if let Some(ImageRecord { vm, disk, .. }) = whose(file) {
        return Err(format!(
            "it says that it is disk '{disk}' of VM '{vm}', which no image may name: make the disk `from` {path} itself, or, if it is no disk any more, 'godwit image release {path}' on this host first"
        ));
    }
    match was_made(file) {
        true => Err(format!(
            "it was made to be the disk of a VM, which no image may name: make the disk `from` {path} itself"
        )),
        false => Ok(()),
    }
}

/// Whether it bears the mark of having been made for a disk that was not used yet.
fn was_made(file: &File) -> bool {
    match borne_by(file) {
        Ok(mark) => !mark.is_empty(),
        Err(errno) => errno == Errno::RANGE,
    }
}
