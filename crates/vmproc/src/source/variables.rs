//! The guest's UEFI variables on their way: all of them to each set of channels, then what has changed.
//!
//! Works on the driver's state. Refuses nothing: a file that cannot be read ends the migration.

use super::driver::{Halt, SourceDriver, halt_of};
use crate::faults::planted;
use crate::variables::read_whole;
use godwit_migrate::protocol::ToDestination;
use godwit_streams::source::ConnectionSet;

/// Bytes that are compared and sent together.
const PIECE: usize = 64 << 10;

impl SourceDriver {
    /// Sends what this set's destination does not have; nothing of a VM that has none. Of a guest that stands still the file is
    /// its flash memory, since QEMU writes every change through.
    pub(super) fn send_variables(&mut self, set: &ConnectionSet) -> Result<(), Halt> {
        let Some(file) = &self.parts.variables else {
            return Ok(());
        };
        if planted("variables-not-sent") && !self.variables_sent.is_empty() {
            return Ok(());
        }
        let now = read_whole(file).map_err(|error| {
            Halt::failed(format!(
                "the guest's UEFI variables cannot be read: {error}"
            ))
        })?;
        let mut unsent = pieces(&self.variables_sent, &now).peekable();
        while let Some((at, piece)) = unsent.next() {
            let message = ToDestination::Variables {
                at: at as u64,
                bytes: piece.to_vec(),
                last: unsent.peek().is_none(),
            };
            set.control.send(&message).map_err(halt_of)?;
        }
        drop(unsent);
        self.variables_sent = now;
        Ok(())
    }
}

/// What differs, and where it begins.
fn pieces<'a>(sent: &'a [u8], now: &'a [u8]) -> impl Iterator<Item = (usize, &'a [u8])> {
    let all = now.chunks(PIECE).enumerate();
    let all = all.map(|(index, piece)| (index * PIECE, piece));
    all.filter(move |(at, piece)| sent.get(*at..at + piece.len()) != Some(piece))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_changed_is_sent_and_nothing_else() {
        let mut now = vec![7; 2 * PIECE + 100];
        let places =
            |sent: &[u8], now: &[u8]| pieces(sent, now).map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(places(&[], &now), [0, PIECE, 2 * PIECE]);
        let sent = now.clone();
        assert!(places(&sent, &now).is_empty());
        now[PIECE + 1] = 8;
        now[2 * PIECE + 99] = 8;
        assert_eq!(places(&sent, &now), [PIECE, 2 * PIECE]);
    }
}
