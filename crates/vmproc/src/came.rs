//! What came of a VM's disks with a migration that ended elsewhere: whom to hear before it is removed.
//!
//! Part of [`Vm`]. They go once their source says that it has the disks that went along with this very migration, or that those have gone on from it: an older copy of
//! that host knows nothing of it, and that it ended the migration is not enough. Until then it is asked again and again, and nothing is removed, however long it is
//! silent; where the VM comes anew meanwhile they are kept. A person's word that it is gone is durable before anything follows from it. Refuses: such a
//! word where it cannot be written, and a VM in whose way they are.

use crate::disks::{self, Source};
use crate::left_over::LeftOver;
use crate::vm::Vm;
use godwit_ownership::{PeerMessage, Phase};
use godwit_types::migration::Side;
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId};
use std::time::{Duration, Instant};

/// How often the source is asked whether it has the disks.
const LOOK_EACH: Duration = Duration::from_secs(10);
/// For so long a VM that comes anew waits for that answer, which takes a moment; one of an older version never gives it.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// What is known of images that came, as long as they have no end.
#[derive(Debug, Default)]
pub(crate) struct Came {
    /// The source of this migration has the disks.
    has_disks: Option<MigrationId>,
    /// Since when something has no end.
    began: Option<Instant>,
    /// When it was last looked whether more is known.
    looked: Option<Instant>,
    /// Whether the log was told of them.
    is_told: bool,
    /// What became of those that had no end last, for whoever asks for it.
    pub told: Vec<String>,
}

impl Came {
    /// Whether images have no end yet.
    pub(crate) fn waits(&self) -> bool {
        self.looked.is_some()
    }
}

impl Vm {
    /// The VM is not here: what came of its disks gets its end, as far as one is known.
    pub(crate) fn clean_what_came(&mut self) {
        let id = disks::what_came(&self.paths);
        let has_disks = id.is_some() && id == self.came.has_disks;
        let source = match has_disks {
            true => Source::HasDisks,
            false => Source::Unknown,
        };
        let promised = match &self.core.record().phase {
            Phase::Refused {
                generation,
                migration,
                ..
            } if id.as_ref() == Some(migration) => Some(*generation),
            _ => None,
        };
        let paths = self.paths.clone();
        let work = move || {
            let aside = disks::put_aside(&paths, source, promised);
            // Whoever asked for it may have given up.
            let kept = aside.kept.iter();
            kept.for_each(|sentence| tracing::warn!("{sentence}"));
            aside
        };
        let Some(aside) = self.disk_work.run(work) else {
            return self.waits_for_storage(id);
        };
        self.came.looked = (!aside.waits.is_empty()).then(Instant::now);
        self.came.began = self.came.looked.map(|now| self.came.began.unwrap_or(now));
        if let Some(id) = id.filter(|_| self.came.waits()) {
            self.ask_for_disks(id);
        }
        let told: Vec<String> = aside.kept.into_iter().chain(aside.waits).collect();
        if !told.is_empty() {
            self.came.told = told;
        }
    }

    /// Storage does not answer: it is looked again later.
    fn waits_for_storage(&mut self, came: Option<MigrationId>) {
        let Some(id) = came else { return };
        self.came.looked = Some(Instant::now());
        let sentence = format!(
            "what came of the VM's disks with migration {id} gets its end once its storage answers, and the log tells it then"
        );
        self.came.told = vec![sentence];
        self.ask_for_disks(id);
    }

    /// A source that holds the VM, and moves it in no such migration, says that it has ended, and whether it has the disks.
    fn ask_for_disks(&self, migration: MigrationId) {
        let note = self.note.as_ref();
        let Some(note) = note.filter(|note| note.migration == migration) else {
            return;
        };
        self.post(&note.peer.host, &PeerMessage::ask_for_disks(migration));
    }

    /// Looks again at images that have no end yet.
    pub(crate) fn clean_what_waits(&mut self) {
        if !self.came.waits() {
            return;
        }
        match disks::what_came(&self.paths) {
            Some(_) if self.hyper.is_none() => self.clean_disks(),
            _ => {
                self.came = Came::default();
                let is_left = self.leaves_disks();
                self.left_over.looked(is_left, Instant::now());
            }
        }
    }

    /// Whether the VM is not here, and left disks that are noted still.
    pub(crate) fn leaves_disks(&self) -> bool {
        let record = self.core.record();
        let comes = matches!(record.phase, Phase::Incoming { .. });
        let is_elsewhere = self.hyper.is_none() && !comes && !record.may_hold();
        is_elsewhere && self.paths.disks().exists()
    }

    /// Tries again to remove what could not be removed. Whoever only looks at the VM keeps this process, so that no other one does it.
    fn clean_left_over(&mut self, now: Instant) {
        if !self.left_over.is_due(now) {
            return;
        }
        match self.leaves_disks() && self.migration.is_none() {
            true => {
                // Its source said that a while ago, and may have lost the disks since: it is asked again.
                self.came.has_disks = None;
                self.clean_disks();
            }
            false => self.left_over = LeftOver::default(),
        }
    }

    /// Does so now and then. A source that lives has answered by the first time, so that nobody need hear of it before.
    pub(crate) fn clean_again(&mut self, now: Instant) {
        self.clean_left_over(now);
        if self.came.looked.is_none_or(|at| at.elapsed() < LOOK_EACH) {
            return;
        }
        self.clean_what_waits();
        let waits = self.came.waits();
        if self.disk_work.is_under_way() {
            return;
        }
        let is_told = std::mem::replace(&mut self.came.is_told, waits);
        if waits && !is_told {
            let told = self.came.told.iter();
            told.for_each(|sentence| tracing::warn!("{sentence}"));
        }
    }

    /// Notes whether this says that the source of what came has the disks. Returns that.
    pub(crate) fn source_has_disks(&mut self, from: &HostName, message: &PeerMessage) -> bool {
        let PeerMessage::Abort {
            migration,
            has_disks: true,
            ..
        } = message
        else {
            return false;
        };
        let is_of_source = self.is_from(from, migration);
        if is_of_source {
            self.came.has_disks = Some(migration.clone());
        }
        is_of_source
    }

    /// Whether the VM was last to come from that host, with this migration.
    fn is_from(&self, host: &HostName, migration: &MigrationId) -> bool {
        let note = self.note.as_ref();
        note.is_some_and(|note| {
            note.side == Side::Destination
                && note.peer.host == *host
                && note.migration == *migration
        })
    }

    /// A person says that a host is gone for good: if the VM was to come from it, what came of its disks is kept, whatever happens to
    /// this process.
    pub(crate) fn source_is_gone(&mut self, host: &HostName) -> Result<(), ApiError> {
        let is_elsewhere = match &self.core.record().phase {
            Phase::Absent
            | Phase::Incoming { .. }
            | Phase::Ready { .. }
            | Phase::Refused { .. } => true,
            Phase::Holds { .. }
            | Phase::Stopping { .. }
            | Phase::Gave { .. }
            | Phase::Moved { .. } => false,
        };
        let came = disks::what_came(&self.paths).filter(|_| is_elsewhere);
        if !came.is_some_and(|id| self.is_from(host, &id)) {
            return Ok(());
        }
        match &self.hyper {
            Some(hyper) => hyper.disks.source_is_gone(),
            None => {
                self.disk_work.must_be_over()?;
                disks::source_is_gone(&self.paths)
            }
        }
    }

    /// The VM comes anew, from this host: what came before is kept where nobody has said that its source has the disks. Refused for a
    /// moment where that is the same one, which is asked just now; where a part of a disk is kept already; and where nothing can be kept, since
    /// nobody would know any more whom to ask.
    pub(crate) fn comes_anew(&mut self, from: &HostName) -> Result<(), ApiError> {
        self.disk_work.must_be_over()?;
        let Some(id) = disks::what_came(&self.paths) else {
            return Ok(());
        };
        if self.is_from(from, &id) {
            let began = *self.came.began.get_or_insert_with(Instant::now);
            if began.elapsed() < ANSWER_WAIT {
                self.ask_for_disks(id.clone());
                return Err(self.not_answered(from, &id));
            }
        }
        let paths = self.paths.clone();
        self.disk_work.must(move || {
            disks::may_keep(&paths)?;
            disks::put_aside(&paths, Source::Gone, None).must_be_over()
        })??;
        self.came = Came::default();
        Ok(())
    }

    fn not_answered(&self, from: &HostName, id: &MigrationId) -> ApiError {
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message = format!(
            "host '{host}' has what came of VM '{vm}' with migration {id}, and host '{from}' has not said yet that it has the disks: it is asked now; try again in some seconds"
        );
        ApiError::new(ErrorCode::WrongState, message)
    }

    // ---- as the source ----

    /// Whether the host to which the VM was to go with this migration may remove what came of its disks.
    pub(crate) fn has_disks_of(&self, id: &MigrationId) -> bool {
        if disks::went_on(&self.paths, id) {
            return true;
        }
        // While another migration is under way nothing waits for storage.
        if self.migration.is_some() {
            return false;
        }
        match &self.core.record().phase {
            Phase::Holds { .. } | Phase::Stopping { .. } => match &self.hyper {
                Some(hyper) => hyper.disks.have_those_of(id),
                None => disks::has_disks_of(&self.paths, id),
            },
            Phase::Absent
            | Phase::Incoming { .. }
            | Phase::Ready { .. }
            | Phase::Refused { .. }
            | Phase::Gave { .. }
            | Phase::Moved { .. } => false,
        }
    }
}
