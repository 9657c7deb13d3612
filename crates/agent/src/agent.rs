//! The agent itself: what it knows of this host, and what it does when asked.
//!
//! Owns everything that the routes share. Each operation on a VM goes to that VM's process; where none lives, the
//! durable record answers. Refuses: to decide who may run a VM.

use crate::boot::Boots;
use crate::check;
use crate::config::{BootRule, HostConfig};
use crate::evidence;
use crate::launch::make_dir;
use crate::life::Life;
use crate::link::Bursts;
use crate::load::Readings;
use crate::memory::{Memory, Promise};
use crate::preflight;
use crate::probe::{self, Probes};
use crate::qemu_facts::{QemuFacts, QemuFactsError};
use crate::records::Records;
use crate::removed::Removed;
use crate::reports::Reports;
use crate::site::Site;
use crate::supervisor::{Supervised, Supervisor};
use crate::system::{Interface, System, interfaces, unix_ms};
use crate::users::User;
use godwit_guestmem::tracker;
use godwit_rpc::Revocations;
use godwit_types::control_api::{Done, HostCheck, ResolveRequest};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{
    HostVm, IncomingReady, PreflightIncoming, PreflightOutgoing, PrepareIncoming, VmAnswer,
    VmProcessConfig, VmRequest,
};
use godwit_types::migration::PreflightReport;
use godwit_types::vm::{Accelerator, VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Longest wait for a VM process to be there.
pub(crate) const NEED: Duration = Duration::from_secs(20);
/// The same where whoever asks waits for an answer that is mostly there at once.
pub(crate) const SOON: Duration = Duration::from_secs(8);
/// Longest wait for an answer that only reads.
pub(crate) const READ: Duration = Duration::from_secs(2);
/// Longest wait for an answer that changes something.
pub(crate) const ACT: Duration = Duration::from_secs(50);
/// Longest wait for this host's own tools.
pub(crate) const TOOLS: Duration = Duration::from_secs(10);

/// What the routes share.
pub(crate) struct Agent {
    pub config: HostConfig,
    pub system: System,
    pub user: User,
    pub qemu: Result<QemuFacts, QemuFactsError>,
    pub migration_addresses: Vec<IpAddr>,
    pub boot_id: String,
    pub supervisor: Supervisor,
    pub records: Records,
    pub probes: Probes,
    pub revocations: Arc<Revocations>,
    pub bursts: Arc<Bursts>,
    /// Interfaces that carry migrations, with their addresses.
    pub migration_links: Vec<(String, Vec<IpAddr>)>,
    pub readings: Mutex<Readings>,
    pub site: Site,
    pub boots: Boots,
    pub memory: Arc<Memory>,
    pub reports: Reports,
    pub removed: Removed,
}

pub(crate) type Reply<T> = Result<T, ApiError>;

pub(crate) fn done(message: impl Into<String>) -> Done {
    Done {
        message: message.into(),
    }
}

pub(crate) fn unexpected(vm: &VmName) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        format!("the VM process of '{vm}' gave an answer to another question"),
    )
}

pub(crate) fn took_too_long<T>(_: T) -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        "work of this agent broke off: see its log",
    )
}

/// Work that waits for disks, off the threads that serve.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Reply<T> + Send + 'static,
) -> Reply<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(took_too_long)?
}

/// Why writes cannot be tracked here, if they cannot.
pub(crate) fn tracking() -> Result<(), String> {
    tracker::check_kernel().map_err(|error| error.to_string())
}

/// The interfaces that have migration addresses.
pub(crate) fn migration_links(
    addresses: &[IpAddr],
    interfaces: &[Interface],
) -> Vec<(String, Vec<IpAddr>)> {
    let of_migrations = |interface: &Interface| -> Vec<IpAddr> {
        let all = interface.addresses();
        all.filter(|address| addresses.contains(address)).collect()
    };
    interfaces
        .iter()
        .map(|interface| (interface.name.clone(), of_migrations(interface)))
        .filter(|(_, addresses)| !addresses.is_empty())
        .collect()
}

/// The addresses that migrations use: the configured ones, or all of the configured interfaces.
pub(crate) fn migration_addresses(config: &HostConfig, interfaces: &[Interface]) -> Vec<IpAddr> {
    let of_interfaces = interfaces
        .iter()
        .filter(|interface| config.migration_interfaces.contains(&interface.name))
        .flat_map(Interface::addresses);
    config
        .migration_addresses
        .iter()
        .copied()
        .chain(of_interfaces)
        .collect()
}

/// Checks this host without an agent.
pub(crate) async fn check_host(config: &HostConfig, system: &System) -> HostCheck {
    let qemu = QemuFacts::ask(&config.qemu, TOOLS).await;
    let interfaces = interfaces(TOOLS).await;
    let addresses = migration_addresses(config, &interfaces);
    let inputs = check::Inputs {
        config,
        system,
        qemu: &qemu,
        interfaces: &interfaces,
        migration_addresses: &addresses,
        userfaultfd: tracking(),
    };
    HostCheck {
        host: config.name.clone(),
        checks: tokio::task::block_in_place(|| check::run(&inputs)),
    }
}

impl Agent {
    pub(crate) fn host(&self) -> &HostName {
        &self.config.name
    }

    /// How the VM process of `vm` is to be.
    pub(crate) fn vm_config(&self, vm: &VmName) -> VmProcessConfig {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        VmProcessConfig {
            vm: vm.clone(),
            host: self.host().clone(),
            state_dir: text(self.config.vms_dir().join(vm.as_str())),
            run_dir: text(self.config.run_dir.join("vms").join(vm.as_str())),
            ram_dir: text(self.config.ram_dir()),
            qemu: text(self.config.qemu.clone()),
            qemu_uid: self.user.uid,
            qemu_gid: self.user.gid,
            migration_ports: (
                self.config.migration_ports.first,
                self.config.migration_ports.last,
            ),
            port_groups: self.config.port_groups.clone(),
            migration_addresses: self.migration_addresses.clone(),
            accelerator: self.config.accelerator,
        }
    }

    pub(crate) fn supervised(&self, vm: &VmName) -> Arc<Supervised> {
        self.supervisor.supervise(self.vm_config(vm))
    }

    pub(crate) fn known(&self, vm: &VmName) -> Reply<Arc<Supervised>> {
        if self.records.spec(vm)?.is_none() && self.supervisor.find(vm).is_none() {
            let message = format!(
                "host '{}' has no VM '{vm}': see 'godwit vm list'",
                self.host()
            );
            return Err(ApiError::new(ErrorCode::UnknownVm, message));
        }
        Ok(self.supervised(vm))
    }

    pub(crate) fn accelerator(&self) -> Accelerator {
        godwit_qemu::accel::come_to(self.config.accelerator)
    }

    /// What this host says of itself.
    pub(crate) fn info(&self) -> HostInfo {
        let nothing = QemuFacts::default();
        let qemu = self.qemu.as_ref().unwrap_or(&nothing);
        let (instance, site, may_be_alone) = self.site.with(|site| {
            let instance = site.instance().clone();
            (instance, site.heard(), site.may_be_configured_alone())
        });
        HostInfo {
            name: self.host().clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            kernel: self.system.kernel(),
            qemu: qemu.version.clone(),
            accelerator: self.accelerator(),
            machine_types: qemu.machine_types.clone(),
            machine_aliases: qemu.machine_aliases.clone(),
            cpu_models: qemu.cpu_models.clone(),
            encryption: self.config.encryption,
            port_groups: self.config.port_groups.clone(),
            migration_addresses: self.migration_addresses.clone(),
            agent_address: self.config.listen,
            memory_total_mib: self.system.meminfo_mib("MemTotal").unwrap_or(0),
            memory_free_mib: self.memory.free_mib(),
            cpus: self.system.cpus(),
            boot_id: self.boot_id.clone(),
            instance,
            site,
            boot_alone_ignored: self.config.boot == BootRule::Alone && !may_be_alone,
        }
    }

    /// All VMs, each asked at the same time.
    pub(crate) async fn vms(self: &Arc<Self>) -> Vec<HostVm> {
        let names = self.supervisor.names();
        let all = names.iter().filter_map(|name| self.supervisor.find(name));
        let (live, others): (Vec<_>, Vec<_>) = all.partition(|vm| vm.is_live());
        let mut asked = tokio::task::JoinSet::new();
        for vm in live {
            let agent = self.clone();
            asked.spawn(async move { agent.vm(&vm.config().vm).await });
        }
        let agent = self.clone();
        let read = blocking(move || {
            let read = others
                .iter()
                .map(|vm| agent.read_vm(&vm.config().vm, &vm.life()));
            Ok(read.flatten().collect::<Vec<_>>())
        });
        let mut vms = read.await.unwrap_or_default();
        vms.extend(asked.join_all().await.into_iter().flatten());
        vms.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
        vms
    }

    /// One VM, from its process or its record.
    pub(crate) async fn vm(self: &Arc<Self>, name: &VmName) -> Reply<HostVm> {
        let vm = self.known(name)?;
        if vm.is_live()
            && let Ok(VmAnswer::Status(status)) = vm.ask(&VmRequest::Status, READ).await
        {
            let mut vm = status.vm;
            self.boots.show(&mut vm);
            return Ok(vm);
        }
        let (agent, name, life) = (self.clone(), name.clone(), vm.life());
        blocking(move || agent.read_vm(&name, &life)).await
    }

    fn read_vm(&self, name: &VmName, life: &Life) -> Reply<HostVm> {
        let mut vm = self.records.host_vm(name, life)?;
        self.boots.show(&mut vm);
        Ok(vm)
    }

    /// Has the VM's process do something.
    pub(crate) async fn act(&self, name: &VmName, request: VmRequest) -> Reply<Done> {
        let vm = self.known(name)?;
        vm.need(NEED).await?;
        match vm.ask(&request, ACT).await? {
            VmAnswer::Done(message) => Ok(Done { message }),
            _ => Err(unexpected(name)),
        }
    }

    /// Settles a VM that is in doubt.
    pub(crate) async fn resolve(&self, name: &VmName, request: ResolveRequest) -> Reply<Done> {
        let run_here = request.run_on == *self.host() && !request.give_up;
        let confirm_fenced = request.confirm_fenced;
        self.act(
            name,
            VmRequest::Resolve {
                run_here,
                confirm_fenced,
            },
        )
        .await
    }

    /// Makes this host a destination.
    pub(crate) async fn prepare_incoming(
        self: &Arc<Self>,
        request: PrepareIncoming,
    ) -> Reply<IncomingReady> {
        request
            .spec
            .check()
            .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
        let name = request.spec.name.clone();
        let (book, host, spec) = (
            self.memory.clone(),
            self.host().clone(),
            request.spec.clone(),
        );
        let _promise = blocking(move || book.promise(&host, &spec)).await?;
        self.migration_begins(&request.migration.id, &name).await?;
        self.removed.begin_anew(&name);
        let vm = self.supervised(&name);
        vm.need(NEED).await?;
        match vm
            .ask(&VmRequest::PrepareIncoming(Box::new(request)), ACT)
            .await?
        {
            VmAnswer::IncomingReady(ready) => {
                self.remember_boot(&name);
                Ok(ready)
            }
            _ => Err(unexpected(&name)),
        }
    }

    /// Takes a message of another host about who may run a VM; gives the replies.
    pub(crate) async fn peer(
        &self,
        name: &VmName,
        from: HostName,
        message: serde_json::Value,
    ) -> Reply<Vec<serde_json::Value>> {
        let live = self.supervisor.find(name);
        let needs_process = live.is_some() && self.records.needs_process(name);
        if let Some(vm) = live
            && (needs_process || matches!(vm.life(), Life::Live { .. }))
        {
            vm.need(NEED).await?;
            let request = VmRequest::Peer { from, message };
            return match vm.ask(&request, ACT).await? {
                VmAnswer::Replies(replies) => Ok(replies),
                _ => Err(unexpected(name)),
            };
        }
        let (records, name) = (self.records.clone(), name.clone());
        let answered = tokio::task::spawn_blocking(move || records.answer(&name, from, message));
        answered.await.map_err(took_too_long)?
    }

    /// What stands in the way of the VM leaving here.
    pub(crate) async fn preflight_outgoing(
        self: &Arc<Self>,
        name: &VmName,
    ) -> Reply<PreflightOutgoing> {
        let supervised = self.known(name)?;
        let vm = self.vm(name).await?;
        let mut blockers = Vec::new();
        if matches!(vm.state, VmState::Running | VmState::Paused) {
            match supervised.ask(&VmRequest::Blockers, ACT).await? {
                VmAnswer::Blockers(found) => blockers = found,
                _ => return Err(unexpected(name)),
            }
        }
        let report = preflight::outgoing(&preflight::Source {
            host: self.host(),
            spec: &vm.spec,
            state: vm.state,
            blockers: &blockers,
            system: &self.system,
            tracking: tracking(),
        });
        let (host, spec) = (self.host().clone(), vm.spec.clone());
        let hashed = tokio::task::spawn_blocking(move || preflight::hash_files(&host, &spec));
        let (file_hashes, missing) = hashed.await.map_err(took_too_long)?;
        Ok(PreflightOutgoing {
            refusals: report.refusals.into_iter().chain(missing).collect(),
            passed: report.passed,
            vm,
            file_hashes,
        })
    }

    /// What stands in the way of a VM coming here; listens for its probe from here on.
    pub(crate) async fn preflight_incoming(
        self: &Arc<Self>,
        request: PreflightIncoming,
    ) -> Reply<PreflightReport> {
        request
            .spec
            .check()
            .map_err(|error| ApiError::new(ErrorCode::InvalidVm, error.to_string()))?;
        let arrived_ms = unix_ms();
        let agent = self.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let report = agent.look_at_incoming(&request, arrived_ms);
            (request, report)
        });
        let (request, report) = looked.await.map_err(took_too_long)?;
        if report.refusals.is_empty() && !request.probe_nonce.is_empty() {
            let nonce = probe::parse_nonce(&request.probe_nonce)?;
            self.probes
                .listen(nonce, &probe::bridges_of(&self.config, &request.spec))?;
        }
        Ok(report)
    }

    fn look_at_incoming(&self, request: &PreflightIncoming, unix_ms: u64) -> PreflightReport {
        let (free_ports, _) = check::free_ports(&self.config, &self.migration_addresses);
        let record = self.records.record(&request.spec.name);
        preflight::incoming(
            &preflight::Destination {
                config: &self.config,
                system: &self.system,
                info: &self.info(),
                free_mib: self.memory.free_mib(),
                tracking: tracking(),
                // A record that cannot be read may hold anything.
                name_taken: record.is_none_or(|record| record.may_hold()),
                free_ports,
                unix_ms,
            },
            request,
        )
    }

    /// Sends the probe from each of the VM's port groups.
    pub(crate) fn probe(&self, name: &VmName, nonce: &str) -> Reply<Done> {
        let nonce = probe::parse_nonce(nonce)?;
        let spec = self.spec(name)?;
        let bridges = probe::bridges_of(&self.config, &spec);
        probe::send(nonce, &bridges)?;
        Ok(done(format!("sent from {} port groups", bridges.len())))
    }

    fn spec(&self, name: &VmName) -> Reply<VmSpec> {
        let unknown = || {
            ApiError::new(
                ErrorCode::UnknownVm,
                format!("host '{}' has no VM '{name}'", self.host()),
            )
        };
        self.records.spec(name)?.ok_or_else(unknown)
    }

    /// The guest's console.
    pub(crate) async fn console(&self, name: &VmName) -> Reply<String> {
        let vm = self.known(name)?;
        match vm.ask(&VmRequest::Console, READ).await? {
            VmAnswer::Console(text) => Ok(text),
            _ => Err(unexpected(name)),
        }
    }

    /// Begins the supervision of every VM that this host knows.
    pub(crate) fn take_up(self: &Arc<Self>) -> std::io::Result<()> {
        make_dir(&self.config.run_dir.join("vms"), 0o711)?;
        let names = self.records.names();
        self.reports.take_up(&names);
        for name in names {
            self.supervised(&name);
        }
        Ok(())
    }

    /// Promises a VM that has no guest the memory that it needs.
    pub(crate) async fn promise_memory(
        self: &Arc<Self>,
        vm: &Arc<Supervised>,
    ) -> Reply<Option<Promise>> {
        let (agent, vm) = (self.clone(), vm.clone());
        blocking(move || {
            if evidence::may_live(vm.run_dir()) {
                return Ok(None);
            }
            let spec = agent.spec(&vm.config().vm)?;
            agent.memory.promise(agent.host(), &spec).map(Some)
        })
        .await
    }

    /// Boots a VM because somebody asked.
    pub(crate) async fn start(self: &Arc<Self>, name: &VmName) -> Reply<Done> {
        let promise = self.promise_memory(&self.known(name)?).await?;
        let done = self.act(name, VmRequest::Start).await?;
        drop(promise);
        self.no_boot_wanted(name);
        let (agent, name) = (self.clone(), name.clone());
        blocking(move || {
            agent.remember_boot(&name);
            Ok(done)
        })
        .await
    }
}
