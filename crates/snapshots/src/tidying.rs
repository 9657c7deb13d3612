//! Images that nobody needs as they are, and how each of them is given up.
//!
//! Pure, owns nothing. An image is needed where it is a snapshot's or the top, and where several lie over it. Refuses to write to what is
//! common: such a one stays below.

use crate::{Image, Images, Kind};
use godwit_types::plant::planted;

/// How one image becomes unnecessary. Each may be broken off anywhere and done again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tidying {
    /// Nothing lies over it.
    Drop { image: String },
    /// What this image has and the frozen one above it lacks is copied up into that one, which has the same content all the time.
    Up { image: String, above: String },
    /// What the frozen image above has is copied down into this one, which takes its place then. Nobody reads this one but through the one
    /// above, which has the same content all the time.
    Down { image: String, above: String },
    /// What the top has, which nobody but its guest writes to, is copied down into this one: the top is frozen first, under another one, as often as it takes
    /// until little is left, and then the guest stands still for the rest. This image is the top then.
    DownTop { image: String },
}

impl Images {
    /// The next image that nobody needs as it is, and how it is given up; `bytes_of` tells how much an image holds, by its name. What has all of the disk is
    /// before deltas: it has room of its own for most of what is above it, also where its file system has none. The top comes down last: it is frozen for that
    /// anew until little is left, and would lie over one more image each time.
    pub fn unneeded(&self, bytes_of: impl Fn(&str) -> u64) -> Option<Tidying> {
        let all = self.images.iter();
        let (raw, others): (Vec<_>, Vec<_>) = all.partition(|(_, image)| image.kind == Kind::Raw);
        let all = raw.into_iter().chain(others);
        let mut all = all.filter_map(|one| self.tidying_of(one, &bytes_of));
        let mut of_top = None;
        let other = all.find(|tidying| match tidying {
            Tidying::DownTop { .. } => {
                of_top.get_or_insert_with(|| tidying.clone());
                false
            }
            _ => true,
        });
        other.or(of_top)
    }

    /// How an image is given up, if nobody needs it.
    fn tidying_of(
        &self,
        (name, image): (&String, &Image),
        bytes_of: &impl Fn(&str) -> u64,
    ) -> Option<Tidying> {
        let is_needed = *name == self.top || self.is_of_a_snapshot(name);
        let above: Vec<&String> = self.above(name).collect();
        let is_fixed = image.common && !planted("common-layer-written");
        match above.as_slice() {
            _ if is_needed => None,
            [] => Some(Tidying::Drop {
                image: name.clone(),
            }),
            [_, _, ..] if !planted("layer-of-two-written") => None,
            _ if is_fixed => None,
            [above, ..] => self.given_up((name, image), above, bytes_of),
        }
    }

    /// By copying as little as possible. What lies elsewhere never takes the place of what lies beside the disk: a move that failed would leave a part of the disk
    /// there for good.
    fn given_up(
        &self,
        (name, image): (&String, &Image),
        above: &str,
        bytes_of: &impl Fn(&str) -> u64,
    ) -> Option<Tidying> {
        let (below, above) = (name.clone(), above.to_owned());
        let is_elsewhere = |name: &str| self.elsewhere.contains_key(name);
        let would_go = is_elsewhere(&above) && !is_elsewhere(&below);
        let may_go_up = !would_go || planted("disk-left-elsewhere");
        Some(match image.kind {
            _ if above == self.top => Tidying::DownTop { image: below },
            Kind::Delta if may_go_up && bytes_of(&below) <= bytes_of(&above) => Tidying::Up {
                image: below,
                above,
            },
            _ => Tidying::Down {
                image: below,
                above,
            },
        })
    }

    /// The description once that is done, and durable: what it makes unnecessary leaves.
    pub fn tidied(&self, tidying: &Tidying) -> Self {
        let mut images = self.clone();
        match tidying {
            Tidying::Drop { image } => images.drop_image(image),
            Tidying::Up { image, .. } => {
                let below = images.below(image).map(str::to_owned);
                images.put_over(image, below.as_deref());
                images.drop_image(image);
            }
            Tidying::Down { image, above } => images.drop_into(above, image),
            Tidying::DownTop { image } => {
                let top = std::mem::replace(&mut images.top, image.clone());
                images.drop_into(&top, image);
            }
        }
        images
    }

    /// One image's content is in another one, below it, which takes its place.
    fn drop_into(&mut self, name: &str, into: &str) {
        self.put_over(name, Some(into));
        let theirs = self
            .snapshots
            .iter_mut()
            .filter(|snapshot| snapshot.image == name);
        theirs.for_each(|snapshot| into.clone_into(&mut snapshot.image));
        self.drop_image(name);
    }

    fn is_of_a_snapshot(&self, name: &str) -> bool {
        let mut snapshots = self.snapshots.iter();
        snapshots.any(|snapshot| snapshot.image == name) && !planted("snapshot-layer-unneeded")
    }

    fn above(&self, name: &str) -> impl Iterator<Item = &String> {
        let all = self.images.iter();
        let above = all.filter(move |(_, image)| image.over.as_deref() == Some(name));
        above.map(|(name, _)| name)
    }

    /// Whatever lay over the one lies over the other now.
    fn put_over(&mut self, from: &str, to: Option<&str>) {
        let all = self.images.values_mut();
        for image in all.filter(|image| image.over.as_deref() == Some(from)) {
            image.over = to.map(str::to_owned);
        }
    }
}
