//! What cases of disks that move by redo logs order, and what they find afterwards.

use super::{LONG, LOOK_EVERY, Site, is_described, places};
use anyhow::{Context as _, Result, bail, ensure};
use godwit_types::disk_move::{DiskMoves, DiskPlace, FirstLog, Method};
use godwit_types::host_api::{VmAnswer, VmRequest};
use std::path::Path;
use std::time::Instant;

pub fn begin(site: &Site, to: &Path, first_log: FirstLog) -> Result<DiskMoves> {
    let places = places(to, None)?.into_iter().map(|place| DiskPlace {
        method: Method::Snapshot,
        first_log,
        ..place
    });
    let places = places.collect();
    match site.pair.a.ask(&VmRequest::MoveDisks { places })? {
        VmAnswer::DiskMoves(moves) => Ok(moves),
        other => bail!("{other:?}"),
    }
}

pub fn names(directory: &Path) -> Result<Vec<String>> {
    let found = std::fs::read_dir(directory)?;
    let names = found.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

/// Whether a file is a redo log, or says that there are some.
fn is_of_logs(name: &str) -> bool {
    name.contains(".d") && name.contains(".vmdk") || name.ends_with(".images")
}

/// The disk is there, in one image without logs, and nothing is at the other place.
pub fn is_at(site: &mut Site, path: &Path, other: &Path) -> Result<()> {
    path.clone_into(&mut site.path);
    is_described(&site.pair.a, path)?;
    let [own, other] = [path, other].map(|path| path.parent().context("a directory"));
    let (own, other) = (own?, other?);
    let deadline = Instant::now() + LONG;
    loop {
        let (here, there) = (names(own)?, names(other)?);
        if !here.iter().any(|name| is_of_logs(name)) && there.is_empty() {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{here:?} is left where the disk is, and {there:?} where it is not"
        );
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The guest goes on, and has lost nothing.
pub fn is_well(site: &Site) -> Result<()> {
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}
