//! Snapshots of a VM's disks: taken of all that its guest may write at one moment, gone back to, and forgotten.
//!
//! Each disk's description ([`super::layers`]) says of a snapshot which disks were frozen with it: it counts where each of them has it. So a process
//! that dies between two of them leaves a snapshot that is none, and that is forgotten by whoever looks next.
//!
//! Owns nothing. Refuses: disks on block devices, and to change what a guest works with.

use super::layers::Place;
use super::resize::AtRest;
use super::served::refused;
use crate::faults::reached;
use crate::files::Paths;
use godwit_blockio::Image;
use godwit_qemu::layered::random_number;
use godwit_qemu::user::User;
use godwit_snapshots::{Fresh, Images, Kind, Snapshot, files};
use godwit_types::host_api::VmProcessConfig;
use godwit_types::snapshots::{SnapshotView, Snapshots, TakeSnapshot};
use godwit_types::text::listed;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, SnapshotName};
use rustix::fs::fstat;
use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Most that the maps of all deltas of a VM may take in memory, bytes.
pub(super) const MAPS_MAX: u64 = 1 << 30;
/// So many bytes of a disk take one byte of a delta's map.
const BYTES_OF_MAP_BYTE: u64 = 16 << 10;

/// The disks of a VM that its guest may write.
pub(super) struct All<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    pub owner: User,
    pub specs: Vec<DiskSpec>,
    /// Device and inode of the own image of each that somebody has open, by name.
    pub images: BTreeMap<String, (u64, u64)>,
}

/// What a disk consists of, and what it is to consist of.
pub(super) struct Changed {
    before: Images,
    pub now: Images,
    pub fresh: Fresh,
}

impl All<'_> {
    pub(super) fn place<'a>(&'a self, spec: &'a DiskSpec) -> Place<'a> {
        Place {
            config: self.config,
            paths: self.paths,
            owner: self.owner,
            spec,
            image: self.images.get(&spec.name).copied(),
        }
    }

    /// The place of a disk where it comes to: its own image there is this one, once it is made.
    pub(super) fn place_there<'a>(
        &'a self,
        spec: &'a DiskSpec,
        image: Option<(u64, u64)>,
    ) -> Place<'a> {
        Place {
            image,
            ..self.place(spec)
        }
    }

    pub(super) fn refused(&self, spec: &DiskSpec, why: &str) -> ApiError {
        // Nobody asked for anything wrong: the disk, or its storage, is not so that it can be done.
        ApiError {
            code: ErrorCode::WrongState,
            ..refused(self.config, spec, &why)
        }
    }

    pub(super) fn not_so(&self, why: &str) -> ApiError {
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message = format!("VM '{vm}' on host '{host}': {why}");
        ApiError::new(ErrorCode::WrongState, message).on_host(host)
    }

    /// What each consists of.
    pub(super) fn load(&self) -> Result<Vec<Images>, ApiError> {
        let load = |spec| {
            let found = self.place(spec).load();
            found.map_err(|why| self.refused(spec, &why))
        };
        self.specs.iter().map(load).collect()
    }

    pub(super) fn list(&self) -> Result<Snapshots, ApiError> {
        let all = self.load()?;
        let mut listed: Vec<SnapshotView> = Vec::new();
        for images in &all {
            for snapshot in &images.snapshots {
                let is_known = listed.iter().any(|known| known.name == snapshot.name);
                if !is_known {
                    listed.push(self.view(&all, snapshot));
                }
            }
        }
        let left = self.specs.iter().zip(&all).map(|(spec, images)| {
            let bytes = |name: &str| self.place(spec).bytes_of(images, name).unwrap_or_default();
            unneeded(images, &bytes)
        });
        Ok(Snapshots {
            after: all.iter().find_map(|images| images.after.clone()),
            unneeded_images: left.sum(),
            why_unmerged: String::new(),
            snapshots: listed,
        })
    }

    /// Disks that were frozen with it, that the VM has still, and that do not have it.
    fn lacking(&self, all: &[Images], snapshot: &Snapshot) -> Vec<String> {
        let all = self.specs.iter().zip(all);
        let lacking = all.filter(|(spec, images)| {
            snapshot.disks.contains(&spec.name) && images.snapshot(&snapshot.name).is_err()
        });
        lacking.map(|(spec, _)| spec.name.clone()).collect()
    }

    /// Refuses a snapshot that some of the disks lost which were frozen for it.
    pub(super) fn must_be_whole(
        &self,
        all: &[Images],
        snapshot: &Snapshot,
    ) -> Result<(), ApiError> {
        let lacking = self.lacking(all, snapshot);
        match lacking.is_empty() {
            true => Ok(()),
            false => Err(self.not_so(&format!(
                "snapshot '{}' is not whole: {} of those that were frozen with it lack it",
                snapshot.name,
                listed(&lacking)
            ))),
        }
    }

    fn view(&self, all: &[Images], snapshot: &Snapshot) -> SnapshotView {
        let bytes = self.specs.iter().zip(all).map(|(spec, images)| {
            let image = images.snapshot(&snapshot.name).map(|found| &found.image);
            let delta = image.ok().filter(|name| {
                images
                    .images
                    .get(*name)
                    .is_some_and(|image| image.kind == Kind::Delta)
            });
            let bytes = delta.and_then(|name| self.place(spec).bytes_of(images, name));
            bytes.unwrap_or_default()
        });
        SnapshotView {
            name: snapshot.name.clone(),
            after: snapshot.after.clone(),
            made_unix_s: snapshot.made_unix_s,
            text: snapshot.text.clone(),
            quiesced: snapshot.quiesced,
            disks: snapshot.disks.clone(),
            lacking: self.lacking(all, snapshot),
            bytes: bytes.sum(),
        }
    }

    /// What each is to consist of, with the deltas for it made: nothing names them yet.
    pub(super) fn prepare(
        &self,
        change: impl Fn(&Images, &Fresh) -> Result<Images, String>,
        over: impl Fn(&Images) -> Option<String>,
    ) -> Result<Vec<Changed>, ApiError> {
        self.prepare_at(change, over, |_| None)
    }

    /// What each is to consist of, as [`Self::prepare`] has it, where `at` gives a directory for a disk's delta, which is not the disk's own, and a
    /// name that nothing has there.
    pub(super) fn prepare_at(
        &self,
        change: impl Fn(&Images, &Fresh) -> Result<Images, String>,
        over: impl Fn(&Images) -> Option<String>,
        at: impl Fn(&DiskSpec) -> Option<(String, String)>,
    ) -> Result<Vec<Changed>, ApiError> {
        let mut changed = Vec::new();
        for (spec, mut before) in self.specs.iter().zip(self.load()?) {
            let place = self.place(spec);
            let may = place.must_take_snapshots();
            let prepared = may.and_then(|()| {
                place.must_be_the_latest(&before)?;
                before.next = place.free_number(&before)?;
                let own = files::delta(place.file_name()?, before.next);
                let (elsewhere, name) = at(spec).unzip();
                let fresh = Fresh {
                    name: name.unwrap_or(own),
                    id: random_number()?,
                    elsewhere,
                };
                let now = change(&before, &fresh)?;
                let over = over(&before).unwrap_or_else(|| before.top.clone());
                place.begin(&now)?;
                place.make(&now, &over, &fresh)?;
                Ok(Changed { before, now, fresh })
            });
            match prepared {
                Ok(one) => changed.push(one),
                Err(why) => {
                    self.unmake(&changed);
                    return Err(self.refused(spec, &why));
                }
            }
        }
        if changed.is_empty() {
            return Err(self.not_so("it has no disk that its guest may write"));
        }
        let maps = changed.iter().map(|one| map_bytes(&one.now)).sum();
        self.must_have_memory(maps)
            .inspect_err(|_| self.unmake(&changed))?;
        Ok(changed)
    }

    /// What deltas have in memory is beside the guest's, in what its host keeps for its process.
    fn must_have_memory(&self, maps: u64) -> Result<(), ApiError> {
        match maps <= MAPS_MAX {
            true => Ok(()),
            false => Err(self.not_so(&format!(
                "which of its images has which part of its disks would take up to {} MiB of memory, and {} are the most: delete some snapshots first, or, where disks were to move by redo logs, move fewer of them in one order, or leave out --method",
                maps >> 20,
                MAPS_MAX >> 20
            ))),
        }
    }

    /// Removes deltas that no description names.
    pub(super) fn unmake(&self, changed: &[Changed]) {
        for (spec, one) in self.specs.iter().zip(changed) {
            let (name, id) = (&one.fresh.name, &one.fresh.id);
            self.place(spec).remove(&one.now, name, Some(id));
        }
        self.remove_unnamed();
    }

    /// Removes what else was made beside them and is named by no description.
    fn remove_unnamed(&self) {
        for spec in &self.specs {
            let place = self.place(spec);
            match place.load() {
                Ok(images) => place.remove_unnamed(&images),
                Err(why) => tracing::info!(
                    disk = spec.name,
                    why,
                    "what was made beside a disk for a snapshot that is none may be left there"
                ),
            }
        }
    }

    pub(super) fn snapshot(&self, wish: &TakeSnapshot) -> Snapshot {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Snapshot {
            name: wish.name.clone(),
            after: None,
            image: String::new(),
            made_unix_s: since.unwrap_or_default().as_secs(),
            begun: self.specs.len() > 1,
            quiesced: false,
            text: wish.text.clone(),
            disks: self.specs.iter().map(|spec| spec.name.clone()).collect(),
        }
    }

    /// Writes down what they consist of from now on; all of them, or none. Where that fails it is not certain of those whose places come
    /// back with the error.
    pub(super) fn commit(&self, changed: &[Changed]) -> Result<(), (ApiError, Vec<usize>)> {
        for (place, (spec, one)) in self.specs.iter().zip(changed).enumerate() {
            let Err(why) = self.place(spec).save(&one.now) else {
                reached("snapshot.written");
                continue;
            };
            let all = self.specs.iter().zip(changed).enumerate();
            let unsure = all.take(place + 1).filter(|(_, (spec, one))| {
                let back = self.place(spec).save(&one.before);
                back.is_err()
            });
            let unsure = unsure.map(|(place, _)| place).collect();
            return Err((self.refused(spec, &why), unsure));
        }
        Ok(())
    }

    /// Forgets a snapshot that some of its disks lack since whoever took it died, and removes what was made for one and not named. One that lacks a
    /// disk for another reason, as where that was put back from a backup, stays: what it holds of the others may be wanted. Returns whether any was
    /// forgotten.
    pub(super) fn forget_halves(&self) -> Result<bool, ApiError> {
        let all = self.load()?;
        let mut forgot = false;
        for (spec, images) in self.specs.iter().zip(&all) {
            self.place(spec).remove_unnamed(images);
            let Some(last) = images.taken_last().filter(|last| last.begun) else {
                continue;
            };
            let is_half = !self.lacking(&all, last).is_empty();
            let now = match is_half {
                true => images.forget(&last.name),
                false => Ok(images.taken(&last.name, false)),
            };
            let saved = now.and_then(|now| self.place(spec).save(&now));
            saved.map_err(|why| self.refused(spec, &why))?;
            forgot |= is_half;
        }
        Ok(forgot)
    }

    /// Of several disks some may go back and others not where this process dies: none is used before all of them have. Where this fails, or what
    /// follows, that is so, and going back is to be tried again.
    fn begin_revert(&self, changed: &[Changed], name: &SnapshotName) -> Result<(), ApiError> {
        if changed.len() < 2 {
            return Ok(());
        }
        for (spec, one) in self.specs.iter().zip(changed) {
            let begun = one.before.reverting(name);
            let saved = begun.and_then(|begun| self.place(spec).save(&begun));
            saved.map_err(|why| self.refused(spec, &why))?;
            reached("snapshot.reverting");
        }
        Ok(())
    }

    /// Refuses what would go on from disks of which only some went back.
    fn must_not_be_reverting(&self) -> Result<(), ApiError> {
        for (spec, images) in self.specs.iter().zip(self.load()?) {
            let gone = images.must_be_one_moment(&self.config.vm);
            gone.map_err(|why| self.refused(spec, &why))?;
        }
        Ok(())
    }

    pub(super) fn forget(&self, name: &SnapshotName) -> Result<String, ApiError> {
        let all = self.load()?;
        let mut is_known = false;
        for (spec, images) in self.specs.iter().zip(&all) {
            if images.snapshot(name).is_err() {
                continue;
            }
            is_known = true;
            let saved = images
                .forget(name)
                .and_then(|now| self.place(spec).save(&now));
            saved.map_err(|why| self.refused(spec, &why))?;
            reached("snapshot.forgotten");
        }
        match is_known {
            true => Ok(format!(
                "snapshot '{name}' of VM '{}' is deleted",
                self.config.vm
            )),
            false => Err(self.unknown(name, &all)),
        }
    }

    pub(super) fn unknown(&self, name: &SnapshotName, all: &[Images]) -> ApiError {
        let names = all.first().map(|images| &images.snapshots);
        let names: Vec<&str> = names
            .into_iter()
            .flatten()
            .map(|snapshot| snapshot.name.as_str())
            .collect();
        let known = match names.is_empty() {
            true => "it has none".to_owned(),
            false => format!("it has {}", listed(&names)),
        };
        let message = format!("VM '{}' has no snapshot '{name}': {known}", self.config.vm);
        ApiError::new(ErrorCode::InvalidRequest, message).on_host(&self.config.host)
    }

    /// `quiesced`: why the guest's file systems did not stand still, where they did not; nothing of a VM that is off.
    pub(super) fn taken(
        &self,
        wish: &TakeSnapshot,
        stood: Option<Duration>,
        quiesced: Result<(), String>,
    ) -> String {
        let disks = listed(self.specs.iter().map(|spec| &spec.name));
        let (vm, name) = (&self.config.vm, &wish.name);
        let waited = stood.map_or_else(String::new, |stood| {
            format!("; its guest waited {:.0} ms", stood.as_secs_f64() * 1e3)
        });
        let like = match quiesced {
            Ok(()) => "; its file systems stood still".to_owned(),
            Err(why) if why.is_empty() => String::new(),
            Err(why) => format!("; it is as after a power cut, since {why}"),
        };
        format!("snapshot '{name}' of VM '{vm}' is taken, of {disks}{waited}{like}")
    }

    /// All of its disks have it. Before this a snapshot counts as one that may be a half, and as one after a power cut. Where it cannot be written down the
    /// snapshot is there all the same, and whoever settles halves writes that it is complete.
    pub(super) fn note_taken(&self, name: &SnapshotName, quiesced: bool) -> Result<(), String> {
        let all = self.load().map_err(|error| error.message)?;
        let mut noted = Ok(());
        for (spec, images) in self.specs.iter().zip(all) {
            let now = images.taken(name, quiesced);
            if now == images {
                continue;
            }
            noted = noted.and(self.place(spec).save(&now));
        }
        noted.inspect_err(|why| {
            tracing::warn!(%name, why, "that a snapshot is complete is not written yet");
        })
    }
}

/// Most that the maps of its deltas take, one for each that lies over the other.
pub(super) fn map_bytes(images: &Images) -> u64 {
    let deltas = images.chain(&images.top).len().saturating_sub(1) as u64;
    (images.bytes / BYTES_OF_MAP_BYTE).saturating_mul(deltas)
}

fn unneeded(images: &Images, bytes: &dyn Fn(&str) -> u64) -> u32 {
    let mut images = images.clone();
    let mut count = 0;
    while let Some(tidying) = images.unneeded(bytes) {
        images = images.tidied(&tidying);
        count += 1;
    }
    count
}

pub(super) fn written(specs: &[DiskSpec]) -> Vec<DiskSpec> {
    specs
        .iter()
        .filter(|disk| !disk.read_only)
        .cloned()
        .collect()
}

impl AtRest {
    pub(super) fn all(&self) -> All<'_> {
        All {
            config: &self.config,
            paths: &self.paths,
            owner: self.owner(),
            specs: written(&self.spec.disks),
            images: BTreeMap::new(),
        }
    }

    /// All disks that the guest may write, with their images locked for as long as what comes with them is kept.
    fn all_locked(&self) -> Result<(All<'_>, Vec<Image>), ApiError> {
        let mut all = self.all();
        let locked = self.lock_all(&all.specs)?;
        for (spec, image) in all.specs.iter().zip(&locked) {
            let found = fstat(image).map_err(|error| all.refused(spec, &error.to_string()))?;
            all.images
                .insert(spec.name.clone(), (found.st_dev, found.st_ino));
        }
        Ok((all, locked))
    }

    pub(crate) fn list_snapshots(&self) -> Result<Snapshots, ApiError> {
        self.all().list()
    }

    pub(crate) fn take_snapshot(&self, wish: &TakeSnapshot) -> Result<String, ApiError> {
        let (all, locked) = self.all_locked()?;
        all.must_not_be_reverting()?;
        all.forget_halves()?;
        let snapshot = all.snapshot(wish);
        let changed = all.prepare(
            |images, fresh| images.take(snapshot.clone(), fresh),
            |_| None,
        )?;
        for (spec, image) in all.specs.iter().zip(&locked) {
            self.write_layered_record(spec, image.as_fd())
                .inspect_err(|_| all.unmake(&changed))?;
        }
        match all.commit(&changed) {
            Ok(()) => {
                // Where it is not the next order, or start, writes it.
                let _ = all.note_taken(&wish.name, false);
                Ok(all.taken(wish, None, Err(String::new())))
            }
            Err((error, unsure)) => {
                if unsure.is_empty() {
                    all.unmake(&changed);
                }
                Err(error)
            }
        }
    }

    pub(crate) fn revert_snapshot(&self, name: &SnapshotName) -> Result<String, ApiError> {
        let (mut all, _locked) = self.all_locked()?;
        all.forget_halves()?;
        // A disk that came later stays as it is.
        let loaded = all.load()?;
        let known = all.specs.iter().zip(&loaded);
        let known = known.filter(|(_, images)| images.snapshot(name).is_ok());
        let (known, having): (Vec<DiskSpec>, Vec<&Images>) =
            known.map(|(spec, images)| (spec.clone(), images)).unzip();
        let found = having.first().and_then(|images| images.snapshot(name).ok());
        let found = found.ok_or_else(|| all.unknown(name, &loaded))?;
        all.must_be_whole(&loaded, found)?;
        all.specs = known;
        let image = |images: &Images| images.snapshot(name).ok().map(|found| found.image.clone());
        let revert = |images: &Images, fresh: &Fresh| images.revert(name, fresh);
        let changed = all.prepare(revert, image)?;
        all.begin_revert(&changed, name)?;
        // None is put back where one fails: each says itself that it is to go back, or has.
        for (spec, one) in all.specs.iter().zip(&changed) {
            let saved = all.place(spec).save(&one.now);
            saved.map_err(|why| all.refused(spec, &why))?;
            reached("snapshot.written");
        }
        for (spec, one) in all.specs.iter().zip(&changed) {
            let removed = all.place(spec).remove_what_leaves(&one.now);
            removed.map_err(|why| all.refused(spec, &why))?;
        }
        let disks = listed(all.specs.iter().map(|spec| &spec.name));
        Ok(format!(
            "VM '{}' begins again where snapshot '{name}' was taken, with {disks}",
            self.config.vm
        ))
    }

    pub(crate) fn delete_snapshot(&self, name: &SnapshotName) -> Result<String, ApiError> {
        let (all, _locked) = self.all_locked()?;
        all.must_not_be_reverting()?;
        let said = all.forget(name)?;
        all.forget_halves()?;
        let left = all.list()?.unneeded_images;
        Ok(match left {
            0 => said,
            _ => format!("{said}; what only it needed is merged once its guest runs"),
        })
    }
}
