//! What [`Overlaying`](super::overlaying::Overlaying) has below it that is not a request of the guest's as it came: pieces of reads, grains that
//! are filled, holes, and rounds.
//!
//! All of it takes memory of ours, of which no more than [`MEMORY`] is in use at once: the rest waits its turn, in order, so that no guest
//! decides how much that is. No piece is larger than [`PIECE`].
//!
//! Who owns the state: the filter. Refuses nothing.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use godwit_delta::states::Words;
use godwit_delta::{BLOCK, Filled, Layout, Piece, Source, table};
use rustix::io::Errno;

use super::overlaying::{Held, put, zero};
use crate::request::Place;
use crate::{Buffer, Data, Flow, Outcome, Request, Work};

/// Most bytes of one piece.
const PIECE: u64 = 1 << 20;
/// Most bytes of ours that are in use at once, but that one piece may always be.
const MEMORY: u64 = 16 << 20;

/// Whom it concerns that something below is over.
pub(super) enum Ended {
    /// Nothing that anybody waits for yet.
    Nothing,
    /// A piece of this request.
    Piece(u64),
    Sync(Outcome),
    /// All blocks of a round.
    Tables(Outcome),
}

/// What waits for memory.
#[derive(Debug)]
enum Waiting {
    /// Read this, for the request of this number that begins there on the disk.
    Read { id: u64, start: u64, piece: Piece },
    /// Write this, which is the guest's, or zeros, but for what fills it.
    Write {
        id: u64,
        write: Filled,
        guests: bool,
    },
    /// Write blocks of the tables that follow one another.
    Blocks(Vec<(u64, Words)>),
}

impl Waiting {
    fn bytes(&self) -> u64 {
        match self {
            Self::Read { piece, .. } => piece.range.end - piece.range.start,
            Self::Write { write, .. } => write.range.end - write.range.start,
            Self::Blocks(blocks) => blocks.len() as u64 * BLOCK,
        }
    }
}

/// What is below, by its token.
#[derive(Debug)]
enum Below {
    /// A piece of a read, and where in its request it goes.
    Read {
        id: u64,
        skip: usize,
    },
    /// What fills a write of this number, and where in it.
    Fill {
        write: u64,
        skip: usize,
    },
    Write {
        id: u64,
        bytes: u64,
    },
    Punch {
        id: u64,
    },
    Sync,
    Blocks {
        bytes: u64,
    },
}

/// A write that is being filled.
#[derive(Debug)]
struct Filling {
    id: u64,
    range: Range<u64>,
    buffer: Buffer,
    left: usize,
    outcome: Outcome,
}

#[derive(Debug)]
pub(super) struct Pieces {
    top: usize,
    /// Where the first block of the tables is in the top's file.
    tables_at: u64,
    waiting: VecDeque<Waiting>,
    memory: u64,
    below: BTreeMap<u64, Below>,
    fillings: BTreeMap<u64, Filling>,
    /// The last number of any of these.
    last: u64,
    /// Writes of a round that have not ended, and what became of the others.
    blocks_left: usize,
    blocks: Outcome,
}

impl Pieces {
    pub(super) fn new(top: usize, layout: &Layout) -> Self {
        Self {
            top,
            tables_at: layout.tables().start,
            waiting: VecDeque::new(),
            memory: 0,
            below: BTreeMap::new(),
            fillings: BTreeMap::new(),
            last: 0,
            blocks_left: 0,
            blocks: Outcome::Done,
        }
    }

    /// Reads pieces of a request that begins there.
    pub(super) fn read(&mut self, id: u64, held: &mut Held, (start, pieces): (u64, Vec<Piece>)) {
        for piece in pieces {
            if piece.from == Source::Zero {
                let (skip, len) = (
                    piece.range.start - start,
                    piece.range.end - piece.range.start,
                );
                let data = held.request.as_mut().map(|request| &mut request.data);
                let zeroed = data.map_or(Err(Errno::INVAL), |data| {
                    zero(data, skip as usize, len as usize)
                });
                fails(&mut held.outcome, zeroed);
                continue;
            }
            for range in cut(&piece.range) {
                held.left += 1;
                let piece = Piece {
                    range,
                    from: piece.from,
                };
                self.waiting.push_back(Waiting::Read { id, start, piece });
            }
        }
    }

    /// Writes to the top what is the guest's, or zeros, but for what fills it.
    pub(super) fn write(&mut self, id: u64, held: &mut Held, write: &Filled, guests: bool) {
        for range in cut(&write.range) {
            held.left += 1;
            let inside = |piece: &Piece| {
                let start = piece.range.start.max(range.start);
                let end = piece.range.end.min(range.end);
                (start < end).then_some(Piece {
                    range: start..end,
                    from: piece.from,
                })
            };
            let fill = write.fill.iter().filter_map(inside).collect();
            let write = Filled { range, fill };
            self.waiting.push_back(Waiting::Write { id, write, guests });
        }
    }

    pub(super) fn punch(
        &mut self,
        id: u64,
        held: &mut Held,
        range: Range<u64>,
        flow: &mut Flow<'_>,
    ) {
        held.left += 1;
        let place = Place::Layer(self.top);
        self.make(
            place,
            (Work::Discard(range), Data::None),
            Below::Punch { id },
            flow,
        );
    }

    pub(super) fn sync(&mut self, flow: &mut Flow<'_>) {
        let place = Place::Layer(self.top);
        self.make(place, (Work::Flush, Data::None), Below::Sync, flow);
    }

    /// Writes blocks of the tables, those that follow one another at once.
    pub(super) fn tables(&mut self, blocks: Vec<(u64, Words)>) {
        self.blocks = Outcome::Done;
        let mut run: Vec<(u64, Words)> = Vec::new();
        for (block, words) in blocks {
            let follows = run.last().is_none_or(|last| last.0 + 1 == block);
            if !follows || run.len() as u64 * BLOCK >= PIECE {
                let run = std::mem::take(&mut run);
                self.blocks_left += 1;
                self.waiting.push_back(Waiting::Blocks(run));
            }
            run.push((block, words));
        }
        self.blocks_left += 1;
        self.waiting.push_back(Waiting::Blocks(run));
    }

    /// Begins what there is memory for. Returns the requests of which something has ended by that, since it failed.
    pub(super) fn pump(
        &mut self,
        requests: &mut BTreeMap<u64, Held>,
        flow: &mut Flow<'_>,
    ) -> Vec<u64> {
        let mut failed = Vec::new();
        while let Some(next) = self.waiting.front() {
            let bytes = next.bytes();
            if self.memory > 0 && self.memory + bytes > MEMORY {
                break;
            }
            let Some(next) = self.waiting.pop_front() else {
                break;
            };
            self.memory += bytes;
            match next {
                Waiting::Read { id, start, piece } => {
                    let skip = (piece.range.start - start) as usize;
                    self.read_one(piece, Below::Read { id, skip }, flow);
                }
                Waiting::Write { id, write, guests } => {
                    let guest = requests.get(&id).filter(|_| guests);
                    let guest = guest.and_then(|held| held.request.as_ref());
                    let number = self.fill(id, write, guest, flow);
                    failed.extend(self.filled(number, requests, flow));
                }
                Waiting::Blocks(blocks) => self.write_blocks(&blocks, flow),
            }
        }
        failed
    }

    fn read_one(&mut self, piece: Piece, below: Below, flow: &mut Flow<'_>) {
        let place = match piece.from {
            Source::Layer(layer) if layer > 0 => Place::Layer(layer),
            _ => Place::Own,
        };
        let buffer = Buffer::zeroed((piece.range.end - piece.range.start) as usize);
        let work = Work::Read(piece.range);
        self.make(place, (work, Data::Own(buffer)), below, flow);
    }

    /// Returns the number of the write, of which one thing more is missing than is read for it.
    fn fill(
        &mut self,
        id: u64,
        write: Filled,
        guest: Option<&Request>,
        flow: &mut Flow<'_>,
    ) -> u64 {
        self.last += 1;
        let number = self.last;
        let mut filling = Filling {
            id,
            buffer: Buffer::zeroed((write.range.end - write.range.start) as usize),
            range: write.range,
            left: 1,
            outcome: Outcome::Done,
        };
        if let Some(request) = guest {
            let taken = take(request, &filling.range, filling.buffer.bytes_mut());
            fails(&mut filling.outcome, taken);
        }
        let start = filling.range.start;
        let read = |piece: &Piece| piece.from != Source::Zero;
        for piece in write.fill.into_iter().filter(read) {
            filling.left += 1;
            let skip = (piece.range.start - start) as usize;
            let below = Below::Fill {
                write: number,
                skip,
            };
            self.read_one(piece, below, flow);
        }
        self.fillings.insert(number, filling);
        number
    }

    /// One thing less is missing for a write. Returns its request where that was the last and something failed: nothing is written then.
    fn filled(
        &mut self,
        number: u64,
        requests: &mut BTreeMap<u64, Held>,
        flow: &mut Flow<'_>,
    ) -> Option<u64> {
        let filling = self.fillings.get_mut(&number)?;
        filling.left -= 1;
        if filling.left > 0 {
            return None;
        }
        let filling = self.fillings.remove(&number)?;
        let (id, bytes) = (filling.id, filling.buffer.len() as u64);
        if filling.outcome != Outcome::Done {
            self.memory = self.memory.saturating_sub(bytes);
            ends(requests.get_mut(&id)?, filling.outcome);
            return Some(id);
        }
        let what = (Work::Write(filling.range), Data::Own(filling.buffer));
        self.make(
            Place::Layer(self.top),
            what,
            Below::Write { id, bytes },
            flow,
        );
        None
    }

    fn write_blocks(&mut self, blocks: &[(u64, Words)], flow: &mut Flow<'_>) {
        let len = blocks.len() * BLOCK as usize;
        let mut buffer = Buffer::zeroed(len);
        for (to, (block, words)) in buffer.bytes_mut().chunks_mut(BLOCK as usize).zip(blocks) {
            to.copy_from_slice(&table::encode(*block, words));
        }
        let first = blocks.first().map_or(0, |block| block.0);
        let start = self.tables_at + first * BLOCK;
        let work = Work::Write(start..start + len as u64);
        let below = Below::Blocks { bytes: len as u64 };
        self.make(
            Place::Inside(self.top),
            (work, Data::Own(buffer)),
            below,
            flow,
        );
    }

    fn make(&mut self, place: Place, what: (Work, Data), below: Below, flow: &mut Flow<'_>) {
        self.last += 1;
        self.below.insert(self.last, below);
        flow.make_at(place, what, self.last);
    }

    /// One of these has ended.
    pub(super) fn ended(
        &mut self,
        request: &Request,
        outcome: Outcome,
        requests: &mut BTreeMap<u64, Held>,
        flow: &mut Flow<'_>,
    ) -> Ended {
        let Some(below) = self.below.remove(&request.token) else {
            return Ended::Nothing;
        };
        let bytes = request.data.len() as u64;
        let (id, outcome) = match below {
            Below::Sync => return Ended::Sync(outcome),
            Below::Blocks { bytes } => return self.blocks_written(bytes, outcome),
            Below::Fill { write, skip } => {
                self.read_for(write, skip, (request, outcome));
                let failed = self.filled(write, requests, flow);
                return failed.map_or(Ended::Nothing, Ended::Piece);
            }
            Below::Read { id, skip } => {
                self.memory = self.memory.saturating_sub(bytes);
                let held = requests.get_mut(&id);
                let to = held.and_then(|held| held.request.as_mut());
                (id, copy(request, outcome, to, skip))
            }
            Below::Write { id, bytes } => {
                self.memory = self.memory.saturating_sub(bytes);
                (id, outcome)
            }
            // A file system that makes no holes keeps the room, and the entry says zero all the same.
            Below::Punch { id } if outcome == Outcome::Unsupported => (id, Outcome::Done),
            Below::Punch { id } => (id, outcome),
        };
        let Some(held) = requests.get_mut(&id) else {
            return Ended::Nothing;
        };
        ends(held, outcome);
        Ended::Piece(id)
    }

    fn blocks_written(&mut self, bytes: u64, outcome: Outcome) -> Ended {
        self.memory = self.memory.saturating_sub(bytes);
        self.blocks_left = self.blocks_left.saturating_sub(1);
        if self.blocks == Outcome::Done {
            self.blocks = outcome;
        }
        match self.blocks_left {
            0 => Ended::Tables(self.blocks),
            _ => Ended::Nothing,
        }
    }

    /// What fills a write was read.
    fn read_for(&mut self, write: u64, skip: usize, (request, outcome): (&Request, Outcome)) {
        let (Some(filling), Data::Own(buffer)) = (self.fillings.get_mut(&write), &request.data)
        else {
            return;
        };
        let to = filling.buffer.bytes_mut().get_mut(skip..);
        if let Some(to) = to.and_then(|to| to.get_mut(..buffer.len())) {
            to.copy_from_slice(buffer.bytes());
        }
        if filling.outcome == Outcome::Done {
            filling.outcome = outcome;
        }
    }
}

/// The guest gets a piece that was read.
fn copy(read: &Request, outcome: Outcome, to: Option<&mut Request>, skip: usize) -> Outcome {
    let (Outcome::Done, Data::Own(buffer), Some(to)) = (outcome, &read.data, to) else {
        return outcome;
    };
    match put(&mut to.data, skip, buffer.bytes()) {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Failed(error),
    }
}

fn ends(held: &mut Held, outcome: Outcome) {
    held.left = held.left.saturating_sub(1);
    if held.outcome == Outcome::Done {
        held.outcome = outcome;
    }
}

fn fails(outcome: &mut Outcome, result: Result<(), Errno>) {
    if let (Outcome::Done, Err(error)) = (*outcome, result) {
        *outcome = Outcome::Failed(error);
    }
}

/// Parts of a range that are no larger than a piece.
fn cut(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let range = range.clone();
    let starts = range.clone().step_by(PIECE as usize);
    starts.map(move |start| start..(start + PIECE).min(range.end))
}

/// The guest's bytes of a part of the disk, put where they are in it.
fn take(request: &Request, range: &Range<u64>, to: &mut [u8]) -> Result<(), Errno> {
    let Some(guests) = request.work.range() else {
        return Err(Errno::INVAL);
    };
    let (start, end) = (guests.start.max(range.start), guests.end.min(range.end));
    if start >= end {
        return Ok(());
    }
    let skip = (start - guests.start) as usize;
    let to = to.get_mut((start - range.start) as usize..(end - range.start) as usize);
    let to = to.ok_or(Errno::INVAL)?;
    let own = match &request.data {
        Data::FromGuest(data) => return data.copy_to(skip, to).map_err(|_| Errno::NOMEM),
        Data::Own(buffer) => buffer.bytes(),
        Data::Shared(buffer) => buffer.bytes(),
        Data::None | Data::ToGuest(_) => return Err(Errno::INVAL),
    };
    let own = own.get(skip..skip + to.len()).ok_or(Errno::INVAL)?;
    to.copy_from_slice(own);
    Ok(())
}
