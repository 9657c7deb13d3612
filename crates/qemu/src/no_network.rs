//! Keeps a program from the network and from other processes: it can make no socket and no process, read no memory of another
//! one, send no signal, set nobody else's limits, priority or mounts, change no rights, owners or attributes of files, and outlive
//! nobody with whom it is to end.
//!
//! Owns nothing: a seccomp filter, which stays over `exec`, refuses it with EPERM. Refuses also system calls of another
//! architecture than this program's, which have other numbers. Threads of its own it may start; `clone3`, whose flags no filter
//! sees, is said not to exist, so that the C library takes `clone` for them. `execve` stays, since the filter is there before the
//! program is: what it runs in its own place has the same filter. Signals are refused to its own threads, too: `abort` then ends
//! it by the instruction that the C library has for that case.

use crate::tap_guard::{ANSWER, HEAD, IF_EQUAL, LOAD, begun, refusing, set, step};
use std::io;

/// All ways to a socket, to what others do with theirs, and to others.
const REFUSED: [u32; 69] = [
    libc::SYS_socket as u32,
    libc::SYS_socketpair as u32,
    libc::SYS_io_uring_setup as u32,
    // Memory and descriptors of others.
    libc::SYS_ptrace as u32,
    libc::SYS_process_vm_readv as u32,
    libc::SYS_process_vm_writev as u32,
    libc::SYS_process_madvise as u32,
    libc::SYS_move_pages as u32,
    libc::SYS_migrate_pages as u32,
    libc::SYS_kcmp as u32,
    libc::SYS_pidfd_open as u32,
    libc::SYS_pidfd_getfd as u32,
    libc::SYS_perf_event_open as u32,
    libc::SYS_bpf as u32,
    libc::SYS_userfaultfd as u32,
    libc::SYS_memfd_create as u32,
    libc::SYS_execveat as u32,
    libc::SYS_shmget as u32,
    libc::SYS_shmat as u32,
    libc::SYS_shmctl as u32,
    libc::SYS_msgget as u32,
    libc::SYS_msgsnd as u32,
    libc::SYS_msgrcv as u32,
    libc::SYS_msgctl as u32,
    libc::SYS_semget as u32,
    libc::SYS_semop as u32,
    libc::SYS_semtimedop as u32,
    libc::SYS_semctl as u32,
    libc::SYS_mq_open as u32,
    libc::SYS_mq_unlink as u32,
    libc::SYS_add_key as u32,
    libc::SYS_request_key as u32,
    libc::SYS_keyctl as u32,
    // Signals.
    libc::SYS_kill as u32,
    libc::SYS_tkill as u32,
    libc::SYS_tgkill as u32,
    libc::SYS_rt_sigqueueinfo as u32,
    libc::SYS_rt_tgsigqueueinfo as u32,
    libc::SYS_pidfd_send_signal as u32,
    // Priorities.
    libc::SYS_setpriority as u32,
    libc::SYS_ioprio_set as u32,
    libc::SYS_sched_setparam as u32,
    libc::SYS_sched_setscheduler as u32,
    libc::SYS_sched_setattr as u32,
    libc::SYS_sched_setaffinity as u32,
    // Another view of the host.
    libc::SYS_unshare as u32,
    libc::SYS_setns as u32,
    libc::SYS_mount as u32,
    libc::SYS_umount2 as u32,
    libc::SYS_pivot_root as u32,
    libc::SYS_chroot as u32,
    libc::SYS_open_tree as u32,
    libc::SYS_move_mount as u32,
    libc::SYS_fsopen as u32,
    libc::SYS_mount_setattr as u32,
    // Files that it has not open, which Landlock does not keep from this.
    libc::SYS_truncate as u32,
    libc::SYS_fchmod as u32,
    libc::SYS_fchmodat as u32,
    452, // fchmodat2
    libc::SYS_fchown as u32,
    libc::SYS_fchownat as u32,
    libc::SYS_setxattr as u32,
    libc::SYS_lsetxattr as u32,
    libc::SYS_fsetxattr as u32,
    libc::SYS_removexattr as u32,
    libc::SYS_lremovexattr as u32,
    libc::SYS_fremovexattr as u32,
    463, // setxattrat
    466, // removexattrat
];

/// A process of its own, and files by their paths; other architectures have `clone` and the calls above alone.
#[cfg(target_arch = "x86_64")]
const OLDER: [u32; 5] = [
    libc::SYS_fork as u32,
    libc::SYS_vfork as u32,
    libc::SYS_chmod as u32,
    libc::SYS_chown as u32,
    libc::SYS_lchown as u32,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: [u32; 0] = [];

/// By these `fcntl` has any signal sent to whom it names: linux/fcntl.h.
const OWNERS: [u32; 3] = [
    libc::F_SETOWN as u32,
    10, // F_SETSIG
    15, // F_SETOWN_EX
];

/// Where `struct seccomp_data` has the lower halves of the first two arguments, which is all that the kernel looks at of these.
const FIRST: u32 = 16 + LOWER;
const SECOND: u32 = 24 + LOWER;
const LOWER: u32 = if cfg!(target_endian = "big") { 4 } else { 0 };
const IF_ANY: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;

const BY_ARGUMENT: usize = HEAD + REFUSED.len() + OLDER.len();
const OF_OWNERS: usize = BY_ARGUMENT + 13;
const LEN: usize = OF_OWNERS + OWNERS.len() + 2;

/// Three steps from this one on: a test of this call's first argument decides which of two steps answers. Other calls go on
/// behind them.
const fn by_first(
    mut steps: [libc::sock_filter; LEN],
    at: usize,
    call: libc::c_long,
    (test, value): (u16, u32),
    (then, otherwise): (usize, usize),
) -> [libc::sock_filter; LEN] {
    let behind = at + 3;
    steps[at] = step(IF_EQUAL, call as u32, 0, 2);
    steps[at + 1] = step(LOAD, FIRST, 0, 0);
    steps[at + 2] = step(
        test,
        value,
        (then - behind) as u8,
        (otherwise - behind) as u8,
    );
    steps
}

const fn program() -> [libc::sock_filter; LEN] {
    let (may, refuse) = (LEN - 2, LEN - 1);
    let mut steps = refusing(begun::<LEN>(), HEAD, &REFUSED);
    steps = refusing(steps, HEAD + REFUSED.len(), &OLDER);
    let at = BY_ARGUMENT;
    steps[at] = step(IF_EQUAL, libc::SYS_clone3 as u32, 0, 1);
    let unknown = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    steps[at + 1] = step(ANSWER, unknown, 0, 0);
    let thread = (IF_ANY, libc::CLONE_THREAD as u32);
    steps = by_first(steps, at + 2, libc::SYS_clone, thread, (may, refuse));
    // Limits of its own are named by 0.
    let own = (IF_EQUAL, 0);
    steps = by_first(steps, at + 5, libc::SYS_prlimit64, own, (may, refuse));
    // Whoever began it may end before it does: it ends then, too.
    let end = (IF_EQUAL, libc::PR_SET_PDEATHSIG as u32);
    steps = by_first(steps, at + 8, libc::SYS_prctl, end, (refuse, may));
    steps[at + 11] = step(IF_EQUAL, libc::SYS_fcntl as u32, 0, (may - at - 12) as u8);
    steps[at + 12] = step(LOAD, SECOND, 0, 0);
    refusing(steps, OF_OWNERS, &OWNERS)
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

    /// What a thread finds that gave it up.
    fn having_given_it_up<R: Send>(tries: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let tried = scope.spawn(|| {
                rustix::thread::set_no_new_privs(true).unwrap();
                refuse_to_this_thread().unwrap();
                tries()
            });
            tried.join().unwrap()
        })
    }

    /// The error of a system call; 0 where it was carried out.
    fn error_of(number: libc::c_long, arguments: [libc::c_long; 4]) -> i32 {
        let [first, second, third, fourth] = arguments;
        // SAFETY: every call that is made so takes numbers or null pointers alone, and changes nothing where it is let pass.
        match unsafe { libc::syscall(number, first, second, third, fourth) } {
            -1 => io::Error::last_os_error().raw_os_error().unwrap(),
            _ => 0,
        }
    }

    #[test]
    fn a_thread_that_gave_it_up_makes_no_socket() {
        let refused = having_given_it_up(|| {
            std::net::UdpSocket::bind("127.0.0.1:0")
                .map(drop)
                .unwrap_err()
        });
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    }

    #[test]
    fn a_thread_that_gave_it_up_makes_threads_and_no_process() {
        let (forked, by_flags, started) = having_given_it_up(|| {
            // SAFETY: the child, if there is one, ends at once and touches nothing.
            let forked = unsafe {
                match libc::fork() {
                    0 => libc::_exit(0),
                    -1 => io::Error::last_os_error().raw_os_error().unwrap(),
                    child => libc::waitpid(child, std::ptr::null_mut(), 0).min(0),
                }
            };
            let by_flags = error_of(libc::SYS_clone3, [0, 0, 0, 0]);
            (forked, by_flags, std::thread::spawn(|| 7).join().unwrap())
        });
        assert_eq!((forked, by_flags, started), (libc::EPERM, libc::ENOSYS, 7));
    }

    #[test]
    fn a_thread_that_gave_it_up_signals_nobody_and_sets_no_limits_of_others() {
        let process = libc::c_long::from(std::process::id());
        // SAFETY: it has no arguments.
        let other = libc::c_long::from(unsafe { libc::gettid() });
        let (rlimit, none) = (libc::c_long::from(libc::RLIMIT_NOFILE as i32), 0);
        let stdin = 0;
        // Each without a consequence where it is let pass: signal 0, and limits that are only asked for.
        let tries = [
            ("kill", libc::SYS_kill, [process, none, 0, 0]),
            ("tkill", libc::SYS_tkill, [other, none, 0, 0]),
            ("tgkill", libc::SYS_tgkill, [process, other, none, 0]),
            ("queue", libc::SYS_rt_sigqueueinfo, [process, none, 0, 0]),
            (
                "queue to a thread",
                libc::SYS_rt_tgsigqueueinfo,
                [process, other, none, 0],
            ),
            ("limits", libc::SYS_prlimit64, [process, rlimit, 0, 0]),
            ("pidfd", libc::SYS_pidfd_open, [process, 0, 0, 0]),
            ("compare", libc::SYS_kcmp, [process, process, 0, 0]),
            ("priority", libc::SYS_setpriority, [0, 0, 0, 0]),
            ("memory file", libc::SYS_memfd_create, [0, 0, 0, 0]),
            ("shorten", libc::SYS_truncate, [0, 0, 0, 0]),
            ("mode", libc::SYS_fchmod, [-1, 0, 0, 0]),
            ("mode by path", libc::SYS_fchmodat, [-1, 0, 0, 0]),
            ("owner of a file", libc::SYS_fchownat, [-1, 0, 0, 0]),
            ("attribute", libc::SYS_setxattr, [0, 0, 0, 0]),
            ("no attribute", libc::SYS_lremovexattr, [0, 0, 0, 0]),
            ("shared memory", libc::SYS_shmat, [-1, 0, 0, 0]),
            (
                "end",
                libc::SYS_prctl,
                [libc::c_long::from(libc::PR_SET_PDEATHSIG), 0, 0, 0],
            ),
            (
                "owner",
                libc::SYS_fcntl,
                [stdin, libc::c_long::from(libc::F_SETOWN), 0, 0],
            ),
        ];
        let (refused, own) = having_given_it_up(|| {
            let refused =
                tries.map(|(name, number, arguments)| (name, error_of(number, arguments)));
            let asked = libc::c_long::from(libc::PR_GET_DUMPABLE);
            let own = [
                error_of(libc::SYS_prlimit64, [0, rlimit, 0, 0]),
                error_of(libc::SYS_prctl, [asked, 0, 0, 0]),
            ];
            (refused, own)
        });
        for (name, error) in refused {
            assert_eq!(error, libc::EPERM, "{name}");
        }
        assert_eq!(own, [0, 0], "its own limits and state are its own");
    }
}
