//! The same images at another place, where the disk's own file may have another name.
//!
//! Pure, owns nothing. What several VMs have does not move: it is to be at the other place already, by the same path, which whoever takes the disk looks at.
//! Refuses disks that lie over more than one whole image.

use crate::{Images, Kind, Refusal, files};
use godwit_types::plant::planted;
use std::collections::BTreeMap;

/// What a disk consists of at another place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnotherPlace {
    pub images: Images,
    /// The names that all but the top have there, by those that they have here; what other VMs may have, too, is none of them.
    pub names: BTreeMap<String, String>,
}

impl Images {
    /// What the disk consists of where its own file has this name, and its deltas numbers from `first` on; its top, to which the guest writes while the
    /// disk moves, is another delta there, of this identity. `mark` is a new number. What leaves here does not go along. A linked disk lies over the same
    /// image there as here.
    pub fn at_another_place(
        &self,
        own: &str,
        (first, mark): (u64, &str),
        top_id: &str,
    ) -> Result<AnotherPlace, Refusal> {
        // Then each chain ends there, as has been checked.
        let whole = self.images.values().filter(|image| image.kind == Kind::Raw);
        if whole.count() != 1 {
            return Err("it does not lie over one whole image".to_owned());
        }
        if self
            .images
            .get(&self.top)
            .is_none_or(|top| top.kind != Kind::Delta)
        {
            return Err("its top is no delta".to_owned());
        }
        let mut next = first;
        let mut names = BTreeMap::new();
        for (name, image) in self.images.iter().filter(|(_, image)| !image.common) {
            let new = match image.kind {
                Kind::Raw => own.to_owned(),
                Kind::Delta => {
                    next = next.saturating_add(1);
                    files::delta(own, next.saturating_sub(1))
                }
            };
            names.insert(name.clone(), new);
        }
        let renamed = |name: &String| names.get(name).unwrap_or(name).clone();
        let mut now = Self {
            mark: mark.to_owned(),
            top: renamed(&self.top),
            images: BTreeMap::new(),
            next,
            leaving: BTreeMap::new(),
            // All of it lies in one directory there.
            elsewhere: BTreeMap::new(),
            ..self.clone()
        };
        for (name, image) in &self.images {
            let mut image = image.clone();
            image.over = image.over.as_ref().map(renamed);
            if planted("moved-over-own-image") && image.over.is_some() {
                image.over = Some(own.to_owned());
            }
            if *name == self.top {
                image.id = Some(top_id.to_owned());
            }
            now.images.insert(renamed(name), image);
        }
        for snapshot in &mut now.snapshots {
            snapshot.image = renamed(&snapshot.image);
        }
        names.remove(&self.top);
        let images = now.checked()?;
        Ok(AnotherPlace { images, names })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Common, Fresh, Snapshot};
    use godwit_types::SnapshotName;

    fn fresh(number: u32) -> Fresh {
        Fresh {
            name: format!("root.raw.d{number}"),
            id: format!("{number:032x}"),
            elsewhere: None,
        }
    }

    fn snapshot(name: &str) -> Snapshot {
        Snapshot {
            name: SnapshotName::new(name).unwrap(),
            after: None,
            image: String::new(),
            made_unix_s: 1_800_000_000,
            begun: false,
            quiesced: false,
            text: String::new(),
            disks: vec!["root".to_owned()],
        }
    }

    /// Two snapshots, and a branch over the first one.
    fn tree() -> Images {
        let images = Images::of_one("root.raw", 1 << 30, &"5".repeat(32));
        let images = images.take(snapshot("first"), &fresh(1)).unwrap();
        let images = images.take(snapshot("second"), &fresh(2)).unwrap();
        let first = SnapshotName::new("first").unwrap();
        images.revert(&first, &fresh(3)).unwrap()
    }

    #[test]
    fn a_tree_is_the_same_elsewhere_under_other_names() {
        let here = tree();
        let mark = "6".repeat(32);
        let there = here.at_another_place("web.raw", (7, &mark), &"9".repeat(32));
        let AnotherPlace { images, names } = there.unwrap();
        assert_eq!(names.len(), here.images.len() - 1);
        assert_eq!(names["root.raw"], "web.raw");
        assert!(!names.contains_key(&here.top));
        let listed = |images: &Images| -> Vec<_> {
            let all = images.snapshots.iter();
            all.map(|one| {
                (
                    one.name.clone(),
                    one.after.clone(),
                    images.chain(&one.image).len(),
                )
            })
            .collect()
        };
        assert_eq!(listed(&images), listed(&here));
        assert_eq!(images.after, here.after);
        assert_eq!(images.chain(&images.top).len(), here.chain(&here.top).len());
        assert!(images.leaving.is_empty() && images.mark == mark);
        let top = &images.images[&images.top];
        assert_eq!(top.id, Some("9".repeat(32)));
        for (name, new) in &names {
            assert_eq!(images.images[new].id, here.images[name].id);
        }
        let numbers = 7..images.next;
        assert_eq!(numbers.count(), here.images.len() - 1);
        // Nothing is named twice, and what comes next has a name of its own.
        assert!(
            !images
                .images
                .contains_key(&files::delta("web.raw", images.next))
        );
    }

    /// Two snapshots of a linked disk.
    fn linked() -> Images {
        let common = Common {
            path: "/srv/base.raw",
            id: &"9".repeat(32),
        };
        let images = Images::linked(common, 1 << 30, &"5".repeat(32), &fresh(1)).unwrap();
        let images = images.take(snapshot("first"), &fresh(2)).unwrap();
        images.take(snapshot("second"), &fresh(3)).unwrap()
    }

    #[test]
    fn a_linked_disk_lies_over_the_same_image_elsewhere() {
        let here = linked();
        let mark = "6".repeat(32);
        let there = here.at_another_place("web.raw", (4, &mark), &"8".repeat(32));
        let AnotherPlace { images, names } = there.unwrap();
        assert_eq!(images.common(), here.common());
        assert_eq!(names.len(), 2, "neither its top nor what others have");
        assert_eq!(images.images.len(), 4);
        assert_eq!(images.not_called_after("web.raw"), None);
        for snapshot in &images.snapshots {
            let chain = images.chain(&snapshot.image);
            assert_eq!(chain.last(), Some(&"/srv/base.raw"));
        }
    }

    #[test]
    fn what_is_no_delta_or_lies_over_two_whole_images_does_not_move() {
        let mark = "6".repeat(32);
        let refused = |images: &Images| {
            let moved = images.at_another_place("web.raw", (1, &mark), &"8".repeat(32));
            moved.unwrap_err()
        };
        let one = Images::of_one("root.raw", 1 << 30, &mark);
        assert!(refused(&one).contains("is no delta"));
        let mut two = linked();
        two.images.extend(one.images);
        assert!(refused(&two).contains("one whole image"));
    }
}
