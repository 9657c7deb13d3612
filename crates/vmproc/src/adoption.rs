//! Taking over the QEMU that a predecessor left.
//!
//! Its guest may be running, so a QEMU that lives is never ended because it is slow to answer, and no other is started
//! beside it: nothing is decided until it answers, is gone, or a person gives it up with a forced stop. Meanwhile
//! requests are answered with what is known. Owns the time between this process's start and the ownership core's.
//!
//! A QEMU that no identity file tells of is found by its RAM file. Where the record says that this host may hold the VM it
//! is taken over like any other, unless it has never run its guest; elsewhere it is ended.

use crate::faults::{planted, qemu_is};
use crate::files::{Paths, QemuIdentity};
use crate::hypervisor::{Hyper, KILL_WAIT, internal};
use crate::input::{Input, Request};
use crate::strays::{self, Stray};
use godwit_ownership::HostRecord;
use godwit_qemu::machine::RunState;
use godwit_qemu::process::{ProcessError, QemuProcess};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{HostVm, VmAnswer, VmProcessConfig, VmRequest, VmStatus};
use godwit_types::vm::{VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// From here on a silent QEMU is an error in the log, no longer a warning.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two attempts, beside the time that each takes by itself.
const PAUSE: Duration = Duration::from_millis(500);
/// How often the waiting thread looks for a result.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What became of the predecessor's QEMU.
pub(crate) enum Adopted {
    /// There is none, or it is gone for sure.
    None,
    /// It answers.
    Taken(Box<Hyper>, RunState),
    /// This process was told to leave while it waited.
    Detached,
}

/// What is known of the VM before its QEMU is.
pub(crate) struct Seat<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    pub record: &'a HostRecord,
    pub spec: Option<&'a VmSpec>,
}

type Attempt = Result<(Box<Hyper>, RunState), String>;

/// Takes QEMU over. Returns at once where there is none or it answers; else answers requests until it does.
pub(crate) fn adopt(
    seat: &Seat<'_>,
    inputs: &Sender<Input>,
    received: &Receiver<Input>,
) -> Result<Adopted, ApiError> {
    let Some(found) = find(seat)? else {
        strays::remove_ram_files(seat.paths, None);
        return Ok(Adopted::None);
    };
    let Found {
        identity,
        process,
        unknown,
    } = found;
    strays::remove_ram_files(seat.paths, Some(identity.launch));
    qemu_is(identity.pid);
    match attempt(seat.paths, &identity) {
        Ok((hyper, state)) => return taken(hyper, state, unknown),
        Err(error) => {
            tracing::warn!(%error, pid = identity.pid, "QEMU lives but is not taken over yet")
        }
    }
    let waiting = Waiting {
        seat,
        process,
        unknown,
        launch: identity.launch,
        since: Instant::now(),
        ended: Arc::default(),
    };
    waiting.wait(identity, inputs, received)
}

/// A QEMU that lives.
struct Found {
    identity: QemuIdentity,
    process: QemuProcess,
    /// No identity file told of it.
    unknown: bool,
}

/// This VM's QEMU. All others on its RAM files are ended but those that may run its guest.
fn find(seat: &Seat<'_>) -> Result<Option<Found>, ApiError> {
    let known = load_json::<QemuIdentity>(&seat.paths.identity()).map_err(internal)?;
    let process = match &known {
        None => None,
        Some(known) => match QemuProcess::adopt(known.pid, known.start_time_ticks) {
            Ok(process) => Some(process),
            Err(ProcessError::Gone { .. }) => None,
            // Not knowing whether it lives is no reason to take it for dead.
            Err(error) => return Err(internal(error)),
        },
    };
    let mut others = strays::living(seat.paths).map_err(internal)?;
    if let (Some(identity), Some(process)) = (known, process) {
        others.retain(|stray| stray.process.pid() != identity.pid);
        end_all(&others)?;
        return Ok(Some(Found {
            identity,
            process,
            unknown: false,
        }));
    }
    if !seat.record.may_hold() || planted("unknown-hypervisor-ended") {
        end_all(&others)?;
        return Ok(None);
    }
    others.retain(|stray| strays::is_ours(stray, seat.config.qemu_uid));
    claim(seat, others)
}

fn end_all(others: &[Stray]) -> Result<(), ApiError> {
    let deadline = Instant::now() + KILL_WAIT;
    others
        .iter()
        .try_for_each(|stray| strays::end(stray, deadline).map_err(internal))
}

/// Takes the oldest of these for this VM's QEMU: a newer one is a start that was cut short, and ended if it says so.
fn claim(seat: &Seat<'_>, mut others: Vec<Stray>) -> Result<Option<Found>, ApiError> {
    let Some(oldest) = others.pop() else {
        return Ok(None);
    };
    for stray in &others {
        match attempt(seat.paths, &identity_of(stray)) {
            Ok((_, state)) if never_ran(&state) => end_all(std::slice::from_ref(stray))?,
            _ => {
                let pid = stray.process.pid();
                tracing::error!(
                    pid,
                    "a second hypervisor of this VM lives, and is left alone"
                );
            }
        }
    }
    let identity = identity_of(&oldest);
    tracing::warn!(
        pid = identity.pid,
        "QEMU is found by its RAM file: its identity file is gone"
    );
    std::fs::create_dir_all(seat.paths.run.join("qemu")).map_err(internal)?;
    save_json(&seat.paths.identity(), &identity).map_err(internal)?;
    Ok(Some(Found {
        identity,
        process: oldest.process,
        unknown: true,
    }))
}

fn identity_of(stray: &Stray) -> QemuIdentity {
    QemuIdentity {
        pid: stray.process.pid(),
        start_time_ticks: stray.process.start_time_ticks(),
        accelerator: stray.accelerator,
        launch: stray.launch,
    }
}

/// A QEMU that was started and never let its guest run.
fn never_ran(state: &RunState) -> bool {
    matches!(state, RunState::Prelaunch | RunState::Inmigrate)
}

fn taken(hyper: Box<Hyper>, state: RunState, unknown: bool) -> Result<Adopted, ApiError> {
    if unknown && never_ran(&state) {
        tracing::warn!(pid = hyper.pid(), "its start was cut short: it is ended");
        hyper.kill()?;
        return Ok(Adopted::None);
    }
    Ok(Adopted::Taken(hyper, state))
}

fn attempt(paths: &Paths, identity: &QemuIdentity) -> Attempt {
    Hyper::take_over(paths, identity)
        .map(|(hyper, state)| (Box::new(hyper), state))
        .map_err(|error| error.to_string())
}

struct Waiting<'a> {
    seat: &'a Seat<'a>,
    process: QemuProcess,
    /// No identity file told of it.
    unknown: bool,
    launch: u64,
    since: Instant,
    ended: Arc<AtomicBool>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Waiting<'_> {
    fn wait(
        &self,
        identity: QemuIdentity,
        inputs: &Sender<Input>,
        received: &Receiver<Input>,
    ) -> Result<Adopted, ApiError> {
        let attempts = self.keep_trying(identity).map_err(internal)?;
        let mut shouted = false;
        loop {
            if let Ok((hyper, state)) = attempts.try_recv() {
                return taken(hyper, state, self.unknown);
            }
            if !self.process.is_alive() {
                return Ok(Adopted::None);
            }
            if !shouted && self.since.elapsed() > PATIENCE {
                shouted = true;
                tracing::error!("{}", self.note());
            }
            match received.recv_timeout(LOOK_EVERY) {
                Ok(Input::Request(request)) => {
                    if let Some(adopted) = self.answer(request, inputs) {
                        return Ok(adopted);
                    }
                }
                // Nothing else can come: no QEMU is watched and no migration runs.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(Adopted::Detached),
            }
        }
    }

    /// Asks again and again, in a thread of its own, since each attempt may take seconds.
    fn keep_trying(
        &self,
        identity: QemuIdentity,
    ) -> std::io::Result<Receiver<(Box<Hyper>, RunState)>> {
        let (results, taken) = channel();
        let (paths, ended) = (self.seat.paths.clone(), Arc::clone(&self.ended));
        let work = move || {
            while !ended.load(Ordering::Relaxed) {
                match attempt(&paths, &identity) {
                    Ok(adopted) => {
                        // Nobody listens any more: the connection closes and QEMU is free for the next.
                        let _ = results.send(adopted);
                        return;
                    }
                    Err(error) => tracing::warn!(%error, "QEMU is not taken over yet"),
                }
                std::thread::sleep(PAUSE);
            }
        };
        std::thread::Builder::new()
            .name("adopt".into())
            .spawn(work)?;
        Ok(taken)
    }

    /// Answers one request; says when the waiting is over by it.
    fn answer(&self, request: Request, inputs: &Sender<Input>) -> Option<Adopted> {
        let answer = match &request.request {
            VmRequest::Status => self.status(),
            VmRequest::Stop { force: true } => match self.give_up() {
                Ok(()) => {
                    // Powering off is the core's to do: it hears of the request first of all.
                    let _ = inputs.send(Input::Request(request));
                    return Some(Adopted::None);
                }
                Err(error) => VmAnswer::Error(error),
            },
            VmRequest::Detach => {
                let done = format!(
                    "VM '{}' is left to its next VM process",
                    self.seat.config.vm
                );
                let _ = request.reply.send(VmAnswer::Done(done));
                return Some(Adopted::Detached);
            }
            _ => VmAnswer::Error(ApiError::new(ErrorCode::Hypervisor, self.note())),
        };
        let _ = request.reply.send(answer);
        None
    }

    /// A person has decided that this guest is lost.
    fn give_up(&self) -> Result<(), ApiError> {
        tracing::warn!("QEMU is ended unheard: a forced stop was asked for");
        self.process
            .kill_verified(Instant::now() + KILL_WAIT)
            .map_err(internal)
    }

    fn status(&self) -> VmAnswer {
        let Some(spec) = self.seat.spec else {
            return VmAnswer::Error(ApiError::new(ErrorCode::UnknownVm, self.note()));
        };
        let vm = HostVm {
            spec: spec.clone(),
            state: VmState::Unreachable,
            generation: self.seat.record.highest,
            claim: godwit_site::claim_of(self.seat.record),
            migration: None,
            accelerator: None,
            vm_process_pid: i32::try_from(std::process::id()).ok(),
            qemu_pid: Some(self.process.pid()),
            note: Some(self.note()),
        };
        VmAnswer::Status(Box::new(VmStatus { vm }))
    }

    fn note(&self) -> String {
        let monitors = [0, 1].map(|index| self.seat.paths.monitor(self.launch, index));
        if !monitors.iter().any(|path| path.exists()) {
            return format!(
                "QEMU of VM '{vm}' (process {pid}) cannot be asked, since its control sockets in {dir} are gone: was that directory emptied? Its guest may be running, so nothing is started in its place; 'godwit vm stop {vm} --force' ends it",
                vm = self.seat.config.vm,
                pid = self.process.pid(),
                dir = self.seat.paths.run.join("qemu").display(),
            );
        }
        format!(
            "QEMU of VM '{vm}' (process {pid}) has not answered for {seconds} s; its guest may be running, so nothing is started in its place: it is asked again, and 'godwit vm stop {vm} --force' gives the guest up",
            vm = self.seat.config.vm,
            pid = self.process.pid(),
            seconds = self.since.elapsed().as_secs()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Site;
    use godwit_ownership::{Phase, Power};
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
            .send(Input::Request(Request { request, reply }))
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
        godwit_guestmem::RamFile::create(&ram, 2 << 20, None).unwrap();
        let (speak, first_words) = channel();
        answer_late(&paths.monitor(1, 0), first_words);
        let record = HostRecord::absent(scene.config.vm.clone());
        let spec = VmSpec::from_toml(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/boot/vmlinuz\"",
        )
        .unwrap();
        let (inputs, received) = channel();
        let status = ask(&inputs, VmRequest::Status);
        let start = ask(&inputs, VmRequest::Start);
        let adopted = std::thread::scope(|scope| {
            let seat = Seat {
                config: &scene.config,
                paths: &paths,
                record: &record,
                spec: Some(&spec),
            };
            let adopting = scope.spawn(move || adopt(&seat, &inputs, &received));
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
            matches!(adopted, Ok(Adopted::Taken(_, RunState::Running))),
            "it was slow, no more"
        );
    }

    #[test]
    fn a_forced_stop_gives_a_silent_hypervisor_up_and_reaches_the_core() {
        let mut scene = Scene::new("silent");
        let paths = Paths::of(&scene.config);
        scene.known(&paths);
        let record = HostRecord::absent(scene.config.vm.clone());
        let seat = Seat {
            config: &scene.config,
            paths: &paths,
            record: &record,
            spec: None,
        };
        let (inputs, received) = channel();
        let _answer = ask(&inputs, VmRequest::Stop { force: true });
        assert!(matches!(
            adopt(&seat, &inputs, &received),
            Ok(Adopted::None)
        ));
        assert!(
            matches!(scene.child.try_wait(), Ok(Some(_)) | Err(_)),
            "it is gone"
        );
        assert!(matches!(
            received.try_recv(),
            Ok(Input::Request(Request {
                request: VmRequest::Stop { force: true },
                ..
            }))
        ));
    }

    fn holds() -> Phase {
        Phase::Holds {
            generation: Generation(2),
            power: Power::On,
            unconfirmed: None,
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
        let seat = Seat {
            config: &site.config,
            paths: &site.paths,
            record: &record,
            spec: None,
        };
        let adopted = adopt(&seat, &inputs, &received);
        let Ok(Adopted::Taken(hyper, RunState::Running)) = adopted else {
            panic!("it is not taken over");
        };
        assert_eq!(hyper.pid(), qemu.child.id() as i32);
        assert!(!qemu.is_gone() && site.paths.identity().exists());
        assert!(site.paths.ram_file(1).exists());
    }

    #[test]
    fn a_hypervisor_whose_start_was_cut_short_is_ended() {
        let site = Site::new();
        let mut qemu = site.qemu(&["prelaunch"]);
        std::fs::remove_file(site.paths.identity()).unwrap();
        let (record, (inputs, received)) = (record(&site, holds()), channel());
        let seat = Seat {
            config: &site.config,
            paths: &site.paths,
            record: &record,
            spec: None,
        };
        assert!(matches!(
            adopt(&seat, &inputs, &received),
            Ok(Adopted::None)
        ));
        assert!(qemu.is_gone());
    }

    #[test]
    fn a_hypervisor_of_a_vm_that_is_not_held_here_is_ended() {
        let moved = Phase::Moved {
            generation: Generation(2),
            migration: MigrationId::new("m").unwrap(),
            to: HostName::new("a").unwrap(),
        };
        for phase in [Phase::Absent, moved] {
            let site = Site::new();
            let mut qemu = site.qemu(&["running"]);
            std::fs::remove_file(site.paths.identity()).unwrap();
            let (record, (inputs, received)) = (record(&site, phase), channel());
            let seat = Seat {
                config: &site.config,
                paths: &site.paths,
                record: &record,
                spec: None,
            };
            assert!(matches!(
                adopt(&seat, &inputs, &received),
                Ok(Adopted::None)
            ));
            assert!(qemu.is_gone() && !site.paths.ram_file(1).exists());
        }
    }

    #[test]
    fn a_wiped_run_directory_kills_no_guest_until_a_person_does() {
        let site = Site::new();
        let mut qemu = site.qemu(&["running"]);
        std::fs::remove_dir_all(&site.paths.run).unwrap();
        std::fs::create_dir_all(&site.paths.run).unwrap();
        let record = record(&site, holds());
        let spec = VmSpec::from_toml(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/boot/vmlinuz\"",
        )
        .unwrap();
        let (inputs, received) = channel();
        let status = ask(&inputs, VmRequest::Status);
        let boot = ask(&inputs, VmRequest::Boot);
        std::thread::scope(|scope| {
            let seat = Seat {
                config: &site.config,
                paths: &site.paths,
                record: &record,
                spec: Some(&spec),
            };
            let own = inputs.clone();
            let adopting = scope.spawn(move || adopt(&seat, &own, &received));
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
            assert!(matches!(adopting.join().unwrap(), Ok(Adopted::None)));
        });
        assert!(qemu.is_gone());
    }
}
