//! What the kernel knows of a connection and of this host's addresses, for which no safe wrapper exists.
//!
//! Owns nothing. Refuses nothing: a kernel that does not tell gives `None`, and the caller goes on with what it has.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes asked for of `struct tcp_info`; an older kernel fills fewer.
const INFO_LEN: usize = 256;
/// `SO_BUF_LOCK`: which buffers keep a fixed size.
const SO_BUF_LOCK: libc::c_int = 72;
/// `SO_BINDTOIFINDEX`: the interface that a socket is bound to.
const SO_BINDTOIFINDEX: libc::c_int = 62;

/// `struct tcp_info`, as far as the kernel filled it. Its layout only ever grows at the end.
pub(crate) struct Info {
    bytes: [u8; INFO_LEN],
    len: usize,
}

impl Info {
    pub(crate) fn of(socket: impl AsFd) -> Option<Self> {
        let mut bytes = [0; INFO_LEN];
        let len = get(
            socket.as_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            &mut bytes,
        )?;
        Some(Self { bytes, len })
    }

    /// The 32-bit field at this offset; 0 when the kernel is too old to fill it.
    pub(crate) fn u32_at(&self, at: usize) -> u32 {
        self.chunk(at).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    }

    /// The 64-bit field at this offset; 0 when the kernel is too old to fill it.
    pub(crate) fn u64_at(&self, at: usize) -> u64 {
        self.chunk(at).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }

    fn chunk<const N: usize>(&self, at: usize) -> Option<&[u8; N]> {
        self.bytes.get(at..self.len)?.first_chunk()
    }
}

/// Lets the kernel size both buffers by itself again.
pub(crate) fn unlock_buffers(socket: impl AsFd) -> bool {
    set(socket.as_fd(), libc::SOL_SOCKET, SO_BUF_LOCK, 0)
}

/// Keeps at most so many bytes that were not sent yet; what is on its way does not count.
pub(crate) fn limit_unsent(socket: impl AsFd, bytes: libc::c_int) -> bool {
    let name = libc::TCP_NOTSENT_LOWAT;
    set(socket.as_fd(), libc::IPPROTO_TCP, name, bytes)
}

/// Sends and receives through this interface only.
pub(crate) fn bind_to_interface(socket: impl AsFd, index: u32) -> bool {
    let Ok(index) = libc::c_int::try_from(index) else {
        return false;
    };
    set(socket.as_fd(), libc::SOL_SOCKET, SO_BINDTOIFINDEX, index)
}

/// Index and name of the interface that has this address.
pub(crate) fn interface_of(address: IpAddr) -> Option<(u32, String)> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the head of the list, which is given back below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return None;
    }
    let mut found = None;
    let mut entry = list;
    // SAFETY: `entry` is null or an element of the list, which lives until it is given back.
    while let Some(here) = unsafe { entry.as_ref() } {
        // SAFETY: the kernel's library gives null or a socket address of the family that it names.
        if unsafe { ip_of(here.ifa_addr) } == Some(address) {
            // SAFETY: an interface's name is a string that ends in zero, as long as the list.
            let name = unsafe { CStr::from_ptr(here.ifa_name) };
            // SAFETY: as above.
            let index = unsafe { libc::if_nametoindex(here.ifa_name) };
            found = (index != 0).then(|| (index, name.to_string_lossy().into_owned()));
            break;
        }
        entry = here.ifa_next;
    }
    // SAFETY: the list came from `getifaddrs` and nothing points into it any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// # Safety
/// `address` is null or points to a socket address of the family that it names.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise.
    let family = unsafe { address.as_ref() }?.sa_family;
    match libc::c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is a `sockaddr_in`; it may lie unaligned.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is a `sockaddr_in6`; it may lie unaligned.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn get(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: &mut [u8],
) -> Option<usize> {
    let mut len = libc::socklen_t::try_from(value.len()).ok()?;
    // SAFETY: `value` has room for `len` bytes, and the kernel writes no more than that.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &mut len,
        )
    };
    (done == 0).then_some((len as usize).min(value.len()))
}

fn set(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> bool {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads one `int`, which lives during the call.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            len,
        ) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interface_of_loopback_is_found_and_of_nobody_is_not() {
        let (index, name) = interface_of(Ipv4Addr::LOCALHOST.into()).expect("loopback");
        assert_eq!((index, name.as_str()), (1, "lo"));
        assert_eq!(interface_of(Ipv4Addr::new(192, 0, 2, 1).into()), None);
    }
}
