//! Everything that is looked at before a migration begins: pure checks of the inventory, then both hosts' own, then a
//! probe frame from each of the VM's port groups at the source to the same at the destination.
//!
//! Owns nothing, changes nothing. Collects every refusal, each naming the host and the remedy.

use crate::app::App;
use crate::error::{Outcome, refuse};
use crate::placement::place;
use crate::reconcile::refresh;
use crate::secret;
use crate::state::{HostEntry, Place};
use godwit_rpc::AgentClient;
use godwit_types::host::HostInfo;
use godwit_types::host_api::{HostVm, PreflightIncoming, PreflightOutgoing, ProbeRequest};
use godwit_types::migration::{Cipher, MigrateRequest, PreflightReport};
use godwit_types::vm::{Accelerator, EncryptionMode, VmState};
use godwit_types::{ApiError, ErrorCode, HostName, VmName, VmSpec};
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

/// Matters that a host itself knows better than the inventory.
const SAID_BETTER: &[ErrorCode] = &[
    ErrorCode::NotMigratable,
    ErrorCode::OutOfMemory,
    ErrorCode::MissingBridge,
    ErrorCode::Incompatible,
    ErrorCode::Encryption,
];

/// One end of a migration.
pub struct End {
    /// The host.
    pub host: HostName,
    /// What it says of itself.
    pub info: HostInfo,
    /// Its agent's address.
    pub address: std::net::SocketAddr,
    /// Its agent.
    pub agent: AgentClient,
}

/// What preflight found.
pub struct Preflight {
    /// Where it runs.
    pub source: End,
    /// Where it goes.
    pub destination: End,
    /// The VM as it runs.
    pub vm: HostVm,
    /// Encryption decided on.
    pub cipher: Cipher,
    /// What was fine and what was not.
    pub report: PreflightReport,
}

/// Looks at everything. An error is what makes looking further pointless.
pub async fn run(app: &App, name: &VmName, request: &MigrateRequest) -> Outcome<Preflight> {
    let (mut source, mut destination, mut vm) = ends(app, name, &request.to)?;
    if !place::has_room(&vm.spec, &destination.info) {
        // What is known of its memory is up to a poll old: it is asked before it refuses.
        refresh(app, &request.to).await;
        (source, destination, vm) = ends(app, name, &request.to)?;
    }
    let mut report = PreflightReport {
        refusals: check_inventory(&vm, &source.info, &destination.info),
        ..PreflightReport::default()
    };
    let cipher = match decide_cipher(
        &vm.spec,
        request.encryption,
        &source.info,
        &destination.info,
    ) {
        Ok(cipher) => cipher,
        Err(error) => {
            report.refusals.push(error);
            Cipher::Aes256Gcm
        }
    };
    if report.refusals.is_empty() {
        report.passed.push(format!(
            "hosts {} and {} have in common what VM {name} needs",
            source.host, destination.host
        ));
        let cipher = match cipher {
            Cipher::Aes256Gcm => "aes-256-gcm",
            Cipher::None => "none",
        };
        report.passed.push(format!("encryption: {cipher}"));
    }
    let mut found = Preflight {
        source,
        destination,
        vm,
        cipher,
        report,
    };
    found.ask_hosts().await?;
    Ok(found)
}

/// Two hosts that answer.
pub fn two_ends(app: &App, from: &HostName, to: &HostName) -> Outcome<(End, End)> {
    Ok((
        end(app, from, app.host(from)?)?,
        end(app, to, app.host(to)?)?,
    ))
}

fn ends(app: &App, name: &VmName, to: &HostName) -> Outcome<(End, End, HostVm)> {
    if !app.state().vms.contains_key(name) {
        return Err(crate::app::unknown_vm(name));
    }
    let destination = app.host(to)?;
    let place = app.place_of(name)?;
    if place.host == *to {
        return refuse(
            ErrorCode::WrongState,
            format!("VM {name} is on host {to} already: choose another host"),
        );
    }
    let vm = movable(name, &place)?;
    app.drains.must_take_vms(to)?;
    let source = app.host(&place.host)?;
    Ok((
        end(app, &place.host, source)?,
        end(app, to, destination)?,
        vm,
    ))
}

fn movable(name: &VmName, place: &Place) -> Outcome<HostVm> {
    match &place.vm {
        Some(vm) if vm.state == VmState::Running => Ok(vm.clone()),
        Some(vm) if vm.state == VmState::Paused => refuse(
            ErrorCode::WrongState,
            format!(
                "VM {name} is paused and only a running one migrates: resume it with 'godwit vm resume {name}'"
            ),
        ),
        other => {
            let state = other.as_ref().map_or(VmState::Stopped, |vm| vm.state);
            refuse(
                ErrorCode::WrongState,
                format!(
                    "VM {name} is {state} and only a running one migrates: start it on the other host with 'godwit vm start {name} --on HOST'"
                ),
            )
        }
    }
}

fn end(app: &App, name: &HostName, entry: HostEntry) -> Outcome<End> {
    let agent = app.connected_agent(name)?;
    let mut info = entry
        .info
        .ok_or_else(|| crate::app::unreachable_host(name))?;
    info.name = name.clone();
    Ok(End {
        host: name.clone(),
        info,
        address: entry.address,
        agent,
    })
}

/// What the inventory alone can tell.
pub fn check_inventory(vm: &HostVm, source: &HostInfo, destination: &HostInfo) -> Vec<ApiError> {
    let mut refusals = writable_disks(&vm.spec, &source.name);
    let mut spec = vm.spec.clone();
    // Encryption is decided on its own, with the request's wish.
    spec.encryption = EncryptionMode::Disabled;
    spec.accelerator = vm.accelerator.unwrap_or(Accelerator::Auto);
    refusals.extend(place::lacks(&spec, destination));
    if !place::has_room(&spec, destination) {
        refusals.push(place::no_room(&spec, destination));
    }
    if vm.accelerator.is_none() {
        let message = format!(
            "host {} does not say what runs VM {}: try again",
            source.name, spec.name
        );
        refusals.push(ApiError::new(ErrorCode::Preflight, message).on_host(&source.name));
    }
    refusals.extend(no_common_family(source, destination));
    refusals
}

fn writable_disks(spec: &VmSpec, host: &HostName) -> Vec<ApiError> {
    let writable = spec.disks.iter().filter(|disk| !disk.read_only);
    let refusals = writable.map(|disk| {
        ApiError::new(
            ErrorCode::NotMigratable,
            format!(
                "disk {} of VM {} is writable and cannot move yet: make it read_only or remove it",
                disk.name, spec.name
            ),
        )
        .on_host(host)
    });
    refusals.collect()
}

fn no_common_family(source: &HostInfo, destination: &HostInfo) -> Option<ApiError> {
    let has = |host: &HostInfo, v4: bool| {
        host.migration_addresses
            .iter()
            .any(|address| IpAddr::is_ipv4(address) == v4)
    };
    let common = [true, false]
        .into_iter()
        .any(|v4| has(source, v4) && has(destination, v4));
    if common {
        return None;
    }
    let message = format!(
        "hosts {} and {} have no migration addresses of the same family: give both IPv4 or both IPv6 addresses in their agents' configuration",
        source.name, destination.name
    );
    Some(ApiError::new(ErrorCode::Preflight, message).on_host(&destination.name))
}

/// Encryption of one migration. A request may raise the VM's mode and lower all but `required`.
pub fn decide_cipher(
    vm: &VmSpec,
    wish: Option<EncryptionMode>,
    source: &HostInfo,
    destination: &HostInfo,
) -> Outcome<Cipher> {
    let mode = wish.unwrap_or(vm.encryption);
    if vm.encryption == EncryptionMode::Required && mode != EncryptionMode::Required {
        return refuse(
            ErrorCode::Encryption,
            format!(
                "VM {} requires encrypted migration and {mode} would lower that: leave --encryption out, or edit the VM",
                vm.name
            ),
        );
    }
    let unable = [source, destination]
        .into_iter()
        .find(|host| !host.encryption);
    match (mode, unable) {
        (EncryptionMode::Disabled, _) => Ok(Cipher::None),
        (_, None) => Ok(Cipher::Aes256Gcm),
        (EncryptionMode::Opportunistic, Some(_)) => Ok(Cipher::None),
        (EncryptionMode::Required, Some(host)) => Err(ApiError::new(
            ErrorCode::Encryption,
            format!("host {} does not encrypt migrations and encryption is required: choose another host or turn encryption on in its agent's configuration", host.name),
        )
        .on_host(&host.name)),
    }
}

impl Preflight {
    async fn ask_hosts(&mut self) -> Outcome<()> {
        let name = self.vm.spec.name.clone();
        match self.source.agent.preflight_outgoing(&name).await {
            Ok(outgoing) => self.ask_destination(outgoing).await?,
            Err(error) => self
                .report
                .refusals
                .push(ApiError::from(error).on_host(&self.source.host)),
        }
        Ok(())
    }

    async fn ask_destination(&mut self, outgoing: PreflightOutgoing) -> Outcome<()> {
        let host = self.source.host.clone();
        self.take_answer(&host, outgoing.passed, outgoing.refusals);
        let nonce = match outgoing.vm.spec.nics.is_empty() {
            true => String::new(),
            false => secret::probe_nonce()?,
        };
        self.vm = outgoing.vm;
        let request = PreflightIncoming {
            spec: self.vm.spec.clone(),
            accelerator: self.vm.accelerator.unwrap_or(Accelerator::Auto),
            file_hashes: outgoing.file_hashes,
            source_unix_ms: unix_ms(),
            probe_nonce: nonce.clone(),
        };
        match self.destination.agent.preflight_incoming(&request).await {
            Ok(answer) => {
                let host = self.destination.host.clone();
                self.take_answer(&host, answer.passed, answer.refusals);
                if !nonce.is_empty() && !self.lacks_bridge() {
                    self.probe(&nonce).await;
                }
            }
            Err(error) => self
                .report
                .refusals
                .push(ApiError::from(error).on_host(&self.destination.host)),
        }
        Ok(())
    }

    /// Takes in what a host says of itself; what the inventory said of the same matter there gives way to it.
    fn take_answer(&mut self, host: &HostName, passed: Vec<String>, refusals: Vec<ApiError>) {
        let said = |old: &ApiError| {
            old.host.as_deref() == Some(host.as_str())
                && SAID_BETTER.contains(&old.code)
                && refusals.iter().any(|new| new.code == old.code)
        };
        self.report.refusals.retain(|old| !said(old));
        self.report.passed.extend(passed);
        let refusals = refusals.into_iter().map(|error| error.on_host(host));
        self.report.refusals.extend(refusals);
    }

    /// A frame cannot cross a bridge that is not there, and that is said already.
    fn lacks_bridge(&self) -> bool {
        let mut refusals = self.report.refusals.iter();
        refusals.any(|error| error.code == ErrorCode::MissingBridge)
    }

    /// The destination listens since it was asked; the source sends, the destination says what arrived.
    async fn probe(&mut self, nonce: &str) {
        let request = ProbeRequest {
            nonce: nonce.to_owned(),
        };
        let name = self.vm.spec.name.clone();
        if let Err(error) = self.source.agent.probe(&name, &request).await {
            self.report
                .refusals
                .push(ApiError::from(error).on_host(&self.source.host));
            return;
        }
        match self.destination.agent.probe_result(nonce).await {
            Ok(result) => self.judge_probe(&result.arrived),
            Err(error) => self
                .report
                .refusals
                .push(ApiError::from(error).on_host(&self.destination.host)),
        }
    }

    fn judge_probe(&mut self, arrived: &std::collections::BTreeMap<godwit_types::PortGroup, bool>) {
        let (a, b) = (&self.source.host, &self.destination.host);
        let groups: std::collections::BTreeSet<_> = self
            .vm
            .spec
            .nics
            .iter()
            .map(|nic| &nic.port_group)
            .collect();
        for group in groups {
            if arrived.get(group).copied().unwrap_or(false) {
                self.report.passed.push(format!(
                    "a frame from port group {group} of host {a} arrives at host {b}"
                ));
                continue;
            }
            let message = format!(
                "a frame from port group {group} of host {a} does not arrive at host {b}: connect both bridges to the same network"
            );
            self.report
                .refusals
                .push(ApiError::new(ErrorCode::Preflight, message).on_host(b));
        }
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(0)
}
