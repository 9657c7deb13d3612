//! The test volume: what was synced survives a power cut, what was not does not, and its disk's faults are seen.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol::{self, Survives, Volume};

const AT: &str = "/var/lib/volume";
const LONG: Duration = Duration::from_secs(60);

/// A machine without networks that has a volume.
struct Disk {
    machine: Machine,
}

impl Disk {
    /// None, and a line that says so, where there is no FUSE.
    fn new() -> Option<Self> {
        if let Some(why) = testvol::unavailable() {
            println!("skipped: {why}");
            return None;
        }
        let plan = Plan {
            name: "disk",
            visible: &[],
            shared: &[],
            outlive_maker: false,
        };
        let mut machine = Machine::start(&plan).expect("a machine");
        machine.mount_volume(Path::new(AT)).expect("a volume");
        Some(Self { machine })
    }

    fn volume(&self) -> &Volume {
        self.machine.volume(AT).expect("mounted above")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.machine.path_from_outside(AT).join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).expect("written");
    }

    fn read(&self, name: &str) -> Option<String> {
        match fs::read(self.path(name)) {
            Ok(content) => Some(String::from_utf8(content).expect("what was written")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => panic!("{name}: {error}"),
        }
    }

    fn sync(&self, name: &str) {
        File::open(self.path(name)).unwrap().sync_all().unwrap();
    }

    /// Written and synced with its name.
    fn keep(&self, name: &str, content: &str) {
        self.write(name, content);
        self.sync(name);
        self.sync("");
    }

    fn cut(&self) {
        self.volume().cut(Survives::Nothing);
    }
}

#[test]
fn several_direct_writes_of_one_file_are_under_way_at_once() {
    let Some(mut disk) = Disk::new() else { return };
    let at = Path::new("/var/lib/direct");
    disk.machine.mount_direct_volume(at).expect("a volume");
    let path = disk.machine.path_from_outside(at).join("image");
    let file = OpenOptions::new()
        .create_new(true)
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .unwrap();
    file.set_len(16384).unwrap();
    let volume = disk.machine.volume(at).unwrap();
    volume.change(|settings| settings.hangs = true);
    std::thread::scope(|scope| {
        for number in 0..4_u8 {
            let file = &file;
            scope.spawn(move || {
                let mut room = vec![0; 8192];
                let page = aligned(&mut room, number);
                file.write_all_at(page, u64::from(number) * 4096).unwrap();
            });
        }
        let held = volume.wait_held(4, LONG);
        volume.change(|settings| settings.hangs = false);
        held.expect("four writes at once");
    });
    let counts = volume.counts();
    assert_eq!((counts.writes, counts.written_bytes), (4, 16384));
}

/// A page where direct IO takes it.
fn aligned(room: &mut [u8], fill: u8) -> &[u8] {
    let skip = room.as_ptr().align_offset(4096);
    let page = &mut room[skip..skip + 4096];
    page.fill(fill);
    page
}

#[test]
fn a_direct_write_that_is_durable_by_itself_survives_a_cut_and_no_other_does() {
    let Some(mut disk) = Disk::new() else { return };
    let at = Path::new("/var/lib/direct");
    disk.machine.mount_direct_volume(at).expect("a volume");
    let path = disk.machine.path_from_outside(at).join("image");
    File::create(&path).unwrap().set_len(16384).unwrap();
    for path in [&path, path.parent().unwrap()] {
        File::open(path).unwrap().sync_all().unwrap();
    }
    let open = |flags| {
        let mut options = OpenOptions::new();
        let options = options.write(true).custom_flags(libc::O_DIRECT | flags);
        options.open(&path).unwrap()
    };
    let mut room = vec![0; 8192];
    let later = open(0);
    later.write_all_at(aligned(&mut room, 1), 0).unwrap();
    let durable = open(libc::O_DSYNC);
    durable.write_all_at(aligned(&mut room, 2), 4096).unwrap();
    later.write_all_at(aligned(&mut room, 3), 8192).unwrap();
    let volume = disk.machine.volume(at).unwrap();
    volume.change(|settings| settings.fails.syncs = true);
    let failed = durable.write_all_at(aligned(&mut room, 4), 12288);
    assert!(failed.is_err(), "it is not durable");
    let inode = fs::metadata(&path).unwrap().ino();
    volume.cut(Survives::Nothing);
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    let found = fs::read(&path).unwrap();
    let pages: Vec<u8> = found.chunks(4096).map(|page| page[4095]).collect();
    assert_eq!(pages, [0, 2, 0, 0]);
}

#[test]
fn a_synced_file_survives_a_cut_and_an_unsynced_one_does_not() {
    let Some(disk) = Disk::new() else { return };
    disk.keep("kept", "old");
    disk.write("unsynced", "lost");
    disk.write("name-not-synced", "lost");
    disk.sync("name-not-synced");
    disk.cut();
    assert_eq!(disk.read("kept").as_deref(), Some("old"));
    assert_eq!(disk.read("unsynced"), None);
    assert_eq!(disk.read("name-not-synced"), None);

    disk.write("only-the-name", "lost");
    disk.sync("");
    disk.write("kept", "newer");
    assert_eq!(disk.read("kept").as_deref(), Some("newer"));
    disk.cut();
    assert_eq!(disk.read("only-the-name").as_deref(), Some(""));
    assert_eq!(disk.read("kept").as_deref(), Some("old"));
}

#[test]
fn a_rename_and_an_unlink_without_a_sync_of_the_directory_revert() {
    let Some(disk) = Disk::new() else { return };
    disk.keep("journal", "old");
    disk.keep("other", "there");
    disk.write("journal.new", "new");
    disk.sync("journal.new");
    fs::rename(disk.path("journal.new"), disk.path("journal")).unwrap();
    fs::remove_file(disk.path("other")).unwrap();
    assert_eq!(disk.read("journal").as_deref(), Some("new"));
    disk.cut();
    assert_eq!(disk.read("journal").as_deref(), Some("old"));
    assert_eq!(disk.read("journal.new"), None);
    assert_eq!(disk.read("other").as_deref(), Some("there"));

    disk.write("journal.new", "new");
    disk.sync("journal.new");
    fs::rename(disk.path("journal.new"), disk.path("journal")).unwrap();
    fs::remove_file(disk.path("other")).unwrap();
    disk.sync("");
    disk.cut();
    assert_eq!(disk.read("journal").as_deref(), Some("new"));
    assert_eq!(disk.read("other"), None);
}

#[test]
fn a_rename_between_directories_is_kept_or_lost_whole() {
    let Some(disk) = Disk::new() else { return };
    fs::create_dir(disk.path("from")).unwrap();
    fs::create_dir(disk.path("to")).unwrap();
    disk.keep("from/file", "text");
    disk.sync("from");
    fs::rename(disk.path("from/file"), disk.path("to/file")).unwrap();
    disk.sync("from");
    disk.cut();
    assert_eq!(disk.read("from/file"), None);
    assert_eq!(disk.read("to/file").as_deref(), Some("text"));
}

#[test]
fn a_directory_whose_own_name_was_not_synced_is_gone_with_all_that_was() {
    let Some(disk) = Disk::new() else { return };
    fs::create_dir_all(disk.path("a/b")).unwrap();
    disk.write("a/b/file", "text");
    disk.sync("a/b/file");
    disk.sync("a/b");
    disk.sync("a");
    disk.cut();
    assert!(!disk.path("a").exists());
}

#[test]
fn chance_lets_different_parts_survive_and_the_same_for_the_same_seed() {
    let Some(disk) = Disk::new() else { return };
    disk.keep("pages", &"o".repeat(40960));
    let result = |seed| {
        let file = OpenOptions::new().write(true).open(disk.path("pages"));
        file.unwrap().write_all_at(&[b'n'; 40960], 0).unwrap();
        for index in 0..6 {
            disk.write(&format!("file-{index}"), "text");
        }
        disk.volume().cut(Survives::Some(seed));
        let pages = disk.read("pages").expect("its name was synced");
        assert_eq!(pages.len(), 40960);
        let pages: String = pages.chars().step_by(4096).collect();
        let names: Vec<String> = (0..6)
            .filter_map(|index| disk.read(&format!("file-{index}")))
            .collect();
        let kept = (pages, names.len());
        // The next seed begins with the same.
        for index in 0..6 {
            let _ = fs::remove_file(disk.path(&format!("file-{index}")));
        }
        disk.keep("pages", &"o".repeat(40960));
        kept
    };
    let seen: Vec<_> = (0..40).map(result).collect();
    let again: Vec<_> = (0..40).map(result).collect();
    assert_eq!(seen, again);
    assert!(
        seen.iter().any(|(pages, _)| pages == "oooooooooo"),
        "{seen:?}"
    );
    assert!(
        seen.iter().any(|(pages, _)| pages == "nnnnnnnnnn"),
        "{seen:?}"
    );
    assert!(
        seen.iter()
            .any(|(pages, _)| pages.contains('o') && pages.contains('n'))
    );
    assert!(
        seen.iter().any(|(_, names)| (1..6).contains(names)),
        "{seen:?}"
    );
    disk.write("lucky", "text");
    disk.volume().cut(Survives::Everything);
    assert_eq!(disk.read("lucky").as_deref(), Some("text"));
}

/// What SQLite does with a database in WAL mode: a memory that processes share, locks on ranges, a log that is synced and a
/// database that is written from it.
#[test]
fn a_write_ahead_log_with_its_shared_memory_works_and_keeps_what_was_synced() {
    let Some(disk) = Disk::new() else { return };
    let open = |name: &str| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.open(disk.path(name)).expect("opened")
    };
    let (wal, shared, other) = (open("db-wal"), open("db-shm"), open("db-shm"));
    shared.set_len(32768).unwrap();
    let (one, two) = (Mapping::of(&shared), Mapping::of(&other));
    one.put(77);
    assert_eq!(two.get(), 77, "two mappings are one memory");
    assert!(lock(&shared, libc::F_WRLCK), "the first lock is granted");
    assert!(!lock(&other, libc::F_WRLCK), "the second one is refused");
    disk.sync("");
    wal.write_all_at(b"frame 1", 0).unwrap();
    wal.sync_data().unwrap();
    wal.write_all_at(b"frame 2", 7).unwrap();
    drop((one, two));
    disk.cut();
    assert_eq!(disk.read("db-wal").as_deref(), Some("frame 1"));
    let gone = wal
        .write_all_at(b"frame 3", 7)
        .expect_err("opened before the cut");
    assert_eq!(gone.raw_os_error(), Some(libc::ESTALE));
}

struct Mapping(*mut u8);

impl Mapping {
    fn of(file: &File) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of 32768 bytes of a file that is as long.
        let at = unsafe {
            let fd = file.as_raw_fd();
            libc::mmap(std::ptr::null_mut(), 32768, access, libc::MAP_SHARED, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self(at.cast())
    }

    fn put(&self, value: u8) {
        // SAFETY: within the mapping, which lives as long as this value.
        unsafe { self.0.write_volatile(value) }
    }

    fn get(&self) -> u8 {
        // SAFETY: as above.
        unsafe { self.0.read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps what this value mapped; nobody has a reference into it.
        unsafe { libc::munmap(self.0.cast(), 32768) };
    }
}

/// Locks a range that belongs to the open file.
fn lock(file: &File, kind: i32) -> bool {
    // SAFETY: a zeroed lock is a valid value; the call reads it.
    unsafe {
        let mut range: libc::flock = std::mem::zeroed();
        range.l_type = kind as i16;
        range.l_start = 120;
        range.l_len = 8;
        libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) == 0
    }
}

#[test]
fn it_is_a_file_system() {
    let Some(disk) = Disk::new() else { return };
    let mut exclusive = OpenOptions::new();
    exclusive.write(true).create_new(true).mode(0o640);
    let mut file = exclusive.open(disk.path("one")).expect("the first");
    let error = exclusive.open(disk.path("one")).expect_err("the second");
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    file.write_all(&[7; 10_000]).unwrap();
    file.set_len(5000).unwrap();
    file.set_len(9000).unwrap();
    let content = fs::read(disk.path("one")).unwrap();
    assert_eq!(content.len(), 9000);
    assert!(content[..5000].iter().all(|byte| *byte == 7));
    assert!(content[5000..].iter().all(|byte| *byte == 0));
    let mode = |name: &str| fs::metadata(disk.path(name)).unwrap().mode() & 0o7777;
    assert_eq!(mode("one"), 0o640);
    fs::set_permissions(disk.path("one"), fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(disk.path("one"), Some(5), Some(6)).unwrap();
    let owner = fs::metadata(disk.path("one")).unwrap();
    assert_eq!((mode("one"), owner.uid(), owner.gid()), (0o600, 5, 6));
    fs::hard_link(disk.path("one"), disk.path("two")).unwrap();
    assert_eq!(fs::metadata(disk.path("two")).unwrap().nlink(), 2);
    fs::remove_file(disk.path("one")).unwrap();
    fs::remove_file(disk.path("two")).unwrap();
    file.write_all_at(b"still open", 0).unwrap();
    std::os::unix::fs::symlink("target", disk.path("link")).unwrap();
    assert_eq!(
        fs::read_link(disk.path("link")).unwrap(),
        Path::new("target")
    );
    let socket = std::os::unix::net::UnixListener::bind(disk.path("socket"));
    assert!(socket.is_ok(), "{socket:?}");
    for index in 0..3000 {
        disk.write(&format!("file-{index}"), "");
    }
    assert_eq!(fs::read_dir(disk.path("")).unwrap().count(), 3002);
    fs::create_dir(disk.path("full")).unwrap();
    disk.write("full/file", "");
    let refused = fs::remove_dir(disk.path("full")).expect_err("it is not empty");
    assert_eq!(refused.kind(), io::ErrorKind::DirectoryNotEmpty);
    fs::remove_dir_all(disk.path("full")).unwrap();
    let copied = fs::copy("/proc/self/exe", disk.path("copy")).unwrap();
    assert_eq!(copied, fs::metadata("/proc/self/exe").unwrap().len());
    let same = fs::read(disk.path("copy")).unwrap() == fs::read("/proc/self/exe").unwrap();
    assert!(same, "a large file is as it was written");
}

#[test]
fn a_full_disk_is_full_until_something_is_removed() {
    let Some(disk) = Disk::new() else { return };
    disk.keep("large", &"x".repeat(100_000));
    disk.volume().fill();
    let full = |result: io::Result<()>| {
        let error = result.expect_err("no room");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    };
    full(fs::write(disk.path("new"), "x"));
    let file = OpenOptions::new().append(true).open(disk.path("large"));
    full(file.unwrap().write_all(&[0; 8192]));
    // In place there is room.
    let file = OpenOptions::new().write(true).open(disk.path("large"));
    file.unwrap().write_all_at(b"y", 0).unwrap();
    fs::remove_file(disk.path("large")).unwrap();
    disk.write("new", "x");
    assert_eq!(disk.read("new").as_deref(), Some("x"));
}

#[test]
fn a_broken_disk_says_eio_and_does_nothing() {
    let Some(disk) = Disk::new() else { return };
    disk.keep("file", "old");
    let broken = |result: io::Result<()>| {
        let error = result.expect_err("broken");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    };
    let file = OpenOptions::new()
        .write(true)
        .open(disk.path("file"))
        .unwrap();
    disk.volume().change(|disk| disk.fails.writes = true);
    broken(file.write_all_at(b"new", 0));
    broken(fs::rename(disk.path("file"), disk.path("other")));
    disk.volume().change(|disk| disk.fails.writes = false);
    file.write_all_at(b"new", 0).unwrap();
    disk.volume().change(|disk| disk.fails.syncs = true);
    broken(file.sync_all());
    broken(File::open(disk.path("")).unwrap().sync_all());
    disk.volume().change(|disk| disk.fails.syncs = false);
    disk.cut();
    assert_eq!(disk.read("file").as_deref(), Some("old"));
    disk.cut(); // which leaves nothing of the file in the kernel's cache
    disk.volume().change(|disk| disk.fails.reads = true);
    broken(fs::read(disk.path("file")).map(drop));
}

#[test]
fn a_slow_disk_takes_its_time() {
    let Some(disk) = Disk::new() else { return };
    disk.write("file", "");
    let file = OpenOptions::new()
        .write(true)
        .open(disk.path("file"))
        .unwrap();
    let takes = |action: &(dyn Fn() + Sync)| {
        let begun = Instant::now();
        action();
        begun.elapsed()
    };
    disk.volume()
        .change(|disk| disk.latency = Duration::from_millis(50));
    assert!(takes(&|| file.sync_all().unwrap()) >= Duration::from_millis(50));
    let four = || {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| file.sync_all().unwrap());
            }
        });
    };
    disk.volume().change(|disk| disk.ios_at_once = Some(1));
    assert!(takes(&four) >= Duration::from_millis(200));
    disk.volume().change(|disk| {
        disk.latency = Duration::ZERO;
        disk.bytes_per_second = Some(1 << 20);
    });
    assert!(takes(&|| file.write_all_at(&[0; 262_144], 0).unwrap()) >= Duration::from_millis(250));
    assert!(disk.volume().counts().syncs >= 5);
}

#[test]
fn a_hanging_disk_goes_on_when_the_hang_is_lifted() {
    let Some(disk) = Disk::new() else { return };
    disk.volume().change(|disk| disk.hangs = true);
    let path = disk.path("file");
    let writer = std::thread::spawn(move || fs::write(path, "text"));
    disk.volume().wait_held(1, LONG).unwrap();
    assert!(!writer.is_finished());
    disk.volume().change(|disk| disk.hangs = false);
    writer.join().unwrap().expect("done after the hang");
    assert_eq!(disk.read("file").as_deref(), Some("text"));
}

/// Starts a shell inside that waits for the volume.
fn stuck(disk: &Disk) -> std::process::Child {
    disk.volume().change(|disk| disk.hangs = true);
    let script = format!("echo text >{AT}/file; echo survived");
    let mut command = disk.machine.command("sh");
    command.args(["-c", &script]).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    disk.volume().wait_held(1, LONG).unwrap();
    child
}

#[test]
fn a_power_cut_ends_processes_that_wait_for_a_hanging_disk() {
    let Some(disk) = Disk::new() else { return };
    let child = stuck(&disk);
    disk.machine.power_cut(Survives::Everything).unwrap();
    disk.volume().change(|disk| disk.hangs = false);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.stdout, b"", "it went on");
    assert_eq!(disk.read("file"), None, "it was done after all");
    assert_eq!(disk.machine.processes().unwrap(), []);
}

#[test]
fn a_machine_ends_while_its_disk_hangs() {
    let Some(mut disk) = Disk::new() else { return };
    let mut child = stuck(&disk);
    disk.machine.end().expect("it ends");
    let mut said = String::new();
    let mut pipe = child.stdout.take().unwrap();
    pipe.read_to_string(&mut said).unwrap();
    assert_eq!(said, "", "it went on");
    let _ = child.wait(); // whoever ended the machine has waited for it
}

/// Set for the process that the next test starts from this program and kills.
const VICTIM: &str = "TESTVOL_VICTIM";

#[test]
fn a_volume_ends_with_its_process_also_while_a_thread_of_it_waits_for_the_volume() {
    if std::env::var_os(VICTIM).is_some() {
        return wait_for_own_volume();
    }
    if let Some(why) = testvol::unavailable() {
        return println!("skipped: {why}");
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let name = std::thread::current().name().unwrap().to_owned();
    command.args([&name, "--exact", "--nocapture"]);
    let mut child = command
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("waits") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ended by itself");
    }
    child.kill().unwrap();
    let deadline = Instant::now() + LONG;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it cannot be killed");
        std::thread::sleep(Duration::from_millis(5)); // how often it looks
    }
    assert_eq!(said.read_line(&mut line).unwrap(), 0, "something holds on");
}

fn wait_for_own_volume() {
    let disk = Disk::new().expect("looked at before");
    disk.volume().change(|disk| disk.hangs = true);
    let path = disk.path("file");
    let writer = std::thread::spawn(move || fs::write(path, "text"));
    disk.volume().wait_held(1, LONG).unwrap();
    println!("waits");
    let _ = writer.join();
}

#[test]
fn a_power_cut_takes_what_lay_in_memory_and_nothing_that_is_shared() {
    let shared = tempfile::tempdir().unwrap();
    fs::write(shared.path().join("file"), "text").unwrap();
    let plan = Plan {
        name: "sharing",
        visible: &[],
        shared: &[shared.path().to_owned()],
        outlive_maker: false,
    };
    let machine = Machine::start(&plan).unwrap();
    let run = machine.path_from_outside("/run");
    fs::create_dir_all(run.join("godwit/vms")).unwrap();
    fs::write(run.join("godwit/file"), "").unwrap();
    fs::write(machine.path_from_outside("/tmp/file"), "").unwrap();
    let script = "mkdir /run/ram && mount -t tmpfs ram /run/ram && echo text >/run/ram/file";
    let mut command = machine.command("sh");
    assert!(command.args(["-c", script]).status().unwrap().success());
    assert!(run.join("ram/file").exists());
    let mut command = machine.command("sleep");
    let mut sleeper = command.arg("1000").stdin(Stdio::null()).spawn().unwrap();
    machine.power_cut(Survives::Nothing).unwrap();
    assert!(!sleeper.wait().unwrap().success());
    assert_eq!(fs::read_dir(run).unwrap().count(), 0);
    assert!(!machine.path_from_outside("/tmp/file").exists());
    let kept = fs::read_to_string(shared.path().join("file"));
    assert_eq!(kept.unwrap(), "text");
}
