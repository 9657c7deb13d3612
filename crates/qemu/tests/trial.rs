//! The trial guest against the QEMU that is installed.

use godwit_qemu::command_line::Accelerator;
use godwit_qemu::launch::LaunchError;
use godwit_qemu::trial::{Reached, Trial, TrialDir, TrialPlace};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const QEMU: &str = "/usr/bin/qemu-system-x86_64";

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn base() -> (tempfile::TempDir, TrialDir) {
    let base = tempfile::tempdir_in("/dev/shm").expect("a directory");
    std::fs::set_permissions(base.path(), std::fs::Permissions::from_mode(0o711)).expect("mode");
    let dir = TrialDir::create(base.path()).expect("a directory");
    (base, dir)
}

fn place(dir: &TrialDir, accelerator: Accelerator) -> TrialPlace<'_> {
    TrialPlace {
        binary: Path::new(QEMU),
        dir,
        uid: if accelerator == Accelerator::Kvm {
            0
        } else {
            61_234
        },
        gid: if accelerator == Accelerator::Kvm {
            0
        } else {
            61_234
        },
        accelerator,
    }
}

#[test]
fn under_tcg_the_trial_guest_reaches_long_mode_and_leaves_nothing() {
    let (base, dir) = base();
    let trial = Trial::start(
        &place(&dir, Accelerator::Tcg),
        ("qemu64", &[]),
        true,
        None,
        soon(),
    );
    let trial = trial.expect("a trial");
    let pid = trial.pid();
    let shown = trial.run(Duration::from_secs(6)).expect("an end");
    assert_eq!(
        (shown.reached, shown.stopped_by.as_str()),
        (Reached::LongMode, "")
    );
    drop((trial, dir));
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(
        std::fs::read_dir(base.path()).expect("a directory").count(),
        0
    );
}

#[test]
fn what_tcg_lacks_of_a_model_is_known_before_a_guest_meets_it() {
    let (_base, dir) = base();
    let place = place(&dir, Accelerator::Tcg);
    let trial = Trial::start(&place, ("qemu64", &[]), false, None, soon()).expect("a trial");
    let facts = trial.cpus(soon()).expect("facts");
    drop(trial);
    let lacks = |name: &str| {
        facts
            .lacking(name)
            .expect("a model that QEMU knows")
            .to_vec()
    };
    assert!(facts.whole().any(|name| name == "qemu64") && facts.whole().all(|name| name != "max"));
    assert!(lacks("qemu64").is_empty() && lacks("Nehalem").is_empty());
    let lacking = lacks("Skylake-Server");
    assert!(
        lacking.iter().any(|feature| feature == "avx512f"),
        "{lacking:?}"
    );
    assert!(facts.features["sse2"] && !facts.features["avx512f"]);
    // The facts are true: QEMU itself refuses what they say that it lacks.
    let error = Trial::start(&place, ("Skylake-Server", &[]), true, None, soon());
    let error = error.expect_err("QEMU lacks some of it");
    assert!(matches!(error, LaunchError::Ended { .. }), "{error}");
}

#[test]
fn under_kvm_the_facts_are_those_of_kvm() {
    if !Path::new("/dev/kvm").exists() {
        println!("skipped: this machine has no /dev/kvm");
        return;
    }
    let (_base, dir) = base();
    let place = place(&dir, Accelerator::Kvm);
    let trial = Trial::start(&place, ("qemu64", &[]), false, None, soon()).expect("a trial");
    let facts = trial.cpus(soon()).expect("facts");
    drop(trial);
    for model in &facts.models {
        let here = model.unavailable.is_empty();
        let special = ["max", "host", "base"].contains(&model.name.as_str());
        if special
            || ![
                "EPYC-Genoa",
                "SapphireRapids",
                "Haswell",
                "qemu64",
                "pentium3",
            ]
            .contains(&model.name.as_str())
        {
            continue;
        }
        let started = Trial::start(&place, (&model.name, &[]), true, None, soon());
        assert_eq!(
            started.is_ok(),
            here,
            "{}: {:?} against {:?}",
            model.name,
            model.unavailable,
            started.err()
        );
    }
    let trial = Trial::start(
        &place,
        ("host", &[("arch-capabilities".into(), false)]),
        false,
        None,
        soon(),
    );
    let shown = trial.expect("a trial").run(Duration::from_secs(60));
    let shown = shown.expect("an end");
    println!("KVM: {shown:?}");
    assert!(shown.reached >= Reached::RealMode, "{shown:?}");
}
