//! Disks that begin as an image which is never copied, and images that are none for that.

use super::*;
use crate::disk::{DiskError, open_image};
use crate::parent::parent_id;
use godwit_snapshots::Images;
use godwit_types::snapshots::LAYERED_MARK;
use rustix::fs::fgetxattr;

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
