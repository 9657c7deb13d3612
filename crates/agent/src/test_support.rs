//! For tests: a stub VM process (this very test program, started with one ignored test), records, configurations.
//!
//! The stub only speaks the socket's protocol; the supervision and the routes around it are what is tested.

use crate::config::HostConfig;
use crate::launch::VmProgram;
use crate::manager::Manager;
use crate::records::Records;
use crate::scope::Scopes;
use godwit_ownership::{HostRecord, Phase, Power};
use godwit_store::{VmStore, save_json};
use godwit_types::console::{ConsoleKept, ConsolePlace};
use godwit_types::host_api::{
    CloseState, CloseStep, ClosingVm, HostVm, OutboxMessage, SOCKET_FILE, SPEC_FILE, VmAnswer,
    VmProcessConfig, VmRequest, VmStatus,
};
use godwit_types::site::{Claim, RecordAnswer, RecordSaid, SiteHost, SiteTable};
use godwit_types::vm::{VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, VmName};
use serde_json::{Map, Value};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// In the run directory: the stub ends at once with these last words.
pub const DIE: &str = "die-at-start";
/// In the run directory: messages that the stub hands over once.
pub const OUTBOX: &str = "outbox.json";
/// In the run directory: the stub knows no `TakeOutbox`, and says so.
pub const NO_OUTBOX: &str = "no-outbox";
/// In the run directory: what the stub was told by `Peer` and `HostRemoved`, one line each.
pub const HEARD: &str = "heard";
/// In the run directory: the stub was asked to write its record again.
pub const KEPT: &str = "kept";
/// In the run directory: one line per boot that the stub was asked for.
pub const BOOTED: &str = "booted";
/// In the run directory: boots and starts fail with these words.
pub const BOOT_FAILS: &str = "boot-fails";
/// In the run directory: boots and starts wait while it exists.
pub const BOOT_WAITS: &str = "boot-waits";
/// In the run directory: the VM has a QEMU again just after the stub said that it is gone.
pub const REVIVES: &str = "revives";
/// In the run directory: why the stub was told to cancel its last migration.
pub const REASON: &str = "reason";
/// In the run directory: the state that the stub shows, in the words of [`VmState`]; stopped without it.
pub const STATE: &str = "state";
/// In the run directory: the process that the stub gives out for the VM's QEMU; none without it.
pub const QEMU_PID: &str = "qemu-pid";

/// In the run directory: what the guest does when its host shuts down, `obeys`, `deaf`, `left`, `too old` or, until its
/// VM process is another, `renewable`.
pub const CLOSES: &str = "closes";
/// In the run directory: each step to which the stub was asked then, but looks.
pub const CLOSED: &str = "closed";

/// In the run directory: what the stub does that is to become another program, `becomes` or `refuses`; without it, it knows of no
/// such request.
pub const RENEWS: &str = "renews";

/// In the run directory: the stub answers as one of a version less, `older`, or of one more, `newer`.
pub const DIALECT: &str = "dialect";
/// What was typed on its console.
pub const TYPED: &str = "typed";

/// What a version less does not say yet.
const LATER_WORDS: [&str; 6] = [
    "migration",
    "accelerator",
    "vm_process_pid",
    "vm_process",
    "qemu_pid",
    "note",
];

pub fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

/// A host in a temporary directory.
pub struct TestHost {
    _dir: tempfile::TempDir,
    text: String,
    /// What is free for the guests' RAM files to grow.
    pub available_mib: u64,
    /// None, unless a test brings one.
    pub manager: Manager,
    pub config: HostConfig,
}

impl TestHost {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:1\"\nmigration_addresses = [\"127.0.0.1\"]\nstate_dir = \"{0}/state\"\nrun_dir = \"{0}/run\"\nqemu = \"/nonexistent/qemu\"\nqemu_user = \"nobody\"\n",
            dir.path().display()
        );
        let config = HostConfig::parse(&text, Path::new("t")).unwrap();
        std::fs::create_dir_all(config.vms_dir()).unwrap();
        std::fs::create_dir_all(config.ram_dir()).unwrap();
        Self {
            _dir: dir,
            text,
            available_mib: 2000,
            manager: Manager {
                systemd: "/nonexistent".into(),
                program: "/nonexistent".into(),
            },
            config,
        }
    }

    pub fn records(&self) -> Records {
        Records::new(&self.config.state_dir, self.config.name.clone())
    }

    pub fn run_dir(&self, name: &str) -> PathBuf {
        let dir = self.config.run_dir.join("vms").join(name);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    pub fn vm_config(&self, name: &str) -> VmProcessConfig {
        VmProcessConfig {
            vm: vm(name),
            host: self.config.name.clone(),
            state_dir: self.config.vms_dir().join(name).display().to_string(),
            run_dir: self.run_dir(name).display().to_string(),
            ram_dir: self.config.ram_dir().display().to_string(),
            qemu: "/nonexistent/qemu".into(),
            qemu_uid: 65534,
            qemu_gid: 65534,
            migration_ports: (49500, 49501),
            port_groups: Default::default(),
            migration_addresses: vec![],
            accelerator: Default::default(),
            uefi_code: String::new(),
            uefi_variables: String::new(),
            reserved_dirs: Vec::new(),
        }
    }

    /// The same with more lines in its configuration.
    pub fn with(mut self, lines: &str) -> Self {
        let listen = "listen = \"127.0.0.1:1\"\n";
        let text = self.text.replace(listen, &format!("{listen}{lines}\n"));
        self.config = HostConfig::parse(&text, Path::new("t")).unwrap();
        self
    }

    /// This host, `a`, is told of by its table beside these.
    pub fn beside(self, others: &[&str]) -> Self {
        let names = ["a"].iter().chain(others);
        let table = SiteTable {
            hosts: names.map(|name| neighbour(name)).collect(),
            had_second: true,
            ..SiteTable::default()
        };
        save_json(&self.config.state_dir.join("site.json"), &table).unwrap();
        self
    }

    /// A VM that should run and whose QEMU died, in this boot of the host if `in_this_boot`.
    pub fn crash(&self, name: &str, in_this_boot: bool) {
        self.crash_with(name, Power::On, in_this_boot);
    }

    /// The same of one whose record says this.
    pub fn crash_with(&self, name: &str, power: Power, in_this_boot: bool) {
        self.hold(name, power);
        std::fs::write(self.run_dir(name).join(STATE), "\"crashed\"").unwrap();
        if in_this_boot {
            self.records().remember_boot(&vm(name), "boot-1").unwrap();
        }
    }

    /// Whether a VM that should run has run in the boot of these tests; none of one that should not run.
    pub fn to_run(&self, vm: &VmName) -> Option<bool> {
        self.records().should_run(vm)?;
        Some(self.records().ran_in_boot(vm, "boot-1"))
    }

    /// Writes a VM's description and a record that holds generation 1.
    pub fn hold(&self, name: &str, power: Power) {
        let phase = Phase::Holds {
            generation: Generation(1),
            power,
            unconfirmed: None,
        };
        self.record(name, Generation(1), phase);
        let path = self.config.vms_dir().join(name).join(SPEC_FILE);
        save_json(&path, &spec(name)).unwrap();
    }

    pub fn record(&self, name: &str, held: Generation, phase: Phase) {
        let mut store = VmStore::open(&self.config.state_dir, &vm(name)).unwrap();
        let record = HostRecord {
            highest: Generation(3),
            held,
            phase,
            ..HostRecord::absent(vm(name))
        };
        store.persist(&record).unwrap();
    }
}

pub fn neighbour(name: &str) -> SiteHost {
    SiteHost {
        name: HostName::new(name).unwrap(),
        address: "127.0.0.1:9".parse().unwrap(),
        serial: "1".into(),
        counter: 1,
        machine_id: String::new(),
    }
}

/// The record of a host that holds VM `web` under this generation.
pub fn holds_web(generation: u64) -> RecordSaid {
    RecordSaid {
        vm: vm("web"),
        highest: Generation(generation),
        claim: Claim::Holds {
            generation: Generation(generation),
            on: true,
        },
        may_live: true,
        images: Vec::new(),
    }
}

pub fn spec(name: &str) -> VmSpec {
    VmSpec::from_toml(&format!(
        "name = \"{name}\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/boot/vmlinuz\"\n"
    ))
    .unwrap()
}

/// A host without systemd, wherever the test runs.
fn no_scopes() -> Scopes {
    Scopes {
        systemd: "/nonexistent".into(),
        ..Scopes::default()
    }
}

/// This test program as a VM process.
pub fn stub_program() -> VmProgram {
    let words = [
        "test_support::stub_vm_process",
        "--exact",
        "--ignored",
        "--nocapture",
        "--",
    ];
    VmProgram {
        program: std::env::current_exe().unwrap(),
        arguments: words.map(Into::into).to_vec(),
        scopes: no_scopes(),
    }
}

#[test]
#[ignore = "is a program that other tests start"]
fn stub_vm_process() {
    let mut words = std::env::args().skip_while(|word| word != "--config");
    let path = words.nth(1).expect("started with --config FILE");
    let config: VmProcessConfig = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let run_dir = PathBuf::from(&config.run_dir);
    if let Ok(words) = std::fs::read_to_string(run_dir.join(DIE)) {
        eprintln!("{words}");
        std::process::exit(7);
    }
    // It outlives what started it, but not the test, whose directory goes with it.
    let alive_in = run_dir.clone();
    std::thread::spawn(move || {
        while alive_in.exists() {
            std::thread::sleep(std::time::Duration::from_millis(500));
        }
        std::process::exit(0);
    });
    let socket = run_dir.join(SOCKET_FILE);
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    for stream in listener.incoming() {
        let config = config.clone();
        std::thread::spawn(move || serve(stream.unwrap(), &config));
    }
}

fn serve(stream: UnixStream, config: &VmProcessConfig) {
    let mut writer = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let request: VmRequest = serde_json::from_str(&line).unwrap();
        let said = serde_json::to_value(answer(request, config)).unwrap();
        let said = in_dialect(said, Path::new(&config.run_dir));
        let mut text = serde_json::to_vec(&said).unwrap();
        text.push(b'\n');
        if writer.write_all(&text).is_err() {
            return;
        }
    }
}

fn in_dialect(mut said: Value, run_dir: &Path) -> Value {
    let dialect = std::fs::read_to_string(run_dir.join(DIALECT)).unwrap_or_default();
    let inside = said.as_object_mut().into_iter().flatten();
    inside.for_each(|(_, body)| match dialect.as_str() {
        "older" => each_object(body, &|fields| {
            fields.retain(|name, _| !LATER_WORDS.contains(&name.as_str()));
        }),
        "newer" => each_object(body, &|fields| {
            fields.insert("of_a_newer_version".into(), Value::from(7));
        }),
        _ => {}
    });
    said
}

/// All objects but a VM's description, which is understood wholly or not at all.
fn each_object(value: &mut Value, change: &dyn Fn(&mut Map<String, Value>)) {
    match value {
        Value::Object(fields) => {
            let below = fields.iter_mut().filter(|(name, _)| *name != "spec");
            below.for_each(|(_, below)| each_object(below, change));
            change(fields);
        }
        Value::Array(items) => items.iter_mut().for_each(|item| each_object(item, change)),
        _ => {}
    }
}

fn taken_outbox(run_dir: &Path, wait_ms: u64) -> VmAnswer {
    if run_dir.join(NO_OUTBOX).exists() {
        append(&run_dir.join(HEARD), "take-outbox");
        return VmAnswer::Error(ApiError::new(ErrorCode::InvalidRequest, "unknown request"));
    }
    VmAnswer::Outbox(outbox(&run_dir.join(OUTBOX), wait_ms))
}

/// A guest that writes what is typed, after a greeting.
fn console(run_dir: &Path, place: Option<&ConsolePlace>, wait_ms: u64) -> VmAnswer {
    if std::fs::read_to_string(run_dir.join(DIALECT)).is_ok_and(|dialect| dialect == "older") {
        return VmAnswer::Error(ApiError::new(ErrorCode::InvalidRequest, "unknown request"));
    }
    let deadline = Instant::now() + Duration::from_millis(wait_ms);
    loop {
        let mut kept = ConsoleKept::named("a1".into());
        kept.add(b"login:");
        kept.add(&std::fs::read(run_dir.join(TYPED)).unwrap_or_default());
        let piece = kept.after(place);
        if Some(&piece.place()) != place || Instant::now() >= deadline {
            return VmAnswer::ConsolePiece(piece);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn answer(request: VmRequest, config: &VmProcessConfig) -> VmAnswer {
    let run_dir = Path::new(&config.run_dir);
    match request {
        VmRequest::Status if !is_described(config) => {
            VmAnswer::Error(ApiError::new(ErrorCode::UnknownVm, "the VM is not here"))
        }
        VmRequest::Status => VmAnswer::Status(Box::new(status(config))),
        VmRequest::TakeOutbox { wait_ms } => taken_outbox(run_dir, wait_ms),
        VmRequest::Peer { from, message } => {
            append(&run_dir.join(HEARD), &format!("{from} {message}"));
            VmAnswer::Replies(vec![serde_json::json!({ "echo": message })])
        }
        VmRequest::Cancel { migration, reason } => {
            std::fs::write(run_dir.join(REASON), reason).unwrap();
            append(&run_dir.join(HEARD), &format!("cancel {migration}"));
            VmAnswer::Done("stays where it is".into())
        }
        VmRequest::Migrate(spec) => {
            append(&run_dir.join(HEARD), &format!("migrate {}", spec.id));
            VmAnswer::Done("is on its way".into())
        }
        VmRequest::Detach { .. } => {
            if is_too_old(config) && closes(config) == "renewable" {
                std::fs::write(run_dir.join(CLOSES), "obeys").unwrap();
            }
            std::process::exit(0)
        }
        VmRequest::Console => VmAnswer::Console("login:".into()),
        VmRequest::ReadConsole { place, wait_ms } => console(run_dir, place.as_ref(), wait_ms),
        VmRequest::TypeConsole(typed) => type_console(run_dir, typed.bytes),
        VmRequest::Blockers => VmAnswer::Blockers(vec![]),
        VmRequest::HostRemoved { host } => {
            heard(run_dir, &format!("{host} is gone"), "waits no more")
        }
        VmRequest::MoveDisks { .. } | VmRequest::PlanDiskMoves { .. } | VmRequest::DiskMoves => {
            VmAnswer::DiskMoves(Default::default())
        }
        VmRequest::CancelDiskMoves => heard(run_dir, "disks stay", "they stay"),
        VmRequest::ResizeDisk(_) => heard(run_dir, "a disk grows", "it has grown"),
        VmRequest::GiftOvertaken(_) => heard(run_dir, "overtaken", "given up"),
        VmRequest::KeepRecord => {
            append(&run_dir.join(KEPT), "kept");
            VmAnswer::Done("kept".into())
        }
        VmRequest::Survey { .. } => VmAnswer::Surveyed(RecordAnswer {
            highest: Generation(1),
            claim: holds_one(),
        }),
        VmRequest::Resolve { .. } => heard(run_dir, "resolve", "runs on"),
        VmRequest::Start => boot(config, "started"),
        VmRequest::Boot => {
            append(&run_dir.join(BOOTED), "boot");
            boot(config, "booted")
        }
        VmRequest::PowerOffDead { generation } => power_off_dead(config, generation),
        VmRequest::Renew { program } => renew(run_dir, &program),
        VmRequest::Close { .. } if is_too_old(config) => cannot_read(),
        VmRequest::Close { step } => VmAnswer::Closing(close(step, config)),
        VmRequest::Stop { force } => {
            power_off(config);
            VmAnswer::Done(format!("stopped, force = {force}"))
        }
        _ => VmAnswer::Error(ApiError::new(
            ErrorCode::WrongState,
            "the stub does not do that",
        )),
    }
}

/// The program that it becomes is the same one, started with the same words.
fn renew(run_dir: &Path, program: &str) -> VmAnswer {
    match std::fs::read_to_string(run_dir.join(RENEWS)).as_deref() {
        Ok("becomes") => {
            append(&run_dir.join(HEARD), &format!("become {program}"));
            let error = Command::new(program)
                .args(std::env::args_os().skip(1))
                .exec();
            VmAnswer::Error(ApiError::new(ErrorCode::Internal, error.to_string()))
        }
        Ok(_) => VmAnswer::Error(ApiError::new(ErrorCode::WrongState, "it stays what it is")),
        Err(_) => cannot_read(),
    }
}

/// As one of an older version.
fn cannot_read() -> VmAnswer {
    VmAnswer::Error(ApiError::new(ErrorCode::InvalidRequest, "cannot read it"))
}

fn type_console(run_dir: &Path, bytes: Vec<u8>) -> VmAnswer {
    append(&run_dir.join(TYPED), &String::from_utf8(bytes).unwrap());
    VmAnswer::Done("typed".into())
}

fn power_off_dead(config: &VmProcessConfig, generation: Generation) -> VmAnswer {
    let revived = Path::new(&config.run_dir).join(REVIVES).exists();
    if revived || generation != Generation(1) {
        return VmAnswer::Error(ApiError::new(ErrorCode::WrongState, "look again"));
    }
    power_off(config);
    VmAnswer::Done("off".into())
}

fn heard(run_dir: &Path, request: &str, answer: &str) -> VmAnswer {
    append(&run_dir.join(HEARD), request);
    VmAnswer::Done(answer.into())
}

fn append(path: &Path, line: &str) {
    let mut file = std::fs::OpenOptions::new();
    let mut file = file.create(true).append(true).open(path).unwrap();
    writeln!(file, "{line}").unwrap();
}

/// As a real one: the guest has a RAM file and runs.
fn boot(config: &VmProcessConfig, done: &str) -> VmAnswer {
    let run_dir = Path::new(&config.run_dir);
    while run_dir.join(BOOT_WAITS).exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    if let Ok(why) = std::fs::read_to_string(run_dir.join(BOOT_FAILS)) {
        return VmAnswer::Error(ApiError::new(ErrorCode::Hypervisor, why));
    }
    let ram = std::fs::File::create(ram_file(config)).unwrap();
    ram.set_len(spec(config.vm.as_str()).memory_bytes())
        .unwrap();
    std::fs::write(run_dir.join(STATE), "\"running\"").unwrap();
    VmAnswer::Done(done.into())
}

fn closes(config: &VmProcessConfig) -> String {
    std::fs::read_to_string(Path::new(&config.run_dir).join(CLOSES)).unwrap_or_default()
}

fn is_too_old(config: &VmProcessConfig) -> bool {
    matches!(closes(config).as_str(), "too old" | "renewable")
}

fn close(step: CloseStep, config: &VmProcessConfig) -> ClosingVm {
    let run_dir = Path::new(&config.run_dir);
    let closes = closes(config);
    let state = match (step, closes.as_str()) {
        (_, "left") => CloseState::Left,
        (CloseStep::End, _) => CloseState::Ended,
        _ => CloseState::Waits,
    };
    match step {
        CloseStep::Look => {}
        CloseStep::Press => append(&run_dir.join(CLOSED), "press"),
        CloseStep::End => append(&run_dir.join(CLOSED), "end"),
    }
    if state == CloseState::Ended || step == CloseStep::Press && closes == "obeys" {
        let identity = std::fs::read(run_dir.join("qemu.json")).unwrap();
        let identity: serde_json::Value = serde_json::from_slice(&identity).unwrap();
        let pid = identity["pid"].as_i64().unwrap() as i32;
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        std::fs::write(run_dir.join(STATE), "\"crashed\"").unwrap();
    }
    ClosingVm {
        vm: config.vm.clone(),
        state,
        why: None,
    }
}

fn ram_file(config: &VmProcessConfig) -> PathBuf {
    Path::new(&config.ram_dir).join(format!("{}.1", config.vm))
}

fn power_off(config: &VmProcessConfig) {
    let _ = std::fs::remove_file(Path::new(&config.run_dir).join(STATE));
    let _ = std::fs::remove_file(ram_file(config));
    let state = Path::new(&config.state_dir).ancestors().nth(2).unwrap();
    let mut store = VmStore::open(state, &config.vm).unwrap();
    let Some(mut record) = store.load().unwrap() else {
        return;
    };
    if let Phase::Holds { power, .. } = &mut record.phase {
        *power = Power::Off;
        store.persist(&record).unwrap();
    }
}

fn shown_state(config: &VmProcessConfig) -> VmState {
    let text = std::fs::read(Path::new(&config.run_dir).join(STATE));
    text.map_or(VmState::Stopped, |text| {
        serde_json::from_slice(&text).unwrap()
    })
}

fn holds_one() -> Claim {
    Claim::Holds {
        generation: Generation(1),
        on: false,
    }
}

/// A damaged description is as good as none.
fn is_described(config: &VmProcessConfig) -> bool {
    let text = std::fs::read(Path::new(&config.state_dir).join(SPEC_FILE));
    text.is_ok_and(|text| serde_json::from_slice::<VmSpec>(&text).is_ok())
}

fn status(config: &VmProcessConfig) -> VmStatus {
    VmStatus {
        vm: HostVm {
            spec: spec(config.vm.as_str()),
            state: shown_state(config),
            generation: Generation(1),
            claim: holds_one(),
            migration: None,
            accelerator: None,
            vm_process_pid: i32::try_from(std::process::id()).ok(),
            vm_process: None,
            qemu_pid: std::fs::read_to_string(Path::new(&config.run_dir).join(QEMU_PID))
                .ok()
                .map(|pid| pid.parse().unwrap()),
            note: None,
            disks: Vec::new(),
            images: Vec::new(),
            guest: None,
        },
    }
}

/// Waits for the file with messages, which a test moves into place whole.
fn outbox(path: &Path, wait_ms: u64) -> Vec<OutboxMessage> {
    let deadline = std::time::Instant::now() + std::time::Duration::from_millis(wait_ms);
    while std::time::Instant::now() < deadline {
        if let Ok(text) = std::fs::read(path) {
            std::fs::remove_file(path).unwrap();
            return serde_json::from_slice(&text).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Vec::new()
}
