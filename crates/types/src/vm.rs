//! What a VM is: the description that a person writes in TOML and that travels over REST.
//!
//! Owns nothing. Refuses: unknown keys, sizes out of bounds, names that could escape a path.

mod boots;
mod cloned;
mod cloud_init;
mod disks;
mod made;
mod new;

pub use boots::Firmware;
pub use cloned::{attempt_of, clone_part_of};
pub use cloud_init::{CardNetwork, CloudInit, SEED_AND_AGENT, USER_DATA_LEN_MAX};
pub use disks::{DISK_IOPS_MAX, DISK_MIB_PER_S_MAX, DiskLimits, DiskSpec, OnError, OnFull};
pub use made::{DISK_GIB_MAX, check_disk_bytes, room_for_images};

use crate::ids::{PortGroup, VmName};
use crate::version::{HARDWARE, VERSION};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Most vCPUs a VM may have.
pub const VCPUS_MAX: u32 = 128;
/// Smallest guest memory, MiB. Memory is a multiple of 2 MiB.
pub const MEMORY_MIB_MIN: u64 = 16;
/// Largest guest memory, MiB (4 TiB).
pub const MEMORY_MIB_MAX: u64 = 4 << 20;
/// Most network cards of a VM.
pub const NICS_MAX: usize = 8;
/// Most disks of a VM.
pub const DISKS_MAX: usize = 16;
/// The first hardware version whose disks the VM process serves, and which boots from one.
pub const BOOTS_FROM_DISK: u32 = 2;
/// Longest kernel command line in a record, bytes.
pub const CMDLINE_LEN_MAX: usize = 2048;
/// Longest kernel command line of a new VM, bytes: a kernel has room for a zero byte more.
pub const NEW_CMDLINE_LEN_MAX: usize = 2047;
/// Longest name of a new VM's disk: the guest sees it as the serial number, which has so many bytes.
pub const DISK_NAME_LEN_MAX: usize = 20;
/// The user ids that are kept for QEMUs, one for each VM: systemd leaves this range unused, so that neither people, services nor
/// containers have one of them.
pub const UIDS: std::ops::RangeInclusive<u32> = 1_879_048_192..=2_147_483_647;

/// Per-VM encryption mode, with vSphere's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema, Default)]
#[serde(rename_all = "kebab-case")]
pub enum EncryptionMode {
    /// Migration data travels in clear; handshake and control channel stay authenticated.
    Disabled,
    /// Encrypted when both hosts can, else in clear.
    #[default]
    Opportunistic,
    /// Only hosts that can encrypt are accepted.
    Required,
}

impl fmt::Display for EncryptionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disabled => "disabled",
            Self::Opportunistic => "opportunistic",
            Self::Required => "required",
        })
    }
}

/// What runs the guest's instructions.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
    Default,
)]
#[serde(rename_all = "kebab-case")]
pub enum Accelerator {
    /// KVM where the CPU has vmx or svm and `/dev/kvm` opens, else TCG.
    #[default]
    Auto,
    Kvm,
    /// QEMU's translator, 10 to 50 times slower.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// What a host does when a VM's QEMU died although nobody asked for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema, Default)]
#[serde(rename_all = "kebab-case")]
pub enum OnCrash {
    /// It boots the guest anew, a bounded number of times.
    #[default]
    Restart,
    /// The VM stays crashed until a person starts it.
    Stay,
}

impl OnCrash {
    fn is_restart(&self) -> bool {
        *self == Self::Restart
    }
}

/// One virtual network card, and the network that it is plugged into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicSpec {
    /// Port group, which each host maps to a bridge.
    #[schema(value_type = String)]
    pub port_group: PortGroup,
    /// MAC address, `52:54:00:xx:xx:xx`. When it is absent the controller allots one that no other VM has, made from
    /// the VM's name while that is free, and writes it down here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

/// A VM as a person describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    #[schema(value_type = String)]
    pub name: VmName,
    pub vcpus: u32,
    /// Guest memory, MiB, a multiple of 2.
    pub memory_mib: u64,
    /// QEMU CPU model; `auto` = the best that all hosts can give under what runs the VM. `host` and `max` are for
    /// VMs that never move.
    #[serde(default = "auto")]
    pub cpu: String,
    /// QEMU machine type, `q35` unless given. Resolved to a versioned type when the VM first starts.
    #[serde(default = "q35")]
    pub machine: String,
    /// Which version of the virtual hardware QEMU's command line describes, for as long as the VM lives: the newest that
    /// the site knew when the VM was described. Version 1 is not written.
    #[serde(default, skip_serializing_if = "is_first")]
    pub hardware: Option<u32>,
    /// What the machine begins with. UEFI needs hardware version 2. BIOS is not written.
    #[serde(default, skip_serializing_if = "Firmware::is_bios")]
    pub firmware: Firmware,
    /// Kernel image on the host; empty: the firmware boots from the first disk.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kernel: String,
    /// Initial RAM file system on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<String>,
    #[serde(default)]
    pub cmdline: String,
    /// What runs the guest.
    #[serde(default)]
    pub accelerator: Accelerator,
    #[serde(default)]
    pub encryption: EncryptionMode,
    /// What happens when its QEMU dies.
    #[serde(default, skip_serializing_if = "OnCrash::is_restart")]
    pub on_crash: OnCrash,
    /// User and group id of its QEMU, the same on every host. The controller allots one that no other VM has, and writes it
    /// down here; without one the VM has not started since there are any, and its QEMU runs as its host's common user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Whether it may be moved while it runs.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub movable: bool,
    /// What the guest is told when it boots the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    #[serde(default, rename = "nic", skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicSpec>,
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSpec>,
}

fn is_first(hardware: &Option<u32>) -> bool {
    hardware.is_none_or(|version| version == 1)
}

fn auto() -> String {
    "auto".into()
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

fn q35() -> String {
    "q35".into()
}

/// What is wrong with a VM description, in a sentence for a person.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidVm(pub String);

impl VmSpec {
    /// Stands in for a description that is gone or cannot be read: as much as the VM's name.
    pub fn placeholder(name: &VmName) -> Self {
        Self {
            name: name.clone(),
            vcpus: 1,
            memory_mib: 16,
            cpu: auto(),
            machine: q35(),
            hardware: None,
            firmware: Firmware::default(),
            kernel: "/unknown".into(),
            initramfs: None,
            cmdline: String::new(),
            accelerator: Accelerator::default(),
            encryption: EncryptionMode::default(),
            on_crash: OnCrash::default(),
            uid: None,
            movable: yes(),
            cloud_init: None,
            nics: Vec::new(),
            disks: Vec::new(),
        }
    }

    /// Checks all bounds, and that its hardware is known here; every VM that is to run passes through here.
    pub fn check(&self) -> Result<(), InvalidVm> {
        self.check_hardware()?;
        self.check_bounds()
    }

    /// Checks all bounds: for a VM that another host tells of.
    pub fn check_bounds(&self) -> Result<(), InvalidVm> {
        self.check_sizes()?;
        if let Some(uid) = self.uid.filter(|uid| !UIDS.contains(uid)) {
            return Err(InvalidVm(format!(
                "uid = {uid} is not valid: the controller gives out {} to {}, so leave it out",
                UIDS.start(),
                UIDS.end()
            )));
        }
        self.check_texts()?;
        self.check_nics()?;
        self.check_cloud_init()?;
        self.check_disks()
    }

    /// The version of its virtual hardware.
    pub fn hardware(&self) -> u32 {
        self.hardware.unwrap_or(1)
    }

    /// Gives it a version of virtual hardware; the first is the one that is not written.
    pub fn set_hardware(&mut self, version: Option<u32>) {
        self.hardware = version.filter(|version| *version != 1);
    }

    fn check_hardware(&self) -> Result<(), InvalidVm> {
        if HARDWARE.contains(self.hardware()) {
            return Ok(());
        }
        Err(InvalidVm(format!(
            "VM '{}' has hardware version {}, and Godwit {VERSION} knows {HARDWARE}: update Godwit here before the VM comes here",
            self.name,
            self.hardware()
        )))
    }

    fn check_sizes(&self) -> Result<(), InvalidVm> {
        if self.vcpus == 0 || self.vcpus > VCPUS_MAX {
            return Err(InvalidVm(format!(
                "vcpus = {} is out of range: use 1 to {VCPUS_MAX}",
                self.vcpus
            )));
        }
        if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&self.memory_mib)
            || !self.memory_mib.is_multiple_of(2)
        {
            return Err(InvalidVm(format!(
                "memory_mib = {} is out of range: use an even number from {MEMORY_MIB_MIN} to {MEMORY_MIB_MAX}",
                self.memory_mib
            )));
        }
        Ok(())
    }

    fn check_texts(&self) -> Result<(), InvalidVm> {
        match self.kernel() {
            Some(kernel) => check_path("kernel", kernel)?,
            None => self.check_boots_from_disk()?,
        }
        if let Some(path) = &self.initramfs {
            check_path("initramfs", path)?;
        }
        if self.cmdline.len() > CMDLINE_LEN_MAX || self.cmdline.contains(['\0', '\n']) {
            return Err(InvalidVm(format!(
                "cmdline is not valid: one line of at most {CMDLINE_LEN_MAX} bytes"
            )));
        }
        check_word("cpu", &self.cpu, "-_.+,=")?;
        check_word("machine", &self.machine, "-_.")?;
        self.check_firmware()
    }

    fn check_nics(&self) -> Result<(), InvalidVm> {
        if self.nics.len() > NICS_MAX {
            return Err(InvalidVm(format!(
                "{} network cards are too many: use at most {NICS_MAX}",
                self.nics.len()
            )));
        }
        for mac in self.nics.iter().filter_map(|nic| nic.mac.as_deref()) {
            if parse_mac(mac).is_none() {
                return Err(InvalidVm(format!(
                    "mac = \"{}\" is not a unicast MAC address: use six pairs of hex digits such as 52:54:00:12:34:56",
                    mac.escape_debug()
                )));
            }
        }
        Ok(())
    }

    /// The MAC address of card `index`: the given one, or one made from the VM's name and the index so that it
    /// stays the same wherever the VM goes.
    pub fn mac(&self, index: usize) -> Option<[u8; 6]> {
        let nic = self.nics.get(index)?;
        match &nic.mac {
            Some(text) => parse_mac(text),
            None => Some(self.default_mac(index)),
        }
    }

    /// The MAC address that is made from the VM's name and the card's index. Others may get the same one: the
    /// controller allots it only while it is free.
    pub fn default_mac(&self, index: usize) -> [u8; 6] {
        let hash = fnv1a(format!("{}/{index}", self.name).as_bytes());
        let [_, a, b, c] = hash.to_be_bytes();
        [0x52, 0x54, 0x00, a, b, c]
    }

    /// Guest memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }
}

fn check_path(key: &str, path: &str) -> Result<(), InvalidVm> {
    let fine = path.starts_with('/') && path.len() <= 1024 && !path.contains(['\0', '\n']);
    if fine {
        return Ok(());
    }
    Err(InvalidVm(format!(
        "{key} = \"{}\" is not valid: give an absolute path on the host",
        path.escape_debug()
    )))
}

fn check_word(key: &str, text: &str, others: &str) -> Result<(), InvalidVm> {
    let fine = !text.is_empty()
        && text.len() <= 256
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || others.contains(c));
    if fine {
        return Ok(());
    }
    let text = text.escape_debug();
    Err(InvalidVm(format!("{key} = \"{text}\" is not valid")))
}

/// Parses a unicast MAC address.
pub fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0u8; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let digits = |part: &&str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
        let part = parts.next().filter(digits)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    let unicast = mac[0] & 1 == 0 && mac != [0; 6];
    (parts.next().is_none() && unicast).then_some(mac)
}

/// A MAC address as people write it.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

/// Where a VM is in its life, as shown to people.
///
/// `running` is also what a source says of a guest that stands still in a switchover, until it has heard how that ended. So
/// both hosts may say it for a moment in which one guest runs at most; whose right that is says each host's record alone,
/// and the controller's list, which goes by the records, names one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Several hosts hold it: an alarm, ended by a person.
    RunningTwice,
    /// Nobody knows which host may run it after a switchover was cut in the middle: stopped until settled.
    InDoubt,
    Running,
    /// Stopped by its user with memory kept.
    Paused,
    /// Being made as the destination of a migration.
    Incoming,
    /// Between two hosts: one has given it, the other has not been heard to hold it yet.
    HandingOver,
    Stopped,
    /// The guest panicked and is kept for inspection.
    Panicked,
    /// Its hypervisor died; the next start boots it anew.
    Crashed,
    /// Its host does not answer.
    Unreachable,
    /// What its host, or the controller, has on record of it cannot be read: granted to nobody until a person has decided.
    DamagedRecord,
}

impl VmState {
    /// Whether no guest is there.
    pub fn is_off(self) -> bool {
        matches!(self, Self::Stopped | Self::Crashed)
    }
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RunningTwice => "running-twice",
            Self::InDoubt => "in-doubt",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Incoming => "incoming",
            Self::HandingOver => "handing-over",
            Self::Stopped => "stopped",
            Self::Panicked => "panicked",
            Self::Crashed => "crashed",
            Self::Unreachable => "unreachable",
            Self::DamagedRecord => "damaged-record",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = r#"
        name = "web"
        vcpus = 2
        memory_mib = 1024
        kernel = "/boot/vmlinuz"
        [[nic]]
        port_group = "vm"
    "#;

    #[test]
    fn a_plain_description_gets_the_defaults() {
        let vm = VmSpec::from_toml(WEB).unwrap();
        assert_eq!(vm.cpu, "auto");
        assert_eq!(vm.machine, "q35");
        assert_eq!(vm.encryption, EncryptionMode::Opportunistic);
        assert_eq!(vm.mac(0), vm.mac(0));
        assert_eq!(vm.mac(1), None);
    }

    #[test]
    fn what_stands_in_for_a_description_is_one_that_a_person_could_write() {
        let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/unknown\"\n";
        let written = VmSpec::from_toml(text).unwrap();
        assert_eq!(VmSpec::placeholder(&written.name), written);
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = VmSpec::from_toml(&WEB.replace("vcpus", "vcpu")).unwrap_err();
        assert!(error.0.contains("vcpu"), "{error}");
    }

    #[test]
    fn bounds_are_checked() {
        for (from, to) in [
            ("vcpus = 2", "vcpus = 0"),
            ("memory_mib = 1024", "memory_mib = 15"),
            ("memory_mib = 1024", "memory_mib = 99999999"),
            ("\"/boot/vmlinuz\"", "\"vmlinuz\""),
            ("\"web\"", "\"../web\""),
        ] {
            assert!(VmSpec::from_toml(&WEB.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn hardware_that_this_build_does_not_know_is_refused_and_the_first_is_not_written() {
        let of = |line: &str| {
            VmSpec::from_toml(&WEB.replace("vcpus = 2", &format!("vcpus = 2\n{line}")))
        };
        let first = serde_json::to_string(&of("hardware = 1").unwrap()).unwrap();
        assert!(!first.contains("hardware"), "{first}");
        for unknown in ["hardware = 0", "hardware = 99"] {
            let error = of(unknown).unwrap_err();
            assert!(error.0.contains("update Godwit here"), "{error}");
        }
    }

    #[test]
    fn a_disk_is_shared_only_when_that_is_said() {
        let with = |key: &str| {
            let disk = "\n[[disk]]\nname = \"data\"\npath = \"/data.raw\"\n";
            VmSpec::from_toml(&format!("{WEB}{disk}{key}")).unwrap()
        };
        assert!(!with("").disks[0].shared);
        assert!(with("shared = true").disks[0].shared);
    }

    #[test]
    fn only_unicast_macs_are_taken() {
        assert_eq!(
            parse_mac("52:54:00:12:34:56"),
            Some([0x52, 0x54, 0, 0x12, 0x34, 0x56])
        );
        for bad in [
            "53:54:00:12:34:56",
            "52:54:00:12:34",
            "52:54:00:12:34:5g",
            "+2:54:00:12:34:56",
            "52:54:00:12:34:+6",
            "00:00:00:00:00:00",
            "",
        ] {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }
}
