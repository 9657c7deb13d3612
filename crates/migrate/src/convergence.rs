//! When to stop the guest, when to go round again, how much it may dirty meanwhile.
//!
//! A pure function of what each iteration did. After every iteration the downtime is predicted from what is still dirty,
//! the speed seen and the fixed cost of a switchover. If it fits the promise the guest is stopped, unless another short
//! iteration would make the pause much shorter. If the next iteration would leave nearly as much dirty as this one, or
//! the deadline would pass first, the guest gets an allowance: so many bytes that it may dirty per second, below what
//! the link carries, so that what remains shrinks by a share with every iteration. A guest that dirties less than that
//! is not slowed by it. One that dirties more than that for long gets ever less, until it is as slow as may be; if it does
//! not converge even so, the migration ends: a guest is never stopped for longer than was promised without being asked.
//!
//! Owns: the history of one migration's iterations. Refuses: to guess from an iteration too short to measure.

mod tuning;

use crate::curve::DirtyCurve;
use tuning::TUNING;

/// What was asked of a migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goal {
    pub max_downtime_s: f64,
    /// The part of a switchover that does not depend on memory (stop, device state, permit), s.
    pub fixed_s: f64,
    /// Time from the beginning by which it must be done, s.
    pub deadline_s: Option<f64>,
}

/// What one iteration did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IterationFacts {
    /// Page bytes sent (not zero pages).
    pub data_bytes: u64,
    /// How long it took, s.
    pub seconds: f64,
    /// Bytes of pages that are dirty at its end.
    pub dirty_bytes: u64,
    /// Round trip of the control channel, s.
    pub rtt_s: f64,
    /// Time since the migration began, s.
    pub elapsed_s: f64,
    /// Whether the guest could be slowed more in this iteration.
    pub slowing: Slowing,
}

/// What is left to slow a guest that dirties more than it may.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Slowing {
    /// Nobody has tried yet, or not since the last iteration.
    #[default]
    NotYet,
    /// It is not as slow as was allowed, at least for a part of the time.
    More,
    /// It is as slow as may be, or this host cannot slow it.
    Least,
}

impl Slowing {
    /// What an iteration came to after a further look: room that was there once counts.
    pub fn then(self, later: Self) -> Self {
        match self {
            Self::More => Self::More,
            Self::NotYet | Self::Least => later,
        }
    }
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decision {
    /// Send what is dirty while the guest runs and dirties at most so many bytes per second, if that is limited.
    Iterate {
        /// Bytes per second.
        allowed_bytes_per_s: Option<f64>,
    },
    /// Stop the guest and switch over.
    Switchover,
    /// It does not converge.
    GiveUp,
}

/// The history that decisions are made from.
#[derive(Debug, Clone)]
pub struct Convergence {
    goal: Goal,
    bytes_per_s: Option<f64>,
    /// Passes that say nothing about the link by themselves, added up.
    short: Carried,
    overhead_s: f64,
    rtt_s: f64,
    curve: DirtyCurve,
    allowed_share: Option<f64>,
    squeezes: u32,
    squeezed_bytes: Option<u64>,
    stuck: Option<Stuck>,
    /// What overspending has left of the allowance.
    stuck_factor: f64,
    iterations: u32,
}

/// A guest that dirties more than it may, and what it came to so far.
#[derive(Debug, Clone, Copy)]
struct Stuck {
    since_s: f64,
    iterations: u32,
    best_bytes: u64,
}

/// What the link carried, and in which time.
#[derive(Debug, Clone, Copy, Default)]
struct Carried {
    bytes: u64,
    seconds: f64,
}

impl Carried {
    /// Whether it is enough to tell the link's speed.
    fn tells(&self) -> bool {
        self.bytes >= TUNING.bytes_measurable && self.seconds >= TUNING.seconds_measurable
    }

    fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

impl Convergence {
    pub fn new(goal: Goal) -> Self {
        Self {
            goal,
            bytes_per_s: None,
            short: Carried::default(),
            overhead_s: TUNING.overhead_s,
            rtt_s: 0.0,
            curve: DirtyCurve::default(),
            allowed_share: None,
            squeezes: 0,
            squeezed_bytes: None,
            stuck: None,
            stuck_factor: 1.0,
            iterations: 0,
        }
    }

    /// Speed seen so far, page bytes per second.
    pub fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// The guest runs without an allowance again: limiting begins anew.
    pub fn released(&mut self) {
        (self.allowed_share, self.stuck, self.stuck_factor) = (None, None, 1.0);
        (self.squeezes, self.squeezed_bytes) = (0, None);
    }

    /// Books what was dirty at a look in the middle of an iteration, `age_s` after the last complete one.
    pub fn looked(&mut self, age_s: f64, dirty_bytes: u64) {
        self.curve.learn(age_s, dirty_bytes);
    }

    /// Predicted downtime for what is dirty, seconds.
    pub fn predict_s(&self, dirty_bytes: f64, rtt_s: f64) -> f64 {
        // Last barrier and its answer, device state, ready, permit, resumed.
        let trips_s = 2.5 * rtt_s;
        let pages_s = self
            .bytes_per_s
            .map_or(0.0, |speed| dirty_bytes / speed.max(1.0));
        self.goal.fixed_s + trips_s + pages_s
    }

    /// Longest predicted pause at which the guest is stopped, s. A promise that the distance alone breaks is no reason
    /// never to move.
    fn pause_s(&self, rtt_s: f64) -> f64 {
        let distance_s = self.predict_s(0.0, rtt_s) + (TUNING.short_of_trip * rtt_s).max(0.005);
        (TUNING.promise_share * self.goal.max_downtime_s).max(distance_s)
    }

    fn fits(&self, dirty_bytes: f64) -> bool {
        self.predict_s(dirty_bytes, self.rtt_s) <= self.pause_s(self.rtt_s)
    }

    /// Whether the distance alone breaks the promise, and is most of the pause: what few pages take of a far link was mostly the way.
    fn is_distance_most(&self, dirty_bytes: f64) -> bool {
        let distance_s = self.predict_s(0.0, self.rtt_s);
        let is_broken = distance_s > TUNING.promise_share * self.goal.max_downtime_s;
        is_broken && self.predict_s(dirty_bytes, self.rtt_s) <= 2.0 * distance_s
    }

    /// Takes an iteration's facts and decides.
    pub fn decide(&mut self, facts: IterationFacts) -> Decision {
        self.iterations += 1;
        self.rtt_s = facts.rtt_s;
        self.learn_speed(facts);
        self.curve.learn(facts.seconds, facts.dirty_bytes);
        let Some(speed) = self.bytes_per_s else {
            // Nothing was sent so far, so nothing can be predicted.
            let measurable = facts.dirty_bytes > TUNING.bytes_measurable;
            return if measurable {
                self.iterate()
            } else {
                Decision::Switchover
            };
        };
        let dirty_bytes = facts.dirty_bytes as f64;
        let next_s = dirty_bytes / speed + self.overhead_s + facts.rtt_s;
        if self.fits(dirty_bytes) {
            return self.stop_or_squeeze(facts, next_s);
        }
        if self.iterations >= TUNING.iterations_max || self.is_stuck(facts) {
            return match self.is_distance_most(dirty_bytes) {
                true => Decision::Switchover,
                false => Decision::GiveUp,
            };
        }
        let left = self.bytes_after(next_s, speed);
        if left > TUNING.progress_share * dirty_bytes || self.misses_deadline(facts) {
            self.allowed_share.get_or_insert(TUNING.allowed_share);
        }
        if self.allowed_share.is_some() {
            self.allowed_share = Some(self.share_for(facts, next_s));
        }
        self.iterate()
    }

    fn iterate(&self) -> Decision {
        let allowed_bytes_per_s = self
            .allowed_share
            .zip(self.bytes_per_s)
            .map(|(share, speed)| share * speed);
        Decision::Iterate {
            allowed_bytes_per_s,
        }
    }

    /// What is dirty fits. Going round again costs little while the guest runs, and may make the pause much shorter.
    fn stop_or_squeeze(&mut self, facts: IterationFacts, next_s: f64) -> Decision {
        let speed = self.bytes_per_s.unwrap_or(f64::INFINITY);
        let dirty_bytes = facts.dirty_bytes as f64;
        let late = self
            .goal
            .deadline_s
            .is_some_and(|deadline_s| facts.elapsed_s + 4.0 * next_s > deadline_s);
        let short = dirty_bytes / speed <= TUNING.short_s.max(TUNING.short_of_trip * facts.rtt_s);
        let last = self.squeezed_bytes.replace(facts.dirty_bytes);
        let pointless = last.is_some_and(|last| dirty_bytes > TUNING.better_share * last as f64);
        if late || short || pointless || self.squeezes >= TUNING.squeezes_max {
            return Decision::Switchover;
        }
        if self.allowed_share.is_some() {
            self.allowed_share = Some(TUNING.squeeze_share.min(self.share_for(facts, next_s)));
        }
        if self.bytes_after(next_s, speed) > TUNING.worth_share * dirty_bytes {
            return Decision::Switchover;
        }
        self.squeezes += 1;
        self.iterate()
    }

    /// What is dirty after so long, given what it may dirty.
    fn bytes_after(&self, seconds: f64, speed: f64) -> f64 {
        let allowed = self
            .allowed_share
            .map_or(f64::INFINITY, |share| share * speed * seconds);
        self.curve.bytes_after(seconds).min(allowed)
    }

    /// The share of the link that the guest may dirty in an iteration of `next_s`: one that makes it progress although
    /// every iteration costs some time beside its pages, and one that the deadline leaves room for.
    fn share_for(&self, facts: IterationFacts, next_s: f64) -> f64 {
        let pages_s = next_s - self.overhead_s - facts.rtt_s;
        let mut share = (TUNING.allowed_share * pages_s / next_s).min(TUNING.allowed_share);
        if let Some(deadline_s) = self.goal.deadline_s {
            let time_s = TUNING.deadline_share * (deadline_s - facts.elapsed_s);
            share = share.min(1.0 - pages_s / time_s.max(f64::MIN_POSITIVE));
        }
        (share * self.impatience() * self.stuck_factor).max(TUNING.allowed_share_min)
    }

    /// What was allowed for so many iterations without an end in sight was too much: on a busy host neither the link's
    /// speed nor the guest's is what was measured.
    fn impatience(&self) -> f64 {
        let beyond = self.iterations.saturating_sub(TUNING.patient_iterations);
        TUNING.impatience.powf(f64::from(beyond))
    }

    fn misses_deadline(&self, facts: IterationFacts) -> bool {
        let Some(deadline_s) = self.goal.deadline_s else {
            return false;
        };
        let left_s = TUNING.deadline_share * (deadline_s - facts.elapsed_s);
        self.estimate_s(facts.dirty_bytes as f64, None, 0.0)
            .is_none_or(|estimate_s| estimate_s > left_s)
    }

    /// Whether the guest has dirtied more than it was allowed to for so long that waiting is no use: it is as slow as may
    /// be, or this host cannot slow it. While it can be slowed more, its allowance is made smaller instead: what it writes
    /// is more than was measured.
    fn is_stuck(&mut self, facts: IterationFacts) -> bool {
        let allowed = self
            .allowed_share
            .zip(self.bytes_per_s)
            .map_or(f64::INFINITY, |(share, speed)| share * speed);
        let allowed_bytes = allowed * facts.seconds;
        let dirty_bytes = facts.dirty_bytes as f64;
        if dirty_bytes <= TUNING.overspent * allowed_bytes {
            self.stuck = None;
            // What was wrong about the guest or the link may be over.
            self.stuck_factor = (self.stuck_factor / TUNING.stuck_factor).min(1.0);
            return false;
        }
        let stuck = self.stuck.get_or_insert(Stuck {
            since_s: facts.elapsed_s,
            iterations: 0,
            best_bytes: u64::MAX,
        });
        if facts.slowing == Slowing::NotYet {
            (stuck.since_s, stuck.iterations) = (facts.elapsed_s, 0);
            return false;
        }
        if dirty_bytes < TUNING.better_share * stuck.best_bytes as f64 {
            *stuck = Stuck {
                since_s: facts.elapsed_s,
                iterations: 0,
                best_bytes: facts.dirty_bytes,
            };
        }
        stuck.iterations += 1;
        let patient = stuck.iterations < TUNING.stuck_iterations
            || facts.elapsed_s - stuck.since_s < TUNING.stuck_s;
        let least = self
            .allowed_share
            .is_some_and(|share| share <= TUNING.allowed_share_min);
        if !patient && facts.slowing == Slowing::More && !least {
            let kept = allowed_bytes / dirty_bytes;
            self.stuck_factor *= kept.clamp(TUNING.stuck_factor_min, TUNING.stuck_factor);
            return false;
        }
        !patient
    }

    fn learn_speed(&mut self, facts: IterationFacts) {
        if facts.seconds <= 0.0 {
            return;
        }
        let Some(speed) = self.bytes_per_s else {
            let seen = facts.data_bytes as f64 / facts.seconds;
            self.bytes_per_s = (facts.data_bytes > 0).then_some(seen);
            return;
        };
        let pass = Carried {
            bytes: facts.data_bytes,
            seconds: facts.seconds,
        };
        if pass.tells() {
            self.short = Carried::default();
            self.bytes_per_s = Some(0.5 * speed + 0.5 * pass.bytes_per_s());
            return;
        }
        let rest_s = facts.seconds - facts.data_bytes as f64 / speed - facts.rtt_s;
        self.overhead_s += TUNING.overhead_weight * (rest_s.max(0.0) - self.overhead_s);
        self.short.bytes += pass.bytes;
        self.short.seconds += pass.seconds;
        if self.short.tells() {
            // Their round trips are in it, so the link is at least that fast: it may have stood still when it was measured.
            let seen = std::mem::take(&mut self.short).bytes_per_s();
            self.bytes_per_s = Some(speed.max(0.5 * speed + 0.5 * seen));
        }
    }

    /// Seconds until the guest runs at the destination, when `left_bytes` of a pass that has gone on for `passed_s` are still to be
    /// sent at `bytes_per_s` (the speed seen so far unless given). `None` when nothing has been measured or no end is in
    /// sight. A guest that would not converge by itself is taken to get an allowance.
    pub fn estimate_s(
        &self,
        left_bytes: f64,
        bytes_per_s: Option<f64>,
        passed_s: f64,
    ) -> Option<f64> {
        let speed = bytes_per_s
            .or(self.bytes_per_s)
            .filter(|speed| *speed > 0.0)?;
        // The future is this history's own, on predicted facts.
        let mut next = self.clone();
        next.goal.deadline_s = None;
        next.bytes_per_s = self.bytes_per_s.or(Some(speed));
        let (mut total_s, mut left, mut age_s) = (0.0, left_bytes, passed_s);
        loop {
            let pass_s = left / speed + self.overhead_s + self.rtt_s;
            total_s += pass_s;
            let seconds = age_s + pass_s;
            let dirty = next.bytes_after(seconds, speed);
            let facts = IterationFacts {
                data_bytes: (speed * seconds) as u64,
                seconds,
                dirty_bytes: dirty as u64,
                rtt_s: self.rtt_s,
                elapsed_s: total_s,
                slowing: Slowing::Least,
            };
            match next.decide(facts) {
                Decision::Iterate { .. } => (left, age_s) = (dirty, 0.0),
                Decision::Switchover => return Some(total_s + next.predict_s(dirty, self.rtt_s)),
                Decision::GiveUp => return None,
            }
        }
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
