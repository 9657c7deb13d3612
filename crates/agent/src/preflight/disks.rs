//! The part of preflight that looks at disks: how large those are that go along with a VM, and whether there is a place for them.
//!
//! Reads only. Refuses: images that are neither files nor block devices below `/dev`, and a place that is taken, too small, not there or a
//! device's.

use super::{Finding, refuse};
use crate::config::HostConfig;
use crate::datastores::read_only;
use crate::users;
use godwit_blockio::label::End;
use godwit_qemu::device::device_must_take;
use godwit_qemu::disk::{identity_of, length_and_use, must_be_free, open_to_look};
use godwit_qemu::disk_place::room_of;
use godwit_qemu::holding::device_must_be_nobodys;
use godwit_qemu::layered::{bytes_over, is_layered, linked_to};
use godwit_qemu::user::{User, can_make_disk};
use godwit_types::datastore::{Datastores, datastore_of, is_device_path};
use godwit_types::migration::DiskToMove;
use godwit_types::vm::{DiskSpec, VmSpec, check_disk_bytes};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// The disks that go along with a VM; those that cannot are refusals. Waits for their storage.
/// `end` tells where the disk on a device ends.
pub fn to_move(
    host: &HostName,
    spec: &VmSpec,
    end: impl Fn(&str) -> End,
) -> (Vec<DiskToMove>, Vec<ApiError>) {
    let (mut disks, mut refusals) = (Vec::new(), Vec::new());
    // Others are refused for their hardware.
    let along = spec.disks.iter().filter(|disk| disk.goes_along());
    for disk in along.filter(|_| spec.serves_disks()) {
        match measured(disk, end(&disk.path)) {
            Ok(measured) => disks.push(measured),
            Err(why) => {
                let message = format!(
                    "disk '{}' of VM '{}' on host '{host}' cannot go along: {why}",
                    disk.name, spec.name
                );
                refusals.push(ApiError::new(ErrorCode::NotMigratable, message));
            }
        }
    }
    (disks, refusals)
}

fn measured(disk: &DiskSpec, end: End) -> Result<DiskToMove, String> {
    let path = &disk.path;
    let told = |error: std::io::Error| format!("{path}: {error}");
    let at = Path::new(path);
    let (is_link, is_device) = (at.is_symlink(), is_device_path(path));
    if is_link && !is_device {
        return Err(format!(
            "{path} is a symbolic link: give the path of the image itself"
        ));
    }
    // A volume is named by a link to its device, and neither is ever removed.
    let file = match is_link {
        true => at.canonicalize().and_then(|device| open_to_look(&device)),
        false => open_to_look(at),
    };
    let file = file.map_err(told)?;
    let is_file = file.metadata().map_err(told)?.is_file();
    match (is_file, is_device) {
        (false, true) => {}
        // Where its VM goes a path below /dev is refused, and another one is a file's.
        (false, false) => {
            return Err(format!(
                "{path} is a block device, and has no path below /dev here: move the disk into a datastore of this host first, with 'godwit vm move-disk'"
            ));
        }
        (true, _) if is_link => {
            return Err(format!(
                "{path} is a symbolic link to a file: give the path of the image itself"
            ));
        }
        (true, _) => {}
    }
    let (bytes, own_bytes) = length_and_use(&file, end).map_err(told)?;
    let layered = is_layered(at);
    let linked = layered.then(|| linked_to(at)).flatten();
    let used_bytes = own_bytes.saturating_add(bytes_over(at));
    Ok(DiskToMove {
        layered,
        name: disk.name.clone(),
        bytes,
        used_bytes,
        linked,
    })
}

/// Bytes that the disks before this one take, by the numbers of their file systems.
type Promised = BTreeMap<u64, u64>;

/// Whether there is a place for each disk of a VM that comes, and for all of them.
pub(super) fn places(config: &HostConfig, spec: &VmSpec, disks: &[DiskToMove]) -> Vec<Finding> {
    let host = &config.name;
    let mut promised = Promised::default();
    let come = spec.disks.iter().filter(|disk| !disk.read_only);
    let is_on_device = |disk: &DiskSpec| {
        datastore_of(&config.datastores, &disk.path).is_some_and(|(_, store)| store.is_device())
    };
    come.map(|disk| {
        let place = match disk.shared {
            true => return is_there(host, disk),
            false if is_on_device(disk) => fits_on_device((config, &spec.name), disk, disks),
            false => has_place((host, &config.datastores), disk, disks, &mut promised),
        };
        place.and_then(|place| can_be_made(config, spec, disk).map(|()| place))
    })
    .collect()
}

/// Whether QEMU's user may make the image where the disk is to be, on storage that suits.
pub(crate) fn can_be_made(
    config: &HostConfig,
    spec: &VmSpec,
    disk: &DiskSpec,
) -> Result<(), ApiError> {
    let user = users::qemu_user(config.qemu_user.as_deref()).unwrap_or(users::NOBODY);
    let user = User {
        uid: user.uid,
        gid: user.gid,
    };
    can_make_disk(&config.name, user, spec, disk)
}

fn is_there(host: &HostName, disk: &DiskSpec) -> Finding {
    let (name, path) = (&disk.name, &disk.path);
    match identity_of(Path::new(path)) {
        Ok(Some(_)) => Ok(format!(
            "disk '{name}' is on shared storage: {path} on host '{host}'"
        )),
        Ok(None) => refuse(
            ErrorCode::MissingFile,
            format!(
                "disk '{name}' is called shared, and {path} does not exist on host '{host}': mount that storage there, or correct the VM"
            ),
        ),
        Err(error) => refuse(
            ErrorCode::MissingFile,
            format!(
                "disk '{name}' is called shared, and {path} cannot be looked at on host '{host}': {error}"
            ),
        ),
    }
}

/// What holds a file, in words.
fn named(stores: &Datastores, path: &str) -> String {
    match datastore_of(stores, path) {
        Some((name, _)) => format!("its datastore '{name}'"),
        None => "its directory".to_owned(),
    }
}

/// Refuses a place where a device is, or whose directory is that of devices, or one itself. Why is a part of a sentence.
fn not_among_devices(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let parent = path.parent().unwrap_or(Path::new("/"));
    let is_device = |at: &Path| {
        at.metadata()
            .is_ok_and(|at| at.file_type().is_block_device())
    };
    let is = if is_device(path) {
        "is a block device"
    } else if is_device(parent) {
        "is below a block device"
    } else if is_device_path(&path.to_string_lossy()) {
        "is where that host has its devices"
    } else {
        return Ok(());
    };
    Err(format!(
        "{shown} {is}, and no datastore of that host: name a datastore for it (--disk NAME=DATASTORE)"
    ))
}

/// A device of this host that is a datastore.
fn fits_on_device(
    (config, vm): (&HostConfig, &VmName),
    disk: &DiskSpec,
    disks: &[DiskToMove],
) -> Finding {
    let (host, name, path) = (&config.name, &disk.name, &disk.path);
    let size = disks.iter().find(|size| size.name == *name);
    let bytes = size.map_or(0, |size| size.bytes);
    if size.is_some_and(|size| size.layered) {
        return refuse(
            ErrorCode::Preflight,
            format!(
                "disk '{name}' has snapshots, for which there is no place beside the block device {path} on host '{host}': name a datastore that is a directory for it (--disk {name}=DATASTORE), or delete its snapshots first"
            ),
        );
    }
    let is_nobodys = device_must_be_nobodys(&config.state_dir, Some(vm), path);
    match is_nobodys.and_then(|()| device_must_take(path, bytes)) {
        Ok(()) => Ok(format!(
            "disk '{name}': {} MiB of the block device {path} on host '{host}'",
            bytes >> 20
        )),
        Err(why) => refuse(
            ErrorCode::Preflight,
            format!("disk '{name}' cannot come to host '{host}': {why}"),
        ),
    }
}

fn has_place(
    (host, stores): (&HostName, &Datastores),
    disk: &DiskSpec,
    disks: &[DiskToMove],
    promised: &mut Promised,
) -> Finding {
    let (name, path) = (&disk.name, Path::new(&disk.path));
    let refused = |message| refuse(ErrorCode::Preflight, message);
    if let Err(why) = not_among_devices(path).and_then(|()| must_be_free(path)) {
        return refused(format!("disk '{name}' cannot come to host '{host}': {why}"));
    }
    // The source has refused what it does not measure.
    let Some(size) = disks.iter().find(|size| size.name == *name) else {
        return Ok(format!(
            "nothing is where disk '{name}' would come to on host '{host}'"
        ));
    };
    if let Err(why) = check_disk_bytes(size.bytes) {
        return refused(format!("disk '{name}' cannot come to host '{host}': {why}"));
    }
    let parent = path.parent().unwrap_or(Path::new("/"));
    let dir = parent.display();
    let room = match statvfs(parent) {
        Ok(room) => room,
        Err(rustix::io::Errno::NOENT) => {
            return refuse(
                ErrorCode::MissingFile,
                format!(
                    "disk '{name}' is to come to {dir} on host '{host}', which does not exist there: make that directory, for the group of the host's QEMUs"
                ),
            );
        }
        Err(error) => {
            return refused(format!(
                "{dir} on host '{host}' cannot be looked at: {error}"
            ));
        }
    };
    if room.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return refused(format!(
            "disk '{name}' cannot come to host '{host}': {}",
            read_only(&named(stores, &disk.path), &dir.to_string())
        ));
    }
    let mib = |bytes: u64| bytes >> 20;
    let device = parent.metadata().map_or(0, |parent| parent.dev());
    let promised = promised.entry(device).or_default();
    let free = room_of(&room).saturating_sub(*promised);
    let beside = match *promised {
        0 => "",
        _ => " beside the VM's other disks",
    };
    if free < size.used_bytes {
        return refuse(
            ErrorCode::Preflight,
            format!(
                "disk '{name}' holds {} MiB, and {dir} on host '{host}' has {} MiB free for disks that come{beside}: make room there, or choose another host",
                mib(size.used_bytes),
                mib(free)
            ),
        );
    }
    *promised = promised.saturating_add(size.used_bytes);
    Ok(format!(
        "disk '{name}': {} MiB of the {} MiB that are free in {dir} on host '{host}'{beside}",
        mib(size.used_bytes),
        mib(free)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datastores::tests::{has_disk_at, has_own_mounts, label_at, while_read_only};
    use crate::test_support::TestHost;
    use godwit_testkit::file_system::Device;
    use godwit_types::DatastoreName;
    use godwit_types::datastore::Datastore;
    use godwit_types::vm::DISK_GIB_MAX;
    use std::ffi::OsStr;

    #[test]
    fn a_disk_whose_host_says_any_size_is_refused_before_it_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostName::new("b").unwrap();
        let disk = DiskSpec::new("root", dir.path().join("root.raw").to_str().unwrap());
        let said = |bytes| {
            let sizes = [DiskToMove {
                layered: false,
                linked: None,
                name: disk.name.clone(),
                bytes,
                used_bytes: 0,
            }];
            has_place(
                (&host, &Datastores::new()),
                &disk,
                &sizes,
                &mut Promised::default(),
            )
        };
        for bytes in [(DISK_GIB_MAX << 30) + 1, u64::MAX] {
            let refused = format!("{:?}", said(bytes).unwrap_err());
            assert!(refused.contains("at most 65536 GiB"), "{refused}");
        }
        said(DISK_GIB_MAX << 30).unwrap();
    }

    #[test]
    fn a_datastore_that_is_mounted_for_reading_only_is_refused_by_its_name() {
        if !has_own_mounts(
            "preflight::disks::tests::a_datastore_that_is_mounted_for_reading_only_is_refused_by_its_name",
        ) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let host = HostName::new("b").unwrap();
        let store = DatastoreName::new("fast").unwrap();
        let stores = Datastores::from([(store, Datastore::new(path, false))]);
        let sizes = [DiskToMove {
            layered: false,
            linked: None,
            name: "root".into(),
            bytes: 1 << 30,
            used_bytes: 0,
        }];
        let disk = DiskSpec::new("root", format!("{path}/web-root.raw"));
        let found = || has_place((&host, &stores), &disk, &sizes, &mut Promised::default());
        while_read_only(directory.path(), || {
            let refused = format!("{:?}", found().unwrap_err());
            let told = [
                format!("'fast' is mounted for reading only: {path}"),
                format!("remount,rw $(findmnt -no TARGET -T {path})"),
            ];
            assert!(told.iter().all(|told| refused.contains(told)), "{refused}");
        });
        found().unwrap();
    }

    /// What is found of a disk that is to come to a file system on a device with blocks of so many bytes, where this host can make one.
    fn found_on_blocks_of(bytes: &str) -> Option<Finding> {
        let (below, place) = (
            tempfile::tempdir_in("/var/tmp").unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let file = below.path().join("device");
        let made = std::fs::File::create(&file).and_then(|made| made.set_len(512 << 20));
        made.unwrap();
        let words = ["--find", "--show", "--sector-size", bytes].map(OsStr::new);
        let device = said("losetup", &[&words[..], &[file.as_os_str()]].concat())?;
        let (device, place) = (OsStr::new(&device), place.path());
        let is_mounted = || {
            said("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), device])?;
            said("mount", &[device, place.as_os_str()])
        };
        let config = "name = \"b\"\nlisten = \"127.0.0.1:1\"\nmigration_addresses = [\"127.0.0.1\"]\nqemu_user = \"nobody\"\n";
        let config = HostConfig::parse(config, Path::new("t")).unwrap();
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        let path = place.join("web-root.raw");
        let disk = DiskSpec::new("root", path.to_str().unwrap());
        let sizes = [DiskToMove {
            layered: false,
            linked: None,
            name: disk.name.clone(),
            bytes: 8 << 20,
            used_bytes: 0,
        }];
        spec.disks.push(disk);
        let found = is_mounted().map(|_| {
            said("chmod", &["777".as_ref(), place.as_os_str()]);
            let found = places(&config, &spec, &sizes).pop();
            said("umount", &[place.as_os_str()]);
            found.unwrap()
        });
        said("losetup", &["-d".as_ref(), device]);
        found
    }

    #[test]
    fn a_disk_does_not_come_to_storage_with_larger_blocks_than_its_own() {
        let found = ["512", "4096"].map(found_on_blocks_of);
        let [Some(same), Some(larger)] = found else {
            return println!("skipped: no file system can be made on a device with such blocks");
        };
        same.unwrap();
        let refused = larger.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Preflight);
        let told = ["disk 'root'", "host 'b'", "larger blocks than 512 bytes"];
        let message = &refused.message;
        assert!(told.iter().all(|told| message.contains(told)), "{message}");
    }

    #[test]
    fn disks_that_come_to_one_file_system_have_its_room_together() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostName::new("b").unwrap();
        let used_bytes = room_of(&statvfs(dir.path()).unwrap()) / 3 * 2;
        let mut promised = Promised::default();
        let mut has_place = |name: &str| {
            let disk = DiskSpec::new(name, dir.path().join(name).to_str().unwrap());
            let size = DiskToMove {
                layered: false,
                linked: None,
                name: disk.name.clone(),
                bytes: 1 << 30,
                used_bytes,
            };
            super::has_place((&host, &Datastores::new()), &disk, &[size], &mut promised)
        };
        has_place("root").unwrap();
        let refused = format!("{:?}", has_place("data").unwrap_err());
        assert!(refused.contains("beside the VM's other disks"), "{refused}");
    }

    #[test]
    fn a_device_of_this_host_is_no_place_for_a_disk_that_comes() {
        let host = HostName::new("b").unwrap();
        for path in ["/dev/vg0/web-root.raw", "/dev/web-root.raw"] {
            let disk = DiskSpec::new("root", path);
            let refused = has_place(
                (&host, &Datastores::new()),
                &disk,
                &[],
                &mut Promised::default(),
            );
            let refused = format!("{:?}", refused.unwrap_err());
            let words = "where that host has its devices, and no datastore of that host";
            assert!(refused.contains(words), "{refused}");
        }
    }

    #[test]
    fn a_link_to_an_image_does_not_go_along_where_it_is_none_below_dev() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (image, link) = (dir.path().join("root.raw"), dir.path().join("link"));
        std::fs::write(&image, [0; 512]).unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let of = |path: &Path| {
            measured(
                &DiskSpec::new("root", path.to_str().unwrap()),
                End::OfDevice,
            )
        };
        assert_eq!(of(&image).unwrap().bytes, 512);
        let refused = of(&link).unwrap_err();
        assert!(refused.contains("is a symbolic link"), "{refused}");
        let refused = of(Path::new("/dev/none/root")).unwrap_err();
        assert!(refused.contains("/dev/none/root: "), "{refused}");
    }

    /// What this command says, if it can do this here.
    fn said(program: &str, words: &[&OsStr]) -> Option<String> {
        let output = std::process::Command::new(program).args(words).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    #[test]
    fn a_block_device_goes_along_with_all_of_its_length_where_it_is_named_below_dev() {
        let Some(device) = Device::of(8 << 20) else {
            return;
        };
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (path, node) = (device.path(), dir.path().join("node"));
        let copied = said("cp", &["-a".as_ref(), path.as_os_str(), node.as_os_str()]);
        let of = |path: &Path, end| measured(&DiskSpec::new("root", path.to_str().unwrap()), end);
        // Its guest wrote what looks like a label.
        label_at(&device);
        let found = of(path, End::OfDevice).unwrap();
        assert_eq!((found.bytes, found.used_bytes), (8 << 20, 8 << 20));
        assert_eq!(of(path, End::ByLabel(None)).unwrap().bytes, 1 << 20);
        if copied.is_some() {
            let refused = of(&node, End::OfDevice).unwrap_err();
            assert!(refused.contains("has no path below /dev here"), "{refused}");
        }
    }

    #[test]
    fn a_device_that_another_vm_of_the_host_has_takes_no_disk_that_comes() {
        let Some(device) = Device::of(8 << 20) else {
            return;
        };
        let (host, vm) = (TestHost::new(), VmName::new("web").unwrap());
        let disk = DiskSpec::new("root", device.path().to_str().unwrap());
        let fits = || fits_on_device((&host.config, &vm), &disk, &[]);
        fits().unwrap();
        has_disk_at(&host, "db", device.path());
        let refused = format!("{:?}", fits().unwrap_err());
        assert!(refused.contains("is disk 'root' of VM 'db'"), "{refused}");
    }
}
