//! A Linux guest on the whole product: its clock never goes back, it answers all the way, and it reboots after a move.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{LONG, Plan, SOON, Stack};
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use godwit_testkit::load::ping::{PingConfig, PingReport, run};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const GUEST: &str = "10.77.0.10";

/// What the guest's probe says of its monotonic clock, and the client's clock at that moment, ns.
struct Clock {
    guest: i128,
    client: i128,
    back_max: i128,
}

impl Clock {
    /// When the guest booted, by the client's clock.
    fn booted(&self) -> i128 {
        self.client - self.guest
    }
}

/// Asks a guest that runs; however busy the machine is, it answers within a minute.
fn ask(stack: &Stack, command: &str) -> Result<String> {
    ask_within(stack, command, "60")
}

fn ask_within(stack: &Stack, command: &str, limit_s: &str) -> Result<String> {
    let probe = target_dir()?.join("release/godwit-probe");
    let client = stack.machine("client")?;
    let output = client
        .command(probe)
        .args(["--timeout-s", limit_s, GUEST, command])
        .output()?;
    ensure!(output.status.success(), "the probe said {output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn clock(stack: &Stack) -> Result<Clock> {
    clock_of(&ask(stack, "mono")?)
}

fn clock_of(text: &str) -> Result<Clock> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let after = |key: &str| -> Result<i128> {
        let at = words.iter().position(|word| *word == key);
        let value = at
            .and_then(|at| words.get(at + 1))
            .context(key.to_owned())?;
        Ok(value.parse()?)
    };
    Ok(Clock {
        guest: after("mono_ns")?,
        client: after("client_ns")?,
        back_max: after("back_max_ns")?,
    })
}

fn start(stack: &Stack) -> Result<()> {
    let guest = LinuxGuest::find(&target_dir()?)?;
    let network = GuestNetwork {
        ip4: Some(format!("{GUEST}/24")),
        ip6: None,
    };
    let text = format!(
        "name = \"linux\"\nvcpus = 1\nmemory_mib = 256\nkernel = \"{}\"\ninitramfs = \"{}\"\ncmdline = \"{}\"\n[[nic]]\nport_group = \"vm\"\n",
        guest.kernel.display(),
        guest.initrd.display(),
        command_line(&network)
    );
    let file = stack.describe("linux", &text)?;
    stack.ok("controller", &["vm", "create", &file])?;
    stack.ok("controller", &["vm", "start", "linux", "--on", "a"])?;
    stack.until("the guest answers", LONG, || {
        Ok(ask_within(stack, "uptime", "5").is_ok())
    })
}

/// Pings the guest while it moves.
fn pinged<T>(stack: &Stack, action: impl FnOnce() -> Result<T>) -> Result<(T, PingReport)> {
    let config = PingConfig {
        address: GUEST.parse()?,
        interval: Duration::from_millis(1),
        duration: LONG,
        list_gaps_from: Duration::from_millis(20),
    };
    let (stop, client) = (AtomicBool::new(false), stack.machine("client")?);
    std::thread::scope(|scope| {
        let ping = scope.spawn(|| client.in_network(|| run(&config, &stop)));
        let done = action();
        stop.store(true, Ordering::SeqCst);
        let report = ping.join();
        let report = report.map_err(|_| anyhow::anyhow!("the ping ended badly"))??;
        Ok((done?, report?))
    })
}

#[test]
fn a_linux_guest_keeps_its_clock_its_network_and_its_reboot() -> Result<()> {
    let stack = Stack::new("linux", &Plan::default())?;
    start(&stack)?;
    for to in ["b", "a"] {
        let before = clock(&stack)?;
        let (report, ping) = pinged(&stack, || stack.migrate("linux", to, &[]))?;
        let after = clock(&stack)?;
        let lag = (after.client - before.client) - (after.guest - before.guest);
        println!(
            "  to {to}: switchover {:.1} ms, ping gap {:.1} ms ({} of {} answered), clock behind by {:.1} ms",
            report["switchover_ms"].as_f64().unwrap_or(0.0),
            ping.network_gap_ms,
            ping.received,
            ping.sent,
            lag as f64 / 1e6
        );
        ensure!(
            after.guest > before.guest && after.back_max == 0,
            "the guest's clock went back by {} ns",
            after.back_max
        );
        // Shared machines stall: the bound is for a move that left the network dead until some cache aged.
        ensure!(ping.network_gap_ms < 5000.0, "{ping:?}");
        stack.runs_on("linux", to)?;
    }
    let old = clock(&stack)?;
    // The guest may be gone before it has answered.
    let _ = ask_within(&stack, "reboot", "5");
    stack.until("the guest answers after its reboot", LONG, || {
        Ok(clock_of(&ask_within(&stack, "mono", "5")?)?.booted() > old.client)
    })?;
    stack.until("it still runs", SOON, || {
        Ok(stack.vm("linux")?["state"] == "running")
    })?;
    stack.migrate("linux", "b", &[])?;
    clock(&stack).map(drop)
}
