//! Asks hosts who may hold a VM, now, and has the answers judged by the site's rules.
//!
//! Owns nothing; the VM's turn is the caller's. Refuses to take what was heard before for an answer.

use crate::app::App;
use crate::bounds;
use crate::error::Outcome;
use futures_util::future::join_all;
use godwit_rpc::ClientError;
use godwit_site::{KeptGift, Refusal, Survey, Surveyed};
use godwit_types::site::{Claim, Standing, SurveyAnswer, SurveyRequest};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How often a survey that was overtaken is made again.
const TRIES: usize = 5;
/// How long a host that did not answer its last poll may take to answer a survey.
const SILENT_WAIT: Duration = Duration::from_secs(3);

/// What a refusal of the site's rules is to people and scripts.
pub fn refused(refusal: Refusal) -> ApiError {
    let (code, host) = match &refusal {
        Refusal::Silent { hosts, .. } => (ErrorCode::HostUnreachable, hosts.first()),
        Refusal::Stranger { host, .. } => (ErrorCode::HostUnreachable, Some(host)),
        Refusal::MayRun { host, .. } => (ErrorCode::HostUnreachable, Some(host)),
        Refusal::Restored { .. } | Refusal::Starting { .. } => (ErrorCode::HostUnreachable, None),
        Refusal::Replaced { .. } => (ErrorCode::StaleController, None),
        Refusal::UnknownHost { .. } => (ErrorCode::UnknownHost, None),
        Refusal::Twice { .. } => (ErrorCode::RunningTwice, None),
        Refusal::HandingOver { hosts, .. } => (ErrorCode::WrongState, hosts.first()),
        Refusal::GiftKept(KeptGift { host, .. }) => (ErrorCode::WrongState, Some(host)),
        Refusal::Exhausted { .. } => (ErrorCode::Internal, None),
        Refusal::NotHolder { holder, .. } => (ErrorCode::WrongState, Some(holder)),
        Refusal::Held { host, .. }
        | Refusal::OlderCopy { host, .. }
        | Refusal::Answers { host }
        | Refusal::HoldsVms { host, .. }
        | Refusal::NotItself { host } => (ErrorCode::WrongState, Some(host)),
        _ => (ErrorCode::WrongState, None),
    };
    let error = ApiError::new(code, refusal.to_string());
    match host {
        Some(host) => error.on_host(host),
        None => error,
    }
}

/// Refuses while this controller works on an old copy of its database, and says what it waits for.
pub fn must_be_newest(app: &App) -> Outcome<()> {
    let state = app.state();
    match state.book.is_restored() {
        true => Err(refused(Refusal::Restored {
            waits_for: state.book.waits_for(),
        })),
        false => Ok(()),
    }
}

/// Asks every host that may hold a VM, and `also`. What has come of it is durable when this returns.
pub async fn survey(app: &App, vm: &VmName, also: &[HostName]) -> Outcome<Surveyed> {
    app.must_be_read(vm)?;
    app.until_started().await;
    for _ in 0..TRIES {
        let begun = app.state().book.begin_survey(vm, also);
        match take(app, begun).await? {
            Surveyed::Refused(Refusal::Stale { .. }) => {}
            verdict => return Ok(verdict),
        }
    }
    Err(refused(Refusal::Stale { vm: vm.clone() }))
}

/// Why a host that answers does not say whether it may hold a VM: in the words of its last poll, or of this answer.
fn why_unsaid(
    app: &App,
    vm: &VmName,
    host: &HostName,
    refusals: &BTreeMap<HostName, ApiError>,
) -> Option<ApiError> {
    let cannot_tell = || {
        let state = app.state();
        let entry = state.hosts.get(host).filter(|entry| entry.is_connected())?;
        let sentence = entry.info.as_ref()?.unread.get(vm)?;
        Some(format!(
            "host {host} cannot tell whether it holds VM {vm}: {sentence}"
        ))
    };
    let cannot_say = || {
        let error = refusals.get(host)?;
        Some(format!(
            "host {host} answers, but cannot say whether it may run VM {vm}: {}",
            error.message
        ))
    };
    let text = cannot_tell().or_else(cannot_say)?;
    Some(ApiError::new(ErrorCode::WrongState, text).on_host(host))
}

async fn take(app: &App, begun: Result<Survey, Refusal>) -> Outcome<Surveyed> {
    let survey = begun.map_err(refused)?;
    app.write().await?;
    let (answers, refusals) = ask_all(app, &survey).await;
    let verdict = app.state().book.take_survey(&survey, &answers);
    app.write().await?;
    let Surveyed::Refused(Refusal::Silent { vm, hosts }) = &verdict else {
        return Ok(verdict);
    };
    // A host that answers and cannot tell knows better why than that it is silent.
    let why = |host: &HostName| why_unsaid(app, vm, host, &refusals);
    let own = hosts.iter().find_map(why);
    own.map_or(Ok(verdict), Err)
}

/// Asks these hosts alone, so that those that hold nothing no longer stand in the way.
pub async fn clear(app: &App, vm: &VmName, hosts: BTreeSet<HostName>) -> Outcome<()> {
    app.must_be_read(vm)?;
    let begun = app.state().book.survey_of(vm, hosts);
    take(app, begun).await.map(drop)
}

/// What one host answers now. One that does not answer, or that cannot tell, has not said no.
pub async fn claim_now(app: &App, vm: &VmName, host: &HostName) -> Outcome<Claim> {
    app.must_be_read(vm)?;
    let begun = app
        .state()
        .book
        .survey_of(vm, BTreeSet::from([host.clone()]));
    let survey = begun.map_err(refused)?;
    app.write().await?;
    let (answers, refusals) = ask_all(app, &survey).await;
    let standing = {
        let mut state = app.state();
        state.book.take_survey(&survey, &answers);
        state.book.standing(host)
    };
    app.write().await?;
    if answers.contains_key(host) && standing != Standing::Known {
        return Err(refused(Refusal::NotItself { host: host.clone() }));
    }
    let answer = answers.get(host).ok_or_else(|| {
        let text = format!("host {host} does not say whether it may run VM {vm}: see its log");
        let unknown = || ApiError::new(ErrorCode::WrongState, text).on_host(host);
        why_unsaid(app, vm, host, &refusals).unwrap_or_else(unknown)
    })?;
    let is_no = matches!(answer.claim, Claim::No | Claim::Moved { .. });
    match is_no && answer.highest < survey.level {
        true => Err(refused(Refusal::Stale { vm: vm.clone() })),
        false => Ok(answer.claim.clone()),
    }
}

/// Clears a host's record of a VM as [`clear`] does, in its own time: what it does not find out now is found out when somebody needs to know.
pub fn clear_later(app: &Arc<App>, vm: VmName, host: HostName) {
    let app = app.clone();
    tokio::spawn(async move {
        let _turn = app.vm_turns.take(&vm).await;
        if !app.state().book.may_hold(&vm).contains(&host) {
            return;
        }
        if let Err(error) = clear(&app, &vm, BTreeSet::from([host.clone()])).await {
            tracing::info!(%vm, %host, %error, "the host still counts as one that may hold the VM");
        }
    });
}

/// What hosts answered, and why others that answered did not say it.
type Answered = (
    BTreeMap<HostName, SurveyAnswer>,
    BTreeMap<HostName, ApiError>,
);

async fn ask_all(app: &App, survey: &Survey) -> Answered {
    let asked = survey
        .hosts
        .iter()
        .map(async |host| (host, ask(app, host, survey).await));
    let (mut answers, mut refusals) = Answered::default();
    for (host, answer) in join_all(asked).await {
        match answer {
            Ok(answer) => drop(answers.insert(host.clone(), answer)),
            Err(Some(refusal)) => drop(refusals.insert(host.clone(), refusal)),
            Err(None) => {}
        }
    }
    (answers, refusals)
}

/// Asks one host; one that answers and does not say it has a reason.
async fn ask(
    app: &App,
    host: &HostName,
    survey: &Survey,
) -> Result<SurveyAnswer, Option<ApiError>> {
    let (_, agent) = app.agent(host).map_err(|_| None)?;
    let request = SurveyRequest {
        level: survey.level,
    };
    let patience = match app.state().book.answers(host) {
        true => app.config.deadlines.act,
        false => SILENT_WAIT.min(app.config.deadlines.act),
    };
    let asked = tokio::time::timeout(patience, agent.survey(&survey.vm, &request));
    match asked.await {
        Ok(Ok(answer)) => match bounds::instance(host, &answer.instance) {
            Ok(()) => Ok(answer),
            Err(error) => {
                tracing::error!(vm = %survey.vm, %host, %error, "a host's word about a VM is not taken");
                Err(None)
            }
        },
        Ok(Err(error)) => {
            tracing::warn!(vm = %survey.vm, %host, %error, "a host does not say whether it holds a VM");
            match error {
                ClientError::Refused(error) => Err(Some(error)),
                _ => Err(None),
            }
        }
        Err(_) => Err(None),
    }
}
