//! What a qcow2 image says of itself and of the file below it, read from its head without running anything; and which files such a chain has.
//!
//! Pure: who walks a chain is given what opens a file. The heads are hostile input: an image may name other files of the host, whose content a
//! guest would then find on its disk. Refuses: images with a data file beside them, encrypted and damaged ones, what a later version adds, files
//! below that are named as anything but a file or without their format, and chains that are long or come back to themselves.

use godwit_types::vm::DISK_GIB_MAX;
use std::path::{Path, PathBuf};

/// Bytes of an image's beginning that are looked at. QEMU writes the name of the file below just behind the head.
pub const HEAD_MAX: usize = 1 << 16;
/// Most files of a chain.
pub const CHAIN_MAX: usize = 16;
/// Bytes of the longest name of a file below, as QEMU has it.
const NAME_MAX: usize = 1023;
const MAGIC: &[u8] = b"QFI\xfb";
/// Features that must be understood: another compression, smaller parts of clusters.
const KNOWN: u64 = 8 | 16;
const NOT_CLOSED: u64 = 1;
const DAMAGED: u64 = 2;
const DATA_FILE: u64 = 4;
/// Bytes of the head of version 2, and of the shortest of version 3.
const HEAD_2: usize = 72;
const HEAD_3: usize = 104;
/// Exponents of the bytes of a cluster.
const CLUSTER_BITS: std::ops::RangeInclusive<u64> = 9..=21;
/// What follows the head says with this word of which format the file below is.
const BACKING_FORMAT: u64 = 0xe279_2aca;

/// Formats that are no raw images either, by how they begin.
const OTHERS: [(&[u8], &str); 4] = [
    (b"KDMV", "VMDK"),
    (b"# Disk DescriptorFile", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"conectix", "VHD"),
];

/// What an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Format {
    Raw,
    Qcow2(Qcow2),
}

/// What an image of that format says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2 {
    /// That a guest finds on it.
    pub bytes: u64,
    /// What it has the rest of its content from.
    pub backing: Option<Backing>,
}

/// The file below an image, as that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// A path, beside the image unless it is absolute.
    pub name: String,
    pub kind: Kind,
}

/// Formats that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Raw,
    Qcow2,
}

impl Format {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Raw => Kind::Raw,
            Self::Qcow2(_) => Kind::Qcow2,
        }
    }

    /// What lies below it.
    pub fn backing(&self) -> Option<&Backing> {
        match self {
            Self::Raw => None,
            Self::Qcow2(image) => image.backing.as_ref(),
        }
    }
}

/// What an image is that begins so; else why it is not used.
pub fn format_of(head: &[u8]) -> Result<Format, String> {
    if let Some((_, name)) = OTHERS.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(format!(
            "it is a {name} image: make a raw or qcow2 image of it with 'qemu-img convert'"
        ));
    }
    match head.starts_with(MAGIC) {
        true => qcow2_of(head).map(Format::Qcow2),
        false => Ok(Format::Raw),
    }
}

fn damaged() -> String {
    "its head is not whole".to_owned()
}

fn qcow2_of(head: &[u8]) -> Result<Qcow2, String> {
    let word = |at| number(head, at, 4).ok_or_else(damaged);
    let long = |at| number(head, at, 8).ok_or_else(damaged);
    let version = word(4)?;
    if !(2..=3).contains(&version) {
        return Err(format!(
            "it is a qcow image of version {version}: versions 2 and 3 are known"
        ));
    }
    if word(32)? != 0 {
        return Err("it is encrypted: make one that is not with 'qemu-img convert'".into());
    }
    let (features, length) = match version {
        3 => (long(72)?, size(word(100)?)?),
        _ => (0, HEAD_2),
    };
    must_be_readable(features)?;
    let bits = word(20)?;
    if !CLUSTER_BITS.contains(&bits) {
        return Err(format!(
            "it is said to have clusters of 2^{bits} bytes, and none has: get it anew"
        ));
    }
    let cluster = 1usize << bits;
    if (version == 3 && length < HEAD_3) || length > cluster {
        return Err(format!(
            "its head is said to have {length} bytes, and none has: get it anew"
        ));
    }
    let bytes = long(24)?;
    if bytes == 0 {
        return Err("it is empty".into());
    }
    if bytes > DISK_GIB_MAX << 30 {
        return Err(format!(
            "it is said to hold {} GiB, and a disk has at most {DISK_GIB_MAX}",
            bytes >> 30
        ));
    }
    let backing = match (long(8)?, word(16)?) {
        (0, 0) => None,
        (at, of) => Some(backing_of(head, length, cluster, (size(at)?, size(of)?))?),
    };
    Ok(Qcow2 { bytes, backing })
}

fn must_be_readable(features: u64) -> Result<(), String> {
    let why = match features {
        _ if features & DATA_FILE != 0 => {
            "its data is in another file, which could be any file of the host: make one without with 'qemu-img convert'"
        }
        _ if features & DAMAGED != 0 => {
            "it is marked as damaged: get it anew, or have 'qemu-img check -r all' mend it"
        }
        _ if features & NOT_CLOSED != 0 => {
            "it was not closed by whoever wrote it last: see that nobody has it open, and have 'qemu-img check -r all' mend it"
        }
        _ if features & !KNOWN != 0 => {
            "it has features that are not known here: make a plain one with 'qemu-img convert'"
        }
        _ => return Ok(()),
    };
    Err(why.to_owned())
}

/// The file below: its name lies in the first cluster, behind the head and what follows that.
fn backing_of(
    head: &[u8],
    head_length: usize,
    cluster: usize,
    (at, length): (usize, usize),
) -> Result<Backing, String> {
    let end = at.checked_add(length).filter(|end| *end <= cluster);
    let is_there = at >= head_length && (1..=NAME_MAX).contains(&length);
    let name = end.filter(|_| is_there).map(|end| head.get(at..end));
    let name = match name {
        None => {
            return Err("where it names its backing file no name can be: get it anew".to_owned());
        }
        // Of a file that is that short, or behind what is looked at.
        Some(None) => return Err(damaged()),
        Some(Some(name)) => name_of(name)?,
    };
    let told = format_told(head.get(head_length..at).unwrap_or_default())?;
    let kind = match told {
        Some(b"raw") => Kind::Raw,
        Some(b"qcow2") => Kind::Qcow2,
        Some(other) => {
            return Err(format!(
                "its backing file {name:?} is said to be of format {:?}, and raw and qcow2 ones are read: make one image of all with 'qemu-img convert'",
                String::from_utf8_lossy(other)
            ));
        }
        None => {
            return Err(format!(
                "it does not say of which format its backing file {name:?} is; to guess would have a guest that writes a qcow2 head to a raw disk name any file of the host: have it say so with 'qemu-img rebase -u -F FORMAT -b {} IMAGE', where FORMAT is raw or qcow2, whichever that file was made as",
                name.escape_debug()
            ));
        }
    };
    Ok(Backing { name, kind })
}

/// A file's path. QEMU also takes other addresses for a name.
fn name_of(name: &[u8]) -> Result<String, String> {
    let name = std::str::from_utf8(name).ok();
    let name = name.filter(|name| !name.chars().any(char::is_control));
    let name = name.ok_or("the name of its backing file is no text: have it name another with 'qemu-img rebase', or make one image of all with 'qemu-img convert'")?;
    let first = name.find([':', '/']).and_then(|at| name.get(at..));
    if first.is_some_and(|rest| rest.starts_with(':')) {
        return Err(format!(
            "its backing file is called {name:?}, and that has to be the path of a file: have it name one with 'qemu-img rebase', or make one image of all with 'qemu-img convert'"
        ));
    }
    Ok(name.to_owned())
}

/// What follows the head, up to the name: of which format the file below is, if it says so.
fn format_told(mut rest: &[u8]) -> Result<Option<&[u8]>, String> {
    while rest.len() >= 8 {
        let (kind, length) = (number(rest, 0, 4), number(rest, 4, 4));
        let length = length.map_or(Err(damaged()), size)?;
        let content = rest.get(8..).unwrap_or_default();
        let content = content.get(..length);
        match kind {
            // The last one.
            Some(0) => return Ok(None),
            Some(BACKING_FORMAT) => return content.ok_or_else(damaged).map(Some),
            _ if content.is_none() => return Err(damaged()),
            _ => {}
        }
        let next = length.next_multiple_of(8).saturating_add(8);
        rest = rest.get(next..).unwrap_or_default();
    }
    Ok(None)
}

fn size(number: u64) -> Result<usize, String> {
    // No head holds more, nor do sums of these come near to what a number holds.
    let number = u32::try_from(number).ok();
    number
        .and_then(|number| usize::try_from(number).ok())
        .ok_or_else(damaged)
}

fn number(head: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = head.get(at..at + length)?;
    Some(
        bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    )
}

/// An image that was opened, and how it begins.
#[derive(Debug)]
pub struct Found<F> {
    pub file: F,
    /// Which file it is, however it is called.
    pub identity: (u64, u64),
    /// Its first [`HEAD_MAX`] bytes, or all of them.
    pub head: Vec<u8>,
}

/// One file of a chain.
#[derive(Debug)]
pub struct Link<F> {
    pub path: PathBuf,
    pub file: F,
    /// As the image above says; of the first one, as it begins.
    pub format: Format,
}

/// The files that an image's content is made of, itself first. `open` opens those below, of which it is told the path; why it does not
/// is a part of a sentence, before which it is told which file it is.
pub fn walk<F>(
    path: &Path,
    top: Found<F>,
    mut open: impl FnMut(&Path) -> Result<Found<F>, String>,
) -> Result<Vec<Link<F>>, String> {
    let format = format_of(&top.head)
        .map_err(|why| format!("the image {} is not used: {why}", path.display()))?;
    let mut below = place_below(path, &format);
    let mut known = vec![top.identity];
    let mut chain = vec![Link {
        path: path.to_owned(),
        file: top.file,
        format,
    }];
    while let Some((its, kind)) = below {
        let not_used = |why: String| {
            format!(
                "the image {} cannot be used with its backing file {}: {why}",
                path.display(),
                its.display()
            )
        };
        if chain.len() >= CHAIN_MAX {
            return Err(not_used(format!(
                "{CHAIN_MAX} files lie over one another above it already, which is the most: make one image of all with 'qemu-img convert'"
            )));
        }
        let found = open(&its).map_err(not_used)?;
        if known.contains(&found.identity) {
            return Err(not_used(
                "it lies above itself: have the image that names it name another one with 'qemu-img rebase -u'".to_owned(),
            ));
        }
        let format = format_as_told(&found.head, kind).map_err(not_used)?;
        known.push(found.identity);
        below = place_below(&its, &format);
        chain.push(Link {
            path: its,
            file: found.file,
            format,
        });
    }
    Ok(chain)
}

/// What a raw image holds is its guest's, however it begins.
fn format_as_told(head: &[u8], kind: Kind) -> Result<Format, String> {
    match (kind, format_of(head)) {
        (Kind::Raw, _) => Ok(Format::Raw),
        (Kind::Qcow2, Ok(Format::Raw)) => Err(
            "it is said to be a qcow2 image and is none: have the image that names it say which format it has with 'qemu-img rebase -u -F raw'".to_owned(),
        ),
        (Kind::Qcow2, format) => format,
    }
}

/// Where the file below is, as QEMU finds it too, and what it is said to be.
fn place_below(path: &Path, format: &Format) -> Option<(PathBuf, Kind)> {
    let backing = format.backing()?;
    let dir = path.parent().unwrap_or(Path::new("/"));
    Some((dir.join(&backing.name), backing.kind))
}

#[cfg(test)]
#[path = "qcow2_tests.rs"]
mod tests;
