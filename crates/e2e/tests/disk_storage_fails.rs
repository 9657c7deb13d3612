//! Storage to which a disk is copied fails, is full or hangs in the middle: its guest never notices, and nothing is left there.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{Answering, Fragile, ImageAway, LONG, LOOK_EVERY, Site, begin_move_by, progress};
use godwit_e2e::obedient::{Deed, order};
use godwit_e2e::pair::Options;
use godwit_testkit::testvol;
use godwit_types::disk_move::{DiskMove, DiskMoveState, Method};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::Outcome;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A guest that nobody holds back comes a round further within this time, however busy the machine is. A destination that hangs may hold
/// its writes back for half a second.
const GUEST_WAITS: Duration = Duration::from_secs(3);

/// So soon a VM process answers whose guest is elsewhere, however busy the machine is: it waits for storage for 10 s.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// What becomes of the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Fails,
    IsFull,
}

impl Fragile {
    fn breaks(&self, fault: Fault) {
        match fault {
            Fault::Fails => self.volume.change(|settings| settings.fails.writes = true),
            Fault::IsFull => self.volume.fill(),
        }
    }

    /// The guest goes on at host `a` and noticed nothing, nothing is left on the volume, and that is as good as new.
    fn has_harmed_nobody(
        &self,
        fault: Fault,
        watched: Watched,
        answering: Answering,
    ) -> Result<()> {
        let (site, a) = (&self.site, &self.site.pair.a);
        site.goes_on(a, 50)?;
        watched.noticed_nothing()?;
        answering.end()?;
        if fault == Fault::Fails {
            // Nothing can be removed before.
            self.is_mended();
        }
        self.is_empty()?;
        site.is_whole(a)?;
        self.is_mended();
        Ok(())
    }

    /// Waits until no file is on the volume.
    fn is_empty(&self) -> Result<()> {
        let deadline = Instant::now() + LONG;
        loop {
            let files = std::fs::read_dir(self.volume.at())?;
            let files: Vec<_> = files.flatten().map(|entry| entry.path()).collect();
            if files.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{files:?} are left");
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Looks at a guest all the while: how long its writes wait.
struct Watched {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Duration>>,
}

impl Watched {
    fn on_its_source(site: &Site) -> Result<Self> {
        let (ram, stop) = (
            File::open(site.pair.a.ram_file()?)?,
            Arc::new(AtomicBool::new(false)),
        );
        let is_over = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            let (mut round, mut since) = (0, Instant::now());
            while !is_over.load(Ordering::SeqCst) {
                let progress = godwit_testkit::guest::boot_disk::progress(&ram)?;
                ensure!(!progress.is_wrong, "the guest got an error: {progress:?}");
                longest = longest.max(since.elapsed());
                if progress.round != round {
                    (round, since) = (progress.round, Instant::now());
                }
                std::thread::sleep(LOOK_EVERY);
            }
            Ok(longest)
        });
        Ok(Self { stop, thread })
    }

    fn noticed_nothing(self) -> Result<()> {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.join();
        let longest = ended.map_err(|_| anyhow::anyhow!("nobody looked"))??;
        println!("  a round took {longest:.1?} at most");
        ensure!(longest < GUEST_WAITS, "it waited for {longest:?}");
        Ok(())
    }
}

fn apart(work: impl FnOnce(&OwnedFd) -> Result<()> + Send) -> Result<()> {
    testvol::apart(work)?.unwrap_or(Ok(()))
}

fn a_migration_ends(fault: Fault, why: &str) -> Result<()> {
    apart(|mounts| {
        let fragile = Fragile::of_hosts(mounts)?;
        let site = &fragile.site;
        let (a, b) = (&site.pair.a, &site.pair.b);
        let id = site.pair.begin(a, b, &site.slowly())?;
        site.is_half_way(&id)?;
        let (watched, answering) = (Watched::on_its_source(site)?, Answering::of(a)?);
        fragile.breaks(fault);
        let reason = site.ends(&id, Outcome::Failed)?.reason;
        let reason = reason.context("no reason")?;
        println!("  {reason}");
        let told = ["host b", "root.raw", why];
        ensure!(told.iter().all(|word| reason.contains(word)), "{reason}");
        fragile.has_harmed_nobody(fault, watched, answering)?;
        site.pair.migrate(a, b, &Options::default())?;
        site.goes_on(b, 20)?;
        site.is_whole(b)?;
        site.has_nothing(a)
    })
}

#[test]
fn a_migration_whose_destination_s_storage_fails_ends_and_its_guest_goes_on() -> Result<()> {
    a_migration_ends(Fault::Fails, "Input/output error")
}

#[test]
fn a_migration_whose_destination_s_storage_is_full_ends_and_its_guest_goes_on() -> Result<()> {
    a_migration_ends(Fault::IsFull, "No space left")
}

/// Waits until the move is as it should be.
fn until(site: &Site, is_so: impl Fn(&DiskMove) -> bool) -> Result<DiskMove> {
    let deadline = Instant::now() + LONG;
    loop {
        let VmAnswer::DiskMoves(moves) = site.pair.a.ask(&VmRequest::DiskMoves)? else {
            bail!("no moves");
        };
        let disk = moves.disks.into_iter().next().context("no move")?;
        if is_so(&disk) {
            return Ok(disk);
        }
        ensure!(Instant::now() < deadline && disk.is_under_way(), "{disk:?}");
        std::thread::sleep(LOOK_EVERY);
    }
}

fn a_move_ends(fault: Fault, why: &str) -> Result<()> {
    a_move_ends_by(Method::Mirror, fault, why)?;
    a_move_ends_by(Method::DirtyTracking, fault, why)
}

fn a_move_ends_by(method: Method, fault: Fault, why: &str) -> Result<()> {
    apart(|mounts| {
        let mut fragile = Fragile::of_places(mounts)?;
        let to: PathBuf = fragile.volume.at().join("root.raw");
        let site = &fragile.site;
        let a = &site.pair.a;
        begin_move_by(site, method, &to, Some(80))?;
        until(site, |disk| {
            disk.left_bytes > 0 && disk.left_bytes + (4 << 20) < disk.total_bytes
        })?;
        let (watched, answering) = (Watched::on_its_source(site)?, Answering::of(a)?);
        fragile.breaks(fault);
        let ended = until(site, |disk| !disk.is_under_way())?;
        ensure!(ended.state == DiskMoveState::Failed, "{ended:?}");
        let reason = ended.why.context("no reason")?;
        println!("  {reason}");
        ensure!(reason.contains(why), "{reason}");
        fragile.has_harmed_nobody(fault, watched, answering)?;
        begin_move_by(site, method, &to, None)?;
        let moved = until(site, |disk| !disk.is_under_way())?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        fragile.site.path = to;
        fragile.site.goes_on(&fragile.site.pair.a, 20)?;
        fragile.site.is_whole(&fragile.site.pair.a)
    })
}

#[test]
fn a_move_to_storage_that_fails_ends_and_its_guest_goes_on() -> Result<()> {
    a_move_ends(Fault::Fails, "Input/output error")
}

#[test]
fn a_move_to_storage_that_is_full_ends_and_its_guest_goes_on() -> Result<()> {
    a_move_ends(Fault::IsFull, "No space left")
}

/// A reset waits for the disk's requests, and they for the destination: not for long.
fn is_reset_while_it_hangs(reset: impl FnOnce(&Site) -> Result<()> + Send) -> Result<()> {
    apart(|mounts| {
        let fragile = Fragile::of_hosts(mounts)?;
        let site = &fragile.site;
        let (a, b) = (&site.pair.a, &site.pair.b);
        site.goes_on(a, 100)?;
        let id = site.pair.begin(a, b, &site.slowly())?;
        site.is_half_way(&id)?;
        let answering = Answering::of(a)?;
        fragile.volume.change(|settings| settings.hangs = true);
        fragile.volume.wait_held(1, LONG)?;
        let before = progress(a)?.round;
        reset(site)?;
        let deadline = Instant::now() + LONG;
        while progress(a)?.round >= before {
            ensure!(Instant::now() < deadline, "it does not begin anew");
            std::thread::sleep(LOOK_EVERY);
        }
        site.goes_on(a, 20)?;
        answering.end()?;
        fragile.is_mended();
        site.ends(&id, Outcome::Completed)?;
        site.goes_on(b, 20)?;
        site.is_whole(b)?;
        site.has_nothing(a)
    })
}

#[test]
fn a_guest_that_resets_itself_while_the_destination_hangs_begins_anew_at_once() -> Result<()> {
    is_reset_while_it_hangs(|site| order(&site.pair.a.ram_file()?, Deed::Reset))
}

#[test]
fn a_guest_that_is_reset_while_the_destination_hangs_begins_anew_at_once() -> Result<()> {
    is_reset_while_it_hangs(|site| {
        let asked = Instant::now();
        let reset = site.pair.a.ask(&VmRequest::Reset)?;
        ensure!(matches!(reset, VmAnswer::Done(_)), "{reset:?}");
        let took = asked.elapsed();
        ensure!(took < Duration::from_secs(2), "it took {took:?}");
        Ok(())
    })
}

/// What came of the disk cannot be settled, since its storage hangs: that holds up nobody who asks.
#[test]
fn a_host_whose_storage_hangs_under_what_came_of_a_disk_answers_and_takes_no_vm_meanwhile()
-> Result<()> {
    apart(|mounts| {
        let fragile = Fragile::of_hosts(mounts)?;
        let site = &fragile.site;
        let (a, b) = (&site.pair.a, &site.pair.b);
        let source = ImageAway::of(site, &Options::default())?;
        fragile.volume.change(|settings| settings.hangs = true);
        fragile.volume.wait_held(1, LONG)?;
        b.vm_within(ANSWERS_WITHIN)?;
        source.is_back()?;
        site.goes_on(a, 20)?;
        let (_, begun) = site.pair.try_begin(a, b, &Options::default())?;
        let refused = begun.err().context("another one comes")?.to_string();
        ensure!(refused.contains("its storage does not answer"), "{refused}");
        b.vm_within(ANSWERS_WITHIN)?;
        ensure!(fragile.volume.counts().held > 0, "it did not hang");
        fragile.is_mended();
        site.has_nothing(b)?;
        site.pair.migrate(a, b, &Options::default())?;
        site.goes_on(b, 20)?;
        site.is_whole(b)
    })
}
