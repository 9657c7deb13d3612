//! Which VM's QEMU runs as which user, on every host the same.
//!
//! Owns the number of the next one and those of deleted VMs, in the database (the tables `uids` and `former_uids`); the ids lie in the VMs'
//! descriptions and travel with them. One that was given out is not given to another VM, also after its VM was deleted: a VM that is
//! described anew under that name gets it again, since the images that a migration made are that user's alone. An older copy of
//! the database knows those that VMs have, by what hosts tell. Refuses: an id that a person chose.

use crate::app::App;
use crate::error::{ControllerError, Outcome, refuse};
use crate::store::Store;
use godwit_types::vm::UIDS;
use godwit_types::{ErrorCode, VmName, VmSpec};
use sqlx::{SqliteConnection, query, query_scalar};
use std::collections::BTreeSet;

/// Gives a new description the id that the VM has: a person may repeat it, not choose it.
pub fn keep(spec: &mut VmSpec, before: Option<&VmSpec>) -> Outcome<()> {
    let had = before.and_then(|before| before.uid);
    match spec.uid {
        Some(uid) if had != Some(uid) => refuse(
            ErrorCode::InvalidVm,
            format!(
                "uid = {uid} of VM {} is not valid: the controller gives each VM one that no other has, so leave it out",
                spec.name
            ),
        ),
        _ => {
            spec.uid = had;
            Ok(())
        }
    }
}

/// Gives a VM that is off an id that no other VM has, unless it has one. Nobody else may give any out meanwhile.
pub async fn give(app: &App, spec: &mut VmSpec) -> Outcome<()> {
    let taken = app.state().uids_of_others(&spec.name);
    if spec.uid.is_some_and(|uid| !taken.contains(&uid)) {
        return Ok(());
    }
    let is_free = |uid: &u32| UIDS.contains(uid) && !taken.contains(uid);
    if let Some(former) = app.store.former_uid(&spec.name).await?.filter(is_free) {
        spec.uid = Some(former);
        return Ok(());
    }
    let next = app.store.next_uid().await?;
    let Some(uid) = free(next, &taken) else {
        return refuse(
            ErrorCode::InvalidVm,
            format!("no user id is free for VM {}: delete VMs", spec.name),
        );
    };
    app.store
        .uids_go_on_at(i64::from(uid).saturating_add(1))
        .await?;
    spec.uid = Some(uid);
    Ok(())
}

impl Store {
    async fn next_uid(&self) -> Result<i64, ControllerError> {
        Ok(query_scalar("SELECT next FROM uids")
            .fetch_one(&self.pool)
            .await?)
    }

    /// Noted before the one before it is used.
    async fn uids_go_on_at(&self, next: i64) -> Result<(), ControllerError> {
        query("UPDATE uids SET next = ?")
            .bind(next)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// The id of the VM that had this name last.
    async fn former_uid(&self, name: &VmName) -> Result<Option<u32>, ControllerError> {
        Ok(query_scalar("SELECT uid FROM former_uids WHERE vm = ?")
            .bind(name.as_str())
            .fetch_optional(&self.pool)
            .await?)
    }
}

/// Of a VM that is deleted. None, of one that never ran, leaves the id of the one before it.
pub async fn keep_former(
    database: &mut SqliteConnection,
    name: &VmName,
    uid: Option<u32>,
) -> Result<(), sqlx::Error> {
    let Some(uid) = uid else { return Ok(()) };
    query("INSERT OR REPLACE INTO former_uids (vm, uid) VALUES (?, ?)")
        .bind(name.as_str())
        .bind(uid)
        .execute(database)
        .await?;
    Ok(())
}

/// The first free one from `next` on; after the last come those before it.
fn free(next: i64, taken: &BTreeSet<u32>) -> Option<u32> {
    let next = u32::try_from(next).ok().filter(|next| UIDS.contains(next));
    let next = next.unwrap_or(*UIDS.start());
    let mut all = (next..=*UIDS.end()).chain(*UIDS.start()..next);
    all.find(|uid| !taken.contains(uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It got another user's id, and could not open the image that a migration had made for the one before.
    #[tokio::test]
    async fn a_vm_that_is_described_anew_is_known_by_the_id_that_its_images_have() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("controller.db");
        let store = Store::open(&path, true).await.unwrap();
        let name = VmName::new("web").unwrap();
        assert_eq!(store.former_uid(&name).await.unwrap(), None);
        let first = *UIDS.start();
        for (deleted, known) in [
            (Some(first), first),
            (Some(first + 7), first + 7),
            (None, first + 7),
        ] {
            store.delete_vm(&name, deleted, &[]).await.unwrap();
            assert_eq!(store.former_uid(&name).await.unwrap(), Some(known));
        }
        let other = VmName::new("web2").unwrap();
        assert_eq!(store.former_uid(&other).await.unwrap(), None);
    }

    #[test]
    fn the_first_one_is_free_again_after_the_last() {
        let (first, last) = (*UIDS.start(), *UIDS.end());
        assert_eq!(free(first.into(), &[first].into()), Some(first + 1));
        assert_eq!(free(last.into(), &[].into()), Some(last));
        assert_eq!(free(i64::from(last) + 1, &[].into()), Some(first));
        assert_eq!(free(last.into(), &[last, first].into()), Some(first + 1));
        assert_eq!(free(-1, &[].into()), Some(first));
    }
}
