//! `testvol`: a file system for tests, whose faults a test sets and whose power a test cuts.
//!
//! A [`Volume`] is mounted in a test machine and served by a thread of the test through `/dev/fuse`. Its disk can be slow
//! ([`Settings::latency`], [`Settings::bytes_per_second`], [`Settings::ios_at_once`]), full, broken (`EIO`) and dead (every
//! request hangs until that is lifted). **A power cut drops what was not synced**: the bytes of a file since its last fsync,
//! and every name made, changed or removed since the last fsync of its directory. A file of which only the name was
//! synced is empty or torn afterwards. [`Survives`] says how much of the unsynced is left all the same, since a disk may
//! have written any part of it.
//!
//! How strict it is: syncing a file does not make its name durable, and syncing a directory does not make durable what is
//! in its files, nor a write that is durable by itself (`O_DSYNC`) what else is in its file; a rename, also between directories,
//! is kept or lost whole. Bytes survive in pages of 4096. Permissions
//! and owners go with their node's own fsync. A sync that failed leaves everything unsynced, and a later one makes it up.
//!
//! The tree and both its views belong to the [`Volume`]; everything is in memory and ends with it. The kernel keeps locks
//! and caches; it does not keep back writes, so that the volume knows of every one. The serving thread has descriptors of
//! its own: when the process dies, even while one of its threads waits for this very volume, the kernel closes them, and
//! whoever waits for the volume is woken with an error. Dropping the value does the same, whatever hangs.
//! A volume for images ([`Volume::mount_direct`]) keeps extended attributes of users, which a sync of their file makes durable and one of
//! its data alone does not. Refuses: all other attributes, locks between machines, and more than one machine for a volume.

mod attributes;
mod chance;
mod content;
mod disk;
mod mount;
mod operations;
mod protocol;
mod serve;
mod sharing;
mod tree;

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use chance::Chance;
pub use chance::Survives;
use mount::own_mounts;
use serve::{Shared, State};

/// Number of an error, as the kernel knows it.
type Errno = i32;

/// What the disk is like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// How long each read, write and sync of data takes.
    pub latency: Duration,
    /// How fast data is read and written, altogether.
    pub bytes_per_second: Option<u64>,
    /// Whether all that is under way shares that evenly; else one transfer comes after the other, as they began, and a small
    /// one is behind every larger one. [`Settings::ios_at_once`] says nothing then.
    pub shares: bool,
    /// Reads, writes and syncs that are under way at the same time; further ones wait.
    pub ios_at_once: Option<usize>,
    /// Bytes that fit; a write or a new name beyond that ends with `ENOSPC`. Each node takes 4096 beside its data.
    pub capacity: Option<u64>,
    /// What ends with `EIO`.
    pub fails: Fails,
    /// No request is answered until this is lifted; one that came meanwhile is then done.
    pub hangs: bool,
}

/// What ends with `EIO`, and has done nothing then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fails {
    /// Reads of data that the kernel does not have in its cache.
    pub reads: bool,
    /// Writes of data and changes of names.
    pub writes: bool,
    /// Syncs of files and directories.
    pub syncs: bool,
}

/// What a volume was asked for so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Syncs of files and directories.
    pub syncs: u64,
    /// Requests that wait because the volume hangs or has no power.
    pub held: usize,
}

#[derive(Debug)]
pub struct Volume {
    at: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Why no volume can be mounted on this machine, in words that go behind "skipped:".
pub fn unavailable() -> Option<String> {
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse");
    opened
        .err()
        .map(|error| format!("/dev/fuse cannot be opened: {error}"))
}

/// Works on a thread with mounts of its own, by which volumes are mounted. Nothing, which is said, where this machine has none.
pub fn apart<T: Send>(work: impl FnOnce(&OwnedFd) -> T + Send) -> io::Result<Option<T>> {
    if let Some(why) = unavailable() {
        println!("skipped: {why}");
        return Ok(None);
    }
    let inside = || own_mounts().map(|mounts| Some(work(&mounts)));
    std::thread::scope(|scope| match scope.spawn(inside).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// The same for a test, which is skipped where this machine, or this user, cannot mount anything.
pub fn apart_or_skipped(work: impl FnOnce(&OwnedFd) + Send) {
    match apart(work) {
        Ok(_) => {}
        Err(error) if rustix::process::geteuid().is_root() => panic!("root has mounts: {error}"),
        Err(error) => println!("skipped: mounts of one's own need root: {error}"),
    }
}

impl Volume {
    /// Mounts an empty volume at `at`, a directory that is there, as the process behind `inside` (a process descriptor)
    /// sees the file system. Needs root.
    pub fn mount(inside: BorrowedFd<'_>, at: &Path) -> io::Result<Self> {
        Self::begin(inside, at, Shared::new(false)?)
    }

    /// The same, whose files the kernel caches nothing of, and to one of which it makes several writes at a time. So direct
    /// IO meets what it meets on a local file system, where a program's requests do not wait for each other.
    pub fn mount_direct(inside: BorrowedFd<'_>, at: &Path) -> io::Result<Self> {
        Self::begin(inside, at, Shared::new(true)?)
    }

    fn begin(inside: BorrowedFd<'_>, at: &Path, shared: Shared) -> io::Result<Self> {
        let shared = Arc::new(shared);
        let (inside, place) = (inside.as_raw_fd(), at.to_owned());
        let (tell, told) = std::sync::mpsc::channel();
        let served = shared.clone();
        let thread = std::thread::Builder::new()
            .name("testvol".to_owned())
            .spawn(
                move || match mount::mount(inside, served.wake_fd(), &place) {
                    Ok(device) => {
                        let _ = tell.send(Ok(())); // the other end waits for this
                        serve::serve(&served, device);
                    }
                    Err(error) => {
                        let _ = tell.send(Err(error)); // as above
                    }
                },
            )?;
        let mounted = told.recv();
        let mut volume = Self {
            at: at.to_owned(),
            shared,
            thread: Some(thread),
        };
        match mounted {
            Ok(Ok(())) => Ok(volume),
            other => {
                volume.end();
                let text = "the thread of a volume ended at once";
                Err(other.map_or_else(
                    |_| io::Error::other(text),
                    |told| told.err().unwrap_or_else(|| io::Error::other(text)),
                ))
            }
        }
    }

    /// Where it is mounted, as its machine sees it.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// What the disk is like now.
    pub fn settings(&self) -> Settings {
        self.state().settings.clone()
    }

    /// Changes what the disk is like.
    pub fn change(&self, change: impl FnOnce(&mut Settings)) {
        self.state().change(change);
        self.shared.wake();
    }

    /// Leaves no room for anything new.
    pub fn fill(&self) {
        let used = self.used();
        self.change(|settings| settings.capacity = Some(used));
    }

    /// Bytes that its files and names take.
    pub fn used(&self) -> u64 {
        self.state().tree.used()
    }

    /// What it was asked for so far.
    pub fn counts(&self) -> Counts {
        self.state().counts()
    }

    /// Waits until so many requests wait because the volume hangs or has no power.
    pub fn wait_held(&self, requests: usize, within: Duration) -> io::Result<()> {
        let deadline = Instant::now() + within;
        let mut state = self.state();
        while state.counts().held < requests {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::other(format!(
                    "no {requests} requests came to the volume at {} within {within:?}",
                    self.at.display()
                )));
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Takes the power away: what is left is decided now. Requests that wait now or come later wait for
    /// [`Volume::refuse_held`] or [`Volume::power_on`], and are never done.
    pub fn power_off(&self, survives: Survives) {
        self.state().power_off(survives);
    }

    /// Ends with `EIO` what came to a volume without power, so that processes that were killed there can end.
    pub fn refuse_held(&self) {
        self.state().refuse_held();
        self.shared.wake();
    }

    /// Gives the power back. Files that were open before are lost to their owners.
    pub fn power_on(&self) {
        self.refuse_held();
        self.state().power_on();
    }

    /// A power cut of which no process dies: for tests that have no process there. What waited is refused.
    pub fn cut(&self, survives: Survives) {
        self.power_off(survives);
        self.power_on();
    }

    /// Ends the volume: whoever waits for it gets an error.
    pub fn end(&mut self) {
        self.state().stop();
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its panic was printed, and all that it had is gone
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.end();
    }
}
