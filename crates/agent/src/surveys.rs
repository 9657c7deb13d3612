//! What the records of VMs without a VM process say to a controller and to other hosts, and what a person does about one
//! that cannot be read.
//!
//! Part of [`Records`]. Refuses: to answer a survey before the answer is durable, to leave out a record that cannot be
//! read, and to give up one that can.

use crate::life::phase_wants_process;
use crate::records::{Records, VMS_MAX, internal, named, or_absent, stored};
use godwit_ownership::{Action, Event, HostRecord};
use godwit_site::claim_of;
use godwit_store::{RealFiles, StoreError, VmLock, VmStore, frame, replace_durably};
use godwit_types::image::KnownImage;
use godwit_types::site::{RecordAnswer, RecordSaid};
use godwit_types::{ApiError, ErrorCode, Generation, VmName};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Generations that may have been used without the record that is given up: as many as nobody tries.
const FORGOTTEN_GAP: u64 = 1 << 20;
/// Most damaged records of one VM that are kept.
const DAMAGED_MAX: u32 = 100;

/// A record's file, beside its lock.
const RECORD_FILE: &str = "ownership";

fn said(record: HostRecord, images: Vec<KnownImage>) -> RecordSaid {
    RecordSaid {
        claim: claim_of(&record),
        highest: record.highest,
        vm: record.vm,
        // Whoever asks here looks for a guest himself.
        may_live: true,
        images,
    }
}

impl Records {
    /// Answers a survey for a VM without a VM process: what it may hold as it is, or a no that binds.
    pub(crate) fn survey(&self, vm: &VmName, level: Generation) -> Result<RecordAnswer, ApiError> {
        self.check_room(vm, VMS_MAX)?;
        let mut journal = self.lock(vm)?;
        let record = or_absent(journal.load().map_err(stored)?, vm);
        let claim = claim_of(&record);
        if claim.may_hold() {
            // What a dead process wrote may be readable before it is durable.
            journal.persist(&record).map_err(stored)?;
            let highest = record.highest;
            return Ok(RecordAnswer { highest, claim });
        }
        if phase_wants_process(&record.phase) {
            let message = format!("the VM process of '{vm}' is being started: ask again");
            return Err(ApiError::new(ErrorCode::Locked, message));
        }
        let (mut answered, mut why) = (false, None);
        let event = Event::SurveyRequested { level };
        let record =
            self.drive_collecting(&mut journal, record, event, &mut |action| match action {
                Action::Surveyed { .. } => answered = true,
                Action::Refuse { why: reason, .. } => why = Some(reason),
                _ => {}
            })?;
        if answered {
            let claim = claim_of(&record);
            let highest = record.highest;
            return Ok(RecordAnswer { highest, claim });
        }
        let message = format!(
            "VM '{vm}' is not surveyed at level {level}: {}",
            why.unwrap_or("it is in use")
        );
        Err(ApiError::new(ErrorCode::WrongState, message))
    }

    /// What the record of one VM says; of one that this host never heard of, that it is not here.
    pub(crate) fn said(&self, vm: &VmName) -> Result<RecordSaid, ApiError> {
        let record = self.read(vm)?;
        Ok(said(record, self.images(vm)))
    }

    /// What all records say, and the VMs of which the record cannot be read: it may say anything.
    pub(crate) fn all_said(&self) -> Result<(Vec<RecordSaid>, BTreeMap<VmName, String>), ApiError> {
        let (mut all, mut unread) = (Vec::new(), BTreeMap::new());
        for vm in named(&self.vms_dir()).map_err(internal)? {
            match self.said(&vm) {
                Ok(said) => all.push(said),
                Err(error) => drop(unread.insert(vm, error.message)),
            }
        }
        Ok((all, unread))
    }

    /// VMs of which the record or the description cannot be read, each with what to do.
    pub(crate) fn all_unread(&self) -> BTreeMap<VmName, String> {
        let vms = named(&self.vms_dir()).unwrap_or_default();
        let unread = vms.into_iter().filter_map(|vm| {
            let error = match self.read(&vm) {
                Err(error) => Some(error),
                Ok(_) => self.spec(&vm).err(),
            };
            error.map(|error| (vm, error.message))
        });
        unread.collect()
    }

    /// Puts a damaged record aside and begins anew as a host that holds nothing and takes nothing that is old. `known` is
    /// the newest generation that this host knows from elsewhere, `held` the newest that it was granted.
    pub(crate) fn forget_record(
        &self,
        vm: &VmName,
        known: Generation,
        held: Generation,
    ) -> Result<PathBuf, ApiError> {
        let dir = self.dir(vm);
        let lock = dir.join("lock");
        let _lock = self.patiently(|| VmLock::take(&lock)).map_err(stored)?;
        match self.read_plainly(vm) {
            Err(StoreError::DamagedRecord { .. }) => {}
            Err(other) => return Err(stored(other)),
            Ok(_) => {
                let message = format!(
                    "the record of VM '{vm}' on host '{}' is not damaged: nothing is given up",
                    self.host()
                );
                return Err(ApiError::new(ErrorCode::WrongState, message));
            }
        }
        let path = dir.join(RECORD_FILE);
        let kept = keep_aside(&path)?;
        let highest = known.0.saturating_add(FORGOTTEN_GAP);
        let record = HostRecord {
            highest: Generation(highest),
            held,
            ..HostRecord::absent(vm.clone())
        };
        let payload = serde_json::to_vec(&record).map_err(internal)?;
        let file = frame::encode(&payload).ok_or_else(|| internal("the record is too long"))?;
        // Makes the kept copy's name durable, too: it is in the same directory.
        replace_durably(&RealFiles, &path, &file).map_err(stored)?;
        Ok(kept)
    }

    fn read_plainly(&self, vm: &VmName) -> Result<Option<HostRecord>, StoreError> {
        VmStore::peek(self.state_dir(), vm)
    }
}

/// Gives the file a second name that nothing else has.
fn keep_aside(path: &Path) -> Result<PathBuf, ApiError> {
    for number in 1..=DAMAGED_MAX {
        let aside = path.with_extension(format!("damaged-{number}"));
        match std::fs::hard_link(path, &aside) {
            Ok(()) => return Ok(aside),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(internal(format!("cannot keep {}: {error}", path.display())));
            }
        }
    }
    Err(internal(format!(
        "there are {DAMAGED_MAX} damaged records beside {} already: move them away",
        path.display()
    )))
}
