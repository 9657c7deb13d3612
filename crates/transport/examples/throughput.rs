//! How fast records cross a link, and what that costs: one, two and four channels, sealed and in clear.
//!
//! Without arguments both ends are this process, over loopback. `throughput receive ADDRESS PORT` and `throughput send
//! ADDRESS PORT [SECONDS]` are two ends on two hosts or in two network namespaces. Prints GB/s of page data, core-seconds
//! per GB of each side, what each side waited for, and what the kernel measured of the link. Makes no promise.

use godwit_transport::{ConnectOptions, Connection, Gate, Listener, Patience, Tuning, connect};
use godwit_types::MigrationId;
use godwit_types::migration::{Cipher, MigrationSecret};
use godwit_wire::{ChannelId, PAYLOAD_LEN_MAX, PageRun, PageRuns, RecordKind, Spec};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const ROUND: Duration = Duration::from_millis(500);
const CHANNELS: [u16; 3] = [1, 2, 4];
const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::None];
const MEMORY_LEN: usize = 256 << 20;
type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// What one end of one channel did.
struct Share {
    bytes: u64,
    cpu: Duration,
    waited: Duration,
    note: String,
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (end, at, round) = match words.as_slice() {
        [] => ("both", SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), ROUND),
        [end, address, port, seconds @ ..] => {
            let at = SocketAddr::new(address.parse()?, port.parse()?);
            let seconds = seconds.first().map_or(Ok(2.0), |seconds| seconds.parse())?;
            (*end, at, Duration::from_secs_f64(seconds))
        }
        _ => return Err("usage: throughput [receive|send ADDRESS PORT [SECONDS]]".into()),
    };
    let memory = match end {
        "receive" => Vec::new(),
        _ => (0..MEMORY_LEN).map(|at| (at * 31 % 251) as u8).collect(),
    };
    for channels in CHANNELS {
        for cipher in CIPHERS {
            let spec = spec(channels, cipher)?;
            match end {
                "receive" => drop(receive_all(
                    &mut listener(at.ip(), at.port(), &spec)?,
                    channels,
                )?),
                "send" => {
                    let sent = send_all(&memory, at, &spec, channels, round)?;
                    print(channels, cipher, &sent, round);
                }
                _ => {
                    let mut listener = listener(at.ip(), 0, &spec)?;
                    let to = listener.address();
                    let (sent, received) = thread::scope(|scope| {
                        let sender = scope.spawn(|| send_all(&memory, to, &spec, channels, round));
                        let received = receive_all(&mut listener, channels);
                        (sender.join(), received)
                    });
                    let sent = sent.map_err(|_| "a panic")??;
                    print(channels, cipher, &sent, round);
                    println!("    receiver: {}", costs(&received?, total(&sent)));
                }
            }
        }
    }
    Ok(())
}

/// Each round is a migration of its own, so that ends that are not in step do not meet.
fn spec(channels: u16, cipher: Cipher) -> Outcome<Arc<Spec>> {
    let secret = MigrationSecret {
        key: vec![1; 32],
        nonce: vec![2; 8],
    };
    let id = MigrationId::new(format!("throughput-{channels}-{cipher:?}").to_lowercase())?;
    Ok(Arc::new(Spec::new(id, &secret, cipher)?))
}

fn listener(address: IpAddr, port: u16, spec: &Arc<Spec>) -> Outcome<Listener> {
    let gate = Gate::new(Arc::clone(spec), Tuning::default(), Duration::from_secs(5));
    Ok(Listener::bind(gate, address, port..=port)?)
}

fn send_all(
    memory: &[u8],
    to: SocketAddr,
    spec: &Spec,
    channels: u16,
    round: Duration,
) -> Outcome<Vec<Share>> {
    let part = memory.len() / usize::from(channels);
    let began = Instant::now();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..channels)
            .map(|index| {
                let memory = memory.get(part * usize::from(index)..).unwrap_or_default();
                scope.spawn(move || {
                    let channel = ChannelId::data(0, index).ok_or("no such channel")?;
                    let made = dial_patiently(to, spec, channel)?;
                    send(made, memory.get(..part).unwrap_or_default(), began + round)
                })
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Outcome<Share>>| thread.join();
        let shares: Result<Vec<_>, _> = threads.into_iter().map(join).collect();
        shares.map_err(|_| "a panic")?.into_iter().collect()
    })
}

/// The other end may not listen for this round yet.
fn dial_patiently(to: SocketAddr, spec: &Spec, channel: ChannelId) -> Outcome<Connection> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match connect(to, &ConnectOptions::default(), spec, channel, deadline) {
            Ok(made) => return Ok(made),
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Sends whole records until the round ends.
fn send(made: Connection, memory: &[u8], end: Instant) -> Outcome<Share> {
    let (granted, probe) = (made.granted().clone(), made.probe());
    let (_reader, mut writer) = made.split();
    let patience = Patience::idle(Duration::from_secs(5));
    let (mut bytes, mut runs) = (0, PageRuns::new());
    for (index, piece) in memory.chunks_exact(PAYLOAD_LEN_MAX).enumerate().cycle() {
        if Instant::now() >= end {
            break;
        }
        runs.clear();
        let first = index as u64 * 256;
        runs.push(PageRun { first, count: 256 })?;
        writer.send_pages(&runs, &[piece], &patience)?;
        bytes += piece.len() as u64;
    }
    let link = probe.read().unwrap_or_default();
    writer.finish(&patience)?;
    let waited = Duration::from_micros(writer.meter().read().blocked_us);
    Ok(Share {
        bytes,
        cpu: thread_time(),
        waited,
        note: format!(
            "{} {:?} (shortest {:?}), window {} KiB, buffer {} KiB, window-limited {:?}, buffer-limited {:?}, repeated {} KiB",
            granted.congestion,
            link.rtt,
            link.min_rtt,
            link.window_bytes >> 10,
            granted.send_buffer_bytes >> 10,
            link.window_limited,
            link.buffer_limited,
            link.repeated_bytes >> 10
        ),
    })
}

fn receive_all(listener: &mut Listener, channels: u16) -> Outcome<Vec<Share>> {
    let deadline = Instant::now() + Duration::from_secs(60);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..channels {
            let accepted = listener.accept(deadline)?;
            threads.push(scope.spawn(move || receive(accepted)));
        }
        let join = |thread: thread::ScopedJoinHandle<'_, Outcome<Share>>| thread.join();
        let shares: Result<Vec<_>, _> = threads.into_iter().map(join).collect();
        shares.map_err(|_| "a panic")?.into_iter().collect()
    })
}

/// Opens every record into one place.
fn receive(accepted: Connection) -> Outcome<Share> {
    let (mut reader, _writer) = accepted.split();
    let patience = Patience::idle(Duration::from_secs(5));
    let mut memory = vec![0; PAYLOAD_LEN_MAX];
    let mut bytes = 0;
    while reader.next(&patience)?.kind != RecordKind::Final {
        reader.next_payload_into(&mut memory, &patience)?;
        bytes += memory.len() as u64;
    }
    let waited = Duration::from_micros(reader.meter().read().blocked_us);
    Ok(Share {
        bytes,
        cpu: thread_time(),
        waited,
        note: String::new(),
    })
}

fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

fn total(shares: &[Share]) -> f64 {
    shares.iter().map(|share| share.bytes as f64).sum::<f64>() / 1e9
}

fn costs(shares: &[Share], gigabytes: f64) -> String {
    let cpu: f64 = shares.iter().map(|share| share.cpu.as_secs_f64()).sum();
    let waited: Vec<_> = shares.iter().map(|share| share.waited).collect();
    format!("{:.3} core-s/GB, waited {waited:.0?}", cpu / gigabytes)
}

fn print(channels: u16, cipher: Cipher, sent: &[Share], round: Duration) {
    let gigabytes = total(sent);
    println!(
        "{channels} channel(s), {cipher:?}: {:.2} GB/s; sender: {}",
        gigabytes / round.as_secs_f64(),
        costs(sent, gigabytes)
    );
    for share in sent {
        println!("    {}", share.note);
    }
}
