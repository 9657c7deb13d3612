//! What is let go of a device, called whole and kept, and what is not.

use super::*;
use godwit_ownership::{IMAGE_RECORD_FORMAT, ImageRecord};
use godwit_testkit::file_system::Device;
use godwit_types::image::ImageId;
use godwit_types::{Generation, HostName, VmName};

/// A loop device; nothing where none can be made.
struct Place {
    device: Device,
    _directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let device = Device::over(&directory.path().join("device"), 512);
        if device.is_none() {
            println!("skipped: no device can be made of a file");
        }
        Some(Self {
            device: device?,
            _directory: directory,
        })
    }

    fn path(&self) -> &Path {
        self.device.path()
    }

    fn say(&self, holds: Holds, text: Option<Vec<u8>>) {
        let file = open_device(self.path(), OFlags::RDWR).unwrap();
        let before = label::read(file.as_fd()).unwrap();
        let label = Label {
            holds,
            bytes: 1 << 20,
            vm: "web".to_owned(),
            disk: "root".to_owned(),
            text,
        };
        label::write(file.as_fd(), before.as_ref(), label).unwrap();
    }

    fn holds(&self) -> Holds {
        look(self.path()).unwrap().unwrap().label.holds
    }
}

fn record(image: u128, taken: u64) -> ImageRecord {
    ImageRecord {
        format: IMAGE_RECORD_FORMAT,
        image: ImageId::new(image),
        vm: VmName::new("web").unwrap(),
        disk: "root".to_owned(),
        holder: HostName::new("a").unwrap(),
        generation: Generation(2),
        taken,
    }
}

fn said(image: u128, taken: u64) -> Option<Vec<u8>> {
    Some(serde_json::to_vec(&record(image, taken)).unwrap())
}

fn part(name: &str) -> Holds {
    Holds::Part(name.to_owned())
}

#[test]
fn only_the_part_or_the_disk_that_is_noted_is_let_go() {
    let Some(place) = Place::new() else { return };
    let known = record(7, 3).known();
    let whose = [Whose::Part("lun.moving-1"), Whose::Disk(&known)];
    for (holds, text) in [
        (part("lun.moving-2"), said(7, 3)),
        (Holds::Disk, None),
        (Holds::Disk, Some(Vec::new())),
        (Holds::Disk, said(8, 3)),
        // It was taken since.
        (Holds::Disk, said(7, 4)),
        (Holds::Disk, Some(b"torn".to_vec())),
    ] {
        place.say(holds.clone(), text);
        assert!(let_go(place.path(), &whose), "it is not ours");
        assert_eq!(place.holds(), holds);
    }
    for (holds, text) in [(part("lun.moving-1"), None), (Holds::Disk, said(7, 3))] {
        place.say(holds, text);
        assert!(let_go(place.path(), &whose));
        assert_eq!(place.holds(), Holds::Nothing);
    }
}

#[test]
fn what_somebody_works_with_is_let_go_later() {
    let Some(place) = Place::new() else { return };
    place.say(part("x"), None);
    let file = open_device(place.path(), OFlags::RDWR).unwrap();
    lock_file(&file, place.path(), Access::ReadWrite, "a", Duration::ZERO).unwrap();
    assert!(!let_go(place.path(), &[Whose::Part("x")]));
    assert_eq!(place.holds(), part("x"));
    drop(file);
    assert!(let_go(place.path(), &[Whose::Part("x")]));
}

#[test]
fn a_device_that_is_away_or_bears_no_label_has_nothing_to_be_let_go() {
    assert!(let_go(Path::new("/dev/none/lun"), &[Whose::Part("x")]));
    assert!(let_go(Path::new("/srv/lun"), &[Whose::Part("x")]));
    let Some(place) = Place::new() else { return };
    assert!(let_go(place.path(), &[Whose::Part("x")]));
    assert_eq!(look(place.path()).unwrap(), None);
}

#[test]
fn a_part_is_the_disk_once_and_under_its_own_name_alone() {
    let Some(place) = Place::new() else { return };
    let path = place.path().to_str().unwrap();
    place.say(part("x"), None);
    assert!(finish_at(path, "y").is_err());
    assert_eq!(place.holds(), part("x"));
    assert!(length_of(place.path()).is_err());
    for _ in 0..2 {
        finish_at(path, "x").unwrap();
        assert_eq!(place.holds(), Holds::Disk);
    }
    assert_eq!(length_of(place.path()).unwrap(), 1 << 20);
    place.say(Holds::Disk, said(7, 3));
    let known = |image, taken| compare(place.path(), Some(&record(image, taken).known())).unwrap();
    assert_eq!(known(7, 3), Is::It);
    assert_eq!(known(7, 2), Is::Another);
    assert_eq!(known(8, 3), Is::Another);
    assert_eq!(compare(place.path(), None).unwrap(), Is::Another);
}

#[test]
fn a_part_that_is_kept_is_let_go_by_nobody_who_made_it() {
    let Some(place) = Place::new() else { return };
    let path = place.path().to_str().unwrap();
    place.say(part("x"), None);
    assert_eq!(part_at(path, "x").unwrap(), Some(1 << 20));
    for _ in 0..2 {
        assert!(keep_part(path, ["x", "kept"]).unwrap());
        assert_eq!(part_at(path, "x").unwrap(), None);
        assert!(let_go(place.path(), &[Whose::Part("x")]));
        assert_eq!(place.holds(), part("kept"));
    }
    place.say(part("z"), None);
    assert!(!keep_part(path, ["x", "kept"]).unwrap());
    // A person has it be a disk.
    crate::image::release(place.path()).unwrap();
    assert_eq!(place.holds(), Holds::Disk);
}
