//! Brings test hosts up and down by hand, and runs commands on them. See `--help`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use godwit_testkit::lab::{Lab, LabConfig, Link, Subnets};
use godwit_testkit::link::LinkSpec;

#[derive(Parser)]
#[command(
    about = "Test hosts in namespaces: two hosts, a client, a controller and their networks",
    version
)]
struct Arguments {
    /// Name of the lab
    #[arg(long, default_value = "lab", global = true)]
    name: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Builds the lab; it stays until 'down'
    Up {
        /// Number of hosts (a, b, ...)
        #[arg(long, default_value_t = 2)]
        hosts: u8,
        /// Different migration subnets with a router between them
        #[arg(long)]
        routed: bool,
        /// MTU of the migration network
        #[arg(long, default_value_t = 1500)]
        mtu: u32,
        /// An emulated link in the migration network, such as rtt=50ms,rate=1gbit,loss=0.1%,queue=10ms
        #[arg(long)]
        link: Option<LinkSpec>,
        /// Migration devices of each host, 1 to 4, each with its own emulated link if there is one
        #[arg(long, default_value_t = 1)]
        nics: u8,
        /// Puts each migration device on a subnet of its own
        #[arg(long)]
        subnets: bool,
        /// A directory that all machines share, writable
        #[arg(long)]
        shared: Vec<PathBuf>,
    },
    /// Ends the lab and all that runs in it
    Down,
    /// Names of the labs that are up
    List,
    /// Addresses of the hosts
    Show,
    /// Runs a command on a machine (a, b, client, controller, router, switch) and exits with its code
    Exec {
        /// The machine
        machine: String,
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Changes the emulated link of a migration device
    SetLink {
        /// What it is like from now on
        link: LinkSpec,
        /// The migration device, counted from 0
        #[arg(long, default_value_t = 0)]
        nic: u8,
    },
    /// Prints what the emulated link of a migration device counted, as JSON
    Counters {
        /// The migration device, counted from 0
        #[arg(long, default_value_t = 0)]
        nic: u8,
    },
    /// Takes a host's link down
    Cut {
        /// The host
        host: String,
        /// Which link
        #[arg(long, value_enum, default_value = "migration")]
        link: LinkName,
        /// Keeps the carrier and drops everything instead
        #[arg(long)]
        silent: bool,
    },
    /// Brings a host's link back
    Heal {
        /// The host
        host: String,
        /// Which link
        #[arg(long, value_enum, default_value = "migration")]
        link: LinkName,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum LinkName {
    Management,
    Migration,
    Vm,
}

impl From<LinkName> for Link {
    fn from(name: LinkName) -> Self {
        match name {
            LinkName::Management => Link::Management,
            LinkName::Migration => Link::Migration,
            LinkName::Vm => Link::Vm,
        }
    }
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("godwit-lab: {error:#}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode> {
    let Arguments { name, command } = Arguments::parse();
    match command {
        Command::Up {
            hosts,
            routed,
            mtu,
            link,
            nics,
            subnets,
            shared,
        } => {
            let lab = Lab::new(LabConfig {
                name,
                hosts,
                routed,
                migration_mtu: mtu,
                shared,
                visible: Vec::new(),
                keep: true,
                link,
                migration_nics: nics,
                migration_subnets: if subnets { Subnets::Each } else { Subnets::One },
                volumes: false,
                stores: Vec::new(),
            })?;
            show(&lab);
        }
        Command::Down => Lab::clean_up(&name)?,
        Command::List => Lab::list()?.iter().for_each(|name| println!("{name}")),
        Command::Show => show(&Lab::open(&name)?),
        Command::Exec { machine, command } => return exec(&name, &machine, &command),
        Command::SetLink { link, nic } => Lab::open(&name)?.link(nic)?.set(link)?,
        Command::Counters { nic } => {
            let counters = Lab::open(&name)?.link(nic)?.counters()?;
            println!("{}", serde_json::to_string_pretty(&counters)?);
        }
        Command::Cut {
            host,
            link,
            silent: false,
        } => Lab::open(&name)?.cut_link(&host, link.into())?,
        Command::Cut {
            host,
            link,
            silent: true,
        } => Lab::open(&name)?.silence_link(&host, link.into())?,
        Command::Heal { host, link } => Lab::open(&name)?.heal_link(&host, link.into())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn show(lab: &Lab) {
    for index in 0..lab.config().hosts {
        let addresses = lab.addresses(index);
        let name = char::from(b'a' + index);
        println!(
            "{name}  management {} {}  migration {} {}",
            addresses.management4,
            addresses.management6,
            addresses.migration4,
            addresses.migration6
        );
        for nic in 1..lab.config().migration_nics {
            let (four, six) = lab.migration_addresses(index, nic);
            println!("   migration {nic}  {four} {six}");
        }
    }
}

fn exec(lab: &str, machine: &str, command: &[String]) -> Result<ExitCode> {
    let lab = Lab::open(lab)?;
    let (program, arguments) = command.split_first().context("no command")?;
    let status = lab
        .machine(machine)?
        .command(program)
        .args(arguments)
        .status()
        .with_context(|| format!("cannot run {program} on {machine}"))?;
    Ok(ExitCode::from(status.code().map_or(1, |code| code as u8)))
}
