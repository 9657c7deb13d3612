//! A VM whose disk goes along to a host with which it shares nothing, and one whose disk changes hands.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{HOLE, ImageAway, LONG, LOOK_EVERY, Site, own};
use godwit_e2e::pair::Options;
use godwit_types::disk_move::Method;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::{LimitedBy, Outcome};
use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;

#[test]
fn a_vm_moves_with_its_disk_to_a_host_that_has_nothing_of_it_and_back() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let capped = Options {
        max_bandwidth_mbit_per_s: Some(200),
        ..Options::default()
    };
    for (from, to, options) in [(a, b, &Options::default()), (b, a, &capped)] {
        let report = site.pair.migrate(from, to, options)?;
        println!("  {:.2} s, {:.1} ms", report.total_s, report.switchover_ms);
        let limit = report.disks_limited_by.context("nothing limited it")?;
        // A cap counts where storage does not limit more.
        let may_be_capped = options.max_bandwidth_mbit_per_s.is_some();
        ensure!(limit != LimitedBy::Cap || may_be_capped, "{limit:?}");
        site.goes_on(to, 20)?;
        site.is_whole(to)?;
        site.has_nothing(from)?;
        ensure!(site.images(to)? == ["root.raw"], "{:?}", site.images(to)?);
        let used = std::fs::metadata(own(to, &site.path))?.blocks() * 512;
        ensure!(used < HOLE + (2 << 20), "holes were filled: {used} bytes");
        ensure!(report.disk_bytes > 40 << 20 && report.disk_left_bytes == 0);
    }
    Ok(())
}

#[test]
fn a_vm_moves_with_two_disks_that_it_writes_to_and_back() -> Result<()> {
    let site = Site::obedient(&["root", "data"])?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    for (from, to) in [(a, b), (b, a)] {
        let report = site.pair.migrate(from, to, &Options::default())?;
        println!("  {:.2} s, {:.1} ms", report.total_s, report.switchover_ms);
        site.goes_on(to, 20)?;
        site.is_whole(to)?;
        site.has_nothing(from)?;
        let images = site.images(to)?;
        ensure!(images == ["data.raw", "root.raw"], "{images:?}");
        let bytes = report.disk_bytes;
        ensure!(bytes > 80 << 20 && report.disk_left_bytes == 0, "{bytes}");
    }
    Ok(())
}

#[test]
fn a_vm_whose_disk_both_hosts_have_moves_its_memory_alone() -> Result<()> {
    let site = Site::shared()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let before = std::fs::metadata(&site.path)?.ino();
    for (from, to) in [(a, b), (b, a)] {
        let report = site.pair.migrate(from, to, &Options::default())?;
        site.goes_on(to, 20)?;
        site.is_whole(to)?;
        ensure!(report.disk_bytes == 0 && report.bytes_on_wire < 24 << 20);
        ensure!(std::fs::metadata(&site.path)?.ino() == before);
    }
    Ok(())
}

#[test]
fn a_cancelled_move_leaves_the_guest_where_it_was_and_nothing_of_its_disk_elsewhere() -> Result<()>
{
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let id = site.pair.begin(a, b, &site.slowly())?;
    site.is_half_way(&id)?;
    ensure!(
        site.images(b)?
            .iter()
            .all(|name| name.contains(".arriving-"))
    );
    a.ask(&VmRequest::Cancel {
        migration: id.clone(),
        reason: "enough".into(),
    })?;
    site.ends(&id, Outcome::Cancelled)?;
    site.has_nothing(b)?;
    site.goes_on(a, 20)?;
    site.is_whole(a)?;
    site.pair.migrate(a, b, &Options::default())?;
    site.is_whole(b)
}

/// Its source ends the migration, and for now has not the image that its guest works with.
#[test]
fn what_came_of_a_disk_stays_until_its_source_has_the_image() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let source = ImageAway::of(&site, &Options::default())?;
    let id = &source.migration;
    let waits = format!("what came of disk 'root' with migration {id} stays as ");
    let deadline = Instant::now() + LONG;
    while !std::fs::read_to_string(b.log())?.contains(&waits) {
        ensure!(Instant::now() < deadline, "it does not say that it waits");
        std::thread::sleep(LOOK_EVERY);
    }
    ensure!(site.images(b)? == [format!("root.raw.arriving-{id}")]);
    source.is_back()?;
    site.goes_on(a, 20)?;
    site.has_nothing(b)?;
    site.is_whole(a)
}

#[test]
fn a_link_that_is_lost_while_a_disk_is_copied_is_made_again_and_nothing_is_missing() -> Result<()> {
    let site = Site::apart()?;
    site.migrates_over_a_lost_link(Method::Mirror)?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.is_whole(b)?;
    site.has_nothing(a)
}

#[test]
fn a_process_that_dies_while_a_disk_is_copied_leaves_the_guest_at_its_source() -> Result<()> {
    for (point, at_source) in [
        ("source.connected", true),
        ("source.disks-copied", true),
        ("source.stopped", true),
        ("source.last-pages", true),
        ("destination.disk-change", false),
        ("destination.state-whole", false),
        ("destination.disks-durable", false),
    ] {
        let site = Site::apart()?;
        let ended = site.dies_before_the_handover(point, at_source);
        ended.with_context(|| point)?;
        site.is_whole(&site.pair.a).with_context(|| point)?;
        println!("  killed at {point}");
    }
    Ok(())
}

#[test]
fn a_process_that_dies_in_the_handover_leaves_one_guest_with_its_whole_disk() -> Result<()> {
    for (point, at_source) in [
        ("journal.gave.after", true),
        ("source.permit.before", true),
        ("source.permit.after", true),
        ("journal.moved.after", true),
        ("journal.ready.after", false),
        ("journal.holds.before", false),
        ("journal.holds.after", false),
        ("running", false),
    ] {
        let site = Site::apart()?;
        let has_gone = site.dies_in_the_handover(point, at_source);
        let holder = match has_gone.with_context(|| point)? {
            true => &site.pair.b,
            false => &site.pair.a,
        };
        site.is_whole(holder).with_context(|| point)?;
    }
    Ok(())
}

#[test]
fn a_guest_stays_where_its_whole_disk_is_when_somebody_takes_away_what_comes() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    for exchanged in [false, true] {
        let id = site.pair.begin(a, b, &site.slowly())?;
        site.is_half_way(&id)?;
        let [name] = &site.images(b)?[..] else {
            bail!("{:?}", site.images(b)?);
        };
        let directory = own(b, site.path.parent().context("a directory")?);
        let (came, victim) = (directory.join(name), directory.join("victim"));
        std::fs::remove_file(&came)?;
        if exchanged {
            std::fs::write(&victim, "somebody's")?;
            std::os::unix::fs::symlink(&victim, &came)?;
        }
        let report = site.ends(&id, Outcome::Failed)?;
        let why = report.reason.unwrap_or_default();
        ensure!(why.contains("is not the image any more"), "{why}");
        site.goes_on(a, 20)?;
        site.is_whole(a)?;
        ensure!(site.images(a)? == ["root.raw"], "{:?}", site.images(a)?);
        if exchanged {
            ensure!(std::fs::read(&victim)? == b"somebody's");
            std::fs::remove_file(&victim)?;
        }
        site.has_nothing(b)?;
    }
    Ok(())
}

#[test]
fn a_file_where_a_disk_is_to_come_is_not_touched() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    std::fs::write(own(b, &site.path), b"somebody's")?;
    let refused = site.pair.begin(a, b, &Options::default());
    let refused = refused.err().context("it began")?.to_string();
    let told = format!("a file is at {} already", site.path.display());
    ensure!(refused.contains(&told), "{refused}");
    ensure!(std::fs::read(own(b, &site.path))? == b"somebody's");
    ensure!(site.images(b)? == ["root.raw"]);
    site.goes_on(a, 20)
}
