//! A short run of every target, and the proof that the fuzzer finds what it must.

use godwit_fuzz::engine::{self, Limit, Options};
use godwit_fuzz::targets;
use std::path::PathBuf;
use std::time::Duration;

fn options(name: &str, limit: Limit) -> Options {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&directory).expect("a directory for inputs");
    Options {
        seed: 1,
        limit,
        directory,
    }
}

#[test]
fn no_target_breaks_in_30_000_executions() {
    let targets = targets::all();
    let options = options("all", Limit::Runs(30_000 / targets.len() as u64));
    for target in targets {
        let report = engine::run(&target, &options).expect("a run");
        assert_eq!(report.finding, None, "{}", target.name);
        assert!(
            report.outcomes > 3,
            "{} led to {} outcomes",
            target.name,
            report.outcomes
        );
    }
}

#[test]
fn the_planted_bug_is_found_and_made_small() {
    let options = options("canary", Limit::Runs(75_000));
    let report = engine::run(&targets::CANARY, &options).expect("a run");
    let finding = report.finding.expect("the planted bug");
    assert!(finding.what.contains("canary.rs"), "{}", finding.what);
    assert!(
        finding.input.len() <= 16,
        "{} bytes are not small",
        finding.input.len()
    );
    let kept = std::fs::read(finding.file.expect("a file")).expect("the kept input");
    let again = engine::try_input(&targets::CANARY, &kept).expect_err("it breaks again");
    assert_eq!(again, finding.what);
}

#[test]
fn the_seed_decides_the_run() {
    let target = targets::all().remove(3);
    let run = |name, seed| {
        let options = Options {
            seed,
            ..options(name, Limit::Runs(3000))
        };
        engine::run(&target, &options).expect("a run").outcomes
    };
    assert_eq!(run("one", 1), run("two", 1));
}

#[test]
fn a_run_by_time_ends() {
    let options = options("time", Limit::Time(Duration::from_millis(50)));
    let report = engine::run(&targets::all()[9], &options).expect("a run");
    assert!(report.executions > 0 && report.finding.is_none());
}
