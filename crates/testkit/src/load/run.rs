//! A whole run: fill, find the most the guest can serve, then a fixed rate with a row for every second.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use super::client::{Client, Counts, fill};
use super::series::{Second, Workload, second};
use super::values::Stream;

#[derive(Clone, Debug)]
pub struct LoadConfig {
    pub address: SocketAddr,
    pub data_mib: u64,
    pub value_bytes: usize,
    /// Connections, each with its own share of the keys.
    pub connections: usize,
    /// How long to look for the most that can be served.
    pub probe: Duration,
    /// Operations a second; absent: `fraction` of the most.
    pub rate_ops_per_s: Option<f64>,
    /// Share of the most that can be served, when no rate is given.
    pub fraction: f64,
    /// How long to run at the fixed rate, unless stopped.
    pub duration: Duration,
    /// Share of operations that write, 0 to 1.
    pub write_share: f64,
    /// Read every key once at the end.
    pub verify_all: bool,
}

/// Something a person may want to see while it runs.
#[derive(Debug)]
pub enum Progress {
    /// All values are written; seconds.
    Filled(f64),
    /// Most operations a second.
    Most(f64),
    /// The fixed rate starts now; operations a second.
    Running(f64),
    Second(Second),
}

/// Runs until the time is over or `stop` is set, telling `progress` what happens.
pub fn run(
    config: &LoadConfig,
    stop: &AtomicBool,
    mut progress: impl FnMut(Progress),
) -> Result<Workload> {
    let keys = (config.data_mib << 20) / config.value_bytes.max(1) as u64;
    ensure!(
        config.connections > 0 && keys >= config.connections as u64,
        "fewer keys than connections"
    );
    ensure!(
        (0.0..=1.0).contains(&config.write_share),
        "the share of writes lies between 0 and 1"
    );
    let filled = fill(config.address, keys, config.value_bytes).context("cannot fill Redis")?;
    progress(Progress::Filled(filled.as_secs_f64()));
    let mut clients = connect_all(config, keys)?;
    let most = find_most(config, &mut clients, stop);
    progress(Progress::Most(most));
    let rate = config.rate_ops_per_s.unwrap_or(most * config.fraction);
    ensure!(
        rate > 0.0,
        "the guest served nothing within {:?}",
        config.probe
    );
    progress(Progress::Running(rate));
    let (seconds, started_unix_ms) = at_fixed_rate(config, &mut clients, rate, stop, &mut progress);
    if config.verify_all {
        verify(&mut clients);
    }
    let mut counts = Counts::default();
    clients
        .iter()
        .for_each(|client| counts.add(&client.counts()));
    Ok(Workload {
        name: name(config),
        started_unix_ms,
        seconds,
        connections_lost: counts.lost,
        verified_reads: counts.verified,
        damaged_reads: counts.damaged,
        lost_writes: counts.lost_writes,
        errors: counts.errors,
        keys,
        value_bytes: config.value_bytes as u64,
        fill_seconds: filled.as_secs_f64(),
        max_ops_per_s: most,
        rate_ops_per_s: rate,
        ..Workload::default()
    })
}

fn name(config: &LoadConfig) -> String {
    let (mib, bytes, writes) = (
        config.data_mib,
        config.value_bytes,
        config.write_share * 100.0,
    );
    format!(
        "redis: {mib} MiB in values of {bytes} bytes, {writes:.0} % SET, {} connections",
        config.connections
    )
}

fn connect_all(config: &LoadConfig, keys: u64) -> Result<Vec<Client>> {
    let count = config.connections as u64;
    let share = |number: u64| (number..keys).step_by(config.connections).collect();
    (0..count)
        .map(|number| Client::new(config.address, share(number), config.value_bytes))
        .collect::<std::io::Result<_>>()
        .context("cannot connect to Redis")
}

/// Every connection sends as fast as it is answered; gives operations a second.
fn find_most(config: &LoadConfig, clients: &mut [Client], stop: &AtomicBool) -> f64 {
    let started = Instant::now();
    let until = started + config.probe;
    let operations: u64 = std::thread::scope(|scope| {
        let worker = |(number, client): (usize, &mut Client)| {
            let mut choice = Choice::new(number as u64, config.write_share);
            let mut done = 0;
            while Instant::now() < until && !stop.load(Ordering::Relaxed) {
                let (index, write) = choice.next(client.key_count());
                done += u64::from(client.operate(index, write));
            }
            done
        };
        let workers: Vec<_> = clients
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

/// A random key of a connection, and whether to write it.
struct Choice {
    random: Stream,
    write_below: u64,
}

impl Choice {
    fn new(number: u64, write_share: f64) -> Self {
        Self {
            random: Stream::new(number, u64::MAX),
            write_below: (write_share * 65536.0) as u64,
        }
    }

    fn next(&mut self, keys: usize) -> (usize, bool) {
        let random = self.random.next() >> 16;
        (
            (random >> 16) as usize % keys.max(1),
            random & 0xFFFF < self.write_below,
        )
    }
}

/// When an answer arrived, and how long after it was meant to be asked for.
type Sample = (Instant, Duration);

fn at_fixed_rate(
    config: &LoadConfig,
    clients: &mut [Client],
    rate: f64,
    stop: &AtomicBool,
    progress: &mut impl FnMut(Progress),
) -> (Vec<Second>, u64) {
    let started = Instant::now();
    let started_unix_ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_millis() as u64);
    let interval = Duration::from_secs_f64(clients.len() as f64 / rate);
    let until = started + config.duration;
    let (sender, samples) = channel();
    std::thread::scope(|scope| {
        let count = clients.len() as u32;
        for (number, client) in clients.iter_mut().enumerate() {
            let sender = sender.clone();
            let choice = Choice::new(1000 + number as u64, config.write_share);
            let first = started + interval * number as u32 / count;
            scope.spawn(move || pace(client, choice, first, interval, until, stop, &sender));
        }
        drop(sender);
        (collect(started, &samples, progress), started_unix_ms)
    })
}

/// Sends at its moments; late ones are not skipped but sent at once, and measured from when they were due.
fn pace(
    client: &mut Client,
    mut choice: Choice,
    first: Instant,
    interval: Duration,
    until: Instant,
    stop: &AtomicBool,
    samples: &Sender<Sample>,
) {
    let mut due = first;
    while due < until && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let (index, write) = choice.next(client.key_count());
        if client.operate(index, write) {
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

fn verify(clients: &mut [Client]) {
    std::thread::scope(|scope| {
        for client in clients {
            scope.spawn(move || {
                for index in 0..client.key_count() {
                    client.operate(index, false);
                }
            });
        }
    });
}
