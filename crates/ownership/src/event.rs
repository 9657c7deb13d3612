//! What goes into the core (events, peer messages) and what comes out of it (actions, status).
//!
//! Plain data. Refuses: a peer's reason that is longer than somebody reads; judging is the core's business.

use crate::permit::RunPermit;
use crate::record::HostRecord;
use godwit_types::{Generation, HostName, MigrationId, named};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a host gave a migration up, in its own words: one line of a bounded length.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Reason(String);

/// A reason that is too long, or not one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a reason has at most {} bytes and no control characters",
    Reason::LEN_MAX
)]
pub struct BadReason;

impl Reason {
    /// Longest reason, bytes.
    pub const LEN_MAX: usize = 512;

    /// As much of a text as fits, on one line.
    pub fn clipped(text: &str) -> Self {
        let mut line = text.replace(char::is_control, " ");
        let mut end = line.len().min(Self::LEN_MAX);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
        Self(line)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Reason {
    type Error = BadReason;
    fn try_from(text: String) -> Result<Self, BadReason> {
        if text.len() > Self::LEN_MAX || text.contains(char::is_control) {
            return Err(BadReason);
        }
        Ok(Self(text))
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> String {
        reason.0
    }
}

/// What the hosts say to each other about ownership: on the migration's control channel while it lives, and
/// through the hosts' agents over mutual TLS at any time. May be lost, doubled, delayed and reordered.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum PeerMessage {
    /// Destination: prepared to receive; attempts must have a generation above `highest`.
    Prepared {
        migration: MigrationId,
        /// The highest generation known to the sender.
        highest: Generation,
    },
    /// Destination: applied, verified, loaded, paused, and durably so.
    Ready {
        migration: MigrationId,
        /// The generation of this attempt.
        generation: Generation,
    },
    /// Source: the gift is durable; the destination may take it.
    Permit {
        migration: MigrationId,
        generation: Generation,
    },
    /// Source in doubt: the gift is durable; do you hold it? Counts as a permit, too.
    AskHolding {
        migration: MigrationId,
        generation: Generation,
    },
    /// Destination: holds (or has held and moved on) the generation, durably.
    Holding {
        migration: MigrationId,
        generation: Generation,
    },
    /// Source: knows, durably, that the destination holds it.
    Confirmed { generation: Generation },
    /// Source: `generation` is void, this host holds `by`.
    Superseded {
        /// The generation that was claimed.
        generation: Generation,
        /// The higher one held by the sender.
        by: Generation,
    },
    /// Destination: did not take it and never will, durably.
    Refused {
        migration: MigrationId,
        generation: Generation,
    },
    /// Destination that said ready: did you give it?
    AskGift {
        migration: MigrationId,
        generation: Generation,
    },
    /// Source: not given so far, may still be.
    Undecided {
        migration: MigrationId,
        generation: Generation,
    },
    /// Source: this attempt's generation was not given and never will be; the migration may go on.
    Withdrawn {
        migration: MigrationId,
        generation: Generation,
    },
    /// Source: nothing of this migration was given and nothing will be.
    Abort {
        migration: MigrationId,
        /// Why, for people: nothing is decided by it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<Reason>,
        /// A person or a deadline wanted it, which is for people, too; without it something has failed.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        cancelled: bool,
        /// Whether the source has the VM's disks, of which it was the source in this migration: only then what came of them
        /// may be removed. No ownership is decided by it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        has_disks: bool,
    },
    /// Destination that has promised nothing: cannot go on.
    Failed {
        migration: MigrationId,
        /// Why, for people: nothing is decided by it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<Reason>,
    },
}

/// The waits that the shell times. A timer of a kind replaces the one before it; late firing is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Timer {
    /// Silence of the peer during switchover before the gift: 500 ms or 4 round trips, whichever is larger.
    /// The shell restarts it whenever anything arrives from the peer.
    Switchover,
    /// Until the question is asked, or the journal tried, again: as [`Timer::Switchover`] at first, then 1 s.
    Ask,
}

/// Everything that can happen to one VM at one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The record of the last [`Action::Persist`] is durable (file and directory).
    Persisted,
    /// It is not, or perhaps not.
    PersistFailed {
        /// Whether the old record is known to be what is on the disk.
        unchanged: bool,
    },
    /// The controller: every host that might hold the VM is fenced or was surveyed; take it, off. A new VM, too,
    /// begins after a survey.
    Granted {
        /// A generation above every one ever used ([`crate::GenerationLedger`]).
        generation: Generation,
        /// The level of the survey that it follows: a grant that was overtaken by another survey is void.
        expect: Generation,
    },
    /// The controller surveys who may hold the VM: voids every grant made before, then answers with
    /// [`Action::Surveyed`].
    SurveyRequested {
        /// Above every generation that the controller knows ([`crate::GenerationLedger::survey_level`]). Any level is
        /// taken that leaves room in the counter.
        level: Generation,
    },
    /// That host was removed for good: nothing is waited for from it any more. May be told again: where nothing is
    /// waited for it is [`Action::Ignored`]. A VM in doubt because of that host is resolved by an operator.
    HostRemoved {
        host: HostName,
    },
    /// The site let another host hold the VM since this one gave it: nobody takes what was given any more. Forget it.
    GiftOvertaken {
        /// The generation under which the other host holds it, above the one that was given.
        by: Generation,
        /// A person gives up the guest that stands here, too. Without that only what has no guest is given up: its memory
        /// may be the only one that is left.
        with_guest: bool,
    },
    /// Forget the VM (only when it is off).
    DeleteRequested,
    /// Let the guest run.
    StartRequested,
    StopRequested,
    /// Stop the guest where it stands.
    PauseRequested,
    /// The guest's disk has had no room for so long that it would give the disk up: stop it where it stands until there is some.
    OutOfRoom,
    /// The guest was to go on after that and cannot: it stands still where it was, and waits again.
    StillOutOfRoom,
    /// Let a paused guest run on.
    ResumeRequested,
    /// Source: a migration begins (preflight done, channels up); the guest runs on.
    MigrationBegan {
        /// The migration, never used before.
        migration: MigrationId,
        to: HostName,
        /// The permission's generation: above every one that this host knows. Attempts take it or a later one.
        generation: Generation,
    },
    /// Source: precopy has converged far enough: stop the guest and hand over.
    SwitchoverRequested,
    /// Source: the guest is stopped (QEMU said so).
    Stopped {
        /// The attempt's generation, from [`Action::StopGuest`].
        attempt: Generation,
    },
    /// Source: the last pages are on their way in order: the destination has acknowledged them as applied and verified,
    /// or, far away, loads no device before it has applied them and says so when it is ready.
    LastPagesApplied {
        attempt: Generation,
    },
    /// Source: the device state has left completely, QEMU says completed.
    DeviceStateSent {
        attempt: Generation,
    },
    /// Destination: prepare to receive.
    PrepareIncoming {
        migration: MigrationId,
        from: HostName,
        /// The permission's generation: above every one that this host knows.
        generation: Generation,
    },
    /// Destination: everything is applied, verified and loaded, the guest is paused.
    Loaded {
        /// The attempt's generation, as the source named it.
        attempt: Generation,
    },
    /// Destination: receiving or loading failed.
    IncomingFailed,
    /// From the other host, whose name the channel's authentication gave.
    Message {
        from: HostName,
        message: PeerMessage,
    },
    /// Every channel to the peer is gone.
    LinkLost,
    /// A timer armed before has fired.
    Timeout(Timer),
    /// The migration is cancelled: by a user, by its deadline, by an error of this side.
    Cancel,
    /// The guest powered itself off.
    GuestShutdown,
    /// The guest cannot run on: panicked, IO error with stop policy.
    GuestHalted,
    /// The guest reset itself.
    GuestReset,
    /// This host's QEMU for the VM is gone.
    QemuDied,
    /// `godwit vm resolve`: an operator decides what the peer cannot answer.
    OperatorResolve {
        /// Run the VM here; else give up what this host has of it.
        run_here: bool,
        /// The host that the operator swears is fenced.
        confirm_fenced: HostName,
    },
}

/// What the shell must do, in this order. [`Action::Persist`] is always the last of a batch.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the record durably, then feed [`Event::Persisted`] or [`Event::PersistFailed`].
    Persist(HostRecord),
    /// Start a QEMU for the guest (with `-S`), boot it with the permit.
    Boot(RunPermit),
    /// Let the QEMU that is there run on.
    Cont(RunPermit),
    /// QMP `stop`; then feed [`Event::Stopped`] with the attempt, unless it is `None` (a pause).
    StopGuest {
        attempt: Option<Generation>,
    },
    /// Final scan; send the last pages, with the attempt's generation.
    SendLastPages {
        attempt: Generation,
    },
    /// Save the device state and send it, with the attempt's generation.
    SendDeviceState {
        attempt: Generation,
    },
    /// Put back the dirty bits of what the peer may not have applied.
    RestoreDirty,
    /// Let the guest run at full speed, release all write protection, end tracking.
    ReleaseThrottle,
    /// Send to the peer, on every path there is; doubles are harmless.
    Send {
        to: HostName,
        message: PeerMessage,
    },
    /// Kill this host's QEMU of the VM and wait until it is dead; later actions only after that.
    KillQemu,
    /// Remove RAM file, sockets and whatever else the migration or the guest left here.
    Cleanup,
    Arm(Timer),
    Disarm(Timer),
    /// The migration is over at this host.
    EndMigration {
        migration: MigrationId,
        outcome: Ending,
    },
    Report(Status),
    /// The answer to [`Event::SurveyRequested`]: this record is durable.
    Surveyed {
        level: Generation,
    },
    /// Tell whoever asked that it is not done, and why.
    Refuse {
        event: EventKind,
        why: &'static str,
    },
    /// For the log: the event had no effect, and why.
    Ignored {
        event: EventKind,
        why: &'static str,
    },
}

/// How a migration ended at this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// The destination holds the VM.
    Completed,
    /// Cancelled here; the guest is at the source.
    Cancelled,
    /// Ended by a failure; the guest is at the source (or died there).
    Failed,
    /// The destination refused after the gift; the guest is at the source again.
    Refused,
}

/// What people are shown about the VM at this host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Status {
    Absent,
    /// Held here, powered off.
    Off,
    Running {
        generation: Generation,
    },
    /// Held here, stopped by request, because the guest halted, or until its disk has room.
    Paused,
    /// Running here and being moved away.
    Migrating {
        migration: MigrationId,
    },
    /// Stopped for a moment: the handover is within its deadline.
    SwitchingOver {
        migration: MigrationId,
    },
    Incoming {
        migration: MigrationId,
    },
    /// Nobody may run it until the peer answers or an operator decides.
    InDoubt {
        /// The generation that only the peer knows about.
        generation: Generation,
        peer: HostName,
        /// The command that ends it.
        command: String,
    },
    /// Held here, should run, has no QEMU.
    Down {
        reason: &'static str,
    },
    /// Moved to that host.
    Moved {
        to: HostName,
    },
    /// The journal of this host cannot be written; nothing is done until it can.
    JournalFailed,
}

named! {
    /// The kind of an event, one per row of the transition table.
    pub enum EventKind {
        Persisted => "persisted",
        PersistFailed => "persist-failed",
        Granted => "granted",
        SurveyRequested => "survey-requested",
        HostRemoved => "host-removed",
        GiftOvertaken => "gift-overtaken",
        DeleteRequested => "delete-requested",
        StartRequested => "start-requested",
        StopRequested => "stop-requested",
        PauseRequested => "pause-requested",
        OutOfRoom => "out-of-room",
        StillOutOfRoom => "still-out-of-room",
        ResumeRequested => "resume-requested",
        MigrationBegan => "migration-began",
        SwitchoverRequested => "switchover-requested",
        Stopped => "stopped",
        LastPagesApplied => "last-pages-applied",
        DeviceStateSent => "device-state-sent",
        PrepareIncoming => "prepare-incoming",
        Loaded => "loaded",
        IncomingFailed => "incoming-failed",
        PeerPrepared => "peer-prepared",
        PeerReady => "peer-ready",
        PermitReceived => "permit-received",
        AskedHolding => "asked-holding",
        PeerHolding => "peer-holding",
        PeerConfirmed => "peer-confirmed",
        PeerSuperseded => "peer-superseded",
        PeerRefused => "peer-refused",
        AskedGift => "asked-gift",
        PeerUndecided => "peer-undecided",
        PeerWithdrawn => "peer-withdrawn",
        PeerAborted => "peer-aborted",
        PeerFailed => "peer-failed",
        LinkLost => "link-lost",
        SwitchoverTimeout => "switchover-timeout",
        AskTimeout => "ask-timeout",
        Cancel => "cancel",
        GuestShutdown => "guest-shutdown",
        GuestHalted => "guest-halted",
        GuestReset => "guest-reset",
        QemuDied => "qemu-died",
        OperatorResolve => "operator-resolve",
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl PeerMessage {
    /// The event kind that the message becomes.
    pub fn kind(&self) -> EventKind {
        match self {
            PeerMessage::Prepared { .. } => EventKind::PeerPrepared,
            PeerMessage::Ready { .. } => EventKind::PeerReady,
            PeerMessage::Permit { .. } => EventKind::PermitReceived,
            PeerMessage::AskHolding { .. } => EventKind::AskedHolding,
            PeerMessage::Holding { .. } => EventKind::PeerHolding,
            PeerMessage::Confirmed { .. } => EventKind::PeerConfirmed,
            PeerMessage::Superseded { .. } => EventKind::PeerSuperseded,
            PeerMessage::Refused { .. } => EventKind::PeerRefused,
            PeerMessage::AskGift { .. } => EventKind::AskedGift,
            PeerMessage::Undecided { .. } => EventKind::PeerUndecided,
            PeerMessage::Withdrawn { .. } => EventKind::PeerWithdrawn,
            PeerMessage::Abort { .. } => EventKind::PeerAborted,
            PeerMessage::Failed { .. } => EventKind::PeerFailed,
        }
    }

    /// Asks the source of a migration that is over here whether it has the VM's disks, which its [`PeerMessage::Abort`] tells. No attempt
    /// has this generation: the answer promises nothing.
    pub fn ask_for_disks(migration: MigrationId) -> Self {
        Self::AskGift {
            migration,
            generation: Generation(0),
        }
    }

    /// Whether it is that question.
    pub fn asks_for_disks(&self) -> bool {
        matches!(self, Self::AskGift { generation, .. } if *generation == Generation(0))
    }

    /// An [`PeerMessage::Abort`] that says no more than that.
    pub fn abort(migration: MigrationId) -> Self {
        Self::Abort {
            migration,
            reason: None,
            cancelled: false,
            has_disks: false,
        }
    }
}

impl Event {
    pub fn kind(&self) -> EventKind {
        match self {
            Event::Persisted => EventKind::Persisted,
            Event::PersistFailed { .. } => EventKind::PersistFailed,
            Event::Granted { .. } => EventKind::Granted,
            Event::SurveyRequested { .. } => EventKind::SurveyRequested,
            Event::HostRemoved { .. } => EventKind::HostRemoved,
            Event::GiftOvertaken { .. } => EventKind::GiftOvertaken,
            Event::DeleteRequested => EventKind::DeleteRequested,
            Event::StartRequested => EventKind::StartRequested,
            Event::StopRequested => EventKind::StopRequested,
            Event::PauseRequested => EventKind::PauseRequested,
            Event::OutOfRoom => EventKind::OutOfRoom,
            Event::StillOutOfRoom => EventKind::StillOutOfRoom,
            Event::ResumeRequested => EventKind::ResumeRequested,
            Event::MigrationBegan { .. } => EventKind::MigrationBegan,
            Event::SwitchoverRequested => EventKind::SwitchoverRequested,
            Event::Stopped { .. } => EventKind::Stopped,
            Event::LastPagesApplied { .. } => EventKind::LastPagesApplied,
            Event::DeviceStateSent { .. } => EventKind::DeviceStateSent,
            Event::PrepareIncoming { .. } => EventKind::PrepareIncoming,
            Event::Loaded { .. } => EventKind::Loaded,
            Event::IncomingFailed => EventKind::IncomingFailed,
            Event::Message { message, .. } => message.kind(),
            Event::LinkLost => EventKind::LinkLost,
            Event::Timeout(Timer::Switchover) => EventKind::SwitchoverTimeout,
            Event::Timeout(Timer::Ask) => EventKind::AskTimeout,
            Event::Cancel => EventKind::Cancel,
            Event::GuestShutdown => EventKind::GuestShutdown,
            Event::GuestHalted => EventKind::GuestHalted,
            Event::GuestReset => EventKind::GuestReset,
            Event::QemuDied => EventKind::QemuDied,
            Event::OperatorResolve { .. } => EventKind::OperatorResolve,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_s_reason_is_one_line_of_bounded_length() {
        let long = format!("first\nsecond {}", "\u{20ac}".repeat(Reason::LEN_MAX));
        let reason = Reason::clipped(&long);
        assert!(reason.as_str().starts_with("first second "));
        assert!(reason.as_str().len() <= Reason::LEN_MAX);
        assert_eq!(Reason::try_from(reason.as_str().to_owned()), Ok(reason));
        for bad in ["x".repeat(Reason::LEN_MAX + 1), "a\u{1b}[2J".into()] {
            let text = serde_json::json!({"message": "failed", "migration": "m", "reason": bad});
            assert!(serde_json::from_value::<PeerMessage>(text).is_err());
        }
        let plain = serde_json::json!({"message": "failed", "migration": "m"});
        let message: PeerMessage = serde_json::from_value(plain.clone()).unwrap();
        assert_eq!(serde_json::to_value(message).unwrap(), plain);
    }
}
