//! The ways to another host: which of our migration addresses reaches which of its.
//!
//! Owns nothing. They are those of a migration, tried as by one. Refuses: hosts without addresses of one family; and, with
//! [`ErrorCode::Preflight`], a host that no way reaches: a migration would wait for it in vain.

use crate::link::{HANDSHAKE_TIME, STREAMS_MAX, failed, refuse};
use godwit_streams::source::{Ending, Route, reach, routes};
use godwit_transport::{Connection, TransportError};
use godwit_types::forecast::LinkProbeSend;
use godwit_types::migration::with_ways;
use godwit_types::{ApiError, ErrorCode};
use godwit_wire::{ChannelId, Spec};
use std::time::Instant;

/// A channel over each way that works, and as many more over these as make up so many streams.
pub(crate) fn channels(
    probe: &LinkProbeSend,
    streams: u32,
    spec: &Spec,
) -> Result<Vec<Connection>, ApiError> {
    let routes = routes(&probe.source_addresses, &probe.destination_addresses);
    if routes.is_empty() {
        return Err(refuse(
            "the two hosts have no migration addresses of the same family (IPv4 or IPv6)",
        ));
    }
    let unreached = |error| unreached(error, &routes);
    let reached = reach(&routes, &Ending::default()).map_err(unreached)?;
    let unproved = |error| match error {
        // The connection is made, and nothing comes over it.
        TransportError::HandshakeSilent { .. } => unreached(error),
        error => failed(error),
    };
    let until = Instant::now() + HANDSHAKE_TIME;
    let id = |index| {
        let id = ChannelId::data(0, index);
        id.ok_or_else(|| refuse("the burst has too many channels"))
    };
    let (mut open, mut works) = (Vec::new(), Vec::new());
    for (index, way) in (0..).zip(reached).take(STREAMS_MAX as usize) {
        let made = way.dialed.introduce(spec, id(index)?, until);
        open.push(made.map_err(unproved)?);
        works.push(way.route);
    }
    let missing = (streams as usize).saturating_sub(open.len());
    let next = (0..).skip(open.len());
    for (index, way) in next.zip(works.iter().cycle()).take(missing) {
        let dialed = way.dial(until).map_err(failed)?;
        let made = dialed.introduce(spec, id(index)?, until);
        open.push(made.map_err(failed)?);
    }
    Ok(open)
}

/// Only silence and refusals say that the host is not reached: they are what a migration would wait for.
fn unreached(error: TransportError, routes: &[Route]) -> ApiError {
    if !error.class().is_lost() {
        return failed(error);
    }
    let ways = routes.iter().map(|route| (route.from, route.to));
    ApiError::new(ErrorCode::Preflight, with_ways(error, ways))
}
