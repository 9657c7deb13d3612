//! Redo logs of disks that move by snapshotting, the laboratory's first method: put over disks, kept in mind, and removed.
//!
//! A log is a delta ([`super::layers`]) of which no moment is kept. The first one of all disks that move together is put over them at one moment.
//! Logs lie beside the new image, under names that nothing else has, or, of a disk that goes to another host, beside its own image; the disk's description says where, so that whoever comes after this process serves
//! the disk as it is, and has its logs come down into its image again ([`super::tidying`]). While a disk moves nothing of it is tidied.
//!
//! Part of a move; what one disk goes through on its host is in [`super::by_logs`], what goes to another host in [`super::sending_logs`]. Owns which disks move so. Refuses: disks on block devices,
//! beside which there is no place for logs, and to have a part of a disk that several hosts have on storage of this one alone.

use super::layers::Place;
use super::parts::Parts;
use super::served::Served;
use super::snapshots::All;
use super::switching::Stopped;
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::delta::forget_map;
use godwit_delta::Id;
use godwit_qemu::disk::must_be_free;
use godwit_snapshots::{Images, files};
use godwit_types::datastore::is_device_path;
use godwit_types::disk_move::{DiskPlace, FirstLog, Method};
use godwit_types::vm::DiskSpec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What stands in the names of logs between that of the new image and what is theirs alone.
const MOVING: &str = ".moving-";

/// A number of the file that is a disk's own image: by its path and its inode. Its logs have it in their names.
fn whose((path, inode): (&str, u64)) -> u64 {
    let inode = inode.to_le_bytes();
    let bytes = path.bytes().chain([0]).chain(inode);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// What the name of a log says that lies in another directory than its disk's own image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Made {
    /// A number of the image for which it was made,
    whose: u64,
    /// and in which directory, by its inode: where that is not mounted another one has its path.
    within: u64,
}

impl Made {
    /// Nothing of a name that earlier builds gave, or of what is no log.
    fn of(name: &str) -> Option<Self> {
        let (stem, _) = name.rsplit_once(".d")?;
        let (_, of_move) = stem.rsplit_once(MOVING)?;
        let mut numbers = of_move.split('-').skip(1);
        let mut next = || u64::from_str_radix(numbers.next()?, 16).ok();
        Some(Self {
            whose: next()?,
            within: next()?,
        })
    }

    fn text(self) -> String {
        format!("-{:016x}-{:x}", self.whose, self.within)
    }
}

/// Whether the log that has this file, which is not there, may be where its datastore is mounted: it is removed once that is. With the rights of whoever opens
/// it.
pub(super) fn may_be_away(extent: &Path) -> bool {
    let name = extent.file_name().and_then(|name| name.to_str());
    let made = name.and_then(|name| Made::of(files::of_extent(name)?));
    let directory = || extent.parent()?.metadata().ok();
    made.is_some_and(|made| directory().is_none_or(|found| found.ino() != made.within))
}

/// Refuses what lies in another directory than the disk's own image, by a path that a copy of that and of its description names, too, where it was made for
/// another file: two disks would write to one log. What does not say for which is no log of this disk.
pub(super) fn must_be_made_for(images: &Images, own: (&str, u64)) -> Result<(), String> {
    let mut elsewhere = images.elsewhere.iter();
    let is_anothers = |name: &str| Made::of(name).is_none_or(|made| made.whose != whose(own));
    match elsewhere.find(|(name, _)| is_anothers(name)) {
        None => Ok(()),
        Some((name, directory)) if Made::of(name).is_none() => Err(format!(
            "its part {name} in {directory} does not say that it was made for this image: an earlier build did not write that, or somebody else described it; make one image of all of it while no VM has it ('qemu-img convert -f vmdk -O raw {directory}/{name}.vmdk NEW.raw'), and give the disk that path"
        )),
        Some((name, directory)) => Err(format!(
            "{} is a copy, or has another path than it had: its part {name} in {directory} was made for another file, and both would write to it; use the image that was there, under its path, or make one image of all of it while no VM has it ('qemu-img convert -f vmdk -O raw {directory}/{name}.vmdk NEW.raw')",
            own.0
        )),
    }
}

/// A log that is about to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RedoLog {
    pub disk: String,
    /// Where it lies, if not beside its disk's own image,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub directory: String,
    /// and its name in the disk's description then.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl RedoLog {
    /// Whether it is among these, which go with the former image of a disk of this name, or lies beside that.
    pub fn goes_with(&self, disk: &str, parts: &Parts) -> bool {
        let extent = Path::new(&self.directory).join(files::extent(&self.name));
        let mut files = parts.files.iter();
        let is_noted = self.name.is_empty() || files.any(|part| Path::new(&part.path) == extent);
        self.disk == disk && is_noted
    }
}

/// Where the logs of a disk lie that moves.
#[derive(Debug, Clone)]
enum Lie {
    /// All of them beside the disk's own image: it goes to another host, of which the disk must need nothing.
    Beside,
    There {
        /// Where the new image is to be,
        directory: String,
        /// and what the names of logs there begin with.
        stem: String,
        first: FirstLog,
    },
}

/// The logs of a disk that moves.
#[derive(Debug, Clone)]
pub(super) struct Logs {
    lie: Lie,
    /// The image to which the guest wrote before: the disk's own, or, of a linked disk, what lies over the one to which it is linked.
    over: String,
    /// How long the guest's requests waited while logs were put over the disk.
    pub frozen: Duration,
    /// Since when the disk has been at both places.
    pub spans: Option<Instant>,
}

impl Logs {
    /// Of a disk whose own image is this file.
    fn of(place: &DiskPlace, own: (&str, u64), moment: u128, over: &str) -> Result<Self, String> {
        let told = |error: std::io::Error| format!("the directory of {}: {error}", place.path);
        let path = Path::new(&place.path);
        let directory = path.parent().and_then(Path::to_str);
        let name = path.file_name().and_then(|name| name.to_str());
        let (Some(directory), Some(name)) = (directory, name) else {
            return Err(format!("{} names no file", place.path));
        };
        let made = Made {
            whose: whose(own),
            within: Path::new(directory).metadata().map_err(told)?.ino(),
        };
        Ok(Self {
            lie: Lie::There {
                directory: directory.to_owned(),
                stem: format!("{name}{MOVING}{moment:x}{}", made.text()),
                first: place.first_log,
            },
            over: over.to_owned(),
            frozen: Duration::ZERO,
            spans: None,
        })
    }

    /// Of a disk that goes to another host, over its own image of this name.
    fn here(own: &str) -> Self {
        Self {
            lie: Lie::Beside,
            over: own.to_owned(),
            frozen: Duration::ZERO,
            spans: None,
        }
    }

    /// Where log `number` lies, and how it is called, if that is not beside the disk's own image.
    fn place_of(&self, number: u32) -> Option<(String, String)> {
        match &self.lie {
            Lie::Beside => None,
            Lie::There { first, .. } if number <= 1 && *first == FirstLog::Source => None,
            Lie::There {
                directory, stem, ..
            } => Some((directory.clone(), files::delta(stem, number.into()))),
        }
    }

    /// Whether the disk consists of what it did before, which lies in its own directory, and so many of these, in their order, and of nothing else.
    fn are_all_of(&self, images: &Images, logs: u32) -> bool {
        let mut chain = images.chain(&images.top);
        chain.reverse();
        let all = chain.len();
        let below = if images.common().is_some() { 2 } else { 1 };
        let over = chain.split_off(below.min(all));
        let is_before = chain.last() == Some(&self.over.as_str());
        let is_beside = chain
            .iter()
            .all(|name| !images.elsewhere.contains_key(*name));
        let is_log = |(number, name): (u32, &&str)| {
            let lies_at = images.elsewhere.get(*name);
            match self.place_of(number) {
                Some((directory, log)) => **name == *log && lies_at == Some(&directory),
                None => lies_at.is_none(),
            }
        };
        let is_all =
            images.snapshots.is_empty() && images.leaving.is_empty() && images.images.len() == all;
        let are_so_many = over.len() == logs as usize;
        is_before && is_beside && is_all && are_so_many && (1..).zip(&over).all(is_log)
    }
}

/// Refuses an image beside which there is no place for logs.
pub(super) fn must_have_place_for_logs(path: &str) -> Result<(), String> {
    match is_device_path(path) {
        true => Err("redo logs lie beside a disk's images, and beside a block device there is no place for them: leave out --method, and it is mirrored".to_owned()),
        false => Ok(()),
    }
}

/// Refuses disks that have no place for logs.
pub(super) fn must_take_logs(spec: &DiskSpec, place: &DiskPlace) -> Result<(), String> {
    must_have_place_for_logs(&spec.path)?;
    must_have_place_for_logs(&place.path)?;
    match spec.shared && !place.shared {
        true => Err(
            "other hosts have its image, and would not have its redo logs, which would be on storage of this host alone: leave out --method, and it is mirrored"
                .to_owned(),
        ),
        false => Ok(()),
    }
}

impl Served {
    /// Puts a first log over those of these disks that move by logs, at one moment.
    pub(super) fn begin_logs(&self, places: &[DiskPlace]) -> Result<(), Stopped> {
        let by_logs = places
            .iter()
            .filter(|place| place.method == Method::Snapshot);
        let by_logs: Vec<&DiskPlace> = by_logs.collect();
        if by_logs.is_empty() {
            return Ok(());
        }
        let _turn = lock(&self.moves.turn);
        self.must_be_clean()?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let moment = since.unwrap_or_default().as_nanos();
        let mut logs = BTreeMap::new();
        let what = self.what();
        for place in &by_logs {
            let mut disks = what.with_images();
            let known = disks.find(|(disk, _)| disk.name == place.disk);
            let (spec, image) = known.ok_or("the VM has no such disk")?;
            // Logs alone are told from the lowest on, over what has all that lay below the first.
            self.must_be_copied_whole(spec, place.method)?;
            must_be_free(Path::new(&place.path))?;
            let over = self.all().place(spec).load()?.top;
            let own = (spec.path.as_str(), image.1);
            logs.insert(place.disk.clone(), Logs::of(place, own, moment, &over)?);
        }
        // From here on nothing of them is tidied.
        lock(&self.by_logs).extend(logs);
        let names: Vec<&str> = by_logs.iter().map(|place| place.disk.as_str()).collect();
        self.put_logs(&names, 1)
    }

    /// From here on nothing of these is tidied, which go to another host. Their logs are put over them one after the other, the first one over their own
    /// images.
    pub(super) fn begin_logs_here<'a>(&self, disks: impl Iterator<Item = &'a DiskSpec>) {
        let here = disks.map(|spec| {
            let own = Path::new(&spec.path).file_name();
            let own = own.and_then(|name| name.to_str()).unwrap_or_default();
            (spec.name.clone(), Logs::here(own))
        });
        lock(&self.by_logs).extend(here);
    }

    /// These move no more, and those of them that moved by logs are tidied.
    pub(super) fn end_logs(self: &Arc<Self>, places: &[DiskPlace]) {
        let names: Vec<&str> = places.iter().map(|place| place.disk.as_str()).collect();
        self.end_logs_of(&names);
    }

    pub(super) fn end_logs_of(self: &Arc<Self>, names: &[&str]) {
        let mut by_logs = lock(&self.by_logs);
        let known = by_logs.len();
        by_logs.retain(|disk, _| !names.contains(&disk.as_str()));
        let ended = by_logs.len() < known;
        drop(by_logs);
        if ended {
            self.tidying_is_due();
        }
    }

    /// What a disk consists of that moves by logs; refused where that is not what it was before and so many logs of its move alone.
    pub(super) fn logged(
        &self,
        place: &Place<'_>,
        own: BorrowedFd<'_>,
        logs: u32,
    ) -> Result<Images, String> {
        let images = place.load_of(own)?;
        let images = images.ok_or("its redo logs are not described any more")?;
        let by_logs = lock(&self.by_logs);
        let known = by_logs.get(&place.spec.name);
        match known.is_some_and(|known| known.are_all_of(&images, logs)) {
            true => Ok(images),
            false => Err(format!(
                "it does not consist of what it was before and {logs} redo logs of this move alone any more: see the log of the VM process, and try again once 'godwit vm snapshot list' tells of nothing that is left to be merged"
            )),
        }
    }

    /// Makes log `number` of these disks, durably, and puts it over them, at one moment.
    pub(super) fn put_logs(&self, names: &[&str], number: u32) -> Result<(), Stopped> {
        let _one = lock(&self.descriptions);
        let what = self.what();
        let disks = what.disks.iter();
        let specs = disks.filter(|disk| names.contains(&disk.name.as_str()));
        let all = All {
            specs: specs.cloned().collect(),
            ..self.all()
        };
        let logs = lock(&self.by_logs).clone();
        let at = |spec: &DiskSpec| logs.get(&spec.name)?.place_of(number);
        let made = all.specs.iter().map(|spec| {
            let (directory, name) = at(spec).unwrap_or_default();
            RedoLog {
                disk: spec.name.clone(),
                directory,
                name,
            }
        });
        let made: Vec<RedoLog> = made.collect();
        // What a process that dies makes of them is removed by the next.
        self.change(|what| what.logs.extend(made))
            .map_err(|error| error.message)?;
        let changed = all.prepare_at(Images::freeze, |_| None, at);
        let changed = changed.map_err(|error| error.message)?;
        reached("redo.made");
        let stood = self.freeze(&all, &changed);
        let stood = stood.map_err(|error| error.message)?;
        reached("redo.put-over");
        let now = Instant::now();
        for (_, logs) in lock(&self.by_logs)
            .iter_mut()
            .filter(|(name, _)| names.contains(&name.as_str()))
        {
            logs.frozen += stood.stood;
            if logs.place_of(number).is_some() {
                logs.spans.get_or_insert(now);
            }
        }
        Ok(())
    }

    /// Removes logs that were made and that no description names. Whoever calls this has the turn.
    pub(super) fn remove_unnamed_logs(&self) {
        let what = self.what();
        if what.logs.is_empty() {
            return;
        }
        let _one = lock(&self.descriptions);
        let all = self.all();
        let stays = |log: &RedoLog| {
            let mut specs = all.specs.iter();
            let spec = specs.find(|spec| spec.name == log.disk);
            spec.is_some_and(|spec| {
                let place = all.place(spec);
                let described = place.load();
                described.map_or(true, |images| place.keeps_log(log, &images))
            })
        };
        let logs: Vec<RedoLog> = what.logs.iter().filter(|log| stays(log)).cloned().collect();
        if logs == what.logs {
            return;
        }
        if let Err(error) = self.change(|what| what.logs = logs) {
            tracing::warn!(%error, "that redo logs are removed is not written yet");
        }
    }
}

impl Place<'_> {
    /// What lies over the disk's own image, and is of no use without it, each of which bears the number that is described.
    pub fn parts_of_logs(&self, images: &Images) -> Result<Parts, String> {
        self.parts_of(images)
    }

    /// They lie over a disk no more.
    pub fn forget_maps(&self, images: &Images) {
        for (_, image) in images.deltas() {
            if let Some(id) = image.id.as_deref().and_then(Id::of_digits) {
                // It is gone with the next boot of the host.
                let _ = forget_map(&self.map_of(id));
            }
        }
    }

    /// Removes a log that is not described. Returns whether it is, or stays for now.
    fn keeps_log(&self, log: &RedoLog, described: &Images) -> bool {
        if !log.name.is_empty() {
            let lies_at = described.elsewhere.get(&log.name);
            return lies_at == Some(&log.directory) || !self.remove_log(log, described.bytes);
        }
        self.remove_unnamed(described);
        false
    }

    /// Removes a log that no description names, of a disk of so many bytes: one that holds nothing, or a part of one. Returns whether nothing of it is left.
    fn remove_log(&self, log: &RedoLog, bytes: u64) -> bool {
        let Ok(own) = self.file_name() else {
            return false;
        };
        // Its file system may come back.
        if !Path::new(&log.directory).is_dir() {
            return false;
        }
        let mut images = Images::of_one(own, bytes, "");
        let (name, directory) = (log.name.clone(), log.directory.clone());
        images.elsewhere.insert(name, directory);
        if !self.is_unused(&images, &log.name) {
            return false;
        }
        // What a process that died had not given its name.
        let parts = [files::descriptor(&log.name), files::extent(&log.name)];
        let parts = parts.map(|part| Path::new(&log.directory).join(format!("{part}.new")));
        let are_gone = parts.iter().all(|part| super::images::remove(part));
        are_gone && self.remove(&images, &log.name, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_snapshots::{Common, Fresh};

    const OWN: &str = "root.raw";

    fn logs(first: FirstLog) -> Logs {
        Logs {
            lie: Lie::There {
                directory: "/srv/fast".to_owned(),
                stem: "new.raw.moving-1".to_owned(),
                first,
            },
            over: OWN.to_owned(),
            frozen: Duration::ZERO,
            spans: None,
        }
    }

    /// With another one over it, of this name.
    fn under(images: &Images, name: &str, elsewhere: Option<&str>) -> Images {
        let fresh = Fresh {
            name: name.to_owned(),
            id: format!("{:032x}", images.next),
            elsewhere: elsewhere.map(str::to_owned),
        };
        images.freeze(&fresh).unwrap()
    }

    #[test]
    fn a_copy_of_an_image_does_not_open_the_redo_logs_of_the_original() {
        let there = tempfile::tempdir_in("/var/tmp").unwrap();
        let place = DiskPlace {
            disk: "root".to_owned(),
            path: format!("{}/new.raw", there.path().display()),
            shared: false,
            max_bandwidth_mbit_per_s: None,
            method: Method::Snapshot,
            without: Vec::new(),
            first_log: FirstLog::Destination,
        };
        let original = ("/srv/slow/root.raw", 131);
        let logs = Logs::of(&place, original, 77, OWN).unwrap();
        let (directory, name) = logs.place_of(2).unwrap();
        let one = Images::of_one(OWN, 4096, &"5".repeat(32));
        let images = under(&one, &name, Some(&directory));
        assert_eq!(must_be_made_for(&images, original), Ok(()));
        // 'cp -a' keeps the mark, and what is described.
        for copy in [
            ("/srv/slow/copy/root.raw", 131),
            ("/srv/slow/root.raw", 132),
        ] {
            let refused = must_be_made_for(&images, copy).unwrap_err();
            assert!(refused.contains("both would write to it"), "{refused}");
        }
        // Whoever wrote a description could name any delta of this host, which went with the disk.
        for name in ["new.raw.moving-1.d1", "db.raw.d1"] {
            let other = under(&one, name, Some("/srv/fast"));
            assert!(must_be_made_for(&other, original).is_err(), "{name}");
        }
    }

    #[test]
    fn a_log_whose_datastore_is_not_mounted_is_not_taken_for_gone() {
        let (there, below) = (
            tempfile::tempdir_in("/var/tmp").unwrap(),
            tempfile::tempdir_in("/var/tmp").unwrap(),
        );
        let made = Made {
            whose: 7,
            within: there.path().metadata().unwrap().ino(),
        };
        let name = format!("new.raw{MOVING}4d{}.d2", made.text());
        assert_eq!(Made::of(&name), Some(made));
        let at = |directory: &Path| directory.join(files::extent(&name));
        assert!(!may_be_away(&at(there.path())), "it is gone");
        // What lies under a mount point, and where there is none.
        assert!(may_be_away(&at(below.path())));
        assert!(may_be_away(&at(&below.path().join("vms"))));
        // Names of earlier builds tell nothing.
        let older = files::extent("new.raw.moving-4d.d2");
        assert!(!may_be_away(&below.path().join(older)));
    }

    #[test]
    fn a_disk_that_moves_consists_of_its_image_and_the_logs_of_its_move_alone() {
        let one = Images::of_one(OWN, 4096, &"5".repeat(32));
        let there = logs(FirstLog::Destination);
        let first = under(&one, "new.raw.moving-1.d1", Some("/srv/fast"));
        let second = under(&first, "new.raw.moving-1.d2", Some("/srv/fast"));
        assert!(there.are_all_of(&one, 0) && !there.are_all_of(&one, 1));
        assert!(there.are_all_of(&first, 1) && there.are_all_of(&second, 2));
        assert!(!there.are_all_of(&second, 1));
        let of_another = Logs {
            over: "data.raw".to_owned(),
            ..there.clone()
        };
        assert!(!of_another.are_all_of(&second, 2));
        // Whoever tidies puts one over it that is none of the move's.
        let tidied = under(&first, "root.raw.d2", None);
        assert!(!there.are_all_of(&tidied, 2));
        let other = under(&first, "new.raw.moving-2.d2", Some("/srv/fast"));
        assert!(!there.are_all_of(&other, 2));
        let here = logs(FirstLog::Source);
        let first = under(&one, "root.raw.d1", None);
        let second = under(&first, "new.raw.moving-1.d2", Some("/srv/fast"));
        assert!(here.are_all_of(&first, 1) && here.are_all_of(&second, 2));
        assert!(!there.are_all_of(&first, 1));
    }

    #[test]
    fn a_linked_disk_that_moves_consists_of_two_images_more_and_the_logs_alone() {
        let (id, mark) = ("9".repeat(32), "5".repeat(32));
        let common = Common {
            path: "/srv/golden/base.raw",
            id: &id,
        };
        let own = Fresh {
            name: "root.raw.d1".to_owned(),
            id: "7".repeat(32),
            elsewhere: None,
        };
        let linked = Images::linked(common, 4096, &mark, &own).unwrap();
        for first_log in [FirstLog::Destination, FirstLog::Source] {
            let logs = Logs {
                over: own.name.clone(),
                ..logs(first_log)
            };
            let first = match first_log {
                FirstLog::Destination => under(&linked, "new.raw.moving-1.d1", Some("/srv/fast")),
                FirstLog::Source => under(&linked, "root.raw.d2", None),
            };
            let second = under(&first, "new.raw.moving-1.d2", Some("/srv/fast"));
            assert!(logs.are_all_of(&linked, 0) && !logs.are_all_of(&linked, 1));
            assert!(logs.are_all_of(&first, 1) && !logs.are_all_of(&first, 0));
            assert!(logs.are_all_of(&second, 2) && !logs.are_all_of(&second, 3));
            // Whoever tidies brings a log into what lies over the common image, or the other way round.
            let of_own = Logs {
                over: OWN.to_owned(),
                ..logs.clone()
            };
            assert!(!of_own.are_all_of(&second, 2));
        }
    }

    #[test]
    fn all_logs_of_a_disk_that_goes_to_another_host_lie_beside_its_own_image() {
        let here = Logs::here(OWN);
        let one = Images::of_one(OWN, 4096, &"5".repeat(32));
        let first = under(&one, "root.raw.d1", None);
        let second = under(&first, "root.raw.d2", None);
        assert!(here.are_all_of(&first, 1) && here.are_all_of(&second, 2));
        let away = under(&first, "new.raw.moving-1.d2", Some("/srv/fast"));
        assert!(!here.are_all_of(&away, 2));
    }
}
