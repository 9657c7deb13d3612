//! `godwit vm`: its commands, options and examples.
//!
//! Plain data made by clap. Refuses: whatever clap refuses, with exit code 2.

use super::whole;
use clap::{Args, Subcommand, ValueEnum};
use godwit_types::disk_move::{FirstLog, Method, Optimisation};
use godwit_types::vm::{DISK_GIB_MAX, DISK_IOPS_MAX, DISK_MIB_PER_S_MAX, EncryptionMode};
use godwit_types::{DatastoreName, HostName, SnapshotName, VmName};
use std::path::PathBuf;

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
    /// List the VMs, those that need a person first
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
        after_help = "The guest is asked by its agent (qemu-guest-agent) where that answers, else by the power key; a second stop presses the key, too.\n\nExamples:\n  godwit vm stop web --timeout 60\n  godwit vm stop web --timeout 60 --force\n  godwit vm stop web --force\n  godwit vm stop web --force --host b"
    )]
    Stop(VmStop),
    /// Reset the guest
    #[command(after_help = "Example:\n  godwit vm reset web")]
    Reset {
        /// The VM
        vm: VmName,
    },
    /// Have the installed version of Godwit take over a running guest
    ///
    /// A VM process lives as long as its guest, also when a newer Godwit is installed. This replaces it; the guest keeps running.
    #[command(
        group(clap::ArgGroup::new("which").required(true).multiple(true).args(["vm", "all", "host"])),
        after_help = "Examples:\n  godwit vm renew web\n  godwit vm renew --all\n  godwit vm renew --host a"
    )]
    Renew {
        /// The VM
        vm: Option<VmName>,
        /// Every running VM
        #[arg(long, conflicts_with = "vm")]
        all: bool,
        /// Every running VM of this host
        #[arg(long, value_name = "HOST", conflicts_with_all = ["vm", "all"])]
        host: Option<HostName>,
    },
    /// Stop the guest where it stands, keep its memory
    #[command(after_help = "Example:\n  godwit vm pause web")]
    Pause {
        /// The VM
        vm: VmName,
    },
    /// Let a paused guest run again
    #[command(after_help = "Example:\n  godwit vm resume web")]
    Resume {
        /// The VM
        vm: VmName,
    },
    /// Settle a VM that is in doubt, or that several hosts hold
    #[command(
        group(clap::ArgGroup::new("decision").required(true).args(["run_on", "give_up_on", "keep"])),
        override_usage = "godwit vm resolve [OPTIONS] <--run-on|--give-up-on|--keep> <HOST> <VM>",
        after_help = "In doubt; only after you made sure that the other host is powered off:\n  godwit vm resolve web --run-on a --confirm-fenced b\n\nStarted elsewhere or deleted since; host a still waits for an older handover:\n  godwit vm resolve web --give-up-on a\n\nHeld by two hosts; the copy of every other host is ended, with its memory:\n  godwit vm resolve web --keep a"
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
        /// Of a VM that several hosts hold: the host whose copy is kept
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
    /// Delete a stopped VM; images of its disks stay
    #[command(after_help = "Example:\n  godwit vm delete web")]
    Delete {
        /// The VM
        vm: VmName,
    },
    /// Move a running VM to another host
    #[command(
        after_help = "Examples:\n  godwit vm migrate web --to b\n  godwit vm migrate web --to b --max-downtime 20 --deadline 120 --dry-run\n  godwit vm migrate web --to b --max-guest-slowdown 30 --must-keep\n  godwit vm migrate web --to b --disk root=fast"
    )]
    Migrate(VmMigrate),
    /// Move disks of a running VM to another datastore of its host
    ///
    /// The guest keeps running. A datastore is a directory or a block device that the host's /etc/godwit/host.toml names.
    #[command(
        override_usage = "godwit vm move-disk [OPTIONS] <VM> [DISK]... --to <DATASTORE>\n       godwit vm move-disk <VM> <--list|--cancel>",
        after_help = "Examples:\n  godwit vm move-disk web --to fast\n  godwit vm move-disk web root --to fast --max-bandwidth 800\n  godwit vm move-disk web --to fast --dry-run\n  godwit vm move-disk web --list\n  godwit vm move-disk web --cancel"
    )]
    MoveDisk(VmMoveDisk),
    /// Make a disk larger
    ///
    /// A guest that runs sees the new size at once; partitions and file systems on it are the guest's own. A disk is never made smaller.
    #[command(
        after_help = "Not for disks with snapshots, nor for linked ones. Of a block device that is no datastore: make the device larger first, then name its size in whole GiB. A disk on one that is a datastore: move it to a datastore that is a directory first.\n\nExample:\n  godwit vm resize-disk web root --size-gib 40"
    )]
    ResizeDisk(VmResizeDisk),
    /// Limit what a guest may have of a disk in a second
    ///
    /// The limits count at once and stay until others are set; what is not named is not limited. Copying the disk to another place is no part of them.
    #[command(
        override_usage = "godwit vm limit-disk <VM> <DISK> [--iops N] [--mib-per-s MIB] [--none]",
        after_help = "Examples:\n  godwit vm limit-disk web root --iops 500\n  godwit vm limit-disk web root --iops 500 --mib-per-s 50\n  godwit vm limit-disk web root --none"
    )]
    LimitDisk(VmLimitDisk),
    /// Snapshots of a VM's disks
    ///
    /// A snapshot keeps what all disks hold that the guest may write at one moment; the guest runs on. It is no backup: it lies beside the disk, and is lost with it.
    #[command(subcommand)]
    Snapshot(VmSnapshotCommand),
    /// Make a VM that is as another one, with disks of its own, on the same host
    ///
    /// The VM must be off, or --snapshot must name what its disks begin with; then it may run. The clone has a name, network addresses of its cards, UUID, disks and UEFI variables of its own, and is as the other VM in all else. Disks that the guest only reads are shared.
    #[command(
        override_usage = "godwit vm clone [OPTIONS] <VM> <NEW>\n       godwit vm clone <VM> --cancel",
        after_help = "Examples:\n  godwit vm stop web --wait\n  godwit vm clone web web2\n  godwit vm clone web web2 --snapshot clean --start\n  godwit vm clone web --cancel"
    )]
    Clone(VmClone),
    /// Sit down at the guest's serial console; Ctrl-] leaves
    #[command(
        after_help = "What the guest writes is shown as it stands, and what is typed goes to the guest, also after it was moved. Where standard input or output is no terminal, and with --print or --json, the last 64 KiB of what the guest wrote are printed, without what would steer a terminal. A line before the text, on standard error, says since when: what the guest wrote before it was started anew is not kept, and what it wrote before it was moved is where both hosts have a Godwit that carries it along.\n\nExamples:\n  godwit vm console web\n  godwit vm console web --print\n  godwit vm console web --host b\n  godwit vm console web | tail"
    )]
    Console {
        /// The VM
        vm: VmName,
        /// The copy on this host, wherever else the VM may be
        #[arg(long, value_name = "HOST")]
        host: Option<HostName>,
        /// Print the last of what the guest wrote, also on a terminal
        #[arg(long)]
        print: bool,
    },
}

/// What to do with snapshots.
#[derive(Debug, Subcommand)]
pub enum VmSnapshotCommand {
    /// Take one, whether the guest runs or not
    ///
    /// A guest that runs waits for a moment. If it has an agent (qemu-guest-agent) that writes its file systems out and has them stand still, then the snapshot has all that it was asked to keep. Else what it has not written to its disks yet is not in the snapshot: to go back to it is like starting after a power cut. The disks move with all their snapshots, and do not grow until those are deleted and merged.
    #[command(
        after_help = "Examples:\n  godwit vm snapshot create web clean --text 'before the update'\n  godwit vm snapshot create web clean --quiesce"
    )]
    Create {
        /// The VM
        vm: VmName,
        /// Its name, unique in the VM
        name: SnapshotName,
        /// What to know of it later
        #[arg(
            long,
            value_name = "TEXT",
            default_value = "",
            hide_default_value = true
        )]
        text: String,
        /// Take none where the guest's agent does not have its file systems stand still
        #[arg(long, conflicts_with = "no_quiesce")]
        quiesce: bool,
        /// Do not ask the guest's agent
        #[arg(long)]
        no_quiesce: bool,
    },
    /// List them, each below the one that it came after
    #[command(after_help = "Example:\n  godwit vm snapshot list web")]
    List {
        /// The VM
        vm: VmName,
    },
    /// Have the disks be what they were then; the VM must be off
    ///
    /// What the disks hold now is lost, unless a snapshot of it was taken. The snapshot stays, and so do later ones.
    #[command(
        after_help = "Example:\n  godwit vm stop web --wait\n  godwit vm snapshot revert web clean\n  godwit vm start web"
    )]
    Revert {
        /// The VM
        vm: VmName,
        /// The snapshot
        name: SnapshotName,
    },
    /// Delete one; the disks and the other snapshots stay as they are
    ///
    /// What only this snapshot needs is merged while the guest runs on.
    #[command(after_help = "Example:\n  godwit vm snapshot delete web clean")]
    Delete {
        /// The VM
        vm: VmName,
        /// The snapshot
        name: SnapshotName,
    },
}

/// What is made a copy of which VM.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["new", "cancel"])))]
pub struct VmClone {
    /// The VM
    pub vm: VmName,
    /// Name of the clone
    #[arg(value_name = "NEW")]
    pub new: Option<VmName>,
    /// Have its disks begin as they were at this snapshot
    #[arg(long, value_name = "NAME", requires = "new")]
    pub snapshot: Option<SnapshotName>,
    /// Start the clone once it is there
    #[arg(long, requires = "new")]
    pub start: bool,
    /// Call off what is under way
    #[arg(long)]
    pub cancel: bool,
}

/// Which disks go where.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["to", "cancel", "list"])))]
pub struct VmMoveDisk {
    /// The VM
    pub vm: VmName,
    /// The disks; none: all that the guest may write
    #[arg(value_name = "DISK", conflicts_with_all = ["cancel", "list"])]
    pub disks: Vec<String>,
    /// The datastore
    #[arg(long, value_name = "DATASTORE")]
    pub to: Option<DatastoreName>,
    /// Cap of what is copied, Mb/s
    #[arg(long, value_name = "MBIT", value_parser = whole::<u64, 1, 10_000_000, 1000>, requires = "to")]
    pub max_bandwidth: Option<u64>,
    /// Make all checks, say what would be moved and how long that takes, change nothing
    #[arg(long, requires = "to")]
    pub dry_run: bool,
    /// How the disks are copied while the guest works with them; the default is right for every disk
    #[arg(
        long,
        value_name = "METHOD",
        value_enum,
        default_value_t,
        requires = "to"
    )]
    pub method: DiskMethod,
    /// For the laboratory: also marks what is still to be read
    #[arg(long, hide = true, requires = "to")]
    pub no_incremental: bool,
    /// For the laboratory: leaves nothing out for being written again and again
    #[arg(long, hide = true, requires = "to")]
    pub no_hot_blocks: bool,
    /// For the laboratory: where the first redo log of the method snapshot lies; later ones lie at the destination
    #[arg(
        long,
        value_name = "WHERE",
        value_enum,
        default_value_t,
        hide = true,
        requires = "to"
    )]
    pub first_log: FirstLogPlace,
    /// Call off what is under way
    #[arg(long)]
    pub cancel: bool,
    /// List what is under way, and the moves of the VM's disks on its host that have ended
    #[arg(long)]
    pub list: bool,
}

/// How disks are copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DiskMethod {
    /// What the guest writes goes to both places: always comes to an end, and its guest waits some milliseconds
    #[default]
    Mirror,
    /// For the laboratory: what the guest writes is marked and copied again, and its requests wait for the last of it, for about 5 s at most; where it writes too much for that the disk stays where it is
    DirtyTracking,
    /// For the laboratory: what the guest writes goes to redo logs, which are consolidated into the copy one after the other, and its requests wait for the last one, for about 5 s at most (to another host the whole guest stands still for it, for up to 3 s); for disks without snapshots
    Snapshot,
}

/// Where a first redo log lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum FirstLogPlace {
    /// Beside the image that the disk has
    Source,
    /// Beside the image that it is to have
    #[default]
    Destination,
}

impl From<FirstLogPlace> for FirstLog {
    fn from(place: FirstLogPlace) -> Self {
        match place {
            FirstLogPlace::Source => Self::Source,
            FirstLogPlace::Destination => Self::Destination,
        }
    }
}

impl From<DiskMethod> for Method {
    fn from(method: DiskMethod) -> Self {
        match method {
            DiskMethod::Mirror => Self::Mirror,
            DiskMethod::DirtyTracking => Self::DirtyTracking,
            DiskMethod::Snapshot => Self::Snapshot,
        }
    }
}

/// What the method is to do without: as the options `--no-incremental` and `--no-hot-blocks` say.
pub fn without(no_incremental: bool, no_hot_blocks: bool) -> Vec<Optimisation> {
    let incremental = no_incremental.then_some(Optimisation::Incremental);
    let hot_blocks = no_hot_blocks.then_some(Optimisation::HotBlocks);
    incremental.into_iter().chain(hot_blocks).collect()
}

/// Which disk is to be how large.
#[derive(Debug, Args)]
pub struct VmResizeDisk {
    /// The VM
    pub vm: VmName,
    /// The disk's name within the VM, as 'godwit vm show' lists it
    pub disk: String,
    /// The size that it is to have
    #[arg(long, value_name = "GIB", value_parser = whole::<u64, 1, DISK_GIB_MAX, 40>)]
    pub size_gib: u64,
}

/// What a guest may have of which disk.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("limits").required(true).multiple(true).args(["iops", "mib_per_s", "none"])))]
pub struct VmLimitDisk {
    /// The VM
    pub vm: VmName,
    /// The disk's name within the VM, as 'godwit vm show' lists it
    pub disk: String,
    /// Most reads, writes, discards and zeroes in a second
    #[arg(long, value_name = "N", value_parser = whole::<u64, 1, DISK_IOPS_MAX, 500>)]
    pub iops: Option<u64>,
    /// Most MiB read and written in a second
    #[arg(long, value_name = "MIB", value_parser = whole::<u64, 1, DISK_MIB_PER_S_MAX, 50>)]
    pub mib_per_s: Option<u64>,
    /// No limit at all
    #[arg(long, conflicts_with_all = ["iops", "mib_per_s"])]
    pub none: bool,
}

/// How to stop a VM.
#[derive(Debug, Args)]
pub struct VmStop {
    /// The VM
    pub vm: VmName,
    /// Power off at once; with --timeout: once that is over
    #[arg(long)]
    pub force: bool,
    /// Ask the guest, and fail where it is not off within so many seconds; with --force power it off then
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64, 1, 86_400, 60>, conflicts_with_all = ["wait", "host"])]
    pub timeout: Option<u64>,
    /// Return once the VM is off, and fail where it is not within so many seconds (120 when left out)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "120",
        value_parser = whole::<u64, 1, 86_400, 120>, conflicts_with = "host")]
    pub wait: Option<u64>,
    /// The copy on this host, wherever else the VM may be
    #[arg(long, value_name = "HOST")]
    pub host: Option<HostName>,
}

fn disk_to(text: &str) -> Result<(String, DatastoreName), String> {
    let (disk, store) = text
        .split_once('=')
        .ok_or("write it as DISK=DATASTORE, as in root=fast")?;
    let store = DatastoreName::new(store).map_err(|error| error.to_string())?;
    Ok((disk.to_owned(), store))
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
    #[arg(long, value_name = "MS", value_parser = whole::<u64, 1, 3_600_000, 50>)]
    pub max_downtime: Option<u64>,
    /// Cancel when not done after this many seconds; the guest stays where it is
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, 31_536_000, 120>)]
    pub deadline: Option<u64>,
    /// Datastore of the destination for a disk that goes along; may be given for several disks
    #[arg(long = "disk", value_name = "DISK=DATASTORE", value_parser = disk_to)]
    pub disks: Vec<(String, DatastoreName)>,
    /// How disks that go along are copied while the guest works with them; the default is right for every disk
    #[arg(
        long,
        value_name = "METHOD",
        value_enum,
        default_value_t,
        long_help = "How disks that go along are copied while the guest works with them; the default is right for every disk. With dirty-tracking or snapshot the whole guest stands still for their last blocks, for up to 3 s on top of --max-downtime, and the migration fails where that is not enough. The method snapshot refuses disks with snapshots and linked disks, and needs room for its redo logs beside the images at the source"
    )]
    pub method: DiskMethod,
    /// For the laboratory: also marks what is still to be read
    #[arg(long, hide = true)]
    pub no_incremental: bool,
    /// For the laboratory: leaves nothing out for being written again and again
    #[arg(long, hide = true)]
    pub no_hot_blocks: bool,
    /// Cap of the migration's traffic, Mb/s
    #[arg(long, value_name = "MBIT", value_parser = whole::<u64, 1, 10_000_000, 1000>)]
    pub max_bandwidth: Option<u64>,
    /// Slow the guest by at most this percent, also where it writes faster than the link
    #[arg(long, value_name = "PERCENT", value_parser = whole::<u32, 0, 99, 30>)]
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
