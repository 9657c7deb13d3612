//! What the two sides of a migration say to each other on the control channel.
//!
//! One JSON object per control record, sealed by crate `wire`. Data channels carry page records only; every word
//! about order and success is here, so that one reader sees the whole protocol:
//!
//! ```text
//! source                                              destination (prepared, QEMU waits with -S)
//!   Begin{set, streams}        ------------------->
//!   Extents{..}* ExtentsEnd    ------------------->     finds that there is room for them
//!                              <-------------------   Begun{set}
//!                              <-------------------   Prepared             only if asked for: all memory is allocated
//!   Variables{..}*             ------------------->     of a VM with UEFI: its file is whole and durable there
//!   Layers{disk, images}       ------------------->     of each disk with snapshots (from version 7 on)
//!                              <-------------------   LayersBegun{disk}
//!   channels of disks: what lies below their tops
//!   LayersSent{disk}           ------------------->
//!                              <-------------------   LayersReady{disk}    durable there
//!   data channels: pages of iteration 1; channels of disks: changes, all the time until the guest stops
//!                              <-------------------   Applied{channel, records}   every few ms of traffic,
//!                                                       ChangesApplied of each channel of disks
//!   Barrier{iteration, sent}   ------------------->     all records up to the counters are applied
//!                              <-------------------   BarrierDone{iteration}
//!   ... more iterations; then the guest stops ...
//!   Stopped, Mirrored?, Addresses ---------------->     which disks it has mirrored; whom to tell where the guest is
//!   Variables{..}*             ------------------->     of a VM with UEFI: what it has changed since
//!   Barrier (last)             ------------------->     all channels but this end with their final records
//!   device state records       ------------------->     (a far source does not wait for BarrierDone) taken behind the
//!                                                       barrier and kept: QEMU loads once
//!   DeviceStateWhole           ------------------->     QEMU loads
//!   DeviceStateEnd{attempt}    ------------------->     it was saved well: what is loaded counts
//!   Console                    ------------------->     what the guest wrote to its serial console (from version 5 on)
//!                              <-------------------   BarrierDone
//!                              <-------------------   Loaded{..}           figures of the loading
//!                              <-------------------   Peer(Ready)          durable at the destination
//!   Peer(Permit)               ------------------->     durable at the source before it is sent
//!                              <-------------------   Peer(Holding)        durable at the destination, guest runs
//!                              <-------------------   Resumed{..}          figures of the resume
//! ```
//!
//! Barriers make iterations strict: a page sent twice travels on whichever channel is free, and only the barrier keeps
//! its older copy from being applied last. Data channels join and leave while a connection set lives: one that leaves
//! sends its final record, and barriers go on naming what it sent. A lost channel ends its *connection set*: all channels
//! are made again with new ids and keys, and what was not acknowledged as applied is dirty again. On the wire the number
//! of a set is called `epoch`.
//!
//! Who may run the VM is not decided here: those messages are crate `ownership`'s and travel inside `Peer`, on this
//! channel while it lives and through the hosts' agents at any time. A side that ends the migration says so, and why, in one
//! of them, so that whichever way it comes first tells all.
//!
//! Refuses: unknown messages, more than [`STREAMS_MAX`] streams, extents outside of the guest's memory, figures that
//! are negative or no number.

use crate::addresses;
use godwit_ownership::{PeerMessage, Reason};
use godwit_types::Generation;
use godwit_types::console::ConsoleKept;
use godwit_types::version::MIGRATION;
#[cfg(doc)]
use godwit_types::version::{MIGRATION_WITH_CONSOLE, MIGRATION_WITH_SNAPSHOTS};
use godwit_types::vm::DISKS_MAX;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The newest version of the control protocol; both sides speak the same one, which they agree on beforehand.
pub const PROTOCOL_VERSION: u32 = MIGRATION.max;
/// Most data channels that one connection set has had, also those that have left.
pub const STREAMS_MAX: u32 = 64;
/// Most channels for changes of disks in one connection set.
pub const CHANGE_CHANNELS_MAX: u32 = 32;
/// Most extents in one message (keeps it far below the record limit).
pub const EXTENTS_PER_MESSAGE: usize = 8192;
/// Longest reason that crosses the wire, bytes; longer ones are cut.
pub const REASON_LEN_MAX: usize = Reason::LEN_MAX;
/// Longest filling of a message that only warms a channel, bytes.
pub const WARM_LEN_MAX: usize = 64 << 10;
/// Longest piece of UEFI variables in one message, bytes.
pub const VARIABLES_LEN_MAX: usize = 256 << 10;
/// Most bytes of UEFI variables.
pub const VARIABLES_WHOLE_MAX: u64 = 8 << 20;
/// Longest text that says what a disk with snapshots consists of, bytes.
pub const LAYERS_LEN_MAX: usize = 256 << 10;
/// Largest figure (a share, milliseconds, seconds) that a peer may report: 31 years in seconds.
pub const FIGURE_MAX: f64 = 1e9;

/// A run of guest pages that hold data: first page and count.
pub type Extent = (u64, u64);

/// What the source says on the control channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "m", rename_all = "kebab-case")]
pub enum ToDestination {
    /// First message of a connection set.
    Begin {
        /// The version of everything that follows: one of [`MIGRATION`].
        version: u32,
        /// Its number: 0 at first, one more each time the channels are made anew.
        #[serde(rename = "epoch")]
        set: u16,
        /// Data channels that connect at once; further ones may join and leave at any time before the last barrier.
        streams: u32,
        /// Guest memory, pages of 4 KiB; must equal the destination's own figure.
        pages: u64,
        /// Channels for changes of disks, which connect at once, too; none where no disk is copied.
        #[serde(default, skip_serializing_if = "is_zero")]
        changes: u32,
    },
    /// Where guest memory holds data, in the order in which it will be sent.
    Extents {
        /// Runs of pages.
        extents: Vec<Extent>,
    },
    /// No more extents follow.
    ExtentsEnd,
    /// Everything sent before must be applied before anything sent after.
    Barrier {
        /// Number of the iteration that ends here; 0 is the first one.
        iteration: u32,
        /// Records sent on each data channel that this set has had, by index; final records do not count.
        sent: Vec<u64>,
    },
    /// (VMs with UEFI) A piece of the VM's variables, as the source has them in a file. The whole comes when a set begins, what
    /// has changed once the guest is stopped.
    Variables {
        /// Where in the file it belongs, bytes.
        at: u64,
        #[serde(with = "godwit_types::base64_bytes")]
        bytes: Vec<u8>,
        /// Whether no other piece follows: what came is made durable.
        last: bool,
    },
    /// What a disk consists of that has snapshots, as its source has it frozen: all below its top follows on the channels of disks, and is written by nobody
    /// any more. Only from version [`MIGRATION_WITH_SNAPSHOTS`] on.
    Layers {
        /// Its place in the VM.
        disk: u8,
        /// The description that lies beside the disk's own image, at most [`LAYERS_LEN_MAX`] bytes.
        images: String,
    },
    /// All of that has been carried out: changes of its top follow.
    LayersSent {
        /// Its place in the VM.
        disk: u8,
    },
    /// The guest at the source has been stopped: from here on time counts.
    Stopped,
    /// Beside it: the disks that the source has mirrored, all of them whole with what is under way.
    Mirrored {
        /// Each disk's place in the VM, ascending, and its size, bytes.
        disks: Vec<(u8, u64)>,
    },
    /// The guest's addresses, as heard on its network cards: one list per card, bounded by
    /// [`addresses`](crate::addresses).
    Addresses {
        /// One list of addresses for each of the guest's cards, in their order.
        cards: Vec<Vec<IpAddr>>,
    },
    /// All of the device state has been sent. Whether its save was a success follows.
    DeviceStateWhole,
    /// The device state was saved well.
    DeviceStateEnd {
        /// Length of the whole device state.
        bytes: u64,
        /// The generation that this attempt at a switchover would give.
        attempt: Generation,
    },
    /// What the guest wrote to its serial console, the newest part. Behind the device state, where nobody waits for it. Only
    /// from version [`MIGRATION_WITH_CONSOLE`] on.
    Console { kept: ConsoleKept },
    /// The migration is over; the guest stays at the source. Said by sources of the version before: an abort among the
    /// messages of `Peer` says as much, with its reason.
    Cancel {
        /// One sentence for people, at most [`REASON_LEN_MAX`] bytes.
        reason: String,
        /// A person or a deadline wanted it; without it the source has failed.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        cancelled: bool,
    },
    /// About who may run the VM.
    Peer {
        /// A question, a gift or an answer of the ownership core.
        message: PeerMessage,
    },
    /// Says nothing: opens the control channel's window on a far link, so that device state later leaves at once.
    Warm {
        /// Filling, at most [`WARM_LEN_MAX`].
        filling: String,
    },
    /// Keeps silence meaningful; answered by `Pong`.
    Ping {
        /// Comes back in the `Pong` that answers.
        nonce: u64,
    },
}

impl ToDestination {
    /// Whether it means the same before and behind a barrier.
    pub fn is_urgent(&self) -> bool {
        matches!(
            self,
            Self::Warm { .. } | Self::Ping { .. } | Self::Peer { .. } | Self::Cancel { .. }
        )
    }

    /// Whether the source takes back what it offered, since it lets its guest go on.
    pub fn is_withdrawal(&self) -> bool {
        matches!(
            self,
            Self::Peer {
                message: PeerMessage::Withdrawn { .. }
            }
        )
    }
}

/// What the destination says on the control channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "m", rename_all = "kebab-case")]
pub enum ToSource {
    /// The set may begin: older channels are dead and what they carried is applied or dropped.
    Begun {
        /// The set of channels that may begin: that of the `Begin` which is answered.
        #[serde(rename = "epoch")]
        set: u16,
    },
    /// All of the guest's memory is allocated, as was asked for; until then nothing is sent.
    Prepared {
        /// How long that took, s.
        seconds: f64,
    },
    /// There is a place for what lies below the top of this disk.
    LayersBegun {
        /// Its place in the VM.
        disk: u8,
    },
    /// All of it is durable there, and a top lies over it.
    LayersReady {
        /// Its place in the VM.
        disk: u8,
    },
    /// Cumulative: so many records of the channel are applied.
    Applied {
        /// Index of the channel in this set.
        channel: u32,
        /// How many records of it are applied since it connected.
        records: u64,
    },
    /// Cumulative: so many records of a channel for changes of disks are carried out.
    ChangesApplied {
        /// Index of the channel among those in this set.
        channel: u32,
        /// How many records of it are carried out since it connected.
        records: u64,
        /// How long it has written to disks since then, ms; absent from destinations that do not tell.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        writing_ms: Option<u64>,
    },
    /// The barrier is reached.
    BarrierDone {
        /// Number of the iteration that the barrier ended.
        iteration: u32,
        /// Share of the iteration that the destination waited for memory, 0 to 1.
        memory_wait: f32,
        /// Share of the iteration that its channel threads were busy (not waiting for the network), 0 to 1.
        busy: f32,
    },
    /// Everything is applied, verified and loaded; QEMU is paused.
    Loaded {
        /// How long loading took, ms.
        load_ms: f64,
    },
    /// About who may run the VM.
    Peer {
        /// A question or an answer of the ownership core.
        message: PeerMessage,
    },
    /// The guest runs there.
    Resumed {
        /// From the permit's arrival to the guest running, ms.
        resume_ms: f64,
        /// CPU seconds of the VM process in this migration.
        cpu_s: f64,
    },
    /// The destination gives up; nothing there will ever run. Said to a source that comes too late, and by destinations of the
    /// version before: a failure among the messages of `Peer` says as much.
    Failed {
        /// One sentence for people, at most [`REASON_LEN_MAX`] bytes.
        reason: String,
    },
    /// Says that this side is alive and reads.
    Pong {
        /// That of the `Ping` which is answered.
        nonce: u64,
    },
}

/// Why a control message was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// Not JSON of the expected form.
    #[error("the peer sent a control message that cannot be read: {0}")]
    Unreadable(String),
    /// A number out of its bounds.
    #[error("the peer sent a control message with {0} out of bounds")]
    OutOfBounds(&'static str),
    /// The peer speaks a version that this build does not.
    #[error(
        "the peer speaks migration protocol {theirs}, this host speaks {MIGRATION}: install the same version of Godwit on both hosts"
    )]
    Version {
        /// That of the peer's `Begin`.
        theirs: u32,
    },
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Cuts a reason to what may cross the wire, on one line.
fn clip_reason(reason: &str) -> String {
    Reason::clipped(reason).into()
}

/// A peer's reason as people may be shown it.
fn shown(reason: &mut String) -> Result<(), ProtocolError> {
    if reason.len() > REASON_LEN_MAX {
        return Err(ProtocolError::OutOfBounds("the length of the reason"));
    }
    *reason = clip_reason(reason);
    Ok(())
}

/// Writes a control message.
pub fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    // Our own enums of numbers and texts: serialising them to memory has no way to fail.
    serde_json::to_vec(message).unwrap_or_default()
}

/// Reads a message from the source; `pages` is the guest's memory.
pub fn decode_to_destination(bytes: &[u8], pages: u64) -> Result<ToDestination, ProtocolError> {
    let mut message: ToDestination = parse(bytes)?;
    match &mut message {
        ToDestination::Begin { version, .. } if !MIGRATION.contains(*version) => {
            return Err(ProtocolError::Version { theirs: *version });
        }
        ToDestination::Begin { streams, .. } if *streams == 0 || *streams > STREAMS_MAX => {
            return Err(ProtocolError::OutOfBounds("the number of streams"));
        }
        ToDestination::Begin { changes, .. } if *changes > CHANGE_CHANNELS_MAX => {
            return Err(ProtocolError::OutOfBounds(
                "the number of channels for disks",
            ));
        }
        ToDestination::Begin { pages: theirs, .. } if *theirs != pages => {
            return Err(ProtocolError::OutOfBounds("the size of guest memory"));
        }
        ToDestination::Extents { extents } => check_extents(extents, pages)?,
        ToDestination::Barrier { sent, .. } if sent.len() > STREAMS_MAX as usize => {
            return Err(ProtocolError::OutOfBounds("the number of channels"));
        }
        ToDestination::Addresses { cards } => addresses::check(cards)?,
        ToDestination::Layers { disk, .. } | ToDestination::LayersSent { disk }
            if usize::from(*disk) >= DISKS_MAX =>
        {
            return Err(ProtocolError::OutOfBounds("the place of a disk"));
        }
        ToDestination::Layers { images, .. } if images.len() > LAYERS_LEN_MAX => {
            return Err(ProtocolError::OutOfBounds("the images of a disk"));
        }
        ToDestination::Mirrored { disks } if disks.len() > DISKS_MAX => {
            return Err(ProtocolError::OutOfBounds("the number of disks"));
        }
        ToDestination::Variables { at, bytes, .. }
            if bytes.len() > VARIABLES_LEN_MAX || *at > VARIABLES_WHOLE_MAX =>
        {
            return Err(ProtocolError::OutOfBounds("the UEFI variables"));
        }
        ToDestination::Warm { filling } if filling.len() > WARM_LEN_MAX => {
            return Err(ProtocolError::OutOfBounds("the filling"));
        }
        ToDestination::Console { kept } if !kept.is_within_bounds() => {
            return Err(ProtocolError::OutOfBounds("the text of the console"));
        }
        ToDestination::Cancel { reason, .. } => shown(reason)?,
        _ => {}
    }
    Ok(message)
}

/// Reads a message from the destination; `streams` is the number of data channels.
pub fn decode_to_source(bytes: &[u8], streams: u32) -> Result<ToSource, ProtocolError> {
    let mut message: ToSource = parse(bytes)?;
    match &mut message {
        ToSource::Applied { channel, .. } if *channel >= streams => {
            Err(ProtocolError::OutOfBounds("the channel"))
        }
        ToSource::ChangesApplied { channel, .. } if *channel >= CHANGE_CHANNELS_MAX => {
            Err(ProtocolError::OutOfBounds("the channel"))
        }
        ToSource::Failed { reason } => {
            shown(reason)?;
            Ok(message)
        }
        ToSource::BarrierDone {
            memory_wait, busy, ..
        } if !are_figures(&[f64::from(*memory_wait), f64::from(*busy)]) => {
            Err(ProtocolError::OutOfBounds("the figures of an iteration"))
        }
        ToSource::Prepared { seconds } if !are_figures(&[*seconds]) => {
            Err(ProtocolError::OutOfBounds("the time of preparing"))
        }
        ToSource::Loaded { load_ms } if !are_figures(&[*load_ms]) => {
            Err(ProtocolError::OutOfBounds("the time of loading"))
        }
        ToSource::Resumed { resume_ms, cpu_s } if !are_figures(&[*resume_ms, *cpu_s]) => {
            Err(ProtocolError::OutOfBounds("the figures of the resume"))
        }
        _ => Ok(message),
    }
}

/// Whether these may stand in a report. A number too large for `f32` reads as infinite, which JSON cannot write.
fn are_figures(values: &[f64]) -> bool {
    values.iter().all(|v| (0.0..=FIGURE_MAX).contains(v))
}

fn parse<'a, M: Deserialize<'a>>(bytes: &'a [u8]) -> Result<M, ProtocolError> {
    serde_json::from_slice(bytes).map_err(|error| ProtocolError::Unreadable(error.to_string()))
}

fn check_extents(extents: &[Extent], pages: u64) -> Result<(), ProtocolError> {
    let fits = |(first, count): &Extent| {
        *count > 0 && first.checked_add(*count).is_some_and(|end| end <= pages)
    };
    if extents.len() <= EXTENTS_PER_MESSAGE && extents.iter().all(fits) {
        return Ok(());
    }
    Err(ProtocolError::OutOfBounds("the extents of guest memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_round_trip() {
        let message = ToDestination::Barrier {
            iteration: 3,
            sent: vec![1, 2],
        };
        assert_eq!(decode_to_destination(&encode(&message), 10), Ok(message));
        let disks = vec![(0, 512), (3, 1 << 40)];
        let message = ToDestination::Mirrored { disks };
        assert_eq!(decode_to_destination(&encode(&message), 10), Ok(message));
        let disks = vec![(0, 512); DISKS_MAX + 1];
        let message = encode(&ToDestination::Mirrored { disks });
        assert!(decode_to_destination(&message, 10).is_err());
        let answer = ToSource::Applied {
            channel: 1,
            records: 9,
        };
        assert_eq!(decode_to_source(&encode(&answer), 2), Ok(answer));
    }

    #[test]
    fn a_cancel_that_does_not_say_whose_wish_it_was_is_a_failure() {
        let told = |cancelled| ToDestination::Cancel {
            reason: "why".into(),
            cancelled,
        };
        let bare = br#"{"m":"cancel","reason":"why"}"#;
        assert_eq!(decode_to_destination(bare, 10), Ok(told(false)));
        assert_eq!(encode(&told(false)), bare);
        let wished = encode(&told(true));
        assert_eq!(decode_to_destination(&wished, 10), Ok(told(true)));
    }

    #[test]
    fn what_a_disk_consists_of_is_bounded() {
        let layers = |disk, len| ToDestination::Layers {
            disk,
            images: "x".repeat(len),
        };
        let decode = |disk, len| decode_to_destination(&encode(&layers(disk, len)), 10);
        assert_eq!(decode(0, LAYERS_LEN_MAX), Ok(layers(0, LAYERS_LEN_MAX)));
        assert!(decode(0, LAYERS_LEN_MAX + 1).is_err());
        assert!(decode(DISKS_MAX as u8, 1).is_err());
        let sent = encode(&ToDestination::LayersSent { disk: 200 });
        assert!(decode_to_destination(&sent, 10).is_err());
    }

    #[test]
    fn extents_outside_of_memory_are_refused() {
        for extents in [vec![(0, 11)], vec![(u64::MAX, 2)], vec![(3, 0)]] {
            let bytes = encode(&ToDestination::Extents { extents });
            assert!(decode_to_destination(&bytes, 10).is_err());
        }
    }

    #[test]
    fn another_version_is_named() {
        let begin = ToDestination::Begin {
            version: 9,
            set: 0,
            streams: 1,
            pages: 10,
            changes: 0,
        };
        let error = decode_to_destination(&encode(&begin), 10).unwrap_err();
        assert!(error.to_string().contains("protocol 9"), "{error}");
    }

    #[test]
    fn stream_and_channel_numbers_are_bounded() {
        let begin = |streams| ToDestination::Begin {
            version: PROTOCOL_VERSION,
            set: 0,
            streams,
            pages: 10,
            changes: 0,
        };
        assert!(decode_to_destination(&encode(&begin(0)), 10).is_err());
        assert!(decode_to_destination(&encode(&begin(65)), 10).is_err());
        let applied = ToSource::Applied {
            channel: 2,
            records: 0,
        };
        assert!(decode_to_source(&encode(&applied), 2).is_err());
    }

    #[test]
    fn a_filling_is_bounded() {
        let warm = |len| ToDestination::Warm {
            filling: "x".repeat(len),
        };
        let decode = |len| decode_to_destination(&encode(&warm(len)), 10);
        assert_eq!(decode(WARM_LEN_MAX), Ok(warm(WARM_LEN_MAX)));
        assert!(decode(WARM_LEN_MAX + 1).is_err());
    }

    #[test]
    fn figures_that_no_report_can_hold_are_refused() {
        for text in [
            r#"{"m":"resumed","resume_ms":-1,"cpu_s":0}"#,
            r#"{"m":"loaded","load_ms":1e300}"#,
            r#"{"m":"prepared","seconds":-0.5}"#,
            r#"{"m":"barrier-done","iteration":1,"memory_wait":1e39,"busy":0}"#,
        ] {
            let refused = decode_to_source(text.as_bytes(), 2);
            assert!(
                matches!(refused, Err(ProtocolError::OutOfBounds(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn control_characters_of_a_peer_s_reason_are_not_shown() {
        let failed = br#"{"m":"failed","reason":"its disk\u001b[2J\nis full"}"#;
        let reason = "its disk [2J is full".to_owned();
        assert_eq!(
            decode_to_source(failed, 1),
            Ok(ToSource::Failed {
                reason: reason.clone()
            })
        );
        let cancel = br#"{"m":"cancel","reason":"its disk\u001b[2J\nis full"}"#;
        let cancelled = false;
        assert_eq!(
            decode_to_destination(cancel, 1),
            Ok(ToDestination::Cancel { reason, cancelled })
        );
    }

    #[test]
    fn a_reason_is_cut_at_a_character() {
        let long = "\u{e4}".repeat(400);
        assert!(clip_reason(&long).len() <= REASON_LEN_MAX);
    }
}
