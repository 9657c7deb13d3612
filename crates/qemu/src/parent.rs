//! Images as which linked disks begin, and by which number they are known.
//!
//! Many disks read such an image, and what they lack would change with it: so it bears a number, durably, before the first disk is linked to
//! it, and whoever opens it for writing afterwards is refused. A disk knows its image by that number: another one in its place has another, or none.
//!
//! Where nobody of this host can write on its storage, it bears none, and need not: that number is made of what it is anew whenever it is opened. Once its
//! storage can be written it bears that number, before anybody reads it as a disk, unless it has another one by then: then it is another image.
//!
//! A copy on another host is the same one where that has its number and its length: what copies attributes writes them last, or gives the copy its name
//! last, so that half a copy has none.
//!
//! Owns nothing: the mark is the image's. Refuses: to guess where a mark cannot be read, storage that keeps none and can be written, and an image that has no mark
//! and can be written by another way than the one by which it is opened.

use crate::disk::{NotOpened, open_looked_at};
use crate::mounted::Mounted;
use crate::reserved::place_of_open;
use crate::rights::as_user;
use crate::seen::number_of;
use crate::user::User;
use godwit_types::migration::LinkedTo;
use godwit_types::snapshots::{PARENT_MARK, PARENT_MARK_DIGITS};
use rustix::fs::{CWD, OFlags, XattrFlags, fgetxattr, fsetxattr, fsync};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Whether an image is the one that disks know by a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// It bears that number.
    ByMark,
    /// It bears none, and is what that number was made of.
    BySight,
    Not,
}

/// Whether an open image is the one that disks know by this number.
pub fn known_by(image: &File, number: &str) -> io::Result<Known> {
    match parent_id(image)? {
        Some(borne) if borne == number => return Ok(Known::ByMark),
        Some(_) => return Ok(Known::Not),
        None => {}
    }
    // Whatever else it bears is none of ours.
    let is_it = !is_parent(image)? && number_of(image)? == number;
    Ok(if is_it { Known::BySight } else { Known::Not })
}

/// Refuses an image that somebody could change, or put in the place of the one that disks know by its number, which anybody can read: it must be root's or that of
/// the host's QEMUs' common user, unless nobody writes on its storage. Why is the end of a sentence that names it.
pub fn must_be_trusted(image: &File, common: u32) -> Result<(), String> {
    if Mounted::of(image)? != Mounted::ForWriting {
        return Ok(());
    }
    let found = image.metadata().map_err(|error| error.to_string())?;
    let own = rustix::process::geteuid().as_raw();
    let who = match (found.mode() & 0o002 != 0, found.uid()) {
        (true, _) => "everybody".to_owned(),
        (false, owner) if [0, common, own].contains(&owner) => return Ok(()),
        (false, owner) => format!("user {owner}"),
    };
    Err(format!(
        "{who} can change it, and with it every disk that is linked to it: have it be root's, for others to read only ('chown root FILE; chmod go-w FILE'), if it certainly is what it was"
    ))
}

/// Has an image that is [`Known::BySight`] be written by nobody: it bears its number from now on, durably, unless nobody of this host can write it anyway.
/// Whoever calls this has its lock. Why not is the end of a sentence that names it.
pub fn protect(image: &File, number: &str) -> Result<(), String> {
    match Mounted::of(image)? {
        Mounted::ForReading => Ok(()),
        Mounted::ForReadingHere => Err(is_written_elsewhere(number)),
        Mounted::ForWriting => match bear(image, number)? {
            borne if borne == number => Ok(()),
            borne => Err(format!("it bears another number by now: {borne}")),
        },
    }
}

fn is_written_elsewhere(number: &str) -> String {
    format!(
        "it bears no mark that nobody may write it, and its file system, which is mounted for reading only there, can be written by another mount of this host: 'setfattr -n {PARENT_MARK} -v {number} FILE' has it bear one, with the path that it has there"
    )
}

/// The number by which disks know an image that are linked to it from now on: the one that it bears, or one that is made of what it is, which it bears from now on,
/// durably, where it can be written: so those know it by the same that were linked to it before it could. Why there is none is the end of a sentence that names it.
pub(crate) fn number_for_disks(image: &File) -> Result<String, String> {
    let told = |error: io::Error| format!("it cannot be looked at: {error}");
    let mounted = Mounted::of(image)?;
    let number = match is_parent(image).map_err(|errno| told(errno.into()))? {
        true => borne_by(image)?,
        false => number_of(image).map_err(told)?,
    };
    match mounted {
        // One that it bears may not be durable yet.
        Mounted::ForWriting => bear(image, &number),
        Mounted::ForReading => Ok(number),
        Mounted::ForReadingHere => match is_parent(image) {
            Ok(true) => Ok(number),
            _ => Err(is_written_elsewhere(&number)),
        },
    }
}

/// Whether an image bears a mark, whatever that says.
pub fn is_parent(image: impl AsFd) -> Result<bool, Errno> {
    match fgetxattr(image, PARENT_MARK, &mut [0; PARENT_MARK_DIGITS][..]) {
        Ok(_) | Err(Errno::RANGE) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The number that an image bears; nothing where it bears none, or none of ours.
pub fn parent_id(image: impl AsFd) -> Result<Option<String>, Errno> {
    let mut value = [0; PARENT_MARK_DIGITS];
    let length = match fgetxattr(image, PARENT_MARK, &mut value[..]) {
        Ok(length) => length,
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => return Ok(None),
        Err(error) => return Err(error),
    };
    let digits = value.get(..length).unwrap_or_default();
    let digits = String::from_utf8_lossy(digits).into_owned();
    let is_number = digits.len() == PARENT_MARK_DIGITS;
    let is_number = is_number && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    Ok(is_number.then_some(digits))
}

/// Whether this host has the image to which a disk of so many bytes is linked elsewhere, in one of these directories and readable by this user; else why
/// not, as the end of a sentence that names it.
pub fn must_be_same(
    linked: &LinkedTo,
    bytes: u64,
    stores: &[PathBuf],
    user: User,
) -> Result<(), String> {
    let is_same = || is_same((linked, user.uid), bytes, stores);
    let looked = as_user(user.uid, user.gid, || Ok(is_same()));
    looked.map_err(|errno| errno.to_string())?
}

fn is_same(
    (linked, common): (&LinkedTo, u32),
    bytes: u64,
    stores: &[PathBuf],
) -> Result<(), String> {
    let opened = open_looked_at(CWD, Path::new(&linked.path), OFlags::RDONLY);
    let file = opened.map_err(|why| match why {
        NotOpened::Errno(Errno::NOENT | Errno::NOTDIR) => "it is not there".to_owned(),
        why => format!("it cannot be read: {why}"),
    })?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is a block device there".to_owned());
    }
    let place = place_of_open(&file).map_err(|error| error.to_string())?;
    let is_in =
        |store: &PathBuf| std::fs::canonicalize(store).is_ok_and(|store| place.starts_with(store));
    if !stores.iter().any(is_in) {
        return Err("it is in no datastore of that host".to_owned());
    }
    let borne = parent_id(&file).map_err(|errno| format!("its mark cannot be read: {errno}"))?;
    match borne {
        Some(id) if id == linked.id => {}
        Some(_) => return Err("another image is there".to_owned()),
        None => {
            return Err(format!(
                "it bears no mark ({PARENT_MARK}), which a copy without attributes lacks"
            ));
        }
    }
    must_be_trusted(&file, common)?;
    match found.len() == bytes {
        true => Ok(()),
        false => Err(format!(
            "it has {} bytes there, and the disk {bytes}",
            found.len()
        )),
    }
}

/// Why an image is not opened for writing.
pub fn is_not_written(path: &Path) -> String {
    format!(
        "{} is what linked disks begin as, and is not written any more, since they would change with it: give this disk another image, or a copy of it ('from' without 'linked'); once no disk is linked to it, 'setfattr -x {PARENT_MARK} FILE' has it be written again",
        path.display()
    )
}

/// Has an image bear this number, durably, unless it bears one; returns the one that it bears. Why not is the end of a sentence that names it.
fn bear(image: &File, number: &str) -> Result<String, String> {
    let told = |error: Errno| {
        match error {
        Errno::OPNOTSUPP => {
            "its storage keeps no extended attributes (user.*), by which it is known that nobody may write it: put it in a datastore that does (ext4, XFS, Btrfs, or NFS 4.2 from Linux 5.9 on)".to_owned()
        }
        Errno::ACCESS | Errno::PERM | Errno::ROFS => format!(
            "it cannot bear the mark that nobody may write it ({error}): have it be a file of root or of the host's common user on storage that can be written, without 'chattr +i'"
        ),
        error => format!("the mark that nobody may write it cannot be written: {error}"),
    }
    };
    match fsetxattr(image, PARENT_MARK, number.as_bytes(), XattrFlags::CREATE) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(told(error)),
    }
    // Whoever wrote it may have died before it was durable.
    fsync(image).map_err(told)?;
    borne_by(image)
}

fn borne_by(image: &File) -> Result<String, String> {
    let borne = parent_id(image);
    let borne = borne.map_err(|errno| format!("the mark that it bears cannot be read: {errno}"))?;
    borne.ok_or_else(|| {
        format!("it bears an attribute {PARENT_MARK} which is none of Godwit's: see who has written that")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    const NUMBER: &str = "0123456789abcdef0123456789abcdef";

    /// Whoever may write into its directory put another file there, with the number that everybody can read, and all linked disks changed.
    #[test]
    fn an_image_that_somebody_may_change_is_not_the_one_that_disks_are_linked_to() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let (image, path) = (file.as_file(), file.path());
        let common = 4242;
        assert_eq!(must_be_trusted(image, common), Ok(()));
        let mode = |mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        mode(0o646);
        let why = must_be_trusted(image, common).unwrap_err();
        assert!(why.contains("everybody can change it"), "{why}");
        mode(0o640);
        if !rustix::process::geteuid().is_root() {
            println!("skipped: giving a file away needs root");
            return;
        }
        for (owner, is_trusted) in [(common, true), (4243, false), (0, true)] {
            std::os::unix::fs::chown(path, Some(owner), None).unwrap();
            let why = must_be_trusted(image, common);
            assert_eq!(why.is_ok(), is_trusted, "{owner}: {why:?}");
        }
    }

    #[test]
    fn a_copy_is_the_same_image_by_its_place_its_number_and_its_length() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let stores = [directory.path().to_owned()];
        let path = directory.path().join("base.raw");
        let linked = |id: &str| LinkedTo {
            path: path.to_string_lossy().into_owned(),
            id: id.to_owned(),
            used_bytes: 0,
            has_snapshots: false,
        };
        let why = |id: &str, bytes, stores: &[PathBuf]| is_same((&linked(id), 0), bytes, stores);
        let refused = |id: &str, bytes, stores: &[PathBuf]| why(id, bytes, stores).unwrap_err();
        assert!(refused(NUMBER, 4096, &stores).contains("is not there"));
        let file = File::create(&path).unwrap();
        file.set_len(4096).unwrap();
        assert!(refused(NUMBER, 4096, &stores).contains("bears no mark"));
        bear(&file, NUMBER).unwrap();
        assert_eq!(why(NUMBER, 4096, &stores), Ok(()));
        assert!(refused(&"7".repeat(32), 4096, &stores).contains("another image"));
        assert!(refused(NUMBER, 8192, &stores).contains("has 4096 bytes"));
        assert!(refused(NUMBER, 4096, &[]).contains("in no datastore"));
        let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
        let others = [elsewhere.path().to_owned()];
        assert!(refused(NUMBER, 4096, &others).contains("in no datastore"));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(refused(NUMBER, 4096, &stores).contains("cannot be read"));
    }

    #[test]
    fn an_image_bears_the_first_number_that_it_was_given_and_is_not_written_from_then_on() {
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let file = image.as_file();
        assert_eq!((is_parent(file), parent_id(file)), (Ok(false), Ok(None)));
        assert_eq!(bear(file, NUMBER), Ok(NUMBER.to_owned()));
        assert_eq!(bear(file, &NUMBER.replace('0', "7")), Ok(NUMBER.to_owned()));
        assert_eq!(is_parent(file), Ok(true));
        assert!(matches!(known_by(file, NUMBER), Ok(Known::ByMark)));
        let other = NUMBER.replace('0', "7");
        assert!(matches!(known_by(file, &other), Ok(Known::Not)));
        for strange in ["7", &"7".repeat(100)] {
            fsetxattr(file, PARENT_MARK, strange.as_bytes(), XattrFlags::empty()).unwrap();
            assert_eq!((is_parent(file), parent_id(file)), (Ok(true), Ok(None)));
            assert!(bear(file, NUMBER).unwrap_err().contains("none of Godwit's"));
            let seen = number_of(file).unwrap();
            assert!(matches!(known_by(file, &seen), Ok(Known::Not)));
        }
    }

    #[test]
    fn an_image_that_is_known_by_what_it_is_bears_that_number_where_it_can_be_written() {
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let file = image.as_file();
        file.set_len(1 << 20).unwrap();
        let number = number_of(file).unwrap();
        assert!(matches!(known_by(file, &number), Ok(Known::BySight)));
        assert!(matches!(known_by(file, NUMBER), Ok(Known::Not)));
        protect(file, &number).unwrap();
        protect(file, &number).unwrap();
        // It is another file since, by what is said of it.
        assert!(number_of(file).unwrap() != number);
        assert!(matches!(known_by(file, &number), Ok(Known::ByMark)));
        assert!(
            protect(file, NUMBER)
                .unwrap_err()
                .contains("another number")
        );
        assert_eq!(number_for_disks(file), Ok(number));
    }

    #[test]
    fn the_first_disk_has_an_image_bear_the_number_by_which_others_know_it_already() {
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let file = image.as_file();
        file.set_len(1 << 20).unwrap();
        let number = number_of(file).unwrap();
        assert_eq!(number_for_disks(file), Ok(number.clone()));
        assert_eq!(parent_id(file), Ok(Some(number.clone())));
        assert!(matches!(known_by(file, &number), Ok(Known::ByMark)));
        assert_eq!(number_for_disks(file), Ok(number));
    }
}
