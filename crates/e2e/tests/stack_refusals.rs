//! Input that is refused: one sentence that names what is wrong and where, the right exit code, the same stable code for
//! scripts and over REST, and nothing half-done left behind.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{
    CONTROLLER_SOCKET, Counter, HostPlan, Plan, SOON, Stack, names, site::HOST_STATE,
};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One lab for all cases. Host b has two migration ports and a port group on a bridge that it lacks.
static STACK: LazyLock<Mutex<Result<Stack, String>>> = LazyLock::new(|| {
    let join = ["--port-group", "dmz=vmbr0"].map(str::to_owned).to_vec();
    let a = HostPlan {
        join,
        ..HostPlan::default()
    };
    let b = HostPlan {
        join: ["--port-group", "dmz=vmbr9"].map(str::to_owned).to_vec(),
        config: "migration_ports = \"49500-49501\"".into(),
        ..HostPlan::default()
    };
    let plan = Plan {
        hosts: [a, b],
        ..Plan::default()
    };
    let stack = Stack::new("refusals", &plan);
    Mutex::new(stack.map_err(|error| format!("{error:#}")))
});

fn stack() -> MutexGuard<'static, Result<Stack, String>> {
    STACK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn up(stack: &Result<Stack, String>) -> Result<&Stack> {
    stack.as_ref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// Asks the controller's REST interface on its local socket; gives status and body.
fn rest(stack: &Stack, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
    let socket = stack.inside("controller", CONTROLLER_SOCKET)?;
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let body = body.to_string();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: godwit\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).context("no status line")?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no body")?;
    let body = serde_json::from_str(body).with_context(|| format!("no JSON: {body}"))?;
    Ok((status.parse()?, body))
}

/// Asks for a migration over REST, which must be refused with this status and code.
fn rest_refuses(stack: &Stack, vm: &str, to: &str, status: u16, code: &str) -> Result<()> {
    let path = format!("/v1/vms/{vm}/migrate");
    let answer = rest(stack, "POST", &path, &serde_json::json!({ "to": to }))?;
    ensure!(
        answer.0 == status && answer.1["code"] == code,
        "REST says {answer:?}, not {status} {code}"
    );
    Ok(())
}

fn migrate<'a>(vm: &'a str, to: &'a str) -> [&'a str; 5] {
    ["vm", "migrate", vm, "--to", to]
}

/// Neither memory nor QEMU, right or network device of a VM on a host.
fn nothing_left(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    stack.is_clean(vm, host)?;
    let devices = std::fs::read_dir(stack.inside(host, "/sys/class/net")?)?;
    let names = devices.flatten().map(|entry| entry.file_name());
    let ours = ["lo", "mgmt0", "mig0", "vm0", "vmbr0"];
    let others: Vec<_> = names
        .filter(|name| !ours.iter().any(|our| name == our))
        .collect();
    ensure!(others.is_empty(), "devices are left: {others:?}");
    Ok(())
}

#[test]
fn descriptions_that_are_wrong() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let good = "name = \"x\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/boot/x\"\n";
    for (from, to, words) in [
        ("vcpus", "vcpu", ["line 2", "vcpu"]),
        ("= 64", "= 63", ["memory_mib = 63", "even"]),
        ("\"/boot/x\"", "\"x\"", ["kernel", "absolute"]),
        ("\"x\"\nvcpus", "\"../x\"\nvcpus", ["line 1", "../x"]),
    ] {
        let file = stack.describe("wrong", &good.replace(from, to))?;
        let sentence = stack.refused("controller", &["vm", "create", &file], 2, "invalid-vm")?;
        names(&sentence, &words)?;
        ensure!(!sentence.contains('\n'), "more than a line: {sentence}");
    }
    let missing = ["vm", "create", "/nonexistent/x.toml"];
    let sentence = stack.refused("controller", &missing, 2, "invalid-vm")?;
    names(&sentence, &["/nonexistent/x.toml"])?;
    let wrong = serde_json::json!({"name": "x", "vcpu": 1});
    let (status, answer) = rest(stack, "POST", "/v1/vms", &wrong)?;
    ensure!(status == 400, "{status} {answer}");
    let show = ["vm", "show", "x"];
    stack
        .refused("controller", &show, 4, "unknown-vm")
        .map(drop)
}

#[test]
fn names_that_nobody_has() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    for (arguments, code) in [
        (&["vm", "show", "ghost"][..], "unknown-vm"),
        (&["vm", "migrate", "ghost", "--to", "b"], "unknown-vm"),
        (&["vm", "resolve", "ghost", "--run-on", "a"], "unknown-vm"),
        (&["host", "show", "ghost"], "unknown-host"),
        (&["host", "check", "ghost"], "unknown-host"),
        (&["host", "remove", "ghost"], "unknown-host"),
        (&["migration", "show", "ghost"], "unknown-migration"),
        (&["migration", "cancel", "ghost"], "unknown-migration"),
    ] {
        let sentence = stack.refused("controller", arguments, 4, code)?;
        names(&sentence, &["ghost"])?;
    }
    rest_refuses(stack, "ghost", "b", 404, "unknown-vm")
}

#[test]
fn moves_that_make_no_sense() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&Counter::flat("still", 64), "a")?;
    let sentence = stack.refused("controller", &migrate("still", "zz"), 4, "unknown-host")?;
    names(&sentence, &["zz"])?;
    rest_refuses(stack, "still", "zz", 404, "unknown-host")?;
    let sentence = stack.refused("controller", &migrate("still", "a"), 3, "wrong-state")?;
    names(&sentence, &["still", "host a"])?;
    let resolve = [
        "vm",
        "resolve",
        "still",
        "--run-on",
        "a",
        "--confirm-fenced",
        "b",
    ];
    let sentence = stack.refused("controller", &resolve, 3, "wrong-state")?;
    names(&sentence, &["still", "not in doubt"])?;

    stack.ok("controller", &["vm", "pause", "still"])?;
    let sentence = stack.refused("controller", &migrate("still", "b"), 3, "wrong-state")?;
    names(&sentence, &["still", "paused", "godwit vm resume still"])?;
    rest_refuses(stack, "still", "b", 409, "wrong-state")?;
    stack.ok("controller", &["vm", "resume", "still"])?;

    let id = stack.begin("still", "b", &["--max-bandwidth", "40"])?;
    stack.wait_precopy(&id)?;
    let sentence = stack.refused("controller", &migrate("still", "b"), 3, "already-migrating")?;
    names(&sentence, &["still", &id])?;
    rest_refuses(stack, "still", "b", 409, "already-migrating")?;
    stack.ok("controller", &["migration", "cancel", &id])?;
    let report = stack.ended("controller", &id)?;
    ensure!(report["outcome"] == "cancelled", "{report}");
    names(
        report["reason"].as_str().unwrap_or_default(),
        &["cancelled"],
    )?;
    let again = ["migration", "cancel", &id];
    let sentence = stack.refused("controller", &again, 3, "wrong-state")?;
    names(&sentence, &[&id, "over"])?;
    stack.runs_on("still", "a")?;
    stack.check_guest("still", "a")?;
    nothing_left(stack, "still", "b")?;
    stack.remove("still")
}

#[test]
fn a_host_without_room() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let hosts = stack.json("controller", &["host", "list"])?;
    let total = hosts[0]["memory_total_mib"].as_u64().context("memory")?;
    let mut guest = Counter::small("huge");
    guest.memory_mib = total * 2;
    let file = stack.describe_counter(&guest)?;
    stack.ok("controller", &["vm", "create", &file])?;
    let start = ["vm", "start", "huge", "--on", "b"];
    let sentence = stack
        .refused("controller", &start, 1, "out-of-memory")
        .or_else(|_| stack.refused("controller", &start, 3, "out-of-memory"))?;
    names(&sentence, &["huge", "host b", "MiB"])?;
    let anywhere = ["vm", "start", "huge"];
    stack.refused("controller", &anywhere, 3, "out-of-memory")?;
    nothing_left(stack, "huge", "b")?;
    stack.ok("controller", &["vm", "delete", "huge"]).map(drop)
}

/// Its VM process idles, and still knows what is damaged on its host's disk.
#[test]
fn a_vm_of_which_a_file_was_damaged_while_it_was_off_starts_again() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&Counter::small("damaged"), "a")?;
    for file in ["vm.json", "ownership"] {
        stack.ok("controller", &["vm", "stop", "damaged", "--force"])?;
        stack.until("it is off", SOON, || {
            Ok(stack.vm("damaged")?["state"] == "stopped")
        })?;
        let path = format!("{HOST_STATE}/vms/damaged/{file}");
        std::fs::write(stack.inside("a", &path)?, "noise")?;
        stack.until("its host says that it is damaged", SOON, || {
            let said = stack.json("controller", &["host", "list"])?;
            Ok(said.to_string().contains(&path))
        })?;
        stack.ok("controller", &["vm", "start", "damaged"])?;
        stack.wait_counts("damaged", "a")?;
    }
    stack.remove("damaged")
}

#[test]
fn bridges_that_do_not_exist() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let guest = Counter::small("net").with("[[nic]]\nport_group = \"dmz\"");
    let file = stack.describe_counter(&guest)?;
    stack.ok("controller", &["vm", "create", &file])?;
    let start = ["vm", "start", "net", "--on", "b"];
    let sentence = stack.refused("controller", &start, 3, "missing-bridge")?;
    names(&sentence, &["vmbr9", "host 'b'"])?;
    nothing_left(stack, "net", "b")?;
    stack.ok("controller", &["vm", "start", "net", "--on", "a"])?;
    stack.wait_passes("net", "a", 1)?;
    let sentence = stack.refused("controller", &migrate("net", "b"), 3, "missing-bridge")?;
    names(&sentence, &["vmbr9", "host 'b'", "ip link add"])?;
    rest_refuses(stack, "net", "b", 412, "missing-bridge")?;
    nothing_left(stack, "net", "b")?;
    stack.remove("net")
}

#[test]
fn kernels_that_are_missing_or_differ() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let text = "name = \"kernel\"\nvcpus = 1\nmemory_mib = 32\nkernel = \"/var/tmp/kernel\"\n";
    let file = stack.describe("kernel", text)?;
    stack.ok("controller", &["vm", "create", &file])?;
    let start = ["vm", "start", "kernel", "--on", "a"];
    let sentence = stack.refused("controller", &start, 3, "missing-file")?;
    names(&sentence, &["/var/tmp/kernel", "host 'a'"])?;
    nothing_left(stack, "kernel", "a")?;

    let image = godwit_testkit::guest::counter::build(&Counter::small("kernel").spec)?;
    std::fs::write(stack.inside("a", "/var/tmp/kernel")?, &image)?;
    stack.ok("controller", &start)?;
    stack.wait_passes("kernel", "a", 1)?;
    let sentence = stack.refused("controller", &migrate("kernel", "b"), 3, "missing-file")?;
    names(&sentence, &["/var/tmp/kernel", "host 'b'"])?;
    std::fs::write(
        stack.inside("b", "/var/tmp/kernel")?,
        [&image[..], b"x"].concat(),
    )?;
    let sentence = stack.refused("controller", &migrate("kernel", "b"), 3, "incompatible")?;
    names(&sentence, &["/var/tmp/kernel", "host 'b'"])?;
    rest_refuses(stack, "kernel", "b", 412, "incompatible")?;
    nothing_left(stack, "kernel", "b")?;
    std::fs::write(stack.inside("b", "/var/tmp/kernel")?, &image)?;
    stack.migrate("kernel", "b", &[])?;
    stack.remove("kernel")
}

#[test]
fn all_migration_ports_in_use() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&Counter::small("port"), "a")?;
    let bind = || {
        [49500, 49501]
            .map(|port| std::net::TcpListener::bind(("::", port)))
            .into_iter()
            .collect::<std::io::Result<Vec<_>>>()
    };
    let busy = stack.machine("b")?.in_network(bind)??;
    let sentence = stack.refused("controller", &migrate("port", "b"), 3, "port-in-use")?;
    names(&sentence, &["49500-49501", "host 'b'"])?;
    rest_refuses(stack, "port", "b", 409, "port-in-use")?;
    nothing_left(stack, "port", "b")?;
    drop(busy);
    stack.migrate("port", "b", &[])?;
    stack.remove("port")
}

#[test]
fn a_disk_that_cannot_go_along_is_refused_by_its_name() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let image = "/var/tmp/disk.img";
    std::fs::File::create(stack.inside("a", image)?)?.set_len(1 << 20)?;
    let chmod = stack
        .machine("a")?
        .command("chmod")
        .args(["666", image])
        .status()?;
    ensure!(chmod.success());
    let link = "/var/tmp/link.img";
    std::os::unix::fs::symlink(image, stack.inside("a", link)?)?;
    let disk = format!("[[disk]]\nname = \"root\"\npath = \"{link}\"");
    stack.start_counter(&Counter::small("disk").with(&disk), "a")?;
    let sentence = stack.refused("controller", &migrate("disk", "b"), 3, "not-migratable")?;
    names(&sentence, &["root", "disk", link, "symbolic link"])?;
    rest_refuses(stack, "disk", "b", 412, "not-migratable")?;
    nothing_left(stack, "disk", "b")?;
    let dry = ["vm", "migrate", "disk", "--to", "b", "--dry-run"];
    let ran = stack.run("controller", &dry)?;
    ensure!(ran.code == Some(3), "{ran:?}");
    stack.remove("disk")
}

#[test]
fn tokens_that_are_wrong_or_used() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let join = |token: &str| -> Vec<String> {
        let words = "--name c --config /var/tmp/c.toml --state-dir /var/tmp/c --no-start";
        let mut arguments = vec!["host".to_owned(), "join".to_owned(), token.to_owned()];
        arguments.extend(words.split(' ').map(str::to_owned));
        arguments
    };
    let refused = |token: &str, exit: i32, code: &str| {
        let arguments = join(token);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let sentence = stack.refused("client", &arguments, exit, code)?;
        ensure!(
            !stack.inside("client", "/var/tmp/c.toml")?.exists(),
            "a configuration is left"
        );
        Ok(sentence)
    };
    names(
        &refused("nonsense", 3, "bad-token")?,
        &["join token", "host add"],
    )?;
    let token = stack.token()?;
    let parts: Vec<&str> = token.split('.').collect();
    let [prefix, secret, fingerprint, address] = parts[..] else {
        anyhow::bail!("a token of another form: {token}");
    };
    // Another secret of the right form, then another CA's fingerprint.
    let wrong = format!("{prefix}.{fingerprint}.{fingerprint}.{address}");
    names(
        &refused(&wrong, 3, "bad-token")?,
        &["wrong, used or expired"],
    )?;
    let forged = format!("{prefix}.{secret}.{secret}.{address}");
    names(
        &refused(&forged, 1, "host-unreachable").or_else(|_| refused(&forged, 3, "bad-token"))?,
        &["CA"],
    )?;
    // The token itself was not used up by these.
    let arguments = join(&token);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    stack.ok("client", &arguments)?;
    std::fs::remove_file(stack.inside("client", "/var/tmp/c.toml")?)?;
    names(&refused(&token, 3, "bad-token")?, &["used"])?;
    stack.ok(
        "controller",
        &["host", "remove", "c", "--confirm-unreachable"],
    )?;
    Ok(())
}

#[test]
fn configurations_that_are_wrong() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let text = "name = \"c\"\nlisten = \"127.0.0.1:1\"\nmigration_address = [\"127.0.0.1\"]\n";
    let file = stack.describe("host", text)?;
    let check = ["host", "check", "--config", &file];
    let sentence = stack.refused("a", &check, 2, "invalid-request")?;
    names(&sentence, &["line 3", "migration_address"])?;
    ensure!(!sentence.contains('\n'), "more than a line: {sentence}");
    let missing = ["host", "check", "--config", "/nonexistent.toml"];
    let sentence = stack.refused("a", &missing, 2, "invalid-request")?;
    names(&sentence, &["/nonexistent.toml", "host join"])
}

#[test]
fn host_checks_name_their_remedies() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    let local = stack.run("a", &["host", "check"])?;
    let remote = stack.json("controller", &["host", "check", "a"])?;
    let checks = remote["checks"].as_array().context("no checks")?;
    for wanted in [
        "kernel",
        "userfaultfd",
        "qemu",
        "aes",
        "mtu",
        "clock",
        "ports",
        "bridges",
    ] {
        let found = checks.iter().any(|check| check["name"] == wanted);
        ensure!(
            found && local.stdout.contains(wanted),
            "no check of {wanted}"
        );
    }
    for check in checks {
        let silent = check["remedy"].as_str().unwrap_or_default().is_empty();
        ensure!(silent == (check["status"] == "ok"), "remedy of {check}");
    }
    ensure!(local.code == Some(0), "{local:?}");
    // Host b lacks a bridge that a port group names: that does not work.
    let b = stack.run("b", &["host", "check"])?;
    ensure!(b.code == Some(1), "{b:?}");
    names(&b.stdout, &["FAILED", "bridges", "vmbr9"])
}
