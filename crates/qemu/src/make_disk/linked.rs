//! Makes a disk that begins as an image which others begin as, too: nothing of that is copied.
//!
//! The disk's own file is as long as its parent and holds nothing: by it everybody else knows the disk. Beside it lie an empty delta over the parent, which
//! gets what the guest writes, and the description of both. The parent bears a mark from before its first disk was there, by which nobody writes it any more.
//!
//! Where nobody can write on its storage it has none, and is known by what it is ([`crate::parent`]).
//!
//! The order is what counts: the mark, the delta, the disk's own file, which says that it is a part, and last the description. Whoever dies between leaves
//! a file that is refused as a disk, and that the next one who makes this disk begins anew; and a delta that holds nothing, which goes with the VM's
//! next snapshot.
//!
//! Owns the parent's lock while the disk is made. Refuses: parents that are no raw files in a datastore, that are somebody's disk, that are in use for
//! writing or were written just now, and another length than the parent's; and places where no disk can be, before the parent is marked.

use super::source::LOCK_WAIT;
use super::{BLOCK, Maker, Place, finish, mark_of, refuse_reserved};
use crate::disk::{NotOpened, must_be_no_devices, open_looked_at};
use crate::layered::{must_be_whole, random_number};
use crate::parent::{is_parent, must_be_trusted, number_for_disks};
use crate::qcow2::{Format, HEAD_MAX, format_of};
use crate::reserved::place_of_open;
use crate::rights::as_user;
use crate::user::User;
use crate::whose::whose;
use godwit_blockio::delta::{NewDelta, create, describe_base};
use godwit_blockio::{Access, lock_file};
use godwit_delta::header::is_extent;
use godwit_delta::{Id, Parent as Below};
use godwit_ownership::ImageRecord;
use godwit_snapshots::{Common, Fresh, Images, files};
use godwit_store::save_json;
use godwit_types::snapshots::{LAYERED_MARK, description_of};
use godwit_types::vm::{DISK_GIB_MAX, DiskSpec};
use rustix::fs::{AtFlags, CWD, OFlags, XattrFlags, fsetxattr, statat, unlinkat};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// So many names are tried for the delta.
const NUMBERS_MAX: u64 = 64;
/// Whoever wrote an image so short a time ago may go on with that: not every program locks what it writes.
const AT_REST_AFTER: Duration = Duration::from_secs(10);

/// What a disk begins as: open, locked against being written, and with its mark, where it can have one.
#[derive(Debug)]
pub(super) struct Parent {
    path: String,
    bytes: u64,
    /// The number by which it is known.
    id: String,
    /// Nobody gets it for writing as long as this is open.
    _file: File,
}

impl Parent {
    /// Judged with the rights of the common user. The mark is written with those of this process, where that has any: that user should not be able to
    /// write it.
    pub fn prepare(disk: &DiskSpec, maker: &Maker<'_>) -> Result<Self, String> {
        let path = disk.from.as_deref().unwrap_or_default();
        let User { uid, gid } = maker.user;
        let opened = as_user(uid, gid, || Ok(open(path, disk, maker)));
        let (file, bytes) = opened.map_err(|errno| errno.to_string()).flatten()?;
        let id = number_for_disks(&file).or_else(|why| {
            let theirs = as_user(uid, gid, || Ok(number_for_disks(&file)));
            theirs.unwrap_or(Err(why))
        });
        let id = id.map_err(|why| format!("no disk is linked to the image {path}: {why}"))?;
        Ok(Self {
            path: path.to_owned(),
            bytes,
            id,
            _file: file,
        })
    }
}

/// Opens what a disk is to begin as, and refuses what cannot be that.
fn open(path: &str, disk: &DiskSpec, maker: &Maker<'_>) -> Result<(File, u64), String> {
    let User { uid, gid } = maker.user;
    let named = Path::new(path);
    let opened = open_looked_at(CWD, named, OFlags::RDONLY);
    let file = opened.map_err(|why| match why {
        NotOpened::Errno(Errno::NOENT | Errno::NOTDIR) => format!(
            "the image {path} does not exist on this host: copy it there or correct the VM"
        ),
        NotOpened::Errno(Errno::ACCESS | Errno::PERM) => format!(
            "the image {path} may not be read by QEMU's common user (uid {uid}, group {gid}): let that user read it"
        ),
        why => format!("the image {path} cannot be read: {why}"),
    })?;
    let refused = |why: String| format!("no disk is linked to the image {path}: {why}");
    let cannot = |error: std::io::Error| format!("the image {path} cannot be read: {error}");
    let found = file.metadata().map_err(cannot)?;
    if !found.is_file() {
        let why = "it is a block device: copy it to a file in a datastore, or leave out `linked`";
        return Err(refused(why.to_owned()));
    }
    refuse_reserved(&file, named, maker.reserved)?;
    must_be_in_store(&file, maker).map_err(refused)?;
    must_be_whole(&file, path)?;
    if let Some(ImageRecord { vm, disk, .. }) = whose(&file) {
        return Err(refused(format!(
            "it says that it is disk '{disk}' of VM '{vm}', whose guest writes it: make a copy for this, or, if it is no disk any more, 'godwit image release {path}' on this host first"
        )));
    }
    must_be_trusted(&file, uid).map_err(refused)?;
    must_be_raw(&file).map_err(refused)?;
    let bytes = found.len();
    if bytes == 0 || !bytes.is_multiple_of(BLOCK) || bytes > DISK_GIB_MAX << 30 {
        return Err(refused(format!(
            "its {bytes} bytes are no whole blocks of {BLOCK} bytes, or more than {DISK_GIB_MAX} GiB: make it longer first, as with 'truncate -s %{BLOCK} {path}'"
        )));
    }
    must_be_as_long(disk, bytes, &file).map_err(refused)?;
    lock(&file, disk, maker)?;
    must_be_at_rest(&file).map_err(refused)?;
    Ok((file, bytes))
}

/// One that disks are linked to already is not written any more.
fn must_be_at_rest(file: &File) -> Result<(), String> {
    if is_parent(file) != Ok(false) {
        return Ok(());
    }
    let written = file.metadata().and_then(|found| found.modified());
    let written = written.map_err(|error| error.to_string())?;
    // The clock of a file server may be ahead.
    let age = written.elapsed().unwrap_or_else(|ahead| ahead.duration());
    match age >= AT_REST_AFTER {
        true => Ok(()),
        false => Err(format!(
            "it was written less than {} s ago: see that whatever writes it, as a download or qemu-img, has ended, and try again",
            AT_REST_AFTER.as_secs()
        )),
    }
}

fn must_be_in_store(file: &File, maker: &Maker<'_>) -> Result<(), String> {
    let place = place_of_open(file).map_err(|error| error.to_string())?;
    let is_in =
        |store: &PathBuf| std::fs::canonicalize(store).is_ok_and(|store| place.starts_with(store));
    match maker.stores.iter().any(is_in) {
        true => Ok(()),
        false => Err(format!(
            "it is {}, which is in no datastore of this host: put it in one that [datastores] in host.toml names, where it stays for as long as disks are linked to it",
            place.display()
        )),
    }
}

fn must_be_raw(file: &File) -> Result<(), String> {
    let mut head = vec![0; HEAD_MAX];
    let length = file.read_at(&mut head, 0);
    let length = length.map_err(|error| error.to_string())?;
    let remedy = "linked disks begin as raw images: make one of it with 'qemu-img convert -O raw', or leave out `linked`, which makes a copy of its own";
    match format_of(head.get(..length).unwrap_or_default()) {
        Ok(Format::Raw) if is_extent(&head) => Err(format!(
            "it is a part of a disk with snapshots, or of a linked one, and {remedy}"
        )),
        Ok(Format::Raw) => Ok(()),
        Ok(Format::Qcow2(_)) => Err(format!("it is a qcow2 image, and {remedy}")),
        Err(why) => Err(format!("{why}; {remedy}")),
    }
}

fn must_be_as_long(disk: &DiskSpec, bytes: u64, file: &File) -> Result<(), String> {
    let Some(wanted) = disk.wanted_bytes().filter(|wanted| *wanted != bytes) else {
        return Ok(());
    };
    let gib = wanted >> 30;
    let remedy = match (wanted > bytes, is_parent(file)) {
        (true, Ok(false)) => {
            format!(", or, before the first disk is linked to it, 'truncate -s {gib}G' on it")
        }
        _ => String::new(),
    };
    Err(format!(
        "it has {bytes} bytes, as a disk has that is linked to it, and size_gib = {gib} is another length: leave that out{remedy}"
    ))
}

fn lock(file: &File, disk: &DiskSpec, maker: &Maker<'_>) -> Result<(), String> {
    let path = Path::new(disk.from.as_deref().unwrap_or_default());
    let reader = format!("{}/{}/from", maker.vm, disk.name);
    match lock_file(file, path, Access::ReadOnly, &reader, LOCK_WAIT) {
        Err(error @ godwit_blockio::Error::InUse { .. }) => Err(error.to_string()),
        Err(error) => {
            tracing::warn!(%error, "nobody is kept from writing what a disk is linked to just now");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

impl Maker<'_> {
    /// Refuses a place where no disk can be linked: the parent is not marked for nothing.
    pub(super) fn must_have_place(&self, disk: &DiskSpec) -> Result<(), String> {
        let path = Path::new(&disk.path);
        if !path.exists() {
            must_be_no_devices(path).map_err(|error| error.to_string())?;
        }
        let place = Place::open(path, self.reserved, self.user)?;
        if place.has(path, &mark_of(self.vm, disk))? {
            return Ok(());
        }
        place.must_suit(path)?;
        let failed = |why: String| format!("{} cannot be made: {why}", path.display());
        place.fresh_delta().map_err(failed)?;
        let fresh = place.begin(path)?;
        let bears = random_number().and_then(|number| be_part(&fresh, &number));
        place.discard(&fresh);
        bears.map_err(failed)
    }

    /// Makes a disk over its parent, unless it is there, with the rights of the common user.
    pub(super) fn link(&self, disk: &DiskSpec, parent: &Parent) -> Result<(), String> {
        let path = Path::new(&disk.path);
        if !path.exists() {
            must_be_no_devices(path).map_err(|error| error.to_string())?;
        }
        let place = Place::open(path, self.reserved, self.user)?;
        let mark = mark_of(self.vm, disk);
        if place.has(path, &mark)? {
            if place.is_described() {
                return Ok(());
            }
            // Whoever made it died before it was a disk, and nobody has used it.
            unlinkat(&place.dir, &place.name, AtFlags::empty())
                .map_err(|errno| format!("{} cannot be made anew: {errno}", path.display()))?;
        }
        place.must_suit(path)?;
        let failed = |why: String| format!("{} cannot be made: {why}", path.display());
        let (fresh, number) = (place.fresh_delta().map_err(failed)?, random_number()?);
        let common = Common {
            path: &parent.path,
            id: &parent.id,
        };
        let images = Images::linked(common, parent.bytes, &number, &fresh).map_err(failed)?;
        make_delta(path, parent, &fresh).map_err(failed)?;
        place.make_own(path, parent.bytes, (&number, &mark))?;
        let described = save_json(&description_of(path), &images);
        described.map_err(|error| failed(error.to_string()))
    }
}

impl Place {
    fn is_described(&self) -> bool {
        let described = description_of(Path::new(&self.name));
        statat(&self.dir, &described, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// A delta under whose name there is nothing yet.
    fn fresh_delta(&self) -> Result<Fresh, String> {
        let own = self.name.to_str();
        let own = own.ok_or("its name is no text: give it another path")?;
        let is_free = |name: &String| {
            let files = [files::descriptor(name), files::extent(name)];
            let mut files = files.iter();
            files.all(|file| statat(&self.dir, file, AtFlags::SYMLINK_NOFOLLOW).is_err())
        };
        let mut names = (1..=NUMBERS_MAX).map(|number| files::delta(own, number));
        let name = names.find(is_free).ok_or_else(|| {
            format!("there are files under the first {NUMBERS_MAX} names for what is written to it: see whose they are")
        })?;
        let id = random_number()?;
        Ok(Fresh {
            name,
            id,
            elsewhere: None,
        })
    }

    /// The disk's own file, which says that it is a part of it before it has its name.
    fn make_own(
        &self,
        path: &Path,
        bytes: u64,
        (number, mark): (&str, &str),
    ) -> Result<(), String> {
        let fresh = self.begin(path)?;
        let failed = |why: String| format!("{} cannot be made: {why}", path.display());
        let made = fill(&fresh, bytes, (number, mark)).map_err(failed);
        let made = made.and_then(|()| self.name(path, &fresh));
        if made.is_err() {
            self.discard(&fresh);
        }
        made
    }
}

fn fill(fresh: &File, bytes: u64, (number, mark): (&str, &str)) -> Result<(), String> {
    fresh.set_len(bytes).map_err(|error| error.to_string())?;
    be_part(fresh, number)?;
    finish(fresh, mark).map_err(|error| error.to_string())
}

/// Has a disk's own file say that it is a part of the disk.
fn be_part(fresh: &File, number: &str) -> Result<(), String> {
    let flags = XattrFlags::empty();
    let marked = fsetxattr(fresh, LAYERED_MARK, number.as_bytes(), flags);
    marked.map_err(|errno| match errno {
        Errno::OPNOTSUPP => "its storage keeps no extended attributes, by which an image and what lies beside it know each other: give it a path in a datastore that does (ext4, XFS, Btrfs, or NFS 4.2 from Linux 5.9 on)".to_owned(),
        errno => errno.to_string(),
    })
}

/// Durably. What was begun holds nothing: it is removed with others that nobody names.
fn make_delta(path: &Path, parent: &Parent, fresh: &Fresh) -> Result<(), String> {
    let hint = files::descriptor(&parent.path);
    let no_number = || format!("{} is no number that an image bears", parent.id);
    let cid = Id::of_digits(&parent.id).ok_or_else(no_number)?.cid();
    let above = Path::new(&hint);
    let name = Path::new(&parent.path).file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    if above.symlink_metadata().is_err()
        && let Err(error) = describe_base(above, &name, (parent.bytes, cid))
    {
        tracing::info!(%error, "what a disk is linked to has no descriptor: qemu-img does not find its way to it");
    }
    let (descriptor, below) = (
        path.with_file_name(files::descriptor(&fresh.name)),
        Below { cid, hint },
    );
    let new = NewDelta {
        descriptor: &descriptor,
        bytes: parent.bytes,
        id: Id::of_delta(&fresh.id)?,
        parent: &below,
    };
    create(&new).map(drop).map_err(|error| error.to_string())
}
