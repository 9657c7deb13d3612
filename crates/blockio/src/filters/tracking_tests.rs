//! A tracking between a bottom and an outlet that the test controls: without a kernel, and without time that passes.

use super::*;
use crate::Stack;
use crate::filters::REGION;
use crate::filters::keeps::Keeps;
use crate::filters::outlet::Change;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Mutex;

/// A destination that takes everything, and says of flushes that they are done when the test lets it.
#[derive(Clone, Default)]
struct Takes(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    copied: Vec<Range<u64>>,
    flushes: Vec<u64>,
    ended: Vec<u64>,
    left_alone: bool,
    is_silent: bool,
}

impl Outlet for Takes {
    fn is_silent(&mut self) -> bool {
        self.0.lock().unwrap().is_silent
    }

    fn takes(&mut self, _origin: Origin) -> bool {
        !self.is_silent()
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, _change: Change) {
        assert_eq!(origin, Origin::Copy, "a guest's write is given");
        self.0.lock().unwrap().copied.push(range);
    }

    fn confirms(&self) -> bool {
        true
    }

    fn may_be_left_alone(&self) -> bool {
        self.0.lock().unwrap().left_alone
    }

    fn flush(&mut self, number: u64) -> bool {
        self.0.lock().unwrap().flushes.push(number);
        true
    }

    fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap().ended)
    }
}

struct Site {
    takes: Takes,
    course: Course,
    stack: Stack<Keeps>,
    now: Instant,
}

impl Site {
    fn of(bytes: u64) -> Self {
        let (takes, course) = (Takes::default(), Course::default());
        let outlet = Box::new(takes.clone());
        let filter = DirtyTracking::new(bytes, outlet, &course, Options::default());
        let stack = Stack::new(vec![Box::new(filter)], Keeps::default());
        course.begin(None);
        Self {
            takes,
            course,
            stack,
            now: Instant::now(),
        }
    }

    fn look(&mut self) {
        self.now += LOOK_EVERY;
        self.stack.wake(self.now);
    }

    /// Looks, and lets all that is below be done, until nothing comes any more.
    fn settle(&mut self) {
        for _ in 0..40 {
            self.look();
            for request in std::mem::take(&mut self.stack.bottom.0) {
                self.stack.completed(request, Outcome::Done, self.now);
            }
        }
    }

    fn write(&mut self, start: u64, token: u64) {
        let data = Data::Own(Buffer::zeroed(512));
        let work = Work::Write(start..start + 512);
        let request = Request::new(work, data, token, self.now);
        self.stack.submit(request, self.now);
    }

    /// Looks for so long, while the destination does not answer and the guest writes now and then.
    fn is_silent_for(&mut self, time: Duration) {
        self.takes.0.lock().unwrap().is_silent = true;
        let until = self.now + time;
        while self.now < until {
            self.write(0, 1);
            self.settle();
            while self.stack.finished().is_some() {}
        }
        self.takes.0.lock().unwrap().is_silent = false;
    }

    fn end_flushes(&self) {
        let mut taken = self.takes.0.lock().unwrap();
        let flushes = std::mem::take(&mut taken.flushes);
        taken.ended.extend(flushes);
    }

    fn copied(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.takes.0.lock().unwrap().copied)
    }
}

#[test]
fn a_write_goes_to_the_source_alone_and_its_block_is_copied_again_once_it_has_ended() {
    let mut site = Site::of(2 * REGION);
    site.settle();
    assert_eq!(site.copied(), [0..REGION, REGION..2 * REGION]);
    assert_eq!(site.course.decision(), Some(Decision::Finish));
    assert!(!site.course.is_synchronised(), "nobody has closed it");
    site.write(REGION + 4096, 1);
    let write = site.stack.bottom.0.pop().unwrap();
    site.settle();
    assert!(site.copied().is_empty(), "it is under way");
    site.stack
        .completed(write, Outcome::Failed(Errno::IO), site.now);
    assert!(site.stack.finished().is_some());
    site.settle();
    let first = REGION..REGION + BLOCK;
    assert_eq!(site.copied(), [first], "whatever became of it");
}

#[test]
fn a_closed_disk_takes_nothing_new_is_equal_once_all_is_copied_and_parts_by_what_was_left_over() {
    let mut site = Site::of(REGION);
    site.settle();
    site.write(0, 1);
    site.course.close();
    assert!(site.stack.opens_at(site.now).is_some());
    site.look();
    assert!(!site.course.is_synchronised(), "a write is under way");
    site.settle();
    assert!(site.course.is_synchronised());
    site.course.bind();
    site.look();
    assert!(site.course.is_bound_and_equal());
    // What a queue has left over comes whether it is closed or not.
    site.write(512, 2);
    assert!(!site.course.is_bound_and_equal());
    assert!(site.stack.bottom.0.is_empty(), "nobody may be told of it");
    site.course.unbind();
    site.settle();
    assert_eq!(site.stack.under_way(), 0);
    assert!(site.course.is_synchronised(), "it was copied, too");
    site.course.open();
    assert!(site.stack.opens_at(site.now).is_none());
    site.write(1024, 3);
    assert!(!site.course.is_synchronised());
    site.settle();
    assert!(!site.course.is_synchronised());
    assert!(site.course.closed_for() > Duration::ZERO);
}

#[test]
fn where_the_destination_may_be_left_alone_both_are_equal_once_it_is_durable_there() {
    let mut site = Site::of(REGION);
    site.takes.0.lock().unwrap().left_alone = true;
    site.settle();
    site.course.close();
    site.settle();
    assert!(!site.course.is_synchronised());
    // Some of it does not come there: what was durable before is not all.
    site.course.lose(0..512);
    site.end_flushes();
    site.look();
    assert!(!site.course.is_synchronised());
    site.settle();
    assert!(!site.course.is_synchronised());
    site.end_flushes();
    site.settle();
    assert!(site.course.is_synchronised());
}

#[test]
fn a_link_that_is_silent_for_a_while_and_comes_back_gives_up_no_disk_whose_guest_could_be_held() {
    let mut site = Site::of(REGION);
    site.settle();
    site.settle();
    assert_eq!(site.course.decision(), Some(Decision::Finish));
    // An iteration has begun, and cannot give what it reads.
    site.write(0, 1);
    let write = site.stack.bottom.0.pop().unwrap();
    site.stack.completed(write, Outcome::Done, site.now);
    while site.stack.bottom.0.is_empty() {
        site.look();
    }
    site.is_silent_for(Duration::from_secs(40));
    for _ in 0..20 {
        site.write(BLOCK, 2);
        site.settle();
        assert_eq!(site.course.decision(), Some(Decision::Finish));
        assert!(site.course.would_wait_s() < 1.0);
    }
}

#[test]
fn the_time_in_which_a_link_is_silent_counts_for_no_iteration() {
    let mut site = Site::of(64 * REGION);
    site.look();
    site.is_silent_for(Duration::from_secs(100));
    for _ in 0..10 {
        site.settle();
    }
    let first = site.course.iterations()[0];
    assert_eq!(first.copied, 64 * REGION);
    assert!(first.seconds < 5.0, "{first:?}");
}

#[test]
fn what_a_near_destination_has_is_made_durable_there_before_the_guest_waits_for_it() {
    let mut site = Site::of(REGION);
    site.takes.0.lock().unwrap().left_alone = true;
    site.settle();
    assert_eq!(site.course.decision(), Some(Decision::Finish));
    assert!(!site.course.is_flushed());
    assert_eq!(site.takes.0.lock().unwrap().flushes.len(), 1, "it is asked");
    site.end_flushes();
    site.settle();
    assert!(site.course.is_flushed());
    assert!(site.takes.0.lock().unwrap().flushes.is_empty(), "once");
    // A link that is lost may have lost the flush, too.
    site.course.lose(0..512);
    site.settle();
    assert!(!site.course.is_flushed());
    site.end_flushes();
    site.settle();
    assert!(site.course.is_flushed());
    let mut far = Site::of(REGION);
    far.settle();
    assert!(far.course.is_flushed() && far.takes.0.lock().unwrap().flushes.is_empty());
}

#[test]
fn a_destination_that_is_silent_at_each_flush_is_not_waited_for_for_ever() {
    let mut site = Site::of(REGION);
    site.takes.0.lock().unwrap().left_alone = true;
    site.settle();
    for _ in 0..EARLY_FLUSHES_MAX {
        assert!(!site.course.is_flushed());
        site.is_silent_for(LOOK_EVERY);
        site.settle();
    }
    assert!(site.course.is_flushed());
    let flushes = site.takes.0.lock().unwrap().flushes.len();
    assert_eq!(flushes, EARLY_FLUSHES_MAX as usize);
}

#[test]
fn what_cannot_be_read_ends_it_and_no_request_and_given_up_it_lets_everything_pass() {
    let mut site = Site::of(REGION);
    site.look();
    let read = site.stack.bottom.0.pop().unwrap();
    site.course.close();
    site.stack
        .completed(read, Outcome::Failed(Errno::IO), site.now);
    let why = site.course.failure().unwrap();
    assert!(why.contains("cannot be read"), "{why}");
    assert!(site.stack.opens_at(site.now).is_none());
    site.look();
    site.write(0, 1);
    assert_eq!(site.stack.bottom.0.len(), 1);
    site.settle();
    assert_eq!((site.stack.under_way(), site.stack.wake_at()), (0, None));
    assert!(site.copied().is_empty() && site.course.is_unreadable());
}

#[test]
fn a_disk_that_rests_copies_nothing_until_it_works_again() {
    let mut site = Site::of(64 * REGION);
    site.look();
    assert_eq!(site.stack.bottom.0.len(), 16);
    site.stack.rest(true);
    site.settle();
    assert!(site.stack.is_idle());
    site.stack.rest(false);
    site.look();
    assert!(!site.stack.is_idle());
}
