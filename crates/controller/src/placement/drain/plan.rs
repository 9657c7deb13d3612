//! Which VM of a host that is emptied goes next, and where. Pure.
//!
//! Destinations are promised to the biggest VMs first, each to the host with most room left, so that a small one never
//! takes the last room that a big one fits. Moves go quickest first: on a shared link the whole takes the same time in
//! any order, and this one gets the most VMs off early, should the host not last. Two at once keep the link busy while
//! one of them begins or ends; a VM that writes much moves alone, since its share of the link must stay well above what
//! it writes. Owns nothing. Refuses: a host without room for all that was sent there.

use godwit_types::{HostName, VmName};
use std::collections::BTreeMap;

/// Moves at the same time unless asked otherwise.
pub const AT_ONCE: u32 = 2;
/// Most moves at the same time, whatever is asked.
pub const AT_ONCE_MAX: u32 = 16;
/// What a VM may write of its share of the link to move beside others.
const WRITES_SHARE: f64 = 0.5;

/// A VM that is to move.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiting {
    pub name: VmName,
    pub memory_mib: u64,
    /// Expected time of its move, s.
    pub estimate_s: Option<f64>,
    /// What it writes, as a share of its link's speed.
    pub writes_share: f64,
    /// Hosts that lack nothing it needs, room aside.
    pub may_go_to: Vec<HostName>,
}

/// A VM that is on its way.
#[derive(Debug, Clone, PartialEq)]
pub struct Moving {
    pub to: HostName,
    pub memory_mib: u64,
    /// What it writes, as a share of its link's speed.
    pub writes_share: f64,
}

/// A host that takes VMs, and the memory that a new guest could have there, MiB.
pub type Rooms = BTreeMap<HostName, u64>;

/// The order of the moves: quickest first, then smallest, then by name.
pub fn order(waiting: &mut [Waiting]) {
    waiting.sort_by(|a, b| {
        let seconds = |vm: &Waiting| vm.estimate_s.unwrap_or(f64::INFINITY);
        seconds(a)
            .total_cmp(&seconds(b))
            .then(a.memory_mib.cmp(&b.memory_mib))
            .then(a.name.cmp(&b.name))
    });
}

/// Rooms less what those on their way will take.
pub fn rooms_left(rooms: &Rooms, moving: &[Moving]) -> Rooms {
    let mut left = rooms.clone();
    for vm in moving {
        if let Some(room) = left.get_mut(&vm.to) {
            *room = room.saturating_sub(vm.memory_mib);
        }
    }
    left
}

/// A destination for each VM that finds room: biggest first, each where most is left.
pub fn destinations(waiting: &[Waiting], rooms: &Rooms) -> BTreeMap<VmName, HostName> {
    let mut left = rooms.clone();
    let mut biggest: Vec<&Waiting> = waiting.iter().collect();
    biggest.sort_by(|a, b| b.memory_mib.cmp(&a.memory_mib).then(a.name.cmp(&b.name)));
    let mut found = BTreeMap::new();
    for vm in biggest {
        let best = left
            .iter_mut()
            .filter(|(host, room)| **room >= vm.memory_mib && vm.may_go_to.contains(host))
            .max_by_key(|(_, room)| **room);
        if let Some((host, room)) = best {
            *room -= vm.memory_mib;
            found.insert(vm.name.clone(), host.clone());
        }
    }
    found
}

/// The move to begin now, if one may.
pub fn next(
    waiting: &[Waiting],
    moving: &[Moving],
    rooms: &Rooms,
    at_once: u32,
) -> Option<(VmName, HostName)> {
    let slots = at_once.clamp(1, AT_ONCE_MAX) as usize;
    if moving.len() >= slots {
        return None;
    }
    let destinations = destinations(waiting, &rooms_left(rooms, moving));
    let mut ordered = waiting.to_vec();
    order(&mut ordered);
    ordered
        .iter()
        .filter(|vm| shares_well(vm, moving))
        .find_map(|vm| Some((vm.name.clone(), destinations.get(&vm.name)?.clone())))
}

/// Whether every VM under way, this one with them, keeps a share of the link well above what it writes.
fn shares_well(vm: &Waiting, moving: &[Moving]) -> bool {
    if moving.is_empty() {
        return true;
    }
    let share = WRITES_SHARE / (moving.len() + 1) as f64;
    let others = moving.iter().map(|other| other.writes_share);
    others
        .chain([vm.writes_share])
        .all(|writes| writes <= share)
}

/// Moves at the same time, and the plan in one sentence.
pub fn describe(asked: Option<u32>, vms: usize, hosts: usize) -> (u32, String) {
    let vms_u32 = u32::try_from(vms).unwrap_or(u32::MAX);
    let wanted = asked.unwrap_or(AT_ONCE).clamp(1, AT_ONCE_MAX);
    let at_once = wanted.min(vms_u32.max(1));
    let why = match asked {
        Some(_) => "as asked",
        None => "so that the link is busy while one begins or ends",
    };
    let where_to = match hosts {
        1 => "1 host takes VMs".to_owned(),
        count => format!("{count} hosts take VMs"),
    };
    let text = format!(
        "quickest first, so that the most VMs are off early; room is promised to the biggest first ({where_to}), so that all find some; at most {at_once} at once, {why}; a VM that writes more than half of its share of the link moves alone"
    );
    (at_once, text)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
