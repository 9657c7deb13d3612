//! How a VM comes to its boot, or stays where it is.

use super::*;
use crate::test_support::vm;

const CRASHED: Down = Down {
    generation: Generation(1),
    crashed: true,
    on_crash: OnCrash::Restart,
};

fn web(down: Down) -> BTreeMap<VmName, Down> {
    BTreeMap::from([(vm("web"), down)])
}

fn after(from: Instant, seconds: u64) -> Instant {
    from + Duration::from_secs(seconds)
}

/// Whether a QEMU that died at `now` is booted anew, which works.
fn dies(cases: &mut Cases, down: Down, now: Instant) -> bool {
    let (fresh, _) = cases.found(&web(down), now);
    if fresh.is_empty() {
        return false;
    }
    assert_eq!(cases.judged(&vm("web"), Judged::Boot), Some(Step::Boot));
    cases.booted(&vm("web"), now);
    true
}

#[test]
fn a_qemu_that_dies_again_and_again_is_left_after_five_restarts_until_a_person_starts_it() {
    let begin = Instant::now();
    let mut cases = Cases::default();
    let restarts = (0..9).filter(|minute| dies(&mut cases, CRASHED, after(begin, 60 * minute)));
    assert_eq!(restarts.count(), RESTARTS_MAX);
    // It stays so however long that lasts.
    assert!(!dies(&mut cases, CRASHED, after(begin, 6_000)));
    assert!(cases.open(after(begin, 6_000)).is_empty());
    cases.forget(&vm("web"));
    assert!(dies(&mut cases, CRASHED, after(begin, 6_001)));
}

#[test]
fn restarts_long_ago_do_not_count() {
    let begin = Instant::now();
    let mut cases = Cases::default();
    let each_hour = (0..20).filter(|hour| dies(&mut cases, CRASHED, after(begin, 3600 * hour)));
    assert_eq!(each_hour.count(), 20);
}

#[test]
fn a_vm_that_is_to_stay_crashed_is_booted_after_a_reboot_only() {
    let stay = Down {
        on_crash: OnCrash::Stay,
        ..CRASHED
    };
    assert!(!dies(&mut Cases::default(), stay, Instant::now()));
    let rebooted = Down {
        crashed: false,
        ..stay
    };
    assert!(dies(&mut Cases::default(), rebooted, Instant::now()));
}

#[test]
fn a_boot_that_fails_is_tried_again_more_and_more_slowly_for_ever() {
    let begin = Instant::now();
    let mut cases = Cases::default();
    cases.found(&web(CRASHED), begin);
    let (mut now, mut pauses) = (begin, Vec::new());
    for _ in 0..8 {
        assert_eq!(cases.judged(&vm("web"), Judged::Boot), Some(Step::Boot));
        cases.failed(&vm("web"), "no such bridge", now);
        let mut pause = 0;
        while cases.open(after(now, pause)).is_empty() {
            pause += 1;
        }
        pauses.push(pause);
        now = after(now, pause);
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
}

#[test]
fn what_is_being_booted_is_not_judged_again() {
    let now = Instant::now();
    let mut cases = Cases::default();
    cases.found(&web(CRASHED), now);
    assert_eq!(cases.judged(&vm("web"), Judged::Boot), Some(Step::Boot));
    assert_eq!(cases.judged(&vm("web"), Judged::Boot), None);
    // A look that still finds it dead, or running, changes nothing before the boot has ended.
    assert_eq!(cases.found(&web(CRASHED), now), (vec![], vec![]));
    assert_eq!(cases.found(&BTreeMap::new(), now), (vec![], vec![]));
    assert_eq!(cases.has_crashed(&vm("web")), Some(true));
}

#[test]
fn the_site_is_asked_each_two_seconds_while_something_waits_and_not_else() {
    let now = Instant::now();
    let mut cases = Cases::default();
    assert!(!cases.is_due(now));
    cases.found(&web(CRASHED), now);
    assert!(cases.is_due(now));
    cases.asked(now);
    assert!(!cases.is_due(after(now, 1)) && cases.is_due(after(now, 2)));
    cases.judged(&vm("web"), Judged::Never("it is elsewhere".into()));
    cases.asked(now);
    assert!(!cases.is_due(after(now, 3)) && cases.is_due(after(now, 4)));
    let (_, over) = cases.found(&BTreeMap::new(), now);
    assert_eq!(over, [vm("web")]);
    assert!(!cases.is_due(after(now, 100)));
}

fn shown(cases: &Cases, now: Instant) -> String {
    let mut vm: HostVm = serde_json::from_value(serde_json::json!({
        "spec": crate::test_support::spec("web"), "state": "crashed", "generation": 1, "claim": { "claim": "no" },
    }))
    .unwrap();
    let host = HostName::new("b").unwrap();
    cases.show(&mut vm, now, &host, "/run/web/vm-process.log");
    vm.note.unwrap()
}

#[test]
fn what_is_shown_of_a_vm_that_waits_names_its_host_wherever_it_is_read() {
    let begin = Instant::now();
    let mut cases = Cases::default();
    let asks = || {
        let why = "this host asks the controller; run 'godwit host boot-alone' here";
        Judged::Wait(why.into())
    };
    cases.found(&web(CRASHED), begin);
    assert_eq!(cases.judged(&vm("web"), asks()), None);
    let note = shown(&cases, begin);
    assert!(
        note.contains("'godwit host boot-alone' on host b"),
        "{note}"
    );
    assert!(
        !note.contains("here") && !note.contains("this host"),
        "{note}"
    );
}

#[test]
fn a_vm_that_stays_down_says_where_its_log_is() {
    let begin = Instant::now();
    let mut cases = Cases::default();
    let stays = Down {
        on_crash: OnCrash::Stay,
        ..CRASHED
    };
    cases.found(&web(stays), begin);
    let note = shown(&cases, begin);
    assert!(note.contains("/run/web/vm-process.log on host b"), "{note}");
}

/// Another host holds the VM and was silent for a moment when the controller was asked: the record gives way once the
/// controller has heard it, which is found out soon, not after 20 s.
#[test]
fn an_older_record_that_was_refused_a_boot_asks_again_soon_then_more_and_more_slowly() {
    let begin = Instant::now();
    let mut cases = Cases::default();
    cases.found(&web(CRASHED), begin);
    let (mut now, mut pauses) = (begin, Vec::new());
    for _ in 0..7 {
        cases.asked(now);
        let refused = cases.judged(&vm("web"), Judged::Never("it is elsewhere".into()));
        assert_eq!(refused, None);
        let mut pause = 0;
        while !cases.is_due(after(now, pause)) {
            pause += 1;
        }
        pauses.push(pause);
        now = after(now, pause);
    }
    assert_eq!(pauses, [2, 4, 8, 16, 20, 20, 20]);
    cases.asked(now);
    let yields = Judged::Yield("it is elsewhere".into());
    assert_eq!(cases.judged(&vm("web"), yields), Some(Step::GiveWay));
}
