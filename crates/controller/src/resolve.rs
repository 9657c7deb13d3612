//! Ends what only a person can end: a VM in doubt, a gift that the site went on without, a VM that several hosts hold, and
//! a host that is off.
//!
//! Owns nothing; each takes the VM's lock. A host that answers is asked for a durable no, which is a proof; only of a
//! silent one a person's word is taken. Refuses to let an older copy run on, and to end a copy that nobody named.

use crate::app::App;
use crate::error::{Outcome, refuse, way_out};
use crate::reconcile::refresh;
use crate::removed;
use crate::survey::{claim_now, clear, refused};
use crate::vms::{done, release, view};
use godwit_rpc::AgentClient;
use godwit_site::{KeptGift, SinceGift};
use godwit_types::control_api::{Done, KeepRequest, ResolveRequest, StopRequest};
use godwit_types::site::{Claim, GiftOvertaken, Standing};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::BTreeSet;

/// Settles an in-doubt VM at the host that shall run it, or that shall give it up.
pub async fn resolve(app: &App, name: &VmName, request: &ResolveRequest) -> Outcome<Done> {
    app.until_started().await;
    let _turn = app.vm_turns.take(name).await;
    if request.give_up {
        let unsure = app.state().book.unsure_since(name, &request.run_on);
        if let Some(holder) = unsure {
            claim_now(app, name, &holder).await?;
        }
        let kept = app.state().book.kept_gift(name, &request.run_on);
        if let Some(kept) = kept {
            return discard_gift(app, &kept, request.confirm_fenced.as_ref()).await;
        }
    }
    let state = view(app, name)?.state;
    if state != VmState::InDoubt {
        return refuse(
            ErrorCode::WrongState,
            format!("VM {name} is {state}, not in doubt: there is nothing to resolve"),
        );
    }
    let agent = app.connected_agent(&request.run_on).map_err(way_out)?;
    if let Some(other) = &request.confirm_fenced {
        must_be_another(name, request, other)?;
        refresh(app, other).await;
        let answers = app.state().book.answers(other);
        match answers {
            true => have_it_say_no(app, name, request, other).await?,
            // One that is gone for good needs no further word; its agent, if it runs, is refused everywhere.
            false if app.removed().contains(other) => {}
            false => take_word(app, other).await?,
        }
    }
    if !request.give_up {
        let off = request.confirm_fenced.as_ref();
        let may = app.state().book.may_run_on(name, &request.run_on, off);
        may.map_err(refused)?;
    }
    let result = agent.resolve(name, request).await;
    refresh(app, &request.run_on).await;
    app.tell_vm(name);
    result.map_err(|error| ApiError::from(error).on_host(&request.run_on))
}

/// A person gives up what a host gave away, with its guest, where the site went on without it. A holder is asked anew, and
/// one that is off is to be named, since what stands here may then be the only copy that is left.
async fn discard_gift(app: &App, kept: &KeptGift, off: Option<&HostName>) -> Outcome<Done> {
    let (name, host) = (&kept.vm, &kept.host);
    match &kept.since {
        SinceGift::Lost { with, .. } if off != Some(with) => {
            return refuse(ErrorCode::WrongState, kept.to_string());
        }
        SinceGift::Held { by, .. } => drop(claim_now(app, name, by).await?),
        SinceGift::Lost { .. } | SinceGift::LetGo { .. } | SinceGift::Deleted { .. } => {
            app.write().await?;
        }
    }
    let now = app.state().book.since_gift(name, host);
    if now.as_ref() != Some(&kept.since) {
        return refuse(
            ErrorCode::WrongState,
            format!(
                "who holds VM {name} has changed meanwhile: nothing is given up on host {host}, see 'godwit vm show {name}'"
            ),
        );
    }
    let by = kept.since.at();
    tracing::warn!(vm = %name, %host, %by, "a person has the host give up what it gave away");
    let with_guest = true;
    tell_overtaken(app, name, host, GiftOvertaken { by, with_guest }).await?;
    Ok(done(format!(
        "Host {host} has given up what it had of VM {name}."
    )))
}

/// Has a host give up what it gave away before the VM went on without it, unless it has a guest of it; looks once more
/// whether that is so, under the VM's turn.
pub async fn settle_gift(app: &App, name: &VmName, host: &HostName) -> Outcome<()> {
    let Some(by) = app.state().book.overtaken_gift(name, host) else {
        return Ok(());
    };
    app.write().await?;
    let with_guest = false;
    tell_overtaken(app, name, host, GiftOvertaken { by, with_guest }).await?;
    tracing::info!(vm = %name, %host, %by, "the host gives up what it gave away before the VM went on without it");
    Ok(())
}

/// The host leaves the set of those that may hold the VM with it, now or when somebody needs to know.
async fn tell_overtaken(
    app: &App,
    name: &VmName,
    host: &HostName,
    overtaken: GiftOvertaken,
) -> Outcome<()> {
    let agent = app.connected_agent(host).map_err(way_out)?;
    let given_up = agent.gift_overtaken(name, &overtaken).await;
    given_up.map_err(|error| ApiError::from(error).on_host(host))?;
    refresh(app, host).await;
    if let Err(error) = clear(app, name, BTreeSet::from([host.clone()])).await {
        tracing::info!(vm = %name, %host, %error, "the host still counts as one that may hold the VM");
    }
    app.tell_vm(name);
    Ok(())
}

fn must_be_another(name: &VmName, request: &ResolveRequest, fenced: &HostName) -> Outcome<()> {
    if *fenced == request.run_on {
        return refuse(
            ErrorCode::InvalidRequest,
            format!("host {fenced} cannot both run VM {name} and be fenced: name the other host"),
        );
    }
    Ok(())
}

/// The other host is silent: a person says that it is off, which holds until it is heard.
async fn take_word(app: &App, host: &HostName) -> Outcome<()> {
    app.state().book.fence(host).map_err(refused)?;
    if let Err(error) = app.write().await {
        app.state().book.not_fenced(host);
        return Err(error.into());
    }
    tracing::warn!(%host, "a person says that the host is off");
    app.tell_host(host);
    Ok(())
}

/// The other host answers, so its durable no takes the place of a person's word.
async fn have_it_say_no(
    app: &App,
    name: &VmName,
    request: &ResolveRequest,
    other: &HostName,
) -> Outcome<()> {
    let mut claim = claim_now(app, name, other).await?;
    match claim {
        Claim::Promised { .. } if !request.give_up => {
            let gives_up = ResolveRequest {
                run_on: other.clone(),
                give_up: true,
                confirm_fenced: Some(request.run_on.clone()),
            };
            let agent = app.connected_agent(other).map_err(way_out)?;
            let given_up = agent.resolve(name, &gives_up).await;
            given_up.map_err(|error| ApiError::from(error).on_host(other))?;
            claim = claim_now(app, name, other).await?;
        }
        // The source ran on: what the destination has is void.
        Claim::Holds { .. } if request.give_up => return Ok(()),
        _ => {}
    }
    match claim {
        Claim::No | Claim::Moved { .. } => Ok(()),
        _ => Err(ApiError::new(
            ErrorCode::WrongState,
            format!(
                "host {other} answers and may run VM {name}: it ends by itself when the two hosts reach each other; power {other} off first to decide otherwise"
            ),
        )
        .on_host(other)),
    }
}

/// Of a VM that several hosts hold, keeps the copy of one host and ends the others.
pub async fn keep(app: &App, name: &VmName, request: &KeepRequest) -> Outcome<Done> {
    let _turn = app.vm_turns.take(name).await;
    let view = view(app, name)?;
    if !view.copies.contains(&request.host) {
        return refuse(
            ErrorCode::WrongState,
            match view.copies.is_empty() {
                true => {
                    format!("VM {name} is held by one host at most: there is nothing to decide")
                }
                false => format!(
                    "host {} does not hold VM {name}: see 'godwit vm list'",
                    request.host
                ),
            },
        );
    }
    let kept = app.connected_agent(&request.host).map_err(way_out)?;
    must_hold_it_now(app, name, &request.host).await?;
    for host in view.copies.iter().filter(|host| **host != request.host) {
        end_copy(app, name, host).await?;
    }
    refresh(app, &request.host).await;
    go_on(app, &kept, name, &request.host).await?;
    refresh(app, &request.host).await;
    app.tell_vm(name);
    Ok(done(format!(
        "VM {name} is kept on host {}, every other copy is ended.",
        request.host
    )))
}

/// The others are ended for it, so that it is asked anew: its record may have given way since the last poll.
async fn must_hold_it_now(app: &App, name: &VmName, host: &HostName) -> Outcome<()> {
    // Where the VM's row cannot be read nobody may be asked with a binding no, and of an older copy of a host no answer
    // counts: the last poll has to do for what a person chooses.
    let is_itself = app.state().book.standing(host) == Standing::Known;
    if app.must_be_read(name).is_err() || !is_itself {
        return Ok(());
    }
    match claim_now(app, name, host).await? {
        Claim::Holds { .. } => Ok(()),
        _ => Err(ApiError::new(
            ErrorCode::WrongState,
            format!("host {host} does not hold VM {name} any more: no copy is ended, see 'godwit vm list'"),
        )
        .on_host(host)),
    }
}

async fn end_copy(app: &App, name: &VmName, host: &HostName) -> Outcome<()> {
    tracing::warn!(vm = %name, %host, "a person has this copy of the VM ended");
    let agent = app.connected_agent(host).map_err(way_out)?;
    match agent.stop(name, &StopRequest { force: true }).await {
        Ok(_) => {}
        Err(error) if error.code() == ErrorCode::WrongState => {}
        Err(error) => return Err(ApiError::from(error).on_host(host)),
    }
    release(app, name, host).await?;
    if app.must_be_read(name).is_err() {
        // Who may hold it is not known here, so that there is no set for this host to leave.
        return Ok(());
    }
    clear(app, name, BTreeSet::from([host.clone()])).await
}

/// The kept copy may be the one that was paused.
async fn go_on(app: &App, agent: &AgentClient, name: &VmName, host: &HostName) -> Outcome<()> {
    let paused = app.state().place(name).and_then(|place| place.vm);
    if paused.is_none_or(|vm| vm.state != VmState::Paused) {
        return Ok(());
    }
    let resumed = agent.resume(name).await;
    resumed
        .map(drop)
        .map_err(|error| ApiError::from(error).on_host(host))
}

/// A person says that a host is off; it holds until the host is heard.
pub async fn fenced(app: &App, host: &HostName) -> Outcome<Done> {
    if let Some(answer) = removed::is_off(app, host).await {
        return answer;
    }
    refresh(app, host).await;
    take_word(app, host).await?;
    Ok(done(format!(
        "Host {host} counts as powered off until it answers again: its VMs may be started elsewhere. It may be powered on at any time: before it boots a VM it asks the other hosts, and a VM that runs elsewhere by then stays there."
    )))
}
