//! What a guest pays for having its RAM in a shared file on tmpfs, which live migration needs: memory bandwidth, fault
//! rate and boot time against QEMU's anonymous memory with transparent huge pages. See `--help`.
//!
//! Both kinds of memory run alternately in the same run, on the same Linux guest. Rates are given per second and per
//! CPU second of QEMU: the latter hardly depends on what else the machine does. No code of the product takes part.

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use godwit_testkit::guest::linux::{self, GuestNetwork, LinuxGuest};
use godwit_testkit::qemu::{TestQemu, machine_args};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

#[derive(Parser)]
#[command(
    about = "Compares a guest on our RAM file with one on anonymous memory; needs root for the tmpfs and the image of guest-image",
    version
)]
struct Arguments {
    /// What runs the guest
    #[arg(long, value_enum, default_value = "tcg")]
    accelerator: Accelerator,
    /// Guests of each kind, alternating
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Guest memory in MiB
    #[arg(long, default_value_t = 512)]
    memory_mib: u32,
    /// Measurements in each guest
    #[arg(long, default_value_t = 3)]
    samples: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Accelerator {
    Tcg,
    Kvm,
}

impl Accelerator {
    fn name(self) -> &'static str {
        match self {
            Accelerator::Tcg => "tcg",
            Accelerator::Kvm => "kvm",
        }
    }
}

/// The two kinds of memory.
const KINDS: [&str; 2] = ["ram-file", "anonymous"];
/// What is measured, and whether more is better.
const FIGURES: [(&str, bool); 6] = [
    ("boot_s", false),
    ("boot_cpu_s", false),
    ("copy_mb_per_s", true),
    ("copy_mb_per_cpu_s", true),
    ("faults_per_s", true),
    ("faults_per_cpu_s", true),
];
const BOOT_WAIT: Duration = Duration::from_secs(300);
const ANSWER_WAIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit-steady-state: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    ensure!(
        arguments.runs > 0 && arguments.samples > 0,
        "runs and samples must be 1 or more"
    );
    let target = linux::target_dir()?;
    let guest = LinuxGuest::find(&target)?;
    let place = Place::mount(arguments.memory_mib)?;
    let load_before = load_average();
    let mut figures: Vec<(&str, [f64; 6])> = Vec::new();
    for number in 0..arguments.runs {
        for kind in KINDS {
            eprintln!("guest {} of {} on {kind}", number + 1, arguments.runs);
            figures.extend(measure(arguments, &guest, &place, kind)?.map(|f| (kind, f)));
        }
    }
    let report = json!({
        "schema": 1,
        "accelerator": arguments.accelerator.name(),
        "memory_mib": arguments.memory_mib,
        "runs": arguments.runs,
        "samples_per_run": arguments.samples,
        "transparent_hugepage": sysfs("enabled"),
        "load_average_before": load_before,
        "load_average_after": load_average(),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "figures": summary(&figures),
    });
    let path = target.join("bench/steady-state.json");
    std::fs::create_dir_all(target.join("bench"))?;
    std::fs::write(&path, serde_json::to_vec_pretty(&report)?)?;
    print_table(&report);
    println!("written to {}", path.display());
    Ok(())
}

/// A tmpfs as the product uses it, and room for sockets; both go when it is dropped.
struct Place(PathBuf);

impl Place {
    fn mount(memory_mib: u32) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("godwit-steady-state-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        let options = format!("huge=within_size,size={}M", memory_mib + 64);
        let place = Self(path);
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "godwit-steady-state"])
            .arg(&place.0)
            .status()
            .context("cannot run mount")?;
        ensure!(status.success(), "no tmpfs with huge pages can be mounted");
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// One guest: its boot, then several samples of its memory.
fn measure(
    arguments: &Arguments,
    guest: &LinuxGuest,
    place: &Place,
    kind: &str,
) -> Result<impl Iterator<Item = [f64; 6]> + use<>> {
    let (console_path, ram) = (place.0.join("console"), place.0.join("ram"));
    let console = UnixListener::bind(&console_path)?;
    // Free until somebody else asks for it; QEMU says so if somebody has.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let machine = machine(arguments, guest, &ram, kind, &console_path, port);
    let began = Instant::now();
    let qemu = TestQemu::start(&machine, began + BOOT_WAIT)?;
    wait_ready(&console, began + BOOT_WAIT)?;
    let (boot_s, boot_cpu_s) = (began.elapsed().as_secs_f64(), cpu_s(qemu.pid())?);
    let samples: Vec<[f64; 6]> = (0..arguments.samples)
        .map(|_| sample(&qemu, port).map(|[a, b, c, d]| [boot_s, boot_cpu_s, a, b, c, d]))
        .collect::<Result<_>>()?;
    drop(qemu);
    std::fs::remove_file(&console_path)?;
    if kind == "ram-file" {
        std::fs::remove_file(&ram)?;
    }
    Ok(samples.into_iter())
}

fn machine(
    arguments: &Arguments,
    guest: &LinuxGuest,
    ram: &Path,
    kind: &str,
    console: &Path,
    port: u16,
) -> Vec<String> {
    let memory_mib = arguments.memory_mib;
    let mut machine = machine_args(arguments.accelerator.name(), ram, memory_mib);
    if kind == "anonymous" {
        // What QEMU does unless told otherwise: it asks for huge pages by madvise.
        let anonymous = format!("memory-backend-ram,id=ram,size={memory_mib}M");
        machine
            .iter_mut()
            .filter(|argument| argument.starts_with("memory-backend-file"))
            .for_each(|argument| argument.clone_from(&anonymous));
    }
    // An emulated vCPU without room for a second loses notifications.
    let vcpus = match arguments.accelerator.name() {
        "tcg" => "1,maxcpus=2",
        _ => "1",
    };
    let network = GuestNetwork {
        ip4: Some("10.0.2.15/24".into()),
        ip6: None,
    };
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let forward = format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:7");
    let more = [
        "-cpu".into(),
        "max".into(),
        "-smp".into(),
        vcpus.into(),
        "-kernel".into(),
        text(&guest.kernel),
        "-initrd".into(),
        text(&guest.initrd),
        "-append".into(),
        linux::command_line(&network),
        "-serial".into(),
        format!("unix:{}", text(console)),
        "-netdev".into(),
        forward,
        "-device".into(),
        "virtio-net-pci,netdev=net,romfile=".into(),
    ];
    machine.extend(more);
    machine
}

fn wait_ready(console: &UnixListener, deadline: Instant) -> Result<()> {
    let (stream, _) = console.accept()?;
    stream.set_read_timeout(Some(deadline.saturating_duration_since(Instant::now())))?;
    for line in BufReader::new(stream).lines() {
        let line = line.context("the guest did not boot in time")?;
        if line.contains("godwit-guest: ready") {
            return Ok(());
        }
    }
    anyhow::bail!("the guest ended while it booted")
}

/// Copy and fault rates, each per second and per CPU second of QEMU.
fn sample(qemu: &TestQemu, port: u16) -> Result<[f64; 4]> {
    let (began, cpu_before) = (Instant::now(), cpu_s(qemu.pid())?);
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(ANSWER_WAIT))?;
    stream.write_all(b"membw\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let share = (cpu_s(qemu.pid())? - cpu_before) / began.elapsed().as_secs_f64();
    let words: Vec<&str> = line.split_whitespace().collect();
    let (copy, faults): (f64, f64) = match words[..] {
        ["copy_mb_per_s", copy, "faults_per_s", faults] => (copy.parse()?, faults.parse()?),
        _ => anyhow::bail!("the guest answered '{}'", line.trim()),
    };
    ensure!(
        share > 0.0 && copy > 0.0 && faults > 0.0,
        "nothing was measured: {line}"
    );
    Ok([copy, copy / share, faults, faults / share])
}

/// User and system time of a process.
fn cpu_s(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map_or("", |(_, fields)| fields)
        .split_whitespace()
        .collect();
    let ticks = |at: usize| -> Result<f64> {
        let field = fields.get(at).context("/proc/PID/stat is too short")?;
        Ok(field.parse()?)
    };
    // SAFETY: a plain question about a constant of the system.
    let per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok((ticks(11)? + ticks(12)?) / per_s as f64)
}

fn summary(figures: &[(&str, [f64; 6])]) -> Value {
    let of = |kind: &str, at: usize| {
        let mut values: Vec<f64> = figures
            .iter()
            .filter(|(k, _)| *k == kind)
            .map(|(_, f)| f[at])
            .collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let one = |at: usize, name: &str, more_is_better: bool| {
        let sides = KINDS.map(|kind| of(kind, at));
        let [file, anonymous] = sides.each_ref().map(|values| values[values.len() / 2]);
        let ratio = if more_is_better {
            file / anonymous
        } else {
            anonymous / file
        };
        let side = |values: &Vec<f64>| {
            json!({
                "median": values[values.len() / 2],
                "lowest": values[0],
                "highest": values[values.len() - 1],
                "all": values,
            })
        };
        // Above 1: the RAM file is the better one.
        json!({
            "figure": name,
            "ram_file": side(&sides[0]),
            "anonymous": side(&sides[1]),
            "ratio": ratio,
        })
    };
    FIGURES
        .iter()
        .enumerate()
        .map(|(at, (name, more))| one(at, name, *more))
        .collect()
}

fn print_table(report: &Value) {
    println!(
        "{:<20} {:>28} {:>28} {:>7}",
        "median (lowest..highest)", "RAM file", "anonymous", "ratio"
    );
    for row in report["figures"].as_array().into_iter().flatten() {
        let side = |name: &str| {
            let number = |key: &str| row[name][key].as_f64().unwrap_or(0.0);
            format!(
                "{:.1} ({:.1}..{:.1})",
                number("median"),
                number("lowest"),
                number("highest")
            )
        };
        println!(
            "{:<20} {:>28} {:>28} {:>7.3}",
            row["figure"].as_str().unwrap_or(""),
            side("ram_file"),
            side("anonymous"),
            row["ratio"].as_f64().unwrap_or(0.0)
        );
    }
}

fn load_average() -> String {
    std::fs::read_to_string("/proc/loadavg")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn sysfs(name: &str) -> String {
    std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}"))
        .unwrap_or_default()
        .trim()
        .to_owned()
}
