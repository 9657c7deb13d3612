//! The lowest filter of a disk with deltas: sends each part of a request to the layer that has it.
//!
//! What goes where is decided by `godwit_delta`; here it is carried out. What one layer has goes there as it is, with the guest's own
//! buffers. A read of several is read into memory of ours, piece by piece; so is what fills a grain that is written in part.
//!
//! Who owns the state: the disk's thread. Refuses: requests outside of the disk. Errors go up as they are, and change no grain's state; what
//! was copied of a read that failed later is in the guest's buffers, as after any read that fails. A sync that failed stands in the words of the top's
//! states, before anybody hears of it: whoever has them next calls nothing durable either.

use std::collections::BTreeMap;

use godwit_delta::{Change, Layout, Overlay, Source, States, Step};
use rustix::io::Errno;

use super::pieces::{Ended, Pieces};
use crate::delta::Words;
use crate::request::Place;
use crate::{Data, Filter, Flow, Outcome, Request, Work};

/// Zeros for a guest that reads some.
const ZEROS: [u8; 4096] = [0; 4096];

/// Carries out an [`Overlay`].
pub(crate) struct Overlaying {
    overlay: Overlay<Words>,
    /// Those of the top.
    words: Words,
    bytes: u64,
    /// What came from above and is not answered, by numbers of the filter's own.
    requests: BTreeMap<u64, Held>,
    last: u64,
    /// Those that went down with the guest's own buffers, by who made them and what he knows them by.
    below: BTreeMap<(Option<usize>, u64), u64>,
    pieces: Pieces,
    /// What became of the last round, as far as it is.
    round: Outcome,
}

/// A request from above.
#[derive(Debug)]
pub(super) struct Held {
    /// `None` while it is below.
    pub(super) request: Option<Request>,
    /// Its own pieces that have not ended,
    pub(super) left: usize,
    /// and what became of those that have: of all of them done, or the first failure.
    pub(super) outcome: Outcome,
    durable: bool,
}

impl Overlaying {
    /// Over a top and the deltas below it, the next one first.
    pub(crate) fn new(layout: &Layout, top: States<Words>, lower: Vec<States<Words>>) -> Self {
        let words = top.words().clone();
        let overlay = Overlay::new(layout, top, lower);
        let top = overlay.top();
        Self {
            overlay,
            words,
            bytes: layout.disk_bytes(),
            requests: BTreeMap::new(),
            last: 0,
            below: BTreeMap::new(),
            pieces: Pieces::new(top, layout),
            round: Outcome::Done,
        }
    }

    fn read(&mut self, request: Request, flow: &mut Flow<'_>) {
        let Work::Read(range) = request.work.clone() else {
            return;
        };
        match self.overlay.read_at_once(&range) {
            Some(Source::Layer(layer)) => self.send(request, layer, None, flow),
            Some(Source::Zero) => {
                let mut request = request;
                let len = range.end - range.start;
                let outcome = match zero(&mut request.data, 0, len as usize) {
                    Ok(()) => Outcome::Done,
                    Err(error) => Outcome::Failed(error),
                };
                finish(request, outcome, flow);
            }
            None => {
                let pieces = self.overlay.read(&range);
                let id = self.hold(request);
                if let Some(held) = self.requests.get_mut(&id) {
                    self.pieces.read(id, held, (range.start, pieces));
                }
                self.pump(flow);
                self.settle(id, flow);
            }
        }
    }

    /// Begins what there is memory for.
    fn pump(&mut self, flow: &mut Flow<'_>) {
        for failed in self.pieces.pump(&mut self.requests, flow) {
            self.settle(failed, flow);
        }
    }

    fn hold(&mut self, request: Request) -> u64 {
        self.last += 1;
        let held = Held {
            durable: request.durable,
            request: Some(request),
            left: 0,
            outcome: Outcome::Done,
        };
        self.requests.insert(self.last, held);
        self.last
    }

    /// It goes down with its own buffers.
    fn send(&mut self, mut request: Request, layer: usize, id: Option<u64>, flow: &mut Flow<'_>) {
        request.place = match layer {
            0 => Place::Own,
            layer => Place::Layer(layer),
        };
        if let Some(id) = id {
            self.below.insert((request.maker, request.token), id);
        }
        flow.down(request);
    }

    fn carry_out(&mut self, steps: Vec<Step>, flow: &mut Flow<'_>) {
        for step in steps {
            match step {
                Step::Write { id, write, durable } if write.fill.is_empty() => {
                    let held = self.requests.get_mut(&id);
                    if let Some(mut request) = held.and_then(|held| held.request.take()) {
                        request.durable = durable;
                        self.send(request, self.overlay.top(), Some(id), flow);
                    }
                }
                Step::Write { id, write, .. } => {
                    if let Some(held) = self.requests.get_mut(&id) {
                        self.pieces.write(id, held, &write, true);
                    }
                }
                Step::Erase { id, zeros, punch } => {
                    if let Some(held) = self.requests.get_mut(&id) {
                        for zero in &zeros {
                            self.pieces.write(id, held, zero, false);
                        }
                        if let Some(range) = punch {
                            self.pieces.punch(id, held, range, flow);
                        }
                    }
                }
                Step::Sync => self.pieces.sync(flow),
                Step::Tables(blocks) => self.pieces.tables(blocks),
                Step::Answer { id, done } => self.answer(id, done, flow),
            }
        }
        self.pump(flow);
    }

    fn answer(&mut self, id: u64, done: bool, flow: &mut Flow<'_>) {
        let Some(held) = self.requests.remove(&id) else {
            return;
        };
        let round = match self.words.are_lost() {
            true => Outcome::Failed(Errno::IO),
            false => self.round,
        };
        let outcome = match (done, held.outcome) {
            (true, _) => Outcome::Done,
            (false, Outcome::Done) if round == Outcome::Done => Outcome::Failed(Errno::INVAL),
            (false, Outcome::Done) => round,
            (false, failure) => failure,
        };
        if let Some(mut request) = held.request {
            request.durable = held.durable;
            // The engine calls it a failure of the storage where the kernel finds no room while it makes data durable.
            request.lost_nothing = request.work == Work::Flush && outcome.lacks_room();
            finish(request, outcome, flow);
        }
    }

    /// A request of which all pieces may have ended.
    fn settle(&mut self, id: u64, flow: &mut Flow<'_>) {
        let Some(held) = self.requests.get(&id).filter(|held| held.left == 0) else {
            return;
        };
        let outcome = held.outcome;
        let is_read = held
            .request
            .as_ref()
            .is_some_and(|request| matches!(request.work, Work::Read(_)));
        if is_read {
            if let Some(request) = self.requests.remove(&id).and_then(|held| held.request) {
                finish(request, outcome, flow);
            }
            return;
        }
        let steps = self.overlay.ended(id, outcome == Outcome::Done);
        self.carry_out(steps, flow);
    }
}

impl Filter for Overlaying {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        let fits = request.work.range().is_none_or(|range| {
            let transfers = matches!(request.work, Work::Read(_) | Work::Write(_));
            let len = range.end.saturating_sub(range.start);
            let whole = !transfers || len == request.data.len() as u64;
            len > 0 && range.end <= self.bytes && whole
        });
        if !fits {
            return flow.up(request, Outcome::Failed(Errno::INVAL));
        }
        // Whoever makes it durable while nothing is under way may have failed.
        if self.words.are_lost() {
            self.overlay.lose();
        }
        let change = match &request.work {
            Work::Read(_) => return self.read(request, flow),
            Work::Flush => {
                let id = self.hold(request);
                let steps = self.overlay.flush(id);
                return self.carry_out(steps, flow);
            }
            Work::Write(range) => Change::Write(range.clone()),
            Work::Discard(range) => Change::Discard(range.clone()),
            Work::WriteZeroes { range, .. } => Change::Zeroes(range.clone()),
        };
        let durable = request.durable;
        let id = self.hold(request);
        let steps = self.overlay.change(id, change, durable);
        self.carry_out(steps, flow);
    }

    fn up(&mut self, mut request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        request.place = Place::Own;
        let Some(id) = self.below.remove(&(request.maker, request.token)) else {
            return flow.up(request, outcome);
        };
        // The kernel tells once of what it lost, perhaps of others.
        if request.durable && outcome.storage_fails() {
            self.words.lose();
            self.overlay.lose();
        }
        if let Some(held) = self.requests.get_mut(&id) {
            request.durable = held.durable;
            (held.request, held.outcome) = (Some(request), outcome);
        }
        let steps = self.overlay.ended(id, outcome == Outcome::Done);
        self.carry_out(steps, flow);
    }

    fn made(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        match self
            .pieces
            .ended(&request, outcome, &mut self.requests, flow)
        {
            Ended::Nothing => {}
            Ended::Piece(id) => self.settle(id, flow),
            Ended::Sync(outcome) => {
                self.round = outcome;
                if outcome != Outcome::Done {
                    self.words.lose();
                }
                let steps = self.overlay.synced(outcome == Outcome::Done);
                self.carry_out(steps, flow);
            }
            Ended::Tables(outcome) => {
                self.round = outcome;
                let steps = self.overlay.tables_written(outcome == Outcome::Done);
                self.carry_out(steps, flow);
            }
        }
        self.pump(flow);
    }
}

/// A guest's pages that were written by us are told of before it is answered.
fn finish(mut request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
    if let Data::ToGuest(data) = &mut request.data {
        data.written();
    }
    flow.up(request, outcome);
}

/// Puts bytes into the buffers of a read.
pub(super) fn put(data: &mut Data, skip: usize, bytes: &[u8]) -> Result<(), Errno> {
    match data {
        Data::ToGuest(data) => data.copy_from(skip, bytes).map_err(|_| Errno::NOMEM),
        Data::Own(buffer) => {
            let to = buffer
                .bytes_mut()
                .get_mut(skip..)
                .and_then(|to| to.get_mut(..bytes.len()));
            to.map(|to| to.copy_from_slice(bytes)).ok_or(Errno::INVAL)
        }
        _ => Err(Errno::INVAL),
    }
}

/// Puts so many zeros there.
pub(super) fn zero(data: &mut Data, skip: usize, len: usize) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let count = (len - done).min(ZEROS.len());
        put(data, skip + done, ZEROS.split_at(count).0)?;
        done += count;
    }
    Ok(())
}
