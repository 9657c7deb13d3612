//! How much room each datastore of this host has, looked at beside whoever asks.
//!
//! Owns what was found last. A look lasts as long as its storage hangs: each datastore has one thread at most that looks, and
//! what was found long ago is told no more. Refuses: to have anybody wait for storage.

use godwit_qemu::disk_place::room_of;
use godwit_types::DatastoreName;
use godwit_types::datastore::{Datastore, DatastoreRoom, Datastores};
use rustix::fs::{StatVfs, statvfs};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// From this age on what was found is looked for again.
const LOOK_EACH: Duration = Duration::from_secs(5);
/// What is older is not told: the storage may be gone.
const TOLD_FOR: Duration = Duration::from_secs(60);

/// The rooms of all datastores.
#[derive(Debug, Default)]
pub(crate) struct Rooms(Arc<Mutex<BTreeMap<DatastoreName, Seen>>>);

#[derive(Debug, Default)]
struct Seen {
    /// When it was looked at last, and what was found.
    found: Option<(Instant, Option<DatastoreRoom>)>,
    is_looked_at: bool,
}

impl Rooms {
    /// The datastores with the room of each, as far as it is known. Begins another look, whose result the next one who asks gets.
    pub(crate) fn of(&self, stores: &Datastores) -> Datastores {
        let with_room = |(name, store): (&DatastoreName, &Datastore)| {
            let store = Datastore {
                room: self.room(name, store),
                ..store.clone()
            };
            (name.clone(), store)
        };
        stores.iter().map(with_room).collect()
    }

    fn room(&self, name: &DatastoreName, store: &Datastore) -> Option<DatastoreRoom> {
        let mut all = lock(&self.0);
        let seen = all.entry(name.clone()).or_default();
        let is_due = seen.found.is_none_or(|(at, _)| at.elapsed() >= LOOK_EACH);
        if is_due && !seen.is_looked_at {
            seen.is_looked_at = self.look(name, store);
        }
        let (at, room) = seen.found?;
        room.filter(|_| at.elapsed() < TOLD_FOR)
    }

    /// Begins to look; returns whether somebody looks now.
    fn look(&self, name: &DatastoreName, store: &Datastore) -> bool {
        let (all, name, path) = (Arc::clone(&self.0), name.clone(), store.path.clone());
        let work = move || {
            let room = statvfs(Path::new(&path)).ok().map(|found| said(&found));
            let seen = Seen {
                found: Some((Instant::now(), room)),
                is_looked_at: false,
            };
            lock(&all).insert(name, seen);
        };
        let thread = std::thread::Builder::new().name("datastore".into());
        thread.spawn(work).is_ok()
    }
}

fn lock(
    all: &Mutex<BTreeMap<DatastoreName, Seen>>,
) -> MutexGuard<'_, BTreeMap<DatastoreName, Seen>> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a file system has, as people are told.
pub(crate) fn said(found: &StatVfs) -> DatastoreRoom {
    DatastoreRoom {
        free_mib: room_of(found) >> 20,
        total_mib: found.f_blocks.saturating_mul(found.f_frsize) >> 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datastore_is_told_with_its_room_and_one_that_is_gone_without() {
        let dir = tempfile::tempdir().unwrap();
        let name = |name: &str| DatastoreName::new(name).unwrap();
        let path = dir.path().to_str().unwrap();
        let stores = Datastores::from([
            (name("here"), Datastore::new(path, true)),
            (name("gone"), Datastore::new(format!("{path}/gone"), false)),
        ]);
        let rooms = Rooms::default();
        assert_eq!(rooms.of(&stores), stores, "nobody waits for the first look");
        let looked = || lock(&rooms.0).values().all(|seen| seen.found.is_some());
        let until = Instant::now() + Duration::from_secs(60);
        while !looked() {
            assert!(Instant::now() < until, "nobody looks");
            std::thread::yield_now();
        }
        let told = rooms.of(&stores);
        let room = told[&name("here")].room.unwrap();
        assert!(room.total_mib > 0 && room.free_mib <= room.total_mib);
        assert!(told[&name("here")].shared);
        assert_eq!(told[&name("gone")].room, None);
    }

    #[test]
    fn a_datastore_that_hangs_is_looked_at_once_and_not_told_of() {
        let stores = Datastores::from([(
            DatastoreName::new("hangs").unwrap(),
            Datastore::new("/", false),
        )]);
        let rooms = Rooms::default();
        let Some(long_ago) = Instant::now().checked_sub(2 * TOLD_FOR) else {
            println!("skipped: this machine was started just now");
            return;
        };
        let room = DatastoreRoom {
            free_mib: 1,
            total_mib: 2,
        };
        let hangs = Seen {
            found: Some((long_ago, Some(room))),
            is_looked_at: true,
        };
        let name = stores.keys().next().unwrap();
        lock(&rooms.0).insert(name.clone(), hangs);
        assert_eq!(rooms.of(&stores), stores);
        let still = lock(&rooms.0)[name].found;
        assert_eq!(still, Some((long_ago, Some(room))), "nobody else looked");
    }
}
