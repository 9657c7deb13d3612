//! A link between two network namespaces with a delay, a rate, a queue and losses, for kernels without netem.
//!
//! A [`Link`] is a thread between two TAP devices, one in each namespace. Ethernet frames of any protocol pass, large
//! packets stay whole where they can and count as the packets that a network card would make of them. The thread owns
//! both directions' state; a `Link` holds the handle to it, changes what it is like, and ends it and the devices when
//! dropped. How a packet fares is decided by a pure model; here is only what moves bytes. It refuses settings that no
//! link has, and holds no more than [`LinkSpec::held_bytes_max`] bytes for each direction.

mod spec;

use std::io;
use std::os::fd::OwnedFd;

pub use spec::{
    Counters, DELAY_US_MAX, Direction, DirectionCounters, FRAME_BYTES_MIN, LinkSpec,
    QUEUE_BYTES_MAX, SpecError, UNSHAPED_BYTES_MAX, WIRE_OVERHEAD_BYTES,
};

/// One end of a link: a device to be made in a network namespace.
#[derive(Debug)]
pub struct End {
    /// The network namespace.
    pub namespace: OwnedFd,
    /// Name of the device to make there.
    pub device: String,
    /// Addresses of the device with their prefix lengths, IPv4 and IPv6.
    pub addresses: Vec<String>,
    /// MTU of the device.
    pub mtu: u32,
}

impl End {
    /// A device in the network namespace of a process.
    pub fn of_process(pid: i32, device: &str, addresses: &[&str]) -> io::Result<Self> {
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net"))?.into();
        Ok(Self {
            namespace,
            device: device.to_owned(),
            addresses: addresses.iter().map(|&text| text.to_owned()).collect(),
            mtu: 1500,
        })
    }
}

/// A running link. It ends, with its devices, when dropped.
pub struct Link {}

impl Link {
    /// Makes both devices and starts to carry packets between them. Needs root.
    pub fn between(_a: End, _b: End, spec: LinkSpec) -> io::Result<Self> {
        spec.check().map_err(io::Error::other)?;
        Err(io::Error::other("links are not built yet"))
    }

    /// Changes both directions. What waits is sent at the new rate; what is on the way arrives when it would have.
    pub fn set(&self, spec: LinkSpec) -> io::Result<()> {
        spec.check().map_err(io::Error::other)
    }

    /// Changes one direction.
    pub fn set_direction(&self, _direction: Direction, spec: LinkSpec) -> io::Result<()> {
        spec.check().map_err(io::Error::other)
    }

    /// What a direction is like.
    pub fn spec(&self, _direction: Direction) -> LinkSpec {
        LinkSpec::default()
    }

    /// What was counted so far.
    pub fn counters(&self) -> io::Result<Counters> {
        Ok(Counters::default())
    }

    /// Drops what is on the link and everything that comes, without a sign at either end: a line cut far away.
    pub fn cut(&self) -> io::Result<()> {
        Ok(())
    }

    /// Undoes [`Link::cut`].
    pub fn heal(&self) -> io::Result<()> {
        Ok(())
    }
}
