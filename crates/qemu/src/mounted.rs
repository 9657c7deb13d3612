//! Whether files can be written where an open one lies: by its own mount, and by any other of this host.
//!
//! A mount may be for reading only while another one of the same file system is not, as one that was bound to another place. Owns nothing. Refuses: to guess
//! where the kernel does not tell.

use rustix::fs::{AtFlags, StatVfsMountFlags, StatxFlags, fstatvfs, statx};
use rustix::io::Errno;
use std::os::fd::AsFd;

/// Where the kernel lists this process's mounts.
const MOUNTS: &str = "/proc/self/mountinfo";

/// Who can write files of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounted {
    ForWriting,
    /// Nobody by this mount; another one may be for writing, perhaps where this process does not see it.
    ForReadingHere,
    /// Nobody of this host.
    ForReading,
}

impl Mounted {
    /// That of an open file. Why it cannot be told is a part of a sentence.
    pub fn of(file: impl AsFd) -> Result<Self, String> {
        let cannot = |why: &dyn std::fmt::Display| {
            format!("whether its file system is mounted for reading only cannot be told: {why}")
        };
        let told = |errno: Errno| cannot(&errno);
        let file = file.as_fd();
        let found = fstatvfs(file).map_err(told)?;
        if !found.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Ok(Self::ForWriting);
        }
        let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).map_err(told)?;
        let mounts = std::fs::read(MOUNTS).map_err(|error| cannot(&error))?;
        let mounts = String::from_utf8_lossy(&mounts);
        match can_be_written(&mounts, found.stx_mnt_id) {
            Some(true) => Ok(Self::ForReadingHere),
            Some(false) => Ok(Self::ForReading),
            None => Err(cannot(&format_args!("{MOUNTS} does not list its mount"))),
        }
    }
}

/// Whether the file system of the mount of this number can be written, whatever its mount says; nothing where it is not listed.
fn can_be_written(mounts: &str, number: u64) -> Option<bool> {
    let number = number.to_string();
    let mut lines = mounts.lines();
    let line = lines.find(|line| line.split(' ').next() == Some(number.as_str()))?;
    let (_, of_file_system) = line.split_once(" - ")?;
    // Its kind, what it is on, and its options.
    let options = of_file_system.split(' ').nth(2)?;
    Some(options.split(',').next() != Some("ro"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    const LISTED: &str = "\
22 28 0:20 / /proc rw,nosuid - proc proc rw
31 28 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
77 31 8:1 /golden /srv/golden ro,relatime shared:1 master:2 - ext4 /dev/sda1 rw,errors=remount-ro
7 31 7:0 / /srv/my\\040iso ro,relatime - iso9660 /dev/loop0 ro,nojoliet
8 31 0:50 / /srv/none ro - tmpfs  ro
";

    #[test]
    fn what_a_mount_says_and_what_its_file_system_says_are_two_things() {
        assert_eq!(can_be_written(LISTED, 31), Some(true));
        assert_eq!(can_be_written(LISTED, 77), Some(true));
        assert_eq!(can_be_written(LISTED, 7), Some(false));
        assert_eq!(can_be_written(LISTED, 8), Some(false));
        assert_eq!(can_be_written(LISTED, 2), None);
        assert_eq!(can_be_written("9 cut", 9), None);
    }

    #[test]
    fn the_mount_of_an_open_file_is_found() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        assert_eq!(Mounted::of(&file), Ok(Mounted::ForWriting));
        let listed = std::fs::read_to_string(MOUNTS).unwrap();
        let file = File::open("/var/tmp").unwrap();
        let found = statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).unwrap();
        assert_eq!(can_be_written(&listed, found.stx_mnt_id), Some(true));
    }
}
