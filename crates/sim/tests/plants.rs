//! Every planted fault is seen by the simulator: a safety test counts once it has been seen to fail.
#![cfg(feature = "planted-faults")]

use godwit_ownership::plant::Plant;
use godwit_sim::{Options, run_seed};

/// Seeds within which a fault must show.
const SEEDS: u64 = 3_000;

fn first_caught(plant: Plant) -> Option<(u64, String)> {
    let options = Options {
        plant: Some(plant),
        trace: false,
    };
    (0..SEEDS).find_map(|seed| Some((seed, run_seed(seed, options).violation?)))
}

#[test]
fn every_planted_fault_is_caught() {
    for plant in Plant::by_simulator() {
        let Some((seed, what)) = first_caught(plant) else {
            panic!("'{}' was not caught by {SEEDS} seeds", plant.name());
        };
        println!("{}: caught by seed {seed}: {what}", plant.name());
    }
}

#[test]
fn names_lead_back_to_their_faults() {
    for plant in Plant::ALL {
        assert_eq!(Plant::from_name(plant.name()), Some(*plant));
    }
}
