//! The number by which an image is known that bears none, since nobody can write on its storage: it is made of what the image is.
//!
//! Its number on its file system, its length, and when it and what is said of it were changed last go into it, and some of its content, since images of
//! file systems are made so that all of the others are the same in each of them. So what was written since, or lies there in its place, has another one; all
//! disks that begin as it have one and the same. Of which device it is says nothing: that has another number after each boot.
//!
//! Owns nothing. Refuses: nothing; what cannot be read is reported.

use aws_lc_rs::digest::{Context, SHA256};
use godwit_blockio::Buffer;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

/// What such numbers begin with: those of another way to make them are others.
const WAY: &[u8] = b"godwit parent 1\n";
/// Direct IO takes multiples of this.
const ALIGNMENT: u64 = 4096;
/// Bytes at its beginning, at its end, and where the first file system begins on most disks: there it says what it is, and when it was written.
const LARGE: u64 = 64 << 10;
const FIRST_FILE_SYSTEM: u64 = 1 << 20;
/// From so many places between something is read: a guest's disk may have to wait for that.
const PLACES: u64 = 16;

/// The number of this image, as it is now, in as many digits as those have that images bear.
pub(crate) fn number_of(image: &File) -> io::Result<String> {
    let found = image.metadata()?;
    let mut all = Context::new(&SHA256);
    all.update(WAY);
    all.update(&found.ino().to_le_bytes());
    all.update(&found.len().to_le_bytes());
    let times = [
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec(),
    ];
    times
        .iter()
        .for_each(|time| all.update(&time.to_le_bytes()));
    let mut buffer = Buffer::zeroed((LARGE + ALIGNMENT) as usize);
    for (at, bytes) in samples(found.len()) {
        let end = at.saturating_add(bytes).min(found.len());
        let wanted = end.saturating_sub(at) as usize;
        read(image, at, (buffer.bytes_mut(), wanted))?;
        all.update(&at.to_le_bytes());
        all.update(buffer.bytes().get(..wanted).unwrap_or_default());
    }
    let digest = all.finish();
    let number = digest.as_ref().first_chunk::<16>();
    let number = number.copied().unwrap_or_default();
    Ok(format!("{:032x}", u128::from_be_bytes(number)))
}

/// Where something is read of an image of so many bytes, and how much.
fn samples(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let between = (1..=PLACES).map(move |place| (bytes / (PLACES + 1) * place, ALIGNMENT));
    let large = [
        (0, LARGE),
        (FIRST_FILE_SYSTEM, LARGE),
        (bytes.saturating_sub(LARGE), LARGE + ALIGNMENT),
    ];
    let all = large.into_iter().chain(between);
    let all = all.map(|(at, length)| (at - at % ALIGNMENT, length));
    all.filter(move |(at, _)| *at < bytes)
}

/// Fills so many bytes of this with what the image has there, and perhaps more of it: direct IO takes whole blocks alone.
fn read(image: &File, at: u64, (into, wanted): (&mut [u8], usize)) -> io::Result<()> {
    let mut done = 0;
    while done < wanted {
        let rest = into.get_mut(done..).unwrap_or_default();
        match image.read_at(rest, at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    use std::time::{Duration, SystemTime};

    /// No multiple of what is read at once.
    const BYTES: u64 = (3 << 20) + 512;

    fn image() -> File {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(BYTES).unwrap();
        file.write_all_at(&[7; 8192], FIRST_FILE_SYSTEM).unwrap();
        file
    }

    /// Writes this, and says that it was written when the image was made.
    fn with(file: &File, at: u64, byte: u8) -> String {
        let then = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&[byte; 512], at).unwrap();
        file.set_modified(then).unwrap();
        number_of(file).unwrap()
    }

    #[test]
    fn it_is_the_same_however_an_image_is_read_and_another_once_it_was_written() {
        let file = image();
        let number = number_of(&file).unwrap();
        assert!(number.len() == 32 && number_of(&file).unwrap() == number);
        let flags = fcntl_getfl(&file).unwrap();
        fcntl_setfl(&file, flags | OFlags::DIRECT).unwrap();
        assert_eq!(number_of(&file).unwrap(), number);
        fcntl_setfl(&file, flags).unwrap();
        // Whoever sets times back cannot set back when that was.
        let mut numbers = vec![number];
        for at in [0, FIRST_FILE_SYSTEM + 512, BYTES - 512] {
            numbers.push(with(&file, at, 9));
        }
        let long_ago = SystemTime::now() - Duration::from_secs(1000);
        file.set_modified(long_ago).unwrap();
        numbers.push(number_of(&file).unwrap());
        file.set_len(BYTES + 512).unwrap();
        numbers.push(number_of(&file).unwrap());
        let all = numbers.len();
        numbers.sort();
        numbers.dedup();
        assert_eq!(numbers.len(), all);
    }

    #[test]
    fn nothing_is_read_beyond_the_end_and_the_last_block_always_is() {
        for bytes in [512, 4096, 5120, 65_536, 66_048, 1 << 20, BYTES, 1 << 40] {
            let all: Vec<_> = samples(bytes).collect();
            assert!(all.iter().all(|(at, _)| *at < bytes && at % 4096 == 0));
            assert!(all.iter().any(|(at, length)| at + length >= bytes));
            assert!(all.iter().any(|(at, _)| *at == 0));
            assert!(all.iter().all(|(_, length)| *length <= LARGE + ALIGNMENT));
        }
    }

    #[test]
    fn an_image_that_ends_early_is_an_error() {
        let file = image();
        let mut buffer = Buffer::zeroed(8192);
        let cut = read(&file, BYTES - 512, (buffer.bytes_mut(), 4096));
        assert_eq!(cut.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
