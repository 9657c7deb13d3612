//! What this host is busy with: counters of the kernel, read twice, and what migrations say of themselves.
//!
//! Owns the last two readings, so that rates need no wait for whoever asks again within seconds. Refuses: nothing; what
//! cannot be read counts as zero.

use crate::system::System;
use godwit_types::MigrationId;
use godwit_types::load::InterfaceLoad;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Rates over less than this say little: the kernel counts CPU time in hundredths of a second.
const WINDOW_MIN: Duration = Duration::from_millis(400);
/// A reading older than this says little of now.
const WINDOW_MAX: Duration = Duration::from_secs(5);
/// Threads of a process that are looked at.
const THREADS_MAX: usize = 512;

/// Counters of a process.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProcessTimes {
    /// CPU seconds since its start.
    pub cpu_s: f64,
    /// The same by thread: name and CPU seconds.
    pub threads: BTreeMap<u32, (String, f64)>,
}

/// All counters at one moment.
#[derive(Debug, Clone)]
pub struct Reading {
    at: Instant,
    /// Received and sent bytes by interface.
    interfaces: BTreeMap<String, (u64, u64)>,
    /// Busy and all time of all cores, ticks.
    cpu_ticks: (u64, u64),
    processes: BTreeMap<i32, ProcessTimes>,
    /// Bytes that the migration's channels had carried, by migration.
    migrations: BTreeMap<MigrationId, u64>,
}

/// What is asked about.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    pub processes: Vec<i32>,
    /// Migrations and what the channels of each have carried so far, bytes.
    pub migrations: BTreeMap<MigrationId, u64>,
}

/// The two newest readings, of which a load is the difference.
#[derive(Debug, Default)]
pub struct Readings {
    newer: Option<Reading>,
    older: Option<Reading>,
}

impl Readings {
    /// Keeps a reading and gives the one to compare it with, where there is a fit one.
    pub fn base_for(&mut self, now: &Reading) -> Option<Reading> {
        let fits = |reading: &&Reading| {
            let age = now.at.saturating_duration_since(reading.at);
            (WINDOW_MIN..=WINDOW_MAX).contains(&age)
        };
        let base = [&self.newer, &self.older]
            .into_iter()
            .flatten()
            .find(fits)
            .cloned();
        let replace = self
            .newer
            .as_ref()
            .is_none_or(|newer| now.at.saturating_duration_since(newer.at) >= WINDOW_MIN);
        if replace {
            self.older = self.newer.replace(now.clone());
        }
        base
    }
}

/// How long to wait for a second reading where there is none to compare with.
pub fn wait() -> Duration {
    WINDOW_MIN
}

impl Reading {
    pub fn take(system: &System, wanted: &Wanted) -> Self {
        let processes = wanted
            .processes
            .iter()
            .map(|pid| (*pid, process_times(system, *pid)))
            .collect();
        Self {
            at: Instant::now(),
            interfaces: interfaces(&system.read("/proc/net/dev").unwrap_or_default()),
            cpu_ticks: cpu_ticks(&system.read("/proc/stat").unwrap_or_default()),
            processes,
            migrations: wanted.migrations.clone(),
        }
    }

    /// Seconds since an earlier one.
    pub fn seconds_since(&self, base: &Self) -> f64 {
        self.at.saturating_duration_since(base.at).as_secs_f64()
    }

    /// CPU in use since then, percent of all cores.
    pub fn cpu_percent(&self, base: &Self) -> f64 {
        let busy = self.cpu_ticks.0.saturating_sub(base.cpu_ticks.0);
        let all = self.cpu_ticks.1.saturating_sub(base.cpu_ticks.1);
        100.0 * busy as f64 / all.max(1) as f64
    }

    /// CPU of a process since then, percent of one core.
    pub fn process_percent(&self, base: &Self, pid: Option<i32>) -> f64 {
        let times = |reading: &Self| Some(reading.processes.get(&pid?)?.cpu_s);
        percent(times(self), times(base), self.seconds_since(base))
    }

    /// The busiest thread of a process since then, and its CPU, percent of one core.
    pub fn busiest_thread(&self, base: &Self, pid: Option<i32>) -> (String, f64) {
        let seconds = self.seconds_since(base);
        let process = |reading: &Self| reading.processes.get(&pid?).cloned();
        // A process that was not read before is not busy with all that it ever did.
        let Some((now, then)) = process(self).zip(process(base)) else {
            return Default::default();
        };
        let (now, then) = (now.threads, then.threads);
        let shares = now.into_iter().map(|(id, (name, cpu_s))| {
            let before = then.get(&id).map_or(0.0, |(_, cpu_s)| *cpu_s);
            (name, percent(Some(cpu_s), Some(before), seconds))
        });
        shares
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or_default()
    }

    /// Bytes per second that a migration's own channels carried since then.
    pub fn migration_rate(&self, base: &Self, id: &MigrationId) -> Option<f64> {
        let (now, then) = (self.migrations.get(id)?, base.migrations.get(id)?);
        Some(rate(*now, *then, self.seconds_since(base)))
    }

    /// An interface's traffic since then.
    pub fn interface(
        &self,
        base: &Self,
        system: &System,
        name: &str,
        addresses: &[IpAddr],
    ) -> InterfaceLoad {
        let counters = |reading: &Self| reading.interfaces.get(name).copied().unwrap_or_default();
        let (now, then) = (counters(self), counters(base));
        let seconds = self.seconds_since(base);
        InterfaceLoad {
            name: name.to_owned(),
            addresses: addresses.to_vec(),
            speed_mbit_per_s: speed_mbit_per_s(system, name),
            received_bytes_per_s: rate(now.0, then.0, seconds),
            sent_bytes_per_s: rate(now.1, then.1, seconds),
        }
    }
}

fn rate(now: u64, then: u64, seconds: f64) -> f64 {
    now.saturating_sub(then) as f64 / seconds.max(1e-3)
}

fn percent(now_s: Option<f64>, then_s: Option<f64>, seconds: f64) -> f64 {
    match (now_s, then_s) {
        (Some(now), Some(then)) => (100.0 * (now - then) / seconds.max(1e-3)).max(0.0),
        _ => 0.0,
    }
}

/// What the driver says; not all do, and some say nonsense while the link is down.
pub fn speed_mbit_per_s(system: &System, name: &str) -> Option<u64> {
    if !crate::config::is_interface_name(name) {
        return None;
    }
    let text = system.read(&format!("/sys/class/net/{name}/speed"))?;
    text.parse().ok().filter(|speed| *speed > 0)
}

/// `/proc/net/dev`, which shows the network namespace of whoever reads it.
fn interfaces(text: &str) -> BTreeMap<String, (u64, u64)> {
    let line = |line: &str| {
        let (name, counters) = line.split_once(':')?;
        let mut fields = counters.split_ascii_whitespace();
        let received = fields.next()?.parse().ok()?;
        let sent = fields.nth(7)?.parse().ok()?;
        Some((name.trim().to_owned(), (received, sent)))
    };
    text.lines().filter_map(line).collect()
}

/// Busy and all ticks of all cores.
fn cpu_ticks(stat: &str) -> (u64, u64) {
    let line = stat.lines().next().unwrap_or_default();
    let fields: Vec<u64> = line
        .split_ascii_whitespace()
        .skip(1)
        .take(8)
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    let all: u64 = fields.iter().sum();
    // Fields 4 and 5 are idle time and waiting for disks.
    let idle: u64 = fields.iter().skip(3).take(2).sum();
    (all.saturating_sub(idle), all)
}

fn process_times(system: &System, pid: i32) -> ProcessTimes {
    let ticks_per_s = rustix::param::clock_ticks_per_second().max(1) as f64;
    let cpu = |path: String| {
        let text = system.read(&path)?;
        let (name, ticks) = stat_of(&text)?;
        Some((name, ticks as f64 / ticks_per_s))
    };
    let threads = system
        .numbers_in(&format!("/proc/{pid}/task"))
        .into_iter()
        .take(THREADS_MAX)
        .filter_map(|id| Some((id, cpu(format!("/proc/{pid}/task/{id}/stat"))?)))
        .collect();
    ProcessTimes {
        cpu_s: cpu(format!("/proc/{pid}/stat")).map_or(0.0, |(_, cpu_s)| cpu_s),
        threads,
    }
}

/// Name and CPU ticks of a `stat` line; the name may have spaces and brackets.
fn stat_of(text: &str) -> Option<(String, u64)> {
    let (head, rest) = text.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((name.to_owned(), user.saturating_add(system)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_as_the_kernel_writes_them() {
        let dev = "Inter-|   Receive                                                |  Transmit\n face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n  eth0: 1000 1 0 0 0 0 0 0 2000 2 0 0 0 0 0 0\nmig1:7 1 0 0 0 0 0 0 9 2 0 0 0 0 0 0\n";
        let found = interfaces(dev);
        assert_eq!(found.get("eth0"), Some(&(1000, 2000)));
        assert_eq!(found.get("mig1"), Some(&(7, 9)));
        assert_eq!(found.len(), 2);
        assert_eq!(cpu_ticks("cpu  10 0 20 60 10 0 0 0 0 0\ncpu0 1"), (30, 100));
        assert_eq!(cpu_ticks(""), (0, 0));
        let stat = "12 (send) 0) S 1 1 1 0 -1 0 0 0 0 0 250 50 0 0 20 0";
        assert_eq!(stat_of(stat), Some(("send) 0".into(), 300)));
        assert_eq!(stat_of("12 (x"), None);
    }

    #[test]
    fn a_reading_is_compared_with_one_that_is_neither_too_new_nor_too_old() {
        let start = Instant::now();
        let at = |ms: u64| Reading {
            at: start + Duration::from_millis(ms),
            interfaces: BTreeMap::new(),
            cpu_ticks: (0, 0),
            processes: BTreeMap::new(),
            migrations: BTreeMap::new(),
        };
        let mut readings = Readings::default();
        let mut base = |ms: u64| {
            let base = readings.base_for(&at(ms));
            base.map(|base| (base.at - start).as_millis())
        };
        assert_eq!(base(0), None);
        assert_eq!(base(100), None);
        assert_eq!(base(500), Some(0));
        assert_eq!(base(600), Some(0));
        assert_eq!(base(1000), Some(500));
        assert_eq!(base(60_000), None);
    }

    #[test]
    fn rates_come_from_the_difference() {
        let start = Instant::now();
        let reading = |seconds: u64, sent: u64, cpu_s: f64| Reading {
            at: start + Duration::from_secs(seconds),
            interfaces: [("eth0".to_owned(), (0, sent))].into(),
            cpu_ticks: (10 * seconds, 40 * seconds),
            processes: [(
                7,
                ProcessTimes {
                    cpu_s,
                    threads: [(8, ("send-0".to_owned(), cpu_s))].into(),
                },
            )]
            .into(),
            migrations: [(MigrationId::new("m").unwrap(), sent)].into(),
        };
        let (then, now) = (reading(0, 1000, 1.0), reading(2, 5000, 2.5));
        let dir = tempfile::tempdir().unwrap();
        let system = System::under(dir.path());
        let interface = now.interface(&then, &system, "eth0", &[]);
        assert_eq!(interface.sent_bytes_per_s, 2000.0);
        assert_eq!(interface.speed_mbit_per_s, None);
        assert_eq!(now.cpu_percent(&then), 25.0);
        assert_eq!(now.process_percent(&then, Some(7)), 75.0);
        assert_eq!(now.process_percent(&then, Some(9)), 0.0);
        assert_eq!(now.process_percent(&then, None), 0.0);
        assert_eq!(now.busiest_thread(&then, Some(7)), ("send-0".into(), 75.0));
    }

    #[test]
    fn two_moves_to_one_host_show_their_own_rates_and_not_half_of_the_interface_each() {
        let start = Instant::now();
        let (m, n) = (
            MigrationId::new("m").unwrap(),
            MigrationId::new("n").unwrap(),
        );
        let reading = |seconds: u64, carried: [u64; 2]| Reading {
            at: start + Duration::from_secs(seconds),
            interfaces: BTreeMap::new(),
            cpu_ticks: (0, 0),
            processes: BTreeMap::new(),
            migrations: [m.clone(), n.clone()].into_iter().zip(carried).collect(),
        };
        let (then, now) = (reading(0, [1000, 1000]), reading(2, [7000, 1200]));
        assert_eq!(now.migration_rate(&then, &m), Some(3000.0));
        assert_eq!(now.migration_rate(&then, &n), Some(100.0));
        let unknown = MigrationId::new("o").unwrap();
        assert_eq!(now.migration_rate(&then, &unknown), None);
    }

    #[test]
    fn a_process_that_was_not_read_before_is_not_busy_with_all_that_it_ever_did() {
        let start = Instant::now();
        let reading = |seconds: u64, known: bool| {
            let times = ProcessTimes {
                cpu_s: 0.46,
                threads: [(8, ("godwit".to_owned(), 0.46))].into(),
            };
            Reading {
                at: start + Duration::from_secs(seconds),
                interfaces: BTreeMap::new(),
                cpu_ticks: (0, 0),
                processes: known.then_some((7, times)).into_iter().collect(),
                migrations: BTreeMap::new(),
            }
        };
        let (then, now) = (reading(0, false), reading(2, true));
        assert_eq!(now.process_percent(&then, Some(7)), 0.0);
        assert_eq!(now.busiest_thread(&then, Some(7)), (String::new(), 0.0));
    }
}
