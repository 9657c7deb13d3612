//! One test machine: runs commands inside, lists and kills what runs there, ends it.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::namespace::{self, Plan};
use crate::testvol::{Survives, Volume};

const ALL_BUT_PID: i32 =
    libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;

/// A machine with mount, PID, network, UTS and IPC namespaces of its own.
pub struct Machine {
    name: String,
    init_pid: i32,
    init: Arc<OwnedFd>,
    hold: Option<OwnedFd>,
    /// Descriptors of the processes started from here, to reap on the way out: a dead child that nobody
    /// waited for would keep the PID namespace, and so the end of the machine, waiting.
    started: Arc<Mutex<Vec<OwnedFd>>>,
    ends_on_drop: bool,
    volumes: Vec<Volume>,
    /// Numbers of the mounts that it began with.
    first_mounts: HashSet<u64>,
}

/// Directories whose files a machine that lost its power does not have afterwards; see also [`Machine::power_cut`].
const GONE_WITHOUT_POWER: [&str; 3] = ["/run", "/tmp", "/dev/shm"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id as the machine sees it.
    pub pid_inside: i32,
    /// Its id as the maker of the lab sees it.
    pub pid_outside: i32,
    /// Its arguments joined with spaces.
    pub command_line: String,
}

impl Machine {
    /// Makes a machine and waits until commands can run in it.
    pub fn start(plan: &Plan) -> io::Result<Self> {
        let init = namespace::start(plan)?;
        Self::new(plan.name, init.pid, init.hold, !plan.outlive_maker)
    }

    /// A machine that another process made; dropping this leaves it alone.
    pub fn attach(name: &str, init_pid: i32) -> io::Result<Self> {
        Self::new(name, init_pid, None, false)
    }

    fn new(
        name: &str,
        init_pid: i32,
        hold: Option<OwnedFd>,
        ends_on_drop: bool,
    ) -> io::Result<Self> {
        let init = Arc::new(pidfd_open(init_pid)?);
        Ok(Self {
            name: name.to_owned(),
            init_pid,
            init,
            hold,
            started: Arc::default(),
            ends_on_drop,
            volumes: Vec::new(),
            first_mounts: mounts(init_pid)?.into_iter().map(|mount| mount.0).collect(),
        })
    }

    /// Its name, which is also its host name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Process id of its first process, seen from outside.
    pub fn init_pid(&self) -> i32 {
        self.init_pid
    }

    /// A command to run inside, as root, from `/`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> MachineCommand {
        let mut command = Command::new(program);
        enter_before_exec(&mut command, &self.init, ALL_BUT_PID);
        MachineCommand {
            command,
            init: self.init.clone(),
            started: self.started.clone(),
        }
    }

    /// A command of the *outside* that sees this machine's network and nothing else of it.
    pub(super) fn network_command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        enter_before_exec(&mut command, &self.init, libc::CLONE_NEWNET);
        command
    }

    /// Runs `action` on a thread of this process that is inside the machine's network.
    pub fn in_network<T: Send>(&self, action: impl FnOnce() -> T + Send) -> io::Result<T> {
        let enter = || set_namespaces(self.init.as_raw_fd(), libc::CLONE_NEWNET).map(|()| action());
        std::thread::scope(|scope| scope.spawn(enter).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// A path as seen from outside for a path inside (for example `/run/x` of this machine).
    pub fn path_from_outside(&self, inside: impl AsRef<Path>) -> std::path::PathBuf {
        let inside = inside.as_ref();
        Path::new("/proc")
            .join(self.init_pid.to_string())
            .join("root")
            .join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// All processes inside but the first.
    pub fn processes(&self) -> io::Result<Vec<Process>> {
        let namespace = std::fs::read_link(format!("/proc/{}/ns/pid", self.init_pid))?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<i32>().ok())
            else {
                continue;
            };
            // A process may end while it is looked at: then it is not listed.
            if pid != self.init_pid
                && std::fs::read_link(entry.path().join("ns/pid")).is_ok_and(|ns| ns == namespace)
            {
                found.extend(describe(pid));
            }
        }
        Ok(found)
    }

    /// Sends a signal to a process by the id that the machine knows it by.
    pub fn kill(&self, pid_inside: i32, signal: i32) -> io::Result<()> {
        let process = self
            .processes()?
            .into_iter()
            .find(|process| process.pid_inside == pid_inside);
        let process = process
            .ok_or_else(|| io::Error::other(format!("no process {pid_inside} on {}", self.name)))?;
        // SAFETY: sends a signal to a process of our lab; no memory is involved.
        match unsafe { libc::kill(process.pid_outside, signal) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Mounts a test volume at `at` inside, and makes that directory if it is not there. It ends with the machine.
    pub fn mount_volume(&mut self, at: &Path) -> io::Result<&Volume> {
        std::fs::create_dir_all(self.path_from_outside(at))?;
        self.volumes.push(Volume::mount(self.init.as_fd(), at)?);
        self.volume(at)
    }

    /// The same with [`Volume::mount_direct`].
    pub fn mount_direct_volume(&mut self, at: &Path) -> io::Result<&Volume> {
        std::fs::create_dir_all(self.path_from_outside(at))?;
        let volume = Volume::mount_direct(self.init.as_fd(), at)?;
        self.volumes.push(volume);
        self.volume(at)
    }

    /// The volume mounted at `at`.
    pub fn volume(&self, at: impl AsRef<Path>) -> io::Result<&Volume> {
        let at = at.as_ref();
        let found = self.volumes.iter().find(|volume| volume.at() == at);
        found.ok_or_else(|| {
            let text = format!("no volume at {} on {}", at.display(), self.name);
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }

    pub fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    /// Takes the machine's power away and gives it back, within 60 s: its volumes lose what was not synced, in one moment,
    /// everything that runs there is killed after that, and what lay in memory only is gone. What runs when it is on
    /// again is the caller's part. Directories that are neither emptied nor on a volume keep their files.
    pub fn power_cut(&self, survives: Survives) -> io::Result<()> {
        for volume in &self.volumes {
            volume.power_off(survives);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Some((process, alive)) = self.kill_all()?.into_iter().next() {
            self.volumes.iter().for_each(Volume::refuse_held);
            if Instant::now() > deadline {
                return Err(io::Error::other(format!(
                    "{} survives the power cut of {}",
                    process.command_line, self.name
                )));
            }
            wait_readable(&alive, Duration::from_millis(20));
        }
        self.unmount_new()?;
        for directory in GONE_WITHOUT_POWER {
            empty(&self.path_from_outside(directory))?;
        }
        self.volumes.iter().for_each(Volume::power_on);
        Ok(())
    }

    /// Unmounts what was mounted since the machine was made, but its volumes.
    fn unmount_new(&self) -> io::Result<()> {
        for (number, at) in mounts(self.init_pid)?.into_iter().rev() {
            if self.first_mounts.contains(&number) || self.volume(&at).is_ok() {
                continue;
            }
            let output = self.command("umount").arg("--lazy").arg(&at).output()?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(io::Error::other(format!("cannot unmount {at}: {said}")));
            }
        }
        Ok(())
    }

    /// Kills all processes inside and gives those that have not ended yet. One that has, and was not waited for by whoever
    /// started it, does nothing any more.
    fn kill_all(&self) -> io::Result<Vec<(Process, OwnedFd)>> {
        let living = self.processes_and_handles()?;
        for (_, handle) in &living {
            signal_process(handle, libc::SIGKILL)?;
        }
        Ok(living)
    }

    fn processes_and_handles(&self) -> io::Result<Vec<(Process, OwnedFd)>> {
        let handle = |process: Process| {
            // It may have ended since it was listed.
            let handle = pidfd_open(process.pid_outside).ok()?;
            (!has_ended(&handle)).then_some((process, handle))
        };
        Ok(self.processes()?.into_iter().filter_map(handle).collect())
    }

    /// Ends the machine and everything in it, within 60 s. Also done on drop, for machines that this process made.
    pub fn end(&mut self) -> io::Result<()> {
        self.hold = None;
        signal_process(&self.init, libc::SIGKILL)?;
        if !self.volumes.is_empty() {
            // Whoever waits for a volume could not end while it hangs, and is not to go on when it does not any more.
            // A first process that has ended has taken all others with it.
            let _ = self.kill_all();
            self.volumes.clear();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !has_ended(&self.init) {
            if let Ok(started) = self.started.lock() {
                started.iter().for_each(reap);
            }
            reap(&self.init);
            if Instant::now() > deadline {
                return Err(io::Error::other(format!(
                    "machine {} does not end",
                    self.name
                )));
            }
            wait_readable(&self.init, Duration::from_millis(20));
        }
        reap(&self.init);
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.ends_on_drop {
            let _ = self.end(); // nothing more can be done about it here
        }
    }
}

/// A command that runs inside a machine.
pub struct MachineCommand {
    command: Command,
    init: Arc<OwnedFd>,
    started: Arc<Mutex<Vec<OwnedFd>>>,
}

impl MachineCommand {
    pub fn arg(&mut self, argument: impl AsRef<OsStr>) -> &mut Self {
        self.command.arg(argument);
        self
    }

    pub fn args(&mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        self.command.args(arguments);
        self
    }

    pub fn env(&mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> &mut Self {
        self.command.env(name, value);
        self
    }

    pub fn stdin(&mut self, stdio: impl Into<Stdio>) -> &mut Self {
        self.command.stdin(stdio);
        self
    }

    pub fn stdout(&mut self, stdio: impl Into<Stdio>) -> &mut Self {
        self.command.stdout(stdio);
        self
    }

    pub fn stderr(&mut self, stdio: impl Into<Stdio>) -> &mut Self {
        self.command.stderr(stdio);
        self
    }

    /// Starts it. The child is a direct child of this process, with the id that it has outside.
    pub fn spawn(&mut self) -> io::Result<Child> {
        let (command, init) = (&mut self.command, &self.init);
        // Joining a PID namespace is about children of the joining thread, so a thread is spent on it.
        let enter =
            || set_namespaces(init.as_raw_fd(), libc::CLONE_NEWPID).and_then(|()| command.spawn());
        let child = std::thread::scope(|scope| scope.spawn(enter).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        if let (Ok(pidfd), Ok(mut started)) = (pidfd_open(child.id() as i32), self.started.lock()) {
            // Those that were waited for need nothing more; a long run starts many.
            started.retain(is_ours);
            started.push(pidfd);
        }
        Ok(child)
    }

    /// Runs it to its end and gives its output.
    pub fn output(&mut self) -> io::Result<Output> {
        self.stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        self.spawn()?.wait_with_output()
    }

    /// Runs it to its end.
    pub fn status(&mut self) -> io::Result<ExitStatus> {
        self.spawn()?.wait()
    }
}

fn enter_before_exec(command: &mut Command, init: &Arc<OwnedFd>, namespaces: i32) {
    let init = init.clone();
    // SAFETY: the closure makes system calls only (setns, chdir) on values made before the fork.
    unsafe {
        command.pre_exec(move || {
            set_namespaces(init.as_raw_fd(), namespaces)?;
            match libc::chdir(c"/".as_ptr()) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
}

fn set_namespaces(process: RawFd, namespaces: i32) -> io::Result<()> {
    // SAFETY: changes namespaces of the calling thread only; no memory is involved.
    match unsafe { libc::setns(process, namespaces) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: gives a new descriptor or an error; it is owned exactly once.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as RawFd)),
        }
    }
}

fn signal_process(process: &OwnedFd, signal: i32) -> io::Result<()> {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: signals the one process that the descriptor names; a null siginfo is allowed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            signal,
            info,
            0,
        )
    };
    let error = io::Error::last_os_error();
    if result == 0 || error.raw_os_error() == Some(libc::ESRCH) {
        Ok(())
    } else {
        Err(error)
    }
}

/// Collects the process if it is a child of ours that has died and nobody collected it.
fn reap(process: &OwnedFd) {
    // SAFETY: a zeroed siginfo is a valid value, and the call writes only to it.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(
            libc::P_PIDFD,
            process.as_raw_fd() as u32,
            &mut info,
            libc::WEXITED | libc::WNOHANG,
        );
    }
}

/// Whether the process is a child of ours that lives or that nobody has collected yet.
fn is_ours(process: &OwnedFd) -> bool {
    // SAFETY: a zeroed siginfo is a valid value, and the call writes only to it.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PIDFD, process.as_raw_fd() as u32, &mut info, flags) == 0
    }
}

/// A process descriptor becomes readable when the process has ended.
fn wait_readable(process: &OwnedFd, at_most: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd: process.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut poll, 1, at_most.as_millis() as i32) > 0 }
}

fn has_ended(process: &OwnedFd) -> bool {
    wait_readable(process, Duration::ZERO)
}

/// Removes all that a directory has in it, but nothing of another file system: that is somebody else's, such as the build
/// directory.
fn empty(directory: &Path) -> io::Result<()> {
    let own = std::fs::metadata(directory)?.dev();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        // Not of the entry itself, which knows only what lies below a mount.
        let seen = std::fs::symlink_metadata(&path)?;
        if seen.dev() != own {
            continue;
        }
        if !seen.is_dir() {
            std::fs::remove_file(path)?;
            continue;
        }
        empty(&path)?;
        match std::fs::remove_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Number and place of each mount that a process sees, in the order in which they were made.
fn mounts(pid: i32) -> io::Result<Vec<(u64, String)>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let mount = |line: &str| {
        let mut fields = line.split_whitespace();
        let number = fields.next()?.parse().ok()?;
        Some((number, fields.nth(3)?.to_owned()))
    };
    Ok(text.lines().filter_map(mount).collect())
}

fn describe(pid: i32) -> Option<Process> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    let pid_inside = ids.split_whitespace().last()?.parse().ok()?;
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let command_line = String::from_utf8_lossy(&arguments)
        .trim_end_matches('\0')
        .replace('\0', " ");
    Some(Process {
        pid_inside,
        pid_outside: pid,
        command_line,
    })
}
