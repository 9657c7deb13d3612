//! Small files that were read before and have not been replaced since: a list reads those of every VM, and most of them
//! never change.
//!
//! Owns what was read, in memory. A file is the same while its inode, size and times are; whoever writes one of these
//! renames a new file into its place. Refuses: to remember a failure, a file that is not there, and one that was written
//! a moment ago, whose next version could bear the same times.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// How old a file is that is remembered.
const OLD: Duration = Duration::from_secs(2);

/// What tells a file from the one that takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// What files said, by their paths as they are written: comparing paths by their components took longer than reading.
#[derive(Debug)]
pub(crate) struct Seen<T>(Mutex<HashMap<OsString, (Identity, T)>>);

impl<T> Default for Seen<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Seen<T> {
    fn lock(&self) -> MutexGuard<'_, HashMap<OsString, (Identity, T)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a file says: as it was `read` before, if it is still the same.
    pub(crate) fn read<E>(
        &self,
        path: &Path,
        read: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let now = identity(path);
        if let (Some((now, _)), Some((then, known))) = (&now, self.lock().get(path.as_os_str()))
            && now == then
        {
            return Ok(Some(known.clone()));
        }
        let found = read()?;
        match (&found, now) {
            (Some(found), Some((now, true))) => {
                let path = path.as_os_str().to_owned();
                self.lock().insert(path, (now, found.clone()));
            }
            _ => drop(self.lock().remove(path.as_os_str())),
        }
        Ok(found)
    }
}

/// A file's identity, and whether it is old.
fn identity(path: &Path) -> Option<(Identity, bool)> {
    let metadata = std::fs::metadata(path).ok()?;
    let age = SystemTime::now().duration_since(metadata.modified().ok()?);
    let identity = Identity {
        inode: metadata.ino(),
        size: metadata.size(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    };
    Some((identity, age.is_ok_and(|age| age > OLD)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::fs::File;

    /// Writes a file that was last written so long ago.
    fn write(path: &Path, text: &str, age: Duration) {
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, text).unwrap();
        let file = File::options().write(true).open(&fresh).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        std::fs::rename(fresh, path).unwrap();
    }

    #[test]
    fn an_old_file_is_read_once_until_another_takes_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let (seen, reads) = (Seen::default(), Cell::new(0));
        let read = || {
            seen.read(&path, || {
                reads.set(reads.get() + 1);
                match std::fs::read_to_string(&path) {
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    text => text.map(Some),
                }
            })
            .unwrap()
        };
        let old = OLD * 2;
        write(&path, "one", old);
        assert_eq!([read(), read()], [Some("one".into()), Some("one".into())]);
        assert_eq!(reads.get(), 1);
        write(&path, "two", old);
        assert_eq!([read(), read()], [Some("two".into()), Some("two".into())]);
        assert_eq!(reads.get(), 2);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(), None);
        write(&path, "new", Duration::ZERO);
        assert_eq!([read(), read()], [Some("new".into()), Some("new".into())]);
        assert_eq!(reads.get(), 5, "a file that was just written is read again");
    }
}
