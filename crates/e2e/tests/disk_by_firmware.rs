//! A disk of ours under a real QEMU: booted from by the firmware, killed, held and let go while the guest works with it.

use anyhow::{Context as _, Result, ensure};
use godwit_blockio::{Access, Image, Waits};
use godwit_e2e::peers::qemu_10;
use godwit_guestmem::RamFile;
use godwit_testkit::guest::boot_disk::{self, Progress};
use godwit_testkit::qemu::{TestQemu, machine_args};
use godwit_vhost::block::Geometry;
use godwit_vhost::{Disk, Settings};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(2);
const RAM_MIB: u32 = 64;

/// A program, and how it is told to connect anew at once.
struct Version {
    program: PathBuf,
    reconnect: &'static str,
}

/// The distribution's QEMU, and version 10 where it is at hand.
fn versions() -> Result<Vec<Version>> {
    let distribution = Version {
        program: "qemu-system-x86_64".into(),
        reconnect: "reconnect=1",
    };
    let ten = qemu_10()?.map(|at| Version {
        program: at.join("qemu-system-x86_64"),
        reconnect: "reconnect-ms=50",
    });
    Ok(std::iter::once(distribution).chain(ten).collect())
}

/// A guest that has booted from its disk.
struct Guest {
    qemu: TestQemu,
    disk: Option<Disk>,
    ram: Arc<RamFile>,
    memory: File,
    image: PathBuf,
    socket: PathBuf,
    _directories: [tempfile::TempDir; 2],
}

impl Guest {
    fn boot(version: &Version) -> Result<Self> {
        // Not the default place, which may be a tmpfs.
        let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let in_memory = tempfile::tempdir_in("/dev/shm")?;
        let image = on_disk.path().join("disk.raw");
        let mut content = boot_disk::sector()?;
        content.resize(1 << 20, 0);
        std::fs::write(&image, content)?;
        let path = in_memory.path().join("ram");
        let ram = Arc::new(RamFile::create(&path, u64::from(RAM_MIB) << 20, None)?);
        let socket = in_memory.path().join("disk");
        let disk = serve(&image, &socket, &ram)?;
        let mut args = machine_args("tcg", &path, RAM_MIB);
        let chardev = format!(
            "socket,id=disk,path={},{}",
            socket.display(),
            version.reconnect
        );
        let device = "vhost-user-blk-pci,chardev=disk,num-queues=1,queue-size=256,config-wce=off,bootindex=1";
        args.extend(
            ["-chardev", &chardev, "-device", device, "-only-migratable"].map(String::from),
        );
        let qemu = TestQemu::start_program(&version.program, &args, Instant::now() + LONG)?;
        Ok(Self {
            qemu,
            disk: Some(disk),
            memory: File::open(&path)?,
            ram,
            image,
            socket,
            _directories: [on_disk, in_memory],
        })
    }

    fn progress(&self) -> Result<Progress> {
        let progress = boot_disk::progress(&self.memory)?;
        ensure!(!progress.is_wrong, "the guest stopped at {progress:?}");
        Ok(progress)
    }

    /// Waits until the guest has come so many rounds further.
    fn goes_on(&self, rounds: u32) -> Result<u32> {
        let (from, deadline) = (self.progress()?.round, Instant::now() + LONG);
        loop {
            let round = self.progress()?.round;
            if round >= from + rounds {
                return Ok(round);
            }
            ensure!(
                Instant::now() < deadline,
                "it stands still at round {round}"
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn disk(&self) -> Result<&Disk> {
        self.disk.as_ref().context("the disk is not served")
    }

    fn execute(&mut self, command: &str) -> Result<()> {
        let deadline = Instant::now() + LONG;
        self.qemu.execute(command, json!({}), deadline).map(drop)
    }

    /// What the image holds of the last rounds, but for the sector that may be under way.
    fn image_has(&self, round: u32) -> Result<()> {
        let image = File::open(&self.image)?;
        let missing = boot_disk::missing(&image, round)?;
        ensure!(
            missing.is_none(),
            "of round {round}, {missing:?} is not on the disk"
        );
        Ok(())
    }
}

fn serve(image: &Path, socket: &Path, ram: &Arc<RamFile>) -> Result<Disk> {
    let mut image = Image::open(image, Access::ReadWrite, 512)?;
    image.lock("root", LONG)?;
    let geometry = Geometry {
        bytes: image.bytes(),
        block: 512,
        queues: 1,
        read_only: false,
        erases: true,
        serial: String::new(),
    };
    Ok(Disk::start(Settings {
        name: "root".to_owned(),
        socket: socket.to_owned(),
        owner: None,
        image,
        geometry,
        filters: Vec::new(),
        ram: Arc::clone(ram),
        has_image: true,
        waits: Waits {
            for_room: true,
            for_storage: false,
        },
        handed: None,
        deltas: Vec::new(),
    })?)
}

#[test]
fn a_guest_boots_from_its_disk_and_what_it_wrote_is_in_the_image() -> Result<()> {
    for version in versions()? {
        let guest = Guest::boot(&version)?;
        guest.goes_on(200)?;
        guest.disk()?.hold(LONG)?;
        guest.image_has(guest.progress()?.round)?;
    }
    Ok(())
}

#[test]
fn a_disk_that_is_gone_and_comes_back_loses_no_request_of_the_firmware() -> Result<()> {
    for version in versions()? {
        let mut guest = Guest::boot(&version)?;
        for _ in 0..5 {
            guest.goes_on(50)?;
            drop(guest.disk.take());
            guest.disk = Some(serve(&guest.image, &guest.socket, &guest.ram)?);
        }
        guest.goes_on(50)?;
        guest.disk()?.hold(LONG)?;
        guest.image_has(guest.progress()?.round)?;
    }
    Ok(())
}

#[test]
fn a_held_disk_lets_its_guest_be_stopped_at_once_and_goes_on_with_it() -> Result<()> {
    for version in versions()? {
        let mut guest = Guest::boot(&version)?;
        guest.goes_on(10)?;
        for _ in 0..40 {
            guest.disk()?.hold(LONG)?;
            guest.execute("stop")?;
            let status = guest.disk()?.status()?;
            ensure!((status.running, status.unanswered) == (0, 0), "{status:?}");
            guest.execute("cont")?;
            guest.disk()?.release()?;
            guest.goes_on(3)?;
        }
    }
    Ok(())
}

#[test]
fn a_disk_that_comes_back_while_its_guest_is_stopped_is_there_again_once_qemu_has_connected()
-> Result<()> {
    for version in versions()? {
        let mut guest = Guest::boot(&version)?;
        for _ in 0..3 {
            guest.goes_on(10)?;
            guest.disk()?.hold(LONG)?;
            guest.execute("stop")?;
            drop(guest.disk.take());
            guest.disk = Some(serve(&guest.image, &guest.socket, &guest.ram)?);
            let until = Instant::now() + LONG;
            while !guest.disk()?.status()?.is_settled() {
                ensure!(Instant::now() < until, "QEMU does not connect again");
                std::thread::sleep(LOOK_EVERY);
            }
            // Version 7.2 never starts a disk that was not there when its guest was let run.
            guest.execute("cont")?;
        }
        guest.goes_on(10)?;
    }
    Ok(())
}
