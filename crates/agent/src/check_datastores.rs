//! The part of `host check` that looks at datastores: whether each is there, can be written by QEMU's users, and has room.
//!
//! Makes a file that never has a name, and keeps nothing. Owns nothing. Refuses: to wait for storage for longer than [`PATIENCE`].

use crate::check::{failed, note, ok, warning};
use crate::config::HostConfig;
use crate::datastore_rooms::said;
use crate::datastores::remount;
use crate::looking;
use crate::users::{self, User};
use godwit_qemu::device::device_room;
use godwit_qemu::disk::{DiskError, open_image};
use godwit_qemu::disk_place::can_make_image;
use godwit_qemu::holding::device_must_be_nobodys;
use godwit_qemu::reserved::Reserved;
use godwit_types::DatastoreName;
use godwit_types::datastore::{Datastore, DatastoreRoom, is_device_path};
use godwit_types::host::Check;
use godwit_types::vm::UIDS;
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

const NAME: &str = "datastore";
/// Longest wait for a datastore's storage.
const PATIENCE: Duration = Duration::from_secs(3);
/// Free room, percent, below which it is time to do something.
const FREE_GOOD_PERCENT: u64 = 5;

/// A line for each datastore.
pub(crate) fn check(config: &HostConfig) -> Vec<Check> {
    let user = users::qemu_user(config.qemu_user.as_deref()).unwrap_or(users::NOBODY);
    let stores = config.datastores.iter();
    stores
        .map(|(name, store)| {
            let who = (user, &*config.state_dir);
            with_whose_remedy(name, in_time(name, store, who, PATIENCE))
        })
        .collect()
}

/// Remedies are told apart from what was found.
fn with_whose_remedy(name: &DatastoreName, mut check: Check) -> Check {
    if !check.remedy.is_empty() {
        check.remedy = format!("datastore {name}: {}", check.remedy);
    }
    check
}

/// `who`: QEMU's user, and where the records of this host's VMs are.
fn in_time(
    name: &DatastoreName,
    store: &Datastore,
    (user, state_dir): (User, &Path),
    patience: Duration,
) -> Check {
    let (named, path, until) = (name.clone(), store.path.clone(), Instant::now() + patience);
    let state_dir = state_dir.to_owned();
    let looked = looking::look(&store.path, patience, move || {
        look(&named, &path, (user, &state_dir))
    });
    let found = match looked {
        Ok(Some(found)) => found.recv_timeout(until.saturating_duration_since(Instant::now())),
        Ok(None) => Err(RecvTimeoutError::Timeout),
        Err(_) => Err(RecvTimeoutError::Disconnected),
    };
    match found {
        Ok(found) => found,
        Err(RecvTimeoutError::Timeout) => failed(
            NAME,
            format!(
                "{name}: its storage does not answer within {} s: {}",
                patience.as_secs(),
                store.path
            ),
            "see whether the storage behind it is reached: disks there stand still meanwhile",
        ),
        Err(RecvTimeoutError::Disconnected) => failed(
            NAME,
            format!(
                "{name}: {} could not be looked at: Godwit's own thread for it has failed",
                store.path
            ),
            "see what 'journalctl -u godwit-agent' says, and check again",
        ),
    }
}

fn look(name: &DatastoreName, path: &str, (user, state_dir): (User, &Path)) -> Check {
    if is_device_path(path) {
        return look_at_device(name, path, (user, state_dir));
    }
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => {
            return failed(
                NAME,
                format!("{name}: {path} is no directory"),
                "correct [datastores] in host.toml and restart godwit-agent",
            );
        }
        Err(error) => {
            return failed(
                NAME,
                format!("{name}: {path} is not there: {error}"),
                format!(
                    "mount it, or make it: install -d -g {} -m 3770 {path}",
                    user.gid
                ),
            );
        }
    }
    let found = match statvfs(Path::new(path)) {
        Ok(found) => found,
        Err(error) => {
            return failed(
                NAME,
                format!("{name}: {path} cannot be looked at: {error}"),
                "see that its storage is well",
            );
        }
    };
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return warning(
            NAME,
            format!("{name}: {path} is mounted for reading only: no disk can come to it"),
            format!(
                "where it is meant to be so, for images that linked disks begin as, nothing is to be done; else see in 'dmesg' whether its storage failed, and mount it for writing: {}",
                remount(path)
            ),
        );
    }
    let room = said(&found);
    not_writable(name, path, user).unwrap_or_else(|| judge_room(name, path, room))
}

/// A device, and whether a disk can come to it. One that holds a disk is well.
fn look_at_device(name: &DatastoreName, path: &str, (user, state_dir): (User, &Path)) -> Check {
    let room = match device_room(path) {
        Ok(room) => room,
        Err(error) => {
            return failed(
                NAME,
                format!("{name}: the block device {path} cannot be looked at: {error}"),
                "see that it is there and that its storage answers, or correct [datastores] in host.toml and restart godwit-agent",
            );
        }
    };
    let open = |uid| open_image(Path::new(path), false, uid, user.gid, &Reserved::default());
    if rustix::process::geteuid().is_root()
        && open(user.uid).or_else(|_| open(*UIDS.start())).is_err()
    {
        return failed(
            NAME,
            format!("{name}: QEMU's users may not open the block device {path}"),
            format!(
                "let their group do so: chgrp {} {path}; chmod 660 {path}, and so that it lasts over a boot by a rule of udev, as docs/configuration.md has it",
                user.gid
            ),
        );
    }
    if room.is_write_protected {
        return failed(
            NAME,
            format!("{name}: the block device {path} is write-protected"),
            format!("see why, and let it be written: blockdev --setrw {path}"),
        );
    }
    let mib = room.bytes >> 20;
    let is_anothers = || device_must_be_nobodys(state_dir, None, path).err();
    // What a label tells, it tells better.
    let taken = match room.holds {
        Some(_) => None,
        None => is_anothers().or(room.taken),
    };
    match (room.holds, taken) {
        (Some(holds), _) => ok(
            NAME,
            format!("{name}: the block device {path} holds {holds}"),
        ),
        (None, None) => ok(
            NAME,
            format!("{name}: the block device {path} is free for a disk of at most {mib} MiB"),
        ),
        (None, Some(why)) => warning(
            NAME,
            format!("{name}: no disk can come: {why}"),
            "see what is on it",
        ),
    }
}

/// What keeps QEMU's users from making images there, if anything does. VMs have users of their own in the common group.
fn not_writable(name: &DatastoreName, path: &str, user: User) -> Option<Check> {
    if !rustix::process::geteuid().is_root() {
        let found = format!("{name}: only root can tell whether QEMU's users may write in {path}");
        return Some(note(NAME, found, ""));
    }
    let image = Path::new(path).join("image.raw");
    let can = |uid| can_make_image(&image, uid, user.gid);
    match can(user.uid).or_else(|_| can(*UIDS.start())).err()? {
        DiskError::NoPlace { .. } => Some(failed(
            NAME,
            format!("{name}: QEMU's users may not make images in {path}"),
            format!(
                "chown 0:{} {path}; chmod 3770 {path}, and let that group pass through the directories above",
                user.gid
            ),
        )),
        sticky @ DiskError::Sticky { .. } => Some(failed(
            NAME,
            format!("{name}: {sticky}"),
            format!("chown root {path}"),
        )),
        // A full one may not even take a file without a name; its room says so.
        DiskError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => None,
        other => Some(failed(
            NAME,
            format!("{name}: no image can be made in {path}: {other}"),
            "give the datastore another directory in host.toml and restart godwit-agent",
        )),
    }
}

fn judge_room(name: &DatastoreName, path: &str, room: DatastoreRoom) -> Check {
    let DatastoreRoom {
        free_mib,
        total_mib,
    } = room;
    let found =
        format!("{name}: {free_mib} of {total_mib} MiB are free for disks that come in {path}");
    if free_mib == 0 {
        return failed(
            NAME,
            format!("{found}: it is full"),
            "make room there: no disk can come, and guests whose disks grow there pause",
        );
    }
    if free_mib < total_mib / 100 * FREE_GOOD_PERCENT {
        return warning(
            NAME,
            found,
            "make room there, or move disks elsewhere with 'godwit vm move-disk'",
        );
    }
    ok(NAME, found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datastores::tests::{has_disk_at, has_own_mounts, label_at, while_read_only};
    use crate::looking::Looking;
    use crate::test_support::TestHost;
    use godwit_testkit::file_system::Device;
    use godwit_types::host::CheckStatus;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    fn name() -> DatastoreName {
        DatastoreName::new("fast").unwrap()
    }

    fn looked(path: &str) -> Check {
        let store = Datastore::new(path, false);
        in_time(
            &name(),
            &store,
            (users::NOBODY, nowhere()),
            Duration::from_secs(60),
        )
    }

    /// A loop device that everybody may open, and a link to it below `/dev`, as every volume has one.
    struct Volume {
        device: Device,
        link: String,
    }

    impl Volume {
        fn new(name: &str) -> Option<Self> {
            let device = Device::of(8 << 20)?;
            let link = format!("/dev/godwit-test-{name}-{}", std::process::id());
            std::fs::set_permissions(device.path(), Permissions::from_mode(0o666)).unwrap();
            std::os::unix::fs::symlink(device.path(), &link).unwrap();
            Some(Self { device, link })
        }

        fn looked(&self, state_dir: &Path) -> Check {
            let user = User {
                uid: 65_534,
                gid: 65_534,
            };
            look_at_device(&name(), &self.link, (user, state_dir))
        }
    }

    impl Drop for Volume {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.link);
            let _ = std::fs::set_permissions(self.device.path(), Permissions::from_mode(0o660));
        }
    }

    /// Where no VM is known.
    fn nowhere() -> &'static Path {
        Path::new("/nonexistent")
    }

    #[test]
    fn a_device_that_is_named_through_a_link_is_looked_at_as_itself() {
        let Some(volume) = Volume::new("check") else {
            return;
        };
        let check = volume.looked(nowhere());
        assert_eq!(check.status, CheckStatus::Ok, "{check:?}");
        assert!(check.found.contains("at most 7 MiB"), "{check:?}");
        std::fs::write(volume.device.path(), [7; 512]).unwrap();
        let check = volume.looked(nowhere());
        assert_eq!(check.status, CheckStatus::Warning, "{check:?}");
    }

    #[test]
    fn a_device_that_is_write_protected_fails_also_where_it_holds_a_disk() {
        let Some(volume) = Volume::new("protected") else {
            return;
        };
        for holds in [false, true] {
            if holds {
                label_at(&volume.device);
            }
            volume.device.protect(true).unwrap();
            let check = volume.looked(nowhere());
            volume.device.protect(false).unwrap();
            assert_eq!(check.status, CheckStatus::Failed, "{check:?}");
            assert!(check.found.contains("is write-protected"), "{check:?}");
            assert!(check.remedy.contains("blockdev --setrw"), "{check:?}");
            assert_eq!(volume.looked(nowhere()).status, CheckStatus::Ok);
        }
    }

    #[test]
    fn a_device_that_a_vm_has_without_a_label_is_not_called_free() {
        let Some(volume) = Volume::new("anothers") else {
            return;
        };
        let host = TestHost::new();
        assert_eq!(
            volume.looked(&host.config.state_dir).status,
            CheckStatus::Ok
        );
        has_disk_at(&host, "db", volume.device.path());
        let check = volume.looked(&host.config.state_dir);
        assert_eq!(check.status, CheckStatus::Warning, "{check:?}");
        assert!(
            check.found.contains("is disk 'root' of VM 'db'"),
            "{check:?}"
        );
    }

    #[test]
    fn a_datastore_that_is_missing_or_a_file_fails_with_its_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone").display().to_string();
        let found = looked(&gone);
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(found.found.contains("is not there") && found.remedy.contains("install -d"));
        let told = with_whose_remedy(&name(), found);
        assert!(
            told.remedy.starts_with("datastore fast: mount it"),
            "{told:?}"
        );
        std::fs::write(&gone, "").unwrap();
        let found = looked(&gone);
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(found.found.contains("is no directory"), "{}", found.found);
        // A directory of devices is in memory: a disk there would be gone with the next boot.
        let found = looked("/dev/pts");
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(
            found.found.contains("cannot be looked at"),
            "{}",
            found.found
        );
    }

    #[test]
    fn a_datastore_that_qemus_users_may_not_write_fails_until_they_may() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: another user's rights need root");
            return;
        }
        let parent = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::set_permissions(parent.path(), Permissions::from_mode(0o755)).unwrap();
        let dir = parent.path().join("fast");
        std::fs::create_dir(&dir).unwrap();
        let path = dir.display().to_string();
        let found = looked(&path);
        assert_eq!(found.status, CheckStatus::Failed, "{found:?}");
        assert!(found.remedy.contains(&format!("chmod 3770 {path}")));
        std::os::unix::fs::chown(&dir, None, Some(users::NOBODY.gid)).unwrap();
        std::fs::set_permissions(&dir, Permissions::from_mode(0o3770)).unwrap();
        let found = looked(&path);
        assert!(!found.found.contains("may not"), "{found:?}");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn a_datastore_that_is_mounted_for_reading_only_may_be_meant_to_be() {
        if !has_own_mounts(
            "check_datastores::tests::a_datastore_that_is_mounted_for_reading_only_may_be_meant_to_be",
        ) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().display().to_string();
        while_read_only(directory.path(), || {
            let found = looked(&path);
            assert_eq!(found.status, CheckStatus::Warning, "{found:?}");
            assert!(found.found.contains("no disk can come to it"), "{found:?}");
            assert!(found.remedy.contains("linked disks begin as"), "{found:?}");
            assert!(found.remedy.contains("mount -o remount,rw"), "{found:?}");
        });
    }

    #[test]
    fn little_room_is_warned_of_and_none_fails() {
        let judged = |free_mib| {
            let room = DatastoreRoom {
                free_mib,
                total_mib: 10_000,
            };
            judge_room(&name(), "/srv/fast", room)
        };
        for (free_mib, status) in [
            (0, CheckStatus::Failed),
            (499, CheckStatus::Warning),
            (500, CheckStatus::Ok),
        ] {
            assert_eq!(judged(free_mib).status, status, "{free_mib}");
        }
        assert!(judged(499).found.contains("499 of 10000 MiB"));
    }

    #[test]
    fn one_whose_storage_hangs_is_told_and_waited_for_by_one_thread() {
        let path = "/a/datastore/that/somebody/looks/at";
        let looking = Looking::begin(path, PATIENCE).unwrap();
        let store = Datastore::new(path, false);
        let found = in_time(
            &name(),
            &store,
            (users::NOBODY, nowhere()),
            Duration::from_millis(10),
        );
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(found.found.contains("does not answer"), "{}", found.found);
        drop(looking);
        assert!(looked(path).found.contains("is not there"));
    }
}
