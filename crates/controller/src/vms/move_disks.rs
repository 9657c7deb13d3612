//! Disks that move to another datastore of their host while their VM runs: asked of that host, which alone knows what is where.
//!
//! Owns nothing. Refuses: to begin for a VM that moves to another host, and a cap that cannot be one. Whether its guest runs is its host's to say.

use crate::app::App;
use crate::error::{Outcome, refuse, way_out};
use crate::migrate::check_cap;
use crate::reconcile::refresh;
use godwit_rpc::AgentClient;
use godwit_types::control_api::Done;
use godwit_types::disk_move::{DiskMoves, MoveDisks};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};

/// Has the VM's host begin, for as long as it does not move to another one.
pub async fn move_disks(app: &App, name: &VmName, wish: &MoveDisks) -> Outcome<DiskMoves> {
    check_cap(wish.max_bandwidth_mbit_per_s)?;
    app.until_taken_over(name).await;
    let _turn = app.vm_turns.take(name).await;
    must_stay(app, name)?;
    let (host, agent) = host_of(app, name)?;
    let begun = agent.move_disks(name, wish).await;
    app.tell_vm(name);
    begun.map_err(|error| ApiError::from(error).on_host(&host))
}

/// How far they are.
pub async fn disk_moves(app: &App, name: &VmName) -> Outcome<DiskMoves> {
    let (host, agent) = host_of(app, name)?;
    let moves = agent.disk_moves(name).await;
    let moves = moves.map_err(|error| ApiError::from(error).on_host(&host))?;
    if !moves.disks.is_empty() && !moves.are_under_way() {
        // The description here follows the host's: whoever saw the end may start or move the VM at once.
        refresh(app, &host).await;
    }
    Ok(moves)
}

/// Disks that are not moved yet stay where they are.
pub async fn cancel_disk_moves(app: &App, name: &VmName) -> Outcome<Done> {
    let (host, agent) = host_of(app, name)?;
    let cancelled = agent.cancel_disk_moves(name).await;
    cancelled.map_err(|error| ApiError::from(error).on_host(&host))
}

/// Refuses for a VM that moves to another host.
pub(super) fn must_stay(app: &App, name: &VmName) -> Outcome<()> {
    match app.state().active.get(name) {
        None => Ok(()),
        Some(moving) => refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM {name} moves to another host in migration {}: wait for its end",
                moving.id
            ),
        ),
    }
}

pub(super) fn host_of(app: &App, name: &VmName) -> Outcome<(HostName, AgentClient)> {
    let place = app.place_of(name).map_err(way_out)?;
    let agent = app.connected_agent(&place.host).map_err(way_out)?;
    Ok((place.host, agent))
}
