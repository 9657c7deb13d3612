//! A disk with snapshots that moves on its host, with all that it consists of.
//!
//! Its top is frozen first, under a new one. What lies below that is written by nobody any more, and copied as files. Then the new top is copied as a disk
//! without snapshots is ([`super::in_place`]), into a delta over the copied files: whatever the guest writes meanwhile goes there alone. What nobody
//! needs of deleted snapshots stays until the move is over.
//!
//! Owns nothing beyond the move. Refuses: images that other VMs have, too, places on block devices, and names that are taken.

use super::described::not_done;
use super::layers::{Place, boot, opening};
use super::linked::must_go_along;
use super::parts::{Part, Parts};
use super::served::Served;
use super::snapshots::All;
use super::switching::{Going, Stopped};
use super::to_copy::{begin_copying_but, open_disk_image};
use super::{BLOCK, LOCK_WAIT, lock_name};
use crate::adoption::lock;
use crate::faults::reached;
use crate::hypervisor::internal;
use godwit_blockio::delta::{Delta, Outliving, Words, create_extent, forget_map, is_frozen};
use godwit_blockio::filters::{Course, Outlet, Pace, Still, TopOnly, untouched};
use godwit_blockio::{Access, Image, NO_NEARER, Nearer, SecondImage};
use godwit_delta::{Id, Layout, States};
use godwit_qemu::disk::identity_of_open;
use godwit_qemu::layered::random_number;
use godwit_snapshots::{AnotherPlace, Images};
use godwit_types::ApiError;
use godwit_types::vm::DiskSpec;
use godwit_vhost::Disk;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often it is told how far the files are.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// An image with what lies over it, from the lowest to the top.
pub(super) struct NewImage {
    pub image: Image,
    pub deltas: Vec<Delta>,
}

/// What a disk that moves consists of.
pub(super) struct Tree {
    /// As they are described at the place that it leaves,
    images: Images,
    /// and where it comes to.
    pub there: Images,
    /// The names there of all but the top.
    names: BTreeMap<String, String>,
    /// Of the top here.
    top: States<Words>,
    /// What is left of it here once it has moved.
    pub former: Parts,
}

impl Tree {
    /// Lets the copying of the top begin, over a copy of what lies below it. Returns the bytes that are to be copied.
    pub(super) fn begin_copying(&self, bytes: u64, course: &Course) -> u64 {
        begin_copying_top(&self.top, bytes, course)
    }

    /// Takes what is copied of the top alone.
    pub(super) fn only_top(&self, outlet: Box<dyn Outlet>) -> Box<dyn Outlet> {
        Box::new(TopOnly::new(outlet, self.top.clone()))
    }
}

/// Lets the copying of a top begin, where all below it is copied. Returns the bytes that are to be copied.
pub(super) fn begin_copying_top(top: &States<Words>, bytes: u64, course: &Course) -> u64 {
    let layout = Layout::of(bytes).ok();
    let same = layout.map_or_else(Vec::new, |layout| untouched(&layout, top));
    begin_copying_but(same, bytes, course)
}

/// How far the files below the top are.
struct Progress {
    began: Instant,
    told: Option<Instant>,
    total: u64,
    /// Of those that are copied.
    done: u64,
}

/// A file that is copied, and what it is copied to.
struct Pair {
    from: Image,
    to: Image,
    /// Blocks of this one may become the other's, too.
    shares: Option<File>,
}

impl Served {
    /// What the disk consists of that is to move, its top frozen under a new one; nothing of a disk that is one image.
    pub(super) fn begin_tree(
        &self,
        going: &mut Going<'_>,
        disk: &Arc<Disk>,
    ) -> Result<Option<Tree>, Stopped> {
        let own = disk.lend_image()?;
        let all = self.all();
        let place = all.place(&going.spec);
        let Some(found) = place.load_of(own.as_fd())? else {
            return Ok(None);
        };
        must_go_along(&found)?;
        self.remove_what_left(&place, own.as_fd())?;
        let spec = DiskSpec {
            path: going.place.path.clone(),
            shared: going.place.shared,
            ..going.spec.clone()
        };
        let there = all.place_there(&spec, None);
        there.must_take_snapshots()?;
        let (images, top) = self.freeze_alone(&going.spec)?;
        reached("disk-move.frozen");
        place.must_be_frozen(&images)?;
        let (mark, top_id) = (random_number()?, random_number()?);
        let numbered = (there.first_number()?, &*mark);
        let elsewhere = images.at_another_place(there.file_name()?, numbered, &top_id)?;
        let ending = going.copying.beside.strip_prefix(&going.copying.path);
        let ending = ending.ok_or("the name of its new image is not known")?;
        going.copying.parts = there.parts_to_be(&elsewhere, ending);
        going.copying.parts.must_be_free()?;
        let AnotherPlace {
            images: after,
            names,
        } = elsewhere;
        Ok(Some(Tree {
            former: place.parts_of(&images)?,
            images,
            there: after,
            names,
            top,
        }))
    }

    /// Removes what is part of a disk no more before that goes elsewhere: nobody would know of it here. Nothing is tidied meanwhile.
    pub(super) fn remove_what_left(
        &self,
        place: &Place<'_>,
        own: BorrowedFd<'_>,
    ) -> Result<(), String> {
        let _one = lock(&self.descriptions);
        let Some(images) = place.load_of(own)? else {
            return Ok(());
        };
        if images.leaving.is_empty() {
            return Ok(());
        }
        place.confirm(own, &images)?;
        place.remove_what_leaves(&images)
    }

    /// Freezes the top of one disk, of which nothing is to be kept, under a new one. Returns what the disk consists of, and the states of that.
    pub(super) fn freeze_alone(
        &self,
        spec: &DiskSpec,
    ) -> Result<(Images, States<Words>), ApiError> {
        let _one = lock(&self.descriptions);
        let all = All {
            specs: vec![spec.clone()],
            ..self.all()
        };
        let changed = all.prepare(Images::freeze, |_| None)?;
        let frozen = self.freeze(&all, &changed)?;
        let images = changed.into_iter().next().map(|one| one.now);
        let of_one = images.zip(frozen.tops.into_iter().next());
        of_one.ok_or_else(|| internal("no disk was frozen"))
    }

    /// Copies what lies below the top beside the new image, and makes a top over it. Returns what lies over that, from the lowest to the top; nothing of
    /// a disk that is one image.
    pub(super) fn copy_below(
        &self,
        going: &mut Going<'_>,
        (disk, image): (&Arc<Disk>, &Image),
        pace: &Pace,
    ) -> Result<Vec<Delta>, Stopped> {
        let Some(tree) = going.tree.take() else {
            return Ok(Vec::new());
        };
        let copied = self.copy_tree(going, &tree, (disk, image), pace);
        // Whoever fails tells what is to be forgotten.
        going.tree = Some(tree);
        copied
    }

    fn copy_tree(
        &self,
        going: &mut Going<'_>,
        tree: &Tree,
        (disk, image): (&Arc<Disk>, &Image),
        pace: &Pace,
    ) -> Result<Vec<Delta>, Stopped> {
        let made = self.make_parts(going, tree)?;
        reached("disk-move.parts-made");
        let all = self.all();
        let (here, spec) = (all.place(&going.spec), going.there());
        let place = all.place_there(&spec, going.copying.image);
        let bytes_of = |name: &String| here.bytes_of(&tree.images, name).unwrap_or_default();
        let mut progress = Progress {
            began: Instant::now(),
            told: None,
            total: tree.names.keys().map(bytes_of).sum(),
            done: 0,
        };
        let own = self.own_pair(going, image)?;
        self.copy_file(going, (disk, &own), pace, &mut progress)?;
        for (name, new) in &tree.names {
            let Some(file) = made.get(new) else { continue };
            let from = here.open_part(&tree.images, name)?;
            let pair = Pair {
                shares: Some(from.try_clone()?),
                from: Image::of(from, Path::new(name), Access::ReadOnly, BLOCK)?,
                to: Image::of(file.try_clone()?, Path::new(new), Access::ReadWrite, BLOCK)?,
            };
            self.copy_file(going, (disk, &pair), pace, &mut progress)?;
        }
        going.below = progress.total;
        reached("disk-move.below-copied");
        place.open_made(&tree.there, &made).map_err(Stopped::from)
    }

    /// Makes the files that are to be filled, which are written down before.
    fn make_parts(
        &self,
        going: &mut Going<'_>,
        tree: &Tree,
    ) -> Result<BTreeMap<String, File>, Stopped> {
        let layout = Layout::of(tree.images.bytes)?;
        let all = self.all();
        let spec = going.there();
        let place = all.place_there(&spec, going.copying.image);
        let mut made = BTreeMap::new();
        for part in &mut going.copying.parts.files {
            let beside = DiskSpec {
                path: part.beside.clone(),
                ..spec.clone()
            };
            let file = self.make(&beside, layout.file_bytes())?;
            part.image = Some(identity_of_open(&file)?);
            if let Some(name) = place.name_of_part(&tree.there, &part.path) {
                made.insert(name, file);
            }
        }
        going.copying.parts.keep_names_beside()?;
        let copying = going.copying.clone();
        self.change(|what| what.copying = Some(copying))?;
        Ok(made)
    }

    fn own_pair(&self, going: &Going<'_>, image: &Image) -> Result<Pair, Stopped> {
        let path = Path::new(&going.spec.path);
        let from = open_disk_image(&going.spec, going.image)?;
        let to = File::from(image.as_fd().try_clone_to_owned()?);
        Ok(Pair {
            shares: Some(from.try_clone()?),
            from: Image::of(from, path, Access::ReadOnly, BLOCK)?,
            to: Image::of(to, image.path(), Access::ReadWrite, BLOCK)?,
        })
    }

    /// Copies one of them wholly, and makes it durable.
    fn copy_file(
        &self,
        going: &Going<'_>,
        (disk, pair): (&Arc<Disk>, &Pair),
        pace: &Pace,
        progress: &mut Progress,
    ) -> Result<(), Stopped> {
        let course = Course::at(pace);
        let shares = pair.shares.as_ref().map(File::try_clone).transpose()?;
        let second = SecondImage::of(&pair.to, shares, &course)?;
        let mut still = Still::new(&pair.from, second.outlet()?, &course)?;
        let bytes = still.left_bytes();
        let (mut stopped, mut nearer) = (None, Nearer::default());
        let ended = still.run(
            || second.under_way_bytes(),
            |course| {
                self.note_below(going, progress, bytes.saturating_sub(course.left_bytes()));
                let left = course.left_bytes().saturating_add(second.under_way_bytes());
                if !nearer.observe(Instant::now(), left) {
                    stopped = Some(Stopped::Failed(no_nearer(left)));
                    return false;
                }
                match self.may_go_on(going, disk) {
                    Ok(()) => true,
                    Err(why) => {
                        stopped = Some(why);
                        false
                    }
                }
            },
        );
        if let Some(why) = stopped {
            return Err(why);
        }
        if !ended? {
            return Err("its copying was broken off".into());
        }
        second.sync()?;
        progress.done += bytes;
        Ok(())
    }

    fn may_go_on(&self, going: &Going<'_>, disk: &Arc<Disk>) -> Result<(), Stopped> {
        if self.moves.are_cancelled() {
            return Err(Stopped::Cancelled);
        }
        self.must_be_mirrored(going.index, disk)
    }

    fn note_below(&self, going: &Going<'_>, progress: &mut Progress, copied: u64) {
        let now = Instant::now();
        if progress.told.is_some_and(|told| now < told + TELL_EVERY) {
            return;
        }
        progress.told = Some(now);
        let (total, done) = (progress.total, progress.done.saturating_add(copied));
        let left = total.saturating_sub(done);
        let seconds = progress.began.elapsed().as_secs_f64();
        self.note(&going.place.disk, |disk| {
            (disk.total_bytes, disk.left_bytes) = (total, left);
            disk.seconds = Some(seconds);
            let eta_s = left as f64 * seconds / done.max(1) as f64;
            disk.eta_s = (done > 0).then(|| eta_s.ceil() as u64);
        });
    }

    /// Gives all of it its names, and describes it there, durably: it counts for nobody before what is written calls it the disk.
    pub(super) fn name_tree(&self, going: &Going<'_>) -> Result<(), Stopped> {
        let Some(tree) = &going.tree else {
            return Ok(());
        };
        let _one = lock(&self.descriptions);
        let (all, spec) = (self.all(), going.there());
        let place = all.place_there(&spec, going.copying.image);
        // From here on the image is known to be a part.
        place.begin(&tree.there)?;
        going.copying.parts.give_names()?;
        reached("disk-move.parts-named");
        place.save(&tree.there)?;
        Ok(())
    }

    /// The disk goes on there, or does not: what only this boot of the host knew of the other top is of no use.
    pub(super) fn forget_top(&self, going: &Going<'_>, has_moved: bool) {
        let Some(tree) = &going.tree else {
            return;
        };
        let (all, spec) = (self.all(), going.there());
        let place = all.place_there(&spec, going.copying.image);
        let gone = match has_moved {
            true => &tree.images,
            false => &tree.there,
        };
        place.forget_top(gone);
        if has_moved {
            self.describe_now(&spec);
        }
    }

    /// A descriptor for each image that has none, as the disk is now.
    pub(super) fn describe_now(&self, spec: &DiskSpec) {
        let _one = lock(&self.descriptions);
        let all = self.all();
        let place = all.place(spec);
        match place.load() {
            Ok(images) => place.describe_missing(&images),
            Err(why) => {
                let disk = &spec.name;
                tracing::info!(disk, why, "its images are not described for qemu-img");
            }
        }
    }
}

fn no_nearer(left: u64) -> String {
    format!(
        "what its snapshots hold gets no nearer to being copied: {} MiB of an image are left since {} s; see whether the storage of its new place answers",
        left >> 20,
        NO_NEARER.as_secs()
    )
}

impl Place<'_> {
    /// What lies beside the disk's own image, as it is now.
    pub(super) fn parts_of(&self, images: &Images) -> Result<Parts, String> {
        let files = images.deltas().map(|(name, one)| {
            let path = self.extent(images, name);
            let image = self.identity_of_part(images, name, &path)?;
            Ok(Part {
                path: path.to_string_lossy().into_owned(),
                beside: String::new(),
                image,
                id: one.id.clone().unwrap_or_default(),
            })
        });
        Ok(Parts {
            mark: images.mark.clone(),
            files: files.collect::<Result<_, String>>()?,
        })
    }

    /// Which file a delta is, as it is opened with the rights of the VM's user and says that it is the one that is described: it may be removed by that.
    fn identity_of_part(
        &self,
        images: &Images,
        name: &str,
        path: &Path,
    ) -> Result<Option<(u64, u64)>, String> {
        let told = |error: std::io::Error| format!("{}: {error}", path.display());
        match path.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found.map_err(told)?,
        };
        let (file, id) = self.open_extent(images, name, true)?;
        let found = identity_of_open(&file).map_err(told)?;
        let looked = is_frozen((file, path), (id, images.bytes), BLOCK);
        looked.map_err(|error| error.to_string())?;
        Ok(Some(found))
    }

    /// What is to lie there, and has names that end so until it is whole.
    pub(super) fn parts_to_be(&self, elsewhere: &AnotherPlace, ending: &str) -> Parts {
        let images = &elsewhere.images;
        let files = images.deltas().map(|(name, one)| {
            let path = self.extent(images, name).to_string_lossy().into_owned();
            Part {
                beside: format!("{path}{ending}"),
                path,
                image: None,
                id: one.id.clone().unwrap_or_default(),
            }
        });
        Parts {
            mark: images.mark.clone(),
            files: files.collect(),
        }
    }

    /// The image that has this file.
    pub(super) fn name_of_part(&self, images: &Images, path: &str) -> Option<String> {
        let mut names = images.images.keys();
        let found = names.find(|name| self.extent(images, name) == Path::new(path));
        found.cloned()
    }

    /// All but the top are complete by their files alone. One of another branch may not be where a process died.
    pub(super) fn must_be_frozen(&self, images: &Images) -> Result<(), String> {
        let chain = images.chain(&images.top);
        for (name, _) in images.deltas().filter(|(name, _)| **name != images.top) {
            if self.is_frozen(images, name)? {
                continue;
            }
            if chain.contains(&name.as_str()) {
                return Err(format!("the image {name} below its top is not frozen"));
            }
            drop(self.open_frozen(images, name, LOCK_WAIT, false)?);
        }
        Ok(())
    }

    /// Opens what was filled, and makes the top, which is empty: from the lowest to that. All others must be what is described, too.
    pub(super) fn open_made(
        &self,
        images: &Images,
        made: &BTreeMap<String, File>,
    ) -> Result<Vec<Delta>, String> {
        let name = lock_name(self.config, self.spec);
        let told = |error: godwit_blockio::Error| error.to_string();
        let mut opened = BTreeMap::new();
        for (image, file) in made {
            let path = self.extent(images, image);
            let id = images.images.get(image).and_then(|one| one.id.as_deref());
            let id = Id::of_delta(id.unwrap_or_default())?;
            let file = file.try_clone().map_err(|error| error.to_string())?;
            let opening = opening(&name, LOCK_WAIT);
            let delta = match *image == images.top {
                true => {
                    create_extent(&file, &path, images.bytes, id).map_err(told)?;
                    let outliving = Outliving {
                        map: &self.map_of(id),
                        boot: boot()?,
                        no_guest_lives: true,
                    };
                    Delta::top_of((file, &path), id, opening, outliving).map_err(told)?
                }
                false => {
                    let delta = Delta::parent_of((file, &path), id, opening).map_err(told)?;
                    delta.ok_or_else(|| format!("{} is not complete", path.display()))?
                }
            };
            opened.insert(image.as_str(), delta);
        }
        let chain = images.chain(&images.top);
        let over = chain.iter().rev().skip(1);
        let over = over.map(|name| {
            let delta = opened.remove(name);
            delta.ok_or_else(|| format!("the image {name} is not described"))
        });
        let over = over.collect::<Result<Vec<Delta>, String>>()?;
        self.over_its_parent(images, over, LOCK_WAIT)
    }

    /// Removes what outlives a process of a top that is none any more.
    pub(super) fn forget_top(&self, images: &Images) {
        let id = images.images.get(&images.top);
        if let Some(id) = id.and_then(|top| Id::of_digits(top.id.as_deref()?)) {
            // It is gone with the next boot of the host.
            let _ = forget_map(&self.map_of(id));
        }
    }

    /// A descriptor for each image that has none: what was copied is read by others with these.
    pub(super) fn describe_missing(&self, images: &Images) {
        for name in images.images.keys() {
            if let Err(why) = self.describe_if_missing(images, name) {
                tracing::info!(
                    name,
                    why,
                    "an image has no descriptor: qemu-img does not find its way"
                );
            }
        }
    }

    fn describe_if_missing(&self, images: &Images, name: &str) -> Result<(), String> {
        let image = images.images.get(name);
        let Some((id, over)) =
            image.and_then(|image| image.id.as_deref().zip(image.over.as_deref()))
        else {
            return Ok(());
        };
        let descriptor = self.descriptor(images, name);
        if descriptor.symlink_metadata().is_ok() {
            return Ok(());
        }
        let id = Id::of_delta(id)?;
        let parent = self.parent_of(images, over, images.elsewhere.get(name))?;
        self.as_opener(|| {
            let new = godwit_blockio::delta::NewDelta {
                descriptor: &descriptor,
                bytes: images.bytes,
                id,
                parent: &parent,
            };
            let described = godwit_blockio::delta::describe_delta(&new);
            described.map(drop).map_err(not_done)
        })
    }
}
