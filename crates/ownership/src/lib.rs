//! Who may run the VM: permits, generations, the durable record, the record of its disks' images, and the state machine of one
//! VM at one host.
//!
//! Pure: events in, actions out. Owns no file, socket, clock, thread or random number. The simulator and the
//! product drive the same code. Refuses: to mint a permit that no durable record backs, and to let the source
//! of a handover resume by itself once the gift may have been sent.
//!
//! # The handover
//!
//! ```text
//!        source                                              destination
//!   Running --MigrationBegan--> Precopy                 Absent --PrepareIncoming--> Incoming
//!      ^                          | SwitchoverRequested                                |
//!      |                       [write Stopping]                                        |
//!      |<-- any failure,      Stopping --Stopped--> LastPages                          |
//!      |    silence, cancel      --LastPagesApplied--> Devices                         | Loaded
//!      |                            --DeviceStateSent--> AwaitingReady             [write Ready]
//!      |                                    | <---------- Ready / AskGift ---------- Ready
//!   ===|=================================[write Gave]=====================================|====
//!      |                                  Gave ----------- Permit ------------->  [write Holds]
//!      |                   silence, link  |   \                                      cont
//!      |                   lost, restart  v    \<--------- Holding -------------  Running (unconfirmed)
//!      |                               InDoubt --------- AskHolding ----------->     |
//!      |<-- [write Holds, higher] -- Refused (durable)   [write Moved] - Confirmed -> [write confirmed]
//!           or vm resolve --run-on
//! ```
//!
//! `g+1` of the design is "the next generation never used": every *attempt* to switch over has a generation of
//! its own, chosen and made durable by the source with `Stopping`. An attempt that was rolled back can thus
//! never be completed by a late message, and "did you give g?" has a final answer: whatever is at or below
//! `highest` and is not given now never will be.
//!
//! # How a shell drives a [`VmCore`]
//!
//! 1. Take the VM's lock (one writer per host and VM: the VM process, or the agent while there is none), load
//!    the record ([`HostRecord::absent`] if there is none), look at QEMU, call [`VmCore::recover`].
//! 2. Carry out the actions of a batch strictly in order, each finished before the next.
//! 3. [`Action::Persist`] is the last of its batch: write it durably (file *and* directory), then call
//!    [`VmCore::handle`] with [`Event::Persisted`], or [`Event::PersistFailed`]. Other events may be handed
//!    over meanwhile; they wait inside. [`VmCore::is_writing`] says whether the core waits.
//! 4. [`Action::Boot`] and [`Action::Cont`] carry a [`RunPermit`]: pass it by value to the one function that
//!    sends `cont`. If that fails, kill QEMU and feed [`Event::QemuDied`].
//! 5. [`Action::KillQemu`] is finished when QEMU is verified dead. Do not feed `QemuDied` for it.
//! 6. [`Event::Stopped`], [`Event::LastPagesApplied`], [`Event::DeviceStateSent`], [`Event::Loaded`] carry the
//!    attempt's generation: the source takes it from the action, the destination from the stream.
//! 7. [`Action::Send`]: on the control channel and, when there is none, through the hosts' agents. The
//!    receiver feeds [`Event::Message`] with the name that the *authentication* of the channel gave. The agent
//!    of a host without a VM process for the VM takes the lock itself and drives a core to answer.
//! 8. [`Timer::Switchover`] is restarted by the shell whenever the peer is heard; [`Timer::Ask`] is not.
//! 9. Nothing boots by itself. A guest that should run and has no QEMU is [`Status::Down`], also after a reboot, after
//!    a successor found its QEMU dead, and once a handover is confirmed that nobody had confirmed before: the record
//!    may come from an old copy of the disk. The shell asks the site who holds the VM, then feeds
//!    [`Event::StartRequested`]; how often is its policy. Only that, an operator's decision to run here and a
//!    durable refusal of the destination lead to [`Action::Boot`].
//! 10. Show [`Action::Report`]; [`Status::InDoubt`] carries the command that ends it. [`Action::Refuse`] is the
//!     answer to whoever sent the request; [`Action::Ignored`] goes to the log.
//!
//! # A VM that begins anew
//!
//! There is one procedure, for a new VM as for one whose host is dead: survey the hosts that may hold it
//! ([`Event::SurveyRequested`], answer [`VmCore::record`] on [`Action::Surveyed`]), let [`GenerationLedger::grant`]
//! judge, then feed [`Event::Granted`] with `expect` the survey's level. A host that holds nothing rises to the level
//! and so voids every grant before it, also those that a controller with an older database made; a host that may
//! hold the VM answers without a change.
//!
//! A migration's permission ([`Event::PrepareIncoming`], [`Event::MigrationBegan`]) has a generation above all that the
//! controller knows. Both ends refuse one that is not above all that they know ([`VmCore::highest`]): a host's durable
//! "no" to a survey binds the permissions before it as it binds the grants. Attempts are not below the permission.
//!
//! # Whose word counts
//!
//! A certificate shows which host speaks, not that the VM is its business. A message moves a record only if it comes
//! from the host that the record waits for ([`HostRecord::waits_for`]), or from the other end of a migration in precopy,
//! and is about that migration. To any other host
//! a holder answers from what is durable, or not at all; it never stops, ends or starts a guest for it. A host that
//! holds and receives nothing may rise by a bounded step to answer a source in doubt. Two holders that know nothing of
//! each other stay as they are: that is shown to people, who decide.
//!
//! # When it is over
//!
//! Precopy outlasting its channels (60 s), a missed deadline and errors of the source are [`Event::Cancel`] at
//! the source and [`Event::IncomingFailed`] at the destination, which ignores it once it has promised. Feed
//! `IncomingFailed` only for the migration that [`VmCore::status`] shows as incoming: it carries no name.
//!
//! # What an operator should know
//!
//! `vm resolve --run-on A --confirm-fenced B` lets the guest run on at A from where it stopped there: what it did
//! at B meanwhile is gone. B, when it comes back, does not run until it has heard A, and then yields. Two
//! contradicting decisions never run the VM twice, but the one with the higher generation wins. A destination
//! that is ready can only be told to give up (`--give-up-on`): it cannot know whether the source ran on.
#![forbid(unsafe_code)]

mod core;
mod destination;
mod ended;
mod event;
mod image;
mod ledger;
mod own_images;
mod owner;
mod peer;
mod permit;
#[cfg(feature = "planted-faults")]
pub mod plant;
mod react;
mod record;
mod recover;
mod source;
mod state;
#[cfg(any(test, feature = "table"))]
mod table;
#[cfg(test)]
mod unrelated_tests;
mod words;

pub use crate::core::VmCore;
pub use ended::End;
pub use event::{Action, BadReason, Ending, Event, EventKind, PeerMessage, Reason, Status, Timer};
pub use image::{
    IMAGE_RECORD_FORMAT, ImageClaim, ImageRecord, ImageRefusal, LAYERED_RECORD_FORMAT,
};
pub use ledger::{FENCED_GAP, GenerationLedger, GrantError};
pub use own_images::{
    CameEnd, CameFound, CameImage, CameSource, CopyEnd, Described, FormerEnd, FormerImage,
    ImageNumbers, Is, NotedImage, is_overtaken,
};
pub use peer::PEERS_REACH;
pub use permit::RunPermit;
pub use record::{Handover, HostRecord, Phase, Power, RECORD_FORMAT, RecordError};
pub use state::{Qemu, StateName};
#[cfg(any(test, feature = "table"))]
pub use table::{Cell, transition_table};
