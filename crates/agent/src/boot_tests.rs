//! Boots that no request asked for, with a stub VM process and a site whose answers the test gives.

use super::*;
use crate::api::tests::{Served, host_name};
use crate::test_support::{
    BOOT_FAILS, BOOT_WAITS, BOOTED, REVIVES, TestHost, holds_web, neighbour, vm,
};
use godwit_ownership::{Phase, Power};
use godwit_rpc::Authority;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::revocations::made_before;
use godwit_types::site::{SiteTable, SiteVm, Stamp, Standing};
use godwit_types::vm::VmState;
use godwit_types::{Generation, HostName};
use std::collections::BTreeSet;

/// A host that knows another one, `b`.
fn of_two() -> TestHost {
    TestHost::new().beside(&["b"])
}

fn said_by(from: Option<&str>) -> SiteAnswer {
    SiteAnswer {
        from: from.map(host_name),
        standing: Standing::Known,
        in_charge: from.is_none(),
        stamp: Stamp::default(),
        vms: BTreeMap::new(),
        ..SiteAnswer::default()
    }
}

fn unreachable() -> ApiError {
    ApiError::new(ErrorCode::HostUnreachable, "nobody is there")
}

/// Host b, which missed a grant to host c, answers before host c does, whose answer is as late as its agent is busy.
fn the_holder_answers_last() -> Asker {
    Arc::new(|whom, _| {
        Box::pin(async move {
            match whom {
                Whom::Host(host) if host.name == host_name("c") => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    let records = vec![holds_web(9)];
                    let said = said_by(Some("c"));
                    Ok(SiteAnswer { records, ..said })
                }
                Whom::Host(host) => Ok(said_by(Some(host.name.as_str()))),
                Whom::Controller => Err(unreachable()),
            }
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_answers_last_keeps_the_vm_from_booting() {
    let host = TestHost::new().beside(&["b", "c"]);
    host.crash("web", false);
    let served = served(host, the_holder_answers_last(), false).await;
    served.agent.boot_round().await;
    let shown = served.agent.vm(&vm("web")).await.unwrap();
    assert!(!runs(&shown));
    let note = shown.note.unwrap();
    assert!(
        note.contains("host c holds it under generation 9"),
        "{note}"
    );
    assert_eq!(boots(&served, "web"), 0);
}

/// Answers of the controller and of every host.
fn answers(controller: Option<SiteAnswer>, host: Option<SiteAnswer>) -> Asker {
    Arc::new(move |whom, _| {
        let answer = match whom {
            Whom::Controller => controller.clone(),
            Whom::Host(_) => host.clone(),
        };
        Box::pin(async move { answer.ok_or_else(unreachable) })
    })
}

fn nobody() -> Asker {
    answers(None, None)
}

/// The host with its VMs taken up, each with a VM process that answers.
async fn served(host: TestHost, asker: Asker, is_stopping: bool) -> Served {
    let served = Served::of(host, asker, is_stopping).await;
    served.agent.take_up().unwrap();
    for name in served.agent.supervisor.names() {
        let vm = served.agent.supervisor.find(&name).unwrap();
        vm.need(NEED).await.unwrap();
    }
    served
}

/// Rounds until the VM is shown as wished; the state that it came to.
async fn rounds_until(served: &Served, name: &str, wished: impl Fn(&HostVm) -> bool) -> HostVm {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        served.agent.boot_round().await;
        let shown = served.agent.vm(&vm(name)).await.unwrap();
        if wished(&shown) || Instant::now() > deadline {
            return shown;
        }
        tokio::task::yield_now().await;
    }
}

fn boots(served: &Served, name: &str) -> usize {
    let text = std::fs::read_to_string(served.host.run_dir(name).join(BOOTED));
    text.unwrap_or_default().lines().count()
}

fn runs(vm: &HostVm) -> bool {
    vm.state == VmState::Running
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_site_is_silent_boots_nothing_and_says_what_it_waits_for() {
    let host = of_two();
    host.crash("web", false);
    let served = served(host, nobody(), false).await;
    served.agent.boot_round().await;
    let shown = served.agent.vm(&vm("web")).await.unwrap();
    assert_eq!(shown.state, VmState::Crashed);
    let note = shown.note.unwrap();
    for words in ["host b", "godwit host boot-alone", "since"] {
        assert!(note.contains(words), "{note}");
    }
    assert_eq!(boots(&served, "web"), 0);
    // A person's word.
    served.local().boot_alone().await.unwrap();
    assert!(runs(&rounds_until(&served, "web", runs).await));
    assert_eq!(boots(&served, "web"), 1);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_host_that_knows_as_much_lets_it_boot() {
    let host = of_two();
    host.crash("web", false);
    host.hold("off", Power::Off);
    let served = served(host, answers(None, Some(said_by(Some("b")))), false).await;
    assert!(runs(&rounds_until(&served, "web", runs).await));
    assert_eq!((boots(&served, "web"), boots(&served, "off")), (1, 0));
    served.end("web");
    served.end("off");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_waited_for_room_is_booted_after_a_power_cut_and_one_that_a_person_paused_is_not()
 {
    let host = of_two();
    host.crash_with("full", Power::WaitsForRoom, false);
    host.crash_with("paused", Power::Paused, false);
    let served = served(host, answers(None, Some(said_by(Some("b")))), false).await;
    assert!(runs(&rounds_until(&served, "full", runs).await));
    served.agent.boot_round().await;
    assert_eq!((boots(&served, "full"), boots(&served, "paused")), (1, 0));
    served.end("full");
    served.end("paused");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_answers_in_anothers_name() {
    let host = of_two();
    host.crash("web", false);
    // A host that claims to be the controller, and a controller that claims to be a host.
    let asker = answers(Some(said_by(Some("b"))), Some(said_by(None)));
    let served = served(host, asker, false).await;
    served.agent.boot_round().await;
    let shown = served.agent.vm(&vm("web")).await.unwrap();
    assert!(shown.note.unwrap().contains("the controller or host b"));
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_answered_before_a_vm_died_says_nothing_of_it() {
    let host = of_two();
    host.crash("web", false);
    let asked = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let once = asked.clone();
    let asker: Asker = Arc::new(move |whom, _| {
        let is_host = matches!(whom, Whom::Host(_));
        let first = is_host && !once.swap(true, std::sync::atomic::Ordering::SeqCst);
        Box::pin(async move { first.then(|| said_by(Some("b"))).ok_or_else(unreachable) })
    });
    let served = served(host, asker, false).await;
    assert!(runs(&rounds_until(&served, "web", runs).await));
    served.host.crash("db", false);
    let db = served
        .agent
        .supervisor
        .supervise(served.agent.vm_config(&vm("db")));
    db.need(NEED).await.unwrap();
    let waits = |vm: &HostVm| {
        vm.note
            .as_ref()
            .is_some_and(|note| note.contains("boot-alone"))
    };
    assert!(waits(&rounds_until(&served, "db", waits).await));
    assert_eq!(boots(&served, "db"), 0);
    served.end("web");
    served.end("db");
}

fn held_by(holder: &str) -> SiteAnswer {
    let row = SiteVm {
        holder: Some(host_name(holder)),
        held: Generation(9),
        may_hold: BTreeSet::from([host_name(holder)]),
        deleted: false,
        stamp: Stamp {
            epoch: 1,
            number: 9,
        },
    };
    let mut answer = said_by(None);
    answer.vms.insert(vm("web"), row);
    answer.stamp = Stamp {
        epoch: 1,
        number: 9,
    };
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_record_gives_way_to_the_holder_that_the_controller_knows() {
    let host = of_two();
    host.crash("web", false);
    let mut answer = held_by("b");
    answer.given_on.insert(vm("web"));
    let served = served(host, answers(Some(answer), None), false).await;
    served.agent.boot_round().await;
    let deadline = Instant::now() + Duration::from_secs(60);
    let phase = || served.host.records().record(&vm("web")).unwrap().phase;
    while phase() != Phase::Absent && Instant::now() < deadline {
        tokio::task::yield_now().await;
    }
    assert_eq!(phase(), Phase::Absent);
    assert_eq!(boots(&served, "web"), 0);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_knows_another_holder_keeps_the_vm_from_booting() {
    let host = of_two();
    host.crash("web", false);
    let mut answer = held_by("b");
    (answer.from, answer.in_charge) = (Some(host_name("b")), false);
    let served = served(host, answers(None, Some(answer)), false).await;
    served.agent.boot_round().await;
    let shown = served.agent.vm(&vm("web")).await.unwrap();
    assert_eq!(shown.state, VmState::Crashed);
    assert!(
        shown
            .note
            .unwrap()
            .contains("it is not booted on host a: host b holds it")
    );
    assert!(
        shown.claim.held().is_some(),
        "no host's word alone ends a record"
    );
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_fails_turns_no_vm_off_and_is_tried_again() {
    let host = of_two();
    host.crash("web", false);
    let fails = host.run_dir("web").join(BOOT_FAILS);
    std::fs::write(&fails, "no such bridge").unwrap();
    let served = served(host, answers(Some(said_by(None)), None), false).await;
    let failed = |vm: &HostVm| {
        vm.note
            .as_ref()
            .is_some_and(|note| note.contains("2 times"))
    };
    let shown = rounds_until(&served, "web", failed).await;
    assert!(shown.note.unwrap().contains("no such bridge"));
    let (generation, on) = (Generation(1), true);
    let said = served.host.records().said(&vm("web")).unwrap();
    assert_eq!(
        said.claim,
        godwit_types::site::Claim::Holds { generation, on }
    );
    std::fs::remove_file(fails).unwrap();
    assert!(runs(&rounds_until(&served, "web", runs).await));
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_that_died_is_not_booted_while_the_host_shuts_down() {
    let host = of_two();
    host.crash("web", true);
    let served = served(host, answers(Some(said_by(None)), None), true).await;
    let held = |vm: &HostVm| {
        vm.note
            .as_ref()
            .is_some_and(|note| note.contains("shuts down"))
    };
    assert!(held(&rounds_until(&served, "web", held).await));
    assert_eq!(boots(&served, "web"), 0);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_than_four_guests_are_booted_at_a_time() {
    let host = of_two();
    let names = ["a", "b", "c", "d", "e", "f"];
    for name in names {
        host.crash(name, false);
        std::fs::write(host.run_dir(name).join(BOOT_WAITS), "").unwrap();
    }
    let served = served(host, answers(Some(said_by(None)), None), false).await;
    served.agent.boot_round().await;
    let begun = || names.iter().filter(|name| boots(&served, name) > 0).count();
    let deadline = Instant::now() + Duration::from_secs(60);
    while begun() < AT_ONCE && Instant::now() < deadline {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        (begun(), served.agent.boots.turns.available_permits()),
        (AT_ONCE, 0)
    );
    for name in names {
        std::fs::remove_file(served.host.run_dir(name).join(BOOT_WAITS)).unwrap();
    }
    for name in names {
        assert!(runs(&rounds_until(&served, name, runs).await));
        served.end(name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_starts_a_vm_without_asking_anybody_and_the_hosts_own_socket_starts_none() {
    let host = of_two();
    host.crash("web", false);
    let served = served(host, nobody(), false).await;
    served.agent.boot_round().await;
    let refused = served.local().start(&vm("web")).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::NotAllowed);
    served.controller().start(&vm("web")).await.unwrap();
    let shown = served.agent.vm(&vm("web")).await.unwrap();
    assert_eq!((shown.state, shown.note), (VmState::Running, None));
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn booting_alone_by_configuration_counts_only_without_a_second_host() {
    let alone = "boot = \"alone\"";
    let host = TestHost::new().with(alone);
    // Its table is older than its VM: without one it would not know that it has no neighbours.
    godwit_store::save_json(
        &host.config.state_dir.join("site.json"),
        &SiteTable::default(),
    )
    .unwrap();
    host.crash("web", false);
    let first = served(host, nobody(), false).await;
    assert!(!first.local().host().await.unwrap().boot_alone_ignored);
    assert!(runs(&rounds_until(&first, "web", runs).await));
    first.end("web");
    let host = of_two().with(alone);
    host.crash("web", false);
    let second = served(host, nobody(), false).await;
    assert!(second.local().host().await.unwrap().boot_alone_ignored);
    second.agent.boot_round().await;
    let shown = second.agent.vm(&vm("web")).await.unwrap();
    assert!(shown.note.unwrap().contains("boot-alone"));
    second.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_vm_is_deleted_and_not_booted_meanwhile() {
    let host = of_two();
    host.crash("web", true);
    let served = served(host, nobody(), false).await;
    served.agent.boot_round().await;
    let revives = served.host.run_dir("web").join(REVIVES);
    std::fs::write(&revives, "").unwrap();
    let refused = served.controller().delete_vm(&vm("web")).await.unwrap_err();
    assert!(refused.to_string().contains("look again"), "{refused}");
    std::fs::remove_file(revives).unwrap();
    served.controller().delete_vm(&vm("web")).await.unwrap();
    let record = served.host.records().record(&vm("web")).unwrap();
    assert_eq!(record.phase, Phase::Absent);
    assert_eq!(boots(&served, "web"), 0);
    assert!(served.agent.supervisor.find(&vm("web")).is_none());
}

#[test]
fn an_answer_is_from_whom_it_was_asked() {
    let b = Whom::Host(neighbour("b"));
    assert!(is_from(&said_by(Some("b")), &b));
    let other: HostName = host_name("c");
    assert!(!is_from(&said_by(Some(other.as_str())), &b));
    let mut in_charge = said_by(Some("b"));
    in_charge.in_charge = true;
    assert!(!is_from(&in_charge, &b));
}

#[test]
fn an_old_copy_of_a_neighbour_whose_certificate_was_replaced_does_not_answer_for_it() {
    let now = now_unix_s();
    let authority = Authority::create(now).unwrap();
    let identity = authority.identity(&Role::Host(host_name("b")), now);
    let holder = identity.unwrap().holder().unwrap();
    let enrolled = Enrolled {
        life: holder.life.clone(),
        revocations: Arc::default(),
    };
    assert!(enrolled.admits(&holder));
    let later = made_before(&holder.life, holder.order + 1);
    enrolled.revocations.revoke(later);
    assert!(!enrolled.admits(&holder));
}
