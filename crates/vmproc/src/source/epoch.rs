//! One set of channels at the source: made together, lost together.
//!
//! Owned by the driver. Losing any channel ends the epoch: the rest is closed, everything that was not acknowledged as
//! applied is dirty again, and a new epoch with new channel ids and keys may be made.

use super::driver::{DriverInput, FromPeer};
use super::pass::Pass;
use super::sender::{PassEnd, SenderHandle};
use crate::control::SharedControl;
use godwit_guestmem::{PageSet, RamFile};
use godwit_migrate::protocol::{
    EXTENTS_PER_MESSAGE, Extent, PROTOCOL_VERSION, ToDestination, ToSource, decode_to_source,
};
use godwit_transport::{
    Closer, ConnectOptions, ControlReceiver, Incoming, TransportError, Tuning, connect,
};
use godwit_wire::{ChannelId, Spec};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Longest time for one connection and its handshake.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// A control channel from which nothing comes for this long is lost; the destination answers a ping a second.
const CONTROL_SILENCE: Duration = Duration::from_secs(8);

/// How often applied records are passed on as a sign of life.
const LIFE_EVERY: Duration = Duration::from_millis(50);

/// How the destination is reached.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub from: Option<IpAddr>,
    pub to: SocketAddr,
}

/// Pairs each of the destination's addresses with one of ours of the same family.
pub(crate) fn routes(ours: &[IpAddr], theirs: &[SocketAddr]) -> Vec<Route> {
    let mut routes = Vec::new();
    for (index, to) in theirs.iter().enumerate() {
        let same: Vec<&IpAddr> = ours
            .iter()
            .filter(|from| from.is_ipv4() == to.is_ipv4())
            .collect();
        match same.get(index % same.len().max(1)) {
            Some(from) => routes.push(Route {
                from: Some(**from),
                to: *to,
            }),
            None if ours.is_empty() => routes.push(Route {
                from: None,
                to: *to,
            }),
            None => {}
        }
    }
    routes
}

/// A set of channels.
#[derive(Debug)]
pub(crate) struct Epoch {
    pub number: u16,
    pub control: Arc<SharedControl>,
    senders: Vec<SenderHandle>,
    records: Vec<u64>,
    closers: Vec<Closer>,
}

/// What an epoch is made of.
pub(crate) struct EpochPlan<'a> {
    pub number: u16,
    pub spec: &'a Spec,
    pub routes: &'a [Route],
    pub streams: u32,
    pub ram: &'a Arc<RamFile>,
    pub inputs: &'a Sender<DriverInput>,
}

impl Epoch {
    /// Connects the control channel over the first route that works, and says what will come.
    pub(crate) fn open(plan: &EpochPlan<'_>, extents: &[Extent]) -> Result<Self, TransportError> {
        let channel = ChannelId::control(plan.number);
        let connection = first_route(plan, channel)?;
        let (sender, receiver) = connection.into_control()?;
        let control = Arc::new(SharedControl::new(sender));
        let applied: Vec<Arc<AtomicU64>> = (0..plan.streams).map(|_| Arc::default()).collect();
        let epoch = Self {
            number: plan.number,
            control: Arc::clone(&control),
            senders: Vec::new(),
            records: vec![0; plan.streams as usize],
            closers: Vec::new(),
        };
        listen(receiver, plan, applied.clone(), Arc::clone(&control));
        epoch.announce(plan, extents)?;
        epoch.connect_data(plan, applied)
    }

    fn announce(&self, plan: &EpochPlan<'_>, extents: &[Extent]) -> Result<(), TransportError> {
        let pages = plan.ram.page_count();
        let begin = ToDestination::Begin {
            version: PROTOCOL_VERSION,
            epoch: plan.number,
            streams: plan.streams,
            pages,
        };
        self.control.send(&begin)?;
        for part in extents.chunks(EXTENTS_PER_MESSAGE) {
            self.control.send(&ToDestination::Extents {
                extents: part.to_vec(),
            })?;
        }
        self.control.send(&ToDestination::ExtentsEnd)
    }

    fn connect_data(
        mut self,
        plan: &EpochPlan<'_>,
        applied: Vec<Arc<AtomicU64>>,
    ) -> Result<Self, TransportError> {
        for (index, applied) in applied.into_iter().enumerate() {
            let writer = open_data(plan, index)?;
            self.closers.push(writer.closer());
            let (inputs, number) = (plan.inputs.clone(), plan.number);
            let ends = move |end: PassEnd| {
                // The driver is gone only when nobody waits for this any more.
                let _ = inputs.send(DriverInput::PassEnd {
                    epoch: number,
                    end: Box::new(end),
                });
            };
            let sender = SenderHandle::start(index, writer, Arc::clone(plan.ram), applied, ends)
                .map_err(|source| TransportError::System {
                    doing: "start a sender thread",
                    source,
                })?;
            self.senders.push(sender);
        }
        Ok(self)
    }

    /// Starts a pass on all channels; returns how many will report its end.
    pub(crate) fn begin(&self, pass: &Arc<Pass>) -> usize {
        self.senders
            .iter()
            .filter(|sender| sender.begin(pass))
            .count()
    }

    /// Data channels.
    pub(crate) fn streams(&self) -> usize {
        self.records.len()
    }

    /// Books how far a channel is.
    pub(crate) fn sent(&mut self, index: usize, records: u64) {
        if let Some(slot) = self.records.get_mut(index) {
            *slot = records;
        }
    }

    /// Tells the destination that an iteration is complete.
    pub(crate) fn barrier(&self, iteration: u32) -> Result<(), TransportError> {
        self.control.send(&ToDestination::Barrier {
            iteration,
            sent: self.records.clone(),
        })
    }

    /// Closes all channels at once and adds to `dirty` what was not acknowledged as applied.
    pub(crate) fn abandon(&mut self, dirty: &mut PageSet) {
        self.control.close();
        self.closers.iter().for_each(Closer::close);
        for sender in self.senders.drain(..) {
            match sender.end() {
                Some(pages) => dirty.merge(&pages),
                None => dirty.insert_range(0..dirty.page_count()),
            }
        }
    }

    /// Ends all channels in good order: final records, then the control channel.
    pub(crate) fn finish(&mut self) {
        for sender in self.senders.drain(..) {
            let _ = sender.end();
        }
        self.control.finish();
    }
}

fn first_route(
    plan: &EpochPlan<'_>,
    channel: ChannelId,
) -> Result<godwit_transport::Connection, TransportError> {
    let mut failure = TransportError::System {
        doing: "reach the destination",
        source: std::io::Error::other(
            "the two hosts have no migration addresses of the same family",
        ),
    };
    for route in plan.routes {
        match connect_route(plan, route, channel) {
            Ok(connection) => return Ok(connection),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn connect_route(
    plan: &EpochPlan<'_>,
    route: &Route,
    channel: ChannelId,
) -> Result<godwit_transport::Connection, TransportError> {
    let options = ConnectOptions {
        bind: route.from,
        tuning: Tuning::default(),
    };
    connect(
        route.to,
        &options,
        plan.spec,
        channel,
        Instant::now() + CONNECT_WAIT,
    )
}

fn open_data(
    plan: &EpochPlan<'_>,
    index: usize,
) -> Result<godwit_transport::RecordWriter, TransportError> {
    let number = u16::try_from(index).ok();
    let channel = number
        .and_then(|index| ChannelId::data(plan.number, index))
        .ok_or(TransportError::Misuse {
            channel: ChannelId::control(plan.number),
            what: "too many channels",
        })?;
    let route = plan.routes.get(index % plan.routes.len().max(1));
    let connection = match route.map(|route| connect_route(plan, route, channel)) {
        Some(Ok(connection)) => connection,
        // A route that does not work is left to the others; its id was never proved, so it is still unused.
        _ => first_route(plan, channel)?,
    };
    Ok(connection.split().1)
}

/// Reads the control channel until it ends and passes everything on.
fn listen(
    mut receiver: ControlReceiver,
    plan: &EpochPlan<'_>,
    applied: Vec<Arc<AtomicU64>>,
    control: Arc<SharedControl>,
) {
    let (inputs, epoch, streams) = (plan.inputs.clone(), plan.number, plan.streams);
    std::thread::spawn(move || {
        let mut passed_on = Instant::now();
        let why = loop {
            let message = match receiver.recv(Instant::now() + CONTROL_SILENCE) {
                Ok(Incoming::Message(bytes)) => decode_to_source(&bytes, streams),
                Ok(Incoming::DeviceState(_)) => {
                    break FromPeer::Broken("the destination sent device state".into());
                }
                Ok(Incoming::End) => {
                    break FromPeer::Lost("the destination ended the migration".into());
                }
                Err(error) => break FromPeer::of(&error),
            };
            match message {
                Ok(ToSource::Applied { channel, records }) => {
                    if let Some(slot) = applied.get(channel as usize) {
                        slot.fetch_max(records, Ordering::AcqRel);
                    }
                    // A sign of life, passed on now and then.
                    if passed_on.elapsed() > LIFE_EVERY {
                        passed_on = Instant::now();
                        let from = FromPeer::Said(Box::new(ToSource::Applied { channel, records }));
                        let _ = inputs.send(DriverInput::Peer {
                            epoch,
                            from,
                            at: passed_on,
                        });
                    }
                }
                Ok(message) => {
                    let from = FromPeer::Said(Box::new(message));
                    if inputs
                        .send(DriverInput::Peer {
                            epoch,
                            from,
                            at: Instant::now(),
                        })
                        .is_err()
                    {
                        return;
                    }
                }
                Err(error) => break FromPeer::Broken(error.to_string()),
            }
        };
        control.close();
        let _ = inputs.send(DriverInput::Peer {
            epoch,
            from: why,
            at: Instant::now(),
        });
    });
}

/// The pages of a set as extents.
pub(crate) fn extents(pages: &PageSet) -> Vec<Extent> {
    pages
        .runs()
        .map(|run| (run.start, run.end - run.start))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_keep_to_one_family() {
        let ours = ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let theirs = [
            "[fd00::2]:1".parse().unwrap(),
            "10.0.0.2:1".parse().unwrap(),
        ];
        let routes = routes(&ours, &theirs);
        assert_eq!(routes.len(), 2);
        assert!(routes.iter().all(|route| {
            route
                .from
                .is_some_and(|from| from.is_ipv4() == route.to.is_ipv4())
        }));
    }

    #[test]
    fn no_common_family_is_no_route() {
        let ours = ["10.0.0.1".parse().unwrap()];
        assert!(routes(&ours, &["[fd00::2]:1".parse().unwrap()]).is_empty());
    }
}
