//! Disks that begin as an image which is never copied, and images that are none for that.

use super::*;
use crate::disk::{DiskError, open_image};
use crate::mounted::Mounted;
use crate::parent::{Known, known_by, parent_id, protect};
use godwit_snapshots::Images;
use godwit_testkit::file_system::{DEVICE_BYTES, Device, Mount};
use godwit_types::snapshots::{LAYERED_MARK, PARENT_MARK};
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};

const BYTES: usize = 3 << 20;

struct Linked {
    here: Here,
    stores: Vec<PathBuf>,
}

impl Linked {
    fn new() -> Self {
        let here = Here::new();
        std::fs::write(here.at("base"), vec![7; BYTES]).unwrap();
        was_written(&here.at("base"), 60);
        let stores = vec![here.dir.path().to_owned()];
        Self { here, stores }
    }

    fn disk(&self, name: &str, size_gib: Option<u64>) -> DiskSpec {
        let path = self.here.at(name).to_str().unwrap().to_owned();
        DiskSpec {
            path,
            linked: true,
            ..self.here.disk(Some("base"), size_gib)
        }
    }

    fn make(&self, disk: &DiskSpec) -> Result<(), String> {
        let maker = Maker {
            vm: &self.here.vm,
            user: own_user(),
            reserved: &Reserved::default(),
            stores: &self.stores,
        };
        maker.make(disk, &Progress::default())
    }

    fn refused(&self, disk: &DiskSpec, words: &[&str]) {
        let before = self.here.names();
        let refusal = self.make(disk).unwrap_err();
        for word in words {
            assert!(refusal.contains(word), "{word}: {refusal}");
        }
        assert_eq!(self.here.names(), before, "{refusal}");
    }

    fn described(&self, name: &str) -> Images {
        let at = description_of(&self.here.at(name));
        let content = std::fs::read(&at).unwrap();
        let images: Images = godwit_store::json_of(&at, &content).unwrap();
        images.check().unwrap();
        images
    }

    fn parent(&self) -> Option<String> {
        parent_id(File::open(self.here.at("base")).unwrap()).unwrap()
    }
}

/// So many seconds ago.
fn was_written(path: &Path, seconds: u64) {
    let file = File::options().write(true).open(path).unwrap();
    let then = std::time::SystemTime::now() - Duration::from_secs(seconds);
    file.set_modified(then).unwrap();
}

#[test]
fn an_image_is_not_marked_for_a_disk_that_cannot_be_made_or_while_it_may_be_written() {
    let linked = Linked::new();
    let nowhere = linked.disk("missing/one.raw", None);
    linked.refused(&nowhere, &["does not exist: make it there"]);
    std::fs::write(linked.here.at("two.raw"), "somebody's").unwrap();
    let taken = linked.disk("two.raw", None);
    linked.refused(&taken, &["was not made for this disk"]);
    let disk = linked.disk("one.raw", None);
    was_written(&linked.here.at("base"), 2);
    linked.refused(&disk, &["written less than 10 s ago", "try again"]);
    assert_eq!(linked.parent(), None);
    was_written(&linked.here.at("base"), 60);
    linked.make(&disk).unwrap();
    // From then on nobody writes it.
    was_written(&linked.here.at("base"), 0);
    linked.make(&linked.disk("three.raw", None)).unwrap();
}

#[test]
fn disks_are_linked_to_one_image_which_nobody_writes_from_then_on() {
    let linked = Linked::new();
    let names = ["one.raw", "two.raw"];
    for name in names {
        linked.make(&linked.disk(name, None)).unwrap();
        let found = std::fs::metadata(linked.here.at(name)).unwrap();
        // Attributes may take a block.
        let (bytes, blocks) = (found.len(), found.blocks());
        assert!(bytes == BYTES as u64 && blocks <= 8, "{name}: {blocks}");
        let images = linked.described(name);
        let common = images.common().unwrap();
        assert_eq!(common.path, linked.here.at("base").to_str().unwrap());
        assert_eq!(Some(common.id.to_owned()), linked.parent());
        assert_eq!(images.top, format!("{name}.d1"));
        let own = File::open(linked.here.at(name)).unwrap();
        let mut mark = [0; 32];
        assert_eq!(fgetxattr(&own, LAYERED_MARK, &mut mark[..]), Ok(32));
        assert_eq!(mark, images.mark.as_bytes());
        let extent = linked.here.at(&format!("{name}.d1-sesparse.vmdk"));
        assert!(std::fs::metadata(extent).unwrap().blocks() * 512 < 1 << 20);
        assert!(linked.here.at(&format!("{name}.d1.vmdk")).exists());
    }
    let base = linked.here.at("base");
    assert!(std::fs::read(&base).unwrap() == vec![7; BYTES]);
    let User { uid, gid } = own_user();
    let open = |read_only| open_image(&base, read_only, uid, gid, &Reserved::default());
    open(true).unwrap();
    let refused = open(false).unwrap_err();
    assert!(matches!(refused, DiskError::Parent { .. }), "{refused}");
    assert!(refused.to_string().contains("linked disks begin as"));
    // Made once; a copy is made of it as of any other.
    let before = std::fs::metadata(linked.here.at("one.raw")).unwrap().ino();
    linked.make(&linked.disk("one.raw", None)).unwrap();
    let after = std::fs::metadata(linked.here.at("one.raw")).unwrap().ino();
    assert_eq!(before, after);
    linked
        .here
        .make(&linked.here.disk(Some("base"), None))
        .unwrap();
    assert!(std::fs::read(linked.here.at("root.raw")).unwrap() == vec![7; BYTES]);
}

/// The same, over an image on a file system of its own; nothing where this machine has none for it.
fn on_another_file_system() -> Option<(Linked, Mount, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: mounting needs root");
        return None;
    }
    let mut linked = Linked::new();
    let golden = linked.here.at("golden");
    std::fs::create_dir(&golden).unwrap();
    let mount = Mount::of("ext4", Device::of(DEVICE_BYTES)?, &golden)?;
    let base = golden.join("base");
    std::fs::write(&base, vec![7; BYTES]).unwrap();
    was_written(&base, 60);
    linked.stores = vec![golden];
    Some((linked, mount, base))
}

fn over(base: &Path, disk: DiskSpec) -> DiskSpec {
    DiskSpec {
        from: Some(base.to_str().unwrap().to_owned()),
        ..disk
    }
}

#[test]
fn disks_over_an_image_that_nobody_can_write_know_it_by_what_it_is_and_mark_it_once_they_can() {
    let Some((linked, mount, base)) = on_another_file_system() else {
        return;
    };
    mount.protect(true).unwrap();
    for name in ["one.raw", "two.raw"] {
        linked.make(&over(&base, linked.disk(name, None))).unwrap();
    }
    let file = File::open(&base).unwrap();
    assert_eq!(Mounted::of(&file), Ok(Mounted::ForReading));
    assert_eq!(parent_id(&file), Ok(None));
    let [one, two] = ["one.raw", "two.raw"].map(|name| {
        let images = linked.described(name);
        images.common().unwrap().id.to_owned()
    });
    assert_eq!(one, two);
    let known = |number: &str| known_by(&file, number).unwrap();
    assert_eq!(known(&one), Known::BySight);
    assert_eq!(known(&"5".repeat(32)), Known::Not);
    protect(&file, &one).unwrap();
    assert_eq!(parent_id(&file), Ok(None), "there is nothing to be done");
    mount.protect(false).unwrap();
    // Another disk comes before one of those starts.
    linked
        .make(&over(&base, linked.disk("three.raw", None)))
        .unwrap();
    assert_eq!(parent_id(&file), Ok(Some(one.clone())));
    assert_eq!(known(&one), Known::ByMark);
    // The mark counts wherever it is read.
    drop(file);
    mount.protect(true).unwrap();
    linked
        .make(&over(&base, linked.disk("four.raw", None)))
        .unwrap();
    let images = linked.described("four.raw");
    assert_eq!(images.common().unwrap().id, one);
}

#[test]
fn an_image_that_can_be_written_by_another_mount_has_to_bear_a_mark() {
    let Some((mut linked, mount, base)) = on_another_file_system() else {
        return;
    };
    let bound = linked.here.at("bound");
    std::fs::create_dir(&bound).unwrap();
    let mount_there = |words: &[&str]| {
        let mut command = std::process::Command::new("mount");
        assert!(command.args(words).arg(&bound).status().unwrap().success());
    };
    mount_there(&["--bind", base.parent().unwrap().to_str().unwrap()]);
    mount_there(&["-o", "remount,bind,ro"]);
    linked.stores = vec![bound.clone()];
    let disk = over(&bound.join("base"), linked.disk("one.raw", None));
    linked.refused(&disk, &["by another mount of this host", "setfattr -n"]);
    let number = "5".repeat(32);
    let file = File::open(&base).unwrap();
    let flags = XattrFlags::empty();
    fsetxattr(&file, PARENT_MARK, number.as_bytes(), flags).unwrap();
    linked.make(&disk).unwrap();
    assert_eq!(linked.described("one.raw").common().unwrap().id, number);
    let unmounted = std::process::Command::new("umount").arg(&bound).status();
    assert!(unmounted.unwrap().success());
    drop((file, mount));
}

#[test]
fn a_linked_disk_whose_maker_died_before_it_was_described_is_begun_anew() {
    let linked = Linked::new();
    let disk = linked.disk("one.raw", None);
    linked.make(&disk).unwrap();
    let first = linked.described("one.raw");
    std::fs::remove_file(description_of(&linked.here.at("one.raw"))).unwrap();
    linked.make(&disk).unwrap();
    let second = linked.described("one.raw");
    assert_eq!(
        second.top, "one.raw.d2",
        "what the first one made may be in use"
    );
    assert_ne!(first.mark, second.mark);
    assert_eq!(first.common(), second.common());
    // Nor is one that a guest has used, or that is to be a copy of its own.
    let copy = DiskSpec {
        linked: false,
        ..disk.clone()
    };
    linked.refused(&copy, &["was not made for this disk"]);
    forget_mark(File::open(linked.here.at("one.raw")).unwrap());
    linked.refused(&disk, &["was not made for this disk"]);
}

#[test]
fn what_is_no_raw_file_of_a_datastore_or_is_written_by_others_has_no_disks_linked_to_it() {
    let mut linked = Linked::new();
    let disk = linked.disk("one.raw", None);
    linked.refused(
        &linked.disk("one.raw", Some(1)),
        &["size_gib = 1", "truncate -s 1G"],
    );
    let base = linked.here.at("base");
    let file = File::options().read(true).write(true).open(&base).unwrap();
    say_whose(&file);
    linked.refused(&disk, &["disk 'data' of VM 'db'", "godwit image release"]);
    holder::forget(file.as_fd()).unwrap();
    let patient = Duration::from_secs(60);
    lock_file(&file, &base, Access::ReadWrite, "a/db/root", patient).unwrap();
    linked.refused(&disk, &["is in use"]);
    drop(file);
    std::fs::write(&base, [7; 1000]).unwrap();
    linked.refused(&disk, &["no whole blocks", "truncate -s %512"]);
    for (head, word) in [
        (&b"KDMV"[..], "qemu-img convert -O raw"),
        (b"QFI\xfb\0\0\0\x02", "qemu-img convert -O raw"),
    ] {
        let mut image = head.to_vec();
        image.resize(BYTES, 0);
        std::fs::write(&base, image).unwrap();
        linked.refused(&disk, &[word]);
    }
    std::fs::write(&base, vec![7; BYTES]).unwrap();
    linked.stores.clear();
    linked.refused(&disk, &["no datastore of this host"]);
    assert_eq!(linked.parent(), None, "what is refused is not marked");
    std::fs::remove_file(&base).unwrap();
    linked.refused(&disk, &["does not exist on this host"]);
}
