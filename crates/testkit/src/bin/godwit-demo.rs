//! The demo: two hosts on this machine, a guest with a loaded Redis, moved there and back while the load runs.
//!
//! Uses the product as a person would, by its command line; measures with the testkit's own tools. Everything runs in
//! namespaces that end with this process, also on Ctrl-C; `--keep` leaves them and says how to look around.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Parser;
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use godwit_testkit::interrupt;
use godwit_testkit::lab::{Lab, LabConfig, Machine};
use godwit_testkit::stage::{Stage, go_on};
use godwit_testkit::touch;
use serde_json::Value;

const GUEST: &str = "10.77.0.10";
const GUEST6: &str = "fd77::10";
/// Memory of the guest, MiB.
const MEMORY_MIB: u64 = 1024;

#[derive(Parser)]
#[command(
    about = "Moves a loaded Redis guest between two hosts on this machine and back, and reports",
    version
)]
struct Arguments {
    /// MiB of random values in Redis
    #[arg(long, default_value_t = 600)]
    data_mib: u32,
    /// Seconds of load before, between and after the moves
    #[arg(long, default_value_t = 8)]
    pause_seconds: u64,
    /// Longest pause that a move may make, ms
    #[arg(long, default_value_t = 100)]
    max_downtime: u64,
    /// Leave everything running and print how to look around
    #[arg(long)]
    keep: bool,
    /// Where reports go; below the target directory when left out
    #[arg(long)]
    output: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    interrupt::catch();
    match Demo::run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if interrupt::caught() => {
            eprintln!("demo: interrupted; everything that it started is ended");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Waits at the demo's own pace, and hears Ctrl-C.
fn pause(seconds: u64) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        go_on()?;
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn unix_ms() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis())
}

/// What one move left for the report.
struct Move {
    report: PathBuf,
    window: String,
    lag_ms: f64,
}

struct Demo<'a> {
    arguments: &'a Arguments,
    stage: Stage,
    bin: PathBuf,
    out: PathBuf,
    began: Instant,
    /// Fresh memory that a thread of this machine touched before the run, GB/s.
    first_touch: f64,
}

impl<'a> Demo<'a> {
    fn run(arguments: &'a Arguments) -> Result<()> {
        let target = target_dir()?;
        let guest = LinuxGuest::find(&target)?;
        let out = arguments
            .output
            .clone()
            .unwrap_or_else(|| target.join("demo"));
        std::fs::create_dir_all(&out)?;
        let began = Instant::now();
        say(
            began,
            "two hosts, a controller and a client, each in namespaces of its own",
        );
        let name = format!("demo-{}", std::process::id());
        let lab = Lab::new(LabConfig {
            name,
            keep: arguments.keep,
            ..LabConfig::default()
        })?;
        let bin = std::env::current_exe()?
            .parent()
            .context("no directory of programs")?
            .to_owned();
        let mut demo = Self {
            arguments,
            stage: Stage::new(lab, &bin, &out)?,
            bin,
            out,
            began,
            first_touch: first_touch()?,
        };
        let result = demo.play(&guest);
        if arguments.keep && result.is_ok() {
            demo.tell_how_to_look();
        } else {
            demo.stage.lab.end()?;
        }
        result
    }

    fn play(&mut self, guest: &LinuxGuest) -> Result<()> {
        self.start_product()?;
        self.start_guest(guest)?;
        let (mut load, lines) = self.start_load()?;
        self.wait_line(&mut load, &lines, "running")?;
        let ping = self.start_ping()?;
        pause(self.arguments.pause_seconds)?;
        let mut moves = Vec::new();
        for to in ["b", "a"] {
            moves.push(self.migrate(to)?);
            pause(self.arguments.pause_seconds)?;
        }
        self.finish(load, ping, &moves)
    }

    fn machine(&self, name: &str) -> Result<&Machine> {
        self.stage.machine(name)
    }

    fn start_product(&self) -> Result<()> {
        self.stage.start_controller(&[])?;
        say(self.began, "the controller answers");
        for (index, host) in [(0, "a"), (1, "b")] {
            let own = self.stage.lab.addresses(index);
            let migration = [own.migration4.to_string(), own.migration6.to_string()];
            self.stage.join(host, &migration, &[])?;
            self.stage.start_daemon(host)?;
        }
        self.stage.wait_connected()?;
        say(self.began, "both hosts are connected");
        Ok(())
    }

    fn start_guest(&self, guest: &LinuxGuest) -> Result<()> {
        let network = GuestNetwork {
            ip4: Some(format!("{GUEST}/24")),
            ip6: Some(format!("{GUEST6}/64")),
        };
        let description = format!(
            "name = \"redis\"\nvcpus = 1\nmemory_mib = {MEMORY_MIB}\nkernel = \"{}\"\ninitramfs = \"{}\"\ncmdline = \"{}\"\nencryption = \"required\"\n\n[[nic]]\nport_group = \"vm\"\n",
            guest.kernel.display(),
            guest.initrd.display(),
            command_line(&network)
        );
        let file = self.out.join("redis.toml");
        std::fs::write(&file, description)?;
        let file = file.to_string_lossy();
        self.stage.ok("controller", &["vm", "create", &file])?;
        self.stage
            .ok("controller", &["vm", "start", "redis", "--on", "a"])?;
        say(
            self.began,
            "the guest boots on host a (1 GiB, Linux, Redis), encryption required",
        );
        let what = "Redis answers in the guest";
        self.stage.until(what, Duration::from_secs(120), || {
            let redis = SocketAddr::new(GUEST.parse()?, 6379);
            let connect = || TcpStream::connect_timeout(&redis, Duration::from_secs(1)).is_ok();
            Ok(self.machine("client")?.in_network(connect)?)
        })?;
        say(self.began, what);
        Ok(())
    }

    /// The guest's clock and ours, ns.
    fn probe(&self, address: &str) -> Result<(i128, i128)> {
        let program = self.bin.join("godwit-probe");
        let output = self
            .machine("client")?
            .command(program)
            .args(["--timeout-s", "2", address, "mono"])
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let words: Vec<&str> = text.split_whitespace().collect();
        let after = |key: &str| {
            let at = words.iter().position(|word| *word == key)?;
            words.get(at + 1)?.parse::<i128>().ok()
        };
        let clocks = after("mono_ns").zip(after("client_ns"));
        clocks.with_context(|| format!("the guest's probe said '{}'", text.trim()))
    }

    fn start_load(&self) -> Result<(Child, Receiver<String>)> {
        say(
            self.began,
            &format!(
                "filling Redis with {} MiB of random values",
                self.arguments.data_mib
            ),
        );
        let data = self.arguments.data_mib.to_string();
        let address = format!("{GUEST}:6379");
        let mut load = self
            .machine("client")?
            .command(self.bin.join("godwit-load"))
            .args([
                "--data-mib",
                &data,
                "--seconds",
                "3600",
                "--verify-all",
                "-o",
                "/var/tmp/workload.json",
                &address,
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = load.stdout.take().context("no output of the load")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok((load, lines))
    }

    fn wait_line(&self, load: &mut Child, lines: &Receiver<String>, wanted: &str) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(300);
        loop {
            go_on()?;
            if Instant::now() > deadline {
                bail!("the load was not ready within five minutes");
            }
            match lines.recv_timeout(Duration::from_millis(200)) {
                Ok(line) => {
                    say(self.began, &format!("load: {line}"));
                    if line.starts_with(wanted) {
                        return Ok(());
                    }
                }
                Err(_) => {
                    if let Some(status) = load.try_wait()? {
                        bail!("the load ended early: {status}");
                    }
                }
            }
        }
    }

    fn start_ping(&self) -> Result<Child> {
        Ok(self
            .machine("client")?
            .command(self.bin.join("godwit-ping"))
            .args([
                "--seconds",
                "3600",
                "--list-gaps-ms",
                "5",
                "-o",
                "/var/tmp/ping.json",
                GUEST,
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?)
    }

    fn migrate(&self, to: &str) -> Result<Move> {
        go_on()?;
        say(
            self.began,
            &format!("moving the guest to host {to}, encrypted, under load"),
        );
        let before = self.probe(GUEST)?;
        let from_ms = unix_ms();
        let downtime = self.arguments.max_downtime.to_string();
        let status = self
            .machine("controller")?
            .command(self.bin.join("godwit"))
            .args([
                "vm",
                "migrate",
                "redis",
                "--to",
                to,
                "--encryption",
                "required",
                "--max-downtime",
                &downtime,
            ])
            .status()?;
        let to_ms = unix_ms();
        if !status.success() {
            bail!(
                "the migration to host {to} ended with {status}; logs are in {}",
                self.out.display()
            );
        }
        let after = self.probe(GUEST6)?;
        let lag_ms = ((after.1 - before.1) - (after.0 - before.0)) as f64 / 1e6;
        let report = self.out.join(format!("migration-to-{to}.json"));
        let migrations = self.stage.json("controller", &["migration", "list"])?;
        let id = newest(&migrations).context("no migration in the list")?;
        std::fs::write(
            &report,
            self.stage
                .ok("controller", &["migration", "show", &id, "--json"])?,
        )?;
        Ok(Move {
            report,
            window: format!("{from_ms}-{to_ms}"),
            lag_ms,
        })
    }

    fn finish(&self, load: Child, ping: Child, moves: &[Move]) -> Result<()> {
        say(self.began, "the load ends and reads every value back");
        let (loaded, pinged) = (interrupt(load)?, interrupt(ping)?);
        let verified = loaded.success() && pinged.success();
        for file in ["workload.json", "ping.json"] {
            let inside = Path::new("/var/tmp").join(file);
            std::fs::copy(
                self.machine("client")?.path_from_outside(inside),
                self.out.join(file),
            )?;
        }
        let accelerator = self.stage.json("controller", &["vm", "show", "redis"])?;
        let accelerator = accelerator["accelerator"]
            .as_str()
            .unwrap_or("tcg")
            .to_owned();
        self.compose(&accelerator, moves, verified)?;
        self.summary()?;
        if !verified {
            bail!("the load found damage or ended badly: {loaded}, ping {pinged}");
        }
        Ok(())
    }

    fn compose(&self, accelerator: &str, moves: &[Move], verified: bool) -> Result<()> {
        let mut command = std::process::Command::new(self.bin.join("godwit-report"));
        command.args([
            "compose",
            "--accelerator",
            accelerator,
            "--ram-mib",
            &MEMORY_MIB.to_string(),
        ]);
        command
            .arg("--workload")
            .arg(self.out.join("workload.json"));
        command.arg("--ping").arg(self.out.join("ping.json"));
        for one in moves {
            command
                .arg("--migration")
                .arg(&one.report)
                .args(["--window", &one.window]);
            command.arg(format!("--clock-lag-ms={:.3}", one.lag_ms));
        }
        if verified {
            command.arg("--ram-verified");
        }
        let host = self.stage.json("controller", &["host", "show", "a"])?;
        command.args(["--qemu", text(&host["qemu"])]);
        command.args(["--made-by", &made_by()]);
        command.arg(format!("--first-touch={:.2}", self.first_touch));
        run(command.arg("-o").arg(self.out.join("report.json")))?;
        let mut html = std::process::Command::new(self.bin.join("godwit-report"));
        run(html
            .arg("html")
            .arg(self.out.join("report.json"))
            .arg("-o")
            .arg(self.out.join("report.html")))
    }

    fn summary(&self) -> Result<()> {
        let report: Value =
            serde_json::from_str(&std::fs::read_to_string(self.out.join("report.json"))?)?;
        let work = &report["workload"];
        println!(
            "\nguest: {} MiB, run by {}",
            report["guest"]["ram_mib"],
            report["guest"]["accelerator"]
                .as_str()
                .unwrap_or("?")
                .to_uppercase()
        );
        for one in report["migrations"].as_array().into_iter().flatten() {
            println!(
                "{} -> {}: {}, {}, {:.2} s in all, switchover {:.1} ms ({}), {:.2} GB/s, network gap {} ms, guest clock behind by {} ms",
                text(&one["from"]),
                text(&one["to"]),
                text(&one["outcome"]),
                text(&one["encryption"]),
                one["total_s"].as_f64().unwrap_or(0.0),
                one["switchover_ms"].as_f64().unwrap_or(0.0),
                match one["promise"]["kept"].as_bool() {
                    Some(true) => "within its target",
                    Some(false) => "over its target",
                    None => "no target",
                },
                one["throughput_gb_per_s"].as_f64().unwrap_or(0.0),
                number(&one["network_gap_ms"]),
                number(&one["guest_clock_lag_ms"]),
            );
        }
        println!(
            "load: {} operations a second before, {} during, {} after; back to 95 % after {} s; connections lost: {}; every value read back: {}",
            number(&work["before_ops_per_s"]),
            number(&work["during_ops_per_s"]),
            number(&work["after_ops_per_s"]),
            number(&work["recovered_after_s"]),
            work["connections_lost"],
            report["ram_verified"]
        );
        println!(
            "report: {0}/report.json and {0}/report.html",
            self.out.display()
        );
        Ok(())
    }

    fn tell_how_to_look(&self) {
        let lab = format!(
            "{} --name {}",
            self.bin.join("godwit-lab").display(),
            self.stage.lab.config().name
        );
        let godwit = self.bin.join("godwit").display().to_string();
        println!("\neverything is left running; look around with:");
        println!("  {lab} exec controller -- {godwit} vm list");
        println!("  {lab} exec controller -- {godwit} vm migrate redis --to b");
        println!("  {lab} exec a -- {godwit} migration list");
        println!("  {lab} down        ends it all");
    }
}

/// How fast this machine gives fresh memory: where its hypervisor takes free memory back, that limits every move.
fn first_touch() -> Result<f64> {
    const BYTES: u64 = 256 << 20;
    let took = touch::anonymous(BYTES, 1)?;
    Ok(BYTES as f64 / 1e9 / took.as_secs_f64().max(1e-9))
}

/// The command that a reader would give.
fn made_by() -> String {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.is_empty() {
        true => "make demo".to_owned(),
        false => format!("godwit-demo {}", arguments.join(" ")),
    }
}

fn newest(migrations: &Value) -> Option<String> {
    let newest = migrations
        .as_array()?
        .iter()
        .max_by_key(|one| one["began_unix_s"].as_u64());
    Some(newest?["id"].as_str()?.to_owned())
}

/// Asks a tool to end with its report.
fn interrupt(mut child: Child) -> Result<std::process::ExitStatus> {
    // SAFETY: a plain system call on the number of a child that was not waited for yet.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    Ok(child.wait()?)
}

fn run(command: &mut std::process::Command) -> Result<()> {
    let status = command.status()?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

fn number(value: &Value) -> String {
    value
        .as_f64()
        .map_or_else(|| "not measured".into(), |number| format!("{number:.1}"))
}

fn say(began: Instant, what: &str) {
    println!("[{:6.1} s] {what}", began.elapsed().as_secs_f64());
}
