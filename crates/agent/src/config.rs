//! The host's configuration: `/etc/godwit/host.toml`.
//!
//! Read once at start and owned by whoever read it. Refuses: unknown keys, ports that make no range, relative
//! paths, a host that names neither migration addresses nor interfaces, and both at once.

use godwit_qemu::reserved::Reserved;
use godwit_qemu::uefi::{Uefi, UefiError};
use godwit_store::read_text;
use godwit_types::datastore::{Datastore, Datastores};
use godwit_types::vm::Accelerator;
use godwit_types::{DatastoreName, HostName, PortGroup};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

/// Where the configuration is unless said otherwise.
pub const CONFIG_PATH: &str = "/etc/godwit/host.toml";
/// File in the state directory by which 'godwit host leave' knows that an earlier try got as far as clearing up. An agent that
/// starts removes it: what this host holds may change from then on.
pub const LEAVING_FILE: &str = "leaving.json";
/// Where agents listen unless said otherwise.
pub const LISTEN_PORT: u16 = 8472;

/// Longest time that guests may be given to power off, s. The system manager ends a shutdown by force after 30 minutes, of
/// which some are for what the host does before and after; godwit-guests.service waits longer than its guests.
const GUEST_SHUTDOWN_S_MAX: u64 = 1500;
/// What an earlier version took. A host with such a file has to go on; it is cut to what can be kept.
const GUEST_SHUTDOWN_S_BEFORE: u64 = 3000;

/// Longest configuration, in bytes.
const CONFIG_MAX: u64 = 1 << 20;

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}; write it, or let 'godwit host join' write it")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The file is not valid TOML or has an unknown key.
    #[error("{path} is not valid: {message}")]
    Syntax { path: PathBuf, message: String },
    /// A value is out of bounds.
    #[error("{path}: {key} is not valid: {message}")]
    Value {
        path: PathBuf,
        key: &'static str,
        /// What to write instead.
        message: String,
    },
}

/// The configuration as written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    pub name: HostName,
    /// Where the agent listens for the controller and for other hosts, with mutual TLS.
    pub listen: SocketAddr,
    /// Where the controller listens: this host asks it before it boots what no request asked for.
    #[serde(default)]
    pub controller: Option<SocketAddr>,
    /// Durable state: records, descriptions, reports, this host's certificate.
    #[serde(default = "state_dir")]
    pub state_dir: PathBuf,
    /// State that a reboot empties: sockets and the RAM files.
    #[serde(default = "run_dir")]
    pub run_dir: PathBuf,
    #[serde(default = "qemu")]
    pub qemu: PathBuf,
    /// UEFI's program and the empty variables that go with it; where neither is given, what the distribution has.
    #[serde(default)]
    pub uefi_code: Option<PathBuf>,
    #[serde(default)]
    pub uefi_variables: Option<PathBuf>,
    /// Common user of QEMUs whose VM has none of its own; `godwit-qemu` where it exists, else `nobody`.
    #[serde(default)]
    pub qemu_user: Option<String>,
    /// Addresses on the migration networks.
    #[serde(default)]
    pub migration_addresses: Vec<IpAddr>,
    /// Interfaces of the migration networks; every address of theirs is used.
    #[serde(default)]
    pub migration_interfaces: Vec<String>,
    /// Ports that destinations listen on.
    #[serde(default)]
    pub migration_ports: PortRange,
    /// Port groups and the bridge that each stands for here.
    #[serde(default)]
    pub port_groups: BTreeMap<PortGroup, String>,
    /// Named places for disks.
    #[serde(default, deserialize_with = "datastores_as_written")]
    pub datastores: Datastores,
    /// Whether this host encrypts migrations.
    #[serde(default = "yes")]
    pub encryption: bool,
    /// Overrides what runs guests.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// Whether this host asks before it boots what no request asked for.
    #[serde(default)]
    pub boot: BootRule,
    /// How long guests are given to power off when this host shuts down, s.
    #[serde(default = "guest_shutdown_s")]
    pub guest_shutdown_s: u64,
    /// State of a controller on the same machine, as the file beside this one says.
    #[serde(skip, default = "controller_state_dir")]
    pub controller_state_dir: PathBuf,
}

/// What a host does before it boots a VM that no request asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BootRule {
    /// Asks its site whether the VM went elsewhere.
    #[default]
    Ask,
    /// Boots at once. Ignored from the moment at which a second host is known.
    Alone,
}

/// A further key is a person's typo here; on its way to a controller it would be a newer version's.
fn datastores_as_written<'de, D: Deserializer<'de>>(from: D) -> Result<Datastores, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        deny_unknown_fields,
        expecting = "a table, such as { path = \"/srv/fast\" }"
    )]
    struct Written {
        path: String,
        #[serde(default)]
        shared: bool,
    }
    let written = BTreeMap::<DatastoreName, Written>::deserialize(from)?.into_iter();
    let stores =
        written.map(|(name, Written { path, shared })| (name, Datastore::new(path, shared)));
    Ok(stores.collect())
}

fn guest_shutdown_s() -> u64 {
    120
}

/// Where a controller keeps its state whose configuration this is; its own program says what is wrong with the file.
fn state_dir_of_a_controller(file: &Path) -> Option<PathBuf> {
    let text = read_text(file, CONFIG_MAX).ok()??;
    let table: toml::Table = toml::from_str(&text).ok()?;
    Some(PathBuf::from(table.get("state_dir")?.as_str()?))
}

fn controller_state_dir() -> PathBuf {
    "/var/lib/godwit-controller".into()
}

fn state_dir() -> PathBuf {
    "/var/lib/godwit".into()
}

fn run_dir() -> PathBuf {
    "/run/godwit".into()
}

fn qemu() -> PathBuf {
    "/usr/bin/qemu-system-x86_64".into()
}

fn yes() -> bool {
    true
}

/// First and last port of a range, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}

impl Default for PortRange {
    fn default() -> Self {
        Self {
            first: 49500,
            last: 49599,
        }
    }
}

impl TryFrom<String> for PortRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is not a range of ports: write it as \"49500-49599\"");
        let (first, last) = text.split_once('-').ok_or_else(wrong)?;
        let parse = |part: &str| part.trim().parse::<u16>().map_err(|_| wrong());
        let (first, last) = (parse(first)?, parse(last)?);
        if first < 1024 || first > last {
            return Err(wrong());
        }
        Ok(Self { first, last })
    }
}

impl HostConfig {
    /// Reads and checks the file at `path`.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = read_text(path, CONFIG_MAX).and_then(|text| {
            text.ok_or_else(|| std::io::Error::new(std::io::ErrorKind::NotFound, "no such file"))
        });
        let text = read.map_err(|source| ConfigError::Read {
            path: path.into(),
            source,
        })?;
        let mut config = Self::parse(&text, path)?;
        if let Some(dir) = state_dir_of_a_controller(&path.with_file_name("controller.toml")) {
            config.controller_state_dir = dir;
        }
        Ok(config)
    }

    /// Reads and checks `text`; `path` is only named in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let mut config: Self = toml::from_str(text).map_err(|error| ConfigError::Syntax {
            path: path.into(),
            message: one_line(text, &error),
        })?;
        config.check(path)?;
        if config.guest_shutdown_s > GUEST_SHUTDOWN_S_MAX {
            tracing::warn!(
                "{}: guest_shutdown_s is {}, and {GUEST_SHUTDOWN_S_MAX} counts: systemd ends a shutdown by force after 30 minutes",
                path.display(),
                config.guest_shutdown_s
            );
            config.guest_shutdown_s = GUEST_SHUTDOWN_S_MAX;
        }
        Ok(config)
    }

    /// What a host has that has not joined: nothing but defaults.
    pub fn before_joining() -> Result<Self, ConfigError> {
        let text = format!(
            "name = \"this-host\"\nlisten = \"0.0.0.0:{LISTEN_PORT}\"\nmigration_interfaces = [\"lo\"]\n"
        );
        let mut config = Self::parse(&text, Path::new(CONFIG_PATH))?;
        config.migration_interfaces.clear();
        Ok(config)
    }

    /// Whether it says where migrations go, as every written one does.
    pub fn is_joined(&self) -> bool {
        !self.migration_addresses.is_empty() || !self.migration_interfaces.is_empty()
    }

    fn check_datastores(&self, path: &Path) -> Result<(), ConfigError> {
        let refuse = |message: &str| {
            Err(ConfigError::Value {
                path: path.into(),
                key: "datastores",
                message: message.into(),
            })
        };
        let is_relative = |store: &Datastore| !Path::new(&store.path).is_absolute();
        if self.datastores.values().any(is_relative) {
            return refuse(
                "give each the absolute path of a directory, as in fast = { path = \"/srv/fast\" }, or of a block device below /dev",
            );
        }
        let is_shared_device = |store: &Datastore| store.is_device() && store.shared;
        if self.datastores.values().any(is_shared_device) {
            return refuse(
                "leave out 'shared = true' for a block device: a disk on one is of one host at a time",
            );
        }
        Ok(())
    }

    fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let refuse = |key: &'static str, message: &str| {
            Err(ConfigError::Value {
                path: path.into(),
                key,
                message: message.into(),
            })
        };
        if self.migration_addresses.is_empty() && self.migration_interfaces.is_empty() {
            return refuse(
                "migration_addresses",
                "give the addresses or migration_interfaces = [\"eth1\"] of the network that migrations use",
            );
        }
        if !self.migration_addresses.is_empty() && !self.migration_interfaces.is_empty() {
            return refuse(
                "migration_interfaces",
                "give either migration_addresses or migration_interfaces, not both",
            );
        }
        for (key, dir) in [
            ("state_dir", &self.state_dir),
            ("run_dir", &self.run_dir),
            ("qemu", &self.qemu),
        ] {
            if !dir.is_absolute() {
                return refuse(key, "give an absolute path");
            }
        }
        if self.uefi_code.is_some() != self.uefi_variables.is_some() {
            return refuse(
                "uefi_code or uefi_variables",
                "give both or neither: the variables are those that were built with the program",
            );
        }
        let uefi = self.uefi_code.iter().chain(&self.uefi_variables);
        if uefi.into_iter().any(|path| !path.is_absolute()) {
            return refuse("uefi_code or uefi_variables", "give an absolute path");
        }
        self.check_datastores(path)?;
        if self.guest_shutdown_s > GUEST_SHUTDOWN_S_BEFORE {
            return refuse(
                "guest_shutdown_s",
                "give 0 to 1500 seconds: systemd ends a shutdown by force after 30 minutes, and guests still running then would be cut off",
            );
        }
        let names = self
            .migration_interfaces
            .iter()
            .chain(self.port_groups.values());
        if names.into_iter().any(|name| !is_interface_name(name)) {
            return refuse(
                "port_groups or migration_interfaces",
                "an interface's name has 1 to 15 letters, digits, '-', '_' or '.'",
            );
        }
        Ok(())
    }

    /// What guests with UEFI get here.
    pub fn uefi(&self) -> Result<Uefi, UefiError> {
        let [code, variables] = self.uefi_files();
        Uefi::open(&code, &variables)
    }

    /// The two files, as a VM process is told them.
    pub(crate) fn uefi_files(&self) -> [String; 2] {
        [&self.uefi_code, &self.uefi_variables].map(|path| {
            let text = path.as_ref().map(|path| path.to_string_lossy());
            text.unwrap_or_default().into_owned()
        })
    }

    /// Directory of all VMs' durable state.
    pub fn vms_dir(&self) -> PathBuf {
        self.state_dir.join("vms")
    }

    /// Which entry says what this host's migration addresses are.
    pub(crate) fn migration_key(&self) -> &'static str {
        match self.migration_addresses.is_empty() {
            true => "migration_interfaces",
            false => "migration_addresses",
        }
    }

    /// The agent's local socket.
    pub fn agent_socket(&self) -> PathBuf {
        self.run_dir.join("agent.sock")
    }

    /// Where RAM files are.
    pub fn ram_dir(&self) -> PathBuf {
        self.run_dir.join("ram")
    }

    /// Where no VM's files may be.
    pub fn reserved(&self) -> Reserved {
        let dirs = [&self.state_dir, &self.run_dir, &self.controller_state_dir];
        Reserved::new(dirs.map(PathBuf::clone).to_vec(), self.ram_dir())
    }

    /// Where this host's certificate is.
    pub fn pki_dir(&self) -> PathBuf {
        self.state_dir.join("pki")
    }
}

/// Where and why TOML was refused, as part of a sentence.
pub fn one_line(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let Some(before) = before else {
        return error.message().to_string();
    };
    let what = match error.message().trim() {
        "invalid socket address syntax" => format!(
            "{} is no address with a port: write ADDRESS:PORT, such as \"10.0.0.1:{LISTEN_PORT}\"",
            key_before(before)
        ),
        "invalid IP address syntax" => format!(
            "{} is no address: write one without a port, such as \"10.0.0.1\"",
            key_before(before)
        ),
        other => other.to_owned(),
    };
    format!("line {}: {what}", before.matches('\n').count() + 1)
}

/// The key that the text before a value ends with; the value may be on a later line of a list.
fn key_before(before: &str) -> &str {
    let assigned = before.rsplit_once('=').map(|(key, _)| key);
    let line = assigned.and_then(|text| text.lines().next_back());
    line.map_or("it", str::trim)
}

/// Whether `name` can be a network interface's name; it ends up in paths under `/sys`.
pub fn is_interface_name(name: &str) -> bool {
    let fine = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !name.is_empty() && name.len() <= 15 && name.chars().all(fine) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = r#"
        name = "a"
        listen = "10.0.0.1:8472"
        migration_addresses = ["10.1.0.1", "fd00::1"]
        [port_groups]
        vm = "vmbr0"
    "#;

    fn parse(text: &str) -> Result<HostConfig, String> {
        HostConfig::parse(text, Path::new("host.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_plain_configuration_gets_the_defaults() {
        let config = parse(PLAIN).unwrap();
        assert_eq!(config.migration_ports, PortRange::default());
        assert!(config.encryption);
        assert_eq!(config.boot, BootRule::Ask);
        assert_eq!(config.guest_shutdown_s, 120);
        let alone = parse(&PLAIN.replace("listen =", "boot = \"alone\"\nlisten =")).unwrap();
        assert_eq!(alone.boot, BootRule::Alone);
        assert_eq!(config.agent_socket(), Path::new("/run/godwit/agent.sock"));
    }

    #[test]
    fn the_state_of_a_controller_on_the_same_machine_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("host.toml");
        std::fs::write(&file, PLAIN).unwrap();
        let found = || HostConfig::load(&file).unwrap().controller_state_dir;
        assert_eq!(found(), Path::new("/var/lib/godwit-controller"));
        let of_the_controller = "listen = [\"0.0.0.0:1\"]\nstate_dir = \"/srv/godwit\"\n";
        std::fs::write(dir.path().join("controller.toml"), of_the_controller).unwrap();
        assert_eq!(found(), Path::new("/srv/godwit"));
    }

    #[test]
    fn uefi_is_named_wholly_or_not_at_all() {
        let with = |lines: &str| parse(&PLAIN.replace("listen =", &format!("{lines}listen =")));
        let both = with("uefi_code = \"/c\"\nuefi_variables = \"/v\"\n").unwrap();
        assert_eq!(both.uefi_files(), ["/c", "/v"]);
        assert_eq!(parse(PLAIN).unwrap().uefi_files(), ["", ""]);
        let one = with("uefi_code = \"/c\"\n").unwrap_err();
        assert!(one.contains("both or neither"), "{one}");
        let here = with("uefi_code = \"c\"\nuefi_variables = \"/v\"\n").unwrap_err();
        assert!(here.contains("absolute path"), "{here}");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let error = parse(&PLAIN.replace("listen =", "listens =")).unwrap_err();
        assert!(
            error.contains("listens") && error.contains("line 3"),
            "{error}"
        );
        let with = |store: &str| parse(&format!("{PLAIN}[datastores]\nfast = {store}\n"));
        let natural = with("\"/srv/fast\"").unwrap_err();
        assert!(natural.contains("a table, such as { path ="), "{natural}");
        let fast = with("{ path = \"/srv/fast\", shared = true }").unwrap();
        assert!(fast.datastores.values().all(|store| store.shared));
        let error = with("{ path = \"/srv/fast\", share = true }").unwrap_err();
        assert!(error.contains("share"), "{error}");
    }

    #[test]
    fn wrong_values_say_what_to_write() {
        for (from, to, expected) in [
            (r#"name = "a""#, r#"name = "../a""#, "not a valid name"),
            (
                "migration_addresses = [\"10.1.0.1\", \"fd00::1\"]",
                "",
                "migration_interfaces = [",
            ),
            (
                "listen =",
                "migration_interfaces = [\"eth1\"]\nlisten =",
                "not both",
            ),
            (
                "listen =",
                "migration_ports = \"9-1\"\nlisten =",
                "49500-49599",
            ),
            ("listen =", "run_dir = \"run\"\nlisten =", "absolute"),
            (
                "10.0.0.1:8472",
                "10.0.0.1",
                "line 3: listen is no address with a port: write ADDRESS:PORT",
            ),
            ("fd00::1", "fd00::1/64", "migration_addresses is no address"),
            (
                "listen =",
                "guest_shutdown_s = 3001\nlisten =",
                "0 to 1500 seconds: systemd ends",
            ),
            ("vmbr0", "../vmbr0", "1 to 15"),
        ] {
            let error = parse(&PLAIN.replace(from, to)).unwrap_err();
            assert!(error.contains(expected), "{to}: {error}");
        }
    }

    #[test]
    fn a_time_for_guests_that_an_earlier_version_took_is_cut_and_keeps_no_agent_from_its_vms() {
        let text = |s: u64| PLAIN.replace("listen =", &format!("guest_shutdown_s = {s}\nlisten ="));
        for (wished, counts) in [(1500, 1500), (1501, 1500), (3000, 1500)] {
            assert_eq!(parse(&text(wished)).unwrap().guest_shutdown_s, counts);
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = HostConfig::load(Path::new("/nonexistent/host.toml")).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("/nonexistent/host.toml: no such file"),
            "{error}"
        );
    }
}
