//! Where a VM's disks come to on another host.
//!
//! Pure: told by the description and by what both hosts say of their datastores; whether there is room is the destination's
//! to say. Refuses: a choice for a disk that does not go along, a datastore that the destination does not have, a disk that
//! would come to the path of a device that is no datastore there, and two on one device.

use crate::error::{Outcome, refuse};
use godwit_types::datastore::{Datastores, datastore_of, is_device_path};
use godwit_types::text::listed;
use godwit_types::vm::DiskSpec;
use godwit_types::{DatastoreName, ErrorCode, HostName, VmName, VmSpec};
use std::collections::BTreeMap;
use std::path::Path;

/// The VM as the destination is to have it.
pub fn there(
    spec: &VmSpec,
    from: &Datastores,
    (host, to): (&HostName, &Datastores),
    wish: &BTreeMap<String, DatastoreName>,
) -> Outcome<VmSpec> {
    let vm = &spec.name;
    if let Some(name) = wish.keys().find(|name| !has(spec, name)) {
        return refuse(ErrorCode::InvalidRequest, spec.no_disk(name));
    }
    let mut there = spec.clone();
    for disk in &mut there.disks {
        let name = &disk.name;
        let Some(store) = wish.get(name) else {
            if let Some(path) = same_store(vm, disk, from, to) {
                disk.path = path;
            } else if disk.goes_along() && is_device_path(&disk.path) {
                let path = &disk.path;
                return refuse(
                    ErrorCode::NotMigratable,
                    format!(
                        "disk '{name}' of VM {vm} cannot go along to host {host} as it is: its path {path} is a device of the host that it is on, so name a datastore ('godwit vm migrate {vm} --to {host} --disk {name}=DATASTORE')"
                    ),
                );
            }
            continue;
        };
        if !disk.goes_along() {
            let why = match disk.shared {
                true => "is on storage that both hosts have: 'godwit vm move-disk' moves it",
                false => "is only read, and does not go along",
            };
            return refuse(
                ErrorCode::InvalidRequest,
                format!("disk '{name}' of VM {vm} {why}"),
            );
        }
        let found = to.get(store).ok_or_else(|| {
            let known = listed(to.keys());
            format!("host {host} has no datastore '{store}' (it has {known}): name its directory or block device below [datastores] in /etc/godwit/host.toml there, and restart its agent")
        });
        match found {
            Ok(found) if found.shared => {
                return refuse(
                    ErrorCode::InvalidRequest,
                    format!(
                        "datastore '{store}' of host {host} is shared storage: move the disk there first, on a host that has it, with 'godwit vm move-disk {vm} {name} --to {store}'"
                    ),
                );
            }
            Ok(found) => disk.path = found.image_of(vm, name),
            Err(why) => return refuse(ErrorCode::InvalidRequest, why),
        }
    }
    one_each(&there, host)?;
    Ok(there)
}

/// A device holds one disk.
fn one_each(there: &VmSpec, host: &HostName) -> Outcome<()> {
    let on_devices = there.disks.iter().filter(|disk| is_device_path(&disk.path));
    let mut on_devices = on_devices.filter(|disk| disk.goes_along());
    let is_other =
        |one: &DiskSpec, other: &DiskSpec| one.name != other.name && one.path == other.path;
    let other = |one: &DiskSpec| there.disks.iter().find(|other| is_other(one, other));
    match on_devices.find_map(|disk| Some((disk, other(disk)?))) {
        None => Ok(()),
        Some((one, other)) => refuse(
            ErrorCode::InvalidRequest,
            format!(
                "disks '{}' and '{}' of VM {} would both come to {} of host {host}, a block device, which holds one disk: name another datastore for one of them",
                one.name, other.name, there.name, one.path
            ),
        ),
    }
}

fn has(spec: &VmSpec, disk: &str) -> bool {
    spec.disks.iter().any(|found| found.name == disk)
}

/// The path of a disk's file in the destination's datastore of the name of the one that it is in.
fn same_store(vm: &VmName, disk: &DiskSpec, from: &Datastores, to: &Datastores) -> Option<String> {
    let (name, store) = datastore_of(from, &disk.path)?;
    if store.is_device() {
        return Some(to.get(name)?.image_of(vm, &disk.name));
    }
    let file = Path::new(&disk.path).file_name()?.to_str()?;
    Some(to.get(name)?.path_of(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::datastore::Datastore;

    fn disk(name: &str, path: &str) -> DiskSpec {
        DiskSpec::new(name, path)
    }

    fn store(name: &str, path: &str, shared: bool) -> (DatastoreName, Datastore) {
        (
            DatastoreName::new(name).unwrap(),
            Datastore::new(path, shared),
        )
    }

    /// Disk root is in datastore `fast` of a, disk data in none, disk both on shared storage; the paths on b, or the refusal.
    fn paths(wish: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let from = [store("fast", "/a/fast", false), store("san", "/san", true)].into();
        let to = [
            store("fast", "/b/fast", false),
            store("slow", "/b/slow", false),
            store("san", "/mnt/san", true),
        ];
        let (host, to) = (HostName::new("b").unwrap(), to.into());
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        spec.disks = vec![
            disk("root", "/a/fast/r.raw"),
            disk("data", "/images/d.raw"),
            DiskSpec {
                shared: true,
                ..disk("both", "/san/b.raw")
            },
        ];
        let wish = wish.iter().map(|(disk, store)| {
            let store = DatastoreName::new(*store).unwrap();
            ((*disk).to_owned(), store)
        });
        let there = there(&spec, &from, (&host, &to), &wish.collect());
        let there = there.map_err(|error| error.message)?;
        Ok(there.disks.into_iter().map(|disk| disk.path).collect())
    }

    #[test]
    fn a_disk_comes_to_the_datastore_of_the_same_name_and_else_to_its_own_path() {
        let all = paths(&[]).unwrap();
        assert_eq!(all, ["/b/fast/r.raw", "/images/d.raw", "/mnt/san/b.raw"]);
    }

    #[test]
    fn a_disk_comes_to_the_datastore_that_is_named() {
        let all = paths(&[("root", "slow"), ("data", "fast")]).unwrap();
        assert_eq!(all[..2], ["/b/slow/web-root.raw", "/b/fast/web-data.raw"]);
    }

    #[test]
    fn what_cannot_be_chosen_is_refused_with_the_reason() {
        for (wish, words) in [
            (("swap", "fast"), "no disk 'swap' (it has root, data, both)"),
            (
                ("root", "tape"),
                "no datastore 'tape' (it has fast, san, slow)",
            ),
            (
                ("root", "san"),
                "is shared storage: move the disk there first",
            ),
            (("both", "fast"), "on storage that both hosts have"),
        ] {
            let refused = paths(&[wish]).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
    }

    #[test]
    fn a_disk_on_a_device_goes_along_to_a_datastore_that_is_named() {
        let to: Datastores = [
            store("slow", "/b/slow", false),
            store("raw", "/dev/vg0/lun", false),
        ]
        .into();
        let host = HostName::new("b").unwrap();
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        spec.disks = vec![disk("root", "/dev/vg0/web")];
        let there = |spec: &VmSpec, wish: Option<&str>| {
            let wish = wish.map(|store| ("root".to_owned(), DatastoreName::new(store).unwrap()));
            let wish = wish.into_iter().collect();
            let there = there(spec, &Datastores::new(), (&host, &to), &wish);
            let there = there.map_err(|error| error.message)?;
            Ok::<_, String>(there.disks[0].path.clone())
        };
        assert_eq!(there(&spec, Some("slow")).unwrap(), "/b/slow/web-root.raw");
        assert_eq!(there(&spec, Some("raw")).unwrap(), "/dev/vg0/lun");
        let refused = there(&spec, None).unwrap_err();
        let words = "its path /dev/vg0/web is a device of the host that it is on, so name a datastore ('godwit vm migrate web --to b --disk root=DATASTORE')";
        assert!(refused.contains(words), "{refused}");
        // What does not go along may be a device of every host.
        for (read_only, shared) in [(true, false), (false, true)] {
            (spec.disks[0].read_only, spec.disks[0].shared) = (read_only, shared);
            assert_eq!(there(&spec, None).unwrap(), "/dev/vg0/web");
        }
    }
    #[test]
    fn a_device_of_the_same_name_takes_the_disk_of_a_directory_or_a_device_and_no_second_one() {
        let host = HostName::new("b").unwrap();
        let lun = |path: &str| Datastores::from([store("lun", path, false)]);
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        let goes = |spec: &VmSpec, from: &str, to: &str| {
            let there = there(spec, &lun(from), (&host, &lun(to)), &BTreeMap::new());
            let there = there.map_err(|error| error.message)?;
            Ok::<_, String>(there.disks[0].path.clone())
        };
        spec.disks = vec![disk("root", "/dev/a/lun")];
        assert_eq!(
            goes(&spec, "/dev/a/lun", "/dev/b/lun").unwrap(),
            "/dev/b/lun"
        );
        assert_eq!(
            goes(&spec, "/dev/a/lun", "/b/lun").unwrap(),
            "/b/lun/web-root.raw"
        );
        spec.disks = vec![disk("root", "/a/lun/r.raw"), disk("data", "/a/lun/d.raw")];
        let refused = goes(&spec, "/a/lun", "/dev/b/lun").unwrap_err();
        assert!(
            refused.contains("disks 'root' and 'data' of VM web would both come"),
            "{refused}"
        );
        assert_eq!(goes(&spec, "/a/lun", "/b/lun").unwrap(), "/b/lun/r.raw");
    }
}
