//! Images of disks that are made: for those that come with a migration, and for those that move to another place of this host.
//!
//! Part of [`Served`]. Owns nothing. Refuses: a place that is taken, and a disk that is larger than any may be.

use super::came::{Source, put_aside, unmake};
use super::images::arriving_path;
use super::served::{Made, Served};
use crate::adoption::lock;
use crate::hypervisor::{common_user, reserved};
use godwit_qemu::disk::{identity_of_open, must_be_free};
use godwit_qemu::user::{self, User};
use godwit_types::ApiError;
use godwit_types::datastore::is_device_path;
use godwit_types::migration::MigrationSpec;
use godwit_types::vm::{DiskSpec, check_disk_bytes};
use std::fs::File;
use std::path::Path;

impl Served {
    /// Makes the images that are to be filled. Written down before: what a process that dies leaves is removed by the next.
    pub(super) fn make_those_that_come(&self, migration: &MigrationSpec) -> Result<Made, ApiError> {
        lock(&self.announced).clone_from(&migration.disks);
        // What is written next would forget what has no end yet.
        put_aside(&self.paths, Source::Gone, None).must_be_over()?;
        self.save()?;
        let made = self.make_all(migration);
        if made.is_err() {
            unmake(&self.paths, &migration.id);
        }
        made
    }

    fn make_all(&self, migration: &MigrationSpec) -> Result<Made, ApiError> {
        let (what, mut made) = (self.what(), Made::new());
        for spec in what.disks.iter().filter(|disk| disk.goes_along()) {
            let named = migration.disks.iter().find(|named| named.name == spec.name);
            let named = named
                .ok_or_else(|| self.refused(spec, &"the migration does not say how large it is"))?;
            check_disk_bytes(named.bytes).map_err(|why| self.refused(spec, &why))?;
            if is_device_path(&spec.path) {
                let file = self.make_arriving(spec, (&migration.id, named.bytes))?;
                made.insert(spec.name.clone(), file);
                continue;
            }
            must_be_free(Path::new(&spec.path)).map_err(|why| self.refused(spec, &why))?;
            let beside = DiskSpec {
                path: arriving_path(&spec.path, &migration.id),
                ..spec.clone()
            };
            made.insert(spec.name.clone(), self.make(&beside, named.bytes)?);
        }
        Ok(made)
    }

    /// Makes an image with the rights of QEMU's user. Who opens it by its path compares it with this very file ([`Self::open`]): whoever
    /// owns the directory may have put another one there.
    pub(super) fn make(&self, spec: &DiskSpec, bytes: u64) -> Result<File, ApiError> {
        let what = self.what();
        let owner = User {
            uid: what.uid,
            gid: what.gid,
        };
        let reserved = reserved(&self.config);
        let common = common_user(&self.config, &reserved);
        user::make_disk(common, &self.config.vm, spec, bytes, owner).map(File::from)
    }

    /// Refuses another file than the one that was made, which is open still: else its number could be another file's.
    pub(super) fn must_be(
        &self,
        made: &File,
        spec: &DiskSpec,
        found: &File,
    ) -> Result<(), ApiError> {
        let of = |file| identity_of_open(file).map_err(|error| self.refused(spec, &error));
        match of(made)? == of(found)? {
            true => Ok(()),
            false => Err(self.refused(
                spec,
                &"another file is where its image was made just now: see who may write into that directory",
            )),
        }
    }
}
