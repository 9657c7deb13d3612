//! Makes a delta's files, durably: the extent first, and last the descriptor, which is what makes it one.
//!
//! Who owns the state: whoever makes it, until it is there. Refuses: names that are taken.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use godwit_delta::{Descriptor, Id, Kind, Label, Layout, Parent, Use, header, table};
use godwit_snapshots::files;
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use super::{lock_new, unusable};
use crate::Error;

/// What a delta is to be.
#[derive(Debug, Clone, Copy)]
pub struct NewDelta<'a> {
    /// Where its descriptor is to be, a file whose name ends in `.vmdk`. The extent is put beside it.
    pub descriptor: &'a Path,
    /// Of the disk, which is as long as its parent.
    pub bytes: u64,
    /// Which no other delta has: random.
    pub id: Id,
    /// For others who read the chain.
    pub parent: &'a Parent,
}

/// Makes an empty delta: all of it is absent. Returns what one above it names as its parent, if its hint is the descriptor's name.
pub fn create(new: &NewDelta<'_>) -> Result<Parent, Error> {
    let (_, extent) = extent_of(new.descriptor)?;
    let path = new.descriptor.with_file_name(&extent);
    // Nothing is made that could not be described.
    described(new)?;
    let fresh = with_suffix(&path, files::UNFINISHED);
    let made = make_fresh(&fresh).map_err(|source| failed("create", &fresh, source))?;
    let filled = lock_new(&made, &fresh, "creator").and_then(|()| {
        let filled = fill(&made, &layout_of(&path, new.bytes)?, new.id);
        filled.map_err(|source| failed("create", &fresh, source))
    });
    let named = filled.and_then(|()| {
        let named = name(&made, &fresh, &path);
        named.map_err(|source| failed("create", &path, source))
    });
    named.inspect_err(|_| give_up(&fresh))?;
    describe_delta(new).inspect_err(|_| give_up(&path))
}

/// What was not made to its end takes no room.
fn give_up(path: &Path) {
    let _ = std::fs::remove_file(path); // why it was not made is told
}

/// Has an empty file be the extent of an empty delta of a disk of so many bytes, durably.
pub fn create_extent(file: &File, path: &Path, bytes: u64, id: Id) -> Result<(), Error> {
    let filled = fill(file, &layout_of(path, bytes)?, id);
    filled.map_err(|source| failed("create", path, source))
}

/// Writes the descriptor of a delta whose extent is there. Returns what one above it names as its parent, if its hint is the descriptor's name.
pub fn describe_delta(new: &NewDelta<'_>) -> Result<Parent, Error> {
    let (cid, text) = described(new)?;
    write_new(new.descriptor, &text)?;
    let (stem, _) = extent_of(new.descriptor)?;
    Ok(Parent {
        cid,
        hint: files::descriptor(&stem),
    })
}

/// The number by which those above know it, and its descriptor.
fn described(new: &NewDelta<'_>) -> Result<(u32, String), Error> {
    let (_, extent) = extent_of(new.descriptor)?;
    let described = Descriptor {
        kind: Kind::Delta,
        cid: new.id.cid(),
        parent: Some(new.parent.clone()),
        bytes: new.bytes,
        extent,
    };
    let text = described.encode();
    let text = text.map_err(|why| unusable(new.descriptor, &why.to_string()))?;
    Ok((described.cid, text))
}

fn layout_of(path: &Path, bytes: u64) -> Result<Layout, Error> {
    let layout = Layout::of(bytes);
    layout.map_err(|why| unusable(path, &why.to_string()))
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Image {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Writes a descriptor for a raw image, so that others can read deltas above it down to it. `image` names the file as the descriptor
/// is to have it, and is not touched; `bytes` is the disk's length, `cid` its number. Returns what a delta beside it names as its parent.
pub fn describe_base(
    descriptor: &Path,
    image: &str,
    (bytes, cid): (u64, u32),
) -> Result<Parent, Error> {
    let (stem, _) = extent_of(descriptor)?;
    let described = Descriptor {
        kind: Kind::Raw,
        cid,
        parent: None,
        bytes,
        extent: image.to_owned(),
    };
    let text = described.encode();
    let text = text.map_err(|why| unusable(descriptor, &why.to_string()))?;
    write_new(descriptor, &text)?;
    Ok(Parent {
        cid,
        hint: files::descriptor(&stem),
    })
}

/// Has a delta's descriptor name another parent, over which the delta has the same content: for others who read the chain.
pub fn describe_over(descriptor: &Path, parent: &Parent) -> Result<(), Error> {
    let described = Descriptor {
        parent: Some(parent.clone()),
        ..super::read_descriptor(descriptor)?
    };
    let text = described.encode();
    let text = text.map_err(|why| unusable(descriptor, &why.to_string()))?;
    let written = write(descriptor, &text, |_, fresh| {
        std::fs::rename(fresh, descriptor)
    });
    written.map_err(|source| failed("describe", descriptor, source))
}

/// The name of a descriptor without its end, and that of the extent beside it.
fn extent_of(descriptor: &Path) -> Result<(String, String), Error> {
    let name = descriptor.file_name().and_then(|name| name.to_str());
    let stem = name.and_then(files::of_descriptor);
    let stem = stem.filter(|stem| !stem.is_empty());
    let stem = stem.ok_or_else(|| unusable(descriptor, "the name of a delta ends in .vmdk"))?;
    Ok((stem.to_owned(), files::extent(stem)))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// One that a crash left under this name is nobody's.
fn make_fresh(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path)
}

fn fill(file: &File, layout: &Layout, id: Id) -> io::Result<()> {
    let label = Label {
        id,
        in_use: Use::Closed,
    };
    file.set_len(layout.file_bytes())?;
    file.write_all_at(&header::encode(layout, &label), 0)?;
    file.write_all_at(&table::directory(layout), layout.directory().start)?;
    file.sync_all()
}

/// Gives a file its name, which nobody else has, durably; where that is not certain the name is taken back.
fn name(file: &File, from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // NFS cannot.
        Err(Errno::INVAL) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)?;
        }
        renamed => renamed?,
    }
    let directory = to.parent().filter(|path| !path.as_os_str().is_empty());
    let synced = File::open(directory.unwrap_or(Path::new("."))).and_then(|it| it.sync_all());
    // An XFS that was shut down tells of it only here.
    let synced = synced.and_then(|()| file.sync_all());
    synced.inspect_err(|_| give_up(to))
}

fn write_new(path: &Path, text: &str) -> Result<(), Error> {
    let written = write(path, text, |file, fresh| name(file, fresh, path));
    written.map_err(|source| failed("create", path, source))
}

/// Writes a text, durably, to a file that gets this name then by `named`; leaves none where that fails.
fn write(
    path: &Path,
    text: &str,
    named: impl FnOnce(&File, &Path) -> io::Result<()>,
) -> io::Result<()> {
    let fresh = with_suffix(path, files::UNFINISHED);
    let written = make_fresh(&fresh).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        named(&file, &fresh)
    });
    written.inspect_err(|_| give_up(&fresh))
}
