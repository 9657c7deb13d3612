//! Where a VM's disks are, as its holder says.
//!
//! Owns nothing. Refuses: what a person has described otherwise since to be written over.

use super::VmEntry;
use godwit_types::VmSpec;

/// Where a VM's disks are is its holder's to say, who moves them; what a person has described otherwise since counts from the
/// next start. Returns whether anything has changed.
pub(super) fn follow(entry: &mut VmEntry, held: &VmSpec) -> bool {
    let Some(resolved) = entry.resolved.as_mut().filter(|_| held.check().is_ok()) else {
        return false;
    };
    let mut is_news = false;
    for now in &held.disks {
        let known = resolved.disks.iter_mut().find(|disk| disk.name == now.name);
        let Some(known) = known.filter(|known| known.path != now.path) else {
            continue;
        };
        let described = entry.spec.disks.iter_mut();
        let mut described = described.filter(|disk| disk.name == now.name);
        if let Some(described) = described.find(|disk| disk.path == known.path) {
            described.path.clone_from(&now.path);
            described.shared = now.shared;
        }
        known.path.clone_from(&now.path);
        known.shared = now.shared;
        is_news = true;
    }
    is_news
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::VmName;
    use godwit_types::vm::DiskSpec;

    fn on(path: &str) -> VmSpec {
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        spec.disks = vec![DiskSpec {
            name: "root".into(),
            path: path.into(),
            read_only: false,
            shared: false,
            from: None,
            size_gib: None,
        }];
        spec
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
        let mut held = on("/new");
        held.disks[0].shared = true;
        assert!(follow(&mut moved, &held));
        let both = [&moved.spec, moved.resolved.as_ref().unwrap()];
        for spec in both {
            assert_eq!(
                (spec.disks[0].path.as_str(), spec.disks[0].shared),
                ("/new", true)
            );
        }
        assert!(!follow(&mut moved, &held), "that is no news any more");
    }

    #[test]
    fn what_a_person_described_otherwise_since_stays() {
        let mut edited = entry("/theirs", Some("/old"));
        assert!(follow(&mut edited, &on("/new")));
        assert_eq!(edited.spec.disks[0].path, "/theirs");
        assert_eq!(edited.resolved.unwrap().disks[0].path, "/new");
    }

    #[test]
    fn a_host_that_says_what_is_no_description_is_not_followed() {
        let mut known = entry("/old", Some("/old"));
        assert!(!follow(&mut known, &on("not/absolute")));
        assert!(!follow(&mut entry("/old", None), &on("/new")));
        assert_eq!(known.spec.disks[0].path, "/old");
    }
}
