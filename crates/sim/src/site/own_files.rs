//! What a machine has of a disk that only its VM's host has: files, and what is written down of them.
//!
//! Plain data, owned by the machine's slot for the VM. Refuses: nothing.

use super::second::Going;
use godwit_ownership::{ImageRecord, Is, NotedImage};
use godwit_types::image::KnownImage;
use godwit_types::{Generation, HostName, MigrationId};
use std::collections::BTreeMap;

/// The number of a datastore of a machine: the place of an image.
pub(crate) type Store = usize;
pub(crate) const STORES: Store = 2;

/// What is on a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// Which disk it is: one that is made anew is another one, and so is one that goes on from an older copy.
    pub life: u64,
    /// The last write; no two writes have one number.
    pub written: u64,
    /// For how many hypervisors it was opened and says so.
    pub openings: u64,
    /// Not all of it is there: whoever reads it finds what was never on any disk.
    pub is_part: bool,
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
    /// The same, of one to which a disk of this host is copied: the number of the move.
    pub filled_as: Option<u64>,
    /// It was made to be filled, and no record called it the disk yet.
    pub never_disk: bool,
    /// Whether it is the disk by now cannot be told: a person is told of it, and nobody else removes it.
    pub is_told: bool,
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
    /// Whether a person said that the host from which it comes is gone for good.
    pub source_gone: bool,
}

/// What went along with a migration from here: as it was then, or as it is where the disk moved on this host since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Along {
    pub migration: MigrationId,
    pub place: Store,
    /// What the image says of itself; where it says nothing,
    pub says: Option<KnownImage>,
    /// it is known by its number,
    pub image: u64,
    /// which means something in the boot in which it was noted.
    pub boot: u64,
    /// For an observer: the disk has moved since.
    pub has_moved: bool,
}

/// The migration with which the VM was last to come here, or to leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MoveNote {
    pub migration: MigrationId,
    pub peer: HostName,
    pub is_destination: bool,
}

/// What came of the disk and is kept: nothing removes it but a person.
#[derive(Debug, Clone)]
pub(crate) struct KeptFile {
    /// Where the disk was to be.
    pub place: Store,
    pub file: File,
}

/// An image that the disk is copied to on its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copying {
    /// The number of the move, which is in the name that the file has until it is whole.
    pub number: u64,
    pub to: Store,
    /// The file, once it is there, and what it says of itself.
    pub image: Option<u64>,
    pub known: Option<KnownImage>,
}

/// An image that the disk had before it moved on its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Left {
    pub place: Store,
    pub image: u64,
    pub known: Option<KnownImage>,
    /// Whether the VM's description says where the disk is now.
    pub followed: bool,
    /// Whether the VM has been here since: else no description is to follow.
    pub of_disk: bool,
}

/// What a host has written down of the disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Notes {
    /// For which of the machine's hypervisors.
    pub launch: u64,
    /// Where the image is that is the disk.
    pub place: Store,
    pub copying: Option<Copying>,
    pub left: Vec<Left>,
    pub arriving: Option<Arrival>,
    /// The migration for which it was mirrored last.
    pub leaving: Option<MigrationId>,
    /// What went along with migrations from here, the newest first.
    pub along: Vec<Along>,
    /// The file that the hypervisor was started with.
    pub image: Option<u64>,
    pub known: Option<KnownImage>,
}

/// The files of a VM's disk on one machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    /// Those with the disk's name, by their places.
    pub images: [Option<File>; STORES],
    /// Those with the names with which they came.
    pub beside: BTreeMap<MigrationId, File>,
    /// Those with the names under which they are filled, by the numbers of their moves.
    pub second: BTreeMap<u64, File>,
    /// Those that came and are kept.
    pub kept: Vec<KeptFile>,
}

impl Files {
    /// Those that are disks or were, and those that are kept: none that waits for a word.
    pub(crate) fn disks(&self) -> impl Iterator<Item = &File> {
        let kept = self.kept.iter().map(|kept| &kept.file);
        self.images.iter().flatten().chain(kept)
    }
}

/// A VM's disk at one machine.
#[derive(Debug, Default)]
pub(crate) struct OwnDisk {
    pub files: Files,
    /// As the VM process has it in its memory while a hypervisor lives, else as it is in the state directory.
    pub notes: Notes,
    /// What is in the state directory,
    pub kept: Notes,
    /// what may be there after a power cut, if that is something else,
    pub unsure: Option<Notes>,
    /// and what is in the run directory while a hypervisor lives.
    pub living: Option<Notes>,
    /// In the state directory, too: migrations whose disk went on from here with later ones,
    pub went_on: Vec<MigrationId>,
    /// and the last one.
    pub note: Option<MoveNote>,
    /// What is in memory may not be in the state directory: nobody serves the disk before it is.
    pub must_save: bool,
    /// Where the VM's description in the state directory says that its disk is, and the one in the VM process's memory.
    pub described: Store,
    pub spec: Store,
    /// The number of its last hypervisor here.
    pub launch: u64,
    /// In the memory of the VM process: the disk moves.
    pub going: Option<Going>,
    /// A copy of the file that was the disk, which a person keeps, and where it was.
    pub copy: Option<(Store, File)>,
    /// In the memory of the VM process: what is known and not written down yet,
    pub due: Option<KnownImage>,
    /// and that what came has its name.
    pub is_here: bool,
    /// The VM was deleted: nothing tells of it any more.
    pub is_deleted: bool,
    /// A file is left there that nothing tells of, since it could not be removed.
    pub has_stray: bool,
    /// Until then no file can be removed.
    pub stuck_until: u64,
}

impl Arrival {
    /// Whether it is this host's, which holds the VM under this generation.
    pub(crate) fn belongs_to(&self, generation: Generation) -> bool {
        self.ours || self.whole == Some(generation)
    }
}

impl Along {
    /// Whether both are one image, under one name.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let is_same_image = match (&self.says, &other.says) {
            (Some(says), Some(other)) => says.image == other.image,
            (None, None) => (self.image, self.boot) == (other.image, other.boot),
            _ => false,
        };
        is_same_image && self.place == other.place
    }
}

impl OwnDisk {
    /// What is noted, kept and there, as a trace shows it.
    pub(crate) fn line(&self) -> String {
        let of = |notes: &Notes| {
            let copying = notes
                .copying
                .as_ref()
                .map(|copying| (copying.to, copying.image));
            let left: Vec<_> = notes
                .left
                .iter()
                .map(|left| (left.place, left.followed))
                .collect();
            format!(
                "at {} ({:?}) copying {copying:?} left {left:?}",
                notes.place, notes.image
            )
        };
        let written = |file: &Option<File>| {
            let file = file.as_ref()?;
            Some((
                file.id,
                file.content.written,
                file.durable.written,
                file.content.is_part,
            ))
        };
        format!(
            "noted {}, kept {}, described {}, files {:?}",
            of(&self.notes),
            of(&self.kept),
            self.described,
            self.files.images.each_ref().map(written)
        )
    }

    /// The file that is the disk by what is noted.
    pub(crate) fn image(&self) -> Option<&File> {
        self.files.images[self.notes.place].as_ref()
    }

    pub(crate) fn image_mut(&mut self) -> Option<&mut File> {
        self.files.images[self.notes.place].as_mut()
    }

    /// The files that are this host's, which may run the VM under that generation, if under any, and their places if they have one.
    pub(crate) fn theirs(
        &self,
        may_run: Option<Generation>,
    ) -> impl Iterator<Item = (Option<Store>, &File)> {
        let arrival = self.notes.arriving.as_ref();
        let came = arrival.filter(move |arrival| {
            arrival.ours || arrival.whole.is_some() && arrival.whole == may_run
        });
        let came = came.and_then(|arrival| self.files.beside.get(&arrival.migration));
        let named = self.files.images.iter().enumerate();
        let named = named.filter_map(|(place, file)| Some((Some(place), file.as_ref()?)));
        named.chain(came.map(|file| (None, file)))
    }
}

impl File {
    /// As the product compares it with what is noted of a file in its place.
    pub(crate) fn is(&self, place: Store, (image, known): (u64, Option<&KnownImage>)) -> Is {
        let says = self.says().filter(|_| known.is_some());
        let noted = noted(place, image, known);
        noted.compare((noted.image.0, self.id), says.as_ref())
    }

    /// As the product tells whether a disk has its image.
    pub(crate) fn is_there(
        &self,
        place: Store,
        (image, known): (u64, Option<&KnownImage>),
    ) -> bool {
        let noted = noted(place, image, known);
        noted.is_there((noted.image.0, self.id), self.says().as_ref())
    }

    /// Whether it says that it was taken for a disk since it was noted as one that is being filled.
    pub(crate) fn was_taken_since(&self, copying: &Copying) -> bool {
        let image = copying.image.unwrap_or_default();
        let noted = noted(copying.to, image, copying.known.as_ref());
        noted.was_taken_since(self.says().as_ref())
    }

    pub(crate) fn says(&self) -> Option<KnownImage> {
        self.record.as_ref().map(ImageRecord::known)
    }
}

/// Each place is a device of its own.
fn noted(place: Store, image: u64, known: Option<&KnownImage>) -> NotedImage<'_> {
    NotedImage {
        image: (place as u64 + 1, image),
        known,
    }
}
