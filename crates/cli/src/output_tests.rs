//! What lists say of VMs and hosts: the worst first, since when nothing was heard, who holds a VM twice.

use super::*;
use serde_json::json;

fn vm(name: &str, state: VmState, more: serde_json::Value) -> VmView {
    let mut value = json!({
        "spec": { "name": name, "vcpus": 1, "memory_mib": 64, "kernel": "/k" },
        "state": state, "host": "a", "generation": 3,
    });
    let object = value.as_object_mut().unwrap();
    object.extend(more.as_object().unwrap().clone());
    serde_json::from_value(value).unwrap()
}

fn host(more: serde_json::Value) -> HostView {
    let mut value = json!({
        "name": "a", "version": "", "kernel": "", "qemu": "", "accelerator": "tcg", "machine_types": [], "machine_aliases": {},
        "cpu_models": [], "encryption": true, "port_groups": {}, "migration_addresses": [],
        "agent_address": "127.0.0.1:1", "memory_total_mib": 1, "memory_free_mib": 1, "cpus": 1, "boot_id": "",
        "state": "connected", "vms": [], "last_seen_s": 0,
    });
    let object = value.as_object_mut().unwrap();
    object.extend(more.as_object().unwrap().clone());
    serde_json::from_value(value).unwrap()
}

#[test]
fn nothing_is_coloured_without_a_terminal() {
    let plain = Output {
        json: false,
        colour: false,
    };
    assert_eq!(plain.tone_of_line(" web  in-doubt  a"), "web  in-doubt  a");
    let colour = Output {
        colour: true,
        ..plain
    };
    for state in ["in-doubt", "running-twice"] {
        let line = colour.tone_of_line(&format!("web  {state}  a"));
        assert!(line.starts_with("\x1b[1;31m"), "{line:?}");
    }
    assert_eq!(colour.tone_of_line("web  running  a"), "web  running  a");
}

#[test]
fn a_state_that_is_old_news_says_how_old() {
    let heard = vm("web", VmState::Running, json!({}));
    assert_eq!(state_since(&heard), "running");
    let silent = vm("web", VmState::Unreachable, json!({ "heard_s": 90 }));
    assert_eq!(state_since(&silent), "unreachable (90 s)");
}

#[test]
fn every_host_that_holds_a_vm_is_named() {
    let twice = vm(
        "web",
        VmState::RunningTwice,
        json!({ "copies": ["a", "b"] }),
    );
    assert_eq!(hosts_of(&twice), "a and b");
    assert_eq!(hosts_of(&vm("web", VmState::Running, json!({}))), "a");
    let new = vm("web", VmState::Stopped, json!({ "host": null }));
    assert_eq!(hosts_of(&new), "-");
}

#[test]
fn what_a_person_must_end_comes_before_all_else() {
    let states = [
        VmState::Running,
        VmState::InDoubt,
        VmState::Unreachable,
        VmState::RunningTwice,
        VmState::Crashed,
    ];
    let mut sorted = states;
    sorted.sort_by_key(|state| urgency(*state));
    assert_eq!(sorted[..2], [VmState::RunningTwice, VmState::InDoubt]);
    let alarming = |state: &&VmState| is_alarming(**state);
    let found: Vec<_> = states.iter().filter(alarming).collect();
    assert_eq!(found, [&VmState::InDoubt, &VmState::RunningTwice]);
}

#[test]
fn a_host_that_is_not_itself_is_shown_as_that_and_not_as_connected() {
    for (more, shown) in [
        (json!({}), "connected"),
        (json!({ "draining": true }), "draining"),
        (json!({ "state": "unreachable" }), "unreachable"),
        (
            json!({ "state": "unreachable", "draining": true }),
            "unreachable",
        ),
        (json!({ "state": "unreachable", "fenced": true }), "fenced"),
        (json!({ "standing": "old-copy" }), "old copy"),
        (
            json!({ "standing": "second-instance", "fenced": true }),
            "second instance",
        ),
    ] {
        assert_eq!(host_state(&host(more.clone())), shown, "{more}");
    }
}

#[test]
fn a_table_that_is_too_wide_loses_what_is_needed_least() {
    let rows = vec![vec!["web".into(), "30.8 MB/s".into(), "send-0 23 %".into()]];
    let header = ["vm", "rate", "busiest thread"];
    let needless = ["rate", "busiest thread"];
    let shown = |room| fit(&header, rows.clone(), &needless, room).0;
    assert_eq!(shown(80), header);
    assert_eq!(shown(20), ["vm", "rate"]);
    assert_eq!(shown(6), ["vm"]);
    let (_, rows) = fit(&header, rows, &needless, 20);
    assert_eq!(rows, [["web", "30.8 MB/s"]]);
}

#[test]
fn a_vm_that_moved_away_is_not_called_stopped_by_the_host_it_left() {
    let at = |claim: serde_json::Value| -> HostVm {
        serde_json::from_value(json!({
            "spec": { "name": "web", "vcpus": 1, "memory_mib": 64, "kernel": "/k" },
            "state": "stopped", "generation": 3, "claim": claim,
        }))
        .unwrap()
    };
    let moved = at(json!({ "claim": "moved", "generation": 3, "to": "b" }));
    assert_eq!(state_here(&moved), "moved to b");
    let off = at(json!({ "claim": "holds", "generation": 3, "on": false }));
    assert_eq!(state_here(&off), "stopped");
}
