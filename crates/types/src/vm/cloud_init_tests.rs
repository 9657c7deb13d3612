//! What `[cloud_init]` says, what is refused of it, and what is not shown.

use super::*;

const WEB: &str =
    "name = \"web_1\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\n[[nic]]\nport_group = \"vm\"\n";
const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB eve";

fn described(lines: &str) -> Result<VmSpec, InvalidVm> {
    VmSpec::from_toml(&format!("{WEB}{lines}"))
}

fn refusal(lines: &str) -> String {
    described(&format!("[cloud_init]\n{lines}")).unwrap_err().0
}

#[test]
fn a_vm_without_the_table_is_described_as_before() {
    let vm = described("").unwrap();
    let json = serde_json::to_string(&vm).unwrap();
    assert!(
        !json.contains("cloud"),
        "older hosts do not know it: {json}"
    );
    vm.check_boots().unwrap();
}

#[test]
fn the_table_is_understood_wholly_and_wants_its_hardware() {
    let mut vm = described(&format!(
        "[cloud_init]\nuser_data = '''\n#cloud-config\npackages: [nginx]\n'''\nssh_keys = [\"{KEY}\"]\nhostname = \"web.example.net\"\ninstance_id = \"web-2\"\n[[cloud_init.network]]\naddresses = [\"192.0.2.10/24\", \"2001:db8::10/64\"]\ngateways = [\"192.0.2.1\", \"2001:db8::1\"]\ndns = [\"192.0.2.53\"]\nsearch = [\"example.net\"]\n"
    ))
    .unwrap();
    assert_eq!(vm.guest_name(), "web.example.net");
    let again: VmSpec = serde_json::from_str(&serde_json::to_string(&vm).unwrap()).unwrap();
    assert_eq!(again, vm);
    let refused = vm.check_boots().unwrap_err().to_string();
    assert!(refused.contains("hardware = 3"), "{refused}");
    vm.set_hardware(Some(3));
    vm.check_boots().unwrap();
}

#[test]
fn a_guest_is_called_as_its_vm_where_nobody_says_otherwise() {
    let name = |text: &str| {
        let vm = described("[cloud_init]\n").unwrap();
        let name = crate::VmName::new(text).unwrap();
        VmSpec { name, ..vm }.guest_name()
    };
    assert_eq!(name("web_1"), "web-1");
    assert_eq!(name("web.example"), "web.example");
    assert_eq!(name("web_"), "web");
    assert_eq!(name("a_.b.."), "a.b");
    assert!(is_host_name(&name("a_.b..")));
}

#[test]
fn what_cloud_init_would_pass_over_or_no_host_should_keep_is_refused() {
    let long = format!("user_data = \"#!/bin/sh\\n{}\"\n", "x".repeat(16 << 10));
    let keys = format!("ssh_keys = [{}]\n", format!("\"{KEY}\",").repeat(33));
    let network = |lines: &str| format!("[[cloud_init.network]]\n{lines}\n");
    for (lines, told) in [
        ("user_data = \"packages: [nginx]\"\n", "first line"),
        ("user_data = \"#!/bin/sh\\u0000\"\n", "zero byte"),
        (&long, "at most 16384"),
        ("user_data_file = \"web.yaml\"\n", "read"),
        (
            "ssh_keys = [\"-----BEGIN OPENSSH PRIVATE KEY-----\"]\n",
            "private key",
        ),
        ("ssh_keys = [\"AAAA\"]\n", "key number 1"),
        (
            &format!("ssh_keys = [\"{KEY}\\nssh-rsa\"]\n"),
            "no public key",
        ),
        (&keys, "33 keys"),
        ("hostname = \"web_1\"\n", "no name of a host"),
        ("hostname = \"-web\"\n", "no name of a host"),
        ("instance_id = \"\"\n", "instance_id"),
        ("instance_id = \"a b\"\n", "instance_id"),
        ("user-data = \"#!\"\n", "user-data"),
        (
            &network("addresses = [\"192.0.2.10\"]"),
            "length of its network",
        ),
        (
            &network("addresses = [\"192.0.2.10/33\"]"),
            "length of its network",
        ),
        (
            &network("addresses = [\"0.0.0.0/0\"]"),
            "length of its network",
        ),
        (
            &network("addresses = [\"192.0.2.10/+8\"]"),
            "length of its network",
        ),
        (
            &network("gateways = [\"192.0.2.1\"]"),
            "goes with an address",
        ),
        (
            &network("addresses = [\"192.0.2.10/24\"]\ngateways = [\"192.0.2.1\", \"192.0.2.2\"]"),
            "second gateway",
        ),
        (&network("dns = [\"one\"]"), "invalid IP address"),
        (&network("search = [\"a b\"]"), "no domain"),
        (&format!("{}{}", network(""), network("")), "2 networks"),
    ] {
        let refused = refusal(lines);
        assert!(refused.contains(told), "{lines}: {refused}");
        assert!(!refused.contains("PRIVATE"), "{refused}");
    }
}

/// cloud-init refused the whole document, and the guest had neither name nor keys.
#[test]
fn a_key_with_what_yaml_cannot_hold_is_refused() {
    for character in ["2028", "2029", "FFFE", "FFFF", "0085"] {
        let refused = refusal(&format!("ssh_keys = [\"{KEY}\\u{character}\"]\n"));
        assert!(refused.contains("no public key"), "{character}: {refused}");
    }
    described(&format!("[cloud_init]\nssh_keys = [\"{KEY} \\u00e9\"]\n")).unwrap();
}

#[test]
fn a_file_of_user_data_is_read_where_the_command_is_given() {
    let text = format!("{WEB}[cloud_init]\nuser_data_file = \"web.yaml\"\n");
    let vm =
        VmSpec::from_toml_with(&text, |file| Ok(format!("#cloud-config\n# {file}\n"))).unwrap();
    let told = vm.cloud_init.unwrap();
    assert_eq!(
        told.user_data.as_deref(),
        Some("#cloud-config\n# web.yaml\n")
    );
    assert_eq!(told.user_data_file, None);
    let refused =
        VmSpec::from_toml_with(&text, |_| Err("there is no web.yaml".into())).unwrap_err();
    assert_eq!(refused.0, "there is no web.yaml");
    let both = format!("{text}user_data = \"#!\"\n");
    let refused = VmSpec::from_toml_with(&both, |_| Ok(String::new())).unwrap_err();
    assert!(refused.0.contains("give one of them"), "{refused}");
}

#[test]
fn what_a_log_may_show_holds_no_secret() {
    let text = format!("[cloud_init]\nuser_data = \"#!secret\"\nssh_keys = [\"{KEY}\"]\n");
    let vm = described(&text).unwrap();
    let shown = format!("{vm:?}");
    assert!(
        !shown.contains("secret") && !shown.contains("AAAA"),
        "{shown}"
    );
    assert!(shown.contains("user data of 8 bytes, 1 key"), "{shown}");
}
