//! Two hosts and what lies between them: agents that carry ownership messages, and the controller's part of a migration.
//!
//! Owns a thread per direction. A host whose VM process is killed gets a new one when the test says so.

use crate::Host;
use crate::host::Storage;
use crate::relay::{Mode, Relay};
use anyhow::bail;
use godwit_types::disk_move::Method;
use godwit_types::host_api::{PrepareIncoming, VmAnswer, VmRequest};
use godwit_types::migration::{
    AgentAddress, Cipher, MigrationReport, MigrationSecret, MigrationSpec, Outcome,
};
use godwit_types::vm::{Accelerator, VmSpec};
use godwit_types::{Generation, MigrationId};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Pair {
    /// Where the VM begins.
    pub a: Arc<Host>,
    pub b: Arc<Host>,
    dir: tempfile::TempDir,
    ram: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    /// Whether a VM process that ended gets a successor, which is the agents' part.
    pub supervised: Arc<AtomicBool>,
    /// Whether messages are carried between the agents.
    pub agents_connected: Arc<AtomicBool>,
    /// Whether nobody wants to read the hosts' logs at the end.
    pub quiet: AtomicBool,
    moves: AtomicU32,
    relays: Mutex<Vec<Relay>>,
    threads: Vec<JoinHandle<()>>,
}

/// What to ask of a migration.
#[derive(Debug, Clone)]
pub struct Options {
    /// Encryption of memory pages.
    pub cipher: Cipher,
    /// Longest pause aimed at, ms.
    pub max_downtime_ms: u64,
    /// Give up after this long, s.
    pub deadline_s: Option<u64>,
    /// Cap, Mb/s.
    pub max_bandwidth_mbit_per_s: Option<u64>,
    /// The destination allocates all of the guest's memory first.
    pub prepare: bool,
    /// The guest is slowed by so many percent at most.
    pub max_guest_slowdown_percent: Option<u32>,
    /// Over a relay that the test holds in its hand.
    pub relayed: bool,
    /// The source gets another key than the destination.
    pub wrong_key: bool,
    /// Where the first disk comes to, if not to the path that it has.
    pub disk_to: Option<String>,
    /// How disks that go along are copied.
    pub method: Method,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cipher: Cipher::Aes256Gcm,
            max_downtime_ms: 50,
            deadline_s: None,
            max_bandwidth_mbit_per_s: None,
            max_guest_slowdown_percent: None,
            prepare: false,
            relayed: false,
            wrong_key: false,
            disk_to: None,
            method: Method::default(),
        }
    }
}

impl Pair {
    /// Two hosts on IPv4 loopback.
    pub fn new(accelerator: Accelerator) -> anyhow::Result<Self> {
        Self::on(accelerator, vec!["127.0.0.1".parse()?])
    }

    /// Two hosts that migrate over these addresses.
    pub fn on(accelerator: Accelerator, addresses: Vec<IpAddr>) -> anyhow::Result<Self> {
        Self::made(accelerator, addresses, (0, 0), [None, None])
    }

    /// Two hosts that share no storage: each finds a directory of its own, below `dir`, at the same place.
    pub fn apart(accelerator: Accelerator, dir: &Path) -> anyhow::Result<Self> {
        let place = dir.join("images");
        std::fs::create_dir(&place)?;
        let storage = |name: &str| -> anyhow::Result<Storage> {
            let (own, place) = (dir.join(name), place.clone());
            std::fs::create_dir(&own)?;
            let all = std::fs::Permissions::from_mode(0o777);
            std::fs::set_permissions(&own, all)?;
            Ok(Storage { own, place })
        };
        let storage = [storage("a")?, storage("b")?].map(Some);
        let loopback = vec!["127.0.0.1".parse()?];
        Self::made(accelerator, loopback, (0, 0), storage)
    }

    /// Two hosts whose programs find this directory as `/usr`: those of another version of the distribution.
    pub fn with_programs(accelerator: Accelerator, usr: &Path) -> anyhow::Result<Self> {
        let storage = || {
            Some(Storage {
                own: usr.to_owned(),
                place: "/usr".into(),
            })
        };
        let loopback = vec!["127.0.0.1".parse()?];
        Self::made(accelerator, loopback, (0, 0), [storage(), storage()])
    }

    /// Two hosts of which `b` has these ports for migrations.
    pub fn with_ports(address: IpAddr, ports: (u16, u16)) -> anyhow::Result<Self> {
        Self::made(Accelerator::Tcg, vec![address], ports, [None, None])
    }

    fn made(
        accelerator: Accelerator,
        addresses: Vec<IpAddr>,
        ports: (u16, u16),
        [of_a, of_b]: [Option<Storage>; 2],
    ) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir_in("/dev/shm")?;
        let ram = tempfile::tempdir_in("/dev/shm")?;
        // QEMU's user must reach its RAM file and the preloaded library.
        open(ram.path())?;
        open(dir.path())?;
        let host = |name, storage| -> anyhow::Result<Arc<Host>> {
            let (dir, ram) = (dir.path(), ram.path());
            let mut host = Host::new(name, "vm", dir, ram, addresses.clone(), accelerator)?;
            if name == "b" {
                host.ports = ports;
            }
            host.storage = storage;
            Ok(Arc::new(host))
        };
        let mut pair = Self {
            a: host("a", of_a)?,
            b: host("b", of_b)?,
            dir,
            ram,
            stop: Arc::default(),
            supervised: Arc::new(AtomicBool::new(true)),
            agents_connected: Arc::new(AtomicBool::new(true)),
            quiet: AtomicBool::new(false),
            moves: AtomicU32::new(0),
            relays: Mutex::default(),
            threads: Vec::new(),
        };
        pair.threads = vec![
            pair.carry(&pair.a, &pair.b),
            pair.carry(&pair.b, &pair.a),
            pair.supervise(),
        ];
        Ok(pair)
    }

    /// Takes messages from one host's VM process to the other's, and the answers back.
    fn carry(&self, from: &Arc<Host>, to: &Arc<Host>) -> JoinHandle<()> {
        let (from, to) = (Arc::clone(from), Arc::clone(to));
        let (stop, connected) = (Arc::clone(&self.stop), Arc::clone(&self.agents_connected));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                match from.ask_within(
                    &VmRequest::TakeOutbox { wait_ms: 100 },
                    Duration::from_secs(2),
                ) {
                    Ok(VmAnswer::Outbox(messages)) if connected.load(Ordering::Relaxed) => {
                        for message in messages {
                            deliver(&from, &to, message.message);
                        }
                    }
                    // Dropped while disconnected: the core asks again.
                    Ok(_) => {}
                    Err(_) => std::thread::sleep(Duration::from_millis(20)),
                }
            }
        })
    }

    /// Starts a new VM process for one that ended, until the test is over.
    fn supervise(&self) -> JoinHandle<()> {
        let hosts = [Arc::clone(&self.a), Arc::clone(&self.b)];
        let (stop, on) = (Arc::clone(&self.stop), Arc::clone(&self.supervised));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for host in &hosts {
                    if on.load(Ordering::Relaxed) && host.has_died() {
                        // Tried again at the next turn.
                        let _ = host.start_process();
                    }
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        })
    }

    /// For hosts whose processes start from now on: how long a switchover waits for a silent peer.
    pub fn patience(&self, patience: Duration) {
        for host in [&self.a, &self.b] {
            host.patience_ms
                .store(patience.as_millis() as u32, Ordering::SeqCst);
        }
    }

    /// The directory of both hosts' RAM files.
    pub fn ram(&self) -> &Path {
        self.ram.path()
    }

    /// Where a test may put its files; QEMU's user can read there.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A new VM on host `a`, running.
    pub fn boot(&self, spec: &VmSpec) -> anyhow::Result<()> {
        self.a.grant(spec)?;
        self.a.start_process()?;
        self.b.start_process()?;
        self.a.ask(&VmRequest::Start)?;
        Ok(())
    }

    /// The controller's part: spec to the destination, then to the source.
    pub fn begin(&self, from: &Host, to: &Host, options: &Options) -> anyhow::Result<MigrationId> {
        let (id, begun) = self.try_begin(from, to, options)?;
        begun.map(|()| id)
    }

    /// As [`Pair::begin`], with the id of a migration whose beginning failed or was not answered.
    pub fn try_begin(
        &self,
        from: &Host,
        to: &Host,
        options: &Options,
    ) -> anyhow::Result<(MigrationId, anyhow::Result<()>)> {
        let number = self.moves.fetch_add(1, Ordering::Relaxed);
        let id = MigrationId::new(format!("m{number}"))?;
        let begun = self.negotiate(&id, from, to, options);
        Ok((id, begun))
    }

    fn negotiate(
        &self,
        id: &MigrationId,
        from: &Host,
        to: &Host,
        options: &Options,
    ) -> anyhow::Result<()> {
        let vm = from.vm()?;
        let mut spec = MigrationSpec {
            id: id.clone(),
            vm: from.vm.clone(),
            generation: Generation(vm.generation.0 + 1),
            source: address(from),
            destination: address(to),
            secret: secret()?,
            cipher: options.cipher,
            max_downtime_ms: options.max_downtime_ms,
            deadline_s: options.deadline_s,
            max_bandwidth_mbit_per_s: options.max_bandwidth_mbit_per_s,
            max_guest_slowdown_percent: options.max_guest_slowdown_percent,
            prepare_memory: options.prepare,
            control_protocol: None,
            prediction: None,
            disks: from.disks_to_move(&vm.spec)?,
            method: options.method,
            without: Vec::new(),
            images: from.known_images()?,
            source_addresses: from.addresses.clone(),
            destination_addresses: Vec::new(),
        };
        if !to.process_lives() {
            to.start_process()?;
        }
        let accelerator = vm.accelerator.unwrap_or(Accelerator::Tcg);
        let mut there = vm.spec;
        if let (Some(disk), Some(path)) = (there.disks.first_mut(), &options.disk_to) {
            disk.path.clone_from(path);
        }
        let prepare = PrepareIncoming {
            spec: there,
            accelerator,
            migration: spec.clone(),
        };
        if options.wrong_key {
            spec.secret = secret()?;
        }
        match to.ask(&VmRequest::PrepareIncoming(Box::new(prepare)))? {
            VmAnswer::IncomingReady(ready) => spec.destination_addresses = ready.addresses,
            other => bail!("unexpected answer {other:?}"),
        }
        if options.relayed {
            spec.destination_addresses = self.relay(&spec.destination_addresses)?;
        }
        from.ask(&VmRequest::Migrate(Box::new(spec)))?;
        Ok(())
    }

    /// Puts a relay before each address.
    fn relay(&self, addresses: &[SocketAddr]) -> anyhow::Result<Vec<SocketAddr>> {
        let relays = addresses
            .iter()
            .map(|address| Relay::to(*address))
            .collect::<Result<Vec<_>, _>>()?;
        let between = relays.iter().map(Relay::address).collect();
        *self.relays.lock().unwrap_or_else(PoisonError::into_inner) = relays;
        Ok(between)
    }

    /// Sets the link of the relayed migration.
    pub fn link(&self, mode: Mode) {
        let relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        relays.iter().for_each(|relay| relay.set(mode));
    }

    /// Bytes that went over the relayed link.
    pub fn link_bytes(&self) -> u64 {
        let relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        relays.iter().map(Relay::bytes).sum()
    }

    /// Waits until a migration has ended at a host, and gives its report.
    pub fn wait_end(
        &self,
        host: &Host,
        id: &MigrationId,
        within: Duration,
    ) -> anyhow::Result<MigrationReport> {
        let deadline = Instant::now() + within;
        loop {
            let report = host.report(id);
            match &report {
                Ok(report)
                    if report
                        .outcome
                        .is_some_and(|outcome| outcome != Outcome::InDoubt) =>
                {
                    return Ok(report.clone());
                }
                _ if Instant::now() > deadline => {
                    bail!("migration {id} has not ended on {}: {report:?}", host.name)
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// A whole move that must succeed.
    pub fn migrate(
        &self,
        from: &Host,
        to: &Host,
        options: &Options,
    ) -> anyhow::Result<MigrationReport> {
        let id = self.begin(from, to, options)?;
        let report = self.wait_end(from, &id, Duration::from_secs(120))?;
        if report.outcome != Some(Outcome::Completed) {
            bail!(
                "migration {id} ended {:?}: {:?}",
                report.outcome,
                report.reason
            );
        }
        Ok(report)
    }

    /// Both logs, for a failure.
    pub fn logs(&self) -> String {
        let read = |host: &Host| std::fs::read_to_string(host.log()).unwrap_or_default();
        format!("--- a ---\n{}\n--- b ---\n{}", read(&self.a), read(&self.b))
    }
}

impl Drop for Pair {
    /// The threads hold the hosts, and a host ends its QEMU when it is dropped: a test that returned before they did
    /// would leave a guest behind that takes a core for ever.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Whether the test failed cannot be known here; the harness shows it where one did.
        if !self.quiet.load(Ordering::Relaxed) {
            eprintln!("{}", self.logs());
        }
        self.supervised.store(false, Ordering::Relaxed);
        // Whoever waits for an answer has it now.
        self.a.kill_process();
        self.b.kill_process();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // One that was being started meanwhile.
        self.a.kill_process();
        self.b.kill_process();
    }
}

fn deliver(from: &Host, to: &Host, message: serde_json::Value) {
    let request = VmRequest::Peer {
        from: from.name.clone(),
        message,
    };
    if let Ok(VmAnswer::Replies(replies)) = to.ask(&request) {
        for message in replies {
            // A process that died meanwhile asks again after its restart.
            let _ = from.ask(&VmRequest::Peer {
                from: to.name.clone(),
                message,
            });
        }
    }
}

fn address(host: &Host) -> AgentAddress {
    AgentAddress {
        host: host.name.clone(),
        address: ([127, 0, 0, 1], 1).into(),
    }
}

fn secret() -> anyhow::Result<MigrationSecret> {
    let mut bytes = vec![0; 40];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("{error}"))?;
    let nonce = bytes.split_off(32);
    Ok(MigrationSecret { key: bytes, nonce })
}

fn open(path: &Path) -> std::io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711))
}
