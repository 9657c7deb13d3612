//! For tests: a stub VM process (this very test program, started with one ignored test), records, configurations.
//!
//! The stub only speaks the socket's protocol; the supervision and the routes around it are what is tested.

use crate::config::HostConfig;
use crate::launch::VmProgram;
use crate::records::Records;
use godwit_ownership::{HostRecord, Phase, Power};
use godwit_store::{VmStore, save_json};
use godwit_types::host_api::{
    HostVm, OutboxMessage, SOCKET_FILE, SPEC_FILE, VmAnswer, VmProcessConfig, VmRequest, VmStatus,
};
use godwit_types::vm::{VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, VmName};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// In the run directory: the stub ends at once with these last words.
pub const DIE: &str = "die-at-start";
/// In the run directory: messages that the stub hands over once.
pub const OUTBOX: &str = "outbox.json";
/// In the run directory: what the stub was told by `Peer`, one line each.
pub const HEARD: &str = "heard";

pub fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

/// A host in a temporary directory.
pub struct TestHost {
    _dir: tempfile::TempDir,
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
        Self { _dir: dir, config }
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
        }
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

pub fn spec(name: &str) -> VmSpec {
    VmSpec::from_toml(&format!(
        "name = \"{name}\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/boot/vmlinuz\"\n"
    ))
    .unwrap()
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
        let mut text = serde_json::to_vec(&answer(request, config)).unwrap();
        text.push(b'\n');
        if writer.write_all(&text).is_err() {
            return;
        }
    }
}

fn answer(request: VmRequest, config: &VmProcessConfig) -> VmAnswer {
    let run_dir = Path::new(&config.run_dir);
    match request {
        VmRequest::Status if !Path::new(&config.state_dir).join(SPEC_FILE).exists() => {
            VmAnswer::Error(ApiError::new(ErrorCode::UnknownVm, "the VM is not here"))
        }
        VmRequest::Status => VmAnswer::Status(Box::new(status(config))),
        VmRequest::TakeOutbox { wait_ms } => {
            VmAnswer::Outbox(outbox(&run_dir.join(OUTBOX), wait_ms))
        }
        VmRequest::Peer { from, message } => {
            let path = run_dir.join(HEARD);
            let mut file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .unwrap();
            writeln!(file, "{from} {message}").unwrap();
            VmAnswer::Replies(vec![serde_json::json!({ "echo": message })])
        }
        VmRequest::Detach => std::process::exit(0),
        VmRequest::Console => VmAnswer::Console("login:".into()),
        VmRequest::Blockers => VmAnswer::Blockers(vec![]),
        VmRequest::Start => VmAnswer::Done("started".into()),
        VmRequest::Stop { force } => VmAnswer::Done(format!("stopped, force = {force}")),
        _ => VmAnswer::Error(ApiError::new(
            ErrorCode::WrongState,
            "the stub does not do that",
        )),
    }
}

fn status(config: &VmProcessConfig) -> VmStatus {
    VmStatus {
        vm: HostVm {
            spec: spec(config.vm.as_str()),
            state: VmState::Stopped,
            generation: Generation(1),
            claim: godwit_types::site::Claim::Holds {
                generation: Generation(1),
                on: false,
            },
            migration: None,
            accelerator: None,
            vm_process_pid: i32::try_from(std::process::id()).ok(),
            qemu_pid: None,
            note: None,
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
