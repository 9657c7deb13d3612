//! Has `qemu-img` write a qcow2 image out as a raw one, with few rights.
//!
//! The image is hostile, and so are those below it: their heads were judged before ([`crate::qcow2`]), and what their tables hold is left to a process of the
//! common user, whose rights to files this thread has already, without network, new rights or room to grow in memory, in files and in time. It gets
//! open files, of which it is told what lies over what, and can open no others but its libraries ([`crate::only_files`]). Owns that process while it runs. Refuses: a host without `qemu-img`,
//! and to wait for one that does nothing.

use crate::disk_place::room_of;
use crate::launch::be_no_better_than_others;
use crate::make_disk::Progress;
use crate::only_files::OnlyFiles;
use crate::qcow2::Kind;
use crate::rights::{become_user_for_good, have_own_files};
use crate::user::User;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl, fstatvfs};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{
    Resource, Rlimit, Signal, set_parent_process_death_signal, setpriority_process, setrlimit,
};
use rustix::thread::set_no_new_privs;
use serde_json::json;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const PROGRAM: &str = "/usr/bin/qemu-img";
/// Its exit code where it finds an image damaged.
const DAMAGED: i32 = 2;
/// Memory that it may have, bytes.
const MEMORY_MAX: u64 = 2 << 30;
/// CPU seconds that it may take, and more for each GiB.
const CPU_S: (u64, u64) = (600, 60);
/// More it never gets: how large it is the image says.
const CPU_S_MAX: u64 = 6 * 3600;
/// It is in nobody's way.
const LEAST_PRIORITY: i32 = 19;
/// Longest reason of its own that is passed on, bytes.
const WORDS_MAX: usize = 2000;
/// One that has not got on for so long is waited for no longer: storage that hangs has it, or an image that has taken it over.
const GETS_ON_WITHIN: Duration = Duration::from_secs(600);
/// How often it is looked whether it is to end, at least.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Pieces of what it says that are read at once: together as much as a pipe holds.
const PIECES: usize = 16;

/// A file of an image, and how it is read.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub file: &'a File,
    pub kind: Kind,
}

/// Writes what these files, the lowest last, show of so many bytes into `raw`, which is long enough and reads as zeroes. Where one is damaged nothing
/// is written: what is missing of it would read as zeroes, too.
pub(crate) fn to_raw(
    (layers, bytes): (&[Layer<'_>], u64),
    raw: &File,
    user: User,
    progress: &Progress,
) -> Result<(), String> {
    // Opened for it alone: what is locked by whoever makes the disk is free once he has ended.
    let anew = |file, writes| File::options().read(true).write(writes).open(fd_path(file));
    let its_own = anew(raw, true).map_err(|error| error.to_string())?;
    let files = layers.iter().map(|layer| anew(layer.file, false));
    let files: Vec<File> = files
        .collect::<io::Result<_>>()
        .map_err(|error| error.to_string())?;
    let run = |arguments: &[&str]| {
        let command = command(arguments, (files.as_slice(), bytes), &its_own, user);
        run(
            &mut command.map_err(|error| error.to_string())?,
            raw,
            progress,
        )
    };
    let layers: Vec<Layer<'_>> = files
        .iter()
        .zip(layers)
        .map(|(file, layer)| Layer { file, ..*layer })
        .collect();
    let all_qcow2 = layers.iter().filter(|layer| layer.kind == Kind::Qcow2);
    for (number, layer) in all_qcow2.enumerate() {
        let (status, words) = run(&["check", "-q", &image_of(std::slice::from_ref(layer))])?;
        if status.code() == Some(DAMAGED) {
            let which = match number {
                0 => "the image".to_owned(),
                below => format!("backing file {below} below the image"),
            };
            return Err(format!(
                "qemu-img finds {which} damaged, as one is whose download broke off: get it anew, or where it is whole and was only not closed, have 'qemu-img check -r all' mend it ({})",
                words
                    .lines()
                    .next()
                    .unwrap_or("it says no more")
                    .escape_debug()
            ));
        }
    }
    let converting = ["convert", "-p", "-n", "--target-is-zero", "-O", "raw"];
    let (source, target) = (image_of(&layers), fd_path(&its_own));
    let (status, words) = run(&[&converting[..], &[&source, &target]].concat())?;
    if status.success() {
        return Ok(());
    }
    let words = words.trim().escape_debug();
    Err(format!(
        "qemu-img does not convert the image ({status}): {words}"
    ))
}

/// Runs it until its end, and returns what it said last.
fn run(
    command: &mut Command,
    raw: &File,
    progress: &Progress,
) -> Result<(ExitStatus, String), String> {
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!(
            "a qcow2 image needs {PROGRAM} (package qemu-utils): install it, or give a raw image"
        ),
        _ => format!("{PROGRAM} cannot be started: {error}"),
    })?;
    let watched = watch(&mut child, raw, progress, GETS_ON_WITHIN);
    if watched.is_err() {
        let _ = child.kill();
        // Not here: storage that hangs keeps it from ending.
        std::thread::spawn(move || child.wait());
    }
    watched.map_err(|error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::TimedOut => error.to_string(),
        _ => format!("qemu-img cannot be waited for: {error}"),
    })
}

/// Waits for its end and returns what it said last. The end of its output is not waited for: somebody else may have that open.
fn watch(
    child: &mut Child,
    raw: &File,
    progress: &Progress,
    gets_on_within: Duration,
) -> io::Result<(ExitStatus, String)> {
    let mut seen = ((0, 0), Instant::now());
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
        must_leave_room(raw)?;
        let done = progress.done.load(Ordering::Relaxed);
        must_get_on((done, raw.metadata()?.blocks()), &mut seen, gets_on_within)?;
        let open = [&stdout, &stderr].into_iter();
        let open = open.filter_map(|pipe| pipe.0.as_ref());
        let mut open: Vec<_> = open.map(|pipe| PollFd::new(pipe, PollFlags::IN)).collect();
        match poll(&mut open, Some(&LOOK_EVERY)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// How much an image holds is known once it is written out: one that claims to be small is stopped before disks in use have no room.
fn must_leave_room(raw: &File) -> io::Result<()> {
    match room_of(&fstatvfs(raw)?) {
        0 => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            "the image holds more than there is room for: what is left of the file system is for disks that are in use",
        )),
        _ => Ok(()),
    }
}

/// How far it is, and since when.
fn must_get_on(
    now: (u64, u64),
    (seen, since): &mut ((u64, u64), Instant),
    within: Duration,
) -> io::Result<()> {
    if now != *seen {
        (*seen, *since) = (now, Instant::now());
    }
    match since.elapsed() < within {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!(
                "qemu-img has not got on for {} s: if the storage of the image and of the disk answers, do not trust that image",
                within.as_secs()
            ),
        )),
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

/// As qemu-img takes it: what lies below is what it is told, whatever an image says.
fn image_of(layers: &[Layer<'_>]) -> String {
    let below = serde_json::Value::Null;
    let image = layers.iter().rev().fold(below, |below, layer| {
        let file = json!({"driver": "file", "filename": fd_path(layer.file), "locking": "off"});
        match layer.kind {
            Kind::Raw => json!({"driver": "raw", "file": file}),
            Kind::Qcow2 => json!({"driver": "qcow2", "backing": below, "file": file}),
        }
    });
    format!("json:{image}")
}

fn command(
    arguments: &[&str],
    (files, bytes): (&[File], u64),
    raw: &File,
    user: User,
) -> io::Result<Command> {
    let mut command = Command::new(PROGRAM);
    command.args(arguments);
    let bounds = Bounds {
        longest: raw.metadata()?.len(),
        seconds: CPU_S_MAX.min(CPU_S.0 + CPU_S.1 * bytes.div_ceil(1 << 30)),
        opens: OnlyFiles::of(Path::new(PROGRAM), files, raw)?,
    };
    let all = files.iter().chain([raw]).map(|file| file.as_raw_fd());
    confined(&mut command, all.collect(), bounds, user);
    Ok(command)
}

/// Where a process finds a file that it has open.
fn fd_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

struct Bounds {
    /// Bytes of a file, and seconds of the processor.
    longest: u64,
    seconds: u64,
    opens: OnlyFiles,
}

fn confined(command: &mut Command, files: Vec<i32>, bounds: Bounds, user: User) {
    command
        .env_clear()
        .env("LANG", "C")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: the closure runs between fork and exec and makes only system calls on values that were made before; it takes no
    // lock and allocates nothing.
    unsafe { command.pre_exec(move || confine(&files, &bounds, user)) };
}

/// Between fork and exec: this process may read these files but the last one, write that, open no more, grow no further, and is the common user for
/// good.
fn confine(files: &[i32], bounds: &Bounds, user: User) -> io::Result<()> {
    for fd in files {
        // SAFETY: the descriptor is open: the parent has it for as long as it waits for the child.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(*fd) }, FdFlags::empty())?;
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
    setpriority_process(None, LEAST_PRIORITY)?;
    // The file by which it is chosen when memory runs out (oom_score_adj) is root's.
    have_own_files()?;
    be_no_better_than_others();
    become_user_for_good(user.uid, user.gid)?;
    // A change of user would take it back.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    set_no_new_privs(true)?;
    bounds.opens.confine_this_thread()?;
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
    use std::os::unix::fs::PermissionsExt as _;

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
        let raw = tempfile::tempfile_in("/var/tmp").unwrap();
        let (status, words) = watch(&mut child, &raw, &progress, GETS_ON_WITHIN).unwrap();
        let left = words.trim().parse().unwrap();
        let left = rustix::process::Pid::from_raw(left).unwrap();
        rustix::process::kill_process(left, Signal::KILL).expect("it lives, and has both pipes");
        assert_eq!((status.code(), progress.done.into_inner()), (Some(3), 125));
    }

    #[test]
    fn one_that_does_nothing_is_not_waited_for() {
        let mut child = Command::new("/bin/sleep").arg("300").spawn().unwrap();
        let raw = tempfile::tempfile_in("/var/tmp").unwrap();
        let soon = Duration::from_millis(1);
        let watched = watch(&mut child, &raw, &Progress::default(), soon);
        assert!(child.try_wait().unwrap().is_none(), "it has not ended");
        child.kill().unwrap();
        child.wait().unwrap();
        let why = watched.unwrap_err().to_string();
        assert!(why.contains("has not got on"), "{why}");
    }

    const NOBODY: User = User {
        uid: 65_534,
        gid: 65_533,
    };
    const SHELL: &str = "/bin/sh";

    /// A shell that is confined to one file and begins with what is said to it on its standard input.
    fn confined_shell(script: &str, file: &File) -> io::Result<(Child, bool)> {
        let opens = OnlyFiles::of(Path::new(SHELL), &[file], file)?;
        let are_kept = opens.are_kept();
        let mut command = Command::new(SHELL);
        command.args(["-c", script]);
        let bounds = Bounds {
            longest: 0,
            seconds: 60,
            opens,
        };
        let fd = file.as_raw_fd();
        confined(&mut command, vec![fd], bounds, NOBODY);
        Ok((command.stdin(Stdio::piped()).spawn()?, are_kept))
    }

    fn is_root() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            println!("skipped: another user's rights need root");
        }
        is_root
    }

    #[test]
    fn a_program_that_is_confined_is_the_user_for_good_alone_and_no_better_than_others() {
        if !is_root() {
            return;
        }
        // As it may be in the service of a host.
        let badness = "/proc/self/oom_score_adj";
        let before = std::fs::read_to_string(badness).unwrap();
        if std::fs::write(badness, "-300").is_err() {
            println!("skipped in part: no process is protected from running out of memory here");
        }
        let seen = crate::rights::as_user(NOBODY.uid, NOBODY.gid, || {
            let file = tempfile::tempfile_in("/var/tmp").map_err(|_| Errno::IO)?;
            let script = "read line; (echo it has a child)";
            let (child, _) = confined_shell(script, &file).map_err(|_| Errno::IO)?;
            // Its other end is held until then.
            let of = |name| std::fs::read_to_string(format!("/proc/{}/{name}", child.id()));
            let of_child = (of("status"), of("oom_score_adj"));
            let output = child.wait_with_output().map_err(|_| Errno::IO)?;
            Ok((of_child, output.stdout))
        });
        std::fs::write(badness, before.trim()).unwrap();
        let ((status, badness), words) = seen.expect("it ran");
        let status = status.unwrap().replace('\t', " ");
        for line in [
            "Uid: 65534 65534 65534 65534\n",
            "Gid: 65533 65533 65533 65533\n",
            "CapPrm: 0000000000000000\n",
            "CapEff: 0000000000000000\n",
            "NoNewPrivs: 1\n",
            "Seccomp: 2\n",
        ] {
            assert!(status.contains(line), "{line}: {status}");
        }
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:"));
        assert_eq!(groups.map(str::trim), Some(""), "{status}");
        assert_eq!(badness.unwrap().trim(), "0");
        assert_eq!(String::from_utf8_lossy(&words), "", "it has no child");
    }

    #[test]
    fn a_program_that_is_confined_opens_its_own_files_and_neither_others_nor_the_memory_of_its_user_s_processes()
     {
        if !is_root() {
            return;
        }
        let User { uid, gid } = NOBODY;
        let mut other = Command::new(SHELL);
        other.args(["-c", "read line"]).uid(uid).gid(gid);
        let mut other = other.stdin(Stdio::piped()).spawn().unwrap();
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let everybody = std::fs::Permissions::from_mode;
        std::fs::set_permissions(dir.path(), everybody(0o755)).unwrap();
        let [own, foreign] = ["own", "foreign"].map(|name| {
            let path = dir.path().join(name);
            std::fs::write(&path, "text").unwrap();
            std::fs::set_permissions(&path, everybody(0o666)).unwrap();
            path.to_str().unwrap().to_owned()
        });
        let memory = format!("/proc/{}/mem", other.id());
        let tried = [own.as_str(), "/etc/passwd", &foreign, &memory];
        let script = format!(
            "for file in {}; do true < $file && echo $file; done; true >> {foreign} && echo writes",
            tried.join(" ")
        );
        let lines = |output: std::process::Output| {
            let words = String::from_utf8(output.stdout).unwrap();
            words.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let mut free = Command::new(SHELL);
        free.args(["-c", &script]).uid(uid).gid(gid);
        let free = lines(free.output().unwrap());
        let confined = crate::rights::as_user(uid, gid, || {
            let file = File::open(&own).map_err(|_| Errno::IO)?;
            let (child, are_kept) = confined_shell(&script, &file).map_err(|_| Errno::IO)?;
            let output = child.wait_with_output().map_err(|_| Errno::IO)?;
            Ok((output, are_kept))
        });
        other.kill().unwrap();
        other.wait().unwrap();
        let (confined, are_kept) = confined.expect("it ran");
        if !are_kept {
            return println!("skipped: this kernel has no Landlock");
        }
        if free.len() < tried.len() + 1 {
            println!("skipped in part: processes of one user are kept apart here: {free:?}");
        }
        assert!(free.contains(&foreign), "{free:?}");
        assert_eq!(lines(confined), [own]);
    }
}
