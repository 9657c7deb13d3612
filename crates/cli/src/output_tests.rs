//! What lists say of VMs and hosts: the worst first, since when nothing was heard, who holds a VM twice.

use super::*;
use serde_json::json;
use std::cell::RefCell;

thread_local! {
    /// What was printed by this test, line by line.
    pub static PRINTED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// What is printed on a terminal of 80 columns.
fn at_80(print: impl FnOnce(&Output)) -> Vec<String> {
    PRINTED.take();
    print(&Output {
        json: false,
        colour: false,
        columns: Some(80),
    });
    PRINTED.take()
}

/// No line is wider than the terminal, and all of these words are there.
fn fits(lines: &[String], words: &[&str]) {
    let wide: Vec<_> = lines
        .iter()
        .filter(|line| plain::width(line) > 80)
        .collect();
    assert!(wide.is_empty(), "{wide:#?}");
    let text = lines.join("\n");
    let words = words.iter().filter(|word| !text.contains(**word));
    assert_eq!(words.collect::<Vec<_>>(), Vec::<&&str>::new(), "{text}");
}

pub fn vm(name: &str, state: VmState, more: serde_json::Value) -> VmView {
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
        columns: None,
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
fn what_a_host_that_was_never_heard_has_is_not_told_as_none() {
    let silent = host(json!({ "state": "unreachable" }));
    let heard = host(json!({ "version": "0.1.0" }));
    let rows = |host| {
        let lines = at_80(|output| output.hosts(&[host]));
        let row = lines.last().unwrap().split_whitespace();
        row.map(str::to_owned).collect::<Vec<_>>()
    };
    let (silent, heard) = (rows(silent), rows(heard));
    assert_eq!(silent[..2], ["a", "unreachable"]);
    assert!(silent.iter().any(|word| word == "-"), "{silent:?}");
    for told in ["0", "1", "tcg", "yes"] {
        assert!(!silent.iter().any(|word| word == told), "{silent:?}");
    }
    assert!(!heard.iter().any(|word| word == "-"), "{heard:?}");
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
fn a_host_counts_the_vms_that_are_on() {
    let held = host(json!({ "version": "1", "vms": ["web", "db", "old"], "vms_off": ["old"] }));
    let all_off = host(json!({ "version": "1", "vms": ["web"], "vms_off": ["web"] }));
    let counted = |host: HostView| {
        let lines = at_80(|output| output.hosts(&[host]));
        let place = lines[0].find("VMS").unwrap();
        lines[1][place..]
            .split_whitespace()
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(counted(held.clone()), "2");
    assert_eq!(counted(all_off), "0");
    let shown = at_80(|output| output.host(&held)).join("\n");
    assert!(shown.contains("web, db, old (off)"), "{shown}");
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

const LONG_ID: &str = "mig-0123456789abcdef-0123";
const LONG_NOTE: &str = "it is held by host b, which does not answer: bring it back; or, when it is powered off, run 'godwit host fenced b'";

#[test]
fn lists_of_vms_keep_within_80_columns() {
    let more = json!({ "heard_s": 86_400, "migration": LONG_ID, "note": LONG_NOTE });
    let list = [vm("web-server-of-accounting", VmState::Unreachable, more)];
    let lines = at_80(|output| output.vms(&list));
    fits(
        &lines,
        &[
            "web-server-of-accounting",
            "unreachable (86400 s)",
            "HOST",
            "fenced b'",
        ],
    );
    fits(
        &at_80(|output| output.vm(&list[0])),
        &[LONG_ID, "fenced b'"],
    );
    let here: HostVm = serde_json::from_value(json!({
        "spec": { "name": "web-server-of-accounting", "vcpus": 1, "memory_mib": 4_194_304, "kernel": "/k" },
        "state": "stopped", "generation": 1_000_000, "migration": LONG_ID,
        "claim": { "claim": "moved", "generation": 3, "to": "rack-12-host-b" },
    }))
    .unwrap();
    let lines = at_80(|output| output.host_vms(&[here]));
    fits(&lines, &["moved to rack-12-host-b", "HELD HERE"]);
}

#[test]
fn lists_of_hosts_keep_within_80_columns() {
    let more = json!({
        "name": "rack-12-host-b", "version": "0.1.0", "agent_address": "203.0.113.254:8472", "cpus": 128,
        "memory_total_mib": 1_048_576, "memory_free_mib": 1_000_000, "vms": ["web", "db"], "accelerator": "kvm",
        "cpu_models": ["qemu64", "EPYC-Milan", "EPYC-Rome", "EPYC", "Nehalem", "Westmere", "SandyBridge"],
    });
    let hosts = [host(more)];
    let lines = at_80(|output| output.hosts(&hosts));
    fits(
        &lines,
        &[
            "rack-12-host-b",
            "connected",
            "203.0.113.254:8472",
            "1000000 of 1048576 MiB",
        ],
    );
    fits(&at_80(|output| output.host(&hosts[0])), &["kvm"]);
}

#[test]
fn a_host_without_vms_says_so_and_a_vm_says_what_it_boots_and_as_whom() {
    let lines = at_80(|output| output.host(&host(json!({}))));
    assert!(lines.last().unwrap().ends_with("none"), "{lines:#?}");
    let mut web = vm("web", VmState::Running, json!({}));
    (web.spec.uid, web.spec.cmdline) = (Some(70_001), "console=ttyS0".into());
    web.spec.initramfs = Some("/initrd".into());
    let words = ["70001", "console=ttyS0", "/initrd", "restart"];
    fits(&at_80(|output| output.vm(&web)), &words);
}

#[test]
fn what_a_check_found_hangs_below_its_column() {
    let check: Check = serde_json::from_value(json!({
        "name": "guest tracking", "status": "failed", "found": LONG_NOTE, "remedy": LONG_NOTE,
    }))
    .unwrap();
    let lines = at_80(|output| output.checks(&[check]));
    fits(&lines, &["FAILED", "it is held by host b", "fenced b'"]);
    let column = lines[0].find("FOUND").unwrap();
    let below = lines[2].len() - lines[2].trim_start().len();
    assert_eq!(below, column, "{lines:#?}");
}

#[test]
fn dry_runs_and_reports_keep_within_80_columns() {
    let report: PreflightReport = serde_json::from_value(json!({
        "passed": ["port group vm: a frame of the probe arrived at host rack-12-host-b within 0.2 ms, and its bridge is vmbr0"],
        "refusals": [{ "code": "preflight", "message": LONG_NOTE }],
    }))
    .unwrap();
    let lines = at_80(|output| output.preflight(&report));
    fits(&lines, &["refused it is held", "ok      port group vm"]);
    assert!(lines[1].starts_with("        "), "{lines:#?}");
    let report = crate::move_report::tests::report(json!({
        "id": LONG_ID, "vm": "web-server-of-accounting", "from": "rack-12-host-a", "to": "rack-12-host-b",
        "outcome": "failed", "reason": LONG_NOTE, "notes": [LONG_NOTE],
        "iterations": [{"pages_sent": 268_435_456, "zero_pages": 268_435_456, "bytes": 1_u64 << 40, "seconds": 1234.5, "limited_by": "destination-memory"}],
    }));
    let lines = at_80(|output| output.migration(&report));
    fits(
        &lines,
        &["destination-memory", "1048576.0 MiB", "fenced b'"],
    );
    fits(
        &at_80(|output| output.migrations(&[report])),
        &[LONG_ID, "failed"],
    );
}

#[test]
fn a_pipe_gets_every_line_whole() {
    PRINTED.take();
    let plain = Output {
        json: false,
        colour: false,
        columns: None,
    };
    plain.pairs(&[("note", LONG_NOTE.into())]);
    plain.line(LONG_NOTE);
    assert_eq!(
        PRINTED.take(),
        [format!("note  {LONG_NOTE}"), LONG_NOTE.to_owned()]
    );
}
