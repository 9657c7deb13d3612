//! What each disk does for its guest, and how much of it the guest may have.
//!
//! Owns the counts and the limits, which outlast the thread that serves a disk: one that is served again goes on with them. The
//! limits stand in the VM's description and nowhere else; what `disks.json` says of them is how QEMU was started.

use super::Disks;
use crate::adoption::lock;
use godwit_blockio::filters::{Count, Counts, Limits, SharedLimits, Statistics, Throttle};
use godwit_blockio::{Filter, Waits};
use godwit_types::disk_activity::{DiskActivity, DiskRate, DiskWork};
use godwit_types::vm::{DiskLimits, DiskSpec};
use godwit_vhost::Disk;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Rates are of so long at least: whoever asks twice gets the same ones.
const RATE_OVER: Duration = Duration::from_secs(1);

/// For what a disk's requests wait that failed.
pub(super) fn waits_of(disk: &DiskSpec) -> Waits {
    Waits {
        for_room: disk.on_full.waits(),
        for_storage: !disk.on_error.fails(),
    }
}

/// One disk's counts and limits.
#[derive(Debug)]
pub(super) struct Gauge {
    counts: Arc<Counts>,
    limits: Arc<SharedLimits>,
    /// What is described, and to how many requests in a second its guest is slowed beside that.
    limited: Mutex<(DiskLimits, Option<u64>)>,
    keeps: Waits,
    seen: Mutex<Seen>,
    /// Since when it has waited for storage, and what was done then: nothing came of it since.
    waits: Mutex<Option<(Instant, u64)>>,
    /// How many times storage had failed it when it was asked last.
    failed: AtomicU64,
}

/// What was counted when somebody asked last, and the rates that came of it.
#[derive(Debug)]
struct Seen {
    at: Instant,
    reads: DiskWork,
    writes: DiskWork,
    rate: DiskRate,
}

impl Gauge {
    pub(super) fn of(disk: &DiskSpec) -> Self {
        let gauge = Self {
            counts: Arc::default(),
            limits: Arc::default(),
            limited: Mutex::default(),
            keeps: waits_of(disk),
            seen: Mutex::new(Seen {
                at: Instant::now(),
                reads: DiskWork::default(),
                writes: DiskWork::default(),
                rate: DiskRate::default(),
            }),
            waits: Mutex::default(),
            failed: AtomicU64::new(0),
        };
        gauge.limit(disk.limits);
        gauge
    }

    /// For a disk's thread. Who waits for its turn at the limit is not counted as waiting for storage.
    pub(super) fn filters(&self) -> Vec<Box<dyn Filter>> {
        let statistics = Statistics::going_on(Arc::clone(&self.counts), self.keeps);
        let throttle = Throttle::from(Arc::clone(&self.limits));
        vec![Box::new(statistics), Box::new(throttle)]
    }

    /// Requests of its guest that have ended.
    pub(super) fn done(&self) -> u64 {
        let counts = &self.counts;
        let all = [
            &counts.reads,
            &counts.writes,
            &counts.flushes,
            &counts.erasures,
        ];
        all.map(|count| count.requests.load(Ordering::Relaxed))
            .iter()
            .sum()
    }

    /// How often storage has failed it.
    pub(super) fn faults(&self) -> u64 {
        self.counts.faults.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn count_fault(&self) {
        self.counts.faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether storage has failed it since this was asked last.
    pub(super) fn has_failed_since(&self) -> bool {
        let faults = self.faults();
        self.failed.swap(faults, Ordering::Relaxed) < faults
    }

    /// Notes that it waits for storage, after so much was done; nothing: it does not.
    pub(super) fn watch(&self, waits: Option<u64>, now: Instant) {
        let mut since = lock(&self.waits);
        let before = since.take();
        *since = waits.map(|done| match before {
            Some((at, before)) if before == done => (at, done),
            _ => (now, done),
        });
    }

    /// Since when nothing has come of what it waits for.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        lock(&self.waits).map(|(since, _)| since)
    }

    fn limit(&self, limits: DiskLimits) {
        lock(&self.limited).0 = limits;
        self.set_limits();
    }

    /// Slows its guest to so many requests in a second, whatever is described, or lets it go.
    pub(super) fn slow(&self, requests_per_s: Option<u64>) {
        lock(&self.limited).1 = requests_per_s.map(|requests| requests.max(1));
        self.set_limits();
    }

    fn set_limits(&self) {
        let (limits, slowed) = *lock(&self.limited);
        let requests = limits.iops.into_iter().chain(slowed).min();
        self.limits.set(Limits {
            requests: requests.unwrap_or(0),
            bytes: limits
                .mib_per_s
                .map_or(0, |mib| mib.saturating_mul(1 << 20)),
        });
    }

    fn activity(&self, disk: &str, now: Instant) -> DiskActivity {
        let counts = &self.counts;
        let (reads, writes) = (work(&counts.reads), work(&counts.writes));
        DiskActivity {
            disk: disk.to_owned(),
            bytes: None,
            reads,
            writes,
            flushes: work(&counts.flushes),
            erasures: work(&counts.erasures),
            rate: lock(&self.seen).rate(now, reads, writes),
        }
    }
}

impl Seen {
    fn rate(&mut self, now: Instant, reads: DiskWork, writes: DiskWork) -> DiskRate {
        let passed = now.saturating_duration_since(self.at);
        if passed >= RATE_OVER {
            let seconds = passed.as_secs_f64();
            let more = |now: u64, before: u64| now.saturating_sub(before) as f64;
            let requests = |now: DiskWork, before: DiskWork| more(now.requests, before.requests);
            let bytes = |now: DiskWork, before: DiskWork| more(now.bytes, before.bytes);
            let (read, written) = (requests(reads, self.reads), requests(writes, self.writes));
            let taken = reads.seconds - self.reads.seconds + writes.seconds - self.writes.seconds;
            let done = read + written;
            self.rate = DiskRate {
                reads: read / seconds,
                read_bytes: bytes(reads, self.reads) / seconds,
                writes: written / seconds,
                written_bytes: bytes(writes, self.writes) / seconds,
                mean_ms: (done > 0.0).then(|| taken.max(0.0) * 1e3 / done),
            };
            (self.at, self.reads, self.writes) = (now, reads, writes);
        }
        self.rate
    }
}

fn work(count: &Count) -> DiskWork {
    let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    DiskWork {
        requests: read(&count.requests),
        bytes: read(&count.bytes),
        failed: read(&count.failed),
        seconds: read(&count.nanoseconds) as f64 / 1e9,
    }
}

impl Disks {
    /// Limits each disk as the VM's description says.
    pub(crate) fn limit(&self, described: &[DiskSpec]) {
        let what = self.0.what();
        for (gauge, disk) in self.0.gauges.iter().zip(&what.disks) {
            if let Some(described) = described.iter().find(|other| other.name == disk.name) {
                gauge.limit(described.limits);
            }
        }
    }

    /// What each does for its guest.
    pub(crate) fn activity(&self) -> Vec<DiskActivity> {
        let (what, now) = (self.0.what(), Instant::now());
        let disks = lock(&self.0.disks);
        let bytes = |disk: &Option<Arc<Disk>>| Some(disk.as_ref()?.glance().ok()?.bytes);
        let all = self.0.gauges.iter().zip(&what.disks).zip(disks.iter());
        all.map(|((gauge, spec), disk)| DiskActivity {
            bytes: bytes(disk),
            ..gauge.activity(&spec.name, now)
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_a_second_at_least_and_say_how_long_requests_take() {
        let gauge = Gauge::of(&DiskSpec::new("root", "/root.raw"));
        let began = lock(&gauge.seen).at;
        let after = |ms| began + Duration::from_millis(ms);
        let done = |count: &Count, requests: u64, bytes: u64, ms: u64| {
            count.requests.fetch_add(requests, Ordering::Relaxed);
            count.bytes.fetch_add(bytes, Ordering::Relaxed);
            count
                .nanoseconds
                .fetch_add(ms * 1_000_000, Ordering::Relaxed);
        };
        done(&gauge.counts.reads, 30, 30 * 4096, 60);
        done(&gauge.counts.writes, 10, 10 * 512, 100);
        let seen = gauge.activity("root", after(999));
        assert_eq!((seen.reads.requests, seen.rate), (30, DiskRate::default()));
        let rate = gauge.activity("root", after(2000)).rate;
        assert_eq!((rate.reads, rate.writes), (15.0, 5.0));
        assert_eq!((rate.read_bytes, rate.written_bytes), (61440.0, 2560.0));
        assert!((rate.mean_ms.unwrap() - 4.0).abs() < 1e-6, "{rate:?}");
        done(&gauge.counts.writes, 7, 512, 1);
        assert_eq!(gauge.activity("root", after(2500)).rate, rate);
        let rate = gauge.activity("root", after(3000)).rate;
        assert_eq!((rate.reads, rate.writes), (0.0, 7.0));
        let idle = gauge.activity("root", after(4000)).rate;
        assert_eq!(idle, DiskRate::default());
    }
}
