//! Whether a migration may begin, judged by facts: what the inventory knows and what both hosts said when asked. Pure.
//!
//! Owns nothing. What the inventory finds against a host is a guess where that host can look for itself: it is up to a
//! poll old, and gives way to what the host says of the same matter. Refuses: a VM of which nobody says what runs it,
//! hosts that cannot reach each other, and encryption below what the VM requires.

use super::linked;
use crate::error::{Outcome, refuse};
use crate::placement::place;
use godwit_migrate::admission::reasons_to_stay;
use godwit_types::datastore::is_device_path;
use godwit_types::disk_move::Method;
use godwit_types::host::HostInfo;
use godwit_types::host_api::HostVm;
use godwit_types::migration::{Cipher, DiskToMove, PreflightReport};
use godwit_types::version::{Build, MIGRATION_WITH_SNAPSHOTS, Speaks, cannot_migrate};
use godwit_types::vm::{Accelerator, DiskSpec, EncryptionMode};
use godwit_types::{ApiError, ErrorCode, HostName, PortGroup, VmSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// What a host said when it was asked.
#[derive(Debug, Clone, Default)]
pub struct Said {
    /// What was fine, one line each.
    pub passed: Vec<String>,
    pub refusals: Vec<ApiError>,
}

/// Which port groups' probe frames arrived, or why nobody knows.
pub type Arrived = Result<BTreeMap<PortGroup, bool>, ApiError>;

/// All that is known before a migration begins. What was not asked is none.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The VM as it runs.
    pub vm: HostVm,
    /// As the destination is to have it.
    pub there: VmSpec,
    /// The host where it runs.
    pub source: HostInfo,
    /// The host where it goes.
    pub destination: HostInfo,
    /// Encryption that the request asks for.
    pub wish: Option<EncryptionMode>,
    /// How disks are to go along.
    pub method: Method,
    /// What the source says of its leaving.
    pub leaving: Option<Result<Said, ApiError>>,
    /// What the destination says of its coming.
    pub coming: Option<Result<Said, ApiError>>,
    /// What became of the probe.
    pub arrived: Option<Arrived>,
    /// The disks that go along, as the source says, and as the destination has places for them once it was asked.
    pub disks: Vec<DiskToMove>,
    /// The names of linked ones that stay so.
    pub stay_linked: Vec<String>,
}

/// Something that speaks against the migration.
enum Finding {
    /// A host can look for itself, and what it says of this counts more.
    Guessed(ApiError),
    /// Only here is enough known to say it.
    Known(ApiError),
}

/// Judges all facts: what was fine, what was not, and the encryption. Every refusal is there, not only the first.
pub fn check(facts: &Facts) -> (PreflightReport, Cipher) {
    let mut report = PreflightReport::default();
    let (found, cipher) = from_inventory(facts);
    if found.is_empty() {
        report.passed.extend(fine(facts, cipher));
    }
    let (source, destination) = (&facts.source.name, &facts.destination.name);
    let answers = [(source, &facts.leaving), (destination, &facts.coming)];
    let said = answers.map(|(host, answer)| (host, answer.as_ref().and_then(|a| a.as_ref().ok())));
    let stands = found.into_iter().filter_map(|finding| match finding {
        Finding::Known(error) => Some(error),
        Finding::Guessed(error) => (!gives_way(&error, &said)).then_some(error),
    });
    report.refusals.extend(stands);
    for (host, answer) in answers {
        let (passed, refusals) = match answer {
            None => continue,
            Some(Ok(said)) => (said.passed.clone(), said.refusals.clone()),
            Some(Err(error)) => (Vec::new(), vec![error.clone()]),
        };
        report.passed.extend(passed);
        let refusals = refusals.into_iter().map(|error| error.on_host(host));
        report.refusals.extend(refusals);
    }
    // What the destination has of linked disks is known once it has answered.
    if let Some(Ok(_)) = &facts.coming {
        report.passed.extend(linked::lines(facts));
        report.refusals.extend(linked::refusals(facts));
        report.stay_linked.clone_from(&facts.stay_linked);
    }
    if facts.method == Method::Snapshot {
        report.refusals.extend(take_no_logs(facts));
    }
    match &facts.arrived {
        None => {}
        Some(Ok(arrived)) => judge_probe(facts, arrived, &mut report),
        Some(Err(error)) => report.refusals.push(error.clone()),
    }
    (report, cipher)
}

/// A frame cannot cross a bridge that is not there, and that is said already.
pub fn lacks_bridge(facts: &Facts) -> bool {
    let (report, _) = check(facts);
    let mut refusals = report.refusals.iter();
    refusals.any(|error| error.code == ErrorCode::MissingBridge)
}

/// Whether a host itself said something of the matter that was guessed.
fn gives_way(guess: &ApiError, said: &[(&HostName, Option<&Said>)]) -> bool {
    said.iter().any(|(host, said)| {
        guess.host.as_deref() == Some(host.as_str())
            && said.is_some_and(|said| said.refusals.iter().any(|new| new.code == guess.code))
    })
}

fn fine(facts: &Facts, cipher: Cipher) -> Vec<String> {
    let cipher = match cipher {
        Cipher::Aes256Gcm => "aes-256-gcm",
        Cipher::None => "none",
    };
    let host = &facts.source.name;
    let mut fine = vec![
        format!(
            "hosts {host} and {} have in common what VM {} needs",
            facts.destination.name, facts.vm.spec.name
        ),
        format!("encryption: {cipher}"),
    ];
    let along = facts.vm.spec.disks.iter().filter(|disk| disk.goes_along());
    fine.extend(along.filter(|disk| is_device_path(&disk.path)).map(|disk| {
        let (name, path) = (&disk.name, &disk.path);
        format!(
            "disk '{name}': nothing is erased on the device {path} of host {host} once the VM has moved; its label, if it has one, calls it free then"
        )
    }));
    fine
}

/// What the inventory finds, and the encryption.
fn from_inventory(facts: &Facts) -> (Vec<Finding>, Cipher) {
    let (vm, source, destination) = (&facts.vm, &facts.source, &facts.destination);
    let stays = reasons_to_stay(&vm.spec).into_iter();
    let stays = stays.map(|error| Finding::Guessed(error.on_host(&source.name)));
    let mut found: Vec<Finding> = stays.collect();
    let mut spec = vm.spec.clone();
    // Encryption is decided on its own, with the request's wish.
    spec.encryption = EncryptionMode::Disabled;
    spec.accelerator = vm.accelerator.unwrap_or(Accelerator::Auto);
    found.extend(place::closed(destination).map(Finding::Guessed));
    let lacks = place::lacks(&spec, destination);
    found.extend(lacks.into_iter().map(Finding::Guessed));
    if !place::has_room(&spec, destination) {
        found.push(Finding::Guessed(place::no_room(&spec, destination)));
    }
    if is_silent(vm) {
        let message = format!(
            "host {} does not say what runs VM {}: try again",
            source.name, spec.name
        );
        let error = ApiError::new(ErrorCode::Preflight, message).on_host(&source.name);
        found.push(Finding::Known(error));
    }
    found.extend(no_common_version(facts).map(Finding::Known));
    found.extend(without_snapshots(facts).map(Finding::Known));
    found.extend(no_common_family(source, destination).map(Finding::Known));
    let cipher = decide_cipher(&vm.spec, facts.wish, source, destination);
    let cipher = cipher.unwrap_or_else(|error| {
        found.push(Finding::Guessed(error));
        Cipher::Aes256Gcm
    });
    (found, cipher)
}

/// The build that a VM's process is of; one that does not say speaks what was spoken before any did.
pub fn vm_process(vm: &HostVm) -> Build {
    vm.vm_process.clone().unwrap_or_else(|| Build {
        version: "of an unknown version".into(),
        speaks: Speaks::default(),
    })
}

/// Whether its VM process does not answer just now: of what it speaks nothing is known then.
fn is_silent(vm: &HostVm) -> bool {
    vm.accelerator.is_none()
}

/// Both sides of a migration speak one version of its control channel.
fn no_common_version(facts: &Facts) -> Option<ApiError> {
    if is_silent(&facts.vm) {
        return None;
    }
    let (source, destination) = (&facts.source, &facts.destination);
    let there = Build {
        version: destination.version.clone(),
        speaks: destination.speaks.clone(),
    };
    let why = cannot_migrate(
        &source.name,
        &vm_process(&facts.vm),
        &destination.name,
        &there,
    )?;
    Some(ApiError::new(ErrorCode::Incompatible, why).on_host(&destination.name))
}

/// Both hosts have to know how disks go along that consist of several images.
fn without_snapshots(facts: &Facts) -> Option<ApiError> {
    let mut disks = facts.disks.iter().filter(|_| !is_silent(&facts.vm));
    let disk = disks.find(|disk| disk.layered)?;
    let (vm, destination) = (vm_process(&facts.vm), &facts.destination);
    let common = vm.speaks.migration.common(destination.speaks.migration);
    if common.is_none_or(|common| common >= MIGRATION_WITH_SNAPSHOTS) {
        return None;
    }
    let way_out = match vm.speaks.migration.max < MIGRATION_WITH_SNAPSHOTS {
        true => format!(
            "renew its VM process with 'godwit vm renew {}'",
            facts.vm.spec.name
        ),
        false => format!("install Godwit {} on host {}", vm.version, destination.name),
    };
    let message = format!(
        "disk '{}' of VM {} consists of several images, since it has snapshots, or images of deleted ones that are not merged yet; host {}, Godwit {}, and the VM process, Godwit {}, do not take such a disk along together: {way_out}, or delete its snapshots first",
        disk.name, facts.vm.spec.name, destination.name, destination.version, vm.version
    );
    Some(ApiError::new(ErrorCode::Incompatible, message).on_host(&destination.name))
}

/// Disks that do not go along by redo logs, which lie beside their images and take nothing along that lies there already.
fn take_no_logs(facts: &Facts) -> impl Iterator<Item = ApiError> {
    let disks = facts.vm.spec.disks.iter();
    let along = disks.filter(|spec| spec.goes_along());
    along.filter_map(|spec| {
        let named = facts.disks.iter().find(|disk| disk.name == spec.name);
        let why = cannot_take_logs(spec, named)?;
        let message = format!("disk '{}' {why}", spec.name);
        Some(ApiError::new(ErrorCode::Preflight, message).on_host(&facts.source.name))
    })
}

fn cannot_take_logs(spec: &DiskSpec, named: Option<&DiskToMove>) -> Option<&'static str> {
    if is_device_path(&spec.path) {
        return Some(
            "is on a block device, beside which there is no place for redo logs: leave out --method ('method', over REST), and it is mirrored",
        );
    }
    let named = named?;
    if named.linked.is_some() {
        return Some(
            "is linked to another image, and redo logs take that to no other host: leave out --method ('method', over REST), and it stays linked there, or becomes one image",
        );
    }
    named.layered.then_some(
        "consists of several images, since it has snapshots, or images of deleted ones or redo logs that are not merged yet ('godwit vm snapshot list' tells), and redo logs take none of them along: leave out --method ('method', over REST), or delete its snapshots first",
    )
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
fn decide_cipher(
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

fn judge_probe(facts: &Facts, arrived: &BTreeMap<PortGroup, bool>, report: &mut PreflightReport) {
    let (a, b) = (&facts.source.name, &facts.destination.name);
    let nics = facts.vm.spec.nics.iter();
    let groups: BTreeSet<_> = nics.map(|nic| &nic.port_group).collect();
    for group in groups {
        if arrived.get(group).copied().unwrap_or(false) {
            report.passed.push(format!(
                "a frame from port group {group} of host {a} arrives at host {b}"
            ));
            continue;
        }
        let message = format!(
            "a frame from port group {group} of host {a} does not arrive at host {b}: connect both bridges to the same network"
        );
        report
            .refusals
            .push(ApiError::new(ErrorCode::Preflight, message).on_host(b));
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
