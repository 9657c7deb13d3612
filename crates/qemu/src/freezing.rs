//! A guest's file systems held still for a moment, and always let go again.
//!
//! A guest that stays frozen is as good as dead, so nothing rests on one who froze it: that it is to be thawed is written down before it is asked to
//! freeze, a [`Frozen`] that is dropped thaws, a thread of its own thaws after [`FROZEN_MAX`], and what a process leaves that died is thawed by its
//! successor ([`Freezer::thaw_what_was_left`]). A guest that does not answer may read the freeze that waits in its port much later: the note stays
//! until its agent has said something to a thaw. Owns the note, a file beside QEMU's sockets. Refuses: a second freeze while one lasts. Who
//! freezes sees to it that the guest is neither moved nor stopped meanwhile: on another host nobody would know.

use crate::guest_agent::{AgentError, Port};
use crate::sync::{lock, wait_until};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Longest time for which a guest stays frozen.
pub const FROZEN_MAX: Duration = Duration::from_secs(10);
/// How long a guest may take to write its file systems out; it counts as frozen from then on, since it may be.
const FREEZE_WAIT: Duration = Duration::from_secs(5);
/// How long one try to thaw may take.
const THAW_WAIT: Duration = Duration::from_secs(2);
/// Pause before a guest is asked once more that was not thawed.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// After so long without success a round ends; another one is begun by who looks on, as long as the note is there.
const TRIED_MAX: Duration = Duration::from_secs(60);

/// Why a guest is not, or was not all the time, frozen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreezeError {
    #[error("the guest's file systems are being held still already")]
    Twice,
    #[error("that the guest is to be thawed cannot be written down: {0}")]
    Note(io::Error),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error("the guest went on by itself before it was thawed: it is held still for {} s at most", FROZEN_MAX.as_secs())]
    TooLong,
}

/// Freezes and thaws the guest behind a port.
#[derive(Debug)]
pub struct Freezer {
    port: Arc<Port>,
    note: PathBuf,
    tried_max: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Until when it stays frozen; none where nobody froze it.
    until: Option<Instant>,
    /// How the last thaw went.
    thawed: Option<Result<u64, AgentError>>,
}

/// A guest that is frozen, for [`FROZEN_MAX`] at most. Thawed when dropped.
#[derive(Debug)]
#[must_use = "the guest is thawed as soon as this is dropped"]
pub struct Frozen {
    freezer: Arc<Freezer>,
    file_systems: u64,
    until: Instant,
}

impl Freezer {
    /// `note`: a file that outlives this process, and not the guest.
    pub fn new(port: Arc<Port>, note: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            port,
            note,
            tried_max: TRIED_MAX,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Freezes the guest. Where that fails it is thawed all the same, since nobody knows.
    pub fn freeze(self: &Arc<Self>) -> Result<Frozen, FreezeError> {
        let until = Instant::now() + FROZEN_MAX;
        {
            let mut state = lock(&self.state);
            if state.until.is_some() || self.note.exists() {
                return Err(FreezeError::Twice);
            }
            fs::write(&self.note, b"").map_err(FreezeError::Note)?;
            state.until = Some(until);
            state.thawed = None;
        }
        // Before the guest is asked: without a thread nobody would thaw it in time.
        let (freezer, name) = (Arc::clone(self), "thaw".to_owned());
        let thread = std::thread::Builder::new().name(name);
        if let Err(error) = thread.spawn(move || freezer.thaw_in_time()) {
            let mut state = lock(&self.state);
            let _ = fs::remove_file(&self.note);
            state.until = None;
            return Err(FreezeError::Note(error));
        }
        let frozen = self.port.freeze(Instant::now() + FREEZE_WAIT);
        let mut guard = Frozen {
            freezer: Arc::clone(self),
            file_systems: 0,
            until,
        };
        // A failure drops it, which thaws.
        guard.file_systems = frozen?;
        Ok(guard)
    }

    /// Whether somebody holds the guest still, or left it so: nothing else is asked of its agent then.
    pub fn is_frozen(&self) -> bool {
        lock(&self.state).until.is_some() || self.note.exists()
    }

    /// Thaws a guest that a predecessor of this process, or an earlier round, may have left frozen. Blocks for a minute at most; what is not thawed
    /// by then is for the next call.
    pub fn thaw_what_was_left(&self) {
        {
            let mut state = lock(&self.state);
            if state.until.is_some() || !self.note.exists() {
                return;
            }
            // Nobody freezes the guest meanwhile, whose note would be taken for this one.
            state.until = Some(Instant::now());
            if !state.has_failed() {
                tracing::warn!("the guest may have been left frozen: it is thawed");
            }
        }
        self.thaw();
    }

    /// The thread of one freeze: thaws when its time is over, or before that when nobody needs it any more.
    fn thaw_in_time(&self) {
        let state = lock(&self.state);
        let due = state.until.unwrap_or_else(Instant::now);
        // A guard that is dropped brings the time forward.
        let is_early = |state: &State| state.until.is_some_and(|until| Instant::now() < until);
        drop(wait_until(&self.changed, state, due, is_early));
        self.thaw();
    }

    /// Tries until the agent says that the guest is thawed, or that it will not, or QEMU is gone; the note stays until then.
    fn thaw(&self) {
        let give_up = Instant::now() + self.tried_max;
        let thawed = loop {
            match self.port.thaw(Instant::now() + THAW_WAIT) {
                Err(error) if Instant::now() < give_up && !is_final(&error) => {
                    std::thread::sleep(AGAIN_AFTER);
                }
                result => break result,
            }
        };
        let is_over = thawed.as_ref().err().is_none_or(is_final);
        if is_over {
            let _ = fs::remove_file(&self.note);
        }
        let mut state = lock(&self.state);
        if let Err(error) = &thawed
            && !state.has_failed()
        {
            tracing::error!(%error, "a guest that was frozen may be frozen still; 'godwit vm reset' ends that");
        }
        (state.until, state.thawed) = (None, Some(thawed));
        self.changed.notify_all();
    }
}

/// Whether another try would say the same: the agent refuses, or QEMU is gone and its socket with it. A connection that fails
/// for want of anything else says nothing of the guest.
fn is_final(error: &AgentError) -> bool {
    match error {
        AgentError::Refused(_) => true,
        AgentError::Connect(error) => error.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

impl State {
    /// Whether the last thaw failed, which was told then.
    fn has_failed(&self) -> bool {
        matches!(self.thawed, Some(Err(_)))
    }
}

impl Frozen {
    /// How many file systems are held still.
    pub fn file_systems(&self) -> u64 {
        self.file_systems
    }

    /// Lets the guest go on, and says whether it was held still until now: else what was taken meanwhile is as after a power cut.
    pub fn thaw(self) -> Result<(), FreezeError> {
        let freezer = Arc::clone(&self.freezer);
        let is_late = Instant::now() >= self.until;
        drop(self);
        let deadline = Instant::now() + FROZEN_MAX;
        let state = lock(&freezer.state);
        let mut state = wait_until(&freezer.changed, state, deadline, |state| {
            state.until.is_some()
        });
        match state.thawed.take() {
            _ if is_late => Err(FreezeError::TooLong),
            // Nothing was frozen: the guest has thawed itself, or says what is not so.
            Some(Ok(0)) => Err(FreezeError::TooLong),
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(error.into()),
            None => Err(AgentError::Deadline.into()),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let mut state = lock(&self.freezer.state);
        if state.until == Some(self.until) {
            state.until = Some(Instant::now());
            self.freezer.changed.notify_all();
        }
    }
}

#[cfg(test)]
#[path = "freezing_tests.rs"]
mod tests;
