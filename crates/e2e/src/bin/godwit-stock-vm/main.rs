//! Two whole Debians in emulated machines, each with a kernel and a KVM of its own: the package, and a Linux guest under KVM
//! that moves between them. See `--help`.
//!
//! Owns the machines and their directory. Refuses nothing quietly: what could not be shown is in the list, with why.

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use godwit_e2e::person::emulated::{Emulated, Plan, SHELL};
use godwit_e2e::person::{Host, Transcript, readme, way};
use godwit_testkit::guest::cpio::Archive;
use godwit_testkit::guest::linux::target_dir;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Longest time for a command inside, or for what it sets going.
const PATIENCE: Duration = Duration::from_secs(300);
/// Finds the QEMU that runs the guest.
const QEMU: &str =
    "q=$(for p in $(pgrep qemu-system); do grep -q /ram/ /proc/$p/cmdline && echo $p; done)";

/// Finds its VM process.
const VM_PROCESS: &str = "pgrep -f '^[^ ]*godwit vm-process' | head -n 1";
/// Where the guest's processes live.
const GROUP: &str = "/sys/fs/cgroup/godwit.slice/godwit-vm-web.scope/vm";
/// Waits until a vCPU has a quota, has systemd read its units again, and tells what was left of the quotas.
const RELOAD: &str = "i=0; while [ $i -lt 1200 ]; do
 cat $s/godwit-throttle-*/cpu.max 2>/dev/null | grep -v '^max' >/tmp/quotas && break; i=$((i+1)); sleep 0.1; done
 echo before $(cat /tmp/quotas); systemctl daemon-reload
 echo after $(cat $s/godwit-throttle-*/cpu.max 2>/dev/null), $(cat $s/cgroup.controllers 2>/dev/null)";

/// Boots Debian 12 and Debian 13 in emulated machines and shows that a KVM guest moves between their kernels.
///
/// Needs the images of scripts/debian-images.sh machines and the package of scripts/deb.sh. Prints a list: what was shown and
/// what was not. No time from here says anything about real hardware.
#[derive(Parser)]
struct Arguments {
    /// The package
    #[arg(long)]
    package: PathBuf,
    /// Image directory of the first machine, then of the second
    #[arg(long, num_args = 1.., required = true)]
    image: Vec<PathBuf>,
    /// Memory of each machine, MiB
    #[arg(long, default_value_t = 2560)]
    memory_mib: u32,
    /// CPU model in the VM's description; the README's unless given
    #[arg(long)]
    cpu: Option<String>,
}

struct Site {
    a: Host<Emulated>,
    b: Host<Emulated>,
    list: Vec<(String, Result<String>)>,
    began: Instant,
}

fn main() -> ExitCode {
    let done = run(&Arguments::parse());
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("godwit-stock-vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let mut site = switch_on(arguments)?;
    site.install_from_nothing();
    site.guest(arguments);
    site.moves();
    site.small_pages();
    site.processes();
    site.reboots();
    println!("\n{:<10} what", "");
    for (what, shown) in &site.list {
        match shown {
            Ok(note) => println!("shown      {what}{note}"),
            Err(error) => println!("NOT SHOWN  {what}: {error:#}"),
        }
    }
    let missing = site.list.iter().filter(|(_, shown)| shown.is_err()).count();
    println!(
        "{} shown, {missing} not shown, {} s",
        site.list.len() - missing,
        site.began.elapsed().as_secs()
    );
    Ok(missing == 0)
}

/// What both machines find on their second disk.
fn payload(dir: &Path, package: &Path) -> Result<PathBuf> {
    let payload = dir.join("payload");
    std::fs::create_dir_all(&payload)?;
    std::fs::copy(package, payload.join("godwit.deb"))?;
    std::fs::write(payload.join("shell.sh"), SHELL)?;
    let kernel = target_dir()?.join("guests/linux/vmlinuz");
    std::fs::copy(kernel, payload.join("vmlinuz"))
        .context("the guest's kernel; 'make guests' fetches it")?;
    let program = dir.join("checker");
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/src/guest/memory_checker.c");
    let compiled = Command::new("gcc")
        .args(["-O2", "-static", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .status()?;
    ensure!(compiled.success(), "gcc did not make the guest's checker");
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, &std::fs::read(program)?);
    std::fs::write(payload.join("initrd"), archive.finish())?;
    let tar = dir.join("payload.tar");
    let packed = Command::new("tar")
        .arg("cf")
        .arg(&tar)
        .args(["-b", "2048", "-C"])
        .arg(&payload)
        .arg(".")
        .status()?;
    ensure!(packed.success(), "tar did not pack the payload");
    Ok(tar)
}

fn switch_on(arguments: &Arguments) -> Result<Site> {
    let began = Instant::now();
    let dir = target_dir()?.join("debian/machines");
    if dir.exists() {
        std::fs::remove_dir_all(&dir)?;
    }
    std::fs::create_dir_all(&dir)?;
    let transcript = Transcript::new(&dir.join("transcript.txt"))?;
    let payload = payload(&dir, &arguments.package)?;
    let segment = dir.join("segment");
    let first = arguments.image.first().context("no image")?;
    let second = arguments.image.get(1).unwrap_or(first);
    let on = |number: u8, image: &Path, name: &str| {
        let plan = Plan {
            image,
            payload: &payload,
            segment: &segment,
            number,
            memory_mib: arguments.memory_mib,
        };
        Emulated::power_on(&plan, &dir.join(name))
    };
    let mut a = on(1, first, "a")?;
    while !segment.exists() {
        ensure!(
            began.elapsed() < PATIENCE,
            "the first machine has no network"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut b = on(2, second, "b")?;
    a.wait_up()?;
    b.wait_up()?;
    let host = |name: &str, machine| Host::new(name, machine, &transcript, PATIENCE);
    let site = Site {
        a: host("a", a),
        b: host("b", b),
        list: Vec::new(),
        began,
    };
    for (host, number) in [(&site.a, 1), (&site.b, 2)] {
        prepare(host, number)?;
    }
    Ok(site)
}

/// What a person's host has before: a network, a bridge, images.
fn prepare(host: &Host<Emulated>, number: u8) -> Result<()> {
    let script = format!(
        "i=$(ls /sys/class/net | grep -v -e lo -e vmbr0 | head -n 1); hostname {name}; modprobe kvm_amd
         ip link add vmbr0 type bridge; ip link set $i master vmbr0; ip link set $i up; ip link set vmbr0 up
         ip addr add 10.0.0.{number}/24 dev vmbr0; ip addr add 10.1.0.{number}/24 dev vmbr0
         cp /payload/godwit.deb /root/; cp /payload/vmlinuz /payload/initrd /srv/images/; chmod 644 /srv/images/*",
        name = host.name
    );
    host.value(&script)?;
    host.ok("grep PRETTY /etc/os-release; uname -r; qemu-system-x86_64 --version | head -n 1; ls -l /dev/kvm; findmnt -n -o OPTIONS /run; cat /sys/fs/cgroup/cgroup.controllers")
        .map(drop)
}

impl Site {
    /// Does something and writes down whether it was shown.
    fn show(&mut self, what: &str, act: impl FnOnce(&Self) -> Result<String>) -> bool {
        let shown = act(self);
        let at = self.began.elapsed().as_secs();
        match &shown {
            Ok(note) => println!("[{at:>5} s] shown: {what}{note}"),
            Err(error) => println!("[{at:>5} s] NOT SHOWN: {what}: {error:#}"),
        }
        let fine = shown.is_ok();
        self.list.push((what.to_owned(), shown));
        fine
    }

    fn install_from_nothing(&mut self) {
        self.show("two Debians, each with a kernel, cgroup v2 and KVM of its own, /run noexec", |site| {
            let mut note = String::new();
            for host in [&site.a, &site.b] {
                let seen = host.value("uname -r; test -c /dev/kvm && stat -fc %T /sys/fs/cgroup; findmnt -n -o OPTIONS /run")?;
                ensure!(seen.contains("cgroup2fs") && seen.contains("noexec"), "{seen}");
                note += &format!(" ({}: Linux {})", host.name, seen.lines().next().unwrap_or_default());
            }
            Ok(note)
        });
        self.show("the package is installed from nothing", |site| {
            way::install(&site.a)?;
            way::install(&site.b).map(|()| String::new())
        });
        self.show("set up by the README's commands", |site| {
            way::set_up([&site.a, &site.b]).map(|()| String::new())
        });
    }

    fn guest(&mut self, arguments: &Arguments) {
        let cpu = arguments.cpu.clone();
        self.show("a Linux guest with two vCPUs runs under KVM", |site| {
            let text = readme::with(&readme::description()?, "memory_mib", "192");
            let text = readme::with(
                &text,
                "cmdline",
                "\"console=ttyS0 quiet panic=-1 rest_us=50000\"",
            );
            let text = match cpu {
                Some(cpu) => readme::with(&text, "cpu", &format!("\"{cpu}\"")),
                None => text,
            };
            site.a.ok(&format!("cat >web.toml <<'E'\n{text}E\n"))?;
            site.a.ok(&readme::commands()?.create)?;
            let said = site.checks()?;
            ensure!(said.contains("on 2 processors"), "{said}");
            let host = site.holder()?;
            let line = host.value(&format!("{QEMU}; tr '\\0' ' ' </proc/$q/cmdline"))?;
            ensure!(
                line.contains("-accel kvm") || line.contains("accel=kvm"),
                "{line}"
            );
            Ok(format!(" ({} steps)", steps(&said)?))
        });
        self.show("it has a scope of its own with a cpu controller", |site| {
            let host = site.holder()?;
            let group = host.value(&format!("{QEMU}; sed -n 's/^0:://p' /proc/$q/cgroup"))?;
            ensure!(
                group.starts_with("/godwit.slice/godwit-vm-web.scope"),
                "its group is {group}"
            );
            let controllers = host.value(&format!("cat {GROUP}/cgroup.controllers"))?;
            let has = |name: &str| controllers.split_whitespace().any(|word| word == name);
            ensure!(has("cpu") && has("memory"), "{group} has {controllers}");
            Ok(format!(" ({group}: {controllers})"))
        });
        self.show("its memory is bounded, and QEMU is ended before its VM process", |site| {
            let script = format!("{QEMU}; cat {GROUP}/memory.max /proc/$q/oom_score_adj /proc/$({VM_PROCESS})/oom_score_adj");
            let said = site.holder()?.value(&script)?;
            let words: Vec<&str> = said.split_whitespace().collect();
            let [limit, "0", "-500"] = words[..] else {
                anyhow::bail!("memory.max, score of QEMU, score of the VM process: {said}");
            };
            let bytes: u64 = limit.parse().context("memory.max is no number")?;
                ensure!((192 << 20..4 << 30).contains(&bytes), "memory.max is {limit}");
                Ok(format!(" (memory.max {limit}, scores 0 and -500)"))
        });
        self.show("its memory is in huge pages", |site| {
            let huge = site.huge_kib()?;
            ensure!(huge > 0, "no huge page");
            Ok(format!(" ({huge} KiB)"))
        });
    }

    /// The host that the guest runs on.
    fn holder(&self) -> Result<&Host<Emulated>> {
        let shown = self.vm()?;
        match shown["host"].as_str() {
            Some("a") => Ok(&self.a),
            Some("b") => Ok(&self.b),
            _ => anyhow::bail!("nobody runs it; it is {}", shown["state"]),
        }
    }

    fn vm(&self) -> Result<serde_json::Value> {
        Ok(serde_json::from_str(
            &self.a.value("godwit vm show web --json")?,
        )?)
    }

    fn huge_kib(&self) -> Result<u64> {
        let script = format!("{QEMU}; awk '/ShmemPmdMapped/ {{ print $2 }}' /proc/$q/smaps_rollup");
        Ok(self.holder()?.value(&script)?.parse()?)
    }

    /// Waits until the guest has said more and gives its console: no page may ever have been wrong.
    fn checks(&self) -> Result<String> {
        let console = "godwit vm console web";
        let before = self
            .a
            .machine_text(console)
            .map_or(0, |said| steps(&said).unwrap_or(0));
        let ran = self
            .a
            .until("the guest checks its memory", console, |ran| {
                steps(&ran.stdout).is_ok_and(|now| now > 0 && now != before)
            })?;
        let numbers = ran.stdout.lines().filter_map(wrong);
        let bad: Vec<u64> = numbers.filter(|number| *number > 0).collect();
        ensure!(bad.is_empty(), "the guest found wrong pages: {bad:?}");
        Ok(ran.stdout)
    }

    /// Moves the guest to the other host; gives what the report says.
    fn move_over(&self) -> Result<(String, serde_json::Value)> {
        let from = self.holder()?.name.clone();
        let to = if from == "a" { "b" } else { "a" };
        let before = steps(&self.checks()?)?;
        way::migrate(&self.a, "web", to)?;
        let after = steps(&self.checks()?)?;
        ensure!(
            after > before,
            "the guest began anew: {before} steps, then {after}"
        );
        let list: serde_json::Value =
            serde_json::from_str(&self.a.value("godwit migration list --json")?)?;
        let ids = list
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|row| row["id"].as_str());
        let newest = ids.map(str::to_owned).collect::<Vec<_>>();
        let mut report = serde_json::Value::Null;
        for id in newest {
            let text = self
                .a
                .value(&format!("godwit migration show {id} --json"))?;
            let one: serde_json::Value = serde_json::from_str(&text)?;
            if one["to"] == to || one["destination"] == to {
                report = one;
            }
        }
        ensure!(
            !report.to_string().contains("could not be slowed"),
            "{report}"
        );
        Ok((
            format!(" ({from} to {to}, {before} then {after} steps, none wrong)"),
            report,
        ))
    }

    fn moves(&mut self) {
        for way in ["there", "and back", "there once more"] {
            let what =
                format!("the guest moves between two kernels and two QEMUs, encrypted, {way}");
            self.show(&what, |site| site.move_over().map(|(note, _)| note));
        }
        self.show(
            "systemd reads its units again while the guest is slowed, and the move completes",
            Self::reload_while_slowed,
        );
        self.show("a move is cancelled and the guest stays", |site| {
            let from = site.holder()?.name.clone();
            let to = if from == "a" { "b" } else { "a" };
            let before = steps(&site.checks()?)?;
            site.a.value(&format!("godwit vm migrate web --to {to} --max-bandwidth 8 >/tmp/cancelled 2>&1 & sleep 1; until godwit migration list --json | grep -q '\"m-.*' ; do sleep 1; done"))?;
            site.a.ok("godwit migration list")?;
            let id = site.a.value("godwit migration list --json | grep -o '\"m-[0-9a-f]*\"' | tr -d '\"' | while read m; do godwit migration cancel $m >/dev/null 2>&1 && echo $m; done | tail -n 1")?;
            ensure!(!id.is_empty(), "no migration could be cancelled");
            site.a.until("the cancelled move has ended", "pgrep -f 'vm migrate web' | wc -l; cat /tmp/cancelled", |ran| ran.stdout.contains("cancel"))?;
            ensure!(site.holder()?.name == from, "the guest has left");
            let after = steps(&site.checks()?)?;
            ensure!(after > before, "{before} steps, then {after}");
            Ok(format!(" ({id}, {before} then {after} steps)"))
        });
    }

    fn reload_while_slowed(&self) -> Result<String> {
        let from = self.holder()?;
        let to = if from.name == "a" { "b" } else { "a" };
        let before = steps(&self.checks()?)?;
        self.a.value(&format!(
            "(godwit vm migrate web --to {to}; echo ended $?) >/tmp/reloaded 2>&1 </dev/null &"
        ))?;
        let said = from.ok(&format!("s={GROUP}; {RELOAD}"))?;
        let ended = self
            .a
            .until("the move has ended", "cat /tmp/reloaded", |ran| {
                ran.stdout.contains("ended ")
            })?;
        ensure!(ended.stdout.contains("ended 0"), "{said}{}", ended.stdout);
        let first = said.lines().find_map(|line| line.strip_prefix("before "));
        let slowed = first.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        ensure!(slowed, "the guest was not slowed: {said}");
        ensure!(self.holder()?.name == to, "it did not leave {}", from.name);
        let after = steps(&self.checks()?)?;
        ensure!(after > before, "{before} steps, then {after}");
        Ok(format!(
            " ({}; {before} then {after} steps)",
            said.trim().replace('\n', "; ")
        ))
    }

    fn small_pages(&mut self) {
        self.show("the same with small pages", |site| {
            for host in [&site.a, &site.b] {
                host.value("mount -o remount,huge=never /run/godwit/ram")?;
            }
            site.a.ok("godwit vm stop web --force")?;
            site.a
                .until("it is off", "godwit vm show web --json", |ran| {
                    ran.stdout.contains("\"stopped\"")
                })?;
            site.a.ok("godwit vm start web --on a")?;
            site.checks()?;
            ensure!(site.huge_kib()? == 0, "it has huge pages");
            let (there, _) = site.move_over()?;
            let (back, _) = site.move_over()?;
            Ok(format!("{there}{back}"))
        });
    }

    fn processes(&mut self) {
        self.show("its VM process is killed and the guest goes on", |site| {
            let host = site.holder()?;
            let before = steps(&site.checks()?)?;
            let qemu = host.value(&format!("{QEMU}; echo $q"))?;
            let killed = host.value(&format!("p=$({VM_PROCESS}); kill -9 $p; echo $p"))?;
            host.until(
                "another VM process runs",
                "pgrep -f '^[^ ]*godwit vm-process'",
                |ran| ran.code == Some(0) && !ran.stdout.lines().any(|pid| pid == killed),
            )?;
            ensure!(
                host.value(&format!("{QEMU}; echo $q"))? == qemu,
                "another QEMU"
            );
            let after = steps(&site.checks()?)?;
            ensure!(after > before, "{before} steps, then {after}");
            let joined = host.value(&format!("sed -n 's/^0:://p' /proc/$({VM_PROCESS})/cgroup"))?;
            ensure!(GROUP.ends_with(&joined), "the successor is in {joined}");
            Ok(format!(
                " ({before} then {after} steps; the successor in {joined})"
            ))
        });
        self.show("agents restart and leave nothing over", |site| {
            for host in [&site.a, &site.b] {
                let cursor = "journalctl -n 0 --show-cursor --no-pager | sed -n 's/^-- cursor: //p'";
                let left = host.value(&format!("c=$({cursor}); systemctl restart godwit-agent; sleep 3; journalctl -o cat -u godwit-agent --no-pager --after-cursor \"$c\" | grep -i -e 'left-over' -e 'remains running' || true"))?;
                ensure!(left.is_empty(), "on {}: {left}", host.name);
            }
            site.checks().map(|_| String::new())
        });
        self.show("the guest moves after that", |site| {
            site.move_over().map(|(note, _)| note)
        });
        self.show("it is reset and boots anew", |site| {
            let before = steps(&site.checks()?)?;
            site.a.ok("godwit vm reset web")?;
            site.a
                .until("it begins anew", "godwit vm console web", |ran| {
                    steps(&ran.stdout).is_ok_and(|now| now < before)
                })?;
            site.checks()
                .map(|said| format!(" ({before} steps, then {})", steps(&said).unwrap_or(0)))
        });
    }

    fn reboots(&mut self) {
        if self.holder().is_ok_and(|host| host.name == "a") {
            self.show("the guest moves before its host reboots", |site| {
                site.move_over().map(|(note, _)| note)
            });
        }
        self.show(
            "an orderly reboot of its host; the guest comes back",
            |site| {
                let boot = site.b.value("cat /proc/sys/kernel/random/boot_id")?;
                site.b
                    .ok("systemd-run -q --on-active=1s systemctl reboot")?;
                site.b.machine.forget();
                std::thread::sleep(Duration::from_secs(20));
                site.b.machine.wait_again(&boot)?;
                prepare(&site.b, 2)?;
                site.b
                    .ok("journalctl -b -1 --no-pager -o cat -u 'godwit*' | tail -n 30")?;
                site.a
                    .until("the VM runs again", "godwit vm show web --json", |ran| {
                        ran.stdout
                            .replace(' ', "")
                            .contains("\"state\":\"running\"")
                    })?;
                site.checks().map(|_| String::new())
            },
        );
    }
}

/// How many wrong pages a line of the console tells of; a line that is not whole tells nothing.
fn wrong(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(" wrong ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest.get(..end.unwrap_or(rest.len()))?.parse().ok()
}

/// The steps of the console's last full line.
fn steps(console: &str) -> Result<u64> {
    let lines = console
        .lines()
        .rev()
        .filter(|line| line.contains(" wrong "));
    let mut numbers = lines.filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "steps");
        words.nth(1)?.parse().ok()
    });
    numbers
        .next()
        .context("the guest says nothing of its memory")
}
