//! Where a VM's disks are, and what its guest may have of them, as its holder says.
//!
//! Owns nothing. Refuses: what a person has described otherwise since to be written over, and a path to which no move
//! brings that disk: a host that lies would have the next one open any file for the VM. It can still name a device, or a file of the disk's own
//! name: labels and records of images guard those.

use super::VmEntry;
use godwit_types::datastore::{Datastore, Datastores, datastore_of};
use godwit_types::vm::DiskSpec;
use godwit_types::{VmName, VmSpec};
use std::path::Path;

/// Where a VM's disks are and how they are limited is its holder's to say, who moves and limits them; what a person has described otherwise
/// since counts from the next start. Returns whether anything has changed.
pub(super) fn follow(entry: &mut VmEntry, held: &VmSpec, datastores: &Datastores) -> bool {
    let Some(resolved) = entry.resolved.as_mut().filter(|_| held.check().is_ok()) else {
        return false;
    };
    let mut is_news = false;
    for now in &held.disks {
        let Some(known) = resolved.disks.iter_mut().find(|disk| disk.name == now.name) else {
            continue;
        };
        let mut described = entry.spec.disks.iter_mut();
        let mut described = described.find(|disk| disk.name == now.name);
        is_news |= follow_limits(known, described.as_deref_mut(), now);
        if let Some((_, store)) = datastore_of(datastores, &now.path)
            && is_moved(&held.name, known, now, store)
        {
            is_news |= follow_place(known, described, now, store);
        }
    }
    is_news
}

/// Whether a move may have brought the disk there: it makes an image of this one name, and in the destination's datastore of the same name an image
/// keeps its own.
fn is_moved(vm: &VmName, known: &DiskSpec, now: &DiskSpec, store: &Datastore) -> bool {
    let file = |path| Path::new(path).file_name();
    let is_made = !known.read_only && store.image_of(vm, &now.name) == now.path;
    is_made || file(&known.path) == file(&now.path)
}

fn follow_limits(known: &mut DiskSpec, described: Option<&mut DiskSpec>, now: &DiskSpec) -> bool {
    if known.limits == now.limits {
        return false;
    }
    if let Some(described) = described.filter(|disk| disk.limits == known.limits) {
        described.limits = now.limits;
    }
    known.limits = now.limits;
    true
}

fn follow_place(
    known: &mut DiskSpec,
    described: Option<&mut DiskSpec>,
    now: &DiskSpec,
    store: &Datastore,
) -> bool {
    if known.path == now.path {
        return false;
    }
    let shared = now.shared && store.shared && !store.is_device();
    if let Some(described) = described.filter(|disk| disk.path == known.path) {
        described.path.clone_from(&now.path);
        described.shared = shared;
    }
    known.path.clone_from(&now.path);
    known.shared = shared;
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::DatastoreName;
    use godwit_types::vm::DiskLimits;

    /// As a move names it.
    const NEW: &str = "/store/web-root.raw";

    fn on(path: &str) -> VmSpec {
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        spec.disks = vec![DiskSpec::new("root", path)];
        spec
    }

    fn stores() -> Datastores {
        let name = DatastoreName::new("s").unwrap();
        [(name, Datastore::new("/store", true))].into()
    }

    fn entry(described: &str, resolved: Option<&str>) -> VmEntry {
        VmEntry {
            spec: on(described),
            resolved: resolved.map(on),
        }
    }

    #[test]
    fn a_disk_that_its_holder_has_moved_is_described_where_it_is() {
        let mut moved = entry("/old", Some("/old"));
        let mut held = on(NEW);
        held.disks[0].shared = true;
        assert!(follow(&mut moved, &held, &stores()));
        let both = [&moved.spec, moved.resolved.as_ref().unwrap()];
        for spec in both {
            assert_eq!(
                (spec.disks[0].path.as_str(), spec.disks[0].shared),
                (NEW, true)
            );
        }
        assert!(
            !follow(&mut moved, &held, &stores()),
            "that is no news any more"
        );
    }

    #[test]
    fn what_a_person_described_otherwise_since_stays() {
        let mut edited = entry("/theirs", Some("/old"));
        assert!(follow(&mut edited, &on(NEW), &stores()));
        assert_eq!(edited.spec.disks[0].path, "/theirs");
        assert_eq!(edited.resolved.unwrap().disks[0].path, NEW);
    }

    /// A host that lied had another VM's image opened for this one, on another host.
    #[test]
    fn a_holder_does_not_name_a_file_that_no_move_makes() {
        let other = "/store/victim-root.raw";
        let mut known = entry("/old", Some("/old"));
        assert!(!follow(&mut known, &on(other), &stores()));
        let read_only = |path| {
            let mut spec = on(path);
            spec.disks[0].read_only = true;
            spec
        };
        known = VmEntry {
            spec: read_only("/old"),
            resolved: Some(read_only("/old")),
        };
        assert!(!follow(&mut known, &read_only(NEW), &stores()));
        assert_eq!(known.spec.disks[0].path, "/old");
        // A migration to a host whose datastore of that name is elsewhere.
        assert!(follow(&mut known, &read_only("/store/old"), &stores()));
    }

    #[test]
    fn limits_follow_the_holder_where_nobody_has_described_others_since() {
        let of = |iops| DiskLimits {
            iops,
            mib_per_s: None,
        };
        let mut held = on("/old");
        held.disks[0].limits = of(Some(500));
        let mut known = entry("/old", Some("/old"));
        assert!(follow(&mut known, &held, &stores()));
        assert!(!follow(&mut known, &held, &stores()), "that is no news");
        let resolved = known.resolved.as_mut().unwrap();
        assert_eq!(known.spec.disks[0].limits, of(Some(500)));
        assert_eq!(resolved.disks[0].limits, of(Some(500)));
        // Wherever it is described to be from the next start on.
        known.spec.disks[0].path = "/theirs".into();
        held.disks[0].limits = of(Some(400));
        assert!(follow(&mut known, &held, &stores()));
        assert_eq!(known.spec.disks[0].limits, of(Some(400)));
        known.spec.disks[0].limits = of(Some(7));
        held.disks[0].limits = of(None);
        assert!(follow(&mut known, &held, &stores()));
        assert_eq!(known.spec.disks[0].limits, of(Some(7)));
    }

    #[test]
    fn a_host_that_says_what_is_no_description_or_in_no_datastore_is_not_followed() {
        let mut known = entry("/old", Some("/old"));
        assert!(!follow(&mut known, &on("not/absolute"), &stores()));
        assert!(!follow(&mut known, &on("/elsewhere/new"), &stores()));
        assert!(!follow(&mut entry("/old", None), &on(NEW), &stores()));
        assert_eq!(known.spec.disks[0].path, "/old");
    }
}
