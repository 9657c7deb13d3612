//! A drain that is only planned: what would move where, and what would stay and why.
//!
//! Owns nothing. Refuses to begin anything.

use super::patience::TRIES_MAX;
use super::plan;
use super::run::{Work, board, eta_s, judge, look, measure};
use super::takers::{Taker, takers};
use crate::app::App;
use crate::preflight;
use godwit_types::drain::{DrainStep, DrainView};
use godwit_types::migration::MigrateRequest;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::sync::Arc;

/// Plans without doing anything: preflight of every VM against its destination, and predictions.
pub async fn dry(app: &Arc<App>, view: &mut DrainView) {
    let mut work = Work::new();
    look(app, view);
    judge(app, view, &work, false);
    // A host may refuse what another takes; each round rules out at least one pair.
    loop {
        let board = board(app, view, &work);
        let destinations = plan::destinations(&board.waiting, &board.rooms);
        let before = work.patience.refusals();
        for vm in view
            .vms
            .iter_mut()
            .filter(|vm| vm.step == DrainStep::Waiting)
        {
            let to = destinations.get(&vm.vm).cloned();
            if let Some(to) = to.as_ref().filter(|_| vm.to != to)
                && let Err(reasons) = passes(app, &vm.vm, to).await
            {
                let pair = (vm.vm.clone(), to.clone());
                work.patience.refuse(pair, reasons, TRIES_MAX);
            }
            vm.to = to;
        }
        judge(app, view, &work, false);
        if work.patience.refusals() == before {
            break;
        }
    }
    leave_without_room(view, &takers(app, view));
    loop {
        let before = work.patience.measurements();
        measure(app, view, &mut work).await;
        if work.patience.measurements() == before {
            break;
        }
    }
    view.eta_s = eta_s(app, view);
}

/// In a plan all move one after the other: who finds no room beside the others stays.
fn leave_without_room(view: &mut DrainView, hosts: &[Taker]) {
    for vm in view
        .vms
        .iter_mut()
        .filter(|vm| vm.step == DrainStep::Waiting && vm.to.is_none())
    {
        vm.step = DrainStep::CannotMove;
        vm.reasons = hosts
            .iter()
            .map(|host| {
                let text = format!(
                    "host {} has no room left for VM {} ({} MiB) beside the others: free some or add a host",
                    host.name, vm.vm, vm.memory_mib
                );
                ApiError::new(ErrorCode::OutOfMemory, text).on_host(&host.name)
            })
            .collect();
    }
}

async fn passes(app: &App, vm: &VmName, to: &HostName) -> Result<(), Vec<ApiError>> {
    match preflight::run(app, vm, &MigrateRequest::plain(to.clone())).await {
        Ok(found) if found.report.refusals.is_empty() => Ok(()),
        Ok(found) => Err(found.report.refusals),
        Err(error) => Err(vec![error]),
    }
}
