//! The log of a VM process: its standard error, where its agent has made that a file in the VM's run directory.
//!
//! A guest can have lines written for as long as it lives, and the run directory is memory. So the log is turned over while
//! the process runs: a full one is kept beside it until the next is full, and no more than these two exist. The agent reads
//! a VM process's last words in it, also where the journal has a copy (`vm_journal`). Owns the length of the file. Refuses:
//! to turn over what is no such file, as a terminal, a pipe or the journal.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// How long the log gets, bytes.
const LEN_MAX: u64 = 2 << 20;
/// As its agent names it.
const FILE: &str = "vm-process.log";

/// Where the lines go.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    len_max: u64,
    /// Whether standard output and error are this file too, and follow it.
    is_standard: bool,
    now: Mutex<Now>,
}

/// The file that is written to.
#[derive(Debug)]
struct Now {
    file: File,
    len: u64,
}

/// Writes lines to standard error, and turns the log over when it is full.
#[derive(Debug, Clone)]
pub struct LogWriter(Option<Arc<Log>>);

/// The log of this process.
pub fn writer() -> LogWriter {
    LogWriter(Log::of_stderr().ok().flatten().map(Arc::new))
}

impl LogWriter {
    /// Whether lines go to the file that an agent made.
    pub fn is_file(&self) -> bool {
        self.0.is_some()
    }
}

impl io::Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.0 {
            Some(log) => log.write(bytes),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn of_stderr() -> io::Result<Option<Self>> {
        let path = std::fs::read_link("/proc/self/fd/2")?;
        let data = std::fs::metadata(&path)?;
        if !data.is_file() || path.file_name().is_none_or(|name| name != FILE) {
            return Ok(None);
        }
        let file = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let now = Now {
            file,
            len: data.len(),
        };
        Ok(Some(Self {
            path,
            len_max: LEN_MAX,
            is_standard: true,
            now: Mutex::new(now),
        }))
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if now.len >= self.len_max {
            // One that cannot be turned over is begun anew: what it said is worth less than the room.
            match self.turned_over() {
                Ok(file) => now.file = file,
                Err(_) => now.file.set_len(0)?,
            }
            now.len = 0;
        }
        let written = now.file.write(bytes)?;
        now.len = now.len.saturating_add(written as u64);
        Ok(written)
    }

    /// The next file, in this one's place; this one is kept beside it.
    fn turned_over(&self) -> io::Result<File> {
        let beside = |end: &str| {
            let mut name = self.path.clone().into_os_string();
            name.push(end);
            PathBuf::from(name)
        };
        let next = beside(".next");
        let file = open(&next)?;
        std::fs::rename(&self.path, beside(".1"))?;
        std::fs::rename(next, &self.path)?;
        if self.is_standard {
            rustix::stdio::dup2_stdout(&file)?;
            rustix::stdio::dup2_stderr(&file)?;
        }
        Ok(file)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 64 << 10;

    fn log(dir: &Path) -> LogWriter {
        let path = dir.join(FILE);
        let file = open(&path).unwrap();
        LogWriter(Some(Arc::new(Log {
            path,
            len_max: LEN,
            is_standard: false,
            now: Mutex::new(Now { file, len: 0 }),
        })))
    }

    fn flood(log: &LogWriter, threads: usize) {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let mut log = log.clone();
                scope.spawn(move || {
                    for number in 0..20_000 {
                        writeln!(log, "the guest was reset once more, and again: {number}")
                            .unwrap();
                    }
                });
            }
        });
    }

    fn lengths(dir: &Path) -> Vec<u64> {
        let files = std::fs::read_dir(dir).unwrap();
        files
            .map(|file| file.unwrap().metadata().unwrap().len())
            .collect()
    }

    #[test]
    fn a_flood_of_lines_takes_no_more_than_two_logs_and_the_last_line_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = log(dir.path());
        flood(&log, 4);
        writeln!(log, "last words").unwrap();
        let lengths = lengths(dir.path());
        assert_eq!(lengths.len(), 2, "{lengths:?}");
        let whole: u64 = lengths.iter().sum();
        assert!(whole > LEN && whole <= 2 * LEN + 1024, "{lengths:?}");
        let text = std::fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert!(text.ends_with("last words\n"));
    }

    #[test]
    fn a_log_that_cannot_be_turned_over_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let log = log(dir.path());
        // Where the next one would be, nothing can be made.
        std::fs::create_dir(dir.path().join("vm-process.log.next")).unwrap();
        flood(&log, 1);
        let len = std::fs::metadata(dir.path().join(FILE)).unwrap().len();
        assert!(len > 0 && len <= LEN + 1024, "{len}");
    }

    #[test]
    fn what_is_no_log_of_a_vm_process_is_left_alone() {
        // This test's own standard error is none.
        assert!(Log::of_stderr().ok().flatten().is_none());
    }
}
