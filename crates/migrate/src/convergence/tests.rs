//! Decisions on given facts, and whole migrations of simulated guests.

use super::simulation::{End, PAGE, Pattern, Vcpu, World, migrate};
use super::*;

const GB: u64 = 1_000_000_000;
const GOAL: Goal = Goal {
    max_downtime_s: 0.05,
    fixed_s: 0.015,
    deadline_s: None,
};

fn facts(data_bytes: u64, dirty_bytes: u64) -> IterationFacts {
    IterationFacts {
        data_bytes,
        seconds: data_bytes as f64 / GB as f64,
        dirty_bytes,
        rtt_s: 0.0005,
        elapsed_s: 1.0,
        slowing: Slowing::Least,
    }
}

const FREE: Decision = Decision::Iterate {
    allowed_bytes_per_s: None,
};

#[test]
fn a_quiet_guest_switches_over_after_the_first_pass() {
    let mut history = Convergence::new(GOAL);
    assert_eq!(history.decide(facts(GB, 1 << 20)), Decision::Switchover);
}

#[test]
fn a_guest_that_dirties_half_of_what_is_sent_is_not_limited() {
    let mut history = Convergence::new(GOAL);
    assert_eq!(history.decide(facts(GB, GB / 2)), FREE);
    assert_eq!(history.decide(facts(GB / 2, GB / 4)), FREE);
}

#[test]
fn what_fits_is_sent_once_more_when_that_makes_the_pause_shorter() {
    let mut history = Convergence::new(GOAL);
    assert_eq!(history.decide(facts(GB, GB / 50)), FREE);
    assert_eq!(
        history.decide(facts(GB / 50, GB / 1000)),
        Decision::Switchover
    );
}

#[test]
fn a_guest_that_dirties_all_that_is_sent_gets_an_allowance_below_the_link() {
    let mut history = Convergence::new(GOAL);
    let Decision::Iterate {
        allowed_bytes_per_s: Some(allowed),
    } = history.decide(facts(GB, GB))
    else {
        panic!("no allowance");
    };
    assert!((0.76..0.81).contains(&(allowed / GB as f64)), "{allowed}");
    history.released();
    assert_eq!(history.decide(facts(GB, GB / 2)), FREE);
}

#[test]
fn a_larger_promise_ends_earlier() {
    let fits = |max_downtime_s| {
        let mut history = Convergence::new(Goal {
            max_downtime_s,
            ..GOAL
        });
        let mut dirty = GB;
        (1..).find(|_| {
            let facts = facts(dirty, dirty * 9 / 10);
            dirty = facts.dirty_bytes;
            history.decide(facts) == Decision::Switchover
        })
    };
    assert!(
        fits(2.0) < fits(0.3) && fits(0.3) < fits(0.05),
        "{:?} {:?} {:?}",
        fits(2.0),
        fits(0.3),
        fits(0.05)
    );
}

#[test]
fn a_guest_that_cannot_be_slowed_enough_is_given_up_within_seconds() {
    let mut history = Convergence::new(GOAL);
    let mut elapsed_s = 0.0;
    let rounds = (1..TUNING.iterations_max).find(|_| {
        elapsed_s += 1.0;
        let facts = IterationFacts {
            elapsed_s,
            ..facts(GB, GB)
        };
        history.decide(facts) == Decision::GiveUp
    });
    assert!(rounds.is_some_and(|rounds| rounds <= 10), "{rounds:?}");
}

#[test]
fn a_round_trip_longer_than_the_promise_does_not_forbid_the_switchover() {
    let mut history = Convergence::new(GOAL);
    let far = IterationFacts {
        rtt_s: 0.15,
        ..facts(GB, 1 << 20)
    };
    assert_eq!(history.decide(far), Decision::Switchover);
}

#[test]
fn pages_that_are_little_beside_the_round_trip_are_not_waited_for_over_a_long_link() {
    let one = |rtt_s| IterationFacts {
        seconds: 10.0,
        rtt_s,
        ..facts(GB, 2_900_000)
    };
    // 29 ms of pages.
    let decide = |rtt_s| Convergence::new(GOAL).decide(one(rtt_s));
    assert_eq!(decide(0.15), Decision::Switchover);
    assert_ne!(decide(0.05), Decision::Switchover);
    assert_ne!(decide(0.0005), Decision::Switchover);
}

/// What is decided in the end of a guest that writes so much in each pass, where no pass is enough to tell the link's speed.
fn end_of_passes(rtt_s: f64, (dirty_bytes, seconds): (u64, f64)) -> Option<Decision> {
    let mut history = Convergence::new(GOAL);
    (0..1000).find_map(|round| {
        let decision = history.decide(IterationFacts {
            data_bytes: if round == 0 { 311_296 } else { dirty_bytes },
            seconds: if round == 0 { 0.22 } else { seconds },
            dirty_bytes,
            rtt_s,
            elapsed_s: f64::from(round) * seconds,
            slowing: Slowing::Least,
        });
        (!matches!(decision, Decision::Iterate { .. })).then_some(decision)
    })
}

#[test]
fn a_few_pages_of_a_small_guest_do_not_keep_it_from_moving_far() {
    let few = (12 * PAGE, 0.06);
    assert_eq!(end_of_passes(0.04, few), Some(Decision::Switchover));
    // Many do, and near by nothing but the pages is in the way.
    for (rtt_s, pages) in [(0.04, (1200 * PAGE, 1.2)), (0.0005, (120 * PAGE, 0.3))] {
        assert_eq!(end_of_passes(rtt_s, pages), Some(Decision::GiveUp));
    }
}

#[test]
fn a_first_pass_without_data_predicts_nothing() {
    let mut history = Convergence::new(GOAL);
    assert_eq!(history.decide(facts(0, GB)), FREE);
    assert_eq!(history.decide(facts(0, 1 << 20)), Decision::Switchover);
}

#[test]
fn a_tiny_pass_does_not_spoil_the_speed() {
    let mut history = Convergence::new(GOAL);
    history.decide(facts(GB, GB));
    history.decide(IterationFacts {
        seconds: 1.0,
        ..facts(4096, GB)
    });
    assert!(
        history
            .bytes_per_s()
            .is_some_and(|speed| speed > 0.9 * GB as f64)
    );
}

/// A busy machine, or a link that stood still: 24 MiB in 4 s, and then in 25 ms each time.
#[test]
fn a_link_that_stood_still_in_the_first_pass_is_not_taken_for_slow() {
    const SMALL: u64 = 24 << 20;
    let mut history = Convergence::new(GOAL);
    let pass = |seconds| IterationFacts {
        seconds,
        ..facts(SMALL, SMALL)
    };
    history.decide(pass(4.0));
    let slow = history.bytes_per_s();
    for _ in 0..8 {
        history.decide(pass(0.025));
    }
    let real = SMALL as f64 / 0.025;
    let believed = history.bytes_per_s().map(|speed| speed / real);
    assert!(
        believed.is_some_and(|share| (0.6..1.0).contains(&share)),
        "{slow:?}, then {believed:?} of what it is"
    );
}

// ---- whole migrations ----

/// 128 MiB over a link that takes 4 s for it.
fn world(vcpus: Vec<Vcpu>) -> World {
    World {
        pages: 32_768,
        link_bytes_per_s: (8192 * PAGE) as f64,
        rtt_s: 0.0005,
        overhead_s: 0.004,
        jitter_s: 0.0,
        floor: 0.05,
        heard: 1.0,
        noise: 0.05,
        vcpus,
    }
}

/// One that dirties so many times what the link carries.
fn writer(pattern: Pattern, links: f64) -> Vcpu {
    Vcpu {
        pattern,
        writes_per_s: links * 8192.0,
        phases_s: None,
    }
}

fn reader() -> Vcpu {
    writer(Pattern::Loop(8), 0.01)
}

fn goal(max_downtime_s: f64, deadline_s: Option<f64>) -> Goal {
    Goal {
        max_downtime_s,
        fixed_s: 0.012,
        deadline_s,
    }
}

fn check(name: &str, end: &End, goal: Goal) {
    println!("{name}: {end:?}");
    assert!(end.completed, "{name}: {end:?}");
    assert!(
        end.pause_s <= goal.max_downtime_s,
        "{name}: a promise of {} s was broken: {end:?}",
        goal.max_downtime_s
    );
}

#[test]
fn twice_the_link_converges_in_four_passes_and_writes_at_seven_tenths_of_it() {
    for pattern in [Pattern::Loop(32_768), Pattern::Uniform(32_768)] {
        let world = world(vec![writer(pattern, 2.0)]);
        let goal = goal(0.3, None);
        let end = migrate(&world, goal);
        check("2 x link", &end, goal);
        assert!(end.elapsed_s < 6.0 * 4.0, "{end:?}");
        let written = end.dirty_bytes_per_s / world.link_bytes_per_s;
        assert!(written >= 0.68, "{written}");
    }
}

/// 64 MiB over 100 Mbit/s: the last passes hold few pages, so that much of their time is round trips and lateness.
fn small_link(links: f64, pattern: fn(u64) -> Pattern) -> World {
    let mut world = world(vec![writer(pattern(16_384), links)]);
    world.pages = 16_384;
    world.link_bytes_per_s = 100e6 / 8.0;
    world.vcpus[0].writes_per_s = links * world.link_bytes_per_s / PAGE as f64;
    (world.jitter_s, world.noise) = (0.03, 0.1);
    world
}

#[test]
fn guests_at_one_to_ten_times_a_small_and_late_link_converge() {
    for links in [1.0, 2.0, 2.85, 5.0, 10.0] {
        for pattern in [Pattern::Loop, Pattern::Uniform, Pattern::Skewed] {
            for rtt_s in [0.0005, 0.02] {
                let mut world = small_link(links, pattern);
                world.rtt_s = rtt_s;
                let goal = goal(0.3, None);
                let end = migrate(&world, goal);
                let name = format!("{links} x a small link, round trip {rtt_s} s");
                check(&name, &end, goal);
                let written = end.dirty_bytes_per_s / world.link_bytes_per_s;
                println!("  {written:.2} of the link in {:.1} s", end.elapsed_s);
            }
        }
    }
}

#[test]
fn a_deadline_is_kept_at_any_rate_that_the_floor_allows_for() {
    for links in [1.0, 2.0, 2.85, 5.0] {
        let world = small_link(links, Pattern::Loop);
        let once_s = (world.pages * PAGE) as f64 / world.link_bytes_per_s;
        for times in [2.5, 3.0, 5.0] {
            let goal = goal(0.3, Some(times * once_s));
            let end = migrate(&world, goal);
            let name = format!("{links} x the link, {times} x the time of one pass");
            check(&name, &end, goal);
            assert!(
                end.elapsed_s + end.pause_s <= times * once_s,
                "{name}: {end:?}"
            );
        }
    }
}

#[test]
fn a_reader_beside_a_writer_at_twice_the_link_is_not_slowed() {
    let world = world(vec![writer(Pattern::Loop(16_384), 2.0), reader()]);
    let goal = goal(0.3, None);
    let end = migrate(&world, goal);
    check("reader and writer", &end, goal);
    assert!(end.speeds[1] > 0.97, "{end:?}");
}

#[test]
fn a_guest_that_converges_by_itself_is_never_slowed() {
    for links in [0.0, 0.1, 0.5, 0.65] {
        let world = world(vec![writer(Pattern::Uniform(32_768), links)]);
        let goal = goal(0.05, None);
        let end = migrate(&world, goal);
        check("slow writer", &end, goal);
        assert!(end.speeds[0] > 0.95, "{links} links: {end:?}");
    }
}

#[test]
fn a_small_hot_set_is_sent_in_the_pause_and_not_slowed() {
    let world = world(vec![writer(Pattern::Uniform(128), 8.0)]);
    let goal = goal(0.05, None);
    let end = migrate(&world, goal);
    check("small hot set", &end, goal);
    assert!(end.speeds[0] > 0.8 && end.iterations <= 4, "{end:?}");
}

#[test]
fn a_skewed_guest_converges_within_the_promise() {
    for (links, max_downtime_s) in [(0.5, 0.1), (2.0, 0.1), (4.0, 0.3)] {
        let world = world(vec![writer(Pattern::Skewed(32_768), links)]);
        let goal = goal(max_downtime_s, None);
        check("skewed", &migrate(&world, goal), goal);
    }
}

#[test]
fn a_guest_that_changes_its_ways_converges() {
    let phases = Vcpu {
        phases_s: Some((3.0, 5.0)),
        ..writer(Pattern::Uniform(32_768), 3.0)
    };
    let world = world(vec![phases]);
    let goal = goal(0.1, None);
    check("phases", &migrate(&world, goal), goal);
}

#[test]
fn four_writers_together_at_four_times_the_link_converge() {
    let writers = (0..4).map(|_| writer(Pattern::Loop(8192), 1.0)).collect();
    let world = world(writers);
    let goal = goal(0.3, None);
    check("four writers", &migrate(&world, goal), goal);
}

#[test]
fn a_deadline_is_kept_by_slowing_more() {
    let world = world(vec![writer(Pattern::Loop(32_768), 2.0)]);
    let relaxed = migrate(&world, goal(0.3, None));
    for deadline_s in [10.0, 12.0, 14.0] {
        let goal = goal(0.3, Some(deadline_s));
        let end = migrate(&world, goal);
        check("deadline", &end, goal);
        assert!(end.elapsed_s <= deadline_s, "{deadline_s} s: {end:?}");
        assert!(end.elapsed_s < relaxed.elapsed_s);
    }
}

#[test]
fn a_limit_on_slowing_is_kept_and_ends_in_a_clear_failure() {
    let mut world = world(vec![writer(Pattern::Loop(32_768), 4.0)]);
    world.floor = 0.8;
    let end = migrate(&world, goal(0.3, None));
    assert!(!end.completed, "{end:?}");
    assert!(end.speeds[0] >= 0.79, "{end:?}");
    assert!(end.elapsed_s < 60.0, "{end:?}");
}

/// It was given up at 43 % of its speed, although it might have been slowed to 5 %.
#[test]
fn a_guest_that_writes_more_than_is_heard_of_is_slowed_until_it_converges() {
    for heard in [0.7, 0.4, 0.2] {
        let mut world = world(vec![writer(Pattern::Loop(32_768), 2.0)]);
        world.heard = heard;
        let goal = goal(0.3, None);
        let end = migrate(&world, goal);
        check("heard of in part", &end, goal);
    }
}

#[test]
fn a_guest_whose_writes_nobody_hears_of_is_given_up_in_the_end() {
    let mut world = world(vec![writer(Pattern::Loop(32_768), 2.0)]);
    world.heard = 0.0;
    let end = migrate(&world, goal(0.3, None));
    assert!(!end.completed && end.elapsed_s < 60.0, "{end:?}");
}

#[test]
fn a_guest_that_may_not_be_slowed_is_given_up_as_soon_as_one_that_cannot_be() {
    let mut world = world(vec![writer(Pattern::Loop(32_768), 2.0)]);
    world.floor = 1.0;
    let end = migrate(&world, goal(0.3, None));
    assert!(!end.completed && end.iterations <= 8, "{end:?}");
}

#[test]
fn nobody_is_given_up_before_somebody_has_tried_to_slow_him() {
    let mut history = Convergence::new(GOAL);
    for elapsed_s in 1..60 {
        let facts = IterationFacts {
            elapsed_s: f64::from(elapsed_s),
            slowing: Slowing::NotYet,
            ..facts(GB, GB)
        };
        assert_ne!(history.decide(facts), Decision::GiveUp);
    }
}

#[test]
fn an_allowance_that_was_made_small_grows_again_when_it_is_kept() {
    let mut history = Convergence::new(GOAL);
    let mut allowed_after = |dirty_bytes, count| {
        let mut allowed = 0.0;
        for _ in 0..count {
            let elapsed_s = 20.0 * f64::from(history.iterations);
            let facts = IterationFacts {
                elapsed_s,
                slowing: Slowing::More,
                ..facts(10 * GB, dirty_bytes)
            };
            if let Decision::Iterate {
                allowed_bytes_per_s: Some(bytes_per_s),
            } = history.decide(facts)
            {
                allowed = bytes_per_s;
            }
        }
        allowed / GB as f64
    };
    let small = allowed_after(10 * GB, 8);
    let later = allowed_after(GB / 10, 8);
    assert!(small < 0.4 && later > 0.7, "{small}, then {later}");
}

#[test]
fn far_away_hosts_converge_too() {
    let mut world = world(vec![writer(Pattern::Loop(32_768), 2.0)]);
    world.rtt_s = 0.15;
    let goal = goal(0.6, None);
    check("far", &migrate(&world, goal), goal);
}

#[test]
fn the_estimate_at_a_tenth_of_the_way_is_within_a_tenth_for_a_steady_guest() {
    for (pattern, links) in [
        (Pattern::Uniform(32_768), 0.0),
        (Pattern::Uniform(32_768), 0.2),
        (Pattern::Uniform(32_768), 0.5),
        (Pattern::Loop(32_768), 0.5),
        (Pattern::Uniform(1024), 2.0),
    ] {
        let world = world(vec![writer(pattern, links)]);
        let end = migrate(&world, goal(0.3, None));
        let at = end
            .estimates
            .iter()
            .find(|(at_s, _)| *at_s >= 0.1 * end.elapsed_s)
            .copied();
        let (at_s, estimate_s) = at.expect("an estimate");
        let truth_s = end.elapsed_s + end.pause_s - at_s;
        let wrong = (estimate_s / truth_s - 1.0).abs();
        println!("{pattern:?} {links}: {estimate_s:.2} s, in truth {truth_s:.2} s");
        assert!(wrong < 0.10, "{pattern:?} at {links} links: {wrong}");
    }
}

/// Many guests at random: whatever they do, the promise holds or the migration says that it cannot.
#[test]
fn no_guest_is_ever_stopped_for_longer_than_promised() {
    let mut seed = 7_u64;
    let mut random = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for round in 0..60 {
        let vcpus = (0..=random(3))
            .map(|_| {
                let pages = 64 << random(8);
                let pattern = match random(3) {
                    0 => Pattern::Loop(pages),
                    1 => Pattern::Uniform(pages),
                    _ => Pattern::Skewed(pages),
                };
                let phases_s = (random(3) == 0).then(|| {
                    (
                        0.1 + random(20) as f64 / 10.0,
                        0.1 + random(20) as f64 / 10.0,
                    )
                });
                Vcpu {
                    pattern,
                    writes_per_s: 82.0 * random(400) as f64,
                    phases_s,
                }
            })
            .collect();
        let mut world = world(vcpus);
        world.pages = 16_384;
        world.rtt_s = [0.0005, 0.005, 0.02][random(3) as usize];
        let goal = goal([0.1, 0.3, 1.0][random(3) as usize], None);
        let end = migrate(&world, goal);
        assert!(
            !end.completed || end.pause_s <= goal.max_downtime_s,
            "round {round}, {:?}, {goal:?}: {end:?}",
            world.vcpus
        );
        assert!(end.completed, "round {round}, {:?}: {end:?}", world.vcpus);
    }
}

#[test]
fn an_allowance_that_leads_nowhere_becomes_smaller() {
    let mut history = Convergence::new(GOAL);
    let mut allowed = Vec::new();
    for _ in 0..120 {
        if let Decision::Iterate {
            allowed_bytes_per_s: Some(bytes_per_s),
        } = history.decide(facts(GB, GB))
        {
            allowed.push(bytes_per_s);
        }
    }
    let (early, late) = (allowed[30], allowed[allowed.len() - 1]);
    assert!(late < early / 10.0, "{early} {late}");
}
