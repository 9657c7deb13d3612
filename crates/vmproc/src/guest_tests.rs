//! A VM whose guest has an agent: what is shown of it, and how it is asked to power off.

use crate::testing::{FakeQemu, LONG, Site, answer, ask, holds, open, shown};
use crate::vm::Vm;
use godwit_ownership::Power;
use godwit_qemu::guest_agent::listen;
use godwit_types::host_api::{CLOSING_FILE, CloseStep, VmRequest};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::sync::{Arc, Mutex};
use std::time::Instant;

type Heard = Arc<Mutex<Vec<String>>>;

/// A guest's agent at the port of the VM's QEMU, which does as it is told or refuses to power off; and what it was told.
fn agent(site: &Site, obeys: bool) -> Heard {
    let (heard, listener) = (Heard::default(), listen(&site.paths.agent(1)).unwrap());
    let told = Arc::clone(&heard);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            let (mut line, mut stream) = (Vec::new(), stream);
            while lines
                .read_until(b'\n', &mut line)
                .is_ok_and(|count| count > 0)
            {
                let begins = line.iter().rposition(|&byte| byte == 0xff);
                let asked: Value =
                    serde_json::from_slice(&line[begins.map_or(0, |at| at + 1)..]).unwrap();
                let command = asked["execute"].as_str().unwrap().to_owned();
                let answer = match command.as_str() {
                    "guest-sync-delimited" => json!({"return": asked["arguments"]["id"]}),
                    "guest-get-host-name" => json!({"return": {"host-name": "web"}}),
                    "guest-shutdown" if obeys => Value::Null,
                    _ => json!({"error": {"class": "x", "desc": "it will not"}}),
                };
                if command == "guest-sync-delimited" {
                    stream.write_all(&[0xff]).unwrap();
                }
                if !answer.is_null() {
                    writeln!(stream, "{answer}").unwrap();
                }
                told.lock().unwrap().push(command);
                line.clear();
            }
        }
    });
    heard
}

/// A VM that was taken over and whose guest has said who it is.
fn running(site: &Site) -> (FakeQemu, Vm) {
    site.record(holds(Power::On));
    let qemu = site.qemu(&["running"]);
    qemu.has_agent();
    let vm = open(site);
    until("the guest says who it is", || shown(&vm).guest.is_some());
    (qemu, vm)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn stop(vm: &mut Vm) -> String {
    ask(vm, VmRequest::Stop { force: false }).unwrap()
}

#[test]
fn a_guest_with_an_agent_is_shown_and_powered_off_by_it() {
    let site = Site::new();
    let heard = agent(&site, true);
    let (qemu, mut vm) = running(&site);
    let guest = shown(&vm).guest.unwrap();
    assert_eq!((guest.hostname.as_deref(), guest.os), (Some("web"), None));
    let said = stop(&mut vm);
    assert!(said.contains("by its guest agent"), "{said}");
    let was_told = || {
        heard
            .lock()
            .unwrap()
            .iter()
            .any(|command| command == "guest-shutdown")
    };
    until("the agent is told", was_told);
    assert!(vm.is_asked_off());
    assert_eq!(qemu.asked("system_powerdown"), 0);
    // Who asks again is not content with the agent.
    let said = stop(&mut vm);
    assert!(!said.contains("agent"), "{said}");
    assert_eq!(qemu.asked("system_powerdown"), 1);
}

#[test]
fn a_guest_whose_agent_refuses_gets_the_power_key() {
    let site = Site::new();
    let _heard = agent(&site, false);
    let (qemu, mut vm) = running(&site);
    stop(&mut vm);
    until("the key is pressed", || qemu.asked("system_powerdown") == 1);
}

#[test]
fn what_a_predecessor_left_frozen_is_thawed_before_anything_is_asked() {
    let site = Site::new();
    let heard = agent(&site, true);
    std::fs::write(site.paths.frozen(1), b"").unwrap();
    site.record(holds(Power::On));
    let qemu = site.qemu(&["running"]);
    qemu.has_agent();
    let _vm = open(&site);
    let thaw = |heard: &Heard| {
        let heard = heard.lock().unwrap();
        heard
            .iter()
            .find(|command| *command != "guest-sync-delimited")
            .cloned()
    };
    until("it is thawed", || thaw(&heard).is_some());
    assert_eq!(thaw(&heard).unwrap(), "guest-fsfreeze-thaw");
}

/// A host that shut down asked an agent that does nothing each time anew, and cut its guest off.
#[test]
fn an_agent_that_does_nothing_keeps_no_host_from_pressing_the_power_key() {
    let site = Site::new();
    let heard = agent(&site, true);
    let (qemu, mut vm) = running(&site);
    let host = site.paths.run.ancestors().nth(2).unwrap();
    std::fs::write(host.join(CLOSING_FILE), "boot-1").unwrap();
    let mut press = || {
        let step = CloseStep::Press;
        answer(&mut vm, VmRequest::Close { step }).unwrap();
    };
    press();
    until("the agent is told", || {
        let heard = heard.lock().unwrap();
        heard.iter().any(|command| command == "guest-shutdown")
    });
    assert_eq!(qemu.asked("system_powerdown"), 0);
    press();
    assert_eq!(qemu.asked("system_powerdown"), 1);
}

/// The VM's thread waited twice for a QEMU that did not answer.
#[test]
fn a_qemu_that_does_not_say_whether_there_is_an_agent_is_not_asked_for_more() {
    let site = Site::new();
    let _heard = agent(&site, true);
    let (qemu, mut vm) = running(&site);
    qemu.refuses(Some("query-chardev"));
    ask(&mut vm, VmRequest::Stop { force: false }).unwrap_err();
    assert_eq!(qemu.asked("system_powerdown"), 0);
}
