//! Directories whose files no VM may have for a disk or a kernel: records, certificates, sockets, guests' memory.
//!
//! Owns nothing. A VM's user may be allowed to open what lies there, above all its guest's own memory, and where VMs share a
//! user that of others. What counts is the file that was opened, not the path that a person wrote, so that no symbolic link
//! and no change in between leads there. Refuses: every file of the file system of guests' memory, wherever it is mounted.

use rustix::fd::{AsFd, AsRawFd as _};
use rustix::fs::fstat;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// What the kernel puts behind the path of a file that has no name any more.
const DELETED: &str = " (deleted)";

/// Such directories of a host.
#[derive(Debug, Clone, Default)]
pub struct Reserved {
    dirs: Vec<PathBuf>,
    ram_dir: PathBuf,
}

impl Reserved {
    /// With the directory of guests' memory.
    pub fn new(dirs: Vec<PathBuf>, ram_dir: PathBuf) -> Self {
        Self { dirs, ram_dir }
    }

    /// In which of them an open file lies, if in any.
    pub fn of_open(&self, file: impl AsFd) -> io::Result<Option<PathBuf>> {
        let fd = file.as_fd();
        if self.ram_device() == Some(fstat(fd)?.st_dev) {
            return Ok(Some(self.ram_dir.clone()));
        }
        let path = place_of_open(fd)?;
        let text = path.to_string_lossy();
        let path = text.strip_suffix(DELETED).map_or(path.as_path(), Path::new);
        Ok(self.above(path))
    }

    /// In which of them a path leads, as it is now: for a look beforehand.
    pub fn of_path(&self, path: &Path) -> Option<PathBuf> {
        let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let device = std::fs::metadata(&real).ok().map(|data| data.dev());
        if device.is_some() && device == self.ram_device() {
            return Some(self.ram_dir.clone());
        }
        self.above(&real)
    }

    fn above(&self, path: &Path) -> Option<PathBuf> {
        let mut all = self.dirs.iter().chain([&self.ram_dir]);
        let is_above = |dir: &&PathBuf| {
            let real = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_path_buf());
            !real.as_os_str().is_empty() && path.starts_with(real)
        };
        all.find(is_above).cloned()
    }

    /// The file system of guests' memory, where it has one of its own.
    fn ram_device(&self) -> Option<u64> {
        let own = std::fs::metadata(&self.ram_dir).ok()?.dev();
        let above = std::fs::metadata(self.ram_dir.parent()?).ok()?.dev();
        (own != above).then_some(own)
    }
}

/// Where an open file lies, without links. Of one that has no name any more it is none that leads there.
pub(crate) fn place_of_open(file: impl AsFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}
