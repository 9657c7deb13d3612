//! Another user's rights to files, for one thread; and all of that user's, for good, for a program that such a thread starts.
//!
//! Owns nothing. A thread with another user's rights keeps the process's real, effective and saved ids: by these the kernel judges
//! who may signal it, which could stop or end the whole process, set its limits or its priority, or debug it. Only the ids that
//! count for files change, the groups, and the capabilities, of which none is left that concerns files. Refuses: nothing; a kernel
//! that refuses is reported.

use crate::privileges::stay_private;
use rustix::fs::{Gid, Uid};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

/// By these a thread starts and ends a program of that user, if the process has them. The kernel asks for the last one also
/// where it ends such a program because its parent died.
const KEPT: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::KILL);

/// Does something with the rights to files of `uid` and `gid` alone, without supplementary groups.
pub fn as_user<R: Send>(
    uid: u32,
    gid: u32,
    work: impl FnOnce() -> Result<R, Errno> + Send,
) -> Result<R, Errno> {
    std::thread::scope(|scope| {
        // Rights belong to threads: this one has them until it ends.
        let thread = scope.spawn(|| {
            become_user(uid, gid)?;
            work()
        });
        thread.join().unwrap_or(Err(Errno::IO))
    })
}

/// Gives this thread, and those that it starts, the rights to files of that user until they end. Nothing to do for a process
/// that is this user already.
pub(crate) fn become_user(uid: u32, gid: u32) -> Result<(), Errno> {
    if rustix::process::geteuid().as_raw() == uid {
        return Ok(());
    }
    set_thread_groups(&[])?;
    set_file_ids(uid, gid)?;
    let kept = capabilities(None)?.permitted.intersection(KEPT);
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    // A thread's change of rights has set the whole process back to what the system does with such programs.
    stay_private().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::PERM))
}

/// Between fork and exec: gives files the rights of the process again.
pub(crate) fn have_own_files() -> Result<(), Errno> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    set_file_ids(uid.as_raw(), gid.as_raw())
}

/// Between fork and exec, in a child of a thread that has this user's rights: this process is that user from here on. Its
/// capabilities go with root's ids.
pub(crate) fn become_user_for_good(uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// Of this thread alone.
fn set_file_ids(uid: u32, gid: u32) -> Result<(), Errno> {
    // These two calls do not tell of an error, only what held before; nobody has the last number, which changes nothing.
    const NOBODY: u32 = u32::MAX;
    // SAFETY: plain system calls on numbers, which concern this thread alone.
    let now = unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        (libc::setfsuid(NOBODY), libc::setfsgid(NOBODY))
    };
    match (now.0.cast_unsigned(), now.1.cast_unsigned()) == (uid, gid) {
        true => Ok(()),
        false => Err(Errno::PERM),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::io;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    const NOBODY: u32 = 65_534;

    fn is_root() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            println!("skipped: another user's rights need root");
        }
        is_root
    }

    /// What a process of that user hears when it asks the kernel for something; 0 where that is done.
    fn asked_by_nobody(ask: impl Fn() -> libc::c_long + Send + Sync + 'static) -> i32 {
        let mut command = Command::new("/bin/true");
        command.uid(NOBODY).gid(NOBODY);
        let ask = move || match ask() {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        };
        // SAFETY: it makes one system call on numbers.
        unsafe { command.pre_exec(ask) };
        match command.status() {
            Ok(_) => 0,
            Err(error) => error.raw_os_error().expect("the kernel's"),
        }
    }

    #[test]
    fn a_thread_that_works_as_a_user_is_neither_stopped_nor_limited_by_that_user() {
        if !is_root() {
            return;
        }
        let (told, tid) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let works = std::thread::spawn(move || {
            as_user(NOBODY, NOBODY, move || {
                // SAFETY: it has no arguments.
                let own = unsafe { libc::gettid() };
                told.send(libc::c_long::from(own)).expect("told");
                let _ = ended.recv();
                Ok(())
            })
        });
        let (process, thread) = (
            libc::c_long::from(std::process::id()),
            tid.recv().expect("it works"),
        );
        let none: libc::c_long = 0;
        let idle = libc::sched_param { sched_priority: 0 };
        let limit = libc::rlimit {
            rlim_cur: 1 << 20,
            rlim_max: 1 << 20,
        };
        // SAFETY: system calls on numbers and on structures that live as long as the calls.
        let answers = unsafe {
            [
                asked_by_nobody(move || libc::syscall(libc::SYS_tgkill, process, thread, none)),
                asked_by_nobody(move || libc::syscall(libc::SYS_tkill, thread, none)),
                asked_by_nobody(move || {
                    let (what, new) = (libc::RLIMIT_NOFILE, &raw const limit);
                    libc::syscall(libc::SYS_prlimit64, thread, what, new, none)
                }),
                asked_by_nobody(move || {
                    let (policy, with) = (libc::SCHED_IDLE, &raw const idle);
                    libc::syscall(libc::SYS_sched_setscheduler, thread, policy, with)
                }),
                asked_by_nobody(move || {
                    libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, thread, 19)
                }),
            ]
        };
        drop(end);
        assert_eq!(works.join().expect("the thread"), Ok(()));
        assert_eq!(answers, [libc::EPERM; 5]);
    }

    #[test]
    fn a_thread_that_works_as_a_user_has_that_users_files_and_no_capability_for_others() {
        if !is_root() {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).expect("chmod");
        let at = |name| directory.path().join(name);
        for (name, mode) in [("root's", 0o600), ("group's", 0o640), ("all's", 0o644)] {
            fs::write(at(name), "text").expect("written");
            fs::set_permissions(at(name), Permissions::from_mode(mode)).expect("chmod");
        }
        let (read, made, has) = as_user(NOBODY, NOBODY, || {
            let read = ["root's", "group's", "all's"].map(|name| fs::read(at(name)).is_ok());
            fs::write(at("made"), "text").map_err(|_| Errno::ACCESS)?;
            let made = fs::metadata(at("made")).map_err(|_| Errno::ACCESS)?;
            Ok((read, (made.uid(), made.gid()), capabilities(None)?))
        })
        .expect("done");
        assert_eq!(read, [false, false, true]);
        assert_eq!(made, (NOBODY, NOBODY));
        assert_eq!(
            (has.effective, has.permitted, has.inheritable),
            (KEPT, KEPT, CapabilitySet::empty())
        );
        assert!(fs::read(at("root's")).is_ok(), "this thread is as it was");
    }
}
