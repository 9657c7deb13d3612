//! Several migration network cards: bytes leave through each, and one that dies takes no migration with it.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, Plan, Stack, Subnets};
use serde_json::Value;

const NICS: u8 = 4;
/// More than the words of setting up and the announcements of addresses, less than a card's part of the pages.
const PART_BYTES: u64 = 4 << 20;

fn stack(name: &str, subnets: Subnets) -> Result<Stack> {
    Stack::new(
        name,
        &Plan {
            nics: NICS,
            subnets,
            ..Plan::default()
        },
    )
}

/// What each card of a host has sent, in bytes.
fn sent_bytes(stack: &Stack, host: &str) -> Result<Vec<u64>> {
    let mut command = stack.machine(host)?.command("ip");
    let output = command.args(["-j", "-s", "link"]).output()?;
    let links: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    (0..NICS)
        .map(|nic| {
            let name = format!("mig{nic}");
            let link = links.iter().find(|link| link["ifname"] == name.as_str());
            let bytes = link.and_then(|link| link["stats64"]["tx"]["bytes"].as_u64());
            bytes.with_context(|| format!("no counter of {name}"))
        })
        .collect()
}

/// A guest of 64 MiB of data moves, and each card of its old host has carried a part.
fn every_card_carries_its_part(stack: &Stack) -> Result<()> {
    stack.start_counter(&Counter::flat("wide", 64), "a")?;
    for (from, to) in [("a", "b"), ("b", "a")] {
        let before = sent_bytes(stack, from)?;
        let report = stack.migrate("wide", to, &[])?;
        let after = sent_bytes(stack, from)?;
        let sent: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
        println!("  {from} to {to}, MiB by card: {:?}", mib(&sent));
        ensure!(
            sent.iter().all(|bytes| *bytes >= PART_BYTES),
            "bytes by card: {sent:?}; {report}"
        );
        stack.runs_on("wide", to)?;
        stack.check_guest("wide", to)?;
    }
    Ok(())
}

fn mib(bytes: &[u64]) -> Vec<u64> {
    bytes.iter().map(|bytes| bytes >> 20).collect()
}

#[test]
fn four_cards_on_one_subnet_all_carry_bytes() -> Result<()> {
    every_card_carries_its_part(&stack("nics-one", Subnets::One)?)
}

#[test]
fn four_cards_on_subnets_of_their_own_all_carry_bytes() -> Result<()> {
    every_card_carries_its_part(&stack("nics-each", Subnets::Each)?)
}

#[test]
fn a_card_that_dies_in_precopy_does_not_end_the_migration() -> Result<()> {
    let stack = stack("nics-dead", Subnets::One)?;
    // Its pages take about thirteen seconds at the cap, and it dirties few of them meanwhile.
    stack.start_counter(&Counter::flat("wide", 64).slowed(800_000), "a")?;
    let id = stack.begin("wide", "b", &["--max-bandwidth", "40"])?;
    stack.wait_precopy(&id)?;
    let mut command = stack.machine("a")?.command("ip");
    let down = command.args(["link", "set", "mig0", "down"]).output()?;
    ensure!(down.status.success(), "{down:?}");
    let report = stack.completed(&id)?;
    println!("  done in {} s", report["total_s"]);
    stack.runs_on("wide", "b")?;
    stack.check_guest("wide", "b").map(drop)
}
