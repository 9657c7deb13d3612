//! What the client saw, second by second: the `workload` part of the report.
//!
//! Latency is counted in the second in which an answer arrived and measured from the moment at which the
//! operation was *meant* to be sent, so a stall weighs on every operation that had to wait for it.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Second {
    /// Seconds since the start of the run.
    pub t: u32,
    /// Answers that arrived in it.
    pub ops: u64,
    /// Median latency; 0 if nothing arrived, as for the others.
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// The `workload` part of the report. Numbers about a migration are filled in by [`Workload::judge`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Workload {
    pub name: String,
    /// Wall clock at `t` = 0, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The seconds, in order, without holes.
    pub seconds: Vec<Second>,
    /// Connections that broke during the run.
    pub connections_lost: u64,
    /// Answers whose every byte was checked.
    pub verified_reads: u64,
    pub damaged_reads: u64,
    /// Acknowledged writes that a later read did not find.
    pub lost_writes: u64,
    pub errors: u64,
    pub keys: u64,
    pub value_bytes: u64,
    pub fill_seconds: f64,
    /// What the guest could serve at most before the run.
    pub max_ops_per_s: f64,
    /// The fixed rate of the run.
    pub rate_ops_per_s: f64,
    /// Mean of the seconds before the first migration.
    pub before_ops_per_s: f64,
    /// Mean of the seconds in which a migration ran.
    pub during_ops_per_s: f64,
    /// Mean of the seconds after the last migration, from two seconds after its end.
    pub after_ops_per_s: f64,
    /// Longest time from the end of a migration until a second with 95 % of the operations before; absent if never.
    pub recovered_after_s: Option<f64>,
    /// Median of the medians of the seconds before the first migration, ms.
    pub median_before_ms: Option<f64>,
    /// Greatest median of a second from the first migration on, ms.
    pub worst_median_ms: Option<f64>,
    /// Seconds from the first migration on whose median was above ten times that before, or in which nothing came.
    pub seconds_above_10x: Option<u32>,
}

/// When a migration ran, in seconds since the start of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Window {
    pub from_s: f64,
    pub to_s: f64,
}

impl Workload {
    /// The seconds but the last, which is seldom a whole one.
    pub fn whole_seconds(&self) -> &[Second] {
        let whole = self.seconds.len().saturating_sub(1);
        self.seconds.get(..whole).unwrap_or_default()
    }

    fn judge_latency(&mut self, from_s: f64) {
        let whole = self.whole_seconds();
        let ends_before = |second: &&Second| f64::from(second.t) + 1.0 <= from_s;
        let mut before: Vec<f64> = whole
            .iter()
            .filter(ends_before)
            .map(|second| second.p50_ms)
            .collect();
        before.sort_by(f64::total_cmp);
        let Some(median) = before.get(before.len() / 2).copied() else {
            return;
        };
        let after = || whole.iter().filter(|second| !ends_before(second));
        let is_bad = |second: &&Second| second.ops == 0 || second.p50_ms > 10.0 * median;
        let worst = after().map(|second| second.p50_ms).reduce(f64::max);
        let bad = after().filter(is_bad).count() as u32;
        (self.median_before_ms, self.worst_median_ms) = (Some(median), worst);
        self.seconds_above_10x = Some(bad);
    }

    /// Fills in what the migrations did to the load. The last second is left out: it is seldom a whole one.
    pub fn judge(&mut self, windows: &[Window]) {
        let (Some(first), Some(last)) = (windows.first(), windows.last()) else {
            return;
        };
        self.judge_latency(first.from_s);
        let whole = &self.seconds[..self.seconds.len().saturating_sub(1)];
        let start = |second: &&Second| f64::from(second.t);
        let touches = |second: &&Second, window: &Window| {
            start(second) < window.to_s && start(second) + 1.0 > window.from_s
        };
        self.before_ops_per_s = mean(
            whole
                .iter()
                .filter(|second| start(second) + 1.0 <= first.from_s),
        );
        self.during_ops_per_s = mean(
            whole
                .iter()
                .filter(|second| windows.iter().any(|window| touches(second, window))),
        );
        self.after_ops_per_s = mean(
            whole
                .iter()
                .filter(|second| start(second) >= last.to_s + 2.0),
        );
        let enough = self.before_ops_per_s * 0.95;
        let recovery = |window: &Window| {
            let end = window.to_s;
            let good = whole
                .iter()
                .find(|second| start(second) + 1.0 >= end && second.ops as f64 >= enough);
            good.map(|second| (start(&second) - end).max(0.0))
        };
        let all: Option<Vec<f64>> = windows.iter().map(recovery).collect();
        self.recovered_after_s = all.map(|times| times.into_iter().fold(0.0, f64::max));
    }

    /// Whether every answer was right.
    pub fn is_sound(&self) -> bool {
        self.damaged_reads == 0 && self.lost_writes == 0 && self.errors == 0
    }
}

fn mean<'a>(seconds: impl Iterator<Item = &'a Second>) -> f64 {
    let (count, sum) = seconds.fold((0_u32, 0.0), |(count, sum), second| {
        (count + 1, sum + second.ops as f64)
    });
    if count == 0 {
        0.0
    } else {
        sum / f64::from(count)
    }
}

/// Makes the row of one second out of its latencies in microseconds.
pub fn second(t: u32, latencies_us: &mut [u64]) -> Second {
    latencies_us.sort_unstable();
    let at = |share: f64| {
        let index = ((latencies_us.len() as f64 * share).ceil() as usize).saturating_sub(1);
        latencies_us
            .get(index)
            .map_or(0.0, |&us| us as f64 / 1000.0)
    };
    Second {
        t,
        ops: latencies_us.len() as u64,
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        max_ms: at(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_latencies() {
        let mut latencies: Vec<u64> = (1..=100).rev().map(|ms| ms * 1000).collect();
        let row = second(3, &mut latencies);
        assert_eq!(
            (row.t, row.ops, row.p50_ms, row.p99_ms, row.max_ms),
            (3, 100, 50.0, 99.0, 100.0)
        );
        assert_eq!(
            second(0, &mut []),
            Second {
                t: 0,
                ops: 0,
                p50_ms: 0.0,
                p99_ms: 0.0,
                max_ms: 0.0
            }
        );
        assert_eq!(second(0, &mut [5000]).p50_ms, 5.0);
    }

    fn run(ops: &[u64]) -> Workload {
        let row = |(t, &ops): (usize, &u64)| Second {
            t: t as u32,
            ops,
            ..second(0, &mut [])
        };
        Workload {
            seconds: ops.iter().enumerate().map(row).collect(),
            ..Workload::default()
        }
    }

    #[test]
    fn a_migration_is_judged_by_the_seconds_around_it() {
        let mut workload = run(&[100, 100, 100, 50, 40, 80, 98, 100, 100, 100, 7]);
        workload.judge(&[Window {
            from_s: 3.0,
            to_s: 5.0,
        }]);
        assert_eq!(workload.before_ops_per_s, 100.0);
        assert_eq!(workload.during_ops_per_s, 45.0);
        assert_eq!(workload.after_ops_per_s, 100.0);
        assert_eq!(workload.recovered_after_s, Some(1.0));
    }

    #[test]
    fn a_run_that_never_recovers_says_so() {
        let mut workload = run(&[100, 100, 50, 60, 60, 60, 100]);
        workload.judge(&[Window {
            from_s: 2.0,
            to_s: 3.0,
        }]);
        assert_eq!(workload.recovered_after_s, None);
    }
}
