//! What a guest does by itself, or has done to it, while its disk is mirrored to another host.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{Answering, Fragile, LONG, LOOK_EVERY, Site, progress};
use godwit_e2e::obedient::{Deed, order};
use godwit_e2e::pair::Options;
use godwit_testkit::guest::boot_disk;
use godwit_testkit::testvol::{self, Settings, Volume};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::Outcome;
use godwit_types::vm::VmState;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// A guest that begins anew arrives with its disk as it left it.
fn begins_anew_and_arrives(reset: impl FnOnce(&Site) -> Result<()>) -> Result<()> {
    let site = Site::obedient(&["root"])?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.goes_on(a, 100)?;
    let id = site.pair.begin(a, b, &site.slowly())?;
    site.is_half_way(&id)?;
    let before = progress(a)?.round;
    let answering = Answering::of(a)?;
    reset(&site)?;
    let deadline = Instant::now() + LONG;
    while progress(a).or_else(|_| progress(b))?.round >= before {
        ensure!(Instant::now() < deadline, "it does not begin anew");
        std::thread::sleep(LOOK_EVERY);
    }
    site.ends(&id, Outcome::Completed)?;
    answering.end()?;
    site.goes_on(b, 20)?;
    site.is_whole(b)?;
    site.has_nothing(a)
}

#[test]
fn a_guest_that_resets_itself_while_its_disk_is_mirrored_arrives_with_it() -> Result<()> {
    begins_anew_and_arrives(|site| order(&site.pair.a.ram_file()?, Deed::Reset))
}

#[test]
fn a_guest_that_is_reset_while_its_disk_is_mirrored_arrives_with_it() -> Result<()> {
    begins_anew_and_arrives(|site| match site.pair.a.ask(&VmRequest::Reset)? {
        VmAnswer::Done(_) => Ok(()),
        other => bail!("{other:?}"),
    })
}

/// A guest that is no more ends its migration, and its disk has all that it wrote.
fn ends_at_its_source(deed: Deed, state: VmState, why: &str) -> Result<()> {
    ends_at_its_source_on(&Site::obedient(&["root"])?, None, (deed, state, why))
}

/// Also where the volume that its disk is copied to hangs from before it does that until the migration has ended.
fn ends_at_its_source_on(
    site: &Site,
    hangs: Option<&Volume>,
    (deed, state, why): (Deed, VmState, &str),
) -> Result<()> {
    let (a, b) = (&site.pair.a, &site.pair.b);
    let ram = a.ram_file()?;
    // Its name goes with a guest that is off.
    let memory = File::open(&ram)?;
    let id = site.pair.begin(a, b, &site.slowly())?;
    site.is_half_way(&id)?;
    let answering = Answering::of(a)?;
    if let Some(volume) = hangs {
        volume.change(|settings| settings.hangs = true);
        volume.wait_held(1, LONG)?;
    }
    order(&ram, deed)?;
    let reason = site.ends(&id, Outcome::Failed)?.reason;
    let reason = reason.context("no reason")?;
    ensure!(reason.contains(why), "{reason}");
    a.wait_state(state, LONG)?;
    answering.end()?;
    if let Some(volume) = hangs {
        ensure!(volume.counts().held > 0, "it did not hang all the while");
        volume.change(|settings| *settings = Settings::default());
    }
    site.has_nothing(b)?;
    let progress = boot_disk::progress(&memory)?;
    ensure!(!progress.is_wrong, "{progress:?}");
    site.has_all(a, progress.round)?;
    ensure!(site.images(a)? == ["root.raw"]);
    a.ask(&VmRequest::Stop { force: true })?;
    a.wait_state(VmState::Stopped, LONG)?;
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 20)?;
    site.pair.migrate(a, b, &Options::default())?;
    site.goes_on(b, 20)?;
    site.is_whole(b)
}

#[test]
fn a_guest_that_panics_while_its_disk_is_mirrored_stands_still_at_its_source() -> Result<()> {
    ends_at_its_source(Deed::Panic, VmState::Panicked, "panicked")
}

#[test]
fn a_guest_that_panics_while_the_destination_hangs_stands_still_at_its_source_and_qemu_answers()
-> Result<()> {
    let panics = |mounts: &OwnedFd| {
        let hosts = Fragile::of_hosts(mounts)?;
        let (site, volume) = (&hosts.site, Some(&hosts.volume));
        ends_at_its_source_on(site, volume, (Deed::Panic, VmState::Panicked, "panicked"))
    };
    testvol::apart(panics)?.unwrap_or(Ok(()))
}

#[test]
fn a_guest_that_powers_off_while_its_disk_is_mirrored_is_off_at_its_source() -> Result<()> {
    ends_at_its_source(Deed::PowerOff, VmState::Stopped, "powered itself off")
}
