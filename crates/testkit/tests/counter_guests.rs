//! The counter guests under real QEMU: they count, act as asked, and the checker believes exactly what it should.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use godwit_testkit::guest::checker::{self, CheckError};
use godwit_testkit::guest::counter::{self, Action, CounterSpec, PAGE_BYTES};
use godwit_testkit::qemu::{TestQemu, machine_args};
use serde_json::json;

const RAM_MIB: u32 = 32;

struct Running {
    qemu: TestQemu,
    ram: File,
    _dir: tempfile::TempDir,
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn start(spec: &CounterSpec, accelerator: &str, extra: &[&str]) -> std::io::Result<Running> {
    let dir = tempfile::tempdir_in("/dev/shm")?;
    let (ram_path, kernel) = (dir.path().join("ram"), dir.path().join("kernel"));
    std::fs::write(&kernel, counter::build(spec).expect("a good specification"))?;
    let mut args = machine_args(accelerator, &ram_path, RAM_MIB);
    args.extend(["-kernel".into(), kernel.display().to_string()]);
    args.extend(extra.iter().map(|&arg| arg.to_owned()));
    let qemu = TestQemu::start(&args, soon())?;
    let ram = OpenOptions::new().read(true).write(true).open(ram_path)?;
    Ok(Running {
        qemu,
        ram,
        _dir: dir,
    })
}

impl Running {
    /// Waits until the pass counter reaches `passes`: the guest has no other way to say so than its RAM.
    fn wait_passes(&self, passes: u32, boots: u32) {
        let deadline = soon();
        loop {
            if let Ok(control) = checker::control(&self.ram)
                && control.state == 1
                && control.boots == boots
                && control.passes >= passes
            {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "no {passes} passes: {:?}",
                checker::control(&self.ram)
            );
            std::thread::sleep(Duration::from_millis(1)); // RAM cannot be waited on, only looked at
        }
    }

    fn stop(&mut self) {
        self.qemu.execute("stop", json!({}), soon()).expect("stop");
        self.qemu.wait_event("STOP", soon()).expect("STOP");
    }
}

fn counts_and_shows_damage(spec: &CounterSpec, accelerator: &str) {
    let mut running = start(spec, accelerator, &[]).expect("QEMU starts");
    running.wait_passes(5, 1);
    running.stop();
    let checked = checker::check(&running.ram).expect("a stopped guest's RAM is right");
    assert_eq!(
        (checked.control.first_page, checked.control.end_page),
        spec.pages()
    );
    let page = u64::from(checked.control.end_page - 1) * PAGE_BYTES;
    running
        .ram
        .write_all_at(&[0; 4], page)
        .expect("damage a page");
    assert!(matches!(
        checker::check(&running.ram),
        Err(CheckError::WrongPages { count: 1, .. })
    ));
}

#[test]
fn the_flat_guest_counts_under_tcg() {
    counts_and_shows_damage(&CounterSpec::flat(RAM_MIB - 8), "tcg");
}

#[test]
fn the_real_mode_guest_counts_under_tcg() {
    counts_and_shows_damage(&CounterSpec::real(), "tcg");
}

#[test]
fn the_real_mode_guest_counts_under_kvm() {
    if !std::path::Path::new("/dev/kvm").exists() {
        println!("skipped: no /dev/kvm");
        return;
    }
    counts_and_shows_damage(&CounterSpec::real(), "kvm");
}

#[test]
fn spin_slows_the_counting() {
    let fast = passes_in_half_a_second(&CounterSpec::flat(16));
    let slow = passes_in_half_a_second(&CounterSpec::flat(16).slowed(2000));
    assert!(slow > 0 && fast > slow * 4, "fast {fast}, slow {slow}");
}

fn passes_in_half_a_second(spec: &CounterSpec) -> u32 {
    let mut running = start(spec, "tcg", &[]).expect("QEMU starts");
    running.wait_passes(2, 1);
    let before = checker::control(&running.ram).expect("counting").passes;
    std::thread::sleep(Duration::from_millis(500)); // the measured interval itself
    running.stop();
    checker::control(&running.ram).expect("counting").passes - before
}

fn both_modes() -> [CounterSpec; 2] {
    [CounterSpec::real(), CounterSpec::flat(RAM_MIB - 8)]
}

#[test]
fn it_powers_off_when_asked() {
    for spec in both_modes() {
        let mut running =
            start(&spec.then(Action::PowerOff, 3), "tcg", &["-no-shutdown"]).expect("QEMU starts");
        let event = running
            .qemu
            .wait_event("SHUTDOWN", soon())
            .expect("SHUTDOWN");
        assert_eq!(event["data"]["reason"], "guest-shutdown");
        assert_eq!(
            checker::check(&running.ram).expect("right").control.passes,
            3
        );
    }
}

#[test]
fn it_resets_once_and_counts_again() {
    for spec in both_modes() {
        let mut running = start(&spec.then(Action::Reset, 3), "tcg", &[]).expect("QEMU starts");
        let event = running.qemu.wait_event("RESET", soon()).expect("RESET");
        assert_eq!(event["data"]["reason"], "guest-reset");
        running.wait_passes(10, 2);
        running.stop();
        assert_eq!(
            checker::check(&running.ram).expect("right").control.boots,
            2
        );
    }
}

#[test]
fn it_panics_when_asked() {
    for spec in both_modes() {
        let spec = spec.then(Action::Panic, 3);
        let extra = ["-device", "pvpanic", "-action", "panic=pause"];
        let mut running = start(&spec, "tcg", &extra).expect("QEMU starts");
        running
            .qemu
            .wait_event("GUEST_PANICKED", soon())
            .expect("GUEST_PANICKED");
        assert_eq!(
            checker::check(&running.ram).expect("right").control.state,
            2
        );
    }
}
