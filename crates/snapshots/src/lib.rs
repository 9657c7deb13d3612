//! Which images a VM's disks consist of, and what becomes of them when snapshots are taken, gone back to and forgotten.
//!
//! What it is for: a disk's guest writes to one image, its **top**. A snapshot freezes the top of each disk and puts a new one over it, a delta
//! that holds what is written from then on. Frozen images are **layers**; several may lie over one of them, since one can go back to a
//! snapshot and go on from there. A snapshot that is forgotten leaves layers that nobody needs as they are: they are [`unneeded`] one after
//! the other, and each is given up by one [`Tidying`], after which one image less is there. What is to be done is found in the images' description
//! alone, so that whoever comes after a kill in the middle does it anew, and every step may be done twice.
//!
//! Pure: no IO and no clock. Who owns the state: the value [`Disks`], which its holder writes down before it acts on it: a new
//! top exists, durably, before a description names it, and an image is removed after a description has ceased to.
//! Refuses: descriptions that contradict themselves, more snapshots and longer chains than [`SNAPSHOTS_MAX`] and [`CHAIN_MAX`], and to
//! write to or remove what belongs to several VMs.
//!
//! What holds after every step, finished or not: each disk and each snapshot has the content that it had before.

#![forbid(unsafe_code)]

mod check;
mod tidying;

pub use tidying::{Above, Tidying, tidied, unneeded};

use godwit_types::plant::planted;
use std::collections::BTreeMap;

/// Most snapshots of a VM.
pub const SNAPSHOTS_MAX: usize = 64;
/// Most images that lie over one another, the top among them.
pub const CHAIN_MAX: usize = 32;

/// How an image holds its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// All of a disk.
    Raw,
    /// All of a disk, too, or what its own backing files lack; it is never written.
    Qcow2,
    /// What was written since, over another image.
    Delta,
}

/// The image that a disk's guest writes to: raw, or a delta where it lies over something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Top {
    pub disk: String,
    pub path: String,
    /// The path of a layer; a disk that has none is whole in its top.
    pub over: Option<String>,
}

/// An image that nobody writes to any more, by its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub format: Format,
    /// The layer below; a delta has one, and nothing else has.
    pub over: Option<String>,
    /// Whether other VMs may have it, too: it is never written and never removed.
    pub is_common: bool,
}

/// A moment of some disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub name: String,
    /// The snapshot that was the last one before it, if there was any.
    pub after: Option<String>,
    /// The layer that each disk's top was then, by disks' names.
    pub disks: BTreeMap<String, String>,
}

/// The images of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Disks {
    pub tops: Vec<Top>,
    /// Images, by the paths under which everything else names them.
    pub layers: BTreeMap<String, Layer>,
    pub snapshots: Vec<Snapshot>,
    /// The snapshot that the tops came after.
    pub after: Option<String>,
}

/// What a person is told; a sentence's end.
pub type Refusal = String;

impl Disks {
    /// Takes a snapshot of these disks: each gets the new top that is named with it, which is a delta and empty.
    pub fn take(&self, name: &str, fresh: &BTreeMap<String, String>) -> Result<Self, Refusal> {
        if self.snapshots.iter().any(|snapshot| snapshot.name == name) {
            return Err(format!(
                "there is a snapshot '{name}' already: give another name, or delete that one"
            ));
        }
        if self.snapshots.len() >= SNAPSHOTS_MAX {
            return Err(format!(
                "there are {SNAPSHOTS_MAX} snapshots already, which is the most: delete some"
            ));
        }
        let mut now = self.clone();
        let mut disks = BTreeMap::new();
        for (disk, path) in fresh {
            let frozen = now.freeze(disk, path)?;
            disks.insert(disk.clone(), frozen);
        }
        if disks.is_empty() {
            return Err("it has no disk that its guest writes to".to_owned());
        }
        now.snapshots.push(Snapshot {
            name: name.to_owned(),
            after: now.after.clone(),
            disks,
        });
        now.after = Some(name.to_owned());
        now.checked()
    }

    /// The top of a disk becomes a layer, and this one, a delta that is empty, its top. Returns the layer's path. By itself it is one that
    /// nobody needs, as it is wanted before a top is copied down ([`Tidying::DownTop`]).
    pub fn freeze(&mut self, disk: &str, fresh: &str) -> Result<String, Refusal> {
        let top = self.tops.iter_mut().find(|top| top.disk == disk);
        let top = top.ok_or_else(|| format!("it has no disk '{disk}'"))?;
        let frozen = std::mem::replace(&mut top.path, fresh.to_owned());
        let over = top.over.replace(frozen.clone());
        let format = match over {
            Some(_) => Format::Delta,
            None => Format::Raw,
        };
        let is_common = false;
        let layer = Layer {
            format,
            over,
            is_common,
        };
        match self.layers.insert(frozen.clone(), layer) {
            None => Ok(frozen),
            Some(_) => Err(format!("{frozen} is described twice")),
        }
    }

    /// Lets the disks of a snapshot be what they were then, with these new tops, which are deltas and empty. Disks that it has not stay as they
    /// are. Returns the tops that nobody needs any more, too.
    pub fn revert(
        &self,
        name: &str,
        fresh: &BTreeMap<String, String>,
    ) -> Result<(Self, Vec<String>), Refusal> {
        let snapshot = self.snapshot(name)?.clone();
        let (mut now, mut given_up) = (self.clone(), Vec::new());
        for (disk, layer) in &snapshot.disks {
            let top = now.tops.iter_mut().find(|top| top.disk == *disk);
            // A disk that the VM has no more is not brought back.
            let Some(top) = top else { continue };
            let path = fresh
                .get(disk)
                .ok_or_else(|| format!("no new image is named for disk '{disk}'"))?;
            given_up.push(std::mem::replace(&mut top.path, path.clone()));
            top.over = match planted("revert-over-former-layer") {
                true => top.over.take(),
                false => Some(layer.clone()),
            };
        }
        now.after = Some(name.to_owned());
        Ok((now.checked()?, given_up))
    }

    /// Forgets a snapshot: its content is not kept any more. Images stay until they are tidied.
    pub fn forget(&self, name: &str) -> Result<Self, Refusal> {
        let gone = self.snapshot(name)?.clone();
        let mut now = self.clone();
        now.snapshots.retain(|snapshot| snapshot.name != name);
        let after = now.snapshots.iter_mut().map(|snapshot| &mut snapshot.after);
        for after in after.chain([&mut now.after]) {
            if after.as_deref() == Some(name) {
                after.clone_from(&gone.after);
            }
        }
        now.checked()
    }

    pub fn snapshot(&self, name: &str) -> Result<&Snapshot, Refusal> {
        let mut all = self.snapshots.iter();
        let found = all.find(|snapshot| snapshot.name == name);
        found.ok_or_else(|| format!("there is no snapshot '{name}'"))
    }

    /// The images that a disk's content is made of, the one that lies on top first.
    pub fn chain(&self, disk: &str) -> Vec<&str> {
        let top = self.tops.iter().find(|top| top.disk == disk);
        let Some(top) = top else { return Vec::new() };
        let mut chain = vec![top.path.as_str()];
        let mut below = top.over.as_deref();
        while let Some(path) = below.filter(|_| chain.len() < CHAIN_MAX) {
            chain.push(path);
            below = self
                .layers
                .get(path)
                .and_then(|layer| layer.over.as_deref());
        }
        chain
    }

    fn checked(self) -> Result<Self, Refusal> {
        self.check()?;
        Ok(self)
    }
}
