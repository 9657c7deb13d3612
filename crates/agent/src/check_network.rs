//! The part of `host check` that looks at the network: addresses, MTU, ports, socket buffers, bridges.
//!
//! Binds each port of the range for a moment. Refuses: nothing.

use crate::addresses::missing;
use crate::check::{failed, note, ok, warning};
use crate::config::HostConfig;
use crate::system::{Interface, System};
use godwit_rpc::listen::is_here;
use godwit_types::host::Check;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};

/// MTU from which on large records do not cost packets.
const MTU_GOOD: u32 = 9000;
/// TCP buffer, bytes, that fills 1 Gb/s at 128 ms.
const TCP_BUFFER_GOOD: u64 = 16 << 20;

/// The agent waits for its address, while VMs and the local socket go on without it.
pub(crate) fn listens(address: SocketAddr) -> Check {
    match is_here(address) {
        true => ok("listen", format!("this host has the address of {address}")),
        false => failed(
            "listen",
            format!(
                "this host does not have the address of {address}: its agent waits for that, and nobody reaches it"
            ),
            "bring it up, or correct listen in host.toml",
        ),
    }
}

pub(crate) fn mtu(interfaces: &[Interface], addresses: &[IpAddr], is_joined: bool) -> Check {
    let carriers: Vec<&Interface> = interfaces
        .iter()
        .filter(|interface| {
            interface
                .addresses()
                .any(|address| addresses.contains(&address))
        })
        .collect();
    let missing: Vec<String> = addresses
        .iter()
        .filter(|address| {
            !interfaces
                .iter()
                .any(|i| i.addresses().any(|a| a == **address))
        })
        .map(ToString::to_string)
        .collect();
    if !is_joined {
        return note(
            "mtu",
            "not known before this host has joined: no migration address is configured",
            "",
        );
    }
    if !missing.is_empty() || addresses.is_empty() {
        return failed(
            "mtu",
            format!(
                "no interface has the migration address {}",
                missing.join(", ")
            ),
            "correct migration_addresses or migration_interfaces, or bring the interface up",
        );
    }
    let found: Vec<String> = carriers
        .iter()
        .map(|i| format!("{} {}", i.name, i.mtu))
        .collect();
    let found = format!("MTU of migration interfaces: {}", found.join(", "));
    if carriers.iter().all(|interface| interface.mtu >= MTU_GOOD) {
        return ok("mtu", found);
    }
    note(
        "mtu",
        found,
        format!(
            "on links of 10 Gb/s and more an MTU of {MTU_GOOD} on the whole path costs less CPU; 1500 works"
        ),
    )
}

/// The first free port of the range on any of the addresses, and how many are in use.
pub fn free_ports(config: &HostConfig, addresses: &[IpAddr]) -> (usize, Vec<u16>) {
    let range = config.migration_ports.first..=config.migration_ports.last;
    // Nobody uses a port of an address that this host does not have.
    let is_used = |address: &IpAddr, port: u16| {
        let tried = TcpListener::bind(SocketAddr::new(*address, port));
        tried.is_err_and(|error| error.kind() != ErrorKind::AddrNotAvailable)
    };
    let is_free = |port: u16| !addresses.iter().any(|address| is_used(address, port));
    let used: Vec<u16> = range.clone().filter(|port| !is_free(*port)).collect();
    (range.count() - used.len(), used)
}

pub(crate) fn ports(config: &HostConfig, addresses: &[IpAddr]) -> Check {
    let missing = missing(addresses);
    if !missing.is_empty() && missing.len() == addresses.len() {
        return warning(
            "ports",
            "not looked at: this host has none of its migration addresses",
            format!(
                "bring them up, or correct {} and restart godwit-agent",
                config.migration_key()
            ),
        );
    }
    let (free, used) = free_ports(config, addresses);
    let found = format!(
        "{free} of ports {}-{} free",
        config.migration_ports.first, config.migration_ports.last
    );
    let list: Vec<String> = used.iter().take(5).map(ToString::to_string).collect();
    match (free, used.is_empty()) {
        (0, _) => failed(
            "ports",
            found,
            "free them or set migration_ports to another range: no VM can come here",
        ),
        (_, false) => warning(
            "ports",
            format!("{found}; in use: {}", list.join(", ")),
            "fine while migrations run; else see 'ss -ltnp' for who uses them",
        ),
        (_, true) => ok("ports", found),
    }
}

fn last_number(text: &str) -> Option<u64> {
    text.split_whitespace().last()?.parse().ok()
}

pub(crate) fn socket_buffers(system: &System) -> Check {
    let read = |name: &str| last_number(&system.read(&format!("/proc/sys/net/ipv4/{name}"))?);
    let (Some(receive), Some(send)) = (read("tcp_rmem"), read("tcp_wmem")) else {
        return warning("socket-buffers", "limits cannot be read", "");
    };
    let smallest = receive.min(send);
    let found = format!(
        "TCP buffers up to {} KiB receiving, {} KiB sending",
        receive >> 10,
        send >> 10
    );
    if smallest >= TCP_BUFFER_GOOD {
        return ok("socket-buffers", found);
    }
    let mbit_per_s = smallest.saturating_mul(8) / 100_000;
    note(
        "socket-buffers",
        found,
        format!(
            "enough in one site; at 100 ms one stream reaches {mbit_per_s} Mb/s: sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864' net.ipv4.tcp_wmem='4096 65536 67108864'"
        ),
    )
}

pub(crate) fn bridges(system: &System, config: &HostConfig) -> Vec<Check> {
    if config.port_groups.is_empty() {
        return vec![warning(
            "bridges",
            "no port groups: VMs with network cards cannot run here",
            "name a bridge per port group in the configuration: [port_groups] vm = \"vmbr0\"",
        )];
    }
    let each = config.port_groups.iter().map(|(group, bridge)| {
        if system.is_bridge(bridge) && system.is_down(bridge) {
            return failed(
                "bridges",
                format!("port group {group} is bridge {bridge}, which is down"),
                format!("ip link set {bridge} up"),
            );
        }
        if system.is_bridge(bridge) {
            return ok("bridges", format!("port group {group} is bridge {bridge}"));
        }
        failed(
            "bridges",
            format!("port group {group} is {bridge}, which is no bridge here"),
            format!("ip link add {bridge} type bridge && ip link set {bridge} up, or correct [port_groups]"),
        )
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::config;
    use godwit_types::host::CheckStatus;

    #[test]
    fn a_busy_port_is_found_and_a_full_range_fails() {
        let busy = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = busy.local_addr().unwrap().port();
        let found = ports(
            &config(&format!("{port}-{port}")),
            &["127.0.0.1".parse().unwrap()],
        );
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(found.found.contains(&port.to_string()), "{}", found.found);
    }

    #[test]
    fn ports_of_an_address_that_is_missing_are_not_in_use() {
        let missing = ["192.0.2.77".parse().unwrap()];
        let found = ports(&config("49500-49501"), &missing);
        assert_eq!(found.status, CheckStatus::Warning);
        assert!(
            found.found.contains("migration addresses"),
            "{}",
            found.found
        );
        let (free, used) = free_ports(&config("49500-49501"), &missing);
        assert_eq!((free, used), (2, vec![]));
    }

    #[test]
    fn a_bridge_that_is_down_is_not_fine() {
        let dir = tempfile::tempdir().unwrap();
        let bridge = dir.path().join("sys/class/net/nobridge0");
        std::fs::create_dir_all(bridge.join("bridge")).unwrap();
        for (flags, status) in [("0x1002", CheckStatus::Failed), ("0x1003", CheckStatus::Ok)] {
            std::fs::write(bridge.join("flags"), format!("{flags}\n")).unwrap();
            let found = bridges(&System::under(dir.path()), &config("49500-49501"));
            assert_eq!(found[0].status, status, "{flags}");
        }
    }

    #[test]
    fn a_missing_bridge_fails_with_its_remedy() {
        let found = bridges(&System::default(), &config("49500-49501"));
        assert_eq!(found[0].status, CheckStatus::Failed);
        assert!(
            found[0]
                .remedy
                .contains("ip link add nobridge0 type bridge")
        );
    }
}
