//! Counter guests as VMs: every page is stepped for ever, so that a lost or stale page shows.

use anyhow::Context as _;
use godwit_testkit::guest::checker::{self, Checked};
use godwit_testkit::guest::counter::{self, COUNTER_OFFSET, CounterSpec, Mode, PAGE_BYTES, Word};
use godwit_types::VmName;
use godwit_types::vm::{Accelerator, DiskSpec, EncryptionMode, VmSpec};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes in a MiB.
pub const MIB: f64 = 1_048_576.0;

/// A VM that runs a counter guest; its kernel file is written to `dir`.
pub fn counter_vm(dir: &Path, counter: &CounterSpec, memory_mib: u64) -> anyhow::Result<VmSpec> {
    let kernel = dir.join(
        format!(
            "counter-{memory_mib}-{:?}-{:?}",
            counter.mode, counter.action
        )
        .replace(' ', ""),
    );
    std::fs::write(&kernel, counter::build(counter)?)?;
    make_readable(&kernel)?;
    Ok(VmSpec {
        name: VmName::new("vm")?,
        vcpus: 1,
        memory_mib,
        cpu: "qemu64".into(),
        machine: "q35".into(),
        hardware: None,
        firmware: Default::default(),
        kernel: kernel.to_string_lossy().into_owned(),
        initramfs: None,
        cmdline: String::new(),
        accelerator: if counter.mode == Mode::Real {
            Accelerator::Kvm
        } else {
            Accelerator::Tcg
        },
        encryption: EncryptionMode::Opportunistic,
        on_crash: Default::default(),
        movable: true,
        cloud_init: None,
        uid: None,
        nics: Vec::new(),
        disks: Vec::new(),
    })
}

/// A disk with its image at this path.
pub fn disk(name: &str, path: &Path, shared: bool) -> anyhow::Result<DiskSpec> {
    Ok(DiskSpec {
        shared,
        ..DiskSpec::new(name, path.to_str().context("a path")?)
    })
}

/// A VM that boots from this image.
pub fn vm_with_disk(dir: &Path, image: &Path, shared: bool) -> anyhow::Result<VmSpec> {
    let mut spec = counter_vm(dir, &CounterSpec::flat(8), 32)?;
    spec.set_hardware(Some(2));
    spec.kernel.clear();
    spec.disks = vec![disk("root", image, shared)?];
    spec.check()?;
    Ok(spec)
}

/// Waits until the guest has made so many passes over its memory.
pub fn wait_passes(ram: &Path, passes: u32, within: Duration) -> anyhow::Result<u32> {
    let deadline = Instant::now() + within;
    loop {
        let file = File::open(ram)?;
        match checker::control(&file) {
            Ok(control) if control.state != 0 && control.passes >= passes => {
                return Ok(control.passes);
            }
            other if Instant::now() > deadline => {
                anyhow::bail!("the guest has not made {passes} passes: {other:?}")
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Checks all counted pages of a stopped guest.
pub fn check(ram: &Path) -> anyhow::Result<Checked> {
    checker::check(&File::open(ram)?).context("guest memory is not what the guest wrote")
}

/// Pages that a counter guest has written since it began.
#[derive(Debug)]
pub struct Pace {
    ram: File,
    first: u64,
    end: u64,
}

impl Pace {
    /// Of the guest whose memory is in this file.
    pub fn of(ram: &Path) -> anyhow::Result<Self> {
        let ram = File::open(ram)?;
        let word = |word: Word| -> anyhow::Result<u64> {
            let mut bytes = [0; 4];
            ram.read_exact_at(&mut bytes, word.address())?;
            Ok(u32::from_le_bytes(bytes).into())
        };
        let (first, end) = (word(Word::FirstPage)?, word(Word::EndPage)?);
        Ok(Self { ram, first, end })
    }

    /// Pages written so far. Pages are stepped in ascending order, so the place where counters fall by one is where the guest is.
    pub fn written(&self) -> anyhow::Result<u64> {
        let passes = checker::control(&self.ram)?.passes;
        let (mut low, mut high) = (self.first, self.end);
        while low < high {
            let page = low + (high - low) / 2;
            let mut counter = [0; 4];
            self.ram
                .read_exact_at(&mut counter, page * PAGE_BYTES + COUNTER_OFFSET)?;
            if u32::from_le_bytes(counter) > passes {
                low = page + 1;
            } else {
                high = page;
            }
        }
        Ok(u64::from(passes) * (self.end - self.first) + low - self.first)
    }

    /// What it writes per second, looked at for so long.
    pub fn mib_per_s(&self, time: Duration) -> anyhow::Result<f64> {
        let (before, began) = (self.written()?, Instant::now());
        std::thread::sleep(time);
        let pages = self.written()? - before;
        Ok((pages * PAGE_BYTES) as f64 / MIB / began.elapsed().as_secs_f64())
    }
}

/// What a guest wrote between the first and the last look at it.
#[derive(Debug, Default)]
pub struct Written {
    first: Option<(u64, Instant)>,
    last: Option<(u64, Instant)>,
}

impl Written {
    /// Looks at it now.
    pub fn look(&mut self, pace: &Pace) -> anyhow::Result<()> {
        let now = Some((pace.written()?, Instant::now()));
        self.first = self.first.or(now);
        self.last = now;
        Ok(())
    }

    /// Per second; not a number where it was not looked at twice.
    pub fn mib_per_s(&self) -> f64 {
        match (self.first, self.last) {
            (Some((pages, at)), Some((last_pages, last_at))) if last_at > at => {
                let seconds = Instant::duration_since(&last_at, at).as_secs_f64();
                (last_pages - pages) as f64 * PAGE_BYTES as f64 / MIB / seconds
            }
            _ => f64::NAN,
        }
    }
}

/// Pages that a guest's second vCPU reads.
#[derive(Debug)]
pub struct Reads(File);

impl Reads {
    /// Of the guest whose memory is in this file.
    pub fn of(ram: &Path) -> anyhow::Result<Self> {
        Ok(Self(File::open(ram)?))
    }

    /// Read so far; wraps.
    pub fn pages(&self) -> anyhow::Result<u32> {
        Ok(checker::reads(&self.0)?)
    }
}

/// Sets a guest's idle turns so that it writes about so much, whatever this machine's speed is.
pub fn calibrate(ram: &Path, mib_per_s: f64) -> anyhow::Result<f64> {
    let (pace, file) = (
        Pace::of(ram)?,
        std::fs::OpenOptions::new().write(true).open(ram)?,
    );
    let mut spin = 20_000.0;
    for _ in 0..4 {
        file.write_all_at(&(spin as u32).to_le_bytes(), Word::Spin.address())?;
        let seen = pace.mib_per_s(Duration::from_millis(700))?;
        spin = (spin * seen / mib_per_s).clamp(10.0, 1e8);
    }
    file.write_all_at(&(spin as u32).to_le_bytes(), Word::Spin.address())?;
    pace.mib_per_s(Duration::from_secs(1))
}

fn make_readable(path: &PathBuf) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}
