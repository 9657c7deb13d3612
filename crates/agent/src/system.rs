//! Reading what the kernel says of this machine: `/proc`, `/sys`, interfaces.
//!
//! Owns only the root under which the files are looked for (another one in tests). Refuses: nothing; what cannot be
//! read is absent.

use serde::Deserialize;
use std::net::IpAddr;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

/// Oldest kernel on which the dirty tracking works.
pub const KERNEL_MIN: (u32, u32) = (6, 7);

/// The machine, or a directory that looks like one.
#[derive(Debug, Clone)]
pub struct System {
    root: PathBuf,
}

/// One network interface of this host, as `ip -json` lists it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Interface {
    #[serde(rename = "ifname")]
    pub name: String,
    /// Largest packet, bytes.
    pub mtu: u32,
    #[serde(default)]
    addr_info: Vec<InterfaceAddress>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct InterfaceAddress {
    #[serde(default)]
    local: Option<IpAddr>,
    #[serde(default)]
    scope: String,
}

impl Interface {
    /// Addresses that other hosts can reach: no link-local ones.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addr_info
            .iter()
            .filter(|address| address.scope != "link")
            .filter_map(|address| address.local)
    }
}

impl Default for System {
    fn default() -> Self {
        Self { root: "/".into() }
    }
}

impl System {
    /// A machine whose files are under `root`.
    #[cfg(test)]
    pub fn under(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// A file's text without white space around it.
    pub fn read(&self, path: &str) -> Option<String> {
        let path = self.root.join(path.trim_start_matches('/'));
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().to_string())
    }

    /// Whether a file exists.
    pub fn exists(&self, path: &str) -> bool {
        self.root.join(path.trim_start_matches('/')).exists()
    }

    /// Names in a directory that are numbers.
    pub fn numbers_in(&self, path: &str) -> Vec<u32> {
        let path = self.root.join(path.trim_start_matches('/'));
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }

    /// Kernel release, such as `6.18.0`.
    pub fn kernel(&self) -> String {
        self.read("/proc/sys/kernel/osrelease").unwrap_or_default()
    }

    /// Whether the kernel has what the dirty tracking needs.
    pub fn kernel_is_new_enough(&self) -> bool {
        kernel_version(&self.kernel()).is_some_and(|version| version >= KERNEL_MIN)
    }

    /// A line of `/proc/meminfo`, MiB.
    pub fn meminfo_mib(&self, key: &str) -> Option<u64> {
        let text = self.read("/proc/meminfo")?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse().ok()?;
        Some(kib / 1024)
    }

    /// Whether the first CPU has this flag.
    pub fn cpu_has(&self, flag: &str) -> bool {
        let text = self.read("/proc/cpuinfo").unwrap_or_default();
        let flags = text.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|line| line.split_whitespace().any(|word| word == flag))
    }

    pub fn cpus(&self) -> u32 {
        let text = self.read("/proc/cpuinfo").unwrap_or_default();
        let count = text
            .lines()
            .filter(|line| line.starts_with("processor"))
            .count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Whether `name` is a bridge.
    pub fn is_bridge(&self, name: &str) -> bool {
        crate::config::is_interface_name(name)
            && self.exists(&format!("/sys/class/net/{name}/bridge"))
    }

    /// Whether an interface is there and switched off.
    pub fn is_down(&self, name: &str) -> bool {
        const IFF_UP: u32 = 1;
        if !crate::config::is_interface_name(name) {
            return false;
        }
        let flags = self.read(&format!("/sys/class/net/{name}/flags"));
        let flags =
            flags.and_then(|text| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok());
        flags.is_some_and(|flags| flags & IFF_UP == 0)
    }

    pub fn kernel_boot_id(&self) -> Option<String> {
        self.read("/proc/sys/kernel/random/boot_id")
    }
}

/// Major and minor number of a kernel release.
pub fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// This host's interfaces, asked of `ip`; `patience` bounds the wait.
pub async fn interfaces(patience: Duration) -> Vec<Interface> {
    let output = tokio::process::Command::new("ip")
        .args(["-json", "address", "show"])
        .kill_on_drop(true)
        .stdin(std::process::Stdio::null())
        .output();
    match tokio::time::timeout(patience, output).await {
        Ok(Ok(output)) => parse_interfaces(&output.stdout),
        _ => Vec::new(),
    }
}

pub(crate) fn parse_interfaces(json: &[u8]) -> Vec<Interface> {
    // `ip` leaves empty objects in its list for interfaces that it filtered.
    let list: Vec<serde_json::Value> = serde_json::from_slice(json).unwrap_or_default();
    list.into_iter()
        .filter_map(|item| serde_json::from_value(item).ok())
        .collect()
}

/// Milliseconds since 1970, UTC.
pub fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_read() {
        assert_eq!(kernel_version("6.18.0-cloud"), Some((6, 18)));
        assert_eq!(kernel_version("6.7-rc1"), Some((6, 7)));
        assert_eq!(kernel_version("x"), None);
        assert!(kernel_version("6.1.0") < Some(KERNEL_MIN));
    }

    #[test]
    fn link_local_addresses_are_left_out() {
        let json = br#"[{},{"ifname":"eth1","mtu":9000,"addr_info":[
            {"local":"10.0.0.1","scope":"global"},{"local":"fe80::1","scope":"link"}]}]"#;
        let found = parse_interfaces(json);
        assert_eq!(found.len(), 1);
        let addresses: Vec<IpAddr> = found[0].addresses().collect();
        assert_eq!(addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(parse_interfaces(b"nonsense"), []);
    }

    #[test]
    fn memory_and_flags_come_from_proc() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("proc")).unwrap();
        std::fs::write(
            dir.path().join("proc/meminfo"),
            "MemTotal: 2048 kB\nMemAvailable:  1048576 kB\n",
        )
        .unwrap();
        std::fs::write(
            dir.path().join("proc/cpuinfo"),
            "processor: 0\nflags : fpu aes\nprocessor: 1\n",
        )
        .unwrap();
        let system = System::under(dir.path());
        assert_eq!(system.meminfo_mib("MemAvailable"), Some(1024));
        assert!(system.cpu_has("aes") && !system.cpu_has("vmx"));
        assert_eq!(system.cpus(), 2);
        assert!(!system.kernel_is_new_enough());
    }
}
