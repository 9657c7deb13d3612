//! Slows the vCPUs that dirty memory, and only those, so that together they dirty no more than is allowed.
//!
//! A pure controller. Every first write to a page since the last look costs its vCPU one fault, which the kernel counts by
//! thread; with the thread's CPU time that gives the bytes dirtied per second of CPU, a property of the program that the
//! slowing itself does not change. From it follows the share of a CPU at which a vCPU dirties its part of the
//! allowance. The allowance is shared so that whoever needs little gets all that it needs: a vCPU that only reads is
//! never slowed. What was dirtied too much or too little is made up for within a fraction of a second.
//!
//! Owns: what is known of each vCPU. Refuses: to slow anybody below the floor that was promised.

use crate::convergence::Slowing;

/// Weight of a new measurement.
const NEWS_SHARE: f64 = 0.5;
/// Over- and underspending is made up for within this time.
const MAKE_UP_S: f64 = 0.25;
/// At most so many seconds of allowance are saved up or owed.
const DEBT_MAX_S: f64 = 0.25;
/// A vCPU whose share would change by less is left as it is: each change costs system calls.
const CHANGE_MIN: f64 = 0.04;
/// Shares at most grow fourfold per tick, so that one quiet moment does not set a writer free.
const RISE_MAX: f64 = 4.0;
/// A vCPU that had less CPU time than this in a tick tells nothing about its program.
const CPU_MEASURABLE_S: f64 = 0.000_5;

/// What one vCPU did since the last tick.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct VcpuUse {
    /// Pages it dirtied for the first time since the last look.
    pub first_writes: u64,
    /// CPU time it had, s.
    pub cpu_s: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Vcpu {
    /// Bytes dirtied per second of CPU time.
    bytes_per_cpu_s: Option<f64>,
    /// Share of a CPU that it would use.
    demand: f64,
    /// Share of a CPU that it may use, at most 1.
    share: f64,
}

/// Decides how much CPU time each vCPU gets while the guest outruns the link.
#[derive(Debug, Clone)]
pub struct Governor {
    floor: f64,
    page_bytes: f64,
    vcpus: Vec<Vcpu>,
    debt_bytes: f64,
}

impl Governor {
    /// vCPUs at full speed; none will get less than `floor`, a share between 0 and 1.
    pub fn new(vcpus: usize, floor: f64, page_bytes: u64) -> Self {
        let vcpu = Vcpu {
            demand: 1.0,
            share: 1.0,
            ..Vcpu::default()
        };
        Self {
            floor: floor.clamp(0.0, 1.0),
            page_bytes: page_bytes as f64,
            vcpus: vec![vcpu; vcpus],
            debt_bytes: 0.0,
        }
    }

    /// Shares of a CPU that the vCPUs may use.
    pub fn shares(&self) -> impl Iterator<Item = f64> + '_ {
        self.vcpus.iter().map(|vcpu| vcpu.share)
    }

    /// The smallest of them.
    pub fn lowest(&self) -> f64 {
        self.shares().fold(1.0, f64::min)
    }

    /// Whether somebody who is slowed has more than the floor, or nobody is slowed yet who might be.
    pub fn slowing(&self) -> Slowing {
        let mut slowed = self.shares().filter(|share| *share < 1.0).peekable();
        let has_room = slowed.peek().is_none() || slowed.any(|share| share > self.floor);
        match has_room && self.floor < 1.0 {
            true => Slowing::More,
            false => Slowing::Least,
        }
    }

    /// Takes what happened in `seconds` and sets the shares for an allowance. `uses` has one entry per vCPU.
    pub fn tick(&mut self, seconds: f64, uses: &[VcpuUse], allowed_bytes_per_s: f64) {
        if seconds <= 0.0 || uses.len() != self.vcpus.len() {
            return;
        }
        let mut dirtied = 0.0;
        for (vcpu, used) in self.vcpus.iter_mut().zip(uses) {
            dirtied += vcpu.learn(seconds, used, self.page_bytes);
        }
        let bound = DEBT_MAX_S * allowed_bytes_per_s;
        self.debt_bytes =
            (self.debt_bytes + dirtied - allowed_bytes_per_s * seconds).clamp(-bound, bound);
        let now = (allowed_bytes_per_s - self.debt_bytes / MAKE_UP_S).max(0.0);
        self.share_out(now);
    }

    /// Finds the level up to which every vCPU may dirty, and what that means for its share of a CPU.
    fn share_out(&mut self, allowed_bytes_per_s: f64) {
        let level = self.level(allowed_bytes_per_s);
        for vcpu in &mut self.vcpus {
            let wanted = match vcpu.bytes_per_cpu_s {
                Some(bytes) if bytes > 0.0 && vcpu.rate() > level => {
                    (level / bytes).clamp(self.floor, 1.0)
                }
                _ => 1.0,
            };
            let wanted = wanted.min(vcpu.share.max(self.floor) * RISE_MAX);
            let small = (wanted - vcpu.share).abs() < CHANGE_MIN * vcpu.share;
            if !small || wanted >= 1.0 || wanted <= self.floor {
                vcpu.share = wanted.clamp(0.0, 1.0);
            }
        }
    }

    /// Bytes per second for each vCPU so that all of them together dirty what is allowed; infinite when all may go on.
    fn level(&self, allowed_bytes_per_s: f64) -> f64 {
        let mut rates: Vec<f64> = self.vcpus.iter().map(Vcpu::rate).collect();
        rates.sort_by(f64::total_cmp);
        let mut left = allowed_bytes_per_s;
        for (done, rate) in rates.iter().enumerate() {
            let even = left / (rates.len() - done) as f64;
            if *rate > even {
                return even;
            }
            left -= rate;
        }
        f64::INFINITY
    }
}

impl Vcpu {
    /// Bytes per second that it would dirty if it were not slowed.
    fn rate(&self) -> f64 {
        self.bytes_per_cpu_s.unwrap_or(0.0) * self.demand
    }

    /// Returns the bytes it dirtied.
    fn learn(&mut self, seconds: f64, used: &VcpuUse, page_bytes: f64) -> f64 {
        let bytes = used.first_writes as f64 * page_bytes;
        if used.cpu_s >= CPU_MEASURABLE_S {
            let seen = bytes / used.cpu_s;
            let old = self.bytes_per_cpu_s.unwrap_or(seen);
            self.bytes_per_cpu_s = Some(old + NEWS_SHARE * (seen - old));
        }
        let used_share = used.cpu_s / seconds;
        // One that uses up what it has would use more, nobody knows how much.
        let held_back = self.share < 1.0 && used_share > 0.8 * self.share;
        let demand = if held_back { 1.0 } else { used_share.min(1.0) };
        self.demand += NEWS_SHARE * (demand - self.demand);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const TICK_S: f64 = 0.05;

    /// A vCPU that dirties so many bytes per second of CPU and wants so much of a CPU.
    struct Program {
        bytes_per_cpu_s: f64,
        demand: f64,
    }

    fn run(governor: &mut Governor, programs: &[Program], allowed: f64, ticks: usize) -> Vec<f64> {
        let mut rates = Vec::new();
        for _ in 0..ticks {
            let uses: Vec<VcpuUse> = programs
                .iter()
                .zip(governor.shares())
                .map(|(program, share)| {
                    let cpu_s = program.demand.min(share) * TICK_S;
                    let first_writes = (program.bytes_per_cpu_s * cpu_s / PAGE as f64) as u64;
                    VcpuUse {
                        first_writes,
                        cpu_s,
                    }
                })
                .collect();
            let bytes: u64 = uses.iter().map(|used| used.first_writes * PAGE).sum();
            rates.push(bytes as f64 / TICK_S);
            governor.tick(TICK_S, &uses, allowed);
        }
        rates
    }

    #[test]
    fn a_writer_is_held_at_the_allowance_and_a_reader_is_not_slowed() {
        let mut governor = Governor::new(2, 0.05, PAGE);
        let programs = [
            Program {
                bytes_per_cpu_s: 2e8,
                demand: 1.0,
            },
            Program {
                bytes_per_cpu_s: 1e5,
                demand: 1.0,
            },
        ];
        let rates = run(&mut governor, &programs, 1e8, 100);
        let late = rates[50..].iter().sum::<f64>() / 50.0;
        assert!((late / 1e8 - 1.0).abs() < 0.05, "{late}");
        let shares: Vec<f64> = governor.shares().collect();
        assert!((0.45..0.55).contains(&shares[0]), "{shares:?}");
        assert_eq!(shares[1], 1.0);
    }

    #[test]
    fn a_guest_below_the_allowance_is_left_alone() {
        let mut governor = Governor::new(4, 0.05, PAGE);
        let program = || Program {
            bytes_per_cpu_s: 2e7,
            demand: 1.0,
        };
        run(&mut governor, &[(); 4].map(|()| program()), 1e8, 40);
        assert_eq!(governor.lowest(), 1.0);
    }

    #[test]
    fn writers_share_the_allowance_evenly() {
        let mut governor = Governor::new(3, 0.01, PAGE);
        let programs = [1e9, 5e8, 1e7].map(|bytes_per_cpu_s| Program {
            bytes_per_cpu_s,
            demand: 1.0,
        });
        run(&mut governor, &programs, 1.1e8, 200);
        let shares: Vec<f64> = governor.shares().collect();
        assert!((shares[0] - 0.05).abs() < 0.01, "{shares:?}");
        assert!((shares[1] - 0.10).abs() < 0.02, "{shares:?}");
        assert_eq!(shares[2], 1.0);
    }

    #[test]
    fn nobody_gets_less_than_the_floor() {
        let mut governor = Governor::new(1, 0.3, PAGE);
        let program = [Program {
            bytes_per_cpu_s: 1e9,
            demand: 1.0,
        }];
        run(&mut governor, &program, 1e7, 60);
        assert_eq!(governor.lowest(), 0.3);
    }

    #[test]
    fn a_writer_that_calms_down_is_set_free() {
        let mut governor = Governor::new(1, 0.05, PAGE);
        let hot = [Program {
            bytes_per_cpu_s: 1e9,
            demand: 1.0,
        }];
        run(&mut governor, &hot, 1e8, 40);
        assert!(governor.lowest() < 0.15);
        let calm = [Program {
            bytes_per_cpu_s: 1e7,
            demand: 1.0,
        }];
        run(&mut governor, &calm, 1e8, 20);
        assert_eq!(governor.lowest(), 1.0);
    }

    #[test]
    fn a_share_does_not_swing() {
        let mut governor = Governor::new(1, 0.05, PAGE);
        let program = [Program {
            bytes_per_cpu_s: 4e8,
            demand: 1.0,
        }];
        let rates = run(&mut governor, &program, 1e8, 200);
        let (low, high) = rates[100..]
            .iter()
            .fold((f64::INFINITY, 0.0_f64), |(low, high), rate| {
                (low.min(*rate), high.max(*rate))
            });
        assert!(high / low < 1.15, "between {low} and {high}");
    }

    #[test]
    fn a_vcpu_that_was_added_or_lost_changes_nothing() {
        let mut governor = Governor::new(2, 0.05, PAGE);
        governor.tick(TICK_S, &[VcpuUse::default()], 1.0);
        assert_eq!(governor.lowest(), 1.0);
    }
}
