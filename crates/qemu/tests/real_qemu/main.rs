//! The crate against the QEMU that is installed, with guests of a few bytes.

#[path = "../common/mod.rs"]
mod common;
mod console;
mod moves;

use common::{COUNTING, FILLED, Guest, Place, UID, expect_event, expect_heartbeat, permit, soon};
use godwit_qemu::command_line::{Accelerator, Nic};
use godwit_qemu::device_state::SaveNews;
use godwit_qemu::launch::{Handout, LaunchError, LaunchSpec, adopt, launch};
use godwit_qemu::machine::RunState;
use godwit_qemu::packet::PacketSocket;
use godwit_qemu::process::{ProcessError, QemuProcess};
use godwit_qemu::qmp::{Client, EventKind, QmpError};
use godwit_qemu::tap::Tap;
use godwit_qemu::throttle::{Throttle, ThrottleError};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn run(guest: &Guest) {
    guest.machine().cont(permit(), soon()).expect("cont");
}

fn state(guest: &Guest) -> RunState {
    guest.machine().query_status(soon()).expect("a state")
}

fn signal(guest: &Guest, name: &str) {
    let pid = guest.0.process.pid().to_string();
    assert!(
        Command::new("kill")
            .args([name, &pid])
            .status()
            .expect("kill")
            .success()
    );
}

fn saved(guest: &Guest) -> Vec<u8> {
    let mut bytes = Vec::new();
    let sink = |news: SaveNews| {
        if let SaveNews::Piece(piece) = news {
            bytes.extend_from_slice(piece);
        }
        Ok(())
    };
    let count = guest
        .machine()
        .save_device_state(soon(), sink)
        .expect("saved");
    assert_eq!(count, bytes.len() as u64);
    bytes
}

fn status_field(guest: &Guest, file: &str, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{}/{file}", guest.0.process.pid())).expect("proc");
    let line = text
        .lines()
        .find(|line| line.starts_with(field))
        .expect("field");
    line.trim_start_matches(field)
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn it_starts_unprivileged_sandboxed_and_stopped() {
    let place = Place::new(COUNTING);
    let own = "/proc/self/oom_score_adj";
    let before = fs::read_to_string(own).expect("score");
    fs::write(own, "300").expect("anybody may raise it");
    let guest = place.start();
    fs::write(own, before.trim()).expect("as it was");
    let events = guest.machine().events();
    assert_eq!(state(&guest), RunState::Prelaunch);
    assert_eq!(
        status_field(&guest, "status", "Uid:"),
        format!("{UID} {UID} {UID} {UID}")
    );
    assert_eq!(
        status_field(&guest, "status", "Gid:"),
        format!("{UID} {UID} {UID} {UID}")
    );
    assert_eq!(status_field(&guest, "status", "Groups:"), "");
    assert_eq!(
        status_field(&guest, "status", "CapEff:"),
        "0000000000000000"
    );
    assert_eq!(status_field(&guest, "status", "NoNewPrivs:"), "1");
    assert_eq!(status_field(&guest, "status", "Seccomp:"), "2");
    assert_eq!(
        status_field(&guest, "limits", "Max core file size"),
        "0 0 bytes"
    );
    let oom = format!("/proc/{}/oom_score_adj", guest.0.process.pid());
    assert_eq!(fs::read_to_string(oom).expect("score").trim(), "0");
    let memory = place.spec.machine.memory_mib << 20;
    assert_eq!(
        status_field(&guest, "limits", "Max file size"),
        format!("{memory} {memory} bytes")
    );
    let mode =
        |path: &std::path::Path| fs::metadata(path).expect("socket").permissions().mode() & 0o777;
    let socket = &place.spec.monitors[0];
    assert_eq!(
        (mode(socket), mode(socket.parent().expect("directory"))),
        (0o600, 0o700)
    );
    assert!(guest.machine().version() >= (7, 2, 0));
    assert_eq!(
        guest.machine().console_news(soon()).expect("console"),
        b"",
        "nothing has run"
    );
    assert!(
        events.try_next().is_none(),
        "nothing happens before the permit"
    );
}

#[test]
fn it_inherits_no_descriptor_but_those_it_is_given() {
    let place = Place::new(COUNTING);
    // A descriptor that a careless library has left open for children.
    let leak =
        fs::File::create(place.spec.machine.ram_file.with_file_name("leak")).expect("a file");
    rustix::io::fcntl_setfd(&leak, rustix::io::FdFlags::empty()).expect("no close-on-exec");
    let leaked = fs::read_link(format!("/proc/self/fd/{}", leak.as_raw_fd())).expect("its path");
    let guest = place.start();
    let directory =
        fs::read_dir(format!("/proc/{}/fd", guest.0.process.pid())).expect("descriptors");
    let targets: Vec<_> = directory
        .map(|entry| fs::read_link(entry.expect("entry").path()))
        .collect();
    assert!(targets.len() > 5, "{targets:?}");
    assert!(
        !targets.iter().flatten().any(|target| *target == leaked),
        "{targets:?}"
    );
}

#[test]
fn a_stop_is_told_with_its_time_and_a_cont_with_its_generation() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    let events = guest.machine().events();
    run(&guest);
    expect_heartbeat(&events);
    assert_eq!(state(&guest), RunState::Running);
    let before = Instant::now();
    let stopped = guest.machine().stop(soon()).expect("stopped");
    assert!(stopped.at >= before && stopped.state == RunState::Paused);
    let counter = place.counter();
    let again = guest.machine().stop(soon()).expect("a second time is fine");
    assert_eq!((again.state, place.counter()), (RunState::Paused, counter));
    let again = guest.machine().cont(permit(), soon());
    assert_eq!(again.expect("another permit"), common::GENERATION);
    expect_heartbeat(&events);
}

#[test]
fn a_guest_that_powers_off_leaves_its_hypervisor_paused() {
    let place = Place::new(&common::powering_off());
    let guest = place.start();
    let events = guest.machine().events();
    run(&guest);
    expect_event(&events, |kind| {
        matches!(kind, EventKind::Shutdown { guest: true, .. })
    });
    expect_event(&events, |kind| *kind == EventKind::Stop);
    assert_eq!(state(&guest), RunState::Shutdown);
    assert!(guest.0.process.is_alive());
    let stopped = guest.machine().stop(soon()).expect("stopped already");
    assert_eq!(stopped.state, RunState::Shutdown, "a stop does not hide it");
    let console = guest.machine().console_news(soon()).expect("console");
    assert!(
        console.ends_with(b"GW"),
        "{}",
        String::from_utf8_lossy(&console)
    );
    let again = guest.machine().console_news(soon()).expect("console");
    assert_eq!(again, b"", "each byte is given away once");
    let unsavable = guest
        .machine()
        .save_device_state(soon(), |_| Ok(()))
        .expect_err("off");
    assert_eq!(
        unsavable.to_string(),
        "the guest is 'Shutdown': its devices are saved only while it is paused"
    );
    let refused = guest
        .machine()
        .cont(permit(), soon())
        .expect_err("needs a reset");
    assert!(!refused.maybe_running, "{refused}");
    guest.machine().system_reset(soon()).expect("reset");
    assert_eq!(state(&guest), RunState::Prelaunch);
    guest
        .machine()
        .cont(refused.permit, soon())
        .expect("the permit came back");
    expect_event(&events, |kind| {
        matches!(kind, EventKind::Shutdown { guest: true, .. })
    });
}

#[test]
fn a_guest_that_panics_is_paused() {
    let place = Place::new(&common::panicking());
    let guest = place.start();
    let events = guest.machine().events();
    run(&guest);
    expect_event(&events, |kind| *kind == EventKind::GuestPanicked);
    expect_event(&events, |kind| *kind == EventKind::Stop);
    assert_eq!(state(&guest), RunState::GuestPanicked);
}

#[test]
fn a_guest_that_resets_goes_on() {
    let place = Place::new(&common::resetting());
    let guest = place.start();
    let events = guest.machine().events();
    run(&guest);
    for _ in 0..2 {
        expect_event(&events, |kind| *kind == EventKind::Reset { guest: true });
    }
    assert_eq!(state(&guest), RunState::Running);
}

#[test]
fn kvm_that_its_user_may_not_open_is_refused_before_it_starts() {
    let mut place = Place::new(COUNTING);
    place.spec.machine.accelerator = Accelerator::Kvm;
    let device =
        fs::metadata("/dev/kvm").map(|device| (device.permissions().mode() & 0o777, device.gid()));
    if let Ok((mode, gid)) = device
        && (mode & 0o006 != 0 || (mode & 0o060 != 0 && gid != 0))
    {
        return println!(
            "skipped: /dev/kvm has mode {mode:o} and group {gid}, so QEMU's user may open it"
        );
    }
    let error = place.try_start().expect_err("no access").to_string();
    assert!(
        error.starts_with("user 61234 may not open /dev/kvm: "),
        "{error}"
    );
}

#[test]
fn a_hypervisor_that_dies_ends_the_pending_command() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    let monitor = place.spec.monitors[1].clone();
    let other = Client::connect(&monitor, soon()).expect("the second control socket");
    signal(&guest, "-STOP");
    let asked = std::thread::spawn(move || other.execute("stop", serde_json::json!({}), soon()));
    let silent = guest
        .machine()
        .query_status(Instant::now() + Duration::from_millis(50))
        .expect_err("it sleeps");
    assert!(matches!(silent, QmpError::Deadline { .. }), "{silent}");
    signal(&guest, "-KILL");
    let error = asked.join().expect("thread").expect_err("dead");
    assert_eq!(
        error.to_string(),
        "the hypervisor closed its control socket"
    );
    guest.0.process.wait_exit(soon()).expect("gone");
    assert!(!guest.0.process.is_alive());
    let failed = guest.machine().cont(permit(), soon()).expect_err("dead");
    assert!(matches!(failed.source, QmpError::Closed), "{failed}");
}

#[test]
fn a_successor_takes_the_hypervisor_over() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    run(&guest);
    let (pid, started) = (guest.0.process.pid(), guest.0.process.start_time_ticks());
    let monitor = &place.spec.monitors[0];
    // What is left when the process that started it is gone: the record, and the path.
    let Guest(first) = &guest;
    let second = QemuProcess::adopt(pid, started).expect("identity");
    assert!(matches!(
        adopt(pid, started + 1, monitor, soon()),
        Err(LaunchError::Process(ProcessError::Gone { .. }))
    ));
    assert!(second.is_alive() && first.process.is_alive());
    let busy = adopt(
        pid,
        started,
        monitor,
        Instant::now() + Duration::from_millis(50),
    )
    .expect_err("in use");
    assert!(
        matches!(
            busy,
            LaunchError::Control {
                source: QmpError::Deadline { .. },
                ..
            }
        ),
        "{busy}"
    );
    let orphan = Orphan::of(guest);
    let adopted = adopt(pid, started, monitor, soon()).expect("taken over");
    assert_eq!(
        adopted.machine.query_status(soon()).expect("a state"),
        RunState::Running
    );
    let events = adopted.machine.events();
    expect_heartbeat(&events);
    assert_eq!(adopted.machine.stderr_tail(), "it wrote nothing");
    adopted.process.kill_verified(soon()).expect("killed");
    orphan.0.wait_exit(soon()).expect("the same process");
}

/// A process without a control connection, as the death of the connection's owner leaves it. Ends with the test.
struct Orphan(QemuProcess);

impl Orphan {
    fn of(guest: Guest) -> Orphan {
        let process = QemuProcess::adopt(guest.0.process.pid(), guest.0.process.start_time_ticks());
        let orphan = Orphan(process.expect("the same process"));
        let guest = std::mem::ManuallyDrop::new(guest);
        // SAFETY: read out once of a value whose destructor never runs.
        drop(unsafe { std::ptr::read(&guest.0) });
        orphan
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = self.0.kill_verified(soon());
    }
}

#[test]
fn a_hypervisor_that_cannot_start_says_why_and_is_gone() {
    let mut place = Place::new(COUNTING);
    place.spec.machine.machine_type = "abacus".into();
    match place.try_start() {
        Err(LaunchError::Ended { stderr }) => {
            assert!(stderr.contains("unsupported machine type"), "{stderr}")
        }
        other => panic!("{other:?}"),
    }
    place.spec.binary = "/no/such/qemu".into();
    let error = place.try_start().expect_err("no program").to_string();
    assert!(error.starts_with("cannot start /no/such/qemu: "), "{error}");
}

#[test]
fn a_program_that_never_answers_is_ended_at_the_deadline() {
    let mut place = Place::new(COUNTING);
    let script = place.spec.machine.ram_file.with_file_name("mute");
    write_program(&script, "echo thinking >&2; exec sleep 600");
    place.spec.binary = script;
    let deadline = Instant::now() + Duration::from_secs(3);
    let error = launch(&place.spec, deadline).expect_err("mute");
    // The sleeping program holds the listening socket as QEMU would, so only the deadline ends this.
    let want = "the hypervisor did not answer 'greeting' in time; it said: thinking";
    assert_eq!(error.to_string(), want);
    assert!(deadline.elapsed() < Duration::from_secs(60));
}

/// Written by a child: a descriptor of ours that is open for writing may be held by a child that another test has just
/// forked, and then the program cannot be run.
fn write_program(path: &Path, script: &str) {
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\"";
    let status = Command::new("sh")
        .args(["-c", write])
        .arg(path)
        .arg(script)
        .status();
    assert!(status.expect("sh").success());
}

#[test]
fn vcpus_are_known_and_can_be_slowed() {
    let mut place = Place::new(COUNTING);
    place.spec.machine.vcpus = 2;
    let guest = place.start();
    let events = guest.machine().events();
    run(&guest);
    expect_heartbeat(&events);
    let threads = guest.machine().vcpu_thread_ids(soon()).expect("threads");
    assert_eq!(threads.len(), 2);
    let task = |thread| format!("/proc/{}/task/{thread}/comm", guest.0.process.pid());
    assert!(
        threads.iter().all(
            |thread| fs::read_to_string(task(thread)).is_ok_and(|name| name.starts_with("CPU"))
        )
    );
    let mut throttle = match Throttle::prepare(guest.0.process.pid(), &threads) {
        Ok(throttle) => throttle,
        Err(error @ (ThrottleError::NoController | ThrottleError::Io { .. })) => {
            return println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    };
    let shares = threads.iter().map(|_| 0.1);
    throttle.set_shares(shares).expect("slowed");
    expect_heartbeat(&events);
    throttle.release().expect("released");
    let _stopped = guest.machine().stop(soon()).expect("stopped");
}

#[test]
fn a_host_check_can_ask_what_this_qemu_offers() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    let types = guest.machine().machine_types(soon()).expect("types");
    let q35 = types
        .iter()
        .find(|kind| kind.alias.as_deref() == Some("q35"))
        .expect("q35");
    assert!(q35.name.starts_with("pc-q35-"), "{q35:?}");
    let models = guest.machine().cpu_models(soon()).expect("models");
    assert!(models.iter().any(|model| model.name == "qemu64"));
    let features = guest
        .machine()
        .cpu_features("max", soon())
        .expect("features");
    assert_eq!(features.get("sse2"), Some(&true));
    let error = guest
        .machine()
        .cpu_features("abacus", soon())
        .expect_err("unknown");
    assert!(matches!(error, QmpError::Refused { .. }), "{error}");
}

#[test]
fn the_handout_library_and_its_descriptors_reach_the_hypervisor() {
    let place = Place::new(COUNTING);
    let listener = std::os::unix::net::UnixListener::bind(
        place.spec.machine.ram_file.with_file_name("handout"),
    );
    let (listener, device) = (listener.expect("listener"), place.ram());
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    // Any library that QEMU would not load by itself at this place stands in for the real one.
    let library = maps
        .split_whitespace()
        .find(|word| word.ends_with("/libc.so.6"))
        .expect("a C library");
    let copy = place.spec.machine.ram_file.with_file_name("handout.so");
    fs::copy(library, &copy).expect("copied");
    let library = fs::File::open(&copy).expect("the copy");
    let handout = Handout {
        library: library.as_fd(),
        uffd_device: device.as_fd(),
        listener: listener.as_fd(),
    };
    let spec = LaunchSpec {
        handout: Some(handout),
        ..place.spec.clone()
    };
    let guest = Guest(launch(&spec, soon()).expect("a hypervisor"));
    let proc = |name: &str| format!("/proc/{}/{name}", guest.0.process.pid());
    let environment = fs::read_to_string(proc("environ")).expect("environment");
    let numbers = (device.as_raw_fd(), listener.as_raw_fd());
    for (name, number) in [
        ("GODWIT_HANDOUT_LIBRARY_FD", library.as_raw_fd()),
        ("GODWIT_UFFD_DEVICE_FD", numbers.0),
        ("GODWIT_HANDOUT_LISTEN_FD", numbers.1),
    ] {
        assert!(
            environment
                .split('\0')
                .any(|entry| entry == format!("{name}={number}")),
            "{environment}"
        );
        let path =
            |process: &str| fs::read_link(format!("/proc/{process}/fd/{number}")).expect("open");
        assert_eq!(
            path(&guest.0.process.pid().to_string()),
            path("self"),
            "{name}"
        );
    }
    let names: Vec<_> = environment
        .split('\0')
        .filter_map(|entry| entry.split('=').next())
        .collect();
    assert_eq!(
        names.iter().filter(|name| !name.is_empty()).count(),
        6,
        "nothing of ours: {names:?}"
    );
    assert!(
        fs::read_to_string(proc("maps"))
            .expect("maps")
            .contains(&*copy.to_string_lossy())
    );
}

/// The frames that teach a bridge where the guest is come out of the guest's own port, and only after `cont`.
#[test]
fn a_guest_on_a_tap_is_announced() {
    // SAFETY: moves this thread, which ends with the test, into a network namespace of its own.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return println!(
            "skipped: network namespaces need root ({})",
            io::Error::last_os_error()
        );
    }
    for arguments in ["link add vmnet type bridge", "link set vmnet up"] {
        assert!(
            Command::new("ip")
                .args(arguments.split(' '))
                .status()
                .expect("ip")
                .success()
        );
    }
    let tap = Tap::create("gwtap0", "vmnet").expect("a tap");
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    let mut place = Place::new(COUNTING);
    place.spec.machine.nics = vec![Nic {
        mac,
        tap_fd: tap.as_fd().as_raw_fd(),
    }];
    let refused = place.try_start().expect_err("the tap is not passed on");
    assert!(
        matches!(refused, LaunchError::Descriptor { .. }),
        "{refused}"
    );
    let spec = LaunchSpec {
        inherited: vec![tap.as_fd()],
        ..place.spec.clone()
    };
    let guest = Guest(launch(&spec, soon()).expect("a hypervisor"));
    let frames = PacketSocket::open("vmnet", 0x8035).expect("packets");
    run(&guest);
    guest.machine().announce_self(soon()).expect("announced");
    let frame = frames.receive(soon()).expect("received").expect("in time");
    assert_eq!(
        frame,
        godwit_qemu::announce::rarp(mac),
        "and ours is the same, byte for byte"
    );
}

#[test]
fn quit_ends_the_process() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    guest.machine().quit(soon()).expect("asked");
    guest.0.process.wait_exit(soon()).expect("gone");
}

#[test]
fn what_the_counting_guest_writes_is_seen_in_the_ram_file() {
    let place = Place::new(COUNTING);
    let guest = place.start();
    let events = guest.machine().events();
    run(&guest);
    expect_heartbeat(&events);
    let _stopped = guest.machine().stop(soon()).expect("stopped");
    let mut filled = vec![0; (FILLED.end - FILLED.start) as usize];
    place
        .ram()
        .read_exact_at(&mut filled, FILLED.start)
        .expect("read");
    let values: std::collections::BTreeSet<_> = filled
        .as_chunks::<2>()
        .0
        .iter()
        .map(|w| u16::from_le_bytes(*w))
        .collect();
    let counter = place.counter();
    let want = [counter, counter.wrapping_sub(1)];
    assert!(
        values.iter().all(|value| want.contains(value)),
        "{values:?} beside {counter}"
    );
}
