//! A second image that is not left out any more, which a disk is about to go on with.
//!
//! While it is bound nothing is answered to the guest that the second image has not carried out, and no flush that it has not made
//! durable, however long that takes and whatever becomes of it. So once it is bound and all before is durable, too, it may be written
//! down as the disk while the guest's requests go on; whoever dies from then on leaves two images that both have all that was answered.
//!
//! Owned by whoever moves the disk. Refuses: a second image that is not equal in time.

use std::time::{Duration, Instant};

use crate::{Error, SecondImage};

/// How often it is looked whether it is so.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A second image that is bound: until this is dropped, and after [`Bound::stay`] until it is released.
#[derive(Debug)]
pub struct Bound<'a> {
    second: &'a SecondImage,
    stays: bool,
}

impl<'a> Bound<'a> {
    /// Nothing where it is not equal within this limit, or is silent: what it holds up has waited for long enough.
    pub(crate) fn within(second: &'a SecondImage, limit: Duration) -> Option<Self> {
        let until = Instant::now() + limit;
        second.course().bind();
        let stays = false;
        let bound = Self { second, stays };
        // What was given before may still be under way: of the copying, which counts as copied, or of the guest's, which was answered when
        // nobody waited for this image.
        let mut last = None;
        loop {
            if last.is_none() && second.course().is_bound() {
                last = Some(second.last_given());
            }
            if last.is_some_and(|last| second.has_done(last)) {
                return bound.is_equal().then_some(bound);
            }
            if Instant::now() >= until || second.is_silent() {
                return None;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Makes durable what it was given before, and looks at something on its storage, within this limit: storage may hang. Nothing
    /// where that took longer. What is given later is made durable by flushes.
    pub fn sync_within<R: Send + 'static>(
        &self,
        limit: Duration,
        look: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Option<R>, Error> {
        self.second.sync_within(limit, look)
    }

    /// Whether both images have been equal since it is bound, but for what is under way, and none has failed.
    pub fn is_equal(&self) -> bool {
        self.second.course().is_bound_and_equal()
    }

    /// It is written down as the disk, or may be: it stays bound when this value is dropped.
    pub fn stay(&mut self) {
        self.stays = true;
    }

    /// It is certain that it is not the disk.
    pub fn release(mut self) {
        self.stays = false;
    }

    /// For a disk that is to stand still in a moment: waits, not for long, until little of the guest's is under way.
    pub fn come_close(&self) {
        self.second.come_close();
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if !self.stays {
            self.second.course().unbind();
        }
    }
}
