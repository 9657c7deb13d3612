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

fn start(spec: &CounterSpec, accelerator: &str, extra: &[&str]) -> anyhow::Result<Running> {
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

    fn go_on(&mut self) {
        self.qemu.execute("cont", json!({}), soon()).expect("cont");
        self.qemu.wait_event("RESUME", soon()).expect("RESUME");
    }

    fn passes(&self) -> u32 {
        checker::control(&self.ram).expect("counting").passes
    }

    /// What all threads of QEMU have used so far.
    fn cpu_ns(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.qemu.pid())).expect("tasks");
        let used = tasks.map(|task| {
            let line = std::fs::read_to_string(task.expect("a task").path().join("schedstat"));
            let first = line.ok()?.split(' ').next()?.parse::<u64>();
            first.ok()
        });
        used.flatten().sum() // a thread that has ended meanwhile did nothing for the guest
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
    let fast = cpu_ns_per_pass(&CounterSpec::flat(16), 20);
    let slow = cpu_ns_per_pass(&CounterSpec::flat(16).slowed(2000), 2);
    println!("a pass takes {fast} ns of CPU, slowed {slow} ns");
    assert!(slow > fast * 4, "fast {fast} ns, slow {slow} ns");
}

/// CPU time of QEMU for each pass: the least of three measurements, since time that is stolen from a machine may be
/// counted as used.
fn cpu_ns_per_pass(spec: &CounterSpec, passes: u32) -> u64 {
    let mut running = start(spec, "tcg", &[]).expect("QEMU starts");
    running.wait_passes(2, 1);
    let measure = |_| {
        running.stop();
        let (before, cpu_ns) = (running.passes(), running.cpu_ns());
        running.go_on();
        running.wait_passes(before + passes, 1);
        running.stop();
        let passes = u64::from(running.passes() - before);
        let cpu_ns = running.cpu_ns() - cpu_ns;
        running.go_on();
        cpu_ns / passes
    };
    (0..3).map(measure).min().expect("three")
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
