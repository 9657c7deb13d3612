//! The demo: two hosts on this machine, a guest with a loaded database, moved there and back while the load runs.
//!
//! Uses the product as a person would, by its command line; measures with the testkit's own tools. Everything runs in
//! namespaces that end with this process, also on Ctrl-C; `--keep` leaves them and says how to look around.

mod guest;

use std::io::{BufRead as _, BufReader};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Parser;
use godwit_testkit::guest::debian;
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::interrupt;
use godwit_testkit::lab::{Lab, LabConfig, Machine};
use godwit_testkit::link::LinkSpec;
use godwit_testkit::stage::{Stage, go_on};
use godwit_testkit::touch;
use guest::{Guest, MEMORY_MIB};
use serde_json::Value;

#[derive(Parser)]
#[command(
    about = "Moves a guest with a loaded database between two hosts on this machine and back, and reports",
    version
)]
struct Arguments {
    /// MiB of data in the guest's database; when left out 75 in PostgreSQL, 600 in Redis
    #[arg(long)]
    data_mib: Option<u32>,
    /// Seconds of load before, between and after the moves
    #[arg(long, default_value_t = 8)]
    pause_seconds: u64,
    /// Longest pause that a move may make, ms
    #[arg(long, default_value_t = 100)]
    max_downtime: u64,
    /// An emulated link between the hosts, such as rtt=150ms,rate=1gbit; without it they are as near as this machine makes them
    #[arg(long)]
    link: Option<LinkSpec>,
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

/// This process's clock, ns.
fn monotonic() -> i128 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}

/// What one move left for the report.
struct Move {
    report: PathBuf,
    window: String,
    lag_ms: f64,
}

struct Demo<'a> {
    arguments: &'a Arguments,
    guest: Guest,
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
        let guest = Guest::choose(&target)?;
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
            link: arguments.link,
            ..LabConfig::default()
        })?;
        let bin = std::env::current_exe()?
            .parent()
            .context("no directory of programs")?
            .to_owned();
        let mut demo = Self {
            arguments,
            guest,
            stage: Stage::new(lab, &bin, &out)?,
            bin,
            out,
            began,
            first_touch: first_touch()?,
        };
        let result = demo.play();
        if arguments.keep && result.is_ok() {
            demo.tell_how_to_look();
        } else {
            demo.stage.lab.end()?;
        }
        result
    }

    fn play(&mut self) -> Result<()> {
        self.start_product()?;
        self.start_guest()?;
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

    fn start_guest(&self) -> Result<()> {
        let name = self.guest.name();
        let file = self.out.join(format!("{name}.toml"));
        std::fs::write(&file, self.guest.describe())?;
        let file = file.to_string_lossy();
        self.stage.ok("controller", &["vm", "create", &file])?;
        self.stage
            .ok("controller", &["vm", "start", name, "--on", "a"])?;
        let about = self.guest.about();
        let said = format!("the guest boots on host a ({about}), encryption required");
        say(self.began, &said);
        self.guest.wait_ready(&self.stage)?;
        let database = self.guest.database();
        say(self.began, &format!("{database} answers in the guest"));
        Ok(())
    }

    fn clocks(&self, address: IpAddr) -> Result<(i128, i128)> {
        self.guest.clocks(&self.stage, address, &self.bin)
    }

    fn start_load(&self) -> Result<(Child, Receiver<String>)> {
        let (program, arguments, what) = self.guest.load(self.arguments.data_mib);
        say(self.began, &what);
        let mut load = self
            .machine("client")?
            .command(self.bin.join(program))
            .args(["--seconds", "3600", "-o", "/var/tmp/workload.json"])
            .args(arguments)
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
                &debian::ADDRESS.to_string(),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?)
    }

    fn migrate(&self, to: &str) -> Result<Move> {
        go_on()?;
        let along = match self.guest {
            Guest::Debian(_) => " and its disk",
            Guest::Linux(_) => "",
        };
        say(
            self.began,
            &format!("moving the guest{along} to host {to}, encrypted, under load"),
        );
        let before = self.clocks(debian::ADDRESS)?;
        let from_ms = unix_ms();
        let downtime = self.arguments.max_downtime.to_string();
        let status = self
            .machine("controller")?
            .command(self.bin.join("godwit"))
            .args([
                "vm",
                "migrate",
                self.guest.name(),
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
        let after = self.clocks(debian::ADDRESS6)?;
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
        say(self.began, self.guest.check());
        let (loaded, pinged) = (interrupt(load)?, interrupt(ping)?);
        let verified = loaded.success() && pinged.success();
        for file in ["workload.json", "ping.json"] {
            let inside = Path::new("/var/tmp").join(file);
            std::fs::copy(
                self.machine("client")?.path_from_outside(inside),
                self.out.join(file),
            )?;
        }
        let accelerator = self
            .stage
            .json("controller", &["vm", "show", self.guest.name()])?;
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
                "{} -> {}: {}, {}, {:.2} s in all, switchover {:.1} ms ({}), {:.2} GB/s, {:.0} MiB of disk, network gap {}, guest clock behind by {}",
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
                one["disk_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 20),
                milliseconds(&one["network_gap_ms"]),
                milliseconds(&one["guest_clock_lag_ms"]),
            );
        }
        println!(
            "load: {} operations a second before, {} during, {} after; back to 95 % after {} s; connections lost: {}; all that was acknowledged is there: {}",
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
        println!(
            "  {lab} exec controller -- {godwit} vm migrate {} --to b",
            self.guest.name()
        );
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

fn milliseconds(value: &Value) -> String {
    value
        .as_f64()
        .map_or_else(|| number(value), |number| format!("{number:.1} ms"))
}

fn say(began: Instant, what: &str) {
    println!("[{:6.1} s] {what}", began.elapsed().as_secs_f64());
}
