//! Whether a description of a disk's images can be true. It lies beside the images, where others may write, or may have come from elsewhere.
//!
//! Pure, owns nothing. Refuses what contradicts itself, and names that lead out of the disk's directory, but for redo logs of a disk that moves, and the
//! parent of a linked one, both by whole paths; in a sentence's end that names the image.

use crate::files::number_of;
use crate::{CHAIN_MAX, IMAGES_MAX, Image, Images, Kind, Refusal, SNAPSHOTS_MAX};
use godwit_types::snapshots::SNAPSHOT_TEXT_LEN_MAX as TEXT_LEN_MAX;
use godwit_types::vm::{DISK_GIB_MAX, DISKS_MAX};
use std::collections::BTreeSet;

/// Longest name of a file, bytes.
const NAME_LEN_MAX: usize = 255;
/// Longest path, bytes.
const PATH_LEN_MAX: usize = 4096;
/// More images than this are never made of a disk.
const NEXT_MAX: u64 = 1 << 40;
/// Digits of what a delta says that it is.
const ID_DIGITS: usize = 32;

impl Images {
    /// Whether it can be true.
    pub fn check(&self) -> Result<(), Refusal> {
        if self.images.len().saturating_add(self.leaving.len()) > IMAGES_MAX {
            return Err(format!("more than {IMAGES_MAX} images are described"));
        }
        let mut leaving = self.leaving.keys();
        if let Some(name) = leaving.find(|name| !is_file(name) || self.images.contains_key(*name)) {
            return Err(format!(
                "{name:?} is described as one that leaves, and does not"
            ));
        }
        if self.bytes == 0 || self.bytes > DISK_GIB_MAX << 30 {
            return Err(format!("a disk of {} bytes is described", self.bytes));
        }
        if self.next > NEXT_MAX {
            return Err(format!("a next image of number {} is described", self.next));
        }
        if !is_number(&self.mark) {
            return Err("by which mark its own image knows it is not described".to_owned());
        }
        for (name, image) in &self.images {
            check_image(name, image)?;
            self.check_chain(name)?;
        }
        match self.images.get(&self.top) {
            None => return Err(format!("the image {:?} is not described", self.top)),
            Some(top) if top.common => {
                return Err(format!("{:?} is to be written, and must not be", self.top));
            }
            Some(_) => {}
        }
        let over_top = |image: &Image| image.over.as_ref() == Some(&self.top);
        if self.images.values().any(over_top) {
            return Err(format!(
                "{:?} is to be written, and lies below another image",
                self.top
            ));
        }
        self.check_elsewhere()?;
        self.check_snapshots()
    }

    /// What is, or was, a part of a disk and is not called after its own file, beside which it lies. Where files were copied under another name, two
    /// disks would have one part.
    pub fn not_called_after(&self, disk_file: &str) -> Option<&str> {
        let is_its = |name: &str| number_of(disk_file, name).is_some();
        let own = self.images.iter().filter(|(_, image)| !image.common);
        let own = own.map(|(name, _)| name);
        let mut all = own.chain(self.leaving.keys());
        let strange = all.find(|name| !is_its(name) && !self.elsewhere.contains_key(*name));
        strange.map(String::as_str)
    }

    /// Only deltas, and what leaves, lie in other directories, which are named wholly.
    fn check_elsewhere(&self) -> Result<(), Refusal> {
        let is_delta = |name: &String| {
            let image = self.images.get(name);
            image.is_some_and(|image| image.kind == Kind::Delta) || self.leaving.contains_key(name)
        };
        let is_directory =
            |path: &String| path.starts_with('/') && path.len() <= PATH_LEN_MAX && is_plain(path);
        let mut elsewhere = self.elsewhere.iter();
        match elsewhere.find(|(name, path)| !is_delta(name) || !is_directory(path)) {
            None => Ok(()),
            Some((name, path)) => Err(format!(
                "{name:?} is said to lie in {path:?}, where no part of a disk lies"
            )),
        }
    }

    /// The images from this one down are there, and are not too many, as they are where they go round in a circle.
    fn check_chain(&self, name: &str) -> Result<(), Refusal> {
        let mut at = Some(name);
        for _ in 0..CHAIN_MAX {
            let Some(name) = at else { return Ok(()) };
            let image = self.images.get(name);
            let image = image.ok_or_else(|| format!("the image {name:?} is not described"))?;
            at = image.over.as_deref();
        }
        match at {
            None => Ok(()),
            Some(_) => Err(format!(
                "more than {CHAIN_MAX} images lie over one another at {name:?}: delete snapshots"
            )),
        }
    }

    fn check_snapshots(&self) -> Result<(), Refusal> {
        if self.snapshots.len() > SNAPSHOTS_MAX {
            return Err(format!("there are more than {SNAPSHOTS_MAX} snapshots"));
        }
        let mut names = BTreeSet::new();
        for snapshot in &self.snapshots {
            let name = &snapshot.name;
            // Each comes after one that was there before it.
            if snapshot
                .after
                .as_ref()
                .is_some_and(|after| !names.contains(after))
            {
                return Err(format!(
                    "what snapshot '{name}' came after is not described before it"
                ));
            }
            if !names.insert(name) {
                return Err(format!("there are two snapshots '{name}'"));
            }
            if !self.images.contains_key(&snapshot.image) {
                let image = &snapshot.image;
                return Err(format!(
                    "the image {image:?} of snapshot '{name}' is not described"
                ));
            }
            if snapshot.image == self.top {
                return Err(format!("the image of snapshot '{name}' is to be written"));
            }
            if snapshot.disks.len() > DISKS_MAX || snapshot.text.len() > TEXT_LEN_MAX {
                return Err(format!(
                    "snapshot '{name}' has too many disks, or too long a text"
                ));
            }
        }
        let mut named = self.after.iter().chain(&self.reverting);
        match named.find(|name| !names.contains(name)) {
            Some(name) => Err(format!("there is no snapshot '{name}'")),
            None => Ok(()),
        }
    }
}

fn is_plain(name: &str) -> bool {
    !name.chars().any(char::is_control)
}

/// In the disk's own directory.
fn is_file(name: &str) -> bool {
    let is_name = !name.contains('/') && !matches!(name, "" | "." | "..");
    is_name && name.len() <= NAME_LEN_MAX && is_plain(name)
}

/// Of 128 bits.
fn is_number(digits: &str) -> bool {
    digits.len() == ID_DIGITS && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

fn check_image(name: &str, image: &Image) -> Result<(), Refusal> {
    let fits = match image.common {
        true => name.starts_with('/') && name.len() <= PATH_LEN_MAX && is_plain(name),
        false => is_file(name),
    };
    if !fits {
        return Err(format!("{name:?} is no name of an image"));
    }
    match (image.kind, &image.over) {
        (Kind::Delta, None) => return Err(format!("the delta {name:?} lies over nothing")),
        (Kind::Raw, Some(_)) => {
            return Err(format!(
                "{name:?} is whole, and is said to lie over another image"
            ));
        }
        _ => {}
    }
    let tells = match image.kind {
        Kind::Delta => true,
        Kind::Raw => image.common,
    };
    match (tells, &image.id) {
        (true, Some(id)) if is_number(id) => Ok(()),
        (false, None) => Ok(()),
        _ => Err(format!("what {name:?} says that it is is not described")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Common, Fresh, Snapshot};
    use godwit_types::SnapshotName;

    fn images() -> Images {
        let fresh = |number: u32| Fresh {
            name: format!("root.raw.d{number}"),
            id: format!("{number:032x}"),
            elsewhere: None,
        };
        let snapshot = |name: &str| Snapshot {
            name: SnapshotName::new(name).unwrap(),
            after: None,
            image: String::new(),
            made_unix_s: 1_800_000_000,
            begun: false,
            quiesced: false,
            text: "before the update".to_owned(),
            disks: vec!["root".to_owned()],
        };
        let images = Images::of_one("root.raw", 1 << 30, &"5".repeat(32));
        let images = images.take(snapshot("clean"), &fresh(1)).unwrap();
        images.take(snapshot("updated"), &fresh(2)).unwrap()
    }

    #[test]
    fn a_linked_disk_whose_files_were_copied_under_another_name_is_known_by_what_its_parts_are_called()
     {
        let common = Common {
            path: "/srv/base.raw",
            id: &"9".repeat(32),
        };
        let fresh = |name: &str, elsewhere: Option<&str>| Fresh {
            name: name.to_owned(),
            id: format!("{:032x}", name.len()),
            elsewhere: elsewhere.map(str::to_owned),
        };
        let linked = Images::linked(
            common,
            1 << 30,
            &"5".repeat(32),
            &fresh("root.raw.d1", None),
        );
        let linked = linked.unwrap();
        assert_eq!(linked.not_called_after("root.raw"), None);
        assert_eq!(linked.not_called_after("copy.raw"), Some("root.raw.d1"));
        assert_eq!(linked.not_called_after("root"), Some("root.raw.d1"));
        let mut leaves = linked.clone();
        leaves.leaving.insert("other.raw.d1".to_owned(), None);
        assert_eq!(leaves.not_called_after("root.raw"), Some("other.raw.d1"));
        let log = fresh("new.raw.moving-7", Some("/fast"));
        let moves = linked.freeze(&log).unwrap();
        assert_eq!(moves.not_called_after("root.raw"), None);
    }

    /// What another maker left has the first names.
    #[test]
    fn a_linked_disk_gives_no_name_that_is_taken_before_its_own() {
        let common = Common {
            path: "/srv/base.raw",
            id: &"9".repeat(32),
        };
        for (name, next) in [("root.raw.d1", 2), ("root.raw.d5", 6), ("root.raw.old", 2)] {
            let fresh = Fresh {
                name: name.to_owned(),
                id: "1".repeat(32),
                elsewhere: None,
            };
            let linked = Images::linked(common, 1 << 30, &"5".repeat(32), &fresh);
            assert_eq!(linked.unwrap().next, next, "{name}");
        }
    }

    #[test]
    fn what_is_written_is_read_again_and_nothing_else_is_taken() {
        let text = serde_json::to_string(&images()).unwrap();
        assert_eq!(serde_json::from_str::<Images>(&text).unwrap(), images());
        assert!(text.contains(r#""root.raw":{"kind":"raw"}"#), "{text}");
        let strange = text.replace("\"bytes\"", "\"colour\":1,\"bytes\"");
        assert!(serde_json::from_str::<Images>(&strange).is_err());
    }

    fn refused(change: &dyn Fn(&mut Images), told: &str) {
        let mut images = images();
        change(&mut images);
        let why = images.check().unwrap_err();
        assert!(why.contains(told), "{why}");
    }

    #[test]
    fn images_that_cannot_be_are_refused_by_name() {
        assert_eq!(images().check(), Ok(()));
        refused(&|images| images.bytes = 0, "0 bytes");
        refused(&|images| images.mark = "7".into(), "by which mark");
        refused(
            &|images| images.top = "root.raw".into(),
            "lies below another",
        );
        refused(
            &|images| images.top = "gone".into(),
            "\"gone\" is not described",
        );
        refused(
            &|images| drop(images.images.remove("root.raw")),
            "\"root.raw\" is not described",
        );
        let of = |name: &'static str, change: fn(&mut Image)| {
            move |images: &mut Images| change(images.images.get_mut(name).unwrap())
        };
        refused(
            &of("root.raw.d1", |image| image.over = None),
            "lies over nothing",
        );
        refused(
            &of("root.raw", |image| image.over = Some("root.raw.d1".into())),
            "is whole",
        );
        refused(
            &of("root.raw.d1", |image| {
                image.over = Some("root.raw.d1".into())
            }),
            "more than 32",
        );
        refused(
            &of("root.raw.d1", |image| image.id = Some("7".into())),
            "says that it is",
        );
        refused(
            &of("root.raw", |image| image.id = Some("7".into())),
            "says that it is",
        );
        refused(
            &of("root.raw.d2", |image| image.common = true),
            "no name of an image",
        );
        for name in ["root.raw", "../root"] {
            refused(
                &|images| drop(images.leaving.insert(name.into(), None)),
                "does not",
            );
        }
        for name in ["../root", "a/b", "", "..", "a\nb"] {
            let named = |images: &mut Images| {
                let image = images.images.get("root.raw").unwrap().clone();
                images.images.insert(name.to_owned(), image);
            };
            refused(&named, "no name of an image");
        }
    }

    #[test]
    fn only_deltas_lie_elsewhere_and_where_they_lie_is_named_wholly() {
        let mut images = images();
        let fresh = Fresh {
            name: "web-root.raw.d3".into(),
            id: "7".repeat(32),
            elsewhere: Some("/srv/fast".into()),
        };
        images = images.freeze(&fresh).unwrap();
        assert_eq!(images.elsewhere["web-root.raw.d3"], "/srv/fast");
        let text = serde_json::to_string(&images).unwrap();
        assert_eq!(serde_json::from_str::<Images>(&text).unwrap(), images);
        // It is known where it lies for as long as it is to be removed.
        images.drop_image("web-root.raw.d3");
        assert_eq!(images.elsewhere.len(), 1);
        let gone = images.without(&["web-root.raw.d3".to_owned()]);
        assert!(gone.elsewhere.is_empty());
        let at = |name: &'static str, path: &'static str| {
            move |images: &mut Images| drop(images.elsewhere.insert(name.into(), path.into()))
        };
        refused(&at("root.raw", "/srv/fast"), "is said to lie in");
        refused(&at("gone", "/srv/fast"), "is said to lie in");
        refused(&at("root.raw.d1", "fast"), "is said to lie in");
        refused(&at("root.raw.d1", "/srv/a\nb"), "is said to lie in");
    }

    #[test]
    fn a_linked_disk_names_what_it_begins_as_by_path_and_number() {
        let fresh = Fresh {
            name: "root.raw.d1".to_owned(),
            id: "1".repeat(32),
            elsewhere: None,
        };
        let (id, mark) = ("7".repeat(32), "5".repeat(32));
        let of = |path, id| Images::linked(Common { path, id }, 1 << 30, &mark, &fresh);
        let images = of("/srv/base.raw", &id).unwrap();
        let path = "/srv/base.raw";
        assert_eq!(images.common(), Some(Common { path, id: &id }));
        assert_eq!((images.next, images.is_one_raw()), (2, false));
        assert!(images.is_linked_only() && !super::tests::images().is_linked_only());
        assert!(images.may_become_one() && !super::tests::images().may_become_one());
        assert_eq!(images.unneeded(|_| 0), None);
        let text = serde_json::to_string(&images).unwrap();
        assert_eq!(serde_json::from_str::<Images>(&text).unwrap(), images);
        assert!(of("base.raw", &id).unwrap_err().contains("no name"));
        assert!(of(path, "7").unwrap_err().contains("says that it is"));
        let mut unknown = images.clone();
        unknown.images.get_mut(path).unwrap().id = None;
        assert!(unknown.check().unwrap_err().contains("says that it is"));
        // Whoever removes what lies over it looks beside its own image.
        let mut strewn = images;
        let at = ("root.raw.d1".to_owned(), "/srv/fast".to_owned());
        strewn.elsewhere.extend([at]);
        assert!(strewn.check().is_ok() && !strewn.is_linked_only());
    }

    #[test]
    fn snapshots_that_cannot_be_are_refused_by_name() {
        let named = |name| SnapshotName::new(name).unwrap();
        let first =
            |change: fn(&mut Snapshot)| move |images: &mut Images| change(&mut images.snapshots[0]);
        let after = |images: &mut Images| images.snapshots[0].after = Some(named("updated"));
        refused(&after, "came after");
        refused(
            &first(|one| one.image = "gone".into()),
            "\"gone\" of snapshot 'clean'",
        );
        refused(
            &first(|one| one.image = "root.raw.d2".into()),
            "is to be written",
        );
        refused(
            &first(|one| one.text = "a".repeat(TEXT_LEN_MAX + 1)),
            "too long a text",
        );
        refused(
            &|images| images.snapshots.push(images.snapshots[0].clone()),
            "two snapshots",
        );
        refused(
            &|images| images.after = Some(named("gone")),
            "no snapshot 'gone'",
        );
        refused(
            &|images| images.reverting = Some(named("gone")),
            "no snapshot 'gone'",
        );
    }
}
