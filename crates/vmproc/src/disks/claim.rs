//! The record that an image bears: taken before the image is written, under the generation of the permit.
//!
//! Hosts that share an image tell each other by it who has it, and a host knows by it an image that was put back from an old
//! copy. What it says is judged by [`ImageClaim`]. Owns nothing: the record is the image's. Refuses: an image that the record
//! gives to another host, or that is an older one; shared images on storage that keeps no such record. Block devices bear none.

use super::Disks;
use super::served::{Served, ServedDisks};
use crate::faults::planted;
use crate::harden::stay_private;
use crate::image::record_of;
use godwit_blockio::Image;
use godwit_blockio::holder;
use godwit_ownership::{ImageClaim, ImageId, ImageRecord, KnownImage};
use godwit_qemu::disk::{as_user, identity_of_open};
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, Generation, HostName};
use rustix::fs::{FileType, fstat, fsync};
use rustix::io::Errno;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

/// How often it is begun anew where another host took the record meanwhile.
const ATTEMPTS: u32 = 16;

/// For whom an image is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taking {
    /// A hypervisor that is started.
    Anew,
    /// One that has it.
    Again,
    /// One whose guest stands still: the record is made durable later, unless another host had the image.
    InAPause,
}

impl Disks {
    /// The guest runs here: makes durable, and writes down, what was claimed while it stood still.
    pub(crate) fn keep_claims(&self) {
        let served = &self.0;
        let Some(generation) = served.held() else {
            return;
        };
        if !served.claims_due.swap(false, Ordering::SeqCst) {
            return;
        }
        if let Err(error) = served.keep_claims(generation) {
            served.claims_due.store(true, Ordering::SeqCst);
            tracing::warn!(%error, "under which generation the VM's images are here is not written yet");
        }
    }
}

impl Served {
    /// Takes a disk's image, which is open, for this host under this generation. Returns what is to be known of it from now on
    /// once that is durable; nothing where the image bears no record.
    pub(super) fn claim(
        &self,
        spec: &DiskSpec,
        image: BorrowedFd<'_>,
        generation: Generation,
        taking: Taking,
    ) -> Result<Option<KnownImage>, ApiError> {
        let refused = |error: &dyn Display| self.refused(spec, error);
        let bears = bears_record(spec, image).map_err(|errno| refused(&errno))?;
        if !bears || planted("image-not-judged") {
            return Ok(None);
        }
        let path = &spec.path;
        match self.as_opener(|| self.claim_as_opener(spec, image, generation, taking)) {
            Ok(Ok(known)) => Ok(Some(known)),
            Ok(Err(why)) => Err(refused(&format!(
                "the image {path} is not opened: {why}; 'godwit image show {path}' tells what it says of itself, and if this disk is to have it all the same, 'godwit image release {path}' on this host lets it"
            ))),
            Err(error) if error.kind() == io::ErrorKind::Unsupported && !spec.shared => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Err(refused(&format!(
                "hosts that share an image tell each other by its extended attributes (user.*) who has it, and the file system of {path} keeps none: mount it so that it does (NFS: version 4.2), or leave out 'shared = true'"
            ))),
            Err(error) => Err(refused(&format!(
                "which host has the image {path} cannot be told: {error}"
            ))),
        }
    }

    /// A disk on shared storage that comes with its VM: its image must be the one that the other host has, and no file of the
    /// same name.
    pub(super) fn must_be_at(
        &self,
        spec: &DiskSpec,
        image: &Image,
        host: &HostName,
    ) -> Result<(), ApiError> {
        let bears = bears_record(spec, image).map_err(|errno| self.refused(spec, &errno))?;
        if !spec.changes_hands() || !bears {
            return Ok(());
        }
        let held = self.as_opener(|| holder::read(image.as_fd()));
        let held = held.map_err(|error| self.refused(spec, &error))?;
        let record = held.and_then(|held| record_of(&held).ok());
        let is_there = record.is_some_and(|record| {
            (&record.vm, &record.disk, &record.holder) == (&self.config.vm, &spec.name, host)
        });
        match is_there {
            true => Ok(()),
            false => {
                let path = &spec.path;
                Err(self.refused(spec, &format!(
                    "host '{host}' has its image on shared storage, and {path} here does not say so ('godwit image show {path}'): mount the same storage there on both hosts, so that it keeps extended attributes (NFS: version 4.2), or leave out 'shared = true' for the disk"
                )))
            }
        }
    }

    /// What is known once the image is this host's, or why it is not.
    fn claim_as_opener(
        &self,
        spec: &DiskSpec,
        image: BorrowedFd<'_>,
        generation: Generation,
        taking: Taking,
    ) -> io::Result<Result<KnownImage, String>> {
        let what = self.what();
        let known = what.known.iter().find(|known| known.disk == spec.name);
        let fresh = fresh_id()?;
        let claim = ImageClaim {
            vm: &self.config.vm,
            disk: &spec.name,
            host: &self.config.host,
            generation,
            known,
            anew: taking == Taking::Anew,
            fresh: &fresh,
        };
        for _ in 0..ATTEMPTS {
            let held = holder::read(image)?;
            let found = match held.as_ref().map(record_of).transpose() {
                Ok(found) => found,
                Err(why) => return Ok(Err(why)),
            };
            let wanted = match claim.judge(found.as_ref()) {
                Ok(wanted) => wanted,
                Err(why) => return Ok(Err(why.to_string())),
            };
            let is_new = found.as_ref() != Some(&wanted);
            let text = serde_json::to_vec(&wanted).map_err(io::Error::other)?;
            if is_new && !holder::replace(image, held.as_ref(), &text)? {
                continue;
            }
            let of_another = found.is_none_or(|found| found.holder != wanted.holder);
            if taking != Taking::InAPause || of_another && spec.shared {
                // Also one that stood there: who wrote it may have died before it was durable.
                fsync(image)?;
            }
            return Ok(Ok(wanted.known()));
        }
        Err(io::Error::other("other hosts take it all the time"))
    }

    /// Takes the image of a disk that is served already.
    pub(super) fn claim_anew(
        &self,
        index: usize,
        spec: &DiskSpec,
        (generation, taking): (Generation, Taking),
    ) -> Result<Option<KnownImage>, ApiError> {
        let what = self.what();
        if spec.read_only || is_known(&what, spec, generation) {
            return Ok(None);
        }
        let image = self.open_file(spec)?;
        let found = identity_of_open(&image).map_err(|error| self.refused(spec, &error))?;
        if what.images.get(index) != Some(&found) {
            let path = &spec.path;
            return Err(self.refused(
                spec,
                &format!("{path} is another file than the one that the guest works with"),
            ));
        }
        if taking == Taking::InAPause {
            self.claims_due.store(true, Ordering::SeqCst);
        }
        self.claim(spec, image.as_fd(), generation, taking)
    }

    fn keep_claims(&self, generation: Generation) -> Result<(), ApiError> {
        let what = self.what();
        let mut claimed = Vec::new();
        for (index, spec) in what.disks.iter().enumerate() {
            claimed.extend(self.claim_anew(index, spec, (generation, Taking::Again))?);
        }
        match claimed.is_empty() {
            true => Ok(()),
            false => self.change(|what| claimed.into_iter().for_each(|known| what.know(known))),
        }
    }

    /// Whose an image is that somebody has open, as far as it says.
    pub(super) fn named(&self, image: &Image, error: godwit_blockio::Error) -> String {
        let of_another = |record: &ImageRecord| record.vm != self.config.vm;
        let held = self.as_opener(|| holder::read(image.as_fd()));
        let held = held.ok().flatten();
        let record = held
            .and_then(|held| record_of(&held).ok())
            .filter(of_another);
        match (error, record) {
            (godwit_blockio::Error::InUse { path, .. }, Some(record)) => {
                let ImageRecord { vm, disk, .. } = record;
                let path = path.display();
                format!(
                    "the image {path} is in use: disk '{disk}' of VM '{vm}' has it open; stop that VM, or give this disk another image"
                )
            }
            (error, _) => error.to_string(),
        }
    }

    /// With the rights with which images are opened: on a file server this process may have none.
    fn as_opener<R: Send>(&self, work: impl Fn() -> io::Result<R> + Sync) -> io::Result<R> {
        let own = self.what().uid;
        let (common, gid) = (self.config.qemu_uid, self.config.qemu_gid);
        let mut done = Err(io::ErrorKind::PermissionDenied.into());
        for uid in [own, common] {
            done = as_user(uid, gid, || Ok(work())).map_err(io::Error::from)?;
            let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
            if !done.as_ref().is_err_and(is_denied) {
                break;
            }
        }
        stay_private()?;
        done
    }
}

impl ServedDisks {
    /// In the place of what was known of the disk's image.
    pub(super) fn know(&mut self, known: KnownImage) {
        self.known.retain(|before| before.disk != known.disk);
        self.known.push(known);
    }
}

fn is_known(what: &ServedDisks, spec: &DiskSpec, generation: Generation) -> bool {
    let mut known = what.known.iter();
    known.any(|known| known.disk == spec.name && known.generation == generation)
}

/// Whether a disk's image bears a record once its guest may write it: a block device cannot.
fn bears_record(spec: &DiskSpec, image: impl AsFd) -> Result<bool, Errno> {
    let kind = FileType::from_raw_mode(fstat(image)?.st_mode);
    Ok(!spec.read_only && kind != FileType::BlockDevice)
}

fn fresh_id() -> io::Result<ImageId> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(ImageId::new(u128::from_be_bytes(bytes)))
}
