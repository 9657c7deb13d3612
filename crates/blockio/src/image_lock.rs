//! Who may use an image: byte locks on the descriptor that carries its IO.
//!
//! They are OFD locks: the kernel holds them for as long as anything refers to the open file, and a request that is under way
//! does. So a successor that has the lock knows that nothing of its predecessor will be written any more. (Locks of the
//! process, as `fcntl` had them first, end when it closes its files, before its IO does.)
//!
//! Four ranges. One byte of our own, taken for writing by who writes the disk. One byte for each name of a reader, since a
//! dead reader's requests still write guest memory: of two with the same name the later waits for the earlier. And those by which QEMU and its tools tell
//! each other what they do (bytes from 100 on) and what they do not suffer (bytes from 200 on), one for each permission
//! (`block/file-posix.c` of QEMU): all of them take them for reading and look who else has them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Access, Error};

/// Far from QEMU's bytes.
const OURS: i64 = 300;
/// The first byte of readers' names.
const READERS: i64 = 1 << 32;
/// Byte of the first permission that somebody uses.
const USED: i64 = 100;
/// Byte of the first permission that somebody lets nobody else use.
const REFUSED: i64 = 200;
/// QEMU's permissions, by number.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// How often one looks whether a lock is free: a process that was killed has it for milliseconds.
const PAUSE: Duration = Duration::from_millis(5);

/// Takes a file that bears an image, as [`crate::Image::lock`], whatever else it is fit for.
pub fn take(
    file: &File,
    path: &Path,
    access: Access,
    name: &str,
    patience: Duration,
) -> Result<(), Error> {
    let until = Instant::now() + patience;
    loop {
        let refused = match attempt(file, access, name) {
            Ok(None) => return Ok(()),
            Ok(Some(holder)) => holder,
            Err(source) => {
                return Err(Error::Image {
                    action: "lock",
                    path: path.to_owned(),
                    source,
                });
            }
        };
        let ended = release(file, name);
        if Instant::now() >= until || ended.is_err() {
            return Err(Error::InUse {
                path: path.to_owned(),
                holder: refused.to_owned(),
            });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Takes all bytes, or says who has one.
fn attempt(file: &File, access: Access, name: &str) -> io::Result<Option<&'static str>> {
    let writes = access == Access::ReadWrite;
    if !writes {
        let byte = byte_of(name);
        if !set(file, libc::F_RDLCK, byte, 1)? || held_by_another(file, byte)? {
            return Ok(Some("the same disk of this VM has it open"));
        }
    }
    let kind = if writes { libc::F_WRLCK } else { libc::F_RDLCK };
    if !set(file, kind, OURS, 1)? {
        return Ok(Some("a disk of this or another VM has it open"));
    }
    let used: &[i64] = if writes {
        &[READ, WRITE, RESIZE]
    } else {
        &[READ]
    };
    let theirs = Some("QEMU or one of its tools has it open");
    for byte in used.iter().map(|permission| USED + permission) {
        if !set(file, libc::F_RDLCK, byte, 1)? {
            return Ok(theirs);
        }
    }
    for byte in [REFUSED + WRITE, REFUSED + RESIZE] {
        if !set(file, libc::F_RDLCK, byte, 1)? {
            return Ok(theirs);
        }
    }
    for permission in used {
        if held_by_another(file, REFUSED + permission)? {
            return Ok(theirs);
        }
    }
    // Between disks of ours the byte of our own has decided.
    for permission in [WRITE, RESIZE] {
        if held_by_another(file, USED + permission)? {
            return Ok(theirs);
        }
    }
    Ok(None)
}

/// Gives back what [`take`] took for this name, and tells whether it could.
pub fn release(file: &File, name: &str) -> io::Result<bool> {
    set(file, libc::F_UNLCK, byte_of(name), 1)?;
    set(file, libc::F_UNLCK, USED, OURS + 1 - USED)
}

/// The same in every version: FNV-1a, cut to what a lock's offset may be.
fn byte_of(name: &str) -> i64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    READERS + (hash >> 3) as i64
}

fn lock_of(kind: libc::c_int, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// Whether it could be set.
fn set(file: &File, kind: libc::c_int, start: i64, len: i64) -> io::Result<bool> {
    let lock = lock_of(kind, start, len);
    // SAFETY: the descriptor is open, and the kernel only reads the structure that is behind the pointer.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// Whether anybody else has this byte.
fn held_by_another(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, and the kernel reads and writes the structure that is behind the pointer, nothing else.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}
