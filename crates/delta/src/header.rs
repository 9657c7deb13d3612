//! The first sectors of an extent: the two headers of the format, and a label of ours.
//!
//! The format's headers say where everything is. Nothing may stand in their padding (QEMU looks), so what we have to know besides is in
//! the label, a sector that no region of the format reaches: which delta it is, and who may have it open.
//!
//! Who owns the state: none here. Refuses: headers that say anything else than those that we write for a disk of that size, a label
//! whose checksum is wrong, and words that only a later version knows.

use crate::layout::{GRAIN, LABEL_AT, Layout, SECTOR, TABLE};
use crate::{Id, Refused};

const CONST_MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const VERSION: u64 = 0x2_0000_0001;
const LABEL_MAGIC: &[u8; 8] = b"GODWITDL";
const LABEL_FORMAT: u32 = 1;
/// Bytes of the beginning of an extent that [`encode`] makes and [`decode`] wants: both headers and the label, no tables.
pub const HEAD: usize = (LABEL_AT + SECTOR) as usize;
/// Bytes of a label, one sector, which is written as a whole or not at all.
pub const LABEL: usize = SECTOR as usize;

/// Where the number of the map of a delta's states is, which is ours alone, too, and which builds that know of none leave as it is: in the same block as the
/// label, so that both are written at once.
pub const MAP_AT: usize = LABEL_AT as usize + LABEL;
const MAP_MAGIC: &[u8; 8] = b"GODWITMP";

/// The number of the map that tells what the tables do not say yet, as its sector holds it.
pub fn encode_map(number: u64) -> [u8; LABEL] {
    let mut out = Writer::default();
    out.bytes(MAP_MAGIC);
    out.long(number);
    let sum = checksum(&out.0);
    out.long(sum);
    out.sector()
}

/// Reads it from its sector; 0 where nothing was said, as by builds that know of none.
pub fn decode_map(sector: &[u8]) -> u64 {
    let mut from = Reader(sector);
    let said = from.take::<8>().and_then(|_| from.long());
    let number = said.unwrap_or_default();
    match sector == encode_map(number) {
        true => number,
        false => 0,
    }
}

/// Who may have a delta open, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Nobody: its tables say all.
    Closed,
    /// Somebody, under this boot of the host: what its tables do not say yet is in the map of its states.
    Open { boot: Id },
    /// Nobody writes it any more: its tables say all, for good.
    Frozen,
}

/// What a delta says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Tells it from all others.
    pub id: Id,
    pub in_use: Use,
}

impl Label {
    /// As its sector holds it.
    pub fn encode(&self) -> [u8; LABEL] {
        let mut out = Writer::default();
        out.bytes(LABEL_MAGIC);
        let (number, boot) = match self.in_use {
            Use::Closed => (0, Id::default()),
            Use::Open { boot } => (1, boot),
            Use::Frozen => (2, Id::default()),
        };
        out.bytes(&LABEL_FORMAT.to_le_bytes());
        out.bytes(&u32::to_le_bytes(number));
        out.bytes(&self.id.0);
        out.bytes(&boot.0);
        let sum = checksum(&out.0);
        out.long(sum);
        out.sector()
    }

    /// Reads it from its sector.
    pub fn decode(sector: &[u8]) -> Result<Self, Refused> {
        let mut from = Reader(sector);
        if from.take::<8>()? != *LABEL_MAGIC {
            let why = "it has no label of Godwit: it was written by something else";
            return Err(Refused::of(why));
        }
        let format = u32::from_le_bytes(from.take()?);
        if format != LABEL_FORMAT {
            return Err(Refused::of("it was written by a newer Godwit"));
        }
        let number = u32::from_le_bytes(from.take()?);
        let (id, boot) = (Id(from.take()?), Id(from.take()?));
        let in_use = match number {
            0 => Use::Closed,
            1 => Use::Open { boot },
            2 => Use::Frozen,
            _ => return Err(Refused::of("it was written by a newer Godwit")),
        };
        let label = Self { id, in_use };
        match sector == label.encode() {
            true => Ok(label),
            false => Err(Refused::of("its label is damaged")),
        }
    }
}

/// The beginning of an extent.
pub fn encode(layout: &Layout, label: &Label) -> Vec<u8> {
    let mut head = constant(layout).to_vec();
    head.extend(volatile(layout));
    head.resize(LABEL_AT as usize, 0);
    head.extend(label.encode());
    head
}

/// Whether a file that begins so is an extent, or what is left of one: no guest writes these bytes.
pub fn is_extent(head: &[u8]) -> bool {
    Reader(head).long().is_ok_and(|long| long == CONST_MAGIC)
}

/// Reads the beginning of an extent, at least [`HEAD`] bytes.
pub fn decode(head: &[u8]) -> Result<(Layout, Label), Refused> {
    let mut from = Reader(head);
    if from.long()? != CONST_MAGIC {
        return Err(Refused::of("it is no seSparse extent"));
    }
    if from.long()? != VERSION {
        return Err(Refused::of("it is of another version of the format"));
    }
    let sectors = from.long()?;
    let bytes = sectors.checked_mul(SECTOR);
    let layout = Layout::of(bytes.unwrap_or(u64::MAX))?;
    let at = |start: usize, len: usize| {
        let end = start.checked_add(len)?;
        head.get(start..end)
    };
    let sector = SECTOR as usize;
    let same = at(0, sector) == Some(constant(&layout).as_slice())
        && at(sector, sector) == Some(volatile(&layout).as_slice());
    if !same {
        let why = "its header is not as Godwit writes it: it was written by something else";
        return Err(Refused::of(why));
    }
    let label = at(LABEL_AT as usize, LABEL).unwrap_or_default();
    Ok((layout, Label::decode(label)?))
}

fn constant(layout: &Layout) -> [u8; SECTOR as usize] {
    let mut out = Writer::default();
    for long in [
        CONST_MAGIC,
        VERSION,
        layout.disk_bytes() / SECTOR,
        GRAIN / SECTOR,
        TABLE / SECTOR,
        0,
    ] {
        out.long(long);
    }
    for _ in 0..4 {
        out.long(0);
    }
    let regions = [
        (SECTOR, SECTOR),
        (2 * SECTOR, 2 * SECTOR),
        (Layout::JOURNAL, 1 << 20),
        (
            Layout::DIRECTORY,
            layout.directory().end - Layout::DIRECTORY,
        ),
        (layout.tables, layout.table_count() * TABLE),
        (layout.bitmap, layout.bitmap_bytes()),
        (layout.backmap, layout.backmap_bytes()),
        (layout.data_at(), layout.grains() * GRAIN),
    ];
    for (start, len) in regions {
        out.long(start / SECTOR);
        out.long(len / SECTOR);
    }
    out.sector()
}

/// No table is free, nothing was ever in the journal, and it is not to be replayed.
fn volatile(layout: &Layout) -> [u8; SECTOR as usize] {
    let mut out = Writer::default();
    for long in [VOLATILE_MAGIC, layout.table_count(), 0, 0] {
        out.long(long);
    }
    out.sector()
}

/// FNV-1a: against damage, not against anybody.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn long(&mut self, long: u64) {
        self.bytes(&long.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// What was written, and zeros.
    fn sector(self) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
        for (to, from) in sector.iter_mut().zip(self.0) {
            *to = from;
        }
        sector
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let Some((first, rest)) = self.0.split_first_chunk::<N>() else {
            return Err(Refused::of("it is cut short"));
        };
        self.0 = rest;
        Ok(*first)
    }

    fn long(&mut self) -> Result<u64, Refused> {
        Ok(u64::from_le_bytes(self.take()?))
    }
}
