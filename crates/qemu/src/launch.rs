//! Starts QEMU, or takes over one that runs.
//!
//! QEMU runs as an unprivileged user in a session of its own and outlives whoever started it. It inherits exactly the
//! descriptors it is given, under their numbers, and an environment that we made. Its control sockets are made here,
//! listening before it starts, in a directory that only root enters: whoever connects waits for the greeting or sees
//! the end, and nothing polls for a file. A start that fails leaves no process behind.
//!
//! QEMU may write no file beyond a length: that of the guest's memory or of its largest writable image. The memory is a
//! file of QEMU's user, on a file system that all VMs share and whose files cannot be sealed, so a QEMU that was taken over
//! could otherwise make it grow until its neighbours find no memory. It has no right to lift that limit.

use crate::bounds::Bounds;
use crate::command_line::{self, Accelerator, ConfigError, MachineConfig};
use crate::machine::Machine;
use crate::process::{ProcessError, QemuProcess};
use crate::qmp::{Client, QmpError};
use crate::stderr_log::StderrLog;
use crate::tap_guard;
use rustix::fd::{AsRawFd, BorrowedFd, RawFd};
use rustix::fs::{Gid, Uid};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit, setsid,
};
use rustix::thread::{set_no_new_privs, set_thread_gid, set_thread_groups, set_thread_uid};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a QEMU that has to go is given to be gone.
const KILL_TIME: Duration = Duration::from_secs(10);

/// The library that makes userfaultfd descriptors inside QEMU, and what it needs.
#[derive(Debug, Clone)]
pub struct Handout<'fd> {
    /// The library, an open file that is loaded before all others and closed by the library itself; QEMU finds its
    /// number in `GODWIT_HANDOUT_LIBRARY_FD`.
    pub library: BorrowedFd<'fd>,
    /// An open `/dev/userfaultfd`; QEMU finds its number in `GODWIT_UFFD_DEVICE_FD`.
    pub uffd_device: BorrowedFd<'fd>,
    /// A listening Unix socket; QEMU finds its number in `GODWIT_HANDOUT_LISTEN_FD`.
    pub listener: BorrowedFd<'fd>,
}

/// Everything needed to start one QEMU.
#[derive(Debug, Clone)]
pub struct LaunchSpec<'fd> {
    /// Path of the QEMU to start; it may be a script around one.
    pub binary: PathBuf,
    /// What the command line is made of.
    pub machine: MachineConfig,
    /// Paths of the control sockets, at least one. Each directory is made if it is missing, and closed to all but root.
    pub monitors: Vec<PathBuf>,
    /// The user that QEMU becomes.
    pub uid: u32,
    /// The group that QEMU becomes; the group of `/dev/kvm` is added under KVM.
    pub gid: u32,
    /// The descriptor hand-out; `None` for a QEMU whose memory is not tracked.
    pub handout: Option<Handout<'fd>>,
    /// Further descriptors that QEMU inherits under their numbers: the taps, the disks' images, UEFI, the port of the guest's agent and its seed.
    pub inherited: Vec<BorrowedFd<'fd>>,
}

/// A running QEMU: its process and its control connection.
#[derive(Debug)]
pub struct Hypervisor {
    /// Waits for its end and can end it.
    pub process: QemuProcess,
    /// What commands and events go through.
    pub machine: Machine,
}

/// Why QEMU was not started or taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The machine's description is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No control socket was asked for.
    #[error("a machine needs at least one control socket")]
    NoMonitor,
    /// A network card or a disk names a descriptor that is not passed on, or a standard one.
    #[error(
        "descriptor {fd} cannot be given to the hypervisor: it is not in the list of inherited ones, or below 3"
    )]
    Descriptor {
        /// Descriptor as the machine's description names it.
        fd: RawFd,
    },
    /// The control socket cannot be made.
    #[error("cannot make the control socket {path}: {source}")]
    Monitor {
        /// Where it was to be.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// QEMU's user may not use KVM.
    #[error(
        "user {uid} may not open /dev/kvm: give the device a group (chgrp kvm /dev/kvm; chmod 660 /dev/kvm), or use tcg"
    )]
    KvmAccess {
        /// Whom QEMU would become.
        uid: u32,
    },
    /// The program cannot be started.
    #[error("cannot start {binary}: {source}")]
    Start {
        /// Path as it was given.
        binary: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// QEMU ended before it answered; its own words say why.
    #[error("the hypervisor ended while it started: {stderr}")]
    Ended {
        /// The end of its standard error.
        stderr: String,
    },
    /// QEMU runs but its control socket does not answer.
    #[error("{source}; it said: {stderr}")]
    Control {
        /// What happened on the control socket.
        source: QmpError,
        /// The end of its standard error.
        stderr: String,
    },
    /// The files of a trial cannot be made.
    #[error("cannot make the files of a trial guest in {path}: {source}")]
    Trial {
        /// Where they were to be, removed afterwards.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The process is gone or cannot be watched.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Starts QEMU and waits until it answers. The guest does not run.
pub fn launch(spec: &LaunchSpec<'_>, deadline: Instant) -> Result<Hypervisor, LaunchError> {
    start(spec, false, deadline)
}

/// As [`launch`], for a QEMU that is of no use without the thread that starts it, and is killed when that ends.
pub(crate) fn launch_for_caller(
    spec: &LaunchSpec<'_>,
    deadline: Instant,
) -> Result<Hypervisor, LaunchError> {
    start(spec, true, deadline)
}

fn start(
    spec: &LaunchSpec<'_>,
    ends_with_caller: bool,
    deadline: Instant,
) -> Result<Hypervisor, LaunchError> {
    let first = spec.monitors.first().ok_or(LaunchError::NoMonitor)?;
    let listeners = spec
        .monitors
        .iter()
        .map(|path| listen(path))
        .collect::<Result<Vec<_>, _>>()?;
    let monitor_fds: Vec<RawFd> = listeners.iter().map(AsRawFd::as_raw_fd).collect();
    let start = |source| LaunchError::Start {
        binary: spec.binary.clone(),
        source,
    };
    let stderr = StderrLog::create().map_err(start)?;
    let mut command = command(spec, &monitor_fds, &stderr)?;
    if ends_with_caller {
        // SAFETY: runs between fork and exec, behind the change of user, which would undo it; one system call.
        unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
    }
    let mut child = command.spawn().map_err(start)?;
    // Our copies must go: QEMU's end is seen because it held the last ones.
    drop((command, listeners));
    let pid = i32::try_from(child.id())
        .map_err(io::Error::other)
        .map_err(start)?;
    let process = QemuProcess::open(pid).inspect_err(|_| {
        // Out of descriptors, say: nothing may be left that nobody can end.
        let _ = child.kill().and_then(|()| child.wait());
    })?;
    match Client::connect(first, deadline) {
        Ok(client) => Ok(Hypervisor {
            process,
            machine: Machine::new(client, Some(stderr)),
        }),
        Err(source) => Err(failed(&process, source, &stderr)),
    }
}

/// Takes over a QEMU that runs, by what was recorded about it. The process that used its control socket must be gone:
/// QEMU serves one connection at a time. Events of the time between are lost, so ask for the state.
pub fn adopt(
    pid: i32,
    start_time_ticks: u64,
    monitor: &Path,
    deadline: Instant,
) -> Result<Hypervisor, LaunchError> {
    let process = QemuProcess::adopt(pid, start_time_ticks)?;
    let stderr = StderrLog::of_process(&process).ok();
    match Client::connect(monitor, deadline) {
        Ok(client) => Ok(Hypervisor {
            process,
            machine: Machine::new(client, stderr),
        }),
        Err(source) => {
            let stderr =
                stderr.map_or_else(|| "nothing that was kept".to_owned(), |log| log.tail());
            Err(LaunchError::Control { source, stderr })
        }
    }
}

/// A start that failed ends the process, and tells an early end from silence.
fn failed(process: &QemuProcess, source: QmpError, stderr: &StderrLog) -> LaunchError {
    // The socket closes an instant before the process is gone.
    let grace = if matches!(source, QmpError::Closed | QmpError::Connect { .. }) {
        KILL_TIME
    } else {
        Duration::ZERO
    };
    let ended = process.wait_exit(Instant::now() + grace).is_ok();
    if let Err(error) = process.kill_verified(Instant::now() + KILL_TIME) {
        return error.into();
    }
    let stderr = stderr.tail();
    if ended {
        let stderr = with_advice(stderr);
        LaunchError::Ended { stderr }
    } else {
        LaunchError::Control { source, stderr }
    }
}

/// On AMD machines KVM offers the guest a register that it then refuses, and QEMU aborts with the host's own CPU model.
fn with_advice(words: String) -> String {
    match words.contains("failed to set MSR 0x10a") {
        true => format!(
            "{words}; KVM on this host offers a CPU feature that it then refuses: set cpu = \"auto\", or leave the feature out, as in cpu = \"host,-arch-capabilities\""
        ),
        false => words,
    }
}

/// The socket belongs to root, in a directory of root's: QEMU is given the listening descriptor and needs no path.
fn listen(path: &Path) -> Result<UnixListener, LaunchError> {
    let make = || {
        if let Some(directory) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(listener)
    };
    make().map_err(|source| LaunchError::Monitor {
        path: path.to_owned(),
        source,
    })
}

fn command(
    spec: &LaunchSpec<'_>,
    monitor_fds: &[RawFd],
    stderr: &StderrLog,
) -> Result<Command, LaunchError> {
    let start = |source| LaunchError::Start {
        binary: spec.binary.clone(),
        source,
    };
    let inherited = inherited(spec, monitor_fds)?;
    let groups = kvm_group(spec)?;
    let bounds = Bounds::of(spec).map_err(start)?;
    let mut command = Command::new(&spec.binary);
    command.args(command_line::build(&spec.machine, monitor_fds)?);
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LANG", "C")
        .current_dir("/");
    if let Some(handout) = &spec.handout {
        let library = handout.library.as_raw_fd();
        command.env("LD_PRELOAD", format!("/proc/self/fd/{library}"));
        command.env("GODWIT_HANDOUT_LIBRARY_FD", library.to_string());
        command.env(
            "GODWIT_UFFD_DEVICE_FD",
            handout.uffd_device.as_raw_fd().to_string(),
        );
        command.env(
            "GODWIT_HANDOUT_LISTEN_FD",
            handout.listener.as_raw_fd().to_string(),
        );
    }
    command.stdin(Stdio::null());
    command
        .stdout(stderr.writer().map_err(start)?)
        .stderr(stderr.writer().map_err(start)?);
    let (uid, gid) = (Uid::from_raw(spec.uid), Gid::from_raw(spec.gid));
    // SAFETY: the closure runs between fork and exec and makes only system calls on values that were made before; it
    // takes no lock and allocates nothing.
    unsafe { command.pre_exec(move || become_qemu(&inherited, &groups, uid, gid, bounds)) };
    Ok(command)
}

/// In the child: a session of its own, only the listed descriptors, no core dumps of guest memory, no file longer than
/// it needs, no privileges, and no more protection than other programs when the host runs out of memory.
fn become_qemu(
    inherited: &[RawFd],
    groups: &[Gid],
    uid: Uid,
    gid: Gid,
    bounds: Bounds,
) -> io::Result<()> {
    setsid()?;
    be_no_better_than_others();
    mark_all_close_on_exec()?;
    for &fd in inherited {
        // SAFETY: the descriptor is open: the parent borrows it for as long as it starts the child.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        fcntl_setfd(fd, FdFlags::empty())?;
    }
    setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: Some(0),
        },
    )?;
    bounds.set()?;
    set_thread_groups(groups)?;
    set_thread_gid(gid)?;
    set_thread_uid(uid)?;
    set_no_new_privs(true)?;
    tap_guard::refuse_to_this_thread()
}

/// What QEMU would inherit is its VM process's, or the agent's. A kernel that refuses leaves it protected.
pub(crate) fn be_no_better_than_others() {
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(
        c"/proc/self/oom_score_adj",
        flags,
        rustix::fs::Mode::empty(),
    );
    if let Ok(file) = file {
        let _ = rustix::io::write(&file, b"0");
    }
}

fn mark_all_close_on_exec() -> io::Result<()> {
    // SAFETY: a plain system call on numbers; it changes a flag and closes nothing.
    let result = unsafe {
        libc::close_range(
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC as libc::c_int,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn inherited(spec: &LaunchSpec<'_>, monitor_fds: &[RawFd]) -> Result<Vec<RawFd>, LaunchError> {
    let given = spec.inherited.iter().map(AsRawFd::as_raw_fd);
    let handout = spec
        .handout
        .iter()
        .flat_map(|h| [h.library, h.uffd_device, h.listener])
        .map(|fd| fd.as_raw_fd());
    let all: Vec<RawFd> = given
        .chain(handout)
        .chain(monitor_fds.iter().copied())
        .collect();
    let taps = spec.machine.nics.iter().map(|nic| nic.tap_fd);
    let disks = spec.machine.disks.iter();
    let images = disks.filter_map(|disk| disk.back_end.image());
    let flash = spec.machine.flash.iter();
    let flash = flash.flat_map(|flash| [flash.code_fd, flash.variables_fd]);
    let of_the_guest = spec
        .machine
        .agent_fd
        .into_iter()
        .chain(spec.machine.seed_fd);
    let missing = taps
        .chain(images)
        .chain(flash)
        .chain(of_the_guest)
        .filter(|fd| !all.contains(fd))
        .chain(all.iter().copied().filter(|&fd| fd < 3))
        .next();
    missing.map_or(Ok(all), |fd| Err(LaunchError::Descriptor { fd }))
}

/// The supplementary groups: that of `/dev/kvm` where it is needed and helps.
fn kvm_group(spec: &LaunchSpec<'_>) -> Result<Vec<Gid>, LaunchError> {
    if spec.machine.accelerator == Accelerator::Tcg || spec.uid == 0 {
        return Ok(Vec::new());
    }
    let refused = LaunchError::KvmAccess { uid: spec.uid };
    let Ok(device) = fs::metadata("/dev/kvm") else {
        return Err(refused);
    };
    let (mode, both) = (device.mode(), 0o6);
    match () {
        () if mode & both == both || (device.uid() == spec.uid && mode >> 6 & both == both) => {
            Ok(Vec::new())
        }
        () if mode >> 3 & both == both && device.gid() != 0 => {
            Ok(vec![Gid::from_raw(device.gid())])
        }
        () => Err(refused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Runs a command as QEMU is run, with that limit.
    fn as_qemu(uid: u32, longest: u64, command: &str) -> std::process::Output {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).env("LC_ALL", "C");
        // SAFETY: as for QEMU.
        unsafe { shell.pre_exec(move || become_qemu(&[], &[], uid, gid, bounds(longest))) };
        shell.output().expect("a shell")
    }

    /// What the kernel says to an ioctl of a descriptor with one number as its argument.
    fn asks(fd: RawFd, request: u32, argument: libc::c_long) -> Option<i32> {
        // SAFETY: a request that reads memory reads what `argument` points to, which the caller gives only for those.
        let result = unsafe { libc::ioctl(fd, request as libc::Ioctl, argument) };
        (result < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    #[test]
    fn a_register_that_kvm_refuses_names_the_cpu_to_set_instead() {
        let log = StderrLog::create().unwrap();
        let said = b"qemu-system-x86_64: error: failed to set MSR 0x10a to 0xa000000 ";
        io::Write::write_all(&mut log.writer().unwrap(), said).unwrap();
        let text = with_advice(log.tail());
        assert!(text.contains("0x10a") && text.contains("cpu = \"host,-arch-capabilities\""));
        assert_eq!(with_advice("out of memory".into()), "out of memory");
    }

    #[test]
    fn a_qemu_that_was_taken_over_can_do_nothing_to_its_tap_but_send_and_receive() {
        const GET_FEATURES: u32 = 0x8004_54cf;
        let device = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/net/tun");
        let Ok(device) = device else {
            return println!("skipped: /dev/net/tun cannot be opened here");
        };
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        let fd = device.as_raw_fd();
        let features = Box::leak(Box::new(0_u32));
        let features = std::ptr::from_mut(features) as libc::c_long;
        // Without the guard the kernel looks at each of them.
        let of_the_kernel = asks(fd, tap_guard::REFUSED[1], 0);
        assert_ne!(of_the_kernel, Some(libc::EPERM));
        let (uid, gid) = (Uid::from_raw(61_234), Gid::from_raw(61_234));
        let mut shell = Command::new("true");
        let check = move || {
            become_qemu(&[], &[], uid, gid, bounds(1 << 20))?;
            let is_refused = |request: &u32| asks(fd, *request, 0) == Some(libc::EPERM);
            let all = tap_guard::REFUSED.iter().all(is_refused);
            let others_pass = asks(fd, GET_FEATURES, features).is_none();
            match all && others_pass {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(libc::EBADMSG)),
            }
        };
        // SAFETY: as for QEMU.
        unsafe { shell.pre_exec(check) };
        assert!(shell.status().expect("each was refused").success());
    }

    const fn bounds(longest_file: u64) -> Bounds {
        Bounds {
            longest_file,
            threads: Some(1001),
        }
    }

    /// Two QEMUs that were taken over could else use up the threads of the host, root's included.
    #[test]
    fn a_qemu_that_was_taken_over_cannot_take_the_threads_of_the_whole_host() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        let said = as_qemu(61_235, 1 << 20, "grep '^Max processes' /proc/self/limits");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let limits: Vec<&str> = said.split_whitespace().skip(2).take(2).collect();
        assert_eq!(limits, ["1001", "1001"], "{said}");
    }

    #[test]
    fn qemus_user_cannot_make_the_file_of_its_guests_memory_longer() {
        const UID: u32 = 61_234;
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: becoming another user needs root");
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("chmod");
        let path = directory.path().join("ram");
        let file = File::create(&path).expect("created");
        file.set_len(4 << 20).expect("its length");
        std::os::unix::fs::fchown(&file, Some(UID), Some(UID)).expect("its owner");
        let ram = path.display();
        let tries = [
            format!("truncate -s +1 {ram}"),
            format!("truncate -s 64T {ram}"),
            format!("fallocate -o 4M -l 32M {ram}"),
            format!("dd if=/dev/zero of={ram} bs=1M seek=4 count=1 conv=notrunc"),
        ];
        for command in tries {
            let tried = as_qemu(UID, 4 << 20, &command);
            let said = String::from_utf8_lossy(&tried.stderr);
            assert!(!tried.status.success(), "{command}");
            assert!(said.contains("File too large"), "{command}: {said}");
            let length = file.metadata().expect("its length").len();
            assert_eq!(length, 4 << 20, "{command}");
        }
        let lifted = as_qemu(UID, 4 << 20, "ulimit -f unlimited");
        assert!(!lifted.status.success(), "it may not lift its limit");
        let within = format!("dd if=/dev/zero of={ram} bs=1M count=4 conv=notrunc");
        assert!(as_qemu(UID, 4 << 20, &within).status.success());
    }
}
