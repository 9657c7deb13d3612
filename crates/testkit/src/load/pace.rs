//! Operations over connections that stay open: as fast as they are answered, or at a fixed rate with a row for every second.
//!
//! What an operation is is the [`Session`]'s. Latency counts from when an operation was meant to be sent.

use super::series::{Second, second};
use super::values::Stream;
use anyhow::{Result, ensure};
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// One connection of a load.
pub trait Session: Send {
    /// Does one operation, which a random number chooses; false where no answer came.
    fn operate(&mut self, random: u64) -> bool;
}

/// Something a person may want to see while it runs.
#[derive(Debug)]
pub enum Progress {
    /// All data are there; seconds.
    Filled(f64),
    /// Most operations a second.
    Most(f64),
    /// The fixed rate starts now; operations a second.
    Running(f64),
    Second(Second),
}

/// Prints it, a line each.
pub fn show(progress: Progress) {
    match progress {
        Progress::Filled(seconds) => println!("filled {seconds:.1} s"),
        Progress::Most(rate) => println!("most {rate:.0} ops/s"),
        Progress::Running(rate) => println!("running {rate:.0} ops/s"),
        Progress::Second(row) => println!(
            "t {:4} s  {:6} ops  p50 {:8.2} ms  p99 {:8.2} ms  max {:8.2} ms",
            row.t, row.ops, row.p50_ms, row.p99_ms, row.max_ms
        ),
    }
    let _ = io::stdout().flush(); // whoever reads along wants it now
}

/// What connections were asked for and gave.
pub struct Paced {
    /// Most operations a second.
    pub most: f64,
    /// The fixed rate, operations a second.
    pub rate: f64,
    pub seconds: Vec<Second>,
    /// The wall clock at the start of the fixed rate, ms since 1970.
    pub started_unix_ms: u64,
}

/// Finds the most that the guest serves in the first time, and sends at the rate that is chosen by it for the second one, or until
/// `stop` is set. Refused where nothing was served.
pub fn find_and_hold(
    sessions: &mut [impl Session],
    (probe, time): (Duration, Duration),
    choose: impl FnOnce(f64) -> f64,
    stop: &AtomicBool,
    progress: &mut impl FnMut(Progress),
) -> Result<Paced> {
    let most = find_most(sessions, probe, stop);
    progress(Progress::Most(most));
    let rate = choose(most);
    ensure!(rate > 0.0, "the guest served nothing within {probe:?}");
    progress(Progress::Running(rate));
    let (seconds, started_unix_ms) = at_fixed_rate(sessions, rate, time, stop, progress);
    Ok(Paced {
        most,
        rate,
        seconds,
        started_unix_ms,
    })
}

/// Every connection sends as fast as it is answered; gives operations a second.
fn find_most<S: Session>(sessions: &mut [S], time: Duration, stop: &AtomicBool) -> f64 {
    let started = Instant::now();
    let until = started + time;
    let operations: u64 = std::thread::scope(|scope| {
        let worker = |(number, session): (usize, &mut S)| {
            let mut random = Random::new(number as u64);
            let mut done = 0;
            while Instant::now() < until && !stop.load(Ordering::Relaxed) {
                done += u64::from(session.operate(random.next()));
            }
            done
        };
        let workers: Vec<_> = sessions
            .iter_mut()
            .enumerate()
            .map(|share| scope.spawn(move || worker(share)))
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(0))
            .sum()
    });
    operations as f64 / started.elapsed().as_secs_f64()
}

/// What chooses a connection's operations.
struct Random(Stream);

impl Random {
    fn new(number: u64) -> Self {
        Self(Stream::new(number, u64::MAX))
    }

    fn next(&mut self) -> u64 {
        self.0.next() >> 16
    }
}

/// When an answer arrived, and how long after it was meant to be asked for.
type Sample = (Instant, Duration);

/// All connections together send so many operations a second, until the time is over or `stop` is set. Gives the seconds, and the
/// wall clock at their start, ms since 1970.
fn at_fixed_rate(
    sessions: &mut [impl Session],
    rate: f64,
    time: Duration,
    stop: &AtomicBool,
    progress: &mut impl FnMut(Progress),
) -> (Vec<Second>, u64) {
    let started = Instant::now();
    let started_unix_ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_millis() as u64);
    let interval = Duration::from_secs_f64(sessions.len() as f64 / rate);
    let until = started + time;
    let (sender, samples) = channel();
    std::thread::scope(|scope| {
        let count = sessions.len() as u32;
        for (number, session) in sessions.iter_mut().enumerate() {
            let sender = sender.clone();
            let random = Random::new(1000 + number as u64);
            let first = started + interval * number as u32 / count;
            scope.spawn(move || pace(session, random, first, interval, until, stop, &sender));
        }
        drop(sender);
        (collect(started, &samples, progress), started_unix_ms)
    })
}

/// Sends at its moments; late ones are not skipped but sent at once, and measured from when they were due.
fn pace(
    session: &mut impl Session,
    mut random: Random,
    first: Instant,
    interval: Duration,
    until: Instant,
    stop: &AtomicBool,
    samples: &Sender<Sample>,
) {
    let mut due = first;
    while due < until && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if session.operate(random.next()) {
            let now = Instant::now();
            let _ = samples.send((now, now.saturating_duration_since(due))); // the collector outlives us
        } else if Instant::now() > until {
            return;
        }
        due += interval;
    }
}

/// Gathers samples into seconds until all senders are gone.
fn collect(
    started: Instant,
    samples: &Receiver<Sample>,
    progress: &mut impl FnMut(Progress),
) -> Vec<Second> {
    let mut seconds: Vec<Second> = Vec::new();
    let mut current: Vec<u64> = Vec::new();
    let mut later: Vec<Sample> = Vec::new();
    loop {
        let t = seconds.len() as u32;
        let end = started + Duration::from_secs(u64::from(t) + 1);
        let mut gone = false;
        for sample in std::mem::take(&mut later) {
            sort_in(sample, end, &mut current, &mut later);
        }
        // A tenth of a second of grace lets an answer of this second travel through the channel.
        let grace = end + Duration::from_millis(100);
        while Instant::now() < grace {
            match samples.recv_timeout(grace.saturating_duration_since(Instant::now())) {
                Ok(sample) => sort_in(sample, end, &mut current, &mut later),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => break,
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    gone = true;
                    break;
                }
            }
        }
        let row = second(t, &mut current);
        current.clear();
        seconds.push(row);
        progress(Progress::Second(row));
        if gone && later.is_empty() {
            return seconds;
        }
    }
}

fn sort_in(sample: Sample, end: Instant, current: &mut Vec<u64>, later: &mut Vec<Sample>) {
    match sample.0 < end {
        true => current.push(sample.1.as_micros() as u64),
        false => later.push(sample),
    }
}
