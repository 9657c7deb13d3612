//! What is opened as a disk's image, and what is not.

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};

const UID: u32 = 61_234;

fn place() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("chmod");
    directory
}

#[test]
fn what_qemus_user_may_not_open_is_refused_though_we_may() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: becoming another user needs root");
    }
    let directory = place();
    let path = directory.path().join("image");
    fs::write(&path, [0; 512]).expect("image");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("chmod");
    let error = open_image(&path, true, UID, UID, &Reserved::default()).expect_err("root's own");
    assert!(
        error
            .to_string()
            .contains("(uid 61234) may not open the disk image"),
        "{error}"
    );
    fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("chmod");
    open_image(&path, true, UID, UID, &Reserved::default()).expect("readable");
    let error = open_image(&path, false, UID, UID, &Reserved::default()).expect_err("not writable");
    assert!(
        error.to_string().contains("for reading and writing"),
        "{error}"
    );
    chown(&path, Some(UID), None).expect("chown");
    open_image(&path, false, UID, UID, &Reserved::default()).expect("its own");
    assert!(
        rustix::process::geteuid().is_root(),
        "only the opening thread became another user"
    );
}

#[test]
fn what_is_no_image_is_refused_without_waiting() {
    let directory = place();
    let own = rustix::process::geteuid().as_raw();
    let pipe = directory.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR).expect("a pipe");
    for (path, read_only) in [
        (pipe.as_path(), true),
        (directory.path(), true),
        (directory.path(), false),
    ] {
        let error =
            open_image(path, read_only, own, own, &Reserved::default()).expect_err("no image");
        assert!(matches!(error, DiskError::Kind { .. }), "{error}");
    }
    let refused = open_to_look(&pipe).expect_err("no image").to_string();
    assert!(refused.contains("neither a file"), "{refused}");
    let error = open_image(
        &directory.path().join("none"),
        true,
        own,
        own,
        &Reserved::default(),
    )
    .expect_err("none");
    assert!(matches!(error, DiskError::Missing { .. }), "{error}");
}

/// Whether anybody has opened a pipe to write to it since its reader did.
fn was_opened(reader: &OwnedFd) -> bool {
    let mut ends = [PollFd::new(reader, PollFlags::IN)];
    poll(&mut ends, Some(&Timespec::default())).expect("asked");
    ends[0].revents().contains(PollFlags::HUP)
}

#[test]
fn what_is_no_image_is_not_even_opened_whatever_way_leads_there() {
    let directory = place();
    let own = rustix::process::geteuid().as_raw();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("below")).expect("a directory");
    rustix::fs::mkfifoat(CWD, at("below/pipe"), Mode::RWXU).expect("a pipe");
    std::os::unix::fs::symlink("below", at("way")).expect("a link");
    std::os::unix::fs::symlink("way/pipe", at("image")).expect("a link");
    let reader = OFlags::RDONLY | OFlags::NONBLOCK;
    let reader = open(at("below/pipe"), reader, Mode::empty()).expect("its reader");
    for path in ["below/pipe", "way/pipe", "image"].map(at) {
        let refused = open_image(&path, false, own, own, &Reserved::default());
        let refused = refused.expect_err("no image");
        assert!(matches!(refused, DiskError::Kind { .. }), "{refused}");
        assert!(!was_opened(&reader), "{path:?}");
    }
    drop(File::options().write(true).open(at("image")));
    assert!(was_opened(&reader), "it would be seen");
}

#[test]
fn a_device_that_is_none_of_blocks_is_no_image_though_everybody_may_open_it() {
    let directory = place();
    let (own, path) = (
        rustix::process::geteuid().as_raw(),
        directory.path().join("device"),
    );
    let null = rustix::fs::makedev(1, 3);
    let mode = Mode::from_raw_mode(0o666);
    if rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, mode, null).is_err() {
        return println!("skipped: making a device needs root");
    }
    let refused = open_image(&path, false, own, own, &Reserved::default());
    assert!(
        matches!(refused, Err(DiskError::Kind { .. })),
        "{refused:?}"
    );
    assert!(open_to_look(&path).is_err());
}

#[test]
fn a_link_is_followed_to_an_image_and_never_by_who_only_looks() {
    let directory = place();
    let own = rustix::process::geteuid().as_raw();
    let [image, link] = ["image", "link"].map(|name| directory.path().join(name));
    fs::write(&image, [7; 512]).expect("image");
    std::os::unix::fs::symlink(&image, &link).expect("a link");
    let opened = open_image(&link, false, own, own, &Reserved::default()).expect("opened");
    let opened = identity_of_open(&File::from(opened)).expect("looked at");
    assert_eq!(identity_of(&image).expect("looked at"), Some(opened));
    let refused = open_to_look(&link).expect_err("a link").to_string();
    assert!(refused.contains("neither a file"), "{refused}");
    assert!(open_to_look(&image).is_ok());
}

#[test]
fn without_proc_it_is_said_that_it_is_missing_and_not_the_file() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: another view of the mounts needs root");
    }
    let directory = place();
    let path = directory.path().join("image");
    fs::write(&path, [0; 512]).expect("image");
    let seen = std::thread::spawn(move || {
        // SAFETY: a plain system call; it concerns this thread alone, whose mounts end with it.
        let own = unsafe { libc::unshare(libc::CLONE_NEWNS) };
        assert_eq!(own, 0, "mounts of its own");
        for words in [
            &["--make-rprivate", "/"][..],
            &["-t", "tmpfs", "none", "/proc"],
        ] {
            let done = std::process::Command::new("mount").args(words).status();
            assert!(done.expect("mount").success(), "{words:?}");
        }
        open_own(&path, &Reserved::default()).map(drop)
    });
    let refused = seen.join().expect("the thread").expect_err("no /proc");
    let refused = refused.to_string();
    assert!(refused.contains("mount -t proc"), "{refused}");
}

/// As `open_image` for a file of the caller's own.
fn open_own(path: &Path, reserved: &Reserved) -> Result<OwnedFd, DiskError> {
    let own = rustix::process::geteuid().as_raw();
    open_image(path, true, own, own, reserved)
}

#[test]
fn what_lies_where_the_host_keeps_its_records_is_no_image_however_it_is_reached() {
    let directory = place();
    let at = |name: &str| directory.path().join(name);
    for dir in ["state/vms/web", "images"] {
        fs::create_dir_all(at(dir)).expect("a directory");
    }
    let record = at("state/vms/web/record");
    for file in [record.clone(), at("images/disk")] {
        fs::write(file, [0; 512]).expect("a file");
    }
    std::os::unix::fs::symlink(at("state"), at("images/link")).expect("a link");
    std::os::unix::fs::symlink(at("state"), at("moved")).expect("a link");
    // The host's own path may be a link, too.
    let reserved = Reserved::new(vec![at("moved")], at("no/ram"));
    let open = fs::File::open(&record).expect("opened");
    let by_number = format!("/proc/self/fd/{}", open.as_raw_fd());
    let paths = [
        record.clone(),
        at("images/link/vms/web/record"),
        at("images/../state/vms/web/record"),
        by_number.into(),
    ];
    for path in &paths {
        let refused = open_own(path, &reserved).expect_err("a record").to_string();
        assert!(refused.contains("put the file elsewhere"), "{refused}");
        assert_eq!(reserved.of_path(path), Some(at("moved")), "{path:?}");
    }
    fs::remove_file(&record).expect("removed");
    let refused = open_own(&paths[3], &reserved).expect_err("a removed record");
    assert!(matches!(refused, DiskError::Reserved { .. }), "{refused}");
    open_own(&at("images/disk"), &reserved).expect("an image");
    assert_eq!(reserved.of_path(&at("images/disk")), None);
}

#[test]
fn no_guests_memory_is_an_image_wherever_its_file_system_is_mounted() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: mounting needs root");
    }
    let directory = place();
    let (ram, other) = (directory.path().join("ram"), directory.path().join("other"));
    fs::create_dir(&ram).expect("a directory");
    fs::create_dir(&other).expect("a directory");
    let seen = std::thread::spawn(move || {
        // SAFETY: a plain system call; it concerns this thread alone, whose mounts end with it.
        let own = unsafe { libc::unshare(libc::CLONE_NEWNS) };
        assert_eq!(own, 0, "mounts of its own");
        let mount = |words: &[&std::ffi::OsStr]| {
            let done = std::process::Command::new("mount").args(words).status();
            assert!(done.expect("mount").success(), "{words:?}");
        };
        mount(&["--make-rprivate".as_ref(), "/".as_ref()]);
        mount(&[
            "-t".as_ref(),
            "tmpfs".as_ref(),
            "none".as_ref(),
            ram.as_os_str(),
        ]);
        mount(&["--bind".as_ref(), ram.as_os_str(), other.as_os_str()]);
        fs::write(ram.join("victim.1"), [0; 4096]).expect("a RAM file");
        let reserved = Reserved::new(Vec::new(), ram.clone());
        [ram, other].map(|dir| {
            let path = dir.join("victim.1");
            let opened = open_own(&path, &reserved).map(drop);
            (opened, reserved.of_path(&path).is_some())
        })
    });
    for (opened, is_told) in seen.join().expect("the thread") {
        let refused = opened.expect_err("guest memory");
        assert!(
            matches!(refused, DiskError::Reserved { .. }) && is_told,
            "{refused}"
        );
    }
}

#[test]
fn a_file_gets_another_name_unless_that_is_taken_and_a_link_that_was_half_renamed_is_finished() {
    let directory = place();
    let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
    for rename in [rename_to_free, rename_by_link] {
        let rename = || rename(rustix::fs::CWD, &from, &to);
        let _ = fs::remove_file(&to);
        fs::write(&from, "image").expect("written");
        assert_eq!(rename(), Ok(()));
        assert!(!from.exists());
        fs::write(&from, "another").expect("written");
        assert_eq!(rename(), Err(Errno::EXIST));
        assert_eq!(fs::read_to_string(&to).expect("read"), "image");
        fs::remove_file(&from).expect("removed");
        assert_eq!(rename(), Err(Errno::NOENT));
    }
    fs::hard_link(&to, &from).expect("linked");
    assert_eq!(rename_by_link(rustix::fs::CWD, &from, &to), Ok(()));
    assert!(!from.exists() && to.exists());
}

/// What losetup says, if it can do this here.
fn losetup(words: &[&std::ffi::OsStr]) -> Option<String> {
    let output = std::process::Command::new("losetup").args(words).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).expect("a path"))
}

#[test]
fn a_block_device_takes_all_of_its_length_and_a_file_what_is_written() {
    const MIB: u64 = 1 << 20;
    let directory = place();
    let path = directory.path().join("image");
    let file = File::create(&path).expect("a file");
    file.set_len(8 * MIB).expect("made longer");
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 8192], MIB).expect("written");
    file.sync_all().expect("durable");
    let told = |path: &Path| length_and_use(&open_to_look(path).expect("opened"), End::OfDevice);
    let (bytes, used) = told(&path).expect("a file's");
    assert_eq!(bytes, 8 * MIB);
    assert!((8192..MIB).contains(&used), "{used}");
    let Some(device) = losetup(&["-f".as_ref(), "--show".as_ref(), path.as_os_str()]) else {
        return println!("skipped in part: no device can be made of a file");
    };
    let found = told(Path::new(device.trim()));
    losetup(&["-d".as_ref(), device.trim().as_ref()]);
    assert_eq!(found.expect("a device's"), (8 * MIB, 8 * MIB));
}
