//! Slows a guest that writes faster than the link can follow: a CPU quota for each vCPU thread, and what each did.
//!
//! Every vCPU gets a control group of its own below the one it is in, with a quota over a short period, so that it is
//! slowed evenly and never for long, and those that write more than others. Lifting takes the quotas away at once;
//! releasing also moves the threads back, which takes the kernel longer, and removes the groups; dropping does the same.
//! A throttled vCPU may hold QEMU's main lock while it waits, so lift before QEMU is asked to stop. A process that dies
//! leaves the groups behind; its successor calls [`release_leftovers_of`]. Where QEMU died with it nobody does: such a
//! group is in nobody's way, and is removed when the next guest is slowed. Other threads are never slowed: QEMU's word for
//! which threads its vCPUs are counts only for threads of its own.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

mod hierarchy;

use hierarchy::{Hierarchy, hierarchy, quota, write};

/// The lowest share of one CPU that a vCPU can be left with.
pub const LOWEST_SHARE: f64 = 0.05;
/// A share from here on is no limit.
const WHOLE_SHARE: f64 = 0.995;
const PREFIX: &str = "godwit-throttle-";
/// An empty group of this age is nobody's: between making one and entering it pass microseconds.
const ABANDONED: Duration = Duration::from_secs(60);

/// More vCPUs than any VM may have.
const THREADS_MAX: usize = 1024;

/// Why a guest cannot be slowed, as the rest of a sentence that says so. Never a reason to end a migration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ThrottleError {
    /// No control group hierarchy has the controller.
    #[error("this host offers no cpu controller")]
    NoController,
    /// The guest's own control group has no such controller.
    #[error("control group {group} has no cpu controller")]
    NotDelegated { group: PathBuf },
    /// QEMU names a thread that is none of its own, or one twice.
    #[error(
        "the hypervisor, process {process}, calls thread {thread} a vCPU, which is none of its own or is named twice"
    )]
    NotItsOwn { process: i32, thread: i32 },
    #[error("the hypervisor names {count} vCPUs, and no VM has more than {THREADS_MAX}")]
    TooMany { count: usize },
    /// A control file could not be used.
    #[error("cannot use control group file {path}: {source}")]
    Io {
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// vCPUs with a quota.
#[derive(Debug)]
pub struct Throttle {
    process: i32,
    hierarchy: Hierarchy,
    groups: Vec<Group>,
}

/// One vCPU thread, its own group, and the one it came from.
#[derive(Debug)]
struct Group {
    thread: i32,
    home: PathBuf,
    path: PathBuf,
    /// Quota and period in microseconds; none is no limit.
    quota: Option<(u32, u32)>,
}

/// What a thread has done since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThreadUse {
    /// Page faults that needed no disk. While guest RAM is tracked, a vCPU has one for each page that it writes first.
    pub faults: u64,
    pub cpu_ns: u64,
}

impl Throttle {
    /// Gives each of the threads of this process a group of its own, without a limit yet.
    pub fn prepare(process: i32, threads: &[i32]) -> Result<Throttle, ThrottleError> {
        check_threads(process, threads)?;
        release_leftovers(threads)?;
        let hierarchy = hierarchy()?;
        // From here an early return drops what was made so far, which undoes it.
        let mut throttle = Throttle {
            process,
            hierarchy,
            groups: Vec::new(),
        };
        for &thread in threads {
            throttle.add(thread)?;
        }
        throttle.remove_abandoned();
        Ok(throttle)
    }

    /// Leaves each thread its share of one CPU, in the order in which they were given; 1 is no limit, and nobody gets
    /// less than [`LOWEST_SHARE`].
    pub fn set_shares(&mut self, shares: impl Iterator<Item = f64>) -> Result<(), ThrottleError> {
        for (group, share) in self.groups.iter_mut().zip(shares) {
            let wanted = quota(share);
            if wanted != group.quota {
                self.hierarchy.set_quota(&group.path, wanted, group.quota)?;
                group.quota = wanted;
            }
        }
        Ok(())
    }

    /// Takes all limits away at once. Goes through all of them and reports the first failure.
    pub fn lift(&mut self) -> Result<(), ThrottleError> {
        let mut outcome = Ok(());
        for group in &mut self.groups {
            if let Some(set) = group.quota.take() {
                let lifted = self.hierarchy.set_quota(&group.path, None, Some(set));
                outcome = outcome.and(lifted);
            }
        }
        outcome
    }

    /// Gives the threads their full speed back. Goes through all of them and reports the first failure.
    pub fn release(&mut self) -> Result<(), ThrottleError> {
        let mut outcome = self.lift();
        for group in std::mem::take(&mut self.groups) {
            // One that has ended has left its group, and its number may be another's.
            let thread = Some(group.thread).filter(|thread| is_thread_of(self.process, *thread));
            let released = self.hierarchy.release(thread, &group.home, &group.path);
            outcome = outcome.and(released);
        }
        outcome
    }

    fn add(&mut self, thread: i32) -> Result<(), ThrottleError> {
        let home = self.hierarchy.group_of(thread)?;
        // A number passes to another thread once its own has ended: then that was another one's group.
        self.check_thread(thread)?;
        self.hierarchy.check(&home)?;
        let path = home.join(group_name(thread)?);
        match fs::create_dir(&path) {
            // Left by a thread that had this number before.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(|source| ThrottleError::Io {
                path: path.clone(),
                source,
            })?,
        }
        self.groups.push(Group {
            thread,
            home: home.clone(),
            path: path.clone(),
            quota: None,
        });
        if self.hierarchy.unified {
            write(&path.join("cgroup.type"), "threaded")?;
            write(&home.join("cgroup.subtree_control"), "+cpu")?;
        }
        self.hierarchy.set_quota(&path, None, None)?;
        self.hierarchy.enter(thread, &path)?;
        self.check_thread(thread).inspect_err(|_| {
            // Another one's: out of it again, unless it has ended, too.
            let _ = self.hierarchy.enter(thread, &home);
        })
    }

    fn check_thread(&self, thread: i32) -> Result<(), ThrottleError> {
        let process = self.process;
        match is_thread_of(process, thread) {
            true => Ok(()),
            false => Err(ThrottleError::NotItsOwn { process, thread }),
        }
    }

    /// Removes groups whose QEMU died together with the process that slowed it. The kernel refuses for one that is in use.
    fn remove_abandoned(&self) {
        let homes: BTreeSet<&PathBuf> = self.groups.iter().map(|group| &group.home).collect();
        let entries = homes.into_iter().filter_map(|home| fs::read_dir(home).ok());
        for entry in entries.flatten().flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
            let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
            if ours && age().is_some_and(|age| age > ABANDONED) {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// Refuses what QEMU says if it may not be true: it runs as another user than who throttles its threads.
pub fn check_threads(process: i32, threads: &[i32]) -> Result<(), ThrottleError> {
    let count = threads.len();
    if count > THREADS_MAX {
        return Err(ThrottleError::TooMany { count });
    }
    let mut seen = BTreeSet::new();
    for &thread in threads {
        if !seen.insert(thread) || !is_thread_of(process, thread) {
            return Err(ThrottleError::NotItsOwn { process, thread });
        }
    }
    Ok(())
}

fn is_thread_of(process: i32, thread: i32) -> bool {
    thread > 0 && PathBuf::from(format!("/proc/{process}/task/{thread}")).exists()
}

/// Thread numbers are a PID namespace's own while groups may be shared with others, so the name tells both.
fn group_name(thread: i32) -> Result<String, ThrottleError> {
    let path = PathBuf::from("/proc/self/ns/pid");
    match fs::metadata(&path) {
        Ok(namespace) => Ok(format!("{PREFIX}{}-{thread}", namespace.ino())),
        Err(source) => Err(ThrottleError::Io { path, source }),
    }
}

/// Undoes what a process that died has left on these threads. Goes through all of them and reports the first failure.
pub fn release_leftovers(threads: &[i32]) -> Result<(), ThrottleError> {
    let hierarchy = hierarchy()?;
    let mut outcome = Ok(());
    for &thread in threads {
        outcome = outcome.and(release_leftover(&hierarchy, thread));
    }
    outcome
}

fn release_leftover(hierarchy: &Hierarchy, thread: i32) -> Result<(), ThrottleError> {
    let group = match hierarchy.group_of(thread) {
        // One that has ended since they were listed has no limit any more.
        Err(ThrottleError::Io { source, .. }) if is_gone(&source) => return Ok(()),
        found => found?,
    };
    let ours = group
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with(PREFIX));
    if let (true, Some(home)) = (ours, group.parent()) {
        // First: it frees the thread also where it cannot be moved.
        let lifted = hierarchy.set_quota(&group, None, None);
        return hierarchy.release(Some(thread), home, &group).and(lifted);
    }
    Ok(())
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The same for all threads of a process.
pub fn release_leftovers_of(process: i32) -> Result<(), ThrottleError> {
    let path = PathBuf::from(format!("/proc/{process}/task"));
    let listed = fs::read_dir(&path).map_err(|source| ThrottleError::Io { path, source })?;
    let threads: Vec<i32> = listed
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    match release_leftovers(&threads) {
        // A host that cannot slow a guest has slowed none.
        Err(ThrottleError::NoController) => Ok(()),
        outcome => outcome,
    }
}

/// What one thread of another process has done so far.
pub fn thread_use(process: i32, thread: i32) -> io::Result<ThreadUse> {
    let base = PathBuf::from(format!("/proc/{process}/task/{thread}"));
    let stat = fs::read_to_string(base.join("stat"))?;
    let times = fs::read_to_string(base.join("schedstat"))?;
    let unreadable = || io::Error::new(io::ErrorKind::InvalidData, "a thread's figures");
    Ok(ThreadUse {
        faults: minor_faults_in(&stat).ok_or_else(unreadable)?,
        cpu_ns: times
            .split_whitespace()
            .next()
            .and_then(|text| text.parse().ok())
            .ok_or_else(unreadable)?,
    })
}

/// The tenth field; the second, the name, may hold spaces and brackets.
fn minor_faults_in(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn why_a_guest_is_not_slowed_is_said_once() {
        let group = PathBuf::from("/vm");
        for why in [
            ThrottleError::NoController,
            ThrottleError::NotDelegated { group },
        ] {
            let note = format!("the guest could not be slowed: {why}; see 'godwit host check'");
            assert_eq!(note.matches("slowed").count(), 1, "{note}");
            assert_eq!(note.matches("host check").count(), 1, "{note}");
        }
    }

    #[test]
    fn faults_are_read_whatever_the_thread_is_called() {
        let stat = "77 (CPU 0/TCG) 1) S 1 2 3 0 -1 4194368 1234 5 6 7 8 9";
        assert_eq!(minor_faults_in(stat), Some(1234));
        assert_eq!(minor_faults_in("77 (x"), None);
    }

    #[test]
    fn a_thread_that_touches_memory_has_faults_and_time() {
        // A link whose last part is this thread's number.
        let link = fs::read_link("/proc/thread-self").expect("this thread");
        let thread = link.file_name().and_then(|name| name.to_str());
        let thread = thread.and_then(|name| name.parse().ok()).expect("a number");
        let process = std::process::id() as i32;
        let before = thread_use(process, thread).expect("figures");
        let mut memory = vec![0_u8; 16 << 20];
        memory
            .iter_mut()
            .step_by(4096)
            .for_each(|byte| *byte = std::hint::black_box(1));
        let after = thread_use(process, thread).expect("figures");
        assert!(after.faults > before.faults, "{before:?} {after:?}");
        assert!(after.cpu_ns >= before.cpu_ns);
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

    fn throttled(thread: i32, share: f64) -> Option<Throttle> {
        let limited = Throttle::prepare(thread, &[thread]).and_then(|mut throttle| {
            throttle.set_shares([share].into_iter())?;
            Ok(throttle)
        });
        match limited {
            Ok(throttle) => Some(throttle),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    #[test]
    fn a_thread_is_slowed_and_comes_back_and_nothing_is_left() {
        let mut child = spinner();
        let thread = child.id() as i32;
        if let Some(mut throttle) = throttled(thread, 0.2) {
            let (home, group) = (
                throttle.groups[0].home.clone(),
                throttle.groups[0].path.clone(),
            );
            assert_eq!(
                throttle.hierarchy.group_of(thread).expect("its group"),
                group
            );
            wait_until_throttled(&group);
            for share in [0.05, 0.07, 0.5, 1.0, 0.3] {
                let shares = [share].into_iter();
                throttle.set_shares(shares).expect("another quota");
            }
            throttle.lift().expect("lifted");
            let file = if throttle.hierarchy.unified {
                "cpu.max"
            } else {
                "cpu.cfs_quota_us"
            };
            let quota = fs::read_to_string(group.join(file)).expect("the quota");
            assert!(quota.starts_with("-1") || quota.starts_with("max"));
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
    fn a_thread_of_another_process_is_not_slowed_whoever_calls_it_a_vcpu() {
        let mut child = spinner();
        let (qemu, this) = (child.id() as i32, std::process::id() as i32);
        let before = fs::read_to_string("/proc/self/cgroup").expect("this process's groups");
        for threads in [vec![this], vec![qemu, this], vec![qemu, 1], vec![0]] {
            let refused = Throttle::prepare(qemu, &threads).expect_err("not its own");
            let is_named = matches!(refused, ThrottleError::NotItsOwn { process, thread }
                if process == qemu && Some(&thread) == threads.last());
            assert!(is_named, "{threads:?}: {refused}");
        }
        for threads in [vec![qemu, qemu], vec![qemu; THREADS_MAX + 1]] {
            Throttle::prepare(qemu, &threads).expect_err("more than it has");
        }
        let after = fs::read_to_string("/proc/self/cgroup").expect("this process's groups");
        assert_eq!(before, after);
        if let Ok(hierarchy) = hierarchy() {
            for thread in [this, qemu] {
                let home = hierarchy.group_of(this).expect("its group");
                let group = home.join(group_name(thread).expect("a name"));
                assert!(!group.exists(), "{}", group.display());
            }
        }
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[test]
    fn a_number_that_passed_to_another_process_is_not_moved_with_the_vcpus() {
        let (mut child, mut other) = (spinner(), spinner());
        let thread = other.id() as i32;
        if let Some(mut throttle) = throttled(child.id() as i32, 0.2) {
            let home = throttle.hierarchy.group_of(thread).expect("its group");
            throttle.add(thread).expect_err("another's thread");
            // As if a vCPU of this number had ended.
            let path = home.join("godwit-throttle-nobody");
            throttle.groups[0].thread = thread;
            throttle.groups[0].home = path;
            let _ = throttle.release();
            assert_eq!(
                throttle.hierarchy.group_of(thread).expect("its group"),
                home
            );
            release_leftovers_of(child.id() as i32).expect("the vCPU is free");
        }
        for child in [&mut child, &mut other] {
            child.kill().and_then(|()| child.wait()).expect("killed");
        }
    }

    #[test]
    fn what_a_dead_process_left_is_undone_by_the_next() {
        let mut child = spinner();
        let thread = child.id() as i32;
        if let Some(throttle) = throttled(thread, 0.2) {
            let (hierarchy, home) = (throttle.hierarchy.clone(), throttle.groups[0].home.clone());
            std::mem::forget(throttle);
            let again = Throttle::prepare(thread, &[thread]).expect("takes over");
            assert_eq!(again.groups[0].home, home);
            drop(again);
            assert_eq!(hierarchy.group_of(thread).expect("its group"), home);
        }
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[test]
    fn a_thread_that_has_ended_does_not_keep_the_others_slowed() {
        let mut child = spinner();
        let thread = child.id() as i32;
        if let Some(throttle) = throttled(thread, 0.2) {
            let (hierarchy, home) = (throttle.hierarchy.clone(), throttle.groups[0].home.clone());
            std::mem::forget(throttle);
            release_leftovers(&[i32::MAX, thread]).expect("the first is gone");
            assert_eq!(hierarchy.group_of(thread).expect("its group"), home);
        }
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[test]
    fn a_group_left_by_a_dead_thread_of_the_same_number_is_no_obstacle() {
        let mut child = spinner();
        let thread = child.id() as i32;
        if let Some(throttle) = throttled(thread, 0.2) {
            let group = throttle.groups[0].path.clone();
            drop(throttle);
            fs::create_dir(&group)
                .expect("what QEMU and its VM process left when both were killed");
            let again = throttled(thread, 0.2).expect("slowed all the same");
            wait_until_throttled(&group);
            drop(again);
            assert!(!group.exists());
        }
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[test]
    fn a_thread_of_the_same_number_in_another_pid_namespace_has_another_group() {
        let own = group_name(1).expect("a name");
        assert!(own.starts_with(PREFIX) && own.ends_with("-1"), "{own}");
        let inside = Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "stat", "-Lc", "%i"])
            .arg("/proc/self/ns/pid")
            .output()
            .expect("unshare");
        if !inside.status.success() {
            println!("skipped: {}", String::from_utf8_lossy(&inside.stderr));
            return;
        }
        let inode = String::from_utf8(inside.stdout).expect("a number");
        assert_ne!(own, format!("{PREFIX}{}-1", inode.trim()));
    }

    #[test]
    fn dropping_after_the_thread_has_ended_leaves_nothing() {
        let mut child = spinner();
        if let Some(throttle) = throttled(child.id() as i32, 0.2) {
            let group = throttle.groups[0].path.clone();
            child.kill().and_then(|()| child.wait()).expect("killed");
            drop(throttle);
            assert!(!group.exists());
        }
        let _ = child.kill().and_then(|()| child.wait());
    }
}
