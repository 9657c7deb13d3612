//! The emulated links of a lab, one for each pair of migration devices.
//!
//! They lie between two bridges of the switch machine, so that the hosts' devices are the same with and without them. The
//! links of a lab that ends with its maker are threads of the maker; those of a kept lab are processes of the switch,
//! which end with it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::{Lab, LabConfig, Machine, network};
use crate::link::control::RemoteLink;
use crate::link::{Counters, Direction, End, Link, LinkSpec};

/// An emulated link, wherever it runs.
pub enum EmulatedLink {
    /// A thread of this process.
    Here(Box<Link>),
    /// A process of the switch.
    Elsewhere(RemoteLink),
}

impl EmulatedLink {
    pub fn set(&self, spec: LinkSpec) -> io::Result<()> {
        match self {
            Self::Here(link) => link.set(spec),
            Self::Elsewhere(link) => link.set(spec),
        }
    }

    /// Changes one direction; `a` is host `a`, or the router's end where there is one.
    pub fn set_direction(&self, direction: Direction, spec: LinkSpec) -> io::Result<()> {
        match self {
            Self::Here(link) => link.set_direction(direction, spec),
            Self::Elsewhere(link) => link.set_direction(direction, spec),
        }
    }

    pub fn spec(&self, direction: Direction) -> io::Result<LinkSpec> {
        match self {
            Self::Here(link) => Ok(link.spec(direction)),
            Self::Elsewhere(link) => link.spec(direction),
        }
    }

    /// What was counted so far; `a_to_b` is what host `a` sent.
    pub fn counters(&self) -> io::Result<Counters> {
        match self {
            Self::Here(link) => link.counters(),
            Self::Elsewhere(link) => link.counters(),
        }
    }

    /// Drops everything, without a sign at either end.
    pub fn cut(&self) -> io::Result<()> {
        match self {
            Self::Here(link) => link.cut(),
            Self::Elsewhere(link) => link.cut(),
        }
    }

    /// Undoes [`EmulatedLink::cut`].
    pub fn heal(&self) -> io::Result<()> {
        match self {
            Self::Here(link) => link.heal(),
            Self::Elsewhere(link) => link.heal(),
        }
    }
}

/// Makes the links that the lab is to have.
pub fn start(lab: &Lab) -> io::Result<Vec<EmulatedLink>> {
    let Some(spec) = lab.config.link else {
        return Ok(Vec::new());
    };
    let make = |nic| match lab.config.keep {
        true => elsewhere(lab, nic, spec).map(EmulatedLink::Elsewhere),
        false => here(lab, nic, spec).map(|link| EmulatedLink::Here(Box::new(link))),
    };
    (0..lab.config.migration_nics).map(make).collect()
}

/// The links of a lab that another process made.
pub fn attach(config: &LabConfig, machines: &[Machine]) -> Vec<EmulatedLink> {
    let switch = machines.iter().find(|machine| machine.name() == "switch");
    let (Some(switch), Some(_)) = (switch, config.link) else {
        return Vec::new();
    };
    let remote = |nic| RemoteLink::new(switch.path_from_outside(socket(nic)));
    (0..config.migration_nics)
        .map(|nic| EmulatedLink::Elsewhere(remote(nic)))
        .collect()
}

fn here(lab: &Lab, nic: u8, spec: LinkSpec) -> io::Result<Link> {
    let switch = lab.machine("switch")?;
    let end = |(device, bridge): (String, String)| {
        let namespace = File::open(format!("/proc/{}/ns/net", switch.init_pid()))?;
        io::Result::Ok(End {
            namespace: namespace.into(),
            device,
            addresses: Vec::new(),
            bridge: Some(bridge),
            mtu: lab.config.migration_mtu,
        })
    };
    let [a, b] = network::link_ends(&lab.config, nic).map(end);
    Link::between(a?, b?, spec)
}

fn elsewhere(lab: &Lab, nic: u8, spec: LinkSpec) -> io::Result<RemoteLink> {
    let switch = lab.machine("switch")?;
    let [a, b] = network::link_ends(&lab.config, nic);
    let mut command = switch.command(program()?);
    command.args([
        "run",
        "--a",
        "/proc/self/ns/net",
        "--b",
        "/proc/self/ns/net",
    ]);
    command.args(["--a-device", &a.0, "--a-bridge", &a.1]);
    command.args(["--b-device", &b.0, "--b-bridge", &b.1]);
    command.args(["--mtu", &lab.config.migration_mtu.to_string()]);
    command.args(["--link", &spec.to_string()]);
    command.arg("--control").arg(socket(nic));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::inherit()).spawn()?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    if line.trim() != "ready" {
        return Err(io::Error::other(format!(
            "the emulated link of migration device {nic} did not start"
        )));
    }
    Ok(RemoteLink::new(switch.path_from_outside(socket(nic))))
}

fn socket(nic: u8) -> PathBuf {
    PathBuf::from(format!("/run/godwit-link-{nic}"))
}

/// The program beside this one; tests lie a directory deeper.
fn program() -> io::Result<PathBuf> {
    let here = std::env::current_exe()?;
    let directories = here.ancestors().skip(1).take(2);
    let mut programs = directories.map(|directory: &Path| directory.join("godwit-link"));
    let found = programs.find(|program| program.is_file());
    found.ok_or_else(|| {
        let text = "godwit-link is not built: cargo build --release -p godwit-testkit";
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}
