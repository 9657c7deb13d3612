//! Learns from the agents: one task per host asks it again and again.
//!
//! Owns nothing; writes what changed to the database and the inventory. Commands nothing but what is always safe: it
//! tells agents which certificates are revoked, which hosts are gone for good and which of their gifts are overtaken, and
//! has a copy of a VM that runs twice paused.

use crate::app::App;
use crate::bounds::{self, NotTaken};
use crate::error::ControllerError;
use crate::moving::Why;
use crate::resolve;
use crate::state::{Change, Observed};
use crate::survey;
use crate::takeover;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, ClientError};
use godwit_site::{News, Ticket};
use godwit_types::control_api::{HostState, InventoryEvent};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{HostVm, RemovedHosts, Revoked};
use godwit_types::text::{SENTENCE_LEN_MAX, cut};
use godwit_types::version::stranger;
use godwit_types::vm::VmState;
use godwit_types::{ErrorCode, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many grants that no host got are settled with one poll of a host.
const SETTLED_AT_ONCE: usize = 16;
/// How many overtaken gifts a host is told to give up with one poll of it, each of which may take a request's time.
const OVERTAKEN_AT_ONCE: usize = 4;
/// When a host that kept one is told again.
const OVERTAKEN_AGAIN: Duration = Duration::from_secs(60);

/// Asks a host until it is removed, or has another certificate, or the controller stops.
pub fn spawn(app: Arc<App>, host: HostName) {
    let serial = app.of_host(&host, |entry| entry.serial.clone());
    tokio::spawn(async move {
        let Ok(serial) = serial else {
            return;
        };
        let mut stop = app.stopped();
        let mut told = Told::default();
        while poll(&app, &host, &serial, &mut told).await {
            tokio::select! {
                () = tokio::time::sleep(app.config.poll_every) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    });
}

/// What a host was told.
#[derive(Default)]
struct Told {
    /// How far the list of revocations had grown.
    revoked: Option<u64>,
    /// Which hosts are gone for good.
    removed: BTreeSet<HostName>,
    /// Why it did not take a list the last time; said once.
    refused: BTreeMap<&'static str, String>,
    /// The VMs of which it was told that its gift is overtaken, with the time of the next try.
    overtaken: BTreeMap<VmName, Instant>,
}

/// Asks once. False when the host is no more, or has another certificate: then it has a task of its own.
async fn poll(app: &Arc<App>, host: &HostName, serial: &str, told: &mut Told) -> bool {
    let is_it = || {
        app.of_host(host, |entry| entry.serial == serial)
            .unwrap_or(false)
    };
    if !is_it() {
        return false;
    }
    refresh(app, host).await;
    if let Err(error) = takeover::go_on(app, host).await {
        tracing::error!(%host, %error, "cannot note what the host has on record");
    }
    if app.state().book.is_in_charge() {
        tell_site(app, host).await;
        tell_revoked(app, host, told).await;
        tell_removed(app, host, told).await;
        pause_copies(app, host).await;
        settle_undelivered(app, host).await;
        settle_overtaken(app, host, &mut told.overtaken).await;
    }
    is_it()
}

/// Asks a host now, so that what an operation has just changed is seen at once.
pub async fn refresh(app: &App, host: &HostName) {
    let Ok((_, agent)) = app.agent(host) else {
        return;
    };
    // One at a time, so that an older answer never comes after a newer one.
    let _turn = app.host_turns.take(host).await;
    let asked = {
        let mut state = app.state();
        Asked {
            deletions: state.deletions,
            ticket: state.book.ask(),
        }
    };
    let (info, vms) = match ask(&agent).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(why)) => return reject(app, host, why),
        Err(error @ (ClientError::TooLong { .. } | ClientError::Answer { .. })) => {
            return reject(app, host, error.to_string());
        }
        Err(error) => return lose(app, host, &error),
    };
    let bounded = bounds::info(host, info).and_then(|info| Ok((info, bounds::vms(host, vms)?)));
    let taken = bounded.and_then(|(info, vms)| Ok((info, must_not_swell(app, host, vms)?)));
    let (info, vms) = match taken {
        Ok(taken) => taken,
        Err(error) => return reject(app, host, error.to_string()),
    };
    if let Err(error) = learn(app, host, asked, info, vms).await {
        tracing::error!(%host, %error, "cannot note what the host said");
    }
}

/// Each name that was ever used is kept for ever, here and in every host's table, so that one host may not bring ever new
/// ones. What is more and not held here is left out.
fn must_not_swell(
    app: &App,
    host: &HostName,
    mut vms: Vec<HostVm>,
) -> Result<Vec<HostVm>, NotTaken> {
    let mut state = app.state();
    let before = vms.len();
    let brought = state.brought_with(host, &mut vms, bounds::NEW_NAMES_MAX);
    bounds::new_names(host, brought.len())?;
    if vms.len() < before {
        let left_out = before - vms.len();
        tracing::debug!(%host, left_out, "the host names more VMs that nobody used here than are taken");
    }
    if let Some(entry) = state.hosts.get_mut(host) {
        entry.brought = brought;
    }
    Ok(vms)
}

/// A host answers what cannot be taken: it counts as silent, and people are told why.
fn reject(app: &App, host: &HostName, why: String) {
    let mut state = app.state();
    state.lose(host);
    let Some(entry) = state.hosts.get_mut(host) else {
        return;
    };
    let is_new = entry.fault.as_ref() != Some(&why);
    entry.fault = Some(why.clone());
    drop(state);
    if is_new {
        tracing::error!(%host, why, "the host's answer is not taken");
        app.tell_host(host);
    }
}

/// What a host says, or why nothing that it says is to be understood: it has no version of the protocol in common with this
/// controller.
async fn ask(agent: &AgentClient) -> Result<Result<(HostInfo, Vec<HostVm>), String>, ClientError> {
    let mut info = agent.host().await?;
    if let Some(why) = stranger(&info.name, &info.version, info.speaks.protocol) {
        return Ok(Err(why));
    }
    let heard = agent.heard_vms().await?;
    // As a VM whose record the host itself cannot read: shown, held by nobody else, granted to nobody.
    info.unread.extend(heard.unread);
    Ok(Ok((info, heard.vms)))
}

/// Whether hosts do not accept each other because a certificate is not valid at one's time. The words are those of the TLS
/// library: what it finds itself, and what the other side tells it.
fn is_out_of_date(error: &ClientError) -> bool {
    let (ClientError::NotReached { cause, .. } | ClientError::Broken { cause, .. }) = error else {
        return false;
    };
    let words = [
        "certificate expired",
        "certificate not valid yet",
        "alert: CertificateExpired",
    ];
    words.iter().any(|words| cause.contains(words))
}

fn lose(app: &App, host: &HostName, error: &ClientError) {
    let mut state = app.state();
    state.book.lose(host);
    let Some(entry) = state.hosts.get_mut(host) else {
        return;
    };
    let out_of_date = is_out_of_date(error);
    let same = entry.is_out_of_date == out_of_date;
    entry.is_out_of_date = out_of_date;
    if !entry.is_connected() && same {
        return;
    }
    state.lose(host);
    drop(state);
    tracing::warn!(%host, %error, "host does not answer");
    app.tell_host(host);
}

/// What was so when a host was asked.
struct Asked {
    /// How many VMs had been deleted: an answer from before a deletion may still have that VM in it.
    deletions: u64,
    ticket: Ticket,
}

async fn learn(
    app: &App,
    host: &HostName,
    asked: Asked,
    info: HostInfo,
    vms: Vec<HostVm>,
) -> Result<(), ControllerError> {
    let now = now_unix_s();
    let (observed, is_new, connected) = {
        let mut state = app.state();
        if state.deletions != asked.deletions {
            return Ok(());
        }
        let Some(entry) = state.hosts.get_mut(host) else {
            return Ok(());
        };
        let connected = !entry.is_connected();
        let is_new = entry.info.as_ref().is_none_or(|old| !same_host(old, &info));
        entry.state = HostState::Connected;
        entry.last_seen_unix_s = now;
        entry.is_out_of_date = false;
        entry.info = Some(info.clone());
        entry.fault = None;
        (
            state.observe(host, asked.ticket, &info, vms),
            is_new,
            connected,
        )
    };
    let Observed { news, changes } = observed;
    // Said once only: also where the database cannot be written.
    tell_news(host, &news);
    let fenced = |one: &News| matches!(one, News::FencedAnswered { .. });
    if news.iter().any(fenced) {
        app.tell(InventoryEvent::Site);
    }
    app.write().await?;
    if is_new {
        app.store.save_host_info(host, &info, now).await?;
    }
    if connected {
        tracing::info!(%host, "host answers");
    }
    if is_new || connected {
        app.tell_host(host);
    }
    for change in changes {
        note(app, host, change).await?;
    }
    Ok(())
}

/// The host that a piece of news is about. An answer of one host also brings what was found out about others before it.
fn subject<'a>(asked: &'a HostName, news: &'a News) -> &'a HostName {
    match news {
        News::RestoredCopy { host, .. }
        | News::Replaced { host, .. }
        | News::Impossible { host }
        | News::FencedAnswered { host, .. }
        | News::NotItself { host, .. }
        | News::Held { host, .. } => host,
        News::Stranger { .. } => asked,
    }
}

/// What people should find in the log of an answer of the host that was asked.
pub fn tell_news(asked: &HostName, news: &[News]) {
    for one in news {
        let host = subject(asked, one);
        match one {
            News::RestoredCopy { heard, .. } => {
                tracing::error!(%host, %heard, "a host has heard later words than this controller ever said: its database is an old copy. Nothing is granted until every host was read")
            }
            News::Replaced { heard, .. } => {
                tracing::error!(%host, %heard, "a host has heard a word of a later epoch: another controller has taken over, this one grants nothing")
            }
            News::Impossible { .. } => {
                tracing::error!(%host, "a host says that it has heard a word that no controller can have said")
            }
            News::FencedAnswered {
                host,
                was_never_off,
            } => {
                tracing::warn!(%host, was_never_off, "a host that a person said is off answers")
            }
            News::NotItself { host, standing } => {
                tracing::error!(%host, %standing, "the host is not the one that was enrolled, or not its newest life")
            }
            News::Stranger { vm, host: other } => {
                tracing::error!(%host, %vm, %other, "a host's record names another one that was never enrolled")
            }
            News::Held { vm, .. } => tracing::info!(%vm, %host, "VM is held here now"),
        }
    }
}

async fn note(app: &App, host: &HostName, change: Change) -> Result<(), ControllerError> {
    match change {
        Change::Resolved(entry) => {
            let name = &entry.spec.name;
            // As it is described by now: a person may have edited it meanwhile.
            let _macs = app.macs_turn().await;
            let now = app.state().vms.get(name).cloned();
            if let Some(entry) = now {
                app.store.save_vm(&entry).await?;
            }
            app.tell_vm(name);
        }
        Change::Adopted(entry) => {
            tracing::warn!(vm = %entry.spec.name, %host, "host holds a VM that was not known here; it is now");
            app.store.add_vm(&entry).await?;
            app.tell_vm(&entry.spec.name);
        }
        Change::State(vm) => app.tell_vm(&vm),
    }
    Ok(())
}

/// Whether only fleeting figures differ.
fn same_host(old: &HostInfo, new: &HostInfo) -> bool {
    let mut old = old.clone();
    old.memory_free_mib = new.memory_free_mib;
    old.site = new.site;
    for (name, store) in &mut old.datastores {
        store.room = new.datastores.get(name).and_then(|store| store.room);
    }
    old == *new
}

/// Brings the host's table of the site up to date.
async fn tell_site(app: &App, host: &HostName) {
    // A word that is not in the database would make the hosts take this controller, restarted, for an old copy.
    if let Err(error) = app.write().await {
        tracing::error!(%host, %error, "cannot note this controller's last word");
        return;
    }
    let update = app.written_update(host);
    let (Some(update), Ok(agent)) = (update, app.connected_agent(host)) else {
        return;
    };
    let you = update.you;
    match agent.site(&update).await {
        Ok(heard) => {
            note_refusal(app, host, None);
            app.state().book.updated(host, you, heard);
        }
        // A host that knows of a newer controller is right, and has an alarm of its own.
        Err(ClientError::Refused(error)) if error.code != ErrorCode::StaleController => {
            note_refusal(app, host, Some(error.message));
        }
        Err(error) => tracing::debug!(%host, %error, "the host's table is not brought up to date"),
    }
}

/// People are told of a table that is refused as a whole: the host goes on with an older one until something is done.
fn note_refusal(app: &App, host: &HostName, mut why: Option<String>) {
    why.iter_mut().for_each(|why| cut(why, SENTENCE_LEN_MAX));
    let mut state = app.state();
    let Some(entry) = state.hosts.get_mut(host) else {
        return;
    };
    if entry.refuses_table == why {
        return;
    }
    if let Some(why) = &why {
        tracing::error!(%host, why, "the host does not take the site's table");
    }
    entry.refuses_table = why;
    drop(state);
    app.tell(InventoryEvent::Site);
}

/// Of a VM that several hosts hold, the copies that are not the rightful one stand still, with their memory.
async fn pause_copies(app: &App, host: &HostName) {
    let runs = {
        let state = app.state();
        let Some(entry) = state.hosts.get(host) else {
            return;
        };
        // Of what runs here only: each host is asked each second, and there may be hundreds, with thousands of VMs.
        let running = entry.vms.iter();
        let running = running.filter(|(_, vm)| vm.state == VmState::Running);
        let is_copy = |name: &&VmName| {
            let twice = state.book.twice(name);
            twice.is_some_and(|twice| twice.to_pause().any(|paused| paused == host))
        };
        let copies = running.map(|(name, _)| name).filter(is_copy);
        copies.cloned().collect::<Vec<_>>()
    };
    for vm in runs {
        let Ok(agent) = app.connected_agent(host) else {
            return;
        };
        // Whoever has the VM's turn may just be keeping this copy by a person's word; what was heard before is looked at
        // again once it is over.
        let Some(_turn) = app.vm_turns.try_take(&vm) else {
            continue;
        };
        let twice = app.state().book.twice(&vm);
        let Some(twice) = twice.filter(|twice| twice.to_pause().any(|paused| paused == host))
        else {
            continue;
        };
        tracing::error!(%vm, %host, "several hosts hold the VM: this copy is paused");
        if let Err(error) = agent.pause(&vm).await {
            tracing::error!(%vm, %host, %error, "the copy cannot be paused");
        }
        let hosts = twice.copies.iter().map(|copy| copy.host.to_string());
        app.tell(InventoryEvent::RunningTwice {
            name: vm.to_string(),
            hosts: hosts.collect(),
        });
        app.tell_vm(&vm);
    }
}

/// A grant that no host ever got, since the controller that gave it died: its host is asked, and says no.
async fn settle_undelivered(app: &App, host: &HostName) {
    let due: Vec<VmName> = {
        let state = app.state();
        let vms = state.book.may_be_on(host).into_iter();
        let idle = vms.filter(|vm| !state.active.contains_key(vm) && state.book.is_undelivered(vm));
        idle.take(SETTLED_AT_ONCE).collect()
    };
    for vm in due {
        let Some(_turn) = app.vm_turns.try_take(&vm) else {
            continue;
        };
        let Ok(_mark) = app.moving.mark(&vm, Why::IsAsked) else {
            continue;
        };
        if !app.state().book.is_undelivered(&vm) {
            continue;
        }
        let members = app.state().book.may_hold(&vm);
        match survey::clear(app, &vm, members).await {
            Ok(()) => tracing::info!(%vm, %host, "a grant that its host never got is settled"),
            Err(error) => {
                tracing::warn!(%vm, %host, %error, "a grant that its host never got is not settled yet")
            }
        }
        app.tell_vm(&vm);
    }
}

/// A VM that the host gave away and that went on without it: what it waits for never comes. A host that keeps it has a guest
/// of it, or a VM process that does not know the request.
async fn settle_overtaken(app: &App, host: &HostName, told: &mut BTreeMap<VmName, Instant>) {
    let due = app.state().book.overtaken_gifts(host);
    told.retain(|vm, _| due.iter().any(|(one, _)| one == vm));
    let now = Instant::now();
    let rested = |(vm, _): &(VmName, _)| told.get(vm).is_none_or(|again| *again <= now);
    let due: Vec<VmName> = due.into_iter().filter(rested).map(|(vm, _)| vm).collect();
    for vm in due.into_iter().take(OVERTAKEN_AT_ONCE) {
        let Some(_turn) = app.vm_turns.try_take(&vm) else {
            continue;
        };
        if let Err(error) = resolve::settle_gift(app, &vm, host).await {
            tracing::warn!(%vm, %host, %error, "the host keeps what it gave away before the VM went on without it");
        }
        told.insert(vm, now + OVERTAKEN_AGAIN);
    }
}

impl Told {
    /// Whether the host has taken what it was told; why not is logged when it is another reason than before.
    fn has_taken<T>(
        &mut self,
        host: &HostName,
        list: &'static str,
        answer: Result<T, ClientError>,
    ) -> bool {
        let Err(error) = answer else {
            self.refused.remove(list);
            return true;
        };
        let why = error.to_string();
        if self.refused.get(list) != Some(&why) {
            tracing::warn!(%host, why, "the host does not take the list of {list}");
            self.refused.insert(list, why);
        }
        false
    }
}

async fn tell_revoked(app: &App, host: &HostName, told: &mut Told) {
    // Read first: what comes in between is told once more.
    let version = app.revocations.version();
    if told.revoked == Some(version) {
        return;
    }
    let serials = app.revocations.all();
    let Ok(agent) = app.connected_agent(host) else {
        return;
    };
    let answer = agent.revoked(&Revoked { serials }).await;
    if told.has_taken(host, "revoked certificates", answer) {
        told.revoked = Some(version);
    }
}

/// So that nothing waits for a host that is gone for good.
async fn tell_removed(app: &App, host: &HostName, told: &mut Told) {
    let removed = app.removed();
    if removed == told.removed {
        return;
    }
    let request = RemovedHosts {
        hosts: removed.iter().cloned().collect(),
    };
    let Ok(agent) = app.connected_agent(host) else {
        return;
    };
    let answer = agent.removed_hosts(&request).await;
    if told.has_taken(host, "removed hosts", answer) {
        told.removed = removed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::shown::unheard_info;
    use godwit_types::DatastoreName;
    use godwit_types::datastore::{Datastore, DatastoreRoom};
    use godwit_types::site::Standing;

    #[test]
    fn an_old_copy_is_logged_by_its_own_name_though_another_host_answered_first() {
        let [asked, old] = ["a", "b"].map(|name| HostName::new(name).unwrap());
        let host = old.clone();
        let standing = Standing::OldCopy;
        assert_eq!(subject(&asked, &News::NotItself { host, standing }), &old);
        let host = old.clone();
        let was_never_off = true;
        let fenced = News::FencedAnswered {
            host,
            was_never_off,
        };
        assert_eq!(subject(&asked, &fenced), &old);
    }

    #[test]
    fn a_host_whose_datastores_fill_is_the_same_and_one_with_another_datastore_is_not() {
        let name = HostName::new("a").unwrap();
        let mut old = unheard_info(&name, "127.0.0.1:1".parse().unwrap());
        let fast = DatastoreName::new("fast").unwrap();
        let store = Datastore::new("/srv/fast", false);
        old.datastores.insert(fast.clone(), store);
        let mut new = old.clone();
        new.memory_free_mib += 1;
        new.datastores.get_mut(&fast).unwrap().room = Some(DatastoreRoom {
            free_mib: 1,
            total_mib: 2,
        });
        assert!(same_host(&old, &new) && same_host(&new, &old));
        new.datastores.get_mut(&fast).unwrap().path.push('2');
        assert!(!same_host(&old, &new));
        new.datastores.clear();
        assert!(!same_host(&old, &new) && !same_host(&new, &old));
    }
}
