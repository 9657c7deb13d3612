//! Both machines, and what is asked of them and of the guest.
//!
//! Owns the machines. Refuses: an answer that is none, and a guest that found a page wrong, whatever else was asked.

use crate::{Arguments, payload};
use anyhow::{Context as _, Result, ensure};
use godwit_e2e::person::emulated::{Emulated, Plan, base64};
use godwit_e2e::person::{Host, Machine as _, Transcript, way};
use godwit_testkit::guest::linux::target_dir;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time for a command inside, or for what it sets going. One row that hangs leaves the others time to be tried.
const PATIENCE: Duration = Duration::from_secs(300);
/// A machine that lives has answered by then.
const ANSWER: Duration = Duration::from_secs(60);
/// Longest start of the first machine, until it offers the other one its network.
const SEGMENT: Duration = Duration::from_secs(60);
/// How fast a busy guest writes once it is let, MiB/s. A link of a share of less would make its move last as long as an emulated
/// kernel rarely lives with slowed vCPUs.
const WRITES_MIN: f64 = 5.0;
/// How often a guest that writes less is looked at: it may have just booted.
const LOOKS_AT_WRITES: usize = 8;
/// A unit that holds what a kernel otherwise switches on and off in its own running code, with the first and the last of them: a
/// KVM guest with an interrupt controller, a CPU quota, a control group of every kind. The second CPU is up only after that.
const STEADY: &str = r#"[Service]
Delegate=yes
CPUQuota=90%
ExecStartPre=/sbin/modprobe kvm_amd
ExecStart=/usr/bin/perl -e 'open(K, "+</dev/kvm") or die; $g = ioctl(K, 0xAE01, 0) or die; open(G, "+<&=", $g) or die; ioctl(G, 0xAE60, 0) or die; ioctl(G, 0xAE41, 0) or die; open(C, ">", "/sys/devices/system/cpu/cpu1/online") or die; print C "1\n"; close(C) or die; sleep'
[Install]
WantedBy=multi-user.target
"#;

pub struct Site {
    pub a: Host<Emulated>,
    pub b: Host<Emulated>,
    /// CPU model of the description, where the README's is not wanted.
    pub cpu: Option<String>,
}

/// One guest of the site.
pub struct Guest<'a> {
    site: &'a Site,
    pub name: &'a str,
}

impl Site {
    /// Switches both machines on, or finds those that were left on. `broken` pairs broke before: their consoles and transcripts
    /// are set aside.
    pub fn switch_on(arguments: &Arguments, ends: Instant, broken: usize) -> Result<Self> {
        let dir = target_dir()?.join("debian/machines");
        let machines = if arguments.attach {
            [
                Emulated::attach(&dir.join("a"), ends),
                Emulated::attach(&dir.join("b"), ends),
            ]
        } else {
            make_room(&dir, broken)?;
            power_on(arguments, &dir, ends)?
        };
        let transcript = Transcript::new(&dir.join("transcript.txt"))?;
        let host = |name: &str, machine| Host::new(name, machine, &transcript, PATIENCE);
        let [a, b] = machines;
        let site = Self {
            a: host("a", a),
            b: host("b", b),
            cpu: arguments.cpu.clone(),
        };
        if !arguments.attach {
            prepare(&site.a, 1)?;
            prepare(&site.b, 2)?;
        }
        Ok(site)
    }

    pub fn hosts(&self) -> [&Host<Emulated>; 2] {
        [&self.a, &self.b]
    }

    /// What is asked of one guest.
    pub fn guest<'a>(&'a self, name: &'a str) -> Guest<'a> {
        Guest { site: self, name }
    }

    /// The machine that does not answer any more, if there is one.
    pub fn broken(&self) -> Option<String> {
        self.hosts().into_iter().find_map(|host| {
            let dead = host.machine.shell("true", ANSWER).err()?;
            Some(format!("machine {} broke ({dead:#})", host.name))
        })
    }

    /// Writes down what tells why a row was not shown: guests' consoles with all their boots, without the checker's usual
    /// line, and the journals' ends.
    pub fn explain(&self) {
        let consoles = "godwit vm list; for vm in web busy again; do echo == $vm; godwit vm console $vm --print 2>&1 | grep -v 'checker: steps .* wrong 0 ' | tail -n 80; done";
        // A machine that does not answer has been told of by the row.
        let _ = self.a.types(consoles);
        for host in self.hosts() {
            let _ = host.types(
                "journalctl --no-pager -n 60 -o short-precise -u 'godwit*'; dmesg | tail -n 20",
            );
        }
    }

    /// Waits for a migration's end and gives its report.
    pub fn ended(&self, id: &str) -> Result<Value> {
        let show = format!("godwit migration show {id} --json 2>/dev/null");
        let ran = self.a.until("the migration has ended", &show, |ran| {
            let report: Option<Value> = serde_json::from_str(&ran.stdout).ok();
            report.is_some_and(|report| !report["outcome"].is_null())
        })?;
        self.a.types(&format!("godwit migration show {id}"))?;
        Ok(serde_json::from_str(&ran.stdout)?)
    }
}

impl<'a> Guest<'a> {
    /// Waits until the controller says so of it.
    pub fn until(&self, state: &str) -> Result<()> {
        let show = format!("godwit vm show {} --json", self.name);
        let is_so = |text: &str| {
            let shown: Option<Value> = serde_json::from_str(text).ok();
            shown.is_some_and(|shown| shown["state"] == state)
        };
        let what = format!("VM {} is {state}", self.name);
        let ran = self.site.a.until(&what, &show, |ran| is_so(&ran.stdout))?;
        ensure!(is_so(&ran.stdout), "{ran:?}");
        Ok(())
    }

    /// The host that it runs on, and the other one.
    pub fn holder(&self) -> Result<(&'a Host<Emulated>, &'a Host<Emulated>)> {
        let (site, show) = (
            self.site,
            format!("godwit vm show {} --json 2>/dev/null", self.name),
        );
        let shown: Value = serde_json::from_str(&site.a.value(&show)?)?;
        match shown["host"].as_str() {
            Some("a") => Ok((&site.a, &site.b)),
            Some("b") => Ok((&site.b, &site.a)),
            _ => anyhow::bail!("no host runs it; it is {}", shown["state"]),
        }
    }

    /// A line that finds its QEMU, as `$q`.
    pub fn find_qemu(&self) -> String {
        format!(
            "q=$(for p in $(pgrep qemu-system); do grep -q '/ram/{}\\.' /proc/$p/cmdline && echo $p; done)",
            self.name
        )
    }

    /// The process of its QEMU.
    pub fn qemu(&self) -> Result<u32> {
        let (host, _) = self.holder()?;
        let pid = host.value(&format!("{}; echo $q", self.find_qemu()))?;
        pid.parse()
            .with_context(|| format!("QEMU on {}: '{pid}'", host.name))
    }

    /// A line that finds its VM process.
    pub fn find_vm_process(&self) -> String {
        let name = self.name;
        format!("pgrep -f '^[^ ]*godwit vm-process.*{name}' | head -n 1")
    }

    /// Where its processes live.
    pub fn group(&self) -> String {
        format!("/godwit.slice/godwit-vm-{}.scope/vm", self.name)
    }

    /// Its memory that is in huge pages.
    pub fn huge_kib(&self) -> Result<u64> {
        let script = format!(
            "{}; awk '/ShmemPmdMapped/ {{ print $2 }}' /proc/$q/smaps_rollup",
            self.find_qemu()
        );
        Ok(self.holder()?.0.value(&script)?.parse()?)
    }

    /// Waits until it has said more and gives its console: no page may ever have been wrong.
    pub fn console(&self) -> Result<String> {
        let (a, console) = (
            &self.site.a,
            format!("godwit vm console {} --print", self.name),
        );
        let before = a.machine_text(&console)?;
        let before = steps(&before).unwrap_or(0);
        let ran = a.until("the guest checks its memory", &console, |ran| {
            steps(&ran.stdout).is_some_and(|now| now > 0 && now != before)
        })?;
        let bad = ran.stdout.lines().filter_map(wrong);
        let bad: Vec<u64> = bad.filter(|number| *number > 0).collect();
        ensure!(bad.is_empty(), "the guest found wrong pages: {bad:?}");
        Ok(ran.stdout)
    }

    pub fn steps(&self) -> Result<u64> {
        steps(&self.console()?).context("the guest says nothing of its memory")
    }

    /// Does something under which it must go on, not begin anew; tells how far it came.
    pub fn goes_on(&self, act: impl FnOnce() -> Result<String>) -> Result<String> {
        let before = self.steps()?;
        let note = act()?;
        let after = self.steps()?;
        ensure!(
            after > before,
            "the guest began anew: {before} steps, then {after}"
        );
        let also = if note.is_empty() { "" } else { "; " };
        Ok(format!(
            "{note}{also}{before} then {after} steps, none wrong"
        ))
    }

    /// Moves it to the other host by the README's command.
    pub fn move_over(&self) -> Result<String> {
        let (from, to) = self.holder()?;
        self.goes_on(|| {
            way::migrate(&self.site.a, self.name, &to.name)?;
            Ok(format!("{} to {}", from.name, to.name))
        })
    }

    /// How much memory it writes in a second, MiB, as a dry run of a move measures it.
    pub fn writes(&self, to: &str) -> Result<f64> {
        self.steps()?;
        let mut most: f64 = 0.0;
        for _ in 0..LOOKS_AT_WRITES {
            most = most.max(self.writes_now(to)?);
            if most >= WRITES_MIN {
                break;
            }
        }
        ensure!(most > 0.0, "it writes nothing");
        Ok(most)
    }

    fn writes_now(&self, to: &str) -> Result<f64> {
        // A pause that is kept anywhere, so that nothing is warned of.
        let dry = "--max-downtime 10000 --dry-run --json 2>/dev/null";
        let command = format!("godwit vm migrate {} --to {to} {dry}", self.name);
        let checked: Value = serde_json::from_str(&self.site.a.value(&command)?)?;
        let rate = checked["prediction"]["dirty_mib_per_s"].as_f64();
        rate.with_context(|| format!("no rate is foretold: {checked}"))
    }

    /// Begins to move it with more arguments and gives the migration's id.
    pub fn begin_to_move(&self, to: &str, more: &str) -> Result<String> {
        let name = self.name;
        // Warnings are told beside the answer.
        let command =
            format!("godwit vm migrate {name} --to {to} {more} --detach --json 2>/dev/null");
        let begun: Value = serde_json::from_str(&self.site.a.value(&command)?)?;
        Ok(begun["id"].as_str().context("no migration")?.to_owned())
    }
}

/// Empties the directory before the first machines; sets aside what the ones that broke have left in it.
fn make_room(dir: &Path, broken: usize) -> Result<()> {
    if broken == 0 && dir.exists() {
        std::fs::remove_dir_all(dir)?;
    }
    std::fs::create_dir_all(dir)?;
    if broken > 0 {
        let aside = dir.join(format!("broken-{broken}"));
        std::fs::create_dir(&aside)?;
        for name in ["a", "b", "transcript.txt", "segment"] {
            // Machines that broke early have not left everything.
            if dir.join(name).exists() {
                std::fs::rename(dir.join(name), aside.join(name))?;
            }
        }
    }
    Ok(())
}

fn power_on(arguments: &Arguments, dir: &Path, ends: Instant) -> Result<[Emulated; 2]> {
    let payload = payload::pack(dir, &arguments.package)?;
    let segment = dir.join("segment");
    let first = arguments.image.first().context("no image")?;
    let second = arguments.image.get(1).unwrap_or(first);
    let on = |number: u8, image: &Path, name: &str| {
        let plan = Plan {
            qemu: &arguments.qemu,
            threads: arguments.threads,
            image,
            payload: &payload,
            segment: &segment,
            number,
            memory_mib: arguments.memory_mib,
            keep: arguments.keep,
            ends,
        };
        Emulated::power_on(&plan, &dir.join(name))
    };
    let began = Instant::now();
    let mut a = on(1, first, "a")?;
    while !segment.exists() {
        ensure!(
            began.elapsed() < SEGMENT,
            "the first machine has no network"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut b = on(2, second, "b")?;
    a.wait_up().context("machine a")?;
    b.wait_up().context("machine b")?;
    Ok([a, b])
}

/// What a person's host has before, and has again after a reboot: a name, a network, a bridge, a journal; and images.
fn prepare(host: &Host<Emulated>, number: u8) -> Result<()> {
    let script = format!(
        "set -e; echo {name} >/etc/hostname; hostname {name}; modprobe kvm_amd; mkdir -p /var/log/journal
         cd /etc/systemd/network
         printf '[NetDev]\\nName=vmbr0\\nKind=bridge\\n' >vmbr0.netdev
         printf '[Match]\\nName=e*\\n[Network]\\nBridge=vmbr0\\n' >card.network
         printf '[Match]\\nName=vmbr0\\n[Network]\\nAddress=10.0.0.{number}/24\\nAddress=10.1.0.{number}/24\\n' >vmbr0.network
         printf %s {steady} | base64 -d >/etc/systemd/system/steady.service
         systemctl daemon-reload; systemctl enable -q --now systemd-networkd steady; systemctl restart systemd-journald
         cp /payload/godwit.deb /root/; cp /payload/vmlinuz /payload/initrd /srv/images/; chmod 644 /srv/images/*",
        name = host.name,
        steady = base64(STEADY.as_bytes())
    );
    host.value(&script)?;
    host.until(
        "what the kernel patches is held",
        "systemctl is-active steady && [ $(nproc) = 2 ]",
        |ran| ran.code == Some(0),
    )?;
    let shown = "networkctl --no-pager; ip -br addr";
    let address = format!("10.1.0.{number}/");
    host.until("the bridge has its addresses", shown, |ran| {
        ran.stdout.contains(&address)
    })?;
    host.ok("grep PRETTY /etc/os-release; uname -r; qemu-system-x86_64 --version | head -n 1; ls -l /dev/kvm; findmnt -n -o OPTIONS /run; cat /sys/fs/cgroup/cgroup.controllers; ip -br addr")
        .map(drop)
}

/// How many wrong pages a line of the console tells of; a line that is not whole tells nothing.
fn wrong(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(" wrong ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest.get(..end.unwrap_or(rest.len()))?.parse().ok()
}

/// The steps of the console's last full line.
pub fn steps(console: &str) -> Option<u64> {
    let lines = console
        .lines()
        .rev()
        .filter(|line| line.contains(" wrong "));
    let mut numbers = lines.filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "steps");
        words.nth(1)?.parse().ok()
    });
    numbers.next()
}
