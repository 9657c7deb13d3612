//! What is left of a snapshot whose process dies in the middle, or that cannot be written down to its end: nothing, and a chain that others read.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::snapshots::{
    as_qemu_reads, delete, description_of, has_round, names, stop, take, top,
};
use disk_site::{LONG, LOOK_EVERY, Site, dies_at, does_at, has_died, has_successor};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Instant;

/// The user of these hosts' QEMUs.
const NOBODY: u32 = 65534;

/// Waits until this is so.
fn until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "{what}");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[test]
fn what_a_process_that_died_made_for_a_snapshot_is_removed_by_its_successor_though_nobody_asks()
-> Result<()> {
    for first in [None, Some("first")] {
        let site = Site::local()?;
        if let Some(name) = first {
            take(&site, name)?;
        }
        let mut before = site.images(&site.pair.a)?;
        dies_at(&site.pair.a, "snapshot.made")?;
        ensure!(take(&site, "second").is_err(), "it is taken");
        has_died(&site.pair.a)?;
        // What was to become an image, and is none; and what a person has made.
        let theirs = "root.raw.d8.vmdk.new";
        for (half, mode) in [
            ("root.raw.d7-sesparse.vmdk.new", 0o600),
            ("root.raw.vmdk.new", 0o600),
            (theirs, 0o644),
        ] {
            let half = site.path.with_file_name(half);
            std::fs::write(&half, "")?;
            std::fs::set_permissions(&half, Permissions::from_mode(mode))?;
            // As it was made; nobody else removes it from such a directory.
            std::os::unix::fs::chown(&half, Some(NOBODY), None)?;
        }
        before.push(theirs.to_owned());
        before.sort();
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        has_successor(&site.pair.a, starts)?;
        until("something is left of it", || {
            Ok(site.images(&site.pair.a)? == before)
        })?;
        site.goes_on(&site.pair.a, 20)?;
        let round = stop(&site)?;
        has_round(&site, &top(&site)?, round)?;
    }
    Ok(())
}

#[test]
fn a_process_that_dies_as_an_image_is_given_up_leaves_a_chain_that_qemu_img_reads() -> Result<()> {
    for point in ["snapshot.tidied", "snapshot.described"] {
        let site = Site::local()?;
        for name in ["first", "second"] {
            take(&site, name)?;
            site.goes_on(&site.pair.a, 10)?;
        }
        dies_at(&site.pair.a, point)?;
        // Whoever asked may hear nothing of it.
        drop(delete(&site, "first"));
        has_died(&site.pair.a).with_context(|| point)?;
        until("not one delta alone is left", || {
            let files = site.images(&site.pair.a)?;
            let deltas = files.iter().filter(|file| file.ends_with("-sesparse.vmdk"));
            Ok(deltas.count() == 1)
        })?;
        let raw = as_qemu_reads(&site, &top(&site)?).with_context(|| point)?;
        std::fs::remove_file(raw)?;
        site.goes_on(&site.pair.a, 10)?;
    }
    Ok(())
}

#[test]
fn a_snapshot_that_cannot_be_noted_as_complete_is_told_as_taken_and_noted_later() -> Result<()> {
    let site = Site::local_of(&["root", "data"])?;
    let host = &site.pair.a;
    does_at(host, "snapshot.committed", "hold")?;
    let description = description_of(&site.path);
    let in_the_way = description.with_extension("images.new");
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| take(&site, "one"));
        host.wait_fault(LONG)?;
        std::fs::create_dir(&in_the_way)?;
        host.release()?;
        let taken = taken.join().ok().context("it died")?;
        println!("  {}", taken?);
        Ok::<_, anyhow::Error>(())
    })?;
    ensure!(names(&site)? == ["one"]);
    let is_begun = || -> Result<bool> {
        let described: serde_json::Value = serde_json::from_slice(&std::fs::read(&description)?)?;
        Ok(described["snapshots"][0]["begun"] == true)
    };
    ensure!(is_begun()?, "it was noted");
    std::fs::remove_dir(&in_the_way)?;
    let starts = host.starts();
    host.signal_kill()?;
    has_successor(host, starts)?;
    until("it counts as a half", || Ok(!is_begun()?))?;
    ensure!(names(&site)? == ["one"]);
    site.goes_on(host, 20)?;
    let round = stop(&site)?;
    has_round(&site, &top(&site)?, round)
}
