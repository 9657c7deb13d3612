//! One request of a disk, and what came of it.
//!
//! Who owns the state: the value goes from hand to hand, with the buffers in it; who has it is responsible for it. It is
//! never copied and never dropped unanswered by the product.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use godwit_guestmem::{DeviceReadable, DeviceWritable};
use godwit_mirror::Kind;
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

    /// As a mirror has it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Read(_) => Kind::Read,
            Self::Write(_) => Kind::Write,
            Self::Flush => Kind::Flush,
            Self::Discard(_) => Kind::Discard,
            Self::WriteZeroes { .. } => Kind::Zeroes,
        }
    }

    /// Bytes that it transfers.
    pub fn transfers(&self) -> u64 {
        match self {
            Self::Read(range) | Self::Write(range) => range.end.saturating_sub(range.start),
            _ => 0,
        }
    }

    /// Bytes that storage may have to read or write for it: also those of zeroes whose room is to stay, which a device writes that cannot only note
    /// them.
    pub fn burdens(&self) -> u64 {
        match self {
            Self::WriteZeroes {
                range,
                unmap: false,
            } => range.end.saturating_sub(range.start),
            _ => self.transfers(),
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

/// Which file a request is for, and how its bytes are counted there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Place {
    /// The disk's own image, or whatever lies above it.
    #[default]
    Own,
    /// The layer of this number, from 1 on, in bytes of the disk.
    Layer(usize),
    /// The same, in bytes of its file.
    Inside(usize),
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
    /// Said by the lowest filter of a flush that failed: no data was lost, only a block of its own found no room.
    pub(crate) lost_nothing: bool,
    /// Told by the lowest filter to what carries requests out.
    pub(crate) place: Place,
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
            lost_nothing: false,
            place: Place::Own,
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

    /// Whether the storage below failed it, which may be there again later: what the kernel says of devices and paths that are down. Blocks
    /// that cannot be read for good are not among it, as far as it tells them apart.
    pub fn storage_fails(self) -> bool {
        let Self::Failed(error) = self else {
            return false;
        };
        matches!(
            error,
            Errno::IO | Errno::NOLINK | Errno::TIMEDOUT | Errno::NODEV | Errno::REMOTEIO
        )
    }
}

/// For what a guest's requests wait that failed: they are carried out once more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// Writes and what else changes the image, for room on its file system; and flushes of a delta that found none for a block of its
    /// tables alone, and lost nothing.
    pub for_room: bool,
    /// Reads, too, for storage that fails.
    pub for_storage: bool,
}

impl Waits {
    /// Whether a request that came to this waits. Of storage no flush does, and nothing that failed to become durable: the kernel tells once that
    /// data is lost, perhaps that of others, and what is tried again would seem to succeed.
    pub fn keep(self, request: &Request, outcome: Outcome) -> bool {
        let writes = request.work.changes() || request.lost_nothing;
        let for_room = self.for_room && writes && outcome.lacks_room();
        let makes_durable = request.durable || request.work == Work::Flush;
        for_room || self.for_storage && outcome.storage_fails() && !makes_durable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_for_what_its_disk_is_told_to_wait_for_and_nothing_that_makes_durable() {
        let [room, storage, path] = [Errno::NOSPC, Errno::IO, Errno::NOLINK].map(Outcome::Failed);
        let of = |work: Work, durable: bool| Request {
            durable,
            ..Request::new(work, Data::None, 0, Instant::now())
        };
        let (read, write) = (Work::Read(0..512), Work::Write(0..512));
        for (for_room, for_storage) in [(true, false), (false, true), (true, true), (false, false)]
        {
            let waits = Waits {
                for_room,
                for_storage,
            };
            let kept = |work: &Work, durable| {
                let request = of(work.clone(), durable);
                [room, storage, path].map(|outcome| waits.keep(&request, outcome))
            };
            assert_eq!(kept(&write, false), [for_room, for_storage, for_storage]);
            assert_eq!(kept(&read, false), [false, for_storage, for_storage]);
            assert_eq!(kept(&write, true), [for_room, false, false]);
            assert_eq!(kept(&Work::Flush, false), [false; 3]);
            let mut flush = of(Work::Flush, false);
            flush.lost_nothing = true;
            let kept = [room, storage, path].map(|outcome| waits.keep(&flush, outcome));
            assert_eq!(kept, [for_room, false, false]);
            let write = of(write.clone(), false);
            for other in [
                Outcome::Failed(Errno::NODATA),
                Outcome::Failed(Errno::NXIO),
                Outcome::Done,
                Outcome::Unsupported,
            ] {
                assert!(!waits.keep(&write, other));
            }
        }
    }
}
