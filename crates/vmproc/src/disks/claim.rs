//! The record that an image bears: taken before the image is written, under the generation of the permit.
//!
//! Hosts that share an image tell each other by it who has it, and a host knows by it an image that was put back from an old
//! copy. What it says is judged by [`ImageClaim`]. Owns nothing: the record is the image's. Refuses: an image that the record
//! gives to another host, that is kept for another VM of this one ([`is_kept`]), or that is an older one; shared images on storage that keeps no such record. Block devices
//! bear one where they have a label ([`super::labelled`]).

use super::former::Former;
use super::kept::{is_kept, said_of_another};
use super::layers::has_layers_here;
use super::served::{Served, ServedDisks};
use super::{LOCK_WAIT, lock_name};
use crate::adoption::lock;
use crate::faults::planted;
use crate::image::{readable_record, record_of};
use godwit_blockio::{Image, holder, label};
use godwit_ownership::{ImageClaim, ImageRecord, ImageRefusal};
use godwit_qemu::device::{is_in_use, is_used};
use godwit_qemu::disk::identity_of;
use godwit_qemu::parent::{is_not_written, is_parent};
use godwit_qemu::rights::as_user;
use godwit_types::datastore::is_device_path;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::image::{ImageId, KnownImage};
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, Generation, HostName};
use godwit_vhost::Disk;
use rustix::fs::{FileType, fstat, fsync};
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// How often it is begun anew where another host took the record meanwhile.
const ATTEMPTS: u32 = 16;
/// Bytes by which a record may be longer than the one before it: names and numbers are.
const LONGER: usize = 256;

/// For whom an image is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taking {
    /// A hypervisor that is started.
    Anew,
    /// One whose guest stands still, and goes on from what it knows.
    GoesOn,
    /// One that has it, and whose guest may be running: only what the image says can keep it from its disk.
    Again,
}

/// Why an image was not taken.
enum NotTaken {
    /// For what it says.
    Refused(String),
    /// It does not say anything that can be read.
    Unread(io::Error),
    /// It may be taken, and says nothing of that.
    Unwritten {
        error: io::Error,
        /// What is to be known of it, if it says nothing else.
        known: Option<KnownImage>,
    },
}

impl From<io::Error> for NotTaken {
    fn from(error: io::Error) -> Self {
        Self::Unread(error)
    }
}

/// What was done with other rights than this process has.
pub(super) trait Denied: From<io::Error> + Send {
    /// Whether the rights were missing.
    fn is_denied(&self) -> bool;
}

impl Denied for io::Error {
    fn is_denied(&self) -> bool {
        self.kind() == io::ErrorKind::PermissionDenied
    }
}

impl Denied for NotTaken {
    fn is_denied(&self) -> bool {
        match self {
            Self::Refused(_) => false,
            Self::Unread(error) | Self::Unwritten { error, .. } => error.is_denied(),
        }
    }
}

impl Served {
    /// Takes a disk's image, which is open, for this host under this generation. Returns what is to be known of it from now on
    /// once that is durable; nothing where its guest may not write it, or where it cannot be told.
    pub(super) fn claim(
        &self,
        spec: &DiskSpec,
        image: BorrowedFd<'_>,
        generation: Generation,
        taking: Taking,
    ) -> Result<Option<KnownImage>, ApiError> {
        if planted("image-not-judged") {
            return Ok(None);
        }
        let path = &spec.path;
        let refused = |error: &dyn Display| Err(self.refused(spec, error));
        if taking == Taking::Anew {
            self.must_not_be_kept(spec, image)?;
        }
        if spec.read_only {
            return Ok(None);
        }
        // Where that cannot be told it is as it always was.
        let is_used = || self.as_opener(|| is_used(image)).unwrap_or(false);
        if taking == Taking::Anew && is_device_path(path) && is_used() {
            return refused(&is_in_use(path));
        }
        self.bring_label_to_end(spec, image);
        self.must_be_made_for(spec, image).map_err(|why| {
            self.refused(
                spec,
                &format!("the image {path} is not opened: it is {why}"),
            )
        })?;
        match self.as_opener(|| self.claim_as_opener(spec, image, generation, taking)) {
            Ok(known) => Ok(Some(known)),
            Err(NotTaken::Refused(why)) => refused(&format!(
                "the image {path} is not opened: {why}; 'godwit image show {path}' tells what it says of itself"
            )),
            Err(NotTaken::Unread(error)) => {
                let why = format!("which host has the image {path} cannot be told: {error}");
                if taking == Taking::Anew || taking == Taking::GoesOn && spec.shared {
                    return refused(&format!(
                        "{why}; see that its storage answers, and try again"
                    ));
                }
                tracing::warn!(
                    disk = spec.name,
                    why,
                    "the guest goes on with its disk all the same"
                );
                Ok(None)
            }
            // Another host would have to find it.
            Err(NotTaken::Unwritten { error, .. }) if spec.shared && taking != Taking::Again => {
                refused(&must_be_written(path, &error))
            }
            Err(NotTaken::Unwritten { error, known, .. }) => {
                if error.kind() != io::ErrorKind::Unsupported {
                    let disk = &spec.name;
                    tracing::warn!(disk, %error, "the disk's image does not say that this host has it");
                }
                Ok(known)
            }
        }
    }

    /// Refuses the image of another VM of this host, which is off: that would find its disk changed, or its guest's data would be read by
    /// another one. That VM cannot take it meanwhile, since it is locked. What is read of it in vain is read again by who takes it.
    fn must_not_be_kept(&self, spec: &DiskSpec, image: BorrowedFd<'_>) -> Result<(), ApiError> {
        if self.what().is_plain(&spec.path) {
            return Ok(());
        }
        let said = self.as_opener(|| said_of_another(&self.config, image));
        let record = said.ok().flatten();
        let look = |path: &Path| self.as_opener(|| identity_of(path));
        let Some(ImageRecord { vm, disk, .. }) =
            record.filter(|record| is_kept(&self.config, record, image, &look))
        else {
            return Ok(());
        };
        let (path, release) = (&spec.path, release(spec));
        Err(self.refused(spec, &format!(
            "the image {path} is not opened: it is disk '{disk}' of VM '{vm}', which this host has, too: delete that VM, or make a copy of the image for this disk; {release}; 'godwit image show {path}' tells what it says of itself"
        )))
    }

    /// Refuses to write what linked disks begin as. It may bear their mark since it was opened; from its lock on it does not get one.
    pub(super) fn must_not_be_parent(
        &self,
        spec: &DiskSpec,
        image: &Image,
    ) -> Result<(), ApiError> {
        if spec.read_only {
            return Ok(());
        }
        let is_parent = self.as_opener(|| is_parent(image.as_fd()).map_err(io::Error::from));
        match is_parent.map_err(|error| self.refused(spec, &error))? {
            false => Ok(()),
            true => Err(self.refused(spec, &is_not_written(image.path()))),
        }
    }

    /// A disk's image when its VM is to come from another host: what is known of it from now on. One on shared storage must be the
    /// one that the other host has, and no file of the same name, and this host must be able to take it.
    pub(super) fn expect(
        &self,
        spec: &DiskSpec,
        image: &Image,
        host: &HostName,
    ) -> Result<Option<KnownImage>, ApiError> {
        if spec.read_only {
            // What a host says of a VM that comes from it may be untrue.
            return self.must_not_be_kept(spec, image.as_fd()).map(|()| None);
        }
        let refused = |error: &dyn Display| self.refused(spec, error);
        let bears = self.bears(spec, image.as_fd());
        let bears = bears.map_err(|error| refused(&error))?;
        if !spec.changes_hands() || !bears {
            // Nobody has had it under any generation, and what the disk was here before is something else.
            let none =
                self.with_claim(spec, Generation(0), Taking::Anew, |claim| claim.judge(None));
            return none
                .map_err(|error| refused(&error))?
                .map(|none| Some(none.known()))
                .map_err(|why| refused(&why));
        }
        let path = &spec.path;
        let held = self.as_opener(|| {
            let held = holder::read(image.as_fd())?;
            let bytes = held.as_ref().map_or(0, |held| held.text.len()) + LONGER;
            holder::try_out(image.as_fd(), self.config.host.as_str(), bytes)?;
            Ok::<_, io::Error>(held)
        });
        let held = held.map_err(|error| refused(&must_be_written(path, &error)))?;
        let Some(record) = readable_record(held.as_ref()) else {
            return Err(refused(&format!(
                "host '{host}' has its image on shared storage, and {path} here bears no record of a host that has it: mount the same storage there on both hosts, so that it keeps extended attributes (NFS: version 4.2); if it is the same, an earlier version of Godwit has the VM: renew it first with 'godwit vm renew {}'",
                self.config.vm
            )));
        };
        let is_there =
            (&record.vm, &record.disk, &record.holder) == (&self.config.vm, &spec.name, host);
        let known = self.known_of(&self.what(), &spec.name);
        match known.map_or(Ok(()), |known| record.must_be_no_older(&known)) {
            _ if is_there && planted("image-not-judged") => Ok(Some(record.known())),
            Err(why) if is_there => Err(refused(&format!(
                "host '{host}' has its image on shared storage, and {path} here is not that one: {why}; mount the same storage there on both hosts; 'godwit image show {path}' tells what it says of itself"
            ))),
            Ok(()) if is_there => Ok(Some(record.known())),
            _ => Err(refused(&format!(
                "host '{host}' has its image on shared storage, and {path} here does not say so ('godwit image show {path}'): mount the same storage there on both hosts, or leave out 'shared = true' for the disk"
            ))),
        }
    }

    /// What looks like a label on a device that was a disk without one its guest may have written.
    fn bears(&self, spec: &DiskSpec, image: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(!self.what().is_plain(&spec.path) && bears_record(image)?)
    }

    fn with_claim<R>(
        &self,
        spec: &DiskSpec,
        generation: Generation,
        taking: Taking,
        judge: impl FnOnce(&ImageClaim<'_>) -> R,
    ) -> io::Result<R> {
        let what = self.what();
        let known = self.known_of(&what, &spec.name);
        let fresh = fresh_id()?;
        Ok(judge(&ImageClaim {
            vm: &self.config.vm,
            disk: &spec.name,
            host: &self.config.host,
            generation,
            known: known.as_ref(),
            anew: taking == Taking::Anew,
            fresh: &fresh,
            layered: lock(&self.layered).contains(&spec.name) || has_layers_here(&spec.path),
        }))
    }

    /// What is known once the image is this host's, or why it is not.
    fn claim_as_opener(
        &self,
        spec: &DiskSpec,
        image: BorrowedFd<'_>,
        generation: Generation,
        taking: Taking,
    ) -> Result<KnownImage, NotTaken> {
        self.with_claim(spec, generation, taking, |claim| {
            let bears = self.bears(spec, image)?;
            for _ in 0..ATTEMPTS {
                let held = match bears {
                    true => holder::read(image)?,
                    false => None,
                };
                let found = held.as_ref().map(record_of).transpose();
                let found = found
                    .map_err(|why| NotTaken::Refused(format!("{why}; {}", release(spec))))?
                    .flatten();
                let wanted = match held.is_some() && found.is_none() {
                    true => claim.judge_let_go(),
                    false => claim.judge(found.as_ref()),
                };
                let wanted = wanted
                    .map_err(|why| NotTaken::Refused(self.what_to_do(spec, claim.anew, &why)))?;
                if !bears || found.as_ref() == Some(&wanted) {
                    return Ok(wanted.known());
                }
                let unwritten = |error| NotTaken::Unwritten {
                    error,
                    known: found.is_none().then(|| wanted.known()),
                };
                let text = serde_json::to_vec(&wanted).map_err(io::Error::other)?;
                if !holder::replace(image, held.as_ref(), &text).map_err(unwritten)? {
                    continue;
                }
                if spec.shared {
                    // Other hosts must find it, also after their file server was gone.
                    fsync(image).map_err(|errno| unwritten(errno.into()))?;
                }
                return Ok(wanted.known());
            }
            Err(io::Error::other("other hosts take it all the time").into())
        })?
    }

    /// Why an image is not opened, and what a person can do.
    fn what_to_do(&self, spec: &DiskSpec, anew: bool, why: &ImageRefusal) -> String {
        let vm = &self.config.vm;
        match anew {
            true => format!("{why}; {}", release(spec)),
            // Whatever a person lets go: its memory is from before.
            false => format!(
                "{why}: start it anew with 'godwit vm stop {vm} --force' and 'godwit vm start {vm}'"
            ),
        }
    }

    /// Takes the image of a disk that is served, for a guest that goes on under this generation.
    pub(super) fn take_image(
        &self,
        (spec, disk): (&DiskSpec, &Disk),
        generation: Generation,
    ) -> Result<(), ApiError> {
        let refused = |error: godwit_vhost::Error| self.refused(spec, &error);
        if self.must_be_claimed(spec, generation) {
            let image = disk.lend_image().map_err(refused)?;
            let known = self.claim(spec, image.as_fd(), generation, Taking::GoesOn)?;
            known.into_iter().for_each(|known| self.keep_later(known));
        }
        if self.held() != Some(generation) {
            return Err(self.refused(spec, &"its guest may not run here any more"));
        }
        let taken = disk.take_image(&lock_name(&self.config, spec), LOCK_WAIT);
        taken.map_err(refused)
    }

    /// Whether a disk's image is to be looked at before its guest goes on. Of a shared one only its record tells that no other
    /// host has had it since, also where it was taken under this generation.
    pub(super) fn must_be_claimed(&self, spec: &DiskSpec, generation: Generation) -> bool {
        let known = self.known_of(&self.what(), &spec.name);
        let is_claimed = known.is_some_and(|known| known.generation == generation);
        !spec.read_only && (spec.shared || !is_claimed)
    }

    fn as_opener<R: Send, E: Denied>(
        &self,
        work: impl Fn() -> Result<R, E> + Sync,
    ) -> Result<R, E> {
        as_opener(&self.config, self.what().uid, work)
    }
}

/// Whose an image is that somebody has open, as far as it says.
pub(super) fn named(
    config: &VmProcessConfig,
    uid: u32,
    image: BorrowedFd<'_>,
    error: godwit_blockio::Error,
) -> String {
    let of_another = |record: &ImageRecord| record.vm != config.vm;
    let held = as_opener(config, uid, || holder::read(image));
    let held = held.ok().flatten();
    let record = readable_record(held.as_ref()).filter(of_another);
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

/// With the rights with which images are opened, of this user of the VM's or the common one: on a file server this process may
/// have none.
pub(super) fn as_opener<R: Send, E: Denied>(
    config: &VmProcessConfig,
    own: u32,
    work: impl Fn() -> Result<R, E> + Sync,
) -> Result<R, E> {
    let (common, gid) = (config.qemu_uid, config.qemu_gid);
    let mut done = Err(io::Error::from(io::ErrorKind::PermissionDenied).into());
    for uid in [own, common] {
        done = as_user(uid, gid, || Ok(work())).map_err(io::Error::from)?;
        if !done.as_ref().is_err_and(E::is_denied) {
            break;
        }
    }
    done
}

impl ServedDisks {
    /// The disks, each with its image.
    pub(super) fn with_images(&self) -> impl Iterator<Item = (&DiskSpec, (u64, u64))> {
        self.disks.iter().zip(self.images.iter().copied())
    }

    /// The disk of this name and its image.
    pub(super) fn with_image(&self, disk: &str) -> Option<(&DiskSpec, (u64, u64))> {
        self.with_images().find(|(spec, _)| spec.name == disk)
    }

    /// A disk's image as it is noted.
    pub(super) fn noted<'a>(&'a self, (disk, image): (&'a DiskSpec, (u64, u64))) -> Former<'a> {
        Former {
            disk: &disk.name,
            path: Path::new(&disk.path),
            image,
            known: self.known_image(&disk.name),
            part: None,
        }
    }

    /// What is written down of a disk's image.
    pub(super) fn known_image(&self, disk: &str) -> Option<&KnownImage> {
        self.known.iter().find(|known| known.disk == disk)
    }

    /// In the place of what was known of the disk's image.
    pub(super) fn know(&mut self, known: KnownImage) {
        self.known.retain(|before| before.disk != known.disk);
        self.known.push(known);
    }
}

/// What a person can do where other hosts must see who has an image.
fn must_be_written(path: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::Unsupported => format!(
            "hosts that share an image tell each other by its extended attributes (user.*) who has it, and the file system of {path} keeps none as it must ({error}): mount it so that it does (NFS: version 4.2), or leave out 'shared = true'"
        ),
        _ => format!(
            "the record that this host has the image cannot be written to {path}: {error}; make room there ('getfattr -d {path}' tells what else it bears), and try again"
        ),
    }
}

fn release(spec: &DiskSpec) -> String {
    format!(
        "if this disk is to have it all the same, 'godwit image release {}' on this host lets it",
        spec.path
    )
}

/// Whether an image bears a record once its guest may write it: a block device does where it has a label.
pub(super) fn bears_record(image: impl AsFd) -> io::Result<bool> {
    Ok(!is_device(&image)? || label::read(image.as_fd())?.is_some())
}

pub(super) fn is_device(image: impl AsFd) -> io::Result<bool> {
    let kind = FileType::from_raw_mode(fstat(image)?.st_mode);
    Ok(kind == FileType::BlockDevice)
}

pub(super) fn fresh_id() -> io::Result<ImageId> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(ImageId::new(u128::from_be_bytes(bytes)))
}
