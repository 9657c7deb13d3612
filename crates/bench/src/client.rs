//! A client that loads the Redis guest, by its own clock, and says what the move cost the guest.
//!
//! Uses the test kit's load program on the client's machine: every byte of every answer is checked, and at the end every
//! value is read back. Owns that process.

use crate::guest::ADDRESS;
use crate::plan::Guest;
use crate::stage::{Stage, programs};
use anyhow::{Context as _, Result, bail, ensure};
use godwit_testkit::load::series::{Window, Workload};
use godwit_testkit::stage::{go_on, pause};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest wait for Linux to boot under emulation, and for the data.
const BOOT: Duration = Duration::from_secs(240);
/// Longest wait for every value to be read back: a minute and more for the largest guest on a busy machine.
const READ_BACK: Duration = Duration::from_secs(300);
/// Seconds of load before and after the move.
const AROUND: Duration = Duration::from_secs(6);

pub struct Client {
    child: Child,
    report: PathBuf,
}

impl Client {
    /// Waits for Redis, fills it, starts the load and lets it run a while.
    pub fn begin(stage: &Stage, guest: &Guest) -> Result<Self> {
        let Guest::Redis {
            data_mib,
            set_percent,
            ops_per_s,
        } = *guest
        else {
            bail!("only the Redis guest has a client");
        };
        wait_for_redis(stage)?;
        let report = PathBuf::from("/var/tmp/workload.json");
        let mut command = stage.command("client", programs()?.join("godwit-load"))?;
        command.args(["--data-mib", &data_mib.to_string()]);
        command.args([
            "--write-share",
            &(f64::from(set_percent) / 100.0).to_string(),
        ]);
        command.args(["--seconds", "3600", "--probe-seconds", "3", "--verify-all"]);
        if let Some(rate) = ops_per_s {
            command.args(["--rate", &rate.to_string()]);
        }
        command.args(["-o", &report.to_string_lossy(), &format!("{ADDRESS}:6379")]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = lines_of(&mut child)?;
        let report = stage.inside("client", report)?;
        let client = Self { child, report };
        wait_running(&lines)?;
        pause(AROUND)?;
        Ok(client)
    }

    /// Lets it run a while longer, ends it, and gives whether every value was right, what was checked, and what the
    /// client saw. Moments are seconds since 1970.
    pub fn end(mut self, began: f64, resumed: f64) -> Result<(bool, Value, Value)> {
        pause(AROUND)?;
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        let status = self.ended(Instant::now() + READ_BACK)?;
        let text = std::fs::read(&self.report).context("the load left no report")?;
        let mut work: Workload = serde_json::from_slice(&text)?;
        let zero = work.started_unix_ms as f64 / 1e3;
        let window = Window {
            from_s: began - zero,
            to_s: resumed - zero,
        };
        work.judge(&[window]);
        let equal = status.success() && work.is_sound() && work.connections_lost == 0;
        let checked = json!({
            "compared": "every value in Redis, read back by its client",
            "verified_reads": work.verified_reads,
            "damaged_reads": work.damaged_reads,
            "lost_writes": work.lost_writes,
        });
        let speed =
            (work.before_ops_per_s > 0.0).then(|| work.during_ops_per_s / work.before_ops_per_s);
        let worst_ms = |during: bool| {
            let inside = |t: f64| t + 1.0 > window.from_s && t < window.to_s;
            let seconds = work
                .seconds
                .iter()
                .filter(|second| inside(f64::from(second.t)) == during);
            seconds.map(|second| second.p99_ms).fold(0.0, f64::max)
        };
        let seen = json!({
            "speed_during": speed, "rate_ops_per_s": work.rate_ops_per_s, "max_ops_per_s": work.max_ops_per_s,
            "before_ops_per_s": work.before_ops_per_s, "during_ops_per_s": work.during_ops_per_s,
            "after_ops_per_s": work.after_ops_per_s, "recovered_after_s": work.recovered_after_s,
            "p99_ms_during": worst_ms(true), "p99_ms_else": worst_ms(false),
            "window_s": [window.from_s, window.to_s],
            "ops": work.seconds.iter().map(|second| second.ops).collect::<Vec<_>>(),
        });
        Ok((equal, checked, seen))
    }

    fn ended(&mut self, deadline: Instant) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            go_on()?;
            ensure!(
                Instant::now() < deadline,
                "the client had not read all values back within {READ_BACK:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended already where the run went well
        let _ = self.child.wait();
    }
}

fn wait_for_redis(stage: &Stage) -> Result<()> {
    let deadline = Instant::now() + BOOT;
    let redis: SocketAddr = format!("{ADDRESS}:6379").parse()?;
    loop {
        go_on()?;
        let connect = || TcpStream::connect_timeout(&redis, Duration::from_secs(1)).is_ok();
        if stage.machine("client")?.in_network(connect)? {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "Redis did not answer within {BOOT:?}"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn lines_of(child: &mut Child) -> Result<Receiver<String>> {
    let stdout = child.stdout.take().context("no output of the load")?;
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        // The pipe is read to its end: a load that cannot print would stand still.
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    Ok(lines)
}

fn wait_running(lines: &Receiver<String>) -> Result<()> {
    let deadline = Instant::now() + BOOT;
    loop {
        go_on()?;
        match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(line) if line.starts_with("running") => return Ok(()),
            Ok(_) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => bail!("the load ended early"),
            Err(_) => ensure!(
                Instant::now() < deadline,
                "Redis was not filled within {BOOT:?}"
            ),
        }
    }
}
