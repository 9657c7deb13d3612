//! A guest gets of its disk what it may have in a second, whoever serves the disk, and no request less.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{LONG, LOOK_EVERY, Site, has_successor};
use godwit_e2e::Host;
use godwit_e2e::pair::Options;
use godwit_types::disk_activity::{DiskActivity, LimitDisk};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::vm::DiskLimits;
use std::time::{Duration, Instant};

const IOPS: u64 = 40;
/// As many more, so that the time is told from a burst.
const SAMPLE: u64 = 80;
/// What a tenth of a second lets through at once, and requests that were under way.
const BURST: u64 = IOPS / 10 + 4;

fn limit(host: &Host, disk: &str, iops: Option<u64>) -> Result<VmAnswer> {
    let limits = DiskLimits {
        iops,
        mib_per_s: None,
    };
    host.ask(&VmRequest::LimitDisk(LimitDisk {
        disk: disk.into(),
        limits,
    }))
}

fn activity(host: &Host) -> Result<DiskActivity> {
    host.vm()?
        .disks
        .pop()
        .context("nothing of its disk is told")
}

fn reads_and_writes(host: &Host) -> Result<u64> {
    let activity = activity(host)?;
    Ok(activity.reads.requests + activity.writes.requests)
}

/// However slow the machine is: so many requests take their time.
fn is_limited(host: &Host) -> Result<()> {
    let began = Instant::now();
    let from = reads_and_writes(host)?;
    while reads_and_writes(host)? < from + SAMPLE {
        ensure!(began.elapsed() < LONG, "it does nothing");
        std::thread::sleep(LOOK_EVERY);
    }
    let least = Duration::from_secs_f64((SAMPLE - BURST) as f64 / IOPS as f64);
    let took = began.elapsed();
    ensure!(took >= least, "{SAMPLE} requests took {took:?}");
    Ok(())
}

#[test]
fn a_limit_counts_at_once_and_stays_with_the_disk_over_a_kill_and_a_move_until_it_is_lifted()
-> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    match limit(a, "root", Some(IOPS))? {
        VmAnswer::Done(said) => ensure!(
            said == "disk 'root' of VM 'vm': at most 40 requests a second",
            "{said}"
        ),
        other => bail!("{other:?}"),
    }
    is_limited(a)?;
    ensure!(a.vm()?.spec.disks[0].limits.iops == Some(IOPS));
    for (disk, iops, words) in [
        ("swap", Some(1), "VM 'vm' has no disk 'swap'"),
        ("root", Some(0), "a limit of 0 iops is out of range"),
    ] {
        let refused = limit(a, disk, iops).err().context("it was not refused")?;
        ensure!(format!("{refused:#}").contains(words), "{refused:#}");
    }

    let starts = a.starts();
    a.signal_kill()?;
    has_successor(a, starts)?;
    is_limited(a)?;
    site.pair.migrate(a, b, &Options::default())?;
    is_limited(b)?;
    site.is_whole(b)?;

    limit(b, "root", None)?;
    ensure!(b.vm()?.spec.disks[0].limits.are_none());
    site.goes_on(b, 20)?;
    b.ask(&VmRequest::Stop { force: true })?;
    // Also of a VM that is off, from whose start on it counts.
    limit(b, "root", Some(IOPS))?;
    b.ask(&VmRequest::Start)?;
    is_limited(b)
}

#[test]
fn what_a_disk_does_is_told_while_it_is_served() -> Result<()> {
    let site = Site::local()?;
    let host = &site.pair.a;
    let before = activity(host)?;
    ensure!(before.disk == "root" && before.failed() == 0, "{before:?}");
    // A round's write may be counted before the round has ended.
    site.goes_on(host, 21)?;
    let after = activity(host)?;
    ensure!(
        after.writes.requests >= before.writes.requests + 20
            && after.writes.bytes >= before.writes.bytes + 20 * 512,
        "{before:?}, then {after:?}"
    );
    host.ask(&VmRequest::Stop { force: true })?;
    ensure!(host.vm()?.disks.is_empty(), "{:?}", host.vm()?.disks);
    Ok(())
}
