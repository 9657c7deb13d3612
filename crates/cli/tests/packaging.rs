//! What the package puts on a host: its units, and its scripts as dpkg calls them.
//!
//! The scripts run as root in namespaces of their own, where no other process is, with programs of the test's own for
//! everything that they would change.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../packaging")
        .join(name)
}

fn unit(name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(packaging(name)).unwrap();
    let mut section = String::new();
    let mut lines = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.starts_with('[') {
            true => section = line.to_owned(),
            false if !line.is_empty() => lines.push(format!("{section} {line}")),
            false => {}
        }
    }
    lines
}

fn has(unit: &[String], line: &str) -> bool {
    unit.iter().any(|one| one == line)
}

#[test]
fn a_daemon_that_cannot_start_yet_is_never_given_up() {
    for name in ["godwit-agent.service", "godwit-controller.service"] {
        let unit = unit(name);
        // Five quick failures, as of an address that comes late, would leave the host's VMs off until a person comes.
        assert!(has(&unit, "[Unit] StartLimitIntervalSec=0"), "{name}");
        assert!(has(&unit, "[Service] Restart=always"), "{name}");
        let pause = unit
            .iter()
            .find_map(|line| line.strip_prefix("[Service] RestartSec="));
        let pause: u64 = pause.unwrap().parse().unwrap();
        assert!((1..=10).contains(&pause), "{name}: {pause} s");
        // Of systemd 254 and newer.
        assert!(!unit.iter().any(|line| line.contains("RestartSteps")));
    }
}

#[test]
fn guests_are_given_no_longer_than_systemd_gives_the_whole_shutdown() {
    let unit = unit("godwit-guests.service");
    let limit = unit
        .iter()
        .find_map(|line| line.strip_prefix("[Service] TimeoutStopSec="));
    let limit: u64 = limit.unwrap().parse().unwrap();
    // host.toml gives guests 1500 s at most, systemd the shutdown 1800 s.
    assert!((1501..1800).contains(&limit), "{limit}");
}

/// A host as the scripts see it.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    /// None where such a host cannot be made.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: the scripts are root's");
            return None;
        }
        let host = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        std::fs::create_dir(host.path("bin")).unwrap();
        std::fs::create_dir_all(host.path("etc/godwit")).unwrap();
        // By these some of the system's own programs are found.
        let copied = Command::new("cp")
            .args(["-a", "/etc/alternatives"])
            .arg(host.path("etc"))
            .status();
        assert!(copied.unwrap().success());
        host.program(
            "systemctl",
            "case $1 in is-active | is-enabled) exit 1 ;; esac",
        );
        for name in ["systemd-sysusers", "systemd-tmpfiles"] {
            host.program(name, "");
        }
        host.program("godwit", "");
        Some(host)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A program that notes how it is called.
    fn program(&self, name: &str, script: &str) {
        let file = self.path("bin").join(name);
        let called = self.path("called");
        let text = format!(
            "#!/bin/sh\necho \"{name} $*\" >>'{}'\n{script}\n",
            called.display()
        );
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Calls a script as dpkg does, in namespaces without any other process.
    fn call(&self, script: &str, arguments: &str) -> Output {
        self.call_with("", script, arguments)
    }

    fn call_with(&self, environment: &str, script: &str, arguments: &str) -> Output {
        let inside = format!(
            "mount -t tmpfs none /run && mkdir -p /run/systemd/system && mount --bind '{etc}' /etc \
             && PATH='{bin}':$PATH {environment} exec sh '{script}' {arguments}",
            etc = self.path("etc").display(),
            bin = self.path("bin").display(),
            script = packaging("debian").join(script).display(),
        );
        Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"])
            .arg(inside)
            .output()
            .unwrap()
    }

    fn called(&self, what: &str) -> bool {
        let called = std::fs::read_to_string(self.path("called")).unwrap_or_default();
        called.lines().any(|line| line == what)
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const ACTIVE: &str = "case $1 in is-enabled) exit 1 ;; esac";
const START: &str = "systemctl start godwit-agent.service";

#[test]
fn a_package_is_not_removed_while_a_vm_that_is_to_run_is_down() {
    let Some(host) = Host::new() else { return };
    host.program("systemctl", ACTIVE);
    host.program("godwit", "echo db; echo web");
    let refused = host.call("prerm", "remove");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(said(&refused).contains("are down: db web"), "{refused:?}");
    assert!(host.called("godwit agent on-record") && host.called(START));
    // An upgrade asks nobody.
    assert!(host.call("prerm", "upgrade").status.success());
    host.program("godwit", "");
    let removed = host.call("prerm", "remove");
    assert!(removed.status.success(), "{removed:?}");
}

#[test]
fn the_program_of_an_odd_prefix_is_asked_where_path_has_none() {
    let Some(host) = Host::new() else { return };
    host.program("systemctl", ACTIVE);
    host.program("godwit", "exit 127");
    host.program("godwit-of-prefix", "echo db");
    let program = host.path("bin").join("godwit-of-prefix");
    let environment = format!("GODWIT_PROGRAM='{}'", program.display());
    let refused = host.call_with(&environment, "prerm", "remove");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(said(&refused).contains("are down: db"), "{refused:?}");
}

#[test]
fn records_that_nobody_can_read_keep_the_package_and_a_broken_program_does_not() {
    let Some(host) = Host::new() else { return };
    host.program("godwit", "echo 'host.toml is not valid' >&2; exit 1");
    let refused = host.call("prerm", "remove");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(
        said(&refused).contains("host.toml is not valid"),
        "{refused:?}"
    );
    host.program("godwit", "exit 127");
    let removed = host.call("prerm", "remove");
    assert!(removed.status.success(), "{removed:?}");
}

#[test]
fn a_removal_that_was_called_off_starts_an_enabled_agent_again() {
    let Some(host) = Host::new() else { return };
    assert!(host.call("postinst", "abort-remove").status.success());
    assert!(!host.called(START), "it is not enabled");
    host.program("systemctl", "");
    assert!(host.call("postinst", "abort-remove").status.success());
    assert!(host.called(START));
    assert!(host.called("systemctl start godwit-controller.service"));
    assert!(!host.called("systemd-sysusers godwit.conf"));
}

#[test]
fn a_host_that_has_joined_and_whose_agent_is_not_enabled_is_told_so() {
    let Some(host) = Host::new() else { return };
    let is_told = |host: &Host| {
        let done = host.call("postinst", "configure");
        assert!(done.status.success(), "{done:?}");
        said(&done).contains("systemctl enable --now godwit-agent")
    };
    assert!(!is_told(&host), "it has not joined");
    std::fs::write(host.path("etc/godwit/host.toml"), "").unwrap();
    assert!(is_told(&host));
    host.program("systemctl", "");
    assert!(!is_told(&host), "it is enabled");
}
