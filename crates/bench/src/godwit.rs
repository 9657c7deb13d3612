//! One move by the product, from the command line of the controller's machine, watched from outside.
//!
//! The second control socket of each QEMU, which the product keeps for a successor of its VM process, is listened to for
//! the moments of STOP and RESUME; nothing is sent there but the greeting. Owns the VM that it made, and removes it.

use crate::bench::{Ended, MAX_DOWNTIME_MS, Moved, Run, unix_now};
use crate::courses::Beside;
use crate::guest::{Boot, CPU, MAC, Steps};
use crate::machine::warm_again;
use crate::memory::Memory;
use crate::plan::Guest;
use crate::stage::{SOON, Stage};
use crate::usage::Watch;
use anyhow::{Context as _, Result, bail, ensure};
use godwit_testkit::qmp::Qmp;
use godwit_testkit::stage::go_on;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between questions to the controller, which cost CPU that the migration could use.
const ASK_EVERY: Duration = Duration::from_secs(3);
/// Looks at a counter guest while it is moved.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A running VM of the product on host a.
pub struct Vm<'a> {
    stage: &'a Stage,
    name: String,
}

impl<'a> Vm<'a> {
    pub fn start(stage: &'a Stage, name: &str, run: &Run, boot: &Boot) -> Result<Self> {
        let mut text = format!(
            "name = \"{name}\"\nvcpus = {}\nmemory_mib = {}\nkernel = \"{}\"\naccelerator = \"tcg\"\ncpu = \"{CPU}\"\n",
            run.cell.vcpus,
            run.cell.ram_mib,
            boot.kernel.display()
        );
        if let Some(initramfs) = &boot.initramfs {
            let (initramfs, arguments) = (initramfs.display(), &boot.arguments);
            text.push_str(&format!(
                "initramfs = \"{initramfs}\"\ncmdline = \"{arguments}\"\n"
            ));
        }
        if boot.card {
            text.push_str(&format!("[[nic]]\nport_group = \"vm\"\nmac = \"{MAC}\"\n"));
        }
        let file = stage.dir().join(format!("{name}.toml"));
        std::fs::write(&file, text)?;
        stage.ok("controller", &["vm", "create", &file.to_string_lossy()])?;
        let vm = Self {
            stage,
            name: name.to_owned(),
        };
        stage.wait_for_room(run.cell.ram_mib)?;
        stage.ok("controller", &["vm", "start", name, "--on", "a"])?;
        Ok(vm)
    }

    /// Its RAM file on a host.
    pub(crate) fn ram(&self, host: &str) -> Result<PathBuf> {
        let prefix = format!("{}.", self.name);
        let dir = self.stage.inside(host, "/run/godwit/ram")?;
        newest(&dir, |name| name.starts_with(&prefix))
    }

    /// Where the control sockets of its QEMU on a host are.
    pub(crate) fn sockets(&self, host: &str) -> Result<PathBuf> {
        self.stage
            .inside(host, format!("/run/godwit/vms/{}/qemu", self.name))
    }

    pub(crate) fn monitor(&self, host: &str) -> Result<PathBuf> {
        newest(&self.sockets(host)?, is_spare_socket)
    }

    pub(crate) fn pause(&self) -> Result<()> {
        self.stage
            .run("controller", &["vm", "pause", &self.name])
            .map(drop)
    }

    /// Whether it runs on a host, as the product says.
    pub(crate) fn runs_on(&self, host: &str) -> Result<bool> {
        let vm = self.stage.json("controller", &["vm", "show", &self.name])?;
        Ok(vm["state"] == "running" && vm["host"] == host)
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        let off = || {
            let vm = self.stage.json("controller", &["vm", "show", &self.name])?;
            Ok(vm["state"] == "stopped")
        };
        // What does not go is ended with the lab.
        let _ = self
            .stage
            .run("controller", &["vm", "stop", &self.name, "--force"]);
        let _ = self.stage.until("the VM is off", SOON, off);
        let _ = self.stage.run("controller", &["vm", "delete", &self.name]);
    }
}

/// Moves one guest to host b.
pub fn run(stage: &Stage, run: &Run, encrypted: bool, prepared: bool) -> Result<Ended> {
    if prepared && !stage.prepares() {
        let why = "this build of godwit has no --prepare";
        return Ok(Ended::Skipped(why.into()));
    }
    let vm = Vm::start(stage, &run.name, run, run.boot)?;
    let source = retried(|| Memory::of_file(&vm.ram("a")?))?;
    let client = run.begin_guest(stage, &source)?;
    let mut monitor = Qmp::connect(&vm.monitor("a")?, Instant::now() + SOON)?;
    let mut steps = Steps::default();
    run.watch(&source, &mut steps)?;
    let first_touch = warm_again(run.cell.ram_mib)?;
    let watch = Watch::start(&[stage.machine("a")?, stage.machine("b")?])?;
    let sent = stage.sent_bytes("a")?;
    let arrival = Arrival::watch(vm.sockets("b")?, Instant::now() + run.limit);
    let mut beside = Beside::begin(stage, run);
    let began = unix_now();
    let begun = begin(stage, &vm, encrypted, prepared);
    let (id, arrival) = arrival.unless(begun)?;
    let mut each_look = || {
        if matches!(run.cell.guest, Guest::Counter { .. }) {
            steps.look(&source, unix_now());
        }
        beside.look(Some(&id))
    };
    let stopped = stopped(stage, &id, run, &mut monitor, &mut each_look);
    let (stop, arrival) = arrival
        .unless(stopped)
        .map_err(|error| why(stage, &id, error))?;
    let resume = arrival.moment();
    let usage = watch.end();
    let sent_after = stage.sent_bytes("a")?.into_iter();
    let sent: Vec<u64> = sent_after
        .zip(sent)
        .map(|(after, before)| after - before)
        .collect();
    let resume = resume.map_err(|error| why(stage, &id, error))?;
    let Some((stop, resume)) = stop.zip(resume) else {
        // The guest must be at rest before it is removed.
        let _ = stage.run("controller", &["migration", "cancel", &id]);
        return Ok(Ended::CutOff);
    };
    let destination = Memory::of_file(&vm.ram("b")?)?;
    run.watch(&destination, &mut steps)?;
    let report = finished(stage, &id)?;
    let memories = (&source, &destination);
    let (equal, checked, client) = run.check(client, (began, resume), memories, || vm.pause())?;
    let mut details = json!({
        "report": report, "sent_bytes_by_card": sent, "ram_checked": checked, "client": client,
    });
    beside.told(resume - began, &mut details);
    Ok(Ended::Moved(Box::new(Moved {
        began,
        stop,
        resume,
        prepare_s: report["prepare_s"].as_f64().unwrap_or(0.0),
        streams: report["streams"].as_u64().unwrap_or(0) as u32,
        usage,
        steps,
        first_touch,
        equal,
        guest_memory_counted: false,
        details,
    })))
}

pub(crate) fn begin(stage: &Stage, vm: &Vm, encrypted: bool, prepared: bool) -> Result<String> {
    let encryption = if encrypted { "required" } else { "disabled" };
    let downtime = MAX_DOWNTIME_MS.to_string();
    let mut command = vec!["vm", "migrate", &vm.name, "--to", "b", "--detach"];
    command.extend(["--encryption", encryption, "--max-downtime", &downtime]);
    if prepared {
        command.push("--prepare");
    }
    let begun = stage.json("controller", &command)?;
    Ok(begun["id"]
        .as_str()
        .context("no id of the migration")?
        .to_owned())
}

/// Waits on a thread for the destination's QEMU and its RESUME: a small guest is over there before the command that
/// moves it has returned, and events are not kept for who comes late.
pub(crate) struct Arrival {
    give_up: Arc<AtomicBool>,
    thread: JoinHandle<Result<Option<f64>>>,
}

impl Arrival {
    pub(crate) fn watch(sockets: PathBuf, limit: Instant) -> Self {
        let give_up = Arc::new(AtomicBool::new(false));
        let flag = give_up.clone();
        let thread = std::thread::spawn(move || {
            let wait_until = |most: Duration| limit.min(Instant::now() + most);
            let path = loop {
                match newest(&sockets, is_spare_socket) {
                    Ok(path) => break path,
                    Err(_) if flag.load(Ordering::Relaxed) || Instant::now() > limit => {
                        return Ok(None);
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            };
            let mut qmp = Qmp::connect(&path, limit)?;
            while !flag.load(Ordering::Relaxed) && Instant::now() < limit {
                if let Some(resume) = qmp.moment_of("RESUME", wait_until(LOOK_EVERY))? {
                    return Ok(Some(resume));
                }
            }
            Ok(None)
        });
        Self { give_up, thread }
    }

    pub(crate) fn moment(self) -> Result<Option<f64>> {
        let panicked = |_| anyhow::anyhow!("the watch over the destination panicked");
        self.thread.join().map_err(panicked)?
    }

    /// Goes on watching unless something has failed.
    pub(crate) fn unless<T>(self, done: Result<T>) -> Result<(T, Self)> {
        match done {
            Ok(value) => Ok((value, self)),
            Err(error) => {
                self.give_up();
                Err(error)
            }
        }
    }

    pub(crate) fn give_up(self) {
        self.give_up.store(true, Ordering::Relaxed);
        let _ = self.moment(); // nobody asks any more
    }
}

/// The moment of STOP; none when the limit passes first.
fn stopped(
    stage: &Stage,
    id: &str,
    run: &Run,
    source: &mut Qmp,
    each_look: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<f64>> {
    let limit = Instant::now() + run.limit;
    let mut next_question = Instant::now() + ASK_EVERY;
    while Instant::now() < limit {
        go_on()?;
        if let Some(stop) = source.moment_of("STOP", Instant::now() + LOOK_EVERY)? {
            return Ok(Some(stop));
        }
        each_look()?;
        if Instant::now() > next_question {
            next_question = Instant::now() + ASK_EVERY;
            let report = stage.json("controller", &["migration", "show", id])?;
            ensure!(
                report["outcome"].is_null(),
                "the migration ended before the guest was stopped"
            );
        }
    }
    Ok(None)
}

/// What the product itself says of a migration that went wrong.
pub(crate) fn why(stage: &Stage, id: &str, error: anyhow::Error) -> anyhow::Error {
    let report = stage.json("controller", &["migration", "show", id]);
    let reason = report
        .ok()
        .and_then(|report| Some(report["reason"].as_str()?.to_owned()));
    match reason {
        Some(reason) => error.context(reason),
        None => error,
    }
}

pub(crate) fn finished(stage: &Stage, id: &str) -> Result<Value> {
    let show = ["migration", "show", id];
    stage.until("the migration has ended", SOON, || {
        Ok(!stage.json("controller", &show)?["outcome"].is_null())
    })?;
    let report = stage.json("controller", &show)?;
    if report["outcome"] != "completed" {
        bail!(
            "{}",
            report["reason"].as_str().unwrap_or("it did not complete")
        );
    }
    Ok(report)
}

pub(crate) fn retried<T>(action: impl Fn() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + SOON;
    loop {
        go_on()?;
        match action() {
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
            done => return done,
        }
    }
}

/// The product names them after the launch and their number.
fn is_spare_socket(name: &str) -> bool {
    name.ends_with("-1.qmp")
}

/// The entry of a directory that was made last.
fn newest(dir: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(dir)
        .with_context(|| format!("cannot list {}", dir.display()))?
        .flatten()
        .filter(|entry| wanted(&entry.file_name().to_string_lossy()))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    found.sort();
    let last = found.pop();
    Ok(last
        .with_context(|| format!("nothing in {} yet", dir.display()))?
        .1)
}
