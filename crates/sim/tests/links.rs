//! The choice of streams on links of every kind: it finds what a link can carry in few steps, stays there, and shares.
//!
//! The links are formulas, not packets: a stream's speed is what its core, its window, its share of the link and (where
//! loss is taken for a full link) loss leave it, reached by doubling every round trip. Noise comes from a seed.

use godwit_migrate::streams::{Facts, Room, Step, StreamPlan, first_streams};
use godwit_transport::Tuning;
use std::time::Duration;

const GBIT_BYTES_PER_S: f64 = 125e6;
const PACKET_BYTES: f64 = 1448.0;
const INTERVAL_S: f64 = 0.1;

#[derive(Debug, Clone, Copy)]
struct Link {
    bytes_per_s: f64,
    rtt_s: f64,
    /// Share of packets lost on the way, not in a queue.
    loss: f64,
    /// Whether the congestion control takes loss for a full link.
    minds_loss: bool,
    window_bytes: f64,
    core_bytes_per_s: f64,
    cores: u32,
}

impl Link {
    fn new(gbit_per_s: f64, rtt_ms: f64) -> Self {
        let tuning = Tuning {
            bandwidth_bytes_per_s: (gbit_per_s * GBIT_BYTES_PER_S) as u64,
            channels: 4,
            ..Tuning::default()
        };
        let rtt = Duration::from_secs_f64(rtt_ms / 1e3);
        Self {
            bytes_per_s: gbit_per_s * GBIT_BYTES_PER_S,
            rtt_s: rtt_ms / 1e3,
            loss: 0.0,
            minds_loss: false,
            // What the kernel's own tuning reaches, or what is asked for.
            window_bytes: (tuning.buffer_bytes(rtt) as f64).max(2e6),
            core_bytes_per_s: 2e9,
            cores: 8,
        }
    }

    /// What one stream could carry alone.
    fn stream_bytes_per_s(&self) -> f64 {
        let window = self.window_bytes / self.rtt_s;
        let mut most = window.min(self.core_bytes_per_s);
        if self.minds_loss && self.loss > 0.0 {
            // CUBIC's response function, in packets.
            let packets = 1.054 * (self.rtt_s / self.loss).powf(0.75);
            most = most.min(packets.max(2.0) * PACKET_BYTES / self.rtt_s);
        }
        most
    }

    /// What so many streams carry once all have found their speed.
    fn carries(&self, streams: u32) -> f64 {
        let cores = f64::from(self.cores) * self.core_bytes_per_s;
        (f64::from(streams) * self.stream_bytes_per_s())
            .min(self.bytes_per_s)
            .min(cores)
    }

    fn best(&self) -> f64 {
        (1..=16).map(|n| self.carries(n)).fold(0.0, f64::max)
    }
}

/// One migration's streams on a link that others may use too.
struct Migration {
    plan: StreamPlan,
    /// What each stream dares to send by now.
    daring: Vec<f64>,
    changes: Vec<(usize, Step)>,
    sent: f64,
}

impl Migration {
    fn new(link: &Link) -> Self {
        let room = Room {
            cores: link.cores,
            routes: 1,
        };
        let streams = first_streams(room, link.rtt_s, false);
        Self {
            plan: StreamPlan::new(room, streams),
            daring: vec![10.0 * PACKET_BYTES / link.rtt_s; streams as usize],
            changes: Vec::new(),
            sent: 0.0,
        }
    }

    fn wants(&mut self, link: &Link) -> f64 {
        let doublings = INTERVAL_S / link.rtt_s;
        let most = link.stream_bytes_per_s();
        for daring in &mut self.daring {
            *daring = (*daring * doublings.exp2()).min(most);
        }
        self.daring.iter().sum()
    }

    fn step(&mut self, link: &Link, at: usize, bytes_per_s: f64, host_bytes_per_s: f64) {
        let link_is_full = host_bytes_per_s >= link.bytes_per_s;
        let streams = self.daring.len() as f64;
        let each = bytes_per_s / streams;
        let hemmed = each > 0.95 * link.window_bytes / link.rtt_s;
        self.sent += bytes_per_s * INTERVAL_S;
        let facts = Facts {
            seconds: INTERVAL_S,
            bytes: (bytes_per_s * INTERVAL_S) as u64,
            host_bytes: Some((host_bytes_per_s * INTERVAL_S) as u64),
            busy: each / link.core_bytes_per_s,
            hemmed: if hemmed { 1.0 } else { 0.0 },
            repeated: link.loss,
            queued: if link_is_full { 1.6 } else { 1.0 },
            rtt_s: link.rtt_s,
            minds_loss: link.minds_loss,
            ..Facts::default()
        };
        match self.plan.step(facts) {
            Step::Keep => return,
            Step::Add => self.daring.push(10.0 * PACKET_BYTES / link.rtt_s),
            Step::Remove => drop(self.daring.pop()),
        }
        let step = if self.daring.len() as f64 > streams {
            Step::Add
        } else {
            Step::Remove
        };
        self.changes.push((at, step));
    }
}

/// Numbers around 1 from a seed.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        0.98 + 0.04 * ((self.0 >> 33) as f64 / f64::from(1_u32 << 31))
    }
}

/// Runs so many migrations on one link for so long; gives them and each one's mean speed over the second half.
fn run(link: &Link, migrations: usize, seconds: f64) -> (Vec<Migration>, Vec<f64>) {
    let mut noise = Noise(7);
    let mut all: Vec<_> = (0..migrations).map(|_| Migration::new(link)).collect();
    let intervals = (seconds / INTERVAL_S) as usize;
    let mut half = vec![0.0; migrations];
    for at in 0..intervals {
        if at == intervals / 2 {
            half = all.iter().map(|migration| migration.sent).collect();
        }
        let wanted: Vec<f64> = all.iter_mut().map(|m| m.wants(link)).collect();
        let sum: f64 = wanted.iter().sum();
        let fits = (link.bytes_per_s / sum).min(1.0);
        for (migration, wanted) in all.iter_mut().zip(wanted) {
            let host_bytes_per_s = sum.min(link.bytes_per_s);
            migration.step(link, at, wanted * fits * noise.next(), host_bytes_per_s);
        }
    }
    let speeds = all
        .iter()
        .zip(half)
        .map(|(m, half)| (m.sent - half) / (seconds / 2.0))
        .collect();
    (all, speeds)
}

/// One migration finds what the link can carry and stays there.
fn settles(link: &Link) {
    let (all, speeds) = run(link, 1, 120.0);
    let (migration, speed) = (&all[0], speeds[0]);
    assert!(
        speed >= 0.9 * link.best(),
        "{:.0} of {:.0} MB/s with {} streams on {link:?}",
        speed / 1e6,
        link.best() / 1e6,
        migration.daring.len()
    );
    let late = migration.changes.iter().filter(|(at, _)| *at > 600);
    assert!(late.count() <= 4, "{:?} on {link:?}", migration.changes);
}

#[test]
fn every_link_is_filled_and_then_left_alone() {
    for gbit_per_s in [1.0, 10.0, 40.0] {
        for rtt_ms in [0.5, 5.0, 50.0, 100.0, 150.0] {
            settles(&Link::new(gbit_per_s, rtt_ms));
        }
    }
}

#[test]
fn a_full_core_is_relieved_by_others() {
    let slow_cores = Link {
        core_bytes_per_s: 0.6e9,
        ..Link::new(40.0, 0.5)
    };
    settles(&slow_cores);
    let two_cores = Link {
        cores: 2,
        ..slow_cores
    };
    settles(&two_cores);
}

#[test]
fn a_small_window_is_met_with_more_streams() {
    settles(&Link {
        window_bytes: 256e3,
        ..Link::new(10.0, 1.0)
    });
}

#[test]
fn loss_that_slows_one_stream_is_met_with_more() {
    let lossy = Link {
        loss: 1e-4,
        minds_loss: true,
        ..Link::new(1.0, 50.0)
    };
    let (all, speeds) = run(&lossy, 1, 120.0);
    assert!(all[0].daring.len() >= 14, "{} streams", all[0].daring.len());
    assert!(speeds[0] >= 0.9 * lossy.best());
    let minds_not = Link {
        minds_loss: false,
        ..lossy
    };
    settles(&minds_not);
}

#[test]
fn ten_gigabits_over_a_tenth_of_a_second_have_their_window() {
    let link = Link::new(10.0, 150.0);
    let on_the_way = link.bytes_per_s * link.rtt_s;
    assert!((on_the_way - 187.5e6).abs() < 1e5);
    let streams = f64::from(first_streams(
        Room {
            cores: 8,
            routes: 1,
        },
        link.rtt_s,
        false,
    ));
    assert!(
        streams * link.window_bytes >= on_the_way,
        "{streams} streams of {} MB",
        link.window_bytes / 1e6
    );
    settles(&link);
}

#[test]
fn four_migrations_share_a_link() {
    for link in [
        Link::new(10.0, 0.5),
        Link::new(1.0, 0.5),
        Link::new(1.0, 150.0),
    ] {
        let (_, speeds) = run(&link, 4, 60.0);
        let (sum, squares) = speeds
            .iter()
            .fold((0.0, 0.0), |(sum, sq), v| (sum + v, sq + v * v));
        let jain = sum * sum / (4.0 * squares);
        assert!(jain >= 0.95, "Jain {jain:.3} of {speeds:?} on {link:?}");
    }
}
