//! What lives of a VM counts for more than a record that denies it.

use super::super::*;
use crate::api::tests::{Served, put};
use crate::carrying::Carrier;
use crate::supervisor::Supervisor;
use crate::test_support::{DIE, KEPT, TestHost, stub_program, vm};
use godwit_ownership::Power;
use godwit_types::site::Claim;
use godwit_types::vm::{UIDS, VmState};
use std::os::unix::process::CommandExt as _;

/// A stub VM process of web that a former agent left, whose state directory is then an older copy that knows nothing.
async fn older_copy(host: &TestHost) {
    host.hold("web", Power::On);
    let nobody: Carrier = Arc::new(|_, _| Box::pin(async { Ok(Vec::new()) }));
    let before = Supervisor::new(stub_program(), nobody, host.records());
    let web = before.supervise(host.vm_config("web"));
    web.need(std::time::Duration::from_secs(60)).await.unwrap();
    before.forget(&vm("web"));
    std::fs::remove_dir_all(host.config.vms_dir().join("web")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_lives_is_not_denied_by_an_older_copy_of_its_record() {
    let host = TestHost::new();
    older_copy(&host).await;
    let served = Served::of_host(host).await;
    let level = Generation(9);
    let asked = served.controller();
    // Before the agent has looked at its run directory, and after.
    for _ in 0..2 {
        let answer = asked.survey(&vm("web"), &SurveyRequest { level }).await;
        let claim = answer.unwrap().claim;
        assert!(matches!(claim, Claim::Holds { .. }), "{claim:?}");
        served.agent.take_up().unwrap();
    }
    let kept = served.host.run_dir("web").join(KEPT);
    assert!(kept.exists(), "it was not asked to write its record again");
    served.end("web");
}

/// A process that stands for the QEMU of a VM that no record tells of, and whose VM process cannot start.
fn stray_qemu(host: &TestHost, name: &str) -> std::process::Child {
    let run_dir = host.run_dir(name);
    std::fs::write(run_dir.join(DIE), "its disk is gone").unwrap();
    let qemu = std::process::Command::new("sleep")
        .arg("600")
        .spawn()
        .unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", qemu.id())).unwrap();
    let fields = stat.rsplit_once(')').unwrap().1;
    let start: u64 = fields.split_whitespace().nth(19).unwrap().parse().unwrap();
    let text = format!(
        "{{\"pid\":{},\"start_time_ticks\":{start},\"accelerator\":\"tcg\",\"launch\":1}}",
        qemu.id()
    );
    std::fs::write(run_dir.join("qemu.json"), text).unwrap();
    qemu
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_said_or_done_from_the_record_alone_while_a_hypervisor_lives() {
    let host = TestHost::new();
    let mut qemu = stray_qemu(&host, "web");
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    let (asked, web) = (served.controller(), vm("web"));
    let level = Generation(9);
    let answer = asked.survey(&web, &SurveyRequest { level }).await;
    let error = answer.unwrap_err().to_string();
    assert!(error.contains("may live on host 'a'"), "{error}");
    asked.put_vm(&put("web", 10)).await.unwrap_err();
    asked.delete_vm(&web).await.unwrap_err();
    let whole = asked.site_survey().await.unwrap();
    assert_eq!(
        (whole.records.len(), whole.unread.contains(&web)),
        (0, true)
    );
    served.local().forget_record(&web).await.unwrap_err();
    assert!(served.host.records().read(&web).unwrap().highest < level);
    let listed = asked.vms().await.unwrap();
    let [shown] = listed.as_slice() else {
        panic!("it is not listed: {listed:?}");
    };
    assert_eq!(shown.state, VmState::Unreachable);
    assert_eq!(shown.qemu_pid, i32::try_from(qemu.id()).ok());
    let note = shown.note.clone().unwrap();
    assert!(
        note.contains("older copy") && note.contains("--force --host a"),
        "{note}"
    );
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    let answer = asked.survey(&web, &SurveyRequest { level }).await;
    assert_eq!(answer.unwrap().claim, Claim::No, "nothing lives any more");
}

/// A process that stands for a QEMU on a RAM file of the VM, of which no file tells; it ends when it is dropped.
fn wiped_qemu(host: &TestHost, name: &str) -> std::process::Child {
    let ram = host.config.ram_dir().join(format!("{name}.1"));
    let backend = format!(
        "memory-backend-file,id=ram,mem-path={},share=on",
        ram.display()
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "read line", "qemu", "-object", &backend]);
    if rustix::process::geteuid().is_root() {
        // Not the common user of this host's QEMUs: one that a VM has for itself, as its RAM file does.
        std::fs::create_dir_all(host.config.ram_dir()).unwrap();
        std::fs::write(&ram, "").unwrap();
        std::os::unix::fs::chown(&ram, Some(*UIDS.start()), None).unwrap();
        command.uid(*UIDS.start());
    }
    command.stdin(std::process::Stdio::piped()).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_joins_anew_tells_of_a_hypervisor_that_no_file_of_it_knows() {
    let host = TestHost::new();
    let mut qemu = wiped_qemu(&host, "web");
    std::fs::write(host.run_dir("web").join(DIE), "no room").unwrap();
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    let (asked, web) = (served.controller(), vm("web"));
    let level = Generation(9);
    let answer = asked.survey(&web, &SurveyRequest { level }).await;
    let error = answer.unwrap_err().to_string();
    assert!(error.contains("may live on host 'a'"), "{error}");
    asked.put_vm(&put("web", 10)).await.unwrap_err();
    let listed = asked.vms().await.unwrap();
    let states: Vec<_> = listed
        .iter()
        .map(|vm| (vm.spec.name.as_str(), vm.state))
        .collect();
    assert_eq!(states, [("web", VmState::Unreachable)]);
    drop(qemu.stdin.take());
    qemu.wait().unwrap();
    let answer = asked.survey(&web, &SurveyRequest { level }).await;
    assert_eq!(answer.unwrap().claim, Claim::No, "nothing lives any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_not_forgotten_while_a_hypervisor_of_the_vm_lives() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    std::fs::write(host.config.vms_dir().join("web/ownership"), "noise").unwrap();
    let mut qemu = wiped_qemu(&host, "web");
    std::fs::write(host.run_dir("web").join(DIE), "none").unwrap();
    let served = Served::of_host(host).await;
    let refused = served.local().forget_record(&vm("web")).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::WrongState);
    assert!(refused.to_string().contains("web.NUMBER"), "{refused}");
    drop(qemu.stdin.take());
    qemu.wait().unwrap();
    served.local().forget_record(&vm("web")).await.unwrap();
}
