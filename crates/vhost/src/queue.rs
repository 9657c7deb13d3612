//! One queue of a disk: from QEMU's words to a ring that runs, and from a head to its answer.
//!
//! Who owns the state: the disk's thread. A head that was taken is here, and in the in-flight area, until it is answered.
//!
//! What it refuses: a head that is made available while it is under way. A queue whose driver did what no driver does is
//! broken: what is under way is answered, and nothing more is taken until it is set up anew.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use godwit_blockio::{Bottom, Data, Outcome, Request, Stack, Work};
use godwit_guestmem::{DeviceMemory, RamFile};
use rustix::fs::OFlags;
use rustix::io::Errno;
use vm_memory::{Bytes as _, GuestAddress};

use crate::block::{Asked, Geometry, Status, understand};
use crate::inflight::Inflight;
use crate::ring::{Descriptor, Place, Ring};
use crate::{Error, RING_MAX};

/// So many bytes are under way at most, and what one request has above that: each takes memory of the kernel's.
const BYTES_MAX: u64 = 32 << 20;

/// What the queues of a disk have in common. RAM file and geometry are the disk's own, all else is what a front end says.
pub(crate) struct Guest {
    pub ram: Arc<RamFile>,
    pub memory: DeviceMemory,
    pub geometry: Geometry,
    pub inflight: Option<Inflight>,
    /// What the driver has taken of what was offered.
    pub features: u64,
    /// Interrupts and kicks by index.
    pub by_index: bool,
    /// Whether a write is done only once it is durable.
    pub durable: bool,
    /// Whether rings begin disabled: where the front end speaks of that at all.
    pub enables: bool,
    /// Counts the connections, so that what belongs to an older one is known by its token.
    pub life: u16,
}

impl Guest {
    /// Of whom no front end has said anything; so many connections were before.
    pub(crate) fn new(ram: Arc<RamFile>, geometry: Geometry, life: u16) -> Self {
        Self {
            ram,
            memory: DeviceMemory::default(),
            geometry,
            inflight: None,
            features: 0,
            by_index: false,
            durable: false,
            enables: false,
            life,
        }
    }

    /// The same guest for the next connection.
    pub(crate) fn next(&self) -> Self {
        let (ram, geometry) = (Arc::clone(&self.ram), self.geometry.clone());
        Self::new(ram, geometry, self.life.wrapping_add(1))
    }
}

/// A head that is under way.
#[derive(Debug)]
struct Pending {
    status: u64,
    reads: u32,
    /// Whether it was under way before.
    again: bool,
}

/// What QEMU has said of a queue, and the ring if it runs.
pub(crate) struct Queue {
    number: u16,
    pub size: u16,
    pub base: u16,
    pub place: Option<Place>,
    pub enabled: bool,
    pub kick: Option<OwnedFd>,
    pub call: Option<OwnedFd>,
    /// Whether QEMU waits for the queue to end.
    pub ending: bool,
    ring: Option<Ring>,
    broken: bool,
    pending: Vec<Option<Pending>>,
    under_way: usize,
    /// Of them, those that were under way before.
    again: usize,
    left_over: VecDeque<u16>,
    counter: u64,
    chain: Vec<Descriptor>,
}

impl Queue {
    /// Those of a disk, of which no front end has said anything.
    pub(crate) fn all(geometry: &Geometry) -> Vec<Self> {
        (0..geometry.queues).map(Self::new).collect()
    }

    fn new(number: u16) -> Self {
        Self {
            number,
            size: 0,
            base: 0,
            place: None,
            enabled: false,
            kick: None,
            call: None,
            ending: false,
            ring: None,
            broken: false,
            pending: (0..RING_MAX).map(|_| None).collect(),
            under_way: 0,
            again: 0,
            left_over: VecDeque::new(),
            counter: 0,
            chain: Vec::new(),
        }
    }

    /// Begins the ring that was described. Returns how many requests are to be carried out again.
    pub(crate) fn begin(&mut self, guest: &Guest) -> Result<usize, Error> {
        self.enabled |= !guest.enables;
        let place = self
            .place
            .ok_or_else(|| Error::guest("a queue without rings"))?;
        let place = Place {
            size: self.size,
            ..place
        };
        let mut ring = Ring::new(&guest.memory, place, guest.by_index, self.base)?;
        self.stop();
        if let Some(inflight) = &guest.inflight {
            let (heads, counter) = inflight.left_over(self.number, self.size, ring.used());
            self.counter = counter;
            let count = u16::try_from(heads.len()).unwrap_or(RING_MAX);
            let next = ring.used().wrapping_add(count);
            if next != self.base {
                // It knows an older one where a back end died, or none: what was taken is answered, or noted as under way.
                let (queue, base) = (self.number, self.base);
                tracing::debug!(
                    queue,
                    base,
                    next,
                    "a queue goes on from where its ring is, and not from where QEMU says"
                );
            }
            ring.set_next(next);
            self.left_over = heads.into();
        }
        self.ring = Some(ring);
        Ok(self.left_over.len())
    }

    /// Forgets the ring; what is under way is answered by nobody.
    pub(crate) fn stop(&mut self) {
        self.ring = None;
        self.broken = false;
        self.ending = false;
        self.pending.iter_mut().for_each(|pending| *pending = None);
        (self.under_way, self.again) = (0, 0);
        self.left_over.clear();
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Whether the ring runs.
    pub(crate) fn runs(&self) -> bool {
        self.ring.is_some()
    }

    /// Requests of the ring that are not answered, with those that are to be carried out again.
    pub(crate) fn unanswered(&self) -> usize {
        self.under_way + self.left_over.len()
    }

    /// Those that are to be carried out again.
    pub(crate) fn left_over(&self) -> usize {
        self.left_over.len()
    }

    /// Whether the ring may end: nothing is under way, and nothing left to be carried out again that can be.
    pub(crate) fn is_done(&self) -> bool {
        self.under_way == 0 && (self.left_over.is_empty() || self.broken || !self.runs())
    }

    /// The index of what would be taken next.
    pub(crate) fn next(&self) -> u16 {
        self.ring.as_ref().map_or(self.base, Ring::next)
    }

    /// Takes what the driver made available, as much as there is and at most a ring of it. Returns whether there is more.
    pub(crate) fn take_all<B: Bottom>(
        &mut self,
        guest: &Guest,
        stack: &mut Stack<B>,
        new_ones: bool,
        now: Instant,
    ) -> Result<bool, Error> {
        // A queue that is to end carries out what is left over, enabled or not: else it would never end.
        if self.broken || !(self.enabled || self.ending) {
            return Ok(false);
        }
        for _ in 0..RING_MAX {
            let full = stack.bytes_under_way() >= BYTES_MAX;
            if full || self.left_over.is_empty() && stack.opens_at(now).is_some() {
                return Ok(false);
            }
            let Some((head, again)) = self.next_head(guest, new_ones)? else {
                return self.ask_for_kick(guest, new_ones);
            };
            self.take(head, again, guest, stack, now)?;
        }
        Ok(true)
    }

    fn next_head(&mut self, guest: &Guest, new_ones: bool) -> Result<Option<(u16, bool)>, Error> {
        if let Some(head) = self.left_over.pop_front() {
            return Ok(Some((head, true)));
        }
        // One that is new might write what an older one wrote already.
        if !new_ones || self.ending || self.again > 0 || !self.enabled {
            return Ok(None);
        }
        let Some(ring) = &mut self.ring else {
            return Ok(None);
        };
        Ok(ring.take(&guest.memory)?.map(|head| (head, false)))
    }

    fn ask_for_kick(&self, guest: &Guest, new_ones: bool) -> Result<bool, Error> {
        let takes = new_ones && !self.ending && self.again == 0 && self.enabled;
        match &self.ring {
            Some(ring) => Ok(ring.ask_for_kick(&guest.memory)? && takes),
            None => Ok(false),
        }
    }

    fn take<B: Bottom>(
        &mut self,
        head: u16,
        again: bool,
        guest: &Guest,
        stack: &mut Stack<B>,
        now: Instant,
    ) -> Result<(), Error> {
        let Some(ring) = &self.ring else {
            return Ok(());
        };
        let free = self
            .pending
            .get(usize::from(head))
            .is_some_and(Option::is_none);
        if !free {
            return Err(Error::guest(format!(
                "it made descriptor {head} available while it was in use"
            )));
        }
        if let Some(inflight) = &guest.inflight {
            inflight.took(self.number, head, self.counter);
        }
        self.counter = self.counter.wrapping_add(1);
        ring.chain(&guest.memory, head, &mut self.chain)?;
        let asked = understand(&self.chain, &guest.memory, &guest.ram, &guest.geometry)?;
        let Asked {
            status,
            reads,
            work,
        } = asked;
        if let Some(slot) = self.slot(head) {
            *slot = Some(Pending {
                status,
                reads,
                again,
            });
        }
        self.under_way += 1;
        self.again += usize::from(again);
        match work {
            Ok((work, data)) => {
                stack.submit(self.request(work, data, head, guest, now), now);
                Ok(())
            }
            Err(status) => self.answer(head, status, guest),
        }
    }

    fn request(&self, work: Work, data: Data, head: u16, guest: &Guest, now: Instant) -> Request {
        let token = u64::from(guest.life) << 32 | u64::from(self.number) << 16 | u64::from(head);
        let durable = guest.durable && work.changes();
        let mut request = Request::new(work, data, token, now);
        request.durable = durable;
        request
    }

    fn slot(&mut self, head: u16) -> Option<&mut Option<Pending>> {
        self.pending.get_mut(usize::from(head))
    }

    /// The stack is done with a request of this queue.
    pub(crate) fn finished(
        &mut self,
        head: u16,
        outcome: Outcome,
        guest: &Guest,
    ) -> Result<(), Error> {
        let status = match outcome {
            Outcome::Done => Status::Ok,
            Outcome::Failed(_) => Status::Failed,
            Outcome::Unsupported => Status::Unsupported,
        };
        self.answer(head, status, guest)
    }

    fn answer(&mut self, head: u16, status: Status, guest: &Guest) -> Result<(), Error> {
        let Some(pending) = self.slot(head).and_then(Option::take) else {
            return Ok(());
        };
        self.under_way -= 1;
        self.again -= usize::from(pending.again);
        let Some(ring) = &mut self.ring else {
            return Ok(());
        };
        let written = guest
            .memory
            .write_obj(status as u8, GuestAddress(pending.status));
        written
            .map_err(|error| Error::guest(format!("a status outside of its memory: {error}")))?;
        let reads = match status {
            Status::Ok => pending.reads,
            _ => 0,
        };
        if let Some(inflight) = &guest.inflight {
            inflight.answers(self.number, head);
        }
        let used = ring.answer(&guest.memory, head, reads.saturating_add(1))?;
        if let Some(inflight) = &guest.inflight {
            inflight.answered(self.number, head, used);
        }
        Ok(())
    }

    /// Interrupts the driver if it wants that.
    pub(crate) fn notify(&mut self, guest: &Guest) -> Result<(), Error> {
        let wanted = match &mut self.ring {
            Some(ring) => ring.wants_interrupt(&guest.memory)?,
            None => false,
        };
        if wanted {
            self.interrupt();
        }
        Ok(())
    }

    /// Whom to interrupt from now on; nobody waits for whoever that is.
    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) -> Result<(), Error> {
        if let Some(call) = &call {
            must_be_eventfd(call)?;
            let set = rustix::fs::fcntl_getfl(call)
                .and_then(|flags| rustix::fs::fcntl_setfl(call, flags | OFlags::NONBLOCK));
            set.map_err(unusable)?;
        }
        self.call = call;
        // What was answered while there was nobody to call.
        self.interrupt();
        Ok(())
    }

    /// Interrupts the driver in any case. A QEMU that lets us wait for that, which it can by taking back that nobody waits, is
    /// given up once this thread was roused.
    pub(crate) fn interrupt(&mut self) {
        // An eventfd that is full has been signalled already.
        let written = self
            .call
            .as_ref()
            .map(|call| rustix::io::write(call, &1u64.to_ne_bytes()));
        if let Some(Err(Errno::INTR)) = written {
            self.call = None;
            tracing::warn!(
                queue = self.number,
                "QEMU lets a disk wait for its interrupts: it gets no more of them"
            );
        }
    }

    /// The driver did what no driver does. Returns whether that is news.
    pub(crate) fn broke(&mut self) -> bool {
        !std::mem::replace(&mut self.broken, true)
    }
}

fn unusable(error: impl Into<std::io::Error>) -> Error {
    Error::system("use a descriptor of a queue", error)
}

/// Nothing else is written to or waited for: a file may be on storage that hangs, and of a device nobody knows what it does.
pub(crate) fn must_be_eventfd(fd: &OwnedFd) -> Result<(), Error> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let kind = std::fs::read_link(link).map_err(unusable)?;
    match kind.as_os_str() == "anon_inode:[eventfd]" {
        true => Ok(()),
        false => Err(unusable(Errno::INVAL)),
    }
}
