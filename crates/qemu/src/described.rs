//! A VM's description as QEMU's machine: what a person wrote, in the terms of the command line.
//!
//! Owns nothing. Refuses: a card whose port group this host does not have.

use crate::command_line::{self, BackEnd, Disk, Flash, MachineConfig, Nic, Reconnect};
use crate::tap::{Tap, name_of};
use godwit_types::cpu::CpuWish;
use godwit_types::vm::{Accelerator, VmSpec};
use godwit_types::{ApiError, ErrorCode, HostName, PortGroup};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};

/// A VM that is to have a QEMU on this host.
pub struct Wanted<'a> {
    pub spec: &'a VmSpec,
    /// What runs its guest; `Auto` has been decided.
    pub accelerator: Accelerator,
    pub ram_file: &'a Path,
    /// Its UEFI, which it has where it is described with it.
    pub flash: Option<Flash>,
    /// Where its agent's port is listened for, from hardware version 3 on.
    pub agent_fd: Option<i32>,
    /// Its seed, which it has where it is described with `[cloud_init]`.
    pub seed_fd: Option<i32>,
    /// Whether it waits for a device state.
    pub incoming: bool,
}

impl Wanted<'_> {
    /// Its machine, with a tap for each card and a back end for each disk.
    pub fn machine(
        &self,
        taps: &[Tap],
        back_ends: Vec<BackEnd>,
        reconnect: Reconnect,
    ) -> MachineConfig {
        let spec = self.spec;
        let disks = spec.disks.iter().zip(back_ends);
        let nic = |(index, tap): (usize, &Tap)| {
            Some(Nic {
                mac: spec.mac(index)?,
                tap_fd: tap.as_fd().as_raw_fd(),
            })
        };
        let cpu = CpuWish::parse(&spec.cpu);
        MachineConfig {
            hardware: spec.hardware(),
            name: spec.name.to_string(),
            uuid: uuid_of(spec.name.as_str()),
            vcpus: spec.vcpus,
            memory_mib: spec.memory_mib,
            machine_type: spec.machine.clone(),
            cpu_model: cpu.model,
            cpu_features: cpu.features,
            cpu_enforce: self.accelerator == Accelerator::Kvm,
            accelerator: match self.accelerator {
                Accelerator::Kvm => command_line::Accelerator::Kvm,
                Accelerator::Auto | Accelerator::Tcg => command_line::Accelerator::Tcg,
            },
            flash: self.flash,
            kernel: spec.kernel().map(PathBuf::from),
            initramfs: spec.initramfs.as_ref().map(PathBuf::from),
            kernel_arguments: spec.cmdline.clone(),
            nics: taps.iter().enumerate().filter_map(nic).collect(),
            disks: disks
                .map(|(disk, back_end)| Disk {
                    name: disk.name.clone(),
                    read_only: disk.read_only,
                    back_end,
                })
                .collect(),
            agent_fd: self.agent_fd,
            seed_fd: self.seed_fd,
            reconnect,
            ram_file: self.ram_file.to_owned(),
            incoming: self.incoming,
        }
    }
}

/// A tap for each card, on the bridge of its port group.
pub fn open_taps(
    spec: &VmSpec,
    host: &HostName,
    port_groups: &BTreeMap<PortGroup, String>,
) -> Result<Vec<Tap>, ApiError> {
    let mut taps = Vec::new();
    for (index, nic) in spec.nics.iter().enumerate() {
        let bridge = port_groups.get(&nic.port_group).ok_or_else(|| {
            let message = format!(
                "host '{host}' has no port group '{}': add it to [port_groups] in its host.toml, or change the VM's",
                nic.port_group
            );
            ApiError::new(ErrorCode::MissingBridge, message).on_host(host)
        })?;
        let tap = Tap::create(&name_of(spec, index), bridge).map_err(|error| {
            let message = format!("host '{host}': {error}");
            ApiError::new(ErrorCode::MissingBridge, message).on_host(host)
        })?;
        taps.push(tap);
    }
    Ok(taps)
}

/// The same UUID on every host: made from the VM's name, in the form of a random one.
pub(crate) fn uuid_of(name: &str) -> String {
    let mut state: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in name.bytes() {
        state = (state ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
    let hex = format!("{state:032x}");
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!(
        "{}-{}-4{}-a{}-{}",
        part(0, 8),
        part(8, 12),
        part(13, 16),
        part(17, 20),
        part(20, 32)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_has_its_form_and_is_the_vms_own() {
        let uuid = uuid_of("web");
        assert_eq!(uuid.len(), 36);
        assert_eq!(
            uuid.split('-').map(str::len).collect::<Vec<_>>(),
            [8, 4, 4, 4, 12]
        );
        assert_eq!(uuid, uuid_of("web"));
        assert_ne!(uuid, uuid_of("db"));
    }
}
