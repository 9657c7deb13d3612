//! Whole sites: that a seed is the same run each time, and no other seed's; that seeds reach what becomes of disks, and see each
//! fault that is planted there.

use godwit_sim::site::{
    DiskPlant, SiteCoverage, SiteOptions, SiteOutcome, SitePlant, run_site_seed,
};
use std::collections::BTreeSet;

/// How many seeds are run again.
const SEEDS: u64 = 60;

/// Within so many seeds every case of disks is reached, and every fault of theirs seen.
const DISK_SEEDS: u64 = 10_000;

fn run(seed: u64, trace: bool) -> SiteOutcome {
    let options = SiteOptions {
        trace,
        ..SiteOptions::default()
    };
    run_site_seed(seed, options)
}

#[test]
fn the_same_seed_of_a_site_is_the_same_run() {
    let mut prints = BTreeSet::new();
    for seed in 0..SEEDS {
        let (first, second) = (run(seed, true), run(seed, true));
        assert!(!first.trace.is_empty(), "seed {seed} leaves no trace");
        assert_eq!(first.trace, second.trace, "seed {seed}");
        assert_eq!(first.fingerprint, second.fingerprint, "seed {seed}");
        assert_eq!(first.violation, second.violation, "seed {seed}");
        let quiet = run(seed, false);
        assert_eq!(
            quiet.fingerprint, first.fingerprint,
            "tracing changes seed {seed}"
        );
        prints.insert(first.fingerprint);
    }
    assert_eq!(prints.len() as u64, SEEDS, "two seeds are the same run");
}

#[test]
fn every_case_of_disks_is_reached_and_no_flush_is_lost() {
    let mut coverage = SiteCoverage::default();
    for seed in 0..DISK_SEEDS {
        let outcome = run(seed, false);
        if let Some(what) = outcome.violation {
            panic!("seed {seed}: {what}\nreplay: godwit-sim --site --seed {seed} --trace");
        }
        coverage.add(&outcome.coverage);
        if seed >= SEEDS && coverage.missing().is_empty() {
            return;
        }
    }
    let missing: Vec<_> = coverage.missing().iter().map(|case| case.name()).collect();
    panic!("{DISK_SEEDS} seeds never reach: {}", missing.join("; "));
}

#[test]
fn every_planted_fault_of_disks_is_seen() {
    for plant in DiskPlant::ALL {
        let options = SiteOptions {
            plant: SitePlant {
                disk: Some(*plant),
                ..SitePlant::default()
            },
            trace: false,
        };
        let mut seeds = 0..DISK_SEEDS;
        let seen = seeds.find_map(|seed| Some((seed, run_site_seed(seed, options).violation?)));
        let Some((seed, what)) = seen else {
            panic!("'{}' was not seen by {DISK_SEEDS} seeds", plant.name());
        };
        println!("{}: seen by seed {seed}: {what}", plant.name());
    }
}
