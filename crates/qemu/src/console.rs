//! The guest's serial port: what it wrote, and a line on which something can be typed to it.
//!
//! QEMU keeps what the guest writes in a ring, which outlives whoever reads it, but a ring takes no input. While somebody types
//! the port is changed over to two pipes, a [`Line`], and back afterwards. Tried on QEMU 7.2 and 10, which behave alike:
//!
//! - The command line stays as it is, so that guests which run already have it, too.
//! - Changing over throws away what the ring still holds. It is read first, and the last of it together with the change; a guest
//!   that writes without pause loses what it writes within about a millisecond, one that rests nothing. So a quiet moment is waited
//!   for, and only who types changes over. Changing back loses nothing: what was written stands in the pipe.
//! - A reader that dies while the port is on a line leaves a guest that goes on, and whose output is dropped until the next one
//!   puts the ring back. While it lives but does not read, the guest waits once the pipe is full (64 KiB).
//! - A socket in place of the pipes keeps some 280 single bytes before the guest waits, and under a guest that floods it QEMU 7.2
//!   and 10 stopped reading altogether.
//!
//! Owns a line's descriptors. Refuses: input for a guest that has not read what was typed before.

use crate::command_line::{CONSOLE, CONSOLE_BYTES};
use crate::machine::Machine;
use crate::qmp::QmpError;
use crate::sync::poll_until;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use std::io;
use std::time::{Duration, Instant};

/// How long a guest that writes is waited for until it rests.
const QUIET_WAIT: Duration = Duration::from_millis(100);
/// Pause between two looks at whether it does.
const QUIET_PAUSE: Duration = Duration::from_millis(5);
const CHANGE: &str = "chardev-change";

/// The serial port while something can be typed to it: the other ends are QEMU's.
#[derive(Debug)]
pub struct Line {
    output: OwnedFd,
    input: OwnedFd,
}

impl Line {
    /// What the guest wrote since the last time, at most 64 KiB; waits for it until `deadline`. `None` once QEMU has let go of
    /// the line and nothing is left on it.
    pub fn read(&self, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![0; CONSOLE_BYTES];
        loop {
            match rustix::io::read(&self.output, &mut bytes) {
                Ok(0) => return Ok(None),
                Ok(count) => {
                    bytes.truncate(count);
                    return Ok(Some(bytes));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let wanted = [(self.output.as_fd(), PollFlags::IN)];
                    let [ready] = poll_until(wanted, deadline)?;
                    if !ready {
                        return Ok(Some(Vec::new()));
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits until something stands on the line or QEMU has let go of it, at most until `deadline`.
    pub fn wait(&self, deadline: Instant) -> io::Result<()> {
        poll_until([(self.output.as_fd(), PollFlags::IN)], deadline).map(drop)
    }

    /// Types this: all of it, or nothing where it does not fit because the guest reads nothing. At most 4 KiB.
    pub fn write(&self, bytes: &[u8]) -> io::Result<()> {
        // A pipe takes so little in one piece or not at all.
        let written = match rustix::io::write(&self.input, bytes) {
            Err(Errno::INTR) => rustix::io::write(&self.input, bytes),
            written => written,
        };
        match written? == bytes.len() {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::WriteZero)),
        }
    }
}

impl Machine {
    /// What the guest wrote since the last time, the newest 64 KiB of it. QEMU gives each byte away once.
    pub fn console_news(&self, deadline: Instant) -> Result<Vec<u8>, QmpError> {
        let answer = self
            .client()
            .execute("ringbuf-read", whole_ring(), deadline)?;
        ring_text(&answer)
    }

    /// Changes the serial port over to a line. What the guest wrote before is added to `text`, also where this fails.
    pub fn open_console_line(
        &self,
        text: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<Line, QmpError> {
        let (output, theirs_out) = pipe()?;
        let (theirs_in, input) = pipe()?;
        for ours in [&output, &input] {
            rustix::io::ioctl_fionbio(ours, true).map_err(io::Error::from)?;
        }
        let sets = [theirs_out.as_fd(), theirs_in.as_fd()].map(|fd| self.give(fd, deadline));
        let [out, inward] = sets;
        let (out, inward) = (out?, inward?);
        // Without `append` it would be cut to nothing first, which no pipe can be.
        let files = json!({"out": fdset(out), "in": fdset(inward), "append": true});
        let backend = json!({"type": "file", "data": files});
        let changed = self.change_over(backend, text, deadline);
        for set in [out, inward] {
            let gone = self
                .client()
                .execute("remove-fd", json!({"fdset-id": set}), deadline);
            if let Err(error) = gone {
                tracing::warn!(%error, "QEMU keeps a descriptor of the console");
            }
        }
        if let Err(error) = changed {
            // It may be done all the same, and nobody would read what the guest writes.
            if !error.certainly_not_done() && self.is_console_on_line(deadline)? {
                self.close_console_line(deadline)?;
            }
            return Err(error);
        }
        Ok(Line { output, input })
    }

    /// Puts the ring back. What the guest wrote before stands on the line.
    pub fn close_console_line(&self, deadline: Instant) -> Result<(), QmpError> {
        let ring = json!({"type": "ringbuf", "data": {"size": CONSOLE_BYTES}});
        let arguments = json!({"id": CONSOLE, "backend": ring});
        self.client().execute(CHANGE, arguments, deadline).map(drop)
    }

    /// Whether the serial port is on a line: one that a reader left which died, if nobody has it.
    pub fn is_console_on_line(&self, deadline: Instant) -> Result<bool, QmpError> {
        const COMMAND: &str = "query-chardev";
        let answer = self.client().execute(COMMAND, json!({}), deadline)?;
        let text = |port: &Value, key| port.get(key).and_then(Value::as_str).map(str::to_owned);
        let mut ports = answer.as_array().into_iter().flatten();
        let port = ports.find(|port| text(port, "label").as_deref() == Some(CONSOLE));
        let kind = port.and_then(|port| text(port, "filename"));
        let kind = kind.ok_or_else(|| QmpError::shape(COMMAND, "the serial port"))?;
        Ok(kind != "ringbuf")
    }

    /// Reads the ring empty, waits for a moment in which the guest writes nothing, and changes over in it.
    fn change_over(
        &self,
        backend: Value,
        text: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<(), QmpError> {
        let noisy_until = (Instant::now() + QUIET_WAIT).min(deadline);
        loop {
            let news = self.console_news(deadline)?;
            text.extend_from_slice(&news);
            if news.is_empty() || Instant::now() >= noisy_until {
                break;
            }
            std::thread::sleep(QUIET_PAUSE);
        }
        // Both are with QEMU before it carries the first one out.
        let read = self
            .client()
            .begin("ringbuf-read", whole_ring(), deadline)?;
        let arguments = json!({"id": CONSOLE, "backend": backend});
        let change = self.client().begin(CHANGE, arguments, deadline)?;
        text.extend(ring_text(&read.wait(deadline)?)?);
        change.wait(deadline).map(drop)
    }

    /// Gives QEMU a descriptor; returns the number of its set.
    fn give(&self, fd: BorrowedFd<'_>, deadline: Instant) -> Result<u64, QmpError> {
        const COMMAND: &str = "add-fd";
        let answer = self
            .client()
            .execute_with_fd(COMMAND, json!({}), fd, deadline)?;
        let set = answer.get("fdset-id").and_then(Value::as_u64);
        set.ok_or_else(|| QmpError::shape(COMMAND, "the number of a set"))
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)
}

fn fdset(number: u64) -> String {
    format!("/dev/fdset/{number}")
}

fn whole_ring() -> Value {
    json!({"device": CONSOLE, "size": CONSOLE_BYTES, "format": "base64"})
}

fn ring_text(answer: &Value) -> Result<Vec<u8>, QmpError> {
    let decoded = answer.as_str().and_then(|text| STANDARD.decode(text).ok());
    decoded.ok_or_else(|| QmpError::shape("ringbuf-read", "base64"))
}
