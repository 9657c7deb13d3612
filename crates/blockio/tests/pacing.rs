//! How fast a disk is copied, and what that is said to wait for: by a clock that the test sets.

use godwit_blockio::filters::{
    Bottleneck, Change, Course, Mirroring, Origin, Outlet, Pace, REGION,
};
use godwit_blockio::{Bottom, Buffer, Data, Outcome, Request, Stack, Work};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BYTES: u64 = 1 << 30;
const MS: Duration = Duration::from_millis(1);
/// Bytes that may be under way to what takes the copy.
const ROOM: u64 = 8 << 20;

/// An image that reads so many regions in a millisecond.
struct Source {
    per_ms: usize,
    waiting: VecDeque<Request>,
}

impl Bottom for Source {
    fn start(&mut self, mut request: Request) -> Option<(Request, Outcome)> {
        let Data::Own(buffer) = &mut request.data else {
            return Some((request, Outcome::Done));
        };
        if matches!(request.work, Work::Read(_)) {
            buffer.bytes_mut().fill(7);
            self.waiting.push_back(request);
            return None;
        }
        Some((request, Outcome::Done))
    }
}

#[derive(Default)]
struct Taken {
    copied: u64,
    of_guest: u64,
    under_way: u64,
}

/// What takes the copy: what is under way ends at the pace of the test.
#[derive(Clone, Default)]
struct To(Arc<Mutex<Taken>>);

impl Outlet for To {
    fn is_silent(&mut self) -> bool {
        false
    }

    fn takes(&mut self, origin: Origin) -> bool {
        origin == Origin::Guest || self.0.lock().unwrap().under_way < ROOM
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, _change: Change) {
        let mut taken = self.0.lock().unwrap();
        let bytes = range.end - range.start;
        match origin {
            Origin::Copy => {
                (taken.copied, taken.under_way) = (taken.copied + bytes, taken.under_way + bytes)
            }
            Origin::Guest => taken.of_guest += bytes,
        }
    }
}

struct Bench {
    stack: Stack<Source>,
    to: To,
    course: Course,
    written_per_ms: u64,
    now: Instant,
    token: u64,
}

impl Bench {
    /// Regions that are read, and bytes that are written, in a millisecond.
    fn new(pace: &Pace, read_per_ms: usize, written_per_ms: u64) -> Self {
        let (to, course) = (To::default(), Course::at(pace));
        let mirroring = Mirroring::new(BYTES, Box::new(to.clone()), &course);
        let source = Source {
            per_ms: read_per_ms,
            waiting: VecDeque::new(),
        };
        course.begin(None);
        Self {
            stack: Stack::new(vec![Box::new(mirroring)], source),
            to,
            course,
            written_per_ms,
            now: Instant::now() + MS,
            token: 0,
        }
    }

    fn passes(&mut self, ms: u32) {
        for _ in 0..ms {
            self.now += MS;
            let due = self
                .stack
                .bottom
                .per_ms
                .min(self.stack.bottom.waiting.len());
            let read: Vec<_> = self.stack.bottom.waiting.drain(..due).collect();
            for request in read {
                self.stack.completed(request, Outcome::Done, self.now);
            }
            self.stack.wake(self.now);
            let mut taken = self.to.0.lock().unwrap();
            taken.under_way = taken.under_way.saturating_sub(self.written_per_ms);
        }
    }

    fn copied(&self) -> u64 {
        self.to.0.lock().unwrap().copied
    }

    /// The guest writes; whether that is answered at once.
    fn writes(&mut self, start: u64) -> bool {
        self.token += 1;
        let (work, data) = (Work::Write(start..start + 4096), Buffer::zeroed(4096));
        let write = Request::new(work, Data::Own(data), self.token, self.now);
        self.stack.submit(write, self.now);
        let answered = self.stack.finished();
        answered
            .is_some_and(|(write, outcome)| write.token == self.token && outcome == Outcome::Done)
    }
}

#[test]
fn a_cap_holds_what_is_copied_and_no_write_of_the_guest() {
    let pace = Pace::at_most(Some(20.0 * REGION as f64));
    // Reads and writes are done at once.
    let mut bench = Bench::new(&pace, 64, BYTES);
    for second in 1..=10 {
        for ms in 0..1000 {
            bench.passes(1);
            // Until what is being read has been.
            bench.passes(u32::from(!bench.stack.bottom.waiting.is_empty()));
            let start = ms % 1024 * REGION;
            assert!(bench.writes(start), "second {second}, {ms} ms");
        }
    }
    let seconds = bench.course.wait_times().cap.as_secs_f64();
    let may = (20.0 * (seconds + 1.0)) as u64;
    let copied = bench.copied() / REGION;
    assert!((190..=may).contains(&copied), "{copied} in {seconds} s");
    assert!(bench.to.0.lock().unwrap().of_guest > 0, "nothing to both");
    assert_eq!(
        bench.course.wait_times().bottleneck(),
        Some(Bottleneck::Cap)
    );
}

#[test]
fn copyings_that_keep_one_pace_are_no_faster_together() {
    let pace = Pace::at_most(Some(20.0 * REGION as f64));
    let mut both = [(); 2].map(|()| Bench::new(&pace, 64, BYTES));
    for _ in 0..10_000 {
        both.iter_mut().for_each(|bench| bench.passes(1));
    }
    let [one, other] = both.map(|bench| bench.copied() / REGION);
    assert!((195..=206).contains(&(one + other)), "{one} and {other}");
}

#[test]
fn a_copying_waits_for_the_slower_side() {
    let most = |regions_per_s: Option<f64>, read, written| {
        let pace = Pace::at_most(regions_per_s.map(|regions| regions * REGION as f64));
        let mut bench = Bench::new(&pace, read, written);
        bench.passes(300);
        assert!(bench.copied() > 0);
        bench.course.wait_times().bottleneck()
    };
    for wide in [None, Some(2000.0)] {
        assert_eq!(most(wide, 1, 4 * REGION), Some(Bottleneck::Reads));
        assert_eq!(most(wide, 4, REGION), Some(Bottleneck::Writes));
    }
    assert_eq!(most(Some(500.0), 1, 4 * REGION), Some(Bottleneck::Cap));
}
