//! `godwit host check`: what this host has, lacks, and what to do about each.
//!
//! Reads, and makes nothing that stays; owns nothing. Refuses: nothing; whatever is missing is a finding with its remedy.

use crate::config::HostConfig;
use crate::manager::{self, GuestsUnit};
use crate::qemu_facts::{QemuFacts, QemuFactsError};
use crate::qemu_trial::GuestRun;
use crate::system::{Interface, KERNEL_MIN, System};
use crate::{
    check_datastores, check_groups, check_host, check_network, check_qemu, check_users, crypto, sys,
};
use godwit_rpc::pki::now_unix_s;
use godwit_types::certificate::{CertificateDates, CertificateStage};
use godwit_types::host::{Check, CheckStatus};
use std::net::IpAddr;

/// Clock error that a migration's logs can live with, us.
const CLOCK_ERROR_MAX_US: i64 = 1_000_000;

/// What the checks look at, gathered beforehand.
pub struct Inputs<'a> {
    pub config: &'a HostConfig,
    pub system: &'a System,
    /// QEMU, or why it told nothing.
    pub qemu: &'a Result<QemuFacts, QemuFactsError>,
    /// What came of a guest of ours under each accelerator.
    pub guests: &'a [GuestRun],
    pub interfaces: &'a [Interface],
    /// Addresses on the migration networks.
    pub migration_addresses: &'a [IpAddr],
    /// Features of the userfaultfd device, or why it cannot be used.
    pub userfaultfd: Result<(), String>,
    /// When this host's certificate was made and ends, or why that cannot be read.
    pub certificate: Result<CertificateDates, String>,
    pub guests_unit: GuestsUnit,
}

pub(crate) fn ok(name: &str, found: impl Into<String>) -> Check {
    check(name, CheckStatus::Ok, found, "")
}

/// Works, and could be better: nothing has to be done.
pub(crate) fn note(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(name, CheckStatus::Note, found, remedy)
}

pub(crate) fn warning(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(name, CheckStatus::Warning, found, remedy)
}

pub(crate) fn failed(name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(name, CheckStatus::Failed, found, remedy)
}

fn check(
    name: &str,
    status: CheckStatus,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> Check {
    Check {
        name: name.into(),
        status,
        found: found.into(),
        remedy: remedy.into(),
    }
}

/// Checks this host wholly, in the order in which people read the list.
pub fn run(inputs: &Inputs<'_>) -> Vec<Check> {
    let [common_user, vm_users] = check_users::check(inputs.system, inputs.config);
    let mut checks = vec![
        kernel(inputs.system),
        userfaultfd(&inputs.userfaultfd),
        qemu(inputs.qemu),
        common_user,
        vm_users,
        cpu(inputs.system),
        aes(inputs.system, inputs.config),
        check_network::mtu(
            inputs.interfaces,
            inputs.migration_addresses,
            inputs.config.is_joined(),
        ),
        clock(sys::clock_state()),
        check_network::ports(inputs.config, inputs.migration_addresses),
        huge_pages(inputs.system),
        check_network::socket_buffers(inputs.system),
        memory(inputs.system),
        check_groups::check(inputs.system, inputs.config),
        check_host::first_touch(inputs.system),
        check_host::room(inputs.config),
    ];
    if inputs.config.is_joined() {
        checks.push(certificate(&inputs.certificate, now_unix_s()));
        checks.push(check_network::listens(inputs.config.listen));
        checks.extend(manager::check(inputs.guests_unit));
        checks.extend(check_network::bridges(inputs.system, inputs.config));
        checks.extend(check_datastores::check(inputs.config));
    } else {
        checks.push(note(
            "configuration",
            "this host has not joined: looked at with what a host has by default",
            "get a command for it with 'godwit host add' where the controller runs",
        ));
    }
    checks.extend(check_host::closed(inputs.config));
    checks.extend(check_qemu::run(inputs.qemu, inputs.guests));
    checks
}

fn kernel(system: &System) -> Check {
    let found = format!("Linux {}", system.kernel());
    if system.kernel_is_new_enough() {
        return ok("kernel", found);
    }
    let (major, minor) = KERNEL_MIN;
    failed(
        "kernel",
        found,
        format!(
            "boot Linux {major}.{minor} or newer: dirty tracking needs its PAGEMAP_SCAN{}",
            newer_kernel(system)
        ),
    )
}

/// Where a distribution whose own kernel is too old has a newer one.
fn newer_kernel(system: &System) -> &'static str {
    let release = system.read("/etc/os-release").unwrap_or_default();
    match release
        .lines()
        .any(|line| line == "VERSION_CODENAME=bookworm")
    {
        true => {
            "; on Debian 12 add bookworm-backports to apt's sources, then 'apt-get update && apt-get install -t bookworm-backports linux-image-amd64' and reboot"
        }
        false => "",
    }
}

fn certificate(dates: &Result<CertificateDates, String>, now_unix_s: i64) -> Check {
    const RENEW: &str = "see why in the agent's log; or run 'godwit host add' where the controller is and 'godwit host renew TOKEN' here: this host's VMs run on";
    let dates = match dates {
        Ok(dates) => dates,
        Err(why) => {
            return failed(
                "certificate",
                why.clone(),
                "join a controller with 'godwit host join'",
            );
        }
    };
    let found = format!("this host's certificate {}", dates.left(now_unix_s));
    if dates.is_not_valid_yet(now_unix_s) {
        let found = format!("{found} and is not valid yet");
        return failed(
            "certificate",
            found,
            format!("see this host's clock; {RENEW}"),
        );
    }
    match dates.stage(now_unix_s) {
        CertificateStage::Fresh | CertificateStage::Due => ok("certificate", found),
        CertificateStage::NearEnd => {
            let found = format!("{found} and was not renewed");
            warning("certificate", found, RENEW)
        }
        CertificateStage::Ended => failed("certificate", found, RENEW),
    }
}

fn userfaultfd(usable: &Result<(), String>) -> Check {
    match usable {
        Ok(()) => ok(
            "userfaultfd",
            "/dev/userfaultfd usable, asynchronous write protection offered",
        ),
        Err(why) => failed(
            "userfaultfd",
            why.clone(),
            "run the agent as root on a kernel with CONFIG_USERFAULTFD and CONFIG_PTE_MARKER_UFFD_WP, and let it see /dev/userfaultfd",
        ),
    }
}

fn qemu(facts: &Result<QemuFacts, QemuFactsError>) -> Check {
    match facts {
        Err(error) => failed("qemu", error.to_string(), "apt-get install qemu-system-x86"),
        Ok(facts) if !facts.sandbox => failed(
            "qemu",
            format!("QEMU {} without its sandbox", facts.version),
            "use a QEMU built with seccomp, as the distributions' is",
        ),
        Ok(facts) => ok(
            "qemu",
            format!(
                "QEMU {} with its sandbox, {} machine types",
                facts.version,
                facts.machine_types.len()
            ),
        ),
    }
}

fn cpu(system: &System) -> Check {
    let flag = ["vmx", "svm"].into_iter().find(|flag| system.cpu_has(flag));
    match (flag, system.exists("/dev/kvm")) {
        (Some(flag), true) => ok("cpu", format!("{flag}: guests run under KVM")),
        (Some(flag), false) => warning(
            "cpu",
            format!("{flag}, but no /dev/kvm: guests run under TCG, 10 to 50 times slower"),
            "load the module kvm_intel or kvm_amd",
        ),
        (None, _) => warning(
            "cpu",
            "neither vmx nor svm: guests run under TCG, 10 to 50 times slower",
            "turn virtualisation on in the firmware, or nested virtualisation in the hypervisor",
        ),
    }
}

fn aes(system: &System, config: &HostConfig) -> Check {
    let speed = crypto::seal_gb_per_s().map_or_else(
        || "speed not measured".to_string(),
        |speed| format!("AES-256-GCM seals {speed:.1} GB/s on one core"),
    );
    if !config.encryption {
        return warning(
            "aes",
            format!("encryption is off in the configuration; {speed}"),
            "set encryption = true: VMs that require encryption cannot come here",
        );
    }
    match (system.cpu_has("aes"), system.cpu_has("vaes")) {
        (true, true) => ok("aes", format!("aes and vaes; {speed}")),
        (true, false) => ok("aes", format!("aes, no vaes; {speed}")),
        (false, _) => warning(
            "aes",
            format!("no aes instructions; {speed}"),
            "encrypted migrations will be limited by the CPU: expose the flag aes to this machine",
        ),
    }
}

fn clock(state: std::io::Result<sys::ClockState>) -> Check {
    let remedy = "run a time service (chrony or systemd-timesyncd)";
    match state {
        Err(error) => warning(
            "clock",
            format!("the kernel does not tell: {error}"),
            remedy,
        ),
        Ok(state) if state.synchronised && state.max_error_us < CLOCK_ERROR_MAX_US => ok(
            "clock",
            format!("synchronised within {} ms", state.max_error_us / 1000),
        ),
        Ok(_) => warning(
            "clock",
            "not synchronised: the two hosts' logs of a migration will not line up",
            remedy,
        ),
    }
}

fn huge_pages(system: &System) -> Check {
    let name = "huge-pages";
    match system.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled") {
        Some(text) if text.contains("[deny]") => warning(
            name,
            "shmem_enabled is 'deny': guest memory gets no huge pages",
            "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled ('never' still lets a mount ask)",
        ),
        Some(_) => ok(name, "tmpfs can use huge=within_size"),
        None => warning(
            name,
            "this kernel's tmpfs has no huge pages",
            "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        ),
    }
}

fn memory(system: &System) -> Check {
    let total = system.meminfo_mib("MemTotal").unwrap_or(0);
    match system.meminfo_mib("MemAvailable") {
        Some(free) => ok("memory", format!("{free} MiB of {total} MiB available")),
        None => warning("memory", "cannot read /proc/meminfo", "mount /proc"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::path::Path;

    pub(crate) fn config(ports: &str) -> HostConfig {
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:1\"\nmigration_addresses = [\"127.0.0.1\"]\nmigration_ports = \"{ports}\"\n[port_groups]\nvm = \"nobridge0\"\n"
        );
        HostConfig::parse(&text, Path::new("t")).unwrap()
    }

    #[test]
    fn an_old_kernel_fails_and_names_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("proc/sys/kernel")).unwrap();
        std::fs::write(dir.path().join("proc/sys/kernel/osrelease"), "6.1.0-21\n").unwrap();
        let found = kernel(&System::under(dir.path()));
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(found.remedy.contains("6.7") && !found.remedy.contains("backports"));
        let release = "NAME=Debian\nVERSION_CODENAME=bookworm\n";
        std::fs::create_dir_all(dir.path().join("etc")).unwrap();
        std::fs::write(dir.path().join("etc/os-release"), release).unwrap();
        let found = kernel(&System::under(dir.path()));
        assert!(
            found
                .remedy
                .contains("-t bookworm-backports linux-image-amd64")
        );
    }

    #[test]
    fn a_certificate_is_warned_of_before_it_ends() {
        let dates = CertificateDates {
            made_unix_s: 0,
            ends_unix_s: 600,
        };
        for (now, status) in [
            (300, CheckStatus::Ok),
            (450, CheckStatus::Ok),
            (550, CheckStatus::Warning),
            (600, CheckStatus::Failed),
        ] {
            let found = certificate(&Ok(dates), now);
            assert_eq!(found.status, status, "at {now}");
            let fine = status == CheckStatus::Ok;
            assert_eq!(found.remedy.contains("godwit host renew"), !fine);
        }
        let ahead = CertificateDates {
            made_unix_s: 300 * 86_400,
            ends_unix_s: 665 * 86_400,
        };
        let found = certificate(&Ok(ahead), 0);
        assert_eq!(found.status, CheckStatus::Failed);
        assert!(found.found.ends_with("not valid yet"), "{}", found.found);
        assert!(found.remedy.contains("clock"), "{}", found.remedy);
    }

    #[test]
    fn every_finding_that_is_not_ok_says_what_to_do() {
        let config = config("49500-49501");
        let qemu = Err(QemuFactsError::NoVersion {
            program: "q".into(),
            text: String::new(),
        });
        let dir = tempfile::tempdir().unwrap();
        let checks = run(&Inputs {
            config: &config,
            system: &System::under(dir.path()),
            qemu: &qemu,
            guests: &[],
            interfaces: &[],
            migration_addresses: &[],
            userfaultfd: Err("no device".into()),
            guests_unit: GuestsUnit::Inactive,
            certificate: Err("there is none".into()),
        });
        assert!(checks.len() >= 13);
        assert_eq!(checks[0].name, "kernel", "without it no VM starts");
        for check in checks {
            let fine = matches!(check.status, CheckStatus::Ok | CheckStatus::Note)
                || !check.remedy.is_empty()
                || check.name == "socket-buffers";
            assert!(fine, "{} has no remedy", check.name);
        }
    }
}
