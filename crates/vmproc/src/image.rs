//! What an image says of who has it, for a person at the host that has the file.
//!
//! Owns nothing. Refuses: to let an image go that anybody has open, and what is no image.

use godwit_blockio::holder::{self, Held};
use godwit_blockio::label::{Holds, Label};
use godwit_blockio::{Access, label, lock_file};
use godwit_ownership::ImageRecord;
use godwit_qemu::disk::{NotOpened, open_looked_at};
use godwit_qemu::rights::as_user;
use godwit_types::ids::is_valid_name;
use godwit_types::{ApiError, ErrorCode};
use rustix::fs::{CWD, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

/// The name under which a person has it.
const PERSON: &str = "a person";

/// Reads the record; nothing where the image bears none. A device that holds a part of a disk is nobody's image.
pub fn show(path: &Path) -> Result<Option<ImageRecord>, ApiError> {
    as_owner(path, || {
        let image = open_image(path, OFlags::RDONLY)?;
        must_be_whole(&image, path)?;
        read(&image, path)
    })
}

fn must_be_whole(image: &File, path: &Path) -> Result<(), ApiError> {
    match label::read(image.as_fd()) {
        Ok(Some(found)) if matches!(found.label.holds, Holds::Part(_)) => {
            let (path, label) = (path.display(), found.label);
            let message = format!(
                "{path} holds only a part of disk '{}' of VM '{}', with which nothing is started: a move of that disk is under way, or ended before all of it was there; 'godwit image release {path}' calls it the disk all the same",
                label.disk, label.vm
            );
            Err(ApiError::new(ErrorCode::WrongState, message))
        }
        _ => Ok(()),
    }
}

/// Removes the record, so that whoever starts a VM with the image next has it. Returns what it said. A device whose label tells of nobody's
/// disk is one without a label from then on.
pub fn release(path: &Path) -> Result<Option<ImageRecord>, ApiError> {
    as_owner(path, || {
        let file = open_image(path, OFlags::RDWR)?;
        let locked = lock_file(&file, path, Access::ReadWrite, PERSON, Duration::ZERO);
        locked.map_err(|error| match error {
            godwit_blockio::Error::InUse { .. } => {
                ApiError::new(ErrorCode::WrongState, error.to_string())
            }
            error => invalid(error.to_string()),
        })?;
        // One that cannot be read may be let go, too.
        let told = read(&file, path).ok().flatten();
        let_go(file.as_fd()).map_err(|error| refused(path, &error))?;
        Ok(told)
    })
}

/// A label that cannot be read, or says of no disk or of one that was let go already, is taken off its device.
fn let_go(image: BorrowedFd<'_>) -> io::Result<()> {
    let label = match label::read(image) {
        Ok(None) => return holder::forget(image),
        Ok(Some(found)) => Some(found.label),
        // The device was read, and what it says is damaged or of another version.
        Err(error) if error.raw_os_error().is_none() => None,
        Err(error) => return Err(error),
    };
    let is_let_go = |label: &Label| {
        let is_nobodys = label.text.as_ref().is_some_and(Vec::is_empty);
        label.holds == Holds::Nothing || is_nobodys
    };
    match label.is_none_or(|label| is_let_go(&label)) {
        true => label::take_off(image),
        false => holder::forget(image),
    }
}

/// On a file server root may have fewer rights than the user whose file it is.
fn as_owner<R: Send>(
    path: &Path,
    work: impl Fn() -> Result<R, ApiError> + Sync,
) -> Result<R, ApiError> {
    let done = work();
    let is_denied = done
        .as_ref()
        .is_err_and(|error| error.code == ErrorCode::NotAllowed);
    match path.metadata() {
        Ok(found) if is_denied => {
            let as_them = as_user(found.uid(), found.gid(), || Ok(work()));
            as_them.unwrap_or(done)
        }
        _ => done,
    }
}

fn open_image(path: &Path, access: OFlags) -> Result<File, ApiError> {
    let no_file = || {
        invalid(format!(
            "{}: only an image that is a file, or a block device with a label, bears a record of who has it",
            path.display()
        ))
    };
    let file = open_looked_at(CWD, path, access).map_err(|why| match why {
        NotOpened::Kind => no_file(),
        why => refused(path, &why.into()),
    })?;
    let bears = match file.metadata().is_ok_and(|found| found.is_file()) {
        true => true,
        // One that cannot be read is one.
        false => label::read(file.as_fd()).map_or(true, |label| label.is_some()),
    };
    bears.then_some(file).ok_or_else(no_file)
}

fn read(file: &File, path: &Path) -> Result<Option<ImageRecord>, ApiError> {
    let held = holder::read(file.as_fd()).map_err(|error| refused(path, &error))?;
    let record = held.as_ref().map(record_of).transpose();
    let record = record.map_err(|why| invalid(format!("{}: {why}", path.display())))?;
    Ok(record.flatten())
}

/// What an image says, as somebody wrote it; nothing once a person has let it go.
pub(crate) fn record_of(held: &Held) -> Result<Option<ImageRecord>, String> {
    record_in(&held.text)
}

/// The same of its text alone.
pub(crate) fn record_in(text: &[u8]) -> Result<Option<ImageRecord>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let of_none = |why: &dyn std::fmt::Display| {
        format!("what it says of itself is no record of this version of Godwit ({why})")
    };
    let record: ImageRecord = serde_json::from_slice(text).map_err(|error| of_none(&error))?;
    match is_valid_name(&record.disk) {
        true => Ok(Some(record)),
        false => Err(of_none(&"the name of its disk is none")),
    }
}

/// The same where it matters only whose it is: nothing also where it cannot be read.
pub(crate) fn readable_record(held: Option<&Held>) -> Option<ImageRecord> {
    held.and_then(|held| record_of(held).ok().flatten())
}

fn refused(path: &Path, why: &io::Error) -> ApiError {
    let code = match why.kind() {
        io::ErrorKind::PermissionDenied => ErrorCode::NotAllowed,
        _ => ErrorCode::InvalidRequest,
    };
    ApiError::new(code, format!("{}: {why}", path.display()))
}

fn invalid(message: String) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::say_on;
    use godwit_ownership::IMAGE_RECORD_FORMAT;
    use godwit_testkit::file_system::Device;
    use godwit_types::image::ImageId;
    use godwit_types::{Generation, HostName, VmName};
    use std::os::unix::fs::FileExt as _;
    use std::path::PathBuf;

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
        let open = File::options()
            .read(true)
            .write(true)
            .open(image.path())
            .unwrap();
        lock_file(
            &open,
            image.path(),
            Access::ReadWrite,
            "a/web/root",
            Duration::ZERO,
        )
        .unwrap();
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

    const DEVICE: u64 = 8 << 20;

    /// A device, and a link to it below `/dev`, as every volume has one.
    struct Linked {
        device: Device,
        link: PathBuf,
    }

    impl Linked {
        fn new(name: &str) -> Option<Self> {
            let device = Device::of(DEVICE)?;
            let link = PathBuf::from(format!("/dev/godwit-test-{name}-{}", std::process::id()));
            std::os::unix::fs::symlink(device.path(), &link).unwrap();
            Some(Self { device, link })
        }

        fn open(&self) -> File {
            self.device.open().unwrap()
        }

        fn says(&self) -> Option<Label> {
            label::read(self.open().as_fd())
                .unwrap()
                .map(|found| found.label)
        }

        fn say(&self, holds: Holds, text: Option<Vec<u8>>) {
            say_on(&self.open(), holds, text);
        }
    }

    impl Drop for Linked {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.link);
        }
    }

    #[test]
    fn what_a_device_says_is_shown_and_let_go_through_a_link_to_it() {
        let Some(place) = Linked::new("image") else {
            return;
        };
        let text = serde_json::to_vec(&record()).unwrap();
        assert!(show(&place.link).is_err(), "it has no label");
        place.say(Holds::Disk, Some(text));
        assert_eq!(show(&place.link), Ok(Some(record())));
        assert_eq!(release(&place.link), Ok(Some(record())));
        assert_eq!(place.says().unwrap().holds, Holds::Disk);
        assert_eq!(show(&place.link), Ok(None));
        // Nobody's: the label goes, too.
        assert_eq!(release(&place.link), Ok(None));
        assert_eq!(place.says(), None);
        assert!(release(&place.link).is_err(), "nothing is left to be done");
    }

    /// It was told as a device that nobody has.
    #[test]
    fn a_device_with_a_part_of_a_disk_is_told_as_that() {
        let Some(place) = Linked::new("part") else {
            return;
        };
        place.say(Holds::Part("root.new".to_owned()), None);
        let refused = show(&place.link).unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.message.contains("only a part of disk 'root'"));
        assert_eq!(release(&place.link), Ok(None));
        assert_eq!(place.says().unwrap().holds, Holds::Disk);
        assert_eq!(show(&place.link), Ok(None));
    }

    #[test]
    fn a_label_that_calls_its_device_free_or_is_torn_is_taken_off() {
        let Some(place) = Linked::new("torn") else {
            return;
        };
        place.say(Holds::Disk, None);
        let whole = label::read(place.open().as_fd()).unwrap();
        label::let_go(place.open().as_fd(), whole.as_ref()).unwrap();
        assert_eq!(release(&place.link), Ok(None));
        assert_eq!(place.says(), None, "it says that it was done");
        place.say(Holds::Disk, None);
        let end = DEVICE - label::ROOM / 2;
        place.open().write_all_at(&[7; 8], end + 64).unwrap();
        place.open().sync_all().unwrap();
        let refused = show(&place.link).unwrap_err();
        assert!(refused.message.contains("checksum is wrong"), "{refused}");
        assert!(refused.message.contains("image release"), "{refused}");
        assert_eq!(release(&place.link), Ok(None));
        assert_eq!(place.says(), None);
    }

    #[test]
    fn what_is_no_file_bears_no_record_and_what_is_empty_may() {
        let image = image();
        image.as_file().set_len(0).unwrap();
        bear(&image, &serde_json::to_vec(&record()).unwrap());
        let released = release(image.path()).unwrap();
        assert_eq!(released, Some(record()), "also one that no disk could use");
        let refused = show(Path::new("/dev/null")).unwrap_err();
        assert!(refused.message.starts_with("/dev/null: only"), "{refused}");
        assert!(show(Path::new("/nonexistent/image")).is_err());
    }
}
