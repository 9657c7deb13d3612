//! Keeps a program from the network and from other processes: it can make no socket, read no memory, send no signal.
//!
//! Owns nothing: a seccomp filter, which stays over `exec`, refuses it with EPERM. Refuses also system calls of another
//! architecture than this program's, which have other numbers.

use crate::tap_guard::{HEAD, begun, refusing, set};
use std::io;

/// All ways to a socket, to what others do with theirs, and to others.
const REFUSED: [u32; 9] = [
    libc::SYS_socket as u32,
    libc::SYS_socketpair as u32,
    libc::SYS_io_uring_setup as u32,
    libc::SYS_ptrace as u32,
    libc::SYS_process_vm_readv as u32,
    libc::SYS_process_vm_writev as u32,
    libc::SYS_pidfd_getfd as u32,
    libc::SYS_pidfd_send_signal as u32,
    libc::SYS_kill as u32,
];

const LEN: usize = HEAD + REFUSED.len() + 2;

static PROGRAM: [libc::sock_filter; LEN] = refusing(begun(), HEAD, &REFUSED);

/// Refuses it from here on to this thread and what it starts. It must have given up to gain privileges. Makes one system call
/// and allocates nothing: it may stand between fork and exec.
pub(crate) fn refuse_to_this_thread() -> io::Result<()> {
    set(&PROGRAM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_gave_it_up_makes_no_socket() {
        let tried = std::thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            refuse_to_this_thread().unwrap();
            std::net::UdpSocket::bind("127.0.0.1:0").map(drop)
        });
        let refused = tried.join().unwrap().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    }
}
