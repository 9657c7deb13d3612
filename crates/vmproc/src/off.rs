//! A stop by a person, and the guest's own power-off, also where nothing can be written.
//!
//! Part of [`Vm`]. A person who has a guest asked to power off wants the VM off, also if its host goes down before the guest
//! has: that is written, beside the record, before it is answered. A guest that has not obeyed within [`ASKED_COUNTS`] runs
//! on, and what was written is forgotten then; of one that is gone it counts however long its host had no power. It counts
//! for no guest that is started or comes here later.
//!
//! To end a guest is safe whatever the record says, since nobody else begins to run it by that: only that it
//! is off must be written before it counts. Owns the wish until then, for as long as the VM is held as it was. Refuses: a
//! boot that nobody asked for meanwhile, and to end a guest whose handover is under way.

use crate::requests::{Reply, qmp};
use crate::vm::Vm;
use godwit_migrate::why::Why;
use godwit_ownership::{Event, Phase, Power, Qemu, StateName};
use godwit_store::{StoreError, load_json, remove_document, save_json};
use godwit_types::{ApiError, ErrorCode, Generation};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long it counts of a guest that lives that a person had it asked to power off.
pub(crate) const ASKED_COUNTS: Duration = Duration::from_secs(3600);
/// In the VM's state directory: a person had the guest asked to power off.
pub(crate) const ASKED_FILE: &str = "asked-off.json";

/// Pause between two tries to write that the VM is off.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Between two looks whether a soft stop was obeyed.
const LOOK_EACH: Duration = Duration::from_secs(60);

/// A person had the guest asked to power off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskedOff {
    /// Under which generation the VM was held then.
    held: Generation,
    /// When, in seconds since 1970.
    pub(crate) asked_unix_s: u64,
}

pub(crate) fn now_unix_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Whether something that was noted at that time still counts; a clock that was set back says yes.
pub(crate) fn still_counts(noted_unix_s: u64) -> bool {
    now_unix_s().saturating_sub(noted_unix_s) < ASKED_COUNTS.as_secs()
}

/// A person wants the VM off, or its guest powered itself off, which is not written yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OffWish {
    /// Under which generation the VM was held then: of a VM that comes here again nobody wished it.
    held: Generation,
    tried: Instant,
}

impl Vm {
    /// Ends the guest, and writes that the VM is off; now, or as soon as that can be written.
    pub(crate) fn power_off(&mut self) -> Reply {
        let had_guest = self.hyper.is_some();
        let why = Why::guest_ended("powered off by its user");
        let done = match self.moves_away() {
            Some(id) => format!("is powered off; migration '{id}' ends with that"),
            None => "is powered off".to_owned(),
        };
        let asked = self.put(Event::StopRequested, Some(why));
        let asked = self.verdict_or(asked, &done, "is off already");
        let Err(error) = asked else {
            self.off_wanted = None;
            return asked;
        };
        if self.waits_for_its_journal() && self.hyper.is_some() {
            self.kill_qemu();
            self.feed(Event::QemuDied);
        }
        let holds = self.core.record().power().is_some();
        if !holds || !had_guest || self.hyper.is_some() {
            return Err(error);
        }
        self.want_off();
        let message = format!(
            "the guest of VM '{vm}' on host '{}' is ended, but that the VM is off is not written yet: {}; make room there. If the host or the VM's process is restarted before that is written, the VM is booted again: then run 'godwit vm stop {vm} --force' once more",
            self.config.host,
            error.message,
            vm = self.config.vm
        );
        Err(ApiError::new(error.code, message).on_host(&self.config.host))
    }

    /// Has the guest asked to power off, as a person wants: written first, since the host may go down at once.
    pub(crate) fn powerdown(&mut self) -> Reply {
        let Some(hyper) = &self.hyper else {
            return self.power_off();
        };
        if self.is_coming() {
            let mut message = format!(
                "VM '{}' is just being received by host '{}': stop it where it runs",
                self.config.vm, self.config.host
            );
            if let Some(migration) = &self.migration {
                let id = &migration.id;
                message += &format!(
                    "; if its source is off, 'godwit migration cancel {id}' ends the move"
                );
            }
            return Err(ApiError::new(ErrorCode::WrongState, message).on_host(&self.config.host));
        }
        let was_asked_before = self.is_asked_off();
        let noted = self.note_asked_off();
        let by_agent = match hyper.ask_to_power_off(was_asked_before) {
            Ok(by_agent) => by_agent,
            Err(error) => {
                // An earlier one went out, and goes on counting.
                if !was_asked_before {
                    self.forget_asked_off();
                }
                return Err(qmp(error));
            }
        };
        let how = if by_agent { " by its guest agent" } else { "" };
        let mut asked = format!("was asked to power off{how}; use --force if it does not obey");
        if let Some(id) = self.moves_away() {
            asked += &format!("; migration '{id}' ends once the guest is off");
        }
        match noted {
            Ok(()) => self.done(&asked),
            Err(error) => self.done(&format!(
                "{asked}. If its host goes down before it has, it is booted again, since that cannot be written there: {error}"
            )),
        }
    }

    /// Whether the guest is just being received, so that there is none here yet that could obey.
    pub(crate) fn is_coming(&self) -> bool {
        matches!(
            self.core.record().phase,
            Phase::Incoming { .. } | Phase::Ready { .. }
        )
    }

    fn note_asked_off(&self) -> Result<(), StoreError> {
        let Some(held) = self.core.record().may_run() else {
            return Ok(());
        };
        let asked_unix_s = now_unix_s();
        let asked = AskedOff { held, asked_unix_s };
        save_json(&self.paths.state.join(ASKED_FILE), &asked)
    }

    /// From here on no earlier wish of a person to have the VM off counts.
    pub(crate) fn forget_asked_off(&self) {
        if let Err(error) = remove_document(&self.paths.state.join(ASKED_FILE)) {
            tracing::warn!(%error, "a stop that does not count any more is still on the disk");
        }
    }

    /// Whether a person had this guest asked to power off. Only a guest that lives shows by the time that went by that it
    /// did not obey.
    pub(crate) fn is_asked_off(&self) -> bool {
        let asked = load_json::<AskedOff>(&self.paths.state.join(ASKED_FILE));
        let asked = asked.unwrap_or_else(|error| {
            tracing::warn!(%error, "whether a person stopped the VM cannot be read");
            None
        });
        let held = self.core.record().may_run();
        let counts = |asked: &AskedOff| self.hyper.is_none() || still_counts(asked.asked_unix_s);
        asked.is_some_and(|asked| Some(asked.held) == held && counts(&asked))
    }

    /// The same, at most once in [`LOOK_EACH`], since it reads the disk.
    pub(crate) fn look_whether_obeyed(&mut self) {
        let looked = self.obeyed_looked;
        if looked.is_none_or(|at| at.elapsed() >= LOOK_EACH) {
            self.obeyed_looked = Some(Instant::now());
            self.forget_what_was_not_obeyed();
        }
    }

    /// A guest that was asked to power off and runs on after [`ASKED_COUNTS`] is not off after a loss of power later.
    pub(crate) fn forget_what_was_not_obeyed(&self) {
        if self.hyper.is_none() {
            return;
        }
        // One that cannot be read is told of where it matters.
        let asked = load_json::<AskedOff>(&self.paths.state.join(ASKED_FILE));
        if asked.is_ok_and(|asked| asked.is_some_and(|asked| !still_counts(asked.asked_unix_s))) {
            tracing::info!("the guest was asked to power off and runs on: that is forgotten");
            self.forget_asked_off();
        }
    }

    /// A VM whose guest a person had asked to power off, and whose host went down first, is off.
    pub(crate) fn keep_off_what_was_asked_off(&mut self) {
        let runs = self.core.record().power().is_some_and(Power::should_run);
        if self.hyper.is_some() || !runs || !self.is_asked_off() {
            return;
        }
        tracing::info!("a person had this VM's guest asked to power off: it is off, and stays so");
        if let Err(error) = self.power_off() {
            tracing::error!(%error, "that the VM is off is not written");
            self.stay_off();
        }
    }

    /// A guest that powered itself off is not taken for one that crashed where that could not be written.
    pub(crate) fn stay_off(&mut self) {
        let is_written = self.core.record().power() == Some(Power::Off);
        if self.hyper.is_none() && !is_written {
            self.want_off();
        }
    }

    fn want_off(&mut self) {
        let tried = Instant::now();
        let held = self.core.record().may_run();
        self.off_wanted = held.map(|held| OffWish { held, tried });
    }

    /// Writes that the VM is off, if it is still the one that was seen without a QEMU.
    pub(crate) fn power_off_dead(&mut self, generation: Generation) -> Reply {
        let is_dead = self.hyper.is_none() && self.migration.is_none();
        if is_dead && self.core.record().may_run() == Some(generation) {
            return self.power_off();
        }
        let message = format!(
            "VM '{}' on host '{}' was started or came here since it was looked at: look again",
            self.config.vm, self.config.host
        );
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(&self.config.host))
    }

    /// A record that was read and could not be written again backs nothing yet; this host holds the VM by it.
    fn waits_for_its_journal(&self) -> bool {
        let holds = self.core.record().power().is_some();
        holds && self.core.state_name() == StateName::Recovering
    }

    /// Whether a guest that was found running runs on, although the record by which it does could not be written again.
    pub(crate) fn runs_on_an_unwritten_record(&self) -> bool {
        let power = match &self.core.record().phase {
            Phase::Holds { power, .. } => *power,
            Phase::Stopping { .. } => Power::On,
            _ => return false,
        };
        let runs = power == Power::On && self.core.qemu() == Qemu::Running;
        runs && self.hyper.is_some() && self.core.state_name() == StateName::Recovering
    }

    /// Tries again to write that the VM is off.
    pub(crate) fn off_again(&mut self) {
        let held = self.core.record().may_run();
        if self.off_wanted.is_some_and(|wish| Some(wish.held) != held) {
            tracing::info!("the VM that was to be off is held here no more");
            self.off_wanted = None;
        }
        let Some(wish) = &mut self.off_wanted else {
            return;
        };
        if wish.tried.elapsed() < AGAIN_AFTER {
            return;
        }
        wish.tried = Instant::now();
        if self.ask_or(Event::StopRequested, "", "").is_ok() {
            tracing::info!("that the VM is off is written at last");
            self.off_wanted = None;
        }
    }

    /// Refuses a boot that no person asked for while the VM is to be off.
    pub(crate) fn refuse_if_off_is_wanted(&self) -> Result<(), ApiError> {
        let held = self.core.record().may_run();
        if self.off_wanted.is_none_or(|wish| Some(wish.held) != held) {
            return Ok(());
        }
        let message = format!(
            "VM '{}' was stopped by a person or by its guest, which host '{}' cannot write yet",
            self.config.vm, self.config.host
        );
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(&self.config.host))
    }
}
