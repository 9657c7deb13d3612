//! The lab's networks: bridges in the switch machine, a veth pair for every connection.
//!
//! Built with `ip -batch`, one process for each machine. It relies on no traffic shaping, which the kernel may lack.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Stdio;

use super::{Addresses, Lab, LabConfig, Machine, Subnets, host_name};

/// One of a host's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// To the controller and the other hosts' agents.
    Management,
    Migration,
    Vm,
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
    for bridge in bridges(&lab.config) {
        // No multicast snooping: it drops neighbour discovery of ports it has not heard from.
        lines.push(format!(
            "link add {bridge} type bridge forward_delay 0 mcast_snooping 0"
        ));
        lines.push(format!("link set {bridge} up"));
    }
    for host in 0..lab.config.hosts {
        let machine = lab.host(host)?;
        for link in [Link::Management, Link::Migration, Link::Vm] {
            for (device, bridge) in connections(&lab.config, host, link) {
                lines.extend(cable(machine, &device, &bridge, mtu_of(link, mtu)));
            }
        }
    }
    lines.extend(cable(lab.controller()?, "mgmt0", "br-mgmt", 1500));
    lines.extend(cable(lab.client()?, "mgmt0", "br-mgmt", 1500));
    lines.extend(cable(lab.client()?, "vm0", "br-vm", 1500));
    if lab.config.routed {
        lines.extend(cable(lab.machine("router")?, "mig1", "br-mig1", mtu));
        lines.extend(cable(lab.machine("router")?, "mig2", "br-mig2", mtu));
    }
    let switch = lab.machine("switch")?;
    batch(switch, &lines)?;
    pass_by_firewall(switch)
}

/// A switch has no firewall: what it passes on does not go through the kernel's, where that is loaded at all.
fn pass_by_firewall(switch: &Machine) -> io::Result<()> {
    let script = "for f in /proc/sys/net/bridge/bridge-nf-call-*; do [ ! -e $f ] || echo 0 >$f || exit 1; done";
    run_ok(switch.command("sh").args(["-c", script]).output()?)
}

fn mtu_of(link: Link, migration_mtu: u32) -> u32 {
    if link == Link::Migration {
        migration_mtu
    } else {
        1500
    }
}

fn bridges(config: &LabConfig) -> BTreeSet<String> {
    let mut all = BTreeSet::from(["br-mgmt", "br-vm", "br-mig1", "br-mig2"].map(str::to_owned));
    for host in 0..config.hosts {
        let bridges = connections(config, host, Link::Migration);
        all.extend(bridges.into_iter().map(|(_, bridge)| bridge));
    }
    let nics = 0..config.migration_nics;
    all.extend(nics.flat_map(|nic| link_ends(config, nic).map(|(_, bridge)| bridge)));
    all
}

/// A host's devices of that kind, each with the switch's bridge that it is connected to.
fn connections(config: &LabConfig, host: u8, link: Link) -> Vec<(String, String)> {
    match link {
        Link::Management => vec![("mgmt0".to_owned(), "br-mgmt".to_owned())],
        Link::Vm => vec![("vm0".to_owned(), "br-vm".to_owned())],
        Link::Migration => (0..config.migration_nics)
            .map(|nic| (format!("mig{nic}"), migration_bridge(config, host, nic)))
            .collect(),
    }
}

/// The bridge of a host's migration device: one for each subnet, and one for each emulated link at its far end.
fn migration_bridge(config: &LabConfig, host: u8, nic: u8) -> String {
    if config.link.is_some() && host == beyond_link(config) {
        return far_bridge(nic);
    }
    format!("br-mig{}", place(config, host, nic).0)
}

/// The host that the emulated links connect to everything else.
fn beyond_link(config: &LabConfig) -> u8 {
    if config.routed { 1 } else { 0 }
}

fn far_bridge(nic: u8) -> String {
    format!("br-far{nic}")
}

/// The devices of an emulated link with their bridges; what comes in at the first is what host `a` sent.
pub fn link_ends(config: &LabConfig, nic: u8) -> [(String, String); 2] {
    let far = far_bridge(nic);
    let near = format!("br-mig{}", place(config, beyond_link(config), nic).0);
    let [a, b] = if config.routed {
        [near, far]
    } else {
        [far, near]
    };
    [(format!("link{nic}a"), a), (format!("link{nic}b"), b)]
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
    let mut lines = vec![
        LOOPBACK.to_owned(),
        addresses("mgmt0", 0x76, 0, index + 1),
        "link set mgmt0 up".to_owned(),
        "link add vmbr0 type bridge forward_delay 0 mcast_snooping 0".to_owned(),
        "link set vm0 master vmbr0 up".to_owned(),
        "link set vmbr0 up".to_owned(),
    ];
    for nic in 0..lab.config.migration_nics {
        let (subnet, number) = place(&lab.config, index, nic);
        lines.push(addresses(&format!("mig{nic}"), 0x78, subnet, number));
        lines.push(format!("link set mig{nic} up"));
    }
    if lab.config.routed {
        let (subnet, _) = place(&lab.config, index, 0);
        lines.push(format!(
            "route add 10.78.0.0/16 via 10.78.{subnet}.{ROUTER}"
        ));
        lines.push(format!(
            "route add fd78::/32 via {}",
            v6(0xfd78, subnet, ROUTER)
        ));
    }
    batch(host, &lines)?;
    if lab.config.migration_nics > 1 {
        separate_nics(lab, host, index)?;
    }
    Ok(())
}

/// Lets each of several migration devices answer for its own addresses only, and send what comes from them.
fn separate_nics(lab: &Lab, host: &Machine, index: u8) -> io::Result<()> {
    let script = "cd /proc/sys/net/ipv4/conf/all && echo 1 >arp_ignore && echo 2 >arp_announce";
    run_ok(host.command("sh").args(["-c", script]).output()?)?;
    let (mut four, mut six) = (Vec::new(), Vec::new());
    for nic in 0..lab.config.migration_nics {
        let table = 100 + u32::from(nic);
        let (subnet, _) = place(&lab.config, index, nic);
        let (from4, from6) = migration_addresses(&lab.config, index, nic);
        let subnet6 = v6(0xfd78, subnet, 0);
        four.push(format!("rule add from {from4} lookup {table}"));
        four.push(format!(
            "route add 10.78.{subnet}.0/24 dev mig{nic} src {from4} table {table}"
        ));
        six.push(format!("rule add from {from6} lookup {table}"));
        six.push(format!(
            "route add {subnet6}/64 dev mig{nic} src {from6} table {table}"
        ));
    }
    batch_with(host, &["-4"], &four)?;
    batch_with(host, &["-6"], &six)
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

/// Changes the switch's ports of a host's link.
pub fn set_port(lab: &Lab, host: &str, link: Link, change: &str) -> io::Result<()> {
    change_ports(lab, host, link, |_| change.to_owned())
}

/// Puts the ports back on their bridges and up.
pub fn heal_port(lab: &Lab, host: &str, link: Link) -> io::Result<()> {
    change_ports(lab, host, link, |bridge| format!("master {bridge} up"))
}

fn change_ports(
    lab: &Lab,
    host: &str,
    link: Link,
    change: impl Fn(&str) -> String,
) -> io::Result<()> {
    let name = lab.machine(host)?.name();
    let mut hosts = 0..lab.config.hosts;
    let Some(index) = hosts.find(|&index| host_name(index) == name) else {
        return Err(io::Error::other(format!("{name} is not a host")));
    };
    let line = |(device, bridge): (String, String)| {
        format!("link set {} {}", port(name, &device), change(&bridge))
    };
    let lines = connections(&lab.config, index, link).into_iter().map(line);
    batch(lab.machine("switch")?, &lines.collect::<Vec<_>>())
}

/// Runs `ip` commands in a machine's network.
fn batch(machine: &Machine, lines: &[String]) -> io::Result<()> {
    batch_with(machine, &[], lines)
}

fn batch_with(machine: &Machine, options: &[&str], lines: &[String]) -> io::Result<()> {
    let mut child = machine
        .network_command("ip")
        .args(options)
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
