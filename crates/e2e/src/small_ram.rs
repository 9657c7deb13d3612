//! A host with hardly any room for guest memory.
//!
//! Owns the mount: it lies over the host's directory while it lives, and the directory is as before afterwards.

use anyhow::{Result, ensure};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs over a host's directory of RAM files.
pub struct SmallRam(PathBuf);

impl SmallRam {
    /// Mounts one of a size such as `8m`.
    pub fn over(directory: &Path, size: &str) -> Result<Self> {
        let options = format!("size={size},mode=755");
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(directory)
            .status()?;
        ensure!(
            done.success(),
            "cannot mount a tmpfs at {}",
            directory.display()
        );
        Ok(Self(directory.to_owned()))
    }
}

impl Drop for SmallRam {
    fn drop(&mut self) {
        // Lazily: whoever still has a file open there keeps it.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        // What was mounted had let QEMU's user in; what lay below it does too.
        let _ = std::fs::set_permissions(&self.0, Permissions::from_mode(0o755));
    }
}
