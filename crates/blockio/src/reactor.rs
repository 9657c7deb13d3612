//! What a disk's thread waits for: its requests, and descriptors that become readable, all in one io_uring.
//!
//! Who owns the state: the thread that made the value; the kernel lets no other use the ring. Entries that do not fit wait
//! here, in order.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

use io_uring::squeue::Entry;
use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use crate::Error;

/// Entries that go to the kernel with one call.
const ENTRIES: u32 = 256;
/// Completions that the kernel keeps for us: more than that end all watches, which is mended and takes time.
const COMPLETIONS: u32 = 32768;
/// Marks what answers to a question of the reactor's own.
const OWN: u64 = u64::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What it was asked with.
    pub token: u64,
    /// As the kernel says it: a count, or an error below 0.
    pub result: i32,
    /// Of a watch: whether it goes on.
    pub more: bool,
}

/// An io_uring for one thread.
pub struct Reactor {
    ring: IoUring,
    backlog: VecDeque<Entry>,
    /// What is watched, by token, with a descriptor of our own.
    watched: HashMap<u64, OwnedFd>,
    /// It is of no use to another thread.
    stays: PhantomData<*const ()>,
}

impl Reactor {
    /// For the thread that calls this, and no other.
    pub fn new() -> Result<Self, Error> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(ENTRIES)
            .map_err(|source| Error::Ring {
                action: "begin",
                source,
            })?;
        Ok(Self {
            ring,
            backlog: VecDeque::new(),
            watched: HashMap::new(),
            stays: PhantomData,
        })
    }

    /// Tells of each time that `fd` becomes readable, until [`Self::unwatch`]. A token may be any number but the highest.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Error> {
        let own = fd.try_clone_to_owned().map_err(|source| Error::System {
            action: "watch a descriptor",
            source,
        })?;
        self.poll(own.as_raw_fd(), token);
        self.watched.insert(token, own);
        // The kernel takes the file at once, so that nobody's number is mistaken for it.
        let _ = self.ring.submit();
        Ok(())
    }

    fn poll(&mut self, fd: RawFd, token: u64) {
        let poll = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true);
        // SAFETY: the entry refers to no memory; the kernel holds the file for as long as it is polled.
        unsafe { self.push(poll.build().user_data(token)) };
    }

    /// Ends a watch, also one of which an event is just on its way (removing a poll would leave that as it is). An event of
    /// it may still come, and the kernel holds its file until then.
    pub fn unwatch(&mut self, token: u64) {
        self.watched.remove(&token);
        let all = CancelBuilder::user_data(token).all();
        let cancel = opcode::AsyncCancel2::new(all).build().user_data(OWN);
        // SAFETY: the entry refers to no memory.
        unsafe { self.push(cancel) };
    }

    /// Gives an entry to the kernel, at the latest with the next [`Self::wait`].
    ///
    /// # Safety
    /// What the entry refers to must stay where it is, and be touched by nobody whom the kernel may disturb, until its
    /// completion has come.
    pub(crate) unsafe fn push(&mut self, entry: Entry) {
        self.backlog.push_back(entry);
        self.hand_over();
    }

    /// Waits until something happens, or until the time has come, and adds what happened to `events`.
    pub fn wait(&mut self, until: Option<Instant>, events: &mut Vec<Event>) -> Result<(), Error> {
        self.hand_over();
        match self.enter(until) {
            Ok(_) => {}
            Err(error) if passes(&error) => {}
            Err(source) => {
                return Err(Error::Ring {
                    action: "wait",
                    source,
                });
            }
        }
        let completions = self.ring.completion();
        let told = completions.filter(|entry| entry.user_data() != OWN);
        let first = events.len();
        events.extend(told.map(|entry| Event {
            token: entry.user_data(),
            result: entry.result(),
            more: cqueue::more(entry.flags()),
        }));
        for event in events.iter().skip(first) {
            self.watch_on(event);
        }
        self.hand_over();
        Ok(())
    }

    /// The kernel ends a watch where it has no room for one more event.
    fn watch_on(&mut self, event: &Event) {
        if !event.more
            && event.result >= 0
            && let Some(fd) = self.watched.get(&event.token)
        {
            self.poll(fd.as_raw_fd(), event.token);
        }
    }

    fn enter(&self, until: Option<Instant>) -> io::Result<usize> {
        // What waits here must not wait for what may never come.
        let want = usize::from(self.backlog.is_empty());
        let Some(until) = until else {
            return self.ring.submit_and_wait(want);
        };
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::from(left);
        let args = SubmitArgs::new().timespec(&left);
        self.ring.submitter().submit_with_args(want, &args)
    }

    /// As many of the waiting entries as there is room for.
    fn hand_over(&mut self) {
        while !self.backlog.is_empty() {
            let mut queue = self.ring.submission();
            while let Some(entry) = self.backlog.front() {
                // SAFETY: whoever called `push` saw to what the entry refers to.
                match unsafe { queue.push(entry) } {
                    Ok(()) => self.backlog.pop_front(),
                    Err(_) => break,
                };
            }
            drop(queue);
            if self.backlog.is_empty() || self.ring.submit().is_err() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor")
            .field("backlog", &self.backlog.len())
            .finish_non_exhaustive()
    }
}

/// Errors after which one looks at what came and waits again.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;
    use std::time::Duration;

    #[test]
    fn what_becomes_readable_is_told_each_time_and_no_more_once_it_is_not_watched() {
        let mut reactor = Reactor::new().unwrap();
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        reactor.watch(fd.as_fd(), 7).unwrap();
        for _ in 0..3 {
            rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
            let mut events = Vec::new();
            reactor.wait(None, &mut events).unwrap();
            let seen: Vec<(u64, bool)> = events.iter().map(|one| (one.token, one.more)).collect();
            assert_eq!(seen, [(7, true)]);
        }
        reactor.unwatch(7);
        let mut events = Vec::new();
        reactor.wait(None, &mut events).unwrap();
        assert!(events.iter().all(|one| !one.more), "{events:?}");
        rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
        events.clear();
        let until = Instant::now() + Duration::from_millis(20);
        reactor.wait(Some(until), &mut events).unwrap();
        assert_eq!(events, []);
        assert!(Instant::now() >= until);
    }

    #[test]
    fn more_than_the_ring_holds_is_not_lost() {
        let mut reactor = Reactor::new().unwrap();
        let count = u64::from(ENTRIES + COMPLETIONS) * 2;
        for token in 0..count {
            // SAFETY: the entry refers to nothing.
            unsafe { reactor.push(opcode::Nop::new().build().user_data(token)) };
        }
        let mut events = Vec::new();
        while (events.len() as u64) < count {
            reactor.wait(None, &mut events).unwrap();
        }
        assert!(events.iter().map(|event| event.token).eq(0..count));
    }

    #[test]
    fn a_watch_that_the_kernel_ended_for_want_of_room_goes_on() {
        let mut reactor = Reactor::new().unwrap();
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        reactor.watch(fd.as_fd(), 7).unwrap();
        // More completions than there is room for, without a look at any of them.
        for _ in 0..=COMPLETIONS + 2 * ENTRIES {
            // SAFETY: the entry refers to nothing.
            unsafe { reactor.push(opcode::Nop::new().build().user_data(1)) };
        }
        rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
        let mut heard = 0;
        for _ in 0..2 {
            let mut events = Vec::new();
            let until = Instant::now() + Duration::from_secs(60);
            while !events.iter().any(|event: &Event| event.token == 7) {
                assert!(Instant::now() < until);
                events.clear();
                reactor.wait(Some(until), &mut events).unwrap();
            }
            heard += 1;
            rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
        }
        assert_eq!(heard, 2);
    }
}
