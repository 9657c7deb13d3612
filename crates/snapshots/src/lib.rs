//! Which images a disk consists of, and what becomes of them when snapshots are taken, gone back to and forgotten.
//!
//! What it is for: a disk's guest writes to one image, the **top**. A snapshot freezes it and puts a new one over it, a delta
//! that holds what is written from then on. Several images may lie over a frozen one, since one can go back to a snapshot and go on from
//! there. A snapshot that is forgotten leaves images that nobody needs as they are ([`Images::unneeded`]); each is given up by one [`Tidying`].
//! What is to be done is found in the description alone, so that whoever comes after a kill in the middle does it anew, and each step may be
//! done twice.
//!
//! Pure: no IO and no clock. Who owns the state: the value [`Images`], which whoever has the disk writes down before acting on it: a new
//! image is there, durably, before a description names it, and is removed after a description has ceased to.
//! Refuses: descriptions that contradict themselves or name files elsewhere, but for redo logs of a disk that moves, and the parent of a linked one, both by
//! whole paths; more snapshots and longer chains than [`SNAPSHOTS_MAX`] and [`CHAIN_MAX`], and to write to or remove what belongs to several VMs.
//!
//! What holds after every step, finished or not: the disk and each snapshot have the content that they had before.

#![forbid(unsafe_code)]

mod another_place;
mod check;
pub mod files;
mod tidying;

pub use another_place::AnotherPlace;
pub use tidying::Tidying;

use godwit_types::plant::planted;
use godwit_types::{SnapshotName, VmName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most snapshots of a disk.
pub const SNAPSHOTS_MAX: usize = 64;
/// Most images that lie over one another, the top among them.
pub const CHAIN_MAX: usize = 32;
/// Most images of a disk: as many moments as there may be, each with one that is just being given up.
pub const IMAGES_MAX: usize = 2 * SNAPSHOTS_MAX + 2;
/// How an image holds its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// All of a disk.
    Raw,
    /// What was written since, over another image.
    Delta,
}

/// An image of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    pub kind: Kind,
    /// The image below; a delta has one, and nothing else has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    /// What the image itself says that it is, in hexadecimal digits; of a delta, and of a raw one that is common.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Whether other VMs may have it, too: it is never written and never removed, and may lie elsewhere.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub common: bool,
}

/// A moment of a disk, and of those that were frozen with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    pub name: SnapshotName,
    /// The snapshot that was the last one before it, if there was any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<SnapshotName>,
    /// What the top was then.
    pub image: String,
    /// Seconds since 1970.
    pub made_unix_s: u64,
    /// It is not certain yet that all of its disks have it: one that some lack is a half, which nobody is told of.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub begun: bool,
    /// Whether the guest had written all that it was asked to keep, and wrote nothing at that moment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quiesced: bool,
    /// What a person has written about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// All disks of the VM that were frozen at that moment, by name. It counts where each of them has it.
    pub disks: Vec<String>,
}

/// The images of one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Images {
    /// Bytes of the disk.
    pub bytes: u64,
    /// A random number in hexadecimal digits, which the disk's own image bears, too.
    pub mark: String,
    /// The image that the guest writes to.
    pub top: String,
    /// By the names of their files in the directory of the disk; of common ones, by their paths.
    pub images: BTreeMap<String, Image>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<Snapshot>,
    /// The snapshot that the top came after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<SnapshotName>,
    /// The number of the next file that is made for it: no name is given twice.
    pub next: u64,
    /// The snapshot to which it and others were to go back together, which is not finished: none of them may be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverting: Option<SnapshotName>,
    /// Images that are part of it no more, and are to be removed; with what each says that it is.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub leaving: BTreeMap<String, Option<String>>,
    /// The directories of deltas whose files do not lie in that of the disk, by their names: redo logs of a disk that moves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub elsewhere: BTreeMap<String, String>,
}

/// The image that a linked disk begins as, and that others begin as, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common<'a> {
    pub path: &'a str,
    /// What it says that it is.
    pub id: &'a str,
}

/// An image that is to be made before a description names it: a delta that is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fresh {
    /// The name of its file.
    pub name: String,
    /// What it says that it is.
    pub id: String,
    /// The directory of its files, where that is not the disk's own.
    pub elsewhere: Option<String>,
}

/// What a person is told; a sentence's end.
pub type Refusal = String;

impl Images {
    /// Of a disk of so many bytes that is one raw image in a file of this name, which is to bear this mark.
    pub fn of_one(name: &str, bytes: u64, mark: &str) -> Self {
        let raw = Image {
            kind: Kind::Raw,
            over: None,
            id: None,
            common: false,
        };
        Self {
            bytes,
            mark: mark.to_owned(),
            top: name.to_owned(),
            images: BTreeMap::from([(name.to_owned(), raw)]),
            snapshots: Vec::new(),
            after: None,
            next: 1,
            reverting: None,
            leaving: BTreeMap::new(),
            elsewhere: BTreeMap::new(),
        }
    }

    /// Of a disk of so many bytes that begins as `common`, which is as long, with `fresh` over it; the disk's own file, in which nothing of it is, bears this
    /// mark.
    pub fn linked(
        common: Common<'_>,
        bytes: u64,
        mark: &str,
        fresh: &Fresh,
    ) -> Result<Self, Refusal> {
        let lowest = Image {
            kind: Kind::Raw,
            over: None,
            id: Some(common.id.to_owned()),
            common: true,
        };
        let mut images = Self::of_one("", bytes, mark);
        images.images = BTreeMap::from([(common.path.to_owned(), lowest)]);
        images.put_top(fresh, common.path.to_owned());
        // The names before it may be those of files that were left.
        let number = files::any_number_of(&fresh.name);
        let next = number.map_or(0, |number| number.saturating_add(1));
        images.next = images.next.max(next);
        images.checked()
    }

    /// What a linked disk begins as; nothing of a disk that has all that it consists of.
    pub fn common(&self) -> Option<Common<'_>> {
        let path = *self.chain(&self.top).last()?;
        let image = self.images.get(path).filter(|image| image.common)?;
        let id = image.id.as_deref()?;
        Some(Common { path, id })
    }

    /// Whether it is a linked disk of nothing but what was written since: a copy of what the top shows is all of it.
    pub fn is_linked_only(&self) -> bool {
        let has_more = !self.snapshots.is_empty() || !self.leaving.is_empty();
        let is_beside = self.elsewhere.is_empty();
        self.common().is_some() && self.images.len() == 2 && !has_more && is_beside
    }

    /// Whether it is a linked disk of which no other moment is kept: whoever copies what its guest reads has all of it.
    pub fn may_become_one(&self) -> bool {
        self.common().is_some() && self.snapshots.is_empty() && self.reverting.is_none()
    }

    /// Whether it says no more than that the disk is one raw image.
    pub fn is_one_raw(&self) -> bool {
        let is_raw = |image: &Image| image.kind == Kind::Raw;
        self.snapshots.is_empty()
            && self.leaving.is_empty()
            && self.images.len() == 1
            && self.images.values().all(is_raw)
    }

    /// Takes a snapshot: the top is frozen under `fresh`.
    pub fn take(&self, snapshot: Snapshot, fresh: &Fresh) -> Result<Self, Refusal> {
        let name = &snapshot.name;
        if self.snapshots.iter().any(|known| known.name == *name) {
            return Err(format!(
                "there is a snapshot '{name}' already: give another name, or delete that one"
            ));
        }
        if self.snapshots.len() >= SNAPSHOTS_MAX {
            return Err(format!(
                "there are {SNAPSHOTS_MAX} snapshots already, which is the most: delete some"
            ));
        }
        let mut now = self.frozen(fresh);
        // What is above a snapshot that is deleted is frozen once more before it is merged.
        if now.chain(&now.top).len() >= CHAIN_MAX {
            return Err(format!(
                "{} images lie over one another already, which is the most: delete some snapshots",
                CHAIN_MAX - 1
            ));
        }
        let after = now.after.replace(snapshot.name.clone());
        now.snapshots.push(Snapshot {
            after,
            image: self.top.clone(),
            ..snapshot
        });
        now.checked()
    }

    /// Freezes the top under `fresh`, and keeps no moment of it: as it is wanted before a top is copied down ([`Tidying::DownTop`]).
    pub fn freeze(&self, fresh: &Fresh) -> Result<Self, Refusal> {
        self.frozen(fresh).checked()
    }

    /// Refuses to move a disk whose chain is as long as one may be: its top is frozen for that, and could not be frozen once more where it comes to, so
    /// that nothing of it could be merged under a guest that writes.
    pub fn must_have_room_to_move(&self) -> Result<(), Refusal> {
        match self.chain(&self.top).len() >= CHAIN_MAX - 1 {
            false => Ok(()),
            true => Err(format!(
                "{} images lie over one another already, and a move needs one more: delete some snapshots, and move it once they are merged ('godwit vm snapshot list' tells)",
                CHAIN_MAX - 1
            )),
        }
    }

    fn frozen(&self, fresh: &Fresh) -> Self {
        let mut now = self.clone();
        let below = now.top.clone();
        now.put_top(fresh, below);
        now
    }

    fn put_top(&mut self, fresh: &Fresh, over: String) {
        let delta = Image {
            kind: Kind::Delta,
            over: Some(over),
            id: Some(fresh.id.clone()),
            common: false,
        };
        self.images.insert(fresh.name.clone(), delta);
        let elsewhere = fresh.elsewhere.iter();
        let named = elsewhere.map(|directory| (fresh.name.clone(), directory.clone()));
        self.elsewhere.extend(named);
        self.top.clone_from(&fresh.name);
        self.next = self.next.saturating_add(1);
    }

    /// Lets the disk be what it was at a snapshot, with this new top. The former top leaves.
    pub fn revert(&self, name: &SnapshotName, fresh: &Fresh) -> Result<Self, Refusal> {
        let image = self.snapshot(name)?.image.clone();
        let (mut now, former) = (self.clone(), self.top.clone());
        let over = match planted("revert-over-former-layer") {
            true => self.below(&former).unwrap_or(&image).to_owned(),
            false => image,
        };
        now.put_top(fresh, over);
        now.after = Some(name.clone());
        now.reverting = None;
        // A raw image lies below everything; of a delta nothing lies over the top.
        let is_delta = |image: &Image| image.kind == Kind::Delta;
        if now.images.get(&former).is_some_and(is_delta) {
            now.drop_image(&former);
        }
        now.checked()
    }

    /// Has it, which is not used, go back to a snapshot together with others: until [`Self::revert`] is written it is not to be used.
    pub fn reverting(&self, name: &SnapshotName) -> Result<Self, Refusal> {
        let mut now = self.clone();
        now.reverting = Some(self.snapshot(name)?.name.clone());
        Ok(now)
    }

    /// Refuses one of several disks that were to go back together, some of which may not have.
    pub fn must_be_one_moment(&self, vm: &VmName) -> Result<(), Refusal> {
        match &self.reverting {
            None => Ok(()),
            Some(name) => Err(format!(
                "its disks were to go back to snapshot '{name}', and not all of them did: finish that with 'godwit vm snapshot revert {vm} {name}'"
            )),
        }
    }

    /// The snapshot that was taken last, if the guest has written to the disk since and nothing else happened to it.
    pub fn taken_last(&self) -> Option<&Snapshot> {
        let last = self.snapshot(self.after.as_ref()?).ok()?;
        (self.below(&self.top) == Some(&last.image)).then_some(last)
    }

    /// Once it is certain that all disks have this snapshot; `quiesced`: and that the guest's file systems stood still for it.
    #[must_use]
    pub fn taken(&self, name: &SnapshotName, quiesced: bool) -> Self {
        let mut now = self.clone();
        let mut all = now.snapshots.iter_mut();
        if let Some(snapshot) = all.find(|snapshot| snapshot.name == *name) {
            snapshot.begun = false;
            snapshot.quiesced |= quiesced;
        }
        now
    }

    /// Leaves it out: it is to be removed, unless others may have it, too.
    pub(crate) fn drop_image(&mut self, name: &str) {
        if let Some(gone) = self.images.remove(name).filter(|gone| !gone.common) {
            self.leaving.insert(name.to_owned(), gone.id);
        }
    }

    /// Once these are removed that were leaving.
    pub fn without(&self, removed: &[String]) -> Self {
        let mut now = self.clone();
        now.leaving.retain(|name, _| !removed.contains(name));
        now.elsewhere.retain(|name, _| !removed.contains(name));
        now
    }

    /// Forgets a snapshot: its content is not kept any more. Images stay until they are tidied.
    pub fn forget(&self, name: &SnapshotName) -> Result<Self, Refusal> {
        let gone = self.snapshot(name)?.clone();
        let mut now = self.clone();
        now.snapshots.retain(|snapshot| snapshot.name != *name);
        let after = now.snapshots.iter_mut().map(|snapshot| &mut snapshot.after);
        for after in after.chain([&mut now.after]) {
            if after.as_ref() == Some(name) {
                after.clone_from(&gone.after);
            }
        }
        now.checked()
    }

    pub fn snapshot(&self, name: &SnapshotName) -> Result<&Snapshot, Refusal> {
        let mut all = self.snapshots.iter();
        let found = all.find(|snapshot| snapshot.name == *name);
        found.ok_or_else(|| format!("there is no snapshot '{name}'"))
    }

    /// The names of the images that the content of this one is made of, itself first.
    pub fn chain<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        let mut chain = vec![name];
        let mut below = self.below(name);
        while let Some(name) = below.filter(|_| chain.len() < CHAIN_MAX) {
            chain.push(name);
            below = self.below(name);
        }
        chain
    }

    /// Its deltas, of whichever snapshot, by their names.
    pub fn deltas(&self) -> impl Iterator<Item = (&String, &Image)> {
        let all = self.images.iter();
        all.filter(|(_, image)| image.kind == Kind::Delta)
    }

    fn below(&self, name: &str) -> Option<&str> {
        self.images.get(name)?.over.as_deref()
    }

    fn checked(self) -> Result<Self, Refusal> {
        self.check()?;
        Ok(self)
    }
}
