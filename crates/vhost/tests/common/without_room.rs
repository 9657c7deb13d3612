//! A disk whose image has no room, or is not its own, and front ends that have not said all.

use super::{FREE, FrontEnd, GUEST, Site, wait_until};
use godwit_blockio::filters::Fault;
use godwit_blockio::{Access, Filter, Image, Waits};
use godwit_vhost::{Disk, Settings};
use rustix::io::Errno;
use std::io::Write as _;

/// A disk whose guest waits, with the write of ones to its first sector, for room that the value returned here gives.
pub fn without_room(site: &Site) -> (Disk, FrontEnd, Fault) {
    without_room_for(site, Site::guest)
}

/// The same with this front end.
pub fn without_room_for(
    site: &Site,
    front_end: impl FnOnce(&Site) -> FrontEnd,
) -> (Disk, FrontEnd, Fault) {
    let faults = Fault::default();
    let disk = site.disk(vec![Box::new(faults.clone())]);
    let mut guest = front_end(site);
    faults.fail_writes(u64::MAX, Errno::NOSPC);
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.full_for.is_some());
    (disk, guest, faults)
}

impl Site {
    /// A guest whose QEMU keeps no in-flight area.
    pub fn guest_without_inflight(&self) -> FrontEnd {
        let mut guest = self.front_end();
        guest.negotiate(0);
        guest.set_memory();
        (0..guest.drivers.len()).for_each(|number| guest.start_queue(number));
        guest
    }
}

impl FrontEnd {
    /// The first part of a message alone: that its body is to follow.
    pub fn send_header(&mut self, request: u32, bytes: u32) {
        let header = [request, 1, bytes].map(u32::to_le_bytes).concat();
        self.socket.write_all(&header).unwrap();
    }

    /// The rest of it.
    pub fn send_body(&mut self, body: &[u8]) {
        self.socket.write_all(body).unwrap();
    }

    /// As after a reset of the machine over the same connection: a driver that knows of nothing, and no in-flight area.
    pub fn reset(self, site: &Site) -> Self {
        site.clear_rings();
        Self {
            socket: self.socket,
            features: self.features,
            ..Self::unconnected(&site.ram)
        }
    }
}

impl Site {
    /// As after a reset of the machine.
    pub fn clear_rings(&self) {
        self.write(GUEST, &vec![0; (FREE - GUEST) as usize]);
    }

    /// One whose guest gets an error where there is no room.
    pub fn disk_that_fails_full(&self, filters: Vec<Box<dyn Filter>>) -> Disk {
        let settings = self.settings(self.geometry(), filters);
        Disk::start(Settings {
            waits: Waits::default(),
            ..settings
        })
        .unwrap()
    }

    /// One whose guest waits for storage that fails.
    pub fn disk_that_waits_for_storage(&self, filters: Vec<Box<dyn Filter>>) -> Disk {
        let settings = self.settings(self.geometry(), filters);
        Disk::start(Settings {
            waits: Waits {
                for_room: true,
                for_storage: true,
            },
            ..settings
        })
        .unwrap()
    }

    /// One whose image may be another's still.
    pub fn disk_without_image(&self) -> Disk {
        let settings = self.settings(self.geometry(), Vec::new());
        Disk::start(Settings {
            image: Image::open(&self.image, Access::ReadWrite, 512).unwrap(),
            has_image: false,
            ..settings
        })
        .unwrap()
    }
}
