//! What a copying of a disk with deltas gives on: only what the top has of its own, since the other side has what lies below it already.
//!
//! Part of a copying, and owned by its filter. Refuses nothing. A write of the guest goes on as it is. Where one did, all of its region does when
//! that is copied later: a write that failed here may have been carried out there.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use godwit_delta::{GRAIN, Grain, Layout, States};

use super::REGION;
use super::content::written;
use super::outlet::{Change, Origin, Outlet};
use crate::delta::Words;

/// An outlet that takes changes of a disk's top alone.
pub struct TopOnly {
    inner: Box<dyn Outlet>,
    top: States<Words>,
    /// A bit for each region that the guest wrote to on both sides.
    written: Vec<u64>,
}

impl TopOnly {
    /// Of the disk's top, whose states these are as long as it is copied.
    pub fn new(inner: Box<dyn Outlet>, top: States<Words>) -> Self {
        let regions = (top.grains() * GRAIN).div_ceil(REGION);
        let words = usize::try_from(regions.div_ceil(64)).unwrap_or(usize::MAX);
        Self {
            inner,
            top,
            written: vec![0; words],
        }
    }

    fn note_written(&mut self, range: &Range<u64>) {
        for region in range.start / REGION..range.end.div_ceil(REGION) {
            if let Some(word) = self.written.get_mut((region / 64) as usize) {
                *word |= 1 << (region % 64);
            }
        }
    }

    fn was_written(&self, range: &Range<u64>) -> bool {
        let mut regions = range.start / REGION..range.end.div_ceil(REGION);
        regions.any(|region| {
            let word = self.written.get((region / 64) as usize);
            word.is_some_and(|word| (word >> (region % 64)) & 1 == 1)
        })
    }

    fn give_what_it_has(&mut self, range: &Range<u64>, change: &Change) {
        let grains = range.start / GRAIN..range.end.div_ceil(GRAIN);
        let mut at = grains.start;
        while at < grains.end {
            let (state, end) = self.top.run(&(at..grains.end));
            let part = (at * GRAIN).max(range.start)..(end * GRAIN).min(range.end);
            at = end;
            if state == Grain::Absent || part.is_empty() {
                continue;
            }
            let change = match change {
                Change::Zeroed => Change::Zeroed,
                Change::Written(bytes, from) => {
                    let start = from + (part.start - range.start) as usize;
                    let run = start..start + (part.end - part.start) as usize;
                    written(bytes, &run)
                }
            };
            self.inner.give(Origin::Copy, part, change);
        }
    }
}

/// Where a top has nothing, in whole regions.
pub fn untouched(layout: &Layout, top: &States<Words>) -> Vec<Range<u64>> {
    let (bytes, grains) = (layout.disk_bytes(), top.grains());
    let (mut untouched, mut at) = (Vec::new(), 0);
    while at < grains {
        let (state, end) = top.run(&(at..grains));
        if state == Grain::Absent {
            let start = (at * GRAIN).next_multiple_of(REGION);
            let end = match end == grains {
                true => bytes,
                false => end * GRAIN / REGION * REGION,
            };
            if start < end {
                untouched.push(start..end);
            }
        }
        at = end;
    }
    untouched
}

impl Outlet for TopOnly {
    fn is_silent(&mut self) -> bool {
        self.inner.is_silent()
    }

    fn takes(&mut self, origin: Origin) -> bool {
        self.inner.takes(origin)
    }

    fn region_limit(&mut self) -> usize {
        self.inner.region_limit()
    }

    fn is_behind(&mut self) -> bool {
        self.inner.is_behind()
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        if origin == Origin::Guest {
            self.note_written(&range);
        } else if !self.was_written(&range) {
            return self.give_what_it_has(&range, &change);
        }
        self.inner.give(origin, range, change);
    }

    fn patience(&self) -> Duration {
        self.inner.patience()
    }

    fn confirms(&self) -> bool {
        self.inner.confirms()
    }

    fn may_be_left_alone(&self) -> bool {
        self.inner.may_be_left_alone()
    }

    fn kept_waiting(&mut self) {
        self.inner.kept_waiting();
    }

    fn give_write(&mut self, number: u64, range: Range<u64>, change: Change) -> bool {
        self.note_written(&range);
        self.inner.give_write(number, range, change)
    }

    fn flush(&mut self, number: u64) -> bool {
        self.inner.flush(number)
    }

    fn take_ended(&mut self) -> Vec<u64> {
        self.inner.take_ended()
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.inner.bell()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;
    use std::sync::Arc;
    use std::sync::Mutex;

    type Given = Arc<Mutex<Vec<(Origin, Range<u64>, Option<u8>)>>>;

    struct Keeps(Given);

    impl Outlet for Keeps {
        fn is_silent(&mut self) -> bool {
            false
        }

        fn takes(&mut self, _origin: Origin) -> bool {
            true
        }

        fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
            let first = match change {
                Change::Zeroed => None,
                Change::Written(bytes, at) => Some(bytes.bytes()[at]),
            };
            self.0.lock().unwrap().push((origin, range, first));
        }
    }

    fn of_a_disk(bytes: u64) -> (Layout, States<Words>) {
        let layout = Layout::of(bytes).unwrap();
        let states = States::over(Words::own(&layout).unwrap(), &layout).unwrap();
        (layout, states)
    }

    #[test]
    fn of_what_is_copied_grains_of_the_top_go_on_and_all_of_a_region_that_was_written_on_both_sides()
     {
        let (_, top) = of_a_disk(4 * REGION);
        top.set(1..2, Grain::Present);
        top.set(3..5, Grain::Zero);
        let given = Given::default();
        let mut outlet = TopOnly::new(Box::new(Keeps(Arc::clone(&given))), top);
        let mut buffer = Buffer::zeroed(REGION as usize);
        for (grain, bytes) in buffer.bytes_mut().chunks_mut(GRAIN as usize).enumerate() {
            bytes.fill(grain as u8);
        }
        let change = Change::Written(Arc::new(buffer), 0);
        outlet.give(Origin::Copy, 0..REGION, change.clone());
        let taken = || std::mem::take(&mut *given.lock().unwrap());
        let grains = |grains: Range<u64>| grains.start * GRAIN..grains.end * GRAIN;
        assert_eq!(
            taken(),
            [
                (Origin::Copy, grains(1..2), Some(1)),
                (Origin::Copy, grains(3..5), Some(3)),
            ]
        );
        outlet.give_write(1, REGION - 512..REGION, change.clone());
        outlet.give(Origin::Copy, 0..REGION, change.clone());
        outlet.give(Origin::Copy, REGION..2 * REGION, change);
        assert_eq!(
            taken(),
            [
                (Origin::Guest, REGION - 512..REGION, Some(0)),
                (Origin::Copy, 0..REGION, Some(0)),
            ]
        );
    }

    #[test]
    fn regions_of_which_the_top_has_nothing_are_told() {
        let bytes = 4 * REGION + 512;
        let (layout, top) = of_a_disk(bytes);
        let all = 0..bytes;
        assert_eq!(untouched(&layout, &top), [all]);
        top.set(REGION / GRAIN..REGION / GRAIN + 1, Grain::Zero);
        let (first, rest) = (0..REGION, 2 * REGION..bytes);
        assert_eq!(untouched(&layout, &top), [first, rest]);
        top.set(top.grains() - 1..top.grains(), Grain::Present);
        let (first, rest) = (0..REGION, 2 * REGION..4 * REGION);
        assert_eq!(untouched(&layout, &top), [first, rest]);
    }
}
