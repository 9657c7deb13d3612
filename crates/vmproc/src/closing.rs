//! A guest whose host shuts down.
//!
//! Part of [`Vm`]. Nobody asked for the VM to be off: a guest that powers itself off while its host closes is gone as in a
//! power cut, the record goes on saying that the VM runs, and the host's next boot decides by it. That the host closes is
//! the mark that the agent puts into the host's run directory, which a reboot empties: a successor of this process sees it,
//! too. A guest whose power key was pressed so may obey only after its host was opened again, or its limit passed: that, too,
//! is noted beside QEMU's identity, and counts as long as a person's stop does. A person's own stop counts before all of
//! this.
//!
//! At the end of its time a guest that comes here is ended as any other. Where it is not taken yet, that is a durable no to
//! its source, which goes on with it; where it is, this host holds it and boots it when it is back. Refuses: to power
//! anything down without the mark, to start or take a guest while it is there, and to touch a VM that this host gave away.

use crate::off::{now_unix_s, still_counts};
use crate::requests::{Reply, qmp};
use crate::vm::Vm;
use godwit_ownership::{Event, Status};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{CloseState, CloseStep, ClosingVm, VmAnswer, closing_mark};
use godwit_types::migration::Side;
use godwit_types::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A power key that was pressed since the host shuts down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Pressed {
    /// Of which QEMU of this VM.
    launch: u64,
    /// When, in seconds since 1970.
    pressed_unix_s: u64,
}

impl Vm {
    /// Whether this host shuts down. Only a mark that is not there shows that it does not: one that cannot be looked at
    /// would have a guest's last power-off taken for its own wish.
    pub(crate) fn host_closes(&self) -> bool {
        let mark = closing_mark(Path::new(&self.config.run_dir));
        mark.is_some_and(|mark| mark.try_exists().unwrap_or(true))
    }

    /// Whether a guest that powers itself off now does so for its host, which boots it again, and not of its own wish.
    pub(crate) fn goes_with_its_host(&self) -> bool {
        !self.is_asked_off() && (self.host_closes() || self.was_pressed())
    }

    fn was_pressed(&self) -> bool {
        let launch = self.hyper.as_ref().map(|hyper| hyper.identity.launch);
        let pressed = load_json::<Pressed>(&self.paths.pressed());
        let pressed = pressed.unwrap_or_else(|error| {
            tracing::warn!(%error, "whether this host pressed the guest's power key cannot be read");
            None
        });
        pressed.is_some_and(|pressed| {
            Some(pressed.launch) == launch && still_counts(pressed.pressed_unix_s)
        })
    }

    fn note_pressed(&self, launch: u64) {
        let pressed_unix_s = now_unix_s();
        let pressed = Pressed {
            launch,
            pressed_unix_s,
        };
        if let Err(error) = save_json(&self.paths.pressed(), &pressed) {
            tracing::warn!(%error, "a guest that powers off late counts as one that wished to");
        }
    }

    /// Refuses a guest that would be cut off at once.
    pub(crate) fn refuse_while_closing(&self) -> Result<(), ApiError> {
        if !self.host_closes() {
            return Ok(());
        }
        let host = &self.config.host;
        let message = format!(
            "host '{host}' shuts down: no guest starts there, comes there or leaves it; 'godwit host open' on it ends that"
        );
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
    }

    /// One step on the guest's way down.
    pub(crate) fn close(&mut self, step: CloseStep) -> Reply {
        if !self.host_closes() {
            let message = format!("host '{}' does not shut down", self.config.host);
            return Err(ApiError::new(ErrorCode::WrongState, message));
        }
        let (state, why) = self.closed_by(step)?;
        Ok(VmAnswer::Closing(ClosingVm {
            vm: self.config.vm.clone(),
            state,
            why,
        }))
    }

    fn closed_by(&mut self, step: CloseStep) -> Result<(CloseState, Option<String>), ApiError> {
        let left = |why: &str| Ok((CloseState::Left, Some(why.to_owned())));
        if step == CloseStep::End && self.is_coming() && self.hyper.is_some() {
            // A durable no: its source goes on with it.
            return Ok((self.end_guest(), None));
        }
        if matches!(self.status, Status::InDoubt { .. }) {
            return left("it is in doubt which host holds it");
        }
        if let Some(id) = self
            .migration
            .as_ref()
            .map(|migration| migration.id.clone())
        {
            if step != CloseStep::Look {
                let why = format!("host '{}' shuts down", self.config.host);
                // One that cannot be called off any more is over in a moment.
                let _ = self.cancel(&id, &why);
            }
            match &self.migration {
                Some(_) if step != CloseStep::End => return Ok((CloseState::Migrating, None)),
                Some(migration) if migration.side == Side::Source => {
                    return left("it is being handed over, and the other host's answer decides");
                }
                // It has arrived, or stays.
                Some(_) | None => {}
            }
        }
        let Some(hyper) = &self.hyper else {
            return Ok((CloseState::Off, None));
        };
        if !self.runs_a_guest() {
            return left("its guest stands still, and what its memory holds is lost with the host");
        }
        match step {
            CloseStep::Look => {}
            CloseStep::Press => {
                // An agent that took the question and did nothing is not asked again: the power key follows.
                let was_asked = self.was_pressed() || self.is_asked_off();
                // Noted first: the guest may obey at any time from then on.
                self.note_pressed(hyper.identity.launch);
                hyper.ask_to_power_off(was_asked).map_err(qmp)?;
            }
            CloseStep::End => return Ok((self.end_guest(), None)),
        }
        Ok((CloseState::Waits, None))
    }

    /// Whether a power key is of any use. A record that waits for room on its disk keeps no guest from obeying.
    fn runs_a_guest(&self) -> bool {
        match &self.status {
            Status::Running { .. } | Status::Migrating { .. } => true,
            Status::JournalFailed => self.runs_on_an_unwritten_record(),
            _ => false,
        }
    }

    fn end_guest(&mut self) -> CloseState {
        let is_asked_off = self.is_asked_off();
        self.kill_qemu();
        self.feed(Event::QemuDied);
        if is_asked_off {
            self.keep_off_what_was_asked_off();
        }
        CloseState::Ended
    }
}
