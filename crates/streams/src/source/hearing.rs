//! Hears what the destination says on the control channel and passes it on to the driver.
//!
//! One thread per set, which ends with the channel. Signs of life are passed on now and then. Everything else takes one
//! of [`WAITING_MAX`] seats until the driver has looked at it: where none is free the channel is not read on, so that a
//! peer that floods is held up by TCP and costs no memory. The driver never waits for this thread. Refuses: what is no
//! message of the protocol.

use super::changes::Changes;
use super::events::{FromPeer, Happened, SetEvent, TellDriver};
use super::maker::start_thread;
use crate::control::SharedControl;
use godwit_migrate::protocol::{STREAMS_MAX, ToSource, decode_to_source};
use godwit_transport::{ControlReceiver, Incoming, TransportError};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A control channel from which nothing comes for this long is lost; the destination answers a ping a second.
const CONTROL_SILENCE: Duration = Duration::from_secs(6);
/// How often a sign of life is passed on.
const LIFE_EVERY: Duration = Duration::from_millis(50);
/// Most messages that wait for the driver.
const WAITING_MAX: usize = 256;

/// Places for messages that wait.
#[derive(Debug, Default)]
pub(super) struct Seats {
    taken: Mutex<usize>,
    left: Condvar,
}

impl Seats {
    /// Waits until one is free.
    fn take(self: &Arc<Self>) -> Seat {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut usize| *taken >= WAITING_MAX;
        let waited = self.left.wait_while(taken, full);
        *waited.unwrap_or_else(PoisonError::into_inner) += 1;
        Seat(Arc::clone(self))
    }
}

/// A place, free again when dropped.
#[derive(Debug)]
pub struct Seat(Arc<Seats>);

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken = taken.saturating_sub(1);
        self.0.left.notify_one();
    }
}

/// What hears a destination.
pub(super) struct Hearing {
    pub set: u16,
    pub tell: TellDriver,
    /// By index: records that the destination has applied.
    pub applied: Vec<Arc<AtomicU64>>,
    /// What disks send, if any are copied.
    pub changes: Option<Changes>,
    pub control: Arc<SharedControl>,
}

impl Hearing {
    /// Hears until the channel ends.
    pub(super) fn begin(self, receiver: ControlReceiver) -> Result<(), TransportError> {
        let work = move || {
            let seats = Arc::default();
            if let Some(why) = self.hear(receiver, &seats) {
                self.control.close();
                // The driver is gone only when nobody needs to know.
                let _ = self.pass_on(why);
            }
        };
        start_thread("hear", "start a thread to hear the destination with", work)
    }

    /// Says why it is over; nothing when the driver is gone.
    fn hear(&self, mut receiver: ControlReceiver, seats: &Arc<Seats>) -> Option<FromPeer> {
        let mut alive_at: Option<Instant> = None;
        loop {
            let message = match receiver.recv(Instant::now() + CONTROL_SILENCE) {
                Ok(Incoming::Message(bytes)) => decode_to_source(&bytes, STREAMS_MAX),
                Ok(Incoming::DeviceState(_)) => {
                    return Some(FromPeer::Broken("the destination sent device state".into()));
                }
                Ok(Incoming::End) => {
                    return Some(FromPeer::Lost("the destination ended the migration".into()));
                }
                Err(error) => return Some(FromPeer::of(&error)),
            };
            let message = match message {
                Ok(message) => message,
                Err(error) => return Some(FromPeer::Broken(error.to_string())),
            };
            if let ToSource::Applied { channel, records } = &message
                && let Some(slot) = self.applied.get(*channel as usize)
            {
                slot.fetch_max(*records, Ordering::AcqRel);
            }
            if let ToSource::ChangesApplied {
                channel,
                records,
                writing_ms,
            } = &message
                && let Some(changes) = &self.changes
            {
                let writing = writing_ms.map(Duration::from_millis);
                changes.applied(self.set, *channel, (*records, writing));
            }
            let is_life = matches!(
                message,
                ToSource::Applied { .. } | ToSource::ChangesApplied { .. } | ToSource::Pong { .. }
            );
            if is_life {
                if alive_at.is_some_and(|at| at.elapsed() < LIFE_EVERY) {
                    continue;
                }
                alive_at = Some(Instant::now());
            }
            self.pass_on(FromPeer::Said(Box::new(message), seats.take()))?;
        }
    }

    fn pass_on(&self, from: FromPeer) -> Option<()> {
        let at = Instant::now();
        let event = SetEvent {
            set: self.set,
            what: Happened::Peer { from, at },
        };
        (self.tell)(event).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::without_threads;
    use crate::testing::spec;
    use godwit_migrate::protocol::encode;
    use godwit_transport::{
        ConnectOptions, Connection, ControlSender, Gate, Listener, Tuning, connect,
    };
    use godwit_wire::ChannelId;
    use std::sync::mpsc::{Receiver, channel};

    const LONG: Duration = Duration::from_secs(120);

    /// A source's control channel and its destination's end.
    fn connected() -> (Connection, Connection) {
        let gate = Gate::new(spec(), Tuning::default(), LONG);
        let mut listener = Listener::bind(gate, [127, 0, 0, 1].into(), 0..=0).unwrap();
        let address = listener.address();
        let accept = move || listener.accept(Instant::now() + LONG).unwrap();
        // Also where no other thread can be started.
        let accepting = std::thread::Builder::new().stack_size(1 << 20);
        let accepted = accepting.spawn(accept).unwrap();
        let (options, channel) = (ConnectOptions::default(), ChannelId::control(0));
        let made = connect(address, &options, &spec(), channel, Instant::now() + LONG);
        (made.unwrap(), accepted.join().unwrap())
    }

    /// Hears on a source's channel; also what its driver gets.
    fn begin(source: Connection) -> (Result<(), TransportError>, Receiver<SetEvent>) {
        let (sender, receiver) = source.into_control().unwrap();
        let (events, received) = channel();
        let hearing = Hearing {
            set: 0,
            tell: Arc::new(move |event| events.send(event).is_ok()),
            applied: Vec::new(),
            changes: None,
            control: Arc::new(SharedControl::new(sender)),
        };
        (hearing.begin(receiver), received)
    }

    /// A destination's sending half, and what its source's driver gets.
    fn heard() -> (ControlSender, Receiver<SetEvent>) {
        let (source, destination) = connected();
        let (begun, received) = begin(source);
        begun.unwrap();
        (destination.into_control().unwrap().0, received)
    }

    #[test]
    fn a_source_without_a_thread_to_hear_with_has_an_error_and_lives_on() {
        let name = "source::hearing::tests::a_source_without_a_thread_to_hear_with_has_an_error_and_lives_on";
        if without_threads(name) {
            return;
        }
        let (source, _destination) = connected();
        let refused = begin(source).0.unwrap_err();
        // As such the driver tries it again for a while.
        assert!(matches!(refused, TransportError::System { .. }));
        assert!(refused.to_string().contains("thread to hear"), "{refused}");
    }

    fn next(events: &Receiver<SetEvent>) -> FromPeer {
        match events.recv_timeout(LONG).map(|event| event.what) {
            Ok(Happened::Peer { from, .. }) => from,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_flood_waits_in_the_network_and_is_heard_in_order() {
        const MESSAGES: u32 = 100_000;
        let (mut destination, inputs) = heard();
        let flood = std::thread::spawn(move || {
            for number in 0..MESSAGES {
                let message = ToSource::Prepared {
                    seconds: f64::from(number),
                };
                let deadline = Instant::now() + LONG;
                destination.send(&encode(&message), deadline).unwrap();
            }
            destination
        });
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| next(&inputs)).collect();
        assert!(inputs.try_recv().is_err(), "all seats are taken");
        for number in 0..MESSAGES {
            let heard = if waiting.is_empty() {
                next(&inputs)
            } else {
                waiting.remove(0)
            };
            let FromPeer::Said(message, _seat) = heard else {
                panic!("{heard:?}");
            };
            let seconds = f64::from(number);
            assert_eq!(*message, ToSource::Prepared { seconds });
        }
        drop(flood.join().unwrap());
    }

    #[test]
    fn a_flood_of_signs_of_life_is_thinned_out_and_ends_in_order() {
        let (mut destination, inputs) = heard();
        let began = Instant::now();
        for nonce in 0..100_000 {
            let message = encode(&ToSource::Pong { nonce });
            destination.send(&message, Instant::now() + LONG).unwrap();
        }
        destination.finish(Instant::now() + LONG).unwrap();
        let mut signs = 0;
        while let FromPeer::Said(..) = next(&inputs) {
            signs += 1;
        }
        let most = began.elapsed().as_millis() / LIFE_EVERY.as_millis() + 1;
        assert!((1..=most).contains(&signs), "{signs} of at most {most}");
    }
}
