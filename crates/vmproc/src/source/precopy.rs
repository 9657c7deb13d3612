//! The source's iterations while the guest runs, and the last one while it is stopped.
//!
//! Works on the driver's state. Every iteration ends in a barrier, so that no older copy of a page is applied after a
//! newer one.

use super::driver::{
    BARRIER_WAIT, Command, DriverInput, GAVE_UP, Halt, PING_EVERY, SAVE_WAIT, SourceDriver, halt_of,
};
use super::epoch::Epoch;
use super::pass::Pass;
use super::sender::PassFigures;
use crate::faults::{planted, reached};
use crate::input::News;
use godwit_guestmem::{PageSet, ScanMode};
use godwit_migrate::account::{PAGE_BYTES, Shares, book, estimate_s, limited_by};
use godwit_migrate::convergence::{Decision, IterationFacts};
use godwit_migrate::protocol::{ToDestination, ToSource};
use godwit_ownership::Event;
use godwit_types::Generation;
use godwit_types::migration::{IterationReport, Phase};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// While the guest stands still silence counts sooner, so a destination that is only slow must be able to show it.
const SWITCHOVER_PING_EVERY: Duration = Duration::from_millis(100);

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
            self.scan(ScanMode::default())?;
            let dirty_bytes = self.dirty.count() * PAGE_BYTES;
            self.book(&iteration, Some(dirty_bytes));
            let facts = IterationFacts {
                data_bytes: iteration.figures.pages * PAGE_BYTES,
                seconds: iteration.elapsed.as_secs_f64(),
                dirty_bytes,
                rtt_s: self.rtt_s,
            };
            match self.convergence.decide(facts) {
                Decision::Iterate => {}
                Decision::SlowTo(percent) => self.slow(percent),
                Decision::Switchover => return Ok(()),
                Decision::GiveUp => return Err(Halt::Failed(self.gave_up())),
            }
        }
    }

    fn gave_up(&self) -> String {
        format!(
            "the guest writes memory faster than it can be sent even at {} % of its speed, so the pause would exceed {} ms: allow a longer one with --max-downtime or more bandwidth",
            self.convergence.speed_percent(),
            self.parts.max_downtime_ms
        )
    }

    fn slow(&mut self, percent: u32) {
        let slowed = self.parts.throttle.slow_to(percent);
        self.parts
            .report
            .update(|report| report.guest_speed_percent = slowed);
    }

    /// Lifts what slows the guest, and says so.
    pub(super) fn full_speed(&mut self) {
        self.parts.throttle.release();
        self.convergence.released();
        self.parts
            .report
            .update(|report| report.guest_speed_percent = 100);
    }

    pub(super) fn scan(&mut self, mode: ScanMode) -> Result<(), Halt> {
        let scanned = self.parts.tracker.scan(&mut self.dirty, mode);
        scanned.map_err(|error| Halt::Failed(error.to_string()))
    }

    /// Sends everything that is dirty and waits until it is applied.
    fn iterate(&mut self, epoch: &mut Epoch) -> Result<Iteration, Halt> {
        let began = Instant::now();
        self.iteration += 1;
        let pass = Arc::new(Pass::new(&self.dirty, self.parts.cap_bytes_per_s));
        self.dirty = PageSet::new(self.dirty.page_count());
        self.pass = Some(Arc::clone(&pass));
        let mut iteration = self.run_pass(epoch, &pass)?;
        reached("source.pass");
        self.reach_barrier(epoch, &mut iteration)?;
        reached("source.barrier");
        // Applied, all of it: nothing of this pass can come back.
        self.pass = None;
        iteration.elapsed = began.elapsed();
        let threads_s = iteration.elapsed.as_secs_f64() * epoch.streams() as f64;
        iteration.shares.source_busy = iteration.figures.busy.as_secs_f64() / threads_s;
        iteration.shares.cap = iteration.figures.capped.as_secs_f64() / threads_s;
        Ok(iteration)
    }

    fn run_pass(&mut self, epoch: &mut Epoch, pass: &Arc<Pass>) -> Result<Iteration, Halt> {
        let mut iteration = Iteration::default();
        let mut working = epoch.begin(pass);
        if working < epoch.streams() {
            return Err(Halt::Lost("a data channel has ended".into()));
        }
        while working > 0 {
            match self.inputs.recv_timeout(PING_EVERY) {
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
        }
        Ok(iteration)
    }

    /// Inputs that come while something else is waited for.
    fn beside(&mut self, epoch: &Epoch, input: DriverInput) -> Result<(), Halt> {
        match input {
            DriverInput::Command(Command::End { reason }) => Err(Halt::Ended(reason)),
            DriverInput::Command(Command::CalledOff) => Err(Halt::CalledOff),
            DriverInput::Command(Command::PeerGaveUp) => Err(Halt::Lost(GAVE_UP.into())),
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
        self.progress();
        epoch
            .control
            .send(&ToDestination::Ping { nonce: 1 })
            .map_err(halt_of)
    }

    fn reach_barrier(&mut self, epoch: &mut Epoch, iteration: &mut Iteration) -> Result<(), Halt> {
        epoch.barrier(self.iteration).map_err(halt_of)?;
        let mut moved = Instant::now();
        loop {
            self.sign_of_life(epoch, PING_EVERY)?;
            match self.peer(epoch, moved + BARRIER_WAIT)? {
                // What was sent is still being applied: a slow link, not a lost one.
                Some(ToSource::Applied { .. }) => moved = Instant::now(),
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

    fn book(&mut self, iteration: &Iteration, dirty_bytes: Option<u64>) {
        let figures = iteration.figures;
        let data_bytes = figures.pages * PAGE_BYTES;
        let entry = IterationReport {
            pages_sent: figures.pages,
            zero_pages: figures.zero_pages,
            bytes: figures.bytes,
            seconds: iteration.elapsed.as_secs_f64(),
            limited_by: limited_by(
                iteration.shares,
                self.iteration,
                data_bytes,
                dirty_bytes.unwrap_or(0),
            ),
        };
        let cpu_s = self.parts.report.cpu_s();
        self.parts.report.update(|report| {
            book(report, entry, dirty_bytes);
            report.cpu_source_s = cpu_s;
        });
        self.progress();
    }

    fn progress(&self) {
        let speed = self.convergence.bytes_per_s();
        self.parts.report.update(|report| {
            let dirty_per_s = report.dirty_mib_per_s * f64::from(1 << 20);
            report.eta_s =
                speed.and_then(|speed| estimate_s(report.remaining_bytes, speed, dirty_per_s));
        });
    }

    /// Waits for what the core wants, from the moment that what is left fits.
    pub(super) fn switchover(&mut self, epoch: &mut Epoch) -> Halt {
        self.full_speed();
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
                Ok(DriverInput::Command(Command::CalledOff)) => return Halt::Lost(reason),
                Ok(_) => {}
                Err(_) => return Halt::Ended(None),
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
                self.tell(News::ResumedThere {
                    resume_ms,
                    cpu_s,
                    at,
                });
            }
            _ => {}
        }
        Ok(())
    }

    /// The guest is stopped: one complete look, one pass, one barrier.
    fn last_pages(&mut self, epoch: &mut Epoch, attempt: Generation) -> Result<(), Halt> {
        let began = Instant::now();
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
            self.scan(ScanMode::Everything)?;
        }
        if planted("last-pages-not-sent") {
            self.dirty = PageSet::new(self.dirty.page_count());
        }
        let cap = self.parts.cap_bytes_per_s.take();
        let iteration = self.iterate(epoch);
        self.parts.cap_bytes_per_s = cap;
        self.book(&iteration?, None);
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
            .save_device_state(began + SAVE_WAIT, |piece| {
                reached("source.device-state");
                // Data flows to the peer: this is not its silence.
                (self.parts.news)(News::Heard);
                if saving.is_called_off() {
                    return Err(std::io::Error::other("the switchover was called off"));
                }
                epoch.control.send_device_state(piece).map_err(|error| {
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
