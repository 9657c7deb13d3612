//! Emptying a host over real sockets: everything leaves in order, restarts in the middle, and what stays is told why.

use crate::scripted::{
    ANYWHERE, Agent, DEADLINE, DRAIN, FORCED, House, hand_over, host, refused, spec, to, vm,
};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_types::control_api::{CancelRequest, HostState, StartRequest};
use godwit_types::drain::{DrainRequest, DrainState, DrainStep, DrainView, DrainVm};
use godwit_types::forecast::{DirtyAge, DirtyRate, LinkMeasured};
use godwit_types::migration::{MigrateRequest, Outcome};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, MigrationId, PortGroup, VmSpec};

/// Hosts a and b, with these VMs running on b.
async fn house(vms: &[&str]) -> (House, Agent, Agent) {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    for name in vms {
        house.running(name, "b").await;
    }
    (house, a, b)
}

/// Migrations that a source has begun and not ended, with their VMs.
fn under_way(from: &Agent) -> Vec<(MigrationId, String)> {
    let script = from.script();
    let open = script
        .reports
        .values()
        .filter(|report| report.outcome.is_none() && report.from == from.name);
    open.map(|report| (report.id.clone(), report.vm.to_string()))
        .collect()
}

/// Waits for a move to reach its source, which nobody announces.
async fn until_under_way(from: &Agent) {
    let begun = async {
        while under_way(from).is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, begun)
        .await
        .expect("no move began");
}

/// Plays the hosts' part of every move under way.
fn finish_moves(from: &Agent, to: &Agent) {
    for (id, name) in under_way(from) {
        if to.script().reports.contains_key(&id) {
            hand_over(from, to, &name, &id);
        }
    }
}

async fn view(house: &House) -> DrainView {
    house.client().drain_view(&host("b")).await.unwrap()
}

/// Lets moves come to their end until nothing is left to move.
async fn until_done(house: &House, from: &Agent, to: &Agent) -> DrainView {
    house
        .until(async |house: &House| {
            finish_moves(from, to);
            view(house).await.state == DrainState::Done
        })
        .await;
    view(house).await
}

fn one<'a>(view: &'a DrainView, name: &str) -> &'a DrainVm {
    view.vms.iter().find(|found| found.vm == vm(name)).unwrap()
}

fn idle() -> DirtyRate {
    let age = |seconds| DirtyAge { seconds, mib: 0.1 };
    DirtyRate {
        ram_mib: 64,
        data_mib: 32,
        ages: vec![age(0.1), age(0.4)],
    }
}

fn gigabit() -> LinkMeasured {
    LinkMeasured {
        bytes_per_s: 118e6,
        rtt_ms: 0.5,
        streams: 2,
        seconds: 0.2,
    }
}

#[tokio::test]
async fn everything_leaves_and_the_host_takes_no_vms_until_that_is_ended() {
    let (house, a, b) = house(&["one", "two", "three"]).await;
    b.script().rate = Some(idle());
    b.script().link = Some(gigabit());
    let client = house.client();
    client.create_vm(&spec("off")).await.unwrap();
    let begun = client.drain(&host("b"), &DRAIN).await;
    assert_eq!(begun.unwrap().state, DrainState::Draining);
    let again = client.drain(&host("b"), &DRAIN).await;
    refused!(again, WrongState);
    let done = until_done(&house, &b, &a).await;
    for name in ["one", "two", "three"] {
        let moved = one(&done, name);
        assert_eq!(
            (moved.step, &moved.to),
            (DrainStep::Moved, &Some(host("a")))
        );
        assert!(moved.prediction.as_ref().unwrap().total_s > 0.0);
        assert_eq!(house.vm(name).await.state, VmState::Running);
    }
    assert_eq!(done.vms.len(), 3);
    assert_eq!(b.calls("migrate"), 3);
    // The link was measured for all of them together.
    assert_eq!((b.calls("measure"), b.calls("link-send")), (3, 1));
    // The host stays empty until somebody ends that.
    assert!(client.host(&host("b")).await.unwrap().draining);
    let on_b = StartRequest {
        on: Some(host("b")),
    };
    refused!(client.start(&vm("off"), &on_b).await, WrongState);
    client.start(&vm("off"), &ANYWHERE).await.unwrap();
    assert_eq!(house.vm("off").await.host, Some(host("a")));
    client.undrain(&host("b")).await.unwrap();
    assert!(!client.host(&host("b")).await.unwrap().draining);
    refused!(client.drain_view(&host("b")).await, NotDraining);
    refused!(client.undrain(&host("b")).await, NotDraining);
    refused!(client.undrain(&host("zz")).await, UnknownHost);
}

#[tokio::test]
async fn no_more_at_once_than_asked() {
    let (house, a, b) = house(&["one", "two", "three"]).await;
    let request = DrainRequest {
        at_once: Some(1),
        ..DrainRequest::default()
    };
    house.client().drain(&host("b"), &request).await.unwrap();
    house
        .until(async |house: &House| {
            let moving = under_way(&b);
            assert!(moving.len() <= 1, "{moving:?}");
            finish_moves(&b, &a);
            view(house).await.state == DrainState::Done
        })
        .await;
    assert_eq!(view(&house).await.at_once, 1);
}

#[tokio::test]
async fn a_restarted_controller_goes_on_where_it_was() {
    let (mut house, a, b) = house(&["one", "two", "three"]).await;
    let request = DrainRequest {
        at_once: Some(1),
        ..DrainRequest::default()
    };
    house.client().drain(&host("b"), &request).await.unwrap();
    until_under_way(&b).await;
    house.stop().await;
    // The hosts finish what they had begun while the controller is away.
    finish_moves(&b, &a);
    house.start().await;
    let done = until_done(&house, &b, &a).await;
    assert_eq!(done.staying().count(), 0, "{done:?}");
    assert!(done.vms.iter().all(|vm| vm.step == DrainStep::Moved));
    assert_eq!(b.calls("migrate"), 3);
    // What is done stays known, and the host stays empty.
    house.stop().await;
    house.start().await;
    assert_eq!(view(&house).await.state, DrainState::Done);
    assert!(house.client().host(&host("b")).await.unwrap().draining);
}

#[tokio::test]
async fn what_cannot_move_is_told_why_and_runs_on() {
    let (house, a, b) = house(&["free", "held"]).await;
    let client = house.client();
    let odd = PortGroup::new("odd").unwrap();
    if let Some(info) = b.script().info.as_mut() {
        info.port_groups.insert(odd, "br9".into());
    }
    house
        .until(async |house: &House| {
            let view = house.client().host(&host("b")).await.unwrap();
            view.info.port_groups.len() == 2
        })
        .await;
    let text = "name = \"pinned\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/k\"\n[[nic]]\nport_group = \"odd\"";
    client
        .create_vm(&VmSpec::from_toml(text).unwrap())
        .await
        .unwrap();
    let on_b = StartRequest {
        on: Some(host("b")),
    };
    client.start(&vm("pinned"), &on_b).await.unwrap();
    client.pause(&vm("held")).await.unwrap();
    house.until_vm("held", VmState::Paused, "b").await;
    let planned = client
        .drain(
            &host("b"),
            &DrainRequest {
                dry_run: true,
                ..DrainRequest::default()
            },
        )
        .await
        .unwrap();
    client.drain(&host("b"), &DRAIN).await.unwrap();
    let done = until_done(&house, &b, &a).await;
    assert_eq!(planned.state, DrainState::Planned);
    assert_eq!(one(&planned, "free").step, DrainStep::Waiting);
    assert_eq!(one(&done, "free").step, DrainStep::Moved);
    for view in [&planned, &done] {
        let pinned = one(view, "pinned");
        assert_eq!(pinned.step, DrainStep::CannotMove);
        assert_eq!(pinned.reasons[0].code, ErrorCode::MissingBridge);
        assert_eq!(pinned.reasons[0].host.as_deref(), Some("a"));
        let held = one(view, "held");
        assert_eq!(held.step, DrainStep::CannotMove);
        assert!(held.reasons[0].message.contains("godwit vm resume held"));
    }
    assert_eq!(house.vm("pinned").await.state, VmState::Running);
    assert_eq!(house.vm("held").await.state, VmState::Paused);
    assert_eq!((b.calls("migrate"), b.calls("stopped")), (1, 0));
}

#[tokio::test]
async fn a_dry_run_moves_nothing_and_lists_every_refusal() {
    let (house, a, b) = house(&["web"]).await;
    let refusal = |text: &str| ApiError::new(ErrorCode::Preflight, text);
    a.script().incoming_refusals = vec![refusal("the clocks differ"), refusal("no port is free")];
    let request = DrainRequest {
        dry_run: true,
        ..DrainRequest::default()
    };
    let planned = house.client().drain(&host("b"), &request).await.unwrap();
    let web = one(&planned, "web");
    assert_eq!(web.step, DrainStep::CannotMove);
    let texts: Vec<&str> = web.reasons.iter().map(|r| r.message.as_str()).collect();
    assert_eq!(texts, ["the clocks differ", "no port is free"]);
    refused!(house.client().drain_view(&host("b")).await, NotDraining);
    assert!(!house.client().host(&host("b")).await.unwrap().draining);
    assert_eq!(b.calls("migrate"), 0);
}

#[tokio::test]
async fn a_vm_whose_moves_fail_is_tried_three_times_and_left() {
    let (house, a, b) = house(&["web"]).await;
    house.client().drain(&host("b"), &DRAIN).await.unwrap();
    house
        .until(async |house: &House| {
            for (id, _) in under_way(&b) {
                if a.script().reports.contains_key(&id) {
                    a.says(&id, Some(Outcome::Failed));
                    b.says(&id, Some(Outcome::Failed));
                }
            }
            view(house).await.state == DrainState::Done
        })
        .await;
    let done = view(&house).await;
    let web = one(&done, "web");
    assert_eq!((web.step, web.tries), (DrainStep::CannotMove, 3));
    assert_eq!(web.reasons[0].code, ErrorCode::MigrationFailed);
    assert_eq!(b.calls("migrate"), 3);
    assert_eq!(house.vm("web").await.state, VmState::Running);
}

#[tokio::test]
async fn a_move_that_somebody_cancels_is_not_tried_again() {
    let (house, _a, b) = house(&["web"]).await;
    let client = house.client();
    client.drain(&host("b"), &DRAIN).await.unwrap();
    until_under_way(&b).await;
    let (id, _) = under_way(&b).remove(0);
    house
        .until(async |house: &House| house.vm("web").await.migration.is_some())
        .await;
    client.cancel(&id, &CancelRequest::default()).await.unwrap();
    house
        .until(async |house: &House| view(house).await.state == DrainState::Done)
        .await;
    let done = view(&house).await;
    assert_eq!(one(&done, "web").step, DrainStep::CannotMove);
    assert!(
        one(&done, "web").reasons[0]
            .message
            .contains("was cancelled")
    );
    assert_eq!(b.calls("migrate"), 1);
}

#[tokio::test]
async fn a_drain_that_is_ended_begins_no_further_move() {
    let (house, a, b) = house(&["one", "two"]).await;
    let request = DrainRequest {
        at_once: Some(1),
        ..DrainRequest::default()
    };
    let client = house.client();
    client.drain(&host("b"), &request).await.unwrap();
    let mut events = client.drain_events(&host("b")).await.unwrap();
    until_under_way(&b).await;
    let done = client.undrain(&host("b")).await.unwrap();
    assert!(done.message.contains("takes VMs again"), "{}", done.message);
    // Its last event says that it was ended.
    let mut last = None;
    while let Some(event) = events.next(DEADLINE).await.unwrap() {
        assert_eq!(event.name, "drain");
        last = serde_json::from_str::<DrainView>(&event.data).ok();
    }
    assert_eq!(last.unwrap().state, DrainState::Stopped);
    finish_moves(&b, &a);
    house
        .until(async |house: &House| {
            let views = house.client().vms().await.unwrap();
            views.iter().all(|view| view.migration.is_none())
        })
        .await;
    assert_eq!(b.calls("migrate"), 1);
    // It takes VMs again, also by migration.
    let (stays, goes) = match house.vm("one").await.host == Some(host("a")) {
        true => ("two", "one"),
        false => ("one", "two"),
    };
    assert_eq!(house.vm(stays).await.host, Some(host("b")));
    let back = MigrateRequest {
        dry_run: true,
        ..to("b")
    };
    let answer = client.migrate(&vm(goes), &back).await.unwrap();
    assert!(matches!(answer, MigrateAnswer::Checked(report) if report.refusals.is_empty()));
}

#[tokio::test]
async fn two_requests_at_once_begin_one_drain() {
    let (house, a, b) = house(&["web"]).await;
    let client = house.client();
    let (b_name, request) = (host("b"), DrainRequest::default());
    let drain = || client.drain(&b_name, &request);
    let answers = tokio::join!(drain(), drain());
    let answers = [answers.0, answers.1];
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
    for refused in answers.into_iter().filter(|answer| answer.is_err()) {
        refused!(refused, WrongState);
    }
    until_done(&house, &b, &a).await;
    assert_eq!(b.calls("migrate"), 1);
}

#[tokio::test]
async fn a_move_that_is_just_beginning_when_the_drain_is_ended_goes_on() {
    let (house, a, b) = house(&["web"]).await;
    let client = house.client();
    let go_on = a.hold("prepare");
    client.drain(&host("b"), &DRAIN).await.unwrap();
    a.until_called("prepare").await;
    let mut events = client.drain_events(&host("b")).await.unwrap();
    client.undrain(&host("b")).await.unwrap();
    while events.next(DEADLINE).await.unwrap().is_some() {}
    // The drain's task has heard of it too.
    for _ in 0..3 {
        client.vms().await.unwrap();
    }
    go_on.send_replace(true);
    until_under_way(&b).await;
    finish_moves(&b, &a);
    house
        .until(async |house: &House| {
            let web = house.vm("web").await;
            web.migration.is_none() && web.host == Some(host("a"))
        })
        .await;
}

#[tokio::test]
async fn a_drain_that_is_ended_while_it_measures_begins_no_move() {
    let (house, a, b) = house(&["web"]).await;
    b.script().rate = Some(idle());
    b.script().link = Some(gigabit());
    let client = house.client();
    let go_on = b.hold("measure");
    client.drain(&host("b"), &DRAIN).await.unwrap();
    b.until_called("measure").await;
    client.undrain(&host("b")).await.unwrap();
    go_on.send_replace(true);
    // Several questions to both hosts later nothing has begun.
    let check = MigrateRequest {
        dry_run: true,
        ..to("a")
    };
    for _ in 0..3 {
        let answer = client.migrate(&vm("web"), &check).await.unwrap();
        assert!(matches!(answer, MigrateAnswer::Checked(_)));
    }
    assert_eq!((a.calls("prepare"), b.calls("migrate")), (0, 0));
    refused!(client.drain_view(&host("b")).await, NotDraining);
}

#[tokio::test]
async fn a_destination_that_is_lost_for_a_moment_is_waited_for() {
    let (mut house, mut a, b) = house(&["web"]).await;
    let lost = async |house: &House| {
        let view = house.client().host(&host("a")).await.unwrap();
        view.state == HostState::Unreachable
    };
    a.cut().await;
    house.until(lost).await;
    let client = house.client();
    client.drain(&host("b"), &DRAIN).await.unwrap();
    // It looks at once, and at each change of the inventory.
    client.create_vm(&spec("off")).await.unwrap();
    assert_eq!(one(&view(&house).await, "web").step, DrainStep::Waiting);
    house.stop().await;
    house.start().await;
    a.heal().await;
    let done = until_done(&house, &b, &a).await;
    assert_eq!(one(&done, "web").step, DrainStep::Moved);
}

#[tokio::test]
async fn a_destination_that_is_closed_for_a_reboot_is_waited_for() {
    let (house, a, b) = house(&["web"]).await;
    let until_closed = async |closing: bool| {
        a.script().info.as_mut().unwrap().closing = closing;
        let heard = async |house: &House| {
            let view = house.client().host(&host("a")).await.unwrap();
            view.info.closing == closing
        };
        house.until(heard).await;
    };
    until_closed(true).await;
    let client = house.client();
    client.drain(&host("b"), &DRAIN).await.unwrap();
    // It looks at once, and at each change of the inventory.
    client.create_vm(&spec("off")).await.unwrap();
    assert_eq!(one(&view(&house).await, "web").step, DrainStep::Waiting);
    until_closed(false).await;
    let done = until_done(&house, &b, &a).await;
    assert_eq!(one(&done, "web").step, DrainStep::Moved);
}

#[tokio::test]
async fn bad_requests_are_refused() {
    let (house, _a, _b) = house(&[]).await;
    let client = house.client();
    let none = DrainRequest::default();
    refused!(client.drain(&host("x"), &none).await, UnknownHost);
    let zero = DrainRequest {
        at_once: Some(0),
        ..DrainRequest::default()
    };
    refused!(client.drain(&host("b"), &zero).await, InvalidRequest);
    let itself = DrainRequest {
        to: vec![host("b")],
        ..DrainRequest::default()
    };
    refused!(client.drain(&host("b"), &itself).await, InvalidRequest);
    // An empty host is done at once.
    client.drain(&host("b"), &none).await.unwrap();
    house
        .until(async |house: &House| view(house).await.state == DrainState::Done)
        .await;
    // Nobody is left to take anything.
    house.running("web", "a").await;
    client.drain(&host("a"), &none).await.unwrap();
    house
        .until(async |house: &House| {
            let view = house.client().drain_view(&host("a")).await.unwrap();
            view.state == DrainState::Done
        })
        .await;
    let view = client.drain_view(&host("a")).await.unwrap();
    assert_eq!(view.staying().count(), 1);
    client.stop(&vm("web"), &FORCED).await.unwrap();
    let start = client.start(&vm("web"), &ANYWHERE).await;
    refused!(start, WrongState);
}
