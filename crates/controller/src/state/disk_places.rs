//! Where a VM's disks are, and what its guest may have of them, as its holder says.
//!
//! Owns nothing. Refuses: what a person has described otherwise since to be written over, and a path that is in no datastore of
//! that host, since disks are moved to no other.

use super::VmEntry;
use godwit_types::VmSpec;
use godwit_types::datastore::{Datastores, datastore_of};
use godwit_types::vm::DiskSpec;

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
        is_news |= follow_place(known, described, now, datastores);
    }
    is_news
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
    datastores: &Datastores,
) -> bool {
    let Some((_, store)) = datastore_of(datastores, &now.path).filter(|_| known.path != now.path)
    else {
        return false;
    };
    let shared = now.shared && store.shared;
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
    use godwit_types::datastore::Datastore;
    use godwit_types::vm::DiskLimits;
    use godwit_types::{DatastoreName, VmName};

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
        let mut held = on("/store/new");
        held.disks[0].shared = true;
        assert!(follow(&mut moved, &held, &stores()));
        let both = [&moved.spec, moved.resolved.as_ref().unwrap()];
        for spec in both {
            assert_eq!(
                (spec.disks[0].path.as_str(), spec.disks[0].shared),
                ("/store/new", true)
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
        assert!(follow(&mut edited, &on("/store/new"), &stores()));
        assert_eq!(edited.spec.disks[0].path, "/theirs");
        assert_eq!(edited.resolved.unwrap().disks[0].path, "/store/new");
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
        assert!(!follow(
            &mut entry("/old", None),
            &on("/store/new"),
            &stores()
        ));
        assert_eq!(known.spec.disks[0].path, "/old");
    }
}
