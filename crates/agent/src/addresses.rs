//! Which addresses this host has for migrations. They may come and go while the agent runs: it may be started before DHCP
//! has answered.
//!
//! Owns what was found last. Refuses: nothing; an interface that is not there has no addresses.

use crate::config::HostConfig;
use crate::pause::stops_within;
use crate::system::{Interface, interfaces};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Pause between two looks at the interfaces.
const LOOK_EACH: Duration = Duration::from_secs(5);
/// Longest wait for this host's own tools.
const TOOLS: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Found {
    migration: Vec<IpAddr>,
    links: Vec<(String, Vec<IpAddr>)>,
}

/// What was found last.
#[derive(Debug, Default)]
pub(crate) struct Addresses(Mutex<Found>);

impl Addresses {
    /// Looks for the first time.
    pub(crate) async fn find(config: &HostConfig) -> Self {
        let addresses = Self::default();
        addresses.look(config, &interfaces(TOOLS).await);
        addresses
    }

    /// Those of a configuration that names them itself.
    #[cfg(test)]
    pub(crate) fn of(config: &HostConfig) -> Self {
        let addresses = Self::default();
        addresses.look(config, &[]);
        addresses
    }

    /// Addresses on the migration networks.
    pub(crate) fn migration(&self) -> Vec<IpAddr> {
        self.found(|found| found.migration.clone())
    }

    /// Interfaces that carry migrations, with their addresses.
    pub(crate) fn links(&self) -> Vec<(String, Vec<IpAddr>)> {
        self.found(|found| found.links.clone())
    }

    fn found<T>(&self, with: impl FnOnce(&mut Found) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn look(&self, config: &HostConfig, interfaces: &[Interface]) {
        let migration = migration_addresses(config, interfaces);
        let links = migration_links(&migration, interfaces);
        self.found(|found| {
            if found.migration != migration {
                let listed: Vec<String> = migration.iter().map(ToString::to_string).collect();
                tracing::info!(addresses = listed.join(" "), "the addresses for migrations");
            }
            *found = Found { migration, links };
        });
    }

    /// Looks until `stop` turns true.
    pub(crate) async fn keep(&self, config: &HostConfig, mut stop: watch::Receiver<bool>) {
        // An agent that ends starts no tool that would outlive it.
        while !stops_within(&mut stop, LOOK_EACH).await {
            let interfaces = interfaces(TOOLS).await;
            // It says nothing rather than that there is none.
            if !interfaces.is_empty() {
                self.look(config, &interfaces);
            }
        }
    }
}

/// Those of the addresses that no interface of this host has at this moment: nothing can be sent from them.
pub(crate) fn missing(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let is_missing = |address: &&IpAddr| {
        let tried = TcpListener::bind(SocketAddr::new(**address, 0));
        matches!(tried, Err(error) if error.kind() == ErrorKind::AddrNotAvailable)
    };
    addresses.iter().filter(is_missing).copied().collect()
}

/// The interfaces that have migration addresses.
fn migration_links(addresses: &[IpAddr], interfaces: &[Interface]) -> Vec<(String, Vec<IpAddr>)> {
    let of_migrations = |interface: &Interface| -> Vec<IpAddr> {
        let all = interface.addresses();
        all.filter(|address| addresses.contains(address)).collect()
    };
    interfaces
        .iter()
        .map(|interface| (interface.name.clone(), of_migrations(interface)))
        .filter(|(_, addresses)| !addresses.is_empty())
        .collect()
}

/// The addresses that migrations use: the configured ones, or all of the configured interfaces.
pub(crate) fn migration_addresses(config: &HostConfig, interfaces: &[Interface]) -> Vec<IpAddr> {
    let of_interfaces = interfaces
        .iter()
        .filter(|interface| config.migration_interfaces.contains(&interface.name))
        .flat_map(Interface::addresses);
    config
        .migration_addresses
        .iter()
        .copied()
        .chain(of_interfaces)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::parse_interfaces;
    use std::path::Path;

    #[test]
    fn an_address_that_comes_after_the_agent_is_told_from_then_on() {
        let text = "name = \"a\"\nlisten = \"127.0.0.1:1\"\nmigration_interfaces = [\"eth1\"]\n[port_groups]\n";
        let config = HostConfig::parse(text, Path::new("host.toml")).unwrap();
        let addresses = Addresses::default();
        let eth1 = |addresses: &str| {
            let json = format!(r#"[{{"ifname":"eth1","mtu":1500,"addr_info":[{addresses}]}}]"#);
            parse_interfaces(json.as_bytes())
        };
        addresses.look(&config, &eth1(""));
        assert!(addresses.migration().is_empty() && addresses.links().is_empty());
        addresses.look(&config, &eth1(r#"{"local":"10.0.0.1","scope":"global"}"#));
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(addresses.migration(), [address]);
        assert_eq!(addresses.links(), [("eth1".into(), vec![address])]);
    }

    #[test]
    fn an_address_that_no_interface_has_is_missing() {
        let ours: IpAddr = "127.0.0.1".parse().unwrap();
        // Set aside for examples: no machine has it.
        let nobodys: IpAddr = "192.0.2.77".parse().unwrap();
        assert_eq!(missing(&[ours, nobodys]), [nobodys]);
    }
}
