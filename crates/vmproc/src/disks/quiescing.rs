//! A guest's file systems that stand still while a snapshot is taken of its disks, if its agent has them do so.
//!
//! Owns the guest's freeze until it is ended, which lets the guest go on. Refuses: a snapshot that is to be quiesced and cannot be.

use godwit_qemu::freezing::{Freezer, Frozen};
use godwit_types::snapshots::Quiesce;
use std::sync::Arc;

/// What came of asking; why it stands not still is the end of a sentence.
#[derive(Debug)]
pub(super) struct Quiesced(Result<Frozen, String>);

impl Quiesced {
    pub(super) fn of(wish: Quiesce, freezer: Option<Arc<Freezer>>) -> Result<Self, String> {
        let none = match wish {
            Quiesce::Never => "it was not to be asked",
            Quiesce::IfPossible | Quiesce::Always => "no agent in it answers",
        };
        let freezer = freezer.ok_or_else(|| none.to_owned());
        let frozen =
            freezer.and_then(|freezer| freezer.freeze().map_err(|error| error.to_string()));
        match (wish, frozen) {
            (Quiesce::Always, Err(why)) => Err(format!(
                "its file systems are not had to stand still, since {why}: install qemu-guest-agent in the guest, or leave '--quiesce' out"
            )),
            (_, frozen) => Ok(Self(frozen)),
        }
    }

    /// Lets the guest go on. Whether it stood still until now, else why not.
    pub(super) fn end(self) -> Result<(), String> {
        self.0?.thaw().map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_without_an_agent_has_a_snapshot_that_says_so_unless_it_must_stand_still() {
        for (wish, told) in [
            (Quiesce::IfPossible, "no agent"),
            (Quiesce::Never, "not to be asked"),
        ] {
            let why = Quiesced::of(wish, None).unwrap().end().unwrap_err();
            assert!(why.contains(told), "{why}");
        }
        let why = Quiesced::of(Quiesce::Always, None).unwrap_err();
        assert!(why.contains("install qemu-guest-agent"), "{why}");
    }
}
