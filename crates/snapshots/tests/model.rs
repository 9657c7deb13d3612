//! Snapshots of a disk beside a model of what each image holds: taken, gone back to and forgotten in any order, while the guest
//! writes, and while images are tidied by a process that is killed and begins anew.

use godwit_snapshots::{Fresh, Image, Images, Kind, Snapshot, Tidying, files};
use godwit_types::SnapshotName;
use std::collections::BTreeMap;

const SEEDS: u64 = 10_000;
const STEPS: u64 = 150;
/// Blocks of a disk.
const BLOCKS: u64 = 8;
/// The first numbers in blocks that nobody has written.
const UNWRITTEN: u64 = 1000;
const COMMON: &str = "/images/common";
/// Where disks are to come to.
const THERE: &str = "/there";

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
    images: Images,
    files: BTreeMap<String, Content>,
    /// What the disk held at each snapshot,
    kept: BTreeMap<SnapshotName, View>,
    /// and what it holds now.
    now: View,
    tidied: BTreeMap<&'static str, u64>,
}

fn untouched() -> View {
    (0..BLOCKS).map(|block| UNWRITTEN + block).collect()
}

impl World {
    /// A disk of its own, or one over an image that others have, too.
    fn new(seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let whole: Content = (0..BLOCKS).zip(untouched()).collect();
        let mut images = Images::of_one("disk", 4096, &"5".repeat(32));
        let mut files = BTreeMap::from([("disk".to_owned(), whole.clone())]);
        if numbers.below(2) == 0 {
            let common = Image {
                kind: Kind::Raw,
                over: None,
                id: Some("9".repeat(32)),
                common: true,
            };
            let delta = Image {
                kind: Kind::Delta,
                over: Some(COMMON.to_owned()),
                id: Some("0".repeat(32)),
                common: false,
            };
            images.images =
                BTreeMap::from([(COMMON.to_owned(), common), ("disk".to_owned(), delta)]);
            files = BTreeMap::from([
                (COMMON.to_owned(), whole),
                ("disk".to_owned(), Content::new()),
            ]);
        }
        images.check().unwrap();
        Self {
            numbers,
            images,
            files,
            kept: BTreeMap::new(),
            now: untouched(),
            tidied: BTreeMap::new(),
        }
    }

    fn fresh(&mut self) -> Fresh {
        let name = files::delta("disk", self.images.next);
        self.files.insert(name.clone(), Content::new());
        Fresh {
            name,
            id: format!("{:032x}", self.images.next),
            elsewhere: None,
        }
    }

    fn view(&self, name: &str) -> Option<View> {
        let chain = self.images.chain(name);
        let read = |block| {
            chain
                .iter()
                .find_map(|name| self.files.get(*name)?.get(&block))
        };
        (0..BLOCKS).map(|block| read(block).copied()).collect()
    }

    fn write(&mut self) {
        let (block, value) = (
            self.numbers.below(BLOCKS),
            5000 + self.numbers.below(1 << 30),
        );
        let top = self.files.get_mut(&self.images.top);
        top.unwrap().insert(block, value);
        self.now[block as usize] = value;
    }

    fn take(&mut self) {
        let name = SnapshotName::new(format!("s{}", self.numbers.below(12))).unwrap();
        let fresh = self.fresh();
        let snapshot = Snapshot {
            name: name.clone(),
            after: None,
            image: String::new(),
            made_unix_s: 0,
            begun: false,
            quiesced: false,
            text: String::new(),
            disks: vec!["disk".to_owned()],
        };
        match self.images.take(snapshot, &fresh) {
            Ok(taken) => {
                self.images = taken;
                self.kept.insert(name, self.now.clone());
            }
            Err(_) => drop(self.files.remove(&fresh.name)),
        }
    }

    /// A disk that was to move by redo logs did not, and its logs are left where it was to come to.
    fn leave_log(&mut self) {
        let fresh = Fresh {
            elsewhere: Some(THERE.to_owned()),
            ..self.fresh()
        };
        match self.images.freeze(&fresh) {
            Ok(frozen) => self.images = frozen,
            Err(_) => drop(self.files.remove(&fresh.name)),
        }
    }

    fn some_snapshot(&mut self) -> Option<SnapshotName> {
        let count = self.images.snapshots.len() as u64;
        let index = (count > 0).then(|| self.numbers.below(count))?;
        Some(self.images.snapshots[index as usize].name.clone())
    }

    fn revert(&mut self) -> Result<(), String> {
        let Some(name) = self.some_snapshot() else {
            return Ok(());
        };
        let fresh = self.fresh();
        // A chain that would become too long is refused, and nothing has changed.
        let Ok(reverted) = self.images.revert(&name, &fresh) else {
            self.files.remove(&fresh.name);
            return Ok(());
        };
        self.images = reverted;
        self.now = self.kept[&name].clone();
        self.may_remove()
    }

    /// Removes what leaves, unless it is killed before.
    fn may_remove(&mut self) -> Result<(), String> {
        if self.numbers.below(3) == 0 {
            return Ok(());
        }
        let leaving: Vec<String> = self.images.leaving.keys().cloned().collect();
        leaving.iter().try_for_each(|name| self.remove(name))?;
        self.images = self.images.without(&leaving);
        Ok(())
    }

    fn forget(&mut self) {
        if let Some(name) = self.some_snapshot() {
            self.images = self.images.forget(&name).unwrap();
            self.kept.remove(&name);
        }
    }

    fn remove(&mut self, name: &str) -> Result<(), String> {
        match self.files.remove(name) {
            Some(_) if name != COMMON => Ok(()),
            _ => Err(format!("{name} is removed")),
        }
    }

    /// The disk goes to another place, as its guest writes to a new top; what others have, too, is there already.
    fn go_elsewhere(&mut self) -> Result<(), String> {
        let fresh = self.fresh();
        match self.images.freeze(&fresh) {
            Ok(frozen) => self.images = frozen,
            Err(_) => {
                self.files.remove(&fresh.name);
                return Ok(());
            }
        }
        self.write();
        let (mark, id) = ("6".repeat(32), format!("{:032x}", u64::MAX));
        let there = self
            .images
            .at_another_place("disk", (self.images.next, &mark), &id);
        let there = there.map_err(|why| format!("it goes elsewhere: {why}"))?;
        let of = |name: &String| self.files[name].clone();
        let mut files: BTreeMap<String, Content> = there
            .names
            .iter()
            .map(|(name, new)| (new.clone(), of(name)))
            .collect();
        files.insert(there.images.top.clone(), of(&self.images.top));
        files.extend(self.files.remove_entry(COMMON));
        (self.images, self.files) = (there.images, files);
        Ok(())
    }

    fn next(&self) -> Option<Tidying> {
        let bytes = |name: &str| {
            self.files
                .get(name)
                .map_or(0, |content| content.len() as u64)
        };
        self.images.unneeded(bytes)
    }

    /// One image less, or broken off in the middle.
    fn tidy(&mut self) -> Result<(), String> {
        let Some(tidying) = self.next() else {
            return Ok(());
        };
        let is_killed = self.numbers.below(3) == 0;
        let is_down_top = matches!(tidying, Tidying::DownTop { .. });
        // The guest stands still for the rest of a top, or writes to another one first.
        if is_down_top && self.numbers.below(2) == 0 {
            let fresh = self.fresh();
            match self.images.freeze(&fresh) {
                Ok(frozen) => self.images = frozen,
                Err(_) => drop(self.files.remove(&fresh.name)),
            }
            return Ok(());
        }
        let top = self.images.top.clone();
        let (name, copying) = match &tidying {
            Tidying::Drop { .. } => ("drop", None),
            Tidying::Up { image, above } => ("up", Some((image, above))),
            Tidying::Down { image, above } => ("down", Some((above, image))),
            Tidying::DownTop { image } => ("down-top", Some((&top, image))),
        };
        if let Some((from, into)) = copying {
            let ups = name == "up";
            for (block, value) in self.files[from].clone() {
                let into = self.files.get_mut(into).unwrap();
                let is_copied = !(ups && into.contains_key(&block));
                if is_copied && !(is_killed && self.numbers.below(2) == 0) {
                    into.insert(block, value);
                }
            }
        }
        if is_killed {
            return Ok(());
        }
        *self.tidied.entry(name).or_default() += 1;
        self.images = self.images.tidied(&tidying);
        self.may_remove()
    }

    fn check(&self) -> Result<(), String> {
        self.images.check()?;
        if self.view(&self.images.top).as_ref() != Some(&self.now) {
            return Err("the disk has changed".to_owned());
        }
        for snapshot in &self.images.snapshots {
            if self.view(&snapshot.image).as_ref() != self.kept.get(&snapshot.name) {
                return Err(format!("snapshot '{}' has changed", snapshot.name));
            }
        }
        let is_described = |name: &String| {
            self.images.images.contains_key(name) || self.images.leaving.contains_key(name)
        };
        if let Some(name) = self
            .files
            .keys()
            .find(|name| !is_described(name) && *name != COMMON)
        {
            return Err(format!("{name} is left behind"));
        }
        if self.images.images.contains_key(COMMON) != self.files.contains_key(COMMON) {
            return Err("what several VMs have is described no more".to_owned());
        }
        let common = self.files.get(COMMON);
        match common.is_none_or(|content| content.values().copied().eq(untouched())) {
            true => Ok(()),
            false => Err("what several VMs have was written".to_owned()),
        }
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
            14 => world.go_elsewhere()?,
            15 => world.leave_log(),
            _ => world.tidy()?,
        }
        world.check()?;
    }
    // Without snapshots a disk is one image in the end, or one over what is common.
    while !world.images.snapshots.is_empty() {
        world.forget();
    }
    let mut left = 1000;
    while (world.next().is_some() || !world.images.leaving.is_empty()) && left > 0 {
        world.tidy()?;
        world.may_remove()?;
        world.check()?;
        left -= 1;
    }
    if !world.images.elsewhere.is_empty() {
        return Err(format!(
            "a part of it is left at {:?}",
            world.images.elsewhere
        ));
    }
    let chain = world.images.chain(&world.images.top);
    match chain[..] {
        ["disk"] if world.images.is_one_raw() => Ok(world.tidied),
        [_, COMMON] if world.images.images.len() == 2 => Ok(world.tidied),
        _ => Err(format!("it still is {chain:?}")),
    }
}

#[test]
fn a_disk_and_its_snapshots_keep_their_content_whatever_is_taken_forgotten_and_tidied() {
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
