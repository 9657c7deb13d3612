//! Disks that are copied for another VM, a clone of this one: as they are while nobody works with them, or as they were at a snapshot.
//!
//! What is copied lies beside the clone's places as parts ([`godwit_qemu::make_disk`]), under names that this attempt alone has, and is nobody's disk before
//! the clone is described. So a process that dies leaves parts alone, which later attempts remove. Once all are there they wait for who asked for them, for
//! [`UNTAKEN_MAX`]; what nobody takes is removed. Until then the order goes on, so that no disk changes that is copied, and no
//! older copy is taken for the newest.
//!
//! Owns how far it is. Waits for storage, so it runs on a thread of its own. Refuses: disks that were added after the snapshot, block devices, and
//! places where something is.

use super::layers::Place;
use super::resize::AtRest;
use super::snapshots::All;
use super::{Disks, LOCK_WAIT};
use crate::adoption::lock;
use crate::faults::reached;
use crate::files::Paths;
use crate::hypervisor::{common_user, reserved};
use crate::variables::{cloned_for, read_whole};
use godwit_blockio::Chain;
use godwit_blockio::delta::Delta;
use godwit_qemu::make_disk::{Maker, Part, Progress};
use godwit_qemu::reserved::Reserved;
use godwit_store::{make_directory, remove_document, save_json};
use godwit_types::clones::{CloneDisks, ClonedVariables, Cloning, cloned_variables_file};
use godwit_types::control_api::DiskMaking;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::vm::{DiskSpec, VmSpec};
use godwit_types::{ApiError, ErrorCode, SnapshotName};
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long what is copied waits for who asked for it.
const UNTAKEN_MAX: Duration = Duration::from_secs(60);
/// How long a failure waits for whoever follows it.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

/// Disks that are copied for one clone.
#[derive(Debug)]
pub(crate) struct CloneJob {
    wish: CloneDisks,
    now: Mutex<Now>,
    changed: Condvar,
    /// Nobody wants it any more.
    is_unwanted: AtomicBool,
    /// What is copied, until who asked for it has it, or it is removed.
    parts: Mutex<Vec<Part>>,
}

#[derive(Debug)]
enum Now {
    /// Which disk, and how far.
    Copies(String, Arc<Progress>),
    /// All is there and waits for who asked for it.
    Whole,
    /// Who asked for it has it.
    Taken,
    Failed(Instant, ApiError),
}

/// A disk of the clone, and what it is to hold.
pub(crate) struct Source {
    disk: DiskSpec,
    base: File,
    deltas: Vec<Delta>,
    bytes: u64,
    used: u64,
}

impl Source {
    fn of(disk: DiskSpec, base: File, deltas: Vec<Delta>, bytes: u64) -> Result<Self, String> {
        let found = base.metadata().map_err(|error| error.to_string())?;
        let used = found.blocks().saturating_mul(512).min(bytes);
        match found.is_file() {
            true => Ok(Self {
                disk,
                base,
                deltas,
                bytes,
                used,
            }),
            false => Err(
                "it is on a block device, beside which there is no place for another one: move it to a datastore that is a directory first"
                    .to_owned(),
            ),
        }
    }
}

impl CloneJob {
    pub(crate) fn new(wish: CloneDisks) -> Self {
        Self {
            wish,
            now: Mutex::new(Now::Copies(String::new(), Arc::default())),
            changed: Condvar::new(),
            is_unwanted: AtomicBool::new(false),
            parts: Mutex::default(),
        }
    }

    /// Whether it is what is asked for. Which addresses and ids the clone is to have may have been chosen anew.
    pub(crate) fn is_for(&self, wish: &CloneDisks) -> bool {
        let own = (&self.wish.spec.name, &self.wish.snapshot);
        own == (&wish.spec.name, &wish.snapshot)
    }

    pub(crate) fn is_under_way(&self) -> bool {
        matches!(*lock(&self.now), Now::Copies(..) | Now::Whole)
    }

    pub(crate) fn wish(&self) -> &CloneDisks {
        &self.wish
    }

    /// For whoever is refused meanwhile.
    pub(crate) fn clone_name(&self) -> String {
        self.wish.spec.name.to_string()
    }

    fn is_unwanted(&self) -> bool {
        self.is_unwanted.load(Ordering::SeqCst)
    }

    fn set(&self, now: Now) {
        *lock(&self.now) = now;
        self.changed.notify_all();
    }

    /// How far it is. What is whole is from then on whose who asks; nothing of what ended earlier.
    pub(crate) fn ask(&self) -> Result<Option<Cloning>, ApiError> {
        let mut now = lock(&self.now);
        match &*now {
            Now::Whole if !self.is_unwanted() => {
                *now = Now::Taken;
                self.changed.notify_all();
                let whole = Some(self.wish.spec.clone());
                Ok(Some(Cloning {
                    making: None,
                    whole,
                }))
            }
            Now::Copies(..) | Now::Whole => Ok(Some(shown(&now))),
            Now::Failed(at, error) if at.elapsed() < TOLD_WITHIN => Err(error.clone()),
            Now::Taken | Now::Failed(..) => Ok(None),
        }
    }

    /// The same for who only looks.
    pub(crate) fn shown(&self) -> Cloning {
        shown(&lock(&self.now))
    }

    /// It ends as soon as it can.
    pub(crate) fn stop(&self) {
        self.is_unwanted.store(true, Ordering::SeqCst);
        if let Now::Copies(_, progress) = &*lock(&self.now) {
            progress.stop.store(true, Ordering::Relaxed);
        }
        self.changed.notify_all();
    }

    fn refused(&self, config: &VmProcessConfig, why: &str) -> ApiError {
        let (vm, host) = (&config.vm, &config.host);
        let clone = &self.wish.spec.name;
        let message = format!("VM '{vm}' is not cloned as '{clone}' on host '{host}': {why}");
        ApiError::new(ErrorCode::InvalidRequest, message).on_host(host)
    }

    fn maker<'a>(&'a self, config: &'a VmProcessConfig, reserved: &'a Reserved) -> Maker<'a> {
        Maker {
            vm: &self.wish.spec.name,
            user: common_user(config, reserved).user,
            reserved,
            stores: &[],
        }
    }

    /// Copies all of them. `uid`: of the VM that is copied.
    pub(crate) fn copy(
        &self,
        (config, paths): (&VmProcessConfig, &Paths),
        uid: Option<u32>,
        sources: &[Source],
    ) -> Result<(), ApiError> {
        let reserved = reserved(config);
        let maker = self.maker(config, &reserved);
        for source in sources {
            let (disk, progress) = (&source.disk, Arc::<Progress>::default());
            self.set(Now::Copies(disk.name.clone(), Arc::clone(&progress)));
            if self.is_unwanted() {
                self.stop();
            }
            reached("clone.begun");
            let chain = Chain {
                base: &source.base,
                deltas: &source.deltas,
                bytes: source.bytes,
                used: source.used,
            };
            let copied = maker.copy(disk, chain, &progress);
            let part = copied
                .map_err(|why| self.refused(config, &format!("disk '{}': {why}", disk.name)))?;
            lock(&self.parts).push(part);
            reached("clone.copied");
        }
        let kept = keep_variables(paths, uid, &self.wish.spec);
        kept.map_err(|error| {
            self.refused(
                config,
                &format!("its UEFI variables are not copied: {error}"),
            )
        })?;
        reached("clone.whole");
        Ok(())
    }

    /// Waits for who asked for what is copied; what nobody wants is removed.
    pub(crate) fn end(
        &self,
        (config, paths): (&VmProcessConfig, &Paths),
        copied: Result<(), ApiError>,
    ) {
        let taken = copied.and_then(|()| self.wait_to_be_taken(config));
        let parts = std::mem::take(&mut *lock(&self.parts));
        let Err(error) = taken else {
            return;
        };
        let reserved = reserved(config);
        let maker = self.maker(config, &reserved);
        for disk in self.wish.spec.disks.iter().filter(|disk| disk.is_cloned()) {
            maker.remove_part(disk);
        }
        drop(parts);
        forget_variables(paths, &self.wish.spec);
        tracing::info!(%error, "a clone is not made");
        self.set(Now::Failed(Instant::now(), error));
    }

    fn wait_to_be_taken(&self, config: &VmProcessConfig) -> Result<(), ApiError> {
        lock(&self.parts).iter().for_each(Part::is_waited_for);
        self.set(Now::Whole);
        let now = lock(&self.now);
        let waits = |now: &mut Now| matches!(now, Now::Whole) && !self.is_unwanted();
        let waited = self.changed.wait_timeout_while(now, UNTAKEN_MAX, waits);
        let (mut now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if matches!(*now, Now::Taken) {
            return Ok(());
        }
        let why = match self.is_unwanted() {
            true => "it was called off",
            false => "nobody asked for it any more: give the command again",
        };
        let error = self.refused(config, why);
        // Nobody takes it from here on.
        *now = Now::Failed(Instant::now(), error.clone());
        Err(error)
    }
}

fn shown(now: &Now) -> Cloning {
    let making = match now {
        Now::Copies(disk, progress) => Some(DiskMaking {
            disk: disk.clone(),
            done_bytes: progress.done.load(Ordering::Relaxed),
            total_bytes: progress.total.load(Ordering::Relaxed),
        }),
        _ => None,
    };
    Cloning {
        making,
        whole: None,
    }
}

/// Those of a clone, until it starts. They are no part of any snapshot. A VM of this user id that never started has none, unless it is a clone itself.
fn keep_variables(paths: &Paths, uid: Option<u32>, clone: &VmSpec) -> io::Result<()> {
    if !clone.has_variables() {
        return Ok(());
    }
    let bytes = match File::open(paths.variables()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            cloned_for(paths, uid).map_err(io::Error::other)?
        }
        opened => Some(read_whole(&opened?)?),
    };
    let Some(bytes) = bytes else {
        return Ok(());
    };
    let kept = ClonedVariables {
        uid: clone.uid,
        bytes,
    };
    let at = variables_of(paths, clone);
    let made = make_directory(at.parent().unwrap_or(&at), 0o700);
    let kept = made.and_then(|()| save_json(&at, &kept));
    kept.map_err(io::Error::other)
}

/// Where this attempt puts them: its host's agent has them be the clone's once it names its disks.
fn variables_of(paths: &Paths, clone: &VmSpec) -> PathBuf {
    let own = paths.state.with_file_name(clone.name.as_str());
    own.join(cloned_variables_file(clone.attempt()))
}

/// Of a clone that has no disks of its own another attempt may have written the same file: whoever starts it looks for whom it is.
fn forget_variables(paths: &Paths, clone: &VmSpec) {
    let at = variables_of(paths, clone);
    let is_own = clone.attempt().is_some() && at.symlink_metadata().is_ok();
    if let Err(error) = is_own.then(|| remove_document(&at)).transpose() {
        tracing::warn!(%error, "the UEFI variables of a clone that is not made stay");
    }
}

impl All<'_> {
    /// Each with the disk of the clone that is to be a copy of it.
    fn pairs(&self, wish: &CloneDisks) -> Result<Vec<(&DiskSpec, DiskSpec)>, ApiError> {
        let clone = &wish.spec;
        self.must_be_described_so(wish)?;
        let wanted = |name: &str| {
            let mut disks = clone.disks.iter();
            disks.find(|disk| disk.name == name && disk.is_cloned())
        };
        let pairs = self.specs.iter().map(|spec| {
            let disk = wanted(&spec.name).cloned();
            disk.map(|disk| (spec, disk))
        });
        let pairs: Option<Vec<_>> = pairs.collect();
        let count = clone.disks.iter().filter(|disk| disk.is_cloned()).count();
        pairs.filter(|pairs| pairs.len() == count).ok_or_else(|| {
            self.not_so("its disks are described otherwise by the controller, which counts from its next start: start it once, then clone it")
        })
    }

    /// Who asks may know of other images, as after an edit that counts from the next start: these would be a copy of what he does not mean.
    fn must_be_described_so(&self, wish: &CloneDisks) -> Result<(), ApiError> {
        let mut specs = self.specs.iter();
        let other = specs.find_map(|spec| {
            let path = wish.disks.get(&spec.name)?;
            (*path != spec.path).then_some((spec, path))
        });
        match other {
            None => Ok(()),
            Some((spec, path)) => Err(self.not_so(&format!(
                "disk '{}' is {} there, and {path} by the VM's description, which counts from its next start: start it once, or describe the disk as it is, then clone it",
                spec.name, spec.path
            ))),
        }
    }

    /// As they are. Nobody else may have them open.
    fn as_they_are(&self, wish: &CloneDisks) -> Result<Vec<Source>, ApiError> {
        let pairs = self.pairs(wish)?.into_iter().map(|(spec, disk)| {
            let place = self.place(spec);
            let source = as_it_is(&place, disk);
            source.map_err(|why| self.refused(spec, &why))
        });
        pairs.collect()
    }

    /// As they were at a snapshot. `at_rest`: nobody has them open.
    fn as_they_were(
        &self,
        wish: &CloneDisks,
        name: &SnapshotName,
        at_rest: bool,
    ) -> Result<Vec<Source>, ApiError> {
        self.must_all_have(name)?;
        let pairs = self.pairs(wish)?.into_iter().map(|(spec, disk)| {
            let place = self.place(spec);
            let source = as_it_was(&place, disk, (name, at_rest));
            source.map_err(|why| self.refused(spec, &why))
        });
        pairs.collect()
    }

    fn must_all_have(&self, name: &SnapshotName) -> Result<(), ApiError> {
        let all = self.load()?;
        let found = all.iter().find_map(|images| images.snapshot(name).ok());
        let found = found.ok_or_else(|| self.unknown(name, &all))?;
        self.must_be_whole(&all, found)?;
        let mut disks = self.specs.iter().zip(&all);
        match disks.find(|(_, images)| images.snapshot(name).is_err()) {
            None => Ok(()),
            Some((spec, _)) => Err(self.not_so(&format!(
                "disk '{}' was added after snapshot '{name}', which has nothing of it: take another snapshot and clone that, or clone the VM as it is while it is off",
                spec.name
            ))),
        }
    }
}

fn as_it_is(place: &Place<'_>, disk: DiskSpec) -> Result<Source, String> {
    let base = place.open_own(true)?;
    let Some(images) = place.load_of(base.as_fd())? else {
        let bytes = base.metadata().map_err(|error| error.to_string())?.len();
        return Source::of(disk, base, Vec::new(), bytes);
    };
    images.must_be_one_moment(&place.config.vm)?;
    place.must_be_the_latest(&images)?;
    let deltas = place.open(&images, LOCK_WAIT, true)?;
    let base = place.below_all(&images, base, "clone")?;
    Source::of(disk, base, deltas, images.bytes)
}

fn as_it_was(
    place: &Place<'_>,
    disk: DiskSpec,
    (name, at_rest): (&SnapshotName, bool),
) -> Result<Source, String> {
    let base = place.open_own(true)?;
    let images = place.load_of(base.as_fd())?;
    let images = images.ok_or_else(|| format!("it has no snapshot '{name}'"))?;
    let mut chain = images.chain(&images.snapshot(name)?.image);
    // The disk's own image lies below all others, or what it is linked to.
    let own = chain.pop().map_or(Ok(false), |own| place.is_own(own))?;
    if !own && images.common().is_none() {
        return Err(format!(
            "the images of snapshot '{name}' do not lie over {}",
            place.spec.path
        ));
    }
    let mut deltas = Vec::new();
    for image in chain.into_iter().rev() {
        if at_rest {
            // A process may have died before it froze it.
            drop(place.open_frozen(&images, image, LOCK_WAIT, true)?);
        }
        deltas.push(place.open_unlocked(&images, image)?);
    }
    let base = place.below_all(&images, base, "clone")?;
    Source::of(disk, base, deltas, images.bytes)
}

impl AtRest {
    /// Copies the VM's disks, which nobody else has meanwhile unless they are those of a snapshot.
    pub(crate) fn clone_disks(&self, job: &CloneJob) -> Result<(), ApiError> {
        let all = self.all();
        let (wish, context) = (&job.wish, (&self.config, &self.paths));
        let locked = self.lock_all(&all.specs)?;
        if let Some(name) = &wish.snapshot {
            let sources = all.as_they_were(wish, name, true)?;
            // Its images are frozen: the guest may start.
            drop(locked);
            return job.copy(context, self.spec.uid, &sources);
        }
        let sources = all.as_they_are(wish)?;
        let copied = job.copy(context, self.spec.uid, &sources);
        for delta in sources.into_iter().flat_map(|source| source.deltas) {
            if let Err(error) = delta.close() {
                tracing::warn!(%error, "an image stays open that was only read");
            }
        }
        drop(locked);
        copied
    }
}

impl Disks {
    /// What the VM's disks held at a snapshot, while a guest goes on with them.
    pub(crate) fn sources_of(&self, wish: &CloneDisks) -> Result<Vec<Source>, ApiError> {
        let served = &self.0;
        let _one = lock(&served.descriptions);
        let all = served.all();
        match &wish.snapshot {
            Some(name) => all.as_they_were(wish, name, false),
            None => Err(all.not_so("its guest works with its disks")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_qemu::user::User;
    use godwit_store::load_json;
    use godwit_types::VmName;
    use std::collections::BTreeMap;

    fn wish(name: &str) -> CloneDisks {
        CloneDisks {
            spec: VmSpec::placeholder(&VmName::new(name).unwrap()),
            snapshot: None,
            disks: BTreeMap::new(),
        }
    }

    fn site() -> crate::testing::Site {
        crate::testing::Site::new()
    }

    #[test]
    fn what_is_copied_is_told_once_to_who_asked_for_it() {
        let job = Arc::new(CloneJob::new(wish("web2")));
        assert!(job.is_under_way() && job.is_for(&wish("web2")) && !job.is_for(&wish("web3")));
        let (ends, site) = (Arc::clone(&job), site());
        let end = std::thread::spawn(move || ends.end((&site.config, &site.paths), Ok(())));
        let whole = loop {
            let told = job.ask().unwrap().unwrap();
            if let Some(whole) = told.whole {
                break whole;
            }
            std::thread::yield_now();
        };
        end.join().unwrap();
        assert_eq!(whole.name.as_str(), "web2");
        assert!(!job.is_under_way());
        assert_eq!(job.ask().unwrap(), None, "it is that one's");
    }

    #[test]
    fn what_is_called_off_is_not_told_as_whole() {
        let job = Arc::new(CloneJob::new(wish("web2")));
        job.stop();
        let site = site();
        job.end((&site.config, &site.paths), Ok(()));
        let error = job.ask().unwrap_err();
        assert!(error.message.contains("called off"), "{error}");
        assert!(!job.is_under_way());
    }

    /// It was edited, which counts from the next start.
    #[test]
    fn other_images_than_those_of_the_description_are_not_copied() {
        let site = site();
        let all = All {
            config: &site.config,
            paths: &site.paths,
            owner: User { uid: 0, gid: 0 },
            specs: vec![DiskSpec::new("root", "/srv/old.raw")],
            images: BTreeMap::new(),
        };
        let described = |path: &str| CloneDisks {
            disks: BTreeMap::from([("root".to_owned(), path.to_owned())]),
            ..wish("web2")
        };
        let refused = all.must_be_described_so(&described("/srv/new.raw"));
        let told = refused.unwrap_err().message;
        assert!(told.contains("'root' is /srv/old.raw there"), "{told}");
        assert!(told.contains("start it once"), "{told}");
        for same in [described("/srv/old.raw"), wish("web2")] {
            assert!(all.must_be_described_so(&same).is_ok());
        }
        assert!(all.pairs(&described("/srv/new.raw")).is_err());
    }

    #[test]
    fn the_uefi_variables_of_two_attempts_are_two_files_and_go_with_their_own() {
        let site = site();
        let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 64\nhardware = 3\nfirmware = \"uefi\"\n[[disk]]\nname = \"root\"\npath = \"/srv/web-root.raw\"\n";
        let web = VmSpec::from_toml(text).unwrap();
        let clone = |digit: &str| {
            let new = VmName::new("web2").unwrap();
            web.cloned_as(&new, &digit.repeat(32)).unwrap()
        };
        std::fs::write(site.paths.variables(), "first").unwrap();
        keep_variables(&site.paths, None, &clone("1")).unwrap();
        std::fs::write(site.paths.variables(), "other").unwrap();
        keep_variables(&site.paths, None, &clone("2")).unwrap();
        let kept = |digit: &str| {
            let at = variables_of(&site.paths, &clone(digit));
            let kept: Option<ClonedVariables> = load_json(&at).unwrap();
            kept.map(|kept| kept.bytes)
        };
        assert_eq!(kept("1").as_deref(), Some(&b"first"[..]));
        forget_variables(&site.paths, &clone("1"));
        assert_eq!(kept("1"), None);
        assert_eq!(kept("2").as_deref(), Some(&b"other"[..]));
        // A clone that never started has what it is to begin with, and nothing of another VM of its name.
        std::fs::remove_file(site.paths.variables()).unwrap();
        let own = ClonedVariables {
            uid: Some(7),
            bytes: b"third".to_vec(),
        };
        save_json(&site.paths.cloned_variables(), &own).unwrap();
        keep_variables(&site.paths, Some(8), &clone("3")).unwrap();
        assert_eq!(kept("3"), None);
        keep_variables(&site.paths, Some(7), &clone("3")).unwrap();
        assert_eq!(kept("3").as_deref(), Some(&b"third"[..]));
    }
}
