//! A guest, a link and a clock that exist only in numbers: whole migrations in simulated time.
//!
//! The guest writes page by page; what the kernel would report is kept page by page too. The product's own governor slows
//! its vCPUs. Nothing here is known to the code under test but what it could measure.

use super::{Convergence, Decision, Goal, IterationFacts, Slowing};
use crate::governor::{Governor, VcpuUse};

pub(super) const PAGE: u64 = 4096;
const STEP_S: f64 = 0.002;
const TICK_S: f64 = 0.05;
/// Time from the decision to the stopped guest: a journal is written meanwhile.
const STOPPING_S: f64 = 0.008;

/// Which pages a vCPU writes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pattern {
    /// All of so many pages, in an endless loop.
    Loop(u64),
    /// Any of so many pages.
    Uniform(u64),
    /// Nine writes in ten go to a tenth of so many pages.
    Skewed(u64),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Vcpu {
    pub pattern: Pattern,
    /// Writes per second of CPU.
    pub writes_per_s: f64,
    /// Seconds of writing and of reading in turn; only writing when absent.
    pub phases_s: Option<(f64, f64)>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Clock {
    carry: f64,
    at: u64,
    cpu_s: f64,
    first_writes: u64,
}

pub(super) struct World {
    pub pages: u64,
    pub link_bytes_per_s: f64,
    pub rtt_s: f64,
    pub overhead_s: f64,
    /// Up to so much more, at random, in every iteration: a busy host, a queue on the way.
    pub jitter_s: f64,
    pub floor: f64,
    /// What the governor hears of the vCPUs' first writes; the others are nobody's it knows of.
    pub heard: f64,
    /// Measured durations are off by up to this share, either way.
    pub noise: f64,
    pub vcpus: Vec<Vcpu>,
}

/// What became of a migration.
#[derive(Debug, Default)]
pub(super) struct End {
    pub completed: bool,
    pub elapsed_s: f64,
    pub pause_s: f64,
    pub iterations: u32,
    /// Average share of its CPU that each vCPU had from the second iteration on.
    pub speeds: Vec<f64>,
    /// Bytes first written per second in that time.
    pub dirty_bytes_per_s: f64,
    /// Estimates made at a tenth of the whole way, and when: (s into the migration, estimated s to the end).
    pub estimates: Vec<(f64, f64)>,
}

struct Sim<'a> {
    world: &'a World,
    dirty: Vec<bool>,
    dirty_count: u64,
    clocks: Vec<Clock>,
    governor: Governor,
    allowed: Option<f64>,
    slowing: Slowing,
    now_s: f64,
    next_tick_s: f64,
    seed: u64,
}

impl<'a> Sim<'a> {
    fn new(world: &'a World) -> Self {
        Self {
            world,
            dirty: vec![false; world.pages as usize],
            dirty_count: 0,
            clocks: vec![Clock::default(); world.vcpus.len()],
            governor: Governor::new(world.vcpus.len(), world.floor, PAGE),
            allowed: None,
            slowing: Slowing::NotYet,
            now_s: 0.0,
            next_tick_s: TICK_S,
            seed: 0x2545_f491_4f6c_dd1d,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % below.max(1)
    }

    /// How much longer an iteration takes by chance.
    fn late_s(&mut self) -> f64 {
        match self.world.jitter_s {
            0.0 => 0.0,
            jitter_s => jitter_s * self.random(1000) as f64 / 1000.0,
        }
    }

    fn noisy(&mut self, seconds: f64) -> f64 {
        let swing = self.random(2001) as f64 / 1000.0 - 1.0;
        seconds * (1.0 + self.world.noise * swing)
    }

    fn write(&mut self, index: usize) {
        let at = match self.world.vcpus[index].pattern {
            Pattern::Loop(pages) => {
                let at = self.clocks[index].at;
                self.clocks[index].at = (at + 1) % pages;
                at
            }
            Pattern::Uniform(pages) => self.random(pages),
            Pattern::Skewed(pages) => {
                let hot = self.random(10) != 0;
                self.random(if hot { pages / 10 } else { pages })
            }
        };
        // Each vCPU has memory of its own.
        let share = self.world.pages / self.world.vcpus.len() as u64;
        let page = (index as u64 * share + at % share) as usize;
        if !self.dirty[page] {
            self.dirty[page] = true;
            self.dirty_count += 1;
            self.clocks[index].first_writes += 1;
        }
    }

    fn step(&mut self) {
        let shares: Vec<f64> = self.governor.shares().collect();
        for (index, share) in shares.into_iter().enumerate() {
            let vcpu = self.world.vcpus[index];
            let writes = vcpu
                .phases_s
                .is_none_or(|(on, off)| self.now_s % (on + off) < on);
            let rate = if writes { vcpu.writes_per_s } else { 0.0 };
            let clock = &mut self.clocks[index];
            clock.cpu_s += share * STEP_S;
            clock.carry += rate * share * STEP_S;
            let count = clock.carry as u64;
            clock.carry -= count as f64;
            for _ in 0..count {
                self.write(index);
            }
        }
        self.now_s += STEP_S;
        if self.now_s >= self.next_tick_s {
            self.next_tick_s += TICK_S;
            self.tick();
        }
    }

    fn tick(&mut self) {
        let heard = self.world.heard;
        let uses: Vec<VcpuUse> = self
            .clocks
            .iter_mut()
            .map(|clock| VcpuUse {
                first_writes: (heard * std::mem::take(&mut clock.first_writes) as f64) as u64,
                cpu_s: std::mem::take(&mut clock.cpu_s),
            })
            .collect();
        if let Some(allowed) = self.allowed {
            self.governor.tick(TICK_S, &uses, allowed);
            self.slowing = self.slowing.then(self.governor.slowing());
        }
    }

    fn run_for(&mut self, seconds: f64, mut each: impl FnMut(&mut Self)) {
        let until = self.now_s + seconds;
        while self.now_s < until {
            self.step();
            each(self);
        }
    }

    fn scan(&mut self) -> u64 {
        self.dirty.fill(false);
        std::mem::take(&mut self.dirty_count)
    }
}

pub(super) fn migrate(world: &World, goal: Goal) -> End {
    let mut sim = Sim::new(world);
    let mut convergence = Convergence::new(goal);
    let mut end = End::default();
    let (mut to_send, mut dirtied, mut limited_s) = (world.pages, 0, 0.0);
    let mut cpu_s = vec![0.0; world.vcpus.len()];
    loop {
        let pass_s = (to_send * PAGE) as f64 / world.link_bytes_per_s;
        let overhead_s = world.overhead_s + world.rtt_s + sim.late_s();
        let (began_s, taken_s) = (sim.now_s, pass_s + overhead_s);
        let (later, mut looks) = (end.iterations > 0, 0);
        sim.run_for(taken_s, |sim| {
            for (sum, share) in cpu_s.iter_mut().zip(sim.governor.shares()) {
                *sum += if later { share * STEP_S } else { 0.0 };
            }
            let age_s = sim.now_s - began_s;
            if !later && age_s > 0.25 * f64::from(1 << looks) {
                looks += 1;
                convergence.looked(age_s, sim.dirty_count * PAGE);
                let left = (1.0 - age_s / taken_s) * (world.pages * PAGE) as f64;
                let speed = sim.noisy(world.link_bytes_per_s);
                if let Some(estimate_s) = convergence.estimate_s(left, Some(speed), age_s) {
                    end.estimates.push((sim.now_s, estimate_s));
                }
            }
        });
        end.iterations += 1;
        let dirty = sim.scan();
        if later {
            dirtied += dirty;
            limited_s += sim.now_s - began_s;
        }
        let facts = IterationFacts {
            data_bytes: to_send * PAGE,
            seconds: sim.noisy(sim.now_s - began_s),
            dirty_bytes: dirty * PAGE,
            rtt_s: world.rtt_s,
            elapsed_s: sim.now_s,
            slowing: sim.slowing,
        };
        (to_send, sim.slowing) = (dirty, Slowing::NotYet);
        match convergence.decide(facts) {
            Decision::Iterate {
                allowed_bytes_per_s,
            } => sim.allowed = allowed_bytes_per_s,
            Decision::Switchover => {
                sim.run_for(STOPPING_S, |_| {});
                let last = (to_send + sim.scan()) * PAGE;
                end.completed = true;
                end.pause_s =
                    goal.fixed_s + 2.5 * world.rtt_s + last as f64 / world.link_bytes_per_s;
                break;
            }
            Decision::GiveUp => break,
        }
    }
    end.elapsed_s = sim.now_s;
    end.dirty_bytes_per_s = (dirtied * PAGE) as f64 / limited_s.max(STEP_S);
    let speed = |sum: &f64| {
        if limited_s > 0.0 {
            sum / limited_s
        } else {
            1.0
        }
    };
    end.speeds = cpu_s.iter().map(speed).collect();
    end
}
