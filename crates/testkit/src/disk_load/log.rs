//! What a load wrote to a disk, and whether an image has it.
//!
//! Owns the numbers of the writes that were acknowledged, for each block the last one, and of those that were not. A write
//! that was not acknowledged may be there, in part or not at all; of every other block the content is known to the byte. After a
//! power cut any write of a block may be the one that is there from the last on that a flush covers ([`Log::check_after_cut`]);
//! those are kept by a log that is told to ([`Log::for_power_cuts`]), and grow until a flush.
//! Refuses nothing; what is not as it should be is counted.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::LazyLock;

use super::SECTOR;

/// Bytes of a sector that say where it belongs and which write it is of.
const STAMP: usize = 16;
const MARK: u64 = 0x6764_7774_6c6f_6164;
/// Bytes that are read or written at once.
const PIECE: usize = 1 << 20;

/// What every sector holds behind its stamp.
static FILLER: LazyLock<[u8; SECTOR]> = LazyLock::new(|| {
    let mut random = super::run::Random::new(1);
    let mut filler = [0; SECTOR];
    for byte in &mut filler {
        *byte = random.next() as u8 | 1;
    }
    filler
});

/// The writes of a load.
#[derive(Debug, Clone)]
pub struct Log {
    block_bytes: usize,
    /// The last acknowledged write of each block; 0 is what was there at first.
    acknowledged: Vec<u64>,
    /// Writes that were begun and not answered, by their blocks.
    open: HashMap<u64, u64>,
    /// The last write of each block that an acknowledged flush covers.
    durable: Vec<u64>,
    /// The later ones, by their blocks; none where nobody needs them.
    later: Option<HashMap<u64, Vec<u64>>>,
    /// How often each block was written, by acknowledged writes.
    times: Vec<u32>,
    last: u64,
    writes: u64,
    /// Writes that had been acknowledged when the last acknowledged flush began.
    flushed: u64,
}

/// What had been acknowledged when a flush began.
#[derive(Debug, Clone)]
pub struct Covered {
    acknowledged: Vec<u64>,
    writes: u64,
}

/// How an image differs from a log, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Findings {
    pub blocks: u64,
    /// Blocks that hold an older write than the last that was acknowledged.
    pub lost: u64,
    /// Blocks whose sectors are of several writes.
    pub torn: u64,
    /// Blocks that hold what no write put there.
    pub strange: u64,
}

impl Findings {
    /// Whether every block is as the log has it.
    pub fn is_equal(&self) -> bool {
        (self.lost, self.torn, self.strange) == (0, 0, 0)
    }
}

/// What a block turned out to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    Right,
    Lost,
    Torn,
    Strange,
}

impl Log {
    /// Of a disk that holds what [`Log::fill`] put there.
    pub fn new(disk_bytes: u64, block_bytes: usize) -> Self {
        let blocks = disk_bytes / block_bytes as u64;
        Self {
            block_bytes,
            acknowledged: vec![0; blocks as usize],
            open: HashMap::new(),
            durable: vec![0; blocks as usize],
            later: None,
            times: vec![0; blocks as usize],
            last: 0,
            writes: 0,
            flushed: 0,
        }
    }

    /// The same log, which can be held against an image after a power cut.
    pub fn for_power_cuts(mut self) -> Self {
        self.later = Some(HashMap::new());
        self
    }

    pub fn blocks(&self) -> u64 {
        self.acknowledged.len() as u64
    }

    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Writes that were acknowledged.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Those of them that a later flush covers.
    pub fn flushed(&self) -> u64 {
        self.flushed
    }

    /// Blocks of which a write was acknowledged.
    pub fn written_blocks(&self) -> u64 {
        let written = self.acknowledged.iter().filter(|last| **last != 0);
        written.count() as u64
    }

    /// A write of this block begins; returns its number.
    pub fn begin(&mut self, block: u64) -> u64 {
        self.last += 1;
        self.open.insert(block, self.last);
        if let Some(later) = &mut self.later {
            later.entry(block).or_default().push(self.last);
        }
        self.last
    }

    /// The write of this block that is under way was acknowledged.
    pub fn acknowledge(&mut self, block: u64) {
        let number = self.open.remove(&block);
        if let (Some(number), Some(last)) = (number, self.acknowledged.get_mut(block as usize)) {
            *last = number;
            self.writes += 1;
            if let Some(times) = self.times.get_mut(block as usize) {
                *times += 1;
            }
        }
    }

    /// How often each block was written, in the order of the disk.
    pub fn times_written(&self) -> &[u32] {
        &self.times
    }

    /// What a flush covers that begins now.
    pub fn covered(&self) -> Covered {
        Covered {
            acknowledged: self.acknowledged.clone(),
            writes: self.writes,
        }
    }

    /// A flush was acknowledged that covers these.
    pub fn flush(&mut self, covered: &Covered) {
        self.flushed = self.flushed.max(covered.writes);
        for (durable, write) in self.durable.iter_mut().zip(&covered.acknowledged) {
            *durable = (*durable).max(*write);
        }
        let (durable, later) = (&self.durable, self.later.iter_mut());
        for later in later {
            later.retain(|block, writes| {
                let last = durable.get(*block as usize).copied().unwrap_or(0);
                writes.retain(|write| *write > last);
                !writes.is_empty()
            });
        }
    }

    /// Whether a write of this block is under way.
    pub fn is_open(&self, block: u64) -> bool {
        self.open.contains_key(&block)
    }

    /// Fills an image with what a log begins with.
    pub fn fill(&self, image: &File) -> io::Result<()> {
        let mut piece = vec![0; PIECE.max(self.block_bytes)];
        let per_piece = (piece.len() / self.block_bytes) as u64;
        let mut block = 0;
        while block < self.blocks() {
            let count = per_piece.min(self.blocks() - block);
            let bytes = &mut piece[..count as usize * self.block_bytes];
            for (one, number) in bytes.chunks_exact_mut(self.block_bytes).zip(block..) {
                fill(one);
                stamp(one, number, 0);
            }
            image.write_all_at(bytes, block * self.block_bytes as u64)?;
            block += count;
        }
        image.sync_data()
    }

    /// Holds an image against the log.
    pub fn check(&self, image: &File) -> io::Result<Findings> {
        let mut piece = vec![0; PIECE.max(self.block_bytes)];
        let per_piece = (piece.len() / self.block_bytes) as u64;
        let mut findings = Findings::default();
        let mut block = 0;
        while block < self.blocks() {
            let count = per_piece.min(self.blocks() - block);
            let bytes = &mut piece[..count as usize * self.block_bytes];
            image.read_exact_at(bytes, block * self.block_bytes as u64)?;
            for (one, number) in bytes.chunks_exact(self.block_bytes).zip(block..) {
                findings.blocks += 1;
                match self.examine(number, one) {
                    Held::Right => {}
                    Held::Lost => findings.lost += 1,
                    Held::Torn => findings.torn += 1,
                    Held::Strange => findings.strange += 1,
                }
            }
            block += count;
        }
        Ok(findings)
    }

    /// Holds an image against the log after its storage lost what was not durable. What is there counts as acknowledged from
    /// then on, and nothing is under way any more.
    pub fn check_after_cut(&mut self, image: &File) -> io::Result<Findings> {
        let none = || io::Error::other("this log does not keep what a power cut may leave");
        let later = self.later.take().ok_or_else(none)?;
        let mut bytes = vec![0; self.block_bytes];
        let mut findings = Findings::default();
        for block in 0..self.blocks() {
            image.read_exact_at(&mut bytes, block * self.block_bytes as u64)?;
            findings.blocks += 1;
            let first_sector = block * (self.block_bytes / SECTOR) as u64;
            let there = word(&bytes, 8);
            let mut sectors = bytes.chunks_exact(SECTOR).zip(first_sector..);
            let is_placed = |(sector, number): (&[u8], u64)| {
                word(sector, 0) == number ^ MARK && sector[STAMP..] == FILLER[STAMP..]
            };
            let is_placed = sectors.all(is_placed);
            let is_whole = bytes.chunks_exact(SECTOR).all(|one| word(one, 8) == there);
            let durable = self.durable.get(block as usize).copied().unwrap_or(0);
            let is_later = later
                .get(&block)
                .is_some_and(|writes| writes.contains(&there));
            match (is_placed, is_whole) {
                (false, _) => findings.strange += 1,
                (_, false) => findings.torn += 1,
                _ if there < durable => findings.lost += 1,
                _ if there != durable && !is_later => findings.strange += 1,
                _ => {}
            }
            if let Some(last) = self.acknowledged.get_mut(block as usize) {
                *last = there;
            }
        }
        self.durable.clone_from(&self.acknowledged);
        self.later = Some(HashMap::new());
        self.open.clear();
        Ok(findings)
    }

    /// What these bytes of a block are.
    pub fn examine(&self, block: u64, bytes: &[u8]) -> Held {
        let (wanted, open) = (
            self.acknowledged.get(block as usize).copied().unwrap_or(0),
            self.open.get(&block).copied(),
        );
        let first_sector = block * (self.block_bytes / SECTOR) as u64;
        let mut seen = None;
        let mut held = Held::Right;
        for (sector, number) in bytes.chunks_exact(SECTOR).zip(first_sector..) {
            let (place, write) = (word(sector, 0), word(sector, 8));
            if place != number ^ MARK || sector[STAMP..] != FILLER[STAMP..] {
                return Held::Strange;
            }
            if write != wanted && Some(write) != open {
                held = match write < wanted {
                    true => Held::Lost,
                    false => return Held::Strange,
                };
            }
            if *seen.get_or_insert(write) != write && open.is_none() {
                return Held::Torn;
            }
        }
        held
    }
}

/// Fills memory with what every sector has in common.
pub fn fill(bytes: &mut [u8]) {
    for sector in bytes.chunks_exact_mut(SECTOR) {
        sector.copy_from_slice(&*FILLER);
    }
}

/// Makes filled memory a write of this block.
pub fn stamp(bytes: &mut [u8], block: u64, write: u64) {
    let first_sector = block * (bytes.len() / SECTOR) as u64;
    for (sector, number) in bytes.chunks_exact_mut(SECTOR).zip(first_sector..) {
        sector[..8].copy_from_slice(&(number ^ MARK).to_le_bytes());
        sector[8..STAMP].copy_from_slice(&write.to_le_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes
        .get(at..at + 8)
        .and_then(|word| <[u8; 8]>::try_from(word).ok());
    u64::from_le_bytes(word.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 8192;

    fn image(log: &Log) -> File {
        let file = tempfile::tempfile().unwrap();
        log.fill(&file).unwrap();
        file
    }

    fn write(image: &File, block: u64, number: u64, part: std::ops::Range<usize>) {
        let mut bytes = vec![0; BLOCK];
        fill(&mut bytes);
        stamp(&mut bytes, block, number);
        let at = block * BLOCK as u64 + part.start as u64;
        image.write_all_at(&bytes[part], at).unwrap();
    }

    fn one(log: &mut Log, image: &File, block: u64) {
        let number = log.begin(block);
        write(image, block, number, 0..BLOCK);
        log.acknowledge(block);
    }

    #[test]
    fn an_image_with_every_acknowledged_write_is_equal() {
        let mut log = Log::new(300 * BLOCK as u64, BLOCK);
        let image = image(&log);
        for block in [0, 7, 299, 7] {
            one(&mut log, &image, block);
        }
        let findings = log.check(&image).unwrap();
        assert!(findings.is_equal(), "{findings:?}");
        assert_eq!((findings.blocks, log.writes()), (300, 4));
        let times = log.times_written();
        assert_eq!((times.len(), times[7], times[8]), (300, 2, 0));
    }

    #[test]
    fn a_lost_write_is_found_whether_it_was_the_first_of_its_block_or_not() {
        let mut log = Log::new(300 * BLOCK as u64, BLOCK);
        let image = image(&log);
        one(&mut log, &image, 5);
        for block in [5, 9] {
            log.begin(block);
            log.acknowledge(block);
        }
        let findings = log.check(&image).unwrap();
        assert_eq!((findings.lost, findings.torn, findings.strange), (2, 0, 0));
    }

    #[test]
    fn a_torn_write_is_found() {
        let mut log = Log::new(300 * BLOCK as u64, BLOCK);
        let image = image(&log);
        one(&mut log, &image, 5);
        let number = log.begin(5);
        log.acknowledge(5);
        write(&image, 5, number, 0..SECTOR);
        write(&image, 6, 0, 0..BLOCK);
        let findings = log.check(&image).unwrap();
        assert_eq!((findings.lost, findings.torn, findings.strange), (0, 1, 0));
    }

    #[test]
    fn a_write_without_an_answer_may_be_there_in_part() {
        let mut log = Log::new(300 * BLOCK as u64, BLOCK);
        let image = image(&log);
        let number = log.begin(5);
        write(&image, 5, number, 0..SECTOR);
        assert!(log.check(&image).unwrap().is_equal());
    }

    #[test]
    fn what_no_write_put_there_is_strange() {
        let mut log = Log::new(300 * BLOCK as u64, BLOCK);
        let image = image(&log);
        one(&mut log, &image, 5);
        // Another block's content, a write that never was, and a flipped byte.
        let mut bytes = vec![0; BLOCK];
        image.read_exact_at(&mut bytes, 5 * BLOCK as u64).unwrap();
        image.write_all_at(&bytes, 20 * BLOCK as u64).unwrap();
        write(&image, 30, 77, 0..BLOCK);
        image.write_all_at(&[0], 40 * BLOCK as u64 + 600).unwrap();
        let findings = log.check(&image).unwrap();
        assert_eq!((findings.lost, findings.torn, findings.strange), (0, 0, 3));
    }

    #[test]
    fn after_a_cut_a_block_has_its_last_durable_write_or_a_later_one_in_whole() {
        const ONE: usize = 4096;
        let mut log = Log::new(300 * ONE as u64, ONE).for_power_cuts();
        let image = image(&log);
        let write = |block: u64, number: u64, part: std::ops::Range<usize>| {
            let mut bytes = vec![0; ONE];
            fill(&mut bytes);
            stamp(&mut bytes, block, number);
            let at = block * ONE as u64 + part.start as u64;
            image.write_all_at(&bytes[part], at).unwrap();
        };
        let numbers: Vec<u64> = (1..=6)
            .map(|block| {
                let number = log.begin(block);
                log.acknowledge(block);
                number
            })
            .collect();
        log.flush(&log.covered());
        let (later, under_way) = (log.begin(2), log.begin(3));
        log.acknowledge(2);
        // As flushed, as written later, as under way; then an older one, one in part, and one that never was.
        write(1, numbers[0], 0..ONE);
        write(2, later, 0..ONE);
        write(3, under_way, 0..ONE);
        write(5, numbers[4], 0..ONE);
        write(5, 77, 0..SECTOR);
        write(6, 77, 0..ONE);
        let findings = log.check_after_cut(&image).unwrap();
        assert_eq!((findings.lost, findings.torn, findings.strange), (1, 1, 1));
        assert!(!log.is_open(3), "nobody answers it any more");
    }

    #[test]
    fn a_log_that_keeps_nothing_for_power_cuts_does_not_grow_and_says_nothing_of_one() {
        let mut log = Log::new(300 * BLOCK as u64, BLOCK);
        let image = image(&log);
        for _ in 0..1000 {
            log.begin(5);
            log.acknowledge(5);
        }
        assert!(log.later.is_none());
        assert!(log.check_after_cut(&image).is_err());
    }
}
