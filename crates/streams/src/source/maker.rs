//! Makes the channels of a connection set, each in a thread of its own, over whichever route works.
//!
//! Owns nothing: what is made belongs to the set. All ways together have the time of one. Refuses: an index that no
//! channel can have.

use super::ending::Ending;
use super::routes::{DIAL_WAIT, Route};
use godwit_migrate::protocol::STREAMS_MAX;
use godwit_transport::{Connection, Dialed, TransportError};
use godwit_wire::{ChannelId, Spec};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest time for one handshake.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(3);
/// What a thread gets beyond its deadline to say how it ended.
const GRACE: Duration = Duration::from_millis(200);

/// A channel that is being made, and its route.
pub(super) struct Joining {
    pub(super) route: usize,
    pub(super) made: Receiver<Result<Connection, TransportError>>,
}

/// What makes channels, from any thread.
#[derive(Clone)]
pub(super) struct Maker {
    pub(super) spec: Arc<Spec>,
    /// Of the set that the channels belong to.
    pub(super) number: u16,
    pub(super) routes: Arc<Vec<Route>>,
}

impl Joining {
    /// Waits for it, no longer than its maker may take.
    pub(super) fn wait(
        &self,
        until: Instant,
        ending: &Ending,
    ) -> Result<Connection, TransportError> {
        let made = ending.wait(&self.made, until + GRACE)?;
        made.unwrap_or(Err(gone()))
    }
}

impl Maker {
    /// Begins to make the control channel and, beside it, the first data channels. The connections that are there serve
    /// the control channel and the other routes' first data channels.
    pub(super) fn make_first(
        &self,
        streams: u32,
        mut dialed: Vec<Option<Dialed>>,
        until: Instant,
    ) -> Result<(Joining, Vec<Joining>), TransportError> {
        let for_control = dialed.first_mut().and_then(Option::take);
        let mut joining = Vec::new();
        for index in 0..streams as usize {
            let route = index % self.routes.len().max(1);
            let dialed = dialed.get_mut(route).and_then(Option::take);
            joining.push(self.begin_data(index, route, dialed, until)?);
        }
        let control = self.begin(ChannelId::control(self.number), 0, for_control, until)?;
        Ok((control, joining))
    }

    pub(super) fn begin_data(
        &self,
        index: usize,
        route: usize,
        dialed: Option<Dialed>,
        until: Instant,
    ) -> Result<Joining, TransportError> {
        // The destination takes one that is above that for an attack, and ends the migration.
        let channel_id = u16::try_from(index)
            .ok()
            .filter(|index| u32::from(*index) < STREAMS_MAX)
            .and_then(|index| ChannelId::data(self.number, index))
            .ok_or(too_many(self.number))?;
        self.begin(channel_id, route, dialed, until)
    }

    /// A channel for changes of disks; they are spread over all routes.
    pub(super) fn begin_changes(
        &self,
        index: usize,
        until: Instant,
    ) -> Result<Joining, TransportError> {
        let channel_id = u16::try_from(index)
            .ok()
            .and_then(|index| ChannelId::changes(self.number, index))
            .ok_or(too_many(self.number))?;
        self.begin(channel_id, index % self.routes.len().max(1), None, until)
    }

    /// Makes a channel in a thread of its own, over `route` or, where that does not work any more, over another.
    fn begin(
        &self,
        channel_id: ChannelId,
        route: usize,
        dialed: Option<Dialed>,
        until: Instant,
    ) -> Result<Joining, TransportError> {
        let (maker, (result, made)) = (self.clone(), channel());
        let work = move || {
            let _ = result.send(maker.make(channel_id, route, dialed, until));
        };
        start_thread("join", "start a thread to connect with", work)?;
        Ok(Joining { route, made })
    }

    /// All ways together have until `until`: each that is dead would else add its own time.
    fn make(
        &self,
        channel: ChannelId,
        route: usize,
        dialed: Option<Dialed>,
        until: Instant,
    ) -> Result<Connection, TransportError> {
        let mut failure = gone();
        let mut dialed = dialed.map(Ok);
        for route in self
            .routes
            .iter()
            .cycle()
            .skip(route)
            .take(self.routes.len())
        {
            let now = Instant::now();
            if now >= until {
                break;
            }
            let dialed = dialed
                .take()
                .unwrap_or_else(|| route.dial(until.min(now + DIAL_WAIT)));
            // An id that was not proved is still unused.
            let made = dialed.and_then(|dialed| {
                let deadline = until.min(Instant::now() + HANDSHAKE_WAIT);
                dialed.introduce(&self.spec, channel, deadline)
            });
            match made {
                Ok(connection) => return Ok(connection),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }
}

/// Starts a thread that nobody waits for; a host that has none to spare is a link that can be made again.
pub(super) fn start_thread(
    name: &str,
    doing: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> Result<(), TransportError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned
        .map(drop)
        .map_err(|source| TransportError::System { doing, source })
}

pub(super) fn gone() -> TransportError {
    TransportError::System {
        doing: "make a channel",
        source: std::io::Error::other("no route to the destination works"),
    }
}

pub(super) fn too_many(number: u16) -> TransportError {
    TransportError::Misuse {
        channel: ChannelId::control(number),
        what: "too many channels",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::routes;
    use crate::testing::spec;
    use std::net::{SocketAddr, TcpListener};

    /// Destinations that take connections and say nothing.
    fn silent(count: usize) -> (Vec<TcpListener>, Maker) {
        let listen = |_| TcpListener::bind("127.0.0.1:0").unwrap();
        let listeners: Vec<TcpListener> = (0..count).map(listen).collect();
        let addresses: Vec<SocketAddr> = listeners
            .iter()
            .map(|listener| listener.local_addr().unwrap())
            .collect();
        let maker = Maker {
            spec: spec(),
            number: 0,
            routes: Arc::new(routes(&[], &addresses)),
        };
        (listeners, maker)
    }

    #[test]
    fn many_dead_ways_together_take_no_longer_than_one() {
        let (_listeners, maker) = silent(32);
        let began = Instant::now();
        let until = began + Duration::from_secs(3);
        let made = maker.make(ChannelId::control(0), 0, None, until);
        assert!(matches!(made, Err(TransportError::HandshakeSilent { .. })));
        let one = HANDSHAKE_WAIT + DIAL_WAIT;
        assert!(began.elapsed() < 10 * one, "{:?}", began.elapsed());
    }

    #[test]
    fn a_channel_beyond_what_a_set_may_have_never_reaches_the_destination() {
        let (listeners, maker) = silent(1);
        listeners[0].set_nonblocking(true).unwrap();
        let until = Instant::now() + Duration::from_secs(600);
        for index in [STREAMS_MAX as usize, 65_534, 65_535, usize::MAX] {
            let refused = maker.begin_data(index, 0, None, until);
            assert!(
                matches!(refused, Err(TransportError::Misuse { .. })),
                "{index}"
            );
        }
        let came = listeners[0].accept();
        assert!(came.is_err(), "{came:?}");
        assert!(
            maker
                .begin_data(STREAMS_MAX as usize - 1, 0, None, until)
                .is_ok()
        );
    }

    #[test]
    fn an_end_is_heard_while_channels_are_made() {
        let (_listeners, maker) = silent(1);
        let ending = Ending::default();
        // Nobody waits for so long.
        let until = Instant::now() + Duration::from_secs(600);
        let (control, _) = maker.make_first(1, Vec::new(), until).unwrap();
        ending.raise(None);
        let waited = control.wait(until, &ending);
        assert!(matches!(waited, Err(TransportError::Cancelled)));
    }
}
