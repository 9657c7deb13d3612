//! The tmpfs that guest RAM lives on: mounted once per host, with huge pages.
//!
//! Who owns the state: the host's mount table; nothing is unmounted here. What it refuses: to
//! mount over something that is no tmpfs.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::mount::MountFlags;

use crate::ram_file::file_error;
use crate::{Error, RamFile, collapse};

/// File system type of tmpfs, as `statfs` gives it.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// What was found or done at the mount point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounted {
    /// A tmpfs was mounted there already and was left as it is.
    Already,
    /// It was mounted now.
    Now,
}

/// Mounts a tmpfs of `bytes` at `path` (a directory that exists) unless one is mounted there.
/// Mode 0711: QEMU's user reaches a file whose name it was told, and cannot list the others.
pub fn ensure_mounted(path: &Path, bytes: u64) -> Result<Mounted, Error> {
    if is_mount_point(path)? {
        return match is_tmpfs(path)? {
            true => Ok(Mounted::Already),
            false => Err(file_error(
                "use as the memory file system (something else is mounted there)",
                path,
                rustix::io::Errno::BUSY.into(),
            )),
        };
    }
    let options = CString::new(format!("huge=within_size,size={bytes},mode=0711"))
        .map_err(|_| Error::Size { bytes })?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("godwit-memory", path, "tmpfs", flags, options.as_c_str())
        .map_err(|source| file_error("mount a tmpfs at", path, source.into()))?;
    Ok(Mounted::Now)
}

/// Bytes that files on the tmpfs at `path` can still grow by: the least of its size limit and of
/// what the machine has available (`MemAvailable`).
pub fn available_bytes(path: &Path) -> Result<u64, Error> {
    let stat =
        rustix::fs::statvfs(path).map_err(|source| file_error("examine", path, source.into()))?;
    let by_limit = stat.f_bavail.saturating_mul(stat.f_frsize);
    let meminfo = std::fs::read_to_string("/proc/meminfo")
        .map_err(|source| file_error("read", Path::new("/proc/meminfo"), source))?;
    Ok(by_limit.min(mem_available_bytes(&meminfo).unwrap_or(by_limit)))
}

fn mem_available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes of the RAM file that this process maps as huge pages.
pub fn own_huge_bytes(ram: &RamFile) -> Result<u64, Error> {
    collapse::huge_mapped_bytes(std::process::id(), &ram.own_mapping())
}

/// Whether the file system at `path` is a tmpfs.
pub fn is_tmpfs(path: &Path) -> Result<bool, Error> {
    let stat =
        rustix::fs::statfs(path).map_err(|source| file_error("examine", path, source.into()))?;
    Ok(stat.f_type == TMPFS_MAGIC)
}

/// A directory is a mount point if it is on another device than its parent.
fn is_mount_point(path: &Path) -> Result<bool, Error> {
    let device = |path: &Path| {
        let metadata = std::fs::metadata(path);
        metadata
            .map(|metadata| metadata.dev())
            .map_err(|source| file_error("examine", path, source))
    };
    let own = std::fs::File::open(path).map_err(|source| file_error("open", path, source))?;
    let stat = rustix::fs::fstat(own.as_fd())
        .map_err(|source| file_error("examine", path, source.into()))?;
    Ok(stat.st_dev != device(&path.join(".."))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_kib() {
        let meminfo = "MemTotal:       24684092 kB\nMemAvailable:   20000 kB\n";
        assert_eq!(mem_available_bytes(meminfo), Some(20_480_000));
        assert_eq!(mem_available_bytes("MemTotal: 1 kB"), None);
    }
}
