//! The system manager as a program of a test's own, which notes what it is asked.

use super::*;
use crate::api::tests::Served;
use crate::test_support::TestHost;
use godwit_types::host::CheckStatus;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Instant;

const STARTED: &str = "start --no-block --job-mode=fail godwit-guests.service";

/// A systemctl that says these of the host, of its jobs and of the unit.
fn manager(dir: &Path, state: &str, jobs: &str, unit: &str) -> Manager {
    let program = dir.join("systemctl");
    let script = format!(
        "#!/bin/sh\necho \"$*\" >>'{asked}'\ncase $1 in\nis-system-running) printf '{state}\\n' ;;\nlist-jobs) printf '{jobs}' ;;\nshow) printf '{unit}' ;;\nesac\n",
        asked = dir.join("asked").display()
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    Manager {
        systemd: dir.to_owned(),
        program,
    }
}

fn asked(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("asked")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

const DEAD: &str = "LoadState=loaded\\nActiveState=inactive\\n";
/// systemd 252 whose boot never ended, on its way down.
const GOING_DOWN: &str = "401 shutdown.target               start waiting\\n402 godwit-guests.service        stop  running\\n";

#[test]
fn a_host_whose_boot_never_ended_goes_down_when_its_shutdown_has_a_job() {
    let down =
        "  401 shutdown.target              start waiting\n  398 reboot.target start waiting\n";
    let up = "  12 systemd-networkd-wait-online.service start running\n";
    for (state, jobs, is_down) in [
        ("starting\n", down, true),
        ("starting\n", up, false),
        ("stopping\n", "", true),
        ("running\n", "", false),
        ("running\n", "No jobs running.\n", false),
        ("", "", false),
        ("", "9 shutdown.target start running\n", true),
        // Called off, and others that sound alike.
        ("running\n", "9 shutdown.target stop waiting\n", false),
        ("running\n", "9 my-shutdown.target start waiting\n", false),
    ] {
        assert_eq!(says_stopping(state, jobs), is_down, "{state} {jobs}");
    }
}

#[tokio::test]
async fn both_what_systemd_says_and_its_jobs_count() {
    let dir = tempfile::tempdir().unwrap();
    let stub = manager(dir.path(), "starting", GOING_DOWN, "");
    assert!(stub.takes_host_down(ASK_WAIT).await);
    let stub = manager(dir.path(), "starting", "", "");
    assert!(!stub.takes_host_down(ASK_WAIT).await);
    let nobody = Manager {
        program: dir.path().join("none"),
        ..stub
    };
    assert!(!nobody.takes_host_down(ASK_WAIT).await);
}

#[tokio::test]
async fn a_host_whose_jobs_are_not_heard_is_not_said_to_stay_up() {
    let dir = tempfile::tempdir().unwrap();
    for (state, jobs, said) in [
        ("running", "", Some(false)),
        ("running", "exit 1", None),
        ("starting", "exit 1", None),
        ("stopping", "exit 1", Some(true)),
    ] {
        let stub = manager(dir.path(), state, "", "");
        let script = std::fs::read_to_string(&stub.program).unwrap();
        let script = script.replace("list-jobs) printf ''", &format!("list-jobs) {jobs}"));
        std::fs::write(&stub.program, script).unwrap();
        assert_eq!(stub.stops(ASK_WAIT).await, said, "{state} {jobs}");
    }
}

#[tokio::test]
async fn a_guests_unit_that_somebody_stopped_is_started_unless_the_host_goes_down() {
    for (state, jobs, unit, is_started) in [
        ("running", "", DEAD, true),
        (
            "degraded",
            "",
            "LoadState=loaded\\nActiveState=failed\\n",
            true,
        ),
        (
            "running",
            "",
            "LoadState=loaded\\nActiveState=active\\n",
            false,
        ),
        (
            "running",
            "",
            "LoadState=not-found\\nActiveState=inactive\\n",
            false,
        ),
        (
            "running",
            "",
            "LoadState=masked\\nActiveState=inactive\\n",
            false,
        ),
        ("stopping", "", DEAD, false),
        ("starting", GOING_DOWN, DEAD, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        manager(dir.path(), state, jobs, unit)
            .bring_guests_unit_back()
            .await;
        let was_started = asked(dir.path()).iter().any(|line| line == STARTED);
        assert_eq!(was_started, is_started, "{state} {jobs} {unit}");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut without = manager(dir.path(), "running", "", DEAD);
    without.systemd = dir.path().join("none");
    without.bring_guests_unit_back().await;
    assert!(asked(dir.path()).is_empty(), "there is no systemd");
}

#[test]
fn a_check_warns_of_a_guests_unit_that_does_not_run() {
    let seen = |unit| check(unit).map(|check| (check.status, check.remedy));
    let (status, remedy) = seen(GuestsUnit::Inactive).unwrap();
    assert_eq!(status, CheckStatus::Warning);
    assert_eq!(remedy, "systemctl start godwit-guests.service");
    assert_eq!(seen(GuestsUnit::Active).unwrap().0, CheckStatus::Ok);
    assert_eq!(seen(GuestsUnit::Missing).unwrap().0, CheckStatus::Note);
    assert_eq!(seen(GuestsUnit::Unknown), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_opened_again_has_its_guests_unit_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = TestHost::new();
    host.manager = manager(dir.path(), "running", "", DEAD);
    let served = Served::of_host(host).await;
    served.agent.open().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !asked(dir.path()).iter().any(|line| line == STARTED) {
        assert!(Instant::now() < deadline, "it is not started");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
