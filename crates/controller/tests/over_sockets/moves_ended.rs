//! How a move ends for the controller where one of its hosts is away, lost its report, or tells of another one.

use crate::migrations::{begin, gave_and_waits, house, watch_to_the_end};
use crate::scripted::{Agent, DEADLINE, House, hand_over, host, to, vm};
use godwit_types::MigrationId;
use godwit_types::control_api::HostState;
use godwit_types::migration::Outcome;

/// Waits until both hosts have been asked about a migration once more, from the beginning.
async fn asked_again(agents: [&Agent; 2], id: &MigrationId) {
    let call = format!("report {id}");
    for agent in agents {
        // What was asked for before may still be on its way.
        let until = agent.calls(&call) + 2;
        let asked = async {
            while agent.calls(&call) < until {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, asked)
            .await
            .expect("nobody asked for its report");
    }
}

#[tokio::test]
async fn a_report_of_another_vm_or_of_other_hosts_ends_no_move() {
    let (house, a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    let good = b.script().reports[&id].clone();
    let (mut of_another_vm, mut of_other_hosts) = (good.clone(), good.clone());
    of_another_vm.vm = vm("aaa");
    of_other_hosts.from = host("c");
    for (agent, mut other) in [(&a, of_another_vm), (&b, of_other_hosts)] {
        other.outcome = Some(Outcome::Completed);
        other.phase = godwit_types::migration::Phase::Ended;
        agent.script().reports.insert(id.clone(), other);
    }
    asked_again([&a, &b], &id).await;
    let report = house.client().migration(&id).await.unwrap();
    assert_eq!(report.outcome, None, "{report:?}");
    for agent in [&a, &b] {
        agent.script().reports.insert(id.clone(), good.clone());
    }
    hand_over(&a, &b, "web", &id);
    let last = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(last.outcome, Some(Outcome::Completed));
}

/// A controller that was gone while its migration was about to begin: the source was never told.
async fn interrupted(house: &mut House, forgets: [&Agent; 2]) -> MigrationId {
    let id = begin(house, &to("b")).await;
    house.stop().await;
    for agent in forgets {
        agent.script().reports.clear();
    }
    id
}

#[tokio::test]
async fn a_destination_that_dies_while_it_is_prepared_does_not_keep_the_vm_moving_for_ever() {
    let (mut house, a, mut b) = house().await;
    let id = interrupted(&mut house, [&a, &b]).await;
    b.cut().await;
    house.start().await;
    let report = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Failed));
    assert!(a.calls(&format!("cancel {id} of web")) > 0, "it is bound");
    let free = async |house: &House| house.vm("web").await.migration.is_none();
    house.until(free).await;
    assert_eq!(house.vm("web").await.host, Some(host("a")));
}

#[tokio::test]
async fn a_source_that_gave_the_vm_and_lost_its_report_ends_no_move() {
    let (mut house, a, mut b) = house().await;
    let id = interrupted(&mut house, [&a, &b]).await;
    b.cut().await;
    gave_and_waits(&a, &id);
    house.start().await;
    a.until_called(&format!("cancel {id} of web")).await;
    asked_again([&a, &a], &id).await;
    assert_eq!(house.client().migration(&id).await.unwrap().outcome, None);
}

#[tokio::test]
async fn a_fenced_source_that_never_told_its_destination_ends_the_move() {
    let (mut house, mut a, b) = house().await;
    let id = interrupted(&mut house, [&a, &b]).await;
    a.cut().await;
    house.start().await;
    b.until_called(&format!("report {id}")).await;
    assert_eq!(house.client().migration(&id).await.unwrap().outcome, None);
    house.until_host("a", HostState::Unreachable).await;
    house.client().fenced(&host("a")).await.unwrap();
    let report = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Failed));
}

#[tokio::test]
async fn a_destination_that_failed_ends_no_move_while_its_source_may_go_on() {
    let (house, mut a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    a.script().vms.get_mut(&vm("web")).unwrap().migration = Some(id.clone());
    a.cut().await;
    b.script().reports.get_mut(&id).unwrap().reason = Some("its VM process died".into());
    b.says(&id, Some(Outcome::Failed));
    asked_again([&b, &b], &id).await;
    assert_eq!(house.client().migration(&id).await.unwrap().outcome, None);
    assert_eq!(house.vm("web").await.migration, Some(id.to_string()));
    // Its agent is back and has not found the migration again, but the VM's process names it.
    let report = a.script().reports.remove(&id).unwrap();
    a.heal().await;
    a.until_called(&format!("report {id}")).await;
    asked_again([&a, &b], &id).await;
    assert_eq!(house.client().migration(&id).await.unwrap().outcome, None);
    a.script().reports.insert(id.clone(), report);
    a.says(&id, Some(Outcome::Failed));
    let last = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(last.outcome, Some(Outcome::Failed));
    house.until_not_moving("web").await;
}

#[tokio::test]
async fn a_destination_that_failed_ends_the_move_once_its_source_is_off_or_moves_nothing() {
    for is_fenced in [true, false] {
        let (house, mut a, b) = house().await;
        let id = begin(&house, &to("b")).await;
        b.says(&id, Some(Outcome::Failed));
        match is_fenced {
            true => {
                a.cut().await;
                house.until_host("a", HostState::Unreachable).await;
                assert_eq!(house.client().migration(&id).await.unwrap().outcome, None);
                house.client().fenced(&host("a")).await.unwrap();
            }
            false => drop(a.script().reports.remove(&id)),
        }
        let last = watch_to_the_end(&house, &id).await.pop().unwrap();
        assert_eq!(last.outcome, Some(Outcome::Failed), "fenced: {is_fenced}");
    }
}

#[tokio::test]
async fn a_source_that_is_gone_for_good_does_not_keep_what_its_destination_gave_up_open_for_ever() {
    let (mut house, mut a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    a.cut().await;
    b.says(&id, Some(Outcome::Failed));
    asked_again([&b, &b], &id).await;
    assert_eq!(house.client().migration(&id).await.unwrap().outcome, None);
    house.stop().await;
    house.config.source_gives_up = std::time::Duration::ZERO;
    house.start().await;
    let last = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(last.outcome, Some(Outcome::Failed));
    house.until_not_moving("web").await;
}
