//! What several modules' tests need.

use crate::ask::{Ask, Now};
use crate::files::{Paths, QemuIdentity};
use crate::renewal::Handed;
use crate::requests::Reply;
use crate::shared_report::SharedReport;
use crate::vm::Vm;
use godwit_blockio::label::{self, Holds, Label};
use godwit_guestmem::{Owner, RamFile};
use godwit_ownership::{Handover, HostRecord, Phase, Power};
use godwit_store::{VmStore, save_json};
pub(crate) use godwit_testkit::testvol::apart_or_skipped as apart;
use godwit_types::host_api::{HostVm, VmAnswer, VmProcessConfig, VmRequest};
use godwit_types::migration::{
    AgentAddress, Cipher, MigrationReport, MigrationSecret, MigrationSpec, Side,
};
use godwit_types::vm::{Accelerator, UIDS, VmSpec};
use godwit_types::{ApiError, Generation, HostName, MigrationId, VmName};
use godwit_wire::Spec;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Has a device say that it holds this of disk `root` of VM `web`, in the words of whoever had it.
pub(crate) fn say_on(device: &File, holds: Holds, text: Option<Vec<u8>>) {
    let before = label::read(device.as_fd()).unwrap();
    let label = Label {
        holds,
        bytes: 1 << 20,
        vm: "web".to_owned(),
        disk: "root".to_owned(),
        text,
    };
    label::write(device.as_fd(), before.as_ref(), label).unwrap();
}

/// A request that the VM's thread answers at once.
pub(crate) fn now(request: VmRequest) -> Result<Now, ApiError> {
    Ask::of(request).map(|ask| match ask {
        Ask::Now(now) => now,
        other => panic!("{other:?}"),
    })
}

/// What a VM answers to it.
pub(crate) fn answer(vm: &mut Vm, request: VmRequest) -> Reply {
    vm.answer(now(request)?)
}

/// How long a test waits for what has to come.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Held here, under the generation that a [`Site`]'s records have.
pub(crate) fn holds(power: Power) -> Phase {
    Phase::Holds {
        generation: Generation(2),
        power,
        unconfirmed: None,
    }
}

/// The VM, opened as its process does.
pub(crate) fn open(site: &Site) -> Vm {
    Vm::open(site.config.clone(), Handed::default())
        .unwrap()
        .unwrap()
}

/// What is said to whoever asks.
pub(crate) fn ask(vm: &mut Vm, request: VmRequest) -> Result<String, ApiError> {
    answer(vm, request).map(|answer| match answer {
        VmAnswer::Done(text) => text,
        other => format!("{other:?}"),
    })
}

/// The VM as its host sees it.
pub(crate) fn shown(vm: &Vm) -> HostVm {
    vm.host_vm().unwrap()
}

/// Held here, which the host that it came from has not confirmed.
pub(crate) fn unconfirmed(power: Power) -> Phase {
    Phase::Holds {
        generation: Generation(2),
        power,
        unconfirmed: Some(Handover {
            migration: MigrationId::new("m").unwrap(),
            peer: HostName::new("a").unwrap(),
        }),
    }
}

/// What the channels of the migration `m` are sealed by.
pub(crate) fn spec() -> Arc<Spec> {
    let MigrationSpec {
        id, secret, cipher, ..
    } = migration("m");
    Arc::new(Spec::new(id, &secret, cipher).unwrap())
}

/// A migration named `id` of the VM `web` from host `a` to host `b`.
pub(crate) fn migration(id: &str) -> MigrationSpec {
    let host = |name: &str| AgentAddress {
        host: HostName::new(name).unwrap(),
        address: "127.0.0.1:1".parse().unwrap(),
    };
    MigrationSpec {
        id: MigrationId::new(id).unwrap(),
        vm: VmName::new("web").unwrap(),
        generation: Generation(2),
        source: host("a"),
        destination: host("b"),
        secret: MigrationSecret {
            key: vec![1; 32],
            nonce: vec![2; 8],
        },
        cipher: Cipher::Aes256Gcm,
        max_downtime_ms: 50,
        deadline_s: None,
        max_bandwidth_mbit_per_s: None,
        max_guest_slowdown_percent: None,
        prepare_memory: false,
        control_protocol: None,
        prediction: None,
        disks: Vec::new(),
        method: godwit_types::disk_move::Method::default(),
        without: Vec::new(),
        images: Vec::new(),
        source_addresses: Vec::new(),
        destination_addresses: Vec::new(),
    }
}

/// The report of that migration, begun.
pub(crate) fn report(side: Side) -> SharedReport {
    SharedReport::new(MigrationReport::begun(&migration("m"), side, 4, 0))
}

/// The directories of the VM `web` on host `b`, without a VM process.
pub(crate) struct Site {
    _dir: tempfile::TempDir,
    pub config: VmProcessConfig,
    pub paths: Paths,
}

impl Site {
    /// A host that has the VM's description, which names a kernel that does not exist.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        let config = VmProcessConfig {
            vm: VmName::new("web").unwrap(),
            host: HostName::new("b").unwrap(),
            state_dir: at("state/vms/web"),
            run_dir: at("run/vms/web"),
            ram_dir: at("ram"),
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            qemu_uid: 65534,
            qemu_gid: 65534,
            migration_ports: (0, 0),
            port_groups: Default::default(),
            migration_addresses: vec![[127, 0, 0, 1].into()],
            accelerator: Accelerator::Tcg,
            uefi_code: String::new(),
            uefi_variables: String::new(),
            reserved_dirs: Vec::new(),
        };
        for name in ["state/vms/web", "run/vms/web/qemu", "ram"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let paths = Paths::of(&config);
        save_json(&paths.spec(), &spec_of_web()).unwrap();
        Self {
            _dir: dir,
            config,
            paths,
        }
    }

    fn store(&self) -> VmStore {
        let root = self.paths.state.ancestors().nth(2).unwrap();
        VmStore::open(root, &self.config.vm).unwrap()
    }

    /// Writes the record: generation 2 is the highest known and, in a phase that holds, the one held.
    pub(crate) fn record(&self, phase: Phase) {
        let held = match &phase {
            Phase::Holds { .. } => Generation(2),
            _ => Generation(0),
        };
        let record = HostRecord {
            highest: Generation(2),
            held,
            phase,
            ..HostRecord::absent(self.config.vm.clone())
        };
        self.store().persist(&record).unwrap();
    }

    /// The phase on the disk; not while a VM process lives.
    pub(crate) fn phase(&self) -> Phase {
        self.store().load().unwrap().unwrap().phase
    }

    /// A process that stands for this VM's QEMU, and the one who speaks for it.
    pub(crate) fn qemu(&self, statuses: &[&str]) -> FakeQemu {
        self.qemu_of(1, statuses)
    }

    /// The same of a certain launch; the identity file tells of this one from now on.
    pub(crate) fn qemu_of(&self, launch: u64, statuses: &[&str]) -> FakeQemu {
        // Waits for input that never comes, with a command line as QEMU's.
        let memory = self.paths.ram_file(launch);
        let memory = format!(
            "memory-backend-file,id=ram0,size=16M,mem-path={}",
            memory.display()
        );
        // As one of the product: of the VM's own user, as its RAM file is.
        let owner = rustix::process::geteuid().is_root().then_some(Owner {
            uid: *UIDS.start(),
            gid: *UIDS.start(),
        });
        let mut shell = as_user(owner);
        shell.args(["-c", "read line", "sh", "-object", &memory]);
        let child = shell.stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        while !is_shell(pid) {
            std::thread::yield_now();
        }
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields = stat.rsplit_once(')').unwrap().1;
        let identity = QemuIdentity {
            pid,
            start_time_ticks: fields.split_whitespace().nth(19).unwrap().parse().unwrap(),
            accelerator: Accelerator::Tcg,
            launch,
        };
        save_json(&self.paths.identity(), &identity).unwrap();
        RamFile::create(&self.paths.ram_file(launch), 16 << 20, owner).unwrap();
        FakeQemu::speaks(child, &self.paths.monitor(launch, 0), statuses)
    }
}

/// A shell of that user. It is root's until another program runs in it: a child of this process maps all RAM files that
/// tests beside this one map, so that one of a VM's user would be ended as a stray QEMU of theirs.
fn as_user(owner: Option<Owner>) -> Command {
    let Some(owner) = owner else {
        return Command::new("sh");
    };
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={}", owner.uid));
    command.args(["--clear-groups", "sh"]);
    command
}

/// Whether the process has become its shell.
fn is_shell(pid: i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    line.starts_with(b"sh\0")
}

/// A process and a control socket on which just enough QMP is spoken.
pub(crate) struct FakeQemu {
    pub child: Child,
    script: Arc<(Mutex<Script>, Condvar)>,
}

#[derive(Default)]
struct Script {
    /// What it says of its state, one after the other; the last for ever.
    statuses: VecDeque<String>,
    /// It answers nothing from this command on.
    hangs_at: Option<&'static str>,
    /// It answers this command with an error.
    refuses: Option<&'static str>,
    /// Something in the guest has the port of its agent open.
    has_agent: bool,
    asked: Vec<String>,
}

impl FakeQemu {
    fn speaks(child: Child, monitor: &Path, statuses: &[&str]) -> Self {
        let script = Script {
            statuses: statuses.iter().map(|&status| status.to_owned()).collect(),
            ..Script::default()
        };
        let script = Arc::new((Mutex::new(script), Condvar::new()));
        let listener = UnixListener::bind(monitor).unwrap();
        let spoken = Arc::clone(&script);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that left is followed by the next.
                let _ = speak(stream, &spoken);
            }
        });
        Self { child, script }
    }

    fn change(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.0.lock().unwrap());
        self.script.1.notify_all();
    }

    /// Answers nothing from this command on; `None`: answers again.
    pub(crate) fn hangs_at(&self, command: Option<&'static str>) {
        self.change(|script| script.hangs_at = command);
    }

    /// Answers this command with an error from now on.
    pub(crate) fn refuses(&self, command: Option<&'static str>) {
        self.change(|script| script.refuses = command);
    }

    /// Has a guest with an agent from now on.
    pub(crate) fn has_agent(&self) {
        self.change(|script| script.has_agent = true);
    }

    /// Is in this state from now on.
    pub(crate) fn is(&self, status: &str) {
        self.change(|script| script.statuses = VecDeque::from([status.to_owned()]));
    }

    /// How often this was asked.
    pub(crate) fn asked(&self, command: &str) -> usize {
        let script = self.script.0.lock().unwrap();
        script
            .asked
            .iter()
            .filter(|asked| *asked == command)
            .count()
    }

    /// Whether the process has ended, by whoever's hand.
    pub(crate) fn is_gone(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)) | Err(_))
    }
}

impl Drop for FakeQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn speak(stream: UnixStream, script: &(Mutex<Script>, Condvar)) -> std::io::Result<()> {
    let mut writer = stream.try_clone()?;
    let version = serde_json::json!({"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""});
    let greeting = serde_json::json!({"QMP": {"version": version, "capabilities": []}});
    writeln!(writer, "{greeting}")?;
    for line in BufReader::new(stream).lines() {
        let request: serde_json::Value = serde_json::from_str(&line?)?;
        let command = request["execute"].as_str().unwrap_or_default();
        let mut script = {
            let hangs = |script: &mut Script| script.hangs_at == Some(command);
            script
                .1
                .wait_while(script.0.lock().unwrap(), |script| hangs(script))
                .unwrap()
        };
        script.asked.push(command.to_owned());
        let mut answer = serde_json::json!({"id": request["id"]});
        if script.refuses == Some(command) {
            answer["error"] = serde_json::json!({"class": "GenericError", "desc": "it will not"});
        } else if command == "query-status" {
            let status = script.statuses.front().cloned().unwrap_or_default();
            if script.statuses.len() > 1 {
                script.statuses.pop_front();
            }
            let running = status == "running";
            answer["return"] = serde_json::json!({"status": status, "running": running});
        } else if command == "query-chardev" && script.has_agent {
            answer["return"] = serde_json::json!([{"label": "agent0", "frontend-open": true}]);
        } else {
            answer["return"] = serde_json::json!({});
        }
        drop(script);
        writeln!(writer, "{answer}")?;
        if command == "system_reset" {
            let event = serde_json::json!({"event": "RESET", "data": {"guest": false}});
            writeln!(writer, "{event}")?;
        }
    }
    Ok(())
}

fn spec_of_web() -> VmSpec {
    let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/no/such/kernel\"";
    VmSpec::from_toml(text).unwrap()
}

/// Looks until it is known whether the guest runs.
pub(crate) fn look(vm: &mut Vm) {
    let until = Instant::now() + LONG;
    while vm.unsure.is_some() {
        assert!(Instant::now() < until, "it is never known");
        vm.look_again();
        std::thread::yield_now();
    }
}
