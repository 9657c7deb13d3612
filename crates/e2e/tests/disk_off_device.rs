//! A disk that leaves a block device of its host for a file, there or on another host, while its guest writes to it.

mod device;
mod disk_site;

use anyhow::{Context as _, Result, ensure};
use device::Node;
use disk_site::{
    BYTES, LONG, LOOK_EVERY, Site, begin_move, dies_at, does_at, has_died, is_described,
    move_ended, own,
};
use godwit_blockio::{Access, Image};
use godwit_e2e::pair::{Options, Pair};
use godwit_types::disk_move::DiskMoveState;
use godwit_types::vm::Accelerator;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A block device with a name that is not below `/dev`.
struct Device {
    node: Node,
    // Dropped after the device is gone.
    _directory: tempfile::TempDir,
}

impl Device {
    /// Nothing where none can be made.
    fn new() -> Result<Option<Self>> {
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let at = |name| directory.path().join(name);
        let node = Node::over(&at("file"), BYTES, at("device"))?;
        Ok(node.map(|node| Self {
            node,
            _directory: directory,
        }))
    }

    fn node(&self) -> PathBuf {
        self.node.path().to_owned()
    }

    /// As volumes are named: by a link to their device.
    fn is_root_in(&self, images: &Path) -> Result<()> {
        Ok(symlink(self.node(), images.join("root.raw"))?)
    }

    /// A guest on host `a`, whose disk it is.
    fn site(&self) -> Result<Site> {
        let pair = |accelerator: Accelerator, dir: &Path| {
            let images = dir.join("images");
            std::fs::create_dir(&images)?;
            std::fs::set_permissions(&images, Permissions::from_mode(0o777))?;
            self.is_root_in(&images)?;
            Pair::new(accelerator)
        };
        Site::booted(pair, false)
    }

    /// The same on hosts which share nothing.
    fn site_apart(&self) -> Result<Site> {
        let pair = |accelerator: Accelerator, dir: &Path| {
            let pair = Pair::apart(accelerator, dir)?;
            self.is_root_in(&own(&pair.a, &dir.join("images")))?;
            Ok(pair)
        };
        Site::booted(pair, false)
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let bytes = std::fs::read(self.node())?;
        ensure!(bytes.len() as u64 == BYTES, "{} bytes", bytes.len());
        Ok(bytes)
    }

    /// Whether somebody else may have it for a disk.
    fn is_free(&self) -> Result<()> {
        let mut image = Image::open(&self.node(), Access::ReadWrite, 512)?;
        Ok(image.lock("other", LONG)?)
    }
}

#[test]
fn a_disk_leaves_a_device_of_its_host_which_stays_as_it_was_at_the_change() -> Result<()> {
    let Some(device) = Device::new()? else {
        return Ok(());
    };
    let mut site = device.site()?;
    let (former, new) = (site.path.clone(), site.path.with_file_name("new.raw"));
    does_at(&site.pair.a, "disk-move.switched", "hold")?;
    let begun = begin_move(&site, &new, None)?;
    ensure!(begun.are_under_way(), "{begun:?}");
    site.pair.a.wait_fault(LONG)?;
    // The guest writes to the new image alone by now.
    let at_the_change = device.bytes()?;
    site.goes_on(&site.pair.a, 20)?;
    site.pair.a.release()?;
    let moved = move_ended(&site)?;
    ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
    ensure!(
        moved.total_bytes == BYTES,
        "a device has no holes: {moved:?}"
    );
    is_described(&site.pair.a, &new)?;
    site.path = new;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)?;
    // A successor has nothing to do with it either.
    let starts = site.pair.a.starts();
    site.pair.a.signal_kill()?;
    disk_site::has_successor(&site.pair.a, starts)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)?;
    ensure!(device.bytes()? == at_the_change, "the device was written");
    ensure!(former.is_symlink(), "its name is gone");
    device.is_free()
}

#[test]
fn a_process_that_dies_while_a_disk_leaves_a_device_leaves_the_right_disk() -> Result<()> {
    for (point, is_moved) in [
        ("disk-move.copying", false),
        ("disk-move.equal", false),
        ("disk-move.written", true),
        ("disk-move.switched", true),
        ("disk-move.followed", true),
    ] {
        let Some(device) = Device::new()? else {
            return Ok(());
        };
        let mut site = device.site()?;
        let new = site.path.with_file_name("new.raw");
        dies_at(&site.pair.a, point)?;
        begin_move(&site, &new, None)?;
        has_died(&site.pair.a).with_context(|| point.to_owned())?;
        if is_moved {
            site.path.clone_from(&new);
        }
        is_described(&site.pair.a, &site.path).with_context(|| point.to_owned())?;
        site.goes_on(&site.pair.a, 5)?;
        let before = device.bytes()?;
        site.goes_on(&site.pair.a, 20)
            .with_context(|| point.to_owned())?;
        site.is_whole(&site.pair.a)
            .with_context(|| point.to_owned())?;
        ensure!((device.bytes()? == before) == is_moved, "{point}");
        let deadline = Instant::now() + LONG;
        while !is_moved && site.images(&site.pair.a)? != ["root.raw"] {
            ensure!(Instant::now() < deadline, "{point}: something is left");
            std::thread::sleep(LOOK_EVERY);
        }
        println!("  killed at {point}");
    }
    Ok(())
}

#[test]
fn a_vm_leaves_a_device_of_its_host_for_a_file_on_another_host() -> Result<()> {
    let Some(device) = Device::new()? else {
        return Ok(());
    };
    let site = device.site_apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let report = site.pair.migrate(a, b, &Options::default())?;
    ensure!(report.disk_bytes == BYTES, "{}", report.disk_bytes);
    let left = device.bytes()?;
    site.goes_on(b, 20)?;
    site.is_whole(b)?;
    let there = std::fs::symlink_metadata(own(b, &site.path))?;
    ensure!(there.is_file() && there.len() == BYTES, "{there:?}");
    // Nothing is noted of it any more, and its name and its bytes stay.
    let noted = a.state_dir().join("disks.json");
    let until = Instant::now() + Duration::from_secs(30);
    while noted.exists() {
        ensure!(
            Instant::now() < until,
            "{}",
            std::fs::read_to_string(noted)?
        );
        std::thread::sleep(LOOK_EVERY);
    }
    ensure!(own(a, &site.path).is_symlink() && device.bytes()? == left);
    device.is_free()?;
    let refused = site.pair.begin(b, a, &Options::default());
    let refused = refused.err().context("it came back over the device")?;
    ensure!(format!("{refused:#}").contains("already"), "{refused:#}");
    site.goes_on(b, 5)
}
