//! Which host has a disk's image: the record that the image bears, and whether it may be opened for writing.
//!
//! Hosts may share an image, and a host or an image may be put back from an old copy. The record is taken by compare-and-swap
//! before anything is written, under the generation of the permit. Pure: whoever has the image reads and writes the record.
//! Refuses: an image that another host took later, that is older than this host knows it, or that is another VM's there.

use godwit_types::image::{ImageId, KnownImage};
use godwit_types::{Generation, HostName, VmName};
use serde::{Deserialize, Serialize};

/// The format of the record of an image that is all of its disk.
pub const IMAGE_RECORD_FORMAT: u32 = 1;
/// The same of an image over which others lie: builds that know of none refuse it, who would take it for all of the disk.
pub const LAYERED_RECORD_FORMAT: u32 = 2;

/// What an image says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// [`IMAGE_RECORD_FORMAT`] or [`LAYERED_RECORD_FORMAT`].
    pub format: u32,
    pub image: ImageId,
    /// Whose disk it was last.
    pub vm: VmName,
    pub disk: String,
    /// The host that had it last, which then held the VM under `generation`.
    pub holder: HostName,
    pub generation: Generation,
    /// How often the disk's image was taken, by whomever: once for each start of a hypervisor, and for each host to which the VM
    /// came. A hypervisor that goes on under a later generation does not count.
    pub taken: u64,
}

/// Who wants to write an image: a host that may run the VM under this generation.
#[derive(Debug, Clone, Copy)]
pub struct ImageClaim<'a> {
    pub vm: &'a VmName,
    pub disk: &'a str,
    pub host: &'a HostName,
    pub generation: Generation,
    pub known: Option<&'a KnownImage>,
    /// For a hypervisor that is started; else for one whose guest's memory knows what is on the image that is `known`.
    pub anew: bool,
    /// For an image that bears no record of this disk.
    pub fresh: &'a ImageId,
    /// Whether the image is a part of the disk only.
    pub layered: bool,
}

/// Why an image is not opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageRefusal {
    /// Another host took it under this generation or a later one.
    #[error(
        "host '{holder}' has had it under generation {theirs}, and this host may run the VM under generation {ours} only"
    )]
    TakenLater {
        holder: HostName,
        theirs: Generation,
        ours: Generation,
    },
    /// This host, or one that had it before, has taken it since: what was written then is not in it.
    #[error(
        "it is an older copy: it says that a host has taken it {found} times, and it was taken {known} times by now"
    )]
    Older { found: u64, known: u64 },
    /// It was this disk's before another image was.
    #[error(
        "it is an image that the disk had before: it was last taken under generation {found}, and since then the disk was another image"
    )]
    Former { found: Generation },
    /// Another host has it, and wrote there what the guest does not know of that stands still here.
    #[error(
        "host '{holder}' has had it since, and the guest that stands still here does not know what was written there"
    )]
    TakenSince { holder: HostName },
    /// It is a disk of another VM, or another disk of this one, at another host; or at this one since the guest stood still.
    #[error("it is disk '{disk}' of VM '{vm}', which host '{holder}' had last")]
    OfAnother {
        vm: VmName,
        disk: String,
        holder: HostName,
    },
    #[error(
        "its record has format {found}, and this build reads up to format {LAYERED_RECORD_FORMAT}: use the version that wrote it"
    )]
    Format { found: u32 },
    /// A guest that stands still may not remember what is on it.
    #[error(
        "a person has let it go since, and the guest that stands still here may not know what was written there"
    )]
    LetGo,
    /// Somebody wrote it to be ahead of everybody for good.
    #[error("its record has numbers that no host ever reaches")]
    OutOfReach,
}

impl ImageClaim<'_> {
    /// What the image's record must be before the image is written. It equals the one found where nothing is to be changed.
    pub fn judge(&self, found: Option<&ImageRecord>) -> Result<ImageRecord, ImageRefusal> {
        let Some(found) = found else {
            return Ok(match self.known.filter(|_| !self.anew) {
                // The hypervisor has it, whether it says so or not.
                Some(known) => self.record(&known.image, known.taken),
                None => self.record(self.fresh, self.next(0)),
            });
        };
        if ![IMAGE_RECORD_FORMAT, LAYERED_RECORD_FORMAT].contains(&found.format) {
            return Err(ImageRefusal::Format {
                found: found.format,
            });
        }
        if !found.known().is_in_reach() {
            return Err(ImageRefusal::OutOfReach);
        }
        let is_ours = found.vm == *self.vm && found.disk == self.disk;
        if !is_ours {
            return self.take_from_another(found);
        }
        if found.holder != *self.host && found.generation >= self.generation {
            return Err(ImageRefusal::TakenLater {
                holder: found.holder.clone(),
                theirs: found.generation,
                ours: self.generation,
            });
        }
        self.known
            .map_or(Ok(()), |known| found.must_be_no_older(known))?;
        match self.anew {
            true => Ok(self.record(&found.image, self.next(found.taken))),
            false => self.go_on(found),
        }
    }

    /// The same where a person has let the image go: for whoever starts a hypervisor with it.
    pub fn judge_let_go(&self) -> Result<ImageRecord, ImageRefusal> {
        match self.anew {
            true => self.judge(None),
            false => Err(ImageRefusal::LetGo),
        }
    }

    /// Between VMs of one host the image's lock decides, while they have it, and before that whether the other one is to keep
    /// it, which its files tell and not this record.
    fn take_from_another(&self, found: &ImageRecord) -> Result<ImageRecord, ImageRefusal> {
        match found.holder == *self.host && self.anew {
            true => Ok(self.record(self.fresh, self.next(found.taken))),
            false => Err(ImageRefusal::OfAnother {
                vm: found.vm.clone(),
                disk: found.disk.clone(),
                holder: found.holder.clone(),
            }),
        }
    }

    /// The guest's memory is as old as what is known: of the host from which it comes, or of this one.
    fn go_on(&self, found: &ImageRecord) -> Result<ImageRecord, ImageRefusal> {
        if found.holder == *self.host {
            // Whoever asks late, or was put back from an old copy, takes nothing back from this host.
            let generation = found.generation.max(self.generation);
            return Ok(ImageRecord {
                format: self.format(),
                generation,
                ..found.clone()
            });
        }
        let is_from_there =
            |known: &KnownImage| (&known.image, known.taken) == (&found.image, found.taken);
        match self.known.is_some_and(is_from_there) {
            true => Ok(self.record(&found.image, self.next(found.taken))),
            false => Err(ImageRefusal::TakenSince {
                holder: found.holder.clone(),
            }),
        }
    }

    fn format(&self) -> u32 {
        match self.layered {
            true => LAYERED_RECORD_FORMAT,
            false => IMAGE_RECORD_FORMAT,
        }
    }

    /// Also in the place of another image: whoever finds that one again knows that it was before.
    fn next(&self, taken: u64) -> u64 {
        let known = self.known.map_or(0, |known| known.taken);
        taken.max(known).saturating_add(1)
    }

    fn record(&self, image: &ImageId, taken: u64) -> ImageRecord {
        ImageRecord {
            format: self.format(),
            image: image.clone(),
            vm: self.vm.clone(),
            disk: self.disk.to_owned(),
            holder: self.host.clone(),
            generation: self.generation,
            taken,
        }
    }
}

impl ImageRecord {
    /// Refuses an image from before what is known of it, or of another one that was the disk since.
    pub fn must_be_no_older(&self, known: &KnownImage) -> Result<(), ImageRefusal> {
        let found = self.known();
        match self.image == known.image {
            true if known.is_newer_than(&found) => Err(ImageRefusal::Older {
                found: found.taken,
                known: known.taken,
            }),
            false if !found.is_newer_than(known) => Err(ImageRefusal::Former {
                found: found.generation,
            }),
            _ => Ok(()),
        }
    }

    /// What the host that took it is to know of it from now on.
    pub fn known(&self) -> KnownImage {
        KnownImage {
            disk: self.disk.clone(),
            image: self.image.clone(),
            generation: self.generation,
            taken: self.taken,
        }
    }
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
