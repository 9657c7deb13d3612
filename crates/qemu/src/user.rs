//! Whom a VM's QEMU runs as, and opening files with the rights of that user.
//!
//! Owns nothing. A VM has a user id of its own, the same on every host, and a group of the same number, so that a QEMU that
//! was taken over reaches nothing of its neighbours. One without, described by an older controller, runs as the common user
//! and group of the host's QEMUs; so does every one where this process cannot become another user. What a person gives to
//! the common user or group is for all VMs: disks are opened with those rights, and QEMU gets the open file; it is in the
//! common group itself only where its kernel or initramfs, which it opens itself, is for that group. Refuses: a file that
//! may not be opened so.

use crate::disk::{DiskError, make_image, open_image};
use crate::disk_place::can_make_image;
use crate::reserved::Reserved;
use crate::whose::whose_at;
use godwit_ownership::ImageRecord;
use godwit_types::datastore::is_device_path;
use godwit_types::vm::{DiskSpec, UIDS, VmSpec};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::os::fd::OwnedFd;
use std::path::Path;

/// A user and a group, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

/// A host, the user and group that all its QEMUs may have, and where no file of a VM may be.
#[derive(Debug, Clone, Copy)]
pub struct Common<'a> {
    pub host: &'a HostName,
    pub user: User,
    pub reserved: &'a Reserved,
}

/// The user and group of a QEMU that is started now, which can read what it boots from.
pub fn of(common: Common<'_>, spec: &VmSpec) -> Result<User, ApiError> {
    let user = common.user;
    let Some(uid) = own(spec) else {
        return check_boot_files(common, spec, user).map(|()| user);
    };
    let alone = User { uid, gid: uid };
    let in_group = User { uid, ..user };
    match check_boot_files(common, spec, alone) {
        Ok(()) => Ok(alone),
        Err(_) => {
            check_boot_files(common, spec, in_group)?;
            let (vm, group) = (&spec.name, user.gid);
            tracing::warn!(
                %vm,
                group,
                "its kernel or initramfs is for the common group alone, so that its QEMU is in that group, and may open and put elsewhere what that group may, as other VMs' images: let everybody read it (chmod a+r)"
            );
            Ok(in_group)
        }
    }
}

/// Whom the images of a VM's disks are opened as, beside the common user, where it has no QEMU.
pub fn of_disks(common: Common<'_>, spec: &VmSpec) -> User {
    let user = common.user;
    own(spec).map_or(user, |uid| User { uid, ..user })
}

/// The VM's own user id, if it has one that this process can become.
fn own(spec: &VmSpec) -> Option<u32> {
    let uid = spec.uid.filter(|uid| UIDS.contains(uid))?;
    let exists = |map| std::fs::read_to_string(map).is_ok_and(|map| is_mapped(&map, uid));
    let is_able = rustix::process::geteuid().is_root()
        && exists("/proc/self/uid_map")
        && exists("/proc/self/gid_map");
    if !is_able {
        tracing::warn!(
            uid,
            "this process cannot become the VM's own user: QEMU runs as the common one"
        );
    }
    is_able.then_some(uid)
}

/// Whether an id exists in a user namespace with this map.
fn is_mapped(map: &str, uid: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        (first..first.saturating_add(count)).contains(&u64::from(uid))
    })
}

/// The images of all disks, with the rights of the VM's own user and of the common one.
pub fn open_disks(
    common: Common<'_>,
    vm: &VmName,
    disks: &[DiskSpec],
    owner: User,
) -> Result<Vec<OwnedFd>, ApiError> {
    let host = common.host;
    let open = |disk: &DiskSpec| {
        let path = Path::new(&disk.path);
        open_file(common, (path, disk.read_only), owner).map_err(|error| {
            let denied = match error {
                DiskError::Denied { uid, .. } => whose_at(path).zip(Some(uid)),
                _ => None,
            };
            match denied.filter(|(record, _)| record.vm != *vm) {
                Some((record, uid)) => of_another((host, vm, disk), &record, uid),
                None => of_disk(host, vm, disk, error),
            }
        })
    };
    disks.iter().map(open).collect()
}

/// One file of a disk, with the same rights.
pub fn open_file(
    common: Common<'_>,
    (path, read_only): (&Path, bool),
    owner: User,
) -> Result<OwnedFd, DiskError> {
    let (user, reserved) = (common.user, common.reserved);
    match open_image(path, read_only, owner.uid, user.gid, reserved) {
        Err(DiskError::Denied { .. }) if owner.uid != user.uid => {
            open_image(path, read_only, user.uid, user.gid, reserved)
        }
        opened => opened,
    }
}

/// Makes an image of so many bytes at the disk's path, with the rights of the VM's own user or of the common one.
pub fn make_disk(
    common: Common<'_>,
    vm: &VmName,
    disk: &DiskSpec,
    bytes: u64,
    owner: User,
) -> Result<OwnedFd, ApiError> {
    let (path, user, reserved) = (Path::new(&disk.path), common.user, common.reserved);
    let made = as_either(owner.uid, user, |uid, gid| {
        make_image(path, bytes, uid, gid, reserved)
    });
    made.map_err(|error| of_disk(common.host, vm, disk, error))
}

/// Whether [`make_disk`] could make it, where `user` is the common one, or it could be opened, where it is to be a block device.
pub fn can_make_disk(
    host: &HostName,
    user: User,
    spec: &VmSpec,
    disk: &DiskSpec,
) -> Result<(), ApiError> {
    let path = Path::new(&disk.path);
    if is_device_path(&disk.path) {
        let uid = own(spec).unwrap_or(user.uid);
        let reserved = &Reserved::default();
        let common = Common {
            host,
            user,
            reserved,
        };
        let owner = User { uid, ..user };
        return open_disks(common, &spec.name, std::slice::from_ref(disk), owner).map(drop);
    }
    let can = as_either(own(spec).unwrap_or(user.uid), user, |uid, gid| {
        can_make_image(path, uid, gid)
    });
    can.map_err(|error| of_disk(host, &spec.name, disk, error))
}

/// As the VM's own user, else as the common one, always in the common group.
fn as_either<R>(
    own: u32,
    common: User,
    make: impl Fn(u32, u32) -> Result<R, DiskError>,
) -> Result<R, DiskError> {
    match make(own, common.gid) {
        Err(DiskError::NoPlace { .. }) if own != common.uid => make(common.uid, common.gid),
        made => made,
    }
}

/// An image that another VM's user alone may open: nobody is told to take it from a guest that may be running.
fn of_another(
    (host, vm, disk): (&HostName, &VmName, &DiskSpec),
    record: &ImageRecord,
    uid: u32,
) -> ApiError {
    let (name, path) = (&disk.name, &disk.path);
    let ImageRecord {
        vm: other,
        disk: its,
        ..
    } = record;
    let message = format!(
        "disk '{name}' of VM '{vm}' on host '{host}': the image {path} is disk '{its}' of VM '{other}' by what it says of itself, and that VM's user alone may open it: give this disk another image; once VM '{other}' is deleted, 'chown {uid} {path}' lets this one have it"
    );
    ApiError::new(ErrorCode::Preflight, message).on_host(host)
}

fn of_disk(host: &HostName, vm: &VmName, disk: &DiskSpec, error: DiskError) -> ApiError {
    let code = match error {
        DiskError::Missing { .. } | DiskError::NoDevice { .. } => ErrorCode::MissingFile,
        // Of whatever host: it is described so.
        DiskError::Kind { .. } | DiskError::Reserved { .. } => ErrorCode::InvalidRequest,
        _ => ErrorCode::Preflight,
    };
    let name = &disk.name;
    let message = format!("disk '{name}' of VM '{vm}' on host '{host}': {error}");
    ApiError::new(code, message).on_host(host)
}

/// Kernel and initramfs, which QEMU opens itself, must be there and be readable for it.
fn check_boot_files(common: Common<'_>, spec: &VmSpec, owner: User) -> Result<(), ApiError> {
    let Common { host, reserved, .. } = common;
    let vm = &spec.name;
    let check = |path: &str| {
        let opened = open_image(Path::new(path), true, owner.uid, owner.gid, reserved);
        let (code, message) = match opened {
            Ok(_) => return Ok(()),
            Err(DiskError::Missing { .. }) => (
                ErrorCode::MissingFile,
                format!(
                    "the file {path} of VM '{vm}' does not exist on host '{host}': copy it there or correct the VM"
                ),
            ),
            Err(DiskError::Denied { .. }) => (
                ErrorCode::Preflight,
                format!(
                    "the file {path} of VM '{vm}' on host '{host}' may not be read by QEMU, which runs as user {} of group {}: let everybody read it (chmod a+r {path}), and pass through the directories above",
                    owner.uid, owner.gid
                ),
            ),
            Err(error) => (
                ErrorCode::InvalidRequest,
                format!("the file {path} of VM '{vm}' on host '{host}' cannot be used: {error}"),
            ),
        };
        Err(ApiError::new(code, message).on_host(host))
    };
    spec.boot_files().try_for_each(check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::whose::tests::say_whose;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, chown};

    const ALL: &str = "         0          0 4294967295\n";

    #[test]
    fn only_ids_that_exist_here_are_taken_on() {
        let last = *UIDS.end();
        assert!(is_mapped(ALL, last));
        assert!(is_mapped(
            "0 100000 65536\n1879048192 200000 5\n",
            *UIDS.start()
        ));
        assert!(!is_mapped("0 100000 65536\n", last));
        assert!(!is_mapped("0 0\nx y z\n", 0));
    }

    fn spec(uid: Option<u32>, lines: &str) -> VmSpec {
        let head = "name = \"web\"\nvcpus = 1\nmemory_mib = 16\n";
        let mut spec = VmSpec::from_toml(&format!("{head}{lines}")).unwrap();
        spec.uid = uid;
        spec
    }

    fn open_all(common: Common<'_>, spec: &VmSpec, owner: User) -> Result<Vec<OwnedFd>, ApiError> {
        open_disks(common, &spec.name, &spec.disks, owner)
    }

    fn file(dir: &Path, name: &str, (uid, gid): (u32, u32), mode: u32) -> String {
        let path = dir.join(name);
        std::fs::write(&path, [0; 512]).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        chown(&path, Some(uid), Some(gid)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn place() -> (HostName, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711)).unwrap();
        (HostName::new("b").unwrap(), dir)
    }

    fn common<'a>(host: &'a HostName, reserved: &'a Reserved) -> Common<'a> {
        let (uid, gid) = (COMMON, COMMON);
        Common {
            host,
            user: User { uid, gid },
            reserved,
        }
    }

    fn is_root() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            println!("skipped: becoming another user needs root");
        }
        is_root
    }

    const COMMON: u32 = 65534;
    const OWN: u32 = *UIDS.start();

    #[test]
    fn a_vm_runs_as_its_own_user_and_one_without_as_the_common_one() {
        if !is_root() {
            return;
        }
        let (host, dir) = place();
        let of = |uid, (owner, group, mode)| {
            let kernel = file(dir.path(), "kernel", (owner, group), mode);
            let spec = spec(uid, &format!("kernel = \"{kernel}\"\n"));
            of(common(&host, &Reserved::default()), &spec).map(|owner| (owner.uid, owner.gid))
        };
        let for_all = (0, 0, 0o644);
        assert_eq!(of(None, for_all).unwrap(), (COMMON, COMMON));
        let never_root = of(Some(0), for_all).unwrap();
        assert_eq!(never_root, (COMMON, COMMON), "whatever a record says");
        assert_eq!(of(Some(OWN), for_all).unwrap(), (OWN, OWN));
        // Its kernel is for the common group alone: the documentation allows it.
        assert_eq!(of(Some(OWN), (0, COMMON, 0o640)).unwrap(), (OWN, COMMON));
        assert_eq!(of(None, (0, COMMON, 0o640)).unwrap(), (COMMON, COMMON));
        let error = of(Some(OWN), (0, 0, 0o600)).unwrap_err().to_string();
        let words = "runs as user 1879048192 of group 65534";
        assert!(error.contains(words), "{error}");
        std::fs::remove_file(dir.path().join("kernel")).unwrap();
        let gone = dir.path().join("kernel").display().to_string();
        let spec = spec(Some(OWN), &format!("kernel = \"{gone}\"\n"));
        let error = super::of(common(&host, &Reserved::default()), &spec).unwrap_err();
        assert_eq!(error.code, ErrorCode::MissingFile);
    }

    #[test]
    fn a_disk_for_the_common_user_or_group_or_the_vm_is_opened_and_no_other() {
        if !is_root() {
            return;
        }
        let (host, dir) = place();
        let alone = User { uid: OWN, gid: OWN };
        let open = |owner, mode| {
            let path = file(dir.path(), "disk", owner, mode);
            let disk = format!("kernel = \"/k\"\n[[disk]]\nname = \"d\"\npath = \"{path}\"\n");
            let spec = spec(Some(OWN), &disk);
            let reserved = Reserved::default();
            open_all(common(&host, &reserved), &spec, alone).map(|files| files.len())
        };
        assert_eq!(open((OWN, 0), 0o600).unwrap(), 1);
        assert_eq!(open((COMMON, 0), 0o600).unwrap(), 1);
        assert_eq!(open((0, COMMON), 0o660).unwrap(), 1);
        for other in [(0, 0), (OWN + 1, OWN + 1)] {
            let error = open(other, 0o660).unwrap_err();
            assert_eq!(error.code, ErrorCode::Preflight, "as one that is missing");
            let error = error.to_string();
            assert!(error.contains("(uid 65534) may not open"), "{error}");
        }
        // Another VM may be working with it.
        let path = dir.path().join("disk");
        say_whose(&std::fs::File::options().write(true).open(path).unwrap());
        let error = open((OWN + 1, OWN + 1), 0o600).unwrap_err().to_string();
        let told = ["is disk 'data' of VM 'db'", "once VM 'db' is deleted"];
        assert!(told.iter().all(|words| error.contains(words)), "{error}");
    }

    #[test]
    fn no_disk_and_no_kernel_lies_where_the_host_keeps_records_or_memory() {
        if !is_root() {
            return;
        }
        let (host, dir) = place();
        let ram = dir.path().join("ram");
        std::fs::create_dir(&ram).unwrap();
        std::fs::set_permissions(&ram, Permissions::from_mode(0o711)).unwrap();
        let victim = file(&ram, "victim.1", (COMMON, COMMON), 0o644);
        let spec = spec(
            Some(OWN),
            &format!("kernel = \"{victim}\"\n[[disk]]\nname = \"d\"\npath = \"{victim}\"\n"),
        );
        let alone = User { uid: OWN, gid: OWN };
        let nothing = Reserved::default();
        assert!(open_all(common(&host, &nothing), &spec, alone).is_ok());
        assert!(of(common(&host, &nothing), &spec).is_ok());
        for reserved in [
            Reserved::new(Vec::new(), ram),
            Reserved::new(vec![dir.path().to_owned()], Default::default()),
        ] {
            let refused = [
                open_all(common(&host, &reserved), &spec, alone).map(drop),
                of(common(&host, &reserved), &spec).map(drop),
            ];
            for refused in refused {
                let error = refused.unwrap_err().to_string();
                assert!(error.contains("put the file elsewhere"), "{error}");
            }
        }
    }
}
