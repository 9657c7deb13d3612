//! What an image says of who has it, for a person at the host that has the file.
//!
//! Owns nothing. Refuses: to let an image go that anybody has open, and what is no image.

use godwit_blockio::holder::{self, Held};
use godwit_blockio::{Access, Image};
use godwit_ownership::ImageRecord;
use godwit_types::{ApiError, ErrorCode};
use rustix::fs::{Mode, OFlags, open};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

/// The name under which a person has it.
const PERSON: &str = "a person";

/// Reads the record; nothing where the image bears none.
pub fn show(path: &Path) -> Result<Option<ImageRecord>, ApiError> {
    // What lies there may be anything: a FIFO would be waited for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::empty()).map_err(|errno| refused(path, &errno))?;
    let file = File::from(file);
    let is_file = file.metadata().is_ok_and(|found| found.is_file());
    if !is_file {
        let why = "only an image that is a file bears a record of who has it";
        return Err(refused(path, &why));
    }
    let held = holder::read(file.as_fd()).map_err(|error| refused(path, &error))?;
    let record = held.as_ref().map(record_of).transpose();
    record.map_err(|why| refused(path, &why))
}

/// Removes the record, so that whoever starts a VM with the image next has it. Returns what it said.
pub fn release(path: &Path) -> Result<Option<ImageRecord>, ApiError> {
    let told = show(path);
    // The size of its blocks is of no interest here: every image has whole sectors.
    let image = Image::open(path, Access::ReadWrite, SECTOR);
    let mut image = image.map_err(|error| invalid(error.to_string()))?;
    let locked = image.lock(PERSON, Duration::ZERO);
    locked.map_err(|error| ApiError::new(ErrorCode::WrongState, error.to_string()))?;
    holder::forget(image.as_fd()).map_err(|error| refused(path, &error))?;
    // One that cannot be read may be let go, too.
    Ok(told.ok().flatten())
}

const SECTOR: u32 = godwit_blockio::SECTOR as u32;

/// What an image says, as somebody wrote it.
pub(crate) fn record_of(held: &Held) -> Result<ImageRecord, String> {
    let record = serde_json::from_slice(&held.text);
    record.map_err(|error| {
        format!("what it says of itself is no record of this version of Godwit ({error})")
    })
}

fn refused(path: &Path, why: &dyn std::fmt::Display) -> ApiError {
    invalid(format!("{}: {why}", path.display()))
}

fn invalid(message: String) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_ownership::{IMAGE_RECORD_FORMAT, ImageId};
    use godwit_types::{Generation, HostName, VmName};

    fn image() -> tempfile::NamedTempFile {
        // On the file system of the build, since a tmpfs may bear no attributes.
        let image = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        image
    }

    fn record() -> ImageRecord {
        ImageRecord {
            format: IMAGE_RECORD_FORMAT,
            image: ImageId::new(5),
            vm: VmName::new("web").unwrap(),
            disk: "root".to_owned(),
            holder: HostName::new("a").unwrap(),
            generation: Generation(7),
            taken: 3,
        }
    }

    fn bear(image: &tempfile::NamedTempFile, text: &[u8]) {
        assert!(holder::replace(image.as_file().as_fd(), None, text).unwrap());
    }

    #[test]
    fn a_record_is_shown_and_let_go() {
        let image = image();
        assert_eq!(show(image.path()), Ok(None));
        bear(&image, &serde_json::to_vec(&record()).unwrap());
        assert_eq!(show(image.path()), Ok(Some(record())));
        assert_eq!(release(image.path()), Ok(Some(record())));
        assert_eq!(show(image.path()), Ok(None));
    }

    #[test]
    fn an_image_that_is_open_is_not_let_go() {
        let image = image();
        bear(&image, &serde_json::to_vec(&record()).unwrap());
        let mut open = Image::open(image.path(), Access::ReadWrite, SECTOR).unwrap();
        open.lock("a/web/root", Duration::ZERO).unwrap();
        let refused = release(image.path()).unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.message.contains("is in use"), "{refused}");
        assert_eq!(show(image.path()), Ok(Some(record())));
    }

    #[test]
    fn what_somebody_else_wrote_there_is_named_and_can_be_let_go() {
        let image = image();
        bear(&image, b"{\"format\":1}");
        let refused = show(image.path()).unwrap_err();
        assert!(refused.message.contains("is no record"), "{refused}");
        assert_eq!(release(image.path()), Ok(None));
        assert_eq!(show(image.path()), Ok(None));
    }

    #[test]
    fn what_is_no_file_bears_no_record() {
        let refused = show(Path::new("/dev/null")).unwrap_err();
        assert!(refused.message.starts_with("/dev/null: only"), "{refused}");
        assert!(show(Path::new("/nonexistent/image")).is_err());
    }
}
