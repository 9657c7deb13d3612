//! What the emptying of a host waits for before it leaves a VM where it is: hosts that refused it a moment ago, hosts
//! that were lost a moment ago, measurements that failed. The clock is handed in.
//!
//! Owned by the drain's task, begins anew with it. Refuses: to wait for ever.

use godwit_types::{ApiError, HostName, VmName};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Tries of a VM before it is left where it is.
pub const TRIES_MAX: u32 = 3;
/// Pause before a host that refused a VM is asked again, and before a VM that was busy is tried again.
const ASK_AGAIN: Duration = Duration::from_secs(3);
/// A host that does not answer for so long is not waited for any more.
const AWAY_MAX: Duration = Duration::from_secs(60);
/// Nor is one that answers and is closed for so long: by default its guests have 120 s to power off.
const CLOSED_MAX: Duration = Duration::from_secs(180);
/// Pause before a VM that could not be measured is measured again.
const MEASURE_AGAIN: Duration = Duration::from_secs(10);

/// A host that refused a VM: asked again a few times, since what stood in the way may have been there for a moment.
#[derive(Debug)]
struct Refusal {
    reasons: Vec<ApiError>,
    times: u32,
    at: Instant,
}

impl Refusal {
    fn is_final(&self) -> bool {
        self.times >= TRIES_MAX
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < ASK_AGAIN
    }
}

/// A host that might take VMs and does not now. Each of the two is waited for by itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Away {
    pub host: HostName,
    /// It answers and is closed, as one that is rebooted is at first; else it does not answer.
    pub closes: bool,
}

/// Everything that is waited for.
#[derive(Debug, Default)]
pub struct Patience {
    refused: BTreeMap<(VmName, HostName), Refusal>,
    paused: BTreeMap<VmName, Instant>,
    away: BTreeMap<Away, Instant>,
    measured: BTreeMap<VmName, (u32, Instant)>,
}

impl Patience {
    /// Notes that a host refused a VM, so many times.
    pub fn refuse(&mut self, pair: (VmName, HostName), reasons: Vec<ApiError>, times: u32) {
        let before = self.refused.get(&pair).map_or(0, |refusal| refusal.times);
        let refusal = Refusal {
            reasons,
            times: before.saturating_add(times),
            at: Instant::now(),
        };
        self.refused.insert(pair, refusal);
    }

    /// How many hosts refused a VM.
    pub fn refusals(&self) -> usize {
        self.refused.len()
    }

    /// Why a host is not asked now to take a VM: it refused it for good, or a moment ago.
    pub fn refusal(&self, vm: &VmName, host: &HostName, now: Instant) -> Option<&[ApiError]> {
        let refusal = self.refused.get(&(vm.clone(), host.clone()))?;
        (refusal.is_final() || refusal.is_fresh(now)).then_some(&*refusal.reasons)
    }

    /// Whether one of these hosts, which refused a VM a moment ago, is still to be asked again.
    pub fn asks_again<'a>(
        &self,
        vm: &VmName,
        mut hosts: impl Iterator<Item = &'a HostName>,
        now: Instant,
    ) -> bool {
        hosts.any(|host| {
            let refusal = self.refused.get(&(vm.clone(), host.clone()));
            refusal.is_some_and(|refusal| !refusal.is_final() && refusal.is_fresh(now))
        })
    }

    /// Leaves a VM alone for a moment: it was busy, or a host was away. Not a try.
    pub fn pause(&mut self, vm: VmName, now: Instant) {
        self.paused.insert(vm, now);
    }

    /// Whether a VM is left alone.
    pub fn is_paused(&self, vm: &VmName, now: Instant) -> bool {
        let at = self.paused.get(vm);
        at.is_some_and(|at| now.saturating_duration_since(*at) < ASK_AGAIN)
    }

    /// Takes in which hosts that might take VMs are away, with how long that is known already.
    pub fn note_away(&mut self, away: &BTreeMap<Away, Duration>, now: Instant) {
        self.away.retain(|host, _| away.contains_key(host));
        for (host, known) in away {
            let since = now.checked_sub(*known).unwrap_or(now);
            self.away.entry(host.clone()).or_insert(since);
        }
    }

    /// Whether a host that might take VMs was lost or closed so lately that it may come back.
    pub fn awaits_hosts(&self, now: Instant) -> bool {
        let mut away = self.away.iter();
        away.any(|(host, since)| {
            let most = if host.closes { CLOSED_MAX } else { AWAY_MAX };
            now.saturating_duration_since(*since) < most
        })
    }

    /// Begins to measure a VM, unless it was measured or cannot be.
    pub fn begin_measuring(&mut self, vm: &VmName, now: Instant) -> bool {
        let (tries, at) = self.measured.get(vm).copied().unwrap_or((0, now));
        let may =
            tries == 0 || tries < TRIES_MAX && now.saturating_duration_since(at) >= MEASURE_AGAIN;
        if may {
            self.measured.insert(vm.clone(), (tries + 1, now));
        }
        may
    }

    /// A VM is measured.
    pub fn measured(&mut self, vm: &VmName) {
        if let Some((tries, _)) = self.measured.get_mut(vm) {
            *tries = TRIES_MAX;
        }
    }

    /// How many VMs were measured, or tried to be.
    pub fn measurements(&self) -> usize {
        self.measured.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::ErrorCode;

    fn vm() -> VmName {
        VmName::new("web").unwrap()
    }

    fn host(name: &str) -> HostName {
        HostName::new(name).unwrap()
    }

    fn reasons() -> Vec<ApiError> {
        vec![ApiError::new(ErrorCode::Preflight, "no")]
    }

    #[test]
    fn a_host_that_refused_is_asked_again_a_few_times_and_not_once_it_is_gone() {
        let mut patience = Patience::default();
        let a = host("a");
        for times in 1..=TRIES_MAX {
            patience.refuse((vm(), a.clone()), reasons(), 1);
            let (now, later) = (Instant::now(), Instant::now() + ASK_AGAIN);
            assert!(patience.refusal(&vm(), &a, now).is_some());
            let last = times == TRIES_MAX;
            assert_eq!(patience.asks_again(&vm(), [&a].into_iter(), now), !last);
            assert_eq!(patience.refusal(&vm(), &a, later).is_some(), last);
            // What stands in its way then is not this refusal, and a host that is gone is not asked.
            assert!(!patience.asks_again(&vm(), [&a].into_iter(), later));
            assert!(!patience.asks_again(&vm(), [].into_iter(), now));
        }
    }

    #[test]
    fn a_busy_vm_is_left_alone_for_a_moment() {
        let mut patience = Patience::default();
        let now = Instant::now();
        assert!(!patience.is_paused(&vm(), now));
        patience.pause(vm(), now);
        assert!(patience.is_paused(&vm(), now));
        assert!(!patience.is_paused(&vm(), now + ASK_AGAIN));
    }

    #[test]
    fn a_lost_host_is_waited_for_until_it_was_away_for_a_minute() {
        let mut patience = Patience::default();
        let now = Instant::now();
        let lost = |seconds| {
            let (host, closes) = (host("a"), false);
            [(Away { host, closes }, Duration::from_secs(seconds))].into()
        };
        let at = |seconds| now + Duration::from_secs(seconds);
        assert!(!patience.awaits_hosts(now));
        patience.note_away(&lost(0), now);
        patience.note_away(&lost(40), at(40));
        assert!(patience.awaits_hosts(at(59)));
        assert!(!patience.awaits_hosts(at(60)));
        // It came back and is lost again.
        patience.note_away(&BTreeMap::new(), at(70));
        assert!(!patience.awaits_hosts(at(70)));
        patience.note_away(&lost(5), at(80));
        assert!(patience.awaits_hosts(at(134)));
        assert!(!patience.awaits_hosts(at(135)));
    }

    #[test]
    fn a_host_that_was_closed_before_it_was_lost_is_waited_for_as_one_that_was_lost_only() {
        let mut patience = Patience::default();
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let away = |closes| {
            let host = host("a");
            [(Away { host, closes }, Duration::ZERO)].into()
        };
        patience.note_away(&away(true), now);
        patience.note_away(&away(true), at(150));
        assert!(patience.awaits_hosts(at(179)), "its guests power off");
        assert!(!patience.awaits_hosts(at(180)), "it stays closed");
        patience.note_away(&away(false), at(150));
        assert!(patience.awaits_hosts(at(209)), "it is being rebooted");
        assert!(!patience.awaits_hosts(at(210)));
    }

    #[test]
    fn a_vm_that_could_not_be_measured_is_measured_again_a_few_times() {
        let mut patience = Patience::default();
        let now = Instant::now();
        for tries in 0..TRIES_MAX {
            let at = now + MEASURE_AGAIN * tries;
            assert!(patience.begin_measuring(&vm(), at));
            assert!(!patience.begin_measuring(&vm(), at));
        }
        assert!(!patience.begin_measuring(&vm(), now + MEASURE_AGAIN * 9));
        let other = VmName::new("other").unwrap();
        assert!(patience.begin_measuring(&other, now));
        patience.measured(&other);
        assert!(!patience.begin_measuring(&other, now + MEASURE_AGAIN));
    }
}
