//! VMs that are made as copies of others: the disks are copied by the host that holds the VM, then the clone is entered like any other VM.
//!
//! In this order, so that whoever dies leaves either no clone and no image under its name, or a clone that is off and whole:
//!
//! 1. The host copies all disks under names that only this attempt has (parts). Nobody knows of them, and later attempts remove them.
//! 2. The clone is described in the database, with disks that are to be made from those parts. From here on it is a VM: to start it, or to ask
//!    for the clone again, goes on with the rest.
//! 3. The host gives the parts their names, which nothing else has, durably.
//! 4. The clone is granted to the host, durably before the host hears of it, and told to it as a VM that is off.
//!
//! Owns which VM is being cloned under which name, as long as this controller lives: what is half-made says itself of what it is, by the number of its
//! attempt. Refuses: a name that is taken or is that of another clone, a VM that moves or that no host has, and descriptions that have changed since it was
//! begun.

use super::move_disks::{host_of, must_stay};
use super::{RELEASES_MAX, boots, check, done, entry_of, not_free};
use crate::app::App;
use crate::error::{Outcome, on_no_host, refuse, unknown_vm};
use crate::macs;
use crate::reconcile::refresh;
use crate::secret;
use crate::state::VmEntry;
use crate::store::Added;
use crate::survey::{must_be_newest, refused, survey};
use crate::uids;
use godwit_rpc::AgentClient;
use godwit_rpc::pki::now_unix_s;
use godwit_site::{Refusal, Surveyed};
use godwit_types::clones::{
    CloneDisks, CloneVm, Cloned, attempt_begun_unix_s, attempt_number, is_attempt_of,
};
use godwit_types::control_api::{DiskMaking, DisksMaking, Done};
use godwit_types::host_api::PutVm;
use godwit_types::text::listed;
use godwit_types::vm::InvalidVm;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, SnapshotName, VmName, VmSpec};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A clone whose host does not answer is taken to be under way for so long after somebody has asked for it.
const UNHEARD_MAX: Duration = Duration::from_secs(120);

/// Which VM is being cloned under which name.
#[derive(Debug, Default)]
pub struct Clones(Mutex<BTreeMap<VmName, Underway>>);

#[derive(Debug, Clone)]
struct Underway {
    of: VmName,
    snapshot: Option<SnapshotName>,
    host: HostName,
    asked: Instant,
}

impl Clones {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, Underway>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, making: &Making<'_>) {
        let underway = Underway {
            of: making.of.clone(),
            snapshot: making.snapshot.cloned(),
            host: making.host.clone(),
            asked: Instant::now(),
        };
        self.lock().insert(making.new.clone(), underway);
    }

    fn end(&self, new: &VmName) {
        self.lock().remove(new);
    }

    /// What is, or may be, under way under the name of this clone, and is another one.
    fn other(&self, making: &Making<'_>) -> Option<Underway> {
        let known = self.lock().get(making.new).cloned()?;
        let is_it = known.of == *making.of
            && known.snapshot.as_ref() == making.snapshot
            && known.host == making.host;
        (!is_it).then_some(known)
    }
}

/// Where the clone is made, and of whom.
struct Making<'a> {
    of: &'a VmName,
    snapshot: Option<&'a SnapshotName>,
    new: &'a VmName,
    host: HostName,
    agent: AgentClient,
}

/// Makes a VM that is as another one, or goes on with that.
pub async fn clone_vm(app: &App, name: &VmName, wish: &CloneVm) -> Outcome<Cloned> {
    wish.check(name)?;
    app.until_started().await;
    app.until_taken_over(name).await;
    // In one order, whoever is cloned as whom.
    let (first, second) = match *name < wish.new {
        true => (name, &wish.new),
        false => (&wish.new, name),
    };
    let _first = app.vm_turns.take(first).await;
    let _second = app.vm_turns.take(second).await;
    must_be_newest(app)?;
    must_stay(app, name)?;
    app.must_be_described(name)?;
    let source = entry_of(app, name)?;
    if app.state().place(name).is_none() {
        let instead = "create the other VM from a description of its own";
        return Err(on_no_host(name, Some(instead)));
    }
    let (host, agent) = host_of(app, name)?;
    let making = Making {
        of: name,
        snapshot: wish.snapshot.as_ref(),
        new: &wish.new,
        host,
        agent,
    };
    let known = app.state().vms.get(&wish.new).cloned();
    match known {
        Some(known) if known.spec.is_clone_in_part() => {
            let begun = must_be_half_of(&known.spec, &making)?;
            let mut cloned = finish(app, &making, known).await?;
            cloned.message.push_str(&begun);
            return Ok(cloned);
        }
        Some(_) => return Err(exists(&wish.new)),
        None => {}
    }
    app.drains.must_take_vms(&making.host)?;
    must_be_the_only_one(app, &making).await?;
    let number = new_attempt(&making)?;
    let wanted = described(app, &source, (&wish.new, &number)).await?;
    let asked = CloneDisks {
        spec: wanted.spec.clone(),
        snapshot: wish.snapshot.clone(),
        disks: images_of(&source.spec),
    };
    app.clones.begin(&making);
    let told = making.agent.clone_disks(name, &asked).await;
    let told = told.map_err(|error| {
        let error = ApiError::from(error).on_host(&making.host);
        if error.code != ErrorCode::HostUnreachable {
            app.clones.end(&wish.new);
        }
        error
    })?;
    let Some(copied) = told.whole else {
        return Ok(not_yet(&making, told.making));
    };
    app.clones.end(&wish.new);
    let entry = as_copied(wanted, &copied)?;
    let entry = enter(app, entry).await?;
    finish(app, &making, entry).await
}

/// Where its disks are that are copied, as it is described.
fn images_of(spec: &VmSpec) -> BTreeMap<String, String> {
    let disks = spec.disks.iter().filter(|disk| !disk.read_only);
    let images = disks.map(|disk| (disk.name.clone(), disk.path.clone()));
    images.collect()
}

fn new_attempt(making: &Making<'_>) -> Outcome<String> {
    let now = u64::try_from(now_unix_s()).unwrap_or(0);
    let random = secret::number()?;
    Ok(attempt_number(making.of, making.snapshot, now, random))
}

/// Two that are copied under one name do not have each other's, but only one of them can be made.
async fn must_be_the_only_one(app: &App, making: &Making<'_>) -> Outcome<()> {
    let Some(other) = app.clones.other(making) else {
        return Ok(());
    };
    let told = match app.connected_agent(&other.host) {
        Ok(agent) => agent.cloning(&other.of).await.ok(),
        Err(_) => None,
    };
    let goes_on = match told {
        Some(told) => told.making.is_some(),
        None => other.asked.elapsed() < UNHEARD_MAX,
    };
    if !goes_on {
        app.clones.end(making.new);
        return Ok(());
    }
    let (new, Underway { of, host, .. }) = (making.new, &other);
    let snapshot = other.snapshot.as_ref();
    let snapshot = snapshot.map_or_else(String::new, |name| format!(" at snapshot '{name}'"));
    refuse(
        ErrorCode::WrongState,
        format!(
            "VM '{new}' is just being made as a clone of VM '{of}'{snapshot} on host {host}: wait for that, call it off with 'godwit vm clone {of} --cancel', or give this clone another name"
        ),
    )
}

/// What was copied and has no names yet is finished for whoever wants the same. Returns what a person hears besides.
fn must_be_half_of(known: &VmSpec, making: &Making<'_>) -> Outcome<String> {
    let (of, new, number) = (making.of, making.new, known.attempt().unwrap_or_default());
    let now = u64::try_from(now_unix_s()).unwrap_or(0);
    let begun = attempt_begun_unix_s(number).unwrap_or(now);
    let minutes = now.saturating_sub(begun) / 60;
    if !is_attempt_of(number, of, making.snapshot) {
        return refuse(
            ErrorCode::AlreadyExists,
            format!(
                "there is a VM {new} already, a clone that was begun {minutes} minutes ago of another VM than '{of}', or as that was at another moment, and whose disks have no names yet: start it on the host that has copied them with 'godwit vm start {new} --on HOST', or delete it, or give this clone another name"
            ),
        );
    }
    Ok(match making.snapshot {
        Some(_) => String::new(),
        None => format!(
            "; its disks hold what those of VM '{of}' held when the clone was begun, {minutes} minutes ago"
        ),
    })
}

fn exists(name: &VmName) -> ApiError {
    let message = format!("there is a VM {name} already: give the clone another name");
    ApiError::new(ErrorCode::AlreadyExists, message)
}

fn invalid(error: InvalidVm) -> ApiError {
    ApiError::new(ErrorCode::InvalidVm, error.to_string())
}

/// The clone, with a user id and addresses that no other VM has now.
async fn described(
    app: &App,
    source: &VmEntry,
    (new, number): (&VmName, &str),
) -> Outcome<VmEntry> {
    let _macs = app.macs_turn().await;
    let spec = source.spec.cloned_as(new, number).map_err(invalid)?;
    check(&spec)?;
    boots(&spec)?;
    let mut spec = macs::allot(spec, &app.state())?;
    uids::give(app, &mut spec).await?;
    let resolved = source.resolved.as_ref();
    let resolved = resolved.map(|resolved| VmSpec {
        machine: resolved.machine.clone(),
        cpu: resolved.cpu.clone(),
        ..spec.clone()
    });
    Ok(VmEntry { spec, resolved })
}

/// The clone with the user id and the parts for which it was copied. It may have been begun with another description, by this controller or the one
/// before.
fn as_copied(wanted: VmEntry, copied: &VmSpec) -> Outcome<VmEntry> {
    let bare = |spec: &VmSpec| {
        let mut bare = spec.clone();
        bare.uid = None;
        bare.nics.iter_mut().for_each(|nic| nic.mac = None);
        bare
    };
    let name = wanted.spec.name.clone();
    let has_parts = wanted.spec.attempt().is_some() == copied.attempt().is_some();
    let number = copied.attempt().unwrap_or_default();
    let uid = copied.uid.or(wanted.spec.uid);
    let with = |spec: VmSpec| VmSpec {
        uid,
        ..spec.by_attempt(number)
    };
    let entry = VmEntry {
        spec: with(wanted.spec),
        resolved: wanted.resolved.map(with),
    };
    match has_parts && bare(&entry.spec) == bare(copied) {
        true => Ok(entry),
        false => refuse(
            ErrorCode::WrongState,
            format!(
                "the VM that was to be cloned as {name} was described otherwise since that was begun: give the command again"
            ),
        ),
    }
}

/// From here on it is a VM.
async fn enter(app: &App, mut entry: VmEntry) -> Outcome<VmEntry> {
    let _macs = app.macs_turn().await;
    let name = entry.spec.name.clone();
    // The id and the addresses may have been given out meanwhile.
    entry.spec = macs::allot(entry.spec, &app.state())?;
    uids::give(app, &mut entry.spec).await?;
    if let Some(resolved) = &mut entry.resolved {
        resolved.uid = entry.spec.uid;
        resolved.nics.clone_from(&entry.spec.nics);
    }
    if app.store.add_vm(&entry).await? == Added::Exists {
        return Err(exists(&name));
    }
    app.state().vms.insert(name.clone(), entry.clone());
    app.tell_vm(&name);
    Ok(entry)
}

/// Its disks get their names, and the host holds it, off.
async fn finish(app: &App, making: &Making<'_>, entry: VmEntry) -> Outcome<Cloned> {
    let on_host = |error: ApiError| match error.host {
        Some(_) => error,
        None => error.on_host(&making.host),
    };
    let named = making.agent.make_disks(&entry.spec).await;
    let DisksMaking { making: now } = named.map_err(|error| on_host(ApiError::from(error)))?;
    if now.is_some() {
        return Ok(not_yet(making, now));
    }
    let entry = VmEntry {
        spec: entry.spec.with_disks_made(),
        resolved: entry.resolved.map(VmSpec::with_disks_made),
    };
    let held = hold(app, making, &entry).await;
    refresh(app, &making.host).await;
    app.tell_vm(making.new);
    held.map_err(|error| on_host(is_there_all_the_same(making, error)))?;
    Ok(Cloned {
        message: made(making, &entry.spec),
        making: None,
    })
}

/// Grants it to the host, which holds it from then on, off.
async fn hold(app: &App, making: &Making<'_>, entry: &VmEntry) -> Outcome<()> {
    let (name, host) = (making.new, &making.host);
    for _ in 0..RELEASES_MAX {
        match survey(app, name, std::slice::from_ref(host)).await? {
            Surveyed::Free(free) => {
                let granted = app.state().book.grant(free, host);
                let grant = granted.map_err(refused)?;
                let due = app.due().await;
                app.store.grant_start(entry, due.rows()).await?;
                due.written();
                app.state().vms.insert(name.clone(), entry.clone());
                return put(making, entry, (grant.generation, Some(grant.expect))).await;
            }
            // Whoever granted it died before the end.
            Surveyed::HeldBy {
                host: holder,
                generation,
                ..
            } if holder == *host => {
                app.store.save_vm(entry).await?;
                app.state().vms.insert(name.clone(), entry.clone());
                return put(making, entry, (generation, None)).await;
            }
            Surveyed::Refused(Refusal::Stale { .. }) => {}
            other => return Err(not_free(name, other)),
        }
    }
    Err(refused(Refusal::Stale { vm: name.clone() }))
}

/// The description as it is until its first start, which chooses what is not resolved.
async fn put(
    making: &Making<'_>,
    entry: &VmEntry,
    (generation, expect): (Generation, Option<Generation>),
) -> Outcome<()> {
    let put = PutVm {
        spec: entry.resolved.clone().unwrap_or_else(|| entry.spec.clone()),
        generation,
        expect,
        images: Vec::new(),
    };
    let told = making.agent.put_vm(&put).await;
    told.map(drop).map_err(ApiError::from)
}

/// What a person does about a clone whose host could not be told of it.
fn is_there_all_the_same(making: &Making<'_>, mut error: ApiError) -> ApiError {
    let (new, host) = (making.new, &making.host);
    error.message.push_str(&format!(
        "; VM {new} and its disks on host {host} are there all the same: start it with 'godwit vm start {new} --on {host}'"
    ));
    error
}

fn not_yet(making: &Making<'_>, now: Option<DiskMaking>) -> Cloned {
    let (of, new, host) = (making.of, making.new, &making.host);
    let message = format!(
        "the disks of VM '{of}' are being copied for VM '{new}' on host {host}: run 'godwit vm clone {of} {new}' again to go on with that"
    );
    // A disk of nothing, where none is copied just now: who hears it asks again.
    let making = now.unwrap_or_else(|| DiskMaking {
        disk: String::new(),
        done_bytes: 0,
        total_bytes: 0,
    });
    Cloned {
        message,
        making: Some(making),
    }
}

/// What a person hears at the end; also what is as the other VM has it, and should not be.
fn made(making: &Making<'_>, spec: &VmSpec) -> String {
    let (of, new, host) = (making.of, making.new, &making.host);
    let mut said = format!("VM '{new}' is a clone of VM '{of}' on host {host}, and is off");
    let addresses = spec.told_addresses();
    if !addresses.is_empty() {
        said.push_str(&format!(
            "; its guest is told the same addresses ({}): give it others with 'godwit vm edit {new} FILE' before both run",
            listed(&addresses)
        ));
    }
    said
}

/// Has hosts remove what was copied for a clone that is deleted before its disks had their names. What cannot be removed now is removed by whoever
/// clones a VM under that name.
pub(super) async fn forget_parts(app: &App, spec: &VmSpec) {
    let hosts: Vec<HostName> = {
        let state = app.state();
        let connected = state.hosts.iter().filter(|(_, host)| host.is_connected());
        connected.map(|(name, _)| name.clone()).collect()
    };
    for host in hosts {
        let Ok(agent) = app.connected_agent(&host) else {
            continue;
        };
        if let Err(error) = agent.forget_clone(spec).await {
            tracing::warn!(%host, vm = %spec.name, %error, "what was copied for a clone may stay");
        }
    }
}

/// How far the disks are that are copied for a clone.
pub async fn cloning(app: &App, name: &VmName) -> Outcome<DisksMaking> {
    let (host, agent) = host_of(app, name)?;
    let told = agent.cloning(name).await;
    let told = told.map_err(|error| ApiError::from(error).on_host(&host))?;
    Ok(DisksMaking {
        making: told.making,
    })
}

/// No clone is made of it.
pub async fn cancel_clone(app: &App, name: &VmName) -> Outcome<Done> {
    if !app.state().vms.contains_key(name) {
        return Err(unknown_vm(name));
    }
    let (host, agent) = host_of(app, name)?;
    let called_off = agent.cancel_clone(name).await;
    called_off.map_err(|error| ApiError::from(error).on_host(&host))?;
    Ok(done(format!(
        "VM '{name}' is not cloned; nothing of a clone stays"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> VmSpec {
        let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 64\nhardware = 3\n[[nic]]\nport_group = \"vm\"\n[[disk]]\nname = \"root\"\npath = \"/srv/web-root.raw\"\n";
        VmSpec::from_toml(text).unwrap()
    }

    fn named(name: &str) -> VmName {
        VmName::new(name).unwrap()
    }

    fn clone(uid: u32, mac: &str) -> VmSpec {
        let number = attempt_number(&named("web"), None, 1_800_000_000, u64::from(uid));
        let mut clone = web().cloned_as(&named("web2"), &number).unwrap();
        clone.uid = Some(uid);
        clone.nics[0].mac = Some(mac.into());
        clone
    }

    #[test]
    fn a_clone_is_entered_with_the_id_for_which_it_was_copied_and_only_as_it_was_described() {
        let first = clone(1_879_048_192, "52:54:00:00:00:01");
        let later = clone(1_879_048_193, "52:54:00:00:00:02");
        let wanted = VmEntry {
            spec: later.clone(),
            resolved: Some(later.clone()),
        };
        let entry = as_copied(wanted.clone(), &first).unwrap();
        let resolved = entry.resolved.unwrap();
        assert_eq!((entry.spec.uid, resolved.uid), (first.uid, first.uid));
        assert_eq!(entry.spec.nics, later.nics);
        let parts = [&entry.spec, &resolved].map(|spec| spec.disks[0].from.clone());
        let copied = first.disks[0].from.clone();
        assert_eq!(parts, [copied.clone(), copied], "others' are not its own");
        let mut other = first;
        other.disks[0].path = "/elsewhere/web2-root.raw".into();
        let refused = as_copied(wanted, &other).unwrap_err();
        assert!(refused.message.contains("described otherwise"), "{refused}");
    }
}
