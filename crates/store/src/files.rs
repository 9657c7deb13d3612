//! The few file operations that durability is made of, as a trait so that a test can crash between any two.
//!
//! Owns nothing. Refuses: to report success before the operation's own promise is kept.

use crate::error::StoreError;
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Operations on files. An error leaves the operation undone, except where it says otherwise.
pub trait Files {
    /// The content, `None` if there is no such file; at most `limit` bytes and one more.
    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>>;
    /// Makes a new file (replacing a left-over) with this content, readable by its owner only. Not durable.
    /// May leave a part of it behind on error.
    fn write(&self, path: &Path, content: &[u8]) -> io::Result<()>;
    /// Makes a file's content durable.
    fn sync_file(&self, path: &Path) -> io::Result<()>;
    /// Gives a file another name, replacing what had it. Not durable.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes a directory's names durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a file; no error if there is none. Not durable.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The operating system's files.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealFiles;

impl Files for RealFiles {
    fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
        read_regular(path, limit)
    }

    fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.remove(path)?;
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?
            .write_all(content)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        open_regular(OpenOptions::new().read(true), path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The content of a regular file, `None` if there is no such file; at most `limit` bytes and one more. Whatever else is in
/// its place (a named pipe, a directory, a device) is an error and is not waited for.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Of many files that are looked for none is there, which the first look tells already.
    let looked = fs::metadata(path).and_then(|found| must_be_regular(&found));
    let file = match looked.and_then(|()| open_looked_at(&options, path)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Room for all of it at once: a buffer that grows leaves parts of itself in memory, and the file may hold a key.
    let length = file.metadata()?.len().min(limit).saturating_add(1);
    let mut content = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    file.take(limit.saturating_add(1))
        .read_to_end(&mut content)?;
    Ok(Some(content))
}

/// As [`read_regular`], for a text of at most `limit` bytes; a longer one is an error.
pub fn read_text(path: &Path, limit: u64) -> io::Result<Option<String>> {
    let Some(content) = read_regular(path, limit)? else {
        return Ok(None);
    };
    if content.len() as u64 > limit {
        return Err(io::Error::other(format!("it is longer than {limit} bytes")));
    }
    let text = String::from_utf8(content);
    text.map(Some)
        .map_err(|_| io::Error::other("it is no text in UTF-8"))
}

/// Opens a regular file; the opening of what is none neither waits nor is felt by a device's other end.
pub(crate) fn open_regular(options: &OpenOptions, path: &Path) -> io::Result<File> {
    // A device may act when it is opened, and a pipe may wait: so what is there is looked at first, too.
    if let Ok(found) = fs::metadata(path) {
        must_be_regular(&found)?;
    }
    open_looked_at(options, path)
}

/// Opens what was a regular file a moment ago.
fn open_looked_at(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = options.clone().custom_flags(flags).open(path)?;
    must_be_regular(&file.metadata()?)?;
    Ok(file)
}

fn must_be_regular(found: &fs::Metadata) -> io::Result<()> {
    let kind = found.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(no_good(&format!("it is {what}, not a file")))
}

fn no_good(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Replaces `path` by `content`: on success the new content is there after any crash; on an error, and after
/// a crash in between, the old or the new one is.
pub fn replace_durably<F: Files>(files: &F, path: &Path, content: &[u8]) -> Result<(), StoreError> {
    let fresh = fresh_name(path);
    let made = files
        .write(&fresh, content)
        .map_err(|e| StoreError::io("write", &fresh, true, e))
        .and_then(|()| {
            files
                .sync_file(&fresh)
                .map_err(|e| StoreError::io("make durable", &fresh, true, e))
        });
    if let Err(error) = made {
        // The old content is in place either way; the left-over is replaced by the next attempt.
        let _ = files.remove(&fresh);
        return Err(error);
    }
    files
        .rename(&fresh, path)
        .map_err(|e| StoreError::io("replace", path, false, e))?;
    sync_name(files, path).map_err(|(what, e)| StoreError::io("make durable", what, false, e))
}

/// Makes the name of a file that is there durable. An error comes with what could not be made so.
///
/// The file comes after its directory, also where it is durable already: an XFS that was shut down (its log could not be written) ends
/// the fsync of a directory without an error, though the name is lost, and only that of a file with EIO. So both count as durable only
/// where the file system still took writes after the name was in its log.
pub(crate) fn sync_name<'a, F: Files>(
    files: &F,
    path: &'a Path,
) -> Result<(), (&'a Path, io::Error)> {
    let dir = directory_of(path);
    files.sync_dir(dir).map_err(|error| (dir, error))?;
    files.sync_file(path).map_err(|error| (path, error))
}

/// Makes a directory and what is missing above it, with this mode, and makes their names durable: also those of a directory
/// and its parent that are there already, since whoever made them may have died before they were.
pub fn make_directory(dir: &Path, mode: u32) -> Result<(), StoreError> {
    let missing = dir.ancestors().take_while(|dir| !dir.is_dir()).count();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(dir)
        .map_err(|e| StoreError::io("make", dir, true, e))?;
    let mut made = dir;
    for _ in 0..missing.max(2) {
        let parent = directory_of(made);
        RealFiles
            .sync_dir(parent)
            .map_err(|e| StoreError::io("make durable", parent, true, e))?;
        made = parent;
    }
    Ok(())
}

/// The name under which the next content is prepared.
pub(crate) fn fresh_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

/// The directory that a file is in.
pub(crate) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}
