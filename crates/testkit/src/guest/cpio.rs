//! Writes an initramfs: a cpio archive in the "newc" form that the kernel unpacks.
//!
//! Entries carry root as their owner and no times, so that the same content gives the same bytes.

#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// A directory; parents must have been added before.
    pub fn directory(&mut self, path: &str) {
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    /// A regular file with permissions such as 0o755.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, 0o100_000 | permissions, (0, 0), content);
    }

    pub fn symlink(&mut self, path: &str, to: &str) {
        self.entry(path, 0o120_777, (0, 0), to.as_bytes());
    }

    /// A character device that only root may use.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, 0o020_600, (major, minor), &[]);
    }

    /// Ends the archive and gives its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let name = path.trim_start_matches('/');
        let fields = [
            self.entries, // inode number
            mode,
            0, // owner
            0, // group
            1, // links
            0, // modification time
            content.len() as u32,
            0, // device it lies on, major
            0, // and minor
            device.0,
            device.1,
            name.len() as u32 + 1, // with its NUL
            0,                     // checksum, unused in this form
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_the_trailer_is_last() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.file("/init", 0o755, b"hello");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..6], b"070701");
        let init = bytes.windows(5).position(|name| name == b"init\0").unwrap();
        assert_eq!(&bytes[(init + 5).next_multiple_of(4)..][..5], b"hello");
        assert!(bytes.windows(11).any(|name| name == b"TRAILER!!!\0"));
    }
}
