//! Has `qemu-img` write a qcow2 image out as a raw one, with few rights.
//!
//! The image is hostile: its head was judged before ([`crate::qcow2`]), and what its tables hold is left to a process of the common
//! user, whose rights to files this thread has already, without network, new rights or room to grow in memory, in files and in time. It gets
//! two open files. Owns that process while it runs. Refuses: a host without `qemu-img`.

use crate::launch::be_no_better_than_others;
use crate::make_disk::Progress;
use crate::rights::{become_user_for_good, have_own_files};
use crate::user::User;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use rustix::thread::set_no_new_privs;
use serde_json::json;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;

const PROGRAM: &str = "/usr/bin/qemu-img";
/// Memory that it may have, bytes.
const MEMORY_MAX: u64 = 2 << 30;
/// CPU seconds that it may take, and more for each GiB.
const CPU_S: (u64, u64) = (600, 60);
/// Longest reason of its own that is passed on, bytes.
const WORDS_MAX: usize = 2000;
/// How often it is looked whether it is to end, at least.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Pieces of what it says that are read at once: together as much as a pipe holds.
const PIECES: usize = 16;

/// Writes `source`, of so many bytes, into `raw`, which is long enough and reads as zeroes.
pub(crate) fn to_raw(
    source: (&File, u64),
    raw: &File,
    user: User,
    progress: &Progress,
) -> Result<(), String> {
    let mut command = command(source, raw, user).map_err(|error| error.to_string())?;
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!(
            "a qcow2 image needs {PROGRAM} (package qemu-utils): install it, or give a raw image"
        ),
        _ => format!("{PROGRAM} cannot be started: {error}"),
    })?;
    let watched = watch(&mut child, progress);
    if watched.is_err() {
        let _ = child.kill();
    }
    match watched {
        Ok((status, _)) if status.success() => Ok(()),
        Ok((status, words)) => {
            let words = words.trim().escape_debug();
            Err(format!(
                "qemu-img does not convert the image ({status}): {words}"
            ))
        }
        Err(error) => Err(format!("qemu-img cannot be waited for: {error}")),
    }
}

/// Waits for its end and returns what it said last. The end of its output is not waited for: somebody else may have that open.
fn watch(child: &mut Child, progress: &Progress) -> io::Result<(ExitStatus, String)> {
    let mut stdout = Pipe::of(child.stdout.take())?;
    let mut stderr = Pipe::of(child.stderr.take())?;
    let (mut line, mut words) = (String::new(), Vec::new());
    loop {
        if progress.stop.load(Ordering::Relaxed) {
            let _ = child.kill();
        }
        // Asked before its output is read, so that all of that is.
        let ended = child.try_wait()?;
        stdout.read(|piece| follow(piece, &mut line, progress));
        stderr.read(|piece| {
            let room = WORDS_MAX.saturating_sub(words.len());
            words.extend(piece.iter().take(room));
        });
        if let Some(status) = ended {
            return Ok((status, String::from_utf8_lossy(&words).into_owned()));
        }
        let open = [&stdout, &stderr].into_iter();
        let open = open.filter_map(|pipe| pipe.0.as_ref());
        let mut open: Vec<_> = open.map(|pipe| PollFd::new(pipe, PollFlags::IN)).collect();
        match poll(&mut open, Some(&LOOK_EVERY)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What a child says, until there is no more to come.
struct Pipe(Option<File>);

impl Pipe {
    fn of(pipe: Option<impl Into<OwnedFd>>) -> io::Result<Self> {
        let pipe = pipe.map(|pipe| File::from(pipe.into()));
        if let Some(pipe) = &pipe {
            fcntl_setfl(pipe, OFlags::NONBLOCK)?;
        }
        Ok(Self(pipe))
    }

    /// What is there now, and no more than a pipe holds, though it be written on and on.
    fn read(&mut self, mut take: impl FnMut(&[u8])) {
        let mut piece = [0; 4096];
        for _ in 0..PIECES {
            let Some(pipe) = &mut self.0 else { return };
            match pipe.read(&mut piece) {
                Ok(length @ 1..) => take(piece.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => self.0 = None,
            }
        }
    }
}

fn command((source, bytes): (&File, u64), raw: &File, user: User) -> io::Result<Command> {
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
        .arg(format!("/proc/self/fd/{to}"));
    let bounds = Bounds {
        longest: raw.metadata()?.len(),
        seconds: CPU_S.0 + CPU_S.1 * bytes.div_ceil(1 << 30),
    };
    confined(&mut command, [from, to], bounds, user);
    Ok(command)
}

struct Bounds {
    /// Bytes of a file, and seconds of the processor.
    longest: u64,
    seconds: u64,
}

fn confined(command: &mut Command, files: [i32; 2], bounds: Bounds, user: User) {
    command
        .env_clear()
        .env("LANG", "C")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: the closure runs between fork and exec and makes only system calls on values that were made before; it takes no
    // lock and allocates nothing.
    unsafe { command.pre_exec(move || confine(files, &bounds, user)) };
}

/// Between fork and exec: this process may read one file, write the other, grow no further, and is the common user for good.
fn confine(files: [i32; 2], bounds: &Bounds, user: User) -> io::Result<()> {
    for fd in files {
        // SAFETY: the descriptor is open: the parent has it for as long as it waits for the child.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::empty())?;
    }
    for (resource, most) in [
        (Resource::As, MEMORY_MAX),
        (Resource::Fsize, bounds.longest),
        (Resource::Cpu, bounds.seconds),
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
    // The file for that is root's.
    have_own_files()?;
    be_no_better_than_others();
    become_user_for_good(user.uid, user.gid)?;
    // A change of user would take it back.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    set_no_new_privs(true)?;
    crate::no_network::refuse_to_this_thread()
}

/// It says `(12.34/100%)` again and again.
fn follow(piece: &[u8], line: &mut String, progress: &Progress) {
    line.push_str(&String::from_utf8_lossy(piece));
    if let Some(percent) = percent(line) {
        let total = progress.total.load(Ordering::Relaxed) as f64;
        let done = (total * percent / 100.0) as u64;
        progress.done.store(done, Ordering::Relaxed);
    }
    let keep = line.rfind('\r').unwrap_or(0);
    let rest = line.get(keep..).unwrap_or_default();
    *line = rest.chars().take(64).collect();
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

    #[test]
    fn the_end_of_what_it_says_is_not_waited_for_while_another_process_has_that_open() {
        let script = "printf '    (12.50/100%%)\\r'; sleep 300 & echo $! >&2; exit 3";
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let progress = Progress::default();
        progress.total.store(1000, Ordering::Relaxed);
        let (status, words) = watch(&mut child, &progress).unwrap();
        let left = words.trim().parse().unwrap();
        let left = rustix::process::Pid::from_raw(left).unwrap();
        rustix::process::kill_process(left, Signal::KILL).expect("it lives, and has both pipes");
        assert_eq!((status.code(), progress.done.into_inner()), (Some(3), 125));
    }

    #[test]
    fn a_program_that_is_confined_is_the_user_for_good_alone_and_no_better_than_others() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: another user's rights need root");
        }
        let user = User {
            uid: 65_534,
            gid: 65_533,
        };
        // As it may be in the service of a host.
        let badness = "/proc/self/oom_score_adj";
        let before = std::fs::read_to_string(badness).unwrap();
        if std::fs::write(badness, "-300").is_err() {
            println!("skipped in part: no process is protected from running out of memory here");
        }
        let said = crate::rights::as_user(user.uid, user.gid, || {
            let file = tempfile::tempfile_in("/var/tmp").map_err(|_| Errno::IO)?;
            let script = "while read line; do echo \"$line\"; done < /proc/self/status
                read badness < /proc/self/oom_score_adj; echo \"badness: $badness\"
                (echo it has a child)";
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            let bounds = Bounds {
                longest: 0,
                seconds: 60,
            };
            let fd = file.as_raw_fd();
            confined(&mut command, [fd, fd], bounds, user);
            command.output().map_err(|_| Errno::IO)
        });
        std::fs::write(badness, before.trim()).unwrap();
        let said = said.expect("it ran");
        let words = String::from_utf8_lossy(&said.stdout).replace('\t', " ");
        for line in [
            "Uid: 65534 65534 65534 65534\n",
            "Gid: 65533 65533 65533 65533\n",
            "Groups:\n",
            "CapPrm: 0000000000000000\n",
            "CapEff: 0000000000000000\n",
            "NoNewPrivs: 1\n",
            "Seccomp: 2\n",
            "badness: 0\n",
        ] {
            assert!(words.contains(line), "{line}: {words}");
        }
        assert!(!words.contains("it has a child"), "{words}");
    }
}
