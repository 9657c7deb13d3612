//! Everything that is looked at before a migration begins: what the inventory knows, then what both hosts say
//! themselves, then a probe frame from each of the VM's port groups at the source to the same at the destination.
//!
//! Here the facts are gathered; `check` judges them. Owns nothing, changes nothing. Collects every refusal, each naming
//! the host and the remedy.

mod check;
mod described;
mod linked;
mod places;

use self::check::{Arrived, Facts, Said};
use crate::app::App;
use crate::bounds;
use crate::error::{Outcome, refuse, silent, way_out};
use crate::placement::place;
use crate::reconcile::refresh;
use crate::secret;
use crate::state::{HostEntry, Place};
use godwit_rpc::AgentClient;
use godwit_types::host::HostInfo;
use godwit_types::host_api::{HostVm, PreflightIncoming, ProbeRequest, UefiSizes};
use godwit_types::migration::{Cipher, DiskToMove, MigrateRequest, PreflightReport};
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{ApiError, ErrorCode, HostName, VmName, VmSpec};
use std::time::{SystemTime, UNIX_EPOCH};

/// One end of a migration.
pub struct End {
    pub host: HostName,
    /// What it says of itself.
    pub info: HostInfo,
    pub address: std::net::SocketAddr,
    pub agent: AgentClient,
}

/// A migration as preflight has seen it, before anything is begun.
pub struct Preflight {
    pub source: End,
    pub destination: End,
    /// The VM as it runs.
    pub vm: HostVm,
    pub cipher: Cipher,
    /// The VM as the destination is to have it.
    pub there: VmSpec,
    /// The disks that go along.
    pub disks: Vec<DiskToMove>,
    /// What was fine and what was not.
    pub report: PreflightReport,
}

impl Preflight {
    /// The version of the control channel that both sides speak.
    pub fn control_protocol(&self) -> Option<u32> {
        let source = check::vm_process(&self.vm).speaks.migration;
        source.common(self.destination.info.speaks.migration)
    }
}

/// Looks at everything. An error is what makes looking further pointless.
pub async fn run(app: &App, name: &VmName, request: &MigrateRequest) -> Outcome<Preflight> {
    let (mut source, mut destination, mut vm) = ends(app, name, &request.to)?;
    let is_closed = destination.info.closing;
    if is_closed || !place::has_room(&vm.spec, &destination.info) {
        // What is known of it is up to a poll old: it is asked before it refuses.
        refresh(app, &request.to).await;
        (source, destination, vm) = ends(app, name, &request.to)?;
    }
    let mut facts = Facts {
        there: vm.spec.clone(),
        vm,
        source: source.info.clone(),
        destination: destination.info.clone(),
        wish: request.encryption,
        method: request.method,
        leaving: None,
        coming: None,
        arrived: None,
        disks: Vec::new(),
        stay_linked: Vec::new(),
    };
    ask_source(app, (name, request), &mut facts, &source, &destination).await?;
    let (report, cipher) = check::check(&facts);
    Ok(Preflight {
        source,
        destination,
        there: facts.there,
        vm: facts.vm,
        cipher,
        disks: facts.disks,
        report,
    })
}

/// Asks the source, then, if it answers, the destination.
async fn ask_source(
    app: &App,
    (name, wished): (&VmName, &MigrateRequest),
    facts: &mut Facts,
    source: &End,
    destination: &End,
) -> Outcome<()> {
    match source.agent.preflight_outgoing(name).await {
        Ok(mut outgoing) => {
            let entry = app.state().vms.get(name).cloned();
            let entry = entry.ok_or_else(|| crate::error::unknown_vm(name))?;
            outgoing.vm.spec = described::must_match(&entry, &source.host, &outgoing)?;
            bounds::lines(&mut outgoing.passed);
            facts.leaving = Some(Ok(Said {
                passed: outgoing.passed,
                refusals: bounds::refusals(outgoing.refusals),
            }));
            facts.disks = bounds::disks(&outgoing.vm.spec, outgoing.disks);
            facts.vm = outgoing.vm;
            let stores = (&destination.host, &destination.info.datastores);
            let (here, from) = (&facts.vm.spec, &source.info.datastores);
            facts.there = places::there(here, from, stores, &wished.disks)?;
            let files = (outgoing.file_hashes, outgoing.uefi);
            ask_destination(facts, (source, destination), files).await
        }
        Err(error) => {
            facts.leaving = Some(Err(error.into()));
            Ok(())
        }
    }
}

async fn ask_destination(
    facts: &mut Facts,
    (source, destination): (&End, &End),
    (file_hashes, uefi): (Vec<(String, String)>, Option<UefiSizes>),
) -> Outcome<()> {
    let probe_nonce = match facts.vm.spec.nics.is_empty() {
        true => String::new(),
        false => secret::probe_nonce()?,
    };
    let request = PreflightIncoming {
        spec: facts.there.clone(),
        accelerator: facts.vm.accelerator.unwrap_or(Accelerator::Auto),
        file_hashes,
        uefi,
        source_unix_ms: unix_ms(),
        probe_nonce,
        disks: facts.disks.clone(),
    };
    let answer = destination.agent.preflight_incoming(&request).await;
    let answered = answer.is_ok();
    facts.coming = Some(match answer {
        Ok(mut report) => {
            bounds::lines(&mut report.passed);
            facts.stay_linked = linked::settle(&mut facts.disks, &report.stay_linked);
            Ok(Said {
                passed: report.passed,
                refusals: bounds::refusals(report.refusals),
            })
        }
        Err(error) => Err(error.into()),
    });
    if answered && !request.probe_nonce.is_empty() && !check::lacks_bridge(facts) {
        facts.arrived = Some(probe(facts, source, destination, request.probe_nonce).await);
    }
    Ok(())
}

/// The destination listens since it was asked; the source sends, the destination says what arrived.
async fn probe(facts: &Facts, source: &End, destination: &End, nonce: String) -> Arrived {
    let request = ProbeRequest { nonce };
    let sent = source.agent.probe(&facts.vm.spec.name, &request).await;
    sent.map_err(|error| ApiError::from(error).on_host(&source.host))?;
    match destination.agent.probe_result(&request.nonce).await {
        Ok(result) => Ok(result.arrived),
        Err(error) => Err(ApiError::from(error).on_host(&destination.host)),
    }
}

/// Two hosts that answer.
pub fn two_ends(app: &App, from: &HostName, to: &HostName) -> Outcome<(End, End)> {
    Ok((
        end(app, from, app.host(from)?)?,
        end(app, to, app.host(to)?)?,
    ))
}

fn ends(app: &App, name: &VmName, to: &HostName) -> Outcome<(End, End, HostVm)> {
    if !app.state().vms.contains_key(name) {
        return Err(crate::error::unknown_vm(name));
    }
    let destination = app.host(to)?;
    let place = app.place_of(name).map_err(way_out)?;
    if place.host == *to {
        return refuse(
            ErrorCode::WrongState,
            format!("VM {name} is on host {to} already: choose another host"),
        );
    }
    let shown = app.state().vm_state(name);
    let vm = movable(name, &place, shown)?;
    app.drains.must_take_vms(to)?;
    let source = app.host(&place.host)?;
    Ok((
        end(app, &place.host, source)?,
        end(app, to, destination)?,
        vm,
    ))
}

/// Only a guest that runs migrates; anything else is refused with what helps.
fn movable(name: &VmName, place: &Place, shown: VmState) -> Outcome<HostVm> {
    let vm = place.vm.as_ref().filter(|_| shown != VmState::HandingOver);
    let state = vm.map_or(shown, |vm| vm.state);
    let (is, helps) = match (vm, state) {
        (Some(vm), VmState::Running) => return Ok(vm.clone()),
        (_, VmState::Paused) => (
            "paused",
            format!("resume it with 'godwit vm resume {name}'"),
        ),
        (_, VmState::Panicked) => (
            "halted by its own kernel",
            format!("reset it with 'godwit vm reset {name}'"),
        ),
        (_, VmState::Crashed) => (
            "crashed",
            format!(
                "wait until its host has booted it, see 'godwit vm show {name}'; or, to have it boot elsewhere, run 'godwit vm stop {name}', then 'godwit vm start {name} --on HOST'"
            ),
        ),
        (_, VmState::HandingOver | VmState::Incoming) => (
            "being handed over",
            format!("wait until one host says that it runs it, see 'godwit vm show {name}'"),
        ),
        _ => (
            "off",
            format!(
                "start it with 'godwit vm start {name}' first; one without a disk of its own may start on the other host (--on HOST)"
            ),
        ),
    };
    refuse(
        ErrorCode::WrongState,
        format!("VM {name} is {is} and only a running one migrates: {helps}"),
    )
}

fn end(app: &App, name: &HostName, entry: HostEntry) -> Outcome<End> {
    let agent = app.connected_agent(name).map_err(way_out)?;
    let mut info = entry.info.ok_or_else(|| silent(name))?;
    info.name = name.clone();
    Ok(End {
        host: name.clone(),
        info,
        address: entry.address,
        agent,
    })
}

fn unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(0)
}
