//! What the guest does by itself while it moves, and what the destination must not do before the permit.

use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_testkit::guest::checker;
use godwit_testkit::guest::counter::{Action, CounterSpec};
use godwit_types::MigrationId;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::{MigrationReport, Outcome};
use godwit_types::vm::{Accelerator, VmState};
use std::fs::File;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);

/// A move during which the guest acts: precopy is held after its first pass until it has.
fn acts(action: Action, wanted: VmState) -> anyhow::Result<(Pair, MigrationId, MigrationReport)> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.a.arm("source.pass", "hold");
    let guest = CounterSpec::flat(24).slowed(4000).then(action, 40);
    pair.boot(&counter_vm(pair.dir(), &guest, 32)?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.a.wait_fault(LONG)?;
    // The guest acts while nothing else goes on; its control block says so.
    let ram = pair.a.ram_file()?;
    let deadline = Instant::now() + LONG;
    while checker::control(&File::open(&ram)?).is_ok_and(|control| control.state < 2) {
        anyhow::ensure!(Instant::now() < deadline, "the guest does not act");
        std::thread::sleep(Duration::from_millis(5));
    }
    pair.a.release()?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    pair.a.wait_state(wanted, LONG)?;
    Ok((pair, id, report))
}

#[test]
fn a_guest_that_powers_off_in_a_move_is_off_at_the_source() -> anyhow::Result<()> {
    let (pair, _, report) = acts(Action::PowerOff, VmState::Stopped)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Failed));
    let reason = report.reason.unwrap_or_default();
    anyhow::ensure!(reason.contains("powered itself off"), "{reason}");
    clean(&pair)?;
    pair.a.ask(&VmRequest::Start)?;
    pair.conclude(None)?;
    Ok(())
}

#[test]
fn a_guest_that_panics_in_a_move_stands_still_at_the_source() -> anyhow::Result<()> {
    let (pair, _, report) = acts(Action::Panic, VmState::Panicked)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Failed));
    let reason = report.reason.unwrap_or_default();
    anyhow::ensure!(reason.contains("panicked"), "{reason}");
    pair.a.ask(&VmRequest::Stop { force: true })?;
    clean(&pair)
}

fn clean(pair: &Pair) -> anyhow::Result<()> {
    let deadline = Instant::now() + LONG;
    while !(pair.a.is_clean() && pair.b.is_clean()) {
        anyhow::ensure!(Instant::now() < deadline, "something is left behind");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[test]
fn a_guest_that_resets_itself_in_a_move_arrives_and_boots_there_or_here() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.a.arm("source.pass", "hold");
    let guest = CounterSpec::flat(24).slowed(4000).then(Action::Reset, 40);
    pair.boot(&counter_vm(pair.dir(), &guest, 32)?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.a.wait_fault(LONG)?;
    let ram = pair.a.ram_file()?;
    let deadline = Instant::now() + LONG;
    while !checker::control(&File::open(&ram)?).is_ok_and(|control| control.boots == 2) {
        anyhow::ensure!(Instant::now() < deadline, "the guest does not reset itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    pair.a.release()?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(
        report.outcome == Some(Outcome::Completed),
        "{:?}",
        report.reason
    );
    pair.b.wait_state(VmState::Running, LONG)?;
    wait_passes(&pair.b.ram_file()?, 2, LONG)?;
    pair.b.ask(&VmRequest::Pause)?;
    let checked = godwit_e2e::guests::check(&pair.b.ram_file()?)?;
    anyhow::ensure!(
        checked.control.boots == 2,
        "booted {} times",
        checked.control.boots
    );
    Ok(())
}

/// A loaded destination without the permit: its guest stands still for as long as it takes.
fn stands_still(at_source: bool, point: &'static str) -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.patience(LONG);
    let host = if at_source { &pair.a } else { &pair.b };
    host.arm(point, "hold");
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    host.wait_fault(LONG)?;
    for _ in 0..3 {
        let moving = pair.moving_now()?;
        anyhow::ensure!(
            moving.is_empty(),
            "before the permit a guest runs in {moving:?}"
        );
    }
    host.release()?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name);
    Ok(())
}

#[test]
fn nobody_runs_while_the_loaded_destination_waits() -> anyhow::Result<()> {
    stands_still(false, "destination.loaded")
}

#[test]
fn nobody_runs_before_the_gift_is_durable() -> anyhow::Result<()> {
    stands_still(true, "journal.gave.before")
}

#[test]
fn nobody_runs_before_the_holding_is_durable() -> anyhow::Result<()> {
    stands_still(false, "journal.holds.before")
}

fn running(pair: &Pair) -> anyhow::Result<i32> {
    pair.a
        .vm()?
        .qemu_pid
        .ok_or_else(|| anyhow::anyhow!("no QEMU"))
}

#[test]
fn a_hypervisor_that_is_told_to_end_has_crashed_and_the_vm_still_wants_to_run() -> anyhow::Result<()>
{
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    let pid = running(&pair)?;
    pair.a.terminate_qemu()?;
    pair.a.wait_state(VmState::Crashed, LONG)?;
    // Only a VM that runs by its record is booted without a person's wish.
    pair.a.ask(&VmRequest::Boot)?;
    pair.a.wait_state(VmState::Running, LONG)?;
    anyhow::ensure!(running(&pair)? != pid);
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    pair.a.ask(&VmRequest::Stop { force: true })?;
    let off = pair
        .a
        .ask(&VmRequest::Boot)
        .err()
        .map(|error| error.to_string());
    anyhow::ensure!(off.is_some_and(|text| text.contains("does not run by the record")));
    Ok(())
}

/// The guest goes on in the same QEMU, whatever happens to the files that tell of it.
#[test]
fn a_guest_outlives_its_run_directory() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.supervised
        .store(false, std::sync::atomic::Ordering::SeqCst);
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
    let ram = pair.a.ram_file()?;
    let mut passes = wait_passes(&ram, 1, LONG)?;
    let pid = running(&pair)?;
    let mut goes_on = |what: &str| -> anyhow::Result<()> {
        passes = wait_passes(&ram, passes + 1, LONG)?;
        println!("{what}: {passes} passes");
        Ok(())
    };
    // The VM process lives: its socket and the identity come back.
    std::fs::remove_file(pair.a.run_dir().join("qemu.json"))?;
    std::fs::remove_file(pair.a.run_dir().join("vm.sock"))?;
    pair.a.wait_state(VmState::Running, LONG)?;
    anyhow::ensure!(running(&pair)? == pid && pair.a.run_dir().join("qemu.json").exists());
    goes_on("socket and identity gone")?;
    // It does not, and the identity is gone: QEMU is found by its RAM file.
    pair.a.kill_process();
    std::fs::remove_file(pair.a.run_dir().join("qemu.json"))?;
    pair.a.start_process()?;
    pair.a.wait_state(VmState::Running, LONG)?;
    anyhow::ensure!(running(&pair)? == pid);
    goes_on("identity gone")?;
    // Everything is gone: QEMU cannot be asked, and is left alone until a person ends it.
    pair.a.kill_process();
    std::fs::remove_dir_all(pair.a.run_dir())?;
    std::fs::create_dir_all(pair.a.run_dir())?;
    pair.a.start_process()?;
    let seen = pair.a.vm()?;
    anyhow::ensure!(
        seen.state == VmState::Unreachable && seen.qemu_pid == Some(pid),
        "{seen:?}"
    );
    anyhow::ensure!(pair.a.ask(&VmRequest::Boot).is_err());
    goes_on("all gone")?;
    pair.a.ask(&VmRequest::Stop { force: true })?;
    pair.a.wait_state(VmState::Stopped, LONG)?;
    clean(&pair)
}
