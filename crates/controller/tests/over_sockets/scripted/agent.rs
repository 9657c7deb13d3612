//! A scripted agent: a real server of the agent's routes over mutual TLS, whose answers the test decides. What it keeps of
//! the site (words, table, highest generations) it keeps by the product's own rules, so that a controller can be judged by
//! what its hosts accept.

use super::routes::router;
use super::{DEADLINE, spec, vm};
use godwit_rpc::agent_client::RULES;
use godwit_rpc::{Identity, Revocations, Server};
use godwit_site::HostSite;
use godwit_types::clones::CloneDisks;
use godwit_types::forecast::{DirtyRate, LinkMeasured};
use godwit_types::host::HostInfo;
use godwit_types::host_api::HostVm;
use godwit_types::migration::{MigrationReport, MigrationSpec, Outcome, Phase};
use godwit_types::site::{Claim, Instance, RecordSaid, SiteHeard, SiteTable, WholeSurvey};
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{ApiError, Generation, HostName, MigrationId, PortGroup, VmName, VmSpec};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

/// Changes the JSON of a message: of a request where the first is true, of an answer otherwise.
pub type Between = Arc<dyn Fn(bool, &mut serde_json::Value) + Send + Sync>;

/// What a scripted agent answers, and what it was asked.
#[derive(Default)]
pub struct Script {
    pub info: Option<HostInfo>,
    pub vms: BTreeMap<VmName, HostVm>,
    pub reports: BTreeMap<MigrationId, MigrationReport>,
    pub specs: BTreeMap<MigrationId, MigrationSpec>,
    pub refuse_put_once: Option<ApiError>,
    pub refuse_disks_once: Option<ApiError>,
    /// What it was asked to copy first.
    pub cloning: Option<CloneDisks>,
    pub refuse_start: Option<ApiError>,
    pub refuse_survey: Option<ApiError>,
    /// A guest stands here of what it gave away.
    pub keeps_guest: bool,
    pub refuse_prepare: Option<ApiError>,
    pub refuse_table: Option<ApiError>,
    pub refuse_migrate: Option<ApiError>,
    /// So many requests to migrate are refused first, since the former host has not confirmed.
    pub unconfirmed: usize,
    pub outgoing_refusals: Vec<ApiError>,
    /// Descriptions of the VMs that it prepared to take.
    pub prepared: BTreeMap<VmName, VmSpec>,
    /// What it answers instead when it is asked whether this VM may leave.
    pub outgoing: Option<VmSpec>,
    /// The hashes that it hands over then.
    pub file_hashes: Vec<(String, String)>,
    pub incoming_refusals: Vec<ApiError>,
    pub probe_lost: bool,
    pub revoked: Vec<String>,
    pub removed: Vec<HostName>,
    /// How its guests write, where it measures.
    pub rate: Option<DirtyRate>,
    /// What the link from here carries, where it measures.
    pub link: Option<LinkMeasured>,
    pub refuse_link: Option<ApiError>,
    pub calls: Vec<String>,
    /// Answers these calls only once this turns true.
    pub held: BTreeMap<&'static str, watch::Receiver<bool>>,
    /// The highest generation that it has durably seen of each VM, also of those that it has no more.
    pub highest: BTreeMap<VmName, Generation>,
    /// How often it was asked for its VMs.
    pub polls: usize,
    /// VMs of which its record is damaged, with its own sentence; they are in no list.
    pub unread: BTreeMap<VmName, String>,
    /// The serial number that its table says of every host.
    pub invented_serial: Option<String>,
    /// Stands between it and the controller, and changes every message.
    pub between: Option<Between>,
    /// What it knows of the site.
    site: Option<HostSite>,
}

impl Script {
    pub fn site(&mut self) -> &mut HostSite {
        self.site.as_mut().unwrap()
    }

    pub fn highest(&self, name: &VmName) -> Generation {
        self.highest.get(name).copied().unwrap_or_default()
    }

    pub fn raise(&mut self, name: &VmName, seen: Generation) {
        let highest = self.highest(name).max(seen);
        self.highest.insert(name.clone(), highest);
        if let Some(vm) = self.vms.get_mut(name) {
            vm.generation = highest;
        }
    }

    pub fn claim(&self, name: &VmName) -> Claim {
        let vm = self.vms.get(name);
        vm.map(|vm| vm.claim.clone()).unwrap_or_default()
    }

    pub fn may_live(&self, name: &VmName) -> bool {
        let vm = self.vms.get(name);
        vm.is_some_and(|vm| !vm.state.is_off())
    }

    pub fn said(&mut self) -> HostInfo {
        let site = self.site();
        let (instance, heard) = (site.instance().clone(), site.heard());
        let info = self.info.clone().unwrap();
        HostInfo {
            instance,
            site: heard,
            unread: self.unread.clone(),
            ..info
        }
    }

    pub fn listed(&mut self) -> Vec<HostVm> {
        self.polls += 1;
        let vms = self.vms.values();
        let read = vms.filter(|vm| !self.unread.contains_key(&vm.spec.name));
        read.cloned().collect()
    }

    pub fn whole(&mut self) -> WholeSurvey {
        let names = self.highest.keys().cloned().collect::<Vec<_>>();
        let records = names.into_iter().map(|vm| RecordSaid {
            highest: self.highest(&vm),
            claim: self.claim(&vm),
            may_live: true,
            vm,
            images: Vec::new(),
        });
        let mut records: Vec<RecordSaid> = records.collect();
        let unread: std::collections::BTreeSet<VmName> = self.unread.keys().cloned().collect();
        records.retain(|record| !unread.contains(&record.vm));
        let lie = self.invented_serial.clone();
        let site = self.site();
        let mut table = site.table().clone();
        for host in &mut table.hosts {
            host.serial = lie.clone().unwrap_or_else(|| host.serial.clone());
        }
        WholeSurvey {
            instance: site.instance().clone(),
            records,
            unread,
            table,
        }
    }
}

pub type Shared = Arc<Mutex<Script>>;

pub fn script(shared: &Shared) -> MutexGuard<'_, Script> {
    shared.lock().unwrap()
}

pub struct Agent {
    pub name: HostName,
    pub address: SocketAddr,
    pub identity: Identity,
    pub script: Shared,
    stop: watch::Sender<bool>,
    task: Option<tokio::task::JoinHandle<()>>,
    kept: Option<TcpSocket>,
}

impl Agent {
    /// One that is enrolled and does not listen yet.
    pub fn new(name: HostName, address: SocketAddr, identity: Identity) -> Self {
        let agent = Self {
            script: Shared::default(),
            stop: watch::channel(false).0,
            task: None,
            kept: None,
            name,
            address,
            identity,
        };
        agent.script().info = Some(info(&agent.name, address));
        agent.lives(1, "machine");
        agent
    }

    /// It is in this life now, with what it knows of the site; `counter` is its state directory's.
    pub fn lives(&self, counter: u64, machine_id: &str) {
        let instance = Instance {
            counter,
            boot_id: format!("boot of {machine_id}"),
            machine_id: machine_id.to_owned(),
        };
        let mut script = self.script();
        let table = script.site.as_ref().map(|site| site.table().clone());
        let site = HostSite::new(self.name.clone(), instance, table.unwrap_or_default());
        script.site = Some(site);
    }

    /// Its table of the site.
    pub fn table(&self) -> SiteTable {
        self.script().site().table().clone()
    }

    /// What it has heard of the controller's words.
    pub fn knows(&self) -> SiteHeard {
        self.script().site().heard()
    }

    pub fn instance(&self) -> Instance {
        self.script().site().instance().clone()
    }

    pub fn script(&self) -> MutexGuard<'_, Script> {
        script(&self.script)
    }

    pub fn calls(&self, of: &str) -> usize {
        self.script()
            .calls
            .iter()
            .filter(|call| call.starts_with(of))
            .count()
    }

    pub async fn serve(&mut self, listener: TcpListener) {
        let server = Server::new(
            router(self.script.clone()),
            RULES,
            Arc::new(Revocations::default()),
        );
        let config = godwit_rpc::tls::server_config(&self.identity).unwrap();
        let (stop, stopped) = watch::channel(false);
        self.stop = stop;
        self.task = Some(tokio::spawn(server.run_tls(listener, config, stopped)));
    }

    /// Has calls of this kind wait until the sender says true.
    pub fn hold(&self, call: &'static str) -> watch::Sender<bool> {
        let (free, held) = watch::channel(false);
        self.script().held.insert(call, held);
        free
    }

    /// Has polls wait until the sender says true. From now on none is under way, so that nobody learns what the script says.
    pub async fn hold_polls(&self) -> watch::Sender<bool> {
        let free = self.hold("host");
        // One receiver is the script's, the other that of a poll that waits; they come one after the other.
        let waits = async {
            while free.receiver_count() < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, waits)
            .await
            .expect("it was never asked again");
        free
    }

    /// Waits until a call of this kind has arrived.
    pub async fn until_called(&self, call: &str) {
        let called = async {
            while self.calls(call) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, called)
            .await
            .expect("it was never called");
    }

    /// Waits until what its script says now was heard: the controller takes one answer before it asks for the next.
    pub async fn until_heard(&self) {
        let enough = self.script().polls + 2;
        let heard = async {
            while self.script().polls < enough {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, heard)
            .await
            .expect("it was never asked again");
    }

    /// Does not answer from now on. Its port stays its own: it is bound, and nobody listens.
    pub async fn cut(&mut self) {
        self.stop.send_replace(true);
        self.task.take().unwrap().await.unwrap();
        let kept = TcpSocket::new_v4().unwrap();
        kept.set_reuseaddr(true).unwrap();
        kept.bind(self.address).unwrap();
        self.kept = Some(kept);
    }

    /// Whether it does not answer.
    pub fn is_cut(&self) -> bool {
        self.kept.is_some()
    }

    pub async fn heal(&mut self) {
        let kept = self.kept.take().unwrap();
        self.serve(kept.listen(1024).unwrap()).await;
    }

    /// This VM is here now, held or not.
    pub fn has(&self, name: &str, state: VmState, generation: u64, holds: bool) {
        let generation = Generation(generation);
        let claim = match holds {
            true => holding(generation),
            false => Claim::No,
        };
        self.records(name, state, generation, claim);
    }

    /// Its record of this VM is so now.
    pub fn records(&self, name: &str, state: VmState, generation: Generation, claim: Claim) {
        let mut script = self.script();
        let before = script.vms.get(&vm(name)).map(|vm| vm.spec.clone());
        let described = before.or_else(|| script.prepared.get(&vm(name)).cloned());
        let described = described.unwrap_or_else(|| spec(name));
        let new = known(described, state, generation, claim);
        script.vms.insert(vm(name), new);
        script.raise(&vm(name), generation);
    }

    /// The guest of a VM that is here is in this state now.
    pub fn turns(&self, name: &str, state: VmState) {
        self.script().vms.get_mut(&vm(name)).unwrap().state = state;
    }

    /// The highest generation that it has seen of a VM.
    pub fn generation(&self, name: &str) -> Generation {
        self.script().highest(&vm(name))
    }

    /// How a migration goes here.
    pub fn says(&self, id: &MigrationId, outcome: Option<Outcome>) {
        let mut script = self.script();
        let report = script.reports.get_mut(id).unwrap();
        report.outcome = outcome;
        report.phase = if outcome.is_some() {
            Phase::Ended
        } else {
            Phase::Precopy
        };
    }
}

pub fn known(spec: VmSpec, state: VmState, generation: Generation, claim: Claim) -> HostVm {
    HostVm {
        spec,
        state,
        generation,
        claim,
        migration: None,
        accelerator: Some(Accelerator::Tcg),
        vm_process_pid: None,
        vm_process: None,
        qemu_pid: None,
        note: None,
        disks: Vec::new(),
        images: Vec::new(),
        guest: None,
    }
}

pub fn holding(generation: Generation) -> Claim {
    Claim::Holds {
        generation,
        on: true,
    }
}

/// The handover, as two hosts do it among themselves.
pub fn hand_over(from: &Agent, to: &Agent, name: &str, id: &MigrationId) {
    let generation = from.script().specs[id].generation;
    give(from, to, name, id);
    to.has(name, VmState::Running, generation.0, true);
    to.says(id, Some(Outcome::Completed));
}

/// The source's part of it, with the destination's answer.
pub fn give(from: &Agent, to: &Agent, name: &str, id: &MigrationId) {
    let generation = from.script().specs[id].generation;
    let moved = Claim::Moved {
        generation,
        to: to.name.clone(),
    };
    from.records(name, VmState::Stopped, generation, moved);
    from.says(id, Some(Outcome::Completed));
}

fn info(name: &HostName, agent_address: SocketAddr) -> HostInfo {
    HostInfo {
        name: name.clone(),
        version: "0".into(),
        speaks: Default::default(),
        kernel: "6.18".into(),
        qemu: "7.2.22".into(),
        accelerator: Accelerator::Tcg,
        machine_types: vec!["pc-q35-7.1".into(), "pc-q35-7.2".into()],
        machine_aliases: BTreeMap::new(),
        cpu_models: vec!["qemu64".into(), "max".into()],
        cpu_models_under: Default::default(),
        encryption: true,
        port_groups: [(PortGroup::new("vm").unwrap(), "br0".to_owned())].into(),
        migration_addresses: vec!["127.0.0.1".parse().unwrap()],
        agent_address,
        memory_total_mib: 4096,
        memory_free_mib: 2048,
        cpus: 2,
        boot_id: "boot".into(),
        instance: Default::default(),
        site: Default::default(),
        boot_alone_ignored: false,
        closing: false,
        unread: Default::default(),
        certificate: None,
        datastores: Default::default(),
    }
}
