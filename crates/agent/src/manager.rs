//! This host's system manager, systemd where there is one: whether it takes the host down, and the unit that powers
//! guests down before it does.
//!
//! Owns nothing. Refuses: nothing; a system manager that is missing, fails or hangs says no, and keeps nobody from work.

use crate::agent::Agent;
use crate::check::{note, ok, warning};
use godwit_types::host::Check;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Does its work when it is stopped, so it has to run.
pub(crate) const GUESTS_UNIT: &str = "godwit-guests.service";
/// Every shutdown starts it, of whatever kind.
const SHUTDOWN: &str = "shutdown.target";
/// What it calls a host that it does not take down.
const RUNS: [&str; 5] = [
    "initializing",
    "starting",
    "running",
    "degraded",
    "maintenance",
];
/// Longest wait for what is known of a unit, and for a unit to be ordered.
const ASK_WAIT: Duration = Duration::from_secs(5);

/// How the system manager is reached.
#[derive(Debug, Clone)]
pub(crate) struct Manager {
    /// Exists where systemd runs the host.
    pub systemd: PathBuf,
    /// The program that asks it.
    pub program: PathBuf,
}

impl Default for Manager {
    fn default() -> Self {
        Self {
            systemd: "/run/systemd/system".into(),
            program: "systemctl".into(),
        }
    }
}

/// How the unit that powers guests down is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestsUnit {
    /// Nobody knows of such a unit, or there is no systemd.
    Unknown,
    /// There is a systemd, and it has no such unit.
    Missing,
    Active,
    /// It is installed, and would do nothing when the host goes down.
    Inactive,
}

impl Manager {
    async fn output<S: AsRef<OsStr>>(&self, words: &[S], patience: Duration) -> Option<Output> {
        let mut command = tokio::process::Command::new(&self.program);
        command.args(words).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(patience, command.output()).await;
        output.ok()?.ok()
    }

    async fn said<S: AsRef<OsStr>>(&self, words: &[S], patience: Duration) -> Option<String> {
        self.output(words, patience).await.map(text)
    }

    /// Whether it says within `patience` that it takes this host down.
    pub(crate) async fn takes_host_down(&self, patience: Duration) -> bool {
        self.stops(patience).await == Some(true)
    }

    /// What it says of that within `patience`; nothing where there is none, it does not know itself, or its jobs, which
    /// alone may tell, are not heard.
    pub(crate) async fn stops(&self, patience: Duration) -> Option<bool> {
        let (state, jobs) = tokio::join!(
            self.said(&["is-system-running"], patience),
            self.output(&["list-jobs", "--no-legend", "--no-pager"], patience)
        );
        let state = state.unwrap_or_default();
        let jobs = jobs.filter(|output| output.status.success()).map(text);
        let stops = says_stopping(&state, jobs.as_deref().unwrap_or_default());
        let is_known = stops || jobs.is_some() && RUNS.contains(&state.trim());
        is_known.then_some(stops)
    }

    /// How the unit that powers guests down is.
    pub(crate) async fn guests_unit(&self) -> GuestsUnit {
        if !self.systemd.is_dir() {
            return GuestsUnit::Unknown;
        }
        let words = ["show", "--property=LoadState,ActiveState", GUESTS_UNIT];
        let said = self.said(&words, ASK_WAIT).await;
        unit_state(&said.unwrap_or_default())
    }

    /// Starts the unit that powers guests down where it is installed and does not run. Not while the host goes down: an
    /// order to start something must not end that.
    pub(crate) async fn bring_guests_unit_back(&self) {
        if self.guests_unit().await != GuestsUnit::Inactive || self.takes_host_down(ASK_WAIT).await
        {
            return;
        }
        tracing::warn!(
            "{GUESTS_UNIT} did not run, so that guests would have been cut off when this host goes down: it is started"
        );
        let words = ["start", "--no-block", "--job-mode=fail", GUESTS_UNIT];
        self.said(&words, ASK_WAIT).await;
    }
}

fn text(output: Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether the system manager says within `patience` that it takes this host down.
pub async fn host_is_shutting_down(patience: Duration) -> bool {
    Manager::default().takes_host_down(patience).await
}

impl Agent {
    /// Has the guests of this host powered down when it goes down, also where somebody stopped the unit that does so.
    pub(crate) fn bring_guests_unit_back(self: &Arc<Self>) {
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            if !agent.closing.is_on() {
                agent.manager.bring_guests_unit_back().await;
            }
        });
    }
}

/// Whether either says that the host goes down. A systemd before 253 says "starting" as long as its boot has not ended, also
/// while it goes down; then the job of the shutdown tells.
fn says_stopping(state: &str, jobs: &str) -> bool {
    let is_shutdown = |line: &str| {
        let mut words = line.split_whitespace();
        words.any(|word| word == SHUTDOWN) && words.next() == Some("start")
    };
    state.trim() == "stopping" || jobs.lines().any(is_shutdown)
}

fn unit_state(shown: &str) -> GuestsUnit {
    let value = |key: &str| {
        let mut lines = shown.lines().filter_map(|line| line.split_once('='));
        lines.find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    match (value("LoadState"), value("ActiveState")) {
        (Some("not-found"), _) => GuestsUnit::Missing,
        // One that starts or is stopped at this moment is in somebody's hands.
        (Some("loaded"), Some("inactive" | "failed")) => GuestsUnit::Inactive,
        (Some("loaded"), Some(_)) => GuestsUnit::Active,
        _ => GuestsUnit::Unknown,
    }
}

/// `godwit host check` of it; nothing where there is no systemd, or it is masked on purpose.
pub(crate) fn check(unit: GuestsUnit) -> Option<Check> {
    let name = "guests-unit";
    match unit {
        GuestsUnit::Unknown => None,
        GuestsUnit::Active => Some(ok(
            name,
            format!("{GUESTS_UNIT} powers guests down before this host goes down"),
        )),
        GuestsUnit::Missing => Some(note(
            name,
            format!("{GUESTS_UNIT} is not installed: guests are cut off when this host goes down"),
            "install it from the package, or run 'godwit host close' before each shutdown",
        )),
        GuestsUnit::Inactive => Some(warning(
            name,
            format!("{GUESTS_UNIT} does not run: guests are cut off when this host goes down"),
            format!("systemctl start {GUESTS_UNIT}"),
        )),
    }
}

#[cfg(test)]
#[path = "manager_tests.rs"]
mod tests;
