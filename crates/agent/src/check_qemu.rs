//! The part of `host check` that starts QEMU: the preloaded library, CPU models, a guest that runs.
//!
//! Judges what was seen; owns nothing. Refuses: nothing; whatever is missing is a finding with its remedy.

use crate::check::{failed, note, ok, warning};
use crate::preflight::some_of;
use crate::qemu_facts::{QemuFacts, QemuFactsError};
use crate::qemu_trial::GuestRun;
use godwit_qemu::trial::{Reached, Shown};
use godwit_types::cpu::SAFE_MODEL;
use godwit_types::host::Check;
use godwit_types::vm::Accelerator;

/// All findings; none where QEMU could not be asked at all, which is a finding of its own.
pub fn run(qemu: &Result<QemuFacts, QemuFactsError>, guests: &[GuestRun]) -> Vec<Check> {
    let Ok(facts) = qemu else { return Vec::new() };
    let mut checks = vec![handout(facts)];
    let is_only = guests.len() == 1;
    for run in guests {
        checks.push(guest(run, is_only));
        checks.extend(models(facts, run));
    }
    checks
}

fn handout(facts: &QemuFacts) -> Check {
    let name = "write-tracking";
    match &facts.tried.no_handout {
        None if facts.tried.cpus.values().all(Result::is_err) => warning(
            name,
            "QEMU did not start, so it is not known whether its guests can be moved away",
            "see what guest-tcg and guest-kvm say",
        ),
        None => ok(name, "QEMU loads our library and hands out a userfaultfd"),
        Some(why) => failed(
            name,
            why.clone(),
            "set qemu in host.toml to QEMU's own program: a script in its place must end with 'exec' of it, and a program that is statically linked loads no library",
        ),
    }
}

fn guest(run: &GuestRun, is_only: bool) -> Check {
    let (accelerator, cpu) = (run.accelerator, &run.cpu);
    let name = format!("guest-{accelerator}");
    let remedy = match accelerator {
        Accelerator::Kvm => {
            "see that /dev/kvm works for QEMU's user (its group and mode), and 'dmesg' for what KVM says"
        }
        _ => "start that QEMU by hand, or reinstall it (package qemu-system-x86)",
    };
    match &run.shown {
        Err(why) if is_only || accelerator == Accelerator::Tcg => failed(
            &name,
            format!("no guest runs under {accelerator}: {why}"),
            remedy,
        ),
        Err(why) => warning(
            &name,
            format!("no guest runs under {accelerator}: {why}"),
            remedy,
        ),
        Ok(Shown {
            reached: Reached::LongMode,
            stopped_by,
        }) if stopped_by.is_empty() => ok(
            &name,
            format!(
                "a small guest with CPU {cpu} ran {} under {accelerator} and turned itself off",
                Reached::LongMode
            ),
        ),
        Ok(shown) => warning(
            &name,
            format!(
                "a small guest with CPU {cpu} ran {} under {accelerator} and no more, so no Linux would: {}",
                shown.reached, shown.stopped_by
            ),
            remedy,
        ),
    }
}

/// What `cpu = "auto"` comes to under one accelerator, as far as this host alone decides.
fn models(facts: &QemuFacts, run: &GuestRun) -> Option<Check> {
    let accelerator = run.accelerator;
    let name = format!("cpu-models-{accelerator}");
    let cpus = facts.tried.cpus.get(&accelerator)?.as_ref().ok()?;
    let whole = cpus.whole().count();
    if let Some(auto) = run.auto {
        return Some(ok(
            &name,
            format!(
                "cpu = \"auto\" is {auto} here, one of {whole} models that {accelerator} can give whole"
            ),
        ));
    }
    let lacking = cpus.lacking(SAFE_MODEL).unwrap_or_default();
    Some(note(
        &name,
        format!(
            "{accelerator} can give none of the models of cpu = \"auto\", not even {SAFE_MODEL}, of which it lacks {}",
            some_of(lacking)
        ),
        format!(
            "VMs under {accelerator} need a CPU by name that 'godwit host show' lists; a virtual machine needs nested virtualisation in full for more"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu_trial::Tried;
    use godwit_qemu::trial::CpuFacts;
    use godwit_types::host::CheckStatus;

    fn ran(accelerator: Accelerator, shown: Result<Shown, String>) -> GuestRun {
        GuestRun {
            accelerator,
            cpu: "qemu64".into(),
            auto: Some("qemu64"),
            shown,
        }
    }

    fn facts(no_handout: Option<&str>) -> Result<QemuFacts, QemuFactsError> {
        let cpus = [(Accelerator::Tcg, Ok(CpuFacts::default()))].into();
        let no_handout = no_handout.map(str::to_owned);
        Ok(QemuFacts {
            tried: Tried { cpus, no_handout },
            ..QemuFacts::default()
        })
    }

    fn status(checks: &[Check], name: &str) -> CheckStatus {
        let found = checks.iter().find(|check| check.name == name);
        found.unwrap().status
    }

    #[test]
    fn a_qemu_whose_guests_could_never_leave_fails_the_check() {
        let checks = run(&facts(Some("nobody listens there")), &[]);
        assert_eq!(status(&checks, "write-tracking"), CheckStatus::Failed);
        assert!(checks[0].remedy.contains("exec"));
        let checks = run(&facts(None), &[]);
        assert_eq!(status(&checks, "write-tracking"), CheckStatus::Ok);
    }

    #[test]
    fn a_guest_that_goes_no_further_than_firmware_is_no_proof() {
        let shown = |reached, stopped_by: &str| {
            Ok(Shown {
                reached,
                stopped_by: stopped_by.into(),
            })
        };
        let guests = [
            ran(Accelerator::Kvm, shown(Reached::RealMode, "internal error")),
            ran(Accelerator::Tcg, shown(Reached::LongMode, "")),
        ];
        let checks = run(&facts(None), &guests);
        assert_eq!(status(&checks, "guest-kvm"), CheckStatus::Warning);
        assert_eq!(status(&checks, "guest-tcg"), CheckStatus::Ok);
        let text = checks.iter().map(|check| check.found.as_str());
        assert!(text.collect::<String>().contains("internal error"));
    }

    #[test]
    fn qemu_s_own_words_are_told_and_fail_where_nothing_else_runs() {
        let guests = [ran(Accelerator::Kvm, Err("failed to set MSR 0x10a".into()))];
        let checks = run(&facts(None), &guests);
        assert_eq!(status(&checks, "guest-kvm"), CheckStatus::Failed);
        assert!(checks[1].found.contains("MSR 0x10a"));
    }
}
