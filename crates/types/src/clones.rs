//! A VM that is made as a copy of another one: what a person asks, and what its host is asked and tells.
//!
//! Plain data. Refuses: a VM that would be a copy of itself.

use crate::control_api::DiskMaking;
use crate::ids::{SnapshotName, VmName};
use crate::text::read_sentence;
use crate::vm::VmSpec;
use crate::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Makes a VM that is as another one, with disks of its own, on the same host. To ask again goes on with what is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneVm {
    /// The name of the VM that is made.
    #[schema(value_type = String)]
    pub new: VmName,
    /// Its disks begin as they were at this snapshot; without one as they are, and the VM must be off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub snapshot: Option<SnapshotName>,
}

impl CloneVm {
    /// Refuses a VM that would be a copy of itself.
    pub fn check(&self, of: &VmName) -> Result<(), ApiError> {
        if self.new != *of {
            return Ok(());
        }
        let message = format!("VM '{of}' cannot be its own clone: give the clone another name");
        Err(ApiError::new(ErrorCode::InvalidRequest, message))
    }
}

/// Answer to [`CloneVm`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cloned {
    /// One sentence for a person: one line of bounded length, whoever said it.
    #[serde(deserialize_with = "read_sentence")]
    pub message: String,
    /// The VM is not there yet, since this disk is copied first: to ask again goes on with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub making: Option<DiskMaking>,
}

/// In the state directory of a VM that is a clone, until it first starts: [`ClonedVariables`].
pub const CLONED_VARIABLES_FILE: &str = "cloned-variables.json";

/// The UEFI variables with which a clone begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClonedVariables {
    /// The user id of the VM that they are for: another one of that name has another.
    pub uid: Option<u32>,
    #[serde(with = "crate::base64_bytes")]
    pub bytes: Vec<u8>,
}

/// Has a host copy the disks of a VM that it holds for another one. To ask again goes on with what is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloneDisks {
    /// The VM that is made; each disk that is to be copied is made [from its part](crate::vm::DiskSpec::is_cloned).
    pub spec: VmSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotName>,
}

/// How far that is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cloning {
    /// The disk that is copied now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub making: Option<DiskMaking>,
    /// All is copied for this VM, as it was asked for at first. Told once to who asked for it: what is copied is that one's from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<VmSpec>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_no_clone_of_itself() {
        let named = |name: &str| VmName::new(name).unwrap();
        let wish = CloneVm {
            new: named("web2"),
            snapshot: None,
        };
        wish.check(&named("web")).unwrap();
        let refused = wish.check(&named("web2")).unwrap_err().message;
        assert!(refused.contains("its own clone"), "{refused}");
        let json = serde_json::to_string(&wish).unwrap();
        assert_eq!(json, r#"{"new":"web2"}"#);
    }
}
