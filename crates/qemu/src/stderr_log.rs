//! What QEMU writes to its standard error: a small memory file that can not grow.
//!
//! QEMU outlives whoever started it, so nobody may be needed to read a pipe, and a file would grow without end. A
//! sealed memory file keeps the first [`LIMIT`] bytes; later writes fail, which QEMU ignores. It lives as long as QEMU
//! or the handle does, and whoever takes QEMU over finds it behind QEMU's descriptor 2. A QEMU that was taken over by its
//! guest may have put anything there. Refuses: to open what it names, as another user than QEMU, and to read what is no
//! such file.

use crate::process::QemuProcess;
use crate::text::{printable, without_prefix};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are kept.
pub const LIMIT: usize = 64 << 10;
/// Bytes of the end that [`StderrLog::tail`] gives at most.
const TAIL: usize = 1000;

/// The file neither grows nor shrinks while it is read, and nobody can change that.
const SEALS: SealFlags = SealFlags::GROW
    .union(SealFlags::SHRINK)
    .union(SealFlags::SEAL);

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
        fcntl_add_seals(&fd, SEALS)?;
        Ok(StderrLog { file: fd.into() })
    }

    /// That of a running QEMU; an error where its descriptor 2 is not such a memory file.
    pub(crate) fn of_process(process: &QemuProcess) -> io::Result<StderrLog> {
        let descriptor = process.descriptor(2)?;
        match fcntl_get_seals(&descriptor) {
            Ok(seals) if seals.contains(SEALS) => Ok(StderrLog {
                file: descriptor.into(),
            }),
            _ => Err(io::Error::other(
                "the hypervisor's standard error is not a sealed memory file",
            )),
        }
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

    /// A process with this as its standard error.
    fn writes_to(stderr: std::process::Stdio) -> (std::process::Child, QemuProcess) {
        let mut command = std::process::Command::new("sleep");
        let child = command.arg("60").stderr(stderr).spawn().expect("a process");
        let process = QemuProcess::open(child.id() as i32).expect("it lives");
        (child, process)
    }

    #[test]
    fn a_file_that_a_hypervisor_put_behind_its_standard_error_is_not_read() {
        let mut secret = tempfile::NamedTempFile::new().expect("a file");
        secret.write_all(b"only root may read this").expect("fits");
        let unsealed = memfd_create("any", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let log = StderrLog::create().expect("memfd");
        log.writer()
            .and_then(|mut log| log.write_all(b"its own\n"))
            .expect("fits");
        let cases = [
            (File::open(secret.path()).expect("opens"), None),
            (File::open("/dev/null").expect("opens"), None),
            (unsealed.expect("memfd").into(), None),
            (log.writer().expect("descriptor"), Some("its own")),
        ];
        for (file, expected) in cases {
            let (mut child, process) = writes_to(file.into());
            let read = StderrLog::of_process(&process).ok().map(|log| log.tail());
            child.kill().and_then(|()| child.wait()).expect("it ends");
            assert_eq!(read.as_deref(), expected);
        }
    }

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
