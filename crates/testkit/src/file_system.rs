//! File systems of every kind on loop devices with blocks of any size.
//!
//! Owns the loop devices and the mounts, which end with their values. Refuses nothing: what this machine cannot make is `None`, and the test
//! that wants it says that it was skipped. Needs root.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What mkfs.btrfs and mkfs.xfs need at least.
pub const DEVICE_BYTES: u64 = 512 << 20;

/// A loop device with blocks of its own size; gone with the value.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    file: PathBuf,
    // Removed after the device is gone.
    _directory: Option<tempfile::TempDir>,
}

impl Device {
    /// Over a new, sparse file.
    pub fn over(file: &Path, block: u32) -> Option<Self> {
        Self::of_bytes(file, block, DEVICE_BYTES)
    }

    /// With so many bytes and a file of its own.
    pub fn of(bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir_in("/var/tmp").ok()?;
        let made = Self::of_bytes(&directory.path().join("device"), 512, bytes);
        if made.is_none() {
            println!("skipped: no device can be made of a file");
        }
        let mut made = made?;
        made._directory = Some(directory);
        Some(made)
    }

    fn of_bytes(file: &Path, block: u32, bytes: u64) -> Option<Self> {
        File::create(file).ok()?.set_len(bytes).ok()?;
        let size = block.to_string();
        Self::with(file, &["--sector-size", &size, "--direct-io=on"])
    }

    /// Over a file that is there, as it is, through the page cache.
    pub fn on(file: &Path) -> Option<Self> {
        Self::with(file, &[])
    }

    fn with(file: &Path, words: &[&str]) -> Option<Self> {
        let made = Command::new("losetup")
            .args(["--find", "--show"])
            .args(words)
            .arg(file)
            .output();
        let made = made.ok().filter(|made| made.status.success())?;
        let path = String::from_utf8(made.stdout).ok()?;
        let device = Self {
            path: path.trim().into(),
            file: file.to_owned(),
            _directory: None,
        };
        // Who had one of this number before, and broke off, may have left it so.
        device.protect(false).ok()?;
        Some(device)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For reading and writing.
    pub fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(&self.path)
    }

    /// Has it be so long from now on, as a volume that is made longer or shorter.
    pub fn becomes(&self, bytes: u64) -> io::Result<()> {
        File::options()
            .write(true)
            .open(&self.file)?
            .set_len(bytes)?;
        self.runs("losetup", "--set-capacity")
    }

    /// Whether nothing can be written there from now on.
    pub fn protect(&self, is_protected: bool) -> io::Result<()> {
        let word = if is_protected { "--setro" } else { "--setrw" };
        self.runs("blockdev", word)
    }

    fn runs(&self, program: &str, word: &str) -> io::Result<()> {
        let ran = Command::new(program).arg(word).arg(&self.path).status()?;
        match ran.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("{program} {word} failed"))),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.path)
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

    /// Whether nothing can be written there from now on, by whichever mount; nobody may have a file open for writing.
    pub fn protect(&self, is_protected: bool) -> io::Result<()> {
        let options = if is_protected {
            "remount,ro"
        } else {
            "remount,rw"
        };
        let ran = Command::new("mount")
            .args(["-o", options])
            .arg(&self.place)
            .status()?;
        match ran.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("mount -o {options} failed"))),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.place).status();
    }
}
