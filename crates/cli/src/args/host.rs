//! `godwit host`: its commands, options and examples.
//!
//! Plain data made by clap. Refuses: whatever clap refuses, with exit code 2.

use super::{address, whole};
use clap::{Args, Subcommand};
use godwit_agent::config::{CONFIG_PATH, LISTEN_PORT};
use godwit_types::HostName;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Hosts.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Make this machine a host of a controller (run on the host, with the token from 'host add')
    #[command(
        after_help = "Example:\n  godwit host join TOKEN --name a --migration 10.1.0.1 --port-group vm=vmbr0"
    )]
    Join(HostJoin),
    /// Give this host another certificate after its own has ended (run on the host, with a token from 'host add')
    #[command(
        after_help = "Certificates renew themselves; this is for a host that was off, or cut off, for so long that its own has ended. It stays the host that it was: its records stay, its VMs run on. A running agent takes the new one at once, and the former one is refused from then on.\n\nExamples:\n  godwit host renew TOKEN\n  godwit host renew - < token"
    )]
    Renew(HostRenew),
    /// Take this machine out of its site (run on the host; it must hold no VM)
    #[command(
        after_help = "The controller removes the host and revokes its certificate; then the agent is stopped, its records are moved aside, and certificate and configuration are removed, so that the machine may join again. Move its VMs away first, with 'godwit host drain'.\n\nExample:\n  godwit host leave"
    )]
    Leave(HostLeave),
    /// List the hosts
    #[command(after_help = "Example:\n  godwit host list --json")]
    List,
    /// Show one host
    #[command(after_help = "Example:\n  godwit host show a")]
    Show {
        /// The host
        host: HostName,
    },
    /// Make a one-time token for another host to join with
    #[command(after_help = "Example:\n  godwit host add")]
    Add,
    /// Remove a host and revoke its certificate
    #[command(after_help = "Example:\n  godwit host remove a")]
    Remove {
        /// The host
        host: HostName,
        /// It does not answer and is certainly off, although it may hold VMs
        #[arg(long)]
        confirm_unreachable: bool,
    },
    /// Check a host: kernel, userfaultfd, QEMU, CPU, AES, MTU, clock, ports, huge pages, datastores; each with its remedy
    #[command(
        after_help = "Examples:\n  godwit host check          (this machine)\n  godwit host check b        (through the controller)"
    )]
    Check {
        /// The host; this machine when left out
        host: Option<HostName>,
        /// This machine's configuration
        #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
        config: PathBuf,
    },
    /// Show what hosts are busy with: migration interfaces, cores, memory, each migration's share
    #[command(after_help = "Examples:\n  godwit host top\n  godwit host top b --once --json")]
    Top(HostTopArgs),
    /// Move every VM off a host, with the guests running; the host then takes no VMs until 'host undrain'
    #[command(
        after_help = "Never shuts a VM down. What cannot move stays as it is and is listed with the reason (exit code 3): do what the reason says, then drain again. A VM that is off is not moved: the host gives it up, and it starts elsewhere only if it has no writable disk of its own and no UEFI; all others keep their images, or their UEFI variables, here and start only here. The host takes no VMs until 'host undrain'. Goes on after a restart of the controller.\n\nExamples:\n  godwit host drain b --dry-run\n  godwit host drain b\n  godwit host drain b --to a --to c --at-once 4\n  godwit host drain b --status\n  godwit host drain b --stop"
    )]
    Drain(HostDrain),
    /// Say that a host is powered off, so that its VMs may start elsewhere, until it answers again
    #[command(
        after_help = "Only for a host that is off: a VM of a host that runs may run twice.\n\nExample:\n  godwit host fenced b"
    )]
    Fenced {
        /// The host
        host: HostName,
        /// It is off: do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Let this host boot its VMs although no other host says whether they moved (run on the host)
    #[command(
        after_help = "After a power cut a host asks the controller and the other hosts first, and waits for one answer. This is a person's answer instead: VMs that wait are booted as this host's record has them, also ones that come later, until its agent is started again. First see that no other host runs them: 'godwit vm list' on this host says which wait and for whom.\n\nExample:\n  godwit host boot-alone"
    )]
    BootAlone {
        /// No other host runs them: do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Power this host's guests down, as before a shutdown; none starts until the next boot or 'host open' (run on the host)
    #[command(
        after_help = "Presses every guest's power key and waits; who is not off within guest_shutdown_s of host.toml (120 s) is stopped hard. Nobody asked for these VMs to be off: they are booted when the host is back. Moves under way are called off. Paused VMs and VMs in doubt are left as they are. godwit-guests.service runs this with --at-shutdown when the host shuts down.\n\nExamples:\n  godwit host close\n  godwit host open"
    )]
    Close {
        /// Do nothing unless the system manager takes this host down
        #[arg(long)]
        at_shutdown: bool,
    },
    /// Run guests again after 'host close'; those that ran before are booted (run on the host)
    #[command(after_help = "Example:\n  godwit host open")]
    Open,
    /// Let a host take VMs again; moves under way go on to their end
    #[command(after_help = "Example:\n  godwit host undrain b")]
    Undrain {
        /// The host
        host: HostName,
    },
}

/// How a host is emptied.
#[derive(Debug, Args)]
pub struct HostDrain {
    /// The host
    pub host: HostName,
    /// Make all preflight checks and predict, move nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Moves at the same time at most; 2 when left out
    #[arg(long, value_name = "N", value_parser = whole::<u32, 1, 16, 4>)]
    pub at_once: Option<u32>,
    /// Only to this host; may be given several times
    #[arg(long, value_name = "HOST")]
    pub to: Vec<HostName>,
    /// Begin and return at once
    #[arg(long)]
    pub detach: bool,
    /// Show how far it is
    #[arg(long, conflicts_with_all = ["dry_run", "at_once", "to", "detach"])]
    pub status: bool,
    /// End it: the same as 'host undrain'
    #[arg(long, conflicts_with_all = ["dry_run", "at_once", "to", "detach", "status"])]
    pub stop: bool,
}

/// What to watch.
#[derive(Debug, Args)]
pub struct HostTopArgs {
    /// The host; all when left out
    pub host: Option<HostName>,
    /// Show it once
    #[arg(long)]
    pub once: bool,
    /// Pause between two looks, seconds
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = whole::<u32, 1, 86_400, 2>)]
    pub every: u32,
}

/// How this machine joins.
#[derive(Debug, Args)]
pub struct HostJoin {
    #[command(flatten)]
    pub token: TokenArgs,
    /// This host's name; its host name when left out
    #[arg(long)]
    pub name: Option<HostName>,
    /// Where the agent listens; port 8472 on the address that reaches the controller when left out
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = address::<LISTEN_PORT>)]
    pub listen: Option<SocketAddr>,
    /// Address on a migration network; may be given several times; the listening address when left out
    #[arg(long, value_name = "ADDRESS")]
    pub migration: Vec<IpAddr>,
    /// A port group and its bridge; may be given several times
    #[arg(long = "port-group", value_name = "GROUP=BRIDGE")]
    pub port_groups: Vec<String>,
    /// This host does not encrypt migrations
    #[arg(long)]
    pub no_encryption: bool,
    /// Configuration file to write
    #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
    pub config: PathBuf,
    /// Directory of durable state
    #[arg(long, value_name = "DIR", default_value = "/var/lib/godwit")]
    pub state_dir: PathBuf,
    /// Directory of sockets and RAM files
    #[arg(long, value_name = "DIR", default_value = "/run/godwit")]
    pub run_dir: PathBuf,
    /// Do not start the agent's service
    #[arg(long)]
    pub no_start: bool,
}

/// How a host leaves its site.
#[derive(Debug, Args)]
pub struct HostLeave {
    /// The controller is gone for good: leave without telling it
    #[arg(long)]
    pub controller_is_gone: bool,
    /// This machine's configuration
    #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
    pub config: PathBuf,
}

/// Where a one-time token is given.
#[derive(Debug, Args)]
pub struct TokenArgs {
    /// The one-time token that 'godwit host add' or 'godwit controller init' printed; '-' reads it from standard input,
    /// so that no list of processes shows it
    #[arg(required_unless_present = "token_file")]
    pub token: Option<String>,
    /// File that holds the token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
}

/// How a host gets another certificate.
#[derive(Debug, Args)]
pub struct HostRenew {
    #[command(flatten)]
    pub token: TokenArgs,
    /// This machine's configuration
    #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
    pub config: PathBuf,
}
