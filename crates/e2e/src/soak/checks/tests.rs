//! Rounds made up by hand: which are allowed, and which are not.

use super::*;
use crate::soak::meter::Meter;
use std::ops::Range;

const MS: u64 = 1_000_000;

/// A QEMU whose only vCPU ran in these windows of 15 ms, half of the time.
fn trace(pid: i32, host: &str, incoming: bool, windows: impl IntoIterator<Item = u64>) -> Trace {
    let window = |number: u64| Window {
        from: number * 15 * MS,
        to: (number + 1) * 15 * MS,
        ran_ns: 7 * MS,
    };
    let windows: Vec<Window> = windows.into_iter().map(window).collect();
    Trace {
        vm: "vm".into(),
        host: host.into(),
        pid,
        incoming,
        began: windows.first().map_or(0, |window| window.from),
        gone: None,
        vcpus: 1,
        windows,
        passes: Vec::new(),
    }
}

/// A QEMU whose only vCPU was looked at every 15 ms within these ms; `used_us` is what it had used by then.
fn looked_at(pid: i32, host: &str, ms: Range<u64>, used_us: impl Fn(u64) -> u64) -> Trace {
    let mut meter = Meter::new(ms.start * MS);
    let looks = ms.step_by(15);
    let windows = looks.filter_map(|now| meter.look(now * MS, used_us(now) * 1000));
    Trace {
        windows: windows.collect(),
        ..trace(pid, host, true, [])
    }
}

fn excuse(at: u64, until: Option<u64>, whose: Whose) -> Excuse {
    Excuse {
        at,
        until,
        whose,
        why: "test",
    }
}

#[test]
fn two_that_run_in_the_same_windows_are_found() {
    let traces = [trace(1, "a", false, 0..40), trace(2, "b", false, 20..60)];
    let found = doublings(&traces);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].kind, Kind::Doubled);
    assert!(
        found[0].what.contains("QEMU 1 on a and QEMU 2 on b"),
        "{}",
        found[0]
    );
}

#[test]
fn one_that_runs_again_after_another_did_is_found() {
    let turns = (0..10).chain(30..40);
    let traces = [trace(1, "a", false, turns), trace(2, "b", true, 15..20)];
    assert_eq!(doublings(&traces).len(), 1);
}

#[test]
fn what_a_false_word_doubled_is_explained_and_not_to_see_it_is_a_violation() {
    let set = |names: &[&str]| -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    };
    let traces = [trace(1, "a", false, 0..40), trace(2, "b", false, 20..60)];
    let found = || doublings(&traces);
    assert_eq!(unexplained(found(), &set(&["vm"]), &set(&["vm"])), []);
    let left = unexplained(found(), &set(&["another"]), &set(&[]));
    assert_eq!(left, found());
    let blind = unexplained(Vec::new(), &set(&["vm"]), &set(&["vm"]));
    assert_eq!(blind[0].kind, Kind::Blind);
    assert_eq!(unexplained(Vec::new(), &set(&["vm"]), &set(&[])), []);
}

#[test]
fn a_handover_within_one_window_is_no_doubling() {
    let traces = [trace(1, "a", false, 0..21), trace(2, "b", true, 20..60)];
    assert_eq!(doublings(&traces), []);
    let mut long = [trace(1, "a", false, [0]), trace(2, "b", true, [0])];
    // The sampler did not get to look for 200 ms: each ran for 90.
    for trace in &mut long {
        trace.windows[0].to = 200 * MS;
        trace.windows[0].ran_ns = 90 * MS;
    }
    assert_eq!(doublings(&long), []);
}

/// What the vCPU of a QEMU has used that waits from 1 s on, loads a guest's state at 3 s, and runs it from `runs` on.
fn received(runs: u64) -> impl Fn(u64) -> u64 {
    move |now| match now {
        ..1060 => (now - 1000) * 5000 / 60,
        1060..3000 => 5000,
        3000..3060 => 5000 + (now - 3000) * 5000 / 60,
        _ => 10_000 + now.saturating_sub(runs) * 900,
    }
}

#[test]
fn what_a_qemu_uses_that_waits_on_a_loaded_machine_is_no_doubling() {
    let source = |until: u64| looked_at(1, "a", 0..9000, move |now| now.min(until) * 900);
    let moved = [source(4000), looked_at(2, "b", 1000..9000, received(4000))];
    assert_eq!(doublings(&moved), []);
    let stayed = [source(9000), looked_at(2, "b", 1000..9000, received(9000))];
    assert_eq!(doublings(&stayed), []);
    // One that runs for 25 ms though its source runs on is found.
    let ended = |now: u64| received(4000)(now.min(4028));
    let doubled = [source(9000), looked_at(2, "b", 1000..9000, ended)];
    assert_eq!(doublings(&doubled).len(), 1);
}

#[test]
fn guests_that_have_a_hundredth_of_a_cpu_run_and_run_twice() {
    let starved = |pid, host, from| looked_at(pid, host, from..60_000, |now| (now - from) * 10);
    let traces = [starved(1, "a", 0), starved(2, "b", 5000)];
    assert_eq!(doublings(&traces).len(), 1);
    for trace in &traces {
        assert!(trace.runs(60_000 * MS), "{trace:?}");
        assert!(!trace.runs(70_000 * MS), "it ended");
    }
}

#[test]
fn more_cpu_time_in_a_window_than_one_after_the_other_gives_is_a_doubling() {
    let mut long = [trace(1, "a", false, [0]), trace(2, "b", true, [0])];
    for trace in &mut long {
        trace.windows[0].to = 200 * MS;
        trace.windows[0].ran_ns = 150 * MS;
    }
    assert_eq!(doublings(&long).len(), 1);
    long[1].vm = "another".into();
    assert_eq!(doublings(&long), []);
}

#[test]
fn a_boot_is_a_loss_unless_the_round_explains_it() {
    let traces = [trace(1, "a", false, 0..10), trace(2, "b", false, 20..30)];
    let excuse = |at, whose| excuse(at, None, whose);
    let lost = |excuses: &[Excuse]| losses(&traces, excuses, 1).len();
    assert_eq!(lost(&[]), 1);
    assert_eq!(lost(&[excuse(5, Whose::Qemu(1))]), 0);
    assert_eq!(lost(&[excuse(5, Whose::Host("a".into()))]), 0);
    assert_eq!(lost(&[excuse(5, Whose::Vm("vm".into()))]), 0);
    assert_eq!(lost(&[excuse(5, Whose::Qemu(2))]), 1);
    assert_eq!(lost(&[excuse(5, Whose::Host("b".into()))]), 1);
    assert_eq!(
        lost(&[excuse(900 * MS, Whose::Qemu(1))]),
        1,
        "the reason came after the boot"
    );
    assert_eq!(boots(&traces, 1), 1);
}

#[test]
fn a_move_and_a_first_boot_are_no_losses() {
    let moved = [trace(1, "a", false, 0..10), trace(2, "b", true, 10..30)];
    assert_eq!(losses(&moved, &[], 1), []);
    let mut idle = trace(1, "a", false, []);
    idle.gone = Some(MS);
    assert_eq!(losses(&[idle, trace(2, "b", false, 20..30)], &[], 1), []);
}

#[test]
fn passes_that_go_back_are_a_loss() {
    let mut one = trace(1, "a", true, 10..30);
    one.passes = vec![(20 * MS, 9), (200 * MS, 7), (300 * MS, 8)];
    assert_eq!(
        losses(&[one.clone()], &[], 1),
        [],
        "before the guest ran there"
    );
    one.passes.push((400 * MS, 6));
    assert_eq!(losses(&[one], &[], 1).len(), 1);
}

#[test]
fn a_list_that_calls_a_running_vm_stopped_is_wrong() {
    let second = 67;
    let traces = [trace(1, "a", false, 0..20 * second)];
    let line = |state: &str, asked: u64| Shown {
        asked: asked * 1000 * MS,
        answered: asked * 1000 * MS + MS,
        vm: "vm".into(),
        state: state.into(),
    };
    let wrong = |lines: &[Shown]| wrong_lists(lines, &traces).len();
    assert_eq!(wrong(&[line("stopped", 10), line("stopped", 11)]), 1);
    assert_eq!(wrong(&[line("unreachable", 10)]), 0);
    assert_eq!(wrong(&[line("stopped", 3)]), 0, "it began a moment ago");
    assert_eq!(wrong(&[line("stopped", 21)]), 0, "it had ended");
}

/// A guest that ended at `gone`, and that another QEMU booted anew at 20 s.
fn booted_anew(gone: u64) -> [Trace; 2] {
    let mut old = trace(1, "a", false, 600..gone / 15 / MS);
    old.gone = Some(gone);
    [old, trace(2, "a", false, 1333..1340)]
}

#[test]
fn a_reason_does_not_explain_what_had_ended_before_it() {
    let lost = |excuse: Excuse| losses(&booted_anew(12_000 * MS), &[excuse], 1).len();
    for whose in [
        Whose::Host("a".into()),
        Whose::Qemu(1),
        Whose::Vm("vm".into()),
    ] {
        let after = excuse(13_000 * MS, Some(13_100 * MS), whose.clone());
        assert_eq!(lost(after), 1, "{whose:?}");
        let open = excuse(13_000 * MS, None, whose.clone());
        assert_eq!(lost(open), 1, "{whose:?}");
        let before = excuse(11_900 * MS, Some(11_990 * MS), whose);
        assert_eq!(lost(before), 0);
    }
}

#[test]
fn a_reason_that_is_over_does_not_explain_what_ends_later() {
    let host = || Whose::Host("a".into());
    let lost = |excuse: Excuse| losses(&booted_anew(18_000 * MS), &[excuse], 1).len();
    // The guest booted after a power cut, then ended by itself, and was booted once more.
    assert_eq!(lost(excuse(9_000 * MS, Some(9_100 * MS), host())), 1);
    assert_eq!(lost(excuse(9_000 * MS, Some(17_000 * MS), host())), 0);
    assert_eq!(
        lost(excuse(9_000 * MS, None, host())),
        0,
        "nobody knows when it was done"
    );
}

#[test]
fn a_guest_that_ended_as_the_round_ended_is_known_in_the_next() {
    let mut old = trace(1, "a", false, 0..10);
    old.gone = Some(150 * MS);
    let mut idle = trace(3, "b", true, []);
    idle.gone = Some(160 * MS);
    let kept = last_of_each(&[old.clone(), idle], &[]);
    assert_eq!(kept, [old.clone()]);
    let next = trace(2, "a", false, 20..30);
    let traces = [kept[0].clone(), next.clone()];
    assert_eq!(losses(&traces, &[], 200 * MS).len(), 1);
    assert_eq!(last_of_each(&[old], &[next]), [], "it runs since");
}

#[test]
fn a_guest_that_ended_and_that_nothing_runs_is_lost() {
    let mut one = trace(1, "a", false, 0..10);
    assert_eq!(losses(&[one.clone()], &[], 1), []);
    one.gone = Some(150 * MS);
    assert_eq!(losses(&[one.clone()], &[], 1).len(), 1);
    let power = excuse(140 * MS, Some(145 * MS), Whose::Host("a".into()));
    assert_eq!(losses(&[one.clone()], &[power], 1), []);
    assert_eq!(
        losses(&[one, trace(2, "b", true, 10..30)], &[], 1),
        [],
        "it moved"
    );
}

#[test]
fn a_guest_that_runs_on_after_it_was_called_off_is_found() {
    let promise = Ended {
        vm: "vm".into(),
        asked: 5_000 * MS,
        answered: 5_500 * MS,
    };
    let found = |traces: &[Trace]| not_ended(traces, std::slice::from_ref(&promise)).len();
    assert_eq!(found(&[trace(1, "a", false, 0..700)]), 1);
    assert_eq!(found(&[trace(1, "a", false, 0..360)]), 0);
    let anew = trace(2, "a", false, 400..700);
    assert_eq!(found(&[trace(1, "a", false, 0..360), anew]), 0);
}
