//! What is said of disks whose storage does not answer.

use super::super::lock_name;
use super::*;
use crate::testing::{LONG, Site, apart};
use godwit_guestmem::RamFile;
use godwit_qemu::user::User;
use godwit_testkit::disk_load::MEMORY_BYTES;
use godwit_testkit::disk_load::front_end::FrontEnd;
use godwit_testkit::disk_load::ring::{Kind, Ring};
use godwit_testkit::testvol::Volume;
use godwit_types::Generation;
use godwit_types::vm::{OnError, VmSpec};
use rustix::process::{getegid, geteuid};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::thread::scope;

const BYTES: u64 = 4 << 20;

/// A VM's disk on a volume of its own, served for a guest that may run.
struct Served {
    site: Site,
    directory: tempfile::TempDir,
    path: String,
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("root.raw");
        let path = path.to_str().unwrap().to_owned();
        Self {
            site: Site::new(),
            directory,
            path,
        }
    }

    fn begin(&self, mounts: &std::os::fd::OwnedFd) -> (Volume, Disks) {
        self.begin_with(mounts, OnError::Error)
    }

    fn begin_with(&self, mounts: &std::os::fd::OwnedFd, on_error: OnError) -> (Volume, Disks) {
        let volume = Volume::mount_direct(mounts.as_fd(), self.directory.path()).unwrap();
        File::create(&self.path).unwrap().set_len(BYTES).unwrap();
        let (config, paths) = (&self.site.config, &self.site.paths);
        let spec = VmSpec {
            hardware: Some(2),
            disks: vec![DiskSpec {
                on_error,
                ..DiskSpec::new("root", &self.path)
            }],
            ..VmSpec::placeholder(&config.vm)
        };
        let ram = Arc::new(RamFile::create(&paths.ram_file(1), MEMORY_BYTES, None).unwrap());
        let user = User {
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
        };
        let (qemu, right) = ((user, 1), (Some(Generation(2)), None));
        let disks = Disks::begin(config, paths, &spec, qemu, &ram, right).unwrap();
        (volume, disks)
    }

    fn silent(&self) -> Option<String> {
        let path = &self.path;
        Some(format!(
            "the storage of disk 'root' does not answer: see that {path} is reached on this host; the guest waits, and goes on by itself then"
        ))
    }
}

fn until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG);
        std::thread::yield_now();
    }
}

fn only(disks: &Disks) -> Arc<Disk> {
    lock(&disks.0.disks)[0].clone().unwrap()
}

#[test]
fn a_disk_whose_thread_waits_in_its_storage_is_said_to_wait_for_that() {
    let served = Served::new();
    apart(|mounts| {
        let (volume, disks) = served.begin(mounts);
        assert_eq!(disks.note(), None);
        scope(|scope| {
            // Ends here whatever becomes of the test, so that nobody waits for it.
            let volume = volume;
            let disk = only(&disks);
            let name = lock_name(&served.site.config, &disks.0.what().disks[0]);
            disk.hold(LONG).unwrap();
            volume.change(|volume| volume.hangs = true);
            // Its thread makes durable what was written, and waits for that.
            let given_back = scope.spawn(move || disk.give_image_back(&name));
            volume.wait_held(1, LONG).unwrap();
            assert_eq!(disks.note(), served.silent());
            volume.change(|volume| volume.hangs = false);
            given_back.join().unwrap().unwrap();
            until(|| disks.note().is_none());
            disks.end();
        });
    });
}

#[test]
fn a_guest_s_request_that_its_storage_keeps_is_told_once_that_is_long() {
    let served = Served::new();
    apart(|mounts| {
        let (volume, disks) = served.begin(mounts);
        let paths = &served.site.paths;
        let ram = paths.ram_file(1);
        let memory = File::options().read(true).write(true).open(ram).unwrap();
        let mut ring = Ring::map(&memory).unwrap();
        let front_end = FrontEnd::start(&paths.ram_files.disk_socket(1, 0), &memory).unwrap();
        scope(|_| {
            // As above.
            let volume = volume;
            let disk = only(&disks);
            let mut ask = |place| {
                ring.put(place, Kind::Flush, 0, 0);
                front_end.kick().unwrap();
            };
            volume.change(|volume| volume.hangs = true);
            ask(0);
            volume.wait_held(1, LONG).unwrap();
            let began = Instant::now();
            disks.watch_storage(began);
            let later = began + SILENT_AFTER;
            let soon = later.checked_sub(Duration::from_millis(1)).unwrap();
            assert_eq!(disks.note_at(soon), None);
            assert_eq!(disks.note_at(later), served.silent());
            // Another one that is kept is another wait.
            volume.change(|volume| volume.hangs = false);
            until(|| disk.status().unwrap().under_way == 0);
            volume.change(|volume| volume.hangs = true);
            ask(1);
            volume.wait_held(1, LONG).unwrap();
            disks.watch_storage(later);
            assert_eq!(disks.note_at(later), None);
            assert_eq!(disks.note_at(later + SILENT_AFTER), served.silent());
            volume.change(|volume| volume.hangs = false);
            until(|| disk.status().unwrap().under_way == 0);
            disks.watch_storage(later);
            assert_eq!(disks.note_at(later + SILENT_AFTER), None);
            disks.end();
        });
    });
}

#[test]
fn a_disk_that_is_opened_for_as_long_as_its_storage_hangs_is_not_just_not_served() {
    let served = Served::new();
    apart(|mounts| {
        let (volume, disks) = served.begin(mounts);
        scope(|_| {
            // As above.
            let volume = volume;
            only(&disks).begin_end();
            until(|| disks.0.missing() == [0]);
            let said = disks.note().unwrap();
            assert!(said.contains("'root' is not served"), "{said}");
            volume.change(|volume| volume.hangs = true);
            disks.0.try_in_thread(0, Duration::ZERO, None);
            volume.wait_held(1, LONG).unwrap();
            let began = Instant::now();
            disks.watch_storage(began);
            assert_eq!(disks.note_at(began + SILENT_AFTER), served.silent());
            volume.change(|volume| volume.hangs = false);
            until(|| disks.note().is_none());
            disks.end();
        });
    });
}

#[test]
fn a_disk_that_waits_for_storage_that_fails_says_so_and_goes_on_when_it_does_not() {
    for (on_error, waits) in [(OnError::Wait, true), (OnError::Error, false)] {
        let served = Served::new();
        apart(|mounts| {
            let (volume, disks) = served.begin_with(mounts, on_error);
            let paths = &served.site.paths;
            let ram = paths.ram_file(1);
            let memory = File::options().read(true).write(true).open(ram).unwrap();
            let mut ring = Ring::map(&memory).unwrap();
            let front_end = FrontEnd::start(&paths.ram_files.disk_socket(1, 0), &memory).unwrap();
            let disk = only(&disks);
            volume.change(|volume| volume.fails.writes = true);
            ring.content(0, 4096).fill(7);
            ring.put(0, Kind::Write, 0, 4096);
            front_end.kick().unwrap();
            if waits {
                until(|| disk.status().unwrap().fails);
                let note = disks.note().unwrap();
                assert!(note.starts_with("disk-error: "), "{note}");
                let (full, _) = disks.full().unwrap();
                let why = full.keeps_its_guest(&served.site.config);
                assert!(
                    why.contains("the storage of its disk 'root' fails"),
                    "{why}"
                );
            }
            until(|| waits || disks.activity()[0].writes.failed == 1);
            volume.change(|volume| volume.fails.writes = false);
            until(|| disk.status().unwrap().unanswered == 0);
            assert_eq!(disks.note(), None);
            let written = std::fs::read(&served.path).unwrap()[..4096] == [7; 4096];
            assert_eq!(written, waits, "what failed was not done");
            disks.end();
        });
    }
}
