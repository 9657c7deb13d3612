//! The last word of a side that ends a migration.
//!
//! Owns nothing. Refuses a reason that is longer than what may cross the wire: it is cut.

use godwit_migrate::protocol::{ToDestination, clip_reason};

/// Why a side ends a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Farewell {
    pub reason: String,
    /// A person or a deadline wanted it.
    pub cancelled: bool,
}

impl Farewell {
    /// As the other side hears it.
    pub fn message(&self) -> ToDestination {
        ToDestination::Cancel {
            reason: clip_reason(&self.reason),
            cancelled: self.cancelled,
        }
    }
}
