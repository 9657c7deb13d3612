//! Migration networks: a router between the hosts, one address family only, none in common.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, HostPlan, Plan, SOON, Stack, names};

/// A lab whose hosts migrate by these addresses; the VMs' network is one bridge over both.
fn stack(name: &str, routed: bool, a: &str, b: &str) -> Result<Stack> {
    let host = |address: &str| HostPlan {
        migration: vec![address.to_owned()],
        ..HostPlan::default()
    };
    Stack::new(
        name,
        &Plan {
            routed,
            hosts: [host(a), host(b)],
            ..Plan::default()
        },
    )
}

/// A guest with a network card moves there and back; preflight has seen a frame cross.
fn there_and_back(stack: &Stack) -> Result<()> {
    let guest = Counter::small("far").with("[[nic]]\nport_group = \"vm\"");
    stack.start_counter(&guest, "a")?;
    let found = stack.could_migrate("far", "b")?;
    let passed = found["passed"].to_string();
    ensure!(passed.contains("a frame from port group vm"), "{found}");
    for to in ["b", "a"] {
        let report = stack.migrate("far", to, &[])?;
        ensure!(report["to"] == to, "{report}");
        stack.runs_on("far", to)?;
        stack.check_guest("far", to)?;
    }
    Ok(())
}

#[test]
fn a_routed_network_of_ipv4_alone() -> Result<()> {
    there_and_back(&stack("routed4", true, "10.78.1.1", "10.78.2.2")?)
}

#[test]
fn a_routed_network_of_ipv6_alone() -> Result<()> {
    there_and_back(&stack("routed6", true, "fd78:0:0:1::1", "fd78:0:0:2::2")?)
}

#[test]
fn hosts_without_a_family_in_common() -> Result<()> {
    let stack = stack("families", false, "10.78.0.1", "fd78::2")?;
    stack.start_counter(&Counter::small("lost"), "a")?;
    let migrate = ["vm", "migrate", "lost", "--to", "b"];
    let sentence = stack.refused("controller", &migrate, 3, "preflight")?;
    names(&sentence, &["hosts a and b", "same family"])?;
    stack.is_clean("lost", "b")?;
    stack.check_guest("lost", "a").map(drop)
}

/// Takes an address away from a machine; gives what brings it back.
fn take_address(stack: &Stack, machine: &str, address: &str) -> Result<String> {
    let script = format!(
        "set -- $(ip -o -4 address show to {address} | awk '{{ print $4, $2 }}') \
         && ip address del $1 dev $2 && echo ip address add $1 dev $2"
    );
    let mut shell = stack.machine(machine)?.command("sh");
    let output = shell.args(["-c", &script]).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn addresses_that_come_after_the_daemons_are_served_then() -> Result<()> {
    let stack = Stack::new("late", &Plan::default())?;
    stack.start_counter(&Counter::small("early"), "b")?;
    let own = stack.lab.addresses(1).management4.to_string();
    // A power cut, after which the network is late.
    stack.power_off("b")?;
    stack.kill_daemon("controller")?;
    let late = [("controller", "10.76.0.100"), ("b", own.as_str())].map(
        |(machine, address)| -> Result<_> {
            Ok((machine, take_address(&stack, machine, address)?))
        },
    );
    stack.start_daemon("controller")?;
    stack.start_daemon("b")?;
    stack.until("the controller says what it waits for", SOON, || {
        let site = stack.site()?;
        Ok(site["sentences"].to_string().contains("10.76.0.100"))
    })?;
    stack.until("the agent's own socket answers", SOON, || {
        Ok(stack.run("b", &["host", "open"])?.code == Some(0))
    })?;
    let checked = stack.run("b", &["host", "check"])?;
    let waits = checked.stdout.lines().find(|line| line.contains("listen"));
    names(waits.context("no such check")?, &["FAILED", &own])?;
    for address in late {
        let (machine, back) = address?;
        let mut shell = stack.machine(machine)?.command("sh");
        ensure!(shell.args(["-c", &back]).status()?.success(), "{back}");
    }
    stack.wait_connected()?;
    stack.runs_on("early", "b")?;
    ensure!(stack.daemon_lives("b") && stack.daemon_lives("controller"));
    stack.check_guest("early", "b").map(drop)
}
