//! Where everything lies in a delta's extent file.
//!
//! The file is laid out once, when it is made, for the whole disk: grain `b` of the disk always lies at `grains + b * 4 KiB`, and
//! its entry at `tables + b * 8`. The file is sparse, so that what was not written takes no room.
//!
//! Who owns the state: the value, which never changes. Refuses: disks that are empty, no whole sectors or larger than 64 TiB.

use std::ops::Range;

use crate::Refused;

/// Bytes of a sector, in which the format counts.
pub const SECTOR: u64 = 512;
/// Bytes of a grain: what is absent, zero or present as a whole.
pub const GRAIN: u64 = 4096;
/// Bytes of a block of a grain table, the least that is written of one.
pub const BLOCK: u64 = 4096;
/// Grains that a block of a table tells of.
pub const GRAINS_PER_BLOCK: u64 = BLOCK / 8;
/// Bytes of a grain table.
pub(crate) const TABLE: u64 = 64 * SECTOR;
/// Grains that a table tells of.
pub(crate) const GRAINS_PER_TABLE: u64 = TABLE / 8;
/// Where the label is, which is ours alone: no region of the format reaches here.
pub const LABEL_AT: u64 = 4096;

/// Largest disk, in bytes.
pub const BYTES_MAX: u64 = 64 << 40;
/// What regions begin at a multiple of, in bytes.
const REGION: u64 = 1 << 20;

/// The places of one extent, in bytes of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    bytes: u64,
    pub(crate) tables: u64,
    pub(crate) bitmap: u64,
    pub(crate) backmap: u64,
    grains: u64,
}

impl Layout {
    pub(crate) const JOURNAL: u64 = REGION;
    pub(crate) const DIRECTORY: u64 = 2 * REGION;

    /// Of a disk of so many bytes. The last grain of one that is no multiple of 4096 ends where the disk ends.
    pub fn of(bytes: u64) -> Result<Self, Refused> {
        if bytes == 0 || !bytes.is_multiple_of(SECTOR) || bytes > BYTES_MAX {
            return Err(Refused::of(format!(
                "a delta is for a disk of whole sectors of {SECTOR} bytes and at most 64 TiB, and this one has {bytes} bytes"
            )));
        }
        let mut layout = Self {
            bytes,
            tables: 0,
            bitmap: 0,
            backmap: 0,
            grains: 0,
        };
        layout.tables = round(Self::DIRECTORY + layout.directory_bytes());
        layout.bitmap = round(layout.tables + layout.table_count() * TABLE);
        layout.backmap = round(layout.bitmap + layout.bitmap_bytes());
        layout.grains = round(layout.backmap + layout.backmap_bytes());
        Ok(layout)
    }

    /// How long the disk is, which the file is not.
    pub fn disk_bytes(&self) -> u64 {
        self.bytes
    }

    /// How many grains the disk has.
    pub fn grains(&self) -> u64 {
        self.bytes.div_ceil(GRAIN)
    }

    /// How many blocks of tables tell of them.
    pub fn blocks(&self) -> u64 {
        self.grains().div_ceil(GRAINS_PER_BLOCK)
    }

    /// Where a block of the tables is.
    pub fn block_at(&self, block: u64) -> u64 {
        self.tables + block * BLOCK
    }

    /// Where the tables are.
    pub fn tables(&self) -> Range<u64> {
        self.tables..self.tables + self.table_count() * TABLE
    }

    /// Where the byte 0 of the disk would be: the others follow it.
    pub fn data_at(&self) -> u64 {
        self.grains
    }

    /// Where the grain directory is, and how long.
    pub fn directory(&self) -> Range<u64> {
        Self::DIRECTORY..Self::DIRECTORY + self.directory_bytes()
    }

    /// How long the file is.
    pub fn file_bytes(&self) -> u64 {
        self.grains + self.grains() * GRAIN
    }

    pub(crate) fn table_count(&self) -> u64 {
        self.grains().div_ceil(GRAINS_PER_TABLE)
    }

    fn directory_bytes(&self) -> u64 {
        (self.table_count() * 8).next_multiple_of(BLOCK)
    }

    pub(crate) fn bitmap_bytes(&self) -> u64 {
        self.grains().div_ceil(8).next_multiple_of(BLOCK)
    }

    pub(crate) fn backmap_bytes(&self) -> u64 {
        (self.grains() * 8).next_multiple_of(BLOCK)
    }
}

fn round(bytes: u64) -> u64 {
    bytes.next_multiple_of(REGION)
}
