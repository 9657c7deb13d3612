//! A VM with UEFI: what its guest keeps in a variable is there after a reset, a crash and a move, wherever the move is cut.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::Host;
use godwit_e2e::guests::{counter_vm, disk};
use godwit_e2e::pair::{Options, Pair};
use godwit_testkit::guest::counter::CounterSpec;
use godwit_testkit::guest::uefi_program::{self, Progress};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::vm::{Accelerator, DiskSpec, Firmware, VmSpec, VmState};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(240);
const LOOK_EVERY: Duration = Duration::from_millis(5);
const FIRMWARE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";

/// Two hosts, and files that both have.
struct Site {
    pair: Pair,
    directory: tempfile::TempDir,
}

impl Site {
    fn new() -> Result<Self> {
        let pair = Pair::new(Accelerator::Tcg)?;
        pair.patience(LONG);
        // On a disk, and where QEMU's user comes to.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        Ok(Self { pair, directory })
    }

    fn file(&self, name: &str, content: &[u8]) -> Result<String> {
        let path = self.directory.path().join(name);
        std::fs::write(&path, content)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o644))?;
        Ok(path.to_str().context("a path")?.to_owned())
    }

    fn described(&self) -> Result<VmSpec> {
        let mut spec = counter_vm(self.pair.dir(), &CounterSpec::flat(8), 128)?;
        spec.set_hardware(Some(2));
        spec.firmware = Firmware::Uefi;
        spec.kernel.clear();
        Ok(spec)
    }

    /// Boots the program from a disk.
    fn boot_disk(&self) -> Result<()> {
        let mut spec = self.described()?;
        let image = self.file("root.raw", &uefi_program::disk()?)?;
        spec.disks = vec![DiskSpec {
            read_only: true,
            ..disk("root", Path::new(&image), false)?
        }];
        spec.check()?;
        self.pair.boot(&spec)
    }

    /// Boots the program as a kernel.
    fn boot_kernel(&self) -> Result<()> {
        let mut spec = self.described()?;
        spec.kernel = self.file("program.efi", &uefi_program::program()?)?;
        spec.check()?;
        self.pair.boot(&spec)
    }
}

/// Whether there is firmware to test with.
fn has_firmware() -> bool {
    let there = std::path::Path::new(FIRMWARE).exists();
    if !there {
        println!("skipped: {FIRMWARE} is not there (package ovmf)");
    }
    there
}

fn progress(host: &Host) -> Result<Progress> {
    let progress = uefi_program::progress(&File::open(host.ram_file()?)?)?;
    ensure!(progress.wrong == 0, "the guest stopped at {progress:?}");
    Ok(progress)
}

/// Waits until the guest runs on this host and its variable is this.
fn shows(host: &Host, number: u32) -> Result<()> {
    let until = Instant::now() + LONG;
    let mut from = None;
    loop {
        match progress(host) {
            Ok(now) if now.number == number => match from {
                Some(round) if round != now.round => return Ok(()),
                _ => from = Some(now.round),
            },
            Ok(_) => from = None,
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => {}
        }
        ensure!(
            Instant::now() < until,
            "{} shows {:?}, not {number}",
            host.name,
            progress(host)
        );
        std::thread::sleep(LOOK_EVERY);
    }
}

/// What a guest shows first.
fn first_shown(host: &Host) -> Result<u32> {
    let until = Instant::now() + LONG;
    loop {
        match progress(host)?.number {
            0 => ensure!(Instant::now() < until, "it shows nothing"),
            number => return Ok(number),
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn ask(host: &Host, request: &VmRequest) -> Result<()> {
    match host.ask(request)? {
        VmAnswer::Done(_) => Ok(()),
        other => anyhow::bail!("{request:?}: {other:?}"),
    }
}

fn want(host: &Host, number: u32) -> Result<()> {
    let ram = File::options().write(true).open(host.ram_file()?)?;
    Ok(uefi_program::want(&ram, number)?)
}

fn variables(host: &Host) -> PathBuf {
    host.state_dir().join("uefi-variables")
}

/// Nothing of them is left where the VM is not.
fn has_none(host: &Host) -> Result<()> {
    let names = std::fs::read_dir(host.state_dir())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()?;
    let left = names.iter().find(|name| name.starts_with("uefi-variables"));
    ensure!(left.is_none(), "{left:?} is left on {}", host.name);
    Ok(())
}

/// The one that has them, once the other has removed what it had: a host whose VM process died does so a moment after the migration's end.
fn only_holder<'a>(a: &'a Host, b: &'a Host) -> Result<&'a Host> {
    let until = Instant::now() + LONG;
    loop {
        let (none_at_a, none_at_b) = (has_none(a), has_none(b));
        match (&none_at_a, &none_at_b) {
            (Ok(()), Err(_)) => return Ok(b),
            (Err(_), Ok(())) => return Ok(a),
            _ => {}
        }
        let (a, b) = (none_at_a.is_err(), none_at_b.is_err());
        ensure!(a || b, "neither host has the variables");
        ensure!(Instant::now() < until, "both hosts have variables");
        std::thread::sleep(LOOK_EVERY);
    }
}

#[test]
fn a_variable_goes_with_the_guest_and_stays_over_reset_crash_and_stop() -> Result<()> {
    if has_firmware() {
        let site = Site::new()?;
        let (a, b) = (&site.pair.a, &site.pair.b);
        site.boot_disk()?;
        shows(a, 1)?;
        has_none(b)?;
        site.pair.migrate(a, b, &Options::default())?;
        shows(b, 1)?;
        has_none(a)?;
        ask(b, &VmRequest::Reset)?;
        shows(b, 2)?;
        want(b, 40)?;
        shows(b, 40)?;
        site.pair.migrate(b, a, &Options::default())?;
        shows(a, 40)?;
        has_none(b)?;
        ask(a, &VmRequest::Reset)?;
        shows(a, 41)?;
        // Its QEMU dies, then a person stops it.
        a.kill_qemu()?;
        a.wait_state(VmState::Crashed, LONG)?;
        ask(a, &VmRequest::Boot)?;
        shows(a, 42)?;
        ask(a, &VmRequest::Stop { force: true })?;
        ask(a, &VmRequest::Start)?;
        shows(a, 43)?;
    }
    Ok(())
}

#[test]
fn a_kernel_is_booted_by_uefi_too() -> Result<()> {
    if has_firmware() {
        let site = Site::new()?;
        site.boot_kernel()?;
        shows(&site.pair.a, 1)?;
        site.pair
            .migrate(&site.pair.a, &site.pair.b, &Options::default())?;
        ask(&site.pair.b, &VmRequest::Reset)?;
        shows(&site.pair.b, 2)?;
    }
    Ok(())
}

/// The variable is changed while the guest moves; then the destination's VM process, or its QEMU, dies at this step.
fn cut(point: &'static str, victim: &'static str) -> Result<()> {
    println!("  {point} {victim}");
    let site = Site::new()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.boot_kernel()?;
    shows(a, 1)?;
    b.kill_process();
    b.arm(point, victim);
    b.start_process()?;
    a.kill_process();
    a.arm("source.pass", "hold");
    a.start_process()?;
    a.wait_state(VmState::Running, LONG)?;
    let id = site.pair.begin(a, b, &Options::default())?;
    a.wait_fault(LONG)?;
    want(a, 70)?;
    shows(a, 70)?;
    a.release()?;
    b.wait_fault(LONG)?;
    let report = site.pair.wait_end(a, &id, LONG)?;
    let holder = only_holder(a, b)?;
    println!("  {:?}: on {}", report.outcome, holder.name);
    ensure!(variables(holder).exists());
    let until = Instant::now() + LONG;
    // A guest whose QEMU died is booted by its agent, once its source has said that it knows.
    while holder.state()? != VmState::Running {
        let booted = ask(holder, &VmRequest::Boot);
        ensure!(
            Instant::now() < until,
            "{} does not boot it: {booted:?}",
            holder.name
        );
        std::thread::sleep(LOOK_EVERY);
    }
    let is_new = holder.name == b.name && victim == "kill-qemu";
    let now = if is_new { 71 } else { 70 };
    let shown = first_shown(holder)?;
    ensure!(shown == now, "it shows {shown}, not {now}");
    ask(holder, &VmRequest::Reset)?;
    shows(holder, now + 1)
}

#[test]
fn a_destination_that_dies_loses_no_variable() -> Result<()> {
    if has_firmware() {
        for (point, victim) in [
            ("destination.loaded", "kill"),
            ("journal.ready.after", "kill-qemu"),
            ("destination.state-comes", "kill"),
        ] {
            cut(point, victim)?;
        }
    }
    Ok(())
}

/// QEMU would write what came only once the guest runs: it is in the file before.
#[test]
fn what_came_is_there_for_a_guest_that_is_booted_anew() -> Result<()> {
    match has_firmware() {
        true => cut("journal.holds.after", "kill-qemu"),
        false => Ok(()),
    }
}

#[test]
fn a_host_without_uefi_says_so_and_nothing_is_left() -> Result<()> {
    let site = Site::new()?;
    *site.pair.a.uefi.lock().expect("a test's own") =
        ["/nonexistent/code", "/nonexistent/vars"].map(Into::into);
    let refusal = site.boot_disk().expect_err("no firmware").to_string();
    for words in [
        "VM 'vm' has firmware = \"uefi\"",
        "host 'a'",
        "/nonexistent/code",
    ] {
        ensure!(refusal.contains(words), "{refusal}");
    }
    has_none(&site.pair.a)?;
    ensure!(site.pair.a.is_clean());
    Ok(())
}
