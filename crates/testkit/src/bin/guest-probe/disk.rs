//! A load on the guest's first disk, past its page cache, as an application makes it.
//!
//! So many threads as requests are to be under way, each with one at a time; 30 % of them write. What is on the disk is lost.
//! Refuses an order that it does not understand, with a line on the console.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Random;

const DISK: &str = "/dev/vda";
const WRITE_PERCENT: u64 = 30;
const ALIGNMENT: usize = 4096;
/// Time in which nothing is measured: queues fill, and emulated code is translated.
const WARM_UP: Duration = Duration::from_secs(1);

/// What to do: `BYTES,DEPTH,random|sequential,SECONDS`.
struct Order {
    bytes: usize,
    depth: usize,
    sequential: bool,
    seconds: u64,
}

impl Order {
    fn read(text: &str) -> Option<Self> {
        let mut words = text.split(',');
        let order = Self {
            bytes: words.next()?.parse().ok()?,
            depth: words.next()?.parse().ok()?,
            sequential: match words.next()? {
                "random" => false,
                "sequential" => true,
                _ => return None,
            },
            seconds: words.next()?.parse().ok()?,
        };
        let fits = order.bytes > 0 && order.bytes.is_multiple_of(ALIGNMENT);
        (fits && words.next().is_none()).then_some(order)
    }
}

/// Where the next request of a sequential load goes, and since when it counts.
struct Common {
    next: AtomicU64,
    blocks: u64,
    counts_from: Instant,
    ends_at: Instant,
}

/// How long requests took, in nanoseconds: reads, then writes.
type Took = [Vec<u64>; 2];

/// Does what the order says, and says on the console what it saw, as JSON after `disk-load: `.
pub fn run(text: &str) {
    let said = match Order::read(text).ok_or_else(|| io::Error::other(format!("no order: {text}")))
    {
        Ok(order) => measure(&order),
        Err(error) => Err(error),
    };
    let line = said.unwrap_or_else(|error| format!("failed: {error}"));
    if let Ok(mut console) = File::options().write(true).open("/dev/console") {
        let _ = writeln!(console, "disk-load: {line}");
    }
}

fn measure(order: &Order) -> io::Result<String> {
    let disk = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(DISK)?;
    let sectors = std::fs::read_to_string("/sys/class/block/vda/size")?;
    let sectors: u64 = sectors.trim().parse().map_err(io::Error::other)?;
    let began = Instant::now();
    let common = Common {
        next: AtomicU64::new(0),
        blocks: sectors * 512 / order.bytes as u64,
        counts_from: began + WARM_UP,
        ends_at: began + WARM_UP + Duration::from_secs(order.seconds),
    };
    let (common, disk) = (&common, &disk);
    let all: io::Result<Vec<Took>> = thread::scope(|scope| {
        let work = |number| move || one_at_a_time(disk, order, common, number);
        let threads: Vec<_> = (1..=order.depth as u64)
            .map(|number| scope.spawn(work(number)))
            .collect();
        let ended = threads.into_iter().map(|thread| {
            let died = |_| Err(io::Error::other("a thread of the load died"));
            thread.join().unwrap_or_else(died)
        });
        ended.collect()
    });
    let mut took: Took = [Vec::new(), Vec::new()];
    for [reads, writes] in all? {
        took[0].extend(reads);
        took[1].extend(writes);
    }
    let iops = (took[0].len() + took[1].len()) as f64 / order.seconds as f64;
    let [reads, writes] = took.map(latency);
    Ok(format!(
        "{{\"iops\":{iops:.1},\"read\":{reads},\"write\":{writes}}}"
    ))
}

fn one_at_a_time(disk: &File, order: &Order, common: &Common, number: u64) -> io::Result<Took> {
    let mut random = Random(number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut memory = vec![0_u8; order.bytes + ALIGNMENT];
    random.fill(&mut memory);
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    let buffer = &mut memory[start..start + order.bytes];
    let mut took: Took = [Vec::new(), Vec::new()];
    loop {
        let block = match order.sequential {
            true => common.next.fetch_add(1, Ordering::Relaxed),
            false => random.next(),
        };
        let at = block % common.blocks * order.bytes as u64;
        let writes = random.next() % 100 < WRITE_PERCENT;
        let began = Instant::now();
        match writes {
            true => disk.write_all_at(buffer, at)?,
            false => disk.read_exact_at(buffer, at)?,
        }
        let now = Instant::now();
        if now >= common.ends_at {
            return Ok(took);
        }
        if began >= common.counts_from {
            took[usize::from(writes)].push((now - began).as_nanos() as u64);
        }
    }
}

/// Milliseconds, as JSON; `null` where there was none.
fn latency(mut took: Vec<u64>) -> String {
    took.sort_unstable();
    let ms = |nanos: u64| nanos as f64 / 1e6;
    let Some(p99) = took.get(took.len() * 99 / 100) else {
        return "null".into();
    };
    let mean = took.iter().map(|nanos| ms(*nanos)).sum::<f64>() / took.len() as f64;
    let squares = took.iter().map(|nanos| (ms(*nanos) - mean).powi(2));
    let variance = squares.sum::<f64>() / took.len() as f64;
    format!(
        "{{\"mean_ms\":{mean:.6},\"p99_ms\":{:.6},\"variance\":{variance:.6}}}",
        ms(*p99)
    )
}
