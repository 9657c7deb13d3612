//! Operations on VMs that are no migrations: create, edit, delete, start and the rest of their lives.
//!
//! Owns nothing; each takes the VM's lock. Order that keeps the right to run safe: the grant is in the database before
//! a host hears of it; a stopped VM leaves its old host, durably, before another gets a higher generation; nobody gets
//! one while a host that has not been heard may hold it. Refuses to leave anything behind when a first start fails.

use crate::app::{App, unknown_vm, unreachable_host};
use crate::error::{Outcome, refuse};
use crate::macs;
use crate::placement::place;
use crate::reconcile::refresh;
use crate::state::{Place, VmEntry};
use crate::store::{Added, Grant};
use futures_util::future::join_all;
use godwit_rpc::AgentClient;
use godwit_rpc::pki::now_unix_s;
use godwit_types::control_api::{Done, ResolveRequest, StartRequest, StopRequest, VmView};
use godwit_types::host::HostInfo;
use godwit_types::host_api::PutVm;
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName, VmSpec};

/// Says that something is done.
pub fn done(message: impl Into<String>) -> Done {
    Done {
        message: message.into(),
    }
}

fn check(spec: &VmSpec) -> Outcome<()> {
    spec.check()
        .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))
}

/// Describes a new VM; it is off.
pub async fn create(app: &App, spec: VmSpec) -> Outcome<VmView> {
    check(&spec)?;
    let name = spec.name.clone();
    let _turn = app.vm_lock(&name).await;
    let _macs = app.macs_turn().await;
    let entry = VmEntry {
        spec: macs::allot(spec, &app.state().vms)?,
        resolved: None,
        host: None,
    };
    let known = app.state().vms.contains_key(&name);
    if known || app.store.add_vm(&entry).await? == Added::Exists {
        return refuse(
            ErrorCode::AlreadyExists,
            format!(
                "there is a VM {name} already: choose another name, or change it with 'godwit vm edit {name}'"
            ),
        );
    }
    app.state().vms.insert(name.clone(), entry);
    app.tell_vm(&name);
    view(app, &name)
}

/// A VM as people see it.
pub fn view(app: &App, name: &VmName) -> Outcome<VmView> {
    app.state().vm_view(name).ok_or_else(|| unknown_vm(name))
}

/// Replaces the description of a VM that is off.
pub async fn edit(app: &App, name: &VmName, spec: VmSpec) -> Outcome<VmView> {
    if spec.name != *name {
        return refuse(
            ErrorCode::InvalidRequest,
            format!(
                "the description is of VM {}, not of {name}: a VM's name cannot be changed",
                spec.name
            ),
        );
    }
    check(&spec)?;
    let _turn = app.vm_lock(name).await;
    let mut entry = entry_of(app, name)?;
    must_be_off(app, name, "edited")?;
    let _macs = app.macs_turn().await;
    let spec = macs::allot(spec, &app.state().vms)?;
    let keeps_hardware = entry.spec.machine == spec.machine;
    entry.resolved = entry.resolved.filter(|_| keeps_hardware);
    entry.spec = spec;
    app.store.save_vm(&entry).await?;
    app.state().vms.insert(name.clone(), entry);
    app.tell_vm(name);
    view(app, name)
}

fn entry_of(app: &App, name: &VmName) -> Outcome<VmEntry> {
    let entry = app.state().vms.get(name).cloned();
    entry.ok_or_else(|| unknown_vm(name))
}

fn must_be_off(app: &App, name: &VmName, what: &str) -> Outcome<()> {
    let view = view(app, name)?;
    match (view.state, view.host) {
        (VmState::Stopped | VmState::Crashed, _) if view.migration.is_some() => refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM {name} is migrating and can be {what} only when that has ended: cancel it with 'godwit migration cancel'"
            ),
        ),
        (VmState::Stopped | VmState::Crashed, _) => Ok(()),
        (VmState::InDoubt, _) => Err(crate::app::in_doubt(name, view.note)),
        (VmState::Unreachable, Some(host)) => Err(match app.host(&host)?.is_connected() {
            true => crate::app::being_taken_over(name, &host),
            false => unreachable_host(&host),
        }),
        (state, _) => refuse(
            ErrorCode::WrongState,
            format!(
                "VM {name} is {state} and can be {what} only when stopped: run 'godwit vm stop {name}' first"
            ),
        ),
    }
}

/// Deletes a VM that is off, everywhere.
pub async fn delete(app: &App, name: &VmName) -> Outcome<Done> {
    let turn = app.vm_lock(name).await;
    entry_of(app, name)?;
    must_be_off(app, name, "deleted")?;
    for host in hosts_with(app, name) {
        let agent = app.connected_agent(&host)?;
        forget_at(&agent, &host, name).await?;
    }
    app.store.delete_vm(name).await?;
    forget_in_state(app, name);
    app.tell_vm(name);
    drop(turn);
    app.forget_vm_lock(name);
    Ok(done(format!("VM {name} is deleted.")))
}

fn forget_in_state(app: &App, name: &VmName) {
    let mut state = app.state();
    state.vms.remove(name);
    state.deletions += 1;
    for entry in state.hosts.values_mut() {
        entry.vms.retain(|vm| vm.spec.name != *name);
    }
}

/// Hosts that answer and know the VM, and those that do not answer and hold it.
fn hosts_with(app: &App, name: &VmName) -> Vec<HostName> {
    let state = app.state();
    let with = |host: &crate::state::HostEntry| {
        host.vms
            .iter()
            .any(|vm| vm.spec.name == *name && (vm.holds || host.is_connected()))
    };
    state
        .hosts
        .iter()
        .filter(|(_, host)| with(host))
        .map(|(name, _)| name.clone())
        .collect()
}

/// Tells a host to forget a VM; that it does not know it is fine.
async fn forget_at(agent: &AgentClient, host: &HostName, name: &VmName) -> Outcome<()> {
    match agent.delete_vm(name).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == ErrorCode::UnknownVm => Ok(()),
        Err(error) => Err(ApiError::from(error).on_host(host)),
    }
}

/// Hosts that answer.
fn connected(app: &App) -> Vec<HostInfo> {
    let state = app.state();
    let hosts = state.hosts.iter().filter(|(_, host)| host.is_connected());
    let infos = hosts.filter_map(|(name, host)| {
        // What an agent calls itself does not count, its certificate does.
        let mut info = host.info.clone()?;
        info.name = name.clone();
        Some(info)
    });
    infos.collect()
}

/// Those of them that take VMs.
fn taking(app: &App, hosts: &[HostInfo]) -> Outcome<Vec<HostInfo>> {
    let takes = |host: &&HostInfo| !app.drains.is_draining(&host.name);
    let taking: Vec<HostInfo> = hosts.iter().filter(takes).cloned().collect();
    if taking.is_empty() && !hosts.is_empty() {
        return refuse(
            ErrorCode::WrongState,
            "every host that answers is being emptied: end that with 'godwit host undrain HOST', or enrol another host",
        );
    }
    Ok(taking)
}

/// A start that may go ahead.
struct Plan {
    entry: VmEntry,
    host: HostName,
    resolved: VmSpec,
    held: Option<Place>,
}

/// Starts a VM where it is held, where it was asked for, or where there is room.
pub async fn start(app: &App, name: &VmName, request: &StartRequest) -> Outcome<Done> {
    let _turn = app.vm_lock(name).await;
    let plan = match plan_start(app, name, request) {
        // One refusal is shown as it is, several as one of preflight.
        Err(error)
            if matches!(error.code, ErrorCode::OutOfMemory | ErrorCode::Preflight)
                && ask_the_full(app, name, request).await =>
        {
            plan_start(app, name, request)?
        }
        plan => plan?,
    };
    let host = plan.host.clone();
    let agent = app.connected_agent(&host)?;
    let stays = plan.held.as_ref().is_some_and(|held| held.host == host);
    let result = match stays && keep_held(app, &agent, &plan).await? {
        true => agent.start(name).await.map(|_| ()).map_err(ApiError::from),
        false => start_granted(app, &agent, &plan).await,
    };
    refresh(app, &host).await;
    app.tell_vm(name);
    result.map_err(|error| error.on_host(&host))?;
    Ok(done(format!("VM {name} runs on host {host}.")))
}

/// Asks the hosts again that seem too full for a VM: what is known of their memory is up to a poll old, and nobody is
/// refused for what has been given back since. False when there is none.
async fn ask_the_full(app: &App, name: &VmName, request: &StartRequest) -> bool {
    let Ok(entry) = entry_of(app, name) else {
        return false;
    };
    let only = wanted_host(request, app.state().place(name).as_ref());
    let mut hosts = connected(app);
    hosts.retain(|host| {
        let may = match &only {
            Some(only) => *only == host.name,
            None => !app.drains.is_draining(&host.name),
        };
        may && !place::has_room(&entry.spec, host)
    });
    join_all(hosts.iter().map(|host| refresh(app, &host.name))).await;
    !hosts.is_empty()
}

/// The host that was named, else the one that holds the VM; without either the controller chooses.
fn wanted_host(request: &StartRequest, held: Option<&Place>) -> Option<HostName> {
    let held = || held.map(|held| held.host.clone());
    request.on.clone().or_else(held)
}

fn plan_start(app: &App, name: &VmName, request: &StartRequest) -> Outcome<Plan> {
    let entry = entry_of(app, name)?;
    must_be_off(app, name, "started")?;
    let held = app.state().place(name);
    if let Some(host) = &request.on {
        app.connected_agent(host)?;
    }
    let hosts = connected(app);
    let host = match wanted_host(request, held.as_ref()) {
        Some(host) => host,
        None => place::choose(&entry.spec, &taking(app, &hosts)?)?,
    };
    app.drains.must_take_vms(&host)?;
    let info = hosts
        .iter()
        .find(|info| info.name == host)
        .ok_or_else(|| unreachable_host(&host))?;
    let mut wish = entry.spec.clone();
    if let Some(resolved) = &entry.resolved {
        wish.machine.clone_from(&resolved.machine);
    }
    let mut lacking = place::lacks(&wish, info);
    if !place::has_room(&wish, info) {
        lacking.push(place::no_room(&wish, info));
    }
    if !lacking.is_empty() {
        return Err(place::joined(lacking));
    }
    let resolved = place::resolve(&wish, info, &hosts)?;
    Ok(Plan {
        entry,
        host,
        resolved,
        held,
    })
}

/// The host holds the right already: brings its description up to date. False when the host wants a new generation
/// for that (attempts to hand over have used some up that it does not hold).
async fn keep_held(app: &App, agent: &AgentClient, plan: &Plan) -> Outcome<bool> {
    let Some(known) = plan.held.as_ref().and_then(|held| held.vm.as_ref()) else {
        return Ok(false);
    };
    if known.spec != plan.resolved {
        let put = PutVm {
            spec: plan.resolved.clone(),
            generation: known.generation,
        };
        match agent.put_vm(&put).await {
            Ok(_) => {}
            Err(error) if error.code() == ErrorCode::WrongState => return Ok(false),
            Err(error) => return Err(ApiError::from(error).on_host(&plan.host)),
        }
    }
    save_resolved(app, plan).await?;
    Ok(true)
}

async fn save_resolved(app: &App, plan: &Plan) -> Outcome<()> {
    let entry = granted_entry(plan);
    app.store.save_vm(&entry).await?;
    app.state().vms.insert(entry.spec.name.clone(), entry);
    Ok(())
}

fn granted_entry(plan: &Plan) -> VmEntry {
    VmEntry {
        resolved: Some(plan.resolved.clone()),
        host: Some(plan.host.clone()),
        ..plan.entry.clone()
    }
}

/// Nobody holds it, or another host does and gives it up first.
async fn start_granted(app: &App, agent: &AgentClient, plan: &Plan) -> Outcome<()> {
    let name = &plan.entry.spec.name;
    must_all_be_heard(app, name)?;
    if let Some(held) = &plan.held {
        let old = app.connected_agent(&held.host)?;
        forget_at(&old, &held.host, name).await?;
        refresh(app, &held.host).await;
    }
    let generation = grant(app, plan).await?;
    let put = PutVm {
        spec: plan.resolved.clone(),
        generation,
    };
    let result = put_and_start(agent, &put).await;
    if let Err(error) = &result
        && !error.may_be_done()
    {
        take_back(app, agent, plan).await;
    }
    result.map_err(ApiError::from)
}

async fn put_and_start(agent: &AgentClient, put: &PutVm) -> Result<(), godwit_rpc::ClientError> {
    agent.put_vm(put).await?;
    agent.start(&put.spec.name).await?;
    Ok(())
}

fn must_all_be_heard(app: &App, name: &VmName) -> Outcome<()> {
    let unheard = app.state().unheard().next().cloned();
    match unheard {
        None => Ok(()),
        Some(host) => Err(ApiError::new(
            ErrorCode::HostUnreachable,
            format!("host {host} has not answered since the controller started and may hold VM {name}: bring it back, or, if it is powered off for good, run 'godwit host remove {host} --confirm-unreachable'"),
        )
        .on_host(&host)),
    }
}

/// Writes down that the host may take the VM, at a generation above every one ever seen.
async fn grant(app: &App, plan: &Plan) -> Outcome<Generation> {
    let name = &plan.entry.spec.name;
    let next = app.state().ledger.next(name);
    let generation = next.ok_or_else(|| {
        ApiError::new(
            ErrorCode::Internal,
            format!("VM {name} has no generation left"),
        )
    })?;
    let entry = granted_entry(plan);
    let grant = Grant {
        vm: name,
        generation,
        destination: &plan.host,
    };
    app.store.grant_start(&grant, &entry, now_unix_s()).await?;
    let mut state = app.state();
    state.ledger.see(name, generation);
    state.vms.insert(name.clone(), entry);
    Ok(generation)
}

/// A start that was refused leaves nothing behind at the host; the generation is used up.
async fn take_back(app: &App, agent: &AgentClient, plan: &Plan) {
    let name = &plan.entry.spec.name;
    if let Err(error) = forget_at(agent, &plan.host, name).await {
        tracing::warn!(vm = %name, host = %plan.host, %error, "the host keeps a VM that did not start");
        return;
    }
    let entry = VmEntry {
        host: None,
        ..plan.entry.clone()
    };
    if let Err(error) = app.store.save_vm(&entry).await {
        tracing::error!(vm = %name, %error, "cannot note that nobody holds a VM");
    }
    app.state().vms.insert(name.clone(), entry);
}

/// What a person may ask of a guest that is on.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    /// Ask it to power off, or force it.
    Stop(Force),
    /// Reset it.
    Reset,
    /// Stop its vCPUs.
    Pause,
    /// Let them go on.
    Resume,
}

/// Whether to force a stop.
#[derive(Debug, Clone, Copy)]
pub struct Force(pub bool);

/// Passes an action on to the host where the VM is.
pub async fn act(app: &App, name: &VmName, action: Action) -> Outcome<Done> {
    app.until_taken_over(name).await;
    let _turn = app.vm_lock(name).await;
    let place = app.place_of(name)?;
    let agent = app.connected_agent(&place.host)?;
    must_be_on(name, &place)?;
    let result = match action {
        Action::Stop(Force(force)) => agent.stop(name, &StopRequest { force }).await,
        Action::Reset => agent.reset(name).await,
        Action::Pause => agent.pause(name).await,
        Action::Resume => agent.resume(name).await,
    };
    refresh(app, &place.host).await;
    app.tell_vm(name);
    result.map_err(|error| ApiError::from(error).on_host(&place.host))
}

fn must_be_on(name: &VmName, place: &Place) -> Outcome<()> {
    match place.vm.as_ref().map(|vm| vm.state) {
        Some(VmState::Stopped | VmState::Crashed) | None => refuse(
            ErrorCode::WrongState,
            format!("VM {name} is not running: run 'godwit vm start {name}'"),
        ),
        Some(_) => Ok(()),
    }
}

/// The guest's serial console.
pub async fn console(app: &App, name: &VmName) -> Outcome<godwit_types::control_api::ConsoleText> {
    let place = app.place_of(name)?;
    let agent = app.connected_agent(&place.host)?;
    let text = agent.console(name).await;
    text.map_err(|error| ApiError::from(error).on_host(&place.host))
}

/// Settles an in-doubt VM at the host that shall run it, and tells the other one if it answers.
pub async fn resolve(app: &App, name: &VmName, request: &ResolveRequest) -> Outcome<Done> {
    let _turn = app.vm_lock(name).await;
    let state = view(app, name)?.state;
    if state != VmState::InDoubt {
        return refuse(
            ErrorCode::WrongState,
            format!("VM {name} is {state}, not in doubt: there is nothing to resolve"),
        );
    }
    let agent = app.connected_agent(&request.run_on)?;
    if let Some(fenced) = &request.confirm_fenced {
        check_fenced(name, request, fenced)?;
    }
    for other in hosts_with(app, name)
        .iter()
        .filter(|host| **host != request.run_on && !request.give_up)
    {
        if let Ok(agent) = app.connected_agent(other)
            && let Err(error) = agent.resolve(name, request).await
        {
            tracing::warn!(vm = %name, host = %other, %error, "cannot tell the other host how its VM was resolved");
        }
    }
    let result = agent.resolve(name, request).await;
    refresh(app, &request.run_on).await;
    app.tell_vm(name);
    result.map_err(|error| ApiError::from(error).on_host(&request.run_on))
}

fn check_fenced(name: &VmName, request: &ResolveRequest, fenced: &HostName) -> Outcome<()> {
    if *fenced == request.run_on {
        return refuse(
            ErrorCode::InvalidRequest,
            format!("host {fenced} cannot both run VM {name} and be fenced: name the other host"),
        );
    }
    Ok(())
}
