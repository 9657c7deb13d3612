//! What a successor makes of disks that its predecessor moved, at whatever moment that died.

use super::super::former::tests::say;
use super::*;
use crate::testing::Site;
use godwit_qemu::disk::identity_of;

#[path = "left_logs_tests.rs"]
mod logs;

struct Dead {
    _site: Site,
    paths: Paths,
    directory: tempfile::TempDir,
    spec: VmSpec,
}

impl Dead {
    /// What a process left whose disk was `old` before it was moved, with these files.
    fn with(files: &[&str], what: impl FnOnce(&Self, &mut ServedDisks)) -> Self {
        // Where files can say of themselves who has them.
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let site = Site::new();
        for name in files {
            std::fs::write(directory.path().join(name), name.as_bytes()).unwrap();
        }
        let paths = Paths::of(&site.config);
        std::fs::create_dir_all(&paths.state).unwrap();
        let mut spec = VmSpec::placeholder(&site.config.vm);
        spec.disks = vec![DiskSpec::new(
            "root",
            directory.path().join("old").to_str().unwrap(),
        )];
        let dead = Self {
            _site: site,
            paths,
            directory,
            spec,
        };
        let mut served = ServedDisks {
            disks: dead.spec.disks.clone(),
            images: vec![dead.identity("old")],
            ..ServedDisks::none(1, (0, 0))
        };
        what(&dead, &mut served);
        save_json(&dead.paths.disks(), &served).unwrap();
        dead
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().into()
    }

    fn identity(&self, name: &str) -> (u64, u64) {
        let found = identity_of(Path::new(&self.path(name))).unwrap();
        found.unwrap_or((1, 2))
    }

    fn copying(&self, image: Option<&str>) -> Copying {
        Copying {
            parts: Default::default(),
            disk: "root".into(),
            path: self.path("new"),
            beside: self.path("new.moving-1"),
            image: image.map(|name| self.identity(name)),
            known: None,
        }
    }

    fn left(&self, name: &str) -> Left {
        Left {
            parts: Default::default(),
            disk: "root".into(),
            path: self.path(name),
            image: self.identity(name),
            known: None,
            part: None,
            followed: false,
        }
    }

    /// A successor looks at it; which files there are, and where the description says that the disk is.
    fn settled(&mut self) -> (Vec<String>, String) {
        settle_moves(&self.paths, Some(&mut self.spec)).unwrap();
        // Once more: it may die, too.
        settle_moves(&self.paths, Some(&mut self.spec)).unwrap();
        let names = std::fs::read_dir(self.directory.path()).unwrap();
        let mut names: Vec<String> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        (names, self.spec.disks[0].path.clone())
    }

    fn written(&self) -> ServedDisks {
        load_json(&self.paths.disks()).unwrap().unwrap()
    }
}

#[test]
fn an_image_that_was_not_whole_is_removed_under_either_of_its_names_and_no_other_file_is() {
    for (files, image) in [
        (&["old"][..], None),
        (&["old", "new.moving-1"], None),
        (&["old", "new.moving-1"], Some("new.moving-1")),
        (&["old", "new"], Some("new")),
    ] {
        let mut dead = Dead::with(files, |dead, what| {
            what.copying = Some(dead.copying(image));
        });
        let old = dead.path("old");
        assert_eq!(dead.settled(), (vec!["old".to_owned()], old));
        assert_eq!(dead.written().copying, None);
    }
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        what.copying = Some(dead.copying(Some("old")));
    });
    assert_eq!(dead.settled().0, ["new", "old"], "'new' is somebody else's");
}

/// The record is from while the disk was being moved, and the disk has moved since.
#[test]
fn an_older_copy_of_the_record_removes_no_disk_that_has_moved_since() {
    type Change = fn(&mut Dead, &mut ServedDisks);
    let off_a_device: Change = |_, what| what.images = vec![(0x700, 0)];
    let gone: Change = |_, _| ();
    let another: Change = |dead, what| what.images = vec![dead.identity("new")];
    let named_otherwise: Change = |_, what| what.disks[0].name = "boot".into();
    let described: Change = |dead, _| dead.spec.disks[0].path = dead.path("new");
    for (files, is_so) in [
        (&["new"][..], gone),
        (&["new", "old"], off_a_device),
        (&["new", "old"], another),
        (&["new", "old"], named_otherwise),
        (&["new", "old"], described),
    ] {
        let mut dead = Dead::with(files, |_, _| ());
        let mut what = dead.written();
        what.copying = Some(dead.copying(Some("new")));
        is_so(&mut dead, &mut what);
        save_json(&dead.paths.disks(), &what).unwrap();
        assert_eq!(dead.settled().0, files);
        assert_eq!(dead.written().copying, None, "nobody looks at it again");
    }
}

#[test]
fn nothing_is_started_beside_the_image_to_which_its_disk_has_moved_since() {
    for off_a_device in [false, true] {
        let mut dead = Dead::with(&["new", "old"], |dead, what| {
            let known = Some(say(Path::new(&dead.path("new")), 3));
            say(Path::new(&dead.path("new")), 4);
            what.copying = Some(Copying {
                known,
                ..dead.copying(Some("new"))
            });
            what.images = vec![match off_a_device {
                true => (0x700, 0),
                false => dead.identity("new"),
            }];
        });
        let refused = settle_moves(&dead.paths, Some(&mut dead.spec)).unwrap_err();
        assert!(refused.contains(&dead.path("new")), "{refused}");
        settle_moves(&dead.paths, Some(&mut dead.spec)).unwrap_err();
        // A person has described it.
        dead.spec.disks[0].path = dead.path("new");
        assert_eq!(dead.settled().0, ["new", "old"]);
        assert_eq!(dead.written().copying, None);
    }
}

#[test]
fn what_may_be_a_disk_by_now_is_not_noted_for_removal_while_its_storage_is_away() {
    let mut dead = Dead::with(&["old"], |dead, what| {
        let copying = dead.copying(Some("old"));
        what.copying = Some(Copying {
            path: "/no/such/place/new".into(),
            beside: "/no/such/place/new.moving-1".into(),
            ..copying
        });
        what.images = vec![(0x700, 0)];
    });
    dead.settled();
    let written = dead.written();
    assert_eq!((written.left, written.copying), (Vec::new(), None));
}

#[test]
fn a_disk_that_is_elsewhere_is_followed_and_its_former_image_removed() {
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![dead.left("old")];
        what.disks[0].path = dead.path("new");
        what.disks[0].shared = true;
        what.images = vec![dead.identity("new")];
    });
    let new = dead.path("new");
    assert_eq!(dead.settled(), (vec!["new".to_owned()], new.clone()));
    assert!(dead.spec.disks[0].shared);
    assert_eq!(dead.written().left, []);
    let described: VmSpec = load_json(&dead.paths.spec()).unwrap().unwrap();
    assert_eq!(described.disks[0].path, new);
}

#[test]
fn a_file_that_took_the_place_of_a_former_image_stays() {
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        let left = dead.left("old");
        what.left = vec![Left {
            image: (left.image.0, left.image.1 + 1),
            ..left
        }];
        what.disks[0].path = dead.path("new");
    });
    let new = dead.path("new");
    assert_eq!(dead.settled(), (vec!["new".into(), "old".into()], new));
}

#[test]
fn a_disk_that_was_described_otherwise_since_is_left_as_described() {
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![dead.left("old")];
        what.disks[0].path = dead.path("new");
        what.images = vec![dead.identity("new")];
    });
    dead.spec.disks[0].path = dead.path("third");
    let third = dead.path("third");
    assert_eq!(dead.settled(), (vec!["new".to_owned()], third));
}

#[test]
fn what_became_a_disk_again_is_not_removed_whatever_is_noted_of_it() {
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![dead.left("old"), dead.left("new")];
        what.copying = Some(dead.copying(Some("new")));
        what.disks[0].path = dead.path("new");
        what.images = vec![dead.identity("new")];
    });
    let new = dead.path("new");
    assert_eq!(dead.settled(), (vec!["new".to_owned()], new));
    assert_eq!(dead.written().left, []);
}

#[test]
fn a_description_follows_without_a_look_at_the_images() {
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![dead.left("old")];
        what.disks[0].path = dead.path("new");
    });
    follow_moves(&dead.paths, Some(&mut dead.spec)).unwrap();
    assert_eq!(dead.spec.disks[0].path, dead.path("new"));
    assert!(Path::new(&dead.path("old")).exists());
    assert!(dead.written().left[0].followed);
}

#[test]
fn a_former_image_that_could_not_be_removed_is_never_a_disk_again_and_stays_noted() {
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![Left {
            part: None,
            followed: true,
            ..dead.left("old")
        }];
        what.disks[0].path = dead.path("new");
    });
    // Who describes it knows nothing of the move.
    assert_eq!(dead.spec.disks[0].path, dead.path("old"));
    follow_moves(&dead.paths, Some(&mut dead.spec)).unwrap();
    assert_eq!(dead.spec.disks[0].path, dead.path("new"));
    // The next QEMU's record has it, too.
    let noted = of_earlier(&dead.paths, &dead.spec.disks).left;
    assert_eq!((noted.len(), noted[0].path.clone()), (1, dead.path("old")));
}

#[test]
fn without_a_description_nothing_is_removed_that_may_be_the_only_copy() {
    let dead = Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![dead.left("old")];
        what.disks[0].path = dead.path("new");
    });
    settle_moves(&dead.paths, None).unwrap();
    assert!(Path::new(&dead.path("old")).exists());
    assert_eq!(dead.written().left.len(), 1);
}

#[test]
fn an_image_that_was_not_whole_goes_also_where_the_disk_came_back_to_the_place_that_it_was_for() {
    let dead = Dead::with(&["old", "new.moving-1"], |_, _| ());
    let copying = dead.copying(Some("new.moving-1"));
    std::fs::write(dead.path("new"), "the disk").unwrap();
    let mut what = dead.written();
    what.disks[0].path = dead.path("new");
    assert!(copying.remove(&what));
    assert!(!Path::new(&dead.path("new.moving-1")).exists());
    assert!(Path::new(&dead.path("new")).exists());
    // Whatever a description calls the disk is one.
    what.disks[0].path = dead.path("new.moving-1");
    std::fs::write(dead.path("new.moving-1"), "the disk").unwrap();
    assert!(copying.remove(&what));
    assert!(Path::new(&dead.path("new.moving-1")).exists());
}

#[test]
fn an_image_that_is_not_whole_and_cannot_be_removed_stays_noted() {
    let mut dead = Dead::with(&["old"], |dead, what| {
        what.copying = Some(dead.copying(None));
    });
    // No file, so that it is not removed as one.
    std::fs::create_dir(dead.path("new.moving-1")).unwrap();
    assert_eq!(dead.settled().0, ["new.moving-1", "old"]);
    let noted = Some(dead.copying(None));
    assert_eq!(dead.written().copying, noted);
    // The next QEMU's record has it, too.
    assert_eq!(of_earlier(&dead.paths, &dead.spec.disks).copying, noted);
    std::fs::remove_dir(dead.path("new.moving-1")).unwrap();
    dead.settled();
    assert_eq!(dead.written().copying, None);
}

#[test]
fn an_image_that_was_not_whole_is_removed_after_a_boot_that_gave_its_device_another_number() {
    for files in [["old", "new.moving-1"], ["old", "new"]] {
        let mut dead = Dead::with(&files, |dead, what| {
            let (device, inode) = dead.identity(files[1]);
            what.copying = Some(Copying {
                image: Some((device + 1, inode)),
                known: Some(say(Path::new(&dead.path(files[1])), 3)),
                ..dead.copying(None)
            });
        });
        assert_eq!(dead.settled().0, ["old"]);
        assert_eq!(
            (dead.written().copying, dead.written().left),
            (None, vec![])
        );
    }
}

#[test]
fn what_lies_on_storage_that_is_not_mounted_stays_noted_and_keeps_no_disk_from_moving() {
    let mut dead = Dead::with(&["old"], |dead, what| {
        // As after a power cut, when the directory is there and its file system is not.
        let (device, inode) = dead.identity("old");
        let elsewhere = (device + 1, inode + 1);
        what.copying = Some(Copying {
            image: Some(elsewhere),
            ..dead.copying(None)
        });
        what.left = vec![Left {
            image: elsewhere,
            part: None,
            followed: true,
            ..dead.left("former")
        }];
    });
    dead.settled();
    let written = dead.written();
    assert_eq!(written.copying, None);
    let noted: Vec<&str> = written.left.iter().map(|left| left.path.as_str()).collect();
    let expected = ["former", "new.moving-1", "new"].map(|name| dead.path(name));
    assert_eq!(noted, expected);
    assert_eq!(of_earlier(&dead.paths, &dead.spec.disks).left, written.left);
    // Also once the VM is elsewhere.
    super::super::images::leave(&dead.paths, &godwit_types::MigrationId::new("m-1").unwrap());
    let left = dead.written().left;
    let noted: Vec<&str> = left.iter().map(|left| left.path.as_str()).collect();
    assert_eq!(noted, expected);
}

/// A VM whose disk went from a block device to a file.
fn off_a_device() -> Dead {
    Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![Left {
            image: (0x700, 0),
            ..dead.left("old")
        }];
        what.disks[0].path = dead.path("new");
    })
}

#[test]
fn a_block_device_that_was_left_stays_and_is_never_the_disk_again() {
    let mut dead = off_a_device();
    let (old, new) = (dead.path("old"), dead.path("new"));
    let both = vec!["new".to_owned(), "old".to_owned()];
    assert_eq!(dead.settled(), (both.clone(), new.clone()));
    // An older description names it, at whatever time: it has the disk as it was then.
    for _ in 0..2 {
        dead.spec.disks[0].path.clone_from(&old);
        assert_eq!(dead.settled(), (both.clone(), new.clone()));
        assert!(dead.written().left[0].followed);
    }
    // The next QEMU's record has it, too.
    assert_eq!(of_earlier(&dead.paths, &dead.spec.disks).left.len(), 1);
}

/// What the next QEMU's record has of former images, once the VM has been elsewhere.
fn known_after_a_way_back(dead: &Dead, disk: &str) -> Vec<String> {
    assert!(!dead.paths.disks().exists());
    let disks = [DiskSpec::new("root", dead.path(disk))];
    let left = of_earlier(&dead.paths, &disks).left.into_iter();
    left.filter(|left| left.followed && is_device(left.image))
        .map(|left| left.path)
        .collect()
}

#[test]
fn a_block_device_that_was_left_is_no_disk_after_a_move_there_and_back() {
    let migration = godwit_types::MigrationId::new("m-1").unwrap();
    // It was left for a file of this host, or for another host.
    for mut dead in [
        off_a_device(),
        Dead::with(&["old"], |_, what| what.images = vec![(0x700, 0)]),
    ] {
        let old = dead.path("old");
        dead.settled();
        let mut what = dead.written();
        what.leaving = Some(migration.clone());
        save_json(&dead.paths.disks(), &what).unwrap();
        super::super::images::leave(&dead.paths, &migration);
        assert_eq!(
            known_after_a_way_back(&dead, "back"),
            std::slice::from_ref(&old)
        );
        assert!(Path::new(&old).exists());
        // It comes back, and an older description is put in the place of its own.
        let back = dead.path("back");
        std::fs::write(&back, "image").unwrap();
        what.disks = vec![DiskSpec::new("root", &back)];
        what.images = vec![dead.identity("back")];
        what.left = of_earlier(&dead.paths, &what.disks).left;
        save_json(&dead.paths.disks(), &what).unwrap();
        dead.spec.disks[0].path.clone_from(&old);
        assert_eq!(dead.settled().1, back);
        // Once more elsewhere and back: a person has described it as the disk.
        super::super::images::leave(&dead.paths, &migration);
        assert_eq!(known_after_a_way_back(&dead, "other"), [old]);
        assert!(known_after_a_way_back(&dead, "old").is_empty());
    }
}

#[test]
fn a_block_device_that_went_along_with_its_vm_is_forgotten_there_or_not() {
    let migration = godwit_types::MigrationId::new("m-1").unwrap();
    for files in [&["old"][..], &[]] {
        let dead = Dead::with(files, |_, what| {
            what.images = vec![(0x700, 0)];
            what.leaving = Some(migration.clone());
        });
        super::super::images::leave(&dead.paths, &migration);
        assert!(!dead.paths.disks().exists(), "{files:?}");
        assert_eq!(Path::new(&dead.path("old")).exists(), !files.is_empty());
    }
}

/// A VM whose disk has moved, and whose description does not say so yet.
fn moved_unfollowed() -> Dead {
    Dead::with(&["old", "new"], |dead, what| {
        what.left = vec![dead.left("old")];
        what.disks[0].path = dead.path("new");
        what.images = vec![dead.identity("new")];
    })
}

#[test]
fn a_former_image_stays_until_the_description_is_written() {
    let mut dead = moved_unfollowed();
    let next = format!("{}.new", dead.paths.spec().display());
    std::fs::create_dir(&next).unwrap();
    for _ in 0..2 {
        settle_moves(&dead.paths, Some(&mut dead.spec)).unwrap_err();
        assert!(Path::new(&dead.path("old")).exists());
    }
    std::fs::remove_dir(next).unwrap();
    let new = dead.path("new");
    assert_eq!(dead.settled(), (vec!["new".to_owned()], new.clone()));
    let written: VmSpec = load_json(&dead.paths.spec()).unwrap().unwrap();
    assert_eq!(written.disks[0].path, new);
}

#[test]
fn a_former_image_stays_where_the_disks_image_is_gone_or_an_older_copy() {
    for is_older in [false, true] {
        let mut dead = moved_unfollowed();
        let (old, new) = (dead.path("old"), dead.path("new"));
        if is_older {
            let mut what = dead.written();
            what.known = vec![say(Path::new(&new), 4)];
            save_json(&dead.paths.disks(), &what).unwrap();
            say(Path::new(&new), 3);
        } else {
            std::fs::remove_file(&new).unwrap();
        }
        assert!(dead.settled().0.contains(&"old".to_owned()), "{is_older}");
        assert_eq!(dead.written().left.len(), 1);
        // Once the disk is what it was last, it is removed as before.
        std::fs::write(&new, "image").unwrap();
        let mut what = dead.written();
        what.images = vec![dead.identity("new")];
        what.known = vec![say(Path::new(&new), 4)];
        save_json(&dead.paths.disks(), &what).unwrap();
        assert!(!dead.settled().0.contains(&"old".to_owned()));
        assert!(!Path::new(&old).exists());
    }
}

#[test]
fn an_image_that_was_not_whole_is_removed_also_where_its_vm_has_left() {
    let migration = godwit_types::MigrationId::new("m-1").unwrap();
    let dead = Dead::with(&["old", "new"], |dead, what| {
        what.copying = Some(dead.copying(Some("new")));
        what.leaving = Some(migration.clone());
    });
    super::super::images::leave(&dead.paths, &migration);
    assert!(!Path::new(&dead.path("old")).exists());
    assert!(!Path::new(&dead.path("new")).exists());
}

#[test]
fn what_other_hosts_knew_of_a_shared_image_counts_where_it_is_newer() {
    let known = |generation: u64, taken: u64| KnownImage {
        disk: "root".into(),
        image: godwit_types::image::ImageId::new(1),
        generation: godwit_types::Generation(generation),
        taken,
    };
    let mut dead = Dead::with(&["old"], |_, what| what.known = vec![known(3, 4)]);
    let of = |dead: &Dead| of_earlier(&dead.paths, &dead.spec.disks).known;
    let says =
        |dead: &Dead, said: KnownImage| save_json(&dead.paths.images(), &vec![said]).unwrap();
    says(&dead, known(5, 6));
    assert_eq!(of(&dead), [known(3, 4)], "its image is this host's alone");
    dead.spec.disks[0].shared = true;
    assert_eq!(of(&dead), [known(5, 6)]);
    says(&dead, known(3, 2));
    assert_eq!(of(&dead), [known(3, 4)]);
    std::fs::remove_file(dead.paths.disks()).unwrap();
    assert_eq!(of(&dead), [known(3, 2)]);
    // Of a disk that it does not have.
    let other = KnownImage {
        disk: "data".into(),
        ..known(9, 9)
    };
    says(&dead, other);
    assert_eq!(of(&dead), []);
}
