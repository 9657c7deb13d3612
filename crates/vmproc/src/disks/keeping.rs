//! What is made durable once the guest runs: the names of images that came with it, and what is known of the images that it has.
//!
//! On a thread of its own: storage may hang, and the guest's other host waits to hear that it runs. Owns when that is tried
//! again. Refuses: to write down what is known of an image that is not the disk's any more.

use super::images::keep_names;
use super::served::{Served, ServedDisks};
use super::{Disks, MEND_EVERY};
use crate::adoption::lock;
use crate::hypervisor::internal;
use godwit_qemu::disk::identity_of_open;
use godwit_types::ApiError;
use godwit_types::image::KnownImage;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What is to be kept, and when that was tried.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    /// What is known of images and not written down yet.
    due: Mutex<Vec<KnownImage>>,
    is_busy: AtomicBool,
    /// When it failed last, and why.
    failed: Mutex<Option<(Instant, String)>>,
}

impl Disks {
    /// To be called while the guest runs here, and again now and then: what fails is tried again.
    pub(crate) fn keep_what_came(&self) {
        let served = &self.0;
        let keeping = &served.keeping;
        let waits = lock(&keeping.failed)
            .as_ref()
            .is_some_and(|(at, _)| at.elapsed() < MEND_EVERY);
        if waits || !served.has_to_keep() || keeping.is_busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let served = Arc::clone(served);
        let work = move || {
            served.keep();
            served.keeping.is_busy.store(false, Ordering::SeqCst);
        };
        let thread = std::thread::Builder::new().name("disk-keep".into());
        if let Err(error) = thread.spawn(work) {
            self.0.keeping.failed_for(error.to_string());
            keeping.is_busy.store(false, Ordering::SeqCst);
        }
    }
}

impl Keeping {
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// Says why, once for each reason: it may be tried for days.
    fn failed_for(&self, why: String) {
        let mut failed = lock(&self.failed);
        if failed.as_ref().is_none_or(|(_, before)| *before != why) {
            tracing::warn!(
                why,
                "what is known of the VM's disks is not written yet; this is tried again"
            );
        }
        *failed = Some((Instant::now(), why));
    }
}

impl Served {
    /// What is known of a disk's image, also before it is written down.
    pub(super) fn known_of(&self, what: &ServedDisks, disk: &str) -> Option<KnownImage> {
        let due = lock(&self.keeping.due);
        let due = due.iter().find(|known| known.disk == disk);
        due.or_else(|| what.known_image(disk)).cloned()
    }

    /// Has it written down once it is durable at the image.
    pub(super) fn keep_later(&self, known: KnownImage) {
        if self.what().known.contains(&known) {
            return;
        }
        let mut due = lock(&self.keeping.due);
        due.retain(|before| before.disk != known.disk);
        due.push(known);
    }

    /// The disk has another image now, of which something else is known.
    pub(super) fn keep_no_more(&self, disk: &str) {
        lock(&self.keeping.due).retain(|known| known.disk != disk);
    }

    fn has_to_keep(&self) -> bool {
        self.has_arrived() || self.held().is_some() && !lock(&self.keeping.due).is_empty()
    }

    /// Whether images that came with the guest have their names, which may not be durable yet.
    fn has_arrived(&self) -> bool {
        let what = self.what();
        what.arriving
            .as_ref()
            .is_some_and(|arrival| arrival.is_here)
    }

    fn keep(&self) {
        let kept = self.keep_arrived().and_then(|()| self.keep_claims());
        match kept {
            Ok(()) => *lock(&self.keeping.failed) = None,
            Err(error) => self.keeping.failed_for(error.message),
        }
    }

    /// Makes the names of images durable that came with the guest. Where that fails whoever starts the VM next finds them.
    pub(super) fn keep_arrived(&self) -> Result<(), ApiError> {
        if !self.has_arrived() {
            return Ok(());
        }
        let filled = std::mem::take(&mut *lock(&self.filling));
        if !filled.is_empty() {
            *lock(&self.filled) = Arc::downgrade(&filled);
        }
        drop(filled);
        self.have_come();
        keep_names(&self.what().disks, None).map_err(internal)?;
        self.change(|what| what.arriving = None)
    }

    fn keep_claims(&self) -> Result<(), ApiError> {
        let due = lock(&self.keeping.due).clone();
        due.into_iter().try_for_each(|known| self.keep_claim(known))
    }

    fn keep_claim(&self, known: KnownImage) -> Result<(), ApiError> {
        let what = self.what();
        let Some((spec, image)) = what.with_image(&known.disk) else {
            return Ok(());
        };
        // Not on the disk's own descriptor: a flush of the guest's must hear itself of what the storage lost.
        let file = self.open_file(spec)?;
        let told = |error: std::io::Error| self.refused(spec, &format!("{}: {error}", spec.path));
        if identity_of_open(&file).map_err(told)? != image {
            let path = &spec.path;
            return Err(self.refused(
                spec,
                &format!("{path} is another file than the one that the guest works with"),
            ));
        }
        file.sync_all().map_err(told)?;
        let mut due = lock(&self.keeping.due);
        // The disk may have got another image meanwhile.
        if due.contains(&known) {
            self.change(|what| what.know(known.clone()))?;
            due.retain(|other| *other != known);
        }
        Ok(())
    }
}
