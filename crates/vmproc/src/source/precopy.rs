//! The source's iterations while the guest runs, and the last one while it is stopped.
//!
//! Works on the driver's state. Every iteration ends in a barrier, so that no older copy of a page is applied after a
//! newer one.

use super::driver::{
    BARRIER_WAIT, Command, DriverInput, Halt, PING_EVERY, SAVE_WAIT, SourceDriver, halt_of,
};
use super::epoch::Epoch;
use super::pass::Pass;
use super::sender::PassFigures;
use crate::faults::{planted, reached};
use crate::input::News;
use godwit_guestmem::PageSet;
use godwit_migrate::account::{PAGE_BYTES, Shares, limited_by};
use godwit_migrate::convergence::{Decision, IterationFacts};
use godwit_migrate::ledger::ToDo;
use godwit_migrate::protocol::{ToDestination, ToSource};
use godwit_ownership::Event;
use godwit_qemu::device_state::SaveNews;
use godwit_types::Generation;
use godwit_types::migration::{IterationReport, MigrationReport, PEER_GAVE_UP, Phase};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// From this round trip on the stopped guest does not wait for an answer that readiness implies, s.
const FAR_RTT_S: f64 = 0.005;
/// How long a save may give nothing before that counts as silence.
const QUIET_SAVE: Duration = Duration::from_secs(2);
/// While the guest stands still silence counts sooner, so a destination that is only slow must be able to show it.
const SWITCHOVER_PING_EVERY: Duration = Duration::from_millis(100);

/// How often progress is shown while a pass goes on.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Age of the first look at what the guest writes; each further one at twice the age.
const LOOK_FIRST: Duration = Duration::from_millis(200);

/// Channels that should carry a pass and carry nothing for so long are silent, s.
const SILENT_S: f64 = 2.0;
/// A cap holds a channel back after each chunk of so many bytes.
const CHUNK_BYTES: f64 = 2_097_152.0;

/// What one iteration came to.
#[derive(Debug, Default)]
struct Iteration {
    figures: PassFigures,
    shares: Shares,
    elapsed: Duration,
}

impl SourceDriver {
    /// Goes round until what is left fits the promise.
    pub(super) fn precopy(&mut self, epoch: &mut Epoch) -> Result<(), Halt> {
        self.parts
            .report
            .update(|report| report.phase = Phase::Precopy);
        loop {
            let iteration = self.iterate(epoch)?;
            if planted("tracking-after-first-read") && self.iteration == 1 {
                self.begin_tracking().map_err(Halt::Failed)?;
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
            self.book(epoch, &iteration, dirty_bytes);
            self.note_unslowed();
            match decision {
                Decision::Iterate {
                    allowed_bytes_per_s: Some(bytes_per_s),
                } => self.parts.throttle.allow(bytes_per_s),
                Decision::Iterate { .. } => {}
                Decision::Switchover => return Ok(()),
                Decision::GiveUp => return Err(Halt::Failed(self.gave_up())),
            }
        }
    }

    /// Waits until the destination has allocated all of the guest's memory; nothing is tracked yet.
    pub(super) fn wait_prepared(&mut self, epoch: &Epoch) -> Result<(), Halt> {
        let mut heard = Instant::now();
        loop {
            self.sign_of_life(epoch, PING_EVERY)?;
            match self.inputs.recv_timeout(PING_EVERY) {
                Ok(DriverInput::Peer {
                    epoch: number,
                    from,
                    ..
                }) if number == epoch.number => {
                    heard = Instant::now();
                    if let Some(ToSource::Prepared { seconds }) = self.hear_peer(from)? {
                        let update = |report: &mut MigrationReport| report.prepare_s = seconds;
                        self.parts.report.update(update);
                        return Ok(());
                    }
                }
                Ok(input) => self.beside(epoch, input)?,
                Err(RecvTimeoutError::Timeout) if heard.elapsed() < BARRIER_WAIT => {}
                Err(RecvTimeoutError::Timeout) => {
                    let silent = "the destination did not answer while it allocated memory";
                    return Err(Halt::Lost(silent.into()));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Halt::Ended(None)),
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
        self.parts.report.update(|report| {
            if !report.notes.contains(&note) {
                report.notes.push(note);
            }
        });
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
        scanned.map_err(|error| Halt::Failed(error.to_string()))?;
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
        let written = written.map_err(|error| Halt::Failed(error.to_string()))?;
        let bytes = written.count() * PAGE_BYTES;
        self.convergence.looked(age.as_secs_f64(), bytes);
        self.ledger.looked(age.as_secs_f64(), bytes);
        Ok(())
    }

    /// Sends everything that is dirty and waits until it is applied.
    fn iterate(&mut self, epoch: &mut Epoch) -> Result<Iteration, Halt> {
        let (mut iteration, began) = self.send_dirty(epoch)?;
        self.reach_barrier(epoch, &mut iteration, PING_EVERY)?;
        reached("source.barrier");
        self.close_iteration(epoch, &mut iteration, began);
        Ok(iteration)
    }

    /// Sends everything that is dirty, and the barrier behind it.
    fn send_dirty(&mut self, epoch: &mut Epoch) -> Result<(Iteration, Instant), Halt> {
        let began = Instant::now();
        self.iteration += 1;
        let counters = self.carried.and(epoch.counters());
        self.ledger
            .begin_pass(self.began.elapsed().as_secs_f64(), counters);
        let gives_way = !self.passed;
        let pass = Pass::new(&self.dirty, self.parts.cap_bytes_per_s, gives_way);
        let pass = Arc::new(pass);
        self.dirty = PageSet::new(self.dirty.page_count());
        self.pass = Some(Arc::clone(&pass));
        let iteration = self.run_pass(epoch, &pass)?;
        reached("source.pass");
        // Every chunk is sent; what is not applied yet is known to the channels.
        self.pass = None;
        epoch.barrier(self.iteration).map_err(halt_of)?;
        Ok((iteration, began))
    }

    fn close_iteration(&mut self, epoch: &mut Epoch, iteration: &mut Iteration, began: Instant) {
        epoch.note_windows();
        self.passed = true;
        iteration.elapsed = began.elapsed();
        let threads_s = iteration.elapsed.as_secs_f64() * epoch.streams().max(1) as f64;
        iteration.shares.source_busy = iteration.figures.busy.as_secs_f64() / threads_s;
        iteration.shares.cap = iteration.figures.capped.as_secs_f64() / threads_s;
        let (streams, notes) = (epoch.streams() as u32, epoch.take_notes());
        self.parts.report.update(|report| {
            report.streams = streams;
            report.notes.extend(notes);
        });
    }

    fn run_pass(&mut self, epoch: &mut Epoch, pass: &Arc<Pass>) -> Result<Iteration, Halt> {
        let mut iteration = Iteration::default();
        let mut working = epoch.begin(pass);
        if working == 0 || working < epoch.streams() {
            return Err(Halt::Lost("a data channel has ended".into()));
        }
        while working > 0 {
            match self.inputs.recv_timeout(PROGRESS_EVERY) {
                Ok(DriverInput::PassEnd { epoch: number, end }) if number == epoch.number => {
                    if let Some(error) = end.error {
                        return Err(halt_of_send(error));
                    }
                    working -= 1;
                    add(&mut iteration.figures, end.figures);
                    epoch.sent(end.index, end.figures.records);
                }
                Ok(input) => self.beside(epoch, input)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Halt::Ended(None)),
            }
            self.sign_of_life(epoch, PING_EVERY)?;
            self.look()?;
            self.progress(epoch);
            self.mind_silence(epoch);
            if working > 0 {
                working += epoch.tend(pass).map_err(halt_of)?;
            }
        }
        if pass.left_pages() > 0 {
            return Err(Halt::Lost("no data channel is left".into()));
        }
        Ok(iteration)
    }

    /// Inputs that come while something else is waited for.
    fn beside(&mut self, epoch: &Epoch, input: DriverInput) -> Result<(), Halt> {
        match input {
            DriverInput::Command(Command::End { reason }) => Err(Halt::Ended(reason)),
            DriverInput::Command(Command::CalledOff) => Err(Halt::CalledOff),
            DriverInput::Command(Command::PeerGaveUp) => Err(Halt::Lost(PEER_GAVE_UP.into())),
            DriverInput::Peer {
                epoch: number,
                from,
                ..
            } if number == epoch.number => self.hear_peer(from).map(drop),
            _ => Ok(()),
        }
    }

    fn sign_of_life(&mut self, epoch: &Epoch, every: Duration) -> Result<(), Halt> {
        if self.pinged.elapsed() < every {
            return Ok(());
        }
        self.pinged = Instant::now();
        epoch
            .control
            .send(&ToDestination::Ping { nonce: 1 })
            .map_err(halt_of)
    }

    fn reach_barrier(
        &mut self,
        epoch: &mut Epoch,
        iteration: &mut Iteration,
        ping_every: Duration,
    ) -> Result<(), Halt> {
        let mut moved = Instant::now();
        loop {
            self.sign_of_life(epoch, ping_every)?;
            self.show_sent(epoch);
            let wait = ping_every.min(PROGRESS_EVERY);
            match self.peer_within(epoch, wait, moved + BARRIER_WAIT)? {
                // The destination lives; that nothing moves on a channel is for its own eyes.
                Some(ToSource::Applied { .. } | ToSource::Pong { .. }) => moved = Instant::now(),
                Some(ToSource::BarrierDone {
                    iteration: done,
                    memory_wait,
                    busy,
                }) if done == self.iteration => {
                    iteration.shares.destination_memory = f64::from(memory_wait.clamp(0.0, 1.0));
                    iteration.shares.destination_busy = f64::from(busy.clamp(0.0, 1.0));
                    return Ok(());
                }
                _ => {}
            }
        }
    }

    /// Books a complete pass; `dirty_bytes` is what the guest wrote meanwhile and is left to send.
    fn book(&mut self, epoch: &Epoch, iteration: &Iteration, dirty_bytes: u64) {
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
        self.progress(epoch);
    }

    /// Shows what the channels have carried so far, and how fast.
    pub(super) fn show_sent(&mut self, epoch: &Epoch) {
        let now_s = self.began.elapsed().as_secs_f64();
        let counters = self.carried.and(epoch.counters());
        let ledger = &mut self.ledger;
        let show = |report: &mut MigrationReport| ledger.show(report, now_s, counters);
        self.parts.report.update(show);
    }

    /// Says when nothing gets through on channels that should carry a pass, and when something does again.
    fn mind_silence(&self, epoch: &Epoch) {
        let cap = self.parts.cap_bytes_per_s;
        let ahead_bytes = 2.0 * CHUNK_BYTES * epoch.streams() as f64;
        let capped_s = cap.map_or(0.0, |bytes_per_s| ahead_bytes / bytes_per_s);
        let silent_s = self.ledger.silent_s(self.began.elapsed().as_secs_f64());
        self.parts.report.silent_for(silent_s, SILENT_S + capped_s);
    }

    /// Shows where it is: what is left of this pass, the guest's speed, and when it will be done.
    fn progress(&mut self, epoch: &Epoch) {
        self.show_sent(epoch);
        let passed_s = self.scanned.elapsed().as_secs_f64();
        let (left_bytes, bytes_per_s) = match &self.pass {
            Some(pass) => pass_progress(pass, passed_s),
            None => (self.dirty.count() * PAGE_BYTES, None),
        };
        let eta_s = self
            .convergence
            .estimate_s(left_bytes as f64, bytes_per_s, passed_s);
        let guest_speed_percent = self.parts.throttle.lowest_percent();
        let counters = self.carried.and(epoch.counters());
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

    /// Waits for what the core wants, from the moment that what is left fits.
    pub(super) fn switchover(&mut self, epoch: &mut Epoch) -> Halt {
        // The guest is held to its allowance until the moment in which it is stopped, while the journal is written.
        let slowest = self.parts.throttle.slowest_percent();
        self.parts
            .report
            .update(|report| report.guest_speed_percent = slowest);
        self.tell(News::Converged);
        loop {
            let result = match self.inputs.recv_timeout(SWITCHOVER_PING_EVERY) {
                Ok(DriverInput::Command(Command::LastPages { attempt })) => {
                    self.last_pages(epoch, attempt)
                }
                Ok(DriverInput::Command(Command::DeviceState { attempt })) => {
                    self.device_state(epoch, attempt)
                }
                Ok(DriverInput::Peer {
                    epoch: number,
                    from,
                    at,
                }) if number == epoch.number => self.hear(from, at),
                Ok(input) => self.beside(epoch, input),
                Err(RecvTimeoutError::Timeout) => self.sign_of_life(epoch, SWITCHOVER_PING_EVERY),
                Err(RecvTimeoutError::Disconnected) => Err(Halt::Ended(None)),
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
            match self.inputs.recv() {
                Ok(DriverInput::Command(Command::End { reason })) => return Halt::Ended(reason),
                Ok(DriverInput::Command(Command::GoOn)) => return Halt::Lost(reason),
                Ok(_) => {}
                Err(_) => return Halt::Ended(None),
            }
        }
    }

    /// Whether a migration whose switchover was called off goes on is known once the guest runs again. Until then the
    /// channels stay: if it is over, the destination hears on them who wanted that.
    pub(super) fn hear_verdict(&mut self, epoch: &Epoch) -> Halt {
        loop {
            let result = match self.inputs.recv_timeout(SWITCHOVER_PING_EVERY) {
                Ok(DriverInput::Command(Command::GoOn)) => return Halt::CalledOff,
                Ok(input) => self.beside(epoch, input),
                Err(RecvTimeoutError::Timeout) => self.sign_of_life(epoch, SWITCHOVER_PING_EVERY),
                Err(RecvTimeoutError::Disconnected) => return Halt::Ended(None),
            };
            match result {
                // A link that is lost now is made again, or needed no more.
                Ok(()) | Err(Halt::Lost(_) | Halt::CalledOff) => {}
                Err(halt) => return halt,
            }
        }
    }

    fn hear(&mut self, from: super::driver::FromPeer, at: Instant) -> Result<(), Halt> {
        match self.hear_peer(from)? {
            Some(ToSource::Loaded { load_ms }) => {
                self.parts
                    .report
                    .update(|report| report.switchover_parts_ms.device_load_ms = load_ms);
            }
            Some(ToSource::Resumed { resume_ms, cpu_s }) => {
                // Booked here and now: the VM's thread may be busy ending its hypervisor.
                self.parts.report.resumed(at, resume_ms, cpu_s);
            }
            _ => {}
        }
        Ok(())
    }

    /// The guest is stopped: one complete look, one pass, one barrier.
    ///
    /// A near destination is asked whether all is applied before device state leaves: QEMU loads once, so a link that
    /// fails until then costs nothing. On a far link that question would cost the stopped guest a round trip. There
    /// device state follows at once, since the destination takes it only behind the barrier and says ready only once
    /// it has loaded it: one way with pages and device state, one back with ready, one with the permit.
    fn last_pages(&mut self, epoch: &mut Epoch, attempt: Generation) -> Result<(), Halt> {
        let began = Instant::now();
        let ram = self.parts.ram.check_length();
        ram.map_err(|error| Halt::Failed(error.to_string()))?;
        epoch
            .control
            .send(&ToDestination::Stopped)
            .map_err(halt_of)?;
        let cards = self.parts.neighbours.read();
        epoch
            .control
            .send(&ToDestination::Addresses { cards })
            .map_err(halt_of)?;
        if !planted("final-scan-skipped") {
            // Nothing writes any more: a look that protects nothing is exact, and what it reports stays reported should
            // the guest go on here.
            let written = self.parts.tracker.peek(self.dirty.page_count());
            let written = written.map_err(|error| Halt::Failed(error.to_string()))?;
            self.dirty.merge(&written);
        }
        if planted("last-pages-not-sent") {
            self.dirty = PageSet::new(self.dirty.page_count());
        }
        let cap = self.parts.cap_bytes_per_s.take();
        let sent = self.send_dirty(epoch);
        self.parts.cap_bytes_per_s = cap;
        let (mut iteration, pass_began) = sent?;
        if self.rtt_s < FAR_RTT_S {
            self.reach_barrier(epoch, &mut iteration, SWITCHOVER_PING_EVERY)?;
        }
        self.close_iteration(epoch, &mut iteration, pass_began);
        epoch.close_data();
        self.book(epoch, &iteration, 0);
        let ms = began.elapsed().as_secs_f64() * 1e3;
        self.parts
            .report
            .update(|report| report.switchover_parts_ms.last_pages_ms = ms);
        reached("source.last-pages");
        self.tell(News::Core(Event::LastPagesApplied { attempt }));
        Ok(())
    }

    fn device_state(&mut self, epoch: &mut Epoch, attempt: Generation) -> Result<(), Halt> {
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
                        epoch.control.send_device_state(piece)
                    }
                    SaveNews::Whole => epoch.control.send(&ToDestination::DeviceStateWhole),
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
            (Err(error), None) => return Err(Halt::Failed(error.to_string())),
            (Ok(bytes), None) => bytes,
        };
        epoch
            .control
            .send(&ToDestination::DeviceStateEnd { bytes, attempt })
            .map_err(halt_of)?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        self.parts
            .report
            .update(|report| report.switchover_parts_ms.device_save_ms = ms);
        reached("source.device-state-sent");
        self.tell(News::Core(Event::DeviceStateSent { attempt }));
        Ok(())
    }
}

/// Bytes that no thread has taken yet, and the speed so far where there is enough of it to tell.
fn pass_progress(pass: &Pass, passed_s: f64) -> (u64, Option<f64>) {
    let (left, all) = (pass.left_pages(), pass.pages());
    let sent_bytes = (all - left) * PAGE_BYTES;
    let telling = passed_s > 0.2 && sent_bytes > all * PAGE_BYTES / 50;
    let bytes_per_s = telling.then(|| sent_bytes as f64 / passed_s);
    (left * PAGE_BYTES, bytes_per_s)
}

fn halt_of_send(error: super::sender::SendError) -> Halt {
    match error {
        super::sender::SendError::Transport(error) => halt_of(error),
        other => Halt::Failed(other.to_string()),
    }
}

fn add(sum: &mut PassFigures, other: PassFigures) {
    sum.pages += other.pages;
    sum.zero_pages += other.zero_pages;
    sum.bytes += other.bytes;
    sum.busy += other.busy;
    sum.capped += other.capped;
}
