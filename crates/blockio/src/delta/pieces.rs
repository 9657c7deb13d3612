//! What of a frozen delta is brought into another image together.
//!
//! Neighbours with little between them are read at once, since a request costs more than a few bytes that nobody needs, of which most are
//! holes; each of them is written by itself. Pure. Owns nothing beyond where it is. Refuses nothing.

use std::ops::Range;

use godwit_delta::Move;

use crate::filters::REGION;

/// Most bytes of a disk from where the first of several neighbours begins to where the last one ends: they are written one after the other.
const NEIGHBOURS: u64 = REGION;
/// Most bytes that are read along for a neighbour.
const GAP: u64 = 16 << 10;

/// Parts of a disk, in order: one of at most 1 MiB, or several that are near.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub parts: Vec<Range<u64>>,
    /// Whether all of them are zero, and nothing is to be read.
    pub is_zero: bool,
}

impl Piece {
    pub fn of(one: Move) -> Self {
        let is_zero = matches!(one, Move::Zero(_));
        match one {
            Move::Copy(part) | Move::Zero(part) => Self {
                parts: vec![part],
                is_zero,
            },
        }
    }

    /// From where the first part begins to where the last one ends.
    pub fn span(&self) -> Range<u64> {
        let ends = self.parts.first().zip(self.parts.last());
        ends.map_or(0..0, |(first, last)| first.start..last.end)
    }

    /// So many bytes it brings.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.end - part.start).sum()
    }
}

/// Pieces of what is to be moved, in order.
pub(super) fn pieces(moves: impl Iterator<Item = Move>) -> impl Iterator<Item = Piece> {
    let mut moves = moves.peekable();
    std::iter::from_fn(move || {
        let mut piece = Piece::of(moves.next()?);
        while let Some(Move::Copy(next)) = moves.next_if(|next| is_read_along(&piece, next)) {
            match piece.parts.last_mut() {
                Some(last) if last.end == next.start => last.end = next.end,
                _ => piece.parts.push(next),
            }
        }
        Some(piece)
    })
}

fn is_read_along(piece: &Piece, next: &Move) -> bool {
    let (span, Move::Copy(next)) = (piece.span(), next) else {
        return false;
    };
    let is_near = next.start.saturating_sub(span.end) <= GAP;
    !piece.is_zero && is_near && next.end.saturating_sub(span.start) <= NEIGHBOURS
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn copy(start: u64, end: u64) -> Move {
        Move::Copy(start * KIB..end * KIB)
    }

    /// Beginnings and ends in KiB, and what is zero.
    fn told(moves: Vec<Move>) -> Vec<(Vec<(u64, u64)>, bool)> {
        let told = |piece: Piece| {
            let parts = piece.parts.iter();
            let parts = parts.map(|part| (part.start / KIB, part.end / KIB));
            (parts.collect(), piece.is_zero)
        };
        pieces(moves.into_iter()).map(told).collect()
    }

    #[test]
    fn near_neighbours_are_read_at_once_and_what_is_far_or_zero_is_not() {
        let zero = Move::Zero(44 * KIB..48 * KIB);
        let moves = vec![
            copy(0, 4),
            copy(20, 24),
            copy(41, 44),
            zero,
            copy(48, 52),
            copy(52, 56),
        ];
        let expected = [
            (vec![(0, 4), (20, 24)], false),
            (vec![(41, 44)], false),
            (vec![(44, 48)], true),
            (vec![(48, 56)], false),
        ];
        assert_eq!(told(moves), expected);
    }

    #[test]
    fn no_neighbours_are_farther_apart_than_a_region_and_a_long_move_is_a_piece() {
        let moves = vec![
            copy(0, 1024),
            copy(1024, 1100),
            copy(1104, 1200),
            copy(1204, 1400),
        ];
        let expected = [
            (vec![(0, 1024)], false),
            (vec![(1024, 1100), (1104, 1200)], false),
            (vec![(1204, 1400)], false),
        ];
        assert_eq!(told(moves), expected);
        let both = Piece {
            parts: vec![4096..8192, 12288..16384],
            is_zero: false,
        };
        assert_eq!((both.bytes(), both.span()), (8192, 4096..16384));
    }
}
