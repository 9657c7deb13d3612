//! Powering a VM on: where it may run, the survey and the grant before it, and what is taken back when it fails.
//!
//! Owns no state; the book is the inventory's. Refuses: a start without a grant, a host that is silent or full.

use super::disks::{make_disks, not_yet};
use super::{
    OffFor, RELEASES_MAX, check, entry_of, forget_at, is_off_at, must_be_off, not_free, release,
};
use crate::app::App;
use crate::error::{Outcome, refuse, silent, way_out};
use crate::former::Former;
use crate::macs;
use crate::placement::place;
use crate::placement::written::{WrittenOn, disks_are_there, goes_on_at};
use crate::reconcile::refresh;
use crate::state::{Place, VmEntry};
use crate::survey::{clear, refused, survey};
use crate::uids;
use futures_util::future::join_all;
use godwit_rpc::{AgentClient, ClientError};
use godwit_site::{Book, Free, Grant, Refusal, Surveyed};
use godwit_types::control_api::{StartRequest, Started};
use godwit_types::host::HostInfo;
use godwit_types::host_api::PutVm;
use godwit_types::image::KnownImage;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName, VmSpec};

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

/// What the enrolled hosts that do not answer said last, and the names of those that were never heard.
fn unheard(app: &App) -> (Vec<HostInfo>, Vec<HostName>) {
    let state = app.state();
    let (mut told, mut never) = (Vec::new(), Vec::new());
    for (name, host) in state.hosts.iter().filter(|(_, host)| !host.is_connected()) {
        match host.info.clone() {
            Some(mut info) => {
                info.name = name.clone();
                told.push(info);
            }
            None => never.push(name.clone()),
        }
    }
    (told, never)
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
pub(super) struct Plan {
    pub(super) entry: VmEntry,
    pub(super) host: HostName,
    pub(super) resolved: VmSpec,
    pub(super) held: Option<Place>,
    /// The images of disks of it that were made on the host: no other one has them.
    pub(super) made: Vec<String>,
    /// Whether the host was taken since the deleted VM of its name ran there last.
    goes_on: bool,
    /// Hosts that were not regarded when the VM's CPU model was chosen.
    left_out: Vec<HostName>,
}

impl Plan {
    /// Told to who starts the VM: it may not be able to move there.
    fn caveat(&self) -> String {
        if self.entry.spec.cpu != "auto" || self.left_out.is_empty() {
            return String::new();
        }
        let names: Vec<&str> = self.left_out.iter().map(HostName::as_str).collect();
        let (hosts, do_not_answer) = match names.len() {
            1 => ("host", "does not answer"),
            _ => ("hosts", "do not answer"),
        };
        format!(
            "; its CPU model {} was chosen without regard to {hosts} {}, which {do_not_answer}: it may not be able to move there",
            self.resolved.cpu,
            names.join(", ")
        )
    }
}

/// Starts a VM where it is held, where it was asked for, or where there is room.
pub async fn start(app: &App, name: &VmName, request: &StartRequest) -> Outcome<Started> {
    let _turn = app.vm_turns.take(name).await;
    let former = app.store.former_vm(name).await?;
    let plan_start = || plan_start(app, (name, former.as_ref()), request);
    let plan = match plan_start() {
        // One refusal is shown as it is, several as one of preflight.
        Err(error)
            if matches!(
                error.code,
                ErrorCode::OutOfMemory | ErrorCode::Preflight | ErrorCode::WrongState
            ) && ask_the_full(app, name, request).await =>
        {
            plan_start()?
        }
        plan => plan?,
    };
    let mut plan = settled(app, plan).await?;
    let host = plan.host.clone();
    let goes_on = plan.goes_on;
    if let Some(making) = make_disks(app, &mut plan).await? {
        return Ok(not_yet(name, &host, making));
    }
    let result = begin(app, &plan).await;
    refresh(app, &host).await;
    app.tell_vm(name);
    // Another host may be in the way.
    result.map_err(|error| {
        let error = why_there(error, name, goes_on);
        match error.host {
            Some(_) => error,
            None => error.on_host(&host),
        }
    })?;
    Ok(Started {
        message: format!("VM '{name}' runs on host {host}{}", plan.caveat()),
        making: None,
    })
}

/// Nobody has named this host.
fn why_there(mut error: ApiError, vm: &VmName, goes_on: bool) -> ApiError {
    if goes_on {
        error.message.push_str(&format!(
            "; this host was chosen since a VM {vm} that was deleted ran there last, and has its images: 'godwit vm start {vm} --on HOST' names another one"
        ));
    }
    error
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

/// Asks the hosts again that seem too full for a VM, or closed: what is known of them is up to a poll old, and nobody is
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
        may && (host.closing || !place::has_room(&entry.spec, host))
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
fn written_on(
    book: &Book,
    (name, former): (&VmName, Option<&Former>),
    is_named: bool,
) -> WrittenOn {
    let ran = book.ran(name);
    match ran.holder {
        Some(host) if book.is_enrolled(&host) => WrittenOn::Host(host),
        None if ran.held == Generation(0) => former.map_or(WrittenOn::Nowhere, |former| {
            let host = former.host.clone().filter(|host| book.is_enrolled(host));
            WrittenOn::Former { host, is_named }
        }),
        _ => WrittenOn::Removed { is_named },
    }
}

fn plan_start(
    app: &App,
    (name, former): (&VmName, Option<&Former>),
    request: &StartRequest,
) -> Outcome<Plan> {
    let entry = entry_of(app, name)?;
    app.must_be_described(name)?;
    must_be_off(app, name, OffFor::Start)?;
    check(&entry.spec)?;
    let (held, written) = {
        let state = app.state();
        let holds = |place: &Place| place.vm.as_ref().is_some_and(|vm| vm.holds());
        let written = written_on(&state.book, (name, former), request.on.is_some());
        (state.place(name).filter(holds), written)
    };
    if let Some(host) = &request.on {
        app.connected_agent(host).map_err(way_out)?;
    }
    let hosts = connected(app);
    let mut goes_on = false;
    let host = match wanted_host(request, held.as_ref()) {
        Some(host) => host,
        None => match app.makings.host_of(name) {
            // What was begun there goes on there.
            Some(host) => host,
            None => match goes_on_at(&entry.spec, &written) {
                Some(host) if app.connected_agent(host).is_ok() => {
                    goes_on = true;
                    host.clone()
                }
                _ => place::choose(&entry.spec, &taking(app, &hosts)?)?,
            },
        },
    };
    let taken = app.drains.must_take_vms(&host);
    taken.map_err(|error| why_there(error, name, goes_on))?;
    disks_are_there(&entry.spec, &written, &host)?;
    let info = hosts
        .iter()
        .find(|info| info.name == host)
        .ok_or_else(|| silent(&host))?;
    let mut wish = entry.spec.clone();
    if let Some(resolved) = &entry.resolved {
        wish.machine.clone_from(&resolved.machine);
    }
    let mut lacking = Vec::from_iter(place::closed(info));
    lacking.extend(place::lacks(&wish, info));
    if !place::has_room(&wish, info) {
        lacking.push(place::no_room(&wish, info));
    }
    if !lacking.is_empty() {
        return Err(why_there(place::joined(lacking), name, goes_on));
    }
    let (silent, never_heard) = unheard(app);
    let (resolved, mut left_out) = place::resolve_for_all(&wish, info, &hosts, &silent)?;
    left_out.extend(never_heard);
    Ok(Plan {
        entry,
        host,
        resolved,
        held,
        made: Vec::new(),
        goes_on,
        left_out,
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

/// The host holds the right already: brings its description up to date. False when the host wants a new generation
/// for that.
async fn keep_held(
    app: &App,
    agent: &AgentClient,
    plan: &Plan,
    generation: Generation,
) -> Outcome<bool> {
    let known = plan.held.as_ref().and_then(|held| held.vm.as_ref());
    let is_known = known.is_some_and(|known| known.spec == plan.resolved);
    let name = &plan.entry.spec.name;
    let images = app.state().book.images(name);
    let is_told = known.is_some_and(|known| is_told(&plan.resolved, &images, &known.images));
    let is_unread = has_unread(app, &plan.host, name);
    // What its VM process still knows may be damaged on the host's disk.
    if !is_known || !is_told || is_unread {
        let put = PutVm {
            spec: plan.resolved.clone(),
            generation,
            expect: None,
            images,
        };
        match agent.put_vm(&put).await {
            Ok(_) => {}
            // Its record cannot be read, and not its description: its process, which goes on, knows both.
            Err(_) if is_known && is_unread => {}
            Err(error) if error.code() == ErrorCode::WrongState => return Ok(false),
            Err(error) => return Err(ApiError::from(error).on_host(&plan.host)),
        }
    }
    save_resolved(app, plan).await?;
    Ok(true)
}

/// Whether a host knows all of the images of a VM's shared disks that the book does.
fn is_told(vm: &VmSpec, images: &[KnownImage], told: &[KnownImage]) -> bool {
    let shared = vm.disks.iter().filter(|disk| disk.changes_hands());
    let mut known = shared.filter_map(|disk| images.iter().find(|image| image.disk == disk.name));
    known.all(|image| {
        let mut told = told.iter().filter(|told| told.disk == image.disk);
        told.any(|told| !image.is_newer_than(told))
    })
}

/// Whether a host says that it cannot read what it has of a VM.
fn has_unread(app: &App, host: &HostName, vm: &VmName) -> bool {
    let state = app.state();
    let said = state.hosts.get(host).and_then(|entry| entry.info.as_ref());
    said.is_some_and(|info| info.unread.contains_key(vm))
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
    let name = &plan.entry.spec.name;
    let put = PutVm {
        spec: plan.resolved.clone(),
        generation: grant.generation,
        expect: Some(grant.expect),
        images: app.state().book.images(name),
    };
    let Err(Failed { error, never_ran }) = put_and_start(agent, &put).await else {
        return Ok(());
    };
    let is_gone = !error.may_be_done() && take_back(app, agent, plan).await;
    let mut error = ApiError::from(error);
    if is_gone && never_ran {
        match plan.made.is_empty() {
            true => note_nothing_began(app, &grant).await,
            false => error.message.push_str(&keeps_what_was_made(plan)),
        }
    }
    Err(error)
}

/// What becomes of disks that were made for a start that failed: nobody else has them, and nobody has used them.
fn keeps_what_was_made(plan: &Plan) -> String {
    let (vm, host, made) = (&plan.entry.spec.name, &plan.host, plan.made.join(", "));
    format!(
        "; what was made for it on host {host} ({made}) stays there, and its next start there goes on with that: to begin on another host, delete the VM with 'godwit vm delete {vm}', which removes no image, create it again, and name that host with --on"
    )
}

/// A start that failed.
struct Failed {
    error: ClientError,
    /// Whether it is certain that its guest was not let run by it.
    never_ran: bool,
}

async fn put_and_start(agent: &AgentClient, put: &PutVm) -> Result<(), Failed> {
    // Nobody but who grants a VM has it started.
    let not_asked = |error| Failed {
        error,
        never_ran: true,
    };
    agent.put_vm(put).await.map_err(not_asked)?;
    let started = agent.start(&put.spec.name).await;
    started.map(drop).map_err(|error| Failed {
        never_ran: match &error {
            ClientError::Refused(refusal) => refusal.not_begun,
            ClientError::NotReached { .. } => true,
            _ => false,
        },
        error,
    })
}

/// A start that was refused leaves nothing behind at the host; the generation is used up. Returns whether the host has let
/// the VM go.
async fn take_back(app: &App, agent: &AgentClient, plan: &Plan) -> bool {
    let name = &plan.entry.spec.name;
    if let Err(error) = forget_at(agent, &plan.host, name).await {
        tracing::warn!(vm = %name, host = %plan.host, %error, "the host keeps a VM that did not start");
        return false;
    }
    let only = std::collections::BTreeSet::from([plan.host.clone()]);
    let cleared = clear(app, name, only).await;
    if let Err(error) = &cleared {
        tracing::warn!(vm = %name, host = %plan.host, %error, "the host still counts as one that may hold the VM");
    }
    let entry = plan.entry.clone();
    if let Err(error) = app.store.save_vm(&entry).await {
        tracing::error!(vm = %name, %error, "cannot note how a VM is described");
    }
    app.state().vms.insert(name.clone(), entry);
    cleared.is_ok()
}

/// The VM may start wherever it might have before that grant.
async fn note_nothing_began(app: &App, grant: &Grant) {
    app.state().book.nothing_began(grant);
    if let Err(error) = app.write().await {
        tracing::warn!(vm = %grant.vm, %error, "cannot note that nothing of a VM began");
    }
}
