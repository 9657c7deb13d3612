//! A migration's report, written by its driver and the VM's thread, read by whoever asks.
//!
//! Owned by the VM; the lock is held for the time of a copy. Data-path threads never touch it.

use godwit_types::migration::{MigrationReport, Outcome, Phase};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The report and the clock it is measured by.
#[derive(Debug, Clone)]
pub(crate) struct SharedReport {
    report: Arc<Mutex<MigrationReport>>,
    began: Instant,
    cpu_began_s: f64,
}

impl SharedReport {
    /// Starts the clock.
    pub(crate) fn new(report: MigrationReport) -> Self {
        Self {
            report: Arc::new(Mutex::new(report)),
            began: Instant::now(),
            cpu_began_s: cpu_s(),
        }
    }

    /// A copy.
    pub(crate) fn read(&self) -> MigrationReport {
        self.update(|report| report.clone())
    }

    /// Changes it.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut MigrationReport) -> R) -> R {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if report.outcome.is_none() || report.outcome == Some(Outcome::InDoubt) {
            report.total_s = self.began.elapsed().as_secs_f64();
        }
        change(&mut report)
    }

    /// CPU seconds of this process since the migration began.
    pub(crate) fn cpu_s(&self) -> f64 {
        cpu_s() - self.cpu_began_s
    }

    /// Shows what stands in the way, or that nothing does any more; an end that was booked keeps its reason.
    pub(crate) fn trouble(&self, reason: Option<String>) {
        self.update(|report| {
            if report.outcome.is_none() {
                report.reason = reason;
            }
        });
    }

    /// Books the end.
    pub(crate) fn end(&self, outcome: Outcome, reason: Option<String>) {
        self.update(|report| {
            report.outcome = Some(outcome);
            report.phase = if outcome == Outcome::InDoubt {
                Phase::Handover
            } else {
                Phase::Ended
            };
            report.eta_s = None;
            if outcome == Outcome::Completed {
                report.remaining_bytes = 0;
            }
            if report.reason.is_none() {
                report.reason = reason;
            }
        });
    }
}

/// CPU seconds of this process, user and system.
fn cpu_s() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is ours, zeroed and of the type that the call fills in.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0 {
            return 0.0;
        }
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
