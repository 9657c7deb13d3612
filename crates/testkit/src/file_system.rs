//! File systems of every kind on loop devices with blocks of any size.
//!
//! Owns the loop devices and the mounts, which end with their values. Refuses nothing: what this machine cannot make is `None`, and the test
//! that wants it says that it was skipped. Needs root.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What mkfs.btrfs and mkfs.xfs need at least.
pub const DEVICE_BYTES: u64 = 512 << 20;

/// A loop device with blocks of its own size; gone with the value.
#[derive(Debug)]
pub struct Device(PathBuf);

impl Device {
    /// Over a new, sparse file.
    pub fn over(file: &Path, block: u32) -> Option<Self> {
        File::create(file).ok()?.set_len(DEVICE_BYTES).ok()?;
        let size = block.to_string();
        let arguments = ["--find", "--show", "--sector-size", &size, "--direct-io=on"];
        let made = Command::new("losetup").args(arguments).arg(file).output();
        let made = made.ok().filter(|made| made.status.success())?;
        let path = String::from_utf8(made.stdout).ok()?;
        Some(Self(path.trim().into()))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

/// A file system on a device, unmounted with the value.
#[derive(Debug)]
pub struct Mount {
    place: PathBuf,
    // Dropped after it is unmounted.
    _device: Device,
}

impl Mount {
    /// Makes one of this kind (`ext4`, `xfs`, `btrfs`) and mounts it at an empty directory.
    pub fn of(kind: &str, device: Device, place: &Path) -> Option<Self> {
        let force = if kind == "ext4" { "-F" } else { "-f" };
        let made = Command::new(format!("mkfs.{kind}"))
            .args(["-q", force])
            .arg(device.path())
            .output();
        made.ok().filter(|made| made.status.success())?;
        let mounted = Command::new("mount")
            .args(["-t", kind])
            .args([device.path(), place])
            .status();
        mounted.ok()?.success().then(|| Self {
            place: place.to_owned(),
            _device: device,
        })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.place).status();
    }
}
