//! A migration's report, written by its driver and the VM's thread, read by whoever asks.
//!
//! Owned by the VM; the lock is held for the time of a copy. Data-path threads never touch it.

use godwit_migrate::records;
use godwit_types::migration::{MigrationReport, MoveEventKind, Outcome};
use rustix::time::{ClockId, clock_gettime};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The report and the clock it is measured by.
#[derive(Debug, Clone)]
pub(crate) struct SharedReport {
    report: Arc<Mutex<MigrationReport>>,
    pause: Arc<(Mutex<Pause>, Condvar)>,
    began: Instant,
    cpu_began_s: f64,
}

/// The time in which the guest runs nowhere, by this side's clock.
#[derive(Debug, Default, Clone, Copy)]
enum Pause {
    #[default]
    None,
    Since(Instant),
    /// Its length stands in the report.
    Over,
}

impl SharedReport {
    /// Takes a report whose migration begins now.
    pub(crate) fn new(report: MigrationReport) -> Self {
        Self {
            report: Arc::new(Mutex::new(report)),
            pause: Arc::default(),
            began: Instant::now(),
            cpu_began_s: cpu_s(),
        }
    }

    /// The report as it stands, to be shown.
    pub(crate) fn read(&self) -> MigrationReport {
        self.update(|report| report.clone())
    }

    /// Lets `change` at the report, whose total time is brought up to date before.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut MigrationReport) -> R) -> R {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if report.outcome.is_none() || report.outcome == Some(Outcome::InDoubt) {
            report.total_s = self.began.elapsed().as_secs_f64();
        }
        change(&mut report)
    }

    /// Notes what made it slower: each sentence once, and no more of them than somebody reads.
    pub(crate) fn note(&self, notes: Vec<String>) {
        self.update(|report| records::note(report, notes));
    }

    /// CPU seconds of this process since the migration began.
    pub(crate) fn cpu_s(&self) -> f64 {
        cpu_s() - self.cpu_began_s
    }

    /// (source) The guest was stopped.
    pub(crate) fn stopped(&self, at: Instant) {
        *self.pause() = Pause::Since(at);
    }

    /// (source) The switchover was called off, the guest runs here again: its pause is kept on record.
    pub(crate) fn went_on(&self) {
        let Pause::Since(at) = std::mem::take(&mut *self.pause()) else {
            return;
        };
        let stood_s = at.elapsed().as_secs_f64();
        self.update(|report| records::went_on(report, stood_s));
    }

    /// Something beside the plan has begun.
    pub(crate) fn happened(&self, kind: MoveEventKind, message: &str) {
        self.update(|report| records::happened(report, kind, message));
    }

    /// Something beside the plan is over; says how long it lasted, s.
    pub(crate) fn passed(&self, kind: MoveEventKind) -> Option<f64> {
        self.update(|report| records::passed(report, kind))
    }

    /// (source) No byte has moved for so long; from `limit_s` on that is told, until one does.
    pub(crate) fn silent_for(&self, silent_s: f64, limit_s: f64) {
        if silent_s < limit_s {
            if let Some(seconds) = self.passed(MoveEventKind::LinkSilent) {
                tracing::info!(seconds, "pages get through again");
            }
            return;
        }
        let began = self.update(|report| records::fell_silent(report, silent_s));
        if began {
            tracing::warn!(silent_s, "nothing gets through to the other host");
        }
    }

    /// (source) The destination said at `at` that the guest runs there: the switchover is over, by this side's clock.
    pub(crate) fn resumed(&self, at: Instant, resume_ms: f64, cpu_s: f64) {
        let mut pause = self.pause();
        let Pause::Since(stopped_at) = *pause else {
            return;
        };
        *pause = Pause::Over;
        self.update(|report| {
            report.cpu_destination_s = cpu_s;
            report.switchover_parts_ms.resume_ms = resume_ms;
            records::book_pause(report, at.saturating_duration_since(stopped_at));
        });
        self.pause.1.notify_all();
    }

    /// (source) Waits until that was said; if it is not, the pause has ended by now, at the latest.
    pub(crate) fn wait_resumed(&self, wait: Duration) {
        let going_on = |pause: &mut Pause| matches!(pause, Pause::Since(_));
        let waited = self
            .pause
            .1
            .wait_timeout_while(self.pause(), wait, going_on);
        let mut pause = waited.unwrap_or_else(PoisonError::into_inner).0;
        if let Pause::Since(stopped_at) = *pause {
            *pause = Pause::Over;
            let time = stopped_at.elapsed().saturating_sub(wait);
            self.update(|report| records::book_pause(report, time));
        }
    }

    fn pause(&self) -> MutexGuard<'_, Pause> {
        self.pause.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows what stands in the way, or that nothing does any more; an end that was booked keeps its reason.
    pub(crate) fn trouble(&self, reason: Option<String>) {
        self.update(|report| {
            if report.outcome.is_none() {
                report.reason = reason;
            }
        });
    }

    /// Books how the migration ended; a reason that stands there already is kept.
    pub(crate) fn end(&self, outcome: Outcome, reason: Option<String>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_unix_s = now.ok().map(|since| since.as_secs());
        self.update(|report| records::end(report, outcome, reason, now_unix_s));
    }
}

/// CPU seconds of this process, user and system.
fn cpu_s() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(spent).unwrap_or_default().as_secs_f64()
}
