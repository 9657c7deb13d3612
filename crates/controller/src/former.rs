//! VMs that were deleted after they had run: of which user their images are, and which host had the newest.
//!
//! A VM that is described anew under such a name goes on from these images. Owns the table `former_vms`; a later deletion replaces a
//! row, and nothing else does. Refuses nothing.

use crate::error::ControllerError;
use crate::store::Store;
use godwit_types::{HostName, VmName};
use sqlx::{SqliteConnection, query, query_as};

/// What is known of one when it is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Former {
    /// Of its QEMU; none of one of before there were any.
    pub uid: Option<u32>,
    /// Where it ran last; none where that was removed from the site.
    pub host: Option<HostName>,
}

impl Store {
    /// The VM of this name that was deleted last; none where none had run.
    pub async fn former_vm(&self, name: &VmName) -> Result<Option<Former>, ControllerError> {
        let sql = "SELECT uid, host FROM former_vms WHERE vm = ?";
        let row: Option<(Option<u32>, Option<String>)> = query_as(sql)
            .bind(name.as_str())
            .fetch_optional(&self.pool)
            .await?;
        // What is no name is no host that is in the site.
        Ok(row.map(|(uid, host)| Former {
            uid,
            host: host.and_then(|host| HostName::new(&host).ok()),
        }))
    }
}

/// Notes one that is deleted. One that never ran, of which nothing is known, leaves what is known of the one before it.
pub async fn keep(
    database: &mut SqliteConnection,
    name: &VmName,
    former: Option<&Former>,
) -> Result<(), sqlx::Error> {
    let Some(Former { uid, host }) = former else {
        return Ok(());
    };
    query("INSERT OR REPLACE INTO former_vms (vm, uid, host) VALUES (?, ?, ?)")
        .bind(name.as_str())
        .bind(uid)
        .bind(host.as_ref().map(HostName::as_str))
        .execute(database)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It got another user's id, and could not open the image that a migration had made for the one before.
    #[tokio::test]
    async fn what_a_deleted_vm_had_is_known_until_one_of_its_name_that_ran_is_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("controller.db");
        let store = Store::open(&path, true).await.unwrap();
        let name = VmName::new("web").unwrap();
        assert_eq!(store.former_vm(&name).await.unwrap(), None);
        let of = |uid, host: Option<&str>| Former {
            uid,
            host: host.map(|host| HostName::new(host).unwrap()),
        };
        let (first, second) = (of(Some(7), Some("a")), of(None, None));
        for (deleted, known) in [
            (Some(&first), &first),
            (None, &first),
            (Some(&second), &second),
        ] {
            store.delete_vm(&name, deleted, &[]).await.unwrap();
            assert_eq!(store.former_vm(&name).await.unwrap().as_ref(), Some(known));
        }
        let other = VmName::new("web2").unwrap();
        assert_eq!(store.former_vm(&other).await.unwrap(), None);
    }
}
