//! The bytes of a mirrored disk on their way: those of a guest's write, and what is to be given of a region that was read.
//!
//! Owns nothing. Refuses a write whose bytes cannot be read from the guest.

use std::ops::Range;
use std::sync::Arc;

use godwit_guestmem::zero::is_zero;
use rustix::io::Errno;

use super::outlet::Change;
use crate::{Buffer, Data};

/// Where so many bytes are zero they are not copied.
const SPARSE: usize = 64 << 10;

/// The bytes of a write, read from the guest once; nothing where there are none.
pub(super) fn read_once(data: &Data) -> Result<Option<Arc<Buffer>>, Errno> {
    match data {
        Data::FromGuest(guest) => {
            let mut buffer = Buffer::zeroed(guest.bytes());
            let read = guest.copy_to(0, buffer.bytes_mut());
            read.map_err(|_| Errno::NOMEM)?;
            Ok(Some(Arc::new(buffer)))
        }
        Data::Own(own) => {
            let mut buffer = Buffer::zeroed(own.len());
            buffer.bytes_mut().copy_from_slice(own.bytes());
            Ok(Some(Arc::new(buffer)))
        }
        Data::Shared(shared) => Ok(Some(Arc::clone(shared))),
        Data::None | Data::ToGuest(_) => Ok(None),
    }
}

/// A run of a region that is not zero, as a change. What is little of it gets memory of its own, so that it does not keep the
/// region's.
pub(super) fn written(region: &Arc<Buffer>, run: &Range<usize>) -> Change {
    if 2 * run.len() >= region.len() {
        return Change::Written(Arc::clone(region), run.start);
    }
    let mut own = Buffer::zeroed(run.len());
    let bytes = region.bytes().get(run.clone()).unwrap_or_default();
    own.bytes_mut().copy_from_slice(bytes);
    Change::Written(Arc::new(own), 0)
}

/// Where bytes are zero and where they are not, in pieces of [`SPARSE`].
pub(crate) fn runs(bytes: &[u8]) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    let mut at = 0;
    for piece in bytes.chunks(SPARSE) {
        let (end, zero) = (at + piece.len(), is_zero(piece));
        match runs.last_mut() {
            Some((run, same)) if *same == zero => run.end = end,
            _ => runs.push((at..end, zero)),
        }
        at = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_pieces_are_told_apart_and_joined() {
        let mut bytes = vec![0; 5 * SPARSE + 512];
        bytes[SPARSE] = 1;
        bytes[3 * SPARSE - 1] = 1;
        let all = runs(&bytes);
        let (one, three, end) = (SPARSE, 3 * SPARSE, bytes.len());
        let wanted = [(0..one, true), (one..three, false), (three..end, true)];
        assert_eq!(all, wanted);
        assert!(runs(&[]).is_empty());
    }
}
