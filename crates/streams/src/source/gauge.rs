//! What the senders and the kernel showed in a short interval of a pass, as the choice of streams wants it.
//!
//! Owned by the set. Compares counters with those of the last look; a channel that is new since then waits for the
//! next one.

use super::connections::Lane;
use super::outgoing;
use godwit_migrate::streams::Facts;
use godwit_transport::LinkReading;
use std::time::{Duration, Instant};

/// Least time between two looks: a choice of streams needs no more.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Counters of one channel at one look.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    bytes: u64,
    blocked: Duration,
    capped: Duration,
    cpu: Duration,
    link: LinkReading,
}

/// The counters of the last look.
#[derive(Debug)]
pub(super) struct Gauge {
    looked: Instant,
    samples: Vec<Option<Sample>>,
    /// What had left this host.
    host_bytes: Option<u64>,
}

impl Gauge {
    pub(super) fn new() -> Self {
        Self {
            looked: Instant::now(),
            samples: Vec::new(),
            host_bytes: None,
        }
    }

    /// A pass begins: what was between it and the last one says nothing.
    pub(super) fn restart(&mut self, lanes: &[Lane]) {
        self.looked = Instant::now();
        self.host_bytes = outgoing::sent_bytes();
        self.samples = lanes.iter().map(sample).collect();
    }

    /// What happened since the last look, once that is long enough ago.
    pub(super) fn look(&mut self, lanes: &[Lane]) -> Option<Facts> {
        let elapsed = self.looked.elapsed();
        if elapsed < LOOK_EVERY {
            return None;
        }
        let (before, host_before) = (std::mem::take(&mut self.samples), self.host_bytes);
        self.restart(lanes);
        let host = self.host_bytes.zip(host_before);
        let pairs: Vec<(Sample, Sample)> = before
            .into_iter()
            .zip(&self.samples)
            .filter_map(|(before, now)| before.zip(*now))
            .collect();
        Some(Facts {
            host_bytes: host.map(|(now, before)| now.wrapping_sub(before)),
            ..facts(&pairs, elapsed)?
        })
    }
}

fn sample(lane: &Lane) -> Option<Sample> {
    if lane.left {
        return None;
    }
    let (reading, live) = (lane.meter.read(), lane.sender.live());
    Some(Sample {
        bytes: reading.bytes,
        blocked: Duration::from_micros(reading.blocked_us),
        capped: live.capped(),
        cpu: live.cpu(),
        link: lane.probe.read().unwrap_or_default(),
    })
}

fn facts(pairs: &[(Sample, Sample)], elapsed: Duration) -> Option<Facts> {
    let seconds = elapsed.as_secs_f64();
    let mean = |part: &dyn Fn(&Sample) -> Duration| {
        let spent: f64 = pairs
            .iter()
            .map(|(before, now)| part(now).saturating_sub(part(before)).as_secs_f64())
            .sum();
        (spent / seconds / pairs.len() as f64).clamp(0.0, 1.0)
    };
    let sum = |part: &dyn Fn(&Sample) -> u64| -> u64 {
        let differences = pairs.iter().map(|(b, n)| part(n).saturating_sub(part(b)));
        differences.sum()
    };
    let link = pairs.iter().map(|(_, now)| now.link);
    let nearest = link.clone().map(|link| link.rtt).min()?;
    let queued = link.map(|link| ratio(link.rtt, link.min_rtt)).sum::<f64>();
    let (busy, blocked, capped) = (mean(&|s| s.cpu), mean(&|s| s.blocked), mean(&|s| s.capped));
    Some(Facts {
        seconds,
        bytes: sum(&|s| s.bytes),
        host_bytes: None,
        busy,
        starved: (1.0 - busy - blocked - capped).max(0.0),
        capped,
        hemmed: mean(&|s| s.link.window_limited + s.link.buffer_limited),
        repeated: sum(&|s| s.link.repeated_bytes) as f64
            / sum(&|s| s.link.sent_bytes).max(1) as f64,
        queued: queued / pairs.len() as f64,
        rtt_s: nearest.as_secs_f64(),
        minds_loss: false,
    })
}

fn ratio(rtt: Duration, shortest: Duration) -> f64 {
    if shortest.is_zero() {
        return 1.0;
    }
    (rtt.as_secs_f64() / shortest.as_secs_f64()).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn sample(bytes: u64, blocked_ms: u64, cpu_ms: u64) -> Sample {
        Sample {
            bytes,
            blocked: Duration::from_millis(blocked_ms),
            cpu: Duration::from_millis(cpu_ms),
            ..Sample::default()
        }
    }

    #[test]
    fn shares_are_means_over_the_channels_since_the_last_look() {
        let pairs = [
            (sample(100, 500, 200), sample(400, 700, 900)),
            (sample(0, 0, 0), sample(50, 400, 100)),
        ];
        let facts = facts(&pairs, SECOND).expect("two channels");
        assert_eq!(facts.bytes, 350);
        assert!((facts.busy - 0.4).abs() < 1e-9, "{facts:?}");
        assert!((facts.starved - 0.3).abs() < 1e-9, "{facts:?}");
        assert!((facts.queued - 1.0).abs() < 1e-9, "{facts:?}");
    }

    #[test]
    fn without_a_channel_there_is_nothing_to_say() {
        assert_eq!(facts(&[], SECOND), None);
    }
}
