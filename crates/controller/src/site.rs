//! How the site stands, and the answer to a host that asks before it boots what nobody asked it to boot.
//!
//! Owns nothing. Refuses: to answer for a life of a host while another one answers.

use crate::app::App;
use crate::bounds;
use crate::certificates;
use crate::error::Outcome;
use crate::state::{HostEntry, State};
use crate::taken_over;
use crate::unread::{Lack, UnreadRow};
use godwit_rpc::Unwanted;
use godwit_rpc::listen::is_here;
use godwit_rpc::pki::now_unix_s;
use godwit_types::control_api::{Done, InventoryEvent};
use godwit_types::site::{Alarm, SiteAnswer, SiteQuestion, SiteView, Standing};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::net::SocketAddr;
use std::time::Duration;

/// How long a question of a clone is shown after it was asked: it asks every few seconds.
const SECOND_SHOWN_S: i64 = 600;
/// How many strangers an alarm names.
const STRANGERS_SHOWN: usize = 5;

/// How long the life of a host that was known until now gets to answer.
const OTHER_LIFE_WAIT: Duration = Duration::from_secs(2);

/// Answers a host's question. `unwanted` says why its certificate is wanted no more, if so.
pub async fn answer(
    app: &App,
    asker: &HostName,
    question: &SiteQuestion,
    unwanted: Option<Unwanted>,
) -> Outcome<SiteAnswer> {
    if let Some(why) = unwanted {
        return Ok(only_unwanted(app, asker, question, why).await);
    }
    bounds::instance(asker, &question.instance)
        .map_err(|error| ApiError::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let other_answers = other_life_answers(app, asker, question).await;
    app.until_started().await;
    let mut answer = app.state().book.answer(asker, question, other_answers);
    for vm in app.state().lacking.keys() {
        // Of these this controller knows too little to let anything boot.
        answer.vms.remove(vm);
        answer.given_on.remove(vm);
        answer.unread.insert(vm.clone());
    }
    // Also what somebody else is just granting: no host hears of it before it is written.
    app.write().await?;
    if answer.standing == Standing::SecondInstance
        && let Some(entry) = app.state().hosts.get_mut(asker)
    {
        entry.second_asked_unix_s = now_unix_s();
    }
    if answer.standing != Standing::Known {
        app.tell_host(asker);
        tracing::error!(host = %asker, standing = %answer.standing, "a host asks whether it may boot its VMs, and may not");
    }
    Ok(answer)
}

/// What a host hears whose certificate is wanted no more: that, and nothing of any VM or host. What it says is not
/// believed: its name may be another host's by now.
async fn only_unwanted(
    app: &App,
    asker: &HostName,
    question: &SiteQuestion,
    why: Unwanted,
) -> SiteAnswer {
    let (what, standing) = match why {
        Unwanted::Removed => ("a host that was removed", Standing::Removed),
        Unwanted::Replaced => (
            "an old copy of a host, with a certificate that was replaced,",
            Standing::OldCopy,
        ),
    };
    tracing::warn!(host = %asker, "{what} asks whether it may boot its VMs");
    app.until_started().await;
    let wishes = question.wishes.iter();
    SiteAnswer {
        standing,
        replaced: why == Unwanted::Replaced,
        in_charge: app.state().book.is_in_charge(),
        stamp: app.said(),
        unread: wishes.map(|wish| wish.vm.clone()).collect(),
        ..SiteAnswer::default()
    }
}

/// Whether a life of the host other than the one that asks answers now.
async fn other_life_answers(app: &App, asker: &HostName, question: &SiteQuestion) -> bool {
    if !app.state().book.is_new_life(asker, question) {
        return false;
    }
    let Ok((_, agent)) = app.agent(asker) else {
        return false;
    };
    let heard = tokio::time::timeout(OTHER_LIFE_WAIT, agent.host()).await;
    matches!(heard, Ok(Ok(info)) if info.instance != question.instance)
}

/// How the site stands: what a person must know first.
pub fn view(app: &App) -> SiteView {
    let forgotten = taken_over::look(app);
    // Before the state is locked, since the kernel is asked.
    let absent: Vec<String> = app.config.listen.iter().filter_map(not_here).collect();
    let state = app.state();
    let mut alarms: Vec<Alarm> = Vec::new();
    for (vm, twice) in state.book.all_twice() {
        let hosts = twice.copies.into_iter().map(|copy| copy.host).collect();
        alarms.push(Alarm::RunningTwice { vm, hosts });
    }
    let said_by = state.book.said_by();
    if state.book.is_restored() {
        let waits_for = state.book.waits_for();
        alarms.push(Alarm::RestoredController { waits_for, said_by });
    } else if state.book.is_replaced() {
        alarms.push(Alarm::ReplacedController { said_by });
    }
    for host in state.book.impossible() {
        alarms.push(Alarm::ImpossibleWord { host: host.clone() });
    }
    let removed = state.removed.iter();
    for (host, known) in removed.filter(|(_, known)| !known.runs.is_empty()) {
        let (host, vms) = (host.clone(), known.runs.iter().cloned().collect());
        alarms.push(Alarm::RemovedHostAnswers { host, vms });
    }
    for names in state.book.names_strangers() {
        alarms.push(Alarm::NamesStrangers {
            host: names.by,
            named: names.named.into_iter().take(STRANGERS_SHOWN).collect(),
            too_many: names.too_many,
        });
    }
    let now = now_unix_s();
    for (name, entry) in &state.hosts {
        alarms.extend(host_alarms(&state, name, entry, now));
    }
    alarms.extend(certificates::alarms(app, &state, now));
    for (host, vm) in state.damaged_records() {
        alarms.push(Alarm::DamagedRecord { host, vm });
    }
    let lacking = state.lacking.values().map(Lack::row);
    for row in lacking.chain(&state.unread) {
        let (table, row) = (row.table.to_owned(), row.row.clone());
        alarms.push(Alarm::UnreadRow { table, row });
    }
    let mut sentences: Vec<String> = alarms.iter().map(|alarm| sentence(&state, alarm)).collect();
    sentences.extend(forgotten);
    sentences.extend(absent);
    SiteView {
        stamp: state.book.stamp(),
        // Until its first word is in the database, hosts refuse what it says.
        in_charge: state.book.is_in_charge() && app.said().epoch == state.book.stamp().epoch,
        sentences,
        alarms,
        hosts: state
            .hosts
            .iter()
            .map(|(name, host)| (name.clone(), host.state))
            .collect(),
        closing: state
            .hosts
            .iter()
            .filter(|(_, host)| host.info.as_ref().is_some_and(|info| info.closing))
            .map(|(name, _)| name.clone())
            .collect(),
    }
}

/// What a person must know of one enrolled host.
fn host_alarms(state: &State, name: &HostName, entry: &HostEntry, now: i64) -> Vec<Alarm> {
    let host = || name.clone();
    let mut alarms = Vec::new();
    let vms: Vec<VmName> = state.undescribed_on(entry).cloned().collect();
    if !vms.is_empty() {
        alarms.push(Alarm::RunsUnknownVms { host: host(), vms });
    }
    // Its host answers the polls, so that only its question shows a clone elsewhere.
    let second_asked = now.saturating_sub(entry.second_asked_unix_s) < SECOND_SHOWN_S;
    match state.book.standing(name) {
        Standing::OldCopy => alarms.push(Alarm::OldCopy { host: host() }),
        Standing::SecondInstance => alarms.push(Alarm::SecondInstance { host: host() }),
        Standing::Known if second_asked => alarms.push(Alarm::SecondInstance { host: host() }),
        Standing::Known | Standing::Removed => {}
    }
    if entry.is_out_of_date {
        alarms.push(Alarm::ClockOrCertificate { host: host() });
    }
    if entry.fault.is_some() {
        alarms.push(Alarm::AnswerNotTaken { host: host() });
    }
    if entry.refuses_table.is_some() {
        alarms.push(Alarm::TableNotTaken { host: host() });
    }
    if state.book.was_fenced_falsely(name) {
        alarms.push(Alarm::FencedHostAnswered { host: host() });
    }
    let info = entry.info.as_ref();
    if info.is_some_and(|info| info.closing) {
        alarms.push(Alarm::HostClosed { host: host() });
    }
    if info.is_some_and(|info| info.boot_alone_ignored) {
        alarms.push(Alarm::BootAloneIgnored { host: host() });
    }
    alarms
}

/// What a person does about an address that hosts and operators cannot reach the controller at.
fn not_here(address: &SocketAddr) -> Option<String> {
    let sentence = || {
        format!(
            "this controller's machine does not have the address of {address} yet, so that nobody reaches it there: bring that up, or correct listen in controller.toml"
        )
    };
    (!is_here(*address)).then(sentence)
}

/// A person has seen the alarms that nothing else ends: that a host was said to be off and was not, and what a takeover
/// forgot. They are over, also after a restart.
pub async fn acknowledge(app: &App) -> Outcome<Done> {
    let mut seen: Vec<String> = {
        let state = app.state();
        let hosts = state
            .hosts
            .keys()
            .filter(|host| state.book.was_fenced_falsely(host));
        let fences = hosts.map(|host| format!("host {host} was said to be off and was not"));
        fences.collect()
    };
    app.state().book.acknowledge();
    app.write().await?;
    let forgot = taken_over::acknowledge(app).map_err(|error| {
        let message = format!("the alarm about the takeover cannot be ended: {error}; see that the disk of the controller's state directory has room, and try again");
        ApiError::new(ErrorCode::Internal, message)
    })?;
    if forgot {
        seen.push("a takeover forgot what only the lost database knew".into());
    }
    app.tell(InventoryEvent::Site);
    Ok(Done {
        message: match seen.is_empty() {
            true => "There is nothing to acknowledge: every other alarm ends with what raised it, see 'godwit site show'.".into(),
            false => format!("Acknowledged: {}.", seen.join("; ")),
        },
    })
}

fn listed<N: ToString>(names: &[N]) -> String {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// What is waited for: hosts, each that is not enrolled with who names it, or, of none, their answers.
fn with_tellers(state: &State, hosts: &[HostName]) -> String {
    if hosts.is_empty() {
        return "their answers".to_owned();
    }
    let shown = hosts.iter().take(STRANGERS_SHOWN * 4).map(|host| {
        if let Some(teller) = state.book.tells_another_machine(host) {
            return format!(
                "{host} (another machine than is known here, by the table of {teller})"
            );
        }
        let tellers = state.book.told_by(host);
        match state.hosts.contains_key(host) || tellers.is_empty() {
            true => host.to_string(),
            false => format!("{host} (named by {})", listed(&tellers)),
        }
    });
    let shown: Vec<String> = shown.collect();
    let more = hosts.len().saturating_sub(shown.len());
    match more {
        0 => shown.join(", "),
        _ => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Both copies as they are, and how to look at them: which one is worth keeping is for a person to say.
fn twice_sentence(state: &State, vm: &VmName) -> String {
    let twice = state.book.twice(vm);
    let copies = twice.map(|twice| state.copies(vm, &twice, now_unix_s()));
    format!(
        "VM {vm} is held by hosts {}: look at each copy with 'godwit vm console {vm} --host HOST', then keep one with 'godwit vm resolve {vm} --keep HOST'",
        copies.unwrap_or_default()
    )
}

fn damaged_sentence(state: &State, host: &HostName, vm: &VmName) -> String {
    let info = state.hosts.get(host).and_then(|entry| entry.info.as_ref());
    let own = info.and_then(|info| info.unread.get(vm));
    let own = own.map_or("", String::as_str);
    format!("host {host} cannot read its record of VM {vm}, and may hold it: {own}")
}

/// Names that this controller never enrolled, told by one host: too many, its own, or another one's.
fn strangers_sentence(host: &HostName, named: &[HostName], too_many: bool) -> String {
    if too_many {
        return format!(
            "host {host} names more hosts than a site has that this controller never enrolled: what it tells is not believed, and it does not count as read; power it off and run 'godwit host remove {host} --confirm-unreachable'"
        );
    }
    if matches!(named, [own] if own == host) {
        return format!(
            "host {host} has a certificate of this site and asks whether it may boot its VMs, but this controller does not know it, and asks it nothing: it is enrolled by itself if its address is known; else let it join anew with 'godwit host join', or power it off and run 'godwit host fenced {host}'"
        );
    }
    format!(
        "records of host {host} name {}, which this controller never enrolled: no VM waits for it. If such a host was ever there, enrol it again, or, once it is powered off, run 'godwit host fenced HOST'; else host {host} is broken or lies: power it off and run 'godwit host remove {host} --confirm-unreachable'",
        listed(named)
    )
}

/// What speaks for a host is not the host: `otherwise` says so where no table that is newer than this database knows another machine as it.
fn life_sentence(state: &State, host: &HostName, otherwise: fn(&HostName) -> String) -> String {
    let Some(teller) = state.book.tells_another_machine(host) else {
        return otherwise(host);
    };
    format!(
        "this controller's database was put back, and by what host {teller} has heard since another machine is host {host} than the one that speaks for it: power that one off and the other on; if the other is gone for good, run 'godwit host remove {host} --confirm-unreachable' once both are off; if host {teller} is wrong, power it off and run 'godwit host remove {teller} --confirm-unreachable'"
    )
}

fn second_sentence(host: &HostName) -> String {
    format!(
        "two machines have the certificate of host {host}: power off the one that is not meant; when in doubt both, then run 'godwit host remove {host} --confirm-unreachable' and let one join anew"
    )
}

fn old_copy_sentence(host: &HostName) -> String {
    format!(
        "the state directory of host {host} is an older copy of itself: it boots nothing, and its guests run on but cannot be moved; shut them down from inside, power it off, then run 'godwit host remove {host} --confirm-unreachable' and let it join anew with an empty state directory"
    )
}

fn sentence(state: &State, alarm: &Alarm) -> String {
    match alarm {
        Alarm::RunningTwice { vm, .. } => twice_sentence(state, vm),
        Alarm::RestoredController { waits_for, said_by } => format!(
            "this controller works on an old copy of its database, as {} can tell, and starts and moves no VM until it has read every host; it waits for {}: bring them back, or run 'godwit host fenced HOST' for one that is powered off. If no database was put back, and one host alone says so, that host is wrong: power it off and run 'godwit host remove HOST --confirm-unreachable'",
            listed(said_by),
            with_tellers(state, waits_for)
        ),
        Alarm::ReplacedController { said_by } => format!(
            "another controller has taken over this site, as {} can tell: this one starts and moves no VM; stop it, or, if it is the one to keep, stop the other one and start this one anew. If there is no other one, those hosts are wrong: power them off and run 'godwit host remove HOST --confirm-unreachable'",
            listed(said_by)
        ),
        Alarm::ImpossibleWord { host } => format!(
            "host {host} claims to know a command that no controller can have given: it is broken or lies; power it off and run 'godwit host remove {host} --confirm-unreachable'"
        ),
        Alarm::NamesStrangers {
            host,
            named,
            too_many,
        } => strangers_sentence(host, named, *too_many),
        Alarm::RemovedHostAnswers { host, vms } => format!(
            "host {host} was removed and is not off: it says that it runs {}, which may run twice now. End what is not meant there: log in on host {host} and run 'godwit vm stop VM --force --host {host}', or power it off and run 'godwit host fenced {host}'",
            listed(vms)
        ),
        Alarm::RunsUnknownVms { host, vms } => format!(
            "host {host} runs {}, which this controller does not know: nothing else lists, moves or ends such a VM. Describe it again with 'godwit vm create', or end it with 'godwit vm stop VM --force --host {host}'",
            listed(vms)
        ),
        Alarm::ClockOrCertificate { host } => format!(
            "host {host} does not answer because a certificate is not valid at the time of one side: compare the clocks of host {host} and of this controller and set the wrong one; if both are right, the host's certificate has ended: run 'godwit host add' here and 'godwit host renew TOKEN' on host {host}; its VMs run on"
        ),
        Alarm::AnswerNotTaken { host } => {
            let entry = state.hosts.get(host);
            let fault = entry.and_then(|entry| entry.fault.clone());
            fault.unwrap_or_else(|| format!("host {host} says what cannot be taken: see its log"))
        }
        Alarm::TableNotTaken { host } => {
            let entry = state.hosts.get(host);
            let why = entry.and_then(|entry| entry.refuses_table.clone());
            let why = why.unwrap_or_else(|| "see its log".into());
            format!("host {host} does not take the site's table and decides by an older one: {why}")
        }
        Alarm::DamagedRecord { host, vm } => damaged_sentence(state, host, vm),
        Alarm::UnreadRow { table, row } => {
            let lacking = state.lacking.values().map(Lack::row);
            let mut unread = lacking.chain(&state.unread);
            let found = unread.find(|unread| unread.table == table && unread.row == *row);
            found.map(UnreadRow::sentence).unwrap_or_default()
        }
        Alarm::SecondInstance { host } => life_sentence(state, host, second_sentence),
        Alarm::OldCopy { host } => life_sentence(state, host, old_copy_sentence),
        Alarm::FencedHostAnswered { host } => format!(
            "host {host} was said to be powered off and was not: look for VMs that ran twice with 'godwit vm list', then end this alarm with 'godwit site acknowledge'"
        ),
        Alarm::CertificateEnds { .. }
        | Alarm::ControllerCertificateEnds { .. }
        | Alarm::AuthorityEnds { .. } => certificates::sentence(state, alarm, now_unix_s()),
        Alarm::HostClosed { host } => format!(
            "host {host} shuts down or was closed for that: it boots no VM and takes none until it is back: power it on, or, if it runs and is to run VMs now, run 'godwit host open' on it"
        ),
        Alarm::BootAloneIgnored { host } => format!(
            "boot = \"alone\" in host {host}'s host.toml is ignored, since the site has other hosts: remove the line"
        ),
    }
}
