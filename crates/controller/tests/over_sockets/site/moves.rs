//! Moves and drains that are cancelled, refused, or wait for a host or an earlier handover.

use super::{STOP, given_to_b, held_twice, house, on, run_on_a, says_it_gave};
use crate::scripted::{Agent, House, host, refused, to, vm};
use godwit_types::control_api::{CancelRequest, HostState, KeepRequest, ResolveRequest};
use godwit_types::drain::{DrainRequest, DrainState};
use godwit_types::site::Claim;
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation};

#[tokio::test]
async fn a_move_is_cancelled_while_its_destination_is_still_being_told() {
    let (house, a, b) = house().await;
    let go_on = b.hold("prepare");
    let client = house.client();
    let cancel = async {
        b.until_called("prepare").await;
        let report = house.client().migrations().await.unwrap().remove(0);
        let cancelled = house
            .client()
            .cancel(&report.id, &CancelRequest::default())
            .await;
        // Before the person is answered: this controller may be gone in a moment.
        let named = format!("cancel {} of web", report.id);
        let told = (a.calls(&named), b.calls(&named));
        go_on.send_replace(true);
        assert_eq!(told, (1, 1), "both hosts refuse it from then on");
        (report.id, cancelled)
    };
    let (web, request) = (vm("web"), to("b"));
    let (begun, (id, cancelled)) = tokio::join!(client.migrate(&web, &request), cancel);
    cancelled.unwrap();
    let error = begun.unwrap_err();
    assert!(error.to_string().contains("was cancelled"), "{error}");
    assert_eq!(a.calls("migrate"), 0);
    house.until_not_moving("web").await;
    let report = house.client().migration(&id).await.unwrap();
    assert!(report.outcome.is_some(), "{report:?}");
    assert_eq!(house.vm("web").await.state, VmState::Running);
}

#[tokio::test]
async fn a_cancel_that_the_source_has_not_heard_is_not_said_to_be_done() {
    let (house, mut a, b) = house().await;
    let go_on = b.hold("prepare");
    let client = house.client();
    let cancel = async {
        b.until_called("prepare").await;
        let report = house.client().migrations().await.unwrap().remove(0);
        a.cut().await;
        house.until_host("a", HostState::Unreachable).await;
        let request = CancelRequest::default();
        let cancelled = house.client().cancel(&report.id, &request).await;
        go_on.send_replace(true);
        cancelled
    };
    let (web, request) = (vm("web"), to("b"));
    let (begun, cancelled) = tokio::join!(client.migrate(&web, &request), cancel);
    begun.unwrap_err();
    let error = ApiError::from(cancelled.unwrap_err());
    assert_eq!(error.code, ErrorCode::HostUnreachable);
    assert!(error.message.contains("not known yet"), "{error}");
}

#[tokio::test]
async fn a_vm_whose_state_does_not_let_it_move_is_refused_with_what_helps() {
    let (house, a, b) = house().await;
    let client = house.client();
    let cases = [
        (VmState::Paused, "godwit vm resume web"),
        (VmState::Panicked, "godwit vm reset web"),
        (VmState::Crashed, "godwit vm stop web"),
        (VmState::Stopped, "godwit vm start web' first"),
        (VmState::Incoming, "godwit vm show web"),
    ];
    for (state, helps) in cases {
        a.turns("web", state);
        house.until_vm("web", state, "a").await;
        let error = client.migrate(&vm("web"), &to("b")).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::WrongState, "{error}");
        assert!(error.to_string().contains(helps), "{state}: {error}");
    }
    a.turns("web", VmState::Running);
    b.has("web", VmState::Running, a.generation("web").0 + 5, true);
    house.until_vm("web", VmState::RunningTwice, "a").await;
    let error = client.migrate(&vm("web"), &to("b")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::RunningTwice, "{error}");
    assert!(error.to_string().contains("--keep HOST"), "{error}");
    b.script().vms.clear();
    let next = Generation(a.generation("web").0 + 1);
    says_it_gave(&house, &a, next).await;
    let error = client.migrate(&vm("web"), &to("b")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InDoubt, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("godwit vm resolve web --run-on a --confirm-fenced b"),
        "{text}"
    );
}

#[tokio::test]
async fn a_move_waits_for_the_end_of_the_last_handover_and_disturbs_nobody_meanwhile() {
    let (house, a, b) = house().await;
    let generation = a.generation("web");
    // The doubt was settled: the VM runs on a, and b has not heard that a knows.
    let gave = Claim::Gave {
        generation,
        to: host("a"),
    };
    b.records("web", VmState::Stopped, generation, gave);
    b.until_heard().await;
    let client = house.client();
    let refused = client.migrate(&vm("web"), &to("b")).await;
    refused!(refused, Unconfirmed);
    assert_eq!((a.calls("migrate"), b.calls("prepare")), (0, 0));
    assert!(client.migrations().await.unwrap().is_empty());
    let (web, request) = (vm("web"), to("b"));
    let settle = async {
        let moved = Claim::Moved {
            generation,
            to: host("a"),
        };
        b.records("web", VmState::Stopped, generation, moved);
    };
    let (begun, ()) = tokio::join!(client.migrate(&web, &request), settle);
    begun.unwrap();
}

#[tokio::test]
async fn a_vm_that_waits_for_its_host_to_boot_it_is_not_dropped_by_a_drain() {
    let (house, _a, b) = house().await;
    house.running("waits", "b").await;
    b.turns("waits", VmState::Crashed);
    house.until_vm("waits", VmState::Crashed, "b").await;
    let client = house.client();
    let request = DrainRequest::default();
    client.drain(&host("b"), &request).await.unwrap();
    let done = async |house: &House| {
        let view = house.client().drain_view(&host("b")).await.unwrap();
        view.state == DrainState::Done
    };
    house.until(done).await;
    assert!(b.script().vms.contains_key(&vm("waits")), "it was dropped");
    assert_eq!(b.calls("delete waits"), 0);
    let view = client.drain_view(&host("b")).await.unwrap();
    // The host is not empty: nobody is to switch it off in good faith.
    let stays = view.staying().next().expect("it is said to be off");
    let why = &stays.reasons[0].message;
    assert!(why.contains("godwit vm stop waits"), "{why}");
}

/// Host b took the VM and gave it on: its answer that it does not hold it is no reason to run the older copy on.
#[tokio::test]
async fn a_persons_word_runs_no_copy_on_that_was_taken_and_given_on() {
    let (house, a, b) = house().await;
    let next = given_to_b(&house, &a).await;
    let later = Generation(next.0 + 1);
    let moved = Claim::Moved {
        generation: later,
        to: host("c"),
    };
    b.records("web", VmState::Stopped, later, moved);
    let refused = house.client().resolve(&vm("web"), &run_on_a()).await;
    let error = ApiError::from(refused.unwrap_err());
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    assert_eq!(a.calls("resolve web"), 0);
}

#[tokio::test]
async fn no_copy_is_ended_for_one_that_is_held_no_more() {
    let (house, a, b) = house().await;
    held_twice(&house, &a, &b).await;
    let go_on = b.hold("survey");
    let gives_way = async {
        b.until_called("survey web").await;
        b.script().vms.clear();
        go_on.send_replace(true);
    };
    let (client, keep) = (house.client(), KeepRequest { host: host("b") });
    let name = vm("web");
    let (refused, ()) = tokio::join!(client.keep(&name, &keep), gives_way);
    let error = ApiError::from(refused.unwrap_err());
    assert!(
        error.message.contains("not hold VM web any more"),
        "{error}"
    );
    assert_eq!(a.calls("stopped web"), 0);
}

/// The hosts are cut off from each other, and the one that took the VM is silent by now: what is in doubt is the newest.
#[tokio::test]
async fn the_newest_handover_is_not_called_an_older_one_once_its_taker_was_heard_and_is_silent() {
    let (house, a, mut b) = house().await;
    let given = given_to_b(&house, &a).await;
    let holds = Claim::Holds {
        generation: given,
        on: true,
    };
    b.records("web", VmState::Running, given, holds);
    house.until_vm("web", VmState::Running, "b").await;
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    house.until_vm("web", VmState::InDoubt, "a").await;
    let note = house.vm("web").await.note.unwrap();
    assert!(
        note.contains("godwit vm resolve web --run-on a --confirm-fenced b"),
        "{note}"
    );
    // The command that is named is accepted.
    house
        .client()
        .resolve(&vm("web"), &run_on_a())
        .await
        .unwrap();
    assert_eq!(a.calls("resolve web"), 1);
}

/// A person has a host give up what it has of VM web.
fn gives_up_on(name: &str) -> ResolveRequest {
    ResolveRequest {
        run_on: host(name),
        give_up: true,
        confirm_fenced: None,
    }
}

/// VM web was given from a to b; both were said to be off, it was started on c, and a is back.
async fn started_on_c_since(a_keeps_guest: bool) -> (House, Agent, Agent, String) {
    let (house, mut a, mut b) = house().await;
    let c = house.host("c").await;
    let next = Generation(a.generation("web").0 + 1);
    says_it_gave(&house, &a, next).await;
    for host in [&mut a, &mut b] {
        host.cut().await;
    }
    for name in ["a", "b"] {
        house.until_host(name, HostState::Unreachable).await;
        house.client().fenced(&host(name)).await.unwrap();
    }
    house.client().start(&vm("web"), &on("c")).await.unwrap();
    a.script().keeps_guest = a_keeps_guest;
    a.heal().await;
    let told = format!("overtaken web {}", c.generation("web"));
    a.until_called(&format!("{told} false")).await;
    a.until_heard().await;
    (house, a, c, told)
}

#[tokio::test]
async fn a_gift_of_before_a_later_start_is_given_up_and_blocks_neither_start_nor_move() {
    let (house, a, c, _) = started_on_c_since(false).await;
    let client = house.client();
    client.stop(&vm("web"), &STOP).await.unwrap();
    client.start(&vm("web"), &on("c")).await.unwrap();
    client.migrate(&vm("web"), &to("a")).await.unwrap();
    assert_eq!((a.calls("overtaken"), c.calls("overtaken")), (1, 0));
}

#[tokio::test]
async fn an_overtaken_gift_with_a_guest_waits_for_a_persons_word() {
    let (house, a, c, told) = started_on_c_since(true).await;
    let client = house.client();
    client.stop(&vm("web"), &STOP).await.unwrap();
    let refused = client.start(&vm("web"), &on("c")).await;
    let text = ApiError::from(refused.unwrap_err()).message;
    assert!(
        text.contains("'godwit vm resolve web --give-up-on a'"),
        "{text}"
    );
    assert_eq!(a.calls("overtaken"), 1, "it is not asked at every poll");
    // The copy that is to stay is asked for anew: c has lost it since it was heard.
    let polls = c.hold_polls().await;
    let held = c.script().vms.remove(&vm("web")).unwrap();
    let give_up = gives_up_on("a");
    let refused = client.resolve(&vm("web"), &give_up).await;
    let text = ApiError::from(refused.unwrap_err()).message;
    assert_eq!(a.calls("overtaken"), 1, "{text}");
    c.script().vms.insert(vm("web"), held);
    polls.send_replace(true);
    c.until_heard().await;
    client.resolve(&vm("web"), &give_up).await.unwrap();
    assert_eq!(a.calls(&format!("{told} true")), 1);
    client.start(&vm("web"), &on("c")).await.unwrap();
    assert_eq!(c.calls("overtaken"), 0);
    // Nobody gives up what nobody else holds.
    let c_too = client.resolve(&vm("web"), &gives_up_on("c")).await;
    refused!(c_too, WrongState);
    assert_eq!(c.calls("overtaken"), 0);
}

#[tokio::test]
async fn a_gift_older_than_what_was_lost_with_its_host_ends_once_a_person_names_that_host() {
    let (house, a, mut c, told) = started_on_c_since(true).await;
    let client = house.client();
    let bare = gives_up_on("a");
    c.cut().await;
    house.until_host("c", HostState::Unreachable).await;
    let silent = client.resolve(&vm("web"), &bare).await;
    assert!(silent.is_err(), "c may come back with what it holds");
    client.fenced(&host("c")).await.unwrap();
    // The words that were right while c held it do not end what may be the only copy.
    let refusals = [
        client.start(&vm("web"), &on("a")).await.map(drop),
        client.resolve(&vm("web"), &bare).await.map(drop),
    ];
    for refused in refusals {
        let text = ApiError::from(refused.unwrap_err()).message;
        assert!(
            text.contains("vm resolve web --give-up-on a --confirm-fenced c'"),
            "{text}"
        );
    }
    assert_eq!(a.calls(&format!("{told} true")), 0);
    let named = ResolveRequest {
        confirm_fenced: Some(host("c")),
        ..bare
    };
    client.resolve(&vm("web"), &named).await.unwrap();
    assert_eq!(a.calls(&format!("{told} true")), 1);
    client.start(&vm("web"), &on("a")).await.unwrap();
    house.until_vm("web", VmState::Running, "a").await;
}

#[tokio::test]
async fn a_gift_older_than_what_its_host_let_go_ends_by_a_persons_word() {
    let (house, a, c, told) = started_on_c_since(true).await;
    let client = house.client();
    client.stop(&vm("web"), &STOP).await.unwrap();
    c.script().vms.remove(&vm("web"));
    c.until_heard().await;
    let refused = client.start(&vm("web"), &on("c")).await;
    let text = ApiError::from(refused.unwrap_err()).message;
    assert!(
        text.contains("vm resolve web --give-up-on a' asks"),
        "{text}"
    );
    assert_eq!(a.calls(&format!("{told} true")), 0);
    client.resolve(&vm("web"), &gives_up_on("a")).await.unwrap();
    assert_eq!(a.calls(&format!("{told} true")), 1);
    client.start(&vm("web"), &on("c")).await.unwrap();
    house.until_vm("web", VmState::Running, "c").await;
}
