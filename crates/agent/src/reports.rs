//! Reports of migrations: which VM's each one is, and which are kept.
//!
//! Owns the index from a migration to its VM, in memory; the files are the VM processes', which write them. One that a dead
//! process left open is closed here as the VM's journal says. Refuses: to look for one report in all, to keep more than a
//! few of a VM, to remove one that its VM's record still waits for, and to close one while a VM process has the VM.

use crate::life::phase_wants_process;
use crate::records::Records;
use crate::system::unix_ms;
use godwit_ownership::{End, HostRecord, Phase};
use godwit_store::{StoreError, load_json, save_json};
use godwit_types::host_api::{MigrationNote, NOTE_FILE, REPORTS_DIR};
use godwit_types::migration::MigrationReport;
use godwit_types::{MigrationId, VmName};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Reports of a VM that are kept, newest first.
pub(crate) const REPORTS_KEPT: usize = 20;

/// The reports of all VMs.
pub(crate) struct Reports {
    records: Records,
    index: Mutex<BTreeMap<MigrationId, VmName>>,
    #[cfg(test)]
    pub opened: std::sync::atomic::AtomicUsize,
}

impl Reports {
    /// With an empty index.
    pub(crate) fn new(records: Records) -> Self {
        Self {
            records,
            index: Mutex::default(),
            #[cfg(test)]
            opened: Default::default(),
        }
    }

    fn index(&self) -> MutexGuard<'_, BTreeMap<MigrationId, VmName>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dir(&self, vm: &VmName) -> PathBuf {
        self.records.dir(vm).join(REPORTS_DIR)
    }

    /// Fills the index from the files' names, and removes what is too old.
    pub(crate) fn take_up(&self, vms: &[VmName]) {
        for vm in vms {
            self.prune(vm);
            self.settle_last(vm);
            let found = listed(&self.dir(vm));
            let mut index = self.index();
            index.extend(found.into_iter().map(|(_, id)| (id, vm.clone())));
        }
    }

    /// A migration begins here; old ones of its VM make room.
    pub(crate) fn begins(&self, id: &MigrationId, vm: &VmName) {
        self.prune(vm);
        self.settle_last(vm);
        self.index().insert(id.clone(), vm.clone());
    }

    /// It does not begin here after all. One that began here before has its report, by which it is found.
    pub(crate) fn never_began(&self, id: &MigrationId) {
        self.index().remove(id);
    }

    /// The VM of a migration. One that is not in the index is looked for by its name alone.
    pub(crate) fn vm_of(&self, id: &MigrationId, vms: &[VmName]) -> Option<VmName> {
        if let Some(vm) = self.index().get(id) {
            return Some(vm.clone());
        }
        let found = vms.iter().find(|vm| self.path(vm, id).exists())?;
        self.index().insert(id.clone(), found.clone());
        Some(found.clone())
    }

    fn path(&self, vm: &VmName, id: &MigrationId) -> PathBuf {
        self.dir(vm).join(format!("{id}.json"))
    }

    /// One report; none where there is no file of it. One that cannot be read is an error.
    pub(crate) fn read(
        &self,
        vm: &VmName,
        id: &MigrationId,
    ) -> Result<Option<MigrationReport>, StoreError> {
        let Some(report) = self.load(&self.path(vm, id))? else {
            return Ok(None);
        };
        if !report.is_open() {
            return Ok(Some(report));
        }
        Ok(Some(self.settled(vm, id).unwrap_or(report)))
    }

    /// The same where there are others to show: what is wrong with this one is in the log.
    fn read_or_log(&self, vm: &VmName, id: &MigrationId) -> Option<MigrationReport> {
        let read = self.read(vm, id).inspect_err(|error| {
            tracing::warn!(%vm, migration = %id, %error, "a migration's report cannot be read");
        });
        read.ok().flatten()
    }

    /// Closes the report of a VM's last migration, before anything else happens to the VM that could hide how it ended.
    pub(crate) fn settle_last(&self, vm: &VmName) {
        if let Some(last) = self.last_of(vm) {
            self.read_or_log(vm, &last);
        }
    }

    /// The last migration of a VM that was prepared or begun here.
    fn last_of(&self, vm: &VmName) -> Option<MigrationId> {
        let note: MigrationNote = load_json(&self.records.dir(vm).join(NOTE_FILE)).ok()??;
        Some(note.migration)
    }

    /// A report that was left open, closed as the journal says; nothing where that waits to settle it, or where a VM
    /// process has the VM or is to have it: that closes it by itself, and tells the other host of the end.
    fn settled(&self, vm: &VmName, id: &MigrationId) -> Option<MigrationReport> {
        let is_last = self.last_of(vm).as_ref() == Some(id);
        let read: MigrationReport = load_json(&self.path(vm, id)).ok()??;
        end_of(&self.records.record(vm)?, &read, is_last)?;
        let mut journal = self.records.lock(vm).ok()?;
        // Both as they are now that nobody else can change them.
        let record = journal.load().ok()??;
        let mut report: MigrationReport = load_json(&self.path(vm, id)).ok()??;
        if !report.is_open() {
            return Some(report);
        }
        let (outcome, why) = end_of(&record, &report, is_last)?;
        // What a dead process wrote may be readable before it is durable.
        journal.persist(&record).ok()?;
        report.close(outcome, why.map(str::to_owned), unix_ms() / 1000);
        tracing::info!(%vm, migration = %id, %outcome, "the journal says how the migration ended");
        if let Err(error) = save_json(&self.path(vm, id), &report) {
            tracing::warn!(%vm, migration = %id, %error, "the migration's report is not written yet");
        }
        Some(report)
    }

    /// All reports of these VMs.
    pub(crate) fn all(&self, vms: &[VmName]) -> Vec<MigrationReport> {
        let all = vms.iter().flat_map(|vm| {
            let newest = listed(&self.dir(vm)).into_iter().take(REPORTS_KEPT);
            newest.filter_map(|(_, id)| self.read_or_log(vm, &id))
        });
        all.collect()
    }

    fn load(&self, path: &Path) -> Result<Option<MigrationReport>, StoreError> {
        #[cfg(test)]
        self.opened
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        load_json(path)
    }

    fn prune(&self, vm: &VmName) {
        let old: Vec<_> = listed(&self.dir(vm))
            .into_iter()
            .skip(REPORTS_KEPT)
            .collect();
        if old.is_empty() {
            return;
        }
        // A record that cannot be read may wait for any of them.
        let Some(record) = self.records.record(vm) else {
            return;
        };
        let waited_for = waited_for(&record);
        for (_, id) in old.iter().filter(|(_, id)| Some(id) != waited_for) {
            if let Err(error) = std::fs::remove_file(self.path(vm, id)) {
                tracing::warn!(%vm, migration = %id, %error, "cannot remove an old report");
            }
            self.index().remove(id);
        }
    }
}

/// How a migration ended by a record that asks for no VM process.
fn end_of(record: &HostRecord, report: &MigrationReport, is_last: bool) -> Option<End> {
    if phase_wants_process(&record.phase) {
        return None;
    }
    record.end_of(&report.id, report.side, is_last)
}

/// The migration that a record waits to settle.
fn waited_for(record: &HostRecord) -> Option<&MigrationId> {
    match &record.phase {
        Phase::Holds { unconfirmed, .. } => unconfirmed.as_ref().map(|with| &with.migration),
        Phase::Stopping { migration, .. }
        | Phase::Gave { migration, .. }
        | Phase::Moved { migration, .. }
        | Phase::Incoming { migration, .. }
        | Phase::Ready { migration, .. }
        | Phase::Refused { migration, .. } => Some(migration),
        Phase::Absent => None,
    }
}

/// The reports in a directory by their names, newest first; none is opened.
fn listed(dir: &Path) -> Vec<(SystemTime, MigrationId)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let id = MigrationId::new(name.to_str()?.strip_suffix(".json")?).ok()?;
            Some((entry.metadata().ok()?.modified().ok()?, id))
        })
        .collect();
    found.sort();
    found.reverse();
    found
}

#[cfg(test)]
#[path = "reports_tests.rs"]
mod tests;
