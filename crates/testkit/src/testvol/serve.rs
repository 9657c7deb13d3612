//! The thread that answers the kernel for one volume.
//!
//! Owns the device. The state is shared with the test under one lock, which is never held while something is waited for.
//! Refuses what came while there was no power.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::File;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::disk::Disk;
use super::operations::{self, Listing};
use super::protocol::{Answer, Request, WRITE_BYTES, opcode};
use super::sharing::Sharing;
use super::tree::Tree;
use super::{Chance, Counts, Errno, Settings, Survives};

/// What a test and the serving thread share.
#[derive(Debug)]
pub struct Shared {
    state: Mutex<State>,
    /// Told when the number of held requests has changed.
    pub changed: Condvar,
    wake: OwnedFd,
}

/// A request that the disk is busy with until a time, in the order in which they came.
#[derive(Debug)]
struct Planned {
    until: Instant,
    order: u64,
    request: Request,
}

#[derive(Debug, Default)]
pub struct State {
    pub tree: Tree,
    pub settings: Settings,
    pub counts: Counts,
    pub listings: HashMap<u64, Listing>,
    pub last_listing: u64,
    /// Whether the kernel is to cache no file, and to make several writes of one at a time.
    pub is_direct: bool,
    disk: Disk,
    /// What shares the disk's rate, with the moment before which none of it is done.
    sharing: Sharing<(Instant, Request)>,
    planned: BinaryHeap<Reverse<Planned>>,
    order: u64,
    held: Vec<Request>,
    /// Requests that shall end with an error.
    refused: Vec<Request>,
    without_power: bool,
    stopped: bool,
}

type Answered = (u64, Result<Answer, Errno>);

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.until, self.order).cmp(&(other.until, other.order))
    }
}

impl Shared {
    pub fn new(is_direct: bool) -> io::Result<Self> {
        // SAFETY: gives a new descriptor or an error; it is owned exactly once.
        let wake = unsafe {
            match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        Ok(Self {
            state: Mutex::new(State {
                is_direct,
                ..State::default()
            }),
            changed: Condvar::new(),
            wake,
        })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// Lets the thread look at the state.
    pub fn wake(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: writes 8 bytes from a local array. A counter that is full has woken the thread already.
        unsafe { libc::write(self.wake_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl State {
    pub fn change(&mut self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.settings);
        self.tree.capacity = self.settings.capacity;
    }

    pub fn counts(&self) -> Counts {
        Counts {
            held: self.held.len(),
            ..self.counts
        }
    }

    pub fn power_off(&mut self, survives: Survives) {
        self.without_power = true;
        self.tree.cut(&mut Chance::from(survives));
        self.listings.clear();
        self.held
            .extend(self.sharing.drain().map(|shared| shared.1));
        let planned = std::mem::take(&mut self.planned).into_iter();
        self.held.extend(planned.map(|planned| planned.0.request));
    }

    pub fn refuse_held(&mut self) {
        if self.without_power {
            self.refused.append(&mut self.held);
        }
    }

    pub fn power_on(&mut self) {
        self.without_power = false;
    }

    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// A request that has just come.
    fn take_in(&mut self, request: Request, answers: &mut Vec<Answered>) {
        match request.opcode {
            opcode::FORGET | opcode::BATCH_FORGET => {
                // A message that the kernel cut short cannot be answered either.
                let _ = operations::forget(self, &request);
            }
            opcode::INIT
            | opcode::RELEASE
            | opcode::RELEASEDIR
            | opcode::FLUSH
            | opcode::INTERRUPT
            | opcode::DESTROY => {
                let answer = operations::execute(self, &request);
                answers.push((request.unique, answer));
            }
            _ if self.without_power || self.settings.hangs => self.held.push(request),
            _ => self.begin(request, answers),
        }
    }

    fn begin(&mut self, request: Request, answers: &mut Vec<Answered>) {
        let bytes = match request.opcode {
            opcode::READ | opcode::WRITE => operations::bytes(&request),
            opcode::FSYNC | opcode::FSYNCDIR => 0,
            _ => return self.finish(request, answers),
        };
        let now = Instant::now();
        if self.settings.shares && bytes > 0 && self.settings.bytes_per_second.is_some() {
            self.share(now);
            let earliest = now + self.settings.latency;
            return self.sharing.begin(now, bytes, (earliest, request));
        }
        match self.disk.plan(&self.settings, now, bytes) {
            None => self.finish(request, answers),
            Some(until) => self.plan(until, request),
        }
    }

    fn plan(&mut self, until: Instant, request: Request) {
        self.order += 1;
        self.planned.push(Reverse(Planned {
            until,
            order: self.order,
            request,
        }));
    }

    /// What shares the disk's rate goes on until now. Without a rate all of it has been transferred.
    fn share(&mut self, now: Instant) {
        let rate = self.settings.bytes_per_second.unwrap_or(u64::MAX);
        for (at, (earliest, request)) in self.sharing.ended(now, rate) {
            self.plan(at.max(earliest), request);
        }
    }

    fn finish(&mut self, request: Request, answers: &mut Vec<Answered>) {
        let fails = self.settings.fails;
        let failed = match request.opcode {
            opcode::READ => fails.reads,
            opcode::FSYNC | opcode::FSYNCDIR => fails.syncs,
            opcode::WRITE | opcode::SETATTR | opcode::CREATE | opcode::MKNOD => fails.writes,
            opcode::MKDIR | opcode::SYMLINK | opcode::LINK | opcode::UNLINK => fails.writes,
            opcode::RMDIR | opcode::RENAME | opcode::RENAME2 => fails.writes,
            opcode::SETXATTR | opcode::REMOVEXATTR => fails.writes,
            _ => false,
        };
        let answer = match failed {
            true => Err(libc::EIO),
            false => operations::execute(self, &request),
        };
        answers.push((request.unique, answer));
    }

    /// What can be answered now without anything new.
    fn go_on(&mut self, answers: &mut Vec<Answered>) {
        let refused = self.refused.drain(..);
        answers.extend(refused.map(|request| (request.unique, Err(libc::EIO))));
        if self.without_power || self.settings.hangs {
            return;
        }
        for request in std::mem::take(&mut self.held) {
            self.begin(request, answers);
        }
        let now = Instant::now();
        self.share(now);
        while self.planned.peek().is_some_and(|next| next.0.until <= now) {
            if let Some(next) = self.planned.pop() {
                self.finish(next.0.request, answers);
            }
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let rate = self.settings.bytes_per_second.unwrap_or(u64::MAX);
        let planned = self.planned.peek().map(|next| next.0.until);
        let next = [planned, self.sharing.next_end(rate)];
        let next = next.into_iter().flatten().min();
        next.filter(|_| !self.settings.hangs && !self.without_power)
    }
}

/// Answers the kernel until the volume is ended or nobody has it mounted any more.
pub fn serve(shared: &Shared, device: OwnedFd) {
    let mut device = File::from(device);
    let mut message = vec![0; WRITE_BYTES + 4096];
    loop {
        let mut answers = Vec::new();
        let alive = read_all(shared, &mut device, &mut message, &mut answers);
        let mut state = shared.state();
        state.go_on(&mut answers);
        let (stopped, due) = (state.stopped, state.next_due());
        drop(state);
        shared.changed.notify_all();
        for (unique, answer) in answers {
            send(&mut device, unique, answer);
        }
        if stopped || !alive {
            return;
        }
        wait(device.as_raw_fd(), shared.wake_fd(), due);
    }
}

/// Takes in what has come; false if the volume is mounted nowhere any more.
fn read_all(
    shared: &Shared,
    device: &mut File,
    message: &mut [u8],
    answers: &mut Vec<Answered>,
) -> bool {
    // What waits longest is not to wait for all others.
    for _ in 0..64 {
        let length = match device.read(message) {
            Ok(length) => length,
            Err(error) => match error.raw_os_error() {
                // Interrupted, or the request was withdrawn before it was read.
                Some(libc::EINTR | libc::ENOENT) => continue,
                Some(libc::EAGAIN) => return true,
                _ => return false,
            },
        };
        if let Some(request) = message.get(..length).and_then(Request::parse) {
            shared.state().take_in(request, answers);
        }
        if !answers.is_empty() {
            return true;
        }
    }
    true
}

fn send(device: &mut File, unique: u64, answer: Result<Answer, Errno>) {
    let (error, body) = match answer {
        Ok(answer) => (0, answer.0),
        Err(errno) => (-errno, Vec::new()),
    };
    let length = (16 + body.len()) as u32;
    let head = Answer::default()
        .u32(length)
        .u32(error as u32)
        .u64(unique)
        .0;
    // An answer that nobody waits for any more is refused by the kernel.
    let _ = device.write_vectored(&[IoSlice::new(&head), IoSlice::new(&body)]);
}

/// Waits for the kernel, the test, or the end of what the disk is busy with.
fn wait(device: RawFd, wake: RawFd, due: Option<Instant>) {
    let poll = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut polled = [poll(device), poll(wake)];
    let left = due.map(|due| due.saturating_duration_since(Instant::now()));
    let timeout = left.map(|left| libc::timespec {
        tv_sec: left.as_secs() as libc::time_t,
        tv_nsec: left.subsec_nanos().into(),
    });
    let timeout = timeout
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    let mut count = [0_u8; 8];
    // SAFETY: two valid pollfds, a timeout that lives here or none, no mask; then up to 8 bytes are read into an array
    // from a descriptor that does not block.
    unsafe {
        libc::ppoll(polled.as_mut_ptr(), 2, timeout, std::ptr::null());
        libc::read(wake, count.as_mut_ptr().cast(), count.len());
    }
}
