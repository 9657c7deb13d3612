//! Keeps a program from the network: it can make no socket.
//!
//! Owns nothing: a seccomp filter, which stays over `exec`, refuses it with EPERM. Refuses also system calls of another
//! architecture than this program's, which have other numbers.

use crate::tap_guard::{
    ANSWER, ARCHITECTURE, IF_AT_LEAST, IF_EQUAL, LOAD, NATIVE, NUMBER, OTHER_NUMBERS, set, step,
};
use std::io;

/// All ways to a socket or to what others do with theirs.
const REFUSED: [i64; 4] = [
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_io_uring_setup,
    libc::SYS_ptrace,
];

const LEN: usize = 4 + REFUSED.len() + 2;

/// The last two steps are the answers: it may, and EPERM.
const fn program() -> [libc::sock_filter; LEN] {
    let refuse = LEN - 1;
    let mut steps = [step(ANSWER, libc::SECCOMP_RET_ALLOW, 0, 0); LEN];
    steps[0] = step(LOAD, ARCHITECTURE, 0, 0);
    steps[1] = step(IF_EQUAL, NATIVE, 0, (refuse - 2) as u8);
    steps[2] = step(LOAD, NUMBER, 0, 0);
    steps[3] = step(IF_AT_LEAST, OTHER_NUMBERS, (refuse - 4) as u8, 0);
    let mut index = 0;
    while index < REFUSED.len() {
        let at = 4 + index;
        steps[at] = step(IF_EQUAL, REFUSED[index] as u32, (refuse - at - 1) as u8, 0);
        index += 1;
    }
    steps[refuse] = step(ANSWER, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0);
    steps
}

static PROGRAM: [libc::sock_filter; LEN] = program();

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
