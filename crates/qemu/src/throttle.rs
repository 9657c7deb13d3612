//! The plain way to slow a guest that writes faster than the link can follow: a CPU quota for each vCPU thread.
//!
//! Every vCPU gets a control group of its own below the one it is in, with a quota over a short period, so that it is
//! slowed evenly and never for long. Releasing moves the threads back and removes the groups; dropping does the same.
//! A throttled vCPU may hold QEMU's main lock while it waits, so release before QEMU is asked to stop. A process that
//! dies leaves the groups behind; its successor calls [`release_leftovers`]. Other threads are never slowed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The lowest percentage of one CPU that a vCPU can be left with.
pub const LOWEST_PERCENT: u8 = 5;
const PREFIX: &str = "godwit-throttle-";

/// Why a guest cannot be slowed. Never a reason to end a migration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ThrottleError {
    /// No control group hierarchy has the controller.
    #[error("this host offers no cpu controller, so the guest cannot be slowed")]
    NoController,
    /// A percentage out of range.
    #[error("a guest can be slowed to between {LOWEST_PERCENT} and 100 percent, not to {percent}")]
    Percent {
        /// What was asked for.
        percent: u8,
    },
    /// A control file could not be used.
    #[error("cannot use control group file {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// vCPUs with a quota.
#[derive(Debug)]
pub struct Throttle {
    hierarchy: Hierarchy,
    groups: Vec<Group>,
}

/// One vCPU thread, its own group, and the one it came from.
#[derive(Debug)]
struct Group {
    thread: i32,
    home: PathBuf,
    path: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    unified: bool,
}

impl Throttle {
    /// Leaves each of the threads with `percent` of one CPU.
    pub fn apply(threads: &[i32], percent: u8) -> Result<Throttle, ThrottleError> {
        check(percent)?;
        release_leftovers(threads)?;
        let hierarchy = hierarchy()?;
        // From here an early return drops what was made so far, which undoes it.
        let mut throttle = Throttle {
            hierarchy,
            groups: Vec::new(),
        };
        for &thread in threads {
            throttle.add(thread, percent)?;
        }
        Ok(throttle)
    }

    /// Changes the quota of all threads.
    pub fn set_percent(&self, percent: u8) -> Result<(), ThrottleError> {
        check(percent)?;
        self.groups
            .iter()
            .try_for_each(|group| self.hierarchy.set_quota(&group.path, percent))
    }

    /// Gives the threads their full speed back. Goes through all of them and reports the first failure.
    pub fn release(&mut self) -> Result<(), ThrottleError> {
        let mut outcome = Ok(());
        for group in std::mem::take(&mut self.groups) {
            let released = self
                .hierarchy
                .release(group.thread, &group.home, &group.path);
            outcome = outcome.and(released);
        }
        outcome
    }

    fn add(&mut self, thread: i32, percent: u8) -> Result<(), ThrottleError> {
        let home = self.hierarchy.group_of(thread)?;
        let path = home.join(format!("{PREFIX}{thread}"));
        fs::create_dir(&path).map_err(|source| ThrottleError::Io {
            path: path.clone(),
            source,
        })?;
        self.groups.push(Group {
            thread,
            home: home.clone(),
            path: path.clone(),
        });
        if self.hierarchy.unified {
            write(&path.join("cgroup.type"), "threaded")?;
            write(&home.join("cgroup.subtree_control"), "+cpu")?;
        }
        self.hierarchy.set_quota(&path, percent)?;
        self.hierarchy.enter(thread, &path)
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// Undoes what a process that died has left on these threads.
pub fn release_leftovers(threads: &[i32]) -> Result<(), ThrottleError> {
    let hierarchy = hierarchy()?;
    for &thread in threads {
        let group = hierarchy.group_of(thread)?;
        let ours = group
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with(PREFIX));
        if let (true, Some(home)) = (ours, group.parent()) {
            hierarchy.release(thread, home, &group)?;
        }
    }
    Ok(())
}

impl Hierarchy {
    fn group_of(&self, thread: i32) -> Result<PathBuf, ThrottleError> {
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

    fn enter(&self, thread: i32, group: &Path) -> Result<(), ThrottleError> {
        let file = if self.unified {
            "cgroup.threads"
        } else {
            "tasks"
        };
        write(&group.join(file), &thread.to_string())
    }

    fn set_quota(&self, group: &Path, percent: u8) -> Result<(), ThrottleError> {
        let (quota_us, period_us) = quota(percent);
        if self.unified {
            return write(&group.join("cpu.max"), &format!("{quota_us} {period_us}"));
        }
        // The quota first goes away: together with another period it could be out of the kernel's bounds.
        write(&group.join("cpu.cfs_quota_us"), "-1")?;
        write(&group.join("cpu.cfs_period_us"), &period_us.to_string())?;
        write(&group.join("cpu.cfs_quota_us"), &quota_us.to_string())
    }

    /// A thread that has ended needs no way back.
    fn release(&self, thread: i32, home: &Path, group: &Path) -> Result<(), ThrottleError> {
        match self.enter(thread, home) {
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

fn check(percent: u8) -> Result<(), ThrottleError> {
    if (LOWEST_PERCENT..=100).contains(&percent) {
        Ok(())
    } else {
        Err(ThrottleError::Percent { percent })
    }
}

/// Quota and period in microseconds: 10 ms, or longer where the quota would fall below the kernel's least, 1 ms.
fn quota(percent: u8) -> (u32, u32) {
    let percent = u32::from(percent.clamp(LOWEST_PERCENT, 100));
    let period_us = 100_000_u32.div_ceil(percent).max(10_000);
    (period_us * percent / 100, period_us)
}

fn hierarchy() -> Result<Hierarchy, ThrottleError> {
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
fn hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
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
fn group_in(table: &str, unified: bool) -> Option<&str> {
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

fn write(path: &Path, text: &str) -> Result<(), ThrottleError> {
    fs::write(path, text).map_err(|source| ThrottleError::Io {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn the_quota_stays_within_the_kernels_bounds() {
        assert_eq!(quota(100), (10_000, 10_000));
        assert_eq!(quota(37), (3_700, 10_000));
        assert_eq!(quota(10), (1_000, 10_000));
        assert_eq!(quota(5), (1_000, 20_000));
        assert!(
            (LOWEST_PERCENT..=100).all(|percent| quota(percent).0 >= 1_000),
            "1 ms is the least"
        );
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
    fn percentages_out_of_range_are_refused() {
        let error = Throttle::apply(&[], 4).expect_err("too slow").to_string();
        assert_eq!(
            error,
            "a guest can be slowed to between 5 and 100 percent, not to 4"
        );
    }

    fn spinner() -> Child {
        Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn()
            .expect("sh")
    }

    /// The kernel counts the periods in which it held the thread back; reading them in a loop is the only way to wait.
    fn wait_until_throttled(group: &Path) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let held_back = || {
            let counts = fs::read_to_string(group.join("cpu.stat")).expect("counts");
            counts.lines().any(|line| {
                line.strip_prefix("nr_throttled ")
                    .is_some_and(|count| count != "0")
            })
        };
        while !held_back() {
            assert!(Instant::now() < deadline, "never held back");
            std::thread::yield_now();
        }
    }

    fn throttled(thread: i32, percent: u8) -> Option<Throttle> {
        match Throttle::apply(&[thread], percent) {
            Ok(throttle) => Some(throttle),
            Err(error @ (ThrottleError::NoController | ThrottleError::Io { .. })) => {
                println!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_thread_is_slowed_and_comes_back_and_nothing_is_left() {
        let mut child = spinner();
        let thread = child.id() as i32;
        if let Some(mut throttle) = throttled(thread, 20) {
            let (home, group) = (
                throttle.groups[0].home.clone(),
                throttle.groups[0].path.clone(),
            );
            assert_eq!(
                throttle.hierarchy.group_of(thread).expect("its group"),
                group
            );
            wait_until_throttled(&group);
            throttle.set_percent(5).expect("another quota");
            throttle.set_percent(50).expect("another quota");
            throttle.release().expect("released");
            assert_eq!(
                throttle.hierarchy.group_of(thread).expect("its group"),
                home
            );
            assert!(!group.exists());
            throttle.release().expect("a second time is fine");
        }
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[test]
    fn what_a_dead_process_left_is_undone_by_the_next() {
        let mut child = spinner();
        let thread = child.id() as i32;
        if let Some(throttle) = throttled(thread, 20) {
            let (hierarchy, home) = (throttle.hierarchy.clone(), throttle.groups[0].home.clone());
            std::mem::forget(throttle);
            let again = Throttle::apply(&[thread], 30).expect("takes over");
            assert_eq!(again.groups[0].home, home);
            drop(again);
            assert_eq!(hierarchy.group_of(thread).expect("its group"), home);
        }
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[test]
    fn dropping_after_the_thread_has_ended_leaves_nothing() {
        let mut child = spinner();
        if let Some(throttle) = throttled(child.id() as i32, 20) {
            let group = throttle.groups[0].path.clone();
            child.kill().and_then(|()| child.wait()).expect("killed");
            drop(throttle);
            assert!(!group.exists());
        }
        let _ = child.kill().and_then(|()| child.wait());
    }
}
