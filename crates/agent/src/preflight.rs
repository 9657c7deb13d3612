//! What is looked at before a migration starts, on either side.
//!
//! Functions of facts gathered beforehand; they change nothing. Each refusal has a stable code and one sentence that
//! names this host and the remedy. Refuses: nothing by itself; the caller ends the migration if a refusal is there.

mod disks;
mod linked;

pub use disks::to_move;

use crate::config::{CONFIG_PATH, HostConfig};
use crate::crypto::sha256_of_file;
use crate::qemu_facts::version_numbers;
use crate::system::{KERNEL_MIN, System};
pub(crate) use disks::can_be_made;
use godwit_migrate::admission::reasons_to_stay;
use godwit_qemu::disk::DiskError;
use godwit_qemu::trial::CpuFacts;
use godwit_types::cpu::CpuWish;
use godwit_types::host::HostInfo;
use godwit_types::host_api::PreflightIncoming;
use godwit_types::migration::PreflightReport;
use godwit_types::vm::{Accelerator, EncryptionMode, VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// What QEMU and the VM process need beside the guest's memory, MiB.
pub const OVERHEAD_MIB: u64 = 192;
/// Difference of the hosts' clocks from which a warning is given, ms.
const CLOCK_DIFFERENCE_MS: u64 = 1000;

/// One thing looked at: a line for people, or a refusal.
type Finding = Result<String, ApiError>;

/// What the destination is, gathered beforehand.
pub struct Destination<'a> {
    pub config: &'a HostConfig,
    pub system: &'a System,
    /// What the host says of itself.
    pub info: &'a HostInfo,
    /// Memory that a new guest could have, MiB.
    pub free_mib: u64,
    /// What the VM's accelerator can give a guest's CPU here, or why that is not known; none if it was never asked.
    pub cpus: Option<&'a Result<CpuFacts, String>>,
    /// Whether dirty tracking works, else why not.
    pub tracking: Result<(), String>,
    /// Whether this host may hold a VM of that name already.
    pub name_taken: bool,
    /// Which other VM that this host may hold has the VM's user id.
    pub same_user: Option<VmName>,
    /// Number of free migration ports.
    pub free_ports: usize,
    /// Migration addresses that no interface has.
    pub missing_addresses: &'a [IpAddr],
    /// This host's clock, ms since 1970.
    pub unix_ms: u64,
}

/// What the source is, gathered beforehand.
pub struct Source<'a> {
    pub config: &'a HostConfig,
    pub host: &'a HostName,
    pub spec: &'a VmSpec,
    /// Where it is in its life.
    pub state: VmState,
    /// QEMU's own reasons against it.
    pub blockers: &'a [String],
    pub system: &'a System,
    /// Whether dirty tracking works, else why not.
    pub tracking: Result<(), String>,
    /// Addresses for migrations, and those of them that no interface has.
    pub addresses: &'a [IpAddr],
    pub missing_addresses: &'a [IpAddr],
}

fn collect(findings: impl IntoIterator<Item = Finding>, host: &HostName) -> PreflightReport {
    let mut report = PreflightReport::default();
    for finding in findings {
        match finding {
            Ok(line) => report.passed.push(line),
            Err(error) => report.refusals.push(error.on_host(host)),
        }
    }
    report
}

fn refuse(code: ErrorCode, message: impl Into<String>) -> Finding {
    Err(ApiError::new(code, message))
}

/// Whether the VM can come here.
pub fn incoming(here: &Destination<'_>, request: &PreflightIncoming) -> PreflightReport {
    let spec = &request.spec;
    let host = &here.config.name;
    let mut findings = vec![
        name_is_free(here, spec),
        memory(here, spec),
        machine(here, spec),
        cpu_model(here, spec, request.accelerator),
        accelerator(here, request.accelerator),
        encryption(here, spec),
        kernel(host, here.system),
        tracking(host, &here.tracking),
        ports(here),
        clock(here, request.source_unix_ms),
    ];
    // A destination listens on each of its addresses.
    findings.extend(no_address(here.config, here.missing_addresses).map(Err));
    findings.extend(user_is_anothers(here, spec).map(Err));
    findings.extend(reserved_file(here.config, spec).map(Err));
    let come = linked::come(here.config, spec, &request.disks);
    findings.extend(disks::places(here.config, spec, &come.disks));
    findings.extend(come.passed.into_iter().map(Ok));
    findings.extend(spec.has_variables().then(|| uefi(here, request)));
    findings.extend(
        spec.nics
            .iter()
            .map(|nic| bridge(here, nic.port_group.as_str())),
    );
    findings.extend(
        request
            .file_hashes
            .iter()
            .map(|(path, hash)| same_file(host, path, hash)),
    );
    PreflightReport {
        stay_linked: come.stay_linked,
        ..collect(findings, host)
    }
}

/// Whether the VM can leave here.
pub fn outgoing(here: &Source<'_>) -> PreflightReport {
    let mut findings = vec![
        state_allows(here),
        kernel(here.host, here.system),
        tracking(here.host, &here.tracking),
    ];
    // A source goes on with the addresses that it has.
    if here.missing_addresses.len() == here.addresses.len() {
        findings.extend(no_address(here.config, here.missing_addresses).map(Err));
    }
    findings.extend(reasons_to_stay(here.spec).into_iter().map(Err));
    let groups: BTreeSet<&str> = here
        .spec
        .nics
        .iter()
        .map(|nic| nic.port_group.as_str())
        .collect();
    let down = groups
        .into_iter()
        .filter_map(|group| bridge_is_down(here.config, here.system, group));
    findings.extend(down.map(Err));
    let read_only = here.spec.disks.iter().filter(|disk| disk.read_only);
    findings.extend(read_only.map(|disk| Ok(format!("disk '{}' is read-only", disk.name))));
    findings.extend(here.blockers.iter().map(|reason| {
        let vm = &here.spec.name;
        refuse(
            ErrorCode::NotMigratable,
            format!("QEMU of VM '{vm}' on host '{}' refuses to migrate: {reason}; remove that device from the VM", here.host),
        )
    }));
    collect(findings, here.host)
}

/// Paths of the files that a VM boots from.
pub fn boot_files(spec: &VmSpec) -> Vec<String> {
    spec.boot_files().map(str::to_owned).collect()
}

/// SHA-256 of each file that a VM boots from; those that cannot be read are refusals.
pub fn hash_files(host: &HostName, spec: &VmSpec) -> (Vec<(String, String)>, Vec<ApiError>) {
    let mut hashes = Vec::new();
    let mut refusals = Vec::new();
    for path in boot_files(spec) {
        match sha256_of_file(Path::new(&path)) {
            Ok(hash) => hashes.push((path, hash)),
            Err(error) => refusals.push(missing_file(host, &path, &error.to_string())),
        }
    }
    (hashes, refusals)
}

/// Why a VM's files cannot be used: they lie where the host keeps records or guests' memory.
pub fn reserved_file(config: &HostConfig, spec: &VmSpec) -> Option<ApiError> {
    let disks = spec.disks.iter().map(|disk| disk.path.as_str());
    reserved_path(config, &spec.name, spec.boot_files().chain(disks))
}

/// The same of these files.
pub fn reserved_path<'a>(
    config: &HostConfig,
    vm: &VmName,
    mut paths: impl Iterator<Item = &'a str>,
) -> Option<ApiError> {
    let reserved = config.reserved();
    let dir_of = |path| Some((reserved.of_path(Path::new(path))?, PathBuf::from(path)));
    let (dir, path) = paths.find_map(dir_of)?;
    let message = format!(
        "VM '{vm}' cannot be on host '{}': {}",
        config.name,
        DiskError::Reserved { path, dir }
    );
    Some(ApiError::new(ErrorCode::InvalidRequest, message))
}

fn missing_file(host: &HostName, path: &str, why: &str) -> ApiError {
    let message =
        format!("{path} cannot be read on host '{host}' ({why}): copy it there, to the same path");
    ApiError::new(ErrorCode::MissingFile, message).on_host(host)
}

fn name_is_free(here: &Destination<'_>, spec: &VmSpec) -> Finding {
    if here.name_taken {
        return refuse(
            ErrorCode::AlreadyExists,
            format!(
                "host '{}' already has a VM named '{}': rename or delete one of them",
                here.config.name, spec.name
            ),
        );
    }
    Ok(format!(
        "the name '{}' is free on host '{}'",
        spec.name, here.config.name
    ))
}

/// Each VM's QEMU would reach the other's memory and disks.
fn user_is_anothers(here: &Destination<'_>, spec: &VmSpec) -> Option<ApiError> {
    let other = here.same_user.as_ref()?;
    let (vm, host) = (&spec.name, &here.config.name);
    let message = format!(
        "VM '{vm}' runs as the same user as VM '{other}' on host '{host}': stop it and start it anew ('godwit vm stop {vm}', 'godwit vm start {vm}'), which gives it a user of its own"
    );
    Some(ApiError::new(ErrorCode::NotMigratable, message))
}

/// MiB that a VM needs of its host.
pub fn needed_mib(spec: &VmSpec) -> u64 {
    spec.memory_mib.saturating_add(OVERHEAD_MIB)
}

fn memory(here: &Destination<'_>, spec: &VmSpec) -> Finding {
    let (needed, free, host) = (needed_mib(spec), here.free_mib, &here.config.name);
    if needed > free {
        return refuse(
            ErrorCode::OutOfMemory,
            format!(
                "VM '{}' needs {needed} MiB, host '{host}' has {free} MiB free: move or stop another VM there, or choose another host",
                spec.name
            ),
        );
    }
    Ok(format!(
        "memory: {needed} MiB of the {free} MiB that are free on host '{host}'"
    ))
}

fn machine(here: &Destination<'_>, spec: &VmSpec) -> Finding {
    let (host, machine, qemu) = (&here.config.name, &spec.machine, &here.info.qemu);
    if !here.info.machine_types.contains(machine) {
        let newer = version_numbers(machine) > version_numbers(qemu);
        let remedy = if newer {
            "install a QEMU that is not older than the source's"
        } else {
            "choose another host, or give the VM another machine type while it is stopped"
        };
        return refuse(
            ErrorCode::Incompatible,
            format!(
                "QEMU {qemu} on host '{host}' does not know machine type '{machine}': {remedy}"
            ),
        );
    }
    Ok(format!(
        "machine type {machine} is known to QEMU {qemu} on host '{host}'"
    ))
}

fn cpu_model(here: &Destination<'_>, spec: &VmSpec, accelerator: Accelerator) -> Finding {
    let (host, wish) = (&here.config.name, CpuWish::parse(&spec.cpu));
    let model = &wish.model;
    let no = |message| refuse(ErrorCode::Incompatible, message);
    if wish.is_of_one_host() {
        return no(wish.why_not_movable(&spec.name));
    }
    let cpus = match here.cpus {
        Some(Ok(cpus)) => cpus,
        unknown => {
            let why = unknown.and_then(|cpus| cpus.as_ref().err());
            let why = why.map_or("it was never asked", String::as_str);
            return no(format!(
                "what QEMU can give a guest under {accelerator} is not known on host '{host}' ({why}): see 'godwit host check' there"
            ));
        }
    };
    let Some(lacking) = cpus.lacking(model) else {
        return no(format!(
            "QEMU on host '{host}' does not know CPU model '{model}': use cpu = \"auto\" and start the VM anew, or choose another host"
        ));
    };
    if !lacking.is_empty() {
        return no(format!(
            "host '{host}' cannot give CPU model '{model}' whole under {accelerator}, it lacks {}: use cpu = \"auto\" and start the VM anew, or choose another host",
            some_of(lacking)
        ));
    }
    let wanted = wish.features.iter().filter(|(_, on)| *on);
    let mut missing = wanted.filter(|(name, _)| cpus.features.get(name) == Some(&false));
    if let Some((feature, _)) = missing.next() {
        return no(format!(
            "host '{host}' has no CPU feature '{feature}' for a guest under {accelerator}, which VM '{}' has: start the VM anew without it, or choose another host",
            spec.name
        ));
    }
    Ok(format!(
        "CPU model {model} is available whole on host '{host}' under {accelerator}"
    ))
}

/// The first few of a list, and how many more there are.
pub fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn accelerator(here: &Destination<'_>, wanted: Accelerator) -> Finding {
    let host = &here.config.name;
    // A boot sector runs under KVM even where `auto` would not choose it, so the device decides here.
    let possible = wanted != Accelerator::Kvm || here.system.exists("/dev/kvm");
    if !possible {
        return refuse(
            ErrorCode::Incompatible,
            format!(
                "the VM runs under KVM and host '{host}' has no /dev/kvm: turn virtualisation on there, or choose another host"
            ),
        );
    }
    Ok(format!("{wanted} is available on host '{host}'"))
}

fn encryption(here: &Destination<'_>, spec: &VmSpec) -> Finding {
    let host = &here.config.name;
    if spec.encryption == EncryptionMode::Required && !here.info.encryption {
        return refuse(
            ErrorCode::Encryption,
            format!(
                "VM '{}' requires encryption and host '{host}' is configured without: set encryption = true there",
                spec.name
            ),
        );
    }
    Ok(format!(
        "encryption mode {} can be met by host '{host}'",
        spec.encryption
    ))
}

fn kernel(host: &HostName, system: &System) -> Finding {
    let release = system.kernel();
    if !system.kernel_is_new_enough() {
        let (major, minor) = KERNEL_MIN;
        return refuse(
            ErrorCode::Preflight,
            format!(
                "host '{host}' runs Linux {release}: dirty tracking needs {major}.{minor} or newer"
            ),
        );
    }
    Ok(format!("Linux {release} on host '{host}' can track writes"))
}

fn tracking(host: &HostName, usable: &Result<(), String>) -> Finding {
    match usable {
        Ok(()) => Ok(format!("userfaultfd is usable on host '{host}'")),
        Err(why) => refuse(
            ErrorCode::Preflight,
            format!(
                "writes cannot be tracked on host '{host}' ({why}): see 'godwit host check' there"
            ),
        ),
    }
}

fn ports(here: &Destination<'_>) -> Finding {
    let (host, range) = (&here.config.name, here.config.migration_ports);
    if here.free_ports == 0 {
        return refuse(
            ErrorCode::PortInUse,
            format!(
                "all ports {}-{} are in use on host '{host}': free one or set migration_ports to another range",
                range.first, range.last
            ),
        );
    }
    Ok(format!(
        "{} migration ports free on host '{host}'",
        here.free_ports
    ))
}

/// The migration addresses that no interface has, in one refusal.
pub(crate) fn no_address(config: &HostConfig, missing: &[IpAddr]) -> Option<ApiError> {
    let (host, key) = (&config.name, config.migration_key());
    let list: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let what = match list.as_slice() {
        [] => return None,
        [one] => format!("its migration address {one}: bring it up"),
        _ => format!("its migration addresses {}: bring them up", list.join(", ")),
    };
    let message = format!(
        "host '{host}' does not have {what}, or correct {key} in {CONFIG_PATH} on {host} and restart godwit-agent"
    );
    Some(ApiError::new(ErrorCode::Preflight, message))
}

/// QEMU takes a guest's flash memory only into one of the same length.
fn uefi(here: &Destination<'_>, request: &PreflightIncoming) -> Finding {
    let (host, vm) = (&here.config.name, &request.spec.name);
    let sizes = match here.config.uefi() {
        Ok(uefi) => uefi.sizes,
        Err(error) => {
            return refuse(
                ErrorCode::MissingFile,
                format!(
                    "VM '{vm}' has firmware = \"uefi\", and cannot be on host '{host}': {error}"
                ),
            );
        }
    };
    match request.uefi {
        Some(source) if source != sizes => refuse(
            ErrorCode::Incompatible,
            format!(
                "the UEFI firmware of VM '{vm}' has {} bytes and its variables {}, that of host '{host}' has {} and {}: name files of the same lengths on both hosts with uefi_code and uefi_variables in host.toml, and start the VM anew where they were changed",
                source.code, source.variables, sizes.code, sizes.variables
            ),
        ),
        Some(_) => Ok(format!(
            "host '{host}' has UEFI firmware of the same lengths"
        )),
        None => refuse(
            ErrorCode::Preflight,
            format!(
                "the source does not say how long the UEFI firmware of VM '{vm}' is: see the log of its agent"
            ),
        ),
    }
}

fn clock(here: &Destination<'_>, source_unix_ms: u64) -> Finding {
    let (host, difference) = (&here.config.name, here.unix_ms.abs_diff(source_unix_ms));
    if source_unix_ms != 0 && difference >= CLOCK_DIFFERENCE_MS {
        return Ok(format!(
            "warning: the clock of host '{host}' differs by {difference} ms: run a time service on both hosts"
        ));
    }
    Ok(format!(
        "the clock of host '{host}' agrees within {CLOCK_DIFFERENCE_MS} ms"
    ))
}

/// A bridge that is down carries no frame.
fn bridge_is_down(config: &HostConfig, system: &System, group: &str) -> Option<ApiError> {
    let mut groups = config.port_groups.iter();
    let (_, bridge) = groups.find(|(name, _)| name.as_str() == group)?;
    system.is_down(bridge).then(|| {
        let host = &config.name;
        let message = format!(
            "bridge '{bridge}' of port group '{group}' is down on host '{host}': bring it up with 'ip link set {bridge} up'"
        );
        ApiError::new(ErrorCode::MissingBridge, message)
    })
}

fn bridge(here: &Destination<'_>, group: &str) -> Finding {
    let host = &here.config.name;
    let found = here
        .config
        .port_groups
        .iter()
        .find(|(name, _)| name.as_str() == group);
    let Some((_, bridge)) = found else {
        return refuse(
            ErrorCode::MissingBridge,
            format!(
                "host '{host}' has no port group '{group}': add {group} = \"BRIDGE\" to [port_groups] in its configuration and restart its agent"
            ),
        );
    };
    if !here.system.is_bridge(bridge) {
        return refuse(
            ErrorCode::MissingBridge,
            format!(
                "bridge '{bridge}' of port group '{group}' does not exist on host '{host}': make it with 'ip link add {bridge} type bridge && ip link set {bridge} up'"
            ),
        );
    }
    if let Some(error) = bridge_is_down(here.config, here.system, group) {
        return Err(error);
    }
    Ok(format!(
        "port group {group} is bridge {bridge} on host '{host}'"
    ))
}

fn same_file(host: &HostName, path: &str, hash: &str) -> Finding {
    // The path came over the network: it must be one that a VM could have been given.
    if !path.starts_with('/') || path.contains('\0') {
        return refuse(
            ErrorCode::InvalidRequest,
            format!("'{path}' is not an absolute path"),
        );
    }
    match sha256_of_file(Path::new(path)) {
        Err(error) => Err(missing_file(host, path, &error.to_string())),
        Ok(found) if found != hash => refuse(
            ErrorCode::Incompatible,
            format!(
                "{path} on host '{host}' is not the file that the VM booted from: copy the source's there"
            ),
        ),
        Ok(_) => Ok(format!("{path} is the same on host '{host}'")),
    }
}

fn state_allows(here: &Source<'_>) -> Finding {
    let vm = &here.spec.name;
    match here.state {
        VmState::Running => Ok(format!("VM '{vm}' is running")),
        VmState::Paused => refuse(
            ErrorCode::WrongState,
            format!(
                "VM '{vm}' is paused and only a running VM can migrate: resume it with 'godwit vm resume {vm}'"
            ),
        ),
        VmState::InDoubt => refuse(
            ErrorCode::InDoubt,
            format!("VM '{vm}' is in doubt: see 'godwit vm show {vm}' for what ends that"),
        ),
        VmState::Incoming => refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM '{vm}' is still coming to host '{}': wait for that migration's end",
                here.host
            ),
        ),
        other => refuse(
            ErrorCode::WrongState,
            format!(
                "VM '{vm}' is {other} on host '{}': only a running VM can migrate; start it first",
                here.host
            ),
        ),
    }
}

#[cfg(test)]
#[path = "preflight_tests.rs"]
mod tests;
