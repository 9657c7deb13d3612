//! Maps of states that earlier processes of this VM left in its run directory: of a disk that was to move, or of a guest that is gone.
//!
//! A process that is killed leaves the maps of the tops that it had open, which the next one takes over. What no description names any more nobody looks for,
//! and it takes memory: a map may have 64 MiB for each TiB of its disk. Owns nothing. Refuses: to remove one that a description names, and any where one
//! cannot be read.

use super::served::Served;
use godwit_qemu::layered::forget_maps;
use godwit_snapshots::Images;
use std::collections::BTreeSet;

/// Those that these say are part of their disk, or leave it.
fn named(all: &[Images]) -> BTreeSet<u128> {
    let of = |images: &Images| {
        let parts = images.images.values().filter_map(|image| image.id.clone());
        let leaving = images.leaving.values().flatten().cloned();
        parts.chain(leaving).collect::<Vec<String>>()
    };
    let all = all.iter().flat_map(of);
    all.filter_map(|id| u128::from_str_radix(&id, 16).ok())
        .collect()
}

impl Served {
    /// All disks of a QEMU that is to be started are open, and no guest of an earlier one lives.
    pub(super) fn forget_stray_maps(&self) {
        match self.all().load() {
            Ok(all) => forget_maps(&self.paths.run, &named(&all)),
            Err(error) => tracing::info!(
                %error,
                "maps of states that earlier processes left stay, since it is not known which are needed"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_snapshots::Fresh;
    use godwit_types::snapshots::states_map_name;

    #[test]
    fn maps_that_a_killed_process_left_are_removed_but_for_those_of_a_disks_images() {
        let run = tempfile::tempdir().unwrap();
        let fresh = |number: u64| Fresh {
            name: format!("root.raw.d{number}"),
            id: format!("{number:032x}"),
            elsewhere: None,
        };
        let one = Images::of_one("root.raw", 4096, &"5".repeat(32));
        let mut images = one.freeze(&fresh(1)).unwrap().freeze(&fresh(2)).unwrap();
        images
            .leaving
            .insert("root.raw.d3".to_owned(), Some(fresh(3).id));
        let unfinished = format!("{}.new", states_map_name(4));
        let others = ["disks.json", "delta-7.states", "delta-x.states"].map(str::to_owned);
        let maps = [1, 2, 3, 4].map(states_map_name);
        for name in maps.iter().chain(&others).chain([&unfinished]) {
            std::fs::write(run.path().join(name), "").unwrap();
        }
        forget_maps(run.path(), &named(&[images]));
        let is_there = |name: &String| run.path().join(name).exists();
        assert!(maps[..3].iter().chain(&others).all(is_there));
        assert!(!is_there(&maps[3]) && !is_there(&unfinished));
        forget_maps(run.path(), &BTreeSet::new());
        assert!(!maps.iter().any(is_there) && others.iter().all(is_there));
    }
}
