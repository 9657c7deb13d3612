//! A disk that is made larger while its guest writes to it, and whatever dies meanwhile.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{LONG, Site, does_at, has_successor, own};
use godwit_e2e::Host;
use godwit_e2e::pair::Options;
use godwit_types::disk_move::{DiskPlace, Method};
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::host_api::{VmAnswer, VmRequest};

const GIB: u64 = 1 << 30;

fn wish(disk: &str, size_gib: u64) -> VmRequest {
    VmRequest::ResizeDisk(ResizeDisk {
        disk: disk.into(),
        size_gib,
    })
}

/// What a person hears.
fn resize(site: &Site, size_gib: u64) -> Result<String> {
    match site.pair.a.ask(&wish("root", size_gib))? {
        VmAnswer::Done(said) => Ok(said),
        other => bail!("{other:?}"),
    }
}

fn refused(site: &Site, request: &VmRequest) -> Result<String> {
    let refused = site.pair.a.ask(request).err();
    let refused = refused.with_context(|| format!("{request:?} was not refused"))?;
    Ok(format!("{refused:#}"))
}

fn length(site: &Site) -> Result<u64> {
    length_at(site, &site.pair.a)
}

fn length_at(site: &Site, host: &Host) -> Result<u64> {
    Ok(std::fs::metadata(own(host, &site.path))?.len())
}

#[test]
fn a_disk_grows_under_its_guest_and_while_the_vm_is_off_and_never_shrinks() -> Result<()> {
    let site = Site::local()?;
    let said = resize(&site, 1)?;
    ensure!(
        said.contains("disk 'root' of VM 'vm' has 1 GiB now, and its guest sees it"),
        "{said}"
    );
    ensure!(length(&site)? == GIB);
    // Once more, as after a kill, is no error.
    resize(&site, 1)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)?;

    resize(&site, 3)?;
    for (request, words) in [
        (
            wish("root", 2),
            "it has 3 GiB already, and a disk is only made larger",
        ),
        (wish("swap", 4), "has no disk 'swap'"),
        (wish("root", 0), "a disk has 1 to 65536"),
    ] {
        let refused = refused(&site, &request)?;
        ensure!(refused.contains(words), "{refused}");
    }
    ensure!(length(&site)? == 3 * GIB);

    // A guest that stands still has its disk all the same.
    site.pair.a.ask(&VmRequest::Pause)?;
    let said = resize(&site, 4)?;
    ensure!(said.contains("once it goes on"), "{said}");
    site.pair.a.ask(&VmRequest::Resume)?;
    site.goes_on(&site.pair.a, 20)?;

    site.pair.a.ask(&VmRequest::Stop { force: true })?;
    let said = resize(&site, 5)?;
    ensure!(said.contains("has 5 GiB now"), "{said}");
    ensure!(length(&site)? == 5 * GIB);
    let smaller = refused(&site, &wish("root", 1))?;
    ensure!(smaller.contains("it has 5 GiB already"), "{smaller}");
    site.pair.a.ask(&VmRequest::Start)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_process_that_dies_before_its_guest_was_told_leaves_that_to_the_next_one() -> Result<()> {
    let site = Site::local()?;
    does_at(&site.pair.a, "disk-resize.durable", "kill")?;
    let starts = site.pair.a.starts();
    ensure!(
        site.pair.a.ask(&wish("root", 1)).is_err(),
        "it was answered"
    );
    has_successor(&site.pair.a, starts)?;
    ensure!(length(&site)? == GIB);
    site.goes_on(&site.pair.a, 20)?;
    // Whoever was not answered asks again.
    resize(&site, 1)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_disk_that_moves_is_not_made_larger_and_one_that_is_made_larger_does_not_move() -> Result<()> {
    let site = Site::apart()?;
    let fast = site.path.with_file_name("fast.raw");
    let places = || {
        vec![DiskPlace {
            disk: "root".into(),
            path: fast.to_string_lossy().into_owned(),
            shared: false,
            max_bandwidth_mbit_per_s: None,
            method: Method::default(),
            without: Vec::new(),
            first_log: godwit_types::disk_move::FirstLog::default(),
        }]
    };
    does_at(&site.pair.a, "disk-resize.durable", "hold")?;
    std::thread::scope(|scope| -> Result<()> {
        let resizing = scope.spawn(|| resize(&site, 1));
        site.pair.a.wait_fault(LONG)?;
        let (_, begun) = site
            .pair
            .try_begin(&site.pair.a, &site.pair.b, &Options::default())?;
        let to_b = format!("{:#}", begun.err().context("it was let go")?);
        let to_fast = refused(&site, &VmRequest::MoveDisks { places: places() })?;
        let again = refused(&site, &wish("root", 2))?;
        for refused in [to_b, to_fast, again] {
            ensure!(refused.contains("is being made larger"), "{refused}");
        }
        site.pair.a.release()?;
        let said = resizing.join();
        said.map_err(|_| anyhow::anyhow!("asking ended badly"))??;
        Ok(())
    })?;
    ensure!(length_at(&site, &site.pair.a)? == GIB);
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_disk_that_was_made_larger_moves_as_large_as_it_is() -> Result<()> {
    let site = Site::apart()?;
    resize(&site, 1)?;
    site.pair
        .migrate(&site.pair.a, &site.pair.b, &Options::default())?;
    ensure!(length_at(&site, &site.pair.b)? == GIB);
    site.goes_on(&site.pair.b, 20)?;
    site.is_whole(&site.pair.b)
}
