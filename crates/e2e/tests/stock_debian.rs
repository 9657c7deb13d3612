//! Debian 12 and Debian 13 as their packages make them, with systemd, in containers: the package is installed from
//! nothing and a person does what the README says.

use anyhow::{Context as _, Result, bail, ensure};
use godwit_e2e::person::container::{Container, cable, images};
use godwit_e2e::person::{Host, Transcript, memory, readme, way};
use godwit_testkit::guest::debian::{self, Images};
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Longest time for a command, or for what it sets going.
const PATIENCE: Duration = Duration::from_secs(300);
/// Where the Linux guest answers.
const GUEST: &str = "10.77.0.11";
/// The VM whose every page is checked.
const COUNTER: &str = "counter";

/// A system that is installed on a disk. The firmware boots it.
const INSTALLED: &str = r#"name = "db"
vcpus = 1
memory_mib = 512
accelerator = "tcg"

[[disk]]
name = "root"
path = "/srv/vms/db-root.raw"
from = "/srv/images/debian.raw"

[[nic]]
port_group = "vm"
"#;

type Debian = Host<Container>;

struct Site {
    a: Debian,
    b: Debian,
    target: PathBuf,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Makes the package of the program under test and gives its path.
fn package(dir: &Path, target: &Path) -> Result<PathBuf> {
    let output = Command::new(repository().join("scripts/deb.sh"))
        .arg("--out")
        .arg(dir)
        .env("BINARY", target.join("release/godwit"))
        .env("DEB_COMPRESSION", "1")
        .output()?;
    ensure!(
        output.status.success(),
        "no package: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let made = String::from_utf8(output.stdout)?;
    Ok(PathBuf::from(
        made.lines().last().context("no package is named")?,
    ))
}

/// Boots both systems, lays cables between them and puts the package and the guests where a person would.
fn bring_up(images: Vec<PathBuf>, target: PathBuf) -> Result<Site> {
    let dir = target.join("debian/running");
    std::fs::create_dir_all(&dir)?;
    let package = package(&dir, &target)?;
    let transcript = Transcript::new(&target.join("debian/transcript.txt"))?;
    let [twelve, thirteen] = images.as_slice() else {
        bail!("not two images: {images:?}");
    };
    let boot = |name: &str, image: &Path| -> Result<Debian> {
        let container = Container::boot(name, image, &dir)?;
        Ok(Host::new(name, container, &transcript, PATIENCE))
    };
    let (a, b) = (boot("a", twelve)?, boot("b", thirteen)?);
    connect([&a, &b])?;
    let guest = LinuxGuest::find(&target)?;
    for host in [&a, &b] {
        // What a boot said can be read in the next one.
        host.value("mkdir -p /var/log/journal && journalctl --flush")?;
        std::fs::copy(&package, host.machine.inside(way::PACKAGE))?;
        std::fs::copy(&guest.kernel, host.machine.inside("srv/images/vmlinuz"))?;
        std::fs::copy(&guest.initrd, host.machine.inside("srv/images/initrd"))?;
        let counter = host.machine.inside("srv/images/counter");
        let text = memory::describe(COUNTER, &counter, "/srv/images/counter")?;
        std::fs::write(host.machine.inside("root/counter.toml"), text)?;
    }
    std::fs::write(a.machine.inside("root/web.toml"), web()?)?;
    a.ok("grep PRETTY /etc/os-release; findmnt -n /run; cat web.toml")?;
    b.ok("grep PRETTY /etc/os-release; findmnt -n /run")?;
    Ok(Site { a, b, target })
}

/// Lays the cables between both systems, each to a bridge at both ends: one that the other end takes away leaves the address
/// where it is. The management network comes last.
fn connect(hosts: [&Debian; 2]) -> Result<()> {
    for (name, bridge, network) in [
        ("port", "vmbr0", "10.77.0"),
        ("migr", "br-migr", "10.1.0"),
        ("mgmt", "br-mgmt", "10.0.0"),
    ] {
        cable(name, hosts.map(|host| &host.machine))?;
        for (host, number) in hosts.into_iter().zip(1..) {
            host.value(&format!(
                "ip -br link show {bridge} || {{ ip link add {bridge} type bridge && ip addr add {network}.{number}/24 dev {bridge}; }}
                 ip link set {bridge} up && ip link set {name} master {bridge} && ip link set {name} up"
            ))?;
        }
    }
    Ok(())
}

/// The README's VM, smaller, emulated, and with an address to ask it at.
fn web() -> Result<String> {
    let network = GuestNetwork {
        ip4: Some(format!("{GUEST}/24")),
        ip6: None,
    };
    let line = format!("\"{} godwit.redis=no\"", command_line(&network));
    let text = readme::with(&readme::description()?, "memory_mib", "256");
    let text = readme::with(&text, "accelerator", "\"tcg\"");
    Ok(readme::with(&text, "cmdline", &line))
}

impl Site {
    /// Whether the Linux guest answers somebody in a host's network.
    fn guest_answers(&self, host: &Debian) -> Result<()> {
        host.until("the guest answers", "true", |_| {
            let probe = self.target.join("release/godwit-probe");
            let mut ask = host.machine.in_network(&probe);
            let asked = ask.args(["--timeout-s", "5", GUEST, "uptime"]).output();
            asked.is_ok_and(|output| output.status.success())
        })
        .map(drop)
    }

    fn start_guests(&self) -> Result<()> {
        let (a, commands) = (&self.a, readme::commands()?);
        let said = a.ok(&commands.create)?;
        ensure!(said.contains("VM 'web' runs on host "), "{said}");
        a.ok("godwit vm create counter.toml && godwit vm start counter --on a")?;
        a.ok("godwit vm list")?;
        let on_b = a.value("godwit vm show web --json")?.contains("\"b\"");
        if on_b {
            way::migrate(a, "web", "a")?;
        }
        self.guest_answers(a)
    }

    /// Both guests go to a host; each page of the counter's memory is looked at there.
    fn move_to(&self, to: &Debian) -> Result<()> {
        way::migrate(&self.a, "web", &to.name)?;
        way::migrate(&self.a, COUNTER, &to.name)?;
        self.guest_answers(to)?;
        self.unharmed(to)
    }

    fn unharmed(&self, on: &Debian) -> Result<()> {
        memory::check(on, &self.a, &on.machine.inside("/"), COUNTER).map(drop)
    }

    /// The QEMUs of a host, by number and start: the same before and after means that no guest was touched.
    fn hypervisors(&self, host: &Debian) -> Result<String> {
        // The agent asks a QEMU without a guest what it can do when it starts.
        host.value(
            "for p in $(pgrep qemu-system | sort -n); do grep -q /ram/ /proc/$p/cmdline && cut -d' ' -f1,22 /proc/$p/stat; done; true",
        )
    }

    /// Each VM has a scope of its own in the VMs' slice, which systemd leaves to us.
    fn has_scopes(&self, host: &Debian) -> Result<()> {
        if host.value("stat -fc %T /sys/fs/cgroup")? != "cgroup2fs" {
            println!(
                "skipped: scopes on {}: no unified control groups here",
                host.name
            );
            return Ok(());
        }
        for vm in ["web", COUNTER] {
            let said = host.ok(&format!(
                "systemctl show godwit-vm-{vm}.scope -p Slice,Delegate,ActiveState"
            ))?;
            for line in ["Slice=godwit.slice", "Delegate=yes", "ActiveState=active"] {
                ensure!(said.lines().any(|one| one == line), "{vm}: {said}");
            }
        }
        Ok(())
    }

    /// What is restarted by `script` goes on with every guest as it was, and with the same site.
    fn goes_on(&self, host: &Debian, script: &str) -> Result<()> {
        let agent = "systemctl show -p MainPID --value godwit-agent";
        let before = (self.hypervisors(host)?, host.value(agent)?);
        ensure!(before.0.lines().count() == 2, "QEMUs before: {before:?}");
        let cursor =
            host.value("journalctl -n 0 --show-cursor --no-pager | sed -n 's/^-- cursor: //p'")?;
        ensure!(!cursor.is_empty(), "no place in the journal");
        host.ok(script)?;
        host.until("the agent is another process", agent, |ran| {
            ran.stdout.trim() != before.1 && ran.stdout.trim() != "0"
        })?;
        way::agent_listens(host)?;
        way::connected(&self.a)?;
        let running = |text: &str| text.replace(' ', "").matches("\"running\"").count() == 2;
        self.a
            .until("both VMs run", "godwit vm list --json", |ran| {
                running(&ran.stdout)
            })?;
        let after = self.hypervisors(host)?;
        ensure!(
            after == before.0,
            "'{script}' touched guests: {before:?} {after}"
        );
        self.nothing_left_over(host, &cursor)?;
        self.guest_answers(host)?;
        self.unharmed(host)
    }

    /// systemd found no process of a VM in the agent's group since then.
    fn nothing_left_over(&self, host: &Debian, cursor: &str) -> Result<()> {
        let said = host.value(&format!(
            "journalctl -o cat --no-pager -u godwit-agent --after-cursor '{cursor}'"
        ))?;
        ensure!(!said.is_empty(), "the journal tells of no restart");
        let left: Vec<&str> = said
            .lines()
            .filter(|line| line.contains("left-over") || line.contains("remains running"))
            .collect();
        ensure!(left.is_empty(), "{left:?}");
        self.has_scopes(host)
    }
}

/// Skips with a reason, or gives what a site is made of.
fn ready() -> Result<Option<(Vec<PathBuf>, PathBuf)>> {
    match images()? {
        Images::Here(images) => Ok(Some((images, target_dir()?))),
        Images::NotHere(why) => {
            println!("skipped: {why}");
            Ok(None)
        }
    }
}

#[test]
fn a_person_installs_moves_upgrades_and_removes_on_debian_12_and_13() -> Result<()> {
    let Some((images, target)) = ready()? else {
        return Ok(());
    };
    let mut site = bring_up(images, target)?;
    way::install(&site.a)?;
    way::install(&site.b)?;
    warns_of_an_old_kernel(&site.a)?;
    way::set_up([&site.a, &site.b])?;
    site.start_guests()?;
    site.has_scopes(&site.a)?;
    has_pages_and_completions(&site.a)?;
    tells_the_journal(&site.a)?;
    site.move_to(&site.b)?;
    site.goes_on(&site.b, "systemctl restart godwit-agent")?;
    // Every process of the unit at once, as the kernel ends them where its memory is used up.
    site.goes_on(&site.b, "systemctl kill --signal=KILL godwit-agent")?;
    site.a.ok("systemctl restart godwit-controller")?;
    site.a
        .until("the controller answers", "godwit vm list", |ran| {
            ran.code == Some(0)
        })?;
    let upgrade = format!("dpkg -i {}", way::PACKAGE);
    site.goes_on(&site.b, &upgrade)?;
    let said = site.b.refused("apt-get remove -q -y godwit")?;
    ensure!(
        said.contains("VMs run on this host: counter web"),
        "the refusal does not name the VMs: {said}"
    );
    site.b.ok("systemctl is-active godwit-agent")?;
    way::agent_listens(&site.b)?;
    way::connected(&site.a)?;
    site.move_to(&site.a)?;
    site.goes_on(&site.a, &upgrade)?;
    moves_an_installed_system(&site)?;
    purge(&site)?;
    power_off(&mut site)
}

/// Debian with PostgreSQL on a disk that is made from an image: it moves with its disk to the other host and back, between
/// directories of which the hosts share nothing.
fn moves_an_installed_system(site: &Site) -> Result<()> {
    let image = match debian::images("guest")? {
        Images::Here(images) => images,
        Images::NotHere(why) => {
            println!("skipped: a Debian on a disk: {why}");
            return Ok(());
        }
    };
    let image = image.first().context("no image of a Debian guest")?;
    let (a, b) = (&site.a, &site.b);
    let copied = Command::new("cp")
        .arg("--sparse=always")
        .args([image, &a.machine.inside("srv/images/debian.raw")])
        .status()?;
    ensure!(copied.success(), "the image is not copied");
    for host in [a, b] {
        host.ok("mkdir /srv/vms && chgrp godwit-qemu /srv/vms && chmod 3770 /srv/vms")?;
    }
    std::fs::write(a.machine.inside("root/db.toml"), INSTALLED)?;
    a.ok("cat db.toml; godwit vm create db.toml && godwit vm start db --on a")?;
    has_rows(
        a,
        "create table moves (host text); insert into moves values ('a')",
        1,
    )?;
    for (to, from, rows) in [(b, a, 2), (a, b, 3)] {
        way::migrate(a, "db", &to.name)?;
        let insert = format!("insert into moves values ('{}')", to.name);
        has_rows(to, &insert, rows)?;
        to.ok("ls -lsh /srv/vms")?;
        from.until("nothing is left behind", "ls /srv/vms", |ran| {
            ran.stdout.trim().is_empty()
        })?;
    }
    a.ok("godwit vm show db")?;
    a.ok("godwit vm stop db")?;
    a.until("the guest is off", "godwit vm show db --json", |ran| {
        ran.stdout
            .replace(' ', "")
            .contains("\"state\":\"stopped\"")
    })?;
    a.ok("godwit vm delete db")?;
    a.ok("test -s /srv/vms/db-root.raw && rm /srv/vms/db-root.raw")
        .map(drop)
}

/// Asks the guest's database from a host's network, and counts the rows then.
fn has_rows(host: &Debian, statement: &str, rows: u32) -> Result<()> {
    let query = |sql: &str| format!("runuser -u postgres -- psql -qAtc \"{sql}\"");
    let ask = |command: &str| {
        format!(
            "timeout 60 bash -c 'exec 3<>/dev/tcp/{}/23 && cat >&3 && cat <&3' <<'END'\n{command}; exit\nEND",
            debian::ADDRESS
        )
    };
    let first = ask("systemctl is-system-running; runuser -u postgres -- pg_isready");
    host.until("the guest's database answers", &first, |ran| {
        ran.stdout.contains("accepting connections")
    })?;
    host.ok(&ask(&query(statement)))?;
    let said = host.ok(&ask(&query("select 'rows=' || count(*) from moves")))?;
    ensure!(
        said.contains(&format!("rows={rows}")),
        "not {rows} rows: {said}"
    );
    Ok(())
}

/// The package recommends the kernel that VMs need, and says so where another one runs.
fn warns_of_an_old_kernel(host: &Debian) -> Result<()> {
    let recommends = host.value("dpkg-query -W -f '${Recommends}' godwit")?;
    ensure!(
        recommends.starts_with("linux-image-amd64 (>= 6.7)"),
        "{recommends}"
    );
    let said = host.ok(
        "mkdir /tmp/old && printf '#!/bin/sh\necho 6.1.0-50-amd64\n' >/tmp/old/uname && chmod +x /tmp/old/uname && PATH=/tmp/old:$PATH /var/lib/dpkg/info/godwit.postinst configure 2>&1",
    )?;
    for words in [
        "runs Linux 6.1.0-50-amd64",
        "apt install -t bookworm-backports",
    ] {
        ensure!(said.contains(words), "'{words}' is not in: {said}");
    }
    Ok(())
}

/// What the package brings beside the program is where its readers look for it.
fn has_pages_and_completions(host: &Debian) -> Result<()> {
    let share = "/usr/share";
    let said = host.ok(&format!(
        "zcat {share}/man/man1/godwit-vm-migrate.1.gz {share}/man/man5/godwit-host.toml.5.gz && cat {share}/bash-completion/completions/godwit {share}/zsh/vendor-completions/_godwit {share}/fish/vendor_completions.d/godwit.fish"
    ))?;
    let said = said.replace("\\-", "-");
    for word in ["max-downtime", "migration_ports", "compdef"] {
        ensure!(said.contains(word), "'{word}' is not in what was installed");
    }
    Ok(())
}

/// The journal has what a VM process says, with its priority and as the VM's own.
fn tells_the_journal(host: &Debian) -> Result<()> {
    let said = host.value("journalctl -t godwit-vm-web -o json --no-pager")?;
    let written = said.lines().find(|line| line.contains("journal written"));
    let entry: serde_json::Value =
        serde_json::from_str(written.with_context(|| format!("no such line: {said}"))?)?;
    ensure!(
        entry["PRIORITY"] == "6" && entry["_SYSTEMD_UNIT"] == "godwit-vm-web.scope",
        "not as a line of web's own: {entry}"
    );
    Ok(())
}

/// A host that is powered off powers its guest down first, and the guest boots when the host is back.
fn power_off(site: &mut Site) -> Result<()> {
    // The counter knows no power key.
    way::migrate(&site.a, COUNTER, "a")?;
    site.b.ok("systemctl poweroff")?;
    site.b.machine.wait_off(PATIENCE)?;
    site.a
        .until("b alone is silent", "godwit host list", |ran| {
            let state = |host: &str| {
                let line = ran.stdout.lines().find(|line| line.starts_with(host));
                line.and_then(|line| line.split_whitespace().nth(1))
            };
            (state("a "), state("b ")) == (Some("connected"), Some("unreachable"))
        })?;
    site.a.types("godwit host list; godwit vm list")?;
    site.b.machine.boot_again()?;
    connect([&site.a, &site.b])?;
    let said = site
        .b
        .ok("journalctl -b -1 --no-pager -o cat -u 'godwit-*' | tail -n 99")?;
    ensure!(
        said.contains("VM web is powered down") && !said.contains("stopped hard"),
        "not powered down in order: {said}"
    );
    way::connected(&site.a)?;
    let show = "godwit vm show web --json";
    site.a.until("web runs again", show, |ran| {
        ran.stdout
            .replace(' ', "")
            .contains("\"state\":\"running\"")
    })?;
    site.a.ok("godwit host list; godwit vm list")?;
    site.guest_answers(&site.b)?;
    site.unharmed(&site.a)
}

/// A host without VMs lets the package go and keeps what says who may run a VM.
fn purge(site: &Site) -> Result<()> {
    let b = &site.b;
    let said = b.ok("apt-get purge -q -y godwit 2>&1")?;
    for kept in ["/var/lib/godwit", "/etc/godwit/host.toml"] {
        ensure!(said.contains(&format!("kept: {kept}")), "{kept}: {said}");
    }
    b.ok("test -s /etc/godwit/host.toml && test -s /var/lib/godwit/site.json && ls /var/lib/godwit /srv/images")?;
    b.refused("pgrep -x godwit || systemctl cat godwit-agent || godwit --version")?;
    // Installed again, the host is what it was.
    b.ok(&format!(
        "dpkg -i {} && systemctl enable --now godwit-agent",
        way::PACKAGE
    ))?;
    way::agent_listens(b)?;
    way::connected(&site.a)?;
    site.move_to(b)
}
