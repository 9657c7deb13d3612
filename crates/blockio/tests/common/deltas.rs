//! Deltas as whoever has described a disk opens them, for tests: by the descriptor, and by what the extent beside it says that it is.
#![allow(dead_code)]

use godwit_blockio::Error;
use godwit_blockio::delta::{Delta, Opening, Outliving, read_descriptor};
use godwit_delta::{Id, header};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The extent, and its number if it says one.
fn extent(descriptor: &Path, writes: bool) -> (File, PathBuf, Id) {
    let said = read_descriptor(descriptor).unwrap();
    let path = descriptor.with_file_name(said.extent);
    let mut head = Vec::new();
    let reads = File::open(&path).unwrap();
    reads.take(8192).read_to_end(&mut head).unwrap();
    let id = header::decode(&head).map_or(Id::default(), |(_, label)| label.id);
    let file = File::options().read(true).write(writes).open(&path);
    (file.unwrap(), path, id)
}

/// As a parent, which was frozen or closed.
pub fn open_parent(descriptor: &Path, opening: Opening<'_>) -> Result<Delta, Error> {
    let (file, path, id) = extent(descriptor, false);
    let opened = Delta::parent_of((file, &path), id, opening);
    opened.map(|delta| delta.expect("it was not closed"))
}

/// As the top of a disk.
pub fn open_top(
    descriptor: &Path,
    opening: Opening<'_>,
    outliving: Outliving<'_>,
) -> Result<Delta, Error> {
    let (file, path, id) = extent(descriptor, true);
    Delta::top_of((file, &path), id, opening, outliving)
}

/// As whoever merges has it, who takes no lock.
pub fn open_unlocked(descriptor: &Path) -> Result<Delta, Error> {
    let (file, path, id) = extent(descriptor, true);
    Delta::unlocked((file, &path), id, 512)
}
