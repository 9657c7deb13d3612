//! The Linux test guest: the distribution's cloud kernel and an initramfs with Redis and our probe.
//!
//! Everything comes from files of this machine: the kernel that `scripts/install-deps.sh` unpacked, busybox,
//! redis-server with the libraries it is linked against, and the `guest-probe` program of this crate. The archive is
//! put together in memory each time and written only if it differs, so an unchanged image keeps its time and a
//! changed input is never missed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cpio::Archive;

/// Kernel modules that the guest needs where the kernel does not have them built in; dependencies follow by
/// themselves. One that a distribution does not have is left out.
const MODULES: [&str; 7] = [
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "button",
    "evdev",
    "pvpanic-pci",
    "pvpanic-mmio",
];
/// Modules that bring the power key of a machine with ACPI.
const POWER_KEY: [&str; 2] = ["button", "evdev"];
const APPLETS: [&str; 17] = [
    "sh", "mount", "insmod", "ip", "cat", "echo", "ls", "ps", "dmesg", "free", "top", "sleep",
    "ping", "ping6", "kill", "nc", "poweroff",
];

/// Where the image lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinuxGuest {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

/// Addresses of the guest, for its kernel command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestNetwork {
    /// IPv4 address with prefix length, such as `10.77.0.10/24`.
    pub ip4: Option<String>,
    /// IPv6 address with prefix length, such as `fd77::10/64`.
    pub ip6: Option<String>,
}

/// The kernel command line: quick under emulation, console on the first serial port.
pub fn command_line(network: &GuestNetwork) -> String {
    let mut line =
        "console=ttyS0 quiet loglevel=3 panic=-1 nokaslr mitigations=off random.trust_cpu=on \
                    cryptomgr.notests raid=noautodetect tsc=reliable no_timer_check net.ifnames=0"
            .to_owned();
    for (name, value) in [("ip4", &network.ip4), ("ip6", &network.ip6)] {
        if let Some(value) = value {
            line.push_str(&format!(" godwit.{name}={value}"));
        }
    }
    line
}

/// The build directory that the running program lies in (`target`), where guests and caches are kept.
pub fn target_dir() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot tell where this program lies")?;
    let profile = program
        .ancestors()
        .find(|path| path.ends_with("release") || path.ends_with("debug"));
    let target = profile
        .and_then(Path::parent)
        .context("this program does not lie in a cargo target directory")?;
    Ok(target.to_owned())
}

impl LinuxGuest {
    /// The image made earlier by [`build`]; says how to make it when it is not there.
    pub fn find(target: &Path) -> Result<Self> {
        let guest = Self::at(target);
        if guest.kernel.exists() && guest.initrd.exists() {
            return Ok(guest);
        }
        bail!(
            "no Linux guest under {}, make it with: cargo run --release --bin guest-image",
            target.display()
        )
    }

    fn at(target: &Path) -> Self {
        let directory = target.join("guests/linux");
        Self {
            kernel: directory.join("vmlinuz"),
            initrd: directory.join("initrd"),
        }
    }
}

/// Makes kernel and initramfs under `target/guests/linux`. `probe` is the built `guest-probe` program.
pub fn build(target: &Path, probe: &Path) -> Result<LinuxGuest> {
    let (kernel, modules) = unpacked(target)?;
    let guest = LinuxGuest::at(target);
    std::fs::create_dir_all(target.join("guests/linux"))?;
    write_if_changed(&guest.kernel, &read(&kernel)?)?;
    write_if_changed(&guest.initrd, &initramfs(&modules, probe)?)?;
    Ok(guest)
}

/// The kernel that was unpacked, and the directory of its modules.
fn unpacked(target: &Path) -> Result<(PathBuf, PathBuf)> {
    let dir = target.join("guests/kernel");
    let version = std::fs::read_to_string(dir.join("version"))
        .context("no guest kernel unpacked, run scripts/install-deps.sh first")?;
    let version = version.trim();
    let kernel = dir.join(format!("boot/vmlinuz-{version}"));
    Ok((kernel, dir.join("lib/modules").join(version)))
}

/// Adds the modules that bring the power key, in `modules`, with their loading order in `modules/order`.
pub fn add_power_key(archive: &mut Archive, target: &Path) -> Result<()> {
    archive.directory("modules");
    add_modules(archive, &unpacked(target)?.1, &POWER_KEY)
}

fn initramfs(modules: &Path, probe: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "proc", "sys", "tmp", "etc", "modules"] {
        archive.directory(directory);
    }
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, include_bytes!("init.sh"));
    archive.file("bin/busybox", 0o755, &read(Path::new("/bin/busybox"))?);
    for applet in APPLETS {
        archive.symlink(&format!("bin/{applet}"), "busybox");
    }
    add_modules(&mut archive, modules, &MODULES)?;
    let redis = Path::new("/usr/bin/redis-server")
        .canonicalize()
        .context("redis-server is not installed")?;
    add_program(&mut archive, "bin/redis-server", &redis)?;
    add_program(&mut archive, "bin/guest-probe", probe)?;
    add_libraries(&mut archive, &[&redis, probe])?;
    Ok(archive.finish())
}

/// Adds a program without its debugging information, which would only fill the guest's memory.
fn add_program(archive: &mut Archive, path: &str, program: &Path) -> Result<()> {
    let output = Command::new("strip")
        .args(["-o", "/dev/stdout"])
        .arg(program)
        .output()
        .ok()
        .filter(|output| output.status.success() && output.stdout.starts_with(b"\x7fELF"));
    let content = match output {
        Some(output) => output.stdout,
        None => read(program)?,
    };
    archive.file(path, 0o755, &content);
    Ok(())
}

/// Adds every library that the programs load, at the path where the loader looks for it.
fn add_libraries(archive: &mut Archive, programs: &[&Path]) -> Result<()> {
    let mut libraries = BTreeSet::new();
    for program in programs {
        let output = Command::new("ldd")
            .arg(program)
            .output()
            .context("cannot run ldd")?;
        libraries.extend(ldd_paths(&String::from_utf8_lossy(&output.stdout)));
    }
    let mut directories = BTreeSet::new();
    for library in &libraries {
        for directory in library
            .ancestors()
            .skip(1)
            .filter(|path| *path != Path::new("/"))
        {
            directories.insert(directory.to_owned());
        }
    }
    for directory in directories {
        archive.directory(&directory.to_string_lossy());
    }
    for library in libraries {
        archive.file(&library.to_string_lossy(), 0o755, &read(&library)?);
    }
    Ok(())
}

/// The absolute paths in ldd's answer.
fn ldd_paths(text: &str) -> BTreeSet<PathBuf> {
    text.split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

/// Adds the modules in loading order, which the file `modules/order` lists.
fn add_modules(archive: &mut Archive, modules: &Path, names: &[&str]) -> Result<()> {
    let files = module_files(&modules.join("kernel"))?;
    let mut order = Vec::new();
    for name in names {
        load(&files, name, &mut order)?;
    }
    let list: String = order
        .iter()
        .map(|(name, _)| format!("{name}.ko\n"))
        .collect();
    archive.file("modules/order", 0o644, list.as_bytes());
    for (name, content) in order {
        archive.file(&format!("modules/{name}.ko"), 0o644, &content);
    }
    Ok(())
}

/// Appends a module after its dependencies; one without a file is built into the kernel or not needed.
fn load(files: &[PathBuf], name: &str, order: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let name = name.replace('-', "_");
    if order.iter().any(|(loaded, _)| *loaded == name) {
        return Ok(());
    }
    let Some(path) = files.iter().find(|path| module_name(path) == name) else {
        return Ok(());
    };
    let content = read_module(path)?;
    for dependency in dependencies(&content) {
        load(files, &dependency, order)?;
    }
    order.push((name, content));
    Ok(())
}

fn module_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)
        .with_context(|| format!("cannot list {}", directory.display()))?
    {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(module_files(&path)?);
        } else if path.to_string_lossy().contains(".ko") {
            found.push(path);
        }
    }
    Ok(found)
}

/// `virtio_net` for `.../virtio_net.ko.xz`.
fn module_name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    file.split(".ko")
        .next()
        .unwrap_or_default()
        .replace('-', "_")
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return read(path),
    };
    let output = Command::new(tool)
        .arg("-dc")
        .arg(path)
        .output()
        .with_context(|| format!("cannot run {tool}"))?;
    if !output.status.success() {
        bail!("{tool} cannot unpack {}", path.display());
    }
    Ok(output.stdout)
}

/// The names after `depends=` in the module's information section.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = module[at + KEY.len()..]
        .split(|&byte| byte == 0)
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes through a temporary name, so that a reader never sees half a file, and only when the content differs.
fn write_if_changed(path: &Path, content: &[u8]) -> Result<()> {
    if std::fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    std::fs::write(&partial, content)
        .with_context(|| format!("cannot write {}", partial.display()))?;
    std::fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_is_understood() {
        let text = "\tlinux-vdso.so.1 (0x7ffe)\n\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x7f1)\n\t/lib64/ld.so (0x7f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld.so"].map(PathBuf::from);
        assert_eq!(ldd_paths(text), BTreeSet::from(expected));
    }

    #[test]
    fn module_names_and_dependencies_are_read() {
        assert_eq!(
            module_name(Path::new("/x/net/net-failover.ko.xz")),
            "net_failover"
        );
        assert_eq!(
            dependencies(b"ELF\0name=x\0depends=virtio_ring,virtio\0more"),
            ["virtio_ring", "virtio"]
        );
        assert_eq!(dependencies(b"ELF\0depends=\0"), Vec::<String>::new());
        assert_eq!(dependencies(b"ELF"), Vec::<String>::new());
    }

    #[test]
    fn the_command_line_carries_the_addresses() {
        let network = GuestNetwork {
            ip4: Some("10.0.0.2/24".into()),
            ip6: None,
        };
        let line = command_line(&network);
        assert!(line.ends_with(" godwit.ip4=10.0.0.2/24") && line.starts_with("console=ttyS0"));
    }
}
