//! The command line: every command, option and example.
//!
//! Plain data made by clap; help, man pages and completions all come from here. Refuses: whatever clap refuses, with
//! exit code 2.

use clap::{Args, Parser, Subcommand};
use godwit_agent::config::CONFIG_PATH;
use godwit_types::{HostName, MigrationId};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

mod host;
mod vm;

pub use host::{HostCommand, HostDrain, HostJoin, HostLeave, HostRenew, HostTopArgs, TokenArgs};
pub use vm::{
    VmClone, VmCommand, VmLimitDisk, VmMigrate, VmMoveDisk, VmResizeDisk, VmSnapshotCommand,
    VmStop, without,
};

/// Where controllers listen unless said otherwise.
const CONTROLLER_PORT: u16 = 8471;
/// What the package's unit reads.
pub const CONTROLLER_CONFIG: &str = "/etc/godwit/controller.toml";
/// The only directory that the package's unit may write to.
pub const CONTROLLER_STATE: &str = "/var/lib/godwit-controller";

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage or invalid input
  3    refused: a preflight check, a state or a permission stands in the way
  4    no such VM, host or migration
  5    in doubt until both hosts answer; see 'godwit vm show NAME' for the rest
  6    a target cannot be met (of a dry run, or with --must-keep)
  7    a VM is held by two hosts: 'godwit vm resolve NAME --keep HOST' ends it
  130  watching was interrupted; the migration goes on

Environment:
  GODWIT_CONTROLLER   the controller: a Unix socket's path, or ADDRESS:PORT
  GODWIT_CERTIFICATE  directory of the operator certificate for a remote one
  GODWIT_LOG          what is logged to standard error, such as 'debug'; else
                      'info' for agent and controller, 'error' for commands
  NO_COLOR            no colours";

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
    /// Disks' images on this host: which VM and host had one last
    #[command(subcommand)]
    Image(ImageCommand),
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
    /// Write the manual pages of all commands (.1) and files (.5) into a directory
    #[command(
        after_help = "Example:\n  mkdir pages && godwit man pages && man -l pages/godwit-host.toml.5"
    )]
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
        /// Where the program before this one left QEMU's connections
        #[arg(long)]
        handed: Option<i32>,
    },
}

/// Images on this host.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Which disk an image is, and which host had it last
    #[command(
        after_help = "A file bears this as an extended attribute, a block device in its last MiB; a copy of a file's bytes alone does not. Hosts that share an image tell each other by it who has it.\n\nExamples:\n  godwit image show /srv/fast/web-root.raw\n  godwit image show /dev/vg0/lun --json"
    )]
    Show {
        /// The file or block device
        path: PathBuf,
    },
    /// Have an image forget which host had it, so that any VM may be started with it
    #[command(
        after_help = "For an image that a host refuses and that is meant to be used as it is: an older copy that was put back, or one whose host is gone for good. Make sure first that no other host has it open. Refused while it is open on this one.\n\nExample:\n  godwit image release /srv/fast/web-root.raw"
    )]
    Release {
        /// The file or block device
        path: PathBuf,
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
            default_value = CONTROLLER_CONFIG
        )]
        config: PathBuf,
    },
}

/// How to set the controller up.
#[derive(Debug, Args)]
pub struct ControllerInit {
    /// Address to listen on, which hosts reach the controller at unless --advertise says otherwise; port 8471 when left out
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = address::<CONTROLLER_PORT>)]
    pub listen: SocketAddr,
    /// Address that hosts reach it by, where that differs; may be given several times
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = address::<CONTROLLER_PORT>)]
    pub advertise: Vec<SocketAddr>,
    /// Configuration file to write
    #[arg(
        long,
        value_name = "FILE",
        default_value = CONTROLLER_CONFIG
    )]
    pub config: PathBuf,
    /// Directory of the database and the certificate authority
    #[arg(long, value_name = "DIR", default_value = CONTROLLER_STATE)]
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
    /// List the VMs that this host's records say it is to look after; for the package's own scripts
    #[command(hide = true)]
    OnRecord {
        /// Configuration file
        #[arg(long, value_name = "FILE", default_value = CONFIG_PATH)]
        config: PathBuf,
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
        after_help = "Ends these alarms, also over a restart of the controller, and changes nothing else. Every other alarm ends with what raised it.\n\nExamples:\n  godwit site show\n  godwit site acknowledge"
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
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = whole::<u32, 1, 1000, 50>)]
    pub last: u32,
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

/// The controller's address, as people write it.
pub fn controller_address(text: &str) -> Result<SocketAddr, String> {
    address::<CONTROLLER_PORT>(text)
}

/// Reads a whole number within bounds, with an example for who writes something else.
fn whole<T: TryFrom<u64>, const LEAST: u64, const MOST: u64, const SUCH_AS: u64>(
    text: &str,
) -> Result<T, String> {
    let within = text.parse().ok().filter(|n| (LEAST..=MOST).contains(n));
    let number = within.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("write a whole number from {LEAST} to {MOST}, such as {SUCH_AS}"))
}

/// Certificates of people and scripts on other machines.
#[derive(Debug, Subcommand)]
pub enum OperatorCommand {
    /// Make an operator's certificate (run where the controller runs)
    #[command(
        after_help = "The directory gets the certificate, its key and the authority's certificate: carry it to where its owner works and name it with --certificate. It renews itself when it is used, once two thirds of its life are over.\n\nExample:\n  godwit operator add eve --dir ./eve"
    )]
    Add {
        /// The operator's name, as the audit log shows it
        name: HostName,
        /// Directory to write the certificate into
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
    /// List the operators' certificates
    #[command(
        after_help = "A certificate that an older version made is listed once it was used since the controller started.\n\nExample:\n  godwit operator list"
    )]
    List,
    /// Revoke every certificate of an operator, also on open connections (run where the controller runs)
    #[command(
        after_help = "It is refused at once, and not renewed. Who works where the controller runs needs no certificate, so that the last operator may be removed, too; 'godwit operator add' makes a new certificate of the same name.\n\nExample:\n  godwit operator remove eve"
    )]
    Remove {
        /// The operator
        operator: HostName,
    },
    /// Renew the operator certificate named with --certificate now
    #[command(
        after_help = "Example:\n  godwit operator renew --controller 10.0.0.1:8471 --certificate ./eve"
    )]
    Renew,
}

/// Migrations.
#[derive(Debug, Subcommand)]
pub enum MigrationCommand {
    /// List migrations
    #[command(after_help = "Example:\n  godwit migration list")]
    List,
    /// Show one migration's report; works on either host, also without the controller
    #[command(
        after_help = "Examples:\n  godwit migration show ID --json\n  godwit migration show web"
    )]
    Show {
        /// The migration, or the VM that it moves
        id: MigrationId,
    },
    /// Watch a migration until it ends
    #[command(after_help = "Examples:\n  godwit migration watch ID\n  godwit migration watch web")]
    Watch {
        /// The migration, or the VM that it moves
        id: MigrationId,
    },
    /// Cancel a migration; the guest stays at the source
    #[command(
        after_help = "Examples:\n  godwit migration cancel ID\n  godwit migration cancel web"
    )]
    Cancel {
        /// The migration, or the VM that it moves
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
