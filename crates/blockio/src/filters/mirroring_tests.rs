//! A mirroring between a bottom and an outlet that the test controls: without a kernel, and without time that passes.

use super::*;
use crate::Stack;
use crate::filters::keeps::Keeps;
use std::ops::Range;
use std::sync::Mutex;

/// A destination over a far link: it takes everything, and says of nothing that it has carried it out.
#[derive(Clone, Default)]
struct Far(Arc<Mutex<Given>>);

type Given = Vec<(Origin, Range<u64>)>;

impl Outlet for Far {
    fn is_silent(&mut self) -> bool {
        false
    }

    fn takes(&mut self, _origin: Origin) -> bool {
        true
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, _change: Change) {
        self.0.lock().unwrap().push((origin, range));
    }
}

#[test]
fn over_a_far_link_a_write_waits_until_its_region_is_read_and_given_and_not_until_that_is_there() {
    let (far, course) = (Far::default(), Course::default());
    let mirroring = Mirroring::new(REGION, Box::new(far.clone()), &course);
    let mut stack = Stack::new(vec![Box::new(mirroring)], Keeps::default());
    course.begin(None);
    let now = Instant::now();
    stack.wake(now);
    let read = stack.bottom.0.pop().unwrap();
    assert_eq!(read.work, Work::Read(0..REGION));
    let data = Data::Own(Buffer::zeroed(512));
    stack.submit(Request::new(Work::Write(0..512), data, 1, now), now);
    let later = now + LOOK_EVERY;
    stack.wake(later);
    assert!(stack.bottom.0.is_empty(), "what it touches is being read");
    stack.completed(read, Outcome::Done, later);
    let write = stack.bottom.0.pop().unwrap();
    assert_eq!(write.work, Work::Write(0..512));
    let given = [(Origin::Copy, 0..REGION), (Origin::Guest, 0..512)];
    assert_eq!(*far.0.lock().unwrap(), given);
    stack.completed(write, Outcome::Done, later);
    let (answered, outcome) = stack.finished().unwrap();
    assert_eq!((answered.token, outcome), (1, Outcome::Done));
}

#[test]
fn fewer_regions_are_copied_at_once_beside_a_guest_that_works_until_it_does_nothing() {
    let (course, mut now) = (Course::default(), Instant::now());
    let mirroring = Mirroring::new(64 * REGION, Box::new(Far::default()), &course);
    let mut stack = Stack::new(vec![Box::new(mirroring)], Keeps::default());
    let mut looks = |stack: &mut Stack<Keeps>, count: u32| {
        for _ in 0..count {
            now += LOOK_EVERY;
            stack.wake(now);
        }
        now
    };
    course.begin(None);
    let now = looks(&mut stack, 1);
    let all = std::mem::take(&mut stack.bottom.0);
    assert_eq!(all.len(), 16);
    stack.submit(Request::new(Work::Read(0..512), Data::None, 1, now), now);
    let of_guest = stack.bottom.0.pop().unwrap();
    let now = looks(&mut stack, 100);
    for copy in all {
        stack.completed(copy, Outcome::Done, now);
    }
    assert_eq!(stack.bottom.0.len(), 4);
    stack.completed(of_guest, Outcome::Done, now);
    looks(&mut stack, 200);
    assert_eq!(stack.bottom.0.len(), 16);
}

/// A destination within the same file system: it clones at once, may be the only one that is left one day, and the test says what
/// it has carried out.
#[derive(Clone, Default)]
struct Clones(Arc<Mutex<ClonesGiven>>);

#[derive(Default)]
struct ClonesGiven {
    /// Numbers of writes and flushes that it was given.
    given: Vec<u64>,
    ended: Vec<u64>,
}

impl Outlet for Clones {
    fn is_silent(&mut self) -> bool {
        false
    }

    fn takes(&mut self, _origin: Origin) -> bool {
        true
    }

    fn try_clone(&mut self, _range: &Range<u64>) -> bool {
        true
    }

    fn give(&mut self, _origin: Origin, _range: Range<u64>, _change: Change) {}

    fn confirms(&self) -> bool {
        true
    }

    fn may_be_left_alone(&self) -> bool {
        true
    }

    fn give_write(&mut self, number: u64, _range: Range<u64>, _change: Change) -> bool {
        self.flush(number)
    }

    fn flush(&mut self, number: u64) -> bool {
        self.0.lock().unwrap().given.push(number);
        true
    }

    fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap().ended)
    }
}

impl Clones {
    /// It has carried out what it was given first.
    fn end_oldest(&self) {
        let mut all = self.0.lock().unwrap();
        let oldest = all.given.remove(0);
        all.ended.push(oldest);
    }
}

/// Both sides are equal again within one step, and nobody saw that they had not been.
#[test]
fn a_region_that_is_cloned_again_after_a_write_failed_has_both_sides_parted() {
    let (clones, course, mut now) = (Clones::default(), Course::default(), Instant::now());
    let mirroring = Mirroring::new(REGION, Box::new(clones.clone()), &course);
    let mut stack = Stack::new(vec![Box::new(mirroring)], Keeps::default());
    let mut look = |stack: &mut Stack<Keeps>| {
        now += LOOK_EVERY;
        stack.wake(now);
        now
    };
    course.begin(None);
    look(&mut stack);
    look(&mut stack);
    clones.end_oldest();
    let now = look(&mut stack);
    course.bind();
    look(&mut stack);
    assert!(course.is_bound_and_equal());
    let data = Data::Own(Buffer::zeroed(512));
    stack.submit(Request::new(Work::Write(0..512), data, 1, now), now);
    clones.end_oldest();
    look(&mut stack);
    let write = stack.bottom.0.pop().unwrap();
    stack.completed(write, Outcome::Failed(Errno::IO), now);
    look(&mut stack);
    assert!(!course.is_synchronised(), "the clone is not durable");
    clones.end_oldest();
    look(&mut stack);
    assert!(course.is_synchronised());
    assert!(!course.is_bound_and_equal(), "they have parted since");
}
