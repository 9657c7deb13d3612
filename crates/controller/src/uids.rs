//! Which VM's QEMU runs as which user, on every host the same.
//!
//! Owns the number of the next one, in the database; the ids lie in the VMs' descriptions and travel with them. One that
//! was given out is not given to another VM, also after its VM was deleted; an older copy of the database knows those that
//! VMs have, by what hosts tell. Refuses: an id that a person chose.

use crate::app::App;
use crate::error::{Outcome, refuse};
use godwit_types::vm::UIDS;
use godwit_types::{ErrorCode, VmSpec};
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
}
