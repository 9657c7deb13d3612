//! Whole sites: that a seed is the same run each time, and no other seed's.

use godwit_sim::site::{SiteOptions, SiteOutcome, run_site_seed};
use std::collections::BTreeSet;

/// How many seeds are run again.
const SEEDS: u64 = 60;

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
