//! What becomes of redo logs that lay over an image that is no disk any more.

use super::super::super::parts::Part;
use super::*;
use godwit_blockio::delta::{NewDelta, create};
use godwit_delta::{Id, Parent};
use godwit_snapshots::{Fresh, Images};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// A redo log of a disk that has moved, in another directory, and what described it.
fn log_of_old(dead: &Dead, there: &Path, name: &str) -> (PathBuf, Parts) {
    let (id, mark) = ("01".repeat(16), "5".repeat(32));
    let parent = Parent {
        cid: 1,
        hint: "old.vmdk".to_owned(),
    };
    let new = NewDelta {
        descriptor: &there.join(format!("{name}.vmdk")),
        bytes: 1 << 20,
        id: Id([1; 16]),
        parent: &parent,
    };
    create(&new).unwrap();
    let fresh = Fresh {
        name: name.to_owned(),
        id: id.clone(),
        elsewhere: Some(there.to_str().unwrap().to_owned()),
    };
    let images = Images::of_one("old", 1 << 20, &mark);
    let images = images.freeze(&fresh).unwrap();
    save_json(Path::new(&dead.path("old.images")), &images).unwrap();
    let log = there.join(format!("{name}-sesparse.vmdk"));
    let part = Part {
        path: log.to_str().unwrap().to_owned(),
        beside: String::new(),
        image: identity_of(&log).unwrap(),
        id,
    };
    let files = vec![part];
    (log, Parts { mark, files })
}

#[test]
fn what_lay_over_a_former_image_goes_with_it_and_never_for_another_in_its_place() {
    for (is_it, is_log) in [(true, true), (true, false), (false, true)] {
        let there = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut at = PathBuf::new();
        let mut dead = Dead::with(&["old", "new"], |dead, what| {
            let left = dead.left("old");
            let (log, mut parts) = log_of_old(dead, there.path(), "new.moving-1.d1");
            at = log;
            let part = &mut parts.files[0];
            part.image = part
                .image
                .map(|(device, number)| (device, number + u64::from(!is_log)));
            what.left = vec![Left {
                image: (left.image.0, left.image.1 + u64::from(!is_it)),
                parts,
                ..left
            }];
            what.disks[0].path = dead.path("new");
            what.images = vec![dead.identity("new")];
        });
        let stays: &[&str] = match is_it {
            true => &["new"],
            false => &["new", "old", "old.images"],
        };
        assert_eq!(dead.settled().0, stays);
        let is_gone = is_it && is_log;
        assert_eq!(!at.exists(), is_gone, "another file under its name stays");
        let left = std::fs::read_dir(there.path()).unwrap().count();
        assert_eq!(left == 0, is_gone);
    }
}

#[test]
fn a_log_of_a_former_image_whose_datastore_is_not_mounted_is_removed_once_it_is() {
    let above = tempfile::tempdir_in("/var/tmp").unwrap();
    let (there, away) = (above.path().join("fast"), above.path().join("away"));
    std::fs::create_dir(&there).unwrap();
    let inode = there.metadata().unwrap().ino();
    let name = format!("new.moving-1-{:016x}-{inode:x}.d1", 7);
    let mut at = PathBuf::new();
    let mut dead = Dead::with(&["old", "new"], |dead, what| {
        let (log, parts) = log_of_old(dead, &there, &name);
        at = log;
        let left = dead.left("old");
        what.left = vec![Left { parts, ..left }];
        what.disks[0].path = dead.path("new");
        what.images = vec![dead.identity("new")];
    });
    // As while it is not mounted: a directory of the file system of the former image has its path.
    std::fs::rename(&there, &away).unwrap();
    std::fs::create_dir(&there).unwrap();
    assert_eq!(dead.settled().0, ["new", "old", "old.images"]);
    assert_eq!(dead.written().left.len(), 1, "it is remembered");
    std::fs::remove_dir(&there).unwrap();
    std::fs::rename(&away, &there).unwrap();
    assert!(at.exists());
    assert_eq!(dead.settled().0, ["new"]);
    assert!(dead.written().left.is_empty() && !at.exists());
}
