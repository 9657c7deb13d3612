//! What the kernel knows of a connection and of this host's addresses, for which no safe wrapper exists.
//!
//! Owns nothing. Refuses nothing: a kernel that does not tell gives `None`, and the caller goes on with what it has.

use linux_raw_sys::net::tcp_info;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// `SO_BUF_LOCK`: which buffers keep a fixed size.
const SO_BUF_LOCK: libc::c_int = 72;
/// `SO_BINDTOIFINDEX`: the interface that a socket is bound to.
const SO_BINDTOIFINDEX: libc::c_int = 62;

/// What the kernel counts of a connection. Fields that it is too old to fill are 0.
pub(crate) fn info_of(socket: impl AsFd) -> Option<tcp_info> {
    // SAFETY: `tcp_info` is plain numbers, for which zero is a value.
    let mut info: tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<tcp_info>() as libc::socklen_t;
    // SAFETY: `info` has room for `len` bytes, the kernel writes no more than that, and any bytes are numbers.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &mut len,
        )
    };
    (done == 0).then_some(info)
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
