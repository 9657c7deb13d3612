//! What a machine has of a disk that only its VM's host has: files, and what is written down of them.
//!
//! Plain data, owned by the machine's slot for the VM. Refuses: nothing.

use godwit_ownership::ImageRecord;
use godwit_types::image::KnownImage;
use godwit_types::{Generation, MigrationId};
use std::collections::BTreeMap;

/// What is on a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// Which disk it is: one that is made anew is another one, and so is one that goes on from an older copy.
    pub life: u64,
    /// The last write; no two writes have one number.
    pub written: u64,
    /// For how many hypervisors it was opened and says so.
    pub openings: u64,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct File {
    /// Tells it from all others, as an inode does.
    pub id: u64,
    pub content: Content,
    /// What a power cut leaves for certain.
    pub durable: Content,
    pub record: Option<ImageRecord>,
    pub durable_record: Option<ImageRecord>,
    /// A person has let it go, and nobody has taken it since.
    pub is_let_go: bool,
    /// It has its name, and a power cut may leave it with the one with which it came.
    pub came_with: Option<MigrationId>,
    /// What comes is not written there: a planted fault.
    pub is_reused: bool,
}

/// An image that comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub migration: MigrationId,
    /// The generation under which it was whole and durable.
    pub whole: Option<Generation>,
    /// Whether this host has held the VM under that one.
    pub ours: bool,
}

/// What a host has written down of the disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notes {
    pub arriving: Option<Arrival>,
    /// The migration for which it was mirrored last.
    pub leaving: Option<MigrationId>,
    /// The file that the hypervisor was started with.
    pub image: Option<u64>,
    pub known: Option<KnownImage>,
}

/// The files of a VM's disk on one machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    /// The one with the disk's name.
    pub image: Option<File>,
    /// Those with the names with which they came.
    pub beside: BTreeMap<MigrationId, File>,
}

/// A VM's disk at one machine.
#[derive(Debug, Default)]
pub(crate) struct OwnDisk {
    pub files: Files,
    pub notes: Notes,
    /// A copy of the file with the disk's name, which a person keeps.
    pub copy: Option<File>,
    /// In the memory of the VM process: what is known and not written down yet,
    pub due: Option<KnownImage>,
    /// and that what came has its name.
    pub is_here: bool,
    /// Until then no file can be removed.
    pub stuck_until: u64,
}

impl Arrival {
    /// Whether it is this host's, which holds the VM under this generation.
    pub(crate) fn belongs_to(&self, generation: Generation) -> bool {
        self.ours || self.whole == Some(generation)
    }
}

impl OwnDisk {
    /// The content of the file that is this host's, which may run the VM under that generation, if under any.
    pub(crate) fn theirs(&self, may_run: Option<Generation>) -> Option<Content> {
        let arrival = self.notes.arriving.as_ref();
        let came = arrival
            .filter(|arrival| arrival.ours || arrival.whole.is_some() && arrival.whole == may_run);
        let came = came.and_then(|arrival| self.files.beside.get(&arrival.migration));
        let file = self.files.image.as_ref().or(came)?;
        Some(file.content)
    }
}
