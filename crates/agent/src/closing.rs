//! An orderly shutdown of this host: its guests are powered down first.
//!
//! Begins with a mark in the run directory, which a reboot empties: while it is there no guest starts, comes or leaves,
//! and one that powers itself off counts as one whose host lost its power, so that it is booted by the usual rules when the
//! host is back. An agent that dies in the middle goes on where it was. Owns the mark and how far each guest has come.
//! Refuses: to write into a VM's record, to touch a VM that is in doubt or paused or whose VM process is too old to know
//! what the power key means then, and to end before every guest was looked at once more.

use crate::agent::{ACT, Agent, NEED, Reply, blocking, done, unexpected};
use crate::evidence;
use crate::records::{BOOT_FILE_MAX, internal};
use crate::supervisor::Supervised;
use godwit_store::read_text;
use godwit_types::control_api::Done;
use godwit_types::host_api::{
    CLOSING_FILE, CloseState, CloseStep, ClosingStage, ClosingVm, HostClosing, HostVm, VmAnswer,
    VmRequest,
};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Between two looks at the guests.
const LOOK_EACH: Duration = Duration::from_millis(500);
/// A guest that was still booting misses its power key: it is pressed again after this long.
const PRESS_AGAIN: Duration = Duration::from_secs(15);
/// Longest wait for one VM process's answer while there is time.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Whether this host shuts down, and how far it has come.
pub(crate) struct Closing {
    mark: PathBuf,
    boot_id: String,
    limit: Duration,
    stage: Mutex<ClosingStage>,
    guests: Mutex<BTreeMap<VmName, ClosingVm>>,
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
        let stage = match found {
            Some(boot) if boot.trim() == boot_id => ClosingStage::Closing,
            Some(_) => {
                std::fs::remove_file(&mark)?;
                ClosingStage::Open
            }
            None => ClosingStage::Open,
        };
        Ok(Self {
            mark,
            boot_id: boot_id.to_owned(),
            limit: Duration::from_secs(limit_s),
            stage: Mutex::new(stage),
            guests: Mutex::default(),
        })
    }

    fn stage(&self) -> ClosingStage {
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

    /// Marks that the host shuts down; whether its guests are to be powered down now.
    fn begin(&self) -> Reply<bool> {
        let mut stage = lock(&self.stage);
        if *stage == ClosingStage::Closing {
            return Ok(false);
        }
        write_whole(&self.mark, &self.boot_id)
            .map_err(|error| internal(format!("cannot write {}: {error}", self.mark.display())))?;
        *stage = ClosingStage::Closing;
        Ok(true)
    }

    /// Takes the mark away.
    fn end(&self, host: &HostName) -> Reply<()> {
        let mut stage = lock(&self.stage);
        if *stage == ClosingStage::Closing {
            let message = format!(
                "host '{host}' powers its guests down at this moment: wait for the end of 'godwit host close'"
            );
            return Err(ApiError::new(ErrorCode::WrongState, message).on_host(host));
        }
        match std::fs::remove_file(&self.mark) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let message = format!("cannot remove {}: {error}", self.mark.display());
                return Err(internal(message));
            }
            _ => {}
        }
        *stage = ClosingStage::Open;
        lock(&self.guests).clear();
        Ok(())
    }

    /// How far the host has come.
    pub(crate) fn shown(&self) -> HostClosing {
        HostClosing {
            stage: self.stage(),
            limit_s: self.limit.as_secs(),
            vms: lock(&self.guests).values().cloned().collect(),
        }
    }

    /// Shows in a list why a VM that should run does not.
    pub(crate) fn show(&self, vm: &mut HostVm, host: &HostName) {
        if self.is_on() && vm.state == VmState::Crashed {
            vm.note = Some(format!(
                "its guest is off since host {host} shuts down; it is booted when the host is back, or after 'godwit host open' there"
            ));
        }
    }

    /// Notes how far a guest has come; says so once.
    fn saw(&self, seen: ClosingVm) {
        let mut guests = lock(&self.guests);
        let before = guests.get(&seen.vm);
        if before.is_none_or(|before| *before != seen) {
            tell(&seen, self.limit);
        }
        guests.insert(seen.vm.clone(), seen);
    }

    /// Guests that are gone since they were last looked at.
    fn gone(&self, living: &BTreeSet<VmName>) -> Vec<VmName> {
        let gone = |vm: &&mut ClosingVm| {
            let was_here = !matches!(vm.state, CloseState::Off | CloseState::Ended);
            was_here && !living.contains(&vm.vm)
        };
        let mut guests = lock(&self.guests);
        let gone = guests.values_mut().filter(gone);
        gone.map(|vm| {
            (vm.state, vm.why) = (CloseState::Off, None);
            tell(vm, self.limit);
            vm.vm.clone()
        })
        .collect()
    }

    fn waits(&self) -> bool {
        lock(&self.guests)
            .values()
            .any(|vm| matches!(vm.state, CloseState::Waits | CloseState::Migrating))
    }
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

impl Agent {
    /// Begins to power this host's guests down, if that is not under way.
    pub(crate) async fn close(self: &Arc<Self>) -> Reply<HostClosing> {
        let agent = Arc::clone(self);
        if blocking(move || agent.closing.begin()).await? {
            tokio::spawn(Arc::clone(self).power_guests_down());
        }
        Ok(self.closing.shown())
    }

    /// Goes on with what an agent before this one had begun.
    pub(crate) fn go_on_closing(self: &Arc<Self>) {
        if self.closing.is_on() {
            tokio::spawn(Arc::clone(self).power_guests_down());
        }
    }

    /// Has the host run guests again, and boots those that ran before.
    pub(crate) async fn open(self: &Arc<Self>) -> Reply<Done> {
        let agent = Arc::clone(self);
        blocking(move || agent.closing.end(agent.host())).await?;
        self.boots.wake();
        self.bring_guests_unit_back();
        let message = format!(
            "host '{}' runs guests again; those that ran before are booted",
            self.host()
        );
        tracing::info!("{message}");
        Ok(done(message))
    }

    async fn power_guests_down(self: Arc<Self>) {
        let limit = self.closing.limit;
        tracing::info!(
            "this host shuts down: its guests have {} s to power off",
            limit.as_secs()
        );
        let began = Instant::now();
        let mut pressed = BTreeMap::new();
        loop {
            let is_over = began.elapsed() >= limit;
            self.look_at_guests(is_over, &mut pressed).await;
            if is_over || !self.closing.waits() {
                break;
            }
            tokio::time::sleep(LOOK_EACH).await;
        }
        *lock(&self.closing.stage) = ClosingStage::Closed;
        tracing::info!("this host's guests are down: no guest starts here before the next boot");
    }

    /// Takes every guest one step further, all at the same time.
    async fn look_at_guests(
        self: &Arc<Self>,
        is_over: bool,
        pressed: &mut BTreeMap<VmName, Instant>,
    ) {
        let living = self.with_guests().await;
        let names = living.iter().map(|vm| vm.config().vm.clone()).collect();
        let mut gone = self.closing.gone(&names);
        let mut asked = JoinSet::new();
        for vm in living {
            let recently = pressed.get(&vm.config().vm);
            let step = match recently.is_some_and(|at| at.elapsed() < PRESS_AGAIN) {
                _ if is_over => CloseStep::End,
                true => CloseStep::Look,
                false => CloseStep::Press,
            };
            asked.spawn(async move { (close_guest(&vm, step).await, step) });
        }
        while let Some(Ok((seen, step))) = asked.join_next().await {
            if step == CloseStep::Press && seen.state == CloseState::Waits && seen.why.is_none() {
                pressed.insert(seen.vm.clone(), Instant::now());
            }
            if matches!(seen.state, CloseState::Off | CloseState::Ended) {
                gone.push(seen.vm.clone());
            }
            self.closing.saw(seen);
        }
        let agent = Arc::clone(self);
        let forgotten = blocking(move || {
            // As after a reboot: none of them has crashed.
            gone.iter().for_each(|vm| agent.records.forget_boot(vm));
            Ok(())
        });
        if let Err(error) = forgotten.await {
            tracing::error!(%error, "a VM that was powered down may count as one that crashed");
        }
    }

    /// All VMs that may have a guest.
    async fn with_guests(self: &Arc<Self>) -> Vec<Arc<Supervised>> {
        let agent = Arc::clone(self);
        let found = blocking(move || {
            let names = agent.supervisor.names();
            let all = names
                .iter()
                .filter_map(|name| agent.supervisor.find(name))
                .filter(|vm| evidence::qemu_may_live(vm.run_dir()));
            Ok(all.collect())
        });
        found.await.unwrap_or_default()
    }
}

/// One step of one guest; a VM process that says nothing is asked again while there is time.
async fn close_guest(vm: &Arc<Supervised>, step: CloseStep) -> ClosingVm {
    let patience = match step {
        CloseStep::Look | CloseStep::Press => (ANSWER_WAIT, ANSWER_WAIT),
        CloseStep::End => (NEED, ACT),
    };
    let asked = async {
        vm.need(patience.0).await?;
        match vm.ask(&VmRequest::Close { step }, patience.1).await? {
            VmAnswer::Closing(seen) => Ok(seen),
            _ => Err(unexpected(&vm.config().vm)),
        }
    };
    asked.await.unwrap_or_else(|error| ClosingVm {
        vm: vm.config().vm.clone(),
        state: match step {
            // A VM process of an older version cannot read the request. A guest that powers itself off would be off on
            // record with it, so its power key is left alone: it goes as in a power cut, with the host.
            _ if error.code == ErrorCode::InvalidRequest => CloseState::Left,
            CloseStep::Look | CloseStep::Press => CloseState::Waits,
            CloseStep::End => CloseState::Left,
        },
        why: Some(error.message),
    })
}

#[cfg(test)]
#[path = "closing_tests.rs"]
mod tests;
