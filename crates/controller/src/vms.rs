//! Operations on VMs that are no migrations: create, edit, delete, start and the rest of their lives.
//!
//! Owns nothing; each takes the VM's lock. A host gets the right to run a VM only after every host that may hold it was
//! asked now and said no; the grant is in the database before a host hears of it. Refuses to leave anything behind when a
//! first start fails.

use crate::app::App;
use crate::error::{Outcome, refuse, unknown_vm, way_out};
use crate::former::Former;
use crate::macs;
use crate::reconcile::refresh;
use crate::state::{Place, VmEntry};
use crate::store::Added;
use crate::survey::{must_be_newest, refused, survey};
use crate::uids;
use godwit_rpc::AgentClient;
use godwit_rpc::pki::now_unix_s;
use godwit_site::{Book, Ran, Refusal, Surveyed};
use godwit_types::control_api::{Done, StopRequest, VmView};
use godwit_types::version::HARDWARE;
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName, VmSpec};
use std::fmt::{Display, Formatter};

mod cloned;
mod disk_orders;
mod disks;
mod move_disks;
mod snapshots;
mod start;

pub use cloned::{Clones, cancel_clone, clone_vm, cloning};
pub use disk_orders::{limit_disk, resize_disk};
pub use disks::{Makings, disks};
pub use move_disks::{cancel_disk_moves, disk_moves, move_disks};
pub use snapshots::{delete_snapshot, revert_snapshot, snapshots, take_snapshot};
pub use start::start;

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
    app.until_started().await;
    let name = spec.name.clone();
    let _turn = app.vm_turns.take(&name).await;
    let _macs = app.macs_turn().await;
    must_be_newest(app)?;
    let exists = || {
        let message = format!(
            "there is a VM {name} already: choose another name, or change it with 'godwit vm edit {name} FILE'"
        );
        ApiError::new(ErrorCode::AlreadyExists, message)
    };
    if app.state().vms.contains_key(&name) {
        return Err(exists());
    }
    let mut spec = macs::allot(spec, &app.state())?;
    uids::keep(&mut spec, None)?;
    uids::give_again(app, &mut spec).await?;
    spec.set_hardware(spec.hardware.or_else(|| newest_hardware(app)));
    boots(&spec)?;
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

fn boots(spec: &VmSpec) -> Outcome<()> {
    let boots = spec.check_boots();
    boots.map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))
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
    app.until_started().await;
    let _turn = app.vm_turns.take(name).await;
    let _macs = app.macs_turn().await;
    must_be_newest(app)?;
    let entry = entry_of(app, name)?;
    must_be_off(app, name, OffFor::Edit)?;
    let spec = spec.with_disks_known(&entry.spec);
    let spec = spec.map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
    let mut spec = macs::allot(spec, &app.state())?;
    uids::keep(&mut spec, Some(&entry.spec))?;
    uids::give(app, &mut spec).await?;
    spec.set_hardware(spec.hardware.or(entry.spec.hardware));
    boots(&spec)?;
    let entry = edited(entry, spec);
    app.store.save_vm(&entry).await?;
    {
        let mut state = app.state();
        state.vms.insert(name.clone(), entry);
        state.lacking.remove(name);
    }
    app.tell_vm(name);
    view(app, name)
}

/// A VM with a new description. What was resolved stays for as long as its machine does, but for what its guest is told: a password that a person
/// took out is nowhere any more.
fn edited(entry: VmEntry, spec: VmSpec) -> VmEntry {
    let keeps_hardware = entry.spec.machine == spec.machine;
    let resolved = entry.resolved.filter(|_| keeps_hardware);
    let resolved = resolved.map(|resolved| VmSpec {
        cloud_init: spec.cloud_init.clone(),
        ..resolved
    });
    VmEntry { spec, resolved }
}

fn entry_of(app: &App, name: &VmName) -> Outcome<VmEntry> {
    let entry = app.state().vms.get(name).cloned();
    entry.ok_or_else(|| unknown_vm(name))
}

/// What is done only to a VM that is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OffFor {
    Start,
    Edit,
    Delete,
}

impl Display for OffFor {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Start => "started",
            Self::Edit => "edited",
            Self::Delete => "deleted",
        })
    }
}

fn must_be_off(app: &App, name: &VmName, what: OffFor) -> Outcome<()> {
    let view = view(app, name)?;
    match (view.state, view.host) {
        // What was heard is not enough to tell: the survey that follows will.
        (VmState::HandingOver, _) if what != OffFor::Edit && view.migration.is_none() => Ok(()),
        (VmState::Stopped | VmState::Crashed, _) if view.migration.is_some() => refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM {name} is migrating and can be {what} only when that has ended: cancel it with 'godwit migration cancel'"
            ),
        ),
        (VmState::Stopped | VmState::Crashed, _) => Ok(()),
        (VmState::HandingOver, _) if let Some(id) = &view.migration => refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM {name} is migrating and can be {what} only when that has ended; if its source is off, end it with 'godwit migration cancel {id}'"
            ),
        ),
        (VmState::InDoubt, _) => Err(crate::error::in_doubt(name, view.note)),
        // It was never heard to be on, and a new description is what is missing.
        (VmState::DamagedRecord, None)
            if what == OffFor::Edit && app.must_be_read(name).is_ok() =>
        {
            Ok(())
        }
        (VmState::DamagedRecord, host) => {
            let error = crate::error::damaged(name, view.note);
            Err(match host {
                Some(host) => error.on_host(host),
                None => error,
            })
        }
        (VmState::RunningTwice, _) => Err(crate::error::held_twice(name, view.note)),
        (VmState::Unreachable, Some(host)) => Err(
            match app
                .of_host(&host, |host| host.is_connected())
                .unwrap_or(false)
            {
                true => crate::error::being_taken_over(name, &host, view.note),
                false => may_be_elsewhere(name, &host),
            },
        ),
        (VmState::Running, Some(host)) if what == OffFor::Start => refuse(
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
    let turn = app.vm_turns.take(name).await;
    let entry = entry_of(app, name)?;
    must_be_off(app, name, OffFor::Delete)?;
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
    let former = former(&app.state().book, &entry.spec);
    let deletion = app.state().book.delete(free).map_err(refused)?;
    let due = writer.due();
    if let Err(error) = app.store.delete_vm(name, former.as_ref(), due.rows()).await {
        drop(due);
        app.state().book.not_deleted(deletion);
        return Err(error.into());
    }
    due.written();
    forget_in_state(app, name);
    app.tell_vm(name);
    // UEFI variables with which a clone was to begin may be on a host that never heard of its start.
    if entry.spec.is_clone_in_part() || entry.spec.has_variables() {
        cloned::forget_parts(app, &entry.spec).await;
    }
    drop(turn);
    Ok(done(format!("VM '{name}' is deleted")))
}

/// What a VM that is described anew under its name goes on from; nothing of one that never ran.
fn former(book: &Book, spec: &VmSpec) -> Option<Former> {
    let Ran { holder, held } = book.ran(&spec.name);
    (held > Generation::default()).then_some(Former {
        uid: spec.uid,
        host: holder,
    })
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
    vm.is_some_and(|vm| vm.state.is_off())
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
    let forced = || match action {
        Action::Stop(Force(true)) => app.without_its_qemu_at(name),
        _ => None,
    };
    if forced().is_none() {
        app.until_taken_over(name).await;
    }
    let _turn = app.vm_turns.take(name).await;
    if let Some(host) = forced() {
        return act_at(app, name, &host, action).await;
    }
    let place = app.place_of(name).map_err(way_out)?;
    must_be_on(name, &place, action)?;
    act_at(app, name, &place.host, action).await
}

/// Has the copy of one host stopped, wherever else the VM may be.
pub async fn stop_at(app: &App, name: &VmName, host: &HostName, force: Force) -> Outcome<Done> {
    let _turn = app.vm_turns.take(name).await;
    act_at(app, name, host, Action::Stop(force)).await
}

async fn act_at(app: &App, name: &VmName, host: &HostName, action: Action) -> Outcome<Done> {
    let agent = app.connected_agent(host).map_err(way_out)?;
    if matches!(action, Action::Stop(_)) {
        // It takes a word, which must not overtake one that an old copy of the database lacks.
        app.until_started().await;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_that_is_edited_out_of_a_description_is_in_none_of_its_copies() {
        let told = |cloud_init: &str, machine: &str| {
            let text = format!(
                "name = \"web\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\nmachine = \"{machine}\"\n{cloud_init}"
            );
            VmSpec::from_toml(&text).unwrap()
        };
        let secret = told("[cloud_init]\nuser_data = \"#!secret\"\n", "q35");
        let started = VmSpec {
            machine: "pc-q35-7.2".into(),
            ..secret.clone()
        };
        let entry = VmEntry {
            spec: secret,
            resolved: Some(started),
        };
        let without = told("", "q35");
        let after = edited(entry.clone(), without.clone());
        let resolved = after.resolved.unwrap();
        assert_eq!((after.spec, &resolved.cloud_init), (without, &None));
        assert_eq!(resolved.machine, "pc-q35-7.2");
        let other = edited(entry, told("", "pc-q35-7.1"));
        assert_eq!(other.resolved, None);
    }
}
