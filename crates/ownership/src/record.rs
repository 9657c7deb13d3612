//! The durable record: what a host has written about one VM, and what follows from it alone.
//!
//! Owned by the core that runs under the host's lock for that VM; written by the shell when the core says so.
//! Refuses: records of another format, and records whose parts contradict each other.

use godwit_types::{Generation, HostName, MigrationId, VmName};
use serde::{Deserialize, Serialize};

/// The format that this build writes, and the only one that it reads.
pub const RECORD_FORMAT: u32 = 1;

/// Whether the holder should have the guest running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Power {
    /// It should run, also after a reboot of the host.
    On,
    /// Stopped where it stands (asked for, or the guest panicked): only a request resumes it.
    Paused,
    /// Stopped where it stands until its disk has room, which nobody asked for: it goes on by itself, and should run also after
    /// a reboot of the host.
    WaitsForRoom,
    Off,
}

impl Power {
    /// Whether a guest that is gone is to be booted again without anybody's request.
    pub fn should_run(self) -> bool {
        match self {
            Self::On | Self::WaitsForRoom => true,
            Self::Paused | Self::Off => false,
        }
    }
}

/// Which migration brought a generation, and from where or to where.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handover {
    pub migration: MigrationId,
    /// The host at its other end.
    pub peer: HostName,
}

/// What this host may and must do about the VM.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(
    tag = "phase",
    rename_all = "kebab-case",
    rename_all_fields = "kebab-case",
    deny_unknown_fields
)]
pub enum Phase {
    /// The VM is not here.
    Absent,
    /// This host holds `generation`: it alone may run the VM.
    Holds {
        generation: Generation,
        /// Whether the guest should run.
        power: Power,
        /// The source that gave it and has not yet said that it knows. While set, a guest without a QEMU is
        /// not started anew and no further migration begins: the source may have been told by its operator
        /// that this host is fenced.
        unconfirmed: Option<Handover>,
    },
    /// Source: the guest is being stopped or is stopped for a switchover. Still the owner: a failure resumes.
    Stopping {
        generation: Generation,
        /// The generation that this attempt would give.
        next: Generation,
        migration: MigrationId,
        to: HostName,
    },
    /// Source: `generation` was given away. From here this host never resumes by itself.
    Gave {
        generation: Generation,
        migration: MigrationId,
        /// The host that may take it.
        to: HostName,
    },
    /// Source: the destination said that it holds `generation`.
    Moved {
        generation: Generation,
        migration: MigrationId,
        /// The host that took it.
        to: HostName,
    },
    /// Destination: receiving; nothing is promised.
    Incoming {
        migration: MigrationId,
        from: HostName,
    },
    /// Destination: everything applied, verified and loaded, the guest paused; promised to the source.
    Ready {
        /// The generation that may be taken once it is given.
        generation: Generation,
        migration: MigrationId,
        from: HostName,
    },
    /// Destination: this generation was not taken and never will be.
    Refused {
        generation: Generation,
        migration: MigrationId,
        from: HostName,
    },
}

/// Everything a host knows durably about who may run one VM.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRecord {
    /// [`RECORD_FORMAT`].
    pub format: u32,
    pub vm: VmName,
    /// The highest generation ever seen, offered or held here. Never goes down.
    pub highest: Generation,
    /// The highest generation ever held here; 0 if none was.
    pub held: Generation,
    pub phase: Phase,
}

/// Why a record cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Written by another version of the software.
    #[error(
        "the ownership record of '{vm}' has format {found}, this build reads format {RECORD_FORMAT}: use the version that wrote it"
    )]
    Format { vm: VmName, found: u32 },
    /// Its parts do not fit together.
    #[error("the ownership record of '{vm}' contradicts itself: {what}; it is not used")]
    Contradiction { vm: VmName, what: &'static str },
    /// The new record would forget a generation.
    #[error(
        "the new ownership record of '{vm}' goes back from generation {known} to {offered}; it is not written"
    )]
    GoesBack {
        vm: VmName,
        known: Generation,
        /// Highest generation of the new record.
        offered: Generation,
    },
    /// The new record is about another VM.
    #[error("a record of '{offered}' was to be written into the journal of '{vm}'")]
    OtherVm {
        /// Whose journal it is.
        vm: VmName,
        /// Whose record was offered.
        offered: VmName,
    },
}

impl HostRecord {
    /// The record of a host that never heard of the VM.
    pub fn absent(vm: VmName) -> Self {
        Self {
            format: RECORD_FORMAT,
            vm,
            highest: Generation(0),
            held: Generation(0),
            phase: Phase::Absent,
        }
    }

    /// The generation under which this host may run the VM, if this record is durable.
    pub fn may_run(&self) -> Option<Generation> {
        match &self.phase {
            Phase::Holds { generation, .. } | Phase::Stopping { generation, .. } => {
                Some(*generation)
            }
            Phase::Absent
            | Phase::Gave { .. }
            | Phase::Moved { .. }
            | Phase::Incoming { .. }
            | Phase::Ready { .. }
            | Phase::Refused { .. } => None,
        }
    }

    /// Whether the guest should run here, if this host holds the VM and no switchover is under way.
    pub fn power(&self) -> Option<Power> {
        match self.phase {
            Phase::Holds { power, .. } => Some(power),
            _ => None,
        }
    }

    /// Whether this host might run the VM now or after an answer that is on its way.
    pub fn may_hold(&self) -> bool {
        match &self.phase {
            Phase::Holds { .. }
            | Phase::Stopping { .. }
            | Phase::Gave { .. }
            | Phase::Ready { .. } => true,
            Phase::Absent
            | Phase::Moved { .. }
            | Phase::Incoming { .. }
            | Phase::Refused { .. } => false,
        }
    }

    /// The host whose word this record waits for: the other end of a switchover, of a gift that was not answered, of a
    /// migration that is being received, or of a handover that is not confirmed. No other host moves this record.
    pub fn waits_for(&self) -> Option<&HostName> {
        match &self.phase {
            Phase::Stopping { to, .. } | Phase::Gave { to, .. } => Some(to),
            Phase::Incoming { from, .. } | Phase::Ready { from, .. } => Some(from),
            Phase::Holds { unconfirmed, .. } => unconfirmed.as_ref().map(|with| &with.peer),
            Phase::Absent | Phase::Moved { .. } | Phase::Refused { .. } => None,
        }
    }

    /// Checks that the parts fit together; for records that come from a disk or a peer.
    pub fn check(&self) -> Result<(), RecordError> {
        if self.format != RECORD_FORMAT {
            return Err(RecordError::Format {
                vm: self.vm.clone(),
                found: self.format,
            });
        }
        match self.contradiction() {
            Some(what) => Err(RecordError::Contradiction {
                vm: self.vm.clone(),
                what,
            }),
            None => Ok(()),
        }
    }

    fn contradiction(&self) -> Option<&'static str> {
        if self.held > self.highest {
            return Some("a generation above the highest is held");
        }
        match &self.phase {
            Phase::Absent | Phase::Incoming { .. } => None,
            Phase::Holds { generation, .. } => {
                wrong(*generation != self.held, "held and phase differ")
            }
            Phase::Stopping {
                generation, next, ..
            } => wrong(
                *generation != self.held || *next <= *generation || *next > self.highest,
                "the generation to give is not above the one held",
            ),
            Phase::Gave { generation, .. }
            | Phase::Moved { generation, .. }
            | Phase::Ready { generation, .. }
            | Phase::Refused { generation, .. } => wrong(
                *generation > self.highest || *generation <= self.held,
                "the generation handed over is not between the one held and the highest",
            ),
        }
    }

    /// Checks that this record may replace `old` in the same journal.
    pub fn check_follows(&self, old: &HostRecord) -> Result<(), RecordError> {
        self.check()?;
        if self.vm != old.vm {
            return Err(RecordError::OtherVm {
                vm: old.vm.clone(),
                offered: self.vm.clone(),
            });
        }
        if self.highest < old.highest {
            return Err(RecordError::GoesBack {
                vm: self.vm.clone(),
                known: old.highest,
                offered: self.highest,
            });
        }
        Ok(())
    }

    /// This record with another phase.
    pub(crate) fn with(&self, phase: Phase) -> Self {
        Self {
            phase,
            ..self.clone()
        }
    }

    /// This record with `highest` raised to `generation`, if it is below.
    pub(crate) fn raised(mut self, generation: Generation) -> Self {
        self.highest = self.highest.max(generation);
        self
    }

    /// This record holding `generation`.
    pub(crate) fn holding(
        &self,
        generation: Generation,
        power: Power,
        unconfirmed: Option<Handover>,
    ) -> Self {
        let mut record = self.with(Phase::Holds {
            generation,
            power,
            unconfirmed,
        });
        record.held = generation;
        record.raised(generation)
    }
}

fn wrong(is: bool, what: &'static str) -> Option<&'static str> {
    is.then_some(what)
}
