//! The source's driver: one thread that runs a migration from connecting to the last byte of device state.
//!
//! Owns the channels, the dirty set and the write tracking. It never decides who may run the VM: it reports to the VM's
//! thread, whose ownership core says when to stop the guest and what to send, and obeys. Whatever goes wrong before the
//! permit, the guest keeps running at the source; a lost link is made again for up to a minute while it does.
//!
//! ```text
//! connect -> track -> [pass -> barrier -> scan -> decide]* -> converged
//!    ^                                                            | core: guest stopped
//!    |  link lost, guest resumed                                  v
//!    +------------------------------------------  last pages -> device state -> core hands over
//! ```

use super::handle::SourceParts;
use super::steps::{DriverInput, FOR_EVER};
use crate::faults::{planted, reached};
use crate::input::News;
use godwit_guestmem::PageSet;
use godwit_migrate::account::PAGE_BYTES;
use godwit_migrate::convergence::{Convergence, Goal};
use godwit_migrate::ledger::{Counters, Ledger};
use godwit_migrate::protocol::ToDestination;
use godwit_streams::source::{ConnectionSet, Ending, Pass, TellDriver};
use godwit_transport::TransportError;
use godwit_types::migration::MoveEventKind;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// How often the destination is asked for a sign of life.
pub(super) const PING_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for the answer to a barrier while the guest runs.
pub(super) const BARRIER_WAIT: Duration = Duration::from_secs(30);
/// Most messages of a lost channel that are still heard.
const UNREAD_MAX: usize = 1024;
/// Part of a switchover that does not depend on memory, as first estimate, s.
const FIXED_SWITCHOVER_S: f64 = 0.012;

/// Why an activity of the driver stopped.
#[derive(Debug)]
pub(super) enum Halt {
    /// The VM's thread wants the migration to be over.
    Ended(Option<ToDestination>),
    /// The link is lost.
    Lost(String),
    /// The core called the switchover off: it goes on with new channels, or is over.
    CalledOff,
    /// It cannot go on, for this reason.
    Failed(String),
}

impl Halt {
    /// It cannot go on, because of this.
    pub(super) fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

pub(super) struct SourceDriver {
    pub(super) parts: SourceParts,
    pub(super) own: TellDriver,
    pub(super) inputs: Receiver<DriverInput>,
    pub(super) ending: Ending,
    pub(super) dirty: PageSet,
    pub(super) next_set: u16,
    /// The guest's UEFI variables as the present set's destination has them.
    pub(super) variables_sent: Vec<u8>,
    pub(super) iteration: u32,
    /// Whether a pass is complete: from then on each races with what the guest writes.
    pub(super) passed: bool,
    pub(super) pass: Option<Arc<Pass>>,
    pub(super) convergence: Convergence,
    pub(super) ledger: Ledger,
    /// What the channels of earlier sets had carried.
    pub(super) carried: Counters,
    pub(super) began: Instant,
    /// When it was last asked what the guest has written.
    pub(super) scanned: Instant,
    /// Looks taken in the middle of the first iteration.
    pub(super) looks: u32,
    pub(super) rtt_s: f64,
    pub(super) pinged: Instant,
    /// When the destination said something last.
    pub(super) heard: Instant,
    /// Whether the VM's thread has said that it is over; it says so once.
    pub(super) end_heard: bool,
    /// Whether disks are being copied,
    pub(super) disks_begun: bool,
    /// and whether all below the tops of those with snapshots is durable at the destination.
    pub(super) layers_ready: bool,
    /// Whether it is tracked what the guest writes.
    tracks: bool,
}

impl SourceDriver {
    pub(super) fn new(
        parts: SourceParts,
        own: TellDriver,
        inputs: Receiver<DriverInput>,
        ending: Ending,
    ) -> Self {
        let goal = Goal {
            max_downtime_s: parts.max_downtime_ms as f64 / 1e3,
            fixed_s: FIXED_SWITCHOVER_S,
            deadline_s: parts.deadline_s.map(|seconds| seconds as f64),
        };
        Self {
            dirty: PageSet::new(parts.ram.page_count()),
            convergence: Convergence::new(goal),
            ledger: Ledger::default(),
            carried: Counters::default(),
            began: Instant::now(),
            scanned: Instant::now(),
            looks: 0,
            parts,
            own,
            inputs,
            ending,
            next_set: 0,
            variables_sent: Vec::new(),
            iteration: 0,
            passed: false,
            pass: None,
            rtt_s: 0.0005,
            pinged: Instant::now(),
            heard: Instant::now(),
            end_heard: false,
            disks_begun: false,
            layers_ready: false,
            tracks: false,
        }
    }

    pub(super) fn run(mut self) {
        let halt = self.migrate();
        // Tracking off first: the guest must not pay for a migration that is over.
        self.parts.throttle.release();
        self.parts.tracker.stop();
        self.confess(&halt);
        self.parts.control.clear();
    }

    /// Says why it cannot go on, unless the VM's thread has ended it, and waits until that does.
    fn confess(&mut self, halt: &Halt) {
        let reason = match halt {
            Halt::Failed(reason) => reason.clone(),
            Halt::Lost(reason) => format!(
                "the link to the destination was lost and could not be made again: {reason}"
            ),
            Halt::Ended(_) | Halt::CalledOff => return,
        };
        if !self.end_heard {
            self.tell(News::Failed(reason));
            self.wait_for_end();
        }
    }

    pub(super) fn tell(&self, news: News) {
        (self.parts.news)(news);
    }

    fn wait_for_end(&mut self) {
        while !self.end_heard {
            // Whatever else is wanted comes too late.
            drop(self.next(None, FOR_EVER));
        }
    }

    fn migrate(&mut self) -> Halt {
        reached("source.setup");
        match self.parts.ram.data_pages() {
            Ok(pages) => self.dirty = pages,
            Err(error) => return Halt::failed(error),
        }
        self.show_content();
        let mut set = match self.connect(true) {
            Ok(set) => set,
            Err(halt) => return halt,
        };
        self.parts.report.trouble(None);
        reached("source.connected");
        if self.parts.prepare
            && let Err(halt) = self.wait_prepared(&set)
        {
            let halt = match halt {
                Halt::Lost(reason) => self.hear_rest(&set).unwrap_or(Halt::Lost(reason)),
                halt => halt,
            };
            return self.give_up(&mut set, halt);
        }
        let switchover_wait = Duration::from_secs_f64(4.0 * self.rtt_s);
        self.tell(News::Began { switchover_wait });
        loop {
            let halt = match self.come_close(&mut set) {
                Ok(()) => self.switchover(&mut set),
                Err(halt) => halt,
            };
            let halt = match halt {
                Halt::CalledOff => self.hear_verdict(&set),
                halt => halt,
            };
            match halt {
                Halt::Lost(reason) => match self.hear_rest(&set) {
                    Some(halt) => return self.give_up(&mut set, halt),
                    None => self.note_lost(&reason),
                },
                Halt::CalledOff => {
                    let why = "the switchover was called off: the channels are made anew";
                    tracing::warn!("{why}");
                    self.parts.report.trouble(Some(why.into()));
                }
                halt => return self.give_up(&mut set, halt),
            }
            self.full_speed();
            self.abandon(&mut set);
            set = match self.connect(false) {
                Ok(set) => set,
                Err(halt) => return halt,
            };
            self.note_remade();
        }
    }

    /// Disks, then memory, until what is left fits the target.
    fn come_close(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        self.copy_disks(set)?;
        if !std::mem::replace(&mut self.tracks, true) {
            if !planted("tracking-after-first-read") {
                self.begin_tracking()?;
            }
            reached("source.tracking");
        }
        self.precopy(set)
    }

    /// Says that the link is lost, for as long as it is.
    fn note_lost(&self, reason: &str) {
        tracing::warn!(reason, "the link is lost; the channels are made anew");
        let report = &self.parts.report;
        report.happened(MoveEventKind::LinkLost, reason);
        report.trouble(Some(format!("link lost, connecting again: {reason}")));
    }

    fn note_remade(&self) {
        let report = &self.parts.report;
        report.trouble(None);
        if let Some(seconds) = report.passed(MoveEventKind::LinkLost) {
            tracing::info!(seconds, "the link is made again");
        }
    }

    /// What the destination said before its channels were lost counts all the same. Nothing is waited for: what is still on
    /// its way comes through the agents, too.
    fn hear_rest(&mut self, set: &ConnectionSet) -> Option<Halt> {
        for _ in 0..UNREAD_MAX {
            match self.next(Some(set), Duration::ZERO) {
                Ok(_) | Err(Halt::CalledOff) => {}
                // The control channel has nothing more to say.
                Err(Halt::Lost(_)) => return None,
                Err(halt) => return Some(halt),
            }
        }
        None
    }

    /// Closes a connection set; what may not have been applied is dirty again.
    fn abandon(&mut self, set: &mut ConnectionSet) {
        self.parts.control.clear();
        if let Some(pass) = &self.pass {
            // A sender that a cap holds back would sleep on.
            pass.stop();
        }
        let mut lost = PageSet::new(self.dirty.page_count());
        self.show_sent(set);
        self.carried = self.carried.and(set.counters());
        self.ledger.abandon_pass();
        set.abandon(&mut lost);
        if let Some(pass) = self.pass.take() {
            pass.put_back_untaken(&mut lost);
        }
        if !planted("lost-channel-not-put-back") {
            self.dirty.merge(&lost);
        }
    }

    /// Has the peer told why, if it can be told, and closes.
    fn give_up(&mut self, set: &mut ConnectionSet, halt: Halt) -> Halt {
        // The guest first: what is said to a peer may take long.
        self.full_speed();
        if !matches!(halt, Halt::Lost(_)) {
            self.parts.tracker.stop();
        }
        match &halt {
            Halt::Ended(None) | Halt::CalledOff => {
                set.finish();
                return halt;
            }
            Halt::Ended(Some(abort)) => {
                let _ = set.control.send(abort);
            }
            // The VM's thread finds the channel open, and says it there.
            Halt::Lost(_) | Halt::Failed(_) => self.confess(&halt),
        }
        set.control.finish();
        self.abandon(set);
        halt
    }

    /// Protects everything, and only then looks at what memory holds: what is written in between is dirty.
    pub(super) fn begin_tracking(&mut self) -> Result<(), Halt> {
        self.parts.tracker.start().map_err(Halt::failed)?;
        self.scanned = Instant::now();
        let pages = self.parts.ram.data_pages().map_err(Halt::failed)?;
        if !planted("tracking-after-first-read") {
            self.dirty.merge(&pages);
        }
        self.show_content();
        Ok(())
    }

    /// Says what has to go at least: memory without content does not.
    fn show_content(&self) {
        let bytes = self.dirty.count() * PAGE_BYTES;
        self.parts.report.update(|report| {
            report.content_bytes = bytes;
            report.remaining_bytes = bytes;
        });
    }
}

/// A transport error as the driver sees it.
pub(super) fn halt_of(error: TransportError) -> Halt {
    match error.class().is_lost() {
        true => Halt::Lost(error.to_string()),
        false => Halt::failed(error),
    }
}
