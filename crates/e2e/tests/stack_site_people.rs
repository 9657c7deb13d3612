//! What a person says and decides about a whole site, with real guests: a false word, two copies, a clone, a doubt, a host
//! that boots alone. Each case ends with one copy that counts on.

use anyhow::{Result, ensure};
use godwit_e2e::stack::site::HOST_STATE;
use godwit_e2e::stack::{Counter, KILL, LONG, Link, Plan, SOON, STOP, Stack, names};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Exit code of whatever shows that a VM is held twice.
const RUNNING_TWICE: i32 = 7;
/// An alarm comes this soon after the host that it is about was heard.
const ALARM_WITHIN: Duration = Duration::from_secs(5);

/// Cap that makes a move last, Mb/s.
const CAP: [&str; 2] = ["--max-bandwidth", "100"];
/// What each write and sync takes on a disk that gives a test time to act.
const SLOW_DISK: Duration = Duration::from_millis(300);

/// Whether the site has such an alarm about this host or VM.
fn has_alarm(site: &Value, kind: &str, of: &str) -> bool {
    let mut alarms = site["alarms"].as_array().into_iter().flatten();
    alarms.any(|alarm| alarm["alarm"] == kind && (alarm["host"] == of || alarm["vm"] == of))
}

/// Runs a VM that is on host b on host a, too: by a person who says that host b is off while only its cable was out.
fn double(stack: &Stack, vm: &str) -> Result<()> {
    stack.lab.cut_link("b", Link::Management)?;
    stack.wait_state(vm, "unreachable", SOON)?;
    stack.is_refused("controller", &["vm", "start", vm, "--on", "a"], &["b"])?;
    stack.ok("controller", &["host", "fenced", "b", "--yes"])?;
    stack.ok("controller", &["vm", "start", vm, "--on", "a"])?;
    stack.wait_passes(vm, "a", 1)?;
    stack.wait_passes(vm, "b", 1)?;
    ensure!(stack.copies(vm)? == 2, "it does not run twice");
    stack.lab.heal_link("b", Link::Management)?;
    Ok(())
}

/// Waits until host b is heard again; both alarms come within a time of it.
fn wait_alarms(stack: &Stack, vm: &str) -> Result<()> {
    stack.until("host b is heard", SOON, || {
        Ok(stack.site()?["hosts"]["b"] == "connected")
    })?;
    let heard = Instant::now();
    stack.until("both alarms are there", ALARM_WITHIN, || {
        let site = stack.site()?;
        let fenced = has_alarm(&site, "fenced-host-answered", "b");
        ensure!(fenced, "nobody says that host b was not off: {site}");
        Ok(has_alarm(&site, "running-twice", vm))
    })?;
    println!("  both alarms came {:?} after host b", heard.elapsed());
    Ok(())
}

/// What lists and commands say of a VM that hosts a and b hold.
fn is_shown_twice(stack: &Stack, vm: &str) -> Result<()> {
    let list = stack.run("controller", &["vm", "list", "--json"])?;
    ensure!(list.code == Some(RUNNING_TWICE), "{list:?}");
    let shown: Value = serde_json::from_str(&list.stdout)?;
    ensure!(shown[0]["spec"]["name"] == vm, "not the first: {shown}");
    ensure!(shown[0]["state"] == "running-twice", "{shown}");
    ensure!(
        shown[0]["copies"] == serde_json::json!(["a", "b"]),
        "{shown}"
    );
    let plain = stack.run("controller", &["vm", "list"])?;
    ensure!(plain.code == Some(RUNNING_TWICE), "{plain:?}");
    let first = plain
        .stdout
        .lines()
        .find(|line| line.contains(vm) || line.contains("aaa"));
    ensure!(
        first.is_some_and(|line| line.contains(vm)),
        "{}",
        plain.stdout
    );
    names(
        &plain.stderr,
        &["ALARM", vm, "hosts a (", " and b (", "--keep"],
    )?;
    let hosts = stack.run("controller", &["host", "list"])?;
    ensure!(hosts.code == Some(RUNNING_TWICE), "{hosts:?}");
    for command in [
        &["vm", "start", vm][..],
        &["vm", "migrate", vm, "--to", "a"],
    ] {
        let ran = stack.run("controller", command)?;
        ensure!(ran.code == Some(RUNNING_TWICE), "{command:?}: {ran:?}");
    }
    Ok(())
}

/// Waits until the older copy, on host b, stands still, with its memory; gives the passes that it made.
fn wait_paused(stack: &Stack, vm: &str) -> Result<u32> {
    stack.until("the copy on host b stands still", SOON, || {
        Ok(stack.vm_at(vm, "b")?["state"] == "paused")
    })?;
    let passes = stack.passes(vm, "b")?;
    stack.wait_passes(vm, "a", 2)?;
    ensure!(
        stack.passes(vm, "b")? == passes,
        "the paused copy counts on"
    );
    ensure!(stack.copies(vm)? == 2, "a copy was ended unasked");
    Ok(passes)
}

#[test]
fn of_a_vm_that_a_false_word_doubled_a_person_keeps_either_copy() -> Result<()> {
    let stack = Stack::new("site-twice", &Plan::default())?;
    stack.start_counter(&Counter::small("aaa"), "a")?;
    stack.start_counter(&Counter::small("web"), "b")?;
    for keep in ["b", "a"] {
        double(&stack, "web")?;
        wait_alarms(&stack, "web")?;
        let paused = wait_paused(&stack, "web")?;
        is_shown_twice(&stack, "web")?;
        let before = stack.passes("web", keep)?;
        stack.ok("controller", &["vm", "resolve", "web", "--keep", keep])?;
        stack.runs_on("web", keep)?;
        stack.wait_passes("web", keep, 2)?;
        stack.check_guest("web", keep)?;
        let after = stack.passes("web", keep)?;
        ensure!(
            after.wrapping_sub(before) < u32::MAX / 2,
            "{before} then {after}"
        );
        println!("  kept on {keep}: {before} passes, then {after}; host b stood at {paused}");
        let list = stack.run("controller", &["vm", "list"])?;
        ensure!(list.code == Some(0), "{list:?}");
        stack.check_guest("aaa", "a")?;
        if keep == "b" {
            continue;
        }
        let site = stack.site()?;
        ensure!(!has_alarm(&site, "running-twice", "web"), "{site}");
    }
    Ok(())
}

#[test]
fn an_old_copy_of_a_host_is_shown_and_the_living_guest_is_kept() -> Result<()> {
    let stack = Stack::new("site-old-claim", &Plan::default())?;
    stack.start_counter(&Counter::small("web"), "a")?;
    let copy = stack.dir().join("state-of-a");
    stack.copy_state("a", &copy)?;
    stack.migrate("web", "b", &[])?;
    stack.runs_on("web", "b")?;
    // A copy of the agent's present life shows as old once there were two more.
    for _ in 0..2 {
        stack.live_again("a")?;
    }
    stack.power_off("a")?;
    stack.put_state(&copy, "a")?;
    stack.start_daemon("a")?;
    stack.until("the site says whose copy is old", SOON, || {
        Ok(has_alarm(&stack.site()?, "old-copy", "a"))
    })?;
    stack.until("the VM is shown where it runs", SOON, || {
        let shown = stack.run("controller", &["vm", "show", "web", "--json"])?;
        let view: Value = serde_json::from_str(&shown.stdout)?;
        ensure!(stack.copies("web")? == 1, "an old copy was booted");
        Ok(view["state"] == "running-twice" || view["host"] == "b")
    })?;
    let list = stack.run("controller", &["vm", "list", "--json"])?;
    if list.code == Some(RUNNING_TWICE) {
        stack.ok("controller", &["vm", "resolve", "web", "--keep", "b"])?;
    }
    stack.wait_passes("web", "b", 2)?;
    ensure!(stack.vm_at("web", "b")?["state"] == "running");
    // What is left of the VM on the old copy is ended by name; the living guest is not.
    let stop = ["vm", "stop", "web", "--force", "--host", "a"];
    stack.ok("controller", &stop)?;
    ensure!(stack.copies("web")? == 1, "not one copy");
    // The way out that the alarm names.
    stack.power_off("a")?;
    stack.until("host a is missed", SOON, || {
        Ok(stack.site()?["hosts"]["a"] == "unreachable")
    })?;
    let remove = ["host", "remove", "a", "--confirm-unreachable"];
    stack.ok("controller", &remove)?;
    let view = stack.wait_state("web", "running", SOON)?;
    ensure!(view["host"] == "b", "{view}");
    stack.check_guest("web", "b").map(drop)
}

#[test]
fn a_host_that_answers_is_not_said_to_be_off() -> Result<()> {
    let stack = Stack::new("site-on", &Plan::default())?;
    stack.start_counter(&Counter::small("web"), "b")?;
    let unsure = stack.run("controller", &["host", "fenced", "b"])?;
    ensure!(unsure.code == Some(3), "{unsure:?}");
    names(&unsure.stderr, &["b powered off", "--yes"])?;
    let fenced = ["host", "fenced", "b", "--yes"];
    let sentence = stack.refused("controller", &fenced, 3, "wrong-state")?;
    names(&sentence, &["b", "answers"])?;
    let site = stack.site()?;
    ensure!(site["alarms"] == serde_json::json!([]), "{site}");
    // Its word counts: the VM that runs there starts nowhere else.
    let elsewhere = stack.run("controller", &["vm", "start", "web", "--on", "a"])?;
    ensure!(elsewhere.code != Some(0), "{elsewhere:?}");
    ensure!(stack.copies("web")? == 1, "not one copy");
    stack.runs_on("web", "b")?;
    stack.check_guest("web", "b").map(drop)
}

/// Waits until a clone says that it boots nothing, and why.
fn boots_nothing(stack: &Stack, vm: &str) -> Result<()> {
    stack.until("the clone says that it boots nothing", SOON, || {
        let listed = stack.json("client", &["vm", "list"])?.to_string();
        ensure!(stack.hypervisors(vm, "client")?.is_empty(), "it booted it");
        Ok(listed.contains("another machine has host a's certificate")
            && listed.contains("it boots nothing"))
    })
}

#[test]
fn a_clone_of_a_host_boots_nothing_and_says_so() -> Result<()> {
    let stack = Stack::new("site-clone", &Plan::default())?;
    stack.start_counter(&Counter::small("web"), "a")?;
    let copy = stack.dir().join("state-of-a");
    stack.copy_state("a", &copy)?;
    stack.start_clone("a", &copy)?;
    boots_nothing(&stack, "web")?;
    stack.wait_passes("web", "a", 2)?;
    ensure!(stack.copies("web")? == 1, "not one copy");
    // That the host is silent proves nothing, either.
    stack.power_off("a")?;
    stack.wait_state("web", "unreachable", SOON)?;
    stack.power_off("client")?;
    stack.start_daemon("client")?;
    boots_nothing(&stack, "web")?;
    stack.start_daemon("a")?;
    stack.wait_state("web", "running", LONG)?;
    boots_nothing(&stack, "web")?;
    stack.wait_passes("web", "a", 2)?;
    ensure!(stack.copies("web")? == 1, "not one copy");
    Ok(())
}

/// Waits until a host shows of its VMs that it waits for others, and with which command that ends.
fn waits_for_others(stack: &Stack, host: &str, vms: &[&str]) -> Result<()> {
    for vm in vms {
        stack.until(&format!("host {host} asks before it boots"), SOON, || {
            let view = stack.vm_at(vm, host)?;
            ensure!(stack.copies(vm)? == 0, "it was booted unasked");
            let note = view["note"].as_str().unwrap_or_default();
            Ok(view["state"] == "crashed" && note.contains("godwit host boot-alone"))
        })?;
    }
    Ok(())
}

#[test]
fn a_host_that_boots_alone_boots_what_waits_once_for_each_boot() -> Result<()> {
    let stack = Stack::new("site-alone", &Plan::default())?;
    stack.start_counter(&Counter::small("one"), "a")?;
    stack.start_counter(&Counter::small("two"), "a")?;
    stack.kill_daemon("controller")?;
    stack.power_off("b")?;
    for _ in 0..2 {
        stack.power_off("a")?;
        stack.start_daemon("a")?;
        waits_for_others(&stack, "a", &["one", "two"])?;
        let unsure = stack.run("a", &["host", "boot-alone"])?;
        ensure!(unsure.code == Some(3), "{unsure:?}");
        names(&unsure.stderr, &["no other host", "--yes"])?;
        waits_for_others(&stack, "a", &["one", "two"])?;
        stack.ok("a", &["host", "boot-alone", "--yes"])?;
        for vm in ["one", "two"] {
            stack.wait_passes(vm, "a", 1)?;
            ensure!(stack.copies(vm)? == 1, "not one copy of {vm}");
        }
    }
    for daemon in ["controller", "b"] {
        stack.start_daemon(daemon)?;
    }
    stack.wait_connected()?;
    for vm in ["one", "two"] {
        stack.runs_on(vm, "a")?;
    }
    Ok(())
}

/// Lets hosts a and b reach each other no more, on any network; both still reach the controller.
fn part(stack: &Stack) -> Result<()> {
    for (host, number) in [("a", 2), ("b", 1)] {
        let routes = format!(
            "ip route add blackhole 10.76.0.{number}/32 && ip route add blackhole 10.78.0.{number}/32 && \
             ip -6 route add blackhole fd76::{number}/128 && ip -6 route add blackhole fd78::{number}/128"
        );
        let mut command = stack.machine(host)?.command("sh");
        let done = command.args(["-c", &routes]).output()?;
        ensure!(done.status.success(), "{done:?}");
    }
    Ok(())
}

fn join(stack: &Stack) -> Result<()> {
    for host in ["a", "b"] {
        let flush = "ip route flush type blackhole && ip -6 route flush type blackhole";
        let mut command = stack.machine(host)?.command("sh");
        let done = command.args(["-c", flush]).output()?;
        ensure!(done.status.success(), "{done:?}");
    }
    Ok(())
}

/// Moves a VM from a to b and parts the two when b has promised and a is writing down that it gives.
fn leave_in_doubt(stack: &Stack, vm: &str) -> Result<()> {
    let id = stack.begin(vm, "b", &CAP)?;
    stack.wait_precopy(&id)?;
    let volume = stack.machine("a")?.volume(HOST_STATE)?;
    volume.change(|settings| settings.latency = SLOW_DISK);
    let record = stack.inside("b", HOST_STATE)?.join("vms").join(vm);
    stack.until("host b promises", LONG, || {
        let record = std::fs::read(record.join("ownership"))?;
        Ok(String::from_utf8_lossy(&record).contains("ready"))
    })?;
    part(stack)?;
    volume.change(|settings| settings.latency = Duration::ZERO);
    stack.wait_state(vm, "in-doubt", SOON).map(drop)
}

#[test]
fn a_doubt_is_settled_by_the_other_hosts_no_where_that_answers() -> Result<()> {
    let stack = Stack::new("site-doubt", &Plan::default())?;
    stack.start_counter(&Counter::flat("web", 64).slowed(800_000), "a")?;
    leave_in_doubt(&stack, "web")?;
    let list = stack.run("controller", &["vm", "list", "--json"])?;
    let shown: Value = serde_json::from_str(&list.stdout)?;
    let note = shown[0]["note"].as_str().unwrap_or_default();
    names(
        note,
        &["godwit vm resolve web --run-on a --confirm-fenced b"],
    )?;
    let resolve = [
        "vm",
        "resolve",
        "web",
        "--run-on",
        "a",
        "--confirm-fenced",
        "b",
    ];
    stack.ok("controller", &resolve)?;
    // Nobody's word was needed: the host that was called off said no, durably.
    let host = stack.json("controller", &["host", "show", "b"])?;
    ensure!(
        host["fenced"] == false && host["state"] == "connected",
        "{host}"
    );
    let claim = stack.vm_at("web", "b")?["claim"]["claim"].clone();
    ensure!(claim == "no", "host b may still take it: {claim}");
    stack.wait_state("web", "running", SOON)?;
    stack.wait_counts("web", "a")?;
    join(&stack)?;
    stack.runs_on("web", "a")?;
    stack.check_guest("web", "a")?;
    // It moves again once the two hosts have spoken about the handover that was settled.
    let record = stack.inside("a", HOST_STATE)?.join("vms/web/ownership");
    stack.until("the settled handover is confirmed", LONG, || {
        let record = std::fs::read(&record)?;
        Ok(!String::from_utf8_lossy(&record).contains("\"peer\""))
    })?;
    stack.until("the controller knows how the migration ended", LONG, || {
        let list = stack.json("controller", &["migration", "list"])?;
        let mut list = list.as_array().into_iter().flatten();
        Ok(list.all(|one| one["outcome"].is_string()))
    })?;
    stack.migrate("web", "b", &[])?;
    stack.runs_on("web", "b")?;
    stack.check_guest("web", "b").map(drop)
}

#[test]
fn a_hung_hypervisor_is_ended_by_a_forced_stop() -> Result<()> {
    let stack = Stack::new("site-hung", &Plan::default())?;
    stack.start_counter(&Counter::small("web"), "a")?;
    let machine = stack.machine("a")?;
    for restart in [false, true] {
        let [qemu] = &stack.hypervisors("web", "a")?[..] else {
            anyhow::bail!("not one copy");
        };
        machine.kill(qemu.pid_inside, STOP)?;
        if restart {
            let process = stack.vm_at("web", "a")?["vm_process_pid"].as_i64();
            machine.kill(i32::try_from(process.unwrap_or(0))?, KILL)?;
            // What is on its way to a process that dies is to be said again.
            stack.until("its agent has seen that it died", SOON, || {
                Ok(stack.vm_at("web", "a")?["vm_process_pid"].as_i64() != process)
            })?;
        }
        stack.ok("controller", &["vm", "stop", "web", "--force"])?;
        ensure!(stack.copies("web")? == 0, "it was not ended");
        stack.wait_state("web", "stopped", SOON)?;
        stack.ok("controller", &["vm", "start", "web", "--on", "a"])?;
        stack.wait_counts("web", "a")?;
    }
    Ok(())
}
