//! What cases of snapshots ask of host `a`, and what they find of them.

use super::{BYTES, LONG, LOOK_EVERY, Site, progress};
use anyhow::{Context as _, Result, bail, ensure};
use godwit_e2e::Host;
use godwit_testkit::guest::boot_disk;
use godwit_types::SnapshotName;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::snapshots::{Quiesce, SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::vm::VmState;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

pub fn named(name: &str) -> Result<SnapshotName> {
    Ok(SnapshotName::new(name)?)
}

pub fn wish(name: &str) -> Result<TakeSnapshot> {
    Ok(TakeSnapshot {
        name: named(name)?,
        text: String::new(),
        quiesce: Quiesce::IfPossible,
    })
}

pub fn take(site: &Site, name: &str) -> Result<String> {
    done(site, &VmRequest::TakeSnapshot(wish(name)?))
}

pub fn delete(site: &Site, name: &str) -> Result<String> {
    let name = named(name)?;
    done(site, &VmRequest::DeleteSnapshot(SnapshotRequest { name }))
}

pub fn revert(site: &Site, name: &str) -> Result<String> {
    let name = named(name)?;
    done(site, &VmRequest::RevertSnapshot(SnapshotRequest { name }))
}

pub fn done(site: &Site, request: &VmRequest) -> Result<String> {
    done_on(&site.pair.a, request)
}

/// The same of another host.
pub fn done_on(host: &Host, request: &VmRequest) -> Result<String> {
    match host.ask(request)? {
        VmAnswer::Done(said) => Ok(said),
        other => bail!("{other:?}"),
    }
}

pub fn list(site: &Site) -> Result<Snapshots> {
    list_on(&site.pair.a)
}

/// The same of another host.
pub fn list_on(host: &Host) -> Result<Snapshots> {
    match host.ask(&VmRequest::Snapshots)? {
        VmAnswer::Snapshots(snapshots) => Ok(snapshots),
        other => bail!("{other:?}"),
    }
}

pub fn names(site: &Site) -> Result<Vec<String>> {
    let listed = list(site)?.snapshots.into_iter();
    Ok(listed.map(|snapshot| snapshot.name.to_string()).collect())
}

/// Of each snapshot its name, and that of the one before it.
pub fn tree(host: &Host) -> Result<Vec<(String, Option<String>)>> {
    let listed = list_on(host)?.snapshots.into_iter();
    let named = |name: SnapshotName| name.to_string();
    Ok(listed
        .map(|one| (named(one.name), one.after.map(named)))
        .collect())
}

/// Waits until nothing is left to be merged.
pub fn is_tidy(site: &Site) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while list(site)?.unneeded_images > 0 {
        ensure!(
            Instant::now() < deadline,
            "{:?} is left",
            site.images(&site.pair.a)?
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Ends the guest where it stands; says which round it was in.
pub fn stop(site: &Site) -> Result<u32> {
    stop_on(&site.pair.a)
}

/// The same of another host.
pub fn stop_on(host: &Host) -> Result<u32> {
    done_on(host, &VmRequest::Pause)?;
    let round = progress(host)?.round;
    done_on(host, &VmRequest::Stop { force: true })?;
    host.wait_state(VmState::Stopped, LONG)?;
    Ok(round)
}

pub fn start(site: &Site) -> Result<()> {
    done(site, &VmRequest::Start)?;
    site.goes_on(&site.pair.a, 10)
}

/// A file that `qemu-img` makes of the image that is described as this one, by what the files themselves say.
pub fn as_qemu_reads(site: &Site, image: &str) -> Result<PathBuf> {
    as_qemu_reads_at(&site.path, image)
}

/// The same where the disk's own image is this.
pub fn as_qemu_reads_at(own: &Path, image: &str) -> Result<PathBuf> {
    let file = own.file_name().and_then(|name| name.to_str());
    let file = file.context("a name")?;
    let raw = own.with_extension("read");
    let (format, from) = match image == file {
        true => ("raw", own.to_owned()),
        false => ("vmdk", own.with_file_name(format!("{image}.vmdk"))),
    };
    let mut command = Command::new("qemu-img");
    // Whoever merged images when the guest was stopped keeps their lock until it sees that.
    command
        .args(["convert", "-U", "-f", format, "-O", "raw"])
        .arg(from)
        .arg(&raw);
    let made = command.output()?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{said}");
    ensure!(std::fs::metadata(&raw)?.len() == BYTES);
    Ok(raw)
}

/// The image that the guest writes to, by the description that lies beside the disk's own.
pub fn top(site: &Site) -> Result<String> {
    top_at(&site.path)
}

/// The same where the disk's own image is this.
pub fn top_at(own: &Path) -> Result<String> {
    let Some(described) = described_at(own)? else {
        let own = own.file_name().context("a name")?;
        return Ok(own.to_string_lossy().into_owned());
    };
    Ok(described["top"].as_str().context("no top")?.into())
}

/// What lies beside a disk's own image and says what it consists of.
pub fn description_of(own: &Path) -> PathBuf {
    PathBuf::from(format!("{}.images", own.display()))
}

fn described_at(own: &Path) -> Result<Option<serde_json::Value>> {
    let described = description_of(own);
    let is_there = described.exists();
    let read = is_there.then(|| std::fs::read(&described)).transpose()?;
    let value = read.map(|read| serde_json::from_slice(&read)).transpose()?;
    Ok(value)
}

/// What each snapshot of the disk whose own image is this holds, as `qemu-img` reads it.
pub fn contents(own: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let described = described_at(own)?.context("no snapshots")?;
    let all = described["snapshots"].as_array().context("no snapshots")?;
    let content = |one: &serde_json::Value| {
        let of =
            |key: &str| Ok::<_, anyhow::Error>(one[key].as_str().context("no text")?.to_owned());
        let raw = as_qemu_reads_at(own, &of("image")?)?;
        let bytes = std::fs::read(&raw)?;
        std::fs::remove_file(raw)?;
        Ok((of("name")?, bytes))
    };
    all.iter().map(content).collect()
}

/// What a guest finds that ended in this round.
pub fn has_round(site: &Site, image: &str, round: u32) -> Result<()> {
    has_round_at(&site.path, image, round)
}

/// The same where the disk's own image is this.
pub fn has_round_at(own: &Path, image: &str, round: u32) -> Result<()> {
    let raw = as_qemu_reads_at(own, image)?;
    let missing = boot_disk::missing(&File::open(&raw)?, round)?;
    std::fs::remove_file(raw)?;
    ensure!(
        missing.is_none(),
        "of round {round}, {missing:?} is missing in {image}"
    );
    Ok(())
}
