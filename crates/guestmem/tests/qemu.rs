//! The whole chain against a real QEMU: unprivileged, sandboxed, with the library preloaded.
//!
//! The guest is a boot sector that counts in 16 pages for ever; KVM runs it even on machines
//! whose KVM cannot run Linux.

mod common;

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{Copy, Memory, read_page};
use godwit_guestmem::{
    Collapse, Error, GuestMapping, Library, Owner, PageSet, RamFile, ScanMode, Tracking, Untracked,
    collapse, handout, library, tracker,
};
use rustix::io::FdFlags;
use rustix::process::{Pid, Resource, Rlimit, Signal};

const MIB: u64 = 1024 * 1024;
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const NOBODY: u32 = 65534;
const LIMIT: Duration = Duration::from_secs(20);
/// Guest pages in which the boot sector counts.
const COUNTED: std::ops::Range<u64> = 0x30..0x40;
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// cli; es = 0x3000; for ever: add 1 to the first word of each of the segment's 16 pages.
const COUNTER: [u8; 19] = [
    0xfa, // cli
    0xb8, 0x00, 0x30, // mov ax, 0x3000
    0x8e, 0xc0, // mov es, ax
    0x31, 0xff, // again: xor di, di
    0x26, 0xff, 0x05, // next: inc word [es:di]
    0x81, 0xc7, 0x00, 0x10, // add di, 0x1000
    0x75, 0xf7, // jnz next
    0xeb, 0xf3, // jmp again
];

/// A QEMU that ends with its value.
struct Qemu {
    child: Child,
    ram: RamFile,
    socket: PathBuf,
    _memory: Memory,
    _directory: tempfile::TempDir,
}

impl Qemu {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn track(&self) -> Tracking {
        let deadline = Instant::now() + LIMIT;
        let uffd = handout::request_uffd(&self.socket, self.pid(), deadline)
            .expect("a descriptor is handed out");
        let pagemap = tracker::open_pagemap(self.pid()).expect("root may open it");
        let mapping = GuestMapping::find(self.pid(), &self.ram).expect("QEMU maps its RAM");
        Untracked::new(uffd, pagemap, mapping)
            .and_then(Untracked::start)
            .expect("tracking starts")
    }

    /// Waits until the guest has counted on in every page.
    fn wait_for_progress(&self) {
        let before = self.counts();
        wait_until("the guest counts", || {
            let now = self.counts();
            before.iter().zip(&now).all(|(before, now)| before != now)
        });
    }

    fn counts(&self) -> Vec<u64> {
        let mut bytes = [0; 4096];
        COUNTED
            .map(|page| match read_page(&self.ram, page, &mut bytes) {
                Ok(()) => u64::from(u16::from_le_bytes([bytes[0], bytes[1]])),
                Err(Error::Hole { .. }) => 0,
                Err(error) => panic!("{error}"),
            })
            .collect()
    }

    /// Stops every thread of QEMU.
    fn freeze(&self) {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, Signal::STOP).expect("it is our child");
        wait_until("all threads have stopped", || {
            self.thread_states().all(|s| s == 'T')
        });
    }

    fn thread_states(&self) -> impl Iterator<Item = char> {
        let tasks = format!("/proc/{}/task", self.pid());
        std::fs::read_dir(tasks).expect("QEMU lives").map(|task| {
            let stat = task.expect("readable").path().join("stat");
            let stat = std::fs::read_to_string(stat).expect("readable");
            let (_, rest) = stat.rsplit_once(") ").expect("pid (name) state");
            rest.chars().next().expect("a state")
        })
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Looks again and again, up to a limit, until something holds.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        std::thread::yield_now();
    }
}

fn start(accelerator: &str, uid: u32) -> Option<Qemu> {
    if !Path::new(QEMU).exists() {
        println!("skipped: {QEMU} is not installed");
        return None;
    }
    let memory = Memory::mount(128 * MIB)?;
    if let Err(error) = tracker::check_kernel() {
        println!("skipped: {error}");
        return None;
    }
    let owner = Owner { uid, gid: uid };
    let ram = RamFile::create(&memory.ram_path(), 64 * MIB, Some(owner)).expect("created");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let everyone = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), everyone).expect("it is ours");
    let library = Library::make(directory.path()).expect("made");
    let socket = directory.path().join("handout");
    let disk = directory.path().join("boot");
    write_boot_disk(&disk);
    let arguments = arguments(accelerator, ram.path(), &disk);
    let child = spawn(arguments, library, &socket, uid);
    let qemu = Qemu {
        child,
        ram,
        socket,
        _memory: memory,
        _directory: directory,
    };
    qemu.wait_for_progress();
    assert!(library::is_loaded(qemu.pid()).expect("its maps"));
    Some(qemu)
}

/// Starts QEMU with two descriptors of ours. One at a time, or another QEMU would inherit them
/// too and keep the socket open.
fn spawn(arguments: Vec<String>, library: Library, socket: &Path, uid: u32) -> Child {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let listener = inheritable(handout::listen(socket).expect("a socket"));
    let device = inheritable(handout::open_device().expect("root may open it"));
    let library = inheritable(library.fd().try_clone_to_owned().expect("a copy"));
    Command::new(QEMU)
        .args(arguments)
        .envs(handout::environment(
            library.as_fd(),
            device.as_fd(),
            listener.as_fd(),
        ))
        .uid(uid)
        .gid(uid)
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU starts")
}

/// A descriptor that a child keeps.
fn inheritable(fd: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_setfd(&fd, FdFlags::empty()).expect("a valid descriptor");
    fd
}

fn write_boot_disk(path: &Path) {
    let mut disk = vec![0; MIB as usize];
    disk[..COUNTER.len()].copy_from_slice(&COUNTER);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(path, &disk).expect("the disk can be written");
}

fn arguments(accelerator: &str, ram: &Path, disk: &Path) -> Vec<String> {
    let backend = format!(
        "memory-backend-file,id=ram,size=64M,share=on,align=2M,mem-path={}",
        ram.display()
    );
    let drive = format!("file={},format=raw,if=ide,snapshot=on", disk.display());
    [
        ["-accel", accelerator],
        ["-machine", "pc,memory-backend=ram"],
        ["-cpu", "qemu64"],
        ["-m", "64"],
        ["-object", &backend],
        ["-drive", &drive],
        ["-display", "none"],
        ["-sandbox", SANDBOX],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .chain(["-nodefaults".to_owned()])
    .collect()
}

/// Tracks for some rounds, then freezes QEMU and compares all of guest RAM with the copy.
fn nothing_is_lost(qemu: &Qemu) {
    let mut tracking = qemu.track();
    let mut copy = Copy::of(&qemu.ram);
    let mut dirty = PageSet::new(qemu.ram.page_count());
    for round in 0..20 {
        qemu.wait_for_progress();
        dirty.clear();
        let stats = tracking
            .scan(&mut dirty, ScanMode::default())
            .expect("a scan");
        assert!(
            COUNTED.into_iter().all(|page| dirty.contains(page)),
            "{round}: {stats:?}"
        );
        assert!(
            dirty.count() < qemu.ram.page_count() / 4,
            "only what was written"
        );
        copy.update(&qemu.ram, &dirty);
    }
    qemu.freeze();
    dirty.clear();
    tracking
        .scan(&mut dirty, ScanMode::Everything)
        .expect("the last scan");
    copy.update(&qemu.ram, &dirty);
    assert_eq!(copy.differing(&qemu.ram), [0_u64; 0]);
    let pid = Pid::from_child(&qemu.child);
    rustix::process::kill_process(pid, Signal::CONT).expect("it is our child");
}

#[test]
fn a_sandboxed_qemu_hands_out_again_and_again_and_nothing_is_lost() {
    let Some(qemu) = start("tcg", NOBODY) else {
        return;
    };
    nothing_is_lost(&qemu);
    nothing_is_lost(&qemu);
    strangers_do_not_disturb(&qemu);
    only_root_and_its_own_user_may_ask(&qemu);
    huge_pages_are_put_back(&qemu);
    nothing_is_lost(&qemu);
}

#[test]
fn the_same_under_kvm() {
    if std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        println!("skipped: /dev/kvm cannot be opened");
        return;
    }
    let Some(qemu) = start("kvm", 0) else {
        return;
    };
    nothing_is_lost(&qemu);
    nothing_is_lost(&qemu);
}

/// From outside, in another process, while its guest runs.
fn huge_pages_are_put_back(qemu: &Qemu) {
    let mapping = GuestMapping::find(qemu.pid(), &qemu.ram).expect("QEMU maps its RAM");
    let huge = || collapse::huge_mapped_bytes(qemu.pid(), &mapping).expect("root may look");
    let before = huge();
    let pidfd = collapse::open_pidfd(qemu.pid()).expect("it lives");
    let job = Collapse {
        pidfd: pidfd.as_fd(),
        mapping: &mapping,
        ram: &qemu.ram,
        pause: Duration::from_millis(1),
    };
    let counts = job.run(&AtomicBool::new(false)).expect("it lives");
    println!(
        "{counts:?}; huge pages before {before}, after {} bytes",
        huge()
    );
    assert!(counts.collapsed > 0 && huge() > before, "{counts:?}");
    qemu.wait_for_progress();
}

/// Connections that are dropped, that talk, or that never read must not cost the next one.
fn strangers_do_not_disturb(qemu: &Qemu) {
    let mut silent = Vec::new();
    for _ in 0..50 {
        drop(UnixStream::connect(&qemu.socket).expect("it listens"));
        let mut talker = UnixStream::connect(&qemu.socket).expect("it listens");
        let _ = talker.write_all(b"hello");
        silent.push(talker);
    }
    let last = silent.pop().expect("fifty of them");
    assert_eq!(read_reply(last).len(), 16, "one reply, then the end");
    let deadline = Instant::now() + LIMIT;
    let wrong_process = handout::request_uffd(&qemu.socket, qemu.pid() + 1, deadline);
    assert!(wrong_process.is_err());
}

/// The socket's mode keeps others out; should that fail, the library looks at who they are.
fn only_root_and_its_own_user_may_ask(qemu: &Qemu) {
    let everyone = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(&qemu.socket, everyone).expect("it is ours");
    for (uid, answered) in [(NOBODY, true), (NOBODY - 1, false)] {
        let reply = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                // SAFETY: the bare system call changes this thread only, which ends soon.
                let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
                assert_eq!(changed, 0, "root may become anyone");
                read_reply(UnixStream::connect(&qemu.socket).expect("it listens"))
            });
            asking.join().expect("the thread ends")
        });
        assert_eq!(!reply.is_empty(), answered, "user {uid}");
    }
}

/// Without a free descriptor in QEMU a request waits, and is answered when there is one again.
/// QEMU runs as root here: limits of another user's process are not ours to change everywhere.
#[test]
fn a_shortage_of_descriptors_passes() {
    let Some(qemu) = start("tcg", 0) else {
        return;
    };
    let pid = Some(Pid::from_child(&qemu.child));
    let none_left = Rlimit {
        current: Some(3),
        maximum: rustix::process::getrlimit(Resource::Nofile).maximum,
    };
    let before = rustix::process::prlimit(pid, Resource::Nofile, none_left).expect("root may");
    let soon = Instant::now() + Duration::from_millis(200);
    let refused = handout::request_uffd(&qemu.socket, qemu.pid(), soon);
    assert!(
        refused.is_err(),
        "QEMU has no descriptor to spare: {refused:?}"
    );
    rustix::process::prlimit(pid, Resource::Nofile, before).expect("root may");
    let deadline = Instant::now() + LIMIT;
    handout::request_uffd(&qemu.socket, qemu.pid(), deadline).expect("it has some again");
}

fn read_reply(mut stream: UnixStream) -> Vec<u8> {
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let mut reply = Vec::new();
    // An error after the reply (reset by the closing peer) changes nothing about it.
    let _ = stream.read_to_end(&mut reply);
    reply
}

#[test]
fn a_dead_qemu_is_an_error_never_a_clean_scan() {
    let Some(mut qemu) = start("tcg", NOBODY) else {
        return;
    };
    let mut tracking = qemu.track();
    qemu.child.kill().expect("it is our child");
    qemu.child.wait().expect("it is our child");
    for mode in [ScanMode::default(), ScanMode::Everything] {
        let mut dirty = PageSet::new(qemu.ram.page_count());
        let gone = tracking.scan(&mut dirty, mode);
        assert!(matches!(gone, Err(Error::TrackingLost)), "{gone:?}");
        assert_eq!(dirty.count(), qemu.ram.page_count());
    }
    let deadline = Instant::now() + LIMIT;
    let nobody = handout::request_uffd(&qemu.socket, qemu.pid(), deadline);
    let error = nobody.expect_err("nobody is there").to_string();
    assert!(error.contains("nobody listens"), "{error}");
}

#[test]
fn a_socket_that_never_answers_is_given_up_at_the_deadline() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let socket = directory.path().join("silent");
    let _listener = handout::listen(&socket).expect("a socket");
    let began = Instant::now();
    let refused = handout::request_uffd(&socket, 1, began + Duration::from_millis(100));
    let error = refused.expect_err("nobody accepts").to_string();
    assert!(error.contains("in time"), "{error}");
    assert!(began.elapsed() < LIMIT);
    let absent = handout::request_uffd(&directory.path().join("none"), 1, began + LIMIT);
    assert!(
        absent
            .expect_err("no socket")
            .to_string()
            .contains("nobody listens")
    );
}
