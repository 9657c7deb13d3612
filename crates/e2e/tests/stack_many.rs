//! Many hosts, and many VMs on one host: what one dead host holds up, and what polls, lists and a watch cost.
//!
//! Records and reports of VMs that are off are written to the host's disk as its own programs write them.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::site::HOST_STATE;
use godwit_e2e::stack::{Counter, LONG, Plan, SOON, Stack};
use godwit_ownership::{Action, Event, HostRecord, Qemu, VmCore};
use godwit_store::{VmStore, save_json};
use godwit_types::host_api::{REPORTS_DIR, SPEC_FILE};
use godwit_types::{Generation, HostName, VmName};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Hosts of the great site.
const HOSTS: u8 = 32;
/// VMs on record on one host.
const VMS: usize = 500;
/// Old reports of each.
const REPORTS: usize = 20;
/// For how long CPU time is counted.
const MEASURED: Duration = Duration::from_secs(20);
/// Agent and controller may together take as much CPU time, each second, as it takes to write and read the list this often
/// at that time, on a fast machine as on one that others slow down. It took 15 to 17 times where this was written, which
/// was 5 to 6 % of a core.
const LISTS: f64 = 25.0;

#[test]
fn of_32_hosts_a_dead_one_holds_up_its_own_vm_alone() -> Result<()> {
    let plan = Plan {
        more: HOSTS - 2,
        ..Plan::default()
    };
    let stack = Stack::new("many-hosts", &plan)?;
    let hosts = stack.hosts();
    let vms: Vec<String> = hosts.iter().map(|host| format!("vm-{host}")).collect();
    let all_at_once = |what: &(dyn Fn(&str, &str) -> Result<()> + Sync)| -> Result<()> {
        std::thread::scope(|scope| {
            let each = |(vm, host): (&'_ String, &'_ String)| {
                let (vm, host) = (vm.clone(), host.clone());
                scope.spawn(move || what(&vm, &host))
            };
            let begun: Vec<_> = vms.iter().zip(&hosts).map(each).collect();
            let ended = |one: std::thread::ScopedJoinHandle<'_, Result<()>>| {
                one.join().map_err(|_| anyhow::anyhow!("it panicked"))?
            };
            begun.into_iter().try_for_each(ended)
        })
    };
    // Each host has run its VM, so that it may hold it.
    all_at_once(&|vm, host| {
        let file = stack.describe_idle(vm)?;
        stack.ok("controller", &["vm", "create", &file])?;
        stack.ok("controller", &["vm", "start", vm, "--on", host])?;
        stack.ok("controller", &["vm", "stop", vm, "--force"])?;
        stack.wait_state(vm, "stopped", LONG).map(drop)
    })?;
    let (dead, lost) = (
        hosts.last().context("no host")?,
        vms.last().context("no VM")?,
    );
    stack.power_off(dead)?;
    stack.wait_state(lost, "unreachable", SOON)?;
    all_at_once(&|vm, host| {
        if host == dead {
            let words = [host, &format!("godwit host fenced {host}")];
            return stack.is_refused("controller", &["vm", "start", vm], &words);
        }
        stack.ok("controller", &["vm", "start", vm])?;
        stack.wait_state(vm, "running", LONG).map(drop)
    })?;
    ensure!(stack.vm(lost)?["state"] == "unreachable");
    let running: Result<Vec<usize>> = vms.iter().map(|vm| stack.copies(vm)).collect();
    ensure!(running?.iter().sum::<usize>() == vms.len() - 1);
    stack.ok("controller", &["host", "fenced", dead, "--yes"])?;
    stack.ok("controller", &["vm", "start", lost])?;
    stack.wait_state(lost, "running", LONG).map(drop)
}

/// Writes the record of a VM that is off and held by a host, as its VM process does.
fn write_record(state: &Path, vm: &VmName, host: &HostName) -> Result<()> {
    let mut store = VmStore::open(state, vm)?;
    let record = HostRecord::absent(vm.clone());
    let (mut core, mut actions) = VmCore::recover(record, host.clone(), Qemu::Dead)?;
    let mut granted = false;
    loop {
        let record = actions.into_iter().find_map(|action| match action {
            Action::Persist(record) => Some(record),
            _ => None,
        });
        actions = match record {
            Some(record) => {
                store.persist(&record)?;
                core.handle(Event::Persisted)
            }
            None if granted => return Ok(()),
            None => {
                granted = true;
                core.handle(Event::Granted {
                    generation: Generation(1),
                    expect: Generation(0),
                })
            }
        };
    }
}

/// Writes what a host has of many VMs that are off: their descriptions, records and reports, like those of `model`.
fn write_vms(stack: &Stack, host: &str, model: &str, migration: &str) -> Result<()> {
    let state = stack.inside(host, HOST_STATE)?;
    let dir = |vm: &str| state.join("vms").join(vm);
    let read =
        |path: &Path| -> Result<Value> { Ok(serde_json::from_slice(&std::fs::read(path)?)?) };
    let mut spec = read(&dir(model).join(SPEC_FILE))?;
    let report = dir(model)
        .join(REPORTS_DIR)
        .join(format!("{migration}.json"));
    let mut report = read(&report)?;
    for number in 0..VMS {
        let name = format!("off-{number:03}");
        write_record(&state, &VmName::new(&name)?, &HostName::new(host)?)?;
        spec["name"] = json!(name);
        report["vm"] = json!(name);
        save_json(&dir(&name).join(SPEC_FILE), &spec)?;
        std::fs::create_dir_all(dir(&name).join(REPORTS_DIR))?;
        for old in 0..REPORTS {
            let id = format!("old-{number:03}-{old:02}");
            report["id"] = json!(id);
            let path = dir(&name).join(REPORTS_DIR).join(format!("{id}.json"));
            std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
        }
    }
    Ok(())
}

/// CPU time that a process has used, user and system.
fn cpu_time(pid: i32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit(')').next().context("no name")?;
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.map(|text| text.parse::<u64>().unwrap_or(0)).sum();
    let each = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_millis(ticks * 1000 / each.max(1)))
}

/// CPU time of these machines' daemons.
fn cpu_times(stack: &Stack, daemons: &[&str]) -> Result<Vec<Duration>> {
    let of = |machine: &&str| cpu_time(stack.daemon_pid(machine).context("it does not run")?);
    daemons.iter().map(of).collect()
}

#[test]
fn polls_lists_and_a_watch_of_a_host_with_500_vms_take_little_cpu_time() -> Result<()> {
    let plan = Plan {
        in_memory: true,
        ..Plan::default()
    };
    let stack = Stack::new("many-vms", &plan)?;
    let busy = Counter::flat("busy", 64).slowed(800_000);
    stack.start_counter(&busy, "a")?;
    let report = stack.migrate("busy", "b", &[])?;
    let id = report["id"].as_str().context("no id")?;
    stack.kill_daemon("a")?;
    write_vms(&stack, "a", "busy", id)?;
    stack.start_daemon("a")?;
    stack.until("the controller knows all VMs", LONG, || {
        let list = stack.json("controller", &["vm", "list"])?;
        Ok(list.as_array().is_some_and(|list| list.len() == VMS + 1))
    })?;
    let daemons = ["a", "controller"];
    let mut watch = stack.spawn(
        "controller",
        &[
            "vm",
            "migrate",
            "busy",
            "--to",
            "a",
            "--max-bandwidth",
            "12",
        ],
    )?;
    stack.until("the migration copies", SOON, || {
        Ok(!stack.vm("busy")?["migration"].is_null())
    })?;
    let (before, began) = (cpu_times(&stack, &daemons)?, Instant::now());
    let (mut lists, mut yardstick) = (0, Duration::ZERO);
    while began.elapsed() < MEASURED {
        let list = stack.json("controller", &["vm", "list"])?;
        ensure!(list.as_array().is_some_and(|list| list.len() == VMS + 1));
        yardstick += written_and_read(&list)?;
        lists += 1;
        // One list each second is the load that is measured.
        std::thread::sleep(Duration::from_secs(1));
    }
    let (after, elapsed) = (cpu_times(&stack, &daemons)?, began.elapsed());
    ensure!(watch.try_wait()?.is_none(), "the watch ended meanwhile");
    watch.kill()?;
    watch.wait()?;
    let used: Vec<Duration> = before
        .iter()
        .zip(after)
        .map(|(from, to)| to - *from)
        .collect();
    let share = used.iter().sum::<Duration>().as_secs_f64() / elapsed.as_secs_f64();
    let times = share / (yardstick / lists).as_secs_f64();
    println!("  {lists} lists in {elapsed:?}: CPU time of {daemons:?}: {used:?}");
    let said = format!(
        "{:.1} % of a core, each second as much as {times:.1} times writing and reading the list",
        share * 100.0
    );
    println!("  {said}");
    ensure!(times < LISTS, "{said}");
    Ok(())
}

/// CPU time that it takes here and now to write the list and to read it.
fn written_and_read(list: &Value) -> Result<Duration> {
    let now = || -> Result<Duration> {
        Ok(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into()?)
    };
    let before = now()?;
    let read: Value = serde_json::from_slice(&serde_json::to_vec(list)?)?;
    ensure!(read == *list);
    Ok(now()?.saturating_sub(before))
}
