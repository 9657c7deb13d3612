//! What a QEMU's guest has written, from start to stop of the tracking.
//!
//! Owned by whoever tracks; ends with that. Asks QEMU's preloaded library for a fresh descriptor each time, so that a VM
//! process that took QEMU over can track as well as the one that started it. Huge pages are left alone meanwhile. Refuses
//! to look where nothing is tracked.

use crate::tracker::open_pagemap;
use crate::{
    Error, GuestMapping, HugePages, PageSet, RamFile, ScanMode, Tracking, Untracked, handout,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for the descriptor.
const HANDOUT_WAIT: Duration = Duration::from_secs(5);

/// How QEMU's writes are tracked.
#[derive(Debug)]
pub struct DirtyTracker {
    ram: Arc<RamFile>,
    qemu_pid: u32,
    handout_socket: PathBuf,
    tracking: Option<Tracking>,
    huge_pages: Arc<HugePages>,
}

impl DirtyTracker {
    /// A tracker for a QEMU.
    pub fn new(
        ram: Arc<RamFile>,
        qemu_pid: u32,
        handout_socket: PathBuf,
        huge_pages: Arc<HugePages>,
    ) -> Self {
        Self {
            ram,
            qemu_pid,
            handout_socket,
            tracking: None,
            huge_pages,
        }
    }

    /// Begins: every page counts as dirty now.
    pub fn start(&mut self) -> Result<(), Error> {
        let socket = &self.handout_socket;
        let tracking = begin(&self.ram, self.qemu_pid, socket, &self.huge_pages)?;
        self.tracking = Some(tracking);
        Ok(())
    }

    /// Adds what was written since the last scan.
    pub fn scan(&mut self, dirty: &mut PageSet) -> Result<(), Error> {
        match &mut self.tracking {
            Some(tracking) => tracking.scan(dirty, ScanMode::default()).map(drop),
            None => Err(Error::TrackingLost),
        }
    }

    /// What was written since the last scan; changes nothing.
    pub fn peek(&mut self, page_count: u64) -> Result<PageSet, Error> {
        let mut written = PageSet::new(page_count);
        match &mut self.tracking {
            Some(tracking) => tracking.peek(&mut written).map(|_| written),
            None => Err(Error::TrackingLost),
        }
    }

    /// Ends the tracking; huge pages are put back in the background.
    pub fn stop(&mut self) {
        let Some(tracking) = self.tracking.take() else {
            return;
        };
        // A QEMU that is gone has nothing to unregister.
        let _ = tracking.stop();
        self.huge_pages.put_back();
    }
}

/// Begins to track a QEMU's writes; huge pages are left alone from then on, and put back at once where it fails.
pub fn begin(
    ram: &RamFile,
    qemu_pid: u32,
    handout_socket: &Path,
    huge_pages: &HugePages,
) -> Result<Tracking, Error> {
    let tracked = || {
        let deadline = Instant::now() + HANDOUT_WAIT;
        let uffd = handout::request_uffd(handout_socket, qemu_pid, deadline)?;
        let mapping = GuestMapping::find(qemu_pid, ram)?;
        Untracked::new(uffd, open_pagemap(qemu_pid)?, mapping)?.start()
    };
    huge_pages.leave();
    tracked().inspect_err(|_| huge_pages.put_back())
}
