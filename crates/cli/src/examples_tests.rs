//! The examples that a package puts into `/etc/godwit` are configurations that the product takes.

use crate::controller_file::ControllerFile;
use godwit_agent::config::HostConfig;
use godwit_types::vm::VmSpec;
use std::path::{Path, PathBuf};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../packaging/examples/{name}.example"))
}

/// The example with every key that it only shows switched on.
fn in_full(name: &str) -> String {
    let text = std::fs::read_to_string(example(name)).unwrap();
    let is_key = |line: &&str| line.starts_with('[') || line.contains(" = ");
    let lines = text.lines().map(|line| {
        let shown = line.strip_prefix("# ").filter(is_key);
        shown.unwrap_or(line)
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_host_example_is_a_configuration_and_so_is_what_it_only_shows() {
    let plain = HostConfig::load(&example("host.toml")).unwrap();
    assert_eq!(plain.migration_addresses.len(), 1);
    let full = in_full("host.toml").replace("migration_addresses = [\"10.1.0.1\"]", "");
    let full = HostConfig::parse(&full, Path::new("host.toml")).unwrap();
    assert_eq!(full.migration_interfaces, ["eth1"]);
    assert_eq!(full.qemu_user.as_deref(), Some("godwit-qemu"));
    // What is only shown is what holds without it.
    assert_eq!(full.migration_ports, plain.migration_ports);
    assert_eq!(full.qemu, plain.qemu);
    assert_eq!(full.accelerator, plain.accelerator);
    assert_eq!(full.boot, plain.boot);
}

#[test]
fn the_controller_example_is_a_configuration() {
    assert!(ControllerFile::load(&example("controller.toml")).is_ok());
    let full: ControllerFile = toml::from_str(&in_full("controller.toml")).unwrap();
    assert_eq!(full.advertise.len(), 1);
}

#[test]
fn the_vm_example_is_a_description() {
    let text = std::fs::read_to_string(example("vm.toml")).unwrap();
    let plain: VmSpec = toml::from_str(&text).unwrap();
    let full: VmSpec = toml::from_str(&in_full("vm.toml")).unwrap();
    let told = full.cloud_init.as_ref().unwrap();
    assert_eq!((told.ssh_keys.len(), told.network.len()), (1, 1));
    // Of the two ways to give user data one counts.
    let text = in_full("vm.toml").replace("user_data_file", "# user_data_file");
    VmSpec::from_toml(&text).unwrap();
    assert_eq!((plain.nics.len(), plain.disks.len()), (1, 0));
    assert_eq!((full.nics.len(), full.disks.len()), (1, 1));
    assert_eq!(full.disks_to_make().count(), 1);
    assert_eq!(full.on_crash, plain.on_crash);
    assert_eq!(full.machine, plain.machine);
}
