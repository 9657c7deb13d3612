//! The ways to another host: which of our migration addresses reaches which of its.
//!
//! Owns nothing. All ways are tried at once, as by a migration, so that a dead one costs nothing where another works. Refuses: hosts
//! without addresses of one family; and, with [`ErrorCode::Preflight`], a host that no way reaches: a migration would wait for it in vain.

use crate::link::{HANDSHAKE_TIME, STREAMS_MAX, failed, refuse};
use godwit_transport::{ConnectOptions, Connection, TransportError, connect};
use godwit_types::forecast::LinkProbeSend;
use godwit_types::{ApiError, ErrorCode};
use godwit_wire::{ChannelId, Spec};
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// An address of ours and one of the other host.
type Way = (IpAddr, SocketAddr);

/// A channel over each way that works, and as many more over these as make up so many streams.
pub(crate) fn channels(
    probe: &LinkProbeSend,
    streams: u32,
    spec: &Spec,
) -> Result<Vec<Connection>, ApiError> {
    let ways = ways(probe)?;
    let until = Instant::now() + HANDSHAKE_TIME;
    let tried: Vec<_> = std::thread::scope(|scope| {
        let numbered = (0..).zip(&ways);
        let threads: Vec<_> = numbered
            .map(|(index, way)| scope.spawn(move || channel(*way, index, spec, until)))
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended
            .map(|made| made.unwrap_or(Err(TransportError::Cancelled)))
            .collect()
    });
    let (mut open, mut works, mut dead) = (Vec::new(), Vec::new(), Vec::new());
    for (way, made) in ways.iter().zip(tried) {
        match made {
            Ok(connection) => {
                open.push(connection);
                works.push(*way);
            }
            Err(error) => dead.push((way.1, error)),
        }
    }
    if works.is_empty() {
        return Err(unreached(dead));
    }
    for (to, error) in dead {
        tracing::warn!(%to, %error, "a migration address of the other host is not reached");
    }
    let until = Instant::now() + HANDSHAKE_TIME;
    let missing = (streams as usize).saturating_sub(open.len());
    let next = (0..).skip(ways.len());
    for (index, way) in next.zip(works.iter().cycle()).take(missing) {
        open.push(channel(*way, index, spec, until).map_err(failed)?);
    }
    Ok(open)
}

fn channel(
    (from, to): Way,
    index: u16,
    spec: &Spec,
    until: Instant,
) -> Result<Connection, TransportError> {
    let options = ConnectOptions {
        bind: Some(from),
        ..ConnectOptions::default()
    };
    // There are fewer of them than a set has.
    let id = ChannelId::data(0, index).ok_or(TransportError::Cancelled)?;
    connect(to, &options, spec, id, until)
}

/// Each address of the other host, with one of ours of its family.
fn ways(probe: &LinkProbeSend) -> Result<Vec<Way>, ApiError> {
    let pair = |(index, to): (usize, &SocketAddr)| {
        let same: Vec<&IpAddr> = probe
            .source_addresses
            .iter()
            .filter(|from| from.is_ipv4() == to.is_ipv4())
            .collect();
        let from = same.get(index.checked_rem(same.len())?)?;
        Some((**from, *to))
    };
    let theirs = probe.destination_addresses.iter().enumerate();
    let ways = theirs.filter_map(pair).take(STREAMS_MAX as usize);
    let ways: Vec<Way> = ways.collect();
    match ways.is_empty() {
        true => Err(refuse(
            "the two hosts have no migration addresses of the same family (IPv4 or IPv6)",
        )),
        false => Ok(ways),
    }
}

/// No way works: the first one's reason, and the other addresses.
fn unreached(dead: Vec<(SocketAddr, TransportError)>) -> ApiError {
    let mut dead = dead.into_iter();
    let Some((_, error)) = dead.next() else {
        return refuse("no address of the other host was named");
    };
    if !error.class().is_lost() {
        return failed(error);
    }
    let others: Vec<String> = dead.map(|(to, _)| to.to_string()).collect();
    let message = match others.is_empty() {
        true => error.to_string(),
        false => format!("{error}; {} cannot be reached either", others.join(", ")),
    };
    ApiError::new(ErrorCode::Preflight, message)
}
