//! Images that came with a VM whose migration is over here: removed, kept under another name, or left as they are for now.
//!
//! They may be the last that is left of a disk. So they are removed only where their source says that it has the disk; where a person says that
//! the source is gone, or the VM goes on without it, they are kept under a name that is no disk's and that nothing of Godwit
//! removes; until either is known they stay. Owns nothing: `disks.json` names them, and stays until each has its end, so that every
//! step is done again after a death. Refuses: to replace a file.

use super::Disks;
use super::entry::{Entry, Found, holds_nothing};
use super::images::{along, arrival, arriving_path, forget, remove};
use super::labelled::{Whose, arriving_name, keep_part, let_go, name_in, part_at};
use super::parts::Parts;
use super::record;
use super::served::ServedDisks;
use crate::files::Paths;
use crate::hypervisor::internal;
pub(crate) use godwit_ownership::CameSource as Source;
use godwit_ownership::{CameEnd, CameFound, CameImage};
use godwit_store::load_json;
use godwit_types::datastore::is_device_path;
use godwit_types::snapshots::description_of;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, Generation, MigrationId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// A file takes no more than this for its attributes alone, bytes.
const ATTRIBUTES_MAX: u64 = 64 << 10;
/// So many names are tried for an image that is kept.
const NAMES: u32 = 100;

/// Images that come with their VM. Until it is here they have names of their own ([`arriving_path`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arrival {
    pub(super) migration: MigrationId,
    /// The generation under which they were whole and durable here: who holds the VM under this one may use them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) whole: Option<Generation>,
    /// Whether this host held the VM under that one: they are its disks from then on, whatever generation follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) ours: bool,
    /// What else belongs to those with snapshots, by the disks' names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) parts: BTreeMap<String, Parts>,
    /// Whether a person said that the host from which they come is gone for good.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) source_gone: bool,
    /// Whether their source has not been connected yet: nothing of them can be here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_silent: bool,
    /// Whether this process has given them their names.
    #[serde(skip)]
    pub(super) is_here: bool,
}

impl Arrival {
    /// Whether they are this host's, which holds the VM under this generation.
    pub(super) fn belongs_to(&self, generation: Generation) -> bool {
        self.ours || self.whole == Some(generation)
    }

    /// With this migration, of which nothing has come.
    pub(super) fn of(migration: &MigrationId) -> Self {
        Self {
            migration: migration.clone(),
            whole: None,
            ours: false,
            parts: BTreeMap::new(),
            source_gone: false,
            is_silent: false,
            is_here: false,
        }
    }

    /// With this migration, whose source is still to connect.
    pub(super) fn to_come(migration: &MigrationId) -> Self {
        Self {
            is_silent: true,
            ..Self::of(migration)
        }
    }
}

impl Disks {
    /// Their source is connected: from here on something of them may be here. Durable before anything is.
    pub(crate) fn source_is_connected(&self) -> Result<(), ApiError> {
        let what = self.0.what();
        if !what
            .arriving
            .as_ref()
            .is_some_and(|arrival| arrival.is_silent)
        {
            return Ok(());
        }
        self.0.change(|what| {
            if let Some(arrival) = &mut what.arriving {
                arrival.is_silent = false;
            }
        })
    }
}

/// What became of images that were to be put aside, in sentences for people.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    pub kept: Vec<String>,
    /// Those that stay as they are until something is known, or can be done.
    pub waits: Vec<String>,
}

impl Aside {
    /// Refuses what would forget an image that is there still.
    pub(crate) fn must_be_over(mut self) -> Result<(), ApiError> {
        let waits = self.waits.pop();
        self.tell();
        waits.map_or(Ok(()), |why| Err(internal(why)))
    }

    /// Each is a warning in the log.
    pub(crate) fn tell(self) {
        self.kept
            .into_iter()
            .chain(self.waits)
            .for_each(|sentence| tracing::warn!("{sentence}"));
    }
}

/// With which migration images came that are not this host's, if any are noted.
pub(crate) fn what_came(paths: &Paths) -> Option<MigrationId> {
    let (_, arrival) = arrival(paths)?;
    (!arrival.ours).then_some(arrival.migration)
}

/// The VM is not here, or comes anew: what came of its disks with an earlier migration gets its end, as far as that is known of its
/// source. `promised` is the generation under which this host was ready to take the VM, if it was.
pub(crate) fn put_aside(paths: &Paths, source: Source, promised: Option<Generation>) -> Aside {
    let mut aside = Aside::default();
    let mut all_settled = true;
    if let Some((what, arrival)) = arrival(paths) {
        if arrival.ours {
            let id = &arrival.migration;
            tracing::warn!(
                "images that came with migration {id} were this host's and have no names yet: they are left beside the VM's disks (.arriving-{id})"
            );
            return aside;
        }
        let source = source.given_up(arrival.source_gone);
        all_settled = settle_all((&what, &arrival), source, promised, &mut aside);
    }
    // Whoever looks again tries again.
    if all_settled {
        forget(paths);
    }
    aside
}

/// This host holds the VM under another generation than the one for which they were whole.
pub(super) fn keep_all(what: &ServedDisks, arrival: &Arrival) -> Aside {
    let mut aside = Aside::default();
    settle_all((what, arrival), Source::Gone, None, &mut aside);
    aside
}

/// Returns whether nothing of them is left to be done.
fn settle_all(
    (what, arrival): (&ServedDisks, &Arrival),
    source: Source,
    promised: Option<Generation>,
    aside: &mut Aside,
) -> bool {
    let mut all_settled = true;
    let own = what.disks.iter().enumerate();
    for (place, disk) in own.filter(|(_, disk)| disk.goes_along()) {
        let came = Came {
            disk,
            device: what.images.get(place).map(|(device, _)| *device),
            arrival,
            promised,
        };
        all_settled &= came.settle(source, aside);
    }
    all_settled
}

/// Refuses to keep another part of a disk beside one that is kept: else each try would take the room of one more.
/// Refuses, too, where it cannot be looked whether something came.
pub(crate) fn may_keep(paths: &Paths) -> Result<(), ApiError> {
    let Some((what, arrival)) = arrival(paths) else {
        return Ok(());
    };
    // What is on a device is kept nowhere else.
    let files = |disk: &&DiskSpec| !is_device_path(&disk.path);
    for disk in along(&what.disks).filter(files) {
        if let Err(error) = Entry::at(Path::new(&disk.path)) {
            let (name, path) = (&disk.name, arriving_path(&disk.path, &arrival.migration));
            return Err(ApiError::new(
                ErrorCode::WrongState,
                format!(
                    "what came of disk '{name}' before, as {path}, is out of reach ({error}): mount the file system that it is on, and try again"
                ),
            ));
        }
        let kept = kept_of(&disk.path).filter(|_| arrival.whole.is_none());
        if let Some(kept) = kept {
            let (name, id) = (&disk.name, &arrival.migration);
            return Err(ApiError::new(
                ErrorCode::WrongState,
                format!(
                    "a part of disk '{name}' came with migration {id}, its source does not say that it has the disk, and an earlier copy is kept as {kept}: see which of them is needed, move that one away or remove it, and try again"
                ),
            ));
        }
    }
    Ok(())
}

/// One that is kept of the disk with this path.
fn kept_of(path: &str) -> Option<String> {
    let (above, name) = (Path::new(path).parent()?, Path::new(path).file_name()?);
    let kept = format!("{}.kept-", name.to_str()?);
    let names = std::fs::read_dir(above).ok()?.flatten();
    let mut paths = names.map(|entry| entry.path());
    let is_kept = |found: &std::path::PathBuf| {
        let name = found.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(&kept))
    };
    paths.find(is_kept).map(|path| path.display().to_string())
}

/// What was just made for this migration, and nothing has come into, is removed.
pub(super) fn unmake(paths: &Paths, migration: &MigrationId) {
    if what_came(paths).as_ref() == Some(migration) {
        put_aside(paths, Source::HasDisks, None);
    }
}

/// A person says that the host from which they come is gone for good, and no hypervisor has them: durably.
pub(crate) fn source_is_gone(paths: &Paths) -> Result<(), ApiError> {
    let what: Option<ServedDisks> = load_json(&paths.disks()).map_err(internal)?;
    let Some(mut what) = what else { return Ok(()) };
    note_gone(&mut what);
    record::write(paths, &what).map_err(internal)
}

fn note_gone(what: &mut ServedDisks) {
    if let Some(arrival) = &mut what.arriving {
        arrival.source_gone = true;
    }
}

impl Disks {
    /// As [`source_is_gone`], of those that a hypervisor has.
    pub(crate) fn source_is_gone(&self) -> Result<(), ApiError> {
        match self.0.what().arriving {
            Some(_) => self.0.change(note_gone),
            None => source_is_gone(&self.0.paths),
        }
    }
}

/// The image of one disk that came.
struct Came<'a> {
    disk: &'a DiskSpec,
    /// That of its file system, once something may have come.
    device: Option<u64>,
    arrival: &'a Arrival,
    promised: Option<Generation>,
}

impl Came<'_> {
    fn path(&self) -> String {
        arriving_path(&self.disk.path, &self.arrival.migration)
    }

    /// The names that one may get which is kept. They are no longer than the one that it has.
    fn kept_path(&self, number: u32) -> String {
        let (path, id) = (&self.disk.path, &self.arrival.migration);
        match number {
            1 => format!("{path}.kept-{id}"),
            number => format!("{path}.kept-{id}-{number}"),
        }
    }

    /// Returns whether nothing of it is left to be done.
    fn settle(&self, source: Source, aside: &mut Aside) -> bool {
        if is_device_path(&self.disk.path) {
            return self.settle_on_device(source, aside);
        }
        let path = self.path();
        let (found, taken) = match self.look() {
            Ok(looked) => looked,
            Err(error) => return self.stays(&error, aside),
        };
        if found == CameFound::Away && source != Source::Unknown {
            tracing::warn!(
                path,
                "what came of a disk is not there: if it is on a file system that is not mounted now, nothing tells of it any more"
            );
        }
        match self.judge(source, found) {
            // The image is last: as long as it is there it is tried again.
            CameEnd::Removed => self.parts_are_gone() && remove(Path::new(&path)),
            CameEnd::Kept => self.keep_file(aside),
            CameEnd::Stays if found == CameFound::Away => {
                let away = io::Error::other("the file system that it is on is not mounted there");
                self.stays(&away, aside)
            }
            CameEnd::Stays => {
                let (disk, id, mib) = (&self.disk.name, &self.arrival.migration, mib(taken));
                aside.waits.push(format!(
                    "what came of disk '{disk}' with migration {id} stays as {path} ({mib} MiB) until its source says that it has the disk, and is removed then; remove it yourself if you know that nobody needs it; if that host is lost for good, 'godwit host remove HOST --confirm-unreachable' has it kept"
                ));
                false
            }
        }
    }

    fn judge(&self, source: Source, found: CameFound) -> CameEnd {
        let is_whole = self.arrival.whole.is_some();
        CameImage { source, is_whole }.judge(found)
    }

    /// What else came of it, if it has snapshots.
    fn parts(&self) -> Option<&Parts> {
        let parts = self.arrival.parts.get(&self.disk.name);
        parts.filter(|parts| !parts.is_none())
    }

    fn parts_are_gone(&self) -> bool {
        let own = Path::new(&self.disk.path);
        self.parts().is_none_or(|parts| parts.remove(own))
    }

    fn keep_file(&self, aside: &mut Aside) -> bool {
        match self.keep() {
            Ok(Some(path)) => {
                let durable = make_durable(Path::new(&path));
                aside.kept.push(self.told_kept(&path, durable));
            }
            Ok(None) => {}
            Err(error) => return self.stays(&error, aside),
        }
        true
    }

    /// As [`Self::settle`], of a part of a disk that is on a device: it has no other name than its label tells.
    fn settle_on_device(&self, source: Source, aside: &mut Aside) -> bool {
        let (path, id) = (&self.disk.path, &self.arrival.migration);
        let (name, kept) = (arriving_name(path, id), name_in(&self.kept_path(1)));
        let bytes = match part_at(path, &name) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return self.settle_away(source, &error, aside);
            }
            Err(error) => return self.stays_on_device(&error, aside),
        };
        let (disk, mib) = (&self.disk.name, mib(bytes));
        match self.judge(source, CameFound::Something) {
            CameEnd::Removed => let_go(Path::new(path), &[Whose::Part(&name)]),
            CameEnd::Stays => {
                aside.waits.push(format!(
                    "what came of disk '{disk}' with migration {id} stays on the device {path} ({mib} MiB) until its source says that it has the disk, and is let go then; if that host is lost for good, 'godwit host remove HOST --confirm-unreachable' has it kept"
                ));
                false
            }
            CameEnd::Kept => match keep_part(path, [&name, &kept]) {
                Ok(true) => {
                    let state = self.state();
                    aside.kept.push(format!(
                        "what came of disk '{disk}' with migration {id} is kept on the device {path} ({mib} MiB): {state}; to go on from it let 'godwit image release {path}' call it a disk on this host, name the device as the 'path' of the disk in the VM's description, and start that here; it stays until somebody lets it go"
                    ));
                    true
                }
                // Somebody changed it just now: what is there by then is found by the next look.
                Ok(false) => {
                    self.stays_on_device(&io::Error::other("its label was changed"), aside)
                }
                Err(error) => self.stays_on_device(&error, aside),
            },
        }
    }

    /// As [`Self::settle`], where the device is not there: as of a file system that is not mounted, nobody waits for it who knows what is to become of it.
    fn settle_away(&self, source: Source, error: &io::Error, aside: &mut Aside) -> bool {
        let (path, id) = (&self.disk.path, &self.arrival.migration);
        match self.judge(source, CameFound::Away) {
            CameEnd::Stays => self.stays_on_device(error, aside),
            CameEnd::Removed => {
                tracing::warn!(path, %error, "what came to a device is let go once that is there again");
                false
            }
            CameEnd::Kept => {
                aside.kept.push(format!(
                    "what came of disk '{}' with migration {id} is on the device {path}, which is not there now ({error}): its label tells of it, and nothing else does any more; 'godwit image release {path}' calls it a disk once it is there again",
                    self.disk.name
                ));
                true
            }
        }
    }

    /// What is there of it, and the bytes that this takes. Where nothing is, a file system that is not mounted may have it, or has another number by now.
    fn look(&self) -> io::Result<(CameFound, u64)> {
        let path = self.path();
        let entry = match Entry::at(Path::new(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            entry => Some(entry?),
        };
        let size = entry.as_ref().map(Entry::size).transpose()?.flatten();
        let is_away = match &entry {
            Some(entry) => self.device.is_some_and(|device| !entry.is_on(device)),
            None => true,
        };
        Ok(match (&entry, size) {
            // What its snapshots hold is in other files.
            (Some(entry), Some((_, taken)))
                if self.parts().is_none() && self.is_empty(entry, taken) =>
            {
                (CameFound::Empty, 0)
            }
            (_, Some((_, taken))) => (CameFound::Something, taken),
            (_, None) if is_away => (CameFound::Away, 0),
            (_, None) => (CameFound::Nothing, 0),
        })
    }

    /// Whether nothing ever came into it. Its file system may count attributes, and tell of no holes.
    fn is_empty(&self, entry: &Entry<'_>, taken: u64) -> bool {
        let was_silent = self.arrival.is_silent && taken <= ATTRIBUTES_MAX;
        was_silent || is_hollow(entry, taken)
    }

    fn stays(&self, error: &io::Error, aside: &mut Aside) -> bool {
        self.stays_as(&self.path(), error, aside)
    }

    fn stays_on_device(&self, error: &io::Error, aside: &mut Aside) -> bool {
        self.stays_as(
            &format!("a part on the device {}", self.disk.path),
            error,
            aside,
        )
    }

    fn stays_as(&self, path: &str, error: &io::Error, aside: &mut Aside) -> bool {
        let (disk, id) = (&self.disk.name, &self.arrival.migration);
        aside.waits.push(format!(
            "what came of disk '{disk}' with migration {id} cannot be put aside ({error}): it stays as {path}, and this is tried again"
        ));
        false
    }

    /// Gives it a name that is free, durably; also where a predecessor did that and died. Returns the name; none where nothing came.
    fn keep(&self) -> io::Result<Option<String>> {
        let path = self.path();
        let came = Path::new(&path);
        let mut taken: Option<String> = None;
        for number in 1..=NAMES {
            let kept = self.kept_path(number);
            let (found, entry) = match Entry::looked_at(Path::new(&kept)) {
                // Where there is no directory nothing of it has another name.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                looked => looked?,
            };
            if found == Found::Nothing {
                match entry.take_from(came.file_name().unwrap_or_default()) {
                    Ok(()) => {
                        self.keep_description(&kept)?;
                        entry.sync()?;
                        return Ok(Some(kept));
                    }
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    // A predecessor gave it the last name that is taken.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        if let Some(taken) = &taken {
                            self.keep_description(taken)?;
                            Entry::at(Path::new(taken))?.sync()?;
                        }
                        return Ok(taken);
                    }
                    Err(error) => return Err(error),
                }
            }
            taken = Some(kept);
        }
        Err(io::Error::other(format!(
            "{} names like {} are taken",
            NAMES,
            self.kept_path(1)
        )))
    }

    /// What its snapshots are lies beside the image that is kept; their files stay where they are.
    fn keep_description(&self, kept: &str) -> io::Result<()> {
        if self.parts().is_none() {
            return Ok(());
        }
        let (from, to) = (
            description_of(Path::new(&self.disk.path)),
            description_of(Path::new(kept)),
        );
        let entry = Entry::at(&to)?;
        match entry.take_from(from.file_name().unwrap_or_default()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Where it is, what it is, and what a person does with it; `durable` is what came of making it so.
    fn told_kept(&self, path: &str, durable: io::Result<Option<(u64, u64)>>) -> String {
        let (disk, id) = (&self.disk.name, &self.arrival.migration);
        let (mib, durable) = match durable {
            Ok(size) => (mib(size.map_or(0, |(_, taken)| taken)), String::new()),
            Err(error) => (0, format!("; that it is durable is not certain ({error})")),
        };
        let state = self.state();
        if self.parts().is_some() {
            let own = &self.disk.path;
            return format!(
                "the image of disk '{disk}' that came with migration {id} is kept as {path} ({mib} MiB): {state}{durable}; it has snapshots: to go on from it give {path} and {path}.images the names {own} and {own}.images again, name {own} as the 'path' of the disk in the VM's description, and start that on this host; it stays, with the files {own}.d*, until somebody removes it"
            );
        }
        let written = match written_at(Path::new(path)) {
            Some(at) => at.strftime("at %Y-%m-%d %H:%M:%S UTC").to_string(),
            None => "at a time that is not known".to_owned(),
        };
        format!(
            "the image of disk '{disk}' that came with migration {id} is kept as {path} ({mib} MiB, written last {written}): {state}{durable}; to go on from it name it as the 'path' of the disk in the VM's description, or in a new VM's, and start that on this host; it stays until somebody removes it"
        )
    }

    fn state(&self) -> &'static str {
        match self.arrival.whole {
            Some(whole) if self.promised == Some(whole) => {
                "it is whole and durable, with all that the disk had when the guest was stopped at its source"
            }
            Some(_) => {
                "it was whole and durable, and may have only a part of what the guest wrote at its source after that"
            }
            None => "it is not known to be whole, so that parts of the disk may be missing",
        }
    }
}

/// All that the image has. Returns its bytes and those that it takes.
fn make_durable(path: &Path) -> io::Result<Option<(u64, u64)>> {
    let entry = Entry::at(path)?;
    entry.open()?.sync_all()?;
    entry.size()
}

fn written_at(path: &Path) -> Option<jiff::Timestamp> {
    let written = path.symlink_metadata().ok()?.modified().ok()?;
    jiff::Timestamp::try_from(written).ok()
}

/// Whether nothing was ever written to a file that takes so many bytes, as far as that can be told.
fn is_hollow(entry: &Entry<'_>, taken: u64) -> bool {
    let is_empty = || entry.open().and_then(|file| holds_nothing(&file));
    taken == 0 || taken <= ATTRIBUTES_MAX && is_empty().unwrap_or(false)
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
#[path = "came_tests.rs"]
mod tests;
