//! Who may open an image, told by a second descriptor and by QEMU's own tools.

mod common;

use common::volume;
use godwit_blockio::{Access, Image};
use godwit_testkit::testvol::{self, Survives};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

fn locked(volume: &common::Volume, access: Access) -> Result<Image, String> {
    locked_within(volume, access, Duration::ZERO)
}

/// Each under a name of its own.
fn locked_within(
    volume: &common::Volume,
    access: Access,
    patience: Duration,
) -> Result<Image, String> {
    static NAMES: AtomicU32 = AtomicU32::new(0);
    let name = NAMES.fetch_add(1, Ordering::Relaxed).to_string();
    locked_as(volume, access, &name, patience)
}

fn locked_as(
    volume: &common::Volume,
    access: Access,
    name: &str,
    patience: Duration,
) -> Result<Image, String> {
    let mut image = Image::open(&volume.path, access, 512).map_err(|error| error.to_string())?;
    match image.lock(name, patience) {
        Ok(()) => Ok(image),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn one_writes_or_many_read() {
    let volume = volume(1 << 20);
    let readers = [
        locked(&volume, Access::ReadOnly),
        locked(&volume, Access::ReadOnly),
    ];
    assert!(readers.iter().all(Result::is_ok));
    let refused = locked(&volume, Access::ReadWrite).unwrap_err();
    assert!(
        refused.contains("a disk of this or another VM has it open"),
        "{refused}"
    );
    // A program that this process is just starting has its descriptors for a moment, and so its locks.
    drop(readers);
    let writer = locked_within(&volume, Access::ReadWrite, LONG);
    assert!(writer.is_ok());
    assert!(
        locked(&volume, Access::ReadWrite).is_err() && locked(&volume, Access::ReadOnly).is_err()
    );
    drop(writer);
    assert!(locked_within(&volume, Access::ReadOnly, LONG).is_ok());
}

#[test]
fn who_waits_gets_it_once_it_is_free() {
    let volume = volume(1 << 20);
    let holder = locked(&volume, Access::ReadWrite).unwrap();
    let mut waiter = Image::open(&volume.path, Access::ReadWrite, 512).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| waiter.lock("waiter", LONG));
        drop(holder);
        waits.join().unwrap().unwrap();
    });
    assert!(locked(&volume, Access::ReadWrite).is_err());
}

/// QEMU's storage daemon with the image open for writing; gone with the value.
struct Daemon {
    pid: rustix::process::Pid,
}

impl Daemon {
    /// Or what it says against it.
    fn start(volume: &common::Volume) -> Result<Self, String> {
        let beside = |extension| volume.path.with_extension(extension);
        let (pid_file, socket) = (beside("pid"), beside("nbd"));
        let node = format!(
            "driver=file,node-name=disk,filename={}",
            volume.path.display()
        );
        let server = format!("addr.type=unix,addr.path={}", socket.display());
        let output = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &node, "--nbd-server", &server])
            .args(["--export", "type=nbd,id=disk,node-name=disk,writable=on"])
            .args(["--daemonize", "--pidfile"])
            .arg(&pid_file)
            .output()
            .unwrap();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let pid = std::fs::read_to_string(pid_file).unwrap();
        let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        Ok(Self { pid })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.pid, rustix::process::Signal::TERM);
    }
}

#[test]
fn qemu_opens_no_disk_that_is_open_here_and_we_none_that_qemu_has_open() {
    if Command::new("qemu-storage-daemon")
        .arg("--version")
        .output()
        .is_err()
    {
        println!("skipped: there is no qemu-storage-daemon");
        return;
    }
    let volume = volume(1 << 20);
    for access in [Access::ReadWrite, Access::ReadOnly] {
        // A daemon that was refused before may not have ended yet.
        let ours = locked_within(&volume, access, LONG).unwrap();
        let said = Daemon::start(&volume).err().unwrap_or_default();
        assert!(said.contains("lock"), "{access:?}: {said:?}");
        drop(ours);
    }
    let theirs = Daemon::start(&volume).unwrap();
    for access in [Access::ReadWrite, Access::ReadOnly] {
        let refused = locked(&volume, access).unwrap_err();
        assert!(
            refused.contains("QEMU or one of its tools has it open"),
            "{refused}"
        );
    }
    // As soon as it has ended, and not before.
    let mut image = Image::open(&volume.path, Access::ReadWrite, 512).unwrap();
    drop(theirs);
    image.lock("late", LONG).unwrap();
}

/// A reader that died has requests under way, which write the guest's memory: its successor must not have answered them
/// before.
#[test]
fn a_reader_waits_for_the_one_before_it_and_for_no_other() {
    let volume = volume(1 << 20);
    let read = Access::ReadOnly;
    let before = locked_as(&volume, read, "web/root", Duration::ZERO).unwrap();
    let _other = locked_as(&volume, read, "db/root", Duration::ZERO).unwrap();
    let refused = locked_as(&volume, read, "web/root", Duration::ZERO).unwrap_err();
    assert!(
        refused.contains("the same disk of this VM has it open"),
        "{refused}"
    );
    drop(before);
    assert!(locked_as(&volume, read, "web/root", LONG).is_ok());
}

#[test]
fn another_file_in_an_images_place_is_another_image() {
    let volume = volume(1 << 20);
    let open = || Image::open(&volume.path, Access::ReadOnly, 512).unwrap();
    let before = open();
    assert_eq!(before.identity().unwrap(), open().identity().unwrap());
    std::fs::rename(&volume.path, volume.path.with_extension("old")).unwrap();
    std::fs::write(&volume.path, [0; 512]).unwrap();
    assert_ne!(before.identity().unwrap(), open().identity().unwrap());
}

/// Whoever takes the image of shared storage next is another host, with a cache and a power supply of its own.
#[test]
fn what_was_written_is_durable_before_an_image_is_given_back() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("shared.raw");
    let work = |mounts: &OwnedFd| {
        let storage = testvol::Volume::mount_direct(mounts.as_fd(), directory.path()).unwrap();
        std::fs::write(&path, [1; 4096]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        File::open(directory.path()).unwrap().sync_all().unwrap();
        let mut image = Image::open(&path, Access::ReadWrite, 512).unwrap();
        image.lock("shared", LONG).unwrap();
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all_at(&[7; 4096], 0).unwrap();
        image.give_back("shared").unwrap();
        storage.cut(Survives::Nothing);
        assert!(
            std::fs::read(&path).unwrap() == [7; 4096],
            "a write is lost"
        );
    };
    testvol::apart_or_skipped(work);
}
