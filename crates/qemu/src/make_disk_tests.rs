//! Disks made from images, and what is refused; nothing half-made is ever left.

use super::*;
use crate::whose::tests::say_whose;
use godwit_blockio::label::{self, Holds, Label};
use godwit_blockio::{Access, holder, lock_file};
use godwit_testkit::file_system::{Device, Mount};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::time::Duration;

#[path = "make_disk/chain_tests.rs"]
mod chains;
#[path = "make_disk/linked_tests.rs"]
mod links;

fn own_user() -> User {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    User {
        uid: uid.as_raw(),
        gid: gid.as_raw(),
    }
}

struct Here {
    dir: tempfile::TempDir,
    vm: VmName,
}

impl Here {
    fn new() -> Self {
        // Not the default place, which may be a tmpfs.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        Self {
            dir,
            vm: VmName::new("web").unwrap(),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn disk(&self, from: Option<&str>, size_gib: Option<u64>) -> DiskSpec {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        DiskSpec {
            from: from.map(|from| text(self.at(from))),
            size_gib,
            ..DiskSpec::new("root", text(self.at("root.raw")))
        }
    }

    fn make(&self, disk: &DiskSpec) -> Result<(), String> {
        self.make_by(disk, &Reserved::default())
    }

    fn make_by(&self, disk: &DiskSpec, reserved: &Reserved) -> Result<(), String> {
        let maker = Maker {
            vm: &self.vm,
            user: own_user(),
            reserved,
            stores: &[],
        };
        maker.make(disk, &Progress::default())
    }

    /// What a disk is made from, opened as its maker does.
    fn source(&self, path: &std::path::Path) -> Source {
        let maker = Maker {
            vm: &self.vm,
            user: own_user(),
            reserved: &Reserved::default(),
            stores: &[],
        };
        Source::open((path.to_str().unwrap(), None), &maker).unwrap()
    }

    /// What is in the directory beside the image that it was made from.
    fn names(&self) -> Vec<String> {
        let all = std::fs::read_dir(self.dir.path()).unwrap();
        let names = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with("base")).collect();
        names.sort();
        names
    }

    fn refused(&self, disk: &DiskSpec, words: &[&str]) {
        let before = self.names();
        let refusal = self.make(disk).unwrap_err();
        for word in words {
            assert!(refusal.contains(word), "{word}: {refusal}");
        }
        assert_eq!(self.names(), before, "{refusal}");
    }
}

#[test]
fn a_copy_is_sparse_grown_and_for_the_group_and_is_made_once() {
    let here = Here::new();
    let base = File::create(here.at("base")).unwrap();
    base.set_len(64 << 20).unwrap();
    base.write_all_at(b"first", 0).unwrap();
    base.write_all_at(b"last", (64 << 20) - 4).unwrap();
    base.write_all_at(&[0; 1 << 20], 8 << 20).unwrap();
    let disk = here.disk(Some("base"), Some(1));
    here.make(&disk).unwrap();
    assert_eq!(here.names(), ["root.raw"]);
    let made = File::options()
        .read(true)
        .write(true)
        .open(here.at("root.raw"))
        .unwrap();
    let found = made.metadata().unwrap();
    assert_eq!(
        (found.len(), found.permissions().mode() & 0o777),
        (1 << 30, 0o660)
    );
    assert!(found.blocks() * 512 < 8 << 20, "{}", found.blocks());
    let mut bytes = [0; 5];
    made.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"first");
    made.read_exact_at(&mut bytes, (64 << 20) - 4).unwrap();
    assert_eq!(&bytes, b"last\0");
    // Who made it died before it was told: it is known, and not made again.
    made.write_all_at(b"known", 0).unwrap();
    here.make(&disk).unwrap();
    made.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"known");
}

#[test]
fn an_image_that_may_be_written_is_not_copied_and_one_that_is_copied_is_not_written() {
    let here = Here::new();
    std::fs::write(here.at("base"), [7; 1024]).unwrap();
    let disk = here.disk(Some("base"), None);
    let path = here.at("base");
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    // A program that another test is just starting has its descriptors for a moment.
    let patient = Duration::from_secs(60);
    let lock =
        |file: &File, access, patience| lock_file(file, &path, access, "a/db/root", patience);
    let guest = open();
    lock(&guest, Access::ReadWrite, patient).unwrap();
    here.refused(&disk, &["the image", "is in use", "another VM has it open"]);
    say_whose(&guest);
    here.refused(&disk, &["is in use", "disk 'data' of VM 'db'"]);
    drop(guest);
    // Others read it meanwhile, and no guest gets it for writing.
    let reader = open();
    lock(&reader, Access::ReadOnly, patient).unwrap();
    let source = here.source(&path);
    source.lock(&here.vm, "data").unwrap();
    drop(reader);
    let refused = lock(&open(), Access::ReadWrite, Duration::ZERO);
    assert!(
        matches!(refused, Err(godwit_blockio::Error::InUse { .. })),
        "{refused:?}"
    );
    drop(source);
    here.make(&disk).unwrap();
}

#[test]
fn the_disk_of_a_vm_that_was_deleted_is_not_that_of_one_which_is_made_anew() {
    let here = Here::new();
    for name in ["base", "newer"] {
        std::fs::write(here.at(name), [7; 1024]).unwrap();
    }
    here.make(&here.disk(Some("base"), None)).unwrap();
    let words = ["exists already", "was not made for this disk"];
    // Of something else, also before anybody used it.
    here.refused(&here.disk(Some("newer"), None), &words);
    here.refused(&here.disk(Some("base"), Some(1)), &words);
    let used = File::options()
        .write(true)
        .open(here.at("root.raw"))
        .unwrap();
    super::forget_mark(&used);
    super::forget_mark(&used);
    here.refused(&here.disk(Some("base"), None), &words);
}

#[test]
fn a_file_that_somebody_else_planted_is_not_the_disk_though_it_bears_the_mark() {
    let here = Here::new();
    std::fs::write(here.at("base"), [7; 1024]).unwrap();
    let disk = here.disk(Some("base"), None);
    here.make(&disk).unwrap();
    let (path, words) = (here.at("root.raw"), ["was not made for this disk"]);
    let mode =
        |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o662);
    here.refused(&disk, &words);
    mode(0o660);
    here.make(&disk).unwrap();
    if !rustix::process::geteuid().is_root() {
        return println!("skipped in part: giving a file to another user needs root");
    }
    std::os::unix::fs::chown(&path, Some(61_234), None).unwrap();
    here.refused(&disk, &words);
}

#[test]
fn what_a_killed_maker_left_is_begun_anew_and_one_that_lives_is_left_alone() {
    let here = Here::new();
    std::fs::write(here.at("base"), [7; 1000]).unwrap();
    let left = here.at(".root.raw.godwit-new");
    std::fs::write(&left, [9; 5000]).unwrap();
    let lives = File::open(&left).unwrap();
    flock(&lives, FlockOperation::NonBlockingLockExclusive).unwrap();
    here.refused(&here.disk(Some("base"), None), &["by somebody else"]);
    drop(lives);
    here.make(&here.disk(Some("base"), None)).unwrap();
    assert_eq!(here.names(), ["root.raw"]);
    let made = std::fs::read(here.at("root.raw")).unwrap();
    assert!(made.len() == 1024 && made[..1000] == [7; 1000] && made[1000..] == [0; 24]);
}

#[test]
fn an_empty_disk_takes_no_room() {
    let here = Here::new();
    here.make(&here.disk(None, Some(20))).unwrap();
    let found = std::fs::metadata(here.at("root.raw")).unwrap();
    assert_eq!((found.len(), found.blocks()), (20 << 30, 0));
}

#[test]
fn what_cannot_be_made_is_refused_and_changes_nothing() {
    let here = Here::new();
    here.refused(
        &here.disk(Some("missing"), None),
        &["missing does not exist"],
    );
    std::fs::create_dir(here.at("base.d")).unwrap();
    here.refused(&here.disk(Some("base.d"), None), &["neither a file"]);
    std::fs::write(here.at("base.empty"), "").unwrap();
    here.refused(&here.disk(Some("base.empty"), None), &["is empty"]);
    File::create(here.at("base.long"))
        .unwrap()
        .set_len(3 << 30)
        .unwrap();
    here.refused(
        &here.disk(Some("base.long"), Some(2)),
        &["has 3 GiB", "size_gib = 2", "at least 3"],
    );
    std::fs::write(here.at("base.vmdk"), "KDMV").unwrap();
    here.refused(&here.disk(Some("base.vmdk"), None), &["VMDK"]);
    std::fs::write(here.at("base"), [1; 512]).unwrap();
    let elsewhere = DiskSpec {
        path: here.at("none/root.raw").to_str().unwrap().to_owned(),
        ..here.disk(Some("base"), None)
    };
    here.refused(&elsewhere, &["directory", "none does not exist"]);
    let reserved = Reserved::new(vec![here.dir.path().to_owned()], Default::default());
    let refusal = here
        .make_by(&here.disk(Some("base"), None), &reserved)
        .unwrap_err();
    assert!(refusal.contains("put the file elsewhere"), "{refusal}");
    for name in ["file", "link"] {
        let path = here.at("root.raw");
        match name {
            "file" => std::fs::write(&path, "somebody's").unwrap(),
            _ => symlink("/etc/passwd", &path).unwrap(),
        }
        here.refused(&here.disk(Some("base"), None), &["exists already"]);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn within_a_file_system_that_can_an_image_shares_its_blocks_with_what_it_was_made_from() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    for kind in ["xfs", "btrfs"] {
        let below = tempfile::tempdir_in("/var/tmp").unwrap();
        let here = Here::new();
        let device = Device::over(&below.path().join("device"), 512);
        let mount = device.and_then(|device| Mount::of(kind, device, here.dir.path()));
        let Some(mount) = mount else {
            println!("skipped in part: {kind} cannot be made here");
            continue;
        };
        let free = || {
            rustix::fs::sync();
            let found = rustix::fs::statvfs(here.dir.path()).unwrap();
            found.f_bavail * found.f_frsize
        };
        // More than half of what there is: a copy has no room.
        let length = (free() / 2 + (32 << 20)) & !4095;
        let content: Vec<u8> = (0..length).map(|at| (at / 4093 % 251) as u8 + 1).collect();
        std::fs::write(here.at("base"), &content).unwrap();
        let before = free();
        assert!(before < length, "{kind}");
        here.make(&here.disk(Some("base"), Some(1))).unwrap();
        assert_eq!(here.names(), ["root.raw"], "{kind}");
        assert!(before - free() < 16 << 20, "{kind}: it takes room");
        let made = File::options()
            .read(true)
            .write(true)
            .open(here.at("root.raw"));
        let made = made.unwrap();
        assert_eq!(made.metadata().unwrap().len(), 1 << 30);
        let mut found = vec![0; content.len()];
        made.read_exact_at(&mut found, 0).unwrap();
        assert!(found == content, "{kind}: it is another content");
        made.write_all_at(&[0; 4096], 0).unwrap();
        drop(made);
        assert!(
            std::fs::read(here.at("base")).unwrap() == content,
            "{kind}: the image that it was made from has changed"
        );
        drop(mount);
    }
}

#[test]
fn no_image_is_made_on_a_device_with_blocks_that_a_disk_has_not() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    let below = tempfile::tempdir_in("/var/tmp").unwrap();
    let here = Here::new();
    let device = Device::over(&below.path().join("device"), 4096);
    let Some(mount) = device.and_then(|device| Mount::of("ext4", device, here.dir.path())) else {
        println!("skipped: a device with blocks of 4096 bytes cannot be made here");
        return;
    };
    std::fs::write(here.at("base"), [1; 4096]).unwrap();
    let disk = here.disk(Some("base"), None);
    here.refused(&disk, &["larger blocks than 512 bytes"]);
    drop(mount);
}

#[test]
fn an_image_that_is_written_or_cut_while_it_is_copied_is_no_disk() {
    let here = Here::new();
    let base = here.at("base");
    std::fs::write(&base, [1; 8192]).unwrap();
    let open = || here.source(&base);
    let source = open();
    source.must_be_unchanged().unwrap();
    let file = File::options().write(true).open(&base).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
    file.set_modified(later).unwrap();
    let refused = source.must_be_unchanged().unwrap_err();
    assert!(
        refused.contains("was written while it was copied"),
        "{refused}"
    );
    let source = open();
    file.set_len(4096).unwrap();
    source.must_be_unchanged().unwrap_err();
}

#[test]
fn no_room_is_said_before_anything_is_written() {
    let here = Here::new();
    let place = Place::open(&here.at("root.raw"), &Reserved::default(), own_user()).unwrap();
    let refusal = place
        .must_have_room(&here.at("root.raw"), u64::MAX)
        .unwrap_err();
    assert!(
        refusal.contains("no room") && refusal.contains("MiB are needed"),
        "{refusal}"
    );
    place.must_have_room(&here.at("root.raw"), 0).unwrap();
}

#[test]
fn only_what_the_common_user_may_is_read_and_made() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: becoming another user needs root");
        return;
    }
    let here = Here::new();
    std::fs::set_permissions(here.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(here.at("base"), [1; 512]).unwrap();
    let mode = |mode| {
        std::fs::set_permissions(here.at("base"), std::fs::Permissions::from_mode(mode)).unwrap()
    };
    mode(0o600);
    let (uid, gid) = (65534, 65534);
    let nobody = || {
        let maker = Maker {
            vm: &here.vm,
            user: User { uid, gid },
            reserved: &Reserved::default(),
            stores: &[],
        };
        maker.make(&here.disk(Some("base"), None), &Progress::default())
    };
    let refusal = nobody().unwrap_err();
    assert!(refusal.contains("may not be read"), "{refusal}");
    mode(0o644);
    let refusal = nobody().unwrap_err();
    assert!(
        refusal.contains("may not make files") && refusal.contains("chown 0:65534"),
        "{refusal}"
    );
    std::os::unix::fs::chown(here.dir.path(), None, Some(gid)).unwrap();
    std::fs::set_permissions(here.dir.path(), std::fs::Permissions::from_mode(0o775)).unwrap();
    nobody().unwrap();
    let found = std::fs::metadata(here.at("root.raw")).unwrap();
    assert_eq!((found.uid(), found.gid()), (uid, gid));
    // By a program of that user, which is confined.
    if !qemu_img(&here, &["convert", "-O", "qcow2", "base", "base.qcow2"]) {
        return;
    }
    for name in ["base", "root.raw"] {
        std::fs::remove_file(here.at(name)).unwrap();
    }
    std::fs::rename(here.at("base.qcow2"), here.at("base")).unwrap();
    mode(0o644);
    nobody().unwrap();
    assert_eq!(std::fs::read(here.at("root.raw")).unwrap(), [1; 512]);
}

#[test]
fn no_image_is_made_where_a_device_is_missing() {
    let here = Here::new();
    let path = format!("/dev/godwit-test-made-{}", std::process::id());
    let disk = DiskSpec {
        path: path.clone(),
        ..here.disk(None, Some(1))
    };
    let maker = Maker {
        vm: &here.vm,
        user: User { uid: 0, gid: 0 },
        reserved: &Reserved::default(),
        stores: &[],
    };
    let refusal = maker.make(&disk, &Progress::default());
    let is_made = std::fs::remove_file(&path).is_ok();
    let refusal = refusal.unwrap_err();
    assert!(!is_made, "{refusal}");
    let words = format!("there is no block device {path}");
    assert!(refusal.contains(&words), "{refusal}");
    assert!(!refusal.contains("chown"), "{refusal}");
}

/// Has qemu-img do something with an image of this name; false where there is no qemu-img.
fn qemu_img(here: &Here, words: &[&str]) -> bool {
    let mut command = std::process::Command::new("/usr/bin/qemu-img");
    match command.args(words).current_dir(here.dir.path()).output() {
        Ok(ran) => {
            assert!(ran.status.success(), "{ran:?}");
            true
        }
        Err(_) => {
            println!("skipped: there is no qemu-img (package qemu-utils)");
            false
        }
    }
}

#[test]
fn a_disk_whose_guest_wrote_that_it_is_a_qcow2_image_is_not_taken_for_one() {
    let here = Here::new();
    std::fs::write(here.at("base.raw"), [7; 1 << 20]).unwrap();
    if !qemu_img(&here, &["convert", "-O", "qcow2", "base.raw", "base.qcow2"]) {
        return;
    }
    let file = File::options().write(true).open(here.at("base.qcow2"));
    let file = file.unwrap();
    say_whose(&file);
    let from_it = here.disk(Some("base.qcow2"), Some(1));
    let words = [
        "disk 'data' of VM 'db', which is raw",
        "godwit image release",
    ];
    here.refused(&from_it, &words);
    holder::forget(file.as_fd()).unwrap();
    here.make(&from_it).unwrap();
}

#[test]
fn a_qcow2_image_is_written_out_and_one_that_names_other_files_is_not() {
    let here = Here::new();
    let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 700) as u8).collect();
    std::fs::write(here.at("base.raw"), &content).unwrap();
    if !qemu_img(
        &here,
        &["convert", "-c", "-O", "qcow2", "base.raw", "base.qcow2"],
    ) {
        return;
    }
    here.make(&here.disk(Some("base.qcow2"), Some(1))).unwrap();
    assert_eq!(here.names(), ["root.raw"]);
    let made = File::open(here.at("root.raw")).unwrap();
    let mut found = vec![0; content.len()];
    made.read_exact_at(&mut found, 0).unwrap();
    assert!(found == content && made.metadata().unwrap().len() == 1 << 30);
    std::fs::remove_file(here.at("root.raw")).unwrap();
    qemu_img(
        &here,
        &[
            "create",
            "-f",
            "qcow2",
            "-o",
            "data_file=base.data",
            "base.beside",
            "1M",
        ],
    );
    here.refused(&here.disk(Some("base.beside"), None), &["another file"]);
    // A download that broke off: what is missing would read as zeroes.
    qemu_img(&here, &["convert", "-O", "qcow2", "base.raw", "base.plain"]);
    let mut half = std::fs::read(here.at("base.plain")).unwrap();
    half.truncate(half.len() / 2);
    std::fs::write(here.at("base.half"), half).unwrap();
    here.refused(
        &here.disk(Some("base.half"), None),
        &["finds the image damaged"],
    );
    // Its head is good and the rest is not.
    let mut torn = std::fs::read(here.at("base.qcow2")).unwrap();
    torn[104..].fill(0xff);
    std::fs::write(here.at("base.torn"), torn).unwrap();
    here.refused(
        &here.disk(Some("base.torn"), None),
        &["qemu-img does not convert"],
    );
}

#[test]
fn a_device_that_holds_no_whole_disk_is_nothing_to_make_one_from() {
    let below = tempfile::tempdir_in("/var/tmp").unwrap();
    let Some(device) = Device::over(&below.path().join("device"), 512) else {
        println!("skipped: no device can be made of a file");
        return;
    };
    let here = Here::new();
    let path = device.path().to_str().unwrap().to_owned();
    let say = |holds| {
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let before = label::read(file.as_fd()).unwrap();
        if holds == Holds::Nothing {
            return drop(label::let_go(file.as_fd(), before.as_ref()).unwrap());
        }
        let label = Label {
            holds,
            bytes: 1 << 20,
            vm: "db".to_owned(),
            disk: "data".to_owned(),
            text: None,
        };
        label::write(file.as_fd(), before.as_ref(), label).unwrap();
    };
    let disk = DiskSpec {
        from: Some(path.clone()),
        ..here.disk(None, None)
    };
    say(Holds::Part("lun.moving-1".to_owned()));
    here.refused(&disk, &["a part of disk 'data' of VM 'db'"]);
    say(Holds::Nothing);
    here.refused(&disk, &["holds no disk"]);
    say(Holds::Disk);
    here.make(&disk).unwrap();
    assert_eq!(here.at("root.raw").metadata().unwrap().len(), 1 << 20);
}

/// A maker was killed, and two others come at once: what one of them has begun is not named, and not removed, by the other.
#[test]
fn a_file_that_another_maker_has_put_in_its_place_is_neither_named_nor_removed() {
    let here = Here::new();
    let (path, fresh) = (here.at("root.raw"), here.at(".root.raw.godwit-new"));
    let place = Place::open(&path, &Reserved::default(), own_user()).unwrap();
    let first = place.begin(&path).unwrap();
    let refused = place.begin(&path).unwrap_err();
    assert!(refused.contains("being made by somebody else"), "{refused}");
    std::fs::remove_file(&fresh).unwrap();
    let second = place.begin(&path).unwrap();
    let refused = place.name(&path, &first).unwrap_err();
    assert!(refused.contains("begun by somebody else"), "{refused}");
    place.discard(&first);
    place.name(&path, &second).unwrap();
    assert_eq!(here.names(), ["root.raw"]);
}
