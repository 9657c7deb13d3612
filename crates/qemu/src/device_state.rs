//! The state of a machine's devices, out of one QEMU and into another, without the guest's RAM.
//!
//! QEMU's own migration with `x-ignore-shared`, after our own stop: it carries ROMs, the machine's configuration and
//! its run state, and checks for devices that cannot move. The guest is stopped from before [`Machine::save_device_state`]
//! until `cont`, here for a rollback or there. A destination that fails is thrown away: QEMU loads once.

use crate::machine::{Machine, RunState, no_event};
use crate::qmp::{Events, EventsError, QmpError};
use crate::sync::poll_until;
use crate::text::printable;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};
use serde_json::{Value, json};
use std::io;
use std::time::{Duration, Instant};

/// The largest device state that is accepted, in bytes. Without a graphics card it is some hundred KiB.
pub const MAX_DEVICE_STATE: u64 = 256 << 20;
/// How long QEMU is given to notice that a save was given up.
const SETTLE: Duration = Duration::from_secs(5);
/// Pause between two looks whether it has.
const SETTLE_PAUSE: Duration = Duration::from_millis(1);
/// How long QEMU is silent before whoever takes the bytes is asked whether to go on.
const SILENCE: Duration = Duration::from_millis(20);
/// The name under which QEMU keeps the descriptor between two commands.
const FD_NAME: &str = "godwit-device-state";

/// Why device state was not saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceStateError {
    /// The control socket failed or QEMU refused.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The guest runs, or is in a state that a rollback could not restore: after a save QEMU would let a guest run
    /// that had powered itself off.
    #[error("the guest is '{state:?}': its devices are saved only while it is paused")]
    NotPaused { state: RunState },
    /// A device or a setting forbids the move.
    #[error("the machine cannot be moved: {}", reasons.join("; "))]
    Blocked { reasons: Vec<String> },
    /// QEMU gave up on saving or loading.
    #[error("the hypervisor failed to {doing} the device state: {why}")]
    Failed {
        doing: &'static str,
        /// QEMU's words, or the end of its standard error.
        why: String,
    },
    /// Larger than [`MAX_DEVICE_STATE`].
    #[error("the device state is larger than {MAX_DEVICE_STATE} bytes")]
    TooLarge,
    /// The bytes did not flow before the deadline.
    #[error("the hypervisor did not {doing} the device state in time")]
    Deadline { doing: &'static str },
    /// Whoever takes the bytes refused them.
    #[error("the device state could not be passed on: {0}")]
    Sink(io::Error),
    /// A system call failed.
    #[error("cannot move the device state: {0}")]
    Io(io::Error),
    /// The machine runs though nobody let it.
    #[error("the loaded machine is '{state:?}' before anybody let it run: end this hypervisor")]
    RunsByItself { state: RunState },
}

/// Our end of the stream into a QEMU that waits for device state.
#[derive(Debug)]
pub struct Incoming {
    socket: OwnedFd,
    events: Events,
    written: u64,
}

/// What a save says as it goes on.
#[derive(Debug, Clone, Copy)]
pub enum SaveNews<'a> {
    /// Bytes of device state.
    Piece(&'a [u8]),
    /// Nothing has come for a while: whoever does not want to wait longer refuses.
    Silence,
    /// QEMU has written all; whether it calls that a success is asked next.
    Whole,
}

/// What `query-migrate` says.
struct Progress {
    status: String,
    error: Option<String>,
}

impl Machine {
    /// Why this machine cannot move, in QEMU's words; empty when it can.
    pub fn blocked_reasons(&self, deadline: Instant) -> Result<Vec<String>, QmpError> {
        let answer = self
            .client()
            .execute("query-migrate", json!({}), deadline)?;
        let listed = answer.get("blocked-reasons").and_then(Value::as_array);
        Ok(listed
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(printable)
            .collect())
    }

    /// Sets the source up, ahead of time and while the guest runs.
    pub fn prepare_outgoing(&self, deadline: Instant) -> Result<(), DeviceStateError> {
        let reasons = self.blocked_reasons(deadline)?;
        if !reasons.is_empty() {
            return Err(DeviceStateError::Blocked { reasons });
        }
        self.set_capabilities(deadline)?;
        // The default of 128 MiB/s would pace even this little stream.
        let unpaced = json!({"max-bandwidth": 64_u64 << 30});
        Ok(self
            .client()
            .execute("migrate-set-parameters", unpaced, deadline)
            .map(drop)?)
    }

    /// Saves the device state of a stopped guest, in pieces, into `sink`. Returns the number of bytes. The machine is then
    /// `Postmigrate`. After an error the guest is stopped and QEMU has given the save up, so `cont` is right.
    pub fn save_device_state(
        &self,
        deadline: Instant,
        mut sink: impl FnMut(SaveNews) -> io::Result<()>,
    ) -> Result<u64, DeviceStateError> {
        let state = self.query_status(deadline)?;
        if !matches!(
            state,
            RunState::Paused | RunState::Prelaunch | RunState::Postmigrate
        ) {
            return Err(DeviceStateError::NotPaused { state });
        }
        let events = self.events();
        let socket = self.give_socket(deadline)?;
        let target = json!({"uri": format!("fd:{FD_NAME}")});
        // QEMU writes with its main lock held, without which it answers nothing: a stream that nobody reads until the
        // answer has come stands still once the socket is full.
        let mut asked = self.client().begin("migrate", target, deadline)?;
        let mut pumped = pump(&socket, deadline, &mut |news: SaveNews| {
            if matches!(news, SaveNews::Silence) && asked.is_refused() {
                return Err(io::Error::other("the hypervisor refused to save"));
            }
            sink(news)
        });
        // Closing our end makes QEMU give up, if it has not finished; so does the command, whatever it is at.
        drop(socket);
        if pumped.is_ok() && !asked.has_come(deadline) {
            pumped = Err(DeviceStateError::Deadline { doing: "save" });
        }
        let mut until = deadline;
        if pumped.is_err() && !asked.is_refused() {
            until = Instant::now() + SETTLE;
            self.client().execute("migrate_cancel", json!({}), until)?;
        }
        // Commands are answered in order, so it is known now; a save that never began has nothing to settle.
        if asked.is_refused() {
            asked.wait(until)?;
        }
        let settled = self.settled(&events, until, "save");
        if pumped.is_err() {
            self.leave_finish_migrate(until)?;
        }
        let (bytes, progress) = (pumped?, settled?);
        match progress.status.as_str() {
            "completed" => Ok(bytes),
            _ => Err(self.failure("save", progress)),
        }
    }

    /// Makes a QEMU that was started as incoming wait for device state. Once per QEMU.
    pub fn prepare_incoming(&self, deadline: Instant) -> Result<Incoming, DeviceStateError> {
        self.set_capabilities(deadline)?;
        // Loading announces by itself, before anybody holds the permit; its one frame waits in QEMU's queue until the
        // guest runs. No round at all would free the timer of each virtio network card, which QEMU's reset of the
        // card then follows: the guest's next reboot would end QEMU.
        self.client().execute(
            "migrate-set-parameters",
            json!({"announce-rounds": 1}),
            deadline,
        )?;
        let events = self.events();
        let socket = self.give_socket(deadline)?;
        let mut arguments = json!({"uri": format!("fd:{FD_NAME}")});
        // Older versions end the process when loading fails, which is as clear, only less polite.
        if self.version() >= (9, 1, 0) {
            arguments = json!({"uri": format!("fd:{FD_NAME}"), "exit-on-error": false});
        }
        self.client()
            .execute("migrate-incoming", arguments, deadline)?;
        Ok(Incoming {
            socket,
            events,
            written: 0,
        })
    }

    /// Ends the stream and waits until everything is loaded. All of the guest's RAM must be in place before its devices are
    /// written: they look into it. Returns the machine's state, in which it stays until
    /// somebody with the permit lets it run.
    pub fn finish_incoming(
        &self,
        incoming: Incoming,
        deadline: Instant,
    ) -> Result<RunState, DeviceStateError> {
        let Incoming { socket, events, .. } = incoming;
        drop(socket);
        let progress = match self.settled(&events, deadline, "load") {
            Err(DeviceStateError::Qmp(QmpError::Closed)) => {
                return Err(DeviceStateError::Failed {
                    doing: "load",
                    why: self.stderr_tail(),
                });
            }
            other => other?,
        };
        if progress.status != "completed" {
            return Err(self.failure("load", progress));
        }
        match self.query_status(deadline)? {
            state @ (RunState::Running | RunState::Inmigrate) => {
                Err(DeviceStateError::RunsByItself { state })
            }
            state => Ok(state),
        }
    }

    fn set_capabilities(&self, deadline: Instant) -> Result<(), QmpError> {
        let on = |name| json!({"capability": name, "state": true});
        let wanted = json!({"capabilities": [on("x-ignore-shared"), on("events")]});
        self.client()
            .execute("migrate-set-capabilities", wanted, deadline)
            .map(drop)
    }

    /// Gives QEMU one end of a new socket under [`FD_NAME`]; returns the other.
    fn give_socket(&self, deadline: Instant) -> Result<OwnedFd, DeviceStateError> {
        let pair = net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        let (ours, theirs) = pair.map_err(|errno| DeviceStateError::Io(errno.into()))?;
        self.client().execute_with_fd(
            "getfd",
            json!({"fdname": FD_NAME}),
            theirs.as_fd(),
            deadline,
        )?;
        Ok(ours)
    }

    /// Waits until QEMU's migration has ended, one way or the other.
    fn settled(
        &self,
        events: &Events,
        deadline: Instant,
        doing: &'static str,
    ) -> Result<Progress, DeviceStateError> {
        loop {
            let progress = self.progress(deadline)?;
            if matches!(
                progress.status.as_str(),
                "completed" | "failed" | "cancelled"
            ) {
                return Ok(progress);
            }
            match events.next(deadline) {
                Ok(_) => {}
                Err(EventsError::Deadline) => return Err(DeviceStateError::Deadline { doing }),
                Err(error) => return Err(no_event(error, "migrate").into()),
            }
        }
    }

    /// QEMU says that a save has ended before the machine is in the state that follows, and refuses to let the guest
    /// run in between.
    fn leave_finish_migrate(&self, deadline: Instant) -> Result<(), QmpError> {
        while self.query_status(deadline)? == RunState::FinishMigrate && Instant::now() < deadline {
            std::thread::sleep(SETTLE_PAUSE);
        }
        Ok(())
    }

    fn progress(&self, deadline: Instant) -> Result<Progress, QmpError> {
        let answer = self
            .client()
            .execute("query-migrate", json!({}), deadline)?;
        let text = |key| answer.get(key).and_then(Value::as_str).map(str::to_owned);
        Ok(Progress {
            status: text("status").unwrap_or_default(),
            error: text("error-desc"),
        })
    }

    fn failure(&self, doing: &'static str, progress: Progress) -> DeviceStateError {
        let error = progress
            .error
            .unwrap_or_else(|| format!("it says '{}'", progress.status));
        let why = format!("{}; {}", printable(&error), self.stderr_tail());
        DeviceStateError::Failed { doing, why }
    }
}

impl Incoming {
    /// Passes on a piece of device state.
    pub fn write(&mut self, piece: &[u8], deadline: Instant) -> Result<(), DeviceStateError> {
        self.written = self.written.saturating_add(piece.len() as u64);
        if self.written > MAX_DEVICE_STATE {
            return Err(DeviceStateError::TooLarge);
        }
        let mut rest = piece;
        while !rest.is_empty() {
            match net::send(
                &self.socket,
                rest,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => ready(&self.socket, PollFlags::OUT, deadline, "load")?,
                Err(errno) => return Err(DeviceStateError::Io(errno.into())),
            }
        }
        Ok(())
    }
}

fn pump(
    socket: &OwnedFd,
    deadline: Instant,
    sink: &mut impl FnMut(SaveNews) -> io::Result<()>,
) -> Result<u64, DeviceStateError> {
    let mut buffer = vec![0; 256 << 10];
    let mut total = 0_u64;
    loop {
        let until = deadline.min(Instant::now() + SILENCE);
        match ready(socket, PollFlags::IN, until, "save") {
            Err(DeviceStateError::Deadline { .. }) if until < deadline => {
                sink(SaveNews::Silence).map_err(DeviceStateError::Sink)?;
                continue;
            }
            outcome => outcome?,
        }
        let count = match rustix::io::read(socket, &mut buffer) {
            Ok(0) => {
                sink(SaveNews::Whole).map_err(DeviceStateError::Sink)?;
                return Ok(total);
            }
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            // QEMU ended with the stream half read; its state tells what happened.
            Err(Errno::CONNRESET) => return Ok(total),
            Err(errno) => return Err(DeviceStateError::Io(errno.into())),
        };
        total = total.saturating_add(count as u64);
        if total > MAX_DEVICE_STATE {
            return Err(DeviceStateError::TooLarge);
        }
        let piece = buffer.get(..count).unwrap_or_default();
        sink(SaveNews::Piece(piece)).map_err(DeviceStateError::Sink)?;
    }
}

fn ready(
    socket: &OwnedFd,
    wanted: PollFlags,
    deadline: Instant,
    doing: &'static str,
) -> Result<(), DeviceStateError> {
    match poll_until([(socket.as_fd(), wanted)], deadline) {
        Ok([true]) => Ok(()),
        Ok([false]) => Err(DeviceStateError::Deadline { doing }),
        Err(error) => Err(DeviceStateError::Io(error)),
    }
}

#[cfg(test)]
mod tests;
