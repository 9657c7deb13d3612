//! The lab: hosts reach each other as they should, share nothing writable, and leave nothing behind.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use godwit_testkit::lab::{Lab, LabConfig, Link, Machine};
use godwit_testkit::link::LinkSpec;

fn lab(name: &str, change: impl FnOnce(&mut LabConfig)) -> Lab {
    let mut config = LabConfig {
        name: format!("{name}-{}", std::process::id()),
        ..LabConfig::default()
    };
    change(&mut config);
    Lab::new(config).expect("the lab is built")
}

/// Whether a TCP connection from one machine to another carries a word. A kernel may take seconds to notice that a device
/// has a carrier; until then it repeats what was lost, or says that there is no way to the host.
fn reaches(from: &Machine, to: &Machine, address: std::net::IpAddr) -> bool {
    reaches_within(from, to, address, Duration::from_secs(60))
}

/// Whether no connection gets through.
fn is_cut_off(from: &Machine, to: &Machine, address: std::net::IpAddr) -> bool {
    !reaches_within(from, to, address, Duration::from_secs(2))
}

fn reaches_within(
    from: &Machine,
    to: &Machine,
    address: std::net::IpAddr,
    within: Duration,
) -> bool {
    let listener = to
        .in_network(|| TcpListener::bind(SocketAddr::new(address, 0)))
        .unwrap()
        .expect("bind");
    let address = SocketAddr::new(address, listener.local_addr().unwrap().port());
    let deadline = Instant::now() + within;
    let mut stream = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let connect = || TcpStream::connect_timeout(&address, left);
        match from.in_network(connect).unwrap() {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(10)), // how often it looks
        }
    };
    stream.write_all(b"hello").unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    let mut word = [0; 5];
    accepted.read_exact(&mut word).is_ok() && &word == b"hello"
}

fn output(machine: &Machine, script: &str) -> String {
    let output = machine
        .command("sh")
        .args(["-c", script])
        .output()
        .expect("sh runs");
    assert!(
        output.status.success(),
        "{script}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn hosts_reach_each_other_on_both_networks_and_families() {
    let lab = lab("plain", |_| ());
    let (a, b, to) = (lab.host(0).unwrap(), lab.host(1).unwrap(), lab.addresses(1));
    for address in [to.management4, to.management6, to.migration4, to.migration6] {
        assert!(reaches(a, b, address), "{address}");
    }
    assert!(reaches(lab.controller().unwrap(), b, to.management6));
    assert!(
        is_cut_off(lab.client().unwrap(), b, to.migration4),
        "the client is not on the migration network"
    );
}

#[test]
fn a_router_joins_different_subnets_and_is_really_in_between() {
    let lab = lab("routed", |config| config.routed = true);
    let (a, b, to) = (lab.host(0).unwrap(), lab.host(1).unwrap(), lab.addresses(1));
    assert!(reaches(a, b, to.migration4) && reaches(a, b, to.migration6));
    let forwarding =
        "for f in ipv4/ip_forward ipv6/conf/all/forwarding; do echo 0 >/proc/sys/net/$f; done";
    output(lab.machine("router").unwrap(), forwarding);
    assert!(is_cut_off(a, b, to.migration4) && is_cut_off(a, b, to.migration6));
}

#[test]
fn a_tap_on_either_bridge_would_be_on_the_clients_network() {
    let lab = lab("bridge", |_| ());
    for index in 0..2 {
        let host = lab.host(index).unwrap();
        output(
            host,
            &format!("ip addr add 10.77.0.{}/24 dev vmbr0", index + 1),
        );
        let address = std::net::Ipv4Addr::new(10, 77, 0, index + 1);
        assert!(reaches(lab.client().unwrap(), host, address.into()));
    }
}

#[test]
fn links_are_cut_silenced_and_healed() {
    let lab = lab("cut", |_| ());
    let (a, b, to) = (lab.host(0).unwrap(), lab.host(1).unwrap(), lab.addresses(1));
    for (cut, carrier) in [(true, "0"), (false, "1")] {
        match cut {
            true => lab.cut_link("b", Link::Migration).unwrap(),
            false => lab.silence_link("b", Link::Migration).unwrap(),
        }
        assert_eq!(output(b, "cat /sys/class/net/mig0/carrier"), carrier);
        assert!(is_cut_off(a, b, to.migration4));
        assert!(
            reaches(a, b, to.management4),
            "the other network is untouched"
        );
        lab.heal_link("b", Link::Migration).unwrap();
        assert!(reaches(a, b, to.migration4));
        assert!(reaches(a, b, to.migration6));
    }
}

#[test]
fn the_migration_mtu_is_set_on_hosts() {
    let lab = lab("mtu", |config| config.migration_mtu = 9000);
    let show = "cat /sys/class/net/mig0/mtu /sys/class/net/mgmt0/mtu";
    assert_eq!(output(lab.host(0).unwrap(), show), "9000\n1500");
}

#[test]
fn nothing_writable_is_common_but_what_is_declared() {
    let shared = tempfile::tempdir().unwrap();
    let lab = lab("files", |config| {
        config.shared.push(shared.path().to_owned())
    });
    let (a, b) = (lab.host(0).unwrap(), lab.host(1).unwrap());
    for directory in ["/run", "/var/lib", "/etc/godwit", "/tmp", "/dev/shm"] {
        output(a, &format!("echo a >{directory}/probe"));
        assert_eq!(
            output(b, &format!("ls {directory} | grep -c probe || true")),
            "0",
            "{directory}"
        );
        assert!(
            !Path::new(directory).join("probe").exists(),
            "{directory} is not the machine's"
        );
    }
    assert_eq!(
        output(a, "touch /usr/probe /root/probe 2>&1 | grep -c 'Read-only'"),
        "2"
    );
    output(
        a,
        &format!("echo common >{}/probe", shared.path().display()),
    );
    assert_eq!(
        output(b, &format!("cat {}/probe", shared.path().display())),
        "common"
    );
    assert_eq!(output(b, "hostname"), "b");
}

#[test]
fn no_program_is_executed_from_run_as_on_hosts_that_mount_it_so() {
    let lab = lab("noexec", |_| ());
    let copied = |to: &str| format!("cp /bin/true {to}/program && {to}/program 2>&1; echo $?");
    let host = lab.host(0).unwrap();
    assert!(output(host, &copied("/run")).ends_with("126"));
    assert_eq!(output(host, &copied("/tmp")), "0");
}

#[test]
fn a_declared_directory_below_tmp_is_seen_and_not_written() {
    let seen = tempfile::tempdir().unwrap();
    std::fs::write(seen.path().join("kernel"), "bytes").unwrap();
    let lab = lab("seen", |config| config.visible.push(seen.path().to_owned()));
    let script = format!(
        "cat {0}/kernel; touch {0}/probe 2>&1 | grep -c 'Read-only'",
        seen.path().display()
    );
    assert_eq!(output(lab.host(0).unwrap(), &script), "bytes1");
}

#[test]
fn processes_are_separate_listed_and_killed_by_their_own_numbers() {
    let lab = lab("pids", |_| ());
    let (a, b) = (lab.host(0).unwrap(), lab.host(1).unwrap());
    let mut child = a
        .command("sleep")
        .arg("1000")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let processes = a.processes().unwrap();
    assert_eq!(processes.len(), 1);
    assert_eq!(processes[0].pid_outside, child.id() as i32);
    assert!(b.processes().unwrap().is_empty());
    a.kill(processes[0].pid_inside, libc::SIGKILL).unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()),
        Some(libc::SIGKILL)
    );
    // An orphan is reaped by the machine's first process: nothing of it stays, not even a zombie.
    output(a, "sh -c 'true & exec true'");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !a.processes().unwrap().is_empty() {
        assert!(Instant::now() < deadline, "{:?}", a.processes());
        std::thread::yield_now();
    }
}

#[test]
fn dropping_a_lab_kills_what_runs_in_it() {
    let lab = lab("drop", |_| ());
    let init = lab.host(0).unwrap().init_pid();
    let mut child = lab
        .host(0)
        .unwrap()
        .command("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let orphan: i32 = {
        output(lab.host(1).unwrap(), "sleep 1000 >/dev/null 2>&1 &");
        lab.host(1).unwrap().processes().unwrap()[0].pid_outside
    };
    let pids = [init, child.id() as i32, orphan];
    drop(lab);
    assert!(child.wait().is_err(), "the lab has collected it");
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid}");
    }
}

#[test]
fn a_kept_lab_is_opened_by_name_and_ended() {
    let mut first = lab("kept", |config| config.keep = true);
    let name = first.config().name.clone();
    let again = Lab::new(first.config().clone())
        .err()
        .expect("refused")
        .to_string();
    assert!(again.contains("exists already"), "{again}");
    let opened = Lab::open(&name).unwrap();
    assert_eq!(output(opened.host(1).unwrap(), "hostname"), "b");
    assert!(Lab::list().unwrap().contains(&name));
    drop(opened);
    assert_eq!(output(first.host(0).unwrap(), "hostname"), "a");
    first.end().unwrap();
    assert!(!Lab::list().unwrap().contains(&name));
    assert!(Lab::open(&name).is_err());
}

#[test]
fn senseless_labs_are_refused() {
    let changes: [fn(&mut LabConfig); 7] = [
        |config| config.hosts = 0,
        |config| config.migration_mtu = 100,
        |config| config.name = "../up".into(),
        |config| (config.hosts, config.routed) = (3, true),
        |config| config.migration_nics = 5,
        |config| (config.migration_nics, config.routed) = (2, true),
        |config| {
            config.link = Some(LinkSpec {
                loss_ppm: 1_000_001,
                ..LinkSpec::default()
            })
        },
    ];
    for change in changes {
        let mut config = LabConfig::default();
        change(&mut config);
        assert!(Lab::new(config).is_err());
    }
}
