//! What a migration says of the disks that come is judged before anything is made.

use super::*;
use crate::disks::Disks;
use crate::testing::{Site, migration};
use godwit_types::migration::DiskToMove;
use godwit_types::vm::{DISK_GIB_MAX, VmSpec};
use rustix::process::{getegid, geteuid};

#[test]
fn a_disk_that_is_larger_than_any_may_be_is_not_made_for_the_vm_that_comes() {
    let (site, directory) = (Site::new(), tempfile::tempdir().unwrap());
    let path = directory.path().join("root.raw");
    let spec = VmSpec {
        hardware: Some(2),
        disks: vec![DiskSpec::new("root", path.to_str().unwrap())],
        ..VmSpec::placeholder(&site.config.vm)
    };
    let ram = RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
    let ram = Arc::new(ram);
    let user = User {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
    };
    for bytes in [(DISK_GIB_MAX << 30) + 1, u64::MAX] {
        let disk = DiskToMove {
            layered: false,
            linked: None,
            name: "root".into(),
            bytes,
            used_bytes: 0,
        };
        let coming = MigrationSpec {
            disks: vec![disk],
            ..migration("m")
        };
        let (qemu, right) = ((user, 1), (None, Some(&coming)));
        let begun = Disks::begin(&site.config, &site.paths, &spec, qemu, &ram, right);
        let refused = begun.unwrap_err().message;
        assert!(refused.contains("at most 65536 GiB"), "{refused}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

/// The disks of a QEMU that has none, but for what this changes.
fn served(site: &Site, change: impl FnOnce(&mut ServedDisks)) -> Served {
    let ram = RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
    let mut what = ServedDisks::none(1, (0, 0));
    change(&mut what);
    std::fs::create_dir_all(&site.paths.state).unwrap();
    Served::new(&site.config, &site.paths, what, &Arc::new(ram), None)
}

#[test]
fn a_copy_that_is_not_whole_is_removed_though_the_record_has_no_room_because_of_it() {
    let (site, directory) = (Site::new(), tempfile::tempdir().unwrap());
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let copying = Copying {
        parts: Default::default(),
        disk: "root".into(),
        path: at("new"),
        beside: at("new.moving-1"),
        image: None,
        known: None,
    };
    let served = served(&site, |what| what.copying = Some(copying.clone()));
    std::fs::write(&copying.beside, "half").unwrap();
    // Nothing can be written where the next record would be.
    let next = format!("{}.new", site.paths.disks().display());
    std::fs::create_dir(&next).unwrap();
    served.remove_copy(&copying).unwrap_err();
    assert!(!Path::new(&copying.beside).exists());
    assert_eq!(served.what().copying, Some(copying.clone()));
    std::fs::remove_dir(&next).unwrap();
    served.remove_copy(&copying).unwrap();
    assert_eq!(served.what().copying, None);
}

/// Every later move of the VM's disks was refused until its QEMU ended.
#[test]
fn a_device_that_is_gone_since_a_move_to_it_began_keeps_no_disk_from_moving() {
    let site = Site::new();
    let path = format!("/dev/godwit-test-gone-{}", std::process::id());
    let copying = Copying {
        parts: Default::default(),
        disk: "root".into(),
        beside: format!("{path}.moving-1"),
        path: path.clone(),
        image: Some((0x700, 0)),
        known: None,
    };
    let served = served(&site, |what| what.copying = Some(copying.clone()));
    served.save().unwrap();
    served.remove_copy(&copying).unwrap();
    assert!(served.is_clean());
    let left = &served.what().left;
    assert_eq!(left[0].path, path, "it is let go once the device is there");
    assert!(left[0].part.is_some());
}

/// A later write that went well was taken for the one that had failed.
#[test]
fn what_could_not_be_written_is_due_until_it_is_written_and_no_longer() {
    let site = Site::new();
    let served = served(&site, |_| ());
    let next = format!("{}.new", site.paths.disks().display());
    std::fs::create_dir(&next).unwrap();
    served.change(|_| ()).unwrap_err();
    assert!(served.must_save.load(Ordering::SeqCst));
    std::fs::remove_dir(&next).unwrap();
    served.change(|_| ()).unwrap();
    assert!(!served.must_save.load(Ordering::SeqCst));
}
