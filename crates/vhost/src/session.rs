//! What belongs to one connection of QEMU's to a disk and ends with it.
//!
//! Part of [`Device`], whose thread owns it. A connection that ends takes the whole value with it, as it does with the queues and with what was said
//! of the guest: what is added here cannot outlive its connection. What is to outlive it is the device's own: the image and what is
//! under way on it, who holds the disk, a sync that failed unheard. Refuses nothing.

use std::os::fd::OwnedFd;
use std::time::Instant;

use crate::connection::Connection;
use crate::disk::Device;
use crate::full::Full;
use crate::message::Region;
use crate::queue::Queue;

/// As it is before QEMU has connected.
#[derive(Default)]
pub(crate) struct Session {
    pub connection: Option<Connection>,
    pub regions: Vec<Region>,
    /// On which QEMU hears of a changed configuration.
    pub back_channel: Option<OwnedFd>,
    /// The queue whose end QEMU waits for.
    pub ending: Option<u32>,
    /// When QEMU connected, until it says something.
    pub mute_since: Option<Instant>,
    /// Whether QEMU may have said more than was heard.
    pub has_more_to_hear: bool,
    /// Whether another program may go on with the connection: what QEMU says is for that one.
    pub is_handed_over: bool,
    /// Whether this front end was told of the disk's size, which may be another than its predecessor said.
    pub told_size: bool,
    /// Also what waits for room: as what is under way, it stands in the in-flight area.
    pub full: Full,
}

impl Device {
    /// Nothing of the connection is left, and nothing of the front end that had it. The kernel and filters keep their requests, whose tokens name
    /// a life that is over.
    pub(crate) fn end_session(&mut self) {
        self.session = Session::default();
        self.queues = Queue::all(&self.guest.geometry);
        self.guest = self.guest.next();
    }
}
