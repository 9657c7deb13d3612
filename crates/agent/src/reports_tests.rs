//! One report among ten thousand, and which are kept.

use super::*;
use crate::api::tests::{Served, ended, host_name};
use crate::test_support::{TestHost, vm};
use godwit_ownership::{Handover, Power};
use godwit_types::Generation;
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
