//! Disks that are made before their VM starts: begun at its host, asked for, and gone from the description once they are there.
//!
//! Owns which host makes those of which VM, as long as this controller lives: what was begun is gone on with there. Refuses: to have a disk
//! made that its holder has already, whatever this controller remembers.

use super::start::Plan;
use crate::app::App;
use crate::error::Outcome;
use godwit_types::control_api::{DiskMaking, DisksMaking, Started};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where disks are being made.
#[derive(Debug, Default)]
pub struct Makings(Mutex<BTreeMap<VmName, HostName>>);

impl Makings {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, HostName>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host that makes a VM's disks.
    pub fn host_of(&self, vm: &VmName) -> Option<HostName> {
        self.lock().get(vm).cloned()
    }
}

/// Has the host make what is to be made. Nothing is being made once all is there: the plan's descriptions then say so, and are
/// written with the grant.
pub(super) async fn make_disks(app: &App, plan: &mut Plan) -> Outcome<Option<DiskMaking>> {
    know_those_that_are_made(plan)?;
    let spec = &plan.entry.spec;
    if spec.disks_to_make().next().is_none() {
        return Ok(None);
    }
    let (name, agent) = (spec.name.clone(), app.connected_agent(&plan.host)?);
    app.makings.lock().insert(name.clone(), plan.host.clone());
    let images = spec.disks_to_make().map(|disk| disk.path.clone()).collect();
    let asked = agent.make_disks(spec).await;
    let making = match asked {
        Ok(DisksMaking { making }) => making,
        Err(error) => {
            app.makings.lock().remove(&name);
            return Err(ApiError::from(error).on_host(&plan.host));
        }
    };
    if making.is_none() {
        app.makings.lock().remove(&name);
        plan.made = images;
        for spec in [&mut plan.entry.spec, &mut plan.resolved] {
            *spec = spec.clone().with_disks_made();
        }
    }
    Ok(making)
}

/// Where this controller knows of no start, as one from a backup may, a description may ask for disks that are made and elsewhere by now: the
/// guest would begin with an empty one.
fn know_those_that_are_made(plan: &mut Plan) -> Outcome<()> {
    let held = plan.held.as_ref().and_then(|held| held.vm.as_ref());
    let Some(held) = held.filter(|_| plan.entry.resolved.is_none()) else {
        return Ok(());
    };
    for spec in [&mut plan.entry.spec, &mut plan.resolved] {
        let known = spec.clone().with_disks_known(&held.spec);
        *spec = known.map_err(|error| {
            ApiError::new(ErrorCode::InvalidVm, error.to_string()).on_host(&plan.host)
        })?;
    }
    Ok(())
}

/// What a person hears meanwhile.
pub(super) fn not_yet(vm: &VmName, host: &HostName, making: DiskMaking) -> Started {
    let percent = (making.done_bytes.saturating_mul(100)).checked_div(making.total_bytes);
    let message = format!(
        "disk '{}' of VM '{vm}' is being made on host {host} ({} %): run 'godwit vm start {vm}' again to go on with the start",
        making.disk,
        percent.unwrap_or(0).min(100)
    );
    Started {
        message,
        making: Some(making),
    }
}

/// How far the disks of a VM are that is being started.
pub async fn disks(app: &App, name: &VmName) -> Outcome<DisksMaking> {
    let Some(host) = app.makings.host_of(name) else {
        return Ok(DisksMaking::default());
    };
    let asked = app.connected_agent(&host)?.disks(name).await;
    asked.map_err(|error| ApiError::from(error).on_host(&host))
}
