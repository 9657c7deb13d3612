//! How much room each datastore of this host has, looked at beside whoever asks.
//!
//! Owns what was found last; what was found long ago is told no more. Refuses: to have anybody wait for storage.

use crate::looking::look;
use godwit_qemu::device::{DeviceRoom, device_room};
use godwit_qemu::disk_place::room_of;
use godwit_types::DatastoreName;
use godwit_types::datastore::{Datastore, DatastoreRoom, Datastores, is_device_path};
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
pub(crate) struct Rooms(Arc<Mutex<Seen>>);

/// When each was looked at last, and what was found.
type Seen = BTreeMap<DatastoreName, (Instant, Option<DatastoreRoom>)>;

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
        let seen = lock(&self.0).get(name).copied();
        if seen.is_none_or(|(at, _)| at.elapsed() >= LOOK_EACH) {
            let (all, name, path) = (Arc::clone(&self.0), name.clone(), store.path.clone());
            let work = move || {
                let room = match is_device_path(&path) {
                    true => device_room(&path).ok().map(said_of_device),
                    false => statvfs(Path::new(&path)).ok().map(|found| said(&found)),
                };
                lock(&all).insert(name, (Instant::now(), room));
            };
            // Where nobody can look now, the next one who asks begins it.
            let _ = look(&store.path, Duration::ZERO, work);
        }
        let (at, room) = seen?;
        room.filter(|_| at.elapsed() < TOLD_FOR)
    }
}

fn lock(all: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a file system has, as people are told.
pub(crate) fn said(found: &StatVfs) -> DatastoreRoom {
    DatastoreRoom {
        free_mib: room_of(found) >> 20,
        total_mib: found.f_blocks.saturating_mul(found.f_frsize) >> 20,
    }
}

/// The same of a device: it takes one disk or none.
fn said_of_device(room: DeviceRoom) -> DatastoreRoom {
    let total_mib = room.bytes >> 20;
    DatastoreRoom {
        free_mib: if room.taken.is_none() { total_mib } else { 0 },
        total_mib,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::looking::Looking;

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
        let looked = || lock(&rooms.0).len() == stores.len();
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
        let (name, path) = (DatastoreName::new("hangs").unwrap(), "/a/store/that/hangs");
        let stores = Datastores::from([(name.clone(), Datastore::new(path, false))]);
        let rooms = Rooms::default();
        let Some(long_ago) = Instant::now().checked_sub(2 * TOLD_FOR) else {
            println!("skipped: this machine was started just now");
            return;
        };
        let room = DatastoreRoom {
            free_mib: 1,
            total_mib: 2,
        };
        let _hangs = Looking::begin(path, Duration::ZERO).unwrap();
        lock(&rooms.0).insert(name.clone(), (long_ago, Some(room)));
        assert_eq!(rooms.of(&stores), stores);
        let still = lock(&rooms.0)[&name];
        assert_eq!(still, (long_ago, Some(room)), "nobody else looked");
    }
}
