//! Disks of VMs that are to start here, being made.
//!
//! Owns a thread for each VM whose disks are made just now, and how it ended until that was told. An agent that ends takes them along: what
//! was begun is begun anew. The UEFI variables of a clone are what its own attempt has copied, and are the clone's before its disks have their names. Refuses: what [`godwit_qemu::make_disk`] refuses, in a sentence that names disk, VM and host.

use crate::agent::{Agent, Reply, blocking, done};
use godwit_qemu::make_disk::{Maker, Progress};
use godwit_qemu::reserved::Reserved;
use godwit_qemu::user::User;
use godwit_store::{StoreError, load_json, remove_document, save_json};
use godwit_types::clones::{
    CLONED_VARIABLES_FILE, ClonedVariables, cloned_variables_file, is_of_attempt,
};
use godwit_types::control_api::{DiskMaking, DisksMaking, Done};
use godwit_types::datastore::Datastores;
use godwit_types::{ApiError, ErrorCode, HostName, VmName, VmSpec};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a call waits for the end: a small image is made at once.
const WAIT: Duration = Duration::from_secs(2);
/// How long a failure waits for whoever follows it.
const TOLD_WITHIN: Duration = Duration::from_secs(10);
/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// All VMs whose disks are being made.
#[derive(Debug, Default)]
pub(crate) struct Makings(Mutex<BTreeMap<VmName, Arc<Job>>>);

#[derive(Debug)]
struct Job {
    spec: VmSpec,
    now: Mutex<Now>,
    /// Whether nobody wants it any more.
    is_unwanted: AtomicBool,
}

#[derive(Debug)]
enum Now {
    /// Which disk, and how far.
    Makes(String, Arc<Progress>),
    Ended(Instant, Result<(), ApiError>),
}

impl Job {
    /// Whether it makes what is described so.
    fn is_for(&self, spec: &VmSpec) -> bool {
        self.spec.disks == spec.disks && !self.is_unwanted.load(Ordering::Relaxed)
    }

    /// Whether it is under way, or has failed just now and nobody was told of it. What is done is looked at again, which is
    /// soon over.
    fn counts(&self) -> bool {
        match &*self.lock() {
            Now::Makes(..) => true,
            Now::Ended(at, result) => result.is_err() && at.elapsed() < TOLD_WITHIN,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, now: Now) {
        *self.lock() = now;
    }

    /// It ends as soon as it can.
    fn stop(&self) {
        self.is_unwanted.store(true, Ordering::Relaxed);
        if let Now::Makes(_, progress) = &*self.lock() {
            progress.stop.store(true, Ordering::Relaxed);
        }
    }

    /// Waits for its end, for a while. Returns whether it has ended.
    async fn ends(&self) -> bool {
        let ended = async {
            while matches!(self.shown(), Ok(Some(_))) {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::time::timeout(WAIT, ended).await.is_ok()
    }

    fn shown(&self) -> Result<Option<DiskMaking>, ApiError> {
        match &*self.lock() {
            Now::Makes(disk, progress) => Ok(Some(DiskMaking {
                disk: disk.clone(),
                done_bytes: progress.done.load(Ordering::Relaxed),
                total_bytes: progress.total.load(Ordering::Relaxed),
            })),
            Now::Ended(_, result) => result.clone().map(|()| None),
        }
    }
}

/// As whom and where.
struct Setting {
    host: HostName,
    user: User,
    reserved: Reserved,
    /// Directories of its datastores.
    stores: Vec<PathBuf>,
    /// Where the VM's records are.
    state: PathBuf,
}

impl Makings {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far a VM's disks are.
    fn shown(&self, vm: &VmName) -> DisksMaking {
        let job = self.lock().get(vm).cloned();
        let making = job.and_then(|job| job.shown().ok().flatten());
        DisksMaking { making }
    }

    /// Goes on with what is under way, begins what is not, and tells once how it ended.
    fn go_on(&self, spec: &VmSpec, setting: Setting) -> Reply<Arc<Job>> {
        let mut jobs = self.lock();
        match jobs.get(&spec.name) {
            Some(job) if job.is_for(spec) && job.counts() => {
                return Ok(Arc::clone(job));
            }
            Some(job) if matches!(job.shown(), Ok(Some(_))) => {
                let message = format!(
                    "disks of VM '{}' are being made on host '{}' as it was described before, which is being ended: try again in a moment",
                    spec.name, setting.host
                );
                return Err(ApiError::new(ErrorCode::WrongState, message).on_host(&setting.host));
            }
            _ => {}
        }
        let first = spec.disks_to_make().next();
        let name = first.map_or_else(String::new, |disk| disk.name.clone());
        let job = Arc::new(Job {
            spec: spec.clone(),
            now: Mutex::new(Now::Makes(name, Arc::default())),
            is_unwanted: AtomicBool::new(false),
        });
        let work = Arc::clone(&job);
        let begun = std::thread::Builder::new()
            .name("make-disks".into())
            .spawn(move || {
                let made = make_all(&work, &setting);
                work.set(Now::Ended(Instant::now(), made));
            });
        begun.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        jobs.insert(spec.name.clone(), Arc::clone(&job));
        Ok(job)
    }

    /// Ends what is under way for a VM as it was described before.
    async fn end_former(&self, spec: &VmSpec) {
        let former = self.lock().get(&spec.name).cloned();
        if let Some(former) = former.filter(|job| !job.is_for(spec)) {
            former.stop();
            former.ends().await;
        }
    }

    fn forget(&self, vm: &VmName, ended: &Arc<Job>) {
        let mut jobs = self.lock();
        if jobs.get(vm).is_some_and(|job| Arc::ptr_eq(job, ended)) {
            jobs.remove(vm);
        }
    }
}

fn make_all(job: &Job, setting: &Setting) -> Result<(), ApiError> {
    let (vm, host) = (&job.spec.name, &setting.host);
    let maker = Maker {
        vm,
        user: setting.user,
        reserved: &setting.reserved,
        stores: &setting.stores,
    };
    adopt_variables(&setting.state, &job.spec).map_err(|error| {
        let message = format!(
            "the UEFI variables that were copied for VM '{vm}' cannot be kept on host '{host}': {error}"
        );
        ApiError::new(ErrorCode::Internal, message).on_host(host)
    })?;
    for disk in job.spec.disks_to_make() {
        let progress = Arc::<Progress>::default();
        job.set(Now::Makes(disk.name.clone(), Arc::clone(&progress)));
        if job.is_unwanted.load(Ordering::Relaxed) {
            job.stop();
        }
        let made = maker.make(disk, &progress);
        made.map_err(|why| {
            let message = format!(
                "disk '{}' of VM '{vm}' cannot be made on host '{host}': {why}",
                disk.name
            );
            ApiError::new(ErrorCode::InvalidRequest, message).on_host(host)
        })?;
        tracing::info!(%vm, disk = disk.name, path = disk.path, "a disk is made");
    }
    Ok(())
}

/// Has what the attempt copied that is described be the clone's, and removes what others left: nobody else is to have this name. It may have been
/// allotted another user id since.
fn adopt_variables(state: &Path, spec: &VmSpec) -> Result<(), StoreError> {
    let Some(number) = spec.attempt() else {
        return Ok(());
    };
    let own = state.join(cloned_variables_file(Some(number)));
    if let Some(kept) = load_json::<ClonedVariables>(&own)? {
        let kept = ClonedVariables {
            uid: spec.uid,
            ..kept
        };
        save_json(&state.join(CLONED_VARIABLES_FILE), &kept)?;
    }
    for left in attempted_variables(state) {
        remove_document(&left)?;
    }
    Ok(())
}

/// What attempts to make a clone have left in the directory of a VM's records.
pub(crate) fn attempted_variables(state: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(state).into_iter().flatten().flatten();
    let left = all.filter(|entry| entry.file_name().to_str().is_some_and(is_of_attempt));
    left.map(|entry| entry.path()).collect()
}

/// `is_absent`: this host has no VM of that name, whose variables these could be.
fn forget_parts(setting: &Setting, spec: &VmSpec, is_absent: bool) -> Reply<()> {
    let maker = Maker {
        vm: &spec.name,
        user: setting.user,
        reserved: &setting.reserved,
        stores: &setting.stores,
    };
    for disk in spec.disks_to_make().filter(|disk| disk.is_cloned()) {
        maker.remove_part(disk);
    }
    let number = spec.attempt();
    let own = number.map(|number| cloned_variables_file(Some(number)));
    let adopted = is_absent.then(|| CLONED_VARIABLES_FILE.to_owned());
    for name in own.into_iter().chain(adopted) {
        let at = setting.state.join(name);
        if at.symlink_metadata().is_ok() {
            remove_document(&at)
                .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        }
    }
    Ok(())
}

fn must_be(name: &VmName, spec: &VmSpec) -> Reply<()> {
    let wrong = |what: String| ApiError::new(ErrorCode::InvalidVm, what);
    spec.check().map_err(|error| wrong(error.to_string()))?;
    match spec.name == *name {
        true => Ok(()),
        false => Err(wrong(format!("VM '{}' is not VM '{name}'", spec.name))),
    }
}

/// Those datastores that have files.
pub(crate) fn directories(stores: &Datastores) -> Vec<PathBuf> {
    let dirs = stores.values().filter(|store| !store.is_device());
    dirs.map(|store| PathBuf::from(&store.path)).collect()
}

impl Agent {
    /// Makes the disks of a VM that is to start here: none is being made once all are there.
    pub(crate) async fn make_disks(&self, name: &VmName, spec: VmSpec) -> Reply<DisksMaking> {
        must_be(name, &spec)?;
        self.closing.refuse(self.host())?;
        let setting = self.setting(name);
        self.makings.end_former(&spec).await;
        let job = self.makings.go_on(&spec, setting)?;
        if job.ends().await {
            self.makings.forget(name, &job);
        }
        let making = job.shown()?;
        Ok(DisksMaking { making })
    }

    /// Removes what an attempt to make a clone copied, and what has no name yet: its VM was deleted. An image is never removed.
    pub(crate) async fn forget_clone(&self, name: &VmName, spec: VmSpec) -> Reply<Done> {
        must_be(name, &spec)?;
        let (setting, is_absent) = (self.setting(name), self.records.is_absent(name));
        let host = self.host().clone();
        blocking(move || {
            forget_parts(&setting, &spec, is_absent)?;
            Ok(done(format!(
                "what was copied for VM '{}' is gone from host '{host}'",
                spec.name
            )))
        })
        .await
    }

    fn setting(&self, name: &VmName) -> Setting {
        Setting {
            host: self.host().clone(),
            user: User {
                uid: self.user.uid,
                gid: self.user.gid,
            },
            reserved: self.config.reserved(),
            stores: directories(&self.config.datastores),
            state: self.records.dir(name),
        }
    }

    /// How far they are.
    pub(crate) fn disks(&self, name: &VmName) -> DisksMaking {
        self.makings.shown(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::spec;
    use godwit_types::vm::{DiskSpec, clone_part_of};

    /// Others may have been copied under the same name, of another VM.
    #[test]
    fn a_clone_has_the_variables_of_the_attempt_that_is_described_and_those_of_others_go() {
        let dir = tempfile::tempdir().unwrap();
        let file = |number: &str| dir.path().join(cloned_variables_file(Some(number)));
        let (own, other) = ("1".repeat(32), "2".repeat(32));
        for (number, bytes) in [(&own, b"own"), (&other, b"db?")] {
            let kept = ClonedVariables {
                uid: Some(1),
                bytes: bytes.to_vec(),
            };
            save_json(&file(number), &kept).unwrap();
        }
        let mut clone = spec("web2");
        clone.uid = Some(2);
        clone.disks.push(DiskSpec {
            from: Some(clone_part_of("/srv/web2-root.raw", &own)),
            ..DiskSpec::new("root", "/srv/web2-root.raw")
        });
        for _ in 0..2 {
            adopt_variables(dir.path(), &clone).unwrap();
            let kept = load_json(&dir.path().join(CLONED_VARIABLES_FILE)).unwrap();
            let wanted = ClonedVariables {
                uid: Some(2),
                bytes: b"own".to_vec(),
            };
            assert_eq!(kept, Some(wanted));
            assert!(attempted_variables(dir.path()).is_empty());
        }
    }

    /// A clone was deleted before its disks had their names.
    #[test]
    fn of_a_clone_that_is_deleted_half_made_nothing_stays_and_no_image_is_removed() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| dir.path().join(name);
        let number = "1".repeat(32);
        let disk = |name: &str| {
            let path = at(&format!("web2-{name}.raw")).to_str().unwrap().to_owned();
            DiskSpec {
                from: Some(clone_part_of(&path, &number)),
                ..DiskSpec::new(name, path)
            }
        };
        let mut clone = spec("web2");
        clone.disks = vec![disk("root"), disk("data")];
        for disk in &clone.disks {
            std::fs::write(disk.from.as_ref().unwrap(), "copied").unwrap();
        }
        std::fs::write(at("web2-data.raw"), "an image").unwrap();
        for file in [CLONED_VARIABLES_FILE, &cloned_variables_file(Some(&number))] {
            std::fs::write(at(file), "{}").unwrap();
        }
        let setting = Setting {
            host: HostName::new("a").unwrap(),
            user: User {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
            reserved: Reserved::default(),
            stores: Vec::new(),
            state: dir.path().to_owned(),
        };
        let names = || {
            let all = std::fs::read_dir(dir.path()).unwrap();
            let names = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        };
        forget_parts(&setting, &clone, false).unwrap();
        assert_eq!(names(), [CLONED_VARIABLES_FILE, "web2-data.raw"]);
        forget_parts(&setting, &clone, true).unwrap();
        assert_eq!(names(), ["web2-data.raw"]);
    }

    #[tokio::test]
    async fn disks_that_are_made_of_a_vm_as_it_was_described_before_are_ended() {
        let (before, mut now) = (spec("web"), spec("web"));
        now.disks.push(DiskSpec::new("root", "/srv/root.raw"));
        let progress = Arc::<Progress>::default();
        let job = Arc::new(Job {
            spec: before.clone(),
            now: Mutex::new(Now::Makes("root".to_owned(), Arc::clone(&progress))),
            is_unwanted: AtomicBool::new(false),
        });
        let makings = Makings::default();
        makings.lock().insert(before.name.clone(), Arc::clone(&job));
        makings.end_former(&before).await;
        assert!(!progress.stop.load(Ordering::Relaxed) && job.is_for(&before));
        let (work, is_told) = (Arc::clone(&job), Arc::clone(&progress));
        let maker = std::thread::spawn(move || {
            while !is_told.stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            work.set(Now::Ended(Instant::now(), Ok(())));
        });
        makings.end_former(&now).await;
        maker.join().unwrap();
        assert!(!job.is_for(&before) && !job.is_for(&now));
        assert!(!makings.lock()[&now.name].counts());
    }
}
