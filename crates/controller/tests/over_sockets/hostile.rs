//! A host that lies: what it says decides nothing about other hosts and other hosts' VMs.

use crate::scripted::{Agent, House, host, spec, to, vm};
use godwit_types::site::Alarm;
use godwit_types::vm::{DiskSpec, VmSpec};
use godwit_types::{ApiError, ErrorCode};

/// Host x runs `own`; host a runs `web`; host b has room.
async fn house() -> (House, Agent, Agent, Agent) {
    let house = House::new().await;
    let (x, a) = (house.host("x").await, house.host("a").await);
    let b = house.host("b").await;
    house.running("own", "x").await;
    house.running("web", "a").await;
    (house, x, a, b)
}

async fn refused(house: &House, x: &Agent, said: VmSpec) -> ApiError {
    x.script().outgoing = Some(said);
    let answer = house.client().migrate(&vm("own"), &to("b")).await;
    ApiError::from(answer.unwrap_err())
}

#[tokio::test]
async fn a_source_that_answers_for_another_hosts_vm_moves_nothing() {
    let (house, x, a, b) = house().await;
    let web = a.script().vms[&vm("web")].spec.clone();
    let error = refused(&house, &x, web).await;
    assert_eq!(error.code, ErrorCode::Preflight);
    assert!(error.message.contains("VM web instead"), "{error}");
    assert_eq!(error.host.as_deref(), Some("x"));
    assert_eq!(b.calls("prepare"), 0);
    assert_eq!(house.vm("web").await.host, Some(host("a")));
}

#[tokio::test]
async fn a_source_does_not_choose_what_its_destination_opens() {
    let (house, x, _a, b) = house().await;
    let own = x.script().vms[&vm("own")].spec.clone();
    let disk = DiskSpec {
        read_only: true,
        ..DiskSpec::new("secret", "/etc/shadow")
    };
    let lies = [
        VmSpec {
            kernel: "/etc/shadow".into(),
            ..own.clone()
        },
        VmSpec {
            memory_mib: 128,
            ..own.clone()
        },
        VmSpec {
            nics: Vec::new(),
            ..own.clone()
        },
        VmSpec {
            disks: vec![disk],
            ..own.clone()
        },
        VmSpec {
            machine: "pc-q35-7.1".into(),
            ..own.clone()
        },
        spec("own"),
    ];
    for said in lies {
        let error = refused(&house, &x, said).await;
        assert!(error.message.contains("describes it otherwise"), "{error}");
    }
    let file = ("/etc/shadow".to_owned(), "00".to_owned());
    x.script().file_hashes = vec![file];
    let error = refused(&house, &x, own.clone()).await;
    assert!(error.message.contains("does not boot from"), "{error}");
    assert_eq!(b.calls("prepare"), 0);
    // What is true moves as ever.
    x.script().file_hashes = vec![(own.kernel.clone(), "00".to_owned())];
    x.script().outgoing = None;
    house.client().migrate(&vm("own"), &to("b")).await.unwrap();
    assert_eq!(b.script().prepared[&vm("own")], own);
}

#[tokio::test]
async fn a_host_with_endless_ids_is_refused_and_the_others_hear_their_table() {
    let house = House::new().await;
    let (x, b) = (house.host("x").await, house.host("b").await);
    x.lives(2, &"m".repeat(100_000));
    let alarm = Alarm::AnswerNotTaken { host: host("x") };
    let is_refused =
        async |house: &House| house.client().site().await.unwrap().alarms.contains(&alarm);
    house.until(is_refused).await;
    let sentences = house.client().site().await.unwrap().sentences.join(" ");
    assert!(sentences.contains("at most 128"), "{sentences}");
    house.running("web", "b").await;
    b.until_heard().await;
    let table = b.table();
    assert!(table.hosts.iter().all(|host| host.machine_id.len() <= 128));
}

#[tokio::test]
async fn a_host_is_listed_under_the_name_that_it_was_enrolled_with() {
    let house = House::new().await;
    let (x, _a) = (house.host("x").await, house.host("a").await);
    x.script().info.as_mut().unwrap().name = host("a");
    x.until_heard().await;
    let hosts = house.client().hosts().await.unwrap();
    let names: Vec<&str> = hosts.iter().map(|host| host.info.name.as_str()).collect();
    assert_eq!(names, ["a", "x"]);
}
