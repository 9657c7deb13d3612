//! Reads what a delta's tables say, and writes it outside of a guest's requests.
//!
//! Who owns the state: whoever has the delta's lock. Refuses: entries that are not ours.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use godwit_delta::{BLOCK, Layout, Refused, States, table};

use super::file_of;
use super::map::Words;
use crate::{Buffer, Image, next_data};

/// So many blocks are looked at together: a guest may have discarded all of a large disk.
pub(super) const MARKED: usize = 1 << 12;
/// Most bytes that are read or written at once.
const AT_ONCE: u64 = 1 << 20;

/// Why tables cannot be read.
#[derive(Debug)]
pub(super) enum Unread {
    System(io::Error),
    Refused(Refused),
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

/// Takes over what the tables say, where the file holds anything.
pub(super) fn load(image: &Image, layout: &Layout, states: &States<Words>) -> Result<(), Unread> {
    let tables = layout.tables();
    let mut at = tables.start;
    while let Some(data) = next_data(image, at..tables.end)? {
        let mut start = data.start / BLOCK * BLOCK;
        let end = data.end.next_multiple_of(BLOCK).min(tables.end);
        while start < end {
            let len = AT_ONCE.min(end - start);
            let mut buffer = Buffer::zeroed(len as usize);
            file_of(image.as_fd())?.read_exact_at(buffer.bytes_mut(), start)?;
            take(
                layout,
                states,
                (start - tables.start) / BLOCK,
                buffer.bytes(),
            )?;
            start += len;
        }
        at = end;
    }
    Ok(())
}

fn take(layout: &Layout, states: &States<Words>, first: u64, bytes: &[u8]) -> Result<(), Unread> {
    for (block, bytes) in (first..).zip(bytes.chunks(BLOCK as usize)) {
        if bytes.iter().all(|byte| *byte == 0) {
            continue;
        }
        let words = table::decode(layout, block, bytes).map_err(Unread::Refused)?;
        states.load(block, &words);
    }
    Ok(())
}

/// Why a round came to no end.
#[derive(Debug)]
pub(super) struct Unfinished {
    /// Storage may have lost what a guest was told; else the tables alone are not written, and the next round writes them.
    pub lost: bool,
    pub source: io::Error,
}

impl From<io::Error> for Unfinished {
    fn from(source: io::Error) -> Self {
        Self {
            lost: false,
            source,
        }
    }
}

/// Why nothing is made durable after a sync that failed.
pub(super) const LOST: &str = "its storage failed to keep what was written to it before, so that it may be lost: stop its VM and start it again, which begins with what is certainly kept, as after a power cut";

/// A last round: what is marked is durable after it, and nothing is marked. None after a sync that failed: the kernel tells of what it lost once.
pub(super) fn settle(
    image: &Image,
    layout: &Layout,
    states: &States<Words>,
) -> Result<(), Unfinished> {
    let lost = |source| Unfinished { lost: true, source };
    if states.words().are_lost() {
        return Err(lost(io::Error::other(LOST)));
    }
    sync(image).map_err(|source| {
        states.words().lose();
        lost(source)
    })?;
    let mut at = 0;
    loop {
        let marked = states.marked_from(at, MARKED);
        let Some(last) = marked.last() else {
            break;
        };
        write_marked(image, layout, states, &marked)?;
        at = last + 1;
    }
    if at > 0 {
        sync(image)?;
    }
    // Nobody marks any meanwhile.
    loop {
        let marked = states.marked_from(0, MARKED);
        if marked.is_empty() {
            return Ok(());
        }
        marked.iter().for_each(|block| states.unmark(*block));
    }
}

/// Those that follow one another at once.
fn write_marked(
    image: &Image,
    layout: &Layout,
    states: &States<Words>,
    marked: &[u64],
) -> io::Result<()> {
    let mut rest = marked;
    while let Some(first) = rest.first() {
        let (run, after) = rest.split_at(run_of(rest));
        let mut buffer = Buffer::zeroed(run.len() * BLOCK as usize);
        let blocks = buffer.bytes_mut().chunks_mut(BLOCK as usize);
        for (to, block) in blocks.zip(run) {
            to.copy_from_slice(&table::encode(*block, &states.block(*block)));
        }
        file_of(image.as_fd())?.write_all_at(buffer.bytes(), layout.block_at(*first))?;
        rest = after;
    }
    Ok(())
}

/// The same of what was so when it was looked at, whoever writes meanwhile: what was looked at tells of nothing that was not written by then.
pub(super) fn settle_said(
    file: &File,
    layout: &Layout,
    said: &[(u64, godwit_delta::states::Words)],
) -> io::Result<()> {
    sync(file)?;
    let mut buffer = Buffer::zeroed(BLOCK as usize);
    for (block, words) in said {
        let bytes = table::encode(*block, words);
        buffer.bytes_mut().copy_from_slice(&bytes);
        file.write_all_at(buffer.bytes(), layout.block_at(*block))?;
    }
    match said.is_empty() {
        true => Ok(()),
        false => sync(file),
    }
}

/// How many of these follow one another from the first on, as far as they are written at once.
fn run_of(blocks: &[u64]) -> usize {
    let most = (AT_ONCE / BLOCK) as usize;
    let first = blocks.first().copied().unwrap_or_default();
    let all = blocks.iter().take(most).zip(first..);
    all.take_while(|(block, next)| **block == *next).count()
}

pub(super) fn sync(file: impl AsFd) -> io::Result<()> {
    let synced = rustix::io::retry_on_intr(|| rustix::fs::fdatasync(file.as_fd()));
    synced.map_err(io::Error::from)
}
