//! How much of a host's words the controller takes: all of an honest host's, and nothing of one that says too much.

use crate::scripted::{Agent, House, host, vm};
use godwit_types::host_api::{HostVm, VMS_MAX};
use godwit_types::site::Alarm;
use godwit_types::vm::{DiskSpec, VmState};
use godwit_types::{Generation, VmName};

/// This many VMs more are on the host, off, each changed so.
fn many(agent: &Agent, count: usize, change: impl Fn(&mut HostVm)) {
    agent.has("one", VmState::Stopped, 1, true);
    let mut script = agent.script();
    let one = script.vms[&vm("one")].clone();
    for number in 0..count {
        let name = VmName::new(format!("vm-{number}")).unwrap();
        let mut next = one.clone();
        next.spec.name = name.clone();
        change(&mut next);
        script.vms.insert(name.clone(), next);
        script.highest.insert(name, Generation(1));
    }
}

async fn until_refused(house: &House, name: &str) -> String {
    let alarm = Alarm::AnswerNotTaken { host: host(name) };
    house.until_alarm(&alarm).await;
    house.client().site().await.unwrap().sentences.join(" ")
}

#[tokio::test]
async fn a_thousand_vms_with_long_words_are_heard_from_one_host() {
    let house = House::new().await;
    let a = house.host("a").await;
    many(&a, 1000, |vm| {
        vm.spec.cmdline = "x".repeat(2048);
        vm.spec.kernel = format!("/{}", "k".repeat(1000));
        vm.spec.initramfs = Some(format!("/{}", "i".repeat(1000)));
        vm.note = Some("n".repeat(10_000));
    });
    house
        .until(async |house: &House| house.client().vms().await.unwrap().len() == 1001)
        .await;
    let note = house.vm("vm-7").await.note.unwrap();
    assert!(
        note.len() < 5_000 && note.ends_with("..."),
        "{}",
        note.len()
    );
}

#[tokio::test]
async fn a_host_that_says_too_much_is_named_and_nothing_of_it_is_taken() {
    let house = House::new().await;
    let (a, _b) = (house.host("a").await, house.host("b").await);
    house.running("web", "b").await;
    many(&a, 1, |vm| vm.note = Some("x".repeat(40 << 20)));
    let said = until_refused(&house, "a").await;
    assert!(
        said.contains("host a at") && said.contains("bytes"),
        "{said}"
    );
    assert_eq!(house.vm("web").await.state, VmState::Running);
    assert_eq!(house.client().vms().await.unwrap().len(), 1);
    a.script().vms.clear();
    house.until_no_alarm().await;
}

#[tokio::test]
async fn a_host_with_more_vms_than_an_agent_keeps_or_one_that_none_describes_is_refused() {
    let house = House::new().await;
    let a = house.host("a").await;
    many(&a, 1, |vm| vm.spec.vcpus = 100_000);
    let said = until_refused(&house, "a").await;
    assert!(said.contains("vcpus = 100000"), "{said}");
    a.script().vms.clear();
    house.until_no_alarm().await;
    many(&a, VMS_MAX, |_| {});
    let said = until_refused(&house, "a").await;
    assert!(said.contains(&VMS_MAX.to_string()), "{said}");
    assert!(house.client().vms().await.unwrap().is_empty());
}

#[tokio::test]
async fn one_old_vm_with_too_many_disks_does_not_silence_its_whole_host() {
    let house = House::new().await;
    let a = house.host("a").await;
    house.running("web", "a").await;
    let with_disks = |count: usize| {
        move |vm: &mut HostVm| {
            let disk = |number| DiskSpec {
                read_only: true,
                ..DiskSpec::new(format!("d{number}"), format!("/images/{number}"))
            };
            vm.spec.disks = (0..count).map(disk).collect();
        }
    };
    many(&a, 1, with_disks(17));
    let all = async |house: &House| house.client().vms().await.unwrap().len() == 3;
    house.until(all).await;
    let note = house.vm("vm-0").await.note.unwrap();
    assert!(
        note.contains("17 disks") && note.contains("godwit vm edit vm-0"),
        "{note}"
    );
    assert_eq!(house.vm("web").await.state, VmState::Running);
    assert!(house.client().site().await.unwrap().alarms.is_empty());
    many(&a, 1, with_disks(1000));
    let said = until_refused(&house, "a").await;
    assert!(said.contains("1000 disks"), "{said}");
}
