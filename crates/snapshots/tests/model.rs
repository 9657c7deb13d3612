//! Snapshots of a VM with two disks beside a model of what each image holds: taken, gone back to and forgotten in any order, while the guest
//! writes, and while images are tidied by a process that is killed and begins anew.

use godwit_snapshots::{Above, CHAIN_MAX, Disks, Format, Layer, Tidying, Top, tidied, unneeded};
use std::collections::BTreeMap;

const SEEDS: u64 = 10_000;
const STEPS: u64 = 120;
/// Blocks of a disk.
const BLOCKS: u64 = 8;
const DISKS: [&str; 2] = ["root", "data"];

/// Small numbers that a seed decides.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

/// What an image holds, by blocks; a whole one holds all of them.
type Content = BTreeMap<u64, u64>;
/// What a guest reads.
type View = Vec<u64>;

struct World {
    numbers: Numbers,
    disks: Disks,
    files: BTreeMap<String, Content>,
    /// What each disk of each snapshot held when that was taken,
    kept: BTreeMap<String, BTreeMap<String, View>>,
    /// and what each disk holds now.
    now: BTreeMap<String, View>,
    made: u64,
    tidied: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            numbers: Numbers(seed),
            disks: Disks::default(),
            files: BTreeMap::new(),
            kept: BTreeMap::new(),
            now: BTreeMap::new(),
            made: 0,
            tidied: BTreeMap::new(),
        };
        world.begin("root", None);
        let over_common = world.numbers.below(2) == 0;
        world.begin("data", over_common.then_some("/d/common.qcow2"));
        world
    }

    /// A disk over nothing, or a linked one over an image that others have, too.
    fn begin(&mut self, disk: &str, common: Option<&str>) {
        let path = format!("/d/{disk}");
        let whole = || {
            (0..BLOCKS)
                .map(|block| (block, 1000 + block))
                .collect::<Content>()
        };
        if let Some(common) = common {
            self.files.insert(common.to_owned(), whole());
            let layer = Layer {
                format: Format::Qcow2,
                over: None,
                is_common: true,
            };
            self.disks.layers.insert(common.to_owned(), layer);
        }
        let own = if common.is_some() {
            Content::new()
        } else {
            whole()
        };
        self.files.insert(path.clone(), own);
        self.disks.tops.push(Top {
            disk: disk.to_owned(),
            path,
            over: common.map(str::to_owned),
        });
        self.now.insert(
            disk.to_owned(),
            (0..BLOCKS).map(|block| 1000 + block).collect(),
        );
    }

    fn fresh(&mut self) -> BTreeMap<String, String> {
        let fresh = DISKS.map(|disk| {
            self.made += 1;
            let path = format!("/d/{disk}-{}", self.made);
            self.files.insert(path.clone(), Content::new());
            (disk.to_owned(), path)
        });
        BTreeMap::from(fresh)
    }

    fn read(&self, path: &str, block: u64) -> Option<u64> {
        let mut at = Some(path);
        while let Some(path) = at {
            if let Some(value) = self.files.get(path)?.get(&block) {
                return Some(*value);
            }
            at = match self.disks.layers.get(path) {
                Some(layer) => layer.over.as_deref(),
                None => self
                    .disks
                    .tops
                    .iter()
                    .find(|top| top.path == path)?
                    .over
                    .as_deref(),
            };
        }
        None
    }

    fn view(&self, path: &str) -> Option<View> {
        (0..BLOCKS).map(|block| self.read(path, block)).collect()
    }

    fn write(&mut self) {
        let disk = DISKS[self.numbers.below(2) as usize];
        let (block, value) = (
            self.numbers.below(BLOCKS),
            5000 + self.numbers.below(1 << 30),
        );
        let top = self.disks.tops.iter().find(|top| top.disk == disk).unwrap();
        self.files.get_mut(&top.path).unwrap().insert(block, value);
        self.now.get_mut(disk).unwrap()[block as usize] = value;
    }

    fn take(&mut self) {
        let (fresh, name) = (self.fresh(), format!("s{}", self.numbers.below(12)));
        if let Ok(taken) = self.disks.take(&name, &fresh) {
            self.disks = taken;
            self.kept.insert(name, self.now.clone());
        }
    }

    fn some_snapshot(&mut self) -> Option<String> {
        let count = self.disks.snapshots.len() as u64;
        let index = (count > 0).then(|| self.numbers.below(count))?;
        Some(self.disks.snapshots[index as usize].name.clone())
    }

    fn revert(&mut self) -> Result<(), String> {
        let Some(name) = self.some_snapshot() else {
            return Ok(());
        };
        let fresh = self.fresh();
        // A chain that would become too long is refused, and nothing has changed.
        let Ok((reverted, given_up)) = self.disks.revert(&name, &fresh) else {
            return Ok(());
        };
        self.disks = reverted;
        self.now = self.kept[&name].clone();
        given_up.iter().try_for_each(|path| self.remove(path))
    }

    fn forget(&mut self) {
        if let Some(name) = self.some_snapshot() {
            self.disks = self.disks.forget(&name).unwrap();
            self.kept.remove(&name);
        }
    }

    fn remove(&mut self, path: &str) -> Result<(), String> {
        let is_common = path.contains("common");
        match self.files.remove(path) {
            Some(_) if !is_common => Ok(()),
            _ => Err(format!("{path} is removed")),
        }
    }

    /// One image less, or broken off in the middle.
    fn tidy(&mut self) -> Result<(), String> {
        let bytes = |path: &str| {
            self.files
                .get(path)
                .map_or(0, |content| content.len() as u64)
        };
        let Some(tidying) = unneeded(&self.disks, bytes) else {
            return Ok(());
        };
        let is_killed = self.numbers.below(3) == 0;
        let (name, from, to) = match &tidying {
            Tidying::Drop { .. } => ("drop", None, None),
            Tidying::Up { layer, above } => ("up", Some(layer.clone()), Some(self.path_of(above))),
            Tidying::Down { layer, above } => ("down", Some(above.clone()), Some(layer.clone())),
            Tidying::DownTop { layer, disk } => {
                // The guest stands still for the rest, or writes to another top first.
                if self.numbers.below(2) == 0 {
                    let fresh = self.fresh().remove(disk).unwrap();
                    let mut frozen = self.disks.clone();
                    if frozen.freeze(disk, &fresh).is_ok() && frozen.check().is_ok() {
                        self.disks = frozen;
                    }
                    return Ok(());
                }
                let top = self.path_of(&Above::Top(disk.clone()));
                ("down-top", Some(top), Some(layer.clone()))
            }
        };
        if let (Some(from), Some(to)) = (from, to) {
            let ups = matches!(tidying, Tidying::Up { .. });
            for (block, value) in self.files[&from].clone() {
                if is_killed && self.numbers.below(2) == 0 {
                    continue;
                }
                let into = self.files.get_mut(&to).unwrap();
                // A guest may have written there already.
                if !(ups && into.contains_key(&block)) {
                    into.insert(block, value);
                }
            }
        }
        if is_killed {
            return Ok(());
        }
        *self.tidied.entry(name).or_default() += 1;
        let (now, goes) = tidied(&self.disks, &tidying);
        now.check()?;
        self.disks = now;
        goes.map_or(Ok(()), |path| self.remove(&path))
    }

    fn path_of(&self, above: &Above) -> String {
        match above {
            Above::Layer(path) => path.clone(),
            Above::Top(disk) => self
                .disks
                .tops
                .iter()
                .find(|top| top.disk == *disk)
                .unwrap()
                .path
                .clone(),
        }
    }

    fn check(&self) -> Result<(), String> {
        self.disks.check()?;
        for top in &self.disks.tops {
            if self.view(&top.path).as_ref() != self.now.get(&top.disk) {
                return Err(format!("disk '{}' has changed", top.disk));
            }
        }
        for snapshot in &self.disks.snapshots {
            for (disk, path) in &snapshot.disks {
                if self.view(path).as_ref() != self.kept[&snapshot.name].get(disk) {
                    return Err(format!(
                        "disk '{disk}' of snapshot '{}' has changed",
                        snapshot.name
                    ));
                }
            }
        }
        let common = self.files.get("/d/common.qcow2");
        match common.is_none_or(|content| content.values().all(|value| *value < 5000)) {
            true => Ok(()),
            false => Err("what several VMs have was written".to_owned()),
        }
    }

    fn is_tidy(&self) -> bool {
        unneeded(&self.disks, |_| 1).is_none()
    }
}

fn run(seed: u64) -> Result<BTreeMap<&'static str, u64>, String> {
    let mut world = World::new(seed);
    for _ in 0..STEPS {
        match world.numbers.below(20) {
            0..=7 => world.write(),
            8..=10 => world.take(),
            11 => world.revert()?,
            12..=13 => world.forget(),
            _ => world.tidy()?,
        }
        world.check()?;
    }
    // Without snapshots a disk is one image in the end, or one over what is common.
    while !world.disks.snapshots.is_empty() {
        world.forget();
    }
    let mut left = 1000;
    while !world.is_tidy() && left > 0 {
        world.tidy()?;
        world.check()?;
        left -= 1;
    }
    for disk in DISKS {
        let chain = world.disks.chain(disk);
        let below = chain.get(1).copied().unwrap_or("common");
        if chain.len() > 2 || !below.contains("common") || chain.len() > CHAIN_MAX {
            return Err(format!("disk '{disk}' still is {chain:?}"));
        }
    }
    Ok(world.tidied)
}

#[test]
fn every_disk_and_every_snapshot_keeps_its_content_whatever_is_taken_forgotten_and_tidied() {
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..SEEDS {
        match run(seed) {
            Ok(tidied) => tidied
                .into_iter()
                .for_each(|(name, count)| *all.entry(name).or_default() += count),
            Err(why) => panic!("seed {seed}: {why}"),
        }
    }
    for name in ["drop", "up", "down", "down-top"] {
        assert!(
            all.get(name).is_some_and(|count| *count > SEEDS / 10),
            "{all:?}"
        );
    }
}
