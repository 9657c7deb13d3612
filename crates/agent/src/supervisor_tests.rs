//! The supervisor with a stub VM process: starting, following a death, adopting, backing off, carrying messages.

use super::*;
use crate::test_support::{DIE, HEARD, NO_OUTBOX, OUTBOX, TestHost, stub_program};
use godwit_ownership::{PeerMessage, Power};
use godwit_types::host_api::OutboxMessage;
use godwit_types::migration::AgentAddress;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;

const LONG: Duration = Duration::from_secs(30);

fn nobody() -> Carrier {
    Arc::new(|_, _| Box::pin(async { Ok(Vec::new()) }))
}

fn supervisor(host: &TestHost, carrier: Carrier) -> Supervisor {
    Supervisor::new(stub_program(), carrier, host.records())
}

/// Waits until a VM process lives that is not `other`.
async fn pid_but(vm: &Supervised, other: i32) -> i32 {
    let mut life = vm.life.subscribe();
    let live = life.wait_for(|life| matches!(life, Life::Live { pid } if *pid != other));
    let found = tokio::time::timeout(LONG, live)
        .await
        .expect("a VM process in time")
        .unwrap();
    match *found {
        Life::Live { pid } => pid,
        _ => unreachable!("waited for a live one"),
    }
}

/// Kills a stub; it is this test's own.
fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// Ends a VM's supervision and its stub.
async fn end(supervisor: &Supervisor, vm: &Supervised) {
    supervisor.forget(&vm.name);
    if let Life::Live { pid } = vm.life() {
        kill(pid);
        assert!(vm.ended(LONG).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_vm_process_is_followed_by_another_within_a_second() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let supervisor = supervisor(&host, nobody());
    let vm = supervisor.supervise(host.vm_config("web"));
    let mut pid = pid_but(&vm, 0).await;
    let mut took = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        kill(pid);
        pid = pid_but(&vm, pid).await;
        took.push(began.elapsed());
    }
    // A wait of ours, or one that grows with each death, would be in all of the last ones; a busy machine is not.
    let least = took.iter().skip(2).min().expect("five");
    assert!(*least < Duration::from_secs(1), "{took:?}");
    end(&supervisor, &vm).await;
}

/// A host whose systemd-run is this script; its VM processes go through it.
fn with_runner(host: &TestHost, script: &str) -> VmProgram {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = Path::new(&host.vm_config("web").run_dir).with_file_name("scopes");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("cgroup.controllers"), "cpu").unwrap();
    let runner = dir.join("runner");
    let marked = format!(
        "#!/bin/sh\necho \"$*\" >> {}/asked\n{script}\n",
        dir.display()
    );
    std::fs::write(&runner, marked).unwrap();
    std::fs::set_permissions(&runner, std::fs::Permissions::from_mode(0o755)).unwrap();
    let scopes = scope::Scopes {
        systemd: dir.clone(),
        cgroups: dir.clone(),
        runner,
        patience: Duration::from_millis(200),
    };
    VmProgram {
        scopes,
        ..stub_program()
    }
}

/// How often systemd was asked until a VM process lived.
async fn asked_with(script: &str) -> usize {
    asked_on(TestHost::new(), script).await
}

async fn asked_on(host: TestHost, script: &str) -> usize {
    host.hold("web", Power::On);
    let program = with_runner(&host, script);
    let asked = program.scopes.systemd.join("asked");
    let supervisor = Supervisor::new(program, nobody(), host.records());
    let vm = supervisor.supervise(host.vm_config("web"));
    pid_but(&vm, 0).await;
    let asked = std::fs::read_to_string(asked).unwrap();
    assert!(asked.contains("--unit=godwit-vm-web.scope"), "{asked}");
    end(&supervisor, &vm).await;
    asked.lines().count()
}

const BECOME_IT: &str = "while [ \"$1\" != -- ]; do shift; done; shift; exec \"$@\"";

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_is_what_systemd_run_becomes() {
    assert_eq!(asked_with(BECOME_IT).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_that_starts_while_its_host_is_closed_has_a_scope_if_systemd_gives_one() {
    for script in [BECOME_IT, "echo 'the system goes down' >&2; exit 1"] {
        let host = TestHost::new();
        let mark = closing_mark(&host.run_dir("web")).unwrap();
        std::fs::write(mark, "boot-1").unwrap();
        assert_eq!(asked_on(host, script).await, 1, "{script}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_systemd_that_gives_no_scope_keeps_no_guest_from_starting() {
    let asked = asked_with("echo 'Failed to start transient scope unit' >&2; exit 1").await;
    assert_eq!(asked, SCOPE_TURNS as usize);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_systemd_that_hangs_keeps_no_guest_from_starting() {
    assert_eq!(asked_with("kill -STOP $$").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_systemd_run_starts_its_guests() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let mut program = with_runner(&host, "");
    program.scopes.runner = "/nonexistent/systemd-run".into();
    let supervisor = Supervisor::new(program, nobody(), host.records());
    let vm = supervisor.supervise(host.vm_config("web"));
    pid_but(&vm, 0).await;
    end(&supervisor, &vm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_agent_adopts_the_vm_process_that_it_finds() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let first = supervisor(&host, nobody());
    let vm = first.supervise(host.vm_config("web"));
    let pid = pid_but(&vm, 0).await;
    first.forget(&vm.name);
    let second = supervisor(&host, nobody());
    let again = second.supervise(host.vm_config("web"));
    assert_eq!(pid_but(&again, 0).await, pid);
    end(&second, &again).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_off_gets_a_process_only_when_somebody_needs_it() {
    let host = TestHost::new();
    host.hold("web", Power::Off);
    let supervisor = supervisor(&host, nobody());
    let vm = supervisor.supervise(host.vm_config("web"));
    assert!(!vm.wanted());
    assert_eq!(vm.life(), Life::Idle);
    vm.need(LONG).await.unwrap();
    let pid = pid_but(&vm, 0).await;
    kill(pid);
    let mut life = vm.life.subscribe();
    let idle = life.wait_for(|life| *life == Life::Idle);
    tokio::time::timeout(LONG, idle)
        .await
        .expect("no other one is started")
        .unwrap();
    end(&supervisor, &vm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_whose_socket_still_listens_has_not_ended() {
    let host = TestHost::new();
    host.hold("web", Power::Off);
    let socket = host.run_dir("web").join(SOCKET_FILE);
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    let supervisor = supervisor(&host, nobody());
    let vm = supervisor.supervise(host.vm_config("web"));
    assert!(!vm.is_live());
    assert!(!vm.ended(Duration::from_millis(50)).await);
    drop(listener);
    assert!(vm.ended(LONG).await);
    supervisor.forget(&vm.name);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_comes_for_the_first_time_gets_its_process() {
    let host = TestHost::new();
    let supervisor = supervisor(&host, nobody());
    let vm = supervisor.supervise(host.vm_config("new"));
    vm.need(LONG).await.unwrap();
    let pid = pid_but(&vm, 0).await;
    vm.need(LONG).await.unwrap();
    assert_eq!(vm.life(), Life::Live { pid });
    end(&supervisor, &vm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_cannot_start_is_reported_and_never_given_up() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let die = host.run_dir("web").join(DIE);
    std::fs::write(&die, "no such bridge").unwrap();
    let supervisor = supervisor(&host, nobody());
    let vm = supervisor.supervise(host.vm_config("web"));
    let mut life = vm.life.subscribe();
    let twice = |life: &Life| matches!(life, Life::Starting(Some(why)) if why.contains("2 times") && why.contains("no such bridge"));
    tokio::time::timeout(LONG, life.wait_for(twice))
        .await
        .expect("a second attempt")
        .unwrap();
    let refused = vm.need(Duration::from_millis(1)).await.unwrap_err();
    assert!(refused.message.contains("no such bridge"), "{refused}");
    std::fs::remove_file(&die).unwrap();
    pid_but(&vm, 0).await;
    end(&supervisor, &vm).await;
}

fn to_b(message: serde_json::Value) -> OutboxMessage {
    let peer = AgentAddress {
        host: godwit_types::HostName::new("b").unwrap(),
        address: "127.0.0.1:9".parse().unwrap(),
    };
    OutboxMessage { peer, message }
}

/// Has the stub of a VM process hand messages to its agent.
fn says(run_dir: &Path, messages: &[&OutboxMessage]) {
    let text = serde_json::to_vec(messages).unwrap();
    std::fs::write(run_dir.join("fresh"), text).unwrap();
    std::fs::rename(run_dir.join("fresh"), run_dir.join(OUTBOX)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_last_word_is_said_again_until_the_other_host_hears_it() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let (seen, mut carried) = mpsc::unbounded_channel();
    let refusals = std::sync::atomic::AtomicUsize::new(3);
    let carrier: Carrier = Arc::new(move |_, message: OutboxMessage| {
        seen.send(message.message["message"].as_str().unwrap().to_owned())
            .unwrap();
        let is_refused = refusals
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            })
            .is_ok();
        Box::pin(async move {
            match is_refused {
                true => Err(ApiError::new(ErrorCode::HostUnreachable, "nobody listens")),
                false => Ok(Vec::new()),
            }
        })
    });
    let supervisor = supervisor(&host, carrier);
    let vm = supervisor.supervise(host.vm_config("web"));
    pid_but(&vm, 0).await;
    let migration = godwit_types::MigrationId::new("m1").unwrap();
    let last = PeerMessage::Failed {
        migration,
        reason: Some(godwit_ownership::Reason::clipped("its VM process died")),
    };
    let asks =
        to_b(serde_json::json!({ "message": "ask-holding", "migration": "m1", "generation": 2 }));
    let last = to_b(serde_json::to_value(last).unwrap());
    says(&host.run_dir("web"), &[&asks, &last]);
    let mut words = Vec::new();
    while words.len() < 4 {
        let word = tokio::time::timeout(LONG, carried.recv()).await;
        words.push(word.expect("it is carried again").unwrap());
    }
    words.sort();
    assert_eq!(words, ["ask-holding", "failed", "failed", "failed"]);
    end(&supervisor, &vm).await;
    assert!(
        carried.try_recv().is_err(),
        "it was heard at the third time"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_carried_to_the_peer_and_its_reply_comes_back() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let (seen, mut carried) = mpsc::unbounded_channel();
    let carrier: Carrier = Arc::new(move |vm, message: OutboxMessage| {
        seen.send((vm, message)).unwrap();
        Box::pin(async { Ok(vec![serde_json::json!({ "message": "refused" })]) })
    });
    let supervisor = supervisor(&host, carrier);
    let vm = supervisor.supervise(host.vm_config("web"));
    pid_but(&vm, 0).await;
    let message = to_b(serde_json::json!({ "message": "ask-holding" }));
    let run_dir = host.run_dir("web");
    says(&run_dir, &[&message]);
    let (name, sent) = tokio::time::timeout(LONG, carried.recv())
        .await
        .expect("it is carried")
        .unwrap();
    assert_eq!((name.as_str(), sent), ("web", message));
    let heard = tokio::task::spawn_blocking(move || wait_for_file(&run_dir.join(HEARD)))
        .await
        .unwrap();
    assert_eq!(heard.trim(), r#"b {"message":"refused"}"#);
    end(&supervisor, &vm).await;
}

/// The file's text once it has a whole line.
fn wait_for_file(path: &Path) -> String {
    let deadline = Instant::now() + LONG;
    while Instant::now() < deadline {
        match std::fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text,
            _ => std::thread::yield_now(),
        }
    }
    panic!("{} did not come", path.display());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_process_that_does_not_know_a_question_is_not_asked_without_a_pause() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let run_dir = host.run_dir("web");
    std::fs::create_dir_all(&run_dir).unwrap();
    std::fs::write(run_dir.join(NO_OUTBOX), "").unwrap();
    let supervisor = supervisor(&host, nobody());
    let began = Instant::now();
    let vm = supervisor.supervise(host.vm_config("web"));
    let asked_thrice = move || {
        let deadline = Instant::now() + LONG;
        while Instant::now() < deadline {
            let heard = std::fs::read_to_string(run_dir.join(HEARD)).unwrap_or_default();
            if heard.lines().count() >= 3 {
                return true;
            }
            std::thread::yield_now();
        }
        false
    };
    let is_asked = tokio::task::spawn_blocking(asked_thrice).await.unwrap();
    assert!(is_asked, "it is asked again");
    assert!(began.elapsed() >= 2 * AGAIN_EACH, "{:?}", began.elapsed());
    end(&supervisor, &vm).await;
}

#[tokio::test]
async fn a_vm_process_is_told_the_addresses_that_came_after_the_agent() {
    let host = TestHost::new();
    let supervisor = supervisor(&host, nobody());
    let mut config = host.vm_config("web");
    config.migration_addresses = Vec::new();
    let vm = supervisor.supervise(config.clone());
    assert!(vm.to_tell().migration_addresses.is_empty());
    config.migration_addresses = vec!["10.0.0.1".parse().unwrap()];
    supervisor.supervise(config.clone());
    assert_eq!(vm.to_tell(), config);
    end(&supervisor, &vm).await;
}
