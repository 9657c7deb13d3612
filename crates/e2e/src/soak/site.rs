//! The site that a soak breaks: the product as it is shipped on three test hosts, and what was done to it so far.
//!
//! Owns what is broken at the moment (processes stopped, links cut, disks full, hosts without power), so that all of it
//! can be undone. Knows of the product what [`Stack`] knows, and where its state lies.

use crate::soak::disks::{Disks, path_in, set_pace};
use crate::soak::watch::Watch;
use crate::stack::site::HOST_STATE;
use crate::stack::{
    CONTINUE, CONTROLLER_DATABASE, Counter, HostPlan, LONG, Link, Plan, Ran, STOP, Stack, Survives,
    signal,
};
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::testvol::Volume;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for a command of a person's; then its outcome is unknown.
pub const COMMAND: Duration = Duration::from_secs(6);
/// Longest wait for a question.
const QUESTION: Duration = Duration::from_secs(4);
/// The machine that copies of hosts' disks are started on.
pub const CLONES: &str = "client";
/// File system of the state directories, in each machine.
const DISK: &str = "/var/lib";
/// MiB of a guest.
const MEMORY_MIB: u32 = 32;
/// Idle turns of the guests for each page.
const SPIN: u32 = 400_000;

pub struct Site {
    /// The machines and daemons.
    pub stack: Arc<Stack>,
    pub hosts: Vec<String>,
    pub vms: Vec<String>,
    /// What looks at it.
    pub watch: Arc<Watch>,
    /// What those with disks must have on them.
    pub disks: Arc<Disks>,
    /// By VM and host: where a host's record had the disk that was emptied since.
    pub(super) noted: Mutex<BTreeMap<(String, String), PathBuf>>,
    /// Hosts that joined anew, on which nobody knows what their former life left in datastores.
    rejoined: Mutex<BTreeSet<String>>,
    files: Vec<String>,
    off: BTreeSet<String>,
    removed: BTreeSet<String>,
    full: BTreeSet<String>,
    cut: Vec<(String, Link)>,
    logs_kept: u32,
    watchers: Vec<JoinHandle<()>>,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.watch.end();
        for watcher in self.watchers.drain(..) {
            let _ = watcher.join();
        }
    }
}

impl Site {
    /// Brings it up with so many VMs that run, one after the other on each host.
    pub fn new(vms: usize) -> Result<Self> {
        let plan = Plan {
            more: 1,
            stores: true,
            ..Plan::default()
        };
        let stack = Arc::new(Stack::new("soak", &plan)?);
        set_pace(&stack)?;
        let vms: Vec<String> = (0..vms).map(|number| format!("vm{number}")).collect();
        let disks = Arc::new(Disks::new(&vms)?);
        let watch = Arc::new(Watch::new(&stack, &disks)?);
        let (sampler, lister) = (Arc::clone(&watch), (Arc::clone(&watch), Arc::clone(&stack)));
        let watchers = vec![
            std::thread::spawn(move || sampler.sample()),
            std::thread::spawn(move || lister.0.list(&lister.1)),
        ];
        let mut site = Self {
            hosts: stack.hosts(),
            stack,
            vms,
            watch,
            disks,
            noted: Mutex::default(),
            rejoined: Mutex::default(),
            files: Vec::new(),
            off: BTreeSet::new(),
            removed: BTreeSet::new(),
            full: BTreeSet::new(),
            cut: Vec::new(),
            logs_kept: 0,
            watchers,
        };
        for (number, vm) in site.vms.clone().iter().enumerate() {
            site.make_vm(number, vm)?;
        }
        Ok(site)
    }

    fn make_vm(&mut self, number: usize, vm: &str) -> Result<()> {
        let host = self
            .hosts
            .get(number % self.hosts.len())
            .context("no host")?;
        let file = if self.disks.has(vm) {
            let path = self.disks.make(&self.stack, vm, host)?;
            self.describe_with_disk(vm, &path)?
        } else {
            let mut guest = Counter::flat(vm, MEMORY_MIB).slowed(SPIN);
            if number == 0 {
                guest = guest.with("[[nic]]\nport_group = \"vm\"");
            }
            self.stack.describe_counter(&guest)?
        };
        self.stack.ok("controller", &["vm", "create", &file])?;
        self.stack
            .ok("controller", &["vm", "start", vm, "--on", host])?;
        self.files.push(file);
        Ok(())
    }

    /// The description of a VM.
    pub fn file(&self, vm: &str) -> Result<&str> {
        let number = self.vms.iter().position(|one| one == vm);
        let file = number.and_then(|number| self.files.get(number));
        Ok(file.context("no such VM")?)
    }

    /// Runs a person's command at the controller.
    pub fn person(&self, arguments: &[&str]) -> Result<Ran> {
        self.stack.run_within("controller", arguments, COMMAND)
    }

    pub fn ask(&self, arguments: &[&str]) -> Result<Value> {
        self.stack.json_within("controller", arguments, QUESTION)
    }

    /// Asks a host's agent.
    pub fn ask_host(&self, host: &str, arguments: &[&str]) -> Result<Value> {
        self.stack.json_within(host, arguments, QUESTION)
    }

    /// The other hosts than this.
    pub fn others(&self, host: &str) -> Vec<String> {
        let others = self.hosts.iter().filter(|one| *one != host);
        others.cloned().collect()
    }

    /// Whether a host has power.
    pub fn is_on(&self, host: &str) -> bool {
        !self.off.contains(host)
    }

    /// Whether all daemons live, all hosts have power and room, and all links carry.
    pub fn is_whole(&self) -> bool {
        let mut machines = self.machines().into_iter();
        let lives = machines.all(|machine| self.stack.daemon_lives(&machine));
        lives && self.off.is_empty() && self.full.is_empty() && self.cut.is_empty()
    }

    /// Ends a daemon; one that has ended is no error.
    pub fn kill_daemon(&self, machine: &str) {
        let _ = self.stack.kill_daemon(machine);
    }

    /// Starts a daemon that does not run, on a machine with power.
    pub fn start_daemon(&self, machine: &str) -> Result<()> {
        if self.stack.daemon_lives(machine) || self.off.contains(machine) {
            return Ok(());
        }
        self.kill_daemon(machine); // collects what ended by itself
        self.stack.start_daemon(machine)
    }

    /// Cuts a host's link.
    pub fn cut(&mut self, host: &str, link: Link) -> Result<()> {
        self.cut.push((host.to_owned(), link));
        Ok(self.stack.lab.cut_link(host, link)?)
    }

    /// Heals a host's link.
    pub fn heal(&mut self, host: &str, link: Link) -> Result<()> {
        self.cut.retain(|one| one != &(host.to_owned(), link));
        Ok(self.stack.lab.heal_link(host, link)?)
    }

    fn shell(&self, machine: &str, script: &str) -> Result<()> {
        let mut command = self.stack.machine(machine)?.command("sh");
        let output = command.args(["-c", script]).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "'{script}' on {machine}: {said}");
        Ok(())
    }

    /// Leaves a machine's state directories no room.
    pub fn fill_disk(&mut self, machine: &str) -> Result<()> {
        self.full.insert(machine.to_owned());
        let volumes = self.stack.machine(machine)?.volumes();
        volumes.iter().for_each(Volume::fill);
        if !volumes.is_empty() {
            return Ok(());
        }
        let script = format!(
            "used=$(df -k --output=used {DISK} | tail -n 1) && mount -o remount,size=${{used}}k {DISK}"
        );
        self.shell(machine, &script)
    }

    /// Gives them room again.
    pub fn clear_disk(&mut self, machine: &str) -> Result<()> {
        self.full.remove(machine);
        let volumes = self.stack.machine(machine)?.volumes();
        for volume in volumes {
            volume.change(|settings| settings.capacity = None);
        }
        if !volumes.is_empty() {
            return Ok(());
        }
        self.shell(machine, &format!("mount -o remount,size=50% {DISK}"))
    }

    /// Takes hosts' power at the same time: what was not synced is lost, all that runs there ends, and what a reboot
    /// empties is empty.
    pub fn power_off(&mut self, hosts: &[String]) -> Result<()> {
        let mut going = Vec::new();
        for host in hosts {
            if self.off.insert(host.clone()) {
                self.keep_logs(host);
                going.push((host.clone(), self.survives()));
            }
        }
        let stack = &self.stack;
        std::thread::scope(|scope| {
            let cut = |(host, survives): &(String, Survives)| {
                let (host, survives) = (host.clone(), *survives);
                scope.spawn(move || Ok(stack.machine(&host)?.power_cut(survives)?))
            };
            let cuts: Vec<_> = going.iter().map(cut).collect();
            let ended = |cut: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                cut.join()
                    .map_err(|_| anyhow::anyhow!("a power cut panicked"))?
            };
            cuts.into_iter().try_for_each(ended)
        })?;
        for (host, _) in going {
            self.kill_daemon(&host);
            // What is in memory is gone.
            let gone = "rm -rf /run/godwit; for tap in $(ls /sys/class/net | grep ^gw); do ip link delete $tap; done";
            self.shell(&host, gone)?;
        }
        Ok(())
    }

    /// What a disk has written that nobody waited for: nothing every other time.
    fn survives(&self) -> Survives {
        match self.logs_kept {
            kept if kept % 2 == 0 => Survives::Nothing,
            kept => Survives::Some(kept.into()),
        }
    }

    /// Gives a host its power back.
    pub fn power_on(&mut self, host: &str) -> Result<()> {
        self.off.remove(host);
        if self.removed.remove(host) {
            return self.rejoin(host);
        }
        self.start_daemon(host)
    }

    /// From here on the controller knows a host no more; it comes back with an empty disk, as a new one.
    pub fn forget(&mut self, host: &str) {
        self.removed.insert(host.to_owned());
    }

    /// Whether the controller knows a host no more.
    pub fn is_removed(&self, host: &str) -> bool {
        self.removed.contains(host)
    }

    fn rejoin(&self, host: &str) -> Result<()> {
        self.note_disks(host)?;
        let mut rejoined = self.rejoined.lock().unwrap_or_else(PoisonError::into_inner);
        rejoined.insert(host.to_owned());
        drop(rejoined);
        for directory in [HOST_STATE, "/etc/godwit"] {
            let script = format!("find {directory} -mindepth 1 -delete && sync {directory}");
            self.shell(host, &script)?;
        }
        let number = self.hosts.iter().position(|one| one == host);
        let number = u8::try_from(number.context("no such host")?)?;
        // Refused while another host, which may just be starting, is not heard: a person tries again.
        self.stack.until("a removed host joins anew", LONG, || {
            self.stack.join(number, &HostPlan::default())?;
            Ok(true)
        })
    }

    /// A person removes what the former lives of hosts left in their datastores, once all VMs run. Gives what was removed.
    pub fn put_away(&self, homes: &BTreeMap<String, String>) -> Result<Vec<String>> {
        let mut rejoined = self.rejoined.lock().unwrap_or_else(PoisonError::into_inner);
        let mut removed = Vec::new();
        for host in std::mem::take(&mut *rejoined) {
            let mut left = self.images(&host)?;
            for vm in homes.iter().filter(|(_, home)| **home == host) {
                let view = self.ask_host(&host, &["vm", "show", vm.0])?;
                if let Some(path) = path_in(&view) {
                    left.remove(Path::new(path));
                }
            }
            for path in left {
                removed.push(format!("a person removes {} on {host}", path.display()));
                std::fs::remove_file(self.stack.inside(&host, path)?)?;
            }
        }
        Ok(removed)
    }

    /// Starts a copy of a host's disk, as it is now, on another machine.
    pub fn start_clone(&self, host: &str) -> Result<()> {
        let state = self.stack.dir().join("clone");
        if state.exists() {
            std::fs::remove_dir_all(&state)?;
        }
        copy_tree(&self.stack.inside(host, HOST_STATE)?, &state)?;
        self.stack.start_clone(host, &state)
    }

    /// Undoes all that is broken.
    pub fn heal_all(&mut self) -> Result<()> {
        if self.stack.daemon_pid(CLONES).is_some() {
            self.stack.power_off(CLONES)?;
        }
        for machine in self.machines() {
            for process in self.stack.machine(&machine)?.processes()? {
                signal(process.pid_outside, CONTINUE)?;
            }
        }
        for (host, link) in std::mem::take(&mut self.cut) {
            self.stack.lab.heal_link(&host, link)?;
        }
        for machine in std::mem::take(&mut self.full) {
            self.clear_disk(&machine)?;
        }
        self.start_daemon("controller")?;
        let off = std::mem::take(&mut self.off);
        // Those that join anew last: the others are asked about them.
        let on = self.hosts.iter().filter(|host| !off.contains(*host));
        for host in on.cloned().collect::<Vec<_>>() {
            self.start_daemon(&host)?;
        }
        for host in off {
            self.power_on(&host)?;
        }
        Ok(())
    }

    fn machines(&self) -> Vec<String> {
        let mut machines = self.hosts.clone();
        machines.push("controller".to_owned());
        machines
    }

    /// Keeps copies of all durable state, for faults that put them back.
    pub fn keep_copies(&self) -> Result<()> {
        let copies = self.copies();
        if copies.exists() {
            std::fs::remove_dir_all(&copies)?;
        }
        std::fs::create_dir_all(&copies)?;
        let controller = self
            .stack
            .daemon_pid("controller")
            .context("no controller")?;
        // A database that is being written is no copy.
        signal(controller, STOP)?;
        let kept = self.copy_database(&copies);
        signal(controller, CONTINUE)?;
        kept?;
        for host in &self.hosts {
            copy_tree(&self.stack.inside(host, HOST_STATE)?, &copies.join(host))?;
        }
        Ok(())
    }

    fn copy_database(&self, to: &Path) -> Result<()> {
        for file in self.database()? {
            if file.exists() {
                let name = file.file_name().context("no name")?;
                std::fs::copy(&file, to.join(name))?;
            }
        }
        Ok(())
    }

    fn copies(&self) -> PathBuf {
        self.stack.dir().join("copies")
    }

    fn database(&self) -> Result<Vec<PathBuf>> {
        let path = self.stack.inside("controller", CONTROLLER_DATABASE)?;
        let with = |suffix: &str| PathBuf::from(format!("{}{suffix}", path.display()));
        Ok(["", "-wal", "-shm"].map(with).to_vec())
    }

    /// Puts the controller's old database back and starts it.
    pub fn restore_database(&self) -> Result<()> {
        self.kill_daemon("controller");
        for file in self.database()? {
            let kept = self.copies().join(file.file_name().context("no name")?);
            if file.exists() {
                std::fs::remove_file(&file)?;
            }
            if kept.exists() {
                std::fs::copy(kept, file)?;
            }
        }
        self.start_daemon("controller")
    }

    /// Puts the old state of a host without power back.
    pub fn restore_host(&self, host: &str) -> Result<()> {
        ensure!(!self.is_on(host), "host {host} has power");
        self.shell(host, &format!("find {HOST_STATE} -mindepth 1 -delete"))?;
        let kept = self.copies().join(host);
        copy_tree(&kept, &self.stack.inside(host, HOST_STATE)?)?;
        // The test volumes know the sync of one file or directory, not that of all.
        self.shell(host, &format!("find {HOST_STATE} -exec sync {{}} +"))
    }

    /// Appends what a host's VM processes said to a file that stays.
    pub fn keep_logs(&mut self, host: &str) {
        self.logs_kept += 1;
        let to = self
            .stack
            .dir()
            .join(format!("{host}-vms-{}.log", self.logs_kept));
        let script =
            "for log in /run/godwit/vms/*/vm-process.log; do echo \"== $log\"; cat $log; done";
        let said = self.stack.machine(host).ok().and_then(|machine| {
            let output = machine.command("sh").args(["-c", script]).output().ok()?;
            Some(output.stdout)
        });
        // Logs are for the reader; a round does not fail for want of them.
        let _ = std::fs::write(to, said.unwrap_or_default());
    }
}

/// How often a directory is copied in which files were replaced meanwhile.
const COPIES_MAX: usize = 20;
/// How `cp` ends its word of such a file.
const REPLACED: &str = "as it was replaced while being copied";

/// Copies what is in a directory, as a copy of a running host is made: what goes away meanwhile is not in it.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let from = &from.join(".");
    for _ in 0..COPIES_MAX {
        let copied = Command::new("cp")
            .arg("-a")
            .arg("--")
            .args([from, to])
            .output()?;
        let said = String::from_utf8_lossy(&copied.stderr);
        let all = |end: &str| !said.is_empty() && said.lines().all(|line| line.ends_with(end));
        if copied.status.success() || all("No such file or directory") {
            return Ok(());
        }
        // Not in the copy at all: it is made again, over what there is.
        let replaced = said.lines().any(|line| line.ends_with(REPLACED));
        ensure!(replaced, "copying {} failed: {said}", from.display());
    }
    anyhow::bail!("{} does not stand still to be copied", from.display())
}
