//! What a disk's image says of the host that has it, and images that are not opened for what they say.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::{LONG, Site, own};
use godwit_blockio::holder;
use godwit_e2e::Host;
use godwit_e2e::pair::{Options, Pair};
use godwit_ownership::ImageRecord;
use godwit_types::host_api::VmRequest;
use godwit_types::vm::VmState;
use godwit_types::{Generation, HostName};
use godwit_vmproc::image;
use std::fs::File;
use std::os::fd::AsFd as _;

fn record(host: &Host, site: &Site) -> Result<ImageRecord> {
    let record = image::show(&own(host, &site.path))?;
    record.context("the image says nothing of who has it")
}

/// Has the image say something else, as one that was put back from a copy does.
fn put_back(host: &Host, site: &Site, record: &ImageRecord) -> Result<()> {
    let image = File::options()
        .read(true)
        .write(true)
        .open(own(host, &site.path))?;
    let held = holder::read(image.as_fd())?;
    let text = serde_json::to_vec(record)?;
    ensure!(holder::replace(image.as_fd(), held.as_ref(), &text)?);
    Ok(())
}

fn stop(host: &Host) -> Result<()> {
    host.ask(&VmRequest::Stop { force: true })?;
    host.wait_state(VmState::Stopped, LONG).map(drop)
}

/// Why the VM is not started.
fn refused(host: &Host) -> Result<String> {
    let refused = host.ask(&VmRequest::Start).err();
    Ok(refused.context("it was started")?.to_string())
}

#[test]
fn an_image_that_changes_hands_says_which_host_has_it() -> Result<()> {
    let site = Site::shared()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let mut before = record(a, &site)?;
    ensure!(before.holder == a.name && before.disk == "root");
    for (from, to) in [(a, b), (b, a)] {
        site.pair.migrate(from, to, &Options::default())?;
        site.goes_on(to, 10)?;
        let now = record(to, &site)?;
        ensure!(now.holder == to.name && now.generation > before.generation);
        ensure!(now.image == before.image, "it is the same image");
        before = now;
    }
    Ok(())
}

#[test]
fn a_disk_that_comes_along_says_that_it_is_there() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let before = record(a, &site)?;
    site.pair.migrate(a, b, &Options::default())?;
    site.goes_on(b, 10)?;
    let now = record(b, &site)?;
    ensure!(now.holder == b.name && now.generation > before.generation);
    Ok(())
}

#[test]
fn an_image_that_was_put_back_from_an_old_copy_is_not_opened_until_a_person_lets_it() -> Result<()>
{
    let site = Site::local()?;
    let a = &site.pair.a;
    let now = record(a, &site)?;
    stop(a)?;
    let older = ImageRecord {
        taken: now.taken - 1,
        ..now.clone()
    };
    put_back(a, &site, &older)?;
    let why = refused(a)?;
    ensure!(why.contains("it is an older copy"), "{why}");
    ensure!(why.contains("godwit image release"), "{why}");
    ensure!(record(a, &site)? == older, "what is refused is not changed");
    ensure!(image::release(&own(a, &site.path))? == Some(older));
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 5)?;
    ensure!(
        record(a, &site)?.image != now.image,
        "it is another image from now on"
    );
    Ok(())
}

#[test]
fn an_image_that_another_host_took_later_is_not_opened() -> Result<()> {
    let site = Site::local()?;
    let a = &site.pair.a;
    let now = record(a, &site)?;
    stop(a)?;
    let elsewhere = ImageRecord {
        holder: HostName::new("z")?,
        generation: Generation(now.generation.0 + 5),
        ..now.clone()
    };
    put_back(a, &site, &elsewhere)?;
    let why = refused(a)?;
    ensure!(
        why.contains("host 'z' has had it under generation"),
        "{why}"
    );
    put_back(a, &site, &now)?;
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 5)
}

#[test]
fn a_disk_whose_path_is_other_storage_on_the_other_host_does_not_change_hands() -> Result<()> {
    let site = Site::booted(Pair::apart, true)?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    std::fs::copy(own(a, &site.path), own(b, &site.path))?;
    let begun = site.pair.try_begin(a, b, &Options::default())?.1;
    let why = begun.err().context("it began to move")?;
    let why = format!("{why:#}");
    ensure!(
        why.contains("mount the same storage there on both hosts"),
        "{why}"
    );
    site.goes_on(a, 10)?;
    ensure!(record(a, &site)?.holder == a.name);
    Ok(())
}
