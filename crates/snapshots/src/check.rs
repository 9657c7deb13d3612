//! Whether a description of images can be true. It may have come from a file that somebody wrote, or from another host.
//!
//! Pure, owns nothing. Refuses what contradicts itself, in a sentence's end that names the image.

use crate::{CHAIN_MAX, Disks, Format, Refusal, SNAPSHOTS_MAX};
use std::collections::BTreeSet;

impl Disks {
    /// Whether it can be true.
    pub fn check(&self) -> Result<(), Refusal> {
        self.check_tops()?;
        for (path, layer) in &self.layers {
            match (layer.format, &layer.over) {
                (Format::Delta, None) => return Err(format!("the delta {path} lies over nothing")),
                (Format::Raw | Format::Qcow2, Some(_)) => {
                    return Err(format!(
                        "{path} is whole, and is said to lie over another image"
                    ));
                }
                _ => {}
            }
            self.check_chain(path, 1)?;
        }
        for top in &self.tops {
            if let Some(over) = &top.over {
                self.check_chain(over, 2)?;
            }
        }
        self.check_snapshots()
    }

    fn check_tops(&self) -> Result<(), Refusal> {
        let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
        for top in &self.tops {
            if !names.insert(&top.disk) {
                return Err(format!("there are two disks '{}'", top.disk));
            }
            if !paths.insert(&top.path) || self.layers.contains_key(&top.path) {
                return Err(format!("{} is described twice", top.path));
            }
        }
        Ok(())
    }

    /// The images from this one down are there, and are not too many, as they are where they go round in a circle.
    fn check_chain(&self, path: &str, length: usize) -> Result<(), Refusal> {
        let (mut length, mut at) = (length, Some(path));
        while let Some(path) = at {
            if length > CHAIN_MAX {
                return Err(format!(
                    "more than {CHAIN_MAX} images lie over one another at {path}: delete snapshots"
                ));
            }
            let layer = self.layers.get(path);
            let layer = layer.ok_or_else(|| format!("the image {path} is not described"))?;
            at = layer.over.as_deref();
            length += 1;
        }
        Ok(())
    }

    fn check_snapshots(&self) -> Result<(), Refusal> {
        if self.snapshots.len() > SNAPSHOTS_MAX {
            return Err(format!("there are more than {SNAPSHOTS_MAX} snapshots"));
        }
        let mut names = BTreeSet::new();
        for snapshot in &self.snapshots {
            let name = snapshot.name.as_str();
            // Each comes after one that was there before it.
            let is_known = snapshot
                .after
                .as_deref()
                .is_none_or(|after| names.contains(after));
            if !is_known {
                return Err(format!(
                    "what snapshot '{name}' came after is not described before it"
                ));
            }
            if !names.insert(name) {
                return Err(format!("there are two snapshots '{name}'"));
            }
            let mut layers = snapshot.disks.values();
            if let Some(path) = layers.find(|path| !self.layers.contains_key(*path)) {
                return Err(format!(
                    "the image {path} of snapshot '{name}' is not described"
                ));
            }
        }
        match &self.after {
            Some(after) if !names.contains(after.as_str()) => {
                Err(format!("there is no snapshot '{after}'"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layer, Snapshot, Top};
    use std::collections::BTreeMap;

    fn disks() -> Disks {
        let text = |text: &str| text.to_owned();
        let top = Top {
            disk: text("root"),
            path: text("/d/2"),
            over: Some(text("/d/1")),
        };
        let layer = |format, over: Option<&str>| Layer {
            format,
            over: over.map(text),
            is_common: false,
        };
        Disks {
            tops: vec![top],
            layers: BTreeMap::from([
                (text("/d/0"), layer(Format::Raw, None)),
                (text("/d/1"), layer(Format::Delta, Some("/d/0"))),
            ]),
            snapshots: vec![Snapshot {
                name: text("clean"),
                after: None,
                disks: BTreeMap::from([(text("root"), text("/d/1"))]),
            }],
            after: Some(text("clean")),
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_its_name() {
        assert_eq!(disks().check(), Ok(()));
        let refused = |change: &dyn Fn(&mut Disks), told: &str| {
            let mut disks = disks();
            change(&mut disks);
            let why = disks.check().unwrap_err();
            assert!(why.contains(told), "{why}");
        };
        refused(
            &|disks| disks.tops.push(disks.tops[0].clone()),
            "two disks 'root'",
        );
        refused(
            &|disks| disks.tops[0].path = "/d/0".into(),
            "/d/0 is described twice",
        );
        refused(
            &|disks| drop(disks.layers.remove("/d/0")),
            "/d/0 is not described",
        );
        let over = |path: &'static str, over: Option<&'static str>| {
            move |disks: &mut Disks| {
                disks.layers.get_mut(path).unwrap().over = over.map(str::to_owned)
            }
        };
        refused(&over("/d/1", None), "lies over nothing");
        refused(&over("/d/0", Some("/d/1")), "is whole");
        refused(&over("/d/1", Some("/d/1")), "more than 32 images");
        refused(
            &|disks| disks.snapshots[0].after = Some("clean".into()),
            "came after",
        );
        refused(
            &|disks| disks.snapshots.push(disks.snapshots[0].clone()),
            "two snapshots",
        );
        refused(
            &|disks| disks.after = Some("gone".into()),
            "no snapshot 'gone'",
        );
        let elsewhere = |disks: &mut Disks| {
            disks.snapshots[0]
                .disks
                .insert("root".into(), "/d/9".into());
        };
        refused(&elsewhere, "/d/9 of snapshot 'clean'");
    }
}
