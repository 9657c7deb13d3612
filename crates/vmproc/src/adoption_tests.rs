//! A QEMU that lives when its VM process starts: what is taken over, waited for, and ended.

use super::*;
use crate::testing::{Site, now};
use godwit_ownership::{Phase, Power};
use godwit_types::host_api::VmRequest;
use godwit_types::vm::Accelerator;
use godwit_types::{Generation, HostName, MigrationId};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;

/// A process that stands for a QEMU whose control socket somebody else speaks for, or nobody.
struct Scene {
    directory: std::path::PathBuf,
    config: VmProcessConfig,
    child: Child,
}

impl Scene {
    fn new(name: &str) -> Self {
        let directory =
            Path::new("/dev/shm").join(format!("godwit-adopt-{}-{name}", std::process::id()));
        let at = |name: &str| directory.join(name).to_string_lossy().into_owned();
        let config = VmProcessConfig {
            vm: "web".to_owned().try_into().unwrap(),
            host: "a".to_owned().try_into().unwrap(),
            state_dir: at("state/vms/web"),
            run_dir: at("run"),
            ram_dir: at("ram"),
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            qemu_uid: 65534,
            qemu_gid: 65534,
            migration_ports: (0, 0),
            port_groups: Default::default(),
            migration_addresses: Vec::new(),
            accelerator: Accelerator::Tcg,
            uefi_code: String::new(),
            uefi_variables: String::new(),
            reserved_dirs: Vec::new(),
        };
        for dir in ["state/vms/web", "run/qemu", "ram"] {
            std::fs::create_dir_all(directory.join(dir)).unwrap();
        }
        let child = Command::new("sleep")
            .arg("600")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            directory,
            config,
            child,
        }
    }

    fn known(&self, paths: &Paths) {
        let pid = self.child.id() as i32;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields = stat.rsplit_once(')').unwrap().1;
        let identity = QemuIdentity {
            pid,
            start_time_ticks: fields.split_whitespace().nth(19).unwrap().parse().unwrap(),
            accelerator: Accelerator::Tcg,
            launch: 1,
        };
        save_json(&paths.identity(), &identity).unwrap();
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn ask(inputs: &Sender<Input>, request: VmRequest) -> Receiver<VmAnswer> {
    let (reply, answer) = sync_channel(1);
    inputs
        .send(Input::Now(Request {
            ask: now(request).unwrap(),
            reply,
        }))
        .unwrap();
    answer
}

/// Speaks just enough QMP for a take-over, on one connection, once `silence` is over.
fn answer_late(path: &Path, first_words: Receiver<()>) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        first_words.recv().unwrap();
        for stream in listener.incoming().flatten() {
            let mut writer = stream.try_clone().unwrap();
            let greeting = r#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":0},"package":""},"capabilities":[]}}"#;
            // A connection that gave up while nobody spoke is closed by now.
            if writeln!(writer, "{greeting}").is_err() {
                continue;
            }
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let request: serde_json::Value = serde_json::from_str(&line).unwrap();
                let result = match request["execute"].as_str() {
                    Some("query-status") => {
                        serde_json::json!({"status": "running", "running": true, "singlestep": false})
                    }
                    _ => serde_json::json!({}),
                };
                let answer = serde_json::json!({"return": result, "id": request["id"]});
                if writeln!(writer, "{answer}").is_err() {
                    break;
                }
            }
        }
    });
}

#[test]
fn a_hypervisor_that_lives_is_waited_for_and_never_ended() {
    let scene = Scene::new("late");
    let paths = Paths::of(&scene.config);
    scene.known(&paths);
    let ram = paths.ram_file(1);
    godwit_guestmem::RamFile::create(&ram, 16 << 20, None).unwrap();
    let (speak, first_words) = channel();
    answer_late(&paths.monitor(1, 0), first_words);
    let record = HostRecord {
        highest: Generation(2),
        held: Generation(2),
        phase: holds(),
        ..HostRecord::absent(scene.config.vm.clone())
    };
    let spec =
        VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/boot/vmlinuz\"")
            .unwrap();
    let (inputs, received) = channel();
    let status = ask(&inputs, VmRequest::Status);
    let start = ask(&inputs, VmRequest::Start);
    let adopted = std::thread::scope(|scope| {
        let known = Known {
            config: &scene.config,
            paths: &paths,
            record: &record,
            spec: Some(&spec),
            handed: Handed::default(),
        };
        let adopting = scope.spawn(move || adopt(&known, &inputs, &received));
        let wait = Duration::from_secs(60);
        let VmAnswer::Status(status) = status.recv_timeout(wait).unwrap() else {
            panic!("no status");
        };
        assert_eq!(status.vm.state, VmState::Unreachable);
        assert!(status.vm.note.unwrap().contains("may be running"));
        let VmAnswer::Error(refused) = start.recv_timeout(wait).unwrap() else {
            panic!("nothing may be started");
        };
        assert_eq!(refused.code, ErrorCode::Hypervisor);
        speak.send(()).unwrap();
        adopting.join().unwrap()
    });
    assert!(
        matches!(adopted, Ok(Looked::Taken(_, RunState::Running))),
        "it was slow, no more"
    );
}

#[test]
fn a_forced_stop_gives_a_silent_hypervisor_up_and_reaches_the_core() {
    let mut scene = Scene::new("silent");
    let paths = Paths::of(&scene.config);
    scene.known(&paths);
    let record = HostRecord {
        highest: Generation(2),
        held: Generation(2),
        phase: holds(),
        ..HostRecord::absent(scene.config.vm.clone())
    };
    let known = Known {
        config: &scene.config,
        paths: &paths,
        record: &record,
        spec: None,
        handed: Handed::default(),
    };
    let (inputs, received) = channel();
    let _answer = ask(&inputs, VmRequest::Stop { force: true });
    assert!(matches!(
        adopt(&known, &inputs, &received),
        Ok(Looked::None)
    ));
    assert!(
        matches!(scene.child.try_wait(), Ok(Some(_)) | Err(_)),
        "it is gone"
    );
    assert!(matches!(
        received.try_recv(),
        Ok(Input::Now(Request {
            ask: Now::Stop { force: true },
            ..
        }))
    ));
}

#[test]
fn a_forced_stop_that_comes_before_the_second_look_is_done_and_not_refused() {
    let mut scene = Scene::new("early");
    let paths = Paths::of(&scene.config);
    scene.known(&paths);
    let record = HostRecord::absent(scene.config.vm.clone());
    let known = Known {
        config: &scene.config,
        paths: &paths,
        record: &record,
        spec: None,
        handed: Handed::default(),
    };
    let (inputs, received) = channel();
    let answer = ask(&inputs, VmRequest::Stop { force: true });
    let adopted = adopt(&known, &inputs, &received);
    assert!(matches!(adopted, Ok(Looked::None)));
    let answer = answer.try_recv();
    assert!(matches!(answer, Ok(VmAnswer::Done(_))), "{answer:?}");
    assert!(matches!(scene.child.try_wait(), Ok(Some(_)) | Err(_)));
    assert!(received.try_recv().is_err(), "the core knows of no guest");
}

fn holds() -> Phase {
    Phase::Holds {
        generation: Generation(2),
        power: Power::On,
        unconfirmed: None,
    }
}

/// The place of a VM process on this host that knows no description.
fn known<'a>(site: &'a Site, record: &'a HostRecord) -> Known<'a> {
    Known {
        config: &site.config,
        paths: &site.paths,
        record,
        spec: None,
        handed: Handed::default(),
    }
}

fn record(site: &Site, phase: Phase) -> HostRecord {
    let held = if matches!(phase, Phase::Holds { .. }) {
        2
    } else {
        0
    };
    HostRecord {
        highest: Generation(2),
        held: Generation(held),
        phase,
        ..HostRecord::absent(site.config.vm.clone())
    }
}

#[test]
fn a_hypervisor_whose_identity_was_wiped_is_taken_over() {
    let site = Site::new();
    let mut qemu = site.qemu(&["running"]);
    std::fs::remove_file(site.paths.identity()).unwrap();
    let (record, (inputs, received)) = (record(&site, holds()), channel());
    let known = known(&site, &record);
    let adopted = adopt(&known, &inputs, &received);
    let Ok(Looked::Taken(hyper, RunState::Running)) = adopted else {
        panic!("it is not taken over");
    };
    assert_eq!(hyper.pid(), qemu.child.id() as i32);
    assert!(!qemu.is_gone() && site.paths.identity().exists());
    assert!(site.paths.ram_file(1).exists());
}

#[test]
fn a_second_hypervisor_that_may_run_the_guest_is_left_alone_beside_a_known_one() {
    let site = Site::new();
    let mut cut_short = site.qemu_of(3, &["prelaunch"]);
    let mut second = site.qemu_of(2, &["running"]);
    let mut qemu = site.qemu_of(1, &["running"]);
    let (record, (inputs, received)) = (record(&site, holds()), channel());
    let known = known(&site, &record);
    let adopted = adopt(&known, &inputs, &received);
    let Ok(Looked::Taken(hyper, RunState::Running)) = adopted else {
        panic!("it is not taken over");
    };
    assert_eq!(hyper.pid(), qemu.child.id() as i32);
    assert!(!qemu.is_gone() && !second.is_gone() && cut_short.is_gone());
}

#[test]
fn a_hypervisor_that_ends_before_it_answers_is_followed_by_the_next_that_may_run_the_guest() {
    // With the identity file of the first one, and with none.
    for is_known in [true, false] {
        let site = Site::new();
        let mut second = site.qemu_of(2, &["running"]);
        let mut first = site.qemu_of(1, &["running"]);
        first.hangs_at(Some("query-status"));
        if !is_known {
            std::fs::remove_file(site.paths.identity()).unwrap();
        }
        let (record, (inputs, received)) = (record(&site, holds()), channel());
        let status = ask(&inputs, VmRequest::Status);
        let adopted = std::thread::scope(|scope| {
            let known = known(&site, &record);
            let adopting = scope.spawn(move || adopt(&known, &inputs, &received));
            // It is waited for by now.
            status.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(!second.is_gone());
            first.child.kill().unwrap();
            // Whoever looks first whether it lives collects it.
            let _ = first.child.wait();
            adopting.join().unwrap()
        });
        let Ok(Looked::Taken(hyper, RunState::Running)) = adopted else {
            panic!("a guest may run there that nobody looks at");
        };
        assert_eq!(hyper.pid(), second.child.id() as i32);
        assert!(site.paths.ram_file(2).exists());
    }
}

#[test]
fn a_start_that_was_cut_short_hides_no_guest_that_runs() {
    let site = Site::new();
    let mut second = site.qemu_of(2, &["running"]);
    let mut first = site.qemu_of(1, &["prelaunch"]);
    std::fs::remove_file(site.paths.identity()).unwrap();
    let (record, (inputs, received)) = (record(&site, holds()), channel());
    let known = known(&site, &record);
    let Ok(Looked::Taken(hyper, RunState::Running)) = adopt(&known, &inputs, &received) else {
        panic!("a guest may run there that nobody looks at");
    };
    assert_eq!(hyper.pid(), second.child.id() as i32);
    assert!(first.is_gone() && !second.is_gone());
}

#[test]
fn a_forced_stop_of_a_vm_with_two_hypervisors_leaves_none() {
    let site = Site::new();
    let mut second = site.qemu_of(2, &["running"]);
    let mut first = site.qemu_of(1, &["running"]);
    let (record, (inputs, received)) = (record(&site, Phase::Absent), channel());
    let known = known(&site, &record);
    let answer = ask(&inputs, VmRequest::Stop { force: true });
    assert!(matches!(
        adopt(&known, &inputs, &received),
        Ok(Looked::None)
    ));
    assert!(matches!(answer.try_recv(), Ok(VmAnswer::Done(_))));
    assert!(first.is_gone() && second.is_gone(), "one may run the guest");
}

#[test]
fn a_hypervisor_whose_start_was_cut_short_is_ended() {
    let site = Site::new();
    let mut qemu = site.qemu(&["prelaunch"]);
    std::fs::remove_file(site.paths.identity()).unwrap();
    let (record, (inputs, received)) = (record(&site, holds()), channel());
    let known = known(&site, &record);
    assert!(matches!(
        adopt(&known, &inputs, &received),
        Ok(Looked::None)
    ));
    assert!(qemu.is_gone());
}

#[test]
fn a_hypervisor_of_a_vm_that_is_not_held_here_and_never_ran_is_ended() {
    let moved = Phase::Moved {
        generation: Generation(2),
        migration: MigrationId::new("m").unwrap(),
        to: HostName::new("a").unwrap(),
    };
    for phase in [Phase::Absent, moved] {
        let site = Site::new();
        let mut qemu = site.qemu(&["inmigrate"]);
        std::fs::remove_file(site.paths.identity()).unwrap();
        let (record, (inputs, received)) = (record(&site, phase), channel());
        let known = known(&site, &record);
        assert!(matches!(
            adopt(&known, &inputs, &received),
            Ok(Looked::None)
        ));
        assert!(qemu.is_gone());
    }
}

/// Records by which no guest of the VM may run, and whether the identity file is there beside them: a run directory may
/// have been emptied of it.
fn records_that_deny_a_guest() -> [(Phase, bool); 6] {
    let (migration, other) = (MigrationId::new("m").unwrap(), HostName::new("a").unwrap());
    let moved = Phase::Moved {
        generation: Generation(2),
        migration: migration.clone(),
        to: other.clone(),
    };
    let incoming = Phase::Incoming {
        migration: migration.clone(),
        from: other.clone(),
    };
    let ready = Phase::Ready {
        generation: Generation(2),
        migration: migration.clone(),
        from: other.clone(),
    };
    let gave = Phase::Gave {
        generation: Generation(2),
        migration,
        to: other,
    };
    [
        (Phase::Absent, true),
        (Phase::Absent, false),
        (moved, true),
        (incoming, true),
        (ready, true),
        (gave, true),
    ]
}

#[test]
fn a_guest_that_an_older_copy_of_its_record_denies_lives_and_is_told_of() {
    for (phase, is_known) in records_that_deny_a_guest() {
        let site = Site::new();
        let mut qemu = site.qemu(&["running"]);
        if !is_known {
            std::fs::remove_file(site.paths.identity()).unwrap();
        }
        let record = record(&site, phase);
        let (inputs, received) = channel();
        std::thread::scope(|scope| {
            let known = known(&site, &record);
            let own = inputs.clone();
            let adopting = scope.spawn(move || adopt(&known, &own, &received));
            let claim = loop {
                let asked = ask(
                    &inputs,
                    VmRequest::Survey {
                        level: Generation(9),
                    },
                );
                match asked.recv_timeout(Duration::from_secs(60)).unwrap() {
                    VmAnswer::Surveyed(answer) => break answer.claim,
                    // It is looked at a second time before anything is said.
                    VmAnswer::Error(_) => std::thread::yield_now(),
                    other => panic!("no answer to a survey: {other:?}"),
                }
            };
            assert!(matches!(claim, Claim::Holds { .. }), "{claim:?}");
            let status = ask(&inputs, VmRequest::Status);
            let Ok(VmAnswer::Status(status)) = status.recv_timeout(Duration::from_secs(60)) else {
                panic!("no status");
            };
            assert_eq!(status.vm.state, VmState::Unreachable);
            let note = status.vm.note.unwrap();
            assert!(note.contains("older copy") && note.contains("--force --host b"));
            assert!(!qemu.is_gone());
            let stopped = ask(&inputs, VmRequest::Stop { force: true });
            assert!(matches!(adopting.join().unwrap(), Ok(Looked::None)));
            assert!(matches!(stopped.try_recv(), Ok(VmAnswer::Done(_))));
        });
        assert!(qemu.is_gone());
    }
}

#[test]
fn a_wiped_run_directory_kills_no_guest_until_a_person_does() {
    let site = Site::new();
    let mut qemu = site.qemu(&["running"]);
    std::fs::remove_dir_all(&site.paths.run).unwrap();
    std::fs::create_dir_all(&site.paths.run).unwrap();
    let record = record(&site, holds());
    let spec =
        VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/boot/vmlinuz\"")
            .unwrap();
    let (inputs, received) = channel();
    let status = ask(&inputs, VmRequest::Status);
    let boot = ask(&inputs, VmRequest::Boot);
    std::thread::scope(|scope| {
        let known = Known {
            config: &site.config,
            paths: &site.paths,
            record: &record,
            spec: Some(&spec),
            handed: Handed::default(),
        };
        let own = inputs.clone();
        let adopting = scope.spawn(move || adopt(&known, &own, &received));
        let wait = Duration::from_secs(60);
        let VmAnswer::Status(status) = status.recv_timeout(wait).unwrap() else {
            panic!("no status");
        };
        assert_eq!(status.vm.state, VmState::Unreachable);
        assert_eq!(status.vm.qemu_pid, Some(qemu.child.id() as i32));
        let note = status.vm.note.unwrap();
        assert!(
            note.contains("are gone") && note.contains("--force"),
            "{note}"
        );
        assert!(matches!(boot.recv_timeout(wait), Ok(VmAnswer::Error(_))));
        assert!(!qemu.is_gone());
        let _stopped = ask(&inputs, VmRequest::Stop { force: true });
        assert!(matches!(adopting.join().unwrap(), Ok(Looked::None)));
    });
    assert!(qemu.is_gone());
}

/// As whoever has taken QEMU over may do with the file, which belongs to its user.
fn resize(path: &Path, bytes: u64) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

#[test]
fn a_guest_whose_ram_file_has_another_length_is_told_of_and_ended_by_a_forced_stop() {
    let spec =
        VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/boot/vmlinuz\"")
            .unwrap();
    // By its description, and by QEMU's command line where there is none.
    for (spec, bytes) in [(Some(&spec), 64 << 40), (Some(&spec), 0), (None, 8 << 20)] {
        let site = Site::new();
        let mut qemu = site.qemu(&["running"]);
        resize(&site.paths.ram_file(1), bytes);
        let record = record(&site, holds());
        let (inputs, received) = channel();
        let status = ask(&inputs, VmRequest::Status);
        let start = ask(&inputs, VmRequest::Start);
        std::thread::scope(|scope| {
            let known = Known {
                spec,
                ..known(&site, &record)
            };
            let own = inputs.clone();
            let adopting = scope.spawn(move || adopt(&known, &own, &received));
            let wait = Duration::from_secs(60);
            let note = match status.recv_timeout(wait).unwrap() {
                VmAnswer::Status(status) => {
                    assert_eq!(status.vm.state, VmState::Unreachable);
                    status.vm.note.unwrap()
                }
                VmAnswer::Error(error) => error.message,
                other => panic!("{other:?}"),
            };
            assert!(
                note.contains(&format!("has {bytes} bytes")) && note.contains("--force"),
                "{note}"
            );
            assert!(matches!(start.recv_timeout(wait), Ok(VmAnswer::Error(_))));
            assert!(!qemu.is_gone(), "its guest may be running");
            let _stopped = ask(&inputs, VmRequest::Stop { force: true });
            assert!(matches!(adopting.join().unwrap(), Ok(Looked::None)));
        });
        assert!(qemu.is_gone());
    }
}
