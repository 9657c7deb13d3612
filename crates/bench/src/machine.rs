//! The machine that a bench runs on: made warm, and described.
//!
//! A virtual machine's memory is given by its hypervisor at the first touch ever, so (nearly) all free memory is touched
//! once before anything is measured. Refuses: nothing; what cannot be found out is left out.

use anyhow::{Context as _, Result, ensure};
use godwit_testkit::touch;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Memory that is left alone when a machine is warmed.
const LEFT_ALONE_MIB: u64 = 2048;
/// Memory that is touched to see how fast it comes, at most.
const FIRST_TOUCH_MIB: u64 = 256;

/// Touches free memory, and what caches of files hold, which no run shall have to clear away; gives what was touched and
/// how fast.
pub fn warm_up() -> Result<Value> {
    let mib = free_mib()?;
    ensure!(mib > 0, "there is no available memory to speak of");
    let took = touch::anonymous(mib << 20, threads())?;
    let gb_per_s = (mib << 20) as f64 / 1e9 / took.as_secs_f64();
    Ok(json!({
        "what": "all available memory was touched once before measuring, since a hypervisor gives it at the first touch",
        "mib": mib,
        "gb_per_s": gb_per_s,
    }))
}

/// How fast memory that was free came, in GB/s: as it was found, and after it was made warm.
#[derive(Debug, Clone, Copy, Default)]
pub struct FirstTouch {
    pub found: f64,
    pub warm: f64,
}

/// Touches as much memory as a guest's destination will need, and some more, and gives it back, the same for every system
/// right before it moves. What a kernel has had free for seconds its hypervisor may have taken back (free page reporting);
/// without this whoever runs first after a pause would pay for that. A little is measured before and after.
pub fn warm_again(ram_mib: u32) -> Result<FirstTouch> {
    let found = first_touch()?;
    let ram_mib = u64::from(ram_mib);
    // A host that looks at this moment must find room for the guest, or it refuses the guest seconds later.
    let mib = (ram_mib * 5 / 4).min(free_mib()?.saturating_sub(ram_mib));
    if mib > 0 {
        touch::anonymous(mib << 20, threads())?;
    }
    let warm = first_touch()?;
    Ok(FirstTouch { found, warm })
}

/// GB/s at which all cores touch free memory: 256 MiB of it, less where there is less.
fn first_touch() -> Result<f64> {
    let bytes = free_mib()?.clamp(1, FIRST_TOUCH_MIB) << 20;
    let took = touch::anonymous(bytes, threads())?;
    Ok(bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
}

/// Memory that may be touched. A build leaves most of a machine's memory in caches, which are not free and yet available.
fn free_mib() -> Result<u64> {
    Ok(mem_mib("MemAvailable:")?.saturating_sub(LEFT_ALONE_MIB))
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What moves of disks run on.
pub fn describe_for_disks(programs: &Path) -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpu.lines().find_map(|line| line.strip_prefix("model name"));
    json!({
        "cpu": name.map(|name| name.trim_start_matches([' ', '\t', ':'])),
        "cores": threads(),
        "memory_mib": mem_mib("MemTotal:").ok(),
        "kernel": kernel_version(),
        "load_at_start": first_line("/proc/loadavg"),
        "godwit": version(&programs.join("godwit")),
        "qemu_storage_daemon": version(Path::new("/usr/bin/qemu-storage-daemon")),
        "qemu_img": version(Path::new("/usr/bin/qemu-img")),
    })
}

pub fn describe(programs: &Path, ten: Option<&Path>) -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpu.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(": ")?.1.to_owned())
    };
    let flags = field("flags").unwrap_or_default();
    let has = |flag: &str| flags.split(' ').any(|one| one == flag);
    let wanted = [
        "aes",
        "vaes",
        "vpclmulqdq",
        "avx512f",
        "vmx",
        "svm",
        "hypervisor",
    ];
    let found: Vec<&str> = wanted.into_iter().filter(|flag| has(flag)).collect();
    json!({
        "cpu": field("model name"),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "cpu_flags": found,
        "memory_mib": mem_mib("MemTotal:").ok(),
        "kernel": kernel_version(),
        "load_at_start": first_line("/proc/loadavg"),
        "congestion_control": first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
        "congestion_controls": first_line("/proc/sys/net/ipv4/tcp_available_congestion_control"),
        "socket_buffer_max_bytes": first_line("/proc/sys/net/core/wmem_max"),
        "transparent_huge_pages": first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "accelerator": "tcg",
        "godwit": version(&programs.join("godwit")),
        "qemu": version(Path::new("/usr/bin/qemu-system-x86_64")),
        "qemu_10": ten.and_then(version),
        "iperf3": version(Path::new("/usr/bin/iperf3")),
        "limits": crate::limits::explained(),
    })
}

/// CPU time of all cores since the machine booted, in the kernel's ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTime {
    all: u64,
    stolen: u64,
}

impl CpuTime {
    pub fn now() -> Option<Self> {
        Self::parse(&first_line("/proc/stat")?)
    }

    /// From the first line of `/proc/stat`, whose eighth number is what the hypervisor took for others.
    fn parse(line: &str) -> Option<Self> {
        let numbers = line.strip_prefix("cpu ")?.split_whitespace().take(8);
        let ticks: Vec<u64> = numbers.map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Self {
            all: ticks.iter().sum(),
            stolen: *ticks.get(7)?,
        })
    }

    /// The part of the time from `earlier` on that the hypervisor took.
    pub fn stolen_since(self, earlier: Self) -> f64 {
        let all = self.all.saturating_sub(earlier.all);
        self.stolen.saturating_sub(earlier.stolen) as f64 / all.max(1) as f64
    }
}

/// How many tasks have wanted to run at once in the last minute.
pub fn load() -> Option<f64> {
    first_line("/proc/loadavg")?.split(' ').next()?.parse().ok()
}

fn mem_mib(field: &str) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib: u64 = line
        .and_then(|line| line.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("no {field} in /proc/meminfo"))?;
    Ok(kib / 1024)
}

/// Without what a distribution adds.
fn kernel_version() -> Option<String> {
    let release = first_line("/proc/sys/kernel/osrelease")?;
    Some(release.split('-').next()?.to_owned())
}

fn first_line(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.to_owned())
}

fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_measured_before_and_after_it_is_made_warm() {
        let touched = warm_again(16).unwrap();
        assert!(
            touched.found > 0.0 && touched.warm.is_finite() && touched.warm > 0.0,
            "{touched:?}"
        );
    }

    #[test]
    fn what_the_hypervisor_took_is_the_eighth_number() {
        let before = CpuTime::parse("cpu  100 0 50 800 10 0 0 40 7 0").unwrap();
        let after = CpuTime::parse("cpu  200 0 100 810 10 0 0 80 9 0").unwrap();
        assert_eq!(after.stolen_since(before), 0.2);
        assert_eq!(after.stolen_since(after), 0.0);
        assert_eq!(CpuTime::parse("cpu  1 2 3"), None);
        assert_eq!(CpuTime::parse("cpu0 1 2 3 4 5 6 7 8"), None);
        assert!(CpuTime::now().is_some());
    }
}
