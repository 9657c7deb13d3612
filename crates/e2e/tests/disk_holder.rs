//! What a disk's image says of the host that has it, and images that are not opened for what they say.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::{BYTES, LONG, LOOK_EVERY, Site, does_at, own};
use godwit_blockio::holder;
use godwit_e2e::Host;
use godwit_e2e::host::kill_qemu_of;
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::relay::Mode;
use godwit_ownership::ImageRecord;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::host_api::VmRequest;
use godwit_types::vm::VmState;
use godwit_types::{Generation, HostName, VmName};
use godwit_vmproc::image;
use rustix::fs::{XattrFlags, fremovexattr, fsetxattr};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

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

#[test]
fn a_disk_whose_path_is_an_older_copy_on_the_other_host_does_not_change_hands() -> Result<()> {
    let site = Site::booted(Pair::apart, true)?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    // With its attributes, as replication makes it.
    std::fs::copy(own(a, &site.path), own(b, &site.path))?;
    let copied = record(a, &site)?;
    let replica = File::open(own(b, &site.path))?;
    let text = serde_json::to_vec(&copied)?;
    ensure!(holder::replace(replica.as_fd(), None, &text)?);
    stop(a)?;
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 10)?;
    let newest = record(a, &site)?;
    let deadline = Instant::now() + LONG;
    while a
        .known_images()?
        .iter()
        .all(|known| known.taken != newest.taken)
    {
        ensure!(Instant::now() < deadline, "what it knows is not written");
        std::thread::sleep(LOOK_EVERY);
    }
    let begun = site.pair.try_begin(a, b, &Options::default())?.1;
    let why = format!("{:#}", begun.err().context("it began to move")?);
    for words in ["is not that one", "older copy", "mount the same storage"] {
        ensure!(why.contains(words), "{why}");
    }
    ensure!(
        record(b, &site)? == copied,
        "what is refused is not changed"
    );
    site.goes_on(a, 10)
}

#[test]
fn a_guest_that_stood_still_does_not_go_on_over_what_the_other_host_wrote() -> Result<()> {
    let site = Site::shared()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.pair.patience(Duration::from_millis(500));
    does_at(b, "destination.holding.before", "hold")?;
    let options = Options {
        relayed: true,
        ..Options::default()
    };
    let id = site.pair.begin(a, b, &options)?;
    b.wait_fault(LONG)?;
    // It runs there, writes, and nobody hears of it.
    site.goes_on(b, 20)?;
    site.pair.agents_connected.store(false, Ordering::SeqCst);
    site.pair.link(Mode::Cut);
    a.wait_state(VmState::InDoubt, LONG)?;
    site.pair.supervised.store(false, Ordering::SeqCst);
    b.kill_process();
    kill_qemu_of(&b.run_dir());
    let resolve = VmRequest::Resolve {
        run_here: true,
        confirm_fenced: Some(b.name.clone()),
    };
    for request in [&resolve, &VmRequest::Resume] {
        let refused = a.ask(request).err().context("it went on")?.to_string();
        ensure!(refused.contains("host 'b' has had it since"), "{refused}");
        ensure!(refused.contains("start it anew with"), "{refused}");
    }
    ensure!(record(a, &site)?.holder == b.name, "it was taken");
    ensure!(a.report(&id)?.outcome.is_some());
    stop(a)?;
    // The other host has still not answered.
    let refused = a.ask(&VmRequest::Start).err().context("it starts")?;
    ensure!(
        refused
            .to_string()
            .contains("godwit vm resolve vm --run-on a"),
        "{refused}"
    );
    a.ask(&resolve)?;
    site.goes_on(a, 10)?;
    ensure!(record(a, &site)?.holder == a.name);
    site.is_whole(a)
}

/// Attributes of somebody else until there is no room for a record.
fn fill(image: &File) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for (bytes, number) in [1000, 100, 1]
        .into_iter()
        .flat_map(|bytes| (0..10_000).map(move |number| (bytes, number)))
    {
        let name = format!("user.other.{bytes}.{number}");
        match fsetxattr(image, &name, &vec![b'x'; bytes], XattrFlags::CREATE) {
            Ok(()) => names.push(name),
            Err(Errno::NOSPC | Errno::DQUOT) if bytes == 1 => return Ok(names),
            Err(Errno::NOSPC | Errno::DQUOT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(names)
}

fn image_of(host: &Host, site: &Site) -> Result<File> {
    let image = File::options()
        .read(true)
        .write(true)
        .open(own(host, &site.path))?;
    Ok(image)
}

#[test]
fn an_image_of_one_host_is_used_where_there_is_no_room_for_its_record() -> Result<()> {
    let site = Site::local()?;
    let a = &site.pair.a;
    let before = record(a, &site)?;
    let image = image_of(a, &site)?;
    let others = fill(&image)?;
    stop(a)?;
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 5)?;
    ensure!(record(a, &site)? == before, "there was room");
    // That it says nothing newer is no reason to take it for an older one.
    for other in others {
        fremovexattr(&image, &other)?;
    }
    stop(a)?;
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 5)?;
    ensure!(record(a, &site)?.taken > before.taken);
    Ok(())
}

#[test]
fn a_shared_image_without_room_for_a_record_keeps_its_guest_where_it_is() -> Result<()> {
    let site = Site::shared()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let before = record(a, &site)?;
    fill(&image_of(a, &site)?)?;
    let begun = site.pair.try_begin(a, b, &Options::default())?.1;
    let why = format!("{:#}", begun.err().context("it began to move")?);
    ensure!(
        why.contains("the record that this host has the image cannot be written"),
        "{why}"
    );
    site.goes_on(a, 10)?;
    ensure!(record(a, &site)? == before);
    Ok(())
}

#[test]
fn an_image_that_another_disk_or_host_had_last_is_not_made_larger() -> Result<()> {
    let site = Site::local()?;
    let a = &site.pair.a;
    let now = record(a, &site)?;
    stop(a)?;
    let larger = VmRequest::ResizeDisk(ResizeDisk {
        disk: "root".into(),
        size_gib: 1,
    });
    let of_another = ImageRecord {
        vm: VmName::new("other")?,
        ..now.clone()
    };
    let elsewhere = ImageRecord {
        holder: HostName::new("z")?,
        generation: Generation(now.generation.0 + 5),
        ..now.clone()
    };
    for (record, words) in [
        (of_another, "which host 'a' had last"),
        (elsewhere, "host 'z' has had it"),
    ] {
        put_back(a, &site, &record)?;
        let why = a.ask(&larger).err().context("it was made larger")?;
        let why = format!("{why:#}");
        ensure!(
            why.contains(words) && why.contains("is not made larger"),
            "{why}"
        );
        ensure!(std::fs::metadata(&site.path)?.len() == BYTES);
    }
    put_back(a, &site, &now)?;
    a.ask(&larger)?;
    ensure!(std::fs::metadata(&site.path)?.len() == 1 << 30);
    ensure!(record(a, &site)? == now, "it is taken by who starts the VM");
    a.ask(&VmRequest::Start)?;
    site.goes_on(a, 5)
}
