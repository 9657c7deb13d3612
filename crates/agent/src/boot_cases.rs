//! The VMs of this host that should run and have no guest: how far each has come on its way to a boot.
//!
//! Pure; the clock is given. Whether a VM may boot is crate `site`'s to say. Refuses: to boot a VM again and again whose
//! QEMU dies each time, one that its description leaves crashed, and to give up a boot that failed.

use crate::backoff::Backoff;
use godwit_site::Judged;
use godwit_types::host_api::HostVm;
use godwit_types::vm::{OnCrash, VmState};
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Most boots of a VM whose QEMU died, within [`RESTARTS_WITHIN`].
pub(crate) const RESTARTS_MAX: usize = 5;
/// Over which time they are counted.
pub(crate) const RESTARTS_WITHIN: Duration = Duration::from_secs(600);
/// Between two rounds of questions while a VM waits.
const ASK_EACH: Duration = Duration::from_secs(2);
/// The longest pause while none waits and some were refused: what was answered may change, soonest right after it, since
/// the new holder may only have been silent for a moment.
const ASK_REFUSED_EACH: Duration = Duration::from_secs(20);

/// How far a VM has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nobody has let it boot yet.
    Waits,
    /// Somebody knows better than its record.
    Never,
    /// It is being booted, or gives way.
    Busy,
    /// It stays as it is until a person starts it.
    Stays,
}

/// A VM that should run and has no guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Down {
    /// What its record holds.
    pub generation: Generation,
    /// Whether its QEMU died, rather than that the host was started anew.
    pub crashed: bool,
    /// What its description says about that.
    pub on_crash: OnCrash,
}

#[derive(Debug)]
struct Case {
    down: Down,
    stage: Stage,
    note: String,
    since: Instant,
    asked: Option<Instant>,
    not_before: Option<Instant>,
    failures: Backoff,
    /// How often it was asked about again after it had been refused.
    refused: u32,
}

/// What is to be done for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Boot,
    /// Let its record give way to another host's.
    GiveWay,
}

#[derive(Debug, Default)]
pub(crate) struct Cases {
    cases: BTreeMap<VmName, Case>,
    restarts: BTreeMap<VmName, VecDeque<Instant>>,
    last_round: Option<Instant>,
}

impl Cases {
    /// Takes in which VMs should run and have no guest. Gives those that wish for a boot since now, and those that do not
    /// any more.
    pub(crate) fn found(
        &mut self,
        down: &BTreeMap<VmName, Down>,
        now: Instant,
    ) -> (Vec<(VmName, Generation)>, Vec<VmName>) {
        let over: Vec<VmName> = self
            .cases
            .iter()
            .filter(|(vm, case)| case.stage != Stage::Busy && !down.contains_key(*vm))
            .map(|(vm, _)| vm.clone())
            .collect();
        self.cases.retain(|vm, _| !over.contains(vm));
        let mut fresh = Vec::new();
        for (vm, down) in down {
            let known = self.cases.get(vm);
            if known.is_some_and(|case| {
                case.stage == Stage::Busy || case.down.generation == down.generation
            }) {
                continue;
            }
            let case = self.begin(vm, *down, now);
            if case.stage == Stage::Waits {
                fresh.push((vm.clone(), down.generation));
            }
            self.cases.insert(vm.clone(), case);
        }
        (fresh, over)
    }

    /// Under which generation the VM was held when it was found without a guest: that was asked about, and judged.
    pub(crate) fn generation(&self, vm: &VmName) -> Option<Generation> {
        self.cases.get(vm).map(|case| case.down.generation)
    }

    fn begin(&mut self, vm: &VmName, down: Down, now: Instant) -> Case {
        let restarts = self.restarts.entry(vm.clone()).or_default();
        restarts.retain(|at| now.saturating_duration_since(*at) < RESTARTS_WITHIN);
        let stays = match down.on_crash {
            _ if !down.crashed => None,
            OnCrash::Stay => Some(format!(
                "its QEMU died and on_crash = \"stay\" is set: start it with 'godwit vm start {vm}'"
            )),
            OnCrash::Restart if restarts.len() >= RESTARTS_MAX => Some(format!(
                "its QEMU died {} times within {} minutes, it is not booted again: find out why, then run 'godwit vm start {vm}'",
                RESTARTS_MAX + 1,
                RESTARTS_WITHIN.as_secs() / 60
            )),
            OnCrash::Restart => None,
        };
        Case {
            down,
            stage: match stays {
                Some(_) => Stage::Stays,
                None => Stage::Waits,
            },
            note: stays.unwrap_or_else(|| "this host asks its site before it boots it".into()),
            since: now,
            asked: None,
            not_before: None,
            failures: Backoff::of_boots(),
            refused: 0,
        }
    }

    /// Whether the question is to be asked now.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let since = self
            .last_round
            .map(|at| now.saturating_duration_since(at))
            .unwrap_or(ASK_REFUSED_EACH);
        self.cases.values().any(|case| match case.stage {
            Stage::Waits => case.is_open(now) && since >= ASK_EACH,
            Stage::Never => since >= case.refused_pause(),
            Stage::Busy | Stage::Stays => false,
        })
    }

    /// Notes that the question is being asked.
    pub(crate) fn asked(&mut self, now: Instant) {
        self.last_round = Some(now);
        for case in self.cases.values_mut() {
            case.asked.get_or_insert(now);
            if case.stage == Stage::Never {
                case.refused = case.refused.saturating_add(1);
            }
        }
    }

    /// VMs to be judged now, with the seconds for which each was asked about.
    pub(crate) fn open(&self, now: Instant) -> Vec<(VmName, u64)> {
        let open = self.cases.iter().filter(|(_, case)| case.is_open(now));
        open.map(|(vm, case)| {
            let waited = case.asked.map(|at| now.saturating_duration_since(at));
            (vm.clone(), waited.unwrap_or_default().as_secs())
        })
        .collect()
    }

    /// Takes in a judgement; what to do at once, if anything.
    pub(crate) fn judged(&mut self, vm: &VmName, judged: Judged) -> Option<Step> {
        let case = self.cases.get_mut(vm)?;
        if matches!(case.stage, Stage::Busy | Stage::Stays) {
            return None;
        }
        let (stage, note, step) = match judged {
            Judged::Wait(why) => (Stage::Waits, why, None),
            Judged::Never(why) => (Stage::Never, format!("it is not booted here: {why}"), None),
            Judged::Boot => (Stage::Busy, "it is being booted".into(), Some(Step::Boot)),
            Judged::Yield(why) => {
                let note = format!("its record gives way: {why}");
                (Stage::Busy, note, Some(Step::GiveWay))
            }
        };
        if case.failures.failures() == 0 || stage != Stage::Waits {
            case.note = note;
        }
        case.stage = stage;
        step
    }

    /// Whether the VM's QEMU died, rather than that the host was started anew; none if it is no case any more.
    pub(crate) fn has_crashed(&self, vm: &VmName) -> Option<bool> {
        self.cases.get(vm).map(|case| case.down.crashed)
    }

    /// A boot, or giving way, has failed: it is tried again, more and more slowly.
    pub(crate) fn failed(&mut self, vm: &VmName, why: &str, now: Instant) {
        let Some(case) = self.cases.get_mut(vm) else {
            return;
        };
        let wait = case.failures.failed();
        case.stage = Stage::Waits;
        case.not_before = now.checked_add(wait);
        case.note = format!(
            "{why} ({} times in a row); next attempt in {wait:?}",
            case.failures.failures()
        );
    }

    /// What holds a boot up for a while, without having tried it.
    pub(crate) fn put_off(&mut self, vm: &VmName, why: &str, until: Option<Instant>) {
        if let Some(case) = self.cases.get_mut(vm) {
            case.stage = Stage::Waits;
            case.not_before = until;
            case.note = why.into();
        }
    }

    pub(crate) fn booted(&mut self, vm: &VmName, now: Instant) {
        let case = self.cases.remove(vm);
        if case.is_some_and(|case| case.down.crashed) {
            self.restarts.entry(vm.clone()).or_default().push_back(now);
        }
    }

    /// A person has started it, or it is gone: nothing that came before counts.
    pub(crate) fn forget(&mut self, vm: &VmName) {
        self.cases.remove(vm);
        self.restarts.remove(vm);
    }

    /// Shows how far a VM has come on `host`, and where it is to be read what happened: `log`.
    pub(crate) fn show(&self, vm: &mut HostVm, now: Instant, host: &HostName, log: &str) {
        let Some(case) = self.cases.get(&vm.spec.name) else {
            return;
        };
        if !matches!(vm.state, VmState::Unreachable | VmState::Crashed) {
            return;
        }
        vm.state = VmState::Crashed;
        let waited = now.saturating_duration_since(case.since).as_secs();
        let note = named(&case.note, host);
        vm.note = Some(match case.stage {
            Stage::Waits => format!("{note} (since {waited} s)"),
            Stage::Stays => format!("{note} (its log: {log} on host {host})"),
            Stage::Never | Stage::Busy => note,
        });
    }
}

/// The same of a host that is named: lists of the controller show these words, too, where "here" is another place.
fn named(note: &str, host: &HostName) -> String {
    note.replace("this host's", &format!("host {host}'s"))
        .replace("this host", &format!("host {host}"))
        .replace("boot-alone' here", &format!("boot-alone' on host {host}"))
        .replace("not booted here", &format!("not booted on host {host}"))
        .replace("its record here", &format!("its record on host {host}"))
}

impl Case {
    /// The pause before it is asked about again once it was refused: twice as long each time.
    fn refused_pause(&self) -> Duration {
        let factor = 1_u32.checked_shl(self.refused).unwrap_or(u32::MAX);
        ASK_EACH.saturating_mul(factor).min(ASK_REFUSED_EACH)
    }

    fn is_open(&self, now: Instant) -> bool {
        let rests = self.not_before.is_some_and(|at| now < at);
        matches!(self.stage, Stage::Waits | Stage::Never) && !rests
    }
}

#[cfg(test)]
#[path = "boot_cases_tests.rs"]
mod tests;
