//! Snapshots of a VM's disks: what is asked, and what is told of them.
//!
//! Plain data. Refuses: a text that is too long or would steer a terminal.

use crate::ids::SnapshotName;
use crate::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

/// Longest text that goes with a snapshot, bytes.
pub const SNAPSHOT_TEXT_LEN_MAX: usize = 1024;

/// The extended attribute of an image that is not all of its disk: a number that its description has, too.
pub const LAYERED_MARK: &str = "user.godwit.layered";
/// After that number, while a description is being written or removed.
pub const LAYERED_BEGUN: &str = " begun";
/// A longer one is none of ours, bytes.
pub const LAYERED_MARK_MAX: usize = 64;

/// The extended attribute of an image as which linked disks begin: a number of 128 bits in hexadecimal digits, which their descriptions have, too. It is
/// never written again.
pub const PARENT_MARK: &str = "user.godwit.parent";
/// Digits of that number.
pub const PARENT_MARK_DIGITS: usize = 32;

/// What a refusal says of how a linked disk comes to stand alone; `which` names it there.
pub fn becomes_one_image(which: &str) -> String {
    format!(
        "{which} becomes one image when it moves to another datastore of its host ('godwit vm move-disk')"
    )
}

/// What its name ends in that says of what a disk consists.
pub const DESCRIPTION_END: &str = ".images";

/// Where the description lies of a disk that consists of more than this image.
pub fn description_of(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(DESCRIPTION_END);
    path.into()
}

/// What the map of states of the delta of this number is called in the VM's run directory, by which a process of the VM goes on after one that was killed.
pub fn states_map_name(id: u128) -> String {
    format!("delta-{id:032x}.states")
}

/// Of which delta a file of this name is the map, or what came of one that was being made.
pub fn id_of_states_map(name: &str) -> Option<u128> {
    let name = name.strip_suffix(".new").unwrap_or(name);
    let digits = name.strip_prefix("delta-")?.strip_suffix(".states")?;
    let id = u128::from_str_radix(digits, 16).ok()?;
    (states_map_name(id) == name).then_some(id)
}

/// Whether the guest's file systems are to stand still for a snapshot, which its agent has them do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Quiesce {
    /// Where the guest runs and has an agent that answers; else the snapshot is as after a power cut.
    #[default]
    IfPossible,
    /// There is no snapshot where that is not possible.
    Always,
    Never,
}

/// Takes a snapshot of all disks that the guest may write, whether it runs or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeSnapshot {
    #[schema(value_type = String)]
    pub name: SnapshotName,
    /// What a person wants to know of it later.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    #[serde(default)]
    pub quiesce: Quiesce,
}

impl TakeSnapshot {
    /// Refuses a text that cannot be shown.
    pub fn check(&self) -> Result<(), ApiError> {
        let wrong = |what: String| Err(ApiError::new(ErrorCode::InvalidRequest, what));
        if self.text.len() > SNAPSHOT_TEXT_LEN_MAX {
            let bytes = self.text.len();
            return wrong(format!(
                "the text of a snapshot has {bytes} bytes, and at most {SNAPSHOT_TEXT_LEN_MAX} are kept"
            ));
        }
        match self.text.chars().any(char::is_control) {
            true => wrong("the text of a snapshot is one line without control characters".into()),
            false => Ok(()),
        }
    }
}

/// Names a snapshot of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    #[schema(value_type = String)]
    pub name: SnapshotName,
}

/// One snapshot of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotView {
    #[schema(value_type = String)]
    pub name: SnapshotName,
    /// The snapshot that the disks came after when it was taken, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub after: Option<SnapshotName>,
    /// When it was taken, s since 1970.
    pub made_unix_s: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Whether the guest had written all that it was asked to keep.
    #[serde(default)]
    pub quiesced: bool,
    /// The disks that were frozen for it.
    pub disks: Vec<String>,
    /// Those of them that have it no more, though the VM has them: nothing goes back to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacking: Vec<String>,
    /// Bytes that its own images take, without what it has in common with earlier ones.
    pub bytes: u64,
}

/// The snapshots of a VM, each after the one that it came after.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshots {
    pub snapshots: Vec<SnapshotView>,
    /// The snapshot that the disks came after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub after: Option<SnapshotName>,
    /// Images that are left of deleted snapshots, and are merged while the guest runs.
    #[serde(default)]
    pub unneeded_images: u32,
    /// Why those are not merged yet, where that was tried.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why_unmerged: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_one_short_line() {
        let of = |text: &str| TakeSnapshot {
            name: SnapshotName::new("clean").unwrap(),
            text: text.into(),
            quiesce: Quiesce::IfPossible,
        };
        assert!(of("").check().is_ok() && of("before the update").check().is_ok());
        for wrong in ["two\nlines", "\u{1b}[2J", &"a".repeat(1025)] {
            assert!(of(wrong).check().is_err(), "{wrong:?}");
        }
        let json = serde_json::to_string(&of("")).unwrap();
        assert_eq!(json, r#"{"name":"clean","quiesce":"if-possible"}"#);
    }
}
