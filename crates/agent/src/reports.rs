//! Reports of migrations: which VM's each one is, and which are kept.
//!
//! Owns the index from a migration to its VM, in memory; the files are the VM processes', which write them. Refuses: to
//! look for one report in all, to keep more than a few of a VM, and to remove one that its VM's record still waits for.

use crate::records::Records;
use godwit_ownership::{HostRecord, Phase};
use godwit_store::load_json;
use godwit_types::host_api::REPORTS_DIR;
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
            let found = listed(&self.dir(vm));
            let mut index = self.index();
            index.extend(found.into_iter().map(|(_, id)| (id, vm.clone())));
        }
    }

    /// A migration begins here; old ones of its VM make room.
    pub(crate) fn begins(&self, id: &MigrationId, vm: &VmName) {
        self.prune(vm);
        self.index().insert(id.clone(), vm.clone());
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

    /// One report.
    pub(crate) fn read(&self, vm: &VmName, id: &MigrationId) -> Option<MigrationReport> {
        self.load(&self.path(vm, id))
    }

    /// All reports of these VMs.
    pub(crate) fn all(&self, vms: &[VmName]) -> Vec<MigrationReport> {
        let all = vms.iter().flat_map(|vm| {
            let newest = listed(&self.dir(vm)).into_iter().take(REPORTS_KEPT);
            newest.filter_map(|(_, id)| self.read(vm, &id))
        });
        all.collect()
    }

    fn load(&self, path: &Path) -> Option<MigrationReport> {
        #[cfg(test)]
        self.opened
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match load_json(path) {
            Ok(report) => report,
            Err(error) => {
                tracing::warn!(%error, "a migration's report cannot be read");
                None
            }
        }
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
