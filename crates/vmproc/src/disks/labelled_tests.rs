//! What is let go of a device, called whole and kept, and what is not.

use super::*;
use crate::testing::say_on;
use godwit_ownership::{IMAGE_RECORD_FORMAT, ImageRecord};
use godwit_testkit::file_system::Device;
use godwit_types::image::ImageId;
use godwit_types::{Generation, HostName, VmName};

/// A loop device; nothing where none can be made.
struct Place(Device);

impl Place {
    fn new() -> Option<Self> {
        Device::of(8 << 20).map(Self)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// As somebody has it who works with it. A process that another test begins may have the lock for a moment.
    fn locked(&self) -> File {
        let file = open_device(self.path(), OFlags::RDWR).unwrap();
        let patience = Duration::from_secs(60);
        lock_file(&file, self.path(), Access::ReadWrite, "a", patience).unwrap();
        file
    }

    fn say(&self, holds: Holds, text: Option<Vec<u8>>) {
        let file = open_device(self.path(), OFlags::RDWR).unwrap();
        if holds == Holds::Nothing {
            let before = label::read(file.as_fd()).unwrap();
            label::let_go(file.as_fd(), before.as_ref()).unwrap();
            return;
        }
        say_on(&file, holds, text);
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
    let file = place.locked();
    assert!(!let_go(place.path(), &[Whose::Part("x")]));
    assert_eq!(place.holds(), part("x"));
    drop(file);
    assert!(let_go(place.path(), &[Whose::Part("x")]));
}

#[test]
fn of_a_device_that_bears_no_label_nothing_is_let_go_and_one_that_is_away_is_tried_again() {
    assert!(
        !let_go(Path::new("/dev/none/lun"), &[Whose::Part("x")]),
        "what it holds nobody knows"
    );
    assert!(is_away(Path::new("/dev/none/lun")) && !is_away(Path::new("/dev/null")));
    assert!(let_go(Path::new("/srv/lun"), &[Whose::Part("x")]));
    let Some(place) = Place::new() else { return };
    assert!(let_go(place.path(), &[Whose::Part("x")]));
    assert_eq!(look(place.path()).unwrap(), None);
}

#[test]
fn a_part_is_the_disk_once_and_under_its_own_name_alone() {
    let Some(place) = Place::new() else { return };
    let path = place.path().to_str().unwrap();
    let (vm, other) = (VmName::new("web").unwrap(), VmName::new("db").unwrap());
    let (root, data) = (DiskSpec::new("root", path), DiskSpec::new("data", path));
    place.say(part("x"), None);
    for refused in [
        finish_at("y", (&vm, &root)),
        finish_at("x", (&other, &root)),
        finish_at("x", (&vm, &data)),
    ] {
        refused.unwrap_err();
        assert_eq!(place.holds(), part("x"));
    }
    assert!(length_of(place.path()).is_err());
    for _ in 0..2 {
        finish_at("x", (&vm, &root)).unwrap();
        assert_eq!(place.holds(), Holds::Disk);
    }
    finish_at("x", (&other, &root)).expect_err("another VM's disk");
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
    // Nor while somebody else writes its label.
    let file = place.locked();
    keep_part(path, ["z", "kept"]).unwrap_err();
    assert_eq!(place.holds(), part("z"));
    drop(file);
    // A person has it be a disk.
    crate::image::release(place.path()).unwrap();
    assert_eq!(place.holds(), Holds::Disk);
}

/// A record of these disks, of which the first is on a device, as that was served.
fn of_one(labelled: &str) -> ServedDisks {
    let text = format!(
        r#"{{"launch":1,"ram":[1,2],"uid":0,"gid":0,"queues":1,"disks":[{{"name":"root","path":"/dev/vg0/web"}}],"images":[[64512,0]]{labelled}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_record_of_a_label_is_read_with_and_without_the_length_of_its_device() {
    let plain = of_one("");
    assert!(plain.is_plain("/dev/vg0/web") && !plain.is_labelled("/dev/vg0/web"));
    assert!(!plain.is_plain("/dev/vg0/db"));
    let old = of_one(r#","labelled":["/dev/vg0/web"]"#);
    assert!(old.is_labelled("/dev/vg0/web") && !old.is_plain("/dev/vg0/web"));
    assert_eq!(device_in(&old.labelled, "/dev/vg0/web"), None);
    let mut long = old;
    long.note_label(Labelled::Long {
        path: "/dev/vg0/web".to_owned(),
        device: 7 << 20,
    });
    let text = serde_json::to_string(&long).unwrap();
    let again: ServedDisks = serde_json::from_str(&text).unwrap();
    assert_eq!(device_in(&again.labelled, "/dev/vg0/web"), Some(7 << 20));
    assert_eq!(again.labelled.len(), 1);
}

/// A disk that had moved to a device was lost to its VM where the device was made longer before the next record.
#[test]
fn of_a_device_that_a_disk_goes_on_with_it_is_noted_how_long_it_is() {
    let Some(place) = Place::new() else { return };
    let path = place.path().to_str().unwrap().to_owned();
    assert_eq!(Labelled::seen(place.path()), Labelled::At(path.clone()));
    place.say(Holds::Disk, said(7, 3));
    let device = 8 << 20;
    assert_eq!(
        Labelled::seen(place.path()),
        Labelled::Long { path, device }
    );
}
