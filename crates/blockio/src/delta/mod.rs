//! Delta disks as files: made, opened, locked, frozen, and put above an image.
//!
//! What they are is said in `godwit_delta`, which also decides about requests; [`filters::Overlaying`](crate::filters::Overlaying) carries
//! that out. Here are the files: a descriptor, an extent beside it, and, while somebody works with it, a map of the states of its
//! grains in the VM's run directory.
//!
//! Who owns the state: whoever has the extent's lock. The top is locked for writing, what lies below for reading, so that many VMs may
//! share it. What a killed process answered and did not make durable is in the map; after a power cut the tables alone count.
//!
//! What it refuses: extents that anybody else has written, to write what is frozen, to open a path because a file names it (of a
//! descriptor's words only the name of the file beside it is used, and a hint never), and to guess: a delta that is open under
//! this boot of the host without its map.

mod make;
mod map;
mod merge;
mod tables;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_delta::{
    Descriptor, GRAIN, Grain, Id, Kind, LABEL_AT, Label, Layout, Refused, States, Use, header,
    table,
};

pub use make::{NewDelta, create, describe_base, describe_over};
pub use map::Words;
pub use merge::{Merged, Target, merge};
use tables::Unread;

use crate::{Access, Buffer, Engine, Error, Image, Stack, filters, image_lock};

/// How a disk opens its deltas.
#[derive(Debug, Clone, Copy)]
pub struct Opening<'a> {
    /// Of the disk, in bytes.
    pub block_bytes: u32,
    /// By which readers of one image are told apart, as in [`Image::lock`].
    pub name: &'a str,
    /// How long whoever has it is waited for.
    pub patience: Duration,
}

/// Where the states of a top's grains outlive this process.
#[derive(Debug, Clone, Copy)]
pub struct Outliving<'a> {
    /// A file on a tmpfs.
    pub map: &'a Path,
    /// The boot of this host.
    pub boot: Id,
    /// No guest lives that was told of anything since the tables were written: where the map is gone the tables count.
    pub no_guest_lives: bool,
}

/// Why what was answered is not durable.
#[derive(Debug)]
pub struct Unsettled {
    /// Storage may have lost what the guest was told; else only what says where it is is not written, as where there is no room.
    pub lost: bool,
    pub error: Error,
}

/// A delta that is open, and locked.
#[derive(Debug)]
pub struct Delta {
    image: Image,
    layout: Layout,
    label: Label,
    states: States<Words>,
    /// By which it is locked.
    name: String,
    map: Option<PathBuf>,
    /// What is read of a linked disk where it, the lowest one, has nothing: an image that others have, too, and nobody writes.
    begins_as: Option<Image>,
}

impl Delta {
    /// Opens the delta that this descriptor is of as a parent: it is frozen, or closed, and stays as it is.
    pub fn open_parent(descriptor: &Path, opening: Opening<'_>) -> Result<Self, Error> {
        let found = Found::open(descriptor, Access::ReadOnly, opening)?;
        if let Use::Open { .. } = found.label.in_use {
            let why = "it was not closed: open it as the top of a disk first, or freeze it";
            return Err(found.unusable(why));
        }
        let states = found.own_states()?;
        Ok(found.into_delta(states, opening.name, None))
    }

    /// Opens it as the top of a disk, which is written.
    pub fn open_top(
        descriptor: &Path,
        opening: Opening<'_>,
        outliving: Outliving<'_>,
    ) -> Result<Self, Error> {
        let found = Found::open(descriptor, Access::ReadWrite, opening)?;
        if found.label.in_use == Use::Frozen {
            return Err(found.unusable("it is frozen: nothing is written to it any more"));
        }
        found.into_top(opening, outliving)
    }

    /// A parent whose extent is open, which must be this delta; nothing where it was not closed, and is to be opened as a top and frozen first.
    pub fn parent_of(
        (file, path): (File, &Path),
        id: Id,
        opening: Opening<'_>,
    ) -> Result<Option<Self>, Error> {
        let found = Found::locked((file, path), Access::ReadOnly, opening)?;
        found.must_be(id)?;
        if let Use::Open { .. } = found.label.in_use {
            return Ok(None);
        }
        let states = found.own_states()?;
        Ok(Some(found.into_delta(states, opening.name, None)))
    }

    /// A top whose extent is open, which must be this delta. A frozen one is refused: who still names it as the top of a disk has an older copy of
    /// what was written down.
    pub fn top_of(
        (file, path): (File, &Path),
        id: Id,
        opening: Opening<'_>,
        outliving: Outliving<'_>,
    ) -> Result<Self, Error> {
        let found = Found::locked((file, path), Access::ReadWrite, opening)?;
        found.must_be(id)?;
        if found.label.in_use == Use::Frozen {
            return Err(found.unusable("it is frozen, and another image was written to since: what names it as the one to be written is an older copy; put back what belongs together"));
        }
        found.into_top(opening, outliving)
    }

    /// One whose extent is open, which must be this delta, as its tables have it, and without a lock: for whoever has that of all that lies below
    /// and above it, and moves content between them.
    pub fn unlocked((file, path): (File, &Path), id: Id, block_bytes: u32) -> Result<Self, Error> {
        let image = Image::of(file, path, Access::ReadWrite, block_bytes)?;
        let found = Found::of(image)?;
        found.must_be(id)?;
        let states = found.own_states()?;
        Ok(found.into_delta(states, "", None))
    }

    /// Has it lie over an image that is only read, in the place of the disk's own: over this one everybody reads what is absent in all deltas. Refuses one that
    /// may be written, or of another length.
    pub fn over(mut self, image: Image) -> Result<Self, Error> {
        let fits = image.access() == Access::ReadOnly && image.bytes() == self.layout.disk_bytes();
        if !fits {
            let why = "a disk that is as long begins as it, and only reads it";
            return Err(unusable(image.path(), why));
        }
        self.begins_as = Some(image);
        Ok(self)
    }

    /// What it lies over, where that is not the disk's own image.
    pub(crate) fn begins_as(&self) -> Option<&Image> {
        self.begins_as.as_ref()
    }

    /// Has a frozen one be written again, as a top, durably: whoever calls this knows that nothing lies over it from now on that is written.
    pub fn thaw(&mut self) -> Result<(), Error> {
        match self.label.in_use {
            Use::Frozen => self.say(Use::Closed),
            Use::Open { .. } | Use::Closed => Ok(()),
        }
    }

    /// A last round: from here on it is complete by its tables alone, and read-only. It stays open, as a parent. Nothing may be under way,
    /// and nothing may be written to it any more.
    pub fn freeze(&mut self) -> Result<(), Error> {
        self.end(Use::Frozen)?;
        self.image.share(&self.name)
    }

    /// What it shows is elsewhere by now, and nobody opens it again: nothing is written any more, to storage that may hang.
    pub fn give_up(mut self) {
        if let Some(map) = self.map.take() {
            let _ = std::fs::remove_file(map);
        }
    }

    /// A last round: it is complete by its tables alone, until somebody opens it again. Nothing may be under way.
    pub fn close(mut self) -> Result<(), Error> {
        match self.image.access() {
            Access::ReadWrite => self.end(Use::Closed),
            Access::ReadOnly => Ok(()),
        }
    }

    fn end(&mut self, how: Use) -> Result<(), Error> {
        let settled = tables::settle(&self.image, &self.layout, &self.states);
        settled.map_err(|unfinished| self.failed("make durable", unfinished.source))?;
        self.say(how)?;
        // The tables say all of it now.
        if let Some(map) = self.map.take() {
            let own = Words::own(&self.layout);
            let words = own
                .as_ref()
                .as_ref()
                .iter()
                .zip(self.states.words().as_ref());
            for (to, from) in words {
                to.store(
                    from.load(std::sync::atomic::Ordering::Acquire),
                    std::sync::atomic::Ordering::Release,
                );
            }
            self.states = States::over(own, &self.layout).map_err(|why| self.unusable(&why))?;
            let _ = std::fs::remove_file(map);
        }
        Ok(())
    }

    /// Writes the label, and makes it durable with all that was written before.
    fn say(&mut self, in_use: Use) -> Result<(), Error> {
        let label = Label {
            in_use,
            ..self.label
        };
        let mut block = Buffer::zeroed(GRAIN as usize);
        let written = file_of(self.image.as_fd()).and_then(|file| {
            file.read_exact_at(block.bytes_mut(), LABEL_AT)?;
            if let Some(sector) = block.bytes_mut().get_mut(..header::LABEL) {
                sector.copy_from_slice(&label.encode());
            }
            file.write_all_at(block.bytes(), LABEL_AT)?;
            file.sync_data()
        });
        written.map_err(|source| self.failed("label", source))?;
        self.label = label;
        Ok(())
    }

    /// Its file, through which all IO of it goes.
    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// Where everything lies in the extent.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What each grain is.
    pub fn states(&self) -> &States<Words> {
        &self.states
    }

    /// What tells it from all others.
    pub fn id(&self) -> Id {
        self.label.id
    }

    fn failed(&self, action: &'static str, source: io::Error) -> Error {
        Error::Image {
            action,
            path: self.image.path().to_owned(),
            source,
        }
    }

    fn unusable(&self, why: &Refused) -> Error {
        unusable(self.image.path(), &why.to_string())
    }
}

/// An extent that is locked and whose head was read.
struct Found {
    image: Image,
    layout: Layout,
    label: Label,
}

impl Found {
    fn open(descriptor: &Path, access: Access, opening: Opening<'_>) -> Result<Self, Error> {
        let said = read_descriptor(descriptor)?;
        if said.kind != Kind::Delta {
            return Err(unusable(descriptor, "it describes no delta"));
        }
        let path = descriptor.with_file_name(&said.extent);
        // A FIFO would be waited for, and a link may lead anywhere.
        let opened = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(&path);
        let file = opened.map_err(|source| Error::Image {
            action: "open",
            path: path.clone(),
            source,
        })?;
        let found = Self::locked((file, &path), access, opening)?;
        if found.layout.disk_bytes() != said.bytes || found.label.id.cid() != said.cid {
            return Err(found.unusable("its descriptor is another delta's"));
        }
        Ok(found)
    }

    fn locked(
        (file, path): (File, &Path),
        access: Access,
        opening: Opening<'_>,
    ) -> Result<Self, Error> {
        let mut image = Image::of(file, path, access, opening.block_bytes)?;
        image.lock(opening.name, opening.patience)?;
        Self::of(image)
    }

    fn of(image: Image) -> Result<Self, Error> {
        let path = image.path().to_owned();
        let mut head = Buffer::zeroed(2 * GRAIN as usize);
        let read = file_of(image.as_fd()).and_then(|file| file.read_exact_at(head.bytes_mut(), 0));
        read.map_err(|source| Error::Image {
            action: "read",
            path: path.clone(),
            source,
        })?;
        let decoded = header::decode(head.bytes());
        let (layout, label) = decoded.map_err(|why| unusable(&path, &why.to_string()))?;
        let found = Self {
            image,
            layout,
            label,
        };
        if found.image.bytes() < found.layout.file_bytes() {
            return Err(found.unusable("it is cut short"));
        }
        found.check_directory()?;
        Ok(found)
    }

    fn must_be(&self, id: Id) -> Result<(), Error> {
        match self.label.id == id {
            true => Ok(()),
            false => Err(self.unusable("it is another delta than the one that is described")),
        }
    }

    fn check_directory(&self) -> Result<(), Error> {
        let range = self.layout.directory();
        let mut bytes = Buffer::zeroed((range.end - range.start) as usize);
        let read = file_of(self.image.as_fd())
            .and_then(|file| file.read_exact_at(bytes.bytes_mut(), range.start));
        read.map_err(|source| self.failed(source))?;
        let checked = table::check_directory(&self.layout, bytes.bytes());
        checked.map_err(|why| self.unusable(&why.to_string()))
    }

    fn own_states(&self) -> Result<States<Words>, Error> {
        let states = self.over(Words::own(&self.layout))?;
        self.load(&states)?;
        Ok(states)
    }

    fn over(&self, words: Words) -> Result<States<Words>, Error> {
        States::over(words, &self.layout).map_err(|why| self.unusable(&why.to_string()))
    }

    fn load(&self, states: &States<Words>) -> Result<(), Error> {
        match tables::load(&self.image, &self.layout, states) {
            Ok(()) => Ok(()),
            Err(Unread::System(source)) => Err(self.failed(source)),
            Err(Unread::Refused(why)) => Err(self.unusable(&why.to_string())),
        }
    }

    fn into_top(self, opening: Opening<'_>, outliving: Outliving<'_>) -> Result<Delta, Error> {
        let whose = (self.label.id, outliving.boot);
        let of_map = |source| Error::Image {
            action: "keep the states of",
            path: self.image.path().to_owned(),
            source,
        };
        let kept = match self.label.in_use {
            Use::Open { boot } if boot == outliving.boot => {
                let kept = Words::find(outliving.map, &self.layout, whose).map_err(of_map)?;
                if kept.is_none() && !outliving.no_guest_lives {
                    let why = "what was written to it under this boot of the host and not made durable is not known, since the map of its states is gone: end what still runs on it first";
                    return Err(self.unusable(why));
                }
                kept
            }
            Use::Open { .. } | Use::Closed | Use::Frozen => None,
        };
        let states = match kept {
            Some(kept) => self.over(kept)?,
            None => {
                let made = Words::create(outliving.map, &self.layout, whose).map_err(of_map)?;
                let states = self.over(made)?;
                self.load(&states)?;
                states
            }
        };
        let map = Some(outliving.map.to_owned());
        let mut delta = self.into_delta(states, opening.name, map);
        let boot = outliving.boot;
        delta.say(Use::Open { boot })?;
        Ok(delta)
    }

    fn into_delta(self, states: States<Words>, name: &str, map: Option<PathBuf>) -> Delta {
        Delta {
            image: self.image,
            layout: self.layout,
            label: self.label,
            states,
            name: name.to_owned(),
            map,
            begins_as: None,
        }
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Image {
            action: "read",
            path: self.image.path().to_owned(),
            source,
        }
    }

    fn unusable(&self, why: &str) -> Error {
        unusable(self.image.path(), why)
    }
}

impl Stack<Engine> {
    /// Puts deltas above the disk's image, from the lowest to the top, which alone is written. Only while nothing is under way and there are none;
    /// else, and where they are not as long as the image, they come back.
    pub fn put_deltas(&mut self, deltas: Vec<Delta>) -> Result<(), Vec<Delta>> {
        let idle = self.is_idle();
        let bytes = self.bottom.image().map(|image| image.bytes());
        let fit = deltas
            .iter()
            .all(|delta| Some(delta.layout.disk_bytes()) == bytes);
        let Some((top, lower)) = deltas.split_last().filter(|_| idle && fit) else {
            return Err(deltas);
        };
        let lower = lower.iter().rev().map(|delta| delta.states.clone());
        let filter = filters::Overlaying::new(&top.layout, top.states.clone(), lower.collect());
        match self.bottom.layers() {
            Some(layers) if layers.0.is_empty() => layers.0 = deltas,
            _ => return Err(deltas),
        }
        match self.put_foot(Box::new(filter)) {
            Ok(()) => Ok(()),
            Err(_) => Err(self
                .bottom
                .layers()
                .map(|layers| std::mem::take(&mut layers.0))
                .unwrap_or_default()),
        }
    }

    /// Makes durable all that was answered, and what says where it is. Only while nothing is under way; else there is no answer.
    pub fn settle(&mut self) -> Option<Result<(), Unsettled>> {
        if !self.is_idle() {
            return None;
        }
        let synced = match self.bottom.layers()?.0.last() {
            Some(top) => {
                let settled = tables::settle(&top.image, &top.layout, &top.states);
                return Some(settled.map_err(|unfinished| Unsettled {
                    lost: unfinished.lost,
                    error: top.failed("make durable", unfinished.source),
                }));
            }
            None => {
                let image = self.bottom.image()?;
                rustix::io::retry_on_intr(|| rustix::fs::fdatasync(image.as_fd()))
            }
        };
        let path = self.bottom.image()?.path().to_owned();
        Some(synced.map_err(|errno| Unsettled {
            lost: true,
            error: Error::Image {
                action: "make durable",
                path,
                source: errno.into(),
            },
        }))
    }

    /// Takes the deltas away again, from the lowest to the top: only while nothing is under way. From then on requests go to the disk's image.
    pub fn take_deltas(&mut self) -> Option<Vec<Delta>> {
        if !self.take_foot() {
            return None;
        }
        let layers = self.bottom.layers()?;
        Some(std::mem::take(&mut layers.0))
    }
}

/// Whether this is an extent of ours that holds nothing. Of one that was not closed the tables may not tell all: it must not hold any bytes either.
pub fn is_empty((file, path): (File, &Path), block_bytes: u32) -> bool {
    let image = Image::of(file, path, Access::ReadWrite, block_bytes);
    let Ok(found) = image.and_then(Found::of) else {
        return false;
    };
    let data = found.layout.data_at()..found.layout.file_bytes();
    let holds_bytes = match found.label.in_use {
        Use::Open { .. } => !matches!(tables::next_data(&found.image, data), Ok(None)),
        Use::Closed | Use::Frozen => false,
    };
    let states = found.own_states().ok().filter(|_| !holds_bytes);
    states
        .is_some_and(|states| states.run(&(0..states.grains())) == (Grain::Absent, states.grains()))
}

/// Reads a descriptor and no more of it than one may have.
pub fn read_descriptor(path: &Path) -> Result<Descriptor, Error> {
    let limit = godwit_delta::descriptor::TEXT_MAX;
    let read = godwit_store::read_regular(path, limit as u64);
    let text = read.and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()));
    let text = text.map_err(|source| Error::Image {
        action: "read the descriptor of",
        path: path.to_owned(),
        source,
    })?;
    Descriptor::decode(&text).map_err(|why| unusable(path, &why.to_string()))
}

fn unusable(path: &Path, reason: &str) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Reads and writes at offsets.
fn file_of(fd: BorrowedFd<'_>) -> io::Result<File> {
    fd.try_clone_to_owned().map(File::from)
}

/// Nobody but us may have it meanwhile.
fn lock_new(file: &File, path: &Path, name: &str) -> Result<(), Error> {
    image_lock::take(file, path, Access::ReadWrite, name, Duration::ZERO)
}
