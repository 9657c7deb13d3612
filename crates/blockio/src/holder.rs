//! A text that an image bears, which hosts that share the image replace by compare-and-swap.
//!
//! It is an extended attribute of the file: it goes where the file goes, needs no right in the directory, and a copy of the
//! bytes alone does not have it. Each version is an attribute of its own, numbered, made with `XATTR_CREATE`, which is one
//! step on a file server, too: of two hosts that replace the same version one finds that its number is taken. Whoever was
//! overtaken in between finds a higher number once its own is made, and takes its own back.
//!
//! A block device bears none; where it has a label ([`crate::label`]) the text is there, and who has the device's lock replaces it.
//!
//! Owns nothing: the attribute is the image's. Refuses: texts that are too long; files that bear no such attributes (block
//! devices without a label, some file systems), with [`io::ErrorKind::Unsupported`]. Names of that kind that no version has are overlooked.

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, fsync};
use rustix::io::Errno;

use crate::label::{self, Found, Holds, Label};

/// Followed by the number.
const NAME: &str = "user.godwit.holder.";
/// Followed by who tries.
const TRIAL: &str = "user.godwit.trial.";
/// Bytes of a text.
const TEXT_MAX: usize = 2048;
/// In the place of a longer one.
const TOO_LONG: &[u8] = b"too long";
/// Bytes of the names of all attributes that a file bears (the kernel's limit).
const NAMES_MAX: usize = 64 << 10;
/// How often a version that goes away while it is read is looked for again.
const LOOKS: u32 = 64;
/// No version's number is larger.
const NUMBER_MAX: u64 = 1 << 48;

/// A version of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    number: u64,
    /// As somebody wrote it; anybody with rights on the file may have. Empty once it was taken off.
    pub text: Vec<u8>,
}

/// Looks for the newest version; nothing where there is none.
pub fn read(image: BorrowedFd<'_>) -> io::Result<Option<Held>> {
    if let Some(found) = label::read(image)? {
        return Ok(held_by(found));
    }
    for _ in 0..LOOKS {
        let Some(number) = numbers(image)?.into_iter().max() else {
            return Ok(None);
        };
        let mut text = vec![0; TEXT_MAX];
        match fgetxattr(image, name_of(number), text.as_mut_slice()) {
            Ok(length) => {
                text.truncate(length);
                return Ok(Some(Held { number, text }));
            }
            // It was replaced just now.
            Err(Errno::NODATA) => {}
            // Nobody who keeps to the rules wrote it, and it is let go as any other text that is no record.
            Err(Errno::RANGE) => {
                let text = TOO_LONG.to_vec();
                return Ok(Some(Held { number, text }));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::Error::other("its record changes all the time"))
}

/// Puts a text in the place of the version that was read. Returns false, and nothing has changed, where that is not the newest
/// any more. It is durable once the file's metadata is (`fsync`).
pub fn replace(image: BorrowedFd<'_>, before: Option<&Held>, text: &[u8]) -> io::Result<bool> {
    if text.len() > TEXT_MAX {
        return Err(io::Error::other("its record is too long"));
    }
    if let Some(found) = label::read(image)? {
        return replace_in(image, found, before, text);
    }
    let number = before.map_or(0, |held| held.number).saturating_add(1);
    if number > NUMBER_MAX {
        return Err(io::Error::other("its record's numbers are used up"));
    }
    match fsetxattr(image, name_of(number), text, XattrFlags::CREATE) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(false),
        Err(errno) => return Err(unsupported(errno)),
    }
    let all = numbers(image)?;
    if all.iter().any(|other| *other > number) {
        remove(image, &name_of(number))?;
        return Ok(false);
    }
    // Nobody reads them any more.
    for older in all.into_iter().filter(|other| *other < number) {
        remove(image, &name_of(older))?;
    }
    Ok(true)
}

/// Takes the text off the image, durably. Its number stays: whoever read the text before replaces nothing.
pub fn forget(image: BorrowedFd<'_>) -> io::Result<()> {
    if let Some(found) = label::read(image)? {
        return forget_in(image, &found);
    }
    for _ in 0..LOOKS {
        let held = read(image)?.filter(|held| !held.text.is_empty());
        let Some(held) = held else {
            break;
        };
        match held.number {
            NUMBER_MAX => remove(image, &name_of(NUMBER_MAX))?,
            _ => drop(replace(image, Some(&held), b"")?),
        }
    }
    // Not what another host may have written just now.
    let of_no_version = |name: &String| name.starts_with(NAME) && number_of(name).is_none();
    for name in names(image)?.into_iter().filter(of_no_version) {
        remove(image, &name)?;
    }
    Ok(fsync(image)?)
}

/// Whether a text of so many bytes can be written beside what the image bears now, and whether its storage keeps what
/// [`replace`] counts on: of two who make one attribute only the first does. `who` tells those apart who try at a time.
pub fn try_out(image: BorrowedFd<'_>, who: &str, bytes: usize) -> io::Result<()> {
    if label::read(image)?.is_some() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "a block device's label is for one host at a time",
        ));
    }
    let name = format!("{TRIAL}{who}");
    let text = vec![b' '; bytes.min(TEXT_MAX)];
    remove(image, &name)?;
    fsetxattr(image, &name, &text, XattrFlags::CREATE).map_err(unsupported)?;
    let again = fsetxattr(image, &name, &text, XattrFlags::CREATE);
    remove(image, &name)?;
    match again {
        Err(Errno::EXIST) => Ok(()),
        Ok(()) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its storage lets two hosts make the same extended attribute",
        )),
        Err(errno) => Err(errno.into()),
    }
}

/// What a device's label keeps.
fn held_by(found: Found) -> Option<Held> {
    let (number, is_disk) = (found.number, found.label.holds != Holds::Nothing);
    let text = found.label.text.filter(|_| is_disk);
    text.map(|text| Held { number, text })
}

/// As [`replace`], durably. A device that holds no disk is nobody's.
fn replace_in(
    image: BorrowedFd<'_>,
    found: Found,
    before: Option<&Held>,
    text: &[u8],
) -> io::Result<bool> {
    if found.label.holds == Holds::Nothing {
        return Err(io::Error::other("its label says that it holds no disk"));
    }
    if held_by(found.clone()).as_ref() != before {
        return Ok(false);
    }
    let text = Some(text.to_vec());
    let label = Label {
        text,
        ..found.label.clone()
    };
    label::write(image, Some(&found), label).map(|_| true)
}

/// As [`forget`]. What a person lets go that is a part of a disk counts as a disk from then on: nobody else can tell.
fn forget_in(image: BorrowedFd<'_>, found: &Found) -> io::Result<()> {
    if found.label.holds == Holds::Nothing {
        return Ok(());
    }
    let label = Label {
        holds: Holds::Disk,
        text: Some(Vec::new()),
        ..found.label.clone()
    };
    label::write(image, Some(found), label).map(drop)
}

fn remove(image: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match fremovexattr(image, name) {
        Ok(()) | Err(Errno::NODATA) => Ok(()),
        Err(errno) => Err(unsupported(errno)),
    }
}

fn name_of(number: u64) -> String {
    format!("{NAME}{number}")
}

/// The numbers of all versions.
fn numbers(image: BorrowedFd<'_>) -> io::Result<Vec<u64>> {
    let names = names(image)?;
    Ok(names.iter().filter_map(|name| number_of(name)).collect())
}

fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_prefix(NAME)?.parse().ok()?;
    (number <= NUMBER_MAX && name_of(number) == *name).then_some(number)
}

/// The names of all attributes that are text.
fn names(image: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    let mut names = vec![0; NAMES_MAX];
    let length = match flistxattr(image, names.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(Errno::RANGE | Errno::TOOBIG) => {
            return Err(io::Error::other(
                "it bears more extended attributes than can be listed: remove some (setfattr -x)",
            ));
        }
        Err(errno) => return Err(errno.into()),
    };
    names.truncate(length);
    let all = names.split_inclusive(|byte| *byte == 0);
    let texts = all.filter_map(|name| CStr::from_bytes_with_nul(name).ok()?.to_str().ok());
    Ok(texts.map(str::to_owned).collect())
}

/// A block device's file is refused with EPERM, whatever the rights.
fn unsupported(errno: Errno) -> io::Error {
    match errno {
        Errno::OPNOTSUPP | Errno::PERM => io::Error::new(
            io::ErrorKind::Unsupported,
            "it bears no extended attributes (user.*)",
        ),
        errno => errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    fn image() -> File {
        // On the file system of the build, since a tmpfs may bear no attributes.
        tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap()
    }

    fn text(image: &File) -> Option<String> {
        let held = read(image.as_fd()).unwrap();
        held.map(|held| String::from_utf8(held.text).unwrap())
    }

    #[test]
    fn of_two_who_replace_the_same_version_one_does() {
        let image = image();
        assert_eq!(text(&image), None);
        assert!(replace(image.as_fd(), None, b"a").unwrap());
        assert!(!replace(image.as_fd(), None, b"b").unwrap());
        let found = read(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), found.as_ref(), b"b").unwrap());
        assert!(!replace(image.as_fd(), found.as_ref(), b"c").unwrap());
        assert_eq!(text(&image).unwrap(), "b");
        assert_eq!(
            numbers(image.as_fd()).unwrap().len(),
            1,
            "older ones are gone"
        );
    }

    #[test]
    fn who_was_overtaken_twice_takes_its_own_back() {
        let image = image();
        assert!(replace(image.as_fd(), None, b"a").unwrap());
        let old = read(image.as_fd()).unwrap();
        for later in [b"b", b"c"] {
            let found = read(image.as_fd()).unwrap();
            assert!(replace(image.as_fd(), found.as_ref(), later).unwrap());
        }
        // The number after the old one is free by now.
        assert!(!replace(image.as_fd(), old.as_ref(), b"late").unwrap());
        assert_eq!(text(&image).unwrap(), "c");
    }

    #[test]
    fn of_many_at_once_each_version_has_one_writer() {
        let image = image();
        let writers = 0..4_u8;
        let won: Vec<u64> = std::thread::scope(|scope| {
            let writers: Vec<_> = writers
                .map(|_| {
                    scope.spawn(|| {
                        let mut won = Vec::new();
                        while won.len() < 50 {
                            let found = read(image.as_fd()).unwrap();
                            if replace(image.as_fd(), found.as_ref(), b"mine").unwrap() {
                                won.push(found.map_or(0, |held| held.number));
                            }
                        }
                        won
                    })
                })
                .collect();
            let won = writers
                .into_iter()
                .flat_map(|writer| writer.join().unwrap());
            won.collect()
        });
        let mut once = won.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), won.len(), "two replaced one version");
    }

    #[test]
    fn a_text_that_is_too_long_changes_nothing() {
        let image = image();
        assert!(replace(image.as_fd(), None, b"a").unwrap());
        let found = read(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), found.as_ref(), &[0; TEXT_MAX + 1]).is_err());
        assert_eq!(text(&image).unwrap(), "a");
    }

    #[test]
    fn a_text_that_is_longer_than_any_of_ours_is_read_as_no_record_and_is_let_go() {
        let image = image();
        fsetxattr(
            &image,
            name_of(1),
            &[b'x'; TEXT_MAX + 1],
            XattrFlags::CREATE,
        )
        .unwrap();
        assert_eq!(text(&image).unwrap().as_bytes(), TOO_LONG);
        forget(image.as_fd()).unwrap();
        assert_eq!(text(&image).unwrap(), "");
        let now = read(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), now.as_ref(), b"next").unwrap());
        assert_eq!(text(&image).unwrap(), "next");
    }

    #[test]
    fn who_read_it_before_it_was_taken_off_replaces_nothing() {
        let image = image();
        assert!(replace(image.as_fd(), None, b"a").unwrap());
        let late = read(image.as_fd()).unwrap();
        forget(image.as_fd()).unwrap();
        assert_eq!(text(&image).unwrap(), "");
        assert!(!replace(image.as_fd(), late.as_ref(), b"late").unwrap());
        let now = read(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), now.as_ref(), b"next").unwrap());
        assert_eq!(text(&image).unwrap(), "next");
    }

    #[test]
    fn names_that_no_version_has_are_overlooked_and_taken_off() {
        let image = image();
        assert!(replace(image.as_fd(), None, b"a").unwrap());
        for number in ["007", "+7", "", "18446744073709551615", "x"] {
            let name = format!("{NAME}{number}");
            fsetxattr(&image, &name, b"planted", XattrFlags::empty()).unwrap();
        }
        assert_eq!(text(&image).unwrap(), "a");
        let found = read(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), found.as_ref(), b"b").unwrap());
        forget(image.as_fd()).unwrap();
        assert_eq!(names(image.as_fd()).unwrap(), [name_of(3)]);
    }

    #[test]
    fn numbers_that_are_used_up_can_be_let_go() {
        let image = image();
        let name = name_of(NUMBER_MAX);
        fsetxattr(&image, &name, b"planted", XattrFlags::empty()).unwrap();
        let found = read(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), found.as_ref(), b"a").is_err());
        forget(image.as_fd()).unwrap();
        assert!(replace(image.as_fd(), None, b"a").unwrap());
    }

    #[test]
    fn a_trial_leaves_nothing_and_tells_whether_there_is_room() {
        let image = image();
        assert!(replace(image.as_fd(), None, b"a").unwrap());
        let leftover = format!("{TRIAL}a");
        fsetxattr(&image, &leftover, b"of who died", XattrFlags::empty()).unwrap();
        try_out(image.as_fd(), "a", 500).unwrap();
        assert_eq!(names(image.as_fd()).unwrap(), [name_of(1)]);
        // As many as the file system has room for.
        let more = (0..10_000).map(|number| format!("user.other.{number}"));
        let room = more
            .map(|name| fsetxattr(&image, &name, &[b'x'; 100], XattrFlags::empty()))
            .find_map(Result::err);
        if room.is_some() {
            assert!(try_out(image.as_fd(), "a", TEXT_MAX).is_err());
        }
        assert_eq!(text(&image).unwrap(), "a");
    }

    #[test]
    fn what_bears_no_attributes_says_so() {
        let null = File::open("/dev/null").unwrap();
        let refused = replace(null.as_fd(), None, b"a").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        assert_eq!(read(null.as_fd()).unwrap(), None);
    }
}
