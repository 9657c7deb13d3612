//! Images of disks of a VM that is cloned: filled under a name of their own, and named once the VM is described.
//!
//! An image is copied as any other is made, and gets the name of its **part** ([`attempt_of`]) once all of it is there, durably. Only
//! then the clone is described, and only then the part becomes the image. So no image has its own name of which nobody knows, and whoever dies before
//! the description leaves parts alone. The name and the mark of a part have the number of the attempt that copied it: two VMs that are cloned under one name
//! never have each other's. What other attempts left goes once this one is described and its part is named, since nobody else is to have the name then; or
//! when the next one begins, if it is as old as [`LEFT_AFTER`]; and never while somebody has it, who locks it. An image bears no records of the disk that it
//! was copied from, since those are no part of its content, and is the common user's, as each that is made. Owns nothing. Refuses: a path where something
//! is, and parts that are gone.

use super::mark::{borne_by, is_of, mark_of};
use super::{Maker, Place, Progress, finish};
use crate::disk::{identity_of_open, must_be_no_devices, open_looked_at, rename_to_free};
use godwit_blockio::{Chain, flatten};
use godwit_types::vm::{DiskSpec, attempt_of};
use rustix::fs::{AtFlags, Dir, FlockOperation, OFlags, flock, renameat, statat, unlinkat};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// What another attempt copied so long ago, and nobody has, is nobody's when the next one begins: the description of its clone takes seconds.
const LEFT_AFTER: Duration = Duration::from_secs(300);

/// What was copied for a disk: nobody takes it for something that was left as long as this is there.
#[derive(Debug)]
pub struct Part(File);

impl Part {
    /// It is waited for from now on.
    pub fn is_waited_for(&self) {
        if let Err(error) = self.0.set_modified(SystemTime::now()) {
            tracing::warn!(%error, "what was copied for a clone does not say when");
        }
    }
}

impl Maker<'_> {
    /// Has the part of a clone's disk hold all that a chain of images does, durably. Why not is a part of a sentence.
    pub fn copy(
        &self,
        disk: &DiskSpec,
        chain: Chain<'_>,
        progress: &Progress,
    ) -> Result<Part, String> {
        let (path, mark) = (Path::new(&disk.path), mark_of(self.vm, disk));
        let part = part_of(disk)?;
        let (place, fresh) = self.as_common(|| self.begin_part(disk))?;
        progress.total.store(chain.used, Ordering::Relaxed);
        let filled = fill(chain, (&fresh, path), progress);
        self.as_common(|| {
            let made = filled
                .and_then(|()| {
                    finish(&fresh, &mark)
                        .map_err(|error| format!("{} cannot be made: {error}", path.display()))
                })
                .and_then(|()| must_bear(&fresh, path, &mark))
                .and_then(|()| place.keep_part((path, part), &fresh));
            if made.is_err() {
                place.discard(&fresh);
            }
            made
        })?;
        Ok(Part(fresh))
    }

    /// Removes what this attempt copied for a disk that no VM is to have. What cannot be removed is removed by a later attempt.
    pub fn remove_part(&self, disk: &DiskSpec) {
        let removed = self.as_common(|| {
            let place = Place::open(Path::new(&disk.path), self.reserved, self.user)?;
            let _ = unlinkat(&place.dir, part_of(disk)?, AtFlags::empty());
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

    fn begin_part(&self, disk: &DiskSpec) -> Result<(Place, File), String> {
        let path = Path::new(&disk.path);
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
        place.remove_left((self, disk), Some(LEFT_AFTER));
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

/// The name of the part in the directory of its image.
fn part_of(disk: &DiskSpec) -> Result<&OsStr, String> {
    let part = disk.from.as_deref().filter(|_| disk.is_cloned());
    let name = part.and_then(|part| Path::new(part).file_name());
    name.ok_or_else(|| format!("{} is described as no disk of a clone", disk.path))
}

impl Place {
    /// Removes what other attempts left for this disk, also for a VM of that name that is there no more. Nobody has it who holds its lock; `age`: and it was
    /// written so long ago.
    pub(super) fn remove_left(
        &self,
        (maker, disk): (&Maker<'_>, &DiskSpec),
        age: Option<Duration>,
    ) {
        let Ok(all) = Dir::read_from(&self.dir) else {
            return;
        };
        for entry in all.flatten() {
            let name = entry.file_name();
            if self.is_left(name, (maker, disk), age) {
                let _ = unlinkat(&self.dir, name, AtFlags::empty());
                tracing::info!(
                    disk = disk.name,
                    "what an earlier attempt to clone a VM left is removed"
                );
            }
        }
    }

    fn is_left(
        &self,
        name: &CStr,
        (maker, disk): (&Maker<'_>, &DiskSpec),
        age: Option<Duration>,
    ) -> bool {
        let own = self.name.to_str().map(|own| format!("/{own}"));
        let (Some(own), Ok(text)) = (own, name.to_str()) else {
            return false;
        };
        let part = format!("/{text}");
        let attempt = attempt_of(&own, &part);
        if attempt.is_none() || attempt == disk.attempt() {
            return false;
        }
        let name = Path::new(OsStr::from_bytes(name.to_bytes()));
        let Ok(found) = open_looked_at(&self.dir, name, OFlags::RDONLY | OFlags::NOFOLLOW) else {
            return false;
        };
        let is_for_it = match borne_by(&found) {
            Ok(borne) => is_of(&borne, maker.vm, disk),
            Err(errno) => errno == Errno::OPNOTSUPP,
        };
        let is_old = age.is_none_or(|age| is_as_old_as(&found, age));
        let is_free = || flock(&found, FlockOperation::NonBlockingLockExclusive).is_ok();
        let is_that = || self.is_file(name.as_os_str(), &found);
        self.is_by_this_host(&found) && is_for_it && is_old && is_free() && is_that()
    }

    /// Whether this name is that of the open file.
    pub(super) fn is_file(&self, name: &OsStr, file: &File) -> bool {
        let found = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW);
        let open = identity_of_open(file);
        found.is_ok_and(|found| open.is_ok_and(|open| open == (found.st_dev, found.st_ino)))
    }

    /// Gives what was filled the name of the part, durably.
    fn keep_part(&self, (path, part): (&Path, &OsStr), fresh: &File) -> Result<(), String> {
        let failed = |why: &dyn std::fmt::Display| {
            format!("{} cannot be made durable: {why}", path.display())
        };
        self.must_be_fresh(path, fresh)?;
        renameat(&self.dir, &self.fresh, &self.dir, part).map_err(|errno| failed(&errno))?;
        // An XFS that was shut down tells of a lost name only by the file.
        let synced = self.dir.sync_all().and_then(|()| fresh.sync_all());
        synced.map_err(|error| failed(&error))
    }

    /// Has the part become the image, durably.
    pub(super) fn name_part(&self, disk: &DiskSpec, mark: &str) -> Result<(), String> {
        let (path, part) = (Path::new(&disk.path), part_of(disk)?);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        let found = open_looked_at(&self.dir, Path::new(part), flags).ok();
        let found = found.filter(|found| self.is_by_this_host(found) && bears(found, mark));
        let Some(found) = found else {
            return Err(format!(
                "what was copied for it is not on this host (as {} beside {}): start the VM with --on where it was cloned; if that is this host, delete it, which removes no image, and clone the other one again",
                part.to_string_lossy(),
                path.display()
            ));
        };
        let name = Path::new(&self.name);
        let named = rename_to_free(self.dir.as_fd(), Path::new(part), name);
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

fn is_as_old_as(file: &File, age: Duration) -> bool {
    let written = file.metadata().and_then(|found| found.modified());
    written.is_ok_and(|written| written.elapsed().is_ok_and(|elapsed| elapsed >= age))
}

/// Nobody could have it be the image otherwise.
fn must_bear(part: &File, path: &Path, mark: &str) -> Result<(), String> {
    match bears(part, mark) {
        true => Ok(()),
        false => Err(format!(
            "{} cannot be made: its file cannot bear the attribute by which it is known whose disk it is: give that directory a shorter path, or use other storage",
            path.display()
        )),
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
    use godwit_types::vm::clone_part_of;
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
            self.disk_of(NUMBER)
        }

        fn disk_of(&self, number: &str) -> DiskSpec {
            let path = self.at("web2-root.raw").to_str().unwrap().to_owned();
            DiskSpec {
                from: Some(clone_part_of(&path, number)),
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

        fn copy(&self, progress: &Progress) -> Result<Part, String> {
            self.copy_for(&self.disk(), progress)
        }

        fn copy_for(&self, disk: &DiskSpec, progress: &Progress) -> Result<Part, String> {
            let chain = Chain {
                base: &self.base,
                deltas: &[],
                bytes: 8 << 20,
                used: self.base.metadata().unwrap().blocks() * 512,
            };
            self.by(|maker| maker.copy(disk, chain, progress))
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

    const NUMBER: &str = "0123456789abcdef0123456789abcdef";
    const OTHER: &str = "fedcba9876543210fedcba9876543210";
    const PART: &str = ".web2-root.raw.0123456789abcdef0123456789abcdef.godwit-clone";
    const OTHER_PART: &str = ".web2-root.raw.fedcba9876543210fedcba9876543210.godwit-clone";

    #[test]
    fn a_part_is_no_image_before_it_is_named_and_is_named_once() {
        let here = Here::new();
        // What the source says of itself is no part of its content.
        say_whose(&here.base);
        drop(here.copy(&Progress::default()).unwrap());
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
        drop(here.copy(&Progress::default()).unwrap());
        std::fs::write(here.at(".web2-root.raw.godwit-new"), "half").unwrap();
        here.base.write_all_at(&[8; 512], 4096).unwrap();
        drop(here.copy(&Progress::default()).unwrap());
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
    fn what_does_not_bear_whose_disk_it_is_is_no_part() {
        let part = tempfile::tempfile_in("/var/tmp").unwrap();
        let path = Path::new("/srv/web2-root.raw");
        let refused = must_bear(&part, path, "web2/root/0/part").unwrap_err();
        assert!(refused.contains("cannot bear the attribute"), "{refused}");
        finish(&part, "web2/root/0/part").unwrap();
        must_bear(&part, path, "web2/root/0/part").unwrap();
    }

    /// Two VMs are cloned under one name at once.
    #[test]
    fn neither_of_two_attempts_has_or_removes_what_the_other_has_copied() {
        let here = Here::new();
        let first = here.copy(&Progress::default()).unwrap();
        here.base.write_all_at(&[8; 512], 4096).unwrap();
        let other = here.disk_of(OTHER);
        drop(here.copy_for(&other, &Progress::default()).unwrap());
        assert_eq!(here.names(), [PART, OTHER_PART]);
        // Neither do they where one of them is broken off.
        here.by(|maker| maker.remove_part(&other));
        assert_eq!(here.names(), [PART]);
        drop(here.copy_for(&other, &Progress::default()).unwrap());
        drop(first);
        here.make().unwrap();
        let made = File::open(here.at("web2-root.raw")).unwrap();
        let mut byte = [0];
        made.read_exact_at(&mut byte, 4096).unwrap();
        assert_eq!(byte, [7], "it is the first one's");
        // Nobody is to have that any more, since the VM is described with the first one's.
        assert_eq!(here.names(), ["web2-root.raw"]);
    }

    #[test]
    fn what_was_left_goes_with_the_next_attempt_once_it_is_old_and_nobody_has_it() {
        let here = Here::new();
        let first = here.copy(&Progress::default()).unwrap();
        let age = |part: &File| {
            let before = SystemTime::now() - LEFT_AFTER - Duration::from_secs(60);
            part.set_modified(before).unwrap();
        };
        let other = here.disk_of(OTHER);
        let again = || drop(here.copy_for(&other, &Progress::default()).unwrap());
        age(&first.0);
        again();
        assert_eq!(here.names(), [PART, OTHER_PART], "somebody has it");
        first.is_waited_for();
        drop(first);
        again();
        assert_eq!(here.names(), [PART, OTHER_PART], "it is young");
        let left = File::options().write(true).open(here.at(PART)).unwrap();
        age(&left);
        again();
        assert_eq!(here.names(), [OTHER_PART]);
    }

    #[test]
    fn nothing_is_copied_over_what_is_there_and_nothing_half_made_stays() {
        let here = Here::new();
        std::fs::write(here.at("web2-root.raw"), "somebody's").unwrap();
        let refused = here.copy(&Progress::default()).unwrap_err();
        assert!(refused.contains("exists already"), "{refused}");
        assert_eq!(here.names(), ["web2-root.raw"]);
        std::fs::remove_file(here.at("web2-root.raw")).unwrap();
        drop(here.copy(&Progress::default()).unwrap());
        // It came meanwhile.
        std::fs::write(here.at("web2-root.raw"), "somebody's").unwrap();
        let refused = here.make().unwrap_err();
        assert!(refused.contains("exists already"), "{refused}");
        let kept = std::fs::read(here.at("web2-root.raw")).unwrap();
        assert_eq!(kept, b"somebody's");
    }
}
