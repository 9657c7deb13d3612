//! What came of a VM's disks with a migration that ended elsewhere: whom to hear before it is removed.
//!
//! Part of [`Vm`]. Its source has them, or has had them taken elsewhere, where it says that it ended the migration, which only a host says
//! that holds the VM or has given it on; or where it moves the VM here anew. Until then it is asked again and again, and nothing is
//! removed, however long it is silent. A person's word that it is gone is durable before anything follows from it. Refuses: such a word
//! where it cannot be written.

use crate::disks::{self, Source};
use crate::vm::Vm;
use godwit_ownership::{PeerMessage, Phase};
use godwit_types::migration::Side;
use godwit_types::{ApiError, Generation, HostName, MigrationId};
use std::time::{Duration, Instant};

/// How often the source is asked whether it has the disks.
const LOOK_EACH: Duration = Duration::from_secs(10);

/// What is known of images that came, as long as they have no end.
#[derive(Debug, Default)]
pub(crate) struct Came {
    /// The source of this migration has the disks.
    has_disks: Option<MigrationId>,
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
        let aside = disks::put_aside(&self.paths, source, promised);
        let kept = aside.kept.iter();
        kept.for_each(|sentence| tracing::warn!("{sentence}"));
        self.came.looked = (!aside.waits.is_empty()).then(Instant::now);
        if let Some(id) = id.filter(|_| self.came.waits()) {
            self.ask_for_disks(id);
        }
        let told: Vec<String> = aside.kept.into_iter().chain(aside.waits).collect();
        if !told.is_empty() {
            self.came.told = told;
        }
    }

    /// A source that holds the VM, and moves it in no such migration, says that it has ended. No attempt has this generation.
    fn ask_for_disks(&self, migration: MigrationId) {
        let note = self.note.as_ref();
        let Some(note) = note.filter(|note| note.migration == migration) else {
            return;
        };
        let question = PeerMessage::AskGift {
            migration,
            generation: Generation(0),
        };
        self.post(&note.peer.host, &question);
    }

    /// Looks again at images that have no end yet.
    pub(crate) fn clean_what_waits(&mut self) {
        if !self.came.waits() {
            return;
        }
        match disks::what_came(&self.paths) {
            Some(_) if self.hyper.is_none() => self.clean_disks(),
            _ => self.came = Came::default(),
        }
    }

    /// Does so now and then. A source that lives has answered by the first time, so that nobody need hear of it before.
    pub(crate) fn clean_again(&mut self) {
        if self.came.looked.is_none_or(|at| at.elapsed() < LOOK_EACH) {
            return;
        }
        self.clean_what_waits();
        let waits = self.came.waits();
        let is_told = std::mem::replace(&mut self.came.is_told, waits);
        if waits && !is_told {
            let told = self.came.told.iter();
            told.for_each(|sentence| tracing::warn!("{sentence}"));
        }
    }

    /// Notes whether this says that the source of what came has the disks. Returns that.
    pub(crate) fn source_has_disks(&mut self, from: &HostName, message: &PeerMessage) -> bool {
        let PeerMessage::Abort { migration, .. } = message else {
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
    pub(crate) fn source_is_gone(&self, host: &HostName) -> Result<(), ApiError> {
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
            None => disks::source_is_gone(&self.paths),
        }
    }

    /// The VM comes anew, from this host. One that it was to come from before, and that holds it now, has its disks.
    pub(crate) fn comes_anew(&mut self, from: &HostName) {
        let Some(id) = disks::what_came(&self.paths) else {
            return;
        };
        let source = match self.is_from(from, &id) {
            true => Source::HasDisks,
            false => Source::Gone,
        };
        disks::put_aside(&self.paths, source, None).tell();
        self.came = Came::default();
    }
}
