//! One host of a test: a directory, a VM process, and the socket to it.
//!
//! Owns the VM process's life (and on drop its QEMU's). Waits are for events, with deadlines.

use anyhow::{Context as _, bail};
use godwit_blockio::label::{self, End};
use godwit_ownership::{Action, Event, HostRecord, Qemu, VmCore};
use godwit_qemu::layered::linked_to;
use godwit_store::{VmStore, load_json, save_json};
use godwit_types::host_api::{DISKS_FILE, HostVm, SPEC_FILE, VmAnswer, VmProcessConfig, VmRequest};
use godwit_types::image::KnownImage;
use godwit_types::migration::{DiskToMove, MigrationReport};
use godwit_types::snapshots::description_of;
use godwit_types::vm::{Accelerator, DiskSpec, VmSpec, VmState};
use godwit_types::{Generation, HostName, MigrationId, VmName};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A user without privileges that every system has.
const NOBODY: u32 = 65534;

#[derive(Debug)]
pub struct Host {
    pub name: HostName,
    /// The VM of the test.
    pub vm: VmName,
    dir: PathBuf,
    ram: PathBuf,
    pub addresses: Vec<IpAddr>,
    accelerator: Accelerator,
    /// First and last port for migrations; (0, 0) is any.
    pub ports: (u16, u16),
    pub qemu: Mutex<PathBuf>,
    /// UEFI's program and empty variables; empty: those of the distribution.
    pub uefi: Mutex<[String; 2]>,
    process: Mutex<Option<Child>>,
    fault: Mutex<Option<Fault>>,
    /// Shortest silence in a switchover that counts, ms; the product's is 500, which a busy test machine exceeds.
    pub patience_ms: AtomicU32,
    starts: AtomicU32,
    starting: Mutex<()>,
    /// A directory that each host has for itself, and the place where its processes find it.
    pub storage: Option<Storage>,
}

/// Storage of one host: what others have at the same place is theirs.
#[derive(Debug, Clone)]
pub struct Storage {
    pub own: PathBuf,
    pub place: PathBuf,
}

impl Storage {
    /// Where a file is for this test that the host's processes find at `path`.
    pub fn own_path(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.place) {
            Ok(inside) => self.own.join(inside),
            Err(_) => path.to_owned(),
        }
    }

    /// Runs a program that finds the storage at its place, and nobody else does.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        let script = "mount --bind \"$0\" \"$1\" && shift && exec \"$@\"";
        command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
        command.arg(&self.own).arg(&self.place).arg(program);
        command
    }
}

/// Something that shall happen at a point of the VM process; see `faults.rs` of crate `vmproc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub point: &'static str,
    /// `kill`, `kill-qemu`, `hold` or `slow`.
    pub action: &'static str,
}

impl Host {
    /// A host below `dir`, with guest RAM below `ram`, a tmpfs.
    pub fn new(
        name: &str,
        vm: &str,
        dir: &Path,
        ram: &Path,
        addresses: Vec<IpAddr>,
        accelerator: Accelerator,
    ) -> anyhow::Result<Self> {
        let host = Self {
            name: HostName::new(name)?,
            vm: VmName::new(vm)?,
            dir: dir.join(name),
            ram: ram.join(name),
            addresses,
            accelerator,
            ports: (0, 0),
            qemu: Mutex::new("/usr/bin/qemu-system-x86_64".into()),
            uefi: Mutex::default(),
            process: Mutex::new(None),
            fault: Mutex::new(None),
            patience_ms: AtomicU32::new(3000),
            starts: AtomicU32::new(0),
            starting: Mutex::new(()),
            storage: None,
        };
        for dir in [host.state_dir(), host.run_dir(), host.ram.clone()] {
            std::fs::create_dir_all(&dir)?;
        }
        Ok(host)
    }

    /// Durable files of the VM.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state/vms").join(self.vm.as_str())
    }

    /// Sockets and QEMU's identity.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("run/vms").join(self.vm.as_str())
    }

    /// The disks that go along with the VM when it leaves, as the controller learns of them.
    pub fn disks_to_move(&self, spec: &VmSpec) -> anyhow::Result<Vec<DiskToMove>> {
        let along = spec.disks.iter().filter(|disk| disk.goes_along());
        let measure = |disk: &DiskSpec| -> anyhow::Result<DiskToMove> {
            let path = Path::new(&disk.path);
            let path = match &self.storage {
                Some(storage) => storage.own_path(path),
                None => path.to_owned(),
            };
            // A block device has its length at its end or in its label.
            let end = End::ByLabel(None);
            let bytes = label::length(std::fs::File::open(&path)?.as_fd(), end)?;
            let name = disk.name.clone();
            let layered = description_of(Path::new(&path)).exists();
            Ok(DiskToMove {
                layered,
                name,
                bytes,
                used_bytes: bytes,
                linked: layered.then(|| linked_to(&path)).flatten(),
            })
        };
        along.map(measure).collect()
    }

    /// The VM process's log, for failures.
    pub fn log(&self) -> PathBuf {
        self.dir.join("vm-process.log")
    }

    fn config(&self) -> VmProcessConfig {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        let uefi = self.uefi.lock().unwrap_or_else(PoisonError::into_inner);
        let [uefi_code, uefi_variables] = uefi.clone();
        VmProcessConfig {
            vm: self.vm.clone(),
            host: self.name.clone(),
            state_dir: text(self.state_dir()),
            run_dir: text(self.run_dir()),
            ram_dir: text(self.ram.clone()),
            qemu: text(
                self.qemu
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone(),
            ),
            // A user without privileges may not open /dev/kvm everywhere.
            qemu_uid: if self.accelerator == Accelerator::Kvm {
                0
            } else {
                NOBODY
            },
            qemu_gid: if self.accelerator == Accelerator::Kvm {
                0
            } else {
                NOBODY
            },
            migration_ports: self.ports,
            port_groups: Default::default(),
            migration_addresses: self.addresses.clone(),
            accelerator: self.accelerator,
            uefi_code,
            uefi_variables,
            reserved_dirs: Vec::new(),
        }
    }

    /// Makes the VM known here and gives this host generation 1, as the agent does for a new VM.
    pub fn grant(&self, spec: &VmSpec) -> anyhow::Result<()> {
        save_json(&self.state_dir().join(SPEC_FILE), spec)?;
        let mut store = VmStore::open(&self.dir.join("state"), &self.vm)?;
        let record = HostRecord::absent(self.vm.clone());
        let (mut core, mut actions) = VmCore::recover(record, self.name.clone(), Qemu::Dead)?;
        let mut granted = false;
        loop {
            let Some(Action::Persist(record)) = actions
                .into_iter()
                .find(|action| matches!(action, Action::Persist(_)))
            else {
                if granted {
                    return Ok(());
                }
                granted = true;
                actions = core.handle(Event::Granted {
                    generation: Generation(1),
                    expect: Generation(0),
                });
                continue;
            };
            store.persist(&record)?;
            actions = core.handle(Event::Persisted);
        }
    }

    /// Starts the VM process and waits until its socket answers.
    pub fn start_process(&self) -> anyhow::Result<()> {
        // A test and its supervision may find at the same time that none lives.
        let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.process_lives() {
            return Ok(());
        }
        let config = self.dir.join("vm-process.json");
        std::fs::write(&config, serde_json::to_vec_pretty(&self.config())?)?;
        let log = File::options().create(true).append(true).open(self.log())?;
        let program = vm_process_program()?;
        let mut command = match &self.storage {
            Some(storage) => storage.command(&program),
            None => Command::new(&program),
        };
        if let Some(fault) = self
            .fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            let _ = std::fs::remove_file(self.mark());
            command
                .env("GODWIT_FAULT", fault.point)
                .env("GODWIT_FAULT_DO", fault.action);
            command.env("GODWIT_FAULT_MARK", self.mark());
        }
        self.starts.fetch_add(1, Ordering::SeqCst);
        let patience_ms = self.patience_ms.load(Ordering::SeqCst);
        command.env("GODWIT_PATIENCE_MS", patience_ms.to_string());
        command.arg(&config).stdout(Stdio::null()).stderr(log);
        // The pipe's end tells the process that its test is gone.
        command.stdin(Stdio::piped());
        // Locked first: a test that hears the new process and kills it must not find the old one here.
        let mut process = self.lock();
        *process = Some(command.spawn()?);
        drop(process);
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.connect().is_err() {
            if let Some(status) = self
                .lock()
                .as_mut()
                .map(Child::try_wait)
                .transpose()?
                .flatten()
            {
                bail!(
                    "the VM process of {} ended at once: {status}; see {}",
                    self.name,
                    self.log().display()
                );
            }
            if Instant::now() > deadline {
                bail!("the VM process of {} does not listen", self.name);
            }
            // The socket appears when the process is ready; there is no event to wait for but its appearance.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Arms a fault for the next start of the VM process, and for that start only.
    pub fn arm(&self, point: &'static str, action: &'static str) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(Fault { point, action });
    }

    fn mark(&self) -> PathBuf {
        self.dir.join("fault.mark")
    }

    /// Whether the armed fault has happened (for `hold`: is happening).
    pub fn fault_happened(&self) -> bool {
        self.mark().exists()
    }

    /// Waits until the armed point is reached.
    pub fn wait_fault(&self, within: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + within;
        while !self.fault_happened() {
            if Instant::now() > deadline {
                bail!(
                    "{} did not reach the armed point within {within:?}",
                    self.name
                );
            }
            // The point is reached inside another process, which says so by a file.
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Lets a held process go on.
    pub fn release(&self) -> anyhow::Result<()> {
        std::fs::remove_file(self.mark()).context("nothing is held")
    }

    /// How often the VM process was started.
    pub fn starts(&self) -> u32 {
        self.starts.load(Ordering::SeqCst)
    }

    /// Where the RAM files of this host are.
    pub fn ram_dir(&self) -> &Path {
        &self.ram
    }

    /// The VM process, if one was started.
    pub fn process_id(&self) -> Option<u32> {
        self.lock().as_ref().map(Child::id)
    }

    /// Whether the VM process lives.
    pub fn process_lives(&self) -> bool {
        self.lock()
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Whether there was a VM process and it has ended by itself.
    pub fn has_died(&self) -> bool {
        self.lock()
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))))
    }

    /// Sends SIGKILL to the VM process and leaves the rest to whoever supervises it.
    pub fn signal_kill(&self) -> anyhow::Result<()> {
        let mut child = self.lock();
        Ok(child.as_mut().context("no VM process")?.kill()?)
    }

    /// Has the VM process become the program that it is, anew.
    pub fn renew(&self) -> anyhow::Result<()> {
        self.become_program(&vm_process_program()?)
    }

    /// Has the VM process become this program.
    pub fn become_program(&self, program: &Path) -> anyhow::Result<()> {
        let program = program.to_string_lossy().into_owned();
        match self.ask(&VmRequest::Renew { program }) {
            // It may become it before its answer is out.
            Ok(_) => Ok(()),
            Err(error) if error.to_string().contains("the VM process ended") => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Ends the VM process with SIGKILL.
    pub fn kill_process(&self) {
        if let Some(mut child) = self.lock().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Ends QEMU with SIGKILL.
    pub fn kill_qemu(&self) -> anyhow::Result<()> {
        let pid = self.vm()?.qemu_pid.context("no QEMU")?;
        kill_pid(pid);
        Ok(())
    }

    /// Tells QEMU to end, as an administrator or a system short of memory does.
    pub fn terminate_qemu(&self) -> anyhow::Result<()> {
        let pid = self.vm()?.qemu_pid.context("no QEMU")?;
        let pid = rustix::process::Pid::from_raw(pid).context("no pid")?;
        Ok(rustix::process::kill_process(
            pid,
            rustix::process::Signal::TERM,
        )?)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.process
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn connect(&self) -> std::io::Result<UnixStream> {
        UnixStream::connect(self.run_dir().join("vm.sock"))
    }

    /// Asks the VM process.
    pub fn ask(&self, request: &VmRequest) -> anyhow::Result<VmAnswer> {
        self.ask_within(request, Duration::from_secs(130))
    }

    /// Asks the VM process, which may be held, and waits so long for the answer.
    pub fn ask_within(&self, request: &VmRequest, wait: Duration) -> anyhow::Result<VmAnswer> {
        let mut stream = self.connect()?;
        stream.set_read_timeout(Some(wait))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        match serde_json::from_str(&answer).context("the VM process ended")? {
            VmAnswer::Error(error) => Err(error.into()),
            answer => Ok(answer),
        }
    }

    pub fn vm(&self) -> anyhow::Result<HostVm> {
        self.vm_within(Duration::from_secs(30))
    }

    /// The VM here, if its process answers so soon.
    pub fn vm_within(&self, patience: Duration) -> anyhow::Result<HostVm> {
        match self.ask_within(&VmRequest::Status, patience)? {
            VmAnswer::Status(status) => Ok(status.vm),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// What the host has written down of the images of its VM's disks.
    pub fn known_images(&self) -> anyhow::Result<Vec<KnownImage>> {
        let written: Option<Value> = load_json(&self.state_dir().join(DISKS_FILE))?;
        let known = written.and_then(|written| written.get("known").cloned());
        Ok(known.map_or(Ok(Vec::new()), serde_json::from_value)?)
    }

    /// The VM's state here.
    pub fn state(&self) -> anyhow::Result<VmState> {
        Ok(self.vm()?.state)
    }

    pub fn report(&self, id: &MigrationId) -> anyhow::Result<MigrationReport> {
        match self.ask(&VmRequest::Report {
            migration: id.clone(),
        })? {
            VmAnswer::Report(report) => Ok(*report),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// The file that is the guest's RAM now.
    pub fn ram_file(&self) -> anyhow::Result<PathBuf> {
        let mut files: Vec<PathBuf> = std::fs::read_dir(&self.ram)?
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
            .map(|entry| entry.path())
            .collect();
        match (files.pop(), files.pop()) {
            (Some(file), None) => Ok(file),
            (None, _) => bail!("host {} has no RAM file", self.name),
            (Some(_), Some(_)) => bail!("host {} has more than one RAM file", self.name),
        }
    }

    /// Whether nothing of the VM is left here: no RAM file, no QEMU identity.
    pub fn is_clean(&self) -> bool {
        self.ram_file()
            .is_err_and(|error| error.to_string().contains("has no RAM file"))
            && !self.run_dir().join("qemu.json").exists()
    }

    /// Waits until the VM is in this state here.
    pub fn wait_state(&self, wanted: VmState, within: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let state = self.state();
            match &state {
                Ok(state) if *state == wanted => return Ok(()),
                _ if Instant::now() > deadline => bail!(
                    "VM on {} is {state:?}, not {wanted}, after {within:?}",
                    self.name
                ),
                // The process has no interface that waits for a state; it is asked again at this pace.
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_process();
        kill_qemu_of(&self.run_dir());
        kill_qemus_on(&self.ram);
        let _ = std::fs::remove_dir_all(&self.ram);
    }
}

/// Ends the QEMU of a run directory, which is a test's own: nobody else's that has the number of one that ended meanwhile.
pub fn kill_qemu_of(run_dir: &Path) {
    kill_qemus_with(&format!("{}/qemu/", run_dir.display()));
}

/// Ends every QEMU whose guest RAM lies in `ram`, a directory of this test alone: also one that a killed VM process
/// had just started and nobody knows of.
pub fn kill_qemus_on(ram: &Path) {
    kill_qemus_with(&format!("mem-path={}/", ram.display()));
}

/// Ends every process with these words, of a QEMU alone, on its command line.
fn kill_qemus_with(words: &str) {
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(words) {
            kill_pid(pid);
        }
    }
}

fn kill_pid(pid: i32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// The program beside the test's own.
fn vm_process_program() -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let program = test
        .ancestors()
        .map(|dir| dir.join("e2e-vm-process"))
        .find(|path| path.is_file());
    program.context("e2e-vm-process is not built: run the tests of this crate with cargo")
}
