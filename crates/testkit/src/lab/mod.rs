//! Test hosts on one machine: namespaces that behave like two hosts, a client, a controller and their networks.
//!
//! ```text
//!   a ----- b ----- controller ----- client      management   10.76.0.0/24  fd76::/64   mgmt0
//!   a ----- b                                    migration    10.78.0.0/24  fd78::/64   mig0
//!   a [router] b           (routed)              migration    10.78.1.0/24, 10.78.2.0/24, fd78:0:0:1::/64, fd78:0:0:2::/64
//!   a ===== b ===== client                       VM network   10.77.0.0/24  fd77::/64   vmbr0 on hosts, vm0 on the client
//! ```
//!
//! The migration network can have up to four devices on each host ([`LabConfig::migration_nics`]) and an emulated link
//! with a round trip, a rate and losses for each ([`LabConfig::link`]).
//!
//! Each machine has its own mount, PID, network, UTS and IPC namespaces; the system is read-only there and
//! the directories in [`namespace::PRIVATE_DIRECTORIES`] are its own. A further machine is the switch. All devices
//! lie inside the lab's namespaces, so labs do not meet each other, and need no names of their own outside. A [`Lab`]
//! ends with its value or its process; one made with [`LabConfig::keep`] stays, is recorded under `/run/godwit-lab`,
//! and is ended by [`Lab::end`] on [`Lab::open`].

mod emulated;
pub mod machine;
pub mod namespace;
mod network;

use std::fs::{File, Permissions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::link::LinkSpec;
use crate::testvol;
pub use emulated::EmulatedLink;
pub use machine::{Machine, MachineCommand, Process};
use namespace::Plan;
pub use network::{Link, host_addresses};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabConfig {
    /// Name of the lab; needed to be unique only for labs that are kept.
    pub name: String,
    /// Number of hosts, named `a`, `b` and so on.
    pub hosts: u8,
    /// Puts a router between the hosts' migration networks (two hosts only).
    pub routed: bool,
    pub migration_mtu: u32,
    /// Directories that all machines share, writable, at the same path.
    pub shared: Vec<PathBuf>,
    /// Directories that all machines see, read-only, even if they lie in one that is private; so are the build directory and
    /// the current one.
    #[serde(default)]
    pub visible: Vec<PathBuf>,
    /// The lab outlives this process.
    pub keep: bool,
    /// Puts an emulated link into the migration network, one for each of `migration_nics`: between host `a` and all
    /// others, or between the router and host `b`.
    #[serde(default)]
    pub link: Option<LinkSpec>,
    /// Migration devices of each host: `mig0`, `mig1` and so on, 1 to 4.
    #[serde(default = "one")]
    pub migration_nics: u8,
    /// How several migration devices are addressed.
    #[serde(default)]
    pub migration_subnets: Subnets,
    /// The hosts' and the controller's state directories ([`HOST_STATE`], [`CONTROLLER_STATE`]) lie on test volumes, which
    /// end with this process. Where there is no FUSE they lie in memory, as they do without this, and a line says so.
    #[serde(default)]
    pub volumes: bool,
    /// Directories of each host in which images of disks are to be: they lie on test volumes, one each, whose files the kernel
    /// caches nothing of. Where there is no FUSE they lie in memory.
    #[serde(default)]
    pub stores: Vec<PathBuf>,
}

/// Directories that a host keeps its state in.
pub const HOST_STATE: [&str; 2] = ["/var/lib/godwit", "/etc/godwit"];
/// Directories that the controller keeps its state in.
pub const CONTROLLER_STATE: [&str; 2] = ["/var/lib/godwit-controller", "/etc/godwit"];

/// How several migration devices of a host are addressed. Each has a routing table of its own for what is sent from its
/// addresses, and answers for its own addresses only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subnets {
    /// All on one subnet and one switch; an emulated link is that of host `a`'s device to the switch.
    #[default]
    One,
    /// Each on a subnet and a switch of its own.
    Each,
}

fn one() -> u8 {
    1
}

impl Default for LabConfig {
    fn default() -> Self {
        let name = format!("lab-{}", std::process::id());
        Self {
            name,
            hosts: 2,
            routed: false,
            migration_mtu: 1500,
            shared: Vec::new(),
            visible: Vec::new(),
            keep: false,
            link: None,
            migration_nics: 1,
            migration_subnets: Subnets::One,
            volumes: false,
            stores: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub management4: IpAddr,
    pub management6: IpAddr,
    pub migration4: IpAddr,
    pub migration6: IpAddr,
}

pub const HOSTS_MAX: u8 = 32;

pub struct Lab {
    config: LabConfig,
    links: Vec<EmulatedLink>,
    machines: Vec<Machine>,
}

/// What is recorded of a kept lab. The start time tells a machine from a later process with its number.
#[derive(Serialize, Deserialize)]
struct Record {
    config: LabConfig,
    machines: Vec<(String, i32, u64)>,
}

impl Lab {
    /// Builds the lab. Needs root.
    pub fn new(config: LabConfig) -> io::Result<Self> {
        check_config(&config)?;
        let mut lab = Self {
            config,
            machines: Vec::new(),
            links: Vec::new(),
        };
        let mut visible = visible_directories();
        visible.extend(lab.config.visible.iter().cloned());
        let volumes = lab.config.volumes && has_volumes();
        for name in lab.machine_names() {
            let config = &lab.config;
            let plan = Plan {
                name: &name,
                visible: &visible,
                shared: &config.shared,
                outlive_maker: config.keep,
            };
            let mut machine = Machine::start(&plan)?;
            for directory in lab.state_directories(&name).iter().filter(|_| volumes) {
                machine.mount_volume(Path::new(directory))?;
            }
            lab.make_stores(&mut machine)?;
            lab.machines.push(machine);
        }
        match network::build(&lab).and_then(|()| emulated::start(&lab)) {
            Ok(links) => lab.links = links,
            Err(error) => {
                lab.end()?;
                return Err(error);
            }
        }
        if lab.config.keep {
            lab.record()?;
        }
        Ok(lab)
    }

    /// A lab that was made with [`LabConfig::keep`] by another process.
    pub fn open(name: &str) -> io::Result<Self> {
        let record = read_record(name)?;
        let mut machines = Vec::new();
        for (machine, pid, started) in record.machines {
            if start_time(pid)? != started {
                return Err(io::Error::other(format!(
                    "lab {name} is gone, remove it with: godwit-lab down {name}"
                )));
            }
            machines.push(Machine::attach(&machine, pid)?);
        }
        let links = emulated::attach(&record.config, &machines);
        Ok(Self {
            config: record.config,
            machines,
            links,
        })
    }

    /// Names of the kept labs.
    pub fn list() -> io::Result<Vec<String>> {
        let entries = match std::fs::read_dir(records()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let stem = |entry: std::fs::DirEntry| {
            entry
                .path()
                .file_stem()
                .map(|stem| stem.to_string_lossy().into_owned())
        };
        Ok(entries.flatten().filter_map(stem).collect())
    }

    /// Ends a kept lab by its name, also one of which only some machines are left.
    pub fn clean_up(name: &str) -> io::Result<()> {
        let record = read_record(name)?;
        for (machine, pid, started) in record.machines {
            if start_time(pid).is_ok_and(|time| time == started) {
                Machine::attach(&machine, pid)?.end()?;
            }
        }
        std::fs::remove_file(record_path(name))
    }

    /// The machine of that name: a host, `controller`, `client`, `router` or `switch`.
    pub fn machine(&self, name: &str) -> io::Result<&Machine> {
        let found = self.machines.iter().find(|machine| machine.name() == name);
        found.ok_or_else(|| {
            let names = self.machine_names().join(", ");
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("no machine '{name}' in this lab, it has: {names}"),
            )
        })
    }

    /// Host number 0, 1, ... (`a`, `b`, ...).
    pub fn host(&self, index: u8) -> io::Result<&Machine> {
        self.machine(&host_name(index))
    }

    /// The client on the VM and management networks.
    pub fn client(&self) -> io::Result<&Machine> {
        self.machine("client")
    }

    /// The machine for the controller, on the management network.
    pub fn controller(&self) -> io::Result<&Machine> {
        self.machine("controller")
    }

    /// Addresses of host number 0, 1, ...
    pub fn addresses(&self, index: u8) -> Addresses {
        host_addresses(index, self.config.routed)
    }

    pub fn config(&self) -> &LabConfig {
        &self.config
    }

    /// Takes a host's link down at the switch: the host sees its carrier go.
    pub fn cut_link(&self, host: &str, link: Link) -> io::Result<()> {
        network::set_port(self, host, link, "down")
    }

    /// Lets a host's link carry nothing while its carrier stays: what a failed switch looks like.
    pub fn silence_link(&self, host: &str, link: Link) -> io::Result<()> {
        network::set_port(self, host, link, "nomaster")
    }

    /// Undoes [`Lab::cut_link`] and [`Lab::silence_link`].
    pub fn heal_link(&self, host: &str, link: Link) -> io::Result<()> {
        network::heal_port(self, host, link)
    }

    /// Addresses of a host's migration device, IPv4 and IPv6; both are counted from 0.
    pub fn migration_addresses(&self, host: u8, nic: u8) -> (IpAddr, IpAddr) {
        network::migration_addresses(&self.config, host, nic)
    }

    /// The emulated link of a pair of migration devices, counted from 0.
    pub fn link(&self, nic: u8) -> io::Result<&EmulatedLink> {
        self.links.get(usize::from(nic)).ok_or_else(|| {
            let text = format!("migration device {nic} of this lab has no emulated link");
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }

    /// All emulated links, in the order of the migration devices.
    pub fn links(&self) -> &[EmulatedLink] {
        &self.links
    }

    /// Ends all machines and everything in them.
    pub fn end(&mut self) -> io::Result<()> {
        self.links.clear();
        for machine in &mut self.machines {
            machine.end()?;
        }
        self.machines.clear();
        if self.config.keep && record_path(&self.config.name).exists() {
            std::fs::remove_file(record_path(&self.config.name))?;
        }
        Ok(())
    }

    fn machine_names(&self) -> Vec<String> {
        let mut names: Vec<String> = (0..self.config.hosts).map(host_name).collect();
        names.extend(["controller", "client", "switch"].map(str::to_owned));
        if self.config.routed {
            names.push("router".to_owned());
        }
        names
    }

    fn state_directories(&self, machine: &str) -> &'static [&'static str] {
        match machine {
            "controller" => &CONTROLLER_STATE,
            _ if self.is_host(machine) => &HOST_STATE,
            _ => &[],
        }
    }

    fn is_host(&self, machine: &str) -> bool {
        (0..self.config.hosts).any(|host| host_name(host) == machine)
    }

    /// Everybody may make files there, and that outlives a power cut.
    fn make_stores(&self, machine: &mut Machine) -> io::Result<()> {
        if !self.is_host(machine.name()) {
            return Ok(());
        }
        for at in &self.config.stores {
            let directory = machine.path_from_outside(at);
            match has_volumes() {
                true => drop(machine.mount_direct_volume(at)?),
                false => std::fs::create_dir_all(&directory)?,
            }
            std::fs::set_permissions(&directory, Permissions::from_mode(0o1777))?;
            File::open(&directory)?.sync_all()?;
        }
        Ok(())
    }

    fn record(&self) -> io::Result<()> {
        let entry = |machine: &Machine| {
            let pid = machine.init_pid();
            start_time(pid).map(|started| (machine.name().to_owned(), pid, started))
        };
        let machines = self.machines.iter().map(entry).collect::<io::Result<_>>()?;
        let record = Record {
            config: self.config.clone(),
            machines,
        };
        std::fs::create_dir_all(records())?;
        std::fs::write(
            record_path(&self.config.name),
            serde_json::to_vec_pretty(&record)?,
        )
    }
}

fn check_config(config: &LabConfig) -> io::Result<()> {
    let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    let name_is_plain = config
        .name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if config.name.is_empty() || !name_is_plain {
        return refuse(format!(
            "lab name '{}' has other characters than letters, digits, - and _",
            config.name
        ));
    }
    if !(1..=HOSTS_MAX).contains(&config.hosts) || config.routed && config.hosts != 2 {
        return refuse(format!(
            "a lab has 1 to {HOSTS_MAX} hosts, a routed one has 2"
        ));
    }
    if !(1280..=9216).contains(&config.migration_mtu) {
        return refuse(format!(
            "MTU {} is not between 1280 (IPv6) and 9216",
            config.migration_mtu
        ));
    }
    if !(1..=4).contains(&config.migration_nics) || config.routed && config.migration_nics != 1 {
        return refuse("a host has 1 to 4 migration devices, in a routed lab 1".to_owned());
    }
    if let Some(Err(error)) = config.link.map(|link| link.check()) {
        return refuse(error.to_string());
    }
    if config.keep && (config.volumes || !config.stores.is_empty()) {
        return refuse("a lab that is kept has no volumes: they would end now".to_owned());
    }
    if config.keep && record_path(&config.name).exists() {
        return refuse(format!(
            "lab {0} exists already, end it with: godwit-lab down {0}",
            config.name
        ));
    }
    Ok(())
}

fn has_volumes() -> bool {
    match testvol::unavailable() {
        None => true,
        Some(why) => {
            println!("  state directories lie in memory, where a power cut shows nothing: {why}");
            false
        }
    }
}

/// Name of host number 0, 1, ...: `a` to `z`, then `aa`, `ab` and so on.
pub fn host_name(index: u8) -> String {
    let letter = char::from(b'a' + index % 26);
    match index / 26 {
        0 => letter.to_string(),
        round => format!("{}{letter}", char::from(b'a' + (round - 1) % 26)),
    }
}

/// The build directory and the current directory stay visible even if they lie in a directory that is private.
fn visible_directories() -> Vec<PathBuf> {
    let target = crate::guest::linux::target_dir().ok();
    target
        .into_iter()
        .chain(std::env::current_dir().ok())
        .collect()
}

fn records() -> PathBuf {
    PathBuf::from("/run/godwit-lab")
}

fn record_path(name: &str) -> PathBuf {
    records().join(format!("{name}.json"))
}

fn read_record(name: &str) -> io::Result<Record> {
    let text = std::fs::read(record_path(name)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            io::Error::new(error.kind(), format!("no lab named '{name}' is up"))
        }
        _ => error,
    })?;
    Ok(serde_json::from_slice(&text)?)
}

/// Field 22 of `/proc/PID/stat`: ticks after boot at which the process started.
fn start_time(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let field = after_name
        .split_whitespace()
        .nth(19)
        .and_then(|text| text.parse().ok());
    field.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has no start time")))
}
