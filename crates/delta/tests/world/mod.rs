//! An overlay over a file of the model, a frozen delta and a base, and a guest that writes, zeroes, discards and flushes.
//!
//! A file ends what it is told in any order, sector by sector; whatever it is told may fail after any part of it. A killed process leaves
//! any part of what was under way, and the words of its states; a power cut leaves of each sector what it was at any time since it was
//! durable, and no words. Sectors of tables are sectors like others.
//!
//! Owned by the test. Whatever is wrong ends it.

mod counts;
mod disk;
mod guest;

pub use counts::Counts;
use disk::File;
use godwit_delta::states::Words;
use godwit_delta::{
    Change, Filled, GRAIN, Grain, Layout, Overlay, Piece, SECTOR, Source, States, Step, table,
    words_for,
};
use guest::Guest;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The same numbers for the same seed.
#[derive(Debug)]
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }
}

/// Sectors of a grain.
const PER_GRAIN: u64 = GRAIN / SECTOR;
/// Grains of the disk, of which the last one has three sectors.
const GRAINS: u64 = 1030;
const BYTES: u64 = (GRAINS - 1) * GRAIN + 3 * SECTOR;
/// Where the guest works: at both ends, and where one block of the tables follows another.
const PLACES: [u64; 3] = [0, 509, 1025];
/// How far it goes from there.
const NEAR: u64 = 5;

type Map = Arc<[AtomicU64]>;

/// What is under way at the file.
#[derive(Debug)]
enum Io {
    /// Sectors to write, of which some are to be read first; whose it is.
    Change {
        id: u64,
        erases: bool,
        reads: VecDeque<(u64, Source)>,
        writes: Vec<(u64, u64)>,
    },
    Sync(u64),
    /// What is left to be written of a round, in pairs of words.
    Tables(Vec<(u64, [u64; 2])>),
}

pub struct World {
    pub numbers: Numbers,
    pub counts: Counts,
    layout: Layout,
    map: Map,
    pub overlay: Overlay<Map>,
    /// How many blocks of the tables it knows by their numbers.
    room: usize,
    data: File<u64>,
    tables: File<[u64; 2]>,
    lower: Map,
    io: Vec<Io>,
    /// Writes that are durable once they have ended.
    written_durably: Vec<u64>,
    pub guest: Guest,
    last: u64,
    /// Of a hundred ends so many fail.
    fails: u64,
    /// A sync has failed, as a map says that outlives the process.
    is_lost: bool,
    #[cfg(feature = "planted-faults")]
    plant: Option<godwit_delta::Plant>,
}

fn words(layout: &Layout) -> Map {
    (0..words_for(layout)).map(|_| AtomicU64::new(0)).collect()
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let layout = Layout::of(BYTES).unwrap();
        let (map, lower) = (words(&layout), words(&layout));
        let below = States::over(Arc::clone(&lower), &layout).unwrap();
        for grain in PLACES.iter().flat_map(|place| *place..*place + NEAR) {
            let states = [Grain::Absent, Grain::Zero, Grain::Present];
            below.set(grain..grain + 1, states[numbers.below(3) as usize]);
        }
        let top = States::over(Arc::clone(&map), &layout).unwrap();
        let fails = [0, 8][numbers.below(2) as usize];
        let room = [0, 1, 64][numbers.below(3) as usize];
        let mut world = Self {
            numbers,
            counts: Counts::default(),
            layout,
            map,
            overlay: Overlay::new(&layout, top, vec![below]).in_room_of(room),
            room,
            data: File::new(),
            tables: File::new(),
            lower,
            io: Vec::new(),
            written_durably: Vec::new(),
            guest: Guest::default(),
            last: 1000,
            fails,
            is_lost: false,
            #[cfg(feature = "planted-faults")]
            plant: None,
        };
        for sector in world.near_sectors() {
            let value = world.read(sector);
            world.guest.finds(sector, value);
        }
        world
    }

    #[cfg(feature = "planted-faults")]
    pub fn with(mut self, plant: godwit_delta::Plant) -> Self {
        self.plant = Some(plant);
        self.overlay.plant(plant);
        self
    }

    fn near_sectors(&self) -> Vec<u64> {
        let grains = PLACES.iter().flat_map(|place| *place..*place + NEAR);
        let sectors = grains.flat_map(|grain| grain * PER_GRAIN..(grain + 1) * PER_GRAIN);
        sectors.filter(|sector| *sector < BYTES / SECTOR).collect()
    }

    /// What stands below the top where it was never written: values that tell the layers apart.
    fn of(&self, sector: u64, from: Source) -> u64 {
        match from {
            Source::Zero => 0,
            Source::Layer(0) => 1 << 32 | sector,
            Source::Layer(1) => 2 << 32 | sector,
            Source::Layer(_) => self.data.read(sector),
        }
    }

    /// As a guest reads it now.
    fn read(&self, sector: u64) -> u64 {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        self.of(sector, self.overlay.read_at_once(&range).unwrap())
    }

    /// A range near one of the places.
    fn range(&mut self) -> Range<u64> {
        let place = PLACES[self.numbers.below(3) as usize] * PER_GRAIN;
        let end = (place + NEAR * PER_GRAIN).min(BYTES / SECTOR);
        let (mut first, mut len) = (
            place + self.numbers.below(end - place),
            1 + self.numbers.below(20),
        );
        if self.numbers.below(3) == 0 {
            (first, len) = (
                first / PER_GRAIN * PER_GRAIN,
                len.div_ceil(PER_GRAIN) * PER_GRAIN,
            );
        }
        first..(first + len).min(end)
    }

    pub fn ask(&mut self) -> Result<(), String> {
        self.last += 1;
        let id = self.last;
        let kind = self.numbers.below(12);
        if kind < 2 {
            self.counts.flushes_in_rounds +=
                u64::from(self.io.iter().any(|io| !matches!(io, Io::Change { .. })));
            self.guest.flushes(id);
            let steps = self.overlay.flush(id);
            return self.carry_out(steps);
        }
        let sectors = self.range();
        let range = sectors.start * SECTOR..sectors.end * SECTOR;
        let durable = self.numbers.below(8) == 0;
        self.counts.durable_changes += u64::from(durable);
        let (change, value, known) = match kind {
            2 | 3 => (Change::Discard(range), 0, whole(&sectors)),
            4 | 5 => (Change::Zeroes(range), 0, sectors),
            _ => (Change::Write(range), id, sectors),
        };
        self.guest.changes(id, value, known, durable);
        let steps = self.overlay.change(id, change, durable);
        self.counts.held += u64::from(steps.is_empty());
        self.carry_out(steps)
    }

    fn carry_out(&mut self, steps: Vec<Step>) -> Result<(), String> {
        for step in steps {
            match step {
                Step::Write { id, write, durable } => {
                    let value = id;
                    match write.fill.is_empty() {
                        true => self.counts.straight_writes += 1,
                        false => self.counts.filled_writes += 1,
                    }
                    self.begin((id, value, false), &[write], None);
                    if durable {
                        self.written_durably.push(id);
                    }
                }
                Step::Erase { id, zeros, punch } => {
                    self.counts.zeroed_edges += zeros.len() as u64;
                    self.counts.punches += u64::from(punch.is_some());
                    self.begin((id, 0, true), &zeros, punch);
                }
                Step::Sync => {
                    self.counts.syncs += 1;
                    // One sync is of data and tables.
                    self.io.push(Io::Sync(self.numbers.0));
                    let last = self.io.len() - 1;
                    self.io[last] =
                        Io::Sync(self.data.begin_sync() << 32 | self.tables.begin_sync());
                }
                Step::Tables(blocks) => {
                    self.counts.rounds_with_tables += 1;
                    let sectors = blocks.iter().flat_map(|(block, words)| {
                        let (pairs, _) = words.as_chunks::<2>();
                        let sectors: Vec<_> = (block * 8..).zip(pairs.iter().copied()).collect();
                        sectors
                    });
                    let sectors = sectors.collect();
                    self.io.push(Io::Tables(sectors));
                }
                Step::Answer { id, done } => {
                    self.counts.answered_at_once += 1;
                    self.guest.is_told(id, done)?;
                }
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        (id, value, erases): (u64, u64, bool),
        writes: &[Filled],
        punch: Option<Range<u64>>,
    ) {
        let (mut reads, mut all) = (VecDeque::new(), Vec::new());
        for write in writes {
            let is_filled = |sector: u64| {
                write
                    .fill
                    .iter()
                    .any(|piece| piece.range.contains(&(sector * SECTOR)))
            };
            for Piece { range, from } in &write.fill {
                reads.extend(
                    (range.start / SECTOR..range.end / SECTOR).map(|sector| (sector, *from)),
                );
            }
            let sectors = write.range.start / SECTOR..write.range.end / SECTOR;
            all.extend(
                sectors
                    .filter(|sector| !is_filled(*sector))
                    .map(|sector| (sector, value)),
            );
        }
        let punched = punch.unwrap_or_default();
        all.extend((punched.start / SECTOR..punched.end / SECTOR).map(|sector| (sector, 0)));
        self.io.push(Io::Change {
            id,
            erases,
            reads,
            writes: all,
        });
    }

    /// Something at the file gets further, or ends.
    pub fn work(&mut self) -> Result<(), String> {
        if self.io.is_empty() {
            return Ok(());
        }
        let index = self.numbers.below(self.io.len() as u64) as usize;
        let ends_early = self.numbers.below(400) < self.fails;
        if !self.advance(index, 4) && !ends_early {
            return Ok(());
        }
        let fails = ends_early || self.numbers.below(100) < self.fails;
        let steps = match self.io.swap_remove(index) {
            Io::Change {
                id, erases, writes, ..
            } => {
                self.counts.torn += u64::from(!writes.is_empty());
                match erases {
                    true => self.counts.failed_erasures += u64::from(fails),
                    false => self.counts.failed_writes += u64::from(fails),
                }
                if !fails && self.written_durably.contains(&id) {
                    self.data.is_durable(id);
                }
                self.overlay.ended(id, !fails)
            }
            Io::Sync(began) => {
                self.counts.failed_syncs += u64::from(fails);
                let (data, tables) = (began >> 32, began & 0xffff_ffff);
                if fails {
                    self.data.fail_sync(data);
                    self.tables.fail_sync(tables);
                    self.is_lost = true;
                } else {
                    self.data.end_sync(data);
                    self.tables.end_sync(tables);
                }
                self.overlay.synced(!fails)
            }
            Io::Tables(_) => {
                self.counts.failed_tables += u64::from(fails);
                self.overlay.tables_written(!fails)
            }
        };
        self.carry_out(steps)
    }

    /// A few sectors of this; whether that was all.
    fn advance(&mut self, index: usize, most: u64) -> bool {
        for _ in 0..=self.numbers.below(most) {
            let (place, from) = match &mut self.io[index] {
                Io::Change { reads, writes, .. } => match reads.pop_front() {
                    Some(read) => read,
                    None if writes.is_empty() => return true,
                    None => {
                        let at = self.numbers.below(writes.len() as u64) as usize;
                        let (sector, value) = writes.swap_remove(at);
                        self.data.write(sector, value);
                        continue;
                    }
                },
                Io::Tables(sectors) if sectors.is_empty() => return true,
                Io::Tables(sectors) => {
                    let at = self.numbers.below(sectors.len() as u64) as usize;
                    let (sector, value) = sectors.swap_remove(at);
                    self.tables.write(sector, value);
                    continue;
                }
                Io::Sync(_) => return true,
            };
            let value = self.of(place, from);
            if let Io::Change { writes, .. } = &mut self.io[index] {
                writes.push((place, value));
            }
        }
        false
    }

    pub fn check(&mut self) -> Result<(), String> {
        let range = self.range();
        let bytes = range.start * SECTOR..range.end * SECTOR;
        let pieces = self.overlay.read(&bytes);
        self.counts.read_in_pieces += u64::from(pieces.len() > 1);
        let mut at = bytes.start;
        for piece in &pieces {
            for sector in piece.range.start / SECTOR..piece.range.end / SECTOR {
                if self.of(sector, piece.from) != self.read(sector) {
                    return Err(format!("sector {sector} is read in two ways"));
                }
            }
            if piece.range.start != at || piece.range.is_empty() {
                return Err(format!("{pieces:?} is not {bytes:?}"));
            }
            at = piece.range.end;
        }
        if at != bytes.end {
            return Err(format!("{pieces:?} ends before {bytes:?}"));
        }
        self.look(false)
    }

    /// Whether all is as the guest may find it.
    fn look(&mut self, after_cut: bool) -> Result<(), String> {
        let mut guest = std::mem::take(&mut self.guest);
        let found = guest.check(after_cut, |sector| self.read(sector));
        self.guest = guest;
        found
    }

    /// The process dies: what is under way may come in part, and then no more.
    pub fn kill(&mut self) -> Result<(), String> {
        self.counts.kills += 1;
        for index in 0..self.io.len() {
            for _ in 0..self.numbers.below(3) {
                self.advance(index, 20);
            }
        }
        self.io.clear();
        self.counts.unanswered += self.guest.is_told_nothing();
        self.open();
        self.look(false)
    }

    pub fn lose_power(&mut self) -> Result<(), String> {
        self.counts.power_cuts += 1;
        self.io.clear();
        self.counts.unanswered += self.guest.is_told_nothing();
        self.counts.lost_sectors += self.data.lose_power(&mut self.numbers);
        self.counts.lost_sectors += self.tables.lose_power(&mut self.numbers);
        self.map = self.said_by_tables()?;
        self.is_lost = false;
        self.open();
        self.look(true)?;
        let sectors = self.near_sectors();
        let content: std::collections::BTreeMap<u64, u64> = sectors
            .into_iter()
            .map(|sector| (sector, self.read(sector)))
            .collect();
        self.guest.begins_anew(|sector| content[&sector]);
        Ok(())
    }

    /// The words as tables say it, through their bytes.
    fn said_by_tables(&self) -> Result<Map, String> {
        let map = words(&self.layout);
        let states = States::over(Arc::clone(&map), &self.layout).unwrap();
        let mut blocks: Vec<u64> = self.tables.written().map(|sector| sector / 8).collect();
        blocks.dedup();
        for block in blocks {
            let mut said = Words::default();
            for (sector, pair) in (block * 8..).zip(said.as_chunks_mut::<2>().0) {
                *pair = self.tables.read(sector);
            }
            let bytes = table::encode(block, &said);
            let read = table::decode(&self.layout, block, &bytes);
            states.load(block, &read.map_err(|why| why.to_string())?);
        }
        Ok(map)
    }

    fn open(&mut self) {
        let over = |map: &Map| States::over(Arc::clone(map), &self.layout).unwrap();
        let overlay = Overlay::new(&self.layout, over(&self.map), vec![over(&self.lower)]);
        self.overlay = overlay.in_room_of(self.room);
        #[cfg(feature = "planted-faults")]
        if let Some(plant) = self.plant {
            self.overlay.plant(plant);
            if plant == godwit_delta::Plant::LossForgotten {
                return;
            }
        }
        if self.is_lost {
            self.overlay.lose();
        }
    }

    /// Nothing more goes wrong, and everything ends; then a delta is complete by its tables alone. One that may have lost something is only after
    /// its guest was started anew.
    pub fn end(mut self) -> Result<Counts, String> {
        self.fails = 0;
        if self.is_lost {
            self.lose_power()?;
        }
        for _ in 0..10_000 {
            self.work()?;
        }
        self.last += 1;
        self.guest.flushes(self.last);
        let steps = self.overlay.flush(self.last);
        self.carry_out(steps)?;
        for _ in 0..1_000 {
            self.work()?;
        }
        if !self.overlay.rests() || self.guest.waits() > 0 || !self.io.is_empty() {
            return Err(format!("it does not end: {:?}", self.overlay));
        }
        let is = |map: &Map| {
            map.iter()
                .map(|word| word.load(Ordering::Relaxed))
                .collect::<Vec<_>>()
        };
        match is(&self.map) == is(&self.said_by_tables()?) {
            true => Ok(self.counts),
            false => Err("after a last round the tables do not say everything".to_owned()),
        }
    }
}

/// The sectors of whole grains.
fn whole(sectors: &Range<u64>) -> Range<u64> {
    let end = match sectors.end == BYTES / SECTOR {
        true => sectors.end,
        false => sectors.end / PER_GRAIN * PER_GRAIN,
    };
    let start = sectors.start.div_ceil(PER_GRAIN) * PER_GRAIN;
    start.min(end)..end
}
