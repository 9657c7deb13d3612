//! The destination's memory: allocated first where that was asked for, and never a reason to lose the guest.

use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::small_ram::SmallRam;
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::Outcome;
use godwit_types::vm::Accelerator;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const MEMORY_MIB: u64 = 64;

fn prepared() -> Options {
    Options {
        prepare: true,
        ..Options::default()
    }
}

fn boot(pair: &Pair) -> anyhow::Result<()> {
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), MEMORY_MIB)?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    Ok(())
}

#[test]
fn a_prepared_destination_has_all_memory_and_says_how_long_that_took() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair)?;
    let id = pair.begin(&pair.a, &pair.b, &prepared())?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(
        report.outcome == Some(Outcome::Completed),
        "{:?}",
        report.reason
    );
    anyhow::ensure!(report.prepare_s > 0.0 && report.prepare_s < report.total_s);
    // Also what the guest never touched.
    let file = std::fs::metadata(pair.b.ram_file()?)?;
    anyhow::ensure!(
        file.blocks() * 512 >= MEMORY_MIB << 20,
        "{} blocks",
        file.blocks()
    );
    let there = pair.b.report(&id)?;
    anyhow::ensure!(there.prepare_s == report.prepare_s);
    pair.conclude(Some(&id))?;
    Ok(())
}

#[test]
fn a_cancel_while_memory_is_allocated_works_at_once() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.b.arm("destination.allocating", "hold");
    boot(&pair)?;
    let id = pair.begin(&pair.a, &pair.b, &prepared())?;
    pair.b.wait_fault(LONG)?;
    pair.a.ask(&VmRequest::Cancel {
        migration: id.clone(),
        reason: "the test cancelled it".into(),
    })?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Cancelled));
    anyhow::ensure!(report.iterations.is_empty() && report.prepare_s == 0.0);
    pair.b.release()?;
    pair.conclude(Some(&id))?;
    Ok(())
}

#[test]
fn a_destination_without_room_refuses_before_anything_is_sent() -> anyhow::Result<()> {
    for options in [prepared(), Options::default()] {
        let pair = Pair::new(Accelerator::Tcg)?;
        let small = SmallRam::over(pair.b.ram_dir(), "8m")?;
        boot(&pair)?;
        let (id, begun) = pair.try_begin(&pair.a, &pair.b, &options)?;
        begun?;
        let report = pair.wait_end(&pair.a, &id, LONG)?;
        let reason = report.reason.unwrap_or_default();
        println!("no room: {reason}");
        anyhow::ensure!(report.outcome == Some(Outcome::Failed));
        anyhow::ensure!(reason.contains("destination out of memory"), "{reason}");
        pair.settle()?;
        drop(small);
        pair.conclude(Some(&id))?;
    }
    Ok(())
}

#[test]
fn pages_of_zeroes_arrive_as_zeroes_in_prepared_memory() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair)?;
    let page = (MEMORY_MIB << 20) / 4096 - 3000;
    let source = std::fs::File::options()
        .write(true)
        .open(pair.a.ram_file()?)?;
    // Written and zero again: the page has memory at the source and comes as zero.
    for byte in [0x5A, 0] {
        source.write_all_at(&[byte; 8 * 4096], page * 4096)?;
    }
    let id = pair.begin(&pair.a, &pair.b, &prepared())?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(
        report.outcome == Some(Outcome::Completed),
        "{:?}",
        report.reason
    );
    anyhow::ensure!(report.iterations.iter().any(|it| it.zero_pages >= 8));
    let mut bytes = vec![1; 8 * 4096];
    std::fs::File::open(pair.b.ram_file()?)?.read_exact_at(&mut bytes, page * 4096)?;
    anyhow::ensure!(bytes.iter().all(|&byte| byte == 0));
    pair.conclude(Some(&id))?;
    Ok(())
}

/// As QEMU's user may, and who has taken QEMU over.
fn resize(path: &std::path::Path, bytes: u64) -> anyhow::Result<()> {
    Ok(std::fs::File::options()
        .write(true)
        .open(path)?
        .set_len(bytes)?)
}

#[test]
fn a_ram_file_of_another_length_moves_nothing_and_ends_no_vm_process() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    // Of the first move that gets so far; a VM process looks at it when it starts.
    pair.a.arm("source.tracking", "hold");
    boot(&pair)?;
    let (path, vm_process) = (pair.a.ram_file()?, pair.a.vm()?.vm_process_pid);
    // What is cut off has never been touched: QEMU and its guest live on.
    for bytes in [MEMORY_MIB << 19, 64 << 40] {
        resize(&path, bytes)?;
        let (id, begun) = pair.try_begin(&pair.a, &pair.b, &Options::default())?;
        let refused = begun.err().map(|error| format!("{error:#}"));
        let refused = refused.ok_or_else(|| anyhow::anyhow!("{bytes} bytes were accepted"))?;
        anyhow::ensure!(refused.contains(&format!("has {bytes} bytes")), "{refused}");
        // Its source says so to the other host; the guest is as it was.
        let there = pair
            .wait_end(&pair.b, &id, LONG)?
            .reason
            .unwrap_or_default();
        anyhow::ensure!(there.contains(&format!("has {bytes} bytes")), "{there}");
        resize(&path, MEMORY_MIB << 20)?;
        pair.settle()?;
    }
    // Cut while it moves.
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.a.wait_fault(LONG)?;
    resize(&path, MEMORY_MIB << 19)?;
    pair.a.release()?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    let reason = report.reason.unwrap_or_default();
    anyhow::ensure!(report.outcome == Some(Outcome::Failed), "{reason}");
    anyhow::ensure!(reason.contains("has changed the file"), "{reason}");
    anyhow::ensure!(pair.a.vm()?.vm_process_pid == vm_process);
    resize(&path, MEMORY_MIB << 20)?;
    pair.settle()?;
    pair.conclude(Some(&id))?;
    Ok(())
}
