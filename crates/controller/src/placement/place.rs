//! Where a VM may start and with which CPU model and machine type. Pure.
//!
//! Owns nothing. Refuses hosts that lack something, each with its reason.

use crate::error::{Outcome, refuse};
use godwit_types::cpu::{AUTO_MODELS, CpuWish, SAFE_MODEL, greatest};
use godwit_types::host::HostInfo;
use godwit_types::vm::{Accelerator, EncryptionMode};
use godwit_types::{ApiError, ErrorCode, HostName, VmName, VmSpec};

/// What runs a VM on this host.
pub fn accelerator_on(spec: &VmSpec, host: &HostInfo) -> Accelerator {
    match spec.accelerator {
        Accelerator::Auto => host.accelerator,
        given => given,
    }
}

/// What a host lacks for a VM, before memory.
pub fn lacks(spec: &VmSpec, host: &HostInfo) -> Vec<ApiError> {
    let name = &host.name;
    let mut found = Vec::new();
    let mut add = |code, message: String| found.push(ApiError::new(code, message).on_host(name));
    for nic in &spec.nics {
        if !host.port_groups.contains_key(&nic.port_group) {
            add(
                ErrorCode::MissingBridge,
                format!(
                    "host {name} has no port group {0}: add {0} = \"BRIDGE\" to [port_groups] in /etc/godwit/host.toml there, then run 'systemctl restart godwit-agent'",
                    nic.port_group
                ),
            );
        }
    }
    if spec.accelerator == Accelerator::Kvm && host.accelerator != Accelerator::Kvm {
        add(
            ErrorCode::Incompatible,
            format!(
                "host {name} cannot run guests with KVM: choose another host or set accelerator = \"auto\""
            ),
        );
    }
    if spec.encryption == EncryptionMode::Required && !host.encryption {
        add(
            ErrorCode::Encryption,
            format!(
                "host {name} does not encrypt migrations and VM {} requires it: choose another host",
                spec.name
            ),
        );
    }
    if !host.speaks.hardware.contains(spec.hardware()) {
        add(
            ErrorCode::Incompatible,
            format!(
                "VM {} has hardware version {}, and Godwit {} on host {name} knows {}: update Godwit there",
                spec.name,
                spec.hardware(),
                host.version,
                host.speaks.hardware
            ),
        );
    }
    if !is_alias(&spec.machine) && !host.machine_types.contains(&spec.machine) {
        add(
            ErrorCode::Incompatible,
            format!(
                "QEMU on host {name} does not have machine type {}: {}",
                spec.machine,
                machines_of(host)
            ),
        );
    }
    if let Some(message) = lacks_cpu(spec, host) {
        add(ErrorCode::Incompatible, message);
    }
    found
}

/// Which machine types a host has instead, and how to list them all.
fn machines_of(host: &HostInfo) -> String {
    let of_q35 = |name: &String| version(name.strip_prefix("pc-q35-")?);
    let named = host.machine_types.iter();
    let newest = named.filter_map(|name| Some((of_q35(name)?, name))).max();
    let such_as = newest.map_or_else(String::new, |(_, name)| format!(", such as {name}"));
    format!("use \"q35\", or one that 'qemu-system-x86_64 -machine help' lists there{such_as}")
}

/// Why a host cannot give a VM its CPU.
fn lacks_cpu(spec: &VmSpec, host: &HostInfo) -> Option<String> {
    let (wish, name) = (CpuWish::parse(&spec.cpu), &host.name);
    let (model, accelerator) = (&wish.model, accelerator_on(spec, host));
    if wish.is_of_one_host() {
        return spec.movable.then(|| wish.why_not_movable(&spec.name));
    }
    let is_there = model == "auto" || host.gives(accelerator, model);
    (!is_there).then(|| format!(
        "host {name} cannot give a guest CPU model {model} whole under {accelerator}: use one that 'godwit host show {name}' lists, or \"auto\""
    ))
}

/// Whether there is room; the remedy differs from caller to caller.
pub fn has_room(spec: &VmSpec, host: &HostInfo) -> bool {
    host.memory_free_mib >= spec.memory_mib
}

/// The error of a host without room.
pub fn no_room(spec: &VmSpec, host: &HostInfo) -> ApiError {
    let message = format!(
        "host {} has {} MiB of memory free and VM {} needs {}: choose another host or free some",
        host.name, host.memory_free_mib, spec.name, spec.memory_mib
    );
    ApiError::new(ErrorCode::OutOfMemory, message).on_host(&host.name)
}

/// Why a host that is closed takes no VMs, though it answers; none for one that is open.
pub fn closed(host: &HostInfo) -> Option<ApiError> {
    let message = format!(
        "host {0} is closed, as one that shuts down, and takes no VMs before it is booted again: choose another, or run 'godwit host open' on host {0}",
        host.name
    );
    host.closing
        .then(|| ApiError::new(ErrorCode::WrongState, message).on_host(&host.name))
}

/// Chooses among hosts that answer: the one with most free memory of those that lack nothing.
pub fn choose(spec: &VmSpec, hosts: &[HostInfo]) -> Outcome<HostName> {
    if hosts.is_empty() {
        return refuse(
            ErrorCode::HostUnreachable,
            "no host answers: enrol one with 'godwit host add', or see that the agents run",
        );
    }
    let mut reasons = Vec::new();
    let mut best: Option<&HostInfo> = None;
    for host in hosts {
        let mut lacking = Vec::from_iter(closed(host));
        lacking.extend(lacks(spec, host));
        if lacking.is_empty() && !has_room(spec, host) {
            lacking.push(no_room(spec, host));
        }
        match lacking.into_iter().next() {
            Some(reason) => reasons.push(reason),
            None if best.is_none_or(|best| host.memory_free_mib > best.memory_free_mib) => {
                best = Some(host)
            }
            None => {}
        }
    }
    match best {
        Some(host) => Ok(host.name.clone()),
        None => Err(joined(reasons)),
    }
}

/// Several refusals as one error: one keeps its code, several are a preflight failure that names all.
pub fn joined(mut refusals: Vec<ApiError>) -> ApiError {
    if refusals.len() == 1
        && let Some(only) = refusals.pop()
    {
        return only;
    }
    // What is so whichever the host is said once.
    let mut texts: Vec<&str> = Vec::new();
    for refusal in &refusals {
        if !texts.contains(&refusal.message.as_str()) {
            texts.push(&refusal.message);
        }
    }
    let code = match refusals.first() {
        Some(first) if refusals.iter().all(|refusal| refusal.code == first.code) => first.code,
        _ => ErrorCode::Preflight,
    };
    ApiError::new(code, texts.join("; "))
}

/// The description with CPU model and machine type that the hosts which answer have in common.
pub fn resolve(spec: &VmSpec, on: &HostInfo, hosts: &[HostInfo]) -> Outcome<VmSpec> {
    let accelerator = accelerator_on(spec, on);
    let peers: Vec<&HostInfo> = hosts
        .iter()
        .filter(|host| accelerator != Accelerator::Kvm || host.accelerator == Accelerator::Kvm)
        .collect();
    let mut resolved = spec.clone();
    if spec.cpu == "auto" {
        resolved.cpu = common_cpu(accelerator, on, &peers, &spec.name)?;
    }
    if is_alias(&spec.machine) {
        resolved.machine = common_machine(&spec.machine, on, &peers)?;
    }
    Ok(resolved)
}

/// The same, with regard to hosts that do not answer, by what they said last: the VM is to be able to move there later.
/// One that leaves nothing in common does not keep the VM from its start: it is left out and named.
pub fn resolve_for_all(
    spec: &VmSpec,
    on: &HostInfo,
    answering: &[HostInfo],
    silent: &[HostInfo],
) -> Outcome<(VmSpec, Vec<HostName>)> {
    let mut hosts = answering.to_vec();
    let mut resolved = resolve(spec, on, &hosts)?;
    let mut left_out = Vec::new();
    for host in silent {
        hosts.push(host.clone());
        match resolve(spec, on, &hosts) {
            Ok(with_it) => resolved = with_it,
            Err(_) => {
                hosts.pop();
                left_out.push(host.name.clone());
            }
        }
    }
    Ok((resolved, left_out))
}

/// Whether the second is the first with CPU model and machine type resolved, by whatever hosts there were.
pub fn may_resolve_to(spec: &VmSpec, resolved: &VmSpec) -> bool {
    let mut wanted = spec.clone();
    if spec.cpu == "auto" && AUTO_MODELS.contains(&resolved.cpu.as_str()) {
        wanted.cpu.clone_from(&resolved.cpu);
    }
    let versioned = prefix(&spec.machine).and_then(|prefix| resolved.machine.strip_prefix(prefix));
    if versioned.is_some_and(|text| version(text).is_some()) {
        wanted.machine.clone_from(&resolved.machine);
    }
    wanted == *resolved
}

/// A host that knows none of the models that are chosen from has no say: what it lists is no ground to refuse everybody.
fn common_cpu(
    accelerator: Accelerator,
    on: &HostInfo,
    hosts: &[&HostInfo],
    vm: &VmName,
) -> Outcome<String> {
    let lists = |host: &HostInfo, model: &str| host.gives(accelerator, model);
    let has_say = |host: &HostInfo| AUTO_MODELS.iter().any(|model| lists(host, model));
    let with_say = hosts.iter().copied().filter(|host| has_say(host));
    let peers: Vec<&HostInfo> = with_say.chain([on]).collect();
    let common = |peers: &[&HostInfo]| {
        let all = |model: &str| peers.iter().all(|host| lists(host, model));
        let safe = accelerator != Accelerator::Kvm && all(SAFE_MODEL);
        match safe {
            true => Some(SAFE_MODEL.to_owned()),
            false => greatest(all).map(str::to_owned),
        }
    };
    if let Some(model) = common(&peers) {
        return Ok(model);
    }
    let without = |left_out: &HostInfo| {
        let others = peers.iter().copied();
        common(
            &others
                .filter(|host| host.name != left_out.name)
                .collect::<Vec<_>>(),
        )
        .is_some()
    };
    let mut others = peers.iter().filter(|host| host.name != on.name);
    let excludes = match has_say(on) {
        true => others.find(|host| without(host)).copied(),
        false => Some(on),
    };
    let who = match excludes {
        Some(host) => format!(
            "host {} has no CPU model in common with the others",
            host.name
        ),
        None => "the hosts have no CPU model in common".to_owned(),
    };
    refuse(
        ErrorCode::Incompatible,
        format!("{who}: set cpu of VM {vm} to one that its host lists in 'godwit host show'"),
    )
}

fn is_alias(machine: &str) -> bool {
    prefix(machine).is_some()
}

/// What the versioned names behind an alias begin with.
fn prefix(alias: &str) -> Option<&'static str> {
    match alias {
        "q35" => Some("pc-q35-"),
        "pc" => Some("pc-i440fx-"),
        _ => None,
    }
}

fn common_machine(alias: &str, on: &HostInfo, hosts: &[&HostInfo]) -> Outcome<String> {
    let prefix = prefix(alias).unwrap_or(alias);
    let of_alias = |name: &String| version(name.strip_prefix(prefix)?);
    // A host without any version of it has no say.
    let has_say = |host: &&&HostInfo| {
        host.machine_types
            .iter()
            .any(|name| of_alias(name).is_some())
    };
    let peers: Vec<&&HostInfo> = hosts.iter().filter(has_say).collect();
    let newest = on
        .machine_types
        .iter()
        .filter(|name| peers.iter().all(|host| host.machine_types.contains(*name)))
        .filter_map(|name| Some((of_alias(name)?, name)))
        .max();
    match newest {
        Some((_, name)) => Ok(name.clone()),
        None => refuse(
            ErrorCode::Incompatible,
            format!(
                "the hosts' QEMUs have no version of machine type {alias} in common: give one of host {} in full",
                on.name
            ),
        ),
    }
}

/// `9.10` is newer than `9.2`.
fn version(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(
        name: &str,
        free: u64,
        accelerator: Accelerator,
        models: &[&str],
        machines: &[&str],
    ) -> HostInfo {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        HostInfo {
            name: HostName::new(name).unwrap(),
            version: "0".into(),
            speaks: Default::default(),
            kernel: "6.18".into(),
            qemu: "7.2.22".into(),
            accelerator,
            machine_types: owned(machines),
            machine_aliases: Default::default(),
            cpu_models: owned(models),
            cpu_models_under: Default::default(),
            encryption: name != "plain",
            port_groups: Default::default(),
            migration_addresses: Vec::new(),
            agent_address: "192.0.2.1:1".parse().unwrap(),
            memory_total_mib: 4096,
            memory_free_mib: free,
            cpus: 2,
            boot_id: String::new(),
            instance: Default::default(),
            site: Default::default(),
            boot_alone_ignored: false,
            closing: false,
            unread: Default::default(),
            certificate: None,
            datastores: Default::default(),
        }
    }

    fn spec() -> VmSpec {
        VmSpec::from_toml("name = \"web\"\nvcpus = 1\nmemory_mib = 1024\nkernel = \"/k\"").unwrap()
    }

    const MACHINES: &[&str] = &["pc-q35-9.2", "pc-q35-9.10", "pc-i440fx-9.2"];

    #[test]
    fn auto_is_the_greatest_common_model() {
        let kvm = Accelerator::Kvm;
        let a = host(
            "a",
            1,
            kvm,
            &["qemu64", "Haswell", "Skylake-Server"],
            MACHINES,
        );
        let b = host("b", 1, kvm, &["qemu64", "Haswell", "EPYC"], MACHINES);
        let hosts = [a.clone(), b];
        assert_eq!(resolve(&spec(), &a, &hosts).unwrap().cpu, "Haswell");
        // A host that only translates does not hold a KVM guest back, which could not go there.
        let t = host("t", 1, Accelerator::Tcg, &["qemu64"], MACHINES);
        assert_eq!(
            resolve(&spec(), &a, &[a.clone(), t.clone()]).unwrap().cpu,
            "Skylake-Server"
        );
        assert_eq!(resolve(&spec(), &t, &[a, t.clone()]).unwrap().cpu, "qemu64");
    }

    #[test]
    fn a_silent_host_counts_by_what_it_said_last_and_keeps_no_vm_from_its_start() {
        let kvm = Accelerator::Kvm;
        let a = host("a", 1, kvm, &["Haswell", "Westmere"], MACHINES);
        let weaker = host("b", 1, kvm, &["Westmere"], &["pc-q35-9.2"]);
        let other = host("c", 1, kvm, &["EPYC"], MACHINES);
        let answering = std::slice::from_ref(&a);
        let (resolved, left_out) =
            resolve_for_all(&spec(), &a, answering, &[other.clone(), weaker]).unwrap();
        assert_eq!(
            (resolved.cpu.as_str(), resolved.machine.as_str()),
            ("Westmere", "pc-q35-9.2")
        );
        assert_eq!(left_out, [other.name]);
    }

    #[test]
    fn auto_looks_at_what_the_accelerator_gives_and_not_at_what_qemu_lists() {
        let (kvm, tcg) = (Accelerator::Kvm, Accelerator::Tcg);
        let mut a = host("a", 1, kvm, &["EPYC-Genoa", "qemu64"], MACHINES);
        let under = |models: &[&str]| models.iter().map(|name| (*name).to_owned()).collect();
        a.cpu_models_under = [
            (kvm, under(&["Westmere", "qemu64"])),
            (tcg, under(&["qemu64"])),
        ]
        .into();
        let hosts = std::slice::from_ref(&a);
        assert_eq!(resolve(&spec(), &a, hosts).unwrap().cpu, "Westmere");
        let mut vm = spec();
        vm.accelerator = tcg;
        assert_eq!(resolve(&vm, &a, hosts).unwrap().cpu, "qemu64");
        vm.cpu = "Westmere".into();
        assert!(lacks(&vm, &a)[0].message.contains("whole under tcg"));
        vm.accelerator = kvm;
        assert_eq!(lacks(&vm, &a), []);
        // Where it could not be asked, nothing is given.
        a.cpu_models_under.remove(&kvm);
        assert_eq!(lacks(&vm, &a).len(), 1);
    }

    #[test]
    fn a_model_that_is_whatever_a_host_has_is_for_vms_that_never_move() {
        let a = host("a", 1, Accelerator::Tcg, &["qemu64"], MACHINES);
        let mut vm = spec();
        for model in ["max", "host", "max,-avx"] {
            vm.cpu = model.into();
            let found = lacks(&vm, &a);
            assert!(found[0].message.contains("cpu = \"auto\""), "{found:?}");
        }
        vm.movable = false;
        assert_eq!(lacks(&vm, &a), []);
    }

    #[test]
    fn an_alias_becomes_the_newest_common_version() {
        let tcg = Accelerator::Tcg;
        let a = host("a", 1, tcg, &["qemu64"], MACHINES);
        let b = host("b", 1, tcg, &["qemu64"], &["pc-q35-9.2"]);
        assert_eq!(
            resolve(&spec(), &a, std::slice::from_ref(&a))
                .unwrap()
                .machine,
            "pc-q35-9.10"
        );
        assert_eq!(
            resolve(&spec(), &a, &[a.clone(), b]).unwrap().machine,
            "pc-q35-9.2"
        );
        let none = host("n", 1, tcg, &["qemu64"], &["pc-q35-1.0"]);
        let error = resolve(&spec(), &a, &[a.clone(), none]).unwrap_err();
        assert_eq!(error.code, ErrorCode::Incompatible);
    }

    #[test]
    fn a_machine_type_that_no_host_has_is_answered_with_one_that_it_has() {
        let a = host("a", 1, Accelerator::Tcg, &["qemu64"], MACHINES);
        let mut vm = spec();
        vm.machine = "pc-q35-99".into();
        let message = lacks(&vm, &a)[0].message.clone();
        assert!(message.contains("-machine help"), "{message}");
        assert!(message.ends_with("such as pc-q35-9.10"), "{message}");
    }

    #[test]
    fn what_is_so_whichever_the_host_is_said_once() {
        let host = |name| host(name, 1, Accelerator::Tcg, &["qemu64"], MACHINES);
        let mut vm = spec();
        vm.cpu = "host".into();
        let error = choose(&vm, &[host("a"), host("b")]).unwrap_err();
        assert_eq!(error.message.matches("VM web has").count(), 1, "{error}");
    }

    #[test]
    fn a_host_that_lists_no_known_model_keeps_no_vm_from_starting() {
        let tcg = Accelerator::Tcg;
        let a = host("a", 1, tcg, &["qemu64", "Haswell"], MACHINES);
        let x = host("x", 1, tcg, &["nonsense"], &["nonsense"]);
        let resolved = resolve(&spec(), &a, &[a.clone(), x.clone()]).unwrap();
        assert_eq!(resolved.cpu, "qemu64");
        assert!(may_resolve_to(&spec(), &resolved));
        // One that excludes the rest is named, and so is the one where it cannot run.
        let b = host("b", 1, tcg, &["EPYC"], MACHINES);
        let error = resolve(&spec(), &a, &[a.clone(), x.clone(), b.clone()]).unwrap_err();
        assert!(error.message.starts_with("host b has no"), "{error}");
        let error = resolve(&spec(), &x, &[a, x.clone()]).unwrap_err();
        assert!(error.message.starts_with("host x has no"), "{error}");
    }

    #[test]
    fn placement_takes_what_fits_and_says_why_nothing_does() {
        let tcg = Accelerator::Tcg;
        let small = host("small", 512, tcg, &["qemu64"], MACHINES);
        let big = host("big", 2048, tcg, &["qemu64"], MACHINES);
        let plain = host("plain", 4096, tcg, &["qemu64"], MACHINES);
        let mut vm = spec();
        vm.encryption = EncryptionMode::Required;
        let hosts = [small.clone(), big, plain.clone()];
        assert_eq!(choose(&vm, &hosts).unwrap().as_str(), "big");
        let error = choose(&vm, std::slice::from_ref(&small)).unwrap_err();
        assert_eq!(error.code, ErrorCode::OutOfMemory);
        let error = choose(&vm, &[small, plain]).unwrap_err();
        assert_eq!(error.code, ErrorCode::Preflight);
        assert!(
            error.message.contains("small") && error.message.contains("plain"),
            "{error}"
        );
        assert_eq!(
            choose(&vm, &[]).unwrap_err().code,
            ErrorCode::HostUnreachable
        );
    }
}
