//! A guest of our own that shows what QEMU really does on this host, before a person's VM depends on it.
//!
//! QEMU is started as for a VM (same command line, user, sandbox and preloaded library) with a guest of a few
//! instructions in place of a kernel: no disk, no network card, no record. It says one letter to its serial port in
//! each of the modes that a Linux guest goes through, and turns itself off. Owns the process, which is gone when the trial
//! is and also ends with the thread that started it, and a directory with its files. Refuses: anybody else's
//! kernel, since this guest alone runs without a permit.

use crate::command_line::{Accelerator, MachineConfig, Reconnect};
use crate::launch::{Handout, Hypervisor, LaunchError, LaunchSpec, launch_for_caller};
use crate::machine::{CpuModel, RunState};
use crate::process::cpu_time;
use crate::qmp::{EventKind, EventsError, QmpError};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The guest's memory, MiB.
const MEMORY_MIB: u64 = 32;
/// What every trial's directory begins with.
const PREFIX: &str = "godwit-trial.";
/// QEMU's time to be gone.
const KILL_TIME: Duration = Duration::from_secs(10);
/// How often a running guest's processor time is looked at.
const LOOK: Duration = Duration::from_millis(100);
const SECTOR: usize = 512;
/// Sectors that the boot sector says follow it.
const SETUP_SECTORS: usize = 4;

// The guest, started by the boot protocol of 1991: QEMU's loader jumps to 9020:0000 in real mode. Far jumps and the load
// of the descriptor table are spelled in bytes, since assemblers differ about them in 16-bit code.
std::arch::global_asm!(
    ".pushsection .rodata.godwit_trial, \"a\", @progbits",
    ".global godwit_trial_begin",
    ".global godwit_trial_end",
    "godwit_trial_begin:",
    ".code16",
    "cli",
    "mov ax, cs",
    "mov ds, ax",
    "mov dx, 0x3f8",
    "mov al, 'R'",
    "out dx, al",
    // lgdt [9:], 32-bit base
    ".byte 0x66, 0x0f, 0x01, 0x16",
    ".short 9f - godwit_trial_begin",
    "mov eax, cr0",
    "or eax, 1",
    "mov cr0, eax",
    // jmp 08:protected
    ".byte 0x66, 0xea",
    ".long 0x90200 + (2f - godwit_trial_begin)",
    ".short 0x08",
    ".code32",
    "2:",
    "mov ax, 0x10",
    "mov ds, ax",
    "mov es, ax",
    "mov ss, ax",
    "mov dx, 0x3f8",
    "mov al, 'P'",
    "out dx, al",
    // Three tables from 20000h: the first 2 MiB mapped to themselves.
    "cld",
    "mov edi, 0x20000",
    "xor eax, eax",
    "mov ecx, 0xc00",
    "rep stosd",
    "mov dword ptr [0x20000], 0x21003",
    "mov dword ptr [0x21000], 0x22003",
    "mov dword ptr [0x22000], 0x83",
    "mov eax, 0x20000",
    "mov cr3, eax",
    "mov eax, cr4",
    "or eax, 0x20",
    "mov cr4, eax",
    "mov ecx, 0xc0000080",
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "mov eax, cr0",
    "or eax, 0x80000000",
    "mov cr0, eax",
    // jmp 18:long
    ".byte 0xea",
    ".long 0x90200 + (3f - godwit_trial_begin)",
    ".short 0x18",
    ".code64",
    "3:",
    "mov dx, 0x3f8",
    "mov al, 'L'",
    "out dx, al",
    // Power off, where the firmware has put the register.
    "mov dx, 0x604",
    "mov ax, 0x2000",
    "out dx, ax",
    "4:",
    "hlt",
    "jmp 4b",
    "9:",
    ".short 31",
    ".long 0x90200 + (8f - godwit_trial_begin)",
    ".balign 8",
    "8:",
    ".quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff, 0x00af9a000000ffff",
    "godwit_trial_end:",
    ".popsection",
);

unsafe extern "C" {
    static godwit_trial_begin: u8;
    static godwit_trial_end: u8;
}

fn program() -> &'static [u8] {
    // SAFETY: both symbols stand in one read-only section, the second behind the first; only addresses are taken.
    unsafe {
        let begin = &raw const godwit_trial_begin;
        let end = &raw const godwit_trial_end;
        std::slice::from_raw_parts(begin, end.addr() - begin.addr())
    }
}

/// A boot sector that says how many sectors follow, those, and one in place of the rest of a kernel.
fn image() -> Vec<u8> {
    let mut image = vec![0; (SETUP_SECTORS + 2) * SECTOR];
    let (sector, rest) = image.split_at_mut(SECTOR);
    if let Some(count) = sector.get_mut(0x1f1) {
        *count = SETUP_SECTORS as u8;
    }
    if let Some(end) = sector.get_mut(0x1fe..) {
        end.copy_from_slice(&[0x55, 0xaa]);
    }
    for (to, from) in rest.iter_mut().zip(program()) {
        *to = *from;
    }
    image
}

/// Where and as whom a trial runs.
#[derive(Debug, Clone)]
pub struct TrialPlace<'a> {
    pub binary: &'a Path,
    /// Where its files are made; one trial at a time.
    pub dir: &'a TrialDir,
    pub uid: u32,
    pub gid: u32,
    /// What executes the guest.
    pub accelerator: Accelerator,
}

/// How far the guest came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reached {
    Nothing,
    /// 16-bit code, as firmware is.
    RealMode,
    /// 32-bit code.
    ProtectedMode,
    /// 64-bit code with paging, as Linux is.
    LongMode,
}

impl fmt::Display for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "no code at all",
            Self::RealMode => "16-bit code",
            Self::ProtectedMode => "32-bit code",
            Self::LongMode => "64-bit code with paging",
        })
    }
}

/// What came of letting the guest run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// How far it came.
    pub reached: Reached,
    /// Why it went no further; empty if it turned itself off in the end.
    pub stopped_by: String,
}

/// What an accelerator can give a guest's CPU on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuFacts {
    /// All models that QEMU knows, and what is lacking of each.
    pub models: Vec<CpuModel>,
    /// All features that QEMU knows, and whether a guest can have each.
    pub features: BTreeMap<String, bool>,
}

impl CpuFacts {
    /// What is lacking of a model; none where QEMU does not know it.
    pub fn lacking(&self, model: &str) -> Option<&[String]> {
        let found = self.models.iter().find(|known| known.name == model);
        found.map(|model| model.unavailable.as_slice())
    }

    /// Names of the models that a guest can have whole, but those that are whatever a host has.
    pub fn whole(&self) -> impl Iterator<Item = &str> {
        let named = |model: &&CpuModel| !["max", "host", "base"].contains(&model.name.as_str());
        let whole = self
            .models
            .iter()
            .filter(|model| model.unavailable.is_empty());
        whole.filter(named).map(|model| model.name.as_str())
    }
}

/// A directory that is gone with it, and whose leftovers the next one removes.
#[derive(Debug)]
pub struct TrialDir(PathBuf);

impl TrialDir {
    /// Makes one in `base`, on a tmpfs, through which QEMU's user may pass.
    pub fn create(base: &Path) -> io::Result<TrialDir> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        remove_leftovers(base);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("{PREFIX}{}.{count}", std::process::id()));
        DirBuilder::new().mode(0o711).create(&path)?;
        let dir = TrialDir(path);
        fs::set_permissions(&dir.0, Permissions::from_mode(0o711))?;
        Ok(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TrialDir {
    fn drop(&mut self) {
        // What cannot be removed now is a leftover for the next.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Directories of processes that are gone, whose QEMUs went with them.
fn remove_leftovers(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| {
            let (pid, _) = name.strip_prefix(PREFIX)?.split_once('.')?;
            pid.parse::<u32>().ok()
        });
        if let Some(pid) = pid
            && !Path::new(&format!("/proc/{pid}")).exists()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A QEMU with our guest in it, which does not run yet.
#[derive(Debug)]
pub struct Trial {
    hypervisor: Hypervisor,
}

impl Drop for Trial {
    fn drop(&mut self) {
        // A process that cannot be ended here ends with this thread.
        let _ = self
            .hypervisor
            .process
            .kill_verified(Instant::now() + KILL_TIME);
    }
}

impl Trial {
    /// Starts QEMU with this CPU, refused unless the host has all of it if `enforce`. The calling thread must outlive
    /// the trial.
    pub fn start(
        place: &TrialPlace<'_>,
        cpu: (&str, &[(String, bool)]),
        enforce: bool,
        handout: Option<Handout<'_>>,
        deadline: Instant,
    ) -> Result<Trial, LaunchError> {
        let files = |source| LaunchError::Trial {
            path: place.dir.0.clone(),
            source,
        };
        let dir = place.dir.path();
        let (kernel, ram_file) = (dir.join("kernel"), dir.join("ram"));
        fs::write(&kernel, image()).map_err(files)?;
        fs::set_permissions(&kernel, Permissions::from_mode(0o644)).map_err(files)?;
        make_ram(&ram_file, place).map_err(files)?;
        let spec = LaunchSpec {
            binary: place.binary.to_owned(),
            machine: machine(place, cpu, enforce, kernel, ram_file),
            monitors: vec![dir.join("qmp").join("0")],
            uid: place.uid,
            gid: place.gid,
            handout,
            inherited: Vec::new(),
        };
        let hypervisor = launch_for_caller(&spec, deadline)?;
        Ok(Trial { hypervisor })
    }

    pub fn pid(&self) -> i32 {
        self.hypervisor.process.pid()
    }

    /// What its accelerator can give a guest's CPU.
    pub fn cpus(&self, deadline: Instant) -> Result<CpuFacts, QmpError> {
        let machine = &self.hypervisor.machine;
        Ok(CpuFacts {
            models: machine.cpu_models(deadline)?,
            features: machine.cpu_features("max", deadline)?,
        })
    }

    /// Lets the guest run until it turns itself off, fails, or has had its share of a processor; ten times that by the clock at
    /// most, since a busy host gives it later and a guest that halts takes none.
    pub fn run(&self, share: Duration) -> Result<Shown, QmpError> {
        let machine = &self.hypervisor.machine;
        let deadline = Instant::now() + 10 * share;
        let before = cpu_time(self.pid()).unwrap_or_default();
        let has_had_it = || {
            let now = cpu_time(self.pid()).unwrap_or(Duration::MAX);
            Instant::now() >= deadline || now.saturating_sub(before) >= share
        };
        let events = machine.events();
        // No permit: this is nobody's VM, and its kernel can be no other than ours.
        machine.client().execute("cont", json!({}), deadline)?;
        let stopped_by = loop {
            match events.next(deadline.min(Instant::now() + LOOK)) {
                Ok(event) => match event.kind {
                    EventKind::Shutdown { .. } => break String::new(),
                    EventKind::Reset { guest: true } => {
                        break "the guest's CPU reset itself".to_owned();
                    }
                    EventKind::Stop => break self.stopped(deadline),
                    _ => {}
                },
                Err(EventsError::Deadline) if !has_had_it() => {}
                Err(EventsError::Deadline) => break "the guest went no further".to_owned(),
                Err(_) => break machine.stderr_tail(),
            }
        };
        let said = match machine.is_closed() {
            true => Vec::new(),
            false => machine.console_news(Instant::now() + Duration::from_secs(1))?,
        };
        Ok(Shown {
            reached: reached(&said),
            stopped_by,
        })
    }

    /// A stop is part of turning off, or QEMU's way of saying that it cannot go on.
    fn stopped(&self, deadline: Instant) -> String {
        let machine = &self.hypervisor.machine;
        match machine.query_status(deadline) {
            Ok(RunState::Shutdown) => String::new(),
            Ok(RunState::InternalError) => {
                "QEMU stopped the guest with an internal error".to_owned()
            }
            Ok(state) => format!("QEMU stopped the guest ({state})"),
            Err(error) => error.to_string(),
        }
    }
}

fn reached(said: &[u8]) -> Reached {
    let last = said.iter().rev().find_map(|letter| match letter {
        b'L' => Some(Reached::LongMode),
        b'P' => Some(Reached::ProtectedMode),
        b'R' => Some(Reached::RealMode),
        _ => None,
    });
    last.unwrap_or(Reached::Nothing)
}

fn make_ram(path: &Path, place: &TrialPlace<'_>) -> io::Result<()> {
    let ram = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    ram.set_permissions(Permissions::from_mode(0o600))?;
    ram.set_len(MEMORY_MIB << 20)?;
    fchown(&ram, Some(place.uid), Some(place.gid))
}

fn machine(
    place: &TrialPlace<'_>,
    (model, features): (&str, &[(String, bool)]),
    enforce: bool,
    kernel: PathBuf,
    ram_file: PathBuf,
) -> MachineConfig {
    MachineConfig {
        hardware: 1,
        name: "godwit-trial".to_owned(),
        uuid: "00000000-0000-4000-8000-000000000000".to_owned(),
        vcpus: 1,
        memory_mib: MEMORY_MIB,
        machine_type: "q35".to_owned(),
        cpu_model: model.to_owned(),
        cpu_features: features.to_vec(),
        cpu_enforce: enforce,
        accelerator: place.accelerator,
        flash: None,
        kernel: Some(kernel),
        initramfs: None,
        kernel_arguments: String::new(),
        nics: Vec::new(),
        disks: Vec::new(),
        agent_fd: None,
        seed_fd: None,
        reconnect: Reconnect::Second,
        ram_file,
        incoming: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_fits_behind_its_boot_sector() {
        let image = image();
        assert!(
            program().len() <= SETUP_SECTORS * SECTOR,
            "{}",
            program().len()
        );
        assert_eq!((image[0x1f1], &image[0x1fe..0x200]), (4, &[0x55, 0xaa][..]));
        assert_eq!(image[SECTOR], 0xfa, "it begins with cli");
        assert_eq!(&image[SECTOR..SECTOR + program().len()], program());
    }

    #[test]
    fn the_last_letter_says_how_far_the_guest_came() {
        assert_eq!(reached(b""), Reached::Nothing);
        assert_eq!(reached(b"RP"), Reached::ProtectedMode);
        assert_eq!(reached(b"RPL"), Reached::LongMode);
    }

    #[test]
    fn only_what_a_dead_process_left_is_removed() {
        let base = tempfile::tempdir().unwrap();
        let dead = base.path().join(format!("{PREFIX}4194305.0"));
        let other = base.path().join("vms");
        fs::create_dir_all(dead.join("qmp")).unwrap();
        fs::create_dir(&other).unwrap();
        let first = TrialDir::create(base.path()).unwrap();
        let second = TrialDir::create(base.path()).unwrap();
        assert!(!dead.exists() && other.exists());
        assert!(first.0.exists() && second.0.exists() && first.0 != second.0);
        let path = first.0.clone();
        drop(first);
        assert!(!path.exists() && second.0.exists());
    }
}
