//! What hosts and controllers say to each other of an image of a VM's disk on storage that hosts share.
//!
//! Pure data. What an image says of itself, and what follows from both, is crate `ownership`'s.

use crate::ids::Generation;
use serde::{Deserialize, Serialize};

/// More than any generation or count of openings comes to.
pub const NUMBER_MAX: u64 = 1 << 48;

/// Tells one image from every other, and from what is put in its place: 16 bytes in hexadecimal, made at random.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId(String);

impl ImageId {
    pub fn new(random: u128) -> Self {
        Self(format!("{random:032x}"))
    }
}

impl TryFrom<String> for ImageId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.len() == 32 && text.bytes().all(is_hex) {
            true => Ok(Self(text)),
            false => Err("an image's id is 32 hexadecimal digits"),
        }
    }
}

impl From<ImageId> for String {
    fn from(id: ImageId) -> Self {
        id.0
    }
}

/// What a host knows durably of the image of one of its VM's disks: that it took this one under this generation, as the
/// `taken`th who did; or, of a VM that is to come, that the host from which it comes did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownImage {
    pub disk: String,
    pub image: ImageId,
    pub generation: Generation,
    pub taken: u64,
}

impl KnownImage {
    /// Whether this is from later than what else is known of the disk's image. Of one image the count tells: nobody takes that back. Of two it is counted
    /// anew where one goes along with a VM, under a later generation; one that nobody has taken yet has generation 0, and goes on counting.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        let by_taken = self.taken.cmp(&other.taken);
        let is_either_untaken = self.generation.min(other.generation) == Generation(0);
        let order = match self.image == other.image || is_either_untaken {
            true => by_taken,
            false => self.generation.cmp(&other.generation).then(by_taken),
        };
        order.is_gt()
    }

    /// Whether it can have come about: what is beyond would be ahead of everybody for good.
    pub fn is_in_reach(&self) -> bool {
        self.generation.0 <= NUMBER_MAX && self.taken <= NUMBER_MAX
    }
}

/// Takes up what is said of disks' images, each where nothing newer is known.
pub fn take_newest(known: &mut Vec<KnownImage>, said: impl IntoIterator<Item = KnownImage>) {
    for said in said {
        match known.iter_mut().find(|known| known.disk == said.disk) {
            Some(before) if said.is_newer_than(before) => *before = said,
            Some(_) => {}
            None => known.push(said),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(generation: u64, taken: u64) -> KnownImage {
        KnownImage {
            disk: "root".into(),
            image: ImageId::new(1),
            generation: Generation(generation),
            taken,
        }
    }

    fn other(generation: u64, taken: u64) -> KnownImage {
        KnownImage {
            image: ImageId::new(2),
            ..known(generation, taken)
        }
    }

    #[test]
    fn another_image_that_was_taken_under_a_later_generation_is_newer_however_often_it_was() {
        assert!(other(5, 1).is_newer_than(&known(4, 9)));
        assert!(!known(4, 9).is_newer_than(&other(5, 1)));
        assert!(other(4, 3).is_newer_than(&known(4, 2)));
        // Nobody has taken it yet: what was there before goes on counting.
        assert!(other(0, 6).is_newer_than(&known(4, 5)));
        assert!(!known(4, 5).is_newer_than(&other(0, 6)));
    }

    #[test]
    fn of_one_image_the_count_alone_tells() {
        assert!(known(4, 3).is_newer_than(&known(4, 2)));
        assert!(!known(4, 2).is_newer_than(&known(4, 2)));
        assert!(
            !known(9, 2).is_newer_than(&known(4, 3)),
            "somebody opened an older copy"
        );
    }

    #[test]
    fn numbers_that_nobody_reaches_are_told_from_those_that_somebody_does() {
        assert!(known(NUMBER_MAX, NUMBER_MAX).is_in_reach());
        assert!(!known(1, NUMBER_MAX + 1).is_in_reach());
        assert!(!known(NUMBER_MAX + 1, 1).is_in_reach());
    }
}
