//! Which VM's QEMU runs as which user, on every host the same.
//!
//! Owns the number of the next one, in the database; the ids lie in the VMs' descriptions and travel with them. One that was
//! given out is not given to another VM before all of them were given out once, also after its VM was deleted: a VM that is
//! described anew under that name gets it again, since the images that a migration made are that user's alone. An older copy
//! of the database knows those that VMs have, by what hosts tell, and passes over those that were given out since. Refuses:
//! an id that a person chose.

use crate::app::App;
use crate::error::{ControllerError, Outcome, refuse};
use crate::store::Store;
use godwit_types::vm::UIDS;
use godwit_types::{ErrorCode, VmSpec};
use sqlx::{query, query_scalar};
use std::collections::BTreeSet;

/// So many ids are at least between the first ones of two epochs,
const IN_EPOCH: u32 = 1 << 16;
/// and so many epochs have one of their own.
const EPOCHS: u32 = (*UIDS.end() - *UIDS.start()) / IN_EPOCH;

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

/// Gives a VM that is described the id that the VM of this name had which was deleted last, unless another one has it by now: else one that no other has.
pub async fn give_again(app: &App, spec: &mut VmSpec) -> Outcome<()> {
    let former = app.store.former_vm(&spec.name).await?;
    spec.uid = former.and_then(|former| former.uid);
    give(app, spec).await
}

/// Gives a VM that is off an id that no other VM has, unless it has one. Nobody else may give any out meanwhile.
pub async fn give(app: &App, spec: &mut VmSpec) -> Outcome<()> {
    let taken = app.state().uids_of_others(&spec.name);
    if spec
        .uid
        .is_some_and(|uid| UIDS.contains(&uid) && !taken.contains(&uid))
    {
        return Ok(());
    }
    let epoch = app.state().book.stamp().epoch;
    let next = app.store.next_uid().await?;
    let Some(uid) = free(next.max(first_of(epoch).into()), &taken) else {
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
}

/// From which on ids are given out in this epoch. Those that only a lost database had given out come before it.
fn first_of(epoch: u64) -> u32 {
    let takeovers = epoch.saturating_sub(1) % u64::from(EPOCHS);
    *UIDS.start() + takeovers as u32 * IN_EPOCH
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

    #[test]
    fn the_first_one_is_free_again_after_the_last() {
        let (first, last) = (*UIDS.start(), *UIDS.end());
        assert_eq!(free(first.into(), &[first].into()), Some(first + 1));
        assert_eq!(free(last.into(), &[].into()), Some(last));
        assert_eq!(free(i64::from(last) + 1, &[].into()), Some(first));
        assert_eq!(free(last.into(), &[last, first].into()), Some(first + 1));
        assert_eq!(free(-1, &[].into()), Some(first));
    }

    #[test]
    fn a_takeover_passes_over_what_the_lost_database_may_have_given_out() {
        let first = *UIDS.start();
        assert_eq!([0, 1, 2].map(first_of), [first, first, first + IN_EPOCH]);
        for epoch in [u64::from(EPOCHS), u64::from(EPOCHS) + 1, u64::MAX] {
            assert!(UIDS.contains(&first_of(epoch)), "{epoch}");
        }
    }
}
