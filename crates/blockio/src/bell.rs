//! Wakes a disk's thread from another one.
//!
//! Owned by whoever rings; the disk's thread listens to its descriptor. Refuses nothing: a bell that has rung often is heard once.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::Error;

/// A descriptor that becomes readable when it rings.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// One that has not rung.
    pub fn new() -> Result<Self, Error> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = bell.map_err(|errno| Error::System {
            action: "make a descriptor",
            source: errno.into(),
        });
        bell.map(Self)
    }

    /// Its count is nobody's concern, and the limit of that is never reached.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
