//! The seed of a guest: the small read-only disk from which cloud-init reads what `[cloud_init]` says (NoCloud, label `cidata`).
//!
//! Each QEMU gets one of its own, in memory that nobody can change once it is filled: made of the VM's description alone, so
//! it is byte for byte the same on the host to which the VM moves, and there is no file that could be half, left behind or read by
//! others. So the bytes are a part of the hardware version: a builder that makes others makes them from a newer version on. Owns nothing; QEMU's
//! descriptor is the last that keeps it. Refuses: a description that is not valid.

mod iso;

use crate::described::uuid_of;
use godwit_types::vm::{CardNetwork, CloudInit, VmSpec, mac_text};
use iso::File;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create, open};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};

/// By which cloud-init knows the disk.
const LABEL: &str = "cidata";
const NO_USER_DATA: &str = "#cloud-config\n{}\n";

/// The seed of a guest that is told something: open for reading, for a QEMU that is about to start.
pub fn open_for(spec: &VmSpec) -> io::Result<Option<OwnedFd>> {
    let Some(bytes) = image(spec).map_err(io::Error::other)? else {
        return Ok(None);
    };
    let memory = memfd_create(
        "godwit-seed",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    let mut memory = fs::File::from(memory);
    memory.write_all(&bytes)?;
    let never = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&memory, never)?;
    // QEMU opens a descriptor that it was given in the way in which that is open.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(Some(open(path, flags, Mode::empty())?))
}

/// All bytes of the seed, of a VM that has one.
pub fn image(spec: &VmSpec) -> Result<Option<Vec<u8>>, String> {
    let Some(told) = &spec.cloud_init else {
        return Ok(None);
    };
    let (meta_data, network) = (meta_data(spec, told), network_config(spec, told));
    let user_data = told.user_data.as_deref().unwrap_or(NO_USER_DATA);
    let all = [
        ("meta-data", "METADATA.;1", meta_data.as_str()),
        ("network-config", "NETCONF.;1", network.as_str()),
        ("user-data", "USERDATA.;1", user_data),
    ];
    let files = all.iter().filter(|(.., text)| !text.is_empty());
    let files: Vec<File<'_>> = files
        .map(|(name, plain, text)| File {
            name,
            plain,
            bytes: text.as_bytes(),
        })
        .collect();
    iso::image(LABEL, &files).map(Some)
}

fn meta_data(spec: &VmSpec, told: &CloudInit) -> String {
    let instance = told.instance_id.clone();
    let instance = instance.unwrap_or_else(|| uuid_of(spec.name.as_str()));
    let mut text = format!(
        "instance-id: {}\nlocal-hostname: {}\n",
        quoted(&instance),
        quoted(&spec.guest_name())
    );
    if !told.ssh_keys.is_empty() {
        text.push_str("public-keys:\n");
    }
    for key in &told.ssh_keys {
        let _ = writeln!(text, "  - {}", quoted(key));
    }
    text
}

/// Version 2, each card by its address. The names are set, since some of the systems that cloud-init writes files for know cards by
/// their names alone. Empty for a guest without cards.
fn network_config(spec: &VmSpec, told: &CloudInit) -> String {
    if spec.nics.is_empty() {
        return String::new();
    }
    let mut text = "version: 2\nethernets:\n".to_owned();
    let by_dhcp = CardNetwork::default();
    for index in 0..spec.nics.len() {
        let network = told.network.get(index).unwrap_or(&by_dhcp);
        let mac = mac_text(spec.mac(index).unwrap_or_default());
        let _ = write!(
            text,
            "  eth{index}:\n    match:\n      macaddress: {}\n    set-name: eth{index}\n",
            quoted(&mac)
        );
        card(&mut text, network);
    }
    text
}

fn card(text: &mut String, network: &CardNetwork) {
    match network.addresses.is_empty() {
        true => text.push_str("    dhcp4: true\n"),
        false => list(text, "    addresses:", &network.addresses),
    }
    if !network.gateways.is_empty() {
        text.push_str("    routes:\n");
    }
    for gateway in &network.gateways {
        let all = if gateway.is_ipv4() {
            "0.0.0.0/0"
        } else {
            "::/0"
        };
        let (to, via) = (quoted(all), quoted(&gateway.to_string()));
        let _ = writeln!(text, "      - to: {to}\n        via: {via}");
    }
    let servers: Vec<String> = network.dns.iter().map(ToString::to_string).collect();
    if !servers.is_empty() || !network.search.is_empty() {
        text.push_str("    nameservers:\n");
        list(text, "      addresses:", &servers);
        list(text, "      search:", &network.search);
    }
}

fn list(text: &mut String, key: &str, values: &[String]) {
    let values: Vec<String> = values.iter().map(|value| quoted(value)).collect();
    let _ = writeln!(text, "{key} [{}]", values.join(", "));
}

/// A text of JSON is one of YAML, whatever is in it.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::vm::SEED_AND_AGENT;
    use std::io::Read as _;

    fn told(lines: &str) -> VmSpec {
        let cards = "[[nic]]\nport_group = \"vm\"\nmac = \"52:54:00:00:00:01\"\n[[nic]]\nport_group = \"vm\"\nmac = \"52:54:00:00:00:02\"\n";
        let text = format!(
            "name = \"web_1\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\n[cloud_init]\n{lines}{cards}"
        );
        VmSpec::from_toml(&text).unwrap()
    }

    fn texts(spec: &VmSpec) -> (String, String) {
        let told = spec.cloud_init.as_ref().unwrap();
        (meta_data(spec, told), network_config(spec, told))
    }

    #[test]
    fn a_guest_is_told_its_name_its_keys_and_the_network_of_each_card() {
        let spec = told(
            "ssh_keys = [\"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 eve \\\"x\\\"\"]\n[[cloud_init.network]]\naddresses = [\"192.0.2.10/24\", \"2001:db8::10/64\"]\ngateways = [\"192.0.2.1\", \"2001:db8::1\"]\ndns = [\"192.0.2.53\"]\nsearch = [\"example.net\"]\n",
        );
        let (meta_data, network) = texts(&spec);
        let uuid = uuid_of("web_1");
        assert_eq!(
            meta_data,
            format!(
                "instance-id: \"{uuid}\"\nlocal-hostname: \"web-1\"\npublic-keys:\n  - \"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 eve \\\"x\\\"\"\n"
            )
        );
        assert_eq!(
            network,
            "version: 2\nethernets:\n  eth0:\n    match:\n      macaddress: \"52:54:00:00:00:01\"\n    set-name: eth0\n    addresses: [\"192.0.2.10/24\", \"2001:db8::10/64\"]\n    routes:\n      - to: \"0.0.0.0/0\"\n        via: \"192.0.2.1\"\n      - to: \"::/0\"\n        via: \"2001:db8::1\"\n    nameservers:\n      addresses: [\"192.0.2.53\"]\n      search: [\"example.net\"]\n  eth1:\n    match:\n      macaddress: \"52:54:00:00:00:02\"\n    set-name: eth1\n    dhcp4: true\n"
        );
    }

    #[test]
    fn another_name_of_the_instance_is_a_wish_and_a_vm_of_another_name_is_another_instance() {
        let spec = told("instance_id = \"again\"\n");
        assert!(texts(&spec).0.starts_with("instance-id: \"again\"\n"));
        let spec = told("");
        let mut clone = spec.clone();
        clone.name = godwit_types::VmName::new("web-2").unwrap();
        assert_ne!(texts(&spec).0, texts(&clone).0);
    }

    /// FNV-1a of 128 bits.
    fn hash(bytes: &[u8]) -> u128 {
        let start = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        bytes.iter().fold(start, |state: u128, &byte| {
            (state ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        })
    }

    /// A guest that moved between two versions of this builder would read other bytes of a disk that it has open.
    #[test]
    fn the_seeds_of_hardware_3_are_these_bytes_in_every_build() {
        let whole = "ssh_keys = [\"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 eve\"]\nuser_data = \"#!/bin/sh\\n\"\n[[cloud_init.network]]\naddresses = [\"192.0.2.10/24\"]\ngateways = [\"192.0.2.1\"]\ndns = [\"192.0.2.53\"]\nsearch = [\"example.net\"]\n";
        for (lines, golden) in [
            (whole, 0x3362_16aa_4302_0085_6c74_abda_0a62_e7c2_u128),
            ("", 0x3dbc_cd70_37ea_96af_41a5_6c21_8951_b5e8),
        ] {
            let mut spec = told(lines);
            spec.set_hardware(Some(SEED_AND_AGENT));
            let made = image(&spec).unwrap().unwrap();
            assert_eq!(
                (made.len(), hash(&made)),
                (57_344, golden),
                "give a builder of other bytes a hardware version of its own"
            );
        }
        assert_eq!(SEED_AND_AGENT, 3);
    }

    #[test]
    fn a_seed_is_the_same_each_time_and_nobody_changes_it() {
        let spec = told("user_data = \"#!/bin/sh\\n\"\n");
        let made = image(&spec).unwrap().unwrap();
        let mut read = Vec::new();
        let file = open_for(&spec).unwrap().unwrap();
        fs::File::from(file.try_clone().unwrap())
            .read_to_end(&mut read)
            .unwrap();
        assert!(read == made, "the seed differs from what was made");
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let again = fs::OpenOptions::new().write(true).open(path).unwrap();
        assert!((&again).write_all(b"x").is_err(), "it is sealed");
        let plain = VmSpec {
            cloud_init: None,
            ..spec
        };
        assert!(open_for(&plain).unwrap().is_none());
    }

    #[test]
    fn what_cloud_init_reads_as_yaml_is_what_was_described() {
        let spec = told(
            "hostname = \"web.example.net\"\n[[cloud_init.network]]\naddresses = [\"192.0.2.10/24\"]\n",
        );
        let (meta_data, network) = texts(&spec);
        let program =
            "import sys,yaml,json; print(json.dumps([yaml.safe_load(t) for t in sys.argv[1:]]))";
        let output = std::process::Command::new("python3")
            .args(["-c", program, &meta_data, &network])
            .output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else {
            println!("skipped: there is no python3 with yaml");
            return;
        };
        let read: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(read[0]["local-hostname"], "web.example.net");
        assert_eq!(
            read[1]["ethernets"]["eth1"]["match"]["macaddress"],
            "52:54:00:00:00:02"
        );
        assert_eq!(
            read[1]["ethernets"]["eth0"]["addresses"][0],
            "192.0.2.10/24"
        );
    }
}
