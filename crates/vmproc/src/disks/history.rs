//! Moves of a VM's disks on this host that have ended, for people.
//!
//! They are in a file of the VM's state, newest first, and stay there when the VM moves away. Owns nothing: whoever serves the
//! disks adds to it. Refuses: to stop anything for a list that cannot be read or written, which the log tells.

use crate::files::Paths;
use godwit_store::{load_json, save_json};
use godwit_types::disk_move::DiskMove;
use serde::{Deserialize, Serialize};

/// How many are kept.
const KEPT: usize = 32;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct History {
    moves: Vec<DiskMove>,
}

/// Those that have ended, newest first; none where that is not known.
pub(crate) fn past_moves(paths: &Paths) -> Vec<DiskMove> {
    let known: Option<History> = load_json(&paths.disk_moves()).unwrap_or_else(|error| {
        tracing::warn!(%error, "which disks were moved before is not known");
        None
    });
    known.map_or_else(Vec::new, |history| history.moves)
}

/// The list with one more.
pub(super) fn keep(paths: &Paths, past: Vec<DiskMove>, ended: &DiskMove) -> Vec<DiskMove> {
    let newest = std::iter::once(ended.clone());
    let history = History {
        moves: newest.chain(past).take(KEPT).collect(),
    };
    if let Err(error) = save_json(&paths.disk_moves(), &history) {
        tracing::warn!(%error, "which disks were moved is not written");
    }
    history.moves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Site;

    #[test]
    fn the_newest_are_kept_and_a_list_that_cannot_be_read_stops_nothing() {
        let site = Site::new();
        let paths = Paths::of(&site.config);
        std::fs::create_dir_all(&paths.state).unwrap();
        assert!(past_moves(&paths).is_empty());
        let of = |number: usize| DiskMove::planned("root", "/old", &format!("/new-{number}"));
        for number in 0..40 {
            let kept = keep(&paths, past_moves(&paths), &of(number));
            assert_eq!(kept, past_moves(&paths));
        }
        let past = past_moves(&paths);
        assert_eq!((past.len(), &past[0], &past[31]), (KEPT, &of(39), &of(8)));
        std::fs::write(paths.disk_moves(), "no list").unwrap();
        assert!(past_moves(&paths).is_empty());
        keep(&paths, Vec::new(), &of(1));
        assert_eq!(past_moves(&paths), [of(1)]);
        // A directory that is gone takes none.
        std::fs::remove_dir_all(&paths.state).unwrap();
        assert_eq!(keep(&paths, Vec::new(), &of(2)), [of(2)]);
    }
}
