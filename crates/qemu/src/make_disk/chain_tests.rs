//! Disks made from images over other files, and files that no image may name.

use super::mark::bear;
use super::*;
use std::path::Path;
use std::process::Command;

const LENGTH: usize = 3 << 20;

fn content() -> Vec<u8> {
    (0..LENGTH as u32).map(|at| (at / 700) as u8).collect()
}

/// A raw file below a qcow2 image, which holds a piece of its own.
fn chain(here: &Here) -> bool {
    std::fs::write(here.at("base.raw"), content()).unwrap();
    over(here, "base.raw", "raw", "base.mid") && write(here, "base.mid", "write -P 7 1M 64k")
}

fn over(here: &Here, below: &str, format: &str, name: &str) -> bool {
    let create = ["create", "-q", "-f", "qcow2", "-b", below, "-F", format];
    qemu_img(here, &[&create[..], &[name]].concat())
}

fn write(here: &Here, name: &str, order: &str) -> bool {
    let mut command = Command::new("/usr/bin/qemu-io");
    let command = command.args(["-f", "qcow2", "-c", order, name]);
    let Ok(ran) = command.current_dir(here.dir.path()).output() else {
        println!("skipped: there is no qemu-io (package qemu-utils)");
        return false;
    };
    assert!(ran.status.success(), "{ran:?}");
    true
}

fn made(here: &Here) -> Vec<u8> {
    let made = std::fs::read(here.at("root.raw")).unwrap();
    std::fs::remove_file(here.at("root.raw")).unwrap();
    made
}

#[test]
fn an_image_over_others_is_written_out_as_one() {
    let here = Here::new();
    std::fs::create_dir(here.at("base.d")).unwrap();
    if !chain(&here) || !over(&here, "base.mid", "qcow2", "base.top") {
        return;
    }
    let mut expected = content();
    expected[1 << 20..(1 << 20) + (64 << 10)].fill(7);
    here.make(&here.disk(Some("base.top"), None)).unwrap();
    assert!(made(&here) == expected);
    write(&here, "base.top", "write -z 2M 64k");
    expected[2 << 20..(2 << 20) + (64 << 10)].fill(0);
    here.make(&here.disk(Some("base.top"), None)).unwrap();
    assert!(made(&here) == expected);
    // By a way that leads to the same directory.
    assert!(over(&here, "base.d/../base.raw", "raw", "base.way"));
    here.make(&here.disk(Some("base.way"), None)).unwrap();
    assert!(made(&here) == content());
    // What the guest of a raw one wrote to it is no head.
    let head = std::fs::read(here.at("base.top")).unwrap();
    let mut guests = content();
    guests[..1 << 16].copy_from_slice(&head[..1 << 16]);
    std::fs::write(here.at("base.raw"), &guests).unwrap();
    here.make(&here.disk(Some("base.way"), None)).unwrap();
    assert!(made(&here) == guests);
}

#[test]
fn an_image_names_no_file_but_those_beside_it_and_in_datastores() {
    let (here, elsewhere) = (Here::new(), Here::new());
    std::fs::write(elsewhere.at("base.raw"), content()).unwrap();
    let foreign = elsewhere.at("base.raw");
    if !over(&here, foreign.to_str().unwrap(), "raw", "base.far") {
        return;
    }
    let words = [
        "cannot be used with its backing file",
        "in the directory of that image or in a datastore",
        "qemu-img convert",
    ];
    here.refused(&here.disk(Some("base.far"), None), &words);
    symlink(&foreign, here.at("base.link")).unwrap();
    assert!(over(&here, "base.link", "raw", "base.linked"));
    here.refused(&here.disk(Some("base.linked"), None), &words);
    // Beside it, and not below that.
    std::fs::create_dir(here.at("base.d")).unwrap();
    std::fs::write(here.at("base.d/raw"), content()).unwrap();
    assert!(over(&here, "base.d/raw", "raw", "base.deep"));
    here.refused(&here.disk(Some("base.deep"), None), &words);
    let maker = Maker {
        vm: &here.vm,
        user: own_user(),
        reserved: &Reserved::default(),
        stores: &[elsewhere.dir.path().to_owned()],
    };
    for name in ["base.far", "base.linked"] {
        let disk = here.disk(Some(name), None);
        maker.make(&disk, &Progress::default()).unwrap();
        assert!(made(&here) == content(), "{name}");
    }
    let reserved = Reserved::new(vec![elsewhere.dir.path().to_owned()], Default::default());
    let maker = Maker {
        reserved: &reserved,
        ..maker
    };
    let disk = here.disk(Some("base.far"), None);
    let refusal = maker.make(&disk, &Progress::default()).unwrap_err();
    assert!(refusal.contains("put the file elsewhere"), "{refusal}");
}

#[test]
fn a_file_below_an_image_that_is_a_disk_in_use_or_written_makes_none() {
    let here = Here::new();
    if !chain(&here) {
        return;
    }
    let disk = here.disk(Some("base.mid"), None);
    let open = || {
        let path = here.at("base.raw");
        File::options().read(true).write(true).open(path).unwrap()
    };
    let file = open();
    say_whose(&file);
    let words = ["base.raw", "disk 'data' of VM 'db'", "no image may name"];
    here.refused(&disk, &words);
    holder::forget(file.as_fd()).unwrap();
    bear(&file, "db/root/0/").unwrap();
    here.refused(&disk, &["base.raw", "was made to be the disk"]);
    forget_mark(&file);
    let patient = Duration::from_secs(60);
    let path = here.at("base.raw");
    lock_file(&file, &path, Access::ReadWrite, "a/db/root", patient).unwrap();
    here.refused(&disk, &["base.raw", "is in use"]);
    drop(file);
    let source = here.source(&here.at("base.mid"));
    source.must_be_unchanged().unwrap();
    let later = std::time::SystemTime::now() + Duration::from_secs(1);
    open().set_modified(later).unwrap();
    let refusal = source.must_be_unchanged().unwrap_err();
    assert!(refusal.contains("base.raw was written"), "{refusal}");
    std::fs::remove_file(&path).unwrap();
    here.refused(&disk, &["base.raw", "does not exist", "rebase -u"]);
}

/// An image that somebody else has written names what belongs to another VM as raw.
#[test]
fn what_other_vms_disks_are_made_of_is_not_shown_by_an_image_that_names_it() {
    let here = Here::new();
    if !chain(&here) {
        return;
    }
    let mut extent = 0xcafe_babeu64.to_le_bytes().to_vec();
    extent.resize(LENGTH, 7);
    for (name, content, word) in [
        ("base.raw.d1-sesparse.vmdk", extent, "a part of a disk"),
        (".base.raw.godwit-new", content(), "half-made"),
        ("base.raw.arriving-m-7", content(), "half-made"),
    ] {
        std::fs::write(here.at(name), content).unwrap();
        assert!(over(&here, name, "raw", "base.top"));
        let before = here.names();
        let disk = here.disk(Some("base.top"), None);
        let refusal = here.make(&disk).unwrap_err();
        assert!(
            refusal.contains(name) && refusal.contains(word),
            "{refusal}"
        );
        // Nor under another name.
        let link = here.at("base.link");
        let _ = std::fs::remove_file(&link);
        symlink(here.at(name), &link).unwrap();
        assert!(over(&here, "base.link", "raw", "base.way"));
        let way = here.disk(Some("base.way"), None);
        let refusal = here.make(&way).unwrap_err();
        assert!(refusal.contains(word), "{refusal}");
        assert_eq!(here.names(), before);
    }
    // Nor is an image read as one that is a raw disk which no guest has used.
    let made = File::open(here.at("base.mid")).unwrap();
    bear(&made, "db/root/0/").unwrap();
    let disk = here.disk(Some("base.mid"), None);
    here.refused(&disk, &["base.mid", "made to be the disk of a VM"]);
}

#[test]
fn chains_without_formats_and_such_as_are_damaged_or_come_back_make_no_disk() {
    let here = Here::new();
    if !chain(&here) || !over(&here, "base.mid", "qcow2", "base.top") {
        return;
    }
    let change = |name: &str, at: usize, bytes: &[u8]| {
        let file = File::options().write(true).open(here.at(name)).unwrap();
        file.write_all_at(bytes, at as u64).unwrap();
    };
    let top = here.disk(Some("base.top"), None);
    let whole = std::fs::read(here.at("base.mid")).unwrap();
    let told = 0xe279_2acau32.to_be_bytes();
    let at = whole.windows(4).position(|four| four == told).unwrap();
    change("base.mid", at, &[0x12, 0x34, 0x56, 0x78]);
    let words = ["base.mid", "of which format", "rebase -u -F FORMAT"];
    here.refused(&top, &words);
    std::fs::write(here.at("base.mid"), &whole).unwrap();
    change("base.mid", 79, &[2]);
    here.refused(&top, &["base.mid", "qemu-img check -r all"]);
    // Its last cluster is missing, and a little of the one before.
    let cut = whole.len() - (1 << 16) - 512;
    std::fs::write(here.at("base.mid"), &whole[..cut]).unwrap();
    here.refused(&top, &["backing file 1", "damaged"]);
    std::fs::remove_file(here.at("base.mid")).unwrap();
    symlink("base.top", here.at("base.mid")).unwrap();
    here.refused(&top, &["base.mid", "above itself"]);
    // One that is said to be a qcow2 image, and is not.
    std::fs::remove_file(here.at("base.mid")).unwrap();
    std::fs::write(here.at("base.mid"), content()).unwrap();
    here.refused(&top, &["base.mid", "is none"]);
    assert!(!Path::new(&top.path).exists());
}
