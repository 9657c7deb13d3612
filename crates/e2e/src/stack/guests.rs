//! A stack's VMs: their descriptions, and their memory as it is read from outside.
//!
//! Owns nothing; kernels lie in the stack's directory. Refuses: a guest that booted again where none should.

use super::{KILL, LONG, SOON, Stack, signal};
use anyhow::{Context as _, Result, bail, ensure};
use godwit_testkit::guest::checker::{self, Checked};
use godwit_testkit::guest::counter::{self, CounterSpec};
use godwit_testkit::lab::Process;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::PathBuf;

/// Pages whose counters are looked at to see whether a guest counts.
const SAMPLES: u32 = 128;
/// Where a counter guest's program lies in its file.
const PROGRAM: usize = 0x200;
/// Halts with interrupts off, again and again.
const HALT: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];

/// A guest of a stack that counts for ever.
#[derive(Debug, Clone)]
pub struct Counter {
    pub name: String,
    pub memory_mib: u64,
    pub spec: CounterSpec,
    /// Further lines of the description.
    pub lines: String,
}

impl Counter {
    /// A guest of 32 MiB that steps all its pages above 1 MiB.
    pub fn small(name: &str) -> Self {
        Self::flat(name, 32)
    }

    /// A guest that steps all pages above 1 MiB as fast as it can.
    pub fn flat(name: &str, memory_mib: u32) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: memory_mib.into(),
            spec: CounterSpec::flat(memory_mib),
            lines: String::new(),
        }
    }

    /// The same guest with further lines in its description.
    pub fn with(mut self, lines: &str) -> Self {
        self.lines.push_str(lines);
        self.lines.push('\n');
        self
    }

    /// The same guest, slower by so many idle turns a page.
    pub fn slowed(mut self, spin: u32) -> Self {
        self.spec = self.spec.slowed(spin);
        self
    }
}

impl Stack {
    /// Writes a VM's description and gives its path.
    pub fn describe(&self, name: &str, text: &str) -> Result<String> {
        let path = self.dir().join(format!("{name}.toml"));
        std::fs::write(&path, text)?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// The description of a counter guest; its kernel is written beside it.
    pub fn describe_counter(&self, guest: &Counter) -> Result<String> {
        let kernel = self.dir().join(format!("{}.kernel", guest.name));
        std::fs::write(&kernel, counter::build(&guest.spec)?)?;
        let text = format!(
            "name = \"{}\"\nvcpus = 1\nmemory_mib = {}\nkernel = \"{}\"\naccelerator = \"tcg\"\n{}",
            guest.name,
            guest.memory_mib,
            kernel.display(),
            guest.lines
        );
        self.describe(&guest.name, &text)
    }

    /// The description of a VM of 32 MiB that does nothing: its processor halts at once.
    pub fn describe_idle(&self, name: &str) -> Result<String> {
        let mut kernel = counter::build(&CounterSpec::flat(32))?;
        let program = kernel.get_mut(PROGRAM..).context("no program")?;
        let start = program.get_mut(..HALT.len()).context("no program")?;
        start.copy_from_slice(&HALT);
        let path = self.dir().join(format!("{name}.kernel"));
        std::fs::write(&path, kernel)?;
        let text = format!(
            "name = \"{name}\"\nvcpus = 1\nmemory_mib = 32\nkernel = \"{}\"\naccelerator = \"tcg\"\n",
            path.display()
        );
        self.describe(name, &text)
    }

    /// Makes a VM of a counter guest, starts it on a host and waits until it counts.
    pub fn start_counter(&self, guest: &Counter, host: &str) -> Result<()> {
        let file = self.describe_counter(guest)?;
        self.ok("controller", &["vm", "create", &file])?;
        self.ok("controller", &["vm", "start", &guest.name, "--on", host])?;
        self.wait_counts(&guest.name, host)
    }

    /// Powers a VM off and deletes it.
    pub fn remove(&self, vm: &str) -> Result<()> {
        self.ok("controller", &["vm", "stop", vm, "--force"])?;
        self.until(&format!("VM {vm} is off"), SOON, || {
            Ok(self.vm(vm)?["state"] == "stopped")
        })?;
        self.ok("controller", &["vm", "delete", vm]).map(drop)
    }

    /// A VM as the controller sees it.
    pub fn vm(&self, vm: &str) -> Result<Value> {
        self.json("controller", &["vm", "show", vm])
    }

    /// A VM as a host's agent sees it.
    pub fn vm_at(&self, vm: &str, host: &str) -> Result<Value> {
        self.json(host, &["vm", "show", vm])
    }

    /// The file that is a VM's memory on a host; there must be exactly one.
    pub fn ram_file(&self, vm: &str, host: &str) -> Result<PathBuf> {
        let files = self.ram_files(vm, host)?;
        match files.as_slice() {
            [one] => Ok(one.clone()),
            other => bail!("VM {vm} has {} RAM files on host {host}", other.len()),
        }
    }

    /// The files of a VM's memory on a host.
    pub fn ram_files(&self, vm: &str, host: &str) -> Result<Vec<PathBuf>> {
        let prefix = format!("{vm}.");
        let entries = match std::fs::read_dir(self.inside(host, "/run/godwit/ram")?) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let files = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        Ok(files.map(|entry| entry.path()).collect())
    }

    /// Passes that a counter guest has made since it booted.
    pub fn passes(&self, vm: &str, host: &str) -> Result<u32> {
        let control = checker::control(&File::open(self.ram_file(vm, host)?)?)?;
        ensure!(control.state != 0, "the guest is still preparing its pages");
        Ok(control.passes)
    }

    /// Counters of some of a counter guest's pages, spread evenly.
    fn sample(&self, vm: &str, host: &str) -> Result<Vec<[u8; 4]>> {
        let ram = File::open(self.ram_file(vm, host)?)?;
        let control = checker::control(&ram)?;
        ensure!(control.state != 0, "the guest is still preparing its pages");
        let pages = control.end_page.saturating_sub(control.first_page);
        let read = |index: u32| {
            let page = control.first_page + pages / SAMPLES * index;
            let mut counter = [0; 4];
            let at = u64::from(page) * counter::PAGE_BYTES + counter::COUNTER_OFFSET;
            ram.read_exact_at(&mut counter, at).map(|()| counter)
        };
        Ok((0..SAMPLES).map(read).collect::<std::io::Result<_>>()?)
    }

    /// Waits until a counter guest has stepped some page: much less than a pass of a slow guest.
    pub fn wait_counts(&self, vm: &str, host: &str) -> Result<()> {
        let first = std::cell::RefCell::new(None);
        self.until(&format!("guest {vm} counts on host {host}"), LONG, || {
            let now = self.sample(vm, host)?;
            let mut first = first.borrow_mut();
            Ok(*first.get_or_insert_with(|| now.clone()) != now)
        })
    }

    /// Waits until a counter guest has made so many more passes.
    pub fn wait_passes(&self, vm: &str, host: &str, more: u32) -> Result<()> {
        let first = std::cell::Cell::new(None);
        self.until(&format!("guest {vm} counts on host {host}"), LONG, || {
            let now = self.passes(vm, host)?;
            let from = first.get().unwrap_or(now);
            first.set(Some(from));
            Ok(now.wrapping_sub(from) >= more)
        })
    }

    /// Pauses a counter guest, checks every page that it counts, and lets it go on. It must never have booted again.
    pub fn check_guest(&self, vm: &str, host: &str) -> Result<Checked> {
        self.wait_counts(vm, host)?;
        self.ok("controller", &["vm", "pause", vm])?;
        let checked = checker::check(&File::open(self.ram_file(vm, host)?)?);
        self.ok("controller", &["vm", "resume", vm])?;
        let checked = checked.with_context(|| format!("memory of guest {vm} on host {host}"))?;
        ensure!(
            checked.control.boots == 1,
            "guest {vm} has booted {} times",
            checked.control.boots
        );
        Ok(checked)
    }

    /// Kills a VM's process on a host; its agent starts another one, which takes QEMU and disks over.
    pub fn kill_vm_process(&self, vm: &str, host: &str) -> Result<()> {
        let pid =
            || -> Result<Option<i64>> { Ok(self.vm_at(vm, host)?["vm_process_pid"].as_i64()) };
        let before = pid()?.context("no VM process")?;
        let key = format!("/{vm}/");
        let processes = self.machine(host)?.processes()?;
        let mut own = processes.iter().filter(|process| {
            process.command_line.contains("vm-process") && process.command_line.contains(&key)
        });
        signal(own.next().context("no VM process")?.pid_outside, KILL)?;
        self.until("another VM process has taken over", SOON, || {
            let now = pid()?.filter(|now| *now != before);
            Ok(now.is_some() && self.vm_at(vm, host)?["state"] == "running")
        })
    }

    /// Makes a directory on a host that its QEMUs may make files in.
    pub fn make_directory(&self, host: &str, path: &str) -> Result<()> {
        let directory = self.inside(host, path)?;
        std::fs::create_dir_all(&directory)?;
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o1777))?;
        Ok(())
    }

    /// QEMUs of a VM on a host.
    pub fn hypervisors(&self, vm: &str, host: &str) -> Result<Vec<Process>> {
        let of_vm = |process: &Process| {
            let line = &process.command_line;
            line.contains("qemu-system") && line.contains(&format!("/{vm}."))
        };
        let mut processes = self.machine(host)?.processes()?;
        processes.retain(of_vm);
        Ok(processes)
    }
}
