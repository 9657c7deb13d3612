//! What the pause of a migration is made of.
//!
//! Pure data; a part of [`crate::migration::MigrationReport`].

use crate::round::rounded;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

fn took_nothing(ms: &f64) -> bool {
    *ms == 0.0
}

/// The parts of the switchover, ms, in order; their sum is the switchover.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SwitchoverParts {
    /// Stopping the vCPUs at the source.
    #[serde(serialize_with = "rounded")]
    pub stop_ms: f64,
    /// Last blocks of disks that are copied by dirty block tracking, or their last redo logs; 0 with the mirror, and in reports of older versions, which have them
    /// among the last pages.
    #[serde(
        default,
        skip_serializing_if = "took_nothing",
        serialize_with = "rounded"
    )]
    pub last_blocks_ms: f64,
    /// Final scan and the last pages, applied.
    #[serde(serialize_with = "rounded")]
    pub last_pages_ms: f64,
    /// Saving device state at the source and carrying it over.
    #[serde(serialize_with = "rounded")]
    pub device_save_ms: f64,
    /// Loading device state, until the destination said ready.
    #[serde(serialize_with = "rounded")]
    pub device_load_ms: f64,
    /// Ready, gift and permit: both hosts' journals and the ways of the messages.
    #[serde(serialize_with = "rounded")]
    pub permit_ms: f64,
    /// Letting the guest run at the destination.
    #[serde(serialize_with = "rounded")]
    pub resume_ms: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_without_last_blocks_of_disks_is_as_it_was_before_there_were_any() {
        let parts = SwitchoverParts::default();
        let written = serde_json::to_value(&parts).unwrap();
        assert!(written.get("last_blocks_ms").is_none(), "{written}");
        let read: SwitchoverParts = serde_json::from_value(written).unwrap();
        assert_eq!(read, parts);
        let tracked = SwitchoverParts {
            last_blocks_ms: 2500.0,
            ..parts
        };
        let written = serde_json::to_value(&tracked).unwrap();
        assert_eq!(written["last_blocks_ms"], 2500.0);
    }
}
