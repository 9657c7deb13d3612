//! How the site stands, and the answer to a host that asks before it boots what nobody asked it to boot.
//!
//! Owns nothing. Refuses: to answer for a life of a host while another one answers.

use crate::app::App;
use crate::error::Outcome;
use godwit_types::HostName;
use godwit_types::site::{Alarm, SiteAnswer, SiteQuestion, SiteView, Standing};
use std::time::Duration;

/// How long the life of a host that was known until now gets to answer.
const OTHER_LIFE_WAIT: Duration = Duration::from_secs(2);

/// Answers a host's question. `removed` says that its certificate was revoked.
pub async fn answer(
    app: &App,
    asker: &HostName,
    question: &SiteQuestion,
    removed: bool,
) -> Outcome<SiteAnswer> {
    let other_answers = !removed && other_life_answers(app, asker, question).await;
    let (mut answer, rows) = app.state().book.answer(asker, question, other_answers);
    app.write(&rows).await?;
    if removed {
        answer.standing = Standing::Removed;
    }
    if answer.standing != Standing::Known {
        tracing::error!(host = %asker, standing = ?answer.standing, "a host asks whether it may boot its VMs, and may not");
    }
    Ok(answer)
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
    let state = app.state();
    let mut alarms: Vec<Alarm> = Vec::new();
    for (vm, twice) in state.book.all_twice() {
        let hosts = twice.copies.into_iter().map(|copy| copy.host).collect();
        alarms.push(Alarm::RunningTwice { vm, hosts });
    }
    if !state.book.is_in_charge() {
        let waits_for = state.book.waits_for();
        alarms.push(Alarm::RestoredController { waits_for });
    }
    for (name, entry) in &state.hosts {
        let host = name.clone();
        match state.book.standing(name) {
            Standing::SecondInstance => alarms.push(Alarm::SecondInstance { host }),
            Standing::OldCopy => alarms.push(Alarm::OldCopy { host }),
            Standing::Known | Standing::Removed => {}
        }
        if state.book.was_fenced_falsely(name) {
            alarms.push(Alarm::FencedHostAnswered { host: name.clone() });
        }
        if entry
            .info
            .as_ref()
            .is_some_and(|info| info.boot_alone_ignored)
        {
            alarms.push(Alarm::BootAloneIgnored { host: name.clone() });
        }
    }
    SiteView {
        stamp: state.book.stamp(),
        // Until its first word is in the database, hosts refuse what it says.
        in_charge: state.book.is_in_charge() && app.said().epoch == state.book.stamp().epoch,
        sentences: alarms.iter().map(sentence).collect(),
        alarms,
        hosts: state
            .hosts
            .iter()
            .map(|(name, host)| (name.clone(), host.state))
            .collect(),
    }
}

fn sentence(alarm: &Alarm) -> String {
    match alarm {
        Alarm::RunningTwice { vm, hosts } => {
            let hosts: Vec<&str> = hosts.iter().map(HostName::as_str).collect();
            format!(
                "VM {vm} is held by hosts {}: decide with 'godwit vm resolve {vm} --keep HOST'",
                hosts.join(" and ")
            )
        }
        Alarm::RestoredController { waits_for } => {
            let hosts: Vec<&str> = waits_for.iter().map(HostName::as_str).collect();
            format!(
                "this controller works on an old copy of its database and grants nothing until it has read every host; it waits for {}: bring them back, or run 'godwit host fenced HOST' for one that is powered off",
                if hosts.is_empty() {
                    "their answers".to_owned()
                } else {
                    hosts.join(", ")
                }
            )
        }
        Alarm::SecondInstance { host } => format!(
            "two machines have the certificate of host {host}: power off the one that is not meant; when in doubt both, then run 'godwit host remove {host} --confirm-unreachable' and let one join anew"
        ),
        Alarm::OldCopy { host } => format!(
            "the state directory of host {host} is an older copy of itself: it boots nothing; power it off, then run 'godwit host remove {host} --confirm-unreachable' and let it join anew with an empty state directory"
        ),
        Alarm::FencedHostAnswered { host } => format!(
            "host {host} was said to be powered off and was not: look for VMs that ran twice with 'godwit vm list'"
        ),
        Alarm::BootAloneIgnored { host } => format!(
            "boot = \"alone\" in host {host}'s host.toml is ignored, since the site has other hosts: remove the line"
        ),
    }
}
