//! Reports of migrations that could not be written: kept here and written again until they are.
//!
//! Owned by the VM's own thread. A disk that was full for a moment must not leave a migration open for ever. Refuses: to
//! keep more than [`UNSAVED_MAX`]; the oldest gives way.

use crate::vm::Vm;
use godwit_types::MigrationId;
use godwit_types::migration::MigrationReport;
use std::time::{Duration, Instant};

/// Most reports that wait.
const UNSAVED_MAX: usize = 64;
/// Pause between two tries.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Reports that wait to be written.
#[derive(Debug, Default)]
pub(crate) struct Unsaved {
    reports: Vec<MigrationReport>,
    tried_at: Option<Instant>,
}

impl Unsaved {
    /// Whether everything is on the disk.
    pub(crate) fn is_empty(&self) -> bool {
        self.reports.is_empty()
    }

    /// The report of a migration, if it waits.
    pub(crate) fn find(&self, id: &MigrationId) -> Option<MigrationReport> {
        self.reports.iter().find(|report| report.id == *id).cloned()
    }

    /// Adds a report, in the place of an older one of the same migration.
    fn put(&mut self, report: MigrationReport) {
        self.reports.retain(|other| other.id != report.id);
        if self.reports.len() >= UNSAVED_MAX {
            self.reports.remove(0);
        }
        self.reports.push(report);
        self.tried_at = Some(Instant::now());
    }

    /// Takes all when it is time to try again.
    fn due(&mut self) -> Vec<MigrationReport> {
        let rested = self.tried_at.is_none_or(|at| at.elapsed() >= AGAIN_AFTER);
        if rested {
            std::mem::take(&mut self.reports)
        } else {
            Vec::new()
        }
    }
}

impl Vm {
    /// Writes a report; one that cannot be written is written again later.
    pub(crate) fn keep_report(&mut self, report: MigrationReport) {
        match self.write_report(&report) {
            Ok(()) => self.unsaved.reports.retain(|other| other.id != report.id),
            Err(error) => {
                if self.unsaved.find(&report.id).is_none() {
                    tracing::warn!(%error, migration = %report.id, "the migration's report is not written yet");
                }
                self.unsaved.put(report);
            }
        }
    }

    /// Writes what could not be written before.
    pub(crate) fn save_again(&mut self) {
        for report in self.unsaved.due() {
            match self.write_report(&report) {
                Ok(()) => {
                    tracing::info!(migration = %report.id, "the migration's report is written")
                }
                Err(_) => self.unsaved.put(report),
            }
        }
    }
}
