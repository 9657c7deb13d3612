//! A link between two network namespaces with a delay, a rate, a queue and losses, for kernels without netem.
//!
//! A [`Link`] is a thread between two TAP devices, one in each namespace. Ethernet frames of any protocol pass; large
//! packets stay whole where they can and count as the packets that a network card would make of them. The thread owns
//! both directions' state; a `Link` holds the handle to it, changes what it is like, and ends it and the devices when
//! dropped. How a packet fares is decided by the pure [`model`]. It refuses settings that no link has, and holds no more
//! than [`LinkSpec::held_bytes_max`] bytes for each direction.

pub mod control;
mod frame;
pub mod model;
mod relay;
mod spec;
mod tap;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use relay::{Bell, Command, Relay};
pub use spec::{
    Counters, DELAY_US_MAX, Direction, DirectionCounters, FRAME_BYTES_MIN, LinkSpec,
    QUEUE_BYTES_MAX, SpecError, UNSHAPED_BYTES_MAX, WIRE_OVERHEAD_BYTES,
};
use tap::Tap;

/// One end of a link: a device to be made in a network namespace.
#[derive(Debug)]
pub struct End {
    pub namespace: OwnedFd,
    /// Name of the device to make there.
    pub device: String,
    /// Addresses of the device with their prefix lengths, IPv4 and IPv6.
    pub addresses: Vec<String>,
    /// A bridge of the namespace that the device becomes a port of.
    pub bridge: Option<String>,
    pub mtu: u32,
}

impl End {
    /// A device in the network namespace of a process.
    pub fn of_process(pid: i32, device: &str, addresses: &[&str]) -> io::Result<Self> {
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net"))?;
        Ok(Self {
            namespace: namespace.into(),
            device: device.to_owned(),
            addresses: addresses.iter().map(|&text| text.to_owned()).collect(),
            bridge: None,
            mtu: 1500,
        })
    }
}

/// A running link. It ends, with its devices, when dropped.
pub struct Link {
    commands: Option<Sender<Command>>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<io::Result<()>>>,
    specs: Mutex<[LinkSpec; 2]>,
    ends: [End; 2],
}

impl Link {
    /// Makes both devices and starts to carry packets between them. Needs root.
    pub fn between(a: End, b: End, spec: LinkSpec) -> io::Result<Self> {
        spec.check().map_err(invalid)?;
        let first = Tap::new(&a)?;
        let taps = match Tap::new(&b) {
            Ok(second) => [first, second],
            Err(error) => {
                drop(first);
                let _ = tap::remove(&a);
                return Err(error);
            }
        };
        let (commands, receiver) = channel();
        let bell = Arc::new(Bell::new()?);
        let relay = Relay::new(taps, spec, bell.clone(), receiver);
        let thread = std::thread::Builder::new()
            .name("link".to_owned())
            .spawn(move || relay.run())?;
        Ok(Self {
            commands: Some(commands),
            bell,
            thread: Some(thread),
            specs: Mutex::new([spec; 2]),
            ends: [a, b],
        })
    }

    /// Changes both directions; in force when this returns. What waits is sent at the new rate, what is on the way arrives
    /// when it would have.
    pub fn set(&self, spec: LinkSpec) -> io::Result<()> {
        self.set_all(&[(Direction::AToB, spec), (Direction::BToA, spec)])
    }

    pub fn set_direction(&self, direction: Direction, spec: LinkSpec) -> io::Result<()> {
        self.set_all(&[(direction, spec)])
    }

    fn set_all(&self, changes: &[(Direction, LinkSpec)]) -> io::Result<()> {
        for (_, spec) in changes {
            spec.check().map_err(invalid)?;
        }
        // Held over both, so that what is told is what is in force.
        let mut specs = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        self.ask(|done| Command::Set(changes.to_vec(), done))?;
        for &(direction, spec) in changes {
            specs[direction as usize] = spec;
        }
        Ok(())
    }

    pub fn spec(&self, direction: Direction) -> LinkSpec {
        let specs = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        specs[direction as usize]
    }

    pub fn counters(&self) -> io::Result<Counters> {
        let mut counters = self.ask(Command::Count)?;
        let [a, b] = &self.ends;
        counters.a_to_b.dropped_kernel_frames = tap::dropped_by_kernel(a)?;
        counters.b_to_a.dropped_kernel_frames = tap::dropped_by_kernel(b)?;
        Ok(counters)
    }

    /// Drops what is on the link and everything that comes, without a sign at either end: a line cut far away.
    pub fn cut(&self) -> io::Result<()> {
        self.ask(|done| Command::Cut(true, done))
    }

    /// Undoes [`Link::cut`].
    pub fn heal(&self) -> io::Result<()> {
        self.ask(|done| Command::Cut(false, done))
    }

    fn ask<T>(&self, question: impl FnOnce(Sender<T>) -> Command) -> io::Result<T> {
        let gone = || io::Error::other("the link has ended: one of its devices is gone");
        let (sender, answer) = channel();
        let commands = self.commands.as_ref().ok_or_else(gone)?;
        commands.send(question(sender)).map_err(|_| gone())?;
        self.bell.ring();
        answer.recv().map_err(|_| gone())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.commands = None;
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // how it ended matters to nobody any more
        }
        for end in &self.ends {
            let _ = tap::remove(end); // one that cannot be removed goes with its last descriptor
        }
    }
}

fn invalid(error: SpecError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}
