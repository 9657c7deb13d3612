//! The devices of a machine that a person or its hardware version asked for, as arguments.
//!
//! Pure. What a guest sees of one never changes within a hardware version. Refuses: what the hardware version does not have.

use super::{AGENT, BackEnd, ConfigError, Disk, Line, MachineConfig, Nic, SEED_SET, escaped};
use godwit_types::vm::{SEED_AND_AGENT, mac_text};
use serde_json::json;

/// `romfile=` is empty because the ROM's size differs between distributions, and a move between them would fail.
pub(super) fn network_card(line: &mut Line, index: usize, nic: &Nic) {
    line.pair(
        "-netdev",
        format!("tap,id=net{index},fd={},vhost=off", nic.tap_fd),
    );
    let mac = mac_text(nic.mac);
    line.pair(
        "-device",
        format!("virtio-net-pci,id=nic{index},netdev=net{index},mac={mac},romfile="),
    );
}

/// The image comes as a set of one descriptor, which QEMU opens by the set's number.
pub(super) fn virtio_disk(
    line: &mut Line,
    config: &MachineConfig,
    index: usize,
    disk: &Disk,
) -> Result<(), ConfigError> {
    let (name, read_only) = (&disk.name, disk.read_only);
    let BackEnd::Qemu { fd } = &disk.back_end else {
        return Err(no_such_disk(config, disk));
    };
    raw_node(line, &format!("image{index}"), (*fd, index), read_only);
    line.pair(
        "-device",
        format!("virtio-blk-pci,id=disk{index},drive=image{index},serial={name}"),
    );
    Ok(())
}

/// The back end gives size, serial number and features. The write cache is not for a guest to switch off: a back end that
/// is replaced would have to know.
pub(super) fn vhost_user_disk(
    line: &mut Line,
    config: &MachineConfig,
    index: usize,
    disk: &Disk,
) -> Result<(), ConfigError> {
    let BackEnd::Served { socket, queues } = &disk.back_end else {
        return Err(no_such_disk(config, disk));
    };
    let (path, reconnect) = (escaped("disk's socket", socket)?, config.reconnect.option());
    line.pair(
        "-chardev",
        format!("socket,id=served{index},path={path},{reconnect}"),
    );
    let boot = index + 1;
    line.pair(
        "-device",
        format!("vhost-user-blk-pci,id=disk{index},chardev=served{index},num-queues={queues},queue-size=256,config-wce=off,bootindex={boot}"),
    );
    Ok(())
}

/// The port that every guest's agent looks for. It is of no use before the guest has one.
pub(super) fn agent_port(line: &mut Line, fd: i32) {
    line.pair(
        "-chardev",
        format!("socket,id={AGENT},fd={fd},server=on,wait=off"),
    );
    line.pair("-device", "virtio-serial-pci,id=ports,max_ports=2");
    line.pair(
        "-device",
        format!(
            "virtserialport,bus=ports.0,nr=1,id=agent,chardev={AGENT},name=org.qemu.guest_agent.0"
        ),
    );
}

/// Last of all devices, so that a VM that gets or loses it keeps the places of its others. QEMU reads it itself, with threads and
/// through memory of its own, as the disks of hardware version 1.
pub(super) fn seed(line: &mut Line, fd: i32) {
    raw_node(line, "seed", (fd, SEED_SET), true);
    line.pair(
        "-device",
        "virtio-blk-pci,id=seed0,drive=seed,serial=cidata",
    );
}

/// An image that QEMU itself opens, by the number of the set that has its descriptor alone.
fn raw_node(line: &mut Line, name: &str, (fd, set): (i32, usize), read_only: bool) {
    let cache = json!({"direct": false, "no-flush": false});
    let node = json!({
        "driver": "raw",
        "node-name": name,
        "read-only": read_only,
        "cache": cache,
        "file": {
            "driver": "file",
            "filename": format!("/dev/fdset/{set}"),
            "aio": "threads",
            "read-only": read_only,
            "cache": cache,
        },
    });
    line.pair("-add-fd", format!("fd={fd},set={set}"));
    line.pair("-blockdev", node.to_string());
}

fn no_such_disk(config: &MachineConfig, disk: &Disk) -> ConfigError {
    ConfigError::BackEnd {
        hardware: config.hardware,
        disk: disk.name.clone(),
    }
}

/// Both are of one version on: a port that every such machine has, and a seed that it may have.
pub(super) fn seed_and_agent(config: &MachineConfig) -> Result<(), ConfigError> {
    let (version, has) = (config.hardware, config.hardware >= SEED_AND_AGENT);
    match (config.agent_fd, config.seed_fd) {
        (_, Some(_)) if !has => Err(ConfigError::Seed(version)),
        (agent, _) if agent.is_some() != has => Err(ConfigError::Agent(version)),
        _ => Ok(()),
    }
}
