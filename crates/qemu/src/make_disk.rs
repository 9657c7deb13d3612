//! Makes a disk's raw image, once: a copy of another image, or empty.
//!
//! All is done with the rights of the host's common user, on a thread that has these alone ([`crate::rights`]): a description reaches no file and no
//! directory that this user does not, but that whose disk its source says it is goes into a refusal. The image grows under another name beside its own, is made durable, and then gets its name, which
//! never replaces anything: after a kill at any moment either the whole image is there or none, and what was begun is begun anew. An
//! image bears whose disk it is until it is first used, so that one that was made just before a kill is known. Refuses: a path where something else
//! is, sources that are no files, that do not fit, that name files which are not for that (`source`), or that
//! somebody may write, and places without room.

mod cloned;
mod linked;
mod mark;
mod source;

pub use cloned::Part;
pub use mark::forget_mark;
use mark::mark_of;

use crate::convert;
use crate::disk::{DiskError, NotOpened, must_be_no_devices, open_looked_at, rename_to_free};
use crate::disk_place::{can_make_image_in, room_of};
use crate::layered::is_described;
use crate::qcow2::Format;
use crate::reserved::Reserved;
use crate::rights::become_user;
use crate::user::User;
use crate::whose::whose_at;
use godwit_blockio::next_data;
use godwit_ownership::ImageRecord;
use godwit_types::VmName;
use godwit_types::snapshots::description_of;
use godwit_types::vm::{DISK_GIB_MAX, DiskSpec};
use linked::Parent;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, fchmod, flock, fstat, fstatvfs, openat,
    statat, unlinkat,
};
use rustix::io::Errno;
use source::Source;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes that are read and written together; none of them is written where all are zero.
const PIECE: usize = 1 << 20;
/// Bytes of a disk's blocks.
const BLOCK: u64 = 512;

/// How far a disk is.
#[derive(Debug, Default)]
pub struct Progress {
    pub done: AtomicU64,
    pub total: AtomicU64,
    /// Nobody wants it any more.
    pub stop: AtomicBool,
}

/// Where and as whom disks are made.
#[derive(Debug, Clone)]
pub struct Maker<'a> {
    pub vm: &'a VmName,
    /// The host's common user.
    pub user: User,
    pub reserved: &'a Reserved,
    /// Directories of datastores: in these an image may have files below it.
    pub stores: &'a [PathBuf],
}

impl Maker<'_> {
    /// Makes it, unless it is there. Why not is a part of a sentence.
    pub fn make(&self, disk: &DiskSpec, progress: &Progress) -> Result<(), String> {
        // Who has it alone is told with the rights of this process.
        let from = disk.from.as_deref();
        let has_it = from.and_then(|from| whose_at(Path::new(from)));
        if disk.linked {
            self.as_common(|| self.must_have_place(disk))?;
        }
        let parent = disk.linked.then(|| Parent::prepare(disk, self));
        let parent = parent.transpose()?;
        self.as_common(|| match &parent {
            Some(parent) => self.link(disk, parent),
            None => self.make_as_user((disk, has_it.as_ref()), progress),
        })
    }

    /// With the rights of the host's common user.
    fn as_common<R: Send>(
        &self,
        work: impl FnOnce() -> Result<R, String> + Send,
    ) -> Result<R, String> {
        std::thread::scope(|scope| {
            // Rights belong to threads: this one has them until it ends.
            let thread = scope.spawn(|| {
                let User { uid, gid } = self.user;
                become_user(uid, gid).map_err(|errno| {
                    format!(
                        "this process cannot have the rights of user {uid} of group {gid}: {errno}"
                    )
                })?;
                work()
            });
            let broke = Err("the work broke off".to_owned());
            thread.join().unwrap_or(broke)
        })
    }

    fn make_as_user(
        &self,
        (disk, has_it): (&DiskSpec, Option<&ImageRecord>),
        progress: &Progress,
    ) -> Result<(), String> {
        let path = Path::new(&disk.path);
        // What is there already is told by its name.
        if !path.exists() {
            must_be_no_devices(path).map_err(|error| error.to_string())?;
        }
        let place = Place::open(path, self.reserved, self.user)?;
        let mark = mark_of(self.vm, disk);
        let is_there = place.has(path, &mark)?;
        if disk.is_cloned() {
            if !is_there {
                place.name_part(disk, &mark)?;
            }
            place.remove_left((self, disk), None);
            return Ok(());
        }
        if is_there {
            return Ok(());
        }
        place.must_suit(path)?;
        let source = disk
            .from
            .as_deref()
            .map(|from| Source::open((from, has_it), self));
        let source = source.transpose()?;
        if let Some(source) = &source {
            source.lock(self.vm, &disk.name)?;
        }
        let bytes = length(disk, source.as_ref())?;
        let needed = source.as_ref().map_or(0, |source| source.needed);
        progress.total.store(needed, Ordering::Relaxed);
        let fresh = place.begin(path)?;
        let shared = match &source {
            Some(source) => source.shares_with(&fresh, progress),
            None => false,
        };
        let source = source.filter(|_| !shared);
        let has_room = match &source {
            Some(source) => place.must_have_room(path, source.needed),
            None => Ok(()),
        };
        let made = has_room
            .and_then(|()| fill(&fresh, bytes, source.as_ref(), (self.user, progress)))
            .and_then(|()| source.as_ref().map_or(Ok(()), Source::must_be_unchanged))
            .and_then(|()| {
                finish(&fresh, &mark).map_err(|error| format!("{path:?} cannot be made: {error}"))
            })
            .and_then(|()| place.name(path, &fresh));
        if made.is_err() {
            place.discard(&fresh);
        }
        made
    }
}

/// The length of the image.
fn length(disk: &DiskSpec, source: Option<&Source>) -> Result<u64, String> {
    let Some(source) = source else {
        return disk
            .wanted_bytes()
            .ok_or_else(|| "neither `from` nor `size_gib` is given".to_owned());
    };
    let (own, path) = (source.bytes.div_ceil(BLOCK), source.path());
    let own = own.saturating_mul(BLOCK);
    let most = DISK_GIB_MAX << 30;
    if own > most {
        return Err(format!(
            "{path} has {} GiB, and a disk at most {DISK_GIB_MAX}",
            own >> 30
        ));
    }
    match disk.wanted_bytes() {
        Some(wanted) if wanted < own => Err(format!(
            "{path} has {} GiB, which size_gib = {} does not hold: give at least {}",
            own.div_ceil(1 << 30),
            wanted >> 30,
            own.div_ceil(1 << 30)
        )),
        Some(wanted) => Ok(wanted),
        None => Ok(own),
    }
}

/// The directory of the image, and the names in it.
struct Place {
    dir: File,
    name: OsString,
    fresh: OsString,
    user: User,
}

impl Place {
    fn open(path: &Path, reserved: &Reserved, user: User) -> Result<Self, String> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(format!("{path:?} names no file"));
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(above, flags, Mode::empty());
        let dir = dir.map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => format!(
                "the directory {} does not exist: make it there",
                above.display()
            ),
            _ => no_rights(above, user, errno),
        })?;
        refuse_reserved(&dir, above, reserved)?;
        let mut fresh = OsString::from(".");
        fresh.push(name);
        fresh.push(".godwit-new");
        Ok(Self {
            dir: File::from(dir),
            name: name.to_owned(),
            fresh,
            user,
        })
    }

    /// Whether the image is there already, made for this disk.
    fn has(&self, path: &Path, mark: &str) -> Result<bool, String> {
        match statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return self.must_not_be_described(path).map(|()| false),
            Err(errno) => return Err(format!("{} cannot be looked at: {errno}", path.display())),
            Ok(_) => {}
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        let found = open_looked_at(&self.dir, Path::new(&self.name), flags);
        let is_own = found.is_ok_and(|found| {
            if !self.is_by_this_host(&found) {
                return false;
            }
            mark::borne_by(&found).is_ok_and(|borne| borne == mark.as_bytes())
        });
        match is_own {
            true => Ok(true),
            false => Err(format!(
                "{} exists already and was not made for this disk: leave out `from` and `size_gib` to use it as it is, or give another path",
                path.display()
            )),
        }
    }

    /// An image that is made anew would be taken for a part of the one that was there.
    fn must_not_be_described(&self, path: &Path) -> Result<(), String> {
        let described = description_of(Path::new(&self.name));
        match statat(&self.dir, &described, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Err(is_described(path)),
            Err(_) => Ok(()),
        }
    }

    /// Anybody can guess a mark: it counts on a file of the common user or root that not everybody may write.
    fn is_by_this_host(&self, found: impl std::os::fd::AsFd) -> bool {
        fstat(found).is_ok_and(|found| {
            let kind = FileType::from_raw_mode(found.st_mode);
            let is_known = [0, self.user.uid].contains(&found.st_uid);
            let for_all = Mode::from_raw_mode(found.st_mode).contains(Mode::WOTH);
            kind == FileType::RegularFile && is_known && !for_all
        })
    }

    /// An image that could not be used there would take minutes to make.
    fn must_suit(&self, path: &Path) -> Result<(), String> {
        match can_make_image_in(self.dir.as_fd(), path, self.user.uid) {
            Err(why @ (DiskError::LargeBlocks { .. } | DiskError::NotDirect { .. })) => {
                Err(why.to_string())
            }
            // Making it tells.
            _ => Ok(()),
        }
    }

    fn must_have_room(&self, path: &Path, needed: u64) -> Result<(), String> {
        let found = fstatvfs(&self.dir).map_err(|errno| {
            format!(
                "the file system of {} cannot be looked at: {errno}",
                path.display()
            )
        })?;
        let free = room_of(&found);
        match free >= needed {
            true => Ok(()),
            false => Err(no_room(path, Some((needed, free)))),
        }
    }

    /// A new file beside the image; one that a killed maker left is removed first, by whoever has its lock while it has this name.
    fn begin(&self, path: &Path) -> Result<File, String> {
        let failed = |errno: Errno| no_rights(path.parent().unwrap_or(path), self.user, errno);
        let is_made = || {
            format!(
                "{} is being made by somebody else just now: wait for that",
                path.display()
            )
        };
        let flags = OFlags::RDWR | OFlags::NOFOLLOW;
        let left = open_looked_at(&self.dir, Path::new(&self.fresh), flags);
        if let Ok(left) = &left {
            let locked = flock(left, FlockOperation::NonBlockingLockExclusive);
            locked.map_err(|_| is_made())?;
            // Whoever had its lock before may have removed it, and begun another.
            if !self.is_file(&self.fresh, left) {
                return Err(is_made());
            }
        }
        if !matches!(left, Err(NotOpened::Errno(Errno::NOENT))) {
            let _ = unlinkat(&self.dir, &self.fresh, AtFlags::empty());
        }
        let fresh = openat(
            &self.dir,
            &self.fresh,
            flags | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        );
        let fresh = File::from(fresh.map_err(|errno| match errno {
            Errno::EXIST => is_made(),
            errno => failed(errno),
        })?);
        flock(&fresh, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => is_made(),
            errno => failed(errno),
        })?;
        // Before it was locked somebody may have taken it for one that was left.
        self.must_be_fresh(path, &fresh)?;
        Ok(fresh)
    }

    /// Refuses to give a name to what another maker has put in the place of this file.
    fn must_be_fresh(&self, path: &Path, fresh: &File) -> Result<(), String> {
        match self.is_file(&self.fresh, fresh) {
            true => Ok(()),
            false => Err(format!(
                "{} was begun by somebody else meanwhile: try again once that has ended",
                path.display()
            )),
        }
    }

    /// Gives the image its name, which nothing else has, and makes that durable.
    fn name(&self, path: &Path, file: &File) -> Result<(), String> {
        self.must_be_fresh(path, file)?;
        let (fresh, name) = (Path::new(&self.fresh), Path::new(&self.name));
        let named = rename_to_free(self.dir.as_fd(), fresh, name);
        named.map_err(|errno| match errno {
            Errno::EXIST => format!("{} exists already: give another path", path.display()),
            errno => format!("{} cannot be made: {errno}", path.display()),
        })?;
        self.dir
            .sync_all()
            .map_err(|error| format!("{} cannot be made durable: {error}", path.display()))
    }

    /// Removes it, and nothing of another maker.
    fn discard(&self, fresh: &File) {
        if self.is_file(&self.fresh, fresh) {
            let _ = unlinkat(&self.dir, &self.fresh, AtFlags::empty());
        }
    }
}

fn refuse_reserved(
    file: impl std::os::fd::AsFd,
    path: &Path,
    reserved: &Reserved,
) -> Result<(), String> {
    match reserved.of_open(file) {
        Ok(None) => Ok(()),
        Ok(Some(dir)) => Err(format!(
            "{} lies in {}, where this host keeps its records or its guests' memory: put the file elsewhere",
            path.display(),
            dir.display()
        )),
        Err(error) => Err(format!("{} cannot be looked at: {error}", path.display())),
    }
}

fn no_rights(dir: &Path, user: User, errno: Errno) -> String {
    let (dir, User { uid, gid }) = (dir.display(), user);
    match errno {
        Errno::ACCESS | Errno::PERM => format!(
            "QEMU's common user (uid {uid}, group {gid}) may not make files in {dir}: if it is there for images, let that group write in it ('chown 0:{gid} {dir}; chmod 3770 {dir}') and pass through the directories above; else give the disk another place"
        ),
        errno => format!("no file can be made in {dir}: {errno}"),
    }
}

fn no_room(path: &Path, known: Option<(u64, u64)>) -> String {
    let figures = known.map(|(needed, free)| {
        format!(
            ": {} MiB are needed and {} are free",
            needed.div_ceil(1 << 20),
            free >> 20
        )
    });
    format!(
        "there is no room for {}{}; make room there, or give another path",
        path.display(),
        figures.unwrap_or_default()
    )
}

fn fill(
    fresh: &File,
    bytes: u64,
    source: Option<&Source>,
    (user, progress): (User, &Progress),
) -> Result<(), String> {
    let failed = |error: &io::Error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC | Errno::DQUOT) => {
            "there is no room left: make room there, or give another path".to_owned()
        }
        Some(Errno::FBIG) => "its file system takes no file of that size".to_owned(),
        _ => error.to_string(),
    };
    fresh.set_len(bytes).map_err(|error| failed(&error))?;
    match source {
        None => Ok(()),
        Some(source) if *source.format() == Format::Raw => {
            copy(source, fresh, progress).map_err(|error| failed(&error))
        }
        Some(source) => {
            let layers = source.layers();
            convert::to_raw((layers.as_slice(), source.bytes), fresh, user, progress)
        }
    }
}

/// Copies what is data; holes and zeroes stay holes.
fn copy(source: &Source, fresh: &File, progress: &Progress) -> io::Result<()> {
    let (mut at, mut buffer) = (0, vec![0; PIECE]);
    while let Some(data) = next_data(source.file(), at..source.bytes)? {
        at = data.start;
        let to = data.end;
        while at < to {
            if progress.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("nobody wants it any more"));
            }
            let length = usize::try_from(to - at).unwrap_or(PIECE).min(PIECE);
            let piece = buffer.get_mut(..length).unwrap_or_default();
            source.file().read_exact_at(piece, at)?;
            if piece.iter().any(|byte| *byte != 0) {
                fresh.write_all_at(piece, at)?;
            }
            at += length as u64;
            progress.done.fetch_add(length as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// For the group of all VMs' images, and durable.
fn finish(fresh: &File, mark: &str) -> io::Result<()> {
    fchmod(fresh, Mode::from_raw_mode(0o660))?;
    if let Err(errno) = mark::bear(fresh, mark) {
        // Only a kill between two steps would need it.
        tracing::warn!(%errno, "the image does not bear whose disk it is");
    }
    fresh.sync_all()
}

#[cfg(test)]
#[path = "make_disk_tests.rs"]
mod tests;
