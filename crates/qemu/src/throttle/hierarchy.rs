//! The kernel's CPU controller, version 1 or 2: where its groups are, how a thread enters one and gets a quota.
//!
//! Owns nothing. Refuses: a hierarchy that nobody passed the controller on to.

use super::{LOWEST_SHARE, ThrottleError, WHOLE_SHARE};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    mount: PathBuf,
    pub(super) unified: bool,
}

impl Hierarchy {
    /// A group has the controller only where whoever manages the groups above it has passed it on. Looked at each time:
    /// it comes and goes with other programs' groups.
    pub(super) fn check(&self, home: &Path) -> Result<(), ThrottleError> {
        let offered = || fs::read_to_string(home.join("cgroup.controllers")).unwrap_or_default();
        if !self.unified || offered().split_whitespace().any(|name| name == "cpu") {
            return Ok(());
        }
        let group = home.to_owned();
        Err(ThrottleError::NotDelegated { group })
    }

    pub(super) fn group_of(&self, thread: i32) -> Result<PathBuf, ThrottleError> {
        let path = PathBuf::from(format!("/proc/{thread}/cgroup"));
        let table =
            fs::read_to_string(&path).map_err(|source| ThrottleError::Io { path, source })?;
        // A path with ".." lies outside of what this process's namespace shows of the hierarchy.
        let visible = |group: &&str| !group.split('/').any(|part| part == "..");
        let group = group_in(&table, self.unified)
            .filter(visible)
            .ok_or(ThrottleError::NoController)?;
        Ok(self.mount.join(group.trim_start_matches('/')))
    }

    pub(super) fn enter(&self, thread: i32, group: &Path) -> Result<(), ThrottleError> {
        let file = if self.unified {
            "cgroup.threads"
        } else {
            "tasks"
        };
        write(&group.join(file), &thread.to_string())
    }

    /// `None` is no limit; `before` is what the group has.
    pub(super) fn set_quota(
        &self,
        group: &Path,
        wanted: Option<(u32, u32)>,
        before: Option<(u32, u32)>,
    ) -> Result<(), ThrottleError> {
        if self.unified {
            let text = match wanted {
                Some((quota_us, period_us)) => format!("{quota_us} {period_us}"),
                None => "max".to_owned(),
            };
            return write(&group.join("cpu.max"), &text);
        }
        let quota_file = group.join("cpu.cfs_quota_us");
        let Some((quota_us, period_us)) = wanted else {
            return write(&quota_file, "-1");
        };
        if before.is_none_or(|(_, period)| period != period_us) {
            // The quota first goes away: together with another period it could be out of the kernel's bounds.
            write(&quota_file, "-1")?;
            write(&group.join("cpu.cfs_period_us"), &period_us.to_string())?;
        }
        write(&quota_file, &quota_us.to_string())
    }

    /// A thread that has ended needs no way back.
    pub(super) fn release(
        &self,
        thread: Option<i32>,
        home: &Path,
        group: &Path,
    ) -> Result<(), ThrottleError> {
        match thread.map_or(Ok(()), |thread| self.enter(thread, home)) {
            Err(ThrottleError::Io { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => {
            }
            other => other?,
        }
        match fs::remove_dir(group) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(ThrottleError::Io {
                path: group.to_owned(),
                source,
            }),
            _ => Ok(()),
        }
    }
}

/// Quota and period in microseconds: 10 ms, or longer where the quota would fall below the kernel's least, 1 ms.
pub(super) fn quota(share: f64) -> Option<(u32, u32)> {
    if share >= WHOLE_SHARE {
        return None;
    }
    let share = share.max(LOWEST_SHARE);
    let period_us = (1000.0 / share).ceil().max(10_000.0);
    // Two steps of 5 ms, so that a small change of the share keeps the period.
    let period_us = (period_us / 5_000.0).ceil() * 5_000.0;
    Some(((period_us * share).round() as u32, period_us as u32))
}

pub(super) fn hierarchy() -> Result<Hierarchy, ThrottleError> {
    let path = PathBuf::from("/proc/self/mountinfo");
    let mounts = fs::read_to_string(&path).map_err(|source| ThrottleError::Io { path, source })?;
    let candidates = hierarchies(&mounts).into_iter();
    let usable = |h: &Hierarchy| {
        let controllers =
            || fs::read_to_string(h.mount.join("cgroup.controllers")).unwrap_or_default();
        !h.unified
            || controllers()
                .split_whitespace()
                .any(|controller| controller == "cpu")
    };
    candidates
        .filter(usable)
        .max_by_key(|h| h.unified)
        .ok_or(ThrottleError::NoController)
}

/// Mounted hierarchies that may have the controller. The fields after " - " are type, source and options.
pub(super) fn hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
    let read = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let mount = PathBuf::from(place.split(' ').nth(4)?);
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1).unwrap_or_default());
        let (unified, legacy) = (
            name == "cgroup2",
            name == "cgroup" && options.split(',').any(|o| o == "cpu"),
        );
        (unified || legacy).then_some(Hierarchy { mount, unified })
    };
    mountinfo.lines().filter_map(read).collect()
}

/// The thread's group in the table of `/proc/PID/cgroup`: lines of `number:controllers:path`.
pub(super) fn group_in(table: &str, unified: bool) -> Option<&str> {
    table.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let ours = if unified {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|c| c == "cpu")
        };
        ours.then_some(path)
    })
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), ThrottleError> {
    fs::write(path, text).map_err(|source| ThrottleError::Io {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_stays_within_the_kernels_bounds() {
        assert_eq!(quota(1.0), None);
        assert_eq!(quota(0.37), Some((3_700, 10_000)));
        assert_eq!(quota(0.1), Some((1_000, 10_000)));
        assert_eq!(quota(0.05), Some((1_000, 20_000)));
        assert_eq!(quota(0.0), quota(LOWEST_SHARE));
        let shares = (0..1000).map(|share| quota(f64::from(share) / 1000.0));
        for (quota_us, period_us) in shares.flatten() {
            assert!(quota_us >= 1_000, "1 ms is the least");
            assert!(quota_us < period_us && period_us <= 20_000);
        }
    }

    #[test]
    fn tables_are_read() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
            31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            32 25 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
        let want = [
            ("/sys/fs/cgroup/unified", true),
            ("/sys/fs/cgroup/cpu,cpuacct", false),
        ];
        assert_eq!(
            hierarchies(mounts),
            want.map(|(mount, unified)| Hierarchy {
                mount: mount.into(),
                unified
            })
        );
        let table = "3:cpuset:/a\n2:cpu,cpuacct:/b:c\n0::/d\n";
        assert_eq!(
            (group_in(table, false), group_in(table, true)),
            (Some("/b:c"), Some("/d"))
        );
    }

    #[test]
    fn a_group_without_the_controller_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let hierarchy = Hierarchy {
            mount: dir.path().to_owned(),
            unified: true,
        };
        fs::write(dir.path().join("cgroup.controllers"), "memory pids").expect("written");
        let error = hierarchy.check(dir.path()).expect_err("no cpu there");
        let named = dir.path().display().to_string();
        assert!(error.to_string().contains(&named), "{error}");
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory").expect("written");
        hierarchy.check(dir.path()).expect("it has come");
    }
}
