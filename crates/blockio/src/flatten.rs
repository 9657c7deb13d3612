//! All that a chain of images holds, as one raw image: for a disk of a VM that is cloned.
//!
//! Who owns the state: whoever has the chain, in which nothing is written meanwhile that this content is made of, and the new file, which nobody
//! else has. What was filled is durable only once its owner makes it so. Refuses: to fill a file system to its end, and deltas of another length.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use godwit_delta::MOVE_MAX;
use rustix::fs::ioctl_ficlone;

use crate::delta::{Delta, Target, merge};
use crate::kept_room::KeptRoom;
use crate::{Buffer, Error, next_data};

/// Bytes that are read and written together; none of them is written where all are zero.
const PIECE: usize = 1 << 20;
/// So many pieces of a delta are copied at once, which are no more than one of a raw image together.
const AT_ONCE: usize = 4;
/// What is read beside the cache begins and ends at a multiple of this, or at the end of the file.
const ALIGNED: u64 = 4096;

/// The images that a content is made of.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    /// The raw image below all others; read beside no cache, or through it.
    pub base: &'a File,
    /// What lies over it, from the lowest on.
    pub deltas: &'a [Delta],
    /// Bytes of the disk.
    pub bytes: u64,
    /// Bytes that the raw image takes.
    pub used: u64,
}

/// Fills a file that is empty. `goes_on` is asked before each piece, with how many bytes are done; returns whether it always said yes. Where both files
/// are on one file system that can, the blocks of the raw image are shared, which takes no time and no room.
pub fn flatten(
    chain: Chain<'_>,
    (fresh, path): (&File, &Path),
    mut goes_on: impl FnMut(u64) -> bool,
) -> Result<bool, Error> {
    let failed = |source| Error::Image {
        action: "fill",
        path: path.to_owned(),
        source,
    };
    let room = KeptRoom::default();
    let is_shared = shares(&chain, fresh).map_err(failed)?;
    if !is_shared && !copy(&chain, fresh, &room, &mut goes_on).map_err(failed)? {
        return Ok(false);
    }
    let mut done = chain.used;
    // Where a piece goes that comes next is not told: it is taken for one that needs room.
    let piece = chain.bytes..chain.bytes.saturating_add(MOVE_MAX);
    for delta in chain.deltas {
        let (before, mut lacks) = (done, None);
        let merged = merge(
            delta,
            Target::Raw(fresh.as_fd(), chain.bytes),
            false,
            |merged| {
                done = before.saturating_add(merged.copied);
                lacks = room.take(fresh, &piece).err();
                (lacks.is_none() && goes_on(done)).then_some(AT_ONCE)
            },
        )?;
        match (lacks, merged) {
            (Some(error), _) => return Err(failed(error)),
            (None, None) => return Ok(false),
            (None, Some(merged)) => done = before.saturating_add(merged.copied),
        }
    }
    Ok(true)
}

/// Has the file share the raw image's blocks. Returns whether it does; else it is empty again.
fn shares(chain: &Chain<'_>, fresh: &File) -> io::Result<bool> {
    let is_shared = ioctl_ficlone(fresh, chain.base).is_ok();
    if is_shared && fresh.metadata()?.len() == chain.bytes {
        return Ok(true);
    }
    fresh.set_len(0)?;
    Ok(false)
}

/// Copies what is data of the raw image; holes and zeroes stay holes.
fn copy(
    chain: &Chain<'_>,
    fresh: &File,
    room: &KeptRoom,
    goes_on: &mut impl FnMut(u64) -> bool,
) -> io::Result<bool> {
    fresh.set_len(chain.bytes)?;
    let (mut at, mut done, mut buffer) = (0, 0, Buffer::zeroed(PIECE));
    while let Some(data) = next_data(chain.base, at..chain.bytes)? {
        // What lies between is a hole, or was read.
        at = at.max(data.start - data.start % ALIGNED);
        let to = data.end.next_multiple_of(ALIGNED);
        let to = to.min(chain.bytes);
        while at < to {
            if !goes_on(done) {
                return Ok(false);
            }
            let length = usize::try_from(to - at).unwrap_or(PIECE).min(PIECE);
            read(chain.base, buffer.bytes_mut(), (at, length))?;
            let piece = buffer.bytes().get(..length).unwrap_or_default();
            let end = at + length as u64;
            if piece.iter().any(|byte| *byte != 0) {
                room.take(fresh, &(at..end))?;
                fresh.write_all_at(piece, at)?;
            }
            (at, done) = (end, done + length as u64);
        }
    }
    Ok(true)
}

/// Has the buffer begin with so many bytes of the file. It is read in whole, as far as the file goes: no less is taken beside the cache.
fn read(file: &File, buffer: &mut [u8], (at, length): (u64, usize)) -> io::Result<()> {
    let (mut done, whole) = (0, length.next_multiple_of(ALIGNED as usize));
    while done < length {
        let rest = buffer.get_mut(done..whole).unwrap_or_default();
        match file.read_at(rest, at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::{NewDelta, create, describe_base};
    use godwit_delta::{GRAIN, Grain, Id, Parent};
    use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
    use std::path::PathBuf;

    const BYTES: u64 = 64 << 20;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            // Not the default place, which may be a tmpfs.
            Self(tempfile::tempdir_in("/var/tmp").unwrap())
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn file(&self, name: &str) -> File {
            let mut options = File::options();
            let opened = options.read(true).write(true).create_new(true);
            opened.open(self.at(name)).unwrap()
        }

        /// A raw image with something at its beginning, in the middle and at its end.
        fn base(&self) -> File {
            let base = self.file("base.raw");
            base.set_len(BYTES).unwrap();
            for (at, byte) in [(0, 1), (20 << 20, 2), (BYTES - 512, 3)] {
                base.write_all_at(&[byte; 512], at).unwrap();
            }
            base
        }
    }

    fn chain<'a>(base: &'a File, deltas: &'a [Delta]) -> Chain<'a> {
        let used = base.metadata().unwrap().blocks() * 512;
        Chain {
            base,
            deltas,
            bytes: BYTES,
            used,
        }
    }

    fn byte(file: &File, at: u64) -> u8 {
        let mut byte = [9];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    }

    #[test]
    fn one_raw_image_is_copied_with_its_holes() {
        let place = Place::new();
        let (base, fresh) = (place.base(), place.file("fresh.raw"));
        let whole = flatten(chain(&base, &[]), (&fresh, &place.at("fresh.raw")), |_| {
            true
        });
        assert!(whole.unwrap());
        let found = [0, 4096, 20 << 20, BYTES - 512].map(|at| byte(&fresh, at));
        assert_eq!(found, [1, 0, 2, 3]);
        let found = fresh.metadata().unwrap();
        assert_eq!(found.len(), BYTES);
        assert!(found.blocks() * 512 < 8 << 20, "{}", found.blocks());
        // It is a copy, and no second name.
        fresh.write_all_at(&[8], 0).unwrap();
        assert_eq!(byte(&base, 0), 1);
    }

    /// As the image is opened that others read, too.
    #[test]
    fn an_image_is_copied_that_is_read_beside_the_cache() {
        let place = Place::new();
        drop(place.base());
        let mut options = File::options();
        let options = options.read(true).custom_flags(libc::O_DIRECT);
        let base = options.open(place.at("base.raw")).unwrap();
        let fresh = place.file("fresh.raw");
        let room = KeptRoom::default();
        let whole = copy(&chain(&base, &[]), &fresh, &room, &mut |_| true);
        assert!(whole.unwrap());
        let found = [0, 4096, 20 << 20, BYTES - 512].map(|at| byte(&fresh, at));
        assert_eq!(found, [1, 0, 2, 3]);
        assert_eq!(fresh.metadata().unwrap().len(), BYTES);
    }

    #[test]
    fn what_lies_over_an_image_is_in_the_one_that_is_made_of_both() {
        let place = Place::new();
        let base = place.base();
        let told = (BYTES, 7);
        drop(describe_base(&place.at("base.raw.vmdk"), "base.raw", told).unwrap());
        let over = Parent {
            cid: 7,
            hint: "base.raw.vmdk".to_owned(),
        };
        let new = NewDelta {
            descriptor: &place.at("delta.vmdk"),
            bytes: BYTES,
            id: Id([5; 16]),
            parent: &over,
        };
        drop(create(&new).unwrap());
        let path = place.at("delta-sesparse.vmdk");
        let extent = File::options().read(true).write(true).open(&path).unwrap();
        let delta = Delta::unlocked((extent, &path), new.id, 512).unwrap();
        let grain = vec![6; GRAIN as usize];
        let writes = File::options().write(true).open(&path).unwrap();
        writes
            .write_all_at(&grain, delta.layout().data_at() + GRAIN)
            .unwrap();
        writes.sync_all().unwrap();
        delta.states().set(1..2, Grain::Present);
        let second = (20 << 20) / GRAIN;
        delta.states().set(second..second + 1, Grain::Zero);
        let fresh = place.file("fresh.raw");
        let deltas = [delta];
        let to = place.at("fresh.raw");
        let whole = flatten(chain(&base, &deltas), (&fresh, &to), |_| true);
        assert!(whole.unwrap());
        let found = [0, GRAIN, 20 << 20, BYTES - 512].map(|at| byte(&fresh, at));
        assert_eq!(found, [1, 6, 0, 3]);
        assert_eq!(byte(&base, 20 << 20), 2, "the images stay as they are");
        // Whoever does not want it any more is heard.
        let again = place.file("again.raw");
        let to = place.at("again.raw");
        let whole = flatten(chain(&base, &deltas), (&again, &to), |_| false);
        assert!(!whole.unwrap());
    }
}
