//! Ten thousand worlds, and that a world is the same each time.

use godwit_sim::{Coverage, Fault, Options, run_seed};

/// How many seeds every test run goes through.
const SEEDS: u64 = 10_000;

#[test]
fn ten_thousand_seeds_keep_every_invariant() {
    let mut coverage = Coverage::default();
    for seed in 0..SEEDS {
        let outcome = run_seed(seed, Options::default());
        if let Some(what) = outcome.violation {
            panic!("seed {seed}: {what}\nreplay: godwit-sim --seed {seed} --trace");
        }
        coverage.add(&outcome.coverage);
    }
    for fault in Fault::ALL {
        let times = coverage.faults.get(fault).copied().unwrap_or(0);
        assert!(times >= 30, "'{}' struck only {times} times", fault.name());
    }
    let [begun, completed, refused, failed] = coverage.migrations;
    assert!(completed > SEEDS, "{completed} of {begun} completed");
    assert!(
        refused > 100 && failed > SEEDS,
        "{refused} refused, {failed} failed"
    );
    println!(
        "{SEEDS} seeds, {} steps, {} pairs of state and event, {completed} migrations completed",
        coverage.steps,
        coverage.pairs.len()
    );
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..200 {
        let options = Options {
            trace: true,
            ..Options::default()
        };
        let (first, second) = (run_seed(seed, options), run_seed(seed, options));
        assert_eq!(first.fingerprint, second.fingerprint, "seed {seed}");
        assert_eq!(first.trace, second.trace, "seed {seed}");
        let quiet = run_seed(seed, Options::default());
        assert_eq!(
            quiet.fingerprint, first.fingerprint,
            "tracing changes seed {seed}"
        );
    }
}

#[test]
fn different_seeds_are_different_runs() {
    let prints: std::collections::BTreeSet<_> = (0..100)
        .map(|seed| run_seed(seed, Options::default()).fingerprint)
        .collect();
    assert_eq!(prints.len(), 100);
}
