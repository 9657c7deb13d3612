//! Block devices that are places for disks: whether one takes a disk now, and what it has room for.
//!
//! What a device holds its label tells ([`godwit_blockio::label`]). Owns nothing, and writes nothing. Refuses: a device that holds a disk or a
//! part of one, whoever's, one on which anything came since it was free, one without a label on which anything is, one that the kernel
//! works with, one that is too small, and one with larger blocks than a disk's.

use crate::disk::open_looked_at;
use crate::whose::record_in;
use godwit_blockio::label::{self, Found, Holds, Label, capacity};
use godwit_types::datastore::is_device_path;
use godwit_types::plant::planted;
use rustix::fs::{CWD, Mode, OFlags, SeekFrom, fstat, ioctl_blksszget, major, minor, open, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// A guest's blocks, bytes.
const BLOCK_BYTES: u32 = 512;
/// How long another one who looks whether a device is in use has it alone at most,
const LOOKED_AT_FOR: Duration = Duration::from_millis(200);
/// and how often it is tried again meanwhile.
const PAUSE: Duration = Duration::from_millis(5);

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
    let length = seek(device, SeekFrom::End(0)).map_err(|errno| unseen(path, &errno.into()))?;
    let mib = |bytes: u64| bytes >> 20;
    if length < 2 * label::ROOM {
        return Err(format!(
            "the device {path} has {length} bytes, and one for a disk and its label has at least {} MiB: choose another place",
            mib(2 * label::ROOM)
        ));
    }
    let found = must_be_free(device, path)?;
    let most = capacity(length);
    match bytes > most {
        true => Err(format!(
            "the device {path} takes a disk of at most {} MiB beside its label, and this one has {} MiB: make the device larger, or choose another place",
            mib(most),
            mib(bytes)
        )),
        false => Ok(found),
    }
}

/// As it is told of a device that is not there: whoever copies a file there makes one that is gone with the next boot.
pub fn is_missing(path: &str) -> String {
    format!(
        "there is no block device {path}: see that its storage is there (for a volume 'lvs' tells, and 'vgchange -ay' makes its device), or correct that path"
    )
}

/// Whether a device takes no writes, whoever opens it; where nothing tells it is tried.
fn is_write_protected(device: BorrowedFd<'_>) -> io::Result<bool> {
    let number = fstat(device)?.st_rdev;
    let said = format!("/sys/dev/block/{}:{}/ro", major(number), minor(number));
    match std::fs::read_to_string(said) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        said => Ok(said?.trim() == "1"),
    }
}

fn must_be_writable(device: BorrowedFd<'_>, path: &str) -> Result<(), String> {
    match is_write_protected(device) {
        Ok(true) => Err(format!(
            "the device {path} is write-protected: choose another place, or let it be written ('blockdev --setrw {path}')"
        )),
        Ok(false) => Ok(()),
        Err(error) => Err(unseen(path, &error)),
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
    must_be_writable(device, path)?;
    let found = label::read(device).map_err(told)?;
    if planted("device-not-looked-at") {
        return Ok(found);
    }
    must_be_unused(device, path)?;
    let Some(held) = found else {
        return match label::is_blank(device).map_err(told)? {
            true => Ok(None),
            false => Err(format!(
                "something is on the device {path} that Godwit has not put there (its first MiB and its last are not all zero): choose another place, or, if nobody needs it, have it zeroed with 'blkdiscard -z -f {path}'"
            )),
        };
    };
    if held.label.holds != Holds::Nothing {
        let what = whose_on(&held.label);
        let settled = what_settles(&held.label, path);
        return Err(format!("the device {path} holds {what}: {settled}"));
    }
    match label::is_as_left(device, &held.label).map_err(told)? {
        true => Ok(Some(held)),
        false => Err(format!(
            "something is on the device {path} since the disk that it held moved elsewhere (its first MiB is not as it was left): choose another place; for a disk that was copied there by hand 'godwit image release {path}' drops the label that calls the device free; if nobody needs what is there, do that, and then have it zeroed with 'blkdiscard -z -f {path}'"
        )),
    }
}

/// Refuses a device that the kernel works with.
fn must_be_unused(device: BorrowedFd<'_>, path: &str) -> Result<(), String> {
    match is_used(device) {
        Ok(false) => Ok(()),
        Ok(true) => Err(format!("{}: choose another place", is_in_use(path))),
        Err(error) => Err(unseen(path, &error)),
    }
}

/// As it is told of a device that [`is_used`].
pub fn is_in_use(path: &str) -> String {
    format!(
        "the device {path} is in use by this host's kernel or a program that has it alone: a file system that is mounted, swap, or an array or volumes that are made of it ('lsblk {path}' tells)"
    )
}

/// Whether the kernel works with a device: has a file system on it mounted, swaps there, or makes an array or volumes of it.
pub fn is_used(device: BorrowedFd<'_>) -> io::Result<bool> {
    let number = format!("/proc/self/fd/{}", device.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let until = Instant::now() + LOOKED_AT_FOR;
    loop {
        match open(number.as_str(), flags, Mode::empty()) {
            Ok(_) => return Ok(false),
            // Another one who looks has it for a moment.
            Err(Errno::BUSY) if Instant::now() < until => std::thread::sleep(PAUSE),
            Err(Errno::BUSY) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What a person does about a device that holds something.
fn what_settles(label: &Label, path: &str) -> String {
    let vm = whose(label).0;
    let nobody = format!("if nobody knows of it any more, 'godwit image release {path}'");
    match &label.holds {
        Holds::Part(name) if name.contains(".kept-") => format!(
            "it is kept for a person to look at, and 'godwit image release {path}' calls it a disk; choose another place"
        ),
        Holds::Part(name) if name.contains(".arriving-") => format!(
            "it comes with a migration: wait until that has ended ('godwit vm show {vm}' tells), or choose another place; {nobody} lets it go"
        ),
        Holds::Part(_) => format!(
            "wait until that has ended ('godwit vm move-disk {vm} --list' tells), or choose another place; what a move left there is let go by the next start of that VM; {nobody} does"
        ),
        _ => "choose another place".to_owned(),
    }
}

/// As it is told of a device that cannot be opened.
pub(crate) fn unseen(path: &str, error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::NotFound {
        return is_missing(path);
    }
    format!("the device {path} cannot be looked at: {error}")
}

/// Of which VM and disk a label tells: who has had it counts before for whom it was made.
fn whose(label: &Label) -> (String, String) {
    match label.text.as_deref().and_then(record_in) {
        Some(record) => (record.vm.to_string(), record.disk),
        None => (label.vm.clone(), label.disk.clone()),
    }
}

/// Whose disk, or a part of whose, a label says that its device holds, in words.
pub fn whose_on(label: &Label) -> String {
    let (vm, disk) = whose(label);
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
    /// Whether nothing can be written there, the disk that it holds included.
    pub is_write_protected: bool,
}

/// Looks at a device.
pub fn device_room(path: &str) -> io::Result<DeviceRoom> {
    let file = open_device(Path::new(path), OFlags::RDONLY)?;
    let held = label::read(file.as_fd())?.map(|found| found.label);
    let held = held.filter(|label| label.holds != Holds::Nothing);
    Ok(DeviceRoom {
        bytes: capacity(seek(&file, SeekFrom::End(0))?),
        taken: must_take(file.as_fd(), path, 0).err(),
        holds: held.as_ref().map(whose_on),
        is_write_protected: is_write_protected(file.as_fd())?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_testkit::file_system::Device;
    use std::os::unix::fs::FileExt as _;

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
            let words = ["cannot be looked at", "there is no block device"];
            assert!(
                words.iter().any(|words| refused.contains(words)),
                "{refused}"
            );
            assert!(device_room(path).is_err());
        }
    }

    #[test]
    fn of_a_device_that_is_away_it_is_told_what_is_missing() {
        let refused = device_must_take("/dev/vg0/none", 512).expect_err("no device");
        assert!(
            refused.contains("there is no block device /dev/vg0/none"),
            "{refused}"
        );
        assert!(refused.contains("vgchange -ay"), "{refused}");
    }

    #[test]
    fn a_device_that_is_write_protected_takes_no_disk() {
        let Some(device) = Device::of(8 << 20) else {
            return;
        };
        let path = device.path().to_str().expect("a path");
        device_must_take(path, 512).expect("it is blank");
        device.protect(true).expect("protected");
        let refused = device_must_take(path, 512).expect_err("write-protected");
        assert!(refused.contains("is write-protected"), "{refused}");
        assert!(
            refused.contains(&format!("blockdev --setrw {path}")),
            "{refused}"
        );
        assert!(device_room(path).expect("looked at").is_write_protected);
        device.protect(false).expect("let be written");
        device_must_take(path, 512).expect("it can be written again");
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
        assert_eq!(room.taken.as_deref(), Some(refused.as_str()));
        assert!(!refused.contains("blkdiscard"), "a live disk: {refused}");
        let left = label::let_go(file.as_fd(), Some(&before)).expect("written");
        device_must_take(path, 512).expect("it is free");
        // A file system keeps both slots of the label.
        file.write_all_at(&[7; 512], 1024).expect("written");
        let refused = device_must_take(path, 512).expect_err("something is there");
        assert!(refused.contains("since the disk"), "{refused}");
        assert!(refused.contains("godwit image release"), "{refused}");
        file.write_all_at(&[0; 512], 1024).expect("written");
        for (name, settles) in [
            ("lun.arriving-m1", "godwit vm show db"),
            ("lun.moving-1", "godwit vm move-disk db --list"),
            ("lun.kept-m1", "calls it a disk"),
        ] {
            let part = Label {
                holds: Holds::Part(name.to_owned()),
                bytes: 1 << 20,
                vm: "db".to_owned(),
                disk: "data".to_owned(),
                text: None,
            };
            label::write(file.as_fd(), Some(&left), part).expect("written");
            let refused = device_must_take(path, 512).expect_err("a part");
            assert!(refused.contains(settles), "{refused}");
            assert!(!refused.contains("blkdiscard"), "{refused}");
        }
    }

    #[test]
    fn a_device_that_somebody_has_alone_takes_no_disk_also_where_it_is_blank() {
        let Some((_below, device)) = device(512) else {
            return;
        };
        let path = device.path().to_str().expect("a path");
        device_must_take(path, 512).expect("it is blank");
        // As who mounts it, or makes it a part of an array, has it.
        let flags = OFlags::RDONLY | OFlags::EXCL;
        let alone = open(device.path(), flags, Mode::empty()).expect("opened");
        let refused = device_must_take(path, 512).expect_err("in use");
        assert!(
            refused.contains("in use by this host's kernel"),
            "{refused}"
        );
        drop(alone);
        device_must_take(path, 512).expect("it is free again");
    }

    #[test]
    fn a_device_without_room_for_a_label_says_that_it_is_too_small() {
        let Some(device) = Device::of(1 << 20) else {
            return;
        };
        let refused = device_must_take(device.path().to_str().expect("a path"), 512);
        let refused = refused.expect_err("too small");
        assert!(refused.contains("has 1048576 bytes"), "{refused}");
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
