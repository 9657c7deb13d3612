//! The agent itself: what it knows of this host, and what it does when asked.
//!
//! Owns everything that the routes share. Each operation on a VM goes to that VM's process; where none lives, the
//! durable record answers. Refuses: to decide who may run a VM.

use crate::addresses::{Addresses, migration_addresses};
use crate::boot::Boots;
use crate::cancelled::Cancelled;
use crate::check;
use crate::closing::Closing;
use crate::config::{BootRule, HostConfig};
use crate::crowd::Crowd;
use crate::datastore_rooms::Rooms;
use crate::evidence;
use crate::launch::make_dir;
use crate::link::Bursts;
use crate::load::Readings;
use crate::making::Makings;
use crate::manager::Manager;
use crate::memory::{Memory, Promise};
use crate::preflight;
use crate::probe::Probes;
use crate::qemu_facts::QemuFacts;
use crate::qemu_now::{self, QemuNow};
use crate::qemu_trial::TrialSetting;
use crate::records::{Records, VMS_MAX, internal};
use crate::removed::Removed;
use crate::renewal::Certificate;
use crate::reports::Reports;
use crate::site::Site;
use crate::supervisor::{Supervised, Supervisor};
use crate::system::{System, interfaces};
use crate::users::{self, NOBODY, User};
use godwit_guestmem::tracker;
use godwit_ownership::PeerMessage;
use godwit_rpc::{Identity, Revocations};
use godwit_site::HostSite;
use godwit_types::certificate::CertificateDates;
use godwit_types::control_api::{Done, HostCheck};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{PeerEnvelope, VmAnswer, VmProcessConfig, VmRequest};
use godwit_types::migration::Side;
use godwit_types::snapshots::Snapshots;
use godwit_types::version::{Speaks, VERSION};
use godwit_types::vm::{Accelerator, VmSpec};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use serde::Deserialize as _;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

mod cloning;
mod console;
mod moving;
mod shown;

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
    pub qemu: QemuNow,
    pub addresses: Addresses,
    pub boot_id: String,
    pub supervisor: Supervisor,
    pub records: Records,
    pub probes: Probes,
    pub revocations: Arc<Revocations>,
    pub bursts: Arc<Bursts>,
    pub rooms: Rooms,
    pub readings: Mutex<Readings>,
    pub site: Arc<Site>,
    pub boots: Boots,
    pub closing: Closing,
    pub manager: Manager,
    pub memory: Arc<Memory>,
    pub reports: Reports,
    pub cancelled: Cancelled,
    pub removed: Removed,
    pub makings: Makings,
    pub certificate: Certificate,
    pub crowd: Crowd,
}

pub(crate) type Reply<T> = Result<T, ApiError>;

pub(crate) fn done(message: impl Into<String>) -> Done {
    Done {
        message: message.into(),
    }
}

/// Has a VM's process do something.
async fn ask_done(vm: &Supervised, name: &VmName, request: &VmRequest) -> Reply<Done> {
    match vm.ask(request, ACT).await? {
        VmAnswer::Done(message) => Ok(Done { message }),
        _ => Err(unexpected(name)),
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

/// When this host's certificate was made and ends, as its files say.
pub(crate) fn certificate(config: &HostConfig) -> Result<CertificateDates, String> {
    let identity = Identity::load(&config.pki_dir());
    let holder = identity.and_then(|identity| identity.holder());
    holder
        .map(|holder| holder.dates())
        .map_err(|error| error.to_string())
}

/// Checks this host without an agent.
pub(crate) async fn check_host(config: &HostConfig, system: &System) -> HostCheck {
    let user = users::qemu_user(config.qemu_user.as_deref()).unwrap_or(NOBODY);
    let qemu = qemu_now::ask(config, user).await;
    let interfaces = interfaces(TOOLS).await;
    let addresses = migration_addresses(config, &interfaces);
    let guests_unit = Manager::default().guests_unit().await;
    let checks = tokio::task::block_in_place(|| {
        let setting = TrialSetting::new(config, user);
        let guests = qemu.as_ref().map(|facts| setting.run_guests(&facts.tried));
        check::run(&check::Inputs {
            config,
            system,
            qemu: &qemu,
            guests: &guests.unwrap_or_default(),
            interfaces: &interfaces,
            migration_addresses: &addresses,
            userfaultfd: tracking(),
            certificate: certificate(config),
            guests_unit,
        })
    });
    HostCheck {
        host: config.name.clone(),
        checks,
    }
}

impl Agent {
    pub(crate) fn host(&self) -> &HostName {
        &self.config.name
    }

    /// How the VM process of `vm` is to be.
    pub(crate) fn vm_config(&self, vm: &VmName) -> VmProcessConfig {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        let [uefi_code, uefi_variables] = self.config.uefi_files();
        VmProcessConfig {
            vm: vm.clone(),
            host: self.host().clone(),
            state_dir: text(self.config.vms_dir().join(vm.as_str())),
            run_dir: text(self.run_dir(vm)),
            ram_dir: text(self.config.ram_dir()),
            qemu: text(self.config.qemu.clone()),
            qemu_uid: self.user.uid,
            qemu_gid: self.user.gid,
            migration_ports: (
                self.config.migration_ports.first,
                self.config.migration_ports.last,
            ),
            port_groups: self.config.port_groups.clone(),
            migration_addresses: self.addresses.migration(),
            accelerator: self.config.accelerator,
            uefi_code,
            uefi_variables,
            reserved_dirs: vec![text(self.config.controller_state_dir.clone())],
        }
    }

    /// Refuses a VM whose files lie where this host keeps records or guests' memory, as far as that can be told beforehand.
    pub(crate) fn refuse_reserved_files(&self, spec: &VmSpec) -> Reply<()> {
        match preflight::reserved_file(&self.config, spec) {
            Some(error) => Err(error.on_host(self.host())),
            None => Ok(()),
        }
    }

    /// What a reboot empties of a VM.
    pub(crate) fn run_dir(&self, vm: &VmName) -> PathBuf {
        self.config.run_dir.join("vms").join(vm.as_str())
    }

    /// Refuses to act on a VM's record behind the back of a VM process or a QEMU that lives, whatever the record says.
    pub(crate) fn must_not_live(&self, vm: &VmName) -> Reply<()> {
        match self.may_live(vm)? {
            true => Err(evidence::alive(vm, self.host(), &self.run_dir(vm))),
            false => Ok(()),
        }
    }

    /// Whether anything of the VM may live: by its run directory, and by what runs on its RAM files.
    pub(crate) fn may_live(&self, vm: &VmName) -> Reply<bool> {
        if evidence::may_live(&self.run_dir(vm)) {
            return Ok(true);
        }
        let qemus = evidence::qemus(&self.config.ram_dir(), self.user.uid).map_err(internal)?;
        Ok(qemus.contains(vm))
    }

    /// The VM's process, where one lives or may be needed, since its record alone is no evidence while something lives.
    pub(crate) async fn living(self: &Arc<Self>, vm: &VmName) -> Reply<Option<Arc<Supervised>>> {
        if let Some(found) = self.supervisor.find(vm).filter(|found| found.is_live()) {
            return Ok(Some(found));
        }
        let (agent, name) = (Arc::clone(self), vm.clone());
        let alive = blocking(move || Ok(agent.must_not_live(&name).err())).await?;
        let Some(error) = alive else { return Ok(None) };
        let found = self.supervised(vm);
        match found.need(SOON).await {
            Ok(()) => Ok(Some(found)),
            Err(why) => {
                tracing::error!(%vm, %why, "something of the VM lives and does not answer");
                Err(error)
            }
        }
    }

    pub(crate) fn supervised(&self, vm: &VmName) -> Arc<Supervised> {
        self.supervisor.supervise(self.vm_config(vm))
    }

    pub(crate) fn known(&self, vm: &VmName) -> Reply<Arc<Supervised>> {
        // One whose description cannot be read is known, and its process may still be asked.
        if matches!(self.records.spec(vm), Ok(None)) && self.supervisor.find(vm).is_none() {
            return Err(self.unknown_vm(vm));
        }
        Ok(self.supervised(vm))
    }

    pub(crate) fn accelerator(&self) -> Accelerator {
        godwit_qemu::accel::come_to(self.config.accelerator)
    }

    /// Looks for another QEMU until told to stop.
    pub(crate) async fn keep_qemu_known(self: Arc<Self>, stop: watch::Receiver<bool>) {
        self.qemu.keep(&self.config, self.user, stop).await;
    }

    /// What this host says of itself.
    pub(crate) fn info(&self) -> HostInfo {
        let known = self.qemu.get();
        let nothing = QemuFacts::default();
        let qemu = known.as_ref().as_ref().unwrap_or(&nothing);
        let cpu_models_under = qemu.cpu_models();
        let accelerator = self.accelerator();
        let site = self.site.heard();
        let (instance, may_be_alone) = self
            .site
            .with(|site| (site.instance().clone(), site.may_be_configured_alone()));
        HostInfo {
            name: self.host().clone(),
            version: VERSION.into(),
            speaks: Speaks::here(),
            kernel: self.system.kernel(),
            qemu: qemu.version.clone(),
            accelerator,
            machine_types: qemu.machine_types.clone(),
            machine_aliases: qemu.machine_aliases.clone(),
            cpu_models: cpu_models_under
                .get(&accelerator)
                .cloned()
                .unwrap_or_default(),
            cpu_models_under,
            encryption: self.config.encryption,
            port_groups: self.config.port_groups.clone(),
            migration_addresses: self.addresses.migration(),
            agent_address: self.config.listen,
            memory_total_mib: self.system.meminfo_mib("MemTotal").unwrap_or(0),
            memory_free_mib: self.memory.free_mib(),
            cpus: self.system.cpus(),
            boot_id: self.boot_id.clone(),
            instance,
            site,
            closing: self.closing.is_on(),
            boot_alone_ignored: self.config.boot == BootRule::Alone && !may_be_alone,
            unread: self.records.all_unread(),
            certificate: Some(self.certificate.info()),
            datastores: self.rooms.of(&self.config.datastores),
        }
    }

    /// Has the VM's process do something.
    pub(crate) async fn act(&self, name: &VmName, request: VmRequest) -> Reply<Done> {
        let vm = self.known(name)?;
        vm.need(NEED).await?;
        ask_done(&vm, name, &request).await
    }

    pub(crate) async fn snapshots(&self, name: &VmName) -> Reply<Snapshots> {
        let vm = self.known(name)?;
        vm.need(NEED).await?;
        match vm.ask(&VmRequest::Snapshots, ACT).await? {
            VmAnswer::Snapshots(snapshots) => Ok(snapshots),
            _ => Err(unexpected(name)),
        }
    }

    /// Takes a message of another host about who may run a VM; gives the replies.
    pub(crate) async fn peer(
        self: &Arc<Self>,
        name: &VmName,
        from: HostName,
        envelope: PeerEnvelope,
    ) -> Reply<Vec<serde_json::Value>> {
        self.must_be_hosts(name, &from, &envelope)?;
        let seat = self.crowd.enter(name, &from)?;
        let message = envelope.message;
        let known = self.supervisor.find(name);
        let mut asked = known.filter(|_| self.records.needs_process(name));
        if asked.is_none() && self.is_asked_for_disks(name, &from, &message) {
            asked = Some(self.supervised(name));
        }
        if asked.is_none() {
            asked = self.living(name).await?;
        }
        if let Some(vm) = asked {
            vm.need(NEED).await?;
            let request = VmRequest::Peer { from, message };
            // Whoever asks may hang up; the VM process is busy with it all the same.
            let answered = tokio::spawn(async move {
                let answer = vm.ask(&request, ACT).await;
                drop(seat);
                answer
            });
            return match answered.await.map_err(took_too_long)?? {
                VmAnswer::Replies(replies) => Ok(replies),
                _ => Err(unexpected(name)),
            };
        }
        let (records, name) = (self.records.clone(), name.clone());
        let answered = tokio::task::spawn_blocking(move || records.answer(&name, from, message));
        answered.await.map_err(took_too_long)?
    }

    /// Whether the destination of a migration that went from here asks whether this host has the VM's disks. A VM process alone can tell.
    fn is_asked_for_disks(
        &self,
        vm: &VmName,
        from: &HostName,
        message: &serde_json::Value,
    ) -> bool {
        let message = PeerMessage::deserialize(message);
        let message = message.ok().filter(PeerMessage::asks_for_disks);
        let Some(PeerMessage::AskGift { migration, .. }) = message else {
            return false;
        };
        let report = self.reports.read(vm, &migration).ok().flatten();
        report.is_some_and(|report| report.side == Side::Source && report.to == *from)
    }

    /// Who speaks, and who is spoken to, are the hosts that they say: not a copy of one's disk, on which a handover stands
    /// as it was.
    fn must_be_hosts(&self, name: &VmName, from: &HostName, envelope: &PeerEnvelope) -> Reply<()> {
        let (life, meant) = (envelope.life.as_ref(), envelope.meant.as_ref());
        let refused = |site: &mut HostSite| site.refuses_peer(from, life, meant);
        match self.site.with(refused) {
            Some(why) => Err(ApiError::new(
                ErrorCode::WrongState,
                format!(
                    "a word about who runs VM {name} does not count: {why}; see 'godwit host list'"
                ),
            )),
            None => Ok(()),
        }
    }

    fn spec(&self, name: &VmName) -> Reply<VmSpec> {
        let spec = self.records.spec(name)?;
        spec.ok_or_else(|| self.unknown_vm(name))
    }

    /// Begins the supervision of every VM that this host knows, and of every one of which something lives: its state
    /// directory may be an older copy that knows nothing of it.
    pub(crate) fn take_up(self: &Arc<Self>) -> std::io::Result<()> {
        let run_dirs = self.config.run_dir.join("vms");
        make_dir(&run_dirs, 0o711)?;
        let mut names: BTreeSet<_> = self.records.names()?.into_iter().collect();
        let living = evidence::living(&run_dirs, &self.config.ram_dir(), self.user.uid)?;
        for name in living.iter().filter(|name| !names.contains(*name)) {
            tracing::error!(vm = %name, "something of a VM lives that no record tells of");
        }
        names.extend(living.iter().cloned());
        if names.len() > VMS_MAX {
            let message = format!(
                "{} and {} tell of more than {VMS_MAX} VMs: see what made so many directories",
                self.config.vms_dir().display(),
                run_dirs.display()
            );
            return Err(std::io::Error::other(message));
        }
        self.reports.take_up(&Vec::from_iter(names.iter().cloned()));
        for name in &names {
            let vm = self.supervised(name);
            if living.contains(name) {
                // Only a VM process finds out what lives, and tells of it.
                vm.want();
            }
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
            if evidence::qemu_may_live(vm.run_dir()) {
                return Ok(None);
            }
            let spec = agent.spec(&vm.config().vm)?;
            agent.memory.promise(agent.host(), &spec).map(Some)
        })
        .await
    }

    /// What comes before its VM process is asked to boot a VM.
    async fn prepare_start(
        self: &Arc<Self>,
        name: &VmName,
    ) -> Reply<(Arc<Supervised>, Option<Promise>)> {
        self.closing.refuse(self.host())?;
        let vm = self.known(name)?;
        self.renew_idle(&vm).await?;
        let promise = self.promise_memory(&vm).await?;
        vm.need(NEED).await?;
        Ok((vm, promise))
    }

    /// Boots a VM because somebody asked. Where it is refused before its VM process was asked, nothing began: a VM that is off
    /// begins by that request alone.
    pub(crate) async fn start(self: &Arc<Self>, name: &VmName) -> Reply<Done> {
        let prepared = self.prepare_start(name).await;
        let (vm, promise) = prepared.map_err(ApiError::not_begun)?;
        let done = ask_done(&vm, name, &VmRequest::Start).await?;
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
