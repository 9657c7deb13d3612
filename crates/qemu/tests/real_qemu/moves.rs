//! Machines that move between two QEMUs, with and without disks, and saves that fail or are taken back.

use super::common::{COUNTING, Guest, Place, UID, expect_heartbeat, permit, soon};
use super::{run, saved, state};
use godwit_qemu::command_line::{BackEnd, Disk};
use godwit_qemu::device_state::{DeviceStateError, SaveNews};
use godwit_qemu::disk::open_image;
use godwit_qemu::guest_agent;
use godwit_qemu::machine::RunState;
use godwit_qemu::qmp::{Client, EventKind, QmpError};
use godwit_qemu::reserved::Reserved;
use godwit_qemu::seed;
use godwit_types::VmSpec;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Moves a counting guest and lets it run on the other side, then reboots it there.
fn moves(source: &Place, destination: &Place) {
    let (from, to) = (source.start(), destination.start());
    let events = from.machine().events();
    assert_eq!(
        from.machine().blocked_reasons(soon()).expect("reasons"),
        Vec::<String>::new()
    );
    from.machine().prepare_outgoing(soon()).expect("source");
    assert_eq!(state(&to), RunState::Inmigrate);
    let incoming = to.machine().prepare_incoming(soon()).expect("destination");
    let arrived = to.machine().events();
    run(&from);
    expect_heartbeat(&events);
    let _stopped = from.machine().stop(soon()).expect("stopped");
    source.copy_ram_to(destination);
    let devices = saved(&from);
    assert_eq!(state(&from), RunState::Postmigrate);
    let loaded = to.load(incoming, &devices).expect("loaded");
    assert_eq!((loaded, state(&to)), (RunState::Paused, RunState::Paused));
    let resumed =
        std::iter::from_fn(|| arrived.try_next()).any(|event| event.kind == EventKind::Resume);
    assert!(!resumed, "no vCPU runs before the permit");
    assert_eq!(source.counter(), destination.counter());
    run(&to);
    expect_heartbeat(&arrived);
    to.machine().announce_self(soon()).expect("announced");
    to.machine().system_reset(soon()).expect("reset");
    // The reports of the time before the reset are in the queue before it.
    let arrived = to.machine().events();
    expect_heartbeat(&arrived);
    expect_heartbeat(&arrived);
    assert_eq!(state(&from), RunState::Postmigrate);
}

#[test]
fn devices_move_and_the_guest_goes_on_and_reboots_there() {
    moves(&Place::new(COUNTING), &Place::new(COUNTING).incoming());
}

/// A place whose machine has this image as a disk, opened as QEMU's user opens it.
fn with_disk(mut place: Place, image: &Path, read_only: bool) -> Place {
    let file = open_image(image, read_only, UID, UID, &Reserved::default()).expect("the image");
    // Open until the test's process ends: the place has no room for it.
    let file: &'static OwnedFd = Box::leak(Box::new(file));
    place.spec.machine.disks = vec![Disk {
        name: "data".into(),
        read_only,
        back_end: BackEnd::Qemu {
            fd: file.as_raw_fd(),
        },
    }];
    place.spec.inherited = vec![file.as_fd()];
    place
}

fn image() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let path = directory.path().join("an image, with=signs");
    fs::write(&path, vec![7; 1 << 20]).expect("image");
    std::os::unix::fs::chown(&path, Some(UID), Some(UID)).expect("chown");
    (directory, path)
}

/// What QEMU says of its one disk, asked on the second control socket.
fn disk_of(place: &Place) -> serde_json::Value {
    let client = Client::connect(&place.spec.monitors[1], soon()).expect("second socket");
    let answer = client.execute("query-block", serde_json::json!({}), soon());
    let mut disks = answer.expect("disks").as_array().cloned().expect("a list");
    assert_eq!(disks.len(), 1, "{disks:?}");
    disks.remove(0)
}

#[test]
fn a_machine_with_a_read_only_disk_moves() {
    let (_directory, path) = image();
    let place = |place| with_disk(place, &path, true);
    let source = place(Place::new(COUNTING));
    let guest = source.start();
    let inserted = disk_of(&source)["inserted"].clone();
    assert_eq!(inserted["ro"], true);
    assert_eq!(inserted["cache"]["direct"], false);
    assert_eq!(inserted["image"]["virtual-size"], 1 << 20);
    drop(guest);
    moves(&source, &place(Place::new(COUNTING).incoming()));
}

#[test]
fn a_machine_with_a_writable_disk_runs() {
    let (_directory, path) = image();
    let place = with_disk(Place::new(COUNTING), &path, false);
    let guest = place.start();
    let disk = disk_of(&place);
    assert_eq!(disk["inserted"]["ro"], false);
    assert!(
        disk["qdev"]
            .as_str()
            .is_some_and(|device| device.contains("disk0")),
        "{disk}"
    );
    let events = guest.machine().events();
    run(&guest);
    expect_heartbeat(&events);
    let _stopped = guest.machine().stop(soon()).expect("stopped");
    let other = with_disk(Place::new(COUNTING), &path, true);
    let error = other.try_start().expect_err("in use").to_string();
    assert!(error.contains("lock"), "{error}");
}

#[test]
fn devices_move_under_kvm() {
    let source = Place::new(COUNTING).kvm();
    match source.try_start() {
        Ok(guest) => drop(Guest(guest)),
        Err(error) => return println!("skipped: {error}"),
    }
    moves(&source, &Place::new(COUNTING).kvm().incoming());
}

#[test]
fn a_save_can_be_rolled_back_and_done_again() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    let events = guest.machine().events();
    guest.machine().prepare_outgoing(soon()).expect("source");
    run(&guest);
    for _ in 0..2 {
        expect_heartbeat(&events);
        let refused = guest
            .machine()
            .save_device_state(soon(), |_| Ok(()))
            .expect_err("it runs");
        assert!(
            matches!(
                refused,
                DeviceStateError::NotPaused {
                    state: RunState::Running
                }
            ),
            "{refused}"
        );
        let _stopped = guest.machine().stop(soon()).expect("stopped");
        let counter = place.counter();
        assert!(!saved(&guest).is_empty());
        assert_eq!(
            (state(&guest), place.counter()),
            (RunState::Postmigrate, counter)
        );
        while events.try_next().is_some() {}
        let rolled_back = guest.machine().cont(permit(), soon());
        rolled_back.expect("rolled back");
    }
    expect_heartbeat(&events);
    assert_eq!(state(&guest), RunState::Running);
}

#[test]
fn a_save_whose_bytes_nobody_takes_leaves_the_guest_ready_to_go_on() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    let events = guest.machine().events();
    guest.machine().prepare_outgoing(soon()).expect("source");
    run(&guest);
    expect_heartbeat(&events);
    let _stopped = guest.machine().stop(soon()).expect("stopped");
    let full = |_: SaveNews| Err(io::Error::from(io::ErrorKind::BrokenPipe));
    let error = guest
        .machine()
        .save_device_state(soon(), full)
        .expect_err("nobody takes it");
    assert!(matches!(error, DeviceStateError::Sink(_)), "{error}");
    let past = Instant::now();
    let error = guest
        .machine()
        .save_device_state(past, |_| Ok(()))
        .expect_err("no time");
    assert!(
        matches!(error, DeviceStateError::Qmp(QmpError::Deadline { .. })),
        "{error}"
    );
    while events.try_next().is_some() {}
    let goes_on = guest.machine().cont(permit(), soon());
    goes_on.expect("goes on");
    expect_heartbeat(&events);
    let _stopped = guest.machine().stop(soon()).expect("stopped");
    assert!(!saved(&guest).is_empty(), "and can be saved after all");
}

#[test]
fn garbage_and_truncation_are_refused_by_the_destination() {
    let source = Place::new(COUNTING);
    let from = source.start();
    from.machine().prepare_outgoing(soon()).expect("source");
    let devices = saved(&from);
    let half = &devices[..devices.len() / 2];
    for bytes in [&b"not a migration stream at all"[..], half, b""] {
        let destination = Place::new(COUNTING).incoming();
        let to = destination.start();
        let incoming = to.machine().prepare_incoming(soon()).expect("destination");
        let error = to.load(incoming, bytes).expect_err("must fail");
        assert!(
            matches!(error, DeviceStateError::Failed { doing: "load", .. }),
            "{error}"
        );
        println!("{} bytes: {error}", bytes.len());
    }
}

/// A place whose machine has a port for its guest's agent, and a seed of this description.
fn with_seed(mut place: Place) -> Place {
    let text = "name = \"tiny\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\n[cloud_init]\nuser_data = \"#!/bin/sh\\n\"\n";
    let spec = VmSpec::from_toml(text).expect("a description");
    let seed = seed::open_for(&spec).expect("memory").expect("a seed");
    let socket = place.spec.machine.ram_file.with_file_name("agent");
    let listener = guest_agent::listen(&socket).expect("a socket");
    // Open until the test's process ends: the place has no room for them.
    let seed: &'static OwnedFd = Box::leak(Box::new(seed));
    let listener: &'static UnixListener = Box::leak(Box::new(listener));
    place.spec.machine.hardware = 3;
    place.spec.machine.seed_fd = Some(seed.as_raw_fd());
    place.spec.machine.agent_fd = Some(listener.as_raw_fd());
    place.spec.inherited = vec![seed.as_fd(), listener.as_fd()];
    place
}

#[test]
fn a_machine_with_a_seed_and_a_port_for_its_agent_moves() {
    let (source, destination) = (
        with_seed(Place::new(COUNTING)),
        with_seed(Place::new(COUNTING).incoming()),
    );
    moves(&source, &destination);
}

#[test]
fn a_guest_without_an_agent_is_known_to_have_none() {
    let place = with_seed(Place::new(COUNTING));
    let guest = place.start();
    assert!(!guest.machine().has_agent(soon()).expect("an answer"));
    let older = Place::new(COUNTING).start();
    assert!(!older.machine().has_agent(soon()).expect("an answer"));
}
