//! What is refused before a VM process hears of it.

use super::*;
use crate::api::tests::put;
use crate::test_support::TestHost;
use godwit_blockio::label::{self, Holds, Label};
use godwit_testkit::file_system::Device;
use godwit_types::Generation;
use godwit_types::disk_move::{FirstLog, Method, Optimisation};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;

fn wish(disks: &[&str], to: &str) -> MoveDisks {
    MoveDisks {
        disks: disks.iter().map(|disk| (*disk).to_owned()).collect(),
        to: store(to),
        max_bandwidth_mbit_per_s: None,
        dry_run: false,
        method: Method::default(),
        without: Vec::new(),
        first_log: FirstLog::default(),
    }
}

struct House {
    directory: tempfile::TempDir,
    spec: VmSpec,
    stores: Datastores,
    state: PathBuf,
}

fn store(name: &str) -> DatastoreName {
    DatastoreName::new(name).unwrap()
}

impl House {
    /// VM web with disks `root` and `data` in `slow`, and `iso`, which it only reads; `fast` holds nothing.
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        for name in ["slow", "fast"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        for name in ["root", "data", "iso"] {
            let image = path(&format!("slow/{name}.raw"));
            std::fs::write(&image, [1; 4096]).unwrap();
            spec.disks.push(DiskSpec {
                read_only: name == "iso",
                ..DiskSpec::new(name, image)
            });
        }
        let stores = ["slow", "fast", "gone"].map(|name| {
            let shared = name == "fast";
            (store(name), Datastore::new(path(name), shared))
        });
        Self {
            stores: stores.into(),
            state: directory.path().to_owned(),
            directory,
            spec,
        }
    }

    fn found(&self, disks: &[&str], to: &str) -> Result<Found, ApiError> {
        self.found_for(&wish(disks, to))
    }

    fn found_for(&self, wish: &MoveDisks) -> Result<Found, ApiError> {
        let here = Here {
            host: &HostName::new("a").unwrap(),
            stores: &self.stores,
            state_dir: &self.state,
            record: &DiskRecord::default(),
        };
        places(here, &self.spec, wish)
    }

    fn places(&self, disks: &[&str], to: &str) -> Result<Vec<DiskPlace>, ApiError> {
        let found = self.found(disks, to)?;
        match found.refusals.into_iter().next() {
            Some(refusal) => Err(refusal),
            None => Ok(found.places.into_iter().map(|(place, _)| place).collect()),
        }
    }

    fn refuses(&self, disks: &[&str], to: &str, words: &[&str]) {
        let error = self.places(disks, to).unwrap_err();
        for word in words {
            assert!(error.message.contains(word), "{word:?}: {error:?}");
        }
    }
}

#[test]
fn every_disk_that_the_guest_writes_gets_a_place_of_its_own() {
    let house = House::new();
    let places = house.places(&[], "fast").unwrap();
    let named: Vec<&str> = places.iter().map(|place| place.disk.as_str()).collect();
    assert_eq!(named, ["root", "data"]);
    assert!(places[0].path.ends_with("/fast/web-root.raw"));
    assert!(places.iter().all(|place| place.shared));
    let one = house.places(&["data"], "fast").unwrap();
    assert_eq!(one, places[1..]);
}

#[test]
fn what_cannot_be_is_refused_in_a_sentence_that_says_what_to_do() {
    let house = House::new();
    house.refuses(
        &[],
        "tape",
        &[
            "no datastore 'tape'",
            "it has fast, gone, slow",
            "tape = { path",
        ],
    );
    house.refuses(
        &[],
        "gone",
        &["'gone' of host 'a' is not there", "mount it"],
    );
    house.refuses(
        &["root"],
        "slow",
        &["in datastore 'slow' of host 'a' already"],
    );
    house.refuses(
        &["swap"],
        "fast",
        &["VM 'web' has no disk 'swap' (it has root, data, iso)"],
    );
    house.refuses(&["iso"], "fast", &["only reads disk 'iso'"]);
    house.refuses(&["root", "root"], "fast", &["named twice"]);
    let path = house.directory.path().join("fast/web-data.raw");
    std::fs::write(path, "").unwrap();
    house.refuses(&[], "fast", &["web-data.raw", "a file is at"]);
}

#[test]
fn a_datastore_that_is_a_file_or_too_small_is_refused() {
    let mut house = House::new();
    let path = house.spec.disks[0].path.clone();
    house
        .stores
        .insert(store("file"), Datastore::new(path, false));
    house.refuses(&[], "file", &["is no directory"]);
    // It cannot be written, and has no room either.
    house
        .stores
        .insert(store("proc"), Datastore::new("/proc", false));
    house.refuses(&[], "proc", &["0 MiB free"]);
}

/// Told to the process that a test is by itself.
const OWN_MOUNTS: &str = "GODWIT_TEST_OWN_MOUNTS";

/// Whether this process is the test by itself, with mounts of its own. Any other one runs that process, where it can.
pub(crate) fn has_own_mounts(test: &str) -> bool {
    if std::env::var_os(OWN_MOUNTS).is_some() {
        return true;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: mounts of one's own need root");
        return false;
    }
    let mut inside = Command::new("unshare");
    inside.arg("--mount").arg(std::env::current_exe().unwrap());
    inside.args(["--exact", "--nocapture", test]);
    let ended = inside.env(OWN_MOUNTS, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && said.contains("1 passed"),
        "{ended:?}"
    );
    false
}

/// Works while this directory is mounted for reading only, as this process alone sees it.
pub(crate) fn while_read_only(directory: &Path, work: impl FnOnce()) {
    for words in [&["--bind"][..], &["-o", "remount,bind,ro"][..]] {
        let mut mount = Command::new("mount");
        let done = mount.args(words).arg(directory).arg(directory).status();
        assert!(done.unwrap().success(), "{words:?}");
    }
    work();
    let unmounted = Command::new("umount").arg(directory).status();
    assert!(unmounted.unwrap().success());
}

#[test]
fn a_disk_does_not_move_to_a_datastore_that_is_mounted_for_reading_only() {
    if !has_own_mounts(
        "datastores::tests::a_disk_does_not_move_to_a_datastore_that_is_mounted_for_reading_only",
    ) {
        return;
    }
    let house = House::new();
    let fast = house.directory.path().join("fast");
    while_read_only(&fast, || {
        let path = fast.to_str().unwrap();
        let told = format!("datastore 'fast' of host 'a' is mounted for reading only: {path}");
        let remedy = format!("'mount -o remount,rw $(findmnt -no TARGET -T {path})'");
        house.refuses(&["root"], "fast", &[&told, &remedy]);
        let refused = house.places(&["root"], "fast").unwrap_err();
        assert_eq!(refused.code, ErrorCode::Preflight);
    });
    house.places(&["root"], "fast").unwrap();
}

#[test]
fn a_dry_run_finds_everything_that_stands_in_the_way_and_what_each_disk_holds() {
    let house = House::new();
    for name in ["web-root.raw", "web-data.raw"] {
        std::fs::write(house.directory.path().join("fast").join(name), "x").unwrap();
    }
    let found = house.found(&[], "fast").unwrap();
    let said: Vec<&str> = found
        .refusals
        .iter()
        .map(|why| why.message.as_str())
        .collect();
    assert!(
        said.len() == 2 && said[0].contains("web-root.raw"),
        "{said:?}"
    );
    let (place, planned) = &found.places[0];
    assert_eq!((&planned.to, planned.total_bytes), (&place.path, 4096));
    assert!(planned.from.ends_with("slow/root.raw"));
    assert_eq!(planned.state, DiskMoveState::Planned);
}

#[test]
fn a_method_goes_along_and_the_mirror_has_nothing_to_do_without() {
    let house = House::new();
    let without = vec![Optimisation::HotBlocks];
    let tracked = MoveDisks {
        method: Method::DirtyTracking,
        without: without.clone(),
        ..wish(&["root"], "fast")
    };
    let found = house.found_for(&tracked).unwrap();
    let (place, planned) = &found.places[0];
    assert_eq!((place.method, &place.without), (tracked.method, &without));
    assert_eq!(planned.method, tracked.method);
    let mirrored = MoveDisks {
        method: Method::Mirror,
        ..tracked
    };
    let refused = house.found_for(&mirrored).unwrap_err().message;
    assert!(refused.contains("only dirty-tracking"), "{refused}");
    let logs = MoveDisks {
        method: Method::Snapshot,
        first_log: FirstLog::Source,
        ..wish(&["root"], "fast")
    };
    let found = house.found_for(&logs).unwrap();
    assert_eq!(found.places[0].0.first_log, FirstLog::Source);
    let mirrored = MoveDisks {
        method: Method::Mirror,
        ..logs
    };
    let refused = house.found_for(&mirrored).unwrap_err().message;
    assert!(refused.contains("only the method snapshot"), "{refused}");
}

#[test]
fn what_a_move_takes_is_told_from_the_last_one_between_the_same_places_and_is_no_less_than_the_cap_lets()
 {
    let of = |from: &str, to: &str| DiskMove {
        total_bytes: 1 << 30,
        ..DiskMove::planned("root", from, to)
    };
    let moved = |from: &str, seconds, limited_by| DiskMove {
        state: DiskMoveState::Moved,
        seconds: Some(seconds),
        limited_by: Some(limited_by),
        ..of(from, "/fast/web-data.raw")
    };
    let eta = |past: &[DiskMove], mbit| {
        let mut planned = [of("/slow/web-root.raw", "/fast/web-root.raw")];
        let wish = MoveDisks {
            max_bandwidth_mbit_per_s: mbit,
            ..wish(&[], "fast")
        };
        estimate(&mut planned, past, &wish);
        planned[0].eta_s
    };
    let own = moved("/slow/web-data.raw", 10.0, DiskMoveLimit::SourceDisk);
    assert_eq!(eta(&[], None), None, "nothing is known");
    assert_eq!(eta(std::slice::from_ref(&own), None), Some(10));
    assert_eq!(eta(std::slice::from_ref(&own), Some(429)), Some(21));
    assert_eq!(eta(std::slice::from_ref(&own), Some(80_000)), Some(10));
    assert_eq!(eta(&[], Some(859)), None, "a cap is no estimate");
    let capped = moved("/slow/web-data.raw", 90.0, DiskMoveLimit::Cap);
    assert_eq!(eta(&[capped, own], None), Some(10));
    for other in [
        moved("/elsewhere/web-data.raw", 10.0, DiskMoveLimit::SourceDisk),
        moved("/slow/web-data.raw", 10.0, DiskMoveLimit::Cap),
    ] {
        assert_eq!(eta(&[other], None), None);
    }
}

#[test]
fn a_directory_of_devices_is_no_datastore() {
    let mut house = House::new();
    let raw = Datastore::new("/dev/pts", false);
    house.stores.insert(store("raw"), raw);
    house.refuses(&["root"], "raw", &["/dev/pts cannot be looked at"]);
    house.refuses(
        &[],
        "raw",
        &["which holds one disk: name one of root, data"],
    );
}

/// A host has this VM, off, with its only disk at a device.
pub(crate) fn has_disk_at(host: &TestHost, vm: &str, device: &Path) {
    let (records, name) = (host.records(), VmName::new(vm).unwrap());
    records.survey(&name, Generation(1)).unwrap();
    let mut put = put(vm, 2);
    put.spec
        .disks
        .push(DiskSpec::new("root", device.to_str().unwrap()));
    records.put(&put).unwrap();
}

/// A guest or Godwit has written a label there: the device holds a disk of 1 MiB.
pub(crate) fn label_at(device: &Device) {
    let label = Label {
        holds: Holds::Disk,
        bytes: 1 << 20,
        vm: "web".to_owned(),
        disk: "root".to_owned(),
        text: None,
    };
    label::write(device.open().unwrap().as_fd(), None, label).unwrap();
}

#[test]
fn a_device_takes_one_disk_if_nothing_is_on_it_and_it_is_as_long() {
    let (mut house, Some(device)) = (House::new(), Device::of(4 << 20)) else {
        return;
    };
    let path = device.path().to_str().unwrap();
    house
        .stores
        .insert(store("lun"), Datastore::new(path, false));
    assert_eq!(house.places(&["root"], "lun").unwrap()[0].path, path);
    let root = &house.spec.disks[0].path;
    let root = std::fs::File::options().write(true).open(root);
    root.unwrap().set_len(4 << 20).unwrap();
    let told = "datastore 'lun' of host 'a': the device";
    house.refuses(&["root"], "lun", &[told, "at most 3 MiB"]);
}

#[test]
fn a_device_that_is_write_protected_or_another_vms_is_refused_already_by_a_dry_run() {
    let (mut house, Some(device)) = (House::new(), Device::of(4 << 20)) else {
        return;
    };
    let host = TestHost::new();
    house.state = host.config.state_dir.clone();
    let path = device.path().to_str().unwrap();
    house
        .stores
        .insert(store("lun"), Datastore::new(path, false));
    house.places(&["root"], "lun").unwrap();
    device.protect(true).unwrap();
    house.refuses(&["root"], "lun", &[path, "is write-protected"]);
    device.protect(false).unwrap();
    // Its guest may have written nothing yet.
    has_disk_at(&host, "db", device.path());
    house.refuses(&["root"], "lun", &[path, "is disk 'root' of VM 'db'"]);
}

#[test]
fn a_disk_on_a_device_has_the_devices_length_whatever_its_guest_wrote_there() {
    let (mut house, Some(device)) = (House::new(), Device::of(4 << 20)) else {
        return;
    };
    let path = device.path().to_str().unwrap();
    house.spec.disks[0].path = path.to_owned();
    label_at(&device);
    let total = |house: &House| {
        house.found(&["root"], "fast").unwrap().places[0]
            .1
            .total_bytes
    };
    assert_eq!(total(&house), 4 << 20);
    house
        .stores
        .insert(store("lun"), Datastore::new(path, false));
    assert_eq!(total(&house), 1 << 20, "its label tells");
}
