//! Carries out requests on an image with io_uring.
//!
//! Who owns the state: a request, with the buffers in it, stays in its slot until the kernel is done with it. An engine that
//! is dropped earlier leaves those buffers where they are for good, since the kernel may still write to them.
//!
//! What it does for others: buffers of a guest that direct IO does not take are read into or written from memory of ours,
//! piece by piece and few at a time, so that no guest decides how much memory that takes; a transfer that the kernel cut
//! short goes on where it ended; pages of a guest that were written are told of before the outcome is.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use godwit_types::plant::planted;
use io_uring::squeue::Entry;
use io_uring::{opcode, types};
use rustix::io::Errno;

use crate::layers::Layers;
use crate::request;
use crate::{Bottom, Buffer, Data, Error, Event, Image, Outcome, Reactor, Request, Stack, Work};

/// Tokens from here on are the engine's: this plus the slot's number.
const FIRST: u64 = 1 << 62;
/// Tokens from here on are bells: this plus the filter's place.
const BELLS: u64 = 3 << 61;
/// Most bytes that are copied at once for a request whose buffers direct IO does not take.
const PIECE: usize = 1 << 20;
/// Most requests that have memory of ours for that at the same time.
const COPYING: usize = 32;
/// How often a request is begun anew that the kernel could not begin.
const TRIES: u8 = 16;

/// An image and the requests that are under way on it.
#[derive(Debug)]
pub struct Engine {
    reactor: Reactor,
    image: Image,
    /// The deltas above it.
    layers: Layers,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Requests that are copied.
    copying: usize,
    /// Those that wait until fewer are.
    waiting: VecDeque<Request>,
}

#[derive(Debug)]
struct Slot {
    request: Request,
    /// Takes the place of buffers that direct IO does not take, a piece at a time.
    bounce: Option<Bounce>,
    /// Bytes that were transferred.
    done: usize,
    /// What is left of a guest's buffers after a transfer was cut short.
    rest: Vec<libc::iovec>,
    /// Whether the work is done and is being made durable.
    syncing: bool,
    /// How often it may still be begun anew.
    tries: u8,
}

/// A piece of a request in memory of ours.
#[derive(Debug)]
struct Bounce {
    buffer: Buffer,
    /// Bytes of the request before it.
    skip: usize,
    /// Bytes of it.
    len: usize,
}

impl Engine {
    /// For the thread that calls this, and no other.
    pub fn new(image: Image) -> Result<Self, Error> {
        Ok(Self {
            reactor: Reactor::new()?,
            image,
            layers: Layers::default(),
            slots: Vec::new(),
            free: Vec::new(),
            copying: 0,
            waiting: VecDeque::new(),
        })
    }

    /// The image, while the kernel has no request of it.
    pub fn image(&mut self) -> Option<&mut Image> {
        (self.under_way() == 0).then_some(&mut self.image)
    }

    /// The deltas above the image, while the kernel has no request.
    pub(crate) fn layers(&mut self) -> Option<&mut Layers> {
        (self.under_way() == 0).then_some(&mut self.layers)
    }

    /// What is written, and whether its storage is known to have lost what was.
    pub(crate) fn written(&self) -> (&Image, bool) {
        match self.layers.0.last() {
            Some(top) => (top.image(), top.is_lost()),
            None => (&self.image, false),
        }
    }

    /// The image's own descriptor once more, also while the kernel has requests.
    pub fn lend(&self) -> std::io::Result<OwnedFd> {
        self.image.as_fd().try_clone_to_owned()
    }

    /// Goes on with another image of the same disk; false, and it does not, while the kernel has requests of this one.
    #[must_use]
    pub fn replace(&mut self, image: Image) -> bool {
        let is_idle = self.under_way() == 0;
        if is_idle {
            self.image = image;
        }
        is_idle
    }

    /// Looks how large the image is now.
    pub fn measure(&mut self) -> Result<u64, Error> {
        self.image.measure()
    }

    /// Tells of each time that `fd` becomes readable, until [`Self::unwatch`]. A token is any number below 2^62.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Error> {
        if token >= FIRST {
            return Err(Error::System {
                action: "watch a descriptor",
                source: std::io::ErrorKind::InvalidInput.into(),
            });
        }
        self.reactor.watch(fd, token)
    }

    /// Ends a watch; an event of it may still come.
    pub fn unwatch(&mut self, token: u64) {
        self.reactor.unwatch(token);
    }

    /// Requests that the kernel has, or that wait for memory.
    pub fn under_way(&self) -> usize {
        self.slots.len() - self.free.len() + self.waiting.len()
    }

    /// Whether this event is the engine's, to be given to [`Self::take`].
    fn owns(event: &Event) -> bool {
        event.token >= FIRST
    }

    /// Takes an event of the kernel; a request that is finished by it comes back.
    fn take(&mut self, event: &Event) -> Option<(Request, Outcome)> {
        let index = usize::try_from(event.token.checked_sub(FIRST)?).ok()?;
        let slot = self.slots.get_mut(index)?.as_mut()?;
        match slot.took(event.result) {
            Next::Again => {
                self.issue(index);
                None
            }
            Next::Ended(outcome) => {
                let slot = self.slots.get_mut(index)?.take()?;
                self.free.push(index);
                if slot.bounce.is_some() {
                    self.copying -= 1;
                }
                Some(slot.finish(outcome))
            }
        }
    }

    /// Begins what waited for memory; what cannot begin is given to `refused`.
    fn resume(&mut self, mut refused: impl FnMut(Request, Outcome)) {
        while self.copying < COPYING {
            let Some(request) = self.waiting.pop_front() else {
                return;
            };
            if let Some((request, outcome)) = self.start(request) {
                refused(request, outcome);
            }
        }
    }

    fn keep(&mut self, slot: Slot) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(slot);
                index
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() - 1
            }
        }
    }

    fn issue(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        let (image, start) = self.layers.at(slot.request.place, &self.image);
        let fd = types::Fd(image.as_fd().as_raw_fd());
        let entry = slot.entry(fd, start).user_data(FIRST + index as u64);
        // SAFETY: the entry refers to buffers that the slot owns and that do not move with it (memory of a `Vec`, or the
        // guest's), and the slot stays until the completion, which this module alone takes and the kernel tells once; beyond
        // the engine's end if need be. The image stays open as long as the engine, layers go only while nothing is under way, and
        // the kernel holds either from then on.
        unsafe { self.reactor.push(entry) };
    }

    /// Whether direct IO takes the request's buffers as they are.
    fn fits(&self, data: &Data, place: request::Place) -> bool {
        let (image, _) = self.layers.at(place, &self.image);
        let alignment = image.alignment();
        let (address, len) = (alignment.memory as usize, alignment.offset as usize);
        match data {
            Data::FromGuest(data) => data.are_aligned(address, len),
            Data::ToGuest(data) => data.are_aligned(address, len),
            Data::None | Data::Own(_) | Data::Shared(_) => true,
        }
    }

    /// Whether a request is one for this image.
    fn takes(&self, request: &Request) -> bool {
        let Some(range) = request.work.range() else {
            return true;
        };
        let is_read = matches!(request.work, Work::Read(_));
        if is_read && matches!(request.data, Data::Shared(_)) {
            return false;
        }
        let transfers = is_read || matches!(request.work, Work::Write(_));
        let len = range.end.checked_sub(range.start);
        let whole = !transfers || len == Some(request.data.len() as u64);
        let (image, start) = self.layers.at(request.place, &self.image);
        let end = range.end.checked_add(start);
        len.is_some() && whole && end.is_some_and(|end| end <= image.bytes())
    }
}

impl Bottom for Engine {
    fn start(&mut self, request: Request) -> Option<(Request, Outcome)> {
        if !self.takes(&request) {
            return Some((request, Outcome::Failed(Errno::INVAL)));
        }
        let fits = self.fits(&request.data, request.place);
        if !fits && self.copying >= COPYING {
            self.waiting.push_back(request);
            return None;
        }
        let mut slot = Slot {
            request,
            bounce: None,
            done: 0,
            rest: Vec::new(),
            syncing: false,
            tries: TRIES,
        };
        if !fits {
            slot.bounce = Some(Bounce {
                buffer: Buffer::zeroed(slot.request.data.len().min(PIECE)),
                skip: 0,
                len: 0,
            });
            if let Err(error) = slot.next_piece() {
                return Some((slot.request, Outcome::Failed(error)));
            }
            self.copying += 1;
        }
        let index = self.keep(slot);
        self.issue(index);
        None
    }

    fn listen(&mut self, place: usize, bell: Option<BorrowedFd<'_>>) {
        let token = BELLS + place as u64;
        match bell {
            None => self.reactor.unwatch(token),
            // Who is not heard is woken by the clock.
            Some(bell) => drop(self.reactor.watch(bell, token)),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.under_way() > 0 {
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

impl Stack<Engine> {
    /// What a disk's thread does between two looks at its queues: waits until something happens, `until` at most or until a
    /// filter wants to be woken, and lets what is finished go up. Events that are not the engine's are added to `others`.
    pub fn turn(&mut self, until: Option<Instant>, others: &mut Vec<Event>) -> Result<(), Error> {
        let soonest = [until, self.wake_at()].into_iter().flatten().min();
        let first = others.len();
        self.bottom.reactor.wait(soonest, others)?;
        let now = Instant::now();
        for event in others.iter().skip(first) {
            if let Some(place) = event.token.checked_sub(BELLS) {
                self.rings(usize::try_from(place).unwrap_or(usize::MAX), now);
            } else if let Some((request, outcome)) = self.bottom.take(event) {
                self.completed(request, outcome, now);
            }
        }
        others.retain(|event| !Engine::owns(event));
        let mut refused = Vec::new();
        self.bottom
            .resume(|request, outcome| refused.push((request, outcome)));
        for (request, outcome) in refused {
            self.completed(request, outcome, now);
        }
        self.wake(now);
        Ok(())
    }
}

/// What comes after an answer of the kernel.
enum Next {
    Again,
    Ended(Outcome),
}

impl Slot {
    /// The kernel has answered.
    fn took(&mut self, result: i32) -> Next {
        let count = match usize::try_from(result) {
            Ok(count) => count,
            Err(_) => return self.failed(Errno::from_raw_os_error(result.saturating_neg())),
        };
        if self.syncing {
            return Next::Ended(Outcome::Done);
        }
        match &self.request.work {
            Work::Read(range) | Work::Write(range) => {
                let whole = (range.end - range.start) as usize;
                self.done = self.done.saturating_add(count);
                if count == 0 && whole > 0 {
                    // The image has become too short: nobody makes it longer by waiting.
                    return Next::Ended(Outcome::Failed(Errno::NXIO));
                }
                self.go_on(whole)
            }
            Work::Flush => Next::Ended(Outcome::Done),
            Work::Discard(_) | Work::WriteZeroes { .. } if self.request.durable => {
                self.syncing = true;
                Next::Again
            }
            Work::Discard(_) | Work::WriteZeroes { .. } => Next::Ended(Outcome::Done),
        }
    }

    /// A transfer has come further.
    fn go_on(&mut self, whole: usize) -> Next {
        let piece = self.bounce.as_ref().map(|piece| piece.skip + piece.len);
        if self.done < piece.unwrap_or(whole) {
            return Next::Again;
        }
        if let Err(error) = self.end_piece().and_then(|()| match self.done < whole {
            true => self.next_piece(),
            false => Ok(()),
        }) {
            return Next::Ended(Outcome::Failed(error));
        }
        match self.done < whole {
            true => Next::Again,
            false => Next::Ended(Outcome::Done),
        }
    }

    /// The guest gets the piece that was read.
    fn end_piece(&mut self) -> Result<(), Errno> {
        let (Some(piece), Data::ToGuest(data)) = (&self.bounce, &mut self.request.data) else {
            return Ok(());
        };
        data.copy_from(piece.skip, &piece.buffer.bytes()[..piece.len])
            .map_err(|_| Errno::NOMEM)
    }

    /// The piece after the bytes that are done; of a write, with the guest's bytes.
    fn next_piece(&mut self) -> Result<(), Errno> {
        let Some(piece) = &mut self.bounce else {
            return Ok(());
        };
        piece.skip = self.done;
        piece.len = (self.request.data.len() - self.done).min(piece.buffer.len());
        let Data::FromGuest(data) = &self.request.data else {
            return Ok(());
        };
        data.copy_to(piece.skip, &mut piece.buffer.bytes_mut()[..piece.len])
            .map_err(|_| Errno::NOMEM)
    }

    fn failed(&mut self, error: Errno) -> Next {
        let allocates = matches!(
            self.request.work,
            Work::Discard(_) | Work::WriteZeroes { .. }
        );
        match error {
            Errno::INTR | Errno::AGAIN if self.tries > 0 => {
                self.tries -= 1;
                Next::Again
            }
            Errno::OPNOTSUPP if allocates && !self.syncing => Next::Ended(Outcome::Unsupported),
            // The kernel tells once that data which it had taken is lost. Tried again this would seem to succeed.
            Errno::NOSPC | Errno::DQUOT if self.syncing || self.request.work == Work::Flush => {
                Next::Ended(Outcome::Failed(Errno::IO))
            }
            error => Next::Ended(Outcome::Failed(error)),
        }
    }

    /// The request as it goes up: pages that a guest was given are told of.
    fn finish(self, outcome: Outcome) -> (Request, Outcome) {
        let mut request = self.request;
        if let Data::ToGuest(data) = &mut request.data {
            data.written();
        }
        (request, outcome)
    }

    /// What the kernel is to do next.
    /// of a file in which byte 0 of the request is there.
    fn entry(&mut self, fd: types::Fd, start: u64) -> Entry {
        if self.syncing {
            return sync(fd);
        }
        match self.request.work.clone() {
            Work::Flush if planted("flush-acknowledged-early") => opcode::Nop::new().build(),
            Work::Read(range) => self.read(fd, start + range.start + self.done as u64),
            Work::Write(range) => self.write(fd, start + range.start + self.done as u64),
            Work::Flush => sync(fd),
            Work::Discard(range) => allocate(fd, start, &range, libc::FALLOC_FL_PUNCH_HOLE),
            Work::WriteZeroes { range, unmap } => {
                let mode = if unmap {
                    libc::FALLOC_FL_PUNCH_HOLE
                } else {
                    libc::FALLOC_FL_ZERO_RANGE
                };
                allocate(fd, start, &range, mode)
            }
        }
    }

    fn read(&mut self, fd: types::Fd, offset: u64) -> Entry {
        match self.place() {
            Place::One(start, len) => opcode::Read::new(fd, start, len).offset(offset).build(),
            Place::Many(vectors, count) => opcode::Readv::new(fd, vectors, count)
                .offset(offset)
                .build(),
        }
    }

    fn write(&mut self, fd: types::Fd, offset: u64) -> Entry {
        let flags = if self.request.durable {
            libc::RWF_DSYNC
        } else {
            0
        };
        match self.place() {
            Place::One(start, len) => opcode::Write::new(fd, start, len)
                .offset(offset)
                .rw_flags(flags)
                .build(),
            Place::Many(vectors, count) => opcode::Writev::new(fd, vectors, count)
                .offset(offset)
                .rw_flags(flags)
                .build(),
        }
    }

    /// Where the bytes are that are still to be transferred.
    fn place(&mut self) -> Place {
        let done = self.done;
        if let Some(piece) = &mut self.bounce {
            let inside = done - piece.skip..piece.len;
            return Place::of(&mut piece.buffer.bytes_mut()[inside]);
        }
        let vectors = match &mut self.request.data {
            Data::Own(buffer) => return Place::of(&mut buffer.bytes_mut()[done..]),
            // Never of a read: `takes` sees to that.
            Data::Shared(buffer) => return Place::of_shared(&buffer.bytes()[done..]),
            Data::None => return Place::of(&mut []),
            Data::FromGuest(data) => data.iovecs(),
            Data::ToGuest(data) => data.lend(),
        };
        if done > 0 {
            self.rest = after(vectors, done);
            return Place::vectors(&self.rest);
        }
        Place::vectors(vectors)
    }
}

/// Memory as the kernel takes it.
enum Place {
    One(*mut u8, u32),
    Many(*const libc::iovec, u32),
}

impl Place {
    /// More than the kernel transfers at once is cut here, and goes on later.
    fn of(bytes: &mut [u8]) -> Self {
        Self::One(bytes.as_mut_ptr(), most(bytes.len()))
    }

    /// Bytes that the kernel only reads.
    fn of_shared(bytes: &[u8]) -> Self {
        Self::One(bytes.as_ptr().cast_mut(), most(bytes.len()))
    }

    fn vectors(vectors: &[libc::iovec]) -> Self {
        match vectors {
            [one] => Self::One(one.iov_base.cast(), most(one.iov_len)),
            _ => Self::Many(vectors.as_ptr(), most(vectors.len())),
        }
    }
}

fn most(count: usize) -> u32 {
    const MOST: u32 = 1 << 30;
    u32::try_from(count).map_or(MOST, |count| count.min(MOST))
}

/// The vectors without their first `done` bytes.
fn after(vectors: &[libc::iovec], done: usize) -> Vec<libc::iovec> {
    let mut skip = done;
    let mut rest = Vec::with_capacity(vectors.len());
    for vector in vectors {
        let gone = skip.min(vector.iov_len);
        skip -= gone;
        if gone < vector.iov_len {
            rest.push(libc::iovec {
                iov_base: vector.iov_base.wrapping_byte_add(gone),
                iov_len: vector.iov_len - gone,
            });
        }
    }
    rest
}

fn sync(fd: types::Fd) -> Entry {
    let flags = types::FsyncFlags::DATASYNC;
    opcode::Fsync::new(fd).flags(flags).build()
}

fn allocate(fd: types::Fd, start: u64, range: &std::ops::Range<u64>, mode: libc::c_int) -> Entry {
    opcode::Fallocate::new(fd, range.end - range.start)
        .offset(start + range.start)
        .mode(mode | libc::FALLOC_FL_KEEP_SIZE)
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_that_found_no_room_is_an_error_like_any_other_and_a_write_can_be_tried_again() {
        let cases = [
            (Work::Flush, false, Errno::IO),
            (Work::Discard(0..512), true, Errno::IO),
            (Work::Discard(0..512), false, Errno::NOSPC),
            (Work::Write(0..512), false, Errno::NOSPC),
        ];
        for (work, syncing, expected) in cases {
            let mut slot = Slot {
                request: Request::new(work, Data::None, 0, Instant::now()),
                bounce: None,
                done: 0,
                rest: Vec::new(),
                syncing,
                tries: TRIES,
            };
            match slot.failed(Errno::NOSPC) {
                Next::Ended(Outcome::Failed(error)) => assert_eq!(error, expected),
                _ => panic!("{:?} goes on", slot.request.work),
            }
        }
    }
}
