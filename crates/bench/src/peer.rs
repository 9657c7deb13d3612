//! One move by QEMU's own migration, between the same hosts, over the same addresses, of the same guest.
//!
//! The destination runs the guest by itself as soon as it can (no `-S`), bandwidth is unlimited, the downtime limit is
//! ours. Owns both processes and ends them.

use crate::bench::{Ended, MAX_DOWNTIME_MS, Moved, Run, unix_now};
use crate::courses::Beside;
use crate::guest::{self, Boot, CPU, MAC, Spins, Steps};
use crate::machine::warm_again;
use crate::memory::Memory;
use crate::plan::{Cell, Guest};
use crate::stage::{PEER_RAM, SOON, Stage};
use crate::system::{Backend, Version, Way};
use crate::usage::Watch;
use anyhow::{Context as _, Result, bail};
use godwit_testkit::qmp::Qmp;
use godwit_testkit::stage::go_on;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const PORT: u16 = 4444;
/// Far beyond any link here; QEMU has no word for "unlimited" in all its versions.
const BYTES_PER_S: u64 = 100 << 30;
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Clone)]
pub struct Programs {
    pub seven: PathBuf,
    /// QEMU 10.0, or why it is not there.
    pub ten: Result<PathBuf, String>,
    pub tls: PathBuf,
}

impl Programs {
    pub fn find(target: &Path, tls: &Path) -> Self {
        let ten = target.join("peers/qemu-10.0/qemu-system-x86_64");
        let missing = || "QEMU 10.0 is not here, fetch it with: scripts/fetch-qemu10.sh".to_owned();
        Self {
            seven: "/usr/bin/qemu-system-x86_64".into(),
            ten: if ten.exists() {
                Ok(ten)
            } else {
                Err(missing())
            },
            tls: tls.to_owned(),
        }
    }

    pub fn of(&self, version: Version) -> Result<&Path, String> {
        match version {
            Version::Seven => Ok(&self.seven),
            Version::Ten => self.ten.as_deref().map_err(Clone::clone),
        }
    }
}

struct Qemu {
    child: Child,
    qmp: Qmp,
    /// Seconds from the start of the process to its first answer.
    ready_s: f64,
}

impl Qemu {
    fn ask(&mut self, command: &str) -> Result<Value> {
        self.qmp.execute(command, json!({}), Instant::now() + SOON)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended by itself otherwise
        let _ = self.child.wait();
    }
}

/// What one side is started with.
struct Side<'a> {
    stage: &'a Stage,
    run: &'a Run<'a>,
    programs: &'a Programs,
    way: Way,
    host: &'static str,
}

impl Side<'_> {
    fn incoming(&self) -> bool {
        self.host == "b"
    }

    fn start(&self) -> Result<Qemu> {
        let program = self
            .programs
            .of(self.way.version)
            .map_err(anyhow::Error::msg)?;
        let socket = format!("{PEER_RAM}/{}.qmp", self.run.name);
        let arguments = self.arguments(&socket);
        let log = self.stage.dir().join(format!("qemu-{}.log", self.host));
        let log = std::fs::File::create(log)?;
        let began = Instant::now();
        let mut command = self.stage.command(self.host, program)?;
        command.args(&arguments).stdin(Stdio::null());
        let mut child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        let path = self.stage.inside(self.host, &socket)?;
        match Qmp::connect(&path, Instant::now() + SOON) {
            Ok(qmp) => Ok(Qemu {
                child,
                qmp,
                ready_s: began.elapsed().as_secs_f64(),
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                let said = std::fs::read_to_string(
                    self.stage.dir().join(format!("qemu-{}.log", self.host)),
                );
                Err(error.context(said.unwrap_or_default().trim().to_owned()))
            }
        }
    }

    fn arguments(&self, socket: &str) -> Vec<String> {
        let (cell, boot) = (self.run.cell, self.run.boot);
        let fixed = "-nodefaults -no-user-config -display none -vga none";
        let mut line: Vec<String> = fixed.split(' ').map(String::from).collect();
        let mut pair = |option: &str, value: String| line.extend([option.to_owned(), value]);
        pair("-name", format!("guest={},debug-threads=on", self.run.name));
        pair(
            "-machine",
            "q35,accel=tcg,memory-backend=ram0,dump-guest-core=off".into(),
        );
        pair("-cpu", CPU.into());
        // As ours: with room for one vCPU only, an emulated guest loses notifications (`godwit_qemu::command_line`).
        pair(
            "-smp",
            format!("{},maxcpus={}", cell.vcpus, cell.vcpus.max(2)),
        );
        pair("-m", format!("{}M", cell.ram_mib));
        pair("-object", self.memory_object());
        pair("-qmp", format!("unix:{socket},server=on,wait=off"));
        pair("-kernel", boot.kernel.display().to_string());
        if let Some(initramfs) = &boot.initramfs {
            pair("-initrd", initramfs.display().to_string());
            pair("-append", boot.arguments.clone());
        }
        if boot.card {
            pair(
                "-netdev",
                "tap,id=net0,ifname=peer0,script=no,downscript=no,vhost=off".into(),
            );
            pair(
                "-device",
                format!("virtio-net-pci,id=nic0,netdev=net0,mac={MAC},romfile="),
            );
        }
        if self.way.tls {
            let end = if self.incoming() { "server" } else { "client" };
            let dir = self.programs.tls.display();
            pair(
                "-object",
                format!("tls-creds-x509,id=tls0,dir={dir},endpoint={end},verify-peer=on"),
            );
        }
        if self.incoming() {
            pair("-incoming", "defer".into());
        }
        line
    }

    fn memory_object(&self) -> String {
        let mib = self.run.cell.ram_mib;
        let mut object = match self.way.backend {
            Backend::File => format!(
                "memory-backend-file,id=ram0,size={mib}M,share=on,align=2M,mem-path={}",
                self.ram_path()
            ),
            Backend::Anonymous => format!("memory-backend-ram,id=ram0,size={mib}M"),
        };
        if self.incoming() && self.way.prepared {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            object.push_str(&format!(",prealloc=on,prealloc-threads={threads}"));
        }
        object
    }

    fn ram_path(&self) -> String {
        format!("{PEER_RAM}/{}.ram", self.run.name)
    }

    fn memory(&self, qemu: &mut Qemu) -> Result<Memory> {
        match self.way.backend {
            Backend::File => Memory::of_file(&self.stage.inside(self.host, self.ram_path())?),
            Backend::Anonymous => {
                let said = qemu.qmp.human("gpa2hva 0", Instant::now() + SOON)?;
                let address = said.split("is 0x").nth(1).map(str::trim);
                let address = address.and_then(|text| u64::from_str_radix(text, 16).ok());
                let address =
                    address.with_context(|| format!("QEMU said of its memory: {said}"))?;
                let bytes = u64::from(self.run.cell.ram_mib) << 20;
                Memory::of_process(qemu.child.id(), address, bytes)
            }
        }
    }

    /// Capabilities and parameters, the same on both sides.
    fn set_up(&self, qemu: &mut Qemu) -> Result<()> {
        let deadline = Instant::now() + SOON;
        let capability = |name: &str| json!({"capability": name, "state": true});
        let mut capabilities = vec![capability("events")];
        let mut parameters = json!({
            "max-bandwidth": BYTES_PER_S,
            "downtime-limit": MAX_DOWNTIME_MS,
            "announce-initial": 50,
        });
        if let Some(channels) = self.way.channels {
            capabilities.push(capability("multifd"));
            parameters["multifd-channels"] = json!(channels);
        }
        if self.way.converge {
            capabilities.push(capability("auto-converge"));
        }
        if self.way.tls {
            parameters["tls-creds"] = json!("tls0");
            if !self.incoming() {
                parameters["tls-hostname"] = json!(crate::tls::HOST_NAME);
            }
        }
        let capabilities = json!({"capabilities": capabilities});
        qemu.qmp
            .execute("migrate-set-capabilities", capabilities, deadline)?;
        qemu.qmp
            .execute("migrate-set-parameters", parameters, deadline)?;
        Ok(())
    }

    /// Lets this side, the destination, wait on its migration address, and the source begin.
    fn begin_move(&self, destination: &mut Qemu, source: &mut Qemu) -> Result<()> {
        self.set_up(destination)?;
        let address = self.stage.address(1);
        let host = if address.contains(':') {
            format!("[{address}]")
        } else {
            address
        };
        let uri = json!({"uri": format!("tcp:{host}:{PORT}")});
        let deadline = Instant::now() + SOON;
        destination
            .qmp
            .execute("migrate-incoming", uri.clone(), deadline)?;
        source.qmp.execute("migrate", uri, deadline)?;
        Ok(())
    }

    /// Files of earlier runs, and the guest's network card.
    fn clean(&self) -> Result<()> {
        let card = if self.run.boot.card {
            "ip link del peer0 2>/dev/null; ip tuntap add peer0 mode tap && ip link set peer0 master vmbr0 up"
        } else {
            "true"
        };
        let script = format!("rm -f {PEER_RAM}/*; {card}");
        self.stage.shell(self.host, &script)
    }
}

/// Seconds from the start of a QEMU with nothing to allocate to its first answer: what is not preparation.
pub fn bare_start_s(stage: &Stage, run: &Run, programs: &Programs, way: Way) -> Result<f64> {
    let bare = Way {
        prepared: false,
        ..way
    };
    let side = Side {
        stage,
        run,
        programs,
        way: bare,
        host: "b",
    };
    let mut times = Vec::new();
    for _ in 0..3 {
        side.clean()?;
        times.push(side.start()?.ready_s);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[1])
}

/// How fast the counter guest steps here, by running it twice on host a.
pub fn measure_spins(stage: &Stage, programs: &Programs, dir: &Path) -> Result<Spins> {
    const TURNS: u32 = 2_000;
    let rate = |spins: Spins, mib_per_s: Option<f64>| -> Result<f64> {
        let guest = Guest::Counter {
            mib: 64,
            mib_per_s,
            reader: false,
        };
        let cell = Cell::alone(guest);
        let boot = Boot::make(&guest, dir, &spins)?;
        let run = Run {
            cell: &cell,
            boot: &boot,
            name: "spins".into(),
            limit: SOON,
            seed: 1,
        };
        let way = Way {
            version: Version::Seven,
            channels: None,
            tls: false,
            backend: Backend::File,
            prepared: false,
            converge: false,
        };
        let side = Side {
            stage,
            run: &run,
            programs,
            way,
            host: "a",
        };
        side.clean()?;
        let mut qemu = side.start()?;
        let memory = side.memory(&mut qemu)?;
        guest::get_ready(&guest, &memory, 1)?;
        let mut steps = Steps::default();
        run.watch(&memory, &mut steps)?;
        steps
            .rate(0.0, unix_now())
            .context("the counter guest was not seen to step")
    };
    let fast = rate(Spins::default(), None)?;
    // With a page that costs nothing and turns of a second, a rate of r MiB a second is 1 / (256 r) turns.
    let unit = Spins {
        page_s: 0.0,
        turn_s: 1.0 / (256.0 * f64::from(TURNS)),
    };
    let slow = rate(unit, Some(1.0))?;
    Ok(Spins::from_rates(fast, slow, TURNS))
}

/// Moves one guest to host b.
pub fn run(stage: &Stage, run: &Run, programs: &Programs, way: Way, bare_s: f64) -> Result<Ended> {
    let ended = moved(stage, run, programs, way, bare_s);
    // QEMU leaves the files of its guest memory behind; no later run may have less room for them.
    for host in ["a", "b"] {
        stage.shell(host, &format!("rm -f {PEER_RAM}/*"))?;
    }
    ended
}

fn moved(stage: &Stage, run: &Run, programs: &Programs, way: Way, bare_s: f64) -> Result<Ended> {
    if let Err(why) = programs.of(way.version) {
        return Ok(Ended::Skipped(why));
    }
    let side = |host| Side {
        stage,
        run,
        programs,
        way,
        host,
    };
    let (from, to) = (side("a"), side("b"));
    from.clean()?;
    to.clean()?;
    let mut source = from.start()?;
    let memory = from.memory(&mut source)?;
    let client = run.begin_guest(stage, &memory)?;
    from.set_up(&mut source)?;
    let mut steps = Steps::default();
    run.watch(&memory, &mut steps)?;
    source.qmp.forget_events();
    let first_touch = warm_again(run.cell.ram_mib)?;
    let watch = Watch::of_qemu(&[stage.machine("a")?, stage.machine("b")?])?;
    let mut beside = Beside::begin(stage, run);
    let began = unix_now();
    let mut destination = to.start()?;
    to.begin_move(&mut destination, &mut source)?;
    let mut each_look = || {
        if matches!(run.cell.guest, Guest::Counter { .. }) {
            steps.look(&memory, unix_now());
        }
        beside.look(None)
    };
    let moments = follow(run, &mut source, &mut destination, &mut each_look);
    let usage = watch.end();
    let Some((stop, resume)) = moments? else {
        return Ok(Ended::CutOff);
    };
    let received = to.memory(&mut destination)?;
    run.watch(&received, &mut steps)?;
    let parameters = source.ask("query-migrate-parameters")?;
    let memories = (&memory, &received);
    let stopped = || destination.ask("stop").map(drop);
    let (equal, checked, client) = run.check(client, (began, resume), memories, stopped)?;
    let mut details = json!({
        "parameters": parameters, "report": source.ask("query-migrate")?, "ram_checked": checked, "client": client,
        "destination_ready_s": destination.ready_s,
    });
    beside.told(resume - began, &mut details);
    let prepare_s = (destination.ready_s - bare_s).max(0.0);
    Ok(Ended::Moved(Box::new(Moved {
        began,
        stop,
        resume,
        prepare_s: if way.prepared { prepare_s } else { 0.0 },
        streams: way.channels.unwrap_or(1),
        usage,
        steps,
        first_touch,
        equal,
        guest_memory_counted: way.backend == Backend::Anonymous,
        details,
    })))
}

/// The moments of STOP and RESUME; none when the limit passes first.
fn follow(
    run: &Run,
    source: &mut Qemu,
    destination: &mut Qemu,
    each_look: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<(f64, f64)>> {
    let limit = Instant::now() + run.limit;
    let mut next_question = Instant::now() + Duration::from_secs(3);
    let stop = loop {
        go_on()?;
        if let Some(stop) = source.qmp.moment_of("STOP", Instant::now() + LOOK_EVERY)? {
            break stop;
        }
        each_look()?;
        if Instant::now() > next_question {
            next_question = Instant::now() + Duration::from_secs(3);
            let state = source.ask("query-migrate")?;
            if state["status"] == "failed" {
                bail!(
                    "QEMU says: {}",
                    state["error-desc"].as_str().unwrap_or("failed")
                );
            }
        }
        if Instant::now() > limit {
            return Ok(None);
        }
    };
    let resume = destination.qmp.moment_of("RESUME", limit)?;
    Ok(resume.map(|resume| (stop, resume)))
}
