//! Disks that are made larger.
//!
//! Plain data. Refuses: a size that no disk has.

use crate::vm::DISK_GIB_MAX;
use crate::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Makes a disk of a VM larger, whether its guest runs or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeDisk {
    /// Its name within the VM.
    pub disk: String,
    /// GiB that it is to have. A block device has the size that it has: that one, in whole GiB.
    pub size_gib: u64,
}

impl ResizeDisk {
    pub fn bytes(&self) -> u64 {
        self.size_gib.saturating_mul(1 << 30)
    }

    /// Refuses a size that no disk has.
    pub fn check(&self) -> Result<(), ApiError> {
        let (disk, gib) = (&self.disk, self.size_gib);
        match (1..=DISK_GIB_MAX).contains(&gib) {
            true => Ok(()),
            false => Err(ApiError::new(
                ErrorCode::InvalidRequest,
                format!("disk '{disk}' cannot have {gib} GiB: a disk has 1 to {DISK_GIB_MAX} GiB"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_disk_has_are_refused() {
        let of = |size_gib| ResizeDisk {
            disk: "root".into(),
            size_gib,
        };
        for wrong in [0, DISK_GIB_MAX + 1, u64::MAX] {
            let refused = of(wrong).check().unwrap_err().message;
            assert!(refused.contains("a disk has 1 to 65536"), "{refused}");
        }
        assert!(of(1).check().is_ok() && of(DISK_GIB_MAX).check().is_ok());
        assert_eq!(of(20).bytes(), 20 << 30);
        assert_eq!(of(u64::MAX).bytes(), u64::MAX);
    }
}
