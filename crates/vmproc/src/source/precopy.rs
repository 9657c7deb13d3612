//! The source's iterations while the guest runs, and the last one while it is stopped.
//!
//! Works on the driver's state. Every iteration ends in a barrier, so that no older copy of a page is applied after a
//! newer one.

use super::driver::{BARRIER_WAIT, Halt, PING_EVERY, SourceDriver, halt_of};
use super::steps::{Step, unanswered};
use crate::faults::{planted, reached};
use godwit_guestmem::{CHUNK_SIZE, PageSet};
use godwit_migrate::account::{PAGE_BYTES, Shares, limited_by};
use godwit_migrate::convergence::{Decision, IterationFacts};
use godwit_migrate::ledger::ToDo;
use godwit_migrate::protocol::{ToDestination, ToSource};
use godwit_streams::source::{ConnectionSet, Pass, PassFigures, SendError};
use godwit_types::migration::{IterationReport, MigrationReport, Phase};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often progress is shown while a pass goes on.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Age of the first look at what the guest writes; each further one at twice the age.
const LOOK_FIRST: Duration = Duration::from_millis(200);

/// Channels that should carry a pass and carry nothing for so long are silent, s.
const SILENT_S: f64 = 2.0;

/// What one iteration came to.
#[derive(Debug, Default)]
pub(super) struct Iteration {
    figures: PassFigures,
    shares: Shares,
    elapsed: Duration,
}

impl SourceDriver {
    /// Goes round until what is left fits the target.
    pub(super) fn precopy(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        self.parts
            .report
            .update(|report| report.phase = Phase::Precopy);
        loop {
            let iteration = self.iterate(set)?;
            if planted("tracking-after-first-read") && self.iteration == 1 {
                self.begin_tracking()?;
            }
            let seconds = self.scan()?;
            let dirty_bytes = self.dirty.count() * PAGE_BYTES;
            let facts = IterationFacts {
                data_bytes: iteration.figures.pages * PAGE_BYTES,
                seconds,
                dirty_bytes,
                rtt_s: self.rtt_s,
                elapsed_s: self.began.elapsed().as_secs_f64(),
                slowing: self.parts.throttle.slowing(),
            };
            let decision = self.convergence.decide(facts);
            self.ledger.scanned(seconds, dirty_bytes);
            self.book(set, &iteration, dirty_bytes);
            self.note_unslowed();
            match decision {
                Decision::Iterate {
                    allowed_bytes_per_s: Some(bytes_per_s),
                } => self.parts.throttle.allow(bytes_per_s),
                Decision::Iterate { .. } => {}
                Decision::Switchover if self.disks_are_close() => return Ok(()),
                // Another round: what disks have under way is sent beside it.
                Decision::Switchover => self.wait_for_disks(set)?,
                Decision::GiveUp => return Err(Halt::Failed(self.gave_up())),
            }
        }
    }

    /// Gives disks a moment to catch up.
    fn wait_for_disks(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        if self.dirty.is_empty() {
            self.next(Some(set), PROGRESS_EVERY)?;
        }
        self.copy_disks(set)
    }

    /// Waits until the destination has allocated all of the guest's memory; nothing is tracked yet.
    pub(super) fn wait_prepared(&mut self, set: &ConnectionSet) -> Result<(), Halt> {
        self.heard = Instant::now();
        loop {
            self.sign_of_life(set, PING_EVERY)?;
            match self.next(Some(set), PING_EVERY)? {
                Step::Peer(ToSource::Prepared { seconds }, _) => {
                    let update = |report: &mut MigrationReport| report.prepare_s = seconds;
                    self.parts.report.update(update);
                    return Ok(());
                }
                Step::Nothing if self.heard.elapsed() >= BARRIER_WAIT => {
                    let silent = "the destination did not answer while it allocated memory";
                    return Err(Halt::Lost(silent.into()));
                }
                _ => {}
            }
        }
    }

    fn gave_up(&self) -> String {
        if let Some(why) = self.parts.throttle.unable() {
            return format!(
                "the guest writes memory faster than it can be sent and could not be slowed ({why}), so the pause would exceed {} ms: see cgroup-cpu in 'godwit host check', or allow a longer pause with --max-downtime, or more bandwidth",
                self.parts.max_downtime_ms
            );
        }
        let (slowest, floor) = (
            self.parts.throttle.slowest_percent(),
            self.parts.throttle.floor_percent(),
        );
        if slowest == 100 && floor < 100 {
            return format!(
                "the guest's memory is written faster than it can be sent, and not by its processors, so that slowing them does not help; the pause would exceed {} ms: allow a longer one with --max-downtime, or more bandwidth",
                self.parts.max_downtime_ms
            );
        }
        format!(
            "the guest writes memory faster than it can be sent even at {slowest} % of its speed (at least {floor} % was to be left), so the pause would exceed {} ms: allow a longer one with --max-downtime, more slowing with --max-guest-slowdown, or more bandwidth",
            self.parts.max_downtime_ms
        )
    }

    /// Says once in the report why a guest runs on at full speed that should be slowed.
    fn note_unslowed(&self) {
        let Some(why) = self.parts.throttle.unable() else {
            return;
        };
        let note = format!(
            "the guest writes memory faster than it can be sent and could not be slowed: {why}; see cgroup-cpu in 'godwit host check'"
        );
        self.parts.report.note(vec![note]);
    }

    /// Lifts what slows the guest, and says so.
    pub(super) fn full_speed(&mut self) {
        self.parts.throttle.release();
        self.convergence.released();
        self.parts.report.update(|report| {
            // Of a migration that is over it is told how slow the guest was, not that it is no more.
            if report.outcome.is_none() {
                report.guest_speed_percent = 100;
            }
        });
    }

    /// Adds what was written since the last scan; says how long ago that was, s.
    fn scan(&mut self) -> Result<f64, Halt> {
        let scanned = self.parts.tracker.scan(&mut self.dirty);
        scanned.map_err(Halt::failed)?;
        let before = std::mem::replace(&mut self.scanned, Instant::now());
        Ok(self.scanned.duration_since(before).as_secs_f64())
    }

    /// Looks at what was written so far in the first iteration, ever more rarely: until it ends nothing else is known
    /// about the guest.
    fn look(&mut self) -> Result<(), Halt> {
        let age = self.scanned.elapsed();
        if self.iteration != 1 || age < LOOK_FIRST * 2_u32.saturating_pow(self.looks) {
            return Ok(());
        }
        self.looks += 1;
        let written = self.parts.tracker.peek(self.dirty.page_count());
        let bytes = written.map_err(Halt::failed)?.count() * PAGE_BYTES;
        self.convergence.looked(age.as_secs_f64(), bytes);
        self.ledger.looked(age.as_secs_f64(), bytes);
        Ok(())
    }

    /// Sends everything that is dirty and waits until it is applied.
    fn iterate(&mut self, set: &mut ConnectionSet) -> Result<Iteration, Halt> {
        let (mut iteration, began) = self.send_dirty(set, self.parts.cap_bytes_per_s)?;
        self.reach_barrier(set, &mut iteration, PING_EVERY)?;
        reached("source.barrier");
        self.close_iteration(set, &mut iteration, began);
        Ok(iteration)
    }

    /// Sends everything that is dirty, at most so many bytes per second, and the barrier behind it.
    pub(super) fn send_dirty(
        &mut self,
        set: &mut ConnectionSet,
        cap_bytes_per_s: Option<f64>,
    ) -> Result<(Iteration, Instant), Halt> {
        let began = Instant::now();
        self.iteration += 1;
        let counters = self.carried.and(set.counters());
        self.ledger
            .begin_pass(self.began.elapsed().as_secs_f64(), counters);
        let gives_way = !self.passed;
        let pass = Pass::new(&self.dirty, cap_bytes_per_s, gives_way);
        let pass = Arc::new(pass);
        self.dirty = PageSet::new(self.dirty.page_count());
        self.pass = Some(Arc::clone(&pass));
        let iteration = self.run_pass(set, &pass)?;
        reached("source.pass");
        // Every chunk is sent; what is not applied yet is known to the channels.
        self.pass = None;
        set.barrier(self.iteration).map_err(halt_of)?;
        Ok((iteration, began))
    }

    pub(super) fn close_iteration(
        &mut self,
        set: &mut ConnectionSet,
        iteration: &mut Iteration,
        began: Instant,
    ) {
        set.note_windows();
        self.passed = true;
        iteration.elapsed = began.elapsed();
        let threads_s = iteration.elapsed.as_secs_f64() * set.streams().max(1) as f64;
        iteration.shares.source_busy = iteration.figures.busy.as_secs_f64() / threads_s;
        iteration.shares.cap = iteration.figures.capped.as_secs_f64() / threads_s;
        let (streams, notes) = (set.streams() as u32, set.take_notes());
        self.parts.report.update(|report| report.streams = streams);
        self.parts.report.note(notes);
    }

    fn run_pass(&mut self, set: &mut ConnectionSet, pass: &Arc<Pass>) -> Result<Iteration, Halt> {
        let mut iteration = Iteration::default();
        let mut working = set.begin(pass);
        if working == 0 || working < set.streams() {
            return Err(Halt::Lost("a data channel has ended".into()));
        }
        while working > 0 {
            if let Step::PassEnd(end) = self.next(Some(set), PROGRESS_EVERY)? {
                if let Some(error) = end.error {
                    return Err(halt_of_send(error));
                }
                working -= 1;
                iteration.figures += end.figures;
                set.sent(end.index, end.records);
            }
            self.sign_of_life(set, PING_EVERY)?;
            self.look()?;
            self.progress(set);
            self.mind_silence(set, pass.cap_bytes_per_s());
            if working > 0 {
                working += set.tend(pass).map_err(halt_of)?;
            }
        }
        if pass.left_pages() > 0 {
            return Err(Halt::Lost("no data channel is left".into()));
        }
        Ok(iteration)
    }

    pub(super) fn sign_of_life(
        &mut self,
        set: &ConnectionSet,
        every: Duration,
    ) -> Result<(), Halt> {
        if self.pinged.elapsed() < every {
            return Ok(());
        }
        self.pinged = Instant::now();
        set.control
            .send(&ToDestination::Ping { nonce: 1 })
            .map_err(halt_of)
    }

    pub(super) fn reach_barrier(
        &mut self,
        set: &mut ConnectionSet,
        iteration: &mut Iteration,
        ping_every: Duration,
    ) -> Result<(), Halt> {
        let mut moved = Instant::now();
        loop {
            self.sign_of_life(set, ping_every)?;
            self.show_sent(set);
            match self.next(Some(set), ping_every.min(PROGRESS_EVERY))? {
                // The destination lives; that nothing moves on a channel is for its own eyes.
                Step::Peer(ToSource::Applied { .. } | ToSource::Pong { .. }, _) => {
                    moved = Instant::now();
                }
                Step::Peer(
                    ToSource::BarrierDone {
                        iteration: done,
                        memory_wait,
                        busy,
                    },
                    _,
                ) if done == self.iteration => {
                    iteration.shares.destination_memory = f64::from(memory_wait.clamp(0.0, 1.0));
                    iteration.shares.destination_busy = f64::from(busy.clamp(0.0, 1.0));
                    return Ok(());
                }
                Step::Nothing if moved.elapsed() >= BARRIER_WAIT => return Err(unanswered()),
                _ => {}
            }
        }
    }

    /// Books a complete pass; `dirty_bytes` is what the guest wrote meanwhile and is left to send.
    pub(super) fn book(&mut self, set: &ConnectionSet, iteration: &Iteration, dirty_bytes: u64) {
        let figures = iteration.figures;
        let data_bytes = figures.pages * PAGE_BYTES;
        let entry = IterationReport {
            pages_sent: figures.pages,
            zero_pages: figures.zero_pages,
            bytes: figures.bytes,
            seconds: iteration.elapsed.as_secs_f64(),
            limited_by: limited_by(iteration.shares, self.iteration, data_bytes, dirty_bytes),
        };
        let cpu_s = self.parts.report.cpu_s();
        let ledger = &mut self.ledger;
        self.parts.report.update(|report| {
            ledger.book(report, entry);
            report.remaining_bytes = dirty_bytes;
            report.cpu_source_s = cpu_s;
        });
        self.progress(set);
    }

    /// Shows what the channels have carried so far, and how fast.
    pub(super) fn show_sent(&mut self, set: &ConnectionSet) {
        let now_s = self.began.elapsed().as_secs_f64();
        let counters = self.carried.and(set.counters());
        let ledger = &mut self.ledger;
        let show = |report: &mut MigrationReport| ledger.show(report, now_s, counters);
        self.parts.report.update(show);
    }

    /// Says when nothing gets through on channels that should carry a pass, and when something does again.
    fn mind_silence(&self, set: &ConnectionSet, cap_bytes_per_s: Option<f64>) {
        // A cap holds a channel back after each chunk.
        let ahead_bytes = 2.0 * CHUNK_SIZE as f64 * set.streams() as f64;
        let capped_s = cap_bytes_per_s.map_or(0.0, |bytes_per_s| ahead_bytes / bytes_per_s);
        let silent_s = self.ledger.silent_s(self.began.elapsed().as_secs_f64());
        self.parts.report.silent_for(silent_s, SILENT_S + capped_s);
    }

    /// Shows where it is: what is left of this pass, the guest's speed, and when it will be done.
    fn progress(&mut self, set: &ConnectionSet) {
        self.show_sent(set);
        let passed_s = self.scanned.elapsed().as_secs_f64();
        let (left_bytes, bytes_per_s) = match &self.pass {
            Some(pass) => pass.progress(passed_s),
            None => (self.dirty.count() * PAGE_BYTES, None),
        };
        let eta_s = self
            .convergence
            .estimate_s(left_bytes as f64, bytes_per_s, passed_s);
        let guest_speed_percent = self.parts.throttle.lowest_percent();
        let counters = self.carried.and(set.counters());
        let ledger = &self.ledger;
        self.parts.report.update(|report| {
            if report.phase != Phase::Precopy {
                return;
            }
            ledger.show_done(report, counters, ToDo { left_bytes, eta_s });
            report.remaining_bytes = left_bytes;
            report.eta_s = eta_s;
            report.guest_speed_percent = guest_speed_percent;
        });
    }
}

fn halt_of_send(error: SendError) -> Halt {
    match error {
        SendError::Transport(error) => halt_of(error),
        other => Halt::failed(other),
    }
}
