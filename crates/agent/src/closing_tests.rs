//! A host that shuts down, with stub VM processes whose guests are processes that wait.

use super::*;
use crate::api::tests::{Served, put};
use crate::life::Life;
use crate::test_support::{BOOT_FAILS, BOOTED, CLOSED, CLOSES, STATE, TestHost, spec, vm};
use godwit_ownership::Power;
use godwit_rpc::ClientError;
use godwit_types::host_api::CloseRequest;
use godwit_types::site::SiteTable;
use rustix::process::{Signal, kill_process};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// A guest's process, ended with the test.
pub(crate) struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A VM whose guest runs, and does as told when its power key is pressed.
pub(crate) fn guest(host: &TestHost, name: &str, closes: &str) -> Guest {
    host.hold(name, Power::On);
    host.records().remember_boot(&vm(name), "boot-1").unwrap();
    let run_dir = host.run_dir(name);
    std::fs::write(run_dir.join(CLOSES), closes).unwrap();
    let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    let start: u64 = after_name
        .split_whitespace()
        .nth(19)
        .unwrap()
        .parse()
        .unwrap();
    let identity = serde_json::json!({
        "pid": child.id(), "start_time_ticks": start, "accelerator": "tcg", "launch": 1,
    });
    std::fs::write(run_dir.join("qemu.json"), identity.to_string()).unwrap();
    Guest(child)
}

async fn closed(served: &Served) -> BTreeMap<VmName, CloseState> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while served.agent.closing.stage() != ClosingStage::Closed {
        assert!(Instant::now() < deadline, "it came to no end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let shown = served.agent.closing.shown();
    let states = shown.vms.into_iter().map(|seen| (seen.vm, seen.state));
    states.collect()
}

fn steps(served: &Served, name: &str) -> String {
    std::fs::read_to_string(served.host.run_dir(name).join(CLOSED)).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_shuts_down_powers_its_guests_down_and_boots_none_before_it_is_back() {
    let host = TestHost::new().with("guest_shutdown_s = 10\nboot = \"alone\"");
    // Its table is older than its VMs: without one it would not know that it has no neighbours.
    let table = host.config.state_dir.join("site.json");
    godwit_store::save_json(&table, &SiteTable::default()).unwrap();
    let _children = [
        guest(&host, "obeys", "obeys"),
        guest(&host, "deaf", "deaf"),
        guest(&host, "paused", "left"),
    ];
    host.hold("off", Power::Off);
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.close(false).await.unwrap();
    let wanted = [
        ("deaf", CloseState::Ended),
        ("obeys", CloseState::Off),
        ("paused", CloseState::Left),
    ];
    assert_eq!(
        closed(&served).await,
        wanted.map(|(name, state)| (vm(name), state)).into()
    );
    assert!(steps(&served, "obeys").starts_with("press\n"));
    assert!(steps(&served, "deaf").ends_with("end\n"));
    assert_eq!(steps(&served, "off"), "", "nobody touches a VM that is off");

    served.agent.boot_round().await;
    let refused = served.agent.start(&vm("off")).await.unwrap_err();
    assert!(refused.message.contains("shuts down"), "{refused}");
    let boots = |name: &str| served.host.run_dir(name).join(BOOTED).exists();
    assert!(!boots("obeys") && !boots("deaf"));
    // As a power cut leaves them: meant to run, and none of them counts as crashed.
    let to_run = |name| served.host.to_run(&vm(name));
    assert_eq!([to_run("obeys"), to_run("deaf")], [Some(false); 2]);
    assert_eq!(to_run("off"), None);

    served.agent.open().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !boots("obeys") || !boots("deaf") {
        let shown = served.agent.vm(&vm("deaf")).await.unwrap();
        assert!(Instant::now() < deadline, "they are not booted: {shown:?}");
        served.agent.boot_round().await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!boots("off"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_too_old_to_know_that_its_host_shuts_down_presses_no_power_key() {
    let host = TestHost::new().with("guest_shutdown_s = 1500");
    let mut child = guest(&host, "old", "too old");
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.close(false).await.unwrap();
    // Nor is it waited for.
    assert_eq!(
        closed(&served).await,
        [(vm("old"), CloseState::Left)].into()
    );
    let told = served.agent.closing.shown().vms;
    let why = told[0].why.clone().unwrap();
    assert!(why.contains("of an older Godwit"), "{why}");
    let heard = std::fs::read_dir(served.host.run_dir("old")).unwrap();
    assert_eq!(
        heard
            .filter(|file| file.as_ref().unwrap().file_name() == CLOSED)
            .count(),
        0
    );
    assert!(child.0.try_wait().unwrap().is_none(), "its guest runs on");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_died_while_its_host_shut_down_goes_on() {
    let host = TestHost::new();
    let _child = guest(&host, "obeys", "obeys");
    std::fs::write(host.config.run_dir.join(CLOSING_FILE), "boot-1").unwrap();
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.go_on_closing().await.unwrap();
    assert_eq!(
        closed(&served).await,
        [(vm("obeys"), CloseState::Off)].into()
    );
}

#[test]
fn a_mark_that_cannot_be_written_whole_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join(CLOSING_FILE);
    let full = std::path::Path::new("/dev/full");
    if !full.exists() {
        println!("skipped: this machine has no /dev/full");
        return;
    }
    // Whatever is written there does not fit.
    std::os::unix::fs::symlink(full, mark.with_extension("partial")).unwrap();
    assert!(write_whole(&mark, "boot").is_err());
    assert!(std::fs::symlink_metadata(&mark).is_err());
    write_whole(&mark, "boot").unwrap();
    assert_eq!(std::fs::read_to_string(&mark).unwrap(), "boot");
}

#[test]
fn the_mark_of_an_earlier_boot_means_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join(CLOSING_FILE);
    std::fs::write(&mark, "boot-1").unwrap();
    assert!(Closing::open(dir.path(), "boot-1", 1).unwrap().is_on());
    assert!(!Closing::open(dir.path(), "boot-2", 1).unwrap().is_on());
    assert!(!mark.exists(), "VM processes look at it, too");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_says_that_nothing_began_only_where_its_vm_process_was_not_asked() {
    let served = Served::new().await;
    let (controller, web) = (served.controller(), vm("web"));
    controller.put_vm(&put("web", 1)).await.unwrap();
    let began_nothing = async || match controller.start(&web).await {
        Err(ClientError::Refused(refused)) => refused.not_begun,
        other => panic!("{other:?}"),
    };
    served.agent.close(false).await.unwrap();
    assert!(began_nothing().await);
    closed(&served).await;
    served.agent.open().await.unwrap();
    // What comes of it later its VM process alone can say, and this one does not.
    std::fs::write(served.host.run_dir("web").join(BOOT_FAILS), "no").unwrap();
    assert!(!began_nothing().await);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_guests_are_being_powered_down_is_not_opened() {
    let host = TestHost::new();
    let _child = guest(&host, "deaf", "deaf");
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.close(false).await.unwrap();
    let refused = served.agent.open().await.unwrap_err();
    assert!(refused.message.contains("wait for the end"), "{refused}");
    assert!(served.agent.closing.is_on());
}

/// As an agent left it that was closing the host.
fn left_closing(host: &TestHost, progress: serde_json::Value) {
    let run_dir = &host.config.run_dir;
    std::fs::write(run_dir.join(PROGRESS_FILE), progress.to_string()).unwrap();
    std::fs::write(run_dir.join(CLOSING_FILE), "boot-1").unwrap();
}

fn nobody_asked() -> crate::boot::Asker {
    Arc::new(|_, _| {
        let error = ApiError::new(ErrorCode::HostUnreachable, "nobody is there");
        Box::pin(async { Err(error) })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_was_closed_for_a_shutdown_is_open_after_a_soft_reboot() {
    // Of a host that a person closed, and of one that still goes down, the mark stays.
    for (at_shutdown, is_stopping, is_closed) in [
        (true, false, false),
        (false, false, true),
        (true, true, true),
    ] {
        let host = TestHost::new();
        left_closing(
            &host,
            serde_json::json!({"at_shutdown": at_shutdown, "began_s": 0, "is_over": true}),
        );
        let served = Served::of(host, nobody_asked(), is_stopping).await;
        assert!(served.agent.closing.is_on());
        served.agent.go_on_closing().await.unwrap();
        let case = format!("{at_shutdown} {is_stopping}");
        assert_eq!(served.agent.closing.is_on(), is_closed, "{case}");
        assert_eq!(served.agent.info().closing, is_closed, "{case}");
        let mark = served.host.config.run_dir.join(CLOSING_FILE);
        assert_eq!(
            mark.exists(),
            is_closed,
            "VM processes look at it, too: {case}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_open_after_a_soft_reboot_also_where_its_system_manager_says_so_late() {
    // Of one that goes down again the mark stays.
    for is_stopping in [false, true] {
        let host = TestHost::new();
        left_closing(
            &host,
            serde_json::json!({"at_shutdown": true, "began_s": 0, "is_over": true}),
        );
        let said = Arc::new(Mutex::new(vec![Some(is_stopping), None]));
        let rest = Arc::clone(&said);
        let stopping: crate::boot::Stopping = Arc::new(move || {
            let said = lock(&rest).pop().unwrap();
            Box::pin(async move { said })
        });
        let served = Served::with(host, nobody_asked(), stopping).await;
        served.agent.go_on_closing().await.unwrap();
        assert!(served.agent.closing.is_on(), "nobody knows yet");
        for _ in 0..2 {
            served.agent.boot_round().await;
            assert_eq!(served.agent.closing.is_on(), is_stopping);
        }
        assert!(lock(&said).is_empty(), "it is asked until it says");
        let mark = served.host.config.run_dir.join(CLOSING_FILE);
        assert_eq!(mark.exists(), is_stopping);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_says_whether_it_is_for_a_shutdown_also_where_the_host_was_closed_before() {
    // The system manager says so, or who asks does, since the system manager is busy by now.
    for (asked_for_a_shutdown, said, is_noted) in [
        (false, Some(true), true),
        (true, None, true),
        (false, None, false),
    ] {
        let stopping: crate::boot::Stopping = Arc::new(move || Box::pin(async move { said }));
        let served = Served::with(TestHost::new(), nobody_asked(), stopping).await;
        let noted = || {
            let text = std::fs::read(served.host.config.run_dir.join(PROGRESS_FILE)).unwrap();
            serde_json::from_slice::<serde_json::Value>(&text).unwrap()["at_shutdown"] == true
        };
        served.agent.closing.begin(false, BTreeSet::new()).unwrap();
        assert!(!noted());
        let at_shutdown = asked_for_a_shutdown;
        served
            .local()
            .close(&CloseRequest { at_shutdown })
            .await
            .unwrap();
        assert_eq!(noted(), is_noted, "{asked_for_a_shutdown} {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_agent_goes_on_with_the_same_guests_and_the_same_limit() {
    let host = TestHost::new().with("guest_shutdown_s = 100");
    let mut children = [guest(&host, "deaf", "deaf"), guest(&host, "slow", "deaf")];
    // The one before it pressed their power keys, and saw a guest that is gone since.
    let began_s = uptime_s().saturating_sub(100);
    let waits = |name: &str| serde_json::json!({"vm": name, "state": "waits"});
    left_closing(
        &host,
        serde_json::json!({
            "began_s": began_s,
            "pressed_s": {"deaf": uptime_s(), "slow": uptime_s()},
            "guests": {"gone": waits("gone"), "deaf": waits("deaf"), "slow": waits("slow")},
        }),
    );
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.go_on_closing().await.unwrap();
    let wanted = [
        (vm("deaf"), CloseState::Ended),
        (vm("gone"), CloseState::Off),
        (vm("slow"), CloseState::Ended),
    ];
    assert_eq!(closed(&served).await, wanted.into());
    assert_eq!(steps(&served, "deaf"), "end\n", "its time is over");
    for child in &mut children {
        child.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_too_old_to_know_that_its_host_shuts_down_is_renewed_first() {
    let host = TestHost::new();
    let _child = guest(&host, "old", "renewable");
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.close(false).await.unwrap();
    assert_eq!(closed(&served).await, [(vm("old"), CloseState::Off)].into());
    assert!(steps(&served, "old").starts_with("press\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_too_old_that_could_not_be_renewed_for_a_move_is_renewed_after_it() {
    let host = TestHost::new().with("guest_shutdown_s = 100");
    let _child = guest(&host, "old", "renewable");
    let state = host.run_dir("old").join(STATE);
    std::fs::write(&state, "\"handing-over\"").unwrap();
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.close(false).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let moves = |seen: &ClosingVm| seen.state == CloseState::Migrating;
    while !served.agent.closing.shown().vms.iter().any(moves) {
        assert!(
            Instant::now() < deadline,
            "it does not count as on the move"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    std::fs::write(&state, "\"running\"").unwrap();
    assert_eq!(closed(&served).await, [(vm("old"), CloseState::Off)].into());
    assert!(steps(&served, "old").starts_with("press\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_in_doubt_whose_vm_process_is_too_old_is_left_and_not_waited_for() {
    let host = TestHost::new().with("guest_shutdown_s = 1500");
    let _child = guest(&host, "old", "renewable");
    std::fs::write(host.run_dir("old").join(STATE), "\"in-doubt\"").unwrap();
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served.agent.close(false).await.unwrap();
    let left = [(vm("old"), CloseState::Left)].into();
    assert_eq!(closed(&served).await, left);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_went_while_no_agent_looked_has_not_crashed() {
    // The agent that closed the host had kept nothing of it; or its guest went once the host was closed.
    for is_over in [false, true] {
        let host = TestHost::new();
        host.crash("web", true);
        left_closing(
            &host,
            serde_json::json!({"began_s": uptime_s(), "is_over": is_over}),
        );
        let served = Served::of_host(host).await;
        served.agent.take_up().unwrap();
        served.agent.go_on_closing().await.unwrap();
        closed(&served).await;
        if is_over {
            served.agent.open().await.unwrap();
        }
        let to_run = served.host.to_run(&vm("web"));
        assert_eq!(to_run, Some(false), "over: {is_over}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_was_down_before_its_host_shut_down_keeps_its_own_note() {
    let host = TestHost::new();
    host.crash("crashed", true);
    let _child = guest(&host, "obeys", "obeys");
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    // Closed by a person first, and then for a shutdown.
    for _ in 0..2 {
        served.agent.close(false).await.unwrap();
        closed(&served).await;
        let note = |name: &str| {
            let records = &served.agent.records;
            let record = records.read(&vm(name)).unwrap();
            let mut shown = records.host_vm(&record, spec(name), &Life::Idle);
            shown.state = VmState::Crashed;
            served.agent.closing.show(&mut shown, served.agent.host());
            shown.note.unwrap_or_default()
        };
        let (crashed, obeys) = (note("crashed"), note("obeys"));
        assert!(!crashed.contains("shuts down"), "{crashed}");
        assert!(obeys.contains("when the host is back"), "{obeys}");
        let to_run = served.host.to_run(&vm("crashed"));
        assert_eq!(to_run, Some(true), "it has crashed");
    }
}

#[test]
fn a_host_that_is_closed_again_while_it_is_asked_whether_it_is_back_stays_closed() {
    let dir = tempfile::tempdir().unwrap();
    let closing = Closing::open(dir.path(), "boot-1", 60).unwrap();
    closing.begin(true, BTreeSet::new()).unwrap();
    *lock(&closing.stage) = ClosingStage::Closed;
    let asked = closing.asking();
    // A person closes it meanwhile, and it has no guests.
    closing.begin(false, BTreeSet::new()).unwrap();
    *lock(&closing.stage) = ClosingStage::Closed;
    closing.is_back(asked).unwrap();
    assert!(closing.is_on());
    let now = Instant::now();
    closing.ask_again_at(asked, Some(now));
    assert!(
        !closing.is_to_ask(now),
        "nobody asks about what a person closed"
    );
    closing.ask_again_at(closing.asking(), Some(now));
    assert!(closing.is_to_ask(now));
    closing.is_back(closing.asking()).unwrap();
    assert!(!closing.is_on());
}

#[test]
fn a_guest_that_is_off_before_the_next_look_at_it_is_not_one_whose_qemu_died() {
    let host = TestHost::new();
    host.crash("web", true);
    let dir = tempfile::tempdir().unwrap();
    let closing = Closing::open(dir.path(), "boot-1", 60).unwrap();
    closing.begin(false, BTreeSet::new()).unwrap();
    let noted = |state| {
        closing.saw(ClosingVm {
            vm: vm("web"),
            state,
            why: None,
        });
        let record = host.records().read(&vm("web")).unwrap();
        let mut shown = host.records().host_vm(&record, spec("web"), &Life::Idle);
        shown.state = VmState::Crashed;
        shown.note = Some("its QEMU died".into());
        closing.show(&mut shown, &host.config.name);
        shown.note.unwrap_or_default()
    };
    for state in [CloseState::Waits, CloseState::Off, CloseState::Ended] {
        let note = noted(state);
        assert!(note.contains("when the host is back"), "{state:?}: {note}");
    }
    assert_eq!(noted(CloseState::Left), "its QEMU died");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_that_ends_with_its_host_gets_no_successor() {
    for is_stopping in [true, false] {
        let host = TestHost::new();
        let _child = guest(&host, "paused", "left");
        let served = Served::of(host, nobody_asked(), is_stopping).await;
        served.agent.take_up().unwrap();
        served.agent.close(false).await.unwrap();
        closed(&served).await;
        let process = served.agent.known(&vm("paused")).unwrap();
        process.need(Duration::from_secs(60)).await.unwrap();
        let Life::Live { pid: first } = process.life() else {
            panic!("it does not answer");
        };
        let first = rustix::process::Pid::from_raw(first).unwrap();
        kill_process(first, Signal::KILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let ended = loop {
            assert!(Instant::now() < deadline, "{:?}", process.life());
            match process.life() {
                Life::Idle => break true,
                Life::Live { pid } if pid != first.as_raw_nonzero().get() => break false,
                _ => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        assert_eq!(ended, is_stopping, "only where the host goes down");
        served.agent.open().await.unwrap();
        process.need(Duration::from_secs(60)).await.unwrap();
    }
}
