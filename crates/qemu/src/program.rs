//! What the QEMU program says of itself, asked before it is started for a VM.
//!
//! Owns nothing. Refuses: a program that does not answer soon, or names no version.

use rustix::process::{Gid, Uid};
use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How often it is looked whether it has answered.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Most bytes of its answer that are read.
const ANSWER_MAX: u64 = 4096;

/// Its major and minor version, asked as the user that QEMU runs as.
pub fn version_of(
    program: &Path,
    (uid, gid): (u32, u32),
    deadline: Instant,
) -> io::Result<(u64, u64)> {
    let mut command = Command::new(program);
    command.arg("--version").env_clear().current_dir("/");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if rustix::process::geteuid() != Uid::from_raw(uid) {
        command.uid(uid).gid(Gid::from_raw(gid).as_raw());
    }
    let mut child = command.spawn()?;
    while child.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it does not answer",
            ));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let mut text = Vec::new();
    if let Some(said) = child.stdout.take() {
        said.take(ANSWER_MAX).read_to_end(&mut text)?;
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let numbers = version_in(&text).and_then(|version| {
        let mut numbers = version.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    numbers.ok_or_else(|| io::Error::other("it names no version"))
}

/// The version in what `--version` says, such as `7.2.22`.
pub fn version_in(text: &str) -> Option<&str> {
    let mut words = text.split_whitespace();
    words.find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn says(text: &str) -> io::Result<(u64, u64)> {
        let dir = tempfile::tempdir().expect("a directory");
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open.clone()).expect("chmod");
        let program = dir.path().join("qemu");
        std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).expect("written");
        std::fs::set_permissions(&program, open).expect("chmod");
        let me = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        version_of(&program, me, Instant::now() + Duration::from_secs(2))
    }

    #[test]
    fn a_program_is_of_the_version_that_it_names() {
        let debian = "echo 'QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)'";
        assert_eq!(says(debian).expect("a version"), (7, 2));
        assert_eq!(
            says("echo 'QEMU emulator version 10.0.2'").expect("a version"),
            (10, 0)
        );
    }

    #[test]
    fn one_that_hangs_or_names_none_is_refused() {
        let hangs = says("exec sleep 600").expect_err("no version");
        assert_eq!(hangs.kind(), io::ErrorKind::TimedOut);
        for text in [
            "exit 1",
            "echo none",
            "echo 7.x",
            "echo 99999999999999999999.1",
        ] {
            assert!(says(text).is_err(), "{text}");
        }
    }
}
