//! A text that an image bears, which hosts that share the image replace by compare-and-swap.
//!
//! It is an extended attribute of the file: it goes where the file goes, needs no right in the directory, and a copy of the
//! bytes alone does not have it. Each version is an attribute of its own, numbered, made with `XATTR_CREATE`, which is one
//! step on a file server, too: of two hosts that replace the same version one finds that its number is taken. Whoever was
//! overtaken in between finds a higher number once its own is made, and takes its own back.
//!
//! Owns nothing: the attribute is the image's. Refuses: texts that are too long; files that bear no such attributes (block
//! devices, some file systems), with [`io::ErrorKind::Unsupported`].

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, fsync};
use rustix::io::Errno;

/// Followed by the number.
const NAME: &str = "user.godwit.holder.";
/// Bytes of a text.
const TEXT_MAX: usize = 2048;
/// Bytes of the names of all attributes that a file bears (the kernel's limit).
const NAMES_MAX: usize = 64 << 10;
/// How often a version that goes away while it is read is looked for again.
const LOOKS: u32 = 64;

/// A version of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    number: u64,
    /// As somebody wrote it; anybody with rights on the file may have.
    pub text: Vec<u8>,
}

/// Looks for the newest version; nothing where there is none.
pub fn read(image: BorrowedFd<'_>) -> io::Result<Option<Held>> {
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
    let before = before.map_or(0, |held| held.number);
    let number = before.checked_add(1);
    let number = number.ok_or_else(|| io::Error::other("its record's numbers are used up"))?;
    match fsetxattr(image, name_of(number), text, XattrFlags::CREATE) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(false),
        Err(errno) => return Err(unsupported(errno)),
    }
    let all = numbers(image)?;
    if all.iter().any(|other| *other > number) {
        remove(image, number)?;
        return Ok(false);
    }
    // Nobody reads them any more.
    for older in all.into_iter().filter(|other| *other < number) {
        remove(image, older)?;
    }
    Ok(true)
}

/// Takes the text off the image, durably.
pub fn forget(image: BorrowedFd<'_>) -> io::Result<()> {
    for number in numbers(image)? {
        remove(image, number)?;
    }
    Ok(fsync(image)?)
}

fn remove(image: BorrowedFd<'_>, number: u64) -> io::Result<()> {
    match fremovexattr(image, name_of(number)) {
        Ok(()) | Err(Errno::NODATA) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn name_of(number: u64) -> String {
    format!("{NAME}{number}")
}

/// The numbers of all versions.
fn numbers(image: BorrowedFd<'_>) -> io::Result<Vec<u64>> {
    let mut names = vec![0; NAMES_MAX];
    let length = match flistxattr(image, names.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(errno) => return Err(errno.into()),
    };
    names.truncate(length);
    let all = names.split_inclusive(|byte| *byte == 0);
    let texts = all.filter_map(|name| CStr::from_bytes_with_nul(name).ok()?.to_str().ok());
    let numbers = texts.filter_map(|name| name.strip_prefix(NAME)?.parse().ok());
    Ok(numbers.collect())
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
        forget(image.as_fd()).unwrap();
        assert_eq!(text(&image), None);
    }

    #[test]
    fn what_bears_no_attributes_says_so() {
        let null = File::open("/dev/null").unwrap();
        let refused = replace(null.as_fd(), None, b"a").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        assert_eq!(read(null.as_fd()).unwrap(), None);
    }
}
