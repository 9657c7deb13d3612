//! Images of disks of a VM that is cloned: filled under a name of their own, and named once the VM is described.
//!
//! An image is copied as any other is made, and gets the name of its **part** ([`clone_part_of`]) once all of it is there, durably. Only
//! then the clone is described, and only then the part becomes the image. So no image has its own name of which nobody knows, and whoever dies before
//! the description leaves parts alone, which the next attempt removes. An image bears no records of the disk that it was copied from, since those are no
//! part of its content, and is the common user's, as each that is made. Owns nothing. Refuses: a path where something is, and parts that are gone.

use super::mark::{borne_by, mark_of};
use super::{Maker, Place, Progress, finish};
use crate::disk::{must_be_no_devices, open_looked_at, rename_to_free};
use godwit_blockio::{Chain, flatten};
use godwit_types::vm::{DiskSpec, clone_part_of};
use rustix::fs::{AtFlags, OFlags, renameat, statat, unlinkat};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::Ordering;

impl Maker<'_> {
    /// Has the part of a clone's disk hold all that a chain of images does, durably. Why not is a part of a sentence.
    pub fn copy(
        &self,
        disk: &DiskSpec,
        chain: Chain<'_>,
        progress: &Progress,
    ) -> Result<(), String> {
        let (path, mark) = (Path::new(&disk.path), mark_of(self.vm, disk));
        let (place, fresh) = self.as_common(|| self.begin_part(path))?;
        progress.total.store(chain.used, Ordering::Relaxed);
        let filled = fill(chain, (&fresh, path), progress);
        self.as_common(|| {
            let made = filled
                .and_then(|()| {
                    finish(&fresh, &mark)
                        .map_err(|error| format!("{} cannot be made: {error}", path.display()))
                })
                .and_then(|()| place.keep_part(path, &fresh));
            if made.is_err() {
                place.discard();
            }
            made
        })
    }

    /// Removes what was copied for a disk that no VM is to have. One that cannot be removed is removed by whoever copies there next.
    pub fn remove_part(&self, disk: &DiskSpec) {
        let path = Path::new(&disk.path);
        let removed = self.as_common(|| {
            Place::open(path, self.reserved, self.user)?.remove_part();
            Ok(())
        });
        if let Err(why) = removed {
            tracing::warn!(
                disk = disk.name,
                why,
                "what was copied for a clone is not removed"
            );
        }
    }

    fn begin_part(&self, path: &Path) -> Result<(Place, File), String> {
        must_be_no_devices(path).map_err(|error| error.to_string())?;
        let place = Place::open(path, self.reserved, self.user)?;
        match statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => place.must_not_be_described(path)?,
            Err(errno) => return Err(format!("{} cannot be looked at: {errno}", path.display())),
            Ok(_) => {
                return Err(format!(
                    "{} exists already: give the clone another name, or move that file away",
                    path.display()
                ));
            }
        }
        place.must_suit(path)?;
        // Whoever copied it died before the clone was described, or nobody asked for it.
        place.remove_part();
        let fresh = place.begin(path)?;
        Ok((place, fresh))
    }
}

fn fill(
    chain: Chain<'_>,
    (fresh, path): (&File, &Path),
    progress: &Progress,
) -> Result<(), String> {
    let whole = flatten(chain, (fresh, path), |done| {
        progress.done.store(done, Ordering::Relaxed);
        progress.total.fetch_max(done, Ordering::Relaxed);
        !progress.stop.load(Ordering::Relaxed)
    });
    match whole {
        Ok(true) => Ok(()),
        Ok(false) => Err("it was called off".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl Place {
    fn part(&self) -> OsString {
        // A name in the directory of this place, and no path: so is what comes of it.
        let name = self.name.to_string_lossy();
        let part = clone_part_of(&name);
        OsString::from(part.trim_start_matches('/'))
    }

    fn remove_part(&self) {
        let _ = unlinkat(&self.dir, self.part(), AtFlags::empty());
    }

    /// Gives what was filled the name of the part, durably.
    fn keep_part(&self, path: &Path, fresh: &File) -> Result<(), String> {
        let failed = |why: &dyn std::fmt::Display| {
            format!("{} cannot be made durable: {why}", path.display())
        };
        renameat(&self.dir, &self.fresh, &self.dir, self.part()).map_err(|errno| failed(&errno))?;
        // An XFS that was shut down tells of a lost name only by the file.
        let synced = self.dir.sync_all().and_then(|()| fresh.sync_all());
        synced.map_err(|error| failed(&error))
    }

    /// Has the part become the image, durably.
    pub(super) fn name_part(&self, path: &Path, mark: &str) -> Result<(), String> {
        let part = self.part();
        let found = open_looked_at(
            &self.dir,
            Path::new(&part),
            OFlags::RDONLY | OFlags::NOFOLLOW,
        );
        let found = found.ok();
        let found = found.filter(|found| self.is_by_this_host(found) && bears(found, mark));
        let Some(found) = found else {
            return Err(format!(
                "what was copied for it is not on this host (as {} beside {}): start the VM with --on where it was cloned; if that is this host, delete it, which removes no image, and clone the other one again",
                part.to_string_lossy(),
                path.display()
            ));
        };
        let name = Path::new(&self.name);
        let named = rename_to_free(self.dir.as_fd(), Path::new(&part), name);
        named.map_err(|errno| match errno {
            Errno::EXIST => format!(
                "{} exists already and was not made for this disk: move that file away",
                path.display()
            ),
            errno => format!("{} cannot be made: {errno}", path.display()),
        })?;
        let synced = self.dir.sync_all().and_then(|()| found.sync_all());
        synced.map_err(|error| format!("{} cannot be made durable: {error}", path.display()))
    }
}

/// Whether a part was copied for this disk; one on storage that keeps no attributes was, by its name.
fn bears(part: &File, mark: &str) -> bool {
    match borne_by(part) {
        Ok(borne) => borne == mark.as_bytes(),
        Err(errno) => errno == Errno::OPNOTSUPP,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reserved::Reserved;
    use crate::user::User;
    use crate::whose::tests::say_whose;
    use godwit_blockio::holder;
    use godwit_types::VmName;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
    use std::path::PathBuf;

    struct Here {
        dir: tempfile::TempDir,
        vm: VmName,
        base: File,
    }

    impl Here {
        fn new() -> Self {
            // Not the default place, which may be a tmpfs.
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let mut options = File::options();
            let options = options.read(true).write(true).create_new(true);
            let base = options.open(dir.path().join("web-root.raw")).unwrap();
            base.set_len(8 << 20).unwrap();
            base.write_all_at(&[7; 4096], 4096).unwrap();
            Self {
                vm: VmName::new("web2").unwrap(),
                dir,
                base,
            }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn disk(&self) -> DiskSpec {
            let path = self.at("web2-root.raw").to_str().unwrap().to_owned();
            DiskSpec {
                from: Some(clone_part_of(&path)),
                ..DiskSpec::new("root", path)
            }
        }

        fn by<R>(&self, work: impl FnOnce(&Maker<'_>) -> R) -> R {
            let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
            let user = User {
                uid: uid.as_raw(),
                gid: gid.as_raw(),
            };
            work(&Maker {
                vm: &self.vm,
                user,
                reserved: &Reserved::default(),
                stores: &[],
            })
        }

        fn copy(&self, progress: &Progress) -> Result<(), String> {
            let chain = Chain {
                base: &self.base,
                deltas: &[],
                bytes: 8 << 20,
                used: self.base.metadata().unwrap().blocks() * 512,
            };
            self.by(|maker| maker.copy(&self.disk(), chain, progress))
        }

        fn make(&self) -> Result<(), String> {
            self.by(|maker| maker.make(&self.disk(), &Progress::default()))
        }

        fn names(&self) -> Vec<String> {
            let all = std::fs::read_dir(self.dir.path()).unwrap();
            let names = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.filter(|name| name.contains("web2")).collect();
            names.sort();
            names
        }
    }

    const PART: &str = ".web2-root.raw.godwit-clone";

    #[test]
    fn a_part_is_no_image_before_it_is_named_and_is_named_once() {
        let here = Here::new();
        // What the source says of itself is no part of its content.
        say_whose(&here.base);
        here.copy(&Progress::default()).unwrap();
        assert_eq!(here.names(), [PART]);
        here.make().unwrap();
        assert_eq!(here.names(), ["web2-root.raw"]);
        let made = File::options()
            .read(true)
            .write(true)
            .open(here.at("web2-root.raw"))
            .unwrap();
        let found = made.metadata().unwrap();
        let mode = found.permissions().mode() & 0o777;
        assert_eq!((found.len(), mode), (8 << 20, 0o660));
        assert!(matches!(holder::read(made.as_fd()), Ok(None)));
        let mut bytes = [0; 2];
        made.read_exact_at(&mut bytes, 4095).unwrap();
        assert_eq!(bytes, [0, 7]);
        // Who named it died before that was told.
        made.write_all_at(b"known", 0).unwrap();
        here.make().unwrap();
        let mut bytes = [0; 5];
        made.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"known");
    }

    #[test]
    fn what_an_earlier_attempt_left_is_not_what_a_later_one_finds() {
        let here = Here::new();
        here.copy(&Progress::default()).unwrap();
        std::fs::write(here.at(".web2-root.raw.godwit-new"), "half").unwrap();
        here.base.write_all_at(&[8; 512], 4096).unwrap();
        here.copy(&Progress::default()).unwrap();
        assert_eq!(here.names(), [PART]);
        let mut byte = [0];
        let part = File::open(here.at(PART)).unwrap();
        part.read_exact_at(&mut byte, 4096).unwrap();
        assert_eq!(byte, [8]);
        here.by(|maker| maker.remove_part(&here.disk()));
        assert!(here.names().is_empty(), "{:?}", here.names());
        let refused = here.make().unwrap_err();
        assert!(refused.contains("is not on this host"), "{refused}");
    }

    #[test]
    fn nothing_is_copied_over_what_is_there_and_nothing_half_made_stays() {
        let here = Here::new();
        std::fs::write(here.at("web2-root.raw"), "somebody's").unwrap();
        let refused = here.copy(&Progress::default()).unwrap_err();
        assert!(refused.contains("exists already"), "{refused}");
        assert_eq!(here.names(), ["web2-root.raw"]);
        std::fs::remove_file(here.at("web2-root.raw")).unwrap();
        here.copy(&Progress::default()).unwrap();
        // It came meanwhile.
        std::fs::write(here.at("web2-root.raw"), "somebody's").unwrap();
        let refused = here.make().unwrap_err();
        assert!(refused.contains("exists already"), "{refused}");
        let kept = std::fs::read(here.at("web2-root.raw")).unwrap();
        assert_eq!(kept, b"somebody's");
    }
}
