//! One report among ten thousand, and which are kept.

use super::*;
use crate::api::tests::{Served, ended, host_name};
use crate::test_support::{TestHost, vm};
use godwit_ownership::{Handover, Power};
use godwit_store::save_json;
use godwit_types::Generation;
use godwit_types::host_api::{MigrationNote, NOTE_FILE};
use godwit_types::migration::{AgentAddress, Outcome, Phase as ReportPhase, Side};
use std::sync::atomic::Ordering;

fn id(text: &str) -> MigrationId {
    MigrationId::new(text).unwrap()
}

fn write(host: &TestHost, name: &str, text: &str) -> PathBuf {
    let dir = host.config.vms_dir().join(name).join(REPORTS_DIR);
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join(format!("{text}.json"));
    std::fs::write(&path, serde_json::to_vec(&ended(&id(text))).unwrap()).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn among_ten_thousand_reports_one_is_found_without_reading_the_others() {
    let served = Served::new().await;
    for number in 0..500 {
        let name = format!("vm{number}");
        served.host.hold(&name, Power::Off);
        for report in 0..REPORTS_KEPT {
            write(&served.host, &name, &format!("m{number}-{report}"));
        }
    }
    served.agent.take_up().unwrap();
    let opened = || served.agent.reports.opened.load(Ordering::Relaxed);
    assert_eq!(served.local().vms().await.unwrap().len(), 500);
    assert_eq!(opened(), 0, "a poll of the VMs reads no report");
    let wanted = id("m321-7");
    let found = served.local().migration(&wanted).await.unwrap();
    assert_eq!(found.id, wanted);
    assert_eq!(opened(), 1);
    let unknown = served.local().migration(&id("m321-99")).await;
    assert_eq!(
        unknown.unwrap_err().code(),
        godwit_types::ErrorCode::UnknownMigration
    );
    assert_eq!(opened(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_that_cannot_be_read_is_not_an_unknown_migration() {
    let served = Served::new().await;
    served.host.hold("web", Power::Off);
    let path = write(&served.host, "web", "m1");
    served.agent.take_up().unwrap();
    std::fs::write(&path, "{").unwrap();
    let error = served.local().migration(&id("m1")).await.unwrap_err();
    assert_eq!(error.code(), godwit_types::ErrorCode::Internal);
    let said = error.to_string();
    assert!(
        said.contains("cannot be read") && said.contains("m1.json"),
        "{said}"
    );
    assert_eq!(served.local().migrations().await.unwrap(), []);
}

#[test]
fn the_newest_twenty_are_kept_and_what_the_record_waits_for() {
    let host = TestHost::new();
    let waited = Phase::Holds {
        generation: Generation(2),
        power: Power::Off,
        unconfirmed: Some(Handover {
            migration: id("m0"),
            peer: host_name("b"),
        }),
    };
    host.record("web", Generation(2), waited);
    for number in 0..30 {
        let path = write(&host, "web", &format!("m{number}"));
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000 + number);
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(time).unwrap();
    }
    let reports = Reports::new(host.records());
    reports.take_up(&[vm("web")]);
    let left = listed(&reports.dir(&vm("web")));
    let mut names: Vec<String> = left.into_iter().map(|(_, id)| id.to_string()).collect();
    let mut kept: Vec<String> = (10..30).map(|number| format!("m{number}")).collect();
    kept.push("m0".into());
    names.sort();
    kept.sort();
    assert_eq!(names, kept);
    assert_eq!(reports.vm_of(&id("m29"), &[]), Some(vm("web")));
    assert_eq!(reports.vm_of(&id("m5"), &[vm("web")]), None);
}

/// A report of the VM `web` that a dead VM process left open, and the note of its migration.
fn left_open(host: &TestHost, text: &str, side: Side) -> PathBuf {
    let path = write(host, "web", text);
    let mut report = ended(&id(text));
    report.side = side;
    report.outcome = None;
    report.phase = ReportPhase::Setup;
    save_json(&path, &report).unwrap();
    let note = MigrationNote {
        migration: id(text),
        side,
        peer: AgentAddress {
            host: host_name("b"),
            address: "127.0.0.1:1".parse().unwrap(),
        },
    };
    let dir = host.config.vms_dir().join("web");
    save_json(&dir.join(NOTE_FILE), &note).unwrap();
    path
}

/// The VM's lock, as another process has it.
fn another_holder(host: &TestHost) -> godwit_store::VmStore {
    let store = godwit_store::VmStore::open(&host.config.state_dir, &vm("web")).unwrap();
    std::fs::write(host.config.vms_dir().join("web/lock"), "1").unwrap();
    store
}

fn moved(text: &str) -> Phase {
    Phase::Moved {
        generation: Generation(2),
        migration: id(text),
        to: host_name("b"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_whose_process_died_is_over_as_the_journal_says_without_a_new_one() {
    let served = Served::new().await;
    served.host.hold("web", Power::Off);
    served.host.record("web", Generation(1), moved("m"));
    let path = left_open(&served.host, "m", Side::Source);
    let listed = served.local().migrations().await.unwrap();
    assert_eq!(listed.len(), 0, "the agent has not taken the VM up yet");
    served.agent.take_up().unwrap();
    for report in [
        served.local().migration(&id("m")).await.unwrap(),
        served.local().migrations().await.unwrap().remove(0),
        godwit_store::load_json(&path).unwrap().unwrap(),
    ] {
        assert_eq!(report.outcome, Some(Outcome::Completed));
        assert_eq!(report.phase, ReportPhase::Ended);
    }
}

#[test]
fn a_grant_that_follows_does_not_hide_how_the_last_migration_ended() {
    let host = TestHost::new();
    host.hold("web", Power::Off);
    host.record("web", Generation(1), moved("m"));
    left_open(&host, "m", Side::Source);
    let reports = Reports::new(host.records());
    reports.settle_last(&vm("web"));
    host.hold("web", Power::Off);
    let report = reports.read(&vm("web"), &id("m")).unwrap().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Completed));
}

#[test]
fn a_migration_that_the_record_waits_for_or_a_process_has_stays_open() {
    let host = TestHost::new();
    host.hold("web", Power::Off);
    left_open(&host, "m", Side::Source);
    let reports = Reports::new(host.records());
    let outcome = || reports.read(&vm("web"), &id("m")).unwrap().unwrap().outcome;
    let gave = Phase::Gave {
        generation: Generation(2),
        migration: id("m"),
        to: host_name("b"),
    };
    host.record("web", Generation(1), gave);
    assert_eq!(outcome(), None, "the record waits to hear of it");
    host.hold("web", Power::On);
    let why = "a VM process is to come, which tells the destination, too";
    assert_eq!(outcome(), None, "{why}");
    host.record("web", Generation(1), moved("m"));
    // As long as this is there, a VM process has the VM.
    let process = another_holder(&host);
    assert_eq!(outcome(), None, "its process tells");
    drop(process);
    assert_eq!(outcome(), Some(Outcome::Completed));
}
