//! What a guest waits for until a near destination has carried it out.
//!
//! Owned by the parts of a write that are under way, together, or by a flush: it is over with the last of them, whether that was carried
//! out or is lost, of which the disk's course was told before. Refuses nothing.

use super::changes::lock;
use godwit_blockio::Bell;
use std::sync::{Arc, Mutex};

/// What is over of one disk, for its thread.
#[derive(Debug)]
pub(super) struct Over {
    numbers: Mutex<Vec<u64>>,
    pub bell: Bell,
}

impl Over {
    pub(super) fn new() -> Result<Arc<Self>, godwit_blockio::Error> {
        let bell = Bell::new()?;
        let numbers = Mutex::default();
        Ok(Arc::new(Self { numbers, bell }))
    }

    pub(super) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.numbers))
    }
}

/// A write or a flush for which the guest waits, by the number under which the disk's thread knows it.
#[derive(Debug)]
pub(super) struct Awaited {
    number: u64,
    over: Arc<Over>,
}

impl Awaited {
    pub(super) fn begin(number: u64, over: &Arc<Over>) -> Arc<Self> {
        let over = Arc::clone(over);
        Arc::new(Self { number, over })
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        lock(&self.over.numbers).push(self.number);
        self.over.bell.ring();
    }
}
