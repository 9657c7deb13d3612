//! Which of a host's own images is a VM's disk once disks move there from one place to another: what becomes of the others at the next
//! start, what becomes of an image that came from another host, and which of two records of them counts.
//!
//! What is written of it may be an older copy, and so may any image. Pure: whoever has the files looks at them, and does what is judged. Owns
//! nothing. Refuses: to call a file the one that was noted where it may be another, and to have an image removed that may be a disk.

use godwit_types::image::KnownImage;

/// The number of an image's device and its own on that; a block device has 0 for its own.
pub type ImageNumbers = (u64, u64);

/// What is written of an image that is to be found again.
#[derive(Debug, Clone, Copy)]
pub struct NotedImage<'a> {
    pub image: ImageNumbers,
    /// What this host knew of it, if it is the one that it knew.
    pub known: Option<&'a KnownImage>,
}

/// What a file is that has the name of a noted image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Is {
    It,
    Another,
    /// It may be either.
    Unknown,
}

impl NotedImage<'_> {
    /// File systems give a number again to the next file, and devices may have others after a boot: so what the image says of itself decides,
    /// and its numbers do where it says nothing.
    pub fn compare(&self, found: ImageNumbers, says: Option<&KnownImage>) -> Is {
        match (says, self.known) {
            (Some(says), Some(known)) if is_same(says, known) => Is::It,
            (Some(_), Some(_)) => Is::Another,
            _ if found == self.image => Is::It,
            _ if found.1 == self.image.1 => Is::Unknown,
            _ => Is::Another,
        }
    }

    /// Whether a file in the place of a disk's image is that one, by whomever it was taken since, and no older copy of it.
    pub fn is_there(&self, found: ImageNumbers, says: Option<&KnownImage>) -> bool {
        match (says, self.known) {
            (Some(says), Some(known)) => says.image == known.image && says.taken >= known.taken,
            _ => found == self.image,
        }
    }

    /// Whether a file that says this of itself was taken for a disk since it was noted: a move ends so.
    pub fn was_taken_since(&self, says: Option<&KnownImage>) -> bool {
        says.zip(self.known)
            .is_some_and(|(says, known)| says.image == known.image && says.taken > known.taken)
    }
}

/// Under which generation counts for nothing: a hypervisor that goes on under a later one takes the image no other time.
fn is_same(says: &KnownImage, known: &KnownImage) -> bool {
    (&says.image, says.taken) == (&known.image, known.taken)
}

/// What the VM's description says of an image that its disk was being copied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Described {
    /// A disk is that image.
    AsDisk,
    /// All disks are other images.
    Otherwise,
    /// The VM is not here: nothing is started with any description.
    Nowhere,
}

/// What becomes of an image that a disk was being copied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEnd {
    /// It is surely no disk, and is removed.
    Removed,
    /// It may be a disk by now, and is not looked at any more.
    Forgotten,
    /// It says that it is the disk by now, and the description names another image: nothing is started before a person has decided.
    Refused,
}

impl CopyEnd {
    /// Without a hypervisor. `has_its_image` tells whether the disk that was being copied has the very image that is noted as its own, and
    /// `was_taken` whether the copy says that it was taken for a disk since.
    pub fn judge(
        described: Described,
        has_its_image: impl FnOnce() -> bool,
        was_taken: impl FnOnce() -> bool,
    ) -> Self {
        match described {
            Described::AsDisk => Self::Forgotten,
            _ if has_its_image() => Self::Removed,
            Described::Otherwise if was_taken() => Self::Refused,
            Described::Otherwise | Described::Nowhere => Self::Forgotten,
        }
    }
}

/// An image that a disk had before it moved to another one of its host.
#[derive(Debug, Clone, Copy)]
pub struct FormerImage {
    /// Whether the VM's description says where the disk is now.
    pub followed: bool,
    /// Whether a disk has its path by now.
    pub is_disk: bool,
    /// A block device, which nobody removes, and which an older description may name as long as this VM has a disk that was there.
    pub is_guarded: bool,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormerEnd {
    Stays,
    Forgotten,
    Removed,
}

impl FormerImage {
    /// `disk_is_there` tells whether the disk has the image that is noted as its own ([`NotedImage::is_there`]): where that was lost, or an older
    /// copy was put in its place, the former one may be the best that is left.
    pub fn judge(self, disk_is_there: impl FnOnce() -> bool) -> FormerEnd {
        match self {
            Self {
                followed: false, ..
            } => FormerEnd::Stays,
            Self { is_disk: true, .. } => FormerEnd::Forgotten,
            Self {
                is_guarded: true, ..
            } => FormerEnd::Stays,
            _ if !disk_is_there() => FormerEnd::Stays,
            _ => FormerEnd::Removed,
        }
    }
}

/// What is known of the host from which an image came with a migration that is over, of which this host did not become the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CameSource {
    /// It has said so: it ended that very migration, and has the disks ([`crate::PeerMessage::Abort`]).
    HasDisks,
    /// A person gave it up, or the VM goes on, or comes anew, without its word.
    Gone,
    Unknown,
}

impl CameSource {
    /// With what a person said before: what the source says itself outweighs that.
    pub fn given_up(self, is_given_up: bool) -> Self {
        match self {
            Self::Unknown if is_given_up => Self::Gone,
            known => known,
        }
    }
}

/// What is there of an image that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CameFound {
    Something,
    /// Nothing was ever written to it.
    Empty,
    /// No image, on storage that is there.
    Nothing,
    /// No image, and perhaps not the storage that it is on.
    Away,
}

/// An image that came with a VM whose migration is over here: it may be the last that is left of a disk.
#[derive(Debug, Clone, Copy)]
pub struct CameImage {
    pub source: CameSource,
    /// Whether it was whole and durable here: then a hole from one end to the other is all of the disk.
    pub is_whole: bool,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CameEnd {
    /// As it is, and its source is asked again.
    Stays,
    /// It is removed, or nothing of it is there.
    Removed,
    /// It gets a name that is no disk's, and that nobody removes but a person; also where a predecessor gave it that.
    Kept,
}

impl CameImage {
    /// Only the source's word has removed what may be a part of a disk: that it is silent, however long, is none.
    pub fn judge(self, found: CameFound) -> CameEnd {
        match (self.source, found) {
            (CameSource::HasDisks, _) => CameEnd::Removed,
            (_, CameFound::Empty) if !self.is_whole => CameEnd::Removed,
            (CameSource::Gone, _) => CameEnd::Kept,
            (CameSource::Unknown, CameFound::Nothing) => CameEnd::Removed,
            (CameSource::Unknown, CameFound::Something | CameFound::Empty | CameFound::Away) => {
                CameEnd::Stays
            }
        }
    }
}

/// Whether a record that was found in the state directory knows of a later image of a disk than the one in the run directory does, which else
/// counts for a hypervisor that lives: a version that writes the first alone was here since.
pub fn is_overtaken(living: &[KnownImage], found: &[KnownImage]) -> bool {
    let is_later = |known: &KnownImage| {
        let mut before = living.iter().filter(|before| before.disk == known.disk);
        before.all(|before| before.taken < known.taken)
    };
    found.iter().any(is_later)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::Generation;
    use godwit_types::image::ImageId;

    fn known(image: u128, taken: u64) -> KnownImage {
        KnownImage {
            disk: "root".into(),
            image: ImageId::new(image),
            generation: Generation(2),
            taken,
        }
    }

    #[test]
    fn what_an_image_says_decides_and_its_numbers_do_where_it_says_nothing() {
        let noted = known(7, 3);
        let noted = NotedImage {
            image: (1, 10),
            known: Some(&noted),
        };
        assert_eq!(noted.compare((2, 11), Some(&known(7, 3))), Is::It);
        assert_eq!(noted.compare((1, 10), Some(&known(7, 4))), Is::Another);
        assert_eq!(noted.compare((1, 10), Some(&known(8, 3))), Is::Another);
        assert_eq!(noted.compare((1, 10), None), Is::It);
        assert_eq!(noted.compare((2, 10), None), Is::Unknown);
        assert_eq!(noted.compare((1, 11), None), Is::Another);
        assert!(noted.is_there((2, 11), Some(&known(7, 4))));
        assert!(!noted.is_there((1, 10), Some(&known(7, 2))));
        assert!(!noted.is_there((1, 10), Some(&known(8, 3))));
        assert!(noted.is_there((1, 10), None) && !noted.is_there((2, 10), None));
        assert!(noted.was_taken_since(Some(&known(7, 4))));
        assert!(!noted.was_taken_since(Some(&known(7, 3))));
        assert!(!noted.was_taken_since(Some(&known(8, 4))));
        assert!(!noted.was_taken_since(None));
    }

    #[test]
    fn a_copy_is_removed_where_the_disk_has_its_image_and_stops_a_start_where_it_was_taken() {
        let judge = |described, has, taken| CopyEnd::judge(described, || has, || taken);
        for taken in [false, true] {
            assert_eq!(judge(Described::AsDisk, true, taken), CopyEnd::Forgotten);
            assert_eq!(judge(Described::Otherwise, true, taken), CopyEnd::Removed);
            assert_eq!(judge(Described::Nowhere, true, taken), CopyEnd::Removed);
            assert_eq!(judge(Described::Nowhere, false, taken), CopyEnd::Forgotten);
        }
        assert_eq!(judge(Described::Otherwise, false, true), CopyEnd::Refused);
        assert_eq!(
            judge(Described::Otherwise, false, false),
            CopyEnd::Forgotten
        );
    }

    #[test]
    fn a_former_image_goes_once_the_description_follows_and_the_disk_has_its_image() {
        let former = FormerImage {
            followed: true,
            is_disk: false,
            is_guarded: false,
        };
        assert_eq!(former.judge(|| true), FormerEnd::Removed);
        assert_eq!(former.judge(|| false), FormerEnd::Stays);
        let guarded = FormerImage {
            is_guarded: true,
            ..former
        };
        assert_eq!(guarded.judge(|| true), FormerEnd::Stays);
        let is_disk = FormerImage {
            is_disk: true,
            ..former
        };
        assert_eq!(is_disk.judge(|| false), FormerEnd::Forgotten);
        let unfollowed = FormerImage {
            followed: false,
            ..is_disk
        };
        assert_eq!(unfollowed.judge(|| true), FormerEnd::Stays);
    }

    #[test]
    fn what_came_is_removed_by_its_sources_word_alone_and_kept_without_it() {
        use CameFound::{Away, Empty, Nothing, Something};
        use CameSource::{Gone, HasDisks, Unknown};
        let judge = |source, is_whole, found| CameImage { source, is_whole }.judge(found);
        for is_whole in [false, true] {
            for found in [Something, Empty, Nothing, Away] {
                assert_eq!(judge(HasDisks, is_whole, found), CameEnd::Removed);
            }
            assert_eq!(judge(Unknown, is_whole, Something), CameEnd::Stays);
            assert_eq!(judge(Gone, is_whole, Something), CameEnd::Kept);
            // It may be there another time.
            assert_eq!(judge(Unknown, is_whole, Away), CameEnd::Stays);
            assert_eq!(judge(Unknown, is_whole, Nothing), CameEnd::Removed);
            // A predecessor may have kept it.
            assert_eq!(judge(Gone, is_whole, Nothing), CameEnd::Kept);
            assert_eq!(judge(Gone, is_whole, Away), CameEnd::Kept);
        }
        assert_eq!(judge(Unknown, true, Empty), CameEnd::Stays);
        assert_eq!(judge(Gone, true, Empty), CameEnd::Kept);
        for source in [Unknown, Gone] {
            assert_eq!(judge(source, false, Empty), CameEnd::Removed);
        }
    }

    #[test]
    fn a_person_gives_up_a_source_that_has_not_spoken() {
        use CameSource::{Gone, HasDisks, Unknown};
        assert_eq!(Unknown.given_up(true), Gone);
        assert_eq!(Unknown.given_up(false), Unknown);
        for is_given_up in [false, true] {
            assert_eq!(HasDisks.given_up(is_given_up), HasDisks);
            assert_eq!(Gone.given_up(is_given_up), Gone);
        }
    }

    #[test]
    fn a_record_that_knows_of_a_later_image_counts_before_the_one_in_the_run_directory() {
        assert!(is_overtaken(&[known(7, 3)], &[known(8, 4)]));
        assert!(is_overtaken(&[], &[known(8, 1)]));
        assert!(!is_overtaken(&[known(7, 3)], &[known(7, 3)]));
        assert!(!is_overtaken(&[known(7, 3)], &[]));
    }
}
