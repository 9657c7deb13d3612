//! `godwit host check` of control groups: whether a guest that outruns its link can be slowed, and where VMs live.
//!
//! What counts is what a VM's own group has: the host's root may have every controller while a unit has none. Below
//! systemd a scope is asked for like a VM's, and given back at once. Refuses: nothing; what cannot be found out is said.

use crate::config::HostConfig;
use crate::evidence::qemu_pid;
use crate::scope::Scopes;
use crate::system::System;
use godwit_qemu::scope::{CGROUPS, SLICE, Scope};
use godwit_types::host::{Check, CheckStatus};
use std::path::Path;
use std::process::Command;

const NAME: &str = "cgroup-cpu";
/// Longest wait for systemd, seconds.
const TRIAL_S: &str = "10";
/// Says what the group that it runs in has.
const LOOK: &str = "cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/cgroup.controllers";

/// What was found of the host's control groups.
#[derive(Debug, Clone, Default)]
struct Found {
    /// Controllers of the second version's root; nothing where it is not mounted as systemd does.
    root: Option<String>,
    /// Whether the first version's cpu controller is mounted.
    first_version: bool,
    /// What a group such as a VM gets has, or why that is not known.
    given: Option<Result<String, String>>,
    /// VMs in scopes without the controller, and VMs outside of any.
    lacking: Vec<String>,
    outside: Vec<String>,
}

/// Looks, and asks systemd for a scope.
pub fn check(system: &System, config: &HostConfig) -> Check {
    judge(&look(system, config))
}

fn look(system: &System, config: &HostConfig) -> Found {
    let root = system.read("/sys/fs/cgroup/cgroup.controllers");
    let scopes = Scopes::default();
    let has_scopes = root.is_some() && scopes.are_there();
    let given = match (&root, has_scopes) {
        (None, _) => None,
        (Some(_), true) => Some(try_scope(&scopes)),
        (Some(_), false) => Some(own_group(system)),
    };
    let mut found = Found {
        root,
        first_version: system.exists("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
        given,
        ..Found::default()
    };
    if has_scopes {
        look_at_vms(config, &mut found);
    }
    found
}

fn look_at_vms(config: &HostConfig, found: &mut Found) {
    let entries = std::fs::read_dir(config.run_dir.join("vms"));
    for entry in entries.into_iter().flatten().flatten() {
        let Some(pid) = qemu_pid(&entry.path()) else {
            continue;
        };
        let vm = entry.file_name().to_string_lossy().into_owned();
        match Scope::of_process(Path::new(CGROUPS), &pid.to_string()) {
            Ok(None) => found.outside.push(vm),
            Ok(Some(scope)) if !has_cpu(&scope.controllers().unwrap_or_default().join(" ")) => {
                found.lacking.push(vm);
            }
            // It has ended meanwhile, or is as it should be.
            _ => {}
        }
    }
}

fn try_scope(scopes: &Scopes) -> Result<String, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root may ask systemd for a scope".into());
    }
    let tried = Command::new("timeout")
        .arg(TRIAL_S)
        .arg(&scopes.runner)
        .args(["--scope", "--quiet", "--collect", "--no-ask-password"])
        .arg(format!("--slice={SLICE}"))
        .args(["--property=Delegate=yes", "--", "sh", "-c", LOOK])
        .output();
    match tried {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or("it does not answer");
            Err(format!("systemd gives no scope: {last}"))
        }
        Err(error) => Err(format!("systemd cannot be asked for a scope: {error}")),
    }
}

/// Without systemd a VM lives in its agent's group, which is that of who asks in a machine that has only one.
fn own_group(system: &System) -> Result<String, String> {
    let table = system.read("/proc/self/cgroup").unwrap_or_default();
    let group = table.lines().find_map(|line| line.strip_prefix("0::"));
    let group = group.ok_or("this process is in no control group of version 2")?;
    let group = group.trim_end_matches('/');
    let path = format!("{CGROUPS}{group}/cgroup.controllers");
    system.read(&path).ok_or(format!("{path} cannot be read"))
}

fn has_cpu(controllers: &str) -> bool {
    controllers.split_whitespace().any(|name| name == "cpu")
}

fn judge(found: &Found) -> Check {
    let slowed = "a guest that writes faster than the link carries cannot be slowed";
    let warning = |what: String, remedy: &str| make(CheckStatus::Warning, what, remedy);
    let Some(root) = &found.root else {
        return match found.first_version {
            true => make(CheckStatus::Ok, "cgroup v1 cpu controller".into(), ""),
            false => warning(
                format!("no cpu controller of cgroups: {slowed}"),
                "mount cgroup v2 with the cpu controller at /sys/fs/cgroup",
            ),
        };
    };
    if !has_cpu(root) {
        return warning(
            format!("cgroup v2 without the cpu controller: {slowed}"),
            "boot without cgroup_disable=cpu, and with no cpu controller mounted as cgroup v1",
        );
    }
    match &found.given {
        Some(Err(why)) => warning(
            format!("whether guests can be slowed is not known: {why}"),
            "run this as root, and see 'systemctl status' and 'journalctl -b -u init.scope'",
        ),
        Some(Ok(given)) if !has_cpu(given) => warning(
            format!("a VM's control group gets only: {given}; {slowed}"),
            "let godwit-agent.service have Delegate=yes, or start the agent in a group with the cpu controller",
        ),
        _ => judge_vms(found),
    }
}

fn judge_vms(found: &Found) -> Check {
    let remedy = "systemctl restart godwit-agent; or move such a VM away and back: its next QEMU gets a scope";
    if !found.lacking.is_empty() {
        let vms = found.lacking.join(", ");
        let what = format!("no cpu controller in the scope of {vms}: they cannot be slowed");
        return make(CheckStatus::Warning, what, remedy);
    }
    if !found.outside.is_empty() {
        let vms = found.outside.join(", ");
        let what = format!("outside of a scope of their own, in the agent's unit: {vms}");
        return make(CheckStatus::Warning, what, remedy);
    }
    let what = "a VM's control group has the cpu controller of cgroup v2";
    make(CheckStatus::Ok, what.into(), "")
}

fn make(status: CheckStatus, found: String, remedy: &str) -> Check {
    Check {
        name: NAME.into(),
        status,
        found,
        remedy: remedy.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stock() -> Found {
        Found {
            root: Some("cpuset cpu io memory pids".into()),
            given: Some(Ok("cpuset cpu io memory pids".into())),
            ..Found::default()
        }
    }

    /// The root of a stock host has it, a unit there has not.
    #[test]
    fn a_controller_that_only_the_root_has_slows_nobody() {
        assert_eq!(judge(&stock()).status, CheckStatus::Ok);
        let plain = Found {
            given: Some(Ok("memory pids".into())),
            ..stock()
        };
        let check = judge(&plain);
        assert_eq!(check.status, CheckStatus::Warning);
        assert!(check.found.contains("cannot be slowed"), "{}", check.found);
        assert!(!check.remedy.is_empty());
    }

    #[test]
    fn what_is_not_known_is_not_ok() {
        let asked = Found {
            given: Some(Err("systemd gives no scope: refused".into())),
            ..stock()
        };
        let check = judge(&asked);
        assert_eq!(check.status, CheckStatus::Warning);
        assert!(check.found.contains("refused"), "{}", check.found);
    }

    #[test]
    fn vms_that_live_elsewhere_are_named() {
        for (found, words) in [
            (
                Found {
                    lacking: vec!["web".into()],
                    ..stock()
                },
                "scope of web",
            ),
            (
                Found {
                    outside: vec!["db".into(), "web".into()],
                    ..stock()
                },
                "agent's unit: db, web",
            ),
        ] {
            let check = judge(&found);
            assert_eq!(check.status, CheckStatus::Warning);
            assert!(check.found.contains(words), "{}", check.found);
        }
    }

    #[test]
    fn the_first_version_s_controller_is_enough() {
        let first = Found {
            first_version: true,
            ..Found::default()
        };
        assert_eq!(judge(&first).status, CheckStatus::Ok);
        assert_eq!(judge(&Found::default()).status, CheckStatus::Warning);
    }
}
