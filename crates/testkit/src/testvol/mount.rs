//! Mounts a volume inside a machine, from a thread that gets descriptors of its own.
//!
//! The thread's own table of descriptors is what makes a volume end with its process: `/dev/fuse` is open in this thread
//! alone, so no child and no thread that waits for the volume can keep it open.
//!
//! Owns nothing: whoever calls has the device. Refuses what the kernel does, with its error.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Makes this thread one that serves a volume: of the descriptors only `wake` (and the standard ones) stay, and the volume
/// is mounted at `at` in the machine whose process `inside` is. Gives the device to serve.
pub fn mount(inside: RawFd, wake: RawFd, at: &Path) -> io::Result<OwnedFd> {
    // SAFETY: the thread gets copies of what it shares with others; nobody else is affected.
    check(unsafe { libc::unshare(libc::CLONE_FILES | libc::CLONE_FS) })?;
    close_all_but(inside.min(wake), inside.max(wake));
    let home = File::open("/proc/thread-self/ns/mnt")?;
    // SAFETY: moves this thread alone into the machine's mounts.
    check(unsafe { libc::setns(inside, libc::CLONE_NEWNS) })?;
    let device = open_and_mount(at);
    // SAFETY: moves it back, so that it does not keep the machine's mounts; then the number is closed once, and was
    // this thread's own copy.
    check(unsafe { libc::setns(home.as_raw_fd(), libc::CLONE_NEWNS) })?;
    // SAFETY: as above.
    check(unsafe { libc::close(inside) })?;
    device
}

/// From here on this thread, and all that it starts, have mounts of their own: what is mounted there nobody else sees, and it
/// ends with the last of them. Gives the descriptor that a volume is mounted by.
pub(super) fn own_mounts() -> io::Result<OwnedFd> {
    // SAFETY: the thread gets copies of what it shares with others; nobody else is affected.
    check(unsafe { libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS) })?;
    let (none, root, flags) = (
        std::ptr::null(),
        c"/".as_ptr(),
        libc::MS_REC | libc::MS_PRIVATE,
    );
    // SAFETY: all strings are valid; only how mounts of this thread are told to others is changed.
    check(unsafe { libc::mount(none, root, none, flags, std::ptr::null()) })?;
    Ok(File::open("/proc/thread-self/ns/mnt")?.into())
}

fn open_and_mount(at: &Path) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the path is a valid string.
    let device = unsafe { libc::open(c"/dev/fuse".as_ptr(), flags) };
    check(device)?;
    // SAFETY: a new descriptor, owned once.
    let device = unsafe { OwnedFd::from_raw_fd(device) };
    let options = format!(
        "fd={},rootmode=40755,user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let (options, at) = (
        CString::new(options)?,
        CString::new(at.as_os_str().as_bytes())?,
    );
    // SAFETY: all strings are valid and end with a zero byte.
    check(unsafe {
        libc::mount(
            c"testvol".as_ptr(),
            at.as_ptr(),
            c"fuse.testvol".as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV,
            options.as_ptr().cast(),
        )
    })?;
    Ok(device)
}

/// Closes this thread's copies of all descriptors but two and the standard ones.
fn close_all_but(low: RawFd, high: RawFd) {
    for (first, last) in [(3, low - 1), (low + 1, high - 1), (high + 1, RawFd::MAX)] {
        if first <= last {
            // SAFETY: the table of descriptors is this thread's own, and nothing in this thread uses those.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    }
}

fn check(result: i32) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
