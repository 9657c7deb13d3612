//! A destination that confirms what it has carried out: a guest is answered once both sides have its write, and from when both are
//! equal a flush, too; nobody waits for one that is silent, unless it is bound.

mod common;

use common::{request_of, volume, write_of};
use godwit_blockio::filters::{Change, Course, Fault, Mirroring, Origin, Outlet, PATIENCE};
use godwit_blockio::{
    Access, Arriving, Bell, Buffer, Data, Engine, Filter, Image, Outcome, SecondImage, Stack, Work,
    switch_over,
};
use rustix::fs::inotify;
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BYTES: u64 = 4 << 20;
/// The token of a write that is to fail.
const FAILS: u64 = 99;
const LONG: Duration = Duration::from_secs(60);

/// What the destination has been given of the guest's: the test carries it out.
#[derive(Default)]
struct Given {
    writes: Vec<(u64, Range<u64>, Change)>,
    flushes: Vec<u64>,
    ended: Vec<u64>,
    /// Changes of the copying.
    copied: u64,
    may_be_left_alone: bool,
    kept_waiting: bool,
}

struct ByHand {
    given: Arc<Mutex<Given>>,
    to: Arc<Arriving>,
    count: u64,
    bell: Arc<Bell>,
}

impl Outlet for ByHand {
    fn is_silent(&mut self) -> bool {
        false
    }

    fn takes(&mut self, _origin: Origin) -> bool {
        true
    }

    /// What is copied is there at once.
    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        assert_eq!(origin, Origin::Copy);
        self.count += 1;
        self.given.lock().unwrap().copied += 1;
        apply(&self.to, self.count, &range, &change);
    }

    fn confirms(&self) -> bool {
        true
    }

    fn may_be_left_alone(&self) -> bool {
        self.given.lock().unwrap().may_be_left_alone
    }

    fn kept_waiting(&mut self) {
        self.given.lock().unwrap().kept_waiting = true;
    }

    fn give_write(&mut self, number: u64, range: Range<u64>, change: Change) -> bool {
        let mut given = self.given.lock().unwrap();
        given.writes.push((number, range, change));
        true
    }

    fn flush(&mut self, number: u64) -> bool {
        self.given.lock().unwrap().flushes.push(number);
        true
    }

    fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.given.lock().unwrap().ended)
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        Some(self.bell.as_fd())
    }
}

fn apply(to: &Arriving, number: u64, range: &Range<u64>, change: &Change) {
    let len = (range.end - range.start) as usize;
    let bytes = match change {
        Change::Written(buffer, at) => Some(&buffer.bytes()[*at..*at + len]),
        Change::Zeroed => None,
    };
    to.apply(number, number, range, bytes).unwrap();
}

/// A disk of which both sides are equal.
struct Site {
    stack: Stack<Engine>,
    course: Course,
    given: Arc<Mutex<Given>>,
    bell: Arc<Bell>,
    source: Fault,
    _volumes: [common::Volume; 2],
}

impl Site {
    fn equal() -> Self {
        let (from, to) = (volume(BYTES), volume(BYTES));
        let open = |path| Image::open(path, Access::ReadWrite, 512).unwrap();
        let (given, course) = (Arc::<Mutex<Given>>::default(), Course::default());
        let bell = Arc::new(Bell::new().unwrap());
        let outlet = ByHand {
            given: Arc::clone(&given),
            to: Arc::new(Arriving::of(&open(&to.path)).unwrap()),
            count: 0,
            bell: Arc::clone(&bell),
        };
        let mirroring = Mirroring::new(BYTES, Box::new(outlet), &course);
        let engine = Engine::new(open(&from.path)).unwrap();
        let source = Fault::default();
        let filters: Vec<Box<dyn Filter>> = vec![Box::new(mirroring), Box::new(source.clone())];
        let mut stack = Stack::new(filters, engine);
        course.begin(std::iter::once(0..BYTES));
        while !course.is_synchronised() {
            stack.turn(None, &mut Vec::new()).unwrap();
        }
        Self {
            stack,
            course,
            given,
            bell,
            source,
            _volumes: [from, to],
        }
    }

    /// What is finished until all stands still: the source has nothing under way, what the destination has said was heard, and a whole look
    /// of the mirroring's has changed neither. From then on nothing happens but by the test or by somebody's patience.
    fn finished(&mut self) -> Vec<u64> {
        let (mut finished, limit) = (Vec::new(), Instant::now() + LONG);
        // The look that is to come since all stands still.
        let mut next_look = None;
        loop {
            assert!(Instant::now() < limit, "it never stands still");
            self.stack.turn(Some(limit), &mut Vec::new()).unwrap();
            let before = finished.len();
            while let Some((request, outcome)) = self.stack.finished() {
                let is_to_fail = request.token == FAILS;
                assert_eq!(outcome == Outcome::Done, !is_to_fail, "{outcome:?}");
                finished.push(request.token);
            }
            let was_heard = self.given.lock().unwrap().ended.is_empty();
            if finished.len() > before || self.stack.bottom.under_way() > 0 || !was_heard {
                next_look = None;
            } else if next_look.is_none() {
                next_look = self.stack.wake_at();
            } else if next_look != self.stack.wake_at() {
                return finished;
            }
        }
    }

    /// The destination has carried out all that it was given, and says so.
    fn confirm(&self) -> usize {
        let mut given = self.given.lock().unwrap();
        let writes = std::mem::take(&mut given.writes);
        let flushes = std::mem::take(&mut given.flushes);
        let numbers = writes.iter().map(|write| write.0).chain(flushes);
        let numbers: Vec<u64> = numbers.collect();
        drop(given);
        numbers.iter().for_each(|number| self.end(*number));
        numbers.len()
    }

    fn end(&self, number: u64) {
        self.given.lock().unwrap().ended.push(number);
        self.bell.ring();
    }
}

#[test]
fn a_write_is_answered_once_the_destination_has_it_too() {
    let mut site = Site::equal();
    site.stack.submit(write_of(0, 4096, 7, 1), Instant::now());
    assert_eq!(site.finished(), [0; 0]);
    assert_eq!(site.confirm(), 1);
    assert_eq!(site.finished(), [1]);
}

#[test]
fn a_flush_of_equal_sides_is_answered_once_both_have_done_it_and_so_is_a_durable_write() {
    let mut site = Site::equal();
    site.stack
        .submit(request_of(Work::Flush, Data::None, 1), Instant::now());
    assert_eq!(site.finished(), [0; 0]);
    assert_eq!(site.given.lock().unwrap().flushes.len(), 1);
    assert_eq!(site.confirm(), 1);
    assert_eq!(site.finished(), [1]);
    // A driver without flushes: the write, and then that it is durable.
    let mut durable = write_of(4096, 4096, 9, 2);
    durable.durable = true;
    site.stack.submit(durable, Instant::now());
    assert_eq!(site.finished(), [0; 0]);
    assert_eq!(site.confirm(), 1);
    assert_eq!(site.finished(), [0; 0]);
    assert_eq!(site.given.lock().unwrap().flushes.len(), 1);
    assert_eq!(site.confirm(), 1);
    assert_eq!(site.finished(), [2]);
}

#[test]
fn a_destination_that_may_be_left_alone_is_equal_once_it_has_made_durable_what_it_was_given() {
    let mut site = Site::equal();
    site.given.lock().unwrap().may_be_left_alone = true;
    for _ in 0..2 {
        // Some of it may not have come, were it a flush alone.
        site.course.lose(0..0);
        assert!(site.finished().is_empty());
        assert!(!site.course.is_synchronised());
        assert_eq!(site.given.lock().unwrap().flushes.len(), 1);
        // A guest's write does not wait for that.
        site.stack.submit(write_of(0, 4096, 7, 1), Instant::now());
        site.finished();
        let (number, ..) = site.given.lock().unwrap().writes.remove(0);
        site.end(number);
        assert_eq!(site.finished(), [1]);
        assert!(!site.course.is_synchronised());
        assert_eq!(site.confirm(), 1);
        assert!(site.finished().is_empty());
        assert!(site.course.is_synchronised());
    }
}

#[test]
fn a_destination_is_not_equal_by_a_flush_from_before_a_region_was_copied_again() {
    let mut site = Site::equal();
    site.given.lock().unwrap().may_be_left_alone = true;
    site.course.lose(0..0);
    site.finished();
    let old = site.given.lock().unwrap().flushes.remove(0);
    // Its region is copied again, after that flush was given.
    site.source.fail_writes(1, Errno::IO);
    site.stack
        .submit(write_of(0, 4096, 7, FAILS), Instant::now());
    site.finished();
    let (write, ..) = site.given.lock().unwrap().writes.remove(0);
    let copied = site.given.lock().unwrap().copied;
    site.end(write);
    assert_eq!(site.finished(), [FAILS]);
    assert!(site.given.lock().unwrap().copied > copied);
    site.end(old);
    assert!(site.finished().is_empty());
    assert!(!site.course.is_synchronised());
    assert_eq!(site.given.lock().unwrap().flushes.len(), 1);
    assert_eq!(site.confirm(), 1);
    assert!(site.finished().is_empty());
    assert!(site.course.is_synchronised());
}

#[test]
fn nobody_waits_for_long_for_a_destination_that_confirms_nothing_and_it_is_not_equal_then() {
    let mut site = Site::equal();
    let began = Instant::now();
    site.stack.submit(write_of(0, 4096, 7, 1), began);
    site.stack
        .submit(request_of(Work::Flush, Data::None, 2), began);
    let mut finished = Vec::new();
    while finished.len() < 2 {
        assert!(began.elapsed() < LONG, "only {finished:?} came");
        finished.extend(site.finished());
    }
    assert!(began.elapsed() >= Duration::from_millis(500));
    assert!(!site.course.is_synchronised());
    assert!(site.given.lock().unwrap().kept_waiting);
    // What it says later of these is of no use.
    site.confirm();
    assert_eq!(site.finished(), [0; 0]);
}

/// Two images of one host, the first of which is being copied to the second.
fn mirrored((from, to): (&Path, &Path)) -> (Course, SecondImage, Stack<Engine>) {
    let open = |path| Image::open(path, Access::ReadWrite, 512).unwrap();
    let course = Course::default();
    let second = SecondImage::of(&open(to), None, &course).unwrap();
    let mirroring = Mirroring::new(BYTES, second.outlet().unwrap(), &course);
    let stack = Stack::new(vec![Box::new(mirroring)], Engine::new(open(from)).unwrap());
    course.begin(None);
    (course, second, stack)
}

/// Whether anybody has read this file since the watch began, or was asked last.
fn was_read(watch: &OwnedFd) -> bool {
    match rustix::io::read(watch, &mut [0; 512]) {
        Ok(_) => true,
        Err(Errno::AGAIN) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_is_read_while_a_disk_is_mirrored_comes_from_the_source_and_the_destination_is_not_asked() {
    let (from, to) = (volume(BYTES), volume(BYTES));
    std::fs::write(&from.path, vec![7; BYTES as usize]).unwrap();
    let (course, second, mut stack) = mirrored((&from.path, &to.path));
    let began = Instant::now();
    while !course.is_synchronised() || second.under_way_bytes() > 0 {
        assert!(began.elapsed() < LONG, "they are never equal");
        common::turn_mirrored(&mut stack, &course);
    }
    assert!(common::read_all(&to) == vec![7; BYTES as usize]);
    std::fs::write(&to.path, vec![9; BYTES as usize]).unwrap();
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &to.path, inotify::WatchFlags::ACCESS).unwrap();
    let data = Data::Own(Buffer::zeroed(BYTES as usize));
    let read = request_of(Work::Read(0..BYTES), data, 1);
    let (read, outcome) = common::run(&mut stack, vec![read]).remove(0);
    let (Data::Own(seen), Outcome::Done) = (read.data, outcome) else {
        panic!("{outcome:?}");
    };
    assert!(seen.bytes().iter().all(|byte| *byte == 7));
    assert!(!was_read(&watch));
    assert!(course.is_synchronised(), "it is mirrored all the while");
    common::read_all(&to);
    assert!(was_read(&watch), "whoever reads it is seen");
}

/// Two images of one host, and a guest that writes all the while.
#[test]
fn a_bound_image_has_all_that_is_answered() {
    let (from, to) = (volume(BYTES), volume(BYTES));
    let (_course, second, mut stack) = mirrored((&from.path, &to.path));
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let bound = switch_over(
                &second,
                || Ok::<(), String>(()),
                |bound| {
                    let synced = bound.sync_within(LONG, || ()).unwrap();
                    Ok((synced.is_some() && bound.is_equal()).then(|| {
                        let mut bound = bound;
                        bound.stay();
                    }))
                },
            );
            bound.unwrap().expect("it is bound");
        });
        let (mut token, mut since) = (0, 0);
        // Some more once it is bound.
        while since < 200 {
            token += 1;
            let start = token * 7919 % (BYTES / 4096) * 4096;
            stack.submit(write_of(start, 4096, token as u8, token), Instant::now());
            while stack.under_way() > 0 {
                stack.turn(None, &mut Vec::new()).unwrap();
                while let Some((_, outcome)) = stack.finished() {
                    assert_eq!(outcome, Outcome::Done);
                }
            }
            if mover.is_finished() {
                since += 1;
                // Answered is on both.
                let file = std::fs::File::open(&to.path).unwrap();
                let mut block = [0; 4096];
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut block, start).unwrap();
                assert_eq!(block, [token as u8; 4096]);
            }
        }
    });
    assert_eq!(common::read_all(&from), common::read_all(&to));
}

/// Does something while the destination is bound, as one that may be written down as the disk: until the sender is used or gone. It has not been equal all
/// the while then.
fn while_bound(site: &mut Site, work: impl FnOnce(&mut Site, Sender<()>)) {
    let second_image = volume(BYTES);
    let image = Image::open(&second_image.path, Access::ReadWrite, 512).unwrap();
    // Steers the same course.
    let second = SecondImage::of(&image, None, &site.course).unwrap();
    let ((send, bound), (go, goes)) = (channel(), channel());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let goes = goes;
            let switched: Result<Option<()>, String> = switch_over(
                &second,
                || Ok(()),
                |mut bound| {
                    bound.stay();
                    send.send(()).unwrap();
                    let _ = goes.recv(); // gone with the work
                    assert!(!bound.is_equal(), "for good");
                    bound.release();
                    Ok(Some(()))
                },
            );
            assert_eq!(switched, Ok(Some(())));
        });
        while bound.try_recv().is_err() {
            assert_eq!(site.finished(), [0; 0]);
        }
        work(site, go);
    });
}

/// A failed destination must not be left out: it may be written down as the disk.
#[test]
fn a_bound_image_that_fails_is_waited_for_until_it_is_released() {
    while_bound(&mut Site::equal(), |site, _go| {
        let began = Instant::now();
        site.stack.submit(write_of(0, 4096, 7, 1), began);
        site.course.fail("its storage is gone".to_owned());
        while began.elapsed() <= PATIENCE {
            assert_eq!(site.finished(), [0; 0]);
        }
        // Nor by a look at which anybody's patience is over with one that is not bound.
        assert_eq!(site.finished(), [0; 0]);
        site.confirm();
        assert_eq!(site.finished(), [1]);
    });
}

/// It may hang there for long, and must not be taken for there.
#[test]
fn what_the_source_alone_has_answered_is_copied_before_both_are_equal_again() {
    let mut site = Site::equal();
    let copied = site.given.lock().unwrap().copied;
    site.stack.submit(write_of(0, 4096, 7, 1), Instant::now());
    let began = Instant::now();
    while site.finished().is_empty() {
        assert!(began.elapsed() < LONG, "it is waited for");
    }
    while !site.course.is_synchronised() {
        assert!(began.elapsed() < LONG, "they are never equal");
        assert_eq!(site.finished(), [0; 0]);
    }
    assert!(site.given.lock().unwrap().copied > copied);
}

#[test]
fn a_bound_image_has_all_that_is_answered_also_after_a_write_has_failed_at_the_first() {
    while_bound(&mut Site::equal(), |site, go| {
        // Nothing is copied again meanwhile.
        site.stack.rest(true);
        site.source.fail_writes(1, Errno::IO);
        site.stack
            .submit(write_of(0, 4096, 7, FAILS), Instant::now());
        site.finished();
        site.confirm();
        site.finished();
        site.stack
            .submit(write_of(4096, 4096, 8, 1), Instant::now());
        site.stack
            .submit(request_of(Work::Flush, Data::None, 2), Instant::now());
        assert_eq!(site.finished(), [0; 0]);
        site.confirm();
        assert_eq!(site.finished(), [2]);
        go.send(()).unwrap();
        let began = Instant::now();
        while site.finished() != [1] {
            assert!(began.elapsed() < LONG, "it waits for ever");
        }
    });
}
