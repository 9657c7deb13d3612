//! How fast records cross loopback: one and two channels, sealed and in clear, half a second each.
//!
//! Prints GB/s of page data and what each side waited for. Makes no promise: loopback has no link to wait for, and
//! both sides share this machine's cores.

use godwit_transport::{ConnectOptions, Connection, Gate, Listener, Patience, Tuning, connect};
use godwit_types::MigrationId;
use godwit_types::migration::{Cipher, MigrationSecret};
use godwit_wire::{ChannelId, PAYLOAD_LEN_MAX, PageRun, PageRuns, RecordKind, Spec};
use std::error::Error;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const ROUND: Duration = Duration::from_millis(500);
const MEMORY_LEN: usize = 256 << 20;
type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let memory = vec![0x5a; MEMORY_LEN];
    for channels in [1, 2] {
        for cipher in [Cipher::Aes256Gcm, Cipher::None] {
            measure(&memory, channels, cipher)?;
        }
    }
    Ok(())
}

fn spec(cipher: Cipher) -> Outcome<Arc<Spec>> {
    let secret = MigrationSecret {
        key: vec![1; 32],
        nonce: vec![2; 8],
    };
    Ok(Arc::new(Spec::new(
        MigrationId::new("throughput")?,
        &secret,
        cipher,
    )?))
}

fn measure(memory: &[u8], channels: u16, cipher: Cipher) -> Outcome<()> {
    let gate = Gate::new(spec(cipher)?, Tuning::default(), Duration::from_secs(5));
    let mut listener = Listener::bind(gate, Ipv4Addr::LOCALHOST.into(), 0..=0)?;
    let (to, spec) = (listener.address(), spec(cipher)?);
    let deadline = Instant::now() + Duration::from_secs(5);
    let results = thread::scope(|scope| {
        let mut threads = Vec::new();
        for index in 0..channels {
            let (spec, part) = (&spec, memory.len() / usize::from(channels));
            let memory = memory.get(part * usize::from(index)..).unwrap_or_default();
            threads.push(scope.spawn(move || {
                let channel = ChannelId::data(0, index).ok_or("no such channel")?;
                let made = connect(to, &ConnectOptions::default(), spec, channel, deadline)?;
                send(made, memory.get(..part).unwrap_or_default())
            }));
            let accepted = listener.accept(deadline)?;
            threads.push(scope.spawn(move || receive(accepted)));
        }
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join();
        threads
            .into_iter()
            .map(join)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| "a panic")?
            .into_iter()
            .collect::<Outcome<Vec<_>>>()
    })?;
    let bytes: f64 = results.iter().map(|(sent, _)| *sent as f64).sum();
    let waits: Vec<_> = results
        .iter()
        .map(|(_, wait)| format!("{} ms", wait / 1000))
        .collect();
    println!(
        "{channels} channel(s), {cipher:?}: {:.2} GB/s; waited, sender and receiver in turn: {}",
        bytes / ROUND.as_secs_f64() / 1e9,
        waits.join(", ")
    );
    Ok(())
}

/// Sends whole records for one round and gives the page bytes and the time waited, in microseconds.
fn send(made: Connection, memory: &[u8]) -> Outcome<(u64, u64)> {
    let (_reader, mut writer) = made.split();
    let patience = Patience::idle(Duration::from_secs(5));
    let (end, mut sent, mut runs) = (Instant::now() + ROUND, 0, PageRuns::new());
    for (index, piece) in memory.chunks_exact(PAYLOAD_LEN_MAX).enumerate().cycle() {
        if Instant::now() >= end {
            break;
        }
        runs.clear();
        let first = index as u64 * 256;
        runs.push(PageRun { first, count: 256 })?;
        writer.send_pages(&runs, &[piece], &patience)?;
        sent += piece.len() as u64;
    }
    writer.finish(&patience)?;
    Ok((sent, writer.meter().read().blocked_us))
}

/// Opens every record into one place. Its bytes are the sender's, so it counts none.
fn receive(accepted: Connection) -> Outcome<(u64, u64)> {
    let (mut reader, _writer) = accepted.split();
    let patience = Patience::idle(Duration::from_secs(5));
    let mut memory = vec![0; PAYLOAD_LEN_MAX];
    while reader.next(&patience)?.kind != RecordKind::Final {
        reader.next_payload_into(&mut memory, &patience)?;
    }
    Ok((0, reader.meter().read().blocked_us))
}
