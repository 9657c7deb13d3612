//! What the demo moves: a Debian with PostgreSQL and its disk, or, where that cannot be made, a small Linux with Redis.
//!
//! Owns nothing. Refuses: a guest that does not come up in its time.

use crate::monotonic;
use anyhow::{Context as _, Result};
use godwit_testkit::guest::debian::{self, Images, Shell};
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line};
use godwit_testkit::load::commits;
use godwit_testkit::stage::Stage;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Memory of the guest, MiB.
pub const MEMORY_MIB: u64 = 1024;
/// Longest boot, or command in the guest.
const PATIENCE: Duration = Duration::from_secs(300);
/// Where the disk is on the host that has it.
const DISK: &str = "/var/tmp/db-root.raw";

pub enum Guest {
    /// On a disk that is made from this image.
    Debian(PathBuf),
    Linux(LinuxGuest),
}

impl Guest {
    /// The Debian, unless this machine cannot have it, which is said.
    pub fn choose(target: &Path) -> Result<Self> {
        println!("the guest's disk: made from Debian's packages once, which takes a minute or two");
        match debian::images("guest")? {
            Images::Here(images) => {
                let image = images.into_iter().next();
                Ok(Self::Debian(image.context("no image is named")?))
            }
            Images::NotHere(why) => {
                println!("the guest is a small Linux with Redis and no disk, since {why}");
                Ok(Self::Linux(LinuxGuest::find(target)?))
            }
        }
    }

    /// Name of the VM.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Debian(_) => "db",
            Self::Linux(_) => "redis",
        }
    }

    /// What it is, for a line of the demo.
    pub fn about(&self) -> &'static str {
        match self {
            Self::Debian(_) => "1 GiB, Debian 12 with PostgreSQL, a disk made from an image",
            Self::Linux(_) => "1 GiB, Linux, Redis",
        }
    }

    pub fn database(&self) -> &'static str {
        match self {
            Self::Debian(_) => "PostgreSQL",
            Self::Linux(_) => "Redis",
        }
    }

    /// What is done when the load ends.
    pub fn check(&self) -> &'static str {
        match self {
            Self::Debian(_) => {
                "the load ends; every acknowledged commit is looked for, then pg_amcheck and pg_dump read all"
            }
            Self::Linux(_) => "the load ends and reads every value back",
        }
    }

    pub fn describe(&self) -> String {
        let what = match self {
            Self::Debian(image) => format!(
                "\n[[disk]]\nname = \"root\"\npath = \"{DISK}\"\nfrom = \"{}\"\n",
                image.display()
            ),
            Self::Linux(guest) => {
                let network = GuestNetwork {
                    ip4: Some(format!("{}/24", debian::ADDRESS)),
                    ip6: Some(format!("{}/64", debian::ADDRESS6)),
                };
                format!(
                    "kernel = \"{}\"\ninitramfs = \"{}\"\ncmdline = \"{}\"\n",
                    guest.kernel.display(),
                    guest.initrd.display(),
                    command_line(&network)
                )
            }
        };
        format!(
            "name = \"{}\"\nvcpus = 1\nmemory_mib = {MEMORY_MIB}\nencryption = \"required\"\n{what}\n[[nic]]\nport_group = \"vm\"\n",
            self.name()
        )
    }

    /// Waits until its database answers.
    pub fn wait_ready(&self, stage: &Stage) -> Result<()> {
        match self {
            Self::Debian(_) => commits::wait_ready(&mut debian::reach(stage, PATIENCE)?, PATIENCE),
            Self::Linux(_) => stage.until("Redis answers in the guest", PATIENCE, || {
                let redis = SocketAddr::new(debian::ADDRESS, 6379);
                let connect = || TcpStream::connect_timeout(&redis, Duration::from_secs(1)).is_ok();
                Ok(stage.machine("client")?.in_network(connect)?)
            }),
        }
    }

    /// The program that loads it and what it is given, and what that does first.
    pub fn load(&self, data_mib: Option<u32>) -> (&'static str, Vec<String>, String) {
        let (program, mib, more, address) = match self {
            Self::Debian(_) => {
                let mib = data_mib.unwrap_or(75);
                ("godwit-commits", mib, None, debian::ADDRESS.to_string())
            }
            Self::Linux(_) => {
                let address = SocketAddr::new(debian::ADDRESS, 6379).to_string();
                let mib = data_mib.unwrap_or(600);
                ("godwit-load", mib, Some("--verify-all"), address)
            }
        };
        let what = match self {
            Self::Debian(_) => format!("filling PostgreSQL with {mib} MiB and starting pgbench"),
            Self::Linux(_) => format!("filling Redis with {mib} MiB of random values"),
        };
        let data = ["--data-mib".to_owned(), mib.to_string(), address];
        let more = more.into_iter().map(str::to_owned);
        (program, data.into_iter().chain(more).collect(), what)
    }

    /// The guest's clock and ours at the same moment, ns.
    pub fn clocks(&self, stage: &Stage, address: IpAddr, bin: &Path) -> Result<(i128, i128)> {
        match self {
            Self::Debian(_) => {
                let client = stage.machine("client")?;
                let mut shell = client.in_network(|| Shell::connect(address, PATIENCE))??;
                // So that the shell runs when its clock is read.
                shell.run("true", PATIENCE)?;
                let before = monotonic();
                let said = shell.run("echo $EPOCHREALTIME", PATIENCE)?;
                let after = monotonic();
                let us: i128 = said.replace('.', "").parse()?;
                Ok((us * 1000, (before + after) / 2))
            }
            Self::Linux(_) => {
                let mut command = stage.machine("client")?.command(bin.join("godwit-probe"));
                let address = address.to_string();
                let output = command
                    .args(["--timeout-s", "2", &address, "mono"])
                    .output()?;
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let words: Vec<&str> = text.split_whitespace().collect();
                let after = |key: &str| {
                    let at = words.iter().position(|word| *word == key)?;
                    words.get(at + 1)?.parse::<i128>().ok()
                };
                let clocks = after("mono_ns").zip(after("client_ns"));
                clocks.with_context(|| format!("the guest's probe said '{}'", text.trim()))
            }
        }
    }
}
