//! One set of channels at the source: made together, lost together.
//!
//! Owned by the driver. Losing any channel ends the set: the rest is closed, everything that was not acknowledged as
//! applied is dirty again, and a new set with new channel ids and keys may be made. While a pass runs, data channels
//! join and leave as the choice of streams wants it; an index is never used twice in a connection set.
//!
//! Connecting costs three round trips: a connection, then its proof and the first words, and beside these the connections
//! and proofs of all data channels at once.

use super::changes::{CHANNELS, Changes, Link};
use super::ending::Ending;
use super::events::{Happened, SetEvent, TellDriver};
use super::gauge::Gauge;
use super::hearing::Hearing;
use super::maker::{Joining, Maker, gone, too_many};
use super::outgoing;
use super::pass::Pass;
use super::routes::{Route, reach};
use super::sender::{FINISH_WAIT, PassEnd, SenderHandle};
use crate::control::SharedControl;
use crate::priority::cores;
use godwit_guestmem::{PageSet, RamFile};
use godwit_migrate::ledger::Counters;
use godwit_migrate::protocol::{
    EXTENTS_PER_MESSAGE, Extent, STREAMS_MAX, ToDestination, WARM_LEN_MAX,
};
use godwit_migrate::streams::{Facts, Room, Step, StreamPlan, first_streams};
use godwit_transport::{
    Closer, Connection, Dialed, LinkReading, Meter, Patience, Probe, TransportError,
};
use godwit_wire::Spec;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

/// Longest time to make a channel, however many ways are tried: a connection and a handshake.
const CHANNEL_WAIT: Duration = Duration::from_secs(5);
/// From this round trip on a closed window is felt in a switchover.
const WARM_RTT: Duration = Duration::from_millis(5);
/// Enough for the device state of most machines.
const WARM_MESSAGES: u32 = 8;
/// From this round trip on a link is far.
pub(super) const FAR_RTT: Duration = Duration::from_millis(2);
/// A channel that was busy for less says nothing about its window.
const HEMMED_FOR: Duration = Duration::from_secs(1);

/// A data channel, open or left.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) sender: SenderHandle,
    pub(super) meter: Arc<Meter>,
    pub(super) probe: Probe,
    /// It takes no more passes.
    pub(super) left: bool,
    closer: Closer,
    route: usize,
    records: u64,
}

/// What a sender needs beside its channel.
struct Supplies {
    ram: Arc<RamFile>,
    tell: TellDriver,
    /// By index: records that the destination has applied.
    applied: Vec<Arc<AtomicU64>>,
}

/// A control channel and the data channels beside it, which live and end together.
pub struct ConnectionSet {
    pub number: u16,
    pub control: Arc<SharedControl>,
    maker: Maker,
    supplies: Supplies,
    lanes: Vec<Lane>,
    plan: StreamPlan,
    gauge: Gauge,
    joining: Option<Joining>,
    minds_loss: bool,
    rtt: Duration,
    notes: Vec<String>,
    hemmed_noted: bool,
    changes: Option<Changes>,
}

/// What a connection set is made of.
pub struct SetPlan<'a> {
    pub number: u16,
    /// The version of the control channel.
    pub protocol: u32,
    pub spec: &'a Arc<Spec>,
    pub routes: &'a [Route],
    pub ram: &'a Arc<RamFile>,
    pub tell: &'a TellDriver,
    pub ending: &'a Ending,
    /// What disks send, if any are copied.
    pub changes: Option<&'a Changes>,
}

impl SetPlan<'_> {
    fn link(&self, rtt: Duration) -> Link {
        let protocol = self.protocol;
        Link { rtt, protocol }
    }
}

impl ConnectionSet {
    /// Connects the control channel over the first route that works and data channels over all, and says what will
    /// come.
    pub fn open(plan: &SetPlan<'_>, extents: &[Extent]) -> Result<Self, TransportError> {
        let outgoing = outgoing::Look::begin();
        let reached = reach(plan.routes, plan.ending)?;
        let near = reached.iter().map(|way| way.dialed.rtt()).min();
        let (routes, dialed): (Vec<Route>, Vec<Option<Dialed>>) = reached
            .into_iter()
            .map(|way| (way.route, Some(way.dialed)))
            .unzip();
        let room = Room {
            cores: u32::try_from(cores()).unwrap_or(u32::MAX),
            routes: u32::try_from(routes.len()).unwrap_or(u32::MAX),
        };
        let near_s = near.unwrap_or_default().as_secs_f64();
        let streams = first_streams(room, near_s, outgoing.shows_much());
        let maker = Maker {
            spec: Arc::clone(plan.spec),
            number: plan.number,
            routes: Arc::new(routes),
        };
        let until = Instant::now() + CHANNEL_WAIT;
        let (control, joining) = maker.make_first(streams, dialed, until)?;
        let control = control.wait(until, plan.ending)?;
        let (rtt, granted) = (control.rtt(), control.granted().clone());
        let (sender, receiver) = control.into_control()?;
        let control = Arc::new(SharedControl::new(sender));
        let applied: Vec<_> = (0..STREAMS_MAX).map(|_| Arc::default()).collect();
        let hearing = Hearing {
            set: plan.number,
            tell: Arc::clone(plan.tell),
            applied: applied.clone(),
            changes: plan.changes.cloned(),
            control: Arc::clone(&control),
        };
        hearing.begin(receiver)?;
        let begin = ToDestination::Begin {
            version: plan.protocol,
            set: plan.number,
            streams,
            pages: plan.ram.page_count(),
            changes: plan.changes.map_or(0, |_| CHANNELS),
        };
        while_unheard(&control, plan.ending, || {
            announce(&control, &begin, extents, plan.ending)?;
            let mut set = Self {
                number: plan.number,
                control: Arc::clone(&control),
                maker,
                supplies: Supplies {
                    ram: Arc::clone(plan.ram),
                    tell: Arc::clone(plan.tell),
                    applied,
                },
                lanes: Vec::new(),
                plan: StreamPlan::new(room, streams),
                gauge: Gauge::new(),
                joining: None,
                minds_loss: granted.congestion != "bbr",
                rtt,
                notes: granted.send_notes(),
                hemmed_noted: false,
                changes: plan.changes.cloned(),
            };
            set.open_data(joining, until, plan.ending)?;
            if let Some(changes) = plan.changes {
                let link = plan.link(rtt);
                changes.open(&set.maker, link, (until, plan.ending), plan.tell)?;
            }
            Ok(set)
        })
    }

    /// Takes in the first data channels.
    fn open_data(
        &mut self,
        joining: Vec<Joining>,
        until: Instant,
        ending: &Ending,
    ) -> Result<(), TransportError> {
        for joining in joining {
            let connection = joining.wait(until, ending)?;
            self.add_lane(joining.route, connection)?;
        }
        Ok(())
    }

    fn add_lane(&mut self, route: usize, connection: Connection) -> Result<(), TransportError> {
        let index = self.lanes.len();
        let (probe, closer) = (connection.probe(), connection.closer());
        let applied = self.supplies.applied.get(index).cloned();
        let applied = applied.ok_or(too_many(self.number))?;
        let writer = connection.split().1;
        let meter = writer.meter();
        let (tell, set) = (Arc::clone(&self.supplies.tell), self.number);
        let ends = move |end: PassEnd| {
            // The driver is gone only when nobody waits for this any more.
            let what = Happened::PassEnd(Box::new(end));
            let _ = tell(SetEvent { set, what });
        };
        let ram = Arc::clone(&self.supplies.ram);
        let sender = SenderHandle::start(index, writer, ram, applied, ends).map_err(|source| {
            TransportError::System {
                doing: "start a sender thread",
                source,
            }
        })?;
        self.lanes.push(Lane {
            sender,
            meter,
            probe,
            left: false,
            closer,
            route,
            records: 0,
        });
        Ok(())
    }

    /// Starts a pass on all channels; returns how many will report its end.
    pub fn begin(&mut self, pass: &Arc<Pass>) -> usize {
        self.gauge.restart(&self.lanes);
        let open = self.lanes.iter().filter(|lane| !lane.left);
        open.filter(|lane| lane.sender.begin(pass)).count()
    }

    /// Data channels that are open.
    pub fn streams(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.left).count()
    }

    /// What keeps the channels slower than the link could be, with the remedy; each sentence once.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// While a pass runs: lets channels join and leave. Returns how many more will report its end.
    pub fn tend(&mut self, pass: &Arc<Pass>) -> Result<usize, TransportError> {
        let joined = self.welcome(pass)?;
        if self.joining.is_none()
            && let Some(facts) = self.gauge.look(&self.lanes)
        {
            let minds_loss = self.minds_loss;
            self.plan
                .open(u32::try_from(self.streams()).unwrap_or(u32::MAX));
            match self.plan.step(Facts {
                minds_loss,
                ..facts
            }) {
                Step::Keep => {}
                Step::Add => self.ask_one_more(),
                Step::Remove => self.let_one_go(),
            }
        }
        Ok(joined)
    }

    /// Takes in a channel that is made.
    fn welcome(&mut self, pass: &Arc<Pass>) -> Result<usize, TransportError> {
        let Some(joining) = &self.joining else {
            return Ok(0);
        };
        let (route, made) = match joining.made.try_recv() {
            Err(TryRecvError::Empty) => return Ok(0),
            Err(TryRecvError::Disconnected) => (joining.route, Err(gone())),
            Ok(made) => (joining.route, made),
        };
        self.joining = None;
        match made {
            Ok(connection) => {
                self.add_lane(route, connection)?;
                let begun = self
                    .lanes
                    .last()
                    .is_some_and(|lane| lane.sender.begin(pass));
                tracing::debug!(streams = self.streams(), "a data channel has joined");
                Ok(usize::from(begun))
            }
            Err(error) => {
                tracing::debug!(%error, "a further data channel could not be made");
                self.plan.failed();
                Ok(0)
            }
        }
    }

    /// Begins to make a channel on the route that has fewest.
    fn ask_one_more(&mut self) {
        let index = self.lanes.len();
        let routes = 0..self.maker.routes.len();
        let Some(route) = routes.min_by_key(|route| self.open_on(*route)) else {
            return self.plan.failed();
        };
        let until = Instant::now() + CHANNEL_WAIT;
        match self.maker.begin_data(index, route, None, until) {
            Ok(joining) => self.joining = Some(joining),
            Err(_) => self.plan.failed(),
        }
    }

    /// Ends the newest channel of the route that has most.
    fn let_one_go(&mut self) {
        if self.streams() <= 1 {
            return self.plan.failed();
        }
        let routes = 0..self.maker.routes.len();
        let route = routes.max_by_key(|route| self.open_on(*route));
        let newest = self
            .lanes
            .iter_mut()
            .rev()
            .find(|lane| !lane.left && Some(lane.route) == route);
        if let Some(lane) = newest {
            lane.left = true;
            lane.sender.leave();
        }
        tracing::debug!(streams = self.streams(), "a data channel has left");
    }

    fn open_on(&self, route: usize) -> usize {
        let open = self.lanes.iter().filter(|lane| !lane.left);
        open.filter(|lane| lane.route == route).count()
    }

    /// The round trip of the control channel before anything else was on the link, s.
    pub fn rtt_s(&self) -> f64 {
        self.rtt.as_secs_f64()
    }

    /// On a far link: opens the control channel's window once, so that device state later leaves in one go. Costs what a
    /// few hundred pages cost, beside the first pass.
    pub fn warm(&self, ending: &Ending) -> Result<(), TransportError> {
        if self.rtt < WARM_RTT {
            return Ok(());
        }
        let _sending = ending.sending(self.control.closer());
        for _ in 0..WARM_MESSAGES {
            if ending.is_raised() {
                // A command waits, which says so in good order.
                return Ok(());
            }
            self.control.send(&ToDestination::Warm {
                filling: "w".repeat(WARM_LEN_MAX),
            })?;
        }
        Ok(())
    }

    /// Books how far a channel is.
    pub fn sent(&mut self, index: usize, records: u64) {
        if let Some(lane) = self.lanes.get_mut(index) {
            lane.records = records;
        }
    }

    /// Tells the destination that an iteration is complete.
    pub fn barrier(&self, iteration: u32) -> Result<(), TransportError> {
        self.control.send(&ToDestination::Barrier {
            iteration,
            sent: self.lanes.iter().map(|lane| lane.records).collect(),
        })
    }

    /// Looks once whether windows were too small for the link.
    pub fn note_windows(&mut self) {
        if self.hemmed_noted {
            return;
        }
        let readings = self.lanes.iter().filter_map(|lane| lane.probe.read());
        if let Some(note) = readings
            .map(|link| window_note(&link))
            .find(Option::is_some)
        {
            self.notes.extend(note);
            self.hemmed_noted = true;
        }
    }

    /// What the channels of this set have carried so far.
    pub fn counters(&self) -> Counters {
        let counted = self.lanes.iter().map(|lane| {
            let (pages, zero_pages) = lane.sender.live().pages();
            Counters {
                bytes: lane.meter.read().bytes,
                pages,
                zero_pages,
            }
        });
        let mut all = counted.fold(Counters::default(), Counters::and);
        all.bytes += self.changes.as_ref().map_or(0, Changes::bytes);
        all
    }

    /// Nothing more will come of disks: final records follow what is under way.
    pub fn end_changes(&self) {
        if let Some(changes) = &self.changes {
            changes.end();
        }
    }

    /// Nothing more will come on the data channels: their final records follow the last pages.
    pub fn close_data(&mut self) {
        for lane in self.lanes.iter_mut().filter(|lane| !lane.left) {
            lane.left = true;
            lane.sender.leave();
        }
    }

    /// Closes all channels at once and adds to `dirty` what was not acknowledged as applied.
    pub fn abandon(&mut self, dirty: &mut PageSet) {
        self.control.close();
        self.lanes.iter().for_each(|lane| lane.closer.close());
        if let Some(changes) = &self.changes {
            changes.detach();
        }
        for lane in self.lanes.drain(..) {
            match lane.sender.end() {
                Some(pages) => dirty.merge(&pages),
                None => dirty.insert_range(0..dirty.page_count()),
            }
        }
    }

    /// Ends all channels in good order: final records, then the control channel.
    pub fn finish(&mut self) {
        self.close_data();
        if let Some(Ok(Ok(late))) = self.joining.take().map(|joining| joining.made.try_recv()) {
            let _ = late.split().1.finish(&Patience::idle(FINISH_WAIT));
        }
        for lane in self.lanes.drain(..) {
            let _ = lane.sender.end();
        }
        if let Some(changes) = &self.changes {
            changes.detach();
        }
        self.control.finish();
    }
}

/// Tells the destination how much memory will come, and where it holds data.
fn announce(
    control: &SharedControl,
    begin: &ToDestination,
    extents: &[Extent],
    ending: &Ending,
) -> Result<(), TransportError> {
    ending.check()?;
    control.send(begin)?;
    for part in extents.chunks(EXTENTS_PER_MESSAGE) {
        ending.check()?;
        control.send(&ToDestination::Extents {
            extents: part.to_vec(),
        })?;
    }
    control.send(&ToDestination::ExtentsEnd)
}

/// Work on a channel in a time in which the driver hears no command: an end interrupts it. Nobody follows what failed, so
/// its reader ends; if it failed because the migration is over, the destination hears why.
fn while_unheard<R>(
    control: &SharedControl,
    ending: &Ending,
    work: impl FnOnce() -> Result<R, TransportError>,
) -> Result<R, TransportError> {
    let _sending = ending.sending(control.closer());
    let done = work();
    if done.is_err() {
        if let Some(word) = ending.word() {
            // Whoever does not hear it learns from the agents that it is over.
            let _ = control.send(word);
            control.finish();
        }
        control.close();
    }
    done
}

/// On a far link a full receive window is the destination's setting; on a near one it is its cores or its memory.
fn window_note(link: &LinkReading) -> Option<String> {
    let far = link.min_rtt >= FAR_RTT;
    let hemmed = link.busy > HEMMED_FOR && link.window_limited > link.busy / 3;
    (far && hemmed).then(|| {
        format!(
            "the destination's receive window of {} KiB held a channel back on a round trip of {} ms: see the notes of its report for the remedy",
            link.window_bytes >> 10,
            link.min_rtt.as_millis()
        )
    })
}

/// The pages of a set as extents.
pub fn extents(pages: &PageSet) -> Vec<Extent> {
    pages
        .runs()
        .map(|run| (run.start, run.end - run.start))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::spec;
    use godwit_migrate::protocol::{PROTOCOL_VERSION, decode_to_destination};
    use godwit_transport::{
        ConnectOptions, ControlSender, Gate, Incoming, Listener, Tuning, connect,
    };
    use godwit_wire::ChannelId;

    const LONG: Duration = Duration::from_secs(120);

    /// A source's sending half and the destination's whole end, which nobody reads.
    fn unread() -> (ControlSender, Connection) {
        let gate = Gate::new(spec(), Tuning::default(), LONG);
        let mut listener = Listener::bind(gate, [127, 0, 0, 1].into(), 0..=0).unwrap();
        let (to, until) = (listener.address(), Instant::now() + LONG);
        let accepted = std::thread::spawn(move || listener.accept(until).unwrap());
        let (options, channel_id) = (ConnectOptions::default(), ChannelId::control(0));
        let made = connect(to, &options, &spec(), channel_id, until).unwrap();
        (made.into_control().unwrap().0, accepted.join().unwrap())
    }

    /// Whether a thread of this process waits in the kernel, as one does in a full socket.
    fn is_asleep(thread: rustix::thread::Pid) -> bool {
        let stat = format!("/proc/self/task/{thread}/stat");
        let stat = std::fs::read_to_string(stat).unwrap();
        stat.rsplit_once(')')
            .unwrap()
            .1
            .trim_start()
            .starts_with('S')
    }

    const BEGIN: ToDestination = ToDestination::Begin {
        version: PROTOCOL_VERSION,
        set: 0,
        streams: 1,
        pages: u64::MAX,
        changes: 0,
    };

    #[test]
    fn an_end_interrupts_the_extents_that_nobody_reads() {
        let (sender, _unread) = unread();
        let (meter, ending) = (sender.meter(), Ending::default());
        let (control, ended) = (SharedControl::new(sender), ending.clone());
        let (tell, told) = std::sync::mpsc::channel();
        let announcing = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            // More than sockets hold.
            let extents: Vec<Extent> = (0..4 << 20).map(|page| (2 * page, 1)).collect();
            while_unheard(&control, &ended, || {
                announce(&control, &BEGIN, &extents, &ended)
            })
        });
        // Until it waits in the socket: an end that comes earlier is noticed between two messages.
        let (thread, sent) = (told.recv().unwrap(), || meter.read().bytes);
        let is_stuck = |before| before > 0 && is_asleep(thread) && sent() == before;
        while !is_stuck(sent()) {
            std::thread::yield_now();
        }
        ending.raise(None);
        let announced = announcing.join().unwrap();
        // Who waits for the socket's patience to end is told that it stalls.
        assert!(
            matches!(announced, Err(TransportError::Cancelled)),
            "{announced:?}"
        );
    }

    #[test]
    fn a_destination_hears_why_its_channels_are_not_made() {
        let (sender, destination) = unread();
        let ending = Ending::default();
        let word = ToDestination::Cancel {
            reason: "nobody wants it".into(),
            cancelled: true,
        };
        ending.raise(Some(word.clone()));
        let control = SharedControl::new(sender);
        let announced = while_unheard(&control, &ending, || {
            announce(&control, &BEGIN, &[], &ending)
        });
        assert!(matches!(announced, Err(TransportError::Cancelled)));
        let (_sender, mut receiver) = destination.into_control().unwrap();
        let Ok(Incoming::Message(bytes)) = receiver.recv(Instant::now() + LONG) else {
            panic!("it hears nothing");
        };
        assert_eq!(decode_to_destination(&bytes, 1), Ok(word));
    }
}
