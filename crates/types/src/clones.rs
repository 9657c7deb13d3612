//! A VM that is made as a copy of another one: what a person asks, and what its host is asked and tells.
//!
//! Plain data. Refuses: a VM that would be a copy of itself.

use crate::control_api::DiskMaking;
use crate::ids::{SnapshotName, VmName};
use crate::text::read_sentence;
use crate::vm::VmSpec;
use crate::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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

/// Hexadecimal digits of the number of an attempt: when it began, of what, and random ones.
const NUMBER_DIGITS: usize = 32;
/// Digits of each of the first two.
const PART_DIGITS: usize = 8;

/// The number of an attempt to make a clone, which no other has: what is copied under it is nobody else's. It says when the attempt began, and of what,
/// so that only the same command goes on with what was left half-made.
pub fn attempt_number(
    of: &VmName,
    snapshot: Option<&SnapshotName>,
    begun_unix_s: u64,
    random: u64,
) -> String {
    let begun = u32::try_from(begun_unix_s).unwrap_or(u32::MAX);
    format!("{begun:08x}{:08x}{random:016x}", digest(of, snapshot))
}

/// Whether it is one.
pub fn is_attempt_number(number: &str) -> bool {
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    number.len() == NUMBER_DIGITS && number.bytes().all(is_digit)
}

/// Whether this attempt copies that VM, as it is or as it was at that snapshot.
pub fn is_attempt_of(number: &str, of: &VmName, snapshot: Option<&SnapshotName>) -> bool {
    let digits = number.get(PART_DIGITS..2 * PART_DIGITS);
    digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()) == Some(digest(of, snapshot))
}

/// When an attempt began, in seconds since 1970.
pub fn attempt_begun_unix_s(number: &str) -> Option<u64> {
    let digits = number.get(..PART_DIGITS)?;
    u64::from_str_radix(digits, 16).ok()
}

/// FNV-1a of both names. It tells apart what a person means, and is no protection.
fn digest(of: &VmName, snapshot: Option<&SnapshotName>) -> u32 {
    let snapshot = snapshot.map(SnapshotName::as_str).unwrap_or_default();
    let bytes = of.as_str().bytes().chain([0]).chain(snapshot.bytes());
    bytes.fold(0x811c_9dc5, |sum, byte| {
        (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

/// In the state directory of a VM that is a clone, until it first starts: [`ClonedVariables`].
pub const CLONED_VARIABLES_FILE: &str = "cloned-variables.json";
/// How the same begins until the clone's disks have their names, by the attempt that copied them.
const ATTEMPTED: &str = "cloned-variables-";
const ATTEMPTED_END: &str = ".json";

/// What they are called until the clone's disks have their names; of a clone that has none of its own nothing is waited for.
pub fn cloned_variables_file(number: Option<&str>) -> String {
    match number {
        Some(number) => format!("{ATTEMPTED}{number}{ATTEMPTED_END}"),
        None => CLONED_VARIABLES_FILE.to_owned(),
    }
}

/// Whether a file of that directory is what an attempt has left.
pub fn is_of_attempt(file: &str) -> bool {
    let number = file.strip_prefix(ATTEMPTED);
    let number = number.and_then(|rest| rest.strip_suffix(ATTEMPTED_END));
    number.is_some_and(is_attempt_number)
}

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
    /// The images of the VM that is copied, by the names of its disks, as it is described to who asks: its host may have others until its next start.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub disks: BTreeMap<String, String>,
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
    fn the_number_of_an_attempt_says_when_it_began_and_of_what() {
        let web = VmName::new("web").unwrap();
        let clean = SnapshotName::new("clean").unwrap();
        let number = attempt_number(&web, Some(&clean), 1_800_000_000, 7);
        assert!(is_attempt_number(&number), "{number}");
        assert_eq!(attempt_begun_unix_s(&number), Some(1_800_000_000));
        assert!(is_attempt_of(&number, &web, Some(&clean)));
        let other = VmName::new("db").unwrap();
        for (of, snapshot) in [(&web, None), (&other, Some(&clean)), (&other, None)] {
            assert!(!is_attempt_of(&number, of, snapshot), "{of}");
        }
        let again = attempt_number(&web, Some(&clean), 1_800_000_000, 8);
        assert_ne!(number, again);
        assert!(!is_attempt_number("7") && !is_attempt_number(&number.replace('0', "G")));
        assert!(!is_attempt_of("", &web, None) && attempt_begun_unix_s("").is_none());
        let file = cloned_variables_file(Some(&number));
        assert!(is_of_attempt(&file) && !is_of_attempt(CLONED_VARIABLES_FILE));
    }

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
