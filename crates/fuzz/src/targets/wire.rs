//! The record protocol: crate `wire` has the judges, here are the seeds.
//!
//! Owns nothing. The first byte of an input chooses the mode, see `godwit_wire::fuzz`.

use crate::outcome::{self, Outcome};
use godwit_wire::fuzz::{self, Verdict};
use godwit_wire::{ChangeKind, DiskChange, PageRun, PageRuns, ZeroPages};

fn judge(verdict: &Verdict) -> Outcome {
    let refusal = verdict
        .refusal
        .as_ref()
        .map(outcome::of)
        .unwrap_or_default();
    refusal.wrapping_add(verdict.accepted as u64)
}

pub fn record(input: &[u8]) -> Outcome {
    judge(&fuzz::record(input))
}

pub fn handshake(input: &[u8]) -> Outcome {
    judge(&fuzz::handshake(input))
}

pub fn descriptor(input: &[u8]) -> Outcome {
    judge(&fuzz::descriptor(input))
}

/// Valid conversations in both ciphers on two channels, then one act of each kind upon them.
pub fn record_seeds() -> Vec<Vec<u8>> {
    let conversation = [3, 0, 0, 7, 1, 8, 2, 5, 9, 3, 3, 1, 1, 4];
    let acts: [&[u8]; 7] = [
        &[],
        &[0, 0, 0, 1, 0, 0, 0, 0],
        &[1, 0, 0, 1, 0, 0, 0, 0],
        &[2, 0, 0, 0, 0, 0, 0, 0],
        &[3, 1, 0, 0, 0, 20, 0, 1],
        &[4, 2, 0, 0, 0, 9, 0, 0],
        &[5, 0, 0, 0, 0, 3, 0, 8],
    ];
    let modes = [2, 3, 6, 7];
    let all = modes
        .iter()
        .flat_map(|mode| acts.iter().map(move |act| (mode, act)));
    all.map(|(mode, act)| [&[*mode][..], &conversation, act].concat())
        .collect()
}

/// Each stage: unaltered, altered at its head, altered in its proof.
pub fn handshake_seeds() -> Vec<Vec<u8>> {
    let changes: [&[u8]; 3] = [&[1], &[1, 0, 0, 0, 1], &[1, 0, 30, 0, 128]];
    let all = (0..3).flat_map(|stage| changes.map(|change| [&[stage, 0][..], change].concat()));
    all.collect()
}

pub fn descriptor_seeds() -> Vec<Vec<u8>> {
    let (mut list, mut zeros) = (vec![0], vec![0]);
    let mut runs = PageRuns::new();
    let fits =
        [(0, 3), (9, 1), (4000, 96)].map(|(first, count)| runs.push(PageRun { first, count }));
    debug_assert!(fits.iter().all(Result::is_ok));
    runs.encode(&mut list);
    let mut bitmap = ZeroPages::new();
    for page in [5, 6, 7, 1000] {
        let _ = bitmap.insert(page);
    }
    bitmap.encode(&mut zeros);
    let change = DiskChange {
        disk: 1,
        kind: ChangeKind::Zeroed,
        awaited: true,
        range: 512..4096,
        number: 5,
        below: 4,
    };
    let change = [&[0][..], &change.encode()].concat();
    vec![
        list,
        zeros,
        change,
        vec![1, 0, 5, 4, 0, 9, 2],
        vec![1, 2, 5, 16, 255, 1],
    ]
}
