//! Whose disk an image says that it is, for the sentences that refuse it.
//!
//! Owns nothing; looks only. What is said there decides nothing here.

use crate::disk::open_looked_at;
use godwit_blockio::holder;
use godwit_ownership::ImageRecord;
use godwit_types::ids::is_valid_name;
use rustix::fs::{CWD, OFlags};
use std::os::fd::AsFd;
use std::path::Path;

pub(crate) fn whose(image: impl AsFd) -> Option<ImageRecord> {
    record_in(&holder::read(image.as_fd()).ok()??.text)
}

/// What a text says that anybody may have written; it is for a terminal.
pub(crate) fn record_in(text: &[u8]) -> Option<ImageRecord> {
    let record: ImageRecord = serde_json::from_slice(text).ok()?;
    is_valid_name(&record.disk).then_some(record)
}

/// The same of what has that name, with the rights of this process.
pub(crate) fn whose_at(path: &Path) -> Option<ImageRecord> {
    whose(open_looked_at(CWD, path, OFlags::RDONLY).ok()?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use godwit_types::{Generation, HostName, VmName};
    use std::fs::File;

    /// Has an image say that it is disk 'data' of VM 'db'.
    pub(crate) fn say_whose(image: &File) {
        let record = ImageRecord {
            format: godwit_ownership::IMAGE_RECORD_FORMAT,
            image: godwit_types::image::ImageId::new(7),
            vm: VmName::new("db").unwrap(),
            disk: "data".to_owned(),
            holder: HostName::new("a").unwrap(),
            generation: Generation(2),
            taken: 1,
        };
        let text = serde_json::to_vec(&record).unwrap();
        assert!(holder::replace(image.as_fd(), None, &text).unwrap());
    }

    #[test]
    fn an_image_tells_whose_disk_it_is_and_another_file_nothing() {
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        assert_eq!(whose_at(image.path()), None);
        say_whose(image.as_file());
        let record = whose_at(image.path()).unwrap();
        assert_eq!((record.vm.as_str(), record.disk.as_str()), ("db", "data"));
    }
}
