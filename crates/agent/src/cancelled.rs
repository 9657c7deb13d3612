//! Migrations that were cancelled: none of them begins here, also where the cancel came first.
//!
//! Owns `cancelled.json` in the state directory, so that a cancel outlives this agent and every VM process. Refuses: to say
//! that a migration is cancelled before that is durable; to keep more than [`KEPT`], the oldest gives way.

use crate::records::stored;
use godwit_store::{load_json, save_json};
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Cancelled migrations that are remembered. A controller tells a host of a migration within minutes, or never.
const KEPT: usize = 256;
/// In the state directory.
const FILE: &str = "cancelled.json";

/// The cancelled migrations, newest first.
pub(crate) struct Cancelled {
    path: PathBuf,
    ids: Mutex<VecDeque<MigrationId>>,
}

impl Cancelled {
    /// What was kept. A file that cannot be read is begun anew: what it said was about migrations of long ago.
    pub(crate) fn open(state_dir: &Path) -> Self {
        let path = state_dir.join(FILE);
        let kept = load_json(&path).unwrap_or_else(|error| {
            tracing::warn!(%error, "the list of cancelled migrations is begun anew");
            None
        });
        Self {
            path,
            ids: Mutex::new(kept.unwrap_or_default()),
        }
    }

    /// From here on the migration does not begin on this host.
    pub(crate) fn add(&self, id: &MigrationId) -> Result<(), ApiError> {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if ids.contains(id) {
            return Ok(());
        }
        let mut more = ids.clone();
        more.push_front(id.clone());
        more.truncate(KEPT);
        save_json(&self.path, &more).map_err(stored)?;
        *ids = more;
        Ok(())
    }

    /// Refuses a cancelled migration.
    pub(crate) fn check(&self, id: &MigrationId, host: &HostName) -> Result<(), ApiError> {
        let ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if !ids.contains(id) {
            return Ok(());
        }
        let message = format!("migration '{id}' does not begin on host '{host}': it was cancelled");
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_outlives_the_agent_and_the_oldest_gives_way() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostName::new("a").unwrap();
        let id = |number: usize| MigrationId::new(format!("m{number}")).unwrap();
        for number in 0..=KEPT {
            Cancelled::open(dir.path()).add(&id(number)).unwrap();
        }
        let cancelled = Cancelled::open(dir.path());
        let refused = cancelled.check(&id(KEPT), &host).unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(cancelled.check(&id(1), &host).is_err());
        assert!(cancelled.check(&id(0), &host).is_ok());
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(Cancelled::open(dir.path()).check(&id(1), &host).is_ok());
    }
}
