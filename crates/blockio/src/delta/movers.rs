//! Threads that move pieces of an image, as many at once as whoever hands them out wants.
//!
//! Storage answers many small requests in the time of one; a delta whose guest wrote here and there consists of such. Pieces do not overlap, and
//! go in any order. Owns the threads, which end with the merge that has them. Refuses: to go on after one has failed.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;

use super::pieces::Piece;
use crate::Error;
use crate::filters::REGION;

/// So many pieces are on their way at most.
pub const AT_ONCE_MAX: usize = 32;
/// All that are on their way have no more memory than so many bytes for each that may be, or than one of them needs: 8 MiB.
const BYTES_EACH: u64 = REGION;

/// How far it is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Merged {
    pub copied: u64,
    pub zeroed: u64,
    /// Of pieces that are on their way.
    pub under_way: u64,
}

type Work<'w> = &'w (dyn Fn(&Piece) -> Result<(), Error> + Sync);

/// What is on its way.
pub(super) struct Movers<'w> {
    work: Work<'w>,
    flow: Mutex<Flow>,
    /// There is something to be done for a thread.
    handed: Condvar,
    /// A piece is not on its way any more, for whoever hands them out.
    ended: Condvar,
}

#[derive(Default)]
struct Flow {
    /// Pieces that no thread has begun.
    handed_out: VecDeque<Piece>,
    /// Pieces that are not done, those of no thread among them.
    under_way: usize,
    /// Bytes that are read at once for them.
    bytes: u64,
    done: Merged,
    failure: Option<Error>,
    has_ended: bool,
}

/// Hands pieces to the threads.
pub(super) struct Led<'s, 'e: 's> {
    movers: &'e Movers<'e>,
    scope: &'s Scope<'s, 'e>,
    threads: usize,
}

/// Bytes that are read at once for a piece.
fn read_for(piece: &Piece) -> u64 {
    let span = piece.span();
    span.end - span.start
}

impl Flow {
    /// Whether a piece for which so many bytes are read may be on its way, too, where so many may be.
    fn has_room(&self, bytes: u64, at_once: usize) -> bool {
        let most = BYTES_EACH * at_once as u64;
        let few = self.under_way < at_once && self.bytes.saturating_add(bytes) <= most;
        few || self.under_way == 0
    }

    fn begins(&mut self, piece: &Piece) {
        self.under_way += 1;
        self.bytes += read_for(piece);
        self.done.under_way += piece.bytes();
    }

    fn ends(&mut self, piece: &Piece) {
        self.under_way -= 1;
        self.bytes -= read_for(piece);
        self.done.under_way -= piece.bytes();
    }
}

impl<'w> Movers<'w> {
    pub fn new(work: Work<'w>) -> Self {
        Self {
            work,
            flow: Mutex::default(),
            handed: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    /// Whatever `lead` comes to: nothing is on its way any more when this returns.
    pub fn lead<R>(
        &self,
        lead: impl FnOnce(&mut Led<'_, '_>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let led = std::thread::scope(|scope| {
            let _ending = Ending(self);
            lead(&mut Led {
                movers: self,
                scope,
                threads: 0,
            })
        });
        // Also one of the last, of which nobody has heard.
        match self.lock().failure.take() {
            Some(error) => Err(error),
            None => led,
        }
    }

    pub fn done(&self) -> Merged {
        self.lock().done
    }

    fn lock(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until that is so of what is on its way. Refuses where a piece has failed.
    fn wait_until(&self, is_so: impl Fn(&Flow) -> bool) -> Result<MutexGuard<'_, Flow>, Error> {
        let mut flow = self.lock();
        loop {
            if let Some(error) = flow.failure.take() {
                return Err(error);
            }
            if is_so(&flow) {
                return Ok(flow);
            }
            let waited = self.ended.wait(flow);
            flow = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes piece after piece, until the leader ends.
    fn move_all(&self) {
        while let Some(piece) = self.next() {
            let moved = (self.work)(&piece);
            let mut flow = self.lock();
            flow.ends(&piece);
            match moved {
                Ok(()) => flow.done.add(&piece),
                Err(error) => {
                    flow.has_ended = true;
                    flow.failure.get_or_insert(error);
                }
            }
            drop(flow);
            self.ended.notify_one();
        }
    }

    /// What a thread is to do next; nothing at the end.
    fn next(&self) -> Option<Piece> {
        let mut flow = self.lock();
        while !flow.has_ended {
            if let Some(piece) = flow.handed_out.pop_front() {
                return Some(piece);
            }
            let waited = self.handed.wait(flow);
            flow = waited.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

impl Merged {
    /// Of all pieces that have ended.
    pub fn moved(&self) -> u64 {
        self.copied.saturating_add(self.zeroed)
    }

    /// With those that are on their way.
    pub fn begun(&self) -> u64 {
        self.moved().saturating_add(self.under_way)
    }

    fn add(&mut self, piece: &Piece) {
        match piece.is_zero {
            true => self.zeroed += piece.bytes(),
            false => self.copied += piece.bytes(),
        }
    }
}

impl Led<'_, '_> {
    pub fn done(&self) -> Merged {
        self.movers.done()
    }

    /// Whether any is on its way.
    pub fn is_busy(&self) -> bool {
        self.movers.lock().under_way > 0
    }

    /// Has a piece moved, once fewer than so many are on their way; by the caller's own thread where it is to be the only one.
    pub fn take(&mut self, piece: Piece, at_once: usize) -> Result<(), Error> {
        let at_once = at_once.clamp(1, AT_ONCE_MAX);
        let bytes = read_for(&piece);
        let has_room = |flow: &Flow| flow.has_room(bytes, at_once);
        let busy = self.movers.wait_until(has_room)?.under_way;
        if at_once > 1 && busy >= self.threads {
            self.add_thread();
        }
        if at_once == 1 || self.threads == 0 {
            (self.movers.work)(&piece)?;
            self.movers.lock().done.add(&piece);
            return Ok(());
        }
        let mut flow = self.movers.lock();
        flow.begins(&piece);
        flow.handed_out.push_back(piece);
        drop(flow);
        self.movers.handed.notify_one();
        Ok(())
    }

    pub fn wait_for_all(&self) -> Result<(), Error> {
        self.movers.wait_until(|flow| flow.under_way == 0).map(drop)
    }

    /// As many as there are, where there are no more.
    fn add_thread(&mut self) {
        let movers = self.movers;
        let thread = std::thread::Builder::new().name("disk-merge".to_owned());
        let begun = thread.spawn_scoped(self.scope, move || movers.move_all());
        self.threads += usize::from(begun.is_ok());
    }
}

/// Ends the threads, each with the piece that it has.
struct Ending<'m, 'w>(&'m Movers<'w>);

impl Drop for Ending<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.handed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_delta::Move;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);
    const BLOCK: u64 = 4096;

    fn piece_of(number: u64, bytes: u64) -> Piece {
        Piece::of(Move::Copy(number * bytes..(number + 1) * bytes))
    }

    fn piece(number: u64) -> Piece {
        piece_of(number, BLOCK)
    }

    fn number(piece: &Piece) -> u64 {
        piece.span().start / BLOCK
    }

    fn failure() -> Error {
        Error::System {
            action: "move a piece",
            source: std::io::ErrorKind::Other.into(),
        }
    }

    #[test]
    fn as_many_pieces_are_on_their_way_as_may_be_and_each_is_moved_once() {
        const AT_ONCE: usize = 8;
        let (inside, met) = (Mutex::new((0, 0)), Condvar::new());
        let moved = Mutex::new(Vec::new());
        // Each of the first waits for the others, which only come where they may come at the same time.
        let work = |one: &Piece| {
            let mut state = inside.lock().unwrap();
            state.0 += 1;
            state.1 = state.1.max(state.0);
            met.notify_all();
            let waited = met.wait_timeout_while(state, LONG, |state| state.1 < AT_ONCE);
            let (mut state, waited) = waited.unwrap();
            assert!(!waited.timed_out(), "the others did not come");
            state.0 -= 1;
            moved.lock().unwrap().push(number(one));
            Ok(())
        };
        let movers = Movers::new(&work);
        let whole = movers.lead(|led| {
            (0..100).try_for_each(|number| led.take(piece(number), AT_ONCE))?;
            led.wait_for_all()
        });
        whole.unwrap();
        assert_eq!(inside.lock().unwrap().1, AT_ONCE);
        assert_eq!(movers.done().copied, 100 * BLOCK);
        let mut moved = moved.into_inner().unwrap();
        moved.sort_unstable();
        assert_eq!(moved, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn one_at_a_time_is_moved_before_the_next_is_asked_for() {
        let here = std::thread::current().id();
        let work = |_: &Piece| {
            assert_eq!(std::thread::current().id(), here);
            Ok(())
        };
        let movers = Movers::new(&work);
        let whole = movers.lead(|led| {
            for number in 0..5 {
                led.take(piece(number), 1)?;
                assert_eq!(led.done().copied, (number + 1) * BLOCK);
            }
            Ok(())
        });
        whole.unwrap();
    }

    #[test]
    fn a_piece_that_fails_ends_it_and_nothing_is_on_its_way_then() {
        for at_once in [1, 2, AT_ONCE_MAX] {
            let inside = AtomicUsize::new(0);
            let work = |one: &Piece| {
                inside.fetch_add(1, Ordering::SeqCst);
                let fails = number(one) == 40;
                std::thread::yield_now();
                inside.fetch_sub(1, Ordering::SeqCst);
                match fails {
                    true => Err(failure()),
                    false => Ok(()),
                }
            };
            let movers = Movers::new(&work);
            let ended = movers.lead(|led| {
                (0..1000).try_for_each(|number| led.take(piece(number), at_once))?;
                led.wait_for_all()
            });
            assert!(ended.unwrap_err().to_string().contains("move a piece"));
            assert_eq!(inside.load(Ordering::SeqCst), 0);
            assert!(movers.done().copied < 1000 * BLOCK);
        }
    }

    #[test]
    fn long_pieces_on_their_way_are_fewer_and_one_may_always_be() {
        let mut flow = Flow::default();
        let long = piece_of(0, 1 << 20);
        let bytes = read_for(&long);
        assert!(flow.has_room(bytes, 1), "nothing else is on its way");
        let mut most = |at_once: usize| {
            while flow.has_room(bytes, at_once) {
                flow.begins(&long);
            }
            (flow.under_way, flow.done.under_way >> 20)
        };
        let seen = [1, 4, 8, AT_ONCE_MAX].map(&mut most);
        assert_eq!(seen, [(1, 1), (1, 1), (2, 2), (8, 8)]);
        assert!(!flow.has_room(BLOCK, AT_ONCE_MAX));
        flow.ends(&long);
        assert!(flow.has_room(BLOCK, AT_ONCE_MAX));
        assert_eq!((flow.under_way, flow.done.under_way >> 20), (7, 7));
    }

    #[test]
    fn whoever_stops_waits_for_what_is_on_its_way_alone_and_hears_of_what_failed_of_it() {
        for fails in [false, true] {
            let (begun, let_go) = (Mutex::new((0, false)), Condvar::new());
            let work = |_: &Piece| {
                let mut state = begun.lock().unwrap();
                state.0 += 1;
                let_go.notify_all();
                let waited = let_go.wait_timeout_while(state, LONG, |state| !state.1);
                assert!(!waited.unwrap().1.timed_out(), "nobody stopped");
                match fails {
                    true => Err(failure()),
                    false => Ok(()),
                }
            };
            let movers = Movers::new(&work);
            let stopped = movers.lead(|led| {
                (0..4).try_for_each(|number| led.take(piece(number), 4))?;
                let state = begun.lock().unwrap();
                let all = let_go.wait_timeout_while(state, LONG, |state| state.0 < 4);
                let mut state = all.unwrap().0;
                assert_eq!(led.done().under_way, 4 * BLOCK);
                state.1 = true;
                let_go.notify_all();
                Ok(false)
            });
            assert_eq!(stopped.is_err(), fails);
            assert_eq!(begun.lock().unwrap().0, 4);
            assert_eq!(movers.done().under_way, 0);
        }
    }
}
