//! What has to be shown, row by row, in the order in which it is tried.
//!
//! Owns nothing. A row leaves the guest running where it is; one that cannot says why, and the next ones are tried all the same.

use crate::site::{Site, steps};
use anyhow::{Context as _, Result, ensure};
use godwit_e2e::person::emulated::Emulated;
use godwit_e2e::person::{Host, Ran, readme, way};

/// One line of the list.
pub struct Row {
    /// What `--only` calls it.
    pub name: &'static str,
    pub what: &'static str,
    /// Shows it and gives what is worth telling.
    pub act: fn(&Site) -> Result<String>,
}

const fn row(name: &'static str, what: &'static str, act: fn(&Site) -> Result<String>) -> Row {
    Row { name, what, act }
}

pub const ROWS: [Row; 23] = [
    row(
        "machines",
        "two Debians, each with a kernel, systemd, cgroup v2 and KVM of its own, /run noexec",
        machines,
    ),
    row("install", "the package is installed from nothing", install),
    row("set-up", "set up by the README's commands", set_up),
    row(
        "guest",
        "a Linux guest with two vCPUs runs under KVM, with 'cpu = \"auto\"'",
        guest,
    ),
    row(
        "delegation",
        "it has a scope of its own with cpu and memory controllers",
        delegation,
    ),
    row(
        "bounds",
        "its memory is bounded, and QEMU is ended before its VM process",
        bounds,
    ),
    row("huge", "its memory is in huge pages", huge),
    row(
        "there",
        "it moves to the other kernel and the other QEMU, encrypted",
        move_web,
    ),
    row("back", "it moves back", move_web),
    row(
        "cancel",
        "a move is cancelled, and it stays where it is",
        cancel,
    ),
    row(
        "slowed",
        "a busy guest outruns the link, is slowed (cpu.max, the report) and moves",
        slowed,
    ),
    row(
        "reload",
        "systemctl daemon-reload while it is slowed takes neither quota nor controller",
        reload,
    ),
    row(
        "busy-off",
        "the busy guest powers itself off when asked",
        busy_off,
    ),
    row(
        "killed",
        "its VM process is killed, and it goes on",
        vm_process_killed,
    ),
    row(
        "agents",
        "both agents restart, nothing is left over, and it goes on",
        agents_restart,
    ),
    row(
        "controller",
        "the controller restarts, and it goes on",
        controller_restarts,
    ),
    row("again", "it moves after that", move_web),
    row("reset", "it is reset, and boots anew", reset),
    row(
        "reboot",
        "a guest that reboots itself goes on in the same QEMU",
        guest_reboots,
    ),
    row("small", "its memory is in small pages", small_pages),
    row(
        "small-there",
        "with small pages it moves to the other kernel",
        move_small,
    ),
    row("small-back", "with small pages it moves back", move_small),
    row(
        "host-reboot",
        "its host reboots in order: it is powered down first, and booted when the host is back",
        host_reboots,
    ),
];

/// Waits until a vCPU has a quota and prints it.
const QUOTA: &str =
    "until cat $s/godwit-throttle-*/cpu.max 2>/dev/null | grep -v '^max'; do sleep 0.1; done";

fn machines(site: &Site) -> Result<String> {
    let mut notes = Vec::new();
    for host in site.hosts() {
        let seen = host.value("stat -fc %T /sys/fs/cgroup; findmnt -n -o OPTIONS /run; test -c /dev/kvm && cat /sys/module/kvm_amd/parameters/npt; systemctl --version | head -n 1")?;
        ensure!(
            seen.contains("cgroup2fs") && seen.contains("noexec") && seen.contains("\nsystemd "),
            "{seen}"
        );
        ensure!(
            seen.lines().any(|line| matches!(line, "Y" | "1")),
            "no nested paging: {seen}"
        );
        let versions = host.value("sed -n 's/^PRETTY_NAME=//p' /etc/os-release; uname -r; qemu-system-x86_64 --version | sed -n '1s/.*version \\([0-9.]*\\).*/QEMU \\1/p'")?;
        notes.push(format!(
            "{}: {}",
            host.name,
            versions.replace('\n', ", ").replace('"', "")
        ));
    }
    Ok(notes.join("; "))
}

fn install(site: &Site) -> Result<String> {
    site.hosts().into_iter().try_for_each(way::install)?;
    Ok(String::new())
}

fn set_up(site: &Site) -> Result<String> {
    way::set_up(site.hosts())?;
    Ok(String::new())
}

/// The README's description, smaller, of a guest that checks its memory.
fn describe(site: &Site, name: &str, memory_mib: u32, more: &str) -> Result<()> {
    let text = readme::with(&readme::description()?, "name", &format!("\"{name}\""));
    let text = readme::with(&text, "memory_mib", &memory_mib.to_string());
    let line = format!("\"console=ttyS0 quiet panic=-1 tsc=reliable {more}\"");
    let text = readme::with(&text, "cmdline", &line);
    let text = match &site.cpu {
        Some(cpu) => readme::with(&text, "cpu", &format!("\"{cpu}\"")),
        None => text,
    };
    site.a
        .ok(&format!("cat >{name}.toml <<'E'\n{text}E\n"))
        .map(drop)
}

fn guest(site: &Site) -> Result<String> {
    describe(site, "web", 192, "rest_us=10000")?;
    site.a.ok(&readme::commands()?.create)?;
    let web = site.guest("web");
    let said = web.console()?;
    ensure!(said.contains("on 2 processors"), "{said}");
    let (host, _) = web.holder()?;
    let line = host.value(&format!(
        "{}; tr '\\0' ' ' </proc/$q/cmdline",
        web.find_qemu()
    ))?;
    ensure!(
        line.contains("-accel kvm") || line.contains("accel=kvm"),
        "{line}"
    );
    let mut words = line.split_whitespace();
    let cpu = words.find(|word| *word == "-cpu").and(words.next());
    Ok(format!("on {}, -cpu {}", host.name, cpu.unwrap_or("?")))
}

fn move_web(site: &Site) -> Result<String> {
    site.guest("web").move_over()
}

fn delegation(site: &Site) -> Result<String> {
    let web = site.guest("web");
    let (host, _) = web.holder()?;
    let find = web.find_qemu();
    let group = host.value(&format!("{find}; sed -n 's/^0:://p' /proc/$q/cgroup"))?;
    ensure!(group == web.group(), "its group is {group}");
    let controllers = host.value(&format!("cat /sys/fs/cgroup{group}/cgroup.controllers"))?;
    let has = |name: &str| controllers.split_whitespace().any(|word| word == name);
    ensure!(has("cpu") && has("memory"), "{group} has {controllers}");
    Ok(format!("{group}: {controllers}"))
}

fn bounds(site: &Site) -> Result<String> {
    let web = site.guest("web");
    let script = format!(
        "{}; cat /sys/fs/cgroup{}/memory.max /proc/$q/oom_score_adj /proc/$({})/oom_score_adj",
        web.find_qemu(),
        web.group(),
        web.find_vm_process()
    );
    let said = web.holder()?.0.value(&script)?;
    let words: Vec<&str> = said.split_whitespace().collect();
    let [limit, "0", "-500"] = words[..] else {
        anyhow::bail!("memory.max, score of QEMU, score of the VM process: {said}");
    };
    let bytes: u64 = limit.parse().context("memory.max is no number")?;
    ensure!(
        (192 << 20..4 << 30).contains(&bytes),
        "memory.max is {limit}"
    );
    Ok(format!("memory.max {limit}, scores 0 and -500"))
}

fn huge(site: &Site) -> Result<String> {
    let huge = site.guest("web").huge_kib()?;
    ensure!(huge > 0, "no huge page");
    Ok(format!("{huge} KiB"))
}

fn cancel(site: &Site) -> Result<String> {
    let web = site.guest("web");
    let (from, to) = web.holder()?;
    web.goes_on(|| {
        let id = web.begin_to_move(&to.name, "--max-bandwidth 8")?;
        let show = format!("godwit migration show {id} --json");
        site.a.until("bytes have gone", &show, |ran| {
            ran.code == Some(0) && !ran.stdout.contains("\"bytes_on_wire\": 0,")
        })?;
        site.a.ok(&format!("godwit migration cancel {id}"))?;
        let report = site.ended(&id)?;
        ensure!(report["outcome"] == "cancelled", "{report}");
        let (holder, _) = web.holder()?;
        ensure!(holder.name == from.name, "the guest has left");
        Ok(format!("after {} bytes", report["bytes_on_wire"]))
    })
}

/// Moves a busy guest over a link of this share of its own writes, which depend on the machine that emulates; does
/// something on its host once it is slowed.
fn outrun(
    site: &Site,
    share: f64,
    act: fn(&Host<Emulated>, &str) -> Result<String>,
) -> Result<String> {
    let busy = site.guest("busy");
    let (from, to) = busy.holder()?;
    let writes = busy.writes(&to.name)?;
    let mbit_per_s = writes * 1.048_576 * 8.0;
    let bandwidth = (mbit_per_s * share).round().max(2.0);
    let group = format!("s=/sys/fs/cgroup{}", busy.group());
    busy.goes_on(|| {
        // Where everything takes long, a switchover of the usual length would be called off.
        let more = format!("--max-bandwidth {bandwidth} --max-downtime 1500");
        let id = busy.begin_to_move(&to.name, &more)?;
        let quota = from
            .ok(&format!("{group}; {QUOTA}"))
            .context("no vCPU got a quota")?;
        let note = act(from, &group)?;
        let report = site.ended(&id)?;
        ensure!(report["outcome"] == "completed", "{report}");
        let speed = report["guest_speed_percent"].as_u64().unwrap_or(100);
        ensure!(speed < 100, "the report says nothing of it: {report}");
        let (holder, _) = busy.holder()?;
        ensure!(holder.name == to.name, "it did not leave {}", from.name);
        let quota = quota.trim().replace('\n', ", ");
        Ok(format!(
            "{writes:.1} MiB/s of writes over {bandwidth} Mbit/s: cpu.max {quota}{note}, report: {speed} % of its speed"
        ))
    })
}

/// The busy guest, which machines that were switched on anew do not have.
fn have_busy(site: &Site) -> Result<()> {
    if site.a.machine_text("godwit vm list")?.contains("busy") {
        return Ok(());
    }
    describe(site, "busy", 128, "rest_us=300")?;
    site.a
        .ok("godwit vm create busy.toml && godwit vm start busy --on a")
        .map(drop)
}

fn slowed(site: &Site) -> Result<String> {
    have_busy(site)?;
    outrun(site, 0.6, |_, _| Ok(String::new()))
}

/// A slower link, so that the guest is still slowed when systemd has read everything again.
fn reload(site: &Site) -> Result<String> {
    have_busy(site)?;
    outrun(site, 0.4, |from, group| {
        let said = from.ok(&format!(
            "systemctl daemon-reload; {group}; cat $s/cgroup.controllers; cat $s/godwit-throttle-*/cpu.max | grep -v '^max'"
        ))?;
        let (controllers, quotas) = said.split_once('\n').context("no answer")?;
        ensure!(
            controllers.split_whitespace().any(|word| word == "cpu"),
            "after daemon-reload: {said}"
        );
        ensure!(
            quotas.starts_with(|first: char| first.is_ascii_digit()),
            "no quota after daemon-reload: {said}"
        );
        let quotas = quotas.trim().replace('\n', ", ");
        Ok(format!(", after daemon-reload {quotas}"))
    })
}

fn busy_off(site: &Site) -> Result<String> {
    have_busy(site)?;
    site.guest("busy").console()?;
    site.a.ok("godwit vm stop busy")?;
    site.guest("busy").until("stopped")?;
    let said = site.a.machine_text("godwit vm console busy --print")?;
    site.a.ok("godwit vm delete busy")?;
    // Its console may be gone with its QEMU.
    let heard = said.contains("the power key was pressed");
    Ok(if heard { "it says so" } else { "" }.to_owned())
}

fn vm_process_killed(site: &Site) -> Result<String> {
    let web = site.guest("web");
    let (host, _) = web.holder()?;
    let (qemu, find) = (web.qemu()?, web.find_vm_process());
    web.goes_on(|| {
        let killed = host.value(&format!("p=$({find}); kill -9 $p; echo $p"))?;
        host.until("another VM process runs", &find, |ran| {
            let now = ran.stdout.trim();
            !now.is_empty() && now != killed
        })?;
        web.until("running")?;
        ensure!(web.qemu()? == qemu, "another QEMU");
        let joined = host.value(&format!("sed -n 's/^0:://p' /proc/$({find})/cgroup"))?;
        ensure!(joined == web.group(), "the successor is in {joined}");
        Ok(format!("the successor is in {joined}"))
    })
}

fn agents_restart(site: &Site) -> Result<String> {
    let web = site.guest("web");
    let qemu = web.qemu()?;
    web.goes_on(|| {
        for host in site.hosts() {
            let cursor = "journalctl -n 0 --show-cursor --no-pager | sed -n 's/^-- cursor: //p'";
            let cursor = host.value(cursor)?;
            host.ok("systemctl restart godwit-agent")?;
            way::agent_listens(host)?;
            way::connected(&site.a)?;
            let said = host.value(&format!(
                "journalctl -o cat -u godwit-agent --no-pager --after-cursor '{cursor}'"
            ))?;
            ensure!(!said.is_empty(), "the journal tells of no restart");
            let mut lines = said.lines();
            let left =
                lines.find(|line| line.contains("left-over") || line.contains("remains running"));
            ensure!(left.is_none(), "on {}: {left:?}", host.name);
        }
        ensure!(web.qemu()? == qemu, "another QEMU");
        Ok(String::new())
    })
}

fn controller_restarts(site: &Site) -> Result<String> {
    site.guest("web").goes_on(|| {
        site.a.ok("systemctl restart godwit-controller")?;
        site.a
            .until("the controller answers", "godwit vm list", |ran| {
                ran.code == Some(0)
            })?;
        way::connected(&site.a)?;
        Ok(String::new())
    })
}

fn reset(site: &Site) -> Result<String> {
    let web = site.guest("web");
    let before = web.steps()?;
    site.a.ok("godwit vm reset web")?;
    site.a
        .until("it begins anew", "godwit vm console web --print", |ran| {
            steps(&ran.stdout).is_some_and(|now| now < before)
        })?;
    Ok(format!("{before} steps, then {}", web.steps()?))
}

/// A guest of its own: one that reboots now and then would be in the others' way.
fn guest_reboots(site: &Site) -> Result<String> {
    describe(site, "again", 128, "rest_us=10000 reboot_at=100")?;
    site.a
        .ok("godwit vm create again.toml && godwit vm start again --on a")?;
    let again = site.guest("again");
    let first = again.qemu()?;
    let reboots = |ran: &Ran| ran.stdout.matches("reboots by itself").count();
    let console = "godwit vm console again --print";
    let last = site
        .a
        .until("it reboots twice", console, |ran| reboots(ran) >= 2)?;
    ensure!(again.qemu()? == first, "another QEMU");
    site.a
        .ok("godwit vm stop again --force && godwit vm delete again")?;
    Ok(format!("{} times", reboots(&last)))
}

fn small_pages(site: &Site) -> Result<String> {
    for host in site.hosts() {
        host.ok("mount -o remount,huge=never /run/godwit/ram")?;
    }
    site.a.ok("godwit vm stop web --force")?;
    let web = site.guest("web");
    web.until("stopped")?;
    site.a.ok("godwit vm start web --on a")?;
    web.console()?;
    let huge = web.huge_kib()?;
    ensure!(huge == 0, "{huge} KiB are in huge pages");
    Ok(String::new())
}

/// Machines that were switched on anew have huge pages again.
fn move_small(site: &Site) -> Result<String> {
    if site.guest("web").huge_kib()? > 0 {
        small_pages(site)?;
    }
    move_web(site)
}

/// The host that reboots is the one without the controller, as the guest has to be there.
fn host_reboots(site: &Site) -> Result<String> {
    let web = site.guest("web");
    if web.holder()?.0.name == "a" {
        web.move_over()?;
    }
    let before = web.steps()?;
    let boot = site.b.value("cat /proc/sys/kernel/random/boot_id")?;
    site.b
        .ok("systemd-run -q --on-active=1s systemctl reboot")?;
    site.b.machine.forget();
    site.b.machine.wait_again(&boot)?;
    let said = site
        .b
        .ok("journalctl -b -1 --no-pager -o cat -u 'godwit*' | tail -n 40")?;
    ensure!(
        said.contains("VM web is powered down") && !said.contains("stopped hard"),
        "it was not powered down in order: {said}"
    );
    let downs = said.find("this host's guests are down");
    let agent = said.rfind("Stopped godwit-agent.service");
    ensure!(
        agent.is_none_or(|agent| downs.is_some_and(|downs| downs < agent)),
        "the agent ended before its guests: {said}"
    );
    web.until("running")?;
    let after = web.steps()?;
    ensure!(
        after < before,
        "it did not boot: {before} steps, then {after}"
    );
    let (holder, _) = web.holder()?;
    Ok(format!(
        "on {} again; {before} steps before, {after} since",
        holder.name
    ))
}
