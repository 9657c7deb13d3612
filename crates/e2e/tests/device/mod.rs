//! A loop device with a node of its own below `/dev`, for everybody, as a volume has one.
#![allow(dead_code)]

use anyhow::Result;
use godwit_blockio::label::{self, Label};
use godwit_blockio::{Access, Image};
use godwit_testkit::file_system;
use std::fs::{File, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A loop device and its node, gone with the value.
pub struct Node {
    path: PathBuf,
    // Dropped after its node is gone.
    _device: file_system::Device,
}

impl Node {
    /// Of a device over a new file with so many bytes. Nothing where none can be made.
    pub fn over(file: &Path, bytes: u64, path: PathBuf) -> Result<Option<Self>> {
        File::create(file)?.set_len(bytes)?;
        let Some(device) = file_system::Device::on(file) else {
            println!("skipped: no device can be made of a file");
            return Ok(None);
        };
        let copied = Command::new("cp")
            .arg("--archive")
            .args([device.path(), &path])
            .status()?;
        let node = Self {
            path,
            _device: device,
        };
        if !copied.success() || File::open(&node.path).is_err() {
            println!("skipped: no node of a device can be made here");
            return Ok(None);
        }
        std::fs::set_permissions(&node.path, Permissions::from_mode(0o666))?;
        Ok(Some(node))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

pub struct Device {
    node: Node,
    link: Option<PathBuf>,
    // Dropped after the device is gone.
    _directory: tempfile::TempDir,
}

impl Device {
    /// Nothing where none can be made.
    pub fn new(bytes: u64) -> Result<Option<Self>> {
        let directory = tempfile::tempdir_in("/var/tmp")?;
        let own = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = format!("/dev/godwit-test-{}-{own}", std::process::id());
        let node = Node::over(&directory.path().join("file"), bytes, path.into())?;
        Ok(node.map(|node| Self {
            node,
            link: None,
            _directory: directory,
        }))
    }

    /// The same with a name that is a link to its node, as every volume has one.
    pub fn linked(mut self) -> Result<Self> {
        let link = PathBuf::from(format!("{}-link", self.node().display()));
        std::os::unix::fs::symlink(self.node(), &link)?;
        self.link = Some(link);
        Ok(self)
    }

    /// The name by which a person calls it.
    pub fn name(&self) -> &Path {
        self.link.as_deref().unwrap_or(self.node())
    }

    pub fn node(&self) -> &Path {
        self.node.path()
    }

    fn open(&self) -> Result<File> {
        Ok(File::options().read(true).write(true).open(self.node())?)
    }

    pub fn label(&self) -> Result<Option<Label>> {
        let found = label::read(self.open()?.as_fd())?;
        Ok(found.map(|found| found.label))
    }

    /// Has it bear this label.
    pub fn say(&self, label: Label) -> Result<()> {
        let file = self.open()?;
        let before = label::read(file.as_fd())?;
        label::write(file.as_fd(), before.as_ref(), label)?;
        Ok(())
    }

    /// Has it bear a label that calls it free as it is.
    pub fn free(&self) -> Result<()> {
        let file = self.open()?;
        let before = label::read(file.as_fd())?;
        label::let_go(file.as_fd(), before.as_ref())?;
        Ok(())
    }

    pub fn wipe_label(&self) -> Result<()> {
        let end = self.bytes()?.len() as u64;
        self.write(&vec![0; label::ROOM as usize], end - label::ROOM)
    }

    pub fn bytes(&self) -> Result<Vec<u8>> {
        Ok(std::fs::read(self.node())?)
    }

    pub fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        let file = self.open()?;
        file.write_all_at(bytes, at)?;
        Ok(file.sync_all()?)
    }

    pub fn read(&self, into: &mut [u8], at: u64) -> Result<()> {
        Ok(self.open()?.read_exact_at(into, at)?)
    }

    /// Somebody else works with it, whatever is there.
    pub fn lock(&self) -> Result<File> {
        let file = self.open()?;
        let patience = std::time::Duration::ZERO;
        godwit_blockio::lock_file(&file, self.node(), Access::ReadWrite, "other", patience)?;
        Ok(file)
    }

    /// Whether somebody else may have it for a disk.
    pub fn is_free(&self) -> Result<()> {
        let mut image = Image::open(self.node(), Access::ReadWrite, 512)?;
        Ok(image.lock("other", super::disk_site::LONG)?)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            let _ = std::fs::remove_file(link);
        }
    }
}
