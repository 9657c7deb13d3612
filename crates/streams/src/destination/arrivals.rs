//! The channels that the source makes, from all of the destination's addresses, as they prove themselves.
//!
//! Owns a thread per listening address. Strangers are turned away by crate `transport` without anybody here noticing.

use godwit_migrate::protocol::{STREAMS_MAX, ToSource, encode};
use godwit_transport::{
    Connection, Gate, Incoming, Listener, ListenerCloser, TransportError, Tuning,
};
use godwit_wire::Spec;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// Rest after an error of the listening socket.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// What a connection gets to prove itself; a few round trips of 150 ms.
const HANDSHAKE_TIME: Duration = Duration::from_secs(3);
/// A listener waits for the whole migration, in turns of this length.
const TURN: Duration = Duration::from_secs(3600);

/// Most channels that wait for the driver: those of two sets. The others wait with the listener, and the source with them.
const WAITING_MAX: usize = 2 * STREAMS_MAX as usize;

/// Listens on the destination's addresses until it is dropped.
pub struct Arrivals {
    gate: Arc<Gate>,
    closers: Vec<ListenerCloser>,
    /// In the order of the addresses that were asked for, with the ports that were free.
    pub addresses: Vec<SocketAddr>,
    /// Channels that proved themselves.
    pub connections: Receiver<Connection>,
}

impl Arrivals {
    /// Listens on every address.
    pub fn listen(
        spec: &Arc<Spec>,
        addresses: &[IpAddr],
        ports: (u16, u16),
    ) -> Result<Self, TransportError> {
        let gate = Gate::new(Arc::clone(spec), Tuning::default(), HANDSHAKE_TIME);
        let (sender, connections) = sync_channel(WAITING_MAX);
        let mut arrivals = Self {
            gate: Arc::clone(&gate),
            closers: Vec::new(),
            addresses: Vec::new(),
            connections,
        };
        for address in addresses {
            let mut listener = Listener::bind(Arc::clone(&gate), *address, ports.0..=ports.1)?;
            arrivals.addresses.push(listener.address());
            arrivals.closers.push(listener.closer());
            let sender = sender.clone();
            let work = move || {
                loop {
                    match listener.accept(Instant::now() + TURN) {
                        Ok(connection) => {
                            if sender.send(connection).is_err() {
                                return;
                            }
                        }
                        Err(TransportError::AcceptDeadline { .. }) => {}
                        Err(TransportError::Cancelled) => return,
                        // Out of descriptors or memory for a moment: the source may try again.
                        Err(error) => {
                            tracing::warn!(%error, "a channel could not be accepted");
                            std::thread::sleep(ACCEPT_PAUSE);
                        }
                    }
                }
            };
            let spawned = std::thread::Builder::new()
                .name("accept".into())
                .spawn(work);
            spawned.map_err(|source| TransportError::System {
                doing: "start a listening thread",
                source,
            })?;
        }
        Ok(arrivals)
    }

    /// What to add to an error when nobody came: strangers that were turned away.
    pub fn strangers(&self) -> String {
        let strangers = self.gate.strangers();
        match strangers.last.as_ref().filter(|_| strangers.total() > 0) {
            Some(last) => format!(
                " ({} strangers were turned away, the last: {last})",
                strangers.total()
            ),
            None => String::new(),
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.closers.iter().for_each(ListenerCloser::close);
    }
}

/// Tells a source that it comes in vain and why, as far as it listens within this time.
pub fn turn_away(connection: Connection, reason: &str, wait: Duration) {
    let closer = connection.closer();
    if let Ok((mut sender, mut receiver)) = connection.into_control() {
        let deadline = Instant::now() + wait;
        let failed = ToSource::Failed {
            reason: reason.into(),
        };
        // What it says is read, since the kernel would throw the answer away with it.
        let _ = sender
            .send(&encode(&failed), deadline)
            .and_then(|()| sender.finish(deadline));
        while Instant::now() < deadline
            && !matches!(receiver.recv(deadline), Ok(Incoming::End) | Err(_))
        {}
    }
    closer.close();
}
