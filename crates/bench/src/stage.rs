//! Two test hosts with the product on them and a network between them that can be made like another.
//!
//! Owns the testkit's stage and the link emulator; all of it ends with the value. A stage serves the cells that share an
//! address family and the use of the emulator. Refuses: to go on when something does not come about in time.

use crate::plan::Network;
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::interrupt;
use godwit_testkit::lab::{Lab, LabConfig, MachineCommand};
use godwit_testkit::link::{End, Link, LinkSpec};
use godwit_testkit::stage;
use serde_json::Value;
use std::ops::Deref;
use std::path::{Path, PathBuf};

pub use godwit_testkit::stage::SOON;

/// Where the peers' RAM files lie, on each host: a tmpfs like that of the product.
pub const PEER_RAM: &str = "/run/peers";

pub struct Stage {
    // Before the machines that it joins.
    links: Vec<Link>,
    stage: stage::Stage,
    network: Network,
    prepares: bool,
}

impl Deref for Stage {
    type Target = stage::Stage;

    fn deref(&self) -> &stage::Stage {
        &self.stage
    }
}

impl Stage {
    /// Brings up what cells with this network need. `bin` is where the product's program lies, `dir` a directory that
    /// all hosts may read.
    pub fn new(network: &Network, bin: &Path, dir: &Path) -> Result<Self> {
        let lab = Lab::new(LabConfig {
            name: format!("bench-{}", std::process::id()),
            // Whoever wants the results below /tmp wants them there: the hosts have a /tmp of their own.
            visible: vec![dir.to_owned()],
            ..LabConfig::default()
        })?;
        let mut stage = Self {
            stage: stage::Stage::new(lab, bin, dir)?,
            links: Vec::new(),
            network: *network,
            prepares: false,
        };
        if network.shaped() {
            for card in 0..network.cards {
                let link = stage.emulate(card)?;
                stage.links.push(link);
            }
        }
        stage.route_by_address()?;
        stage.bring_up()?;
        Ok(stage)
    }

    /// Whether this stage can serve a network, after [`Stage::reshape`].
    pub fn serves(&self, network: &Network) -> bool {
        let family = |network: &Network| (network.six, network.shaped());
        let cards = |network: &Network| (network.cards, network.one_subnet);
        family(&self.network) == family(network) && cards(&self.network) == cards(network)
    }

    /// Makes the links like a network.
    pub fn reshape(&self, network: &Network) -> Result<()> {
        let mut links = self.links.iter();
        links.try_for_each(|link| link.set(spec(network)).context("cannot set the link"))
    }

    pub fn cut(&self) -> Result<()> {
        let mut links = self.links.iter();
        links.try_for_each(|link| link.cut().context("cannot cut the link"))
    }

    pub fn heal(&self) -> Result<()> {
        let mut links = self.links.iter();
        links.try_for_each(|link| link.heal().context("cannot heal the link"))
    }

    fn emulate(&self, card: u8) -> Result<Link> {
        let end = |host: u8| {
            let pid = self.lab.host(host)?.init_pid();
            let addresses = far(&self.network, host, card);
            End::of_process(
                pid,
                &format!("far{card}"),
                &addresses.each_ref().map(String::as_str),
            )
        };
        Link::between(end(0)?, end(1)?, spec(&self.network)).context("no link emulator")
    }

    /// Several cards of one subnet have a link each: what a card has received must be answered through it, so each has a
    /// routing table of its own.
    fn route_by_address(&self) -> Result<()> {
        if self.network.cards < 2 || !self.network.one_subnet {
            return Ok(());
        }
        for (index, host) in [(0, "a"), (1, "b")] {
            for (card, address) in self.addresses(index).into_iter().enumerate() {
                let (table, device) = (100 + card, format!("far{card}"));
                let family = if self.network.six { "-6" } else { "-4" };
                self.shell(
                    host,
                    &format!(
                        "ip {family} route add default dev {device} table {table} && ip {family} rule add from {address} table {table}"
                    ),
                )?;
            }
        }
        Ok(())
    }

    fn bring_up(&mut self) -> Result<()> {
        self.start_controller(&[])?;
        for (index, host) in [(0, "a"), (1, "b")] {
            self.join(host, &self.addresses(index), &[])?;
            self.start_daemon(host)?;
            self.peer_ram(host)?;
        }
        self.wait_connected()?;
        let help = self.ok("controller", &["vm", "migrate", "--help"])?;
        self.prepares = help.contains("--prepare");
        Ok(())
    }

    /// Mounted as the product mounts its own, so that pages come in the same sizes.
    fn peer_ram(&self, host: &str) -> Result<()> {
        let script = format!(
            "mkdir -p {PEER_RAM} && mount -t tmpfs -o huge=within_size,size=90%,mode=0700 tmpfs {PEER_RAM}"
        );
        self.shell(host, &script)
    }

    /// Runs a script of the shell on a host.
    pub fn shell(&self, host: &str, script: &str) -> Result<()> {
        let output = self.command(host, "sh")?.args(["-c", script]).output()?;
        ensure!(
            output.status.success(),
            "cannot prepare host {host} by '{script}': {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// Waits until both hosts say that they have room for a guest: they are asked every second, and the guest before it
    /// has just gone.
    pub fn wait_for_room(&self, ram_mib: u32) -> Result<()> {
        let room = |host: &Value| host["memory_free_mib"].as_u64() >= Some(u64::from(ram_mib));
        self.until("both hosts have room for the guest", SOON, || {
            let hosts = self.json("controller", &["host", "list"])?;
            Ok(hosts.as_array().is_some_and(|hosts| hosts.iter().all(room)))
        })
    }

    /// The first migration address of host 0 or 1.
    pub fn address(&self, index: u8) -> String {
        self.addresses(index).swap_remove(0)
    }

    /// Migration addresses of host 0 or 1, one for each card.
    fn addresses(&self, index: u8) -> Vec<String> {
        if self.links.is_empty() {
            let own = self.lab.addresses(index);
            let address = if self.network.six {
                own.migration6
            } else {
                own.migration4
            };
            return vec![address.to_string()];
        }
        let of_card = |card| {
            let both = far(&self.network, index, card);
            let address = &both[usize::from(self.network.six)];
            address.split('/').next().unwrap_or(address).to_owned()
        };
        (0..self.network.cards).map(of_card).collect()
    }

    /// Bytes that each card of a host has sent.
    pub fn sent_bytes(&self, host: &str) -> Result<Vec<u64>> {
        let one = |card| {
            let device = if self.links.is_empty() {
                "mig0".to_owned()
            } else {
                format!("far{card}")
            };
            let path = format!("/sys/class/net/{device}/statistics/tx_bytes");
            let text = self.command(host, "cat")?.arg(path).output()?.stdout;
            Ok(String::from_utf8_lossy(&text).trim().parse().unwrap_or(0))
        };
        (0..self.network.cards).map(one).collect()
    }

    /// Whether the product can allocate the destination's memory first.
    pub fn prepares(&self) -> bool {
        self.prepares
    }

    pub fn command(&self, machine: &str, program: impl AsRef<Path>) -> Result<MachineCommand> {
        Ok(self.machine(machine)?.command(program.as_ref()))
    }
}

/// Addresses of a card at the end of an emulated link.
fn far(network: &Network, host: u8, card: u8) -> [String; 2] {
    let (subnet, number) = if network.one_subnet {
        (0, host + 1 + 2 * card)
    } else {
        (card, host + 1)
    };
    [
        format!("10.79.{subnet}.{number}/24"),
        format!("fd79:0:0:{subnet}::{number}/64"),
    ]
}

fn spec(network: &Network) -> LinkSpec {
    LinkSpec {
        rtt_us: (network.rtt_ms * 1e3) as u64,
        rate_bits_per_s: network.gbps.map(|gbps| (gbps * 1e9) as u64),
        loss_ppm: (network.loss_pct * 1e4) as u32,
        seed: 1,
        ..LinkSpec::default()
    }
}

/// The directory that holds the programs of this build.
pub fn programs() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(program
        .parent()
        .context("no directory of programs")?
        .to_owned())
}

/// What every bench begins with: it runs as root, Ctrl-C is heard, and the directory of its results is there. That is bench below
/// the target directory unless another one is wished.
pub fn begin(out: Option<&Path>) -> Result<PathBuf> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the bench makes namespaces and needs root: run it with sudo"
    );
    interrupt::catch();
    let out = match out {
        Some(out) => std::path::absolute(out)?,
        None => target_dir()?.join("bench"),
    };
    std::fs::create_dir_all(&out)?;
    Ok(out)
}
