//! The control plane: REST bodies and what else arrives over it, the VM process's socket, descriptions of VMs.
//!
//! Owns nothing.

use super::samples;
use crate::outcome::{self, Outcome};
use base64::Engine as _;
use godwit_rpc::pki::Holder;
use godwit_rpc::token::Token;
use godwit_types::control_api::{HostView, JoinRequest, ResolveRequest};
use godwit_types::host_api::{PrepareIncoming, VmAnswer, VmRequest};
use godwit_types::migration::{MigrateRequest, MigrationReport};
use godwit_types::vm::NICS_MAX;
use godwit_types::{ApiError, VmSpec};
use serde::de::DeserializeOwned;

pub fn rest_body(input: &[u8]) -> Outcome {
    godwit_rpc::fuzz::body(input);
    let holder = Holder::read(input);
    if holder.is_ok() {
        return outcome::of("a certificate");
    }
    if std::str::from_utf8(input).is_ok_and(|text| Token::parse(text).is_ok()) {
        return outcome::of("a token");
    }
    if input.first() == Some(&0x30) {
        return outcome::of_result(&holder, |_| 0);
    }
    [
        judge::<JoinRequest>(input),
        judge::<ResolveRequest>(input),
        judge::<HostView>(input),
        judge::<MigrateRequest>(input),
        judge::<PrepareIncoming>(input),
        judge::<MigrationReport>(input),
        judge::<ApiError>(input),
    ]
    .iter()
    .fold(0, |all, one| all.rotate_left(5) ^ one)
}

fn judge<T: DeserializeOwned>(input: &[u8]) -> Outcome {
    let judged: Result<T, _> = serde_json::from_slice(input);
    outcome::of_result(&judged, |_| 1)
}

pub fn rest_body_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<_> = [
        "",
        "{}",
        r#"{"secret":"AAAA","name":"b","agent_address":"192.0.2.2:7441","csr_pem":"-----BEGIN CERTIFICATE REQUEST-----\n"}"#,
        r#"{"on":"a"}"#,
        r#"{"force":true}"#,
        r#"{"run_on":"a","confirm_fenced":"b"}"#,
        r#"{"reason":"too slow"}"#,
        r#"{"to":"b","encryption":"required","max_downtime_ms":50,"deadline_s":60,"max_bandwidth_mbit_per_s":100,"dry_run":true}"#,
        r#"{"spec":SPEC,"state":"running","host":"a","generation":1,"accelerator":"tcg"}"#,
        r#"{"spec":SPEC,"generation":1}"#,
        r#"{"spec":SPEC,"accelerator":"tcg","migration":MIGRATION}"#,
        r#"{"spec":SPEC,"accelerator":"tcg","file_hashes":[["/boot/vmlinuz","00ff"]],"source_unix_ms":1700000000000,"probe_nonce":"00112233445566778899aabbccddeeff"}"#,
        r#"{"refusals":[{"code":"wrong-state","message":"no"}],"passed":["all"],"vm":HOST_VM,"file_hashes":[]}"#,
        r#"{"message":PEER}"#,
        r#"{"nonce":"00112233445566778899aabbccddeeff"}"#,
        r#"{"arrived":{"vm":true}}"#,
        r#"{"serials":["0a","ff"]}"#,
        r#"{"code":"unknown-vm","message":"there is no VM 'x'"}"#,
        r#"{"name":"a","version":"0.1.0","kernel":"6.18","qemu":"7.2","accelerator":"tcg","machine_types":["pc-q35-7.2"],"machine_aliases":{"q35":"pc-q35-7.2"},"cpu_models":["max"],"encryption":true,"port_groups":{"vm":"br0"},"migration_addresses":["192.0.2.1"],"agent_address":"192.0.2.1:7441","memory_total_mib":1000,"memory_free_mib":500,"cpus":2,"boot_id":"x","state":"connected","vms":["web"],"last_seen_s":1}"#,
        "SPEC",
        "MIGRATION",
        "REPORT",
        "event: vm\ndata: {\"kind\":\"vm\",\"name\":\"web\"}\n\n: ping\n\ndata: a\ndata: b\r\n\r\n",
        "godwit1.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA.MTkyLjAuMi4xOjc0NDA",
    ]
    .iter()
    .map(|text| samples::fill(text))
    .collect();
    seeds.extend(base64::engine::general_purpose::STANDARD.decode(samples::CERTIFICATE));
    seeds
}

/// Both directions of the socket between an agent and a VM process: neither trusts the other with its life.
pub fn vm_socket(input: &[u8]) -> Outcome {
    let request: Result<VmRequest, _> = serde_json::from_slice(input);
    if let Ok(request) = &request {
        let again = serde_json::to_vec(request).unwrap_or_default();
        let judged = serde_json::from_slice::<VmRequest>(&again);
        assert!(
            judged.is_ok(),
            "a request that was accepted is refused: {judged:?}"
        );
    }
    let answer: Result<VmAnswer, _> = serde_json::from_slice(input);
    if let Ok(answer) = &answer {
        let _ = serde_json::to_vec(answer);
    }
    outcome::of_result(&request, |r| outcome::of_variant(r))
        ^ outcome::of_result(&answer, |a| outcome::of_variant(a)).rotate_left(9)
}

pub fn vm_socket_seeds() -> Vec<Vec<u8>> {
    [
        r#"{"request":"status"}"#,
        r#"{"request":"stop","force":true}"#,
        r#"{"request":"prepare-incoming","spec":SPEC,"accelerator":"tcg","migration":MIGRATION}"#,
        r#"{"request":"cancel","migration":"m1","reason":"too slow"}"#,
        r#"{"request":"report","migration":"m1"}"#,
        r#"{"request":"peer","from":"b","message":PEER}"#,
        r#"{"request":"take-outbox","wait_ms":1000}"#,
        r#"{"request":"resolve","run_here":true,"confirm_fenced":"b"}"#,
        r#"{"request":"measure-dirty-rate","millis":500}"#,
        r#"{"request":"host-removed","host":"b"}"#,
        r#"{"answer":"done","body":"started"}"#,
        r#"{"answer":"status","body":{"vm":HOST_VM}}"#,
        r#"{"answer":"incoming-ready","body":{"addresses":["192.0.2.1:49152","[2001:db8::1]:49152"]}}"#,
        r#"{"answer":"report","body":REPORT}"#,
        r#"{"answer":"replies","body":[PEER]}"#,
        r#"{"answer":"dirty-rate","body":{"ram_mib":1024,"data_mib":512,"ages":[{"seconds":0.5,"mib":12.5}],"streams":2}}"#,
        r#"{"answer":"outbox","body":[{"peer":{"host":"b","address":"192.0.2.2:7441"},"message":PEER}]}"#,
        r#"{"answer":"error","body":{"code":"wrong-state","message":"no"}}"#,
    ]
    .iter()
    .map(|text| samples::fill(text))
    .collect()
}

pub fn vm_toml(input: &[u8]) -> Outcome {
    // The file is read as text; what is no UTF-8 ends there.
    let Ok(text) = std::str::from_utf8(input) else {
        return outcome::of("no text");
    };
    let judged = VmSpec::from_toml(text);
    if let Ok(spec) = &judged {
        assert_eq!(spec.check(), Ok(()), "accepted and refused");
        assert!(
            spec.memory_bytes() >> 20 == spec.memory_mib,
            "memory overflows"
        );
        assert!(spec.nics.len() <= NICS_MAX, "too many cards");
        let macs = (0..spec.nics.len()).map(|index| spec.mac(index));
        assert!(
            macs.into_iter()
                .all(|mac| mac.is_some_and(|m| m[0] & 1 == 0)),
            "a card without an address"
        );
        let again = toml::to_string(spec)
            .ok()
            .map(|text| VmSpec::from_toml(&text));
        assert_eq!(
            again,
            Some(Ok(spec.clone())),
            "a description changed on the way"
        );
    }
    match &judged {
        Ok(spec) => (spec.nics.len() * 8 + spec.disks.len().min(7)) as u64,
        // The parser shows the place where it stopped; what follows says why.
        Err(error) => outcome::of(error.0.rsplit("^\n").next().unwrap_or_default()),
    }
}

pub fn vm_toml_seeds() -> Vec<Vec<u8>> {
    let plain = "name = \"a\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n";
    vec![samples::VM_TOML.into(), plain.into()]
}
