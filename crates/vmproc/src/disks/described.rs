//! The description beside a disk's image ([`Images`]), and the mark on that image by which the two belong together.
//!
//! Without a mark a description would be taken for that of whatever image lies there: one that was put back from a backup, was made anew or came with
//! a migration. So both bear one random number. What the image bears is an extended attribute, and what counts is:
//!
//! | the image bears | a description is there | none is there |
//! |---|---|---|
//! | nothing | it is another image's: refused | the image is all of its disk |
//! | `N begun` | with `N` it counts: whoever wrote it died before the image bore `N` | all of its disk: whoever began to write or to remove it died |
//! | `N` | with `N` it counts | it is lost: refused |
//!
//! A description of another number is always refused. Owns nothing: the files are the disk's. Refuses: descriptions that anybody else may have
//! written or that contradict themselves, storage that keeps no marks, and disks on block devices.

use super::claim::Denied;
use super::entry::{Entry, Found};
use super::layers::Place;
use super::redo::must_be_made_for;
use super::served::open_file;
use godwit_qemu::layered::random_number;
use godwit_qemu::rights::as_user;
use godwit_qemu::user::User;
use godwit_snapshots::{Image, Images, Kind};
use godwit_store::{json_from, remove_document, save_json, sync_document};
use godwit_types::datastore::is_device_path;
use godwit_types::snapshots::{
    LAYERED_BEGUN as BEGUN, LAYERED_MARK as MARK, LAYERED_MARK_MAX as MARK_LEN_MAX, description_of,
};
use godwit_types::vm::DiskSpec;
use rustix::fs::{OFlags, XattrFlags, fgetxattr, fsetxattr, fstat, fsync};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Why something was not done with files.
pub(super) enum NotDone {
    Denied(io::Error),
    Why(String),
}

impl From<io::Error> for NotDone {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::PermissionDenied => Self::Denied(error),
            _ => Self::Why(error.to_string()),
        }
    }
}

impl Denied for NotDone {
    fn is_denied(&self) -> bool {
        matches!(self, Self::Denied(_))
    }
}

impl std::fmt::Display for NotDone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Denied(error) => error.fmt(f),
            Self::Why(why) => f.write_str(why),
        }
    }
}

/// Errors of files say in the end what the kernel said.
pub(super) fn not_done<E: std::error::Error + 'static>(error: E) -> NotDone {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(one) = cause {
        let of_kernel = one.downcast_ref::<io::Error>().map(io::Error::kind);
        if of_kernel == Some(io::ErrorKind::PermissionDenied) {
            let said = io::Error::new(io::ErrorKind::PermissionDenied, error.to_string());
            return NotDone::Denied(said);
        }
        cause = one.source();
    }
    NotDone::Why(error.to_string())
}

/// What an image bears.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mark {
    Nothing,
    /// A description of this number is being written, or removed.
    Begun(String),
    /// There is a description of this number.
    Bound(String),
}

impl Mark {
    fn parse(text: &str) -> Self {
        match text.strip_suffix(BEGUN) {
            Some(number) => Self::Begun(number.to_owned()),
            None => Self::Bound(text.to_owned()),
        }
    }

    fn is_of(&self, number: &str) -> bool {
        matches!(self, Self::Begun(own) | Self::Bound(own) if own == number)
    }
}

/// Whether the description that was found, which bears this number, counts; and where none was found, whether the image is all of its disk. Why not is
/// the end of a sentence that names the image.
fn judge(mark: &Mark, described: Option<&str>) -> Result<bool, String> {
    match (mark, described) {
        (Mark::Nothing | Mark::Begun(_), None) => Ok(false),
        (mark, Some(number)) if mark.is_of(number) => Ok(true),
        (Mark::Bound(_), None) => Err(format!(
            "is a part of its disk, which has snapshots or is linked to another image, and its description, the file of the same name with '.images' behind it, is gone, which says what else belongs to it: put that file back (or, if it was not linked, and all that came after the first snapshot may be lost, 'setfattr -x {MARK}' lets the image be all of its disk)"
        )),
        (_, Some(_)) => Err(
            "is another image than the one whose snapshots are described beside it, in the file of the same name with '.images' behind it: put back what belongs together, or, if this image is all of its disk, move that file away"
                .to_owned(),
        ),
    }
}

fn mark_of(image: BorrowedFd<'_>) -> Result<Mark, NotDone> {
    let mut value = [0; MARK_LEN_MAX];
    let length = match fgetxattr(image, MARK, &mut value[..]) {
        Ok(length) => length,
        // Storage that keeps no attributes took no snapshot.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(Mark::Nothing),
        Err(error) => return Err(io::Error::from(error).into()),
    };
    let text = value.get(..length).unwrap_or_default();
    Ok(Mark::parse(&String::from_utf8_lossy(text)))
}

/// Whether an image bears the number of this description.
pub(super) fn bears_mark_of(image: BorrowedFd<'_>, images: &Images) -> Result<bool, String> {
    let mark = mark_of(image).map_err(|error| error.to_string())?;
    Ok(mark.is_of(&images.mark))
}

/// What the image at this path is a part of, for whoever looks with the rights of this process; nothing where it is all of its disk.
pub(super) fn described_beside(
    path: &Path,
    image: BorrowedFd<'_>,
) -> Result<Option<Images>, String> {
    let at = description_of(path);
    let told = |why: &dyn std::fmt::Display| format!("{}: {why}", at.display());
    let mark = mark_of(image).map_err(|error| format!("its mark cannot be read: {error}"))?;
    let images = read_description(&at).map_err(|error| told(&error))?;
    if let Some(images) = &images {
        images.check().map_err(|why| told(&why))?;
    }
    let number = images.as_ref().map(|images| images.mark.as_str());
    let counts = judge(&mark, number).map_err(|why| format!("the image {why}"))?;
    Ok(images.filter(|_| counts))
}

/// A description as it is, whoever wrote it and whatever image lies beside it; nothing where there is none.
pub(super) fn read_description(at: &Path) -> Result<Option<Images>, NotDone> {
    let (found, entry) = Entry::looked_at(at)?;
    match found {
        Found::Nothing => Ok(None),
        Found::Other => Err(NotDone::Why("it is no file".to_owned())),
        Found::File(_) => json_from(at, entry.open()?).map(Some).map_err(not_done),
    }
}

/// Has the image bear it, durably, whatever it said before.
fn bear(image: BorrowedFd<'_>, mark: &Mark) -> Result<(), NotDone> {
    let text = match mark {
        Mark::Nothing => return Ok(()),
        Mark::Begun(number) => format!("{number}{BEGUN}"),
        Mark::Bound(number) => number.clone(),
    };
    let told = |error: Errno| {
        match error {
        Errno::OPNOTSUPP => NotDone::Why(
            "its storage keeps no extended attributes, by which an image and its snapshots know each other: move the disk to a datastore that does (ext4, XFS, Btrfs, or NFS 4.2 from Linux 5.9 on)"
                .to_owned(),
        ),
        error => io::Error::from(error).into(),
    }
    };
    fsetxattr(image, MARK, text.as_bytes(), XattrFlags::empty()).map_err(told)?;
    fsync(image).map_err(|error| io::Error::from(error).into())
}

impl Place<'_> {
    /// What the disk consists of; of one that is no more than its own image it is made up.
    pub fn load(&self) -> Result<Images, String> {
        if is_device_path(&self.spec.path) {
            return self.of_one(0);
        }
        let image = self.open_own(true)?;
        if let Some(images) = self.load_of(image.as_fd())? {
            return Ok(images);
        }
        let found = image.metadata().map_err(|error| error.to_string())?;
        self.of_one(found.len())
    }

    fn of_one(&self, bytes: u64) -> Result<Images, String> {
        let name = self.file_name()?;
        Ok(Images::of_one(name, bytes, &random_number()?))
    }

    /// What the disk consists of whose own image is open; nothing of one that is no more than that image.
    pub fn load_of(&self, image: BorrowedFd<'_>) -> Result<Option<Images>, String> {
        if is_device_path(&self.spec.path) {
            return Ok(None);
        }
        let at = description_of(self.path());
        // Nobody but the image's own user may read the one, and perhaps nobody but the common one the other.
        let mark = self.as_opener(|| mark_of(image))?;
        let found = self.as_opener(|| self.read(image, &at))?;
        // Tidying may have removed both since the mark was read.
        let mark = match (&mark, &found) {
            (Mark::Bound(_), None) => self.as_opener(|| mark_of(image))?,
            _ => mark,
        };
        let told = |why: String| format!("{}: {why}", at.display());
        if let Some(images) = &found {
            images.check().map_err(told)?;
        }
        let number = found.as_ref().map(|images| images.mark.as_str());
        let counts = judge(&mark, number);
        let counts = counts.map_err(|why| format!("the image {} {why}", self.spec.path))?;
        let Some(images) = found.filter(|_| counts) else {
            return Ok(None);
        };
        let own = self.file_name()?;
        let is_own = |image: &Image| image.kind == Kind::Raw && !image.common;
        let described = images.images.get(own);
        // In that of a linked disk is nothing.
        let is_linked = described.is_none() && images.common().is_some();
        let strange = images.common().and_then(|_| images.not_called_after(own));
        if let Some(name) = strange {
            return Err(told(format!(
                "the image {own} is linked to another one, and its part {name} is called after another image, whose disk that belongs to: a linked disk is neither copied nor renamed by hand, since both would write to one file; clone its VM ('godwit vm clone'), or let the files have the names again that they had"
            )));
        }
        if !images.elsewhere.is_empty() {
            let inode = fstat(image).map_err(|errno| io::Error::from(errno).to_string())?;
            must_be_made_for(&images, (&self.spec.path, inode.st_ino)).map_err(told)?;
        }
        match is_linked || described.is_some_and(is_own) {
            true => Ok(Some(images)),
            false => Err(told(format!(
                "the disk's own image {own} is not described as one"
            ))),
        }
    }

    /// What is judged is what is read: it is opened once.
    fn read(&self, image: BorrowedFd<'_>, at: &Path) -> Result<Option<Images>, NotDone> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(at);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        self.must_be_ours((image, at), &file.metadata()?)?;
        json_from(at, file).map(Some).map_err(not_done)
    }

    /// Whoever may write it decides what the guest's disk is.
    fn must_be_ours(
        &self,
        (image, at): (BorrowedFd<'_>, &Path),
        found: &std::fs::Metadata,
    ) -> Result<(), NotDone> {
        let writer = self.writer(image)?.uid;
        let by_us = [0, writer].contains(&found.uid());
        let for_us = found.mode() & 0o022 == 0;
        match found.is_file() && by_us && for_us {
            true => Ok(()),
            false => Err(NotDone::Why(format!(
                "{} is no file of root or of user {writer} that nobody else may write: see who has put it there",
                at.display()
            ))),
        }
    }

    /// Who writes the description: the image's own user where it belongs to the VM's, so that nobody says what it is who may not write it; else the
    /// hosts' common one.
    fn writer(&self, image: BorrowedFd<'_>) -> io::Result<User> {
        let owner = fstat(image)?.st_uid;
        Ok(match owner == self.owner.uid {
            true => self.owner,
            false => User {
                uid: self.config.qemu_uid,
                ..self.owner
            },
        })
    }

    /// Has the image say that a description of this number may be written, durably; nothing where it does already.
    pub fn begin(&self, images: &Images) -> Result<(), String> {
        let image = self.open_own(false)?;
        self.as_opener(|| self.begin_on(image.as_fd(), images))
    }

    fn begin_on(&self, image: BorrowedFd<'_>, images: &Images) -> Result<(), NotDone> {
        match mark_of(image)? {
            mark if mark.is_of(&images.mark) => Ok(()),
            Mark::Bound(_) => Err(NotDone::Why(format!(
                "the image {} is another one than the one whose snapshots are described: put back what belongs together",
                self.spec.path
            ))),
            Mark::Nothing | Mark::Begun(_) => bear(image, &Mark::Begun(images.mark.clone())),
        }
    }

    /// Writes it down, durably: from here on the disk consists of that.
    pub fn save(&self, images: &Images) -> Result<(), String> {
        let at = description_of(self.path());
        let image = self.open_own(false)?;
        let image = image.as_fd();
        if images.is_one_raw() {
            self.as_opener(|| bear(image, &Mark::Begun(images.mark.clone())))?;
            // While the description is there whoever dies here leaves somebody who does it again.
            if let Err(why) = self.forget_own_descriptor() {
                let disk = &self.spec.name;
                tracing::info!(disk, why, "a descriptor that is not needed stays");
            }
            return self.as_writer(image, || remove_document(&at).map_err(not_done));
        }
        self.as_opener(|| self.begin_on(image, images))?;
        self.as_writer(image, || save_json(&at, images).map_err(not_done))?;
        self.bind(image, images);
        Ok(())
    }

    /// Makes what was found durable before anybody acts on it: whoever wrote it may have died before it was.
    pub fn confirm(&self, image: BorrowedFd<'_>, images: &Images) -> Result<(), String> {
        let at = description_of(self.path());
        self.as_opener(|| sync_document(&at).map_err(not_done))?;
        self.bind(image, images);
        Ok(())
    }

    /// Has an image that is open say that it is a part of what is described there, durably.
    pub(super) fn bear_bound(&self, image: BorrowedFd<'_>, images: &Images) -> Result<(), String> {
        self.as_opener(|| bear(image, &Mark::Bound(images.mark.clone())))
    }

    /// From here on it is told where the description is lost. It counts without that, too.
    fn bind(&self, image: BorrowedFd<'_>, images: &Images) {
        let bound = Mark::Bound(images.mark.clone());
        let borne = self.as_opener(|| match mark_of(image)? == bound {
            true => Ok(()),
            false => bear(image, &bound),
        });
        if let Err(why) = borne {
            let disk = &self.spec.name;
            tracing::warn!(disk, why, "an image does not say that it has snapshots");
        }
    }

    pub(super) fn open_own(&self, read_only: bool) -> Result<File, String> {
        let spec = DiskSpec {
            read_only,
            ..self.spec.clone()
        };
        let file = open_file(self.config, &spec, self.owner).map_err(|error| error.message)?;
        let found = fstat(&file).map_err(|error| error.to_string())?;
        match self
            .image
            .is_none_or(|image| image == (found.st_dev, found.st_ino))
        {
            true => Ok(file),
            false => Err(format!(
                "{} is another file by now than the image that is in use: see who may write into its directory",
                self.spec.path
            )),
        }
    }

    /// With the rights of whoever writes the description of this image, and no others.
    pub(super) fn as_writer<R: Send>(
        &self,
        image: BorrowedFd<'_>,
        work: impl Fn() -> Result<R, NotDone> + Sync,
    ) -> Result<R, String> {
        let writer = self.writer(image).map_err(|error| error.to_string())?;
        let done = as_user(writer.uid, self.config.qemu_gid, || Ok(work()));
        let done = done.map_err(|errno| io::Error::from(errno).to_string())?;
        done.map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBER: &str = "0123456789abcdef0123456789abcdef";
    const OTHER: &str = "fedcba9876543210fedcba9876543210";

    fn begun() -> Mark {
        Mark::Begun(NUMBER.to_owned())
    }

    fn bound() -> Mark {
        Mark::Bound(NUMBER.to_owned())
    }

    #[test]
    fn a_description_counts_for_the_image_that_bears_its_number() {
        for mark in [begun(), bound()] {
            assert_eq!(judge(&mark, Some(NUMBER)), Ok(true), "{mark:?}");
        }
        for mark in [Mark::Nothing, begun()] {
            assert_eq!(judge(&mark, None), Ok(false), "{mark:?}");
        }
    }

    /// A backup of the image was put back under a description that stayed, or an image was made anew there.
    #[test]
    fn a_description_beside_another_image_is_not_taken_for_that_ones() {
        for mark in [Mark::Nothing, begun(), bound()] {
            let why = judge(&mark, Some(OTHER)).unwrap_err();
            assert!(why.contains("is another image than"), "{why}");
        }
    }

    #[test]
    fn an_image_whose_description_is_lost_is_not_all_of_its_disk() {
        let why = judge(&bound(), None).unwrap_err();
        assert!(why.contains("is gone") && why.contains(MARK), "{why}");
    }

    #[test]
    fn what_an_image_bears_is_read_as_it_was_written() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = File::create(directory.path().join("root.raw")).unwrap();
        let read = || mark_of(image.as_fd()).ok();
        assert_eq!(read(), Some(Mark::Nothing));
        for mark in [begun(), bound(), begun()] {
            assert!(bear(image.as_fd(), &mark).is_ok());
            assert_eq!(read(), Some(mark));
        }
        let long = "7".repeat(MARK_LEN_MAX + 1);
        fsetxattr(&image, MARK, long.as_bytes(), XattrFlags::empty()).unwrap();
        assert!(read().is_none(), "what is none of ours is no permission");
    }
}
