//! What preflight makes of facts, without a host.

use super::*;
use godwit_types::migration::LinkedTo;
use godwit_types::site::Claim;
use godwit_types::version::Range;
use godwit_types::vm::VmState;
use godwit_types::{Generation, VmName};

fn host(name: &str) -> HostInfo {
    HostInfo {
        name: HostName::new(name).unwrap(),
        version: "0".into(),
        speaks: Default::default(),
        kernel: "6.18".into(),
        qemu: "9.2.0".into(),
        accelerator: Accelerator::Kvm,
        machine_types: vec!["pc-q35-9.2".into()],
        machine_aliases: BTreeMap::new(),
        cpu_models: vec!["Haswell".into()],
        cpu_models_under: Default::default(),
        encryption: true,
        port_groups: BTreeMap::from([(group(), "br0".to_owned())]),
        migration_addresses: vec!["192.0.2.1".parse().unwrap()],
        agent_address: "192.0.2.1:1".parse().unwrap(),
        memory_total_mib: 4096,
        memory_free_mib: 2048,
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

fn group() -> PortGroup {
    PortGroup::new("vm").unwrap()
}

fn facts() -> Facts {
    let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 1024\nkernel = \"/k\"\ncpu = \"Haswell\"\n\
                machine = \"pc-q35-9.2\"\n[[nic]]\nport_group = \"vm\"";
    let spec = VmSpec::from_toml(text).unwrap();
    assert_eq!(spec.name, VmName::new("web").unwrap());
    Facts {
        there: spec.clone(),
        vm: HostVm {
            spec,
            state: VmState::Running,
            generation: Generation(1),
            claim: Claim::Holds {
                generation: Generation(1),
                on: true,
            },
            migration: None,
            accelerator: Some(Accelerator::Kvm),
            vm_process_pid: None,
            vm_process: None,
            qemu_pid: None,
            note: None,
            disks: Vec::new(),
            images: Vec::new(),
            guest: None,
        },
        source: host("a"),
        destination: host("b"),
        wish: None,
        method: Method::Mirror,
        disks: Vec::new(),
        stay_linked: Vec::new(),
        leaving: said(&[]),
        coming: said(&[]),
        arrived: Some(Ok(BTreeMap::from([(group(), true)]))),
    }
}

fn said(refusals: &[(ErrorCode, &str)]) -> Option<Result<Said, ApiError>> {
    let refusals = refusals.iter();
    Some(Ok(Said {
        passed: vec!["looked".into()],
        refusals: refusals
            .map(|(code, text)| ApiError::new(*code, *text))
            .collect(),
    }))
}

/// Host and code of each refusal.
fn refusals(facts: &Facts) -> Vec<(String, ErrorCode)> {
    let host = |error: &ApiError| error.host.clone().unwrap_or_default();
    let (report, _) = check(facts);
    let found = report.refusals.iter();
    found.map(|error| (host(error), error.code)).collect()
}

#[test]
fn nothing_speaks_against_a_vm_that_both_hosts_can_run() {
    let (report, cipher) = check(&facts());
    assert_eq!(report.refusals, []);
    assert_eq!(cipher, Cipher::Aes256Gcm);
    assert_eq!(
        report.passed,
        [
            "hosts a and b have in common what VM web needs",
            "encryption: aes-256-gcm",
            "looked",
            "looked",
            "a frame from port group vm of host a arrives at host b",
        ]
    );
}

#[test]
fn what_a_host_says_of_a_matter_counts_more_than_the_inventory() {
    let mut facts = facts();
    facts.destination.memory_free_mib = 1;
    facts.destination.cpu_models.clear();
    let b = |code| ("b".to_owned(), code);
    let guessed = [b(ErrorCode::Incompatible), b(ErrorCode::OutOfMemory)];
    assert_eq!(refusals(&facts), guessed);
    facts.coming = said(&[(ErrorCode::OutOfMemory, "b is full")]);
    assert_eq!(refusals(&facts), guessed);
    let (report, _) = check(&facts);
    assert_eq!(report.refusals.last().unwrap().message, "b is full");
    // The other host's word says nothing about this one.
    facts.coming = said(&[]);
    facts.leaving = said(&[(ErrorCode::OutOfMemory, "a is full")]);
    assert_eq!(refusals(&facts).len(), 3);
}

#[test]
fn two_versions_without_a_common_control_channel_are_refused_in_one_sentence() {
    let mut facts = facts();
    let spoken = |version: &str, min, max| Build {
        version: version.into(),
        speaks: Speaks {
            migration: Range { min, max },
            ..Speaks::here()
        },
    };
    facts.vm.vm_process = Some(spoken("0.9", 3, 4));
    facts.destination.speaks = spoken("1.1", 5, 6).speaks;
    facts.destination.version = "1.1".into();
    let (report, _) = check(&facts);
    let [refusal] = &report.refusals[..] else {
        panic!("{:?}", report.refusals);
    };
    assert_eq!(refusal.code, ErrorCode::Incompatible);
    let why = &refusal.message;
    assert!(
        why.contains("install Godwit 1.1 on host a and run 'godwit vm renew'"),
        "{why}"
    );
    facts.vm.vm_process = Some(spoken("1.0", 4, 5));
    assert_eq!(refusals(&facts), []);
}

#[test]
fn hardware_that_the_destination_does_not_know_is_refused_before_anything_starts() {
    let mut facts = facts();
    facts.vm.spec.hardware = Some(2);
    let (report, _) = check(&facts);
    let why = &report.refusals[0].message;
    assert!(
        why.contains("hardware version 2") && why.contains("host b"),
        "{why}"
    );
    facts.destination.speaks.hardware = Range { min: 1, max: 2 };
    assert_eq!(refusals(&facts), []);
}

#[test]
fn what_is_known_only_here_never_gives_way() {
    let mut facts = facts();
    facts.vm.accelerator = None;
    facts.destination.migration_addresses = vec!["2001:db8::1".parse().unwrap()];
    facts.leaving = said(&[(ErrorCode::Preflight, "the kernel is old")]);
    facts.coming = said(&[(ErrorCode::Preflight, "no userfaultfd")]);
    let (report, _) = check(&facts);
    let texts: Vec<&str> = report.refusals.iter().map(|e| e.message.as_str()).collect();
    assert_eq!(texts.len(), 4, "{texts:?}");
    assert!(texts[0].starts_with("host a does not say what runs VM web"));
    assert!(texts[1].contains("same family"), "{texts:?}");
}

#[test]
fn a_host_that_does_not_answer_leaves_the_inventorys_findings() {
    let mut facts = facts();
    facts.destination.memory_free_mib = 1;
    let silent = ApiError::new(ErrorCode::OutOfMemory, "the agent has no memory to answer");
    facts.coming = Some(Err(silent));
    facts.arrived = None;
    let full = ("b".to_owned(), ErrorCode::OutOfMemory);
    assert_eq!(refusals(&facts), [full.clone(), full]);
}

#[test]
fn a_probe_is_pointless_without_the_bridge_and_each_lost_frame_is_told() {
    let mut facts = facts();
    facts.arrived = None;
    assert!(!lacks_bridge(&facts));
    facts.coming = said(&[(ErrorCode::MissingBridge, "no bridge br0")]);
    assert!(lacks_bridge(&facts));
    facts.coming = said(&[]);
    facts.arrived = Some(Ok(BTreeMap::new()));
    assert_eq!(refusals(&facts), [("b".into(), ErrorCode::Preflight)]);
}

#[test]
fn a_request_may_not_lower_the_encryption_that_a_vm_requires() {
    let mut facts = facts();
    facts.vm.spec.encryption = EncryptionMode::Required;
    facts.wish = Some(EncryptionMode::Disabled);
    assert_eq!(refusals(&facts), [(String::new(), ErrorCode::Encryption)]);
    facts.wish = None;
    facts.destination.encryption = false;
    assert_eq!(refusals(&facts), [("b".into(), ErrorCode::Encryption)]);
    facts.vm.spec.encryption = EncryptionMode::Opportunistic;
    assert_eq!(refusals(&facts), []);
    assert_eq!(check(&facts).1, Cipher::None);
}

fn linked(has_snapshots: bool) -> DiskToMove {
    DiskToMove {
        name: "root".to_owned(),
        bytes: 1 << 30,
        used_bytes: 1 << 20,
        layered: true,
        linked: Some(LinkedTo {
            path: "/srv/base.raw".to_owned(),
            id: "7".repeat(32),
            used_bytes: 1 << 20,
            has_snapshots,
        }),
    }
}

#[test]
fn it_is_said_whether_a_linked_disk_stays_so_and_one_that_may_not_become_one_image_is_refused() {
    let told = |facts: &Facts, text: &str| {
        let (report, _) = check(facts);
        assert_eq!(report.refusals, []);
        assert!(report.passed.iter().any(|line| line.contains(text)));
        report.stay_linked
    };
    let mut facts = facts();
    let speaks = Speaks {
        migration: Range::only(MIGRATION_WITH_SNAPSHOTS),
        ..Speaks::default()
    };
    facts.destination.speaks = speaks.clone();
    facts.vm.vm_process = Some(Build {
        version: "0".into(),
        speaks,
    });
    facts.disks = vec![linked(false).as_one_image()];
    assert!(told(&facts, "one image with all its content").is_empty());
    facts.disks = vec![linked(true)];
    facts.stay_linked = vec!["root".to_owned()];
    assert_eq!(told(&facts, "stays linked to the image"), ["root"]);
    facts.stay_linked.clear();
    assert_eq!(refusals(&facts), [("b".to_owned(), ErrorCode::Preflight)]);
    let (report, _) = check(&facts);
    let message = &report.refusals[0].message;
    assert!(message.contains("/srv/base.raw") && message.contains("has snapshots"));
}

/// Its VM process was killed just before, and it was said that it is of an unknown version, and to be renewed.
#[test]
fn of_a_vm_process_that_does_not_answer_no_version_is_blamed() {
    let mut facts = facts();
    facts.disks = vec![linked(true)];
    facts.stay_linked = vec!["root".to_owned()];
    let versions = |facts: &Facts| {
        let refused = check(facts).0.refusals.into_iter();
        refused.filter(|one| one.message.contains("renew")).count()
    };
    assert_eq!(versions(&facts), 1, "one of before says what runs its VM");
    facts.vm.accelerator = None;
    assert_eq!(versions(&facts), 0);
    let (report, _) = check(&facts);
    let mut told = report.refusals.iter();
    assert!(
        told.any(|one| one.message.contains("try again")),
        "{report:?}"
    );
}

#[test]
fn disks_that_take_no_redo_logs_are_refused_before_the_migration_begins() {
    let mut facts = facts();
    facts.vm.spec.disks = [
        ("root", "/srv/root.raw"),
        ("data", "/srv/data.raw"),
        ("log", "/dev/vg0/log"),
        ("swap", "/srv/swap.raw"),
    ]
    .map(|(name, path)| DiskSpec::new(name, path))
    .to_vec();
    let one = |name: &str| DiskToMove {
        layered: name == "data",
        name: name.to_owned(),
        bytes: 1 << 30,
        used_bytes: 0,
        linked: None,
    };
    // Its own image is one alone there, and here lies over another one.
    let becomes_one = DiskToMove {
        name: "swap".to_owned(),
        ..linked(false).as_one_image()
    };
    facts.disks = vec![one("root"), one("data"), one("log"), becomes_one];
    let told = |facts: &Facts| -> Vec<String> {
        let refused = check(facts).0.refusals.into_iter();
        let of_logs = refused.filter(|one| one.message.contains("redo logs"));
        of_logs.map(|one| one.message).collect()
    };
    assert!(told(&facts).is_empty(), "only one method has logs");
    facts.method = Method::Snapshot;
    let told = told(&facts);
    assert!(told.len() == 3, "{told:?}");
    assert!(
        told[0].contains("'data' consists of several images"),
        "{told:?}"
    );
    assert!(told[1].contains("'log' is on a block device"), "{told:?}");
    assert!(
        told[2].contains("'swap' is linked to another image"),
        "{told:?}"
    );
}
