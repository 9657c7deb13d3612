//! One running QEMU's machine: what it does, and what may be asked of it.
//!
//! Owns the control connection. Every call has a deadline and ends by it. [`Machine::cont`] is the only function of
//! the product that lets a VM's vCPUs run, and it needs the permit; stopping needs none, since a stop is always safe.

use crate::qmp::{Client, EventKind, Events, EventsError, QmpError};
use crate::stderr_log::StderrLog;
use crate::text::printable;
use godwit_ownership::RunPermit;
use godwit_types::Generation;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Pause before a QEMU that refused to let its guest run is asked again.
const REFUSED_PAUSE: Duration = Duration::from_millis(5);

/// QEMU's state of the whole machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunState {
    Running,
    /// Stopped by a command, or loaded and never started.
    Paused,
    /// Never started, or reset while stopped.
    Prelaunch,
    /// Waits for a machine to come from elsewhere.
    Inmigrate,
    /// Its device state was saved for a move; `cont` takes it up again.
    Postmigrate,
    /// Its device state is being saved.
    FinishMigrate,
    /// The guest powered itself off.
    Shutdown,
    /// The guest reported a panic.
    GuestPanicked,
    /// The guest sleeps (S3).
    Suspended,
    /// A disk request failed and the machine was stopped for it.
    IoError,
    /// KVM or a device gave up.
    InternalError,
    Watchdog,
    /// Another one, by QEMU's name.
    Other(String),
}

impl RunState {
    fn from_name(name: &str) -> RunState {
        match name {
            "running" => RunState::Running,
            "paused" => RunState::Paused,
            "prelaunch" => RunState::Prelaunch,
            "inmigrate" => RunState::Inmigrate,
            "postmigrate" => RunState::Postmigrate,
            "finish-migrate" => RunState::FinishMigrate,
            "shutdown" => RunState::Shutdown,
            "guest-panicked" => RunState::GuestPanicked,
            "suspended" => RunState::Suspended,
            "io-error" => RunState::IoError,
            "internal-error" => RunState::InternalError,
            "watchdog" => RunState::Watchdog,
            // A hypervisor that its guest has taken over chooses it.
            other => RunState::Other(printable(other)),
        }
    }
}

impl fmt::Display for RunState {
    /// QEMU's name of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::Prelaunch => "prelaunch",
            RunState::Inmigrate => "inmigrate",
            RunState::Postmigrate => "postmigrate",
            RunState::FinishMigrate => "finish-migrate",
            RunState::Shutdown => "shutdown",
            RunState::GuestPanicked => "guest-panicked",
            RunState::Suspended => "suspended",
            RunState::IoError => "io-error",
            RunState::InternalError => "internal-error",
            RunState::Watchdog => "watchdog",
            RunState::Other(name) => name,
        })
    }
}

/// Proof of a stop.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "when the guest stopped is where the downtime begins"]
pub struct Stopped {
    /// When the STOP event was seen; when the answer came if the guest had been stopped before.
    pub at: Instant,
    /// The state afterwards: not always `Paused`, since the guest may have powered off or panicked.
    pub state: RunState,
}

/// The guest was not started, or it is not known whether it was. The permit comes back either way: this host holds it.
#[derive(Debug, thiserror::Error)]
#[error("cannot let the guest run: {source}")]
pub struct ContError {
    pub permit: RunPermit,
    /// Whether the guest may run all the same: no answer came. Ask for the state, or end the hypervisor.
    pub maybe_running: bool,
    pub source: QmpError,
}

/// One kind of machine that this QEMU can be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineType {
    /// Its full name, such as `pc-q35-7.2`.
    pub name: String,
    /// Its short name, such as `q35`.
    pub alias: Option<String>,
}

/// One CPU model that this QEMU knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuModel {
    /// Its name, such as `EPYC-v3`.
    pub name: String,
    /// Features of the model that this host lacks; empty when it can run here in full.
    pub unavailable: Vec<String>,
}

/// The machine inside one QEMU.
#[derive(Debug)]
pub struct Machine {
    client: Client,
    stderr: Option<StderrLog>,
}

impl Machine {
    /// Over a negotiated connection; `stderr` makes errors clearer.
    pub fn new(client: Client, stderr: Option<StderrLog>) -> Machine {
        Machine { client, stderr }
    }

    /// The control connection, for what has no function here. Not for `cont`, but of a trial.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The end of QEMU's standard error.
    pub fn stderr_tail(&self) -> String {
        self.stderr
            .as_ref()
            .map_or_else(|| "nothing that was kept".to_owned(), StderrLog::tail)
    }

    /// Major, minor and micro version of this QEMU.
    pub fn version(&self) -> (u64, u64, u64) {
        self.client.greeting().version
    }

    /// All events from now on.
    pub fn events(&self) -> Events {
        self.client.subscribe()
    }

    /// Whether the control connection has ended.
    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    pub fn query_status(&self, deadline: Instant) -> Result<RunState, QmpError> {
        let answer = self.ask("query-status", deadline)?;
        let name = answer.get("status").and_then(Value::as_str);
        name.map(RunState::from_name)
            .ok_or_else(|| QmpError::shape("query-status", "a status"))
    }

    /// Stops the vCPUs and device activity. Fine if they were stopped before.
    pub fn stop(&self, deadline: Instant) -> Result<Stopped, QmpError> {
        let events = self.events();
        self.ask("stop", deadline)?;
        let answered_at = Instant::now();
        let state = self.query_status(deadline)?;
        if state == RunState::Running {
            return Err(QmpError::shape("stop", "its effect: the guest still runs"));
        }
        // The event comes before the answer, on the same line, so it is here if there was one.
        let event =
            std::iter::from_fn(|| events.try_next()).find(|event| event.kind == EventKind::Stop);
        Ok(Stopped {
            at: event.map_or(answered_at, |event| event.seen_at),
            state,
        })
    }

    /// Lets the guest run, and says under which generation. The only function that does, and the permit is its price:
    ///
    /// ```no_run
    /// # use godwit_ownership::RunPermit;
    /// # use godwit_qemu::machine::{ContError, Machine};
    /// # use godwit_types::Generation;
    /// # use std::time::Instant;
    /// fn run(machine: &Machine, permit: RunPermit, deadline: Instant) -> Result<Generation, ContError> {
    ///     machine.cont(permit, deadline)
    /// }
    /// ```
    ///
    /// Without it nothing compiles:
    ///
    /// ```compile_fail,E0061
    /// # use godwit_ownership::RunPermit;
    /// # use godwit_qemu::machine::{ContError, Machine};
    /// # use godwit_types::Generation;
    /// # use std::time::Instant;
    /// fn run(machine: &Machine, permit: RunPermit, deadline: Instant) -> Result<Generation, ContError> {
    ///     machine.cont(deadline)
    /// }
    /// ```
    ///
    /// And no permit pays twice:
    ///
    /// ```compile_fail,E0382
    /// # use godwit_ownership::RunPermit;
    /// # use godwit_qemu::machine::{ContError, Machine};
    /// # use godwit_types::Generation;
    /// # use std::time::Instant;
    /// fn run(a: &Machine, b: &Machine, permit: RunPermit, deadline: Instant) -> Result<Generation, ContError> {
    ///     let _ = a.cont(permit, deadline);
    ///     b.cont(permit, deadline)
    /// }
    /// ```
    pub fn cont(&self, permit: RunPermit, deadline: Instant) -> Result<Generation, ContError> {
        match self.ask("cont", deadline) {
            Ok(_) => Ok(permit.generation()),
            Err(source) => Err(ContError {
                permit,
                maybe_running: !source.certainly_not_done(),
                source,
            }),
        }
    }

    /// As [`Machine::cont`], for a hypervisor that does not answer, or refuses for a moment: it is asked again until
    /// `deadline`, each time for at most `each`. Saying it twice does no harm.
    pub fn cont_patiently(
        &self,
        mut permit: RunPermit,
        each: Duration,
        deadline: Instant,
    ) -> Result<Generation, ContError> {
        loop {
            match self.cont(permit, (Instant::now() + each).min(deadline)) {
                Err(error) if self.is_closed() || Instant::now() >= deadline => return Err(error),
                Err(error) if error.maybe_running => permit = error.permit,
                Err(error) if self.may_go_on(Instant::now() + each) => {
                    permit = error.permit;
                    std::thread::sleep(REFUSED_PAUSE);
                }
                result => return result,
            }
        }
    }

    /// Whether a refusal to let the guest run may pass. A QEMU refuses while it has not noticed that its save was given
    /// up, and may be past that by the time it is asked for its state: only states that no waiting ends are final.
    fn may_go_on(&self, deadline: Instant) -> bool {
        !matches!(
            self.query_status(deadline),
            Ok(RunState::Shutdown
                | RunState::GuestPanicked
                | RunState::InternalError
                | RunState::IoError
                | RunState::Watchdog)
        )
    }

    /// Resets the machine and waits until it has happened. A stopped guest stays stopped.
    pub fn system_reset(&self, deadline: Instant) -> Result<(), QmpError> {
        let events = self.events();
        self.ask("system_reset", deadline)?;
        wait_for(&events, "system_reset", deadline, |kind| {
            matches!(kind, EventKind::Reset { .. })
        })
    }

    /// Presses the power button. Whether the guest obeys is seen by `Shutdown` events.
    pub fn powerdown(&self, deadline: Instant) -> Result<(), QmpError> {
        self.ask("system_powerdown", deadline).map(drop)
    }

    /// Asks QEMU to end. Its end is seen on the process.
    pub fn quit(&self, deadline: Instant) -> Result<(), QmpError> {
        match self.ask("quit", deadline) {
            Ok(_) | Err(QmpError::Closed) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes QEMU send its own announcements for its network cards.
    pub fn announce_self(&self, deadline: Instant) -> Result<(), QmpError> {
        let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
        self.client
            .execute("announce-self", rounds, deadline)
            .map(drop)
    }

    /// Whether the guest runs and uses its disk with this number, and QEMU has not begun to serve it: it never will before the
    /// guest is let run once more. What is asked here is not a stable part of QEMU's protocol: it is for versions that may be in such a state.
    pub fn has_forgotten_disk(&self, disk: usize, deadline: Instant) -> Result<bool, QmpError> {
        const COMMAND: &str = "x-query-virtio-status";
        let path = json!({"path": format!("/machine/peripheral/disk{disk}/virtio-backend")});
        let answer = self.client.execute(COMMAND, path, deadline)?;
        let told = |key: &str| {
            let value = answer.get(key).and_then(Value::as_bool);
            value.ok_or_else(|| QmpError::shape(COMMAND, "whether the device has started"))
        };
        let forgotten = told("started")? && !told("vhost-started")?;
        Ok(forgotten && self.query_status(deadline)? == RunState::Running)
    }

    /// Thread ids of the vCPUs, by their index.
    pub fn vcpu_thread_ids(&self, deadline: Instant) -> Result<Vec<i32>, QmpError> {
        const COMMAND: &str = "query-cpus-fast";
        self.list(COMMAND, deadline, |cpu| {
            i32::try_from(cpu.get("thread-id")?.as_i64()?).ok()
        })
    }

    /// The machine types that this QEMU offers.
    pub fn machine_types(&self, deadline: Instant) -> Result<Vec<MachineType>, QmpError> {
        self.list("query-machines", deadline, |machine| {
            Some(MachineType {
                name: text(machine, "name")?,
                alias: text(machine, "alias"),
            })
        })
    }

    /// The CPU models that this QEMU knows, and what this host lacks of each under its accelerator.
    pub fn cpu_models(&self, deadline: Instant) -> Result<Vec<CpuModel>, QmpError> {
        self.list("query-cpu-definitions", deadline, |model| {
            let listed = model.get("unavailable-features").and_then(Value::as_array);
            let unavailable = listed
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect();
            Some(CpuModel {
                name: text(model, "name")?,
                unavailable,
            })
        })
    }

    /// The features of a CPU model as this QEMU would give them to a guest here.
    pub fn cpu_features(
        &self,
        model: &str,
        deadline: Instant,
    ) -> Result<BTreeMap<String, bool>, QmpError> {
        const COMMAND: &str = "query-cpu-model-expansion";
        let answer = self.client.execute(
            COMMAND,
            json!({"type": "full", "model": {"name": model}}),
            deadline,
        )?;
        let properties = answer
            .get("model")
            .and_then(|model| model.get("props"))
            .and_then(Value::as_object);
        let properties = properties.ok_or_else(|| QmpError::shape(COMMAND, "properties"))?;
        Ok(properties
            .iter()
            .filter_map(|(name, value)| Some((name.clone(), value.as_bool()?)))
            .collect())
    }

    fn ask(&self, command: &str, deadline: Instant) -> Result<Value, QmpError> {
        self.client.execute(command, json!({}), deadline)
    }

    fn list<T>(
        &self,
        command: &str,
        deadline: Instant,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, QmpError> {
        let answer = self.ask(command, deadline)?;
        let items = answer
            .as_array()
            .and_then(|items| items.iter().map(read).collect());
        items.ok_or_else(|| QmpError::shape(command, "a list in its documented form"))
    }
}

/// Waits for an event that follows a command.
pub(crate) fn wait_for(
    events: &Events,
    command: &str,
    deadline: Instant,
    wanted: impl Fn(&EventKind) -> bool,
) -> Result<(), QmpError> {
    loop {
        match events.next(deadline) {
            Ok(event) if wanted(&event.kind) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(no_event(error, command)),
        }
    }
}

pub(crate) fn no_event(error: EventsError, command: &str) -> QmpError {
    match error {
        EventsError::Deadline => QmpError::Deadline {
            command: command.to_owned(),
        },
        EventsError::Closed => QmpError::Closed,
    }
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key).and_then(Value::as_str).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    fn sources(directory: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(directory)
            .expect("sources")
            .map(|entry| entry.expect("entry").path());
        entries
            .flat_map(|path| {
                if path.is_dir() {
                    sources(&path)
                } else {
                    vec![path]
                }
            })
            .collect()
    }

    #[test]
    fn a_state_that_a_hypervisor_invents_stays_on_its_line() {
        let invented = super::RunState::from_name("lost\n<0>the host\0 is on fire");
        assert_eq!(invented.to_string(), "lost <0>the host  is on fire");
    }

    /// Two places that send it would be one too many: a guest that runs without a permit is a guest that runs twice. A
    /// trial has a place of its own, since its guest is nobody's and it takes no other.
    #[test]
    fn one_place_lets_a_guest_run() {
        let needle = ["ask(\"", "cont\""].concat();
        let bare = ["\"", "cont\""].concat();
        let texts = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let product = texts
            .iter()
            .filter(|path| !path.ends_with("client/tests.rs"));
        let (mut sent, mut named) = (0, 0);
        for text in product.map(|path| fs::read_to_string(path).expect("source")) {
            sent += text.matches(&needle).count();
            named += text.matches(&bare).count();
        }
        assert_eq!((sent, named), (1, 2));
        assert_eq!(include_str!("trial.rs").matches(&bare).count(), 1);
    }
}
