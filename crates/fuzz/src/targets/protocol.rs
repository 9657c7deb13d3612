//! The control protocol of a migration, both directions.
//!
//! Owns nothing. Beyond not panicking: what is accepted is within the bounds that the crate promises, and says the
//! same after another round through the encoder.

use crate::outcome::{self, Outcome};
use godwit_migrate::protocol::{
    CHANGE_CHANNELS_MAX, EXTENTS_PER_MESSAGE, FIGURE_MAX, LAYERS_LEN_MAX, PROTOCOL_VERSION,
    REASON_LEN_MAX, STREAMS_MAX, ToDestination, ToSource, WARM_LEN_MAX, decode_to_destination,
    decode_to_source, encode,
};
use godwit_ownership::PeerMessage;
use godwit_types::console::CONSOLE_KEPT_MAX;
use godwit_types::version::MIGRATION;
use godwit_types::vm::DISKS_MAX;
use godwit_types::{Generation, MigrationId};

const PAGES: u64 = 4096;
const STREAMS: u32 = 4;

pub fn to_destination(input: &[u8]) -> Outcome {
    let judged = decode_to_destination(input, PAGES);
    if let Ok(message) = &judged {
        check_to_destination(message);
        let again = decode_to_destination(&encode(message), PAGES);
        assert_eq!(again.as_ref(), Ok(message), "a message changed on the way");
    }
    outcome::of_result(&judged, |message| outcome::of_variant(message))
}

fn check_to_destination(message: &ToDestination) {
    match message {
        ToDestination::Begin {
            version,
            streams,
            pages,
            changes,
            ..
        } => {
            assert!(MIGRATION.contains(*version), "a foreign version");
            assert!((1..=STREAMS_MAX).contains(streams), "{streams} streams");
            assert_eq!(*pages, PAGES, "another guest's memory");
            assert!(*changes <= CHANGE_CHANNELS_MAX, "too many channels");
        }
        ToDestination::Extents { extents } => {
            assert!(extents.len() <= EXTENTS_PER_MESSAGE, "too many extents");
            let inside = |(first, count): &(u64, u64)| {
                *count > 0 && first.checked_add(*count).is_some_and(|end| end <= PAGES)
            };
            assert!(extents.iter().all(inside), "an extent outside of memory");
        }
        ToDestination::Barrier { sent, .. } => {
            assert!(sent.len() <= STREAMS_MAX as usize, "too many channels");
        }
        ToDestination::Console { kept } => {
            assert!(kept.bytes.len() <= CONSOLE_KEPT_MAX, "an endless console");
            assert!(kept.end >= kept.bytes.len() as u64, "more than was written");
        }
        ToDestination::Layers { disk, images } => {
            assert!(usize::from(*disk) < DISKS_MAX, "disk {disk}");
            assert!(images.len() <= LAYERS_LEN_MAX, "endless images");
        }
        ToDestination::Warm { filling } => {
            assert!(filling.len() <= WARM_LEN_MAX, "an endless filling");
        }
        ToDestination::Cancel { reason, .. } => {
            assert!(reason.len() <= REASON_LEN_MAX, "an endless reason");
        }
        _ => {}
    }
}

pub fn to_source(input: &[u8]) -> Outcome {
    let judged = decode_to_source(input, STREAMS);
    if let Ok(message) = &judged {
        check_to_source(message);
        let again = decode_to_source(&encode(message), STREAMS);
        assert!(
            again.is_ok(),
            "a message that was accepted is refused: {again:?}"
        );
    }
    outcome::of_result(&judged, |message| outcome::of_variant(message))
}

fn check_to_source(message: &ToSource) {
    let figure = |value: f64| assert!((0.0..=FIGURE_MAX).contains(&value), "figure {value}");
    match message {
        ToSource::Applied { channel, .. } => assert!(*channel < STREAMS, "channel {channel}"),
        ToSource::BarrierDone {
            memory_wait, busy, ..
        } => {
            figure(f64::from(*memory_wait));
            figure(f64::from(*busy));
        }
        ToSource::Loaded { load_ms } => figure(*load_ms),
        ToSource::Resumed { resume_ms, cpu_s } => {
            figure(*resume_ms);
            figure(*cpu_s);
        }
        ToSource::Failed { reason } => assert!(reason.len() <= REASON_LEN_MAX, "an endless reason"),
        _ => {}
    }
}

fn peer() -> Option<PeerMessage> {
    Some(PeerMessage::Permit {
        migration: MigrationId::new("m1").ok()?,
        generation: Generation(2),
    })
}

pub fn to_destination_seeds() -> Vec<Vec<u8>> {
    let mut messages = vec![
        ToDestination::Begin {
            version: PROTOCOL_VERSION,
            set: 0,
            streams: STREAMS,
            pages: PAGES,
            changes: 8,
        },
        ToDestination::Extents {
            extents: vec![(0, 16), (100, 1), (PAGES - 1, 1)],
        },
        ToDestination::Mirrored {
            disks: vec![(0, 1 << 20), (2, 512)],
        },
        ToDestination::Layers {
            disk: 1,
            images: "{}".into(),
        },
        ToDestination::LayersSent { disk: 1 },
        ToDestination::ExtentsEnd,
        ToDestination::Barrier {
            iteration: 1,
            sent: vec![10, 11, 12, 0],
        },
        ToDestination::Stopped,
        ToDestination::DeviceStateWhole,
        ToDestination::DeviceStateEnd {
            bytes: 200_000,
            attempt: Generation(2),
        },
        ToDestination::Cancel {
            reason: "cancelled by its user".into(),
            cancelled: true,
        },
        ToDestination::Warm {
            filling: "w".repeat(100),
        },
        ToDestination::Ping { nonce: 7 },
    ];
    messages.extend(peer().map(|message| ToDestination::Peer { message }));
    messages.iter().map(encode).collect()
}

pub fn to_source_seeds() -> Vec<Vec<u8>> {
    let mut messages = vec![
        ToSource::Begun { set: 0 },
        ToSource::Applied {
            channel: 1,
            records: 900,
        },
        ToSource::BarrierDone {
            iteration: 1,
            memory_wait: 0.25,
            busy: 0.5,
        },
        ToSource::Loaded { load_ms: 12.5 },
        ToSource::Resumed {
            resume_ms: 1.5,
            cpu_s: 3.25,
        },
        ToSource::Failed {
            reason: "out of memory".into(),
        },
        ToSource::Pong { nonce: 7 },
    ];
    messages.extend(peer().map(|message| ToSource::Peer { message }));
    messages.iter().map(encode).collect()
}
