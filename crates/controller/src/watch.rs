//! Follows migrations by the reports of their hosts, and stores how they ended.
//!
//! Owns nothing but its tasks: one per migration under way, also after a restart of the controller. The source's word
//! counts where it answers, but for "completed", which either may say; else its destination's, once the source cannot go on
//! any more with what its destination gave up. Refuses to guess: while nobody can be reached, a migration stays as it was last
//! known. A migration that both hosts answer not to know never began; nor did one that its source refuses from now on and
//! holds the VM without, whatever its destination would say.

use crate::app::App;
use crate::bounds;
use crate::error::{ControllerError, Outcome, refuse};
use crate::reconcile::refresh;
use crate::state::Move;
use crate::survey::clear_later;
use crate::unread::Lack;
use godwit_rpc::ClientError;
use godwit_site::Book;
use godwit_types::control_api::{CancelRequest, InventoryEvent};
use godwit_types::host_api::HostVm;
use godwit_types::migration::{
    COULD_NOT_BEGIN, MigrationReport, Outcome as End, PEER_GAVE_UP, Phase,
};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId, VmName};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between two questions while a host does not answer or the migration is in doubt.
const SLOW: Duration = Duration::from_secs(1);

/// How long a source that answers may take to book the end that its destination has told.
const SOURCE_PATIENCE: Duration = Duration::from_secs(15);

/// What one host says of a migration.
#[derive(Debug, Clone)]
pub enum Word {
    Report(Box<MigrationReport>),
    /// It does not know the migration; so does a host that was removed, or one that does not answer and is fenced.
    Unknown,
    /// It does not answer.
    Silent,
}

/// What follows from both hosts' words.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It goes on (or is in doubt), as in this report.
    GoesOn(Box<MigrationReport>),
    /// It is over, as in this report.
    Over(Box<MigrationReport>),
    NeverBegan,
    /// Nobody knows more than before.
    NoNews,
}

/// Follows a migration until it is over.
pub fn spawn(app: Arc<App>, id: MigrationId) {
    tokio::spawn(async move {
        let mut stop = app.stopped();
        let mut waiting = Waiting::default();
        let began = Instant::now();
        loop {
            let pause = match step(&app, &id, &mut waiting).await {
                Ok(Some(pause)) => pause.max(pace(began.elapsed())),
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(migration = %id, %error, "cannot store the migration's report");
                    SLOW
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    });
}

/// How long to wait at least before the next question: a twentieth of what the migration has lasted, since each question
/// costs both hosts a handshake.
fn pace(lasted: Duration) -> Duration {
    (lasted / 20).min(SLOW)
}

/// Since when something alone is waited for.
#[derive(Default)]
struct Waiting {
    /// The end of a source that answers and has not booked what its destination told.
    end: Option<Instant>,
    /// A source that does not answer, to give up what its destination gave up.
    silent: Option<Instant>,
}

/// Asks once; none when it is over.
async fn step(
    app: &Arc<App>,
    id: &MigrationId,
    waiting: &mut Waiting,
) -> Result<Option<Duration>, ControllerError> {
    let Some(last) = app.live(id).map(|live| live.borrow().clone()) else {
        return Ok(None);
    };
    let (source, verdict) = hear(app, &last, &mut waiting.silent).await;
    match verdict {
        Verdict::Over(_) if source_is_late(&source, &mut waiting.end) => {
            Ok(Some(app.config.watch_every))
        }
        Verdict::GoesOn(report) => {
            let doubt = report.outcome == Some(End::InDoubt);
            if doubt && last.outcome != report.outcome {
                app.store.save_report(&report).await?;
                tell(app, &report);
            }
            app.publish(*report);
            Ok(Some(if doubt { SLOW } else { app.config.watch_every }))
        }
        // A report of an old copy of the database may be of a migration whose end was stored in the lost one; and what is
        // written before every host was asked counts up words that another controller may have said.
        Verdict::Over(_) | Verdict::NeverBegan if !app.state().book.is_in_charge() => {
            Ok(Some(SLOW))
        }
        Verdict::Over(report) => end(app, *report).await.map(|()| None),
        Verdict::NeverBegan => {
            let reason = "no host that answers knows of it: it was interrupted before it began, or they have forgotten how it ended";
            end(app, failed(last, reason)).await.map(|()| None)
        }
        Verdict::NoNews => Ok(Some(SLOW)),
    }
}

/// The guest runs at the destination, and the source, which has the figures, is just booking its end: worth a moment.
fn source_is_late(source: &Word, waiting: &mut Option<Instant>) -> bool {
    let open = matches!(source, Word::Report(report) if report.outcome.is_none());
    open && waiting.get_or_insert_with(Instant::now).elapsed() < SOURCE_PATIENCE
}

/// What the source says, and what follows from both hosts' words. `silent` is since when a source that may go on is not
/// heard.
async fn hear(app: &App, last: &MigrationReport, silent: &mut Option<Instant>) -> (Word, Verdict) {
    let (source, destination) = tokio::join!(ask(app, &last.from, last), ask(app, &last.to, last));
    let verdict = judge(&source, &destination);
    let gave_up = |report: &MigrationReport| report.outcome != Some(End::Completed);
    let by_destination = !matches!(source, Word::Report(_));
    if matches!(&verdict, Verdict::Over(report) if by_destination && gave_up(report)) {
        let waited = silent.get_or_insert_with(Instant::now).elapsed();
        match source_goes_on(app, last).await {
            Some(false) => {}
            None if waited >= app.config.source_gives_up => {}
            Some(true) | None => return (source, Verdict::NoNews),
        }
    }
    let only_destination_missing = matches!((&source, &destination), (Word::Unknown, Word::Silent));
    if only_destination_missing && source_stays_without(app, last).await {
        return (source, Verdict::NeverBegan);
    }
    (source, verdict)
}

/// Whether the source of a migration that its destination gave up still moves the VM: until it is told, it takes its
/// destination's silence for a broken link, and refuses what is asked of the VM meanwhile. None where nobody says.
async fn source_goes_on(app: &App, last: &MigrationReport) -> Option<bool> {
    let Ok((_, agent)) = app.agent(&last.from) else {
        return Some(false);
    };
    match agent.vm(&last.vm).await {
        Ok(seen) if says_what_it_does(&seen) => Some(seen.migration.as_ref() == Some(&last.id)),
        Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownVm => Some(false),
        Err(_) if app.state().book.is_fenced(&last.from) => Some(false),
        Ok(_) | Err(_) => None,
    }
}

/// Whether what an agent says of a VM is its VM process's own word, also of a QEMU that does not answer: a process that
/// does not answer itself may be moving the VM.
fn says_what_it_does(seen: &HostVm) -> bool {
    seen.state != VmState::Unreachable || seen.vm_process_pid.is_some()
}

/// Whether a source that does not know the migration has refused it for ever, and holds the VM: then nothing was given, and
/// nothing will be, so that the destination need not be heard.
async fn source_stays_without(app: &App, last: &MigrationReport) -> bool {
    let Ok((_, agent)) = app.agent(&last.from) else {
        return false;
    };
    let request = CancelRequest {
        reason: Some(format!("host {} does not answer", last.to)),
        vm: Some(last.vm.clone()),
    };
    if agent.cancel(&last.id, &request).await.is_err() {
        return false;
    }
    // Asked after the refusal is durable: one that slipped in before it is known there by now.
    let never_there = matches!(ask(app, &last.from, last).await, Word::Unknown);
    let Ok(seen) = agent.vm(&last.vm).await else {
        return false;
    };
    let is_heard = says_what_it_does(&seen);
    let stays = seen.spec.name == last.vm && seen.claim.held().is_some();
    never_there && is_heard && stays && seen.migration.is_none()
}

async fn ask(app: &App, host: &HostName, last: &MigrationReport) -> Word {
    let Ok((_, agent)) = app.agent(host) else {
        return Word::Unknown;
    };
    match agent.migration(&last.id).await {
        Ok(report) if is_of(&report, last) => Word::Report(Box::new(bounds::report(report))),
        Ok(_) => Word::Silent,
        Err(ClientError::Refused(error)) if error.code == ErrorCode::UnknownMigration => {
            Word::Unknown
        }
        // What was fenced is off, and nothing that it knew is of use to anybody; one that answers is heard, whatever it says.
        Err(
            ClientError::NotReached { .. }
            | ClientError::Broken { .. }
            | ClientError::Deadline { .. },
        ) if app.state().book.is_fenced(host) => Word::Unknown,
        Err(_) => Word::Silent,
    }
}

/// Whether a host's report tells of this migration, rather than of what is none of its business.
fn is_of(report: &MigrationReport, last: &MigrationReport) -> bool {
    let named = |report: &MigrationReport| {
        let hosts = (report.from.clone(), report.to.clone());
        (report.id.clone(), report.vm.clone(), hosts)
    };
    named(report) == named(last)
}

/// Decides by what both hosts say. Pure.
pub fn judge(source: &Word, destination: &Word) -> Verdict {
    match (source, destination) {
        (Word::Report(a), Word::Report(b)) => judge_both(a, b),
        (Word::Report(report), Word::Unknown | Word::Silent) => judge_one(report),
        // What a destination says alone is true of itself: whether its source goes on, `hear` asks.
        (Word::Unknown | Word::Silent, Word::Report(report)) => judge_one(report),
        (Word::Unknown, Word::Unknown) => Verdict::NeverBegan,
        _ => Verdict::NoNews,
    }
}

fn judge_both(source: &MigrationReport, destination: &MigrationReport) -> Verdict {
    let mut report = source.clone();
    if report.cpu_destination_s == 0.0 {
        report.cpu_destination_s = destination.cpu_destination_s;
    }
    let says_completed = |report: &MigrationReport| report.outcome == Some(End::Completed);
    if !says_completed(&report) && says_completed(destination) {
        // The guest runs there; the source has not heard of it yet. Its figures are the better ones.
        report.outcome = Some(End::Completed);
        report.phase = Phase::Ended;
        report.reason = None;
    }
    if report.reason.as_deref() == Some(PEER_GAVE_UP)
        && let Some(why) = &destination.reason
        && why != PEER_GAVE_UP
    {
        // The hosts' agents told the source only that it is over.
        report.reason = Some(format!("host {} gave the migration up: {why}", report.to));
    }
    judge_one(&report)
}

fn judge_one(report: &MigrationReport) -> Verdict {
    let mut report = Box::new(report.clone());
    let could_not_begin = |why: &String| why.starts_with(COULD_NOT_BEGIN);
    if report.outcome == Some(End::Cancelled) && report.reason.as_ref().is_some_and(could_not_begin)
    {
        // Nobody cancelled it; a VM process of before this word was known says so.
        report.outcome = Some(End::Failed);
    }
    match report.outcome {
        Some(End::Completed | End::Cancelled | End::Failed) => Verdict::Over(report),
        Some(End::InDoubt) | None => Verdict::GoesOn(report),
    }
}

fn failed(report: MigrationReport, reason: &str) -> MigrationReport {
    ended(report, End::Failed, reason)
}

fn ended(mut report: MigrationReport, outcome: End, reason: &str) -> MigrationReport {
    report.outcome = Some(outcome);
    report.phase = Phase::Ended;
    report.reason = Some(reason.to_owned());
    report
}

/// How a migration ended, for the log.
fn in_words(outcome: Option<End>) -> &'static str {
    match outcome {
        Some(End::Completed) => "completed",
        Some(End::Cancelled) => "cancelled",
        Some(End::Failed) => "failed",
        Some(End::InDoubt) => "in doubt",
        None => "nobody knows how",
    }
}

/// Stores the end, with who holds the VM by that, then tells everybody.
async fn end(app: &Arc<App>, report: MigrationReport) -> Result<(), ControllerError> {
    let completed = report.outcome == Some(End::Completed);
    let other = if completed { &report.from } else { &report.to };
    let (from, to) = (&report.from, &report.to);
    let note = |book: &mut Book| book.migration_ended(&report.vm, from, to, completed);
    note(&mut app.state().book);
    let due = app.due().await;
    app.store.end_migration(&report, due.rows()).await?;
    due.written();
    app.ended.count(&report);
    let (id, vm) = (&report.id, &report.vm);
    tracing::info!(migration = %id, %vm, %from, %to, "migration is over: {}", in_words(report.outcome));
    // The inventory first, so that who waits for the end then finds the VM where it is.
    refresh(app, &report.to).await;
    refresh(app, &report.from).await;
    app.state().active.remove(&report.vm);
    app.publish(report.clone());
    app.end_live(&report.id);
    tell(app, &report);
    // The other side says durably that it holds nothing, so that nobody has to wait for it later.
    clear_later(app, report.vm.clone(), other.clone());
    Ok(())
}

fn tell(app: &App, report: &MigrationReport) {
    app.tell(InventoryEvent::Migration {
        id: report.id.to_string(),
    });
    app.tell_vm(&report.vm);
}

/// After a begin that failed: ends it if both hosts are sure that it is over, else follows it.
pub async fn settle_failed_start(app: &Arc<App>, id: &MigrationId, error: &ApiError, outcome: End) {
    let Some(last) = app.live(id).map(|live| live.borrow().clone()) else {
        return;
    };
    let (source, verdict) = hear(app, &last, &mut None).await;
    let never_at_source = matches!(source, Word::Unknown);
    let settled = match verdict {
        Verdict::NeverBegan => true,
        // The destination knows it as over or has been told to forget it; the source never heard of it.
        Verdict::Over(report) => never_at_source && report.outcome != Some(End::Completed),
        _ => false,
    };
    if settled {
        match end(app, ended(last, outcome, &error.message)).await {
            Ok(()) => return,
            Err(error) => {
                tracing::error!(migration = %id, %error, "cannot store the migration's end")
            }
        }
    }
    spawn(app.clone(), id.clone());
}

/// What the inventory keeps of a migration under way.
pub fn moving(report: &MigrationReport) -> Move {
    Move {
        id: report.id.clone(),
        from: report.from.clone(),
        to: report.to.clone(),
    }
}

/// Follows what was under way when the controller stopped.
pub async fn resume(app: &Arc<App>) -> Result<(), ControllerError> {
    let (reports, unread) = app.store.active_reports().await?;
    for (vm, row) in unread {
        let name = VmName::new(vm);
        let vm = name.map_err(|_| ControllerError::Row(row.clone()))?;
        app.state().lacks(vm, Lack::Right(row));
    }
    for report in reports {
        let id = report.id.clone();
        let entry = moving(&report);
        app.state().active.insert(report.vm.clone(), entry);
        app.publish(report);
        spawn(app.clone(), id);
    }
    Ok(())
}

/// A migration's report: live, or as stored.
pub async fn report(app: &App, id: &MigrationId) -> Outcome<MigrationReport> {
    if let Some(live) = app.live(id) {
        return Ok(live.borrow().clone());
    }
    match app.store.report(id).await? {
        Some(report) => Ok(report),
        None => refuse(
            ErrorCode::UnknownMigration,
            format!("there is no migration {id}: see 'godwit migration list'"),
        ),
    }
}

/// All reports: in doubt first, then newest first.
pub async fn reports(app: &App) -> Outcome<Vec<MigrationReport>> {
    let mut reports = app.store.reports().await?;
    for report in &mut reports {
        if let Some(live) = app.live(&report.id) {
            *report = live.borrow().clone();
        }
    }
    reports.sort_by_key(|report| report.outcome != Some(End::InDoubt));
    Ok(reports)
}
