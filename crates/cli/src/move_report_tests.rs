//! What a report says of moves that completed, were cancelled, failed, or go on.

use super::*;
use serde_json::json;

/// A report of a move that completed, with these fields instead.
pub fn report(fields: serde_json::Value) -> MigrationReport {
    let mut base = json!({
        "id": "m", "vm": "web", "from": "a", "to": "b", "outcome": "completed", "phase": "ended", "side": "source",
        "encryption": "none", "streams": 2, "total_s": 26.9, "switchover_ms": 53.6,
        "switchover_parts_ms": {"stop_ms": 0.0, "last_pages_ms": 0.0, "device_save_ms": 0.0,
            "device_load_ms": 0.0, "permit_ms": 0.0, "resume_ms": 0.0},
        "iterations": [], "bytes_on_wire": 121_634_816, "wire_bytes_per_s": 13.5e6, "throughput_gb_per_s": 0.0135,
        "cpu_source_s": 0.0, "cpu_destination_s": 0.0, "dirty_mib_per_s": 0.0,
        "promise": {"max_downtime_ms": 50, "kept": false},
        "ram_mib": 1024, "remaining_bytes": 0, "guest_speed_percent": 100, "began_unix_s": 0
    });
    base.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    serde_json::from_value(base).unwrap()
}

fn row(report: &MigrationReport, name: &str) -> Option<String> {
    let rows = report_rows(report);
    let row = rows.into_iter().find(|(row, _)| *row == name);
    row.map(|(_, value)| value)
}

#[test]
fn a_missed_wish_is_a_target_and_not_a_promise() {
    let missed = row(&report(json!({})), "switchover").unwrap();
    assert_eq!(missed, "53.6 ms (target 50 ms: missed by 3.6 ms)");
    let kept = json!({"switchover_ms": 21.6, "promise": {"max_downtime_ms": 50, "kept": true}});
    let kept = row(&report(kept), "switchover").unwrap();
    assert_eq!(kept, "21.6 ms (target 50 ms: met)");
}

#[test]
fn a_move_by_dirty_tracking_says_so_and_how_long_its_guest_stood_still_for_its_disks() {
    let mirrored = json!({ "disk_bytes": 10 << 20 });
    let mirrored = report(mirrored);
    assert_eq!(
        row(&mirrored, "disks").unwrap(),
        "10.0 MiB of 10.0 MiB copied"
    );
    assert_eq!(row(&mirrored, "of it disks"), None);
    let tracked = report(json!({
        "disk_bytes": 10 << 20, "method": "dirty-tracking", "switchover_ms": 2053.6,
        "switchover_parts_ms": {"stop_ms": 0.0, "last_blocks_ms": 2000.0, "last_pages_ms": 0.0, "device_save_ms": 0.0,
            "device_load_ms": 0.0, "permit_ms": 0.0, "resume_ms": 0.0}
    }));
    let disks = row(&tracked, "disks").unwrap();
    assert_eq!(disks, "10.0 MiB of 10.0 MiB copied by dirty-tracking");
    let of_it = row(&tracked, "of it disks").unwrap();
    assert_eq!(of_it, "2000.0 ms for their last blocks");
    assert_eq!(disk_lines(&tracked).count(), 0, "its host told of none");
}

#[test]
fn of_a_disk_that_went_along_by_dirty_tracking_each_iteration_is_told() {
    let ended = |number: u32, dirty: u64, deferred: u64| {
        json!({"number": number, "copied_bytes": 300 << 20, "seconds": 1.5, "dirty_bytes": dirty, "hot_bytes": deferred,
            "deferred_bytes": deferred})
    };
    let tracked = report(json!({
        "disk_bytes": 300 << 20, "method": "dirty-tracking",
        "disk_iterations": [
            {"disk": "root", "iterations": [ended(1, 40 << 20, 10 << 20), ended(2, 0, 0)]},
            {"disk": "data", "iterations": []}
        ]
    }));
    let lines: Vec<String> = disk_lines(&tracked).collect();
    assert_eq!(
        lines,
        [
            "disk root, iteration 1: 300.0 MiB in 1.50 s, without 10.0 MiB that is written again and again; 30.0 MiB written meanwhile",
            "disk root, iteration 2: 300.0 MiB in 1.50 s; 0.0 MiB written meanwhile"
        ]
    );
}

#[test]
fn of_disks_that_went_along_by_redo_logs_it_is_told_what_the_logs_took() {
    let logs = |slowed: serde_json::Value| {
        let mut sent = json!({"logs": 3, "space_max_bytes": 40 << 20, "frozen_ms": 4.26});
        sent["slowed_to"] = slowed;
        let sent = json!({"disk_bytes": 300 << 20, "method": "snapshot", "redo_logs": sent});
        row(&report(sent), "redo logs").unwrap()
    };
    let told = "3 of each disk, of 40.0 MiB at the most together; its guest waited 4.3 ms while they were put over";
    assert_eq!(logs(json!(null)), told);
    let slowed = format!("{told}; its guest was slowed to 25 %");
    assert_eq!(logs(json!(0.25)), slowed);
    let almost_stopped = format!("{told}; its guest was slowed to less than 1 %");
    assert_eq!(logs(json!(0.0004)), almost_stopped);
    assert_eq!(row(&report(json!({})), "redo logs"), None);
}

/// Both hosts lost power in the handover, and a pause of 0.0 ms was said to have missed its target by 0.0 ms.
#[test]
fn a_pause_that_nobody_measured_is_not_told_as_no_pause() {
    let unknown = row(&report(json!({"switchover_ms": 0.0})), "switchover").unwrap();
    assert_eq!(
        unknown,
        "not known: nobody told how long it took (target 50 ms)"
    );
}

#[test]
fn a_cancelled_or_failed_move_tells_of_no_switchover_that_it_did_not_make() {
    for outcome in ["cancelled", "failed"] {
        let ended = report(json!({ "outcome": outcome, "switchover_ms": 0.0 }));
        assert_eq!(row(&ended, "switchover"), None, "{outcome}");
        // Its bytes are told.
        assert_eq!(row(&ended, "bytes on wire").unwrap(), "116.0 MiB");
        // By the whole time, disks and memory together.
        assert_eq!(row(&ended, "rate").unwrap(), "4.5 MB/s on average");
    }
}

#[test]
fn a_vm_that_is_off_does_not_stay_anywhere() {
    let off = report(json!({ "outcome": "failed", "guest_ended": true }));
    assert_eq!(headline(&off), "VM 'web' was not moved to b: it is off");
    let runs = report(json!({ "outcome": "failed" }));
    assert_eq!(headline(&runs), "Failed: VM 'web' stays on a");
}

#[test]
fn a_prediction_says_which_figure_is_the_base() {
    let prediction = json!({"total_s": 15.5, "downtime_ms": 13.0, "guest_speed_percent": 100,
        "throughput_gb_per_s": 0.1, "dirty_mib_per_s": 0.3, "data_mib": 1, "basis": "a burst"});
    let told = report(json!({ "prediction": prediction }));
    assert_eq!(row(&told, "time").unwrap(), "took 26.9 s, predicted 15.5 s");
    assert_eq!(row(&told, "pause").unwrap(), "was 54 ms, predicted 13 ms");
}

#[test]
fn a_lost_link_and_a_called_off_switchover_are_told() {
    let events = json!([
        {"at_s": 3.2, "kind": "link-lost", "lasted_s": 4.8, "message": "connection reset"},
        {"at_s": 9.0, "kind": "link-silent", "lasted_s": 5.0, "message": "nothing got through to the other host"},
        {"at_s": 20.0, "kind": "switchover-called-off", "lasted_s": 0.7, "message": "the switchover was called off"},
        {"at_s": 21.0, "kind": "told-by-a-later-version", "message": "something else"},
        {"at_s": 23.9, "kind": "link-lost", "message": "connection reset"},
    ]);
    let moving = report(json!({ "outcome": null, "phase": "precopy", "events": events }));
    let lines: Vec<String> = moving
        .events
        .iter()
        .map(|event| event_line(event, false))
        .collect();
    assert_eq!(
        lines,
        [
            "at 3.2 s: the link was lost and made again after 4.8 s: connection reset",
            "at 9.0 s: nothing got through to the other host for 5.0 s",
            "at 20.0 s: the switchover was called off",
            "at 21.0 s: something else",
            "at 23.9 s: the link is lost: connection reset",
        ]
    );
    assert_eq!(
        event_line(&moving.events[4], true),
        "at 23.9 s: the link to the other host ended, and was not made again: connection reset"
    );
    assert_eq!(trouble(&moving).unwrap(), "link lost 3 s ago, remaking");
    assert!(headline(&moving).ends_with("precopy, link lost 3 s ago, remaking"));
}

#[test]
fn the_pass_under_way_has_a_row_of_its_own() {
    let pass =
        json!({"number": 1, "pages_sent": 100, "zero_pages": 7, "bytes": 410_000, "seconds": 0.5});
    let moving = report(json!({ "outcome": null, "phase": "precopy", "pass": pass }));
    let rows = iteration_rows(&moving);
    assert_eq!(rows.len(), 1);
    assert_eq!(
        rows[0],
        [
            "1",
            "100",
            "7",
            "0.4 MiB",
            "0.50 s",
            "820 kB/s",
            "(under way)"
        ]
    );
}

#[test]
fn a_move_in_doubt_offers_no_command_without_its_condition() {
    let doubt = report(json!({ "outcome": "in-doubt", "phase": "handover" }));
    let text = headline(&doubt);
    assert!(text.contains("until a and b reach each other"), "{text}");
    assert!(text.contains("powered off"), "{text}");
}

#[test]
fn a_pass_that_sent_nothing_was_limited_by_nothing() {
    let moved = report(json!({ "iterations": [
        {"pages_sent": 333, "zero_pages": 0, "bytes": 1_367_500, "seconds": 0.01, "limited_by": "link"},
        {"pages_sent": 0, "zero_pages": 0, "bytes": 0, "seconds": 0.001, "limited_by": "link"},
        {"pages_sent": 6, "zero_pages": 0, "bytes": 24_576, "seconds": 1e-7, "limited_by": "link"}
    ]}));
    let rows = iteration_rows(&moved);
    assert_eq!(rows[0][5..], ["136.8 MB/s", "link"], "{rows:?}");
    assert_eq!(rows[1][5..], ["-", "-"], "{rows:?}");
    assert_eq!(
        rows[2][5..],
        ["-", "link"],
        "over at once, it tells of no rate"
    );
}
