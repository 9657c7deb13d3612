//! The command line: every command, option and example.
//!
//! Plain data made by clap; help, man pages and completions all come from here. Refuses: whatever clap refuses, with
//! exit code 2.

use clap::{Args, Parser, Subcommand, ValueEnum};
use godwit_agent::config::{CONFIG_PATH, LISTEN_PORT};
use godwit_types::vm::EncryptionMode;
use godwit_types::{HostName, MigrationId, VmName};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Where controllers listen unless said otherwise.
const CONTROLLER_PORT: u16 = 8471;

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage or invalid input
  3    refused: a preflight check, a state or a permission stands in the way
  4    no such VM, host or migration
  5    in doubt: it ends once both hosts answer; 'godwit vm show NAME' says what else ends it
  6    a target cannot be met (of a dry run, or with --must-keep)
  7    a VM is held by two hosts: 'godwit vm resolve NAME --keep HOST' ends it
  130  watching was interrupted; the migration goes on

Environment:
  GODWIT_CONTROLLER  the controller: a Unix socket's path, or ADDRESS:PORT
  GODWIT_CERTIFICATE directory of the operator certificate for a remote controller
  GODWIT_LOG         what is logged to standard error, such as 'debug' ('info' for agent and controller, else 'error')
  NO_COLOR           no colours";

/// Live migration for unmodified QEMU.
#[derive(Debug, Parser)]
#[command(
    name = "godwit",
    version,
    about = "Moves running virtual machines between hosts",
    after_help = EXIT_CODES,
    after_long_help = EXIT_CODES,
    propagate_version = true,
    disable_help_subcommand = true
)]
pub struct Cli {
    /// Options that every command has.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every command has.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// Print JSON for scripts
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    /// The controller: a Unix socket's path, or ADDRESS:PORT with an operator certificate
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        value_name = "WHERE",
        env = "GODWIT_CONTROLLER",
        hide_env_values = true
    )]
    pub controller: Option<String>,
    /// Directory with the operator certificate for a remote controller
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        value_name = "DIR",
        env = "GODWIT_CERTIFICATE",
        hide_env_values = true
    )]
    pub certificate: Option<PathBuf>,
    /// The local agent's Unix socket, asked when no controller is here
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        value_name = "PATH",
        env = "GODWIT_AGENT",
        hide_env_values = true
    )]
    pub agent: Option<PathBuf>,
}

/// All commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Set up and run the controller
    #[command(subcommand)]
    Controller(ControllerCommand),
    /// Run the host agent
    #[command(subcommand)]
    Agent(AgentCommand),
    /// Hosts: join, list, check, top, drain, remove
    #[command(subcommand)]
    Host(HostCommand),
    /// Certificates for people and scripts on other machines
    #[command(subcommand)]
    Operator(OperatorCommand),
    /// Virtual machines
    #[command(subcommand)]
    Vm(VmCommand),
    /// Migrations: list, show, watch, cancel
    #[command(subcommand)]
    Migration(MigrationCommand),
    /// The whole site: how the controller stands, and what a person must know first
    #[command(subcommand)]
    Site(SiteCommand),
    /// Who asked the controller for what, when, and what came of it
    #[command(
        after_help = "Times are this machine's. Who became root by sudo or su is named, where the system keeps logins.\n\nExamples:\n  godwit audit\n  godwit audit --about web --last 10\n  godwit audit --json"
    )]
    Audit(AuditArgs),
    /// Measure moves against QEMU's own migration (by the program godwit-bench beside this one)
    #[command(
        after_help = "Examples:\n  godwit bench memory --quick\n  godwit bench memory --scenario idle --runs 3"
    )]
    Bench {
        /// What the bench is asked for; 'memory --help' lists it
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Print a shell's completions
    #[command(after_help = "Example:\n  godwit completion bash > /etc/bash_completion.d/godwit")]
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory
    #[command(after_help = "Example:\n  godwit man /usr/local/share/man/man1")]
    Man {
        /// Where to
        dir: PathBuf,
    },
    /// Run one VM (started by the agent)
    #[command(hide = true)]
    VmProcess {
        /// The configuration that the agent wrote
        #[arg(long)]
        config: PathBuf,
    },
}

/// The controller.
#[derive(Debug, Subcommand)]
pub enum ControllerCommand {
    /// Make the certificate authority and database, and print the command that joins the first host
    #[command(after_help = "Example:\n  godwit controller init --listen 10.0.0.1:8471")]
    Init(ControllerInit),
    /// Run the controller in the foreground
    #[command(after_help = "Example:\n  godwit controller run")]
    Run {
        /// Configuration file
        #[arg(
            long,
            value_name = "FILE",
            default_value = "/etc/godwit/controller.toml"
        )]
        config: PathBuf,
    },
}

/// How to set the controller up.
#[derive(Debug, Args)]
pub struct ControllerInit {
    /// Address that hosts reach the controller at; port 8471 when left out
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = address::<CONTROLLER_PORT>)]
    pub listen: SocketAddr,
    /// Address that hosts reach it by, where that differs; may be given several times
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = address::<CONTROLLER_PORT>)]
    pub advertise: Vec<SocketAddr>,
    /// Configuration file to write
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/godwit/controller.toml"
    )]
    pub config: PathBuf,
    /// Directory of the database and the certificate authority
    #[arg(long, value_name = "DIR", default_value = "/var/lib/godwit-controller")]
    pub state_dir: PathBuf,
    /// Unix socket for local commands
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/run/godwit/controller.sock"
    )]
    pub socket: PathBuf,
    /// How long certificates are good for, seconds
    #[arg(long, value_name = "SECONDS", hide = true)]
    pub certificate_life_s: Option<u64>,
}

/// The agent.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Run the host agent in the foreground
    #[command(after_help = "Example:\n  godwit agent run --config /etc/godwit/host.toml")]
    Run {
        /// Configuration file
        #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
        config: PathBuf,
    },
}

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
        after_help = "Certificates renew themselves; this is for a host that was off, or cut off, for so long that its own has ended. It\nstays the host that it was: its records stay, its VMs run on, its former certificate is revoked. A running agent\ntakes the new one by itself.\n\nExample:\n  godwit host renew TOKEN"
    )]
    Renew(HostRenew),
    /// Take this machine out of its site (run on the host; it must hold no VM)
    #[command(
        after_help = "The controller removes the host and revokes its certificate; then the agent is stopped, its records are moved aside, and\ncertificate and configuration are removed, so that the machine may join again. Move its VMs away first, with\n'godwit host drain'.\n\nExample:\n  godwit host leave"
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
    /// Check a host: kernel, userfaultfd, QEMU, CPU, AES, MTU, clock, ports, huge pages; each with its remedy
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
        after_help = "Never shuts a VM down. What cannot move stays as it is and is listed with the reason (exit code 3): do what the\nreason says, then drain again. A VM that is off leaves the host without a move, so that it starts elsewhere. The\nhost takes no VMs until 'host undrain'. Goes on after a restart of the controller.\n\nExamples:\n  godwit host drain b --dry-run\n  godwit host drain b\n  godwit host drain b --to a --to c --at-once 4\n  godwit host drain b --status\n  godwit host drain b --stop"
    )]
    Drain(HostDrain),
    /// Say that a host is powered off, so that its VMs may start elsewhere; holds until it is heard again
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
    /// Let this host boot its VMs although nobody answers whether they went elsewhere (run on the host)
    #[command(
        after_help = "After a power cut a host asks the controller and the other hosts first, and waits for one answer. This is a person's\nanswer instead: VMs that wait are booted as this host's record has them, also ones that come later, until its agent\nis started again. First see that no other host runs them: 'godwit vm list' on this host says which wait and for whom.\n\nExample:\n  godwit host boot-alone"
    )]
    BootAlone {
        /// No other host runs them: do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Power this host's guests down, as before a shutdown; none starts until the next boot or 'host open' (run on the host)
    #[command(
        after_help = "Presses every guest's power key and waits; who is not off within guest_shutdown_s of host.toml (120 s) is stopped hard.\nNobody asked for these VMs to be off: they are booted when the host is back. Moves under way are called off. Paused\nVMs and VMs in doubt are left as they are. godwit-guests.service runs this with --at-shutdown when the host shuts down.\n\nExamples:\n  godwit host close\n  godwit host open"
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

/// The whole site.
#[derive(Debug, Subcommand)]
pub enum SiteCommand {
    /// Show how the site stands: alarms with the commands that end them, hosts, the controller's last word
    #[command(after_help = "Example:\n  godwit site show --json")]
    Show,
    /// Say that you have seen the alarms that nothing else ends: a host that was said to be off and was not, and what a
    /// takeover forgot
    #[command(
        after_help = "Ends these alarms, also over a restart of the controller, and changes nothing else. Every other alarm ends with what\nraised it.\n\nExamples:\n  godwit site show\n  godwit site acknowledge"
    )]
    Acknowledge,
}

/// Which part of the audit log.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Only what concerns this VM, host or migration
    #[arg(long, value_name = "NAME")]
    pub about: Option<String>,
    /// Entries at most, the newest
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub last: u32,
}

/// How a host is emptied.
#[derive(Debug, Args)]
pub struct HostDrain {
    /// The host
    pub host: HostName,
    /// Make all preflight checks and predict, move nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Moves at the same time at most; chosen by links and memory when left out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
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
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub every: u32,
}

/// How this machine joins.
#[derive(Debug, Args)]
pub struct HostJoin {
    /// The one-time token that 'godwit host add' or 'godwit controller init' printed; '-' reads it from standard input,
    /// so that no list of processes shows it
    #[arg(required_unless_present = "token_file")]
    pub token: Option<String>,
    /// File that holds the token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
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

/// Reads an address with a port, or without one where there is a usual one.
fn address<const PORT: u16>(text: &str) -> Result<SocketAddr, String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let with_port = text.parse::<SocketAddr>();
    let alone = || bare.unwrap_or(text).parse::<IpAddr>();
    with_port
        .or_else(|_| alone().map(|ip| SocketAddr::new(ip, PORT)))
        .map_err(|_| format!("write ADDRESS or ADDRESS:PORT, such as 10.0.0.1 or 10.0.0.1:{PORT}"))
}

/// How a host gets another certificate.
#[derive(Debug, Args)]
pub struct HostRenew {
    /// The one-time token that 'godwit host add' printed
    pub token: String,
    /// This machine's configuration
    #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
    pub config: PathBuf,
}

/// Certificates of people and scripts on other machines.
#[derive(Debug, Subcommand)]
pub enum OperatorCommand {
    /// Make an operator's certificate (run where the controller runs)
    #[command(
        after_help = "The directory gets the certificate, its key and the authority's certificate: carry it to where its owner works and\nname it with --certificate. It renews itself when it is used, once two thirds of its life are over.\n\nExample:\n  godwit operator add eve --dir ./eve"
    )]
    Add {
        /// The operator's name, as the audit log shows it
        name: HostName,
        /// Directory to write the certificate into
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
    /// Renew the operator certificate named with --certificate now
    #[command(
        after_help = "Example:\n  godwit operator renew --controller 10.0.0.1:8471 --certificate ./eve"
    )]
    Renew,
}

/// Virtual machines.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Make a VM from a description
    #[command(after_help = "Example:\n  godwit vm create web.toml")]
    Create {
        /// The description, TOML
        file: PathBuf,
    },
    /// Replace a stopped VM's description
    #[command(after_help = "Example:\n  godwit vm edit web web.toml")]
    Edit {
        /// The VM
        vm: VmName,
        /// The new description, TOML
        file: PathBuf,
    },
    /// List the VMs, those in doubt first
    #[command(after_help = "Example:\n  godwit vm list --json")]
    List,
    /// Show one VM
    #[command(after_help = "Example:\n  godwit vm show web")]
    Show {
        /// The VM
        vm: VmName,
    },
    /// Power a VM on
    #[command(after_help = "Example:\n  godwit vm start web --on a")]
    Start {
        /// The VM
        vm: VmName,
        /// Host; chosen by free memory when left out
        #[arg(long, value_name = "HOST")]
        on: Option<HostName>,
    },
    /// Ask the guest to power off
    #[command(
        after_help = "Examples:\n  godwit vm stop web --force\n  godwit vm stop web --force --host b"
    )]
    Stop {
        /// The VM
        vm: VmName,
        /// Power off at once
        #[arg(long)]
        force: bool,
        /// The copy on this host, wherever else the VM may be
        #[arg(long, value_name = "HOST")]
        host: Option<HostName>,
    },
    /// Reset the guest
    #[command(after_help = "Example:\n  godwit vm reset web")]
    Reset {
        /// The VM
        vm: VmName,
    },
    /// Have the installed version of Godwit take over a running guest
    ///
    /// A VM process lives as long as its guest, also when a newer Godwit is installed. This replaces it; the guest goes on.
    #[command(
        group(clap::ArgGroup::new("which").required(true).multiple(true).args(["vm", "all", "host"])),
        after_help = "Examples:\n  godwit vm renew web\n  godwit vm renew --all\n  godwit vm renew --host a"
    )]
    Renew {
        /// The VM
        vm: Option<VmName>,
        /// Every VM that is on
        #[arg(long, conflicts_with = "vm")]
        all: bool,
        /// Every VM that is on on this host
        #[arg(long, value_name = "HOST", conflicts_with_all = ["vm", "all"])]
        host: Option<HostName>,
    },
    /// Stop the guest where it stands, keep its memory
    #[command(after_help = "Example:\n  godwit vm pause web")]
    Pause {
        /// The VM
        vm: VmName,
    },
    /// Let a paused guest go on
    #[command(after_help = "Example:\n  godwit vm resume web")]
    Resume {
        /// The VM
        vm: VmName,
    },
    /// Settle a VM that is in doubt, or that several hosts hold
    #[command(
        group(clap::ArgGroup::new("decision").required(true).args(["run_on", "give_up_on", "keep"])),
        after_help = "In doubt; only after you made sure that the other host is powered off:\n  godwit vm resolve web --run-on a --confirm-fenced b\n\nHeld by two hosts; the copy of every other host is ended, with its memory:\n  godwit vm resolve web --keep a"
    )]
    Resolve {
        /// The VM
        vm: VmName,
        /// The host that shall run it
        #[arg(long, value_name = "HOST")]
        run_on: Option<HostName>,
        /// The host that shall give up what it has of it; the VM can then be started anew
        #[arg(long, value_name = "HOST", conflicts_with = "run_on")]
        give_up_on: Option<HostName>,
        /// The other host, which is powered off
        #[arg(long, value_name = "HOST")]
        confirm_fenced: Option<HostName>,
        /// Of a VM that several hosts hold: the host whose copy goes on
        #[arg(long, value_name = "HOST", conflicts_with_all = ["run_on", "give_up_on", "confirm_fenced"])]
        keep: Option<HostName>,
    },
    /// Put a damaged record of this host aside, so that the VM may start elsewhere (run on the host)
    #[command(after_help = "Example:\n  godwit vm forget-record web")]
    ForgetRecord {
        /// The VM
        vm: VmName,
        /// This host does not run it: do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Delete a stopped VM
    #[command(after_help = "Example:\n  godwit vm delete web")]
    Delete {
        /// The VM
        vm: VmName,
    },
    /// Move a running VM to another host
    #[command(
        after_help = "Examples:\n  godwit vm migrate web --to b\n  godwit vm migrate web --to b --max-downtime 20 --deadline 120 --dry-run\n  godwit vm migrate web --to b --max-guest-slowdown 30 --must-keep"
    )]
    Migrate(VmMigrate),
    /// Print the last of what the guest wrote to its serial console
    #[command(after_help = "Examples:\n  godwit vm console web\n  godwit vm console web --host b")]
    Console {
        /// The VM
        vm: VmName,
        /// The copy on this host, wherever else the VM may be
        #[arg(long, value_name = "HOST")]
        host: Option<HostName>,
    },
}

/// How to move a VM.
#[derive(Debug, Args)]
pub struct VmMigrate {
    /// The VM
    pub vm: VmName,
    /// Destination host
    #[arg(long, value_name = "HOST")]
    pub to: HostName,
    /// Encryption of this move; the VM's own mode when left out
    #[arg(long, value_enum)]
    pub encryption: Option<Encryption>,
    /// Target of the pause, milliseconds at most (50 when left out)
    #[arg(long, value_name = "MS")]
    pub max_downtime: Option<u64>,
    /// Cancel when not done after this many seconds; the guest stays where it is
    #[arg(long, value_name = "S")]
    pub deadline: Option<u64>,
    /// Cap of the migration's traffic, Mb/s
    #[arg(long, value_name = "MBIT")]
    pub max_bandwidth: Option<u64>,
    /// Slow the guest by at most this percent, also where it writes faster than the link
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=99))]
    pub max_guest_slowdown: Option<u32>,
    /// Have the destination allocate all of the guest's memory first
    #[arg(long)]
    pub prepare: bool,
    /// Refuse to begin when the prediction misses a target above; else that is a warning
    #[arg(long)]
    pub must_keep: bool,
    /// Make all preflight checks and predict, start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Begin and return at once
    #[arg(long)]
    pub detach: bool,
}

/// Encryption modes as written on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Encryption {
    /// In clear; handshake and control stay authenticated
    Disabled,
    /// Encrypted when both hosts can
    Opportunistic,
    /// Only hosts that can encrypt
    Required,
}

impl From<Encryption> for EncryptionMode {
    fn from(mode: Encryption) -> Self {
        match mode {
            Encryption::Disabled => Self::Disabled,
            Encryption::Opportunistic => Self::Opportunistic,
            Encryption::Required => Self::Required,
        }
    }
}

/// Migrations.
#[derive(Debug, Subcommand)]
pub enum MigrationCommand {
    /// List migrations
    #[command(after_help = "Example:\n  godwit migration list")]
    List,
    /// Show one migration's report; works on either host, also without the controller
    #[command(after_help = "Example:\n  godwit migration show ID --json")]
    Show {
        /// The migration
        id: MigrationId,
    },
    /// Watch a migration until it ends
    #[command(after_help = "Example:\n  godwit migration watch ID")]
    Watch {
        /// The migration
        id: MigrationId,
    },
    /// Cancel a migration; the guest stays at the source
    #[command(after_help = "Example:\n  godwit migration cancel ID")]
    Cancel {
        /// The migration
        id: MigrationId,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn an_address_without_a_port_gets_the_usual_one() {
        for (text, expected) in [
            ("10.0.0.1", "10.0.0.1:8471"),
            ("10.0.0.1:9", "10.0.0.1:9"),
            ("fd00::1", "[fd00::1]:8471"),
            ("[fd00::1]", "[fd00::1]:8471"),
            ("[fd00::1]:9", "[fd00::1]:9"),
        ] {
            assert_eq!(address::<8471>(text).unwrap().to_string(), expected);
        }
        for bad in ["", "host", "10.0.0", "10.0.0.1:", "10.0.0.1:70000"] {
            let error = address::<8471>(bad).unwrap_err();
            assert!(error.contains("10.0.0.1:8471"), "{bad}: {error}");
        }
    }

    #[test]
    fn the_command_tree_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_visible_command_has_an_example() {
        fn walk(command: &clap::Command, without: &mut Vec<String>) {
            let leaf = command.get_subcommands().next().is_none();
            if leaf && !command.is_hide_set() && command.get_after_help().is_none() {
                without.push(command.get_name().to_string());
            }
            command.get_subcommands().for_each(|sub| walk(sub, without));
        }
        let mut without = Vec::new();
        walk(&Cli::command(), &mut without);
        assert_eq!(without, Vec::<String>::new());
    }
}
