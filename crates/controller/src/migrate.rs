//! Begins a migration: preflight, the grant on record, the spec to the destination, then to the source.
//!
//! Owns the secret for as long as it takes to hand it to both hosts. After the source has begun, the hosts need the
//! controller no more. Refuses a second migration of a VM; leaves a destination that cannot be used told so.

use crate::app::{App, now};
use crate::error::{Outcome, refuse};
use crate::place::joined;
use crate::preflight::{self, Preflight};
use crate::secret;
use crate::store::Added;
use crate::watch;
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::{AgentClient, ClientError};
use godwit_types::control_api::{CancelRequest, Done, InventoryEvent, MigrationBegun};
use godwit_types::host_api::PrepareIncoming;
use godwit_types::migration::{
    AgentAddress, MAX_DOWNTIME_MS_DEFAULT, MigrateRequest, MigrationReport, MigrationSpec,
    Outcome as End, Phase, Side,
};
use godwit_types::vm::Accelerator;
use godwit_types::{ApiError, ErrorCode, MigrationId, VmName};
use std::sync::Arc;

/// Begins a migration or only checks whether it could begin.
pub async fn begin(
    app: &Arc<App>,
    name: &VmName,
    request: &MigrateRequest,
) -> Outcome<MigrateAnswer> {
    check_request(request)?;
    let Some(_moving) = app.begin_moving(name) else {
        return Err(already(name, None));
    };
    let _turn = app.vm_lock(name).await;
    if let Some(moving) = app.state().active.get(name) {
        return Err(already(name, Some(&moving.id)));
    }
    let found = preflight::run(app, name, request).await?;
    if request.dry_run {
        return Ok(MigrateAnswer::Checked(found.report));
    }
    if !found.report.refusals.is_empty() {
        return Err(joined(found.report.refusals));
    }
    let mut spec = spec_of(&found, request)?;
    let id = spec.id.clone();
    record(app, &spec, found.vm.spec.memory_mib).await?;
    if let Err(error) = hand_out(&found, &mut spec).await {
        return Err(undo(app, &found, &id, error).await);
    }
    tracing::info!(migration = %id, vm = %name, from = %found.source.host, to = %found.destination.host, "migration has begun");
    watch::spawn(app.clone(), id.clone());
    Ok(MigrateAnswer::Begun(MigrationBegun {
        id: id.to_string(),
        warnings: Vec::new(),
    }))
}

fn check_request(request: &MigrateRequest) -> Outcome<()> {
    let zero = [
        ("max_downtime_ms", request.max_downtime_ms),
        ("deadline_s", request.deadline_s),
        ("max_bandwidth_mbit_per_s", request.max_bandwidth_mbit_per_s),
    ];
    match zero.into_iter().find(|(_, value)| *value == Some(0)) {
        None => Ok(()),
        Some((key, _)) => refuse(
            ErrorCode::InvalidRequest,
            format!("{key} = 0 cannot be kept: give at least 1 or leave it out"),
        ),
    }
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

fn spec_of(found: &Preflight, request: &MigrateRequest) -> Outcome<MigrationSpec> {
    let name = &found.vm.spec.name;
    let generation = found.vm.generation.next().ok_or_else(|| {
        ApiError::new(
            ErrorCode::Internal,
            format!("VM {name} has no generation left"),
        )
    })?;
    let address = |end: &preflight::End| AgentAddress {
        host: end.host.clone(),
        address: end.address,
    };
    Ok(MigrationSpec {
        id: secret::migration_id()?,
        vm: name.clone(),
        generation,
        source: address(&found.source),
        destination: address(&found.destination),
        secret: secret::migration_secret()?,
        cipher: found.cipher,
        max_downtime_ms: request.max_downtime_ms.unwrap_or(MAX_DOWNTIME_MS_DEFAULT),
        deadline_s: request.deadline_s,
        max_bandwidth_mbit_per_s: request.max_bandwidth_mbit_per_s,
        max_guest_slowdown_percent: request.max_guest_slowdown_percent,
        prepare_memory: request.prepare,
        prediction: None,
        source_addresses: found.source.info.migration_addresses.clone(),
        destination_addresses: Vec::new(),
    })
}

/// "Migration M may take generation g of this VM from A to B", durably, before either host hears of it.
async fn record(app: &App, spec: &MigrationSpec, ram_mib: u64) -> Outcome<()> {
    let report = MigrationReport::begun(spec, Side::Source, ram_mib, now());
    if app.store.grant_migration(spec, &report).await? == Added::Exists {
        return Err(already(&spec.vm, None));
    }
    let mut state = app.state();
    state.ledger.see(&spec.vm, spec.generation);
    state.active.insert(spec.vm.clone(), watch::moving(&report));
    drop(state);
    app.publish(report);
    app.tell(InventoryEvent::Migration {
        id: spec.id.to_string(),
    });
    app.tell_vm(&spec.vm);
    Ok(())
}

async fn hand_out(found: &Preflight, spec: &mut MigrationSpec) -> Result<(), ApiError> {
    let request = PrepareIncoming {
        spec: found.vm.spec.clone(),
        accelerator: found.vm.accelerator.unwrap_or(Accelerator::Auto),
        migration: spec.clone(),
    };
    let (source, destination) = (&found.source, &found.destination);
    let ready = destination
        .agent
        .prepare_incoming(&request)
        .await
        .map_err(|error| ApiError::from(error).on_host(&destination.host))?;
    spec.destination_addresses = ready.addresses;
    source
        .agent
        .migrate(spec)
        .await
        .map_err(|error| ApiError::from(error).on_host(&source.host))?;
    Ok(())
}

/// Whatever a host may have begun is cancelled; the watcher waits until both have said how it ended.
async fn undo(app: &Arc<App>, found: &Preflight, id: &MigrationId, error: ApiError) -> ApiError {
    tracing::warn!(migration = %id, %error, "migration could not begin");
    let request = CancelRequest {
        reason: Some(format!("it could not begin: {}", error.message)),
    };
    for end in [&found.source, &found.destination] {
        if let Err(error) = cancel_at(&end.agent, id, &request).await {
            tracing::warn!(migration = %id, host = %end.host, %error, "cannot tell the host that the migration is cancelled");
        }
    }
    watch::settle_failed_start(app, id, &error).await;
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
    let agent = app
        .connected_agent(&report.from)
        .or_else(|_| app.connected_agent(&report.to))?;
    Ok(agent.cancel(id, request).await?)
}
