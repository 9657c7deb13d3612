//! VMs that are made as copies of others: the disks are copied by the host that holds the VM, then the clone is entered like any other VM.
//!
//! In this order, so that whoever dies leaves either no clone and no image under its name, or a clone that is off and whole:
//!
//! 1. The host copies all disks under names of their own (parts). Nobody knows of them, and the next attempt removes them.
//! 2. The clone is described in the database, with disks that are to be made from those parts. From here on it is a VM: to start it, or to ask
//!    for the clone again, goes on with the rest.
//! 3. The host gives the parts their names, which nothing else has, durably.
//! 4. The clone is granted to the host, durably before the host hears of it, and told to it as a VM that is off.
//!
//! Owns nothing. Refuses: a name that is taken, a VM that moves or that no host has, and descriptions that have changed since it was begun.

use super::move_disks::{host_of, must_stay};
use super::{RELEASES_MAX, boots, check, done, entry_of, not_free};
use crate::app::App;
use crate::error::{Outcome, refuse, unknown_vm};
use crate::macs;
use crate::reconcile::refresh;
use crate::state::VmEntry;
use crate::store::Added;
use crate::survey::{must_be_newest, refused, survey};
use crate::uids;
use godwit_rpc::AgentClient;
use godwit_site::{Refusal, Surveyed};
use godwit_types::clones::{CloneDisks, CloneVm, Cloned};
use godwit_types::control_api::{DiskMaking, DisksMaking, Done};
use godwit_types::host_api::PutVm;
use godwit_types::text::listed;
use godwit_types::vm::InvalidVm;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName, VmSpec};

/// Where the clone is made, and of whom.
struct Making<'a> {
    of: &'a VmName,
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
        let message = format!(
            "no host has VM {name} yet, and its disks hold nothing: start it first, or create the other VM from a description of its own"
        );
        return refuse(ErrorCode::WrongState, message);
    }
    let (host, agent) = host_of(app, name)?;
    let making = Making {
        of: name,
        new: &wish.new,
        host,
        agent,
    };
    let known = app.state().vms.get(&wish.new).cloned();
    match known {
        Some(known) if known.spec.is_clone_in_part() => return finish(app, &making, known).await,
        Some(_) => return Err(exists(&wish.new)),
        None => {}
    }
    app.drains.must_take_vms(&making.host)?;
    let wanted = described(app, &source, &wish.new).await?;
    let asked = CloneDisks {
        spec: wanted.spec.clone(),
        snapshot: wish.snapshot.clone(),
    };
    let told = making.agent.clone_disks(name, &asked).await;
    let told = told.map_err(|error| ApiError::from(error).on_host(&making.host))?;
    let Some(copied) = told.whole else {
        return Ok(not_yet(&making, told.making));
    };
    let entry = as_copied(wanted, &copied)?;
    let entry = enter(app, entry).await?;
    finish(app, &making, entry).await
}

fn exists(name: &VmName) -> ApiError {
    let message = format!("there is a VM {name} already: give the clone another name");
    ApiError::new(ErrorCode::AlreadyExists, message)
}

fn invalid(error: InvalidVm) -> ApiError {
    ApiError::new(ErrorCode::InvalidVm, error.to_string())
}

/// The clone, with a user id and addresses that no other VM has now.
async fn described(app: &App, source: &VmEntry, new: &VmName) -> Outcome<VmEntry> {
    let _macs = app.macs_turn().await;
    let spec = source.spec.cloned_as(new).map_err(invalid)?;
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

/// The clone with the user id for which it was copied. It may have been begun with another description, by this controller or the one before.
fn as_copied(wanted: VmEntry, copied: &VmSpec) -> Outcome<VmEntry> {
    let bare = |spec: &VmSpec| {
        let mut bare = spec.clone();
        bare.uid = None;
        bare.nics.iter_mut().for_each(|nic| nic.mac = None);
        bare
    };
    if bare(&wanted.spec) != bare(copied) {
        return refuse(
            ErrorCode::WrongState,
            format!(
                "the VM that was to be cloned as {} was described otherwise since that was begun: give the command again",
                wanted.spec.name
            ),
        );
    }
    let uid = copied.uid.or(wanted.spec.uid);
    let with = |spec: VmSpec| VmSpec { uid, ..spec };
    Ok(VmEntry {
        spec: with(wanted.spec),
        resolved: wanted.resolved.map(with),
    })
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

    fn clone(uid: u32, mac: &str) -> VmSpec {
        let mut clone = web().cloned_as(&VmName::new("web2").unwrap()).unwrap();
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
        let mut other = first;
        other.disks[0].path = "/elsewhere/web2-root.raw".into();
        let refused = as_copied(wanted, &other).unwrap_err();
        assert!(refused.message.contains("described otherwise"), "{refused}");
    }
}
