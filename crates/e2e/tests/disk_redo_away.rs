//! A VM that goes to another host with its disk by snapshotting, the laboratory's first method, while its guest writes to it.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::{LONG, LOOK_EVERY, Site, dies_at, does_at, has_died};
use godwit_e2e::pair::Options;
use godwit_e2e::relay::Mode;
use godwit_types::disk_move::Method;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::Outcome;
use std::time::Instant;

fn by_logs() -> Options {
    Options {
        method: Method::Snapshot,
        ..Options::default()
    }
}

/// The disk is one image at its source, without logs, its guest goes on there, and nothing is at the destination.
fn has_stayed(site: &Site) -> Result<()> {
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.goes_on(a, 20)?;
    let deadline = Instant::now() + LONG;
    while site.images(a)? != ["root.raw"] {
        ensure!(
            Instant::now() < deadline,
            "{:?} is left at the source",
            site.images(a)?
        );
        std::thread::sleep(LOOK_EVERY);
    }
    site.is_whole(a)?;
    site.has_nothing(b)
}

#[test]
fn a_vm_moves_with_its_disk_by_redo_logs_to_another_host_and_back() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    for (from, to) in [(a, b), (b, a)] {
        let report = site.goes_as_one_image((from, to), Method::Snapshot)?;
        let logs = report.redo_logs.context("nothing is told of its logs")?;
        let steps = report.disk_iterations.iter().map(|of| of.iterations.len());
        // The image first, then each log but the last, which is sent while the guest stands still.
        ensure!(steps.max() == Some(logs.logs as usize), "{report:?}");
        ensure!(logs.space_max_bytes > 0, "{logs:?}");
    }
    Ok(())
}

#[test]
fn a_link_that_is_lost_while_redo_logs_are_sent_is_made_again_and_nothing_is_missing() -> Result<()>
{
    let site = Site::apart()?;
    site.migrates_over_a_lost_link(Method::Snapshot)?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.is_whole(b)?;
    site.has_nothing(a)
}

#[test]
fn a_process_that_dies_while_redo_logs_are_sent_leaves_the_vm_and_its_whole_disk_at_its_source()
-> Result<()> {
    for point in [
        "redo.made",
        "redo.put-over",
        "source.log-put-over",
        "source.base-sent",
        "source.disks-closed",
        "source.last-log",
        "source.last-pages",
    ] {
        let told = || format!("killed at {point}");
        let site = Site::apart()?;
        let (a, b) = (&site.pair.a, &site.pair.b);
        dies_at(a, point)?;
        let _ = site.pair.try_begin(a, b, &by_logs())?;
        has_died(a).with_context(told)?;
        has_stayed(&site).with_context(told)?;
        println!("  {}", told());
    }
    Ok(())
}

/// What was sent of its last log counts for nothing: the guest has gone on, and is under another log.
#[test]
fn a_guest_whose_link_is_lost_while_its_last_log_is_sent_goes_on_and_moves_with_another_log()
-> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let options = Options {
        relayed: true,
        ..by_logs()
    };
    does_at(a, "source.disks-closed", "hold")?;
    let id = site.pair.begin(a, b, &options)?;
    a.wait_fault(LONG)?;
    site.pair.link(Mode::Cut);
    a.release()?;
    site.goes_on(a, 50)?;
    site.pair.link(Mode::Open);
    site.ends(&id, Outcome::Completed)?;
    site.goes_on(b, 20)?;
    site.is_whole(b)?;
    site.has_nothing(a)
}

#[test]
fn a_last_log_that_takes_too_long_ends_the_migration_and_leaves_one_image_at_the_source()
-> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    does_at(a, "source.last-log", "late")?;
    let id = site.pair.begin(a, b, &by_logs())?;
    let report = site.ends(&id, Outcome::Failed)?;
    let why = report.reason.as_deref().unwrap_or_default();
    ensure!(why.contains("were not copied within"), "{report:?}");
    ensure!(a.fault_happened(), "it was never stopped");
    has_stayed(&site)?;
    site.pair.migrate(a, b, &by_logs())?;
    site.is_whole(b)?;
    site.has_nothing(a)
}

/// While its image is sent, and between the image and what follows.
#[test]
fn a_migration_by_redo_logs_that_is_called_off_leaves_one_image_and_may_be_tried_again()
-> Result<()> {
    for point in ["source.log-put-over", "source.base-sent"] {
        let site = Site::apart()?;
        let (a, b) = (&site.pair.a, &site.pair.b);
        does_at(a, point, "hold")?;
        let id = site.pair.begin(a, b, &by_logs())?;
        a.wait_fault(LONG)?;
        a.ask(&VmRequest::Cancel {
            migration: id.clone(),
            reason: "enough".into(),
        })?;
        a.release()?;
        site.ends(&id, Outcome::Cancelled)?;
        has_stayed(&site).with_context(|| point.to_owned())?;
        site.pair.migrate(a, b, &by_logs())?;
        site.is_whole(b)?;
        site.has_nothing(a)?;
    }
    Ok(())
}
