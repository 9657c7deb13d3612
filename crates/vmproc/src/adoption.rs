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

use crate::faults::{planted, qemu_is};
use crate::files::{Paths, QemuIdentity};
use crate::hypervisor::{Hyper, KILL_WAIT, internal};
use crate::input::{Input, Request};
use crate::strays::{self, Stray};
use godwit_ownership::{HostRecord, Phase};
use godwit_qemu::machine::RunState;
use godwit_qemu::process::{ProcessError, QemuProcess};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{HostVm, VmAnswer, VmProcessConfig, VmRequest, VmStatus};
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
pub(crate) enum Adopted {
    /// There is none, or it is gone for sure.
    None,
    /// It answers.
    Taken(Box<Hyper>, RunState),
    /// This process was told to leave while it waited.
    Detached,
}

/// What is known of the VM before its QEMU is.
pub(crate) struct Seat<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    pub record: &'a HostRecord,
    pub spec: Option<&'a VmSpec>,
}

impl Seat<'_> {
    /// How much memory the VM's description gives it, in bytes.
    fn described(&self) -> Option<u64> {
        self.spec.map(VmSpec::memory_bytes)
    }
}

type Attempt = Result<(Box<Hyper>, RunState), ApiError>;

/// Takes QEMU over. Returns at once where there is none or it answers; else answers requests until it does.
pub(crate) fn adopt(
    seat: &Seat<'_>,
    inputs: &Sender<Input>,
    received: &Receiver<Input>,
) -> Result<Adopted, ApiError> {
    let Some(found) = find(seat)? else {
        strays::remove_ram_files(seat.paths, None);
        return Ok(Adopted::None);
    };
    let Found {
        identity,
        process,
        unknown,
    } = found;
    strays::remove_ram_files(seat.paths, Some(identity.launch));
    qemu_is(identity.pid);
    let mut trouble = None;
    match attempt(seat.paths, &identity, seat.described()) {
        // Looked at again, and told of, while this process waits.
        Ok((_, state)) if is_denied(seat.record, &state) => {}
        Ok((hyper, state)) => return taken(hyper, state, unknown),
        Err(error) => {
            tracing::warn!(%error, pid = identity.pid, "QEMU lives but is not taken over yet");
            trouble = Some(error);
        }
    }
    let waiting = Waiting {
        denied: Cell::new(false),
        seat,
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
}

/// This VM's QEMU. All others on its RAM files are ended but those that may run its guest.
fn find(seat: &Seat<'_>) -> Result<Option<Found>, ApiError> {
    let known = load_json::<QemuIdentity>(&seat.paths.identity()).map_err(internal)?;
    let process = match &known {
        None => None,
        Some(known) => match QemuProcess::adopt(known.pid, known.start_time_ticks) {
            Ok(process) => Some(process),
            Err(ProcessError::Gone { .. }) => None,
            // Not knowing whether it lives is no reason to take it for dead.
            Err(error) => return Err(internal(error)),
        },
    };
    let mut others = strays::living(seat.paths, seat.config.qemu_uid).map_err(internal)?;
    if let (Some(identity), Some(process)) = (known, process) {
        others.retain(|stray| stray.process.pid() != identity.pid);
        end_those_that_never_ran(seat, &others)?;
        return Ok(Some(Found {
            identity,
            process,
            unknown: false,
        }));
    }
    if planted("unknown-hypervisor-ended") {
        end_all(&others)?;
        return Ok(None);
    }
    claim(seat, others)
}

fn end_all(others: &[Stray]) -> Result<(), ApiError> {
    let deadline = Instant::now() + KILL_WAIT;
    others
        .iter()
        .try_for_each(|stray| strays::end(stray, deadline).map_err(internal))
}

/// A start that was cut short is ended if it says so; whatever else lives on this VM's RAM files may run its guest.
fn end_those_that_never_ran(seat: &Seat<'_>, others: &[Stray]) -> Result<(), ApiError> {
    for stray in others {
        match attempt(seat.paths, &identity_of(stray), seat.described()) {
            Ok((_, state)) if never_ran(&state) => end_all(std::slice::from_ref(stray))?,
            _ => {
                let pid = stray.process.pid();
                tracing::error!(
                    pid,
                    "a second hypervisor of this VM lives, and is left alone"
                );
            }
        }
    }
    Ok(())
}

/// Takes the oldest of these for this VM's QEMU: a newer one is a start that was cut short, and ended if it says so.
fn claim(seat: &Seat<'_>, mut others: Vec<Stray>) -> Result<Option<Found>, ApiError> {
    let Some(oldest) = others.pop() else {
        return Ok(None);
    };
    end_those_that_never_ran(seat, &others)?;
    let identity = identity_of(&oldest);
    tracing::warn!(
        pid = identity.pid,
        "QEMU is found by its RAM file: its identity file is gone"
    );
    std::fs::create_dir_all(seat.paths.run.join("qemu")).map_err(internal)?;
    save_json(&seat.paths.identity(), &identity).map_err(internal)?;
    Ok(Some(Found {
        identity,
        process: oldest.process,
        unknown: true,
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

/// Whether a guest runs although the record says that none can, now or after a message.
fn is_denied(record: &HostRecord, state: &RunState) -> bool {
    has_left(record) && *state == RunState::Running
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

fn taken(hyper: Box<Hyper>, state: RunState, unknown: bool) -> Result<Adopted, ApiError> {
    if unknown && never_ran(&state) {
        tracing::warn!(pid = hyper.pid(), "its start was cut short: it is ended");
        hyper.kill()?;
        return Ok(Adopted::None);
    }
    Ok(Adopted::Taken(hyper, state))
}

fn attempt(paths: &Paths, identity: &QemuIdentity, described: Option<u64>) -> Attempt {
    Hyper::take_over(paths, identity, described).map(|(hyper, state)| (Box::new(hyper), state))
}

struct Waiting<'a> {
    seat: &'a Seat<'a>,
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    ) -> Result<Adopted, ApiError> {
        let attempts = self.keep_trying(identity).map_err(internal)?;
        let mut shouted = false;
        loop {
            if let Ok((hyper, state)) = attempts.try_recv() {
                if !is_denied(self.seat.record, &state) {
                    return taken(hyper, state, self.unknown);
                }
                tracing::error!("{}", self.denied_note());
                self.denied.set(true);
            }
            if !self.process.is_alive() {
                return Ok(Adopted::None);
            }
            if !shouted && self.since.elapsed() > PATIENCE {
                shouted = true;
                tracing::error!("{}", self.note());
            }
            match received.recv_timeout(LOOK_EVERY) {
                Ok(Input::Request(request)) => {
                    if let Some(adopted) = self.answer(request, inputs) {
                        return Ok(adopted);
                    }
                }
                // Nothing else can come: no QEMU is watched and no migration runs.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(Adopted::Detached),
            }
        }
    }

    /// Asks again and again, in a thread of its own, since each attempt may take seconds.
    fn keep_trying(
        &self,
        identity: QemuIdentity,
    ) -> std::io::Result<Receiver<(Box<Hyper>, RunState)>> {
        let (results, taken) = channel();
        let (paths, ended) = (self.seat.paths.clone(), Arc::clone(&self.ended));
        let (described, trouble) = (self.seat.described(), Arc::clone(&self.trouble));
        let work = move || {
            let mut said = None;
            while !ended.load(Ordering::Relaxed) {
                match attempt(&paths, &identity, described) {
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
    fn answer(&self, request: Request, inputs: &Sender<Input>) -> Option<Adopted> {
        let answer = match &request.request {
            VmRequest::Status => self.status(),
            VmRequest::Survey { .. } if self.denied.get() => VmAnswer::Surveyed(RecordAnswer {
                highest: self.seat.record.highest,
                claim: self.claim(),
            }),
            VmRequest::Stop { force: true } => match self.give_up() {
                // Also before it was asked whether its guest runs: the core would only say that the VM is not here.
                Ok(()) if has_left(self.seat.record) => {
                    let done = format!(
                        "the guest of VM '{}' on host '{}' is ended",
                        self.seat.config.vm, self.seat.config.host
                    );
                    let _ = request.reply.send(VmAnswer::Done(done));
                    return Some(Adopted::None);
                }
                Ok(()) => {
                    // Powering off is the core's to do: it hears of the request first of all.
                    let _ = inputs.send(Input::Request(request));
                    return Some(Adopted::None);
                }
                Err(error) => VmAnswer::Error(error),
            },
            VmRequest::Detach { .. } => {
                let done = format!(
                    "VM '{}' is left to its next VM process",
                    self.seat.config.vm
                );
                let _ = request.reply.send(VmAnswer::Done(done));
                return Some(Adopted::Detached);
            }
            _ => VmAnswer::Error(ApiError::new(ErrorCode::Hypervisor, self.note())),
        };
        let _ = request.reply.send(answer);
        None
    }

    /// A person has decided that this guest is lost.
    fn give_up(&self) -> Result<(), ApiError> {
        tracing::warn!("QEMU is ended unheard: a forced stop was asked for");
        self.process
            .kill_verified(Instant::now() + KILL_WAIT)
            .map_err(internal)
    }

    /// A guest that runs is held by this host, whatever an older copy of its record says.
    fn claim(&self) -> Claim {
        match self.denied.get() {
            true => Claim::Holds {
                generation: self.seat.record.highest,
                on: true,
            },
            false => godwit_site::claim_of(self.seat.record),
        }
    }

    /// The VM's description; of a guest whose description is gone, as much as its name.
    fn spec(&self) -> Option<VmSpec> {
        let text = || {
            format!(
                "name = \"{}\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/unknown\"\n",
                self.seat.config.vm
            )
        };
        let unknown = || self.denied.get().then(|| VmSpec::from_toml(&text()).ok());
        self.seat.spec.cloned().or_else(|| unknown().flatten())
    }

    fn status(&self) -> VmAnswer {
        let Some(spec) = self.spec() else {
            return VmAnswer::Error(ApiError::new(ErrorCode::UnknownVm, self.note()));
        };
        let vm = HostVm {
            spec,
            state: VmState::Unreachable,
            generation: self.seat.record.highest,
            claim: self.claim(),
            migration: None,
            accelerator: None,
            vm_process_pid: i32::try_from(std::process::id()).ok(),
            vm_process: Some(Build::here()),
            qemu_pid: Some(self.process.pid()),
            note: Some(self.note()),
        };
        VmAnswer::Status(Box::new(VmStatus { vm }))
    }

    fn denied_note(&self) -> String {
        format!(
            "QEMU of VM '{vm}' (process {pid}) runs its guest on host {host}, though the record there says that the VM is not on that host: its state directory is an older copy. Nothing is started in its place; if no other host runs the VM, leave it so; 'godwit vm stop {vm} --force --host {host}' ends that guest",
            vm = self.seat.config.vm,
            host = self.seat.config.host,
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
                self.seat.config.vm, error.message
            );
        }
        let monitors = [0, 1].map(|index| self.seat.paths.monitor(self.launch, index));
        if !monitors.iter().any(|path| path.exists()) {
            return format!(
                "QEMU of VM '{vm}' (process {pid}) cannot be asked, since its control sockets in {dir} are gone: was that directory emptied? Its guest may be running, so nothing is started in its place; 'godwit vm stop {vm} --force' ends it",
                vm = self.seat.config.vm,
                pid = self.process.pid(),
                dir = self.seat.paths.run.join("qemu").display(),
            );
        }
        format!(
            "QEMU of VM '{vm}' (process {pid}) has not answered for {seconds} s; its guest may be running, so nothing is started in its place: it is asked again, and 'godwit vm stop {vm} --force' gives the guest up",
            vm = self.seat.config.vm,
            pid = self.process.pid(),
            seconds = self.since.elapsed().as_secs()
        )
    }
}

#[cfg(test)]
#[path = "adoption_tests.rs"]
mod tests;
