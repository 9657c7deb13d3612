//! What a migration will be, before it begins: its time, its pause, how much the guest must be slowed.
//!
//! Pure. The guest is what was measured of it (memory with content, how much it writes within a time), the link is its
//! speed and round trip; between them runs the same [`Convergence`] that decides in a migration, pass by pass, so that
//! the two cannot drift apart. Owns nothing. Refuses: to predict without a speed.

use crate::convergence::{Convergence, Decision, Goal, IterationFacts, Slowing};
use crate::curve::DirtyCurve;
use crate::pause::PauseHistory;
use godwit_types::forecast::{CannotKeep, DirtyAge, PromiseKind};

/// A guest keeps this share of its speed at least, whatever was asked: what hosts can hold a vCPU to.
pub const SPEED_FLOOR: f64 = 0.05;
/// Handshakes, the destination's QEMU and the tracking, beside round trips, s.
const SETUP_S: f64 = 0.35;
/// Round trips until the first page is under way.
const SETUP_TRIPS: f64 = 4.0;
/// The part of a switchover that depends on neither memory nor distance, s.
const FIXED_S: f64 = 0.012;
/// Memory without content is only looked at, bytes per second.
const ZERO_BYTES_PER_S: f64 = 8e9;
/// Nobody waits for longer than this, s.
const TOTAL_MAX_S: f64 = 7.0 * 86_400.0;
/// Steps by which a guest's speed is found.
const HALVINGS: u32 = 24;
const MIB: f64 = 1_048_576.0;

/// What is known before.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    pub ram_bytes: u64,
    /// Guest memory with content, bytes.
    pub data_bytes: u64,
    /// What the guest wrote within several times.
    pub ages: Vec<DirtyAge>,
    /// Page bytes per second that get through.
    pub bytes_per_s: f64,
    pub rtt_s: f64,
    /// What goes before memory takes so long: disks, s.
    pub before_s: f64,
    /// What earlier pauses cost beside memory, where there were any.
    pub pause: Option<PauseHistory>,
}

/// The limits that the request sets for the migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asked {
    pub max_downtime_ms: u64,
    /// Time by which it must be done, s.
    pub deadline_s: Option<u64>,
    /// Most that the guest may be slowed, percent.
    pub max_guest_slowdown_percent: Option<u32>,
}

/// What is to be expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// From the request to the guest running, s; at the give-up when it does not converge.
    pub total_s: f64,
    pub downtime_s: f64,
    /// The guest's share of its speed in the pass in which it is slowed most.
    pub speed: f64,
    /// What the guest writes anew per second of a pass, bytes.
    pub dirty_bytes_per_s: f64,
    /// Whether it comes to its end at all.
    pub converges: bool,
}

/// Plays the migration through. Nothing without a speed.
pub fn predict(inputs: &Inputs, asked: &Asked) -> Option<Forecast> {
    let slowdown = asked.max_guest_slowdown_percent.map(f64::from);
    let floor = slowdown.map_or(SPEED_FLOOR, |percent| 1.0 - percent / 100.0);
    let goal = Goal {
        max_downtime_s: asked.max_downtime_ms as f64 / 1000.0,
        fixed_s: FIXED_S,
        deadline_s: asked
            .deadline_s
            .map(|seconds| (seconds as f64 - inputs.before_s).max(0.0)),
    };
    (inputs.bytes_per_s > 0.0 && inputs.bytes_per_s.is_finite()).then(|| {
        Play {
            inputs,
            guest: Guest::new(inputs),
            floor: floor.clamp(SPEED_FLOOR, 1.0),
            rtt_s: inputs.rtt_s.max(0.0),
        }
        .run(goal)
    })
}

/// The part of the pause that depends on no memory: as it was before, else as it is without a busy host.
fn fixed_s(inputs: &Inputs) -> f64 {
    let estimated = FIXED_S + 2.5 * inputs.rtt_s.max(0.0);
    inputs.pause.map_or(estimated, |pause| pause.fixed_ms / 1e3)
}

/// The targets that cannot be met, each with what would help.
pub fn cannot_keep(inputs: &Inputs, asked: &Asked) -> Vec<CannotKeep> {
    let unhurried = Asked {
        deadline_s: None,
        ..*asked
    };
    let (Some(forecast), Some(unhurried)) = (predict(inputs, asked), predict(inputs, &unhurried))
    else {
        return Vec::new();
    };
    let mut found = Vec::new();
    found.extend(broken_slowdown(inputs, asked, &unhurried));
    if found.is_empty() {
        found.extend(broken_downtime(inputs, asked, &unhurried));
    }
    found.extend(broken_deadline(inputs, asked, &forecast, &unhurried));
    found
}

fn broken_slowdown(inputs: &Inputs, asked: &Asked, forecast: &Forecast) -> Option<CannotKeep> {
    let percent = asked.max_guest_slowdown_percent?;
    let free = Asked {
        max_guest_slowdown_percent: None,
        deadline_s: None,
        ..*asked
    };
    let needed = predict(inputs, &free).filter(|free| free.converges)?;
    let slowed = (100.0 * (1.0 - needed.speed)).ceil();
    (!forecast.converges && slowed > f64::from(percent)).then(|| CannotKeep {
        promise: PromiseKind::MaxGuestSlowdown,
        asked: f64::from(percent),
        predicted: Some(slowed),
        message: format!(
            "the guest writes faster than the link carries and must be slowed by about {slowed:.0} % to move with a pause of {} ms: allow that with --max-guest-slowdown, a longer pause with --max-downtime, or give it a faster link",
            asked.max_downtime_ms
        ),
    })
}

fn broken_deadline(
    inputs: &Inputs,
    asked: &Asked,
    forecast: &Forecast,
    unhurried: &Forecast,
) -> Option<CannotKeep> {
    let deadline_s = asked.deadline_s? as f64;
    // One that never ends takes its data once at least; that it does not end is another promise's trouble.
    let once_s = inputs.data_bytes as f64 / inputs.bytes_per_s;
    let (expected_s, about) = match (forecast.converges, unhurried.converges) {
        (true, _) => (forecast.total_s, "about"),
        (false, true) => (unhurried.total_s, "about"),
        (false, false) => (once_s, "at least"),
    };
    let expected_s = inputs.before_s + expected_s;
    let late = expected_s > deadline_s || (!forecast.converges && unhurried.converges);
    late.then(|| CannotKeep {
        promise: PromiseKind::Deadline,
        asked: deadline_s,
        predicted: Some(expected_s),
        message: format!(
            "it takes {about} {:.0} s at {:.3} GB/s and would be cancelled at its deadline of {deadline_s:.0} s: allow more than that with --deadline, or give it a faster link",
            expected_s.ceil(),
            inputs.bytes_per_s / 1e9
        ),
    })
}

fn broken_downtime(inputs: &Inputs, asked: &Asked, forecast: &Forecast) -> Option<CannotKeep> {
    let promised_ms = asked.max_downtime_ms as f64;
    let expected_ms = 1000.0 * forecast.downtime_s;
    if forecast.converges && expected_ms <= promised_ms {
        return None;
    }
    let why = why_paused(inputs, forecast, promised_ms);
    Some(CannotKeep {
        promise: PromiseKind::MaxDowntime,
        asked: promised_ms,
        predicted: Some(expected_ms),
        message: format!(
            "the pause would be about {:.0} ms, not {promised_ms:.0} ms: {why}; allow a longer one with --max-downtime",
            // Never what was asked for, where it is more.
            expected_ms.ceil()
        ),
    })
}

/// The greatest reason for a pause that is longer than it shall be.
fn why_paused(inputs: &Inputs, forecast: &Forecast, promised_ms: f64) -> String {
    let fixed_ms = 1e3 * fixed_s(inputs);
    let trips_ms = 2.5e3 * inputs.rtt_s.max(0.0);
    match inputs.pause {
        Some(pause) if fixed_ms > promised_ms => pause.why(),
        None if fixed_ms > promised_ms && trips_ms > 1e3 * FIXED_S => format!(
            "the round trip of {:.1} ms alone makes it longer",
            1e3 * inputs.rtt_s
        ),
        None if fixed_ms > promised_ms => format!(
            "saving and loading its devices and handing it over take about {:.0} ms on an idle host",
            1e3 * FIXED_S
        ),
        _ if forecast.converges => format!(
            "{fixed_ms:.0} ms of it are for devices and the handover, the rest for the last pages"
        ),
        _ => "the guest writes memory faster than it can be sent, however slow it is made".into(),
    }
}

/// The guest as it was measured.
struct Guest {
    curve: DirtyCurve,
    ram_bytes: f64,
}

impl Guest {
    fn new(inputs: &Inputs) -> Self {
        let mut curve = DirtyCurve::default();
        for age in &inputs.ages {
            curve.learn(age.seconds, (age.mib.max(0.0) * MIB) as u64);
        }
        Self {
            curve,
            ram_bytes: inputs.ram_bytes as f64,
        }
    }

    /// Bytes dirty after so long at this share of its speed.
    fn writes(&self, seconds: f64, speed: f64) -> f64 {
        self.curve.bytes_after(speed * seconds).min(self.ram_bytes)
    }

    /// The share of its speed at which it writes at most so much in this time, not below the floor.
    fn speed_for(&self, seconds: f64, bytes: f64, floor: f64) -> f64 {
        if self.writes(seconds, 1.0) <= bytes {
            return 1.0;
        }
        let (mut low, mut high) = (floor, 1.0);
        for _ in 0..HALVINGS {
            let middle = 0.5 * (low + high);
            if self.writes(seconds, middle) <= bytes {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// A migration that is played through.
struct Play<'a> {
    inputs: &'a Inputs,
    guest: Guest,
    floor: f64,
    rtt_s: f64,
}

impl Play<'_> {
    fn run(&self, goal: Goal) -> Forecast {
        let mut deciding = Convergence::new(goal);
        let zero_bytes = self.inputs.ram_bytes.saturating_sub(self.inputs.data_bytes);
        let mut elapsed_s = SETUP_S + SETUP_TRIPS * self.rtt_s;
        let mut extra_s = zero_bytes as f64 / ZERO_BYTES_PER_S;
        let mut left = self.inputs.data_bytes as f64;
        let mut allowed = None;
        let mut slowest: f64 = 1.0;
        let (mut written, mut passes_s) = (0.0, 0.0);
        loop {
            let seconds = left / self.inputs.bytes_per_s + self.rtt_s + extra_s;
            let speed = self.speed(seconds, allowed);
            let dirty = self.guest.writes(seconds, speed);
            elapsed_s += seconds;
            (written, passes_s) = (written + dirty, passes_s + seconds);
            slowest = slowest.min(speed);
            let facts = IterationFacts {
                data_bytes: left as u64,
                seconds,
                dirty_bytes: dirty as u64,
                rtt_s: self.rtt_s,
                elapsed_s,
                slowing: if speed > self.floor {
                    Slowing::More
                } else {
                    Slowing::Least
                },
            };
            let decision = deciding.decide(facts);
            let stop = matches!(decision, Decision::Switchover | Decision::GiveUp);
            if stop || elapsed_s > TOTAL_MAX_S {
                let downtime_s = self.downtime_s(dirty);
                return Forecast {
                    total_s: elapsed_s + downtime_s,
                    downtime_s,
                    speed: slowest,
                    dirty_bytes_per_s: written / passes_s.max(f64::MIN_POSITIVE),
                    converges: decision == Decision::Switchover,
                };
            }
            if let Decision::Iterate {
                allowed_bytes_per_s,
            } = decision
            {
                allowed = allowed_bytes_per_s;
            }
            (left, extra_s) = (dirty, 0.0);
        }
    }

    fn speed(&self, seconds: f64, allowed: Option<f64>) -> f64 {
        allowed.map_or(1.0, |bytes_per_s| {
            self.guest
                .speed_for(seconds, bytes_per_s * seconds, self.floor)
        })
    }

    fn downtime_s(&self, dirty: f64) -> f64 {
        fixed_s(self.inputs) + dirty / self.inputs.bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    /// A guest that writes `rate` MiB/s all over, or in a loop over `set` MiB.
    fn inputs(data_bytes: u64, rate_mib: f64, set_mib: f64, gb_per_s: f64, rtt_ms: f64) -> Inputs {
        let ages = [0.06, 0.15, 0.35, 0.6, 1.0].map(|seconds| DirtyAge {
            seconds,
            mib: (rate_mib * seconds).min(set_mib),
        });
        Inputs {
            ram_bytes: data_bytes.max(4 * GB),
            data_bytes,
            ages: ages.to_vec(),
            bytes_per_s: gb_per_s * 1e9,
            rtt_s: rtt_ms / 1000.0,
            before_s: 0.0,
            pause: None,
        }
    }

    const ASKED: Asked = Asked {
        max_downtime_ms: 50,
        deadline_s: None,
        max_guest_slowdown_percent: None,
    };

    fn promises(found: &[CannotKeep]) -> Vec<PromiseKind> {
        found.iter().map(|broken| broken.promise).collect()
    }

    #[test]
    fn an_idle_guest_takes_the_time_of_its_data_and_is_not_slowed() {
        let idle = inputs(2 * GB, 0.0, 0.0, 0.125, 0.5);
        let forecast = predict(&idle, &ASKED).unwrap();
        assert!((16.0..17.5).contains(&forecast.total_s), "{forecast:?}");
        assert!(forecast.downtime_s < 0.02 && forecast.speed == 1.0);
        assert!(forecast.converges);
        assert_eq!(cannot_keep(&idle, &ASKED), []);
    }

    #[test]
    fn a_guest_that_writes_half_of_the_link_takes_about_twice_the_time() {
        let busy = inputs(2 * GB, 60.0, f64::INFINITY, 0.125, 0.5);
        let forecast = predict(&busy, &ASKED).unwrap();
        assert!((24.0..40.0).contains(&forecast.total_s), "{forecast:?}");
        assert!(forecast.converges && forecast.downtime_s <= 0.05);
    }

    #[test]
    fn a_small_working_set_is_sent_again_and_again_but_ends() {
        let loops = inputs(GB, 1000.0, 2.0, 0.125, 0.5);
        let forecast = predict(&loops, &ASKED).unwrap();
        assert!(forecast.converges, "{forecast:?}");
        assert!(forecast.speed == 1.0 && forecast.downtime_s <= 0.05);
    }

    #[test]
    fn a_guest_that_writes_twice_the_link_is_slowed() {
        let hot = inputs(2 * GB, 240.0, f64::INFINITY, 0.125, 0.5);
        let forecast = predict(&hot, &ASKED).unwrap();
        assert!(forecast.converges && forecast.speed < 0.5, "{forecast:?}");
        assert!(forecast.downtime_s <= 0.06);
    }

    #[test]
    fn a_limit_of_the_slowdown_that_it_needs_more_than_cannot_be_kept() {
        let hot = inputs(2 * GB, 500.0, f64::INFINITY, 0.125, 0.5);
        let asked = Asked {
            max_guest_slowdown_percent: Some(20),
            ..ASKED
        };
        let found = cannot_keep(&hot, &asked);
        assert_eq!(promises(&found), [PromiseKind::MaxGuestSlowdown]);
        assert!(found[0].predicted.unwrap() > 60.0, "{found:?}");
        assert!(found[0].message.contains("--max-guest-slowdown"));
    }

    #[test]
    fn a_deadline_that_the_data_alone_takes_longer_than_cannot_be_kept() {
        let idle = inputs(2 * GB, 0.0, 0.0, 0.125, 0.5);
        let asked = |deadline_s| Asked {
            deadline_s: Some(deadline_s),
            ..ASKED
        };
        let found = cannot_keep(&idle, &asked(10));
        assert_eq!(promises(&found), [PromiseKind::Deadline]);
        assert!((15.0..18.0).contains(&found[0].predicted.unwrap()));
        assert_eq!(cannot_keep(&idle, &asked(30)), []);
    }

    #[test]
    fn one_that_never_ends_misses_its_deadline_too_where_its_data_alone_takes_longer() {
        let hot = inputs(2 * GB, 4000.0, f64::INFINITY, 0.125, 0.5);
        let asked = |deadline_s| Asked {
            deadline_s: Some(deadline_s),
            ..ASKED
        };
        let found = promises(&cannot_keep(&hot, &asked(10)));
        assert_eq!(found, [PromiseKind::MaxDowntime, PromiseKind::Deadline]);
        let found = promises(&cannot_keep(&hot, &asked(100)));
        assert_eq!(found, [PromiseKind::MaxDowntime]);
    }

    #[test]
    fn a_distance_that_is_longer_than_the_pause_cannot_be_kept() {
        let far = inputs(GB, 0.0, 0.0, 0.125, 150.0);
        let found = cannot_keep(&far, &ASKED);
        assert_eq!(promises(&found), [PromiseKind::MaxDowntime]);
        assert!(found[0].message.contains("round trip"), "{found:?}");
        let asked = Asked {
            max_downtime_ms: 600,
            ..ASKED
        };
        assert_eq!(cannot_keep(&far, &asked), []);
    }

    #[test]
    fn a_pause_that_took_100_ms_ten_times_is_not_expected_to_take_13_ms() {
        let learnt = Inputs {
            pause: Some(PauseHistory {
                moves: 5,
                fixed_ms: 100.0,
                device_save_ms: 36.0,
                device_load_ms: 27.0,
                permit_ms: 29.0,
            }),
            ..inputs(GB, 0.0, 0.0, 0.125, 0.5)
        };
        let forecast = predict(&learnt, &ASKED).unwrap();
        assert!((0.1..0.11).contains(&forecast.downtime_s), "{forecast:?}");
        let found = cannot_keep(&learnt, &ASKED);
        assert_eq!(promises(&found), [PromiseKind::MaxDowntime]);
        let message = &found[0].message;
        assert!(message.contains("in the last 5 migrations"), "{message}");
        let asked = Asked {
            max_downtime_ms: 150,
            ..ASKED
        };
        assert_eq!(cannot_keep(&learnt, &asked), []);
    }

    #[test]
    fn a_round_trip_of_0_ms_is_not_the_reason_of_a_pause_of_12_ms() {
        let near = inputs(GB, 0.0, 0.0, 0.125, 0.04);
        let asked = Asked {
            max_downtime_ms: 5,
            ..ASKED
        };
        let found = cannot_keep(&near, &asked);
        let message = &found[0].message;
        assert!(!message.contains("round trip"), "{message}");
        assert!(
            message.contains("saving and loading its devices"),
            "{message}"
        );
    }

    #[test]
    fn nothing_is_predicted_without_a_speed() {
        for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let nowhere = inputs(GB, 1.0, 1.0, speed, 1.0);
            assert_eq!(predict(&nowhere, &ASKED), None);
            assert_eq!(cannot_keep(&nowhere, &ASKED), []);
        }
    }

    #[test]
    fn every_measurement_ends_in_finite_figures() {
        for rate in [0.0, 1e-3, 1.0, 1e3, 1e6] {
            for set in [0.0, 1.0, 1e3, 1e9] {
                for speed in [1e-6, 1e-3, 1.0, 100.0] {
                    for rtt in [0.0, 1.0, 500.0] {
                        let odd = inputs(GB, rate, set, speed, rtt);
                        let forecast = predict(&odd, &ASKED).unwrap();
                        let figures = [forecast.total_s, forecast.downtime_s, forecast.speed];
                        assert!(figures.iter().all(|figure| figure.is_finite()), "{odd:?}");
                    }
                }
            }
        }
    }
}
