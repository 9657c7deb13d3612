//! Delta disks as files: made, opened, locked, frozen, and put above an image.
//!
//! What they are is said in `godwit_delta`, which also decides about requests; [`filters::Overlaying`](crate::filters::Overlaying) carries
//! that out. Here are the files: a descriptor, an extent beside it, and, while somebody works with it, a map of the states of its
//! grains in the VM's run directory.
//!
//! Who owns the state: whoever has the extent's lock. The top is locked for writing, what lies below for reading, so that many VMs may
//! share it. What a killed process answered and did not make durable is in the map; after a power cut the tables alone count. So they do once storage
//! has failed to make something durable, as soon as no guest lives that was told of it; until then nothing is called durable any more.
//!
//! What it refuses: extents that anybody else has written, to write what is frozen, to open a path because a file names it, and to guess: a delta
//! that is open under this boot of the host without its map.

mod filling;
mod found;
mod make;
mod map;
mod merge;
mod movers;
mod pieces;
mod tables;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_delta::{Descriptor, GRAIN, Id, LABEL_AT, Label, Layout, Refused, States, Use, header};
use rustix::io::Errno;

pub(crate) use filling::Filling;
use found::Found;
pub use found::{Wanted, is_another, is_empty, is_frozen};
pub use make::{NewDelta, create, create_extent, describe_base, describe_delta, describe_over};
pub use map::{Words, forget as forget_map};
pub use merge::{Target, merge};
pub use movers::{AT_ONCE_MAX, Merged};
use tables::Unfinished;

use crate::{Access, Buffer, Engine, Error, Image, Outcome, Request, Stack, filters, image_lock};

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
    /// What its last guest was told and storage did not keep is left out.
    went_back: bool,
    /// What is read of a linked disk where it, the lowest one, has nothing: an image that others have, too, and nobody writes.
    begins_as: Option<Image>,
}

impl Delta {
    /// A parent whose extent is open, which must be this delta; nothing where it was not closed, and is to be opened as a top and frozen first.
    pub fn parent_of(
        (file, path): (File, &Path),
        wanted: impl Into<Wanted>,
        opening: Opening<'_>,
    ) -> Result<Option<Self>, Error> {
        let wanted = (wanted.into(), opening);
        let found = Found::locked((file, path), Access::ReadOnly, wanted)?;
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
        wanted: impl Into<Wanted>,
        opening: Opening<'_>,
        outliving: Outliving<'_>,
    ) -> Result<Self, Error> {
        let wanted = (wanted.into(), opening);
        let found = Found::locked((file, path), Access::ReadWrite, wanted)?;
        if found.label.in_use == Use::Frozen {
            return Err(found.unusable("it is frozen, and another image was written to since: what names it as the one to be written is an older copy; put back what belongs together"));
        }
        found.into_top(opening, outliving)
    }

    /// One whose extent is open, which must be this delta, as its tables have it, and without a lock: for whoever has that of all that lies below
    /// and above it, and moves content between them.
    pub fn unlocked(
        (file, path): (File, &Path),
        wanted: impl Into<Wanted>,
        block_bytes: u32,
    ) -> Result<Self, Error> {
        let image = Image::of(file, path, Access::ReadWrite, block_bytes)?;
        let found = Found::of(image, Some(wanted.into()))?;
        let states = found.own_states()?;
        Ok(found.into_delta(states, "", None))
    }

    /// Goes by the states of the same delta as somebody else has it open, who gave it more content.
    pub fn go_by(&mut self, other: Self) {
        if self.label.id == other.label.id {
            self.states = other.states;
        }
    }

    /// One that was opened without a lock and is not frozen, as a top: its tables say all that it has.
    pub fn into_top(
        mut self,
        opening: Opening<'_>,
        outliving: Outliving<'_>,
    ) -> Result<Self, Error> {
        if self.label.in_use == Use::Frozen {
            let why = "it is frozen: nothing is written to it any more";
            return Err(unusable(self.image.path(), why));
        }
        self.image.lock(opening.name, opening.patience)?;
        self.name = opening.name.to_owned();
        self.map = Some(outliving.map.to_owned());
        self.make_map(outliving.map, outliving.boot)?;
        self.begin(outliving.boot)
    }

    /// From here on the tables do not say all.
    fn begin(mut self, boot: Id) -> Result<Self, Error> {
        // A map of a build that knows of no numbers gets one, after the delta has it: until then it counts by what else it says.
        let map = match self.states.words().number() {
            0 => map::new_number(),
            number => number,
        };
        match self.say(Use::Open { boot }, Some(map)) {
            Ok(()) => {
                self.states.words().set_number(map);
                Ok(self)
            }
            Err(unfinished) => {
                // It may have told of what a process wrote that was killed.
                if unfinished.lost {
                    self.states.words().lose();
                }
                Err(self.failed("label", unfinished.source))
            }
        }
    }

    /// Puts the states into a new map there.
    fn make_map(&mut self, map: &Path, boot: Id) -> Result<(), Error> {
        // Whoever looks for the one that is gone finds this one.
        let (whose, number) = ((self.label.id, boot), self.states.words().number());
        let made = Words::create(map, &self.layout, whose, number).and_then(|made| {
            made.copy(self.states.words());
            made.put_in_place(map)?;
            Ok(made)
        });
        let made = made.map_err(|source| self.failed("keep the states of", source))?;
        self.states = States::over(made, &self.layout).map_err(|why| self.unusable(&why))?;
        Ok(())
    }

    /// Whether it has a map that nobody finds any more.
    fn lacks_map(&self) -> bool {
        let map = self.map.as_ref();
        map.is_some_and(|map| !self.states.words().are_at(map))
    }

    /// Makes its map anew where somebody has removed it.
    fn keep_map(&mut self) -> Result<(), Error> {
        match (self.map.clone(), self.label.in_use) {
            (Some(map), Use::Open { boot }) if self.lacks_map() => self.make_map(&map, boot),
            _ => Ok(()),
        }
    }

    /// Storage has failed to make something durable: nothing is called durable until it is opened for another guest.
    pub fn is_lost(&self) -> bool {
        self.states.words().are_lost()
    }

    /// What its last guest was told and storage did not keep is left out: it begins as after a power cut.
    pub fn went_back(&self) -> bool {
        self.went_back
    }

    /// Its tables may be read otherwise than they are kept, since somebody failed to make them durable: all are written again.
    pub fn doubt(&self) {
        self.states.doubt();
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

    /// Whether it lies over an image that is not the disk's own.
    pub fn is_linked(&self) -> bool {
        self.begins_as.is_some()
    }

    /// What it lies over, where that is not the disk's own image.
    pub(crate) fn begins_as(&self) -> Option<&Image> {
        self.begins_as.as_ref()
    }

    /// Has a frozen one be written again, as a top, durably: whoever calls this knows that nothing lies over it from now on that is written.
    pub fn thaw(&mut self) -> Result<(), Error> {
        match self.label.in_use {
            Use::Frozen => self.must_say(Use::Closed),
            Use::Open { .. } | Use::Closed => Ok(()),
        }
    }

    /// A last round: from here on it is complete by its tables alone, and read-only. It stays open, as a parent. Nothing may be under way,
    /// and nothing may be written to it any more.
    pub fn freeze(&mut self) -> Result<(), Error> {
        self.end(Use::Frozen)?;
        // The tables say all of it now.
        if let Some(map) = self.map.take() {
            let own = Words::own(&self.layout);
            let own = own.map_err(|source| self.failed("keep the states of", source))?;
            own.copy(self.states.words());
            self.states = States::over(own, &self.layout).map_err(|why| self.unusable(&why))?;
            // Nobody takes that of one that is frozen for its states; it goes with the delta, or with the next boot.
            let _ = forget_map(&map);
        }
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
        if self.image.access() == Access::ReadOnly {
            return Ok(());
        }
        self.end(Use::Closed)?;
        let gone = self.map.as_deref().map_or(Ok(()), forget_map);
        gone.map_err(|source| self.failed("forget the states of", source))
    }

    fn end(&mut self, how: Use) -> Result<(), Error> {
        let settled = tables::settle(&self.image, &self.layout, &self.states);
        settled.map_err(|unfinished| self.failed("make durable", unfinished.source))?;
        self.must_say(how)
    }

    fn must_say(&mut self, in_use: Use) -> Result<(), Error> {
        let said = self.say(in_use, None);
        said.map_err(|unfinished| self.failed("label", unfinished.source))
    }

    /// Writes the label, and which map counts if that is another one now, and makes it durable with all that was written before.
    fn say(&mut self, in_use: Use, map: Option<u64>) -> Result<(), Unfinished> {
        let label = Label {
            in_use,
            ..self.label
        };
        let mut block = Buffer::zeroed(GRAIN as usize);
        let file = file_of(self.image.as_fd())?;
        file.read_exact_at(block.bytes_mut(), LABEL_AT)?;
        if let Some(sector) = block.bytes_mut().get_mut(..header::LABEL) {
            sector.copy_from_slice(&label.encode());
        }
        let at = header::MAP_AT - LABEL_AT as usize;
        if let (Some(sector), Some(map)) = (block.bytes_mut().get_mut(at..at + header::LABEL), map)
        {
            sector.copy_from_slice(&header::encode_map(map));
        }
        file.write_all_at(block.bytes(), LABEL_AT)?;
        let synced = tables::sync(&self.image);
        synced.map_err(|source| Unfinished { lost: true, source })?;
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

    /// Why a flush that came out at the top did not make durable what was answered before it, and what says where that is; nothing where it did.
    pub fn unsettled(&self, flush: &Request, outcome: Outcome) -> Option<Unsettled> {
        let errno = match outcome {
            Outcome::Done => return None,
            Outcome::Failed(errno) => errno,
            Outcome::Unsupported => Errno::OPNOTSUPP,
        };
        let (written, is_lost) = self.bottom.written();
        let source = match is_lost {
            true => io::Error::other(tables::LOST),
            false => errno.into(),
        };
        Some(Unsettled {
            lost: !flush.lost_nothing,
            error: Error::Image {
                action: "make durable",
                path: written.path().to_owned(),
                source,
            },
        })
    }

    /// Has all that is not durable outlive this process, also where somebody has removed a map meanwhile. Only while nothing is under way.
    pub fn keep_maps(&mut self) -> Result<(), Error> {
        let mut layers = self.bottom.layers().into_iter();
        if !layers.any(|layers| layers.0.iter().any(Delta::lacks_map)) {
            return Ok(());
        }
        let Some(mut deltas) = self.take_deltas() else {
            return Ok(());
        };
        let kept = deltas.iter_mut().try_for_each(Delta::keep_map);
        match self.put_deltas(deltas) {
            Ok(()) => kept,
            Err(_) => Err(Error::System {
                action: "put deltas back above an image",
                source: io::ErrorKind::InvalidInput.into(),
            }),
        }
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
