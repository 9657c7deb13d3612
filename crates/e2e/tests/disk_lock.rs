//! A disk's process that is killed while the storage has a write of it: nobody gets the image before that write has ended.

use anyhow::{Context as _, Result, ensure};
use godwit_blockio::{Access, Image};
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::disk_load::{Load, Order, Place, Running};
use godwit_testkit::lab::Machine;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::testvol;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const AT: &str = "/var/lib/volume";
const DISK: u64 = 8 << 20;
const BLOCK: usize = 4096;
const LONG: Duration = Duration::from_secs(60);

/// A block device on a file. Its IO outlives whoever asked for it; that of a file on FUSE keeps its process.
struct Device(PathBuf);

impl Device {
    fn over(file: &Path) -> Result<Option<Self>> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()?;
        if !output.status.success() {
            println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
            return Ok(None);
        }
        let path = String::from_utf8(output.stdout)?;
        Ok(Some(Self(path.trim().into())))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// Killed with the value, whatever becomes of the test.
struct Served(Child);

impl Served {
    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn lock(device: &Device, patience: Duration) -> Result<(), godwit_blockio::Error> {
    Image::open(&device.0, Access::ReadWrite, 512)?.lock("disk", patience)
}

#[test]
fn an_image_is_not_free_before_the_last_write_of_a_killed_process_has_ended() -> Result<()> {
    if let Some(why) = testvol::unavailable() {
        println!("skipped: {why}");
        return Ok(());
    }
    let mut machine = Machine::start(&Plan {
        name: "disklock",
        visible: &[],
        shared: &[],
        outlive_maker: false,
    })?;
    machine.mount_volume(Path::new(AT))?;
    let volume = machine.volume(AT)?;
    let path = machine.path_from_outside(AT).join("device");
    File::create(&path)?.set_len(DISK)?;
    let Some(device) = Device::over(&path)? else {
        return Ok(());
    };
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let place = Place {
        socket: directory.path().join("disk"),
        memory: directory.path().join("memory"),
    };
    place.make_memory()?;
    let option = |name: &str, value: &Path| format!("--{name}={}", value.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit-disk"));
    command
        .arg(option("image", &device.0))
        .arg(option("socket", &place.socket));
    command.arg(option("memory", &place.memory));
    command.arg(option("record", &directory.path().join("record")));
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut served = Served(child?);
    let load = Load {
        outstanding: 16,
        write_percent: 100,
        flush_permille: 0,
        order: Order::Random,
        per_second: None,
        seed: 7,
    };
    let running = Running::begin(load, Log::new(DISK, BLOCK), &place)?;
    let until = Instant::now() + LONG;
    while running.count() < 100 {
        ensure!(!running.has_ended(), "{:?}", running.end());
        ensure!(Instant::now() < until, "nothing is answered");
        std::thread::yield_now();
    }
    // To open one reads whether it bears a label, which would wait for the storage, too.
    let mut image = Image::open(&device.0, Access::ReadWrite, 512)?;
    volume.change(|disk| disk.hangs = true);
    volume.wait_held(1, LONG)?;
    served.kill()?;
    // Whoever had it could not look at it before its storage answers, so that the test would not end.
    let (told, heard) = channel();
    let locks = std::thread::spawn(move || told.send(image.lock("disk", Duration::ZERO).err()));
    let refused = heard.recv_timeout(LONG);
    volume.change(|disk| disk.hangs = false);
    ensure!(locks.join().is_ok());
    let refused = refused.ok().flatten();
    let refused = refused.context("it was free while a write was under way")?;
    let why = refused.to_string();
    ensure!(why.contains("has it open"), "{why}");
    lock(&device, LONG)?;
    ensure!(running.end().is_err(), "its disk is gone");
    Ok(())
}
