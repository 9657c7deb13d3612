//! Disks that move from one place of their host to another while their guest runs.
//!
//! Plain data. Refuses nothing.

use crate::ApiError;
use crate::ids::DatastoreName;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// For so long a guest may stand still for the last blocks of disks that go to another host by dirty block tracking, or for their last redo logs, s, beside all else that a pause is
/// made of.
pub const LAST_BLOCKS_MAX_S: u64 = 3;

/// How a disk is copied while its guest works with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// What the guest writes goes to both sides: it always comes to an end.
    #[default]
    Mirror,
    /// What the guest writes is marked and copied again, and its requests are held for the last blocks, for about 5 s at most; where that
    /// cannot be the disk is not moved. For the laboratory.
    DirtyTracking,
    /// The disk is frozen under a redo log, to which the guest writes, and copied; logs are consolidated into the copy one after the other, and the
    /// guest's requests are held for the last one. For the laboratory.
    Snapshot,
}

/// Where the first redo log of a disk lies that moves on its host by snapshots; later ones lie at the destination. For the laboratory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FirstLog {
    /// Beside the image that the disk has: it spans two volumes only from its second log on.
    Source,
    /// Beside the image that it is to have.
    #[default]
    Destination,
}

impl FirstLog {
    /// Whether it is where it lies if nobody says so.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What dirty block tracking can do without, to see what it is good for. For the laboratory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Optimisation {
    /// What is still to be read is not marked.
    Incremental,
    /// What is written again and again is left out until the last iteration but one.
    HotBlocks,
}

impl Method {
    /// Whether it is the one that is taken where none is named.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Only dirty block tracking can do without something: says so where another method is to.
    pub fn check_without(self, without: &[Optimisation]) -> Result<(), String> {
        match self == Self::DirtyTracking || without.is_empty() {
            true => Ok(()),
            false => Err(
                "only dirty-tracking can do without something: name it with --method dirty-tracking, or leave out --no-incremental and --no-hot-blocks ('without', over REST)".to_owned(),
            ),
        }
    }

    /// Whether a first log can be said to lie there: only the method that has logs knows of it.
    pub fn check_first_log(self, first_log: FirstLog) -> Result<(), String> {
        match self == Self::Snapshot || first_log.is_default() {
            true => Ok(()),
            false => Err(
                "only the method snapshot has redo logs: name it with --method snapshot, or leave out --first-log ('first_log', over REST)".to_owned(),
            ),
        }
    }
}

/// Moves disks of a VM that runs to a datastore of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveDisks {
    /// Names of disks within the VM; none: all that the guest may write.
    #[serde(default)]
    pub disks: Vec<String>,
    #[schema(value_type = String)]
    pub to: DatastoreName,
    /// Cap of what is copied, Mb/s; what the guest writes meanwhile is beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth_mbit_per_s: Option<u64>,
    /// Say what would be moved, and change nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Where it is left out what the guest writes goes to both sides.
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    /// What `dirty-tracking` is to do without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<Optimisation>,
    /// Where the first redo log of `snapshot` lies.
    #[serde(default, skip_serializing_if = "FirstLog::is_default")]
    pub first_log: FirstLog,
}

/// Where a disk goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPlace {
    pub disk: String,
    /// The image that is made for it.
    pub path: String,
    /// Whether other hosts have that image, too.
    pub shared: bool,
    /// Cap of what is copied, Mb/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth_mbit_per_s: Option<u64>,
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<Optimisation>,
    #[serde(default, skip_serializing_if = "FirstLog::is_default")]
    pub first_log: FirstLog,
}

/// How far a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskMoveState {
    /// It would be moved: a dry run.
    Planned,
    /// Another one goes first.
    Waiting,
    Copying,
    /// The guest works with the new image. The old one is removed; where that cannot be, it is noted, and tried again before the
    /// next move or start.
    Moved,
    /// It is where it was, and nothing is left of the new image.
    Failed,
    /// A person called it off; as if it had not begun.
    Cancelled,
}

/// What the copying of a disk waited for most of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskMoveLimit {
    /// Reads of the image that it has.
    SourceDisk,
    /// Writes of the image that it is to have.
    DestinationDisk,
    /// The cap that was asked for.
    Cap,
}

/// What one iteration of dirty block tracking came to, or one consolidation of a redo log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskIteration {
    /// 1 is the first pass; the last one is that for which the guest's requests were held.
    pub number: u32,
    pub copied_bytes: u64,
    /// How long it took, s.
    pub seconds: f64,
    /// Bytes of blocks that were marked when it ended, or that the log held which grew meanwhile;
    pub dirty_bytes: u64,
    /// of those that were marked, those that are written again and again,
    pub hot_bytes: u64,
    /// and those that it left out for that.
    pub deferred_bytes: u64,
}

/// What the iterations came to of one disk that goes along with its VM by dirty block tracking, or by redo logs: its image, and one log after the other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskIterations {
    pub disk: String,
    /// Those that have ended, as many as are kept.
    pub iterations: Vec<DiskIteration>,
}

/// What it took to move a disk by snapshots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RedoLogs {
    /// How many redo logs there were,
    pub logs: u32,
    /// and how many bytes they and the new image took at the most, beside the former image.
    pub space_max_bytes: u64,
    /// For how long the disk consisted of files at both places, s.
    pub spanned_s: f64,
    /// How long the guest's requests waited while logs were put over its disk, ms, all together; the wait for the last one is `switch_ms`.
    pub frozen_ms: f64,
    /// The part of its requests to which the guest was slowed in the end, where it wrote as fast as its logs were consolidated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowed_to: Option<f64>,
}

/// What it took to send the disks of a VM to another host by snapshots, all of them together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SentLogs {
    /// How many redo logs each disk had,
    pub logs: u32,
    /// and how many bytes those of all disks took at the source at the most, beside the images that they lay over.
    pub space_max_bytes: u64,
    /// How long the guest's requests waited while logs were put over its disks, ms, all together; the wait for the last ones is a part of the
    /// switchover.
    pub frozen_ms: f64,
    /// The part of its requests to which the guest was slowed in the end, where it wrote as fast as its logs were sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowed_to: Option<f64>,
}

/// One disk on its way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskMove {
    pub disk: String,
    /// The image that it had before.
    pub from: String,
    /// The image that it is to have.
    pub to: String,
    pub state: DiskMoveState,
    /// Bytes that are to be copied.
    pub total_bytes: u64,
    /// Those of them that are not copied yet.
    pub left_bytes: u64,
    /// How long the rest will take at the present speed, s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<u64>,
    /// How long the guest's requests waited for the change of images, ms: all attempts together, of which the last succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch_ms: Option<f64>,
    /// Why it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// When it began, s since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began_unix_s: Option<u64>,
    /// How long it has taken, s: until now, or until its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<DiskMoveLimit>,
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    /// Those of `dirty-tracking` that have ended, as many as are kept; of `snapshot` the copying, and each consolidation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub iterations: Vec<DiskIteration>,
    /// What the logs of `snapshot` took; nothing of other methods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redo_logs: Option<RedoLogs>,
}

/// The disks that a VM's process moves, or moved last.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskMoves {
    pub disks: Vec<DiskMove>,
    /// Those that were moved on this host before, or were not, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub past: Vec<DiskMove>,
    /// What stands in the way, in a dry run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<ApiError>,
}

impl DiskMove {
    /// One that has not begun.
    pub fn planned(disk: &str, from: &str, to: &str) -> Self {
        Self {
            disk: disk.to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            state: DiskMoveState::Planned,
            total_bytes: 0,
            left_bytes: 0,
            eta_s: None,
            switch_ms: None,
            why: None,
            began_unix_s: None,
            seconds: None,
            limited_by: None,
            method: Method::default(),
            iterations: Vec::new(),
            redo_logs: None,
        }
    }

    /// Whether it has begun and is not at its end.
    pub fn is_under_way(&self) -> bool {
        matches!(self.state, DiskMoveState::Waiting | DiskMoveState::Copying)
    }
}

impl DiskMoves {
    /// Whether one of them is not at its end.
    pub fn are_under_way(&self) -> bool {
        self.disks.iter().any(DiskMove::is_under_way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_mirror_do_without_something_reads_which_options_to_leave_out() {
        let hot = [Optimisation::HotBlocks];
        let why = Method::Mirror.check_without(&hot).unwrap_err();
        assert!(
            why.contains("--no-incremental and --no-hot-blocks"),
            "{why}"
        );
        assert_eq!(Method::Mirror.check_without(&[]), Ok(()));
        assert_eq!(Method::DirtyTracking.check_without(&hot), Ok(()));
        assert!(Method::Snapshot.check_without(&hot).is_err());
    }

    #[test]
    fn only_snapshots_have_a_first_log() {
        for method in [Method::Mirror, Method::DirtyTracking] {
            let why = method.check_first_log(FirstLog::Source).unwrap_err();
            assert!(why.contains("--method snapshot"), "{why}");
            assert_eq!(method.check_first_log(FirstLog::default()), Ok(()));
        }
        assert_eq!(Method::Snapshot.check_first_log(FirstLog::Source), Ok(()));
    }

    /// An older neighbour understands a wish that names no method, and refuses one that names another than its own.
    #[test]
    fn a_method_is_not_written_while_it_is_the_default() {
        let to = "fast";
        let wish: MoveDisks = serde_json::from_value(serde_json::json!({ "to": to })).unwrap();
        let written = serde_json::to_value(&wish).unwrap();
        assert_eq!(written, serde_json::json!({ "disks": [], "to": to }));
        let tracked = MoveDisks {
            method: Method::DirtyTracking,
            without: vec![Optimisation::HotBlocks],
            ..wish
        };
        let written = serde_json::to_value(&tracked).unwrap();
        assert_eq!(written["method"], "dirty-tracking");
        assert_eq!(written["without"], serde_json::json!(["hot-blocks"]));
        let logs = MoveDisks {
            method: Method::Snapshot,
            without: Vec::new(),
            first_log: FirstLog::Source,
            ..tracked
        };
        let written = serde_json::to_value(&logs).unwrap();
        assert_eq!(
            (&written["method"], &written["first_log"]),
            (&"snapshot".into(), &"source".into())
        );
        let unknown = serde_json::json!({ "to": to, "method": "by-hand" });
        assert!(serde_json::from_value::<MoveDisks>(unknown).is_err());
        let moved = DiskMove::planned("root", "/a", "/b");
        let written = serde_json::to_value(&moved).unwrap();
        assert!(written.get("method").is_none() && written.get("iterations").is_none());
    }
}
