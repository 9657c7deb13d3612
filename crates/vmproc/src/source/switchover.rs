//! The source's switchover: from the moment that what is left fits the target to the last byte of device state.
//!
//! Works on the driver's state. The ownership core says when to stop the guest, and what a lost link means. Refuses: to
//! make a next step of its own after a link was lost.

use super::driver::{Halt, SourceDriver, halt_of};
use super::steps::{FOR_EVER, Step};
use crate::faults::{planted, reached};
use crate::input::News;
use godwit_guestmem::PageSet;
use godwit_migrate::protocol::{ToDestination, ToSource};
use godwit_ownership::Event;
use godwit_qemu::device_state::SaveNews;
use godwit_streams::source::ConnectionSet;
use godwit_types::Generation;
use godwit_types::version::MIGRATION_WITH_CONSOLE;
use std::time::{Duration, Instant};

/// From this round trip on the stopped guest does not wait for an answer that readiness implies, s.
const FAR_RTT_S: f64 = 0.005;
/// How long a save may give nothing before that counts as silence.
const QUIET_SAVE: Duration = Duration::from_secs(2);
/// While the guest stands still silence counts sooner, so a destination that is only slow must be able to show it.
const SWITCHOVER_PING_EVERY: Duration = Duration::from_millis(100);
/// QEMU's time to say what its guest wrote last: the destination must hear from here meanwhile.
const CONSOLE_WAIT: Duration = Duration::from_millis(300);
/// QEMU's time to save its devices.
const SAVE_WAIT: Duration = Duration::from_secs(10);

impl SourceDriver {
    /// Waits for what the core wants, from the moment that what is left fits.
    pub(super) fn switchover(&mut self, set: &mut ConnectionSet) -> Halt {
        // The guest is held to its allowance until the moment in which it is stopped, while the journal is written.
        let slowest = self.parts.throttle.slowest_percent();
        self.parts
            .report
            .update(|report| report.guest_speed_percent = slowest);
        self.tell(News::Converged);
        loop {
            let result = match self.next(Some(set), SWITCHOVER_PING_EVERY) {
                Ok(Step::LastPages(attempt)) => self.last_pages(set, attempt),
                Ok(Step::DeviceState(attempt)) => self.device_state(set, attempt),
                Ok(Step::Peer(message, at)) => {
                    self.book_answer(&message, at);
                    Ok(())
                }
                Ok(Step::Nothing) => self.sign_of_life(set, SWITCHOVER_PING_EVERY),
                Ok(Step::GoOn | Step::PassEnd(_)) => Ok(()),
                Err(halt) => Err(halt),
            };
            match result {
                Ok(()) => {}
                Err(Halt::Lost(reason)) => return self.lost_in_switchover(reason),
                Err(halt) => return halt,
            }
        }
    }

    /// The core is told; it resumes the guest, or goes into doubt if the permit is out. Only then is there a next step.
    fn lost_in_switchover(&mut self, reason: String) -> Halt {
        self.parts.control.clear();
        self.tell(News::Core(Event::LinkLost));
        loop {
            match self.next(None, FOR_EVER) {
                Err(Halt::Ended(abort)) => return Halt::Ended(abort),
                Ok(Step::GoOn) => return Halt::Lost(reason),
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Whether a migration whose switchover was called off goes on is known once the guest runs again. Until then the
    /// channels stay: if it is over, the destination hears on them who wanted that.
    pub(super) fn hear_verdict(&mut self, set: &ConnectionSet) -> Halt {
        loop {
            let result = match self.next(Some(set), SWITCHOVER_PING_EVERY) {
                Ok(Step::GoOn) => return Halt::CalledOff,
                Ok(Step::Nothing) => self.sign_of_life(set, SWITCHOVER_PING_EVERY),
                other => other.map(drop),
            };
            match result {
                // A link that is lost now is made again, or needed no more.
                Ok(()) | Err(Halt::Lost(_) | Halt::CalledOff) => {}
                Err(halt) => return halt,
            }
        }
    }

    /// Books the figures that the destination tells in a switchover.
    fn book_answer(&self, message: &ToSource, at: Instant) {
        match *message {
            ToSource::Loaded { load_ms } => {
                self.parts
                    .report
                    .update(|report| report.switchover_parts_ms.device_load_ms = load_ms);
            }
            ToSource::Resumed { resume_ms, cpu_s } => {
                // Booked here and now: the VM's thread may be busy ending its hypervisor.
                self.parts.report.resumed(at, resume_ms, cpu_s);
            }
            _ => {}
        }
    }

    /// The guest is stopped: one complete look, one pass, one barrier.
    ///
    /// A near destination is asked whether all is applied before device state leaves: QEMU loads once, so a link that
    /// fails until then costs nothing. On a far link that question would cost the stopped guest a round trip. There
    /// device state follows at once, since the destination takes it only behind the barrier and says ready only once
    /// it has loaded it: one way with pages and device state, one back with ready, one with the permit.
    fn last_pages(&mut self, set: &mut ConnectionSet, attempt: Generation) -> Result<(), Halt> {
        let began = Instant::now();
        self.parts.ram.check_length().map_err(Halt::failed)?;
        set.control.send(&ToDestination::Stopped).map_err(halt_of)?;
        let for_blocks = self.last_changes(set)?;
        let cards = self.parts.neighbours.read();
        set.control
            .send(&ToDestination::Addresses { cards })
            .map_err(halt_of)?;
        self.send_variables(set)?;
        if !planted("final-scan-skipped") {
            // Nothing writes any more: a look that protects nothing is exact, and what it reports stays reported should
            // the guest go on here.
            let written = self.parts.tracker.peek(self.dirty.page_count());
            self.dirty.merge(&written.map_err(Halt::failed)?);
        }
        if planted("last-pages-not-sent") {
            self.dirty = PageSet::new(self.dirty.page_count());
        }
        // A stopped guest waits for no cap.
        let (mut iteration, pass_began) = self.send_dirty(set, None)?;
        if self.rtt_s < FAR_RTT_S {
            self.reach_barrier(set, &mut iteration, SWITCHOVER_PING_EVERY)?;
        }
        self.close_iteration(set, &mut iteration, pass_began);
        set.close_data();
        self.book(set, &iteration, 0);
        let for_pages = began.elapsed().saturating_sub(for_blocks);
        self.parts.report.update(|report| {
            let parts = &mut report.switchover_parts_ms;
            parts.last_blocks_ms = for_blocks.as_secs_f64() * 1e3;
            parts.last_pages_ms = for_pages.as_secs_f64() * 1e3;
        });
        reached("source.last-pages");
        self.tell(News::Core(Event::LastPagesApplied { attempt }));
        Ok(())
    }

    fn device_state(&mut self, set: &mut ConnectionSet, attempt: Generation) -> Result<(), Halt> {
        let gate = self.parts.save_gate.clone();
        let Some(saving) = gate.begin(attempt) else {
            // Called off: that command follows.
            return Ok(());
        };
        let began = Instant::now();
        let mut link = None;
        let saved = self
            .parts
            .machine
            .save_device_state(began + SAVE_WAIT, |news| {
                if saving.is_called_off() {
                    return Err(std::io::Error::other("the switchover was called off"));
                }
                // Data flows to the peer, or our own hypervisor is slow: this is not the peer's silence, for a while.
                if !matches!(news, SaveNews::Silence) || began.elapsed() < QUIET_SAVE {
                    (self.parts.news)(News::Heard);
                }
                let sent = match news {
                    SaveNews::Piece(piece) => {
                        reached("source.device-state");
                        set.control.send_device_state(piece)
                    }
                    SaveNews::Whole => set.control.send(&ToDestination::DeviceStateWhole),
                    SaveNews::Silence => Ok(()),
                };
                sent.map_err(|error| {
                    link = Some(halt_of(error));
                    std::io::Error::other("the link failed")
                })
            });
        let called_off = saving.is_called_off();
        drop(saving);
        let bytes = match (saved, link) {
            _ if called_off => return Ok(()),
            (_, Some(halt)) => return Err(halt),
            (Err(error), None) => return Err(Halt::failed(error)),
            (Ok(bytes), None) => bytes,
        };
        set.control
            .send(&ToDestination::DeviceStateEnd { bytes, attempt })
            .map_err(halt_of)?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        self.parts
            .report
            .update(|report| report.switchover_parts_ms.device_save_ms = ms);
        reached("source.device-state-sent");
        self.tell(News::Core(Event::DeviceStateSent { attempt }));
        self.send_console(set)
    }

    /// What the guest wrote to its console goes while the destination loads. What becomes of the guest does not hang on it.
    fn send_console(&self, set: &ConnectionSet) -> Result<(), Halt> {
        if self.parts.protocol < MIGRATION_WITH_CONSOLE {
            return Ok(());
        }
        match self.parts.console.whole(Instant::now() + CONSOLE_WAIT) {
            Ok(kept) => {
                let console = ToDestination::Console { kept };
                set.control.send(&console).map_err(halt_of)?;
            }
            Err(error) => {
                tracing::warn!(%error, "what the guest wrote to its console does not go along");
            }
        }
        Ok(())
    }
}
