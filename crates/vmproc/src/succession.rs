//! A migration whose VM process died: what its successor makes of the report, and whom it tells.
//!
//! Part of [`Vm`]. The ownership core alone decides where the guest runs; here only the report is closed to match, and
//! the other host hears of the end, so that it need not wait for a source that will never come.

use crate::hypervisor::internal;
use crate::vm::Vm;
use godwit_ownership::{Action, Ending, PeerMessage, Status};
use godwit_store::{load_json, make_directory, save_json};
use godwit_types::host_api::{MigrationNote, NOTE_FILE, REPORTS_DIR};
use godwit_types::migration::{MigrationReport, MigrationSpec, Outcome, Side};
use godwit_types::{ApiError, HostName, MigrationId};
use std::time::{SystemTime, UNIX_EPOCH};

const DIED: &str = "the VM process of this host ended during the migration";

/// What ends a doubt, with the one condition under which a person may end it.
pub(crate) fn way_out(peer: &HostName, command: &str) -> String {
    format!(
        "it waits for host {peer}; or, once host {peer} is powered off and only then: {command}"
    )
}

impl Vm {
    /// Durable before anything is promised: a successor must be able to ask the peer.
    pub(crate) fn keep_note(&mut self, spec: &MigrationSpec, side: Side) -> Result<(), ApiError> {
        let peer = match side {
            Side::Source => spec.destination.clone(),
            Side::Destination => spec.source.clone(),
        };
        let note = MigrationNote {
            migration: spec.id.clone(),
            side,
            peer,
        };
        save_json(&self.paths.state.join(NOTE_FILE), &note).map_err(internal)?;
        self.note = Some(note);
        Ok(())
    }

    pub(crate) fn write_report(&self, report: &MigrationReport) -> Result<(), ApiError> {
        let path = self.report_path(&report.id);
        if let Some(dir) = path.parent() {
            make_directory(dir, 0o700).map_err(internal)?;
        }
        save_json(&path, report).map_err(internal)
    }

    /// The migration that a predecessor did not finish.
    pub(crate) fn find_orphan(&self) -> Option<MigrationId> {
        let note = self.note.as_ref()?;
        let report = self.orphan(&note.migration)?;
        Some(report.id)
    }

    fn orphan(&self, id: &MigrationId) -> Option<MigrationReport> {
        let kept = || load_json(&self.report_path(id)).ok().flatten();
        let report: MigrationReport = self.unsaved.find(id).or_else(kept)?;
        report.is_open().then_some(report)
    }

    /// After the core has settled: the orphan is over unless the peer must still be heard.
    pub(crate) fn close_orphan(&mut self, orphan: Option<MigrationId>) {
        let Some(report) = orphan.and_then(|id| self.orphan(&id)) else {
            return;
        };
        if self.has_arrived(&report) {
            return self.close_report(report, Outcome::Completed, None);
        }
        if let Status::InDoubt { command, peer, .. } = &self.status {
            let reason = way_out(peer, command);
            self.orphan = Some(report.id.clone());
            return self.close_report(report, Outcome::InDoubt, Some(reason));
        }
        let (id, side) = (report.id.clone(), report.side);
        self.close_report(report, Outcome::Failed, Some(DIED.into()));
        if let Some(note) = self.note.clone().filter(|_| side == Side::Source) {
            // Nothing was given: this host holds the VM. The destination would wait for long.
            self.act(Action::Send {
                to: note.peer.host,
                message: PeerMessage::abort(id),
            });
        }
    }

    /// The journal, not the report, says whether a migration is over. The note is of the last migration here.
    fn has_arrived(&self, report: &MigrationReport) -> bool {
        let end = self.core.record().end_of(&report.id, report.side, true);
        end.is_some_and(|(outcome, _)| outcome == Outcome::Completed)
    }

    /// Reports of migrations before the last one: each is over, also where nobody could write that.
    pub(crate) fn close_old_reports(&mut self) {
        let last = self.note.as_ref().map(|note| note.migration.clone());
        let dir = self.paths.state.join(REPORTS_DIR);
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| {
            let name = entry.file_name();
            MigrationId::new(name.to_str()?.strip_suffix(".json")?).ok()
        });
        let old: Vec<_> = ids.filter(|id| Some(id) != last.as_ref()).collect();
        for report in old
            .iter()
            .filter_map(|id| self.orphan(id))
            .collect::<Vec<_>>()
        {
            if let Some((outcome, why)) = self.core.record().end_of(&report.id, report.side, false)
            {
                self.close_report(report, outcome, why.map(str::to_owned));
            }
        }
    }

    /// A migration that was in doubt when its process died is over as soon as the journal says so.
    pub(crate) fn settle_orphan(&mut self) {
        let report = self.orphan.as_ref().and_then(|id| self.orphan(id));
        if let Some(report) = report.filter(|report| self.has_arrived(report)) {
            self.orphan = None;
            self.close_report(report, Outcome::Completed, None);
        }
    }

    /// The core ended a migration that a predecessor began.
    pub(crate) fn end_orphan(&mut self, id: &MigrationId, ending: Ending) {
        if self.hyper.is_none() {
            self.clean_disks();
        }
        let Some(report) = self.orphan(id) else {
            return;
        };
        match ending {
            Ending::Completed => self.close_report(report, Outcome::Completed, None),
            Ending::Cancelled | Ending::Failed | Ending::Refused => {
                self.close_report(report, Outcome::Failed, Some(DIED.into()));
            }
        }
    }

    fn close_report(
        &mut self,
        mut report: MigrationReport,
        outcome: Outcome,
        reason: Option<String>,
    ) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_s = now.map_or(report.began_unix_s, |since| since.as_secs());
        report.close(outcome, reason, now_s);
        tracing::info!(migration = %report.id, %outcome, "a predecessor's migration");
        self.keep_report(report);
    }
}
