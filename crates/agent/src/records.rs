//! What this host has durably written about its VMs, read and written on the VMs' behalf while no VM process lives.
//!
//! A VM process owns its VM's files while it lives, by their lock; this module takes that lock for each write and
//! gives up at once if it is held. Who may run a VM is decided by crate `ownership` alone: events in, records out.
//! Refuses: to act on a record that cannot be read; to carry out anything that would need a hypervisor.

use crate::keeping::changed;
use crate::launch::make_dir;
use crate::life::{Life, phase_wants_process};
use crate::seen::Seen;
use godwit_ownership::{Action, Event, HostRecord, Phase, Power, Qemu, VmCore};
use godwit_store::{StoreError, VmStore, load_json, read_text, save_json};
use godwit_types::host_api::{DISKS_FILE, HostVm, PutVm, SPEC_FILE};
use godwit_types::image::KnownImage;
use godwit_types::vm::{VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId, VmName};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most VMs that a host keeps records of.
pub(crate) const VMS_MAX: usize = 16_384;
/// With so many on record no further one begins at another host's word: the rest is the controller's.
pub(crate) const PEERS_VMS_MAX: usize = VMS_MAX / 2;
/// Most steps that one event may take.
const STEPS_MAX: usize = 64;
/// Longest wait for a lock that this process itself has.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// Pause between two tries of it.
const LOCK_POLL: Duration = Duration::from_millis(5);
/// Beside a VM's record: the boot of this host in which the VM was last seen or started.
const BOOT_FILE: &str = "boot-id";
/// Longest such file, in bytes.
pub(crate) const BOOT_FILE_MAX: u64 = 256;
/// In the state directory: serial numbers of revoked certificates.
const REVOKED_FILE: &str = "revoked.json";

/// Every VM's durable files on this host.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    state_dir: PathBuf,
    host: HostName,
    pub(crate) seen: Arc<AllSeen>,
}

/// What was read of VMs' files and has not changed since.
#[derive(Debug, Default)]
pub(crate) struct AllSeen {
    records: Seen<HostRecord>,
    specs: Seen<VmSpec>,
    pub(crate) images: Seen<Vec<KnownImage>>,
}

pub(crate) fn internal(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}

pub(crate) fn stored(error: StoreError) -> ApiError {
    let code = match error {
        StoreError::Locked { .. } => ErrorCode::Locked,
        _ => ErrorCode::Internal,
    };
    ApiError::new(code, error.to_string())
}

/// A description that cannot be read, with what a person can do: the controller has it, too.
fn undescribed(vm: &VmName, error: ApiError) -> ApiError {
    let message = format!(
        "{}; the controller writes it anew with the next 'godwit vm start {vm}', once the VM is off ('godwit vm stop {vm}')",
        error.message
    );
    ApiError::new(error.code, message)
}

pub(crate) fn or_absent(record: Option<HostRecord>, vm: &VmName) -> HostRecord {
    record.unwrap_or_else(|| HostRecord::absent(vm.clone()))
}

/// A handover that a VM process is to settle (a QEMU may be there) is not changed behind its back.
fn not_a_process_matter(record: &HostRecord) -> Result<(), ApiError> {
    let handover = !matches!(record.phase, Phase::Holds { .. });
    if !handover || !phase_wants_process(&record.phase) {
        return Ok(());
    }
    let message = format!(
        "VM '{}' is in use on this host: stop it, or let its migration end, first",
        record.vm
    );
    Err(ApiError::new(ErrorCode::WrongState, message))
}

impl Records {
    /// The records under the agent's state directory.
    pub(crate) fn new(state_dir: &Path, host: HostName) -> Self {
        Self {
            state_dir: state_dir.into(),
            host,
            seen: Arc::default(),
        }
    }

    pub(crate) fn dir(&self, vm: &VmName) -> PathBuf {
        self.vms_dir().join(vm.as_str())
    }

    pub(crate) fn vms_dir(&self) -> PathBuf {
        self.state_dir.join("vms")
    }

    pub(crate) fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    pub(crate) fn host(&self) -> &HostName {
        &self.host
    }

    /// Names of all VMs that are described here, or that this host may hold: a grant is durable before its description is.
    /// A directory that cannot be read is not taken for an empty one.
    pub(crate) fn names(&self) -> std::io::Result<Vec<VmName>> {
        let mut names = named(&self.vms_dir())?;
        names.retain(|name| {
            let is_described = self.spec(name).map_or(true, |spec| spec.is_some());
            is_described || self.needs_process(name) || self.may_hold(name)
        });
        Ok(names)
    }

    /// Whether this host may hold the VM by its record; of one that cannot be read nobody knows.
    pub(crate) fn may_hold(&self, vm: &VmName) -> bool {
        self.record(vm).is_some_and(|record| record.may_hold())
    }

    /// Whether this host holds the VM and it is off, by its record.
    pub(crate) fn is_off(&self, vm: &VmName) -> bool {
        let power = self.record(vm).and_then(|record| record.power());
        power == Some(Power::Off)
    }

    /// Whether the VM is not here by its record.
    pub(crate) fn is_absent(&self, vm: &VmName) -> bool {
        self.read(vm)
            .is_ok_and(|record| record.phase == Phase::Absent)
    }

    /// Whether a VM that is not here has left disks behind, which its VM process removes.
    fn left_disks(&self, vm: &VmName, record: &HostRecord) -> bool {
        !record.may_hold() && self.dir(vm).join(DISKS_FILE).exists()
    }

    /// Whether the VM's record asks for a VM process, or what it left does; one that cannot be read does, since only a VM
    /// process can say more.
    pub(crate) fn needs_process(&self, vm: &VmName) -> bool {
        match self.read(vm) {
            Ok(record) => phase_wants_process(&record.phase) || self.left_disks(vm, &record),
            Err(error) => {
                tracing::error!(%vm, %error, "the VM's record cannot be read");
                true
            }
        }
    }

    pub(crate) fn read(&self, vm: &VmName) -> Result<HostRecord, ApiError> {
        let path = self.dir(vm).join("ownership");
        let peek = || VmStore::peek(&self.state_dir, vm).map_err(stored);
        Ok(or_absent(self.seen.records.read(&path, peek)?, vm))
    }

    /// The VM's description, if it has one.
    pub(crate) fn spec(&self, vm: &VmName) -> Result<Option<VmSpec>, ApiError> {
        let path = self.dir(vm).join(SPEC_FILE);
        let unread = |error| undescribed(vm, stored(error));
        self.seen.specs.read(&path, || {
            let spec: Option<VmSpec> = load_json(&path).map_err(unread)?;
            // Taken for that one's it would stand for two VMs.
            match spec {
                Some(spec) if spec.name != *vm => {
                    let path = path.display();
                    let why = format!("{path} is the description of VM '{}'", spec.name);
                    Err(undescribed(vm, internal(why)))
                }
                spec => Ok(spec),
            }
        })
    }

    /// The VM's record; none if it cannot be read.
    pub(crate) fn record(&self, vm: &VmName) -> Option<HostRecord> {
        self.read(vm).ok()
    }

    /// The VM as its record and description alone show it.
    pub(crate) fn host_vm(&self, record: &HostRecord, spec: VmSpec, life: &Life) -> HostVm {
        let (state, note) = shown(record, life, &self.host);
        HostVm {
            spec,
            state,
            generation: record.highest,
            claim: godwit_site::claim_of(record),
            migration: migration_of(&record.phase),
            accelerator: None,
            vm_process_pid: None,
            vm_process: None,
            qemu_pid: None,
            note,
            disks: Vec::new(),
            images: Vec::new(),
            guest: None,
        }
    }

    /// Takes the generation that the controller grants, if it grants one, and writes the VM's description.
    pub(crate) fn put(&self, request: &PutVm) -> Result<(), ApiError> {
        let vm = &request.spec.name;
        self.check_room(vm, VMS_MAX)?;
        let mut journal = self.lock(vm)?;
        let record = or_absent(journal.load().map_err(stored)?, vm);
        not_a_process_matter(&record)?;
        self.settle_earlier(vm, &record)?;
        let (generation, holds) = (request.generation, record.may_run());
        match request.expect {
            _ if holds == Some(generation) => self.note_images(request, true)?,
            Some(expect) => {
                // No grant is there without it, and where there is none nothing of it stays.
                self.note_images(request, false)?;
                let granted = self.grant(&mut journal, record, generation, expect);
                granted.inspect_err(|_| self.forget_images(vm, generation))?;
            }
            None => {
                let held = holds.map_or("does not hold the VM".to_owned(), |held| {
                    format!("holds it under generation {held}")
                });
                let message = format!(
                    "the new description of VM '{vm}' is for its holder under generation {generation}; host '{}' {held}",
                    self.host
                );
                return Err(ApiError::new(ErrorCode::WrongState, message));
            }
        }
        save_json(&self.dir(vm).join(SPEC_FILE), &request.spec).map_err(stored)
    }

    fn grant(
        &self,
        journal: &mut VmStore,
        record: HostRecord,
        generation: Generation,
        expect: Generation,
    ) -> Result<(), ApiError> {
        let vm = record.vm.clone();
        let granted = Event::Granted { generation, expect };
        let (done, why) = self.drive(journal, record, granted)?;
        if done.may_run() == Some(generation) {
            return Ok(());
        }
        let message = format!(
            "host '{}' knows generation {} of VM '{vm}', so generation {generation} after a survey at {expect} is not taken ({}): the controller is behind, let it read this host again",
            self.host,
            done.highest,
            why.unwrap_or("it is in use")
        );
        Err(ApiError::new(ErrorCode::WrongState, message))
    }

    /// Forgets a VM that is off and held as it was `seen`; what generations it had stays known.
    pub(crate) fn delete(&self, vm: &VmName, seen: Option<Generation>) -> Result<(), ApiError> {
        let mut journal = self.lock(vm)?;
        let record = or_absent(journal.load().map_err(stored)?, vm);
        if record.may_run() != seen {
            return Err(changed(vm, &self.host));
        }
        not_a_process_matter(&record)?;
        if record.may_hold() {
            self.begin_deletion(vm, &record)?;
            let (done, why) = self.drive(&mut journal, record, Event::DeleteRequested)?;
            if done.may_hold() {
                let message = format!(
                    "VM '{vm}' is not deleted from host '{}': {}",
                    self.host,
                    why.unwrap_or("it is in use")
                );
                return Err(ApiError::new(ErrorCode::WrongState, message));
            }
        }
        self.end_deletion(vm)
    }

    /// Whether there is or was a VM of this name here.
    pub(crate) fn knows(&self, vm: &VmName) -> bool {
        self.dir(vm).is_dir()
    }

    /// A name that was never heard here makes a record; there is a bound on how many.
    pub(crate) fn check_room(&self, vm: &VmName, max: usize) -> Result<(), ApiError> {
        if self.dir(vm).is_dir() {
            return Ok(());
        }
        let dir = self.vms_dir();
        let entries = std::fs::read_dir(&dir).map_err(|error| internal(unlisted(&dir, error)))?;
        if entries.count() < max {
            return Ok(());
        }
        Err(internal(format!(
            "host '{}' begins no record of VM '{vm}': there are {max} or more in {} already: see what made so many",
            self.host,
            dir.display()
        )))
    }

    /// Waits only for this very process: for another request's turn.
    pub(crate) fn patiently<T>(
        &self,
        open: impl Fn() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + LOCK_WAIT;
        loop {
            match open() {
                Err(StoreError::Locked {
                    holder: Some(holder),
                    ..
                }) if holder == std::process::id() && Instant::now() < deadline => {
                    std::thread::sleep(LOCK_POLL);
                }
                opened => return opened,
            }
        }
    }

    pub(crate) fn lock(&self, vm: &VmName) -> Result<VmStore, ApiError> {
        self.patiently(|| VmStore::open(&self.state_dir, vm))
            .map_err(stored)
    }

    /// Lets the core take one event, writing what it says; gives the record at the end and why it refused.
    fn drive(
        &self,
        journal: &mut VmStore,
        record: HostRecord,
        event: Event,
    ) -> Result<(HostRecord, Option<&'static str>), ApiError> {
        let mut why = None;
        let record = self.drive_collecting(journal, record, event, &mut |action| {
            if let Action::Refuse { why: reason, .. } = action {
                why = Some(reason);
            }
        })?;
        Ok((record, why))
    }

    pub(crate) fn drive_collecting(
        &self,
        journal: &mut VmStore,
        record: HostRecord,
        event: Event,
        effect: &mut dyn FnMut(Action),
    ) -> Result<HostRecord, ApiError> {
        let (mut core, first) =
            VmCore::recover(record, self.host.clone(), Qemu::Dead).map_err(internal)?;
        let mut waiting = Some(event);
        let mut actions: VecDeque<Action> = first.into();
        for _ in 0..STEPS_MAX {
            let Some(action) = actions.pop_front() else {
                match waiting.take() {
                    Some(event) => actions.extend(core.handle(event)),
                    None => return Ok(core.record().clone()),
                }
                continue;
            };
            match action {
                Action::Persist(record) => {
                    journal.persist(&record).map_err(stored)?;
                    actions.extend(core.handle(Event::Persisted));
                }
                // Only a record that asks for a VM process leads here, and those are not driven by this module.
                Action::Boot(_) | Action::Cont(_) => {
                    return Err(internal("the VM needs its VM process"));
                }
                other => effect(other),
            }
        }
        Err(internal("the ownership core came to no end"))
    }

    /// The generation of a VM that should run here; none of one that is off, was paused by a person, or waits
    /// for its former host.
    pub(crate) fn should_run(&self, vm: &VmName) -> Option<Generation> {
        match self.record(vm)?.phase {
            Phase::Holds {
                generation,
                power,
                unconfirmed: None,
            } if power.should_run() => Some(generation),
            _ => None,
        }
    }

    /// Whether the VM was started in this boot of the host.
    pub(crate) fn ran_in_boot(&self, vm: &VmName, boot_id: &str) -> bool {
        let path = self.dir(vm).join(BOOT_FILE);
        match read_text(&path, BOOT_FILE_MAX) {
            Ok(seen) => seen.is_some_and(|seen| seen.trim() == boot_id),
            Err(error) => {
                // Then it counts as one that died: that is the more careful of the two.
                tracing::error!(%vm, path = %path.display(), %error, "the boot in which the VM ran cannot be read");
                true
            }
        }
    }

    /// Notes that the VM was started in this boot of the host.
    pub(crate) fn remember_boot(&self, vm: &VmName, boot_id: &str) -> std::io::Result<()> {
        let dir = self.dir(vm);
        make_dir(&dir, 0o700)?;
        let fresh = dir.join("boot-id.new");
        std::fs::write(&fresh, boot_id)?;
        std::fs::rename(fresh, dir.join(BOOT_FILE))
    }

    /// From here on the VM counts as one that was not started in this boot.
    pub(crate) fn forget_boot(&self, vm: &VmName) {
        let path = self.dir(vm).join(BOOT_FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::error!(%vm, path = %path.display(), %error, "cannot be removed");
            }
            _ => {}
        }
    }

    /// Keeps the list of revoked certificates over a restart.
    pub(crate) fn remember_revoked(&self, serials: &[String]) -> Result<(), ApiError> {
        save_json(&self.state_dir.join(REVOKED_FILE), &serials).map_err(stored)
    }

    /// The list kept by [`Records::remember_revoked`].
    pub(crate) fn revoked(&self) -> Result<Vec<String>, StoreError> {
        Ok(load_json(&self.state_dir.join(REVOKED_FILE))?.unwrap_or_default())
    }
}

pub(crate) fn unlisted(dir: &Path, error: std::io::Error) -> std::io::Error {
    let message = format!("cannot list {}: {error}", dir.display());
    std::io::Error::new(error.kind(), message)
}

/// The VMs after which entries of a directory are named.
pub(crate) fn named(dir: &Path) -> std::io::Result<Vec<VmName>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|error| unlisted(dir, error))? {
        let entry = entry.map_err(|error| unlisted(dir, error))?;
        names.extend(VmName::new(entry.file_name().to_string_lossy()).ok());
    }
    Ok(names)
}

fn migration_of(phase: &Phase) -> Option<MigrationId> {
    match phase {
        Phase::Stopping { migration, .. }
        | Phase::Gave { migration, .. }
        | Phase::Incoming { migration, .. }
        | Phase::Ready { migration, .. } => Some(migration.clone()),
        // What has ended here is no longer the VM's.
        Phase::Holds { .. } | Phase::Absent | Phase::Moved { .. } | Phase::Refused { .. } => None,
    }
}

/// What ends a doubt, with the one condition under which a person may end it.
fn way_out(vm: &VmName, verb: &str, here: &HostName, peer: &HostName) -> String {
    format!(
        "it waits for host {peer}; or, once host {peer} is powered off and only then: godwit vm resolve {vm} {verb} {here} --confirm-fenced {peer}"
    )
}

/// State and note of a VM whose process does not answer.
fn shown(record: &HostRecord, life: &Life, here: &HostName) -> (VmState, Option<String>) {
    let why = match life {
        Life::Starting(Some(why)) => Some(why.clone()),
        Life::Starting(None) if phase_wants_process(&record.phase) => {
            Some("its VM process is being started".into())
        }
        _ => None,
    };
    let vm = &record.vm;
    match &record.phase {
        Phase::Gave { to, .. } => (VmState::InDoubt, Some(way_out(vm, "--run-on", here, to))),
        Phase::Ready { from, .. } => (
            VmState::InDoubt,
            Some(way_out(vm, "--give-up-on", here, from)),
        ),
        Phase::Incoming { .. } => (VmState::Incoming, why),
        Phase::Holds {
            power: Power::Off, ..
        } => (VmState::Stopped, why),
        // Its QEMU may well run: only its VM process could tell.
        Phase::Holds { .. } | Phase::Stopping { .. } => (VmState::Unreachable, why),
        Phase::Moved { to, .. } => (VmState::Stopped, Some(format!("it moved to host '{to}'"))),
        Phase::Absent | Phase::Refused { .. } => (VmState::Stopped, why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note_of(phase: Phase) -> String {
        let record = HostRecord {
            phase,
            ..HostRecord::absent(VmName::new("web").unwrap())
        };
        let (state, note) = shown(&record, &Life::Idle, &HostName::new("a").unwrap());
        assert_eq!(state, VmState::InDoubt);
        note.unwrap()
    }

    #[test]
    fn a_vm_that_moved_away_says_where_to_and_has_no_migration_any_more() {
        let phase = Phase::Moved {
            generation: Generation(2),
            migration: MigrationId::new("m").unwrap(),
            to: HostName::new("b").unwrap(),
        };
        assert_eq!(migration_of(&phase), None);
        let record = HostRecord {
            phase,
            ..HostRecord::absent(VmName::new("web").unwrap())
        };
        let (_, note) = shown(&record, &Life::Idle, &HostName::new("a").unwrap());
        assert_eq!(note.as_deref(), Some("it moved to host 'b'"));
    }

    #[test]
    fn each_side_of_a_doubt_offers_its_own_way_out_with_its_condition() {
        let peer = HostName::new("b").unwrap();
        let (generation, migration) = (Generation(2), MigrationId::new("m").unwrap());
        let gave = note_of(Phase::Gave {
            generation,
            migration: migration.clone(),
            to: peer.clone(),
        });
        let ready = note_of(Phase::Ready {
            generation,
            migration,
            from: peer,
        });
        let only = "once host b is powered off and only then: godwit vm resolve web";
        for (note, verb) in [(gave, "--run-on a"), (ready, "--give-up-on a")] {
            let wanted = format!("{only} {verb} --confirm-fenced b");
            assert!(note.contains(&wanted), "{note}");
        }
    }
}
