//! Those who serve a disk and move it: godwit-disk, and QEMU's storage daemon or QEMU itself, each driven by its own control.
//!
//! Owns the process, which ends with the value. Moments are those at which this process heard of something. Refuses: to wait
//! longer than it was told to.

use super::plan::{CopyMode, System, Way};
use super::site::{RUN, Site};
use anyhow::{Context as _, Result, anyhow, bail};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::lab::MachineCommand;
use godwit_testkit::qmp::Qmp;
use godwit_testkit::stage::go_on;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
/// QEMU's control, as the site's machine sees it.
const MONITOR: &str = "/run/bench/qmp";

/// A move that came to its end.
#[derive(Debug)]
pub struct Moved {
    pub asked: Instant,
    /// When the system began to change images.
    pub switching: Instant,
    pub done: Instant,
    /// What the system said on the way: when, how much of the disk was left, and how long that would take.
    pub estimates: Vec<(Instant, f64, f64)>,
    /// Its passes over what the load had written meanwhile, each at its end: of a method that has such.
    pub iterations: Vec<(Instant, Value)>,
    /// What it said at the end.
    pub report: Value,
}

/// What became of an attempt.
pub enum Attempt {
    Moved(Box<Moved>),
    /// The method found that it will not come to an end; the passes until then.
    GaveUp(String, Vec<(Instant, Value)>),
    /// It was not done within the time that it had.
    CutOff,
}

enum Control {
    Ours(ChildStdin, Receiver<(Instant, Value)>, Way),
    /// And where it writes what it has to say.
    Qemu(Box<Qmp>, CopyMode, PathBuf),
}

pub struct Server {
    child: Child,
    control: Control,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended; either way it is waited for, so that nothing of it is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Begins to serve an image on the site's socket.
    pub fn start(site: &Site, system: System, image: &Path, programs: &Path) -> Result<Self> {
        let deadline = Instant::now() + SOON;
        match system {
            System::Godwit(way) => ours(site, image, (programs, way), deadline),
            System::DataMover => ours(site, image, (programs, Way::Mirror), deadline),
            System::Daemon(mode) => daemon(site, image, mode, deadline),
            System::Qemu(mode) => {
                let qemu = site.command("qemu-system-x86_64");
                without_a_guest(site, qemu, image, thread(system), mode, deadline)
            }
            System::Ten(mode) => {
                let qemu = site.command(ten()?);
                without_a_guest(site, qemu, image, thread(system), mode, deadline)
            }
            System::Convert | System::VirtioBlk => bail!("it serves no disk on a socket"),
        }
    }

    /// Core-seconds that its threads have used.
    pub fn cpu_s(&self) -> f64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let nanos = |task: std::fs::DirEntry| {
            let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        };
        let all = tasks.into_iter().flatten().flatten().filter_map(nanos);
        all.sum::<u64>() as f64 / 1e9
    }

    /// Moves the disk, which has to be done before the deadline.
    pub fn move_to(&mut self, to: &Path, deadline: Instant) -> Result<Attempt> {
        match &mut self.control {
            Control::Ours(input, lines, way) => move_ours(input, lines, (to, *way), deadline),
            Control::Qemu(qmp, mode, log) => move_qemu(qmp, *mode, to, deadline)
                .map_err(|error| with_last_words(&error, &mut self.child, log)),
        }
    }
}

/// The product's own, on the site's socket.
pub fn ours(
    site: &Site,
    image: &Path,
    (programs, way): (&Path, Way),
    deadline: Instant,
) -> Result<Server> {
    let mut command = site.command(programs.join("godwit-disk"));
    command.arg("--image").arg(image);
    command.arg("--socket").arg(Path::new(RUN).join("disk"));
    command.arg("--memory").arg(Path::new(RUN).join("memory"));
    command.arg("--record").arg(site.record());
    command.args(way.options());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command
        .stderr(Stdio::null())
        .spawn()
        .context("godwit-disk does not start")?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let (input, output) = input.zip(output).context("godwit-disk has no pipes")?;
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let event = serde_json::from_str(&line).unwrap_or(Value::Null);
            if sender.send((Instant::now(), event)).is_err() {
                return;
            }
        }
    });
    let server = Server {
        child,
        control: Control::Ours(input, lines, way),
    };
    if let Control::Ours(_, lines, _) = &server.control {
        next(lines, deadline)?.context("godwit-disk serves nothing")?;
    }
    Ok(server)
}

/// The next line; none if it has not come before the deadline.
fn next(lines: &Receiver<(Instant, Value)>, deadline: Instant) -> Result<Option<(Instant, Value)>> {
    loop {
        go_on()?;
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left.min(Duration::from_millis(100))) {
            Ok(line) => return Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("godwit-disk has ended"),
        }
    }
}

fn move_ours(
    input: &mut ChildStdin,
    lines: &Receiver<(Instant, Value)>,
    (to, way): (&Path, Way),
    deadline: Instant,
) -> Result<Attempt> {
    let asked = Instant::now();
    writeln!(input, "{} {}", way.word(), to.display())?;
    let (mut switching, mut estimates, mut iterations) = (asked, Vec::new(), Vec::new());
    while let Some((at, event)) = next(lines, deadline)? {
        match event["event"].as_str() {
            Some("progress") => {
                let number = |name: &str| event[name].as_f64();
                let left = number("left").zip(number("total"));
                let part = left.map(|(left, total)| left / total.max(1.0));
                if let (Some(part), Some(eta_s)) = (part, number("eta_s")) {
                    estimates.push((at, part, eta_s));
                }
            }
            Some("switching") => switching = at,
            Some("iteration") => iterations.push((at, event)),
            Some("gave-up") => {
                let why = event["why"].as_str().unwrap_or("it gave up");
                return Ok(Attempt::GaveUp(why.to_owned(), iterations));
            }
            Some("moved") => {
                return Ok(Attempt::Moved(Box::new(Moved {
                    asked,
                    switching,
                    done: at,
                    estimates,
                    iterations,
                    report: event,
                })));
            }
            Some("failed") => bail!("{}", event["why"].as_str().unwrap_or("it failed")),
            _ => {}
        }
    }
    Ok(Attempt::CutOff)
}

/// An image as QEMU opens it: past the page cache.
fn file(image: &Path) -> Value {
    json!({
        "driver": "file", "filename": image, "aio": "io_uring",
        "cache": {"direct": true, "no-flush": false}, "discard": "unmap",
    })
}

/// The same, in raw format, under this name.
pub fn blockdev(name: &str, image: &Path) -> Value {
    json!({"driver": "raw", "node-name": name, "cache": {"direct": true, "no-flush": false}, "file": file(image)})
}

/// Which thread of QEMU's serves its disk; else its main one does. QEMU 10.0 with a thread for it does not outlive `blockdev-add`
/// under a load (`vhost_user_server_attach_aio_context: Assertion '!co_ctx || co_ctx == ctx' failed`), or hangs at
/// `blockdev-mirror`. Without a guest the main one has nothing else to do.
fn thread(system: System) -> Option<&'static str> {
    (!matches!(system, System::Ten(_))).then_some("thread")
}

fn export(thread: Option<&str>) -> Value {
    let mut export = json!({
        "type": "vhost-user-blk", "id": "export", "node-name": "disk", "writable": true,
        "addr": {"type": "unix", "path": Path::new(RUN).join("disk")},
    });
    if let Some(thread) = thread {
        export["iothread"] = thread.into();
    }
    export
}

fn daemon(site: &Site, image: &Path, mode: CopyMode, deadline: Instant) -> Result<Server> {
    let mut command = site.command("qemu-storage-daemon");
    command.args(["--object", "iothread,id=thread"]);
    command.args(["--blockdev", &blockdev("disk", image).to_string()]);
    command.arg("--chardev");
    command.arg(format!(
        "socket,id=monitor,path={MONITOR},server=on,wait=off"
    ));
    command.args(["--monitor", "chardev=monitor"]);
    by_qmp(site, command, thread(System::Daemon(mode)), mode, deadline)
}

/// Where `scripts/fetch-qemu10.sh` puts QEMU 10.0.
pub fn ten() -> Result<PathBuf> {
    Ok(target_dir()?.join("peers/qemu-10.0/qemu-system-x86_64"))
}

fn without_a_guest(
    site: &Site,
    mut command: MachineCommand,
    image: &Path,
    thread: Option<&str>,
    mode: CopyMode,
    deadline: Instant,
) -> Result<Server> {
    command.args(["-machine", "none", "-nodefaults", "-display", "none"]);
    command.args(["-object", "iothread,id=thread"]);
    command.args(["-blockdev", &blockdev("disk", image).to_string()]);
    command.arg("-chardev");
    command.arg(format!(
        "socket,id=monitor,path={MONITOR},server=on,wait=off"
    ));
    command.args(["-mon", "chardev=monitor,mode=control"]);
    by_qmp(site, command, thread, mode, deadline)
}

fn by_qmp(
    site: &Site,
    mut command: MachineCommand,
    thread: Option<&str>,
    mode: CopyMode,
    deadline: Instant,
) -> Result<Server> {
    let log = site.outside(&Path::new(RUN).join("qemu.log"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(File::create(&log)?);
    let mut child = command.spawn().context("QEMU does not start")?;
    let at = site.outside(Path::new(MONITOR));
    let qmp = Qmp::connect(&at, deadline).and_then(|mut qmp| {
        qmp.execute("block-export-add", export(thread), deadline)?;
        Ok(qmp)
    });
    match qmp {
        Ok(qmp) => Ok(Server {
            child,
            control: Control::Qemu(Box::new(qmp), mode, log),
        }),
        Err(error) => {
            let error = with_last_words(&error, &mut child, &log);
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

/// An error with how QEMU has ended, if it has, and the last that it wrote.
fn with_last_words(error: &anyhow::Error, child: &mut Child, log: &Path) -> anyhow::Error {
    // Its connection ends a moment before it does.
    let until = Instant::now() + Duration::from_secs(2);
    let ended = loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            ended => break ended.ok().flatten(),
        }
    };
    let ended = ended.map_or("it still runs".to_owned(), |status| status.to_string());
    let said = std::fs::read(log).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let said = said.lines().rev().find(|line| !line.trim().is_empty());
    anyhow!(
        "{error:#}; {ended}; it said last: {}",
        said.unwrap_or("nothing").trim()
    )
}

fn move_qemu(qmp: &mut Qmp, mode: CopyMode, to: &Path, deadline: Instant) -> Result<Attempt> {
    let asked = Instant::now();
    let soon = asked + SOON;
    qmp.execute("blockdev-add", blockdev("new", to), soon)?;
    let mut mirror = json!({
        "job-id": "mirror", "device": "disk", "target": "new", "sync": "full", "copy-mode": mode.word(),
    });
    if mode.granularity() != 0 {
        mirror["granularity"] = mode.granularity().into();
    }
    qmp.execute("blockdev-mirror", mirror, soon)?;
    if qmp.moment_of("BLOCK_JOB_READY", deadline)?.is_none() {
        return Ok(Attempt::CutOff);
    }
    let switching = Instant::now();
    qmp.execute("block-job-complete", json!({"device": "mirror"}), deadline)?;
    if qmp.moment_of("BLOCK_JOB_COMPLETED", deadline)?.is_none() {
        return Ok(Attempt::CutOff);
    }
    let done = Instant::now();
    let report = qmp.wait_event("BLOCK_JOB_COMPLETED", deadline)?;
    if let Some(error) = report["data"]["error"].as_str() {
        bail!("the mirror failed: {error}");
    }
    Ok(Attempt::Moved(Box::new(Moved {
        asked,
        switching,
        done,
        estimates: Vec::new(),
        iterations: Vec::new(),
        report: report["data"].clone(),
    })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_disk_of_qemu_10_is_served_by_its_main_thread() {
        let asked = |system| export(thread(system))["iothread"].clone();
        let mode = CopyMode::Background;
        assert_eq!(asked(System::Ten(mode)), Value::Null);
        assert_eq!(asked(System::Qemu(mode)), "thread");
        assert_eq!(asked(System::Daemon(mode)), "thread");
    }

    #[test]
    fn a_qemu_that_dies_is_told_with_its_end_and_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("qemu.log");
        let mut command = Command::new("sh");
        command.args(["-c", "echo first; echo last; exit 3"]);
        command.stdout(File::create(&log).unwrap());
        let mut child = command.spawn().unwrap();
        let told = with_last_words(&anyhow!("QEMU has ended"), &mut child, &log).to_string();
        assert_eq!(told, "QEMU has ended; exit status: 3; it said last: last");
    }
}
