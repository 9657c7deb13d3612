//! Layers that nobody needs as they are, and how each of them is given up.
//!
//! Pure, owns nothing. A layer is needed where it is a snapshot's, and where several images lie over it. Refuses to write to what is
//! common, and to a qcow2 image: such a layer stays below.

use crate::{Disks, Format};
use godwit_types::plant::planted;

/// What lies over a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Above {
    /// Another layer, by its path.
    Layer(String),
    /// A disk's top, by the disk's name.
    Top(String),
}

/// How one image becomes unnecessary. Each may be broken off anywhere and done again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tidying {
    /// Nothing lies over this layer: it is taken out of the description, and removed, unless it is common.
    Drop { layer: String },
    /// What is in this layer and not in the image above it is copied up into that one; then the layer goes. The image above has the same
    /// content all the time, also for a guest that writes to it.
    Up { layer: String, above: Above },
    /// What is in the layer above is copied down into this one, which takes its place then. Nobody reads this layer but through the one
    /// above, which has the same content all the time.
    Down { layer: String, above: String },
    /// The same of a disk's top: it is frozen first, with another one over it, as often as it takes until little is left, and then the
    /// guest stands still for the rest. The raw image is the disk's top then.
    DownTop { layer: String, disk: String },
}

/// The next layer that nobody needs as it is, and how it is given up; `bytes_of` tells how much an image holds, by its path.
pub fn unneeded(disks: &Disks, bytes_of: impl Fn(&str) -> u64) -> Option<Tidying> {
    let mut layers = disks.layers.iter();
    layers.find_map(|(path, layer)| {
        if is_of_a_snapshot(disks, path) {
            return None;
        }
        let above = above(disks, path);
        let is_fixed = layer.is_common || layer.format == Format::Qcow2;
        let takes_several = planted("layer-of-two-written");
        match above.as_slice() {
            [] => Some(Tidying::Drop {
                layer: path.clone(),
            }),
            [_, _, ..] if !takes_several => None,
            _ if is_fixed => None,
            [Above::Layer(over), ..]
                if layer.format == Format::Raw || bytes_of(over) < bytes_of(path) =>
            {
                Some(Tidying::Down {
                    layer: path.clone(),
                    above: over.clone(),
                })
            }
            [one, ..] if layer.format == Format::Delta => Some(Tidying::Up {
                layer: path.clone(),
                above: one.clone(),
            }),
            [Above::Top(disk), ..] => Some(Tidying::DownTop {
                layer: path.clone(),
                disk: disk.clone(),
            }),
            [Above::Layer(_), ..] => None,
        }
    })
}

/// The description once that is done, and durable; and the image that may be removed once this description is.
pub fn tidied(disks: &Disks, tidying: &Tidying) -> (Disks, Option<String>) {
    let mut now = disks.clone();
    let goes = match tidying {
        Tidying::Drop { layer } => {
            let gone = now.layers.remove(layer);
            gone.filter(|gone| !gone.is_common).map(|_| layer.clone())
        }
        Tidying::Up { layer, .. } => {
            let below = now.layers.remove(layer).and_then(|layer| layer.over);
            put_over(&mut now, layer, below.as_deref());
            Some(layer.clone())
        }
        Tidying::Down { layer, above } => {
            now.layers.remove(above);
            put_over(&mut now, above, Some(layer));
            for snapshot in &mut now.snapshots {
                let paths = snapshot.disks.values_mut();
                let theirs = paths.filter(|path| *path == above);
                theirs.for_each(|path| path.clone_from(layer));
            }
            Some(above.clone())
        }
        Tidying::DownTop { layer, disk } => {
            let top = now.tops.iter_mut().find(|top| top.disk == *disk);
            top.map(|top| {
                let below = now.layers.remove(layer);
                top.over = below.and_then(|below| below.over);
                std::mem::replace(&mut top.path, layer.clone())
            })
        }
    };
    (now, goes)
}

fn is_of_a_snapshot(disks: &Disks, path: &str) -> bool {
    let mut paths = disks
        .snapshots
        .iter()
        .flat_map(|snapshot| snapshot.disks.values());
    paths.any(|of_snapshot| of_snapshot == path) && !planted("snapshot-layer-unneeded")
}

fn above(disks: &Disks, path: &str) -> Vec<Above> {
    let layers = disks
        .layers
        .iter()
        .filter(|(_, layer)| layer.over.as_deref() == Some(path));
    let layers = layers.map(|(path, _)| Above::Layer(path.clone()));
    let tops = disks
        .tops
        .iter()
        .filter(|top| top.over.as_deref() == Some(path));
    layers
        .chain(tops.map(|top| Above::Top(top.disk.clone())))
        .collect()
}

/// Whatever lay over the one lies over the other now.
fn put_over(disks: &mut Disks, from: &str, to: Option<&str>) {
    let tops = disks.tops.iter_mut().map(|top| &mut top.over);
    let layers = disks.layers.values_mut().map(|layer| &mut layer.over);
    for over in tops
        .chain(layers)
        .filter(|over| over.as_deref() == Some(from))
    {
        *over = to.map(str::to_owned);
    }
}
