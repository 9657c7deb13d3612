//! What filters that have nothing to do cost: the time of a request through a stack alone, with and without them.
//!
//! That every request comes through is the test; the figures are for `docs/performance.md`, and
//! `GODWIT_FILTER_ROUNDS=15` takes so many rounds of a million requests each.

use godwit_blockio::filters::{Limits, Statistics, Throttle};
use godwit_blockio::{Bottom, Data, Filter, Outcome, Request, Stack, Work};
use std::time::Instant;

/// Has done everything at once.
struct Done;

impl Bottom for Done {
    fn start(&mut self, request: Request) -> Option<(Request, Outcome)> {
        Some((request, Outcome::Done))
    }
}

/// Those of the product that stand between a guest and its image.
fn idle() -> Vec<Box<dyn Filter>> {
    vec![
        Box::new(Statistics::default()),
        Box::new(Throttle::new(Limits::default())),
    ]
}

/// Nanoseconds that one of so many requests takes.
fn nanoseconds(filters: Vec<Box<dyn Filter>>, count: u64) -> f64 {
    let mut stack = Stack::new(filters, Done);
    let began = Instant::now();
    for token in 0..count {
        let at = token % 1024 * 4096;
        let request = Request::new(Work::Write(at..at + 4096), Data::None, token, began);
        stack.submit(request, began);
        let (request, outcome) = stack.finished().unwrap();
        assert_eq!((request.token, outcome), (token, Outcome::Done));
    }
    began.elapsed().as_nanos() as f64 / count as f64
}

#[test]
fn every_request_comes_through_idle_filters_and_what_they_cost_is_told() {
    let rounds = std::env::var("GODWIT_FILTER_ROUNDS");
    let rounds = rounds.map_or(1, |rounds| rounds.parse().unwrap());
    let count = if rounds > 1 { 1_000_000 } else { 10_000 };
    let mut costs: Vec<[f64; 2]> = (0..rounds)
        .map(|_| [nanoseconds(Vec::new(), count), nanoseconds(idle(), count)])
        .collect();
    costs.sort_by(|a, b| (a[1] - a[0]).total_cmp(&(b[1] - b[0])));
    let more = |[without, with]: [f64; 2]| with - without;
    let (first, middle, last) = (costs[0], costs[rounds / 2], costs[rounds - 1]);
    println!(
        "  two idle filters: {:.1} ns a request ({:.1} to {:.1}), a stack without them {:.1} ns",
        more(middle),
        more(first),
        more(last),
        middle[0]
    );
}
