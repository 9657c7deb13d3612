//! One QEMU process, ours or taken over, and nobody else's.
//!
//! A pid alone is no identity: it is given to someone else once its process is gone. Here the identity is pid and
//! start time, and every act goes through a pidfd that was checked against both. A process that we started is reaped;
//! one that we took over can only be watched. Dropping the handle never ends the process.

use crate::sync::poll_until;
use godwit_types::plant::planted;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitId, WaitIdOptions, pidfd_getfd, pidfd_open,
    pidfd_send_signal, waitid,
};
use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// Why a process cannot be watched or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// No such process, or the pid belongs to another one by now.
    #[error("the hypervisor process {pid} is gone")]
    Gone { pid: i32 },
    /// It still exists though it was killed, as a process in uninterruptible sleep does.
    #[error(
        "the hypervisor process {pid} was killed but has not ended in time: it may hang in the kernel"
    )]
    NotEnded { pid: i32 },
    #[error("the hypervisor process {pid} has not ended in time")]
    StillRuns { pid: i32 },
    /// A system call failed.
    #[error("cannot watch the hypervisor process: {0}")]
    Io(#[from] io::Error),
}

/// A QEMU process whose identity was checked.
#[derive(Debug)]
pub struct QemuProcess {
    pid: Pid,
    start_time_ticks: u64,
    pidfd: OwnedFd,
}

impl QemuProcess {
    /// Takes over a process by the identity that was recorded when it was started.
    pub fn adopt(pid: i32, start_time_ticks: u64) -> Result<QemuProcess, ProcessError> {
        let process = QemuProcess::open(pid)?;
        if process.start_time_ticks == start_time_ticks {
            Ok(process)
        } else {
            Err(ProcessError::Gone { pid })
        }
    }

    /// Opens a process by its pid alone: a child of ours that cannot have been reaped yet, or one whose identity the caller
    /// looks at again once it is open.
    pub fn open(pid: i32) -> Result<QemuProcess, ProcessError> {
        let gone = ProcessError::Gone { pid };
        let Some(raw) = Pid::from_raw(pid) else {
            return Err(gone);
        };
        let pidfd = match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH | Errno::INVAL) => return Err(gone),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        // Read after the descriptor was opened: if that process is still there afterwards, the time is its own.
        let start_time_ticks = match start_time_ticks(pid) {
            Ok(ticks) => ticks,
            Err(error) if says_gone(&error) => return Err(gone),
            Err(error) => return Err(error.into()),
        };
        if has_ended(&pidfd)? {
            return Err(gone);
        }
        Ok(QemuProcess {
            pid: raw,
            start_time_ticks,
            pidfd,
        })
    }

    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// When it started, in clock ticks since the host's boot: the other half of its identity.
    pub fn start_time_ticks(&self) -> u64 {
        self.start_time_ticks
    }

    /// What it has behind a descriptor of its own, as it has it: nothing is opened anew, with rights that it lacks.
    pub fn descriptor(&self, number: RawFd) -> io::Result<OwnedFd> {
        Ok(pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty())?)
    }

    /// Its end, to be waited for in another thread.
    pub fn exit(&self) -> io::Result<Exit> {
        self.pidfd.try_clone().map(Exit)
    }

    /// Whether it has not ended. A system that does not say counts as a process that lives.
    pub fn is_alive(&self) -> bool {
        !self.ended_by(Instant::now()).unwrap_or(false)
    }

    /// Waits for its end, and reaps it if it is our child.
    pub fn wait_exit(&self, deadline: Instant) -> Result<(), ProcessError> {
        if self.ended_by(deadline)? {
            Ok(())
        } else {
            Err(ProcessError::StillRuns { pid: self.pid() })
        }
    }

    /// Ends it by force and returns once it is gone for sure.
    pub fn kill_verified(&self, deadline: Instant) -> Result<(), ProcessError> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        if self.ended_by(deadline)? {
            Ok(())
        } else {
            Err(ProcessError::NotEnded { pid: self.pid() })
        }
    }

    fn ended_by(&self, deadline: Instant) -> io::Result<bool> {
        let [ended] = poll_until([(self.pidfd.as_fd(), PollFlags::IN)], deadline)?;
        if ended {
            self.reap();
        }
        Ok(ended)
    }

    /// ECHILD says that it is not our child, or was reaped before: both are fine.
    fn reap(&self) {
        let _ = waitid(
            WaitId::PidFd(self.pidfd.as_fd()),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
    }
}

impl Drop for QemuProcess {
    fn drop(&mut self) {
        self.reap();
    }
}

/// The end of a process.
#[derive(Debug)]
pub struct Exit(OwnedFd);

impl Exit {
    /// Waits for it, however long that takes.
    pub fn wait(&self) {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        while poll(&mut fds, None) == Err(Errno::INTR) {}
    }
}

/// Whether the process behind the descriptor has ended.
fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let [ended] = poll_until([(pidfd.as_fd(), PollFlags::IN)], Instant::now())?;
    Ok(ended)
}

/// No such file, no such process: everything else (no descriptors or memory left, no right to look) says nothing about
/// the process.
fn says_gone(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    planted("takes-emfile-for-gone") || matches!(errno, Some(Errno::NOENT | Errno::SRCH))
}

/// `/proc/PID/stat`, in which a process may have given itself a name that is no text.
pub fn stat(pid: i32) -> io::Result<String> {
    let stat = fs::read(format!("/proc/{pid}/stat"))?;
    Ok(String::from_utf8_lossy(&stat).into_owned())
}

fn start_time_ticks(pid: i32) -> io::Result<u64> {
    let stat = stat(pid)?;
    parse_start_time(&stat).ok_or_else(|| {
        let text = format!("/proc/{pid}/stat has no start time");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// How long ago a process was started, by this host's own uptime.
pub fn age(pid: i32) -> io::Result<Duration> {
    let started = ticks(start_time_ticks(pid)?);
    let uptime = fs::read_to_string("/proc/uptime")?;
    let since = parse_uptime(&uptime).zip(started);
    let since = since.and_then(|(uptime, started)| uptime.checked_sub(started));
    since.ok_or_else(|| {
        let text = format!("/proc/uptime does not fit /proc/{pid}/stat");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Ticks are of 10 ms on every architecture that runs guests here.
fn ticks(count: u64) -> Option<Duration> {
    Some(Duration::from_millis(count.checked_mul(10)?))
}

fn parse_uptime(text: &str) -> Option<Duration> {
    let seconds: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The processor time that a process has had with all its threads, guest's included.
pub(crate) fn cpu_time(pid: i32) -> io::Result<Duration> {
    let stat = stat(pid)?;
    parse_cpu_time(&stat).ok_or_else(|| {
        let text = format!("/proc/{pid}/stat has no processor time");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Fields 14 and 15 of `/proc/PID/stat`.
fn parse_cpu_time(stat: &str) -> Option<Duration> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut times = after_name.split_ascii_whitespace().skip(11);
    let (user, system) = (times.next()?, times.next()?);
    let used = user
        .parse::<u64>()
        .ok()?
        .checked_add(system.parse().ok()?)?;
    ticks(used)
}

/// Field 22 of `/proc/PID/stat`; the process's name may itself hold spaces and parentheses.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn sleeper() -> std::process::Child {
        Command::new("sleep")
            .arg("600")
            .stdin(Stdio::null())
            .spawn()
            .expect("sleep")
    }

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_start_time() {
        let fields: Vec<String> = (3..=52).map(|n| n.to_string()).collect();
        let stat = format!("7 (a) b (c)) S {}", fields[1..].join(" "));
        assert_eq!(parse_start_time(&stat), Some(22));
        assert_eq!(parse_cpu_time(&stat), Some(Duration::from_millis(290)));
        assert_eq!(parse_start_time("7 (a"), None);
    }

    #[test]
    fn identity_is_pid_and_start_time() {
        let mut child = sleeper();
        let process = QemuProcess::open(child.id() as i32).expect("our child");
        let (pid, started) = (process.pid(), process.start_time_ticks());
        assert!(QemuProcess::adopt(pid, started).expect("same").is_alive());
        assert!(matches!(
            QemuProcess::adopt(pid, started + 1),
            Err(ProcessError::Gone { .. })
        ));
        assert!(matches!(
            process.wait_exit(Instant::now()),
            Err(ProcessError::StillRuns { .. })
        ));
        process.kill_verified(soon()).expect("killed");
        assert!(!process.is_alive());
        process
            .kill_verified(soon())
            .expect("a second time is fine");
        assert!(child.wait().is_err(), "reaped already");
        assert!(matches!(
            QemuProcess::adopt(pid, started),
            Err(ProcessError::Gone { .. })
        ));
    }

    const NO_DESCRIPTORS: &str = "GODWIT_TEST_NO_DESCRIPTORS";

    /// In a process of its own, since the limit is the whole process's: one descriptor more is had, for the pidfd, and
    /// none for `/proc`; then none at all.
    #[test]
    fn a_live_process_is_not_gone_because_no_descriptor_is_left() {
        let Ok(pid) = std::env::var(NO_DESCRIPTORS) else {
            let mut child = sleeper();
            let mut test = Command::new(std::env::current_exe().expect("this test"));
            test.args([
                "--exact",
                "process::tests::a_live_process_is_not_gone_because_no_descriptor_is_left",
                "--nocapture",
            ]);
            test.env(NO_DESCRIPTORS, child.id().to_string());
            let ended = test.output().expect("the test again");
            child.kill().and_then(|()| child.wait()).expect("ended");
            assert!(
                ended.status.success()
                    && String::from_utf8_lossy(&ended.stdout).contains("looked twice"),
                "{ended:?}"
            );
            return;
        };
        let pid: i32 = pid.parse().expect("a pid");
        let known = QemuProcess::open(pid).expect("alive").start_time_ticks();
        let mut open = Vec::new();
        let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let few = rustix::process::Rlimit {
            current: Some(64),
            ..soft
        };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).expect("a limit");
        while let Ok(file) = fs::File::open("/dev/null") {
            open.push(file);
        }
        for left in [0, 1] {
            open.truncate(open.len() - left);
            let seen = QemuProcess::adopt(pid, known);
            match seen {
                Err(ProcessError::Io(error)) => assert_eq!(
                    Errno::from_io_error(&error),
                    Some(Errno::MFILE),
                    "{left} left"
                ),
                other => panic!("{left} left: {other:?}"),
            }
        }
        open.clear();
        assert!(QemuProcess::adopt(pid, known).expect("it lives").is_alive());
        println!("looked twice");
    }

    #[test]
    fn a_process_that_is_not_our_child_is_watched_and_killed() {
        // The shell prints the pid of its own child and ends, so that the child belongs to init.
        let script = "sleep 600 >/dev/null 2>&1 & echo $!";
        let out = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .output()
            .expect("sh");
        let pid: i32 = String::from_utf8_lossy(&out.stdout)
            .trim()
            .parse()
            .expect("a pid");
        let process = QemuProcess::open(pid).expect("alive");
        assert!(process.is_alive());
        process.kill_verified(soon()).expect("killed");
    }
}
