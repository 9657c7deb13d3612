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
