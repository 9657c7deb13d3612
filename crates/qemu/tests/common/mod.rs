//! Tiny guests and hosts to run them on, shared by the tests and the example.
//!
//! A guest is some real-mode instructions packed as an old-protocol kernel image, which QEMU's `-kernel` takes: its
//! boot loader jumps to the setup part at offset 512. Such a guest runs under TCG and wherever KVM runs firmware.
//! Guests report by events that QEMU sends on (pvpanic's "crash loaded"), so that nothing has to sleep and look.

#![allow(
    dead_code,
    reason = "each user of this module needs another part of it"
)]

use godwit_ownership::{Action, Event, HostRecord, Phase, Power, Qemu, RunPermit, VmCore};
use godwit_qemu::command_line::{Accelerator, MachineConfig, Reconnect};
use godwit_qemu::device_state::{DeviceStateError, Incoming};
use godwit_qemu::launch::{Hypervisor, LaunchError, LaunchSpec, launch};
use godwit_qemu::machine::{Machine, RunState};
use godwit_qemu::qmp::{EventKind, Events};
use godwit_types::{Generation, HostName, VmName};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A user that owns nothing else.
pub const UID: u32 = 61_234;
pub const MEMORY_MIB: u64 = 64;
/// The generation under which guests run here.
pub const GENERATION: Generation = Generation(7);
/// Where the counting guest keeps its counter, and the pages that it fills with it.
pub const COUNTER: u64 = 0x500;
pub const FILLED: std::ops::Range<u64> = 0x2_0000..0x3_0000;

/// Counts for ever, fills 64 KiB with the counter each time, and reports every 256 rounds.
pub const COUNTING: &[u8] = &[
    0xfa, // cli
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    0xb8, 0x00, 0x20, // mov ax, 0x2000
    0x8e, 0xc0, // mov es, ax
    0x31, 0xff, // again: xor di, di
    0xff, 0x06, 0x00, 0x05, // inc word [0x500]
    0xa1, 0x00, 0x05, // mov ax, [0x500]
    0xb9, 0x00, 0x80, // mov cx, 0x8000
    0xf3, 0xab, // rep stosw
    0x84, 0xc0, // test al, al
    0x75, 0xee, // jnz again
    0xba, 0x05, 0x05, // mov dx, 0x505
    0xb0, 0x02, // mov al, 2
    0xee, // out dx, al
    0xeb, 0xe6, // jmp again
];

/// Writes "GW" to its serial port, then does what `last` says, then halts.
fn greeting_and(last: &[u8]) -> Vec<u8> {
    let hello = [0xba, 0xf8, 0x03, 0xb0, b'G', 0xee, 0xb0, b'W', 0xee];
    [&hello[..], last, &[0xfa, 0xf4, 0xeb, 0xfd]].concat()
}

/// Powers itself off: `out 0x604, 0x2000`.
pub fn powering_off() -> Vec<u8> {
    greeting_and(&[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef])
}

/// Reports a panic: `out 0x505, 1`.
pub fn panicking() -> Vec<u8> {
    greeting_and(&[0xba, 0x05, 0x05, 0xb0, 0x01, 0xee])
}

/// Resets the machine: `out 0xcf9, 6`.
pub fn resetting() -> Vec<u8> {
    greeting_and(&[0xba, 0xf9, 0x0c, 0xb0, 0x06, 0xee])
}

/// An image in the boot protocol of 1991: a boot sector that says "four more sectors", those four, and a rest.
fn kernel_image(program: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 6 * 512];
    image[0x1f1] = 4;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x200..0x200 + program.len()].copy_from_slice(program);
    image
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The right to run, as the ownership core mints it for a host whose record says that it holds the VM.
pub fn permit() -> RunPermit {
    let name = VmName::new("tiny").expect("name");
    let phase = Phase::Holds {
        generation: GENERATION,
        power: Power::Off,
        unconfirmed: None,
    };
    let record = HostRecord {
        highest: GENERATION,
        held: GENERATION,
        phase,
        ..HostRecord::absent(name)
    };
    let host = HostName::new("here").expect("name");
    let (mut core, mut actions) = VmCore::recover(record, host, Qemu::Dead).expect("a good record");
    let mut asked = false;
    loop {
        match actions.pop() {
            Some(Action::Boot(permit)) => return permit,
            Some(Action::Persist(_)) => actions = core.handle(Event::Persisted),
            Some(_) => {}
            None if !asked => {
                actions = core.handle(Event::StartRequested);
                asked = true;
            }
            None => panic!("the core gives no permit: {:?}", core.status()),
        }
    }
}

/// A host's directory: kernel, RAM and control sockets of one machine.
pub struct Place {
    directory: tempfile::TempDir,
    pub spec: LaunchSpec<'static>,
}

impl Place {
    pub fn new(program: &[u8]) -> Place {
        Place::with_memory(program, MEMORY_MIB)
    }

    pub fn with_memory(program: &[u8], memory_mib: u64) -> Place {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let at = |name: &str| directory.path().join(name);
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("chmod");
        fs::write(at("kernel"), kernel_image(program)).expect("kernel");
        File::create(at("ram"))
            .expect("ram")
            .set_len(memory_mib << 20)
            .expect("size");
        chown(at("ram"), Some(UID), Some(UID)).expect("chown");
        let machine = MachineConfig {
            hardware: 1,
            name: "tiny".into(),
            uuid: "8c5b8a3e-0d5c-4a43-9d0e-6d0d8f1c2b3a".into(),
            vcpus: 1,
            memory_mib,
            machine_type: "q35".into(),
            cpu_model: "qemu64".into(),
            cpu_features: Vec::new(),
            cpu_enforce: false,
            accelerator: Accelerator::Tcg,
            flash: None,
            kernel: Some(at("kernel")),
            initramfs: None,
            kernel_arguments: String::new(),
            nics: Vec::new(),
            disks: Vec::new(),
            agent_fd: None,
            seed_fd: None,
            reconnect: Reconnect::Second,
            ram_file: at("ram"),
            incoming: false,
        };
        let binary =
            std::env::var_os("GODWIT_QEMU").unwrap_or_else(|| "/usr/bin/qemu-system-x86_64".into());
        let monitors = vec![at("qmp/0"), at("qmp/1")];
        let binary = PathBuf::from(binary);
        let spec = LaunchSpec {
            binary,
            machine,
            monitors,
            uid: UID,
            gid: UID,
            handout: None,
            inherited: vec![],
        };
        Place { directory, spec }
    }

    pub fn incoming(mut self) -> Place {
        self.spec.machine.incoming = true;
        self
    }

    /// Under KVM as QEMU's user where that user may, else as root.
    pub fn kvm(mut self) -> Place {
        self.spec.machine.accelerator = Accelerator::Kvm;
        let usable = fs::metadata("/dev/kvm")
            .is_ok_and(|device| device.permissions().mode() & 0o006 == 0o006);
        if !usable {
            (self.spec.uid, self.spec.gid) = (0, 0);
        }
        self
    }

    pub fn start(&self) -> Guest {
        Guest(self.try_start().expect("a hypervisor"))
    }

    pub fn try_start(&self) -> Result<Hypervisor, LaunchError> {
        launch(&self.spec, soon())
    }

    pub fn ram(&self) -> File {
        File::options()
            .read(true)
            .write(true)
            .open(&self.spec.machine.ram_file)
            .expect("ram")
    }

    pub fn counter(&self) -> u16 {
        let mut bytes = [0; 2];
        self.ram().read_exact_at(&mut bytes, COUNTER).expect("read");
        u16::from_le_bytes(bytes)
    }

    /// Copies all RAM, file to file, into another place. Nothing runs meanwhile.
    pub fn copy_ram_to(&self, other: &Place) {
        let (from, to) = (self.ram(), other.ram());
        let mut chunk = vec![0; 1 << 20];
        for offset in (0..self.spec.machine.memory_mib).map(|mib| mib << 20) {
            from.read_exact_at(&mut chunk, offset).expect("read");
            to.write_all_at(&chunk, offset).expect("write");
        }
    }
}

/// A hypervisor that ends with the test.
pub struct Guest(pub Hypervisor);

impl Guest {
    pub fn machine(&self) -> &Machine {
        &self.0.machine
    }

    /// Loads a whole device state, as the VM process does piece by piece.
    pub fn load(&self, mut incoming: Incoming, state: &[u8]) -> Result<RunState, DeviceStateError> {
        match incoming.write(state, soon()) {
            // QEMU has hung up: its own reason is better than ours.
            Ok(()) | Err(DeviceStateError::Io(_)) => {
                self.machine().finish_incoming(incoming, soon())
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let killed = self.0.process.kill_verified(soon());
        assert!(killed.is_ok() || std::thread::panicking(), "{killed:?}");
    }
}

/// Waits for the event; panics when it does not come.
pub fn expect_event(events: &Events, wanted: impl Fn(&EventKind) -> bool) {
    let deadline = soon();
    while !wanted(&events.next(deadline).expect("the event in time").kind) {}
}

/// Waits until the counting guest has reported again.
pub fn expect_heartbeat(events: &Events) {
    expect_event(events, |kind| {
        *kind == EventKind::Other("GUEST_CRASHLOADED".into())
    });
}
