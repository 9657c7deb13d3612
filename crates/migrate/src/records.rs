//! What a migration's report records beside its figures: notes, what happened beside the plan, the pause, the end.
//!
//! Owned by whoever holds the report, whose clock is its `total_s`; pure. Refuses: more notes and events than somebody
//! reads.

use crate::ledger::average_wire_rate;
use godwit_types::migration::{MigrationReport, MoveEvent, MoveEventKind, Outcome, Phase, Side};
use std::time::Duration;

/// Most notes of one report.
const NOTES_MAX: usize = 32;
/// Most events of one report.
const EVENTS_MAX: usize = 32;

/// Notes what made it slower, each sentence once.
pub fn note(report: &mut MigrationReport, notes: Vec<String>) {
    for note in notes {
        if report.notes.len() < NOTES_MAX && !report.notes.contains(&note) {
            report.notes.push(note);
        }
    }
}

/// (source) The switchover was called off and the guest runs here again, after a pause of `stood_s`.
pub fn went_on(report: &mut MigrationReport, stood_s: f64) {
    let event = MoveEvent {
        at_s: (report.total_s - stood_s).max(0.0),
        kind: MoveEventKind::SwitchoverCalledOff,
        lasted_s: Some(stood_s),
        message: format!(
            "the switchover was called off after the guest had stood still for {:.0} ms; it goes on at its source",
            1e3 * stood_s
        ),
    };
    push(report, event);
}

/// Something beside the plan has begun.
pub fn happened(report: &mut MigrationReport, kind: MoveEventKind, message: &str) {
    let event = MoveEvent {
        at_s: report.total_s,
        kind,
        lasted_s: None,
        message: message.to_owned(),
    };
    push(report, event);
}

/// Something beside the plan is over; says how long it lasted, s.
pub fn passed(report: &mut MigrationReport, kind: MoveEventKind) -> Option<f64> {
    let open = |event: &&mut MoveEvent| event.kind == kind && event.lasted_s.is_none();
    let now_s = report.total_s;
    let event = report.events.iter_mut().rev().find(open)?;
    let lasted_s = (now_s - event.at_s).max(0.0);
    event.lasted_s = Some(lasted_s);
    Some(lasted_s)
}

/// (source) No byte has moved for so long; `false`: that stands there already.
pub fn fell_silent(report: &mut MigrationReport, silent_s: f64) -> bool {
    let open =
        |event: &MoveEvent| event.kind == MoveEventKind::LinkSilent && event.lasted_s.is_none();
    if report.events.last().is_some_and(open) {
        return false;
    }
    let event = MoveEvent {
        at_s: (report.total_s - silent_s).max(0.0),
        kind: MoveEventKind::LinkSilent,
        lasted_s: None,
        message: "nothing got through to the other host".into(),
    };
    push(report, event);
    true
}

/// Books how the migration ended; a reason that stands there already is kept.
pub fn end(
    report: &mut MigrationReport,
    outcome: Outcome,
    reason: Option<String>,
    now_unix_s: Option<u64>,
) {
    report.outcome = Some(outcome);
    report.phase = if outcome == Outcome::InDoubt {
        Phase::Handover
    } else {
        Phase::Ended
    };
    report.eta_s = None;
    if outcome == Outcome::Completed {
        report.remaining_bytes = 0;
        report.done_percent = 100.0;
    }
    if outcome != Outcome::InDoubt {
        close(report, now_unix_s);
    }
    if report.reason.is_none() {
        report.reason = reason;
    }
}

/// (source) Books how long the guest ran nowhere, and whether that is what was promised.
pub fn book_pause(report: &mut MigrationReport, time: Duration) {
    report.switchover_ms = time.as_secs_f64() * 1e3;
    report.promise.kept = report.switchover_ms <= report.promise.max_downtime_ms as f64;
    let parts = &mut report.switchover_parts_ms;
    // What is left are both journals and the ways of ready, permit and the answer.
    let timed = parts.stop_ms
        + parts.last_blocks_ms
        + parts.last_pages_ms
        + parts.device_save_ms
        + parts.device_load_ms
        + parts.resume_ms;
    parts.permit_ms = (report.switchover_ms - timed).max(0.0);
}

/// Adds an event; of very many the first and the last are kept. One that another follows is over.
fn push(report: &mut MigrationReport, event: MoveEvent) {
    end_events(report, event.at_s);
    if report.events.len() >= EVENTS_MAX {
        report.events.pop();
    }
    report.events.push(event);
}

fn end_events(report: &mut MigrationReport, now_s: f64) {
    let open = report
        .events
        .iter_mut()
        .filter(|event| event.lasted_s.is_none());
    for event in open {
        event.lasted_s = Some((now_s - event.at_s).max(0.0));
    }
}

/// What is said of a migration that is over: nothing lasts any more, and rates are averages.
fn close(report: &mut MigrationReport, now_unix_s: Option<u64>) {
    end_events(report, report.total_s);
    report.wire_bytes_per_s = match report.side {
        Side::Source => average_wire_rate(report),
        // It does not know the passes.
        Side::Destination => report.bytes_on_wire as f64 / report.total_s.max(1e-3),
    };
    report.ended_unix_s = now_unix_s;
}
