//! The first process of a test machine: makes its namespaces and private directories, reaps, and ends it.
//!
//! It is forked without exec, possibly from a process with many threads, so between the clone and its end it
//! only makes system calls on memory prepared before: no allocation, no locks. It ignores SIGCHLD, which makes the
//! kernel reap orphans, and waits for end of file on a pipe whose other end its maker holds: when the maker dies,
//! however it dies, the machine dies with all that runs in it.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// Directories that each machine has empty and to itself; everything else is read-only. Nothing in `/run` can be run, as
/// on Debian and Ubuntu.
pub const PRIVATE_DIRECTORIES: [&str; 7] = [
    "/run",
    "/var/lib",
    "/var/log",
    "/var/tmp",
    "/tmp",
    "/dev/shm",
    "/etc/godwit",
];

/// What a machine's first process is to prepare.
pub struct Plan<'a> {
    /// Host name, and process name of the first process.
    pub name: &'a str,
    /// Directories that stay visible (read-only) although they lie inside a private one.
    pub visible: &'a [PathBuf],
    /// Directories common to all machines and writable: a declared shared datastore.
    pub shared: &'a [PathBuf],
    /// Whether the machine outlives the process that makes it.
    pub outlive_maker: bool,
}

/// A started first process.
pub struct Init {
    /// Its process id, seen from outside.
    pub pid: i32,
    /// Dropping this ends the machine; absent if it outlives its maker.
    pub hold: Option<OwnedFd>,
}

const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC;

/// A directory kept or shared across the private mounts.
struct Kept {
    path: CString,
    ancestors: Vec<CString>,
    writable: bool,
}

/// All that the child reads, made before the clone.
struct Prepared {
    name: CString,
    private: Vec<CString>,
    kept: Vec<Kept>,
    hold_read: Option<RawFd>,
    status: RawFd,
}

/// Starts a machine's first process and waits until its directories are ready.
pub fn start(plan: &Plan) -> io::Result<Init> {
    let (status_read, status_write) = pipe()?;
    let (hold_read, hold) = match plan.outlive_maker {
        true => (None, None),
        false => pipe().map(|(read, write)| (Some(read), Some(write)))?,
    };
    std::fs::create_dir_all("/etc/godwit")?;
    let prepared = Prepared {
        name: c_string(Path::new(plan.name))?,
        private: PRIVATE_DIRECTORIES
            .iter()
            .map(|path| c_string(Path::new(path)))
            .collect::<io::Result<_>>()?,
        kept: kept_directories(plan)?,
        hold_read: hold_read.as_ref().map(AsRawFd::as_raw_fd),
        status: status_write.as_raw_fd(),
    };
    // SAFETY: a plain fork into new namespaces (no shared memory, no new stack); the child only makes system calls on
    // `prepared`, which it has a copy of, and never returns from `run`.
    let pid = unsafe { libc::syscall(libc::SYS_clone, NAMESPACES | libc::SIGCHLD, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => run(&prepared),
        pid => {
            drop((status_write, hold_read));
            wait_ready(status_read, pid as i32)?;
            Ok(Init {
                pid: pid as i32,
                hold,
            })
        }
    }
}

/// The child writes the number of the step it failed at and the error, or zeros.
fn wait_ready(status: OwnedFd, pid: i32) -> io::Result<()> {
    let mut answer = [0_u8; 8];
    File::from(status).read_exact(&mut answer)?;
    let [step, errno] = [&answer[..4], &answer[4..]]
        .map(|word| i32::from_le_bytes(word.try_into().unwrap_or_default()));
    if errno == 0 {
        return Ok(());
    }
    // SAFETY: waits for our own child, which is ending; no memory is passed.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    let what = STEPS
        .get(step as usize)
        .copied()
        .unwrap_or("prepare a machine");
    Err(io::Error::other(format!(
        "cannot {what}: {}",
        io::Error::from_raw_os_error(errno)
    )))
}

const STEPS: [&str; 9] = [
    "detach from the terminal",
    "make mounts private",
    "make the system read-only",
    "keep a directory visible",
    "mount a private directory",
    "mount proc",
    "mount sysfs",
    "bring a directory back",
    "set the host name",
];

/// The life of the first process; never returns.
fn run(prepared: &Prepared) -> ! {
    let (step, errno) = match prepare(prepared) {
        Ok(()) => (0, 0),
        Err((step, errno)) => (step, errno),
    };
    let mut answer = [0_u8; 8];
    answer[..4].copy_from_slice(&step.to_le_bytes());
    answer[4..].copy_from_slice(&errno.to_le_bytes());
    // SAFETY: writes 8 bytes from a local array, closes a descriptor, reads one byte into a local; then ends.
    unsafe {
        libc::write(prepared.status, answer.as_ptr().cast(), answer.len());
        libc::close(prepared.status);
        if errno != 0 {
            libc::_exit(1);
        }
        match prepared.hold_read {
            Some(hold) => {
                let mut byte = 0_u8;
                while libc::read(hold, (&raw mut byte).cast(), 1) < 0
                    && *libc::__errno_location() == libc::EINTR
                {}
            }
            None => loop {
                libc::pause();
            },
        }
        libc::_exit(0)
    }
}

type Step = Result<(), (i32, i32)>;

fn prepare(prepared: &Prepared) -> Step {
    at(0, || detach(prepared))?;
    at(1, || {
        mount(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE)
    })?;
    at(2, || set_read_only(libc::AT_FDCWD, c"/", true))?;
    let mut trees = [-1; 16]; // no allocation here; `kept_directories` keeps the number below this
    for (kept, tree) in prepared.kept.iter().zip(&mut trees) {
        at(3, || open_tree(&kept.path).map(|fd| *tree = fd))?;
    }
    for path in &prepared.private {
        let noexec = if path.as_c_str() == c"/run" {
            libc::MS_NOEXEC
        } else {
            0
        };
        let flags = libc::MS_NOSUID | libc::MS_NODEV | noexec;
        at(4, || mount(Some(c"tmpfs"), path, Some(c"tmpfs"), flags))?;
    }
    at(5, || {
        mount(
            Some(c"proc"),
            c"/proc",
            Some(c"proc"),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
        )
    })?;
    at(6, remount_sys)?;
    for (kept, tree) in prepared.kept.iter().zip(trees) {
        at(7, || bring_back(kept, tree))?;
    }
    let name = prepared.name.as_bytes();
    // SAFETY: the name is a valid string of the given length.
    let named = unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) };
    at(8, || check(named))
}

fn at(step: i32, action: impl FnOnce() -> Result<(), i32>) -> Step {
    action().map_err(|errno| (step, errno))
}

fn check(result: i32) -> Result<(), i32> {
    if result < 0 { Err(errno()) } else { Ok(()) }
}

fn errno() -> i32 {
    // SAFETY: errno of this thread is always readable.
    unsafe { *libc::__errno_location() }
}

/// Own session, no inherited descriptors, no zombies.
fn detach(prepared: &Prepared) -> Result<(), i32> {
    let keep = [
        prepared.status,
        prepared.hold_read.unwrap_or(prepared.status),
    ];
    let (low, high) = (keep[0].min(keep[1]), keep[0].max(keep[1]));
    // SAFETY: system calls on numbers and constant strings; only descriptors that this process does not use are
    // closed, in a process that has no other thread.
    unsafe {
        libc::setsid();
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::prctl(libc::PR_SET_NAME, prepared.name.as_ptr());
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        check(null)?;
        for standard in 0..3 {
            check(libc::dup2(null, standard))?;
        }
        close_range(3, low - 1);
        close_range(low + 1, high - 1);
        close_range(high + 1, i32::MAX);
    }
    Ok(())
}

/// # Safety
/// Nothing may use the descriptors of that range afterwards.
unsafe fn close_range(first: i32, last: i32) {
    if first <= last {
        // SAFETY: promised by the caller.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

fn mount(source: Option<&CStr>, target: &CStr, kind: Option<&CStr>, flags: u64) -> Result<(), i32> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: all pointers are valid strings or null, which mount accepts for what is not needed.
    check(unsafe {
        libc::mount(
            pointer(source),
            target.as_ptr(),
            pointer(kind),
            flags,
            std::ptr::null(),
        )
    })
}

/// Sets or clears "read-only" on a mount and all below it.
fn set_read_only(directory: RawFd, path: &CStr, read_only: bool) -> Result<(), i32> {
    let attribute = libc::MOUNT_ATTR_RDONLY;
    let attributes = libc::mount_attr {
        attr_set: if read_only { attribute } else { 0 },
        attr_clr: if read_only { 0 } else { attribute },
        propagation: 0,
        userns_fd: 0,
    };
    let flags = libc::AT_RECURSIVE | libc::AT_EMPTY_PATH;
    let size = size_of::<libc::mount_attr>();
    // SAFETY: path and attributes are valid for the call, size is that of the attributes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            directory,
            path.as_ptr(),
            flags,
            &attributes,
            size,
        )
    };
    check(result as i32)
}

/// A detached copy of the mounts at and below a directory.
fn open_tree(path: &CStr) -> Result<RawFd, i32> {
    let flags = libc::OPEN_TREE_CLONE as i32 | libc::OPEN_TREE_CLOEXEC as i32 | libc::AT_RECURSIVE;
    // SAFETY: the path is a valid string.
    let tree =
        unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) } as i32;
    check(tree).map(|()| tree)
}

fn move_mount(tree: RawFd, to: &CStr) -> Result<(), i32> {
    let flags = libc::MOVE_MOUNT_F_EMPTY_PATH;
    // SAFETY: the tree is an open descriptor, both paths are valid strings.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree,
            c"".as_ptr(),
            libc::AT_FDCWD,
            to.as_ptr(),
            flags,
        )
    };
    check(result as i32)
}

/// A fresh sysfs shows this network namespace's devices; the control groups are brought back into it, writable.
fn remount_sys() -> Result<(), i32> {
    let cgroups = open_tree(c"/sys/fs/cgroup");
    mount(
        Some(c"sysfs"),
        c"/sys",
        Some(c"sysfs"),
        libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
    )?;
    match cgroups {
        Ok(tree) => {
            set_read_only(tree, c"", false)?;
            move_mount(tree, c"/sys/fs/cgroup")
        }
        Err(_) => Ok(()),
    }
}

fn bring_back(kept: &Kept, tree: RawFd) -> Result<(), i32> {
    for directory in &kept.ancestors {
        // SAFETY: the path is a valid string; a directory that exists already is as good.
        unsafe { libc::mkdir(directory.as_ptr(), 0o755) };
    }
    if kept.writable {
        set_read_only(tree, c"", false)?;
    }
    move_mount(tree, &kept.path)
}

fn kept_directories(plan: &Plan) -> io::Result<Vec<Kept>> {
    // A private directory itself is not brought back: it would not be private any more.
    let hides =
        |private: &str, path: &Path| path != Path::new(private) && path.starts_with(private);
    let hidden = |path: &&PathBuf| {
        PRIVATE_DIRECTORIES
            .iter()
            .any(|private| hides(private, path))
    };
    let visible = plan
        .visible
        .iter()
        .filter(hidden)
        .map(|path| kept_directory(path, false));
    let shared = plan.shared.iter().map(|path| kept_directory(path, true));
    let kept: Vec<Kept> = visible.chain(shared).collect::<io::Result<_>>()?;
    if kept.len() > 16 {
        return Err(io::Error::other(
            "a machine keeps at most 16 directories visible or shared",
        ));
    }
    Ok(kept)
}

fn kept_directory(path: &Path, writable: bool) -> io::Result<Kept> {
    let path = path.canonicalize()?;
    let mut ancestors: Vec<CString> = path.ancestors().map(c_string).collect::<io::Result<_>>()?;
    ancestors.reverse();
    Ok(Kept {
        path: c_string(&path)?,
        ancestors,
        writable,
    })
}

fn c_string(path: &Path) -> io::Result<CString> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the array has room for the two descriptors, which become owned exactly once.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}
