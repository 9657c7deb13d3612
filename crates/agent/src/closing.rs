//! An orderly shutdown of this host: its guests are powered down first.
//!
//! Begins with a mark in the run directory, which a reboot empties: while it is there no guest starts, comes or leaves,
//! and one that powers itself off counts as one whose host lost its power, so that it is booted by the usual rules when the
//! host is back. An agent that dies in the middle goes on where it was, with the same guests and the same limit. A
//! `systemctl soft-reboot` empties no run directory: a host that was closed for a shutdown is open again as soon as its
//! system manager says that it does not shut down. A VM process too old to know what the power key means then is renewed
//! first. What the agent does for all this is in [`crate::closing_agent`]. Owns the mark and, beside it, how far each guest
//! has come. Refuses: to write into a VM's record, to touch a VM that is in doubt or paused, and to end before every guest
//! was looked at once more.

use crate::agent::{Reply, blocking};
use crate::records::{BOOT_FILE_MAX, internal};
use godwit_store::{StoreError, load_json, read_text, remove_document, save_json};
use godwit_types::host_api::{
    CLOSING_FILE, CloseState, CloseStep, ClosingStage, ClosingVm, HostClosing, HostVm,
};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Between two looks at the guests.
const LOOK_EACH: Duration = Duration::from_millis(500);
/// A guest that was still booting misses its power key: it is pressed again after this long.
const PRESS_AGAIN: Duration = Duration::from_secs(15);
/// Longest wait for one VM process's answer while there is time.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Beside the mark: how far the host has come.
const PROGRESS_FILE: &str = "closing.json";

/// Seconds since this machine was switched on, as every agent of it counts them.
fn uptime_s() -> u64 {
    clock_gettime(ClockId::Boottime).tv_sec.unsigned_abs()
}

/// How far the host has come, as the next agent finds it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Progress {
    /// Whether its system manager took the host down when it was asked for.
    #[serde(default)]
    at_shutdown: bool,
    /// Whether all guests were looked at to the end.
    #[serde(default)]
    is_over: bool,
    /// When it began, in seconds of this machine's uptime.
    began_s: u64,
    /// When the power key of each guest was pressed last.
    #[serde(default)]
    pressed_s: BTreeMap<VmName, u64>,
    /// VMs whose VM process was too old, and was renewed or could not be.
    #[serde(default)]
    renewed: BTreeSet<VmName>,
    #[serde(default)]
    guests: BTreeMap<VmName, ClosingVm>,
    /// VMs that should have run and did not when it began: no shutdown ended them.
    #[serde(default)]
    down_before: BTreeSet<VmName>,
}

/// Whether this host shuts down, and how far it has come.
pub(crate) struct Closing {
    mark: PathBuf,
    file: PathBuf,
    boot_id: String,
    limit: Duration,
    stage: Mutex<ClosingStage>,
    /// How often it was begun since this agent started.
    begun: AtomicU64,
    progress: Mutex<Progress>,
    /// When the system manager is asked again whether the shutdown is over: until it says yes or no.
    asks_at: Mutex<Option<Instant>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the mark appear with all of its content or not at all: VM processes look whether it is there.
fn write_whole(mark: &Path, text: &str) -> std::io::Result<()> {
    let partial = mark.with_extension("partial");
    let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, mark));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written
}

impl Closing {
    /// Reads the mark: one of another boot is over with that, one of this boot goes on.
    pub(crate) fn open(run_dir: &Path, boot_id: &str, limit_s: u64) -> std::io::Result<Self> {
        let mark = run_dir.join(CLOSING_FILE);
        let found = read_text(&mark, BOOT_FILE_MAX)?;
        let file = run_dir.join(PROGRESS_FILE);
        let mut progress = Progress::default();
        let stage = match found {
            Some(boot) if boot.trim() == boot_id => {
                progress = progress_of(&file);
                match progress.is_over {
                    true => ClosingStage::Closed,
                    false => ClosingStage::Closing,
                }
            }
            Some(_) => {
                std::fs::remove_file(&mark)?;
                ClosingStage::Open
            }
            None => ClosingStage::Open,
        };
        Ok(Self {
            mark,
            file,
            boot_id: boot_id.to_owned(),
            limit: Duration::from_secs(limit_s),
            stage: Mutex::new(stage),
            begun: AtomicU64::new(0),
            progress: Mutex::new(progress),
            asks_at: Mutex::default(),
        })
    }

    pub(crate) fn stage(&self) -> ClosingStage {
        *lock(&self.stage)
    }

    /// Whether no guest starts here.
    pub(crate) fn is_on(&self) -> bool {
        self.stage() != ClosingStage::Open
    }

    /// Refuses what would bring a guest here that is cut off at once.
    pub(crate) fn refuse(&self, host: &HostName) -> Reply<()> {
        if !self.is_on() {
            return Ok(());
        }
        let message = format!(
            "host '{host}' shuts down and takes no VMs; 'godwit host open' on it ends that"
        );
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
    }

    /// Marks that the host shuts down, where VMs were down by themselves; whether its guests are to be powered down now.
    pub(crate) fn begin(&self, at_shutdown: bool, down: BTreeSet<VmName>) -> Reply<bool> {
        let mut stage = lock(&self.stage);
        let mut progress = lock(&self.progress);
        if *stage == ClosingStage::Closing {
            progress.at_shutdown |= at_shutdown;
            self.keep(&progress);
            return Ok(false);
        }
        let before = std::mem::take(&mut *progress);
        let mut guests = before.guests;
        guests.retain(|_, vm| is_down(vm));
        *progress = Progress {
            at_shutdown: at_shutdown || before.at_shutdown,
            began_s: uptime_s(),
            // A host that was closed before is so for the same guests.
            guests,
            down_before: match *stage {
                ClosingStage::Open => down,
                ClosingStage::Closing | ClosingStage::Closed => before.down_before,
            },
            ..Progress::default()
        };
        // Before the mark, which says that it counts.
        self.keep(&progress);
        write_whole(&self.mark, &self.boot_id)
            .map_err(|error| internal(format!("cannot write {}: {error}", self.mark.display())))?;
        *stage = ClosingStage::Closing;
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.ask_at(None);
        Ok(true)
    }

    /// What is not kept, the next agent does anew.
    fn keep(&self, progress: &Progress) {
        if let Err(error) = save_json(&self.file, progress) {
            tracing::error!(%error, "how far this host has come with powering its guests down is not kept");
        }
    }

    /// Whether the host was closed since it went down, as far as that is known.
    pub(crate) fn is_for_a_shutdown(&self) -> bool {
        self.is_on() && lock(&self.progress).at_shutdown
    }

    /// Takes the mark away.
    pub(crate) fn end(&self, host: &HostName) -> Reply<()> {
        let mut stage = lock(&self.stage);
        if *stage == ClosingStage::Closing {
            let message = format!(
                "host '{host}' powers its guests down at this moment: wait for the end of 'godwit host close'"
            );
            return Err(ApiError::new(ErrorCode::WrongState, message).on_host(host));
        }
        self.take_mark_away(&mut stage)
    }

    /// Whether it is time to ask again if the shutdown is over, which nobody knew when this agent started.
    pub(crate) fn is_to_ask(&self, now: Instant) -> bool {
        let stage = self.stage();
        // Guests that are being powered down are so to the end.
        stage == ClosingStage::Closed && lock(&self.asks_at).is_some_and(|at| at <= now)
    }

    /// A stage, and which closing of this agent's life it is of.
    fn standing(&self, stage: ClosingStage) -> (ClosingStage, u64) {
        (stage, self.begun.load(Ordering::Relaxed))
    }

    /// From then on the system manager is asked again; never, once it has said. A closing that began since it was asked is
    /// none of that answer's business.
    pub(crate) fn ask_again_at(&self, asked: (ClosingStage, u64), at: Option<Instant>) {
        let stage = lock(&self.stage);
        if self.standing(*stage) == asked {
            self.ask_at(at);
        }
    }

    fn ask_at(&self, at: Option<Instant>) {
        *lock(&self.asks_at) = at;
    }

    /// Where it stands while somebody asks whether the shutdown is over.
    pub(crate) fn asking(&self) -> (ClosingStage, u64) {
        let stage = lock(&self.stage);
        self.standing(*stage)
    }

    /// The host is back from its shutdown, unless it went on to another stage, or was closed again, since that was asked.
    pub(crate) fn is_back(&self, asked: (ClosingStage, u64)) -> Reply<()> {
        let mut stage = lock(&self.stage);
        match self.standing(*stage) == asked {
            true => self.take_mark_away(&mut stage),
            false => Ok(()),
        }
    }

    /// Whether the VM should have run and did not when the host began to shut down.
    pub(crate) fn was_down_before(&self, vm: &VmName) -> bool {
        lock(&self.progress).down_before.contains(vm)
    }

    fn take_mark_away(&self, stage: &mut ClosingStage) -> Reply<()> {
        match std::fs::remove_file(&self.mark) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let message = format!("cannot remove {}: {error}", self.mark.display());
                return Err(internal(message));
            }
            _ => {}
        }
        *stage = ClosingStage::Open;
        self.ask_at(None);
        *lock(&self.progress) = Progress::default();
        if let Err(error) = remove_document(&self.file) {
            tracing::warn!(%error, "a file that means nothing without its mark is left behind");
        }
        Ok(())
    }

    /// How far the host has come.
    pub(crate) fn shown(&self) -> HostClosing {
        HostClosing {
            stage: self.stage(),
            limit_s: self.limit.as_secs(),
            vms: lock(&self.progress).guests.values().cloned().collect(),
        }
    }

    /// Shows in a list why a VM that should run does not, if that is for the shutdown.
    pub(crate) fn show(&self, vm: &mut HostVm, host: &HostName) {
        // One whose power key was pressed may be off before the next look at it.
        let ends = |vm: &ClosingVm| is_down(vm) || vm.state == CloseState::Waits;
        let is_ended = lock(&self.progress)
            .guests
            .get(&vm.spec.name)
            .is_some_and(ends);
        if is_ended && self.is_on() && vm.state == VmState::Crashed {
            vm.note = Some(format!(
                "its guest is off since host {host} shuts down; it is booted when the host is back, or after 'godwit host open' there"
            ));
        }
    }

    /// Notes how far a guest has come; says so once.
    pub(crate) fn saw(&self, seen: ClosingVm) {
        let guests = &mut lock(&self.progress).guests;
        let before = guests.get(&seen.vm);
        if before.is_none_or(|before| *before != seen) {
            tell(&seen, self.limit);
        }
        guests.insert(seen.vm.clone(), seen);
    }

    /// Guests that are gone since they were last looked at.
    fn gone(&self, living: &BTreeSet<VmName>) -> Vec<VmName> {
        let gone = |vm: &&mut ClosingVm| !is_down(vm) && !living.contains(&vm.vm);
        let guests = &mut lock(&self.progress).guests;
        let gone = guests.values_mut().filter(gone);
        gone.map(|vm| {
            (vm.state, vm.why) = (CloseState::Off, None);
            tell(vm, self.limit);
            vm.vm.clone()
        })
        .collect()
    }

    fn is_past_its_limit(&self) -> bool {
        let since_s = uptime_s().saturating_sub(lock(&self.progress).began_s);
        since_s >= self.limit.as_secs()
    }

    /// How far to go with a guest now.
    fn step(&self, vm: &VmName, is_over: bool) -> CloseStep {
        let progress = lock(&self.progress);
        let pressed = progress.pressed_s.get(vm);
        let recently =
            pressed.is_some_and(|at| uptime_s().saturating_sub(*at) < PRESS_AGAIN.as_secs());
        match recently {
            _ if is_over => CloseStep::End,
            true => CloseStep::Look,
            false => CloseStep::Press,
        }
    }

    fn pressed(&self, vm: &VmName) {
        let mut progress = lock(&self.progress);
        progress.pressed_s.insert(vm.clone(), uptime_s());
    }

    /// Whether the VM's process was renewed before, or that was in vain.
    pub(crate) fn was_renewed(&self, vm: &VmName) -> bool {
        lock(&self.progress).renewed.contains(vm)
    }

    /// The VM's process is not renewed once more.
    pub(crate) fn renewed(&self, vm: &VmName) {
        lock(&self.progress).renewed.insert(vm.clone());
    }

    fn waits(&self) -> bool {
        lock(&self.progress)
            .guests
            .values()
            .any(|vm| matches!(vm.state, CloseState::Waits | CloseState::Migrating))
    }
}

fn is_down(vm: &ClosingVm) -> bool {
    matches!(vm.state, CloseState::Off | CloseState::Ended)
}

/// What an agent before this one kept; nothing is known of what cannot be read, so that it begins with a full limit.
fn progress_of(file: &Path) -> Progress {
    let kept: Result<Option<Progress>, StoreError> = load_json(file);
    let kept = kept.unwrap_or_else(|error| {
        tracing::error!(%error, "how far this host had come with powering its guests down is not known");
        None
    });
    kept.unwrap_or_else(|| Progress {
        began_s: uptime_s(),
        ..Progress::default()
    })
}

fn tell(seen: &ClosingVm, limit: Duration) {
    let (vm, why) = (&seen.vm, seen.why.as_deref().unwrap_or_default());
    match seen.state {
        CloseState::Off => tracing::info!("VM {vm} is powered down"),
        CloseState::Waits if why.is_empty() => {
            tracing::info!("VM {vm} was asked to power off, since this host shuts down");
        }
        CloseState::Waits => tracing::warn!("VM {vm} could not be asked to power off: {why}"),
        CloseState::Migrating => {
            tracing::info!("VM {vm} is on the move: that is called off, or ends first");
        }
        CloseState::Left => tracing::warn!("VM {vm} is left as it is: {why}"),
        CloseState::Ended => tracing::warn!(
            "VM {vm} did not power off within {} s: it was stopped hard",
            limit.as_secs()
        ),
    }
}

/// Who takes guests one step further: an agent, or whoever stands in for one that is not there.
pub(crate) trait Hands: Send + Sync + 'static {
    fn closing(&self) -> &Closing;
    /// All VMs that may have a guest.
    fn with_guests(self: &Arc<Self>) -> impl Future<Output = Vec<VmName>> + Send;
    /// One step of one guest.
    fn close_guest(
        self: &Arc<Self>,
        vm: &VmName,
        step: CloseStep,
    ) -> impl Future<Output = ClosingVm> + Send;
    /// Notes that a guest did not crash. Waits for its disk.
    fn went_down(&self, vm: &VmName);
    /// Does what comes once every guest was looked at to the end. Waits for its disk.
    fn at_the_end(&self);
}

/// Powers the guests down, until all of them are or their time is over.
pub(crate) async fn power_guests_down(hands: Arc<impl Hands>) {
    let limit = hands.closing().limit;
    tracing::info!(
        "this host shuts down: its guests have {} s to power off",
        limit.as_secs()
    );
    loop {
        let is_over = hands.closing().is_past_its_limit();
        look_at_guests(&hands, is_over).await;
        if is_over || !hands.closing().waits() {
            break;
        }
        tokio::time::sleep(LOOK_EACH).await;
    }
    let agent = Arc::clone(&hands);
    let kept = blocking(move || {
        agent.at_the_end();
        let mut progress = lock(&agent.closing().progress);
        progress.is_over = true;
        agent.closing().keep(&progress);
        Ok(())
    });
    // What it keeps is told of there.
    let _ = kept.await;
    *lock(&hands.closing().stage) = ClosingStage::Closed;
    tracing::info!("this host's guests are down: no guest starts here before the next boot");
}

/// Takes every guest one step further, all at the same time.
async fn look_at_guests(hands: &Arc<impl Hands>, is_over: bool) {
    let closing = hands.closing();
    let living: BTreeSet<VmName> = hands.with_guests().await.into_iter().collect();
    let mut gone = closing.gone(&living);
    let mut asked = JoinSet::new();
    for vm in living {
        let step = closing.step(&vm, is_over);
        let hands = Arc::clone(hands);
        asked.spawn(async move { (hands.close_guest(&vm, step).await, step) });
    }
    while let Some(Ok((seen, step))) = asked.join_next().await {
        if step == CloseStep::Press && seen.state == CloseState::Waits && seen.why.is_none() {
            closing.pressed(&seen.vm);
        }
        if is_down(&seen) {
            gone.push(seen.vm.clone());
        }
        closing.saw(seen);
    }
    let hands = Arc::clone(hands);
    let forgotten = blocking(move || {
        // As after a reboot: none of them has crashed.
        gone.iter().for_each(|vm| hands.went_down(vm));
        hands.closing().keep(&lock(&hands.closing().progress));
        Ok(())
    });
    if let Err(error) = forgotten.await {
        tracing::error!(%error, "a VM that was powered down may count as one that crashed");
    }
}

pub(crate) fn left_with(vm: &VmName, error: &ApiError) -> ClosingVm {
    let why = format!(
        "its VM process is of an older Godwit, which cannot power it down for its host, and is not renewed ({}); its guest goes as in a power cut unless somebody powers it off inside",
        error.message
    );
    ClosingVm {
        vm: vm.clone(),
        state: CloseState::Left,
        why: Some(why),
    }
}

/// A VM process that says nothing is asked again while there is time.
pub(crate) fn seen_of(vm: &VmName, step: CloseStep, asked: Reply<ClosingVm>) -> ClosingVm {
    asked.unwrap_or_else(|error| ClosingVm {
        vm: vm.clone(),
        state: match step {
            CloseStep::Look | CloseStep::Press => CloseState::Waits,
            CloseStep::End => CloseState::Left,
        },
        why: Some(error.message),
    })
}

#[cfg(test)]
#[path = "closing_tests.rs"]
pub(crate) mod tests;
