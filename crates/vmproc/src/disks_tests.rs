//! Whether a stopped QEMU's disks are at rest: a front end stands for QEMU, and gives its queue back, or does not.

use super::*;
use crate::hypervisor::Hyper;
use crate::testing::{FakeQemu, LONG, Site, apart};
use godwit_store::load_json;
use godwit_testkit::disk_load::MEMORY_BYTES;
use godwit_testkit::disk_load::front_end::FrontEnd;
use godwit_testkit::disk_load::ring::{Kind, Ring};
use godwit_testkit::testvol::Volume;
use rustix::process::{getegid, geteuid};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

const BYTES: u64 = 1 << 20;

/// A disk that is served for a guest that may run, and the memory of that guest.
struct Served {
    disks: Disks,
    socket: PathBuf,
    memory: File,
    ram: Arc<RamFile>,
    site: Site,
}

impl Served {
    /// With an image of this directory.
    fn with(directory: &std::path::Path) -> Self {
        let (site, image) = (Site::new(), directory.join("root.raw"));
        File::create(&image).unwrap().set_len(BYTES).unwrap();
        let spec = VmSpec {
            hardware: Some(2),
            disks: vec![DiskSpec::new("root", image.to_str().unwrap())],
            ..VmSpec::placeholder(&site.config.vm)
        };
        let ram = RamFile::create(&site.paths.ram_file(1), MEMORY_BYTES, None).unwrap();
        let memory = File::options().read(true).write(true).open(ram.path());
        let user = User {
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
        };
        let (qemu, right) = ((user, 1), (Some(Generation(2)), None));
        let ram = Arc::new(ram);
        let disks = Disks::begin(&site.config, &site.paths, &spec, qemu, &ram, right);
        Self {
            disks: disks.unwrap(),
            socket: site.paths.ram_files.disk_socket(1, 0),
            memory: memory.unwrap(),
            ram,
            site,
        }
    }

    /// A QEMU that has these disks, and whose guest stands still once it was asked.
    fn of_a_qemu(&self) -> (FakeQemu, Hyper) {
        let qemu = self.site.qemu_of(2, &["paused"]);
        let paths = &self.site.paths;
        let identity = load_json(&paths.identity()).unwrap().unwrap();
        let parts = (Arc::clone(&self.ram), self.disks.clone(), None);
        let (hyper, _) = Hyper::take_over(paths, &identity, parts).unwrap();
        (qemu, hyper)
    }

    fn connect(&self) -> FrontEnd {
        let front_end = FrontEnd::start(&self.socket, &self.memory).unwrap();
        self.until(|status| status.running == 1);
        front_end
    }

    fn until(&self, is_so: impl Fn(&godwit_vhost::Status) -> bool) {
        let (disk, began) = (self.disks.0.disk(0).unwrap(), Instant::now());
        while !is_so(&disk.status().unwrap()) {
            assert!(began.elapsed() < LONG, "{:?}", disk.status());
            std::thread::yield_now();
        }
    }
}

#[test]
fn disks_are_at_rest_once_qemu_has_its_queue_back_and_not_before() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let served = Served::with(directory.path());
    let mut qemu = served.connect();
    let lives = served.disks.rest().unwrap();
    assert_eq!(lives, [Some(0)]);
    let refused = served.disks.are_at_rest(&lives).unwrap_err();
    assert_eq!(refused, "QEMU has not got all queues of disk 'root' back");
    qemu.stop().unwrap();
    assert_eq!(served.disks.are_at_rest(&lives), Ok(()));
}

#[test]
fn disks_are_not_at_rest_for_a_qemu_that_lost_its_connection_meanwhile() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let served = Served::with(directory.path());
    let lost = "QEMU was not connected to disk 'root' all the time";
    let qemu = served.connect();
    let lives = served.disks.rest().unwrap();
    drop(qemu);
    served.until(|status| !status.connected);
    assert_eq!(served.disks.are_at_rest(&lives).unwrap_err(), lost);
    // Another connection gives its queue back; what became of the first one's is not known.
    let mut qemu = served.connect();
    qemu.stop().unwrap();
    assert_eq!(served.disks.are_at_rest(&lives).unwrap_err(), lost);
    // One that was not connected before is none that was all the time.
    assert_eq!(served.disks.are_at_rest(&[None]).unwrap_err(), lost);
    let lives = served.disks.rest().unwrap();
    assert_eq!(served.disks.are_at_rest(&lives), Ok(()));
}

/// Its queue is given back at once, and what it waits for is noted in the in-flight area alone, which stays on this host.
#[test]
fn disks_are_not_at_rest_while_a_write_that_waits_for_room_is_unanswered() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    apart(|mounts| {
        let storage = Volume::mount(mounts.as_fd(), directory.path()).unwrap();
        let served = Served::with(directory.path());
        storage.fill();
        let mut ring = Ring::map(&served.memory).unwrap();
        let mut qemu = served.connect();
        for place in 0..2 {
            ring.content(place, 4096).fill(7);
            ring.put(place, Kind::Write, place as u64 * 4096, 4096);
        }
        qemu.kick().unwrap();
        served.until(|status| status.full_for.is_some() && status.unanswered == 2);
        let lives = served.disks.rest().unwrap();
        qemu.stop().unwrap();
        let refused = served.disks.are_at_rest(&lives).unwrap_err();
        assert_eq!(refused, "disk 'root' has 2 requests unanswered");
    });
}

/// Asked to stop or reset a guest whose storage hangs, QEMU would answer nobody until it does not.
fn is_not_asked_while_a_disk_does_not_come_to_rest(
    command: &str,
    ask: impl Fn(&Hyper) -> Result<(), ApiError> + Sync,
) {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    apart(|mounts| {
        let storage = Volume::mount_direct(mounts.as_fd(), directory.path()).unwrap();
        let served = Served::with(directory.path());
        let (qemu, hyper) = served.of_a_qemu();
        let mut ring = Ring::map(&served.memory).unwrap();
        let front_end = served.connect();
        storage.change(|settings| settings.hangs = true);
        ring.content(0, 4096).fill(7);
        ring.put(0, Kind::Write, 0, 4096);
        front_end.kick().unwrap();
        storage.wait_held(1, LONG).unwrap();
        let refused = ask(&hyper).unwrap_err().message;
        assert!(refused.contains("disk 'root'"), "{refused}");
        assert_eq!(qemu.asked(command), 0);
        storage.change(|settings| settings.hangs = false);
        // The guest runs on, with its disk.
        served.until(|status| status.unanswered == 0 && !status.held);
    });
}

#[test]
fn qemu_is_not_asked_to_stop_a_guest_whose_disk_does_not_come_to_rest() {
    is_not_asked_while_a_disk_does_not_come_to_rest("stop", |hyper| hyper.stop(true).map(drop));
}

#[test]
fn qemu_is_not_asked_to_reset_a_guest_whose_disk_does_not_come_to_rest() {
    is_not_asked_while_a_disk_does_not_come_to_rest("system_reset", Hyper::reset);
}

#[test]
fn a_guest_that_is_reset_has_its_disk_back_if_it_had_it_before() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let served = Served::with(directory.path());
    let (qemu, hyper) = served.of_a_qemu();
    let _front_end = served.connect();
    hyper.reset().unwrap();
    served.until(|status| !status.held);
    // One that stands still takes nothing.
    served.disks.rest().unwrap();
    hyper.reset().unwrap();
    assert!(served.disks.do_rest());
    assert_eq!(qemu.asked("system_reset"), 2);
}

#[test]
fn a_guest_that_was_stopped_does_not_leave_while_qemu_lacks_a_queue() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let served = Served::with(directory.path());
    let (qemu, hyper) = served.of_a_qemu();
    let mut front_end = served.connect();
    let refused = hyper.stop(true).unwrap_err().message;
    assert_eq!(refused, "QEMU has not got all queues of disk 'root' back");
    assert_eq!(qemu.asked("stop"), 1);
    front_end.stop().unwrap();
    assert!(hyper.stop(true).is_ok());
}
