//! The text that stands beside an extent and names it, as QEMU and others read it.
//!
//! A descriptor names one extent, a file in its own directory, and gives a hint what its parent is. Nobody here opens anything: a
//! hint is text, and whoever opens a parent knows it from elsewhere. A raw base has a descriptor of this kind, too, where others are to
//! read a chain down to it, since in this format a parent is always a descriptor.
//!
//! Who owns the state: none here. Refuses: texts of more than 16 KiB, names with a `/` or a quotation mark, more than one extent.

use std::fmt::Write as _;

use crate::Refused;
use crate::layout::{BYTES_MAX, SECTOR};

/// Most bytes of a descriptor. QEMU looks for the numbers of disk and parent in the first 10 KiB.
pub const TEXT_MAX: usize = 16 << 10;
/// Most bytes of a file's name.
const NAME_MAX: usize = 255;
/// Most bytes of a hint: QEMU keeps as many.
const HINT_MAX: usize = 1023;
/// The number of what has no parent.
const NO_PARENT: u32 = u32::MAX;

/// How an extent holds its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A delta of ours.
    Delta,
    /// A raw image, from its first byte on.
    Raw,
}

/// What a disk of this format was when another one was put above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// What its content was known by.
    pub cid: u32,
    /// Where its descriptor is, perhaps.
    pub hint: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    pub kind: Kind,
    /// The number of the disk's content, by which one above it knows it.
    pub cid: u32,
    pub parent: Option<Parent>,
    /// How long the disk is.
    pub bytes: u64,
    /// The name of the file that holds it.
    pub extent: String,
}

impl Descriptor {
    /// As text; refused where it could not be read again.
    pub fn encode(&self) -> Result<String, Refused> {
        let (create, extent) = match self.kind {
            Kind::Delta => ("seSparse", "SESPARSE"),
            Kind::Raw => ("vmfs", "VMFS"),
        };
        let mut text = String::from("# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\n");
        let parent = self.parent.as_ref();
        let parent_cid = parent.map_or(NO_PARENT, |parent| parent.cid);
        let sectors = self.bytes / SECTOR;
        let name = &self.extent;
        let _ = writeln!(text, "CID={:08x}", self.cid);
        let _ = writeln!(text, "parentCID={parent_cid:08x}");
        let _ = writeln!(text, "createType=\"{create}\"");
        if let Some(parent) = parent {
            let _ = writeln!(text, "parentFileNameHint=\"{}\"", parent.hint);
        }
        // No empty line comes before it: QEMU would read the extent twice, as a disk of twice the size.
        let _ = writeln!(text, "RW {sectors} {extent} \"{name}\"");
        match Self::decode(text.as_bytes()) {
            Ok(read) if read == *self => Ok(text),
            Ok(_) => Err(Refused::of("its descriptor would say something else")),
            Err(refused) => Err(refused),
        }
    }

    /// Reads one; what it does not know it passes over.
    pub fn decode(text: &[u8]) -> Result<Self, Refused> {
        if text.len() > TEXT_MAX {
            return Err(Refused::of("its descriptor is too long"));
        }
        let text = std::str::from_utf8(text);
        let text = text.map_err(|_| Refused::of("its descriptor is no text"))?;
        let mut fields = Fields::default();
        for line in text.lines() {
            fields.line(line.trim())?;
        }
        fields.into_descriptor()
    }
}

#[derive(Default)]
struct Fields<'a> {
    cid: Option<u32>,
    parent_cid: Option<u32>,
    create: Option<&'a str>,
    hint: Option<&'a str>,
    extent: Option<(Kind, u64, &'a str)>,
}

impl<'a> Fields<'a> {
    fn line(&mut self, line: &'a str) -> Result<(), Refused> {
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        if line.starts_with("RW ") || line.starts_with("RDONLY ") || line.starts_with("NOACCESS ") {
            return once(&mut self.extent, extent_of(line)?, "extent");
        }
        let Some((key, value)) = line.split_once('=') else {
            return Err(Refused::of("its descriptor has a line that says nothing"));
        };
        let quoted = || {
            let inside = value.trim().strip_prefix('"')?.strip_suffix('"')?;
            inside
                .bytes()
                .all(|byte| byte >= b' ' && byte != b'"')
                .then_some(inside)
        };
        let text = || {
            quoted().ok_or_else(|| {
                Refused::of(format!(
                    "its descriptor's {key} is no text in quotation marks"
                ))
            })
        };
        match key.trim() {
            "version" if value.trim() != "1" => {
                Err(Refused::of("its descriptor is of another version"))
            }
            "CID" => once(&mut self.cid, hexadecimal(value)?, "CID"),
            "parentCID" => once(&mut self.parent_cid, hexadecimal(value)?, "parentCID"),
            "createType" => once(&mut self.create, text()?, "createType"),
            "parentFileNameHint" => once(&mut self.hint, text()?, "parentFileNameHint"),
            _ => Ok(()),
        }
    }

    fn into_descriptor(self) -> Result<Descriptor, Refused> {
        let lacks = |what: &str| Refused::of(format!("its descriptor has no {what}"));
        let cid = self.cid.ok_or_else(|| lacks("CID"))?;
        let create = self.create.ok_or_else(|| lacks("createType"))?;
        let parent_cid = self.parent_cid.ok_or_else(|| lacks("parentCID"))?;
        let (kind, sectors, extent) = self.extent.ok_or_else(|| lacks("extent"))?;
        let expected = match kind {
            Kind::Delta => "seSparse",
            Kind::Raw => "vmfs",
        };
        if create != expected {
            return Err(Refused::of(
                "its descriptor says one kind of disk and has another",
            ));
        }
        let parent = match (parent_cid, self.hint) {
            (NO_PARENT, None) => None,
            (NO_PARENT, Some(_)) | (_, None) => {
                return Err(Refused::of(
                    "its descriptor says half of what its parent is",
                ));
            }
            (_, Some(hint)) if hint.is_empty() || hint.len() > HINT_MAX => {
                return Err(Refused::of(
                    "its descriptor's hint of a parent is empty or too long",
                ));
            }
            (cid, Some(hint)) => Some(Parent {
                cid,
                hint: hint.to_owned(),
            }),
        };
        let bytes = sectors
            .checked_mul(SECTOR)
            .filter(|bytes| *bytes <= BYTES_MAX && *bytes > 0);
        let bytes =
            bytes.ok_or_else(|| Refused::of("its descriptor's disk is empty or too large"))?;
        Ok(Descriptor {
            kind,
            cid,
            parent,
            bytes,
            extent: extent.to_owned(),
        })
    }
}

fn once<T>(field: &mut Option<T>, value: T, name: &str) -> Result<(), Refused> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(Refused::of(format!(
            "its descriptor has more than one {name}"
        ))),
    }
}

fn hexadecimal(value: &str) -> Result<u32, Refused> {
    let value = value.trim();
    let is_plain = value.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u32::from_str_radix(value, 16).ok().filter(|_| is_plain);
    number.ok_or_else(|| Refused::of("its descriptor has a CID that is no number"))
}

fn extent_of(line: &str) -> Result<(Kind, u64, &str), Refused> {
    let wrong = || Refused::of("its descriptor's extent is of no kind that is known");
    let mut words = line.splitn(4, ' ');
    let (access, sectors) = (words.next(), words.next().unwrap_or_default());
    let kind = match (access, words.next()) {
        (Some("RW"), Some("SESPARSE")) => Kind::Delta,
        (Some("RW"), Some("VMFS")) => Kind::Raw,
        _ => return Err(wrong()),
    };
    let is_plain = sectors.bytes().all(|byte| byte.is_ascii_digit());
    let sectors = sectors
        .parse()
        .ok()
        .filter(|_| is_plain)
        .ok_or_else(wrong)?;
    let name = words
        .next()
        .and_then(|rest| rest.strip_prefix('"')?.strip_suffix('"'));
    let name = name
        .filter(|name| is_name(name))
        .ok_or_else(|| Refused::of("its descriptor's extent is no file in the same directory"))?;
    Ok((kind, sectors, name))
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte >= b' ' && byte != b'"' && byte != b'/' && byte != 0x7f;
    let length = 1..=NAME_MAX;
    length.contains(&name.len()) && name != "." && name != ".." && name.bytes().all(plain)
}
