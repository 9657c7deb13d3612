//! What is known of the guest through its agent, and what that is asked to do.
//!
//! A thread of its own asks, for as long as the VM's QEMU lives: the VM's thread takes what was heard last and waits for nobody.
//! QEMU is asked first whether the guest has the port open, so that nothing piles up there for an agent that a guest may get later.
//! A guest that stands still is not asked, and what it said stays. After a move the process at the destination asks anew.
//!
//! Owns the port's connection and what was heard. Refuses: to trust it; people are shown it, and a guest that does not obey its agent
//! gets the power key.

use crate::files::Paths;
use crate::hypervisor::{Hyper, QMP_WAIT};
use godwit_qemu::freezing::Freezer;
use godwit_qemu::guest_agent::{self, Port};
use godwit_qemu::machine::{Machine, RunState};
use godwit_qemu::qmp::QmpError;
use godwit_qemu::seed;
use godwit_types::guest::GuestInfo;
use godwit_types::vm::{SEED_AND_AGENT, VmSpec};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Pause of the thread between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How often a guest is asked that has answered.
const ASK_EVERY: Duration = Duration::from_secs(30);
/// Longest pause before one is asked again that has not.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long the agent has to say all that it is asked in one round, also in a guest that is emulated.
const ASK_WAIT: Duration = Duration::from_secs(10);
/// How long it has to begin a shutdown before the power key is pressed.
const POWER_OFF_WAIT: Duration = Duration::from_secs(5);
/// After so many rounds without an answer what was heard before is not shown any more.
const MISSED_MAX: u32 = 3;

/// The guest of one QEMU whose machine has a port for an agent.
#[derive(Debug)]
pub(crate) struct Guest {
    machine: Arc<Machine>,
    port: Arc<Port>,
    freezer: Arc<Freezer>,
    heard: Mutex<Heard>,
    is_asked_off: AtomicBool,
}

#[derive(Debug, Default)]
struct Heard {
    info: Option<GuestInfo>,
    /// Rounds without an answer since.
    missed: u32,
    next: Option<Instant>,
}

impl Heard {
    /// Takes in what came of a round; when the next one is due.
    fn take(&mut self, said: Option<GuestInfo>, now: Instant) {
        let pause = match said {
            Some(info) => {
                (self.info, self.missed) = (Some(info), 0);
                ASK_EVERY
            }
            None => {
                self.missed = self.missed.saturating_add(1);
                if self.missed >= MISSED_MAX {
                    self.info = None;
                }
                let doubled = 1 << self.missed.min(4);
                (LOOK_EVERY * doubled).min(PAUSE_MAX)
            }
        };
        self.next = Some(now + pause);
    }

    /// There is nobody who could be asked. The time of the next question stays: a guest that opens its port again and again does not have it sooner.
    fn forget(&mut self) {
        self.info = None;
    }
}

impl Guest {
    /// Of a QEMU that was just started or taken over, where its machine has a port for an agent: asks from now on.
    pub(crate) fn follow(machine: &Arc<Machine>, paths: &Paths, launch: u64) -> Option<Arc<Self>> {
        if !paths.agent(launch).exists() {
            return None;
        }
        let guest = Self::of(Arc::clone(machine), paths, launch);
        let weak = Arc::downgrade(&guest);
        let spawned = Builder::new()
            .name("guest-agent".into())
            .spawn(move || look_on(&weak));
        if let Err(error) = spawned {
            tracing::warn!(%error, "the guest's agent is not asked");
        }
        Some(guest)
    }

    fn of(machine: Arc<Machine>, paths: &Paths, launch: u64) -> Arc<Self> {
        let port = Arc::new(Port::at(paths.agent(launch)));
        Arc::new(Self {
            machine,
            freezer: Freezer::new(Arc::clone(&port), paths.frozen(launch)),
            port,
            heard: Mutex::default(),
            is_asked_off: AtomicBool::new(false),
        })
    }

    /// What the guest said of itself last.
    pub(crate) fn info(&self) -> Option<GuestInfo> {
        self.heard().info.clone()
    }

    /// Has a thread ask the agent to power the guest off, and press the power key where it does not begin to. Returns whether it does:
    /// not where nothing in the guest has the port open, or it is just being asked. An error where QEMU does not say.
    pub(crate) fn begin_power_off(self: &Arc<Self>) -> Result<bool, QmpError> {
        let has_agent = self.machine.has_agent(Instant::now() + QMP_WAIT)?;
        let may_answer = has_agent && !self.freezer.is_frozen();
        if !may_answer || self.is_asked_off.swap(true, Ordering::SeqCst) {
            return Ok(false);
        }
        let guest = Arc::clone(self);
        let spawned = Builder::new().name("guest-off".into()).spawn(move || {
            guest.power_off();
            guest.is_asked_off.store(false, Ordering::SeqCst);
        });
        if spawned.is_err() {
            self.is_asked_off.store(false, Ordering::SeqCst);
        }
        Ok(spawned.is_ok())
    }

    /// Who has the guest's file systems stand still, where it runs and something in it has the port open.
    pub(crate) fn freezer(&self) -> Option<Arc<Freezer>> {
        let deadline = Instant::now() + QMP_WAIT;
        let runs = matches!(self.machine.query_status(deadline), Ok(RunState::Running));
        let has_agent = runs && matches!(self.machine.has_agent(deadline), Ok(true));
        has_agent.then(|| Arc::clone(&self.freezer))
    }

    fn power_off(&self) {
        let Err(error) = self.port.power_off(Instant::now() + POWER_OFF_WAIT) else {
            return;
        };
        tracing::warn!(%error, "the guest's agent does not power it off: the power key is pressed");
        if let Err(error) = self.machine.powerdown(Instant::now() + QMP_WAIT) {
            tracing::warn!(%error, "the guest's power key cannot be pressed");
        }
    }

    /// One look of the thread.
    fn look(&self) {
        self.freezer.thaw_what_was_left();
        let now = Instant::now();
        let is_due = self.heard().next.is_none_or(|next| now >= next);
        if !is_due || self.freezer.is_frozen() {
            return;
        }
        let deadline = now + QMP_WAIT;
        match self.machine.has_agent(deadline) {
            Ok(true) => {}
            Ok(false) => return self.heard().forget(),
            // QEMU is gone, or busy.
            Err(_) => return,
        }
        if !matches!(self.machine.query_status(deadline), Ok(RunState::Running)) {
            return;
        }
        let said = self.port.info(now + ASK_WAIT);
        let said =
            said.inspect_err(|error| tracing::debug!(%error, "the guest does not say who it is"));
        self.heard().take(said.ok(), Instant::now());
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hyper {
    /// What the guest says of itself, if it has an agent that answers.
    pub(crate) fn guest_info(&self) -> Option<GuestInfo> {
        self.guest.as_ref()?.info()
    }

    /// Has the guest asked to power off: by its agent if that answers, else by the power key, which is for one, too, that was asked before
    /// and runs on. Returns whether it is the agent.
    pub(crate) fn ask_to_power_off(&self, was_asked: bool) -> Result<bool, QmpError> {
        // A QEMU that does not answer is not waited for a second time.
        if let Some(guest) = self.guest.as_ref().filter(|_| !was_asked)
            && guest.begin_power_off()?
        {
            return Ok(true);
        }
        self.machine.powerdown(Instant::now() + QMP_WAIT)?;
        Ok(false)
    }
}

/// What a guest's QEMU is given, of its hardware version.
pub(crate) struct Given {
    agent: Option<UnixListener>,
    seed: Option<OwnedFd>,
}

impl Given {
    /// A port for its agent at this path, and its seed, which is made anew for each QEMU.
    pub(crate) fn make(spec: &VmSpec, agent: &Path) -> io::Result<Self> {
        let has_port = spec.hardware() >= SEED_AND_AGENT;
        Ok(Self {
            agent: has_port.then(|| guest_agent::listen(agent)).transpose()?,
            seed: seed::open_for(spec)?,
        })
    }

    pub(crate) fn agent_fd(&self) -> Option<i32> {
        self.agent.as_ref().map(|agent| agent.as_raw_fd())
    }

    pub(crate) fn seed_fd(&self) -> Option<i32> {
        self.seed.as_ref().map(|seed| seed.as_raw_fd())
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let agent = self.agent.iter().map(AsFd::as_fd);
        agent.chain(self.seed.iter().map(AsFd::as_fd))
    }
}

/// Until nobody has the guest any more.
fn look_on(guest: &Weak<Guest>) {
    while let Some(living) = guest.upgrade() {
        if living.machine.is_closed() {
            return;
        }
        living.look();
        drop(living);
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str) -> GuestInfo {
        GuestInfo {
            hostname: Some(name.into()),
            ..GuestInfo::default()
        }
    }

    #[test]
    fn what_was_heard_outlives_a_busy_moment_and_no_longer_silence() {
        let (mut heard, now) = (Heard::default(), Instant::now());
        heard.take(Some(info("web")), now);
        assert_eq!(heard.next, Some(now + ASK_EVERY));
        for _ in 1..MISSED_MAX {
            heard.take(None, now);
            assert_eq!(heard.info, Some(info("web")));
        }
        heard.take(None, now);
        assert_eq!(heard.info, None);
        for _ in 0..40 {
            heard.take(None, now);
        }
        assert_eq!(heard.next, Some(now + PAUSE_MAX));
    }

    #[test]
    fn a_guest_that_opens_its_port_again_and_again_is_asked_no_sooner() {
        let (mut heard, now) = (Heard::default(), Instant::now());
        for _ in 0..40 {
            heard.take(None, now);
            heard.forget();
        }
        assert_eq!(heard.next, Some(now + PAUSE_MAX));
        heard.take(Some(info("web")), now);
        heard.forget();
        assert_eq!((heard.info, heard.next), (None, Some(now + ASK_EVERY)));
    }
}
