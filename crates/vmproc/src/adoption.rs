//! Taking over the QEMU that a predecessor left.
//!
//! Its guest may be running, so a QEMU that lives is never ended because it is slow to answer, and no other is started
//! beside it: nothing is decided until it answers, is gone, or a person gives it up with a forced stop. Meanwhile
//! requests are answered with what is known. Owns the time between this process's start and the ownership core's.
//!
//! A QEMU whose guest runs although the record says that the VM is not here shows that the state directory is an older
//! copy: it may run the only guest, so it is left alone and told of until a person ends it.
//!
//! A QEMU whose RAM file is shorter or longer than the VM's memory has had its file changed by whoever took it over: it is
//! left alone and told of, too, and ended by a forced stop. Its file is not touched, so that it ends no process of ours.
//!
//! A QEMU that no identity file tells of is found by its RAM file and taken over like any other, unless it has never run
//! its guest: then it is ended. The state directory may be new and empty while the run directory was emptied, too.

use crate::ask::Now;
use crate::faults::{planted, qemu_is};
use crate::files::{Paths, QemuIdentity};
use crate::hypervisor::{Hyper, KILL_WAIT, internal};
use crate::input::{Input, Request};
use crate::left::Left;
use crate::renewal::Handed;
use godwit_ownership::{HostRecord, Phase};
use godwit_qemu::machine::RunState;
use godwit_qemu::process::{ProcessError, QemuProcess};
use godwit_qemu::strays::Stray;
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{HostVm, VmAnswer, VmProcessConfig, VmStatus};
use godwit_types::site::{Claim, RecordAnswer};
use godwit_types::version::Build;
use godwit_types::vm::{VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// From here on a silent QEMU is an error in the log, no longer a warning.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two attempts, beside the time that each takes by itself.
const PAUSE: Duration = Duration::from_millis(500);
/// How often the waiting thread looks for a result.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What became of the predecessor's QEMU.
pub(crate) enum Looked {
    /// There is none, or it is gone for sure.
    None,
    /// It answers, and this is what its guest does.
    Taken(Box<Hyper>, RunState),
    /// This process was told to leave while it waited.
    Detached,
}

/// What is known of the VM before its QEMU is.
pub(crate) struct Known<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    pub record: &'a HostRecord,
    pub spec: Option<&'a VmSpec>,
    /// What the program before this one handed over.
    pub handed: Handed,
}

/// Takes QEMU over. Returns at once where there is none or it answers; else answers requests until it does. One that ends
/// meanwhile is followed by the next that lives, which may run the guest.
pub(crate) fn adopt(
    known: &Known<'_>,
    inputs: &Sender<Input>,
    received: &Receiver<Input>,
) -> Result<Looked, ApiError> {
    loop {
        let Some(found) = find(known)? else {
            known.paths.ram_files.remove_all_but(&[]);
            return Ok(Looked::None);
        };
        if let Some(looked) = adopt_one(known, found, inputs, received)? {
            return Ok(looked);
        }
    }
}

/// The same of this one; nothing once it has ended by itself.
fn adopt_one(
    known: &Known<'_>,
    found: Found,
    inputs: &Sender<Input>,
    received: &Receiver<Input>,
) -> Result<Option<Looked>, ApiError> {
    let Found {
        identity,
        process,
        unknown,
        others,
    } = found;
    let kept: Vec<u64> = std::iter::once(identity.launch).chain(others).collect();
    known.paths.ram_files.remove_all_but(&kept);
    qemu_is(identity.pid);
    let mut trouble = None;
    let left = Left::new(known);
    match left.attempt(&identity) {
        // Looked at again, and told of, while this process waits.
        Ok((_, state)) if is_denied(known.record, &state) => {}
        Ok((hyper, state)) => return taken(hyper, state, unknown),
        Err(error) => {
            tracing::warn!(%error, pid = identity.pid, "QEMU lives but is not taken over yet");
            trouble = Some(error);
        }
    }
    let waiting = Waiting {
        denied: Cell::new(false),
        known,
        left,
        process,
        unknown,
        launch: identity.launch,
        since: Instant::now(),
        trouble: Arc::new(Mutex::new(trouble)),
        ended: Arc::default(),
    };
    waiting.wait(identity, inputs, received)
}

/// A QEMU that lives.
struct Found {
    identity: QemuIdentity,
    process: QemuProcess,
    /// No identity file told of it.
    unknown: bool,
    /// Launches of others of this VM that live and are left alone.
    others: Vec<u64>,
}

/// This VM's QEMU. All others on its RAM files are ended but those that may run its guest.
fn find(known: &Known<'_>) -> Result<Option<Found>, ApiError> {
    let written = load_json::<QemuIdentity>(&known.paths.identity()).map_err(internal)?;
    let process = match &written {
        None => None,
        Some(written) => match QemuProcess::adopt(written.pid, written.start_time_ticks) {
            Ok(process) => Some(process),
            Err(ProcessError::Gone { .. }) => None,
            // Not knowing whether it lives is no reason to take it for dead.
            Err(error) => return Err(internal(error)),
        },
    };
    let living = known.paths.ram_files.living(known.config.qemu_uid);
    let mut others = living.map_err(internal)?;
    if let (Some(identity), Some(process)) = (written, process) {
        others.retain(|stray| stray.process.pid() != identity.pid);
        let others = end_those_that_never_ran(known, &others)?;
        return Ok(Some(Found {
            identity,
            process,
            unknown: false,
            others,
        }));
    }
    if planted("unknown-hypervisor-ended") {
        end_all(&others)?;
        return Ok(None);
    }
    claim(known, others)
}

fn end_all(others: &[Stray]) -> Result<(), ApiError> {
    let deadline = Instant::now() + KILL_WAIT;
    others
        .iter()
        .try_for_each(|stray| stray.end(deadline).map_err(internal))
}

/// A start that was cut short is ended if it says so; whatever else lives on this VM's RAM files may run its guest. Gives
/// the launches of these.
fn end_those_that_never_ran(known: &Known<'_>, others: &[Stray]) -> Result<Vec<u64>, ApiError> {
    let mut left = Vec::new();
    for stray in others {
        match Left::stray(known).attempt(&identity_of(stray)) {
            Ok((_, state)) if never_ran(&state) => end_all(std::slice::from_ref(stray))?,
            _ => {
                let pid = stray.process.pid();
                tracing::error!(
                    pid,
                    "a second hypervisor of this VM lives, and is left alone"
                );
                left.push(stray.launch);
            }
        }
    }
    Ok(left)
}

/// Takes the oldest of these for this VM's QEMU: a newer one is a start that was cut short, and ended if it says so.
fn claim(known: &Known<'_>, mut others: Vec<Stray>) -> Result<Option<Found>, ApiError> {
    let Some(oldest) = others.pop() else {
        return Ok(None);
    };
    let others = end_those_that_never_ran(known, &others)?;
    let identity = identity_of(&oldest);
    tracing::warn!(
        pid = identity.pid,
        "QEMU is found by its RAM file: its identity file is gone"
    );
    std::fs::create_dir_all(known.paths.run.join("qemu")).map_err(internal)?;
    save_json(&known.paths.identity(), &identity).map_err(internal)?;
    Ok(Some(Found {
        identity,
        process: oldest.process,
        unknown: true,
        others,
    }))
}

fn identity_of(stray: &Stray) -> QemuIdentity {
    QemuIdentity {
        pid: stray.process.pid(),
        start_time_ticks: stray.process.start_time_ticks(),
        accelerator: stray.accelerator,
        launch: stray.launch,
    }
}

/// Whether a guest runs although the record says that none can: it runs by a later record, of which this is an older copy.
fn is_denied(record: &HostRecord, state: &RunState) -> bool {
    !may_run(record) && *state == RunState::Running
}

/// Whether a guest may have been let run while this record was the newest. One that arrives is let run after the record
/// says that it is held here, one that leaves stands still before the record says that it was given.
fn may_run(record: &HostRecord) -> bool {
    let is_between = matches!(
        record.phase,
        Phase::Incoming { .. } | Phase::Ready { .. } | Phase::Gave { .. }
    );
    !is_between && !has_left(record)
}

/// Whether the record says that the VM is not here: the core has nothing of it to power off.
fn has_left(record: &HostRecord) -> bool {
    matches!(
        record.phase,
        Phase::Absent | Phase::Moved { .. } | Phase::Refused { .. }
    )
}

/// A QEMU that was started and never let its guest run.
fn never_ran(state: &RunState) -> bool {
    matches!(state, RunState::Prelaunch | RunState::Inmigrate)
}

/// Nothing where it was ended, since it never ran: another one may run the guest.
fn taken(hyper: Box<Hyper>, state: RunState, unknown: bool) -> Result<Option<Looked>, ApiError> {
    if unknown && never_ran(&state) {
        tracing::warn!(pid = hyper.pid(), "its start was cut short: it is ended");
        hyper.kill()?;
        return Ok(None);
    }
    Ok(Some(Looked::Taken(hyper, state)))
}

struct Waiting<'a> {
    known: &'a Known<'a>,
    left: Arc<Left>,
    /// It runs its guest, which the record says is not here: nobody takes it over.
    denied: Cell<bool>,
    process: QemuProcess,
    /// No identity file told of it.
    unknown: bool,
    launch: u64,
    since: Instant,
    /// Why the last attempt failed.
    trouble: Arc<Mutex<Option<ApiError>>>,
    ended: Arc<AtomicBool>,
}

/// What a thread that panicked leaves is as good as before.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Waiting<'_> {
    fn wait(
        &self,
        identity: QemuIdentity,
        inputs: &Sender<Input>,
        received: &Receiver<Input>,
    ) -> Result<Option<Looked>, ApiError> {
        let attempts = self.keep_trying(identity).map_err(internal)?;
        let mut shouted = false;
        loop {
            if let Ok((hyper, state)) = attempts.try_recv() {
                if !is_denied(self.known.record, &state) {
                    return taken(hyper, state, self.unknown);
                }
                tracing::error!("{}", self.denied_note());
                self.denied.set(true);
            }
            if !self.process.is_alive() {
                return Ok(None);
            }
            self.left.mend();
            if !shouted && self.since.elapsed() > PATIENCE {
                shouted = true;
                tracing::error!("{}", self.note());
            }
            match received.recv_timeout(LOOK_EVERY) {
                Ok(Input::Now(request)) => {
                    if let Some(looked) = self.answer(request, inputs) {
                        return Ok(Some(looked));
                    }
                }
                Ok(Input::Later(request)) => drop(request.reply.send(self.not_now())),
                // Nothing else can come: no QEMU is watched and no migration runs.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(Some(Looked::Detached)),
            }
        }
    }

    /// Asks again and again, in a thread of its own, since each attempt may take seconds.
    fn keep_trying(
        &self,
        identity: QemuIdentity,
    ) -> std::io::Result<Receiver<(Box<Hyper>, RunState)>> {
        let (results, taken) = channel();
        let (left, ended) = (Arc::clone(&self.left), Arc::clone(&self.ended));
        let trouble = Arc::clone(&self.trouble);
        let work = move || {
            let mut said = None;
            while !ended.load(Ordering::Relaxed) {
                match left.attempt(&identity) {
                    Ok(adopted) => {
                        // Nobody listens any more: the connection closes and QEMU is free for the next.
                        let _ = results.send(adopted);
                        return;
                    }
                    Err(error) => {
                        // Said once: it may be tried for days.
                        if said.as_ref() != Some(&error.message) {
                            tracing::warn!(%error, "QEMU is not taken over yet");
                        }
                        said = Some(error.message.clone());
                        *lock(&trouble) = Some(error);
                    }
                }
                std::thread::sleep(PAUSE);
            }
        };
        std::thread::Builder::new()
            .name("adopt".into())
            .spawn(work)?;
        Ok(taken)
    }

    /// Answers one request; says when the waiting is over by it.
    fn answer(&self, request: Request<Now>, inputs: &Sender<Input>) -> Option<Looked> {
        let answer = match &request.ask {
            Now::Status => self.status(),
            Now::Survey(_) if self.denied.get() => VmAnswer::Surveyed(RecordAnswer {
                highest: self.known.record.highest,
                claim: self.claim(),
            }),
            Now::Stop { force: true } => match self.give_up().inspect(|()| self.left.end()) {
                // Also before it was asked whether its guest runs: the core would only say that the VM is not here.
                Ok(()) if has_left(self.known.record) || self.denied.get() => {
                    let done = format!(
                        "the guest of VM '{}' on host '{}' is ended",
                        self.known.config.vm, self.known.config.host
                    );
                    let _ = request.reply.send(VmAnswer::Done(done));
                    return Some(Looked::None);
                }
                Ok(()) => {
                    // Powering off is the core's to do: it hears of the request first of all.
                    let _ = inputs.send(Input::Now(request));
                    return Some(Looked::None);
                }
                Err(error) => VmAnswer::Error(error),
            },
            Now::Detach { .. } => {
                let done = format!(
                    "VM '{}' is left to its next VM process",
                    self.known.config.vm
                );
                let _ = request.reply.send(VmAnswer::Done(done));
                return Some(Looked::Detached);
            }
            _ => self.not_now(),
        };
        let _ = request.reply.send(answer);
        None
    }

    /// The answer to what has to wait for QEMU.
    fn not_now(&self) -> VmAnswer {
        VmAnswer::Error(ApiError::new(ErrorCode::Hypervisor, self.note()))
    }

    /// A person has decided that this guest is lost.
    /// Ends every QEMU of this VM: what is off after that runs nowhere on this host.
    fn give_up(&self) -> Result<(), ApiError> {
        tracing::warn!("QEMU is ended unheard: a forced stop was asked for");
        self.process
            .kill_verified(Instant::now() + KILL_WAIT)
            .map_err(internal)?;
        let living = self
            .known
            .paths
            .ram_files
            .living(self.known.config.qemu_uid);
        end_all(&living.map_err(internal)?)
    }

    /// A guest that runs is held by this host, whatever an older copy of its record says.
    fn claim(&self) -> Claim {
        match self.denied.get() {
            true => Claim::Holds {
                generation: self.known.record.highest,
                on: true,
            },
            false => godwit_site::claim_of(self.known.record),
        }
    }

    /// The VM's description; of a guest whose description is gone, as much as its name.
    fn spec(&self) -> Option<VmSpec> {
        let unknown = || VmSpec::placeholder(&self.known.config.vm);
        let known = self.known.spec.cloned();
        known.or_else(|| self.denied.get().then(unknown))
    }

    fn status(&self) -> VmAnswer {
        let Some(spec) = self.spec() else {
            return VmAnswer::Error(ApiError::new(ErrorCode::UnknownVm, self.note()));
        };
        let vm = HostVm {
            spec,
            state: VmState::Unreachable,
            generation: self.known.record.highest,
            claim: self.claim(),
            migration: None,
            accelerator: None,
            vm_process_pid: i32::try_from(std::process::id()).ok(),
            vm_process: Some(Build::here()),
            qemu_pid: Some(self.process.pid()),
            note: Some(self.note()),
            disks: Vec::new(),
            images: Vec::new(),
            guest: None,
        };
        VmAnswer::Status(Box::new(VmStatus { vm }))
    }

    fn denied_note(&self) -> String {
        format!(
            "QEMU of VM '{vm}' (process {pid}) runs its guest on host {host}, though the record there says that no guest of it may run: its state directory is an older copy. Nothing is started in its place; if no other host runs the VM, leave it so; 'godwit vm stop {vm} --force --host {host}' ends that guest",
            vm = self.known.config.vm,
            host = self.known.config.host,
            pid = self.process.pid(),
        )
    }

    fn note(&self) -> String {
        if self.denied.get() {
            return self.denied_note();
        }
        // The file, not QEMU's silence, is what is wrong.
        if let Some(error) = lock(&self.trouble)
            .as_ref()
            .filter(|error| error.code == ErrorCode::NotMigratable)
        {
            return format!(
                "VM '{}' is not managed: {}",
                self.known.config.vm, error.message
            );
        }
        let monitors = [0, 1].map(|index| self.known.paths.monitor(self.launch, index));
        if !monitors.iter().any(|path| path.exists()) {
            return format!(
                "QEMU of VM '{vm}' (process {pid}) cannot be asked, since its control sockets in {dir} are gone: was that directory emptied? Its guest may be running, so nothing is started in its place; 'godwit vm stop {vm} --force --host {host}' ends it",
                vm = self.known.config.vm,
                host = self.known.config.host,
                pid = self.process.pid(),
                dir = self.known.paths.run.join("qemu").display(),
            );
        }
        format!(
            "QEMU of VM '{vm}' (process {pid}) has not answered for {seconds} s; its guest may be running, so nothing is started in its place: it is asked again, and 'godwit vm stop {vm} --force --host {host}' gives the guest up",
            vm = self.known.config.vm,
            host = self.known.config.host,
            pid = self.process.pid(),
            seconds = self.since.elapsed().as_secs()
        )
    }
}

#[cfg(test)]
#[path = "adoption_tests.rs"]
mod tests;
