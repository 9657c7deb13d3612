//! What the processes of two hosts cost: CPU without the vCPUs' own, and memory beside the guest's.
//!
//! Looks at `/proc` every few hundredths of a second while a move runs, the same way for every system; what a process
//! used in the instant before it ended is lost. CPU is counted by the kernel in ticks of 10 ms.

use anyhow::Result;
use godwit_testkit::lab::Machine;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_millis(40);
/// New processes are looked for only every so many looks.
const SEARCH_EVERY: u32 = 5;

/// What one host spent.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// Core-seconds of all processes, vCPU threads left out.
    pub cpu_s: f64,
    /// Core-seconds of the vCPU threads.
    pub vcpu_s: f64,
    /// Largest sum of the processes' memory, without shared memory and page tables.
    pub rss_mib: f64,
    /// Largest sum of their page tables.
    pub page_tables_mib: f64,
    /// Each process by its name and first argument: its memory in the same sense, at its most.
    pub processes: Vec<(String, f64)>,
}

/// A thread that looks at hosts.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Usage>>,
}

impl Watch {
    /// Starts with all processes; what was used before does not count.
    pub fn start(machines: &[&Machine]) -> Result<Self> {
        Self::begin(machines, false)
    }

    /// Without the product's: they have no part in QEMU's own migration.
    pub fn of_qemu(machines: &[&Machine]) -> Result<Self> {
        Self::begin(machines, true)
    }

    fn begin(machines: &[&Machine], peers_only: bool) -> Result<Self> {
        let mut hosts = Vec::new();
        for machine in machines {
            let namespace = format!("/proc/{}/ns/pid", machine.init_pid());
            let mut host = Host {
                namespace: std::fs::read_link(namespace)?,
                init: machine.init_pid(),
                peers_only,
                ..Host::default()
            };
            host.search(true);
            host.look();
            hosts.push(host);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut looks = 0_u32;
            while !seen.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK_EVERY);
                looks += 1;
                for host in &mut hosts {
                    if looks.is_multiple_of(SEARCH_EVERY) {
                        host.search(false);
                    }
                    host.look();
                }
            }
            for host in &mut hosts {
                host.search(false);
                host.look();
            }
            hosts.iter().map(Host::usage).collect()
        });
        Ok(Self { stop, thread })
    }

    /// What each host spent since the start, in the order given there.
    pub fn end(self) -> Vec<Usage> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// Guest memory that QEMU processes of a machine reach by huge pages, MiB; none where there is no QEMU.
pub fn huge_mapped_mib(machine: &Machine) -> Option<f64> {
    let namespace = std::fs::read_link(format!("/proc/{}/ns/pid", machine.init_pid())).ok()?;
    let mut host = Host {
        namespace,
        init: machine.init_pid(),
        ..Host::default()
    };
    host.search(false);
    let mapped = |(pid, process): (&i32, &Process)| {
        let is_qemu = process.name.starts_with("qemu-system");
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        is_qemu.then(|| kib(&rollup, "ShmemPmdMapped:") + kib(&rollup, "AnonHugePages:"))
    };
    let found = host.processes.iter().filter_map(mapped);
    found
        .reduce(|one, two| one + two)
        .map(|kib| kib as f64 / 1024.0)
}

#[derive(Default)]
struct Host {
    namespace: std::path::PathBuf,
    init: i32,
    /// The product's own processes do not count.
    peers_only: bool,
    processes: HashMap<i32, Process>,
    rss_kib: u64,
    page_tables_kib: u64,
}

#[derive(Default)]
struct Process {
    name: String,
    rss_kib: u64,
    vcpus: Vec<i32>,
    before_ticks: u64,
    before_vcpu_ticks: u64,
    ticks: u64,
    vcpu_ticks: u64,
}

impl Host {
    /// Finds processes; those that run at the start have used what they have used.
    fn search(&mut self, at_start: bool) {
        let Ok(entries) = std::fs::read_dir("/proc") else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            let here = std::fs::read_link(entry.path().join("ns/pid"));
            if pid == self.init || !here.is_ok_and(|namespace| namespace == self.namespace) {
                continue;
            }
            let found = name_of(pid);
            if self.peers_only && found.starts_with("godwit") {
                continue;
            }
            let process = self.processes.entry(pid).or_default();
            process.vcpus = vcpus(pid);
            process.name = found;
            if at_start {
                process.look(pid);
                process.before_ticks = process.ticks;
                process.before_vcpu_ticks = process.vcpu_ticks;
            }
        }
    }

    fn look(&mut self) {
        let (mut rss, mut tables) = (0, 0);
        for (pid, process) in &mut self.processes {
            process.look(*pid);
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let own = kib(&status, "RssAnon:") + kib(&status, "RssFile:");
            process.rss_kib = process.rss_kib.max(own);
            rss += own;
            tables += kib(&status, "VmPTE:");
        }
        self.rss_kib = self.rss_kib.max(rss);
        self.page_tables_kib = self.page_tables_kib.max(tables);
    }

    fn usage(&self) -> Usage {
        let per_tick = 1.0 / rustix::param::clock_ticks_per_second() as f64;
        let mut usage = Usage {
            rss_mib: self.rss_kib as f64 / 1024.0,
            page_tables_mib: self.page_tables_kib as f64 / 1024.0,
            ..Usage::default()
        };
        for process in self.processes.values() {
            let vcpu = process.vcpu_ticks.saturating_sub(process.before_vcpu_ticks);
            let all = process.ticks.saturating_sub(process.before_ticks);
            usage
                .processes
                .push((process.name.clone(), process.rss_kib as f64 / 1024.0));
            usage.vcpu_s += vcpu as f64 * per_tick;
            usage.cpu_s += all.saturating_sub(vcpu) as f64 * per_tick;
        }
        usage
    }
}

impl Process {
    /// A process that is gone keeps its last figures.
    fn look(&mut self, pid: i32) {
        let vcpu = |tid: &i32| ticks(&format!("/proc/{pid}/task/{tid}/stat")).unwrap_or(0);
        let vcpus: u64 = self.vcpus.iter().map(vcpu).sum();
        self.vcpu_ticks = self.vcpu_ticks.max(vcpus);
        self.ticks = self
            .ticks
            .max(ticks(&format!("/proc/{pid}/stat")).unwrap_or(0));
    }
}

/// The program and its first argument, which tells an agent from a VM process.
fn name_of(pid: i32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let program = words.next().unwrap_or_default().into_owned();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    match words.next() {
        Some(word) if !word.is_empty() && !word.starts_with('-') => format!("{program} {word}"),
        _ => program,
    }
}

/// Threads that QEMU names `CPU n/...`.
fn vcpus(pid: i32) -> Vec<i32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let is_vcpu = |path: &std::path::Path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("CPU "))
    };
    let of_vcpus = tasks.flatten().filter(|task| is_vcpu(&task.path()));
    of_vcpus
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect()
}

/// User and system ticks of a process or thread.
fn ticks(stat: &str) -> Option<u64> {
    ticks_in(&std::fs::read_to_string(stat).ok()?)
}

fn ticks_in(text: &str) -> Option<u64> {
    let after_name = text.rsplit(") ").next()?;
    let mut fields = after_name.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn kib(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_read_behind_a_name_with_brackets() {
        let text = "42 (CPU 0) (x) S 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20 0";
        assert_eq!(ticks_in(text), Some(100));
        assert_eq!(ticks_in("nothing"), None);
    }

    #[test]
    fn memory_is_read_from_a_status() {
        let status = "Name:\tx\nRssAnon:\t   120 kB\nVmPTE:\t 8 kB\n";
        assert_eq!(
            (kib(status, "RssAnon:"), kib(status, "RssShmem:")),
            (120, 0)
        );
    }
}
