//! Keeps a QEMU from doing more with its taps than to send and receive frames.
//!
//! Whoever has a tap's descriptor may, without any capability, make the tap outlive it, give it to another user, or give
//! it another address, by which a bridge may take that address for its own. QEMU's sandbox lets all of that pass. Owns
//! nothing: a seccomp filter, which stays over `exec`, refuses it with EPERM. Refuses also system calls of another
//! architecture than this program's, which have other numbers.

use std::io;

/// What QEMU itself never asks of a tap that it was given: linux/if_tun.h and linux/sockios.h.
pub(crate) const REFUSED: [u32; 7] = [
    0x4004_54ca, // TUNSETIFF
    0x4004_54cb, // TUNSETPERSIST
    0x4004_54cc, // TUNSETOWNER
    0x4004_54cd, // TUNSETLINK
    0x4004_54ce, // TUNSETGROUP
    0x4004_54da, // TUNSETIFINDEX
    0x0000_8924, // SIOCSIFHWADDR
];

/// Where `struct seccomp_data` has the call's number, the architecture, and the lower half of the second argument, which
/// is all of an ioctl's request that the kernel looks at.
pub(crate) const NUMBER: u32 = 0;
pub(crate) const ARCHITECTURE: u32 = 4;
const REQUEST: u32 = 24 + if cfg!(target_endian = "big") { 4 } else { 0 };

#[cfg(target_arch = "x86_64")]
pub(crate) const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(crate) const NATIVE: u32 = 0xc000_00b7;
/// From here on x86_64 has the numbers of its 32-bit programs.
pub(crate) const OTHER_NUMBERS: u32 = 0x4000_0000;

pub(crate) const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
pub(crate) const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
pub(crate) const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
pub(crate) const ANSWER: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const LEN: usize = HEAD + 2 + REFUSED.len() + 2;

pub(crate) const fn step(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Steps in a program before its own ones.
pub(crate) const HEAD: usize = 4;

/// A program of so many steps that refuses calls of other architectures and has the call's number loaded after its
/// [`HEAD`]. The last two steps are the answers: it may, and EPERM. What is between allows.
pub(crate) const fn begun<const LEN: usize>() -> [libc::sock_filter; LEN] {
    let refuse = LEN - 1;
    let mut steps = [step(ANSWER, libc::SECCOMP_RET_ALLOW, 0, 0); LEN];
    steps[0] = step(LOAD, ARCHITECTURE, 0, 0);
    steps[1] = step(IF_EQUAL, NATIVE, 0, (refuse - 2) as u8);
    steps[2] = step(LOAD, NUMBER, 0, 0);
    steps[3] = step(IF_AT_LEAST, OTHER_NUMBERS, (refuse - 4) as u8, 0);
    steps[refuse] = step(ANSWER, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0);
    steps
}

/// Refuses each of these values of what is loaded, from this step on.
pub(crate) const fn refusing<const LEN: usize>(
    mut steps: [libc::sock_filter; LEN],
    from: usize,
    values: &[u32],
) -> [libc::sock_filter; LEN] {
    let mut index = 0;
    while index < values.len() {
        let at = from + index;
        steps[at] = step(IF_EQUAL, values[index], (LEN - 1 - at - 1) as u8, 0);
        index += 1;
    }
    steps
}

const fn program() -> [libc::sock_filter; LEN] {
    let may = LEN - 2;
    let mut steps = begun::<LEN>();
    steps[4] = step(IF_EQUAL, libc::SYS_ioctl as u32, 0, (may - 5) as u8);
    steps[5] = step(LOAD, REQUEST, 0, 0);
    refusing(steps, HEAD + 2, &REFUSED)
}

static PROGRAM: [libc::sock_filter; LEN] = program();

/// Refuses all of it from here on to this thread and what it starts. It must have given up to gain privileges. Makes one
/// system call and allocates nothing: it may stand between fork and exec.
pub(crate) fn refuse_to_this_thread() -> io::Result<()> {
    set(&PROGRAM)
}

/// Has the kernel ask these steps at each system call of this thread and of what it starts.
pub(crate) fn set(steps: &'static [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: steps.len() as libc::c_ushort,
        filter: steps.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which it does not change, before it returns.
    let set = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
