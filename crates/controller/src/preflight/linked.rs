//! What becomes of linked disks that go along, by what the destination says of the images to which they are linked. Pure.
//!
//! Owns nothing. A destination that says nothing of it, as one of an earlier version, has none of them: a disk becomes one image there. Refuses one with
//! snapshots that would have to.

use super::check::Facts;
use godwit_types::migration::DiskToMove;
use godwit_types::{ApiError, ErrorCode};

/// Has each disk go along as its destination has a place for it. Returns the names of those that stay linked.
pub fn settle(disks: &mut [DiskToMove], said: &[String]) -> Vec<String> {
    let mut stay = Vec::new();
    for disk in disks.iter_mut().filter(|disk| disk.linked.is_some()) {
        match said.contains(&disk.name) {
            true => stay.push(disk.name.clone()),
            false => *disk = disk.as_one_image(),
        }
    }
    stay
}

/// A line for each of them.
pub fn lines(facts: &Facts) -> Vec<String> {
    let to = &facts.destination.name;
    let stays = |disk: &DiskToMove| {
        let linked = disk.linked.as_ref()?;
        facts.stay_linked.contains(&disk.name).then(|| {
            format!(
                "disk '{}' stays linked to the image {} on host {to}, and only what it has of its own goes along",
                disk.name, linked.path
            )
        })
    };
    let disks = facts.disks.iter();
    let told = disks.filter_map(|disk| stays(disk).or_else(|| disk.told_as_one(to)));
    told.collect()
}

/// Those that have no place there, as they neither stay linked nor become one image.
pub fn refusals(facts: &Facts) -> Vec<ApiError> {
    let (vm, to) = (&facts.vm.spec.name, &facts.destination.name);
    let disks = facts.disks.iter();
    let without = disks.filter(|disk| disk.layered && !facts.stay_linked.contains(&disk.name));
    let linked = without.filter_map(|disk| disk.linked.as_ref().map(|linked| (disk, linked)));
    let refused = linked.map(|(disk, linked)| {
        let message = format!(
            "disk '{}' of VM {vm} is linked to the image {}, which host {to} does not have as the disk knows it, and has snapshots, with which it does not become one image there: copy that image with its attributes to the same path in a datastore of host {to} ('rsync -X', 'cp -a'), or delete the disk's snapshots first",
            disk.name, linked.path
        );
        ApiError::new(ErrorCode::Preflight, message).on_host(to)
    });
    refused.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::migration::LinkedTo;

    fn disk(name: &str, has_snapshots: Option<bool>) -> DiskToMove {
        DiskToMove {
            name: name.to_owned(),
            bytes: 1 << 30,
            used_bytes: 1 << 20,
            layered: true,
            linked: has_snapshots.map(|has_snapshots| LinkedTo {
                path: "/srv/base.raw".to_owned(),
                id: "7".repeat(32),
                used_bytes: 1 << 20,
                has_snapshots,
            }),
        }
    }

    #[test]
    fn only_what_the_destination_has_is_linked_to_and_no_disk_is_for_that_said_to_be_linked() {
        let mut disks = [
            disk("root", Some(false)),
            disk("data", Some(false)),
            disk("old", Some(true)),
            disk("plain", None),
        ];
        let said = ["root", "plain", "gone"].map(str::to_owned);
        assert_eq!(settle(&mut disks, &said), ["root"]);
        let layered = disks.each_ref().map(|disk| disk.layered);
        assert_eq!(layered, [true, false, true, true]);
        assert_eq!(disks[1].used_bytes, 2 << 20);
        // As a destination of an earlier version answers.
        assert!(settle(&mut disks, &[]).is_empty());
        assert!(!disks[0].layered);
    }
}
