//! Raw Ethernet frames on one network interface: the sender of announcements, both ends of probes.
//!
//! Owns one `AF_PACKET` socket bound to one interface and one type of frame. Needs CAP_NET_RAW. The socket lives in the
//! network namespace in which it was opened.

use crate::sync::poll_until;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::time::Instant;

/// The longest frame that is received, in bytes.
const LONGEST: usize = 2048;

/// Why frames cannot be sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PacketError {
    /// No interface has this name.
    #[error("network interface '{name}' does not exist on this host")]
    NoInterface { name: String },
    /// A system call failed.
    #[error("cannot use network interface '{name}' for raw frames: {source}")]
    Io {
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A raw socket that is bound to one network interface.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
    name: String,
}

impl PacketSocket {
    /// Opens `name` for frames of one type; receiving begins here.
    pub fn open(name: &str, ethertype: u16) -> Result<PacketSocket, PacketError> {
        PacketSocket::open_filtered(name, ethertype, None)
    }

    fn open_filtered(
        name: &str,
        ethertype: u16,
        filter: Option<&[libc::sock_filter]>,
    ) -> Result<PacketSocket, PacketError> {
        let failed = |source| PacketError::Io {
            name: name.to_owned(),
            source,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None);
        let socket = socket.map_err(|errno| failed(errno.into()))?;
        let index = match net::netdevice::name_to_index(&socket, name) {
            Ok(index) => index,
            Err(Errno::NODEV) => {
                return Err(PacketError::NoInterface {
                    name: name.to_owned(),
                });
            }
            Err(errno) => return Err(failed(errno.into())),
        };
        // Nothing is received before the bind, so nothing passes the filter by.
        if let Some(filter) = filter {
            hear_only(&socket, filter).map_err(failed)?;
        }
        bind(&socket, index, ethertype).map_err(failed)?;
        Ok(PacketSocket {
            socket,
            name: name.to_owned(),
        })
    }

    /// Opens the port on which a card's frames enter, for those in which the card `mac` says what addresses it has:
    /// ARP and neighbour discovery. The kernel sorts all others out before they cost anything.
    pub fn open_for_claims(name: &str, mac: [u8; 6]) -> Result<PacketSocket, PacketError> {
        PacketSocket::open_filtered(name, libc::ETH_P_ALL as u16, Some(&claims_of(mac)))
    }

    /// Sends one whole frame.
    pub fn send(&self, frame: &[u8]) -> Result<(), PacketError> {
        let sent = net::send(&self.socket, frame, SendFlags::NOSIGNAL);
        sent.map(drop).map_err(|errno| self.failed(errno.into()))
    }

    /// The next frame of the type it was opened for; `None` if none comes by the deadline.
    pub fn receive(&self, deadline: Instant) -> Result<Option<Vec<u8>>, PacketError> {
        let mut frame = vec![0; LONGEST];
        loop {
            match net::recv(&self.socket, frame.as_mut_slice(), RecvFlags::empty()) {
                Ok((count, _)) => {
                    frame.truncate(count);
                    return Ok(Some(frame));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let ready = poll_until([(self.socket.as_fd(), PollFlags::IN)], deadline);
                    if ready.map_err(|source| self.failed(source))? == [false] {
                        return Ok(None);
                    }
                }
                Err(errno) => return Err(self.failed(errno.into())),
            }
        }
    }

    fn failed(&self, source: io::Error) -> PacketError {
        PacketError::Io {
            name: self.name.clone(),
            source,
        }
    }
}

/// A program for the kernel's packet filter: frames from `mac` that are ARP or neighbour discovery.
fn claims_of(mac: [u8; 6]) -> [libc::sock_filter; 14] {
    const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
    const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
    const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
    const IF_ABOVE: u32 = libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K;
    const ANSWER: u32 = libc::BPF_RET | libc::BPF_K;
    // A jump counts from the next instruction; the last two take the frame and leave it.
    const TAKE: u8 = 12;
    const LEAVE: u8 = 13;
    let step = |code: u32, yes, no, value| libc::sock_filter {
        code: code as u16,
        jt: yes,
        jf: no,
        k: value,
    };
    let [a, b, c, d, e, f] = mac;
    [
        step(LOAD_WORD, 0, 0, 6),
        step(IF_EQUAL, 0, LEAVE - 2, u32::from_be_bytes([a, b, c, d])),
        step(LOAD_HALF, 0, 0, 10),
        step(IF_EQUAL, 0, LEAVE - 4, u32::from_be_bytes([0, 0, e, f])),
        step(LOAD_HALF, 0, 0, 12),
        step(IF_EQUAL, TAKE - 6, 0, 0x0806),
        step(IF_EQUAL, 0, LEAVE - 7, 0x86dd),
        step(LOAD_BYTE, 0, 0, 20),
        step(IF_EQUAL, 0, LEAVE - 9, 58),
        step(LOAD_BYTE, 0, 0, 54),
        step(IF_AT_LEAST, 0, LEAVE - 11, 133),
        step(IF_ABOVE, LEAVE - 12, 0, 136),
        step(ANSWER, 0, 0, LONGEST as u32),
        step(ANSWER, 0, 0, 0),
    ]
}

/// Attaches a filter, and leaves out what goes out by this interface.
fn hear_only(socket: &OwnedFd, filter: &[libc::sock_filter]) -> io::Result<()> {
    /// Of linux/if_packet.h.
    const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
    let program = libc::sock_fprog {
        len: filter.len() as libc::c_ushort,
        filter: filter.as_ptr().cast_mut(),
    };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)?;
    set_option(
        socket,
        libc::SOL_PACKET,
        PACKET_IGNORE_OUTGOING,
        &1 as &libc::c_int,
    )
}

fn set_option<T>(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `value`, which outlives the call, as does what it points to; the
    // kernel only reads both.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn bind(socket: &OwnedFd, index: u32, ethertype: u16) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::c_ushort;
    address.sll_protocol = ethertype.to_be();
    address.sll_ifindex = index.cast_signed();
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the pointer and the length describe `address`, which outlives the call.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_does_not_exist_is_named() {
        match PacketSocket::open("no-such-if", 0x88b5) {
            Err(error @ PacketError::NoInterface { .. }) => {
                assert_eq!(
                    error.to_string(),
                    "network interface 'no-such-if' does not exist on this host"
                );
            }
            Err(PacketError::Io { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                println!("skipped: raw sockets need CAP_NET_RAW");
            }
            other => panic!("{other:?}"),
        }
    }
}
