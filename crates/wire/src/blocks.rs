//! What a record says of a change of a disk: which disk, which bytes, what becomes of them, and its number.
//!
//! Owns nothing. Refuses on decoding: another length, a disk beyond the bound, a kind of change that is not known, an empty
//! range (but of a flush, which has none), one that ends past all numbers, bytes that are not whole sectors, and more of them
//! than a record holds.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | which disk of the VM, from 0; with 128 added, what lies below its top |
//! | 1 | 1: the bytes follow in the next record; 2: they are zero; 3: none changes, those of earlier changes become durable |
//! | 2 | 1: the guest waits for it, so that the source is to hear of it at once; else 0 |
//! | 3..8 | zero |
//! | 8..16 | first byte on the disk |
//! | 16..24 | how many bytes |
//! | 24..32 | number of the change |
//! | 32..40 | every change with a number below this one has been applied |

use crate::{PAYLOAD_LEN_MAX, WireError};
use godwit_types::vm::DISKS_MAX;
use std::ops::Range;

/// Length of a change on the wire, in bytes.
pub const CHANGE_LEN: usize = 40;
/// Changes begin and end at multiples of so many bytes.
pub const SECTOR: u64 = 512;

const WRITTEN: u8 = 1;
const ZEROED: u8 = 2;
const FLUSHED: u8 = 3;

/// What becomes of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// They follow in the next record.
    Written,
    /// From now on they read as zero, and nothing follows.
    Zeroed,
    /// There are none, and nothing follows: what was carried out before on this disk becomes durable.
    Flushed,
}

/// Beside the number of a disk with snapshots: the files below its top, one after the other.
pub const BELOW: u8 = 0x80;

/// Bytes of one of the VM's disks that are now others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskChange {
    /// Which of the VM's disks, from 0; with [`BELOW`] what lies below its top.
    pub disk: u8,
    pub kind: ChangeKind,
    /// Whether the source is to hear at once that it was carried out, since the guest waits for it.
    pub awaited: bool,
    /// Bytes of the disk.
    pub range: Range<u64>,
    /// Of two changes of the same bytes the one with the higher number is the later.
    pub number: u64,
    /// Every change with a lower number has been applied.
    pub below: u64,
}

impl DiskChange {
    /// How many bytes it changes.
    pub fn len(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    /// Whether it changes none, as a flush alone does.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Length of the record that must follow, if one must.
    pub fn payload_len(&self) -> Option<usize> {
        match self.kind {
            ChangeKind::Written => usize::try_from(self.len()).ok(),
            ChangeKind::Zeroed | ChangeKind::Flushed => None,
        }
    }

    pub fn encode(&self) -> [u8; CHANGE_LEN] {
        let mut bytes = [0; CHANGE_LEN];
        let kind = match self.kind {
            ChangeKind::Written => WRITTEN,
            ChangeKind::Zeroed => ZEROED,
            ChangeKind::Flushed => FLUSHED,
        };
        let (head, numbers) = bytes.split_at_mut(8);
        let [disk, what, awaited, ..] = head else {
            return bytes;
        };
        (*disk, *what, *awaited) = (self.disk, kind, u8::from(self.awaited));
        let values = [self.range.start, self.len(), self.number, self.below];
        for (field, value) in numbers.chunks_exact_mut(8).zip(values) {
            field.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads a change; whether its disk is so large is for the caller to see.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let refuse = |what, offset| Err(WireError::DiskChange { what, offset });
        let ([disk, kind, awaited, rest @ ..], Ok(bytes)) =
            (bytes, <&[u8; CHANGE_LEN]>::try_from(bytes))
        else {
            return refuse("it has another length", bytes.len());
        };
        if usize::from(*disk & !BELOW) >= DISKS_MAX {
            return refuse("no VM has so many disks", 0);
        }
        let kind = match *kind {
            WRITTEN => ChangeKind::Written,
            ZEROED => ChangeKind::Zeroed,
            FLUSHED => ChangeKind::Flushed,
            _ => return refuse("an unknown kind", 1),
        };
        if *awaited > 1 || rest.iter().take(5).any(|byte| *byte != 0) {
            return refuse("what is kept free is used", 2);
        }
        let mut numbers = [0; 4];
        let fields = bytes.split_at(8).1.as_chunks::<8>().0;
        for (number, field) in numbers.iter_mut().zip(fields) {
            *number = u64::from_le_bytes(*field);
        }
        let [start, len, number, below] = numbers;
        let is_flush = kind == ChangeKind::Flushed;
        if is_flush && (start, len) != (0, 0) {
            return refuse("a flush with a range", 8);
        }
        let Some(end) = start.checked_add(len).filter(|_| len > 0 || is_flush) else {
            return refuse("an empty or endless range", 8);
        };
        if !start.is_multiple_of(SECTOR) || !len.is_multiple_of(SECTOR) {
            return refuse("a range that is not whole sectors", 8);
        }
        if kind == ChangeKind::Written && len > PAYLOAD_LEN_MAX as u64 {
            return refuse("more bytes than a record holds", 16);
        }
        if below > number {
            return refuse("it is called applied already", 32);
        }
        Ok(Self {
            disk: *disk,
            kind,
            awaited: *awaited == 1,
            range: start..end,
            number,
            below,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change() -> DiskChange {
        DiskChange {
            disk: 3,
            kind: ChangeKind::Written,
            awaited: false,
            range: 512..2048,
            number: 9,
            below: 7,
        }
    }

    #[test]
    fn a_change_survives_the_round_trip() {
        let zeroed = DiskChange {
            kind: ChangeKind::Zeroed,
            range: 0..1 << 40,
            ..change()
        };
        let flushed = DiskChange {
            kind: ChangeKind::Flushed,
            awaited: true,
            range: 0..0,
            ..change()
        };
        for one in [change(), zeroed, flushed] {
            assert_eq!(DiskChange::decode(&one.encode()), Ok(one));
        }
        assert_eq!(change().payload_len(), Some(1536));
    }

    #[test]
    fn what_no_source_sends_is_refused() {
        let altered = |at: usize, value: u8| {
            let mut bytes = change().encode();
            bytes[at] = value;
            bytes
        };
        let cases = [
            (altered(0, 64), "so many disks"),
            (altered(0, BELOW | 64), "so many disks"),
            (altered(1, 0), "unknown kind"),
            (altered(1, 3), "flush with a range"),
            (altered(1, 4), "unknown kind"),
            (altered(2, 2), "kept free"),
            (altered(7, 1), "kept free"),
            (altered(8, 1), "whole sectors"),
            (altered(16, 1), "whole sectors"),
            (altered(18, 64), "than a record holds"),
            (altered(32, 10), "applied already"),
        ];
        for (bytes, why) in cases {
            let error = DiskChange::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
        let mut empty = change().encode();
        empty[16..24].fill(0);
        let mut endless = change().encode();
        endless[8..16].copy_from_slice(&(u64::MAX - 511).to_le_bytes());
        for bytes in [&empty[..], &endless, &[], &empty[1..]] {
            assert!(DiskChange::decode(bytes).is_err());
        }
    }
}
