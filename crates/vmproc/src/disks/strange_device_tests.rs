//! Devices that bear strange labels, that were made longer, or that are away: each is refused, and nothing is made or written.

use super::super::claim::Taking;
use super::*;
use crate::testing::Site;
use godwit_blockio::Buffer;
use godwit_guestmem::RamFile;
use godwit_ownership::{IMAGE_RECORD_FORMAT, ImageRecord};
use godwit_testkit::file_system::Device;
use godwit_types::image::ImageId;
use godwit_types::{Generation, HostName};
use rustix::process::{getegid, geteuid};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

const DEVICE: u64 = 8 << 20;
const BYTES: u64 = 2 << 20;

/// A host whose VM `web` has or is to have its disk `root` at this path.
struct Here {
    _site: Site,
    served: Served,
    spec: DiskSpec,
}

impl Here {
    /// Of whose devices these are known to bear labels.
    fn new(path: &Path, labelled: Vec<Labelled>) -> Self {
        let site = Site::new();
        let ram = RamFile::create(&site.paths.ram_file(1), 16 << 20, None).unwrap();
        let what = ServedDisks {
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
            labelled,
            ..ServedDisks::none(1, (0, 0))
        };
        let held = Some(Generation(2));
        let served = Served::new(&site.config, &site.paths, what, &Arc::new(ram), held);
        Self {
            _site: site,
            served,
            spec: DiskSpec::new("root", path.to_str().unwrap()),
        }
    }

    /// Opens it for a hypervisor that is started.
    fn opened(&self) -> Result<Image, String> {
        let opened = self
            .served
            .open(&self.spec, Duration::ZERO, Some(Taking::Anew), None);
        opened
            .map(|(image, _)| image)
            .map_err(|error| error.message)
    }

    /// Has a disk come there.
    fn made(&self) -> Result<(), String> {
        let made = self.served.make_on_device(&self.spec, ("x", BYTES));
        made.map(drop).map_err(|error| error.message)
    }
}

fn disk(vm: &str, disk: &str, text: Option<Vec<u8>>) -> Label {
    Label {
        holds: Holds::Disk,
        bytes: BYTES,
        vm: vm.to_owned(),
        disk: disk.to_owned(),
        text,
    }
}

fn record_of(vm: &str, disk: &str) -> Option<Vec<u8>> {
    let record = ImageRecord {
        format: IMAGE_RECORD_FORMAT,
        image: ImageId::new(7),
        vm: VmName::new(vm).unwrap(),
        disk: disk.to_owned(),
        holder: HostName::new("b").unwrap(),
        generation: Generation(1),
        taken: 1,
    };
    Some(serde_json::to_vec(&record).unwrap())
}

/// All that is on a device, beside the page cache.
fn bytes_of(device: &Device) -> Vec<u8> {
    let file = device.open().unwrap();
    rustix::fs::fcntl_setfl(&file, OFlags::DIRECT).unwrap();
    let length = file
        .metadata()
        .map(|_| rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)));
    let mut buffer = Buffer::zeroed(length.unwrap().unwrap() as usize);
    file.read_exact_at(buffer.bytes_mut(), 0).unwrap();
    buffer.bytes().to_vec()
}

/// A label, which byte of it is changed to what, and what the refusal says.
type Case = (Label, Option<(u64, u8)>, [&'static str; 2]);

/// Changes a byte of both slots of a label.
fn damage(device: &Device, at: u64, byte: u8) {
    let file = device.open().unwrap();
    for slot in [label::ROOM, label::ROOM / 2] {
        file.write_all_at(&[byte], DEVICE - slot + at).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
fn a_device_with_a_strange_label_is_refused_and_not_written() {
    let Some(device) = Device::of(DEVICE) else {
        return;
    };
    let (newer, torn) = (Some((8, 2)), Some((100, 0xa5)));
    let cases: [Case; 7] = [
        (
            disk("db", "root", None),
            None,
            ["disk 'root' of VM 'db'", "godwit image release"],
        ),
        (
            disk("web", "data", None),
            None,
            ["disk 'data' of VM 'web'", "another"],
        ),
        (
            disk("web", "root", record_of("db", "root")),
            None,
            ["disk 'root' of VM 'db'", "another"],
        ),
        (
            disk("web", "root", Some(b"?".to_vec())),
            None,
            ["disk 'root' of VM 'web'", "another"],
        ),
        (
            Label {
                holds: Holds::Part("y".to_owned()),
                ..disk("web", "root", None)
            },
            None,
            ["a part of disk 'root' of VM 'web'", "another p"],
        ),
        (
            disk("web", "root", None),
            newer,
            ["another format", "godwit image release"],
        ),
        (
            disk("web", "root", None),
            torn,
            ["checksum is wrong", "godwit image release"],
        ),
    ];
    for (label, damaged, words) in cases {
        label::take_off(device.open().unwrap().as_fd()).unwrap();
        let file = device.open().unwrap();
        let first = label::write(file.as_fd(), None, label.clone()).unwrap();
        label::write(file.as_fd(), Some(&first), label).unwrap();
        if let Some((at, byte)) = damaged {
            damage(&device, at, byte);
        }
        let before = bytes_of(&device);
        let here = Here::new(device.path(), Vec::new());
        let refused = here.opened().unwrap_err();
        assert!(
            words.iter().all(|word| refused.contains(word)),
            "{words:?}: {refused}"
        );
        // Nor does another disk come there.
        let refused = here.made().unwrap_err();
        assert!(refused.contains(words[0]), "{words:?}: {refused}");
        assert!(
            bytes_of(&device) == before,
            "the device was written: {refused}"
        );
    }
}

#[test]
fn a_device_that_was_made_longer_has_its_disk_where_that_was_or_the_person_is_told() {
    let Some(device) = Device::of(DEVICE) else {
        return;
    };
    let file = device.open().unwrap();
    let path = device.path().to_str().unwrap().to_owned();
    let known = record_of("web", "root");
    let whole = label::write(file.as_fd(), None, disk("web", "root", known.clone())).unwrap();
    file.write_all_at(&[7; 4096], 0).unwrap();
    file.sync_all().unwrap();
    device.becomes(2 * DEVICE).unwrap();
    let before = bytes_of(&device);
    // Where its end was is not known.
    let here = Here::new(device.path(), vec![Labelled::At(path.clone())]);
    let refused = here.opened().unwrap_err();
    assert!(refused.contains("has lost the label"), "{refused}");
    assert!(refused.contains("make it as large as it was"), "{refused}");
    let refused = here.made().unwrap_err();
    assert!(
        refused.contains("that Godwit has not put there"),
        "{refused}"
    );
    let known = known_by(&whole.label).unwrap();
    assert!(let_go(
        device.path(),
        &[Whose::Disk(&known), Whose::Part("x")]
    ));
    assert!(bytes_of(&device) == before, "the device was written");
    // It is.
    let long = Labelled::of(&path, &whole);
    let end = {
        let here = Here::new(device.path(), vec![long.clone()]);
        here.served.what().end_of(&path)
    };
    assert_eq!(label::length(file.as_fd(), end).unwrap(), BYTES);
    let here = Here::new(device.path(), vec![long]);
    let image = here.opened().unwrap();
    assert_eq!(image.bytes(), BYTES);
    let found = label::read(file.as_fd()).unwrap().unwrap();
    assert_eq!(found.device, 2 * DEVICE, "its label is at the new end");
    assert!(bytes_of(&device)[..BYTES as usize] == before[..BYTES as usize]);
}

/// A disk that its guest fills to the device's end.
#[test]
fn a_device_without_a_label_is_never_measured_by_what_its_guest_wrote() {
    let Some(device) = Device::of(DEVICE) else {
        return;
    };
    let file = device.open().unwrap();
    let path = device.path().to_str().unwrap().to_owned();
    let what = ServedDisks {
        disks: vec![DiskSpec::new("root", &path)],
        images: vec![identity_of_open(&file).unwrap()],
        ..ServedDisks::none(1, (0, 0))
    };
    for label in [disk("web", "root", None), Label::free(7)] {
        label::take_off(file.as_fd()).unwrap();
        label::write(file.as_fd(), None, label).unwrap();
        let end = what.end_of(&path);
        assert_eq!(label::length(file.as_fd(), end).unwrap(), DEVICE);
        let all = vec![(what.disks[0].clone(), what.images[0], end)];
        super::super::there::seen(all).unwrap();
    }
}

/// A name below `/dev`, gone with the value.
struct Name(PathBuf);

impl Name {
    fn new(what: &str) -> Self {
        Self(format!("/dev/godwit-test-{what}-{}", std::process::id()).into())
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn of_a_device_that_is_away_one_sentence_is_told_and_nothing_is_made() {
    if !geteuid().is_root() {
        return println!("skipped: names below /dev need root");
    }
    let away = Name::new("away");
    let refuses = |words: &str| {
        let here = Here::new(&away.0, Vec::new());
        for refused in [here.opened().map(drop), here.made()] {
            let refused = refused.unwrap_err();
            assert!(refused.contains(words), "{words}: {refused}");
            assert!(refused.contains(away.0.to_str().unwrap()), "{refused}");
        }
        // Nor where somebody takes it for a file's path.
        let refused = here.served.make(&here.spec, BYTES).unwrap_err().message;
        assert!(refused.contains("there is no block device"), "{refused}");
    };
    refuses("there is no block device");
    assert!(!away.0.exists(), "a file was made among the devices");
    std::fs::write(&away.0, vec![7; BYTES as usize]).unwrap();
    refuses("is a file in memory, and no block device");
    assert_eq!(std::fs::read(&away.0).unwrap(), vec![7; BYTES as usize]);
    std::fs::remove_file(&away.0).unwrap();
    std::os::unix::fs::symlink("/dev/null", &away.0).unwrap();
    refuses("must be a regular file or a block device");
    std::fs::remove_file(&away.0).unwrap();
    std::fs::create_dir(&away.0).unwrap();
    refuses("must be a regular file or a block device");
    assert_eq!(std::fs::read_dir(&away.0).unwrap().count(), 0);
    std::fs::remove_dir(&away.0).unwrap();
}
