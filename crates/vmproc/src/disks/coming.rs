//! Disks with snapshots that come with their VM: the files below their tops, and a top over these that is filled while the guest runs elsewhere.
//!
//! What a disk consists of says its source, once. The files get their names as they are made: without the disk's own image, which alone has another
//! name until the VM is here ([`super::images`]), they are no disk. The description lies beside them, and the image says that it is a part, as soon as all below
//! the top is durable: so whoever serves the disk after this process finds it as whoever has moved it does.
//!
//! A linked disk lies over the same image here as at its source: that does not come along, and is looked at before anything is made, and again before anything
//! is laid over it.
//!
//! Owns what is open until the disk has it. Refuses: what contradicts itself, another disk than was announced, names that are taken, and a linked disk whose
//! image is not here or is another one.

use super::Disks;
use super::described::not_done;
use super::images::arriving_path;
use super::layers::Place;
use super::parent::Trust;
use super::parts::Parts;
use super::served::Served;
use super::snapshots::{MAPS_MAX, map_bytes};
use super::{BLOCK, LOCK_WAIT, REST_WAIT, lock_name, told};
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::delta::Delta;
use godwit_blockio::{Access, Arriving, Image};
use godwit_delta::Layout;
use godwit_qemu::disk::identity_of_open;
use godwit_qemu::layered::random_number;
use godwit_snapshots::{AnotherPlace, Images};
use godwit_store::{json_of, save_json};
use godwit_types::ApiError;
use godwit_types::migration::MigrationSpec;
use godwit_types::snapshots::description_of;
use godwit_types::vm::DiskSpec;
use godwit_vhost::Disk;
use godwit_wire::BELOW;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A disk with images below its top, of which all come from another host.
#[derive(Debug)]
pub(super) struct Coming {
    /// What its source said.
    said: String,
    /// What it consists of here,
    images: Images,
    /// and the files of that, but for its own.
    made: BTreeMap<String, File>,
    /// Those over its own image, from the lowest to the top, until the disk has them.
    deltas: Option<Vec<Delta>>,
    /// Whether all below the top is durable.
    is_below_whole: bool,
}

/// A place for what fills each of so many disks, and what lies below each.
pub(super) fn places_for(disks: usize) -> Vec<OnceLock<Arriving>> {
    let places = usize::from(BELOW) + disks;
    (0..places).map(|_| OnceLock::new()).collect()
}

/// Whether this disk comes with snapshots.
pub(super) fn is_layered(coming: &MigrationSpec, spec: &DiskSpec) -> bool {
    let mut named = coming.disks.iter();
    named.any(|named| named.name == spec.name && named.layered)
}

impl Disks {
    /// The source says what the disk at this place consists of; or, without that, that all below its top was sent.
    pub(crate) fn take_layers(&self, place: u8, said: Option<&str>) -> Result<(), String> {
        let served = &self.0;
        let what = served.what();
        let spec = what.disks.get(usize::from(place));
        let spec = spec.filter(|spec| spec.goes_along() && what.arriving.is_some());
        let spec = spec.ok_or("the source sent snapshots of a disk that does not come")?;
        let taken = match said {
            Some(said) => served.begin_layers((place, spec), said),
            None => served.end_layers((place, spec)),
        };
        taken.map_err(|why| served.refused(spec, &why).message)
    }
}

impl Served {
    fn begin_layers(&self, (place, spec): (u8, &DiskSpec), said: &str) -> Result<(), String> {
        let mut coming = lock(&self.coming);
        if let Some(known) = coming.get(&place) {
            // The channels were made anew.
            return match known.said == said {
                true => Ok(()),
                false => Err("its source says that it consists of something else now".to_owned()),
            };
        }
        let filling = Arc::clone(&*lock(&self.filling));
        let below = filling.get(usize::from(place | BELOW));
        let is_filled = filling
            .get(usize::from(place))
            .is_none_or(|top| top.get().is_some());
        let below = below.filter(|_| !is_filled);
        let below = below.ok_or("it was to come without snapshots: begin the migration again")?;
        let at = description_of(Path::new(&spec.path));
        let images: Images = json_of(&at, said.as_bytes()).map_err(|error| error.to_string())?;
        images.check()?;
        let disk = self.disk(usize::from(place))?;
        let own = self.own_coming(spec, &disk)?;
        must_be_as_long(own.bytes(), &images)?;
        self.must_be_announced(spec, &images)?;
        must_have_memory(&images, coming.values().map(|one| &one.images))?;
        let all = self.all();
        let here = all.place(spec);
        here.must_take_snapshots()?;
        here.must_have_parent(&images)?;
        if at.symlink_metadata().is_ok() {
            return Err(format!(
                "{} describes snapshots of another image: move that file away if nobody needs it",
                at.display()
            ));
        }
        let (mark, top_id) = (random_number()?, random_number()?);
        let numbered = (here.first_number()?, &*mark);
        let elsewhere = images.at_another_place(here.file_name()?, numbered, &top_id)?;
        let made = self.make_coming(&here, &elsewhere)?;
        let over = elsewhere.names.values().filter_map(|name| {
            let file = made.get(name)?.try_clone();
            let path = here.extent(&elsewhere.images, name);
            let image = file.map_err(|error| error.to_string()).and_then(|file| {
                let image = Image::of(file, &path, Access::ReadWrite, BLOCK);
                image.map_err(|error| error.to_string())
            });
            Some(image)
        });
        let over: Vec<Image> = over.collect::<Result<_, String>>()?;
        let filled = Arriving::files(&own, &over).map_err(|error| error.to_string())?;
        below
            .set(filled)
            .map_err(|_| "what lies below its top comes already")?;
        reached("destination.layers-made");
        coming.insert(
            place,
            Coming {
                said: said.to_owned(),
                images: elsewhere.images,
                made,
                deltas: None,
                is_below_whole: false,
            },
        );
        Ok(())
    }

    /// The image to which a disk is linked is the one that was looked at before the migration began, and no other path that its source names.
    fn must_be_announced(&self, spec: &DiskSpec, images: &Images) -> Result<(), String> {
        let Some(common) = images.common() else {
            return Ok(());
        };
        let announced = lock(&self.announced);
        let named = announced.iter().find(|named| named.name == spec.name);
        match named.is_some_and(|named| named.is_linked_to(common.path, common.id)) {
            true => Ok(()),
            false => Err(format!(
                "its source says that it is linked to {}, of which its migration was not told: begin it again",
                common.path
            )),
        }
    }

    /// Makes the files, under names that no other file has, and gives them theirs once it is written down which they are.
    fn make_coming(
        &self,
        here: &Place<'_>,
        elsewhere: &AnotherPlace,
    ) -> Result<BTreeMap<String, File>, String> {
        let (spec, images) = (here.spec, &elsewhere.images);
        let layout = Layout::of(images.bytes).map_err(|why| why.to_string())?;
        let what = self.what();
        let migration = what.arriving.as_ref().map(|arrival| &arrival.migration);
        let migration = migration.ok_or("nothing comes with a migration")?;
        let mut parts = here.parts_to_be(elsewhere, &arriving_path("", migration));
        parts.must_be_free()?;
        self.note_parts(spec, &parts)?;
        let mut made = BTreeMap::new();
        for part in &mut parts.files {
            let beside = DiskSpec {
                path: part.beside.clone(),
                ..spec.clone()
            };
            let file = self.make(&beside, layout.file_bytes());
            let file = file.map_err(|error| error.message)?;
            let image = identity_of_open(&file).map_err(|error| error.to_string())?;
            part.image = Some(image);
            if let Some(name) = here.name_of_part(images, &part.path) {
                made.insert(name, file);
            }
        }
        self.note_parts(spec, &parts)?;
        parts.give_names()?;
        Ok(made)
    }

    fn note_parts(&self, spec: &DiskSpec, parts: &Parts) -> Result<(), String> {
        let noted = self.change(|what| {
            if let Some(arrival) = &mut what.arriving {
                arrival.parts.insert(spec.name.clone(), parts.clone());
            }
        });
        noted.map_err(|error| error.message)
    }

    /// All below the top was carried out: it is made durable, and a top is put over it.
    fn end_layers(&self, (place, spec): (u8, &DiskSpec)) -> Result<(), String> {
        let mut coming = lock(&self.coming);
        let one = coming.get_mut(&place);
        let one = one.ok_or("its source did not say what it consists of")?;
        if one.is_below_whole {
            // The channels were made anew.
            return Ok(());
        }
        let filling = Arc::clone(&*lock(&self.filling));
        let slot = |at: u8| filling.get(usize::from(at)).ok_or("it has no place");
        let below = slot(place | BELOW)?.get().ok_or("nothing of it came")?;
        below.sync().map_err(|error| error.to_string())?;
        let all = self.all();
        let here = all.place(spec);
        let deltas = here.open_made(&one.images, &one.made)?;
        let (top, lower) = deltas.split_last().ok_or("it has no top")?;
        let disk = self.disk(usize::from(place))?;
        let own = self.own_coming(spec, &disk)?;
        let filled = Arriving::over(top, lower, &own).map_err(|error| error.to_string())?;
        here.describe_coming(own.as_fd(), &one.images)?;
        let set = slot(place)?.set(filled);
        set.map_err(|_| "its top comes already")?;
        reached("destination.layers-whole");
        one.deltas = Some(deltas);
        one.is_below_whole = true;
        Ok(())
    }

    /// All of them are here and durable: the disks go on with what lies over their own images. Nothing of a guest's is on its way to them.
    pub(super) fn put_layers(&self) -> Result<(), ApiError> {
        let what = self.what();
        let mut coming = lock(&self.coming);
        for (place, one) in coming.iter_mut() {
            let index = usize::from(*place);
            let Some(spec) = what.disks.get(index) else {
                continue;
            };
            let put = self.put_one(index, spec, one);
            put.map_err(|why| self.refused(spec, &why))?;
            self.note_images(&spec.name, Some(&one.images));
        }
        Ok(())
    }

    fn put_one(&self, index: usize, spec: &DiskSpec, one: &mut Coming) -> Result<(), String> {
        if !one.is_below_whole {
            return Err("not all of its images are here".to_owned());
        }
        // A switchover that was called off has put them there, and what came since is in the same files.
        if one.deltas.is_none() {
            return Ok(());
        }
        let disk = self.disk(index)?;
        let standing = disk.stand_still(REST_WAIT);
        let standing = standing.map_err(|error| told(spec, &error))?;
        let deltas = one.deltas.take().unwrap_or_default();
        let changed = standing.change_layers(move |had| match had.is_empty() {
            true => Ok(deltas),
            false => Err("something lies over its image already".to_owned()),
        });
        changed.map_err(|error| told(spec, &error))
    }

    /// Whether something else than the disks may have their images open: that came just now, and has the locks, too.
    pub(super) fn still_comes(&self) -> bool {
        self.what().arriving.is_some() || lock(&self.filled).strong_count() > 0
    }

    /// The disk's own image, which this process has open, under the name that it has while it comes.
    fn own_coming(&self, spec: &DiskSpec, disk: &Disk) -> Result<Image, String> {
        let own = disk.lend_image().map_err(|error| told(spec, &error))?;
        let what = self.what();
        let arrival = what.arriving.as_ref();
        let path = arrival.map_or_else(
            || spec.path.clone(),
            |arrival| arriving_path(&spec.path, &arrival.migration),
        );
        let image = Image::of(File::from(own), Path::new(&path), Access::ReadWrite, BLOCK);
        image.map_err(|error| error.to_string())
    }

    /// They are this host's, under their names.
    pub(super) fn have_come(&self) {
        let (what, come) = (self.what(), std::mem::take(&mut *lock(&self.coming)));
        for place in come.keys() {
            if let Some(spec) = what.disks.get(usize::from(*place)) {
                self.describe_now(spec);
            }
        }
    }

    /// Refuses where a file of what came is another one by now.
    pub(super) fn parts_are_there(&self) -> Result<(), String> {
        let what = self.what();
        let mut parts = what
            .arriving
            .iter()
            .flat_map(|arrival| arrival.parts.values());
        parts.try_for_each(Parts::must_be_there)
    }
}

fn must_be_as_long(bytes: u64, images: &Images) -> Result<(), String> {
    match images.bytes == bytes {
        true => Ok(()),
        false => Err(format!(
            "its source says that it has {} bytes, and said {bytes} before",
            images.bytes
        )),
    }
}

/// Refuses what takes more memory here than a VM's disks may have at its source, while its own memory is still to come.
fn must_have_memory<'a>(
    images: &Images,
    others: impl Iterator<Item = &'a Images>,
) -> Result<(), String> {
    let own = map_bytes(images);
    let all = others.map(map_bytes).fold(own, u64::saturating_add);
    // Each was frozen once more for its migration.
    match own <= MAPS_MAX && all <= 2 * MAPS_MAX {
        true => Ok(()),
        false => Err(format!(
            "which of its images has which part of it would take {} MiB of memory, {} with those of the VM's other disks: delete some snapshots first",
            own >> 20,
            all >> 20
        )),
    }
}

impl Place<'_> {
    /// Refuses where the image to which a disk is linked is not on this host, or is another one.
    fn must_have_parent(&self, images: &Images) -> Result<(), String> {
        let Some(common) = images.common() else {
            return Ok(());
        };
        let reader = lock_name(self.config, self.spec);
        let opened = self.open_common(common, images.bytes, (&reader, LOCK_WAIT, Trust::Asked));
        opened.map(drop)
    }

    /// Writes down what a disk consists of whose own image comes, and has that say that it is a part, durably.
    fn describe_coming(&self, own: BorrowedFd<'_>, images: &Images) -> Result<(), String> {
        self.bear_bound(own, images)?;
        let at = description_of(self.path());
        self.as_writer(own, || save_json(&at, images).map_err(not_done))
    }
}

#[cfg(test)]
#[path = "coming_tests.rs"]
mod tests;
