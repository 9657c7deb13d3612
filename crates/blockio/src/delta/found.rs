//! The extent of a delta that somebody has opened: its head is read and judged before anything else is done with it.
//!
//! Who owns the state: whoever has the extent's lock, or that of all that lies below and above it. Refuses: files that are no extents of ours, that are cut short,
//! or whose directory leads elsewhere; another delta than the one that is described; and to guess what is not durable where the map is gone.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use godwit_delta::{GRAIN, Grain, Id, Label, Layout, States, Use, header, table};

use super::tables::{self, Unread};
use super::{Delta, Opening, Outliving, Words, file_of, unusable};
use crate::{Access, Buffer, Error, Image, next_data};

/// Which delta an extent must be: its number, and how long its disk is, where whoever opens it knows that. Nothing is made room for by what a file says of
/// itself before it was compared.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    id: Id,
    bytes: Option<u64>,
}

impl From<Id> for Wanted {
    fn from(id: Id) -> Self {
        Self { id, bytes: None }
    }
}

impl From<(Id, u64)> for Wanted {
    fn from((id, bytes): (Id, u64)) -> Self {
        let bytes = Some(bytes);
        Self { id, bytes }
    }
}

impl Wanted {
    fn check(&self, layout: &Layout, label: &Label) -> Result<(), String> {
        let has = layout.disk_bytes();
        if self.id != label.id {
            return Err("it is another delta than the one that is described".to_owned());
        }
        match self.bytes.is_none_or(|bytes| bytes == has) {
            true => Ok(()),
            false => Err(format!(
                "it says that its disk has {has} bytes, which is another length than that of the disk: put back what belongs together"
            )),
        }
    }
}

/// An extent that is locked and whose head was read.
pub(super) struct Found {
    image: Image,
    layout: Layout,
    pub label: Label,
    /// The number of the map of its states, if it says one.
    map: u64,
}

impl Found {
    pub fn locked(
        (file, path): (File, &Path),
        access: Access,
        (wanted, opening): (Wanted, Opening<'_>),
    ) -> Result<Self, Error> {
        let mut image = Image::of(file, path, access, opening.block_bytes)?;
        image.lock(opening.name, opening.patience)?;
        Self::of(image, Some(wanted))
    }

    /// Any delta where none is wanted.
    pub fn of(image: Image, wanted: Option<Wanted>) -> Result<Self, Error> {
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
        let checked = wanted.map_or(Ok(()), |wanted| wanted.check(&layout, &label));
        checked.map_err(|why| unusable(&path, &why))?;
        let found = Self {
            image,
            layout,
            label,
            map: header::decode_map(said_map(head.bytes())),
        };
        if found.image.bytes() < found.layout.file_bytes() {
            return Err(found.unusable("it is cut short"));
        }
        found.check_directory()?;
        Ok(found)
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

    pub fn own_states(&self) -> Result<States<Words>, Error> {
        let own = Words::own(&self.layout).map_err(|source| self.failed(source))?;
        let states = self.over(own)?;
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

    pub fn into_top(self, opening: Opening<'_>, outliving: Outliving<'_>) -> Result<Delta, Error> {
        let whose = (self.label.id, outliving.boot);
        let of_map = |source| Error::Image {
            action: "keep the states of",
            path: self.image.path().to_owned(),
            source,
        };
        let found = match self.label.in_use {
            Use::Open { boot } if boot == outliving.boot => {
                let found = Words::find(outliving.map, &self.layout, whose, self.map);
                let found = found.map_err(of_map)?;
                if found.is_none() && !outliving.no_guest_lives {
                    let why = "what was written to it under this boot of the host and not made durable is not known, since the map of its states is gone, or one of an earlier process is in its place: end what still runs on it first";
                    return Err(self.unusable(why));
                }
                found
            }
            Use::Open { .. } | Use::Closed | Use::Frozen => None,
        };
        // What storage has lost of what it tells nobody knows; a guest that was told of it goes on with what is read.
        let goes_back = outliving.no_guest_lives && found.as_ref().is_some_and(Words::are_lost);
        let states = match found.filter(|_| !goes_back) {
            Some(kept) => self.over(kept)?,
            None => {
                let made = Words::create(outliving.map, &self.layout, whose, 0).map_err(of_map)?;
                let states = self.over(made)?;
                self.load(&states)?;
                if goes_back {
                    states.doubt();
                }
                let placed = states.words().put_in_place(outliving.map);
                placed.map_err(of_map)?;
                states
            }
        };
        let map = Some(outliving.map.to_owned());
        let mut delta = self.into_delta(states, opening.name, map);
        delta.went_back = goes_back;
        delta.begin(outliving.boot)
    }

    pub fn into_delta(self, states: States<Words>, name: &str, map: Option<PathBuf>) -> Delta {
        Delta {
            image: self.image,
            layout: self.layout,
            label: self.label,
            states,
            name: name.to_owned(),
            map,
            went_back: false,
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

    pub fn unusable(&self, why: &str) -> Error {
        unusable(self.image.path(), why)
    }
}

fn said_map(head: &[u8]) -> &[u8] {
    let said = head.get(header::MAP_AT..header::MAP_AT + header::LABEL);
    said.unwrap_or_default()
}

/// Whether nothing is written any more to the delta that has this extent, which must be this one.
pub fn is_frozen(
    (file, path): (File, &Path),
    wanted: impl Into<Wanted>,
    block_bytes: u32,
) -> Result<bool, Error> {
    let image = Image::of(file, path, Access::ReadOnly, block_bytes)?;
    let found = Found::of(image, Some(wanted.into()))?;
    Ok(found.label.in_use == Use::Frozen)
}

/// Whether this is an extent of ours that has another number than this. What is none, or is cut short, has none.
pub fn is_another(
    (file, path): (File, &Path),
    wanted: Id,
    block_bytes: u32,
) -> Result<bool, Error> {
    let found = any((file, path), Access::ReadOnly, block_bytes)?;
    Ok(found.is_some_and(|found| found.label.id != wanted))
}

/// The extent that this is, whatever its number; nothing of a file that is none.
fn any(
    (file, path): (File, &Path),
    access: Access,
    block_bytes: u32,
) -> Result<Option<Found>, Error> {
    let found = Image::of(file, path, access, block_bytes);
    match found.and_then(|image| Found::of(image, None)) {
        Err(error) if !error.is_of_storage() => Ok(None),
        found => found.map(Some),
    }
}

/// Whether this is an extent of ours that holds nothing. Of one that was not closed the tables may not tell all: it must not hold any bytes either. One of a disk
/// of more bytes than these counts as one that holds something where its file has anything behind its head: its tables are as long as it says, and are not read.
pub fn is_empty(
    (file, path): (File, &Path),
    bytes_max: u64,
    block_bytes: u32,
) -> Result<bool, Error> {
    let Some(found) = any((file, path), Access::ReadWrite, block_bytes)? else {
        return Ok(false);
    };
    let holds = |from: u64| {
        let next = next_data(&found.image, from..found.layout.file_bytes());
        let next = next.map_err(|source| found.failed(source))?;
        Ok::<_, Error>(next.is_some())
    };
    if !holds(found.layout.tables().start)? {
        return Ok(true);
    }
    let is_open = matches!(found.label.in_use, Use::Open { .. });
    if found.layout.disk_bytes() > bytes_max || is_open && holds(found.layout.data_at())? {
        return Ok(false);
    }
    let states = found.own_states()?;
    Ok(states.run(&(0..states.grains())) == (Grain::Absent, states.grains()))
}
