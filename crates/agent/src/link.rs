//! Measures the link to another host: a short burst of the same records that a migration sends.
//!
//! The listening side puts what arrives into fresh memory of the RAM file system, as a migration would, and says when
//! the last of it is there. Owns its sockets, threads and that memory for at most [`LIFE`]. Refuses: a second burst at
//! the same time, more than [`STREAMS_MAX`] channels, more than [`BYTES_MAX`] in all, and who does not hold the
//! burst's key.

use crate::link_ways;
use godwit_transport::{
    Connection, Gate, Listener, ListenerCloser, Patience, Probe, RecordReader, RecordWriter,
    TransportError, Tuning,
};
use godwit_types::forecast::{LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend};
use godwit_types::{ApiError, ErrorCode};
use godwit_wire::{PAYLOAD_LEN_MAX, PageRun, PageRuns, RecordKind, Spec};
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most channels of a burst.
pub(crate) const STREAMS_MAX: u32 = 16;
/// Most bytes of a burst.
const BYTES_MAX: u64 = 256 << 20;
/// Longest life of a burst, from listening to the end.
const LIFE: Duration = Duration::from_secs(10);
/// Longest burst, and what a far link gets: so many round trips, since TCP begins slowly.
const MILLIS_MAX: u64 = 4_000;
const ROUND_TRIPS: u32 = 20;
/// Longest wait for the handshake.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(3);
/// Pages in a record of a burst.
const PAGES_PER_RECORD: u32 = (PAYLOAD_LEN_MAX / 4096) as u32;
/// Memory that must stay free on the listening host.
const SPARE_MIB: u64 = 1024;

/// Keeps to one burst at a time.
#[derive(Debug, Default)]
pub struct Bursts {
    busy: Arc<AtomicBool>,
}

/// Marks a burst as over when dropped.
struct Turn(Arc<AtomicBool>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Bursts {
    fn turn(&self) -> Result<Turn, ApiError> {
        if self.busy.swap(true, Ordering::AcqRel) {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                "a link of this host is being measured already: try again in a few seconds",
            ));
        }
        Ok(Turn(Arc::clone(&self.busy)))
    }

    /// Listens on every migration address, for one burst, in threads of its own.
    pub fn listen(
        &self,
        probe: &LinkProbeListen,
        here: &Here<'_>,
    ) -> Result<LinkProbeReady, ApiError> {
        let turn = self.turn()?;
        let gate = Gate::new(Arc::new(spec(probe)?), Tuning::default(), HANDSHAKE_TIME);
        let ports = here.ports.0..=here.ports.1;
        let listeners: Vec<Listener> = here
            .addresses
            .iter()
            .map(|address| Listener::bind(Arc::clone(&gate), *address, ports.clone()))
            .collect::<Result<_, _>>()
            .map_err(failed)?;
        let addresses = listeners.iter().map(Listener::address).collect();
        let sink = Arc::new(Sink {
            file: (here.free_mib > SPARE_MIB)
                .then(|| fresh_memory(here.ram_dir))
                .flatten(),
            at: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            closers: Mutex::new(listeners.iter().map(Listener::closer).collect()),
            _turn: turn,
        });
        for listener in listeners {
            let sink = Arc::clone(&sink);
            spawn("link-accept", move || accept(listener, &sink))?;
        }
        Ok(LinkProbeReady { addresses })
    }

    /// Sends a burst and waits until all of it has arrived.
    pub fn send(&self, probe: &LinkProbeSend) -> Result<LinkMeasured, ApiError> {
        let _turn = self.turn()?;
        let spec = spec(&probe.listen)?;
        let streams = probe.streams.clamp(1, STREAMS_MAX);
        let connections = link_ways::channels(probe, streams, &spec)?;
        burst(connections, probe.millis)
    }
}

/// What the listening side has.
pub struct Here<'a> {
    pub addresses: &'a [IpAddr],
    /// First and last port.
    pub ports: (u16, u16),
    /// The RAM file system.
    pub ram_dir: &'a Path,
    /// Memory that a guest could have, MiB.
    pub free_mib: u64,
}

pub(crate) fn refuse(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}

pub(crate) fn failed(error: TransportError) -> ApiError {
    ApiError::new(
        ErrorCode::HostUnreachable,
        format!("the link cannot be measured: {error}"),
    )
}

fn spec(probe: &LinkProbeListen) -> Result<Spec, ApiError> {
    Spec::new(probe.id.clone(), &probe.secret, probe.cipher)
        .map_err(|error| refuse(error.to_string()))
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), ApiError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(drop).map_err(|error| {
        ApiError::new(
            ErrorCode::Internal,
            format!("cannot start a thread: {error}"),
        )
    })
}

/// An unnamed file on the RAM file system; none where that does not work.
fn fresh_memory(dir: &Path) -> Option<File> {
    std::fs::OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o600)
        .open(dir)
        .ok()
}

/// Where a burst arrives.
struct Sink {
    file: Option<File>,
    at: AtomicU64,
    open: AtomicUsize,
    closers: Mutex<Vec<ListenerCloser>>,
    _turn: Turn,
}

impl Sink {
    fn put(&self, bytes: &[u8]) {
        let at = self.at.fetch_add(bytes.len() as u64, Ordering::Relaxed) % BYTES_MAX;
        if let Some(file) = &self.file {
            // A full file system makes the burst a measure of the network alone.
            let _ = file.write_all_at(bytes, at);
        }
    }

    fn close(&self) {
        let closers = self.closers.lock().unwrap_or_else(PoisonError::into_inner);
        closers.iter().for_each(ListenerCloser::close);
    }
}

fn accept(mut listener: Listener, sink: &Arc<Sink>) {
    let deadline = Instant::now() + LIFE;
    let mut accepted = 0;
    while accepted < STREAMS_MAX {
        let Ok(connection) = listener.accept(deadline) else {
            return;
        };
        accepted += 1;
        sink.open.fetch_add(1, Ordering::AcqRel);
        let sink = Arc::clone(sink);
        let work = move || {
            // A burst that breaks off is told by its sender.
            let _ = receive(connection, &sink, deadline);
            // Its sender leaves no channel before all have ended, so that none is left to be accepted.
            if sink.open.fetch_sub(1, Ordering::AcqRel) == 1 {
                sink.close();
            }
        };
        if spawn("link-receive", work).is_err() {
            return;
        }
    }
}

fn receive(connection: Connection, sink: &Sink, deadline: Instant) -> Result<(), TransportError> {
    let (mut reader, mut writer) = connection.split();
    let patience = Patience::until(deadline);
    let mut page_bytes = vec![0; PAYLOAD_LEN_MAX];
    while reader.next(&patience)?.kind != RecordKind::Final {
        reader.next_payload_into(&mut page_bytes, &patience)?;
        sink.put(&page_bytes);
    }
    writer.finish(&patience)?;
    // Nothing can come but the end of the connection.
    let _ = reader.next(&patience);
    Ok(())
}

/// One channel's part of a burst, half way and at its end.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    bytes: u64,
    bytes_half_way: u64,
}

fn burst(connections: Vec<Connection>, millis: u64) -> Result<LinkMeasured, ApiError> {
    let streams = u32::try_from(connections.len()).unwrap_or(STREAMS_MAX);
    let rtt = connections
        .iter()
        .map(Connection::rtt)
        .min()
        .unwrap_or_default();
    let asked = Duration::from_millis(millis.clamp(1, MILLIS_MAX));
    let time = asked
        .max(rtt * ROUND_TRIPS)
        .min(Duration::from_millis(MILLIS_MAX));
    let limit = BYTES_MAX / u64::from(streams.max(1));
    let bytes = noise()?;
    let began = Instant::now();
    let (half_way, end) = (began + time / 2, began + time);
    // Held until all have ended: the peer stops accepting when it has no channel left.
    let mut channels: Vec<_> = connections
        .into_iter()
        .map(|connection| (connection.probe(), connection.split()))
        .collect();
    let parts = std::thread::scope(|scope| {
        let threads: Vec<_> = channels
            .iter_mut()
            .map(|(probe, (reader, writer))| {
                let bytes = &bytes;
                scope.spawn(move || stream(reader, writer, probe, bytes, limit, (half_way, end)))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(Err(TransportError::Cancelled)))
            .collect::<Result<Vec<_>, _>>()
    })
    .map_err(failed)?;
    Ok(figures(&parts, began, half_way, rtt, streams))
}

fn figures(
    parts: &[Part],
    began: Instant,
    half_way: Instant,
    rtt: Duration,
    streams: u32,
) -> LinkMeasured {
    let now = Instant::now();
    let all: u64 = parts.iter().map(|part| part.bytes).sum();
    let early: u64 = parts.iter().map(|part| part.bytes_half_way).sum();
    let whole_s = (now - began).saturating_sub(rtt).as_secs_f64();
    let late_s = now
        .saturating_duration_since(half_way)
        .saturating_sub(rtt)
        .as_secs_f64();
    let whole = all as f64 / whole_s.max(1e-6);
    // TCP begins slowly and buffers fill, which the second half does not see; a host that is busy for a moment may
    // stall in either. Both only ever make the link look slower than it is.
    let bytes_per_s = if early > 0 && late_s > 0.3 * whole_s {
        whole.max(all.saturating_sub(early) as f64 / late_s)
    } else {
        whole
    };
    LinkMeasured {
        bytes_per_s,
        rtt_ms: rtt.as_secs_f64() * 1000.0,
        streams,
        seconds: (now - began).as_secs_f64(),
    }
}

fn stream(
    reader: &mut RecordReader,
    writer: &mut RecordWriter,
    probe: &Probe,
    bytes: &[u8],
    limit: u64,
    (half_way, end): (Instant, Instant),
) -> Result<Part, TransportError> {
    let patience = Patience::until(end + LIFE);
    let mut part = Part::default();
    let mut runs = PageRuns::new();
    while Instant::now() < end && part.bytes < limit {
        runs.clear();
        runs.push(PageRun {
            first: part.bytes / 4096,
            count: PAGES_PER_RECORD,
        })?;
        writer.send_pages(&runs, &[bytes], &patience)?;
        part.bytes += bytes.len() as u64;
        if part.bytes_half_way == 0 && Instant::now() >= half_way {
            // What left this host by now; what waits in its buffer counts for the second half.
            let sent = probe
                .read()
                .map(|link| link.sent_bytes.saturating_sub(link.repeated_bytes));
            part.bytes_half_way = sent.unwrap_or(part.bytes).min(part.bytes);
        }
    }
    // The connection stays whole: its end is what the peer waits for.
    writer.send(RecordKind::Final, &[], &patience)?;
    // The peer's final record: everything has arrived.
    while reader.next(&patience)?.kind != RecordKind::Final {}
    Ok(part)
}

/// Bytes that nothing on the way can make smaller.
fn noise() -> Result<Vec<u8>, ApiError> {
    let mut bytes = vec![0; PAYLOAD_LEN_MAX];
    getrandom::fill(&mut bytes).map_err(|error| {
        ApiError::new(
            ErrorCode::Internal,
            format!("cannot get random bytes: {error}"),
        )
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_transport::{ConnectOptions, connect};
    use godwit_types::MigrationId;
    use godwit_types::migration::{Cipher, MigrationSecret};
    use godwit_wire::ChannelId;
    use std::net::SocketAddr;

    fn listen() -> LinkProbeListen {
        LinkProbeListen {
            id: MigrationId::new("probe").unwrap(),
            secret: MigrationSecret {
                key: vec![1; 32],
                nonce: vec![2; 8],
            },
            cipher: Cipher::Aes256Gcm,
        }
    }

    fn here(dir: &Path) -> Here<'_> {
        const LOCAL: &[IpAddr] = &[IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)];
        Here {
            addresses: LOCAL,
            ports: (0, 0),
            ram_dir: dir,
            free_mib: 4096,
        }
    }

    fn send(listen: LinkProbeListen, ready: &LinkProbeReady, streams: u32) -> LinkProbeSend {
        LinkProbeSend {
            listen,
            destination_addresses: ready.addresses.clone(),
            source_addresses: vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()],
            streams,
            millis: 100,
        }
    }

    #[test]
    fn a_burst_measures_the_link_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (there, source) = (Bursts::default(), Bursts::default());
        for streams in [1, 2] {
            let ready = there.listen(&listen(), &here(dir.path())).unwrap();
            let measured = source.send(&send(listen(), &ready, streams)).unwrap();
            assert!(measured.bytes_per_s > 1e6, "{measured:?}");
            assert_eq!(measured.streams, streams);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            // The listening side ends once the burst is over: the next one may come.
            while there.busy.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_channel_that_has_ended_early_closes_the_door_to_no_other() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let there = Bursts::default();
        let ready = there.listen(&listen(), &here(dir.path())).unwrap();
        let spec = spec(&listen()).unwrap();
        let connect = |index| {
            let channel_id = ChannelId::data(0, index).unwrap();
            let options = ConnectOptions::default();
            let deadline = Instant::now() + LIFE;
            connect(ready.addresses[0], &options, &spec, channel_id, deadline)
        };
        let patience = Patience::until(Instant::now() + LIFE);
        let mut first = connect(0).unwrap().split();
        first.1.send(RecordKind::Final, &[], &patience).unwrap();
        assert_eq!(first.0.next(&patience).unwrap().kind, RecordKind::Final);
        let mut second = connect(1).unwrap().split();
        second.1.send(RecordKind::Final, &[], &patience).unwrap();
        assert_eq!(second.0.next(&patience).unwrap().kind, RecordKind::Final);
    }

    #[test]
    fn a_second_burst_at_the_same_time_is_refused() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let there = Bursts::default();
        let _ready = there.listen(&listen(), &here(dir.path())).unwrap();
        let error = there.listen(&listen(), &here(dir.path())).unwrap_err();
        assert_eq!(error.code, ErrorCode::WrongState);
    }

    #[test]
    fn a_sender_with_another_key_measures_nothing() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (there, source) = (Bursts::default(), Bursts::default());
        let ready = there.listen(&listen(), &here(dir.path())).unwrap();
        let mut other = listen();
        other.secret.key = vec![9; 32];
        let error = source.send(&send(other, &ready, 1)).unwrap_err();
        assert_eq!(error.code, ErrorCode::HostUnreachable);
    }

    /// An address that refuses as long as its socket lives: it is bound and does not listen.
    fn nobody_listens() -> (rustix::fd::OwnedFd, SocketAddr) {
        use rustix::net;
        let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None).unwrap();
        net::bind(&socket, &SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        let address = net::getsockname(&socket).unwrap();
        (socket, SocketAddr::try_from(address).unwrap())
    }

    #[test]
    fn a_host_that_is_not_reached_is_told_by_its_address_and_one_way_that_works_is_enough() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (there, source) = (Bursts::default(), Bursts::default());
        let ready = there.listen(&listen(), &here(dir.path())).unwrap();
        let (_closed, dead) = nobody_listens();
        let mut probe = send(listen(), &ready, 1);
        probe.destination_addresses = vec![dead];
        let error = source.send(&probe).unwrap_err();
        assert_eq!(error.code, ErrorCode::Preflight);
        let told = [
            &format!("cannot connect to {dead} ("),
            "firewall",
            &format!("(tried from 127.0.0.1 to {dead})"),
        ];
        assert!(
            told.iter().all(|told| error.message.contains(*told)),
            "{error}"
        );
        probe.destination_addresses.extend(&ready.addresses);
        let measured = source.send(&probe).unwrap();
        assert_eq!(measured.streams, 1, "{measured:?}");
    }

    #[test]
    fn a_link_that_takes_a_connection_and_carries_nothing_is_told_as_none() {
        let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ready = LinkProbeReady {
            addresses: vec![mute.local_addr().unwrap()],
        };
        let error = Bursts::default().send(&send(listen(), &ready, 1));
        let error = error.unwrap_err();
        assert_eq!(error.code, ErrorCode::Preflight);
        let told = ["takes the connection", "holds packets back", "tried from"];
        assert!(
            told.iter().all(|told| error.message.contains(*told)),
            "{error}"
        );
    }

    #[test]
    fn hosts_of_different_families_are_told_so() {
        let ready = LinkProbeReady {
            addresses: vec!["127.0.0.1:1".parse().unwrap()],
        };
        let mut probe = send(listen(), &ready, 1);
        probe.source_addresses = vec!["::1".parse().unwrap()];
        let error = Bursts::default().send(&probe).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest);
    }
}
