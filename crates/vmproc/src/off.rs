//! A forced stop, and the guest's own power-off, also where nothing can be written.
//!
//! Part of [`Vm`]. To end a guest is safe whatever the record says, since nobody else begins to run it by that: only that it
//! is off must be written before it counts. Owns the wish until then, for as long as the VM is held as it was. Refuses: a
//! boot that nobody asked for meanwhile, and to end a guest whose handover is under way.

use crate::requests::Reply;
use crate::vm::Vm;
use godwit_migrate::why::Why;
use godwit_ownership::{Event, EventKind, Phase, Power, StateName};
use godwit_types::{ApiError, ErrorCode, Generation};
use std::time::{Duration, Instant};

/// Pause between two tries to write that the VM is off.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

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
        self.feed_because(Event::StopRequested, Some(why));
        let asked = self.verdict_or(EventKind::StopRequested, "is powered off", "is off already");
        let Err(error) = asked else {
            self.off_wanted = None;
            return asked;
        };
        if self.waits_for_its_journal() && self.hyper.is_some() {
            self.kill_qemu();
            self.feed(Event::QemuDied);
        }
        let holds = matches!(self.core.record().phase, Phase::Holds { .. });
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

    /// A guest that powered itself off is not taken for one that crashed where that could not be written.
    pub(crate) fn stay_off(&mut self) {
        let is_written = matches!(
            self.core.record().phase,
            Phase::Holds {
                power: Power::Off,
                ..
            }
        );
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
        let holds = matches!(self.core.record().phase, Phase::Holds { .. });
        holds && self.core.state_name() == StateName::Recovering
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
