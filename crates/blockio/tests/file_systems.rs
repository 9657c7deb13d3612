//! Images on the file systems and block sizes that hosts have: what direct IO takes there, or that it is refused.
//!
//! Needs root, loop devices and the programs that make file systems.

mod common;

use godwit_blockio::grow::{NotGrown, grow};
use godwit_blockio::{
    Access, Arriving, Buffer, Data, Engine, Image, Outcome, Request, Stack, Work,
};
use godwit_testkit::file_system::{DEVICE_BYTES, Device, Mount};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

const IMAGE_BYTES: u64 = 4 << 20;

/// A loop device whose file goes with it.
fn device(block: u32) -> Option<(Device, TempDir)> {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = Device::over(&directory.path().join("device"), block)?;
    Some((device, directory))
}

/// A file system on such a device, at a directory of its own.
struct Mounted {
    _mount: Mount,
    place: TempDir,
    _device: TempDir,
}

fn mounted(kind: &str, (device, directory): (Device, TempDir)) -> Option<Mounted> {
    let place = tempfile::tempdir().unwrap();
    Some(Mounted {
        _mount: Mount::of(kind, device, place.path())?,
        place,
        _device: directory,
    })
}

impl Mounted {
    fn image(&self) -> PathBuf {
        let path = self.place.path().join("disk.raw");
        File::create(&path).unwrap().set_len(IMAGE_BYTES).unwrap();
        path
    }
}

/// Writes, reads back, flushes and erases blocks of this size on an image with an odd offset between them.
fn works(path: &Path, block: u32) -> Result<(), String> {
    let image = Image::open(path, Access::ReadWrite, block).map_err(|error| error.to_string())?;
    let engine = Engine::new(image).map_err(|error| error.to_string())?;
    let mut stack = Stack::new(Vec::new(), engine);
    let block = u64::from(block);
    let range = 3 * block..10 * block;
    let mut buffer = Buffer::zeroed(7 * block as usize);
    buffer.bytes_mut().fill(0x5a);
    let read = || Data::Own(Buffer::zeroed(7 * block as usize));
    let all = [
        (Work::Write(range.clone()), Data::Own(buffer)),
        (Work::Flush, Data::None),
        (Work::Read(range.clone()), read()),
        (Work::Discard(range.clone()), Data::None),
        (Work::Read(range), read()),
    ];
    let mut seen = Vec::new();
    for (work, data) in all {
        let is_discard = matches!(work, Work::Discard(_));
        stack.submit(
            Request::new(work.clone(), data, 0, Instant::now()),
            Instant::now(),
        );
        while stack.under_way() > 0 {
            stack
                .turn(None, &mut Vec::new())
                .map_err(|error| error.to_string())?;
        }
        let (request, outcome) = stack.finished().ok_or("no outcome")?;
        let unsupported = is_discard && outcome == Outcome::Unsupported;
        if outcome != Outcome::Done && !unsupported {
            return Err(format!("{work:?}: {outcome:?}"));
        }
        if let (Work::Read(_), Data::Own(bytes)) = (&work, request.data) {
            seen.push(bytes.bytes()[0]);
        }
    }
    assert_eq!(seen[0], 0x5a, "what was written is read");
    Ok(())
}

/// What became of blocks of 512 and of 4096 bytes; nothing where it cannot be tried.
fn tried(kind: Option<&str>, device_block: u32) -> Option<[Result<(), String>; 2]> {
    let device = device(device_block)?;
    let both = |path: &Path| [512, 4096].map(|block| works(path, block));
    match kind {
        Some(kind) => Some(both(&mounted(kind, device)?.image())),
        None => Some(both(device.0.path())),
    }
}

/// A clone of it, which shares its blocks: as many images of VMs begin.
fn cloned(image: &Path) -> bool {
    let clone = image.with_extension("clone");
    let arguments = ["--reflink=always"].map(std::ffi::OsStr::new);
    let made = Command::new("cp")
        .args(arguments)
        .args([image, &clone])
        .status();
    made.is_ok_and(|status| status.success())
}

#[test]
fn an_image_that_shares_its_blocks_with_another_works_as_before() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    for kind in ["xfs", "btrfs"] {
        let mount = device(512).and_then(|device| mounted(kind, device));
        let Some(mount) = mount else {
            println!("skipped in part: {kind} cannot be made here");
            continue;
        };
        let path = mount.image();
        std::fs::write(&path, vec![7; IMAGE_BYTES as usize]).unwrap();
        assert!(cloned(&path), "{kind}");
        assert_eq!(works(&path, 512), Ok(()), "{kind}");
        let clone = std::fs::read(path.with_extension("clone")).unwrap();
        assert!(
            clone.iter().all(|byte| *byte == 7),
            "{kind}: the clone was changed"
        );
        drop(mount);
    }
}

fn free_bytes(place: &Path) -> u64 {
    let found = rustix::fs::statvfs(place).unwrap();
    found.f_bavail * found.f_frsize
}

#[test]
fn a_disk_that_moves_within_a_file_system_shares_what_it_can_and_is_right_beside_writes() {
    const BYTES: u64 = 48 << 20;
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    for (kind, shares) in [("ext4", false), ("xfs", true), ("btrfs", true)] {
        let mount = device(512).and_then(|device| mounted(kind, device));
        let Some(mount) = mount else {
            println!("skipped in part: {kind} cannot be made here");
            continue;
        };
        // What is written in blocks that are smaller than the file system's cannot be shared.
        for (writes, block) in [(0, 4096), (2000, 4096), (2000, 512)] {
            let at = |name| mount.place.path().join(name);
            let (from, to) = (at("from.raw"), at("to.raw"));
            std::fs::write(&from, vec![7; BYTES as usize]).unwrap();
            File::open(&from).unwrap().sync_all().unwrap();
            File::create(&to).unwrap().set_len(BYTES).unwrap();
            let before = free_bytes(mount.place.path());
            let source = File::open(&from).unwrap();
            common::fill_beside_writes((&from, &to), Some(source), (writes, block), block);
            let taken = before.saturating_sub(free_bytes(mount.place.path()));
            println!(
                "  {kind}, {writes} writes of {block}: {} MiB taken",
                taken >> 20
            );
            let same = std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap();
            assert!(same, "{kind}, {writes} writes of {block}: they differ");
            if writes == 0 {
                let copied = taken >= BYTES / 2;
                assert_eq!(copied, !shares, "{kind}: {taken} bytes are taken");
            }
            std::fs::remove_file(from).unwrap();
            std::fs::remove_file(to).unwrap();
        }
        drop(mount);
    }
}

#[test]
fn an_image_that_arrives_leaves_room_to_disks_that_are_in_use() {
    const BYTES: u64 = 600 << 20;
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    let Some(mount) = device(512).and_then(|device| mounted("ext4", device)) else {
        println!("skipped: ext4 cannot be made here");
        return;
    };
    let path = mount.image();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(BYTES)
        .unwrap();
    let image = Image::open(&path, Access::ReadWrite, 512).unwrap();
    let arriving = Arriving::of(&image).unwrap();
    let piece = Buffer::zeroed(1 << 20);
    let mut pieces = (0..BYTES >> 20).map(|at| {
        let range = at << 20..(at + 1) << 20;
        arriving.apply(at + 1, at, &range, Some(piece.bytes()))
    });
    let refused = pieces.find_map(Result::err).unwrap().to_string();
    assert!(
        refused.contains("for disks that are in use: make room there"),
        "{refused}"
    );
    let (free, kept) = (free_bytes(mount.place.path()), DEVICE_BYTES / 100);
    assert!(
        (kept / 2..2 * kept).contains(&free),
        "{free} bytes are left"
    );
    drop((arriving, image));
    drop(mount);
}

#[test]
fn images_on_devices_and_file_systems_work_or_are_refused_with_the_reason() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    for kind in [None, Some("ext4"), Some("xfs"), Some("btrfs")] {
        for device_block in [512, 4096] {
            let name = kind.unwrap_or("the device itself");
            let Some([small, large]) = tried(kind, device_block) else {
                println!(
                    "skipped in part: {name} with blocks of {device_block} cannot be made here"
                );
                continue;
            };
            println!("  {name}, blocks of {device_block}: {small:?}, {large:?}");
            assert_eq!(large, Ok(()), "{name}, {device_block}");
            // btrfs goes through the page cache for what its device does not take.
            if device_block == 512 || kind == Some("btrfs") {
                assert_eq!(small, Ok(()), "{name}");
            } else {
                let why = small.unwrap_err();
                assert!(
                    why.contains("its device has blocks of 4096 bytes, the disk of 512"),
                    "{why}"
                );
            }
        }
    }
}

#[test]
fn a_device_has_the_size_that_it_has_and_a_full_file_system_has_no_room_for_a_longer_image() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    let Some(device) = device(512) else {
        println!("skipped: no loop device can be made here");
        return;
    };
    let open = |path: &Path| {
        let opened = File::options().read(true).write(true).open(path);
        opened.unwrap()
    };
    let whole = open(device.0.path());
    // Less than a whole GiB, which no disk is made.
    assert_eq!(grow(whole.as_fd(), 0, false).unwrap(), DEVICE_BYTES);
    let refused = grow(whole.as_fd(), 1 << 30, false).unwrap_err().to_string();
    assert!(refused.contains("a block device of 512 MiB"), "{refused}");
    drop(whole);
    let Some(mount) = mounted("ext4", device) else {
        println!("skipped in part: ext4 cannot be made here");
        return;
    };
    let path = mount.image();
    let image = open(&path);
    let mut rest = File::create(path.with_extension("rest")).unwrap();
    // What is written is counted for more than it takes until it has its place.
    for piece in [1 << 20, 4096, 4096, 4096] {
        let piece = vec![1; piece];
        while std::io::Write::write(&mut rest, &piece).is_ok_and(|written| written > 0) {}
        rest.sync_all().unwrap();
    }
    drop(rest);
    let refused = grow(image.as_fd(), 1 << 30, false).unwrap_err();
    assert!(matches!(refused, NotGrown::NoRoom), "{refused}");
    assert_eq!(image.metadata().unwrap().len(), IMAGE_BYTES);
    std::fs::remove_file(path.with_extension("rest")).unwrap();
    assert_eq!(grow(image.as_fd(), 1 << 30, false).unwrap(), 1 << 30);
    drop(image);
    drop(mount);
}

/// A file system that is made once, of a directory, takes no direct IO and nothing that is written.
#[test]
fn an_image_that_nobody_can_write_is_read_where_nothing_takes_direct_io() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [from, made, place] = ["from", "made", "place"].map(|name| directory.path().join(name));
    for directory in [&from, &place] {
        std::fs::create_dir(directory).unwrap();
    }
    let content: Vec<u8> = (0..IMAGE_BYTES).map(|at| (at / 4096 % 251) as u8).collect();
    std::fs::write(from.join("disk.raw"), &content).unwrap();
    let runs = |program: &str, words: &[&Path]| {
        let ran = Command::new(program).args(words).output();
        ran.is_ok_and(|ran| ran.status.success())
    };
    if !runs("mksquashfs", &[&from, &made])
        || !runs("mount", &[Path::new("-oloop,ro"), &made, &place])
    {
        println!("skipped: no squashfs can be made and mounted here");
        return;
    }
    let path = place.join("disk.raw");
    assert!(Image::open(&path, Access::ReadWrite, 512).is_err());
    let mut image = Image::open(&path, Access::ReadOnly, 512).unwrap();
    image.lock("reader", std::time::Duration::ZERO).unwrap();
    let mut stack = Stack::new(Vec::new(), Engine::new(image).unwrap());
    let data = Data::Own(Buffer::zeroed(8192));
    let request = common::request(Work::Read(512..8192 + 512), data);
    let done = common::run(&mut stack, vec![request]);
    let Some((Request { data, .. }, Outcome::Done)) = done.into_iter().next() else {
        panic!("it is not read");
    };
    assert!(matches!(data, Data::Own(read) if read.bytes() == &content[512..8192 + 512]));
    drop(stack);
    assert!(runs("umount", &[&place]));
}
