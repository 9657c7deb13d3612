//! Booting what no request asked for: after a reboot of the host, and when a QEMU died.
//!
//! Looks for VMs that should run and have no guest, asks the site about all of them at once, and boots those that crate
//! `site` lets. Owns how far each has come, in memory. Refuses: to boot unasked, while the host shuts down, too many at a
//! time, or by turning a VM off that did not come up.

use crate::agent::{ACT, Agent, NEED, READ, Reply, blocking, unexpected};
use crate::boot_cases::{Cases, Down, Step};
use crate::config::BootRule;
use crate::evidence;
use crate::keeping::changed;
use crate::manager::Manager;
use crate::supervisor::Supervised;
use godwit_rpc::pki::Holder;
use godwit_rpc::{
    Admission, AgentClient, Client, ControllerClient, Current, Revocations, Role, Unwanted,
};
use godwit_site::HostSite;
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::site::{SiteAnswer, SiteHost, SiteQuestion};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::{JoinError, JoinSet};

/// Most guests that are booted at a time.
pub(crate) const AT_ONCE: usize = 4;
/// Between two looks at what has died.
const LOOK_EACH: Duration = Duration::from_secs(1);
/// Longest wait for a host's answer.
const ASK_WAIT: Duration = Duration::from_secs(2);
/// Longest wait for the controller's: it may have to ask first whether another life of this host answers.
const ASK_CONTROLLER_WAIT: Duration = Duration::from_secs(6);
/// Longest wait for the word whether this host shuts down.
const STOPPING_WAIT: Duration = Duration::from_secs(2);
/// Until that is asked again.
pub(crate) const STOPPING_PAUSE: Duration = Duration::from_secs(5);

/// Whom the site's question goes to.
#[derive(Debug, Clone)]
pub(crate) enum Whom {
    Controller,
    Host(SiteHost),
}

impl Whom {
    fn patience(&self) -> Duration {
        match self {
            Self::Controller => ASK_CONTROLLER_WAIT,
            Self::Host(_) => ASK_WAIT,
        }
    }
}

type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;
/// Carries the question and brings the answer.
pub(crate) type Asker =
    Arc<dyn Fn(Whom, SiteQuestion) -> Later<Result<SiteAnswer, ApiError>> + Send + Sync>;
/// Says whether this host shuts down; nothing where nobody knows.
pub(crate) type Stopping = Arc<dyn Fn() -> Later<Option<bool>> + Send + Sync>;

/// How far each VM has come that should run and has no guest.
pub(crate) struct Boots {
    cases: Mutex<Cases>,
    wake: Notify,
    turns: Semaphore,
    ends: watch::Sender<bool>,
    asker: Asker,
    pub(crate) stopping: Stopping,
}

impl Boots {
    pub(crate) fn new(asker: Asker, stopping: Stopping) -> Self {
        Self {
            cases: Mutex::default(),
            wake: Notify::new(),
            turns: Semaphore::new(AT_ONCE),
            ends: watch::Sender::new(false),
            asker,
            stopping,
        }
    }

    fn cases(&self) -> MutexGuard<'_, Cases> {
        self.cases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks again at once.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Shows in a list how far the VM has come.
    pub(crate) fn show(&self, vm: &mut HostVm, host: &HostName, log: &str) {
        self.cases().show(vm, Instant::now(), host, log);
    }
}

/// Asks over mutual TLS, as this host.
pub(crate) fn asker(
    current: Arc<Current>,
    controller: Option<SocketAddr>,
    revocations: Arc<Revocations>,
) -> Asker {
    Arc::new(move |whom, question| {
        let (identity, revocations) = (current.identity(), Arc::clone(&revocations));
        Box::pin(async move {
            let internal = |error: godwit_rpc::pki::PkiError| {
                ApiError::new(ErrorCode::Internal, error.to_string())
            };
            Ok(match whom {
                Whom::Controller => {
                    let nowhere = || {
                        let message = "host.toml does not say where the controller listens";
                        ApiError::new(ErrorCode::HostUnreachable, message)
                    };
                    let address = controller.ok_or_else(nowhere)?;
                    let client = Client::tls(address, &identity, Role::Controller);
                    let client = ControllerClient::new(client.map_err(internal)?);
                    client.site_ask(&question).await?
                }
                Whom::Host(host) => {
                    let role = Role::Host(host.name.clone());
                    let enrolled: Arc<dyn Admission> = Arc::new(Enrolled {
                        life: host.serial,
                        revocations,
                    });
                    let client =
                        Client::tls_admitted(host.address, &identity, role, Some(enrolled));
                    let client = AgentClient::new(client.map_err(internal)?);
                    client.site_ask(&question).await?
                }
            })
        })
    })
}

/// Only certificates of the life that the site's table names: a removed host does not answer for the one that took its
/// name. Nor does an old copy of it, whose certificate a later one of that life has replaced.
struct Enrolled {
    life: String,
    revocations: Arc<Revocations>,
}

impl Admission for Enrolled {
    fn admits(&self, holder: &Holder) -> bool {
        holder.life == self.life && !self.revocations.is_replaced(holder)
    }

    fn why_unwanted(&self, holder: &Holder) -> Unwanted {
        self.revocations.why_unwanted(holder)
    }
}

/// Whether the system manager is taking this host down.
pub(crate) fn system_is_stopping() -> Stopping {
    Arc::new(|| Box::pin(async { Manager::default().stops(STOPPING_WAIT).await }))
}

/// What was answered so far, by whom; nothing of one who does not speak for himself.
pub(crate) type Answers = JoinSet<(Option<SiteAnswer>, Whom)>;

impl Agent {
    /// Boots what may be booted until `stop` turns true.
    pub(crate) async fn keep_booting(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        while !*stop.borrow_and_update() {
            let round = async {
                self.boot_round().await;
                let _ = tokio::time::timeout(LOOK_EACH, self.boots.wake.notified()).await;
            };
            tokio::select! {
                () = round => {}
                changed = stop.changed() => if changed.is_err() { break },
            }
        }
        self.boots.ends.send_replace(true);
    }

    /// Looks, asks if it is time to, judges.
    pub(crate) async fn boot_round(self: &Arc<Self>) {
        self.look_whether_back().await;
        if self.closing.is_on() {
            return;
        }
        self.look_for_the_dead().await;
        if self.boots.cases().is_due(Instant::now()) {
            self.ask_the_site().await;
        }
        self.settle();
    }

    /// Finds the VMs that should run and have no guest.
    async fn look_for_the_dead(self: &Arc<Self>) {
        let agent = Arc::clone(self);
        let suspects = tokio::task::spawn_blocking(move || agent.suspects()).await;
        let mut down = BTreeMap::new();
        let mut asked = JoinSet::new();
        for (vm, found) in suspects.unwrap_or_default() {
            if !vm.is_live() {
                down.insert(vm.config().vm.clone(), found);
                continue;
            }
            asked.spawn(async move {
                let answer = vm.ask(&VmRequest::Status, READ).await;
                let crashed = matches!(answer, Ok(VmAnswer::Status(status)) if status.vm.state == VmState::Crashed);
                crashed.then(|| (vm.config().vm.clone(), found))
            });
        }
        down.extend(asked.join_all().await.into_iter().flatten());
        let (fresh, over) = self.boots.cases().found(&down, Instant::now());
        self.site.with(|site| {
            if !fresh.is_empty() {
                // What was answered so far was no answer about these.
                site.forget_answers();
            }
            for (vm, generation) in fresh {
                site.wish(vm, generation);
            }
            over.iter().for_each(|vm| site.no_wish(vm));
        });
    }

    /// VMs whose record says that they run and which have no QEMU as far as the files show.
    fn suspects(&self) -> Vec<(Arc<Supervised>, Down)> {
        let names = self.supervisor.names();
        let all = names.iter().filter_map(|name| self.supervisor.find(name));
        let down = all.filter_map(|vm| {
            let down = self.down(&vm)?;
            Some((vm, down))
        });
        down.collect()
    }

    /// What a boot is judged by; none of a VM that should not run, or has a QEMU as far as the files show.
    fn down(&self, vm: &Supervised) -> Option<Down> {
        let name = &vm.config().vm;
        let generation = self.runs_without_qemu(name)?;
        let spec = self.records.spec(name).ok().flatten()?;
        Some(Down {
            generation,
            crashed: self.records.ran_in_boot(name, &self.boot_id),
            on_crash: spec.on_crash,
        })
    }

    /// The generation of a VM that should run here, and has no QEMU as far as the files show. Its record is read first:
    /// of most VMs it ends the look.
    pub(crate) fn runs_without_qemu(&self, name: &VmName) -> Option<Generation> {
        let generation = self.records.should_run(name)?;
        (!evidence::qemu_may_live(&self.run_dir(name))).then_some(generation)
    }

    /// Asks the controller and all other hosts at once, and judges with each answer.
    async fn ask_the_site(self: &Arc<Self>) {
        let (question, hosts) = self.site.with(|site| {
            let hosts: Vec<SiteHost> = site.neighbours().cloned().collect();
            (site.question(), hosts)
        });
        let Some(question) = question else { return };
        self.boots.cases().asked(Instant::now());
        let mut answers = self.ask_all(&question, hosts);
        // What was answered an earlier time does not count.
        self.site.with(HostSite::forget_answers);
        while let Some(answer) = answers.join_next().await {
            if self.site.with(|site| hear(site, answer)) {
                self.settle();
            }
        }
        self.site.with(HostSite::round_is_over);
        self.settle();
    }

    /// Asks everybody about one VM that this host held under `held`; beside the answers gives what it knows itself, to weigh
    /// them with.
    pub(crate) fn ask_about(&self, vm: &VmName, held: Generation) -> (HostSite, Answers) {
        let asking = self.site.with(|site| site.asking_about(vm, held));
        let hosts = asking.neighbours().cloned().collect();
        let question = asking.question();
        let answers = question.map(|question| self.ask_all(&question, hosts));
        (asking, answers.unwrap_or_default())
    }

    /// Carries a question to the controller and to hosts, to all at once; gives what each says that speaks for itself.
    pub(crate) fn ask_all(&self, question: &SiteQuestion, hosts: Vec<SiteHost>) -> Answers {
        let mut answers = JoinSet::new();
        let all = std::iter::once(Whom::Controller).chain(hosts.into_iter().map(Whom::Host));
        for whom in all {
            let asking = (self.boots.asker)(whom.clone(), question.clone());
            answers.spawn(async move {
                let answer = tokio::time::timeout(whom.patience(), asking).await;
                let answer = answer.ok().and_then(Result::ok);
                (answer.filter(|answer| is_from(answer, &whom)), whom)
            });
        }
        answers
    }

    /// Judges every VM that waits.
    fn settle(self: &Arc<Self>) {
        let alone = self.config.boot == BootRule::Alone;
        let open = self.boots.cases().open(Instant::now());
        for (vm, waited_s) in open {
            let judged = self.site.with(|site| site.judge(&vm, waited_s, alone));
            let step = self.boots.cases().judged(&vm, judged);
            let agent = Arc::clone(self);
            match step {
                Some(Step::Boot) => drop(tokio::spawn(async move { agent.boot(&vm).await })),
                Some(Step::GiveWay) => drop(tokio::spawn(async move { agent.give_way(&vm).await })),
                None => {}
            }
        }
    }

    async fn boot(self: Arc<Self>, name: &VmName) {
        let Ok(_turn) = self.boots.turns.acquire().await else {
            return;
        };
        let Some(crashed) = self.boots.cases().has_crashed(name) else {
            return;
        };
        let ends = *self.boots.ends.borrow();
        if ends || self.closing.is_on() || crashed && (self.boots.stopping)().await == Some(true) {
            let until = Instant::now().checked_add(STOPPING_PAUSE);
            let why = "this host shuts down, so it is not booted";
            return self.boots.cases().put_off(name, why, until);
        }
        match self.boot_now(name).await {
            Ok(()) => {
                tracing::info!(vm = %name, crashed, "booted the VM, which had no guest");
                self.site.with(|site| site.no_wish(name));
                self.boots.cases().booted(name, Instant::now());
            }
            Err(error) => {
                tracing::error!(vm = %name, %error, "cannot boot the VM");
                let why = format!("it could not be booted: {error}");
                self.boots.cases().failed(name, &why, Instant::now());
            }
        }
    }

    async fn boot_now(self: &Arc<Self>, name: &VmName) -> Reply<()> {
        let vm = self.known(name)?;
        let judged = self.boots.cases().generation(name);
        if self.records.should_run(name) != judged {
            return Err(changed(name, self.host()));
        }
        let promise = self.promise_memory(&vm).await?;
        vm.need(NEED).await?;
        // Somebody's answer may have come after the one by which this was decided.
        self.must_not_be_refuted(name)?;
        match vm.ask(&VmRequest::Boot, ACT).await? {
            VmAnswer::Done(_) => {}
            _ => return Err(unexpected(name)),
        }
        drop(promise);
        let (agent, name) = (Arc::clone(self), name.clone());
        blocking(move || {
            agent.remember_boot(&name);
            Ok(())
        })
        .await
    }

    fn must_not_be_refuted(&self, name: &VmName) -> Reply<()> {
        let why = self.site.with(|site| site.refuted(name).map(str::to_owned));
        match why.filter(|_| !self.site.with(|site| site.is_alone())) {
            Some(why) => Err(ApiError::new(
                ErrorCode::WrongState,
                format!("VM {name} is not booted on host {}: {why}", self.host()),
            )),
            None => Ok(()),
        }
    }

    /// A controller that is in charge knows another holder: the VM is off here, then forgotten.
    async fn give_way(self: Arc<Self>, name: &VmName) {
        let Some(judged) = self.boots.cases().generation(name) else {
            return;
        };
        match self.give_up(name, judged).await {
            Ok(()) => {
                tracing::warn!(vm = %name, "another host holds the VM: its record here gave way")
            }
            Err(error) => {
                tracing::error!(vm = %name, %error, "the VM's record cannot give way");
                let why = format!("its record on this host could not give way: {error}");
                self.boots.cases().failed(name, &why, Instant::now());
            }
        }
    }

    /// A person started the VM, or it is gone from here: nothing waits for it.
    pub(crate) fn no_boot_wanted(&self, name: &VmName) {
        self.site.with(|site| site.no_wish(name));
        self.boots.cases().forget(name);
        self.boots.wake();
    }

    pub(crate) fn remember_boot(&self, name: &VmName) {
        if let Err(error) = self.records.remember_boot(name, &self.boot_id) {
            tracing::error!(vm = %name, %error, "cannot note that the VM was started in this boot");
        }
    }
}

/// Takes in what has come of one question; says whether that tells anything.
pub(crate) fn hear(
    site: &mut HostSite,
    answered: Result<(Option<SiteAnswer>, Whom), JoinError>,
) -> bool {
    match answered {
        Ok((Some(answer), _)) => site.hear(answer),
        Ok((None, Whom::Controller)) => site.no_controller(),
        Ok((None, Whom::Host(_))) | Err(_) => return false,
    }
    true
}

/// Whether an answer speaks for the one who was asked: no host speaks for the controller or for another host.
fn is_from(answer: &SiteAnswer, whom: &Whom) -> bool {
    match whom {
        Whom::Controller => answer.from.is_none(),
        Whom::Host(host) => answer.from.as_ref() == Some(&host.name) && !answer.in_charge,
    }
}

#[cfg(test)]
#[path = "boot_tests.rs"]
mod tests;
