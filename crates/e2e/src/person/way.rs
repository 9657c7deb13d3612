//! The way of a person from nothing to a moved guest: install, check, set up, join, check, create, start, migrate.
//!
//! Owns nothing; works on any two systems. Refuses: whatever a person would not put up with, as an answer that is no
//! success.

use super::{Host, Machine, readme};
use anyhow::{Context as _, Result, ensure};

/// Where a system finds the package.
pub const PACKAGE: &str = "/root/godwit.deb";

/// Installs the package from nothing.
pub fn install<M: Machine>(host: &Host<M>) -> Result<()> {
    host.refused("godwit --version")?;
    let install = format!("apt-get install -q -y --no-install-recommends {PACKAGE}");
    host.ok(&install)?;
    host.ok("godwit --version")?;
    host.ok("getent passwd godwit-qemu; getent group godwit; ls -l /etc/godwit")?;
    // Nothing starts by itself.
    let idle = host.types("systemctl is-active godwit-agent godwit-controller")?;
    ensure!(
        idle.stdout.lines().all(|line| line == "inactive"),
        "something runs after the installation: {}",
        idle.stdout
    );
    // Checked before it joins, as the README says; what it finds is this machine's.
    let check = host.types(&readme::commands()?.check)?;
    ensure!(
        check.stdout.contains("this host has not joined"),
        "no word of joining: {} {}",
        check.stdout,
        check.stderr
    );
    Ok(())
}

/// Sets the controller up on the first system and makes both its hosts, by the README's commands.
pub fn set_up<M: Machine>(hosts: [&Host<M>; 2]) -> Result<()> {
    let commands = readme::commands()?;
    let [first, _] = hosts;
    let said = first.ok(&commands.init)?;
    first.ok("systemctl enable --now godwit-controller")?;
    first.until("the controller answers", "godwit host list", |ran| {
        ran.code == Some(0)
    })?;
    let mut token = token_in(&said)?;
    for (host, number) in hosts.into_iter().zip(1..) {
        if number > 1 {
            token = token_in(&first.ok("godwit host add")?)?;
        }
        let join = commands.join.replace("TOKEN", &token);
        let join = join.replace("--name a", &format!("--name {}", host.name));
        host.ok(&join.replace("10.1.0.1", &format!("10.1.0.{number}")))?;
    }
    connected(first)?;
    first.ok("godwit host list")?;
    for host in hosts {
        host.types(&commands.check)?;
    }
    Ok(())
}

/// Waits until an agent that was just started takes connections: the controller's list says what was heard a moment ago.
pub fn agent_listens<M: Machine>(host: &Host<M>) -> Result<()> {
    let ran = host.until("the agent listens", "ss -Hltn 'sport = :8472'", |ran| {
        ran.stdout.contains(":8472")
    });
    ran.map(drop)
}

/// Waits until the controller has heard from both hosts.
pub fn connected<M: Machine>(controller: &Host<M>) -> Result<()> {
    let list = "godwit host list --json";
    let both = |text: &str| text.matches("\"connected\"").count() == 2;
    let ran = controller.until("both hosts are connected", list, |ran| both(&ran.stdout));
    ran.map(drop)
}

/// The token in the command that is printed for the next host.
fn token_in(said: &str) -> Result<String> {
    let words: Vec<&str> = said.split_whitespace().collect();
    let at = words
        .windows(3)
        .position(|words| words[..2] == ["host", "join"])
        .with_context(|| format!("no command to join with: {said}"))?;
    Ok(words[at + 2].to_owned())
}

/// Moves a VM by the README's command.
pub fn migrate<M: Machine>(from: &Host<M>, vm: &str, to: &str) -> Result<()> {
    let command = readme::commands()?.migrate;
    let command = command.replace("web --to b", &format!("{vm} --to {to}"));
    from.ok(&command)?;
    let shown = from.value(&format!("godwit vm show {vm} --json"))?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    ensure!(
        shown["state"] == "running" && shown["host"] == to,
        "after '{command}': {shown}"
    );
    Ok(())
}
