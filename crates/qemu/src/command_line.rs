//! A machine's description as QEMU's command line.
//!
//! Pure: a plain struct in, arguments out. What makes a machine movable and harmless is not optional here: it starts
//! stopped (`-S`), its RAM is one shared file, nothing unmigratable may be added, QEMU is sandboxed, the guest can not
//! suspend itself, and power-off and panic leave QEMU alive and paused. Names that QEMU's option syntax would take
//! apart are escaped or refused. Disks of hardware version 1 are raw images that the caller has opened; QEMU reads them
//! through the host's page cache with threads, since direct and kernel-asynchronous IO write guest memory where the
//! tracker can not see it. Later ones are served by a back end of ours, and QEMU knows no image but those of UEFI. There is no way to add a
//! balloon or anything else that writes unseen.

mod devices;

use devices::{agent_port, network_card, seed, seed_and_agent, vhost_user_disk, virtio_disk};
use godwit_types::vm::mac_text;
use serde_json::json;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The id of the ring buffer behind the guest's serial port.
pub const CONSOLE: &str = "console0";
/// Bytes of serial output that the ring buffer keeps.
pub const CONSOLE_BYTES: usize = 64 << 10;

/// The id of the socket behind the port of the guest's agent.
pub const AGENT: &str = "agent0";
/// The set of the seed's descriptor: those of disks and flash memory are below.
const SEED_SET: usize = 32;

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// QEMU's name for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

/// One virtio network card on a tap that the caller has opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nic {
    pub mac: [u8; 6],
    /// The tap's descriptor, by the number it has in QEMU (`launch` keeps numbers).
    pub tap_fd: i32,
}

/// Most disks of a machine.
pub const DISKS_MAX: usize = 16;
/// Longest name of a disk: the guest sees it as the serial number, which has so many bytes.
pub const DISK_NAME_LEN_MAX: usize = 20;

/// A virtio disk of the machine, and what is behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Its name, and its serial number in the guest.
    pub name: String,
    /// Whether the guest may only read; the image must have been opened likewise.
    pub read_only: bool,
    pub back_end: BackEnd,
}

/// Who carries out what a guest wants of its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackEnd {
    /// QEMU, on a raw image that the caller has opened: its descriptor, by the number it has in QEMU (`launch` keeps
    /// numbers). Of hardware version 1.
    Qemu { fd: i32 },
    /// Whoever listens at this socket, before QEMU is started and for as long as it lives. From hardware version 2 on.
    Served { socket: PathBuf, queues: u16 },
}

impl BackEnd {
    /// The descriptor that QEMU needs for it.
    pub fn image(&self) -> Option<i32> {
        match self {
            Self::Qemu { fd } => Some(*fd),
            Self::Served { .. } => None,
        }
    }
}

/// A machine's flash memory with UEFI: open files, by the numbers that they have in QEMU (`launch` keeps numbers).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flash {
    /// The firmware's program, open for reading.
    pub code_fd: i32,
    /// The VM's variables, open for reading and writing.
    pub variables_fd: i32,
}

/// How soon QEMU connects again to a back end that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reconnect {
    /// After a second: older ones count in nothing smaller.
    Second,
    /// After 50 ms: QEMU 9.2 and later.
    Soon,
}

impl Reconnect {
    /// Of a QEMU of this version.
    pub fn of(version: (u64, u64)) -> Self {
        match version >= (9, 2) {
            true => Self::Soon,
            false => Self::Second,
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::Second => "reconnect=1",
            Self::Soon => "reconnect-ms=50",
        }
    }
}

/// Everything that decides what the guest sees. Source and destination must agree on all but `ram_file`, `tap_fd`, the
/// disks' and the flash memory's descriptors and sockets, the numbers of `agent_fd` and `seed_fd`, `reconnect` and `incoming`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineConfig {
    /// Which version of the virtual hardware the arguments describe: `godwit_types::version::HARDWARE` has those that are known. What a guest
    /// sees of a version never changes, since a QEMU takes the device state of no other; a change gets a version of its own.
    pub hardware: u32,
    /// The machine's name: letters, digits, `.`, `_` and `-`, 64 at most.
    pub name: String,
    /// The machine's UUID in its usual text form.
    pub uuid: String,
    /// Virtual CPUs, 1 to 255.
    pub vcpus: u32,
    /// Memory in MiB, even, so that it is whole huge pages.
    pub memory_mib: u64,
    /// QEMU's machine type, such as `pc-q35-7.2`.
    pub machine_type: String,
    /// QEMU's CPU model, such as `EPYC-v3`.
    pub cpu_model: String,
    /// CPU features switched on or off beside the model.
    pub cpu_features: Vec<(String, bool)>,
    /// Refuse to start when a feature of the model is missing. Without it the guest would silently get less.
    pub cpu_enforce: bool,
    /// What executes the guest.
    pub accelerator: Accelerator,
    /// UEFI in flash memory, from hardware version 2 on. `None`: QEMU's BIOS.
    pub flash: Option<Flash>,
    /// Kernel image; must be readable for QEMU's user. `None`: the firmware boots from the first disk.
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, if any; must be readable for QEMU's user.
    pub initramfs: Option<PathBuf>,
    /// Kernel command line; may be empty.
    pub kernel_arguments: String,
    /// Network cards, in the order in which the guest finds them.
    pub nics: Vec<Nic>,
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<Disk>,
    /// A listening Unix socket on which the guest's agent is spoken with, by its number in QEMU (`launch` keeps numbers). From
    /// hardware version 3 on every machine has one.
    pub agent_fd: Option<i32>,
    /// The guest's seed, open for reading, by its number in QEMU. From hardware version 3 on.
    pub seed_fd: Option<i32>,
    /// How soon their back ends are connected to again.
    pub reconnect: Reconnect,
    /// The file that is the guest's RAM, on tmpfs; must be readable and writable for QEMU's user.
    pub ram_file: PathBuf,
    /// Whether this QEMU waits for a machine to come from elsewhere.
    pub incoming: bool,
}

/// Why a description is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A name with characters outside of its alphabet, or empty, or too long.
    #[error(
        "the {what} '{value}' is not usable: it may have letters, digits, '.', '_', '+' and '-', 1 to 64 of them"
    )]
    Name {
        what: &'static str,
        /// What it holds, control characters escaped.
        value: String,
    },
    /// Hardware that this build does not know.
    #[error("the hardware version {0} is not known to this Godwit: update it on this host")]
    Hardware(u32),
    #[error("the UUID '{value}' is not of the form 8-4-4-4-12 hexadecimal digits")]
    Uuid {
        /// What the field holds, control characters escaped.
        value: String,
    },
    /// A path that cannot be given to QEMU.
    #[error(
        "the path of the {what}, '{value}', must be absolute, UTF-8 and without control characters"
    )]
    Path {
        what: &'static str,
        /// What it holds, control characters escaped.
        value: String,
    },
    /// A number out of its range.
    #[error("{what} is {value}: {allowed}")]
    Number {
        what: &'static str,
        value: u64,
        /// What may stand there.
        allowed: &'static str,
    },
    /// A kernel command line that QEMU or the kernel would cut.
    #[error("the kernel's command line must have no control characters and 2047 bytes at most")]
    KernelArguments,
    /// A disk in a machine whose hardware has no such disks.
    #[error("hardware version {hardware} has no disk like '{disk}'")]
    BackEnd { hardware: u32, disk: String },
    /// UEFI in a machine whose hardware has none.
    #[error("hardware version {0} has no UEFI")]
    Flash(u32),
    /// A port for an agent in a machine whose hardware has none, or none where it has one.
    #[error("hardware version {0} and a port for the guest's agent do not go together as asked")]
    Agent(u32),
    /// A seed in a machine whose hardware has none.
    #[error("hardware version {0} has no seed")]
    Seed(u32),
    /// Nothing to boot from.
    #[error(
        "the machine has neither a kernel nor, from hardware version 2 on, a disk to boot from"
    )]
    NothingToBoot,
    /// A card's address that a bridge would not deliver to.
    #[error("the network card's address {mac} is a group address: its first byte must be even")]
    GroupAddress { mac: String },
}

/// The arguments, without the program's name. `monitor_fds` are listening Unix sockets, by their number in QEMU, one
/// per control socket.
pub fn build(config: &MachineConfig, monitor_fds: &[i32]) -> Result<Vec<OsString>, ConfigError> {
    check(config)?;
    match config.hardware {
        1..=3 => seed_and_agent(config)?,
        unknown => return Err(ConfigError::Hardware(unknown)),
    }
    match config.hardware {
        1 if config.flash.is_some() => Err(ConfigError::Flash(1)),
        1 if config.kernel.is_none() => Err(ConfigError::NothingToBoot),
        1 => machine_with(config, monitor_fds, virtio_disk),
        _ => machine_with(config, monitor_fds, vhost_user_disk),
    }
}

type AddDisk = fn(&mut Line, &MachineConfig, usize, &Disk) -> Result<(), ConfigError>;

/// Never changed for a version of the hardware that it made a machine of: guests that were started by it move to a QEMU that
/// is started by it.
fn machine_with(
    config: &MachineConfig,
    monitor_fds: &[i32],
    add_disk: AddDisk,
) -> Result<Vec<OsString>, ConfigError> {
    let mut line = Line::default();
    line.flags(&["-S", "-nodefaults", "-no-user-config", "-only-migratable"]);
    line.pair("-display", "none")
        .pair("-vga", "none")
        .pair("-msg", "timestamp=on");
    line.pair(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
    line.pair(
        "-action",
        "reboot=reset,shutdown=pause,panic=pause,watchdog=pause",
    );
    line.pair("-name", format!("guest={},debug-threads=on", config.name))
        .pair("-uuid", &config.uuid);
    machine(&mut line, config)?;
    let power = if config.machine_type.contains("q35") {
        "ICH9-LPC"
    } else {
        "PIIX4_PM"
    };
    line.pair("-global", format!("{power}.disable_s3=1"))
        .pair("-global", format!("{power}.disable_s4=1"));
    boot(&mut line, config)?;
    line.pair(
        "-chardev",
        format!("ringbuf,id={CONSOLE},size={CONSOLE_BYTES}"),
    );
    line.pair("-serial", format!("chardev:{CONSOLE}"));
    line.pair("-device", "pvpanic");
    config
        .nics
        .iter()
        .enumerate()
        .for_each(|(index, nic)| network_card(&mut line, index, nic));
    for (index, disk) in config.disks.iter().enumerate() {
        add_disk(&mut line, config, index, disk)?;
    }
    if let Some(fd) = config.agent_fd {
        agent_port(&mut line, fd);
    }
    if let Some(fd) = config.seed_fd {
        seed(&mut line, fd);
    }
    for (index, fd) in monitor_fds.iter().enumerate() {
        line.pair(
            "-chardev",
            format!("socket,id=qmp{index},fd={fd},server=on,wait=off"),
        );
        line.pair("-mon", format!("chardev=qmp{index},mode=control"));
    }
    if config.incoming {
        line.pair("-incoming", "defer");
    }
    Ok(line.arguments)
}

fn machine(line: &mut Line, config: &MachineConfig) -> Result<(), ConfigError> {
    let (machine, accelerator) = (&config.machine_type, config.accelerator.as_str());
    let flash = match config.flash {
        Some(_) => ",pflash0=uefi-code,pflash1=uefi-variables",
        None => "",
    };
    line.pair(
        "-machine",
        format!("{machine},accel={accelerator},memory-backend=ram0,dump-guest-core=off{flash}"),
    );
    if let Some(flash) = config.flash {
        flash_memory(line, "uefi-code", 0, flash.code_fd);
        flash_memory(line, "uefi-variables", 1, flash.variables_fd);
    }
    let mut cpu = config.cpu_model.clone();
    for (feature, on) in &config.cpu_features {
        let _ = write!(cpu, ",{feature}={}", if *on { "on" } else { "off" });
    }
    if config.cpu_enforce {
        cpu.push_str(",enforce");
    }
    line.pair("-cpu", cpu).pair("-smp", processors(config));
    let (size, file) = (config.memory_mib, escaped("memory file", &config.ram_file)?);
    line.pair("-m", format!("{size}M"));
    line.pair(
        "-object",
        format!(
            "memory-backend-file,id=ram0,size={size}M,share=on,align=2M,merge=off,mem-path={file}"
        ),
    );
    Ok(())
}

/// QEMU reads it into memory of its own when it starts, and writes what the guest changes into the file. Version 2 has no
/// other sets of descriptors.
fn flash_memory(line: &mut Line, node: &str, set: u32, fd: i32) {
    let read_only = set == 0;
    let node = json!({
        "driver": "raw",
        "node-name": node,
        "read-only": read_only,
        "file": {
            "driver": "file",
            "filename": format!("/dev/fdset/{set}"),
            "read-only": read_only,
        },
    });
    line.pair("-add-fd", format!("fd={fd},set={set}"));
    line.pair("-blockdev", node.to_string());
}

/// QEMU translates code for a machine that can never have a second vCPU without ordering its memory accesses: `lock`
/// (up to 10.0 at least) and `mfence` (up to 8.0) order nothing then, although QEMU's other threads serve the guest's
/// queues meanwhile. A guest so emulated can lose the one notification that its network waits for, and stays silent for
/// ever. Room for a second vCPU, which is never plugged, makes the same code ordered.
fn processors(config: &MachineConfig) -> String {
    match (config.accelerator, config.vcpus) {
        (Accelerator::Tcg, 1) => "1,maxcpus=2".to_owned(),
        (_, vcpus) => vcpus.to_string(),
    }
}

fn boot(line: &mut Line, config: &MachineConfig) -> Result<(), ConfigError> {
    let Some(kernel) = &config.kernel else {
        let bootable = !config.disks.is_empty();
        return bootable.then_some(()).ok_or(ConfigError::NothingToBoot);
    };
    line.pair("-kernel", plain("kernel", kernel)?);
    if let Some(initramfs) = &config.initramfs {
        line.pair("-initrd", plain("initramfs", initramfs)?);
    }
    if !config.kernel_arguments.is_empty() {
        line.pair("-append", &config.kernel_arguments);
    }
    Ok(())
}

#[derive(Default)]
struct Line {
    arguments: Vec<OsString>,
}

impl Line {
    fn flags(&mut self, flags: &[&str]) {
        self.arguments.extend(flags.iter().map(OsString::from));
    }

    fn pair(&mut self, option: &str, value: impl Into<OsString>) -> &mut Line {
        self.arguments.extend([option.into(), value.into()]);
        self
    }
}

fn check(config: &MachineConfig) -> Result<(), ConfigError> {
    name("machine name", &config.name)?;
    name("machine type", &config.machine_type)?;
    name("CPU model", &config.cpu_model)?;
    config
        .cpu_features
        .iter()
        .try_for_each(|(feature, _)| name("CPU feature", feature))?;
    uuid(&config.uuid)?;
    disks(&config.disks)?;
    number(
        "the number of vCPUs",
        config.vcpus.into(),
        (1..=255).contains(&config.vcpus),
        "it must be 1 to 255",
    )?;
    let sensible =
        config.memory_mib.is_multiple_of(2) && (2..=16 << 20).contains(&config.memory_mib);
    number(
        "the memory in MiB",
        config.memory_mib,
        sensible,
        "it must be even and 2 to 16777216",
    )?;
    if config.kernel_arguments.len() > 2047 || config.kernel_arguments.contains(char::is_control) {
        return Err(ConfigError::KernelArguments);
    }
    match config
        .nics
        .iter()
        .find(|nic| nic.mac.first().is_some_and(|first| first & 1 == 1))
    {
        Some(nic) => Err(ConfigError::GroupAddress {
            mac: mac_text(nic.mac),
        }),
        None => Ok(()),
    }
}

fn disks(disks: &[Disk]) -> Result<(), ConfigError> {
    number(
        "the number of disks",
        disks.len() as u64,
        disks.len() <= DISKS_MAX,
        "it must be 16 at most",
    )?;
    disks.iter().try_for_each(|disk| {
        name("disk name", &disk.name)?;
        number(
            "the length of a disk's name",
            disk.name.len() as u64,
            disk.name.len() <= DISK_NAME_LEN_MAX,
            "it must be 20 bytes at most, since the guest sees it as the disk's serial number",
        )
    })
}

fn number(
    what: &'static str,
    value: u64,
    fits: bool,
    allowed: &'static str,
) -> Result<(), ConfigError> {
    if fits {
        Ok(())
    } else {
        Err(ConfigError::Number {
            what,
            value,
            allowed,
        })
    }
}

fn name(what: &'static str, value: &str) -> Result<(), ConfigError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
    let fits =
        (1..=64).contains(&value.len()) && value.chars().all(allowed) && !value.starts_with('-');
    if fits {
        Ok(())
    } else {
        Err(ConfigError::Name {
            what,
            value: value.escape_debug().to_string(),
        })
    }
}

fn uuid(value: &str) -> Result<(), ConfigError> {
    let parts = value.split('-').map(|part| {
        part.chars()
            .all(|c| c.is_ascii_hexdigit())
            .then_some(part.len())
    });
    let fits = parts.eq([8, 4, 4, 4, 12].map(Some));
    if fits {
        Ok(())
    } else {
        Err(ConfigError::Uuid {
            value: value.escape_debug().to_string(),
        })
    }
}

fn plain<'a>(what: &'static str, path: &'a Path) -> Result<&'a str, ConfigError> {
    let text = path
        .to_str()
        .filter(|text| path.is_absolute() && !text.contains(char::is_control));
    text.ok_or_else(|| ConfigError::Path {
        what,
        value: path.to_string_lossy().escape_debug().to_string(),
    })
}

/// QEMU's option lists end a value at a comma; a doubled comma stands for one.
fn escaped(what: &'static str, path: &Path) -> Result<String, ConfigError> {
    plain(what, path).map(|text| text.replace(',', ",,"))
}

#[cfg(test)]
mod tests;
