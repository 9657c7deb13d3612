//! The figures of a migration while it moves.

use super::*;
use godwit_types::migration::{LimitedBy, Outcome, Side};

fn begun() -> MigrationReport {
    let json = serde_json::json!({
        "id": "m", "vm": "web", "from": "a", "to": "b", "outcome": null, "phase": "precopy", "side": Side::Source,
        "encryption": "none", "streams": 2, "total_s": 1.0, "switchover_ms": 0.0,
        "switchover_parts_ms": {"stop_ms": 0.0, "last_pages_ms": 0.0, "device_save_ms": 0.0,
            "device_load_ms": 0.0, "permit_ms": 0.0, "resume_ms": 0.0},
        "iterations": [], "bytes_on_wire": 0, "throughput_gb_per_s": 0.0, "cpu_source_s": 0.0,
        "cpu_destination_s": 0.0, "dirty_mib_per_s": 0.0, "promise": {"max_downtime_ms": 50, "kept": false},
        "ram_mib": 1024, "remaining_bytes": 0, "guest_speed_percent": 100, "began_unix_s": 0
    });
    serde_json::from_value(json).unwrap()
}

fn counters(pages: u64, zero_pages: u64) -> Counters {
    Counters {
        bytes: pages * 4100,
        pages,
        zero_pages,
    }
}

fn pass(pages_sent: u64, seconds: f64) -> IterationReport {
    IterationReport {
        pages_sent,
        zero_pages: 0,
        bytes: pages_sent * 4100,
        seconds,
        limited_by: LimitedBy::Link,
    }
}

#[test]
fn a_move_in_its_first_pass_does_not_say_0_mib_and_0_gb_per_s() {
    let (mut ledger, mut report) = (Ledger::default(), begun());
    ledger.begin_pass(1.0, Counters::default());
    for tick in 0..20_u64 {
        ledger.show(
            &mut report,
            1.0 + tick as f64 * 0.1,
            counters(tick * 100, 0),
        );
    }
    assert_eq!(report.bytes_on_wire, 1900 * 4100);
    assert!(
        (report.wire_bytes_per_s / 4.1e6 - 1.0).abs() < 0.01,
        "{report:?}"
    );
    assert!(report.throughput_gb_per_s > 0.004, "{report:?}");
    let under_way = report.pass.unwrap();
    assert_eq!((under_way.number, under_way.pages_sent), (1, 1900));
    assert_eq!(report.pass_number(), 1);
}

#[test]
fn a_cancelled_move_keeps_the_bytes_of_the_pass_that_was_cut_short() {
    let (mut ledger, mut report) = (Ledger::default(), begun());
    ledger.begin_pass(0.0, Counters::default());
    ledger.show(&mut report, 8.0, counters(1000, 5));
    report.close(Outcome::Cancelled, Some("cancelled".into()), 8);
    assert_eq!(report.bytes_on_wire, 1000 * 4100);
    assert_eq!(report.pass.unwrap().zero_pages, 5);
    assert!((average_wire_rate(&report) - 1000.0 * 4100.0 / 8.0).abs() < 1e-6);
}

#[test]
fn the_pass_under_way_is_counted_from_the_second_on() {
    let (mut ledger, mut report) = (Ledger::default(), begun());
    ledger.begin_pass(0.0, Counters::default());
    ledger.book(&mut report, pass(1000, 2.0));
    assert_eq!((report.pass, report.pass_number()), (None, 1));
    ledger.begin_pass(2.0, counters(1000, 0));
    ledger.show(&mut report, 2.5, counters(1100, 0));
    assert_eq!(report.pass_number(), 2);
    assert_eq!(report.pass.unwrap().pages_sent, 100);
    // 1100 pages in 2.5 s.
    let expected = 1100.0 * 4096.0 / 2.5 / 1e9;
    assert!((report.throughput_gb_per_s - expected).abs() < 1e-9);
}

#[test]
fn an_idle_guest_did_not_dirty_71_mib_per_s_because_the_last_pass_took_1_ms() {
    let (mut ledger, mut report) = (Ledger::default(), begun());
    ledger.scanned(9.999, 1 << 20);
    ledger.scanned(0.001, 73_000);
    ledger.book(&mut report, pass(10, 10.0));
    assert!((0.1..0.11).contains(&report.dirty_mib_per_s), "{report:?}");
    // A look in the middle of a pass counts, until the pass is looked at whole.
    ledger.looked(10.0, 19 << 20);
    ledger.show(&mut report, 20.0, counters(10, 0));
    assert!((1.0..1.01).contains(&report.dirty_mib_per_s), "{report:?}");
    ledger.scanned(10.0, 9 << 20);
    ledger.show(&mut report, 20.0, counters(10, 0));
    assert!((0.5..0.51).contains(&report.dirty_mib_per_s), "{report:?}");
}

#[test]
fn done_starts_near_0_for_a_guest_whose_memory_is_mostly_empty() {
    // 82 of 344 MiB of a guest of 1 GiB were sent: 24 %, not 77 %.
    let (ledger, mut report) = (Ledger::default(), begun());
    let to_do = |left_mib: u64| ToDo {
        left_bytes: left_mib << 20,
        eta_s: None,
    };
    ledger.show_done(&mut report, counters(0, 0), to_do(344));
    assert_eq!(report.done_percent, 0.0);
    ledger.show_done(&mut report, counters(82 * 256, 0), to_do(344 - 82));
    assert!((23.0..25.0).contains(&report.done_percent), "{report:?}");
}

#[test]
fn done_never_falls_back_and_ends_at_100() {
    let (ledger, mut report) = (Ledger::default(), begun());
    let to_do = |left_bytes| ToDo {
        left_bytes,
        eta_s: None,
    };
    ledger.show_done(&mut report, counters(1000, 0), to_do(0));
    assert!(report.done_percent < 100.0, "not before it has completed");
    let before = report.done_percent;
    // The link was lost: all is to be sent again.
    ledger.show_done(&mut report, counters(1000, 0), to_do(1000 * PAGE_BYTES));
    assert_eq!(report.done_percent, before);
    report.close(Outcome::Completed, None, 9);
    assert_eq!(report.done_percent, 100.0);
}

#[test]
fn what_the_guest_will_write_meanwhile_is_still_to_go() {
    let (mut ledger, mut report) = (Ledger::default(), begun());
    ledger.begin_pass(0.0, Counters::default());
    ledger.show(&mut report, 10.0, counters(1000, 0));
    let to_do = ToDo {
        left_bytes: 1000 * PAGE_BYTES,
        eta_s: Some(30.0),
    };
    ledger.show_done(&mut report, counters(1000, 0), to_do);
    assert!((24.0..26.0).contains(&report.done_percent), "{report:?}");
}
