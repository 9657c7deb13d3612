//! What QEMU writes to its standard error: a small memory file that can not grow.
//!
//! QEMU outlives whoever started it, so nobody may be needed to read a pipe, and a file would grow without end. A
//! sealed memory file keeps the first [`LIMIT`] bytes; later writes fail, which QEMU ignores. It lives as long as QEMU
//! or the handle does, and whoever takes QEMU over finds it behind QEMU's descriptor 2.

use crate::text::{printable, without_prefix};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are kept.
pub const LIMIT: usize = 64 << 10;
/// Bytes of the end that [`StderrLog::tail`] gives at most.
const TAIL: usize = 1000;

/// The standard error of one QEMU.
#[derive(Debug)]
pub struct StderrLog {
    file: File,
}

impl StderrLog {
    pub(crate) fn create() -> io::Result<StderrLog> {
        let fd = memfd_create(
            "qemu-stderr",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        ftruncate(&fd, LIMIT as u64)?;
        fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(StderrLog { file: fd.into() })
    }

    /// That of a running QEMU; an error where its descriptor 2 is not a file.
    pub(crate) fn of_process(pid: i32) -> io::Result<StderrLog> {
        let path = format!("/proc/{pid}/fd/2");
        // Without waiting for anybody: QEMU may put a pipe or a terminal there at any time.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other(
                "the hypervisor's standard error is not a file",
            ));
        }
        Ok(StderrLog { file })
    }

    /// A descriptor for QEMU's standard output or error.
    pub(crate) fn writer(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Everything that was kept.
    pub fn text(&self) -> String {
        let mut bytes = vec![0; LIMIT];
        let count = self.file.read_at(&mut bytes, 0).unwrap_or(0);
        let kept = bytes.get(..count).unwrap_or_default();
        let used = kept
            .iter()
            .rposition(|&byte| byte != 0)
            .map_or(0, |last| last.saturating_add(1));
        String::from_utf8_lossy(kept.get(..used).unwrap_or_default()).into_owned()
    }

    /// The last lines as one line, for an error message; says so when QEMU wrote nothing.
    pub fn tail(&self) -> String {
        let text = self.text();
        let text = text.trim_end();
        let mut start = text.len().saturating_sub(TAIL);
        while !text.is_char_boundary(start) {
            start = start.saturating_add(1);
        }
        let lines = text.get(start..).unwrap_or_default().lines();
        let lines: Vec<_> = lines
            .map(|line| printable(without_prefix(line.trim())))
            .collect();
        if lines.is_empty() {
            "it wrote nothing".to_owned()
        } else {
            lines.join("; ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn it_keeps_the_first_bytes_and_refuses_the_rest() {
        let log = StderrLog::create().expect("memfd");
        let mut writer = log.writer().expect("descriptor");
        assert_eq!(log.tail(), "it wrote nothing");
        writer.write_all(b"first\n  second\n").expect("fits");
        assert_eq!(log.tail(), "first; second");
        let filler = vec![b'x'; LIMIT];
        assert!(writer.write_all(&filler).is_err(), "must not grow");
        assert!(log.text().len() <= LIMIT);
        assert!(log.text().starts_with("first\n"));
        assert_eq!(log.tail().len(), TAIL);
    }
}
