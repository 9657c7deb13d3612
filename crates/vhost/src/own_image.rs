//! What becomes of a disk's image while it is served: taken, given back, grown, left for another.
//!
//! Who owns the state: the disk's thread. What it refuses: to give an image back while anything is under way on it.

use std::time::Duration;

use godwit_blockio::delta::Delta;
use godwit_blockio::{Access, Image};

use crate::Error;
use crate::connection::send;
use crate::disk::Device;
use crate::layers::OTHER_LENGTH;
use crate::message::{encode, request};
use std::os::fd::AsFd;

impl Device {
    pub(crate) fn busy(&self) -> Error {
        Error::Busy {
            under_way: self.stack.under_way(),
            waited: Duration::ZERO,
        }
    }

    pub(crate) fn take_image(&mut self, name: &str, patience: Duration) -> Result<(), Error> {
        if self.has_image {
            return Ok(());
        }
        let busy = self.busy();
        self.stack
            .bottom
            .image()
            .ok_or(busy)?
            .lock(name, patience)?;
        self.has_image = true;
        self.measure().map(drop)
    }

    pub(crate) fn give_image_back(&mut self, name: &str) -> Result<(), Error> {
        let busy = self.busy();
        let image = self.stack.bottom.image().filter(|_| self.held);
        let image = image.ok_or(busy)?;
        // From here on nothing is taken, also where this fails.
        self.has_image = false;
        // It makes durable what the guest wrote, which may have the image back.
        Ok(image
            .give_back(name)
            .inspect_err(|_| self.lost_sync = true)?)
    }

    /// Goes on with another image of the same size, without what was put below the guest's filters, and without deltas: all that they showed is in that.
    pub(crate) fn switch(&mut self, image: Image) -> Result<(), Error> {
        let busy = self.busy();
        self.must_fit(&image)?;
        if self.stands == 0 || !self.has_image || !self.stack.take_lowest() {
            return Err(busy);
        }
        if !self.stack.bottom.replace(image) {
            return Err(busy);
        }
        self.give_deltas_up();
        Ok(())
    }

    /// The same with what lies over it, in place of what lay over the one before.
    pub(crate) fn switch_over(&mut self, image: Image, deltas: Vec<Delta>) -> Result<(), Error> {
        let busy = self.busy();
        self.must_fit(&image)?;
        if self.stands == 0 || !self.has_image || !self.stack.take_lowest() {
            return Err(busy);
        }
        let Some(had) = self.stack.take_deltas() else {
            return Err(busy);
        };
        if !self.stack.bottom.replace(image) {
            return Err(busy);
        }
        // What they show is the other image's by now.
        had.into_iter().for_each(Delta::give_up);
        let put = self.stack.put_deltas(deltas);
        put.map_err(|_| Error::Settings {
            reason: OTHER_LENGTH.to_owned(),
        })
    }

    /// Goes on with another image of the same size, and without the deltas above the one that it had.
    pub(crate) fn flatten(&mut self, image: Image) -> Result<(), Error> {
        let busy = self.busy();
        self.must_fit(&image)?;
        if self.stands == 0 || !self.has_image || self.stack.take_deltas().is_none() {
            return Err(busy);
        }
        self.stack.bottom.replace(image).then_some(()).ok_or(busy)
    }

    fn must_fit(&self, image: &Image) -> Result<(), Error> {
        let block = u64::from(self.guest.geometry.block);
        let (bytes, theirs) = (self.guest.geometry.bytes, image.bytes());
        match theirs - theirs % block == bytes && image.access() == Access::ReadWrite {
            true => Ok(()),
            false => Err(Error::Settings {
                reason: format!("its new image has {theirs} bytes, and the disk {bytes}"),
            }),
        }
    }

    /// Looks at the image's size and tells the guest if it has changed.
    pub(crate) fn measure(&mut self) -> Result<u64, Error> {
        let block = u64::from(self.guest.geometry.block);
        let bytes = self.stack.bottom.measure()?;
        let bytes = bytes - bytes % block;
        if bytes != self.guest.geometry.bytes {
            self.guest.geometry.bytes = bytes;
            // QEMU does not listen while its guest or the disk stands still: it is told again when that begins.
            self.session.told_size = false;
            self.tell_size()?;
        }
        Ok(bytes)
    }

    /// QEMU looks at the configuration anew, and tells the guest's driver if it has changed.
    pub(crate) fn tell_size(&self) -> Result<(), Error> {
        match &self.session.back_channel {
            Some(channel) => {
                let message = encode(request::CONFIG_CHANGED, false, &[]);
                send(channel.as_fd(), &message, None)
            }
            None => Ok(()),
        }
    }
}
