//! What the files of a delta disk say, which may come from strangers.
//!
//! Owns nothing.

use crate::outcome::{self, Outcome};
use godwit_delta::{
    BLOCK, Descriptor, Grain, Id, Kind, LABEL_AT, Label, Layout, Parent, States, Use, header,
    table, words_for,
};
use std::sync::atomic::AtomicU64;

/// Grains of the disk whose tables are read, of which the last one is no whole one.
const DISK: u64 = (700 << 12) + 512;
const SECTOR: usize = 512;

/// The sectors that are read, one after the other: both headers, and the label.
pub fn head(input: &[u8]) -> Outcome {
    let mut head = vec![0; header::HEAD];
    let label = LABEL_AT as usize;
    let parts = [0..2 * SECTOR, label..label + SECTOR];
    let mut rest = input;
    for part in parts {
        let (now, later) = rest.split_at(rest.len().min(part.len()));
        head[part.start..part.start + now.len()].copy_from_slice(now);
        rest = later;
    }
    match header::decode(&head) {
        Err(why) => outcome::of(why.to_string()),
        Ok((layout, label)) => {
            assert!(
                layout.tables().end <= layout.data_at(),
                "tables in the data"
            );
            assert!(layout.directory().end <= layout.tables().start);
            let again = header::encode(&layout, &label);
            assert_eq!(again, head, "two ways to say the same");
            let (id, said) = (label.id, Label::decode(&label.encode()));
            assert_eq!(said.map(|said| said.id), Ok(id));
            outcome::of("read")
        }
    }
}

fn label_of(in_use: Use) -> Label {
    Label {
        id: Id([3; 16]),
        in_use,
    }
}

pub fn head_seeds() -> Vec<Vec<u8>> {
    let uses = [Use::Closed, Use::Frozen, Use::Open { boot: Id([9; 16]) }];
    let of = |bytes: u64, in_use| {
        let layout = Layout::of(bytes).expect("a size that a disk may have");
        let mut head = header::encode(&layout, &label_of(in_use));
        head.drain(2 * SECTOR..LABEL_AT as usize);
        head
    };
    let sizes = [512, 20 << 30, 64 << 40];
    sizes
        .into_iter()
        .zip(uses)
        .map(|(bytes, in_use)| of(bytes, in_use))
        .collect()
}

pub fn block(input: &[u8]) -> Outcome {
    let layout = Layout::of(DISK).expect("a size that a disk may have");
    let (first, rest) = input.split_first().unwrap_or((&0, &[]));
    let number = u64::from(first % 2);
    let mut bytes = vec![0; BLOCK as usize];
    let length = rest.len().min(bytes.len());
    bytes[..length].copy_from_slice(&rest[..length]);
    match table::decode(&layout, number, &bytes) {
        Err(why) => outcome::of(why.to_string()),
        Ok(words) => {
            assert_eq!(
                table::encode(number, &words),
                bytes,
                "two ways to say the same"
            );
            let map: Box<[AtomicU64]> =
                (0..words_for(&layout)).map(|_| AtomicU64::new(0)).collect();
            let states = States::over(map, &layout).expect("as many as are needed");
            states.load(number, &words);
            let (state, end) = states.run(&(number * 512..layout.grains()));
            assert!(end > number * 512 && end <= layout.grains());
            outcome::of(match state {
                Grain::Absent => "absent",
                Grain::Zero => "zero",
                Grain::Present => "present",
            })
        }
    }
}

pub fn block_seeds() -> Vec<Vec<u8>> {
    let layout = Layout::of(DISK).expect("a size that a disk may have");
    let map: Box<[AtomicU64]> = (0..words_for(&layout)).map(|_| AtomicU64::new(0)).collect();
    let states = States::over(map, &layout).expect("as many as are needed");
    states.set(0..5, Grain::Present);
    states.set(7..9, Grain::Zero);
    states.set(512..u64::MAX, Grain::Present);
    let of = |number: u8| {
        let mut seed = vec![number];
        seed.extend(table::encode(
            u64::from(number),
            &states.block(u64::from(number)),
        ));
        seed
    };
    vec![of(0), of(1), vec![0; 40]]
}

pub fn text(input: &[u8]) -> Outcome {
    let read = Descriptor::decode(input);
    if let Ok(descriptor) = &read {
        assert!(!descriptor.extent.contains('/') && descriptor.extent != "..");
        let again = descriptor.encode().expect("it can be written again");
        assert_eq!(
            Descriptor::decode(again.as_bytes()).as_ref(),
            Ok(descriptor)
        );
    }
    match read {
        Ok(descriptor) => outcome::of("read") + u64::from(descriptor.parent.is_some()),
        Err(why) => outcome::of(why.to_string()),
    }
}

pub fn text_seeds() -> Vec<Vec<u8>> {
    let parent = Parent {
        cid: 7,
        hint: "../base/root.vmdk".to_owned(),
    };
    let of = |kind, parent| Descriptor {
        kind,
        cid: 0xab,
        parent,
        bytes: 20 << 30,
        extent: "root-sesparse.vmdk".to_owned(),
    };
    let all = [of(Kind::Delta, Some(parent)), of(Kind::Raw, None)];
    all.iter()
        .filter_map(|one| one.encode().ok())
        .map(String::into_bytes)
        .collect()
}
