//! One seed of a site from its first to its last step.
//!
//! Phase 1: VMs are created, and live under faults. Phase 2: all heals, people do what they are shown, and each VM that
//! exists must run exactly once.

use super::coverage::SiteCoverage;
use super::disk_plant::DiskPlant;
use super::jobs::Kind;
use super::model::{Happening, NameId};
use super::world::Site;
use crate::run::PlantName;
use godwit_ownership::{Action, HostRecord, Qemu, RecordError, VmCore};
use godwit_site::plant::Plant;
use godwit_types::HostName;

const FAULTY_MS: u64 = 30_000;
const HEALING_MS: u64 = 120_000;
/// What is still in doubt after so long is decided by people.
const LATE_MS: u64 = 30_000;

#[derive(Debug, Clone, Copy, Default)]
pub struct SitePlant {
    /// In the rules of the site.
    pub site: Option<Plant>,
    pub core: PlantName,
    /// In what hosts do with disks that only they have.
    pub disk: Option<DiskPlant>,
}

impl SitePlant {
    pub(crate) fn ends_lower_copy(self) -> bool {
        self.site == Some(Plant::EndLowerCopy)
    }

    pub(crate) fn opens_any_image(self) -> bool {
        self.site == Some(Plant::OpensAnyImage)
    }

    pub(crate) fn opens_unread_image(self) -> bool {
        self.site == Some(Plant::OpensUnreadImage)
    }

    pub(crate) fn opens_unwritten_image(self) -> bool {
        self.site == Some(Plant::OpensUnwrittenImage)
    }

    pub(crate) fn is_ready_before_flush(self) -> bool {
        self.disk == Some(DiskPlant::ReadyBeforeFlush)
    }

    pub(crate) fn removes_unconfirmed(self) -> bool {
        self.disk == Some(DiskPlant::RemovesUnconfirmed)
    }

    pub(crate) fn uses_failed_copy(self) -> bool {
        self.disk == Some(DiskPlant::UsesFailedCopy)
    }

    pub(crate) fn switches_before_record(self) -> bool {
        self.disk == Some(DiskPlant::SwitchesBeforeRecord)
    }

    pub(crate) fn takes_half_made(self) -> bool {
        self.disk == Some(DiskPlant::TakesHalfMade)
    }

    pub(crate) fn removes_former_early(self) -> bool {
        self.disk == Some(DiskPlant::RemovesFormerEarly)
    }

    pub(crate) fn removes_unasked(self) -> bool {
        self.disk == Some(DiskPlant::RemovesUnasked)
    }

    pub(crate) fn removes_given_up(self) -> bool {
        self.disk == Some(DiskPlant::RemovesGivenUp)
    }

    pub(crate) fn says_unlooked(self) -> bool {
        self.disk == Some(DiskPlant::SaysUnlooked)
    }

    pub(crate) fn overrules_place(self) -> bool {
        self.disk == Some(DiskPlant::OverrulesPlace)
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct SiteOptions {
    pub plant: SitePlant,
    /// Keep a readable trace.
    pub trace: bool,
}

/// How a seed went.
#[derive(Debug)]
pub struct SiteOutcome {
    /// The invariant that broke, if one did.
    pub violation: Option<String>,
    pub coverage: SiteCoverage,
    /// Equal for equal runs.
    pub fingerprint: u64,
    /// The trace, if asked for.
    pub trace: Vec<String>,
}

/// Runs one seed of a whole site.
pub fn run_site_seed(seed: u64, options: SiteOptions) -> SiteOutcome {
    let Some(mut site) = Site::new(seed, options.plant, options.trace) else {
        return SiteOutcome {
            violation: Some("the world could not be made".to_owned()),
            coverage: SiteCoverage::default(),
            fingerprint: 0,
            trace: Vec::new(),
        };
    };
    live(&mut site);
    SiteOutcome {
        violation: site.violation.take(),
        fingerprint: site.fingerprint(),
        trace: site.trace.take().unwrap_or_default(),
        coverage: site.coverage,
    }
}

fn live(site: &mut Site) {
    site.draw_swarm();
    begin(site);
    site.is_faulty = true;
    site.after(1, Happening::PeopleAct);
    let end = site.now + FAULTY_MS;
    site.run_until(end);
    if site.violation.is_none() {
        heal(site);
    }
}

/// The first hosts join, the VMs are made and started.
fn begin(site: &mut Site) {
    site.controller_starts(0);
    let hosts = site.names.len();
    let first = match site.rng.below(10) {
        0 => 1,
        1 | 2 => 2,
        3 | 4 => hosts - 1,
        _ => hosts,
    };
    for name in 0..first {
        site.join_anew(0, name);
    }
    site.after(1000, Happening::Look);
    site.run_until(1500);
    create_all(site, first);
    site.run_until(3000);
    for vm in 0..site.vms.len() {
        // What could not be made is none that anybody starts.
        if site.controllers[0].db.exists.contains(&vm) {
            site.begin(0, vm, Kind::Start { on: None });
        }
    }
    site.run_until(4000);
}

fn create_all(site: &mut Site, first: NameId) {
    for vm in 0..site.vms.len() {
        let on = site.rng.index(first);
        site.begin(0, vm, Kind::Create { on });
    }
}

fn heal(site: &mut Site) {
    site.note(|_| "everything heals".to_owned());
    site.is_faulty = false;
    site.cuts.clear();
    let keep = site.rng.index(site.controllers.len());
    for controller in 0..site.controllers.len() {
        site.controllers[controller].frozen_until = 0;
        let stays_off = controller != keep;
        site.controllers[controller].stays_off = stays_off;
        if stays_off {
            site.controllers[controller].is_up = false;
        }
    }
    for at in 0..site.machines.len() {
        let now = site.now;
        let machine = &mut site.machines[at];
        machine.agent_cut_until = now;
        machine.slow_until = now;
        if machine.is_clone {
            machine.stays_off = true;
            site.crash(at);
        }
        let name = site.machines[at].name;
        if !site.machines[at].is_clone {
            site.address[name] = at;
        }
    }
    let end = site.now + HEALING_MS;
    let (mut found, mut quiet) = (Err("not healed".to_owned()), 0);
    while site.now < end && site.violation.is_none() && quiet < 12 {
        site.mend(keep, site.now + HEALING_MS > end + LATE_MS);
        let next = site.now + 1000;
        site.run_until(next);
        found = site.settled();
        quiet = if found.is_ok() { quiet + 1 } else { 0 };
    }
    let exempt = (0..site.vms.len()).filter(|vm| site.is_exempt(*vm)).count();
    site.coverage.judged_vms += (site.vms.len() - exempt) as u64;
    if let Err(what) = found {
        site.violated(what);
    }
}

/// The fault planted into the rules of the site.
pub(crate) fn site_plant(plant: SitePlant) -> Option<Plant> {
    plant.site
}

/// A core for a new process, with the fault that this run plants.
pub(crate) fn recover(
    record: HostRecord,
    host: HostName,
    qemu: Qemu,
    plant: SitePlant,
) -> Result<(VmCore, Vec<Action>), RecordError> {
    crate::run::recover(record, host, qemu, plant.core)
}
