//! An administrator's ordinary VM: Debian with PostgreSQL on a disk that was made from an image. While pgbench runs in it, it
//! moves with its disk between hosts that share nothing, loses its VM process and its power, and keeps what it acknowledged.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{store, with_stores};
use godwit_e2e::stack::{SOON, Stack};
use godwit_testkit::guest::debian::{self, ADDRESS, Images, Shell};
use godwit_testkit::load::commits::{self, Committer};
use serde_json::Value;
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest boot, command in the guest or wait for commits, on a machine that has little time for it.
const PATIENCE: Duration = Duration::from_secs(300);
const VM: &str = "db";
const DISK: &str = "db-root.raw";
/// Where the image's partition begins.
const PARTITION: u64 = 1 << 20;
/// Size of pgbench's tables, about.
const DATA_MIB: u32 = 30;
/// Commits that show that the guest goes on.
const MORE: u64 = 20;

/// Both hosts, and the VM described.
fn bring_up(image: &Path) -> Result<Stack> {
    let stack = with_stores("debian")?;
    let text = format!(
        "name = \"{VM}\"\nvcpus = 1\nmemory_mib = 512\n[[disk]]\nname = \"root\"\npath = \"{}/{DISK}\"\nfrom = \"{}\"\n[[nic]]\nport_group = \"vm\"\n",
        store("a"),
        image.display()
    );
    let file = stack.describe(VM, &text)?;
    stack.ok("controller", &["vm", "create", &file])?;
    Ok(stack)
}

/// Starts the VM on host a and waits for its database.
fn boot(stack: &Stack) -> Result<Shell> {
    let began = Instant::now();
    stack.ok("controller", &["vm", "start", VM, "--on", "a"])?;
    let made = began.elapsed();
    let mut shell = debian::reach(stack, PATIENCE)?;
    commits::wait_ready(&mut shell, PATIENCE)?;
    println!(
        "  started in {:.1} s, PostgreSQL answers after {:.1} s",
        made.as_secs_f64(),
        began.elapsed().as_secs_f64()
    );
    Ok(shell)
}

/// Somebody outside who commits as fast as it is acknowledged, until the connection ends.
struct Customer {
    acknowledged: Arc<AtomicU64>,
    stream: TcpStream,
    thread: JoinHandle<String>,
}

impl Customer {
    fn enter(stack: &Stack, number: u32) -> Result<Self> {
        let client = stack.machine("client")?;
        let mut committer =
            client.in_network(|| Committer::connect(ADDRESS, number, PATIENCE))??;
        let (stream, acknowledged) = (committer.stream()?, Arc::new(AtomicU64::new(0)));
        let noted = Arc::clone(&acknowledged);
        let commit_all = move || loop {
            match committer.commit() {
                Ok(()) => noted.store(committer.acknowledged(), Ordering::SeqCst),
                Err(error) => return error.to_string(),
            }
        };
        Ok(Self {
            acknowledged,
            stream,
            thread: std::thread::spawn(commit_all),
        })
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    fn goes_on(&self, stack: &Stack, when: &str) -> Result<()> {
        let from = self.acknowledged();
        stack.until(&format!("commits {when}"), PATIENCE, || {
            ensure!(
                self.acknowledged() >= from + MORE || !self.thread.is_finished(),
                "the connection has ended"
            );
            Ok(self.acknowledged() >= from + MORE)
        })
    }

    /// Ends the connection and gives the last row that was acknowledged.
    fn leave(self) -> Result<u64> {
        // It is gone already where the guest is.
        let _ = self.stream.shutdown(Shutdown::Both);
        let ended = self.thread.join();
        ended.map_err(|_| anyhow::anyhow!("the customer ended badly"))?;
        Ok(self.acknowledged.load(Ordering::SeqCst))
    }
}

/// Moves the VM with its disk while its database works.
fn move_to(stack: &Stack, to: &str, customer: &Customer) -> Result<()> {
    let before = customer.acknowledged();
    let report = stack.migrate(VM, to, &[])?;
    let after = customer.acknowledged();
    let figure = |key: &str| report[key].as_f64().with_context(|| format!("no {key}"));
    println!(
        "  to {to}: {:.1} s, switchover {:.1} ms, {:.0} MiB of disk, {} commits meanwhile",
        figure("total_s")?,
        figure("switchover_ms")?,
        figure("disk_bytes")? / f64::from(1 << 20),
        after - before
    );
    ensure!(report["disk_bytes"].as_u64() > Some(PARTITION), "{report}");
    stack.runs_on(VM, to)?;
    let from = if to == "a" { "b" } else { "a" };
    ensure!(stack.inside(to, store(to))?.join(DISK).exists());
    stack.until("the former image is gone", SOON, || {
        Ok(std::fs::read_dir(stack.inside(from, store(from))?)?.count() == 0)
    })?;
    customer.goes_on(stack, "after the move")
}

/// Whether every acknowledged row is there, and all else that belongs together.
fn has_all(shell: &mut Shell, acknowledged: u64) -> Result<()> {
    let missing = commits::missing(shell, &[acknowledged], PATIENCE)?;
    ensure!(
        missing == 0,
        "of {acknowledged} acknowledged commits {missing} are not in the database"
    );
    commits::check_sums(shell, PATIENCE)
}

/// Checks the file system of a VM that is off with the distribution's own tool.
fn file_system_is_clean(stack: &Stack) -> Result<()> {
    let image = stack.inside("a", store("a"))?.join(DISK);
    let partition = format!("{}?offset={PARTITION}", image.display());
    let output = Command::new("e2fsck")
        .args(["-f", "-n", &partition])
        .output()?;
    ensure!(output.status.success(), "e2fsck: {output:?}");
    Ok(())
}

fn wait_off(stack: &Stack) -> Result<Value> {
    stack.wait_state(VM, "stopped", PATIENCE)
}

#[test]
fn a_debian_keeps_every_commit_wherever_its_disk_goes() -> Result<()> {
    let image = match debian::images("guest")? {
        Images::Here(images) => images.into_iter().next().context("no image is named")?,
        Images::NotHere(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let stack = bring_up(&image)?;
    let mut shell = boot(&stack)?;
    commits::prepare(&mut shell, DATA_MIB, PATIENCE)?;
    let customer = Customer::enter(&stack, 0)?;
    customer.goes_on(&stack, "before the move")?;

    for to in ["b", "a"] {
        move_to(&stack, to, &customer)?;
        has_all(&mut shell, customer.acknowledged())?;
    }
    stack.kill_vm_process(VM, "a")?;
    customer.goes_on(&stack, "after the VM process was killed")?;
    has_all(&mut shell, customer.acknowledged())?;

    // As when its power is cut: nothing is told to the guest.
    stack.ok("controller", &["vm", "stop", VM, "--force"])?;
    wait_off(&stack)?;
    let acknowledged = customer.leave()?;
    let mut shell = boot(&stack)?;
    has_all(&mut shell, acknowledged)?;
    commits::check_deeply(&mut shell, PATIENCE)?;
    println!("  {acknowledged} commits were acknowledged, all are there");

    stack.ok("controller", &["vm", "stop", VM])?;
    wait_off(&stack)?;
    file_system_is_clean(&stack)?;
    stack.ok("controller", &["vm", "delete", VM]).map(drop)
}
