//! Begins a migration: preflight, the grant on record, the spec to the destination, then to the source.
//!
//! Owns the secret for as long as it takes to hand it to both hosts. After the source has begun, the hosts need the
//! controller no more. Refuses a second migration of a VM; leaves a destination that cannot be used told so.

use crate::app::{App, now};
use crate::error::{Outcome, refuse};
use crate::placement::forecast::{self, QUICK, THOROUGH};
use crate::placement::place::joined;
use crate::preflight::{self, Preflight};
use crate::resolve::settle_gift;
use crate::secret;
use crate::store::Added;
use crate::survey::{must_be_newest, refused};
use crate::watch;
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::{AgentClient, ClientError};
use godwit_types::control_api::{CancelRequest, Done, InventoryEvent, MigrationBegun};
use godwit_types::disk_move::{LAST_BLOCKS_MAX_S, Method};
use godwit_types::forecast::PromiseKind;
use godwit_types::host_api::PrepareIncoming;
use godwit_types::migration::{
    AgentAddress, COULD_NOT_BEGIN, CannotKeep, MAX_DOWNTIME_MS_DEFAULT, MigrateRequest,
    MigrationReport, MigrationSpec, Outcome as End, Phase, PreflightReport, Side,
};
use godwit_types::site::Claim;
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId, VmName};
use std::sync::Arc;
use std::time::Duration;

/// Begins a migration or only checks whether it could begin.
pub async fn begin(
    app: &Arc<App>,
    name: &VmName,
    request: &MigrateRequest,
) -> Outcome<MigrateAnswer> {
    app.until_taken_over(name).await;
    attempt(app, name, request).await.map_err(joined)
}

/// The same, with each of several refusals by itself.
pub async fn attempt(
    app: &Arc<App>,
    name: &VmName,
    request: &MigrateRequest,
) -> Result<MigrateAnswer, Vec<ApiError>> {
    check_request(request).map_err(one)?;
    app.until_started().await;
    // Hosts would refuse it, too, without knowing what this controller waits for.
    must_be_newest(app).map_err(one)?;
    let Some(_moving) = app.begin_moving(name).await else {
        return Err(one(already(name, None)));
    };
    let _turn = app.vm_turns.take(name).await;
    app.must_be_described(name).map_err(one)?;
    if let Some(moving) = app.state().active.get(name) {
        return Err(one(already(name, Some(&moving.id))));
    }
    until_settled(app, name).await.map_err(one)?;
    let mut found = preflight::run(app, name, request).await.map_err(one)?;
    if found.report.refusals.is_empty() {
        foresee(app, &mut found, request).await;
        let has_disks = !found.disks.is_empty();
        add_last_blocks(&mut found.report, has_disks, request);
    }
    if request.dry_run {
        return Ok(MigrateAnswer::Checked(found.report));
    }
    if !found.report.refusals.is_empty() {
        return Err(found.report.refusals);
    }
    must_keep(&found.report, request).map_err(one)?;
    start(app, name, &found, request).await.map_err(one)
}

fn one(error: ApiError) -> Vec<ApiError> {
    vec![error]
}

/// Predicts into the report: as well as it gets in a dry run; quickly where something was promised; else only from what
/// is known, since it would cost more than it tells.
async fn foresee(app: &App, found: &mut Preflight, request: &MigrateRequest) {
    // A longest pause is always promised, and the move keeps it or says that it does not converge.
    let promised = request.deadline_s.is_some()
        || request.max_guest_slowdown_percent.is_some()
        || request.must_keep;
    let effort = if request.dry_run { THOROUGH } else { QUICK };
    let foreseen = if request.dry_run || promised {
        forecast::foresee(app, found, request, effort).await
    } else {
        match forecast::remembered(app, found, request).await {
            Some(foreseen) => Ok(foreseen),
            None => return,
        }
    };
    match foreseen {
        Ok(foreseen) => {
            found.report.prediction = Some(foreseen.prediction);
            found.report.cannot_keep = foreseen.cannot_keep;
        }
        // A migration that begins waits for a link that comes back, and may keep no promise then.
        Err(error)
            if (request.dry_run || request.must_keep) && forecast::stands_in_the_way(&error) =>
        {
            found.report.refusals.push(error);
        }
        Err(error) => {
            tracing::warn!(vm = %found.vm.spec.name, %error, "the migration cannot be predicted");
            let line = format!(
                "warning: it can begin, but not be predicted: {}",
                error.message
            );
            found.report.passed.push(line);
        }
    }
}

/// How long the guest stands still for the last blocks of its disks by dirty block tracking, or for its last redo logs, nobody foretells, but only how long at most.
fn add_last_blocks(report: &mut PreflightReport, has_disks: bool, request: &MigrateRequest) {
    if request.method == Method::Mirror || !has_disks {
        return;
    }
    let what =
        format!("the last blocks of its disks may take up to {LAST_BLOCKS_MAX_S} s of the pause");
    report.passed.push(format!("warning: {what}"));
    let asked_ms = request.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS_DEFAULT);
    let blocks_ms = 1000.0 * LAST_BLOCKS_MAX_S as f64;
    let predicted = report.prediction.as_ref();
    let pause_ms = predicted.map_or(0.0, |prediction| prediction.downtime_ms);
    let predicted_ms = blocks_ms + pause_ms;
    if predicted_ms > asked_ms as f64 {
        report.cannot_keep.push(CannotKeep {
            promise: PromiseKind::MaxDowntime,
            asked: asked_ms as f64,
            predicted: Some(predicted_ms),
            message: format!("{what}, which is to be {asked_ms} ms: leave out --method, or allow a longer pause with --max-downtime"),
        });
    }
}

fn must_keep(report: &PreflightReport, request: &MigrateRequest) -> Outcome<()> {
    if !request.must_keep || report.cannot_keep.is_empty() {
        return Ok(());
    }
    let broken: Vec<&str> = report
        .cannot_keep
        .iter()
        .map(|broken| broken.message.as_str())
        .collect();
    refuse(ErrorCode::CannotKeep, broken.join("; "))
}

async fn start(
    app: &Arc<App>,
    name: &VmName,
    found: &Preflight,
    request: &MigrateRequest,
) -> Outcome<MigrateAnswer> {
    let mut spec = spec_of(found, name, request)?;
    let id = spec.id.clone();
    app.begins(&id);
    let recorded = record(app, &mut spec, found.vm.spec.memory_mib).await;
    let handed_out = match recorded {
        Ok(()) => hand_out(app, found, &mut spec).await,
        Err(error) => {
            app.has_begun(&id);
            return Err(error);
        }
    };
    let error = match (app.has_begun(&id), handed_out) {
        // Whatever a host made of the cancel in the meantime.
        (true, _) => Some((cancelled_at_once(&id), End::Cancelled)),
        (false, handed_out) => handed_out.err().map(|error| (error, End::Failed)),
    };
    if let Some((error, outcome)) = error {
        return Err(undo(app, found, &id, error, outcome).await);
    }
    let broken = found.report.cannot_keep.iter();
    let warnings = broken.map(|broken| broken.message.clone()).collect();
    tracing::info!(migration = %id, vm = %spec.vm, from = %found.source.host, to = %found.destination.host, "migration has begun");
    watch::spawn(app.clone(), id.clone());
    Ok(MigrateAnswer::Begun(MigrationBegun {
        id: id.to_string(),
        warnings,
    }))
}

/// Waits until no other host's record waits for the end of an earlier handover. A move that began before would only be
/// refused by the hosts, and its cancel keeps them from settling that end: nothing is asked of them meanwhile.
async fn until_settled(app: &App, name: &VmName) -> Outcome<()> {
    let mut changes = app.listen();
    let deadline = tokio::time::Instant::now() + UNCONFIRMED_WAIT;
    if let Some(host) = unsettled(app, name)
        && let Err(error) = settle_gift(app, name, &host).await
    {
        tracing::info!(vm = %name, %host, %error, "an earlier handover is not settled");
    }
    while let Some(host) = unsettled(app, name) {
        // To lag behind is a change too, and the channel closes only with this value.
        let changed = tokio::time::timeout_at(deadline, changes.recv());
        if changed.await.is_err() {
            if let Some(kept) = app.state().book.kept_gift(name, &host) {
                return Err(refused(godwit_site::Refusal::GiftKept(kept)));
            }
            let message = format!(
                "host {host} has not settled the last handover of VM {name} with the host where it runs: that passes by itself once the two reach each other; see 'godwit vm show {name}' and try again then"
            );
            return Err(ApiError::new(ErrorCode::Unconfirmed, message).on_host(&host));
        }
    }
    Ok(())
}

/// A host that answers and whose record waits for another host, though the VM runs elsewhere.
fn unsettled(app: &App, name: &VmName) -> Option<HostName> {
    let state = app.state();
    let runs = state.place(name).filter(|place| {
        let vm = place.vm.as_ref();
        place.connected && vm.is_some_and(|vm| vm.state == VmState::Running && vm.holds())
    })?;
    let waits = |claim: &Claim| matches!(claim, Claim::Gave { .. } | Claim::Promised { .. });
    let claims = state.book.claims(name).into_iter();
    let mut others = claims.filter(|(host, claim)| *host != runs.host && waits(claim));
    others
        .find(|(host, _)| state.book.answers(host))
        .map(|(host, _)| host)
}

/// How long a source may wait for its former host's word before it refuses to move the VM on.
const UNCONFIRMED_WAIT: Duration = Duration::from_secs(5);
/// Pause between two tries meanwhile.
const UNCONFIRMED_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause that may be asked for: an hour.
const DOWNTIME_MAX_MS: u64 = 3_600_000;
/// Latest deadline: a year.
const DEADLINE_MAX_S: u64 = 31_536_000;
/// Highest cap: 10 Tb/s.
const BANDWIDTH_MAX_MBIT_PER_S: u64 = 10_000_000;

fn check_request(request: &MigrateRequest) -> Outcome<()> {
    if let Some(percent) = request
        .max_guest_slowdown_percent
        .filter(|percent| *percent > 99)
    {
        return refuse(
            ErrorCode::InvalidRequest,
            format!("max_guest_slowdown_percent = {percent} would stop the guest: give 0 to 99"),
        );
    }
    check_bounds("max_downtime_ms", request.max_downtime_ms, DOWNTIME_MAX_MS)?;
    check_bounds("deadline_s", request.deadline_s, DEADLINE_MAX_S)?;
    check_cap(request.max_bandwidth_mbit_per_s)?;
    check_method(request)
}

/// Refuses a cap that cannot be one.
pub fn check_cap(mbit_per_s: Option<u64>) -> Outcome<()> {
    let key = "max_bandwidth_mbit_per_s";
    check_bounds(key, mbit_per_s, BANDWIDTH_MAX_MBIT_PER_S)
}

fn check_bounds(key: &str, value: Option<u64>, most: u64) -> Outcome<()> {
    let problem = match value {
        Some(0) => "cannot be kept",
        Some(value) if value > most => "is too much",
        _ => return Ok(()),
    };
    let value = value.unwrap_or_default();
    let message = format!("{key} = {value} {problem}: give 1 to {most} or leave it out");
    refuse(ErrorCode::InvalidRequest, message)
}

fn already(name: &VmName, id: Option<&MigrationId>) -> ApiError {
    let which = id.map_or_else(String::new, |id| format!(" ({id})"));
    ApiError::new(
        ErrorCode::AlreadyMigrating,
        format!(
            "VM {name} is migrating already{which}: wait for it or cancel it with 'godwit migration cancel'"
        ),
    )
}

fn check_method(request: &MigrateRequest) -> Outcome<()> {
    let checked = request.method.check_without(&request.without);
    checked.or_else(|why| refuse(ErrorCode::InvalidRequest, why))
}

fn spec_of(found: &Preflight, name: &VmName, request: &MigrateRequest) -> Outcome<MigrationSpec> {
    let address = |end: &preflight::End| AgentAddress {
        host: end.host.clone(),
        address: end.address,
    };
    Ok(MigrationSpec {
        id: secret::migration_id()?,
        vm: name.clone(),
        // Named when the permission is recorded.
        generation: Generation(0),
        source: address(&found.source),
        destination: address(&found.destination),
        secret: secret::migration_secret()?,
        cipher: found.cipher,
        max_downtime_ms: request.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS_DEFAULT),
        deadline_s: request.deadline_s,
        max_bandwidth_mbit_per_s: request.max_bandwidth_mbit_per_s,
        max_guest_slowdown_percent: request.max_guest_slowdown_percent,
        prepare_memory: request.prepare,
        control_protocol: found.control_protocol(),
        prediction: found.report.prediction.clone(),
        disks: found.disks.clone(),
        method: request.method,
        without: request.without.clone(),
        images: found.vm.images.clone(),
        source_addresses: found.source.info.migration_addresses.clone(),
        destination_addresses: Vec::new(),
    })
}

/// "Migration M may take generation g of this VM from A to B", durably, before either host hears of it.
async fn record(app: &App, spec: &mut MigrationSpec, ram_mib: u64) -> Outcome<()> {
    let (from, to) = (&spec.source.host, &spec.destination.host);
    let permitted = app.state().book.permit_migration(&spec.vm, from, to);
    let permission = permitted.map_err(refused)?;
    spec.generation = permission.generation;
    let report = MigrationReport::begun(spec, Side::Source, ram_mib, now());
    let due = app.due().await;
    let added = app.store.grant_migration(spec, &report, due.rows());
    if added.await? == Added::Exists {
        return Err(already(&spec.vm, None));
    }
    due.written();
    let mut state = app.state();
    state.active.insert(spec.vm.clone(), watch::moving(&report));
    drop(state);
    app.publish(report);
    app.tell(InventoryEvent::Migration {
        id: spec.id.to_string(),
    });
    app.tell_vm(&spec.vm);
    Ok(())
}

fn cancelled_at_once(id: &MigrationId) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!("migration {id} was cancelled before it had begun at its source"),
    )
}

async fn hand_out(app: &App, found: &Preflight, spec: &mut MigrationSpec) -> Result<(), ApiError> {
    let request = PrepareIncoming {
        spec: found.there.clone(),
        accelerator: found.vm.accelerator.unwrap_or(Accelerator::Auto),
        migration: spec.clone(),
    };
    let (source, destination) = (&found.source, &found.destination);
    let ready = destination
        .agent
        .prepare_incoming(&request)
        .await
        .map_err(|error| ApiError::from(error).on_host(&destination.host))?;
    let known = &destination.info.migration_addresses;
    spec.destination_addresses = forecast::own_addresses(ready.addresses, known);
    if spec.destination_addresses.is_empty() {
        let message = format!(
            "host {} listens for the migration at none of its migration addresses: see 'godwit host check {0}'",
            destination.host
        );
        return Err(ApiError::new(ErrorCode::Incompatible, message).on_host(&destination.host));
    }
    if app.is_cancelled(&spec.id) {
        return Err(cancelled_at_once(&spec.id));
    }
    begin_at_source(source, spec)
        .await
        .map_err(|error| ApiError::from(error).on_host(&source.host))
}

/// A source that was a destination a moment ago may still wait for its former host to say that it knows: that passes.
async fn begin_at_source(source: &preflight::End, spec: &MigrationSpec) -> Result<(), ClientError> {
    let deadline = tokio::time::Instant::now() + UNCONFIRMED_WAIT;
    loop {
        match source.agent.migrate(spec).await {
            Err(error)
                if error.code() == ErrorCode::Unconfirmed
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(UNCONFIRMED_PAUSE).await;
            }
            done => return done.map(drop),
        }
    }
}

/// Whatever a host may have begun is cancelled; the watcher waits until both have said how it ended.
async fn undo(
    app: &Arc<App>,
    found: &Preflight,
    id: &MigrationId,
    error: ApiError,
    outcome: End,
) -> ApiError {
    tracing::warn!(migration = %id, %error, "migration could not begin");
    // What a person cancelled is told as that.
    let reason = match outcome {
        End::Cancelled => error.message.clone(),
        _ => format!("{COULD_NOT_BEGIN}{}", error.message),
    };
    let request = CancelRequest {
        reason: Some(reason),
        vm: Some(found.vm.spec.name.clone()),
    };
    for end in [&found.source, &found.destination] {
        if let Err(error) = cancel_at(&end.agent, id, &request).await {
            tracing::warn!(migration = %id, host = %end.host, %error, "cannot tell the host that the migration is cancelled");
        }
    }
    watch::settle_failed_start(app, id, &error, outcome).await;
    error
}

/// Cancels at one host; that it does not know the migration is fine.
async fn cancel_at(
    agent: &AgentClient,
    id: &MigrationId,
    request: &CancelRequest,
) -> Result<(), ClientError> {
    match agent.cancel(id, request).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == ErrorCode::UnknownMigration => Ok(()),
        Err(error) => Err(error),
    }
}

/// Has both hosts refuse a migration that they may be told of any moment, so that the cancel outlives this controller. One
/// that does not answer is told again when the beginning is undone; only what the source refuses is cancelled for certain.
async fn refuse_at_hosts(
    app: &App,
    report: &MigrationReport,
    request: &CancelRequest,
) -> Outcome<Done> {
    let (source, destination) = tokio::join!(
        refuse_at(app, &report.from, report, request),
        refuse_at(app, &report.to, report, request)
    );
    if let Err(error) = destination {
        tracing::warn!(migration = %report.id, %error, "the destination does not know yet that the migration is cancelled");
    }
    match source {
        Ok(_) => Ok(Done {
            message: format!(
                "migration {} is cancelled: VM {} stays on host {}",
                report.id, report.vm, report.from
            ),
        }),
        Err(error) if error.code == ErrorCode::UnknownMigration => Err(too_late(report)),
        Err(error) => Err(ApiError::new(
            error.code,
            format!(
                "migration {0} is to be cancelled, but host {1} has not said that it refuses it ({2}): whether VM {3} moves is not known yet, see 'godwit migration show {0}'",
                report.id, report.from, error.message, report.vm
            ),
        )
        .on_host(&report.from)),
    }
}

async fn refuse_at(
    app: &App,
    host: &HostName,
    report: &MigrationReport,
    request: &CancelRequest,
) -> Outcome<Done> {
    let agent = app.connected_agent(host)?;
    Ok(agent.cancel(&report.id, request).await?)
}

fn too_late(report: &MigrationReport) -> ApiError {
    ApiError::new(
        ErrorCode::WrongState,
        format!(
            "migration {0} cannot be cancelled any more: VM {1} is handed over, or the migration is over; see 'godwit migration show {0}'",
            report.id, report.vm
        ),
    )
}

/// Cancels a migration at its source, or, where that does not answer, at its destination.
pub async fn cancel(app: &App, id: &MigrationId, request: &CancelRequest) -> Outcome<Done> {
    let report = watch::report(app, id).await?;
    if report.phase == Phase::Ended
        || matches!(
            report.outcome,
            Some(End::Completed | End::Cancelled | End::Failed)
        )
    {
        return refuse(
            ErrorCode::WrongState,
            format!("migration {id} is over: see 'godwit migration show {id}'"),
        );
    }
    let request = CancelRequest {
        reason: request.reason.clone(),
        vm: Some(report.vm.clone()),
    };
    if app.cancel_beginning(id) {
        return refuse_at_hosts(app, &report, &request).await;
    }
    let agent = app
        .connected_agent(&report.from)
        .or_else(|_| app.connected_agent(&report.to))?;
    match agent.cancel(id, &request).await {
        Err(error) if error.code() == ErrorCode::UnknownMigration => Err(too_late(&report)),
        answer => Ok(answer?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::HostName;

    #[test]
    fn a_pause_that_a_method_makes_longer_is_not_promised() {
        let plain = MigrateRequest {
            max_downtime_ms: Some(20),
            must_keep: true,
            ..MigrateRequest::plain(HostName::new("b").unwrap())
        };
        let tracked = MigrateRequest {
            method: Method::DirtyTracking,
            ..plain.clone()
        };
        let by_logs = MigrateRequest {
            method: Method::Snapshot,
            ..plain.clone()
        };
        let patient = MigrateRequest {
            max_downtime_ms: Some(3000),
            ..tracked.clone()
        };
        for (request, has_disks, told, is_kept) in [
            (&plain, true, 0, true),
            (&tracked, false, 0, true),
            (&tracked, true, 1, false),
            (&by_logs, true, 1, false),
            (&patient, true, 1, true),
        ] {
            let mut report = PreflightReport::default();
            add_last_blocks(&mut report, has_disks, request);
            assert_eq!(report.passed.len(), told, "{report:?}");
            assert_eq!(must_keep(&report, request).is_ok(), is_kept, "{report:?}");
        }
    }

    #[test]
    fn limits_that_nothing_can_be_made_of_are_refused_each_by_its_name() {
        let free = MigrateRequest::plain(HostName::new("b").unwrap());
        assert!(check_request(&free).is_ok());
        type Set = fn(&mut MigrateRequest, u64);
        let keys: [(&str, Set, u64); 3] = [
            (
                "max_downtime_ms",
                |r, v| r.max_downtime_ms = Some(v),
                DOWNTIME_MAX_MS,
            ),
            ("deadline_s", |r, v| r.deadline_s = Some(v), DEADLINE_MAX_S),
            (
                "max_bandwidth_mbit_per_s",
                |r, v| r.max_bandwidth_mbit_per_s = Some(v),
                BANDWIDTH_MAX_MBIT_PER_S,
            ),
        ];
        for (key, set, most) in keys {
            for (value, fine) in [
                (0, false),
                (1, true),
                (most, true),
                (most + 1, false),
                (u64::MAX, false),
            ] {
                let mut request = free.clone();
                set(&mut request, value);
                let checked = check_request(&request);
                assert_eq!(checked.is_ok(), fine, "{key} = {value}");
                if let Err(error) = checked {
                    assert_eq!(error.code, ErrorCode::InvalidRequest);
                    assert!(
                        error.message.starts_with(&format!("{key} = {value} ")),
                        "{error}"
                    );
                }
            }
        }
    }
}
