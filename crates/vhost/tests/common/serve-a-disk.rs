//! Serves a raw image as a disk until its standard input ends, or it is killed: what `tests/killed.rs` kills.
#![forbid(unsafe_code)]

use godwit_blockio::{Access, Image, Waits};
use godwit_guestmem::RamFile;
use godwit_vhost::block::Geometry;
use godwit_vhost::{Disk, Settings};
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longer than the last request of a process that was killed takes.
const LOCK_WAIT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || {
        arguments
            .next()
            .ok_or("usage: serve-a-disk IMAGE SOCKET RAM RAM_BYTES")
    };
    let (image, socket) = (PathBuf::from(next()?), PathBuf::from(next()?));
    let ram = RamFile::open(&PathBuf::from(next()?), next()?.parse()?)?;
    let mut image = Image::open(&image, Access::ReadWrite, 512)?;
    image.lock("root", LOCK_WAIT)?;
    let geometry = Geometry {
        bytes: image.bytes(),
        block: 512,
        queues: 2,
        read_only: false,
        erases: true,
        serial: String::new(),
    };
    let _disk = Disk::start(Settings {
        name: "root".to_owned(),
        socket,
        owner: None,
        image,
        geometry,
        filters: Vec::new(),
        ram: Arc::new(ram),
        has_image: true,
        waits: Waits {
            for_room: true,
            for_storage: false,
        },
        handed: None,
        deltas: Vec::new(),
    })?;
    // The test holds the other end: one that was killed leaves nothing behind.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
