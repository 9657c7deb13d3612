//! What a world is made of: hosts with disks, processes and QEMUs, packets between them, the guest.
//!
//! Plain data, owned by [`World`](crate::World).

use godwit_ownership::{Event, HostRecord, PeerMessage, Timer, VmCore};
use godwit_types::{Generation, MigrationId};
use std::collections::{BTreeMap, VecDeque};

pub(crate) type HostId = usize;
pub(crate) const HOSTS: usize = 3;

/// One state of the guest's memory: which boot, how many steps after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Version {
    pub boot: u32,
    pub step: u64,
}

/// A journal with a page cache.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk {
    /// What a reader finds.
    pub seen: Option<HostRecord>,
    /// What a power cut leaves for certain.
    pub durable: Option<HostRecord>,
}

#[derive(Debug, Clone)]
pub(crate) struct QemuProcess {
    /// The guest's state in it; `None` while a destination has not loaded anything.
    pub version: Option<Version>,
    pub running: bool,
}

/// The source half of a migration in a VM process.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub migration: MigrationId,
    pub to: HostId,
    pub began: u64,
    pub acknowledged: u32,
}

#[derive(Debug, Clone)]
pub(crate) struct Receiving {
    pub migration: MigrationId,
    pub from: HostId,
    pub pages: Option<Version>,
    pub attempt: Generation,
    pub loaded: bool,
    pub heard: u64,
}

/// A VM process (or an agent that acts for a VM without one).
#[derive(Debug)]
pub(crate) struct Process {
    /// Which one, of all that ever were.
    pub number: u64,
    pub core: VmCore,
    pub todo: VecDeque<godwit_ownership::Action>,
    pub inbox: VecDeque<Event>,
    pub is_scheduled: bool,
    pub writing: Option<HostRecord>,
    /// The armed timers: the stamp that a firing must carry.
    pub switchover: Option<u64>,
    pub ask: Option<u64>,
    pub outgoing: Option<Outgoing>,
    pub receiving: Option<Receiving>,
    /// A person or the guest ended the guest here: its state may be thrown away.
    pub may_discard: bool,
    /// Which survey asked for each level.
    pub surveys: BTreeMap<Generation, u64>,
    /// Where each migration that was asked for goes.
    pub asked: BTreeMap<MigrationId, HostId>,
}

#[derive(Debug, Default)]
pub(crate) struct Host {
    pub is_up: bool,
    pub has_agent: bool,
    pub disk: Disk,
    pub qemu: Option<QemuProcess>,
    pub process: Option<Process>,
}

/// What the network carries.
#[derive(Debug, Clone)]
pub(crate) enum Packet {
    Peer(PeerMessage),
    Pages {
        migration: MigrationId,
        version: Version,
    },
    PagesApplied {
        migration: MigrationId,
    },
    LastPages {
        migration: MigrationId,
        attempt: Generation,
        version: Version,
    },
    LastPagesApplied {
        migration: MigrationId,
        attempt: Generation,
    },
    DeviceState {
        migration: MigrationId,
        attempt: Generation,
    },
    Command(Event),
    Survey {
        survey: u64,
        level: Generation,
    },
    Surveyed {
        survey: u64,
        host: HostId,
        record: HostRecord,
    },
}

/// Where a packet goes or comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Host(HostId),
    Controller,
}

/// What is going to happen.
#[derive(Debug)]
pub(crate) enum Happening {
    Deliver {
        from: Place,
        to: Place,
        packet: Packet,
    },
    /// The VM process goes on with its actions or its inbox.
    Run {
        host: HostId,
        process: u64,
    },
    /// The record being written has reached the disk.
    Synced {
        host: HostId,
        process: u64,
    },
    Fires {
        host: HostId,
        process: u64,
        timer: Timer,
        stamp: u64,
    },
    /// QEMU answers a command.
    Local {
        host: HostId,
        process: u64,
        event: Event,
    },
    Precopy {
        host: HostId,
        process: u64,
    },
    ReceiverLooks {
        host: HostId,
        process: u64,
    },
    /// The agent looks whether every VM has its process.
    AgentLooks {
        host: HostId,
    },
    AgentStarts {
        host: HostId,
    },
    HostStarts {
        host: HostId,
    },
    /// The link from this host to the next.
    LinkHeals {
        a: HostId,
    },
    ControllerStarts,
    ControllerTick,
    OwnerPolicy {
        host: HostId,
    },
}

/// The guest, as an outside observer knows it.
#[derive(Debug, Default)]
pub(crate) struct Guest {
    pub current: Version,
    pub boots: u32,
    /// The QEMU that last ran it died of a fault: a new boot is no loss by the software.
    pub died: bool,
    /// An operator has let this host run the guest on from where it stopped there, whatever it did since.
    pub may_go_back_at: Option<HostId>,
}
