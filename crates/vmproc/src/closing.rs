//! A guest whose host shuts down.
//!
//! Part of [`Vm`]. Nobody asked for the VM to be off: a guest that powers itself off while its host closes is gone as in a
//! power cut, the record goes on saying that the VM runs, and the host's next boot decides by it. That the host closes is
//! the mark that the agent puts into the host's run directory, which a reboot empties: a successor of this process sees it,
//! too. Refuses: to power anything down without the mark, to start or take a guest while it is there, and to touch a VM
//! that is in doubt.

use crate::hypervisor::QMP_WAIT;
use crate::requests::{Reply, qmp};
use crate::vm::Vm;
use godwit_ownership::{Event, Status};
use godwit_types::host_api::{CloseState, CloseStep, ClosingVm, VmAnswer, closing_mark};
use godwit_types::{ApiError, ErrorCode};
use std::path::Path;
use std::time::Instant;

impl Vm {
    /// Whether this host shuts down. Only a mark that is not there shows that it does not: one that cannot be looked at
    /// would have a guest's last power-off taken for its own wish.
    pub(crate) fn host_closes(&self) -> bool {
        let mark = closing_mark(Path::new(&self.config.run_dir));
        mark.is_some_and(|mark| mark.try_exists().unwrap_or(true))
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
            return Ok((CloseState::Migrating, None));
        }
        let Some(hyper) = &self.hyper else {
            return Ok((CloseState::Off, None));
        };
        if !matches!(self.status, Status::Running { .. }) {
            return left("its guest stands still, and what its memory holds is lost with the host");
        }
        match step {
            CloseStep::Look => {}
            CloseStep::Press => {
                let pressed = hyper.machine.powerdown(Instant::now() + QMP_WAIT);
                pressed.map_err(qmp)?;
            }
            CloseStep::End => {
                self.kill_qemu();
                self.feed(Event::QemuDied);
                return Ok((CloseState::Ended, None));
            }
        }
        Ok((CloseState::Waits, None))
    }
}
