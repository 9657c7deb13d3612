//! A guest whose disk's file system is full: it waits, is paused, and goes on by itself; its disk moves to where there is room, and
//! the guest nowhere.

mod booted;

use anyhow::{Context as _, Result, bail, ensure};
use booted::{LONG, LOOK_EVERY, versions};
use godwit_e2e::guests::vm_with_disk;
use godwit_e2e::host::{kill_qemu_of, kill_qemus_on};
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::verdict::hypervisors_on;
use godwit_testkit::guest::boot_disk;
use godwit_types::disk_move::{DiskPlace, Method};
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::vm::{Accelerator, OnFull, VmState};
use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const BYTES: u64 = 1 << 20;
/// How long a disk is full before its guest is paused, where a test waits for that, and where it is not to come.
const SOON: Duration = Duration::from_millis(100);
const NEVER: Duration = Duration::from_secs(3600);

/// A small file system, whose image has no room for the guest's last sector.
struct Small {
    pair: Pair,
    image: PathBuf,
    directory: tempfile::TempDir,
}

impl Small {
    fn booted(usr: Option<&Path>, patience: Duration) -> Result<Self> {
        Self::that(OnFull::Wait, usr, patience)
    }

    fn that(on_full: OnFull, usr: Option<&Path>, patience: Duration) -> Result<Self> {
        let pair = match usr {
            Some(usr) => Pair::with_programs(Accelerator::Tcg, usr)?,
            None => Pair::new(Accelerator::Tcg)?,
        };
        pair.patience(patience);
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let place = directory.path().join("small");
        std::fs::create_dir(&place)?;
        let words = ["-t", "tmpfs", "-o", "size=4m,mode=0777", "small"];
        let mounted = Command::new("mount").args(words).arg(&place).status()?;
        ensure!(mounted.success(), "no small file system");
        let image = place.join("root.raw");
        let small = Self {
            pair,
            image,
            directory,
        };
        let file = File::create(&small.image)?;
        file.set_len(BYTES)?;
        // The first block only; the guest writes into the second, too.
        let mut first = boot_disk::sector()?;
        first.resize(4096, 0);
        file.write_all_at(&first, 0)?;
        std::fs::set_permissions(&small.image, Permissions::from_mode(0o666))?;
        small.fill()?;
        let mut spec = vm_with_disk(small.pair.dir(), &small.image, true)?;
        for disk in &mut spec.disks {
            disk.on_full = on_full;
        }
        small.pair.boot(&spec)?;
        Ok(small)
    }

    /// QEMU is asked what keeps its guest here, and then the disk that is full does.
    fn qemu_answers(&self) -> Result<()> {
        let answer = self.pair.a.ask(&VmRequest::Blockers);
        let why = answer.err().context("nothing keeps the guest here")?;
        ensure!(why.to_string().contains("disk 'root' is full"), "{why}");
        Ok(())
    }

    fn filler(&self) -> PathBuf {
        self.image.with_extension("filler")
    }

    fn fill(&self) -> Result<()> {
        let mut filler = File::create(self.filler())?;
        while filler.write_all(&[1; 4096]).is_ok() {}
        Ok(())
    }

    fn round(&self) -> Result<u32> {
        let progress = boot_disk::progress(&File::open(self.pair.a.ram_file()?)?)?;
        ensure!(!progress.is_wrong, "the guest got an error: {progress:?}");
        Ok(progress.round)
    }

    fn until(&self, what: &str, is_so: impl Fn(&HostVm) -> bool) -> Result<()> {
        let deadline = Instant::now() + LONG;
        loop {
            let vm = self.pair.a.vm();
            if vm.as_ref().is_ok_and(&is_so) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it is never {what}: {vm:?}");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn is_full(&self) -> Result<()> {
        self.until("full", |vm| {
            vm.state == VmState::Running && has(vm, "disk-full")
        })
    }

    fn is_paused(&self) -> Result<()> {
        self.until("paused for that", |vm| {
            vm.state == VmState::Paused && has(vm, "disk-full: the guest is paused")
        })
    }

    /// The guest comes further, and its image has all of it.
    fn goes_on(&self, image: &Path) -> Result<u32> {
        let deadline = Instant::now() + LONG;
        while self.round()? < 50 {
            ensure!(Instant::now() < deadline, "{:?}", self.pair.a.vm());
            std::thread::sleep(LOOK_EVERY);
        }
        self.ask(&VmRequest::Pause)?;
        let round = self.round()?;
        let missing = boot_disk::missing(&File::open(image)?, round)?;
        ensure!(
            missing.is_none(),
            "of round {round}, {missing:?} is missing"
        );
        Ok(round)
    }

    /// Nothing let the guest go on so far: its disk has no more room than before.
    fn was_not_let_go(&self) -> Result<()> {
        let log = std::fs::read_to_string(self.pair.a.log())?;
        ensure!(!log.contains("has_more=true"), "it went on without room");
        Ok(())
    }

    /// What a reboot empties is empty, and nothing runs. A new VM process finds the records.
    fn loses_power(&self) -> Result<()> {
        let host = &self.pair.a;
        self.pair.supervised.store(false, Ordering::SeqCst);
        host.kill_process();
        let deadline = Instant::now() + LONG;
        while !hypervisors_on(host.ram_dir()).is_empty() {
            kill_qemus_on(host.ram_dir());
            ensure!(Instant::now() < deadline, "its QEMU does not die");
            std::thread::yield_now();
        }
        for directory in [host.ram_dir().to_owned(), host.run_dir()] {
            std::fs::remove_dir_all(&directory)?;
            std::fs::create_dir_all(&directory)?;
        }
        host.start_process()?;
        self.pair.supervised.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn ask(&self, request: &VmRequest) -> Result<()> {
        match self.pair.a.ask(request)? {
            VmAnswer::Done(_) => Ok(()),
            other => bail!("{request:?}: {other:?}"),
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        self.pair.a.kill_process();
        kill_qemu_of(&self.pair.a.run_dir());
        let place = self.directory.path().join("small");
        let _ = Command::new("umount").arg("--lazy").arg(place).status();
    }
}

fn has(vm: &HostVm, words: &str) -> bool {
    vm.note.as_deref().is_some_and(|note| note.contains(words))
}

#[test]
fn a_guest_whose_disk_is_full_is_paused_and_goes_on_by_itself_when_there_is_room() -> Result<()> {
    for (version, usr) in versions()? {
        let small = Small::booted(usr.as_deref(), SOON)?;
        small.is_paused()?;
        let stuck = small.round()?;
        small.qemu_answers()?;
        let starts = small.pair.a.starts();
        small.pair.a.signal_kill()?;
        small.until("taken over", |_| small.pair.a.starts() > starts)?;
        small.is_paused()?;
        ensure!(small.round()? == stuck, "it ran meanwhile");
        small.was_not_let_go()?;
        std::fs::remove_file(small.filler())?;
        let round = small.goes_on(&small.image)?;
        println!("  QEMU {version}: stuck at round {stuck}, went on to {round}");
    }
    Ok(())
}

#[test]
fn a_full_disk_moves_to_where_there_is_room_and_its_guest_goes_on_by_itself() -> Result<()> {
    for (version, usr) in versions()? {
        for waits_for_pause in [false, true] {
            let patience = if waits_for_pause { SOON } else { NEVER };
            let small = Small::booted(usr.as_deref(), patience)?;
            match waits_for_pause {
                true => small.is_paused()?,
                false => small.is_full()?,
            }
            small.qemu_answers()?;
            let larger = small.directory.path().join("larger");
            std::fs::create_dir(&larger)?;
            std::fs::set_permissions(&larger, Permissions::from_mode(0o777))?;
            let image = larger.join("root.raw");
            let place = DiskPlace {
                disk: "root".into(),
                path: image.to_str().context("a path")?.into(),
                shared: false,
                max_bandwidth_mbit_per_s: None,
                method: Method::default(),
                without: Vec::new(),
                first_log: godwit_types::disk_move::FirstLog::default(),
            };
            let begun = small.pair.a.ask(&VmRequest::MoveDisks {
                places: vec![place],
            })?;
            ensure!(matches!(begun, VmAnswer::DiskMoves(_)), "{begun:?}");
            let round = small.goes_on(&image)?;
            println!("  QEMU {version}, paused before: {waits_for_pause}: went on to {round}");
        }
    }
    Ok(())
}

#[test]
fn a_guest_whose_disk_is_full_is_not_migrated_and_stays() -> Result<()> {
    for is_paused in [false, true] {
        let small = Small::booted(None, if is_paused { SOON } else { NEVER })?;
        match is_paused {
            false => small.is_full()?,
            true => small.is_paused()?,
        }
        let (a, b) = (&small.pair.a, &small.pair.b);
        let refused = small.pair.begin(a, b, &Options::default());
        let error = refused.err().context("it is on its way")?.to_string();
        let told = ["not migrated while its disk 'root' is full", "move-disk"];
        ensure!(told.iter().all(|word| error.contains(word)), "{error}");
        // As a dry run asks.
        let beforehand = a
            .ask(&VmRequest::Blockers)
            .err()
            .context("nothing stands in its way")?;
        ensure!(beforehand.to_string() == error, "{beforehand}");
        match is_paused {
            false => {
                small.is_full()?;
                std::fs::remove_file(small.filler())?;
                small.goes_on(&small.image)?;
            }
            true => stays(&small)?,
        }
    }
    Ok(())
}

#[test]
fn a_guest_that_waits_for_room_when_its_host_loses_power_is_booted_and_one_that_a_person_paused_is_not()
-> Result<()> {
    for is_by_person in [false, true] {
        let small = Small::booted(None, SOON)?;
        small.is_paused()?;
        if is_by_person {
            small.ask(&VmRequest::Pause)?;
        }
        small.loses_power()?;
        std::fs::remove_file(small.filler())?;
        // As its agent does with each VM that should run and has no guest.
        let booted = small.ask(&VmRequest::Boot);
        if is_by_person {
            let refused = booted.err().context("it was booted")?.to_string();
            ensure!(refused.contains("does not run by the record"), "{refused}");
        } else {
            booted?;
            let round = small.goes_on(&small.image)?;
            println!("  booted anew, and came to round {round}");
        }
    }
    Ok(())
}

#[test]
fn a_guest_whose_disk_is_to_fail_gets_an_error_and_runs_on() -> Result<()> {
    let small = Small::that(OnFull::Error, None, SOON)?;
    let deadline = Instant::now() + LONG;
    while !boot_disk::progress(&File::open(small.pair.a.ram_file()?)?)?.is_wrong {
        ensure!(Instant::now() < deadline, "it gets none");
        std::thread::sleep(LOOK_EVERY);
    }
    let vm = small.pair.a.vm()?;
    ensure!((vm.state, &vm.note) == (VmState::Running, &None), "{vm:?}");
    Ok(())
}

fn stays(small: &Small) -> Result<()> {
    small.is_paused()?;
    // A person who pauses it resumes it.
    small.ask(&VmRequest::Pause)?;
    small.until("paused by a person", |vm| {
        vm.state == VmState::Paused && vm.note.is_none()
    })?;
    std::fs::remove_file(small.filler())?;
    small.ask(&VmRequest::Resume)?;
    small.goes_on(&small.image).map(drop)
}
