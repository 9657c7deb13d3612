//! What the guest has written, from start to stop of the tracking, and huge pages put back afterwards.
//!
//! Owned by the driver; ends with it. Asks QEMU's preloaded library for a fresh descriptor each time, so that a VM
//! process that took QEMU over can track as well as the one that started it.

use godwit_guestmem::collapse::open_pidfd;
use godwit_guestmem::tracker::open_pagemap;
use godwit_guestmem::{
    Collapse, Error, GuestMapping, PageSet, RamFile, ScanMode, Tracking, Untracked, handout,
};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Longest wait for the descriptor.
const HANDOUT_WAIT: Duration = Duration::from_secs(5);
/// Rest after each huge page that is put back: at most 1 GiB/s, on one thread, while the guest runs.
const COLLAPSE_PAUSE: Duration = Duration::from_millis(2);

/// How QEMU's writes are tracked.
#[derive(Debug)]
pub(crate) struct DirtyTracker {
    pub ram: Arc<RamFile>,
    pub qemu_pid: u32,
    pub handout_socket: PathBuf,
    tracking: Option<Tracking>,
    collapse: Arc<AtomicBool>,
}

impl DirtyTracker {
    /// A tracker for a QEMU; `collapse_cancel` ends the work that [`DirtyTracker::stop`] leaves behind.
    pub(crate) fn new(
        ram: Arc<RamFile>,
        qemu_pid: u32,
        handout_socket: PathBuf,
        collapse_cancel: Arc<AtomicBool>,
    ) -> Self {
        Self {
            ram,
            qemu_pid,
            handout_socket,
            tracking: None,
            collapse: collapse_cancel,
        }
    }

    /// Begins: every page counts as dirty now.
    pub(crate) fn start(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + HANDOUT_WAIT;
        let uffd = handout::request_uffd(&self.handout_socket, self.qemu_pid, deadline)?;
        let mapping = GuestMapping::find(self.qemu_pid, &self.ram)?;
        let untracked = Untracked::new(uffd, open_pagemap(self.qemu_pid)?, mapping)?;
        self.tracking = Some(untracked.start()?);
        Ok(())
    }

    /// Adds what was written since the last scan.
    pub(crate) fn scan(&mut self, dirty: &mut PageSet) -> Result<(), Error> {
        match &mut self.tracking {
            Some(tracking) => tracking.scan(dirty, ScanMode::default()).map(drop),
            None => Err(Error::TrackingLost),
        }
    }

    /// What was written since the last scan; changes nothing.
    pub(crate) fn peek(&mut self, page_count: u64) -> Result<PageSet, Error> {
        let mut written = PageSet::new(page_count);
        match &mut self.tracking {
            Some(tracking) => tracking.peek(&mut written).map(|_| written),
            None => Err(Error::TrackingLost),
        }
    }

    /// Ends the tracking; huge pages are put back in the background.
    pub(crate) fn stop(&mut self) {
        let Some(tracking) = self.tracking.take() else {
            return;
        };
        // A QEMU that is gone has nothing to unregister.
        let _ = tracking.stop();
        put_huge_pages_back(
            Arc::clone(&self.ram),
            self.qemu_pid,
            Arc::clone(&self.collapse),
        );
    }
}

/// Makes huge pages of guest RAM again, slowly, until done or cancelled. Failing is harmless: the guest is slower.
pub(crate) fn put_huge_pages_back(ram: Arc<RamFile>, qemu_pid: u32, cancel: Arc<AtomicBool>) {
    let work = move || {
        let Ok(pidfd) = open_pidfd(qemu_pid) else {
            return;
        };
        let Ok(mapping) = GuestMapping::find(qemu_pid, &ram) else {
            return;
        };
        let collapse = Collapse {
            pidfd: pidfd.as_fd(),
            mapping: &mapping,
            ram: &ram,
            pause: COLLAPSE_PAUSE,
        };
        match collapse.run(&cancel) {
            Ok(counts) => tracing::info!(?counts, "huge pages put back"),
            Err(error) => tracing::warn!(%error, "huge pages were not put back"),
        }
    };
    if let Err(error) = std::thread::Builder::new()
        .name("collapse".into())
        .spawn(work)
    {
        tracing::warn!(%error, "huge pages are not put back");
    }
}
