//! Certificates of hosts: short ones are renewed many times under a VM that runs and moves, and a host whose own has ended
//! comes back with one command. Judged by serial numbers.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, Plan, SOON, Stack};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long certificates are good for here: long enough for a starved machine to renew one in the third that is left.
const LIFE_S: u64 = 60;
/// Longest wait for some renewals.
const RENEWALS: Duration = Duration::from_secs(10 * LIFE_S);

fn plan() -> Plan {
    Plan {
        certificate_life_s: LIFE_S,
        ..Plan::default()
    }
}

fn serial(stack: &Stack, host: &str) -> Result<String> {
    let view = stack.json("controller", &["host", "show", host])?;
    let serial = view["certificate"]["serial"].as_str();
    Ok(serial.context("the host names no certificate")?.to_owned())
}

/// Waits until both hosts have renewed their certificates so often from now on.
fn wait_renewals(stack: &Stack, times: usize) -> Result<()> {
    let now = || -> Result<[String; 2]> { Ok([serial(stack, "a")?, serial(stack, "b")?]) };
    let seen = std::cell::RefCell::new(now()?.map(|first| BTreeSet::from([first])));
    stack.until("the hosts' certificates are renewed", RENEWALS, || {
        let mut seen = seen.borrow_mut();
        for (seen, serial) in seen.iter_mut().zip(now()?) {
            seen.insert(serial);
        }
        Ok(seen.iter().all(|seen| seen.len() > times))
    })
}

/// A starved machine may come near a certificate's end for a moment.
fn has_no_alarm(stack: &Stack) -> Result<()> {
    stack.until("no alarm is left", SOON, || {
        let site = stack.site()?;
        let sentences = site["sentences"].as_array().context("no sentences")?;
        ensure!(sentences.is_empty(), "{sentences:?}");
        Ok(true)
    })
}

#[test]
fn certificates_renew_themselves_while_a_vm_runs_and_moves() -> Result<()> {
    let stack = Stack::new("certificates", &plan())?;
    stack.start_counter(&Counter::small("web"), "a")?;
    let pid = |host: &str| {
        let daemon = stack.daemon_pid(host);
        daemon.context("no agent")
    };
    let agents = [pid("a")?, pid("b")?];
    for (to, from) in [("b", "a"), ("a", "b")] {
        wait_renewals(&stack, 1)?;
        stack.migrate("web", to, &[])?;
        stack.runs_on("web", to)?;
        ensure!(stack.hypervisors("web", from)?.is_empty());
    }
    stack.wait_passes("web", "a", 1)?;
    ensure!(agents == [pid("a")?, pid("b")?], "no agent was restarted");
    has_no_alarm(&stack)?;
    // What is on the disk is what is shown.
    stack.restart_daemon("a")?;
    stack.wait_connected()?;
    wait_renewals(&stack, 1)
}

#[test]
fn a_host_that_is_renewed_long_before_its_certificate_ends_goes_on_speaking() -> Result<()> {
    let stack = Stack::new("renewed", &Plan::default())?;
    stack.start_counter(&Counter::small("web"), "b")?;
    for _ in 0..2 {
        let before = serial(&stack, "b")?;
        let token = stack.token()?;
        let said = stack.ok("b", &["host", "renew", &token])?;
        ensure!(said.contains("its agent speaks with it"), "{said}");
        // The next command needs the host, and is refused by nobody.
        stack.ok("controller", &["host", "check", "b"])?;
        stack.until("the host names the new one", SOON, || {
            Ok(serial(&stack, "b")? != before)
        })?;
    }
    has_no_alarm(&stack)?;
    stack.migrate("web", "a", &[])?;
    stack.runs_on("web", "a")
}

#[test]
fn a_host_whose_certificate_has_ended_comes_back_with_its_vm() -> Result<()> {
    let stack = Stack::new("expired", &plan())?;
    stack.start_counter(&Counter::small("web"), "b")?;
    let guests = stack.hypervisors("web", "b")?;
    let first = serial(&stack, "b")?;
    stack.kill_daemon("b")?;
    stack.until("the certificate ends", RENEWALS, || {
        let found = stack.run("b", &["host", "check", "--json"])?;
        let found: serde_json::Value = serde_json::from_str(&found.stdout)?;
        let mut checks = found["checks"].as_array().context("no checks")?.iter();
        let check = checks.find(|check| check["name"] == "certificate");
        Ok(check.context("no such check")?["status"] == "failed")
    })?;
    stack.start_daemon("b")?;
    stack.until("the controller names the certificate", SOON, || {
        Ok(stack.site()?["sentences"]
            .to_string()
            .contains("host renew"))
    })?;
    let token = stack.token()?;
    stack.ok("b", &["host", "renew", &token])?;
    stack.wait_connected()?;
    ensure!(serial(&stack, "b")? != first);
    stack.runs_on("web", "b")?;
    ensure!(
        stack.hypervisors("web", "b")? == guests,
        "the guest went on"
    );
    stack.until("every alarm is over", SOON, || {
        Ok(has_no_alarm(&stack).is_ok())
    })?;
    stack.migrate("web", "a", &[])?;
    stack.runs_on("web", "a")?;
    Ok(())
}
