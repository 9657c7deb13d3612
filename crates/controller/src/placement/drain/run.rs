//! The work of emptying one host: looks where its VMs are, begins what the plan says, notes what became of it.
//!
//! Owned by its task; everything that matters is in the record, and what a move came to is in its report, so that a
//! restarted controller goes on from there. Refuses to give up on a VM after one failed try, and to try for ever.

use super::patience::{Patience, TRIES_MAX};
use super::plan::{self, Moving, Rooms, Waiting};
use super::takers::{Taker, away, no_takers, takers};
use crate::app::App;
use crate::drains::Run;
use crate::error::{ControllerError, damaged, held_twice, in_doubt};
use crate::placement::forecast::{self, QUICK};
use crate::placement::place;
use crate::{hosts, migrate, preflight};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::pki::now_unix_s;
use godwit_types::drain::{DrainState, DrainStep, DrainView, DrainVm};
use godwit_types::migration::{Cipher, MigrateRequest, MigrationReport, Outcome as End};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Longest wait between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// After a restart hosts that have not answered yet are waited for so long.
const HEAR_WAIT: Duration = Duration::from_secs(15);

/// What the task knows beside the record.
pub(super) struct Work {
    began: Instant,
    /// Moves that are being begun: preflight runs.
    starting: BTreeMap<VmName, HostName>,
    begun: JoinSet<Begun>,
    /// What is waited for.
    pub(super) patience: Patience,
}

impl Work {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            starting: BTreeMap::new(),
            begun: JoinSet::new(),
            patience: Patience::default(),
        }
    }

    /// Whether all hosts have answered since the controller started, or had time to.
    fn knows_enough(&self, app: &App) -> bool {
        self.began.elapsed() > HEAR_WAIT || app.state().unheard().next().is_none()
    }
}

/// How the beginning of a move went.
struct Begun {
    vm: VmName,
    to: HostName,
    answer: Result<MigrateAnswer, Vec<ApiError>>,
}

/// Empties a host until nothing is left to move, this run of its drain is ended or the controller stops.
pub fn spawn(app: Arc<App>, host: HostName, run: Run) {
    tokio::spawn(async move {
        let mut stop = app.stopped();
        let mut changes = app.listen();
        let mut work = Work::new();
        while let Some(view) = app.drains.current(&host, run) {
            if let Err(error) = step(&app, view, run, &mut work).await {
                tracing::error!(%host, %error, "cannot note how far the emptying of the host is");
            }
            tokio::select! {
                _ = changes.recv() => {}
                Some(Ok(begun)) = work.begun.join_next() => take(&app, &host, &mut work, begun),
                () = tokio::time::sleep(LOOK_EVERY) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    });
}

/// One look and what follows from it.
async fn step(
    app: &Arc<App>,
    mut view: DrainView,
    run: Run,
    work: &mut Work,
) -> Result<(), ControllerError> {
    look(app, &mut view);
    settle(app, &mut view).await?;
    if work.knows_enough(app) {
        let away = away(app, &view, work.began);
        work.patience.note_away(&away, Instant::now());
        let patient = work.patience.awaits_hosts(Instant::now());
        judge(app, &mut view, work, patient);
        measure(app, &mut view, work).await;
        // It may have been ended, and even begun anew, meanwhile.
        if app.drains.current(&view.host, run).is_none() {
            return Ok(());
        }
        begin_next(app, &mut view, work);
    }
    let open = |vm: &DrainVm| matches!(vm.step, DrainStep::Waiting | DrainStep::Moving);
    if work.starting.is_empty() && !view.vms.iter().any(open) {
        let_go(app, &view.host).await;
        view.state = DrainState::Done;
        tracing::info!(host = %view.host, stay = view.staying().count(), "nothing is left to move off the host");
    }
    view.eta_s = eta_s(app, &view);
    save(app, view, run).await
}

/// What is left at the host is off or stays: it gives up what is off, so that nobody waits for a host in maintenance.
async fn let_go(app: &App, host: &HostName) {
    if let Err(error) = hosts::release_all(app, host).await {
        tracing::warn!(%host, %error, "the host may still hold VMs that are off: they start elsewhere only while it answers");
    }
}

/// Writes what matters after a restart, shows everything; nothing once this run was ended.
async fn save(app: &App, view: DrainView, run: Run) -> Result<(), ControllerError> {
    let _turn = app.drains.turn().await;
    let Some(shown) = app.drains.current(&view.host, run) else {
        return Ok(());
    };
    let lasting = |view: &DrainView| {
        let mut view = view.clone();
        view.eta_s = None;
        view.vms.iter_mut().for_each(|vm| vm.percent = None);
        view
    };
    let (old, new) = (lasting(&shown), lasting(&view));
    let news = old != new;
    if news {
        app.store.save_drain(&new).await?;
    }
    app.drains.renew(view);
    if news {
        app.tell_drain(&new.host);
    }
    Ok(())
}

/// Takes in where the host's VMs are now.
pub fn look(app: &App, view: &mut DrainView) {
    let state = app.state();
    // A copy of a VM that two hosts hold is here, too, wherever the other one runs.
    let twice = state.book.all_twice().into_iter();
    let copies: BTreeSet<VmName> = twice
        .filter(|(_, twice)| twice.copies.iter().any(|copy| copy.host == view.host))
        .map(|(vm, _)| vm)
        .collect();
    for name in state
        .vms_on(&view.host)
        .into_iter()
        .chain(copies.iter().cloned())
    {
        if !view.vms.iter().any(|vm| vm.vm == name) {
            let memory_mib = state.vms.get(&name).map_or(0, |vm| vm.spec.memory_mib);
            view.vms.push(DrainVm::waiting(name, memory_mib));
        }
    }
    view.vms.retain(|vm| state.vms.contains_key(&vm.vm));
    for vm in &mut view.vms {
        let here = state
            .active
            .get(&vm.vm)
            .filter(|moving| moving.from == view.host);
        if let Some(moving) = here {
            vm.step = DrainStep::Moving;
            vm.to = Some(moving.to.clone());
            vm.migration = Some(moving.id.clone());
            continue;
        }
        let note = || {
            state
                .vm_view(&vm.vm, now_unix_s())
                .and_then(|view| view.note)
        };
        if copies.contains(&vm.vm) {
            let reason = held_twice(&vm.vm, note()).on_host(&view.host);
            (vm.step, vm.reasons) = (DrainStep::CannotMove, vec![reason]);
            continue;
        }
        let Some(place) = state.place(&vm.vm) else {
            vm.step = DrainStep::Off;
            continue;
        };
        if place.host != view.host {
            (vm.step, vm.to) = (DrainStep::Moved, Some(place.host.clone()));
            (vm.reasons, vm.percent) = (Vec::new(), None);
            continue;
        }
        let stays = stays(&vm.vm, &view.host, state.vm_state(&vm.vm), note);
        match (stays, vm.step) {
            (Some(Stays::Off), _) => vm.step = DrainStep::Off,
            (Some(Stays::Because(reason)), _) => {
                (vm.step, vm.reasons) = (DrainStep::CannotMove, vec![*reason]);
            }
            // A VM that was off or paused runs again, or has come back.
            (None, DrainStep::Off | DrainStep::Moved) => vm.step = DrainStep::Waiting,
            (None, _) => {}
        }
    }
}

/// Why a VM is not to be moved as it is.
enum Stays {
    Off,
    Because(Box<ApiError>),
}

fn stays(
    vm: &VmName,
    host: &HostName,
    state: VmState,
    note: impl FnOnce() -> Option<String>,
) -> Option<Stays> {
    let because = |error: ApiError| Some(Stays::Because(Box::new(error.on_host(host))));
    let wrong = |text: String| because(ApiError::new(ErrorCode::WrongState, text));
    match state {
        VmState::Stopped => Some(Stays::Off),
        VmState::InDoubt => because(in_doubt(vm, note())),
        VmState::RunningTwice => because(held_twice(vm, note())),
        VmState::DamagedRecord => because(damaged(vm, note())),
        VmState::Crashed => wrong(format!(
            "VM {vm} is crashed, so it has no guest to move, and this host holds it: wait until it is booted again, or give it up here with 'godwit vm stop {vm}', then drain again"
        )),
        // Nothing can be done until its host answers again or is removed.
        VmState::Unreachable => None,
        VmState::Paused => wrong(format!(
            "VM {vm} is paused, and a paused VM does not move: run 'godwit vm resume {vm}', then drain again"
        )),
        VmState::Panicked => wrong(format!(
            "VM {vm} has halted and does not move: reset it with 'godwit vm reset {vm}', then drain again"
        )),
        _ => None,
    }
}

/// What became of moves that are over, and how far the others are.
async fn settle(app: &App, view: &mut DrainView) -> Result<(), ControllerError> {
    for vm in &mut view.vms {
        let (DrainStep::Moving, Some(id)) = (vm.step, vm.migration.clone()) else {
            continue;
        };
        let report = match app.live(&id) {
            Some(live) => Some(live.borrow().clone()),
            None => app.store.report(&id).await?,
        };
        match report {
            Some(report) => settle_one(vm, &report, &id),
            // Another database was restored: look again.
            None => vm.step = DrainStep::Waiting,
        }
    }
    Ok(())
}

fn settle_one(vm: &mut DrainVm, report: &MigrationReport, id: &MigrationId) {
    let reason = |what: &str| {
        let why = report.reason.as_deref().unwrap_or("no reason was given");
        ApiError::new(
            ErrorCode::MigrationFailed,
            format!("migration {id} to host {} {what}: {why}", report.to),
        )
    };
    vm.percent = None;
    match report.outcome {
        None | Some(End::InDoubt) => {
            vm.percent = Some(report.done_percent.clamp(0.0, 100.0));
        }
        Some(End::Completed) => {
            vm.step = DrainStep::Moved;
            vm.to = Some(report.to.clone());
            vm.reasons.clear();
        }
        Some(End::Cancelled) => {
            // Somebody wanted it to stay.
            vm.step = DrainStep::CannotMove;
            vm.reasons = vec![reason("was cancelled")];
        }
        Some(End::Failed) => {
            vm.tries += 1;
            vm.reasons = vec![reason("failed")];
            vm.step = if vm.tries >= TRIES_MAX {
                DrainStep::CannotMove
            } else {
                DrainStep::Waiting
            };
        }
    }
}

/// Leaves where they are those that no host can take; `patient` while one that may is expected back.
pub(super) fn judge(app: &App, view: &mut DrainView, work: &Work, patient: bool) {
    let hosts = takers(app, view);
    let nobody = no_takers(app, view, &hosts);
    let now = Instant::now();
    let moves = view.vms.iter().any(|vm| vm.step == DrainStep::Moving);
    let waits = patient || moves || !work.starting.is_empty();
    for vm in view
        .vms
        .iter_mut()
        .filter(|vm| vm.step == DrainStep::Waiting)
    {
        let Some(may) = may_go_to(app, &vm.vm, &hosts, &nobody, work, now) else {
            continue;
        };
        let names = hosts.iter().map(|host| &host.name);
        let reasons = match may {
            Err(_) if patient || work.patience.asks_again(&vm.vm, names, now) => continue,
            Err(reasons) => reasons,
            // Room may come free, or be taken, while others are under way.
            Ok(hosts) if waits || hosts.iter().any(|host| host.1 >= vm.memory_mib) => continue,
            Ok(hosts) => {
                let no_room = |(host, free): &Room| {
                    let text = format!(
                        "host {host} has {free} MiB of memory free and VM {} needs {}: free some, then drain again",
                        vm.vm, vm.memory_mib
                    );
                    ApiError::new(ErrorCode::OutOfMemory, text).on_host(host)
                };
                hosts.iter().map(no_room).collect()
            }
        };
        vm.step = DrainStep::CannotMove;
        vm.reasons = reasons;
    }
}

/// A host and the memory that a new guest could have there, MiB.
type Room = (HostName, u64);

/// Hosts that lack nothing but perhaps room, with their room; else the reasons. None for a VM that is gone.
fn may_go_to(
    app: &App,
    vm: &VmName,
    hosts: &[Taker],
    nobody: &[ApiError],
    work: &Work,
    now: Instant,
) -> Option<Result<Vec<Room>, Vec<ApiError>>> {
    let spec = app.state().vm_view(vm, now_unix_s())?.spec;
    let (mut may, mut reasons) = (Vec::new(), Vec::new());
    for host in hosts {
        let mut lacks = place::lacks(&spec, host);
        if let Some(reasons) = work.patience.refusal(vm, &host.name, now) {
            lacks.extend_from_slice(reasons);
        }
        if lacks.is_empty() {
            may.push((host.name.clone(), host.memory_free_mib));
        }
        reasons.extend(lacks);
    }
    reasons.extend_from_slice(nobody);
    Some(if may.is_empty() {
        Err(reasons)
    } else {
        Ok(may)
    })
}

/// What the plan needs to know of those that wait and those under way.
pub(super) struct Board {
    pub(super) waiting: Vec<Waiting>,
    moving: Vec<Moving>,
    pub(super) rooms: Rooms,
}

pub(super) fn board(app: &App, view: &DrainView, work: &Work) -> Board {
    let hosts = takers(app, view);
    let nobody = no_takers(app, view, &hosts);
    let now = Instant::now();
    let rooms = hosts
        .iter()
        .map(|host| (host.name.clone(), host.memory_free_mib));
    let mut board = Board {
        waiting: Vec::new(),
        moving: Vec::new(),
        rooms: rooms.collect(),
    };
    for vm in &view.vms {
        let under_way = match (vm.step, &vm.to) {
            (DrainStep::Moving, Some(to)) => Some(to),
            _ => work.starting.get(&vm.vm),
        };
        if let Some(to) = under_way {
            board.moving.push(Moving {
                to: to.clone(),
                memory_mib: vm.memory_mib,
                writes_share: writes_share(vm),
            });
        } else if vm.step == DrainStep::Waiting
            && !work.patience.is_paused(&vm.vm, now)
            && let Some(Ok(may)) = may_go_to(app, &vm.vm, &hosts, &nobody, work, now)
        {
            board.waiting.push(Waiting {
                name: vm.vm.clone(),
                memory_mib: vm.memory_mib,
                estimate_s: vm.prediction.as_ref().map(|prediction| prediction.total_s),
                writes_share: writes_share(vm),
                may_go_to: may.into_iter().map(|(host, _)| host).collect(),
            });
        }
    }
    board
}

fn writes_share(vm: &DrainVm) -> f64 {
    let share = vm.prediction.as_ref().map(|prediction| {
        let written = prediction.dirty_mib_per_s * 1_048_576.0;
        written / (prediction.throughput_gb_per_s * 1e9).max(1.0)
    });
    share.unwrap_or(0.0)
}

/// Predicts the moves of those that wait, a few at a time, and puts them in order.
pub(super) async fn measure(app: &Arc<App>, view: &mut DrainView, work: &mut Work) {
    let board = board(app, view, work);
    let destinations = plan::destinations(&board.waiting, &board.rooms);
    let mut asked = JoinSet::new();
    for (vm, to) in destinations {
        if asked.len() < plan::AT_ONCE as usize
            && work.patience.begin_measuring(&vm, Instant::now())
        {
            let (app, from) = (app.clone(), view.host.clone());
            asked.spawn(async move { (vm.clone(), predict(&app, &vm, &from, &to).await) });
        }
    }
    while let Some(Ok((name, prediction))) = asked.join_next().await {
        let found = view.vms.iter_mut().find(|vm| vm.vm == name);
        if let (Some(vm), Some(prediction)) = (found, prediction) {
            work.patience.measured(&name);
            vm.prediction = Some(prediction);
        }
    }
    let movable = view
        .vms
        .iter()
        .filter(|vm| !matches!(vm.step, DrainStep::CannotMove | DrainStep::Off))
        .count();
    (view.at_once, view.plan) = plan::describe(view.request.at_once, movable, board.rooms.len());
    sort(&mut view.vms);
}

/// Those that moved and move first, then the others in the order of their moves, then those that stay.
fn sort(vms: &mut [DrainVm]) {
    let rank = |vm: &DrainVm| match vm.step {
        DrainStep::Moved => 0,
        DrainStep::Moving => 1,
        DrainStep::Waiting => 2,
        DrainStep::CannotMove => 3,
        DrainStep::Off => 4,
    };
    let seconds = |vm: &DrainVm| {
        let prediction = vm.prediction.as_ref();
        prediction.map_or(f64::INFINITY, |prediction| prediction.total_s)
    };
    vms.sort_by(|a, b| {
        let order = rank(a).cmp(&rank(b));
        let quick = seconds(a).total_cmp(&seconds(b));
        order
            .then(quick)
            .then(a.memory_mib.cmp(&b.memory_mib))
            .then(a.vm.cmp(&b.vm))
    });
}

async fn predict(
    app: &App,
    vm: &VmName,
    from: &HostName,
    to: &HostName,
) -> Option<godwit_types::forecast::Prediction> {
    let (source, destination) = preflight::two_ends(app, from, to).ok()?;
    let (rate, link) = tokio::join!(
        forecast::rate(app, &source.agent, vm, QUICK),
        forecast::link(app, &source, &destination, Cipher::Aes256Gcm, QUICK)
    );
    match (rate, link) {
        (Ok(rate), Ok(link)) => {
            let request = MigrateRequest::plain(to.clone());
            let pause = forecast::pause(app, vm, from, to).await.ok().flatten();
            Some(forecast::predict(&rate, &link, pause, (&request, &[])).prediction)
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::info!(%vm, %error, "the VM's move cannot be predicted");
            None
        }
    }
}

/// Begins what the plan says; preflight of each runs beside this task, and to its end also when the drain is ended: a
/// beginning cut off half way would leave a migration on record that nobody follows.
fn begin_next(app: &Arc<App>, view: &mut DrainView, work: &mut Work) {
    let answers = app.host(&view.host).is_ok_and(|host| host.is_connected());
    if !answers {
        return;
    }
    loop {
        let board = board(app, view, work);
        let next = plan::next(&board.waiting, &board.moving, &board.rooms, view.at_once);
        let Some((vm, to)) = next else { return };
        work.starting.insert(vm.clone(), to.clone());
        let (app, name) = (app.clone(), vm.clone());
        let request = MigrateRequest::plain(to.clone());
        let attempt = tokio::spawn(async move { migrate::attempt(&app, &name, &request).await });
        work.begun.spawn(async move {
            let answer = attempt.await.unwrap_or_else(|error| {
                let text = format!("the beginning of VM {vm}'s move broke off: {error}");
                Err(vec![ApiError::new(ErrorCode::Internal, text)])
            });
            Begun { vm, to, answer }
        });
    }
}

/// Notes how a beginning went. Where it moves is then in the inventory.
fn take(app: &App, host: &HostName, work: &mut Work, begun: Begun) {
    work.starting.remove(&begun.vm);
    match begun.answer {
        Ok(_) => tracing::info!(%host, vm = %begun.vm, to = %begun.to, "VM leaves the host"),
        Err(reasons) => {
            let passing = [ErrorCode::AlreadyMigrating, ErrorCode::HostUnreachable];
            // Somebody else moves it, or a host is away: the next look shows.
            if reasons.iter().any(|error| passing.contains(&error.code))
                || app.state().active.contains_key(&begun.vm)
            {
                work.patience.pause(begun.vm, Instant::now());
                return;
            }
            for reason in &reasons {
                tracing::warn!(%host, vm = %begun.vm, to = %begun.to, %reason, "VM cannot go there");
            }
            work.patience.refuse((begun.vm, begun.to), reasons, 1);
        }
    }
}

/// What is left of all moves, one after the other, since they share the host's link.
pub(super) fn eta_s(app: &App, view: &DrainView) -> Option<f64> {
    let mut total_s = 0.0;
    for vm in &view.vms {
        let whole_s = vm.prediction.as_ref().map(|prediction| prediction.total_s);
        total_s += match vm.step {
            DrainStep::Waiting => whole_s?,
            DrainStep::Moving => {
                let live = vm.migration.as_ref().and_then(|id| app.live(id));
                let reported = live.and_then(|live| live.borrow().eta_s);
                let share = 1.0 - vm.percent.unwrap_or(0.0) / 100.0;
                reported.or(whole_s.map(|whole_s| whole_s * share))?
            }
            _ => 0.0,
        };
    }
    Some(total_s)
}
