//! The preloaded library that makes userfaultfds inside QEMU, and how to ask it for one.
//!
//! What it is for: a userfaultfd watches the process that made it. QEMU is started with the
//! library preloaded, an open `/dev/userfaultfd` and a listening Unix socket; whoever connects as
//! root or as QEMU's user gets a fresh descriptor, as often as needed (a VM process that was
//! restarted asks again).
//!
//! Who owns the state: QEMU has its copies of both descriptors; the caller owns the socket's path
//! and protects it by the directory's mode. Start the QEMU binary itself: the library removes
//! itself from the environment, so it does not get past a wrapper script.
//!
//! What it refuses: an answer from another process than the QEMU meant, or in another format.

use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::Error;
use crate::library::is_loaded;
use crate::ram_file::file_error;

const DEVICE: &str = "/dev/userfaultfd";
const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"GWUF");
const REPLY_VERSION: u32 = 1;
const REPLY_LEN: usize = 16;

/// Opens `/dev/userfaultfd`, to be inherited by QEMU. Needs root.
pub fn open_device() -> Result<OwnedFd, Error> {
    File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(DEVICE)
        .map(OwnedFd::from)
        .map_err(|source| file_error("open", Path::new(DEVICE), source))
}

/// Makes the listening socket that QEMU inherits, mode 0600. The path must not exist.
pub fn listen(path: &Path) -> Result<OwnedFd, Error> {
    let listener =
        UnixListener::bind(path).map_err(|source| file_error("listen at", path, source))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(|source| file_error("protect", path, source))?;
    Ok(listener.into())
}

/// What QEMU's environment needs. The numbers are those that the descriptors have in QEMU, where
/// they must be inheritable and above 2.
pub fn environment(
    library: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
    listener: BorrowedFd<'_>,
) -> [(&'static str, String); 4] {
    let library = library.as_raw_fd();
    [
        ("LD_PRELOAD", format!("/proc/self/fd/{library}")),
        ("GODWIT_HANDOUT_LIBRARY_FD", library.to_string()),
        ("GODWIT_UFFD_DEVICE_FD", device.as_raw_fd().to_string()),
        ("GODWIT_HANDOUT_LISTEN_FD", listener.as_raw_fd().to_string()),
    ]
}

/// Asks the QEMU with process id `pid` for a fresh userfaultfd; gives up at `deadline`.
pub fn request_uffd(socket: &Path, pid: u32, deadline: Instant) -> Result<OwnedFd, Error> {
    ask(socket, pid, deadline).map_err(|reason| Error::Handout {
        path: socket.to_owned(),
        reason,
    })
}

/// Whether a QEMU that was just started hands one out: the loader passes over a library that it cannot load, so QEMU would
/// run without it until the first migration fails. `stderr` is what it has said.
pub fn check(
    socket: &Path,
    pid: u32,
    deadline: Instant,
    stderr: impl FnOnce() -> String,
) -> Result<(), Error> {
    // One whose map cannot be read has to answer all the same.
    if !is_loaded(pid).unwrap_or(true) {
        let stderr = stderr();
        return Err(Error::NotPreloaded { pid, stderr });
    }
    request_uffd(socket, pid, deadline).map(drop)
}

fn ask(socket: &Path, pid: u32, deadline: Instant) -> Result<OwnedFd, String> {
    let stream = connect(socket, deadline).map_err(|error| match error {
        Errno::CONNREFUSED | Errno::NOENT => {
            format!("nobody listens there ({error}): was QEMU started with the preloaded library?")
        }
        Errno::AGAIN | Errno::TIMEDOUT => "it did not accept the connection in time".to_owned(),
        other => other.to_string(),
    })?;
    wait_readable(stream.as_fd(), deadline)?;
    let (reply, uffd) = match receive(stream.as_fd()) {
        Err(Errno::CONNRESET) => (Vec::new(), None),
        received => received.map_err(|error| error.to_string())?,
    };
    check_reply(&reply, pid)?;
    uffd.ok_or_else(|| "the answer carries no descriptor".to_owned())
}

fn connect(path: &Path, deadline: Instant) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let family = AddressFamily::UNIX;
    let stream = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Bounds the wait for a place in a full queue. Zero would mean for ever.
    let left = deadline.saturating_duration_since(Instant::now());
    let bound = left.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&stream, Timeout::Send, Some(bound))?;
    rustix::net::connect(&stream, &address)?;
    Ok(stream)
}

fn wait_readable(stream: BorrowedFd<'_>, deadline: Instant) -> Result<(), String> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|error| error.to_string())?;
        let mut fds = [PollFd::new(&stream, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Err("it did not answer in time".to_owned()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Reads one reply. It is sent as one small message, so it arrives whole or not at all.
fn receive(stream: BorrowedFd<'_>) -> Result<(Vec<u8>, Option<OwnedFd>), Errno> {
    let mut bytes = [0; REPLY_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    )?;
    let uffd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let received = bytes.get(..message.bytes).unwrap_or_default();
    Ok((received.to_vec(), uffd))
}

/// Checks magic, version, process id and error of a reply, four native 32-bit words.
fn check_reply(reply: &[u8], pid: u32) -> Result<(), String> {
    if reply.is_empty() {
        let reason = "it closed the connection without an answer: QEMU has ended, or this process \
                      runs neither as root nor as QEMU's user";
        return Err(reason.to_owned());
    }
    let word = |index: usize| {
        let bytes = reply.get(index * 4..index * 4 + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    };
    let words = (word(0), word(1), word(2), word(3));
    let (Some(REPLY_MAGIC), Some(version), Some(theirs), Some(error)) = words else {
        return Err("the answer is not one of the preloaded library".to_owned());
    };
    if version != REPLY_VERSION {
        return Err(format!(
            "the library there speaks version {version}, not {REPLY_VERSION}"
        ));
    }
    if theirs != pid {
        return Err(format!(
            "process {theirs} answered instead of QEMU, process {pid}"
        ));
    }
    match i32::try_from(error) {
        Ok(0) => Ok(()),
        Ok(code) => {
            let cause = io::Error::from_raw_os_error(code);
            Err(format!("the kernel refused one to QEMU: {cause}"))
        }
        Err(_) => Err("the answer is not one of the preloaded library".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(words: [u32; 4]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn only_a_good_reply_of_the_right_process_passes() {
        let good = [REPLY_MAGIC, REPLY_VERSION, 42, 0];
        assert_eq!(check_reply(&reply(good), 42), Ok(()));
        let bad = [
            (reply([1, REPLY_VERSION, 42, 0]), "not one of"),
            (reply([REPLY_MAGIC, 9, 42, 0]), "version 9"),
            (reply([REPLY_MAGIC, REPLY_VERSION, 41, 0]), "process 41"),
            (
                reply([REPLY_MAGIC, REPLY_VERSION, 42, 24]),
                "refused one to QEMU",
            ),
            (
                reply([REPLY_MAGIC, REPLY_VERSION, 42, u32::MAX]),
                "not one of",
            ),
            (reply(good)[..15].to_vec(), "not one of"),
            (Vec::new(), "closed"),
        ];
        for (bytes, reason) in bad {
            let error = check_reply(&bytes, 42).expect_err("must be refused");
            assert!(error.contains(reason), "{error}");
        }
    }
}
