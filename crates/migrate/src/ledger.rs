//! Keeps the running figures of a migration at its source: what has gone, how fast, and how much of all that has to go.
//!
//! Owned by the driver, which reads the channels' counters and a clock and hands both in; pure. Refuses: to guess a rate
//! from less than [`crate::rate::RATE_MIN_S`], and to let what is done fall back.

use crate::rate::WireRate;
use godwit_types::PAGE_BYTES;
use godwit_types::migration::{IterationReport, MigrationReport, PassUnderWay};

/// What is done while it moves is shown as this at most, percent.
const DONE_MAX: f64 = 99.9;
const MIB: f64 = 1_048_576.0;

/// What data channels have counted, of all connection sets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes on the wire.
    pub bytes: u64,
    /// Pages sent with their bytes.
    pub pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
}

impl Counters {
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            pages: self.pages.saturating_add(other.pages),
            zero_pages: self.zero_pages.saturating_add(other.zero_pages),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(before.bytes),
            pages: self.pages.saturating_sub(before.pages),
            zero_pages: self.zero_pages.saturating_sub(before.zero_pages),
        }
    }
}

/// What the guest wrote within a time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Written {
    bytes: f64,
    seconds: f64,
}

/// What is still to do.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ToDo {
    /// Bytes of memory still to be sent in this pass.
    pub left_bytes: u64,
    /// Seconds to the end, where an honest estimate exists.
    pub eta_s: Option<f64>,
}

/// The running figures of one migration.
#[derive(Debug, Default)]
pub struct Ledger {
    wire: WireRate,
    /// Counters when the pass under way began, and when that was.
    pass_began: Option<(f64, Counters)>,
    /// What the guest wrote in all passes that were looked at whole, and so far in this one.
    written: Written,
    writing: Written,
}

impl Ledger {
    pub fn begin_pass(&mut self, now_s: f64, counters: Counters) {
        self.pass_began = Some((now_s, counters));
        self.wire.awaits(now_s);
    }

    /// The guest was looked at in the middle of a pass.
    pub fn looked(&mut self, seconds: f64, bytes: u64) {
        self.writing = Written {
            bytes: bytes as f64,
            seconds,
        };
    }

    /// The guest was looked at: it wrote so much in so long since the last time.
    pub fn scanned(&mut self, seconds: f64, bytes: u64) {
        self.writing = Written::default();
        self.written.bytes += bytes as f64;
        self.written.seconds += seconds;
    }

    /// A pass is complete.
    pub fn book(&mut self, report: &mut MigrationReport, iteration: IterationReport) {
        self.pass_began = None;
        report.pass = None;
        report.iterations.push(iteration);
        self.averages(report);
    }

    /// A pass was given up, with its channels; what it sent was sent all the same.
    pub fn abandon_pass(&mut self) {
        self.pass_began = None;
    }

    /// Renews what the report says while it moves.
    pub fn show(&mut self, report: &mut MigrationReport, now_s: f64, counters: Counters) {
        self.wire.sample(now_s, counters.bytes);
        report.bytes_on_wire = report.bytes_on_wire.max(counters.bytes);
        if report.outcome.is_none() {
            report.wire_bytes_per_s = self.wire.bytes_per_s().unwrap_or_default();
        }
        if let Some((began_s, before)) = self.pass_began {
            let gone = counters.since(before);
            report.pass = Some(PassUnderWay {
                number: u32::try_from(report.iterations.len() + 1).unwrap_or(u32::MAX),
                pages_sent: gone.pages,
                zero_pages: gone.zero_pages,
                bytes: gone.bytes,
                seconds: (now_s - began_s).max(0.0),
            });
        }
        self.averages(report);
    }

    /// Renews how much of what has to go has gone. Pages that were sent count, zero or not, against those still to be
    /// sent and those that the guest will write meanwhile, as far as the estimate of the end knows them.
    pub fn show_done(&self, report: &mut MigrationReport, counters: Counters, to_do: ToDo) {
        let gone = (counters.pages.saturating_add(counters.zero_pages) as f64) * PAGE_BYTES as f64;
        let pages_per_s = 1e9 * report.throughput_gb_per_s;
        let foreseen = to_do.eta_s.unwrap_or_default().max(0.0) * pages_per_s;
        let to_go = foreseen.max(to_do.left_bytes as f64);
        let percent = 100.0 * gone / (gone + to_go).max(1.0);
        report.done_percent = percent.min(DONE_MAX).max(report.done_percent);
    }

    /// For how long no byte has moved, s.
    pub fn silent_s(&self, now_s: f64) -> f64 {
        self.wire.silent_s(now_s)
    }

    fn averages(&self, report: &mut MigrationReport) {
        let passes = report.iterations.iter();
        let passes = passes.map(|pass| (pass.pages_sent, pass.seconds));
        let under_way = report.pass.map(|pass| (pass.pages_sent, pass.seconds));
        let (pages, seconds) = passes.chain(under_way).fold((0, 0.0), |sum, pass| {
            (u64::saturating_add(sum.0, pass.0), sum.1 + pass.1)
        });
        report.throughput_gb_per_s = per_second((pages * PAGE_BYTES) as f64, seconds) / 1e9;
        let written = self.written.bytes + self.writing.bytes;
        let watched_s = self.written.seconds + self.writing.seconds;
        report.dirty_mib_per_s = per_second(written, watched_s) / MIB;
    }
}

/// The rate of all passes, for a migration that is over: bytes on the wire per second.
pub fn average_wire_rate(report: &MigrationReport) -> f64 {
    let complete = report
        .iterations
        .iter()
        .map(|pass| (pass.bytes, pass.seconds));
    let cut = report.pass.map(|pass| (pass.bytes, pass.seconds));
    let (bytes, seconds) = complete.chain(cut).fold((0, 0.0), |sum, pass| {
        (u64::saturating_add(sum.0, pass.0), sum.1 + pass.1)
    });
    per_second(bytes as f64, seconds)
}

fn per_second(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
