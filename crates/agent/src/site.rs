//! What this host knows of its site, durably: the table, and which of its lives speaks.
//!
//! Owns `site.json` and `instance.json` in the state directory; what they mean is crate `site`'s. A change is written
//! before anything follows from it. Refuses: commands of a controller without a stamp or with an old one, and to begin
//! anew where a file is there that cannot be read.

use crate::agent::{Agent, Reply, SOON, blocking};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use godwit_rpc::{Failure, Peer};
use godwit_site::{HostSite, Stale};
use godwit_store::{StoreError, load_json, save_json};
use godwit_types::control_api::Done;
use godwit_types::site::{
    Instance, STAMP_HEADER, SiteAnswer, SiteHeard, SiteQuestion, SiteTable, SiteUpdate, Stamp,
    Standing, SurveyAnswer, SurveyRequest, WholeSurvey,
};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// In the state directory: the site's table.
const TABLE_FILE: &str = "site.json";
/// In the state directory: how often the agent was started.
const INSTANCE_FILE: &str = "instance.json";

/// How often the agent was started with this state directory.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lives {
    counter: u64,
}

/// What this host knows of its site.
pub(crate) struct Site {
    me: HostName,
    path: PathBuf,
    known: Mutex<Known>,
}

struct Known {
    host: HostSite,
    /// What is in memory is not on the disk: the last write failed.
    unwritten: bool,
}

fn stored(error: StoreError) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}

fn stale(error: Stale) -> ApiError {
    ApiError::new(ErrorCode::StaleController, error.to_string())
}

impl Site {
    /// Reads what is known and begins a new life of this host, durably.
    pub(crate) fn open(
        state_dir: &Path,
        me: HostName,
        boot_id: String,
        machine_id: String,
    ) -> Result<Self, StoreError> {
        let path = state_dir.join(TABLE_FILE);
        let table: SiteTable = load_json(&path)?.unwrap_or_default();
        let lives = state_dir.join(INSTANCE_FILE);
        let before: Lives = load_json(&lives)?.unwrap_or_default();
        let counter = before.counter.saturating_add(1);
        save_json(&lives, &Lives { counter })?;
        let instance = Instance {
            counter,
            boot_id,
            machine_id,
        };
        let mut host = HostSite::new(me.clone(), instance, table);
        host.plant = planted();
        let unwritten = false;
        let known = Mutex::new(Known { host, unwritten });
        Ok(Self { me, path, known })
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks, or changes what need not outlive the agent.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut HostSite) -> T) -> T {
        act(&mut self.lock().host)
    }

    /// Changes the table; it is written before this returns where `act` says so, or where an earlier write failed.
    fn change<T>(&self, act: impl FnOnce(&mut HostSite) -> (T, bool)) -> Result<T, ApiError> {
        let mut known = self.lock();
        let (result, write) = act(&mut known.host);
        known.unwritten |= write;
        if known.unwritten {
            save_json(&self.path, known.host.table()).map_err(stored)?;
            known.unwritten = false;
        }
        Ok(result)
    }

    /// Takes the stamp of a controller's command.
    pub(crate) fn accept(&self, said: Stamp) -> Result<(), ApiError> {
        let accepted = self.change(|host| match host.accept(said) {
            Ok(newer) => (Ok(()), newer),
            Err(error) => (Err(error), false),
        })?;
        accepted.map_err(stale)
    }

    /// Notes a grant, unless the table knows it.
    pub(crate) fn granted(&self, vm: &VmName, generation: Generation) -> Result<(), ApiError> {
        self.change(|host| {
            let row = host.table().vms.get(vm);
            let known = row.is_some_and(|row| {
                row.held >= generation && row.may_hold.contains(&self.me) && !row.deleted
            });
            if !known {
                host.granted(vm, generation);
            }
            ((), !known)
        })
    }

    fn update(&self, update: SiteUpdate) -> Result<SiteHeard, ApiError> {
        self.change(|host| match host.update(update) {
            Ok(()) => (Ok(host.heard()), true),
            Err(error) => (Err(error), false),
        })?
        .map_err(stale)
    }
}

/// The planted fault that the environment asks for, in builds that can have one.
fn planted() -> Option<godwit_site::plant::Plant> {
    #[cfg(feature = "faults")]
    return std::env::var("GODWIT_PLANT")
        .ok()
        .and_then(|name| godwit_site::plant::Plant::from_name(&name));
    #[cfg(not(feature = "faults"))]
    None
}

/// Lets a controller's command through only with a stamp that is not below the highest heard, which is durable first.
pub(crate) async fn stamped(
    State(agent): State<Arc<Agent>>,
    request: Request,
    next: Next,
) -> Response {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    let is_command = !reads && request.extensions().get::<Peer>() == Some(&Peer::Controller);
    if is_command {
        let text = request.headers().get(STAMP_HEADER);
        let stamp = text.and_then(|text| text.to_str().ok()?.parse().ok());
        if let Err(error) = agent.hear_stamp(stamp).await {
            return Failure(error).into_response();
        }
    }
    next.run(request).await
}

impl Agent {
    async fn hear_stamp(self: &Arc<Self>, stamp: Option<Stamp>) -> Reply<()> {
        let Some(stamp) = stamp else {
            let message = format!(
                "a controller's command must say its place among all in the header '{STAMP_HEADER}': use a controller of this version"
            );
            return Err(ApiError::new(ErrorCode::InvalidRequest, message));
        };
        let agent = Arc::clone(self);
        blocking(move || agent.site.accept(stamp)).await
    }

    /// Says, durably, whether this host may hold a VM; a no binds.
    pub(crate) async fn survey(
        self: &Arc<Self>,
        name: &VmName,
        request: SurveyRequest,
    ) -> Reply<SurveyAnswer> {
        let level = request.level;
        let supervised = self.supervisor.find(name);
        let live = supervised.as_ref().filter(|vm| vm.is_live());
        if let Some(vm) = live {
            return vm.survey(level).await;
        }
        let (records, vm) = (self.records.clone(), name.clone());
        let answer = blocking(move || records.survey(&vm, level)).await;
        match (answer, supervised) {
            // Its VM process is being started, and only that one may write.
            (Err(error), Some(vm)) if error.code == ErrorCode::Locked => {
                vm.need(SOON).await?;
                vm.survey(level).await
            }
            (answer, _) => answer,
        }
    }

    /// Adds to the table; answers once it is durable.
    pub(crate) async fn site_update(self: &Arc<Self>, update: SiteUpdate) -> Reply<SiteHeard> {
        let agent = Arc::clone(self);
        let heard = blocking(move || agent.site.update(update)).await?;
        self.boots.wake();
        Ok(heard)
    }

    /// Answers another host, from the table and the records, also while this one waits itself.
    pub(crate) async fn site_ask(
        self: &Arc<Self>,
        asker: HostName,
        removed: bool,
        question: SiteQuestion,
    ) -> Reply<SiteAnswer> {
        let agent = Arc::clone(self);
        blocking(move || {
            let wishes = question.wishes.iter();
            let (mut said, mut unread) = (Vec::new(), Vec::new());
            for wish in wishes {
                match agent.records.said(&wish.vm) {
                    Ok(record) => said.push(record),
                    Err(_) => unread.push(wish.vm.clone()),
                }
            }
            let answer = agent.site.with(|site| site.answer(&asker, &question, said));
            Ok(honest(answer, removed, &unread))
        })
        .await
    }

    /// All records, the table and this life.
    pub(crate) async fn site_survey(self: &Arc<Self>) -> Reply<WholeSurvey> {
        let agent = Arc::clone(self);
        blocking(move || {
            let records = agent.records.all_said()?;
            Ok(agent.site.with(|site| WholeSurvey {
                instance: site.instance().clone(),
                records,
                table: site.table().clone(),
            }))
        })
        .await
    }

    /// A person lets this host boot what it holds, for this life of it.
    pub(crate) fn boot_alone(&self) -> Done {
        self.site.with(HostSite::boot_alone);
        self.boots.wake();
        let message = format!(
            "host '{}' boots what it holds without an answer until its agent is started again",
            self.host()
        );
        Done { message }
    }
}

/// A host whose record of a VM cannot be read knows nothing of that VM, whatever its table says.
fn honest(mut answer: SiteAnswer, removed: bool, unread: &[VmName]) -> SiteAnswer {
    if removed {
        answer.standing = Standing::Removed;
    }
    answer.vms.retain(|vm, _| !unread.contains(vm));
    answer
}

#[cfg(test)]
#[path = "site_tests.rs"]
mod tests;
