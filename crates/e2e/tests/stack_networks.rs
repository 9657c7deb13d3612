//! Migration networks: a router between the hosts, one address family only, none in common.

use anyhow::{Result, ensure};
use godwit_e2e::stack::{Counter, HostPlan, Plan, Stack, names};

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
    let dry = ["vm", "migrate", "far", "--to", "b", "--dry-run"];
    let found = stack.json("controller", &dry)?;
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
