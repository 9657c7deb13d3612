//! Moves of a VM's disks on this host that have ended, for people.
//!
//! They are in a file of the VM's state, newest first, and stay there when the VM moves away. Those that are under way are there,
//! too, so that whoever reads it after this process has died can say what became of them. Owns nothing: whoever serves the disks
//! writes it. Refuses: to stop anything for a list that cannot be read or written, which the log tells.

use super::served::ServedDisks;
use crate::files::Paths;
use godwit_store::{load_json, save_json};
use godwit_types::disk_move::{DiskMove, DiskMoveState};
use serde::{Deserialize, Serialize};

/// How many are kept.
const KEPT: usize = 32;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct History {
    moves: Vec<DiskMove>,
}

/// Those that have ended, newest first, by word of a process that moves none; none where that is not known.
pub(crate) fn past_moves(paths: &Paths) -> Vec<DiskMove> {
    read(paths).0
}

/// The same, written down: what became of a move is not known any more once the VM has left.
pub(super) fn settled(paths: &Paths) -> Vec<DiskMove> {
    let (moves, is_news) = read(paths);
    if is_news {
        keep(paths, &[], &moves);
    }
    moves
}

/// And whether the end of some is not written.
fn read(paths: &Paths) -> (Vec<DiskMove>, bool) {
    let known: Option<History> = load_json(&paths.disk_moves()).unwrap_or_else(|error| {
        tracing::warn!(%error, "which disks were moved before is not known");
        None
    });
    let mut moves = known.map_or_else(Vec::new, |history| history.moves);
    let mut is_news = moves.iter().any(DiskMove::is_under_way);
    if is_news {
        let what: Option<ServedDisks> = load_json(&paths.disks()).unwrap_or_else(|error| {
            tracing::warn!(%error, "what became of moves of disks is not known");
            // Another time it may be.
            is_news = false;
            None
        });
        let disks = what.map_or_else(Vec::new, |what| what.disks);
        let is_there = |moved: &DiskMove| {
            let mut disks = disks.iter();
            disks.any(|disk| disk.name == moved.disk && disk.path == moved.to)
        };
        let under_way = moves.iter_mut().filter(|disk| disk.is_under_way());
        under_way.for_each(|disk| ended_with_its_process(disk, is_there(disk)));
    }
    (moves, is_news)
}

/// What is written says which image is the disk.
fn ended_with_its_process(disk: &mut DiskMove, is_there: bool) {
    disk.eta_s = None;
    if is_there {
        (disk.state, disk.left_bytes) = (DiskMoveState::Moved, 0);
    } else {
        disk.state = DiskMoveState::Failed;
        disk.why = Some("the VM's process ended before it was known to be done".to_owned());
    }
}

/// The list with one more that has ended.
pub(super) fn with_one_more(past: &[DiskMove], ended: DiskMove) -> Vec<DiskMove> {
    std::iter::once(ended)
        .chain(past.iter().cloned())
        .take(KEPT)
        .collect()
}

/// Writes those that are under way and those that have ended.
pub(super) fn keep(paths: &Paths, disks: &[DiskMove], past: &[DiskMove]) {
    let under_way = disks.iter().filter(|disk| disk.is_under_way());
    let history = History {
        moves: under_way.chain(past).cloned().collect(),
    };
    if let Err(error) = save_json(&paths.disk_moves(), &history) {
        tracing::warn!(%error, "which disks were moved is not written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Site;
    use godwit_types::vm::DiskSpec;
    use serde_json::json;

    fn of(number: usize) -> DiskMove {
        DiskMove {
            state: DiskMoveState::Moved,
            ..DiskMove::planned("root", "/old", &format!("/new-{number}"))
        }
    }

    #[test]
    fn the_newest_are_kept_and_a_list_that_cannot_be_read_stops_nothing() {
        let site = Site::new();
        let paths = Paths::of(&site.config);
        std::fs::create_dir_all(&paths.state).unwrap();
        assert!(past_moves(&paths).is_empty());
        let mut past = Vec::new();
        for number in 0..40 {
            past = with_one_more(&past, of(number));
            keep(&paths, &[], &past);
            assert_eq!(past, past_moves(&paths));
        }
        assert_eq!((past.len(), &past[0], &past[31]), (KEPT, &of(39), &of(8)));
        std::fs::write(paths.disk_moves(), "no list").unwrap();
        assert!(past_moves(&paths).is_empty());
        keep(&paths, &[], &[of(1)]);
        assert_eq!(past_moves(&paths), [of(1)]);
        // A directory that is gone takes none.
        std::fs::remove_dir_all(&paths.state).unwrap();
        keep(&paths, &[], &[of(2)]);
        assert!(past_moves(&paths).is_empty());
    }

    /// What is written of a VM whose disk is there.
    fn served(path: &str) -> serde_json::Value {
        let disks = [DiskSpec::new("root", path)];
        json!({"launch": 1, "ram": [1, 2], "uid": 0, "gid": 0, "queues": 1, "disks": disks, "images": [[1, 2]]})
    }

    #[test]
    fn moves_that_ended_with_their_process_are_listed_with_what_became_of_them() {
        let site = Site::new();
        let paths = Paths::of(&site.config);
        std::fs::create_dir_all(&paths.state).unwrap();
        let under_way = |disk: &str, to: &str, state| DiskMove {
            state,
            ..DiskMove::planned(disk, "/old", to)
        };
        let disks = [
            under_way("root", "/new", DiskMoveState::Copying),
            under_way("data", "/new-data", DiskMoveState::Waiting),
        ];
        keep(&paths, &disks, &[of(1)]);
        let states = || {
            let moves = past_moves(&paths).into_iter();
            moves
                .map(|disk| (disk.state, disk.why.is_some()))
                .collect::<Vec<_>>()
        };
        let (moved, failed) = ((DiskMoveState::Moved, false), (DiskMoveState::Failed, true));
        assert_eq!(states(), [failed, failed, moved]);
        for (path, first) in [("/new", moved), ("/old", failed)] {
            save_json(&paths.disks(), &served(path)).unwrap();
            assert_eq!(states(), [first, failed, moved]);
        }
        // Nothing is written of what is not known.
        std::fs::write(paths.disks(), "no disks").unwrap();
        assert_eq!(settled(&paths).len(), 3);
        save_json(&paths.disks(), &served("/new")).unwrap();
        settled(&paths);
        std::fs::remove_file(paths.disks()).unwrap();
        assert_eq!(states(), [moved, failed, moved]);
    }
}
