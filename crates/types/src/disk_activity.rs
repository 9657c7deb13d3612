//! What disks do for their guests, and how much they may.
//!
//! Plain data. Refuses: limits that let nothing through.

use crate::vm::DiskLimits;
use crate::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Limits a disk of a VM, whether its guest runs or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitDisk {
    /// Its name within the VM.
    pub disk: String,
    /// They take the place of those that it has; what is not named is not limited.
    #[serde(default)]
    pub limits: DiskLimits,
}

impl LimitDisk {
    /// Refuses limits that let nothing through.
    pub fn check(&self) -> Result<(), ApiError> {
        self.limits.check().map_err(|why| {
            let message = format!("disk '{}': {why}", self.disk.escape_debug());
            ApiError::new(ErrorCode::InvalidRequest, message)
        })
    }
}

/// What was done of one kind since the VM process began to serve the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskWork {
    /// Whose outcome is known.
    pub requests: u64,
    /// Read, written or erased by them.
    pub bytes: u64,
    /// Of them, those that failed.
    pub failed: u64,
    /// How long they took, all together: from when they were taken from the guest until their outcome was known.
    pub seconds: f64,
}

/// What a disk does in a second, over the time since somebody asked before, a second at least.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskRate {
    pub reads: f64,
    pub read_bytes: f64,
    pub writes: f64,
    pub written_bytes: f64,
    /// How long a read or write takes in the mean, ms; none where there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_ms: Option<f64>,
}

/// What a disk does for its guest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskActivity {
    /// Its name within the VM.
    pub disk: String,
    /// How large its guest sees it, bytes; none where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    pub reads: DiskWork,
    pub writes: DiskWork,
    pub flushes: DiskWork,
    /// Discards and writes of zeroes.
    pub erasures: DiskWork,
    /// Per second.
    pub rate: DiskRate,
}

impl DiskActivity {
    /// Each kind of work by its name.
    pub fn kinds(&self) -> [(&'static str, &DiskWork); 4] {
        [
            ("read", &self.reads),
            ("write", &self.writes),
            ("flush", &self.flushes),
            ("erase", &self.erasures),
        ]
    }

    /// Of all kinds together.
    pub fn failed(&self) -> u64 {
        let failed = self.kinds().into_iter().map(|(_, work)| work.failed);
        failed.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_nothing_is_refused_with_the_disk_s_name() {
        let of = |iops| LimitDisk {
            disk: "root".into(),
            limits: DiskLimits {
                iops: Some(iops),
                mib_per_s: None,
            },
        };
        let refused = of(0).check().unwrap_err().message;
        assert!(
            refused.contains("disk 'root': a limit of 0 iops"),
            "{refused}"
        );
        assert!(of(1).check().is_ok());
    }
}
