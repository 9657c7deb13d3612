//! A load under way: a thread that keeps so many requests under way on one queue.
//!
//! Owns the thread. A back end that answers nothing for a minute ends the load with an error; a read that brings what the log
//! does not know is counted, and so is a request that failed.

use anyhow::{Context as _, Result, bail, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::course::Done;
use super::front_end::FrontEnd;
use super::log::{self, Covered, Held, Log};
use super::ring::{IO_MAX, Kind, Ring};
use super::{MEMORY_BYTES, OUTSTANDING_MAX, skew};

/// How long a back end may answer nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// How often it is looked whether the load is to end, while nothing is answered.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Which blocks come one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Random,
    Sequential,
    /// Some parts of the disk much more often than others, and more of those towards its end ([`super::skew`]).
    Skewed,
}

/// What is asked of a disk.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Requests that are under way at a time.
    pub outstanding: usize,
    /// Of a hundred requests so many write.
    pub write_percent: u8,
    /// And of a thousand so many flush.
    pub flush_permille: u16,
    pub order: Order,
    /// Requests a second at most; none: as many as the disk answers.
    pub per_second: Option<u32>,
    pub seed: u64,
}

/// Where a back end is.
#[derive(Debug, Clone)]
pub struct Place {
    pub socket: PathBuf,
    /// The file of the shared memory.
    pub memory: PathBuf,
}

impl Place {
    /// Makes the file of the shared memory.
    pub fn make_memory(&self) -> Result<()> {
        File::create(&self.memory)
            .and_then(|file| file.set_len(MEMORY_BYTES))
            .with_context(|| format!("cannot make {}", self.memory.display()))
    }
}

/// A load that is under way.
pub struct Running {
    began: Instant,
    stops: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: JoinHandle<Result<Ended, Box<Cut>>>,
}

/// A load whose back end died.
struct Cut {
    log: Log,
    error: anyhow::Error,
}

/// A load that has ended: all that was under way was answered, and so was a flush after it.
#[derive(Debug)]
pub struct Ended {
    pub log: Log,
    /// Every request, in the order of the answers.
    pub done: Vec<Done>,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Reads that brought other bytes than the log has.
    pub wrong_reads: u64,
}

impl Running {
    /// Connects, and begins. The log says what the disk holds.
    pub fn begin(load: Load, log: Log, place: &Place) -> Result<Self> {
        ensure!(
            (1..=OUTSTANDING_MAX).contains(&load.outstanding) && log.block_bytes() <= IO_MAX,
            "a load of {} requests of {} bytes each is too much",
            load.outstanding,
            log.block_bytes()
        );
        ensure!(
            log.blocks() >= 4 * load.outstanding as u64,
            "a disk of {} blocks is too small for a load",
            log.blocks()
        );
        let mut worker = Worker::new(load, log, place)?;
        let (began, stops, count) = (worker.began, Arc::default(), Arc::default());
        let (seen, counted) = (Arc::clone(&stops), Arc::clone(&count));
        let thread = std::thread::Builder::new()
            .name("disk-load".to_owned())
            .spawn(move || match worker.run(&seen, &counted) {
                Ok(()) => Ok(worker.end()),
                Err(error) => Err(worker.cut(error)),
            })?;
        Ok(Self {
            began,
            stops,
            count,
            thread,
        })
    }

    /// Seconds since it began, the clock of all its figures.
    pub fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// The same of a moment.
    pub fn at(&self, moment: Instant) -> f64 {
        moment.saturating_duration_since(self.began).as_secs_f64()
    }

    /// Requests that were answered.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether it ended by itself, which is an error.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Has it end in order.
    pub fn end(self) -> Result<Ended> {
        self.stops.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(ended) => ended.map_err(|cut| cut.error),
            Err(_) => bail!("the thread of a load ended by a panic"),
        }
    }

    /// Its back end has died, or dies now: gives what was acknowledged until then.
    pub fn cut(self) -> Result<Log> {
        match self.thread.join() {
            Ok(Err(cut)) => Ok(cut.log),
            Ok(Ok(_)) => bail!("a load ended in order whose back end died"),
            Err(_) => bail!("the thread of a load ended by a panic"),
        }
    }
}

/// A request that is under way.
#[derive(Debug, Clone, Copy)]
struct Asked {
    kind: Kind,
    block: u64,
    began: Instant,
}

struct Worker {
    load: Load,
    log: Log,
    front_end: FrontEnd,
    ring: Ring,
    began: Instant,
    random: Random,
    next: u64,
    asked: Vec<Option<Asked>>,
    done: Vec<Done>,
    failed: u64,
    wrong_reads: u64,
    /// By place, of flushes that are under way.
    covered: Vec<Option<Covered>>,
}

impl Worker {
    fn new(load: Load, log: Log, place: &Place) -> Result<Self> {
        let memory = open(&place.memory)?;
        let mut ring = Ring::map(&memory)?;
        for place in 0..load.outstanding {
            log::fill(ring.content(place, log.block_bytes()));
        }
        Ok(Self {
            front_end: FrontEnd::start(&place.socket, &memory)?,
            ring,
            load,
            log,
            began: Instant::now(),
            random: Random::new(load.seed),
            next: 0,
            asked: vec![None; OUTSTANDING_MAX],
            done: Vec::new(),
            failed: 0,
            wrong_reads: 0,
            covered: (0..OUTSTANDING_MAX).map(|_| None).collect(),
        })
    }

    fn run(&mut self, stops: &AtomicBool, count: &AtomicU64) -> Result<()> {
        let mut free: Vec<usize> = (0..self.load.outstanding).collect();
        let mut asked = 0;
        loop {
            let goes_on = !stops.load(Ordering::Relaxed);
            while goes_on
                && self.due_in(asked).is_zero()
                && let Some(place) = free.pop()
            {
                self.ask(place);
                asked += 1;
            }
            self.tell()?;
            let until_next = match free.is_empty() {
                true => LOOK_EVERY,
                false => self.due_in(asked).min(LOOK_EVERY),
            };
            if free.len() == self.load.outstanding {
                if !goes_on {
                    return self.flush_all();
                }
                std::thread::sleep(until_next);
                continue;
            }
            if goes_on && !free.is_empty() {
                self.wait_for_an_answer(until_next)?;
            } else {
                self.wait_for_answers()?;
            }
            while let Some(place) = self.answered()? {
                free.push(place);
            }
            count.store(self.done.len() as u64, Ordering::Relaxed);
        }
    }

    /// How long it is until the request after so many is to be made.
    fn due_in(&self, asked: u64) -> Duration {
        let Some(per_second) = self.load.per_second else {
            return Duration::ZERO;
        };
        let due = Duration::from_secs_f64(asked as f64 / f64::from(per_second.max(1)));
        due.saturating_sub(self.began.elapsed())
    }

    /// Waits for so long at most, since another request is due then.
    fn wait_for_an_answer(&mut self, at_most: Duration) -> Result<()> {
        self.ring.want_interrupt();
        match self.ring.has_answer() {
            true => Ok(()),
            false => self.front_end.wait(at_most),
        }
    }

    /// Flushes what was written, and ends the queue.
    fn flush_all(&mut self) -> Result<()> {
        self.flush(0);
        self.tell()?;
        self.wait_for_answers()?;
        self.answered()?;
        self.front_end.stop()
    }

    fn end(self) -> Ended {
        Ended {
            log: self.log,
            done: self.done,
            failed: self.failed,
            wrong_reads: self.wrong_reads,
        }
    }

    /// What was answered before the back end died counts, also where nobody has looked yet.
    fn cut(mut self, error: anyhow::Error) -> Box<Cut> {
        while matches!(self.answered(), Ok(Some(_))) {}
        Box::new(Cut {
            log: self.log,
            error,
        })
    }

    fn flush(&mut self, place: usize) {
        self.covered[place] = Some(self.log.covered());
        self.ring.put(place, Kind::Flush, 0, 0);
        self.asked[place] = Some(Asked {
            kind: Kind::Flush,
            block: u64::MAX,
            began: Instant::now(),
        });
    }

    fn ask(&mut self, place: usize) {
        let permille = u64::from(self.load.flush_permille);
        if permille > 0 && self.random.below(1000) < permille {
            return self.flush(place);
        }
        let kind = match self.random.below(100) < u64::from(self.load.write_percent) {
            true => Kind::Write,
            false => Kind::Read,
        };
        let block = self.choose(kind);
        let (len, at) = (
            self.log.block_bytes(),
            block * self.log.block_bytes() as u64,
        );
        if kind == Kind::Write {
            let number = self.log.begin(block);
            log::stamp(self.ring.content(place, len), block, number);
        }
        self.ring.put(place, kind, at, len);
        self.asked[place] = Some(Asked {
            kind,
            block,
            began: Instant::now(),
        });
    }

    /// A block of which nothing is under way that would make its content uncertain.
    fn choose(&mut self, kind: Kind) -> u64 {
        loop {
            let block = match self.load.order {
                Order::Random => self.random.below(self.log.blocks()),
                Order::Sequential => {
                    self.next = (self.next + 1) % self.log.blocks();
                    self.next
                }
                Order::Skewed => skew::block(self.log.blocks(), || self.random.next()),
            };
            let is_read = |asked: &Asked| asked.block == block;
            let is_busy = self.log.is_open(block)
                || kind == Kind::Write && self.asked.iter().flatten().any(is_read);
            if !is_busy {
                return block;
            }
        }
    }

    fn tell(&mut self) -> Result<()> {
        match self.ring.must_tell() {
            true => self.front_end.kick(),
            false => Ok(()),
        }
    }

    fn wait_for_answers(&mut self) -> Result<()> {
        let since = Instant::now();
        while !self.ring.has_answer() {
            self.ring.want_interrupt();
            if self.ring.has_answer() {
                break;
            }
            self.front_end.wait(LOOK_EVERY)?;
            ensure!(
                since.elapsed() < SILENCE,
                "the disk answered nothing for {SILENCE:?}"
            );
        }
        Ok(())
    }

    /// Takes the next answer, and gives its place.
    fn answered(&mut self) -> Result<Option<usize>> {
        let Some(place) = self.ring.answered()? else {
            return Ok(None);
        };
        let asked = self.asked.get_mut(place).and_then(Option::take);
        let asked = asked.context("a request was answered twice")?;
        let now = Instant::now();
        let is_done = self.ring.is_done(place);
        self.failed += u64::from(!is_done);
        let len = self.log.block_bytes();
        match asked.kind {
            Kind::Flush => {
                let covered = self.covered.get_mut(place).and_then(Option::take);
                if let Some(covered) = covered.filter(|_| is_done) {
                    self.log.flush(&covered);
                }
                return Ok(Some(place));
            }
            Kind::Write if is_done => self.log.acknowledge(asked.block),
            Kind::Read if is_done => {
                let held = self
                    .log
                    .examine(asked.block, self.ring.was_read(place, len));
                self.wrong_reads += u64::from(held != Held::Right);
            }
            Kind::Read | Kind::Write => {}
        }
        self.done.push(Done {
            at_s: (now - self.began).as_secs_f64(),
            took_ms: (now - asked.began).as_secs_f64() * 1e3,
            is_write: asked.kind == Kind::Write,
        });
        Ok(Some(place))
    }
}

fn open(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    // All of it is there before anybody waits for it.
    file.write_all_at(&vec![0; MEMORY_BYTES as usize], 0)?;
    Ok(file)
}

/// A small generator (splitmix64).
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}
