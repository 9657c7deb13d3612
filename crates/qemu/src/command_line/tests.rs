//! Command lines, argument by argument, and what is refused.

use super::*;

fn config() -> MachineConfig {
    MachineConfig {
        hardware: 1,
        name: "web".into(),
        uuid: "8c5b8a3e-0d5c-4a43-9d0e-6d0d8f1c2b3a".into(),
        vcpus: 2,
        memory_mib: 1024,
        machine_type: "pc-q35-7.2".into(),
        cpu_model: "EPYC-v3".into(),
        cpu_features: vec![("svm".into(), false), ("aes".into(), true)],
        cpu_enforce: true,
        accelerator: Accelerator::Kvm,
        flash: None,
        kernel: Some("/boot/vmlinuz".into()),
        initramfs: Some("/boot/initrd,1".into()),
        kernel_arguments: "console=ttyS0 a=b,c".into(),
        nics: vec![Nic {
            mac: [0x52, 0x54, 0, 1, 2, 0xab],
            tap_fd: 9,
        }],
        disks: Vec::new(),
        agent_fd: None,
        seed_fd: None,
        reconnect: Reconnect::Second,
        ram_file: "/ram/web,1".into(),
        incoming: false,
    }
}

fn built(config: &MachineConfig) -> Vec<String> {
    let arguments = build(config, &[5, 6]).expect("a good description");
    arguments
        .into_iter()
        .map(|a| a.into_string().expect("UTF-8"))
        .collect()
}

#[test]
fn the_whole_line() {
    let want = "-S -nodefaults -no-user-config -only-migratable -display none -vga none -msg timestamp=on \
        -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
        -action reboot=reset,shutdown=pause,panic=pause,watchdog=pause -name guest=web,debug-threads=on \
        -uuid 8c5b8a3e-0d5c-4a43-9d0e-6d0d8f1c2b3a \
        -machine pc-q35-7.2,accel=kvm,memory-backend=ram0,dump-guest-core=off -cpu EPYC-v3,svm=off,aes=on,enforce \
        -smp 2 -m 1024M \
        -object memory-backend-file,id=ram0,size=1024M,share=on,align=2M,merge=off,mem-path=/ram/web,,1 \
        -global ICH9-LPC.disable_s3=1 -global ICH9-LPC.disable_s4=1 -kernel /boot/vmlinuz -initrd /boot/initrd,1 -append console=ttyS0_a=b,c \
        -chardev ringbuf,id=console0,size=65536 -serial chardev:console0 -device pvpanic \
        -netdev tap,id=net0,fd=9,vhost=off \
        -device virtio-net-pci,id=nic0,netdev=net0,mac=52:54:00:01:02:ab,romfile= \
        -chardev socket,id=qmp0,fd=5,server=on,wait=off -mon chardev=qmp0,mode=control \
        -chardev socket,id=qmp1,fd=6,server=on,wait=off -mon chardev=qmp1,mode=control";
    let want: Vec<_> = want
        .split_whitespace()
        .map(|a| a.replace("ttyS0_a", "ttyS0 a"))
        .collect();
    assert_eq!(built(&config()), want);
}

/// One line per argument of each kind of machine. What the guest sees of a hardware version never changes: guests that run
/// now could not move to a host that has the change. Make another version, with a golden file of its own; only arguments
/// that a guest cannot see may be written anew here, with UPDATE_GOLDEN=1.
#[test]
fn hardware_version_1_is_as_its_golden_file_says() {
    let disk = |name: &str, read_only| Disk {
        name: name.into(),
        read_only,
        back_end: BackEnd::Qemu { fd: 11 },
    };
    check_golden(1, &machines(1, disk));
}

#[test]
fn hardware_version_2_is_as_its_golden_file_says() {
    check_golden(2, &served_machines(2));
}

/// As version 2, with a port for the guest's agent, and maybe a seed.
#[test]
fn hardware_version_3_is_as_its_golden_file_says() {
    let machines = served_machines(3);
    let seeded = MachineConfig {
        seed_fd: Some(15),
        ..machines[1].clone()
    };
    check_golden(3, &[machines, vec![seeded]].concat());
}

#[test]
fn a_seed_and_a_port_for_the_agent_are_of_their_hardware() {
    for (hardware, agent_fd, seed_fd, refusal) in [
        (2, None, Some(15), ConfigError::Seed(2)),
        (2, Some(14), None, ConfigError::Agent(2)),
        (3, None, None, ConfigError::Agent(3)),
    ] {
        let machine = MachineConfig {
            hardware,
            agent_fd,
            seed_fd,
            ..config()
        };
        assert_eq!(build(&machine, &[]), Err(refusal));
    }
}

/// Machines of a version whose disks are served: from a kernel, from a disk, with UEFI.
fn served_machines(hardware: u32) -> Vec<MachineConfig> {
    let disk = |name: &str, read_only| Disk {
        name: name.into(),
        read_only,
        back_end: BackEnd::Served {
            socket: format!("/ram/web,1.{name}").into(),
            queues: 2,
        },
    };
    let from_disk = MachineConfig {
        hardware,
        agent_fd: agent_of(hardware),
        kernel: None,
        initramfs: None,
        kernel_arguments: String::new(),
        disks: vec![disk("root", false)],
        reconnect: Reconnect::Soon,
        ..config()
    };
    let uefi = MachineConfig {
        flash: Some(Flash {
            code_fd: 12,
            variables_fd: 13,
        }),
        ..from_disk.clone()
    };
    [machines(hardware, disk), vec![from_disk, uefi]].concat()
}

fn agent_of(hardware: u32) -> Option<i32> {
    (hardware >= 3).then_some(14)
}

#[test]
fn uefi_is_of_no_machine_of_the_first_hardware() {
    let flash = Some(Flash {
        code_fd: 12,
        variables_fd: 13,
    });
    let config = MachineConfig { flash, ..config() };
    let error = build(&config, &[5]).unwrap_err();
    assert_eq!(error.to_string(), "hardware version 1 has no UEFI");
}

fn machines(hardware: u32, disk: impl Fn(&str, bool) -> Disk) -> Vec<MachineConfig> {
    let config = || MachineConfig {
        hardware,
        agent_fd: agent_of(hardware),
        ..config()
    };
    vec![
        config(),
        MachineConfig {
            disks: vec![disk("root", false), disk("data", true)],
            nics: [config().nics, config().nics].concat(),
            incoming: true,
            ..config()
        },
        MachineConfig {
            vcpus: 1,
            accelerator: Accelerator::Tcg,
            cpu_enforce: false,
            machine_type: "pc-i440fx-7.2".into(),
            initramfs: None,
            kernel_arguments: String::new(),
            ..config()
        },
    ]
}

fn check_golden(version: u32, machines: &[MachineConfig]) {
    let lines = machines
        .iter()
        .map(|machine| built(machine).join("\n") + "\n");
    let made = lines.collect::<Vec<_>>().join("\n");
    let file = format!("tests/golden/hardware-{version}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &made).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap();
    let differs = golden
        .lines()
        .zip(made.lines())
        .find(|(old, new)| old != new);
    assert!(
        golden == made,
        "hardware version {version} has changed: {differs:#?}"
    );
}

#[test]
fn hardware_that_is_not_known_has_no_command_line() {
    for unknown in [0, 4, u32::MAX] {
        let machine = MachineConfig {
            hardware: unknown,
            ..config()
        };
        assert_eq!(build(&machine, &[]), Err(ConfigError::Hardware(unknown)));
    }
}

#[test]
fn a_disk_is_an_inherited_file_read_through_the_page_cache() {
    let disk = |name: &str, fd, read_only| Disk {
        name: name.into(),
        read_only,
        back_end: BackEnd::Qemu { fd },
    };
    let line = built(&MachineConfig {
        disks: vec![disk("root", 11, true), disk("data.1", 12, false)],
        ..config()
    });
    let at = line
        .iter()
        .position(|argument| argument == "-add-fd")
        .expect("a disk");
    let node = |index: u32, read_only: bool| {
        let cache = r#""cache":{"direct":false,"no-flush":false}"#;
        format!(
            r#"{{{cache},"driver":"raw","file":{{"aio":"threads",{cache},"driver":"file","filename":"/dev/fdset/{index}","read-only":{read_only}}},"node-name":"image{index}","read-only":{read_only}}}"#
        )
    };
    let want = [
        "-add-fd",
        "fd=11,set=0",
        "-blockdev",
        &node(0, true),
        "-device",
        "virtio-blk-pci,id=disk0,drive=image0,serial=root",
        "-add-fd",
        "fd=12,set=1",
        "-blockdev",
        &node(1, false),
        "-device",
        "virtio-blk-pci,id=disk1,drive=image1,serial=data.1",
    ];
    assert_eq!(line.get(at..at + want.len()).expect("all of it"), want);
}

#[test]
fn an_incoming_machine_differs_by_its_last_two_arguments_only() {
    let (plain, incoming) = (
        config(),
        MachineConfig {
            incoming: true,
            ..config()
        },
    );
    let want = [built(&plain), vec!["-incoming".into(), "defer".into()]].concat();
    assert_eq!(built(&incoming), want);
}

#[test]
fn the_older_machine_has_its_own_power_management() {
    let line = built(&MachineConfig {
        machine_type: "pc-i440fx-7.2".into(),
        ..config()
    })
    .join(" ");
    assert!(
        line.contains("-global PIIX4_PM.disable_s3=1 -global PIIX4_PM.disable_s4=1"),
        "{line}"
    );
    assert!(!line.contains("ICH9"), "{line}");
}

type Change = fn(&mut MachineConfig);

#[test]
fn what_the_option_syntax_would_take_apart_is_refused() {
    let refused: [(Change, &str); 13] = [
        (|c| c.name = "a,b=c".into(), "the machine name 'a,b=c'"),
        (|c| c.name = String::new(), "the machine name ''"),
        (|c| c.name = "a".repeat(65), "the machine name 'aaa"),
        (|c| c.machine_type = "q35,x=y".into(), "the machine type"),
        (|c| c.cpu_model = "max,+svm".into(), "the CPU model"),
        (
            |c| c.cpu_features = vec![("a=b".into(), true)],
            "the CPU feature",
        ),
        (
            |c| c.uuid = "8c5b8a3e-0d5c-4a43-9d0e-6d0d8f1c2b3".into(),
            "the UUID",
        ),
        (|c| c.ram_file = "ram".into(), "the path of the memory file"),
        (
            |c| c.kernel = Some("/boot/a\nb".into()),
            "the path of the kernel, '/boot/a\\nb'",
        ),
        (
            |c| c.kernel_arguments = "a\0b".into(),
            "the kernel's command line",
        ),
        (
            |c| {
                c.nics = vec![Nic {
                    mac: [1, 0, 0, 0, 0, 0],
                    tap_fd: 3,
                }]
            },
            "the network card's address 01:00",
        ),
        (
            |c| {
                c.disks = vec![Disk {
                    name: "a,b=c".into(),
                    read_only: true,
                    back_end: BackEnd::Qemu { fd: 5 },
                }]
            },
            "the disk name 'a,b=c'",
        ),
        (
            |c| {
                c.disks = vec![Disk {
                    name: "a-name-of-21-letters-".into(),
                    read_only: true,
                    back_end: BackEnd::Qemu { fd: 5 },
                }]
            },
            "the length of a disk's name is 21",
        ),
    ];
    for (change, message) in refused {
        let mut config = config();
        change(&mut config);
        let error = build(&config, &[]).expect_err(message).to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn numbers_out_of_range_are_refused() {
    let refused: [(Change, &str); 4] = [
        (
            |c| c.vcpus = 0,
            "the number of vCPUs is 0: it must be 1 to 255",
        ),
        (
            |c| c.vcpus = 256,
            "the number of vCPUs is 256: it must be 1 to 255",
        ),
        (
            |c| c.memory_mib = 0,
            "the memory in MiB is 0: it must be even and 2 to 16777216",
        ),
        (
            |c| c.memory_mib = 129,
            "the memory in MiB is 129: it must be even and 2 to 16777216",
        ),
    ];
    for (change, message) in refused {
        let mut config = config();
        change(&mut config);
        assert_eq!(build(&config, &[]).expect_err(message).to_string(), message);
    }
}

#[test]
fn a_lone_emulated_vcpu_has_room_for_a_second() {
    let smp = |accelerator, vcpus| {
        let line = built(&MachineConfig {
            accelerator,
            vcpus,
            ..config()
        });
        let at = line.iter().position(|argument| argument == "-smp");
        line[at.expect("the number of vCPUs") + 1].clone()
    };
    assert_eq!(smp(Accelerator::Tcg, 1), "1,maxcpus=2");
    assert_eq!(smp(Accelerator::Tcg, 2), "2");
    assert_eq!(smp(Accelerator::Kvm, 1), "1");
}

#[test]
fn a_disk_of_other_hardware_and_a_machine_that_boots_nothing_are_refused() {
    let disk = |back_end| Disk {
        name: "root".into(),
        read_only: false,
        back_end,
    };
    let served = || BackEnd::Served {
        socket: "/s".into(),
        queues: 1,
    };
    for (hardware, back_end) in [(1, served()), (2, BackEnd::Qemu { fd: 9 })] {
        let machine = MachineConfig {
            hardware,
            disks: vec![disk(back_end)],
            ..config()
        };
        let disk = "root".into();
        assert_eq!(
            build(&machine, &[]),
            Err(ConfigError::BackEnd { hardware, disk })
        );
    }
    for hardware in [1, 2] {
        let machine = MachineConfig {
            hardware,
            kernel: None,
            ..config()
        };
        assert_eq!(build(&machine, &[]), Err(ConfigError::NothingToBoot));
    }
    let controls = MachineConfig {
        hardware: 2,
        disks: vec![disk(BackEnd::Served {
            socket: "/a\nb".into(),
            queues: 1,
        })],
        ..config()
    };
    assert!(matches!(
        build(&controls, &[]),
        Err(ConfigError::Path { .. })
    ));
}

#[test]
fn a_back_end_is_connected_to_again_as_soon_as_the_version_can() {
    for (version, expected) in [
        ((7, 2), Reconnect::Second),
        ((9, 1), Reconnect::Second),
        ((9, 2), Reconnect::Soon),
        ((10, 0), Reconnect::Soon),
    ] {
        assert_eq!(Reconnect::of(version), expected, "{version:?}");
    }
}
