//! What must be true once the dust has settled, whatever was done to a migration.
//!
//! Uses the VM processes' own word only to know when to look; the verdict itself comes from the guest's RAM files and
//! from the processes that the system lists.

use crate::guests::{check, wait_passes};
use crate::host::Host;
use crate::pair::{Options, Pair};
use anyhow::{Context as _, bail, ensure};
use godwit_testkit::guest::checker::{self, Checked};
use godwit_testkit::guest::counter::{COUNTER_OFFSET, PAGE_BYTES};
use godwit_types::host_api::{HostVm, VmRequest};
use godwit_types::migration::{GIVEN_UP_WITHIN, MigrationReport, Outcome};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, MigrationId};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A guest that is slowed down goes over its memory once within this time, also where others have the cores.
const COUNTS_WITHIN: Duration = Duration::from_secs(240);
/// Longest time in which two hosts come to rest. No agent carries a last word here: a source whose destination was gone
/// before it made a link waits for that link as long as any host does.
const SETTLE: Duration = GIVEN_UP_WITHIN.saturating_add(Duration::from_secs(30));
/// How long it must stay settled.
const STANDS: Duration = Duration::from_millis(150);
/// How long counters are watched; the slowest guest steps a page each few milliseconds.
const WATCH: Duration = Duration::from_millis(200);
/// How long a guest that must run may take to count.
const WATCH_MAX: Duration = Duration::from_secs(5);

/// Where the guest ended.
#[derive(Debug, Clone)]
pub struct Settled {
    /// The host that runs it.
    pub owner: Arc<Host>,
    pub other: Arc<Host>,
    /// Whether the guest was lost with its QEMU and had to be started anew.
    pub lost: bool,
}

impl Pair {
    /// Waits until exactly one host runs the guest, the other has nothing of it, and nothing is under way.
    pub fn settle(&self) -> anyhow::Result<Settled> {
        let deadline = Instant::now() + SETTLE;
        let mut lost = false;
        let mut since = None;
        loop {
            let mut stands = false;
            let (a, b) = (view(&self.a), view(&self.b));
            for (mine, theirs, owner, other) in
                [(&a, &b, &self.a, &self.b), (&b, &a, &self.b, &self.a)]
            {
                let settled = *mine == View::Runs && *theirs == View::Nothing && other.is_clean();
                // A killed QEMU may be on its way out still: it must stand for a while.
                stands |= settled && hypervisors_on(self.ram()).len() == 1;
                let long = since.is_some_and(|at: Instant| at.elapsed() > STANDS);
                if settled && stands && long {
                    let (owner, other) = (Arc::clone(owner), Arc::clone(other));
                    return Ok(Settled { owner, other, lost });
                }
                if *mine == View::Crashed && *theirs == View::Nothing {
                    // The agent's part; a refusal may pass, and is asked again.
                    lost |= owner.ask(&VmRequest::Start).is_ok();
                }
            }
            since = if stands {
                since.or_else(|| Some(Instant::now()))
            } else {
                None
            };
            ensure!(
                Instant::now() < deadline,
                "not settled: a {a:?} (clean: {}), b {b:?} (clean: {})",
                self.a.is_clean(),
                self.b.is_clean()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// One QEMU, one RAM file, one pass counter that moves, no page lost or stale, no second boot.
    pub fn audit(&self, settled: &Settled) -> anyhow::Result<Checked> {
        let hypervisors = hypervisors_on(self.ram());
        ensure!(
            hypervisors.len() == 1,
            "{} QEMUs instead of one: {hypervisors:?}",
            hypervisors.len()
        );
        let ram = settled.owner.ram_file()?;
        wait_passes(&ram, 1, COUNTS_WITHIN)?;
        let moving = self.moving()?;
        ensure!(
            moving == [ram.clone()],
            "the guest runs in {moving:?}, not in {ram:?} alone"
        );
        ensure!(
            settled.other.is_clean(),
            "something is left on host {}",
            settled.other.name
        );
        settled.owner.ask(&VmRequest::Pause)?;
        let checked = check(&ram)?;
        ensure!(
            checked.control.boots == 1,
            "the guest booted {} times",
            checked.control.boots
        );
        settled.owner.ask(&VmRequest::Resume)?;
        Ok(checked)
    }

    /// A holder asks its predecessor once a second to confirm; until then it may not give the guest away.
    pub fn wait_confirmed(&self, settled: &Settled) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let journal = settled.owner.state_dir().join("ownership");
        while String::from_utf8_lossy(&std::fs::read(&journal)?).contains("\"unconfirmed\":{") {
            ensure!(Instant::now() < deadline, "the handover is never confirmed");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// RAM files whose guest counts; a starved one gets some seconds to be seen.
    pub fn moving(&self) -> anyhow::Result<Vec<PathBuf>> {
        self.seen_moving(WATCH_MAX)
    }

    /// RAM files whose guest counts at this moment, where none should.
    pub fn moving_now(&self) -> anyhow::Result<Vec<PathBuf>> {
        self.seen_moving(WATCH)
    }

    fn seen_moving(&self, within: Duration) -> anyhow::Result<Vec<PathBuf>> {
        let files: Vec<PathBuf> = [&self.a, &self.b]
            .into_iter()
            .flat_map(|host| std::fs::read_dir(host.ram_dir()).into_iter().flatten())
            .flatten()
            .map(|entry| entry.path())
            .collect();
        let before: Vec<_> = files.iter().map(|file| counters(file)).collect();
        let began = Instant::now();
        loop {
            // A counter in memory has no event; it is looked at again.
            std::thread::sleep(WATCH);
            let moved = files
                .iter()
                .zip(&before)
                .filter(|(file, before)| counters(file) != **before);
            let moved: Vec<PathBuf> = moved.map(|(file, _)| file.clone()).collect();
            if !moved.is_empty() || began.elapsed() >= within {
                return Ok(moved);
            }
        }
    }

    /// Whether the guest of this RAM file counts.
    pub fn stepping(&self, ram: &Path) -> anyhow::Result<bool> {
        Ok(self.moving()?.iter().any(|file| file == ram))
    }

    /// The report at the source says what happened to the guest.
    pub fn check_report(
        &self,
        id: &MigrationId,
        settled: &Settled,
    ) -> anyhow::Result<MigrationReport> {
        let report = self.wait_end(&self.a, id, Duration::from_secs(10))?;
        let moved = settled.owner.name == self.b.name;
        match report.outcome {
            Some(Outcome::Completed) => ensure!(moved, "reported as completed, but it is on a"),
            Some(Outcome::Failed | Outcome::Cancelled) => {
                ensure!(!moved, "reported as {:?}, but it is on b", report.outcome);
                ensure!(report.reason.is_some(), "no reason is given");
            }
            other => bail!("reported as {other:?}"),
        }
        Ok(report)
    }

    /// Everything that must hold after a migration, disturbed or not; then the guest moves once more.
    pub fn conclude(&self, id: Option<&MigrationId>) -> anyhow::Result<Conclusion> {
        let settled = self.settle()?;
        let checked = self.audit(&settled).context("after the fault")?;
        let report = match id {
            Some(id) => Some(self.check_report(id, &settled)?),
            None => None,
        };
        self.wait_confirmed(&settled)?;
        self.migrate(&settled.owner, &settled.other, &Options::default())
            .context("the next migration")?;
        let again = self.settle()?;
        ensure!(
            again.owner.name == settled.other.name,
            "the next migration went astray"
        );
        self.audit(&again).context("after the next migration")?;
        Ok(Conclusion {
            settled,
            checked,
            report,
        })
    }
}

/// What [`Pair::conclude`] found.
#[derive(Debug)]
pub struct Conclusion {
    /// Where the guest was after the fault.
    pub settled: Settled,
    pub checked: Checked,
    pub report: Option<MigrationReport>,
}

#[derive(Debug, PartialEq, Eq)]
enum View {
    Runs,
    Crashed,
    Nothing,
    Busy(String),
}

fn view(host: &Host) -> View {
    match host.vm_within(Duration::from_secs(3)) {
        Ok(HostVm {
            state,
            migration: None,
            ..
        }) => match state {
            VmState::Running => View::Runs,
            VmState::Crashed => View::Crashed,
            VmState::Stopped => View::Nothing,
            other => View::Busy(other.to_string()),
        },
        Ok(vm) => View::Busy(format!("{} with a migration", vm.state)),
        Err(error)
            if error
                .downcast_ref::<ApiError>()
                .is_some_and(|error| error.code == ErrorCode::UnknownVm) =>
        {
            View::Nothing
        }
        Err(error) => View::Busy(error.to_string()),
    }
}

/// The counters of all counted pages, folded; nothing without a guest.
fn counters(ram: &Path) -> Option<u64> {
    let file = File::open(ram).ok()?;
    let control = checker::control(&file).ok()?;
    let mut folded = u64::from(control.passes);
    for page in control.first_page..control.end_page {
        let mut word = [0; 4];
        file.read_exact_at(&mut word, u64::from(page) * PAGE_BYTES + COUNTER_OFFSET)
            .ok()?;
        folded = folded
            .wrapping_mul(31)
            .wrapping_add(u64::from(u32::from_le_bytes(word)));
    }
    Some(folded)
}

/// Process ids of the QEMUs whose RAM file is below `dir`.
pub fn hypervisors_on(dir: &Path) -> Vec<i32> {
    let wanted = format!("mem-path={}/", dir.display());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&wanted)
    })
    .collect()
}
