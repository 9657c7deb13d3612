//! Block devices that are places for disks: whether one takes a disk now, and what it has room for.
//!
//! What a device holds its label tells ([`godwit_blockio::label`]). Owns nothing, and writes nothing. Refuses: a device that holds a disk or a
//! part of one, whoever's, one without a label on which anything is, one that is too small, and one with larger blocks than a disk's.

use crate::disk::open_looked_at;
use godwit_blockio::label::{self, Found, Holds, Label, capacity};
use godwit_ownership::ImageRecord;
use godwit_types::datastore::is_device_path;
use godwit_types::plant::planted;
use rustix::fs::{CWD, OFlags, SeekFrom, ioctl_blksszget, seek};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

/// A guest's blocks, bytes.
const BLOCK_BYTES: u32 = 512;

/// Opens the device that has this path, and nothing else. Only root changes the names below `/dev`, so links there are followed.
pub fn open_device(path: &Path, access: OFlags) -> io::Result<File> {
    if !is_device_path(&path.to_string_lossy()) {
        return Err(io::Error::other("it is not below /dev"));
    }
    let device = path.canonicalize()?;
    let file = open_looked_at(CWD, &device, access | OFlags::NOFOLLOW)?;
    match file.metadata()?.file_type().is_block_device() {
        true => Ok(file),
        false => Err(io::Error::other("it is no block device")),
    }
}

/// Refuses a device that does not take a disk of so many bytes. Why is a part of a sentence.
pub fn device_must_take(path: &str, bytes: u64) -> Result<(), String> {
    let file =
        open_device(Path::new(path), OFlags::RDONLY).map_err(|error| unseen(path, &error))?;
    must_take(file.as_fd(), path, bytes).map(drop)
}

/// The same of one that is open. Returns its label.
pub fn must_take(device: BorrowedFd<'_>, path: &str, bytes: u64) -> Result<Option<Found>, String> {
    let found = must_be_free(device, path)?;
    let most = seek(device, SeekFrom::End(0)).map(capacity);
    let most = most.map_err(|errno| unseen(path, &errno.into()))?;
    let mib = |bytes: u64| bytes >> 20;
    match bytes > most {
        true => Err(format!(
            "the device {path} takes a disk of at most {} MiB beside its label, and this one has {} MiB: make the device larger, or choose another place",
            mib(most),
            mib(bytes)
        )),
        false => Ok(found),
    }
}

fn must_be_free(device: BorrowedFd<'_>, path: &str) -> Result<Option<Found>, String> {
    let told = |error: io::Error| unseen(path, &error);
    let blocks = ioctl_blksszget(device).map_err(|errno| told(errno.into()))?;
    if blocks > BLOCK_BYTES {
        return Err(format!(
            "the device {path} has blocks of {blocks} bytes, and a disk has such of {BLOCK_BYTES}: choose another place"
        ));
    }
    let found = label::read(device).map_err(told)?;
    let wipe = format!("if nobody needs it, have it zeroed with 'blkdiscard -z {path}'");
    match &found {
        _ if planted("device-not-looked-at") => Ok(found),
        Some(held) if held.label.holds != Holds::Nothing => {
            let what = whose_on(&held.label);
            Err(format!(
                "the device {path} holds {what}: choose another place, or, {wipe}"
            ))
        }
        Some(_) => Ok(found),
        None if label::is_blank(device).map_err(told)? => Ok(None),
        None => Err(format!(
            "something is on the device {path} that Godwit has not put there (its first MiB and its last are not all zero): choose another place, or, {wipe}"
        )),
    }
}

fn unseen(path: &str, error: &io::Error) -> String {
    format!("the device {path} cannot be looked at: {error}")
}

/// Whose disk, or a part of whose, a label says that its device holds, in words.
pub fn whose_on(label: &Label) -> String {
    let record = label.text.as_deref();
    let record = record.and_then(|text| serde_json::from_slice::<ImageRecord>(text).ok());
    let (vm, disk) = match &record {
        Some(record) => (record.vm.as_str(), record.disk.as_str()),
        None => (label.vm.as_str(), label.disk.as_str()),
    };
    match &label.holds {
        Holds::Nothing => "no disk".to_owned(),
        Holds::Part(_) => {
            format!("a part of disk '{disk}' of VM '{vm}', whose copying did not end")
        }
        Holds::Disk => format!("disk '{disk}' of VM '{vm}'"),
    }
}

/// What a device has room for, and what is on it, as far as its label tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRoom {
    /// Bytes of the largest disk.
    pub bytes: u64,
    /// Why none comes there now: a part of a sentence.
    pub taken: Option<String>,
    /// By a disk or a part of one, in words.
    pub holds: Option<String>,
}

/// Looks at a device.
pub fn device_room(path: &str) -> io::Result<DeviceRoom> {
    let file = open_device(Path::new(path), OFlags::RDONLY)?;
    let held = label::read(file.as_fd())?.map(|found| found.label);
    let held = held.filter(|label| label.holds != Holds::Nothing);
    Ok(DeviceRoom {
        bytes: capacity(seek(&file, SeekFrom::End(0))?),
        taken: must_be_free(file.as_fd(), path).err(),
        holds: held.as_ref().map(whose_on),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_testkit::file_system::Device;

    fn device(block: u32) -> Option<(tempfile::TempDir, Device)> {
        let below = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let device = Device::over(&below.path().join("device"), block);
        if device.is_none() {
            println!("skipped: no device can be made of a file");
        }
        Some((below, device?))
    }

    #[test]
    fn what_is_no_device_takes_no_disk_whatever_has_its_name() {
        for path in ["/srv/web.raw", "/dev/null", "/dev/pts", "/dev/none"] {
            let refused = device_must_take(path, 512).expect_err("no device");
            assert!(refused.contains("cannot be looked at"), "{refused}");
            assert!(device_room(path).is_err());
        }
    }

    #[test]
    fn a_device_takes_one_disk_beside_its_label_and_says_whose() {
        let Some((_below, device)) = device(512) else {
            return;
        };
        let path = device.path().to_str().expect("a path");
        let length = godwit_testkit::file_system::DEVICE_BYTES;
        device_must_take(path, length - label::ROOM).expect("it is blank");
        let refused = device_must_take(path, length - label::ROOM + 512).expect_err("too large");
        assert!(refused.contains("at most 511 MiB"), "{refused}");
        let held = Label {
            holds: Holds::Disk,
            bytes: 1 << 20,
            vm: "db".to_owned(),
            disk: "data".to_owned(),
            text: None,
        };
        let file = open_device(device.path(), OFlags::RDWR).expect("opened");
        let before = label::write(file.as_fd(), None, held).expect("written");
        let refused = device_must_take(path, 512).expect_err("taken");
        assert!(
            refused.contains("holds disk 'data' of VM 'db'"),
            "{refused}"
        );
        let room = device_room(path).expect("looked at");
        assert_eq!(room.bytes, length - label::ROOM);
        assert_eq!(room.holds.as_deref(), Some("disk 'data' of VM 'db'"));
        assert_eq!(room.taken, Some(refused));
        label::write(file.as_fd(), Some(&before), Label::free()).expect("written");
        device_must_take(path, 512).expect("it is free");
    }

    #[test]
    fn a_device_with_larger_blocks_than_a_disks_takes_none() {
        let Some((_below, device)) = device(4096) else {
            return;
        };
        let path = device.path().to_str().expect("a path");
        let refused = device_must_take(path, 512).expect_err("large blocks");
        assert!(refused.contains("blocks of 4096 bytes"), "{refused}");
    }
}
