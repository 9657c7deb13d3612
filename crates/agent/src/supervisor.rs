//! One task per VM that sees to it that a VM process lives whenever the VM's record asks for one.
//!
//! ```text
//!  idle --record asks or a request needs it--> starting --answers--> live --connection ends--> starting or idle
//!                                                 |  ^                 (1. adopt what listens, 2. else start)
//!                                                 +--+ ends before it answers: wait longer each time, say so
//! ```
//! Owns the VM processes only as their starter: they outlive it, and it adopts what it finds listening. Carries each
//! process's messages to the other host's agent and the replies back. Refuses: to give up on a VM that this host
//! may hold; to end a VM process.

use crate::agent::unexpected;
use crate::backoff::Backoff;
use crate::carrying::{AGAIN_EACH, Carrier, carry_all};
use crate::evidence;
use crate::launch::{self, VmProgram};
use crate::life::Life;
use crate::records::Records;
use crate::scope::{self, Place};
use crate::vm_client::{VmClientError, VmConnection, ask};
use godwit_store::load_json;
use godwit_types::host_api::{SOCKET_FILE, VmAnswer, VmProcessConfig, VmRequest, closing_mark};
use godwit_types::site::RecordAnswer;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Longest time from start to the first answer.
const READY_WAIT: Duration = Duration::from_secs(15);
/// Longest pause between two looks at whether a starting process listens.
const READY_POLL_MAX: Duration = Duration::from_millis(10);
/// How often systemd is asked for a scope before a VM does without, and how much longer to wait after each time.
const SCOPE_TURNS: u32 = 4;
const SCOPE_PAUSE: Duration = Duration::from_millis(50);
/// Wait of one call for a process's outgoing messages.
const OUTBOX_WAIT: Duration = Duration::from_secs(20);
/// How much longer than asked that call may take.
const OUTBOX_GRACE: Duration = Duration::from_secs(10);
/// Longest wait until a process that was found has looked at its record, which may wait for its disk.
const KEEP_WAIT: Duration = Duration::from_secs(2);
/// Longest wait for the answer to a survey, which may wait for its disk.
const SURVEY_WAIT: Duration = Duration::from_secs(12);

/// One VM under supervision.
pub struct Supervised {
    name: VmName,
    /// But for the addresses: those may come and go while the agent runs.
    config: VmProcessConfig,
    addresses: Mutex<Vec<IpAddr>>,
    records: Records,
    life: watch::Sender<Life>,
    wake: Notify,
    /// A request needs a VM process although the record alone asks for none.
    needed: Mutex<bool>,
    /// How many write the VM's record themselves at this moment: no VM process is started.
    held: Mutex<u32>,
    /// The VM was deleted: the task ends.
    gone: Mutex<bool>,
    rests: Arc<AtomicBool>,
    /// The other host of a migration, while it does not hear what the VM process says to it, and why, as it was told last.
    pub(crate) deaf_peer: Mutex<Option<(HostName, String)>>,
}

/// While it lives no VM process is started for the VM.
pub struct HoldOff(Arc<Supervised>);

impl Drop for HoldOff {
    fn drop(&mut self) {
        let mut held = lock(&self.0.held);
        *held = held.saturating_sub(1);
        drop(held);
        self.0.wake.notify_one();
    }
}

/// All VMs of this host.
pub struct Supervisor {
    program: VmProgram,
    carrier: Carrier,
    records: Records,
    /// The host goes down and no VM process is started: those that end now end with it.
    rests: Arc<AtomicBool>,
    vms: Mutex<BTreeMap<VmName, Arc<Supervised>>>,
}

/// Why there is no VM process.
enum NotStarted {
    /// It could not be started, or ended.
    Failed(String),
    /// Systemd gave it no scope.
    NoScope(String),
    /// Systemd cannot be asked, or says nothing.
    Hung(String),
}

impl NotStarted {
    fn why(self) -> String {
        let (Self::Failed(why) | Self::NoScope(why) | Self::Hung(why)) = self;
        why
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Supervisor {
    /// A supervisor without VMs.
    pub fn new(program: VmProgram, carrier: Carrier, records: Records) -> Self {
        Self {
            program,
            carrier,
            records,
            rests: Arc::default(),
            vms: Mutex::new(BTreeMap::new()),
        }
    }

    /// The VM's supervision, begun now if it was not.
    pub fn supervise(&self, config: VmProcessConfig) -> Arc<Supervised> {
        let mut vms = lock(&self.vms);
        if let Some(known) = vms.get(&config.vm) {
            *lock(&known.addresses) = config.migration_addresses;
            return known.clone();
        }
        let vm = Arc::new(Supervised {
            name: config.vm.clone(),
            addresses: Mutex::new(config.migration_addresses.clone()),
            config,
            records: self.records.clone(),
            life: watch::Sender::new(Life::Idle),
            wake: Notify::new(),
            needed: Mutex::new(false),
            held: Mutex::new(0),
            gone: Mutex::new(false),
            rests: Arc::clone(&self.rests),
            deaf_peer: Mutex::default(),
        });
        vms.insert(vm.name.clone(), vm.clone());
        tokio::spawn(vm.clone().run(self.program.clone(), self.carrier.clone()));
        vm
    }

    /// The program that VM processes are.
    pub fn program(&self) -> &Path {
        &self.program.program
    }

    /// The VM's supervision, if there is one.
    pub fn find(&self, name: &VmName) -> Option<Arc<Supervised>> {
        lock(&self.vms).get(name).cloned()
    }

    /// Starts no VM process from here on, or does so again. Those that live go on.
    pub fn rest(&self, rests: bool) {
        self.rests.store(rests, Ordering::SeqCst);
        lock(&self.vms).values().for_each(|vm| vm.wake.notify_one());
    }

    /// Names of all VMs under supervision.
    pub fn names(&self) -> Vec<VmName> {
        lock(&self.vms).keys().cloned().collect()
    }

    /// Ends a VM's supervision; its process, if any, is left alone.
    pub fn forget(&self, name: &VmName) {
        if let Some(vm) = lock(&self.vms).remove(name) {
            *lock(&vm.gone) = true;
            vm.wake.notify_one();
        }
    }
}

impl Supervised {
    /// Where the VM process listens.
    pub fn socket(&self) -> PathBuf {
        Path::new(&self.config.run_dir).join(SOCKET_FILE)
    }

    /// How its VM process is to be, but for the addresses.
    pub fn config(&self) -> &VmProcessConfig {
        &self.config
    }

    /// How its next VM process is told to be.
    fn to_tell(&self) -> VmProcessConfig {
        VmProcessConfig {
            migration_addresses: lock(&self.addresses).clone(),
            ..self.config.clone()
        }
    }

    /// Whether its VM process was told otherwise when it was started, by an agent with another configuration.
    pub fn was_told_otherwise(&self) -> bool {
        let path = self.run_dir().join(launch::CONFIG_FILE);
        match load_json::<VmProcessConfig>(&path) {
            Ok(Some(told)) => told != self.to_tell(),
            // What cannot be read is no ground to end anything.
            Ok(None) | Err(_) => false,
        }
    }

    /// Whether a VM process lives.
    pub fn life(&self) -> Life {
        self.life.borrow().clone()
    }

    /// Whether a VM process answers.
    pub fn is_live(&self) -> bool {
        matches!(*self.life.borrow(), Life::Live { .. })
    }

    /// Has no VM process started until the guard is dropped; one that lives goes on.
    pub fn hold_off(self: &Arc<Self>) -> HoldOff {
        *lock(&self.held) += 1;
        HoldOff(Arc::clone(self))
    }

    /// Where the VM's process keeps what a reboot empties.
    pub fn run_dir(&self) -> &Path {
        Path::new(&self.config.run_dir)
    }

    /// Has a VM process made, whatever the record says, and waits until it answers.
    pub async fn need(&self, patience: Duration) -> Result<(), ApiError> {
        let mut life = self.life.subscribe();
        if matches!(*life.borrow_and_update(), Life::Live { .. }) {
            return Ok(());
        }
        self.want();
        let live = life.wait_for(|life| matches!(life, Life::Live { .. }));
        match tokio::time::timeout(patience, live).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(self.not_live()),
        }
    }

    /// Has a VM process made, whatever the record says.
    pub fn want(&self) {
        *lock(&self.needed) = true;
        self.wake.notify_one();
    }

    fn not_live(&self) -> ApiError {
        let why = match self.life() {
            Life::Starting(Some(why)) => why,
            _ => "it does not answer yet".into(),
        };
        let message = format!(
            "the VM process of '{}' could not be started: {why}",
            self.name
        );
        ApiError::new(ErrorCode::Hypervisor, message).on_host(&self.config.host)
    }

    /// Waits until no VM process lives. Its connections may close before its socket does: one of its threads may hold
    /// that until the kernel has ended it.
    pub async fn ended(&self, patience: Duration) -> bool {
        let mut life = self.life.subscribe();
        let ended = async {
            let left = life.wait_for(|life| !matches!(life, Life::Live { .. }));
            if left.await.is_err() {
                return false;
            }
            while evidence::process_may_live(self.run_dir()) {
                tokio::time::sleep(READY_POLL_MAX).await;
            }
            true
        };
        tokio::time::timeout(patience, ended).await.unwrap_or(false)
    }

    /// The VM process that answers.
    pub fn live_pid(&self) -> Option<i32> {
        match *self.life.borrow() {
            Life::Live { pid } => Some(pid),
            _ => None,
        }
    }

    /// Waits until a VM process is gone, also where the next one answers before that was looked at.
    pub async fn gave_way(&self, before: i32, patience: Duration) -> bool {
        let began = tokio::time::Instant::now();
        let mut life = self.life.subscribe();
        let is_before = |life: &Life| matches!(life, Life::Live { pid } if *pid == before);
        let left = life.wait_for(|life| !is_before(life));
        if !matches!(tokio::time::timeout(patience, left).await, Ok(Ok(_))) {
            return false;
        }
        let has_next = async {
            let next = life.wait_for(|life| matches!(life, Life::Live { .. }));
            next.await.is_ok()
        };
        tokio::select! {
            has_next = has_next => has_next,
            ended = self.ended(patience.saturating_sub(began.elapsed())) => ended,
        }
    }

    /// Waits until a VM process that becomes another program answers as that, or is gone.
    pub async fn became_another(&self, pid: i32, patience: Duration) -> bool {
        let became = async {
            let mut life = self.life.subscribe();
            let is_before = |life: &Life| matches!(life, Life::Live { pid: live } if *live == pid);
            if life.wait_for(|life| !is_before(life)).await.is_err() {
                return false;
            }
            while self.ask(&VmRequest::Status, READY_WAIT).await.is_err() && is_there(pid) {
                tokio::time::sleep(READY_POLL_MAX).await;
            }
            true
        };
        tokio::time::timeout(patience, became)
            .await
            .unwrap_or(false)
    }

    /// Writes down how its next VM process is to be.
    pub fn tell(&self) -> std::io::Result<()> {
        launch::tell(&self.to_tell()).map(drop)
    }

    /// Asks the VM process, which must live.
    pub async fn ask(&self, request: &VmRequest, patience: Duration) -> Result<VmAnswer, ApiError> {
        ask(&self.socket(), &self.name, request, patience).await
    }

    /// Has the VM process answer a survey.
    pub async fn survey(&self, level: Generation) -> Result<RecordAnswer, ApiError> {
        match self.ask(&VmRequest::Survey { level }, SURVEY_WAIT).await? {
            VmAnswer::Surveyed(answer) => Ok(answer),
            _ => Err(unexpected(&self.name)),
        }
    }

    fn wanted(&self) -> bool {
        if *lock(&self.held) > 0 || self.rests.load(Ordering::SeqCst) {
            return false;
        }
        // A QEMU that a process could not end before it died is ended by the next one.
        let identity = Path::new(&self.config.run_dir).join(godwit_types::host_api::IDENTITY_FILE);
        let left_qemu = || identity.try_exists().unwrap_or(true);
        *lock(&self.needed) || self.records.needs_process(&self.name) || left_qemu()
    }

    async fn run(self: Arc<Self>, program: VmProgram, carrier: Carrier) {
        let mut backoff = Backoff::default();
        while !*lock(&self.gone) {
            let found = match self.adopt().await {
                Some(connection) => {
                    self.have_record_kept().await;
                    Ok(connection)
                }
                None if self.wanted() => self.start(&program).await,
                None => {
                    self.life.send_replace(Life::Idle);
                    self.wake.notified().await;
                    continue;
                }
            };
            match found {
                Ok(connection) => {
                    backoff.worked();
                    self.live(connection, &carrier).await;
                }
                Err(why) => self.pause_after(&why, &mut backoff).await,
            }
        }
    }

    async fn pause_after(&self, why: &str, backoff: &mut Backoff) {
        let wait = backoff.failed();
        let note = format!(
            "{why} ({} times in a row); next attempt in {wait:?}",
            backoff.failures()
        );
        tracing::error!(vm = %self.name, "{note}");
        self.life.send_replace(Life::Starting(Some(note)));
        // A request that needs the process now does not wait for the rest of the pause.
        let _ = tokio::time::timeout(wait, self.wake.notified()).await;
    }

    /// A connection to a VM process that answers, if there is one.
    async fn adopt(&self) -> Option<VmConnection> {
        let mut connection = VmConnection::open(&self.socket(), READY_WAIT).await.ok()?;
        let answer = connection.call(&VmRequest::Status, READY_WAIT).await;
        // Any answer will do: one that prepares to receive its VM has no description to show yet, and one of a newer
        // version may say what is not known here.
        matches!(answer, Ok(_) | Err(VmClientError::Nonsense(_))).then_some(connection)
    }

    /// A process that was found may know more than the state directory, if that was put back from an older copy.
    async fn have_record_kept(&self) {
        if let Err(error) = self.ask(&VmRequest::KeepRecord, KEEP_WAIT).await {
            tracing::debug!(vm = %self.name, %error, "its record is not written again");
        }
    }

    /// Starts a VM process and waits until it answers; in a scope of its own, if this host can give one.
    async fn start(&self, program: &VmProgram) -> Result<VmConnection, String> {
        if !matches!(self.life(), Life::Starting(_)) {
            self.life.send_replace(Life::Starting(None));
        }
        let mut refused = String::new();
        let mark = closing_mark(self.run_dir());
        // Systemd gives no scope while it takes the host down, and one as ever where only guests are powered down.
        let turns = match mark.is_some_and(|mark| mark.exists()) {
            true => 1,
            false => SCOPE_TURNS,
        };
        for turn in 1..=turns {
            let place = program.scopes.place(&self.name);
            match self.start_at(program, &place).await {
                Ok(connection) => return Ok(connection),
                Err(NotStarted::Failed(why)) => return Err(why),
                Err(NotStarted::Hung(why)) => {
                    refused = why;
                    break;
                }
                // A scope whose last process has just gone is there until systemd has taken it away.
                Err(NotStarted::NoScope(why)) => refused = why,
            }
            tokio::time::sleep(SCOPE_PAUSE * turn).await;
        }
        tracing::warn!(vm = %self.name, why = refused, "systemd gives the VM no scope: it shares the agent's control group");
        let beside = self.start_at(program, &Place::Beside).await;
        beside.map_err(NotStarted::why)
    }

    async fn start_at(
        &self,
        program: &VmProgram,
        place: &Place,
    ) -> Result<VmConnection, NotStarted> {
        let began = Instant::now();
        let mut child = match program.start(&self.to_tell(), place) {
            Ok(child) => child,
            Err(error) if *place == Place::New => {
                return Err(NotStarted::Hung(format!(
                    "systemd-run cannot be started: {error}"
                )));
            }
            Err(error) => {
                let (program, run) = (program.program.display(), &self.config.run_dir);
                return Err(NotStarted::Failed(format!(
                    "cannot start {program} for the VM (its log and sockets are in {run}): {error}"
                )));
            }
        };
        tracing::info!(vm = %self.name, pid = child.id(), "started a VM process");
        // Most answer within 3 ms, and a migration waits for this one.
        let mut pause = Duration::from_millis(1);
        while began.elapsed() < READY_WAIT {
            match child.try_wait() {
                Ok(Some(status)) => return Err(self.ended_early(place, status)),
                Ok(None) => {}
                Err(error) => {
                    return Err(NotStarted::Failed(format!("cannot wait for it: {error}")));
                }
            }
            if let Some(connection) = self.adopt().await {
                tokio::spawn(reap(self.name.clone(), child));
                return Ok(connection);
            }
            let hung = *place == Place::New && began.elapsed() > program.scopes.patience;
            if hung && child.id().is_some_and(|pid| program.scopes.is_waiting(pid)) {
                // Gone before another is started: it must not become a second VM process later.
                return Err(match child.kill().await {
                    Ok(()) => NotStarted::Hung("systemd does not answer".into()),
                    Err(error) => NotStarted::Failed(format!("cannot end systemd-run: {error}")),
                });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(READY_POLL_MAX);
        }
        tokio::spawn(reap(self.name.clone(), child));
        let why = "the VM process lives but does not answer";
        Err(NotStarted::Failed(why.into()))
    }

    fn ended_early(&self, place: &Place, status: std::process::ExitStatus) -> NotStarted {
        if scope::was_refused(place, status) {
            let words = launch::last_log_line(Path::new(&self.config.run_dir));
            return NotStarted::NoScope(words.unwrap_or_default());
        }
        NotStarted::Failed(self.last_words(&status.to_string()))
    }

    fn last_words(&self, status: &str) -> String {
        let words = launch::last_log_line(Path::new(&self.config.run_dir));
        format!(
            "the VM process ended before it answered ({status}): {}",
            words.unwrap_or_default()
        )
    }

    /// Carries messages until the connection ends, which is how the process's death shows.
    async fn live(self: &Arc<Self>, mut connection: VmConnection, carrier: &Carrier) {
        let pid = connection.pid().unwrap_or(0);
        *lock(&self.needed) = false;
        self.life.send_replace(Life::Live { pid });
        tracing::info!(vm = %self.name, pid, "the VM process answers");
        let request = VmRequest::TakeOutbox {
            wait_ms: u64::try_from(OUTBOX_WAIT.as_millis()).unwrap_or(u64::MAX),
        };
        loop {
            match connection.call(&request, OUTBOX_WAIT + OUTBOX_GRACE).await {
                Ok(VmAnswer::Outbox(messages)) => carry_all(self, messages, carrier),
                Ok(other) => {
                    let why = match other {
                        VmAnswer::Error(error) => error.message,
                        _ => "it answers something else".to_owned(),
                    };
                    tracing::warn!(vm = %self.name, why, "no answer to take-outbox");
                    tokio::time::sleep(AGAIN_EACH).await;
                }
                Err(VmClientError::Silent(_)) => {
                    tracing::error!(vm = %self.name, pid, "the VM process lives but does not answer");
                    break;
                }
                Err(VmClientError::Ended) if !self.wanted() => {
                    tracing::info!(vm = %self.name, pid, "the VM process has ended, since no guest of the VM is to run here");
                    break;
                }
                Err(error) => {
                    tracing::warn!(vm = %self.name, pid, %error, "the VM process is gone");
                    break;
                }
            }
        }
        self.life.send_replace(Life::Starting(None));
    }
}

/// Whether there is a process with this number.
fn is_there(pid: i32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

async fn reap(vm: VmName, mut child: tokio::process::Child) {
    match child.wait().await {
        Ok(status) => tracing::warn!(%vm, %status, "a VM process ended"),
        Err(error) => tracing::warn!(%vm, %error, "cannot wait for a VM process"),
    }
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
