//! Threads that move pieces of an image, as many at once as whoever hands them out wants.
//!
//! Storage answers many small requests in the time of one; a delta whose guest wrote here and there consists of such. Pieces do not overlap, and
//! go in any order. Owns the threads, which end with the merge that has them. Refuses: to go on after one has failed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;

use godwit_delta::{MOVE_MAX, Move};

use crate::{Buffer, Error};

/// So many pieces are on their way at most.
pub const AT_ONCE_MAX: usize = 32;

/// How far it is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Merged {
    pub copied: u64,
    pub zeroed: u64,
}

/// The bytes of a move, and whether they are zero.
pub(super) fn range_of(one: &Move) -> (&Range<u64>, bool) {
    match one {
        Move::Copy(range) => (range, false),
        Move::Zero(range) => (range, true),
    }
}

type Work<'w> = &'w (dyn Fn(&Move, &mut Buffer) -> Result<(), Error> + Sync);

/// What is on its way.
pub(super) struct Movers<'w> {
    work: Work<'w>,
    flow: Mutex<Flow>,
    changed: Condvar,
}

#[derive(Default)]
struct Flow {
    /// Pieces that no thread has begun.
    handed_out: VecDeque<Move>,
    /// With those.
    under_way: usize,
    done: Merged,
    failure: Option<Error>,
    has_ended: bool,
}

/// Hands pieces to the threads.
pub(super) struct Led<'s, 'e: 's> {
    movers: &'e Movers<'e>,
    scope: &'s Scope<'s, 'e>,
    threads: usize,
    /// For pieces that the caller's own thread moves.
    buffer: Option<Buffer>,
}

fn buffer() -> Buffer {
    Buffer::zeroed(MOVE_MAX as usize)
}

impl<'w> Movers<'w> {
    pub fn new(work: Work<'w>) -> Self {
        Self {
            work,
            flow: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Whatever `lead` comes to: nothing is on its way any more when this returns.
    pub fn lead<R>(
        &self,
        lead: impl FnOnce(&mut Led<'_, '_>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        std::thread::scope(|scope| {
            let _ending = Ending(self);
            lead(&mut Led {
                movers: self,
                scope,
                threads: 0,
                buffer: None,
            })
        })
    }

    pub fn done(&self) -> Merged {
        self.lock().done
    }

    fn lock(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'f>(&self, flow: MutexGuard<'f, Flow>) -> MutexGuard<'f, Flow> {
        let waited = self.changed.wait(flow);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses where a piece has failed.
    fn wait_for_fewer(&self, than: usize) -> Result<MutexGuard<'_, Flow>, Error> {
        let mut flow = self.lock();
        loop {
            if let Some(error) = flow.failure.take() {
                return Err(error);
            }
            if flow.under_way < than {
                return Ok(flow);
            }
            flow = self.wait(flow);
        }
    }

    /// Until the end.
    fn move_all(&self) {
        let mut buffer = buffer();
        loop {
            let mut flow = self.lock();
            let one = loop {
                if flow.has_ended {
                    return;
                }
                match flow.handed_out.pop_front() {
                    Some(one) => break one,
                    None => flow = self.wait(flow),
                }
            };
            drop(flow);
            let moved = (self.work)(&one, &mut buffer);
            let mut flow = self.lock();
            flow.under_way -= 1;
            match moved {
                Ok(()) => flow.done.add(&one),
                Err(error) => {
                    flow.has_ended = true;
                    flow.failure.get_or_insert(error);
                }
            }
            drop(flow);
            self.changed.notify_all();
        }
    }
}

impl Merged {
    fn add(&mut self, one: &Move) {
        let (range, is_zero) = range_of(one);
        let bytes = range.end - range.start;
        match is_zero {
            true => self.zeroed += bytes,
            false => self.copied += bytes,
        }
    }
}

impl Led<'_, '_> {
    pub fn done(&self) -> Merged {
        self.movers.done()
    }

    /// Has a piece moved, once fewer than so many are on their way; by the caller's own thread where it is to be the only one.
    pub fn take(&mut self, one: Move, at_once: usize) -> Result<(), Error> {
        let at_once = at_once.clamp(1, AT_ONCE_MAX);
        let flow = self.movers.wait_for_fewer(at_once)?;
        let busy = flow.under_way;
        drop(flow);
        if at_once > 1 && busy >= self.threads {
            self.add_thread();
        }
        if at_once == 1 || self.threads == 0 {
            let buffer = self.buffer.get_or_insert_with(buffer);
            (self.movers.work)(&one, buffer)?;
            self.movers.lock().done.add(&one);
            return Ok(());
        }
        let mut flow = self.movers.lock();
        flow.handed_out.push_back(one);
        flow.under_way += 1;
        drop(flow);
        self.movers.changed.notify_all();
        Ok(())
    }

    pub fn wait_for_all(&self) -> Result<(), Error> {
        self.movers.wait_for_fewer(1).map(drop)
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
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);

    fn piece(number: u64) -> Move {
        Move::Copy(number * MOVE_MAX..(number + 1) * MOVE_MAX)
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
        let work = |one: &Move, _: &mut Buffer| {
            let mut state = inside.lock().unwrap();
            state.0 += 1;
            state.1 = state.1.max(state.0);
            met.notify_all();
            let waited = met.wait_timeout_while(state, LONG, |state| state.1 < AT_ONCE);
            let (mut state, waited) = waited.unwrap();
            assert!(!waited.timed_out(), "the others did not come");
            state.0 -= 1;
            moved.lock().unwrap().push(range_of(one).0.start / MOVE_MAX);
            Ok(())
        };
        let movers = Movers::new(&work);
        let whole = movers.lead(|led| {
            (0..100).try_for_each(|number| led.take(piece(number), AT_ONCE))?;
            led.wait_for_all()
        });
        whole.unwrap();
        assert_eq!(inside.lock().unwrap().1, AT_ONCE);
        assert_eq!(movers.done().copied, 100 * MOVE_MAX);
        let mut moved = moved.into_inner().unwrap();
        moved.sort_unstable();
        assert_eq!(moved, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn one_at_a_time_is_moved_before_the_next_is_asked_for() {
        let here = std::thread::current().id();
        let work = |_: &Move, _: &mut Buffer| {
            assert_eq!(std::thread::current().id(), here);
            Ok(())
        };
        let movers = Movers::new(&work);
        let whole = movers.lead(|led| {
            for number in 0..5 {
                led.take(piece(number), 1)?;
                assert_eq!(led.done().copied, (number + 1) * MOVE_MAX);
            }
            Ok(())
        });
        whole.unwrap();
    }

    #[test]
    fn a_piece_that_fails_ends_it_and_nothing_is_on_its_way_then() {
        for at_once in [1, 2, AT_ONCE_MAX] {
            let inside = AtomicUsize::new(0);
            let work = |one: &Move, _: &mut Buffer| {
                inside.fetch_add(1, Ordering::SeqCst);
                let fails = range_of(one).0.start == 40 * MOVE_MAX;
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
            assert!(movers.done().copied < 1000 * MOVE_MAX);
        }
    }
}
