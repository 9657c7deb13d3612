//! What this host knows of its site, durably: the table, and which of its lives speaks.
//!
//! Owns `site.json` and `instance.json` in the state directory; what they mean is crate `site`'s. A change is written
//! before anything follows from it. Refuses: commands of a controller without a stamp or with an old one, and to begin
//! anew where a file is there that cannot be read.

use crate::agent::{Agent, Reply, SOON, blocking};
use crate::evidence;
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use godwit_rpc::Unwanted;
use godwit_rpc::agent_client::path;
use godwit_rpc::{Failure, Peer};
use godwit_site::{HostSite, Stale};
use godwit_store::{DOCUMENT_BYTES_MAX, StoreError, json_size, load_json, save_json};
use godwit_types::control_api::Done;
use godwit_types::site::{
    Instance, RecordAnswer, RecordSaid, STAMP_HEADER, SiteAnswer, SiteHeard, SiteQuestion,
    SiteTable, SiteUpdate, Stamp, Standing, SurveyAnswer, SurveyRequest, WholeSurvey,
};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// In the state directory: the site's table.
const TABLE_FILE: &str = "site.json";
/// In the state directory: how often the agent was started.
const INSTANCE_FILE: &str = "instance.json";

/// Longest table with a grant in it, bytes: what remains up to the bound is for stamps, so that a word is always written.
const GRANTS_BYTES_MAX: u64 = DOCUMENT_BYTES_MAX - (64 << 10);
/// Longest table that a controller's update may make, bytes: what remains is for grants.
const UPDATES_BYTES_MAX: u64 = DOCUMENT_BYTES_MAX - (1 << 20);

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
    /// Held over a change and its write, one after the other; who only asks does not wait for a disk.
    turn: Mutex<()>,
}

struct Known {
    host: HostSite,
    /// What is in memory is not on the disk: the last write failed.
    unwritten: bool,
    /// What is on the disk of the controller's words: a crash forgets none of these.
    written: SiteHeard,
}

/// Why an agent does not know its site.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SiteError {
    /// A file that was written is not what it was.
    #[error(
        "{0}. Without it this host does not know what it was told, so its agent does not start; its guests run on. Keep the file where it is, shut its guests down from inside, power this host off, run 'godwit host remove' with its name and --confirm-unreachable where the controller is, and let it join anew with an empty state directory"
    )]
    Damaged(StoreError),
    #[error(transparent)]
    Store(StoreError),
    /// The records cannot be listed.
    #[error("cannot list {}: {source}", path.display())]
    Unlisted {
        path: PathBuf,
        source: std::io::Error,
    },
}

impl From<StoreError> for SiteError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Damaged { .. } | StoreError::TooLarge { .. } => Self::Damaged(error),
            other => Self::Store(other),
        }
    }
}

/// Whether this host was ever told of a VM.
fn has_records(state_dir: &Path) -> Result<bool, SiteError> {
    let path = state_dir.join("vms");
    match std::fs::read_dir(&path) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(SiteError::Unlisted { path, source }),
    }
}

/// The table of a host that has records and lost its table: it may have had neighbours, so it does not boot alone.
fn begun_anew(path: &Path) -> Result<SiteTable, StoreError> {
    tracing::error!(path = %path.display(), "the site's table is gone: no VM is booted until the controller has answered");
    let table = SiteTable {
        had_second: true,
        ..SiteTable::default()
    };
    save_json(path, &table)?;
    Ok(table)
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
    ) -> Result<Self, SiteError> {
        let path = state_dir.join(TABLE_FILE);
        let found: Option<SiteTable> = load_json(&path)?;
        let lives = state_dir.join(INSTANCE_FILE);
        let before: Lives = load_json(&lives)?.unwrap_or_default();
        let counter = before.counter.saturating_add(1);
        let table = match found {
            Some(table) => table,
            None if has_records(state_dir)? => begun_anew(&path)?,
            None => SiteTable::default(),
        };
        save_json(&lives, &Lives { counter })?;
        let instance = Instance {
            counter,
            boot_id,
            machine_id,
        };
        let mut host = HostSite::new(me.clone(), instance, table);
        host.plant = planted();
        let known = Mutex::new(Known {
            unwritten: false,
            written: host.heard(),
            host,
        });
        Ok(Self {
            me,
            path,
            known,
            turn: Mutex::default(),
        })
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
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (result, due) = {
            let mut known = self.lock();
            let (result, write) = act(&mut known.host);
            known.unwritten |= write;
            let due = known
                .unwritten
                .then(|| (known.host.table().clone(), known.host.heard()));
            (result, due)
        };
        if let Some((table, heard)) = due {
            save_json(&self.path, &table).map_err(stored)?;
            let mut known = self.lock();
            // Nobody else changes the table: what was written is what is in memory.
            (known.unwritten, known.written) = (false, heard);
        }
        Ok(result)
    }

    /// Which of the controller's words this host has durably heard: what it may tell others that it knows.
    pub(crate) fn heard(&self) -> SiteHeard {
        self.lock().written
    }

    /// This life and the table, with no word that a crash would forget.
    fn whole(&self) -> (Instance, SiteTable) {
        let known = self.lock();
        let mut table = known.host.table().clone();
        (table.stamp, table.complete) = (known.written.stamp, known.written.complete);
        (known.host.instance().clone(), table)
    }

    /// Takes the stamp of a controller's command.
    pub(crate) fn accept(&self, said: Stamp) -> Result<(), ApiError> {
        let mut refused = None;
        let written = self.change(|host| {
            let accepted = host.accept(said);
            let newer = *accepted.as_ref().unwrap_or(&false);
            refused = accepted.err();
            ((), newer)
        });
        // An old word is one, also where nothing can be written.
        refused.map_or(written, |error| Err(stale(error)))
    }

    /// Changes the table, unless it would become longer than `limit` by that: what is written can be read back.
    fn grow<T>(
        &self,
        limit: u64,
        act: impl FnOnce(&mut HostSite) -> Result<(T, bool), ApiError>,
    ) -> Result<T, ApiError> {
        self.change(|host| {
            let before = host.clone();
            let grown = act(host).and_then(|(result, write)| {
                if write {
                    self.must_fit(limit, &before, host)?;
                }
                Ok((result, write))
            });
            match grown {
                Ok((result, write)) => (Ok(result), write),
                Err(error) => {
                    *host = before;
                    (Err(error), false)
                }
            }
        })?
    }

    fn must_fit(&self, limit: u64, before: &HostSite, after: &HostSite) -> Result<(), ApiError> {
        let size = |host: &HostSite| json_size(&self.path, host.table()).map_err(stored);
        let grown = size(after)?;
        if grown <= limit || grown <= size(before)? {
            return Ok(());
        }
        let message = format!(
            "the site's table on host '{}' would be {grown} bytes long with {} VMs and {} hosts, its limit is {limit}: {} is kept as it is, and no more is told to this host. Names of deleted VMs count, too, and are never dropped: give new VMs such names",
            self.me,
            after.table().vms.len(),
            after.table().hosts.len(),
            self.path.display()
        );
        Err(ApiError::new(ErrorCode::InvalidRequest, message).on_host(&self.me))
    }

    /// Notes a grant, unless the table knows it.
    pub(crate) fn granted(&self, vm: &VmName, generation: Generation) -> Result<(), ApiError> {
        self.grow(GRANTS_BYTES_MAX, |host| {
            let row = host.table().vms.get(vm);
            let known = row.is_some_and(|row| {
                row.held >= generation && row.may_hold.contains(&self.me) && !row.deleted
            });
            if !known {
                host.granted(vm, generation);
            }
            Ok(((), !known))
        })
    }

    fn update(&self, update: SiteUpdate) -> Result<SiteHeard, ApiError> {
        self.grow(UPDATES_BYTES_MAX, |host| {
            host.update(update).map_err(stale)?;
            Ok(((), true))
        })?;
        Ok(self.heard())
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
        let heard = agent.hear_stamp(stamp).await;
        if let Err(error) = heard.or_else(|error| unwritten_is_no_reason(&request, error)) {
            return Failure(error).into_response();
        }
    }
    next.run(request).await
}

/// A stop is carried out although its stamp could not be written: it ends a guest and begins none, so that nobody holds the
/// VM by it who did not before. This host does not tell that it has heard that word.
fn unwritten_is_no_reason(request: &Request, error: ApiError) -> Result<(), ApiError> {
    let route = request.extensions().get::<MatchedPath>();
    let is_stop = route.is_some_and(|route| route.as_str() == path::STOP);
    if !is_stop || error.code != ErrorCode::Internal {
        return Err(error);
    }
    tracing::error!(%error, "a stop is carried out, though its stamp is not written");
    Ok(())
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
        let record = self.survey_record(name, request.level).await?;
        // Before it answers that it holds nothing, the host has looked whether a guest of it lives.
        let (agent, vm) = (Arc::clone(self), name.clone());
        let look = move || Ok((agent.may_live(&vm)?, agent.records.images(&vm)));
        let (may_live, images) = blocking(look).await?;
        let heard = |site: &mut HostSite| (site.instance().clone(), site.heard());
        let (instance, knows) = self.site.with(heard);
        Ok(SurveyAnswer {
            highest: record.highest,
            claim: record.claim,
            may_live,
            instance,
            knows,
            images,
        })
    }

    async fn survey_record(
        self: &Arc<Self>,
        name: &VmName,
        level: Generation,
    ) -> Reply<RecordAnswer> {
        // Whatever the record says: what lives may know better.
        if let Some(vm) = self.living(name).await? {
            return vm.survey(level).await;
        }
        let (records, vm) = (self.records.clone(), name.clone());
        let answer = blocking(move || records.survey(&vm, level)).await;
        match (answer, self.supervisor.find(name)) {
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
        unwanted: Option<Unwanted>,
        question: SiteQuestion,
    ) -> Reply<SiteAnswer> {
        let agent = Arc::clone(self);
        blocking(move || {
            let answer = |said| agent.site.with(|site| site.answer(&asker, &question, said));
            // No record is read for whoever hears of none.
            if let Some(why) = unwanted {
                return Ok(only_unwanted(answer(Vec::new()), &question, why));
            }
            let (mut said, mut unread) = (Vec::new(), Vec::new());
            for wish in &question.wishes {
                match agent.said(&wish.vm) {
                    Ok(record) => said.push(record),
                    Err(_) => unread.push(wish.vm.clone()),
                }
            }
            Ok(honest(answer(said), &unread))
        })
        .await
    }

    /// What the record of one VM says; nothing where a QEMU lives that it denies.
    fn said(&self, vm: &VmName) -> Reply<RecordSaid> {
        self.must_not_be_denied(vm)?;
        self.records.said(vm)
    }

    fn must_not_be_denied(&self, vm: &VmName) -> Reply<()> {
        match self.is_denied_by_its_record(vm)? {
            true => Err(evidence::alive(vm, self.host(), &self.run_dir(vm))),
            false => Ok(()),
        }
    }

    /// All records, the table and this life.
    pub(crate) async fn site_survey(self: &Arc<Self>) -> Reply<WholeSurvey> {
        let agent = Arc::clone(self);
        blocking(move || {
            let (mut records, unread) = agent.records.all_said()?;
            let mut unread: BTreeSet<VmName> = unread.into_keys().collect();
            // What a record denies while something of the VM lives has not been said either.
            records.retain(|record| {
                let is_said = agent.must_not_be_denied(&record.vm).is_ok();
                is_said || !unread.insert(record.vm.clone())
            });
            let (instance, table) = agent.site.whole();
            Ok(WholeSurvey {
                instance,
                records,
                unread,
                table,
            })
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

/// A host whose certificate is wanted no more hears that, and nothing of any VM.
fn only_unwanted(answer: SiteAnswer, question: &SiteQuestion, why: Unwanted) -> SiteAnswer {
    let wishes = question.wishes.iter();
    SiteAnswer {
        from: answer.from,
        standing: match why {
            Unwanted::Removed => Standing::Removed,
            Unwanted::Replaced => Standing::OldCopy,
        },
        replaced: why == Unwanted::Replaced,
        in_charge: answer.in_charge,
        stamp: answer.stamp,
        unread: wishes.map(|wish| wish.vm.clone()).collect(),
        ..SiteAnswer::default()
    }
}

/// A host whose record of a VM cannot be read says nothing of that VM, whatever its table says.
fn honest(mut answer: SiteAnswer, unread: &[VmName]) -> SiteAnswer {
    answer.unread.extend(unread.iter().cloned());
    answer
}

#[cfg(test)]
#[path = "site_tests.rs"]
mod tests;
