//! Each refusal of preflight, brought about by a small real environment.

use super::*;
use crate::check_network::free_ports;
use godwit_qemu::machine::CpuModel;
use godwit_types::host_api::UefiSizes;
use godwit_types::vm::DiskSpec;
use std::collections::BTreeMap;
use std::net::TcpListener;

struct Environment {
    dir: tempfile::TempDir,
    config: HostConfig,
    system: System,
    info: HostInfo,
    cpus: Result<CpuFacts, String>,
    request: PreflightIncoming,
}

impl Environment {
    /// A host with everything in order.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        for (path, text) in [
            ("proc/sys/kernel/osrelease", "6.18.0"),
            ("sys/class/net/vmbr0/bridge/x", ""),
        ] {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let kernel = dir.path().join("vmlinuz");
        std::fs::write(&kernel, "kernel").unwrap();
        let config = "name = \"b\"\nlisten = \"127.0.0.1:1\"\nmigration_addresses = [\"127.0.0.1\"]\n[port_groups]\nvm = \"vmbr0\"\n";
        let config = HostConfig::parse(config, Path::new("t")).unwrap();
        let spec = format!(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 1024\ncpu = \"Nehalem\"\nmachine = \"pc-q35-7.2\"\nkernel = \"{}\"\n[[nic]]\nport_group = \"vm\"\n",
            kernel.display()
        );
        let spec = VmSpec::from_toml(&spec).unwrap();
        let (file_hashes, refusals) = hash_files(&config.name, &spec);
        assert!(refusals.is_empty());
        let request = PreflightIncoming {
            spec,
            accelerator: Accelerator::Tcg,
            file_hashes,
            uefi: None,
            source_unix_ms: 5_000_000,
            probe_nonce: String::new(),
            disks: Vec::new(),
        };
        Self {
            system: System::under(&root),
            info: info(&config),
            cpus: Ok(cpus()),
            dir,
            config,
            request,
        }
    }

    fn here(&self) -> Destination<'_> {
        Destination {
            config: &self.config,
            system: &self.system,
            info: &self.info,
            free_mib: 4096,
            cpus: Some(&self.cpus),
            tracking: Ok(()),
            name_taken: false,
            same_user: None,
            free_ports: 10,
            missing_addresses: &[],
            unix_ms: 5_000_100,
        }
    }

    fn source(&self) -> Source<'_> {
        Source {
            config: &self.config,
            host: &self.config.name,
            spec: &self.request.spec,
            state: VmState::Running,
            blockers: &[],
            system: &self.system,
            tracking: Ok(()),
            addresses: &[],
            missing_addresses: &[],
        }
    }

    fn refusals(&self, here: &Destination<'_>) -> Vec<(ErrorCode, String)> {
        let report = incoming(here, &self.request);
        report
            .refusals
            .into_iter()
            .map(|e| (e.code, e.message))
            .collect()
    }
}

fn cpus() -> CpuFacts {
    let model = |name: &str, lacking: &[&str]| CpuModel {
        name: name.into(),
        unavailable: lacking.iter().map(|one| (*one).into()).collect(),
    };
    let lacking = ["sse4a", "a", "b", "c", "d", "e"];
    CpuFacts {
        models: vec![model("Nehalem", &[]), model("EPYC", &lacking)],
        features: [("avx".into(), true), ("avx512f".into(), false)].into(),
    }
}

fn info(config: &HostConfig) -> HostInfo {
    HostInfo {
        name: config.name.clone(),
        version: "0".into(),
        speaks: Default::default(),
        kernel: "6.18.0".into(),
        qemu: "7.2.22".into(),
        accelerator: Accelerator::Tcg,
        machine_types: vec!["pc-q35-7.2".into()],
        machine_aliases: BTreeMap::new(),
        cpu_models: vec!["Nehalem".into()],
        cpu_models_under: Default::default(),
        encryption: config.encryption,
        port_groups: config.port_groups.clone(),
        migration_addresses: vec![],
        agent_address: config.listen,
        memory_total_mib: 8192,
        memory_free_mib: 4096,
        cpus: 1,
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

fn only(found: Vec<(ErrorCode, String)>, code: ErrorCode, words: &[&str]) {
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, code, "{found:?}");
    for word in words {
        assert!(
            found[0].1.contains(word),
            "'{word}' is not in '{}'",
            found[0].1
        );
    }
}

#[test]
fn a_host_in_order_refuses_nothing() {
    let env = Environment::new();
    let report = incoming(&env.here(), &env.request);
    assert_eq!(report.refusals, []);
    assert_eq!(report.passed.len(), 12);
}

#[test]
fn too_little_memory_names_both_sizes() {
    let env = Environment::new();
    let here = Destination {
        free_mib: 1000,
        ..env.here()
    };
    only(
        env.refusals(&here),
        ErrorCode::OutOfMemory,
        &["1216 MiB", "1000 MiB", "'b'"],
    );
}

#[test]
fn an_unknown_port_group_and_a_missing_bridge_are_told_apart() {
    let mut env = Environment::new();
    std::fs::remove_dir_all(env.dir.path().join("root/sys/class/net/vmbr0")).unwrap();
    only(
        env.refusals(&env.here()),
        ErrorCode::MissingBridge,
        &["ip link add vmbr0", "ip link set vmbr0 up", "'b'"],
    );
    env.config.port_groups.clear();
    only(
        env.refusals(&env.here()),
        ErrorCode::MissingBridge,
        &["no port group 'vm'"],
    );
}

#[test]
fn a_bridge_that_is_down_is_refused_on_either_side() {
    let env = Environment::new();
    let flags = env.dir.path().join("root/sys/class/net/vmbr0/flags");
    std::fs::write(&flags, "0x1002\n").unwrap();
    let words = ["is down on host 'b'", "'ip link set vmbr0 up'"];
    only(env.refusals(&env.here()), ErrorCode::MissingBridge, &words);
    let down = outgoing(&env.source()).refusals;
    assert_eq!(down.len(), 1, "{down:?}");
    assert!(down[0].message.contains(words[1]), "{}", down[0]);
    std::fs::write(&flags, "0x1003\n").unwrap();
    assert_eq!(env.refusals(&env.here()), []);
    assert_eq!(outgoing(&env.source()).refusals, []);
}

#[test]
fn a_migration_address_that_no_interface_has_is_refused_before_anything_moves() {
    let env = Environment::new();
    let [one, other]: [IpAddr; 2] = ["10.1.0.77".parse().unwrap(), "127.0.0.1".parse().unwrap()];
    let words = "host 'b' does not have its migration address 10.1.0.77: bring it up, or correct migration_addresses in /etc/godwit/host.toml on b and restart godwit-agent";
    let here = Destination {
        missing_addresses: &[one],
        ..env.here()
    };
    only(env.refusals(&here), ErrorCode::Preflight, &[words]);
    let leaves = |addresses: &[IpAddr]| {
        let source = Source {
            addresses,
            missing_addresses: &[one],
            ..env.source()
        };
        outgoing(&source).refusals
    };
    let refused = leaves(&[one]);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(refused[0].message, words);
    // The other address carries the migration.
    assert_eq!(leaves(&[one, other]), []);
}

#[test]
fn a_missing_and_a_different_kernel_are_told_apart() {
    let env = Environment::new();
    let kernel = env.dir.path().join("vmlinuz");
    std::fs::write(&kernel, "another").unwrap();
    only(
        env.refusals(&env.here()),
        ErrorCode::Incompatible,
        &["vmlinuz", "copy the source's"],
    );
    std::fs::remove_file(&kernel).unwrap();
    only(
        env.refusals(&env.here()),
        ErrorCode::MissingFile,
        &["vmlinuz", "'b'"],
    );
}

#[test]
fn machine_types_and_cpu_models_must_be_known() {
    let mut env = Environment::new();
    env.request.spec.machine = "pc-q35-10.0".into();
    only(
        env.refusals(&env.here()),
        ErrorCode::Incompatible,
        &["pc-q35-10.0", "not older"],
    );
    env.request.spec.machine = "pc-q35-7.2".into();
    let refused = |env: &mut Environment, cpu: &str, words: &[&str]| {
        env.request.spec.cpu = cpu.into();
        only(env.refusals(&env.here()), ErrorCode::Incompatible, words);
    };
    refused(&mut env, "Abacus,+x2apic", &["'Abacus'", "auto"]);
    refused(&mut env, "host", &["host,", "auto", "movable"]);
    refused(&mut env, "max", &["max,", "auto", "movable"]);
    env.cpus = Err("QEMU said no".into());
    refused(&mut env, "Nehalem", &["QEMU said no", "host check"]);
}

#[test]
fn a_model_that_qemu_lists_and_the_host_cannot_give_is_refused_before_the_stop() {
    let mut env = Environment::new();
    env.request.spec.cpu = "EPYC".into();
    let words = ["'EPYC' whole", "sse4a, a, b, c, d and 1 more", "auto"];
    only(env.refusals(&env.here()), ErrorCode::Incompatible, &words);
    env.request.spec.cpu = "Nehalem,+avx512f".into();
    only(
        env.refusals(&env.here()),
        ErrorCode::Incompatible,
        &["'avx512f'", "'web'"],
    );
    // A feature that the host has, and one that is switched off.
    env.request.spec.cpu = "Nehalem,+avx,-avx512f".into();
    assert_eq!(env.refusals(&env.here()), []);
}

#[test]
fn a_host_without_encryption_refuses_only_vms_that_require_it() {
    let mut env = Environment::new();
    env.info.encryption = false;
    assert_eq!(env.refusals(&env.here()), []);
    env.request.spec.encryption = EncryptionMode::Required;
    only(
        env.refusals(&env.here()),
        ErrorCode::Encryption,
        &["encryption = true"],
    );
}

#[test]
fn kvm_needs_its_device() {
    let mut env = Environment::new();
    env.request.accelerator = Accelerator::Kvm;
    only(
        env.refusals(&env.here()),
        ErrorCode::Incompatible,
        &["/dev/kvm"],
    );
}

#[test]
fn busy_ports_are_refused() {
    let mut env = Environment::new();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port();
    env.config.migration_ports = crate::config::PortRange {
        first: port,
        last: port,
    };
    let (free, _) = free_ports(&env.config, &env.config.migration_addresses);
    let here = Destination {
        free_ports: free,
        ..env.here()
    };
    only(
        env.refusals(&here),
        ErrorCode::PortInUse,
        &[&port.to_string()],
    );
}

#[test]
fn a_taken_name_an_old_kernel_and_no_tracking_are_refused() {
    let env = Environment::new();
    let taken = Destination {
        name_taken: true,
        ..env.here()
    };
    only(
        env.refusals(&taken),
        ErrorCode::AlreadyExists,
        &["'web'", "'b'"],
    );
    let of_another = Destination {
        same_user: Some(VmName::new("db").unwrap()),
        ..env.here()
    };
    only(
        env.refusals(&of_another),
        ErrorCode::NotMigratable,
        &["'web'", "'db'", "godwit vm start web"],
    );
    let blind = Destination {
        tracking: Err("no device".into()),
        ..env.here()
    };
    only(
        env.refusals(&blind),
        ErrorCode::Preflight,
        &["no device", "host check"],
    );
    std::fs::write(
        env.dir.path().join("root/proc/sys/kernel/osrelease"),
        "6.1.0",
    )
    .unwrap();
    only(
        env.refusals(&env.here()),
        ErrorCode::Preflight,
        &["6.1.0", "6.7"],
    );
}

#[test]
fn a_clock_that_differs_only_warns() {
    let env = Environment::new();
    let here = Destination {
        unix_ms: 5_002_000,
        ..env.here()
    };
    let report = incoming(&here, &env.request);
    assert_eq!(report.refusals, []);
    assert!(
        report
            .passed
            .iter()
            .any(|line| line.starts_with("warning:") && line.contains("2000 ms"))
    );
}

#[test]
fn the_source_names_a_writable_disk_blockers_and_states() {
    let mut env = Environment::new();
    env.request
        .spec
        .disks
        .push(DiskSpec::new("root", "/disk.img"));
    let blockers = ["VFIO".to_string()];
    let source = |state| {
        outgoing(&Source {
            state,
            blockers: &blockers,
            ..env.source()
        })
    };
    let running = source(VmState::Running).refusals;
    assert_eq!(running.len(), 2);
    assert!(running[0].message.contains("writable disk 'root'"));
    assert!(running[1].message.contains("VFIO"));
    let doubt = source(VmState::InDoubt).refusals;
    assert_eq!(doubt[0].code, ErrorCode::InDoubt);
    assert_eq!(
        source(VmState::Stopped).refusals[0].code,
        ErrorCode::WrongState
    );
}

#[test]
fn what_keeps_a_vm_where_it_is_names_the_way_out() {
    let mut env = Environment::new();
    let leave = |env: &Environment| {
        let report = outgoing(&env.source());
        let refusals = report.refusals.into_iter();
        refusals.map(|e| (e.code, e.message)).collect::<Vec<_>>()
    };
    assert_eq!(leave(&env), []);
    let code = ErrorCode::NotMigratable;
    env.request.spec.cpu = "EPYC,+svm".into();
    only(leave(&env), code, &["'svm'", "guests of its own"]);
    env.request.spec.cpu = "max".into();
    only(leave(&env), code, &["max", "auto"]);
    env.request.spec.movable = false;
    only(leave(&env), code, &["movable = false", "vm edit web"]);
}

#[test]
fn a_vm_with_a_disk_where_the_host_keeps_records_or_memory_does_not_come() {
    let mut host = Environment::new();
    let dir = host.dir.path().join("kept");
    std::fs::create_dir_all(dir.join("ram")).unwrap();
    let file = dir.join("ram/victim.1");
    std::fs::write(&file, [0; 512]).unwrap();
    let disk = godwit_types::vm::DiskSpec {
        read_only: true,
        ..godwit_types::vm::DiskSpec::new("data", file.display().to_string())
    };
    host.request.spec.disks.push(disk);
    assert_eq!(host.refusals(&host.here()), []);
    let kept: [fn(&mut HostConfig, std::path::PathBuf); 3] = [
        |config: &mut HostConfig, dir| config.run_dir = dir,
        |config: &mut HostConfig, dir| config.state_dir = dir,
        |config: &mut HostConfig, dir| config.controller_state_dir = dir,
    ];
    for keep in kept {
        let before = host.config.clone();
        keep(&mut host.config, dir.clone());
        let refusals = host.refusals(&host.here());
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert!(
            refusals[0].1.contains("put the file elsewhere"),
            "{refusals:?}"
        );
        host.config = before;
    }
}

#[test]
fn a_guest_with_uefi_comes_only_where_there_is_some_of_the_same_length() {
    let mut e = Environment::new();
    e.request.spec.firmware = godwit_types::vm::Firmware::Uefi;
    let paths = ["code", "variables"].map(|name| e.dir.path().join(name));
    for (path, length) in paths.iter().zip([8192, 4096]) {
        std::fs::File::create(path)
            .unwrap()
            .set_len(length)
            .unwrap();
    }
    let [code, variables] = paths;
    (e.config.uefi_code, e.config.uefi_variables) = (Some(code), Some(variables));
    let sizes = |code, variables| Some(UefiSizes { code, variables });
    e.request.uefi = sizes(8192, 4096);
    assert_eq!(e.refusals(&e.here()), []);
    for (uefi, code, words) in [
        (
            sizes(8192, 8192),
            ErrorCode::Incompatible,
            "has 8192 and 4096",
        ),
        (sizes(4096, 4096), ErrorCode::Incompatible, "host 'b'"),
        (None, ErrorCode::Preflight, "does not say"),
    ] {
        e.request.uefi = uefi;
        let refusals = e.refusals(&e.here());
        let [(found, message)] = &refusals[..] else {
            panic!("{refusals:?}")
        };
        assert!(*found == code && message.contains(words), "{message}");
    }
    std::fs::remove_file(e.dir.path().join("code")).unwrap();
    let refusals = e.refusals(&e.here());
    assert_eq!(refusals[0].0, ErrorCode::MissingFile);
    assert!(
        refusals[0].1.contains("firmware = \"uefi\""),
        "{refusals:?}"
    );
}
