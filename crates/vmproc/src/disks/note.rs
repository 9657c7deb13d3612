//! What a person is to know of a VM's disks: those that wait for storage which does not answer, are moved, are full, or are not served.
//!
//! Storage that hangs fails nothing: what is under way just does not end. So that is what is looked at, again and again, and since when it
//! is so stands in each disk's gauge. Owns nothing. Refuses nothing.

use super::Disks;
use crate::adoption::lock;
use godwit_types::vm::DiskSpec;
use godwit_vhost::{Disk, Error, Status};
use std::time::{Duration, Instant};

/// From when on storage of which nothing has come is said not to answer: slow storage takes seconds for a request.
const SILENT_AFTER: Duration = Duration::from_secs(10);

impl Disks {
    /// What to say of them now.
    pub(crate) fn note(&self) -> Option<String> {
        self.note_at(Instant::now())
    }

    fn note_at(&self, now: Instant) -> Option<String> {
        let silent = || self.note_of(|disk| disk.is_silent(now).then(|| silent(disk.spec)));
        let other = || self.note_of(|disk| disk.full_or_not_served());
        silent().or_else(|| self.moves_note()).or_else(other)
    }

    /// The first of which there is something to say.
    fn note_of(&self, say: impl Fn(&Seen<'_>) -> Option<String>) -> Option<String> {
        let (what, disks) = (self.0.what(), lock(&self.0.disks));
        let all = disks.iter().zip(&self.0.gauges).zip(&what.disks);
        all.map(|((disk, gauge), spec)| Seen {
            spec,
            glance: disk.as_deref().map(Disk::glance),
            waits_since: gauge.waits_since(),
        })
        .find_map(|seen| say(&seen))
    }

    /// Looks whether anything comes of what each has under way, before it is tried again to serve those that are not.
    pub(super) fn watch_storage(&self, now: Instant) {
        let disks = lock(&self.0.disks);
        for (index, (disk, gauge)) in disks.iter().zip(&self.0.gauges).enumerate() {
            // Counted first: what ends in between has not waited since then.
            let done = gauge.done();
            let waits = match disk.as_deref().map(Disk::glance) {
                Some(Ok(status)) => status.under_way > 0 && status.full_for.is_none(),
                Some(Err(error)) => matches!(error, Error::Silent { .. }),
                // Its image is being opened since the last look.
                None => self.0.is_tried(index),
            };
            gauge.watch(waits.then_some(done), now);
        }
    }
}

/// A disk as it is just now.
struct Seen<'a> {
    spec: &'a DiskSpec,
    /// Nothing of one that no thread serves.
    glance: Option<Result<Status, Error>>,
    /// Since when nothing has come of what it waits for.
    waits_since: Option<Instant>,
}

impl Seen<'_> {
    /// Whether its storage has answered nothing for long.
    fn is_silent(&self, now: Instant) -> bool {
        let is_long = |since| now.saturating_duration_since(since) >= SILENT_AFTER;
        match &self.glance {
            Some(Err(Error::Silent { .. })) => true,
            Some(Ok(status)) if status.full_for.is_some() => false,
            Some(Err(_)) => false,
            Some(Ok(_)) | None => self.waits_since.is_some_and(is_long),
        }
    }

    fn full_or_not_served(&self) -> Option<String> {
        let DiskSpec { name, path, .. } = self.spec;
        match &self.glance {
            Some(Ok(status)) if status.full_for.is_some() && status.fails => Some(format!(
                "disk-error: requests to disk '{name}' wait, since the storage of {path} fails: see the kernel's log on this host; they are tried again each second, and go on by themselves"
            )),
            Some(Ok(status)) if status.full_for.is_some() => Some(format!(
                "disk-full: writes to disk '{name}' wait, since {path} has no room left: make room there, and they go on by themselves"
            )),
            Some(Ok(_)) => None,
            _ => Some(format!(
                "disk '{name}' is not served, and the guest waits for it: see the log of its VM process"
            )),
        }
    }
}

fn silent(spec: &DiskSpec) -> String {
    let DiskSpec { name, path, .. } = spec;
    format!(
        "the storage of disk '{name}' does not answer: see that {path} is reached on this host; the guest waits, and goes on by itself then"
    )
}

#[cfg(test)]
#[path = "note_tests.rs"]
mod tests;
