//! A disk whose image has no room.

use super::{FrontEnd, Site, wait_until};
use godwit_blockio::filters::Fault;
use godwit_vhost::Disk;
use rustix::io::Errno;

/// A disk whose guest waits, with the write of ones to its first sector, for room that the value returned here gives.
pub fn without_room(site: &Site) -> (Disk, FrontEnd, Fault) {
    let faults = Fault::default();
    let disk = site.disk(vec![Box::new(faults.clone())]);
    let mut guest = site.guest();
    faults.fail_writes(u64::MAX, Errno::NOSPC);
    guest.submit(0, &site.write_of(0, 0, 1, 512));
    wait_until(&disk, |status| status.full_for.is_some());
    (disk, guest, faults)
}

impl FrontEnd {
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
