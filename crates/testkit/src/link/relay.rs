//! The thread of a link: moves frames between two devices and the two models, and sleeps until the next is due.
//!
//! It owns the devices and the models. Commands come in through a channel and are answered from the loop, so that nothing
//! is shared with the data path. It takes real-time priority where it may: it stands for hardware, which does not wait for
//! the software that it carries. A device that cannot be read ends the thread; a frame that the receiver refuses is
//! counted and dropped.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

use super::frame::Frame;
use super::model::Model;
use super::spec::{Counters, Direction, LinkSpec};
use super::tap::{FRAME_BYTES_MAX, Tap};

/// Frames taken from one device before the other, and what is due, get their turn.
const FRAMES_AT_ONCE: usize = 32;

/// What a link is asked, with where the answer goes.
pub enum Command {
    Set(Vec<(Direction, LinkSpec)>, Sender<()>),
    /// Drops everything, or no longer.
    Cut(bool, Sender<()>),
    Count(Sender<Counters>),
}

/// Wakes the thread for a command.
pub struct Bell(OwnedFd);

impl Bell {
    pub fn new() -> io::Result<Self> {
        // SAFETY: gives a new descriptor or an error; it is owned exactly once.
        unsafe {
            match libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    pub fn ring(&self) {
        let one = 1_u64;
        // SAFETY: writes 8 bytes from a local; that it could not since the bell rings already is as good.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn silence(&self) {
        let mut count = 0_u64;
        // SAFETY: reads 8 bytes into a local; nothing to read is fine.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

/// The direction from one device to the other.
struct Lane {
    from: Arc<Tap>,
    to: Arc<Tap>,
    model: Model<Frame>,
}

/// A link's thread before it runs.
pub struct Relay {
    lanes: [Lane; 2],
    bell: Arc<Bell>,
    commands: Receiver<Command>,
    buffer: Vec<u8>,
    scratch: Vec<u8>,
}

impl Relay {
    /// A link between two devices, the first direction being from the first to the second.
    pub fn new(
        taps: [Tap; 2],
        spec: LinkSpec,
        bell: Arc<Bell>,
        commands: Receiver<Command>,
    ) -> Self {
        let [a, b] = taps.map(Arc::new);
        let lane = |from: &Arc<Tap>, to: &Arc<Tap>, stream| Lane {
            from: from.clone(),
            to: to.clone(),
            model: Model::new(spec, stream),
        };
        Self {
            lanes: [lane(&a, &b, 1), lane(&b, &a, 2)],
            bell,
            commands,
            buffer: vec![0; FRAME_BYTES_MAX],
            scratch: Vec::with_capacity(FRAME_BYTES_MAX),
        }
    }

    /// Runs until nobody can send commands any more.
    pub fn run(mut self) -> io::Result<()> {
        hurry();
        let mut is_readable = [true; 2];
        loop {
            for (lane, readable) in self.lanes.iter_mut().zip(is_readable) {
                if readable {
                    take_in(lane, &mut self.buffer)?;
                }
            }
            for lane in &mut self.lanes {
                hand_out(lane, &mut self.scratch);
            }
            let wakes = self
                .lanes
                .iter()
                .filter_map(|lane| lane.model.next_wake_ns());
            let bell_rings;
            (is_readable, bell_rings) = self.sleep(wakes.min())?;
            if bell_rings && !self.obey() {
                return Ok(());
            }
        }
    }

    /// Sleeps until a frame comes in, the bell rings, or the time has come.
    fn sleep(&self, until_ns: Option<u64>) -> io::Result<([bool; 2], bool)> {
        let bell = libc::pollfd {
            fd: self.bell.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let [a, b] = &self.lanes;
        let mut polls = [a.from.poll(), b.from.poll(), bell];
        let left_ns = until_ns.map(|until| until.saturating_sub(now_ns()));
        let timeout = left_ns.map(|left| libc::timespec {
            tv_sec: (left / 1_000_000_000) as libc::time_t,
            tv_nsec: (left % 1_000_000_000) as libc::c_long,
        });
        let timeout = timeout
            .as_ref()
            .map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: three valid pollfds, a timeout that is valid for the call or null, no signal mask.
        let result = unsafe { libc::ppoll(polls.as_mut_ptr(), 3, timeout, std::ptr::null()) };
        if result < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
            return Ok(([false; 2], true));
        }
        let [a, b, bell] = polls.map(|poll| poll.revents != 0);
        Ok(([a, b], bell))
    }

    /// Does what was asked; false when nobody is left to ask.
    fn obey(&mut self) -> bool {
        self.bell.silence();
        loop {
            let now_ns = now_ns();
            let [first, second] = &mut self.lanes;
            // That nobody waits for the answer any more is no error.
            match self.commands.try_recv() {
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
                Ok(Command::Set(specs, done)) => {
                    for (direction, spec) in specs {
                        match direction {
                            Direction::AToB => first.model.set(now_ns, spec),
                            Direction::BToA => second.model.set(now_ns, spec),
                        }
                    }
                    let _ = done.send(());
                }
                Ok(Command::Cut(is_cut, done)) => {
                    first.model.set_cut(now_ns, is_cut);
                    second.model.set_cut(now_ns, is_cut);
                    let _ = done.send(());
                }
                Ok(Command::Count(answer)) => {
                    let _ = answer.send(Counters {
                        a_to_b: first.model.counters(now_ns),
                        b_to_a: second.model.counters(now_ns),
                        cpu_ns: clock_ns(libc::CLOCK_THREAD_CPUTIME_ID),
                        taken_at_ns: now_ns,
                    });
                }
            }
        }
    }
}

fn take_in(lane: &mut Lane, buffer: &mut [u8]) -> io::Result<()> {
    for _ in 0..FRAMES_AT_ONCE {
        let Some(bytes) = lane.from.receive(buffer)? else {
            break;
        };
        match Frame::parse(bytes) {
            Some((train, frame)) => lane.model.offer(now_ns(), train, frame),
            None => lane.model.refuse(),
        }
    }
    Ok(())
}

fn hand_out(lane: &mut Lane, scratch: &mut Vec<u8>) {
    let to = &lane.to;
    let deliver = |frame: &Frame, run: Range<u16>| to.send(frame.run(run, scratch)).is_ok();
    lane.model.deliver_due(now_ns(), deliver);
}

/// Real-time priority, or at least exact timers.
fn hurry() {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: a valid parameter; both calls change the calling thread only, and without them the link is only less
    // punctual on a busy machine, which its counters tell.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64);
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters);
    }
}

fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to a valid local.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
