//! What a simulated site is made of: machines with disks, agents, VM processes and QEMUs, and what travels between them.
//!
//! Plain data, owned by [`Site`](super::world::Site). Refuses: nothing.

pub(crate) use crate::model::{Disk as Journal, QemuProcess, Version};

use super::came::Came;
use super::own_files::{Content, Files, MoveNote, Notes, OwnDisk, Store};
use godwit_ownership::{Action, Event, EventKind, HostRecord, PeerMessage, Timer, VmCore};
use godwit_site::{Heard, HostSite, Judged};
use godwit_types::image::KnownImage;
use godwit_types::site::{
    Instance, SiteAnswer, SiteHeard, SiteQuestion, SiteTable, SiteUpdate, Stamp, Standing,
    SurveyAnswer, WholeSurvey,
};
use godwit_types::{Generation, HostName, MigrationId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A machine's number. Two machines may have one name: one is a clone of the other's disk.
pub(crate) type MachineId = usize;
/// A host name's number.
pub(crate) type NameId = usize;
pub(crate) type VmId = usize;

/// The source half of a migration.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub migration: MigrationId,
    pub to: HostName,
    pub began: u64,
}

/// What goes along with a guest's last pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub version: Version,
    /// The last write to its disk that it knows of.
    pub remembered: Option<u64>,
    /// What is on a disk that goes along.
    pub disk: Option<Content>,
}

#[derive(Debug, Clone)]
pub(crate) struct Receiving {
    pub migration: MigrationId,
    pub from: HostName,
    pub pages: Option<Memory>,
    pub attempt: Generation,
    pub loaded: bool,
}

/// The controller that asked something, in which of its lives, and which question it was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    pub controller: usize,
    pub life: u64,
    pub ask: u64,
}

/// Who waits for the outcome of an event.
#[derive(Debug, Clone)]
pub(crate) struct Waits {
    pub caller: Caller,
    pub kind: EventKind,
    pub refused: bool,
    pub surveyed: Option<SurveyAnswer>,
}

/// A VM process, or an agent that acts for a VM without one.
#[derive(Debug)]
pub(crate) struct Process {
    pub number: u64,
    pub core: VmCore,
    pub todo: VecDeque<Action>,
    pub inbox: VecDeque<(Event, Option<Waits>)>,
    pub is_scheduled: bool,
    pub writing: Option<HostRecord>,
    pub current: Option<Waits>,
    pub switchover: Option<u64>,
    pub ask: Option<u64>,
    pub outgoing: Option<Outgoing>,
    pub receiving: Option<Receiving>,
    pub asked: BTreeMap<MigrationId, HostName>,
    /// A person, or a rule that gives way, ended the guest here.
    pub may_discard: bool,
    pub frozen_until: u64,
    pub came: Came,
}

/// One VM at one machine.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub journal: Journal,
    pub qemu: Option<QemuProcess>,
    pub qemu_frozen_until: u64,
    pub process: Option<Process>,
    /// What the host has written down of the VM's disk on storage that all hosts share.
    pub known: Option<KnownImage>,
    /// As of how many openings of that it was told what other hosts knew of it, as an observer knows.
    pub told: u64,
    /// A disk that only this host has.
    pub own: OwnDisk,
}

/// What a VM was booted on, when nobody asked for it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ground {
    /// A controller in charge has answered.
    pub by_controller: bool,
    /// A person let the host boot alone.
    pub by_person: bool,
    /// The newest row of the VM among this host's own and its neighbours'.
    pub newest: Stamp,
    /// Nobody answered: a host that knows of no other one.
    pub is_lone: bool,
}

#[derive(Debug)]
pub(crate) struct Agent {
    pub number: u64,
    pub site: HostSite,
    /// The round of questions that is out; answers to earlier ones are dropped.
    pub round: u64,
    pub asked_at: u64,
    pub waits_since: Option<u64>,
    pub judged: BTreeMap<VmId, Judged>,
}

/// A copy of a host's state directory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backup {
    pub records: Vec<Option<HostRecord>>,
    pub known: Vec<Option<KnownImage>>,
    pub notes: Vec<Notes>,
    pub moves: Vec<(Vec<MigrationId>, Option<MoveNote>)>,
    pub described: Vec<Store>,
    /// What was on the rest of its disk.
    pub files: Vec<Files>,
    pub table: SiteTable,
    pub counter: u64,
}

/// How a migration ended, as its source's VM process tells.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    pub migration: MigrationId,
    pub completed: bool,
}

#[derive(Debug)]
pub(crate) struct Machine {
    pub name: NameId,
    pub is_up: bool,
    pub instance: Option<Instance>,
    /// Nobody powers it on by itself.
    pub stays_off: bool,
    pub boots: u32,
    /// Tells each boot from all others.
    pub boot: u64,
    pub agent: Option<Agent>,
    pub agent_frozen_until: u64,
    pub agent_cut_until: u64,
    pub slow_until: u64,
    pub table: SiteTable,
    pub counter: u64,
    pub slots: Vec<Slot>,
    pub backup: Option<Backup>,
    pub reports: Vec<Report>,
    pub lies: bool,
    /// It did, and has not joined anew since: what was believed of it lasts.
    pub has_lied: bool,
    /// Its disk is, or once was, an old copy.
    pub is_old: bool,
    /// It is a second machine with a copy of the first one's disk.
    pub is_clone: bool,
    /// A person has said that it is off, or took it out of the site.
    pub was_dismissed: bool,
    /// It was removed and is off for good.
    pub is_retired: bool,
    /// A person takes it out of the site, to let it join anew.
    pub is_leaving: bool,
    /// A person said that it is off while it was not, and it was not heard since.
    pub falsely_fenced: bool,
    /// A controller on an old copy of its database has answered a question of this host as if it knew all.
    pub heard_old_controller: bool,
    /// What was answered about each VM in the present round.
    pub grounds: BTreeMap<VmId, Ground>,
    /// What each VM was booted on, if nobody asked for it.
    pub booted: BTreeMap<VmId, Ground>,
}

impl Machine {
    pub(crate) fn new(name: NameId, vms: usize) -> Self {
        Self {
            name,
            is_up: false,
            instance: None,
            stays_off: false,
            boots: 0,
            boot: 0,
            agent: None,
            agent_frozen_until: 0,
            agent_cut_until: 0,
            slow_until: 0,
            table: SiteTable::default(),
            counter: 0,
            slots: (0..vms).map(|_| Slot::default()).collect(),
            backup: None,
            reports: Vec::new(),
            lies: false,
            has_lied: false,
            is_old: false,
            is_clone: false,
            was_dismissed: false,
            is_retired: false,
            is_leaving: false,
            falsely_fenced: false,
            heard_old_controller: false,
            grounds: BTreeMap::new(),
            booted: BTreeMap::new(),
        }
    }
}

/// What a controller asks of a host's agent.
#[derive(Debug, Clone)]
pub(crate) enum Ask {
    Poll,
    Update(SiteUpdate),
    Whole,
    Survey {
        vm: VmId,
        level: Generation,
    },
    Granted {
        vm: VmId,
        generation: Generation,
        expect: Generation,
        images: Vec<KnownImage>,
        /// As of how many openings of the image that is, as an observer knows.
        told: u64,
        /// Where its disk is that only its host has.
        place: Store,
    },
    /// Start, stop, pause, resume, delete, or take part in a migration.
    Do {
        vm: VmId,
        event: Event,
        /// A person ends the guest by it.
        discards: bool,
    },
    /// A person has the disk that only its host has moved to another place there.
    MoveDisk {
        vm: VmId,
    },
    /// A planted fault: where the disk is, to the host that holds the VM.
    Describe {
        vm: VmId,
        place: Store,
    },
}

/// What a host's agent answers.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// With where the disks of the VMs are that only it has.
    Heard(Heard, Vec<Report>, BTreeMap<VmId, Store>),
    Updated(Standing, SiteHeard),
    Whole(WholeSurvey),
    Surveyed(SurveyAnswer),
    Done,
    Refused,
}

/// Where a packet goes to or comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Machine(MachineId),
    /// Whichever machine has that host's address.
    Name(NameId),
    Controller(usize),
}

/// What the network carries.
#[derive(Debug, Clone)]
pub(crate) enum Packet {
    Ask {
        caller: Caller,
        stamp: Stamp,
        what: Box<Ask>,
    },
    Reply {
        caller: Caller,
        from: NameId,
        reply: Box<Reply>,
    },
    Question {
        agent: u64,
        round: u64,
        question: Box<SiteQuestion>,
    },
    Answered {
        agent: u64,
        round: u64,
        answer: Box<SiteAnswer>,
    },
    Peer {
        vm: VmId,
        message: PeerMessage,
    },
    LastPages {
        vm: VmId,
        migration: MigrationId,
        attempt: Generation,
        memory: Memory,
    },
    LastPagesApplied {
        vm: VmId,
        migration: MigrationId,
        attempt: Generation,
    },
    DeviceState {
        vm: VmId,
        migration: MigrationId,
        attempt: Generation,
    },
}

/// What is going to happen.
#[derive(Debug)]
pub(crate) enum Happening {
    Deliver {
        from: Place,
        to: Place,
        packet: Packet,
    },
    Run {
        at: MachineId,
        vm: VmId,
        process: u64,
    },
    Synced {
        at: MachineId,
        vm: VmId,
        process: u64,
    },
    Fires {
        at: MachineId,
        vm: VmId,
        process: u64,
        timer: Timer,
        stamp: u64,
    },
    Local {
        at: MachineId,
        vm: VmId,
        process: u64,
        event: Event,
    },
    Precopy {
        at: MachineId,
        vm: VmId,
        process: u64,
    },
    DiskMoves {
        at: MachineId,
        vm: VmId,
        process: u64,
    },
    ReceiverLooks {
        at: MachineId,
        vm: VmId,
        process: u64,
        migration: MigrationId,
    },
    AgentTick {
        at: MachineId,
        agent: u64,
    },
    AgentStarts {
        at: MachineId,
    },
    MachineStarts {
        at: MachineId,
    },
    ControllerTick {
        controller: usize,
        life: u64,
    },
    ControllerStarts {
        controller: usize,
    },
    AskTimesOut(Caller),
    PeopleAct,
    Heal {
        what: Cut,
    },
    Look,
}

/// A connection that is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cut {
    Machines(MachineId, MachineId),
    Controller(usize, MachineId),
}

/// Why a VM is not judged any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Exempt {
    /// A person said falsely that a host is off, or that nobody runs the VM.
    FalseWord,
    /// A host that lies once held it.
    Liar,
    /// A database restored from an old copy forgot it.
    Forgotten,
    /// A host with an old copy of its disk booted it on the word of neighbours that had missed everything since.
    OldCopyAndNeighbours,
    /// An old copy of the destination's disk denied that it had taken the VM.
    OldCopyDenied,
    /// A host that had been said to be off booted it on the word of neighbours that had missed everything since.
    DismissedAndNeighbours,
    /// The host that had taken it was taken out of the site, and denied that as a new one under its name.
    WentWithItsHost,
}

impl Exempt {
    pub const ALL: [Self; 7] = [
        Self::FalseWord,
        Self::Liar,
        Self::Forgotten,
        Self::OldCopyAndNeighbours,
        Self::OldCopyDenied,
        Self::DismissedAndNeighbours,
        Self::WentWithItsHost,
    ];

    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::FalseWord => "a person's false word",
            Self::Liar => "a host that lies once held it",
            Self::Forgotten => "a restored database forgot it",
            Self::OldCopyAndNeighbours => {
                "an old copy booted on the word of neighbours that missed everything since"
            }
            Self::OldCopyDenied => {
                "an old copy of the destination's disk denied that it had taken the VM"
            }
            Self::DismissedAndNeighbours => {
                "a host said to be off booted on the word of neighbours that missed everything since"
            }
            Self::WentWithItsHost => {
                "the host that had taken the VM is gone, and a new one under its name denied that"
            }
        }
    }
}

/// A VM as people know it, and the guest as an outside observer knows it.
#[derive(Debug, Default)]
pub(crate) struct Guest {
    pub current: Version,
    pub boots: u32,
    /// A fault ended the guest, or a person did.
    pub died: bool,
    pub may_go_back_at: Option<MachineId>,
    /// A person was told that the VM exists.
    pub exists: bool,
    /// A person asked that it be gone, or be made: the answer is open.
    pub is_changing: bool,
    /// A person was told that it runs, and nothing has ended it since but faults.
    pub is_on: bool,
    /// A person was told that it is deleted.
    pub deleted: bool,
    /// How many VMs of its name were made.
    pub made: u64,
    pub exempt: BTreeSet<Exempt>,
    /// The word with which another host was last named.
    pub named: Stamp,
    /// A controller on an old copy of its database named a host, as if it knew all.
    pub named_by_old: bool,
    /// Hosts that may have held it.
    pub held_by: BTreeSet<MachineId>,
    /// The machine where it began to run last, and whether that has lost all that it had since.
    pub ran_last: Option<MachineId>,
    pub ran_last_is_gone: bool,
    /// Its record may be gone with a disk, by a person's word or an old copy.
    pub may_be_lost: bool,
}
