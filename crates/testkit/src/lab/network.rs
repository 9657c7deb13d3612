//! The lab's networks: bridges in the switch machine, a veth pair for every connection.
//!
//! Built with `ip -batch`, one process for each machine. It relies on no traffic shaping, which the kernel may lack.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Stdio;

use super::{Addresses, Lab, LabConfig, Machine, Subnets, host_name};

/// One of a host's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// To the controller and the other hosts' agents.
    Management,
    /// For migration streams.
    Migration,
    /// The VMs' network.
    Vm,
}

impl Link {
    /// Device name inside the machine.
    fn device(self) -> &'static str {
        match self {
            Link::Management => "mgmt0",
            Link::Migration => "mig0",
            Link::Vm => "vm0",
        }
    }
}

const CONTROLLER: u8 = 100;
const CLIENT: u8 = 101;
const ROUTER: u8 = 254;

/// Addresses of host number 0, 1, ... in a lab with or without a router.
pub fn host_addresses(index: u8, routed: bool) -> Addresses {
    let (subnet, number) = (if routed { index + 1 } else { 0 }, index + 1);
    Addresses {
        management4: IpAddr::V4(Ipv4Addr::new(10, 76, 0, number)),
        management6: v6(0xfd76, 0, number),
        migration4: IpAddr::V4(Ipv4Addr::new(10, 78, subnet, number)),
        migration6: v6(0xfd78, subnet, number),
    }
}

/// Subnet and number of a host's migration device: device 1 of host `b` has number 12, or subnet 10 and number 2.
fn place(config: &LabConfig, host: u8, nic: u8) -> (u8, u8) {
    let subnet = if config.routed { host + 1 } else { 0 };
    match config.migration_subnets {
        Subnets::One => (subnet, host + 1 + 10 * nic),
        Subnets::Each => (subnet + 10 * nic, host + 1),
    }
}

/// Addresses of a host's migration device.
pub fn migration_addresses(config: &LabConfig, host: u8, nic: u8) -> (IpAddr, IpAddr) {
    let (subnet, number) = place(config, host, nic);
    let four = IpAddr::V4(Ipv4Addr::new(10, 78, subnet, number));
    (four, v6(0xfd78, subnet, number))
}

fn v6(prefix: u16, subnet: u8, number: u8) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(
        prefix,
        0,
        0,
        subnet.into(),
        0,
        0,
        0,
        number.into(),
    ))
}

/// Connects all machines.
pub fn build(lab: &Lab) -> io::Result<()> {
    for name in lab.machine_names() {
        trust_addresses(lab.machine(&name)?)?;
    }
    build_switch(lab)?;
    for index in 0..lab.config.hosts {
        build_host(lab, index)?;
    }
    let management = addresses("mgmt0", 0x76, 0, CONTROLLER);
    batch(
        lab.controller()?,
        &[
            LOOPBACK.to_owned(),
            management,
            "link set mgmt0 up".to_owned(),
        ],
    )?;
    build_client(lab)?;
    if lab.config.routed {
        build_router(lab)?;
    }
    Ok(())
}

/// No duplicate address detection: for its second a router has no address to ask its neighbours from.
fn trust_addresses(machine: &Machine) -> io::Result<()> {
    let script = "cd /proc/sys/net/ipv6/conf && for i in all default; do \
                  echo 0 >$i/accept_dad && echo 0 >$i/dad_transmits || exit 1; done";
    run_ok(machine.command("sh").args(["-c", script]).output()?)
}

const LOOPBACK: &str = "link set lo up";

fn build_switch(lab: &Lab) -> io::Result<()> {
    let mut lines = vec![LOOPBACK.to_owned()];
    let mtu = lab.config.migration_mtu;
    for bridge in ["mgmt", "vm", "mig0", "mig1", "mig2"] {
        // No multicast snooping: it drops neighbour discovery of ports it has not heard from.
        lines.push(format!(
            "link add br-{bridge} type bridge forward_delay 0 mcast_snooping 0"
        ));
        lines.push(format!("link set br-{bridge} up"));
    }
    for name in (0..lab.config.hosts).map(host_name) {
        for link in [Link::Management, Link::Migration, Link::Vm] {
            lines.extend(cable(
                lab.machine(&name)?,
                link.device(),
                &bridge(lab, &name, link),
                mtu_of(link, mtu),
            ));
        }
    }
    lines.extend(cable(lab.controller()?, "mgmt0", "br-mgmt", 1500));
    lines.extend(cable(lab.client()?, "mgmt0", "br-mgmt", 1500));
    lines.extend(cable(lab.client()?, "vm0", "br-vm", 1500));
    if lab.config.routed {
        lines.extend(cable(lab.machine("router")?, "mig1", "br-mig1", mtu));
        lines.extend(cable(lab.machine("router")?, "mig2", "br-mig2", mtu));
    }
    batch(lab.machine("switch")?, &lines)
}

fn mtu_of(link: Link, migration_mtu: u32) -> u32 {
    if link == Link::Migration {
        migration_mtu
    } else {
        1500
    }
}

/// The switch's bridge that a host's link belongs to.
fn bridge(lab: &Lab, host: &str, link: Link) -> String {
    match (link, lab.config.routed, host) {
        (Link::Management, _, _) => "br-mgmt".to_owned(),
        (Link::Vm, _, _) => "br-vm".to_owned(),
        (Link::Migration, false, _) => "br-mig0".to_owned(),
        (Link::Migration, true, "a") => "br-mig1".to_owned(),
        (Link::Migration, true, _) => "br-mig2".to_owned(),
    }
}

/// The switch's port for a machine's device.
fn port(machine: &str, device: &str) -> String {
    // Device names have at most 15 characters.
    let short = machine.get(..6).unwrap_or(machine);
    format!("{short}-{device}")
}

fn cable(machine: &Machine, device: &str, bridge: &str, mtu: u32) -> [String; 2] {
    let (port, pid) = (port(machine.name(), device), machine.init_pid());
    [
        format!("link add {port} mtu {mtu} type veth peer name {device} mtu {mtu} netns {pid}"),
        format!("link set {port} master {bridge} up"),
    ]
}

/// Both addresses of a device, usable at once (no duplicate address detection). `net` is 0x76, 0x77 or 0x78.
fn addresses(device: &str, net: u8, subnet: u8, number: u8) -> String {
    let second = u16::from(net) - 0x76 + 76;
    let six = v6(0xfd00 | u16::from(net), subnet, number);
    format!(
        "addr add 10.{second}.{subnet}.{number}/24 dev {device}\naddr add {six}/64 dev {device} nodad"
    )
}

fn build_host(lab: &Lab, index: u8) -> io::Result<()> {
    let host = lab.host(index)?;
    let (subnet, number) = (if lab.config.routed { index + 1 } else { 0 }, index + 1);
    let mut lines = vec![
        LOOPBACK.to_owned(),
        addresses("mgmt0", 0x76, 0, number),
        addresses("mig0", 0x78, subnet, number),
        "link set mgmt0 up".to_owned(),
        "link set mig0 up".to_owned(),
        "link add vmbr0 type bridge forward_delay 0 mcast_snooping 0".to_owned(),
        "link set vm0 master vmbr0 up".to_owned(),
        "link set vmbr0 up".to_owned(),
    ];
    if lab.config.routed {
        lines.push(format!(
            "route add 10.78.0.0/16 via 10.78.{subnet}.{ROUTER}"
        ));
        lines.push(format!(
            "route add fd78::/32 via {}",
            v6(0xfd78, subnet, ROUTER)
        ));
    }
    batch(host, &lines)
}

fn build_client(lab: &Lab) -> io::Result<()> {
    let lines = [
        LOOPBACK.to_owned(),
        addresses("mgmt0", 0x76, 0, CLIENT),
        addresses("vm0", 0x77, 0, CLIENT),
        "link set mgmt0 up".to_owned(),
        "link set vm0 up".to_owned(),
    ];
    batch(lab.client()?, &lines)
}

fn build_router(lab: &Lab) -> io::Result<()> {
    let router = lab.machine("router")?;
    let lines = [
        LOOPBACK.to_owned(),
        addresses("mig1", 0x78, 1, ROUTER),
        addresses("mig2", 0x78, 2, ROUTER),
        "link set mig1 up".to_owned(),
        "link set mig2 up".to_owned(),
    ];
    batch(router, &lines)?;
    // Written from inside: these switches belong to the network namespace of whoever writes.
    let script = "for f in ipv4/ip_forward ipv6/conf/all/forwarding; do echo 1 >/proc/sys/net/$f || exit 1; done";
    run_ok(router.command("sh").args(["-c", script]).output()?)
}

/// Changes the switch's port of a host's link.
pub fn set_port(lab: &Lab, host: &str, link: Link, change: &str) -> io::Result<()> {
    let port = port(lab.machine(host)?.name(), link.device());
    batch(
        lab.machine("switch")?,
        &[format!("link set {port} {change}")],
    )
}

/// Puts the port back on its bridge and up.
pub fn heal_port(lab: &Lab, host: &str, link: Link) -> io::Result<()> {
    let bridge = bridge(lab, host, link);
    set_port(lab, host, link, &format!("master {bridge} up"))
}

/// Runs `ip` commands in a machine's network.
fn batch(machine: &Machine, lines: &[String]) -> io::Result<()> {
    let mut child = machine
        .network_command("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let text = lines.join("\n") + "\n";
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(text.as_bytes())?;
    }
    run_ok(child.wait_with_output()?)
}

fn run_ok(output: std::process::Output) -> io::Result<()> {
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "cannot build the lab: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}
