//! What a label says after whatever became of its device, and what is refused.

use super::*;
use crate::{Access, Arriving, Image, Known, holder};
use godwit_testkit::file_system::Device;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;

const DEVICE: u64 = 64 << 20;

/// Nothing where none can be made.
fn device() -> Option<Device> {
    Device::of(DEVICE)
}

fn label(holds: Holds) -> Label {
    Label {
        holds,
        bytes: 8 << 20,
        vm: "web".to_owned(),
        disk: "root".to_owned(),
        text: None,
    }
}

fn part() -> Label {
    label(Holds::Part("lun.moving-1".to_owned()))
}

fn found(number: u64, label: Label) -> Found {
    Found {
        number,
        device: DEVICE,
        label,
    }
}

#[test]
fn what_is_written_is_read_and_each_write_leaves_the_one_before_it() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    assert_eq!(read(file.as_fd()).unwrap(), None);
    assert!(is_blank(file.as_fd()).unwrap());
    let mut before = None;
    for (number, label) in [part(), label(Holds::Disk), Label::free(7)]
        .into_iter()
        .enumerate()
    {
        let written = write(file.as_fd(), before.as_ref(), label.clone()).unwrap();
        assert_eq!(written, found(number as u64 + 1, label));
        assert_eq!(
            read(device.open().unwrap().as_fd()).unwrap(),
            Some(written.clone())
        );
        let last = before.replace(written);
        // A write that breaks off anywhere: what was said before counts, and it is refused where nothing was.
        let at = place_of(DEVICE, before.as_ref().unwrap().slot());
        let mut whole = vec![0; SLOT];
        file.read_exact_at(&mut whole, at).unwrap();
        file.write_all_at(&[0xa5; 8], at + 60).unwrap();
        file.sync_all().unwrap();
        match (read(device.open().unwrap().as_fd()), last) {
            (Ok(said), Some(last)) => assert_eq!(said, Some(last)),
            (Err(error), None) => assert!(error.to_string().contains("checksum"), "{error}"),
            other => panic!("{other:?}"),
        }
        file.write_all_at(&whole, at).unwrap();
        file.sync_all().unwrap();
    }
    assert!(!is_blank(file.as_fd()).unwrap());
}

#[test]
fn a_disk_ends_before_the_label_and_half_of_one_is_opened_by_who_makes_it_alone() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    let of = |part: Option<&str>| {
        let (file, access) = (device.open().unwrap(), Access::ReadWrite);
        let known = Known {
            part,
            ..Known::default()
        };
        Image::of_known(file, device.path(), (access, 512), known)
    };
    assert_eq!(of(None).unwrap().bytes(), DEVICE, "no label");
    let first = write(file.as_fd(), None, part()).unwrap();
    let refused = of(None).unwrap_err().to_string();
    assert!(
        refused.contains("part of disk 'root' of VM 'web'"),
        "{refused}"
    );
    assert!(of(Some("lun.moving-2")).is_err(), "another one's work");
    assert_eq!(of(Some("lun.moving-1")).unwrap().bytes(), 8 << 20);
    let whole = write(file.as_fd(), Some(&first), label(Holds::Disk)).unwrap();
    let mut image = of(None).unwrap();
    assert_eq!(image.bytes(), 8 << 20);
    image.lock("a/web/root", std::time::Duration::ZERO).unwrap();
    assert_eq!(image.bytes(), 8 << 20, "it is measured anew");
    assert_eq!(length(file.as_fd(), End::ByLabel(None)).unwrap(), 8 << 20);
    assert_eq!(length(file.as_fd(), End::OfDevice).unwrap(), DEVICE);
    assert!(holds_no_disk(part()).contains("part of disk 'root'"));
    assert!(holds_no_disk(Label::free(7)).contains("holds no disk"));
    drop(image);
    write(file.as_fd(), Some(&whole), Label::free(7)).unwrap();
    let refused = of(None).unwrap_err().to_string();
    assert!(refused.contains("holds no disk"), "{refused}");
}

/// Why a device with this label has no length.
fn holds_no_disk(label: Label) -> String {
    let device = device().unwrap();
    write(device.open().unwrap().as_fd(), None, label).unwrap();
    let length = length(device.open().unwrap().as_fd(), End::ByLabel(None));
    length.unwrap_err().to_string()
}

#[test]
fn a_free_device_tells_whether_anything_came_there_since_it_was_left() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    file.write_all_at(&[7; 4096], 8192).unwrap();
    file.sync_all().unwrap();
    let whole = write(file.as_fd(), None, label(Holds::Disk)).unwrap();
    let left = let_go(file.as_fd(), Some(&whole)).unwrap();
    assert_eq!(read(file.as_fd()).unwrap().as_ref(), Some(&left));
    assert!(is_as_left(file.as_fd(), &left.label).unwrap());
    for at in [0, ROOM - 1] {
        file.write_all_at(&[1], at).unwrap();
        assert!(!is_as_left(file.as_fd(), &left.label).unwrap(), "{at}");
        file.write_all_at(&[0], at).unwrap();
    }
    take_off(file.as_fd()).unwrap();
    assert_eq!(read(file.as_fd()).unwrap(), None);
    take_off(file.as_fd()).unwrap();
}

#[test]
fn a_label_whose_predecessor_is_gone_is_damaged_and_can_be_taken_off() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    let first = write(file.as_fd(), None, part()).unwrap();
    write(file.as_fd(), Some(&first), label(Holds::Disk)).unwrap();
    file.write_all_at(&[0; SLOT], place_of(DEVICE, 1)).unwrap();
    file.sync_all().unwrap();
    let refused = read(file.as_fd()).unwrap_err().to_string();
    assert!(refused.contains("before it is gone"), "{refused}");
    assert!(refused.contains("godwit image release"), "{refused}");
    take_off(file.as_fd()).unwrap();
    assert_eq!(read(file.as_fd()).unwrap(), None);
}

#[test]
fn a_device_that_was_made_longer_has_its_label_where_it_was_until_that_moves() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    let whole = write(file.as_fd(), None, label(Holds::Disk)).unwrap();
    let of = |known| {
        let (file, path) = (device.open().unwrap(), device.path());
        Image::of_known(file, path, (Access::ReadWrite, 512), known)
    };
    let known = |device| Known {
        device: Some(device),
        ..Known::default()
    };
    let mut running = of(known(DEVICE)).unwrap();
    device.becomes(2 * DEVICE).unwrap();
    assert_eq!(running.measure().unwrap(), 8 << 20, "not the device's");
    assert_eq!(read(file.as_fd()).unwrap(), None, "not at its end");
    assert_eq!(of(known(DEVICE - 512)).unwrap().bytes(), 2 * DEVICE);
    let mut image = of(known(DEVICE)).unwrap();
    assert_eq!(image.bytes(), 8 << 20);
    image.lock("a/web/root", std::time::Duration::ZERO).unwrap();
    assert_eq!(image.bytes(), 8 << 20);
    image.move_label_to_end().unwrap();
    let moved = read(file.as_fd()).unwrap().unwrap();
    assert_eq!((moved.device, &moved.label), (2 * DEVICE, &whole.label));
    assert_eq!(image.label(), Some(&moved));
    let mut old = vec![1; SLOT];
    for slot in [0, 1] {
        file.read_exact_at(&mut old, place_of(DEVICE, slot))
            .unwrap();
        assert!(old.iter().all(|byte| *byte == 0), "it is there twice");
    }
    device.becomes(2 * DEVICE + 4096).unwrap();
    let refused = image.move_label_to_end().unwrap_err().to_string();
    assert!(refused.contains("by less than 1 MiB"), "{refused}");
}

#[test]
fn a_device_that_is_a_disk_without_a_label_has_its_length_whatever_its_guest_writes() {
    let Some(device) = device() else { return };
    let plain = Known {
        is_plain: true,
        ..Known::default()
    };
    let of = || {
        let (file, path) = (device.open().unwrap(), device.path());
        Image::of_known(file, path, (Access::ReadWrite, 512), plain)
    };
    let mut running = of().unwrap();
    for label in [part(), label(Holds::Disk), Label::free(7)] {
        let file = device.open().unwrap();
        take_off(file.as_fd()).unwrap();
        write(file.as_fd(), None, label).unwrap();
        assert_eq!(running.measure().unwrap(), DEVICE);
        let mut image = of().unwrap();
        image.lock("a/web/root", std::time::Duration::ZERO).unwrap();
        assert_eq!(image.bytes(), DEVICE);
        assert_eq!(image.label(), None);
    }
}

#[test]
fn what_a_device_holds_is_looked_at_again_once_it_is_locked() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    let whole = write(file.as_fd(), None, label(Holds::Disk)).unwrap();
    let mut image = Image::open(device.path(), Access::ReadWrite, 512).unwrap();
    let_go(file.as_fd(), Some(&whole)).unwrap();
    let refused = image.lock("a/web/root", std::time::Duration::ZERO);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("holds no disk"), "{refused}");
}

#[test]
fn what_came_is_whole_only_while_its_device_holds_that_very_part() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    let first = write(file.as_fd(), None, part()).unwrap();
    let known = Known {
        part: Some("lun.moving-1"),
        ..Known::default()
    };
    let (opened, path) = (device.open().unwrap(), device.path());
    let image = Image::of_known(opened, path, (Access::ReadWrite, 512), known).unwrap();
    let arriving = Arriving::of(&image).unwrap();
    arriving.must_be_whole().unwrap();
    for other in [
        label(Holds::Part("lun.moving-2".to_owned())),
        label(Holds::Disk),
    ] {
        take_off(file.as_fd()).unwrap();
        write(file.as_fd(), None, other).unwrap();
        let refused = arriving.must_be_whole().unwrap_err();
        assert!(refused.contains("does not say any more"), "{refused}");
    }
    drop(first);
}

#[test]
fn a_label_keeps_who_has_the_disk_as_a_file_does() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    let image = file.as_fd();
    let whole = write(image, None, label(Holds::Disk)).unwrap();
    assert_eq!(holder::read(image).unwrap(), None);
    assert!(holder::replace(image, None, b"a").unwrap());
    assert!(!holder::replace(image, None, b"b").unwrap());
    let held = holder::read(image).unwrap();
    assert!(holder::replace(image, held.as_ref(), b"b").unwrap());
    assert!(!holder::replace(image, held.as_ref(), b"c").unwrap());
    assert_eq!(holder::read(image).unwrap().unwrap().text, b"b");
    let refused = holder::try_out(image, "a", 10).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
    holder::forget(image).unwrap();
    assert_eq!(holder::read(image).unwrap().unwrap().text, b"");
    let now = read(image).unwrap().unwrap();
    assert!(now.number > whole.number && now.label.holds == Holds::Disk);
    write(image, Some(&now), Label::free(7)).unwrap();
    assert_eq!(holder::read(image).unwrap(), None);
    assert!(holder::replace(image, None, b"d").is_err());
}

#[test]
fn a_device_is_zeroed_and_is_blank_only_where_nothing_is_at_either_end() {
    let Some(device) = device() else { return };
    let file = device.open().unwrap();
    for at in [0, DEVICE - 512] {
        file.write_all_at(&[7; 512], at).unwrap();
        file.sync_all().unwrap();
        assert!(!is_blank(file.as_fd()).unwrap(), "{at}");
        zero(file.as_fd(), DEVICE, || true).unwrap();
        assert!(is_blank(file.as_fd()).unwrap());
    }
    let mut byte = [1];
    file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [0]);
    let refused = zero(file.as_fd(), DEVICE, || false).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
}

/// A slot that was changed, with a right checksum.
fn changed(at: usize, bytes: &[u8]) -> Slot {
    let mut slot = slot_of(&found(1, label(Holds::Disk)), DEVICE).unwrap();
    slot[at..at + bytes.len()].copy_from_slice(bytes);
    let sum = crc32(&[&slot[CHECKED..]]);
    slot[12..CHECKED].copy_from_slice(&sum.to_le_bytes());
    decode(&slot, DEVICE)
}

#[test]
fn what_is_not_understood_is_never_passed_over_for_what_was_said_before() {
    assert!(
        matches!(changed(16, &[1]), Slot::Found(_)),
        "nothing is changed"
    );
    let long = |value: u64| value.to_le_bytes();
    for (at, bytes) in [
        (8, &2_u32.to_le_bytes()[..]),
        (16, &long(0)),
        (16, &long(NUMBER_MAX + 1)),
        (24, &long(DEVICE + 512)),
        (32, &long(0)),
        (32, &long(513)),
        (32, &long(DEVICE)),
        (32, &long(u64::MAX)),
        (40, &[3]),
        (40, &[1]),
        (41, &[2]),
        (42, &[1]),
        (44, &u16::MAX.to_le_bytes()),
        (46, &256_u16.to_le_bytes()),
        (50, &[1]),
        (52, &[0xff]),
        (SLOT - 1, &[1]),
    ] {
        let read = changed(at, bytes);
        assert!(matches!(read, Slot::Foreign(_)), "{at}: {read:?}");
        let before = Slot::Found(found(2, Label::free(7)));
        assert!(newest([before, read]).is_err(), "{at}");
    }
    let slot = slot_of(&found(1, part()), DEVICE).unwrap();
    assert_eq!(decode(&slot[..SLOT - 1], DEVICE), Slot::Torn);
    assert_eq!(decode(&[0; SLOT], DEVICE), Slot::Empty);
    assert_eq!(decode(&[], DEVICE), Slot::Empty);
}

#[test]
fn what_does_not_fit_is_not_written() {
    let named = |name: usize, text: usize| Label {
        text: Some(vec![1; text]),
        ..label(Holds::Part("v".repeat(name)))
    };
    assert!(slot_of(&found(1, named(NAME_MAX, TEXT_MAX)), DEVICE).is_some());
    let of = |vm: &str, disk: &str| Label {
        vm: vm.to_owned(),
        disk: disk.to_owned(),
        ..label(Holds::Disk)
    };
    for label in [
        of("\u{1b}[2J", "root"),
        of("web", "a b"),
        of("web", ""),
        label(Holds::Part("lun\u{1b}c".to_owned())),
        label(Holds::Nothing),
        named(NAME_MAX + 1, 0),
        named(0, TEXT_MAX + 1),
        named(1 << 16, 0),
        Label {
            bytes: DEVICE - ROOM + 512,
            ..label(Holds::Disk)
        },
        label(Holds::Part(String::new())),
    ] {
        assert!(slot_of(&found(1, label), DEVICE).is_none());
    }
    let file = tempfile::tempfile().unwrap();
    assert!(write(file.as_fd(), None, part()).is_err());
    assert_eq!(read(file.as_fd()).unwrap(), None);
}
