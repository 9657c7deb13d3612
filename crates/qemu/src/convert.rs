//! Has `qemu-img` write a qcow2 image out as a raw one, with few rights.
//!
//! The image is hostile: its head was judged before ([`crate::qcow2`]), and what its tables hold is left to a process of the common
//! user, in which this thread is already, without network, new rights or room to grow in memory, in files and in time. It gets
//! two open files. Owns that process while it runs. Refuses: a host without `qemu-img`.

use crate::make_disk::Progress;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use rustix::thread::set_no_new_privs;
use serde_json::json;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

const PROGRAM: &str = "/usr/bin/qemu-img";
/// Memory that it may have, bytes.
const MEMORY_MAX: u64 = 2 << 30;
/// CPU seconds that it may take, and more for each GiB.
const CPU_S: (u64, u64) = (600, 60);
/// Longest reason of its own that is passed on, bytes.
const WORDS_MAX: u64 = 2000;
/// How often it is looked whether it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Writes `source`, of so many bytes, into `raw`, which is long enough and reads as zeroes.
pub(crate) fn to_raw(
    source: &File,
    bytes: u64,
    raw: &File,
    progress: &Progress,
) -> Result<(), String> {
    let mut command = command(source, bytes, raw).map_err(|error| error.to_string())?;
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!(
            "a qcow2 image needs {PROGRAM} (package qemu-utils): install it, or give a raw image"
        ),
        _ => format!("{PROGRAM} cannot be started: {error}"),
    })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let status = std::thread::scope(|scope| {
        scope.spawn(|| stdout.map(|stdout| follow(stdout, progress)));
        let words = scope.spawn(|| {
            let mut words = String::new();
            let read = stderr.map(|stderr| stderr.take(WORDS_MAX).read_to_string(&mut words));
            drop(read);
            words
        });
        let status = loop {
            if progress.stop.load(Ordering::Relaxed) {
                let _ = child.kill();
            }
            match child.try_wait() {
                Ok(None) => std::thread::sleep(LOOK_EVERY),
                Ok(Some(status)) => break Ok(status),
                Err(error) => break Err(error),
            }
        };
        (status, words.join().unwrap_or_default())
    });
    match status {
        (Ok(status), _) if status.success() => Ok(()),
        (Ok(status), words) => {
            let words = words.trim().escape_debug();
            Err(format!(
                "qemu-img does not convert the image ({status}): {words}"
            ))
        }
        (Err(error), _) => Err(format!("qemu-img cannot be waited for: {error}")),
    }
}

fn command(source: &File, bytes: u64, raw: &File) -> io::Result<Command> {
    let (from, to) = (source.as_raw_fd(), raw.as_raw_fd());
    // No backing file, whatever the image says.
    let image = json!({
        "driver": "qcow2",
        "backing": null,
        "file": {"driver": "file", "filename": format!("/proc/self/fd/{from}"), "locking": "off"},
    });
    let mut command = Command::new(PROGRAM);
    command
        .args(["convert", "-p", "-n", "--target-is-zero", "-O", "raw"])
        .arg(format!("json:{image}"))
        .arg(format!("/proc/self/fd/{to}"))
        .env_clear()
        .env("LANG", "C")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let longest = raw.metadata()?.len();
    let seconds = CPU_S.0 + CPU_S.1 * bytes.div_ceil(1 << 30);
    // SAFETY: the closure runs between fork and exec and makes only system calls on values that were made before; it takes no
    // lock and allocates nothing.
    unsafe { command.pre_exec(move || confine([from, to], longest, seconds)) };
    Ok(command)
}

/// Between fork and exec: this process may read one file, write the other, and grow no further.
fn confine(files: [i32; 2], longest: u64, seconds: u64) -> io::Result<()> {
    for fd in files {
        // SAFETY: the descriptor is open: the parent has it for as long as it waits for the child.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::empty())?;
    }
    for (resource, most) in [
        (Resource::As, MEMORY_MAX),
        (Resource::Fsize, longest),
        (Resource::Cpu, seconds),
        (Resource::Core, 0),
    ] {
        let most = Some(most);
        setrlimit(
            resource,
            Rlimit {
                current: most,
                maximum: most,
            },
        )?;
    }
    set_parent_process_death_signal(Some(Signal::KILL))?;
    set_no_new_privs(true)?;
    crate::no_network::refuse_to_this_thread()
}

/// It says `(12.34/100%)` again and again.
fn follow(mut stdout: impl io::Read, progress: &Progress) {
    let (mut piece, mut line) = ([0; 256], String::new());
    while let Ok(length @ 1..) = stdout.read(&mut piece) {
        line.push_str(&String::from_utf8_lossy(
            piece.get(..length).unwrap_or_default(),
        ));
        if let Some(percent) = percent(&line) {
            let total = progress.total.load(Ordering::Relaxed) as f64;
            progress
                .done
                .store((total * percent / 100.0) as u64, Ordering::Relaxed);
        }
        let keep = line.rfind('\r').unwrap_or(0);
        line = line
            .get(keep..)
            .unwrap_or_default()
            .chars()
            .take(64)
            .collect();
    }
}

fn percent(line: &str) -> Option<f64> {
    let (before, _) = line.rsplit_once("/100%")?;
    let (_, number) = before.rsplit_once('(')?;
    number
        .parse()
        .ok()
        .filter(|percent| (0.0..=100.0).contains(percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_progress_is_read_and_nonsense_is_not() {
        assert_eq!(percent("    (12.50/100%)\r"), Some(12.5));
        assert_eq!(percent("(1/100%)\r    (99.99/100%)\r"), Some(99.99));
        for nonsense in ["", "(x/100%)", "(-1/100%)", "(1e9/100%)", "/100%"] {
            assert_eq!(percent(nonsense), None, "{nonsense}");
        }
    }
}
