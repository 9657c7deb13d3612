//! One request of a disk, and what came of it.
//!
//! Who owns the state: the value goes from hand to hand, with the buffers in it; who has it is responsible for it. It is
//! never copied and never dropped unanswered by the product.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use godwit_guestmem::{DeviceReadable, DeviceWritable};
use rustix::io::Errno;

use crate::Buffer;

/// What is to be done, in bytes of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    Read(Range<u64>),
    Write(Range<u64>),
    /// What was acknowledged before becomes durable.
    Flush,
    /// What is there is no longer needed.
    Discard(Range<u64>),
    WriteZeroes {
        range: Range<u64>,
        /// Whether the space may be given back.
        unmap: bool,
    },
}

impl Work {
    /// The bytes concerned; none of a flush.
    pub fn range(&self) -> Option<&Range<u64>> {
        match self {
            Self::Read(range) | Self::Write(range) | Self::Discard(range) => Some(range),
            Self::WriteZeroes { range, .. } => Some(range),
            Self::Flush => None,
        }
    }

    /// Bytes that it transfers.
    pub fn transfers(&self) -> u64 {
        match self {
            Self::Read(range) | Self::Write(range) => range.end.saturating_sub(range.start),
            _ => 0,
        }
    }

    /// Whether it changes what is on the disk, and may find no room there.
    pub fn changes(&self) -> bool {
        !matches!(self, Self::Read(_) | Self::Flush)
    }
}

/// Where the bytes of a request come from or go to.
#[derive(Debug)]
pub enum Data {
    None,
    /// A guest's buffers that a write takes its bytes from.
    FromGuest(DeviceReadable),
    /// A guest's buffers that a read puts its bytes into.
    ToGuest(DeviceWritable),
    /// Memory of ours, either way.
    Own(Buffer),
    /// Memory of ours that a write takes its bytes from, and somebody else, too.
    Shared(Arc<Buffer>),
}

impl Data {
    /// How many bytes it holds.
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::FromGuest(data) => data.bytes(),
            Self::ToGuest(data) => data.bytes(),
            Self::Own(data) => data.len(),
            Self::Shared(data) => data.len(),
        }
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A request on its way.
#[derive(Debug)]
pub struct Request {
    pub work: Work,
    /// As many bytes as `work` reads or writes.
    pub data: Data,
    /// Whether it counts as done only once it is durable, since nobody will send a flush.
    pub durable: bool,
    /// When it was made.
    pub began: Instant,
    /// Whatever its maker knows it by.
    pub token: u64,
    /// Whether it was carried out before, in vain: what it takes of a limit was taken then.
    pub(crate) again: bool,
    /// The filter that made it, by its place; `None`: it entered at the top.
    pub(crate) maker: Option<usize>,
}

impl Request {
    /// A request that enters a stack at the top.
    pub fn new(work: Work, data: Data, token: u64, now: Instant) -> Self {
        Self {
            work,
            data,
            durable: false,
            began: now,
            token,
            again: false,
            maker: None,
        }
    }

    /// One that found no room and is to be carried out once more.
    pub fn once_more(self) -> Self {
        Self {
            again: true,
            ..self
        }
    }
}

/// What came of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed(Errno),
    /// The image cannot do this; nothing was done.
    Unsupported,
}

impl Outcome {
    /// Whether the image's file system had no room for it.
    pub fn lacks_room(self) -> bool {
        matches!(self, Self::Failed(Errno::NOSPC | Errno::DQUOT))
    }
}
