//! How the files of a disk's images are called, and where they lie.
//!
//! The disk's own image has the disk's name, `IMAGE`. A delta is called `IMAGE.dNUMBER`, and has two files: one that says of what it consists, its
//! descriptor, and one that holds its content, its extent. Their ends are those by which other programs know the format. The description of all has a name of
//! the vocabulary ([`godwit_types::snapshots::description_of`]).
//!
//! Names alone: no IO. Owns nothing. Refuses to read a number out of a name that none of these gave.

use crate::Images;
use std::path::{Path, PathBuf};

/// Stands between the name of a disk's own file and the number of a delta.
const NUMBERED: &str = ".d";
const DESCRIPTOR: &str = ".vmdk";
const EXTENT: &str = "-sesparse.vmdk";

/// The end of a file's name until all of it is there: of an extent, and of a descriptor.
pub const UNFINISHED: &str = ".new";

/// How the delta of this number is called of the disk whose own file has this name.
pub fn delta(own: &str, number: u64) -> String {
    format!("{own}{NUMBERED}{number}")
}

/// The number of a delta that is called after a disk's own file of this name.
pub fn number_of(own: &str, delta: &str) -> Option<u64> {
    let digits = delta.strip_prefix(own)?.strip_prefix(NUMBERED)?;
    let number = digits.parse::<u64>().ok()?;
    (number.to_string() == digits).then_some(number)
}

/// The number of a delta, whatever it is called after.
pub(crate) fn any_number_of(delta: &str) -> Option<u64> {
    let (_, number) = delta.rsplit_once(NUMBERED)?;
    number.parse().ok()
}

/// The file that says of what an image consists, a delta or a disk's own; of a path, where that file lies.
pub fn descriptor(image: &str) -> String {
    format!("{image}{DESCRIPTOR}")
}

/// The file that holds the content of a delta.
pub fn extent(delta: &str) -> String {
    format!("{delta}{EXTENT}")
}

/// The image whose descriptor has this name.
pub fn of_descriptor(file: &str) -> Option<&str> {
    file.strip_suffix(DESCRIPTOR)
}

/// The delta whose extent has this name.
pub fn of_extent(file: &str) -> Option<&str> {
    file.strip_suffix(EXTENT)
}

impl Images {
    /// Where the descriptor of one of its images lies; `own` is the path of the disk's own file.
    pub fn descriptor_at(&self, own: &Path, name: &str) -> PathBuf {
        self.file_at(own, name, &descriptor(name))
    }

    /// Where the extent of one of its deltas lies; `own` is the path of the disk's own file.
    pub fn extent_at(&self, own: &Path, name: &str) -> PathBuf {
        self.file_at(own, name, &extent(name))
    }

    /// The file of a raw image of the disk whose own image is `own`.
    pub fn raw_at(&self, own: &Path, name: &str) -> PathBuf {
        self.file_at(own, name, name)
    }

    fn file_at(&self, own: &Path, name: &str, file: &str) -> PathBuf {
        match self.elsewhere.get(name) {
            Some(directory) => Path::new(directory).join(file),
            None => own.with_file_name(file),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_was_built() {
        let name = delta("root.raw", 7);
        assert_eq!(name, "root.raw.d7");
        assert_eq!(number_of("root.raw", &name), Some(7));
        assert_eq!(any_number_of(&name), Some(7));
        assert_eq!(of_descriptor(&descriptor(&name)), Some(&*name));
        assert_eq!(of_extent(&extent(&name)), Some(&*name));
    }

    #[test]
    fn names_of_others_have_no_number() {
        for name in ["web.raw.d7", "root.raw", "root.raw.d", "root.raw.d7x"] {
            assert_eq!(number_of("root.raw", name), None, "{name}");
        }
        assert_eq!(of_extent("root.raw.d7.vmdk"), None);
    }

    #[test]
    fn the_files_of_a_log_lie_where_the_description_says() {
        let (own, mark) = (Path::new("/srv/a/root.raw"), "5".repeat(32));
        let mut images = Images::of_one("root.raw", 1 << 30, &mark);
        let name = delta("new.raw", 2);
        let beside = images.extent_at(own, &name);
        assert_eq!(beside, Path::new("/srv/a/new.raw.d2-sesparse.vmdk"));
        images.elsewhere.insert(name.clone(), "/srv/b".to_owned());
        let away = images.descriptor_at(own, &name);
        assert_eq!(away, Path::new("/srv/b/new.raw.d2.vmdk"));
    }
}
