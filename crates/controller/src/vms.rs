//! Operations on VMs that are no migrations: create, edit, delete, start and the rest of their lives.
//!
//! Owns nothing; each takes the VM's lock. A host gets the right to run a VM only after every host that may hold it was
//! asked now and said no; the grant is in the database before a host hears of it. Refuses to leave anything behind when a
//! first start fails.

use crate::app::{App, unknown_vm};
use crate::error::{Outcome, refuse, silent, way_out};
use crate::macs;
use crate::placement::place::{self, WrittenOn};
use crate::reconcile::refresh;
use crate::state::{Place, VmEntry};
use crate::store::Added;
use crate::survey::{clear, must_be_newest, refused, survey};
use crate::uids;
use futures_util::future::join_all;
use godwit_rpc::AgentClient;
use godwit_rpc::pki::now_unix_s;
use godwit_site::{Book, Free, Refusal, Surveyed};
use godwit_types::control_api::{Done, StartRequest, StopRequest, VmView};
use godwit_types::host::HostInfo;
use godwit_types::host_api::PutVm;
use godwit_types::version::HARDWARE;
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName, VmSpec};

/// How often a host that holds a VM that is off is asked to give it up.
const RELEASES_MAX: usize = 3;

/// Says that something is done.
pub fn done(message: impl Into<String>) -> Done {
    Done {
        message: message.into(),
    }
}

fn check(spec: &VmSpec) -> Outcome<()> {
    spec.check_new()
        .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))
}

/// Describes a new VM; it is off.
pub async fn create(app: &App, spec: VmSpec) -> Outcome<VmView> {
    check(&spec)?;
    let name = spec.name.clone();
    let _turn = app.vm_lock(&name).await;
    let _macs = app.macs_turn().await;
    let exists = || {
        let message = format!(
            "there is a VM {name} already: choose another name, or change it with 'godwit vm edit {name}'"
        );
        ApiError::new(ErrorCode::AlreadyExists, message)
    };
    if app.state().vms.contains_key(&name) {
        return Err(exists());
    }
    let mut spec = macs::allot(spec, &app.state())?;
    uids::keep(&mut spec, None)?;
    uids::give(app, &mut spec).await?;
    spec.set_hardware(spec.hardware.or_else(|| newest_hardware(app)));
    let entry = VmEntry {
        spec,
        resolved: None,
    };
    if app.store.add_vm(&entry).await? == Added::Exists {
        return Err(exists());
    }
    app.state().vms.insert(name.clone(), entry);
    app.tell_vm(&name);
    view(app, &name)
}

/// The newest hardware that this controller and every enrolled host know: a new VM can run and move everywhere.
fn newest_hardware(app: &App) -> Option<u32> {
    let state = app.state();
    let hosts = state.hosts.values();
    let known = hosts.filter_map(|host| Some(host.info.as_ref()?.speaks.hardware.max));
    known.chain([HARDWARE.max]).min()
}

/// A VM as people see it.
pub fn view(app: &App, name: &VmName) -> Outcome<VmView> {
    app.state()
        .vm_view(name, now_unix_s())
        .ok_or_else(|| unknown_vm(name))
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
    let mut spec = macs::allot(spec, &app.state())?;
    uids::keep(&mut spec, Some(&entry.spec))?;
    uids::give(app, &mut spec).await?;
    spec.set_hardware(spec.hardware.or(entry.spec.hardware));
    let keeps_hardware = entry.spec.machine == spec.machine;
    entry.resolved = entry.resolved.filter(|_| keeps_hardware);
    entry.spec = spec;
    app.store.save_vm(&entry).await?;
    {
        let mut state = app.state();
        state.vms.insert(name.clone(), entry);
        state.lacking.remove(name);
    }
    app.tell_vm(name);
    view(app, name)
}

fn entry_of(app: &App, name: &VmName) -> Outcome<VmEntry> {
    let entry = app.state().vms.get(name).cloned();
    entry.ok_or_else(|| unknown_vm(name))
}

fn must_be_off(app: &App, name: &VmName, what: &str) -> Outcome<()> {
    let view = view(app, name)?;
    let asked_now = matches!(what, "started" | "deleted");
    match (view.state, view.host) {
        // What was heard is not enough to tell: the survey that follows will.
        (VmState::HandingOver, _) if asked_now && view.migration.is_none() => Ok(()),
        (VmState::Stopped | VmState::Crashed, _) if view.migration.is_some() => refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM {name} is migrating and can be {what} only when that has ended: cancel it with 'godwit migration cancel'"
            ),
        ),
        (VmState::Stopped | VmState::Crashed, _) => Ok(()),
        (VmState::InDoubt, _) => Err(crate::app::in_doubt(name, view.note)),
        // It was never heard to be on, and a new description is what is missing.
        (VmState::DamagedRecord, None) if what == "edited" && app.must_be_read(name).is_ok() => {
            Ok(())
        }
        (VmState::DamagedRecord, host) => {
            let error = crate::app::damaged(name, view.note);
            Err(match host {
                Some(host) => error.on_host(host),
                None => error,
            })
        }
        (VmState::RunningTwice, _) => Err(crate::app::held_twice(name, view.note)),
        (VmState::Unreachable, Some(host)) => Err(
            match app
                .of_host(&host, |host| host.is_connected())
                .unwrap_or(false)
            {
                true => crate::app::being_taken_over(name, &host),
                false => may_be_elsewhere(name, &host),
            },
        ),
        (VmState::Running, Some(host)) if what == "started" => refuse(
            ErrorCode::WrongState,
            format!("VM {name} is running already, on host {host}"),
        ),
        (state, _) => refuse(
            ErrorCode::WrongState,
            format!(
                "VM {name} is {state} and can be {what} only when stopped: run 'godwit vm stop {name}' first"
            ),
        ),
    }
}

/// A host that may run the VM does not answer.
fn may_be_elsewhere(name: &VmName, host: &HostName) -> ApiError {
    refused(Refusal::Silent {
        vm: name.clone(),
        hosts: vec![host.clone()],
    })
}

/// Deletes a VM that is off, everywhere.
pub async fn delete(app: &App, name: &VmName) -> Outcome<Done> {
    let turn = app.vm_lock(name).await;
    entry_of(app, name)?;
    must_be_off(app, name, "deleted")?;
    let mut free = None;
    for _ in 0..RELEASES_MAX {
        match survey(app, name, &[]).await? {
            Surveyed::Free(found) => {
                free = Some(found);
                break;
            }
            Surveyed::HeldBy { host, .. } if is_off_at(app, name, &host) => {
                release(app, name, &host).await?;
            }
            Surveyed::OlderCopy { host, .. } => release(app, name, &host).await?,
            held => return Err(not_free(name, held)),
        }
    }
    let free = free.ok_or_else(|| refused(Refusal::Stale { vm: name.clone() }))?;
    for host in hosts_with(app, name) {
        if let Ok(agent) = app.connected_agent(&host) {
            forget_at(&agent, &host, name).await?;
        }
    }
    let writer = app.turn_to_write().await;
    let deletion = app.state().book.delete(free).map_err(refused)?;
    let due = writer.due();
    if let Err(error) = app.store.delete_vm(name, due.rows()).await {
        drop(due);
        app.state().book.not_deleted(deletion);
        return Err(error.into());
    }
    due.written();
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
        entry.vms.remove(name);
    }
}

/// Hosts that answer and know the VM.
fn hosts_with(app: &App, name: &VmName) -> Vec<HostName> {
    let state = app.state();
    let with = |host: &crate::state::HostEntry| host.is_connected() && host.vms.contains_key(name);
    state
        .hosts
        .iter()
        .filter(|(_, host)| with(host))
        .map(|(name, _)| name.clone())
        .collect()
}

/// A host that holds a VM that is off gives it up.
pub async fn release(app: &App, name: &VmName, host: &HostName) -> Outcome<()> {
    let agent = app.connected_agent(host)?;
    forget_at(&agent, host, name).await?;
    refresh(app, host).await;
    Ok(())
}

/// Why a survey that did not find a VM free stands in the way.
fn not_free(name: &VmName, surveyed: Surveyed) -> ApiError {
    refused(match surveyed {
        Surveyed::Refused(refusal) => refusal,
        Surveyed::HeldBy { host, .. } | Surveyed::OlderCopy { host, .. } => Refusal::Held {
            vm: name.clone(),
            host,
        },
        Surveyed::Free(_) => Refusal::Stale { vm: name.clone() },
    })
}

/// Tells a host to forget a VM; that it does not know it is fine.
async fn forget_at(agent: &AgentClient, host: &HostName, name: &VmName) -> Outcome<()> {
    match agent.delete_vm(name).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == ErrorCode::UnknownVm => Ok(()),
        Err(error) => Err(ApiError::from(error).on_host(host)),
    }
}

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
    let plan = settled(app, plan).await?;
    let host = plan.host.clone();
    let result = begin(app, &plan).await;
    refresh(app, &host).await;
    app.tell_vm(name);
    // Another host may be in the way.
    result.map_err(|error| match error.host {
        Some(_) => error,
        None => error.on_host(&host),
    })?;
    Ok(done(format!("VM {name} runs on host {host}.")))
}

/// A VM starts with addresses and a user id that no other VM has: one of before there were any gets its own now.
async fn settled(app: &App, mut plan: Plan) -> Outcome<Plan> {
    let _macs = app.macs_turn().await;
    macs::must_be_alone(&plan.entry.spec, &app.state())?;
    let had = plan.entry.spec.uid;
    uids::give(app, &mut plan.entry.spec).await?;
    plan.resolved.uid = plan.entry.spec.uid;
    if plan.entry.spec.uid != had {
        app.store.save_vm(&plan.entry).await?;
        let name = plan.entry.spec.name.clone();
        app.state().vms.insert(name, plan.entry.clone());
    }
    Ok(plan)
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

/// Where the disks of a VM were written last, as the book knows it.
fn written_on(book: &Book, name: &VmName, is_named: bool) -> WrittenOn {
    let Some(entry) = book.entry(name).filter(|entry| !entry.deleted) else {
        return WrittenOn::Nowhere;
    };
    match &entry.holder {
        Some(host) if book.is_enrolled(host) => WrittenOn::Host(host.clone()),
        None if entry.held == Generation(0) => WrittenOn::Nowhere,
        _ => WrittenOn::Removed { is_named },
    }
}

fn plan_start(app: &App, name: &VmName, request: &StartRequest) -> Outcome<Plan> {
    let entry = entry_of(app, name)?;
    app.must_be_described(name)?;
    must_be_off(app, name, "started")?;
    check(&entry.spec)?;
    let (held, written) = {
        let state = app.state();
        let holds = |place: &Place| place.vm.as_ref().is_some_and(|vm| vm.holds());
        let written = written_on(&state.book, name, request.on.is_some());
        (state.place(name).filter(holds), written)
    };
    if let Some(host) = &request.on {
        app.connected_agent(host).map_err(way_out)?;
    }
    let hosts = connected(app);
    let host = match wanted_host(request, held.as_ref()) {
        Some(host) => host,
        None => place::choose(&entry.spec, &taking(app, &hosts)?)?,
    };
    app.drains.must_take_vms(&host)?;
    place::disks_are_there(&entry.spec, &written, &host)?;
    let info = hosts
        .iter()
        .find(|info| info.name == host)
        .ok_or_else(|| silent(&host))?;
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

/// Asks who may hold the VM, now, and starts it where it is held, or where nobody else does.
async fn begin(app: &App, plan: &Plan) -> Outcome<()> {
    let name = &plan.entry.spec.name;
    let agent = app.connected_agent(&plan.host)?;
    for _ in 0..RELEASES_MAX {
        match survey(app, name, std::slice::from_ref(&plan.host)).await? {
            Surveyed::Free(free) => return start_granted(app, &agent, plan, free).await,
            Surveyed::HeldBy {
                host, generation, ..
            } if host == plan.host => {
                if keep_held(app, &agent, plan, generation).await? {
                    return agent.start(name).await.map(|_| ()).map_err(ApiError::from);
                }
                release(app, name, &host).await?;
            }
            Surveyed::HeldBy { host, .. } if is_off_at(app, name, &host) => {
                release(app, name, &host).await?;
            }
            Surveyed::OlderCopy { host, .. } => release(app, name, &host).await?,
            other => return Err(not_free(name, other)),
        }
    }
    Err(refused(Refusal::Stale { vm: name.clone() }))
}

/// Whether a person, or the guest itself, has turned the VM off at the host that holds it.
pub fn is_stopped_at(app: &App, name: &VmName, host: &HostName) -> bool {
    let state = app.state();
    let place = state.place(name).filter(|place| place.host == *host);
    let vm = place.and_then(|place| place.vm);
    vm.is_some_and(|vm| vm.state == VmState::Stopped)
}

/// Whether the host that holds the VM has no guest of it.
pub fn is_off_at(app: &App, name: &VmName, host: &HostName) -> bool {
    let state = app.state();
    let place = state.place(name).filter(|place| place.host == *host);
    let vm = place.and_then(|place| place.vm);
    vm.is_some_and(|vm| matches!(vm.state, VmState::Stopped | VmState::Crashed))
}

/// The host holds the right already: brings its description up to date. False when the host wants a new generation
/// for that.
async fn keep_held(
    app: &App,
    agent: &AgentClient,
    plan: &Plan,
    generation: Generation,
) -> Outcome<bool> {
    let known = plan.held.as_ref().and_then(|held| held.vm.as_ref());
    if known.is_none_or(|known| known.spec != plan.resolved) {
        let put = PutVm {
            spec: plan.resolved.clone(),
            generation,
            expect: None,
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
        ..plan.entry.clone()
    }
}

/// Nobody holds it: grants it to the host, durably before the host hears of it, and starts it.
async fn start_granted(app: &App, agent: &AgentClient, plan: &Plan, free: Free) -> Outcome<()> {
    let granted = app.state().book.grant(free, &plan.host);
    let grant = granted.map_err(refused)?;
    let entry = granted_entry(plan);
    let due = app.due().await;
    app.store.grant_start(&entry, due.rows()).await?;
    due.written();
    app.state().vms.insert(entry.spec.name.clone(), entry);
    let put = PutVm {
        spec: plan.resolved.clone(),
        generation: grant.generation,
        expect: Some(grant.expect),
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

/// A start that was refused leaves nothing behind at the host; the generation is used up.
async fn take_back(app: &App, agent: &AgentClient, plan: &Plan) {
    let name = &plan.entry.spec.name;
    if let Err(error) = forget_at(agent, &plan.host, name).await {
        tracing::warn!(vm = %name, host = %plan.host, %error, "the host keeps a VM that did not start");
        return;
    }
    let only = std::collections::BTreeSet::from([plan.host.clone()]);
    if let Err(error) = clear(app, name, only).await {
        tracing::warn!(vm = %name, host = %plan.host, %error, "the host still counts as one that may hold the VM");
    }
    let entry = plan.entry.clone();
    if let Err(error) = app.store.save_vm(&entry).await {
        tracing::error!(vm = %name, %error, "cannot note how a VM is described");
    }
    app.state().vms.insert(name.clone(), entry);
}

/// What a person may ask of a guest that is on.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    /// Ask it to power off, or force it.
    Stop(Force),
    Reset,
    Pause,
    /// Let them go on.
    Resume,
    /// Have a VM process of the installed program take it over.
    Renew,
}

/// Whether to force a stop.
#[derive(Debug, Clone, Copy)]
pub struct Force(pub bool);

/// Passes an action on to the host where the VM is.
pub async fn act(app: &App, name: &VmName, action: Action) -> Outcome<Done> {
    app.until_taken_over(name).await;
    let _turn = app.vm_lock(name).await;
    let place = app.place_of(name).map_err(way_out)?;
    must_be_on(name, &place, action)?;
    act_at(app, name, &place.host, action).await
}

/// Has the copy of one host stopped, wherever else the VM may be.
pub async fn stop_at(app: &App, name: &VmName, host: &HostName, force: Force) -> Outcome<Done> {
    let _turn = app.vm_lock(name).await;
    act_at(app, name, host, Action::Stop(force)).await
}

async fn act_at(app: &App, name: &VmName, host: &HostName, action: Action) -> Outcome<Done> {
    let agent = app.connected_agent(host).map_err(way_out)?;
    if matches!(action, Action::Stop(_)) {
        app.state().book.order(name);
        // A stop is carried out also over a database that cannot be written.
        if let Err(error) = app.write().await {
            tracing::error!(vm = %name, %error, "cannot note that a VM is to be stopped");
        }
    }
    let asked = async {
        match action {
            Action::Stop(Force(force)) => agent.stop(name, &StopRequest { force }).await,
            Action::Reset => agent.reset(name).await,
            Action::Pause => agent.pause(name).await,
            Action::Resume => agent.resume(name).await,
            Action::Renew => agent.renew(name).await,
        }
    };
    let result = tokio::select! {
        result = asked => result,
        // Nobody waits a minute for a host that is gone, nor what comes next for this VM.
        () = app.until_lost(host) => return Err(lost_meanwhile(name, host)),
    };
    refresh(app, host).await;
    app.tell_vm(name);
    result.map_err(|error| way_out(refused_by(app, ApiError::from(error)).on_host(host)))
}

/// The host does not answer any more, and may have done what it was asked for.
fn lost_meanwhile(name: &VmName, host: &HostName) -> ApiError {
    let message = format!(
        "host {host} stopped answering while it was asked about VM {name}: whether that was done is not known; if host {host} lost its power, it boots what ran when it is back: look with 'godwit vm show {name}' then"
    );
    ApiError::new(ErrorCode::HostUnreachable, message).on_host(host)
}

/// A host refuses the commands of a controller with an old copy of its database, which knows better why.
fn refused_by(app: &App, error: ApiError) -> ApiError {
    match error.code {
        ErrorCode::StaleController => must_be_newest(app).err().unwrap_or(error),
        _ => error,
    }
}

fn must_be_on(name: &VmName, place: &Place, action: Action) -> Outcome<()> {
    match place.vm.as_ref().map(|vm| vm.state) {
        // Its host would boot it again: who stops it wants it off.
        Some(VmState::Crashed) if matches!(action, Action::Stop(_)) => Ok(()),
        Some(VmState::Stopped | VmState::Crashed) | None => refuse(
            ErrorCode::WrongState,
            format!("VM {name} is not running: run 'godwit vm start {name}'"),
        ),
        Some(_) => Ok(()),
    }
}

/// The guest's serial console: of the copy on one host, or where the VM is.
pub async fn console(
    app: &App,
    name: &VmName,
    host: Option<HostName>,
) -> Outcome<godwit_types::control_api::ConsoleText> {
    let host = match host {
        Some(host) => host,
        None => app.place_of(name).map_err(way_out)?.host,
    };
    let agent = app.connected_agent(&host).map_err(way_out)?;
    let text = agent.console(name).await;
    text.map_err(|error| ApiError::from(error).on_host(&host))
}
