//! The program inside the Linux test guest: answers questions and does damage on request.
//!
//! Runs as PID 1 after the init script. Port 7, TCP: one command a line, one line back. Port 7, UDP: every datagram
//! is sent back, and `mono` answered as over TCP. It serves a test network and trusts whoever asks; it is not
//! meant for any other. Commands are listed in [`HELP`].

mod disk;

use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const HELP: &str = "mono | fill MIB | hot MIB MIB_PER_S | free | membw | uptime | reboot | poweroff | panic | help";
const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// More than this is never asked for; a typing error must not kill the guest.
const MAX_MIB: usize = 1 << 20;

/// Largest step back, and largest step forward, that the sampling thread saw in CLOCK_MONOTONIC.
static BACK_NS: AtomicI64 = AtomicI64::new(0);
static GAP_NS: AtomicI64 = AtomicI64::new(0);
/// Each `hot` command gets a number; a dirtying thread ends when it is not the newest.
static HOT_RUN: AtomicU64 = AtomicU64::new(0);
static FILLED: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn main() {
    if std::env::args().any(|argument| argument == "--help") {
        println!(
            "guest-probe [yes|no]: port 7 of the test guest; yes waits for Redis and says when it answers\n{HELP}\n\
             guest-probe disk BYTES,DEPTH,random|sequential,SECONDS: a load on the first disk, then power off"
        );
        return;
    }
    if let (Some("disk"), Some(order)) =
        (std::env::args().nth(1).as_deref(), std::env::args().nth(2))
    {
        disk::run(&order);
        println!("{}", end(libc::RB_POWER_OFF));
        thread::park();
    }
    // SAFETY: ignoring SIGCHLD touches no memory; the kernel then reaps what is orphaned to us as PID 1.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    thread::spawn(watch_clock);
    thread::spawn(watch_power_button);
    thread::spawn(serve_udp);
    let wait_for_redis = std::env::args()
        .nth(1)
        .is_some_and(|argument| argument == "yes");
    thread::spawn(move || say_ready(wait_for_redis));
    serve_tcp();
}

fn serve_tcp() {
    let listener = TcpListener::bind("[::]:7").expect("port 7 is free in our own guest");
    for stream in listener.incoming().flatten() {
        thread::spawn(move || serve_stream(stream));
    }
}

fn serve_stream(mut stream: TcpStream) {
    let Ok(reader) = stream.try_clone() else {
        return;
    };
    for line in BufReader::new(reader.take(1 << 20))
        .lines()
        .map_while(Result::ok)
    {
        let answer = answer(line.trim());
        if stream.write_all(format!("{answer}\n").as_bytes()).is_err() {
            return;
        }
    }
}

fn serve_udp() {
    let Ok(socket) = UdpSocket::bind("[::]:7") else {
        return;
    };
    let mut buffer = [0; 2048];
    while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
        let sent = match &buffer[..length] {
            b"mono" => socket.send_to(mono().as_bytes(), peer),
            echo => socket.send_to(echo, peer),
        };
        let _ = sent; // a peer that went away is not our trouble
    }
}

fn answer(line: &str) -> String {
    let mut words = line.split_whitespace();
    let command = words.next().unwrap_or("");
    let mut number = || {
        words
            .next()
            .and_then(|word| word.parse::<usize>().ok())
            .filter(|&mib| mib <= MAX_MIB)
    };
    match command {
        "mono" => mono(),
        "uptime" => std::fs::read_to_string("/proc/uptime")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        "fill" => number().map_or("error: fill MIB".into(), fill),
        "hot" => match (number(), number()) {
            (Some(mib), Some(rate)) => hot(mib, rate),
            _ => "error: hot MIB MIB_PER_S".into(),
        },
        "free" => {
            HOT_RUN.fetch_add(1, Ordering::Relaxed);
            FILLED
                .lock()
                .map(|mut filled| filled.clear())
                .map_or("error".into(), |()| "ok".into())
        }
        "membw" => membw(),
        "reboot" => end(libc::RB_AUTOBOOT),
        "poweroff" => end(libc::RB_POWER_OFF),
        "panic" => soon(|| drop(std::fs::write("/proc/sysrq-trigger", "c"))),
        "help" => HELP.into(),
        _ => format!("error: {HELP}"),
    }
}

fn monotonic_ns() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec that the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn mono() -> String {
    let (now, back, gap) = (
        monotonic_ns(),
        BACK_NS.load(Ordering::Relaxed),
        GAP_NS.load(Ordering::Relaxed),
    );
    format!("mono_ns {now} back_max_ns {back} gap_max_ns {gap}")
}

/// Samples the clock in short bursts, where a step back shows, and rests between so as not to take the one vCPU.
fn watch_clock() {
    let mut last = monotonic_ns();
    loop {
        for _ in 0..64 {
            let now = monotonic_ns();
            BACK_NS.fetch_max(last - now, Ordering::Relaxed);
            GAP_NS.fetch_max(now - last, Ordering::Relaxed);
            last = now;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A small generator with a period far beyond any guest's memory (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
    }
}

fn fill(mib: usize) -> String {
    let started = Instant::now();
    let mut random = Random(monotonic_ns() as u64 | 1);
    let mut memory = vec![0; mib * MIB];
    random.fill(&mut memory);
    match FILLED.lock() {
        Ok(mut filled) => filled.push(memory),
        Err(_) => return "error: a filling thread has died".into(),
    }
    format!("ok {} ms", started.elapsed().as_millis())
}

/// Dirties `mib` MiB over and over at `rate` MiB/s (0: as fast as it can); `hot 0 0` ends it.
fn hot(mib: usize, rate: usize) -> String {
    let run = HOT_RUN.fetch_add(1, Ordering::Relaxed) + 1;
    if mib > 0 {
        thread::spawn(move || dirty(run, mib, rate));
    }
    "ok".into()
}

fn dirty(run: u64, mib: usize, rate: usize) {
    let mut memory = vec![1_u8; mib * MIB];
    let mut value = 0_u64;
    let mut due = Instant::now();
    loop {
        for chunk in memory.chunks_exact_mut(MIB) {
            if HOT_RUN.load(Ordering::Relaxed) != run {
                return;
            }
            value = value.wrapping_add(1);
            chunk
                .chunks_exact_mut(PAGE)
                .for_each(|page| page[..8].copy_from_slice(&value.to_le_bytes()));
            if rate > 0 {
                due += Duration::from_secs_f64(1.0 / rate as f64);
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
        black_box(&mut memory);
    }
}

/// Copies 64 MiB blocks for a second, then touches fresh pages for a second.
fn membw() -> String {
    let (from, mut to) = (vec![1_u8; 64 * MIB], vec![2_u8; 64 * MIB]);
    let started = Instant::now();
    let mut copied = 0;
    while started.elapsed() < Duration::from_secs(1) {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        copied += 64;
    }
    let mb_per_s = f64::from(copied) * MIB as f64 / 1e6 / started.elapsed().as_secs_f64();
    drop((from, to));
    format!(
        "copy_mb_per_s {mb_per_s:.0} faults_per_s {:.0}",
        fault_rate()
    )
}

/// Page faults a second: maps 16 MiB, writes a byte into each page, unmaps, again.
fn fault_rate() -> f64 {
    const LENGTH: usize = 16 * MIB;
    let started = Instant::now();
    let mut faults = 0_u64;
    while started.elapsed() < Duration::from_secs(1) {
        // SAFETY: an anonymous private mapping of LENGTH bytes; it is checked, written only within its length,
        // and unmapped before the next turn. Small pages are asked for so that each write is a fault.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let map = libc::mmap(
                std::ptr::null_mut(),
                LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            if map == libc::MAP_FAILED {
                return 0.0;
            }
            libc::madvise(map, LENGTH, libc::MADV_NOHUGEPAGE);
            for page in 0..LENGTH / PAGE {
                map.cast::<u8>().add(page * PAGE).write_volatile(1);
            }
            libc::munmap(map, LENGTH);
        }
        faults += (LENGTH / PAGE) as u64;
    }
    faults as f64 / started.elapsed().as_secs_f64()
}

fn end(how: i32) -> String {
    soon(move || {
        network_off();
        // SAFETY: no memory is involved; the guest has no writable disk that would lose data.
        unsafe { libc::reboot(how) };
    })
}

/// As a shutdown in order does. With its card still up, a kernel without Linux commit 0d0eff39ceb3 breaks the card's queues and then waits
/// for ever for what was sent last, about once in a hundred times.
fn network_off() {
    for card in std::fs::read_dir("/sys/class/net").into_iter().flatten() {
        let Ok(card) = card.map(|card| card.file_name()) else {
            continue;
        };
        // Nobody is left to hear that it could not be done.
        let _ = Command::new("ip")
            .args(["link", "set", "down", "dev"])
            .arg(card)
            .status();
    }
}

/// Does what ends the guest once the answer has had time to leave it.
fn soon(action: impl FnOnce() + Send + 'static) -> String {
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        action();
    });
    "ok".into()
}

/// The ACPI power button ends the guest in order, as an operating system would.
fn watch_power_button() {
    const EV_KEY: u16 = 1;
    const KEY_POWER: u16 = 116;
    let Ok(devices) = std::fs::read_dir("/dev/input") else {
        return;
    };
    for device in devices
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("event"))
    {
        thread::spawn(move || {
            let Ok(mut file) = File::open(device.path()) else {
                return;
            };
            let mut event = [0_u8; 24]; // struct input_event: time (16), type, code, value
            while file.read_exact(&mut event).is_ok() {
                let kind = u16::from_le_bytes([event[16], event[17]]);
                let code = u16::from_le_bytes([event[18], event[19]]);
                if kind == EV_KEY && code == KEY_POWER && event[20] == 1 {
                    end(libc::RB_POWER_OFF);
                }
            }
        });
    }
}

/// Says on the console when the guest can be used: tests and people wait for this line.
fn say_ready(wait_for_redis: bool) {
    while wait_for_redis && !redis_answers() {
        thread::sleep(Duration::from_millis(20));
    }
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds = uptime.split(' ').next().unwrap_or("?").to_owned();
    if let Ok(mut console) = File::options().write(true).open("/dev/console") {
        let _ = writeln!(console, "godwit-guest: ready after {seconds} s");
    }
}

fn redis_answers() -> bool {
    let Ok(mut stream) = TcpStream::connect("127.0.0.1:6379") else {
        return false;
    };
    let mut answer = [0; 7];
    stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && &answer == b"+PONG\r\n"
}
