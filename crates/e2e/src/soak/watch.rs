//! Looks at the site from outside, all the time: the CPU time of every QEMU's vCPUs, the passes that guests count, and
//! what the controller's list says.
//!
//! Owns the records of the round, which [`crate::soak::checks`] judges. It asks the product nothing but its list, and
//! believes that only against what it saw itself. It lets vCPU threads run behind everything else, so that guests that
//! count for ever do not starve those who decide about them.

use crate::soak::checks::{Shown, Trace, last_of_each};
use crate::soak::disks::Disks;
use crate::soak::meter::Meter;
use crate::soak::site::CLONES;
use crate::stack::Stack;
use anyhow::Result;
use godwit_testkit::guest::checker;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Pause between two looks at CPU time.
const EVERY: Duration = Duration::from_millis(15);
/// Pause between two looks at processes that were no QEMU when they were first seen: a fork may become one.
const AGAIN: Duration = Duration::from_millis(150);
/// Pause between two looks at a guest's passes.
const PASSES_EVERY: Duration = Duration::from_millis(100);
/// Pause between two lists.
const LIST_EVERY: Duration = Duration::from_millis(1_000);
/// Of a thread's flags: it is ending.
const PF_EXITING: u64 = 4;
/// Kindness of vCPU threads.
const VCPU_NICE: i32 = 10;
const SAMPLER_NICE: i32 = -10;
/// The guest of some lines that an agent starts and ends at its own start, to see what QEMU gives: no VM of the site.
const TRIAL: &str = "godwit-trial";

/// A QEMU that lives.
struct Live {
    trace: Trace,
    vcpus: Vec<Vcpu>,
    ram: Option<File>,
    ram_path: PathBuf,
    meter: Meter,
    passes_at: u64,
}

/// A vCPU's thread, as the kernel tells of it.
struct Vcpu {
    schedstat: File,
    stat: File,
    /// CPU time that it used before it began to end.
    ran_ns: u64,
}

/// Records of the site since it came up.
pub struct Watch {
    began: Instant,
    /// Process id namespaces of the hosts.
    hosts: Vec<(String, PathBuf, PathBuf)>,
    live: Mutex<BTreeMap<i32, Live>>,
    ended: Mutex<Vec<Trace>>,
    shown: Mutex<Vec<Shown>>,
    over: AtomicBool,
    disks: Arc<Disks>,
}

impl Watch {
    pub fn new(stack: &Stack, disks: &Arc<Disks>) -> Result<Self> {
        let mut hosts = Vec::new();
        for host in stack.hosts().into_iter().chain([CLONES.to_owned()]) {
            let init = stack.machine(&host)?.init_pid();
            let namespace = std::fs::read_link(format!("/proc/{init}/ns/pid"))?;
            hosts.push((host.clone(), namespace, stack.inside(&host, "/")?));
        }
        Ok(Self {
            began: Instant::now(),
            hosts,
            live: Mutex::default(),
            ended: Mutex::default(),
            shown: Mutex::default(),
            over: AtomicBool::new(false),
            disks: Arc::clone(disks),
        })
    }

    /// Nanoseconds since the watch began.
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Ends [`Watch::sample`] and [`Watch::list`].
    pub fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Begins a round: forgets windows, and QEMUs that are gone unless a VM ran last in them. Gives the time.
    pub fn begin_round(&self) -> u64 {
        // Held together: a QEMU that ends meanwhile is in one of the two.
        let (mut live, mut ended) = (lock(&self.live), lock(&self.ended));
        lock(&self.shown).clear();
        let alive: Vec<Trace> = live.values().map(|one| one.trace.clone()).collect();
        *ended = last_of_each(&ended, &alive);
        let living = live.values_mut().map(|one| &mut one.trace);
        for trace in living.chain(ended.iter_mut()) {
            let keep = trace.windows.len().saturating_sub(1);
            trace.windows.drain(..keep);
            let keep = trace.passes.len().saturating_sub(1);
            trace.passes.drain(..keep);
        }
        self.now()
    }

    /// All QEMUs of the round.
    pub fn traces(&self) -> Vec<Trace> {
        let live = lock(&self.live);
        let mut all = lock(&self.ended).clone();
        all.extend(live.values().map(|one| one.trace.clone()));
        all
    }

    /// The host on which a VM ran last, as far as anybody saw.
    pub fn last_host(&self, vm: &str) -> Option<String> {
        let traces = self.traces();
        let ran = traces.iter().filter(|one| one.vm == vm);
        let last = ran.max_by_key(|one| one.windows.last().map(|window| window.to));
        last.map(|one| one.host.clone())
    }

    /// What lists said in the round.
    pub fn shown(&self) -> Vec<Shown> {
        lock(&self.shown).clone()
    }

    /// Watches QEMUs until the end.
    pub fn sample(&self) {
        let _ = rustix::process::setpriority_process(None, SAMPLER_NICE);
        let mut others = BTreeMap::new();
        let mut looked_again = 0;
        while !self.is_over() {
            let again = self.now().saturating_sub(looked_again) > AGAIN.as_nanos() as u64;
            if again {
                looked_again = self.now();
            }
            self.discover(&mut others, again);
            self.look();
            std::thread::sleep(EVERY);
        }
    }

    /// Finds new QEMUs. `others` are processes that were none when they were last looked at, with the time of the first look.
    fn discover(&self, others: &mut BTreeMap<i32, u64>, again: bool) {
        let now = self.now();
        let alive: BTreeSet<i32> = pids().collect();
        others.retain(|pid, _| alive.contains(pid));
        for pid in alive {
            let known = lock(&self.live).contains_key(&pid);
            if known || (others.contains_key(&pid) && !again) {
                continue;
            }
            let first_seen = *others.entry(pid).or_insert(now);
            if let Some(one) = self.qemu(pid, first_seen) {
                others.remove(&pid);
                lock(&self.live).insert(pid, one);
            }
        }
    }

    fn qemu(&self, pid: i32, first_seen: u64) -> Option<Live> {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if !line.contains("qemu-system") {
            return None;
        }
        let vm = vm_of(&line)?;
        let namespace = std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?;
        let (host, _, root) = self.hosts.iter().find(|(_, ns, _)| *ns == namespace)?;
        let ram_path = root.join(after(&line, "mem-path=")?.trim_start_matches('/'));
        Some(Live {
            trace: Trace {
                vm: vm.to_owned(),
                host: host.clone(),
                pid,
                incoming: line.contains(" -incoming "),
                began: first_seen,
                gone: None,
                vcpus: 0,
                windows: Vec::new(),
                passes: Vec::new(),
            },
            vcpus: Vec::new(),
            ram: None,
            ram_path,
            meter: Meter::new(first_seen),
            passes_at: 0,
        })
    }

    fn look(&self) {
        let mut live = lock(&self.live);
        let mut gone = Vec::new();
        for (pid, one) in live.iter_mut() {
            if one.look(|| self.now(), &self.disks).is_none() {
                gone.push(*pid);
            }
        }
        for pid in gone {
            if let Some(mut one) = live.remove(&pid) {
                one.trace.gone = Some(self.now());
                lock(&self.ended).push(one.trace);
            }
        }
    }

    /// Asks the controller for its list again and again until the end. A controller that is away says nothing.
    pub fn list(&self, stack: &Stack) {
        while !self.is_over() {
            let asked = self.now();
            let list = stack.json_within("controller", &["vm", "list"], Duration::from_secs(3));
            let answered = self.now();
            for vm in list.iter().flat_map(|list| list.as_array()).flatten() {
                let text = |value: &serde_json::Value| value.as_str().unwrap_or("?").to_owned();
                lock(&self.shown).push(Shown {
                    asked,
                    answered,
                    vm: text(&vm["spec"]["name"]),
                    state: text(&vm["state"]),
                });
            }
            std::thread::sleep(LIST_EVERY);
        }
    }
}

impl Live {
    /// Reads its CPU time and passes; nothing when it has ended.
    fn look(&mut self, now: impl Fn() -> u64, disks: &Disks) -> Option<()> {
        if self.vcpus.is_empty() {
            self.vcpus = vcpus(self.trace.pid)?;
            self.trace.vcpus = self.vcpus.len();
        }
        let mut used_ns = 0;
        for vcpu in &mut self.vcpus {
            used_ns += vcpu.look()?;
        }
        let at = now();
        self.trace.windows.extend(self.meter.look(at, used_ns));
        if at.saturating_sub(self.passes_at) >= PASSES_EVERY.as_nanos() as u64 {
            self.passes_at = at;
            self.read_passes(at, disks);
        }
        Some(())
    }

    fn read_passes(&mut self, at: u64, disks: &Disks) {
        if self.ram.is_none() {
            self.ram = File::open(&self.ram_path).ok();
        }
        let control = self.ram.as_ref().and_then(|ram| checker::control(ram).ok());
        if let Some(control) = control.filter(|control| control.state != 0) {
            self.trace.passes.push((at, control.passes));
            if let Some(ram) = &self.ram {
                disks.note(&self.trace.vm, ram);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The word after `key` on a command line, up to a comma or space.
fn after<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(key)?;
    rest.split([',', ' ']).next()
}

/// Which VM's guest a QEMU with this command line runs.
fn vm_of(line: &str) -> Option<&str> {
    after(line, "guest=").filter(|vm| *vm != TRIAL)
}

/// A QEMU's vCPU threads; none yet when they are not there; nothing when it has ended.
fn vcpus(pid: i32) -> Option<Vec<Vcpu>> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut found = Vec::new();
    for task in tasks.flatten() {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let id = task.file_name().to_str().and_then(|id| id.parse().ok());
        if let (true, Some(id)) = (name.starts_with("CPU "), id) {
            found.push(Vcpu {
                schedstat: File::open(task.path().join("schedstat")).ok()?,
                stat: File::open(task.path().join("stat")).ok()?,
                ran_ns: 0,
            });
            let thread = rustix::process::Pid::from_raw(id);
            let _ = rustix::process::setpriority_process(thread, VCPU_NICE);
        }
    }
    Some(found)
}

impl Vcpu {
    /// Nanoseconds that it has run as a thread of QEMU. The last thread of a process takes its memory apart, which is no
    /// run of the guest and can take longer than [`crate::soak::meter::ADVANCE_NS`].
    fn look(&mut self) -> Option<u64> {
        let (mut ran, mut stat) = ([0; 64], [0; 1024]);
        let ran_ns = words(&self.schedstat, &mut ran)?;
        let ran_ns = ran_ns.split_whitespace().next()?.parse().ok()?;
        // Read after the time: what a thread that is not ending has run, it ran before its end.
        if ran_ns != self.ran_ns && !is_ending(words(&self.stat, &mut stat)?)? {
            self.ran_ns = ran_ns;
        }
        Some(self.ran_ns)
    }
}

fn words<'a>(file: &File, text: &'a mut [u8]) -> Option<&'a str> {
    let length = file.read_at(text, 0).ok()?;
    std::str::from_utf8(text.get(..length)?).ok()
}

/// Whether the kernel is ending the thread of this `/proc/PID/task/TID/stat`: a bit of its ninth field.
fn is_ending(stat: &str) -> Option<bool> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let flags: u64 = after_name.split_whitespace().nth(6)?.parse().ok()?;
    Some(flags & PF_EXITING != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_takes_its_process_apart_runs_no_guest() {
        let stat = |flags: u64| format!("7 (CPU 0/TCG) R) S 1 7 7 0 -1 {flags} 42 0 0 0 9 8");
        assert_eq!(is_ending(&stat(0x0040_0040)), Some(false));
        assert_eq!(is_ending(&stat(0x0040_0044)), Some(true));
        assert_eq!(is_ending("7 (CPU"), None);
        let own = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        assert_eq!(is_ending(&own), Some(false), "{own}");
    }

    #[test]
    fn the_guest_by_which_an_agent_tries_qemu_is_no_lost_vm() {
        assert_eq!(
            vm_of("qemu-system-x86_64 -name guest=vm2,debug-threads=on"),
            Some("vm2")
        );
        assert_eq!(
            vm_of("qemu-system-x86_64 -name guest=godwit-trial,debug-threads=on"),
            None
        );
        assert_eq!(vm_of("qemu-system-x86_64 --version"), None);
    }
}
